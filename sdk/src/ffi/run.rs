//! Running models: `pagoda_model_run`, `pagoda_model_run_async`, `pagoda_cancel`.

use std::ffi::{c_char, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use super::args;
use super::error::{ErrorObject, PAGODA_STATUS_OK, pagoda_error, pagoda_status};
use super::handle::{Kind, Object, Table};
use super::model::{ModelObject, pagoda_model};
use super::tensor::pagoda_tensor;
use super::{boundary, caught, freeing};
use crate::error::{Error, Result};
use crate::runtime::{Cancel, Request};
use crate::tensor::Tensor;

/// Cancels runs and requests. Any number of them may share one. Once triggered, it stays triggered.
pub struct pagoda_cancel {
    _private: [u8; 0],
}

/// Called once when an asynchronous run has ended, on a thread of Pagoda. Other asynchronous runs may wait until it
/// returns.
///
/// `status` is PAGODA_STATUS_OK, or says why there are no outputs; `error` then has the message, and is freed after the
/// callback returns. `outputs` is the list of the call, with a new tensor in place of each NULL. The callback owns the
/// new tensors: it frees or keeps them. The list itself is valid during the callback only.
pub type pagoda_run_callback = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        status: pagoda_status,
        outputs: *const *mut pagoda_tensor,
        output_count: usize,
        error: *const pagoda_error,
    ),
>;

impl Object for Cancel {
    type C = pagoda_cancel;
    const KIND: Kind = Kind::Cancel;

    fn table() -> &'static Table<Self> {
        static TABLE: Table<Cancel> = Table::new();
        &TABLE
    }
}

/// Runs a model and waits for the result. `inputs[i]` is the input named `input_names[i]`; all inputs must be given. If
/// `outputs[i]` is a tensor, the output named `output_names[i]` is written to its memory; if it is NULL, a new tensor
/// is stored there. Nothing but strings is copied. A tensor may be both an input and an output if the operators of the
/// model allow that, as with pools of keys and values. `cancel` may be NULL.
///
/// Ownership: the caller frees new outputs, and keeps the rest. Threads: any number at once on a model; during the run
/// the memory of inputs must not be written, and that of bound outputs neither written nor read. Errors:
/// INVALID_HANDLE; NOT_FOUND for an unknown name; INVALID_ARGUMENT for a wrong type or shape, and for bound outputs
/// that overlap; UNSUPPORTED for an output that is not a tensor or is also an input; CANCELLED; RUNTIME. On an error
/// the list `outputs` is not changed, but the memory of bound outputs may have been written. Pools of keys and values
/// stay valid for what they held before.
///
/// # Safety
/// The lists have as many elements as their counts say, the names are C strings; `outputs` and `error` may be written
/// to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_model_run(
    model: *const pagoda_model,
    input_names: *const *const c_char,
    inputs: *const *mut pagoda_tensor,
    input_count: usize,
    output_names: *const *const c_char,
    outputs: *mut *mut pagoda_tensor,
    output_count: usize,
    cancel: *const pagoda_cancel,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_model_run", error, || {
            let model = ModelObject::get(model, "model")?;
            let inputs = read_inputs(input_names, inputs, input_count)?;
            let bound = read_outputs(output_names, outputs, output_count)?;
            let cancel = optional_cancel(cancel)?;
            let by_reference: Vec<_> = inputs.iter().map(|(name, tensor)| (*name, &**tensor)).collect();
            let into: Vec<_> = bound.iter().map(|(name, tensor)| (*name, tensor.as_deref())).collect();
            let made = model.model.run_bound(&by_reference, &into, cancel.as_deref())?;
            for (index, handle) in insert_all(made)?.into_iter().enumerate() {
                if let Some(handle) = handle {
                    outputs.add(index).write(handle);
                }
            }
            Ok(())
        })
    }
}

/// Starts a run on a thread of Pagoda, and returns at once. The arguments are as for pagoda_model_run. An error in the
/// arguments is returned at once, and `callback` is not called. When this returns, the handles may be freed and the
/// lists reused. The memory of the tensors must not change until `callback` is called.
///
/// Ownership: the callback owns new outputs. Threads: any. Errors: INVALID_HANDLE, NOT_FOUND, INVALID_ARGUMENT,
/// CAPACITY if too many runs are queued; through the callback CANCELLED and RUNTIME.
///
/// # Safety
/// The lists have as many elements as their counts say, the names are C strings; `error` may be written to; `callback`
/// may be called with `user_data` from any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_model_run_async(
    model: *const pagoda_model,
    input_names: *const *const c_char,
    inputs: *const *mut pagoda_tensor,
    input_count: usize,
    output_names: *const *const c_char,
    outputs: *const *mut pagoda_tensor,
    output_count: usize,
    cancel: *const pagoda_cancel,
    callback: pagoda_run_callback,
    user_data: *mut c_void,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_model_run_async", error, || {
            let model = ModelObject::get(model, "model")?;
            let callback = callback.ok_or_else(|| Error::invalid("callback", "NULL, where a function is needed"))?;
            let mut request = Request::new();
            for (name, tensor) in read_inputs(input_names, inputs, input_count)? {
                request = request.input(name, tensor);
            }
            for (name, tensor) in read_outputs(output_names, outputs, output_count)? {
                request = match tensor {
                    Some(tensor) => request.output_into(name, tensor),
                    None => request.output(name),
                };
            }
            if let Some(cancel) = optional_cancel(cancel)? {
                request = request.cancel(cancel);
            }
            let handles: Vec<_> =
                args::slice(outputs, output_count, "outputs")?.iter().map(|handle| handle.addr()).collect();
            let done = Done { callback, user_data };
            model.model.run_async(request, move |result| {
                let made = caught("pagoda_model_run_async, when done", || insert_all(result?));
                done.call(handles, made);
            })
        })
    }
}

/// Makes a cancel that is not triggered.
///
/// Ownership: the caller frees it. Threads: any. Errors: INVALID_ARGUMENT for a NULL; CAPACITY.
///
/// # Safety
/// `cancel` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_cancel_new(
    cancel: *mut *mut pagoda_cancel,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_cancel_new", error, || {
            let out = args::out(cancel, "cancel")?;
            out.write(Arc::new(Cancel::new()).insert()?);
            Ok(())
        })
    }
}

/// Cancels all runs and requests that have this cancel, now and later. They fail with CANCELLED; the answers of a
/// generator end with what they have.
///
/// Ownership: the caller keeps it. Threads: any. Errors: INVALID_HANDLE.
///
/// # Safety
/// `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_cancel_trigger(
    cancel: *const pagoda_cancel,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_cancel_trigger", error, || {
            Cancel::get(cancel, "cancel")?.trigger();
            Ok(())
        })
    }
}

/// Frees a cancel. NULL is allowed. Runs that have it continue.
///
/// Ownership: takes it. Threads: any. Errors: INVALID_HANDLE, which is also logged.
#[unsafe(no_mangle)]
pub extern "C" fn pagoda_cancel_free(cancel: *mut pagoda_cancel) -> pagoda_status {
    freeing("pagoda_cancel_free", || Cancel::remove(cancel, "cancel"))
}

/// # Safety
/// As for `pagoda_model_run`.
unsafe fn read_inputs<'a>(
    names: *const *const c_char,
    tensors: *const *mut pagoda_tensor,
    count: usize,
) -> Result<Vec<(&'a str, Arc<Tensor>)>> {
    // SAFETY: by contract.
    unsafe {
        let names = args::values(names, count, "input_names", "input_count")?;
        let tensors = args::values(tensors, count, "inputs", "input_count")?;
        let pairs = names.iter().zip(tensors).enumerate().map(|(index, (&name, &tensor))| {
            let name = args::text(name, format!("input_names[{index}]"))?;
            Ok((name, Tensor::get(tensor, "inputs[]").map_err(|error| error.about(format!("inputs[{index}]")))?))
        });
        pairs.collect()
    }
}

/// # Safety
/// As for `pagoda_model_run`.
unsafe fn read_outputs<'a>(
    names: *const *const c_char,
    tensors: *const *mut pagoda_tensor,
    count: usize,
) -> Result<Vec<NamedOutput<'a>>> {
    // SAFETY: by contract.
    unsafe {
        let names = args::values(names, count, "output_names", "output_count")?;
        let tensors = args::values(tensors, count, "outputs", "output_count")?;
        let pairs = names.iter().zip(tensors).enumerate().map(|(index, (&name, &tensor))| {
            let name = args::text(name, format!("output_names[{index}]"))?;
            if tensor.is_null() {
                return Ok((name, None));
            }
            let tensor = Tensor::get(tensor, "outputs[]").map_err(|error| error.about(format!("outputs[{index}]")))?;
            Ok((name, Some(tensor)))
        });
        pairs.collect()
    }
}

fn optional_cancel(cancel: *const pagoda_cancel) -> Result<Option<Arc<Cancel>>> {
    if cancel.is_null() { Ok(None) } else { Cancel::get(cancel, "cancel").map(Some) }
}

/// The name of an output and the tensor it is bound to, if it is.
type NamedOutput<'a> = (&'a str, Option<Arc<Tensor>>);

/// A handle for each new output, or none at all.
fn insert_all(made: Vec<Option<Tensor>>) -> Result<Vec<Option<*mut pagoda_tensor>>> {
    let mut handles = Vec::with_capacity(made.len());
    for tensor in made {
        match tensor.map(|tensor| Arc::new(tensor).insert()).transpose() {
            Ok(handle) => handles.push(handle),
            Err(error) => {
                for handle in handles.into_iter().flatten() {
                    Tensor::remove(handle, "outputs")?;
                }
                return Err(error);
            }
        }
    }
    Ok(handles)
}

/// The callback of an asynchronous run.
struct Done {
    callback: unsafe extern "C" fn(*mut c_void, pagoda_status, *const *mut pagoda_tensor, usize, *const pagoda_error),
    user_data: *mut c_void,
}

// SAFETY: the header says that the callback is called on a thread of Pagoda's.
unsafe impl Send for Done {}

impl Done {
    fn call(self, bound: Vec<usize>, result: Result<Vec<Option<*mut pagoda_tensor>>>) {
        match result {
            Ok(made) => {
                let handles: Vec<*mut pagoda_tensor> = bound
                    .into_iter()
                    .zip(made)
                    .map(|(bound, made)| made.unwrap_or(std::ptr::without_provenance_mut(bound)))
                    .collect();
                // SAFETY: the caller gave the two for this call, which happens once; the list lives during it.
                unsafe {
                    (self.callback)(self.user_data, PAGODA_STATUS_OK, handles.as_ptr(), handles.len(), null_mut())
                };
            }
            Err(error) => {
                let status = error.status() as pagoda_status;
                let handle = ErrorObject::into_handle(error);
                // SAFETY: as above.
                unsafe { (self.callback)(self.user_data, status, null_mut(), 0, handle) };
                if let Err(error) = ErrorObject::remove(handle, "error") {
                    log::error!("a pagoda_run_callback freed its error, which it must not: {error}");
                }
            }
        }
    }
}
