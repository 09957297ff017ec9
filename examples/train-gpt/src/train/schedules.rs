//! Runs whose updates are behind the training loop.

use burn::module::Module;

use super::tests::{config, corpus, losses};
use super::*;
use crate::config::Precision;
use crate::evaluate;
use crate::turns::turn;

fn delayed() -> TrainConfig {
    config()
        .with_schedule(Schedule::Delayed)
        .with_delay_warmup(Some(2))
}

#[test]
fn a_delayed_run_goes_on_as_one_that_finished_its_updates() {
    let _turn = turn();
    let corpus = corpus();
    let dir = tempfile::tempdir().unwrap();
    let [mut stopped, mut settled, mut whole] =
        [(); 3].map(|()| Run::start(delayed(), &corpus).unwrap());
    for _ in 0..3 {
        stopped.step(&corpus);
        settled.step(&corpus);
        whole.step(&corpus);
    }
    stopped.save(dir.path()).unwrap();
    settled.settle().unwrap();

    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let mut resumed = Run::resume(delayed(), &corpus, &checkpoint).unwrap();
    for run in [&mut resumed, &mut settled, &mut whole] {
        run.step(&corpus);
    }
    assert_eq!(losses(&resumed), losses(&settled));
    assert_ne!(losses(&whole), losses(&settled));
}

#[test]
fn what_is_evaluated_in_the_end_is_what_is_saved() {
    let _turn = turn();
    let corpus = corpus();
    for schedule in [Schedule::Overlapped, Schedule::Delayed] {
        let config = config()
            .with_dtype(Precision::F32)
            .with_schedule(schedule)
            .with_delay_warmup((schedule == Schedule::Delayed).then_some(2));
        let dir = tempfile::tempdir().unwrap();
        let mut run = Run::start(config.clone(), &corpus).unwrap();
        run.train(&corpus, dir.path()).unwrap();
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let saved = Run::resume(config.clone(), &corpus, &checkpoint).unwrap();
        let device = config.device.device().unwrap();
        let loss = |run: &Run| {
            let model = run.model.valid();
            evaluate::validation_loss(&model, &corpus, &config, &device).unwrap()
        };
        assert!(loss(&run).is_some());
        assert_eq!(loss(&run), loss(&saved));
    }
}

#[test]
fn overlapped_updates_change_no_loss_and_delayed_ones_do() {
    let _turn = turn();
    let corpus = corpus();
    let compensated = delayed().with_delay_compensation(Some(1e6));
    let overlapped = config().with_schedule(Schedule::Overlapped);
    let [synchronous, overlapped, delayed, compensated] =
        [config(), overlapped, delayed(), compensated].map(|config| {
            let mut run = Run::start(config.with_steps(6), &corpus).unwrap();
            for _ in 0..6 {
                run.step(&corpus);
            }
            run.state.history
        });
    assert_eq!(synchronous.first_difference(&overlapped), None);
    // The update of step 2 is the first that the next forward pass does not see.
    assert_eq!(synchronous.first_difference(&delayed), Some(3));
    // So step 3 has the first gradient to correct, and step 5 is the first to see what became of it.
    assert_eq!(delayed.first_difference(&compensated), Some(5));
}

/// The delay written out with plain Burn: gradients at one set of weights, updates of another.
#[test]
fn a_delayed_run_is_plain_adamw_with_gradients_one_update_old() {
    const WARMUP: u64 = 3;
    let _turn = turn();
    let corpus = corpus();
    let config = config()
        .with_steps(12)
        .with_lr(5e-3)
        .with_max_grad_norm(0.0);

    let offloaded = config
        .clone()
        .with_dtype(Precision::F32)
        .with_schedule(Schedule::Delayed)
        .with_delay_warmup(Some(WARMUP));
    let mut offloaded = Run::start(offloaded, &corpus).unwrap();

    let mut plain = Run::start(config.with_offload(false), &corpus).unwrap();
    let (mut seen, mut newest) = (plain.model.clone(), plain.model.clone());
    for step in 1..=12 {
        let config = &plain.state.config;
        let batch = corpus.batch(config.seed, step - 1, config.batch, config.context);
        let (inputs, targets) = batch.into_tensors(&plain.device);
        let loss = seen.loss(inputs, targets);
        let grads = GradientsParams::from_grads(loss.backward(), &seen);
        let lr = plain.scheduler.step();
        let before = newest.clone();
        newest = plain.optim.step(lr, newest, grads);
        seen = if step < WARMUP {
            newest.clone()
        } else {
            before
        };

        let (expected, loss) = (loss.into_scalar::<f32>(), offloaded.step(&corpus).loss);
        assert!((loss - expected).abs() < 1e-3, "{step}: {loss} {expected}");
    }
}
