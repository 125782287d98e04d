//! Calls of the dense operators of an HSTU block by device addresses, and the form in which kernels get them.

use cudarc::driver::sys::CUdeviceptr;

use super::raw;
use crate::cuda::common::element_type::Type;
use crate::cuda::common::error::CudaError;
use crate::cuda::common::sizes::check_sizes;
use crate::{Activation, GateNorm, Silu};

/// One call of the operator `HstuNorm`, as [`crate::HstuNorm`].
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    /// Of every tensor.
    pub element: Type,
    /// R.
    pub rows: usize,
    /// E.
    pub width: usize,
    /// `[R, E]`.
    pub x: CUdeviceptr,
    /// `[E]`.
    pub weight: CUdeviceptr,
    /// `[E]`.
    pub bias: CUdeviceptr,
    /// `[R, E]`.
    pub y: CUdeviceptr,
    /// What is added to the variance.
    pub epsilon: f32,
    /// Whether nothing on the stream writes weight and bias: they are then read while the kernel in front still runs.
    pub constant: bool,
}

/// One call of the operator `HstuProject`, as [`crate::HstuProject`].
#[derive(Clone, Copy, Debug)]
pub struct Project {
    /// Of every tensor.
    pub element: Type,
    /// R.
    pub rows: usize,
    /// E.
    pub width: usize,
    /// W = H·D.
    pub part: usize,
    /// `[R, E]`.
    pub x: CUdeviceptr,
    /// `[4·W, E]`.
    pub weight: CUdeviceptr,
    /// `[4·W]`.
    pub bias: Option<CUdeviceptr>,
    /// u, v, q and k: `[R, W]` each.
    pub outputs: [CUdeviceptr; 4],
    /// Which of them go through SiLU.
    pub silu: Silu,
    /// Whether nothing on the stream writes weight and bias: they are then read while the kernel in front still runs.
    pub constant: bool,
}

/// Some of the rows of a tensor, as [`crate::Taken`]. A row that does not exist counts as zeros.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    /// R.
    pub of: usize,
    /// `[S]` of i64.
    pub index: CUdeviceptr,
}

/// One call of the operator `HstuGate`, as [`crate::HstuGate`].
#[derive(Clone, Copy, Debug)]
pub struct Gate {
    /// Of every tensor but the index.
    pub element: Type,
    /// S.
    pub rows: usize,
    /// Of what was attended, and of u.
    pub taken: Option<Taken>,
    /// H.
    pub heads: usize,
    /// D.
    pub head_size: usize,
    /// `[R, H, D]`.
    pub attended: CUdeviceptr,
    /// `[R, H·D]`.
    pub u: CUdeviceptr,
    /// `[H·D]`, of a norm by group `[H]`.
    pub weight: CUdeviceptr,
    /// As the weight.
    pub bias: CUdeviceptr,
    /// `[S, H·D]`, or `[S, 3·H·D]` with `concat`.
    pub y: CUdeviceptr,
    /// What is added to the variance.
    pub epsilon: f32,
    /// What is normed together.
    pub norm: GateNorm,
    /// Whether y is the concatenation of u, the attended rows and the gated norm.
    pub concat: bool,
    /// Whether nothing on the stream writes weight and bias: they are then read while the kernel in front still runs.
    pub constant: bool,
}

/// One call of the operator `HstuOutput`, as [`crate::HstuOutput`].
#[derive(Clone, Copy, Debug)]
pub struct Output {
    /// Of every tensor but the index.
    pub element: Type,
    /// S.
    pub rows: usize,
    /// K.
    pub inner: usize,
    /// E.
    pub width: usize,
    /// `[S, K]`.
    pub y: CUdeviceptr,
    /// `[E, K]`.
    pub weight: CUdeviceptr,
    /// `[E]`.
    pub bias: Option<CUdeviceptr>,
    /// `[R, E]`.
    pub residual: Option<CUdeviceptr>,
    /// Of the residual.
    pub taken: Option<Taken>,
    /// `[S, E]`.
    pub output: CUdeviceptr,
    /// Whether nothing on the stream writes weight and bias: they are then read while the kernel in front still runs.
    pub constant: bool,
}

/// A kernel that multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DensePath {
    /// Every type and shape.
    Plain,
    /// wgmma and TMA of sm_90a: f16 and bf16, sizes that are multiples of 8, and of 32 for each
    /// of several outputs.
    Hopper,
}

impl Taken {
    /// For so many rows of an output. Refuses to take some where there are none: such tensors may have no address,
    /// which means to kernels that they are not given.
    pub(super) fn raw(taken: Option<Self>, rows: usize) -> Result<raw::Taken, CudaError> {
        match taken {
            None => Ok(raw::Taken { index: 0, of: 0 }),
            Some(Self { of: 0, .. }) if rows > 0 => {
                Err(CudaError::Unsupported(format!("{rows} rows by an index, expected rows of the 0 that there are")))
            }
            Some(Self { of, index }) => Ok(raw::Taken { index, of: of as i64 }),
        }
    }
}

impl Project {
    pub(super) fn raw(&self) -> Result<raw::Product, CudaError> {
        let columns = self.part.saturating_mul(4);
        check_sizes(&[("rows", self.rows), ("E", self.width), ("4·W", columns)])?;
        Ok(raw::Product {
            x: self.x,
            weight: self.weight,
            bias: self.bias.unwrap_or(0),
            residual: 0,
            taken: Taken::raw(None, self.rows)?,
            outputs: self.outputs,
            rows: self.rows as i32,
            depth: self.width as i32,
            columns: columns as i32,
            part: self.part as i32,
            silu: (self.silu.outputs() * self.part) as i32,
            activation: Activation::None as i32,
            constant: i32::from(self.constant),
        })
    }
}

impl Output {
    pub(super) fn raw(&self) -> Result<raw::Product, CudaError> {
        check_sizes(&[("rows", self.rows), ("K", self.inner), ("E", self.width)])?;
        Ok(raw::Product {
            x: self.y,
            weight: self.weight,
            bias: self.bias.unwrap_or(0),
            residual: self.residual.unwrap_or(0),
            taken: Taken::raw(self.taken, self.rows)?,
            outputs: [self.output, 0, 0, 0],
            rows: self.rows as i32,
            depth: self.inner as i32,
            columns: self.width as i32,
            part: self.width as i32,
            silu: 0,
            activation: Activation::None as i32,
            constant: i32::from(self.constant),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_taken_where_there_are_some() {
        let output = |rows: usize, of: usize| Output {
            element: Type::F32,
            rows,
            inner: 8,
            width: 8,
            y: 16,
            weight: 32,
            bias: None,
            residual: Some(0),
            taken: Some(Taken { of, index: 48 }),
            output: 64,
            constant: false,
        };
        let refused = output(3, 0).raw().expect_err("there are none").to_string();
        assert!(refused.contains("3 rows by an index, expected rows of the 0 that there are"), "{refused}");
        assert_eq!(output(0, 0).raw().map(|raw| raw.taken.index).ok(), Some(48));
        assert_eq!(output(3, 2).raw().map(|raw| (raw.taken.index, raw.taken.of)).ok(), Some((48, 2)));
    }
}
