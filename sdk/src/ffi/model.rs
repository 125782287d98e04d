//! `pagoda_model`: opening and describing models.

use std::ffi::{CString, c_char, c_void};
use std::sync::Arc;

use super::args::{self, Versioned};
use super::embedding::pagoda_embeddings;
use super::error::{pagoda_error, pagoda_status};
use super::handle::{Kind, Object, Table};
use super::tensor::{PAGODA_ELEMENT_TYPE_UNDEFINED, pagoda_element_type};
use super::{boundary, c_text, freeing};
use crate::embedding::Embeddings;
use crate::error::{Error, Result};
use crate::runtime::{Model, ModelOptions, Optimization, Provider, ValueInfo};

/// The execution provider: where a model runs.
pub type pagoda_provider = i32;

/// On a GPU if there is one, else on the CPU. pagoda_model_provider and pagoda_engine_provider return which, and why.
pub const PAGODA_PROVIDER_AUTO: pagoda_provider = 0;
/// On the CPU.
pub const PAGODA_PROVIDER_CPU: pagoda_provider = 1;
/// On an NVIDIA GPU. Opening the model fails if that is not possible.
pub const PAGODA_PROVIDER_CUDA: pagoda_provider = 2;

/// How far ONNX Runtime optimizes the graph when a model is opened.
pub type pagoda_optimization = i32;

/// All optimizations.
pub const PAGODA_OPTIMIZATION_ALL: pagoda_optimization = 0;
/// None.
pub const PAGODA_OPTIMIZATION_NONE: pagoda_optimization = 1;
/// Only those whose result is standard ONNX.
pub const PAGODA_OPTIMIZATION_BASIC: pagoda_optimization = 2;
/// Node fusions too, but no changes of memory layouts.
pub const PAGODA_OPTIMIZATION_EXTENDED: pagoda_optimization = 3;

/// An open model. Any number of threads may use a handle at the same time.
pub struct pagoda_model {
    _private: [u8; 0],
}

/// How to open a model. Start from PAGODA_MODEL_OPTIONS_INIT, which sets `struct_size` and the defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_model_options {
    /// The size of this struct.
    pub struct_size: u32,
    /// Where the model runs; default PAGODA_PROVIDER_AUTO.
    pub provider: pagoda_provider,
    /// The number of the GPU; default 0.
    pub device_id: i32,
    /// The number of threads that work on one run; default 0 = one for each core.
    pub intra_op_threads: i32,
    /// How far the graph is optimized; default PAGODA_OPTIMIZATION_ALL.
    pub optimization: pagoda_optimization,
    /// 1: idle threads sleep. 0, the default: they spin for a while after each run. That wakes them sooner, and takes
    /// cores from everything else in the process, other models included. The threads of an engine do the same.
    pub sleep_when_idle: i32,
    /// 1: f32 matrix products on a GPU may use TF32, which keeps 10 bits of the fraction and is several times as fast.
    /// 0, the default: they are computed in f32, except in nodes that ask for TF32 themselves. No effect on the CPU.
    pub tf32: i32,
    /// 1: the ai.pagoda operators run on the CPU even if the rest of the model runs on a GPU, so that pools of keys and
    /// values in host memory are used in place. 0, the default: they run where the model runs. With pools in host
    /// memory ONNX Runtime then copies every pool to the GPU and back in each run, and runs can not share a pool.
    pub host_pools: i32,
    /// The ONNX Runtime library, UTF-8. NULL: the environment variable PAGODA_ONNXRUNTIME; then libonnxruntime.so.1 or
    /// libonnxruntime.so in the folder `pagoda` beside libpagoda.so, or beside libpagoda.so itself; then the loader of
    /// the system. A process loads one ONNX Runtime, for the first model that it opens.
    pub onnxruntime_path: *const c_char,
    /// Where to write a profile of all runs when the model is freed, in Chrome's trace format; NULL = no profile.
    pub profile_path: *const c_char,
    /// The tables that EmbeddingBag nodes of the graph name; NULL = none. The model keeps the tables that it uses open,
    /// even after the handle is freed or their model is retired.
    pub tables: *const pagoda_embeddings,
}

/// An input or an output of a model. Start from PAGODA_VALUE_INFO_INIT, which sets `struct_size`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_value_info {
    /// The size of this struct.
    pub struct_size: u32,
    /// The element type; PAGODA_ELEMENT_TYPE_UNDEFINED if it is not a tensor.
    pub r#type: pagoda_element_type,
    /// The name.
    pub name: *const c_char,
    /// The number of dimensions.
    pub rank: usize,
    /// The dimensions, -1 for a dynamic one; NULL if the model does not specify the rank.
    pub dims: *const i64,
    /// The symbolic name of each dimension; "" if it is fixed or has no name.
    pub symbols: *const *const c_char,
}

// SAFETY: numbers and pointers in C's layout, the size first.
unsafe impl Versioned for pagoda_model_options {
    const FIRST_SIZE: usize = 56;
}

// SAFETY: as above.
unsafe impl Versioned for pagoda_value_info {
    const FIRST_SIZE: usize = 40;
}

/// A model and what C callers read of it, in C's form.
pub(super) struct ModelObject {
    pub(super) model: Arc<Model>,
    reason: CString,
    inputs: Vec<Description>,
    outputs: Vec<Description>,
}

impl Object for ModelObject {
    type C = pagoda_model;
    const KIND: Kind = Kind::Model;

    fn table() -> &'static Table<Self> {
        static TABLE: Table<ModelObject> = Table::new();
        &TABLE
    }
}

impl ModelObject {
    fn new(model: Model) -> Self {
        let describe = |infos: &[ValueInfo]| infos.iter().map(Description::new).collect();
        let (inputs, outputs) = (describe(model.inputs()), describe(model.outputs()));
        Self { reason: c_text(model.provider_reason()), inputs, outputs, model: Arc::new(model) }
    }
}

struct Description {
    element: pagoda_element_type,
    name: CString,
    dims: Option<Vec<i64>>,
    /// Owns what `symbols` points to.
    _symbols: Vec<CString>,
    symbols: Vec<*const c_char>,
}

// SAFETY: the pointers are to texts that the same struct owns and that never change.
unsafe impl Send for Description {}
// SAFETY: as above.
unsafe impl Sync for Description {}

impl Description {
    fn new(info: &ValueInfo) -> Self {
        let owned: Vec<CString> = info.symbols().iter().map(|symbol| c_text(symbol)).collect();
        Self {
            element: info
                .element_type()
                .map_or(PAGODA_ELEMENT_TYPE_UNDEFINED, |element| element as pagoda_element_type),
            name: c_text(info.name()),
            dims: info.dims().map(<[i64]>::to_vec),
            symbols: owned.iter().map(|symbol| symbol.as_ptr()).collect(),
            _symbols: owned,
        }
    }
}

/// Opens the model in an .onnx file. The ai.pagoda operators are always available. `options` may be NULL.
///
/// Ownership: the caller frees the model. Threads: any. Errors: NOT_FOUND if the file or ONNX Runtime is missing; IO if
/// the file can not be read; MODEL if it is not a model that can be run; UNSUPPORTED if the GPU is missing;
/// INVALID_ARGUMENT.
///
/// # Safety
/// `path` and the texts in `options` are C strings; `model` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_model_open(
    path: *const c_char,
    options: *const pagoda_model_options,
    model: *mut *mut pagoda_model,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_model_open", error, || {
            let out = args::out(model, "model")?;
            let opened = Model::open(args::text(path, "path")?, &read_options(options)?)?;
            out.write(Arc::new(ModelObject::new(opened)).insert()?);
            Ok(())
        })
    }
}

/// Opens a model from the bytes of an .onnx file. `options` may be NULL.
///
/// Ownership: the caller frees the model, and keeps the bytes, which are copied. Threads: any. Errors: those of
/// pagoda_model_open.
///
/// # Safety
/// `bytes` has `size` bytes; the texts in `options` are C strings; `model` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_model_open_memory(
    bytes: *const c_void,
    size: usize,
    options: *const pagoda_model_options,
    model: *mut *mut pagoda_model,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_model_open_memory", error, || {
            let out = args::out(model, "model")?;
            let opened = Model::open_memory(args::slice(bytes.cast(), size, "bytes")?, &read_options(options)?)?;
            out.write(Arc::new(ModelObject::new(opened)).insert()?);
            Ok(())
        })
    }
}

/// Gets where a model runs: PAGODA_PROVIDER_CPU or PAGODA_PROVIDER_CUDA. `reason` says why PAGODA_PROVIDER_AUTO chose
/// the CPU; "" in all other cases.
///
/// Ownership: `reason` belongs to the model and is valid until the model is freed. Threads: any. Errors:
/// INVALID_HANDLE; INVALID_ARGUMENT for a NULL.
///
/// # Safety
/// `provider`, `reason` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_model_provider(
    model: *const pagoda_model,
    provider: *mut pagoda_provider,
    reason: *mut *const c_char,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_model_provider", error, || {
            let object = ModelObject::get(model, "model")?;
            let (out_provider, out_reason) = (args::out(provider, "provider")?, args::out(reason, "reason")?);
            out_provider.write(provider_number(object.model.provider()));
            out_reason.write(object.reason.as_ptr());
            Ok(())
        })
    }
}

/// Gets the number of inputs of a model.
///
/// Ownership: the caller keeps the model. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL.
///
/// # Safety
/// `count` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_model_input_count(
    model: *const pagoda_model,
    count: *mut usize,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_model_input_count", error, || {
            let (object, out) = (ModelObject::get(model, "model")?, args::out(count, "count")?);
            out.write(object.inputs.len());
            Ok(())
        })
    }
}

/// Gets the number of outputs of a model.
///
/// Ownership: the caller keeps the model. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL.
///
/// # Safety
/// `count` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_model_output_count(
    model: *const pagoda_model,
    count: *mut usize,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_model_output_count", error, || {
            let (object, out) = (ModelObject::get(model, "model")?, args::out(count, "count")?);
            out.write(object.outputs.len());
            Ok(())
        })
    }
}

/// Gets one input of a model.
///
/// Ownership: the pointers in `info` belong to the model and are valid until the model is freed. Threads: any. Errors:
/// INVALID_HANDLE; INVALID_ARGUMENT for a NULL, an invalid `struct_size`, or an index out of range.
///
/// # Safety
/// `info` may be written to as far as its struct_size says, and `error`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_model_input(
    model: *const pagoda_model,
    index: usize,
    info: *mut pagoda_value_info,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_model_input", error, || {
            let object = ModelObject::get(model, "model")?;
            describe(&object.inputs, index, info)
        })
    }
}

/// Gets one output of a model.
///
/// Ownership: the pointers in `info` belong to the model and are valid until the model is freed. Threads: any. Errors:
/// INVALID_HANDLE; INVALID_ARGUMENT for a NULL, an invalid `struct_size`, or an index out of range.
///
/// # Safety
/// `info` may be written to as far as its struct_size says, and `error`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_model_output(
    model: *const pagoda_model,
    index: usize,
    info: *mut pagoda_value_info,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_model_output", error, || {
            let object = ModelObject::get(model, "model")?;
            describe(&object.outputs, index, info)
        })
    }
}

/// Frees a model. NULL is allowed. Runs that are in progress end normally.
///
/// Ownership: takes the model. Threads: any. Errors: INVALID_HANDLE, which is also logged.
#[unsafe(no_mangle)]
pub extern "C" fn pagoda_model_free(model: *mut pagoda_model) -> pagoda_status {
    freeing("pagoda_model_free", || ModelObject::remove(model, "model"))
}

/// Where a model that is open runs.
pub(super) fn provider_number(provider: Provider) -> pagoda_provider {
    match provider {
        Provider::Cuda => PAGODA_PROVIDER_CUDA,
        Provider::Cpu | Provider::Auto => PAGODA_PROVIDER_CPU,
    }
}

/// # Safety
/// As for `pagoda_model_open`.
pub(super) unsafe fn read_options(options: *const pagoda_model_options) -> Result<ModelOptions> {
    let defaults = pagoda_model_options {
        struct_size: size_of::<pagoda_model_options>() as u32,
        provider: PAGODA_PROVIDER_AUTO,
        device_id: 0,
        intra_op_threads: 0,
        optimization: PAGODA_OPTIMIZATION_ALL,
        sleep_when_idle: 0,
        tf32: 0,
        host_pools: 0,
        onnxruntime_path: std::ptr::null(),
        profile_path: std::ptr::null(),
        tables: std::ptr::null(),
    };
    // SAFETY: by contract.
    let options = unsafe { args::options(options, defaults, "options")? };
    // SAFETY: by contract.
    let (onnxruntime_path, profile_path) = unsafe {
        (
            args::optional_text(options.onnxruntime_path, "options.onnxruntime_path")?,
            args::optional_text(options.profile_path, "options.profile_path")?,
        )
    };
    Ok(ModelOptions {
        provider: match options.provider {
            PAGODA_PROVIDER_AUTO => Provider::Auto,
            PAGODA_PROVIDER_CPU => Provider::Cpu,
            PAGODA_PROVIDER_CUDA => Provider::Cuda,
            other => return Err(args::unknown("options.provider", other, "PAGODA_PROVIDER_...")),
        },
        device_id: args::count(options.device_id, "options.device_id")?,
        intra_op_threads: args::count(options.intra_op_threads, "options.intra_op_threads")?,
        sleep_when_idle: args::flag(options.sleep_when_idle, "options.sleep_when_idle")?,
        optimization: match options.optimization {
            PAGODA_OPTIMIZATION_ALL => Optimization::All,
            PAGODA_OPTIMIZATION_NONE => Optimization::None,
            PAGODA_OPTIMIZATION_BASIC => Optimization::Basic,
            PAGODA_OPTIMIZATION_EXTENDED => Optimization::Extended,
            other => return Err(args::unknown("options.optimization", other, "PAGODA_OPTIMIZATION_...")),
        },
        host_pools: args::flag(options.host_pools, "options.host_pools")?,
        tf32: args::flag(options.tf32, "options.tf32")?,
        onnxruntime_path: onnxruntime_path.map(Into::into),
        profile_path: profile_path.map(Into::into),
        tables: match options.tables.is_null() {
            true => None,
            false => Some(Embeddings::get(options.tables, "options.tables")?.into()),
        },
    })
}

/// # Safety
/// As for `pagoda_model_input`.
unsafe fn describe(descriptions: &[Description], index: usize, info: *mut pagoda_value_info) -> Result<()> {
    // SAFETY: by contract.
    let out = unsafe { args::out_struct(info, "info")? };
    let description = descriptions.get(index).ok_or_else(|| {
        Error::invalid("index", format!("{index} is beyond the {} that this model has", descriptions.len()))
    })?;
    out.write(&pagoda_value_info {
        struct_size: size_of::<pagoda_value_info>() as u32,
        r#type: description.element,
        name: description.name.as_ptr(),
        rank: description.dims.as_ref().map_or(0, Vec::len),
        dims: description.dims.as_ref().map_or(std::ptr::null(), |dims| dims.as_ptr()),
        symbols: description.symbols.as_ptr(),
    });
    Ok(())
}
