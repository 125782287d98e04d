//! `PagedAttention` on the CPU.
//!
//! A block is some tokens of one sequence with all query heads of one kv head: its rows read the same keys and values. It walks
//! over them tile by tile, with the online softmax: each row keeps the largest score so far, and the sums are scaled when it
//! grows. Tiles begin at multiples of [`TILE`], and every [`SEGMENT`] slots a row's sums are begun anew and merged in order.
//! So what a row comes out as depends on nothing but its own inputs: not on the rows beside it, the chunks in which a prompt
//! comes, nor the threads. A block of few rows, as in decoding, has its segments computed by several threads (split-KV); a
//! block of many computes them in order.

// Loops over const ranges with indices on both sides are what unrolls into registers, and what reads as arithmetic.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use crate::common::input_error::{check_output, expect};
use crate::cpu::Isa;
use crate::cpu::common::scratch::Scratch;
use crate::cpu::common::shared::Shared;
use crate::cpu::common::simd::{Simd, Work, run_on};
use crate::llm::kv_format::KvFormat;
use crate::llm::paged_attention::{KvPool, PagedAttention, Pairs, Rotation};
use crate::parallel::{Parallel, Serial, run_once};
use crate::{Element, InputError};

/// Keys in a tile; a multiple of the lanes of every instruction set.
const TILE: usize = if cfg!(miri) { 16 } else { 64 };
/// Slots whose sums are computed apart; a multiple of the tile.
const SEGMENT: usize = if cfg!(miri) { 32 } else { 1024 };
/// Rows of a block, unless one token has more.
const ROWS: usize = 64;
/// The most rows of a block of several tokens whose segments are computed apart: more would take much memory for their sums.
const SPLIT_ROWS: usize = 16;
/// The most blocks of one token each that are split: more keep every thread busy without.
const SPLIT_BLOCKS: usize = 64;
/// Products below which handing work to another thread costs more than it saves.
const SERIAL_BELOW: u64 = 1 << 18;
/// Rows, and vectors of a row, that the sum over values has in registers.
const SUM_ROWS: usize = 4;
const SUM_VECTORS: usize = 4;

impl<T: Element> PagedAttention<'_, T> {
    /// Checks, then appends the new keys and values to `pool` and computes `output` (`[T, Hq, D]`) with the best instruction
    /// set. `key_weights`: `[B, Hkv, L]` and L, where they are asked for. After an error nothing is written.
    pub fn run(
        &self,
        pool: &mut KvPool<'_, T>,
        output: &mut [T],
        key_weights: Option<(&mut [f32], usize)>,
        parallel: &dyn Parallel,
    ) -> Result<(), InputError> {
        self.run_with(Isa::detect(), pool, output, key_weights, parallel)
    }

    /// As [`run`](Self::run), with the instruction set given. The bits of a result may differ between sets.
    ///
    /// # Panics
    /// Where this CPU does not have `isa`.
    pub fn run_with(
        &self,
        isa: Isa,
        pool: &mut KvPool<'_, T>,
        output: &mut [T],
        key_weights: Option<(&mut [f32], usize)>,
        parallel: &dyn Parallel,
    ) -> Result<(), InputError> {
        assert!(Isa::available().contains(&isa), "{isa:?} is not available on this CPU");
        self.check(pool, key_weights.as_ref().map(|(_, len)| *len))?;
        check_output("output", output.len(), self.query.len())?;
        if let Some((weights, len)) = &key_weights {
            expect("key_weights", weights.len(), &[self.sequences(), self.kv_heads, *len])?;
        }
        append(self, pool);
        let stored = Stored::new(pool);
        let mut plan = Plan::new(self);
        let parallel = if plan.products < SERIAL_BELOW { &Serial as &dyn Parallel } else { parallel };
        // The heaviest first: what is left at the end is small and evens out.
        plan.tasks.sort_by_key(|task| std::cmp::Reverse(task.products));
        let padded = self.head_size.next_multiple_of(lanes(isa));
        let mut partial = vec![0.0; plan.partial_rows * (padded + 2)];
        let mut stats = key_weights.is_some().then(|| vec![0.0; self.total_rows * self.query_heads * 2]);
        let attend = Attend {
            op: self,
            stored,
            tasks: &plan.tasks,
            padded,
            partial: Shared(partial.as_mut_ptr()),
            stats: stats.as_mut().map(|stats| Shared(stats.as_mut_ptr())),
            output: Shared(output.as_mut_ptr()),
        };
        run_once(parallel, plan.tasks.len(), &|task| {
            // SAFETY: `isa` is available; the call is checked; tasks write different rows, and each runs once.
            unsafe { run_on(isa, &attend, task) }
        });
        let merge = Merge { attend: &attend, splits: &plan.splits };
        run_once(parallel, plan.splits.len(), &|task| {
            // SAFETY: as above; every segment is computed.
            unsafe { run_on(isa, &merge, task) }
        });
        if let (Some((weights, len)), Some(stats)) = (key_weights, &stats) {
            let weigh = Weigh { op: self, stored, stats, padded, len, weights: Shared(weights.as_mut_ptr()) };
            run_once(parallel, self.sequences() * self.kv_heads, &|task| {
                // SAFETY: as above; each task writes the weights of one head of one sequence.
                unsafe { run_on(isa, &weigh, task) }
            });
        }
        Ok(())
    }
}

fn lanes(isa: Isa) -> usize {
    if isa == Isa::Avx512 { 16 } else { 8 }
}

/// Writes the new keys, rotated, and values into their pages.
fn append<T: Element>(op: &PagedAttention<'_, T>, pool: &mut KvPool<'_, T>) {
    let size = op.head_size;
    let mut numbers = vec![0.0; size];
    for sequence in 0..op.sequences() {
        for (row, head) in op.rows(sequence).flat_map(|row| (0..op.kv_heads).map(move |head| (row, head))) {
            let at = (row * op.kv_heads + head) * size;
            let slot = op.write_slot(sequence, row, head);
            for (which, from) in [op.key, op.value].into_iter().enumerate() {
                let block = op.block(sequence, slot, which, head);
                let from = &from[at..at + size];
                let rotates = which == 0 && op.rotation.is_some();
                if let KvPool::Native(pool) = pool
                    && !rotates
                {
                    pool[block * size..][..size].copy_from_slice(from);
                    continue;
                }
                for (to, from) in numbers.iter_mut().zip(from) {
                    *to = from.to_f32();
                }
                if rotates {
                    rotate(op, row, &mut numbers);
                }
                match pool {
                    KvPool::Native(pool) => {
                        for (to, from) in pool[block * size..].iter_mut().zip(&numbers) {
                            *to = T::from_f32(*from);
                        }
                    }
                    KvPool::Quantised { codes, scales } => {
                        let (width, scale) = (op.format.pool_width(size), op.format.scales_width());
                        let codes = &mut codes[block * width..][..width];
                        op.format.quantise(&numbers, codes, &mut scales[block * scale..][..scale]);
                    }
                }
            }
        }
    }
}

/// Rotates a head of a row by the row's position.
#[inline(always)]
fn rotate<T>(op: &PagedAttention<'_, T>, row: usize, numbers: &mut [f32]) {
    let (Some(Rotation { cos, sin, half_width, pairs }), Some(positions)) = (op.rotation, op.positions) else { return };
    let first = positions[row] as usize * half_width;
    for index in 0..half_width {
        let (a, b) = match pairs {
            Pairs::Half => (index, index + half_width),
            Pairs::Interleaved => (2 * index, 2 * index + 1),
        };
        let (cos, sin) = (cos[first + index], sin[first + index]);
        (numbers[a], numbers[b]) = (numbers[a] * cos - numbers[b] * sin, numbers[b] * cos + numbers[a] * sin);
    }
}

/// The pool after the append, which is only read.
enum Stored<'a, T> {
    Native(&'a [T]),
    Quantised(&'a [u8], &'a [half::f16]),
}

impl<T> Clone for Stored<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Stored<'_, T> {}

impl<'a, T: Element> Stored<'a, T> {
    fn new(pool: &'a KvPool<'_, T>) -> Self {
        match pool {
            KvPool::Native(pool) => Self::Native(pool),
            KvPool::Quantised { codes, scales } => Self::Quantised(codes, scales),
        }
    }

    /// A block as f32: where it is, if it can be read there, else in `buffer`, padded with zeros.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    unsafe fn block<S: Simd>(self, op: &PagedAttention<'_, T>, block: usize, buffer: &mut [f32]) -> *const f32 {
        let size = op.head_size;
        match self {
            Self::Native(pool) => {
                let numbers = &pool[block * size..][..size];
                if size == buffer.len() && std::any::TypeId::of::<T>() == std::any::TypeId::of::<f32>() {
                    return numbers.as_ptr().cast();
                }
                // SAFETY: the caller's.
                unsafe { T::widen::<S>(numbers, &mut buffer[..size]) };
            }
            Self::Quantised(codes, scales) => {
                let (width, scale) = (op.format.pool_width(size), op.format.scales_width());
                let (codes, scales) = (&codes[block * width..][..width], &scales[block * scale..][..scale]);
                let scale = scales[0].to_f32();
                match op.format {
                    KvFormat::Int8 => {
                        let low = scales[1].to_f32();
                        for (to, code) in buffer.iter_mut().zip(codes) {
                            *to = low + f32::from(*code) * scale;
                        }
                    }
                    KvFormat::Int4 => {
                        let low = scales[1].to_f32();
                        for (to, code) in buffer.chunks_exact_mut(2).zip(codes) {
                            to[0] = low + f32::from(code & 15) * scale;
                            to[1] = low + f32::from(code >> 4) * scale;
                        }
                    }
                    _ => {
                        for (index, to) in buffer[..size].iter_mut().enumerate() {
                            *to = op.format.dequantise(codes, scales, index);
                        }
                    }
                }
            }
        }
        buffer[size..].fill(0.0);
        buffer.as_ptr()
    }
}

/// The rows of a block.
#[derive(Clone, Debug)]
struct Block {
    sequence: usize,
    head: usize,
    /// Rows of the batch: tokens of the sequence.
    tokens: Range<usize>,
}

/// A block, or one segment of it.
#[derive(Clone, Debug)]
struct Task {
    block: Block,
    segments: Range<usize>,
    /// Where the sums of the segment go, counted in rows, where segments are computed apart.
    partial: Option<usize>,
    products: u64,
}

/// A block whose segments are computed apart, and where their sums are.
struct Split {
    block: Block,
    segments: usize,
    partial: usize,
}

struct Plan {
    tasks: Vec<Task>,
    splits: Vec<Split>,
    partial_rows: usize,
    products: u64,
}

impl Plan {
    fn new<T: Element>(op: &PagedAttention<'_, T>) -> Self {
        let group = op.group();
        let mut plan = Self { tasks: Vec::new(), splits: Vec::new(), partial_rows: 0, products: 0 };
        for sequence in 0..op.sequences() {
            let rows = op.rows(sequence);
            for first in rows.clone().step_by((ROWS / group).max(1)) {
                let tokens = first..rows.end.min(first + (ROWS / group).max(1));
                let slots = match op.slots {
                    Some(slots) => slots.len,
                    None => op.cached(sequence) + tokens.end - rows.start,
                };
                let segments = slots.div_ceil(SEGMENT);
                let count = tokens.len() * group;
                for head in 0..op.kv_heads {
                    let block = Block { sequence, head, tokens: tokens.clone() };
                    let products = |slots: usize| (slots * count * op.head_size) as u64;
                    plan.products += products(slots);
                    let few = tokens.len() == 1 || count <= SPLIT_ROWS;
                    if segments < 2 || !few || op.sequences() * op.kv_heads > SPLIT_BLOCKS {
                        plan.tasks.push(Task {
                            block,
                            segments: 0..segments,
                            partial: None,
                            products: products(slots),
                        });
                        continue;
                    }
                    for segment in 0..segments {
                        plan.tasks.push(Task {
                            block: block.clone(),
                            segments: segment..segment + 1,
                            partial: Some(plan.partial_rows + segment * count),
                            products: products(SEGMENT),
                        });
                    }
                    plan.splits.push(Split { block, segments, partial: plan.partial_rows });
                    plan.partial_rows += segments * count;
                }
            }
        }
        plan
    }
}

/// The sums of some rows: the largest score, the sum of weights, and the sum of weighted values.
struct Sums<'a> {
    most: &'a mut [f32],
    total: &'a mut [f32],
    /// `[rows][padded]`.
    values: &'a mut [f32],
}

impl Sums<'_> {
    fn clear(&mut self) {
        self.most.fill(f32::NEG_INFINITY);
        self.total.fill(0.0);
        self.values.fill(0.0);
    }

    /// Adds the sums of another segment of one row.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`; `values` is as long as a row here.
    #[inline(always)]
    unsafe fn merge<S: Simd>(&mut self, row: usize, most: f32, total: f32, values: &[f32]) {
        if total == 0.0 {
            return;
        }
        let padded = values.len();
        let largest = if self.most[row] > most { self.most[row] } else { most };
        // SAFETY: the caller's.
        unsafe {
            let (old, new) = (exp2::<S>(self.most[row] - largest), exp2::<S>(most - largest));
            self.most[row] = largest;
            self.total[row] = self.total[row] * old + total * new;
            let to = self.values[row * padded..][..padded].as_mut_ptr();
            for at in (0..padded).step_by(S::LANES) {
                let scaled = S::mul(S::load(to.add(at)), S::splat(old));
                S::store(to.add(at), S::fma(S::load(values.as_ptr().add(at)), S::splat(new), scaled));
            }
        }
    }
}

/// # Safety
/// The CPU has the instructions of `S`.
#[inline(always)]
unsafe fn exp2<S: Simd>(x: f32) -> f32 {
    let mut lanes = [0.0; 16];
    // SAFETY: no set has more than 16 lanes; the rest is the caller's.
    unsafe { S::store(lanes.as_mut_ptr(), S::exp2(S::splat(x))) };
    lanes[0]
}

/// The attention of every task.
struct Attend<'a, T> {
    op: &'a PagedAttention<'a, T>,
    stored: Stored<'a, T>,
    tasks: &'a [Task],
    /// The head size, up to a multiple of the lanes.
    padded: usize,
    /// Of each row of a segment: the largest score, the sum of weights, the sum of weighted values.
    partial: Shared<f32>,
    /// Of each row and query head: the largest score and the sum of weights, for the key weights.
    stats: Option<Shared<f32>>,
    output: Shared<T>,
}

impl<T: Element> Work for Attend<'_, T> {
    /// # Safety
    /// No other thread runs the same task; the outputs are as long as the call says.
    #[inline(always)]
    unsafe fn run<S: Simd>(&self, task: usize, scratch: &mut Scratch) {
        let Task { block, segments, partial, .. } = &self.tasks[task];
        let rows = Rows::new(self.op, block);
        let (count, padded) = (rows.count(), self.padded);
        let queries = &mut scratch.queries.at_least(count * padded)[..count * padded];
        // SAFETY: the caller's.
        unsafe { rows.load_queries::<S>(queries, padded) };
        let outputs = scratch.outputs.at_least(2 * count * (padded + 2));
        let (own, merged) = outputs[..2 * count * (padded + 2)].split_at_mut(count * (padded + 2));
        let [mut own, mut merged] = [own, merged].map(|sums| {
            let (most, rest) = sums.split_at_mut(count);
            let (total, values) = rest.split_at_mut(count);
            Sums { most, total, values }
        });
        merged.clear();
        let weights = &mut scratch.weights.at_least(count * TILE)[..count * TILE];
        let keys = &mut scratch.keys.at_least(TILE * padded)[..TILE * padded];
        let values = &mut scratch.values.at_least(TILE * padded)[..TILE * padded];
        let mut tile = TileBuffers { keys, values, weights };
        for segment in segments.clone() {
            own.clear();
            let slots = segment * SEGMENT..((segment + 1) * SEGMENT).min(rows.slots);
            for start in slots.clone().step_by(TILE) {
                // SAFETY: the caller's; the buffers have the sizes that `rows` asks for.
                unsafe {
                    rows.attend::<S>(self.stored, start, slots.end.min(start + TILE), queries, &mut tile, &mut own)
                };
            }
            for row in 0..count {
                let values = &own.values[row * padded..][..padded];
                // SAFETY: the caller's; each segment has rows of its own in `partial`.
                unsafe {
                    match partial {
                        Some(first) => {
                            let to = self.partial.pointer().add((first + row) * (padded + 2));
                            to.write(own.most[row]);
                            to.add(1).write(own.total[row]);
                            std::ptr::copy_nonoverlapping(values.as_ptr(), to.add(2), padded);
                        }
                        None => merged.merge::<S>(row, own.most[row], own.total[row], values),
                    }
                }
            }
        }
        if partial.is_none() {
            // SAFETY: the caller's; the rows are this task's own.
            unsafe { self.finish::<S>(&rows, &mut merged) };
        }
    }
}

impl<T: Element> Attend<'_, T> {
    /// Adds the sinks, divides and writes the rows of a block.
    ///
    /// # Safety
    /// As for [`Work::run`]; no other thread writes these rows.
    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, rows: &Rows<'_, T>, sums: &mut Sums<'_>) {
        let (op, padded) = (self.op, self.padded);
        for row in 0..rows.count() {
            let (token, head) = rows.row(row);
            let mut scale = 1.0;
            if let Some(sinks) = op.sinks {
                let sink = sinks[head].to_f32() * std::f32::consts::LOG2_E;
                let largest = if sums.most[row] > sink { sums.most[row] } else { sink };
                // SAFETY: the caller's.
                let (old, new) = unsafe { (exp2::<S>(sums.most[row] - largest), exp2::<S>(sink - largest)) };
                (sums.most[row], sums.total[row], scale) = (largest, sums.total[row] * old + new, old);
            }
            // A row that sees nothing is zeros.
            let scale = if sums.total[row] == 0.0 { 0.0 } else { scale / sums.total[row] };
            let values = &mut sums.values[row * padded..][..op.head_size];
            values.iter_mut().for_each(|value| *value *= scale);
            let at = token * op.query_heads + head;
            // SAFETY: the row is inside the output, and this task's own.
            unsafe {
                let to = self.output.pointer().add(at * op.head_size);
                T::narrow::<S>(values, std::slice::from_raw_parts_mut(to, op.head_size));
                if let Some(stats) = self.stats {
                    stats.pointer().add(2 * at).write(sums.most[row]);
                    stats.pointer().add(2 * at + 1).write(sums.total[row]);
                }
            }
        }
    }
}

/// Merges the segments of blocks that were computed apart.
struct Merge<'a, T> {
    attend: &'a Attend<'a, T>,
    splits: &'a [Split],
}

impl<T: Element> Work for Merge<'_, T> {
    /// # Safety
    /// As for [`Attend`]; all segments are computed.
    #[inline(always)]
    unsafe fn run<S: Simd>(&self, task: usize, scratch: &mut Scratch) {
        let (Split { block, segments, partial }, padded) = (&self.splits[task], self.attend.padded);
        let rows = Rows::new(self.attend.op, block);
        let count = rows.count();
        let (most, rest) = scratch.outputs.at_least(count * (padded + 2))[..count * (padded + 2)].split_at_mut(count);
        let (total, values) = rest.split_at_mut(count);
        let mut sums = Sums { most, total, values };
        sums.clear();
        for (segment, row) in (0..*segments).flat_map(|segment| (0..count).map(move |row| (segment, row))) {
            // SAFETY: the caller's; the task of this segment has written it.
            unsafe {
                let from = self.attend.partial.pointer().add((partial + segment * count + row) * (padded + 2));
                let values = std::slice::from_raw_parts(from.add(2), padded);
                sums.merge::<S>(row, from.read(), from.add(1).read(), values);
            }
        }
        // SAFETY: the caller's.
        unsafe { self.attend.finish::<S>(&rows, &mut sums) };
    }
}

/// What a tile needs of memory.
struct TileBuffers<'a> {
    /// `[TILE][padded]`, for keys that can not be read where they are.
    keys: &'a mut [f32],
    /// The same of values.
    values: &'a mut [f32],
    /// `[rows][TILE]`.
    weights: &'a mut [f32],
}

/// The rows of a block: for each token the query heads of the group.
struct Rows<'a, T> {
    op: &'a PagedAttention<'a, T>,
    block: &'a Block,
    /// How many slots the last of them can see.
    slots: usize,
}

impl<'a, T: Element> Rows<'a, T> {
    fn new(op: &'a PagedAttention<'a, T>, block: &'a Block) -> Self {
        let slots = match op.slots {
            Some(slots) => slots.len,
            None => op.cached(block.sequence) + block.tokens.end - op.rows(block.sequence).start,
        };
        Self { op, block, slots }
    }

    fn count(&self) -> usize {
        self.block.tokens.len() * self.op.group()
    }

    /// The token and the query head of a row.
    fn row(&self, row: usize) -> (usize, usize) {
        let group = self.op.group();
        (self.block.tokens.start + row / group, self.block.head * group + row % group)
    }

    /// The queries as f32, rotated, padded with zeros.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    unsafe fn load_queries<S: Simd>(&self, queries: &mut [f32], padded: usize) {
        let size = self.op.head_size;
        for (row, to) in queries.chunks_exact_mut(padded).enumerate() {
            let (token, head) = self.row(row);
            let at = (token * self.op.query_heads + head) * size;
            // SAFETY: the caller's.
            unsafe { T::widen::<S>(&self.op.query[at..at + size], &mut to[..size]) };
            to[size..].fill(0.0);
            rotate(self.op, token, &mut to[..size]);
        }
    }

    /// The slots `start..end` that a row sees, where tokens are in order.
    #[inline(always)]
    fn seen(&self, token: usize, start: usize, end: usize) -> Range<usize> {
        let position = self.op.row_position(self.block.sequence, token);
        let first = if self.op.window == 0 { 0 } else { (position + 1 - self.op.window).max(0) as usize };
        first.clamp(start, end)..((position + 1) as usize).clamp(start, end)
    }

    /// Whether a row sees a slot, where every head has slots of its own.
    #[inline(always)]
    fn sees_slot(&self, token: usize, slot: usize) -> bool {
        let Some(position) = self.op.slot_position(self.block.sequence, self.block.head, slot) else { return false };
        let distance = self.op.row_position(self.block.sequence, token) - position;
        distance >= 0 && (self.op.window == 0 || distance < self.op.window)
    }

    /// Adds to the sums what the slots `start..end` of one tile contribute.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`; the buffers are as long as their layouts say.
    #[inline(always)]
    unsafe fn attend<S: Simd>(
        &self,
        stored: Stored<'_, T>,
        start: usize,
        end: usize,
        queries: &[f32],
        tile: &mut TileBuffers<'_>,
        sums: &mut Sums<'_>,
    ) {
        let (op, count) = (self.op, self.count());
        let padded = queries.len() / count;
        let group = op.group();
        let ordered = op.slots.is_none();
        // The slots that some row sees: no other is read.
        let any = if ordered {
            let [first, last] =
                [self.block.tokens.start, self.block.tokens.end - 1].map(|token| self.seen(token, start, end));
            first.start..last.end
        } else {
            start..end
        };
        if any.is_empty() {
            return;
        }
        // SAFETY: the caller's; slots that hold a token have blocks inside the pool, by the check.
        unsafe {
            // Every pointer is good for a row: those of slots that no row sees are never used for a result.
            let (key_buffer, value_buffer) = (tile.keys.as_mut_ptr(), tile.values.as_mut_ptr());
            let mut keys = [key_buffer.cast_const(); TILE];
            let mut values = [value_buffer.cast_const(); TILE];
            for slot in any.clone() {
                if ordered || op.slot_position(self.block.sequence, self.block.head, slot).is_some() {
                    let at = slot - start;
                    let [key, value] = [0, 1].map(|which| op.block(self.block.sequence, slot, which, self.block.head));
                    let [key_buffer, value_buffer] = [key_buffer, value_buffer]
                        .map(|buffer| std::slice::from_raw_parts_mut(buffer.add(at * padded), padded));
                    keys[at] = stored.block::<S>(op, key, key_buffer);
                    values[at] = stored.block::<S>(op, value, value_buffer);
                }
            }
            let mut scales = [1.0; ROWS_MOST];
            for rows in (0..count).step_by(SUM_ROWS) {
                let rows = rows..count.min(rows + SUM_ROWS);
                let mut seen = [const { 0..0 }; SUM_ROWS];
                for row in rows.clone() {
                    let (token, head) = (self.block.tokens.start + row / group, self.block.head * group + row % group);
                    let weights = &mut tile.weights[row * TILE..][..TILE];
                    let sees = if ordered { self.seen(token, start, end) } else { start..end };
                    seen[row - rows.start] = sees.start - start..sees.end - start;
                    if sees.is_empty() {
                        continue;
                    }
                    let query = &queries[row * padded..][..padded];
                    self.scores::<S>(query, &keys, &seen[row - rows.start], (token, head), start, weights);
                    scales[row - rows.start] = softmax::<S>(weights, &mut sums.most[row], &mut sums.total[row]);
                }
                let weights = &tile.weights[rows.start * TILE..];
                let to = &mut sums.values[rows.start * padded..rows.end * padded];
                if ordered {
                    add_values::<S>(&values, weights, &seen[..rows.len()], &scales, to, padded);
                } else {
                    for (row, to) in to.chunks_exact_mut(padded).enumerate() {
                        let token = self.block.tokens.start + (rows.start + row) / group;
                        let weights = &weights[row * TILE..][..TILE];
                        scale_values::<S>(to, scales[row]);
                        for slot in (start..end).filter(|&slot| self.sees_slot(token, slot)) {
                            let at = slot - start;
                            add_range::<S, 1>(&values, weights, &(at..at + 1), to, padded);
                        }
                    }
                }
            }
        }
    }

    /// The scores of one row against a tile, times log2(e); -inf for slots that it does not see.
    ///
    /// # Safety
    /// As for [`Self::attend`].
    #[inline(always)]
    unsafe fn scores<S: Simd>(
        &self,
        query: &[f32],
        keys: &[*const f32; TILE],
        seen: &Range<usize>,
        (token, head): (usize, usize),
        start: usize,
        scores: &mut [f32],
    ) {
        let op = self.op;
        let scale = op.score_scale() as f32;
        let plain = op.softcap == 0.0 && op.slopes.is_none();
        let factor = if plain { scale * std::f32::consts::LOG2_E } else { scale };
        let unseen = f32::NEG_INFINITY;
        // SAFETY: the caller's; a tile is a multiple of the lanes.
        unsafe {
            let (first, end) = (S::splat(seen.start as f32), S::splat(seen.end as f32));
            let mut numbers = [0.0; 16];
            for (lane, number) in numbers.iter_mut().enumerate() {
                *number = lane as f32;
            }
            let numbers = S::load(numbers.as_ptr());
            for group in (0..TILE).step_by(S::LANES) {
                let to = scores[group..].as_mut_ptr();
                if group >= seen.end || group + S::LANES <= seen.start {
                    S::store(to, S::splat(unseen));
                    continue;
                }
                let mut products = [S::splat(0.0); 16];
                for at in (0..query.len()).step_by(S::LANES) {
                    let query = S::load(query.as_ptr().add(at));
                    for key in 0..S::LANES {
                        products[key] = S::fma(S::load(keys[group + key].add(at)), query, products[key]);
                    }
                }
                let score = S::mul(S::sums(&products), S::splat(factor));
                let number = S::add(numbers, S::splat(group as f32));
                S::store(to, S::select_within(number, first, end, score, S::splat(unseen)));
            }
        }
        if op.slots.is_some() {
            for (at, score) in scores.iter_mut().enumerate().take(seen.end) {
                if !self.sees_slot(token, start + at) {
                    *score = unseen;
                }
            }
        }
        if plain {
            return;
        }
        for (at, score) in scores[..seen.end].iter_mut().enumerate().filter(|(_, score)| **score != unseen) {
            if op.softcap > 0.0 {
                *score = op.softcap * (*score / op.softcap).tanh();
            }
            if let Some(slopes) = op.slopes {
                let slot = op.slot_position(self.block.sequence, self.block.head, start + at).unwrap_or_default();
                *score -= slopes[head] * (op.row_position(self.block.sequence, token) - slot) as f32;
            }
            *score *= std::f32::consts::LOG2_E;
        }
    }
}

/// The most rows that are scaled together.
const ROWS_MOST: usize = SUM_ROWS;

/// Turns scores into weights, and adds them to the total of their row. Returns what the row's sums are to be multiplied by.
///
/// # Safety
/// The CPU has the instructions of `S`; there is a score for each key of a tile.
#[inline(always)]
unsafe fn softmax<S: Simd>(scores: &mut [f32], most: &mut f32, total: &mut f32) -> f32 {
    // SAFETY: the caller's.
    unsafe {
        let mut largest = S::splat(f32::NEG_INFINITY);
        for at in (0..TILE).step_by(S::LANES) {
            // In this order a NaN is passed over here, and comes back by its weight.
            largest = S::max(S::load(scores.as_ptr().add(at)), largest);
        }
        let mut lanes = [f32::NEG_INFINITY; 16];
        S::store(lanes.as_mut_ptr(), largest);
        let largest = lanes.iter().fold(*most, |largest, lane| if *lane > largest { *lane } else { largest });
        // Nothing but -inf so far: every weight is 0, or NaN where a score is.
        let base = if largest == f32::NEG_INFINITY { 0.0 } else { largest };
        let mut sum = S::splat(0.0);
        for at in (0..TILE).step_by(S::LANES) {
            let weight = S::exp2(S::add(S::load(scores.as_ptr().add(at)), S::splat(-base)));
            S::store(scores.as_mut_ptr().add(at), weight);
            sum = S::add(sum, weight);
        }
        S::store(lanes.as_mut_ptr(), sum);
        // A tree, as `sums` has it.
        let mut count = S::LANES;
        while count > 1 {
            count /= 2;
            for lane in 0..count {
                lanes[lane] += lanes[lane + count];
            }
        }
        let scale = exp2::<S>(*most - base);
        (*most, *total) = (largest, *total * scale + lanes[0]);
        scale
    }
}

/// Multiplies the sums of up to [`SUM_ROWS`] rows by their scales, and adds the values they see by their weights.
///
/// # Safety
/// The CPU has the instructions of `S`; the layouts are those of [`TileBuffers`] and [`Sums`].
#[inline(always)]
unsafe fn add_values<S: Simd>(
    values: &[*const f32; TILE],
    weights: &[f32],
    seen: &[Range<usize>],
    scales: &[f32],
    to: &mut [f32],
    padded: usize,
) {
    // SAFETY: the caller's.
    unsafe {
        for (row, to) in to.chunks_exact_mut(padded).enumerate().filter(|(row, _)| !seen[*row].is_empty()) {
            scale_values::<S>(to, scales[row]);
        }
        let all =
            seen.iter().map(|seen| seen.start).max().unwrap_or(0)..seen.iter().map(|seen| seen.end).min().unwrap_or(0);
        // Rows that see the same slots share the loads of their values; what only some see comes before and after. Each row
        // adds in order of slots.
        if seen.len() == SUM_ROWS && all.start < all.end {
            for (row, to) in to.chunks_exact_mut(padded).enumerate() {
                add_range::<S, 1>(values, &weights[row * TILE..], &(seen[row].start..all.start), to, padded);
            }
            add_range::<S, SUM_ROWS>(values, weights, &all, to, padded);
            for (row, to) in to.chunks_exact_mut(padded).enumerate() {
                add_range::<S, 1>(values, &weights[row * TILE..], &(all.end..seen[row].end), to, padded);
            }
        } else {
            for (row, to) in to.chunks_exact_mut(padded).enumerate() {
                add_range::<S, 1>(values, &weights[row * TILE..], &seen[row], to, padded);
            }
        }
    }
}

/// # Safety
/// The CPU has the instructions of `S`; the length is a multiple of the lanes.
#[inline(always)]
unsafe fn scale_values<S: Simd>(to: &mut [f32], scale: f32) {
    for at in (0..to.len()).step_by(S::LANES) {
        // SAFETY: the caller's.
        unsafe {
            let to = to.as_mut_ptr().add(at);
            S::store(to, S::mul(S::load(to), S::splat(scale)));
        }
    }
}

/// Adds the values of some slots of a tile to the sums of `ROWS` rows.
///
/// # Safety
/// As for [`add_values`].
#[inline(always)]
unsafe fn add_range<S: Simd, const ROWS: usize>(
    values: &[*const f32; TILE],
    weights: &[f32],
    slots: &Range<usize>,
    to: &mut [f32],
    padded: usize,
) {
    let vectors = padded / S::LANES;
    let mut first = 0;
    while first < vectors {
        // SAFETY: the caller's; the vectors are inside the rows.
        unsafe {
            match vectors - first {
                4.. => add_vectors::<S, ROWS, SUM_VECTORS>(values, weights, slots, to, padded, first * S::LANES),
                2 | 3 => add_vectors::<S, ROWS, 2>(values, weights, slots, to, padded, first * S::LANES),
                _ => add_vectors::<S, ROWS, 1>(values, weights, slots, to, padded, first * S::LANES),
            }
        }
        first += match vectors - first {
            4.. => SUM_VECTORS,
            2 | 3 => 2,
            _ => 1,
        };
    }
}

/// # Safety
/// As for [`add_range`]; `VECTORS` vectors from `at` on are inside a row.
#[inline(always)]
unsafe fn add_vectors<S: Simd, const ROWS: usize, const VECTORS: usize>(
    values: &[*const f32; TILE],
    weights: &[f32],
    slots: &Range<usize>,
    to: &mut [f32],
    padded: usize,
    at: usize,
) {
    // SAFETY: the caller's.
    unsafe {
        let mut sums = [[S::splat(0.0); VECTORS]; ROWS];
        for row in 0..ROWS {
            for vector in 0..VECTORS {
                sums[row][vector] = S::load(to.as_ptr().add(row * padded + at + vector * S::LANES));
            }
        }
        for slot in slots.clone() {
            let value = values[slot].add(at);
            let value: [S::V; VECTORS] = std::array::from_fn(|vector| S::load(value.add(vector * S::LANES)));
            for row in 0..ROWS {
                let weight = S::splat(*weights.as_ptr().add(row * TILE + slot));
                for vector in 0..VECTORS {
                    sums[row][vector] = S::fma(weight, value[vector], sums[row][vector]);
                }
            }
        }
        for row in 0..ROWS {
            for vector in 0..VECTORS {
                S::store(to.as_mut_ptr().add(row * padded + at + vector * S::LANES), sums[row][vector]);
            }
        }
    }
}

/// The weights that slots get, computed a second time once the sums of every row are known.
struct Weigh<'a, T> {
    op: &'a PagedAttention<'a, T>,
    stored: Stored<'a, T>,
    stats: &'a [f32],
    padded: usize,
    len: usize,
    weights: Shared<f32>,
}

impl<T: Element> Work for Weigh<'_, T> {
    /// # Safety
    /// No other thread runs the same task; the weights are as long as the call says.
    #[inline(always)]
    unsafe fn run<S: Simd>(&self, task: usize, scratch: &mut Scratch) {
        let (op, padded) = (self.op, self.padded);
        let (sequence, head) = (task / op.kv_heads, task % op.kv_heads);
        // SAFETY: the weights of this head of this sequence are this task's own.
        let to = unsafe { std::slice::from_raw_parts_mut(self.weights.pointer().add(task * self.len), self.len) };
        to.fill(0.0);
        for token in op.rows(sequence) {
            let block = Block { sequence, head, tokens: token..token + 1 };
            let rows = Rows::new(op, &block);
            let queries = &mut scratch.queries.at_least(rows.count() * padded)[..rows.count() * padded];
            // SAFETY: the caller's.
            unsafe { rows.load_queries::<S>(queries, padded) };
            let key_buffer = scratch.keys.at_least(TILE * padded).as_mut_ptr();
            let mut scores = [0.0; TILE];
            for start in (0..rows.slots).step_by(TILE) {
                let end = rows.slots.min(start + TILE);
                let seen = if op.slots.is_none() { rows.seen(token, start, end) } else { start..end };
                if seen.is_empty() {
                    continue;
                }
                let mut keys = [key_buffer.cast_const(); TILE];
                for slot in seen.clone().filter(|&slot| op.slot_position(sequence, head, slot).is_some()) {
                    let at = slot - start;
                    let block = op.block(sequence, slot, 0, head);
                    // SAFETY: the caller's; the slot holds a token, and the buffer has a row for each slot of a tile.
                    keys[at] = unsafe {
                        let buffer = std::slice::from_raw_parts_mut(key_buffer.add(at * padded), padded);
                        self.stored.block::<S>(op, block, buffer)
                    };
                }
                let seen = seen.start - start..seen.end - start;
                for row in 0..rows.count() {
                    let (_, query_head) = rows.row(row);
                    let query = &queries[row * padded..][..padded];
                    let [most, total] =
                        [0, 1].map(|which| self.stats[2 * (token * op.query_heads + query_head) + which]);
                    // SAFETY: the caller's.
                    unsafe {
                        rows.scores::<S>(query, &keys, &seen, (token, query_head), start, &mut scores);
                        for slot in seen.clone().filter(|&slot| scores[slot] != f32::NEG_INFINITY) {
                            to[start + slot] += exp2::<S>(scores[slot] - most) / total;
                        }
                    }
                }
            }
        }
        to.iter_mut().for_each(|weight| *weight /= op.group() as f32);
    }
}
