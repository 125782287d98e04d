//! What the kernels of cuda/embedding get. Addresses are those of the device.

use super::super::common::mirrored::{Layout, mirrored};

mirrored! {
    /// Of cuda/embedding/embedding_table.cuh.
    struct Table {
        sets: u64,
        rows: u64,
        versions: u64,
        set_count: u64,
        dim: i32,
    }

    /// Of cuda/embedding/embedding_table.cu.
    struct Lookup {
        keys: u64,
        output: u64,
        default_row: u64,
        found: u64,
        missing: u64,
        missing_keys: u64,
        missing_count: u64,
        progress: u64,
        count: i32,
    }

    /// Of cuda/embedding/embedding_table.cu.
    struct Put {
        keys: u64,
        places: u64,
        place_count: u64,
        rows: u64,
        versions: u64,
        deleted: u64,
        row_count: u64,
        key_count: i32,
        count: i32,
        only_present: i32,
    }

    /// Of cuda/embedding/embedding_bag.cu.
    struct Bag {
        keys: u64,
        offsets: u64,
        vectors: u64,
        default_row: u64,
        found: u64,
        missing: u64,
        missing_keys: u64,
        missing_count: u64,
        progress: u64,
        given: u64,
        given_rows: u64,
        no_key: i64,
        has_no_key: i32,
        given_count: i32,
        count: i32,
        slots: i32,
        combiner: i32,
    }
}
