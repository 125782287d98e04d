//! What a caller can choose of a cache.

use std::sync::Arc;

pub use pagoda_kernels::KvFormat;

use super::eviction_policy::{EvictionPolicy, LeastRecentlyUsed};
use crate::tensor::ElementType;

/// What a cache of keys and values is for, how large it is, and how it behaves.
#[derive(Clone, Debug)]
pub struct KvOptions {
    /// Layers of the model that keep keys and values.
    pub layers: u32,
    /// Heads of keys and values in each.
    pub heads: u32,
    /// The size of a head.
    pub head_size: u32,
    /// Tokens a page holds; a multiple of 8.
    pub page_size: u32,
    /// The type of keys and values: f32, f16 or bf16.
    pub element_type: ElementType,
    /// How pages hold them. A quantised format has a second tensor a layer for its scales, and the store holds the small form.
    pub format: KvFormat,
    /// The size of the pool.
    pub size: KvSize,
    /// The GPU whose memory holds the pool; `None`: host memory.
    pub device_id: Option<u32>,
    /// The version of the model. Entries of another version are never seen.
    pub model_version: String,
    /// The most tokens of a history that are kept; 0 = all. Older ones leave page by page.
    pub max_history: u32,
    /// What becomes of new tokens that are cached already.
    pub overlap: Overlap,
    /// Whether requests bring the items of the history, and what happens when they are not those that are cached.
    pub edited: Edited,
    /// When histories go to the store.
    pub offload: Offload,
    /// With [`Offload::OnEviction`]: the percentage of the pool whose pages are free or stored already, so that their
    /// eviction takes no copy. A background thread stores the owners that are evicted next as the pool fills up. 0: owners
    /// are stored when they are evicted.
    pub ahead_percent: u32,
    /// Whether `prepare` returns before everything has arrived from the store; then the lease tells which layers have.
    pub onload_in_background: bool,
    /// Threads that read the store.
    pub onload_threads: u32,
    /// Whether [`KvCache::find_prefix`](super::KvCache::find_prefix) finds owners by the items that their histories begin with.
    /// Needs `edited` to be refuse or invalidate.
    pub index_prefixes: bool,
    /// Which owner is evicted when the pool is full.
    pub eviction: Arc<dyn EvictionPolicy>,
}

impl Default for KvOptions {
    fn default() -> Self {
        Self {
            layers: 0,
            heads: 0,
            head_size: 0,
            page_size: 32,
            element_type: ElementType::F32,
            format: KvFormat::Native,
            size: KvSize::Pages(0),
            device_id: None,
            model_version: String::new(),
            max_history: 0,
            overlap: Overlap::default(),
            edited: Edited::default(),
            offload: Offload::default(),
            ahead_percent: 12,
            onload_in_background: false,
            onload_threads: 2,
            index_prefixes: false,
            eviction: Arc::new(LeastRecentlyUsed),
        }
    }
}

/// The size of a pool of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum KvSize {
    /// So many pages.
    Pages(u32),
    /// As many pages as fit into so many bytes, all layers together.
    Bytes(u64),
    /// As many pages as fit into so many percent of the memory that is free on the GPU where they lie. Refused in host
    /// memory.
    Percent(u32),
}

/// What becomes of new tokens that are cached already.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Overlap {
    /// The request is refused.
    #[default]
    Refuse,
    /// They are cut off, and the lease tells how many.
    Trim,
}

/// What happens when the items of a request are not those that its cached history was computed from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Edited {
    /// It is not noticed: requests bring no items.
    #[default]
    Unnoticed,
    /// The request is refused.
    Refuse,
    /// What was computed from the edited part is dropped; what came before it stays.
    Invalidate,
}

/// When histories go to the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum Offload {
    /// When an owner is evicted.
    #[default]
    OnEviction,
    /// With every commit, in the background.
    AtCommit,
    /// Only when the caller offloads them; what is evicted before is lost.
    ByHand,
}
