//! Panics on background threads.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs `work`. A panic must not end a worker thread: it is logged, and `None` is returned.
pub(super) fn catch_panic<T>(work: impl FnOnce() -> T) -> Option<T> {
    let done = catch_unwind(AssertUnwindSafe(work));
    done.inspect_err(|_| log::error!("a panic while embedding rows were fetched or refreshed in the background")).ok()
}
