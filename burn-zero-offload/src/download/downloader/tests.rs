use burn::tensor::{DType, Device, Tensor, TensorData};

use super::super::parcel::Arrived;
use super::*;
use crate::report::StepReport;

fn delivery(store: impl Fn(Arrived<'_>) -> Result<(), String> + Send + Sync + 'static) -> Delivery {
    Delivery {
        store: Box::new(store),
        settle: Box::new(|_| ()),
    }
}

const SLOTS: usize = 10_000;
const LEN: usize = 64;

fn gradient(device: &Device) -> DeviceGradient {
    let data = TensorData::new((0..LEN).map(|i| i as f32).collect::<Vec<_>>(), [LEN]);
    let tensor = Tensor::<1>::from_data(data, (device, DType::BF16));
    #[cfg(feature = "cpu")]
    if let Ok(primitive) = tensor.clone().try_into_primitive::<burn_cubecl::Cube>() {
        return cube::Resolve::resolve(primitive);
    }
    DeviceGradient::Flex(tensor.try_into_primitive::<Flex>().expect("a Flex tensor"))
}

#[cfg(feature = "cpu")]
mod cube {
    use burn_cubecl::CubeBackend;
    use burn_cubecl::tensor::CubeTensor;
    use burn_fusion::{FusionBackend, FusionTensor};

    use super::DeviceGradient;

    pub(super) trait Resolve {
        fn resolve(self) -> DeviceGradient;
    }

    impl Resolve for CubeTensor {
        fn resolve(self) -> DeviceGradient {
            DeviceGradient::Cube(Box::new(self))
        }
    }

    #[cfg(feature = "fusion")]
    impl Resolve for FusionTensor<<CubeBackend as FusionBackend>::FusionRuntime> {
        fn resolve(self) -> DeviceGradient {
            let client = self.client.clone();
            client.resolve_tensor_float::<CubeBackend>(self).resolve()
        }
    }
}

impl DeviceGradient {
    fn again(&self) -> Self {
        match self {
            Self::Flex(tensor) => Self::Flex(tensor.clone()),
            #[cfg(feature = "cubecl-backend")]
            Self::Cube(tensor) => Self::Cube(tensor.clone()),
        }
    }
}

#[test]
fn ten_thousand_small_gradients_need_at_most_a_hundred_transfers() {
    let devices = [
        Device::flex(),
        #[cfg(feature = "cpu")]
        Device::cpu(),
    ];
    for device in devices {
        let meter = Arc::new(Meter::new(StepReport::default()));
        let trace = Arc::new(Recorder::new(vec![]));
        let arrived: Arc<Mutex<Vec<u32>>> = Arc::new(Mutex::new(vec![0; SLOTS]));
        let deliver = {
            let arrived = arrived.clone();
            move |gradient: Arrived<'_>| {
                let expected = (0..LEN).map(|i| half::bf16::from_f32(i as f32).to_ne_bytes());
                assert!(gradient.bytes.iter().copied().eq(expected.flatten()));
                arrived.lock()[gradient.slot] += 1;
                Ok(())
            }
        };
        let downloader = Downloader::start(
            4 << 20,
            LEN * 2,
            delivery(deliver),
            (meter.clone(), trace, Boundaries::current()),
        )
        .unwrap();
        let gradient = gradient(&device);
        for slot in 0..SLOTS {
            downloader.hand_over(Handover {
                slot,
                precision: Precision::Bf16,
                remaining: 0,
                scale: 1.0,
                gradient: gradient.again(),
            });
        }
        downloader.finish().unwrap();
        assert_eq!(*arrived.lock(), vec![1; SLOTS]);
        let report = meter.report();
        assert_eq!(report.bytes_down, (SLOTS * LEN * 2) as u64);
        assert!(report.transfers_down <= 100, "{report}");
    }
}

/// A thread that waits for room must not wait for one that holds room in an open group and has nothing
/// more to hand over.
#[test]
fn an_open_group_does_not_keep_room_that_somebody_waits_for() {
    use crate::boundary::Boundary;
    use std::sync::mpsc::channel;

    let flex = |bytes: usize| {
        let tensor = Tensor::<1>::zeros([bytes / 4], (&Device::flex(), DType::F32));
        DeviceGradient::Flex(tensor.try_into_primitive::<Flex>().expect("a Flex tensor"))
    };
    let (open_gate, gate) = channel::<()>();
    let gate = Mutex::new(Some(gate));
    let sent: Arc<Mutex<Option<usize>>> = Arc::default();
    // Holds the reader at its first parcel.
    let hook = {
        let sent = sent.clone();
        move |boundary| {
            if let Boundary::Read { slot } = boundary
                && let Some(gate) = gate.lock().take()
            {
                *sent.lock() = Some(slot);
                gate.recv().expect("the gate opens");
            }
            Ok(())
        }
    };
    let boundaries = Boundaries::with(Arc::new(hook), Boundaries::current);
    let arrived: Arc<Mutex<Vec<usize>>> = Arc::default();
    let deliver = {
        let arrived = arrived.clone();
        move |gradient: Arrived<'_>| {
            arrived.lock().push(gradient.slot);
            Ok(())
        }
    };
    let trace = Arc::new(Recorder::new(vec![]));
    let meter = Arc::new(Meter::new(StepReport::default()));
    let downloader =
        Downloader::start(1000, 700, delivery(deliver), (meter, trace, boundaries)).unwrap();
    let downloader = Arc::new(downloader);
    let hand_over = |slot, bytes| Handover {
        slot,
        precision: Precision::F32,
        remaining: 0,
        scale: 1.0,
        gradient: flex(bytes),
    };
    downloader.hand_over(hand_over(0, 500));
    let (through, passed) = channel();
    std::thread::spawn({
        let (downloader, second) = (downloader.clone(), hand_over(1, 700));
        move || {
            // Sends the first, and waits: 500 + 700 is too much.
            downloader.hand_over(second);
            through.send(())
        }
    });
    while sent.lock().is_none() {
        std::thread::yield_now();
    }
    // Fits beside the first, but not beside the second.
    downloader.hand_over(hand_over(2, 400));
    open_gate.send(()).unwrap();
    let minute = Duration::from_secs(60);
    passed.recv_timeout(minute).expect("the second finds room");
    downloader.finish().unwrap();
    assert_eq!(*arrived.lock(), [0, 2, 1]);
}
