use burn::module::{Module, ParamGroup};
use burn::optim::{AdaGradConfig, AdamConfig, AdamWConfig, LionConfig, RmsPropConfig, SgdConfig};

use super::{Offload, install, rule};
use crate::config::OffloadConfig;
use crate::error::OffloadError;
use crate::optimize::{HostRule, StatePrecision};

/// Optimizer configs whose step can run on the CPU: those of Burn that update every element on its own,
/// and your own (see [`Rule`](crate::optimize::Rule)).
///
/// ```
/// use burn::optim::AdamWConfig;
/// use burn_zero_offload::{OffloadConfig, WithOffload};
///
/// let optimizer = AdamWConfig::new().with_weight_decay(0.1).with_offload(OffloadConfig::new());
/// ```
pub trait WithOffload: Sized {
    /// The update rule this config describes, with its clipping.
    ///
    /// # Errors
    ///
    /// [`OffloadError::OutOfRange`] for a value that cannot work, [`OffloadError::Config`] if the
    /// config has an option this version does not know.
    fn host_rule(&self) -> Result<HostRule, OffloadError>;

    /// Moves the optimizer, its state and the master weights to the CPU.
    ///
    /// All options of the config keep their meaning.
    fn with_offload(self, config: OffloadConfig) -> OffloadOptimizerConfig {
        OffloadOptimizerConfig {
            offload: config,
            default: self.host_rule(),
            groups: Vec::new(),
            kept: Vec::new(),
        }
    }
}

macro_rules! with_offload {
    ($($config:ty => $rule:path),* $(,)?) => {
        $(impl WithOffload for $config {
            fn host_rule(&self) -> Result<HostRule, OffloadError> {
                $rule(self)
            }
        })*
    };
}

with_offload! {
    AdamWConfig => rule::adamw,
    AdamConfig => rule::adam,
    SgdConfig => rule::sgd,
    LionConfig => rule::lion,
    AdaGradConfig => rule::adagrad,
    RmsPropConfig => rule::rms_prop,
}

/// An optimizer about to be offloaded, made by [`WithOffload::with_offload`].
#[derive(Clone, Debug)]
pub struct OffloadOptimizerConfig {
    pub(super) offload: OffloadConfig,
    pub(super) default: Result<HostRule, OffloadError>,
    pub(super) groups: Vec<(ParamGroup, Result<HostRule, OffloadError>)>,
    pub(super) kept: Vec<(ParamGroup, StatePrecision)>,
}

impl OffloadOptimizerConfig {
    /// Gives the parameters of `group` an optimizer of their own, of whatever kind; what `config` leaves
    /// out has Burn's defaults. A parameter in several groups follows the last one added.
    ///
    /// No weight decay on biases and norms:
    ///
    /// ```
    /// use burn::module::ParamGroup;
    /// use burn::optim::AdamWConfig;
    /// use burn_zero_offload::{OffloadConfig, WithOffload};
    ///
    /// let optimizer = AdamWConfig::new()
    ///     .with_weight_decay(0.1)
    ///     .with_offload(OffloadConfig::new())
    ///     .with_group(
    ///         ParamGroup::from_any_predicates(vec!["bias", "norm"]),
    ///         AdamWConfig::new().with_weight_decay(0.0),
    ///     );
    /// ```
    pub fn with_group(mut self, group: ParamGroup, config: impl WithOffload) -> Self {
        self.groups.push((group, config.host_rule()));
        self
    }

    /// Keeps master weights and state of the parameters of `group` as `precision` says, whatever
    /// [`OffloadConfig::state_precision`](OffloadConfig#structfield.state_precision) does. A parameter in
    /// several groups follows the last one added. Independent of [`with_group`](Self::with_group).
    ///
    /// 8-bit moments, but not for the embedding, whose rare tokens have small gradients:
    ///
    /// ```
    /// use burn::module::ParamGroup;
    /// use burn::optim::AdamWConfig;
    /// use burn_zero_offload::{OffloadConfig, StatePrecision, WithOffload};
    ///
    /// let config = OffloadConfig::new().with_state_precision(Some(StatePrecision::Int8Moments));
    /// let optimizer = AdamWConfig::new()
    ///     .with_offload(config)
    ///     .with_state_precision(
    ///         ParamGroup::from_predicate("embedding"),
    ///         StatePrecision::Bf16Moments,
    ///     );
    /// ```
    pub fn with_state_precision(mut self, group: ParamGroup, precision: StatePrecision) -> Self {
        self.kept.push((group, precision));
        self
    }

    /// Offloads `model`: its trainable float parameters go to the host in `f32`, the device keeps
    /// them in the configured element type, and their gradients will leave it during backward.
    ///
    /// Parameters are moved one at a time, so that the device never holds more than the weights in
    /// their new type and one parameter in its old. Lazily initialised parameters are initialised
    /// here. Frozen float parameters and buffers are cast too, since the weights they meet are, but
    /// have no copy on the host; the frozen base of a LoRA adapter stays as it is.
    ///
    /// # Returns
    ///
    /// The model to train, of the same type, and the handle to its host side.
    ///
    /// # Errors
    ///
    /// If the model cannot be offloaded or an option cannot be honoured; [`OffloadError`] lists the
    /// reasons. The model is consumed either way.
    pub fn init<M: Module>(self, model: M) -> Result<(M, Offload), OffloadError> {
        install::install(self, model)
    }
}
