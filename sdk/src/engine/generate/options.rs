//! What can be chosen when a generator is opened.

use std::path::PathBuf;

use super::super::EngineStore;
use super::kv_policy::KvPolicy;
use crate::kv::{KvFormat, KvSize};
use crate::runtime::ModelOptions;

/// How to open a generator.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct GeneratorOptions {
    /// Where the model runs, and on how many threads. `tables` must be `None`.
    pub model: ModelOptions,
    /// The size of the pool of keys and values. A sequence that does not fit into it is refused.
    pub kv_size: KvSize,
    /// How pages hold keys and values, on the GPU, in host memory and on disk; `None`: as the model was exported. `Int8` takes
    /// about a quarter of the memory of f32 pages, and half of that of f16.
    #[cfg_attr(feature = "serde", serde(with = "crate::folder::kv_format_word"))]
    pub kv_format: Option<KvFormat>,
    /// A fixed number of slots for the keys and values of each sequence, and which tokens stay in them; `None`: all tokens stay.
    /// With a policy nothing is shared between sequences, and a session goes on only behind all that was computed of it.
    pub kv_policy: Option<KvPolicy>,
    /// Bytes of host memory for keys and values that were evicted from the pool; 0: none.
    pub host_bytes: u64,
    /// The store on disk for keys and values. Sessions survive a restart in it. `None`: no store.
    pub store: Option<EngineStore>,
    /// Whether sequences share the pages of equal prefixes.
    pub share_prefixes: bool,
    /// The maximum number of sequences that run at the same time; 1 or more.
    pub max_batch: u32,
    /// The maximum number of rows of a step: one for each sequence that decodes, and the chunks of prompts. 1 or more.
    pub max_batch_tokens: u32,
    /// How much longer a step may take than one without prompts, while sequences decode. The chunks of prompts are cut
    /// to keep it. At least 1.1; 0: no limit but `max_batch_tokens`.
    pub max_stretch: f32,
    /// The maximum number of tokens of a prompt; 0: what the model's context has.
    pub max_prompt_tokens: u32,
    /// The maximum number of tokens that a request may ask for; 0: what the model's context has.
    pub max_new_tokens: u32,
    /// The maximum number of answers that wait for their turn. A request beyond it is rejected with CAPACITY.
    pub queue: u32,
    /// The `max_draft` of requests that do not say: how many tokens are guessed for one step; 0: none.
    pub max_draft: u32,
    /// The folder of a smaller model with the same tokenizer, which guesses them, on the same device. `None`: they are looked up in
    /// the prompt and the answer.
    pub draft_model: Option<PathBuf>,
    /// Bytes of that model's pool of keys and values. What does not fit is not guessed.
    pub draft_kv_bytes: u64,
    /// Who runs the steps.
    pub driver: Driver,
}

/// Who runs the steps of a generator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum Driver {
    /// A thread of the generator.
    #[default]
    Thread,
    /// The caller, by [`Generator::step`](super::Generator::step).
    Caller,
}

impl Default for GeneratorOptions {
    fn default() -> Self {
        Self {
            model: ModelOptions::default(),
            kv_size: KvSize::Bytes(1 << 30),
            kv_format: None,
            kv_policy: None,
            host_bytes: 0,
            store: None,
            share_prefixes: true,
            max_batch: 64,
            max_batch_tokens: 512,
            max_stretch: 1.5,
            max_prompt_tokens: 0,
            max_new_tokens: 0,
            queue: 4096,
            max_draft: 0,
            draft_model: None,
            draft_kv_bytes: 1 << 28,
            driver: Driver::Thread,
        }
    }
}
