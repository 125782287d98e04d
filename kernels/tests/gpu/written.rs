//! Outputs on the GPU, and what lies around them.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use pagoda_kernels::cpu::OperatorElement;
use pagoda_kernels::cuda::CUdeviceptr;

use crate::device::{Tensor, elements};

/// What outputs and what lies around them hold beforehand: NaN in every type.
const POISON: u8 = 0xff;
const AROUND: usize = 1 << 12;

/// Memory for an output, and memory around it that must stay as it is.
pub struct Written {
    memory: Tensor,
    len: usize,
}

impl Written {
    pub fn new<T>(stream: &Arc<CudaStream>, elements: usize) -> Self {
        let len = elements * size_of::<T>();
        Self { memory: Tensor::new(stream, &vec![POISON; len + 2 * AROUND]), len }
    }

    pub fn address(&self) -> CUdeviceptr {
        self.memory.address + AROUND as CUdeviceptr
    }

    pub fn read<T: OperatorElement>(&self, stream: &Arc<CudaStream>) -> Vec<T> {
        let all = self.memory.read(stream);
        let around = all[..AROUND].iter().chain(&all[AROUND + self.len..]);
        assert!(around.into_iter().all(|byte| *byte == POISON), "written outside the output");
        elements(&all[AROUND..AROUND + self.len])
    }
}
