//! A copy of memory on several threads.

use std::mem::MaybeUninit;

use super::Shared;
use crate::common::parallel::{Parallel, run_once};

/// Bytes one task moves: small enough to balance, large enough that scheduling costs little.
pub(in crate::cpu) const CHUNK_BYTES: usize = 256 << 10;

/// Copies `from` to `to`, all of it: what `PagedKvAppend` needs first where its input and output pool differ. `to` may
/// be uninitialised memory.
///
/// # Panics
/// Where the lengths differ.
pub fn copy<T: Copy + Send + Sync>(from: &[T], to: &mut [MaybeUninit<T>], parallel: &dyn Parallel) {
    assert_eq!(from.len(), to.len(), "copy between slices of different length");
    let chunk = CHUNK_BYTES / size_of::<T>();
    let to = Shared(to.as_mut_ptr());
    run_once(parallel, from.len().div_ceil(chunk), &|task| {
        let from = &from[task * chunk..from.len().min((task + 1) * chunk)];
        // SAFETY: `to` is as long as `from`, borrowed for the call, and each task runs once on a chunk of its own.
        unsafe { to.pointer().add(task * chunk).copy_from_nonoverlapping(from.as_ptr().cast(), from.len()) };
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::parallel::Threads;

    #[test]
    fn every_element_arrives() {
        let sizes = if cfg!(miri) { vec![0, 5, 70_000] } else { vec![0, 1, 65_536, 65_537, 1_000_003] };
        for len in sizes {
            let from: Vec<f32> = (0..len).map(|i| i as f32).collect();
            let mut to = vec![MaybeUninit::uninit(); len];
            copy(&from, &mut to, &Threads::new(3));
            // SAFETY: `copy` has written every element.
            let to: Vec<f32> = to.iter().map(|x| unsafe { x.assume_init() }).collect();
            assert!(from == to, "{len}");
        }
    }
}
