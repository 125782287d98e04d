//! One run of a model whose pools, inputs and outputs are bound in place.

use pagoda_custom_ops::side_channel::with_arrivals;

use super::bound_model::BoundModel;
use super::graphs::Graphs;
use super::inputs::{Input, Sizes, borrowed};
use crate::error::Result;
use crate::metrics;
use crate::runtime::Cancel;
use crate::tensor::Tensor;

/// Runs a batch of these sizes and writes what comes out, as a CUDA graph where there is one for it.
///
/// # Safety
/// As for [`Model::run_bound`](crate::runtime::Model::run_bound), of the pools: of those the run writes only pages that its leases hold, beyond what others
/// may read.
pub(in super::super) unsafe fn run(
    bound: &BoundModel<'_>,
    graphs: Option<&Graphs>,
    sizes: &Sizes,
    inputs: &[Input<'_>],
    output: &mut [f32],
    cancel: Option<&Cancel>,
) -> Result<()> {
    if let Some(graphs) = graphs {
        // SAFETY: the caller's.
        let run = |shape| unsafe { graphs.run(shape, inputs, bound, output) };
        let ran = graphs.find(sizes).map(run).transpose()?;
        metrics::engine_graph_batches(ran.map_or("other", |ran| if ran { "graph" } else { "failed" })).inc();
        if ran == Some(true) {
            return Ok(());
        }
    }
    let tensors = inputs.iter().map(|input| input.numbers.tensor()).collect::<Result<Vec<_>>>()?;
    // SAFETY: the buffer outlives the tensor, and nothing else has it.
    let result = unsafe { borrowed(&[sizes.outputs as i64, bound.width as i64], output.as_mut_ptr(), output.len()) }?;
    let mut fed: Vec<(&str, &Tensor)> = inputs.iter().map(|input| input.name).zip(&tensors).collect();
    let mut made: Vec<(&str, Option<&Tensor>)> = vec![(bound.output, Some(&result))];
    if let Some(kv) = bound.kv {
        for (layer, (name_in, name_out)) in (0..).zip(&bound.pools) {
            let pool = kv.pool(layer)?;
            fed.push((name_in, pool));
            made.push((name_out, Some(pool)));
        }
    }
    with_arrivals(!bound.settled, || {
        // SAFETY: the buffers are this run's alone; of the pools see the caller's promise.
        unsafe { bound.model.run_bound(&fed, &made, cancel) }.map(drop)
    })
}
