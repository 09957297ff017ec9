//! What the kernels become for CUDA, through both of CubeCL's compilers, without a device.

use std::sync::Arc;

use burn::backend::{DeviceId, ServiceId, StreamId, TimingMethod};
use cubecl::cuda::compiler::CudaBackend;
use cubecl::cuda::{CudaCompilationOptions, CudaCompiler, CudaRepresentation};
use cubecl::ir::nvidia::SmArch;
use cubecl::ir::{DeviceIdentity, ElemType, FloatKind, HardwareProperties, MemoryDeviceProperties};
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl::std::tensor::layout::linear::linear_view;
use cubecl::zspace::{Shape, Strides};
use cubecl::{Compiler, define_kernel};

use super::accumulate::accumulate_kernel::create_dummy_kernel as accumulate_kernel;
use super::count::count_kernel::create_dummy_kernel as count_kernel;
use super::pack::pack_kernel::create_dummy_kernel as pack_kernel;

const F32: ElemType = ElemType::Float(FloatKind::F32);
const F16: ElemType = ElemType::Float(FloatKind::F16);
const BF16: ElemType = ElemType::Float(FloatKind::BF16);

const CUBES: CubeCount = CubeCount::Static(16, 1, 1);
const CUBE: CubeDim = CubeDim::new_2d(32, 8);
const ADDRESSES: AddressType = AddressType::U32;
const VECTOR: usize = 4;

/// A Hopper GPU, as far as these kernels ask.
fn hopper() -> Arc<DeviceProperties> {
    let hardware = HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 1024,
        max_shared_memory_size: 227 << 10,
        max_cube_count: (i32::MAX as u32, 65535, 65535),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: Some(132),
        num_cpu_cores: None,
        last_level_cache_size: None,
        num_tensor_cores: Some(4),
        min_tensor_cores_dim: Some(8),
        max_vector_size: VectorSize::MAX,
        cube_mma_reserved_shared_memory: 0,
    };
    let identity = DeviceIdentity {
        name: "none".into(),
        fingerprint: "ptx_sm90".into(),
        physical: None,
    };
    Arc::new(DeviceProperties::new(
        Default::default(),
        MemoryDeviceProperties::new(1 << 30, 512),
        hardware,
        TimingMethod::Device,
        identity,
    ))
}

/// A tensor that is never looked at.
fn tensor(shape: impl Into<Shape>, strides: Strides) -> TensorBinding {
    let shape = shape.into();
    let size = 4 * shape.num_elements() as u64;
    let service = ServiceId::of::<()>(DeviceId::new(0, 0));
    TensorBinding {
        handle: Handle::new(service, StreamId::current(), size).binding(),
        strides,
        shape,
        tiling: Default::default(),
    }
}

fn flat() -> TensorBinding {
    tensor([1 << 12], [1].into())
}

/// The kernel in CUDA C++, from which NVRTC makes PTX, and the PTX LLVM makes of it.
fn lower(kernel: impl CubeKernel) -> (String, String) {
    let mut options = CudaCompilationOptions {
        arch: Some(SmArch::new(90, true)),
        ..Default::default()
    };
    // As the runtime sets them; these kernels ask for no fast math.
    options.cpp.supports_features.fast_math = true;
    options.cpp.supports_features.grid_constants = true;
    let compile = |backend| {
        let definition = define_kernel(&kernel).unwrap();
        let compiled = CudaCompiler::new(backend).compile(definition, &options);
        compiled.unwrap()
    };
    let CudaRepresentation::Llvm(module) = compile(CudaBackend::Llvm) else {
        unreachable!()
    };
    let ptx = module.ptx.iter().map(|&c| c as u8 as char).collect();
    (compile(CudaBackend::Cpp).to_string(), ptx)
}

fn lines<'a>(text: &'a str, containing: &str) -> Vec<&'a str> {
    text.lines()
        .filter(|line| line.contains(containing))
        .collect()
}

/// No barrier, no shared memory, no float comparison, no flushing of subnormal numbers, no
/// multiply-add, and `atomics` atomic additions.
#[track_caller]
fn assert_plain((cpp, ptx): &(String, String), atomics: usize) {
    for absent in ["__syncthreads", "__shared__", "isnan", "isinf", "fma"] {
        assert!(!cpp.contains(absent), "{absent} in\n{cpp}");
    }
    for absent in ["bar.", ".shared", ".ftz", "fma", "mad.f", "mad.rn"] {
        assert!(!ptx.contains(absent), "{absent} in\n{ptx}");
    }
    let mut comparisons = lines(ptx, "setp").into_iter();
    assert!(comparisons.all(|line| !line.contains(".f")), "{ptx}");
    assert_eq!(lines(cpp, "atom.relaxed.add.u32").len(), atomics, "{cpp}");
    assert_eq!(lines(ptx, "atom.global.add.u32").len(), atomics, "{ptx}");
}

#[test]
fn pack_rounds_to_nearest_in_one_pass_of_vectors() {
    let conversions = [
        (BF16, "__nv_bfloat16(", "cvt.rn.bf16x2.f32"),
        (F16, "__half(", "cvt.rn.f16x2.f32"),
    ];
    for (wire, in_cpp, in_ptx) in conversions {
        let lowered = lower(pack_kernel(
            hopper(),
            Default::default(),
            CUBES,
            CUBE,
            ADDRESSES,
            VECTOR,
            linear_view(flat()),
            linear_view(flat()),
            flat().into_tensor_arg(),
            4,
            2,
            [F32, wire],
        ));
        assert_plain(&lowered, 1);
        let (cpp, ptx) = lowered;
        assert_eq!(lines(&cpp, in_cpp).len(), VECTOR, "{cpp}");
        assert!(ptx.contains(in_ptx), "{ptx}");
        // Four f32 read at once, four halves written as two words.
        assert_eq!(lines(&ptx, "ld.global.nc.v4.b32").len(), 1, "{ptx}");
        assert_eq!(lines(&ptx, "st.global").len(), 1, "{ptx}");
        assert_eq!(lines(&ptx, "st.global.v2.b32").len(), 1, "{ptx}");
    }
}

#[test]
fn the_count_writes_nothing_but_the_count() {
    let layouts = [
        flat(),
        // Rows with a gap, and permuted with the last dimension in order.
        tensor([32, 64], [96, 1].into()),
        tensor([4, 8, 32], [32, 128, 1].into()),
    ];
    for layout in layouts {
        for dtype in [F32, F16, BF16] {
            let lowered = lower(count_kernel(
                hopper(),
                Default::default(),
                CUBES,
                CUBE,
                ADDRESSES,
                VECTOR,
                linear_view(layout.clone()),
                flat().into_tensor_arg(),
                4,
                dtype,
            ));
            assert_plain(&lowered, 1);
            let (_, ptx) = lowered;
            assert!(ptx.contains("ld.global.nc.v"), "{ptx}");
            assert!(!ptx.contains("st.global"), "{ptx}");
        }
    }
}

#[test]
fn accumulation_is_one_addition_in_f32() {
    for dtype in [F32, F16, BF16] {
        let lowered = lower(accumulate_kernel(
            hopper(),
            Default::default(),
            CUBES,
            CUBE,
            ADDRESSES,
            VECTOR,
            linear_view(flat()),
            linear_view(flat()),
            dtype,
        ));
        assert_plain(&lowered, 0);
        let (_, ptx) = lowered;
        let additions = lines(&ptx, "add.f32").len() + lines(&ptx, "add.rn.f32").len();
        assert_eq!(additions, VECTOR, "{ptx}");
        assert_eq!(lines(&ptx, "st.global").len(), 1, "{ptx}");
    }
}
