//! `pagoda_store`: histories on disk.

use std::ffi::c_char;
use std::sync::Arc;

use super::args::{self, Versioned};
use super::error::{pagoda_error, pagoda_status};
use super::handle::{Kind, Object, Table};
use super::{boundary, freeing};
use crate::error::{Error, Result};
use crate::store::{DiskStore, Durability, Store, StoreOptions};

/// When a write to a store counts as done.
pub type pagoda_durability = i32;

/// When the disk has it: it survives a loss of power.
pub const PAGODA_DURABILITY_POWER: pagoda_durability = 0;
/// When the operating system has it: it survives the end of the process, but not a loss of power.
pub const PAGODA_DURABILITY_PROCESS: pagoda_durability = 1;
/// As soon as it is queued: what is queued is lost with the process.
pub const PAGODA_DURABILITY_NONE: pagoda_durability = 2;

/// A store: histories in the files of a folder, which survive restarts and crashes. What is damaged there counts as not
/// stored; it never comes back wrong. One process at a time has a store open; in it, any number of caches and threads may
/// use one handle at the same time.
pub struct pagoda_store {
    _private: [u8; 0],
}

/// How to open a store. Start from PAGODA_STORE_OPTIONS_INIT, which sets `struct_size` and the defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_store_options {
    /// The size of this struct.
    pub struct_size: u32,
    /// When a write counts as done; default PAGODA_DURABILITY_POWER.
    pub durability: pagoda_durability,
    /// How many bytes the files may take before the users that were not used for longest leave; default 0 = no limit.
    /// While files are compacted they may take some more.
    pub max_bytes: u64,
    /// How long a file gets before the next one is begun; default 0 = 256 MiB, or an eighth of `max_bytes` if that is less.
    pub segment_bytes: u64,
    /// How many bytes may wait to be written before a write has to wait or is refused; default 0 = 256 MiB.
    pub queue_bytes: u64,
}

/// What a store has now, and what happened since it was opened. Start from PAGODA_STORE_INFO_INIT, which sets
/// `struct_size`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_store_info {
    /// The size of this struct.
    pub struct_size: u32,
    /// Users stored, of all models.
    pub users: u64,
    /// Pieces of their histories.
    pub records: u64,
    /// Bytes of the files that are in use.
    pub live_bytes: u64,
    /// Bytes of all files.
    pub file_bytes: u64,
    /// Files.
    pub segments: u64,
    /// Bytes that wait to be written.
    pub queued_bytes: u64,
    /// Records written, removals too.
    pub writes: u64,
    /// Bytes written, those of compactions too.
    pub written_bytes: u64,
    /// Times the disk failed to write.
    pub write_errors: u64,
    /// Records whose data was damaged.
    pub corrupt_records: u64,
    /// Unfinished writes found when the store was opened.
    pub torn_tails: u64,
    /// Places in files where records should have been and were not.
    pub damaged_regions: u64,
    /// Users who left because damage made it uncertain what is current.
    pub dropped_users: u64,
    /// 1 if the index had to be made anew when the store was opened.
    pub index_rebuilds: u64,
    /// Times the index failed; it is not used again until the store is opened anew.
    pub index_errors: u64,
    /// Users who left to make room.
    pub evicted_users: u64,
    /// Files compacted.
    pub compacted_segments: u64,
}

// SAFETY: numbers in C's layout, the size first.
unsafe impl Versioned for pagoda_store_options {
    const FIRST_SIZE: usize = 32;
}

// SAFETY: as above.
unsafe impl Versioned for pagoda_store_info {
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

/// Opens the store in a folder, or makes one there if the folder is empty or missing. `options` may be NULL.
///
/// Ownership: the caller frees the store. Threads: any. Errors: BUSY if it is open already, here or in another process;
/// INVALID_ARGUMENT, also for a folder with other things in it; UNSUPPORTED for a store of a later version; IO.
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

/// Waits until everything that was handed to a store is as durable as it promises.
///
/// Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, IO if something could not be written since the
/// last flush.
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

/// Gives back the space of everything that was removed or replaced, and waits for that. A store does so by itself when
/// there is much of it.
///
/// Ownership: takes nothing over. Threads: any; others may use the store meanwhile. Errors: INVALID_HANDLE, IO.
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

/// What a store has now, and what happened since it was opened.
///
/// Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT for a NULL or a small
/// struct_size.
///
/// # Safety
/// `info` may be written to as far as its struct_size says, and `error`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_store_stats(
    store: *const pagoda_store,
    info: *mut pagoda_store_info,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_store_stats", error, || {
            let (store, out) = (DiskStore::get(store, "store")?, args::out_struct(info, "info")?);
            out.write(&info_of(&store));
            Ok(())
        })
    }
}

/// Frees a store. NULL is fine. Once no cache uses it any more, everything that is queued is written and the store is
/// closed.
///
/// Ownership: takes the store over. Threads: any. Errors: PAGODA_INVALID_HANDLE, and a line in the log.
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
        ..defaults
    })
}

/// What goes wrong while a store is opened is about its folder, unless it says otherwise.
fn about_path(error: Error) -> Error {
    if error.argument().is_none() { error.about("path") } else { error }
}

fn info_of(store: &DiskStore) -> pagoda_store_info {
    let stats = store.stats();
    pagoda_store_info {
        struct_size: size_of::<pagoda_store_info>() as u32,
        users: stats.users,
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
        dropped_users: stats.dropped_users,
        index_rebuilds: stats.index_rebuilds,
        index_errors: stats.index_errors,
        evicted_users: stats.evicted_users,
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
