//! What a caller can choose of a policy.

use crate::kv::policy::PolicyOptions;

/// A fixed number of slots for the keys and values of each sequence, however long it is.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct KvPolicy {
    /// Which tokens stay: `dense` (all of them, and a sequence of more than `cache_length` is refused), `lastrec`,
    /// `smart-lastrec`, `h2o`, `h2o-vlen`, `qh2o`, `qh2o-vlen` or `h2o-orig`. `qh2o` and `qh2o-vlen` are for quantised pages.
    pub name: String,
    /// The slots of a sequence in each layer: its pages hold so many tokens. With `dense` 0 is no limit.
    pub cache_length: u32,
    /// The slots of each layer, instead of `cache_length`; empty: all have as many. A sequence's pages are those of the layer that
    /// has the most: fewer slots in others save time, and no memory.
    #[cfg_attr(feature = "serde", serde(default))]
    pub cache_lengths: Vec<u32>,
    /// The most tokens of a prompt that one step reads once the slots are full. The result depends on it: what a step brings
    /// leaves before the step attends. Fewer tokens lose less, and take longer.
    #[cfg_attr(feature = "serde", serde(default = "KvPolicy::default_chunk_size"))]
    pub chunk_size: u32,
    /// With lastrec and smart-lastrec: the tokens at the beginning that always stay. `None`: for lastrec an eighth of the slots,
    /// from 1 to 16; for smart-lastrec half of them.
    pub protect: Option<u32>,
    /// With h2o: the newest tokens, so many of them, stay whatever their weights.
    #[cfg_attr(feature = "serde", serde(default))]
    pub grace_period: u32,
    /// With h2o: the part of the slots that the first eviction leaves alone at the beginning.
    #[cfg_attr(feature = "serde", serde(default = "KvPolicy::default_keep_initial_fraction"))]
    pub keep_initial_fraction: f32,
    /// With h2o: the weights that a token got count by the time that it has been there.
    #[cfg_attr(feature = "serde", serde(default))]
    pub normalise: bool,
    /// With qh2o: how much a token's weights count against what quantisation took from it, from 0 to 1.
    #[cfg_attr(feature = "serde", serde(default = "KvPolicy::default_score_share"))]
    pub score_share: f32,
    /// With lastrec and smart-lastrec: the tokens of a chat's first message always stay, as the model's template writes it; it is
    /// mostly the system prompt. `protect` holds for other prompts. smart-lastrec protects half of the slots at most.
    #[cfg_attr(feature = "serde", serde(default))]
    pub protect_first_message: bool,
    /// Whether [`Generator::take_slot_log`](super::Generator::take_slot_log) has the slots that each step writes.
    #[cfg_attr(feature = "serde", serde(default))]
    pub replay_log: bool,
}

/// The slots that a step has written of one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotCall {
    /// The number of the sequence: those of one generator are counted as they come.
    pub sequence: u64,
    /// The position of the first token.
    pub position: u64,
    /// The tokens.
    pub rows: u32,
    /// `[layer][rows, heads]`: the slots that lost their tokens, or were free. One layer where all are the same.
    pub slots: Vec<Vec<u32>>,
}

impl KvPolicy {
    /// A policy by its name, with a number of slots.
    pub fn new(name: impl Into<String>, cache_length: u32) -> Self {
        Self {
            name: name.into(),
            cache_length,
            cache_lengths: Vec::new(),
            chunk_size: Self::default_chunk_size(),
            protect: None,
            grace_period: 0,
            keep_initial_fraction: Self::default_keep_initial_fraction(),
            normalise: false,
            score_share: Self::default_score_share(),
            protect_first_message: false,
            replay_log: false,
        }
    }

    fn default_chunk_size() -> u32 {
        64
    }

    fn default_keep_initial_fraction() -> f32 {
        PolicyOptions::default().keep_initial_fraction
    }

    fn default_score_share() -> f32 {
        PolicyOptions::default().score_share
    }

    /// Whether all tokens stay.
    pub(super) fn is_dense(&self) -> bool {
        self.name == "dense"
    }

    /// What the policy itself takes of it.
    pub(super) fn options(&self) -> PolicyOptions {
        PolicyOptions {
            protect: self.protect.map(|tokens| tokens as usize),
            grace_period: self.grace_period as usize,
            keep_initial_fraction: self.keep_initial_fraction,
            normalise: self.normalise,
            score_share: self.score_share,
        }
    }
}
