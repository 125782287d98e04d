//! `PagedAttention`: the golden results, random calls against the reference, the same bits in chunks and in any batch, index
//! tensors that hold anything, and replays of a CUDA graph.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use pagoda_kernels::cpu::OperatorElement;
use pagoda_kernels::cpu::reference::{Attended, paged_attention};
use pagoda_kernels::cuda::{self, CudaError, Gpu, KeyWeights, PagedPath, Scratch, Type};
use pagoda_kernels::{KV_NORMS, KvFormat, bf16, f16};
use pagoda_test_support::Random;

use crate::Context;
use crate::common::{error, tolerance};
use crate::device::{bytes, elements};
use crate::harm::Guarded;
use crate::llm_cases::random::{alone, chunk, longest, random_case, random_slots, random_tiles, scattered};
use crate::llm_cases::{Case, Golden, Pool, each_golden};

/// A call with its tensors on the GPU, each with memory around it that nothing may write.
pub(crate) struct OnDevice<'a, T> {
    case: &'a Case<T>,
    stream: Arc<CudaStream>,
    /// query, key, value.
    rows: [Guarded; 3],
    /// row_offsets, cached_len, page_indptr, page_ids, positions, write_slots, token_pos.
    indices: [Guarded; 7],
    /// cos, sin, slopes.
    floats: [Guarded; 3],
    sinks: Guarded,
    /// The pool and its scales.
    pool: [Guarded; 2],
    output: Guarded,
    weights_len: usize,
    /// The key weights, and the sums that they are made of.
    weights: [Guarded; 2],
    norms: Guarded,
    scratch: Guarded,
    scratch_bytes: usize,
}

/// What the outputs of a call hold beforehand: NaN in every type.
const POISON: u8 = 0xff;

impl<'a, T: OperatorElement> OnDevice<'a, T> {
    pub(crate) fn new(case: &'a Case<T>, stream: &Arc<CudaStream>, weights_len: usize) -> Self {
        let guarded = |content: &[u8]| Guarded::new(stream, content);
        let poison = |len: usize| Guarded::new(stream, &vec![POISON; len]);
        let (none, no_floats) = (vec![], vec![]);
        let (write_slots, token_pos) =
            case.slots.as_ref().map_or((&none, &none), |(write_slots, token_pos, _)| (write_slots, token_pos));
        let positions = case.positions.as_ref().unwrap_or(&none);
        let indices =
            [&case.row_offsets, &case.cached_len, &case.page_indptr, &case.page_ids, positions, write_slots, token_pos];
        let (cos, sin) = case.rotation.as_ref().map_or((&no_floats, &no_floats), |(cos, sin, ..)| (cos, sin));
        let floats = [cos, sin, case.slopes.as_ref().unwrap_or(&no_floats)];
        let weights = case.cached_len.len() * case.kv_heads * weights_len;
        let sums = case.query.len() / case.head_size * 2;
        let mut device = Self {
            case,
            stream: Arc::clone(stream),
            rows: [&case.query, &case.key, &case.value].map(|values| guarded(bytes(values))),
            indices: indices.map(|values| guarded(bytes(values))),
            floats: floats.map(|values| guarded(bytes(values))),
            sinks: guarded(case.sinks.as_ref().map_or(&[], |sinks| bytes(sinks))),
            pool: match &case.pool {
                Pool::Native(pool) => [guarded(bytes(pool)), guarded(&[])],
                Pool::Quantised(codes, scales) => [guarded(codes), guarded(bytes(scales))],
            },
            output: poison(size_of_val(&case.query[..])),
            weights_len,
            weights: [poison(weights * size_of::<f32>()), poison(sums * size_of::<f32>())],
            norms: poison(case.key.len() / case.head_size * KV_NORMS * size_of::<f32>()),
            scratch: guarded(&[]),
            scratch_bytes: 0,
        };
        device.scratch_bytes = device.call().scratch_bytes();
        device.scratch = poison(device.scratch_bytes);
        device
    }

    /// What an engine would say of the batch; nothing where offsets are nonsense.
    fn rows_each(&self) -> (usize, usize) {
        let rows: Vec<i32> =
            self.case.row_offsets.windows(2).map(|bounds| bounds[1].saturating_sub(bounds[0])).collect();
        let total = self.case.query.len() / (self.case.query_heads * self.case.head_size);
        let least = rows.iter().filter(|rows| **rows > 0).min();
        match (least, rows.iter().max()) {
            (Some(&least), Some(&most)) if rows.iter().all(|rows| *rows >= 0) && most as usize <= total => {
                (least as usize, most as usize)
            }
            _ => (0, usize::MAX),
        }
    }

    pub(crate) fn call(&self) -> cuda::PagedAttention {
        let case = self.case;
        let [row_offsets, cached_len, page_indptr, page_ids, positions, write_slots, token_pos] =
            self.indices.each_ref().map(Guarded::inside);
        let [cos, sin, slopes] = self.floats.each_ref().map(Guarded::inside);
        let [query, key, value] = self.rows.each_ref().map(Guarded::inside);
        cuda::PagedAttention {
            element: Type::of::<T>(),
            sequences: case.cached_len.len(),
            total_rows: case.query.len() / (case.query_heads * case.head_size),
            query_heads: case.query_heads,
            kv_heads: case.kv_heads,
            head_size: case.head_size,
            query,
            key,
            value,
            output: self.output.inside(),
            row_offsets,
            cached_len,
            page_indptr,
            page_ids,
            page_entries: case.page_ids.len(),
            pool: self.pool[0].inside(),
            scales: (case.format != KvFormat::Native).then(|| self.pool[1].inside()),
            format: case.format,
            pool_pages: case.pool_pages,
            page_size: case.page_size,
            positions: case.positions.as_ref().map(|_| positions),
            rotation: case.rotation.as_ref().map(|(values, _, half_width, pairs)| cuda::Rotation {
                cos,
                sin,
                rows: values.len() / half_width,
                half_width: *half_width,
                pairs: *pairs,
            }),
            sinks: case.sinks.as_ref().map(|_| self.sinks.inside()),
            slopes: case.slopes.as_ref().map(|_| slopes),
            slots: case.slots.as_ref().map(|(_, _, len)| cuda::HeadSlots { write_slots, token_pos, len: *len }),
            key_weights: (self.weights_len > 0).then(|| KeyWeights {
                weights: self.weights[0].inside(),
                len: self.weights_len,
                row_sums: self.weights[1].inside(),
            }),
            kv_norms: Some(self.norms.inside()),
            scale: case.scale,
            window: case.window,
            softcap: case.softcap,
            // Nothing writes them: it makes no difference but in time.
            settled: case.cached_len.len().is_multiple_of(2),
            rows_each: self.rows_each(),
            scratch: (self.scratch_bytes > 0)
                .then(|| Scratch { address: self.scratch.inside(), bytes: self.scratch_bytes }),
        }
    }

    fn launch(&self, gpu: &Gpu) {
        // SAFETY: every tensor is as long as its shape says; the stream is waited for by the reads.
        unsafe { gpu.paged_attention(&self.call(), self.stream.cu_stream()) }.unwrap();
    }

    fn launch_by(&self, gpu: &Gpu, path: PagedPath) {
        // SAFETY: as above.
        unsafe { gpu.paged_attention_by(path, &self.call(), self.stream.cu_stream()) }.unwrap();
    }

    pub(crate) fn read(&self) -> Results<T> {
        let unharmed = self.rows.iter().chain(&self.indices).chain(&self.floats).chain([
            &self.sinks,
            &self.weights[1],
            &self.scratch,
        ]);
        assert!(unharmed.into_iter().all(Guarded::untouched_around), "written outside the tensors");
        Results {
            output: elements(&self.output.read()),
            weights: elements(&self.weights[0].read()),
            norms: elements(&self.norms.read()),
            pool: self.pool.each_ref().map(Guarded::read),
        }
    }
}

pub(crate) struct Results<T> {
    pub(crate) output: Vec<T>,
    pub(crate) weights: Vec<f32>,
    norms: Vec<f32>,
    /// The bytes of the pool and of its scales.
    pub(crate) pool: [Vec<u8>; 2],
}

/// One call on a pool of its own.
pub(crate) fn run<T: OperatorElement>(
    gpu: &Gpu,
    stream: &Arc<CudaStream>,
    case: &Case<T>,
    weights_len: usize,
) -> Results<T> {
    let device = OnDevice::new(case, stream, weights_len);
    device.launch(gpu);
    device.read()
}

/// The same by the kernel given.
fn run_by<T: OperatorElement>(gpu: &Gpu, stream: &Arc<CudaStream>, case: &Case<T>, path: PagedPath) -> Results<T> {
    let device = OnDevice::new(case, stream, 0);
    device.launch_by(gpu, path);
    device.read()
}

/// The same with the weights of slots.
fn weighed_by<T: OperatorElement>(
    gpu: &Gpu,
    stream: &Arc<CudaStream>,
    case: &Case<T>,
    path: PagedPath,
    weights_len: usize,
) -> Results<T> {
    let device = OnDevice::new(case, stream, weights_len);
    device.launch_by(gpu, path);
    device.read()
}

/// The paths that take a call with weights of slots.
fn weighing<T: OperatorElement>(gpu: &Gpu, stream: &Arc<CudaStream>, case: &Case<T>, len: usize) -> Vec<PagedPath> {
    gpu.paged_paths(&OnDevice::new(case, stream, len).call())
}

fn paths<T: OperatorElement>(gpu: &Gpu, stream: &Arc<CudaStream>, case: &Case<T>) -> Vec<PagedPath> {
    gpu.paged_paths(&OnDevice::new(case, stream, 0).call())
}

fn pool_bytes<T: OperatorElement>(pool: &Pool<T>) -> [&[u8]; 2] {
    match pool {
        Pool::Native(pool) => [bytes(pool), &[]],
        Pool::Quantised(codes, scales) => [codes, bytes(scales)],
    }
}

/// The pool that a call leaves, for the next one.
fn pool_of<T: OperatorElement>(results: &Results<T>, format: KvFormat) -> Pool<T> {
    match format {
        KvFormat::Native => Pool::Native(elements(&results.pool[0])),
        _ => Pool::Quantised(results.pool[0].clone(), elements::<f16>(&results.pool[1])),
    }
}

/// Compares with the reference: the output and the weights within the bounds of the specification, the pool to the bit.
fn compare<T: OperatorElement>(gpu: &Gpu, stream: &Arc<CudaStream>, case: &Case<T>, weights_len: usize, what: &str) {
    let mut pool = case.pool.clone();
    let expected = paged_attention(&case.call(), &mut pool.borrow(), weights_len).unwrap();
    let got = weighed_by(gpu, stream, case, PagedPath::Plain, weights_len);
    check(&got, &expected, what);
    for path in weighing(gpu, stream, case, weights_len) {
        let other = weighed_by(gpu, stream, case, path, weights_len);
        let off = [error(&other.output, &expected.output), error(&other.weights, &expected.key_weights)];
        assert!(off.iter().all(|off| *off <= tolerance::<T>()), "{what}: {path:?} output and key_weights {off:?}");
        assert!(other.pool == got.pool, "{what}: {path:?} the pool with key_weights");
    }
    assert!(got.pool.each_ref().map(Vec::as_slice) == pool_bytes(&pool), "{what}: the pool");
    let mut norms = vec![0.0; got.norms.len()];
    case.call().kv_norms(&pool.borrow(), &mut norms).unwrap();
    for (index, (found, expected)) in got.norms.iter().zip(&norms).enumerate() {
        let near = (found - expected).abs() <= 1e-5 * expected;
        assert!(near, "{what}: kv_norms[{index}] is {found}, expected {expected}");
    }
    // Without the weights, the same by the plain kernel, and as near by the others.
    for path in paths(gpu, stream, case) {
        let plain = run_by(gpu, stream, case, path);
        let output = error(&plain.output, &expected.output);
        assert!(output <= tolerance::<T>(), "{what}: {path:?} output {output:e}");
        assert!(plain.pool == got.pool, "{what}: {path:?} the pool");
        assert!(bytes(&plain.norms) == bytes(&got.norms), "{what}: {path:?} kv_norms");
        let same = bytes(&plain.output) == bytes(&got.output);
        assert!(same || path != PagedPath::Plain, "{what}: without key_weights");
    }
}

fn check<T: OperatorElement>(got: &Results<T>, expected: &Attended, what: &str) {
    let (output, weights) = (error(&got.output, &expected.output), error(&got.weights, &expected.key_weights));
    assert!(output <= tolerance::<T>(), "{what}: output {output:e}");
    assert!(weights <= 1e-5, "{what}: key_weights {weights:e}");
}

/// The results that a program written apart from the kernels gave.
pub fn golden(context: &Context) {
    fn one<T: OperatorElement>(gpu: &Gpu, stream: &Arc<CudaStream>, name: &str, golden: Golden<T>) {
        let Golden { case, output, key_weights, weights_len, .. } = golden;
        let plain = weighed_by(gpu, stream, &case, PagedPath::Plain, weights_len);
        check(&plain, &Attended { output, key_weights }, name);
        compare(gpu, stream, &case, weights_len, name);
    }
    let stream = context.gpu.context().new_stream().unwrap();
    each_golden!(one, context.gpu, &stream);
}

fn types(context: &Context, seed: u64, part: u64, each: impl Fn(&Arc<CudaStream>, Calls<'_>)) {
    let stream = context.gpu.context().new_stream().unwrap();
    let mut random = Random(seed);
    for number in 0..context.cases.div_ceil(part) {
        each(&stream, Calls { random: &mut random, number });
    }
}

/// Where random calls come from.
struct Calls<'a> {
    random: &'a mut Random,
    number: u64,
}

/// Every type, format and option.
pub fn random(context: &Context) {
    types(context, 61, 25, |stream, Calls { random, number }| {
        let case = random_case::<f32>(random);
        compare(context.gpu, stream, &case, longest(&case), &format!("f32 {number}"));
        let case = random_case::<f16>(random);
        compare(context.gpu, stream, &case, longest(&case), &format!("f16 {number}"));
        let case = random_case::<bf16>(random);
        compare(context.gpu, stream, &case, longest(&case), &format!("bf16 {number}"));
    });
}

/// Heads that keep different tokens.
pub fn slots(context: &Context) {
    fn one<T: OperatorElement>(context: &Context, stream: &Arc<CudaStream>, random: &mut Random, number: u64) {
        let case = random_slots::<T>(random);
        let len = case.slots.as_ref().unwrap().2;
        compare(context.gpu, stream, &case, len, &format!("slots {} {number}", T::NAME));
    }
    types(context, 62, 100, |stream, Calls { random, number }| {
        one::<f32>(context, stream, random, number);
        one::<f16>(context, stream, random, number);
        one::<bf16>(context, stream, random, number);
    });
}

/// A sequence without the others has the same bits. A prompt in chunks or token by token gives the bits of one call by the plain
/// kernel, and the same numbers within the bounds by the others, which compute few rows and many in different ways.
pub fn same_bits(context: &Context) {
    fn near<T: OperatorElement>(got: &[T], expected: &[T]) -> bool {
        let expected: Vec<f64> = expected.iter().map(|number| number.to_f32().into()).collect();
        error(got, &expected) <= 2.0 * tolerance::<T>()
    }
    fn one<T: OperatorElement>(gpu: &Gpu, stream: &Arc<CudaStream>, case: &Case<T>, path: PagedPath, number: u64) {
        let width = case.query_heads * case.head_size;
        let whole = run_by(gpu, stream, case, path);
        let most = case.row_offsets.windows(2).map(|rows| (rows[1] - rows[0]) as usize).max().unwrap();
        for size in [1, 16] {
            let mut rest = case.clone();
            for from in (0..most).step_by(size) {
                let mut part = chunk(case, from, from + size);
                part.pool = rest.pool.clone();
                let got = run_by(gpu, stream, &part, path);
                rest.pool = pool_of(&got, case.format);
                for (sequence, rows) in part.row_offsets.windows(2).enumerate().filter(|(_, rows)| rows[0] < rows[1]) {
                    let at = (case.row_offsets[sequence] as usize + from) * width;
                    let got = &got.output[rows[0] as usize * width..rows[1] as usize * width];
                    let expected = &whole.output[at..at + got.len()];
                    let same = bytes(got) == bytes(expected) || (path != PagedPath::Plain && near(got, expected));
                    assert!(same, "{} {number} {path:?}: chunks of {size} from {from} on", T::NAME);
                }
            }
            let pool = pool_bytes(&rest.pool);
            assert!(pool == whole.pool.each_ref().map(Vec::as_slice), "{} {number}: the pool", T::NAME);
        }
        for sequence in 0..case.cached_len.len() {
            let rows = case.row_offsets[sequence] as usize * width..case.row_offsets[sequence + 1] as usize * width;
            let got = run_by(gpu, stream, &alone(case, sequence), path);
            let same = bytes(&got.output) == bytes(&whole.output[rows]);
            assert!(same, "{} {number} {path:?}: {sequence} alone", T::NAME);
        }
    }
    fn each<T: OperatorElement>(gpu: &Gpu, stream: &Arc<CudaStream>, random: &mut Random, number: u64) {
        for case in [random_case::<T>(random), random_tiles::<T>(random)] {
            for path in paths(gpu, stream, &case) {
                one(gpu, stream, &case, path, number);
            }
        }
    }
    types(context, 63, 200, |stream, Calls { random, number }| {
        each::<f32>(context.gpu, stream, random, number);
        each::<f16>(context.gpu, stream, random, number);
        each::<bf16>(context.gpu, stream, random, number);
    });
}

/// Shapes that the tensor cores take: every path against the plain kernel, which `random` compares with the reference, for
/// sequences that are longer than the reference is fast enough for.
pub fn tiles(context: &Context) {
    fn one<T: OperatorElement>(context: &Context, stream: &Arc<CudaStream>, random: &mut Random, number: u64) {
        let mut case = random_tiles::<T>(random);
        if random.once_in(3) {
            case = scattered(case, random);
        }
        let paths = paths(context.gpu, stream, &case);
        assert!(paths.len() > 1, "{} {number}: no path but the plain one", T::NAME);
        if let Some((_, _, len)) = &case.slots {
            let weighed = |path| weighed_by(context.gpu, stream, &case, path, *len);
            let plain = weighed(PagedPath::Plain);
            let expected: Vec<f64> = plain.weights.iter().map(|&weight| weight.into()).collect();
            let paths = weighing(context.gpu, stream, &case, *len);
            assert!(paths.contains(&PagedPath::Mma), "{} {number}: weights by the plain kernel alone", T::NAME);
            for path in paths {
                let got = weighed(path);
                let off = error(&got.weights, &expected);
                assert!(off <= tolerance::<T>(), "{} {number}: {path:?} key_weights {off:e}", T::NAME);
                let same = bytes(&got.output) == bytes(&run_by(context.gpu, stream, &case, path).output);
                assert!(same, "{} {number}: {path:?} with key_weights", T::NAME);
                let each = case.kv_heads * len;
                let has_rows = |&sequence: &usize| case.row_offsets[sequence] < case.row_offsets[sequence + 1];
                for sequence in (0..case.cached_len.len()).filter(has_rows).take(4) {
                    let own = weighed_by(context.gpu, stream, &alone(&case, sequence), path, *len);
                    let of_sequence = sequence * each..(sequence + 1) * each;
                    let same = bytes(&own.weights[of_sequence.clone()]) == bytes(&got.weights[of_sequence]);
                    assert!(same, "{} {number}: {path:?} key_weights of {sequence} alone", T::NAME);
                }
            }
        }
        let plain = run_by(context.gpu, stream, &case, PagedPath::Plain);
        let expected: Vec<f64> = plain.output.iter().map(|number| number.to_f32().into()).collect();
        for path in paths {
            let got = run_by(context.gpu, stream, &case, path);
            let output = error(&got.output, &expected);
            let what = format!(
                "{} {number} {path:?}: {}/{} heads of {}, {:?}, pages of {}, rows {:?}, cached {:?}, window {}, softcap {}",
                T::NAME,
                case.query_heads,
                case.kv_heads,
                case.head_size,
                case.format,
                case.page_size,
                case.row_offsets,
                case.cached_len,
                case.window,
                case.softcap
            );
            assert!(output <= tolerance::<T>(), "{what}: output {output:e}");
            assert!(got.pool == plain.pool, "{what}: the pool");
        }
    }
    types(context, 66, 10, |stream, Calls { random, number }| {
        one::<f16>(context, stream, random, number);
        one::<bf16>(context, stream, random, number);
    });
}

/// Index tensors that hold anything: nothing around a tensor is written. `compute-sanitizer` sees what is read.
pub fn nonsense(context: &Context) {
    fn spoil(random: &mut Random, values: &mut [i32]) {
        for _ in 0..1 + random.below(4) {
            if !values.is_empty() {
                let at = random.below(values.len());
                values[at] = match random.below(6) {
                    0 => i32::MIN,
                    1 => i32::MAX,
                    2 => -1,
                    3 => random.bits() as i32,
                    _ => random.below(400) as i32,
                };
            }
        }
    }
    fn one<T: OperatorElement>(context: &Context, stream: &Arc<CudaStream>, random: &mut Random) {
        let mut case = if random.once_in(3) { random_slots::<T>(random) } else { random_case::<T>(random) };
        let mut indices = vec![&mut case.row_offsets, &mut case.cached_len, &mut case.page_indptr, &mut case.page_ids];
        indices.extend(&mut case.positions);
        if let Some((write_slots, token_pos, _)) = &mut case.slots {
            indices.extend([write_slots, token_pos]);
        }
        for _ in 0..1 + random.below(3) {
            let at = random.below(indices.len());
            spoil(random, indices[at]);
        }
        let device = OnDevice::new(&case, stream, 40);
        device.launch(context.gpu);
        device.read();
    }
    types(context, 64, 25, |stream, Calls { random, .. }| {
        one::<f32>(context, stream, random);
        one::<f16>(context, stream, random);
        one::<bf16>(context, stream, random);
    });
}

/// Shapes that no kernel takes are refused, with the value.
pub fn refused(context: &Context) {
    let stream = context.gpu.context().new_stream().unwrap();
    let case = (0..).map(|seed| random_case::<f32>(&mut Random(seed)));
    let fits = |case: &Case<f32>| case.rotation.is_some() && case.format == KvFormat::Native && case.kv_heads > 1;
    let case = case.into_iter().find(fits).unwrap();
    let device = OnDevice::new(&case, &stream, 0);
    type Change = fn(&mut cuda::PagedAttention);
    let changes: [(Change, &str); 11] = [
        (|call| call.head_size = 513, "query: heads of 513 numbers, expected 1 to 512"),
        (|call| call.head_size = 0, "query: heads of 0 numbers"),
        (|call| call.query_heads += 1, "heads, expected a multiple of the"),
        (|call| call.kv_heads = 0, "expected a multiple of the 0 heads of key"),
        (|call| call.page_size = 12, "kv_pool: page_size 12, expected a multiple of 8"),
        (|call| call.format = KvFormat::Int8, "kv_scales: missing, expected beside a pool of Int8"),
        (|call| call.positions = None, "positions: missing, expected beside cos and sin"),
        (|call| call.rotation.as_mut().unwrap().half_width = 65, "cos: rows of 65, expected 1 to"),
        (|call| call.rotation.as_mut().unwrap().rows = 0, "cos: no rows"),
        (|call| call.total_rows = usize::MAX / 8, "T "),
        (
            |call| {
                (call.rotation, call.positions) = (None, None);
                call.slots = Some(cuda::HeadSlots { write_slots: 0, token_pos: 0, len: 1 });
            },
            "positions: missing, expected beside token_pos",
        ),
    ];
    for (change, text) in changes {
        let mut call = device.call();
        call.total_rows = call.total_rows.max(1);
        change(&mut call);
        // SAFETY: refused before anything is read.
        let error = unsafe { context.gpu.paged_attention(&call, stream.cu_stream()) }.unwrap_err();
        assert!(matches!(&error, CudaError::Unsupported(message) if message.contains(text)), "{text}: {error}");
    }
    device.read();
}

/// A CUDA graph of a step: each replay follows what the tensors hold then.
pub fn captured(context: &Context) {
    let mut random = Random(65);
    let first = std::iter::repeat_with(|| random_case::<bf16>(&mut random));
    let first = first.into_iter().find(|case| case.format == KvFormat::Int8 && case.total_rows() > 4).unwrap();
    let len = longest(&first);
    replayed(context, first, len);
    for format in [KvFormat::Native, KvFormat::Int4] {
        let tiles = std::iter::repeat_with(|| random_tiles::<bf16>(&mut random));
        let first = tiles.into_iter().find(|case| case.format == format && case.total_rows() > 40).unwrap();
        replayed(context, first, 0);
    }
}

fn replayed(context: &Context, first: Case<bf16>, len: usize) {
    let (gpu, stream) = (context.gpu, context.gpu.context().new_stream().unwrap());
    // The same shapes: other numbers, and other pages.
    let mut second = first.clone();
    second.query.reverse();
    second.key.reverse();
    second.value.reverse();
    second.page_ids.reverse();
    let expected = [&first, &second].map(|case| run(gpu, &stream, case, len));
    assert!(bytes(&expected[0].output) != bytes(&expected[1].output));
    let given = [&first, &second].map(|case| OnDevice::new(case, &stream, len));
    let device = OnDevice::new(&first, &stream, len);
    stream.synchronize().unwrap();
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    device.launch(gpu);
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags).unwrap().unwrap();
    for replay in 0..4 {
        let (from, case) = (&given[replay % 2], if replay % 2 == 0 { &first } else { &second });
        let rows = device.rows.iter().zip(&from.rows).zip([&case.query, &case.key, &case.value]);
        let rows = rows.map(|((to, from), values)| (to, from, size_of_val(&values[..])));
        let pages = (&device.indices[3], &from.indices[3], size_of_val(&case.page_ids[..]));
        // `from` is launched on nothing, so its pool is as it was given.
        let [codes, scales] = pool_bytes(&case.pool).map(<[u8]>::len);
        let pools = [(&device.pool[0], &from.pool[0], codes), (&device.pool[1], &from.pool[1], scales)];
        for (to, from, bytes) in rows.chain([pages]).chain(pools) {
            // SAFETY: both are as long as that, and apart.
            unsafe { gpu.copy(to.inside(), from.inside(), bytes, stream.cu_stream()) }.unwrap();
        }
        graph.launch().unwrap();
        let (got, expected) = (device.read(), &expected[replay % 2]);
        assert!(bytes(&got.output) == bytes(&expected.output), "replay {replay}");
        assert!(bytes(&got.weights) == bytes(&expected.weights), "replay {replay}: key_weights");
        assert!(bytes(&got.norms) == bytes(&expected.norms), "replay {replay}: kv_norms");
        assert!(got.pool == expected.pool, "replay {replay}: the pool");
    }
}
