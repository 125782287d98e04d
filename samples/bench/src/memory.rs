//! Measures the memory of an object, and of a process.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicIsize, Ordering};

use pagoda::{Error, Result, Status};

struct Counting;

/// Counting is on only when needed: all threads share one counter, and would slow each other down in other benchmarks.
static COUNTS: AtomicBool = AtomicBool::new(false);
static TAKEN: AtomicIsize = AtomicIsize::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The result of a function, and the bytes that all threads allocated meanwhile and did not free.
pub fn taken_by<T>(run: impl FnOnce() -> T) -> (T, isize) {
    TAKEN.store(0, Ordering::Relaxed);
    COUNTS.store(true, Ordering::Relaxed);
    let result = run();
    COUNTS.store(false, Ordering::Relaxed);
    (result, TAKEN.load(Ordering::Relaxed))
}

/// The resident bytes of a process: its number, or `self`.
pub fn resident(process: &str) -> Result<u64> {
    let path = format!("/proc/{process}/status");
    let unknown = |why: String| Error::new(Status::Io, format!("{path}: {why}"));
    let status = std::fs::read_to_string(&path).map_err(|error| unknown(error.to_string()))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.map(|kib| kib * 1024).ok_or_else(|| unknown("there is no VmRSS in it".into()))
}

fn count(bytes: isize) {
    if COUNTS.load(Ordering::Relaxed) {
        TAKEN.fetch_add(bytes, Ordering::Relaxed);
    }
}

// SAFETY: the system's allocator does the work; counting allocates nothing. No layout is larger than isize::MAX.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: by contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: by contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as isize - layout.size() as isize);
        // SAFETY: by contract.
        unsafe { System.realloc(memory, layout, size) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: by contract.
        unsafe { System.dealloc(memory, layout) }
    }
}
