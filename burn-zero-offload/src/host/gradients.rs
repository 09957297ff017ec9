//! Gradients on the host, from their arrival to the step that consumes them.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytemuck::AnyBitPattern;
use parking_lot::Mutex;

use super::AlignedBuffer;
use crate::optimize::{
    GradientScaling, GradientView, Judgement, Precision, SimdLevel, sum_of_squares,
};

/// What a round collected for one parameter.
#[derive(Debug)]
pub(crate) enum Gradient {
    /// One contribution, kept as it came: 2 bytes per element when it came in half precision.
    Single(Single),
    /// Several contributions, summed in `f32`.
    Sum(AlignedBuffer),
}

/// One contribution as it came.
#[derive(Debug)]
pub(crate) struct Single {
    precision: Precision,
    /// Aligned memory for the elements, native endian; the last bytes may be unused.
    buffer: AlignedBuffer,
    bytes: usize,
}

impl Single {
    fn as_bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.buffer)[..self.bytes]
    }
}

impl Gradient {
    /// Calls `use_view` with a view of the elements.
    pub(crate) fn with_view<R>(&self, use_view: impl FnOnce(GradientView<'_>) -> R) -> R {
        match self {
            Self::Sum(sum) => use_view(GradientView::F32(sum)),
            Self::Single(single) => view(single.as_bytes(), single.precision, use_view),
        }
    }

    /// Bytes of the elements.
    fn bytes(&self) -> usize {
        match self {
            Self::Single(single) => single.bytes,
            Self::Sum(sum) => size_of_val(&**sum),
        }
    }

    /// Bytes of the memory they are in.
    fn capacity(&self) -> usize {
        match self {
            Self::Single(single) => single.buffer.bytes(),
            Self::Sum(sum) => sum.bytes(),
        }
    }
}

/// Calls `use_view` with a view of the elements in `bytes`.
fn view<R>(bytes: &[u8], precision: Precision, use_view: impl FnOnce(GradientView<'_>) -> R) -> R {
    match precision {
        Precision::F32 => use_view(GradientView::F32(&elements(bytes))),
        Precision::F16 => use_view(GradientView::F16(&elements(bytes))),
        Precision::Bf16 => use_view(GradientView::Bf16(&elements(bytes))),
    }
}

/// Backends promise no alignment of what they read: borrow where it fits, copy where it does not.
fn elements<T: AnyBitPattern + bytemuck::NoUninit>(bytes: &[u8]) -> Cow<'_, [T]> {
    match bytemuck::try_cast_slice(bytes) {
        Ok(elements) => Cow::Borrowed(elements),
        Err(_) => Cow::Owned(bytemuck::pod_collect_to_vec(bytes)),
    }
}

/// What a round has collected for one parameter, and what is known about it.
#[derive(Debug)]
pub(crate) struct Collected {
    gradient: Gradient,
    /// The loss scale the values carry.
    scale: f32,
    /// Sum of squares of the values, once it is known.
    squares: Option<f64>,
    /// Counts its memory while it is out of the store.
    taken: Option<Taken>,
}

/// Bytes of memory that somebody has taken out of the store, counted while this lives.
#[derive(Debug)]
struct Taken(Arc<AtomicUsize>, usize);

impl Taken {
    fn of(count: &Arc<AtomicUsize>, bytes: usize) -> Self {
        count.fetch_add(bytes, Ordering::Relaxed);
        Self(count.clone(), bytes)
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Ordering::Relaxed);
    }
}

impl Collected {
    pub(crate) fn gradient(&self) -> &Gradient {
        &self.gradient
    }

    /// Adds the squares up, unless that is done.
    fn judge(&mut self, simd: SimdLevel, pool: Option<&rayon::ThreadPool>) -> Judgement {
        let none = GradientScaling::NONE;
        let sum = |view: GradientView<'_>| sum_of_squares(&view, none, simd, pool);
        let gradient = &self.gradient;
        let squares = self.squares.get_or_insert_with(|| gradient.with_view(sum));
        Judgement {
            squares: *squares,
            scale: self.scale,
        }
    }

    /// The values in `f32`, carrying the loss scale `scale`. Scales are powers of two: changing one
    /// is exact.
    fn into_sum(self, scale: f32) -> AlignedBuffer {
        let mut sum = match self.gradient {
            Gradient::Sum(sum) => sum,
            single => single.with_view(|view| {
                let mut sum = AlignedBuffer::zeroed(view.len());
                view.widen_into(0..view.len(), &mut sum);
                sum
            }),
        };
        let ratio = scale / self.scale;
        if ratio != 1.0 {
            sum.iter_mut().for_each(|value| *value *= ratio);
        }
        sum
    }
}

/// The gradients on the host, one place per slot.
///
/// Contributions add up in `f32`. [`seal`](Self::seal) closes a round: what is sealed is for the step
/// to take, what comes later is for the next round.
///
/// A place keeps the buffer it needed: from the second round on collecting allocates nothing, and the
/// pages are in memory already. Where the last round ended in a sum, the next one begins with one:
/// widening is exact, and 4 bytes per element are all it ever takes.
#[derive(Debug)]
pub(crate) struct GradientStore {
    slots: Vec<Mutex<Place>>,
    /// Bytes of memory that updates have taken.
    taken: Arc<AtomicUsize>,
    simd: SimdLevel,
}

#[derive(Debug, Default)]
struct Place {
    collected: Option<Collected>,
    sealed: Option<Collected>,
    /// What an earlier round left: its memory counts, not its values.
    spare: Option<Gradient>,
}

impl Place {
    /// Memory for a first contribution, of the kind that the last round needed.
    fn begin(&mut self, precision: Precision, bytes: usize) -> Gradient {
        let len = bytes / precision.size();
        match self.spare.take() {
            Some(Gradient::Sum(sum)) if sum.len() == len => Gradient::Sum(sum),
            Some(Gradient::Single(single))
                if single.precision == precision && single.bytes == bytes =>
            {
                Gradient::Single(single)
            }
            _ => Gradient::Single(Single {
                precision,
                buffer: AlignedBuffer::zeroed(bytes.div_ceil(size_of::<f32>())),
                bytes,
            }),
        }
    }

    fn held(&self) -> impl Iterator<Item = &Gradient> {
        let held = self.collected.iter().chain(&self.sealed);
        held.map(Collected::gradient)
    }
}

/// A gradient on its way into the store.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Contribution<'a> {
    /// Element type of `bytes`.
    pub(crate) precision: Precision,
    /// The elements, native endian, of any alignment.
    pub(crate) bytes: &'a [u8],
    /// The loss scale they carry.
    pub(crate) scale: f32,
}

/// Adds a contribution to what `place` has collected.
fn add_to(place: &mut Place, contribution: Contribution<'_>, prepare: impl FnOnce(&mut [u8])) {
    let Contribution {
        precision,
        bytes,
        scale,
    } = contribution;
    let gradient = match place.collected.take() {
        None => {
            let mut begun = place.begin(precision, bytes.len());
            match &mut begun {
                Gradient::Single(single) => {
                    let memory = bytemuck::cast_slice_mut(&mut single.buffer);
                    let memory = &mut memory[..bytes.len()];
                    prepare(memory);
                    memory.copy_from_slice(bytes);
                }
                Gradient::Sum(sum) => {
                    prepare(bytemuck::cast_slice_mut(sum));
                    view(bytes, precision, |view| {
                        view.widen_into(0..view.len(), sum);
                    });
                }
            }
            begun
        }
        Some(earlier) => {
            let mut sum = earlier.into_sum(scale);
            view(bytes, precision, |view| view.add_to(&mut sum));
            Gradient::Sum(sum)
        }
    };
    place.collected = Some(Collected {
        gradient,
        scale,
        squares: None,
        taken: None,
    });
}

impl GradientStore {
    /// Places for `slots` parameters, all empty.
    pub(crate) fn new(slots: usize, simd: SimdLevel) -> Self {
        Self {
            slots: (0..slots).map(|_| Mutex::default()).collect(),
            taken: Arc::default(),
            simd,
        }
    }

    /// Adds a contribution to what `slot` has. `prepare` sees the memory that is about to be written.
    pub(crate) fn add(
        &self,
        slot: usize,
        contribution: Contribution<'_>,
        prepare: impl FnOnce(&mut [u8]),
    ) {
        add_to(&mut self.slots[slot].lock(), contribution, prepare);
    }

    /// Adds the squares up of what `slot` has collected. Apart from [`add`](Self::add), which should not
    /// keep the memory that a contribution came in for longer than it must.
    ///
    /// The calling thread holds the slot's lock while `pool` works, and must not be one of its threads:
    /// as those never wait for a lock of the store, the work is always done.
    pub(crate) fn settle(&self, slot: usize, pool: &rayon::ThreadPool) {
        if let Some(collected) = &mut self.slots[slot].lock().collected {
            collected.judge(self.simd, Some(pool));
        }
    }

    /// Adds a contribution to a round that is sealed already.
    pub(crate) fn add_sealed(&self, slot: usize, contribution: Contribution<'_>) {
        let mut place = self.slots[slot].lock();
        let next_round = place.collected.take();
        place.collected = place.sealed.take();
        add_to(&mut place, contribution, |_| ());
        place.sealed = std::mem::replace(&mut place.collected, next_round);
    }

    /// Closes the round. Gradients that an earlier round left untaken are part of this one; returns
    /// of how many parameters there were some.
    pub(crate) fn seal(&self) -> usize {
        let mut carried = 0;
        for place in &self.slots {
            let mut place = place.lock();
            let collected = place.collected.take();
            let sealed = match (place.sealed.take(), collected) {
                (None, collected) => collected,
                (Some(left), None) => {
                    carried += 1;
                    Some(left)
                }
                (Some(left), Some(new)) => {
                    carried += 1;
                    let mut sum = left.into_sum(new.scale);
                    new.gradient.with_view(|view| view.add_to(&mut sum));
                    Some(Collected {
                        gradient: Gradient::Sum(sum),
                        scale: new.scale,
                        squares: None,
                        taken: None,
                    })
                }
            };
            place.sealed = sealed;
        }
        carried
    }

    /// What is known of the sealed gradients, by slot.
    pub(crate) fn judgements(&self) -> Vec<(usize, Judgement)> {
        let places = self.slots.iter().enumerate();
        let known = places.filter_map(|(slot, place)| {
            let judgement = place.lock().sealed.as_mut()?.judge(self.simd, None);
            Some((slot, judgement))
        });
        known.collect()
    }

    /// Calls `look` with the sealed gradient of `slot`.
    pub(crate) fn with_sealed<R>(
        &self,
        slot: usize,
        look: impl FnOnce(GradientView<'_>) -> R,
    ) -> Option<R> {
        let place = self.slots[slot].lock();
        let sealed = place.sealed.as_ref()?;
        Some(sealed.gradient.with_view(look))
    }

    /// Takes the sealed gradient of `slot`, with what is known of it.
    pub(crate) fn take(&self, slot: usize) -> Option<(Collected, Judgement)> {
        let mut sealed = self.slots[slot].lock().sealed.take()?;
        let judgement = sealed.judge(self.simd, None);
        sealed.taken = Some(Taken::of(&self.taken, sealed.gradient.capacity()));
        Some((sealed, judgement))
    }

    /// Gives the memory of a gradient back for the next round.
    pub(crate) fn recycle(&self, slot: usize, taken: Collected) {
        self.slots[slot].lock().spare = Some(taken.gradient);
    }

    /// Drops what is sealed.
    pub(crate) fn clear_sealed(&self) {
        for place in &self.slots {
            let mut place = place.lock();
            if let Some(sealed) = place.sealed.take() {
                place.spare = Some(sealed.gradient);
            }
        }
    }

    /// Drops everything.
    pub(crate) fn clear(&self) {
        self.clear_sealed();
        for place in &self.slots {
            let mut place = place.lock();
            if let Some(collected) = place.collected.take() {
                place.spare = Some(collected.gradient);
            }
        }
    }

    /// Bytes of gradients held now.
    pub(crate) fn bytes(&self) -> usize {
        let places = self.slots.iter().map(|place| place.lock());
        places
            .map(|place| place.held().map(Gradient::bytes).sum::<usize>())
            .sum()
    }

    /// Bytes of memory kept for gradients, in use now or not, those that updates have taken included.
    pub(crate) fn capacity(&self) -> usize {
        let places = self.slots.iter().map(|place| place.lock());
        let here = places.map(|place| {
            let kept = place.held().chain(&place.spare);
            kept.map(Gradient::capacity).sum::<usize>()
        });
        here.sum::<usize>() + self.taken.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests;
