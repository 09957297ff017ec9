//! What the device holds of a master weight: its image in the device's element type.
//!
//! Images always come from here, never from a cast on the device, so that host and device agree
//! bit for bit on what the device should hold. Rounding is to nearest, ties to even (IEEE 754); the
//! image of a split master (see [`StatePrecision`](super::StatePrecision)) is its upper half.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// An element type of weights and gradients on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Precision {
    /// Single precision: the image is the master itself.
    F32,
    /// IEEE half precision; master weights beyond 65504 become infinite on the device.
    F16,
    /// Brain floating point: the range of `f32`, 8 bits of precision.
    Bf16,
}

impl Precision {
    /// Bytes per element.
    pub fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// The device's image of a parameter, on its way there.
#[derive(Clone, Debug, PartialEq)]
pub enum DeviceImage {
    /// See [`Precision::F32`].
    F32(Vec<f32>),
    /// See [`Precision::F16`].
    F16(Vec<f16>),
    /// See [`Precision::Bf16`].
    Bf16(Vec<bf16>),
}

impl DeviceImage {
    /// An image of `len` zeros.
    pub fn zeroed(precision: Precision, len: usize) -> Self {
        match precision {
            Precision::F32 => Self::F32(vec![0.0; len]),
            Precision::F16 => Self::F16(vec![f16::ZERO; len]),
            Precision::Bf16 => Self::Bf16(vec![bf16::ZERO; len]),
        }
    }

    /// The image of `master`.
    pub fn of(precision: Precision, master: &[f32]) -> Self {
        let mut image = Self::zeroed(precision, master.len());
        match &mut image {
            Self::F32(image) => image.copy_from_slice(master),
            Self::F16(image) => image.convert_from_f32_slice(master),
            Self::Bf16(image) => image.convert_from_f32_slice(master),
        }
        image
    }

    /// The bytes of the image, native endian.
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Self::F32(image) => bytemuck::cast_slice(image),
            Self::F16(image) => bytemuck::cast_slice(image),
            Self::Bf16(image) => bytemuck::cast_slice(image),
        }
    }
}

impl DeviceImage {
    /// Element type of the image.
    pub fn precision(&self) -> Precision {
        match self {
            Self::F32(_) => Precision::F32,
            Self::F16(_) => Precision::F16,
            Self::Bf16(_) => Precision::Bf16,
        }
    }

    /// The bytes of the image, to be overwritten.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::F32(image) => bytemuck::cast_slice_mut(image),
            Self::F16(image) => bytemuck::cast_slice_mut(image),
            Self::Bf16(image) => bytemuck::cast_slice_mut(image),
        }
    }

    /// The image as the step writes it.
    pub fn as_mut(&mut self) -> ImageMut<'_> {
        match self {
            Self::F32(image) => ImageMut::F32(image),
            Self::F16(image) => ImageMut::F16(image),
            Self::Bf16(image) => ImageMut::Bf16(image),
        }
    }
}

/// An image, or a tile of one, that the step writes.
#[derive(Debug)]
pub enum ImageMut<'a> {
    /// See [`Precision::F32`].
    F32(&'a mut [f32]),
    /// See [`Precision::F16`].
    F16(&'a mut [f16]),
    /// See [`Precision::Bf16`].
    Bf16(&'a mut [bf16]),
}

impl<'a> ImageMut<'a> {
    /// Number of weights.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(image) => image.len(),
            Self::F16(image) => image.len(),
            Self::Bf16(image) => image.len(),
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(super) fn split_at(self, at: usize) -> (Self, Self) {
        macro_rules! halves {
            ($variant:ident, $image:ident) => {{
                let (left, right) = $image.split_at_mut(at);
                (Self::$variant(left), Self::$variant(right))
            }};
        }
        match self {
            Self::F32(image) => halves!(F32, image),
            Self::F16(image) => halves!(F16, image),
            Self::Bf16(image) => halves!(Bf16, image),
        }
    }

    /// The elements that `bytes` holds.
    ///
    /// # Panics
    ///
    /// If `bytes` is not aligned for the element type, or ends within an element.
    pub fn of_bytes(precision: Precision, bytes: &'a mut [u8]) -> Self {
        match precision {
            Precision::F32 => Self::F32(bytemuck::cast_slice_mut(bytes)),
            Precision::F16 => Self::F16(bytemuck::cast_slice_mut(bytes)),
            Precision::Bf16 => Self::Bf16(bytemuck::cast_slice_mut(bytes)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_round_to_nearest_ties_to_even() {
        // One half ulp above 1 is a tie: 1.0 has the even mantissa.
        let masters = [
            1.0 + 2f32.powi(-8),
            1.0 + 3.0 * 2f32.powi(-8),
            f32::NAN,
            f32::MAX,
        ];
        let DeviceImage::Bf16(image) = DeviceImage::of(Precision::Bf16, &masters) else {
            panic!()
        };
        assert_eq!(image[0].to_f32(), 1.0);
        assert_eq!(image[1].to_f32(), 1.0 + 4.0 * 2f32.powi(-8));
        assert!(image[2].is_nan());
        assert_eq!(image[3].to_f32(), f32::INFINITY);
        let image = DeviceImage::of(Precision::F16, &[65520.0, 2f32.powi(-25)]);
        assert_eq!(image, DeviceImage::F16(vec![f16::INFINITY, f16::ZERO]));
        assert_eq!(
            DeviceImage::of(Precision::F32, &[1.5]),
            DeviceImage::F32(vec![1.5])
        );
    }

    #[test]
    fn an_image_takes_two_bytes_a_weight_in_half_precision() {
        for precision in [Precision::F32, Precision::F16, Precision::Bf16] {
            let image = DeviceImage::of(precision, &[1.0; 5]);
            assert_eq!(image.as_bytes().len(), 5 * precision.size());
        }
    }
}
