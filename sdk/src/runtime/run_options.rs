//! The options of one run.

use std::ffi::CString;

use ort_sys::OrtRunOptions;

use super::api::Api;
use crate::error::Result;

/// The number of no graph: the run is neither captured nor replayed.
pub(super) const NO_GRAPH: i32 = -1;

/// How ONNX Runtime is to run a model once.
pub(super) struct RunOptions {
    api: &'static Api,
    raw: *mut OrtRunOptions,
}

// SAFETY: ONNX Runtime reads the options from many threads; setting the terminate flag meanwhile is what it is for.
unsafe impl Send for RunOptions {}
// SAFETY: as above.
unsafe impl Sync for RunOptions {}

impl RunOptions {
    /// With the number of the CUDA graph that the run is captured into, and that is replayed from then on.
    pub(super) fn new(api: &'static Api, graph: i32) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the out pointer is live.
        api.check(unsafe { (api.table().CreateRunOptions)(&mut raw) })?;
        let options = Self { api, raw };
        let number = CString::new(graph.to_string()).expect("digits have no NUL");
        // SAFETY: the options are live, and the texts are copied.
        api.check(unsafe { (api.table().AddRunConfigEntry)(raw, c"gpu_graph_id".as_ptr(), number.as_ptr()) })?;
        Ok(options)
    }

    /// For ONNX Runtime.
    pub(super) fn raw(&self) -> *mut OrtRunOptions {
        self.raw
    }

    /// Stops the runs that use them.
    pub(super) fn terminate(&self) {
        // SAFETY: `raw` lives as long as `self`.
        if let Err(error) = self.api.check(unsafe { (self.api.table().RunOptionsSetTerminate)(self.raw) }) {
            log::error!("a run could not be cancelled: {error}");
        }
    }
}

impl Drop for RunOptions {
    fn drop(&mut self) {
        // SAFETY: made in `new`, released once; no run uses it, for a run holds its `Cancel`.
        unsafe { (self.api.table().ReleaseRunOptions)(self.raw) };
    }
}
