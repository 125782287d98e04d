//! HstuAttention over quantised pools: pages as the CPU writes them, and the output that the stored numbers give.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use pagoda_kernels::cpu::{OperatorElement, reference};
use pagoda_kernels::cuda::{Attention, Cache, Gpu, Path, QuantisedPages, Scratch};
use pagoda_kernels::{KvFormat, bf16, f16};

use crate::Context;
use crate::common::quantised::{FORMATS, Pool};
use crate::common::{Case, Random, User, bits, error, tolerance};
use crate::device::{OnDevice, Tensor, bytes, elements};
use crate::harm::{Guarded, nonsense_case};
use crate::parity::{case, long_case, print, spread, worse};

/// A call with its quantised pool on the GPU, and memory to open it in.
struct Quantised<'a, T> {
    gpu: &'a Gpu,
    stream: Arc<CudaStream>,
    device: OnDevice<'a, T>,
    format: KvFormat,
    codes: Guarded,
    scales: Guarded,
    opened: Arc<Guarded>,
}

impl<'a, T: OperatorElement> Quantised<'a, T> {
    fn new(gpu: &'a Gpu, stream: &Arc<CudaStream>, case: &'a Case<T>, pool: &Pool) -> Self {
        let device = OnDevice::new(case, stream);
        let memory = vec![0xff; device.attention(0).opened_bytes().unwrap()];
        Self {
            gpu,
            stream: stream.clone(),
            device,
            format: pool.format,
            codes: Guarded::new(stream, &pool.codes),
            scales: Guarded::new(stream, bytes(&pool.scales)),
            opened: Arc::new(Guarded::new(stream, &memory)),
        }
    }

    fn call(&self, output: u64) -> Attention {
        let cache = Some(Cache { pool: self.codes.inside(), ..self.device.cache() });
        Attention { cache, append: true, ..self.device.attention(output) }
    }

    /// Enqueues everything; by the fastest kernel without a path.
    fn enqueue(&self, path: Option<Path>, output: u64) {
        let (call, stream) = (self.call(output), self.stream.cu_stream());
        let pages = QuantisedPages { format: self.format, scales: self.scales.inside() };
        let memory = Scratch { address: self.opened.inside(), bytes: call.opened_bytes().unwrap() };
        // SAFETY: tensors are as long as the shapes say, and live until the stream is waited for.
        unsafe {
            let opened = self.gpu.open_pages(&call, pages, memory, stream).unwrap();
            match path {
                Some(path) => self.gpu.attention_by(path, &opened, stream).unwrap(),
                None => self.gpu.attention(&opened, stream).unwrap(),
            }
        }
    }

    fn poisoned(&self) -> Guarded {
        Guarded::new(&self.stream, &vec![0xff; size_of_val(&self.device.case.query[..])])
    }

    fn paths(&self) -> Vec<Path> {
        self.gpu.paths(&self.call(0).opened(self.opened.inside()).unwrap())
    }
}

/// Every path gives what the stored numbers give, and the pages that the CPU writes.
fn compare<T: OperatorElement>(context: &Context, case: &Case<T>, format: KvFormat, what: &str) -> Vec<(String, f64)> {
    let stream = context.gpu.context().new_stream().unwrap();
    let before = Pool::new(case, format);
    let mut stored = before.clone();
    reference::paged_kv_append_quantised(&case.append(), &mut stored.writes()).unwrap();
    let expected = reference::hstu_attention(&stored.opened(case).attention()).unwrap();
    let of_path = |path: Path| {
        let what = format!("{what} {} {format:?} {path:?}", T::NAME);
        let call = Quantised::new(context.gpu, &stream, case, &before);
        let output = call.poisoned();
        call.enqueue(Some(path), output.inside());
        let output: Vec<T> = elements(&output.read());
        assert!(call.codes.read() == stored.codes, "{what}: codes");
        assert!(call.scales.read() == bytes(&stored.scales), "{what}: scales");
        assert!(call.opened.untouched_around(), "{what}: around the opened memory");
        let error = error(&output, &expected);
        let users = &case.users;
        assert!(error <= tolerance::<T>(), "{what} error {error:e}: D={} {users:?}", case.head_size);
        (format!("{} {format:?} {path:?}", T::NAME), error)
    };
    Quantised::new(context.gpu, &stream, case, &before).paths().into_iter().map(of_path).collect()
}

/// int4 takes heads of even sizes.
fn format(seed: u64, head_size: usize) -> KvFormat {
    let format = FORMATS[seed as usize % 3];
    if head_size.is_multiple_of(2) { format } else { KvFormat::Int8 }
}

pub fn random(context: &Context) {
    let worst = std::sync::Mutex::default();
    fn check<T: OperatorElement>(context: &Context, worst: &std::sync::Mutex<Vec<(String, f64)>>) {
        spread(context.cases, |seed| {
            let long = seed % 10 == 0;
            let mut case = if long { long_case::<T>(seed) } else { case::<T>(2_000_000 + seed) };
            case.candidates_only = seed % 4 == 0;
            let format = format(seed, case.head_size);
            for (path, error) in compare(context, &case, format, &format!("seed {seed}")) {
                worse(worst, path, error);
            }
        });
    }
    check::<f32>(context, &worst);
    check::<f16>(context, &worst);
    check::<bf16>(context, &worst);
    print(worst);
}

/// Calls one after another use the same memory, and nothing is waited for between them.
pub fn followed(context: &Context) {
    fn check<T: OperatorElement>(context: &Context, head_size: usize, format: KvFormat) {
        let stream = context.gpu.context().new_stream().unwrap();
        let users = [User { cached: 1500, new: 90, candidates: 40, contextual: 0 }; 6];
        let cases = [1, 2].map(|seed| Case::<T>::new(&mut Random(seed), &users, 2, head_size, 32));
        let pools = cases.each_ref().map(|case| Pool::new(case, format));
        let mut calls = [0, 1].map(|at| Quantised::new(context.gpu, &stream, &cases[at], &pools[at]));
        let of = |call: &Quantised<'_, T>| {
            let output = call.poisoned();
            call.enqueue(None, output.inside());
            output
        };
        let alone = calls.each_ref().map(|call| bits(&elements::<T>(&of(call).read())));
        calls[1].opened = calls[0].opened.clone();
        let outputs: Vec<Guarded> = (0..16).map(|turn| of(&calls[turn % 2])).collect();
        for (turn, output) in outputs.iter().enumerate() {
            let output = bits(&elements::<T>(&output.read()));
            assert!(output == alone[turn % 2], "{} {format:?} {head_size} turn {turn}", T::NAME);
        }
    }
    for format in FORMATS {
        check::<f32>(context, 24, format);
        for head_size in [32, 64, 128, 256] {
            check::<f16>(context, head_size, format);
            check::<bf16>(context, head_size, format);
        }
    }
}

/// Index tensors that hold anything.
pub fn nonsense(context: &Context) {
    fn check<T: OperatorElement>(context: &Context, head_size: usize) {
        let stream = context.gpu.context().new_stream().unwrap();
        for seed in 0..(context.cases / 20).max(2) {
            let case = nonsense_case::<T>(&mut Random(seed), head_size);
            // Codes and scales of anything.
            let blocks = case.pool_pages * 2 * case.page_size * case.heads;
            let format = FORMATS[seed as usize % 3];
            let (codes, scales) = (blocks * format.pool_width(head_size), blocks * format.scales_width());
            let pool = Pool { format, codes: vec![0x5b; codes], scales: vec![0x3c01; scales] };
            let call = Quantised::new(context.gpu, &stream, &case, &pool);
            for path in call.paths() {
                let output = call.poisoned();
                call.enqueue(Some(path), output.inside());
                let all =
                    [("output", &output), ("codes", &call.codes), ("scales", &call.scales), ("memory", &call.opened)];
                if let Some((name, _)) = all.into_iter().find(|(_, guarded)| !guarded.untouched_around()) {
                    panic!("{} {format:?} {path:?} seed {seed}: around the {name}", T::NAME);
                }
            }
        }
    }
    check::<f32>(context, 42);
    for head_size in [32, 64, 128, 256] {
        check::<f16>(context, head_size);
        check::<bf16>(context, head_size);
    }
}

/// Scales at an odd address, too little memory, and calls that are none of a quantised pool.
pub fn refused(context: &Context) {
    let stream = context.gpu.context().new_stream().unwrap();
    let users = [User { cached: 20, new: 3, candidates: 2, contextual: 0 }];
    let case = Case::<f16>::new(&mut Random(1), &users, 1, 33, 8);
    let device = OnDevice::new(&case, &stream);
    let memory = Tensor::new(&stream, &vec![0; device.attention(0).opened_bytes().unwrap()]);
    let refuse = |call: Attention, format: KvFormat, scales: u64, bytes: usize, message: &str| {
        let memory = Scratch { address: memory.address, bytes };
        let pages = QuantisedPages { format, scales };
        // SAFETY: nothing is launched.
        let error =
            unsafe { context.gpu.open_pages(&call, pages, memory, stream.cu_stream()) }.unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    };
    let call = Attention { append: true, ..device.attention(0) };
    let bytes = call.opened_bytes().unwrap();
    refuse(call, KvFormat::Native, 256, bytes, "its format is native");
    refuse(call, KvFormat::Int4, 256, bytes, "heads of 33 numbers");
    refuse(call, KvFormat::Int8, 258, bytes, "aligned");
    refuse(call, KvFormat::Int8, 256, bytes - 1, &format!("expected {bytes}"));
    refuse(device.attention(0), KvFormat::Fp8, 256, bytes, "does not append");
    refuse(Attention { cache: None, append: false, ..call }, KvFormat::Fp8, 256, bytes, "expected a cache");
}
