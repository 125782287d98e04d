//! Chooses the next token of a sequence from the logits of the model.
//!
//! The steps, in this order: `logit_bias`, `repetition_penalty`, `presence_penalty` and `frequency_penalty`,
//! `no_repeat_ngram_size`, `min_new_tokens`, the mask of a grammar, `forced_eos`, `temperature`, `top_k`, `top_p`,
//! `min_p`, the draw. The logits are f32 up to the temperature, probabilities are f64 from there on.
//!
//! `adjust` has the steps up to the mask, with what `history` knows of the tokens so far. `choice` has those from the
//! temperature on: `select` finds the largest logits without sorting all of them, `weights` is the softmax. `random` has
//! the numbers of the draws. `continuations` has what beams take instead of the last steps. `device` samples on the GPU, with the same result.

mod adjust;
mod choice;
mod continuations;
mod device;
mod history;
mod logprobs;
mod options;
mod random;
mod sampler;
mod select;
mod weights;

#[cfg(test)]
mod device_tests;
#[cfg(test)]
mod tests;

pub use choice::Scratch;
pub use device::{DeviceSampler, Sampled, ToSample};
pub use logprobs::{TokenLogprobs, logprobs};
pub use options::SamplingOptions;
pub use sampler::Sampler;
