//! The dense operators: what the reference gives, whatever the kernel, and the same bits whatever else is in the batch.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use pagoda_kernels::cpu::OperatorElement;
use pagoda_kernels::cuda::{self, DensePath, Gpu, Type};
use pagoda_kernels::{GateNorm, Silu, bf16, f16};
use pagoda_test_support::Random;

use crate::Context;
use crate::common::{error, tolerance};
use crate::dense_cases::{Gate, Norm, Numbers, Output, Project};
use crate::device::{Tensor, bytes};
use crate::written::Written;

struct Device<'a> {
    gpu: &'a Gpu,
    stream: Arc<CudaStream>,
}

impl Device<'_> {
    fn tensor<T: Copy>(&self, values: &[T]) -> Tensor {
        Tensor::new(&self.stream, bytes(values))
    }

    /// Where an index is, and the call's part about it.
    fn taken(&self, taken: Option<(usize, &[i64])>) -> Option<(Tensor, cuda::Taken)> {
        taken.map(|(of, index)| {
            let index = self.tensor(index);
            let taken = cuda::Taken { of, index: index.address };
            (index, taken)
        })
    }

    fn norm<T: OperatorElement>(&self, case: &Norm<T>, constant: bool) -> Vec<T> {
        let [x, weight, bias] = [&case.x, &case.weight, &case.bias].map(|values| self.tensor(values));
        let y = Written::new::<T>(&self.stream, case.rows * case.width);
        let call = cuda::Norm {
            element: Type::of::<T>(),
            rows: case.rows,
            width: case.width,
            x: x.address,
            weight: weight.address,
            bias: bias.address,
            y: y.address(),
            epsilon: case.call().epsilon,
            constant,
        };
        // SAFETY: as long as the call says; waited for by the read.
        unsafe { self.gpu.norm(&call, self.stream.cu_stream()) }.unwrap();
        y.read(&self.stream)
    }

    fn gate<T: OperatorElement>(&self, case: &Gate<T>, constant: bool) -> Vec<T> {
        let [attended, u, weight, bias] =
            [&case.attended, &case.u, &case.weight, &case.bias].map(|values| self.tensor(values));
        let y = Written::new::<T>(&self.stream, case.output_len());
        let taken = self.taken(case.taken.as_ref().map(|(of, index)| (*of, &index[..])));
        let call = cuda::Gate {
            element: Type::of::<T>(),
            rows: case.rows,
            taken: taken.as_ref().map(|(_, taken)| *taken),
            heads: case.heads,
            head_size: case.head_size,
            attended: attended.address,
            u: u.address,
            weight: weight.address,
            bias: bias.address,
            y: y.address(),
            epsilon: case.call().epsilon,
            norm: case.norm,
            concat: case.concat,
            constant,
        };
        // SAFETY: as above.
        unsafe { self.gpu.gate(&call, self.stream.cu_stream()) }.unwrap();
        y.read(&self.stream)
    }

    /// The outputs of every kernel that takes some rows of the case.
    fn project<T: OperatorElement>(
        &self,
        case: &Project<T>,
        first: usize,
        rows: usize,
    ) -> Vec<(DensePath, [Vec<T>; 4])> {
        let part = case.heads * case.head_size;
        let (x, weight) = (self.tensor(case.rows(first, rows).x), self.tensor(&case.weight));
        let bias = case.bias.as_ref().map(|bias| self.tensor(bias));
        let mut call = cuda::Project {
            element: Type::of::<T>(),
            rows,
            width: case.width,
            part,
            x: x.address,
            weight: weight.address,
            bias: bias.as_ref().map(|bias| bias.address),
            outputs: [0; 4],
            silu: case.silu,
            constant: rows.is_multiple_of(2),
        };
        let paths = self.gpu.project_paths(&call).unwrap();
        let run = |path| {
            let outputs = [(); 4].map(|()| Written::new::<T>(&self.stream, rows * part));
            call.outputs = outputs.each_ref().map(Written::address);
            // SAFETY: as above.
            unsafe { self.gpu.project_by(path, &call, self.stream.cu_stream()) }.unwrap();
            (path, outputs.map(|output| output.read(&self.stream)))
        };
        paths.into_iter().map(run).collect()
    }

    /// As `project`.
    fn output<T: OperatorElement>(&self, case: &Output<T>, first: usize, rows: usize) -> Vec<(DensePath, Vec<T>)> {
        let some = case.rows(first, rows);
        let (y, weight) = (self.tensor(some.y), self.tensor(some.weight));
        let [bias, residual] = [some.bias, some.residual].map(|tensor| tensor.map(|values| self.tensor(values)));
        let taken = self.taken(some.taken.map(|taken| (taken.of, taken.index)));
        let address = |tensor: &Option<Tensor>| tensor.as_ref().map(|tensor| tensor.address);
        let mut call = cuda::Output {
            element: Type::of::<T>(),
            rows,
            inner: case.inner,
            width: case.width,
            y: y.address,
            weight: weight.address,
            bias: address(&bias),
            residual: address(&residual),
            taken: taken.as_ref().map(|(_, taken)| *taken),
            output: 0,
            constant: rows.is_multiple_of(2),
        };
        let paths = self.gpu.output_paths(&call).unwrap();
        let run = |path| {
            let output = Written::new::<T>(&self.stream, rows * case.width);
            call.output = output.address();
            // SAFETY: as above.
            unsafe { self.gpu.output_by(path, &call, self.stream.cu_stream()) }.unwrap();
            (path, output.read(&self.stream))
        };
        paths.into_iter().map(run).collect()
    }
}

fn device(context: &Context) -> Device<'_> {
    Device { gpu: context.gpu, stream: context.gpu.context().new_stream().unwrap() }
}

/// Random calls of every operator in every type, by every kernel that takes them.
pub fn random(context: &Context) {
    fn every<T: OperatorElement>(device: &Device<'_>, cases: u64) -> [usize; 2] {
        let (mut random, mut by_path) = (Random(11), [0; 2]);
        for case in 0..cases {
            let rows = random.pick(&[0, 1, 2, 63, 64, 65, 127, 129, 200]);
            // Every second case has sizes that the fast kernels take.
            let of = if random.once_in(2) { 8 } else { 1 };
            let (width, heads) = (of * (1 + random.below(160 / of)), 1 + random.below(4));
            let head_size = if of == 8 { random.pick(&[8, 16, 32, 64, 96]) } else { 1 + random.below(70) };
            let inner = of * (1 + random.below(200 / of));
            let mut numbers = Numbers(Random(case + 1000));
            let what = format!("{} case {case}: {rows} rows, E={width} H={heads} D={head_size} K={inner}", T::NAME);

            let norm = Norm::<T>::new(&mut numbers, rows, width);
            let off = error(&device.norm(&norm, of == 8), &norm.expected());
            assert!(off <= tolerance::<T>(), "norm {what}: {off:e}");
            let gate = Gate::<T>::new(&mut numbers, rows, heads, head_size);
            let off = error(&device.gate(&gate, of == 8), &gate.expected());
            assert!(off <= tolerance::<T>(), "gate {what} {:?} {}: {off:e}", gate.norm, gate.concat);

            let project = Project::<T>::new(&mut numbers, rows, width, heads, head_size);
            let expected = project.expected();
            for (path, outputs) in device.project(&project, 0, rows) {
                for (output, expected) in outputs.iter().zip(&expected) {
                    let off = error(output, expected);
                    assert!(off <= tolerance::<T>(), "project {path:?} {what}: {off:e}");
                }
                by_path[path as usize] += 1;
            }
            let output = Output::<T>::new(&mut numbers, rows, inner, width);
            let expected = output.expected();
            for (path, output) in device.output(&output, 0, rows) {
                let off = error(&output, &expected);
                assert!(off <= tolerance::<T>(), "output {path:?} {what}: {off:e}");
                by_path[path as usize] += 1;
            }
        }
        by_path
    }
    let device = device(context);
    let cases = context.cases.div_ceil(10).min(200);
    for (name, [plain, hopper]) in [
        ("f32", every::<f32>(&device, cases)),
        ("f16", every::<f16>(&device, cases)),
        ("bf16", every::<bf16>(&device, cases)),
    ] {
        println!("  {name}: {plain} products by the plain kernel, {hopper} by Hopper's");
    }
}

/// Norms as wide as there are kernels for, for few rows and for many.
pub fn widths(context: &Context) {
    fn every<T: OperatorElement>(device: &Device<'_>) {
        for width in [8, 136, 256, 264, 512, 1000, 1024, 1032, 2048, 2056, 4096, 4104] {
            for rows in [3, 1100] {
                // The reference takes its time.
                if rows * width > 1 << 21 {
                    continue;
                }
                let mut numbers = Numbers(Random(width as u64));
                let norm = Norm::<T>::new(&mut numbers, rows, width);
                let off = error(&device.norm(&norm, true), &norm.expected());
                assert!(off <= tolerance::<T>(), "norm {} {rows} rows, E={width}: {off:e}", T::NAME);
                let gate = Gate::<T>::new(&mut numbers, rows, 8, width / 8);
                let off = error(&device.gate(&gate, true), &gate.expected());
                assert!(off <= tolerance::<T>(), "gate {} {rows} rows, W={width} {:?}: {off:e}", T::NAME, gate.norm);
            }
        }
    }
    let device = device(context);
    every::<f32>(&device);
    every::<f16>(&device);
    every::<bf16>(&device);
}

/// Rows of norms come out to the bit among thousands, which another kernel takes, as they do among few.
pub fn same_norms(context: &Context) {
    const ROWS: usize = 5001;
    const SOME: [(usize, usize); 4] = [(0, 1), (ROWS - 1, 1), (ROWS - 4, 4), (77, 200)];
    fn every<T: OperatorElement>(device: &Device<'_>) {
        for width in [304, 512, 1000, 1024] {
            let numbers = &mut Numbers(Random(width as u64));
            let part = |values: &[T], first: usize, rows: usize| values[first * width..][..rows * width].to_vec();
            let norm = Norm::<T>::new(numbers, ROWS, width);
            let normed = device.norm(&norm, true);
            for (first, rows) in SOME {
                let x = part(&norm.x, first, rows);
                let some = Norm { rows, x, weight: norm.weight.clone(), bias: norm.bias.clone(), ..norm };
                let same = bytes(&device.norm(&some, true)) == bytes(&part(&normed, first, rows));
                assert!(same, "norm {} E={width}: {rows} rows from {first}", T::NAME);
            }
            for some_taken in [false, true] {
                let gate = std::iter::repeat_with(|| Gate::<T>::new(numbers, ROWS, 8, width / 8))
                    .find(|gate| gate.norm == GateNorm::Layer && !gate.concat && gate.taken.is_some() == some_taken)
                    .expect("one in eight is");
                let gated = device.gate(&gate, true);
                for (first, rows) in SOME {
                    let taken = gate.taken.as_ref().map(|(of, index)| (*of, index[first..first + rows].to_vec()));
                    let [attended, u] = [&gate.attended, &gate.u].map(|all| match taken {
                        Some(_) => all.clone(),
                        None => part(all, first, rows),
                    });
                    let (weight, bias) = (gate.weight.clone(), gate.bias.clone());
                    let some = Gate { rows, taken, attended, u, weight, bias, ..gate };
                    let same = bytes(&device.gate(&some, true)) == bytes(&part(&gated, first, rows));
                    assert!(same, "gate {} W={width}: {rows} rows from {first}, {some_taken}", T::NAME);
                }
            }
        }
    }
    let device = device(context);
    every::<f32>(&device);
    every::<f16>(&device);
    every::<bf16>(&device);
}

/// Sizes at which various shapes of tile are chosen: what the plain kernel gives, and rows that come out to the bit as
/// they do alone or in another batch, by another shape.
pub fn same_bits(context: &Context) {
    fn every<T: OperatorElement>(device: &Device<'_>) {
        let close = |a: &[T], b: &[T]| {
            let wide: Vec<f64> = b.iter().map(|value| f64::from(value.to_f32())).collect();
            error(a, &wide) <= tolerance::<T>()
        };
        for (rows, width, heads, head_size) in
            [(3000, 128, 4, 256), (2560, 64, 4, 128), (700, 192, 3, 32), (390, 256, 8, 64)]
        {
            let what = format!("{} {rows} rows, E={width} H={heads} D={head_size}", T::NAME);
            let mut numbers = Numbers(Random(rows as u64));
            let project = Project::<T>::new(&mut numbers, rows, width, heads, head_size);
            let output = Output::<T>::new(&mut numbers, rows, heads * head_size, width);
            let part = heads * head_size;
            let (projects, outputs) = (device.project(&project, 0, rows), device.output(&output, 0, rows));
            for ((_, one), (_, other)) in projects.iter().zip(&projects[1..]) {
                assert!(one.iter().zip(other).all(|(one, other)| close(other, one)), "project {what}");
            }
            for ((_, one), (_, other)) in outputs.iter().zip(&outputs[1..]) {
                assert!(close(other, one), "output {what}");
            }
            for (first, count) in [(0, rows), (0, 1), (rows - 1, 1), (5, 64), (77, 200), (131, 257)] {
                for ((path, whole), (_, some)) in projects.iter().zip(device.project(&project, first, count)) {
                    for (some, whole) in some.iter().zip(whole) {
                        let whole = &whole[first * part..(first + count) * part];
                        assert!(bytes(some) == bytes(whole), "project {path:?} {what}: {count} rows from {first}");
                    }
                }
                for ((path, whole), (_, some)) in outputs.iter().zip(device.output(&output, first, count)) {
                    let whole = &whole[first * width..(first + count) * width];
                    assert!(bytes(&some) == bytes(whole), "output {path:?} {what}: {count} rows from {first}");
                }
            }
        }
    }
    let device = device(context);
    every::<f16>(&device);
    every::<bf16>(&device);
    every::<f32>(&device);
}

/// Rows that there are not count as zeros, by every kernel, and nothing else comes out otherwise.
pub fn nonsense(context: &Context) {
    const NONE: [i64; 4] = [-1, i64::MIN, i64::MAX, -(1 << 40)];
    /// Places them among an index, and says where.
    fn spoil(taken: &mut Option<(usize, Vec<i64>)>) -> Vec<usize> {
        let (of, index) = taken.as_mut().expect("looked for");
        let none = NONE.into_iter().chain([*of as i64, 1 << 32]);
        none.enumerate().map(|(number, row)| (index[number * 7] = row, number * 7).1).collect()
    }
    fn every<T: OperatorElement>(device: &Device<'_>) {
        // By vectors, by one number after the other, and thousands of rows at once.
        for (rows, heads, head_size) in [(60, 2, 64), (60, 1, 7), (3000, 4, 256 * 2 / size_of::<T>())] {
            let (numbers, width) = (&mut Numbers(Random(rows as u64)), heads * head_size);
            let what = format!("{} {rows} rows, W={width}", T::NAME);
            for norm in [GateNorm::Layer, GateNorm::Group] {
                let mut gate = std::iter::repeat_with(|| Gate::<T>::new(numbers, rows, heads, head_size))
                    .find(|gate| gate.norm == norm && !gate.concat && gate.taken.is_some())
                    .expect("one in eight is");
                let good = device.gate(&gate, true);
                let none = spoil(&mut gate.taken);
                let got = device.gate(&gate, true);
                for (row, (got, good)) in got.chunks_exact(width).zip(good.chunks_exact(width)).enumerate() {
                    let is_good = bytes(got) == bytes(good) || none.contains(&row);
                    let is_none = got.iter().all(|value| value.to_f32() == 0.0) || !none.contains(&row);
                    assert!(is_good && is_none, "gate {what} {norm:?}: row {row}");
                }
            }
            let mut output = std::iter::repeat_with(|| Output::<T>::new(numbers, rows, 16, width))
                .find(|output| output.taken.is_some())
                .expect("one in three has");
            let good = device.output(&output, 0, rows);
            let none = spoil(&mut output.taken);
            let got = device.output(&output, 0, rows);
            (output.residual, output.taken) = (None, None);
            let without = device.output(&output, 0, rows);
            for (((path, got), (_, good)), (_, without)) in got.iter().zip(&good).zip(&without) {
                for row in 0..rows {
                    let expected = if none.contains(&row) { without } else { good };
                    let of = |values: &[T]| -> Vec<f32> {
                        values[row * width..(row + 1) * width].iter().map(|value| value.to_f32()).collect()
                    };
                    assert!(of(got) == of(expected), "output {path:?} {what}: row {row}");
                }
            }
        }
    }
    let device = device(context);
    every::<f32>(&device);
    every::<f16>(&device);
    every::<bf16>(&device);
}

/// A layer's dense part in a CUDA graph, behind a copy: every replay follows what was copied. A kernel of it begins while
/// the one before ends, and the first of them behind something that is no kernel.
pub fn captured(context: &Context) {
    let (rows, width, heads, head_size) = (200, 256, 4, 64);
    let device = device(context);
    let (stream, part) = (&device.stream, heads * head_size);
    let mut numbers = Numbers(Random(3));
    let inputs = [1.0, 2.0].map(|scale| numbers.tensor::<bf16>(rows * width, scale));
    let weight = |numbers: &mut Numbers, len: usize, scale: f32| device.tensor(&numbers.tensor::<bf16>(len, scale));
    let [scale, bias, gate_scale, gate_bias] = [width, width, part, part].map(|len| weight(&mut numbers, len, 1.0));
    let (uvqk, back) = (weight(&mut numbers, 4 * part * width, 0.1), weight(&mut numbers, width * part, 0.1));
    let given = inputs.each_ref().map(|values| device.tensor(values));
    let x = Written::new::<bf16>(stream, rows * width);
    let [normed, output] = [(); 2].map(|()| Written::new::<bf16>(stream, rows * width));
    let [u, v, q, k, y] = [(); 5].map(|()| Written::new::<bf16>(stream, rows * part));
    let (element, constant, silu) = (Type::Bf16, true, Silu::All);
    let (norm, concat) = (GateNorm::Layer, false);
    // As behind the last layer's attention.
    let index = device.tensor(&(0..rows as i64).rev().collect::<Vec<_>>());
    let taken = Some(cuda::Taken { of: rows, index: index.address });
    let layer = || {
        let raw = stream.cu_stream();
        let call = cuda::Norm {
            element,
            rows,
            width,
            x: x.address(),
            weight: scale.address,
            bias: bias.address,
            y: normed.address(),
            epsilon: 1e-5,
            constant,
        };
        // SAFETY: as above.
        unsafe { context.gpu.norm(&call, raw) }.unwrap();
        let outputs = [&u, &v, &q, &k].map(Written::address);
        let (x_address, weight) = (normed.address(), uvqk.address);
        let call =
            cuda::Project { element, rows, width, part, x: x_address, weight, bias: None, outputs, silu, constant };
        // SAFETY: as above.
        unsafe { context.gpu.project(&call, raw) }.unwrap();
        let call = cuda::Gate {
            element,
            rows,
            taken,
            heads,
            head_size,
            attended: v.address(),
            u: u.address(),
            weight: gate_scale.address,
            bias: gate_bias.address,
            y: y.address(),
            epsilon: 1e-5,
            norm,
            concat,
            constant,
        };
        // SAFETY: as above.
        unsafe { context.gpu.gate(&call, raw) }.unwrap();
        let call = cuda::Output {
            element,
            rows,
            inner: part,
            width,
            y: y.address(),
            weight: back.address,
            bias: None,
            residual: Some(x.address()),
            taken,
            output: output.address(),
            constant,
        };
        // SAFETY: as above.
        unsafe { context.gpu.output(&call, raw) }.unwrap();
    };
    let size = rows * width * size_of::<bf16>();
    let copy = |from: &Tensor| {
        // SAFETY: both are as long as that, and apart.
        unsafe { context.gpu.copy(x.address(), from.address, size, stream.cu_stream()) }.unwrap();
    };
    let expected = given.each_ref().map(|from| {
        copy(from);
        layer();
        output.read::<bf16>(stream)
    });
    assert!(expected[0] != expected[1]);
    let current = device.tensor(&inputs[0]);
    stream.synchronize().unwrap();
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    // Twice: a copy stands behind a kernel too, and must not come before that has read what it overwrites.
    for _ in 0..2 {
        copy(&current);
        layer();
    }
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags).unwrap().unwrap();
    for replay in 0..6 {
        // SAFETY: as above.
        unsafe { context.gpu.copy(current.address, given[replay % 2].address, size, stream.cu_stream()) }.unwrap();
        graph.launch().unwrap();
        assert!(output.read::<bf16>(stream) == expected[replay % 2], "replay {replay}");
    }
}
