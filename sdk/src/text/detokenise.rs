//! Token ids to text, one by one.

use std::sync::Arc;

use super::decoder::Decoder;
use super::tokenizer::Tokenizer;
use crate::error::Result;

/// Turns the ids of one sequence into text as they come.
///
/// All pieces together are what [`Tokenizer::decode`] gives for all ids, and no piece ends within a character. An id costs
/// the same however long the sequence is.
///
/// A decoder that needs the whole sequence (CTC, or one with a regular expression) gives all text at the end. No language
/// model is known to have one.
#[derive(Clone, Debug)]
pub struct Detokeniser {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    state: State,
}

#[derive(Clone, Debug)]
enum State {
    Streams(Decoder),
    /// The ids so far, for a decoder that needs them all.
    Whole(Vec<u32>),
}

impl State {
    fn new(tokenizer: &Tokenizer) -> Self {
        tokenizer.decoder().map_or(Self::Whole(Vec::new()), Self::Streams)
    }
}

impl Detokeniser {
    /// For one sequence. `skip_special` leaves out special tokens.
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special: bool) -> Self {
        Self { state: State::new(&tokenizer), tokenizer, skip_special }
    }

    /// Takes the next id and gives the text that is new. It is empty where the id ends within a character, and for an id
    /// that is not in the vocabulary.
    ///
    /// # Errors
    /// None at present.
    pub fn push(&mut self, id: u32) -> Result<String> {
        let mut text = String::new();
        match &mut self.state {
            State::Streams(decoder) => self.tokenizer.decode_next(decoder, id, self.skip_special, &mut text),
            State::Whole(ids) => ids.push(id),
        }
        Ok(text)
    }

    /// Ends the sequence and gives the text that is left. Bytes of an unfinished character become U+FFFD. The next id begins
    /// a new sequence.
    ///
    /// # Errors
    /// Those of [`Tokenizer::decode`].
    pub fn finish(&mut self) -> Result<String> {
        match std::mem::replace(&mut self.state, State::new(&self.tokenizer)) {
            State::Streams(decoder) => {
                let mut text = String::new();
                decoder.finish(&mut text);
                Ok(text)
            }
            State::Whole(ids) => self.tokenizer.decode(&ids, self.skip_special),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::random::Random;
    use crate::text::samples::{self, TEXTS};

    /// The pieces of a sequence, the last one from `finish`.
    fn pieces(detokeniser: &mut Detokeniser, ids: &[u32]) -> Vec<String> {
        let mut pieces: Vec<String> = ids.iter().map(|&id| detokeniser.push(id).unwrap()).collect();
        pieces.push(detokeniser.finish().unwrap());
        pieces
    }

    #[test]
    fn random_ids_give_the_text_of_all_at_once() {
        for (name, tokenizer) in samples::tokenizers() {
            let mut random = Random::new(28);
            for skip_special in [false, true] {
                let mut detokeniser = Detokeniser::new(tokenizer.clone(), skip_special);
                for case in 0..500 {
                    // Some are not in the vocabulary.
                    let ids: Vec<u32> =
                        (0..case % 40).map(|_| random.below(tokenizer.vocab_size() + 2) as u32).collect();
                    let whole = tokenizer.decode(&ids, skip_special).unwrap();
                    assert_eq!(pieces(&mut detokeniser, &ids).concat(), whole, "{name} {ids:?}");
                }
            }
        }
    }

    #[test]
    fn texts_of_every_script_come_back_in_whole_characters() {
        for (name, tokenizer) in samples::tokenizers() {
            if !samples::spells_everything(name) {
                continue;
            }
            let mut detokeniser = Detokeniser::new(tokenizer.clone(), true);
            for text in TEXTS {
                let ids = tokenizer.encode(text, false).unwrap();
                let pieces = pieces(&mut detokeniser, &ids);
                assert_eq!(pieces.concat(), *text, "{name}");
                assert!(!pieces.concat().contains('\u{fffd}'), "{name} {pieces:?}");
            }
        }
    }

    #[test]
    fn a_character_comes_with_its_last_byte() {
        let tokenizer = samples::byte_level();
        let ids = tokenizer.encode("a👍b", false).unwrap();
        let mut detokeniser = Detokeniser::new(tokenizer, true);
        assert_eq!(pieces(&mut detokeniser, &ids), ["a", "", "", "", "👍", "b", ""]);
        assert_eq!(pieces(&mut detokeniser, &ids[..3]), ["a", "", "", "\u{fffd}"]);
        // The second byte of a character that has none: nothing later can save the first one.
        assert_eq!(pieces(&mut detokeniser, &[ids[1], ids[0], ids[5]]), ["", "\u{fffd}a", "b", ""]);
    }

    #[test]
    fn byte_tokens_make_characters() {
        let tokenizer = samples::byte_fallback();
        let ids = tokenizer.encode("a👎 b", false).unwrap();
        let mut detokeniser = Detokeniser::new(tokenizer, true);
        assert_eq!(pieces(&mut detokeniser, &ids), ["", "a", "", "", "", "👎", " ", "b", ""]);
        assert_eq!(pieces(&mut detokeniser, &ids[1..4]), ["a", "", "", "\u{fffd}\u{fffd}"]);
        assert_eq!(pieces(&mut detokeniser, &[ids[2], ids[3], ids[1]]), ["", "", "\u{fffd}\u{fffd}a", ""]);
    }

    #[test]
    fn a_leading_space_is_dropped_once() {
        let tokenizer = samples::byte_fallback();
        let the = tokenizer.token_id("▁the").unwrap();
        let mut detokeniser = Detokeniser::new(tokenizer, true);
        assert_eq!(pieces(&mut detokeniser, &[the, the, the]), ["the", " the", " the", ""]);
        assert_eq!(pieces(&mut detokeniser, &[the]), ["the", ""], "a new sequence has a beginning of its own");
    }

    #[test]
    fn an_id_costs_the_same_late_in_a_sequence() {
        // Work, not time: what is kept does not grow with the sequence.
        for (name, tokenizer) in samples::tokenizers() {
            if name == "whole text" {
                continue;
            }
            for token in ["a", "<0x61>"] {
                let Some(id) = tokenizer.token_id(token) else { continue };
                let mut detokeniser = Detokeniser::new(tokenizer.clone(), true);
                let mut kept = |count: usize| {
                    (0..count).for_each(|_| drop(detokeniser.push(id).unwrap()));
                    format!("{:?}", detokeniser.state).len()
                };
                assert_eq!(kept(10), kept(10_000), "{name}");
            }
        }
    }

    #[test]
    fn a_decoder_that_needs_the_whole_text_gives_it_at_the_end() {
        let (_, tokenizer) = samples::tokenizers().into_iter().find(|(name, _)| *name == "whole text").unwrap();
        let ids = ["t", "t", "h", "a", "h", "b"].map(|token| tokenizer.token_id(token).unwrap());
        let mut detokeniser = Detokeniser::new(tokenizer, true);
        assert_eq!(pieces(&mut detokeniser, &ids), ["", "", "", "", "", "", "thhb"]);
    }
}
