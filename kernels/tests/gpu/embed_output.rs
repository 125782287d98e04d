//! The operators around the layers: what the reference gives, and the same bits whatever else is in the batch.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use pagoda_kernels::cpu::OperatorElement;
use pagoda_kernels::cuda::{self, Gpu, Lookup, Type};
use pagoda_kernels::{Activation, HstuLinear, HstuUnit, bf16, f16};
use pagoda_test_support::Random;

use crate::Context;
use crate::common::{error, tolerance};
use crate::dense_cases::Numbers;
use crate::device::{Tensor, bytes};
use crate::embed_output_cases::{Embed, Linear, Unit};
use crate::written::Written;

struct Device<'a> {
    gpu: &'a Gpu,
    stream: Arc<CudaStream>,
}

impl<'a> Device<'a> {
    fn new(context: &'a Context) -> Self {
        Self { gpu: context.gpu, stream: context.gpu.context().new_stream().unwrap() }
    }

    fn tensor<T: Copy>(&self, values: &[T]) -> Tensor {
        Tensor::new(&self.stream, bytes(values))
    }

    fn unit<T: OperatorElement>(&self, case: &HstuUnit<'_, T>) -> Vec<f32> {
        let HstuUnit { rows, width, epsilon, .. } = *case;
        let (x, y) = (self.tensor(case.x), Written::new::<f32>(&self.stream, rows * width));
        let call = cuda::Unit { element: Type::of::<T>(), rows, width, x: x.address, y: y.address(), epsilon };
        // SAFETY: as long as the call says; waited for by the read.
        unsafe { self.gpu.unit(&call, self.stream.cu_stream()) }.unwrap();
        y.read(&self.stream)
    }

    fn linear(&self, case: &HstuLinear<'_>, tf32: bool, constant: bool) -> Vec<f32> {
        let HstuLinear { rows, inner, width, activation, .. } = *case;
        let [x, weight] = [case.x, case.weight].map(|values| self.tensor(values));
        let bias = case.bias.map(|bias| self.tensor(bias));
        let y = Written::new::<f32>(&self.stream, rows * width);
        let call = cuda::Linear {
            rows,
            inner,
            width,
            x: x.address,
            weight: weight.address,
            bias: bias.as_ref().map(|bias| bias.address),
            y: y.address(),
            activation,
            tf32,
            constant,
        };
        // SAFETY: as above.
        unsafe { self.gpu.linear(&call, self.stream.cu_stream()) }.unwrap();
        y.read(&self.stream)
    }

    fn embed<T: OperatorElement>(&self, case: &Embed) -> Vec<T> {
        let on_device = |lookups: &[(Vec<f32>, Vec<i64>)]| -> Vec<[Tensor; 2]> {
            lookups.iter().map(|(table, index)| [self.tensor(table), self.tensor(index)]).collect()
        };
        let calls = |there: &[[Tensor; 2]], lookups: &[(Vec<f32>, Vec<i64>)]| -> Vec<Lookup> {
            let both = there.iter().zip(lookups);
            let rows = |values: &Vec<f32>| values.len() / case.width;
            both.map(|([table, index], (values, _))| Lookup {
                table: table.address,
                rows: rows(values),
                index: index.address,
            })
            .collect()
        };
        let (tables, learned) = (on_device(&case.tables), on_device(&case.learned));
        let y = Written::new::<T>(&self.stream, case.rows * case.width);
        let call = cuda::Embed {
            element: Type::of::<T>(),
            rows: case.rows,
            width: case.width,
            tables: &calls(&tables, &case.tables),
            scale: case.scale,
            learned: &calls(&learned, &case.learned),
            y: y.address(),
        };
        // SAFETY: as above.
        unsafe { self.gpu.embed(&call, self.stream.cu_stream()) }.unwrap();
        y.read(&self.stream)
    }
}

/// Rows as wide as there are kernels for, and others, for few rows and for many.
pub fn unit(context: &Context) {
    fn every<T: OperatorElement>(device: &Device<'_>) {
        for width in [1, 7, 8, 100, 136, 256, 264, 512, 1000, 1024, 1032, 2048, 2056, 4096, 4104] {
            for rows in [0, 1, 3, 500] {
                let unit = Unit::<T>::new(&mut Numbers(Random(width as u64)), rows, width);
                let (got, what) = (device.unit(&unit.call()), format!("{} {rows} rows, E={width}", T::NAME));
                let off = error(&got, &unit.expected());
                assert!(off <= tolerance::<f32>(), "{what}: {off:e}");
                if rows > 0 {
                    let last = device.unit(&unit.rows(rows - 1, 1));
                    assert!(bytes(&last) == bytes(&got[(rows - 1) * width..]), "{what}: the last row alone");
                }
            }
        }
    }
    let device = Device::new(context);
    every::<f32>(&device);
    every::<f16>(&device);
    every::<bf16>(&device);
}

/// The error of TF32, and of a thousand numbers or more where factors are rounded to the nearest: cut off, they have 5e-4.
const TF32: f64 = 1e-3;
const TF32_OF_MANY: f64 = 4e-4;

/// Depths and widths at which steps, tiles and clusters end, and others, exactly and in TF32; a row is the same alone, and what
/// is no number stays in its row.
pub fn linear(context: &Context) {
    let (device, mut random) = (Device::new(context), Random(29));
    let hopper = context.gpu.context().compute_capability().unwrap().0 == 9;
    let check = |seed: u64, rows: usize, inner: usize, width: usize, tf32: bool| {
        let mut linear = Linear::new(&mut Numbers(Random(seed)), rows, inner, width);
        let what = format!("{rows} rows, K={inner}, N={width}, {:?}, TF32 {tf32}", linear.activation);
        let constant = !seed.is_multiple_of(3);
        let got = device.linear(&linear.call(), tf32, constant);
        let off = error(&got, &linear.expected());
        let allowed = match tf32 {
            true if got.len() >= 1000 => TF32_OF_MANY,
            true => TF32,
            false => tolerance::<f32>(),
        };
        assert!(off <= allowed, "{what}: {off:e}");
        // Otherwise it was another kernel.
        let rounded = tf32 && hopper && rows > 0 && inner >= 32 && inner.is_multiple_of(4) && width > 8;
        assert!(!rounded || off > tolerance::<f32>(), "{what}: {off:e}, more than TF32 can keep");
        if rows == 0 || inner == 0 {
            return;
        }
        let last = device.linear(&linear.rows(rows - 1, 1), tf32, constant);
        assert!(bytes(&last) == bytes(&got[(rows - 1) * width..]), "{what}: the last row alone");
        let spoilt = seed as usize % rows;
        linear.x[spoilt * inner] = f32::NAN;
        let now = device.linear(&linear.call(), tf32, constant);
        for (row, (before, now)) in got.chunks_exact(width).zip(now.chunks_exact(width)).enumerate() {
            let good = if row == spoilt { now.iter().all(|x| x.is_nan()) } else { bytes(before) == bytes(now) };
            assert!(good, "{what}: row {row} beside what is no number, or of it");
        }
    };
    for (seed, (rows, inner, width)) in
        [(256, 1024, 128), (700, 512, 130), (65, 2052, 9), (3, 32, 256), (64, 36, 128), (130, 544, 64)]
            .into_iter()
            .enumerate()
    {
        check(seed as u64, rows, inner, width, true);
        check(seed as u64, rows, inner, width, false);
    }
    for seed in 0..context.cases.div_ceil(10).min(200) {
        let rows = random.pick(&[0, 1, 3, 63, 64, 65, 150]);
        let inner = random.pick(&[1, 4, 4, 4]) * random.below(140);
        let (most, of) = random.pick(&[(10, 1), (300, 1), (70, 4)]);
        let width = of * (1 + random.below(most));
        check(seed, rows, inner, width, random.once_in(2));
    }
}

/// Every number of tables, of any width, with keys that are in none of them: to the bit what one step after the other
/// gives.
pub fn embed(context: &Context) {
    fn every<T: OperatorElement>(device: &Device<'_>, cases: u64) {
        let mut random = Random(23);
        for case in 0..cases {
            let (rows, of) = (random.pick(&[0, 1, 3, 64, 301]), random.pick(&[1, 4, 8]));
            let (width, tables, learned) = (of * (1 + random.below(1100 / of)), 1 + random.below(8), random.below(3));
            let embed = Embed::new(&mut Numbers(Random(case)), rows, width, tables, learned);
            let what = format!("{} {rows} rows, E={width}, {tables} tables and {learned}", T::NAME);
            let got = device.embed::<T>(&embed);
            assert!(bytes(&got) == bytes(&embed.rounded::<T>()), "{what}");
            assert!(error(&got, &embed.expected()) <= tolerance::<T>(), "{what}");
        }
    }
    let (device, cases) = (Device::new(context), context.cases.div_ceil(20).min(100));
    every::<f32>(&device, cases);
    every::<f16>(&device, cases);
    every::<bf16>(&device, cases);
}

/// All of them in a CUDA graph, behind a copy of keys: every replay follows what was copied. A kernel of it begins while the
/// one before ends, and the first of them behind something that is no kernel.
pub fn captured(context: &Context) {
    let (rows, width) = (90, 256);
    let device = Device::new(context);
    let (stream, raw) = (&device.stream, device.stream.cu_stream());
    let mut numbers = Numbers(Random(3));
    let case = Embed::new(&mut numbers, rows, width, 1, 0);
    let (table, table_rows) = (device.tensor(&case.tables[0].0), case.tables[0].0.len() / width);
    let given = [1, 2].map(|of| (0..rows as i64).map(|row| row % (3 * of)).collect::<Vec<_>>());
    let given = given.map(|keys| device.tensor(&keys));
    let keys = device.tensor(&vec![0_i64; rows]);
    let x = Written::new::<bf16>(stream, rows * width);
    let y = Written::new::<f32>(stream, rows * width);
    let among = Written::new::<f32>(stream, rows * rows);
    let (inside, scores) = (Written::new::<f32>(stream, rows * 128), Written::new::<f32>(stream, rows * 2));
    let head = [(width, 128), (128, 2)].map(|(inner, to)| Linear::new(&mut numbers, 0, inner, to).weight);
    let head = head.map(|weight| device.tensor(&weight));
    let element = Type::Bf16;
    let all = || {
        let tables = &[Lookup { table: table.address, rows: table_rows, index: keys.address }];
        let embed = cuda::Embed { element, rows, width, tables, scale: 1.5, learned: &[], y: x.address() };
        let unit = cuda::Unit { element, rows, width, x: x.address(), y: y.address(), epsilon: 1e-6 };
        let first = cuda::Linear {
            rows,
            inner: width,
            width: 128,
            x: y.address(),
            weight: head[0].address,
            bias: None,
            y: inside.address(),
            activation: Activation::Relu,
            tf32: true,
            constant: true,
        };
        // Whose weight the kernel in front of it has just written.
        let products = cuda::Linear {
            width: rows,
            weight: y.address(),
            y: among.address(),
            activation: Activation::None,
            constant: false,
            ..first
        };
        let (x, y, activation) = (inside.address(), scores.address(), Activation::Sigmoid);
        let second = cuda::Linear { inner: 128, width: 2, x, weight: head[1].address, y, activation, ..first };
        // SAFETY: as above.
        unsafe {
            context.gpu.embed(&embed, raw).unwrap();
            context.gpu.unit(&unit, raw).unwrap();
            context.gpu.linear(&products, raw).unwrap();
            context.gpu.linear(&first, raw).unwrap();
            context.gpu.linear(&second, raw).unwrap();
        }
    };
    let copy = |to: &Tensor, from: &Tensor| {
        // SAFETY: both are as long as that, and apart.
        unsafe { context.gpu.copy(to.address, from.address, rows * size_of::<i64>(), raw) }.unwrap();
    };
    let expected = given.each_ref().map(|from| {
        copy(&keys, from);
        all();
        [&y, &among, &scores].map(|output| output.read::<f32>(stream))
    });
    assert!((0..3).all(|output| expected[0][output] != expected[1][output]));
    let current = device.tensor(&vec![0_i64; rows]);
    stream.synchronize().unwrap();
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    // Twice: a copy stands behind a kernel too, and must not come before that has read what it overwrites.
    for _ in 0..2 {
        copy(&keys, &current);
        all();
    }
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags).unwrap().unwrap();
    for replay in 0..6 {
        copy(&current, &given[replay % 2]);
        graph.launch().unwrap();
        let got = [&y, &among, &scores].map(|output| output.read::<f32>(stream));
        assert!(got == expected[replay % 2], "replay {replay}");
    }
}
