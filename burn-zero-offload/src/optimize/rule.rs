//! What an update rule is, and how the step runs one it does not know.

use std::fmt;
use std::sync::Arc;

use super::step::{Begun, BegunUpdate};
use super::{GradientClip, GradientScaling, Noise};

/// How a weight follows from its gradient, one element at a time.
///
/// `N` is the number of `f32` values a rule keeps for each weight. They are zero before the first
/// update. The step calls [`update`](Self::update) in vectorised loops over tiles and threads; it sees
/// one element only, so the result cannot depend on how the work was cut. Write `a.mul_add(b, c)` for
/// every multiply-add that should be fused: compilers never fuse on their own, so the bits are the
/// same on every machine.
///
/// A rule of your own, here gradient descent with a running mean of gradients, gets a config as Burn's
/// optimizers have one:
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::Device;
/// use burn_zero_offload::optimize::{HostRule, Rule};
/// use burn_zero_offload::{OffloadConfig, OffloadError, WithOffload};
///
/// #[derive(Clone, Debug)]
/// struct MeanGradient {
///     beta: f32,
/// }
///
/// impl Rule<1> for MeanGradient {
///     /// Share of the old mean and of the new gradient, learning rate.
///     type Scalars = (f32, f32, f32);
///
///     const STATE: [&'static str; 1] = ["mean"];
///
///     fn scalars(&self, _time: u64, lr: f64) -> Self::Scalars {
///         (self.beta, 1.0 - self.beta, lr as f32)
///     }
///
///     #[inline(always)]
///     fn update(s: &Self::Scalars, p: f32, [mean]: [f32; 1], g: f32) -> (f32, [f32; 1]) {
///         let mean = s.0.mul_add(mean, s.1 * g);
///         (s.2.mul_add(-mean, p), [mean])
///     }
/// }
///
/// impl WithOffload for MeanGradient {
///     fn host_rule(&self) -> Result<HostRule, OffloadError> {
///         Ok(HostRule::new(self.clone()))
///     }
/// }
///
/// # fn main() -> Result<(), OffloadError> {
/// let model = LinearConfig::new(4, 2).init(&Device::flex().autodiff());
/// let rule = MeanGradient { beta: 0.9 };
/// let (model, offload) = rule.with_offload(OffloadConfig::new()).init(model)?;
/// assert_eq!(offload.memory().host_moments, 2 * 64); // one value a weight, whole cache lines
/// # let _ = model;
/// # Ok(())
/// # }
/// ```
pub trait Rule<const N: usize>: Clone + fmt::Debug + Send + Sync + 'static {
    /// What kinds of values the state holds, if it bears being rounded in every update: it may then be
    /// kept in less than `f32` (see [`StatePrecision`](super::StatePrecision)). `None`, the default,
    /// for state that does not: sums that only grow, say, or values that have to fit each other.
    const LOSSY: Option<[StateKind; N]> = None;

    /// What all elements of one update share, computed once.
    type Scalars: Send + Sync + 'static;

    /// Names of the state in optimizer records, dotted as Burn nests them.
    const STATE: [&'static str; N];

    /// Name of the update count in optimizer records.
    const TIME: &'static str = "time";

    /// The scalars of update number `time` of a parameter, counted from 1, at learning rate `lr`.
    /// Compute in `f64` and round once.
    fn scalars(&self, time: u64, lr: f64) -> Self::Scalars;

    /// The new weight and state of one element. `gradient` is finite: the loss scale and clipping have
    /// been applied. Mark it `#[inline(always)]`, or the loop around it will not be vectorised.
    fn update(
        scalars: &Self::Scalars,
        weight: f32,
        state: [f32; N],
        gradient: f32,
    ) -> (f32, [f32; N]);

    /// Completes the state of a record that lacks some of it; each vector has one value per weight.
    /// `None`, the default where anything is missing, refuses the record: the parameter then starts
    /// without state, as in Burn.
    fn complete(state: [Option<Vec<f32>>; N]) -> Option<[Vec<f32>; N]> {
        if state.iter().any(Option::is_none) {
            return None;
        }
        Some(state.map(Option::unwrap_or_default))
    }

    /// Compile loops for every way to keep rounded state, instead of one that it is converted for. Two to three
    /// times as fast; takes the compiler some seconds for each rule.
    const FUSED: bool = false;

    /// A rule that gives the same bits with these hyper-parameters and has less to do, if there is one.
    fn shorter(&self) -> Option<HostRule> {
        None
    }

    /// Values that Burn's records of this rule hold besides its state, computed from it.
    fn derived(_state: [&[f32]; N]) -> Vec<(&'static str, Vec<f32>)> {
        Vec::new()
    }
}

/// What the values of a rule's state may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateKind {
    /// Of both signs, such as a mean of gradients.
    Signed,
    /// Never negative, such as a mean of squares; used through its square root.
    NonNegative,
}

/// A rule with all its hyper-parameters, whatever its type.
#[derive(Clone)]
pub struct HostRule {
    rule: Arc<dyn AnyRule>,
    clip: Option<GradientClip>,
}

impl HostRule {
    /// Takes a rule as it is.
    pub fn new<const N: usize>(rule: impl Rule<N>) -> Self {
        rule.shorter().unwrap_or_else(|| Self {
            rule: Arc::new(Erased(rule)),
            clip: None,
        })
    }

    /// Clips the gradient of each parameter on its own, as the clipping of Burn's optimizer configs
    /// does. Comes after [`max_grad_norm`](crate::OffloadConfig#structfield.max_grad_norm).
    pub fn with_clipping(mut self, clip: Option<GradientClip>) -> Self {
        self.clip = clip;
        self
    }

    /// How each parameter's gradient is clipped on its own.
    pub fn clipping(&self) -> Option<GradientClip> {
        self.clip
    }

    /// Begins update number `time`, counted from 1, of a parameter at learning rate `lr`.
    pub fn begin(&self, time: u64, lr: f64, scaling: GradientScaling) -> Update {
        let begun = self.rule.begin(time, lr);
        Update {
            begun,
            scaling,
            noise: Noise::new(0, 0, time),
        }
    }

    /// See [`Rule::LOSSY`].
    pub fn lossy(&self) -> Option<&'static [StateKind]> {
        self.rule.lossy()
    }

    /// Names of the values kept for each weight.
    pub fn state(&self) -> &'static [&'static str] {
        self.rule.state()
    }

    pub(crate) fn time(&self) -> &'static str {
        self.rule.time()
    }

    pub(crate) fn complete(&self, state: Vec<Option<Vec<f32>>>) -> Option<Vec<Vec<f32>>> {
        self.rule.complete(state)
    }

    pub(crate) fn derived(&self, state: &[Vec<f32>]) -> Vec<(&'static str, Vec<f32>)> {
        self.rule.derived(state)
    }
}

impl fmt::Debug for HostRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.rule)?;
        self.clip.map_or(Ok(()), |clip| write!(f, " with {clip:?}"))
    }
}

/// One update of one parameter: scalars computed, elements still to come.
pub struct Update {
    pub(super) begun: Box<dyn BegunUpdate>,
    pub(super) scaling: GradientScaling,
    pub(super) noise: Noise,
}

impl Update {
    /// The bits that state in less than `f32` is rounded by; those of seed 0 and parameter 0 otherwise.
    pub fn with_noise(mut self, noise: Noise) -> Self {
        self.noise = noise;
        self
    }

    /// See [`with_noise`](Self::with_noise).
    pub(crate) fn noise(&self) -> Noise {
        self.noise
    }

    /// Applies the update as the plain loop of [`oracle`](super::oracle) does it.
    pub(crate) fn oracle(&self, master: &mut [f32], state: &mut [Vec<f32>], gradient: &[f32]) {
        self.begun.oracle(self.scaling, master, state, gradient);
    }
}

impl fmt::Debug for Update {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Update")
            .field("scaling", &self.scaling)
            .finish_non_exhaustive()
    }
}

trait AnyRule: fmt::Debug + Send + Sync {
    fn state(&self) -> &'static [&'static str];
    fn lossy(&self) -> Option<&'static [StateKind]>;
    fn time(&self) -> &'static str;
    fn begin(&self, time: u64, lr: f64) -> Box<dyn BegunUpdate>;
    fn complete(&self, state: Vec<Option<Vec<f32>>>) -> Option<Vec<Vec<f32>>>;
    fn derived(&self, state: &[Vec<f32>]) -> Vec<(&'static str, Vec<f32>)>;
}

struct Erased<R, const N: usize>(R);

impl<R: fmt::Debug, const N: usize> fmt::Debug for Erased<R, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<R: Rule<N>, const N: usize> AnyRule for Erased<R, N> {
    fn state(&self) -> &'static [&'static str] {
        &R::STATE
    }

    fn lossy(&self) -> Option<&'static [StateKind]> {
        const { &R::LOSSY }.as_ref().map(|kinds| &kinds[..])
    }

    fn time(&self) -> &'static str {
        R::TIME
    }

    fn begin(&self, time: u64, lr: f64) -> Box<dyn BegunUpdate> {
        Box::new(Begun::<R, N>(self.0.scalars(time, lr)))
    }

    fn complete(&self, state: Vec<Option<Vec<f32>>>) -> Option<Vec<Vec<f32>>> {
        Some(R::complete(state.try_into().ok()?)?.into())
    }

    fn derived(&self, state: &[Vec<f32>]) -> Vec<(&'static str, Vec<f32>)> {
        R::derived(std::array::from_fn(|k| &state[k][..]))
    }
}
