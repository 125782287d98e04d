//! `HstuEmbed` on the GPU.

use std::ffi::c_void;
use std::ptr::from_mut;

use cudarc::driver::sys::{CUdeviceptr, CUstream};

use super::raw;
use crate::cuda::common::element_type::Type;
use crate::cuda::common::error::CudaError;
use crate::cuda::common::gpu::Gpu;
use crate::cuda::common::sizes::check_sizes;
use crate::hstu::embed::{LEARNED, TABLES};

const THREADS: usize = 128;

/// One call of the operator `HstuEmbed`, as [`crate::HstuEmbed`].
#[derive(Clone, Copy, Debug)]
pub struct Embed<'a> {
    /// Of the output.
    pub element: Type,
    /// R.
    pub rows: usize,
    /// E.
    pub width: usize,
    /// Keys and their tables, in the order in which they are added up.
    pub tables: &'a [Lookup],
    /// What the sum is multiplied by.
    pub scale: f32,
    /// Positions and times, with their tables.
    pub learned: &'a [Lookup],
    /// `[R, E]`.
    pub y: CUdeviceptr,
}

/// As [`crate::Lookup`].
#[derive(Clone, Copy, Debug)]
pub struct Lookup {
    /// `[N, E]` of f32.
    pub table: CUdeviceptr,
    /// N.
    pub rows: usize,
    /// `[R]` of i64.
    pub index: CUdeviceptr,
}

impl Embed<'_> {
    fn check(&self) -> Result<(), CudaError> {
        let Self { tables, learned, .. } = *self;
        if !(1..=TABLES).contains(&tables.len()) || learned.len() > LEARNED {
            return Err(CudaError::Unsupported(format!(
                "{} tables and {} of positions and times, expected 1 to {TABLES} and up to {LEARNED}",
                tables.len(),
                learned.len()
            )));
        }
        let least = tables.iter().map(|lookup| (lookup, 2)).chain(learned.iter().map(|lookup| (lookup, 1)));
        if let Some((lookup, least)) = least.into_iter().find(|(lookup, least)| lookup.rows < *least) {
            let message = format!("a table of {} rows, expected {least} or more", lookup.rows);
            return Err(CudaError::Unsupported(message));
        }
        check_sizes(&[("rows", self.rows), ("E", self.width)])
    }

    fn raw(&self) -> raw::Embed {
        let mut raw = raw::Embed {
            tables: Default::default(),
            learned: Default::default(),
            y: self.y,
            rows: self.rows as i64,
            width: self.width as i32,
            table_count: self.tables.len() as i32,
            learned_count: self.learned.len() as i32,
            scale: self.scale,
        };
        let places = raw.tables.iter_mut().zip(self.tables).chain(raw.learned.iter_mut().zip(self.learned));
        for (place, &Lookup { table, rows, index }) in places {
            *place = raw::Lookup { table, index, rows: rows as i64 };
        }
        raw
    }

    /// Elements that a thread has: as many as 16 bytes of the output hold, if everything is aligned to 16 bytes.
    fn each(&self) -> usize {
        let tables = self.tables.iter().chain(self.learned).fold(self.y, |all, lookup| all | lookup.table);
        let vector = 16 / self.element.bytes();
        if self.width.is_multiple_of(vector) && tables.is_multiple_of(16) { vector } else { 1 }
    }
}

impl Gpu {
    /// Enqueues `HstuEmbed` on a stream. No value in an index makes it read or write outside the tensors.
    ///
    /// # Safety
    /// As for [`norm`](Self::norm).
    pub unsafe fn embed(&self, call: &Embed<'_>, stream: CUstream) -> Result<(), CudaError> {
        call.check()?;
        if call.rows == 0 || call.width == 0 {
            return Ok(());
        }
        self.bind()?;
        let each = call.each();
        let form = if each == 1 { "any" } else { "16" };
        let function = self.modules.embed.function(&format!("embed_{}_{form}", call.element.name()), 0)?;
        let threads = call.rows * (call.width / each);
        check_sizes(&[("vectors", threads)])?;
        let mut raw = call.raw();
        let mut arguments = [from_mut(&mut raw).cast::<c_void>()];
        // SAFETY: the kernel takes an `Embed`, and waits for the kernel before it on chips that let it begin earlier.
        unsafe {
            self.launch_dependent(function, threads.div_ceil(THREADS) as u32, THREADS as u32, 0, stream, &mut arguments)
        }
    }
}
