//! Gradients on the host, from their arrival to the step that consumes them.

use std::borrow::Cow;

use burn::tensor::Bytes;
use bytemuck::AnyBitPattern;
use parking_lot::Mutex;

use crate::optimize::{GradientView, Precision};

/// One gradient as read from the device: bytes and their element type.
#[derive(Debug)]
pub(crate) struct HostGradient {
    /// Element type of `bytes`.
    pub(crate) precision: Precision,
    /// The elements, native endian.
    pub(crate) bytes: Bytes,
}

impl HostGradient {
    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len() / self.precision.size()
    }
}

/// What a round collected for one parameter.
#[derive(Debug)]
pub(crate) enum Gradient {
    /// One contribution, kept as it came: 2 bytes per element when it came in half precision.
    Single(HostGradient),
    /// Several contributions, summed in `f32`.
    Sum(Vec<f32>),
}

impl Gradient {
    /// Calls `use_view` with a view of the elements.
    pub(crate) fn with_view<R>(&self, use_view: impl FnOnce(GradientView<'_>) -> R) -> R {
        match self {
            Self::Sum(sum) => use_view(GradientView::F32(sum)),
            Self::Single(HostGradient { precision, bytes }) => match precision {
                Precision::F32 => use_view(GradientView::F32(&elements(bytes))),
                Precision::F16 => use_view(GradientView::F16(&elements(bytes))),
                Precision::Bf16 => use_view(GradientView::Bf16(&elements(bytes))),
            },
        }
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Single(gradient) => gradient.bytes.len(),
            Self::Sum(sum) => size_of_val(&**sum),
        }
    }

    fn add(self, more: HostGradient) -> Self {
        let mut sum = match self {
            Self::Sum(sum) => sum,
            Self::Single(_) => self.with_view(|view| {
                let mut sum = vec![0.0; view.len()];
                view.widen_into(0..view.len(), &mut sum);
                sum
            }),
        };
        Self::Single(more).with_view(|view| view.add_to(&mut sum));
        Self::Sum(sum)
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
#[derive(Debug)]
pub(crate) struct GradientStore {
    slots: Vec<Mutex<Option<Gradient>>>,
}

impl GradientStore {
    /// Places for `slots` parameters, all empty.
    pub(crate) fn new(slots: usize) -> Self {
        Self {
            slots: (0..slots).map(|_| Mutex::new(None)).collect(),
        }
    }

    /// Adds a contribution to what `slot` has.
    pub(crate) fn add(&self, slot: usize, gradient: HostGradient) {
        let mut place = self.slots[slot].lock();
        *place = Some(match place.take() {
            None => Gradient::Single(gradient),
            Some(collected) => collected.add(gradient),
        });
    }

    /// Takes what `slot` has collected.
    pub(crate) fn take(&self, slot: usize) -> Option<Gradient> {
        self.slots[slot].lock().take()
    }

    /// Drops everything collected.
    pub(crate) fn clear(&self) {
        for place in &self.slots {
            place.lock().take();
        }
    }

    /// Bytes held now.
    pub(crate) fn bytes(&self) -> usize {
        self.slots
            .iter()
            .map(|place| place.lock().as_ref().map_or(0, Gradient::bytes))
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::bf16;

    use super::*;

    fn gradient(values: &[f32]) -> HostGradient {
        let values: Vec<bf16> = values.iter().map(|&v| bf16::from_f32(v)).collect();
        HostGradient {
            precision: Precision::Bf16,
            bytes: Bytes::from_elems(values),
        }
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
        store.add(1, gradient(&[1.0, 2.0]));
        assert_eq!(store.bytes(), 4);
        assert!(store.take(0).is_none());
        let taken = store.take(1).unwrap();
        assert!(matches!(taken, Gradient::Single(_)));
        assert_eq!(values(&taken), [1.0, 2.0]);
        assert!(store.take(1).is_none());
    }

    /// acceptance.md, gradient accumulation 25.
    #[test]
    fn further_contributions_are_summed_in_f32() {
        let store = GradientStore::new(1);
        store.add(0, gradient(&[2048.0]));
        for _ in 0..8 {
            store.add(0, gradient(&[0.5]));
        }
        assert_eq!(store.bytes(), 4);
        assert_eq!(values(&store.take(0).unwrap()), [2052.0]);
    }

    #[test]
    fn cleared_gradients_are_gone() {
        let store = GradientStore::new(1);
        store.add(0, gradient(&[1.0]));
        store.clear();
        assert_eq!(store.bytes(), 0);
        assert!(store.take(0).is_none());
    }

    #[test]
    fn unaligned_bytes_are_read_too() {
        let bytes: Vec<u8> = [0u8].into_iter().chain(1.5f32.to_ne_bytes()).collect();
        assert_eq!(elements::<f32>(&bytes[1..]).as_ref(), [1.5]);
    }
}
