//! How the graph of a language model takes the keys and values of earlier tokens.

use crate::tensor::ElementType;

/// How a graph takes keys and values.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Form {
    /// PagedAttention nodes read pages and append to them: [`Inputs`](super::Inputs) and [`Outputs`](super::Outputs) name what
    /// they have. The pools are updated in place.
    Paged,
    /// Standard operators that read pages by Gather, and return new rows.
    Functional(Functional),
    /// Past tensors in, past and new rows together out: what exporters of other projects write.
    PastPresent(PastPresent),
}

/// The names of a graph in the functional form. `sdk/docs/model-folder.md` has types and shapes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Functional {
    /// New tokens, i64 `[B, S]`.
    pub input_ids: String,
    /// Their positions, i64 `[B, S]`.
    pub position_ids: String,
    /// The rows of the pool that have the keys of cached tokens, i64 `[B, P]`.
    pub key_slots: String,
    /// Those that have the values, i64 `[B, P]`.
    pub value_slots: String,
    /// What each new token sees, bool `[B, 1, S, P + S]`.
    pub attention_mask: String,
    /// The pool of each layer, `[rows, heads, head_size]`.
    pub kv_pools: Vec<String>,
    /// The logits of all new tokens, f32 `[B, S, V]`.
    pub logits: String,
    /// The new keys of each layer, `[B, S, heads, head_size]`.
    pub new_keys: Vec<String>,
    /// The new values of each layer, `[B, S, heads, head_size]`.
    pub new_values: Vec<String>,
}

/// The names of a graph with past and present tensors, and what it counts on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PastPresent {
    /// New tokens, i64 `[B, S]`.
    pub input_ids: String,
    /// Which columns of past and new tokens are no padding, i64 `[B, P + S]`.
    pub attention_mask: String,
    /// The positions of new tokens, i64 `[B, S]`; `None`: the graph finds them itself.
    pub position_ids: Option<String>,
    /// Whether there is a past, bool `[1]`: of graphs with two branches.
    pub use_cache_branch: Option<String>,
    /// The keys of each layer so far, `[B, heads, P, head_size]`.
    pub past_keys: Vec<String>,
    /// The values of each layer so far.
    pub past_values: Vec<String>,
    /// The logits of all new tokens, `[B, S, V]`.
    pub logits: String,
    /// Their type: f32 or f16.
    pub logits_element: ElementType,
    /// Keys of each layer with the new ones, `[B, heads, P + S, head_size]`.
    pub present_keys: Vec<String>,
    /// Values of each layer with the new ones.
    pub present_values: Vec<String>,
    /// Which operators attend.
    pub attention: PastAttention,
}

/// The operators that attend to past and new keys, which decides how sequences lie in a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PastAttention {
    /// com.microsoft.GroupQueryAttention: a sequence begins at column 0, and only its own columns are read. Several new tokens
    /// on a past: one sequence in a call.
    GroupQuery,
    /// Plain operators with a mask: past and new tokens touch, with padding before and behind them, which is read.
    Masked,
    /// The same, and the graph takes columns for positions: without padding, so that a call has sequences of one length.
    ByColumn,
}

impl Form {
    /// Its word in pagoda.json, and in reports: `paged`, `functional`, `past_present`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Paged => "paged",
            Self::Functional(_) => "functional",
            Self::PastPresent(_) => "past_present",
        }
    }

    /// How the graph is run, and what is lost against the paged form: sentences for people. None for the paged form.
    pub fn notes(&self) -> Vec<&'static str> {
        let copies = match self {
            Self::Paged => return Vec::new(),
            Self::Functional(_) => "each step copies the keys and values that it reads, inside the graph (Gather)",
            Self::PastPresent(PastPresent { attention: PastAttention::GroupQuery, .. }) => {
                "keys and values are kept twice while a sequence runs: in its pages, and in the past tensors of its batch"
            }
            Self::PastPresent(_) => {
                "keys and values are kept twice while a sequence runs, and the graph copies all of them in each step (Concat)"
            }
        };
        let batches = match self {
            Self::PastPresent(past) => past.attention.batches(),
            _ => "sequences with the same number of new tokens share a call; others take turns in a step",
        };
        vec![copies, batches, "on the CPU alone, with native pages and without a cache policy"]
    }

    /// The names of its inputs and of its outputs; none of the paged form, which has them in a place of its own.
    pub(in super::super) fn names(&self) -> (Vec<&String>, Vec<&String>) {
        match self {
            Self::Paged => (Vec::new(), Vec::new()),
            Self::Functional(names) => names.names(),
            Self::PastPresent(names) => names.names(),
        }
    }
}

impl Functional {
    fn names(&self) -> (Vec<&String>, Vec<&String>) {
        let single = [&self.input_ids, &self.position_ids, &self.key_slots, &self.value_slots, &self.attention_mask];
        let inputs = single.into_iter().chain(&self.kv_pools).collect();
        (inputs, [&self.logits].into_iter().chain(&self.new_keys).chain(&self.new_values).collect())
    }
}

impl PastPresent {
    fn names(&self) -> (Vec<&String>, Vec<&String>) {
        let single = [&self.input_ids, &self.attention_mask].into_iter().chain(&self.position_ids);
        let inputs = single.chain(&self.use_cache_branch).chain(&self.past_keys).chain(&self.past_values).collect();
        (inputs, [&self.logits].into_iter().chain(&self.present_keys).chain(&self.present_values).collect())
    }
}

impl PastAttention {
    /// A word for reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::GroupQuery => "GroupQueryAttention",
            Self::Masked => "plain operators",
            Self::ByColumn => "plain operators that take columns for positions",
        }
    }

    fn batches(self) -> &'static str {
        match self {
            Self::GroupQuery => "single tokens share a call; chunks of prompts take turns in a step",
            Self::Masked => {
                "sequences with the same number of new tokens share a call, padded to the longest; others take turns in a step"
            }
            Self::ByColumn => "only sequences of the same length share a call; others take turns in a step",
        }
    }
}
