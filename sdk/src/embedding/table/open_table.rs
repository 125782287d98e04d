//! Opens a table: its tiers as the options say, and the rows that they start with.

use std::path::PathBuf;
use std::sync::Arc;

use super::{Table, TableTier, table_files};
use crate::embedding::lookup::background_fetch::BackgroundFetch;
use crate::embedding::lookup::unique_keys::UniqueKeys;
use crate::embedding::options::{
    CacheOptions, CacheSize, DISK, DiskOptions, EmbeddingOptions, MEMORY, MemoryOptions, ModelTables, TIERS, TableSpec,
    TierOptions,
};
use crate::embedding::row::Layout;
use crate::embedding::source::{Chunk, Source, SourceOptions, fingerprint};
use crate::embedding::tiers::cache::Cache;
use crate::embedding::tiers::disk::{self, DiskTier, TableFileOptions, TableId};
use crate::embedding::tiers::memory::{MemoryLimits, MemoryTier};
use crate::embedding::tiers::redis::{self, Cluster};
use crate::embedding::tiers::tier::Rows;
use crate::embedding::update::version::Version;
use crate::error::{Error, Result};

/// The number of rows that are loaded at a time.
const CHUNK: usize = 4096;

/// What a table was opened from.
#[derive(Clone)]
pub(super) struct Origin {
    /// The names, sizes and times of the files of its source.
    names: String,
    /// Its table file, if there is one, and the id of that.
    file: Option<(PathBuf, TableId)>,
}

impl Origin {
    /// Whether the table has the rows that it would have if it were opened now.
    pub(super) fn is_current(&self, tiers: &TierOptions, table: &TableSpec) -> Result<bool> {
        match tiers.disk.as_ref().zip(self.file.as_ref()) {
            Some((disk, (path, id))) => table_files::is_current(disk, table, path, *id),
            // Without a table file the content hash of the source was not computed.
            None => Ok(fingerprint::names(&table.path)? == self.names),
        }
    }
}

/// Opens a table of a model. Loads no rows yet.
pub(super) fn open(
    options: &EmbeddingOptions,
    cluster: Option<&Arc<Cluster>>,
    model: &ModelTables,
    table: &TableSpec,
) -> Result<(Table, Origin)> {
    // Before the source is opened: a replacement from here to the end of the build is detected.
    let names = fingerprint::names(&table.path)?;
    let source = source(options, table)?;
    let layout = layout(&source, table)?;
    let (mut tiers, mut file) = (Vec::new(), None);
    let name = format!("{}/{}", model.name, table.name);
    let TierOptions { memory, redis, disk } = &options.tiers;
    if let Some(memory) = memory {
        tiers.push(TableTier {
            tier: Box::new(MemoryTier::new(layout, &memory_limits(memory)).map_err(|error| of_table(&name, &error))?),
            stores_fetched: memory.stores_fetched,
            writable: true,
            shared: false,
            in_memory: true,
            durable: false,
        });
    }
    if let Some((cluster, options)) = cluster.zip(redis.as_ref()) {
        let name = name_in_redis(table, &source, layout)?;
        tiers.push(TableTier {
            tier: redis::open(Arc::clone(cluster), &name, layout)?,
            stores_fetched: options.stores_fetched,
            writable: true,
            shared: true,
            in_memory: false,
            durable: false,
        });
    }
    if let Some(disk) = disk {
        let (path, tier) = open_disk(disk, &source, table, layout, &names)?;
        file = Some((path, tier.id()));
        tiers.push(TableTier {
            tier: Box::new(tier),
            stores_fetched: false,
            writable: !disk.read_only,
            shared: false,
            in_memory: false,
            durable: true,
        });
    }
    let cache = model.cache.as_ref().map(|cache| Cache::new(layout, cache_rows(cache, layout, source.len())));
    if tiers.is_empty() {
        let message = format!("table {name}: no tier is to hold the rows: set {MEMORY} or {DISK}");
        return Err(Error::invalid(TIERS, message));
    }
    Ok((Table::new(name, layout, cache.transpose()?, tiers), Origin { names, file }))
}

/// The same error, said of a table.
fn of_table(name: &str, error: &Error) -> Error {
    let named = Error::new(error.status(), format!("table {name}: {}", error.message()));
    match error.argument() {
        Some(argument) => named.about(argument),
        None => named,
    }
}

/// Connects to the Redis Cluster, if the options have one.
pub(super) fn open_cluster(tiers: &TierOptions) -> Result<Option<Arc<Cluster>>> {
    let Some(redis) = tiers.redis.clone() else { return Ok(None) };
    // If the rows are on disk too, a service starts even while the cluster is down.
    if tiers.disk.is_some() { Cluster::open_lazy(redis) } else { Cluster::open(redis) }.map(Some)
}

/// The name of a table in Redis. It depends on a sample of the source: processes with the same table share it, whatever
/// their models are called, and a table that was trained again gets another name. So does a table whose rows are stored
/// in another type than that of the file.
fn name_in_redis(table: &TableSpec, source: &Source, layout: Layout) -> Result<String> {
    let name = format!("{}@{:016x}", table.name, fingerprint::sample(&table.path)?);
    Ok(if layout == source.layout() { name } else { format!("{name}.{}", layout.row_type().name()) })
}

fn memory_limits(options: &MemoryOptions) -> MemoryLimits {
    MemoryLimits {
        partitions: options.partitions as usize,
        max_rows: options.overflow.max_rows.map_or(usize::MAX, |rows| rows as usize),
        eviction: options.overflow.eviction,
        keep: options.overflow.keep,
    }
}

fn source(options: &EmbeddingOptions, table: &TableSpec) -> Result<Source> {
    let options =
        SourceOptions { dim: Some(table.dim), keys_are_32_bit: !options.long_keys, ..SourceOptions::default() };
    Source::open(&table.path, &options)
}

fn layout(source: &Source, table: &TableSpec) -> Result<Layout> {
    Layout::new(table.dim, table.row_type.unwrap_or(source.layout().row_type()))
}

/// The capacity of a cache in rows.
fn cache_rows(cache: &CacheOptions, layout: Layout, rows: u64) -> usize {
    match cache.size {
        CacheSize::Share(share) => (rows as f64 * share).ceil() as usize,
        CacheSize::Rows(rows) => rows as usize,
        CacheSize::Bytes(bytes) => (bytes / Cache::bytes_for(layout, 1 << 16).div_ceil(1 << 16)) as usize,
    }
}

/// Opens the table file of a table. Builds it first if there is none, or if its source has changed.
fn open_disk(
    options: &DiskOptions,
    source: &Source,
    table: &TableSpec,
    layout: Layout,
    names: &str,
) -> Result<(PathBuf, DiskTier)> {
    let path = table_files::prepare(options, source, table, layout, names)?;
    let disk = DiskTier::open(&TableFileOptions { path: path.clone(), read_only: options.read_only })?;
    if disk.layout() != layout {
        let (name, file) = (&table.name, path.display());
        let message = format!("table {name}: {file} has rows of {:?} and {layout:?} is wanted", disk.layout());
        let message = format!("{message}: remove the file, so that it is built anew");
        return Err(Error::invalid(format!("{DISK}.path"), message));
    }
    Ok((path, disk))
}

/// Loads the rows that the tiers and the cache start with. Without a disk tier, the lowest tier is loaded when this
/// returns, because no other tier holds the rows. The tiers above are filled from it in the background.
pub(super) fn fill(
    options: &EmbeddingOptions,
    model: &ModelTables,
    table: &TableSpec,
    opened: &Arc<Table>,
    background: &BackgroundFetch,
) -> Result<()> {
    let source = source(options, table)?;
    let TierOptions { memory, redis, disk } = &options.tiers;
    let memory = memory.as_ref().map(|memory| memory.preload.rows(source.len()));
    let redis = redis.as_ref().map(|redis| redis.preload.rows(source.len()));
    let mut rows: Vec<u64> = memory.into_iter().chain(redis).collect();
    if disk.is_none() {
        let lowest = rows.pop().unwrap_or(0);
        load(&source, opened, lowest)?;
    }
    let cached = match (&opened.cache, &model.cache) {
        (Some(cache), Some(options)) if options.fill_at_start => (cache.capacity() as u64).min(source.len()),
        _ => 0,
    };
    let ends: Vec<u64> = rows.iter().copied().chain([cached]).collect();
    let table = Arc::downgrade(opened);
    let mut at = 0;
    background.run_steps(move || {
        let Some((table, &end)) = table.upgrade().zip(ends.iter().filter(|&&end| end > at).min()) else { return false };
        let count = (end - at).min(CHUNK as u64);
        let chunk = match source.chunks_from(at, count as usize).next() {
            Some(Ok(chunk)) => chunk,
            Some(Err(error)) => {
                log::warn!("table {} is not filled any further: {error}", table.name);
                return false;
            }
            None => return false,
        };
        let keys = UniqueKeys::of(chunk.keys.into_iter()).keys;
        table.promote(&keys, &rows.iter().map(|&rows| at < rows).collect::<Vec<_>>(), at < cached);
        at += count;
        true
    });
    Ok(())
}

/// Loads the first `rows` rows of a source into the lowest tier.
fn load(source: &Source, table: &Table, rows: u64) -> Result<()> {
    let Some(lowest) = table.tiers.last() else { return Ok(()) };
    let mut at = 0;
    while at < rows {
        let count = (rows - at).min(CHUNK as u64);
        let Some(chunk) = source.chunks_from(at, count as usize).next().transpose()? else { break };
        let (keys, bytes) = last_of_each(source, chunk, table.layout)?;
        let (versions, deleted) = (vec![Version::LOADED; keys.len()], vec![false; keys.len()]);
        let rows = Rows { keys: &keys, versions: &versions, rows: &bytes, deleted: &deleted };
        lowest.tier.update(&rows).map_err(|error| of_table(&table.name, &error))?;
        at += count;
    }
    Ok(())
}

/// The unique keys of a chunk with the last row of each, converted to another layout.
fn last_of_each(source: &Source, chunk: Chunk, to: Layout) -> Result<(Vec<i64>, Vec<u8>)> {
    let from = source.layout();
    let unique = UniqueKeys::of(chunk.keys.into_iter());
    let mut converted = vec![0; unique.keys.len() * to.row_bytes()];
    let mut numbers = vec![0.0; to.dim()];
    for (&index, row) in unique.indices.iter().zip(chunk.rows.chunks_exact(from.row_bytes())) {
        let into = &mut converted[index as usize * to.row_bytes()..][..to.row_bytes()];
        if from == to {
            into.copy_from_slice(row);
        } else {
            source.decode_for(to, unique.keys[index as usize], row, &mut numbers)?;
            to.encode(&numbers, into);
        }
    }
    Ok((unique.keys, converted))
}

/// The estimated size of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Estimate {
    /// The table: `model/table`.
    pub table: String,
    /// The number of rows of its files.
    pub rows: u64,
    /// Approximate bytes in the memory of this process: the cache, and the tier in host memory when it is full.
    pub memory: u64,
    /// Bytes of its table file.
    pub disk: u64,
}

/// Estimates the size of all tables. A table that models share is counted once.
pub(super) fn estimate(options: &EmbeddingOptions) -> Result<Vec<Estimate>> {
    let mut estimates = Vec::new();
    let mut seen: Vec<&TableSpec> = Vec::new();
    for model in &options.models {
        model.check()?;
        for table in &model.tables {
            if seen.iter().any(|other| other.is_same_table(table)) {
                continue;
            }
            seen.push(table);
            let source = source(options, table)?;
            let (layout, rows) = (layout(&source, table)?, source.len());
            let cached = model.cache.as_ref().map_or(0, |cache| cache_rows(cache, layout, rows));
            let cache = if model.cache.is_some() { Cache::bytes_for(layout, cached) } else { 0 };
            let TierOptions { memory, disk, .. } = &options.tiers;
            let held = memory.as_ref().map_or(0, |memory| held_rows(memory, rows, &options.tiers));
            estimates.push(Estimate {
                table: format!("{}/{}", model.name, table.name),
                rows,
                memory: cache.saturating_add(MemoryTier::bytes_for(layout, held)),
                disk: disk.as_ref().map_or(0, |_| disk::bytes_for(layout, rows)),
            });
        }
    }
    Ok(estimates)
}

/// The number of rows that the tier in host memory comes to hold: the loaded rows, and all rows that it stores after
/// they were found below it.
fn held_rows(memory: &MemoryOptions, rows: u64, tiers: &TierOptions) -> u64 {
    let below = tiers.redis.is_some() || tiers.disk.is_some();
    let held = if below && memory.stores_fetched { rows } else { memory.preload.rows(rows) };
    memory.overflow.max_rows.map_or(held, |most| held.min(most.saturating_mul(memory.partitions.into())))
}

#[cfg(test)]
mod tests {
    use pagoda_test_support::Folder;

    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::embedding::row::RowType;
    use crate::error::Status;

    fn example(file: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/embedding").join(file)
    }

    fn spec(path: &Path, row_type: Option<RowType>) -> TableSpec {
        TableSpec { row_type, ..TableSpec::new("t", path, 4) }
    }

    #[test]
    fn a_source_that_is_changed_while_a_table_is_built_leaves_the_old_table() {
        let folder = Folder::new();
        let path = folder.path().join("rows.safetensors");
        let put = |file: &str| {
            fs::copy(example(file), folder.path().join("new")).unwrap();
            fs::rename(folder.path().join("new"), &path).unwrap();
        };
        let options = DiskOptions::new(folder.path().join("tables"));
        let table = spec(&path, Some(RowType::F32));
        let open = |meanwhile: &dyn Fn()| {
            let names = fingerprint::names(&path).unwrap();
            let source = Source::open(&path, &SourceOptions::default()).unwrap();
            meanwhile();
            open_disk(&options, &source, &table, layout(&source, &table).unwrap(), &names).map(|(_, disk)| disk.id())
        };
        put("f32.safetensors");
        let first = open(&|| {}).unwrap();

        put("f16.safetensors");
        let error = open(&|| put("bf16.safetensors")).unwrap_err();
        assert!(error.status() == Status::Busy && error.message().contains("open it again"), "{error}");
        assert_eq!(fs::read_dir(&options.path).unwrap().count(), 2, "the table and its note");
        // The source that it was built from is back, and then another one.
        put("f32.safetensors");
        assert_eq!(open(&|| {}).unwrap(), first);
        put("bf16.safetensors");
        assert_ne!(open(&|| {}).unwrap(), first);
    }

    #[test]
    fn a_table_has_another_name_in_redis_for_each_type_of_rows() {
        let path = example("f16.safetensors");
        let source = Source::open(&path, &SourceOptions::default()).unwrap();
        let named = |row_type| {
            let table = spec(&path, row_type);
            name_in_redis(&table, &source, layout(&source, &table).unwrap()).unwrap()
        };
        let own = named(None);
        assert_eq!(own, format!("t@{:016x}", fingerprint::sample(&path).unwrap()));
        assert_eq!(named(Some(RowType::F16)), own, "said or not");
        assert_eq!(named(Some(RowType::F32)), format!("{own}.f32"));
        assert_eq!(named(Some(RowType::I8)), format!("{own}.i8"));
    }
}
