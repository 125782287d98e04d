//! Past and present tensors of com.microsoft.GroupQueryAttention, which are one buffer with room behind the tokens: only new ones
//! are written. The buffer of a step is used by the next one, as far as the sequences are the same.

use super::super::open_model::OpenModel;
use super::calls::{Sharing, divide};
use super::outputs::{copy_logits, in_place, over, over_bytes};
use super::rows::{HeadMajor, PARTS, PoolRows};
use super::step::{SequenceKey, Step};
use crate::error::Result;
use crate::folder::generate::{PastAttention, PastPresent};
use crate::tensor::{ElementType, Tensor};

/// Columns that a buffer has for tokens to come.
const ROOM: usize = 64;
/// How many times as many places as sequences a buffer may have before it is made anew.
const MOST_PLACES: usize = 4;

/// The buffers of the last step, and the inputs of a call.
#[derive(Default)]
pub(in super::super) struct GroupQueryRunner {
    kept: Vec<PastRoom>,
    input_ids: Vec<i64>,
    position_ids: Vec<i64>,
    mask: Vec<i64>,
}

/// Past tensors with room, `[places, heads, columns, head_size]`.
struct PastRoom {
    places: usize,
    columns: usize,
    /// The sequence of each place, and how many of its tokens are there.
    members: Vec<(SequenceKey, usize)>,
    /// Keys and values of each layer.
    layers: Vec<[Tensor; PARTS]>,
}

impl GroupQueryRunner {
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
        let mut used = Vec::new();
        for call in divide(step, Sharing::from(PastAttention::GroupQuery), most) {
            let known = |room: &PastRoom| call.iter().filter(|&&index| room.place(step.keys[index]).is_some()).count();
            let nearest = (0..before.len()).max_by_key(|&at| known(&before[at])).filter(|&at| known(&before[at]) > 0);
            let room = nearest.map(|at| before.swap_remove(at));
            let mut room = PastRoom::for_call(room, model, step, &call)?;
            let call = room.arrange(model, step, &call)?;
            self.fill(step, &call);
            self.call(model, names, step, &call, &room, logits)?;
            room.store(model, step, &call)?;
            used.push(room);
        }
        self.kept = used;
        Ok(())
    }

    fn fill(&mut self, step: &Step<'_>, call: &[usize]) {
        let Self { input_ids, position_ids, mask, .. } = self;
        input_ids.clear();
        position_ids.clear();
        mask.clear();
        let width = width(step, call);
        for &index in call {
            let (cached, rows) = (step.cached(index), step.rows(index));
            input_ids.extend(step.tokens(index).iter().map(|&token| i64::from(token)));
            position_ids.extend((cached..cached + rows).map(|position| position as i64));
            // Of a row of the mask the operator takes the sum.
            mask.extend((0..width).map(|column| i64::from(column < cached + rows)));
        }
    }

    fn call(
        &self,
        model: &OpenModel,
        names: &PastPresent,
        step: &Step<'_>,
        call: &[usize],
        room: &PastRoom,
        logits: &mut [f32],
    ) -> Result<()> {
        let vocab = model.folder.vocab_size as usize;
        let (batch, rows) = (call.len(), step.rows(call[0]));
        // SAFETY: the buffers outlive the tensors, and the run only reads them.
        let [ids, positions, mask] = unsafe {
            [
                over(&[batch, rows], &self.input_ids)?,
                over(&[batch, rows], &self.position_ids)?,
                over(&[batch, width(step, call)], &self.mask)?,
            ]
        };
        let past = room.tensors(model, batch)?;
        let mut fed: Vec<(&str, &Tensor)> = vec![(&names.input_ids, &ids), (&names.attention_mask, &mask)];
        fed.extend(names.position_ids.as_ref().map(|name| (name.as_str(), &positions)));
        let place = in_place(step, call).filter(|_| names.logits_element == ElementType::F32);
        let wanted = place.map(|place| &mut logits[place.start * vocab..place.end * vocab]);
        // SAFETY: nothing else uses these logits during the run.
        let wanted = wanted.map(|wanted| unsafe {
            over_bytes(ElementType::F32, &[batch, rows, vocab], wanted.as_mut_ptr().cast(), size_of_val(wanted))
        });
        let wanted = wanted.transpose()?;
        let mut made = vec![(names.logits.as_str(), wanted.as_ref())];
        let of_layers = [(&names.past_keys, &names.present_keys), (&names.past_values, &names.present_values)];
        for (layer, tensors) in past.iter().enumerate() {
            for ((inputs, outputs), tensor) in of_layers.iter().zip(tensors) {
                fed.push((&inputs[layer], tensor));
                made.push((&outputs[layer], Some(tensor)));
            }
        }
        // SAFETY: only this run uses its buffers. The operator writes new tokens behind those that it reads.
        let outputs = unsafe { model.model.run_bound(&fed, &made, None) }?;
        match &outputs[0] {
            Some(given) => copy_logits(step, call, vocab, given, logits),
            None => Ok(()),
        }
    }
}

/// Tokens of the longest sequence, new ones included.
fn width(step: &Step<'_>, call: &[usize]) -> usize {
    call.iter().map(|&index| step.cached(index) + step.rows(index)).max().unwrap_or(0)
}

impl PastRoom {
    /// The buffers for a call: `room`, or new ones if that is too small, or much too large.
    fn for_call(room: Option<Self>, model: &OpenModel, step: &Step<'_>, call: &[usize]) -> Result<Self> {
        let (places, columns) = (call.len(), width(step, call));
        let fits =
            |room: &Self| room.columns >= columns && room.places >= places && room.places <= MOST_PLACES * places;
        // What does not fit is freed first.
        if let Some(room) = room.filter(fits) {
            return Ok(room);
        }
        let columns = columns.max((columns + columns / 8 + ROOM).min(model.folder.limits.max_context as usize));
        let bytes = places * columns * PoolRows::new(model, 0)?.row_bytes();
        let buffer = || Tensor::zeros(ElementType::U8, &[bytes as i64]);
        let layers = (0..model.folder.kv.layers).map(|_| Ok([buffer()?, buffer()?]));
        Ok(Self { places, columns, members: Vec::new(), layers: layers.collect::<Result<_>>()? })
    }

    /// The place of a sequence.
    fn place(&self, key: SequenceKey) -> Option<usize> {
        self.members.iter().position(|(member, _)| *member == key)
    }

    /// Gives each sequence of a call a place, its own if it has one, and brings what is missing there. Returns the call in the order
    /// of places.
    fn arrange(&mut self, model: &OpenModel, step: &Step<'_>, call: &[usize]) -> Result<Vec<usize>> {
        let mut places = vec![None; call.len()];
        let mut others = Vec::new();
        for &index in call {
            match self.place(step.keys[index]).filter(|&place| place < places.len()) {
                Some(place) => places[place] = Some(index),
                None => others.push(index),
            }
        }
        let arranged: Vec<usize> = places
            .into_iter()
            .map(|place| place.or_else(|| others.pop()))
            .collect::<Option<_>>()
            .expect("as many as places");
        let mut members = Vec::with_capacity(arranged.len());
        for (place, &index) in arranged.iter().enumerate() {
            let (key, cached) = (step.keys[index], step.cached(index));
            let held = self.members.get(place).filter(|(member, _)| *member == key).map_or(0, |(_, held)| *held);
            // Tokens behind those that are cached were guessed, and are written again.
            self.bring(model, step.pages(index), place, held.min(cached)..cached)?;
            members.push((key, cached));
        }
        self.members = members;
        Ok(arranged)
    }

    fn bring(&self, model: &OpenModel, pages: &[i32], place: usize, tokens: std::ops::Range<usize>) -> Result<()> {
        if tokens.is_empty() {
            return Ok(());
        }
        for (layer, part, at) in self.each_of(model, place)? {
            // SAFETY: cached tokens of a lease are only read; the buffer is this step's alone.
            unsafe { layer.gather(pages, part, tokens.clone(), &at) }?;
        }
        Ok(())
    }

    /// Puts the new tokens of a call into their pages.
    fn store(&mut self, model: &OpenModel, step: &Step<'_>, call: &[usize]) -> Result<()> {
        for (place, &index) in call.iter().enumerate() {
            let tokens = step.cached(index)..step.cached(index) + step.rows(index);
            for (layer, part, at) in self.each_of(model, place)? {
                // SAFETY: new tokens of a lease are this step's alone, and the run has written them to the buffer.
                unsafe { layer.scatter(step.pages(index), part, tokens.clone(), &at) }?;
            }
            self.members[place].1 = tokens.end;
        }
        Ok(())
    }

    /// The pool of each layer and part, and where a place has its tokens.
    fn each_of<'a>(&self, model: &'a OpenModel, place: usize) -> Result<Vec<(PoolRows<'a>, usize, HeadMajor)>> {
        let mut all = Vec::with_capacity(self.layers.len() * PARTS);
        for (layer, buffers) in self.layers.iter().enumerate() {
            for (part, buffer) in buffers.iter().enumerate() {
                let pool = PoolRows::new(model, layer)?;
                let data = buffer.memory()?.0.cast::<u8>().wrapping_add(place * self.columns * pool.row_bytes());
                all.push((pool, part, HeadMajor { data, columns: self.columns, first: 0 }));
            }
        }
        Ok(all)
    }

    /// The first places, as the graph takes them.
    fn tensors(&self, model: &OpenModel, batch: usize) -> Result<Vec<[Tensor; PARTS]>> {
        let kv = &model.folder.kv;
        let dims = [batch, kv.heads as usize, self.columns, kv.head_size as usize];
        let bytes = dims.iter().product::<usize>() * kv.element.bits() / 8;
        let tensor = |buffer: &Tensor| {
            let (data, all) = buffer.memory()?;
            assert!(bytes <= all, "a buffer has {} places", self.places);
            // SAFETY: the buffer outlives the run, and is this step's alone.
            unsafe { over_bytes(kv.element, &dims, data.cast(), bytes) }
        };
        self.layers.iter().map(|[keys, values]| Ok([tensor(keys)?, tensor(values)?])).collect()
    }
}
