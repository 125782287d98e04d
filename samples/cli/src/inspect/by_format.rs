//! What a token takes in each format that its pages can have.

use pagoda::KvFormat;
use serde::Serialize;

use crate::words::bytes;

/// Bytes of a token by `kv_format`.
#[derive(Serialize)]
pub(super) struct ByFormat {
    native: Option<u64>,
    int8: Option<u64>,
    /// None for heads of an odd size.
    int4: Option<u64>,
    fp8: Option<u64>,
}

impl ByFormat {
    pub(super) fn new(bytes_in: impl Fn(KvFormat) -> Option<u64>) -> Self {
        Self {
            native: bytes_in(KvFormat::Native),
            int8: bytes_in(KvFormat::Int8),
            int4: bytes_in(KvFormat::Int4),
            fp8: bytes_in(KvFormat::Fp8),
        }
    }

    /// In words.
    pub(super) fn text(&self) -> String {
        let all = [("native", self.native), ("int8", self.int8), ("int4", self.int4), ("fp8", self.fp8)];
        let each = all.into_iter().filter_map(|(name, size)| Some(format!("{name} {}", bytes(size?))));
        format!("by kv_format: {}", each.collect::<Vec<_>>().join(", "))
    }
}
