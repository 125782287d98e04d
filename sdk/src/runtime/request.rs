//! The request of an asynchronous run; it owns its inputs and outputs until the run is done.

use std::sync::Arc;

use super::cancel::Cancel;
use crate::tensor::Tensor;

/// An asynchronous run. It holds everything that the run needs.
#[derive(Default)]
pub struct Request {
    pub(super) inputs: Vec<(String, Arc<Tensor>)>,
    pub(super) outputs: Vec<(String, Option<Arc<Tensor>>)>,
    pub(super) cancel: Option<Arc<Cancel>>,
}

impl Request {
    /// A request without inputs and outputs.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an input.
    #[must_use]
    pub fn input(mut self, name: impl Into<String>, tensor: Arc<Tensor>) -> Self {
        self.inputs.push((name.into(), tensor));
        self
    }

    /// Asks for an output in a new tensor.
    #[must_use]
    pub fn output(mut self, name: impl Into<String>) -> Self {
        self.outputs.push((name.into(), None));
        self
    }

    /// Asks for an output in an existing tensor.
    ///
    /// # Safety
    /// Until the run is done, nothing else writes to the tensor or reads it.
    #[must_use]
    pub unsafe fn output_into(mut self, name: impl Into<String>, tensor: Arc<Tensor>) -> Self {
        self.outputs.push((name.into(), Some(tensor)));
        self
    }

    /// Lets `cancel` stop the run.
    #[must_use]
    pub fn cancel(mut self, cancel: Arc<Cancel>) -> Self {
        self.cancel = Some(cancel);
        self
    }
}
