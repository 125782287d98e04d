//! How many rows each sequence gets in a step.

use std::cmp::Reverse;

/// The order in which sequences run: by priority, then by arrival.
pub(super) type Precedence = (Reverse<i32>, u64);

/// What a sequence needs: the rows that are left until its next token, the row of its last token included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Need {
    pub(super) rows: usize,
    /// The maximum number of rows in one step.
    pub(super) most: usize,
    /// Whether a step has that many rows of it, or none.
    pub(super) whole: bool,
    /// With one row: the rows of its draft.
    pub(super) draft: usize,
}

/// Divides the rows of a step. Sequences are in order of precedence. Those that need one row are first: they decode, and a
/// prompt must not stall them. Then come their drafts; if there are prompts, they get no more than half of what is left. The
/// rest of the `budget`, and no more than `chunk` rows while others decode, goes to the others in order. Chunks that must not
/// be cut are not.
pub(super) fn divide(needs: &[Need], budget: usize, chunk: usize) -> Vec<usize> {
    let mut rows = vec![0; needs.len()];
    let mut left = budget;
    for (rows, _) in rows.iter_mut().zip(needs).filter(|(_, need)| need.rows == 1) {
        *rows = left.min(1);
        left -= *rows;
    }
    let mut for_drafts = if needs.iter().any(|need| need.rows > 1) { left / 2 } else { left };
    for (rows, need) in rows.iter_mut().zip(needs).filter(|(rows, need)| **rows == 1 && need.rows == 1) {
        let draft = need.draft.min(for_drafts);
        *rows += draft;
        (left, for_drafts) = (left - draft, for_drafts - draft);
    }
    // Of chunks that can be cut; the others have what the budget has.
    let mut cut = if left < budget { left.min(chunk) } else { left };
    for (rows, need) in rows.iter_mut().zip(needs).filter(|(_, need)| need.rows > 1) {
        let wanted = need.rows.min(need.most);
        *rows = match need.whole {
            true if wanted <= left => wanted,
            true => 0,
            false => wanted.min(cut),
        };
        left -= *rows;
        cut = cut.saturating_sub(*rows);
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    fn needs(rows: &[usize]) -> Vec<Need> {
        rows.iter().map(|&rows| Need { rows, most: usize::MAX, whole: false, draft: 0 }).collect()
    }

    #[test]
    fn sequences_that_decode_come_before_prompts() {
        assert_eq!(divide(&needs(&[500, 1, 1]), 64, 64), [62, 1, 1]);
        assert_eq!(divide(&needs(&[500, 1, 1]), 2, 64), [0, 1, 1]);
        assert_eq!(divide(&needs(&[1, 1, 1]), 2, 64), [1, 1, 0], "in order of precedence");
    }

    #[test]
    fn a_prompt_gets_a_chunk_while_others_decode_and_all_rows_alone() {
        assert_eq!(divide(&needs(&[1, 500]), 256, 32), [1, 32]);
        assert_eq!(divide(&needs(&[500]), 256, 32), [256]);
        assert_eq!(divide(&needs(&[500, 40]), 256, 32), [256, 0], "the first prompt ends first");
        assert_eq!(divide(&needs(&[100, 40]), 256, 32), [100, 40]);
        assert_eq!(divide(&[Need { rows: 500, most: 64, whole: false, draft: 0 }], 256, 32), [64]);
    }

    #[test]
    fn drafts_get_what_decoding_leaves() {
        let decode = |draft| Need { rows: 1, most: usize::MAX, whole: false, draft };
        let prompt = Need { rows: 500, most: usize::MAX, whole: false, draft: 0 };
        assert_eq!(divide(&[decode(4), decode(0), decode(9)], 64, 8), [5, 1, 10]);
        assert_eq!(divide(&[decode(4), decode(0), decode(9)], 9, 8), [5, 1, 3]);
        assert_eq!(divide(&[decode(4), decode(9)], 1, 8), [1, 0]);
        assert_eq!(divide(&[decode(4), prompt, decode(9)], 18, 64), [5, 8, 5], "half is the prompt's");
    }

    #[test]
    fn chunks_that_must_not_be_cut_wait_for_room() {
        let whole = |rows, most| Need { rows, most, whole: true, draft: 0 };
        let decode = Need { rows: 1, most: usize::MAX, whole: false, draft: 0 };
        assert_eq!(divide(&[decode, whole(500, 60)], 64, 8), [1, 60], "also where others' chunks would be shorter");
        assert_eq!(divide(&[whole(500, 60), whole(30, 60)], 64, 8), [60, 0]);
        assert_eq!(
            divide(&[whole(500, 40), whole(20, 60), Need { rows: 9, most: 99, whole: false, draft: 0 }], 64, 64),
            [40, 20, 4]
        );
    }
}
