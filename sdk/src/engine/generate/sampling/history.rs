//! What the penalties have to know of the tokens so far. A step costs as much as there are different tokens, or tokens to
//! ban, and not as much as the history is long.

use std::collections::{BTreeSet, HashMap};

/// The different tokens of prompt and output.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct SeenTokens {
    places: HashMap<u32, usize>,
    tokens: Vec<SeenToken>,
}

/// A token of prompt or output.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct SeenToken {
    pub(super) token: u32,
    /// How often it is in the output.
    pub(super) outputs: u32,
}

impl SeenTokens {
    pub(super) fn add_prompt(&mut self, token: u32) {
        self.entry(token);
    }

    pub(super) fn add_output(&mut self, token: u32) {
        let entry = self.entry(token);
        entry.outputs = entry.outputs.saturating_add(1);
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = SeenToken> {
        self.tokens.iter().copied()
    }

    fn entry(&mut self, token: u32) -> &mut SeenToken {
        let place = *self.places.entry(token).or_insert(self.tokens.len());
        if place == self.tokens.len() {
            self.tokens.push(SeenToken { token, outputs: 0 });
        }
        &mut self.tokens[place]
    }
}

/// Finds the tokens that would complete a sequence of `size` tokens that was there before.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct NgramIndex {
    /// The length of the prefixes: one less than that of the sequences.
    prefix: usize,
    history: Vec<u32>,
    /// The hash of the last `prefix` tokens.
    hash: u64,
    /// What the oldest token of a prefix is multiplied with in its hash when the prefix moves on.
    oldest: u64,
    /// The prefixes by their hash. A list, because two can have the same hash.
    prefixes: HashMap<u64, Vec<Prefix>>,
}

#[derive(Clone, Debug, PartialEq)]
struct Prefix {
    /// Where it begins in the history, the first time.
    start: usize,
    /// The tokens that came after it. A set: a prompt can repeat one pair many times.
    followers: BTreeSet<u32>,
}

impl NgramIndex {
    /// `size` is 1 or more.
    pub(super) fn new(size: u32) -> Self {
        let prefix = size - 1;
        let oldest = HASH_BASE.wrapping_pow(prefix);
        Self { prefix: prefix as usize, history: Vec::new(), hash: 0, oldest, prefixes: HashMap::new() }
    }

    pub(super) fn add(&mut self, token: u32) {
        if let Some(start) = self.history.len().checked_sub(self.prefix) {
            let known = self.prefixes.entry(self.hash).or_default();
            let last = &self.history[start..];
            match known.iter_mut().find(|known| self.history[known.start..][..self.prefix] == *last) {
                Some(known) => {
                    known.followers.insert(token);
                }
                None => known.push(Prefix { start, followers: BTreeSet::from([token]) }),
            }
        }
        self.history.push(token);
        self.hash = self.hash.wrapping_mul(HASH_BASE).wrapping_add(spread(token));
        if let Some(start) = self.history.len().checked_sub(self.prefix + 1) {
            self.hash = self.hash.wrapping_sub(spread(self.history[start]).wrapping_mul(self.oldest));
        }
    }

    /// The tokens that came after the last `size` − 1 tokens before.
    pub(super) fn followers(&self) -> impl Iterator<Item = u32> {
        let start = self.history.len().checked_sub(self.prefix);
        let found = start.and_then(|start| {
            let known = self.prefixes.get(&self.hash)?;
            known.iter().find(|known| self.history[known.start..][..self.prefix] == self.history[start..])
        });
        found.into_iter().flat_map(|prefix| prefix.followers.iter().copied())
    }
}

/// An odd number with its bits well mixed: 2^64 over the golden ratio.
const HASH_BASE: u64 = 0x9E37_79B9_7F4A_7C15;

fn spread(token: u32) -> u64 {
    // The finalizer of SplitMix64.
    let mut bits = u64::from(token).wrapping_add(HASH_BASE);
    bits = (bits ^ bits >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^ bits >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(history: &[u32], size: usize) -> BTreeSet<u32> {
        let Some(start) = (history.len() + 1).checked_sub(size) else { return BTreeSet::new() };
        let last = &history[start..];
        let windows = history.windows(size);
        windows.filter(|window| window[..size - 1] == *last).map(|window| window[size - 1]).collect()
    }

    #[test]
    fn the_followers_are_those_of_a_scan_of_the_history() {
        let mut found = 0;
        for size in [1, 2, 3, 4, 7, 50] {
            let mut index = NgramIndex::new(size);
            let mut history = Vec::new();
            for step in 0..600u32 {
                let followers: BTreeSet<u32> = index.followers().collect();
                assert_eq!(followers, scan(&history, size as usize), "size {size}, step {step}");
                found += followers.len();
                // Few different tokens, and a part that repeats itself exactly.
                let token = if step < 300 { spread(step) as u32 % 3 } else { history[step as usize - 300] };
                index.add(token);
                history.push(token);
            }
        }
        assert!(found > 1000, "{found}");
    }

    #[test]
    fn two_prefixes_of_one_hash_are_told_apart() {
        let mut index = NgramIndex::new(2);
        index.add(7);
        index.add(8);
        // As if 9 had the hash of 7.
        let of_seven = index.prefixes.values().next().unwrap().clone();
        index.add(9);
        index.prefixes.insert(index.hash, of_seven);
        assert_eq!(index.followers().count(), 0);
        index.add(4);
        index.history.push(9);
        index.hash = spread(9);
        assert_eq!(index.followers().collect::<Vec<_>>(), [4]);
    }

    #[test]
    fn a_size_longer_than_any_history_bans_nothing() {
        let mut index = NgramIndex::new(u32::MAX);
        for token in [1, 1, 1] {
            index.add(token);
            assert_eq!(index.followers().count(), 0);
        }
    }
}
