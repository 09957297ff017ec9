//! What a device and the process have in use.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use burn::tensor::Device;

/// Bytes the device has in use, all of them: queued work is done first.
pub fn in_use(device: &Device) -> u64 {
    device.sync().unwrap();
    usage(device)
}

fn usage(device: &Device) -> u64 {
    let usage = device.clone().inner().memory_pool_usage();
    usage.expect("CubeCL reports its memory").bytes_in_use
}

/// A thread that looks at the device's memory as often as it can.
pub struct Peak {
    highest: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Peak {
    pub fn watch(device: &Device) -> Self {
        let (highest, stop) = (
            Arc::new(AtomicU64::new(0)),
            Arc::new(AtomicBool::new(false)),
        );
        let thread = std::thread::spawn({
            let (highest, stop, device) = (highest.clone(), stop.clone(), device.clone());
            move || {
                while !stop.load(Ordering::Relaxed) {
                    highest.fetch_max(usage(&device), Ordering::Relaxed);
                    std::thread::sleep(std::time::Duration::from_micros(300));
                }
            }
        });
        Self {
            highest,
            stop,
            thread,
        }
    }

    pub fn end(self, device: &Device) -> u64 {
        let last = in_use(device);
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap();
        self.highest.load(Ordering::Relaxed).max(last)
    }
}

fn status(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Bytes of the process in memory.
pub fn resident() -> u64 {
    status("VmRSS:") * 1024
}

/// Threads of the process.
pub fn threads() -> u64 {
    status("Threads:")
}
