//! `pagoda_kv_options`: what a cache of keys and values is for, and how it behaves.

use std::ffi::c_char;
use std::sync::Arc;

use super::args::{self, Versioned};
use super::handle::Object;
use super::store::pagoda_store;
use super::tensor::{PAGODA_TYPE_F32, element_type, pagoda_type};
use crate::error::{Error, Result};
use crate::kv::{Edited, KvOptions, Offload, Overlap, Pages, Place};
use crate::store::{DiskStore, Store};

/// What becomes of new tokens that are cached already.
pub type pagoda_overlap = i32;

/// The request is refused.
pub const PAGODA_OVERLAP_REFUSE: pagoda_overlap = 0;
/// They are cut off; pagoda_kv_lease_user tells how many.
pub const PAGODA_OVERLAP_TRIM: pagoda_overlap = 1;

/// What happens when the items of a request are not those that the cached history was computed from.
pub type pagoda_edited = i32;

/// No one looks: requests bring no items.
pub const PAGODA_EDITED_UNNOTICED: pagoda_edited = 0;
/// The request is refused.
pub const PAGODA_EDITED_REFUSE: pagoda_edited = 1;
/// What was computed from the edited part is dropped; what came before it stays.
pub const PAGODA_EDITED_INVALIDATE: pagoda_edited = 2;

/// When histories go to the store.
pub type pagoda_offload = i32;

/// When a user is evicted to make room.
pub const PAGODA_OFFLOAD_ON_EVICTION: pagoda_offload = 0;
/// With every commit, in the background.
pub const PAGODA_OFFLOAD_AT_COMMIT: pagoda_offload = 1;
/// Only when the caller says so; what is evicted before is lost.
pub const PAGODA_OFFLOAD_BY_HAND: pagoda_offload = 2;

/// What a cache is for, how large it is, and how it behaves. Start from PAGODA_KV_OPTIONS_INIT, which sets `struct_size`
/// and the defaults; layers, heads, head_size, and one of pages, bytes and percent have none.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_kv_options {
    /// The size of this struct.
    pub struct_size: u32,
    /// Layers of the model that keep keys and values.
    pub layers: i32,
    /// Heads of keys and values in each.
    pub heads: i32,
    /// The size of a head.
    pub head_size: i32,
    /// Tokens that a page holds, a multiple of 8; default 32.
    pub page_size: i32,
    /// The type of keys and values: PAGODA_TYPE_F32 (the default), _F16 or _BF16.
    pub r#type: pagoda_type,
    /// How many pages the pool has; 0 if `bytes` says it.
    pub pages: i32,
    /// The most tokens of a history that are kept; default 0 = all. Older ones leave page by page.
    pub max_history: i32,
    /// What becomes of new tokens that are cached already; default PAGODA_OVERLAP_REFUSE.
    pub overlap: pagoda_overlap,
    /// Whether requests bring the items of the history, and what happens when they are not those that are cached; default
    /// PAGODA_EDITED_UNNOTICED.
    pub edited: pagoda_edited,
    /// When histories go to the store; default PAGODA_OFFLOAD_ON_EVICTION.
    pub offload: pagoda_offload,
    /// 1: pagoda_kv_cache_prepare returns before everything has arrived from the store, and pagoda_kv_lease_wait waits
    /// for it; 0, the default: it waits itself.
    pub onload_in_background: i32,
    /// Threads that read the store; default 0 = 2.
    pub onload_threads: i32,
    /// With PAGODA_OFFLOAD_ON_EVICTION: of how many percent of the pool the pages are kept free or stored already, so that
    /// evicting those users takes no copy. A thread in the background stores the least recently used ones as the pool
    /// fills up. Default 12; 0: none are stored before they are evicted.
    pub ahead_percent: i32,
    /// How many bytes the pool may take, all layers together; 0 if `pages` says it.
    pub bytes: u64,
    /// The version of the model, UTF-8; NULL = "". Histories that another version has stored are never seen.
    pub model_version: *const c_char,
    /// Where histories go that the pool has no room for; NULL: nowhere. Several caches may share one. The cache keeps the
    /// store open, also when its handle is freed.
    pub store: *const pagoda_store,
    /// The GPU whose memory the pool is in; default -1: it is in host memory. pagoda_tensor_data refuses tensors on a
    /// GPU.
    pub device: i32,
    /// How many percent of the memory that is free on that GPU the pool may take; default 0: `pages` or `bytes` says
    /// it.
    pub percent: i32,
}

// SAFETY: numbers and pointers in C's layout, the size first.
unsafe impl Versioned for pagoda_kv_options {
    const FIRST_SIZE: usize = 80;
}

/// # Safety
/// As for `pagoda_kv_cache_open`.
pub(super) unsafe fn read_options(options: *const pagoda_kv_options) -> Result<(KvOptions, Option<Arc<dyn Store>>)> {
    if options.is_null() {
        return Err(Error::invalid("options", "NULL, where the shape of the keys and values is needed"));
    }
    let defaults = pagoda_kv_options {
        struct_size: size_of::<pagoda_kv_options>() as u32,
        layers: 0,
        heads: 0,
        head_size: 0,
        page_size: 32,
        r#type: PAGODA_TYPE_F32,
        pages: 0,
        max_history: 0,
        overlap: PAGODA_OVERLAP_REFUSE,
        edited: PAGODA_EDITED_UNNOTICED,
        offload: PAGODA_OFFLOAD_ON_EVICTION,
        onload_in_background: 0,
        onload_threads: 0,
        ahead_percent: KvOptions::default().ahead_percent as i32,
        bytes: 0,
        model_version: std::ptr::null(),
        store: std::ptr::null(),
        device: -1,
        percent: 0,
    };
    // SAFETY: by contract.
    let options = unsafe { args::options(options, defaults, "options")? };
    let model_version = match options.model_version.is_null() {
        true => "",
        // SAFETY: by contract.
        false => unsafe { args::text(options.model_version, "options.model_version")? },
    };
    let read = KvOptions {
        layers: args::count(options.layers, "options.layers")?,
        heads: args::count(options.heads, "options.heads")?,
        head_size: args::count(options.head_size, "options.head_size")?,
        page_size: args::count(options.page_size, "options.page_size")?,
        element: element_type(options.r#type).map_err(|error| args::within("options", error))?,
        pages: read_pages(&options)?,
        place: match options.device {
            -1 => Place::Host,
            device => Place::Cuda(args::count(device, "options.device")?),
        },
        model_version: model_version.into(),
        max_history: args::count(options.max_history, "options.max_history")?,
        overlap: match options.overlap {
            PAGODA_OVERLAP_REFUSE => Overlap::Refuse,
            PAGODA_OVERLAP_TRIM => Overlap::Trim,
            other => return Err(args::unknown("options.overlap", other, "PAGODA_OVERLAP_...")),
        },
        edited: match options.edited {
            PAGODA_EDITED_UNNOTICED => Edited::Unnoticed,
            PAGODA_EDITED_REFUSE => Edited::Refuse,
            PAGODA_EDITED_INVALIDATE => Edited::Invalidate,
            other => return Err(args::unknown("options.edited", other, "PAGODA_EDITED_...")),
        },
        offload: match options.offload {
            PAGODA_OFFLOAD_ON_EVICTION => Offload::OnEviction,
            PAGODA_OFFLOAD_AT_COMMIT => Offload::AtCommit,
            PAGODA_OFFLOAD_BY_HAND => Offload::ByHand,
            other => return Err(args::unknown("options.offload", other, "PAGODA_OFFLOAD_...")),
        },
        ahead_percent: args::count(options.ahead_percent, "options.ahead_percent")?,
        onload_in_background: args::flag(options.onload_in_background, "options.onload_in_background")?,
        onload_threads: match args::count(options.onload_threads, "options.onload_threads")? {
            0 => KvOptions::default().onload_threads,
            threads => threads,
        },
        ..KvOptions::default()
    };
    let store = match options.store.is_null() {
        true => None,
        false => Some(DiskStore::get(options.store, "options.store")? as Arc<dyn Store>),
    };
    Ok((read, store))
}

fn read_pages(options: &pagoda_kv_options) -> Result<Pages> {
    let percent = args::count(options.percent, "options.percent")?;
    match (args::count(options.pages, "options.pages")?, options.bytes) {
        (0, 0) if percent > 0 => Ok(Pages::Percent(percent)),
        (pages, bytes) if percent > 0 => {
            let message = format!("{percent}, where pages is {pages} and bytes {bytes}: set one, and the others to 0");
            Err(Error::invalid("options.percent", message))
        }
        (0, 0) => Err(Error::invalid("options.pages", "0, and bytes is 0 too: set one of them, the size of the pool")),
        (0, bytes) => Ok(Pages::Bytes(bytes)),
        (pages, 0) => Ok(Pages::Count(pages)),
        (pages, bytes) => {
            let message = format!("{bytes}, where pages already says {pages}: set one of them, and the other to 0");
            Err(Error::invalid("options.bytes", message))
        }
    }
}

/// What the cache says of its options, in the names of the header.
pub(super) fn about_options(options: &KvOptions, error: Error) -> Error {
    match (error.argument(), options.pages) {
        (Some("element"), _) => error.about("options.type"),
        (Some("place"), _) => error.about("options.device"),
        (Some("pages"), Pages::Bytes(_)) => error.about("options.bytes"),
        (Some("pages"), Pages::Percent(_)) => error.about("options.percent"),
        _ => args::within("options", error),
    }
}
