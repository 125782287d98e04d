//! `Glu`: what float64 gives, the same bits whatever else is in the batch, and replays of a CUDA graph.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use pagoda_kernels::cpu::OperatorElement;
use pagoda_kernels::cuda::{self, CUdeviceptr, CudaError, Gpu, Type};
use pagoda_kernels::{GluActivation, bf16, f16};
use pagoda_test_support::Random;

use crate::Context;
use crate::device::{Tensor, bytes};
use crate::glu_cases::{Gated, worst};
use crate::written::Written;

/// Runs rows of a call that begin at `from`, and reads what they give.
fn run<T: OperatorElement>(
    gpu: &Gpu,
    stream: &Arc<CudaStream>,
    glu: &Gated<T>,
    rows: usize,
    from: CUdeviceptr,
) -> Vec<T> {
    let y = Written::new::<T>(stream, rows * glu.width);
    let call = call_of(glu, rows, from, y.address());
    // SAFETY: both are as long as the call says; waited for by the read.
    unsafe { gpu.glu(&call, stream.cu_stream()) }.unwrap();
    y.read(stream)
}

fn call_of<T: OperatorElement>(glu: &Gated<T>, rows: usize, x: CUdeviceptr, y: CUdeviceptr) -> cuda::Glu {
    cuda::Glu { element: Type::of::<T>(), rows, width: glu.width, x, residual: None, y, activation: glu.activation }
}

/// Widths of whole vectors and others, of one block and of several; rows alone and at addresses that fit no vector.
pub fn random(context: &Context) {
    fn every<T: OperatorElement>(gpu: &Gpu, stream: &Arc<CudaStream>) {
        for (rows, width) in
            [(0, 8), (4, 0), (1, 1), (3, 7), (1, 8), (300, 24), (2, 2049), (2, 4864), (1, 14_336), (500, 1536)]
        {
            for activation in GluActivation::ALL {
                let glu = Gated::<T>::new(&mut Random(width as u64), rows, width, activation);
                let what = format!("{} {activation:?} {rows} rows, F={width}", T::NAME);
                let x = Tensor::new(stream, bytes(&glu.x));
                let got = run(gpu, stream, &glu, rows, x.address);
                let off = worst(&glu, &got, &glu.expected());
                assert!(off <= 1.0, "{what}: {off} of the bound");
                if rows == 0 {
                    continue;
                }
                let last = x.address + ((rows - 1) * 2 * width * size_of::<T>()) as CUdeviceptr;
                let alone = run(gpu, stream, &glu, 1, last);
                assert!(bytes(&alone) == bytes(&got[(rows - 1) * width..]), "{what}: the last row alone");
                // One element further: no vector is aligned, so it is the other kernel.
                let moved = Tensor::new(stream, &[&vec![0; size_of::<T>()][..], bytes(&glu.x)].concat());
                let moved = run(gpu, stream, &glu, rows, moved.address + size_of::<T>() as CUdeviceptr);
                assert!(bytes(&moved) == bytes(&got), "{what}: not aligned");
            }
        }
    }
    let stream = context.gpu.context().new_stream().unwrap();
    every::<f32>(context.gpu, &stream);
    every::<f16>(context.gpu, &stream);
    every::<bf16>(context.gpu, &stream);
    let glu = Gated::<f32> { rows: 1, width: 1, x: vec![], activation: GluActivation::Silu };
    let beyond = cuda::Glu { width: usize::MAX / 2, ..call_of(&glu, 1, 0, 0) };
    // SAFETY: refused before anything is read.
    let error = unsafe { context.gpu.glu(&beyond, stream.cu_stream()) }.unwrap_err();
    assert!(matches!(&error, CudaError::Unsupported(text) if text.starts_with("F ")), "{error}");
}

/// Each replay computes what x holds then.
pub fn captured(context: &Context) {
    let stream = context.gpu.context().new_stream().unwrap();
    let given = [1, 2].map(|seed| Gated::<bf16>::new(&mut Random(seed), 30, 1536, GluActivation::GeluTanh));
    let on_device = given.each_ref().map(|glu| Tensor::new(&stream, bytes(&glu.x)));
    let expected = [0, 1].map(|at| run(context.gpu, &stream, &given[at], 30, on_device[at].address));
    assert!(bytes(&expected[0]) != bytes(&expected[1]));
    let (x, y) = (Tensor::new(&stream, bytes(&given[0].x)), Written::new::<bf16>(&stream, 30 * 1536));
    let call = call_of(&given[0], 30, x.address, y.address());
    stream.synchronize().unwrap();
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    // SAFETY: as long as the call says, and alive until the last replay has run.
    unsafe { context.gpu.glu(&call, stream.cu_stream()) }.unwrap();
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags).unwrap().unwrap();
    for replay in 0..4 {
        let from = &on_device[replay % 2];
        // SAFETY: both are as long as that, and apart.
        unsafe { context.gpu.copy(x.address, from.address, size_of_val(&given[0].x[..]), stream.cu_stream()) }.unwrap();
        graph.launch().unwrap();
        assert!(bytes(&y.read::<bf16>(&stream)) == bytes(&expected[replay % 2]), "replay {replay}");
    }
}
