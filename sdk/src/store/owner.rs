//! What a history belongs to.

use std::fmt;

/// What a history belongs to: a user of a ranker, a conversation of a language model, a prompt that others share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct Owner(pub u64);

impl Owner {
    /// Owners by their numbers, without a copy.
    pub fn slice(numbers: &[u64]) -> &[Self] {
        // SAFETY: an owner has the layout of its number, which `repr(transparent)` guarantees.
        unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), numbers.len()) }
    }
}

impl From<u64> for Owner {
    fn from(number: u64) -> Self {
        Self(number)
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
