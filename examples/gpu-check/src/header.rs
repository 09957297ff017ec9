//! What the table is about: the card, the day, the build.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::args::Setting;

/// The head of the table.
pub fn describe(setting: &Setting) -> String {
    let mut features = Vec::new();
    for (name, on) in [
        ("flex", cfg!(feature = "flex")),
        ("cpu", cfg!(feature = "cpu")),
        ("cuda", cfg!(feature = "cuda")),
        ("rocm", cfg!(feature = "rocm")),
        ("metal", cfg!(feature = "metal")),
        ("vulkan", cfg!(feature = "vulkan")),
        ("webgpu", cfg!(feature = "webgpu")),
        ("wgpu", cfg!(feature = "wgpu")),
        ("fusion", cfg!(feature = "fusion")),
    ] {
        if on {
            features.push(name);
        }
    }
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let size = if setting.small {
        "shrunk (numbers mean nothing)"
    } else {
        "full size"
    };
    format!(
        "# gpu-check, {} UTC\n\n\
         Device: {} ({}). Features: {}. Host: {cores} cores, {:.0} GiB. Burn 0.22, {size}.",
        date(since.map_or(0, |since| since.as_secs())),
        card(setting),
        setting.backend.name(),
        features.join(", "),
        host_bytes("MemTotal:").unwrap_or(0) as f64 / (1u64 << 30) as f64,
    )
}

/// The name of the card.
#[cfg(feature = "cubecl-backend")]
fn card(setting: &Setting) -> String {
    // The first look at the device: one that cannot be opened is for the first check to report.
    let identity = std::panic::catch_unwind(|| setting.device.identity());
    let identity = identity.ok().flatten();
    identity.map_or_else(|| "unknown".into(), |identity| identity.name)
}

/// The name of the card.
#[cfg(not(feature = "cubecl-backend"))]
fn card(_: &Setting) -> String {
    "host".into()
}

/// A line of `/proc/meminfo`, in bytes; `None` where there is no such file.
pub fn host_bytes(line: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let rest = text.lines().find_map(|l| l.strip_prefix(line))?;
    let kib: u64 = rest.trim().trim_end_matches("kB").trim().parse().ok()?;
    Some(kib * 1024)
}

/// Seconds since 1970 as a date (Howard Hinnant's `civil_from_days`).
fn date(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let z = days + 719_468;
    let (era, doe) = (z / 146_097, z % 146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let day = doy - (153 * mp + 2) / 5 + 1;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    let year = yoe + era * 400 + u64::from(month <= 2);
    let (hour, minute) = (rest / 3600, rest / 60 % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}")
}

#[cfg(test)]
mod tests {
    use super::date;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(date(0), "1970-01-01 00:00");
        assert_eq!(date(951_782_400), "2000-02-29 00:00");
        assert_eq!(date(1_796_083_199), "2026-11-30 23:59");
    }
}
