//! Index tensors that hold anything: no kernel leaves its tensors. What is around them is watched here; what is far away,
//! `compute-sanitizer` watches.

use pagoda_kernels::cuda::{Attention, CUdeviceptr, Scratch};
use pagoda_kernels::{Element, bf16, f16};

use crate::Context;
use crate::common::{Case, Random, User};
use crate::device::{OnDevice, Tensor, bytes};

const AROUND: usize = 1 << 16;

fn nonsense_in<T: Element>(random: &mut Random, case: &mut Case<T>) {
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

pub fn nonsense(context: &Context) {
    fn check<T: Element>(context: &Context, head_size: usize) {
        let stream = context.gpu.context().new_stream().unwrap();
        for seed in 0..context.cases / 20 {
            let mut random = Random(seed);
            let users: Vec<User> = (0..1 + random.below(6))
                .map(|_| User {
                    cached: random.below(1500),
                    new: random.below(150),
                    candidates: random.below(150),
                    contextual: 0,
                })
                .collect();
            let page_size = 8 * (1 + random.below(9));
            let mut case = Case::<T>::new(&mut random, &users, 2, head_size, page_size);
            case.num_contextual = random.once_in(2).then(|| vec![1; users.len()]);
            (case.max_attn_len, case.target_group_size) =
                (random.pick(&[0, 5, i64::MAX]), random.pick(&[1, 3, i64::MAX]));
            nonsense_in(&mut random, &mut case);
            let device = OnDevice::new(&case, &stream);
            let len = size_of_val(&case.query[..]);
            for path in device.paths(&context.gpu) {
                let guarded = Tensor::new(&stream, &vec![0x5a; len + 2 * AROUND]);
                let call = Attention { output: guarded.address + AROUND as CUdeviceptr, ..device.attention(0) };
                // SAFETY: the tensors are as long as the shapes say; the stream is waited for by the read.
                unsafe { context.gpu.attention_by(path, &call, stream.cu_stream()) }.unwrap();
                let after = guarded.read(&stream);
                let untouched = |part: &[u8]| part.iter().all(|byte| *byte == 0x5a);
                assert!(untouched(&after[..AROUND]), "{} {path:?} seed {seed}: before the output", T::NAME);
                assert!(untouched(&after[AROUND + len..]), "{} {path:?} seed {seed}: behind the output", T::NAME);
            }
            let scratch = context.gpu.most_scratch_bytes(&device.attention(0)).unwrap();
            if scratch > 0 {
                let guarded = Tensor::new(&stream, &vec![0x5a; len + 2 * AROUND]);
                let memory = Tensor::new(&stream, &vec![0x5a; scratch + 2 * AROUND]);
                let call = Attention { output: guarded.address + AROUND as CUdeviceptr, ..device.attention(0) };
                let given = Scratch { address: memory.address + AROUND as CUdeviceptr, bytes: scratch };
                // SAFETY: as above.
                unsafe { context.gpu.attention_in(&call, given, stream.cu_stream()) }.unwrap();
                for (after, inside) in [(guarded.read(&stream), len), (memory.read(&stream), scratch)] {
                    let untouched = after[..AROUND].iter().chain(&after[AROUND + inside..]).all(|byte| *byte == 0x5a);
                    assert!(untouched, "{} seed {seed}: around the output or the scratch memory", T::NAME);
                }
            }
            let pool = Tensor::new(&stream, &vec![0x5a; size_of_val(&case.pool[..]) + 2 * AROUND]);
            let mut append = device.append();
            append.cache.pool = pool.address + AROUND as CUdeviceptr;
            // SAFETY: as above.
            unsafe { context.gpu.append(&append, stream.cu_stream()) }.unwrap();
            let after = pool.read(&stream);
            let end = after.len() - AROUND;
            let untouched = after[..AROUND].iter().chain(&after[end..]).all(|byte| *byte == 0x5a);
            assert!(untouched, "{} append seed {seed}: around the pool", T::NAME);
            assert_eq!(bytes(&case.key).len(), len, "seed {seed}");
        }
    }
    check::<f32>(context, 40);
    for head_size in [32, 64, 128, 256] {
        check::<f16>(context, head_size);
        check::<bf16>(context, head_size);
    }
}
