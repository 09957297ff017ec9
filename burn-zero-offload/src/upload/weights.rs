//! Weights as tensors: to the device, back, and in between.

use burn::tensor::{
    Bytes, DType, Device, FloatDType, GradientCheckpointingStrategy, Shape, Tensor, TensorData,
};

use crate::optimize::{DeviceImage, Precision};

/// The element type Burn calls a precision.
pub(crate) fn to_dtype(precision: Precision) -> FloatDType {
    match precision {
        Precision::F32 => FloatDType::F32,
        Precision::F16 => FloatDType::F16,
        Precision::Bf16 => FloatDType::BF16,
    }
}

/// The precision of a Burn element type, where the engine has one.
pub(crate) fn to_precision(dtype: DType) -> Option<Precision> {
    match dtype {
        DType::F32 | DType::Flex32 => Some(Precision::F32),
        DType::F16 => Some(Precision::F16),
        DType::BF16 => Some(Precision::Bf16),
        _ => None,
    }
}

/// The image as a tensor on `device`, without autodiff. Flex takes the image over without a copy.
pub(crate) fn to_device<const D: usize>(
    image: DeviceImage,
    shape: Shape,
    device: &Device,
) -> Tensor<D> {
    let precision = image.precision();
    lend(into_bytes(image), precision, shape, device)
}

/// The same of the elements in `bytes`.
pub(crate) fn lend<const D: usize>(
    bytes: Bytes,
    precision: Precision,
    shape: Shape,
    device: &Device,
) -> Tensor<D> {
    let dtype = to_dtype(precision).into();
    let data = TensorData::from_bytes(bytes, shape, dtype);
    Tensor::from_data(data, (&device.clone().inner(), dtype))
}

/// The memory of an image.
pub(super) fn into_bytes(image: DeviceImage) -> Bytes {
    match image {
        DeviceImage::F32(image) => Bytes::from_elems(image),
        DeviceImage::F16(image) => Bytes::from_elems(image),
        DeviceImage::Bf16(image) => Bytes::from_elems(image),
    }
}

/// Copies a tensor to the host.
pub(crate) fn read<const D: usize>(tensor: Tensor<D>) -> Result<TensorData, String> {
    let data = tensor.inner().try_into_data();
    let data = data.map_err(|error| error.to_string())?;
    // CubeCL copies when the bytes are first looked at: look now, the buffer may not stay as it is.
    let _ = data.as_bytes();
    Ok(data)
}

/// The elements of `data` in `f32`.
pub(crate) fn as_f32(data: TensorData) -> Result<Vec<f32>, String> {
    let data = data
        .try_cast_as::<f32>()
        .map_err(|error| error.to_string())?;
    data.try_to_vec::<f32>().map_err(|error| error.to_string())
}

/// `values` as a tensor of the Flex backend, whatever backend the model runs on: it stays on the
/// host.
pub(crate) fn on_flex<const D: usize>(values: Vec<f32>, shape: Shape) -> Tensor<D> {
    let data = TensorData::new(values, shape);
    Tensor::from_data(data, (&Device::flex(), DType::F32))
}

/// What a parameter carries besides its value; taken off before the value is replaced and put on
/// the new one.
///
/// Burn's optimizers do the same: a value lifted back with the default checkpointing strategy would
/// meet its inputs under two strategies, which autodiff refuses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AutodiffContext {
    autodiff: bool,
    require_grad: bool,
    checkpointing: Option<GradientCheckpointingStrategy>,
}

impl AutodiffContext {
    pub(crate) fn of<const D: usize>(tensor: &Tensor<D>) -> Self {
        Self {
            autodiff: tensor.is_autodiff(),
            require_grad: tensor.is_require_grad(),
            checkpointing: tensor.gradient_checkpointing_strategy(),
        }
    }

    pub(crate) fn restore<const D: usize>(self, value: Tensor<D>) -> Tensor<D> {
        if !self.autodiff {
            return value;
        }
        let mut value = Tensor::from_inner(value);
        if let Some(strategy) = self.checkpointing {
            value = value.with_gradient_checkpointing_strategy(strategy);
        }
        if self.require_grad {
            value.require_grad()
        } else {
            value
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_reaches_the_device_and_comes_back_bit_for_bit() {
        let image = DeviceImage::of(Precision::Bf16, &[1.0, -0.3, 1e30, 7e-42]);
        let device = Device::flex();
        let tensor = to_device::<2>(image.clone(), Shape::from([2, 2]), &device);
        assert_eq!(tensor.dtype(), DType::BF16);
        assert_eq!(read(tensor).unwrap().as_bytes(), image.as_bytes());
    }

    #[test]
    fn a_new_value_keeps_gradient_and_checkpointing_settings() {
        let device = Device::flex().autodiff().gradient_checkpointing();
        let old = Tensor::<1>::ones([2], &device).require_grad();
        let context = AutodiffContext::of(&old);
        let new = context.restore(Tensor::<1>::zeros([2], &Device::flex()));
        assert!(new.is_require_grad());
        assert_eq!(
            new.gradient_checkpointing_strategy(),
            old.gradient_checkpointing_strategy()
        );
        let plain = AutodiffContext::of(&old.inner());
        assert!(
            !plain
                .restore(Tensor::<1>::zeros([2], &Device::flex()))
                .is_autodiff()
        );
    }
}
