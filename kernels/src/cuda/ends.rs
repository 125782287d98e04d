//! The operators around the layers of a model on the GPU.

use std::ffi::c_void;
use std::ptr::from_mut;

use super::call::copy_width;
use super::dense::{NORM_WARPS, form_of};
use super::dense_call::check_sizes;
use super::{CUdeviceptr, CUstream, CudaError, Gpu, Type};
use crate::ends::SELECTED;

/// One call of the operator `HstuUnit`, as [`crate::HstuUnit`].
#[derive(Clone, Copy, Debug)]
pub struct Unit {
    /// Of x.
    pub element: Type,
    /// R.
    pub rows: usize,
    /// E.
    pub width: usize,
    /// `[R, E]`.
    pub x: CUdeviceptr,
    /// `[R, E]` of f32.
    pub y: CUdeviceptr,
    /// What a row is divided by where it is shorter.
    pub epsilon: f32,
}

/// One call of the operator `HstuSelect`, as [`crate::HstuSelect`]. A row that there is not comes out as zeros.
#[derive(Clone, Copy, Debug)]
pub struct Select<'a> {
    /// Of every tensor but the index.
    pub element: Type,
    /// R.
    pub rows: usize,
    /// `[S]` of i64.
    pub index: CUdeviceptr,
    /// S.
    pub count: usize,
    /// The tensors, at least one and up to three.
    pub parts: &'a [Selected],
}

/// One of the tensors of [`Select`].
#[derive(Clone, Copy, Debug)]
pub struct Selected {
    /// Elements of a row.
    pub width: usize,
    /// `[R, width]`.
    pub from: CUdeviceptr,
    /// `[S, width]`.
    pub to: CUdeviceptr,
}

/// `Unit` of cuda/ends.cuh.
#[repr(C)]
#[derive(Clone, Copy)]
struct RawUnit {
    x: CUdeviceptr,
    y: CUdeviceptr,
    rows: i64,
    size: i32,
    epsilon: f32,
}

/// `Select` of cuda/ends.cuh.
#[repr(C)]
#[derive(Clone, Copy)]
struct RawSelect {
    index: CUdeviceptr,
    count: i64,
    rows: i64,
    parts: [RawSelected; SELECTED.len()],
    part_count: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RawSelected {
    from: CUdeviceptr,
    to: CUdeviceptr,
    units: i64,
}

impl Gpu {
    /// Puts `HstuSelect` on a stream. Whatever the index holds, nothing outside the tensors is read or written.
    ///
    /// # Safety
    /// As for [`norm`](Self::norm); the outputs are apart from one another.
    pub unsafe fn select(&self, call: &Select<'_>, stream: CUstream) -> Result<(), CudaError> {
        let Select { element, rows, index, count, parts } = *call;
        if parts.len() > SELECTED.len() {
            let message = format!("{} tensors to select rows of, expected up to {}", parts.len(), SELECTED.len());
            return Err(CudaError::Unsupported(message));
        }
        check_sizes(&[("rows", rows), ("S", count.saturating_mul(parts.len()))])?;
        if count == 0 || parts.is_empty() {
            return Ok(());
        }
        self.bind()?;
        let (widths, addresses) = parts.iter().fold((0, 0), |(widths, addresses), part| {
            (widths | (part.width * element.bytes()), addresses | part.from | part.to)
        });
        let unit = copy_width(widths, addresses);
        let function = self.ends.function(&format!("select_{unit}"), 0)?;
        let mut raw = RawSelect {
            index,
            count: count as i64,
            rows: rows as i64,
            parts: Default::default(),
            part_count: parts.len() as i32,
        };
        for (raw, Selected { width, from, to }) in raw.parts.iter_mut().zip(parts) {
            *raw = RawSelected { from: *from, to: *to, units: (width * element.bytes() / unit) as i64 };
        }
        let mut arguments = [from_mut(&mut raw).cast::<c_void>()];
        let blocks = (count * parts.len()).div_ceil(NORM_WARPS) as u32;
        // SAFETY: the kernel takes a `Select`, and waits for the kernel before it on chips that let it begin earlier.
        unsafe { self.launch_early(function, blocks, 32 * NORM_WARPS as u32, 0, stream, &mut arguments) }
    }

    /// Puts `HstuUnit` on a stream.
    ///
    /// # Safety
    /// As for [`norm`](Self::norm).
    pub unsafe fn unit(&self, call: &Unit, stream: CUstream) -> Result<(), CudaError> {
        let Unit { element, rows, width, x, y, epsilon } = *call;
        check_sizes(&[("rows", rows), ("E", width)])?;
        if rows == 0 || width == 0 {
            return Ok(());
        }
        self.bind()?;
        let form = form_of(width * element.bytes(), x | y);
        let (warps, form) = form.map_or((1, "any".into()), |(warps, vectors)| (warps, format!("{warps}_{vectors}")));
        let function = self.ends.function(&format!("unit_{}_{form}", element.name()), 0)?;
        let mut raw = RawUnit { x, y, rows: rows as i64, size: width as i32, epsilon };
        let mut arguments = [from_mut(&mut raw).cast::<c_void>()];
        let (blocks, threads) = (rows.div_ceil(NORM_WARPS / warps) as u32, 32 * NORM_WARPS as u32);
        // SAFETY: the kernel takes a `Unit`, and waits for the kernel before it on chips that let it begin earlier.
        unsafe { self.launch_early(function, blocks, threads, 0, stream, &mut arguments) }
    }
}
