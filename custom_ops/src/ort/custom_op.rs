//! `OrtCustomOp`: the table of C callbacks that ONNX Runtime calls for an operator.
//!
//! This file keeps what the raw interface makes easy to get wrong in one place. Each operator carries the API table of the
//! ONNX Runtime that it is registered with, because a process can hold several. No panic unwinds into C++. A kernel is only
//! ever borrowed shared, because ONNX Runtime calls it from many threads at once.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;

use ort_sys::{
    ONNXTensorElementDataType as OnnxType, ORT_API_VERSION, OrtApi, OrtCustomOp,
    OrtCustomOpInputOutputCharacteristic as Arity, OrtKernelContext, OrtKernelInfo, OrtMemType, OrtShapeInferContext,
    OrtStatusPtr,
};

use super::context::KernelContext;
use super::error::OpError;
use super::info::KernelInfo;
use super::operator::Operator;
use super::schema::{Input, Output};
use super::shape::ShapeInferContext;

/// The opset versions of the domain that an operator is part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    /// The first version.
    pub first: c_int,
    /// The last version.
    pub last: c_int,
}

impl Versions {
    /// `first` and every later version.
    pub const fn since(first: c_int) -> Self {
        Self { first, last: c_int::MAX }
    }
}

/// Creates the `OrtCustomOp` of `O` for one ONNX Runtime. It is leaked, because sessions keep pointers to it.
pub fn leak<O: Operator>(api: &'static OrtApi, name: &'static CStr, versions: Versions) -> *const OrtCustomOp {
    let raw = OrtCustomOp {
        version: ORT_API_VERSION,
        CreateKernel: None,
        GetName: Some(get_name),
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
    // `raw` is the first field of a repr(C) struct, so a pointer to the struct is a pointer to `raw`.
    std::ptr::from_ref(Box::leak(Box::new(Registered { raw, api, name, versions }))).cast()
}

/// An `OrtCustomOp`, followed by what its callbacks need. Shape inference needs the API table here: ONNX Runtime does not
/// pass one to it.
#[repr(C)]
struct Registered {
    raw: OrtCustomOp,
    api: &'static OrtApi,
    name: &'static CStr,
    versions: Versions,
}

impl Registered {
    /// # Safety
    /// `op` is a pointer that [`leak`] returned.
    unsafe fn of(op: *const OrtCustomOp) -> &'static Self {
        // SAFETY: by contract; what `leak` returns is never freed.
        unsafe { &*op.cast::<Self>() }
    }
}

/// The kernel of one node, which ONNX Runtime holds as an opaque pointer.
struct Kernel<O> {
    operator: O,
    api: &'static OrtApi,
}

unsafe extern "system" fn get_name(op: *const OrtCustomOp) -> *const c_char {
    // SAFETY: ONNX Runtime passes the pointer that `leak` returned.
    unsafe { Registered::of(op) }.name.as_ptr()
}

unsafe extern "system" fn provider<O: Operator>(_: *const OrtCustomOp) -> *const c_char {
    O::PROVIDER.name().as_ptr()
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

unsafe extern "system" fn first_version(op: *const OrtCustomOp) -> c_int {
    // SAFETY: ONNX Runtime passes the pointer that `leak` returned.
    unsafe { Registered::of(op) }.versions.first
}

unsafe extern "system" fn last_version(op: *const OrtCustomOp) -> c_int {
    // SAFETY: ONNX Runtime passes the pointer that `leak` returned.
    unsafe { Registered::of(op) }.versions.last
}

unsafe extern "system" fn create<O: Operator>(
    op: *const OrtCustomOp,
    api: *const OrtApi,
    info: *const OrtKernelInfo,
    kernel: *mut *mut c_void,
) -> OrtStatusPtr {
    // SAFETY: ONNX Runtime passes the pointer that `leak` returned, and its own API table, which lives as long as the
    // library.
    let (name, api): (_, &'static OrtApi) = unsafe { (Registered::of(op).name, &*api) };
    guarded(api, || {
        let operator = O::new(&KernelInfo { api, raw: info, operator: name })?;
        // SAFETY: `kernel` is where ONNX Runtime expects the pointer.
        unsafe { *kernel = Box::into_raw(Box::new(Kernel { operator, api })).cast() };
        Ok(())
    })
}

unsafe extern "system" fn compute<O: Operator>(kernel: *mut c_void, context: *mut OrtKernelContext) -> OrtStatusPtr {
    // SAFETY: `create` made the pointer. Only shared references to it exist, so several threads may hold one.
    let kernel = unsafe { &*kernel.cast::<Kernel<O>>() };
    let context = KernelContext { api: kernel.api, raw: context, inputs: O::INPUTS, outputs: O::OUTPUTS };
    guarded(kernel.api, || kernel.operator.compute(&context))
}

unsafe extern "system" fn destroy<O: Operator>(kernel: *mut c_void) {
    // SAFETY: `create` made the pointer; ONNX Runtime destroys a kernel once, after its last call.
    drop(unsafe { Box::from_raw(kernel.cast::<Kernel<O>>()) });
}

unsafe extern "system" fn infer_shape<O: Operator>(
    op: *const OrtCustomOp,
    context: *mut OrtShapeInferContext,
) -> OrtStatusPtr {
    // SAFETY: ONNX Runtime passes the pointer that `leak` returned.
    let api = unsafe { Registered::of(op) }.api;
    let node = ShapeInferContext { api, raw: context };
    guarded(api, || {
        for (index, shape) in O::infer_shapes(&node)?.into_iter().enumerate() {
            let Some(shape) = shape else { continue };
            match node.set_output(index, &shape) {
                // The error means that the node omits the output; nothing else tells. As a status it would leak: ONNX Runtime
                // does not free what this callback returns.
                Err(_) if O::OUTPUTS[index].optional => {}
                outcome => outcome?,
            }
        }
        Ok(())
    })
}

/// Runs `body` and turns errors and panics into a status.
fn guarded(api: &OrtApi, body: impl FnOnce() -> Result<(), OpError>) -> OrtStatusPtr {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => OrtStatusPtr(null_mut()),
        Ok(Err(error)) => error.into_status(api),
        Err(payload) => OpError::panicked(payload.as_ref()).into_status(api),
    }
}
