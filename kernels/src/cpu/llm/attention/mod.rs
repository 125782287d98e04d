//! `PagedAttention` on the CPU.
//!
//! A block is some tokens of one sequence with the query heads of one or more kv heads. It walks over the slots tile by tile,
//! with the online softmax: each row keeps the largest score so far, and the sums are scaled when it grows. Tiles begin at
//! multiples of `TILE`, and every `SEGMENT` slots a row's sums are begun anew and merged in order. Within a tile a score is a
//! product of one row and one key, and values are added slot by slot. So what a row comes out as depends on nothing but its own
//! inputs: not on the rows beside it, the chunks in which a prompt comes, nor the threads.
//!
//! A block of many tokens, as in a prefill, has one kv head, and computes its segments in order. One of few tokens, as in
//! decoding, has several kv heads, whose keys are next to each other in memory, and its segments are computed by several threads
//! (split-KV).

mod append;
mod attend;
mod key_weights;
mod norms;
mod plan;
mod products;
mod rotation;
mod rows;
mod softmax;
mod stored;

use crate::common::input_error::{check_output, expect};
use crate::cpu::Isa;
use crate::cpu::common::shared::Shared;
use crate::cpu::common::simd::run_on;
use crate::llm::paged_attention::{KvPool, PagedAttention};
use crate::parallel::{Parallel, Serial, run_once};
use crate::{Element, InputError};
use append::append;
use attend::{Attend, Merge};
use key_weights::{Weigh, WeighKept, kept_scores};
use plan::Plan;
use rows::KeptScores;
use stored::Stored;

/// Products below which handing work to another thread costs more than it saves.
const SERIAL_BELOW: u64 = 1 << 18;

compiled! {
    /// An element type that [`PagedAttention`] is compiled for.
    pub trait PagedAttentionElement {
        fn paged_attention(
            op: &PagedAttention<'_, Self>,
            isa: Isa,
            pool: &mut KvPool<'_, Self>,
            output: &mut [Self],
            key_weights: Option<(&mut [f32], usize)>,
            parallel: &dyn Parallel,
        ) -> Result<(), InputError>;
    }
}

impl<T: PagedAttentionElement> PagedAttention<'_, T> {
    /// Checks, then appends the new keys and values to `pool` and computes `output` (`[T, Hq, D]`) with the best instruction
    /// set. `key_weights`: `[B, Hkv, L]` and L, where they are asked for. After an error nothing is written.
    pub fn run(
        &self,
        pool: &mut KvPool<'_, T>,
        output: &mut [T],
        key_weights: Option<(&mut [f32], usize)>,
        parallel: &dyn Parallel,
    ) -> Result<(), InputError> {
        self.run_with(Isa::detect(), pool, output, key_weights, parallel)
    }

    /// As [`run`](Self::run), with the instruction set given. The bits of a result may differ between sets.
    ///
    /// # Panics
    /// Where this CPU does not have `isa`.
    pub fn run_with(
        &self,
        isa: Isa,
        pool: &mut KvPool<'_, T>,
        output: &mut [T],
        key_weights: Option<(&mut [f32], usize)>,
        parallel: &dyn Parallel,
    ) -> Result<(), InputError> {
        T::paged_attention(self, isa, pool, output, key_weights, parallel)
    }
}

fn paged_attention<T: Element>(
    op: &PagedAttention<'_, T>,
    isa: Isa,
    pool: &mut KvPool<'_, T>,
    output: &mut [T],
    key_weights: Option<(&mut [f32], usize)>,
    parallel: &dyn Parallel,
) -> Result<(), InputError> {
    assert!(Isa::available().contains(&isa), "{isa:?} is not available on this CPU");
    op.check(pool, key_weights.as_ref().map(|(_, len)| *len))?;
    check_output("output", output.len(), op.query.len())?;
    if let Some((weights, len)) = &key_weights {
        expect("key_weights", weights.len(), &[op.sequences(), op.kv_heads, *len])?;
    }
    append(op, pool);
    let stored = Stored::new(pool);
    let mut plan = Plan::new(op);
    let parallel = if plan.products < SERIAL_BELOW { &Serial as &dyn Parallel } else { parallel };
    // The heaviest first: what is left at the end is small and evens out.
    plan.tasks.sort_by_key(|task| std::cmp::Reverse(task.products));
    let padded = op.head_size.next_multiple_of(lanes(isa));
    let mut partial = vec![0.0; plan.partial_rows * (padded + 2)];
    let mut stats = key_weights.is_some().then(|| vec![0.0; op.total_rows * op.query_heads * 2]);
    let mut kept = key_weights.as_ref().and_then(|_| kept_scores(op));
    let kept =
        kept.as_mut().map(|(scores, stride)| KeptScores { scores: Shared(scores.as_mut_ptr()), stride: *stride });
    let attend = Attend {
        op,
        stored,
        tasks: &plan.tasks,
        padded,
        partial: Shared(partial.as_mut_ptr()),
        stats: stats.as_mut().map(|stats| Shared(stats.as_mut_ptr())),
        kept,
        output: Shared(output.as_mut_ptr()),
    };
    run_once(parallel, plan.tasks.len(), &|task| {
        // SAFETY: `isa` is available; the call is checked; tasks write different rows, and each runs once.
        unsafe { run_on(isa, &attend, task) }
    });
    let merge = Merge { attend: &attend, splits: &plan.splits };
    run_once(parallel, plan.splits.len(), &|task| {
        // SAFETY: as above; every segment is computed.
        unsafe { run_on(isa, &merge, task) }
    });
    if let (Some((weights, len)), Some(stats)) = (key_weights, &stats) {
        let weights = Shared(weights.as_mut_ptr());
        let again = Weigh { op, stored, stats, padded, len, weights };
        let kept = kept.map(|kept| WeighKept { op, kept, stats, len, weights });
        run_once(parallel, op.sequences() * op.kv_heads, &|task| {
            // SAFETY: as above; each task writes the weights of one head of one sequence.
            unsafe {
                match &kept {
                    Some(kept) => run_on(isa, kept, task),
                    None => run_on(isa, &again, task),
                }
            }
        });
    }
    Ok(())
}

fn lanes(isa: Isa) -> usize {
    if isa == Isa::Avx512 { 16 } else { 8 }
}
