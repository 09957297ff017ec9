//! Rates between host and device, next to the best of them and to Burn's own `from_data` and
//! `into_data`.
//!
//! ```sh
//! cargo bench -p burn-zero-offload --bench transfer --features cuda,fusion -- [MIB] [RUNS]
//! ```
//!
//! Medians of 9 runs after one that does not count, for sizes from 64 KiB to 256 MiB unless MIB says
//! otherwise. The device is that of the first CubeCL backend compiled in. Flex has no link: there the
//! rows say what copying costs on the host.

#![allow(missing_docs)]

#[path = "common/device.rs"]
mod device;
#[path = "common/rates.rs"]
mod rates;

use rates::Way;

fn main() {
    let largest = device::argument(0, "MIB").unwrap_or(256) << 20;
    let runs = device::argument(1, "RUNS").unwrap_or(9);
    let device = device::device();
    println!("{device:?}, medians of {runs} runs");
    let rates = rates::measure(&device, &rates::sizes(largest), runs);
    let (up, down) = rates::best(&rates);
    let link = up > 0.0 && down > 0.0;
    match link {
        true => println!(
            "best: {:.3} GB/s up, {:.3} GB/s down\n",
            up / 1e9,
            down / 1e9
        ),
        false => println!("no link: the device's memory is the host's\n"),
    }
    println!("| way | KiB | us | GB/s | share of the best |\n|---|---:|---:|---:|---:|");
    for rate in &rates {
        let best = match rate.way {
            Way::UpPinned | Way::UpPageable | Way::UpBurn => Some(up),
            Way::DownPinned | Way::DownPageable | Way::DownBurn => Some(down),
            Way::Memcpy => None,
        };
        println!(
            "| {} | {} | {:.1} | {:.3} | {} |",
            rate.way.name(),
            rate.bytes >> 10,
            1e6 * rate.seconds,
            rate.per_second() / 1e9,
            best.filter(|_| link)
                .map_or("".into(), |best| format!("{:.2}", rate.per_second() / best)),
        );
    }
}
