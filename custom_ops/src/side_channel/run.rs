//! Facts of one run, for the operators that run on the thread that starts it.

use std::cell::RefCell;
use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

use pagoda_kernels::cuda::CUdeviceptr;

/// What the engine says of the run that this thread starts.
#[derive(Clone)]
struct Run {
    /// Whether tokens may be on their way into pools.
    arrivals: bool,
    /// Memory that is filled before the first kernel of the run, and that no kernel writes.
    settled: Option<Arc<[Range<CUdeviceptr>]>>,
    /// How many rows a sequence has that has some, at least and at most.
    rows_each: (usize, usize),
}

thread_local! {
    static RUN: RefCell<Run> =
        const { RefCell::new(Run { arrivals: true, settled: None, rows_each: (0, usize::MAX) }) };
}

/// Runs `work` on this thread with other facts, and restores those of before, after a panic too.
fn with<R>(change: impl FnOnce(&mut Run), work: impl FnOnce() -> R) -> R {
    struct Before(Run);
    impl Drop for Before {
        fn drop(&mut self) {
            RUN.set(self.0.clone());
        }
    }
    let _before = Before(RUN.with_borrow(Run::clone));
    RUN.with_borrow_mut(change);
    work()
}

/// Runs `work` on this thread. If no arrivals are expected, no token is on its way into a pool that its operators read: they do
/// not wait, and a kernel may start while the kernel in front of it ends. A CUDA graph that is captured then may be replayed only
/// while that holds.
pub fn with_arrivals<R>(expected: bool, work: impl FnOnce() -> R) -> R {
    with(|run| run.arrivals = expected, work)
}

/// Runs `work` on this thread. The tensors in `memory`, some ranges of it, are filled before the first kernel of the run, and no kernel of
/// it writes them: operators may read them before the kernel in front of theirs has ended. Where the tensors that say where cached tokens lie are
/// in `memory`, they may also read what their pools have of these: it is in place before the run, or behind the event that the stream
/// waits for in front of the operator (`wait_for_arrivals`), and a run writes new tokens alone.
pub fn with_settled<R>(memory: &Arc<[Range<CUdeviceptr>]>, work: impl FnOnce() -> R) -> R {
    with(|run| run.settled = Some(Arc::clone(memory)), work)
}

/// Runs `work` on this thread. Each sequence of the run that has rows has so many, and operators leave out what is for
/// sequences with fewer or more. A CUDA graph that is captured then may be replayed for such batches alone.
pub fn with_rows_each<R>(rows: RangeInclusive<usize>, work: impl FnOnce() -> R) -> R {
    with(|run| run.rows_each = rows.into_inner(), work)
}

/// The fewest rows of a sequence that has some, and the most.
pub(crate) fn rows_each() -> (usize, usize) {
    RUN.with_borrow(|run| run.rows_each)
}

pub(super) fn expects_arrivals() -> bool {
    RUN.with_borrow(|run| run.arrivals)
}

/// Whether a tensor that starts at that address is settled.
pub(crate) fn is_settled(address: CUdeviceptr) -> bool {
    RUN.with_borrow(|run| run.settled.iter().flat_map(|memory| memory.iter()).any(|range| range.contains(&address)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operators_wait_unless_nothing_is_expected() {
        let waits = expects_arrivals;
        assert!(waits() && !with_arrivals(false, waits) && with_arrivals(true, waits));
        let failed = std::panic::catch_unwind(|| with_arrivals(false, || panic!("on purpose")));
        assert!(failed.is_err() && waits());
    }

    #[test]
    fn rows_are_as_many_as_they_are_said_to_be() {
        let any = (0, usize::MAX);
        assert_eq!((rows_each(), with_rows_each(1..=1, rows_each), rows_each()), (any, (1, 1), any));
        assert_eq!(with_rows_each(1..=1, || with_rows_each(2..=9, rows_each)), (2, 9));
    }

    #[test]
    fn memory_is_settled_while_it_is_said_to_be() {
        let asked = || [15, 16, 23, 24, 40].map(is_settled);
        let memory: Arc<[_]> = [16..24, 40..41].into();
        assert_eq!(with_settled(&memory, asked), [false, true, true, false, true]);
        assert_eq!(asked(), [false; 5]);
    }
}
