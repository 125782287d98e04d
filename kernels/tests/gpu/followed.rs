//! Attention whose rows the kernel in front of it writes, with nothing waited for between the two: on Hopper each begins while
//! the other ends.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use pagoda_kernels::bf16;
use pagoda_kernels::cuda::{Attention, Cache, Gpu, Output, Path, Scratch, Type};

use crate::Context;
use crate::common::{Case, Random, User};
use crate::device::{OnDevice, Tensor, bytes};

/// Calls behind one another.
const CALLS: usize = 6;
/// The depth of the products that write rows.
const INNER: usize = 8;

/// Users by how their keys are shared out: by clusters, as parts, and by two kernels.
fn batches() -> [(&'static str, Vec<User>); 3] {
    let user = |cached, new, candidates| User { cached, new, candidates, contextual: 0 };
    let few = vec![user(2000, 20, 60), user(0, 100, 0), user(1500, 0, 200)];
    let mut many = vec![user(1500, 20, 60); 20];
    many.extend([user(0, 150, 30), user(900, 10, 20)]);
    let mut new = vec![user(0, 600, 100); 4];
    new.push(user(3000, 20, 60));
    [("few", few), ("many", many), ("new", new)]
}

/// A chain of calls, each behind a kernel that writes its rows: first others, then the right ones.
struct Chain<'a> {
    gpu: &'a Gpu,
    stream: &'a Arc<CudaStream>,
    call: Attention,
    rows: usize,
    width: usize,
    /// Where the right rows are, and others, all of them 0.
    right: [u64; 3],
    others: Tensor,
    /// Zeros for products: what they are added to is copied.
    zeros: Tensor,
    outputs: Vec<Tensor>,
    scratch: Option<(Tensor, usize)>,
}

impl Chain<'_> {
    fn write(&self, from: [u64; 3]) {
        for (from, to) in from.into_iter().zip([self.call.query, self.call.key, self.call.value]) {
            let copy = Output {
                element: Type::Bf16,
                rows: self.rows,
                inner: INNER,
                width: self.width,
                y: self.zeros.address,
                weight: self.zeros.address,
                bias: None,
                residual: Some(from),
                taken: None,
                output: to,
                constant: true,
            };
            // SAFETY: all are as long as that, and waited for before they are read.
            unsafe { self.gpu.output(&copy, self.stream.cu_stream()) }.unwrap();
        }
    }

    fn launch(&self) {
        for output in &self.outputs {
            self.write([self.others.address; 3]);
            self.write(self.right);
            let call = Attention { output: output.address, ..self.call };
            // SAFETY: as above; scratch memory is used by one call after the other.
            unsafe {
                match &self.scratch {
                    Some((memory, bytes)) => {
                        let scratch = Scratch { address: memory.address, bytes: *bytes };
                        self.gpu.attention_in(&call, scratch, self.stream.cu_stream()).unwrap();
                    }
                    None => self.gpu.attention(&call, self.stream.cu_stream()).unwrap(),
                }
            }
        }
    }
}

pub fn followed(context: &Context) {
    let stream = &context.gpu.context().new_stream().unwrap();
    for head_size in [32, 64, 128, 256] {
        for (what, users) in batches() {
            let mut case = Case::<bf16>::new(&mut Random(7), &users, 2, head_size, 32);
            case.candidates_only = head_size == 64 || head_size == 256;
            let device = OnDevice::new(&case, stream);
            let Some(&path) = device.paths(context.gpu).iter().find(|path| **path == Path::Hopper) else { return };
            let (output, pool) = device.output_and_pool(context.gpu, path);
            let empty = || Tensor::new(stream, &vec![0; size_of_val(&case.query[..])]);
            let written = [empty(), empty(), empty()];
            let own_pool = Tensor::new(stream, bytes(&case.pool));
            let given = device.attention(0);
            let [query, key, value] = written.each_ref().map(|tensor| tensor.address);
            let cache = given.cache.map(|cache| Cache { pool: own_pool.address, ..cache });
            let call = Attention { query, key, value, cache, append: true, ..given };
            let rows = case.rows().total_rows;
            let scratch = context.gpu.scratch_bytes(&call).unwrap();
            assert_eq!(scratch > 0, what == "many", "{what} D={head_size}");
            let mut chain = Chain {
                gpu: context.gpu,
                stream,
                call,
                rows,
                width: 2 * head_size,
                right: [given.query, given.key, given.value],
                others: empty(),
                zeros: Tensor::new(stream, &vec![0; rows.max(2 * head_size) * INNER * size_of::<bf16>()]),
                outputs: (0..CALLS).map(|_| empty()).collect(),
                scratch: (scratch > 0).then(|| (Tensor::new(stream, &vec![0xff; scratch]), scratch)),
            };
            let check = |chain: &Chain<'_>, how: &str| {
                for (number, got) in chain.outputs.iter().enumerate() {
                    assert!(got.read(stream) == bytes(&output), "{what} D={head_size} {how}, call {number}");
                }
                assert!(own_pool.read(stream) == bytes(&pool), "{what} D={head_size} {how}: the pool");
            };
            for _ in 0..3 {
                chain.launch();
                check(&chain, "at once");
            }
            for (settled_indices, how) in [(false, "captured"), (true, "captured, of indices that are there before")] {
                chain.call.settled_indices = settled_indices;
                stream.synchronize().unwrap();
                stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
                chain.launch();
                let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
                let graph = stream.end_capture(flags).unwrap().unwrap();
                for _ in 0..3 {
                    graph.launch().unwrap();
                    check(&chain, how);
                }
            }
        }
    }
}
