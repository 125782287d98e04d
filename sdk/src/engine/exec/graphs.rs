//! CUDA graphs of an engine: batches of some shapes, captured when one first comes, and replayed.

use std::sync::Arc;

use pagoda_kernels::cuda::{CUdeviceptr, DeviceMemory, Gpu, PinnedMemory, with_arrivals, with_settled};

use super::bound_model::BoundModel;
use super::inputs::{Input, Sizes};
use crate::error::{Error, Result};
use crate::runtime::Graph;
use crate::sync::Mutex;
use crate::tensor::{ElementType, Tensor};

/// Tensors begin at multiples of this.
const ALIGNMENT: usize = 256;

/// The graphs of one model on a GPU.
pub(in super::super) struct Graphs {
    device: u32,
    /// In the order in which they are looked through.
    shapes: Vec<Sizes>,
    /// What was captured, for each shape. Behind one lock: a replay has the model to itself anyhow.
    bound: Mutex<Vec<Slot>>,
}

/// What became of a shape.
enum Slot {
    /// No batch had it.
    New,
    Bound(Box<Bound>),
    /// It could not be bound; what has it runs without a graph.
    Failed,
}

/// A shape with its tensors on the GPU.
struct Bound {
    /// For times when nothing is on its way into the pools, and for others: that one waits in front of every layer's attention.
    graphs: [Graph; 2],
    /// The inputs one after the other, as they go there: in memory that the GPU copies from by itself.
    staging: PinnedMemory,
    /// Where each input begins.
    places: Vec<usize>,
    inputs: Arc<DeviceMemory>,
    /// In host memory, where the last of the model's kernels writes them: there is nothing to be copied after a run.
    scores: Arc<Tensor>,
}

/// A shape that batches are filled up to.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Shape {
    pub(in super::super) sequences: u32,
    pub(in super::super) rows: u32,
    /// Rows whose results are asked for; 0 = all.
    pub(in super::super) outputs: u32,
    /// Pages of keys and values; 0 = as many as sequences of the longest history have.
    pub(in super::super) pages: u32,
}

impl Shape {
    /// Checks shapes as the caller gave them.
    pub(in super::super) fn check_all(shapes: &[Self]) -> Result<()> {
        for (index, &Self { sequences: users, rows, outputs: candidates, .. }) in shapes.iter().enumerate() {
            if users == 0 || rows == 0 || candidates > rows {
                let message = format!(
                    "{users} users, {rows} rows, {candidates} candidates: expected 1 or more users and \
                     rows, and no more candidates than rows"
                );
                return Err(Error::invalid(format!("options.cuda_graphs[{index}]"), message));
            }
        }
        Ok(())
    }
}

impl Graphs {
    /// For the shapes that were asked for; `history_pages` is how many a user's longest history takes, `pages` how many there
    /// are.
    pub(in super::super) fn new(device: u32, shapes: &[Shape], history_pages: u64, pages: u64) -> Result<Self> {
        Shape::check_all(shapes)?;
        let mut sizes = Vec::with_capacity(shapes.len());
        for &Shape { sequences: users, rows, outputs: candidates, pages: wanted } in shapes {
            let most = history_pages.saturating_mul(users.into()).min(pages).max(1);
            sizes.push(Sizes {
                sequences: users as usize,
                rows: rows as usize,
                outputs: if candidates == 0 { rows } else { candidates } as usize,
                pages: if wanted == 0 { most as usize } else { wanted as usize },
            });
        }
        sizes.sort_by_key(|size| (size.rows, size.sequences, size.outputs, size.pages));
        sizes.dedup();
        let bound = Mutex::new(sizes.iter().map(|_| Slot::New).collect());
        Ok(Self { device, shapes: sizes, bound })
    }

    /// The first shape that a batch fits into.
    pub(super) fn find(&self, batch: &Sizes) -> Option<usize> {
        self.shapes.iter().position(|shape| shape.fits(batch))
    }

    /// Runs a batch as the graph of a shape and writes its scores; false if there is no graph because it could not be
    /// captured.
    ///
    /// # Safety
    /// As for [`Model::run_bound`](crate::runtime::Model::run_bound), of the pools.
    pub(super) unsafe fn run(
        &self,
        shape: usize,
        inputs: &[Input<'_>],
        model: &BoundModel<'_>,
        scores: &mut [f32],
    ) -> Result<bool> {
        let mut all = self.bound.lock();
        let (sizes, slot) = (self.shapes[shape], &mut all[shape]);
        if let Slot::New = slot {
            *slot = match Bound::new(self.device, shape as i32, &sizes, inputs, model) {
                Ok(bound) => Slot::Bound(Box::new(bound)),
                Err(error) => {
                    log::warn!(
                        "batches of {sizes:?} run without a CUDA graph, whose tensors could not be bound: {error}"
                    );
                    Slot::Failed
                }
            };
        }
        let Slot::Bound(bound) = slot else { return Ok(false) };
        let which = usize::from(!model.settled);
        if bound.graphs[which].has_failed() {
            return Ok(false);
        }
        // SAFETY: the caller's; the memory is used under this lock alone.
        let ran = with_arrivals(!model.settled, || unsafe { bound.run(which, &sizes, inputs, scores) });
        match ran {
            Err(error) if bound.graphs[which].has_failed() => {
                let times = if model.settled { "" } else { " while histories are on their way" };
                log::warn!(
                    "batches of {sizes:?} run without a CUDA graph on this thread{times}: it could not be captured: {error}"
                );
                Ok(false)
            }
            ran => ran.map(|()| true),
        }
    }
}

impl Bound {
    fn new(device: u32, number: i32, sizes: &Sizes, inputs: &[Input<'_>], model: &BoundModel<'_>) -> Result<Self> {
        let gpu = Gpu::shared(device as usize)?;
        let mut bytes = 0_usize;
        let mut places = Vec::with_capacity(inputs.len());
        for input in inputs {
            places.push(bytes);
            bytes += (sizes.of(input.dim) * input.numbers.element().bits() / 8).next_multiple_of(ALIGNMENT);
        }
        let memory = Arc::new(DeviceMemory::zeroed(gpu, bytes)?);
        let mut fed = Vec::with_capacity(inputs.len() + model.pools.len());
        for (input, &place) in inputs.iter().zip(&places) {
            let dims = [sizes.of(input.dim) as i64];
            let tensor = Tensor::on_device(input.numbers.element(), &dims, &memory, place)?;
            fed.push((input.name, Arc::new(tensor)));
        }
        let dims = [sizes.outputs as i64, model.width as i64];
        let scores = Arc::new(Tensor::zeros_pinned(gpu, ElementType::F32, &dims)?);
        let mut made = vec![(model.output, Arc::clone(&scores))];
        if let Some(kv) = model.kv {
            for (layer, (name_in, name_out)) in (0..).zip(&model.pools) {
                let pool = kv.pool(layer)?;
                fed.push((name_in, Arc::clone(pool)));
                made.push((name_out, Arc::clone(pool)));
            }
        }
        let graph = |which| Graph::bind(model.model, number * 2 + which, &fed, &made);
        let graphs = [graph(0)?, graph(1)?];
        let staging = PinnedMemory::zeroed(gpu, bytes)?;
        Ok(Self { graphs, staging, places, inputs: memory, scores })
    }

    /// # Safety
    /// As for [`Graphs::run`]; no one else uses this meanwhile.
    unsafe fn run(&mut self, which: usize, sizes: &Sizes, inputs: &[Input<'_>], scores: &mut [f32]) -> Result<()> {
        // SAFETY: as long as that, and `&mut self` is the only access: every run was waited for.
        let staging = unsafe { std::slice::from_raw_parts_mut(self.staging.data(), self.staging.bytes()) };
        for (input, place) in inputs.iter().zip(&self.places) {
            let bytes = sizes.of(input.dim) * input.numbers.element().bits() / 8;
            input.numbers.write(input.dim, &mut staging[*place..][..bytes]);
        }
        let (to, from, bytes) = (self.inputs.address(), self.staging.data(), self.staging.bytes());
        let graph = &self.graphs[which];
        // What comes up in front of a run is there before its first kernel.
        with_settled(to..to + bytes as CUdeviceptr, || {
            // SAFETY: the caller's; both memories are as long as that, and left alone until the run has ended, well or not.
            unsafe { graph.run(|stream| stream.upload(to, from, bytes)) }
        })?;
        scores.copy_from_slice(&self.scores.as_slice()?[..scores.len()]);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(sequences: u32, rows: u32, outputs: u32, pages: u32) -> Shape {
        Shape { sequences, rows, outputs, pages }
    }

    #[test]
    fn the_first_shape_that_fits_is_taken() {
        let graphs = Graphs::new(0, &[shape(8, 100, 0, 0), shape(1, 20, 10, 0), shape(8, 100, 0, 0)], 4, 20).unwrap();
        let batch =
            |users, rows, candidates, pages| graphs.find(&Sizes { sequences: users, rows, outputs: candidates, pages });
        assert_eq!(graphs.shapes.len(), 2);
        assert_eq!(batch(1, 20, 10, 4), Some(0));
        for (users, rows, candidates, pages) in [(2, 20, 10, 4), (1, 21, 10, 4), (1, 20, 11, 4), (1, 20, 10, 5)] {
            assert_eq!(batch(users, rows, candidates, pages), Some(1), "{users} {rows} {candidates} {pages}");
        }
        // No more pages than there are.
        assert_eq!((batch(8, 100, 100, 20), batch(8, 100, 100, 21)), (Some(1), None));
    }

    #[test]
    fn shapes_that_hold_nothing_are_refused() {
        for bad in [shape(0, 1, 0, 0), shape(1, 0, 0, 0), shape(1, 4, 5, 0)] {
            let error = Graphs::new(0, &[shape(1, 1, 0, 0), bad], 4, 20).err().expect("it is refused");
            assert_eq!(error.argument(), Some("options.cuda_graphs[1]"), "{error}");
        }
    }
}
