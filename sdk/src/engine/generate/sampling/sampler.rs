//! The sampler of one sequence.

use super::choice::{Choice, Scratch, choose};
use super::history::{NgramIndex, SeenTokens};
use super::options::{SamplingOptions, in_vocabulary};
use super::random::uniform;
use super::select::argmax_in_blocks;
use super::weights::{draw, total};
use crate::error::{Error, Result};

/// Chooses the tokens of one sequence. Its state is what the penalties have to know of the tokens so far. A clone goes on
/// like the original, and so does a new sampler for the same prompt that observed the same tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampler {
    pub(super) options: SamplingOptions,
    pub(super) seed: u64,
    pub(super) eos: Vec<u32>,
    vocab_size: usize,
    max_new_tokens: u32,
    /// The number of tokens in the output.
    pub(super) new_tokens: u32,
    /// `None` where no penalty needs it.
    pub(super) seen: Option<SeenTokens>,
    /// `None` where no_repeat_ngram_size is 0.
    pub(super) ngrams: Option<NgramIndex>,
}

impl Sampler {
    /// A sampler for a sequence whose output is empty. `seed` is that of the draws (`options.seed`, or one that the
    /// engine chose). `eos` are the end-of-sequence tokens. `vocab_size` is the number of logits that the model gives,
    /// which can be more than the tokenizer has. Tokens of the prompt that have no logit are ignored. `max_new_tokens`
    /// is how many tokens the sequence can get at most, by the request or by the context.
    ///
    /// # Errors
    /// Those of [`SamplingOptions::check`]; INVALID_ARGUMENT if `eos` has an id without a logit, or if `min_new_tokens` is
    /// more than `max_new_tokens`.
    pub fn new(
        options: &SamplingOptions,
        seed: u64,
        eos: &[u32],
        vocab_size: usize,
        prompt: &[u32],
        max_new_tokens: u32,
    ) -> Result<Self> {
        options.check(vocab_size)?;
        for (index, &token) in eos.iter().enumerate() {
            in_vocabulary(|| format!("eos[{index}]"), token, vocab_size)?;
        }
        if options.min_new_tokens > max_new_tokens {
            let message =
                format!("is {}; it must be at most max_new_tokens, which is {max_new_tokens}", options.min_new_tokens);
            return Err(Error::invalid("min_new_tokens", message));
        }
        let of_output = options.presence_penalty != 0.0 || options.frequency_penalty != 0.0;
        let of_both = options.repetition_penalty != 1.0;
        let mut seen = (of_output || of_both).then(SeenTokens::default);
        if let Some(seen) = seen.as_mut().filter(|_| of_both) {
            prompt.iter().for_each(|&token| seen.add_prompt(token));
        }
        let mut ngrams = (options.no_repeat_ngram_size > 0).then(|| NgramIndex::new(options.no_repeat_ngram_size));
        if let Some(ngrams) = &mut ngrams {
            prompt.iter().for_each(|&token| ngrams.add(token));
        }
        let (options, eos) = (options.clone(), eos.to_vec());
        Ok(Self { options, seed, eos, vocab_size, max_new_tokens, new_tokens: 0, seen, ngrams })
    }

    /// Adds a token to the output.
    pub fn observe(&mut self, token: u32) {
        self.new_tokens = self.new_tokens.saturating_add(1);
        if let Some(seen) = &mut self.seen {
            seen.add_output(token);
        }
        if let Some(ngrams) = &mut self.ngrams {
            ngrams.add(token);
        }
    }

    /// How many tokens it observed.
    #[cfg(test)]
    pub fn new_tokens(&self) -> u32 {
        self.new_tokens
    }

    /// Chooses the next token. It does not observe it. `position` is that of the token in the sequence: the draw depends
    /// on it and on the seed, and on no draw before. In `mask` bit i % 32 of word i / 32 is 1 if token i is allowed.
    ///
    /// # Errors
    /// INVALID_ARGUMENT if `logits` or `mask` have another size than the vocabulary, or if every token is banned: it names
    /// the option that banned the last one. RUNTIME if all logits are −∞ or NaN.
    pub fn sample(&self, logits: &[f32], position: u64, mask: Option<&[u32]>, scratch: &mut Scratch) -> Result<u32> {
        let choice = self.choose(logits, mask, scratch)?;
        Ok(self.draw(&choice, position, scratch))
    }

    /// The probability that [`sample`](Self::sample) takes each token.
    ///
    /// # Errors
    /// As for [`sample`](Self::sample).
    #[cfg(test)]
    pub fn distribution(&self, logits: &[f32], mask: Option<&[u32]>, scratch: &mut Scratch) -> Result<Vec<f32>> {
        let mut probabilities = vec![0.0; self.vocab_size];
        let choice = self.choose(logits, mask, scratch)?;
        let weights = &scratch.weights;
        match choice {
            Choice::Token(token) => probabilities[token as usize] = 1.0,
            Choice::All => {
                let total = total(weights);
                for (probability, weight) in probabilities.iter_mut().zip(weights) {
                    *probability = (weight / total) as f32;
                }
            }
            Choice::Candidates => {
                let total = total(weights);
                for (candidate, weight) in scratch.candidates.iter().zip(weights) {
                    probabilities[candidate.token as usize] = (weight / total) as f32;
                }
            }
        }
        Ok(probabilities)
    }

    pub(super) fn draw(&self, choice: &Choice, position: u64, scratch: &Scratch) -> u32 {
        let drawn = || draw(&scratch.weights, total(&scratch.weights), uniform(self.seed, position));
        match choice {
            Choice::Token(token) => *token,
            Choice::All => drawn() as u32,
            Choice::Candidates => scratch.candidates[drawn()].token,
        }
    }

    pub(super) fn choose(&self, logits: &[f32], mask: Option<&[u32]>, scratch: &mut Scratch) -> Result<Choice> {
        self.check_sizes(logits, mask)?;
        let maxima = std::mem::take(&mut scratch.maxima);
        let choice = self.choose_with(logits, &maxima, mask, scratch);
        scratch.maxima = maxima;
        scratch.maxima.clear();
        choice
    }

    /// As [`choose`](Self::choose). `maxima` are those of blocks of the logits, or none.
    fn choose_with(
        &self,
        logits: &[f32],
        maxima: &[f32],
        mask: Option<&[u32]>,
        scratch: &mut Scratch,
    ) -> Result<Choice> {
        if let Some(token) = self.forced() {
            return Ok(Choice::Token(token));
        }
        let choice = if self.adjusts(mask) {
            let mut adjusted = std::mem::take(&mut scratch.adjusted);
            adjusted.clear();
            adjusted.extend_from_slice(logits);
            self.adjust(&mut adjusted, mask);
            let choice = choose(&adjusted, &self.options, scratch);
            scratch.adjusted = adjusted;
            choice
        } else if self.options.is_greedy() && !maxima.is_empty() {
            argmax_in_blocks(logits, maxima).map(Choice::Token)
        } else {
            choose(logits, &self.options, scratch)
        };
        choice.ok_or_else(|| self.nothing_left(logits, mask))
    }

    pub(super) fn check_sizes(&self, logits: &[f32], mask: Option<&[u32]>) -> Result<()> {
        if logits.len() != self.vocab_size {
            let message = format!("{} numbers for a vocabulary of {}", logits.len(), self.vocab_size);
            return Err(Error::invalid("logits", message));
        }
        let words = self.vocab_size.div_ceil(32);
        match mask.map(<[u32]>::len) {
            Some(found) if found < words => {
                let message = format!("{found} words for a vocabulary of {}; it needs {words}", self.vocab_size);
                Err(Error::invalid("mask", message))
            }
            _ => Ok(()),
        }
    }

    /// The token that is taken whatever the logits are.
    pub(super) fn forced(&self) -> Option<u32> {
        self.options.forced_eos.filter(|_| self.new_tokens.saturating_add(1) >= self.max_new_tokens)
    }
}
