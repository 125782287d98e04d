//! `pagoda_kv_cache`: what a model remembers of each owner, in pages of a pool.

use std::sync::Arc;

use super::args::{self, Versioned};
use super::error::{pagoda_error, pagoda_status};
use super::handle::{Kind, Object, Table};
use super::kv_options::{about_options, pagoda_kv_options, read_options};
use super::tensor::pagoda_tensor;
use super::{boundary, freeing};
use crate::error::Result;
use crate::kv::{KvCache, KvStats, Owner, Owners, Tier, Tiers};

/// Where the history of an owner is.
pub type pagoda_tier = i32;

/// Not cached.
pub const PAGODA_TIER_NONE: pagoda_tier = 0;
/// In the pool.
pub const PAGODA_TIER_RESIDENT: pagoda_tier = 1;
/// In the store, or being loaded from there into the pool.
pub const PAGODA_TIER_STORE: pagoda_tier = 2;

/// A set of tiers: a sum of PAGODA_TIERS_... numbers.
pub type pagoda_tiers = i32;

/// The pool.
pub const PAGODA_TIERS_RESIDENT: pagoda_tiers = 1;
/// The store.
pub const PAGODA_TIERS_STORE: pagoda_tiers = 2;
/// Both.
pub const PAGODA_TIERS_ALL: pagoda_tiers = 3;

/// A cache of keys and values: the history of each owner as pages in a pool. An owner is a number that the caller
/// chooses: a user of a ranking model, a conversation of a language model, or a prompt that conversations share. When
/// the pool is full, the least recently used owners are evicted, to a store if there is one. Another order of eviction
/// is possible in Rust only, where it is a trait. Any number of threads may use a handle at the same time.
pub struct pagoda_kv_cache {
    _private: [u8; 0],
}

/// The state of a cache, and counters since it was opened. Start from PAGODA_KV_STATS_INIT, which sets `struct_size`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_kv_stats {
    /// The size of this struct.
    pub struct_size: u32,
    /// Pages of the pool.
    pub pages: u64,
    /// Free pages.
    pub free_pages: u64,
    /// Pages that more than one owner has, by pagoda_kv_cache_fork.
    pub shared_pages: u64,
    /// Owners in the pool.
    pub resident_owners: u64,
    /// Tokens of those owners.
    pub resident_tokens: u64,
    /// Cache hits: tokens of prepared histories that were in the pool.
    pub tokens_from_pool: u64,
    /// Tokens of prepared histories that were loaded from the store.
    pub tokens_from_store: u64,
    /// Tokens that were new.
    pub tokens_new: u64,
    /// Owners that were evicted from the pool.
    pub evicted_owners: u64,
    /// Owners whose write to the store failed, at an eviction or a commit.
    pub failed_offloads: u64,
    /// Histories that could not be read from the store.
    pub failed_onloads: u64,
}

// SAFETY: numbers in C's layout, the size first.
unsafe impl Versioned for pagoda_kv_stats {
    const FIRST_SIZE: usize = 96;
}

impl Object for KvCache {
    type C = pagoda_kv_cache;
    const KIND: Kind = Kind::KvCache;

    fn table() -> &'static Table<Self> {
        static TABLE: Table<KvCache> = Table::new();
        &TABLE
    }
}

/// Opens a cache. `options` must not be NULL: it has the shape of the keys and values.
///
/// Ownership: the caller frees the cache. Threads: any. Errors: INVALID_ARGUMENT; INVALID_HANDLE for `options.store`;
/// CAPACITY if there is not enough memory for the pool; UNSUPPORTED if the GPU `options.device_id` does not exist; BUSY
/// if another cache of the same model version and shape uses the store.
///
/// # Safety
/// `options` is of the size that it says and the text in it a C string; `cache` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_kv_cache_open(
    options: *const pagoda_kv_options,
    cache: *mut *mut pagoda_kv_cache,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_kv_cache_open", error, || {
            let out = args::out(cache, "cache")?;
            let (options, store) = read_options(options)?;
            let opened = KvCache::open(&options, store).map_err(about_options)?;
            out.write(Arc::new(opened).insert()?);
            Ok(())
        })
    }
}

/// Gets the pool of a layer as a tensor, [pages, 2, page_size, heads, head_size]. Bind it to an input and to the
/// matching output of the model. The pool is the same for every lease. Only the model may read and write its memory.
///
/// Ownership: the caller frees the tensor; the memory is valid until all these tensors and the cache are freed.
/// Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL or a layer out of range.
///
/// # Safety
/// `pool` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_kv_cache_pool(
    cache: *const pagoda_kv_cache,
    layer: i32,
    pool: *mut *mut pagoda_tensor,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_kv_cache_pool", error, || {
            let (cache, out) = (KvCache::get(cache, "cache")?, args::out(pool, "pool")?);
            let pool = Arc::clone(cache.pool(args::count(layer, "layer")?)?);
            out.write(pool.insert()?);
            Ok(())
        })
    }
}

/// Gets for each owner the first position of the cached history, its number of tokens, and its tier. Each of `starts`,
/// `lengths` and `tiers` is NULL or has room for `owner_count` elements. Other threads may change the cache before the
/// caller reads the result.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT.
///
/// # Safety
/// `owners` has `owner_count` elements, and the other lists as many or NULL; they and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_kv_cache_lookup(
    cache: *const pagoda_kv_cache,
    owners: *const u64,
    owner_count: usize,
    starts: *mut i64,
    lengths: *mut i64,
    tiers: *mut pagoda_tier,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_kv_cache_lookup", error, || {
            let (cache, owners) = (KvCache::get(cache, "cache")?, args::owners(owners, owner_count)?);
            let mut starts = args::out_list(starts, owner_count, "starts")?;
            let mut lengths = args::out_list(lengths, owner_count, "lengths")?;
            let mut tiers = args::out_list(tiers, owner_count, "tiers")?;
            for (index, cached) in cache.lookup(owners).into_iter().enumerate() {
                starts.as_mut().map(|starts| starts[index].write(cached.start as i64));
                lengths.as_mut().map(|lengths| lengths[index].write(cached.length.into()));
                tiers.as_mut().map(|tiers| tiers[index].write(tier(cached.tier)));
            }
            Ok(())
        })
    }
}

/// Lets the owner `to` begin with the first `tokens` tokens of the owner `from`, as many as it has: a prompt that many
/// conversations begin with, or the beams of a search. Only whole pages are shared: `shared` receives the number of
/// tokens, 0 if there is no whole page. `to` must have no history; what it appends goes to pages of its own. If `from`
/// is in the store, it is loaded first.
///
/// A shared page takes room once. It is free when its last owner has left. In a store each owner has its own copy.
/// Until a lease holds it, `to` can be evicted like any owner.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a negative
/// number of tokens, for a NULL, and about "to" if it has a history or is `from`; CAPACITY if the pool has no room to
/// load `from`; BUSY if `from` could not be read or is evicted at the same time; IO.
///
/// # Safety
/// `shared` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_kv_cache_fork(
    cache: *const pagoda_kv_cache,
    from: u64,
    to: u64,
    tokens: i32,
    shared: *mut i32,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_kv_cache_fork", error, || {
            let (cache, out) = (KvCache::get(cache, "cache")?, args::out(shared, "shared")?);
            let tokens = args::count(tokens, "tokens")?;
            // No more than were asked for.
            out.write(cache.fork(Owner(from), Owner(to), tokens)?.cast_signed());
            Ok(())
        })
    }
}

/// Writes histories to the store, and waits until they are durable. `owners` NULL with `owner_count` 0 means all owners
/// in the pool; an empty list that is not NULL means none. `offloaded` receives the number of owners that had tokens to
/// write.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; UNSUPPORTED
/// without a store; IO.
///
/// # Safety
/// `owners` has `owner_count` elements; `offloaded` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_kv_cache_offload(
    cache: *const pagoda_kv_cache,
    owners: *const u64,
    owner_count: usize,
    offloaded: *mut usize,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_kv_cache_offload", error, || {
            let (cache, out) = (KvCache::get(cache, "cache")?, args::out(offloaded, "offloaded")?);
            out.write(cache.offload(these_or_all(owners, owner_count)?)?);
            Ok(())
        })
    }
}

/// Removes histories from tiers. Histories that are removed only from the pool are written to the store first, unless
/// offload is PAGODA_OFFLOAD_BY_HAND. Histories that are removed from the store are lost when this returns. `owners`
/// NULL with `owner_count` 0 means all owners that no lease holds; an empty list that is not NULL means none. `evicted`
/// receives the number of owners that had something in these tiers.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; BUSY if a lease
/// holds an owner of the list; IO.
///
/// # Safety
/// `owners` has `owner_count` elements; `evicted` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_kv_cache_evict(
    cache: *const pagoda_kv_cache,
    owners: *const u64,
    owner_count: usize,
    tiers: pagoda_tiers,
    evicted: *mut usize,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_kv_cache_evict", error, || {
            let (cache, out) = (KvCache::get(cache, "cache")?, args::out(evicted, "evicted")?);
            let (owners, tiers) = (these_or_all(owners, owner_count)?, read_tiers(tiers)?);
            out.write(cache.evict(owners, tiers)?);
            Ok(())
        })
    }
}

/// Starts to load histories from the store into the pool, and returns at once, so that the next request of these owners
/// need not wait. Stops when the pool is full. `started` receives the number of histories that are being loaded.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; IO.
///
/// # Safety
/// `owners` has `owner_count` elements; `started` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_kv_cache_prefetch(
    cache: *const pagoda_kv_cache,
    owners: *const u64,
    owner_count: usize,
    started: *mut usize,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_kv_cache_prefetch", error, || {
            let (cache, out) = (KvCache::get(cache, "cache")?, args::out(started, "started")?);
            out.write(cache.prefetch(args::owners(owners, owner_count)?)?);
            Ok(())
        })
    }
}

/// Waits until all writes to the store so far are durable. Without a store it returns at once.
///
/// Ownership: the caller keeps the cache. Threads: any. Errors: INVALID_HANDLE; IO if a write failed since the last
/// flush.
///
/// # Safety
/// `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_kv_cache_flush(
    cache: *const pagoda_kv_cache,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe { boundary("pagoda_kv_cache_flush", error, || KvCache::get(cache, "cache")?.flush()) }
}

/// Gets the state and the counters of a cache.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL or an
/// invalid `struct_size`.
///
/// # Safety
/// `stats` may be written to as far as its struct_size says, and `error`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_kv_cache_get_stats(
    cache: *const pagoda_kv_cache,
    stats: *mut pagoda_kv_stats,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_kv_cache_get_stats", error, || {
            let (cache, out) = (KvCache::get(cache, "cache")?, args::out_struct(stats, "stats")?);
            out.write(&stats_of(&cache.stats()));
            Ok(())
        })
    }
}

/// Frees a cache. NULL is allowed. Leases stay valid. If there is a store, the pool is written to it, and this waits
/// for that, unless offload is PAGODA_OFFLOAD_BY_HAND.
///
/// Ownership: takes the cache. Threads: any. Errors: INVALID_HANDLE, which is also logged.
#[unsafe(no_mangle)]
pub extern "C" fn pagoda_kv_cache_free(cache: *mut pagoda_kv_cache) -> pagoda_status {
    freeing("pagoda_kv_cache_free", || KvCache::remove(cache, "cache"))
}

pub(super) fn stats_of(stats: &KvStats) -> pagoda_kv_stats {
    pagoda_kv_stats {
        struct_size: size_of::<pagoda_kv_stats>() as u32,
        pages: stats.pages,
        free_pages: stats.free_pages,
        shared_pages: stats.shared_pages,
        resident_owners: stats.resident_owners,
        resident_tokens: stats.resident_tokens,
        tokens_from_pool: stats.tokens_from_pool,
        tokens_from_store: stats.tokens_from_store,
        tokens_new: stats.tokens_new,
        evicted_owners: stats.evicted_owners,
        failed_offloads: stats.failed_offloads,
        failed_onloads: stats.failed_onloads,
    }
}

/// # Safety
/// `owners` is NULL or has `count` elements.
unsafe fn these_or_all<'a>(owners: *const u64, count: usize) -> Result<Owners<'a>> {
    if owners.is_null() && count == 0 {
        return Ok(Owners::All);
    }
    // SAFETY: by contract.
    unsafe { args::owners(owners, count) }.map(Owners::These)
}

fn read_tiers(tiers: pagoda_tiers) -> Result<Tiers> {
    match tiers {
        PAGODA_TIERS_RESIDENT => Ok(Tiers::RESIDENT),
        PAGODA_TIERS_STORE => Ok(Tiers::STORE),
        PAGODA_TIERS_ALL => Ok(Tiers::ALL),
        other => Err(args::unknown("tiers", other, "PAGODA_TIERS_...")),
    }
}

fn tier(tier: Tier) -> pagoda_tier {
    match tier {
        Tier::None => PAGODA_TIER_NONE,
        Tier::Resident => PAGODA_TIER_RESIDENT,
        Tier::Store => PAGODA_TIER_STORE,
    }
}
