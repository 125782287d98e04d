//! Opening a table: its floors as the configuration says, and the rows that they begin with.

use std::path::PathBuf;
use std::sync::Arc;

use super::cache::Cache;
use super::cluster::{Cluster, Nodes, RedisOptions, Tls};
use super::config::{
    CacheConfig, CacheSize, DiskConfig, EmbeddingConfig, Eviction, MemoryConfig, ModelConfig, OverflowConfig,
    RedisConfig, Start, TableConfig,
};
use super::disk::{self, Disk, DiskOptions};
use super::distinct::Distinct;
use super::floor::Rows;
use super::later::Later;
use super::memory::{Memory, MemoryOptions};
use super::origin;
use super::overflow::Overflow;
use super::row::Layout;
use super::source::{Chunk, Source, SourceOptions};
use super::table::{Level, Table};
use super::table_files;
use crate::error::{Error, Result};

/// How many rows are loaded at a time.
const CHUNK: usize = 4096;

/// From what a table was opened.
#[derive(Clone)]
pub(super) struct Origin {
    /// The names, sizes and times of its source's files.
    names: String,
    /// Its table file, if there is one, and the number of that.
    file: Option<(PathBuf, u64)>,
}

impl Origin {
    /// Whether the table has the rows that it would have if it were opened now.
    pub(super) fn is_current(&self, config: &EmbeddingConfig, table: &TableConfig) -> Result<bool> {
        match config.disk.as_ref().zip(self.file.as_ref()) {
            Some((disk, (path, number))) => table_files::is_current(disk, table, path, *number),
            // Without a table file no one has noted what was in them.
            None => Ok(origin::names(&table.path)? == self.names),
        }
    }
}

/// Opens a table of a model; nothing is loaded yet.
pub(super) fn table(
    config: &EmbeddingConfig,
    nodes: Option<&Arc<Nodes>>,
    model: &ModelConfig,
    table: &TableConfig,
) -> Result<(Table, Origin)> {
    // Before it is opened: what is replaced from here until its table file is built is found out.
    let names = origin::names(&table.path)?;
    let source = source(config, table)?;
    let layout = layout(&source, table)?;
    let (mut floors, mut file) = (Vec::new(), None);
    let name = format!("{}/{}", model.name, table.name);
    if let Some(memory) = &config.memory {
        let floor = Box::new(Memory::new(layout, &memory_options(memory))?);
        floors.push(Level {
            floor,
            keeps: memory.takes_missed,
            writable: true,
            shared: false,
            near: true,
            durable: false,
        });
    }
    if let Some((nodes, redis)) = nodes.zip(config.redis.as_ref()) {
        let name = name_in_redis(table, &source, layout)?;
        let floor = Box::new(Cluster::open(Arc::clone(nodes), &name, layout)?);
        floors.push(Level {
            floor,
            keeps: redis.takes_missed,
            writable: true,
            shared: true,
            near: false,
            durable: false,
        });
    }
    if let Some(disk) = &config.disk {
        let (path, floor) = open_disk(disk, &source, table, layout, &names)?;
        file = Some((path, floor.number()));
        let floor = Box::new(floor);
        floors.push(Level {
            floor,
            keeps: false,
            writable: !disk.read_only,
            shared: false,
            near: false,
            durable: true,
        });
    }
    let cache = model.cache.as_ref().map(|cache| Cache::new(layout, cache_rows(cache, layout, source.len())));
    if floors.is_empty() {
        let message = "no floor is to hold the rows: leave it out for host memory, or add persistent_db";
        return Err(Error::invalid("volatile_db", message));
    }
    Ok((Table::new(name, layout, cache.transpose()?, floors), Origin { names, file }))
}

/// Finds the nodes of the cluster, if there is to be one.
pub(super) fn nodes(config: &EmbeddingConfig) -> Result<Option<Arc<Nodes>>> {
    config.redis.as_ref().map(|redis| Nodes::open(redis_options(redis, config.disk.is_some()))).transpose()
}

/// What a table is called in Redis: by what is in it, so that processes with the same table share it, whatever their models
/// are called, and rows of a table that was trained anew are not taken for those of the old one; nor rows that are kept in
/// another type than their file's for those of a model that keeps them otherwise.
fn name_in_redis(table: &TableConfig, source: &Source, layout: Layout) -> Result<String> {
    let name = format!("{}@{:016x}", table.name, origin::sample(&table.path)?);
    Ok(if layout == source.layout() { name } else { format!("{name}.{}", layout.row_type().name()) })
}

fn memory_options(config: &MemoryConfig) -> MemoryOptions {
    MemoryOptions {
        partitions: config.partitions as usize,
        margin: margin(&config.overflow),
        policy: policy(config.overflow.eviction),
        target: config.overflow.keep,
    }
}

fn redis_options(config: &RedisConfig, disk: bool) -> RedisOptions {
    let given = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    RedisOptions {
        addresses: config.nodes.iter().map(ToString::to_string).collect(),
        user: given(&config.user),
        password: given(config.password.reveal()),
        tls: config.tls.as_ref().map(|tls| Tls { ca: tls.authorities.clone(), client: tls.client.clone() }),
        partitions: config.partitions as usize,
        margin: margin(&config.overflow),
        policy: policy(config.overflow.eviction),
        target: config.overflow.keep,
        timeout: config.timeout,
        breaker_failures: config.breaker_failures,
        breaker_pause: config.breaker_open,
        connections: config.connections_per_node as usize,
        // A cluster that is down when a service starts must not keep it from starting, if the rows are on disk too.
        lazy: disk,
    }
}

fn margin(overflow: &OverflowConfig) -> usize {
    overflow.rows.map_or(usize::MAX, |rows| rows as usize)
}

fn policy(eviction: Eviction) -> Overflow {
    match eviction {
        Eviction::Random => Overflow::Random,
        Eviction::Oldest => Overflow::Oldest,
        Eviction::LeastUsed => Overflow::LeastUsed,
    }
}

fn source(config: &EmbeddingConfig, table: &TableConfig) -> Result<Source> {
    let options =
        SourceOptions { dim: Some(table.dim), keys_are_32_bit: !config.long_keys, ..SourceOptions::default() };
    Source::open(&table.path, &options)
}

fn layout(source: &Source, table: &TableConfig) -> Result<Layout> {
    Layout::new(table.dim, table.row_type.unwrap_or(source.layout().row_type()))
}

/// For how many rows a cache has room.
fn cache_rows(cache: &CacheConfig, layout: Layout, rows: u64) -> usize {
    match cache.size {
        CacheSize::Share(share) => (rows as f64 * share).ceil() as usize,
        CacheSize::Rows(rows) => rows as usize,
        CacheSize::Bytes(bytes) => (bytes / Cache::bytes_for(layout, 1 << 16).div_ceil(1 << 16)) as usize,
    }
}

/// Opens the table file of a table, which is built first if it is not there or was built from something else.
fn open_disk(
    config: &DiskConfig,
    source: &Source,
    table: &TableConfig,
    layout: Layout,
    names: &str,
) -> Result<(PathBuf, Disk)> {
    let path = table_files::prepare(config, source, table, layout, names)?;
    let disk = Disk::open(&DiskOptions { path: path.clone(), read_only: config.read_only })?;
    if disk.layout() != layout {
        let message = format!("{} has rows of {:?} and {layout:?} is wanted", path.display(), disk.layout());
        return Err(Error::invalid(
            "persistent_db.path",
            format!("{message}: remove the file, so that it is built anew"),
        ));
    }
    Ok((path, disk))
}

/// Loads what the floors and the cache begin with. Where there is no disk floor, the lowest one is loaded when this returns,
/// for the rows are nowhere else; the ones above are filled from below, in the background.
pub(super) fn fill(
    config: &EmbeddingConfig,
    model: &ModelConfig,
    table: &TableConfig,
    opened: &Arc<Table>,
    later: &Later,
) -> Result<()> {
    let source = source(config, table)?;
    let share = |start: &Start| if start.load { (source.len() as f64 * start.share).ceil() as u64 } else { 0 };
    let memory = config.memory.as_ref().map(|memory| share(&memory.start));
    let redis = config.redis.as_ref().map(|redis| share(&redis.start));
    let mut rows: Vec<u64> = memory.into_iter().chain(redis).collect();
    if config.disk.is_none() {
        let lowest = rows.pop().unwrap_or(0);
        load(&source, opened, lowest)?;
    }
    let cached = match (&opened.cache, &model.cache) {
        (Some(cache), Some(config)) if config.fill_at_start => (cache.capacity() as u64).min(source.len()),
        _ => 0,
    };
    let ends: Vec<u64> = rows.iter().copied().chain([cached]).collect();
    let table = Arc::downgrade(opened);
    let mut at = 0;
    later.steps(move || {
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
        let keys = Distinct::of(chunk.keys.into_iter()).keys;
        table.raise(&keys, &rows.iter().map(|&rows| at < rows).collect::<Vec<_>>(), at < cached);
        at += count;
        true
    });
    Ok(())
}

/// Puts the first `rows` rows of a source into the lowest floor.
fn load(source: &Source, table: &Table, rows: u64) -> Result<()> {
    let Some(level) = table.floors.last() else { return Ok(()) };
    let mut at = 0;
    while at < rows {
        let count = (rows - at).min(CHUNK as u64);
        let Some(chunk) = source.chunks_from(at, count as usize).next().transpose()? else { break };
        let (keys, bytes) = last_of_each(source, chunk, table.layout)?;
        let (versions, deleted) = (vec![0; keys.len()], vec![false; keys.len()]);
        level.floor.update(&Rows { keys: &keys, versions: &versions, rows: &bytes, deleted: &deleted })?;
        at += count;
    }
    Ok(())
}

/// The different keys of a source's chunk with the last row of each, in another layout.
fn last_of_each(source: &Source, chunk: Chunk, to: Layout) -> Result<(Vec<i64>, Vec<u8>)> {
    let from = source.layout();
    let distinct = Distinct::of(chunk.keys.into_iter());
    let mut converted = vec![0; distinct.keys.len() * to.row_bytes()];
    let mut numbers = vec![0.0; to.dim()];
    for (&place, row) in distinct.places.iter().zip(chunk.rows.chunks_exact(from.row_bytes())) {
        let into = &mut converted[place as usize * to.row_bytes()..][..to.row_bytes()];
        if from == to {
            into.copy_from_slice(row);
        } else {
            source.decode_for(to, distinct.keys[place as usize], row, &mut numbers)?;
            to.encode(&numbers, into);
        }
    }
    Ok((distinct.keys, converted))
}

/// What a table will take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Estimate {
    /// Which: `model/table`.
    pub table: String,
    /// How many rows its files have.
    pub rows: u64,
    /// Bytes of memory in this process, about: of the cache, and of the floor in host memory when it is full.
    pub memory: u64,
    /// Bytes of its table file.
    pub disk: u64,
}

/// What the tables of a configuration will take, each table that models share once.
pub(super) fn estimate(config: &EmbeddingConfig) -> Result<Vec<Estimate>> {
    let mut estimates = Vec::new();
    let mut seen: Vec<&TableConfig> = Vec::new();
    for model in &config.models {
        for table in &model.tables {
            if seen.iter().any(|other| other.is_same_table(table)) {
                continue;
            }
            seen.push(table);
            let source = source(config, table)?;
            let (layout, rows) = (layout(&source, table)?, source.len());
            let cached = model.cache.as_ref().map_or(0, |cache| cache_rows(cache, layout, rows));
            let cache = if model.cache.is_some() { Cache::bytes_for(layout, cached) } else { 0 };
            let held = config.memory.as_ref().map_or(0, |memory| held_rows(memory, rows, config));
            estimates.push(Estimate {
                table: format!("{}/{}", model.name, table.name),
                rows,
                memory: cache.saturating_add(Memory::bytes_for(layout, held)),
                disk: config.disk.as_ref().map_or(0, |_| disk::bytes_for(layout, rows)),
            });
        }
    }
    Ok(estimates)
}

/// How many rows the floor in host memory comes to hold: all that are loaded, and all that are ever found below it.
fn held_rows(memory: &MemoryConfig, rows: u64, config: &EmbeddingConfig) -> u64 {
    let below = config.redis.is_some() || config.disk.is_some();
    let share = if memory.start.load { (rows as f64 * memory.start.share).ceil() as u64 } else { 0 };
    let held = if below && memory.takes_missed { rows } else { share };
    memory.overflow.rows.map_or(held, |most| held.min(most.saturating_mul(memory.partitions.into())))
}

#[cfg(test)]
mod tests {
    use pagoda_test_support::Folder;

    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::embedding::config::Batch;
    use crate::embedding::row::RowType;
    use crate::error::Status;

    fn example(file: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/embedding").join(file)
    }

    fn of(path: &Path, row_type: Option<RowType>) -> TableConfig {
        TableConfig {
            name: "t".into(),
            path: path.to_owned(),
            dim: 4,
            default: vec![0.0; 4],
            max_keys_per_sample: None,
            row_type,
        }
    }

    #[test]
    fn a_source_that_is_changed_while_a_table_is_built_leaves_the_old_table() {
        let folder = Folder::new();
        let path = folder.path().join("rows.safetensors");
        let put = |file: &str| {
            fs::copy(example(file), folder.path().join("new")).unwrap();
            fs::rename(folder.path().join("new"), &path).unwrap();
        };
        let batch = Batch { get: 1, set: 1 };
        let config = DiskConfig {
            path: folder.path().join("tables"),
            read_only: false,
            threads: 1,
            batch,
            load: true,
            drop_updates_on_source_change: false,
        };
        let table = of(&path, Some(RowType::F32));
        let open = |meanwhile: &dyn Fn()| {
            let names = origin::names(&path).unwrap();
            let source = Source::open(&path, &SourceOptions::default()).unwrap();
            meanwhile();
            open_disk(&config, &source, &table, layout(&source, &table).unwrap(), &names).map(|(_, disk)| disk.number())
        };
        put("f32.safetensors");
        let first = open(&|| {}).unwrap();

        put("f16.safetensors");
        let error = open(&|| put("bf16.safetensors")).unwrap_err();
        assert!(error.status() == Status::Busy && error.message().contains("open it again"), "{error}");
        assert_eq!(fs::read_dir(&config.path).unwrap().count(), 2, "the table and its note");
        // What it was built from is there again, or something else for good.
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
            let table = of(&path, row_type);
            name_in_redis(&table, &source, layout(&source, &table).unwrap()).unwrap()
        };
        let own = named(None);
        assert_eq!(own, format!("t@{:016x}", origin::sample(&path).unwrap()));
        assert_eq!(named(Some(RowType::F16)), own, "said or not");
        assert_eq!(named(Some(RowType::F32)), format!("{own}.f32"));
        assert_eq!(named(Some(RowType::I8)), format!("{own}.i8"));
    }
}
