//! `pagoda_generator_options`, read.

use std::ffi::c_char;

use super::args::{self, Versioned};
use super::engine_options::deeper;
use super::kv_options::{
    PAGODA_KV_FORMAT_DEFAULT, PAGODA_KV_SIZE_UNIT_DEFAULT, pagoda_kv_format, pagoda_kv_size_unit, read_format,
    read_size,
};
use super::model::{self, pagoda_model_options};
use super::store::{self, pagoda_store_options};
use crate::engine::{Driver, EngineStore, GeneratorOptions, KvPolicy};
use crate::error::Result;

/// What runs the steps of a generator.
pub type pagoda_driver = i32;

/// A thread of the generator.
pub const PAGODA_DRIVER_THREAD: pagoda_driver = 0;
/// The caller: pagoda_generator_step runs one step. pagoda_generator_generate runs steps until its request has ended.
pub const PAGODA_DRIVER_CALLER: pagoda_driver = 1;

/// A fixed number of slots for the keys and values of each sequence, however long it is. Start from PAGODA_KV_POLICY_INIT, which
/// sets `struct_size` and the defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_kv_policy {
    /// The size of this struct.
    pub struct_size: u32,
    /// The slots of a sequence in each layer: its pages hold so many tokens. With "dense" 0 is no limit.
    pub cache_length: i32,
    /// The maximum number of tokens of a prompt that one step reads once the slots are full; default 64. The tokens of a step
    /// replace others before it attends.
    pub chunk_size: i32,
    /// With lastrec and smart-lastrec: the tokens at the beginning that always stay; default -1: for lastrec an eighth of the
    /// slots, from 1 to 16; for smart-lastrec half of them.
    pub protect: i32,
    /// With h2o: the newest tokens, so many of them, stay whatever their weights; default 0.
    pub grace_period: i32,
    /// With h2o: the part of the slots that the first eviction leaves alone at the beginning; default 0.05.
    pub keep_initial_fraction: f32,
    /// With h2o: 1 divides the weights that a token got by the time that it has been there; default 0.
    pub normalise: i32,
    /// Which tokens stay, UTF-8: "dense" (all of them, and a sequence of more than `cache_length` is rejected), "lastrec",
    /// "smart-lastrec", "h2o", "h2o-orig", "h2o-vlen" and, for quantised pages, "qh2o" and "qh2o-vlen".
    pub name: *const c_char,
    /// With qh2o: how much a token's weights count against what quantisation took from it, from 0 to 1; default 0.5.
    pub score_share: f32,
    /// The number of layers that `cache_lengths` has; default 0.
    pub cache_length_count: i32,
    /// The slots of each layer, instead of `cache_length`; NULL, the default: all have as many. A sequence's pages are those of the
    /// layer that has the most.
    pub cache_lengths: *const i32,
    /// With lastrec and smart-lastrec: 1 has the tokens of a chat's first message always stay, as the model's template writes it;
    /// mostly it is the system prompt. `protect` holds for other prompts. Default 0.
    pub protect_first_message: i32,
}

// SAFETY: numbers and pointers in C's layout, the size first.
unsafe impl Versioned for pagoda_kv_policy {
    const FIRST_SIZE: usize = 40;
}

/// How to open a generator. Start from PAGODA_GENERATOR_OPTIONS_INIT, which sets `struct_size` and the defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_generator_options {
    /// The size of this struct.
    pub struct_size: u32,
    /// What runs the steps; default PAGODA_DRIVER_THREAD.
    pub driver: pagoda_driver,
    /// 1, the default: sequences share the pages of equal prefixes. 0: each has pages of its own.
    pub share_prefixes: i32,
    /// The maximum number of sequences that run at the same time; default 64.
    pub max_batch: i32,
    /// The maximum number of rows of a step: one for each sequence that decodes, and the chunks of prompts; default
    /// 512.
    pub max_batch_tokens: i32,
    /// How much longer a step may take than one without prompts, while sequences decode; default 1.5. The chunks of
    /// prompts are cut to keep it. At least 1.1; 0: no limit but `max_batch_tokens`.
    pub max_stretch: f32,
    /// The maximum number of tokens of a prompt; default 0: what the model's context has.
    pub max_prompt_tokens: i32,
    /// The maximum number of new tokens that a request may ask for; default 0: what the model's context has.
    pub max_new_tokens: i32,
    /// The maximum number of answers that wait for their turn; default 4096. A request beyond it is rejected with
    /// PAGODA_STATUS_CAPACITY.
    pub queue: i32,
    /// The unit of `kv_size`; default PAGODA_KV_SIZE_UNIT_DEFAULT: 1 GiB.
    pub kv_size_unit: pagoda_kv_size_unit,
    /// How pages hold keys and values, on the GPU, in host memory and on disk; default PAGODA_KV_FORMAT_DEFAULT.
    pub kv_format: pagoda_kv_format,
    /// The size of the pool of keys and values, in `kv_size_unit`. A sequence that does not fit into it is rejected.
    pub kv_size: u64,
    /// Bytes of host memory for keys and values that were evicted from the pool; default 0: none. The memory is pinned
    /// if the model can run on a GPU.
    pub host_bytes: u64,
    /// Where the model runs, and on how many threads; NULL = the defaults. Its `tables` must be NULL.
    pub model: *const pagoda_model_options,
    /// The folder of a store for keys and values, UTF-8; NULL = none. Sessions survive a restart in it. One process at
    /// a time has it open.
    pub store_path: *const c_char,
    /// How the store is opened; NULL = the defaults.
    pub store_options: *const pagoda_store_options,
    /// A fixed number of slots for the keys and values of each sequence; NULL, the default: all tokens stay. With a policy nothing
    /// is shared between sequences, and a session goes on only behind what was computed of it.
    pub kv_policy: *const pagoda_kv_policy,
    /// The `max_draft` of requests that do not say, 0 to 64; default 0: nothing is guessed.
    pub max_draft: i32,
    /// The folder of a smaller model with the same tokenizer, which guesses tokens, UTF-8; NULL, the default: they are looked up in
    /// the prompt and the answer.
    pub draft_model: *const c_char,
    /// Bytes of that model's pool of keys and values; default 256 MiB. What does not fit is not guessed.
    pub draft_kv_bytes: u64,
}

// SAFETY: numbers and pointers in C's layout, the size first.
unsafe impl Versioned for pagoda_generator_options {
    const FIRST_SIZE: usize = 96;
}

/// # Safety
/// As for `pagoda_generator_open`.
pub(super) unsafe fn read_options(options: *const pagoda_generator_options) -> Result<GeneratorOptions> {
    let known = GeneratorOptions::default();
    let defaults = pagoda_generator_options {
        struct_size: size_of::<pagoda_generator_options>() as u32,
        driver: PAGODA_DRIVER_THREAD,
        share_prefixes: known.share_prefixes.into(),
        max_batch: known.max_batch as i32,
        max_batch_tokens: known.max_batch_tokens as i32,
        max_stretch: known.max_stretch,
        max_prompt_tokens: known.max_prompt_tokens as i32,
        max_new_tokens: known.max_new_tokens as i32,
        queue: known.queue as i32,
        kv_size_unit: PAGODA_KV_SIZE_UNIT_DEFAULT,
        kv_format: PAGODA_KV_FORMAT_DEFAULT,
        kv_size: 0,
        host_bytes: known.host_bytes,
        model: std::ptr::null(),
        store_path: std::ptr::null(),
        store_options: std::ptr::null(),
        kv_policy: std::ptr::null(),
        max_draft: known.max_draft as i32,
        draft_model: std::ptr::null(),
        draft_kv_bytes: known.draft_kv_bytes,
    };
    // SAFETY: by contract.
    let options = unsafe { args::options(options, defaults, "options")? };
    // SAFETY: by contract.
    let model = unsafe { model::read_options(options.model) };
    // SAFETY: by contract.
    let store_options = unsafe { store::read_options(options.store_options) };
    // SAFETY: by contract.
    let store_path = unsafe { args::optional_text(options.store_path, "options.store_path")? };
    // SAFETY: by contract.
    let draft_model = unsafe { args::optional_text(options.draft_model, "options.draft_model")? };
    let store_options = store_options.map_err(|error| deeper(error, "options.store_options"))?;
    let size = read_size(options.kv_size_unit, options.kv_size, "options.kv_size")?;
    Ok(GeneratorOptions {
        model: model.map_err(|error| deeper(error, "options.model"))?,
        kv_size: size.unwrap_or(known.kv_size),
        kv_format: read_format(options.kv_format, "options.kv_format")?,
        // SAFETY: by contract.
        kv_policy: unsafe { read_policy(options.kv_policy, "options.kv_policy")? },
        host_bytes: options.host_bytes,
        store: store_path.map(|path| EngineStore { path: path.into(), options: store_options }),
        share_prefixes: args::flag(options.share_prefixes, "options.share_prefixes")?,
        max_batch: args::count(options.max_batch, "options.max_batch")?,
        max_batch_tokens: args::count(options.max_batch_tokens, "options.max_batch_tokens")?,
        max_stretch: options.max_stretch,
        max_prompt_tokens: args::count(options.max_prompt_tokens, "options.max_prompt_tokens")?,
        max_new_tokens: args::count(options.max_new_tokens, "options.max_new_tokens")?,
        queue: args::count(options.queue, "options.queue")?,
        max_draft: args::count(options.max_draft, "options.max_draft")?,
        draft_model: draft_model.map(Into::into),
        draft_kv_bytes: options.draft_kv_bytes,
        driver: match options.driver {
            PAGODA_DRIVER_THREAD => Driver::Thread,
            PAGODA_DRIVER_CALLER => Driver::Caller,
            other => return Err(args::unknown("options.driver", other, "PAGODA_DRIVER_...")),
        },
    })
}

/// A policy that is the field `argument` of another struct; `None` for NULL.
///
/// # Safety
/// As for `pagoda_generator_open`.
pub(super) unsafe fn read_policy(policy: *const pagoda_kv_policy, argument: &str) -> Result<Option<KvPolicy>> {
    if policy.is_null() {
        return Ok(None);
    }
    let known = KvPolicy::new("", 0);
    let defaults = pagoda_kv_policy {
        struct_size: size_of::<pagoda_kv_policy>() as u32,
        cache_length: 0,
        chunk_size: known.chunk_size as i32,
        protect: -1,
        grace_period: known.grace_period as i32,
        keep_initial_fraction: known.keep_initial_fraction,
        normalise: known.normalise.into(),
        name: std::ptr::null(),
        score_share: known.score_share,
        cache_length_count: 0,
        cache_lengths: std::ptr::null(),
        protect_first_message: known.protect_first_message.into(),
    };
    let within = |field: &str| format!("{argument}.{field}");
    // SAFETY: by contract.
    let policy = unsafe { args::options(policy, defaults, argument)? };
    // SAFETY: by contract.
    let name = unsafe { args::text(policy.name, within("name"))? };
    let count = args::count(policy.cache_length_count, &within("cache_length_count"))?;
    // SAFETY: by contract.
    let lengths = unsafe { args::slice(policy.cache_lengths, count as usize, &within("cache_lengths"))? };
    let lengths = lengths.iter().map(|&length| args::count(length, &within("cache_lengths")));
    Ok(Some(KvPolicy {
        name: name.into(),
        cache_lengths: lengths.collect::<Result<_>>()?,
        cache_length: args::count(policy.cache_length, &within("cache_length"))?,
        chunk_size: args::count(policy.chunk_size, &within("chunk_size"))?,
        protect: match policy.protect {
            -1 => None,
            protect => Some(args::count(protect, &within("protect"))?),
        },
        grace_period: args::count(policy.grace_period, &within("grace_period"))?,
        keep_initial_fraction: policy.keep_initial_fraction,
        normalise: args::flag(policy.normalise, &within("normalise"))?,
        score_share: policy.score_share,
        protect_first_message: args::flag(policy.protect_first_message, &within("protect_first_message"))?,
        ..known
    }))
}
