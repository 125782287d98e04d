//! What a caller can choose of a policy.

use crate::kv::policy::PolicyOptions;

/// A fixed number of slots for the keys and values of each sequence, however long it is.
#[derive(Clone, Debug)]
pub struct KvPolicy {
    /// Which tokens stay: `lastrec`, `smart-lastrec`, `h2o` or `h2o-orig`.
    pub name: String,
    /// The slots of a sequence in each layer: its pages hold so many tokens.
    pub cache_length: u32,
    /// The most tokens of a prompt that one step reads once the slots are full. The result depends on it: what a step brings
    /// leaves before the step attends. Fewer tokens lose less, and take longer.
    pub chunk_size: u32,
    /// With lastrec and smart-lastrec: the tokens at the beginning that always stay. `None`: for lastrec an eighth of the slots,
    /// from 1 to 16; for smart-lastrec half of them.
    pub protect: Option<u32>,
    /// With h2o: the newest tokens, so many of them, stay whatever their weights.
    pub grace_period: u32,
    /// With h2o: the part of the slots that the first eviction leaves alone at the beginning.
    pub keep_initial_fraction: f32,
    /// With h2o: the weights that a token got count by the time that it has been there.
    pub normalise: bool,
}

impl KvPolicy {
    /// A policy by its name, with a number of slots.
    pub fn new(name: impl Into<String>, cache_length: u32) -> Self {
        Self {
            name: name.into(),
            cache_length,
            chunk_size: 64,
            protect: None,
            grace_period: 0,
            keep_initial_fraction: PolicyOptions::default().keep_initial_fraction,
            normalise: false,
        }
    }

    /// What the policy itself takes of it.
    pub(super) fn options(&self) -> PolicyOptions {
        PolicyOptions {
            protect: self.protect.map(|tokens| tokens as usize),
            grace_period: self.grace_period as usize,
            keep_initial_fraction: self.keep_initial_fraction,
            normalise: self.normalise,
            ..PolicyOptions::default()
        }
    }
}
