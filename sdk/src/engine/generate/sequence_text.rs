//! The text of an answer, as it grows.

use super::request::FinishReason;
use crate::error::Result;
use crate::text::{Detokeniser, Stopped, Stops};

/// The text of an answer.
#[derive(Clone)]
pub(super) struct SequenceText {
    pub(super) detokeniser: Detokeniser,
    pub(super) stops: Stops,
    pub(super) text: String,
    /// Whether the text has the stop token that ended it.
    pub(super) include_stop: bool,
}

impl SequenceText {
    /// Takes a token. Returns the text that is new.
    pub(super) fn push(&mut self, token: u32, finish_reason: &mut Option<FinishReason>) -> Result<String> {
        let piece = self.detokeniser.push(token)?;
        Ok(self.pass(&piece, finish_reason))
    }

    pub(super) fn pass(&mut self, piece: &str, finish_reason: &mut Option<FinishReason>) -> String {
        match self.stops.push(piece) {
            Stopped::Pass { text } => text,
            Stopped::Found { text, .. } => {
                *finish_reason = Some(FinishReason::Stop);
                text
            }
        }
    }

    /// The text that was held back.
    pub(super) fn finish(&mut self) -> Result<String> {
        let piece = self.detokeniser.finish()?;
        let mut text = self.pass(&piece, &mut None);
        text.push_str(&self.stops.finish());
        Ok(text)
    }
}
