//! The cost of a run through pagoda.h, compared with ONNX Runtime's own C call.

use std::ffi::{CStr, c_char};
use std::ptr::{null, null_mut};

use pagoda::ffi::{
    PAGODA_ELEMENT_TYPE_F32, PAGODA_PROVIDER_CPU, PAGODA_STATUS_OK, pagoda_error, pagoda_error_free,
    pagoda_error_message, pagoda_model, pagoda_model_free, pagoda_model_open_memory, pagoda_model_options,
    pagoda_model_run, pagoda_status, pagoda_tensor, pagoda_tensor_free, pagoda_tensor_new,
};
use pagoda::{Error, Result, Status};
use pagoda_test_support::{Dim, F32, Graph};

use super::raw::RawSession;
use super::{Report, Row, side_by_side};

/// The runs of a measurement: one run is shorter than the resolution of the clock.
const BATCH: usize = 100;

/// One node, outputs bound.
pub fn measure(report: &Report) -> Result<()> {
    let dims = || [Dim::Is(1), Dim::Is(8)];
    let graph = Graph::new().input("x", F32, &dims()).output("y", F32, &dims()).node("Relu", &["x"], &["y"], &[]);
    let bytes = graph.to_bytes();
    let (ours, raw) = (Ours::new(&bytes)?, RawSession::new(&bytes)?);
    let (value, baseline) =
        side_by_side(61, || (0..BATCH).try_for_each(|_| ours.run()), || (0..BATCH).try_for_each(|_| raw.run()))?;
    let (value, baseline) = (value / BATCH as f64 * 1e6, baseline / BATCH as f64 * 1e6);
    let row = |case: &str, value: f64, ratio: f64| Row {
        bench: "overhead",
        case: case.to_owned(),
        value,
        unit: "us",
        baseline,
        baseline_name: "ONNX Runtime's Run",
        ratio,
    };
    report.rows([
        row("run, one node, bound output", value, baseline / value),
        row("the same, what Pagoda adds", value - baseline, baseline / value),
    ])
}

/// A model and its tensors as a C program holds them.
struct Ours {
    model: *mut pagoda_model,
    x: *mut pagoda_tensor,
    y: *mut pagoda_tensor,
}

impl Ours {
    fn new(bytes: &[u8]) -> Result<Self> {
        let options = pagoda_model_options {
            struct_size: size_of::<pagoda_model_options>() as u32,
            provider: PAGODA_PROVIDER_CPU,
            device_id: 0,
            intra_op_threads: 1,
            optimization: 0,
            sleep_when_idle: 0,
            tf32: 0,
            host_pools: 0,
            onnxruntime_path: null(),
            profile_path: null(),
            tables: null(),
        };
        let mut this = Self { model: null_mut(), x: null_mut(), y: null_mut() };
        let dims = [1_i64, 8];
        // SAFETY: every pointer is to a live variable of the right type, every length that of its array.
        unsafe {
            let (data, size) = (bytes.as_ptr().cast(), bytes.len());
            ok(|error| pagoda_model_open_memory(data, size, &options, &mut this.model, error))?;
            ok(|error| pagoda_tensor_new(PAGODA_ELEMENT_TYPE_F32, dims.as_ptr(), 2, &mut this.x, error))?;
            ok(|error| pagoda_tensor_new(PAGODA_ELEMENT_TYPE_F32, dims.as_ptr(), 2, &mut this.y, error))?;
        }
        Ok(this)
    }

    fn run(&self) -> Result<()> {
        let (input_names, output_names): ([*const c_char; 1], [*const c_char; 1]) = ([c"x".as_ptr()], [c"y".as_ptr()]);
        let (inputs, mut outputs) = ([self.x], [self.y]);
        // SAFETY: as above.
        unsafe {
            ok(|error| {
                let (inputs, outputs) = (inputs.as_ptr(), outputs.as_mut_ptr());
                let (input_names, output_names) = (input_names.as_ptr(), output_names.as_ptr());
                pagoda_model_run(self.model, input_names, inputs, 1, output_names, outputs, 1, null(), error)
            })
        }
    }
}

impl Drop for Ours {
    fn drop(&mut self) {
        pagoda_tensor_free(self.x);
        pagoda_tensor_free(self.y);
        pagoda_model_free(self.model);
    }
}

/// Makes a call of pagoda.h and takes its error.
fn ok(call: impl FnOnce(*mut *mut pagoda_error) -> pagoda_status) -> Result<()> {
    let mut error = null_mut();
    if call(&mut error) == PAGODA_STATUS_OK {
        return Ok(());
    }
    // SAFETY: the text lives until the error is freed.
    let message = unsafe { CStr::from_ptr(pagoda_error_message(error)) }.to_string_lossy().into_owned();
    pagoda_error_free(error);
    Err(Error::new(Status::Runtime, message))
}
