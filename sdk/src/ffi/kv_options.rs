//! `pagoda_kv_options`: what a cache of keys and values is for, and how it behaves.

use std::ffi::c_char;
use std::sync::Arc;

use super::args::{self, Versioned};
use super::handle::Object;
use super::store::pagoda_store;
use super::tensor::{PAGODA_ELEMENT_TYPE_F32, element_type, pagoda_element_type};
use crate::error::{Error, Result};
use crate::kv::{Edited, KvFormat, KvOptions, KvSize, Offload, Overlap};
use crate::store::{DiskStore, Store};

/// The unit of the size of a pool of keys and values.
pub type pagoda_kv_size_unit = i32;

/// No size is given; the size must be 0. An engine then uses 1 GiB. A cache that is opened by itself has no default.
pub const PAGODA_KV_SIZE_UNIT_DEFAULT: pagoda_kv_size_unit = 0;
/// Pages.
pub const PAGODA_KV_SIZE_UNIT_PAGES: pagoda_kv_size_unit = 1;
/// Bytes, all layers together: the pool has as many pages as fit.
pub const PAGODA_KV_SIZE_UNIT_BYTES: pagoda_kv_size_unit = 2;
/// Percent of the free memory of the GPU that the pool is on; 1 to 100. Not possible in host memory.
pub const PAGODA_KV_SIZE_UNIT_PERCENT: pagoda_kv_size_unit = 3;

/// How pages hold keys and values.
pub type pagoda_kv_format = i32;

/// As the model was exported.
pub const PAGODA_KV_FORMAT_DEFAULT: pagoda_kv_format = 0;
/// Numbers of the type that the model computes in.
pub const PAGODA_KV_FORMAT_NATIVE: pagoda_kv_format = 1;
/// 8 bits, with a scale and a low end for each head of each token.
pub const PAGODA_KV_FORMAT_INT8: pagoda_kv_format = 2;
/// 4 bits, with a scale and a low end for each head of each token.
pub const PAGODA_KV_FORMAT_INT4: pagoda_kv_format = 3;
/// Floating-point numbers of 8 bits (e4m3fn), with a scale for each head of each token.
pub const PAGODA_KV_FORMAT_FP8: pagoda_kv_format = 4;

/// What happens to new tokens that are cached already.
pub type pagoda_overlap = i32;

/// The request is rejected.
pub const PAGODA_OVERLAP_REFUSE: pagoda_overlap = 0;
/// They are trimmed; pagoda_kv_lease_owner returns how many.
pub const PAGODA_OVERLAP_TRIM: pagoda_overlap = 1;

/// What happens if the items of a request differ from those that the cached history was computed from.
pub type pagoda_edited = i32;

/// Items are not checked: requests have none.
pub const PAGODA_EDITED_UNNOTICED: pagoda_edited = 0;
/// The request is rejected.
pub const PAGODA_EDITED_REFUSE: pagoda_edited = 1;
/// The cached history is invalidated from the first edited item on. The part before it stays.
pub const PAGODA_EDITED_INVALIDATE: pagoda_edited = 2;

/// When histories are written to the store.
pub type pagoda_offload = i32;

/// When an owner is evicted from the pool.
pub const PAGODA_OFFLOAD_ON_EVICTION: pagoda_offload = 0;
/// With every commit, in the background.
pub const PAGODA_OFFLOAD_AT_COMMIT: pagoda_offload = 1;
/// Only by pagoda_kv_cache_offload; what is evicted without it is lost.
pub const PAGODA_OFFLOAD_BY_HAND: pagoda_offload = 2;

/// The shape, the size and the behaviour of a cache. Start from PAGODA_KV_OPTIONS_INIT, which sets `struct_size` and
/// the defaults. `layers`, `heads`, `head_size`, `size` and `size_unit` have no default.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_kv_options {
    /// The size of this struct.
    pub struct_size: u32,
    /// The number of layers that keep keys and values.
    pub layers: i32,
    /// The number of key and value heads in a layer.
    pub heads: i32,
    /// The number of elements in a head.
    pub head_size: i32,
    /// The number of tokens in a page, a multiple of 8; default 32.
    pub page_size: i32,
    /// The type of keys and values: PAGODA_ELEMENT_TYPE_F32 (the default), _F16 or _BF16.
    pub r#type: pagoda_element_type,
    /// The GPU whose memory holds the pool; default -1: host memory. pagoda_tensor_data rejects tensors on a GPU.
    pub device_id: i32,
    /// The unit of `size`; PAGODA_KV_SIZE_UNIT_PAGES, _BYTES or _PERCENT.
    pub size_unit: pagoda_kv_size_unit,
    /// The size of the pool, in `size_unit`; 1 or more.
    pub size: u64,
    /// The maximum number of tokens of a history that are kept; default 0: all. The oldest pages are removed first.
    pub max_history: i32,
    /// What happens to new tokens that are cached already; default PAGODA_OVERLAP_REFUSE.
    pub overlap: pagoda_overlap,
    /// Whether requests have the items of the history, and what happens if the cached ones differ; default
    /// PAGODA_EDITED_UNNOTICED.
    pub edited: pagoda_edited,
    /// When histories are written to the store; default PAGODA_OFFLOAD_ON_EVICTION.
    pub offload: pagoda_offload,
    /// 1: pagoda_kv_cache_prepare returns before the histories are loaded from the store, and pagoda_kv_lease_wait
    /// waits for them. 0, the default: pagoda_kv_cache_prepare waits.
    pub onload_in_background: i32,
    /// The number of threads that read the store; default 0 = 2.
    pub onload_threads: i32,
    /// With PAGODA_OFFLOAD_ON_EVICTION: the percentage of the pool that is kept free or stored ahead of eviction, so
    /// that an eviction needs no copy. A background thread stores the least recently used owners as the pool fills up.
    /// Default 12; 0: nothing is stored ahead.
    pub ahead_percent: i32,
    /// The version of the model, UTF-8; NULL = "". A history that was stored for another version is not used.
    pub model_version: *const c_char,
    /// The store for evicted histories; NULL = none. Several caches may share a store. The cache keeps the store open,
    /// even after its handle is freed.
    pub store: *const pagoda_store,
}

// SAFETY: numbers and pointers in C's layout, the size first.
unsafe impl Versioned for pagoda_kv_options {
    const FIRST_SIZE: usize = 88;
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
        r#type: PAGODA_ELEMENT_TYPE_F32,
        device_id: -1,
        size_unit: PAGODA_KV_SIZE_UNIT_DEFAULT,
        size: 0,
        max_history: 0,
        overlap: PAGODA_OVERLAP_REFUSE,
        edited: PAGODA_EDITED_UNNOTICED,
        offload: PAGODA_OFFLOAD_ON_EVICTION,
        onload_in_background: 0,
        onload_threads: 0,
        ahead_percent: KvOptions::default().ahead_percent as i32,
        model_version: std::ptr::null(),
        store: std::ptr::null(),
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
        element_type: element_type(options.r#type).map_err(|error| args::within("options", error))?,
        size: read_size(options.size_unit, options.size, "options.size")?.ok_or_else(|| {
            Error::invalid("options.size_unit", "PAGODA_KV_SIZE_UNIT_DEFAULT, where the size of the pool is needed")
        })?,
        device_id: match options.device_id {
            -1 => None,
            device => Some(args::count(device, "options.device_id")?),
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

/// A format of pages; `None`: as the model was exported.
pub(super) fn read_format(format: pagoda_kv_format, argument: &str) -> Result<Option<KvFormat>> {
    match format {
        PAGODA_KV_FORMAT_DEFAULT => Ok(None),
        PAGODA_KV_FORMAT_NATIVE => Ok(Some(KvFormat::Native)),
        PAGODA_KV_FORMAT_INT8 => Ok(Some(KvFormat::Int8)),
        PAGODA_KV_FORMAT_INT4 => Ok(Some(KvFormat::Int4)),
        PAGODA_KV_FORMAT_FP8 => Ok(Some(KvFormat::Fp8)),
        other => Err(args::unknown(argument, other, "PAGODA_KV_FORMAT_...")),
    }
}

/// The size of a pool; `None` if none was given. `argument` names the size; its unit is `argument` with `_unit`.
pub(super) fn read_size(unit: pagoda_kv_size_unit, size: u64, argument: &str) -> Result<Option<KvSize>> {
    match unit {
        PAGODA_KV_SIZE_UNIT_DEFAULT if size == 0 => Ok(None),
        PAGODA_KV_SIZE_UNIT_DEFAULT => {
            Err(Error::invalid(argument, format!("{size}, where {argument}_unit does not say of what")))
        }
        PAGODA_KV_SIZE_UNIT_PAGES => match i32::try_from(size) {
            Ok(pages) => Ok(Some(KvSize::Pages(pages.cast_unsigned()))),
            Err(_) => {
                Err(Error::invalid(argument, format!("{size} pages are more than the {} there can be", i32::MAX)))
            }
        },
        PAGODA_KV_SIZE_UNIT_BYTES => Ok(Some(KvSize::Bytes(size))),
        PAGODA_KV_SIZE_UNIT_PERCENT if (1..=100).contains(&size) => Ok(Some(KvSize::Percent(size as u32))),
        PAGODA_KV_SIZE_UNIT_PERCENT => {
            Err(Error::invalid(argument, format!("{size} percent is not between 1 and 100")))
        }
        other => Err(args::unknown(&format!("{argument}_unit"), other, "PAGODA_KV_SIZE_UNIT_...")),
    }
}

/// What the cache says of its options, in the names of the header.
pub(super) fn about_options(error: Error) -> Error {
    match error.argument() {
        Some("element_type") => error.about("options.type"),
        _ => args::within("options", error),
    }
}
