//! The pools: the pages of each layer, and the copying of tokens in and out of them.

use std::sync::Arc;

use pagoda_kernels::cuda::CUdeviceptr;

use super::device::{Mover, Part, Stretch};
use super::format::Plane;
use super::plane_pool::PlanePool;
use super::shape::{Shape, gpu_of_pool};
use crate::error::{Error, Result, Status};
use crate::tensor::Tensor;

/// The pages of every layer.
///
/// The table of owners decides which thread may touch which tokens. Tokens below an owner's length are only read; pages that
/// owners share hold such tokens alone. Tokens above it are written by the one lease, or the one onload, that holds them.
/// Models that run on a lease keep to the same rule, so a token is never written and read, or written twice, at once.
pub(super) struct Pool {
    /// Set if the pages are on a GPU. Declared before the pages: it is dropped first, which ends all copies.
    mover: Option<Mover>,
    layers: Vec<Vec<PlanePool>>,
    shape: Shape,
}

/// The error where a GPU has no room for the pages.
fn no_room(error: Error) -> Error {
    let error = match error.status() {
        Status::Capacity => {
            let message = format!("{}: give the cache fewer pages, or free memory of the GPU", error.message());
            Error::new(Status::Capacity, message)
        }
        _ => error,
    };
    error.about("size")
}

impl Pool {
    pub(super) fn new(shape: Shape, pages: u32, device_id: Option<u32>) -> Result<Self> {
        let gpu = device_id.map(gpu_of_pool).transpose()?;
        let plane = |plane: Plane| -> Result<_> {
            let width = plane.width as i64;
            let dims = [i64::from(pages), 2, shape.page_size.into(), shape.heads.into(), width];
            let tensor = match gpu {
                None => Tensor::zeros(plane.element, &dims)?,
                Some(gpu) => Tensor::zeros_on(gpu, plane.element, &dims).map_err(no_room)?,
            };
            Ok(PlanePool { tensor: Arc::new(tensor), row_bytes: shape.heads as usize * plane.head_bytes() })
        };
        let layers = (0..shape.layers).map(|_| shape.planes().map(plane).collect());
        let layers = layers.collect::<Result<Vec<Vec<_>>>>()?;
        let mover = gpu.map(|gpu| {
            let addresses =
                layers.iter().map(|planes| planes[0].tensor.place().map(|(at, _)| at.addr() as CUdeviceptr));
            Mover::new(gpu, shape, pages, &addresses.collect::<Result<Vec<_>>>()?).map_err(no_room)
        });
        Ok(Self { layers, shape, mover: mover.transpose()? })
    }

    pub(super) fn is_on_gpu(&self) -> bool {
        self.mover.is_some()
    }

    /// Waits until everything that was written is in its pages: on a GPU it is only on its way there when `write` returns.
    pub(super) fn settle(&self) -> Result<()> {
        self.mover.as_ref().map_or(Ok(()), Mover::wait)
    }

    /// Whether there is nothing to settle.
    pub(super) fn is_still(&self) -> bool {
        self.mover.as_ref().is_none_or(Mover::is_still)
    }

    /// The numbers or codes of a layer.
    pub(super) fn layer(&self, layer: u32) -> Option<&Arc<Tensor>> {
        Some(&self.layers.get(layer as usize)?[0].tensor)
    }

    /// The scales of a layer; `None` where the format has none.
    pub(super) fn scales(&self, layer: u32) -> Option<&Arc<Tensor>> {
        Some(&self.layers.get(layer as usize)?.get(1)?.tensor)
    }

    /// Appends the keys, then the values, of `count` tokens to `to`; of a quantised format the codes of both, then the scales
    /// of both. `pages` holds them from token `first` on.
    ///
    /// # Safety
    /// The tokens lie below the length of an owner that can not lose these pages during the call.
    pub(super) unsafe fn read(
        &self,
        layer: u32,
        pages: &[u32],
        first: usize,
        count: usize,
        to: &mut Vec<u8>,
    ) -> Result<()> {
        if let Some(mover) = &self.mover {
            // SAFETY: the caller's.
            return unsafe { mover.read(&self.layers[layer as usize], Stretch { pages, first, count }, to) };
        }
        for (plane, half) in self.layers[layer as usize].iter().flat_map(|plane| [(plane, 0), (plane, 1)]) {
            self.runs(plane, pages, half, first, count, |at, bytes, _| {
                // SAFETY: `runs` stays inside the pool, and by contract nothing writes there.
                to.extend_from_slice(unsafe { std::slice::from_raw_parts(at, bytes) });
            });
        }
        Ok(())
    }

    /// Writes tokens; `pages` gets them from token `first` on, the parts one behind the other.
    ///
    /// # Safety
    /// The tokens are the caller's alone, and the bytes live, until [`settle`](Self::settle) has returned.
    pub(super) unsafe fn write(&self, layer: u32, pages: &[u32], first: usize, parts: &[Part<'_>]) -> Result<()> {
        let row = self.shape.row_bytes();
        for Part { bytes, held, skip, count } in parts {
            assert_eq!(bytes.len(), 2 * held * row, "a layer of {held} tokens");
            assert!(skip + count <= *held, "{count} tokens after {skip} of {held}");
        }
        if let Some(mover) = &self.mover {
            // SAFETY: the caller's.
            return unsafe { mover.write(&self.layers[layer as usize], layer, (pages, first), parts) };
        }
        let mut before = 0;
        for plane in &self.layers[layer as usize] {
            let row = plane.row_bytes;
            let _part = plane.tensor.hold_part();
            let mut first = first;
            for part in parts {
                let &Part { held, skip, count, .. } = part;
                let bytes = part.plane(before, row);
                for half in 0..2 {
                    let from = &bytes[(half * held + skip) * row..][..count * row];
                    self.runs(plane, pages, half, first, count, |at, bytes, done| {
                        // SAFETY: `runs` stays inside the pool, and by contract no other thread touches it there; `from` is
                        // not part of a pool.
                        unsafe { std::ptr::copy_nonoverlapping(from[done..][..bytes].as_ptr(), at, bytes) };
                    });
                }
                first += count;
            }
            before += row;
        }
        Ok(())
    }

    /// Copies the first `count` tokens of a page to another one, in every layer; on a GPU it is only on its way there when this
    /// returns, and operators wait for it.
    ///
    /// # Safety
    /// Nothing writes to these tokens of `from`, and `to` is the caller's alone.
    pub(super) unsafe fn copy_page(&self, from: u32, to: u32, count: usize) -> Result<()> {
        for (layer, planes) in self.layers.iter().enumerate() {
            if let Some(mover) = &self.mover {
                // SAFETY: the caller's. What is copied beyond `count` is not read there.
                unsafe { mover.copy_page(planes, layer as u32, from, to) }?;
                continue;
            }
            for (plane, half) in planes.iter().flat_map(|plane| [(plane, 0), (plane, 1)]) {
                let _part = plane.tensor.hold_part();
                self.runs(plane, &[from], half, 0, count, |from, bytes, _| {
                    self.runs(plane, &[to], half, 0, count, |to, _, _| {
                        // SAFETY: `runs` stays inside the pool, and two pages do not overlap.
                        unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
                    });
                });
            }
        }
        Ok(())
    }

    /// Calls `each` with every run of tokens that lies in one piece: where it begins, its bytes, and how many bytes came
    /// before it.
    fn runs(
        &self,
        plane: &PlanePool,
        pages: &[u32],
        half: usize,
        first: usize,
        count: usize,
        mut each: impl FnMut(*mut u8, usize, usize),
    ) {
        let (row, page_size) = (plane.row_bytes, self.shape.page_size as usize);
        let (data, bytes) = plane.tensor.memory().expect("a pool has no strings");
        let mut done = 0;
        while done < count {
            let (page, slot) = ((first + done) / page_size, (first + done) % page_size);
            let tokens = (page_size - slot).min(count - done);
            let at = ((pages[page] as usize * 2 + half) * page_size + slot) * row;
            assert!(at + tokens * row <= bytes, "page {} is beyond the pool", pages[page]);
            // SAFETY: inside the tensor's memory, by the line above.
            each(unsafe { data.cast::<u8>().add(at) }, tokens * row, done * row);
            done += tokens;
        }
    }
}

#[cfg(test)]
mod tests {
    use pagoda_kernels::KvFormat;

    use super::super::format::Format;
    use super::*;
    use crate::tensor::ElementType;

    #[test]
    fn tokens_come_out_as_they_went_in() {
        let shape = Shape { layers: 2, heads: 1, head_size: 3, page_size: 8, format: Format::Native(ElementType::F16) };
        let pool = Pool::new(shape, 5, None).unwrap();
        let row = shape.row_bytes();
        let pages = [4, 0, 2];
        // 21 tokens, of which the first 2 are left out, into the slots from 3 on.
        let from: Vec<u8> = (0..2 * 21 * row).map(|n| n as u8).collect();
        // SAFETY: this thread alone has the pool.
        unsafe { pool.write(1, &pages, 3, &[Part { bytes: &from, held: 21, skip: 2, count: 19 }]) }.unwrap();
        let mut all = Vec::new();
        // SAFETY: as above.
        unsafe { pool.read(1, &pages, 3, 19, &mut all) }.unwrap();
        assert_eq!(all[..19 * row], from[2 * row..21 * row]);
        assert_eq!(all[19 * row..], from[(21 + 2) * row..]);
        // The other layer and the other slots are as they were.
        let mut rest = Vec::new();
        // SAFETY: as above.
        unsafe { pool.read(0, &pages, 0, 24, &mut rest) }.unwrap();
        // SAFETY: as above.
        unsafe { pool.read(1, &pages, 0, 3, &mut rest) }.unwrap();
        // SAFETY: as above.
        unsafe { pool.read(1, &[1, 3], 0, 16, &mut rest) }.unwrap();
        assert!(rest.iter().all(|&byte| byte == 0));
    }

    #[test]
    fn codes_travel_with_their_scales() {
        for format in [KvFormat::Int8, KvFormat::Int4, KvFormat::Fp8] {
            let format = Format::Quantised(format);
            let shape = Shape { layers: 1, heads: 3, head_size: 4, page_size: 8, format };
            let pool = Pool::new(shape, 4, None).unwrap();
            let rows: Vec<_> = shape.planes().map(|plane| 3 * plane.head_bytes()).collect();
            // Two pieces, 11 tokens of which the first is left out and 5, into the slots from 2 on.
            let pieces =
                [11, 5].map(|held| (0..2 * held * shape.row_bytes()).map(|n| (n * 7) as u8).collect::<Vec<_>>());
            let parts = [
                Part { bytes: &pieces[0], held: 11, skip: 1, count: 10 },
                Part { bytes: &pieces[1], held: 5, skip: 0, count: 5 },
            ];
            // SAFETY: this thread alone has the pool.
            unsafe { pool.write(0, &[3, 0, 1], 2, &parts) }.unwrap();
            let mut all = Vec::new();
            // SAFETY: as above.
            unsafe { pool.read(0, &[3, 0, 1], 2, 15, &mut all) }.unwrap();
            let mut expected: Vec<u8> = Vec::new();
            for (before, row) in [(0, rows[0]), (rows[0], rows[1])] {
                for half in 0..2 {
                    expected.extend(&pieces[0][2 * 11 * before + (half * 11 + 1) * row..][..10 * row]);
                    expected.extend(&pieces[1][2 * 5 * before + half * 5 * row..][..5 * row]);
                }
            }
            assert_eq!(all, expected, "{format:?}");
        }
    }
}
