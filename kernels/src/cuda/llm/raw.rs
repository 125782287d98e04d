//! What the kernels of cuda/llm get. Addresses are those of the device; 0 stands for a tensor that is not there.

use super::super::common::mirrored::{Layout, mirrored};

mirrored! {
    /// Of cuda/llm/paged_attention.cuh.
    struct PagedCall {
        query: u64,
        key: u64,
        value: u64,
        output: u64,
        pool: u64,
        scales: u64,
        key_weights: u64,
        row_sums: u64,
        partials: u64,
        row_offsets: u64,
        cached_len: u64,
        page_indptr: u64,
        page_ids: u64,
        positions: u64,
        cos: u64,
        sin: u64,
        sinks: u64,
        slopes: u64,
        write_slots: u64,
        token_pos: u64,
        partial_count: i64,
        pool_pages: i64,
        window: i64,
        sequences: i32,
        total_rows: i32,
        query_heads: i32,
        kv_heads: i32,
        head_size: i32,
        page_size: i32,
        page_entries: i32,
        position_rows: i32,
        half_width: i32,
        interleaved: i32,
        format: i32,
        slot_len: i32,
        weights_len: i32,
        scale: f32,
        softcap: f32,
    }
}
