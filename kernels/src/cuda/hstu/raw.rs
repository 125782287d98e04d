//! What the kernels of cuda/hstu get. Addresses are those of the device.

use super::super::common::mirrored::{Layout, mirrored};
use super::super::common::raw::TensorMap;

mirrored! {
    /// Of cuda/hstu/dense.cuh.
    struct Taken {
        index: u64,
        of: i64,
    }

    /// Of cuda/hstu/dense.cuh.
    struct Norm {
        x: u64,
        u: u64,
        weight: u64,
        bias: u64,
        y: u64,
        taken: Taken,
        units: i64,
        size: i32,
        groups: i32,
        by_group: i32,
        concat: i32,
        constant: i32,
        epsilon: f32,
    }

    /// Of cuda/hstu/dense.cuh.
    struct Product {
        x: u64,
        weight: u64,
        bias: u64,
        residual: u64,
        taken: Taken,
        outputs: [u64; 4],
        rows: i32,
        depth: i32,
        columns: i32,
        part: i32,
        silu: i32,
        activation: i32,
        constant: i32,
    }

    /// The tensors of a product, of cuda/hstu/hstu_gemm_sm90.cuh.
    struct GemmMaps {
        x: TensorMap,
        weight: TensorMap,
        outputs: [TensorMap; 4],
    }

    /// The tensors of `HstuLinear`, of cuda/hstu/hstu_linear_sm90.cu.
    struct LinearMaps {
        x: TensorMap,
        weight: TensorMap,
    }

    /// Of cuda/hstu/quantised_pool.cu.
    struct QuantisedPool {
        scales: u64,
        key: u64,
        value: u64,
        pages: u64,
        page_ids: u64,
        row_blocks: i32,
    }

    /// Of cuda/hstu/hstu_unit.cu.
    struct Unit {
        x: u64,
        y: u64,
        rows: i64,
        size: i32,
        epsilon: f32,
    }

    /// Of cuda/hstu/hstu_embed.cu.
    struct Lookup {
        table: u64,
        index: u64,
        rows: i64,
    }

    /// Of cuda/hstu/hstu_embed.cu.
    struct Embed {
        tables: [Lookup; 8],
        learned: [Lookup; 2],
        y: u64,
        rows: i64,
        width: i32,
        table_count: i32,
        learned_count: i32,
        scale: f32,
    }
}
