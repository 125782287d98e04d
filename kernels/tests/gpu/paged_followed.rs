//! `PagedAttention` whose rows the kernel in front of it writes, with nothing waited for between the two: on Hopper decode fetches cached
//! tokens while that one still runs, if the call says that they are settled.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use pagoda_kernels::bf16;
use pagoda_kernels::cuda::{Gpu, Output, PagedAttention, Type};
use pagoda_test_support::Random;

use crate::Context;
use crate::device::{Tensor, bytes};
use crate::llm_cases::Case;
use crate::llm_cases::random::{random_tiles, scattered};
use crate::paged::{OnDevice, run};

/// Calls behind one another.
const CALLS: usize = 4;
/// The depth of the products that write rows.
const INNER: usize = 8;

/// A chain of calls, each with a pool of its own, behind kernels that write its rows: first others, then the right ones.
struct Chain<'a> {
    gpu: &'a Gpu,
    stream: &'a Arc<CudaStream>,
    calls: Vec<OnDevice<'a, bf16>>,
    /// query, key and value, as the calls read them.
    written: [Tensor; 3],
    /// Zeros: other rows, and products to which what is copied is added.
    zeros: Tensor,
    settled: bool,
}

impl<'a> Chain<'a> {
    fn new(gpu: &'a Gpu, stream: &'a Arc<CudaStream>, case: &'a Case<bf16>, len: usize, settled: bool) -> Self {
        let empty = |values: &[bf16]| Tensor::new(stream, &vec![0; size_of_val(values)]);
        let widest = case.query_heads * case.head_size;
        let zeros = (case.query.len()).max((case.total_rows() + widest) * INNER);
        Self {
            gpu,
            stream,
            calls: (0..CALLS).map(|_| OnDevice::new(case, stream, len)).collect(),
            written: [&case.query, &case.key, &case.value].map(|values| empty(values)),
            zeros: Tensor::new(stream, &vec![0; zeros * size_of::<bf16>()]),
            settled,
        }
    }

    fn write(&self, call: &PagedAttention, from: [u64; 3]) {
        let heads = [call.query_heads, call.kv_heads, call.kv_heads];
        for ((from, to), heads) in from.into_iter().zip(&self.written).zip(heads) {
            let copy = Output {
                element: Type::Bf16,
                rows: call.total_rows,
                inner: INNER,
                width: heads * call.head_size,
                y: self.zeros.address,
                weight: self.zeros.address,
                bias: None,
                residual: Some(from),
                taken: None,
                output: to.address,
                constant: true,
            };
            // SAFETY: all are as long as that, and waited for before they are read.
            unsafe { self.gpu.output(&copy, self.stream.cu_stream()) }.unwrap();
        }
    }

    fn launch(&self) {
        let [query, key, value] = self.written.each_ref().map(|tensor| tensor.address);
        for call in &self.calls {
            let right = call.call();
            self.write(&right, [self.zeros.address; 3]);
            self.write(&right, [right.query, right.key, right.value]);
            let call = PagedAttention { query, key, value, settled: self.settled, ..right };
            // SAFETY: every tensor is as long as its shape says; the stream is waited for by the reads.
            unsafe { self.gpu.paged_attention(&call, self.stream.cu_stream()) }.unwrap();
        }
    }
}

pub fn followed(context: &Context) {
    let (gpu, stream) = (context.gpu, &context.gpu.context().new_stream().unwrap());
    let mut random = Random(67);
    for number in 0..context.cases.div_ceil(20) {
        let case = std::iter::repeat_with(|| random_tiles::<bf16>(&mut random)).find(|case| case.total_rows() > 0);
        let mut case = case.unwrap();
        if random.once_in(2) {
            case = scattered(case, &mut random);
        }
        let len = case.slots.as_ref().map_or(0, |slots| slots.2);
        let expected = run(gpu, stream, &case, len);
        for (settled, captured) in [(false, false), (true, false), (true, true)] {
            let chain = Chain::new(gpu, stream, &case, len, settled);
            stream.synchronize().unwrap();
            let mut graph = None;
            if captured {
                stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
                chain.launch();
                let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
                let graph = graph.insert(stream.end_capture(flags).unwrap().unwrap());
                graph.launch().unwrap();
            } else {
                chain.launch();
            }
            for (at, call) in chain.calls.iter().enumerate() {
                let (got, what) = (call.read(), format!("{number}, call {at}, settled {settled}, captured {captured}"));
                assert!(bytes(&got.output) == bytes(&expected.output), "{what}");
                assert!(bytes(&got.weights) == bytes(&expected.weights), "{what}: key_weights");
                assert!(got.pool == expected.pool, "{what}: the pool");
            }
        }
    }
}
