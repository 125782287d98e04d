//! SwiGLU with the product in front of it, for many rows on Hopper: gates and ups never leave the multiprocessor.

use std::ffi::c_void;
use std::ptr::from_mut;

use cudarc::driver::sys::{CUdeviceptr, CUstream};

use crate::Activation;
use crate::cuda::common::element_type::Type;
use crate::cuda::common::error::CudaError;
use crate::cuda::common::gpu::Gpu;
use crate::cuda::common::tensor_map::{describe_matrix, describe_strided};
use crate::cuda::hstu::raw::{GemmMaps, Product, Taken};

/// Rows from which on it is taken, as was found on an H200: with fewer there are too few tiles for its multiprocessors.
pub const LEAST_ROWS: usize = 1024;
/// Rows up to which the first tile is faster; above, the one that reads less from L2.
const WIDE_ROWS: usize = 4096;
/// Elements of the depth that a box has.
const DEPTH: usize = 64;
/// Columns of the boxes by which the output leaves.
const BOX: usize = 64;

/// As in cuda/llm/gated_gemm_sm90.cu: name, warpgroups, columns, stages.
const GATED: [(&str, usize, usize, usize); 2] = [("gated_128_256", 2, 256, 4), ("gated_192_128", 3, 128, 4)];

/// `silu(x gatesᵀ) · x upsᵀ`: x `[rows, inner]`, weight `[2·width, inner]`, y `[rows, width]`.
pub struct GatedProduct {
    pub element: Type,
    pub rows: usize,
    pub inner: usize,
    pub width: usize,
    pub x: CUdeviceptr,
    pub weight: CUdeviceptr,
    pub y: CUdeviceptr,
    pub constant: bool,
}

impl GatedProduct {
    /// Whether there is a kernel for it, and it pays.
    pub fn pays(&self, gpu: &Gpu) -> bool {
        gpu.modules.gated_gemm_sm90.is_some()
            && self.element != Type::F32
            && self.rows >= LEAST_ROWS
            && self.inner > 0
            && self.inner.is_multiple_of(8)
            && self.width.is_multiple_of(8)
            && (self.x | self.weight | self.y).is_multiple_of(16)
    }

    /// # Safety
    /// As for [`Gpu::projection`]; it [`pays`](Self::pays).
    pub unsafe fn launch(&self, gpu: &Gpu, stream: CUstream) -> Result<(), CudaError> {
        let Self { element, rows, inner, width, x, weight, y, constant } = *self;
        let (name, groups, columns, stages) = GATED[usize::from(rows > WIDE_ROWS)];
        let high = 64 * groups;
        let shared = shared(groups, columns, stages);
        let row = inner * element.bytes();
        let output = describe_matrix(element, y, [rows, width], [64, BOX])?;
        let mut maps = GemmMaps {
            x: describe_matrix(element, x, [rows, inner], [high, DEPTH])?,
            // Eight gates, then their ups.
            weight: describe_strided(
                element,
                weight,
                [inner, 8, 2, width / 8],
                &[row, width * row, 8 * row],
                [DEPTH, 8, 2, columns / 16],
            )?,
            outputs: [output; 4],
        };
        let mut call = Product {
            x,
            weight,
            bias: 0,
            residual: 0,
            taken: Taken { index: 0, of: rows as i64 },
            outputs: [y; 4],
            rows: rows as i32,
            depth: inner as i32,
            columns: 2 * width as i32,
            part: width as i32,
            silu: 0,
            activation: Activation::None as i32,
            constant: constant.into(),
        };
        let tiles = rows.div_ceil(high) * (2 * width).div_ceil(columns);
        let blocks = tiles.min(gpu.multiprocessors as usize) as u32;
        let module = gpu.modules.gated_gemm_sm90.as_ref().expect("asked before");
        let function = module.function(&format!("{name}_{}", element.name()), shared)?;
        let threads = 128 * (groups as u32 + 1);
        let mut arguments = [from_mut(&mut call).cast::<c_void>(), from_mut(&mut maps).cast()];
        // SAFETY: the kernel takes a `Product` and `GemmMaps`, and waits for the kernel in front.
        unsafe { gpu.launch_dependent(function, blocks, threads, shared, stream, &mut arguments) }
    }
}

/// `SHARED` of `Tile` of cuda/hstu/hstu_gemm_sm90.cuh.
const fn shared(groups: usize, columns: usize, stages: usize) -> usize {
    let data = stages * (64 * groups + columns) * DEPTH * 2 + groups * 64 * (columns / 2) * 2;
    data + 256 + groups * columns * 4
}

const _: () = {
    let mut at = 0;
    while at < GATED.len() {
        let (_, groups, columns, stages) = GATED[at];
        assert!(shared(groups, columns, stages) <= 227 * 1024, "a block has to fit into a multiprocessor");
        at += 1;
    }
};
