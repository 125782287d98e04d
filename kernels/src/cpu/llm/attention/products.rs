//! The arithmetic of a tile: products of queries and keys, and sums of weighted values.
//!
//! A product of a query and a key has the numbers of a head in lanes, and its lanes are added by a tree at the end. A sum of
//! values adds slot by slot. So the bits of a row depend on its own slots alone, not on the rows that share the loads.

// Loops over const ranges with indices on both sides are what unrolls into registers, and what reads as arithmetic.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use super::softmax::TILE;
use crate::cpu::common::kv_block::Numbers;
use crate::cpu::common::simd::{Part, Simd};

/// Keys that the products of some rows share. With as many rows as make the lanes of a vector, their sums over lanes are one
/// vector.
pub(super) const KEYS: usize = 4;
/// Values that are added at once, where many rows read them; copies of them stay in the first cache.
pub(super) const VALUES: usize = 16;
/// The same for few rows: fewer places in memory are read side by side.
pub(super) const FEW_VALUES: usize = 8;
/// Rows of which a sum of values is in registers.
const SUM_ROWS: usize = 4;

/// The products of some rows with some keys.
pub(super) struct Dots<'a, N> {
    pub(super) rows: usize,
    /// `[row][padded]`
    pub(super) queries: *const f32,
    /// The numbers of a query and of a key: a multiple of the lanes.
    pub(super) padded: usize,
    pub(super) keys: &'a [N; KEYS],
    /// `[row][TILE]`, good for `KEYS` numbers of each row.
    pub(super) to: *mut f32,
}

impl<S: Simd, N: Numbers<S>> Part<S> for Dots<'_, N> {
    /// # Safety
    /// The CPU has the instructions of `S`; the pointers are as their layouts say.
    #[inline(always)]
    unsafe fn run(self) {
        let Self { rows, queries, padded, keys, to } = self;
        let mut row = 0;
        while row < rows {
            // SAFETY: the caller's; these rows are inside.
            unsafe {
                let (queries, to) = (queries.add(row * padded), to.add(row * TILE));
                row += match rows - row {
                    4.. if S::LANES >= 4 * KEYS => dots::<S, N, 4>(queries, padded, keys, to),
                    3 if S::LANES >= 4 * KEYS => dots::<S, N, 3>(queries, padded, keys, to),
                    2.. => dots::<S, N, 2>(queries, padded, keys, to),
                    _ => dots::<S, N, 1>(queries, padded, keys, to),
                };
            }
        }
    }
}

/// Returns how many rows it took.
///
/// # Safety
/// As for [`Dots`].
#[inline(always)]
unsafe fn dots<S: Simd, N: Numbers<S>, const ROWS: usize>(
    queries: *const f32,
    padded: usize,
    keys: &[N; KEYS],
    to: *mut f32,
) -> usize {
    // SAFETY: the caller's.
    unsafe {
        let mut products = [S::splat(0.0); 16];
        for at in (0..padded).step_by(S::LANES) {
            let mut query = [S::splat(0.0); ROWS];
            for row in 0..ROWS {
                query[row] = S::load(queries.add(row * padded + at));
            }
            for key in 0..KEYS {
                let number = keys[key].vector(at);
                for row in 0..ROWS {
                    products[row * KEYS + key] = S::fma(number, query[row], products[row * KEYS + key]);
                }
            }
        }
        let mut sums = [0.0; 16];
        S::store(sums.as_mut_ptr(), S::sums(&products));
        for row in 0..ROWS {
            std::ptr::copy_nonoverlapping(sums.as_ptr().add(row * KEYS), to.add(row * TILE), KEYS);
        }
        ROWS
    }
}

/// Adds some values to the sums of the rows that see them, by their weights.
pub(super) struct AddValues<'a, N, const COUNT: usize> {
    /// Of `padded` numbers, a multiple of the lanes.
    pub(super) values: &'a [N; COUNT],
    /// `[row][TILE]`
    pub(super) weights: *const f32,
    /// Of each row: bit `first + i` says whether it sees value i.
    pub(super) masks: &'a [u64],
    pub(super) first: usize,
    /// `[row][padded]`
    pub(super) to: *mut f32,
    pub(super) padded: usize,
}

impl<S: Simd, N: Numbers<S>, const COUNT: usize> Part<S> for AddValues<'_, N, COUNT> {
    /// # Safety
    /// The CPU has the instructions of `S`; the pointers are as their layouts say.
    #[inline(always)]
    unsafe fn run(self) {
        let Self { values, weights, masks, first, to, padded } = self;
        let bits = |mask: u64| mask >> first & ((1 << COUNT) - 1);
        let mut row = 0;
        while row < masks.len() {
            let some = &masks[row..masks.len().min(row + SUM_ROWS)];
            let seen = bits(some[0]);
            let (weights, to) = (weights.wrapping_add(row * TILE), to.wrapping_add(row * padded));
            // SAFETY: the caller's.
            unsafe {
                // Rows that see the same slots share the loads of their values.
                if some.iter().all(|&mask| bits(mask) == seen) {
                    match some.len() {
                        4 => add_seen::<S, N, COUNT, 4>(values, weights, seen, to, padded),
                        3 => add_seen::<S, N, COUNT, 3>(values, weights, seen, to, padded),
                        2 => add_seen::<S, N, COUNT, 2>(values, weights, seen, to, padded),
                        _ => add_seen::<S, N, COUNT, 1>(values, weights, seen, to, padded),
                    }
                } else {
                    for (row, &mask) in some.iter().enumerate() {
                        add_seen::<S, N, COUNT, 1>(
                            values,
                            weights.add(row * TILE),
                            bits(mask),
                            to.add(row * padded),
                            padded,
                        );
                    }
                }
            }
            row += some.len();
        }
    }
}

/// Adds the values whose bits are set. A weight of 0 for the others would not do: 0 · NaN is NaN.
///
/// # Safety
/// As for [`AddValues`].
#[inline(always)]
unsafe fn add_seen<S: Simd, N: Numbers<S>, const COUNT: usize, const ROWS: usize>(
    values: &[N; COUNT],
    weights: *const f32,
    mut seen: u64,
    to: *mut f32,
    padded: usize,
) {
    while seen != 0 {
        let start = seen.trailing_zeros() as usize;
        let end = start + (seen >> start).trailing_ones() as usize;
        seen = seen >> end << end;
        let mut at = 0;
        while at < padded {
            // SAFETY: the caller's; the vectors are inside the rows.
            unsafe {
                at += match (padded - at) / S::LANES {
                    4.. if S::MAX_VECTORS >= 4 => {
                        add_vectors::<S, N, COUNT, ROWS, 4>(values, weights, start..end, to, padded, at)
                    }
                    2.. if S::MAX_VECTORS >= 2 => {
                        add_vectors::<S, N, COUNT, ROWS, 2>(values, weights, start..end, to, padded, at)
                    }
                    _ => add_vectors::<S, N, COUNT, ROWS, 1>(values, weights, start..end, to, padded, at),
                }
            }
        }
    }
}

/// Returns how many numbers of a row it took.
///
/// # Safety
/// As for [`AddValues`]; `VECTORS` vectors from `at` on are inside a row.
#[inline(always)]
unsafe fn add_vectors<S: Simd, N: Numbers<S>, const COUNT: usize, const ROWS: usize, const VECTORS: usize>(
    values: &[N; COUNT],
    weights: *const f32,
    slots: Range<usize>,
    to: *mut f32,
    padded: usize,
    at: usize,
) -> usize {
    // SAFETY: the caller's.
    unsafe {
        let mut sums = [[S::splat(0.0); VECTORS]; ROWS];
        for row in 0..ROWS {
            for vector in 0..VECTORS {
                sums[row][vector] = S::load(to.add(row * padded + at + vector * S::LANES));
            }
        }
        for slot in slots {
            let mut value = [S::splat(0.0); VECTORS];
            for vector in 0..VECTORS {
                value[vector] = values[slot].vector(at + vector * S::LANES);
            }
            for row in 0..ROWS {
                let weight = S::splat(*weights.add(row * TILE + slot));
                for vector in 0..VECTORS {
                    sums[row][vector] = S::fma(weight, value[vector], sums[row][vector]);
                }
            }
        }
        for row in 0..ROWS {
            for vector in 0..VECTORS {
                S::store(to.add(row * padded + at + vector * S::LANES), sums[row][vector]);
            }
        }
        VECTORS * S::LANES
    }
}
