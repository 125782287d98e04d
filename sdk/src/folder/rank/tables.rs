//! Whether the tables of a folder are what pagoda.json says, and every number in them is finite.

use super::ModelFolder;
use crate::embedding::{Source, SourceOptions};
use crate::error::{Error, Result, Status};

/// Rows that are read at once.
const CHUNK: usize = 4096;

pub(in super::super) fn check(folder: &ModelFolder) -> Result<()> {
    for table in &folder.tables {
        let Some(file) = &table.file else { continue };
        let source =
            Source::open(folder.file(file), &SourceOptions { dim: Some(table.dim), ..SourceOptions::default() })
                .map_err(|error| Error::new(Status::Model, error.to_string()))?;
        if source.len() != table.rows {
            let message = format!("{file} has {} rows and pagoda.json says {}", source.len(), table.rows);
            return Err(Error::new(Status::Model, message));
        }
        let layout = source.layout();
        let mut numbers = vec![0.0; layout.dim()];
        let mut at = 0_u64;
        for chunk in source.chunks(CHUNK) {
            for row in chunk?.rows.chunks_exact(layout.row_bytes()) {
                layout.decode(row, &mut numbers);
                if let Some(bad) = numbers.iter().find(|number| !number.is_finite()) {
                    let message = format!("table {:?} ({file}) has {bad} in row {at}", table.name);
                    return Err(Error::new(Status::Model, format!("{message}: train or export it again")));
                }
                at += 1;
            }
        }
    }
    Ok(())
}
