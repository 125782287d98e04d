//! What one pooling of embedding rows carries, and every check of it.

use crate::InputError;
use crate::common::input_error::{check_output, refuse};

/// How the rows of a slot become one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Combiner {
    /// Their sum.
    Sum,
    /// Their sum divided by how many they are.
    Mean,
    /// Their sum divided by the square root of how many they are.
    SqrtN,
}

impl Combiner {
    /// The one with this name: `sum`, `mean` or `sqrtn`.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "sum" => Some(Self::Sum),
            "mean" => Some(Self::Mean),
            "sqrtn" => Some(Self::SqrtN),
            _ => None,
        }
    }

    /// What the sum of `count` rows is divided by.
    pub(crate) fn divisor(self, count: usize) -> f64 {
        match self {
            Self::Sum => 1.0,
            Self::Mean => count as f64,
            Self::SqrtN => (count as f64).sqrt(),
        }
    }
}

/// Embedding rows that are combined into one vector per slot. Slot r has the keys `offsets[r] .. offsets[r + 1]`; one
/// without keys becomes zeros.
///
/// The rows of a slot are added in the order of its keys, in f32: the result is the same to the bit whatever the number
/// of threads, the instruction set, and the way that rows are found.
#[derive(Clone, Copy, Debug)]
pub struct Pool<'a> {
    /// `[rows, dim]`.
    pub rows: &'a [f32],
    /// How many numbers a row has; at least 1.
    pub dim: usize,
    /// `[K]`: which row each key has, where keys share rows. Without it there is a row for each key, in the same order.
    pub index: Option<&'a [u32]>,
    /// `[R + 1]`: where the keys of each slot begin.
    pub offsets: &'a [i64],
    /// How the rows of a slot become one vector.
    pub combiner: Combiner,
}

impl Pool<'_> {
    /// Refuses everything that would make an access stray, for an output of `output_len` numbers. Writes nothing.
    pub fn check(&self, output_len: usize) -> Result<(), InputError> {
        let Pool { rows, dim, .. } = *self;
        if dim == 0 || !rows.len().is_multiple_of(dim) {
            return refuse("rows", None, format!("{} numbers do not make rows of {dim}", rows.len()));
        }
        let count = rows.len() / dim;
        if let Some(index) = self.index
            && let Some(key) = index.iter().position(|&row| row as usize >= count)
        {
            return refuse("index", None, format!("key {key} has row {}, there are {count} rows", index[key]));
        }
        check_offsets(self.offsets, self.index.map_or(count, <[u32]>::len))?;
        // A product that overflows differs from every length there can be.
        check_output("vectors", output_len, self.slots().saturating_mul(dim))
    }

    /// R. Only after `check`.
    pub(crate) fn slots(&self) -> usize {
        self.offsets.len() - 1
    }

    /// The rows of one slot, in order. Only after `check`.
    pub(crate) fn rows_of(&self, slot: usize) -> impl ExactSizeIterator<Item = usize> + Clone {
        let index = self.index;
        let keys = self.offsets[slot] as usize..self.offsets[slot + 1] as usize;
        keys.map(move |key| index.map_or(key, |index| index[key] as usize))
    }
}

/// Checks the offsets of a call with `keys` keys: from 0 up to that number, never down. A caller that has yet to look the
/// rows up asks this first.
pub fn check_offsets(offsets: &[i64], keys: usize) -> Result<(), InputError> {
    let tensor = "offsets";
    let (Some(&first), Some(&last)) = (offsets.first(), offsets.last()) else {
        return refuse(tensor, None, "0 offsets, expected one more than rows".to_owned());
    };
    if first != 0 {
        return refuse(tensor, None, format!("first offset {first}, expected 0"));
    }
    if let Some(row) = offsets.windows(2).position(|pair| pair[1] < pair[0]) {
        let message = format!("row {row}: offset goes down from {} to {}", offsets[row], offsets[row + 1]);
        return refuse(tensor, None, message);
    }
    if usize::try_from(last) != Ok(keys) {
        return refuse(tensor, None, format!("last offset {last}, expected {keys}, the number of keys"));
    }
    Ok(())
}
