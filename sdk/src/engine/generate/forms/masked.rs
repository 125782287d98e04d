//! Past and present tensors of plain operators: past and new tokens touch, with padding before them that is zeros. What a call has
//! returned is the past of the next one, as long as its sequences are the same.

use super::super::open_model::OpenModel;
use super::calls::{Sharing, divide};
use super::outputs::{check_bytes, copy_logits, in_place, over, over_bytes};
use super::rows::{HeadMajor, PARTS, PoolRows};
use super::step::{SequenceKey, Step};
use crate::error::Result;
use crate::folder::generate::PastPresent;
use crate::tensor::{ElementType, Tensor};

/// What the calls of the last step have returned, and the inputs of a call.
#[derive(Default)]
pub(in super::super) struct MaskedRunner {
    kept: Vec<Past>,
    input_ids: Vec<i64>,
    position_ids: Vec<i64>,
    mask: Vec<i64>,
}

/// Keys and values of the sequences of a call, `[sequences, heads, columns, head_size]`, those of each ending with the last column.
struct Past {
    /// Each sequence, and how many tokens it has.
    members: Vec<(SequenceKey, usize)>,
    columns: usize,
    layers: Vec<[Tensor; PARTS]>,
}

impl MaskedRunner {
    pub(super) fn run(
        &mut self,
        model: &OpenModel,
        names: &PastPresent,
        step: &Step<'_>,
        logits: &mut [f32],
    ) -> Result<()> {
        // After an error there is nothing that could be wrong.
        let mut before = std::mem::take(&mut self.kept);
        let most = model.pages as usize * model.folder.kv.page_size as usize;
        let mut made = Vec::new();
        for call in divide(step, Sharing::from(names.attention), most) {
            let found = before.iter().position(|past| past.is_of(step, &call));
            let past = found.map(|at| before.swap_remove(at));
            let past = past.map_or_else(|| Past::gather(model, step, &call), Ok)?;
            self.fill(step, &call, past.columns);
            let present = self.call(model, names, step, &call, &past, logits)?;
            drop(past);
            present.store(model, step, &call)?;
            made.push(present);
        }
        self.kept = made;
        Ok(())
    }

    fn fill(&mut self, step: &Step<'_>, call: &[usize], columns: usize) {
        let Self { input_ids, position_ids, mask, .. } = self;
        input_ids.clear();
        position_ids.clear();
        mask.clear();
        for &index in call {
            let (cached, rows) = (step.cached(index), step.rows(index));
            input_ids.extend(step.tokens(index).iter().map(|&token| i64::from(token)));
            position_ids.extend((cached..cached + rows).map(|position| position as i64));
            mask.extend((0..columns + rows).map(|column| i64::from(column >= columns - cached)));
        }
    }

    fn call(
        &self,
        model: &OpenModel,
        names: &PastPresent,
        step: &Step<'_>,
        call: &[usize],
        past: &Past,
        logits: &mut [f32],
    ) -> Result<Past> {
        let vocab = model.folder.vocab_size as usize;
        let (batch, rows) = (call.len(), step.rows(call[0]));
        // SAFETY: the buffers outlive the tensors, and the run only reads them.
        let [ids, positions, mask] = unsafe {
            [
                over(&[batch, rows], &self.input_ids)?,
                over(&[batch, rows], &self.position_ids)?,
                over(&[batch, past.columns + rows], &self.mask)?,
            ]
        };
        let use_cache = Tensor::from_bools(&[1], &[past.columns > 0])?;
        let mut fed: Vec<(&str, &Tensor)> = vec![(&names.input_ids, &ids), (&names.attention_mask, &mask)];
        fed.extend(names.position_ids.as_ref().map(|name| (name.as_str(), &positions)));
        fed.extend(names.use_cache_branch.as_ref().map(|name| (name.as_str(), &use_cache)));
        let place = in_place(step, call).filter(|_| names.logits_element == ElementType::F32);
        let wanted = place.map(|place| &mut logits[place.start * vocab..place.end * vocab]);
        // SAFETY: nothing else uses these logits during the run.
        let wanted = wanted.map(|wanted| unsafe {
            over_bytes(ElementType::F32, &[batch, rows, vocab], wanted.as_mut_ptr().cast(), size_of_val(wanted))
        });
        let wanted = wanted.transpose()?;
        let mut made = vec![(names.logits.as_str(), wanted.as_ref())];
        let of_layers = [(&names.past_keys, &names.present_keys), (&names.past_values, &names.present_values)];
        for (layer, tensors) in past.layers.iter().enumerate() {
            for ((inputs, outputs), tensor) in of_layers.iter().zip(tensors) {
                fed.push((&inputs[layer], tensor));
                made.push((&outputs[layer], None));
            }
        }
        // SAFETY: only this run uses its buffers.
        let mut outputs = unsafe { model.model.run_bound(&fed, &made, None) }?.into_iter();
        if let Some(given) = outputs.next().flatten() {
            copy_logits(step, call, vocab, &given, logits)?;
        }
        let mut layers = Vec::with_capacity(past.layers.len());
        while let (Some(keys), Some(values)) = (outputs.next().flatten(), outputs.next().flatten()) {
            layers.push([keys, values]);
        }
        let members = call.iter().map(|&index| (step.keys[index], step.cached(index) + rows)).collect();
        Ok(Past { members, columns: past.columns + rows, layers })
    }
}

impl Past {
    /// Whether it has just what these sequences have cached. After a wrong guess it has more.
    fn is_of(&self, step: &Step<'_>, call: &[usize]) -> bool {
        self.members.len() == call.len()
            && self
                .members
                .iter()
                .zip(call)
                .all(|(&(key, tokens), &index)| key == step.keys[index] && tokens == step.cached(index))
    }

    /// What these sequences have in their pages.
    fn gather(model: &OpenModel, step: &Step<'_>, call: &[usize]) -> Result<Self> {
        let kv = &model.folder.kv;
        let columns = call.iter().map(|&index| step.cached(index)).max().unwrap_or(0);
        let dims = [call.len(), kv.heads as usize, columns, kv.head_size as usize].map(|dim| dim as i64);
        let mut layers = Vec::with_capacity(kv.layers as usize);
        for layer in 0..kv.layers as usize {
            let pool = PoolRows::new(model, layer)?;
            let tensors = [Tensor::zeros(kv.element, &dims)?, Tensor::zeros(kv.element, &dims)?];
            for (part, tensor) in tensors.iter().enumerate() {
                for (place, &index) in call.iter().enumerate() {
                    let cached = step.cached(index);
                    let at = head_major(tensor, &pool, place, columns, columns - cached)?;
                    // SAFETY: cached tokens of a lease are only read; the tensor is new.
                    unsafe { pool.gather(step.pages(index), part, 0..cached, &at) }?;
                }
            }
            layers.push(tensors);
        }
        let members = call.iter().map(|&index| (step.keys[index], step.cached(index))).collect();
        Ok(Self { members, columns, layers })
    }

    /// Puts the new tokens of a call into their pages.
    fn store(&self, model: &OpenModel, step: &Step<'_>, call: &[usize]) -> Result<()> {
        for (layer, tensors) in self.layers.iter().enumerate() {
            let pool = PoolRows::new(model, layer)?;
            for (part, tensor) in tensors.iter().enumerate() {
                check_bytes(tensor.memory()?.1, call.len() * self.columns * pool.row_bytes())?;
                for (place, (&index, (_, tokens))) in call.iter().zip(&self.members).enumerate() {
                    let at = head_major(tensor, &pool, place, self.columns, self.columns - tokens)?;
                    // SAFETY: new tokens of a lease are this step's alone; the tensor has them, by the check above.
                    unsafe { pool.scatter(step.pages(index), part, step.cached(index)..*tokens, &at) }?;
                }
            }
        }
        Ok(())
    }
}

/// The tokens of a sequence in a tensor with those of several.
fn head_major(tensor: &Tensor, pool: &PoolRows<'_>, place: usize, columns: usize, first: usize) -> Result<HeadMajor> {
    let data = tensor.memory()?.0.cast::<u8>().wrapping_add(place * columns * pool.row_bytes());
    Ok(HeadMajor { data, columns, first })
}
