//! Tensors that are there before a run begins, and that nothing in it writes: operators may read them before the kernel in front of
//! theirs has ended.

use std::cell::Cell;
use std::ops::Range;

use cudarc::driver::sys::CUdeviceptr;

thread_local! {
    static MEMORY: Cell<(CUdeviceptr, CUdeviceptr)> = const { Cell::new((0, 0)) };
}

/// Does something on this thread, with tensors of a run in `memory` that were put there before its first kernel.
pub fn with_settled<R>(memory: Range<CUdeviceptr>, work: impl FnOnce() -> R) -> R {
    struct Before((CUdeviceptr, CUdeviceptr));
    impl Drop for Before {
        fn drop(&mut self) {
            MEMORY.set(self.0);
        }
    }
    let _before = Before(MEMORY.replace((memory.start, memory.end)));
    work()
}

/// Whether a tensor that begins there is one of those.
pub fn is_settled(address: CUdeviceptr) -> bool {
    let (start, end) = MEMORY.get();
    (start..end).contains(&address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_settled_while_it_is_said_to_be() {
        let asked = || [15, 16, 23, 24].map(is_settled);
        assert_eq!(with_settled(16..24, asked), [false, true, true, false]);
        assert_eq!(asked(), [false; 4]);
    }
}
