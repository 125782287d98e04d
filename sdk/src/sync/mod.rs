//! Locks, condition variables and background threads, for everything in this crate.
//!
//! Locks have no poison: nothing here leaves half a change behind when it panics, so a lock that was held during a panic
//! is as good as any other.

mod worker;

pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
pub(crate) use worker::Worker;
