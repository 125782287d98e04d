//! The operator `PagedAttention`: softmax attention over pages, with the append of new tokens.
//!
//! Sequence b (a user in messages) brings the rows `row_offsets[b] .. row_offsets[b + 1]`, its new tokens, on top of
//! `cached_len[b]` tokens in its pages. A call writes the new keys and values into the pages first. It then reads all keys and
//! values as they are stored, so a prompt in one call, in chunks or token by token gives the same numbers.

use std::ops::Range;

use half::f16;

use crate::common::input_error::{expect, refuse};
use crate::common::kv_format::KvFormat;
use crate::common::pages::{Pages, check_offsets};
use crate::{Element, InputError};

/// What `kv_norms` says of a row and kv head: the length of the value, and those of what the pool's format took from the key and
/// from the value.
pub const KV_NORMS: usize = 3;

/// One call of the operator `PagedAttention`.
#[derive(Clone, Copy, Debug)]
pub struct PagedAttention<'a, T> {
    /// `[B + 1]`: where each sequence's rows begin.
    pub row_offsets: &'a [i32],
    /// T.
    pub total_rows: usize,
    /// Hq, a multiple of `kv_heads`. Query head h reads kv head `h / (Hq / Hkv)`.
    pub query_heads: usize,
    /// Hkv.
    pub kv_heads: usize,
    /// D.
    pub head_size: usize,
    /// `[T, Hq, D]`.
    pub query: &'a [T],
    /// `[T, Hkv, D]`.
    pub key: &'a [T],
    /// `[T, Hkv, D]`.
    pub value: &'a [T],
    /// Where the tokens of each sequence are.
    pub pages: Pages<'a>,
    /// The format of the pool.
    pub format: KvFormat,
    /// `[T]`: the position of each row. Needed by `rotation` and `slots`.
    pub positions: Option<&'a [i32]>,
    /// The rotation of queries and keys by their positions.
    pub rotation: Option<Rotation<'a>>,
    /// `[Hq]`: a logit that joins the denominator of the softmax and nothing else.
    pub sinks: Option<&'a [T]>,
    /// `[Hq]`: ALiBi. The score of a key that is n positions before its row gets `-n * slope`.
    pub slopes: Option<&'a [f32]>,
    /// The slots of each head, where heads keep different tokens.
    pub slots: Option<HeadSlots<'a>>,
    /// What scores are multiplied by; 0 stands for 1/√D.
    pub scale: f32,
    /// How many positions a row sees, its own included; 0 = all.
    pub window: i64,
    /// 0 = none; otherwise a score s becomes `softcap * tanh(s / softcap)`.
    pub softcap: f32,
}

/// A rotation (RoPE) of the first `2 * half_width` numbers of each head, before anything else.
#[derive(Clone, Copy, Debug)]
pub struct Rotation<'a> {
    /// `[P, half_width]`: a row for each position.
    pub cos: &'a [f32],
    /// `[P, half_width]`.
    pub sin: &'a [f32],
    /// R/2; at most D/2.
    pub half_width: usize,
    /// Which numbers make a pair.
    pub pairs: Pairs,
}

/// Which numbers of a head a rotation turns together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pairs {
    /// i and i + R/2.
    Half,
    /// 2i and 2i + 1.
    Interleaved,
}

/// Slots of each head. Slot j of every head is at page `pages[j / page_size]`, offset `j % page_size`; which token is in it
/// differs by head.
#[derive(Clone, Copy, Debug)]
pub struct HeadSlots<'a> {
    /// `[T, Hkv]`: the slot that each row is written to.
    pub write_slots: &'a [i32],
    /// `[B, Hkv, L]`: the position of the token in each slot after this call's writes; -1 where there is none.
    pub token_pos: &'a [i32],
    /// L.
    pub len: usize,
}

/// The pool of a layer, which a call writes.
#[derive(Debug)]
pub enum KvPool<'a, T> {
    /// `[pages, 2, page_size, Hkv, D]`.
    Native(&'a mut [T]),
    /// A quantised pool.
    Quantised {
        /// `[pages, 2, page_size, Hkv, pool_width]`.
        codes: &'a mut [u8],
        /// `[pages, 2, page_size, Hkv, scales_width]`.
        scales: &'a mut [f16],
    },
}

impl<T: Element> PagedAttention<'_, T> {
    /// B.
    pub fn sequences(&self) -> usize {
        self.row_offsets.len().saturating_sub(1)
    }

    /// The rows of one sequence. Only after `check`, as everything below.
    pub(crate) fn rows(&self, sequence: usize) -> Range<usize> {
        self.row_offsets[sequence] as usize..self.row_offsets[sequence + 1] as usize
    }

    pub(crate) fn cached(&self, sequence: usize) -> usize {
        self.pages.cached_len[sequence] as usize
    }

    /// How many query heads read one kv head.
    pub(crate) fn group(&self) -> usize {
        self.query_heads / self.kv_heads
    }

    /// `scale` with 0 resolved.
    pub(crate) fn score_scale(&self) -> f64 {
        if self.scale == 0.0 { 1.0 / (self.head_size as f64).sqrt() } else { f64::from(self.scale) }
    }

    /// How many slots of a sequence may hold tokens after the call.
    pub(crate) fn slot_count(&self, sequence: usize) -> usize {
        self.slots.map_or(self.cached(sequence) + self.rows(sequence).len(), |slots| slots.len)
    }

    /// The slot that a row of the batch is written to in one head.
    pub(crate) fn write_slot(&self, sequence: usize, row: usize, head: usize) -> usize {
        match self.slots {
            Some(slots) => slots.write_slots[row * self.kv_heads + head] as usize,
            None => self.cached(sequence) + row - self.rows(sequence).start,
        }
    }

    /// The position of the token in a slot, if there is one.
    pub(crate) fn slot_position(&self, sequence: usize, head: usize, slot: usize) -> Option<i64> {
        match self.slots {
            Some(slots) => {
                let position = slots.token_pos[(sequence * self.kv_heads + head) * slots.len + slot];
                (position >= 0).then_some(position.into())
            }
            None => Some(slot as i64),
        }
    }

    /// The position of a row of the batch, by which it sees slots.
    pub(crate) fn row_position(&self, sequence: usize, row: usize) -> i64 {
        match (self.slots, self.positions) {
            (Some(_), Some(positions)) => positions[row].into(),
            // Without slots a token's slot is its position; `positions` may count from elsewhere.
            _ => (self.cached(sequence) + row - self.rows(sequence).start) as i64,
        }
    }

    /// Where the block of a token's key (`which` 0) or value (1) in one head begins, counted in blocks.
    pub(crate) fn block(&self, sequence: usize, slot: usize, which: usize, head: usize) -> usize {
        let page_size = self.pages.page_size;
        let page = self.pages.of(sequence)[slot / page_size] as usize;
        ((page * 2 + which) * page_size + slot % page_size) * self.kv_heads + head
    }

    /// Refuses everything that would make a result meaningless or an access stray. Writes nothing. `weights_len`: the
    /// last dimension of `key_weights`, where they are asked for.
    pub fn check(&self, pool: &KvPool<'_, T>, weights_len: Option<usize>) -> Result<(), InputError> {
        self.check_attributes()?;
        self.check_rows()?;
        let width = self.format.pool_width(self.head_size);
        match pool {
            KvPool::Native(pool) => {
                if self.format != KvFormat::Native {
                    return refuse("kv_pool", None, format!("native numbers, expected {:?}", self.format));
                }
                self.pages.check(self.sequences(), [self.kv_heads, width], Some(pool.len()))?;
            }
            KvPool::Quantised { codes, scales } => {
                if self.format == KvFormat::Native {
                    return refuse("kv_pool", None, "quantised, expected native numbers".into());
                }
                self.pages.check(self.sequences(), [self.kv_heads, width], Some(codes.len()))?;
                let Pages { pool_pages, page_size, .. } = self.pages;
                expect(
                    "kv_scales",
                    scales.len(),
                    &[pool_pages, 2, page_size, self.kv_heads, self.format.scales_width()],
                )?;
            }
        }
        self.check_positions()?;
        for (tensor, len) in [("sinks", self.sinks.map(<[T]>::len)), ("slopes", self.slopes.map(<[f32]>::len))] {
            if let Some(len) = len {
                expect(tensor, len, &[self.query_heads])?;
            }
        }
        match self.slots {
            Some(slots) => self.check_slots(slots)?,
            None => self.check_tokens()?,
        }
        let needed = (0..self.sequences()).map(|sequence| self.slot_count(sequence)).max().unwrap_or(0);
        match weights_len {
            Some(len) if len < needed => {
                refuse("weights_len", None, format!("{len}, expected at least the {needed} slots of a sequence"))
            }
            _ => Ok(()),
        }
    }

    fn check_attributes(&self) -> Result<(), InputError> {
        if self.window < 0 {
            return refuse("window", None, format!("{}, expected 0 or more", self.window));
        }
        if !self.scale.is_finite() {
            return refuse("scale", None, format!("{}, expected a finite number", self.scale));
        }
        if !self.softcap.is_finite() || self.softcap < 0.0 {
            return refuse("softcap", None, format!("{}, expected 0 or a positive number", self.softcap));
        }
        Ok(())
    }

    fn check_rows(&self) -> Result<(), InputError> {
        let Self { total_rows, query_heads, kv_heads, head_size, .. } = *self;
        if query_heads == 0 || kv_heads == 0 || head_size == 0 {
            let message =
                format!("{query_heads} query heads, {kv_heads} kv heads of {head_size}, expected some of each");
            return refuse("query", None, message);
        }
        if !query_heads.is_multiple_of(kv_heads) {
            let message = format!("{query_heads} heads, expected a multiple of the {kv_heads} heads of key");
            return refuse("query", None, message);
        }
        if self.format == KvFormat::Int4 && !head_size.is_multiple_of(2) {
            return refuse("key", None, format!("heads of {head_size} numbers, expected an even number for int4"));
        }
        expect("query", self.query.len(), &[total_rows, query_heads, head_size])?;
        expect("key", self.key.len(), &[total_rows, kv_heads, head_size])?;
        expect("value", self.value.len(), &[total_rows, kv_heads, head_size])?;
        check_offsets("row_offsets", self.row_offsets, self.pages.cached_len.len(), total_rows, "rows")
    }

    fn check_positions(&self) -> Result<(), InputError> {
        let Some(positions) = self.positions else {
            return match (self.rotation, self.slots) {
                (Some(_), _) => refuse("positions", None, "missing, expected beside cos and sin".into()),
                (_, Some(_)) => refuse("positions", None, "missing, expected beside token_pos".into()),
                _ => Ok(()),
            };
        };
        expect("positions", positions.len(), &[self.total_rows])?;
        let Some(Rotation { cos, sin, half_width, .. }) = self.rotation else { return Ok(()) };
        if half_width == 0 || half_width > self.head_size / 2 || !cos.len().is_multiple_of(half_width) {
            let message = format!("rows of {half_width}, expected 1 to {}, half a head", self.head_size / 2);
            return refuse("cos", None, message);
        }
        let rows = cos.len() / half_width;
        expect("sin", sin.len(), &[rows, half_width])?;
        match positions.iter().position(|&position| usize::try_from(position).map_or(true, |position| position >= rows))
        {
            Some(row) => {
                let message = format!("row {row} has position {}, expected 0 to {}", positions[row], rows as i64 - 1);
                refuse("positions", None, message)
            }
            None => Ok(()),
        }
    }

    /// Checks that every token has a page, and that no slot is written twice, or written and read as cached.
    fn check_tokens(&self) -> Result<(), InputError> {
        let page_size = self.pages.page_size;
        let mut written = Vec::new();
        for sequence in 0..self.sequences() {
            let (cached, new) = (self.cached(sequence), self.rows(sequence).len());
            self.pages.check_tokens(sequence, 0..cached + new)?;
            if new > 0 {
                let pages = self.pages.of(sequence);
                for (index, &page) in pages[cached / page_size..(cached + new).div_ceil(page_size)].iter().enumerate() {
                    let first = (cached / page_size + index) * page_size;
                    let slots = cached.max(first) - first..(cached + new).min(first + page_size) - first;
                    written.push((page, slots.start, slots.end, sequence));
                }
            }
        }
        written.sort_unstable();
        for pair in written.windows(2) {
            let [a, b] = [pair[0], pair[1]];
            if a.0 == b.0 && a.2 > b.1 {
                let message = format!("page {} slot {} would be written twice, by user {} too", a.0, b.1, a.3.min(b.3));
                return refuse("page_ids", Some(a.3.max(b.3)), message);
            }
        }
        self.check_reads(&written)
    }

    /// Checks that no slot that a sequence reads as cached is written by this call. `written`: page, first slot, end, sequence.
    fn check_reads(&self, written: &[(i32, usize, usize, usize)]) -> Result<(), InputError> {
        let page_size = self.pages.page_size;
        for sequence in (0..self.sequences()).filter(|&sequence| !self.rows(sequence).is_empty()) {
            let cached = self.cached(sequence);
            for (index, &page) in self.pages.of(sequence)[..cached.div_ceil(page_size)].iter().enumerate() {
                let read = page_size.min(cached - index * page_size);
                let first = written.partition_point(|&(written, ..)| written < page);
                let of_page = written[first..].iter().take_while(|&&(written, ..)| written == page);
                if let Some(&(_, slot, _, writer)) = of_page.min_by_key(|&&(_, slot, ..)| slot).filter(|w| w.1 < read) {
                    let message =
                        format!("page {page} slot {slot} has a cached token, and user {writer} would overwrite it");
                    return refuse("page_ids", Some(sequence), message);
                }
            }
        }
        Ok(())
    }

    fn check_slots(&self, slots: HeadSlots<'_>) -> Result<(), InputError> {
        let HeadSlots { write_slots, token_pos, len } = slots;
        expect("write_slots", write_slots.len(), &[self.total_rows, self.kv_heads])?;
        expect("token_pos", token_pos.len(), &[self.sequences(), self.kv_heads, len])?;
        let mut pages = Vec::new();
        for sequence in 0..self.sequences() {
            let used = (0..self.kv_heads)
                .flat_map(|head| {
                    let first = (sequence * self.kv_heads + head) * len;
                    token_pos[first..first + len].iter().rposition(|&position| position >= 0)
                })
                .max();
            self.pages.check_tokens(sequence, 0..used.map_or(0, |last| last + 1))?;
            for head in 0..self.kv_heads {
                let mut seen = vec![false; len];
                for row in self.rows(sequence) {
                    let slot = write_slots[row * self.kv_heads + head];
                    let Some(at) = usize::try_from(slot).ok().filter(|&at| at < len) else {
                        let message = format!("row {row}, head {head}: slot {slot}, expected 0 to {}", len as i64 - 1);
                        return refuse("write_slots", Some(sequence), message);
                    };
                    if std::mem::replace(&mut seen[at], true) {
                        let message = format!("row {row}, head {head}: slot {slot} is written twice");
                        return refuse("write_slots", Some(sequence), message);
                    }
                    // After the call the slot holds this row's token.
                    let held = token_pos[(sequence * self.kv_heads + head) * len + at];
                    let own = self.positions.map_or(-1, |positions| positions[row]);
                    if held != own || own < 0 {
                        let message =
                            format!("row {row}, head {head}: slot {slot} has position {held}, expected {own}");
                        return refuse("token_pos", Some(sequence), message);
                    }
                }
            }
            if !self.rows(sequence).is_empty() {
                let needed = used.map_or(0, |last| last / self.pages.page_size + 1);
                pages.extend(self.pages.of(sequence)[..needed].iter().map(|&page| (page, sequence)));
            }
        }
        pages.sort_unstable();
        match pages.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            Some(pair) => {
                let message = format!("page {} is user {}'s too, and its slots are written", pair[0].0, pair[0].1);
                refuse("page_ids", Some(pair[1].1), message)
            }
            None => Ok(()),
        }
    }
}
