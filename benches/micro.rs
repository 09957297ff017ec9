#![allow(missing_docs)]
use std::time::Instant;
use burn::tensor::bf16;
use burn_zero_offload::HostState;
use burn_zero_offload::optimize::rules::{Adam, WeightDecay};
use burn_zero_offload::optimize::*;
fn main() {
    let only = std::env::var("ONLY").ok();
    let rule = HostRule::new(Adam { beta_1: 0.9, beta_2: 0.999, epsilon: 1e-8, weight_decay: WeightDecay::Decoupled(0.01) });
    let n = 16384;
    let g: Vec<bf16> = (0..n).map(|i| bf16::from_f32(1e-3 * ((i % 97) as f32 / 97.0 - 0.5))).collect();
    for simd in [SimdLevel::Avx512, SimdLevel::Avx2] {
        for kept in StatePrecision::ALL {
            let name = format!("{simd:?}{kept:?}");
            if only.as_ref().is_some_and(|o| !name.contains(o)) { continue; }
            let mut state = HostState::zeroed(&rule, Precision::Bf16, kept, n);
            let mut image = DeviceImage::zeroed(Precision::Bf16, n);
            let step = TileStep::new(simd);
            let mut times = vec![];
            for t in 1..20 {
                let a = Instant::now();
                for k in 0..200u64 {
                    let update = rule.begin(t * 200 + k, 1e-4, GradientScaling::NONE);
                    let w = state.work(&update, GradientView::Bf16(&g), image.as_mut());
                    step.update(w.update, w.state, w.gradient, w.image);
                }
                times.push(a.elapsed().as_secs_f64());
            }
            times.sort_by(f64::total_cmp);
            println!("{name:24} {:.2} ns/16", times[times.len() / 2] / 200.0 / n as f64 * 16e9);
        }
    }
}
