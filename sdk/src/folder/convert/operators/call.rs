//! A node with what is known of its inputs, and what is known of its outputs.

use super::super::proto::NodeProto;
use super::super::value::Value;

/// The outputs of a node. `issue` says why it can not stay in a graph whose rows are tokens of several sequences.
pub(in crate::folder::convert) struct Made {
    pub(in crate::folder::convert) values: Vec<Value>,
    pub(in crate::folder::convert) issue: Option<String>,
}

pub(super) const MIXES: &str = "mixes the tokens of a call";
pub(super) const COUNTS: &str = "counts the tokens of a call, which here are of several sequences";

impl Made {
    pub(super) fn one(value: Value) -> Self {
        Self { values: vec![value], issue: None }
    }

    pub(super) fn issue(mut self, issue: &str) -> Self {
        self.issue.get_or_insert_with(|| issue.to_owned());
        self
    }

    pub(super) fn issue_if(self, condition: bool, issue: &str) -> Self {
        if condition { self.issue(issue) } else { self }
    }
}

/// A node, and its inputs.
pub(super) struct Call<'a> {
    pub(super) node: &'a NodeProto,
    pub(super) inputs: &'a [Option<&'a Value>],
}

impl<'a> Call<'a> {
    pub(super) fn input(&self, at: usize) -> Option<&'a Value> {
        self.inputs.get(at).copied().flatten()
    }

    pub(super) fn dims(&self, at: usize) -> Option<&'a [usize]> {
        self.input(at)?.dims.as_deref()
    }

    pub(super) fn ints(&self, at: usize) -> Option<Vec<i64>> {
        self.input(at)?.ints()
    }

    /// A list of axes, which newer operators have as an input and older ones as an attribute. `None`: not given.
    pub(super) fn axes(&self, at: usize) -> Option<Vec<i64>> {
        self.ints(at).or_else(|| self.node.ints("axes").map(<[i64]>::to_vec))
    }

    pub(super) fn axis(&self, absent: i64, rank: usize) -> Option<usize> {
        axis(self.node.int("axis", absent), rank)
    }

    /// A tensor of the shape of an input, with other numbers.
    pub(super) fn like(&self, at: usize) -> Option<Value> {
        let value = self.input(at)?;
        Some(Value { numbers: None, ..value.clone() })
    }

    pub(super) fn ends_with_tokens(&self, at: usize) -> bool {
        self.input(at).is_some_and(|value| value.tokens.zip(value.rank()).is_some_and(|(at, rank)| at + 1 == rank))
    }
}

/// An axis, which may count from the end.
pub(super) fn axis(at: i64, rank: usize) -> Option<usize> {
    let at = if at < 0 { at + rank as i64 } else { at };
    usize::try_from(at).ok().filter(|&at| at < rank)
}
