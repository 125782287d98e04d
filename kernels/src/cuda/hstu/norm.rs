//! `HstuNorm` and `HstuGate` on the GPU: which kernel takes a call.

use std::ffi::c_void;
use std::ptr::from_mut;

use cudarc::driver::sys::{CUdeviceptr, CUstream};

use super::dense_call::{Gate, Norm, Taken};
use super::raw;
use crate::GateNorm;
use crate::cuda::common::element_type::Type;
use crate::cuda::common::error::CudaError;
use crate::cuda::common::gpu::Gpu;
use crate::cuda::common::sizes::check_sizes;

/// Warps of a block of the norms.
pub(super) const NORM_WARPS: usize = 4;

/// Whole rows that a block of the norm takes at once where there are so many for each multiprocessor.
const AT_ONCE: usize = 2;
const MANY_UNITS: usize = 16;

impl Gpu {
    /// Enqueues `HstuNorm` on a stream.
    ///
    /// # Safety
    /// Every address of the call is one of this device, of memory as long as the call's shapes say and alive until the
    /// stream has done this; nothing else writes it meanwhile, or touches the output, which is apart from every input.
    pub unsafe fn norm(&self, call: &Norm, stream: CUstream) -> Result<(), CudaError> {
        let raw = raw::Norm {
            x: call.x,
            u: 0,
            weight: call.weight,
            bias: call.bias,
            y: call.y,
            taken: Taken::raw(None, call.rows)?,
            units: call.rows as i64,
            size: 0,
            groups: 1,
            by_group: 0,
            concat: 0,
            constant: i32::from(call.constant),
            epsilon: call.epsilon,
        };
        // SAFETY: the caller's.
        unsafe { self.normed(raw, call.width, call.element, stream) }
    }

    /// Enqueues `HstuGate` on a stream. No value in an index makes it read or write outside the tensors.
    ///
    /// # Safety
    /// As for [`norm`](Self::norm).
    pub unsafe fn gate(&self, call: &Gate, stream: CUstream) -> Result<(), CudaError> {
        let by_group = call.norm == GateNorm::Group;
        let (groups, size) = if by_group { (call.heads, call.head_size) } else { (1, call.heads * call.head_size) };
        check_sizes(&[("rows", call.rows), ("heads", groups)])?;
        let raw = raw::Norm {
            x: call.attended,
            u: call.u,
            weight: call.weight,
            bias: call.bias,
            y: call.y,
            taken: Taken::raw(call.taken, call.rows)?,
            units: (call.rows * groups) as i64,
            size: 0,
            groups: groups as i32,
            by_group: i32::from(by_group),
            concat: i32::from(call.concat),
            constant: i32::from(call.constant),
            epsilon: call.epsilon,
        };
        // SAFETY: the caller's.
        unsafe { self.normed(raw, size, call.element, stream) }
    }

    /// # Safety
    /// As for [`norm`](Self::norm).
    unsafe fn normed(&self, mut raw: raw::Norm, size: usize, element: Type, stream: CUstream) -> Result<(), CudaError> {
        check_sizes(&[("rows", raw.units as usize), ("columns", size)])?;
        raw.size = size as i32;
        if raw.units == 0 || size == 0 {
            return Ok(());
        }
        self.bind()?;
        let learned = if raw.by_group == 1 { 0 } else { raw.weight | raw.bias };
        let units = raw.units as usize;
        let form = form_of(size * element.bytes(), raw.x | raw.u | raw.y | learned);
        let (warps, vectors) = form.unwrap_or((1, 0));
        // Several units at once give the same bits, so the size of the batch may decide.
        let whole = raw.groups == 1 && raw.by_group == 0 && raw.concat == 0;
        let many = whole && (warps, vectors) == (4, 1) && units >= MANY_UNITS * self.multiprocessors as usize;
        let name = match form {
            None => format!("norm_{}_any", element.name()),
            Some(_) if many && raw.u == 0 => format!("norm_{}_many", element.name()),
            Some(_) if many => format!("gate_{}_many", element.name()),
            Some(_) => format!("norm_{}_{warps}_{vectors}", element.name()),
        };
        let function = self.modules.norm.function(&name, 0)?;
        let mut arguments = [from_mut(&mut raw).cast::<c_void>()];
        let each = if many { AT_ONCE } else { NORM_WARPS / warps };
        let (blocks, threads) = (units.div_ceil(each) as u32, 32 * NORM_WARPS as u32);
        // SAFETY: the kernel takes a `Norm`, and waits for the kernel before it on chips that let it begin earlier.
        unsafe { self.launch_dependent(function, blocks, threads, 0, stream, &mut arguments) }
    }
}

/// How many warps have what is normed together, and how many vectors of 16 bytes each lane has of it: what kernels are
/// compiled for. None if it is not aligned to 16 bytes, or is longer.
pub(super) fn form_of(bytes: usize, addresses: CUdeviceptr) -> Option<(usize, usize)> {
    if !bytes.is_multiple_of(16) || !addresses.is_multiple_of(16) {
        return None;
    }
    // By the size alone: another form adds up in another order, and the rest of the batch must not change a bit.
    let known = [(1, 1), (1, 2), (4, 1), (4, 2), (4, 4)];
    known.into_iter().find(|(warps, vectors)| bytes <= warps * vectors * 32 * 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_normed_lies_in_vectors() {
        for (bytes, addresses, expected) in [
            (16, 0, Some((1, 1))),
            (1024, 32, Some((1, 2))),
            (2048, 0, Some((4, 1))),
            (4096, 0, Some((4, 2))),
            (8192, 0, Some((4, 4))),
            (8208, 0, None),
            (8, 0, None),
            (1024, 8, None),
        ] {
            assert_eq!(form_of(bytes, addresses), expected, "{bytes} {addresses}");
        }
    }
}
