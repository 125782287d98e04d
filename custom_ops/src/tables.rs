//! Where the rows of embedding tables come from: the library that registers the operators says how tables are opened, the
//! session which.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use pagoda_kernels::cuda::{CUdeviceptr, CUstream, Gpu, Slots};

/// The session's configuration entry that names its tables.
pub const ENTRY: &CStr = c"ai.pagoda.tables";

/// Tables by their names. Any number of threads call at the same time.
pub trait Tables: Send + Sync {
    /// A table, or why there is none of that name.
    fn table(&self, name: &str) -> Result<Arc<dyn TableRows>, String>;
}

/// The rows of a table. Any number of threads call at the same time.
pub trait TableRows: Send + Sync {
    /// How many numbers a row has.
    fn dim(&self) -> usize;

    /// Looks up keys, among which may be duplicates: `numbers`, which has room for a row of each, gets the row or the
    /// table's default, `found` whether it was there.
    fn lookup(&self, keys: &[i64], numbers: &mut [f32], found: &mut [bool]) -> Result<(), String>;

    /// The rows that are kept on a GPU, for nodes of the CUDA provider. `None`: none are; then their keys are read back, and
    /// looked up here.
    fn on_device(&self, _gpu: &'static Gpu) -> Result<Option<Arc<dyn DeviceRows>>, String> {
        Ok(None)
    }
}

/// The rows of a table that are kept on a GPU. Any number of threads call at the same time.
pub trait DeviceRows: Send + Sync {
    /// Looks keys up and combines their rows, on a stream.
    ///
    /// # Safety
    /// Every address of the call is one of the rows' device, of memory as long as the call says and alive until the stream
    /// has done this; nothing else writes it meanwhile, or touches what is written. The stream is not being captured.
    unsafe fn bag(&self, call: &DeviceBag, stream: CUstream) -> Result<(), String>;
}

/// A lookup by the addresses of its tensors.
#[derive(Clone, Copy, Debug)]
pub struct DeviceBag {
    /// `[count]` of i64, among which may be duplicates.
    pub keys: CUdeviceptr,
    /// How many keys.
    pub count: usize,
    /// Which keys make a slot, and how they are combined; without it there is a slot for each key.
    pub slots: Option<Slots>,
    /// `[slots, dim]` of f32, written.
    pub vectors: CUdeviceptr,
    /// `[count]` of bool, written: which keys were found.
    pub hit: Option<CUdeviceptr>,
}

/// Opens the tables that a session's configuration entry `ai.pagoda.tables` names.
pub type OpenTables = fn(&str) -> Result<Arc<dyn Tables>, String>;

/// Says how tables are opened from now on.
pub fn set_opener(open: OpenTables) {
    *lock(&OPENER) = Some(open);
}

static OPENER: Mutex<Option<OpenTables>> = Mutex::new(None);

/// Tables that are open already, by the entry that names them.
static BOUND: Mutex<Vec<(String, Arc<dyn Tables>)>> = Mutex::new(Vec::new());

/// Tables that sessions can name as long as this lives; sessions that are made meanwhile keep them.
pub struct Bound(String);

impl Bound {
    /// Gives tables that are open an entry of their own.
    pub fn new(tables: Arc<dyn Tables>) -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        // Not a path that anyone has.
        let entry = format!("\u{1}pagoda {}", COUNT.fetch_add(1, Ordering::Relaxed));
        lock(&BOUND).push((entry.clone(), tables));
        Self(entry)
    }

    /// What the session's configuration entry is to say.
    pub fn entry(&self) -> &str {
        &self.0
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        lock(&BOUND).retain(|(entry, _)| *entry != self.0);
    }
}

/// Tables by the entry that names them, as long as someone has them.
static OPENED: Mutex<BTreeMap<String, Arc<Place>>> = Mutex::new(BTreeMap::new());

/// Locked while the tables are opened, which may take long: whoever wants the same waits, others do not.
type Place = Mutex<Option<Weak<dyn Tables>>>;

/// The tables that `entry` names: opened, or those that another node or session has already.
pub(crate) fn open(entry: &str) -> Result<Arc<dyn Tables>, String> {
    if let Some((_, tables)) = lock(&BOUND).iter().find(|(bound, _)| bound == entry) {
        return Ok(Arc::clone(tables));
    }
    let open = (*lock(&OPENER)).ok_or("this build of the operators has no way to open tables: run in libpagoda")?;
    let place = {
        let mut opened = lock(&OPENED);
        // Those that no one has or waits for any more.
        opened.retain(|_, place| Arc::strong_count(place) > 1 || lock(place).as_ref().is_some_and(is_live));
        Arc::clone(opened.entry(entry.to_owned()).or_default())
    };
    let mut known = lock(&place);
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

/// An opener that panicked has left nothing half done here.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// One test, for the opener is the process's.
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

        // A failure is not kept, nor is a panic, nor are tables that no one has any more.
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

        // What is open already is not opened again, and not found when it is gone.
        let bound = Bound::new(Arc::clone(&other));
        assert!(Arc::ptr_eq(&open(bound.entry()).unwrap(), &other));
        assert_eq!(calls(), 0);
        drop(bound);
        assert!(lock(&OPENED).keys().eq(["a", "b"]));
    }
}
