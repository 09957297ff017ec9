//! The step written as a loop over elements: the reference of every fast path.

use super::{GradientScaling, Rule};

/// Update number `time`, counted from 1, of one parameter by `rule` at learning rate `lr`.
///
/// One thread, one element after the other, no vector instructions. Tiles, threads and instruction
/// sets of the real step change nothing in this result, not a bit.
///
/// # Panics
///
/// If the slices differ in length.
pub fn update<const N: usize, R: Rule<N>>(
    rule: &R,
    time: u64,
    lr: f64,
    scaling: GradientScaling,
    master: &mut [f32],
    state: &mut [Vec<f32>; N],
    gradient: &[f32],
) {
    elements::<N, R>(&rule.scalars(time, lr), scaling, master, state, gradient);
}

/// The same with the scalars of the update.
pub(super) fn elements<const N: usize, R: Rule<N>>(
    scalars: &R::Scalars,
    scaling: GradientScaling,
    master: &mut [f32],
    state: &mut [Vec<f32>; N],
    gradient: &[f32],
) {
    assert_eq!(master.len(), gradient.len(), "gradient and master weights");
    for values in state.iter() {
        assert_eq!(master.len(), values.len(), "state and master weights");
    }
    for (i, (p, &g)) in master.iter_mut().zip(gradient).enumerate() {
        let before = std::array::from_fn(|k| state[k][i]);
        let (weight, after) = R::update(scalars, *p, before, scaling.apply(g));
        *p = weight;
        for (values, value) in state.iter_mut().zip(after) {
            values[i] = value;
        }
    }
}
