//! The area under the ROC curve.

/// How probable it is that a positive sample scores higher than a negative one; a tie counts half. NaN if there are no
/// samples of one kind.
pub fn auc(samples: &[(bool, f32)]) -> f64 {
    let mut sorted: Vec<&(bool, f32)> = samples.iter().collect();
    sorted.sort_by(|a, b| a.1.total_cmp(&b.1));
    let (mut won, mut below) = (0.0, 0_usize);
    for tied in sorted.chunk_by(|a, b| a.1 == b.1) {
        let positive = tied.iter().filter(|sample| sample.0).count();
        let negative = tied.len() - positive;
        won += positive as f64 * (below as f64 + negative as f64 / 2.0);
        below += negative;
    }
    won / ((samples.len() - below) as f64 * below as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_share_of_pairs_in_order() {
        let mut state = 7_u32;
        let mut next = move |below: u32| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 16) % below
        };
        for levels in [2, 7, 10_000] {
            let samples: Vec<(bool, f32)> = (0..200).map(|_| (next(3) == 0, next(levels) as f32)).collect();
            let (mut won, mut pairs) = (0.0, 0.0);
            for good in samples.iter().filter(|sample| sample.0) {
                for bad in samples.iter().filter(|sample| !sample.0) {
                    pairs += 1.0;
                    won += if good.1 > bad.1 { 1.0 } else { f64::from(good.1 == bad.1) / 2.0 };
                }
            }
            assert!((auc(&samples) - won / pairs).abs() < 1e-12, "{levels} levels");
        }
        assert!(auc(&[(true, 1.0)]).is_nan());
    }
}
