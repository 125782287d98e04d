//! `PagedAttention` by the tensor cores of sm_80 and later: decode, prefill, and what goes before and behind them.
//!
//! How many tokens each sequence has is known on the device alone. So the number of blocks is the most that any offsets can ask
//! for, and a block that finds nothing for itself ends at once.

use std::ffi::c_void;
use std::ptr::from_mut;

use cudarc::driver::sys::CUstream;

use super::paged_attention_sm90;
use super::paged_call::{PagedAttention, ROWS, blocks, span};
use crate::KvFormat;
use crate::cuda::common::error::CudaError;
use crate::cuda::common::gpu::Gpu;
use crate::cuda::common::module::Function;

/// Threads of the kernels' blocks, and rows of a block of prefill; cuda/llm/paged_decode.cuh and paged_prefill.cuh.
const THREADS: u32 = 128;
const WARPS: usize = 4;
const COMBINING_THREADS: u32 = 256;
const BLOCK_ROWS: usize = 64;
/// Slots of a block that computes their weights; `WEIGHED` of cuda/llm/paged_weights.cuh.
const WEIGHED: usize = 1024;
/// Blocks for each multiprocessor that compute the weights of slots of sequences with many new tokens.
const WEIGHING_BLOCKS: usize = 4;
/// Rows and heads up to which a block each adds their parts up; a warp each where there are more.
const WIDE: usize = 256;

/// The most new tokens of a sequence that decode takes; `is_decode` of cuda/llm/paged_parts.cuh.
fn decoded_rows(call: &PagedAttention) -> usize {
    (ROWS / call.group()).max(1)
}

/// Whether some sequence may have too many new tokens for decode.
fn may_prefill(call: &PagedAttention) -> bool {
    call.rows_each.1.min(call.total_rows) > decoded_rows(call)
}

/// The append of sequences that are prefilled, and their attention; then decode, which appends by itself, and the sum of its
/// parts. By programmatic dependent launch: each kernel waits for the one in front. `hopper`: prefill is that of Hopper.
///
/// # Safety
/// As for [`Gpu::paged_attention`]; the kernels take the call.
pub unsafe fn launch(gpu: &Gpu, call: &PagedAttention, hopper: bool, stream: CUstream) -> Result<(), CudaError> {
    if call.total_rows == 0 {
        return Ok(());
    }
    let decode_module = gpu.modules.paged_decode_sm80.as_ref().expect("the path was offered");
    let prefill_module = gpu.modules.paged_prefill_sm80.as_ref().expect("the path was offered");
    let PagedAttention { kv_heads, head_size, total_rows, .. } = *call;
    let (element, tiles) = (call.element.name(), call.row_tiles());
    let name = format!("{element}_{head_size}_{}", format_name(call.format));
    let mut raw = call.raw();
    let raw = from_mut(&mut raw).cast::<c_void>();
    let start = |function: Function, count: usize, threads: u32, shared: usize, flags: &mut [i32]| {
        let mut arguments = vec![raw];
        arguments.extend(flags.iter_mut().map(|flag| from_mut(flag).cast::<c_void>()));
        // SAFETY: the kernels take a `PagedCall` and the `int`s given, and wait for the kernel in front.
        unsafe { gpu.launch_dependent(function, blocks(count)?, threads, shared, stream, &mut arguments) }
    };
    // Blocks of one part may append to it and read it; several tiles of rows are several blocks.
    let appends = tiles == 1;
    let hopper = hopper && may_prefill(call);
    if !hopper && (may_prefill(call) || !appends) {
        let append = prefill_module.function(&format!("paged_append_first_{element}_{head_size}"), 0)?;
        start(append, (total_rows * kv_heads * 2).div_ceil(WARPS), THREADS, 0, &mut [(!appends).into()])?;
    }
    if hopper {
        // SAFETY: the caller's.
        unsafe { paged_attention_sm90::prefill(gpu, call, !appends, stream) }?;
    } else if may_prefill(call) {
        let shared = prefill_shared(head_size, call.format);
        let prefill = prefill_module.function(&format!("paged_prefill_{name}"), shared)?;
        let count = total_rows * call.group() / BLOCK_ROWS + call.sequences;
        start(prefill, count * kv_heads, THREADS, shared, &mut [])?;
        if let Some(weights) = call.key_weights {
            let shared = weighing_shared(head_size, call.format);
            let weigh = prefill_module.function(&format!("paged_weigh_rows_{name}"), shared)?;
            let tiles = call.sequences * kv_heads * weights.len.div_ceil(prefill_keys(head_size, call.format));
            let count = (gpu.multiprocessors as usize * WEIGHING_BLOCKS).min(tiles).max(1);
            start(weigh, count, THREADS, shared, &mut [])?;
        }
    }
    // The weights of sequences without rows are written behind decode.
    if call.rows_each.0 > decoded_rows(call) && call.key_weights.is_none() {
        return Ok(());
    }
    let count = call.partial_count() * kv_heads * tiles;
    // Other chips since sm_80 may have less shared memory for a block.
    let few =
        gpu.is_hopper() && (head_size, call.format) == (128, KvFormat::Native) && count <= gpu.multiprocessors as usize;
    let (shared, tiles_flag) = (decode_shared(head_size, call.format, few), tiles as i32);
    let decode = decode_module.function(&format!("paged_decode_{}{name}", if few { "few_" } else { "" }), shared)?;
    start(decode, count, THREADS, shared, &mut [tiles_flag, i32::from(appends) | i32::from(call.settled) << 1])?;
    // Rows of the call, or of each sequence as many as decode takes, whichever are fewer.
    let per_sequence = decoded_rows(call);
    let by_sequence = total_rows > call.sequences * per_sequence;
    let heads = if by_sequence { call.sequences * per_sequence } else { total_rows } * call.query_heads;
    // The same bits either way: few rows have warps to spare.
    let (name, combining) = if heads <= WIDE {
        ("combine_wide", heads)
    } else {
        ("combine", heads.div_ceil(COMBINING_THREADS as usize / 32))
    };
    let per_sequence = if by_sequence { per_sequence as i32 } else { 0 };
    let Some(weights) = call.key_weights else {
        let combine = decode_module.function(&format!("paged_{name}_{element}_{head_size}"), 0)?;
        return start(combine, combining, COMBINING_THREADS, 0, &mut [tiles_flag, per_sequence]);
    };
    let combine = decode_module.function(&format!("paged_weigh_{name}_{element}_{head_size}"), 0)?;
    let count = combining + call.sequences * kv_heads * weights.len.div_ceil(WEIGHED);
    start(combine, count, COMBINING_THREADS, 0, &mut [tiles_flag, per_sequence, blocks(combining)? as i32])
}

fn format_name(format: KvFormat) -> &'static str {
    match format {
        KvFormat::Native => "native",
        KvFormat::Int8 => "int8",
        KvFormat::Int4 => "int4",
        KvFormat::Fp8 => "fp8",
    }
}

/// Bytes from key to key and from value to value in shared memory; `Layout` of cuda/llm/paged_fragments.cuh.
fn strides(head_size: usize, format: KvFormat) -> [usize; 2] {
    let bytes = format.pool_width(head_size) * if format == KvFormat::Native { 2 } else { 1 };
    if bytes.is_multiple_of(128) {
        return [bytes, bytes];
    }
    let padded =
        |by: usize, rest: usize| (bytes..).step_by(16).find(|stride| stride % by == rest).expect("there is one");
    [padded(128, 64), padded(64, 16)]
}

/// Shared memory of the numbers that are known of `keys` slots; `Slots` and `Table` of the kernels.
fn known_bytes(keys: usize, format: KvFormat) -> usize {
    keys * 12 + if format == KvFormat::Native { 8 } else { keys * 8 }
}

/// `Memory` of cuda/llm/paged_decode.cuh; `few`: of a launch of few blocks.
fn decode_shared(head_size: usize, format: KvFormat, few: bool) -> usize {
    const KEYS: usize = 16;
    let tile = KEYS * strides(head_size, format).iter().sum::<usize>();
    let two_stages = !few && (tile > 6 * 1024 || (head_size, format) == (128, KvFormat::Int8));
    let ring = if two_stages { 2 } else { 4 } * tile;
    let merge = ROWS * (head_size + 4) * size_of::<f32>();
    let known = known_bytes(span(format) / WARPS, format).next_multiple_of(16);
    ROWS * (head_size + 8) * 2 + WARPS * (known + ring.max(merge))
}

/// Keys of a tile of prefill; `Prefill` of cuda/llm/paged_prefill.cuh.
fn prefill_keys(head_size: usize, format: KvFormat) -> usize {
    if head_size > 128 || format != KvFormat::Native { 32 } else { 64 }
}

/// `Prefill` of cuda/llm/paged_prefill.cuh.
fn prefill_shared(head_size: usize, format: KvFormat) -> usize {
    let keys = prefill_keys(head_size, format);
    let tile = keys * strides(head_size, format).iter().sum::<usize>();
    BLOCK_ROWS * (head_size + 8) * 2 + 2 * tile + 4 * known_bytes(keys, format)
}

/// The same without values.
fn weighing_shared(head_size: usize, format: KvFormat) -> usize {
    let keys = prefill_keys(head_size, format);
    BLOCK_ROWS * (head_size + 8) * 2 + keys * strides(head_size, format)[0] + known_bytes(keys, format)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_fit_into_a_multiprocessor() {
        for head_size in [64, 96, 128, 256] {
            for format in [KvFormat::Native, KvFormat::Int8, KvFormat::Int4, KvFormat::Fp8] {
                // What a block of sm_80 may have.
                assert!(decode_shared(head_size, format, false) + 1024 <= 163 * 1024, "D={head_size} {format:?}");
                assert!(prefill_shared(head_size, format) <= 163 * 1024, "D={head_size} {format:?}");
                assert!(
                    weighing_shared(head_size, format) < prefill_shared(head_size, format),
                    "D={head_size} {format:?}"
                );
            }
        }
        // Hopper's alone.
        assert!(decode_shared(128, KvFormat::Native, true) + 1024 <= 227 * 1024);
    }
}
