//! `pagoda_store`: histories on disk.

use std::ffi::c_char;
use std::sync::Arc;

use super::args::{self, Versioned};
use super::error::{pagoda_error, pagoda_status};
use super::handle::{Kind, Object, Table};
use super::{boundary, freeing};
use crate::error::{Error, Result};
use crate::store::{DiskStore, Durability, Store, StoreOptions};

/// When a write to a store is acknowledged.
pub type pagoda_durability = i32;

/// When it is on the disk: it survives a loss of power.
pub const PAGODA_DURABILITY_POWER: pagoda_durability = 0;
/// When the operating system has it: it survives a crash of the process, but not a loss of power.
pub const PAGODA_DURABILITY_PROCESS: pagoda_durability = 1;
/// When it is queued: queued writes are lost if the process crashes.
pub const PAGODA_DURABILITY_NONE: pagoda_durability = 2;

/// Histories of owners in the files of a folder. They survive restarts and crashes. A damaged record counts as missing;
/// it is never returned. One process at a time has a store open. In it, any number of caches and threads may use a
/// handle at the same time.
pub struct pagoda_store {
    _private: [u8; 0],
}

/// How to open a store. Start from PAGODA_STORE_OPTIONS_INIT, which sets `struct_size` and the defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_store_options {
    /// The size of this struct.
    pub struct_size: u32,
    /// When a write is acknowledged; default PAGODA_DURABILITY_POWER.
    pub durability: pagoda_durability,
    /// The maximum size of the files in bytes; default 0 = no limit. At the limit the least recently used owners are
    /// evicted. A compaction may exceed the limit for a while.
    pub max_bytes: u64,
    /// The maximum size of a segment file in bytes; default 0 = 256 MiB, or an eighth of `max_bytes` if that is less.
    pub segment_bytes: u64,
    /// The maximum number of bytes in the write queue; default 0 = 256 MiB. A write beyond it waits or is rejected.
    pub queue_bytes: u64,
    /// The maximum number of bytes of garbage, the removed and replaced records in the files, before segment files are
    /// compacted; default 0 = 64 MiB. Garbage of less than half of the files is never compacted by itself.
    pub garbage_bytes: u64,
}

/// The state of a store, and counters since it was opened. Start from PAGODA_STORE_STATS_INIT, which sets
/// `struct_size`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_store_stats {
    /// The size of this struct.
    pub struct_size: u32,
    /// Stored owners, of all model versions.
    pub owners: u64,
    /// Stored records; a history has one or more.
    pub records: u64,
    /// Bytes of the files that are in use.
    pub live_bytes: u64,
    /// Bytes of all files.
    pub file_bytes: u64,
    /// Segment files.
    pub segments: u64,
    /// Bytes in the write queue.
    pub queued_bytes: u64,
    /// Records written, removals included.
    pub writes: u64,
    /// Bytes written, compactions included.
    pub written_bytes: u64,
    /// Failed writes.
    pub write_errors: u64,
    /// Records with damaged data.
    pub corrupt_records: u64,
    /// Incomplete writes that were found when the store was opened.
    pub torn_tails: u64,
    /// Regions of files where records were expected and not found.
    pub damaged_regions: u64,
    /// Owners that were removed because damage left it uncertain which record is current.
    pub dropped_owners: u64,
    /// 1 if the index was rebuilt when the store was opened.
    pub index_rebuilds: u64,
    /// Failures of the index. After one the index is not used until the store is opened again.
    pub index_errors: u64,
    /// Owners that were evicted at the size limit.
    pub evicted_owners: u64,
    /// Compacted segment files.
    pub compacted_segments: u64,
}

// SAFETY: numbers in C's layout, the size first.
unsafe impl Versioned for pagoda_store_options {
    const FIRST_SIZE: usize = 40;
}

// SAFETY: as above.
unsafe impl Versioned for pagoda_store_stats {
    const FIRST_SIZE: usize = 144;
}

impl Object for DiskStore {
    type C = pagoda_store;
    const KIND: Kind = Kind::Store;

    fn table() -> &'static Table<Self> {
        static TABLE: Table<DiskStore> = Table::new();
        &TABLE
    }
}

/// Opens the store in a folder. If the folder is empty or missing, a new store is made. `options` may be NULL.
///
/// Ownership: the caller frees the store. Threads: any. Errors: BUSY if the store is open already, in this or another
/// process; INVALID_ARGUMENT, also for a folder with other files in it; UNSUPPORTED for a store of a later version; IO.
///
/// # Safety
/// `path` is a C string, `options` NULL or of the size that it says; `store` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_store_open(
    path: *const c_char,
    options: *const pagoda_store_options,
    store: *mut *mut pagoda_store,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_store_open", error, || {
            let out = args::out(store, "store")?;
            let opened = DiskStore::open(folder(path)?, &read_options(options)?).map_err(about_path)?;
            out.write(Arc::new(opened).insert()?);
            Ok(())
        })
    }
}

/// Waits until all writes so far are as durable as the options say.
///
/// Ownership: the caller keeps the store. Threads: any. Errors: INVALID_HANDLE; IO if a write failed since the last
/// flush.
///
/// # Safety
/// `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_store_flush(
    store: *const pagoda_store,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe { boundary("pagoda_store_flush", error, || DiskStore::get(store, "store")?.flush()) }
}

/// Frees the disk space of removed and replaced records, and waits for that. A store also does this by itself.
///
/// Ownership: the caller keeps the store. Threads: any; other threads may use the store meanwhile. Errors:
/// INVALID_HANDLE; IO.
///
/// # Safety
/// `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_store_compact(
    store: *const pagoda_store,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe { boundary("pagoda_store_compact", error, || DiskStore::get(store, "store")?.compact()) }
}

/// Gets the state and the counters of a store.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL or an
/// invalid `struct_size`.
///
/// # Safety
/// `stats` may be written to as far as its struct_size says, and `error`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_store_get_stats(
    store: *const pagoda_store,
    stats: *mut pagoda_store_stats,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_store_get_stats", error, || {
            let (store, out) = (DiskStore::get(store, "store")?, args::out_struct(stats, "stats")?);
            out.write(&stats_of(&store));
            Ok(())
        })
    }
}

/// Frees a store. NULL is allowed. When no cache uses the store any more, the write queue is written and the store is
/// closed.
///
/// Ownership: takes the store. Threads: any. Errors: INVALID_HANDLE, which is also logged.
#[unsafe(no_mangle)]
pub extern "C" fn pagoda_store_free(store: *mut pagoda_store) -> pagoda_status {
    freeing("pagoda_store_free", || DiskStore::remove(store, "store"))
}

/// # Safety
/// As for `pagoda_store_open`.
unsafe fn folder<'a>(path: *const c_char) -> Result<&'a str> {
    // SAFETY: by contract.
    match unsafe { args::text(path, "path")? } {
        "" => Err(Error::invalid("path", "an empty text, where a folder is needed")),
        path => Ok(path),
    }
}

/// # Safety
/// As for `pagoda_store_open`.
pub(super) unsafe fn read_options(options: *const pagoda_store_options) -> Result<StoreOptions> {
    let defaults = pagoda_store_options {
        struct_size: size_of::<pagoda_store_options>() as u32,
        durability: PAGODA_DURABILITY_POWER,
        max_bytes: 0,
        segment_bytes: 0,
        queue_bytes: 0,
        garbage_bytes: 0,
    };
    // SAFETY: by contract.
    let options = unsafe { args::options(options, defaults, "options")? };
    let or = |value: u64, default: u64| if value == 0 { default } else { value };
    let defaults = StoreOptions::default();
    Ok(StoreOptions {
        durability: match options.durability {
            PAGODA_DURABILITY_POWER => Durability::Power,
            PAGODA_DURABILITY_PROCESS => Durability::Process,
            PAGODA_DURABILITY_NONE => Durability::None,
            other => return Err(args::unknown("options.durability", other, "PAGODA_DURABILITY_...")),
        },
        max_bytes: options.max_bytes,
        segment_bytes: or(options.segment_bytes, defaults.segment_bytes),
        queue_bytes: or(options.queue_bytes, defaults.queue_bytes),
        garbage_bytes: or(options.garbage_bytes, defaults.garbage_bytes),
    })
}

/// What goes wrong while a store is opened is about its folder, unless it says otherwise.
fn about_path(error: Error) -> Error {
    if error.argument().is_none() { error.about("path") } else { error }
}

fn stats_of(store: &DiskStore) -> pagoda_store_stats {
    let stats = store.stats();
    pagoda_store_stats {
        struct_size: size_of::<pagoda_store_stats>() as u32,
        owners: stats.owners,
        records: stats.records,
        live_bytes: stats.live_bytes,
        file_bytes: stats.file_bytes,
        segments: stats.segments,
        queued_bytes: stats.queued_bytes,
        writes: stats.writes,
        written_bytes: stats.written_bytes,
        write_errors: stats.write_errors,
        corrupt_records: stats.corrupt_records,
        torn_tails: stats.torn_tails,
        damaged_regions: stats.damaged_regions,
        dropped_owners: stats.dropped_owners,
        index_rebuilds: stats.index_rebuilds,
        index_errors: stats.index_errors,
        evicted_owners: stats.evicted_owners,
        compacted_segments: stats.compacted_segments,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_is_the_default() {
        // SAFETY: NULL stands for the defaults.
        assert_eq!(unsafe { read_options(std::ptr::null()) }.unwrap(), StoreOptions::default());
    }
}
