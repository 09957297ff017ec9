//! Rates between host and device: pinned and pageable memory, and what Burn's own tensors reach.
//!
//! Part of `benches/transfer.rs` and of the example `gpu-check`.

use std::hint::black_box;
use std::time::Instant;

#[cfg(feature = "cubecl-backend")]
use burn::tensor::TensorData;
use burn::tensor::{Device, Tensor};

/// How bytes travel.
#[cfg_attr(not(feature = "cubecl-backend"), allow(dead_code))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// From pinned memory into a buffer that is there.
    UpPinned,
    /// The same from ordinary memory; CubeCL copies it to pinned memory first, up to 100 MB.
    UpPageable,
    /// `Tensor::from_data`.
    UpBurn,
    /// Into the memory CubeCL reads into: pinned where the device has it.
    DownPinned,
    /// The same and a copy to ordinary memory.
    DownPageable,
    /// `Tensor::into_data`, looked at.
    DownBurn,
    /// From ordinary memory to ordinary memory: where the device is the host.
    Memcpy,
}

impl Way {
    /// As a table names it.
    pub fn name(self) -> &'static str {
        match self {
            Self::UpPinned => "up, pinned",
            Self::UpPageable => "up, pageable",
            Self::UpBurn => "up, Burn's from_data",
            Self::DownPinned => "down, pinned",
            Self::DownPageable => "down, pageable",
            Self::DownBurn => "down, Burn's into_data",
            Self::Memcpy => "memcpy on the host (no link)",
        }
    }

    fn is_up(self) -> bool {
        matches!(self, Self::UpPinned | Self::UpPageable | Self::UpBurn)
    }
}

/// A measured transfer.
#[derive(Clone, Copy, Debug)]
pub struct Rate {
    /// How the bytes travelled.
    pub way: Way,
    /// How many.
    pub bytes: usize,
    /// How long that took.
    pub seconds: f64,
}

impl Rate {
    /// Bytes per second.
    pub fn per_second(&self) -> f64 {
        self.bytes as f64 / self.seconds
    }
}

/// The best rate up and the best rate down, in bytes per second; 0 where nothing was measured.
pub fn best(rates: &[Rate]) -> (f64, f64) {
    let best = |up| {
        let rates = rates
            .iter()
            .filter(|r| r.way != Way::Memcpy && r.way.is_up() == up);
        rates.map(Rate::per_second).fold(0.0, f64::max)
    };
    (best(true), best(false))
}

/// The median of what `run` says it took, after one run that does not count.
fn median(runs: usize, mut run: impl FnMut() -> f64) -> f64 {
    run();
    let mut seconds: Vec<f64> = (0..runs.max(1)).map(|_| run()).collect();
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

/// Sizes from 64 KiB to `largest` bytes, four times as much each.
pub fn sizes(largest: usize) -> Vec<usize> {
    let sizes = std::iter::successors(Some(64 << 10), |size| Some(size * 4));
    sizes
        .take_while(|size| *size <= largest.max(64 << 10))
        .collect()
}

/// Measures all ways of `device` for each size.
pub fn measure(device: &Device, sizes: &[usize], runs: usize) -> Vec<Rate> {
    let mut rates = Vec::new();
    for &bytes in sizes {
        let mut add = |way, seconds| {
            rates.push(Rate {
                way,
                bytes,
                seconds,
            })
        };
        #[cfg(feature = "cubecl-backend")]
        if let Some(client) = client(device) {
            for (way, seconds) in cube::measure(&client, bytes, runs) {
                add(way, seconds);
            }
            add(Way::UpBurn, up(device, bytes, runs));
            add(Way::DownBurn, down(device, bytes, runs));
            continue;
        }
        let (from, mut to) = (vec![1u8; bytes], vec![0u8; bytes]);
        let copy = || {
            let started = Instant::now();
            to.copy_from_slice(black_box(&from));
            black_box(&to);
            started.elapsed().as_secs_f64()
        };
        add(Way::Memcpy, median(runs, copy));
        // Nothing to measure the other way: `from_data` takes the values over.
        add(Way::DownBurn, down(device, bytes, runs));
    }
    rates
}

/// `Tensor::from_data` of values that are there already.
#[cfg(feature = "cubecl-backend")]
fn up(device: &Device, bytes: usize, runs: usize) -> f64 {
    median(runs, || {
        let len = bytes / size_of::<f32>();
        let data = TensorData::new(vec![1f32; len], [len]);
        let started = Instant::now();
        let tensor = Tensor::<1>::from_data(data, device);
        finish(device);
        let seconds = started.elapsed().as_secs_f64();
        drop(black_box(tensor));
        seconds
    })
}

/// `Tensor::into_data` of a tensor that is computed already.
fn down(device: &Device, bytes: usize, runs: usize) -> f64 {
    let tensor = Tensor::<1>::ones([bytes / size_of::<f32>()], device);
    finish(device);
    median(runs, || {
        let tensor = tensor.clone();
        let started = Instant::now();
        let data = tensor.into_data();
        // Reading may be left for later: look at both ends.
        let all = data.as_bytes();
        black_box((all.first(), all.last()));
        started.elapsed().as_secs_f64()
    })
}

fn finish(device: &Device) {
    device
        .sync()
        .expect("the device does what it was given to do");
}

#[cfg(feature = "cubecl-backend")]
#[allow(unused_imports)]
pub use cube::client;

#[cfg(feature = "cubecl-backend")]
mod cube {
    use std::time::Instant;

    use burn::backend::TensorMetadata;
    use burn::tensor::{Bytes, Device, Tensor, read_sync};
    use cubecl::client::Client;

    use super::{Way, median};

    /// The CubeCL client of `device`, if it is a CubeCL device.
    pub fn client(device: &Device) -> Option<Client> {
        let tensor = Tensor::<1>::zeros([1], device);
        let primitive = tensor.try_into_primitive::<burn_cubecl::Cube>().ok()?;
        Some(primitive.device().client())
    }

    pub fn measure(client: &Client, bytes: usize, runs: usize) -> [(Way, f64); 4] {
        let buffer = client.create(Bytes::from_elems(vec![1u8; bytes]));
        let finish = || read_sync(client.sync()).expect("the device copies");
        finish();
        let up = |pinned: bool| {
            median(runs, || {
                let mut source = Bytes::from_elems(vec![2u8; bytes]);
                if pinned {
                    client.staging([&mut source].into_iter(), false);
                }
                finish();
                let started = Instant::now();
                client.write(&buffer, source);
                finish();
                started.elapsed().as_secs_f64()
            })
        };
        let mut ordinary = vec![0u8; bytes];
        let mut down = |pinned: bool| {
            median(runs, || {
                let started = Instant::now();
                let read = client
                    .read_one(buffer.clone())
                    .expect("the buffer can be read");
                if !pinned {
                    ordinary.copy_from_slice(&read);
                }
                started.elapsed().as_secs_f64()
            })
        };
        [
            (Way::UpPinned, up(true)),
            (Way::UpPageable, up(false)),
            (Way::DownPinned, down(true)),
            (Way::DownPageable, down(false)),
        ]
    }
}
