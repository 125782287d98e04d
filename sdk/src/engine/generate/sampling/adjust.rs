//! The steps that change logits or ban tokens, up to the mask of a grammar.

use super::logprobs::no_logits;
use super::sampler::Sampler;
use crate::error::Error;

/// A step: its option, and what it does to the logits.
type Step = (&'static str, fn(&Sampler, &mut [f32], Option<&[u32]>));

/// In the order in which they are applied. A banned token has the logit −∞.
const STEPS: [Step; 6] = [
    ("logit_bias", |sampler, logits, _| sampler.add_bias(logits)),
    ("repetition_penalty", |sampler, logits, _| sampler.penalise_repetition(logits)),
    ("presence_penalty", |sampler, logits, _| sampler.penalise_output(logits)),
    ("no_repeat_ngram_size", |sampler, logits, _| sampler.ban_ngrams(logits)),
    ("min_new_tokens", |sampler, logits, _| sampler.ban_eos(logits)),
    ("mask", |_, logits, mask| mask.into_iter().for_each(|mask| ban_by(mask, logits))),
];

impl Sampler {
    /// Whether [`adjust`](Self::adjust) would do anything.
    pub(super) fn adjusts(&self, mask: Option<&[u32]>) -> bool {
        let penalties = self.seen.is_some() || self.ngrams.is_some();
        penalties || !self.options.logit_bias.is_empty() || self.bans_eos() || mask.is_some()
    }

    /// Applies the steps up to the mask.
    pub(super) fn adjust(&self, logits: &mut [f32], mask: Option<&[u32]>) {
        for (_, apply) in STEPS {
            apply(self, logits, mask);
        }
    }

    /// The error where no token is left: finds the step that banned the last one.
    #[cold]
    pub(super) fn nothing_left(&self, logits: &[f32], mask: Option<&[u32]>) -> Error {
        let mut logits = logits.to_vec();
        let mut left = count(&logits);
        if left == 0 {
            return no_logits(logits.len());
        }
        for (option, apply) in STEPS {
            apply(self, &mut logits, mask);
            let now = count(&logits);
            if now == 0 {
                let why = match option {
                    "no_repeat_ngram_size" => format!(
                        "is {}, and each of the {left} tokens would complete a sequence that was there before; use a \
                         larger size",
                        self.options.no_repeat_ngram_size
                    ),
                    "min_new_tokens" => format!(
                        "is {} and the output has {}, so the end of the sequence is banned, and no other token was left; \
                         use a smaller number",
                        self.options.min_new_tokens, self.new_tokens
                    ),
                    _ => format!(
                        "the grammar allows none of the {left} tokens that were left; if other options ban tokens, use \
                         fewer of them with a grammar"
                    ),
                };
                return Error::invalid(option, why);
            }
            left = now;
        }
        unreachable!("the steps left {left} tokens, but none was chosen")
    }

    fn add_bias(&self, logits: &mut [f32]) {
        for &(token, bias) in &self.options.logit_bias {
            change(logits, token, |logit| logit + bias);
        }
    }

    fn penalise_repetition(&self, logits: &mut [f32]) {
        let penalty = self.options.repetition_penalty;
        if penalty == 1.0 {
            return;
        }
        for seen in self.seen.iter().flat_map(|seen| seen.iter()) {
            change(logits, seen.token, |logit| if logit < 0.0 { logit * penalty } else { logit / penalty });
        }
    }

    fn penalise_output(&self, logits: &mut [f32]) {
        let (presence, frequency) = (self.options.presence_penalty, self.options.frequency_penalty);
        if presence == 0.0 && frequency == 0.0 {
            return;
        }
        for seen in self.seen.iter().flat_map(|seen| seen.iter()).filter(|seen| seen.outputs > 0) {
            change(logits, seen.token, |logit| logit - seen.outputs as f32 * frequency - presence);
        }
    }

    fn ban_ngrams(&self, logits: &mut [f32]) {
        for token in self.ngrams.iter().flat_map(|ngrams| ngrams.followers()) {
            ban(logits, token);
        }
    }

    pub(super) fn bans_eos(&self) -> bool {
        self.new_tokens < self.options.min_new_tokens
    }

    fn ban_eos(&self, logits: &mut [f32]) {
        for &token in self.eos.iter().filter(|_| self.bans_eos()) {
            ban(logits, token);
        }
    }
}

/// A finite logit stays finite, however large the change is: only a ban makes −∞. Tokens without a logit are ignored.
fn change(logits: &mut [f32], token: u32, change: impl Fn(f32) -> f32) {
    if let Some(logit) = logits.get_mut(token as usize).filter(|logit| logit.is_finite()) {
        *logit = change(*logit).clamp(f32::MIN, f32::MAX);
    }
}

fn ban(logits: &mut [f32], token: u32) {
    if let Some(logit) = logits.get_mut(token as usize) {
        *logit = f32::NEG_INFINITY;
    }
}

/// A table, because shifts by different counts have no vector instruction on every processor.
const BITS: [u32; 32] = {
    let mut bits = [1; 32];
    let mut index = 1;
    while index < 32 {
        bits[index] = bits[index - 1] << 1;
        index += 1;
    }
    bits
};

fn ban_by(mask: &[u32], logits: &mut [f32]) {
    for (logits, &word) in logits.chunks_mut(32).zip(mask) {
        match word {
            u32::MAX => {}
            0 => logits.fill(f32::NEG_INFINITY),
            _ => {
                for (logit, bit) in logits.iter_mut().zip(BITS) {
                    *logit = if word & bit != 0 { *logit } else { f32::NEG_INFINITY };
                }
            }
        }
    }
}

fn count(logits: &[f32]) -> usize {
    logits.iter().filter(|&&logit| logit > f32::NEG_INFINITY).count()
}
