//! `pagoda_kv_cache`: what a model remembers of each user, in pages of a pool.

use std::sync::Arc;

use super::args::{self, Versioned};
use super::error::{pagoda_error, pagoda_status};
use super::handle::{Kind, Object, Table};
use super::kv_options::{about_options, pagoda_kv_options, read_options};
use super::tensor::pagoda_tensor;
use super::{boundary, freeing};
use crate::error::Result;
use crate::kv::{KvCache, Owner, Owners, Tier, Tiers};

/// Where a user's history lies.
pub type pagoda_tier = i32;

/// Nowhere.
pub const PAGODA_TIER_NONE: pagoda_tier = 0;
/// In the pool.
pub const PAGODA_TIER_RESIDENT: pagoda_tier = 1;
/// In the store, or on its way from there to the pool.
pub const PAGODA_TIER_STORE: pagoda_tier = 2;

/// Which tiers: a sum of the PAGODA_TIERS_... numbers.
pub type pagoda_tiers = i32;

/// The pool.
pub const PAGODA_TIERS_RESIDENT: pagoda_tiers = 1;
/// The store.
pub const PAGODA_TIERS_STORE: pagoda_tiers = 2;
/// Both.
pub const PAGODA_TIERS_ALL: pagoda_tiers = 3;

/// A cache of keys and values: each user's history as pages in a pool, those of users not seen for long in a store. Any
/// number of threads may use one handle at the same time.
pub struct pagoda_kv_cache {
    _private: [u8; 0],
}

/// What a cache has, and what it did since it was opened. Start from PAGODA_KV_STATS_INIT, which sets `struct_size`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_kv_stats {
    /// The size of this struct.
    pub struct_size: u32,
    /// Pages of the pool.
    pub pages: u64,
    /// Those that no one has.
    pub free_pages: u64,
    /// Users in the pool.
    pub resident_users: u64,
    /// Their tokens.
    pub resident_tokens: u64,
    /// Tokens of prepared histories that were in the pool.
    pub tokens_from_pool: u64,
    /// Tokens of prepared histories that came from the store.
    pub tokens_from_store: u64,
    /// Tokens that were new.
    pub tokens_new: u64,
    /// Users that left the pool.
    pub evicted_users: u64,
    /// Users that left the pool, or were committed, and could not be handed to the store.
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

/// Opens a cache. `options` must not be NULL, for they have the shape of the keys and values.
///
/// Ownership: the caller frees the cache. Threads: any. Errors: INVALID_ARGUMENT, INVALID_HANDLE for `options.store`,
/// CAPACITY if there is no memory for the pool, UNSUPPORTED if there is no GPU `options.device`, BUSY if another cache of
/// this model version and shape uses the store.
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
            let opened = KvCache::open(&options, store).map_err(|error| about_options(&options, error))?;
            out.write(Arc::new(opened).insert()?);
            Ok(())
        })
    }
}

/// The pool of one layer, [pages, 2, page_size, heads, head_size]: an input and an output of the model, both bound to it.
/// The pool is the same for every lease; its memory is for the model alone to read and write.
///
/// Ownership: the caller frees the tensor; the memory lives until every such handle and the cache are freed. Threads:
/// any. Errors: INVALID_HANDLE, INVALID_ARGUMENT for a NULL or a layer that there is not.
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

/// Where each user's cached history begins, how many tokens it has, and where it lies. Each of `starts`, `lengths` and
/// `tiers` is NULL or has room for `user_count` elements. Changes nothing; by the time the answer is read, other threads
/// may have changed it.
///
/// Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT.
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

/// Writes histories to the store and waits until they are as durable as it promises. With `users` NULL and `user_count` 0
/// those of everyone in the pool; a list that is not NULL and empty means no one. `offloaded` gets how many users had
/// something that was not stored.
///
/// Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT, UNSUPPORTED without a store, IO.
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

/// Removes histories from tiers. Those that leave the pool alone go to the store first, unless that is done by hand; those
/// that leave the store are gone for good when this returns. With `users` NULL and `user_count` 0 those of everyone whom no
/// lease holds; a list that is not NULL and empty means no one. `evicted` gets how many users had something there.
///
/// Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT, BUSY if a lease holds a user of
/// the list, IO.
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

/// Begins to bring histories from the store into the pool and returns at once, so that a request that comes soon need not
/// wait for them. Stops where there is no more room. `started` gets how many histories are on their way.
///
/// Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT, IO.
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

/// Waits until everything that was handed to the store is as durable as it promises; without a store, not at all.
///
/// Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, IO if something could not be written since the
/// last flush.
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

/// What a cache has, and what it did since it was opened.
///
/// Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT for a NULL or a small
/// struct_size.
///
/// # Safety
/// `stats` may be written to as far as its struct_size says, and `error`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_kv_cache_stats(
    cache: *const pagoda_kv_cache,
    stats: *mut pagoda_kv_stats,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_kv_cache_stats", error, || {
            let (cache, out) = (KvCache::get(cache, "cache")?, args::out_struct(stats, "stats")?);
            let stats = cache.stats();
            out.write(&pagoda_kv_stats {
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
            });
            Ok(())
        })
    }
}

/// Frees a cache. NULL is fine. Leases that are out stay good. If there is a store, what is in the pool goes there, which is
/// waited for, unless offload is PAGODA_OFFLOAD_BY_HAND.
///
/// Ownership: takes the cache over. Threads: any. Errors: PAGODA_INVALID_HANDLE, and a line in the log.
#[unsafe(no_mangle)]
pub extern "C" fn pagoda_kv_cache_free(cache: *mut pagoda_kv_cache) -> pagoda_status {
    freeing("pagoda_kv_cache_free", || KvCache::remove(cache, "cache"))
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
