//! A thin layer over ONNX Runtime's raw custom operators.
//!
//! An operator is a [`Operator`]: `&self` kernels that any number of threads enter at once. This layer keeps what the
//! raw interface makes easy to get wrong in one place: the host's API table travels with each operator (a process can
//! hold several ONNX Runtimes), no panic crosses into C++, and work runs on the session's own threads.

use std::any::Any;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::null_mut;
use std::sync::Mutex;

use ort_sys::{
    ONNXTensorElementDataType as OnnxType, ORT_API_VERSION, OrtApi, OrtCustomOp,
    OrtCustomOpInputOutputCharacteristic as Arity, OrtErrorCode, OrtKernelContext, OrtKernelInfo, OrtMemType,
    OrtShapeInferContext, OrtStatusPtr, OrtTensorTypeAndShapeInfo, OrtValue,
};
use pagoda_kernels::InputError;
use pagoda_kernels::parallel::Parallel;

/// An operator of the ai.pagoda domain with one output, which has the type and shape of one of its inputs.
pub trait Operator: Sized + Send + Sync + 'static {
    /// Its name in the graph.
    const NAME: &'static CStr;
    /// Its inputs in order.
    const INPUTS: &'static [Input];
    /// The input whose type and shape the output has.
    const OUTPUT_LIKE: usize;

    /// Reads the attributes.
    fn new(attributes: &Attributes) -> Result<Self, OpError>;

    /// One call. Entered by many threads at once.
    fn compute(&self, context: &Context) -> Result<(), OpError>;
}

/// One input of an operator.
pub struct Input {
    /// The name the specification gives it; error messages use it.
    pub name: &'static str,
    /// Its element type.
    pub element: OnnxType,
    /// Whether a graph may leave it out.
    pub optional: bool,
}

impl Input {
    /// An input that must be there.
    pub const fn required(name: &'static str, element: OnnxType) -> Self {
        Self { name, element, optional: false }
    }

    /// An input that may be left out.
    pub const fn optional(name: &'static str, element: OnnxType) -> Self {
        Self { name, element, optional: true }
    }
}

/// Why an operator refused or failed.
pub struct OpError {
    code: OrtErrorCode,
    message: String,
}

impl OpError {
    /// The caller gave something that can not be used.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self { code: OrtErrorCode::ORT_INVALID_ARGUMENT, message: message.into() }
    }

    fn panicked(payload: &(dyn Any + Send)) -> Self {
        let text = payload.downcast_ref::<&str>().copied();
        let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message");
        Self { code: OrtErrorCode::ORT_RUNTIME_EXCEPTION, message: format!("internal error (a panic): {text}") }
    }

    fn into_status(self, api: &OrtApi) -> OrtStatusPtr {
        let message = CString::new(self.message.replace('\0', "\\0")).unwrap_or_default();
        // SAFETY: the message is a C string for the length of the call; ONNX Runtime copies it.
        unsafe { (api.CreateStatus)(self.code, message.as_ptr()) }
    }
}

impl From<InputError> for OpError {
    fn from(error: InputError) -> Self {
        Self::invalid(error.to_string())
    }
}

/// Makes the raw operator of `O` for one ONNX Runtime. It is leaked: sessions keep pointers to it.
pub fn leak<O: Operator>(api: &'static OrtApi) -> *const OrtCustomOp {
    let raw = OrtCustomOp {
        version: ORT_API_VERSION,
        CreateKernel: None,
        GetName: Some(name::<O>),
        GetExecutionProviderType: Some(provider),
        GetInputType: Some(input_type::<O>),
        GetInputTypeCount: Some(input_count::<O>),
        GetOutputType: Some(output_type::<O>),
        GetOutputTypeCount: Some(output_count),
        KernelCompute: None,
        KernelDestroy: Some(destroy::<O>),
        GetInputCharacteristic: Some(input_arity::<O>),
        GetOutputCharacteristic: Some(output_arity),
        GetInputMemoryType: Some(input_memory),
        GetVariadicInputMinArity: Some(no_variadic),
        GetVariadicInputHomogeneity: Some(no_variadic),
        GetVariadicOutputMinArity: Some(no_variadic),
        GetVariadicOutputHomogeneity: Some(no_variadic),
        CreateKernelV2: Some(create::<O>),
        KernelComputeV2: Some(compute::<O>),
        InferOutputShapeFn: Some(infer_shape::<O>),
        GetStartVersion: Some(first_version),
        GetEndVersion: Some(last_version),
        GetMayInplace: None,
        ReleaseMayInplace: None,
        GetAliasMap: None,
        ReleaseAliasMap: None,
    };
    // `raw` is the first field of a repr(C) struct: a pointer to one is a pointer to the other.
    std::ptr::from_ref(Box::leak(Box::new(Registered { raw, api }))).cast()
}

/// What ONNX Runtime knows as an `OrtCustomOp`, with the API table it belongs to: shape inference is not handed one.
#[repr(C)]
struct Registered {
    raw: OrtCustomOp,
    api: &'static OrtApi,
}

/// What ONNX Runtime holds for one node.
struct Kernel<O> {
    operator: O,
    api: &'static OrtApi,
}

unsafe extern "system" fn name<O: Operator>(_: *const OrtCustomOp) -> *const c_char {
    O::NAME.as_ptr()
}

unsafe extern "system" fn provider(_: *const OrtCustomOp) -> *const c_char {
    c"CPUExecutionProvider".as_ptr()
}

unsafe extern "system" fn input_type<O: Operator>(_: *const OrtCustomOp, index: usize) -> OnnxType {
    O::INPUTS.get(index).map_or(OnnxType::ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED, |input| input.element)
}

unsafe extern "system" fn input_count<O: Operator>(_: *const OrtCustomOp) -> usize {
    O::INPUTS.len()
}

unsafe extern "system" fn input_arity<O: Operator>(_: *const OrtCustomOp, index: usize) -> Arity {
    match O::INPUTS.get(index) {
        Some(Input { optional: true, .. }) => Arity::INPUT_OUTPUT_OPTIONAL,
        _ => Arity::INPUT_OUTPUT_REQUIRED,
    }
}

unsafe extern "system" fn input_memory(_: *const OrtCustomOp, _: usize) -> OrtMemType {
    OrtMemType::OrtMemTypeDefault
}

unsafe extern "system" fn output_type<O: Operator>(_: *const OrtCustomOp, _: usize) -> OnnxType {
    O::INPUTS[O::OUTPUT_LIKE].element
}

unsafe extern "system" fn output_count(_: *const OrtCustomOp) -> usize {
    1
}

unsafe extern "system" fn output_arity(_: *const OrtCustomOp, _: usize) -> Arity {
    Arity::INPUT_OUTPUT_REQUIRED
}

unsafe extern "system" fn no_variadic(_: *const OrtCustomOp) -> c_int {
    0
}

unsafe extern "system" fn first_version(_: *const OrtCustomOp) -> c_int {
    1
}

unsafe extern "system" fn last_version(_: *const OrtCustomOp) -> c_int {
    c_int::MAX
}

unsafe extern "system" fn create<O: Operator>(
    _: *const OrtCustomOp,
    api: *const OrtApi,
    info: *const OrtKernelInfo,
    kernel: *mut *mut c_void,
) -> OrtStatusPtr {
    // SAFETY: ONNX Runtime passes its own table, which lives as long as the library.
    let api: &'static OrtApi = unsafe { &*api };
    guarded(api, || {
        let operator = O::new(&Attributes { api, info })?;
        // SAFETY: `kernel` is where ONNX Runtime wants the pointer.
        unsafe { *kernel = Box::into_raw(Box::new(Kernel { operator, api })).cast() };
        Ok(())
    })
}

unsafe extern "system" fn compute<O: Operator>(kernel: *mut c_void, context: *mut OrtKernelContext) -> OrtStatusPtr {
    // SAFETY: the pointer `create` made; only shared references are ever taken, so threads may enter together.
    let kernel = unsafe { &*kernel.cast::<Kernel<O>>() };
    let context = Context { api: kernel.api, raw: context, inputs: O::INPUTS };
    guarded(kernel.api, || kernel.operator.compute(&context))
}

unsafe extern "system" fn destroy<O: Operator>(kernel: *mut c_void) {
    // SAFETY: the pointer `create` made; ONNX Runtime destroys a kernel once, after its last call.
    drop(unsafe { Box::from_raw(kernel.cast::<Kernel<O>>()) });
}

unsafe extern "system" fn infer_shape<O: Operator>(
    op: *const OrtCustomOp,
    context: *mut OrtShapeInferContext,
) -> OrtStatusPtr {
    // SAFETY: the pointer `leak` made.
    let api = unsafe { (*op.cast::<Registered>()).api };
    let mut info = null_mut();
    // SAFETY: plain calls with live pointers; the information belongs to the context.
    unsafe {
        let status = (api.ShapeInferContext_GetInputTypeShape)(context, O::OUTPUT_LIKE, &mut info);
        if !status.0.is_null() {
            return status;
        }
        (api.ShapeInferContext_SetOutputTypeShape)(context, 0, info)
    }
}

/// Runs `body`; errors and panics become a status.
fn guarded(api: &OrtApi, body: impl FnOnce() -> Result<(), OpError>) -> OrtStatusPtr {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => OrtStatusPtr(null_mut()),
        Ok(Err(error)) => error.into_status(api),
        Err(payload) => OpError::panicked(payload.as_ref()).into_status(api),
    }
}

/// The attributes of a node.
pub struct Attributes {
    api: &'static OrtApi,
    info: *const OrtKernelInfo,
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

/// One call of an operator: its inputs, its output, its threads.
pub struct Context {
    api: &'static OrtApi,
    raw: *mut OrtKernelContext,
    inputs: &'static [Input],
}

/// A tensor on the host, as ONNX Runtime hands it to an operator.
pub struct HostTensor<'a> {
    /// The name the specification gives it.
    pub name: &'static str,
    /// Its shape.
    pub dims: Vec<usize>,
    /// Where its elements begin. Null only if there are none.
    pub data: *const c_void,
    bytes: usize,
    lifetime: PhantomData<&'a ()>,
}

impl<'a> HostTensor<'a> {
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

    /// Its elements.
    ///
    /// # Safety
    /// `T` is the element type the operator was registered with for this input, and nothing writes to the tensor
    /// while the slice lives.
    pub unsafe fn slice<T>(&self) -> &'a [T] {
        let len = self.dims.iter().product();
        if len == 0 {
            return &[];
        }
        // SAFETY: ONNX Runtime's tensors are contiguous, aligned for their type, and live for the whole call.
        unsafe { std::slice::from_raw_parts(self.data.cast(), len) }
    }
}

/// The memory of an output on the host.
pub struct HostOutput {
    /// Where its elements begin. Null only if there are none.
    pub data: *mut c_void,
    bytes: usize,
}

impl HostOutput {
    /// Refuses inputs whose memory overlaps that of the output: a host binds memory as it likes.
    pub fn apart_from<'a>(&self, inputs: impl IntoIterator<Item = &'a HostTensor<'a>>) -> Result<(), OpError> {
        let (start, end) = (self.data.addr(), self.data.addr() + self.bytes);
        for input in inputs {
            let (input_start, input_end) = (input.data.addr(), input.data.addr() + input.bytes);
            if input.bytes > 0 && input_start < end && start < input_end {
                let message = format!("{}: its memory overlaps that of the output: bind them apart", input.name);
                return Err(OpError::invalid(message));
            }
        }
        Ok(())
    }
}

impl Context {
    /// Input `index`, which the specification requires.
    pub fn input(&self, index: usize) -> Result<HostTensor<'_>, OpError> {
        let name = self.inputs[index].name;
        self.optional_input(index)?.ok_or_else(|| OpError::invalid(format!("{name}: this input is missing")))
    }

    /// Input `index`, or `None` where the graph leaves it out.
    pub fn optional_input(&self, index: usize) -> Result<Option<HostTensor<'_>>, OpError> {
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
        Ok(Some(HostTensor { name: self.inputs[index].name, dims, data, bytes, lifetime: PhantomData }))
    }

    /// The output, with room for `dims`.
    pub fn output(&self, dims: &[usize]) -> Result<HostOutput, OpError> {
        let dims: Vec<i64> = dims.iter().map(|&dim| dim as i64).collect();
        let mut value = null_mut();
        let mut output = HostOutput { data: null_mut(), bytes: 0 };
        // SAFETY: the context is live for the whole call and owns the value.
        unsafe {
            self.check((self.api.KernelContext_GetOutput)(self.raw, 0, dims.as_ptr(), dims.len(), &mut value))?;
            self.check((self.api.GetTensorMutableData)(value, &mut output.data))?;
            self.check((self.api.GetTensorSizeInBytes)(value, &mut output.bytes))?;
        }
        Ok(output)
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
        if status.0.is_null() {
            return Ok(());
        }
        // SAFETY: the status is ours to read and to release, once.
        unsafe {
            let message = CStr::from_ptr((self.api.GetErrorMessage)(status.0)).to_string_lossy().into_owned();
            (self.api.ReleaseStatus)(status.0);
            Err(OpError { code: OrtErrorCode::ORT_FAIL, message })
        }
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
                    panic!("ONNX Runtime's ParallelFor: {}", error.message);
                }
                if let Some(payload) = work.panic.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()) {
                    resume_unwind(payload);
                }
            }
        }
    }
}
