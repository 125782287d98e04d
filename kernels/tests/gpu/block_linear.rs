//! `BlockLinear` with weights of 4 bits: what float64 gives, the same bits whatever else is in the batch, and replays of a CUDA
//! graph.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use pagoda_kernels::cpu::OperatorElement;
use pagoda_kernels::cuda::{BlockProduct, Gpu, Type};
use pagoda_kernels::{BLOCK, bf16, f16};

use crate::Context;
use crate::common::{Random, error, tolerance};
use crate::device::{Tensor, bytes};
use crate::written::Written;

/// Rows from which on the matrix is opened.
const OPENED: usize = 65;

/// A call in host memory.
struct Host<T> {
    rows: usize,
    inner: usize,
    width: usize,
    x: Vec<T>,
    codes: Vec<u8>,
    scales: Vec<T>,
    bias: Option<Vec<T>>,
}

impl<T: OperatorElement> Host<T> {
    fn new(seed: u64, [rows, inner, width]: [usize; 3], has_bias: bool) -> Self {
        let mut random = Random(seed);
        let blocks = width * (inner / BLOCK);
        let mut numbers =
            |count: usize, scale: f32| (0..count).map(|_| T::from_f32(random.number() * scale)).collect::<Vec<T>>();
        let (x, scales) = (numbers(rows * inner, 1.0), numbers(blocks, 0.1));
        let bias = has_bias.then(|| numbers(width, 3.0));
        let codes = (0..blocks * BLOCK / 2).map(|_| random.below(256) as u8).collect();
        Self { rows, inner, width, x, codes, scales, bias }
    }

    /// In float64. A matrix that is opened has rounded weights.
    fn expected(&self) -> Vec<f64> {
        let is_opened = self.rows >= OPENED;
        let mut expected = Vec::with_capacity(self.rows * self.width);
        let weights: Vec<f64> = (0..self.width * self.inner)
            .map(|at| {
                let code = self.codes[at / 2] >> (at % 2 * 4) & 15;
                let weight = (f32::from(code) - 8.0) * self.scales[at / BLOCK].to_f32();
                f64::from(if is_opened { T::from_f32(weight).to_f32() } else { weight })
            })
            .collect();
        for row in 0..self.rows {
            let x = &self.x[row * self.inner..(row + 1) * self.inner];
            for column in 0..self.width {
                let weights = &weights[column * self.inner..(column + 1) * self.inner];
                let sum: f64 = x.iter().zip(weights).map(|(x, weight)| f64::from(x.to_f32()) * weight).sum();
                expected.push(sum + self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[column].to_f32())));
            }
        }
        expected
    }
}

/// The same on the device.
struct OnDevice {
    x: Tensor,
    y: Written,
    call: BlockProduct,
    scratch: Tensor,
    _others: [Tensor; 3],
}

impl OnDevice {
    fn new<T: OperatorElement>(stream: &Arc<CudaStream>, host: &Host<T>, constant: bool) -> Self {
        let Host { rows, inner, width, .. } = *host;
        let tensor = |content: &[u8]| Tensor::new(stream, content);
        let (x, codes, scales) = (tensor(bytes(&host.x)), tensor(&host.codes), tensor(bytes(&host.scales)));
        let bias = tensor(host.bias.as_deref().map_or(&[][..], bytes));
        let y = Written::new::<T>(stream, rows * width);
        let call = BlockProduct {
            element: Type::of::<T>(),
            rows,
            inner,
            width,
            x: x.address,
            codes: codes.address,
            scales: scales.address,
            bias: host.bias.as_ref().map(|_| bias.address),
            y: y.address(),
            constant,
        };
        let scratch = tensor(&vec![0xff; call.scratch_bytes()]);
        Self { x, y, call, scratch, _others: [codes, scales, bias] }
    }

    fn launch(&self, gpu: &Gpu, stream: &Arc<CudaStream>) {
        // SAFETY: tensors are as long as the call says, and live until the stream is waited for.
        unsafe { gpu.block_linear(&self.call, self.scratch.address, stream.cu_stream()) }.unwrap();
    }
}

fn run<T: OperatorElement>(gpu: &Gpu, stream: &Arc<CudaStream>, host: &Host<T>) -> Vec<T> {
    let device = OnDevice::new(stream, host, true);
    device.launch(gpu, stream);
    device.y.read(stream)
}

/// Rows at which the kernels change, widths and depths of whole tiles and steps and others.
pub fn random(context: &Context) {
    fn every<T: OperatorElement>(context: &Context) {
        let stream = context.gpu.context().new_stream().unwrap();
        let shapes = [
            [0, 32, 8],
            [3, 64, 0],
            [1, 32, 1],
            [1, 4096, 100],
            [5, 96, 33],
            [8, 2048, 64],
            [9, 288, 31],
            [16, 544, 96],
            [17, 1024, 40],
            [32, 4096, 70],
            [33, 320, 65],
            [63, 608, 129],
            [64, 64, 48],
            [65, 64, 48],
            [100, 608, 129],
            [300, 1536, 200],
        ];
        let mut worst: f64 = 0.0;
        for (seed, shape) in shapes.into_iter().enumerate() {
            for has_bias in [false, true] {
                let host = Host::<T>::new(seed as u64, shape, has_bias);
                let found = run(context.gpu, &stream, &host);
                let off = error(&found, &host.expected());
                assert!(off <= tolerance::<T>() / 2.0, "{} {shape:?}: error {off:e}", T::NAME);
                worst = worst.max(off);
                // Alone, as far as a kernel for few rows takes the call: the same bits.
                let [rows, inner, width] = shape;
                if (2..OPENED).contains(&rows) {
                    let x = host.x[(rows - 1) * inner..].to_vec();
                    let alone = run(context.gpu, &stream, &Host { rows: 1, x, ..host });
                    assert!(bytes(&alone) == bytes(&found[(rows - 1) * width..]), "{} {shape:?}: alone", T::NAME);
                }
            }
        }
        println!("  {}: worst relative error {worst:.2e}", T::NAME);
    }
    every::<f16>(context);
    every::<bf16>(context);
}

/// A matrix that others on the stream may write is opened, however few rows there are.
pub fn given(context: &Context) {
    let stream = context.gpu.context().new_stream().unwrap();
    for rows in [1, 40] {
        let host = Host::<f16>::new(rows as u64, [rows, 1024, 96], true);
        let device = OnDevice::new(&stream, &host, false);
        assert!(device.call.scratch_bytes() > 0);
        device.launch(context.gpu, &stream);
        let off = error(&device.y.read::<f16>(&stream), &host.expected());
        assert!(off <= tolerance::<f16>(), "{rows} rows: error {off:e}");
    }
}

/// Each replay computes what x holds then.
pub fn captured(context: &Context) {
    for rows in [5, 40, 200] {
        let stream = context.gpu.context().new_stream().unwrap();
        let host = Host::<bf16>::new(1, [rows, 1024, 384], true);
        let mut other = Host::<bf16>::new(1, [rows, 1024, 384], true);
        other.x = Host::<bf16>::new(2, [rows, 1024, 384], true).x;
        let expected = [&host, &other].map(|host| run(context.gpu, &stream, host));
        assert!(bytes(&expected[0]) != bytes(&expected[1]));
        let given = [&host, &other].map(|host| Tensor::new(&stream, bytes(&host.x)));
        let device = OnDevice::new(&stream, &host, true);
        device.launch(context.gpu, &stream);
        stream.synchronize().unwrap();
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        device.launch(context.gpu, &stream);
        let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = stream.end_capture(flags).unwrap().unwrap();
        for replay in 0..4 {
            let (from, size) = (given[replay % 2].address, size_of_val(&host.x[..]));
            // SAFETY: both are as long as that, and apart.
            unsafe { context.gpu.copy(device.x.address, from, size, stream.cu_stream()) }.unwrap();
            graph.launch().unwrap();
            let found = device.y.read::<bf16>(&stream);
            assert!(bytes(&found) == bytes(&expected[replay % 2]), "{rows} rows, replay {replay}");
        }
    }
}

pub fn refused(context: &Context) {
    let stream = context.gpu.context().new_stream().unwrap();
    let device = OnDevice::new(&stream, &Host::<f16>::new(1, [2, 64, 8], false), true);
    let refuse = |call: BlockProduct, message: &str| {
        // SAFETY: nothing is launched.
        let error = unsafe { context.gpu.block_linear(&call, 0, stream.cu_stream()) }.unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    };
    let call = device.call;
    refuse(BlockProduct { element: Type::F32, ..call }, "in f32");
    refuse(BlockProduct { inner: 48, ..call }, "rows of 48 numbers");
    refuse(BlockProduct { inner: 0, ..call }, "rows of 0 numbers");
    refuse(BlockProduct { x: call.x + 8, ..call }, "expected multiples of 16");
    refuse(BlockProduct { width: usize::MAX / 64, ..call }, "N ");
}
