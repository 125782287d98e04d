//! CUDA graphs: one for each configured batch shape, captured at its first batch and replayed from then on.

use std::ops::Range;
use std::sync::Arc;

use pagoda_custom_ops::side_channel::{with_arrivals, with_rows_each, with_settled};

use super::bound_model::{BoundModel, Placed};
use super::inputs::{Input, Sizes};
use crate::device::{CUdeviceptr, DeviceMemory, Gpu, PinnedMemory};
use crate::error::{Error, Result};
use crate::runtime::Graph;
use crate::sync::Mutex;
use crate::tensor::{ElementType, Tensor};

/// The alignment of tensors in bytes.
const ALIGNMENT: usize = 256;

/// The graphs of one model on a GPU.
pub(in super::super) struct Graphs {
    device: u32,
    /// In search order.
    shapes: Vec<Sizes>,
    /// The state of each shape. One lock for all: replays of one model can not overlap anyway.
    bound: Mutex<Vec<Slot>>,
}

/// The state of a shape.
enum Slot {
    /// No batch has used it yet.
    New,
    Bound(Box<BoundShape>),
    /// Binding failed. Batches of this shape run without a graph.
    Failed,
}

/// A shape with its tensors on the GPU.
struct BoundShape {
    /// Two variants: without copies into the pools in flight, and with them. The second waits before the attention of
    /// each layer.
    graphs: [Graph; 2],
    /// The inputs of a batch, contiguous in pinned memory, so that one asynchronous copy uploads them.
    staging: PinnedMemory,
    /// The offset of each input.
    offsets: Vec<usize>,
    inputs: Arc<DeviceMemory>,
    /// Where inputs are that are complete before the first kernel, and that none writes.
    settled: Arc<[Range<CUdeviceptr>]>,
    /// In pinned host memory. The last kernel writes it directly, so no copy follows a run. `None`: the output stays in
    /// [`BoundModel::device_output`].
    scores: Option<Arc<Tensor>>,
}

/// A shape that batches are padded to.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Shape {
    pub(in super::super) sequences: u32,
    pub(in super::super) rows: u32,
    /// Rows with results; 0 = all.
    pub(in super::super) outputs: u32,
    /// Pages of keys and values; 0 = enough for the longest history of each sequence.
    pub(in super::super) pages: u32,
    /// Rows of a sequence, at most; 0 = all.
    pub(in super::super) longest: u32,
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
    /// For the shapes that were asked for, which are checked; `history_pages` is how many a user's longest history takes,
    /// `pages` how many there are.
    pub(in super::super) fn new(device: u32, shapes: &[Shape], history_pages: u64, pages: u64) -> Self {
        let mut sizes = Vec::with_capacity(shapes.len());
        for &Shape { sequences: users, rows, outputs: candidates, pages: wanted, longest } in shapes {
            let most = history_pages.saturating_mul(users.into()).min(pages).max(1);
            sizes.push(Sizes {
                sequences: users as usize,
                rows: rows as usize,
                outputs: if candidates == 0 { rows } else { candidates } as usize,
                pages: if wanted == 0 { most as usize } else { wanted as usize },
                shortest: 0,
                longest: if longest == 0 { rows } else { longest } as usize,
            });
        }
        sizes.sort_by_key(|size| (size.rows, size.sequences, size.outputs, size.pages, size.longest));
        sizes.dedup();
        let bound = Mutex::new(sizes.iter().map(|_| Slot::New).collect());
        Self { device, shapes: sizes, bound }
    }

    /// The first shape that a batch fits into.
    pub(super) fn find(&self, batch: &Sizes) -> Option<usize> {
        self.shapes.iter().position(|shape| shape.fits(batch))
    }

    /// Runs a batch as the graph of a shape and writes its scores. Returns where they are, `None` if the capture failed.
    /// `model.device_output` is the same for all batches.
    ///
    /// # Safety
    /// As for [`Model::run_bound`](crate::runtime::Model::run_bound), of the pools.
    pub(super) unsafe fn run(
        &self,
        shape: usize,
        inputs: &[Input<'_>],
        model: &BoundModel<'_>,
        scores: &mut [f32],
    ) -> Result<Option<Placed>> {
        let mut all = self.bound.lock();
        let (sizes, slot) = (self.shapes[shape], &mut all[shape]);
        if let Slot::New = slot {
            *slot = match BoundShape::new(self.device, shape as i32, &sizes, inputs, model) {
                Ok(bound) => Slot::Bound(Box::new(bound)),
                Err(error) => {
                    log::warn!(
                        "batches of {sizes:?} run without a CUDA graph, whose tensors could not be bound: {error}"
                    );
                    Slot::Failed
                }
            };
        }
        let Slot::Bound(bound) = slot else { return Ok(None) };
        let variant = usize::from(!model.pools_ready);
        if bound.graphs[variant].has_failed() {
            return Ok(None);
        }
        // SAFETY: by contract; the memory is used only under this lock.
        let ran = with_arrivals(!model.pools_ready, || unsafe { bound.run(variant, &sizes, inputs, scores) });
        match ran {
            Err(error) if bound.graphs[variant].has_failed() => {
                let times = if model.pools_ready { "" } else { " while histories are copied in" };
                log::warn!(
                    "batches of {sizes:?} run without a CUDA graph on this thread{times}: it could not be captured: {error}"
                );
                Ok(None)
            }
            ran => ran.map(Some),
        }
    }
}

impl BoundShape {
    fn new(device: u32, number: i32, sizes: &Sizes, inputs: &[Input<'_>], model: &BoundModel<'_>) -> Result<Self> {
        let gpu = Gpu::shared(device as usize)?;
        let mut bytes = 0_usize;
        let mut offsets = Vec::with_capacity(inputs.len());
        for input in inputs {
            offsets.push(bytes);
            bytes += (sizes.of(input.dim) * input.numbers.element().bits() / 8).next_multiple_of(ALIGNMENT);
        }
        let memory = Arc::new(DeviceMemory::zeroed(gpu, bytes)?);
        let mut fed = Vec::with_capacity(inputs.len() + model.pools.len());
        for (input, &place) in inputs.iter().zip(&offsets) {
            let dims = [sizes.of(input.dim) as i64];
            let tensor = Tensor::on_device(input.numbers.element(), &dims, &memory, place)?;
            fed.push((input.name, Arc::new(tensor)));
        }
        let dims = [sizes.outputs as i64, model.width as i64];
        let (output, scores) = match model.output_on_device(sizes.outputs) {
            Some(memory) => (Arc::new(Tensor::on_device(ElementType::F32, &dims, memory, 0)?), None),
            None => {
                let scores = Arc::new(Tensor::zeros_pinned(gpu, ElementType::F32, &dims)?);
                (Arc::clone(&scores), Some(scores))
            }
        };
        let mut made = vec![(model.output, output)];
        for tensor in &model.tensors {
            let to = if tensor.is_output { &mut made } else { &mut fed };
            to.push((tensor.name, Arc::new(tensor.of(sizes)?)));
        }
        for (input, output, tensor) in model.pages()? {
            fed.push((input, Arc::clone(tensor)));
            made.push((output, Arc::clone(tensor)));
        }
        let graph = |variant| Graph::bind(model.model, number * 2 + variant, &fed, &made);
        let graphs = [graph(0)?, graph(1)?];
        let staging = PinnedMemory::zeroed(gpu, bytes)?;
        // The upload is enqueued before the run, and the others were waited for.
        let others = model.tensors.iter().filter(|tensor| !tensor.is_output).map(|tensor| tensor.addresses(sizes));
        let settled =
            std::iter::once(memory.address()..memory.address() + bytes as CUdeviceptr).chain(others).collect();
        Ok(Self { graphs, staging, offsets, inputs: memory, settled, scores })
    }

    /// # Safety
    /// As for [`Graphs::run`]; no other thread uses this at the same time.
    unsafe fn run(
        &mut self,
        variant: usize,
        sizes: &Sizes,
        inputs: &[Input<'_>],
        scores: &mut [f32],
    ) -> Result<Placed> {
        // SAFETY: the length is right, and `&mut self` is the only access: each run was waited for.
        let staging = unsafe { std::slice::from_raw_parts_mut(self.staging.data(), self.staging.bytes()) };
        for (input, place) in inputs.iter().zip(&self.offsets) {
            let bytes = sizes.of(input.dim) * input.numbers.element().bits() / 8;
            input.numbers.write(input.dim, &mut staging[*place..][..bytes]);
        }
        let (to, from, bytes) = (self.inputs.address(), self.staging.data(), self.staging.bytes());
        let graph = &self.graphs[variant];
        with_settled(&self.settled, || {
            with_rows_each(sizes.rows_each(), || {
                // SAFETY: by contract; both memories have this length, and nothing else uses them until the run has ended.
                unsafe { graph.run(|stream| stream.upload(to, from, bytes)) }
            })
        })?;
        let Some(pinned) = &self.scores else { return Ok(Placed::Device) };
        scores.copy_from_slice(&pinned.as_slice()?[..scores.len()]);
        Ok(Placed::Host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(sequences: u32, rows: u32, outputs: u32, pages: u32) -> Shape {
        Shape { sequences, rows, outputs, pages, longest: 0 }
    }

    #[test]
    fn the_first_shape_that_fits_is_taken() {
        let graphs = Graphs::new(0, &[shape(8, 100, 0, 0), shape(1, 20, 10, 0), shape(8, 100, 0, 0)], 4, 20);
        let batch = |users, rows, candidates, pages| {
            graphs.find(&Sizes { sequences: users, rows, outputs: candidates, pages, shortest: 1, longest: rows })
        };
        assert_eq!(graphs.shapes.len(), 2);
        assert_eq!(batch(1, 20, 10, 4), Some(0));
        for (users, rows, candidates, pages) in [(2, 20, 10, 4), (1, 21, 10, 4), (1, 20, 11, 4), (1, 20, 10, 5)] {
            assert_eq!(batch(users, rows, candidates, pages), Some(1), "{users} {rows} {candidates} {pages}");
        }
        // Limited by the pages of the pool.
        assert_eq!((batch(8, 100, 100, 20), batch(8, 100, 100, 21)), (Some(1), None));
    }

    #[test]
    fn shapes_for_single_rows_are_taken_first_and_for_no_others() {
        let single = Shape { longest: 1, ..shape(4, 4, 0, 0) };
        let graphs = Graphs::new(0, &[shape(4, 4, 0, 0), single], 4, 20);
        let batch = |longest| graphs.find(&Sizes { sequences: 2, rows: 4, outputs: 2, pages: 4, shortest: 1, longest });
        assert_eq!((batch(1), batch(2), batch(4)), (Some(0), Some(1), Some(1)));
        assert_eq!([&graphs.shapes[0], &graphs.shapes[1]].map(Sizes::rows_each), [0..=1, 0..=4]);
    }

    #[test]
    fn shapes_that_hold_nothing_are_refused() {
        for bad in [shape(0, 1, 0, 0), shape(1, 0, 0, 0), shape(1, 4, 5, 0)] {
            let error = Shape::check_all(&[shape(1, 1, 0, 0), bad]).expect_err("it is refused");
            assert_eq!(error.argument(), Some("options.cuda_graphs[1]"), "{error}");
        }
    }
}
