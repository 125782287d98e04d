//! `pagoda_kv_cache`: what a model remembers of each user, in pages of a pool.

use std::sync::Arc;

use super::args::{self, Versioned};
use super::error::{pagoda_error, pagoda_status};
use super::handle::{Kind, Object, Table};
use super::kv_options::{about_options, pagoda_kv_options, read_options};
use super::tensor::pagoda_tensor;
use super::{boundary, freeing};
use crate::error::Result;
use crate::kv::{KvCache, KvStats, Owner, Owners, Tier, Tiers};

/// Where the history of a user is.
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

/// A cache of keys and values: the history of each user as pages in a pool. Users that were not used for long are
/// evicted to a store. Any number of threads may use a handle at the same time.
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
    /// Users in the pool.
    pub resident_users: u64,
    /// Tokens of those users.
    pub resident_tokens: u64,
    /// Cache hits: tokens of prepared histories that were in the pool.
    pub tokens_from_pool: u64,
    /// Tokens of prepared histories that were loaded from the store.
    pub tokens_from_store: u64,
    /// Tokens that were new.
    pub tokens_new: u64,
    /// Users that were evicted from the pool.
    pub evicted_users: u64,
    /// Users whose write to the store failed, at an eviction or a commit.
    pub failed_offloads: u64,
    /// Histories that could not be read from the store.
    pub failed_onloads: u64,
}

// SAFETY: numbers in C's layout, the size first.
unsafe impl Versioned for pagoda_kv_stats {
    const FIRST_SIZE: usize = 88;
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

/// Gets for each user the first position of the cached history, its number of tokens, and its tier. Each of `starts`,
/// `lengths` and `tiers` is NULL or has room for `user_count` elements. Other threads may change the cache before the
/// caller reads the result.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT.
///
/// # Safety
/// `users` has `user_count` elements, and the other lists as many or NULL; they and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_kv_cache_lookup(
    cache: *const pagoda_kv_cache,
    users: *const u64,
    user_count: usize,
    starts: *mut i64,
    lengths: *mut i64,
    tiers: *mut pagoda_tier,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_kv_cache_lookup", error, || {
            let (cache, users) = (KvCache::get(cache, "cache")?, args::users(users, user_count)?);
            let mut starts = args::out_list(starts, user_count, "starts")?;
            let mut lengths = args::out_list(lengths, user_count, "lengths")?;
            let mut tiers = args::out_list(tiers, user_count, "tiers")?;
            for (index, cached) in cache.lookup(Owner::slice(users)).into_iter().enumerate() {
                starts.as_mut().map(|starts| starts[index].write(cached.start as i64));
                lengths.as_mut().map(|lengths| lengths[index].write(cached.tokens.into()));
                tiers.as_mut().map(|tiers| tiers[index].write(tier(cached.tier)));
            }
            Ok(())
        })
    }
}

/// Writes histories to the store, and waits until they are durable. `users` NULL with `user_count` 0 means all users in
/// the pool; an empty list that is not NULL means none. `offloaded` receives the number of users that had tokens to
/// write.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; UNSUPPORTED
/// without a store; IO.
///
/// # Safety
/// `users` has `user_count` elements; `offloaded` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_kv_cache_offload(
    cache: *const pagoda_kv_cache,
    users: *const u64,
    user_count: usize,
    offloaded: *mut usize,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_kv_cache_offload", error, || {
            let (cache, out) = (KvCache::get(cache, "cache")?, args::out(offloaded, "offloaded")?);
            out.write(cache.offload(these_or_all(users, user_count)?)?);
            Ok(())
        })
    }
}

/// Removes histories from tiers. Histories that are removed only from the pool are written to the store first, unless
/// offload is PAGODA_OFFLOAD_BY_HAND. Histories that are removed from the store are lost when this returns. `users`
/// NULL with `user_count` 0 means all users that no lease holds; an empty list that is not NULL means none. `evicted`
/// receives the number of users that had something in these tiers.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; BUSY if a lease
/// holds a user of the list; IO.
///
/// # Safety
/// `users` has `user_count` elements; `evicted` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_kv_cache_evict(
    cache: *const pagoda_kv_cache,
    users: *const u64,
    user_count: usize,
    tiers: pagoda_tiers,
    evicted: *mut usize,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_kv_cache_evict", error, || {
            let (cache, out) = (KvCache::get(cache, "cache")?, args::out(evicted, "evicted")?);
            let (users, tiers) = (these_or_all(users, user_count)?, read_tiers(tiers)?);
            out.write(cache.evict(users, tiers)?);
            Ok(())
        })
    }
}

/// Starts to load histories from the store into the pool, and returns at once, so that the next request of these users
/// need not wait. Stops when the pool is full. `started` receives the number of histories that are being loaded.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; IO.
///
/// # Safety
/// `users` has `user_count` elements; `started` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_kv_cache_prefetch(
    cache: *const pagoda_kv_cache,
    users: *const u64,
    user_count: usize,
    started: *mut usize,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_kv_cache_prefetch", error, || {
            let (cache, out) = (KvCache::get(cache, "cache")?, args::out(started, "started")?);
            out.write(cache.prefetch(Owner::slice(args::users(users, user_count)?))?);
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
        resident_users: stats.resident_users,
        resident_tokens: stats.resident_tokens,
        tokens_from_pool: stats.tokens_from_pool,
        tokens_from_store: stats.tokens_from_store,
        tokens_new: stats.tokens_new,
        evicted_users: stats.evicted_users,
        failed_offloads: stats.failed_offloads,
        failed_onloads: stats.failed_onloads,
    }
}

/// # Safety
/// `users` is NULL or has `count` elements.
unsafe fn these_or_all<'a>(users: *const u64, count: usize) -> Result<Owners<'a>> {
    if users.is_null() && count == 0 {
        return Ok(Owners::All);
    }
    // SAFETY: by contract.
    unsafe { args::users(users, count) }.map(|users| Owners::These(Owner::slice(users)))
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
