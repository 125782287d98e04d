//! CUDA graphs: runs that are bound once, captured by each thread the first time and replayed from then on.

use std::collections::HashSet;
use std::ffi::c_char;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Instant;

use ort_sys::OrtValue;
use pagoda_kernels::cuda::{CudaError, SideStream, capture, no_capture};

use super::model::Model;
use super::options::RunOptions;
use super::value::Value;
use crate::error::{Error, Result, Status};
use crate::tensor::Tensor;

/// A run of a model on tensors that stay where they are on its GPU. What they hold may change between runs.
pub(crate) struct Graph {
    model: Arc<Model>,
    options: RunOptions,
    /// Of the inputs, then of the outputs.
    names: Vec<*const c_char>,
    inputs: Vec<Value>,
    outputs: Vec<Value>,
    /// Who has captured it: ONNX Runtime has a graph for each thread that runs.
    captured: Mutex<HashSet<ThreadId>>,
    _tensors: Vec<Arc<Tensor>>,
}

// SAFETY: the names are the model's and never change; who runs when is the contract of `run`.
unsafe impl Send for Graph {}
// SAFETY: as above.
unsafe impl Sync for Graph {}

impl Graph {
    /// Binds every input and output of a run; `number` is that of no other graph of the model.
    pub(crate) fn bind(
        model: &Arc<Model>,
        number: i32,
        inputs: &[(&str, Arc<Tensor>)],
        outputs: &[(&str, Arc<Tensor>)],
    ) -> Result<Self> {
        if model.stream().is_none() {
            let message = "this model has no stream to replay graphs on: open it with `cuda_graphs`, on a GPU whose driver \
                           this process can load (libcuda.so.1)";
            return Err(Error::new(Status::Unsupported, message));
        }
        let tensors: Vec<_> = inputs.iter().chain(outputs).map(|(_, tensor)| Arc::clone(tensor)).collect();
        if let Some(elsewhere) = tensors.iter().find(|tensor| tensor.device().is_none()) {
            return Err(Error::new(Status::Internal, format!("{elsewhere:?} is not on the GPU")));
        }
        let api = model.api();
        let borrowed: Vec<_> = inputs.iter().map(|(name, tensor)| (*name, &**tensor)).collect();
        let bound: Vec<_> = outputs.iter().map(|(name, tensor)| (*name, Some(&**tensor))).collect();
        let values = |list: &[(&str, Arc<Tensor>)]| -> Result<Vec<_>> {
            list.iter().map(|(_, tensor)| Value::over(api, tensor)).collect()
        };
        Ok(Self {
            options: RunOptions::new(api, number)?,
            names: model.resolve(&borrowed, &bound)?,
            inputs: values(inputs)?,
            outputs: values(outputs)?,
            captured: Mutex::default(),
            model: Arc::clone(model),
            _tensors: tensors,
        })
    }

    /// Whether it has run on this thread.
    pub(crate) fn is_captured(&self) -> bool {
        self.captured.lock().unwrap_or_else(PoisonError::into_inner).contains(&thread::current().id())
    }

    /// Runs behind what `before` puts on the stream, and waits for it. The first time on a thread takes longer: the run is done,
    /// and captured.
    ///
    /// # Safety
    /// As for [`Model::run_bound`]; no one else writes to the tensors of the graph meanwhile.
    pub(crate) unsafe fn run(&self, before: impl FnOnce(&SideStream) -> Result<(), CudaError>) -> Result<()> {
        let start = Instant::now();
        let alone = self.model.replaying().write().unwrap_or_else(PoisonError::into_inner);
        let hold = if self.is_captured() { no_capture() } else { capture() };
        let (input_names, output_names) = self.names.split_at(self.inputs.len());
        let inputs: Vec<*const OrtValue> = self.inputs.iter().map(|value| value.raw().cast_const()).collect();
        let mut outputs: Vec<*mut OrtValue> = self.outputs.iter().map(Value::raw).collect();
        let stream = self.model.stream().expect("one binds where there is one");
        let result = before(stream).map_err(Error::from).and_then(|()| {
            // SAFETY: as for an ordinary run.
            unsafe { self.model.run_raw(self.options.raw(), input_names, &inputs, output_names, &mut outputs) }
        });
        drop((hold, alone));
        match &result {
            Ok(()) => {
                self.captured.lock().unwrap_or_else(PoisonError::into_inner).insert(thread::current().id());
            }
            Err(_) => self.model.let_it_end(),
        }
        self.model.count(start, &result);
        result
    }
}
