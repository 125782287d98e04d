//! Guesses by what followed the last tokens when they came before, in the prompt or in the answer.

use std::collections::HashMap;

/// How many of the last tokens came before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Matched {
    #[default]
    Two,
    Three,
}

impl Matched {
    pub(super) const KINDS: usize = 2;
    /// How often guesses are taken to be right before any was seen.
    pub(super) const FIRST_RATES: [f64; Self::KINDS] = [0.3, 0.6];
}

/// Where pairs and triples of tokens ended last.
#[derive(Default)]
pub(super) struct Lookup {
    pairs: HashMap<[u32; 2], usize>,
    triples: HashMap<[u32; 3], usize>,
    /// The tokens that are in the maps: all but the last, which would be found as itself.
    known: usize,
}

impl Lookup {
    /// Where what followed the last tokens begins. `tokens` begins with those of the last call.
    pub(super) fn find(&mut self, tokens: &[u32]) -> Option<(usize, Matched)> {
        for end in self.known..tokens.len().saturating_sub(1) {
            let before = &tokens[..=end];
            before.last_chunk().and_then(|pair| self.pairs.insert(*pair, end + 1));
            before.last_chunk().and_then(|triple| self.triples.insert(*triple, end + 1));
        }
        self.known = self.known.max(tokens.len().saturating_sub(1));
        let triple = tokens.last_chunk().and_then(|triple| self.triples.get(triple));
        let pair = || tokens.last_chunk().and_then(|pair| self.pairs.get(pair));
        triple.map(|&at| (at, Matched::Three)).or_else(|| pair().map(|&at| (at, Matched::Two)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_and_then_the_latest_match_is_found() {
        let mut lookup = Lookup::default();
        let tokens = [5, 1, 2, 7, 4, 1, 2, 8, 5, 1, 2];
        assert_eq!(lookup.find(&tokens), Some((3, Matched::Three)), "5 1 2 came once before");
        assert_eq!(lookup.find(&[&tokens[..], &[9, 1, 2]].concat()), Some((11, Matched::Two)), "the last 1 2");
        assert_eq!(lookup.find(&[&tokens[..], &[9, 1, 2, 6]].concat()), None);
        for short in [&[][..], &[1], &[1, 1], &[1, 2]] {
            assert_eq!(Lookup::default().find(short), None);
        }
        assert_eq!(Lookup::default().find(&[1, 1, 1]), Some((2, Matched::Two)), "they may overlap");
    }

    #[test]
    fn tokens_may_come_one_by_one_or_many_at_once() {
        let tokens: Vec<u32> = (0..400_u32).map(|at| at * at % 11 % 5).collect();
        let mut one_by_one = Lookup::default();
        for end in 0..tokens.len() {
            assert_eq!(one_by_one.find(&tokens[..end]), Lookup::default().find(&tokens[..end]));
        }
    }
}
