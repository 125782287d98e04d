//! The operators around the layers: what the reference gives, and the same bits whatever else is in the batch.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use pagoda_kernels::cuda::{self, Gpu, Type};
use pagoda_kernels::{Element, HstuUnit, bf16, f16};
use pagoda_test_support::Random;

use crate::Context;
use crate::common::{error, tolerance};
use crate::dense_cases::Numbers;
use crate::device::{Tensor, bytes};
use crate::ends_cases::Unit;
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

    fn unit<T: Element>(&self, case: &HstuUnit<'_, T>) -> Vec<f32> {
        let HstuUnit { rows, width, epsilon, .. } = *case;
        let (x, y) = (self.tensor(case.x), Written::new::<f32>(&self.stream, rows * width));
        let call = cuda::Unit { element: Type::of::<T>(), rows, width, x: x.address, y: y.address(), epsilon };
        // SAFETY: as long as the call says; waited for by the read.
        unsafe { self.gpu.unit(&call, self.stream.cu_stream()) }.unwrap();
        y.read(&self.stream)
    }
}

/// Rows as wide as there are kernels for, and others, for few rows and for many.
pub fn unit(context: &Context) {
    fn every<T: Element>(device: &Device<'_>) {
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
