//! Gradients on the host, from their arrival to the step that consumes them.

use std::borrow::Cow;

use bytemuck::AnyBitPattern;
use parking_lot::Mutex;

use super::AlignedBuffer;
use crate::optimize::{GradientView, Precision};

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

/// The gradients of the round that is being collected, one place per slot.
///
/// A place keeps the buffer it needed: from the second round on collecting allocates nothing, and the
/// pages are in memory already. Where the last round ended in a sum, the next one begins with one:
/// widening is exact, and 4 bytes per element are all it ever takes.
#[derive(Debug)]
pub(crate) struct GradientStore {
    slots: Vec<Mutex<Place>>,
}

#[derive(Debug, Default)]
struct Place {
    collected: Option<Gradient>,
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
}

impl GradientStore {
    /// Places for `slots` parameters, all empty.
    pub(crate) fn new(slots: usize) -> Self {
        Self {
            slots: (0..slots).map(|_| Mutex::default()).collect(),
        }
    }

    /// Adds a contribution to what `slot` has: `bytes` hold elements of `precision`, of any
    /// alignment. `prepare` sees the memory that is about to be written.
    pub(crate) fn add(
        &self,
        slot: usize,
        precision: Precision,
        bytes: &[u8],
        prepare: impl FnOnce(&mut [u8]),
    ) {
        let mut place = self.slots[slot].lock();
        let collected = match place.collected.take() {
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
            Some(single @ Gradient::Single(_)) => {
                let mut sum = AlignedBuffer::zeroed(bytes.len() / precision.size());
                single.with_view(|view| view.widen_into(0..view.len(), &mut sum));
                view(bytes, precision, |view| view.add_to(&mut sum));
                Gradient::Sum(sum)
            }
            Some(Gradient::Sum(mut sum)) => {
                view(bytes, precision, |view| view.add_to(&mut sum));
                Gradient::Sum(sum)
            }
        };
        place.collected = Some(collected);
    }

    /// Takes what `slot` has collected.
    pub(crate) fn take(&self, slot: usize) -> Option<Gradient> {
        self.slots[slot].lock().collected.take()
    }

    /// Gives the memory of a gradient back for the next round.
    pub(crate) fn recycle(&self, slot: usize, gradient: Gradient) {
        self.slots[slot].lock().spare = Some(gradient);
    }

    /// Drops everything collected.
    pub(crate) fn clear(&self) {
        for place in &self.slots {
            let mut place = place.lock();
            if let Some(gradient) = place.collected.take() {
                place.spare = Some(gradient);
            }
        }
    }

    /// Bytes of gradients held now.
    pub(crate) fn bytes(&self) -> usize {
        let places = self.slots.iter().map(|place| place.lock());
        places
            .map(|place| place.collected.as_ref().map_or(0, Gradient::bytes))
            .sum()
    }

    /// Bytes of memory kept for gradients, in use now or not.
    pub(crate) fn capacity(&self) -> usize {
        let places = self.slots.iter().map(|place| place.lock());
        places
            .map(|place| {
                let kept = place.collected.iter().chain(&place.spare);
                kept.map(Gradient::capacity).sum::<usize>()
            })
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::bf16;

    use super::*;

    fn add(store: &GradientStore, slot: usize, values: &[f32]) {
        let values: Vec<bf16> = values.iter().map(|&v| bf16::from_f32(v)).collect();
        let bytes = bytemuck::cast_slice(&values);
        store.add(slot, Precision::Bf16, bytes, |memory| memory.fill(0xFF));
    }

    fn values(gradient: &Gradient) -> Vec<f32> {
        gradient.with_view(|view| {
            let mut out = vec![0.0; view.len()];
            view.widen_into(0..view.len(), &mut out);
            out
        })
    }

    #[test]
    fn one_contribution_is_kept_as_it_came() {
        let store = GradientStore::new(2);
        add(&store, 1, &[1.0, 2.0, 3.0]);
        assert_eq!(store.bytes(), 6);
        assert!(store.take(0).is_none());
        let taken = store.take(1).unwrap();
        assert!(matches!(taken, Gradient::Single(_)));
        assert_eq!(values(&taken), [1.0, 2.0, 3.0]);
        assert!(store.take(1).is_none());
    }

    /// acceptance.md, gradient accumulation 25.
    #[test]
    fn further_contributions_are_summed_in_f32() {
        let store = GradientStore::new(1);
        add(&store, 0, &[2048.0]);
        for _ in 0..8 {
            add(&store, 0, &[0.5]);
        }
        assert_eq!(store.bytes(), 4);
        assert_eq!(values(&store.take(0).unwrap()), [2052.0]);
    }

    #[test]
    fn cleared_gradients_are_gone() {
        let store = GradientStore::new(1);
        add(&store, 0, &[1.0]);
        store.clear();
        assert_eq!(store.bytes(), 0);
        assert!(store.take(0).is_none());
    }

    #[test]
    fn later_rounds_use_the_memory_of_earlier_ones() {
        let store = GradientStore::new(1);
        let address = |gradient: &Gradient| {
            gradient.with_view(|view| match view {
                GradientView::F32(sum) => sum.as_ptr() as usize,
                GradientView::F16(one) => one.as_ptr() as usize,
                GradientView::Bf16(one) => one.as_ptr() as usize,
            })
        };
        let round = |contributions: usize, value: f32| {
            for _ in 0..contributions {
                add(&store, 0, &[value; 40]);
            }
            let taken = store.take(0).unwrap();
            assert_eq!(values(&taken), [contributions as f32 * value; 40]);
            let (at, single) = (address(&taken), matches!(taken, Gradient::Single(_)));
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
        let store = GradientStore::new(1);
        for _ in 0..2 {
            store.add(0, Precision::F32, &bytes[1..], |_| ());
        }
        assert_eq!(values(&store.take(0).unwrap()), [3.0]);
    }
}
