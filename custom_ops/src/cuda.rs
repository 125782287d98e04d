//! Operators on ONNX Runtime's CUDA provider.
//!
//! Their tensors lie on the GPU, index tensors too: what those hold is not known here, and reading them back would stop the
//! stream. So what is checked is what the host knows, attributes and shapes; the kernels clamp every index (see
//! `pagoda_kernels::cuda`). A call waits for nothing, and memory to work in comes out of ONNX Runtime's arena, which has it since
//! the first run of the same shapes: so it can be captured into a CUDA graph. It keeps nothing from one call to the next, so
//! that any number may be under way on any streams. `EmbeddingBag` is the exception: it refuses to be captured, for what its
//! table lacks the host has to bring.

use std::ffi::CStr;

use pagoda_kernels::cuda::{CUstream, CudaError, Gpu};

use crate::context::{Attributes, Context};
use crate::op::{Input, OpError, Operator, Output};
use crate::shape::{Shape, Shapes};

/// An operator that can be put on a stream of a GPU.
pub trait Launch: Operator {
    /// Takes on the device what every call needs there, when the session is opened.
    fn prepare(&mut self, _gpu: &'static Gpu) -> Result<(), OpError> {
        Ok(())
    }

    /// Puts one call on a stream. Entered by many threads at once.
    fn launch(&self, gpu: &Gpu, stream: CUstream, context: &Context) -> Result<(), OpError>;
}

/// An operator on the CUDA provider: the same in everything but where it runs.
pub struct OnCuda<O> {
    operator: O,
    gpu: &'static Gpu,
}

impl<O: Launch> Operator for OnCuda<O> {
    const NAME: &'static CStr = O::NAME;
    const PROVIDER: &'static CStr = c"CUDAExecutionProvider";
    const INPUTS: &'static [Input] = O::INPUTS;
    const OUTPUTS: &'static [Output] = O::OUTPUTS;

    fn shapes(node: &Shapes) -> Result<Vec<Option<Shape>>, OpError> {
        O::shapes(node)
    }

    fn new(attributes: &Attributes) -> Result<Self, OpError> {
        let (mut operator, gpu) = (O::new(attributes)?, Gpu::shared(attributes.device()?)?);
        operator.prepare(gpu)?;
        Ok(Self { operator, gpu })
    }

    fn compute(&self, context: &Context) -> Result<(), OpError> {
        self.operator.launch(self.gpu, context.stream()?.cast(), context)
    }
}

impl From<CudaError> for OpError {
    fn from(error: CudaError) -> Self {
        match error {
            CudaError::Unsupported(message) => Self::invalid(format!("on the GPU: {message}")),
            other => Self::failed(other.to_string()),
        }
    }
}
