//! What can be chosen of a beam search.

use crate::error::{Error, Result};

/// The maximum number of beams.
pub(super) const MOST_BEAMS: u32 = 16;

/// A beam search: instead of one token after the other, several beginnings of an answer are kept, and the best answers are found
/// among what follows all of them.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct BeamOptions {
    /// The number of beams, 1 to 16.
    pub width: u32,
    /// The score of an answer is the sum of its log probabilities over its number of tokens to this power: above 0 long answers
    /// get better scores, below 0 short ones. Default: 1.
    #[cfg_attr(feature = "serde", serde(default = "BeamOptions::default_length_penalty"))]
    pub length_penalty: f32,
    /// When the search ends.
    #[cfg_attr(feature = "serde", serde(default))]
    pub early_stop: EarlyStop,
}

impl BeamOptions {
    /// So many beams, with the defaults of transformers.
    pub fn new(width: u32) -> Self {
        Self { width, length_penalty: Self::default_length_penalty(), early_stop: EarlyStop::default() }
    }

    fn default_length_penalty() -> f32 {
        1.0
    }

    pub(super) fn check(&self) -> Result<()> {
        if self.width == 0 || self.width > MOST_BEAMS {
            return Err(Error::invalid("beams.width", format!("{} is not between 1 and {MOST_BEAMS}", self.width)));
        }
        if !self.length_penalty.is_finite() {
            let message = format!("{} is no finite number", self.length_penalty);
            return Err(Error::invalid("beams.length_penalty", message));
        }
        Ok(())
    }

    /// The score of an answer of so many tokens.
    pub(super) fn score(&self, sum: f64, tokens: usize) -> f64 {
        if tokens == 0 { 0.0 } else { sum / (tokens as f64).powf(self.length_penalty.into()) }
    }
}

/// When a search ends that has as many finished answers as beams: `early_stopping` of transformers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum EarlyStop {
    /// When no beam has a better score at its length than the worst of them: `false`.
    #[default]
    WhenUnlikely,
    /// At once: `true`.
    WhenFull,
    /// When no beam can get a better score at any length than the worst of them: `"never"`.
    Never,
}
