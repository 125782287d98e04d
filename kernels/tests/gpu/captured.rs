//! Whether a stream is being captured.

use cudarc::driver::result;
use cudarc::driver::sys::CUstreamCaptureMode;

use crate::Context;

/// An operator that would wait for its stream can ask whether the stream is being captured.
pub fn captured(context: &Context) {
    let stream = context.gpu.context().new_stream().unwrap();
    let is_capturing = || {
        // SAFETY: the stream is one of the device.
        unsafe { context.gpu.is_capturing(stream.cu_stream()) }.unwrap()
    };
    assert!(!is_capturing());
    // SAFETY: as above; what was captured, nothing, is given back.
    unsafe {
        result::stream::begin_capture(stream.cu_stream(), CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
        assert!(is_capturing());
        let graph = result::stream::end_capture(stream.cu_stream()).unwrap();
        result::graph::destroy(graph).unwrap();
    }
    assert!(!is_capturing());
}
