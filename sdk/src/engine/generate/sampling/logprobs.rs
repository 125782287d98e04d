//! Log probabilities, for the caller to see.

use super::choice::Scratch;
use super::options::in_vocabulary;
use super::select::{Candidate, largest, maximum};
use super::weights::{Softmax, total};
use crate::error::{Error, Result, Status};

/// What the model thought of a token, before anything that the request asked for.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct TokenLogprobs {
    /// The natural logarithm of the token's probability. −∞ if its logit is −∞ or NaN.
    pub logprob: f32,
    /// Its place among all tokens: 1 for the most likely. Of equals the one with the lower id is first.
    pub rank: u32,
    /// The most likely tokens and their log probabilities, the most likely first.
    pub top: Vec<(u32, f32)>,
}

/// The log softmax of the logits as the model gave them, for one token and for the `top_n` most likely ones.
///
/// # Errors
/// INVALID_ARGUMENT if `token` has no logit; RUNTIME if all logits are −∞ or NaN.
pub fn logprobs(logits: &[f32], token: u32, top_n: usize, scratch: &mut Scratch) -> Result<TokenLogprobs> {
    in_vocabulary(|| "token".into(), token, logits.len())?;
    let log_softmax = LogSoftmax::new(logits, &mut scratch.weights)?;
    let candidates = &mut scratch.candidates;
    candidates.clear();
    if top_n > 0 {
        largest(logits, top_n, &mut scratch.ranked, candidates);
        candidates.sort_unstable_by_key(|candidate| candidate.key());
        candidates.truncate(top_n);
    }
    let top = candidates.iter().map(|&Candidate { token, logit }| (token, log_softmax.of(logit))).collect();
    let own = logits[token as usize];
    Ok(TokenLogprobs { logprob: log_softmax.of(own), rank: rank(logits, token), top })
}

/// The log softmax of logits.
pub(super) struct LogSoftmax {
    max: f32,
    log_sum: f64,
}

impl LogSoftmax {
    /// RUNTIME if all logits are −∞ or NaN. `weights` is a buffer.
    pub(super) fn new(logits: &[f32], weights: &mut Vec<f64>) -> Result<Self> {
        let max = maximum(logits);
        if max == f32::NEG_INFINITY {
            return Err(no_logits(logits.len()));
        }
        Softmax::new(max, 1.0).weights(logits, weights);
        Ok(Self { max, log_sum: total(weights).ln() })
    }

    /// That of one of the logits. −∞ for −∞ and NaN.
    pub(super) fn of(&self, logit: f32) -> f32 {
        let above = if logit == self.max { 0.0 } else { f64::from(logit) - f64::from(self.max) };
        if logit.is_nan() { f32::NEG_INFINITY } else { (above - self.log_sum) as f32 }
    }
}

fn rank(logits: &[f32], token: u32) -> u32 {
    // NaN counts as −∞.
    let value = |logit: f32| if logit.is_nan() { f32::NEG_INFINITY } else { logit };
    let (before, after) = logits.split_at(token as usize);
    let own = value(after[0]);
    let ahead: u32 = before.iter().map(|&logit| u32::from(value(logit) >= own)).sum();
    let behind: u32 = after.iter().map(|&logit| u32::from(value(logit) > own)).sum();
    1 + ahead + behind
}

/// The error where a model gave no logit that can be used.
pub(super) fn no_logits(count: usize) -> Error {
    let message = format!("all {count} logits of the model are NaN or -inf; check its weights and its inputs");
    Error::new(Status::Runtime, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_are_the_log_softmax_of_the_logits() {
        let logits: Vec<f32> = (0..300).map(|id| ((id * 37 % 101) as f32) * 0.25 - 9.0).collect();
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
        let expected = |token: u32| f64::from(logits[token as usize]) - sum.ln();
        let mut scratch = Scratch::default();
        for token in 0..300 {
            let found = logprobs(&logits, token, 20, &mut scratch).unwrap();
            assert!((f64::from(found.logprob) - expected(token)).abs() < 1e-5);
            let mut order: Vec<u32> = (0..300).collect();
            // A stable sort: equals stay in order of their ids.
            order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
            assert_eq!(order[found.rank as usize - 1], token);
            assert_eq!(found.top.iter().map(|&(token, _)| token).collect::<Vec<_>>(), order[..20]);
            for (token, logprob) in found.top {
                assert!((f64::from(logprob) - expected(token)).abs() < 1e-5);
            }
        }
    }

    #[test]
    fn banned_and_broken_logits_have_a_probability_of_0() {
        let mut scratch = Scratch::default();
        let logits = [f32::NAN, 0.0, f32::NEG_INFINITY, 0.0];
        let found = logprobs(&logits, 0, 9, &mut scratch).unwrap();
        assert_eq!((found.logprob, found.rank), (f32::NEG_INFINITY, 3));
        assert_eq!(found.top, [(1, -std::f32::consts::LN_2), (3, -std::f32::consts::LN_2)]);
        assert_eq!(logprobs(&logits, 2, 0, &mut scratch).unwrap().rank, 4);
        let huge = logprobs(&[f32::MAX, f32::MIN], 1, 0, &mut scratch).unwrap();
        assert_eq!((huge.logprob, huge.top.len()), (f32::NEG_INFINITY, 0));
    }

    #[test]
    fn errors_say_what_is_wrong() {
        let mut scratch = Scratch::default();
        let error = logprobs(&[0.0; 4], 4, 1, &mut scratch).unwrap_err();
        assert_eq!(error.to_string(), "token: token 4 is not in the vocabulary; its ids are 0 to 3");
        let error = logprobs(&[f32::NAN; 4], 0, 1, &mut scratch).unwrap_err();
        assert_eq!(error.status(), Status::Runtime);
        assert_eq!(error.message(), "all 4 logits of the model are NaN or -inf; check its weights and its inputs");
    }
}
