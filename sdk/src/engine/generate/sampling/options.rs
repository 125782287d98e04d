//! What a request can choose about the next token.

use std::ops::RangeInclusive;

use crate::error::{Error, Result};

/// How a request chooses its tokens. The default is greedy, with every step off. The steps have this order: `logit_bias`,
/// `repetition_penalty`, `presence_penalty` and `frequency_penalty`, `no_repeat_ngram_size`, `min_new_tokens`, the mask of
/// a grammar, `forced_eos`, `temperature`, `top_k`, `top_p`, `min_p`, the draw.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingOptions {
    /// Whether tokens are drawn at random. `false`: the token with the largest logit is taken, the one with the lowest
    /// id among equals; `temperature`, `top_k`, `top_p` and `min_p` then have no effect.
    pub do_sample: bool,
    /// Divides the logits: below 1 the likely tokens become more likely. 0 is the same as `do_sample: false`. Finite, 0
    /// or more.
    pub temperature: f32,
    /// Only the `top_k` tokens with the largest logits can be drawn, and those with the same logit as the last of them.
    /// 0, or more than the vocabulary has: all.
    pub top_k: u32,
    /// Only the most likely tokens can be drawn: a token stays while the probability of all tokens before it is at most
    /// `top_p`, so the one that crosses `top_p` stays. 0 to 1; 1: off. 0 leaves the most likely token.
    pub top_p: f32,
    /// A token that is less likely than `min_p` times the most likely token can not be drawn. 0 to 1; 0: off.
    pub min_p: f32,
    /// A token that is in the prompt or in the output has its logit divided by this if it is positive, else multiplied,
    /// once however often it occurs. Above 1 repetition becomes less likely. Finite, above 0; 1: off.
    pub repetition_penalty: f32,
    /// Is subtracted from the logit of a token that is in the output. −2 to 2; 0: off.
    pub presence_penalty: f32,
    /// Is subtracted from the logit of a token as many times as it is in the output. −2 to 2; 0: off.
    pub frequency_penalty: f32,
    /// No sequence of this many tokens occurs twice in prompt and output. 0: off. 1: no token occurs twice.
    pub no_repeat_ngram_size: u32,
    /// Token ids, and what is added to their logits. Finite; each id once.
    pub logit_bias: Vec<(u32, f32)>,
    /// The end-of-sequence tokens are banned until the output has this many tokens. 0: off.
    pub min_new_tokens: u32,
    /// The token that is taken, whatever the logits are, where it is the last that the request may generate.
    pub forced_eos: Option<u32>,
    /// Whether the output goes on after an end-of-sequence token. The token can still be drawn: the sampler does not use
    /// this field, the engine uses it to decide when the output ends.
    pub ignore_eos: bool,
    /// The seed of the draws. The same request with the same seed gets the same tokens. `None`: the engine chooses one.
    pub seed: Option<u64>,
}

impl Default for SamplingOptions {
    fn default() -> Self {
        Self {
            do_sample: false,
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            no_repeat_ngram_size: 0,
            logit_bias: Vec::new(),
            min_new_tokens: 0,
            forced_eos: None,
            ignore_eos: false,
            seed: None,
        }
    }
}

impl SamplingOptions {
    /// Checks every field. `vocab_size` is the number of logits that the model gives for a token.
    ///
    /// # Errors
    /// INVALID_ARGUMENT about the first field with a value that can not be used, with the value and the range.
    pub fn check(&self, vocab_size: usize) -> Result<()> {
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            let message = format!("is {}; it must be finite and 0 or more (0: greedy)", self.temperature);
            return Err(Error::invalid("temperature", message));
        }
        if !(self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite()) {
            let message = format!("is {}; it must be finite and above 0 (1: off)", self.repetition_penalty);
            return Err(Error::invalid("repetition_penalty", message));
        }
        within("top_p", self.top_p, 0.0..=1.0, "1: off")?;
        within("min_p", self.min_p, 0.0..=1.0, "0: off")?;
        within("presence_penalty", self.presence_penalty, -2.0..=2.0, "0: off")?;
        within("frequency_penalty", self.frequency_penalty, -2.0..=2.0, "0: off")?;
        for (index, &(token, bias)) in self.logit_bias.iter().enumerate() {
            in_vocabulary(|| format!("logit_bias[{index}]"), token, vocab_size)?;
            if !bias.is_finite() {
                let message = format!("adds {bias} to token {token}; it must be finite (to ban a token, add -1e30)");
                return Err(Error::invalid(format!("logit_bias[{index}]"), message));
            }
        }
        let mut ids: Vec<u32> = self.logit_bias.iter().map(|&(token, _)| token).collect();
        ids.sort_unstable();
        if let Some(pair) = ids.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::invalid("logit_bias", format!("token {} is there twice; keep one", pair[0])));
        }
        if let Some(token) = self.forced_eos {
            in_vocabulary(|| "forced_eos".into(), token, vocab_size)?;
        }
        Ok(())
    }

    /// Whether the token with the largest logit is taken.
    pub fn is_greedy(&self) -> bool {
        !self.do_sample || self.temperature == 0.0
    }
}

/// Checks that a token id of an argument has a logit.
pub(super) fn in_vocabulary(argument: impl Fn() -> String, token: u32, vocab_size: usize) -> Result<()> {
    if (token as usize) < vocab_size {
        return Ok(());
    }
    let message = match vocab_size.checked_sub(1) {
        Some(last) => format!("token {token} is not in the vocabulary; its ids are 0 to {last}"),
        None => format!("token {token} is not in the vocabulary, which is empty"),
    };
    Err(Error::invalid(argument(), message))
}

fn within(field: &str, value: f32, range: RangeInclusive<f32>, off: &str) -> Result<()> {
    // NaN is in no range.
    if range.contains(&value) {
        return Ok(());
    }
    Err(Error::invalid(field, format!("is {value}; it must be from {} to {} ({off})", range.start(), range.end())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_greedy_and_accepted() {
        let options = SamplingOptions::default();
        assert!(options.is_greedy());
        options.check(1).unwrap();
        assert!(!SamplingOptions { do_sample: true, ..options.clone() }.is_greedy());
        assert!(SamplingOptions { do_sample: true, temperature: 0.0, ..options }.is_greedy());
    }

    #[test]
    fn the_ends_of_the_ranges_are_accepted() {
        for (low, penalty) in [(0.0, -2.0), (1.0, 2.0)] {
            let options = SamplingOptions {
                temperature: low * 1e30,
                top_k: u32::MAX,
                top_p: low,
                min_p: low,
                repetition_penalty: 1e-30 + low,
                presence_penalty: penalty,
                frequency_penalty: penalty,
                no_repeat_ngram_size: u32::MAX,
                logit_bias: vec![(0, f32::MAX), (9, f32::MIN)],
                forced_eos: Some(9),
                ..SamplingOptions::default()
            };
            options.check(10).unwrap();
        }
    }

    #[test]
    fn a_refusal_names_the_field_the_value_and_the_range() {
        let refused = |change: &dyn Fn(&mut SamplingOptions), expected: &str| {
            let mut options = SamplingOptions::default();
            change(&mut options);
            assert_eq!(options.check(10).unwrap_err().to_string(), expected);
        };
        for value in [f32::NAN, f32::INFINITY, -0.5] {
            let expected = format!("temperature: is {value}; it must be finite and 0 or more (0: greedy)");
            refused(&|options| options.temperature = value, &expected);
        }
        for value in [f32::NAN, f32::INFINITY, -1.0, 0.0] {
            let expected = format!("repetition_penalty: is {value}; it must be finite and above 0 (1: off)");
            refused(&|options| options.repetition_penalty = value, &expected);
        }
        for value in [f32::NAN, f32::NEG_INFINITY, -0.1, 1.1] {
            let expected = format!("top_p: is {value}; it must be from 0 to 1 (1: off)");
            refused(&|options| options.top_p = value, &expected);
            let expected = format!("min_p: is {value}; it must be from 0 to 1 (0: off)");
            refused(&|options| options.min_p = value, &expected);
        }
        for value in [f32::NAN, f32::INFINITY, -2.1, 2.1] {
            let expected = format!("presence_penalty: is {value}; it must be from -2 to 2 (0: off)");
            refused(&|options| options.presence_penalty = value, &expected);
            let expected = format!("frequency_penalty: is {value}; it must be from -2 to 2 (0: off)");
            refused(&|options| options.frequency_penalty = value, &expected);
        }
        refused(
            &|options| options.logit_bias = vec![(1, 0.0), (10, 1.0)],
            "logit_bias[1]: token 10 is not in the vocabulary; its ids are 0 to 9",
        );
        refused(
            &|options| options.logit_bias = vec![(1, f32::NEG_INFINITY)],
            "logit_bias[0]: adds -inf to token 1; it must be finite (to ban a token, add -1e30)",
        );
        refused(
            &|options| options.logit_bias = vec![(3, 1.0), (1, 1.0), (3, 2.0)],
            "logit_bias: token 3 is there twice; keep one",
        );
        refused(
            &|options| options.forced_eos = Some(10),
            "forced_eos: token 10 is not in the vocabulary; its ids are 0 to 9",
        );
    }
}
