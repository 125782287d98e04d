//! Locks and condition variables, for everything in this crate.
//!
//! They have no poison: nothing here leaves half a change behind when it panics, so a lock that a panic was in is as good as
//! any other.

pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
