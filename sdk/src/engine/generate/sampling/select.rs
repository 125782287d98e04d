//! The largest of many logits, without sorting them. NaN is never among them.

/// How many logits share a maximum. The search reads every logit once, for the maxima, and after that only the blocks
/// whose maximum is large enough.
const BLOCK: usize = 32;

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

/// The largest logit, −∞ if there is none.
pub(super) fn maximum(logits: &[f32]) -> f32 {
    // Independent lanes, so that the compiler can use vector instructions. A comparison with NaN is false: it stays out.
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; 16];
    let mut chunks = logits.chunks_exact(16);
    for chunk in &mut chunks {
        for (lane, &logit) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, logit);
        }
    }
    let rest = chunks.remainder().iter().copied();
    rest.chain(lanes).fold(f32::NEG_INFINITY, larger)
}

/// A token that can still be drawn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub(super) token: u32,
    pub(super) logit: f32,
}

/// Buffers of [`largest`].
#[derive(Clone, Debug, Default)]
pub(super) struct Buffers {
    /// The maximum of each block.
    maxima: Vec<f32>,
    /// What the selection puts into another order.
    ranked: Vec<f32>,
}

/// Finds the `count` largest logits, and all that equal the smallest of them, in order of their ids. −∞ and NaN are left
/// out.
pub(super) fn largest(logits: &[f32], count: usize, buffers: &mut Buffers, found: &mut Vec<Candidate>) {
    let Buffers { maxima, ranked } = buffers;
    let blocks = logits.len().div_ceil(BLOCK);
    // The count-th largest maximum is a lower bound: at least `count` logits are no smaller.
    if count < blocks {
        maxima.clear();
        maxima.extend(logits.chunks(BLOCK).map(maximum));
        ranked.clone_from(maxima);
        let bound = nth_largest(ranked, count);
        found.clear();
        for (index, (block, &max)) in logits.chunks(BLOCK).zip(&*maxima).enumerate() {
            if max >= bound {
                append_at_least(block, index * BLOCK, bound, found);
            }
        }
    } else {
        at_least(logits, f32::NEG_INFINITY, found);
    }
    if found.len() > count {
        ranked.clear();
        ranked.extend(found.iter().map(|candidate| candidate.logit));
        let smallest = nth_largest(ranked, count);
        found.retain(|candidate| candidate.logit >= smallest);
    }
}

fn nth_largest(values: &mut [f32], count: usize) -> f32 {
    *values.select_nth_unstable_by(count - 1, |a, b| b.total_cmp(a)).1
}

/// Finds the logits that are no smaller than a bound, in order of their ids. −∞ and NaN are left out.
pub(super) fn at_least(logits: &[f32], bound: f32, found: &mut Vec<Candidate>) {
    found.clear();
    for (index, block) in logits.chunks(BLOCK).enumerate() {
        if maximum(block) >= bound {
            append_at_least(block, index * BLOCK, bound, found);
        }
    }
}

/// Sorts by logit, the largest first, and by id where they are equal.
pub(super) fn sort(candidates: &mut [Candidate]) {
    candidates.sort_unstable_by_key(|candidate| {
        // Whole numbers in the order of the logits: cheaper to compare. Adding 0 makes −0 equal to 0.
        let bits = (candidate.logit + 0.0).to_bits();
        let ascending = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
        u64::from(!ascending) << 32 | u64::from(candidate.token)
    });
}

fn append_at_least(block: &[f32], first: usize, bound: f32, found: &mut Vec<Candidate>) {
    for (offset, &logit) in block.iter().enumerate() {
        if logit >= bound && logit > f32::NEG_INFINITY {
            found.push(Candidate { token: (first + offset) as u32, logit });
        }
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
    fn largest_keeps_ties_and_the_order_of_ids() {
        let (mut buffers, mut found) = (Buffers::default(), Vec::new());
        let logits: Vec<f32> = (0..1000).map(|id| ((id * 7919) % 101) as f32).collect();
        for count in [1, 2, 9, 10, 31, 32, 33, 200, 999, 1000, 5000] {
            largest(&logits, count, &mut buffers, &mut found);
            let mut sorted = logits.clone();
            sorted.sort_by(|a, b| b.total_cmp(a));
            let smallest = sorted[count.min(1000) - 1];
            let expected: Vec<u32> = (0..1000).filter(|&id| logits[id as usize] >= smallest).collect();
            assert_eq!(found.iter().map(|candidate| candidate.token).collect::<Vec<_>>(), expected, "{count}");
        }
    }

    #[test]
    fn banned_logits_are_never_among_the_largest() {
        let (mut buffers, mut found) = (Buffers::default(), Vec::new());
        let mut logits = vec![f32::NEG_INFINITY; 500];
        logits[3] = f32::NAN;
        logits[400] = -7.0;
        for count in [1, 2, 20, 500] {
            largest(&logits, count, &mut buffers, &mut found);
            assert_eq!(found.iter().map(|candidate| candidate.token).collect::<Vec<_>>(), [400], "{count}");
        }
    }

    #[test]
    fn sorting_puts_equals_in_order_of_their_ids() {
        let values = [-1.0, 0.0, -0.0, 5.0, f32::INFINITY, -2.5, 5.0];
        let mut candidates: Vec<_> = (0..).zip(values).map(|(token, logit)| Candidate { token, logit }).collect();
        candidates.reverse();
        sort(&mut candidates);
        assert_eq!(candidates.iter().map(|candidate| candidate.token).collect::<Vec<_>>(), [4, 3, 6, 1, 2, 0, 5]);
    }
}
