//! Divides the sequences of a step into calls of the model, which have no padding among new tokens.

use super::step::Step;
use crate::folder::generate::PastAttention;

/// Which sequences can share a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sharing {
    /// Those with the same number of new tokens. What is cached is padded, and padding is read.
    Padded,
    /// Single tokens, on any number of cached ones; prompts of the same length from their beginning. All others are alone.
    Single,
    /// Those with the same numbers of new and of cached tokens.
    Equal,
}

impl From<PastAttention> for Sharing {
    fn from(attention: PastAttention) -> Self {
        match attention {
            PastAttention::GroupQuery => Self::Single,
            PastAttention::Masked => Self::Padded,
            PastAttention::ByColumn => Self::Equal,
        }
    }
}

/// Tokens that a sequence may be padded by, beside as many as it has.
const PADDING: usize = 256;

/// The sequences of each call, by their places in the step, shorter ones first. No call has more than `most` tokens in all with its
/// padding, unless one sequence does.
pub(super) fn divide(step: &Step<'_>, sharing: Sharing, most: usize) -> Vec<Vec<usize>> {
    let class = |index: usize| {
        let (rows, cached) = (step.rows(index), step.cached(index));
        match sharing {
            Sharing::Padded => (rows, 0, 0),
            Sharing::Equal => (rows, cached, 0),
            Sharing::Single if rows == 1 => (1, 0, 0),
            Sharing::Single if cached == 0 => (rows, 0, 0),
            Sharing::Single => (rows, 1, index),
        }
    };
    let mut order: Vec<usize> = (0..step.len()).filter(|&index| step.rows(index) > 0).collect();
    order.sort_by_key(|&index| (class(index), step.cached(index)));
    let mut calls: Vec<Vec<usize>> = Vec::new();
    for index in order {
        let length = step.cached(index) + step.rows(index);
        let joins = calls.last().filter(|call| {
            let shortest = step.cached(call[0]);
            class(call[0]) == class(index)
                && (call.len() + 1) * length <= most
                && (sharing != Sharing::Padded || step.cached(index) <= 2 * shortest + PADDING)
        });
        match joins.is_some() {
            true => calls.last_mut().expect("it was found").push(index),
            false => calls.push(vec![index]),
        }
    }
    calls
}

#[cfg(test)]
mod tests {
    use std::cmp::Reverse;

    use super::*;
    use crate::kv::Owner;

    /// The calls of sequences with these numbers of cached and of new tokens.
    fn calls(sequences: &[(i32, i32)], sharing: Sharing, most: usize) -> Vec<Vec<usize>> {
        let mut row_offsets = vec![0];
        sequences.iter().for_each(|(_, rows)| row_offsets.push(row_offsets[row_offsets.len() - 1] + rows));
        let cached_len: Vec<_> = sequences.iter().map(|(cached, _)| *cached).collect();
        let keys: Vec<_> = (0..sequences.len() as u64).map(|key| ((Reverse(0), key), Owner(key))).collect();
        let (input_ids, page_indptr) = (vec![0; row_offsets[sequences.len()] as usize], vec![0; sequences.len() + 1]);
        let step = Step {
            input_ids: &input_ids,
            row_offsets: &row_offsets,
            cached_len: &cached_len,
            page_indptr: &page_indptr,
            page_ids: &[],
            logits_rows: &[],
            keys: &keys,
        };
        divide(&step, sharing, most)
    }

    #[test]
    fn calls_have_what_the_graph_can_take() {
        let sequences = [(40, 1), (0, 7), (3, 1), (9, 7), (0, 7), (3, 1), (0, 1)];
        let padded = calls(&sequences, Sharing::Padded, 10_000);
        assert_eq!(padded, [vec![6, 2, 5, 0], vec![1, 4, 3]]);
        let single = calls(&sequences, Sharing::Single, 10_000);
        assert_eq!(single, [vec![6, 2, 5, 0], vec![1, 4], vec![3]]);
        let equal = calls(&sequences, Sharing::Equal, 10_000);
        assert_eq!(equal, [vec![6], vec![2, 5], vec![0], vec![1, 4], vec![3]]);
    }

    #[test]
    fn padding_is_bounded() {
        let sequences = [(10, 1), (2000, 1), (270, 1), (5000, 1)];
        assert_eq!(calls(&sequences, Sharing::Padded, 100_000), [vec![0, 2], vec![1], vec![3]]);
        assert_eq!(calls(&sequences, Sharing::Single, 100_000), [vec![0, 2, 1, 3]], "it is not read");
        assert_eq!(calls(&sequences, Sharing::Single, 6_003), [vec![0, 2, 1], vec![3]]);
        assert_eq!(calls(&sequences, Sharing::Single, 6_002), [vec![0, 2], vec![1], vec![3]]);
        assert_eq!(calls(&[(90, 5)], Sharing::Single, 10), [vec![0]], "one that is longer is alone");
    }
}
