//! The likeliest next tokens of a beam.

use super::choice::Scratch;
use super::logprobs::LogSoftmax;
use super::sampler::Sampler;
use super::select::largest;
use crate::error::Result;

impl Sampler {
    /// The `count` likeliest next tokens and their log probabilities, the likeliest first, and by id where they are equal. As in
    /// transformers, penalties, bans and the mask change the log probabilities of the raw logits, which are not made to
    /// sum up to 1 again. Nothing is drawn: temperature, `top_k`, `top_p` and `min_p` have no effect.
    ///
    /// # Errors
    /// As for [`sample`](Self::sample).
    pub fn continuations(
        &self,
        logits: &[f32],
        mask: Option<&[u32]>,
        count: usize,
        scratch: &mut Scratch,
    ) -> Result<Vec<(u32, f32)>> {
        self.check_sizes(logits, mask)?;
        if let Some(token) = self.forced() {
            return Ok(vec![(token, 0.0)]);
        }
        let log_softmax = LogSoftmax::new(logits, &mut scratch.weights)?;
        let mut scores = std::mem::take(&mut scratch.adjusted);
        scores.clear();
        scores.extend(logits.iter().map(|&logit| log_softmax.of(logit)));
        self.adjust(&mut scores, mask);
        let candidates = &mut scratch.candidates;
        candidates.clear();
        largest(&scores, count, &mut scratch.ranked, candidates);
        scratch.adjusted = scores;
        candidates.sort_unstable_by_key(|candidate| candidate.key());
        candidates.truncate(count);
        if candidates.is_empty() {
            return Err(self.nothing_left(logits, mask));
        }
        Ok(candidates.iter().map(|candidate| (candidate.token, candidate.logit)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::super::SamplingOptions;
    use super::*;

    const LOGITS: [f32; 6] = [0.5, 2.0, -1.0, 2.0, 1.0, -3.0];

    fn log_probability(token: usize) -> f32 {
        let sum: f64 = LOGITS.iter().map(|&logit| f64::from(logit).exp()).sum();
        (f64::from(LOGITS[token]) - sum.ln()) as f32
    }

    fn continuations(options: &SamplingOptions, prompt: &[u32], mask: Option<&[u32]>) -> Result<Vec<(u32, f32)>> {
        let sampler = Sampler::new(options, 0, &[1], 6, prompt, 4).unwrap();
        sampler.continuations(&LOGITS, mask, 3, &mut Scratch::default())
    }

    #[test]
    fn the_likeliest_come_first_and_a_mask_does_not_change_the_others() {
        let plain = continuations(&SamplingOptions::default(), &[], None).unwrap();
        assert_eq!(plain.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [1, 3, 4]);
        let masked = continuations(&SamplingOptions::default(), &[], Some(&[0b110100])).unwrap();
        assert_eq!(masked.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [4, 2, 5]);
        for (token, score) in plain.into_iter().chain(masked) {
            assert!((score - log_probability(token as usize)).abs() < 1e-6, "{token}: {score}");
        }
    }

    #[test]
    fn a_penalty_is_of_the_log_probability() {
        let options = SamplingOptions { repetition_penalty: 2.0, ..SamplingOptions::default() };
        let found = continuations(&options, &[1], None).unwrap();
        assert_eq!(found.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [3, 1, 4]);
        assert!((found[1].1 - 2.0 * log_probability(1)).abs() < 1e-6, "{found:?}");
    }

    #[test]
    fn where_all_is_banned_the_error_says_by_what() {
        let error = continuations(&SamplingOptions::default(), &[], Some(&[0])).unwrap_err();
        assert_eq!(error.argument(), Some("mask"));
    }
}
