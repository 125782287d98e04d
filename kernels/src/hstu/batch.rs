//! What one call carries, and every check of it.
//!
//! The checks know nothing of the CPU: the CUDA launchers use them too. Index tensors may hold anything at all; once
//! `check` has passed, every offset computed from them lies inside its tensor.

use std::ops::Range;

use super::mask::Mask;
use crate::common::input_error::refuse;
use crate::common::kv_view::{KvView, QuantisedPool, check_quantised};
use crate::common::pages::{Pages, check_offsets};
use crate::{Element, InputError};

/// How the rows `[T, H, D]` of a call are shared out among its users.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// `[B + 1]`: where each user's rows begin.
    pub row_offsets: &'a [i32],
    /// `[B]`: how many of each user's rows, the last ones, are candidates.
    pub num_candidates: &'a [i32],
    /// T.
    pub total_rows: usize,
    /// H.
    pub heads: usize,
    /// D.
    pub head_size: usize,
}

/// One call of the operator `HstuAttention`.
#[derive(Clone, Copy, Debug)]
pub struct HstuAttention<'a, T> {
    /// The rows of `query`, `key`, `value` and the output.
    pub rows: Rows<'a>,
    /// `[T, H, D]`.
    pub query: &'a [T],
    /// `[T, H, D]`.
    pub key: &'a [T],
    /// `[T, H, D]`.
    pub value: &'a [T],
    /// The pages and the `kv_pool` they lie in. Without it no user has cached tokens. The new history rows are in a quantised
    /// pool already, and are read from there: keys and values are read as they are stored, however a history is cut into calls.
    pub cache: Option<(Pages<'a>, KvView<'a, T>)>,
    /// `[B]`: leading rows that see the whole history.
    pub num_contextual: Option<&'a [i32]>,
    /// What scores are multiplied by; 0 stands for 1/√D.
    pub alpha: f32,
    /// What the sum is divided by; at least 1.
    pub scaling_seqlen: i64,
    /// Candidates in a group; at least 1.
    pub target_group_size: i64,
    /// How far back a row sees; 0 = all the way.
    pub max_attn_len: i64,
    /// Only candidates are computed: history rows come out as zeros. They are seen, and appended, all the same.
    pub candidates_only: bool,
}

/// One call of the operator `PagedKvAppend`, in place on the pool: where input and output pool differ, the caller
/// copies first ([`crate::cpu::copy`]). `HstuAttention` appends to quantised pools too.
#[derive(Clone, Copy, Debug)]
pub struct PagedKvAppend<'a, T> {
    /// The rows of `key` and `value`.
    pub rows: Rows<'a>,
    /// `[T, H, D]`.
    pub key: &'a [T],
    /// `[T, H, D]`.
    pub value: &'a [T],
    /// Where the rows go.
    pub pages: Pages<'a>,
}

impl Rows<'_> {
    /// B.
    pub fn users(&self) -> usize {
        self.num_candidates.len()
    }

    /// The rows of one user. Only after `check`.
    pub(crate) fn of(&self, user: usize) -> Range<usize> {
        self.row_offsets[user] as usize..self.row_offsets[user + 1] as usize
    }

    /// How many rows of one user are new history. Only after `check`.
    pub(crate) fn new_history(&self, user: usize) -> usize {
        self.of(user).len() - self.num_candidates[user] as usize
    }

    /// The heads of a row, and the elements of a head.
    pub(crate) fn shape(&self) -> [usize; 2] {
        [self.heads, self.head_size]
    }

    /// Elements of one row over all heads. Only after `check`.
    pub(crate) fn width(&self) -> usize {
        self.heads * self.head_size
    }

    fn check(&self, tensors: &[(&'static str, usize)]) -> Result<(), InputError> {
        let Rows { total_rows, heads, head_size, .. } = *self;
        if heads == 0 || head_size == 0 {
            let message = format!("shape [{total_rows}, {heads}, {head_size}] has no heads or no head size");
            return refuse(tensors[0].0, None, message);
        }
        let elements = heads.checked_mul(head_size).and_then(|width| width.checked_mul(total_rows));
        for &(tensor, len) in tensors {
            if elements != Some(len) {
                let message = format!("{len} elements do not make the shape [{total_rows}, {heads}, {head_size}]");
                return refuse(tensor, None, message);
            }
        }
        check_offsets("row_offsets", self.row_offsets, self.users(), total_rows, "rows")?;
        for (user, &candidates) in self.num_candidates.iter().enumerate() {
            let rows = self.of(user).len();
            if usize::try_from(candidates).is_ok_and(|candidates| candidates <= rows) {
                continue;
            }
            let message = format!("{candidates} candidates, expected 0 to the user's {rows} rows");
            return refuse("num_candidates", Some(user), message);
        }
        Ok(())
    }
}

/// A call of `HstuAttention` that has passed its checks: it can be run without being checked again.
#[derive(Clone, Copy, Debug)]
pub struct CheckedAttention<'a, T>(pub(crate) &'a HstuAttention<'a, T>);

/// A call of `PagedKvAppend` that has passed its checks: it can be run without being checked again.
#[derive(Clone, Debug)]
pub struct CheckedAppend<'a, T> {
    pub(crate) op: &'a PagedKvAppend<'a, T>,
    /// The slots to write, none of them twice.
    pub(crate) runs: Vec<Run>,
}

impl<'a, T: Element> HstuAttention<'a, T> {
    /// Refuses everything that would make a result meaningless or an access stray. Writes nothing.
    pub fn check(&self) -> Result<CheckedAttention<'_, T>, InputError> {
        self.check_inputs()?;
        Ok(CheckedAttention(self))
    }

    fn check_inputs(&self) -> Result<(), InputError> {
        self.check_attributes()?;
        let tensors = [("query", self.query.len()), ("key", self.key.len()), ("value", self.value.len())];
        self.rows.check(&tensors)?;
        if let Some((pages, pool)) = self.cache {
            pool.check(&pages, self.rows.users(), self.rows.shape())?;
            for user in 0..self.rows.users() {
                pages.check_tokens(user, 0..self.pooled(user))?;
            }
        }
        let Some(contextual) = self.num_contextual else { return Ok(()) };
        if contextual.len() != self.rows.users() {
            let message = format!("{} numbers, expected {}, one a user", contextual.len(), self.rows.users());
            return refuse("num_contextual", None, message);
        }
        for (user, &contextual) in contextual.iter().enumerate() {
            let new = self.rows.new_history(user);
            if usize::try_from(contextual).is_ok_and(|contextual| contextual > new) || contextual < 0 {
                let message = format!("{contextual} contextual rows, expected 0 to the user's {new} history rows");
                return refuse("num_contextual", Some(user), message);
            }
            let cached = self.cached(user);
            if contextual > 0 && cached > 0 {
                let message = format!("{contextual} contextual rows beside {cached} cached tokens, expected none");
                return refuse("num_contextual", Some(user), message);
            }
        }
        Ok(())
    }

    fn check_attributes(&self) -> Result<(), InputError> {
        let attributes = [
            ("scaling_seqlen", self.scaling_seqlen, 1),
            ("target_group_size", self.target_group_size, 1),
            ("max_attn_len", self.max_attn_len, 0),
        ];
        for (name, value, least) in attributes {
            if value < least {
                return refuse(name, None, format!("{value}, expected {least} or more"));
            }
        }
        if !self.alpha.is_finite() {
            return refuse("alpha", None, format!("{}, expected a finite number", self.alpha));
        }
        Ok(())
    }

    /// Pairs of row and key that the mask lets through, over all users: one head costs 4·D floating-point operations
    /// for each. 0 where `check` fails.
    pub fn unmasked_pairs(&self) -> u64 {
        if self.check().is_err() {
            return 0;
        }
        let of_user = |user| {
            let mask = self.mask(user);
            let first = self.cached(user) as i64;
            let rows = self.computed(user);
            let of_row = |row| {
                let (history, candidates) = (mask.history_keys(row), mask.candidate_keys(row));
                (history.end - history.start + candidates.end - candidates.start) as u64
            };
            rows.map(|row| of_row(first + row as i64)).sum::<u64>()
        };
        (0..self.rows.users()).map(of_user).sum()
    }

    /// The rows of one user that are computed, counted from the user's first. Only after `check`.
    pub(crate) fn computed(&self, user: usize) -> Range<usize> {
        let first = if self.candidates_only { self.rows.new_history(user) } else { 0 };
        first..self.rows.of(user).len()
    }

    /// `alpha` with 0 resolved.
    pub(crate) fn score_scale(&self) -> f32 {
        if self.alpha == 0.0 { (1.0 / (self.rows.head_size as f64).sqrt()) as f32 } else { self.alpha }
    }

    /// Cached tokens of one user. Only after `check`, as the three below.
    pub(crate) fn cached(&self, user: usize) -> usize {
        self.cache.map_or(0, |(pages, _)| pages.cached_len[user] as usize)
    }

    /// How many history tokens of one user are read from the pool; the rest is among the call's own rows.
    pub(crate) fn pooled(&self, user: usize) -> usize {
        match self.cache {
            Some((_, KvView::Quantised { .. })) => self.cached(user) + self.rows.new_history(user),
            _ => self.cached(user),
        }
    }

    pub(crate) fn contextual(&self, user: usize) -> usize {
        self.num_contextual.map_or(0, |contextual| contextual[user] as usize)
    }

    pub(crate) fn mask(&self, user: usize) -> Mask {
        Mask {
            history: (self.cached(user) + self.rows.new_history(user)) as i64,
            contextual: self.contextual(user) as i64,
            group: self.target_group_size,
            window: self.max_attn_len,
        }
    }
}

impl<'a, T: Element> PagedKvAppend<'a, T> {
    /// Refuses everything that would make a write stray, and a slot that would be written twice. Writes nothing.
    pub fn check(&self) -> Result<CheckedAppend<'_, T>, InputError> {
        self.check_with(None)
    }

    /// As [`check`](Self::check), with the length of the pool where the caller has it.
    pub(crate) fn check_with(&self, pool_len: Option<usize>) -> Result<CheckedAppend<'_, T>, InputError> {
        Ok(CheckedAppend { op: self, runs: self.runs(pool_len)? })
    }

    /// Checks that a pool is the one that the call describes.
    pub(crate) fn check_pool(&self, pool: &[T]) -> Result<(), InputError> {
        self.pages.check_pool(self.rows.shape(), Some(pool.len()))
    }

    /// Checks that a quantised pool is the one that the call describes.
    pub(crate) fn check_quantised(&self, pool: &QuantisedPool<'_>) -> Result<(), InputError> {
        check_quantised(pool.format, &self.pages, self.rows.shape(), [pool.codes.len(), pool.scales.len()])
    }

    /// Checks, and gives the slots to write.
    fn runs(&self, pool_len: Option<usize>) -> Result<Vec<Run>, InputError> {
        self.rows.check(&[("key", self.key.len()), ("value", self.value.len())])?;
        self.pages.check(self.rows.users(), self.rows.shape(), pool_len)?;
        let page_size = self.pages.page_size;
        let mut runs = Vec::new();
        for user in 0..self.rows.users() {
            let mut row = self.rows.of(user).start;
            let mut position = self.pages.cached_len[user] as usize;
            let end = position + self.rows.new_history(user);
            self.pages.check_tokens(user, position..end)?;
            let list = self.pages.of(user);
            while position < end {
                let slot = position % page_size;
                let count = (page_size - slot).min(end - position);
                runs.push(Run { page: list[position / page_size] as usize, slot, count, row, user });
                row += count;
                position += count;
            }
        }
        // Threads write the runs in any order: a slot in two of them would hold the one or the other's token.
        runs.sort_unstable_by_key(|run| (run.page, run.slot));
        for pair in runs.windows(2) {
            let [a, b] = [pair[0], pair[1]];
            if a.page == b.page && a.slot + a.count > b.slot {
                let (first, second) = (a.user.min(b.user), a.user.max(b.user));
                let message = format!("page {} slot {} would be written twice, by user {first} too", a.page, b.slot);
                return refuse("page_ids", Some(second), message);
            }
        }
        Ok(runs)
    }
}

/// Consecutive slots of one page and the consecutive rows that go there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    pub page: usize,
    pub slot: usize,
    pub count: usize,
    pub row: usize,
    pub user: usize,
}
