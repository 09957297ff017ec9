#![allow(missing_docs)]
use burn::module::*;
use burn::optim::*;
use burn::tensor::*;
use burn_zero_offload::*;
use std::time::Instant;
#[derive(Module, Debug)]
struct One {
    w: Param<Tensor<1>>,
}
fn main() {
    let d = Device::cpu();
    let bench = |name: &str, f: &dyn Fn() -> Tensor<2>| {
        let mut v = vec![];
        for _ in 0..14 {
            let t = Instant::now();
            let r = f();
            let _ = r.into_data().as_bytes()[0];
            v.push((t.elapsed().as_secs_f64() * 1e3) as u32);
        }
        println!("{name}: {v:?}");
    };
    let x = Tensor::<2>::ones([8, 6], &d);
    let w = Tensor::<2>::ones([6, 8], &d);
    let y = Tensor::<2>::ones([8, 8], &d);
    bench("matmul", &|| x.clone().matmul(w.clone()));
    bench("matmul T", &|| x.clone().transpose().matmul(y.clone()));
    bench("matmul bT", &|| y.clone().matmul(w.clone().transpose()));
    bench("sum_dim0", &|| x.clone().sum_dim(0));
    bench("mean", &|| x.clone().mean().reshape([1, 1]));
    bench("pow mean", &|| {
        x.clone().powf_scalar(2.0).mean().reshape([1, 1])
    });
    bench("expand", &|| {
        (Tensor::<1>::ones([1], &d).reshape([1, 1]).expand([8, 6]) * x.clone()) / 48.0
    });
    let dev = d.clone().autodiff();
    for shape in [1usize, 4] {
        for dt in [FloatDType::F32, FloatDType::BF16, FloatDType::F16] {
            let (m, h) = AdamWConfig::new()
                .with_offload(OffloadConfig::new().with_dtype(Some(dt)))
                .init(One {
                    w: Param::from_tensor(Tensor::zeros([shape], &dev)),
                })
                .unwrap();
            (m.w.val() * 2048.0).sum().backward();
            let mut o = h.optimizer();
            let l = (m.w.val() * 0.5).sum();
            let g = GradientsParams::from_grads(l.backward(), &m);
            println!("{:?} grads {:?}", h.flush(), h.memory());
            let m = o.step(1e-2, m, g);
            println!(
                "{shape} {dt:?} {:?}",
                m.w.val()
                    .inner()
                    .into_data()
                    .convert::<f32>()
                    .try_to_vec::<f32>()
            );
        }
    }
}
