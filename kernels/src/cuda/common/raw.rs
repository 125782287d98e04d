//! What the kernels of cuda/common get. Addresses are those of the device.

use super::mirrored::{Layout, mirrored};

/// The TMA's description of a tensor: `CUtensorMap` of the driver.
#[repr(C, align(128))]
#[derive(Clone, Copy, Debug, Default)]
pub struct TensorMap(pub [u64; 16]);

mirrored! {
    /// Of cuda/common/kv_pack.cu.
    struct Move {
        pool: u64,
        packed: u64,
        pages: u64,
        pool_pages: i64,
        held: i64,
        skip: i64,
        first: i64,
        count: i64,
        page_entries: i32,
        page_size: i32,
        row_bytes: i32,
    }
}
