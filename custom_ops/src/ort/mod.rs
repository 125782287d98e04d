//! The layer over ONNX Runtime's raw interface for custom operators (`OrtCustomOp`). It knows no operator.
//!
//! An operator implements [`Operator`], and [`Launch`] if it has CUDA kernels. [`custom_op`] turns the type into the C callbacks
//! that ONNX Runtime calls; [`table`] is how a family lists its operators.

mod context;
mod cuda;
mod custom_op;
pub mod domain;
mod element;
mod error;
mod info;
mod operator;
mod schema;
mod scratch;
mod shape;
mod table;
mod tensor;

pub use context::KernelContext;
pub use cuda::{Launch, OnCuda};
pub use custom_op::Versions;
pub use element::{BOOL, F32, I32, I64, OnnxElement, U8};
pub use error::OpError;
pub use info::KernelInfo;
pub use operator::{Operator, Provider};
pub use schema::{Input, Output};
pub use shape::{Dim, Shape, ShapeInferContext};
pub(crate) use table::operator;
pub use table::{KernelEntry, OperatorEntry};
pub use tensor::{InputTensor, OutputTensor};
