//! One run of a model with its pools, inputs and outputs bound in place.

use pagoda_custom_ops::side_channel::{with_arrivals, with_rows_each};

use super::bound_model::{BoundModel, Placed};
use super::graphs::Graphs;
use super::inputs::{Input, Sizes, tensor_in_place};
use crate::error::Result;
use crate::metrics;
use crate::runtime::Cancel;
use crate::tensor::{ElementType, Tensor};

/// Runs a batch and writes its output: to `output`, or to the GPU's memory that is bound for large batches. Uses a CUDA
/// graph if a shape fits.
///
/// # Safety
/// As for [`Model::run_bound`](crate::runtime::Model::run_bound), of the pools: the run writes only to pages of its own
/// leases, behind the rows that other runs may read.
pub(in super::super) unsafe fn run(
    bound: &BoundModel<'_>,
    graphs: Option<&Graphs>,
    sizes: &Sizes,
    inputs: &[Input<'_>],
    output: &mut [f32],
    cancel: Option<&Cancel>,
) -> Result<Placed> {
    if let Some(graphs) = graphs {
        // SAFETY: by contract.
        let run = |shape| unsafe { graphs.run(shape, inputs, bound, output) };
        let ran = graphs.find(sizes).map(run).transpose()?;
        metrics::engine_graph_batches(ran.map_or("other", |ran| if ran.is_some() { "graph" } else { "failed" })).inc();
        if let Some(placed) = ran.flatten() {
            return Ok(placed);
        }
    }
    let tensors = inputs.iter().map(|input| input.tensor()).collect::<Result<Vec<_>>>()?;
    let dims = [sizes.outputs as i64, bound.width as i64];
    let (result, placed) = match bound.output_on_device(sizes.outputs) {
        Some(memory) => (Tensor::on_device(ElementType::F32, &dims, memory, 0)?, Placed::Device),
        None => {
            // SAFETY: the buffer outlives the tensor, and nothing else uses it.
            let tensor = unsafe { tensor_in_place(&dims, output.as_mut_ptr(), output.len()) }?;
            (tensor, Placed::Host)
        }
    };
    let on_device = bound.tensors.iter().map(|tensor| tensor.of(sizes)).collect::<Result<Vec<_>>>()?;
    let mut fed: Vec<(&str, &Tensor)> = inputs.iter().map(|input| input.name).zip(&tensors).collect();
    fed.extend(bound.read.iter().map(|(name, tensor)| (*name, &***tensor)));
    let mut made: Vec<(&str, Option<&Tensor>)> = vec![(bound.output, Some(&result))];
    made.extend(bound.others.iter().map(|(name, tensor)| (*name, Some(tensor))));
    for (tensor, value) in bound.tensors.iter().zip(&on_device) {
        match tensor.is_output {
            true => made.push((tensor.name, Some(value))),
            false => fed.push((tensor.name, value)),
        }
    }
    for (input, output, tensor) in bound.pages()? {
        fed.push((input, tensor));
        made.push((output, Some(tensor)));
    }
    with_arrivals(!bound.pools_ready, || {
        with_rows_each(sizes.rows_each(), || {
            // SAFETY: only this run uses the buffers; the pools are by contract.
            unsafe { bound.model.run_bound(&fed, &made, cancel) }.map(|_| placed)
        })
    })
}
