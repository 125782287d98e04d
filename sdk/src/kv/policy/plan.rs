//! The plan of a call: the slots of its new tokens.

use super::cache_policy::CachePolicy;
use super::layer_slots::LayerSlots;
use super::ranking::Ranking;
use crate::error::{Error, Result};

/// What a policy may know of the keys and values of a call's new tokens, each `[rows, heads]`.
#[derive(Clone, Copy, Debug, Default)]
pub struct SlotValues<'a> {
    /// The lengths (2-norms) of the values, for `h2o-vlen` and `qh2o-vlen`.
    pub lengths: &'a [f32],
    /// The lengths of what quantisation took from the key and from the value, added, for `qh2o` and `qh2o-vlen`.
    pub errors: &'a [f32],
}

/// The slots of a call's new tokens: what a call changes, and nothing else.
#[derive(Clone, Debug, Default)]
pub struct SlotPlan {
    /// `[rows, heads]`: the place in the pages that each new token is written to.
    pub write_slots: Vec<i32>,
    /// `[rows, heads]`: the slots that lose their token, or are free.
    pub slots: Vec<u32>,
    rows: usize,
    /// How many rows go to free slots; the others evict.
    free: usize,
    /// Tokens before the call.
    seen: usize,
}

impl LayerSlots {
    /// Free slots: `len` of them for each of `heads` heads.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for no head, and for no slot beside those of the policy's grace period.
    pub fn new(policy: &dyn CachePolicy, heads: usize, len: usize) -> Result<Self> {
        if heads == 0 {
            return Err(Error::invalid("heads", "a layer without heads"));
        }
        if len <= policy.grace() {
            let message = format!("{len} slots, of which the grace period takes {}: give more", policy.grace());
            return Err(Error::invalid("cache_length", message));
        }
        let (all, needs) = (heads * len, policy.needs());
        let numbers = |needed: bool| if needed { vec![0.0; all] } else { Vec::new() };
        let moves = if policy.grace() > 0 { heads } else { 0 };
        Ok(Self {
            heads,
            len,
            used: 0,
            seen: 0,
            first: 0,
            evicted: false,
            turn: 0,
            places: (0..moves).flat_map(|_| 0..len as u32).collect(),
            token_pos: vec![-1; all],
            scores: numbers(needs.weights),
            lengths: numbers(needs.lengths),
            errors: numbers(needs.errors),
        })
    }

    /// How many tokens the next call may bring, out of `wanted`: the first call as many as there are slots, a later one none
    /// beyond the call that fills the last slot where a policy ranks, and as many as can leave.
    pub fn most_rows(&self, policy: &dyn CachePolicy, wanted: usize) -> usize {
        let most = match self.len - self.used {
            0 => policy.most_rows(self.len),
            free if self.seen == 0 || policy.needs().weights => free,
            _ => policy.most_rows(self.len),
        };
        wanted.min(most)
    }

    /// Chooses the slots of `rows` new tokens, which continue the sequence.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for no rows, and for more than [`most_rows`](Self::most_rows).
    pub fn plan(&self, policy: &dyn CachePolicy, rows: usize) -> Result<SlotPlan> {
        let mut plan = SlotPlan::default();
        self.plan_into(policy, rows, &mut Ranking::default(), &mut plan)?;
        Ok(plan)
    }

    /// As [`plan`](Self::plan), in memory that is kept from call to call.
    pub fn plan_into(
        &self,
        policy: &dyn CachePolicy,
        rows: usize,
        ranking: &mut Ranking,
        plan: &mut SlotPlan,
    ) -> Result<()> {
        let most = self.most_rows(policy, usize::MAX);
        if rows == 0 || rows > most {
            return Err(Error::invalid("rows", format!("{rows} tokens in a call, which may have 1 to {most} now")));
        }
        let free = rows.min(self.len - self.used);
        (plan.rows, plan.free, plan.seen) = (rows, free, self.seen);
        plan.slots.clear();
        for slot in self.used..self.used + free {
            plan.slots.extend(std::iter::repeat_n(slot as u32, self.heads));
        }
        ranking.slots.clear();
        let count = rows - free;
        if count > 0 {
            self.choose(policy, count, ranking);
            debug_assert_eq!(ranking.slots.len(), self.heads * count);
            for row in 0..count {
                plan.slots.extend((0..self.heads).map(|head| ranking.slots[head * count + row]));
            }
        }
        // A token that leaves the grace period for a chosen slot stays where it is, and the new one takes the chosen slot's place.
        // No slot is chosen twice, so that these are the places of before the call.
        plan.write_slots.clear();
        let place = |(at, &slot): (usize, &u32)| self.place(at % self.heads, slot as usize) as i32;
        plan.write_slots.extend(plan.slots.iter().enumerate().map(place));
        Ok(())
    }

    fn choose(&self, policy: &dyn CachePolicy, count: usize, to: &mut Ranking) {
        let filled_at_once = !self.evicted && self.first == self.len;
        match policy.first_eviction(self).filter(|_| filled_at_once) {
            Some(first) => {
                let first = first.min(self.len - policy.grace() - count);
                (0..self.heads).for_each(|_| to.choose(first..first + count));
            }
            None => policy.rank(self, count, to),
        }
    }

    /// Adds `token_pos` as it is after a plan's writes, `[heads, len]`, to `to`: an input of the call.
    pub fn token_pos_after(&self, plan: &SlotPlan, to: &mut Vec<i32>) {
        let first = to.len();
        to.extend_from_slice(&self.token_pos);
        self.write_positions(plan, &mut to[first..]);
    }

    fn write_positions(&self, plan: &SlotPlan, token_pos: &mut [i32]) {
        for (at, &place) in plan.write_slots.iter().enumerate() {
            token_pos[at % self.heads * self.len + place as usize] = (plan.seen + at / self.heads) as i32;
        }
    }

    /// Takes over a plan whose tokens the model has written. `weights`: `key_weights` of the call, `[heads, len]`; empty for a
    /// policy that needs none, and for the first call, which attends to everything. What `values` has is what the policy needs.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for a plan of other slots, and where `weights` or `values` have another length than the call needs. Then
    /// nothing is changed.
    pub fn commit(
        &mut self,
        policy: &dyn CachePolicy,
        plan: &SlotPlan,
        weights: &[f32],
        values: SlotValues<'_>,
    ) -> Result<()> {
        let (heads, len) = (self.heads, self.len);
        let SlotPlan { ref write_slots, ref slots, rows, free, seen } = *plan;
        if seen != self.seen
            || rows == 0
            || slots.len() != rows * heads
            || slots.iter().any(|&slot| slot as usize >= len)
        {
            return Err(Error::invalid("plan", "it is not the plan of these slots, or another was committed since"));
        }
        let needs = policy.needs();
        for (name, numbers, needed) in
            [("values.lengths", values.lengths, needs.lengths), ("values.errors", values.errors, needs.errors)]
        {
            if needed && numbers.len() != slots.len() {
                let message = format!("{} numbers for {rows} rows of {heads} heads", numbers.len());
                return Err(Error::invalid(name, message));
            }
        }
        let weighs = needs.weights && self.seen > 0;
        if weighs && weights.len() != heads * len {
            let message = format!("{} weights for {heads} heads of {len} slots", weights.len());
            return Err(Error::invalid("weights", message));
        }
        let mut token_pos = std::mem::take(&mut self.token_pos);
        self.write_positions(plan, &mut token_pos);
        self.token_pos = token_pos;
        let place_of = |at: usize, place: i32| at % heads * len + place as usize;
        for (numbers, known) in
            [(&[][..], &mut self.scores), (values.lengths, &mut self.lengths), (values.errors, &mut self.errors)]
        {
            if !known.is_empty() {
                for (at, &place) in write_slots.iter().enumerate() {
                    // A token enters with the score 0.
                    known[place_of(at, place)] = numbers.get(at).copied().unwrap_or(0.0);
                }
            }
        }
        let grace = policy.grace();
        for row in (free..rows).filter(|_| grace > 0) {
            for head in 0..heads {
                let turn = (self.turn + row - free) % grace;
                let (newest, chosen) = (len - grace + turn, slots[row * heads + head] as usize);
                self.places.swap(head * len + newest, head * len + chosen);
            }
        }
        if weighs {
            let scores = self.scores.chunks_exact_mut(len);
            for (head, (scores, weights)) in scores.zip(weights.chunks_exact(len)).enumerate() {
                let lengths = self.lengths.get(head * len..(head + 1) * len).unwrap_or_default();
                policy.add_scores(rows, weights, lengths, scores);
            }
        }
        self.advance(policy, rows);
        Ok(())
    }

    /// Counts the tokens of a call, without what is in the slots.
    pub(crate) fn advance(&mut self, policy: &dyn CachePolicy, rows: usize) {
        let free = rows.min(self.len - self.used);
        self.used += free;
        self.evicted |= free < rows;
        if policy.grace() > 0 {
            self.turn = (self.turn + rows - free) % policy.grace();
        }
        if self.seen == 0 {
            self.first = rows;
        }
        self.seen += rows;
    }
}
