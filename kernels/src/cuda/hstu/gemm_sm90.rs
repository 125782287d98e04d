//! The products of the dense operators on Hopper: which shape of tile a call gets.
//!
//! Every shape gives the same bits (cuda/hstu/hstu_gemm_sm90.cuh), so the choice is one of time and power alone.

use std::ffi::c_void;
use std::ptr::from_mut;

use cudarc::driver::sys::{CUdeviceptr, CUstream};

use super::raw::{GemmMaps, Product};
use crate::cuda::common::element_type::Type;
use crate::cuda::common::error::CudaError;
use crate::cuda::common::gpu::Gpu;
use crate::cuda::common::tensor_map::describe_matrix;

/// Elements of the depth that a box has; `DEPTH` of cuda/hstu/hstu_gemm_sm90.cuh.
const DEPTH: usize = 64;

/// Bytes out of the L2 cache that count as a nanosecond more. They take power, and a GPU that has reached its limit
/// lowers its clock: one that fetches less, and is a little slower alone, made models as a whole faster
/// (sdk/docs/benchmarks.md).
const BYTES_A_NANOSECOND: usize = 20 << 10;

/// A kernel for one shape of tile; `Tile` of cuda/hstu/hstu_gemm_sm90.cuh.
#[derive(Debug, PartialEq)]
struct Tile {
    name: &'static str,
    /// Warpgroups that compute.
    groups: usize,
    columns: usize,
    stages: usize,
    /// Whether each of them has a tile of its own, instead of all of them one.
    turns: bool,
    /// What it takes on an H200, in nanoseconds: a kernel with one tile for each block but for its steps; a step of the
    /// depth; what a further tile of a block takes beside its steps.
    once: usize,
    step: usize,
    further: usize,
}

/// As in cuda/hstu/hstu_gemm_sm90.cu.
const TILES: [Tile; 7] = [
    Tile::new("turns_64_256", 2, 256, 4, true, [4000, 353, 300]),
    Tile::new("turns_64_160", 2, 160, 6, true, [2100, 250, 300]),
    Tile::new("turns_64_128", 2, 128, 7, true, [1900, 210, 300]),
    Tile::new("tile_192_128", 3, 128, 4, false, [3700, 550, 600]),
    Tile::new("tile_128_96", 2, 96, 7, false, [2200, 330, 800]),
    Tile::new("tile_64_96", 1, 96, 8, false, [1000, 230, 600]),
    Tile::new("tile_64_64", 1, 64, 8, false, [1100, 180, 200]),
];

impl Tile {
    const fn new(
        name: &'static str,
        groups: usize,
        columns: usize,
        stages: usize,
        turns: bool,
        [once, step, further]: [usize; 3],
    ) -> Self {
        Self { name, groups, columns, stages, turns, once, step, further }
    }

    const fn rows(&self) -> usize {
        if self.turns { 64 } else { 64 * self.groups }
    }

    /// Columns of the boxes by which the output leaves.
    const fn box_columns(&self) -> usize {
        if self.columns.is_multiple_of(64) { 64 } else { 32 }
    }

    const fn threads(&self) -> usize {
        128 * (self.groups + 1)
    }

    const fn shared(&self) -> usize {
        let stages = self.stages * (self.rows() + self.columns) * DEPTH * 2;
        // Behind them: the output, barriers, biases.
        stages + self.groups * 64 * self.columns * 2 + 256 + self.groups * self.columns * 4
    }

    fn tiles(&self, call: &Product) -> usize {
        (call.rows as usize).div_ceil(self.rows()) * (call.columns as usize).div_ceil(self.columns)
    }

    /// A box of the output must not lie in two tensors.
    fn fits(&self, call: &Product) -> bool {
        call.part == call.columns || (call.part as usize).is_multiple_of(self.box_columns())
    }

    /// What a call costs, in nanoseconds.
    fn cost(&self, call: &Product, multiprocessors: usize) -> usize {
        let tiles = self.tiles(call);
        let (rounds, steps) = (tiles.div_ceil(multiprocessors), (call.depth as usize).div_ceil(DEPTH));
        let time = self.once + rounds * steps * self.step + (rounds - 1) * self.further;
        time + tiles * (self.rows() + self.columns) * call.depth as usize * 2 / BYTES_A_NANOSECOND
    }
}

/// Whether the kernels take a call: the TMA needs rows of multiples of 16 bytes.
pub fn takes(call: &Product, element: Type) -> bool {
    let addresses = call.x | call.weight | call.residual | call.outputs.iter().fold(0, |all, output| all | output);
    element != Type::F32
        && call.depth > 0
        && [call.depth, call.columns, call.part].iter().all(|size| size % 8 == 0)
        && addresses.is_multiple_of(16)
        && TILES.iter().any(|tile| tile.fits(call))
}

/// # Safety
/// As for [`Gpu::norm`]; `takes` the call, which has rows and columns.
pub unsafe fn launch(gpu: &Gpu, mut call: Product, element: Type, stream: CUstream) -> Result<(), CudaError> {
    let multiprocessors = gpu.multiprocessors as usize;
    let tile = choose(&call, multiprocessors);
    let mut maps = GemmMaps::of(&call, tile, element)?;
    let module = gpu.modules.gemm_sm90.as_ref().expect("the path was offered");
    let function = module.function(&format!("{}_{}", tile.name, element.name()), tile.shared())?;
    let blocks = tile.tiles(&call).min(multiprocessors) as u32;
    let mut arguments = [from_mut(&mut call).cast::<c_void>(), from_mut(&mut maps).cast()];
    // SAFETY: the kernel takes a `Product` and `Maps`, and waits for the kernel before it.
    unsafe { gpu.launch_dependent(function, blocks, tile.threads() as u32, tile.shared(), stream, &mut arguments) }
}

fn choose(call: &Product, multiprocessors: usize) -> &'static Tile {
    let fitting = TILES.iter().filter(|tile| tile.fits(call));
    fitting.min_by_key(|tile| tile.cost(call, multiprocessors)).expect("some tile fits")
}

impl GemmMaps {
    fn of(call: &Product, tile: &Tile, element: Type) -> Result<Self, CudaError> {
        let (rows, depth, columns) = (call.rows as usize, call.depth as usize, call.columns as usize);
        let output = |address: CUdeviceptr| {
            // Where there is one output, no box asks for the others.
            let address = if address == 0 { call.outputs[0] } else { address };
            describe_matrix(element, address, [rows, call.part as usize], [64, tile.box_columns()])
        };
        let [u, v, q, k] = call.outputs;
        Ok(Self {
            x: describe_matrix(element, call.x, [rows, depth], [tile.rows(), DEPTH])?,
            weight: describe_matrix(element, call.weight, [columns, depth], [tile.columns, DEPTH])?,
            outputs: [output(u)?, output(v)?, output(q)?, output(k)?],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Activation;
    use crate::cuda::hstu::dense_call::Taken;

    fn call(rows: i32, depth: i32, columns: i32, part: i32) -> Product {
        let (x, weight, outputs) = (16, 32, [48, 64, 80, 96]);
        let (bias, residual, taken) = (2, 0, Taken::raw(None, 0).expect("nothing is taken"));
        let (silu, activation, constant) = (0, Activation::None as i32, 1);
        Product { x, weight, bias, residual, taken, outputs, rows, depth, columns, part, silu, activation, constant }
    }

    #[test]
    fn tiles_fit_into_a_multiprocessor() {
        for tile in &TILES {
            assert!(tile.shared() <= 227 * 1024, "{}", tile.name);
        }
    }

    #[test]
    fn each_product_gets_the_tile_with_which_a_model_was_fastest_on_an_h200() {
        for (rows, depth, columns, part, name) in [
            (384, 1024, 4096, 1024, "tile_128_96"),
            (384, 1024, 1024, 1024, "tile_64_64"),
            (3072, 1024, 4096, 1024, "tile_192_128"),
            (3072, 1024, 1024, 1024, "tile_192_128"),
            (2560, 512, 2048, 512, "tile_192_128"),
            (2560, 512, 512, 512, "tile_128_96"),
        ] {
            assert_eq!(choose(&call(rows, depth, columns, part), 132).name, name, "{rows} {depth} {columns}");
        }
    }

    #[test]
    fn only_what_the_copy_engine_can_fetch_is_taken() {
        let good = call(7, 64, 256, 64);
        assert!(takes(&good, Type::Bf16) && takes(&good, Type::F16) && !takes(&good, Type::F32));
        assert!(takes(&call(7, 8, 96 * 4, 96), Type::Bf16));
        assert!(!takes(&call(7, 12, 256, 64), Type::Bf16));
        assert!(!takes(&call(7, 0, 256, 64), Type::Bf16));
        assert!(!takes(&call(7, 64, 4 * 40, 40), Type::Bf16), "a box would lie in two outputs");
        assert!(takes(&call(7, 64, 40, 40), Type::Bf16), "one output may end within a box");
        assert!(!takes(&Product { x: 8, ..good }, Type::Bf16));
    }
}
