//! A thin layer over ONNX Runtime's raw custom operators.
//!
//! An operator is a [`Operator`]: `&self` kernels that any number of threads enter at once. This layer keeps what the
//! raw interface makes easy to get wrong in one place: the host's API table travels with each operator (a process can
//! hold several ONNX Runtimes), no panic crosses into C++, and work runs on the session's own threads.

use std::any::Any;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;

use ort_sys::{
    ONNXTensorElementDataType as OnnxType, ORT_API_VERSION, OrtApi, OrtCustomOp,
    OrtCustomOpInputOutputCharacteristic as Arity, OrtErrorCode, OrtKernelContext, OrtKernelInfo, OrtMemType,
    OrtShapeInferContext, OrtStatusPtr,
};
use pagoda_kernels::InputError;

use crate::context::{Attributes, Context};
use crate::shape::{Shape, Shapes};

/// An operator of the ai.pagoda domain.
pub trait Operator: Sized + Send + Sync + 'static {
    /// Its name in the graph.
    const NAME: &'static CStr;
    /// ONNX Runtime's name for where it runs.
    const PROVIDER: &'static CStr = c"CPUExecutionProvider";
    /// Its inputs in order.
    const INPUTS: &'static [Input];
    /// Its outputs in order.
    const OUTPUTS: &'static [Output];

    /// The types and shapes of the outputs in order, where the graph tells them. Asked before there is a session.
    fn shapes(node: &Shapes) -> Result<Vec<Option<Shape>>, OpError>;

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

/// One output of an operator.
pub struct Output {
    /// The name the specification gives it; error messages use it.
    pub name: &'static str,
    /// Its element type.
    pub element: OnnxType,
    /// Whether a graph may leave it out.
    pub optional: bool,
}

impl Output {
    /// An output that must be there.
    pub const fn required(name: &'static str, element: OnnxType) -> Self {
        Self { name, element, optional: false }
    }

    /// An output that may be left out.
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

    /// ONNX Runtime refused something.
    pub fn failed(message: String) -> Self {
        Self { code: OrtErrorCode::ORT_FAIL, message }
    }

    /// What went wrong.
    pub fn message(&self) -> &str {
        &self.message
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
        GetExecutionProviderType: Some(provider::<O>),
        GetInputType: Some(input_type::<O>),
        GetInputTypeCount: Some(input_count::<O>),
        GetOutputType: Some(output_type::<O>),
        GetOutputTypeCount: Some(output_count::<O>),
        KernelCompute: None,
        KernelDestroy: Some(destroy::<O>),
        GetInputCharacteristic: Some(input_arity::<O>),
        GetOutputCharacteristic: Some(output_arity::<O>),
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

unsafe extern "system" fn provider<O: Operator>(_: *const OrtCustomOp) -> *const c_char {
    O::PROVIDER.as_ptr()
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

unsafe extern "system" fn output_type<O: Operator>(_: *const OrtCustomOp, index: usize) -> OnnxType {
    O::OUTPUTS.get(index).map_or(OnnxType::ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED, |output| output.element)
}

unsafe extern "system" fn output_count<O: Operator>(_: *const OrtCustomOp) -> usize {
    O::OUTPUTS.len()
}

unsafe extern "system" fn output_arity<O: Operator>(_: *const OrtCustomOp, index: usize) -> Arity {
    match O::OUTPUTS.get(index) {
        Some(Output { optional: true, .. }) => Arity::INPUT_OUTPUT_OPTIONAL,
        _ => Arity::INPUT_OUTPUT_REQUIRED,
    }
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
    let context = Context { api: kernel.api, raw: context, inputs: O::INPUTS, outputs: O::OUTPUTS };
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
    let node = Shapes { api, raw: context };
    guarded(api, || {
        for (index, shape) in O::shapes(&node)?.into_iter().enumerate() {
            let Some(shape) = shape else { continue };
            match node.set_output(index, &shape) {
                // Only this says that the node leaves it out. Handed on, it would be lost: ONNX Runtime does not free it.
                Err(_) if O::OUTPUTS[index].optional => {}
                outcome => outcome?,
            }
        }
        Ok(())
    })
}

/// Runs `body`; errors and panics become a status.
fn guarded(api: &OrtApi, body: impl FnOnce() -> Result<(), OpError>) -> OrtStatusPtr {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => OrtStatusPtr(null_mut()),
        Ok(Err(error)) => error.into_status(api),
        Err(payload) => OpError::panicked(payload.as_ref()).into_status(api),
    }
}
