//! What an operator sees of ONNX Runtime: the attributes of its node, and in each call its inputs, its outputs and
//! the session's threads.

use std::any::Any;
use std::ffi::{CStr, c_char, c_void};
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::null_mut;
use std::sync::Mutex;

use ort_sys::{OrtApi, OrtKernelContext, OrtKernelInfo, OrtMemType, OrtStatusPtr, OrtTensorTypeAndShapeInfo, OrtValue};
use pagoda_kernels::parallel::Parallel;

use crate::op::{Input, OpError, Output};

/// The attributes of a node.
pub struct Attributes {
    pub(crate) api: &'static OrtApi,
    pub(crate) info: *const OrtKernelInfo,
}

impl Attributes {
    /// An integer, if the node has it.
    pub fn int(&self, name: &CStr) -> Result<Option<i64>, OpError> {
        match self.raw_int(name) {
            Some(value) => Ok(Some(value)),
            None if self.raw_float(name).is_some() => Err(Self::wrong_type(name, "a float", "an int")),
            None => self.absent(name, "an int"),
        }
    }

    /// A real number, if the node has it. An integer will do: Python's `alpha=2` makes one.
    pub fn float(&self, name: &CStr) -> Result<Option<f32>, OpError> {
        match self.raw_float(name).or_else(|| self.raw_int(name).map(|value| value as f32)) {
            Some(value) => Ok(Some(value)),
            None => self.absent(name, "a float"),
        }
    }

    /// A text, if the node has it.
    pub fn text(&self, name: &CStr) -> Result<Option<String>, OpError> {
        let read = |to: *mut c_char, size: &mut usize| {
            // SAFETY: `info` is live while the kernel is made; without a buffer only the size is asked for.
            self.succeeded(unsafe { (self.api.KernelInfoGetAttribute_string)(self.info, name.as_ptr(), to, size) })
        };
        let mut size = 0;
        if !read(null_mut(), &mut size) {
            let found = self.raw_int(name).map(|_| "an int").or(self.raw_float(name).map(|_| "a float"));
            return found.map_or(Ok(None), |found| Err(Self::wrong_type(name, found, "a string")));
        }
        let mut bytes = vec![0_u8; size];
        if !read(bytes.as_mut_ptr().cast(), &mut size) {
            return Err(OpError::failed(format!("{}: this attribute can not be read", name.to_string_lossy())));
        }
        // The size counts the NUL at the end.
        bytes.pop();
        let not_text = |_| OpError::invalid(format!("{}: this attribute is not UTF-8", name.to_string_lossy()));
        String::from_utf8(bytes).map(Some).map_err(not_text)
    }

    /// Whether the node has an input: a graph may leave out optional ones.
    pub fn has_input(&self, index: usize) -> Result<bool, OpError> {
        let (mut count, mut size) = (0, 0);
        // SAFETY: `info` is live while the kernel is made; without a buffer only the size of the name is asked for.
        unsafe {
            check(self.api, (self.api.KernelInfo_GetInputCount)(self.info, &mut count))?;
            if index >= count {
                return Ok(false);
            }
            check(self.api, (self.api.KernelInfo_GetInputName)(self.info, index, null_mut(), &mut size))?;
        }
        // The NUL at the end is all there is of the name of one that is left out.
        Ok(size > 1)
    }

    /// Whether the node has an output: a graph may leave out optional ones.
    pub fn has_output(&self, index: usize) -> Result<bool, OpError> {
        let (mut count, mut size) = (0, 0);
        // SAFETY: as in `has_input`.
        unsafe {
            check(self.api, (self.api.KernelInfo_GetOutputCount)(self.info, &mut count))?;
            if index >= count {
                return Ok(false);
            }
            check(self.api, (self.api.KernelInfo_GetOutputName)(self.info, index, null_mut(), &mut size))?;
        }
        Ok(size > 1)
    }

    /// Whether an input is part of the model: then it never changes, and no other node writes it.
    pub fn is_constant(&self, index: usize) -> Result<bool, OpError> {
        let (mut constant, mut value) = (0, std::ptr::null());
        // SAFETY: `info` is live while the kernel is made, and keeps the value.
        let asked =
            unsafe { (self.api.KernelInfoGetConstantInput_tensor)(self.info, index, &mut constant, &mut value) };
        check(self.api, asked)?;
        Ok(constant != 0)
    }

    /// Whether all of these are, but for those that the graph leaves out.
    pub fn are_constant(&self, inputs: &[usize]) -> Result<bool, OpError> {
        for &index in inputs {
            if self.has_input(index)? && !self.is_constant(index)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// A configuration entry of the session that the node is part of, if it is set.
    pub fn session_entry(&self, key: &CStr) -> Result<Option<String>, OpError> {
        let mut entries = null_mut();
        // SAFETY: `info` is live while the kernel is made; the entries are ours until they are released, once.
        let value = unsafe {
            check(self.api, (self.api.KernelInfo_GetConfigEntries)(self.info, &mut entries))?;
            let value = (self.api.GetKeyValue)(entries, key.as_ptr());
            let value = (!value.is_null()).then(|| CStr::from_ptr(value).to_str().map(str::to_owned));
            (self.api.ReleaseKeyValuePairs)(entries);
            value
        };
        let not_text = |_| OpError::invalid(format!("{}: this entry is not UTF-8", key.to_string_lossy()));
        value.transpose().map_err(not_text)
    }

    /// Which device the node is on: that of the memory that its provider gives it.
    pub fn device(&self) -> Result<usize, OpError> {
        let (mut allocator, mut memory, mut id) = (null_mut(), std::ptr::null(), 0);
        // SAFETY: `info` is live while the kernel is made; the allocator is ours until it is released, once, and what it
        // says of its memory belongs to it.
        unsafe {
            let default = OrtMemType::OrtMemTypeDefault;
            check(self.api, (self.api.KernelInfoGetAllocator)(self.info, default, &mut allocator))?;
            let asked = check(self.api, (self.api.AllocatorGetInfo)(allocator, &mut memory))
                .and_then(|()| check(self.api, (self.api.MemoryInfoGetId)(memory, &mut id)));
            (self.api.ReleaseAllocator)(allocator);
            asked?;
        }
        usize::try_from(id).map_err(|_| OpError::failed(format!("the node is on device {id}, which is none")))
    }

    fn raw_int(&self, name: &CStr) -> Option<i64> {
        let mut value = 0;
        // SAFETY: `info` is live while the kernel is made.
        self.succeeded(unsafe { (self.api.KernelInfoGetAttribute_int64)(self.info, name.as_ptr(), &mut value) })
            .then_some(value)
    }

    fn raw_float(&self, name: &CStr) -> Option<f32> {
        let mut value = 0.0;
        // SAFETY: `info` is live while the kernel is made.
        self.succeeded(unsafe { (self.api.KernelInfoGetAttribute_float)(self.info, name.as_ptr(), &mut value) })
            .then_some(value)
    }

    /// Nothing, unless the attribute is there as a text: to overlook it would give wrong numbers in silence.
    fn absent<V>(&self, name: &CStr, expected: &str) -> Result<Option<V>, OpError> {
        let mut size = 0;
        // SAFETY: `info` is live while the kernel is made; without a buffer only the size is asked for.
        let asked =
            unsafe { (self.api.KernelInfoGetAttribute_string)(self.info, name.as_ptr(), null_mut(), &mut size) };
        if self.succeeded(asked) { Err(Self::wrong_type(name, "a string", expected)) } else { Ok(None) }
    }

    fn wrong_type(name: &CStr, found: &str, expected: &str) -> OpError {
        OpError::invalid(format!("{}: this attribute is {found}, expected {expected}", name.to_string_lossy()))
    }

    /// The calls fail where an attribute is missing or has another type.
    fn succeeded(&self, status: OrtStatusPtr) -> bool {
        let succeeded = status.0.is_null();
        if !succeeded {
            // SAFETY: the status is ours to release, once.
            unsafe { (self.api.ReleaseStatus)(status.0) };
        }
        succeeded
    }
}

/// One call of an operator: its inputs, its outputs, its threads.
pub struct Context {
    pub(crate) api: &'static OrtApi,
    pub(crate) raw: *mut OrtKernelContext,
    pub(crate) inputs: &'static [Input],
    pub(crate) outputs: &'static [Output],
}

/// A tensor as ONNX Runtime hands it to an operator: in the memory of the operator's provider.
pub struct InputTensor<'a> {
    /// The name the specification gives it.
    pub name: &'static str,
    /// Its shape.
    pub dims: Vec<usize>,
    /// Where its elements begin. Null only if there are none.
    pub data: *const c_void,
    bytes: usize,
    lifetime: PhantomData<&'a ()>,
}

impl<'a> InputTensor<'a> {
    /// Its shape, if it has `N` dimensions.
    pub fn shape<const N: usize>(&self) -> Result<[usize; N], OpError> {
        self.dims.as_slice().try_into().map_err(|_| {
            OpError::invalid(format!(
                "{}: {N} dimensions expected, got {} ({:?})",
                self.name,
                self.dims.len(),
                self.dims
            ))
        })
    }

    /// Pages and page size, if it is a pool for rows of `heads` heads of `head_size` elements.
    pub fn pool_shape(&self, heads: usize, head_size: usize) -> Result<[usize; 2], OpError> {
        match self.shape()? {
            [pages, 2, page_size, h, d] if (h, d) == (heads, head_size) => Ok([pages, page_size]),
            _ => Err(OpError::invalid(format!(
                "{}: shape {:?} expected to be [pages, 2, page_size, {heads}, {head_size}]",
                self.name, self.dims
            ))),
        }
    }

    /// Where its elements begin on the GPU, for an operator of the CUDA provider.
    pub fn address(&self) -> u64 {
        self.data.addr() as u64
    }

    /// Its elements, for an operator of the CPU.
    ///
    /// # Safety
    /// The tensor is in host memory. `T` is the element type the operator was registered with for this input, and nothing
    /// writes to the tensor while the slice lives.
    pub unsafe fn slice<T>(&self) -> &'a [T] {
        let len = self.dims.iter().product();
        if len == 0 {
            return &[];
        }
        // SAFETY: ONNX Runtime's tensors are contiguous, aligned for their type, and live for the whole call.
        unsafe { std::slice::from_raw_parts(self.data.cast(), len) }
    }
}

/// The memory of an output, that of the operator's provider.
pub struct OutputTensor {
    /// The name the specification gives it.
    pub name: &'static str,
    /// Where its elements begin. Null only if there are none.
    pub data: *mut c_void,
    bytes: usize,
}

impl OutputTensor {
    /// Refuses inputs whose memory overlaps that of the output: a host binds memory as it likes.
    pub fn apart_from<'a>(&self, inputs: impl IntoIterator<Item = &'a InputTensor<'a>>) -> Result<(), OpError> {
        for input in inputs {
            self.check_apart(input.name, input.data.addr(), input.bytes)?;
        }
        Ok(())
    }

    /// Refuses another output whose memory overlaps.
    pub fn apart_from_output(&self, other: &OutputTensor) -> Result<(), OpError> {
        self.check_apart(other.name, other.data.addr(), other.bytes)
    }

    fn check_apart(&self, name: &str, start: usize, bytes: usize) -> Result<(), OpError> {
        let own = self.data.addr();
        if bytes > 0 && start < own + self.bytes && own < start + bytes {
            let message = format!("{name}: its memory overlaps that of the output {}: bind them apart", self.name);
            return Err(OpError::invalid(message));
        }
        Ok(())
    }

    /// Where its elements begin on the GPU, for an operator of the CUDA provider.
    pub fn address(&self) -> u64 {
        self.data.addr() as u64
    }

    /// Its elements, for an operator of the CPU.
    ///
    /// # Safety
    /// The tensor is in host memory. `T` is the element type the operator was registered with for this output and has no
    /// invalid bit patterns. Nothing else reads or writes the output while the slice lives.
    #[expect(clippy::mut_from_ref, reason = "the memory is ONNX Runtime's; that it is lent once is the contract")]
    pub unsafe fn slice_mut<T>(&self) -> &mut [T] {
        if self.bytes == 0 {
            return &mut [];
        }
        // SAFETY: ONNX Runtime's tensors are contiguous, aligned for their type, and live for the whole call.
        unsafe { std::slice::from_raw_parts_mut(self.data.cast(), self.bytes / size_of::<T>()) }
    }
}

impl Context {
    /// Input `index`, which the specification requires.
    pub fn input(&self, index: usize) -> Result<InputTensor<'_>, OpError> {
        let name = self.inputs[index].name;
        self.optional_input(index)?.ok_or_else(|| OpError::invalid(format!("{name}: this input is missing")))
    }

    /// Input `index`, or `None` where the graph leaves it out.
    pub fn optional_input(&self, index: usize) -> Result<Option<InputTensor<'_>>, OpError> {
        let mut count = 0;
        let mut value: *const OrtValue = std::ptr::null();
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
        Ok(Some(InputTensor { name: self.inputs[index].name, dims, data, bytes, lifetime: PhantomData }))
    }

    /// Output `index`, which the specification requires, with room for `dims`.
    pub fn output(&self, index: usize, dims: &[usize]) -> Result<OutputTensor, OpError> {
        let name = self.outputs[index].name;
        self.optional_output(index, dims)?
            .ok_or_else(|| OpError::invalid(format!("{name}: this output is missing, give it a name in the graph")))
    }

    /// Output `index` with room for `dims`, or `None` where the graph leaves it out.
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
                // SAFETY: made below, released once.
                unsafe { (self.0.ReleaseTensorTypeAndShapeInfo)(self.1) };
            }
        }
        let mut info = Info(self.api, null_mut());
        let mut rank = 0;
        // SAFETY: `value` is live, and the information is ours until it is dropped.
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

/// A status as a result.
pub(crate) fn check(api: &OrtApi, status: OrtStatusPtr) -> Result<(), OpError> {
    if status.0.is_null() {
        return Ok(());
    }
    // SAFETY: the status is ours to read and to release, once.
    unsafe {
        let message = CStr::from_ptr((api.GetErrorMessage)(status.0)).to_string_lossy().into_owned();
        (api.ReleaseStatus)(status.0);
        Err(OpError::failed(message))
    }
}

// SAFETY: the only thing other threads do with a context is what `Parallel::run` arranges, and ONNX Runtime's
// ParallelFor is made to be called from the thread that runs the kernel.
unsafe impl Sync for Context {}

/// The session's own intra-op threads; a second pool beside them would fight for the same cores.
impl Parallel for Context {
    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        struct Work<'a> {
            task: &'a (dyn Fn(usize) + Sync),
            panic: Mutex<Option<Box<dyn Any + Send>>>,
        }
        unsafe extern "C" fn one(work: *mut c_void, index: usize) {
            // SAFETY: `work` outlives ParallelFor, which returns after the last task.
            let work = unsafe { &*work.cast::<Work>() };
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| (work.task)(index))) {
                *work.panic.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(payload);
            }
        }
        match tasks {
            0 => {}
            1 => task(0),
            _ => {
                let mut work = Work { task, panic: Mutex::new(None) };
                // SAFETY: the context is live; `work` outlives the call.
                let status =
                    unsafe { (self.api.KernelContext_ParallelFor)(self.raw, one, tasks, 0, (&raw mut work).cast()) };
                if let Err(error) = self.check(status) {
                    panic!("ONNX Runtime's ParallelFor: {}", error.message());
                }
                if let Some(payload) = work.panic.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()) {
                    resume_unwind(payload);
                }
            }
        }
    }
}
