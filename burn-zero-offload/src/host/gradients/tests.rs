use burn::tensor::bf16;

use super::*;

fn store(slots: usize) -> GradientStore {
    GradientStore::new(slots, SimdLevel::best())
}

fn add_scaled(store: &GradientStore, slot: usize, values: &[f32], scale: f32) {
    let values: Vec<bf16> = values.iter().map(|&v| bf16::from_f32(v)).collect();
    let contribution = Contribution {
        precision: Precision::Bf16,
        bytes: bytemuck::cast_slice(&values),
        scale,
    };
    store.add(slot, contribution, |memory| memory.fill(0xFF));
}

fn add(store: &GradientStore, slot: usize, values: &[f32]) {
    add_scaled(store, slot, values, 1.0);
}

fn pool() -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new()
        .num_threads(1)
        .build()
        .unwrap()
}

/// Closes the round and takes a gradient of it.
fn take(store: &GradientStore, slot: usize) -> Option<Collected> {
    store.seal();
    store.take(slot).map(|(taken, _)| taken)
}

fn values(taken: &Collected) -> Vec<f32> {
    taken.gradient.with_view(|view| {
        let mut out = vec![0.0; view.len()];
        view.widen_into(0..view.len(), &mut out);
        out
    })
}

#[test]
fn one_contribution_is_kept_as_it_came() {
    let store = store(2);
    add(&store, 1, &[1.0, 2.0, 3.0]);
    assert_eq!(store.bytes(), 6);
    assert!(take(&store, 0).is_none());
    let taken = take(&store, 1).unwrap();
    assert!(matches!(taken.gradient, Gradient::Single(_)));
    assert_eq!(values(&taken), [1.0, 2.0, 3.0]);
    assert!(take(&store, 1).is_none());
}

/// acceptance.md, gradient accumulation 25.
#[test]
fn further_contributions_are_summed_in_f32() {
    let store = store(1);
    add(&store, 0, &[2048.0]);
    for _ in 0..8 {
        add(&store, 0, &[0.5]);
    }
    assert_eq!(store.bytes(), 4);
    assert_eq!(values(&take(&store, 0).unwrap()), [2052.0]);
}

#[test]
fn cleared_gradients_are_gone() {
    let store = store(1);
    add(&store, 0, &[1.0]);
    store.clear();
    assert_eq!(store.bytes(), 0);
    assert!(take(&store, 0).is_none());
}

#[test]
fn later_rounds_use_the_memory_of_earlier_ones() {
    let store = store(1);
    let address = |taken: &Collected| {
        taken.gradient.with_view(|view| match view {
            GradientView::F32(sum) => sum.as_ptr() as usize,
            GradientView::F16(one) => one.as_ptr() as usize,
            GradientView::Bf16(one) => one.as_ptr() as usize,
        })
    };
    let round = |contributions: usize, value: f32| {
        for _ in 0..contributions {
            add(&store, 0, &[value; 40]);
        }
        let taken = take(&store, 0).unwrap();
        assert_eq!(values(&taken), [contributions as f32 * value; 40]);
        let (at, single) = (
            address(&taken),
            matches!(taken.gradient, Gradient::Single(_)),
        );
        store.recycle(0, taken);
        (at, single)
    };
    let first = round(1, 1.0);
    assert!(first.1);
    assert_eq!(round(1, 2.0), first);
    // 80 bytes of bf16, rounded up to cache lines; then 160 of f32, and nothing else.
    assert_eq!(store.capacity(), 128);
    let sum = round(2, 3.0);
    assert!(!sum.1);
    assert_eq!(store.capacity(), 192);
    assert_eq!([round(3, 4.0), round(1, 5.0)], [sum; 2]);
    assert_eq!(store.capacity(), 192);
}

#[test]
fn unaligned_bytes_are_read_too() {
    let bytes: Vec<u8> = [0u8].into_iter().chain(1.5f32.to_ne_bytes()).collect();
    assert_eq!(elements::<f32>(&bytes[1..]).as_ref(), [1.5]);
    let store = store(1);
    for _ in 0..2 {
        let contribution = Contribution {
            precision: Precision::F32,
            bytes: &bytes[1..],
            scale: 1.0,
        };
        store.add(0, contribution, |_| ());
    }
    assert_eq!(values(&take(&store, 0).unwrap()), [3.0]);
}

#[test]
fn squares_are_those_of_the_whole_sum() {
    let store = store(2);
    add(&store, 0, &[3.0, 0.0]);
    add(&store, 0, &[0.0, 4.0]);
    add(&store, 1, &[2.0]);
    store.settle(0, &pool());
    store.seal();
    let squares: Vec<_> = store.judgements().iter().map(|(_, j)| j.squares).collect();
    assert_eq!(squares, [25.0, 4.0]);
}

#[test]
fn squares_that_are_known_are_those_of_the_latest_sum() {
    let store = store(1);
    add(&store, 0, &[3.0]);
    store.settle(0, &pool());
    add(&store, 0, &[1.0]);
    store.seal();
    assert_eq!(store.judgements()[0].1.squares, 16.0);
}

#[test]
fn contributions_of_different_scales_add_up_in_the_last_ones() {
    let store = store(1);
    add_scaled(&store, 0, &[8.0], 4.0);
    add_scaled(&store, 0, &[32.0], 16.0);
    add_scaled(&store, 0, &[2.0], 1.0);
    let taken = take(&store, 0).unwrap();
    assert_eq!((values(&taken), taken.scale), (vec![6.0], 1.0));
    assert_eq!(taken.squares, Some(36.0));
}

#[test]
fn what_comes_after_the_seal_is_for_the_next_round() {
    let store = store(1);
    add(&store, 0, &[1.0]);
    assert_eq!(store.seal(), 0);
    add(&store, 0, &[5.0]);
    assert_eq!(values(&store.take(0).unwrap().0), [1.0]);
    assert_eq!(store.seal(), 0);
    assert_eq!(values(&store.take(0).unwrap().0), [5.0]);
}

#[test]
fn what_a_round_left_untaken_is_part_of_the_next() {
    let store = store(2);
    add_scaled(&store, 0, &[2.0], 2.0);
    add(&store, 1, &[7.0]);
    store.seal();
    add(&store, 0, &[3.0]);
    assert_eq!(store.seal(), 2);
    let taken = store.take(0).unwrap().0;
    assert_eq!((values(&taken), taken.squares), (vec![4.0], Some(16.0)));
    assert_eq!(values(&store.take(1).unwrap().0), [7.0]);
}

#[test]
fn a_late_contribution_joins_the_sealed_round_and_leaves_the_next_alone() {
    let store = store(1);
    add(&store, 0, &[1.0]);
    store.seal();
    add(&store, 0, &[9.0]);
    let late = [bf16::from_f32(2.0)];
    let contribution = Contribution {
        precision: Precision::Bf16,
        bytes: bytemuck::cast_slice(&late),
        scale: 1.0,
    };
    store.add_sealed(0, contribution);
    assert_eq!(values(&store.take(0).unwrap().0), [3.0]);
    store.seal();
    assert_eq!(values(&store.take(0).unwrap().0), [9.0]);
}

#[test]
fn dropping_the_sealed_round_keeps_what_came_later() {
    let store = store(1);
    add(&store, 0, &[1.0]);
    store.seal();
    add(&store, 0, &[2.0]);
    store.clear_sealed();
    assert!(store.take(0).is_none());
    assert_eq!(values(&take(&store, 0).unwrap()), [2.0]);
}

/// One thread in the pool, and others that settle and look at one slot: the pool must not wait for a lock
/// that somebody who waits for the pool holds.
#[test]
fn threads_that_share_a_slot_and_a_pool_all_get_through() {
    let (store, pool) = (store(1), pool());
    let values = vec![1.0; 1 << 18];
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..20 {
                    add(&store, 0, &values);
                    store.settle(0, &pool);
                    store.seal();
                    store.with_sealed(0, |view| {
                        let (none, simd) = (GradientScaling::NONE, SimdLevel::best());
                        assert!(sum_of_squares(&view, none, simd, Some(&pool)) > 0.0);
                    });
                }
            });
        }
    });
    store.seal();
    let sum = values.len() as f64 * 80.0 * 80.0;
    assert_eq!(store.judgements()[0].1.squares, sum);
}
