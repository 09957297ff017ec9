use super::*;
use crate::optimize::rules::{Adam, AmsGrad, WeightDecay};

const ADAM: Adam = Adam {
    beta_1: 0.9,
    beta_2: 0.999,
    epsilon: 1e-8,
    weight_decay: WeightDecay::None,
};

fn amsgrad() -> HostRule {
    HostRule::new(AmsGrad(ADAM))
}

fn full(rule: &HostRule, master: &[f32]) -> HostState {
    HostState::new(rule, Precision::F32, StatePrecision::Full, master)
}

fn saved<const N: usize>(time: Option<u64>, state: [Option<Vec<f32>>; N]) -> SavedState {
    SavedState {
        time,
        state: state.into(),
        scales: vec![None; N],
    }
}

fn values(len: usize, scale: f32) -> Vec<f32> {
    (0..len).map(|i| (i as f32 * 0.7).sin() * scale).collect()
}

#[test]
fn saved_state_comes_back_and_leaves_the_master_alone() {
    let rule = amsgrad();
    let mut state = full(&rule, &[1.0, 2.0]);
    state.time = 3;
    let kept = [[0.1, 0.2], [0.0, 0.0], [0.3, 0.4]].map(Vec::from);
    state.set_state(&kept, None);
    let copy = state.state();
    state.reset();
    assert_eq!(state.state(), vec![vec![0.0; 2]; 3]);
    let copy: [Option<Vec<f32>>; 3] = std::array::from_fn(|k| Some(copy[k].clone()));
    assert!(state.restore(&rule, saved(Some(3), copy)));
    assert_eq!(state.time, 3);
    assert_eq!(state.state(), kept);
    assert_eq!(state.master(), [1.0, 2.0]);
}

#[test]
fn state_of_another_length_is_refused_whole() {
    let rule = amsgrad();
    let mut state = full(&rule, &[1.0, 2.0]);
    let one = |len| Some(vec![1.0; len]);
    assert!(!state.restore(&rule, saved(Some(9), [one(2), one(3), None])));
    assert!(!state.restore(&rule, saved(Some(9), [one(2), None, one(2)])));
    assert_eq!((state.time, state.state()), (0, vec![vec![0.0; 2]; 3]));
}

#[test]
fn a_record_from_before_the_first_update_needs_no_state() {
    let rule = amsgrad();
    let mut state = full(&rule, &[1.0]);
    state.time = 5;
    state.set_state(&[vec![0.0], vec![0.5], vec![0.0]], None);
    assert!(state.restore(&rule, saved(Some(0), [None, None, None])));
    assert_eq!((state.time, state.state()), (0, vec![vec![0.0]; 3]));
}

#[test]
fn a_record_of_plain_adam_continues_as_amsgrad_from_its_second_moments() {
    let rule = amsgrad();
    let mut state = full(&rule, &[1.0]);
    let record = saved(None, [Some(vec![0.5]), Some(vec![0.25]), None]);
    assert!(state.restore(&rule, record));
    assert_eq!(state.state(), [[0.5], [0.25], [0.25]]);
    assert_eq!(state.time, 1, "it has seen an update");
}

/// Masters that are split come back bit for bit, in one piece and in several, and so does their image.
#[test]
fn every_precision_gives_its_masters_back() {
    let rule = HostRule::new(ADAM);
    let len = 1500;
    let master = values(len, 3.0);
    for kept in StatePrecision::ALL {
        let pieces = || Halves::new(vec![0..512, 512..1024, 1024..1500], |_| None);
        let mut state = HostState::in_pieces(&rule, Precision::Bf16, kept, len, pieces);
        state.set_master(&master);
        let back = state.master();
        for (&master, &back) in master.iter().zip(&back) {
            let bound = match kept {
                StatePrecision::Int8Master24 => master.abs() * 2f32.powi(-16),
                _ => 0.0,
            };
            assert!((master - back).abs() <= bound, "{kept}: {master} {back}");
        }
        let image = state.image();
        assert!(state.has_image(image.as_bytes()));
        assert_eq!(state.image_of(&back), image, "{kept}");
        assert!(!state.has_image(&image.as_bytes()[2..]));
        state.write_master(510, &[9.0; 4], None);
        assert_eq!(
            state.master_of(509..515),
            [back[509], 9.0, 9.0, 9.0, 9.0, back[514]]
        );
        assert!(!state.has_image(image.as_bytes()));
    }
}

/// acceptance.md, checkpoint 63: 8-bit and bf16 state saved and loaded is bit-exact, what follows
/// included.
#[test]
fn rounded_state_comes_back_from_what_was_saved() {
    let rule = HostRule::new(ADAM);
    let len = 1111;
    for kept in StatePrecision::ALL {
        let mut state = HostState::new(&rule, Precision::Bf16, kept, &values(len, 1.0));
        let noise = Some(Noise::new(5, 1, 9));
        let second = values(len, 1e-3).iter().map(|v| v * v).collect();
        state.set_state(&[values(len, 1e-2), second], noise);
        state.time = 9;
        let saved = SavedState {
            time: Some(state.time),
            state: state.state().into_iter().map(Some).collect(),
            scales: state.scales(),
        };
        let mut other = HostState::new(&rule, Precision::Bf16, kept, &values(len, 1.0));
        assert!(other.restore(&rule, saved));
        assert_eq!(other.state(), state.state(), "{kept}");
        assert_eq!(other.scales(), state.scales(), "{kept}");
    }
}

#[test]
fn a_record_in_f32_is_taken_to_nearest() {
    let rule = HostRule::new(ADAM);
    let len = 600;
    let (first, second) = (values(len, 1.0), vec![0.25; len]);
    let record = saved(Some(4), [Some(first.clone()), Some(second)]);
    let kept = StatePrecision::Int8Moments;
    let mut state = HostState::new(&rule, Precision::Bf16, kept, &vec![0.0; len]);
    assert!(state.restore(&rule, record));
    let state = state.state();
    for (a, b) in first.iter().zip(&state[0]) {
        assert!((a - b).abs() < 9e-3, "{a} {b}");
    }
    assert!(state[1].iter().all(|v| (v - 0.25).abs() < 3e-3));
}

#[test]
#[should_panic(expected = "does not bear rounding")]
fn a_rule_that_does_not_bear_rounding_is_refused() {
    HostState::new(
        &amsgrad(),
        Precision::Bf16,
        StatePrecision::Bf16Moments,
        &[1.0],
    );
}
