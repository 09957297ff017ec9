//! When gradients leave: each layer's before the layer beneath it has run its backward.
//!
//! A mark on the input of every layer notes when that layer's backward is through. A recording sink
//! notes when gradients are handed over. Both write to one log.

use std::sync::Arc;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, TensorMetadata, backend_extension};
use burn::module::{Module, Param, Reparameterizer};
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::kind::BridgeTensor;
use burn::tensor::{Device, Int, Tensor, activation};
use parking_lot::Mutex;

use super::{DeviceGradient, GradientSink, GradientTap, Passes, TapTarget};

/// Sees every event of a backward pass, in order.
#[derive(Debug, Default)]
struct Log {
    id: u64,
    paths: Mutex<Vec<String>>,
    events: Mutex<Vec<String>>,
}

impl Log {
    fn new() -> Arc<Self> {
        static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1 << 40);
        let id = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Arc::new(Self {
            id,
            ..Default::default()
        })
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.events.lock())
    }
}

impl GradientSink for Log {
    fn id(&self) -> u64 {
        self.id
    }

    fn arrived(&self, slot: usize, gradient: DeviceGradient, _remaining: usize, scale: f32) {
        let elements = match gradient {
            DeviceGradient::Flex(gradient) => gradient.shape().num_elements(),
            #[cfg(feature = "cubecl-backend")]
            DeviceGradient::Cube(gradient) => gradient.shape().num_elements(),
        };
        assert!(elements > 0);
        assert_eq!(scale, 1.0);
        let path = self.paths.lock()[slot].clone();
        self.events.lock().push(path);
    }

    fn pass_began(&self, scale: Option<f32>) {
        assert_eq!(scale, None);
    }

    fn loss_scale(&self) -> f32 {
        unreachable!("no loss is scaled here")
    }

    fn ready(&self, _slot: usize, _tracked: bool) -> bool {
        true
    }

    fn moved(&self, _: usize, _: &Device) {}

    fn is_ahead(&self, _: usize) -> bool {
        false
    }

    fn newest(&self, _: usize, _: usize, base: BridgeTensor) -> BridgeTensor {
        base
    }
}

#[derive(Clone, Debug)]
struct Mark {
    log: Arc<Log>,
    name: String,
}

#[backend_extension(Flex, Cube: cfg(feature = "cubecl-backend"), Autodiff)]
trait MarkOps: Backend {
    fn mark(tensor: FloatTensor<Self>, mark: Mark) -> FloatTensor<Self> {
        let _ = mark;
        tensor
    }
}

impl MarkOps for Flex {}

#[cfg(feature = "cubecl-backend")]
impl MarkOps for burn_cubecl::Cube {}

impl<B: MarkOps, C: CheckpointStrategy> MarkOps for Autodiff<B, C> {
    fn mark(tensor: FloatTensor<Self>, mark: Mark) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Passed;

        impl<B: Backend> Backward<B, 1> for Passed {
            type State = Mark;

            fn backward(self, ops: Ops<Mark, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
                ops.state.log.events.lock().push(ops.state.name);
                unary::<B, _>(ops.parents, ops.node, grads, |grad| grad);
            }
        }

        let (primitive, guard) = tensor.into_parts();
        let passed = Backward::<B, 1>::prepare::<C>(Passed, [guard]);
        match passed.compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(mark, primitive),
            OpsKind::UnTracked(prep) => prep.finish(primitive),
        }
    }
}

fn mark<const D: usize>(x: Tensor<D>, log: &Arc<Log>, name: impl ToString) -> Tensor<D> {
    let mark = Mark {
        log: log.clone(),
        name: name.to_string(),
    };
    Tensor::from_dispatch(<Dispatch as MarkOps>::mark(x.into_dispatch(), mark))
}

/// Attaches taps that feed the log.
fn tapped<M: Module>(model: M, log: &Arc<Log>) -> M {
    struct Attach(Arc<Log>, Passes);

    impl Reparameterizer for Attach {
        type Reparam = GradientTap;

        fn reparameterize<const D: usize>(
            &mut self,
            path: &str,
            param: Param<Tensor<D>>,
        ) -> (Param<Tensor<D>>, Option<GradientTap>) {
            let mut paths = self.0.paths.lock();
            paths.push(path.to_string());
            let target = TapTarget::new(self.1.clone(), paths.len() - 1);
            (param, Some(GradientTap::new(target)))
        }
    }

    model.apply_reparameterization(Attach(log.clone(), Passes::of(log.clone())))
}

fn devices() -> Vec<Device> {
    vec![
        Device::flex().autodiff(),
        #[cfg(feature = "cpu")]
        Device::cpu().autodiff(),
    ]
}

/// Every event that begins with `prefix` happened, and before `mark`.
#[track_caller]
fn assert_before(events: &[String], prefix: &str, mark: &str) {
    let passed = events.iter().position(|event| event == mark).expect(mark);
    let handed: Vec<usize> = (0..events.len())
        .filter(|&i| events[i].starts_with(prefix))
        .collect();
    assert!(!handed.is_empty(), "{prefix} never left: {events:?}");
    assert!(
        handed.iter().all(|&at| at < passed),
        "{prefix} after {mark}: {events:?}"
    );
}

#[derive(Module, Debug)]
struct Chain {
    layers: Vec<Linear>,
}

impl Chain {
    const LAYERS: usize = 6;

    fn new(device: &Device, log: &Arc<Log>) -> Self {
        let layer = || LinearConfig::new(8, 8).init(device);
        tapped(
            Self {
                layers: (0..Self::LAYERS).map(|_| layer()).collect(),
            },
            log,
        )
    }

    fn loss(&self, log: &Arc<Log>, residual: bool, label: &str) -> Tensor<1> {
        let mut h = Tensor::<2>::ones([2, 8], &self.layers[0].weight.lazy_device());
        for (i, layer) in self.layers.iter().enumerate() {
            h = mark(h, log, format!("{label}{i}"));
            let out = layer.forward(h.clone()).tanh();
            h = if residual { h + out } else { out };
        }
        h.powf_scalar(2.0).mean()
    }

    #[track_caller]
    fn assert_order(events: &[String], label: &str) {
        // The input needs no gradient, so the lowest layer has no mark.
        for i in 1..Self::LAYERS {
            assert_before(
                events,
                &format!("layers.{i}.weight"),
                &format!("{label}{i}"),
            );
            assert_before(events, &format!("layers.{i}.bias"), &format!("{label}{i}"));
        }
        let gradients = events
            .iter()
            .filter(|event| event.starts_with("layers"))
            .count();
        assert_eq!(gradients, 2 * Self::LAYERS);
    }
}

#[test]
fn in_a_chain_of_layers() {
    for device in devices() {
        let log = Log::new();
        let model = Chain::new(&device, &log);
        for _ in 0..3 {
            model.loss(&log, false, "input ").backward();
            Chain::assert_order(&log.take(), "input ");
        }
    }
}

#[test]
fn in_a_residual_network() {
    for device in devices() {
        let log = Log::new();
        let model = Chain::new(&device, &log);
        for _ in 0..3 {
            model.loss(&log, true, "input ").backward();
            Chain::assert_order(&log.take(), "input ");
        }
    }
}

#[test]
fn on_a_device_that_recomputes_activations() {
    for device in devices() {
        let log = Log::new();
        let model = Chain::new(&device.gradient_checkpointing(), &log);
        for residual in [false, true] {
            model.loss(&log, residual, "input ").backward();
            Chain::assert_order(&log.take(), "input ");
        }
    }
}

#[test]
fn with_two_forwards_before_two_backwards() {
    for device in devices() {
        let log = Log::new();
        let model = Chain::new(&device, &log);
        for first_goes_first in [true, false] {
            let (a, b) = (model.loss(&log, false, "a"), model.loss(&log, true, "b"));
            let losses = if first_goes_first {
                [(a, "a"), (b, "b")]
            } else {
                [(b, "b"), (a, "a")]
            };
            for (loss, label) in losses {
                loss.backward();
                Chain::assert_order(&log.take(), label);
            }
        }
    }
}

#[test]
fn after_a_forward_that_is_never_run_backward() {
    for device in devices() {
        let log = Log::new();
        let model = Chain::new(&device, &log);
        for _ in 0..4 {
            drop(model.loss(&log, false, "dropped "));
            model.loss(&log, false, "input ").backward();
            Chain::assert_order(&log.take(), "input ");
        }
    }
}

#[test]
fn in_two_threads_that_train_at_once() {
    for device in devices() {
        let run = {
            let device = device.clone();
            move || {
                let log = Log::new();
                let model = Chain::new(&device, &log);
                let mut orders = vec![];
                for _ in 0..10 {
                    model.loss(&log, true, "input ").backward();
                    orders.push(log.take());
                }
                orders
            }
        };
        let alone = run();
        let threads: Vec<_> = (0..2).map(|_| std::thread::spawn(run.clone())).collect();
        for thread in threads {
            let orders = thread.join().unwrap();
            orders
                .iter()
                .for_each(|events| Chain::assert_order(events, "input "));
            assert_eq!(orders, alone);
        }
    }
}

#[derive(Module, Debug)]
struct Transformer {
    embedding: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
}

#[derive(Module, Debug)]
struct Block {
    norm: LayerNorm,
    attention: MultiHeadAttention,
    wide: Linear,
    narrow: Linear,
}

impl Block {
    fn new(device: &Device) -> Self {
        Self {
            norm: LayerNormConfig::new(8).init(device),
            attention: MultiHeadAttentionConfig::new(8, 2)
                .with_dropout(0.0)
                .init(device),
            wide: LinearConfig::new(8, 16).init(device),
            narrow: LinearConfig::new(16, 8).init(device),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let h = self.norm.forward(x.clone());
        let x = x + self.attention.forward(MhaInput::self_attn(h)).context;
        let h = activation::gelu(self.wide.forward(x.clone()));
        x + self.narrow.forward(h)
    }
}

/// Blocks of a transformer, and an embedding that is the head as well: the head's gradient leaves
/// first, the look-up's last.
#[test]
fn in_a_transformer_with_a_tied_embedding() {
    for device in devices() {
        let log = Log::new();
        let model = Transformer {
            embedding: EmbeddingConfig::new(7, 8).init(&device),
            blocks: (0..3).map(|_| Block::new(&device)).collect(),
            norm: LayerNormConfig::new(8).init(&device),
        };
        let model = tapped(model, &log);
        for _ in 0..2 {
            let tokens = Tensor::<2, Int>::from_ints([[1, 2, 3], [3, 4, 5]], &device);
            let mut h = mark(model.embedding.forward(tokens), &log, "embedded");
            for (i, block) in model.blocks.iter().enumerate() {
                h = block.forward(mark(h, &log, format!("input {i}")));
            }
            let h = mark(model.norm.forward(mark(h, &log, "top")), &log, "normed");
            let head = model.embedding.weight.val().transpose().unsqueeze::<3>();
            h.matmul(head).powf_scalar(2.0).mean().backward();

            let events = log.take();
            for i in 0..3 {
                assert_before(&events, &format!("blocks.{i}."), &format!("input {i}"));
            }
            assert_before(&events, "norm.", "top");
            let uses: Vec<usize> = (0..events.len())
                .filter(|&i| events[i] == "embedding.weight")
                .collect();
            let at = |name: &str| events.iter().position(|event| event == name).unwrap();
            assert_eq!(uses.len(), 2);
            assert!(uses[0] < at("normed"), "{events:?}");
            assert!(uses[1] > at("embedded"), "{events:?}");
        }
    }
}
