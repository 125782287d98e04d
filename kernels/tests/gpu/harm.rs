//! Index tensors that hold anything: no kernel leaves its tensors. What is around them is watched here; what is far
//! away, `compute-sanitizer` watches.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use pagoda_kernels::cpu::OperatorElement;
use pagoda_kernels::cuda::{Attention, CUdeviceptr, Cache, Scratch};
use pagoda_kernels::{bf16, f16};

use crate::Context;
use crate::common::{Case, Random, User};
use crate::device::{OnDevice, Tensor, bytes};

const AROUND: usize = 1 << 16;
const AROUND_IS: u8 = 0x5a;

/// A tensor with memory around it that nothing may write.
pub struct Guarded {
    stream: Arc<CudaStream>,
    memory: Tensor,
}

impl Guarded {
    pub fn new(stream: &Arc<CudaStream>, content: &[u8]) -> Self {
        let around = [AROUND_IS; AROUND];
        Self { stream: stream.clone(), memory: Tensor::new(stream, &[&around, content, &around].concat()) }
    }

    /// Where the tensor begins.
    pub fn inside(&self) -> CUdeviceptr {
        self.memory.address + AROUND as CUdeviceptr
    }

    pub fn untouched_around(&self) -> bool {
        let after = self.memory.read(&self.stream);
        after[..AROUND].iter().chain(&after[after.len() - AROUND..]).all(|byte| *byte == AROUND_IS)
    }

    /// The tensor as it is now. What is around it is as it was.
    pub fn read(&self) -> Vec<u8> {
        assert!(self.untouched_around(), "written outside the tensor");
        let after = self.memory.read(&self.stream);
        after[AROUND..after.len() - AROUND].to_vec()
    }
}

fn nonsense_in<T: OperatorElement>(random: &mut Random, case: &mut Case<T>) {
    let value = |random: &mut Random| match random.below(6) {
        0 => i32::MIN,
        1 => i32::MAX,
        2 => -1,
        3 => random.bits() as i32,
        _ => random.below(400) as i32,
    };
    let mut tensors = [
        &mut case.row_offsets,
        &mut case.num_candidates,
        &mut case.cached_len,
        &mut case.page_indptr,
        &mut case.page_ids,
    ];
    for _ in 0..1 + random.below(8) {
        let tensor = &mut tensors[random.below(5)];
        if !tensor.is_empty() {
            let at = random.below(tensor.len());
            tensor[at] = value(random);
        }
    }
    if let Some(contextual) = &mut case.num_contextual {
        contextual[0] = value(random);
    }
}

/// A call with anything in its index tensors.
pub fn nonsense_case<T: OperatorElement>(random: &mut Random, head_size: usize) -> Case<T> {
    let users: Vec<User> = (0..1 + random.below(6))
        .map(|_| User {
            cached: random.below(1500),
            new: random.below(150),
            candidates: random.below(150),
            contextual: 0,
        })
        .collect();
    let page_size = 8 * (1 + random.below(9));
    let mut case = Case::<T>::new(random, &users, 2, head_size, page_size);
    case.num_contextual = random.once_in(2).then(|| vec![1; users.len()]);
    (case.max_attn_len, case.target_group_size) = (random.pick(&[0, 5, i64::MAX]), random.pick(&[1, 3, i64::MAX]));
    case.candidates_only = random.once_in(3);
    nonsense_in(random, &mut case);
    case
}

pub fn nonsense(context: &Context) {
    fn check<T: OperatorElement>(context: &Context, head_size: usize) {
        let stream = context.gpu.context().new_stream().unwrap();
        for seed in 0..(context.cases / 20).max(2) {
            let case = nonsense_case::<T>(&mut Random(seed), head_size);
            let device = OnDevice::new(&case, &stream);
            let len = size_of_val(&case.query[..]);
            let guarded = |content: &[u8]| Guarded::new(&stream, content);
            let poisoned = |len: usize| guarded(&vec![AROUND_IS; len]);
            let scratch = context.gpu.most_scratch_bytes(&device.attention(0)).unwrap();
            for append in [false, true] {
                let (output, pool, memory) = (poisoned(len), guarded(bytes(&case.pool)), poisoned(scratch));
                let cache = Some(Cache { pool: pool.inside(), ..device.cache() });
                let call = Attention { output: output.inside(), cache, append, ..device.attention(0) };
                let unharmed = |what: &str| {
                    let all = [("output", &output), ("pool", &pool), ("scratch memory", &memory)];
                    if let Some((name, _)) = all.into_iter().find(|(_, guarded)| !guarded.untouched_around()) {
                        panic!("{} {what} append {append} seed {seed}: around the {name}", T::NAME);
                    }
                };
                for path in device.paths(context.gpu) {
                    // SAFETY: the tensors are as long as the shapes say; the stream is waited for by the read.
                    unsafe { context.gpu.attention_by(path, &call, stream.cu_stream()) }.unwrap();
                    unharmed(&format!("{path:?}"));
                }
                if scratch > 0 {
                    let given = Scratch { address: memory.inside(), bytes: scratch };
                    // SAFETY: as above.
                    unsafe { context.gpu.attention_in(&call, given, stream.cu_stream()) }.unwrap();
                    unharmed("with scratch memory");
                }
            }
            let pool = guarded(bytes(&case.pool));
            let mut append = device.append();
            append.cache.pool = pool.inside();
            // SAFETY: as above.
            unsafe { context.gpu.append(&append, stream.cu_stream()) }.unwrap();
            assert!(pool.untouched_around(), "{} append seed {seed}: around the pool", T::NAME);
            assert_eq!(bytes(&case.key).len(), len, "seed {seed}");
        }
    }
    check::<f32>(context, 40);
    for head_size in [32, 64, 128, 256] {
        check::<f16>(context, head_size);
        check::<bf16>(context, head_size);
    }
}
