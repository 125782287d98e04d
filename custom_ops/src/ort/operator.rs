//! What an operator implements.

use std::ffi::CStr;

use super::context::KernelContext;
use super::error::OpError;
use super::info::KernelInfo;
use super::schema::{Input, Output};
use super::shape::{Shape, ShapeInferContext};

/// An operator for one combination of element types and one execution provider. Its value is the kernel of one node.
pub trait Operator: Sized + Send + Sync + 'static {
    /// The execution provider whose memory the kernel works on.
    const PROVIDER: Provider = Provider::Cpu;
    /// The inputs in order.
    const INPUTS: &'static [Input];
    /// The outputs in order.
    const OUTPUTS: &'static [Output];

    /// The element types and shapes of the outputs in order, as far as the graph determines them. Called while the graph is
    /// resolved, before a session exists.
    fn infer_shapes(node: &ShapeInferContext) -> Result<Vec<Option<Shape>>, OpError>;

    /// Creates the kernel of a node: reads the attributes and checks them.
    fn new(info: &KernelInfo) -> Result<Self, OpError>;

    /// Runs one call. Any number of threads call at the same time.
    fn compute(&self, context: &KernelContext) -> Result<(), OpError>;
}

/// An execution provider of ONNX Runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provider {
    /// Tensors are in host memory.
    Cpu,
    /// Tensors are in the memory of an NVIDIA GPU.
    Cuda,
}

impl Provider {
    /// ONNX Runtime's name for the provider.
    pub fn name(self) -> &'static CStr {
        match self {
            Self::Cpu => c"CPUExecutionProvider",
            Self::Cuda => c"CUDAExecutionProvider",
        }
    }
}
