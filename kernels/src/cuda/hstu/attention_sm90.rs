//! `HstuAttention` on Hopper: which of the three kernels, with how many blocks.

use std::ffi::c_void;
use std::ptr::from_mut;

use cudarc::driver::sys::{CUdeviceptr, CUstream};

use super::call::{Attention, Scratch, blocks, row_blocks};
use crate::cuda::common::counters;
use crate::cuda::common::error::CudaError;
use crate::cuda::common::gpu::Gpu;
use crate::cuda::common::module::{Function, Module};
use crate::cuda::common::raw::{AttentionMaps, TensorMap};
use crate::cuda::common::tensor_map::describe;

const CLUSTER: u32 = 4;

/// Items for each multiprocessor from which on each item gets a block of its own, instead of a persistent kernel: then
/// the hardware's scheduling is worth more than prefetching from one item to the next.
const MANY_ITEMS: u32 = 8;

/// Keys below which a user is never split; `is_split` of cuda/common/attention/batch.cuh.
const SPLIT_KEYS: usize = 1024;

/// Segments of the keys of a split user, and the slots for the sums over them; `SEGMENTS` of
/// cuda/common/attention_sm90/traits.cuh, and `Common` of split_kv.cuh.
const SEGMENTS: usize = 4;
const SLOTS: usize = 2;

/// Flags of a launch; cuda/common/attention_sm90/traits.cuh.
const APPENDS: i32 = 1;
const ALONE: i32 = 2;
const CLEARS: i32 = 4;
const EARLY: i32 = 8;

/// The most scratch memory that a call uses: one that needs more does without.
const MOST_SCRATCH: usize = 256 << 20;

/// The scratch memory of split-KV by parts; see [`Gpu::most_scratch_bytes`].
pub fn scratch_bytes(call: &Attention) -> usize {
    let Shape { rows, .. } = Shape::of(call.rows.head_size, Mode::Parts);
    let bytes = parted_blocks(call) * SLOTS * rows * call.rows.head_size * size_of::<f32>();
    if bytes > MOST_SCRATCH || counter_bytes(call) > counters::BYTES { 0 } else { bytes }
}

/// Four counters of the call, then one for the 64 rows of each warpgroup; `Common` of
/// cuda/common/attention_sm90/split_kv.cuh.
fn counter_bytes(call: &Attention) -> usize {
    let Shape { rows, .. } = Shape::of(call.rows.head_size, Mode::Parts);
    (4 + parted_blocks(call) * (rows / 64)) * size_of::<u32>()
}

/// The most blocks of rows that split users can have in `Mode::Parts`.
fn parted_blocks(call: &Attention) -> usize {
    let Shape { rows, .. } = Shape::of(call.rows.head_size, Mode::Parts);
    row_blocks(call, rows_to_split(call), rows) * call.rows.heads
}

/// Whether parts are faster than clusters: not where there are few items, nor where most users are not split.
pub fn wants_scratch(gpu: &Gpu, call: &Attention) -> Result<bool, CudaError> {
    let module = gpu.modules.attention_sm90.as_ref().expect("the path was offered");
    Ok(mostly_split(call) && !few_items(call, clustered(module, call)?.clusters))
}

/// Whether all items are soon done by so many clusters: there is one for each, or for two of them where heads are not
/// large (parts that all run at once have to wait for one another).
fn few_items(call: &Attention, clusters: u32) -> bool {
    let each = if call.rows.head_size == 256 { 1 } else { 2 };
    clustered_items(call) <= each * clusters as usize
}

/// Not where most users cannot be split, because their rows are more than a quarter of the tokens that there are pages
/// for.
fn mostly_split(call: &Attention) -> bool {
    rows_to_split(call) > 0 && call.rows.total_rows <= tokens(call) / 4
}

/// The most items that split users can have in `Mode::Cluster`.
fn clustered_items(call: &Attention) -> usize {
    row_blocks(call, rows_to_split(call), Shape::of(call.rows.head_size, Mode::Cluster).rows) * call.rows.heads
}

/// The most rows that split users can have together: each brings at most a third as many as are cached.
fn rows_to_split(call: &Attention) -> usize {
    let tokens = tokens(call);
    if tokens + call.rows.total_rows < SPLIT_KEYS { 0 } else { call.rows.total_rows.min(tokens / 3) }
}

/// How many tokens there are pages for.
fn tokens(call: &Attention) -> usize {
    call.cache.map_or(0, |cache| cache.page_entries * cache.page_size)
}

fn clustered(module: &Module, call: &Attention) -> Result<Function, CudaError> {
    let Shape { threads, shared, .. } = Shape::of(call.rows.head_size, Mode::Cluster);
    let name = format!("hopper_split_{}_{}", call.element.name(), call.rows.head_size);
    module.clustered(&name, shared, threads, CLUSTER)
}

/// What a kernel does with the keys of an item: all of them, or split-KV; `Mode` of
/// cuda/common/attention_sm90/traits.cuh.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mode {
    Whole,
    Cluster,
    Parts,
}

/// How a kernel is compiled for a head size; `Traits` of cuda/common/attention_sm90/traits.cuh.
struct Shape {
    rows: usize,
    threads: u32,
    shared: usize,
}

impl Shape {
    fn of(head_size: usize, mode: Mode) -> Self {
        let groups = match (head_size, mode) {
            (_, Mode::Cluster) => 1,
            (32 | 64, _) | (128, Mode::Parts) => 3,
            _ => 2,
        };
        let tile = if head_size == 256 || (head_size == 128 && groups == 3) { 64 } else { 128 };
        let buffers = match (head_size, mode) {
            (32 | 64, Mode::Whole) => 8,
            (32 | 64, Mode::Cluster) => 12,
            (32 | 64, Mode::Parts) => 10,
            (_, Mode::Cluster) => 6,
            (128, Mode::Whole) => 4,
            (128, Mode::Parts) => 8,
            _ => 5,
        };
        let items = if head_size == 256 || mode == Mode::Cluster { 1 } else { 2 };
        let rows = 64 * groups;
        // Behind the queries and tiles: barriers and items.
        let shared = (items * rows + buffers * tile) * head_size * 2 + 1024;
        Self { rows, threads: 128 * (groups as u32 + 1), shared }
    }
}

/// One kernel where most users are split: in parts where there is memory for that, else in clusters if there are few
/// items. Otherwise one for the users that are not split, and then one for those that are, if there can be any.
///
/// # Safety
/// As for [`Gpu::attention`]; the kernel takes the call.
pub unsafe fn launch(gpu: &Gpu, call: &Attention, scratch: Option<Scratch>, stream: CUstream) -> Result<(), CudaError> {
    let module = gpu.modules.attention_sm90.as_ref().expect("the path was offered");
    let name = format!("{}_{}", call.element.name(), call.rows.head_size);
    let beside = if call.append { APPENDS } else { 0 } | if call.candidates_only { CLEARS } else { 0 };
    let (mut raw, mut maps, mut granule) = (call.raw(), AttentionMaps::of(call)?, granule(call) as i32);
    let (raw, maps, granule) =
        (from_mut(&mut raw).cast::<c_void>(), from_mut(&mut maps).cast(), from_mut(&mut granule).cast());
    let needed = scratch_bytes(call);
    let scratch = scratch.filter(|given| needed > 0 && given.bytes >= needed && given.address.is_multiple_of(16));
    let counters = scratch.and_then(|_| gpu.counters.of(stream, counter_bytes(call)));
    if let Some((scratch, mut counters)) = scratch.zip(counters) {
        let Shape { rows, threads, shared } = Shape::of(call.rows.head_size, Mode::Parts);
        let parts = module.function(&format!("hopper_parts_{name}"), shared)?;
        let parted = parted_blocks(call);
        let count = (parted * SEGMENTS).max(row_blocks(call, call.rows.total_rows, rows) * call.rows.heads);
        let count = blocks(count)?.min(gpu.multiprocessors);
        let early = if call.settled_indices && counters.own { EARLY } else { 0 };
        let (mut duties, mut address, mut most) = (beside | ALONE | early, scratch.address, parted as i64);
        let arguments = &mut [
            raw,
            maps,
            granule,
            from_mut(&mut duties).cast(),
            from_mut(&mut counters.address).cast(),
            from_mut(&mut address).cast(),
            from_mut(&mut most).cast(),
        ];
        // SAFETY: the kernel takes a `Call`, `AttentionMaps`, two `int`s, two addresses and an `int64_t`; it waits
        // before it reads what another kernel writes.
        return unsafe { parts.launch_dependent(count, threads, shared, stream, arguments) };
    }
    let split = if rows_to_split(call) > 0 { Some(clustered(module, call)?) } else { None };
    let alone = split.filter(|split| mostly_split(call) && few_items(call, split.clusters)).is_some();
    let Shape { rows, threads, shared } = Shape::of(call.rows.head_size, Mode::Whole);
    let items = blocks(row_blocks(call, call.rows.total_rows, rows) * call.rows.heads)?;
    if !alone {
        let one_each = items >= MANY_ITEMS * gpu.multiprocessors;
        let whole = module.function(&format!("hopper_{name}"), shared)?;
        let count = if one_each { items } else { items.min(gpu.multiprocessors) };
        let (mut per_piece, mut duties) = (if one_each { 1 } else { 2 }, beside);
        let arguments = &mut [raw, maps, granule, from_mut::<i32>(&mut per_piece).cast(), from_mut(&mut duties).cast()];
        // SAFETY: the kernel takes a `Call`, `AttentionMaps` and three `int`s.
        unsafe { whole.launch(count, threads, shared, stream, arguments) }?;
    }
    let Some(split) = split else { return Ok(()) };
    let Shape { rows, threads, shared } = Shape::of(call.rows.head_size, Mode::Cluster);
    let items = blocks(row_blocks(call, call.rows.total_rows, rows) * call.rows.heads)?;
    // Clusters that do not fit onto the device at once would wait until others have done their whole share.
    let clusters = items.min(split.clusters);
    let early = if call.settled_indices { EARLY } else { 0 };
    let mut duties = if alone { beside | ALONE | early } else { 0 };
    let arguments = &mut [raw, maps, granule, from_mut(&mut duties).cast()];
    // SAFETY: the kernel takes a `Call`, `AttentionMaps` and two `int`s; it waits before it reads what another kernel
    // writes, or comes behind the kernel above, which must be an ordinary launch for that: it begins when all before it
    // has ended.
    unsafe { split.launch_dependent(clusters * CLUSTER, threads, shared, stream, arguments) }
}

/// Rows of a TMA box of queries, keys and values; `BOX` of cuda/common/attention_sm90/traits.cuh.
const BOX: usize = 64;

impl AttentionMaps {
    pub fn of(call: &Attention) -> Result<Self, CudaError> {
        let rows = call.rows.total_rows;
        let key = map(call, call.key, rows, BOX)?;
        Ok(Self {
            query: map(call, call.query, rows, BOX)?,
            key,
            value: map(call, call.value, rows, BOX)?,
            // Where there are no pages, no tile asks for this.
            pool: match call.cache {
                Some(cache) if cache.pool_pages > 0 => map(call, cache.pool, cache.pool_rows(), granule(call))?,
                _ => key,
            },
        })
    }
}

/// How many keys are fetched from a page at once: as many as divide every page, up to a box.
pub fn granule(call: &Attention) -> usize {
    call.cache.map_or(BOX, |cache| 1 << cache.page_size.trailing_zeros().min(BOX.trailing_zeros()))
}

/// A tensor `[rows, H, D]`, to be fetched by `height` rows of up to 128 bytes of one head.
fn map(call: &Attention, address: CUdeviceptr, rows: usize, height: usize) -> Result<TensorMap, CudaError> {
    let (heads, head_size) = (call.rows.heads, call.rows.head_size);
    describe(call.element, address, [head_size, heads, rows], [head_size.min(64), 1, height])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_fit_into_a_multiprocessor() {
        for head_size in [32, 64, 128, 256] {
            for mode in [Mode::Whole, Mode::Cluster, Mode::Parts] {
                // What a block of sm_90 may have.
                assert!(Shape::of(head_size, mode).shared <= 227 * 1024, "D={head_size} {mode:?}");
            }
        }
    }
}
