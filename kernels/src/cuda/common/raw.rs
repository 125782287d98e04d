//! What the kernels of cuda/common get. Addresses are those of the device.

use super::mirrored::{Layout, mirrored};

/// The TMA's description of a tensor: `CUtensorMap` of the driver.
#[repr(C, align(128))]
#[derive(Clone, Copy, Debug, Default)]
pub struct TensorMap(pub [u64; 16]);

mirrored! {
    /// Of cuda/common/attention/batch.cuh.
    struct Call {
        query: u64,
        key: u64,
        value: u64,
        output: u64,
        pool: u64,
        row_offsets: u64,
        num_candidates: u64,
        cached_len: u64,
        page_indptr: u64,
        page_ids: u64,
        num_contextual: u64,
        pool_pages: i64,
        group: i64,
        window: i64,
        users: i32,
        total_rows: i32,
        heads: i32,
        head_size: i32,
        page_size: i32,
        page_entries: i32,
        alpha: f32,
        scale: f32,
        candidates_only: i32,
    }

    /// The tensors of a call of the attention, of cuda/common/attention_sm90/traits.cuh.
    struct AttentionMaps {
        query: TensorMap,
        key: TensorMap,
        value: TensorMap,
        pool: TensorMap,
    }

    /// Of cuda/common/kv_pack.cu.
    struct Move {
        pool: u64,
        packed: u64,
        pages: u64,
        pool_pages: i64,
        held: i64,
        skip: i64,
        first: i64,
        count: i64,
        page_entries: i32,
        page_size: i32,
        row_bytes: i32,
    }
}
