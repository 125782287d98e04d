//! The items by which the KV cache knows a sequence's tokens.
//!
//! Sequences of different callers share the pages of equal prefixes, so a caller must not be able to make up a prefix that
//! is taken for another one. The item of a token is therefore a part of a SHA-256 over all tokens up to it: two prefixes that
//! differ have different items from there on.

use ring::digest::{SHA256, digest};

/// The items of a sequence.
#[derive(Clone, Debug, Default)]
pub(super) struct PrefixItems {
    items: Vec<u64>,
    /// The hash of all tokens so far.
    state: [u8; 32],
    /// Before tokens that were guessed: the number of items, and the hash.
    before_guess: Option<(usize, [u8; 32])>,
}

impl PrefixItems {
    /// Adds the items of tokens.
    pub(super) fn extend(&mut self, tokens: &[u32]) {
        self.items.reserve(tokens.len());
        for token in tokens {
            let mut bytes = [0; 36];
            bytes[..32].copy_from_slice(&self.state);
            bytes[32..].copy_from_slice(&token.to_le_bytes());
            self.state.copy_from_slice(digest(&SHA256, &bytes).as_ref());
            let (first, _) = self.state.split_first_chunk().expect("a hash has 32 bytes");
            self.items.push(u64::from_le_bytes(*first));
        }
    }

    /// Adds the items of tokens that were guessed.
    pub(super) fn guess(&mut self, tokens: &[u32]) {
        self.take_back();
        self.before_guess = Some((self.items.len(), self.state));
        self.extend(tokens);
    }

    /// Removes the items of tokens that were guessed.
    pub(super) fn take_back(&mut self) {
        if let Some((items, state)) = self.before_guess.take() {
            self.items.truncate(items);
            self.state = state;
        }
    }

    pub(super) fn get(&self) -> &[u64] {
        &self.items
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_item_depends_on_all_tokens_up_to_it() {
        let items = |tokens: &[u32]| {
            let mut items = PrefixItems::default();
            items.extend(tokens);
            items.get().to_vec()
        };
        let whole = items(&[1, 2, 3, 4]);
        let mut parts = PrefixItems::default();
        parts.extend(&[1]);
        parts.extend(&[2, 3, 4]);
        assert_eq!(parts.get(), whole);
        let edited = items(&[1, 9, 3, 4]);
        assert_eq!(edited[0], whole[0]);
        assert!((1..4).all(|at| edited[at] != whole[at]));
    }

    #[test]
    fn guesses_leave_no_trace() {
        let mut plain = PrefixItems::default();
        plain.extend(&[1, 2, 3]);
        let mut guessed = PrefixItems::default();
        guessed.extend(&[1, 2]);
        guessed.guess(&[9, 9]);
        guessed.guess(&[3, 4]);
        assert_eq!(guessed.get()[..3], plain.get()[..]);
        guessed.take_back();
        guessed.take_back();
        guessed.extend(&[3]);
        assert_eq!((guessed.get(), guessed.state), (plain.get(), plain.state));
    }

    #[test]
    fn items_are_what_they_were() {
        let mut items = PrefixItems::default();
        items.extend(&[0, 1, 49151]);
        assert_eq!(items.get(), STORED);
    }

    /// They are stored: what was written by an older version must be found.
    const STORED: [u64; 3] = [0xf656_d39f_d55f_b66d, 0x4427_581d_999c_7a40, 0x1626_a074_2445_93c8];
}
