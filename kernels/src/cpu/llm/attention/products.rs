//! The arithmetic of a tile: products of queries and keys, and sums of weighted values.
//!
//! A product of a query and a key has the numbers of a head in lanes, and its lanes are added by a tree at the end. A sum of
//! values adds slot by slot. So the bits of a row depend on its own slots alone, not on the rows that share the loads.

// Loops over const ranges with indices on both sides are what unrolls into registers, and what reads as arithmetic.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use super::softmax::TILE;
use super::stored::Numbers;
use crate::Element;
use crate::cpu::common::simd::Simd;

/// Keys that the products of some rows share. With as many rows as make the lanes of a vector, their sums over lanes are one
/// vector.
pub(super) const KEYS: usize = 4;
/// Values that are added at once, where many rows read them; copies of them stay in the first cache.
pub(super) const VALUES: usize = 16;
/// The same for few rows: fewer places in memory are read side by side.
pub(super) const FEW_VALUES: usize = 8;
/// Rows of which a sum of values is in registers.
const SUM_ROWS: usize = 4;

/// The products of up to `rows` rows with some keys, `[row][TILE]`. Returns how many rows it took.
///
/// # Safety
/// The CPU has the instructions of `S`. Queries and keys have `padded` numbers, a multiple of the lanes; `to` is good for `KEYS`
/// numbers of each row.
#[inline(always)]
pub(super) unsafe fn dots<S: Simd, T: Element, N: Numbers<S, T>>(
    rows: usize,
    queries: *const f32,
    padded: usize,
    keys: &[N; KEYS],
    to: *mut f32,
) -> usize {
    // SAFETY: the caller's.
    unsafe {
        match rows {
            4.. if S::LANES >= 4 * KEYS => dots_of::<S, T, N, 4>(queries, padded, keys, to),
            3 if S::LANES >= 4 * KEYS => dots_of::<S, T, N, 3>(queries, padded, keys, to),
            2.. => dots_of::<S, T, N, 2>(queries, padded, keys, to),
            _ => dots_of::<S, T, N, 1>(queries, padded, keys, to),
        }
    }
}

/// # Safety
/// As for [`dots`].
#[inline(always)]
unsafe fn dots_of<S: Simd, T: Element, N: Numbers<S, T>, const ROWS: usize>(
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

/// Adds some values to the sums `to` (`[row][padded]`) of the rows that see them, by their weights (`[row][TILE]`). Bit
/// `first + i` of a row's mask says whether it sees value i.
///
/// # Safety
/// The CPU has the instructions of `S`; there is a mask for each row; the values have `padded` numbers, a multiple of the lanes.
#[inline(always)]
pub(super) unsafe fn add_values<S: Simd, T: Element, N: Numbers<S, T>, const COUNT: usize>(
    values: &[N; COUNT],
    weights: *const f32,
    masks: &[u64],
    first: usize,
    to: *mut f32,
    padded: usize,
) {
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
                    4 => add_seen::<S, T, N, COUNT, 4>(values, weights, seen, to, padded),
                    3 => add_seen::<S, T, N, COUNT, 3>(values, weights, seen, to, padded),
                    2 => add_seen::<S, T, N, COUNT, 2>(values, weights, seen, to, padded),
                    _ => add_seen::<S, T, N, COUNT, 1>(values, weights, seen, to, padded),
                }
            } else {
                for (row, &mask) in some.iter().enumerate() {
                    add_seen::<S, T, N, COUNT, 1>(
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

/// Adds the values whose bits are set. A weight of 0 for the others would not do: 0 · NaN is NaN.
///
/// # Safety
/// As for [`add_values`].
#[inline(always)]
unsafe fn add_seen<S: Simd, T: Element, N: Numbers<S, T>, const COUNT: usize, const ROWS: usize>(
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
                        add_vectors::<S, T, N, COUNT, ROWS, 4>(values, weights, start..end, to, padded, at)
                    }
                    2.. if S::MAX_VECTORS >= 2 => {
                        add_vectors::<S, T, N, COUNT, ROWS, 2>(values, weights, start..end, to, padded, at)
                    }
                    _ => add_vectors::<S, T, N, COUNT, ROWS, 1>(values, weights, start..end, to, padded, at),
                }
            }
        }
    }
}

/// Returns how many numbers of a row it took.
///
/// # Safety
/// As for [`add_values`]; `VECTORS` vectors from `at` on are inside a row.
#[inline(always)]
unsafe fn add_vectors<
    S: Simd,
    T: Element,
    N: Numbers<S, T>,
    const COUNT: usize,
    const ROWS: usize,
    const VECTORS: usize,
>(
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
