//! The embedding tables of a model folder, as its graph reads them.

use std::sync::Arc;

use pagoda_custom_ops::side_channel::tables::{DeviceRows, TableRows, Tables};
use pagoda_kernels::cuda::Gpu;

use super::options::TableOptions;
use crate::embedding::{
    CacheOptions, CacheSize, EmbeddingOptions, EmbeddingTable, Embeddings, Miss, ModelTables, Source, SourceOptions,
    TableSpec, TableStats,
};
use crate::error::{Error, Result, Status};
use crate::folder::{FolderTable, ModelFolder};

/// A table of up to so many bytes is in the cache as a whole.
const SMALL: u64 = 256 << 20;

/// The tables of one folder.
pub(super) struct FolderTables {
    tables: Vec<(String, Arc<Rows>)>,
    /// What it does in the background goes on as long as the tables are used.
    _embeddings: Embeddings,
}

impl FolderTables {
    pub(super) fn open(folder: &ModelFolder, options: &TableOptions) -> Result<Self> {
        let tiers = options.tiers.clone().unwrap_or_default();
        let embeddings = Embeddings::open(&EmbeddingOptions { tiers, ..EmbeddingOptions::default() })?;
        let mut tables = Vec::with_capacity(folder.tables.len());
        for table in &folder.tables {
            // The cache size is an option of a model. Each table has another one, and so is a model of its own.
            let model = model(folder, table, options)?;
            embeddings.add(&model)?;
            let table = embeddings.table(&format!("{}/{}", model.name, table.name))?;
            tables.push((model.tables[0].name.clone(), Arc::new(Rows { table, no_key: folder.no_key })));
        }
        Ok(Self { tables, _embeddings: embeddings })
    }

    /// The first of these keys that a table does not have.
    pub(super) fn first_unknown(&self, table: &str, keys: &[i64], no_key: i64) -> Result<Option<i64>> {
        let Some((_, rows)) = self.tables.iter().find(|(name, _)| name == table) else { return Ok(None) };
        let (mut numbers, mut found) = (vec![0.0; keys.len() * rows.table.dim()], vec![false; keys.len()]);
        rows.look_up(keys, &mut numbers, &mut found)?;
        Ok(keys.iter().zip(&found).find(|&(&key, &found)| !found && key != no_key).map(|(&key, _)| key))
    }

    pub(super) fn stats(&self) -> Vec<(String, TableStats)> {
        self.tables.iter().map(|(name, rows)| (name.clone(), rows.table.stats())).collect()
    }
}

impl Tables for FolderTables {
    fn table(&self, name: &str) -> std::result::Result<Arc<dyn TableRows>, String> {
        match self.tables.iter().find(|(known, _)| known == name) {
            Some((_, rows)) => Ok(Arc::clone(rows) as Arc<dyn TableRows>),
            None => Err("the model folder has no table of that name".to_owned()),
        }
    }
}

fn model(folder: &ModelFolder, table: &FolderTable, options: &TableOptions) -> Result<ModelTables> {
    let file = table.file.as_ref().ok_or_else(|| {
        let message = format!("table {:?} has no file of its own", table.name);
        Error::new(Status::Model, message)
    })?;
    let path = folder.file(file);
    let bytes = table.rows * u64::from(table.dim) * 4;
    // Rows are spread over sets by a hash of their keys: with half as many places again hardly any set is too small.
    let whole = CacheSize::Rows(table.rows + table.rows / 2 + 64);
    let size = options.cache.unwrap_or(if bytes <= SMALL { whole } else { CacheSize::Bytes(SMALL) });
    // Lookups always wait for missing rows: scores must not depend on the contents of a cache.
    let cache = CacheOptions { size, hit_rate_threshold: 1.0, ..CacheOptions::default() };
    let default_row = match table.default_row {
        Some(row) => row_of(&path, table, row)?,
        None => vec![0.0; table.dim as usize],
    };
    let spec = TableSpec { default_row, ..TableSpec::new(&table.name, path, table.dim) };
    Ok(ModelTables { cache: Some(cache), ..ModelTables::new(table.name.replace('/', "_"), vec![spec]) })
}

/// The numbers of one row of a table's file.
fn row_of(path: &std::path::Path, table: &FolderTable, row: u64) -> Result<Vec<f32>> {
    let source = Source::open(path, &SourceOptions { dim: Some(table.dim), ..SourceOptions::default() })?;
    let mut numbers = vec![0.0; table.dim as usize];
    if let Some(chunk) = source.chunks_from(row, 1).next() {
        source.layout().decode(&chunk?.rows, &mut numbers);
    }
    Ok(numbers)
}

/// A table, asked only for keys that are some.
struct Rows {
    table: EmbeddingTable,
    no_key: i64,
}

impl Rows {
    /// A row for each key; zeros where there is no key. No key is looked up for that, so it counts neither as a hit nor
    /// as a miss.
    fn look_up(&self, keys: &[i64], numbers: &mut [f32], found: &mut [bool]) -> Result<()> {
        let some: Vec<i64> = keys.iter().copied().filter(|&key| key != self.no_key).collect();
        if some.len() == keys.len() {
            return self.table.lookup(keys, numbers, found, Miss::Wait).map(drop);
        }
        let dim = self.table.dim();
        if !some.is_empty() {
            self.table.lookup(&some, &mut numbers[..some.len() * dim], &mut found[..some.len()], Miss::Wait)?;
        }
        // They stand at the front: from the last on, each goes to its place.
        let mut left = some.len();
        for (place, &key) in keys.iter().enumerate().rev() {
            if key == self.no_key {
                numbers[place * dim..][..dim].fill(0.0);
                found[place] = false;
            } else {
                left -= 1;
                numbers.copy_within(left * dim..(left + 1) * dim, place * dim);
                found[place] = found[left];
            }
        }
        Ok(())
    }
}

impl TableRows for Rows {
    fn dim(&self) -> usize {
        self.table.dim()
    }

    fn lookup(&self, keys: &[i64], numbers: &mut [f32], found: &mut [bool]) -> std::result::Result<(), String> {
        self.look_up(keys, numbers, found).map_err(|error| error.to_string())
    }

    fn on_device(&self, gpu: &'static Gpu) -> std::result::Result<Option<Arc<dyn DeviceRows>>, String> {
        self.table.device_rows(gpu, Miss::Wait, Some(self.no_key))
    }
}
