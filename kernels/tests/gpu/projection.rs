//! `Linear` and `BlockLinear`: what float64 gives, the same bits whatever else is in the batch, several streams at once, and replays of a CUDA graph.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use pagoda_kernels::cpu::OperatorElement;
use pagoda_kernels::cuda::{CUdeviceptr, Projection, Type, Weight};
use pagoda_kernels::{BLOCK, CodeBits, GluActivation, bf16, f16};
use pagoda_test_support::Random;

use crate::Context;
use crate::device::{Tensor, bytes};
use crate::written::Written;

const EPSILON: f32 = 1e-5;

/// What is asked of a call beside the product.
#[derive(Clone, Copy, Debug, Default)]
struct Asked {
    bias: bool,
    residual: bool,
    norm: bool,
    gate: Option<GluActivation>,
    /// Widths of the second and the third output.
    behind: [usize; 2],
}

const ASKED: [Asked; 9] = {
    let none = Asked { bias: false, residual: false, norm: false, gate: None, behind: [0, 0] };
    [
        none,
        Asked { bias: true, residual: true, ..none },
        Asked { norm: true, behind: [16, 32], ..none },
        Asked { bias: true, behind: [40, 8], ..none },
        Asked { norm: true, gate: Some(GluActivation::Silu), ..none },
        Asked { bias: true, gate: Some(GluActivation::Gelu), ..none },
        Asked { residual: true, gate: Some(GluActivation::GeluTanh), ..none },
        Asked { residual: true, norm: true, ..none },
        // The bias of a later output is aligned to an element alone.
        Asked { bias: true, behind: [37, 9], ..none },
    ]
};

/// A call with its tensors in host memory, which hold what `T` rounds to.
struct Host<T> {
    rows: usize,
    inner: usize,
    width: usize,
    asked: Asked,
    x: Vec<T>,
    weight: HostWeight<T>,
    bias: Vec<T>,
    residual: Vec<T>,
    norm: Vec<T>,
}

/// A weight in host memory.
#[derive(Clone)]
enum HostWeight<T> {
    Numbers(Vec<T>),
    Blocks { codes: Vec<u8>, scales: Vec<T>, bits: CodeBits },
}

impl<T: OperatorElement> HostWeight<T> {
    fn wide(&self) -> Vec<f64> {
        match self {
            Self::Numbers(numbers) => numbers.iter().map(|number| f64::from(number.to_f32())).collect(),
            Self::Blocks { codes, scales, bits } => (0..scales.len() * BLOCK)
                .map(|at| {
                    let code = match bits {
                        CodeBits::Four => f64::from(codes[at / 2] >> (at % 2 * 4) & 15) - 8.0,
                        CodeBits::Eight => f64::from(codes[at]) - 128.0,
                    };
                    code * f64::from(scales[at / BLOCK].to_f32())
                })
                .collect(),
        }
    }
}

impl<T: OperatorElement> Host<T> {
    fn new(seed: u64, rows: usize, inner: usize, width: usize, asked: Asked) -> Self {
        Self::with(None, seed, [rows, inner, width], asked)
    }

    /// `bits`: of the codes of a weight in blocks.
    fn with(bits: Option<CodeBits>, seed: u64, [rows, inner, width]: [usize; 3], asked: Asked) -> Self {
        let random = &mut Random(seed);
        let codes: Vec<u8> = bits.map_or(vec![], |bits| {
            (0..width * (inner / BLOCK) * bits.block_bytes()).map(|_| random.below(256) as u8).collect()
        });
        let mut some =
            |count: usize, scale: f32| -> Vec<T> { (0..count).map(|_| T::from_f32(random.number() * scale)).collect() };
        let scale = 2.0 / (inner as f32).sqrt();
        let mut x = some(rows * inner, 1.0);
        let weight = match bits {
            None => HostWeight::Numbers(some(width * inner, scale)),
            Some(bits) => {
                // Most numbers of x are positive: what the middle of the codes adds must not be seen.
                x.iter_mut().for_each(|x| *x = T::from_f32(x.to_f32() + 0.5));
                let scale = if bits == CodeBits::Four { scale / 8.0 } else { scale / 128.0 };
                HostWeight::Blocks { codes, scales: some(width * inner / BLOCK, scale), bits }
            }
        };
        let (bias, residual, norm) = (some(width, 1.0), some(rows * width, 1.0), some(inner, 1.0));
        Self { rows, inner, width, asked, x, weight, bias, residual, norm }
    }

    /// Columns of all outputs together.
    fn columns(&self) -> usize {
        if self.asked.gate.is_some() { self.width / 2 } else { self.width }
    }

    fn expected(&self) -> Vec<f64> {
        let Self { rows, inner, width, asked, .. } = self;
        let wide = |values: &[T]| -> Vec<f64> { values.iter().map(|value| f64::from(value.to_f32())).collect() };
        let (x, weight, bias, norm) = (wide(&self.x), self.weight.wide(), wide(&self.bias), wide(&self.norm));
        let mut y = Vec::new();
        for row in 0..*rows {
            let mut x = x[row * inner..][..*inner].to_vec();
            if asked.norm {
                let mean = x.iter().map(|x| x * x).sum::<f64>() / *inner as f64;
                let factor = 1.0 / (mean + f64::from(EPSILON)).sqrt();
                x.iter_mut().zip(&norm).for_each(|(x, by)| *x *= factor * by);
            }
            let sum = |column: usize| {
                let products = x.iter().zip(&weight[column * inner..]).map(|(x, by)| x * by);
                products.sum::<f64>() + if asked.bias { bias[column] } else { 0.0 }
            };
            for column in 0..self.columns() {
                let value = match asked.gate {
                    None => sum(column),
                    Some(gate) => activated(sum(column), gate) * sum(column + width / 2),
                };
                let residual = f64::from(self.residual[row * self.columns() + column].to_f32());
                y.push(value + if asked.residual { residual } else { 0.0 });
            }
        }
        y
    }
}

fn activated(x: f64, activation: GluActivation) -> f64 {
    match activation {
        GluActivation::Silu => x / (1.0 + (-x).exp()),
        // The integral of the density, by Simpson's rule.
        GluActivation::Gelu => {
            let (steps, density) = (2000, |t: f64| (-t * t / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt());
            let step = x / f64::from(steps);
            let sum: f64 = (0..=steps)
                .map(|at| {
                    let weight = if at == 0 || at == steps {
                        1.0
                    } else if at % 2 == 1 {
                        4.0
                    } else {
                        2.0
                    };
                    weight * density(f64::from(at) * step)
                })
                .sum();
            x * (0.5 + sum * step / 3.0)
        }
        GluActivation::GeluTanh => {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            x / 2.0 * (1.0 + u.tanh())
        }
    }
}

/// The tensors of a call on the device.
struct OnDevice {
    x: Tensor,
    weight: [Tensor; 2],
    bias: Tensor,
    residual: Tensor,
    norm: Tensor,
    scratch: Tensor,
    outputs: [Written; 3],
    call: Projection,
}

impl OnDevice {
    fn new<T: OperatorElement>(context: &Context, stream: &Arc<CudaStream>, host: &Host<T>) -> Self {
        Self::with(context, stream, host, true)
    }

    /// `constant`: whether nothing else writes the weight.
    fn with<T: OperatorElement>(context: &Context, stream: &Arc<CudaStream>, host: &Host<T>, constant: bool) -> Self {
        let Host { rows, inner, width, asked, .. } = *host;
        let tensor = |values: &[T]| Tensor::new(stream, bytes(values));
        let [x, bias, residual, norm] = [&host.x, &host.bias, &host.residual, &host.norm].map(|values| tensor(values));
        let weight = match &host.weight {
            HostWeight::Numbers(numbers) => [tensor(numbers), tensor(&[])],
            HostWeight::Blocks { codes, scales, .. } => [Tensor::new(stream, codes), tensor(scales)],
        };
        let [second, third] = asked.behind;
        let widths = [host.columns() - second - third, second, third];
        let outputs = widths.map(|width| Written::new::<T>(stream, rows * width));
        let call = Projection {
            element: Type::of::<T>(),
            rows,
            inner,
            width,
            x: x.address,
            weight: match host.weight {
                HostWeight::Numbers(_) => Weight::Numbers(weight[0].address),
                HostWeight::Blocks { bits, .. } => {
                    Weight::Blocks { codes: weight[0].address, scales: weight[1].address, bits }
                }
            },
            bias: asked.bias.then_some(bias.address),
            residual: asked.residual.then_some(residual.address),
            norm: asked.norm.then_some((norm.address, EPSILON)),
            gate: asked.gate,
            outputs: [0, 1, 2].map(|at| (outputs[at].address(), widths[at])),
            constant,
        };
        let scratch = Tensor::new(stream, &vec![0xff; call.scratch_bytes(context.gpu) + 256]);
        Self { x, weight, bias, residual, norm, scratch, outputs, call }
    }

    fn launch(&self, context: &Context, stream: &Arc<CudaStream>) {
        self.launch_in(&self.scratch, context, stream);
    }

    fn launch_in(&self, scratch: &Tensor, context: &Context, stream: &Arc<CudaStream>) {
        let scratch = scratch.address.next_multiple_of(256) as CUdeviceptr;
        // SAFETY: all are as long as the call says, and live until the stream was waited for.
        unsafe { context.gpu.projection(&self.call, scratch, stream.cu_stream()) }.unwrap();
    }

    /// The columns of all outputs, row by row.
    fn read<T: OperatorElement>(&self, stream: &Arc<CudaStream>) -> Vec<T> {
        let parts: Vec<Vec<T>> = self.outputs.iter().map(|output| output.read(stream)).collect();
        let mut all = Vec::new();
        for row in 0..self.call.rows {
            for (part, (_, width)) in parts.iter().zip(self.call.outputs) {
                all.extend_from_slice(&part[row * width..][..width]);
            }
        }
        all
    }
}

fn run<T: OperatorElement>(context: &Context, stream: &Arc<CudaStream>, host: &Host<T>) -> Vec<T> {
    let on_device = OnDevice::new(context, stream, host);
    on_device.launch(context, stream);
    on_device.read(stream)
}

fn off<T: OperatorElement>(found: &[T], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let (mut difference, mut size) = (0.0, 1e-30);
    for (found, expected) in found.iter().zip(expected) {
        difference += (f64::from(found.to_f32()) - expected).powi(2);
        size += expected * expected;
    }
    (difference / size).sqrt()
}

/// Few rows and many, whole tiles and others, depths that many blocks share, and all that stands around a product.
pub fn random(context: &Context) {
    fn every<T: OperatorElement>(context: &Context, stream: &Arc<CudaStream>, bound: f64) {
        let sizes = [(64, 128), (200, 1040), (136, 96), (7, 48), (9000, 128), (1024, 2176), (72, 1296)];
        for (number, (inner, width)) in sizes.into_iter().enumerate() {
            // Beyond that there are other kernels for gates and for several outputs: with a short depth, for the oracle's sake.
            let many: &[usize] = if inner == 72 { &[1024, 4200] } else { &[] };
            for &rows in [0, 1, 5, 8, 11, 16, 31, 32, 33, 64, 70].iter().chain(many) {
                for (which, asked) in ASKED.into_iter().enumerate() {
                    // Each size has some of them.
                    let slow = asked.gate == Some(GluActivation::Gelu);
                    if if rows < 1024 { (which + number + rows) % 3 != 0 } else { slow } {
                        continue;
                    }
                    let host = Host::<T>::new((inner + rows) as u64, rows, inner, width, asked);
                    let off = off(&run(context, stream, &host), &host.expected());
                    assert!(off <= bound, "{} {rows} rows K={inner} N={width} {asked:?}: {off}", T::NAME);
                }
            }
        }
    }
    let stream = context.gpu.context().new_stream().unwrap();
    every::<f32>(context, &stream, 1e-5);
    every::<f16>(context, &stream, 2e-3);
    every::<bf16>(context, &stream, 1e-2);
}

/// Weights in blocks: depths of whole steps and of others, whose scales the TMA can not fetch, few rows and parts of them, and rows
/// for which the weight is opened.
pub fn blocks(context: &Context) {
    fn every<T: OperatorElement>(context: &Context, stream: &Arc<CudaStream>, bound: f64) {
        let mut worst: f64 = 0.0;
        for (number, (inner, width)) in
            [(32, 48), (256, 1040), (96, 128), (2336, 272), (4096, 1536)].into_iter().enumerate()
        {
            for bits in CodeBits::ALL {
                for rows in [1, 5, 8, 16, 29, 32, 33, 64, 65, 150, 300] {
                    for (which, asked) in ASKED.into_iter().enumerate() {
                        // Each size has some of them: the oracle takes its time.
                        if (which + number + rows) % if inner * rows > 1 << 15 { 9 } else { 3 } != 0 {
                            continue;
                        }
                        let host = Host::<T>::with(Some(bits), (inner + rows) as u64, [rows, inner, width], asked);
                        let off = off(&run(context, stream, &host), &host.expected());
                        assert!(off <= bound, "{} {bits:?} {rows} rows K={inner} N={width} {asked:?}: {off}", T::NAME);
                        worst = worst.max(off);
                    }
                }
            }
        }
        println!("  {}: worst relative error {worst:.2e}", T::NAME);
    }
    let stream = context.gpu.context().new_stream().unwrap();
    every::<f16>(context, &stream, 2e-3);
    every::<bf16>(context, &stream, 1e-2);
    // Rows of the weight that are no multiple of what a tile has, and one that others on the stream may write.
    for (rows, width, constant) in [(3, 33, true), (40, 1, true), (1, 96, false), (40, 96, false)] {
        let host = Host::<f16>::with(Some(CodeBits::Four), 1, [rows, 1024, width], ASKED[0]);
        let on_device = OnDevice::with(context, &stream, &host, constant);
        on_device.launch(context, &stream);
        let off = off(&on_device.read::<f16>(&stream), &host.expected());
        assert!(off <= 2e-3, "{rows} rows, N={width}: {off}");
    }
}

/// What the kernels do not take is refused in words.
pub fn blocks_refused(context: &Context) {
    let stream = context.gpu.context().new_stream().unwrap();
    let host = Host::<f16>::with(Some(CodeBits::Four), 1, [2, 64, 16], ASKED[0]);
    let on_device = OnDevice::new(context, &stream, &host);
    let refuse = |call: Projection, message: &str| {
        // SAFETY: nothing is launched.
        let error = unsafe { context.gpu.projection(&call, 0, stream.cu_stream()) }.unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    };
    let call = on_device.call;
    refuse(Projection { element: Type::F32, ..call }, "in f32");
    refuse(Projection { inner: 48, ..call }, "rows of 48 numbers");
    refuse(Projection { inner: 0, ..call }, "rows of 0 numbers");
    refuse(Projection { x: call.x + 8, ..call }, "expected multiples of 16");
    refuse(Projection { width: usize::MAX / 64, ..call }, "N ");
}

/// Up to 64 rows: a row alone has the bits that it has in a batch, whatever the others hold.
pub fn same_bits(context: &Context) {
    let stream = context.gpu.context().new_stream().unwrap();
    let kinds = [None, Some(CodeBits::Four), Some(CodeBits::Eight)];
    for (bits, (inner, width)) in
        kinds.into_iter().zip([[(4096, 1536), (200, 1040), (9000, 128)]; 3]).flat_map(|(bits, all)| {
            all.map(|(inner, width)| {
                (bits, if bits.is_some() { (inner / BLOCK * BLOCK, width) } else { (inner, width) })
            })
        })
    {
        for asked in ASKED {
            let host = Host::<bf16>::with(bits, 3, [64, inner, width], asked);
            let together = run(context, &stream, &host);
            assert!(bytes(&run(context, &stream, &host)) == bytes(&together), "twice: {asked:?}");
            for (first, rows) in [(0, 1), (63, 1), (3, 8), (7, 13), (5, 20), (11, 40)] {
                let columns = host.columns();
                let mut some = Host::<bf16>::with(bits, 3, [rows, inner, width], asked);
                some.x = host.x[first * inner..][..rows * inner].to_vec();
                some.residual = host.residual[first * columns..][..rows * columns].to_vec();
                (some.weight, some.bias, some.norm) = (host.weight.clone(), host.bias.clone(), host.norm.clone());
                // What another row holds is of no account.
                if rows > 1 {
                    some.x[(rows - 1) * inner] = bf16::NAN;
                }
                let alone = run(context, &stream, &some);
                let good = rows.max(2) - 1;
                let expected = &together[first * columns..][..good * columns];
                assert!(
                    bytes(&alone[..good * columns]) == bytes(expected),
                    "{bits:?} {rows} rows K={inner} N={width} {asked:?}"
                );
            }
        }
    }
}

/// Calls one behind the other on each of several streams, as layers follow layers, while the others do the same. Those of a stream
/// are two by turns in the same scratch memory, so that what one has left there is wrong for the other.
pub fn streams(context: &Context) {
    let pairs = [3, 12, 21, 30].map(|rows| {
        let stream = context.gpu.context().new_stream().unwrap();
        let hosts = [1, 2].map(|seed| Host::<bf16>::new(seed + rows as u64, rows, 9000, 384, ASKED[1]));
        let calls = hosts.each_ref().map(|host| OnDevice::new(context, &stream, host));
        (stream, hosts, calls)
    });
    for _ in 0..300 {
        for (stream, _, calls) in &pairs {
            calls.iter().for_each(|call| call.launch_in(&calls[0].scratch, context, stream));
        }
    }
    for (stream, hosts, calls) in &pairs {
        for (host, call) in hosts.iter().zip(calls) {
            let off = off(&call.read::<bf16>(stream), &host.expected());
            assert!(off <= 1e-2, "{} rows: {off}", host.rows);
        }
    }
}

/// Products of no columns are refused, and calls without an output do nothing.
pub fn empty(context: &Context) {
    let stream = context.gpu.context().new_stream().unwrap();
    for (rows, inner, width) in [(3, 0, 32), (40, 0, 32), (0, 64, 32), (40, 64, 0), (0, 0, 0)] {
        let on_device = OnDevice::new(context, &stream, &Host::<bf16>::new(1, rows, inner, width, ASKED[1]));
        let scratch = on_device.scratch.address.next_multiple_of(256) as CUdeviceptr;
        // SAFETY: as for `launch`.
        let done = unsafe { context.gpu.projection(&on_device.call, scratch, stream.cu_stream()) };
        assert_eq!(done.is_err(), rows > 0 && width > 0, "{rows} rows K={inner} N={width}");
        on_device.read::<bf16>(&stream);
    }
}

/// Each replay computes what x holds then, of few rows and of many.
pub fn captured(context: &Context) {
    let all = [(5, ASKED[7]), (32, ASKED[4]), (40, ASKED[4]), (64, ASKED[1]), (70, ASKED[1])];
    captured_of(context, None, &all);
}

/// The same of a weight in blocks.
pub fn blocks_captured(context: &Context) {
    captured_of(context, Some(CodeBits::Four), &[(5, ASKED[7]), (40, ASKED[4]), (300, ASKED[1])]);
    captured_of(context, Some(CodeBits::Eight), &[(1, ASKED[2]), (20, ASKED[1])]);
}

fn captured_of(context: &Context, bits: Option<CodeBits>, all: &[(usize, Asked)]) {
    for &(rows, asked) in all {
        let stream = context.gpu.context().new_stream().unwrap();
        let hosts = [1, 2].map(|seed| Host::<bf16>::with(bits, seed, [rows, 1024, 768], asked));
        let mut other = Host::<bf16>::with(bits, 1, [rows, 1024, 768], asked);
        other.x.clone_from(&hosts[1].x);
        let expected = [run(context, &stream, &hosts[0]), run(context, &stream, &other)];
        assert!(bytes(&expected[0]) != bytes(&expected[1]));
        let on_device = OnDevice::new(context, &stream, &hosts[0]);
        let given = hosts.each_ref().map(|host| Tensor::new(&stream, bytes(&host.x)));
        on_device.launch(context, &stream);
        stream.synchronize().unwrap();
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        on_device.launch(context, &stream);
        let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = stream.end_capture(flags).unwrap().unwrap();
        for replay in 0..4 {
            let from = given[replay % 2].address;
            let size = size_of_val(&hosts[0].x[..]);
            // SAFETY: both are as long as that, and apart.
            unsafe { context.gpu.copy(on_device.x.address, from, size, stream.cu_stream()) }.unwrap();
            graph.launch().unwrap();
            let found = on_device.read::<bf16>(&stream);
            assert!(bytes(&found) == bytes(&expected[replay % 2]), "{rows} rows, replay {replay}");
        }
        // They live until the last replay has run.
        drop((on_device.weight, on_device.bias, on_device.residual, on_device.norm));
    }
}
