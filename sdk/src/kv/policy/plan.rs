//! The plan of a call: the slots of its new tokens.

use super::cache_policy::CachePolicy;
use super::layer_slots::LayerSlots;
use crate::error::{Error, Result};

/// What a policy may know of the keys and values that are in a slot, each `[rows, heads]` of a call's new tokens.
#[derive(Clone, Copy, Debug, Default)]
pub struct SlotValues<'a> {
    /// The lengths (2-norms) of the values, for `h2o-vlen` and `qh2o-vlen`.
    pub lengths: &'a [f32],
    /// The lengths of what quantisation took from the key and from the value, added, for `qh2o` and `qh2o-vlen`.
    pub errors: &'a [f32],
}

/// The slots of a call's new tokens.
#[derive(Clone, Debug)]
pub struct SlotPlan {
    /// `[rows, heads]`: the place in the pages that each new token is written to.
    pub write_slots: Vec<i32>,
    /// `[heads, len]`: the position of the token in each place after these writes; -1: none.
    pub token_pos: Vec<i32>,
    /// `[heads][rows]`: the slots that lost their token, or were free; the log of tests.
    pub slots: Vec<Vec<usize>>,
    next: LayerSlots,
    /// `[rows, heads]`: the slot in which each new token is after the call.
    at: Vec<Option<usize>>,
    rows: usize,
    exact: bool,
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
        let all = heads * len;
        Ok(Self {
            heads,
            len,
            used: 0,
            seen: 0,
            first: 0,
            evicted: false,
            turn: 0,
            place: (0..all).map(|slot| slot % len).collect(),
            token_pos: vec![-1; all],
            scores: vec![0.0; all],
            lengths: vec![0.0; all],
            errors: vec![0.0; all],
        })
    }

    /// How many tokens the next call may bring, out of `wanted`: the first call as many as there are slots, a later one none
    /// beyond the call that fills the last slot where a policy ranks, and as many as can leave.
    pub fn most_rows(&self, policy: &dyn CachePolicy, wanted: usize) -> usize {
        let most = match self.len - self.used {
            0 => policy.most_rows(self.len),
            free if self.seen == 0 || policy.needs_weights() => free,
            _ => policy.most_rows(self.len),
        };
        wanted.min(most)
    }

    /// Chooses the slots of `rows` new tokens, which continue the sequence.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for no rows, and for more than [`most_rows`](Self::most_rows).
    pub fn plan(&self, policy: &dyn CachePolicy, rows: usize) -> Result<SlotPlan> {
        let most = self.most_rows(policy, usize::MAX);
        if rows == 0 || rows > most {
            return Err(Error::invalid("rows", format!("{rows} tokens in a call, which may have 1 to {most} now")));
        }
        let (heads, len) = (self.heads, self.len);
        let free = rows.min(len - self.used);
        let mut next = self.clone();
        let mut slots = vec![Vec::with_capacity(rows); heads];
        let mut write_slots = vec![0; rows * heads];
        for (row, head) in (0..free).flat_map(|row| (0..heads).map(move |head| (row, head))) {
            let slot = self.used + row;
            slots[head].push(slot);
            write_slots[row * heads + head] = next.enter(head, slot, self.seen + row) as i32;
        }
        next.used += free;
        if free < rows {
            let mut chosen = vec![Vec::new(); heads];
            self.choose(&next, policy, rows - free, &mut chosen);
            let grace = policy.grace();
            for row in free..rows {
                for head in 0..heads {
                    let slot = chosen[head][row - free];
                    slots[head].push(slot);
                    let entered = if grace == 0 { slot } else { next.leave_grace(head, len - grace + next.turn, slot) };
                    write_slots[row * heads + head] = next.enter(head, entered, self.seen + row) as i32;
                }
                next.turn = if grace == 0 { 0 } else { (next.turn + 1) % grace };
            }
            next.evicted = true;
        }
        next.seen += rows;
        if self.seen == 0 {
            next.first = rows;
        }
        let mut token_pos = vec![-1; heads * len];
        for (slot, &position) in next.token_pos.iter().enumerate() {
            token_pos[slot / len * len + next.place[slot]] = position;
        }
        let mut at = vec![None; rows * heads];
        for (slot, &position) in next.token_pos.iter().enumerate() {
            // Those before this call are below.
            if let Some(row) = usize::try_from(position).ok().and_then(|position| position.checked_sub(self.seen)) {
                at[row * heads + slot / len] = Some(slot % len);
            }
        }
        Ok(SlotPlan { write_slots, token_pos, slots, next, at, rows, exact: self.seen == 0 })
    }

    fn choose(&self, next: &Self, policy: &dyn CachePolicy, count: usize, to: &mut Vec<Vec<usize>>) {
        let filled_at_once = !self.evicted && self.first == self.len;
        match policy.first_eviction(self).filter(|_| filled_at_once) {
            Some(first) => {
                let first = first.min(self.len - policy.grace() - count);
                to.iter_mut().for_each(|slots| slots.extend(first..first + count));
            }
            // Slots that this call fills count as in use.
            None => policy.rank(next, count, to),
        }
    }

    /// Puts a token into a slot. Returns the slot's place.
    fn enter(&mut self, head: usize, slot: usize, position: usize) -> usize {
        let at = head * self.len + slot;
        self.token_pos[at] = position as i32;
        self.scores[at] = 0.0;
        self.place[at]
    }

    /// Moves the token of a slot of the grace period, with what is known of it, to another slot. Returns the slot that is free
    /// then.
    fn leave_grace(&mut self, head: usize, from: usize, to: usize) -> usize {
        let (from_at, to_at) = (head * self.len + from, head * self.len + to);
        self.place.swap(from_at, to_at);
        self.token_pos.swap(from_at, to_at);
        for numbers in [&mut self.scores, &mut self.lengths, &mut self.errors] {
            numbers.swap(from_at, to_at);
        }
        from
    }

    /// Takes over a plan whose tokens the model has written. `weights`: `key_weights` of the call, `[heads, len]` by place;
    /// empty for a policy that needs none, and for the first call, which attends to everything.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for a plan of other slots, and where `weights` or `values` have another length than the call needs.
    pub fn commit(
        &mut self,
        policy: &dyn CachePolicy,
        plan: SlotPlan,
        weights: &[f32],
        values: SlotValues<'_>,
    ) -> Result<()> {
        let SlotPlan { mut next, at, rows, exact, .. } = plan;
        if (next.heads, next.len, next.seen) != (self.heads, self.len, self.seen + rows) {
            return Err(Error::invalid("plan", "it is not the plan of these slots, or another was committed since"));
        }
        for (name, numbers, known) in
            [("values.lengths", values.lengths, &mut next.lengths), ("values.errors", values.errors, &mut next.errors)]
        {
            if !numbers.is_empty() && numbers.len() != at.len() {
                let message = format!("{} numbers for {rows} rows of {} heads", numbers.len(), self.heads);
                return Err(Error::invalid(name, message));
            }
            for (index, (number, slot)) in numbers.iter().zip(&at).enumerate() {
                if let Some(slot) = slot {
                    known[index % self.heads * self.len + slot] = *number;
                }
            }
        }
        if policy.needs_weights() && !exact {
            if weights.len() != next.place.len() {
                let message = format!("{} weights for {} heads of {} slots", weights.len(), self.heads, self.len);
                return Err(Error::invalid("weights", message));
            }
            let of_slot = |slot: usize| weights[slot / self.len * self.len + next.place[slot]];
            let mut added: Vec<f32> = (0..next.place.len()).map(of_slot).collect();
            policy.scores(&next, rows, &mut added);
            next.scores.iter_mut().zip(added).for_each(|(score, added)| *score += added);
        }
        *self = next;
        Ok(())
    }
}
