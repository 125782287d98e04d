//! The rows of a batch, by user.

use pagoda_kernels::cuda;
use pagoda_kernels::hstu::batch::Rows;

use crate::ort::{InputTensor, KernelContext, OpError};

/// The index tensors that assign the rows of a call to its users, and the shape of a row.
pub struct RowInputs<'a> {
    row_offsets: InputTensor<'a>,
    num_candidates: InputTensor<'a>,
    total_rows: usize,
    pub(super) heads: usize,
    pub(super) head_size: usize,
}

impl<'a> RowInputs<'a> {
    /// Reads inputs 3 and 4. The first of `tensors` has the shape of the rows, and the others must have the same.
    pub fn read(context: &'a KernelContext, tensors: &[&InputTensor<'_>]) -> Result<Self, OpError> {
        let [total_rows, heads, head_size] = tensors[0].shape()?;
        for tensor in &tensors[1..] {
            if tensor.shape::<3>()? != [total_rows, heads, head_size] {
                return Err(OpError::invalid(format!(
                    "{}: shape {:?} differs from that of {}, {:?}",
                    tensor.name, tensor.dims, tensors[0].name, tensors[0].dims
                )));
            }
        }
        let [row_offsets, num_candidates] = [context.input(3)?, context.input(4)?];
        row_offsets.shape::<1>()?;
        num_candidates.shape::<1>()?;
        Ok(Self { row_offsets, num_candidates, total_rows, heads, head_size })
    }

    /// The index tensors.
    pub fn tensors(&self) -> [&InputTensor<'a>; 2] {
        [&self.row_offsets, &self.num_candidates]
    }

    /// The argument of the CPU kernels.
    ///
    /// # Safety
    /// The tensors are in host memory, and nothing writes to them while the slices live.
    pub unsafe fn on_host(&self) -> Rows<'a> {
        let Self { total_rows, heads, head_size, .. } = *self;
        // SAFETY: by contract; operators declare both inputs as I32.
        let (row_offsets, num_candidates) = unsafe { (self.row_offsets.slice(), self.num_candidates.slice()) };
        Rows { row_offsets, num_candidates, total_rows, heads, head_size }
    }

    /// The argument of the CUDA kernels.
    pub fn on_device(&self) -> Result<cuda::Rows, OpError> {
        let Self { total_rows, heads, head_size, .. } = *self;
        let users = self.num_candidates.dims[0];
        self.row_offsets.expect_len(users + 1, "one more than there are users")?;
        if users == 0 && total_rows > 0 {
            return Err(OpError::invalid(format!("num_candidates: 0 users, expected some for {total_rows} rows")));
        }
        let (row_offsets, num_candidates) = (self.row_offsets.address(), self.num_candidates.address());
        Ok(cuda::Rows { row_offsets, num_candidates, users, total_rows, heads, head_size })
    }
}
