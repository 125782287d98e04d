//! CUDA graphs: runs that are bound once, captured by each thread the first time and replayed from then on.

use std::collections::HashMap;
use std::ffi::c_char;
use std::sync::Arc;
use std::thread::{self, ThreadId};
use std::time::Instant;

use ort_sys::OrtValue;

use super::model::Model;
use super::run_options::RunOptions;
use super::value::Value;
use crate::device::{CudaError, SideStream, capture, keep_counters, no_capture};
use crate::error::{Error, Result, Status};
use crate::sync::Mutex;
use crate::tensor::Tensor;

/// A run of a model on tensors at fixed addresses on its GPU. Their contents may change between runs.
pub(crate) struct Graph {
    model: Arc<Model>,
    options: RunOptions,
    /// Names of the inputs, then of the outputs.
    names: Vec<*const c_char>,
    inputs: Vec<Value>,
    outputs: Vec<Value>,
    /// The threads that have tried to capture it, and whether they succeeded: ONNX Runtime captures a graph per thread.
    /// A thread that failed does not retry, for ONNX Runtime may have an incomplete graph of it.
    captured: Mutex<HashMap<ThreadId, bool>>,
    _tensors: Vec<Arc<Tensor>>,
}

// SAFETY: the names are the model's and never change; the contract of `run` orders the runs.
unsafe impl Send for Graph {}
// SAFETY: as above.
unsafe impl Sync for Graph {}

impl Graph {
    /// Binds every input and output of a run; `number` is unique among the graphs of the model.
    pub(crate) fn bind(
        model: &Arc<Model>,
        number: i32,
        inputs: &[(&str, Arc<Tensor>)],
        outputs: &[(&str, Arc<Tensor>)],
    ) -> Result<Self> {
        if model.stream().is_none() {
            let message = "this model has no stream to replay graphs on: open it to capture runs, on a GPU whose driver this \
                           process can load (libcuda.so.1)";
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

    /// Whether its capture has failed on this thread; it must not be run there.
    pub(crate) fn has_failed(&self) -> bool {
        self.captured() == Some(false)
    }

    /// Whether it was captured on this thread; `None` if it has not run there.
    fn captured(&self) -> Option<bool> {
        self.captured.lock().get(&thread::current().id()).copied()
    }

    /// Runs after what `before` enqueues on the stream, and waits for it. The first run on a thread takes longer, for
    /// it is captured too.
    ///
    /// # Safety
    /// As for [`Model::run_bound`]: nothing else writes to the tensors of the graph meanwhile.
    pub(crate) unsafe fn run(&self, before: impl FnOnce(&SideStream) -> Result<(), CudaError>) -> Result<()> {
        let start = Instant::now();
        let alone = self.model.replaying().write();
        let captured = self.captured();
        let hold = if captured.is_some() { no_capture() } else { capture() };
        let (input_names, output_names) = self.names.split_at(self.inputs.len());
        let inputs: Vec<*const OrtValue> = self.inputs.iter().map(|value| value.raw().cast_const()).collect();
        let mut outputs: Vec<*mut OrtValue> = self.outputs.iter().map(Value::raw).collect();
        let stream = self.model.stream().expect("one binds where there is one");
        let run = || {
            before(stream)?;
            // SAFETY: as for an ordinary run.
            unsafe { self.model.run_raw(self.options.raw(), input_names, &inputs, output_names, &mut outputs) }
        };
        let result = if captured.is_some() {
            run()
        } else {
            // ONNX Runtime keeps the graph until the model is closed.
            let (result, counters) = keep_counters(run);
            self.model.keep(counters);
            result
        };
        drop((hold, alone));
        if result.is_err() {
            self.model.let_it_end();
        }
        if captured.is_none() {
            let mut captured = self.captured.lock();
            captured.insert(thread::current().id(), result.is_ok());
        }
        self.model.count(start, &result);
        result
    }
}
