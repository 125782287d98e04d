//! The inner loops of the attention kernel: one group of query rows against one tile of keys.
//!
//! Rows of queries are in the lanes of vectors, so a lane computes one row in a fixed order. The bits of a row do not
//! depend on its lane, group or block, nor on the other rows.
//!
//! Layouts, all `f32`: queries and outputs `[D][stride]`, weights `[TILE][stride]`, with a row in each lane; keys and
//! values `[TILE][D]`.

// Loops over const ranges with indices on both sides are what unrolls into registers, and what reads as arithmetic.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use half::f16;

use crate::cpu::common::simd::Simd;

/// Keys in a tile. Tiles begin at multiples of it, counted from a user's first key: where they lie is part of the
/// order of summation. A multiple of every number of keys that `scores` takes at once.
pub(super) const TILE: usize = if cfg!(miri) { 12 } else { 48 };

/// A group of rows: `vectors` (1, 2 or 4) vectors of them.
#[derive(Clone, Copy)]
pub(super) struct Group {
    pub vectors: usize,
    /// From one line of a layout to the next; at least the lanes of the group.
    pub stride: usize,
    pub queries: *const f32,
    pub outputs: *mut f32,
    pub weights: *mut f32,
}

/// The keys and values of a tile.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    pub keys: *const f32,
    pub values: *const f32,
    pub head_size: usize,
    pub alpha: f32,
}

/// Where a key or a value lies in memory.
#[derive(Clone, Copy)]
pub(super) struct Place {
    /// The numbers, or the codes of a quantised pool.
    pub numbers: *const u8,
    /// The block's scales; null where there are none.
    pub scales: *const f16,
}

/// Keys and values that will be wanted soon. Asking for them bit by bit during the arithmetic hides the way to memory;
/// asking for all at once would stall.
#[derive(Clone, Copy, Default)]
pub(super) struct Ahead<'a> {
    pub places: &'a [[Place; 2]],
    /// Bytes of the numbers, or the codes, at each place.
    pub bytes: usize,
}

impl Group {
    /// One vector of the group.
    pub fn vector<S: Simd>(&self, number: usize) -> Group {
        let lane = number * S::LANES;
        Group {
            vectors: 1,
            stride: self.stride,
            queries: self.queries.wrapping_add(lane),
            outputs: self.outputs.wrapping_add(lane),
            weights: self.weights.wrapping_add(lane),
        }
    }
}

/// Which keys of a tile each row of a vector sees, where not all see the same: the first and the end, by lane.
#[derive(Clone, Copy)]
pub(super) struct Bounds {
    pub first: *const f32,
    pub end: *const f32,
}

/// Adds to the group's outputs what the keys `visible` of the tile contribute.
///
/// # Safety
/// The CPU has the instructions of `S`; the pointers are good for the layouts above; `visible` lies within the tile.
#[inline(always)]
pub(super) unsafe fn attend<S: Simd>(group: Group, tile: Tile, ahead: Ahead<'_>, visible: Range<usize>) {
    // SAFETY: the caller's. `vectors` is at most MAX_VECTORS: the arms above that fall away when compiled.
    unsafe {
        match group.vectors {
            4 if S::MAX_VECTORS >= 4 => {
                scores::<S, 6, 4>(group, tile, ahead, &visible);
                sums::<S, 6, 4>(group, tile, visible, None);
            }
            2 if S::MAX_VECTORS >= 4 => {
                scores::<S, 12, 2>(group, tile, ahead, &visible);
                sums::<S, 12, 2>(group, tile, visible, None);
            }
            2 if S::MAX_VECTORS >= 2 => {
                scores::<S, 6, 2>(group, tile, ahead, &visible);
                sums::<S, 6, 2>(group, tile, visible, None);
            }
            _ if S::MAX_VECTORS >= 2 => {
                scores::<S, 12, 1>(group, tile, ahead, &visible);
                sums::<S, 12, 1>(group, tile, visible, None);
            }
            _ => {
                scores::<S, 6, 1>(group, tile, ahead, &visible);
                sums::<S, 6, 1>(group, tile, visible, None);
            }
        }
    }
}

/// The same for one vector of rows, each of which takes only the keys within its `bounds`.
///
/// # Safety
/// As for [`attend`]; `bounds` has an entry for every lane.
#[inline(always)]
pub(super) unsafe fn attend_within<S: Simd>(vector: Group, tile: Tile, visible: Range<usize>, bounds: Bounds) {
    // SAFETY: the caller's.
    unsafe {
        scores::<S, 6, 1>(vector, tile, Ahead::default(), &visible);
        sums::<S, 6, 1>(vector, tile, visible, Some(bounds));
    }
}

/// weights[key][row] = silu(alpha · query[row] · key), `KEYS` keys at a time, for at least the `visible` keys.
///
/// # Safety
/// As for [`attend`].
#[inline(always)]
unsafe fn scores<S: Simd, const KEYS: usize, const VECTORS: usize>(
    group: Group,
    tile: Tile,
    ahead: Ahead<'_>,
    visible: &Range<usize>,
) {
    const { assert!(TILE.is_multiple_of(KEYS)) };
    // Rounding down to KEYS may take in keys of the tile that no row sees: their weights are written and not used.
    let first = visible.start / KEYS * KEYS;
    let share = ahead.places.len().div_ceil((visible.end - first).div_ceil(KEYS)).max(1);
    let mut places = ahead.places.chunks(share);
    for key in (first..visible.end).step_by(KEYS) {
        for place in places.next().unwrap_or_default().as_flattened() {
            for at in (0..ahead.bytes).step_by(64) {
                // SAFETY: the set is the caller's; any address will do.
                unsafe { S::prefetch(place.numbers.wrapping_add(at)) };
            }
            if !place.scales.is_null() {
                // SAFETY: as above.
                unsafe { S::prefetch(place.scales.cast()) };
            }
        }
        // SAFETY: KEYS divides TILE, so key + KEYS <= TILE; d < D.
        unsafe {
            let keys = tile.keys.add(key * tile.head_size);
            let mut sums = [[S::splat(0.0); VECTORS]; KEYS];
            for d in 0..tile.head_size {
                let queries = load::<S, VECTORS>(group.queries.add(d * group.stride));
                for k in 0..KEYS {
                    let x = S::splat(*keys.add(k * tile.head_size + d));
                    for v in 0..VECTORS {
                        sums[k][v] = S::fma(queries[v], x, sums[k][v]);
                    }
                }
            }
            let alpha = S::splat(tile.alpha);
            for k in 0..KEYS {
                let weights = group.weights.add((key + k) * group.stride);
                for v in 0..VECTORS {
                    S::store(weights.add(v * S::LANES), S::silu(S::mul(alpha, sums[k][v])));
                }
            }
        }
    }
}

/// output[row] += Σ weights[key][row] · value[key], `WIDTH` elements of the head at a time.
///
/// # Safety
/// As for [`attend`].
#[inline(always)]
unsafe fn sums<S: Simd, const WIDTH: usize, const VECTORS: usize>(
    group: Group,
    tile: Tile,
    visible: Range<usize>,
    bounds: Option<Bounds>,
) {
    let mut d = 0;
    // SAFETY: each step stays below head_size; the rest is the caller's.
    unsafe {
        while tile.head_size - d >= WIDTH {
            sums_at::<S, WIDTH, VECTORS>(group, tile, d, &visible, bounds);
            d += WIDTH;
        }
        while tile.head_size - d >= 4 {
            sums_at::<S, 4, VECTORS>(group, tile, d, &visible, bounds);
            d += 4;
        }
        if tile.head_size - d >= 2 {
            sums_at::<S, 2, VECTORS>(group, tile, d, &visible, bounds);
            d += 2;
        }
        if tile.head_size - d == 1 {
            sums_at::<S, 1, VECTORS>(group, tile, d, &visible, bounds);
        }
    }
}

/// # Safety
/// As for [`attend`], and `d + WIDTH <= head_size`.
#[inline(always)]
unsafe fn sums_at<S: Simd, const WIDTH: usize, const VECTORS: usize>(
    group: Group,
    tile: Tile,
    d: usize,
    visible: &Range<usize>,
    bounds: Option<Bounds>,
) {
    // SAFETY: key < TILE, d + WIDTH <= D; bounds have an entry for every lane.
    unsafe {
        // The tile is summed from zero and added to the output as a whole: fewer roundings meet a large sum.
        let mut sums = [[S::splat(0.0); VECTORS]; WIDTH];
        for key in visible.clone() {
            let weights = load::<S, VECTORS>(group.weights.add(key * group.stride));
            let values = tile.values.add(key * tile.head_size + d);
            let Some(bounds) = bounds else {
                for w in 0..WIDTH {
                    let x = S::splat(*values.add(w));
                    for v in 0..VECTORS {
                        sums[w][v] = S::fma(weights[v], x, sums[w][v]);
                    }
                }
                continue;
            };
            // A masked lane keeps its sum. A weight of 0 would not do: 0 · NaN is NaN.
            let number = S::splat(key as f32);
            let first = load::<S, VECTORS>(bounds.first);
            let end = load::<S, VECTORS>(bounds.end);
            for w in 0..WIDTH {
                let x = S::splat(*values.add(w));
                for v in 0..VECTORS {
                    let sum = S::fma(weights[v], x, sums[w][v]);
                    sums[w][v] = S::select_within(number, first[v], end[v], sum, sums[w][v]);
                }
            }
        }
        for w in 0..WIDTH {
            let output = group.outputs.add((d + w) * group.stride);
            for v in 0..VECTORS {
                let at = output.add(v * S::LANES);
                S::store(at, S::add(S::load(at), sums[w][v]));
            }
        }
    }
}

/// # Safety
/// `from` is good for `N` vectors.
#[inline(always)]
unsafe fn load<S: Simd, const N: usize>(from: *const f32) -> [S::V; N] {
    // SAFETY: the caller's; the set is the caller's too.
    unsafe {
        let mut vectors = [S::splat(0.0); N];
        for (v, vector) in vectors.iter_mut().enumerate() {
            *vector = S::load(from.add(v * S::LANES));
        }
        vectors
    }
}
