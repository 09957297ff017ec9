//! # burn-zero-offload
//!
//! ZeRO-Offload (Ren et al., USENIX ATC 2021, [arXiv 2101.06840]) for the [Burn] framework: the device
//! keeps half-precision weights and computes forward and backward; fp32 master weights, the moments
//! and the optimizer step live on the CPU. A model's state takes 2 bytes per parameter on the device
//! instead of 16.
//!
//! ```
//! use burn::nn::LinearConfig;
//! use burn::optim::{AdamWConfig, GradientsParams};
//! use burn::prelude::*;
//! use burn_zero_offload::{OffloadConfig, WithOffload};
//!
//! # fn main() -> Result<(), burn_zero_offload::OffloadError> {
//! let device = Device::flex().autodiff();
//! let model = LinearConfig::new(4, 1).init(&device); // any Burn module, unchanged
//!
//! let (mut model, offload) = AdamWConfig::new()
//!     .with_weight_decay(0.1)
//!     .with_offload(OffloadConfig::new()) // the one line
//!     .init(model)?;
//! let mut optim = offload.optimizer(); // a plain Burn `ModuleOptimizer`
//!
//! for _ in 0..3 {
//!     let input = Tensor::<2>::ones([8, 4], &device).cast(offload.dtype());
//!     let loss = model.forward(input).mean();
//!     let grads = GradientsParams::from_grads(loss.backward(), &model);
//!     model = optim.step(1e-3, model, grads);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # The route of the data
//!
//! ```text
//!        DEVICE                          |                     HOST
//!                                        |
//!   half weights --> forward             |
//!        ^              |                |
//!        |           backward            |
//!        |              | gradient of one use, as soon as it is complete
//!        |         (1) capture --------(2) download ------> (3) host
//!        |          tap in the           packs, a budget,     gradients of the round
//!        |          autodiff graph       a reader thread      master, moments (fp32)
//!        |                               |                       |  step()
//!        |                               |                  (4) optimize
//!        |                               |                    verdict, then the rule over tiles and threads
//!        +-------- (5) upload <----------|-------------------- half image of the master, tile by tile
//! ```
//!
//! Each station is a module; they meet only in the engine. A gradient leaves right after the
//! operation that used its weight has run backward, before the layer beneath does. What is on its way
//! is bounded by a budget ([`OffloadConfig::in_flight`](OffloadConfig#structfield.in_flight)), so the
//! device never holds the gradients of a whole model. The parameter's leaf keeps a placeholder of one
//! element, so Burn's containers, optimizers, schedulers and `Learner` work on unchanged. Updated
//! weights go into new buffers, tile by tile while the CPU step goes on; [`Offload::report`] counts
//! what moved and what was waited for.
//!
//! # Mixed precision
//!
//! A *round* is what happens between two updates: any number of backward passes, then the optimizer's
//! walk over the parameters. Before the first weight changes all gradients of the round are on the host,
//! in `f32` sums, and are judged together:
//!
//! ```text
//! g      = sum of the contributions of every use and pass / loss scale [/ passes, Accumulation::Mean]
//! norm   = sqrt(sum of g^2 over all parameters the optimizer updates), in f64
//! norm not finite: nothing changes, the loss scale backs off, the report says where it was
//! else   g <- g * min(1, max_grad_norm / norm), then the clipping of each optimizer config, then its rule
//! ```
//!
//! All factors are one multiplication in the step. The loss scale ([`Offload::scale`],
//! [`LossScaleConfig`]) is on by default in F16. The rules are those of Burn's `Adam`, `AdamW`, `Sgd`,
//! `Lion`, `AdaGrad` and `RmsProp`, and [your own](optimize::Rule). [`Offload::report`] tells what every
//! round came to; `OffloadConfig::with_verify(true)` checks every step.
//!
//! # Schedules
//!
//! [`Schedule`] says when updates run. By default `step` returns with the new weights. With
//! [`Schedule::ForwardOverlapped`] it returns after the verdict, and updates run behind the next forward pass, in
//! the order in which that uses the parameters: the same bits, with the CPU step hidden. [`Schedule::Delayed`] is
//! the paper's delayed parameter update, which hides it behind backward, too, at the price of gradients that miss one
//! update.
//!
//! Every `param.val()` waits for its own parameter, and so do records, validation copies and whatever else
//! reads weights; [`Offload::flush`] waits for all of them. [`Offload::trace`] is the timeline of it all, for
//! Perfetto or as a picture; [`StepReport`] says how much of the updates was exposed, and what was waited for.
//!
//! # What holds
//!
//! * Results do not depend on threads, tiles and instruction sets, also where state is rounded at random, and a
//!   run that is resumed from records is the run that was not stopped.
//! * In f32 the weights follow Burn's own optimizers to 1e-6, and are the bits of a plain loop over the
//!   gradients of every use.
//! * No weight changes before every gradient of the round is on the host and found to be finite.
//! * Value semantics: clones of a model keep their values. The next step starts from the values of
//!   the model it is given, also if they were edited, or come from an older clone.
//! * Records hold fp32 masters and move between plain and offloaded models; optimizer records are
//!   interchangeable with those of Burn's own optimizers, and carry the loss scale.
//! * Parameters without a gradient in a round do not move; frozen ones take no host memory.
//!
//! # Memory
//!
//! Bytes per parameter with weights in bf16 or f16; [`Offload::memory`] reports them.
//!
//! | | plain Burn AdamW in f32 | offloaded, device | offloaded, host |
//! |---|---|---|---|
//! | weights | 4 | 2 | 4 (master) |
//! | gradients | 4 | those in flight | 2, or 4 where a round has several passes |
//! | moments | 8 | 0 | 8, or 4, or 2.1 |
//! | AMSGrad, if used | 4 | 0 | 4 |
//!
//! In place of the moments SGD keeps nothing, or 4 with momentum; Lion and AdaGrad keep 4, RMSProp 4 to
//! 12.
//!
//! [`StatePrecision`] says what masters and moments are kept in: exactly by default, in bf16 or 8 bits for less
//! memory and a faster step, for the whole model or for groups. With weights in bf16 the masters are split: the
//! device's weight is the upper half of the master and the host adds the lower one, so nothing is kept
//! twice and uploads are sent from where the masters are.
//!
//! # Features
//!
//! `flex` (default), `cpu`, `cuda`, `rocm`, `metal`, `vulkan`, `webgpu`, `wgpu` and `fusion` are those
//! of Burn. Flex is always compiled: records hold master weights as Flex tensors. `train` adds
//! `InPlace`, which spares the second handle to the weights that burn-train's `Learner` keeps, and
//! `OffloadMetric`, which shows loss scale, gradient norm and skipped steps on its dashboard.
//!
//! # Failures
//!
//! What a correct program can meet is an [`OffloadError`]. Burn's optimizer and record interfaces
//! return no errors; one that happens there becomes a panic with the same sentence. A failed download
//! is noticed before any weight changes; [`Offload::flush`] reports it before `step` does. A panic in a
//! thread that reads gradients, updates or sends weights is caught and reported the same way. An update behind the
//! training loop that fails is told to whoever meets its parameter next; older clones of the model and records go
//! on.
//!
//! [arXiv 2101.06840]: https://arxiv.org/abs/2101.06840
//! [Burn]: https://burn.dev

mod boundary;
mod capture;
mod config;
mod download;
mod engine;
mod error;
mod host;
#[cfg(feature = "train")]
mod in_place;
mod kernels;
mod layout;
#[cfg(feature = "train")]
mod metrics;
pub mod optimize;
mod optimizer;
mod panics;
mod rank;
mod report;
mod upload;

pub use config::{Accumulation, DynamicLossScaleConfig, LossScaleConfig, OffloadConfig, Schedule};
pub use error::OffloadError;
pub use host::HostState;
#[cfg(feature = "train")]
pub use in_place::InPlace;
#[cfg(feature = "train")]
pub use metrics::OffloadMetric;
pub use optimize::SimdLevel;
pub use optimizer::{Offload, OffloadOptimizerConfig, WithOffload};
pub use report::{
    GroupReport, Lane, LongestWait, MemoryReport, Outcome, Overflow, Span, StatePrecision,
    StepReport, Trace, WaitedFor, Work,
};

#[cfg(test)]
mod fault_tests;
