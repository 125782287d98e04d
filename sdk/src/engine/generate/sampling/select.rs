//! The largest of many logits, without sorting them. NaN is never among them.

use pagoda_kernels::OUTPUT_BLOCK;

/// How many logits share a maximum.
const BLOCK: usize = 32;

/// How many maxima are computed at once.
const LANES: usize = 16;

/// The id of the largest logit; the lowest of equals. `None` if all are −∞ or NaN.
pub(super) fn argmax(logits: &[f32]) -> Option<u32> {
    let mut best = f32::NEG_INFINITY;
    let mut best_block = None;
    const WIDE: usize = 8 * BLOCK;
    for (index, block) in logits.chunks(WIDE).enumerate() {
        let max = maximum(block);
        if max > best {
            best = max;
            best_block = Some(index);
        }
    }
    let start = best_block? * WIDE;
    let offset = logits[start..].iter().position(|&logit| logit == best)?;
    Some((start + offset) as u32)
}

/// As [`argmax`], where the largest of each [`OUTPUT_BLOCK`] logits is known.
pub(super) fn argmax_in_blocks(logits: &[f32], maxima: &[f32]) -> Option<u32> {
    let block = argmax(maxima)? as usize;
    let start = block * OUTPUT_BLOCK;
    let offset = logits[start..].iter().position(|&logit| logit == maxima[block])?;
    Some((start + offset) as u32)
}

/// The largest logit, −∞ if there is none.
pub(super) fn maximum(logits: &[f32]) -> f32 {
    let rest = logits.chunks_exact(LANES).remainder();
    rest.iter().copied().chain(lane_maxima(logits)).fold(f32::NEG_INFINITY, larger)
}

/// The maximum of every `LANES`-th logit: independent lanes, so that the compiler can use vector instructions. The rest
/// that does not fill all lanes is left out.
#[inline(always)]
fn lane_maxima(logits: &[f32]) -> [f32; LANES] {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in logits.chunks_exact(LANES) {
        for (lane, &logit) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, logit);
        }
    }
    lanes
}

#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    // A comparison with NaN is false: it stays out.
    if b > a { b } else { a }
}

/// A token that can still be drawn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub(super) token: u32,
    pub(super) logit: f32,
}

impl Candidate {
    /// Whole numbers in the order of the candidates, the largest logit first, and by id where they are equal: cheaper to
    /// compare.
    pub(super) fn key(self) -> u64 {
        // Adding 0 makes −0 equal to 0.
        let bits = (self.logit + 0.0).to_bits();
        let descending = if bits >> 31 == 0 { !bits ^ 1 << 31 } else { bits };
        u64::from(descending) << 32 | u64::from(self.token)
    }

    /// The candidate of a key.
    pub(super) fn of_key(key: u64) -> Self {
        let descending = (key >> 32) as u32;
        let bits = if descending >> 31 == 0 { !descending ^ 1 << 31 } else { descending };
        Self { token: key as u32, logit: f32::from_bits(bits) }
    }
}

/// Finds the `count` largest logits, and all that equal the smallest of them, in order of their ids. −∞ and NaN are left
/// out. `ranked` is a buffer.
pub(super) fn largest(logits: &[f32], count: usize, ranked: &mut Vec<f32>, found: &mut Vec<Candidate>) {
    ranked.clear();
    maxima(logits, ranked);
    // The count-th largest maximum is a lower bound: at least `count` logits are no smaller.
    let bound = if count < ranked.len() { nth_largest(ranked, count) } else { f32::NEG_INFINITY };
    at_least(logits, bound, found);
    if found.len() > count {
        ranked.clear();
        ranked.extend(found.iter().map(|candidate| candidate.logit));
        let smallest = nth_largest(ranked, count);
        found.retain(|candidate| candidate.logit >= smallest);
    }
}

/// Appends the maxima of groups of about `BLOCK` logits. Each logit is in one group.
fn maxima(logits: &[f32], maxima: &mut Vec<f32>) {
    // A group is a lane of a tile: that takes no steps from lane to lane.
    let mut tiles = logits.chunks_exact(LANES * BLOCK);
    for tile in &mut tiles {
        maxima.extend(lane_maxima(tile));
    }
    maxima.extend(tiles.remainder().chunks(BLOCK).map(maximum));
}

fn nth_largest(values: &mut [f32], count: usize) -> f32 {
    *values.select_nth_unstable_by(count - 1, |a, b| b.total_cmp(a)).1
}

/// Finds the logits that are no smaller than a bound, in order of their ids. −∞ and NaN are left out.
pub(super) fn at_least(logits: &[f32], bound: f32, found: &mut Vec<Candidate>) {
    found.clear();
    for (index, block) in logits.chunks(BLOCK).enumerate() {
        // The whole block, without a branch for each: mostly there is none.
        if !block.iter().fold(false, |any, &logit| any | (logit >= bound)) {
            continue;
        }
        // Each is written, and the next over it if it does not count: whether it does is hard to predict.
        let mut end = found.len();
        found.resize(end + block.len(), Candidate { token: 0, logit: 0.0 });
        for (offset, &logit) in block.iter().enumerate() {
            found[end] = Candidate { token: (index * BLOCK + offset) as u32, logit };
            end += usize::from(logit >= bound && logit > f32::NEG_INFINITY);
        }
        found.truncate(end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn argmax_takes_the_lowest_of_equals_and_never_nan() {
        assert_eq!(argmax(&[]), None);
        assert_eq!(argmax(&[f32::NAN, f32::NEG_INFINITY]), None);
        assert_eq!(argmax(&[f32::NAN, -3.0, f32::NAN]), Some(1));
        assert_eq!(argmax(&[0.0, -0.0, 0.0]), Some(0));
        assert_eq!(argmax(&[-0.0, 0.0]), Some(0));
        assert_eq!(argmax(&[1.0, f32::INFINITY, f32::INFINITY]), Some(1));
        // Every place of a vocabulary that is no multiple of the blocks, with an equal at every later place.
        for place in 0..1000 {
            let mut logits = vec![f32::NAN; 1003];
            logits[..place].fill(-1.0);
            logits[place] = 2.0;
            logits[1002] = 2.0;
            logits[place + 1] = 2.0;
            assert_eq!(argmax(&logits), Some(place as u32));
        }
    }

    #[test]
    fn the_maxima_of_blocks_lead_to_the_same_token() {
        let check = |logits: &[f32]| {
            let maxima: Vec<f32> = logits.chunks(OUTPUT_BLOCK).map(maximum).collect();
            assert_eq!(argmax_in_blocks(logits, &maxima), argmax(logits), "{logits:?}");
        };
        check(&[]);
        check(&[f32::NAN, f32::NEG_INFINITY]);
        check(&[-0.0, 0.0]);
        for place in 0..100 {
            let mut logits = vec![f32::NAN; 103];
            logits[..place].fill(-1.0);
            for equal in [place, place + 1, 102] {
                logits[equal] = 2.0;
            }
            check(&logits);
            logits[place] = f32::INFINITY;
            check(&logits);
        }
    }

    #[test]
    fn largest_keeps_ties_and_the_order_of_ids() {
        let (mut ranked, mut found) = (Vec::new(), Vec::new());
        let logits: Vec<f32> = (0..1000).map(|id| ((id * 7919) % 101) as f32).collect();
        for count in [1, 2, 9, 10, 31, 32, 33, 200, 999, 1000, 5000] {
            largest(&logits, count, &mut ranked, &mut found);
            let mut sorted = logits.clone();
            sorted.sort_by(|a, b| b.total_cmp(a));
            let smallest = sorted[count.min(1000) - 1];
            let expected: Vec<u32> = (0..1000).filter(|&id| logits[id as usize] >= smallest).collect();
            assert_eq!(found.iter().map(|candidate| candidate.token).collect::<Vec<_>>(), expected, "{count}");
        }
    }

    #[test]
    fn banned_logits_are_never_among_the_largest() {
        let (mut ranked, mut found) = (Vec::new(), Vec::new());
        let mut logits = vec![f32::NEG_INFINITY; 1500];
        logits[3] = f32::NAN;
        logits[400] = -7.0;
        for count in [1, 2, 20, 500, 1500] {
            largest(&logits, count, &mut ranked, &mut found);
            assert_eq!(found.iter().map(|candidate| candidate.token).collect::<Vec<_>>(), [400], "{count}");
        }
    }

    #[test]
    fn keys_put_equals_in_order_of_their_ids() {
        let values = [-1.0, -0.0, 0.0, 5.0, f32::INFINITY, -2.5, 5.0];
        let mut keys: Vec<u64> = (0..).zip(values).map(|(token, logit)| Candidate { token, logit }.key()).collect();
        keys.sort_unstable();
        let sorted: Vec<_> = keys.into_iter().map(Candidate::of_key).collect();
        assert_eq!(sorted.iter().map(|candidate| candidate.token).collect::<Vec<_>>(), [4, 3, 6, 1, 2, 0, 5]);
        assert_eq!(
            sorted.iter().map(|candidate| candidate.logit).collect::<Vec<_>>(),
            [f32::INFINITY, 5.0, 5.0, 0.0, 0.0, -1.0, -2.5]
        );
    }
}
