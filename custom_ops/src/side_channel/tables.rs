//! The source of embedding rows. The library that registers the operators sets the function that opens tables
//! ([`set_opener`]); the session's configuration entry [`ENTRY`] names the tables to open.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use pagoda_kernels::cuda::{CUdeviceptr, CUstream, Gpu, Slots};
use parking_lot::Mutex;

/// The key of the session configuration entry that names the tables.
pub const ENTRY: &CStr = c"ai.pagoda.tables";

/// A set of named tables. Any number of threads call it at the same time.
pub trait Tables: Send + Sync {
    /// The table of that name, or the reason why it is not available.
    fn table(&self, name: &str) -> Result<Arc<dyn TableRows>, String>;
}

/// The rows of one table. Any number of threads call it at the same time.
pub trait TableRows: Send + Sync {
    /// The number of elements of a row.
    fn dim(&self) -> usize;

    /// Looks up keys, which may contain duplicates. Writes for each key the row, or the table's default row, to `numbers`, and
    /// to `found` whether the key is present. `numbers` has `keys.len() * dim` elements, `found` has `keys.len()`.
    fn lookup(&self, keys: &[i64], numbers: &mut [f32], found: &mut [bool]) -> Result<(), String>;

    /// The rows that the table keeps in the memory of `gpu`, for nodes of the CUDA provider. `None` if it keeps none: the node
    /// then reads the keys back and calls [`lookup`](Self::lookup).
    fn on_device(&self, _gpu: &'static Gpu) -> Result<Option<Arc<dyn DeviceRows>>, String> {
        Ok(None)
    }
}

/// The rows of one table in GPU memory. Any number of threads call it at the same time.
pub trait DeviceRows: Send + Sync {
    /// Enqueues the lookup of keys and the combination of their rows on a stream.
    ///
    /// # Safety
    /// Every address of the call is on the device of the rows, points to memory of the size that the call states, and stays
    /// valid until the stream has run the call. Until then nothing else writes the inputs or uses the outputs. The stream is not
    /// being captured.
    unsafe fn bag(&self, call: &DeviceBag, stream: CUstream) -> Result<(), String>;
}

/// A lookup in GPU memory, by the device addresses of its tensors.
#[derive(Clone, Copy, Debug)]
pub struct DeviceBag {
    /// `[count]` of i64. May contain duplicates.
    pub keys: CUdeviceptr,
    /// The number of keys.
    pub count: usize,
    /// The keys of each slot, and how their rows are combined. `None`: one slot for each key.
    pub slots: Option<Slots>,
    /// Output: `[slots, dim]` of f32.
    pub vectors: CUdeviceptr,
    /// Output: `[count]` of bool, whether each key was found.
    pub hit: Option<CUdeviceptr>,
}

/// Opens the tables that the value of the session configuration entry [`ENTRY`] names.
pub type OpenTables = fn(&str) -> Result<Arc<dyn Tables>, String>;

/// Sets the function that opens tables from now on.
pub fn set_opener(open: OpenTables) {
    *OPENER.lock() = Some(open);
}

static OPENER: Mutex<Option<OpenTables>> = Mutex::new(None);

/// Open tables that a [`Bound`] lends to sessions, by entry.
static BOUND: Mutex<Vec<(String, Arc<dyn Tables>)>> = Mutex::new(Vec::new());

/// The first character of the entry of a [`Bound`]: no path starts with it.
const BOUND_PREFIX: char = '\u{1}';

/// Open tables under an entry of their own. New sessions can name them while this lives; sessions keep the tables they opened.
pub struct Bound(String);

impl Bound {
    /// Binds open tables to a new entry.
    pub fn new(tables: Arc<dyn Tables>) -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let entry = format!("{BOUND_PREFIX}pagoda {}", COUNT.fetch_add(1, Ordering::Relaxed));
        BOUND.lock().push((entry.clone(), tables));
        Self(entry)
    }

    /// The value for the session configuration entry.
    pub fn entry(&self) -> &str {
        &self.0
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        BOUND.lock().retain(|(entry, _)| *entry != self.0);
    }
}

/// Whether `entry` is that of a [`Bound`], and not a path of the user's.
pub(crate) fn is_bound(entry: &str) -> bool {
    entry.starts_with(BOUND_PREFIX)
}

/// Tables that the opener opened, by entry, while a node uses them.
static OPENED: Mutex<BTreeMap<String, Arc<OpenedTables>>> = Mutex::new(BTreeMap::new());

/// Locked while the tables are opened, which may take long: only openers of the same entry wait for it.
type OpenedTables = Mutex<Option<Weak<dyn Tables>>>;

/// The tables that `entry` names. Nodes and sessions with the same entry share them.
pub(crate) fn open(entry: &str) -> Result<Arc<dyn Tables>, String> {
    if let Some((_, tables)) = BOUND.lock().iter().find(|(bound, _)| bound == entry) {
        return Ok(Arc::clone(tables));
    }
    let open = (*OPENER.lock()).ok_or("this build of the operators has no way to open tables: run in libpagoda")?;
    let slot = {
        let mut opened = OPENED.lock();
        // Drop entries whose tables are closed and that no thread is opening.
        opened.retain(|_, slot| Arc::strong_count(slot) > 1 || slot.lock().as_ref().is_some_and(is_live));
        Arc::clone(opened.entry(entry.to_owned()).or_default())
    };
    let mut known = slot.lock();
    if let Some(tables) = known.as_ref().and_then(Weak::upgrade) {
        return Ok(tables);
    }
    let tables = open(entry)?;
    *known = Some(Arc::downgrade(&tables));
    Ok(tables)
}

fn is_live(tables: &Weak<dyn Tables>) -> bool {
    tables.strong_count() > 0
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    struct Nothing;

    impl Tables for Nothing {
        fn table(&self, name: &str) -> Result<Arc<dyn TableRows>, String> {
            Err(format!("{name}: no such table"))
        }
    }

    /// A single test, because the opener is global to the process.
    #[test]
    fn tables_are_opened_once_for_all_that_name_them() {
        static CALLS: AtomicUsize = AtomicUsize::new(0);
        assert!(open("a").err().unwrap().contains("no way to open"));
        set_opener(|entry| {
            CALLS.fetch_add(1, Ordering::Relaxed);
            match entry {
                "panic" => panic!("asked for"),
                "bad" => Err("bad".to_owned()),
                _ => Ok(Arc::new(Nothing)),
            }
        });
        let calls = || CALLS.swap(0, Ordering::Relaxed);

        let together = std::thread::scope(|scope| {
            let opening: Vec<_> = (0..8).map(|_| scope.spawn(|| open("a").unwrap())).collect();
            opening.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        assert!(together.iter().all(|tables| Arc::ptr_eq(tables, &together[0])));
        assert_eq!(calls(), 1);
        let other = open("b").unwrap();
        assert!(!Arc::ptr_eq(&other, &together[0]));
        assert_eq!(calls(), 1);

        // Failures, panics and closed tables are not cached.
        assert_eq!((open("bad").err(), open("bad").err()), (Some("bad".to_owned()), Some("bad".to_owned())));
        assert_eq!(calls(), 2);
        for _ in 0..2 {
            assert!(std::panic::catch_unwind(|| open("panic").is_ok()).is_err());
        }
        assert_eq!(calls(), 2);
        let gone = Arc::downgrade(&together[0]);
        drop(together);
        assert!(gone.upgrade().is_none());
        let _again = open("a").unwrap();
        assert_eq!(calls(), 1);

        // Bound tables are not opened again, and are not found once the binding is dropped.
        let bound = Bound::new(Arc::clone(&other));
        assert!(Arc::ptr_eq(&open(bound.entry()).unwrap(), &other));
        assert_eq!(calls(), 0);
        drop(bound);
        assert!(OPENED.lock().keys().eq(["a", "b"]));
    }
}
