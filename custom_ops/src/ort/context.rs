//! `OrtKernelContext`: the inputs, the outputs, the stream and the threads of one call.

use std::any::Any;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::{null, null_mut};

use ort_sys::{OrtApi, OrtKernelContext, OrtStatusPtr, OrtTensorTypeAndShapeInfo, OrtValue};
use pagoda_kernels::parallel::Parallel;
use parking_lot::Mutex;

use super::error::{OpError, check};
use super::schema::{Input, Output};
use super::tensor::{InputTensor, OutputTensor};

/// One call of an operator.
pub struct KernelContext {
    pub(super) api: &'static OrtApi,
    pub(super) raw: *mut OrtKernelContext,
    pub(super) inputs: &'static [Input],
    pub(super) outputs: &'static [Output],
}

impl KernelContext {
    /// The name of input `index` in the operator's specification.
    pub fn input_name(&self, index: usize) -> &'static str {
        self.inputs[index].name
    }

    /// Input `index`, which the specification requires.
    pub fn input(&self, index: usize) -> Result<InputTensor<'_>, OpError> {
        let name = self.input_name(index);
        self.optional_input(index)?.ok_or_else(|| OpError::invalid(format!("{name}: this input is missing")))
    }

    /// Input `index`, or `None` where the graph omits it.
    pub fn optional_input(&self, index: usize) -> Result<Option<InputTensor<'_>>, OpError> {
        let mut count = 0;
        let mut value: *const OrtValue = null();
        // SAFETY: the context is live for the whole call.
        unsafe {
            self.check((self.api.KernelContext_GetInputCount)(self.raw, &mut count))?;
            if index >= count {
                return Ok(None);
            }
            self.check((self.api.KernelContext_GetInput)(self.raw, index, &mut value))?;
        }
        if value.is_null() {
            return Ok(None);
        }
        let mut data = null_mut();
        let mut bytes = 0;
        let dims = self.dims(value)?;
        // SAFETY: the value is live for the whole call; the pointer is only read through.
        unsafe {
            self.check((self.api.GetTensorMutableData)(value.cast_mut(), &mut data))?;
            self.check((self.api.GetTensorSizeInBytes)(value, &mut bytes))?;
        }
        Ok(Some(InputTensor { name: self.input_name(index), dims, data, bytes, call: PhantomData }))
    }

    /// Output `index`, which the specification requires, allocated with the shape `dims`.
    pub fn output(&self, index: usize, dims: &[usize]) -> Result<OutputTensor, OpError> {
        let name = self.outputs[index].name;
        self.optional_output(index, dims)?
            .ok_or_else(|| OpError::invalid(format!("{name}: this output is missing, give it a name in the graph")))
    }

    /// Output `index`, allocated with the shape `dims`, or `None` where the graph omits it.
    pub fn optional_output(&self, index: usize, dims: &[usize]) -> Result<Option<OutputTensor>, OpError> {
        let dims: Vec<i64> = dims.iter().map(|&dim| dim as i64).collect();
        let (mut count, mut value) = (0, null_mut());
        let mut output = OutputTensor { name: self.outputs[index].name, data: null_mut(), bytes: 0 };
        // SAFETY: the context is live for the whole call and owns the value.
        unsafe {
            self.check((self.api.KernelContext_GetOutputCount)(self.raw, &mut count))?;
            if index >= count {
                return Ok(None);
            }
            self.check((self.api.KernelContext_GetOutput)(self.raw, index, dims.as_ptr(), dims.len(), &mut value))?;
            if value.is_null() {
                return Ok(None);
            }
            self.check((self.api.GetTensorMutableData)(value, &mut output.data))?;
            self.check((self.api.GetTensorSizeInBytes)(value, &mut output.bytes))?;
        }
        Ok(Some(output))
    }

    /// The CUDA stream of the run, for an operator of the CUDA provider.
    pub fn stream(&self) -> Result<*mut c_void, OpError> {
        let mut stream = null_mut();
        // SAFETY: the context is live for the whole call.
        self.check(unsafe { (self.api.KernelContext_GetGPUComputeStream)(self.raw, &mut stream) })?;
        Ok(stream)
    }

    fn dims(&self, value: *const OrtValue) -> Result<Vec<usize>, OpError> {
        struct Info(&'static OrtApi, *mut OrtTensorTypeAndShapeInfo);
        impl Drop for Info {
            fn drop(&mut self) {
                // SAFETY: created below, released once.
                unsafe { (self.0.ReleaseTensorTypeAndShapeInfo)(self.1) };
            }
        }
        let mut info = Info(self.api, null_mut());
        let mut rank = 0;
        // SAFETY: `value` is live, and `info` owns the description until it is dropped.
        unsafe {
            self.check((self.api.GetTensorTypeAndShape)(value, &mut info.1))?;
            self.check((self.api.GetDimensionsCount)(info.1, &mut rank))?;
            let mut dims = vec![0_i64; rank];
            self.check((self.api.GetDimensions)(info.1, dims.as_mut_ptr(), rank))?;
            Ok(dims.into_iter().map(|dim| dim as usize).collect())
        }
    }

    fn check(&self, status: OrtStatusPtr) -> Result<(), OpError> {
        check(self.api, status)
    }
}

// SAFETY: other threads use a context only through `Parallel::run`, which calls ParallelFor from the thread that runs the
// kernel, as ONNX Runtime requires.
unsafe impl Sync for KernelContext {}

/// The session's intra-op thread pool. A second pool would compete with it for the same cores.
impl Parallel for KernelContext {
    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        struct Work<'a> {
            task: &'a (dyn Fn(usize) + Sync),
            panic: Mutex<Option<Box<dyn Any + Send>>>,
        }
        unsafe extern "C" fn run_one(work: *mut c_void, index: usize) {
            // SAFETY: `work` outlives ParallelFor, which returns after the last task.
            let work = unsafe { &*work.cast::<Work>() };
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| (work.task)(index))) {
                *work.panic.lock() = Some(payload);
            }
        }
        match tasks {
            0 => {}
            1 => task(0),
            _ => {
                let mut work = Work { task, panic: Mutex::new(None) };
                // SAFETY: the context is live; `work` outlives the call.
                let status = unsafe {
                    (self.api.KernelContext_ParallelFor)(self.raw, run_one, tasks, 0, (&raw mut work).cast())
                };
                if let Err(error) = self.check(status) {
                    panic!("ONNX Runtime's ParallelFor: {}", error.message());
                }
                if let Some(payload) = work.panic.into_inner() {
                    resume_unwind(payload);
                }
            }
        }
    }
}
