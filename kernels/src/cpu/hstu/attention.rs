//! `HstuAttention` on the CPU.
//!
//! A unit of work is a block of one user's rows in one head. The block walks over the keys it sees tile by tile; a
//! tile is brought into `f32` once, from numbers or from the codes of a quantised pool, and used by every group of rows in
//! the block (`tile.rs` does the arithmetic).

use std::ops::Range;

use super::tile::{self, Ahead, Bounds, Group, Place, TILE, Tile};
use crate::common::input_error::check_output;
use crate::common::parallel::{Parallel, Serial, run_once};
use crate::cpu::common::kv_block::dequantise;
use crate::cpu::common::scratch::{self, Scratch};
use crate::cpu::common::{Isa, Shared, simd};
use crate::hstu::Mask;
use crate::{CheckedAttention, Element, HstuAttention, InputError, KvFormat, KvView};
use simd::{Simd, groups};

/// Rows of a block: what a tile brought into `f32` is used for.
const BLOCK: usize = 128;

/// The most lanes a group of rows has in any instruction set.
const MAX_LANES: usize = 64;

/// The fewest.
const MIN_LANES: usize = 8;

/// Pairs times D below which handing work to another thread costs more than it saves.
const SERIAL_BELOW: u64 = 1 << 18;

compiled! {
    /// An element type that [`HstuAttention`] is compiled for.
    pub trait HstuAttentionElement {
        fn hstu_attention(
            call: &CheckedAttention<'_, Self>,
            isa: Isa,
            output: &mut [Self],
            parallel: &dyn Parallel,
        ) -> Result<(), InputError>;
    }
}

impl<T: HstuAttentionElement> HstuAttention<'_, T> {
    /// Checks, then computes `output` (`[T, H, D]`, every element is written) with the best instruction set. After an
    /// error the output is as it was.
    pub fn run(&self, output: &mut [T], parallel: &dyn Parallel) -> Result<(), InputError> {
        self.check()?.run(output, parallel)
    }

    /// As [`run`](Self::run), with the instruction set given. The bits of a result may differ between sets, and
    /// within one set depend on nothing but the row's own inputs.
    ///
    /// # Panics
    /// Where this CPU does not have `isa`.
    pub fn run_with(&self, isa: Isa, output: &mut [T], parallel: &dyn Parallel) -> Result<(), InputError> {
        self.check()?.run_with(isa, output, parallel)
    }
}

impl<T: HstuAttentionElement> CheckedAttention<'_, T> {
    /// As [`HstuAttention::run`], without the checks but for the output's length.
    pub fn run(&self, output: &mut [T], parallel: &dyn Parallel) -> Result<(), InputError> {
        self.run_with(Isa::detect(), output, parallel)
    }

    fn run_with(&self, isa: Isa, output: &mut [T], parallel: &dyn Parallel) -> Result<(), InputError> {
        T::hstu_attention(self, isa, output, parallel)
    }
}

fn hstu_attention<T: Element>(
    call: &CheckedAttention<'_, T>,
    isa: Isa,
    output: &mut [T],
    parallel: &dyn Parallel,
) -> Result<(), InputError> {
    assert!(Isa::available().contains(&isa), "{isa:?} is not available on this CPU");
    let op = call.0;
    check_output("output", output.len(), op.query.len())?;
    for user in (0..op.rows.users()).filter(|_| op.candidates_only) {
        let first = op.rows.of(user).start;
        output[first * op.rows.width()..][..op.computed(user).start * op.rows.width()].fill(T::from_f32(0.0));
    }
    let mut blocks = call.blocks();
    let cost = blocks.iter().map(|block| block.pairs).sum::<u64>().saturating_mul(op.rows.head_size as u64);
    let parallel = if cost < SERIAL_BELOW { &Serial } else { parallel };
    // The heaviest first: what is left at the end is small and evens out.
    blocks.sort_by_key(|block| std::cmp::Reverse(block.pairs));
    let output = Shared(output.as_mut_ptr());
    run_once(parallel, blocks.len(), &|task| {
        scratch::with(|scratch| {
            let work = Work { op, block: &blocks[task], output: output.pointer() };
            // SAFETY: `isa` is available; the blocks cover different parts of the output, which is as long as
            // the query; each task runs once.
            unsafe {
                match isa {
                    Isa::Portable => work.run::<simd::portable::Portable>(scratch),
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx2 => run_avx2(&work, scratch),
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512 => run_avx512(&work, scratch),
                    #[cfg(not(target_arch = "x86_64"))]
                    _ => unreachable!("not available"),
                }
            }
        });
    });
    Ok(())
}

impl<T: Element> CheckedAttention<'_, T> {
    fn blocks(&self) -> Vec<Block> {
        let op = self.0;
        let mut blocks = Vec::new();
        for user in 0..op.rows.users() {
            let mask = op.mask(user);
            let cached = op.cached(user) as i64;
            let computed = op.computed(user);
            for first in computed.clone().step_by(BLOCK) {
                let rows = first..computed.end.min(first + BLOCK);
                let pairs = rows.clone().map(|row| mask.history_keys(cached + row as i64));
                let pairs = pairs.map(|keys| (keys.end - keys.start) as u64 + 1).sum();
                for head in 0..op.rows.heads {
                    blocks.push(Block { user, head, rows: rows.clone(), pairs });
                }
            }
        }
        blocks
    }
}

struct Block {
    user: usize,
    head: usize,
    /// Counted from the user's first row.
    rows: Range<usize>,
    /// How much work it is, roughly.
    pairs: u64,
}

/// A block with all that is needed to compute it.
struct Work<'a, T> {
    op: &'a HstuAttention<'a, T>,
    block: &'a Block,
    output: *mut T,
}

/// # Safety
/// As for [`Work::run`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn run_avx2<T: Element>(work: &Work<'_, T>, scratch: &mut Scratch) {
    // SAFETY: the caller's.
    unsafe { work.run::<simd::avx2::Avx2>(scratch) }
}

/// # Safety
/// As for [`Work::run`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx2,fma,f16c")]
unsafe fn run_avx512<T: Element>(work: &Work<'_, T>, scratch: &mut Scratch) {
    // SAFETY: the caller's.
    unsafe { work.run::<simd::avx512::Avx512>(scratch) }
}

/// Keys that are counted in one way: the history, or the candidates.
#[derive(Clone, Copy)]
enum Keys {
    History,
    Candidates,
}

impl Keys {
    fn seen(self, mask: &Mask, row: i64) -> Range<i64> {
        match self {
            Keys::History => mask.history_keys(row),
            Keys::Candidates => mask.candidate_keys(row),
        }
    }
}

/// Where the keys and values of a tile lie.
struct TileRows {
    places: [[Place; 2]; TILE],
    /// Those of the tile that some row of the block sees; the others are nowhere.
    wanted: Range<usize>,
    /// What is there: codes, all of them, or numbers of the type of the call.
    format: KvFormat,
}

impl TileRows {
    /// Brings keys and values into `f32`.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`; the rows come from [`Work::locate`] of a call in `T` with this head size.
    #[inline(always)]
    unsafe fn widen<S: Simd, T: Element>(&self, head_size: usize, keys: &mut [f32], values: &mut [f32]) {
        let (width, scales) = (self.format.pool_width(head_size), self.format.scales_width());
        for i in self.wanted.clone() {
            let at = i * head_size..(i + 1) * head_size;
            for (from, to) in self.places[i].iter().zip([&mut keys[at.clone()], &mut values[at]]) {
                // SAFETY: the set is the caller's; `locate` has taken the places from slices of these lengths.
                unsafe {
                    if self.format == KvFormat::Native {
                        T::widen::<S>(std::slice::from_raw_parts(from.numbers.cast(), head_size), to);
                        continue;
                    }
                    let codes = std::slice::from_raw_parts(from.numbers, width);
                    dequantise::<S>(self.format, codes, std::slice::from_raw_parts(from.scales, scales), to);
                }
            }
        }
    }
}

impl<'a, T: Element> Work<'a, T> {
    /// # Safety
    /// The CPU has the instructions of `S`; `output` is as long as the query, and no other task touches the block's
    /// part of it.
    #[inline(always)]
    unsafe fn run<S: Simd>(&self, scratch: &mut Scratch) {
        let head_size = self.op.rows.head_size;
        let lanes = self.block.rows.len().next_multiple_of(S::LANES);
        let queries = scratch.queries.at_least(lanes * head_size);
        let outputs = scratch.outputs.at_least(lanes * head_size);
        let row = scratch.row.at_least(head_size);
        let weights = scratch.weights.at_least(TILE * MAX_LANES);
        let keys = scratch.keys.at_least(TILE * head_size);
        let values = scratch.values.at_least(TILE * head_size);

        // SAFETY: the set is the caller's; every buffer has the size that its layout asks for.
        unsafe {
            self.pack_queries::<S>(queries, row);
            outputs[..lanes * head_size].fill(0.0);
            for which in [Keys::History, Keys::Candidates] {
                let mask = self.op.mask(self.block.user);
                let first = (self.op.cached(self.block.user) + self.block.rows.start) as i64;
                let mut seen = [const { 0..0 }; BLOCK];
                let seen = &mut seen[..self.block.rows.len()];
                for (row, seen) in (first..).zip(seen.iter_mut()) {
                    *seen = which.seen(&mask, row);
                }
                let all = Reach::of(seen).any;
                let mut reaches = [const { Reach { any: 0..0, all: 0..0 } }; BLOCK / MIN_LANES];
                for (reach, (rows, _)) in reaches.iter_mut().zip(groups::<S>(seen.len())) {
                    *reach = Reach::of(&seen[rows]);
                }
                let mut start = all.start / TILE as i64 * TILE as i64;
                let mut wanted = self.locate(which, start, &all);
                while start < all.end {
                    let next = self.locate(which, start + TILE as i64, &all);
                    wanted.widen::<S, T>(head_size, keys, values);
                    let tile =
                        Tile { keys: keys.as_ptr(), values: values.as_ptr(), head_size, alpha: self.op.score_scale() };
                    let bytes = match next.format {
                        KvFormat::Native => head_size * size_of::<T>(),
                        format => format.pool_width(head_size),
                    };
                    let parts = groups::<S>(seen.len()).count();
                    let mut ahead = next.places[next.wanted.clone()].chunks(TILE.div_ceil(parts));
                    for ((rows, vectors), reach) in groups::<S>(seen.len()).zip(&reaches) {
                        let at = rows.start * head_size;
                        let group = Group {
                            vectors,
                            stride: vectors * S::LANES,
                            queries: queries[at..].as_ptr(),
                            outputs: outputs[at..].as_mut_ptr(),
                            weights: weights.as_mut_ptr(),
                        };
                        let ahead = Ahead { places: ahead.next().unwrap_or_default(), bytes };
                        attend::<S>(group, tile, ahead, &seen[rows], reach, start);
                    }
                    wanted = next;
                    start += TILE as i64;
                }
            }
            self.write::<S>(outputs, row);
        }
    }

    /// Transposes the block's queries, so that rows are in lanes: `[group][D][lanes]`, zeros in lanes without a row.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    unsafe fn pack_queries<S: Simd>(&self, queries: &mut [f32], row: &mut [f32]) {
        let head_size = self.op.rows.head_size;
        let row = &mut row[..head_size];
        for (rows, vectors) in groups::<S>(self.block.rows.len()) {
            let lanes = vectors * S::LANES;
            let group = &mut queries[rows.start * head_size..][..lanes * head_size];
            if rows.len() < lanes {
                group.fill(0.0);
            }
            for (lane, i) in rows.enumerate() {
                let at = self.offset(self.block.rows.start + i);
                // SAFETY: the set is the caller's.
                unsafe { T::widen::<S>(&self.op.query[at..at + head_size], row) };
                for (to, from) in group[lane..].iter_mut().step_by(lanes).zip(&*row) {
                    *to = *from;
                }
            }
        }
    }

    /// Finds the rows of the tile at `start` that lie within `all`.
    #[inline(always)]
    fn locate(&self, which: Keys, start: i64, all: &Range<i64>) -> TileRows {
        let op = self.op;
        let user = self.block.user;
        let (cached, pooled) = (op.cached(user), op.pooled(user));
        let (first, format) = match (which, op.cache) {
            // Of a quantised pool the whole history is in the pool.
            (Keys::History, Some((_, KvView::Quantised { format, .. }))) => (0, format),
            (Keys::History, _) => (0, KvFormat::Native),
            (Keys::Candidates, _) => (cached + op.rows.new_history(user), KvFormat::Native),
        };
        let end = all.end.min(start + TILE as i64);
        let nowhere = Place { numbers: std::ptr::null(), scales: std::ptr::null() };
        let mut found = TileRows {
            places: [[nowhere; 2]; TILE],
            wanted: (all.start.max(start) - start) as usize..(end - start).max(0) as usize,
            format,
        };
        for i in found.wanted.clone() {
            let position = first + start as usize + i;
            found.places[i] = match op.cache {
                Some((pages, pool)) if position < pooled => {
                    let page = pages.of(user)[position / pages.page_size] as usize;
                    let slot = page * 2 * pages.page_size + position % pages.page_size;
                    [slot, slot + pages.page_size]
                        .map(|slot| self.in_pool(pool, slot * op.rows.heads + self.block.head))
                }
                _ => {
                    let at = self.offset(position - cached);
                    [op.key, op.value].map(|rows| self.in_tensor(rows, at))
                }
            };
        }
        found
    }

    /// Where a block of the pool lies.
    #[inline(always)]
    fn in_pool(&self, pool: KvView<'_, T>, block: usize) -> Place {
        match pool {
            KvView::Native(pool) => self.in_tensor(pool, block * self.op.rows.head_size),
            KvView::Quantised { format, codes, scales } => {
                let (width, scale) = (format.pool_width(self.op.rows.head_size), format.scales_width());
                let (codes, scales) = (&codes[block * width..][..width], &scales[block * scale..][..scale]);
                Place { numbers: codes.as_ptr(), scales: scales.as_ptr() }
            }
        }
    }

    /// Where a head of a row lies.
    #[inline(always)]
    fn in_tensor(&self, rows: &[T], at: usize) -> Place {
        let numbers = &rows[at..at + self.op.rows.head_size];
        Place { numbers: numbers.as_ptr().cast(), scales: std::ptr::null() }
    }

    /// Turns the outputs back, scales, rounds and writes them.
    ///
    /// # Safety
    /// As for [`Self::run`].
    #[inline(always)]
    unsafe fn write<S: Simd>(&self, outputs: &[f32], row: &mut [f32]) {
        let head_size = self.op.rows.head_size;
        let row = &mut row[..head_size];
        let scale = (1.0 / self.op.scaling_seqlen as f64) as f32;
        for (rows, vectors) in groups::<S>(self.block.rows.len()) {
            let lanes = vectors * S::LANES;
            let group = &outputs[rows.start * head_size..][..lanes * head_size];
            for (lane, i) in rows.enumerate() {
                for (to, from) in row.iter_mut().zip(group[lane..].iter().step_by(lanes)) {
                    *to = from * scale;
                }
                let at = self.offset(self.block.rows.start + i);
                // SAFETY: the row lies inside the output, and in this block's part of it.
                unsafe {
                    let to = std::slice::from_raw_parts_mut(self.output.add(at), head_size);
                    T::narrow::<S>(row, to);
                }
            }
        }
    }

    /// Where the block's head of the user's row `row` begins in a `[T, H, D]` tensor.
    #[inline(always)]
    fn offset(&self, row: usize) -> usize {
        let rows = &self.op.rows;
        ((rows.of(self.block.user).start + row) * rows.heads + self.block.head) * rows.head_size
    }
}

/// One group of rows against one tile: works out which keys of it the rows see.
///
/// # Safety
/// As for [`tile::attend`]; `reach` is that of `seen`, which has a range for each row of the group.
#[inline(always)]
unsafe fn attend<S: Simd>(group: Group, tile: Tile, ahead: Ahead<'_>, seen: &[Range<i64>], reach: &Reach, start: i64) {
    // SAFETY: the caller's; what `in_tile` gives lies within the tile.
    unsafe {
        let Some((visible, whole)) = reach.in_tile(start) else { return };
        if whole {
            return tile::attend::<S>(group, tile, ahead, visible);
        }
        // Vector by vector: the keys that one of them sees are fewer than those that all of them see.
        for (number, seen) in seen.chunks(S::LANES).enumerate() {
            let Some((visible, whole)) = Reach::of(seen).in_tile(start) else { continue };
            let vector = group.vector::<S>(number);
            if whole {
                tile::attend::<S>(vector, tile, Ahead::default(), visible);
                continue;
            }
            // Lanes without a row see nothing.
            let (mut first, mut end) = ([0.0; MAX_LANES], [0.0; MAX_LANES]);
            for (lane, seen) in seen.iter().enumerate() {
                first[lane] = in_tile(seen.start, start) as f32;
                end[lane] = in_tile(seen.end, start) as f32;
            }
            let bounds = Bounds { first: first.as_ptr(), end: end.as_ptr() };
            tile::attend_within::<S>(vector, tile, visible, bounds);
        }
    }
}

/// What several rows see, in short.
struct Reach {
    /// From the first key that any row sees to the end of the last.
    any: Range<i64>,
    /// The keys that every row sees.
    all: Range<i64>,
}

impl Reach {
    fn of(seen: &[Range<i64>]) -> Reach {
        let some = || seen.iter().filter(|keys| !keys.is_empty());
        let start = some().map(|keys| keys.start).min().unwrap_or(0);
        let end = some().map(|keys| keys.end).max().unwrap_or(0);
        let last_start = seen.iter().map(|keys| keys.start).max().unwrap_or(0);
        let first_end = seen.iter().map(|keys| keys.end).min().unwrap_or(0);
        Reach { any: start..end, all: last_start..first_end }
    }

    /// The keys of the tile at `start` that may be seen, where there are any, and whether every row sees all of them.
    fn in_tile(&self, start: i64) -> Option<(Range<usize>, bool)> {
        let visible = in_tile(self.any.start, start)..in_tile(self.any.end, start);
        let whole = in_tile(self.all.start, start) <= visible.start && visible.end <= in_tile(self.all.end, start);
        (!visible.is_empty()).then_some((visible, whole))
    }
}

fn in_tile(position: i64, start: i64) -> usize {
    (position - start).clamp(0, TILE as i64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::reference;
    use crate::{Pages, Rows};

    /// Small enough for Miri to go through every unsafe line of the portable kernel in seconds: two users, a page
    /// boundary, a tile boundary under Miri, candidates.
    #[test]
    fn a_small_call_matches_the_reference() {
        let (heads, head_size, page_size, total_rows) = (1, 3, 8, 9);
        let numbers = |count: usize, seed: usize| -> Vec<f32> {
            (0..count).map(|i| ((i * 37 + seed * 11) % 23) as f32 / 11.5 - 1.0).collect()
        };
        let width = heads * head_size;
        let [query, key, value] = [1, 2, 3].map(|seed| numbers(total_rows * width, seed));
        let mut pool = numbers(3 * 2 * page_size * width, 4);
        // User 1 has no cached token: whatever lies in its page must not be read.
        pool[2 * page_size * width..][..2 * page_size * width].fill(f32::NAN);
        let pages =
            Pages { cached_len: &[11, 0], page_indptr: &[0, 2, 3], page_ids: &[2, 0, 1], pool_pages: 3, page_size };
        let rows = Rows { row_offsets: &[0, 6, 9], num_candidates: &[2, 1], total_rows, heads, head_size };
        let (scaling_seqlen, target_group_size, max_attn_len) = (5, 1, 9);
        let cache = Some((pages, KvView::Native(&pool)));
        let (query, key, value) = (&query[..], &key[..], &value[..]);
        let call = HstuAttention {
            rows,
            query,
            key,
            value,
            cache,
            num_contextual: None,
            alpha: 0.0,
            scaling_seqlen,
            target_group_size,
            max_attn_len,
            candidates_only: false,
        };
        let expected = reference::hstu_attention(&call).unwrap();
        for isa in Isa::available() {
            let mut output = vec![f32::NAN; query.len()];
            call.run_with(isa, &mut output, &Serial).unwrap();
            for (got, expected) in output.iter().zip(&expected) {
                assert!((f64::from(*got) - expected).abs() < 1e-5, "{isa:?}: {got} is not {expected}");
            }
        }
    }
}
