//! The host store: reading and appending, compared with the limits of the machine, and opening.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use pagoda::store::{DiskStore, Key, Owner, Record, Room, Space, Store, Ticket};
use pagoda::{Durability, Error, Result, Status, StoreOptions};
use pagoda_test_support::Folder;

use super::{Report, Row, median, side_by_side};

const RECORD: usize = 2 << 20;
const LAYERS: u32 = 8;
/// More than any cache holds.
const RECORDS: u64 = 128;
const BATCH: usize = 8 << 20;
const MANY: u64 = 100_000;
const SMALL: usize = 4096;

/// Everything with a goal.
pub fn measure(report: &Report) -> Result<()> {
    report.row(read_warm()?)?;
    report.row(append_power()?)?;
    report.rows(open_many()?)
}

fn record(owner: u64, bytes: usize, layers: u32) -> Record {
    let key = Key { space: Space(1), owner: Owner(owner) };
    let data = (0..bytes).map(|at| (at as u64 * 31 + owner) as u8).collect();
    Record { key, history_start: 0, start: 0, tokens: 32, layers, tag: Vec::new(), data }
}

fn open(folder: &Folder, durability: Durability) -> Result<DiskStore> {
    DiskStore::open(folder.path(), &StoreOptions { durability, ..StoreOptions::default() })
}

/// Copies every layer out, with checksums, compared with a plain copy of as much memory.
fn read_warm() -> Result<Row> {
    let folder = Folder::new();
    let store = open(&folder, Durability::Process)?;
    for owner in 0..RECORDS {
        store.write(record(owner, RECORD, LAYERS), Room::Wait)?;
    }
    store.flush()?;
    let plain: Vec<Vec<u8>> = (0..RECORDS).map(|owner| record(owner, RECORD, 1).data).collect();
    let mut to = vec![0_u8; RECORD];
    let mut other = vec![0_u8; RECORD];
    let mut read = |owner| -> Result<()> {
        let history = store.history(Key { space: Space(1), owner: Owner(owner) }).ok_or_else(lost)?;
        for (layer, to) in to.chunks_mut(RECORD / LAYERS as usize).enumerate() {
            to.copy_from_slice(history.layer(0, layer as u32)?);
        }
        std::hint::black_box(&to);
        Ok(())
    };
    // Warm: every record has been read before.
    (0..RECORDS).try_for_each(&mut read)?;
    let (mut owner, mut at) = (0, 0);
    let (ours, theirs) = side_by_side(
        61,
        || {
            owner = (owner + 1) % RECORDS;
            read(owner)
        },
        || {
            at = (at + 1) % plain.len();
            other.copy_from_slice(&plain[at]);
            std::hint::black_box(&other);
            Ok(())
        },
    )?;
    Ok(throughput("read warm, 2 MiB records".into(), RECORD, ours, theirs, "memcpy"))
}

fn lost() -> Error {
    Error::new(Status::Internal, "a record that was written is not in the store")
}

/// Appends the records of a batch of owners and waits until they are durable, compared with the same bytes in a plain
/// file.
fn append_power() -> Result<Row> {
    let folder = Folder::new();
    let store = open(&folder, Durability::Power)?;
    let io = |error: std::io::Error| Error::new(Status::Io, format!("the plain file: {error}"));
    let path = folder.path().with_extension("plain");
    let file = File::create(&path).map_err(io)?;
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    let bytes = record(0, BATCH, 1).data;
    for round in 0..41 {
        let records: Vec<Record> =
            (0..BATCH / RECORD).map(|index| record(round * 4 + index as u64, RECORD, LAYERS)).collect();
        let start = Instant::now();
        let tickets = records.into_iter().map(|record| store.write(record, Room::Wait)).collect::<Result<Vec<_>>>()?;
        tickets.iter().try_for_each(Ticket::wait)?;
        ours.push(start.elapsed());
        let start = Instant::now();
        file.write_all_at(&bytes, round * BATCH as u64).map_err(io)?;
        file.sync_data().map_err(io)?;
        theirs.push(start.elapsed());
    }
    drop(file);
    std::fs::remove_file(path).map_err(io)?;
    Ok(throughput("append power, 8 MiB batches".into(), BATCH, median(ours), median(theirs), "write + fdatasync"))
}

fn throughput(case: String, bytes: usize, ours: f64, theirs: f64, baseline_name: &'static str) -> Row {
    let (value, baseline) = (bytes as f64 / ours * 1e-9, bytes as f64 / theirs * 1e-9);
    Row { bench: "store", case, value, unit: "GB/s", baseline, baseline_name, ratio: value / baseline }
}

/// Opens a store of many records, with its index and without.
fn open_many() -> Result<Vec<Row>> {
    let folder = Folder::new();
    let store = open(&folder, Durability::Process)?;
    for owner in 0..MANY {
        store.write(record(owner, SMALL, 1), Room::Wait)?;
    }
    store.flush()?;
    drop(store);
    let time = || -> Result<Duration> {
        let start = Instant::now();
        let store = open(&folder, Durability::Process)?;
        let took = start.elapsed();
        let count = store.stats().owners;
        if count == MANY { Ok(took) } else { Err(lost()) }
    };
    let with = (0..5).map(|_| time()).collect::<Result<Vec<_>>>()?;
    let mut without = Vec::new();
    for _ in 0..5 {
        std::fs::remove_dir_all(folder.path().join("index"))
            .map_err(|error| Error::new(Status::Io, format!("the index can not be removed: {error}")))?;
        without.push(time()?);
    }
    let row = |case: &str, took: f64, goal: f64| Row {
        bench: "store",
        case: format!("open {MANY} records, {case}"),
        value: took,
        unit: "s",
        baseline: goal,
        baseline_name: "goal",
        ratio: goal / took,
    };
    Ok(vec![row("with index", median(with), 1.0), row("without index", median(without), 5.0)])
}
