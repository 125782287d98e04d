//! Rows of an embedding table in GPU memory: lookups and inserts, against a copy of the same bytes.

use cudarc::driver::sys::CUevent_flags_enum as Flags;
use cudarc::driver::{CudaSlice, DeviceRepr};
use pagoda::Result;
use pagoda_kernels::Combiner;
use pagoda_kernels::cuda::{DeviceTable, Slots, TableBag, TableLookup, TablePut, Type};
use pagoda_test_support::Random;

use super::{Bench, ceiling, failed};
use crate::{Report, Row};

const DIM: usize = 128;
const ROWS: usize = 2_000_000;
/// The table has more slots than rows, so that crowded sets do not evict.
const ROOM: usize = 2_600_000;
/// One of twenty keys is missing.
const MISSING: usize = 20;
/// Keys of a slot, where rows are combined.
const IN_SLOT: usize = 8;
/// Different batches of keys, used in turn.
const BATCHES: usize = 4;

/// The numbers of keys with a goal.
pub fn measure(report: &Report) -> Result<()> {
    let bench = Bench::open()?;
    let copy = ceiling::copy(&bench)?;
    let table = Resident::new(&bench)?;
    for count in [65_536, 262_144, 1_048_576] {
        report.row(table.lookup(count, copy)?)?;
        report.row(table.insert(count, copy)?)?;
        report.row(table.pool(count, copy)?)?;
    }
    Ok(())
}

/// A table on the device that holds `ROWS` rows, nearly.
struct Resident<'a> {
    bench: &'a Bench,
    table: DeviceTable,
    _memory: [CudaSlice<u8>; 3],
    rows: CudaSlice<f32>,
    row_count: CudaSlice<i64>,
    /// Keys that it has.
    keys: Vec<i64>,
}

impl<'a> Resident<'a> {
    fn new(bench: &'a Bench) -> Result<Self> {
        let set_count = DeviceTable::sets_for(ROOM);
        let mut table = DeviceTable { sets: 0, rows: 0, versions: 0, set_count, dim: DIM, element: Type::F32 };
        let memory = [table.sets_bytes(), table.places() * DIM * 4, table.places() * 8];
        let [sets, rows, versions] = memory.map(|len| bench.stream.alloc_zeros::<u8>(len).map_err(failed));
        let memory = [sets?, rows?, versions?];
        [table.sets, table.rows, table.versions] = [0, 1, 2].map(|part: usize| bench.address(&memory[part]));
        let rows = bench.stream.alloc_zeros(ROWS * DIM).map_err(failed)?;
        let row_count = bench.stream.alloc_zeros(1).map_err(failed)?;
        let mut random = Random(1);
        let keys = (0..ROWS).map(|_| random.bits() as i64).collect();
        let mut made = Self { bench, table, _memory: memory, rows, row_count, keys };
        let sent = made.sent(&made.keys)?;
        made.put(&sent, ROWS)?;
        // A few sets got more keys than they have slots.
        let (looked, found) = (made.looked(&sent, ROWS)?, made.room::<u8>(ROWS)?);
        // SAFETY: as long as the call says, and waited for below.
        unsafe {
            bench.gpu.table_lookup(&TableLookup { found: Some(bench.address(&found)), ..looked.call }, stream(bench))
        }
        .map_err(failed)?;
        let mut found = bench.stream.clone_dtoh(&found).map_err(failed)?.into_iter();
        made.keys.retain(|_| found.next() == Some(1));
        Ok(made)
    }

    fn sent<V: DeviceRepr>(&self, values: &[V]) -> Result<CudaSlice<V>> {
        self.bench.stream.clone_htod(values).map_err(failed)
    }

    fn room<V: DeviceRepr>(&self, len: usize) -> Result<CudaSlice<V>> {
        // SAFETY: the lookup writes it before it is read.
        unsafe { self.bench.stream.alloc(len) }.map_err(failed)
    }

    fn looked(&self, keys: &CudaSlice<i64>, count: usize) -> Result<Looked> {
        let (output, missing) = (self.room::<f32>(count * DIM)?, self.room::<i32>(count + 1)?);
        let progress = self.bench.stream.alloc_zeros::<u64>(1).map_err(failed)?;
        let address = self.bench.address(&missing);
        let call = TableLookup {
            table: self.table,
            keys: self.bench.address(keys),
            count,
            output: self.bench.address(&output),
            default_row: None,
            found: None,
            missing: address + 4,
            missing_keys: None,
            missing_count: address,
            progress: self.bench.address(&progress),
        };
        Ok(Looked { call, _output: output, _missing: missing, _progress: progress })
    }

    fn put(&self, keys: &CudaSlice<i64>, count: usize) -> Result<()> {
        let call = TablePut {
            table: self.table,
            keys: self.bench.address(keys),
            key_count: count,
            places: None,
            place_count: None,
            rows: self.bench.address(&self.rows),
            versions: None,
            deleted: None,
            row_count: self.bench.address(&self.row_count),
            count,
            only_present: false,
        };
        // SAFETY: as long as the call says; they live as long as the table.
        unsafe { self.bench.gpu.table_put(&call, stream(self.bench)) }.map_err(failed)
    }

    /// Batches of distinct keys, and the number of hits of each.
    fn batches(&self, count: usize) -> Result<(Vec<CudaSlice<i64>>, usize)> {
        let mut random = Random(count as u64);
        let hits = count - count / MISSING;
        let mut batches = Vec::new();
        for _ in 0..BATCHES {
            let mut keys: Vec<i64> = (0..count).map(|_| random.bits() as i64).collect();
            // Distinct keys: a range of the cached ones, in another order.
            let start = random.bits() as usize % (self.keys.len() - hits);
            keys[..hits].copy_from_slice(&self.keys[start..][..hits]);
            random.shuffle(&mut keys);
            batches.push(self.sent(&keys)?);
        }
        Ok((batches, hits))
    }

    /// Finds and copies rows, lists the missing keys, and updates recency.
    fn lookup(&self, count: usize, copy: f64) -> Result<Row> {
        let (batches, hits) = self.batches(count)?;
        let looked = self.looked(&batches[0], count)?;
        let seconds = self.bench.seconds(|run| {
            let call = TableLookup { keys: self.bench.address(&batches[run % BATCHES]), ..looked.call };
            // SAFETY: as long as the call says, until the measurement has ended.
            unsafe { self.bench.gpu.table_lookup(&call, stream(self.bench)) }.map_err(failed)
        })?;
        Ok(row(format!("lookup, {count} keys, 95 % hits"), seconds, 2 * hits, copy))
    }

    /// As `lookup`, and combines the rows of each slot.
    fn pool(&self, count: usize, copy: f64) -> Result<Row> {
        let (batches, hits) = self.batches(count)?;
        let slots = count / IN_SLOT;
        let offsets = self.sent(&(0..=slots).map(|slot| (slot * IN_SLOT) as i64).collect::<Vec<_>>())?;
        let default_row = self.sent(&[0.0_f32; DIM])?;
        let looked = self.looked(&batches[0], count)?;
        let TableLookup { table, output, missing, missing_count, progress, .. } = looked.call;
        let mut call = TableBag {
            table,
            keys: 0,
            count,
            slots: Some(Slots { offsets: self.bench.address(&offsets), count: slots, combiner: Combiner::Mean }),
            vectors: output,
            default_row: self.bench.address(&default_row),
            found: None,
            missing,
            missing_keys: None,
            missing_count,
            progress,
            given: None,
            no_key: None,
        };
        let seconds = self.bench.seconds(|run| {
            call.keys = self.bench.address(&batches[run % BATCHES]);
            // SAFETY: as above.
            unsafe { self.bench.gpu.table_bag(&call, stream(self.bench)) }.map_err(failed)
        })?;
        Ok(row(format!("mean of {IN_SLOT}, {count} keys, 95 % hits"), seconds, hits + slots, copy))
    }

    /// Inserts rows of missing keys, right after a lookup.
    fn insert(&self, count: usize, copy: f64) -> Result<Row> {
        let mut random = Random(7 + count as u64);
        let new = count / MISSING;
        let there = self.sent(&self.keys[..count])?;
        let looked = self.looked(&there, count)?;
        let mut times = Vec::new();
        for _ in 0..9 {
            let keys = self.sent(&(0..new).map(|_| random.bits() as i64).collect::<Vec<_>>())?;
            self.bench.stream.synchronize().map_err(failed)?;
            // SAFETY: as above.
            unsafe { self.bench.gpu.table_lookup(&looked.call, stream(self.bench)) }.map_err(failed)?;
            let event = || self.bench.stream.record_event(Some(Flags::CU_EVENT_DEFAULT)).map_err(failed);
            let start = event()?;
            self.put(&keys, new)?;
            times.push(f64::from(start.elapsed_ms(&event()?).map_err(failed)?) * 1e-3);
        }
        times.sort_by(f64::total_cmp);
        Ok(row(format!("insert, {new} rows"), times[times.len() / 2], 2 * new, copy))
    }
}

/// A lookup and what it writes.
struct Looked {
    call: TableLookup,
    _output: CudaSlice<f32>,
    _missing: CudaSlice<i32>,
    _progress: CudaSlice<u64>,
}

fn stream(bench: &Bench) -> pagoda_kernels::cuda::CUstream {
    bench.stream.cu_stream()
}

/// The row of a lookup or an insert.
fn row(case: String, seconds: f64, rows: usize, copy: f64) -> Row {
    let baseline = (rows * DIM * 4) as f64 / copy;
    Row {
        bench: "embedding",
        case: format!("{case}, {DIM} f32"),
        value: seconds * 1e6,
        unit: "us",
        baseline: baseline * 1e6,
        baseline_name: "copy of those rows",
        ratio: baseline / seconds,
    }
}
