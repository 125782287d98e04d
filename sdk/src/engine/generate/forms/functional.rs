//! The functional form: the graph reads pages by Gather, and returns new rows.

use super::super::open_model::OpenModel;
use super::calls::{Sharing, divide};
use super::outputs::{copy_logits, in_place, over, over_bytes};
use super::rows::{PARTS, PoolRows};
use super::step::Step;
use crate::error::Result;
use crate::folder::generate::Functional;
use crate::tensor::{ElementType, Tensor};

/// The inputs of a call, in buffers that the next one reuses.
#[derive(Default)]
pub(in super::super) struct FunctionalRunner {
    input_ids: Vec<i64>,
    position_ids: Vec<i64>,
    /// Of keys, and of values.
    slots: [Vec<i64>; PARTS],
    mask: Vec<u8>,
}

impl FunctionalRunner {
    pub(super) fn run(
        &mut self,
        model: &OpenModel,
        names: &Functional,
        step: &Step<'_>,
        logits: &mut [f32],
    ) -> Result<()> {
        let most = model.pages as usize * model.folder.kv.page_size as usize;
        let pools = (0..model.folder.kv.layers as usize).map(|layer| PoolRows::new(model, layer));
        let pools = pools.collect::<Result<Vec<_>>>()?;
        for call in divide(step, Sharing::Padded, most) {
            self.fill(step, &call, &pools[0]);
            self.call(model, names, step, &call, &pools, logits)?;
        }
        Ok(())
    }

    fn fill(&mut self, step: &Step<'_>, call: &[usize], pool: &PoolRows<'_>) {
        let Self { input_ids, position_ids, slots, mask } = self;
        input_ids.clear();
        position_ids.clear();
        slots.iter_mut().for_each(Vec::clear);
        mask.clear();
        // Sequences are in order of their length.
        let longest = call[call.len() - 1];
        let (rows, past) = (step.rows(longest), step.cached(longest));
        for &index in call {
            let cached = step.cached(index);
            input_ids.extend(step.tokens(index).iter().map(|&token| i64::from(token)));
            position_ids.extend((cached..cached + rows).map(|position| position as i64));
            for (part, slots) in slots.iter_mut().enumerate() {
                let own = (0..cached).map(|token| pool.slot(step.pages(index), token, part) as i64);
                slots.extend(own);
                // Padding names a row that was written, for 0 * NaN is NaN.
                let written = (cached..past).map(|_| pool.slot(step.pages(longest), 0, part) as i64);
                slots.extend(written);
            }
            for row in 0..rows {
                let seen = |column| column < cached || (past..=past + row).contains(&column);
                mask.extend((0..past + rows).map(|column| u8::from(seen(column))));
            }
        }
    }

    fn call(
        &self,
        model: &OpenModel,
        names: &Functional,
        step: &Step<'_>,
        call: &[usize],
        pools: &[PoolRows<'_>],
        logits: &mut [f32],
    ) -> Result<()> {
        let kv = &model.folder.kv;
        let (heads, head_size, vocab) = (kv.heads as usize, kv.head_size as usize, model.folder.vocab_size as usize);
        let (batch, rows) = (call.len(), step.rows(call[0]));
        let past = self.slots[0].len() / batch;
        let bytes = self.mask.len();
        // SAFETY: the buffers outlive the tensors, and the run only reads them.
        let [ids, positions, key_slots, value_slots, mask] = unsafe {
            [
                over(&[batch, rows], &self.input_ids)?,
                over(&[batch, rows], &self.position_ids)?,
                over(&[batch, past], &self.slots[0])?,
                over(&[batch, past], &self.slots[1])?,
                over_bytes(ElementType::Bool, &[batch, 1, rows, past + rows], self.mask.as_ptr().cast_mut(), bytes)?,
            ]
        };
        let as_rows = |pool: &PoolRows<'_>| {
            let (data, bytes) = pool.memory()?;
            // SAFETY: the pool outlives the run, which reads rows of cached tokens alone.
            unsafe { over_bytes(kv.element, &[bytes / pool.row_bytes(), heads, head_size], data, bytes) }
        };
        let views = pools.iter().map(as_rows).collect::<Result<Vec<_>>>()?;
        let fixed = [
            (names.input_ids.as_str(), &ids),
            (names.position_ids.as_str(), &positions),
            (names.key_slots.as_str(), &key_slots),
            (names.value_slots.as_str(), &value_slots),
            (names.attention_mask.as_str(), &mask),
        ];
        let pool_inputs = names.kv_pools.iter().map(String::as_str).zip(&views);
        let fed: Vec<(&str, &Tensor)> = fixed.into_iter().chain(pool_inputs).collect();

        let place = in_place(step, call);
        let wanted = place.clone().map(|place| &mut logits[place.start * vocab..place.end * vocab]);
        // SAFETY: nothing else uses these logits during the run.
        let wanted = wanted.map(|wanted| unsafe {
            over_bytes(ElementType::F32, &[batch, rows, vocab], wanted.as_mut_ptr().cast(), size_of_val(wanted))
        });
        let wanted = wanted.transpose()?;
        // The rows of one sequence in one page are one piece of the pool.
        let first = step.cached(call[0]);
        let one_piece = batch == 1 && first % kv.page_size as usize + rows <= kv.page_size as usize;
        let mut in_pool = Vec::new();
        for (pool, part) in pools.iter().flat_map(|pool| (0..PARTS).map(move |part| (pool, part))).filter(|_| one_piece)
        {
            let ((data, bytes), row) = (pool.memory()?, pool.row_bytes());
            let at = pool.slot(step.pages(call[0]), first, part) * row;
            assert!(at + rows * row <= bytes, "a page is beyond the pool");
            // SAFETY: inside of the pool, by the line above. These rows are this step's own, and its run does not read them.
            in_pool.push(unsafe { over_bytes(kv.element, &[1, rows, heads, head_size], data.add(at), rows * row) }?);
        }
        let new = names.new_keys.iter().zip(&names.new_values).flat_map(|(key, value)| [key, value]);
        let mut made = vec![(names.logits.as_str(), wanted.as_ref())];
        made.extend(new.enumerate().map(|(at, name)| (name.as_str(), in_pool.get(at))));
        // SAFETY: only this run uses its buffers; of the pool it writes rows of its own, which it does not read.
        let outputs = unsafe { model.model.run_bound(&fed, &made, None) }?;
        if let Some(given) = &outputs[0] {
            copy_logits(step, call, vocab, given, logits)?;
        }
        if one_piece {
            return Ok(());
        }
        for (at, rows_made) in outputs[1..].iter().flatten().enumerate() {
            let (layer, part) = (at / PARTS, at % PARTS);
            put_rows(&pools[layer], part, step, call, rows_made)?;
        }
        Ok(())
    }
}

/// Puts the new rows of a layer, `[sequences, rows, heads, head_size]`, into their pages.
fn put_rows(pool: &PoolRows<'_>, part: usize, step: &Step<'_>, call: &[usize], made: &Tensor) -> Result<()> {
    let (data, bytes) = made.memory()?;
    let (rows, row) = (step.rows(call[0]), pool.row_bytes());
    super::outputs::check_bytes(bytes, call.len() * rows * row)?;
    for (sequence, &index) in call.iter().enumerate() {
        let from = data.cast::<u8>().wrapping_add(sequence * rows * row).cast_const();
        let cached = step.cached(index);
        // SAFETY: new tokens are this step's own; there are as many rows, by the check above.
        unsafe { pool.put(step.pages(index), part, cached..cached + rows, from) }?;
    }
    Ok(())
}
