//! `init`: the state of a model moves to the host, taps and record mappers are attached.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, Param, ParamGroup, ParamId, Reparameterizer};
use burn::tensor::{AllocationProperty, DType, Device, FloatDType, Shape, Tensor};

use super::kept::Kept;
use super::scan::{Scan, scan};
use super::{Offload, OffloadOptimizerConfig, options};
use crate::capture::{GradientTap, Passes, TapTarget};
use crate::engine::{self, Engine, Slot};
use crate::error::OffloadError;
use crate::host::{self, Halves, HostState, Placement};
use crate::layout::SlotLayout;
use crate::optimize::{HostRule, Precision, StatePrecision};
use crate::upload::{self, AutodiffContext, StorageId, Target, UploadOptions};

pub(super) fn install<M: Module>(
    config: OffloadOptimizerConfig,
    model: M,
) -> Result<(M, Offload), OffloadError> {
    let OffloadOptimizerConfig {
        offload,
        default,
        groups,
        kept,
    } = config;
    let rules = Rules {
        default: default?,
        groups: groups
            .into_iter()
            .map(|(group, rule)| rule.map(|rule| (group, rule)))
            .collect::<Result<_, _>>()?,
        used: HashSet::new(),
    };
    let simd = options::simd(&offload)?;
    options::check(&offload)?;
    let scan = scan(&model)?;
    let Some(device) = &scan.device else {
        return Err(OffloadError::NothingToTrain);
    };
    let precision = choose_precision(offload.dtype, device)?;

    let placement = Placement::choose(offload.threads, options::on_a_gpu(device));
    let pool = host::pool(&placement).map_err(|error| OffloadError::Threads {
        reason: error.to_string(),
    })?;
    let pool = Arc::new(pool);
    let mut mover = Mover {
        rules,
        precision,
        kept: Kept::new(offload.state_precision, kept),
        upload: options::upload(&offload),
        staged: 0,
        pool: pool.clone(),
        full_precision: offload.full_precision.clone(),
        scan: &scan,
        path: Vec::new(),
        slots: Vec::new(),
        target: None,
        places: HashMap::new(),
        full_precision_used: false,
        error: None,
    };
    let model = model.map(&mut mover);
    let Mover {
        rules,
        slots,
        target,
        places,
        full_precision_used,
        error,
        kept,
        ..
    } = mover;
    if let Some(error) = error {
        return Err(error);
    }
    let (Some(target), Some(first)) = (target, slots.first()) else {
        return Err(OffloadError::NothingToTrain);
    };
    let unused = (0..rules.groups.len()).find(|index| !rules.used.contains(index));
    let unused = unused.map(|index| format!("number {index} (counted from 0)"));
    let not_kept = kept
        .unused()
        .map(|index| format!("of `with_state_precision` number {index}"));
    let unused = unused.or(not_kept);
    let no_head = offload.full_precision.is_some() && !full_precision_used;
    if let Some(group) = unused.or_else(|| no_head.then(|| "given to `with_full_precision`".into()))
    {
        let example = first.layout().path.clone();
        return Err(OffloadError::EmptyGroup { group, example });
    }
    let options = options::of_engine(&offload, simd, precision, rules.groups.len() + 1)?;
    let threads = (pool, placement.to_string());
    let engine = Arc::new(Engine::new(slots, &target, options, threads)?);
    let passes = Passes::of(engine.clone());
    let model = model.apply_reparameterization(Attacher {
        engine: engine.clone(),
        passes: passes.clone(),
        places,
    });
    let dtype = upload::to_dtype(precision);
    Ok((model, Offload::new(engine, passes, dtype)))
}

fn choose_precision(
    wanted: Option<FloatDType>,
    device: &Device,
) -> Result<Precision, OffloadError> {
    match wanted {
        Some(dtype) => match upload::to_precision(dtype.into()) {
            Some(precision) if device.supports_dtype(dtype) => Ok(precision),
            _ => Err(unsupported(dtype, device)),
        },
        None => Ok([Precision::Bf16, Precision::F16]
            .into_iter()
            .find(|&precision| device.supports_dtype(upload::to_dtype(precision)))
            .unwrap_or(Precision::F32)),
    }
}

fn unsupported(dtype: FloatDType, device: &Device) -> OffloadError {
    OffloadError::UnsupportedDType {
        device: format!("{device:?}"),
        dtype,
    }
}

struct Rules {
    default: HostRule,
    groups: Vec<(ParamGroup, HostRule)>,
    /// Groups that match some parameter.
    used: HashSet<usize>,
}

impl Rules {
    /// The number and the rule of the group that a parameter belongs to: the last that matches.
    fn of(&mut self, id: &ParamId, path: &str) -> (usize, HostRule) {
        let groups = self.groups.iter().enumerate();
        let matching = groups.filter(|(_, (group, _))| group.matches(id, Some(path)));
        let mut own = (0, &self.default);
        for (index, (_, rule)) in matching {
            self.used.insert(index);
            own = (index + 1, rule);
        }
        (own.0, own.1.clone())
    }
}

/// What `init` did with a parameter.
#[derive(Clone)]
enum Place {
    /// Its state is in this slot; records have the second shape.
    Slot(usize, Shape),
    /// Frozen: cast on the device, with the element type it had.
    Cast(DType),
}

/// Moves the state of each parameter and leaves its image on the device.
struct Mover<'a> {
    rules: Rules,
    precision: Precision,
    kept: Kept,
    upload: UploadOptions,
    /// Bytes of device memory on the host that upper halves have.
    staged: usize,
    pool: Arc<rayon::ThreadPool>,
    full_precision: Option<ParamGroup>,
    scan: &'a Scan,
    path: Vec<String>,
    slots: Vec<Slot>,
    /// Device of the first of them.
    target: Option<Target>,
    places: HashMap<String, Place>,
    /// Whether some parameter is kept in full precision.
    full_precision_used: bool,
    error: Option<OffloadError>,
}

impl ModuleMapper for Mover<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.path.join(".");
        if self.error.is_some() || self.scan.reparameterized.contains(&path) {
            return param;
        }
        // A lazy parameter announces the shape records have, which a mapper may turn into another.
        let record_shape = param.lazy_shape();
        // Consuming lets go of the old value: only what this function holds keeps it alive.
        let (id, value, mapper) = param.consume();
        let full = self
            .full_precision
            .as_ref()
            .is_some_and(|g| g.matches(&id, Some(&path)));
        self.full_precision_used |= full;
        let precision = if full { Precision::F32 } else { self.precision };
        let value = if value.is_require_grad() {
            let (group, rule) = self.rules.of(&id, &path);
            let kept = self.kept.of(&id, &path, precision, &rule);
            let kept = kept.unwrap_or_else(|error| {
                self.error = Some(error);
                StatePrecision::Full
            });
            if self.error.is_some() {
                return Param::from_mapped_value(id, value, mapper);
            }
            let shape = value.shape();
            let layout = SlotLayout {
                kept,
                path,
                id,
                shape,
                precision,
                rule,
                group,
            };
            self.offload(layout, record_shape, value)
        } else {
            self.cast(path, precision, value)
        };
        Param::from_mapped_value(id, value, mapper)
    }
}

impl Mover<'_> {
    /// Moves a parameter to a slot of its own. One that cannot be moved comes back as it is, with the
    /// reason in `error`.
    fn offload<const D: usize>(
        &mut self,
        layout: SlotLayout,
        record_shape: Shape,
        value: Tensor<D>,
    ) -> Tensor<D> {
        let (dtype, device) = (value.dtype(), value.device());
        let path = layout.path.clone();
        if upload::to_precision(dtype).is_none() {
            self.error = Some(OffloadError::UnsupportedParameter { path, dtype });
            return value;
        }
        let wanted = upload::to_dtype(layout.precision);
        if !device.supports_dtype(wanted) {
            self.error = Some(unsupported(wanted, &device));
            return value;
        }
        let context = AutodiffContext::of(&value);
        let master = match upload::read(value.clone()).and_then(upload::as_f32) {
            Ok(master) => master,
            Err(reason) => {
                self.error = Some(OffloadError::ReadWeights { path, reason });
                return value;
            }
        };
        let target = Target::of(&value);
        // The old value goes before the new one comes.
        upload::release(value);
        let mut state = self.state(&layout, &target);
        self.pool.install(|| state.set_master(&master));
        let weights = engine::send(&state, layout.shape.clone(), &device);
        self.target.get_or_insert(target);
        self.places
            .insert(path, Place::Slot(self.slots.len(), record_shape));
        self.slots
            .push(Slot::new(layout, state, StorageId::of(&weights)));
        context.restore(weights)
    }

    /// Host state for a parameter whose weights are on `target`.
    fn state(&mut self, layout: &SlotLayout, target: &Target) -> HostState {
        let (len, kept) = (layout.len(), layout.kept);
        let granularity = kept.granularity();
        let pieces = self.upload.pieces(target, len, granularity);
        let tiled = pieces.len() > 1;
        let halves = || {
            Halves::new(pieces, |bytes| {
                // Small weights go whole, which copies them anyway.
                let fits = self.upload.pins(self.staged + bytes);
                let buffer = (tiled && fits).then(|| target.staging(1, bytes))?.pop()?;
                if buffer.property() != AllocationProperty::Pinned {
                    return None;
                }
                self.staged += bytes;
                Some(buffer)
            })
        };
        HostState::in_pieces(&layout.rule, layout.precision, kept, len, halves)
    }

    /// Frozen weights and buffers meet the others in operations that do not promote.
    fn cast<const D: usize>(
        &mut self,
        path: String,
        precision: Precision,
        value: Tensor<D>,
    ) -> Tensor<D> {
        let dtype = value.dtype();
        if upload::to_precision(dtype).is_none_or(|from| from == precision) {
            return value;
        }
        self.places.insert(path, Place::Cast(dtype));
        let context = AutodiffContext::of(&value);
        context.restore(value.inner().cast(upload::to_dtype(precision)))
    }
}

/// Attaches taps, and the mappers through which records see master weights.
struct Attacher {
    engine: Arc<Engine>,
    passes: Passes,
    places: HashMap<String, Place>,
}

impl Reparameterizer for Attacher {
    type Reparam = GradientTap;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<GradientTap>) {
        let Some(place) = self.places.get(path).cloned() else {
            return (param, None);
        };
        // A parameter may have mappers already (a linear layer in column layout transposes): ours
        // go between them and the value.
        let (id, value, theirs) = param.consume();
        let dtype = value.dtype();
        let param = match &place {
            Place::Slot(_, shape) if *shape != value.shape() => loadable(id, shape.clone(), value),
            _ => Param::from_mapped_value(id, value, theirs.clone()),
        };
        let on_load = theirs.clone();
        match place {
            Place::Slot(slot, _) => {
                let (saver, loader) = (self.engine.clone(), self.engine.clone());
                let param = param
                    .save_mapper(move |value| theirs.on_save(saver.save(slot, value)))
                    .load_mapper(move |value| loader.load(slot, on_load.on_load(value)));
                let target = TapTarget::new(self.passes.clone(), slot);
                (param, Some(GradientTap::new(target)))
            }
            Place::Cast(original) => {
                let param = param
                    .save_mapper(move |value| theirs.on_save(value.cast(original)))
                    .load_mapper(move |value| on_load.on_load(value).cast(dtype));
                (param, None)
            }
        }
    }
}

/// A parameter that records can be loaded into although they have another shape than its value.
///
/// Burn compares the record with the value where there is one, and with the announced shape where
/// there is none yet; so the value waits in the initialiser, as it did before `init`.
fn loadable<const D: usize>(
    id: ParamId,
    record_shape: Shape,
    value: Tensor<D>,
) -> Param<Tensor<D>> {
    let device = value.device();
    let context = AutodiffContext::of(&value);
    let init = move |device: &Device, _: bool| {
        let moved = value.inner().to_device(&device.clone().inner());
        context.restore(moved)
    };
    Param::uninitialized(id, init, device, true, record_shape)
}
