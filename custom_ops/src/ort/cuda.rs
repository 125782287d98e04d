//! Operators on ONNX Runtime's CUDA provider.
//!
//! All tensors are in GPU memory, index tensors included. Reading an index tensor back would synchronise the stream, so the
//! host checks attributes and shapes only, and the kernels clamp every index (see `pagoda_kernels::cuda`).
//!
//! A launch does not wait. Its scratch memory comes from ONNX Runtime's arena, which holds it since the first run of the same
//! shapes. That makes a launch safe to capture into a CUDA graph. An operator that needs the host during a call rejects
//! capture. A launch keeps no state between calls, so any number of launches can be in flight on any streams.

use pagoda_kernels::cuda::{CUstream, Gpu};

use super::context::KernelContext;
use super::error::OpError;
use super::info::KernelInfo;
use super::operator::{Operator, Provider};
use super::schema::{Input, Output};
use super::shape::{Shape, ShapeInferContext};

/// An operator that has CUDA kernels.
pub trait Launch: Operator {
    /// Sets up on the device what every call needs. Called once, when the session is created.
    fn prepare(&mut self, _gpu: &'static Gpu) -> Result<(), OpError> {
        Ok(())
    }

    /// Enqueues one call on a stream. Any number of threads call at the same time.
    fn launch(&self, gpu: &Gpu, stream: CUstream, context: &KernelContext) -> Result<(), OpError>;
}

/// The operator `O` on the CUDA provider, with the same inputs, outputs, attributes and shapes.
pub struct OnCuda<O> {
    operator: O,
    gpu: &'static Gpu,
}

impl<O: Launch> Operator for OnCuda<O> {
    const PROVIDER: Provider = Provider::Cuda;
    const INPUTS: &'static [Input] = O::INPUTS;
    const OUTPUTS: &'static [Output] = O::OUTPUTS;

    fn infer_shapes(node: &ShapeInferContext) -> Result<Vec<Option<Shape>>, OpError> {
        O::infer_shapes(node)
    }

    fn new(info: &KernelInfo) -> Result<Self, OpError> {
        let (mut operator, gpu) = (O::new(info)?, Gpu::shared(info.device()?)?);
        operator.prepare(gpu)?;
        Ok(Self { operator, gpu })
    }

    fn compute(&self, context: &KernelContext) -> Result<(), OpError> {
        self.operator.launch(self.gpu, context.stream()?.cast(), context)
    }
}
