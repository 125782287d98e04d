//! The shape of keys and values, and what the options say of it.

use pagoda_kernels::cuda::Gpu;

use super::format::{Format, Plane};
use super::options::{Edited, KvOptions, KvSize};
use crate::checksum::xxh3;
use crate::error::{Error, Result};
use crate::store::Space;

/// The shape of keys and values.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) layers: u32,
    pub(super) heads: u32,
    pub(super) head_size: u32,
    pub(super) page_size: u32,
    pub(super) format: Format,
}

impl Shape {
    /// Bytes of the keys, or of the values, of one token in one layer.
    pub(super) fn row_bytes(&self) -> usize {
        self.planes().map(|plane| self.heads as usize * plane.head_bytes()).sum()
    }

    /// The tensors of a layer's pool.
    pub(super) fn planes(&self) -> impl Iterator<Item = Plane> {
        self.format.planes(self.head_size)
    }

    /// Bytes of a page in all layers.
    pub(super) fn page_bytes(&self) -> usize {
        2 * self.layers as usize * self.page_size as usize * self.row_bytes()
    }
}

/// The shape and the number of pages that the options ask for.
pub(super) fn check(options: &KvOptions) -> Result<(Shape, u32)> {
    let KvOptions { layers, heads, head_size, page_size, element_type, .. } = *options;
    // More than any model has; the bytes of a page stay countable.
    const MOST: u32 = 1 << 13;
    for (value, name) in [(layers, "layers"), (heads, "heads"), (head_size, "head_size")] {
        if value == 0 || value > MOST {
            return Err(Error::invalid(name, format!("{value} is not between 1 and {MOST}")));
        }
    }
    if page_size == 0 || !page_size.is_multiple_of(8) || page_size > MOST {
        let message = format!("{page_size} is not a multiple of 8 between 8 and {MOST}");
        return Err(Error::invalid("page_size", message));
    }
    if options.max_history > 0 && options.max_history < page_size {
        let message = format!("{} is less than a page of {page_size} tokens; 0 keeps everything", options.max_history);
        return Err(Error::invalid("max_history", message));
    }
    let format = Format::new(options.format, element_type, head_size)?;
    if options.onload_threads == 0 || options.onload_threads > 1024 {
        let message = format!("{} is not between 1 and 1024", options.onload_threads);
        return Err(Error::invalid("onload_threads", message));
    }
    if options.ahead_percent > 100 {
        let message = format!("{} percent are more than the whole pool", options.ahead_percent);
        return Err(Error::invalid("ahead_percent", message));
    }
    let shape = Shape { layers, heads, head_size, page_size, format };
    let pages = match options.size {
        KvSize::Pages(count) => u64::from(count),
        KvSize::Bytes(bytes) => bytes / shape.page_bytes() as u64,
        KvSize::Percent(percent) => free_bytes(options.device_id, percent)? / shape.page_bytes() as u64,
    };
    // Page numbers are i32 in the index tensors.
    match u32::try_from(pages) {
        Ok(count) if count > 0 && count <= i32::MAX as u32 => Ok((shape, count)),
        _ => Err(Error::invalid(
            "size",
            format!("{pages} is not between 1 and {} (a page takes {} bytes)", i32::MAX, shape.page_bytes()),
        )),
    }
}

/// So many percent of the memory that is free on a GPU.
fn free_bytes(device_id: Option<u32>, percent: u32) -> Result<u64> {
    let Some(device) = device_id else {
        let message = format!("{percent} percent of the host's memory: what is free there changes, say how many bytes");
        return Err(Error::invalid("size", message));
    };
    if percent == 0 || percent > 100 {
        return Err(Error::invalid("size", format!("{percent} percent is not between 1 and 100")));
    }
    let free = gpu_of_pool(device)?.free_bytes()? as u64;
    Ok(free / 100 * u64::from(percent))
}

/// The GPU of a pool.
pub(super) fn gpu_of_pool(device: u32) -> Result<&'static Gpu> {
    Gpu::shared(device as usize).map_err(|error| Error::from(error).about("device_id"))
}

/// The number that stands for a model's version and everything that decides what its stored bytes mean.
pub(super) fn space(options: &KvOptions, shape: Shape) -> Space {
    let Shape { layers, heads, head_size, page_size, format } = shape;
    let hashed = u32::from(options.edited != Edited::Unnoticed);
    let mut bytes = Vec::new();
    for number in [layers, heads, head_size, page_size, format.id(), hashed] {
        bytes.extend(number.to_le_bytes());
    }
    bytes.extend(options.model_version.as_bytes());
    Space(xxh3(&bytes))
}
