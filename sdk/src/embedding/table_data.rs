//! A table as serde reads it: its default row can be left out, and is then zeros, as many as a row has.

use std::path::PathBuf;

use serde::Deserialize;

use super::options::TableSpec;
use super::row::{MAX_DIM, RowType};

/// The fields of [`TableSpec`].
#[derive(Deserialize)]
#[serde(rename = "TableSpec", deny_unknown_fields)]
pub(super) struct TableData {
    name: String,
    path: PathBuf,
    dim: u32,
    default_row: Option<Vec<f32>>,
    row_type: Option<RowType>,
}

impl From<TableData> for TableSpec {
    fn from(data: TableData) -> Self {
        let TableData { name, path, dim, default_row, row_type } = data;
        // A `dim` beyond the limit is refused when tables are opened; until then it takes no memory.
        let default_row = default_row.unwrap_or_else(|| vec![0.0; dim.min(MAX_DIM) as usize]);
        Self { name, path, dim, default_row, row_type }
    }
}
