//! How many rows each sequence gets in a step.

/// What a sequence needs: the rows that are left until its next token, the row of its last token included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Need {
    pub(super) rows: usize,
    /// The maximum number of rows in one step.
    pub(super) most: usize,
}

/// Divides the rows of a step. Sequences are in order of precedence. Those that need one row are first: they decode, and a
/// prompt must not stall them. The rest of the `budget`, and no more than `chunk` rows while others decode, goes to the
/// others in order.
pub(super) fn divide(needs: &[Need], budget: usize, chunk: usize) -> Vec<usize> {
    let mut rows = vec![0; needs.len()];
    let mut left = budget;
    for (rows, _) in rows.iter_mut().zip(needs).filter(|(_, need)| need.rows == 1) {
        *rows = left.min(1);
        left -= *rows;
    }
    if left < budget {
        left = left.min(chunk);
    }
    for (rows, need) in rows.iter_mut().zip(needs).filter(|(_, need)| need.rows > 1) {
        *rows = need.rows.min(need.most).min(left);
        left -= *rows;
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    fn needs(rows: &[usize]) -> Vec<Need> {
        rows.iter().map(|&rows| Need { rows, most: usize::MAX }).collect()
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
        assert_eq!(divide(&[Need { rows: 500, most: 64 }], 256, 32), [64]);
    }
}
