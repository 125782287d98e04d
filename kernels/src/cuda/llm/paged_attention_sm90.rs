//! The prefill of `PagedAttention` on Hopper: a variant of the attention of cuda/common/attention_sm90.

use std::ffi::c_void;
use std::ptr::from_mut;

use cudarc::driver::sys::{CUdeviceptr, CUstream};

use super::paged_call::{PagedAttention, blocks};
use crate::KvFormat;
use crate::cuda::common::error::CudaError;
use crate::cuda::common::gpu::Gpu;
use crate::cuda::common::raw::{AttentionMaps, Call, TensorMap};
use crate::cuda::common::sizes::MOST;
use crate::cuda::common::tensor_map::describe;

/// Rows of a TMA box of queries; `BOX` of cuda/common/attention_sm90/traits.cuh.
const BOX: usize = 64;
/// Threads of a block in front: `PLACING` of cuda/llm/paged_attention_sm90.cu.
const PLACING: u32 = 256;

/// Items for each multiprocessor up to which they are not paired, because there would be too few pieces for all multiprocessors.
const FEW_ITEMS: usize = 2;

/// Whether the kernel takes the call, which suits those of sm_80 too. The TMA counts rows in 32 bits.
pub fn suits(call: &PagedAttention) -> bool {
    call.format == KvFormat::Native
        && matches!(call.head_size, 64 | 128)
        && call.slots.is_none()
        && call.slopes.is_none()
        && call.softcap <= 0.0
        && call.scale() > 0.0
        && call.pool_pages > 0
        && pool_rows(call) < MOST
}

fn pool_rows(call: &PagedAttention) -> usize {
    call.pool_pages.saturating_mul(2 * call.page_size)
}

/// Memory for rotated queries.
pub fn scratch_bytes(call: &PagedAttention) -> usize {
    if call.rotation.is_none() || !suits(call) {
        return 0;
    }
    (call.total_rows * call.query_heads * call.head_size).saturating_mul(call.element.bytes())
}

/// Rows of an item, threads and shared memory of a block; `Traits` of cuda/common/attention_sm90/traits.cuh, `Mode::Whole`.
fn shape(head_size: usize) -> (usize, u32, usize) {
    let (groups, buffers) = if head_size == 64 { (3, 8) } else { (2, 4) };
    let rows = 64 * groups;
    (rows, 128 * (groups as u32 + 1), (2 * rows + buffers * 128) * head_size * 2 + 1024)
}

/// The append of sequences with many new tokens, or of all of them, and the attention of the former.
///
/// # Safety
/// As for [`Gpu::paged_attention`]; the kernel takes the call.
pub unsafe fn prefill(gpu: &Gpu, call: &PagedAttention, append_all: bool, stream: CUstream) -> Result<(), CudaError> {
    let module = gpu.modules.paged_attention_sm90.as_ref().expect("the path was offered");
    let mut paged = call.raw();
    let mut query = call.query;
    if call.rotation.is_some() {
        // Rotated ones behind the sums of parts.
        query = call.scratch.expect("the path was offered").address + call.partial_bytes() as CUdeviceptr;
    }
    let place = module.function(&format!("paged_place_{}_{}", call.element.name(), call.head_size), 0)?;
    let mut decoded_flag = i32::from(append_all);
    let arguments = &mut [
        from_mut(&mut paged).cast::<c_void>(),
        from_mut(&mut query).cast(),
        from_mut::<i32>(&mut decoded_flag).cast(),
    ];
    // SAFETY: the kernel takes a `PagedCall`, an address and an `int`, and waits for the kernel in front.
    unsafe { place.launch_dependent(blocks(call.total_rows)?, PLACING, 0, stream, arguments) }?;
    let (rows, threads, shared) = shape(call.head_size);
    let items = (call.total_rows + call.sequences.min(call.total_rows) * (rows - 1)) / rows * call.query_heads;
    let multiprocessors = gpu.multiprocessors as usize;
    let mut pair = if items <= FEW_ITEMS * multiprocessors { 1 } else { 2 };
    let count = blocks(items.min(multiprocessors))?;
    // As many keys as divide every page, up to a box.
    let granule = 1_usize << call.page_size.trailing_zeros().min(BOX.trailing_zeros());
    let (mut raw, mut maps, mut granule_flag) = (raw(call, query), maps(call, query, granule)?, granule as i32);
    let arguments = &mut [
        from_mut(&mut raw).cast::<c_void>(),
        from_mut(&mut maps).cast(),
        from_mut(&mut paged).cast(),
        from_mut(&mut granule_flag).cast(),
        from_mut::<i32>(&mut pair).cast(),
    ];
    let name = format!("paged_prefill_{}_{}", call.element.name(), call.head_size);
    let prefill = module.function(&name, shared)?;
    // SAFETY: the kernel takes a `Call`, `AttentionMaps`, a `PagedCall` and two `int`s, and waits for the kernel in front.
    unsafe { prefill.launch_dependent(count, threads, shared, stream, arguments) }
}

/// The call as the attention on Hopper has it: `group` is that of query heads, `alpha` what scores are multiplied by.
fn raw(call: &PagedAttention, query: CUdeviceptr) -> Call {
    Call {
        query,
        key: call.key,
        value: call.value,
        output: call.output,
        pool: call.pool,
        row_offsets: call.row_offsets,
        num_candidates: 0,
        cached_len: call.cached_len,
        page_indptr: call.page_indptr,
        page_ids: call.page_ids,
        num_contextual: 0,
        pool_pages: call.pool_pages as i64,
        group: (call.query_heads / call.kv_heads) as i64,
        window: call.window.max(0),
        users: call.sequences as i32,
        total_rows: call.total_rows as i32,
        heads: call.query_heads as i32,
        head_size: call.head_size as i32,
        page_size: call.page_size as i32,
        page_entries: call.page_entries as i32,
        alpha: call.scale(),
        scale: 1.0,
        candidates_only: 0,
    }
}

/// Queries, and the pool by `granule` tokens; keys and values come from the pool alone.
fn maps(call: &PagedAttention, query: CUdeviceptr, granule: usize) -> Result<AttentionMaps, CudaError> {
    let map = |address: CUdeviceptr, heads: usize, rows: usize, height: usize| -> Result<TensorMap, CudaError> {
        describe(call.element, address, [call.head_size, heads, rows], [call.head_size.min(64), 1, height])
    };
    let pool = map(call.pool, call.kv_heads, pool_rows(call), granule)?;
    Ok(AttentionMaps { query: map(query, call.query_heads, call.total_rows, BOX)?, key: pool, value: pool, pool })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_fit_into_a_multiprocessor() {
        for head_size in [64, 128] {
            assert!(shape(head_size).2 <= 227 * 1024, "D={head_size}");
        }
    }
}
