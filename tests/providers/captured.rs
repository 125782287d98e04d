//! Pools that stay on the GPU, and CUDA graphs: through ONNX Runtime's C interface, for what Pagoda's own puts on top.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use pagoda::device::{Arrivals, DeviceMemory, Gpu, PinnedMemory, SideStream};
use pagoda_kernels::cpu::OperatorElement;
use pagoda_kernels::cpu::reference;
use pagoda_kernels::{bf16, f16};

use crate::common::{Case, Random, User, bits, error, tolerance};
use crate::operators::{Inputs, Number, graphs};
use crate::session::{Binding, Memory, Session};

#[test]
#[ignore = "needs a GPU and ONNX Runtime's CUDA provider"]
fn a_captured_graph_gives_what_the_indices_say_at_each_replay() {
    let _alone = crate::GPU.write().unwrap_or_else(std::sync::PoisonError::into_inner);
    let few = [[user(1500, 20, 30), user(40, 10, 5)], [user(60, 3, 12), user(1500, 15, 35)]];
    check::<f32, _>(&few, 32);
    check::<f16, _>(&few, 64);
    check::<bf16, _>(&few, 128);
}

/// More users with long histories than clusters fit on the chip: the operator asks for scratch memory.
#[test]
#[ignore = "needs a GPU and ONNX Runtime's CUDA provider"]
fn a_captured_graph_has_its_memory_to_work_in() {
    let _alone = crate::GPU.write().unwrap_or_else(std::sync::PoisonError::into_inner);
    let many = [[user(1100, 4, 9); 10], [user(1090, 6, 7); 10]];
    check::<f16, _>(&many, 64);
    check::<bf16, _>(&many, 128);
}

/// The content of one pool arrives late, and that of another one later still.
#[test]
#[ignore = "needs a GPU and ONNX Runtime's CUDA provider"]
fn attention_waits_for_what_is_on_its_way_into_its_own_pool() {
    let _alone = crate::GPU.write().unwrap_or_else(std::sync::PoisonError::into_inner);
    let gpu = Gpu::shared(0).unwrap();
    let stream = gpu.context().new_stream().unwrap();
    let case = Case::<bf16>::new(&mut Random(1), &[user(1500, 20, 30), user(40, 10, 5)], 2, 128, 32);
    let expected = reference::hstu_attention(&case.attention()).unwrap();
    // With the new rows, so that the order of writes to them does not matter.
    let mut content = case.pool.clone();
    reference::paged_kv_append(&case.append(), &mut content).unwrap();
    let pool = bytes(&content);
    let pinned = PinnedMemory::zeroed(gpu, pool.len()).unwrap();
    // SAFETY: the length is right, and nothing else uses it.
    unsafe { pinned.data().copy_from_nonoverlapping(pool.as_ptr(), pool.len()) };
    let late = Late::new(gpu);
    for (nodes, graph) in graphs(&case) {
        // The lazy load of a kernel waits for all work of the GPU.
        let used = Session::open(&graph);
        Bound::new(&used, &case, &stream).binding.run();
        let session = Session::open(&graph);
        let mut bound = Bound::new(&session, &case, &stream);
        let arrivals = Arrivals::new(gpu, bound.pool.address).unwrap();
        let elsewhere = DeviceMemory::zeroed(gpu, 256).unwrap();
        let others = Arrivals::new(gpu, elsewhere.address()).unwrap();
        let (ours, theirs) = (SideStream::new(gpu).unwrap(), SideStream::new(gpu).unwrap());
        // Ordinary, captured, and replayed.
        for round in 0..4 {
            bound.write(&case);
            bound.stream.memcpy_htod(&vec![0xff_u8; pool.len()], &mut bound.pool.memory).unwrap();
            bound.stream.synchronize().unwrap();
            late.occupy(&ours, 0, 4);
            // SAFETY: both memories have this length, and the run waits for the stream.
            unsafe { ours.upload(bound.pool.address, pinned.data(), pool.len()) }.unwrap();
            arrivals.mark(&ours).unwrap();
            late.occupy(&theirs, 1, 40);
            others.mark(&theirs).unwrap();
            assert!(!ours.is_done().unwrap(), "it is on its way");
            bound.binding.run();
            bound.expect(&case, &expected, &format!("{nodes} round {round}"));
            assert!(!theirs.is_done().unwrap(), "{nodes} round {round} waited for another pool");
            ours.wait().unwrap();
            theirs.wait().unwrap();
        }
    }
}

/// Copies that take long.
struct Late {
    host: PinnedMemory,
    device: DeviceMemory,
}

impl Late {
    /// About 5 ms.
    const BYTES: usize = 256 << 20;

    fn new(gpu: &'static Gpu) -> Self {
        let (host, device) = (PinnedMemory::zeroed(gpu, Self::BYTES), DeviceMemory::zeroed(gpu, 2 * Self::BYTES));
        Self { host: host.unwrap(), device: device.unwrap() }
    }

    /// Enqueues copies on a stream, into one half of the device memory.
    fn occupy(&self, stream: &SideStream, half: u64, copies: usize) {
        for _ in 0..copies {
            let to = self.device.address() + half * Self::BYTES as u64;
            // SAFETY: each half has this length, and both memories live until the stream has been waited for.
            unsafe { stream.upload(to, self.host.data(), Self::BYTES) }.unwrap();
        }
    }
}

fn user(cached: usize, new: usize, candidates: usize) -> User {
    User { cached, new, candidates, contextual: 0 }
}

/// Two calls of the same shapes in which everything else differs.
fn cases<T: OperatorElement, const N: usize>(users: &[[User; N]; 2], head_size: usize) -> [Case<T>; 2] {
    let pages = |case: &Case<T>| case.pool_pages;
    let first = Case::new(&mut Random(1), &users[0], 2, head_size, 32);
    let others = (2..).map(|seed| Case::new(&mut Random(seed), &users[1], 2, head_size, 32));
    let second = others.into_iter().find(|case| pages(case) == pages(&first)).unwrap();
    assert_eq!((first.query.len(), first.page_ids.len()), (second.query.len(), second.page_ids.len()));
    [first, second]
}

fn check<T: Number, const N: usize>(users: &[[User; N]; 2], head_size: usize) {
    let gpu = Gpu::open(0).unwrap();
    let stream = gpu.context().new_stream().unwrap();
    let [first, second] = cases::<T, N>(users, head_size);
    let [first, second] = [&first, &second].map(|case| (case, reference::hstu_attention(&case.attention()).unwrap()));
    for (nodes, graph) in graphs(first.0) {
        check_graph(&graph, &stream, &first, &second, nodes);
    }
}

/// A case and its output.
type Expected<'a, T> = (&'a Case<T>, Vec<f64>);

fn check_graph<T: Number>(
    graph: &[u8],
    stream: &Arc<CudaStream>,
    first: &Expected<'_, T>,
    second: &Expected<'_, T>,
    nodes: &str,
) {
    let session = Session::open(graph);
    let mut bound = Bound::new(&session, first.0, stream);
    // The first run is an ordinary one, the second is captured; both are in place on the pool.
    for (round, (case, expected)) in [first, first, second, first, second].into_iter().enumerate() {
        bound.write(case);
        bound.binding.run();
        bound.expect(case, expected, &format!("{} {nodes} round {round}", T::NAME));
    }
    let (first, expected) = first;
    // A replay ignores the current binding: so this was one.
    let elsewhere = Memory::new(stream, &vec![0xff_u8; size_of_val(&first.query[..])]);
    bound.binding.input("query", &elsewhere, T::TYPE as i32, &first.dims_of_rows());
    bound.write(first);
    bound.binding.run();
    bound.expect(first, expected, &format!("{} {nodes} replayed", T::NAME));
}

impl<T> Case<T> {
    fn dims_of_rows(&self) -> Vec<i64> {
        vec![(self.query.len() / (self.heads * self.head_size)) as i64, self.heads as i64, self.head_size as i64]
    }
}

/// The tensors of a call on the device, bound.
struct Bound<'a> {
    stream: Arc<CudaStream>,
    binding: Binding<'a>,
    inputs: Vec<(&'static str, Memory)>,
    pool: Memory,
    output: Memory,
}

impl<'a> Bound<'a> {
    fn new<T: Number>(session: &'a Session, case: &Case<T>, stream: &Arc<CudaStream>) -> Self {
        let tensors = Inputs::new(case);
        let memory = |tensor: &pagoda::Tensor| Memory::new(stream, tensor_bytes(tensor));
        let inputs: Vec<_> = tensors.tensors.iter().map(|(name, tensor)| (*name, memory(tensor))).collect();
        let (pool, output) = (memory(&tensors.pool), Memory::new(stream, bytes(&case.query)));
        let binding = Binding::new(session);
        let this = Self { stream: Arc::clone(stream), binding, inputs, pool, output };
        for ((name, memory), (_, tensor)) in this.inputs.iter().zip(&tensors.tensors) {
            this.binding.input(name, memory, tensor.element_type() as i32, tensor.dims());
        }
        this.binding.input("kv_pool", &this.pool, T::TYPE as i32, tensors.pool.dims());
        this.binding.output("kv_pool_out", &this.pool, T::TYPE as i32, tensors.pool.dims());
        this.binding.output("output", &this.output, T::TYPE as i32, &case.dims_of_rows());
        this
    }

    /// Writes the numbers of a call over those of the first one, and NaN into its output.
    fn write<T: Number>(&mut self, case: &Case<T>) {
        let tensors = Inputs::new(case);
        for ((_, memory), (_, tensor)) in self.inputs.iter_mut().zip(&tensors.tensors) {
            self.stream.memcpy_htod(tensor_bytes(tensor), &mut memory.memory).unwrap();
        }
        self.stream.memcpy_htod(tensor_bytes(&tensors.pool), &mut self.pool.memory).unwrap();
        let nan = vec![0xff_u8; size_of_val(&case.query[..])];
        self.stream.memcpy_htod(&nan, &mut self.output.memory).unwrap();
        self.stream.synchronize().unwrap();
    }

    fn expect<T: Number>(&self, case: &Case<T>, expected: &[f64], what: &str) {
        let error = error(&self.read::<T>(&self.output), expected);
        assert!(error <= tolerance::<T>(), "{what}: error {error:e}");
        let mut pool = case.pool.clone();
        reference::paged_kv_append(&case.append(), &mut pool).unwrap();
        assert!(bits(&self.read::<T>(&self.pool)) == bits(&pool), "{what}: the pool");
    }

    fn read<T: Number>(&self, memory: &Memory) -> Vec<T> {
        let content = self.stream.clone_dtoh(&memory.memory).unwrap();
        self.stream.synchronize().unwrap();
        // SAFETY: the content is elements of this type, wherever it lies.
        content.chunks_exact(size_of::<T>()).map(|at| unsafe { at.as_ptr().cast::<T>().read_unaligned() }).collect()
    }
}

fn tensor_bytes(tensor: &pagoda::Tensor) -> &[u8] {
    let (data, len) = tensor.memory().unwrap();
    // SAFETY: the memory of the tensor.
    unsafe { std::slice::from_raw_parts(data.cast(), len) }
}

fn bytes<T>(values: &[T]) -> &[u8] {
    // SAFETY: numbers without padding, seen as bytes.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}
