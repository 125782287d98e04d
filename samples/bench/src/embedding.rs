//! Embedding tables: lookups compared with a bare gather and a plain map, under a mixed load, and after a cold start.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::RwLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use pagoda::embedding::{EmbeddingOptions, EmbeddingTable, Embeddings, Miss, PsJson};
use pagoda::{Error, Result, Status};
use pagoda_test_support::{Folder, Random};

use super::{Report, Row, in_turns, median};

const ROWS: usize = 10_000_000;
const DIM: usize = 64;
const BATCH: usize = 65_536;
const EXPONENT: f64 = 1.05;
/// The number of batches drawn in advance: more than fit into the processor's caches.
const BATCHES: usize = 32;

/// Everything with a goal.
pub fn measure(threads: u32, report: &Report) -> Result<()> {
    let folder = Folder::new();
    write_table(folder.path())
        .map_err(|error| Error::new(Status::Io, format!("the table can not be written: {error}")))?;
    let config = |threshold: f64, disk: &str| {
        PsJson::from_json(
            &format!(
                r#"{{"models": [{{"model": "bench", "sparse_files": ["rows.npy"], "embedding_table_names": ["table"],
                "embedding_vecsize_per_table": [{DIM}], "gpucacheper": 0.1, "hit_rate_threshold": {threshold},
                "init_ec": false}}], "volatile_db": {{"type": "disabled"}},
                "persistent_db": {{"type": "disk", "path": "disk"{disk}}}}}"#
            ),
            Some(folder.path()),
        )
        .map(|config| config.options)
    };
    let zipf = Zipf::new();
    let mut random = Random(7);
    let batches: Vec<Vec<i64>> = (0..BATCHES).map(|_| zipf.batch(&mut random)).collect();
    // Builds the table file.
    drop(Embeddings::open(&config(1.0, "")?)?);
    report.row(cold_start(&config(1.0, r#", "read_only": true"#)?, &batches[0])?)?;
    let embeddings = Embeddings::open(&config(0.0, r#", "read_only": true"#)?)?;
    let table = embeddings.table("table")?;
    // Until the cache holds the most frequent keys.
    for batch in batches.iter().chain(&batches) {
        look(&table, batch, &mut Room::new(), Miss::Wait)?;
    }
    report.rows(all_hit(&table, &batches, threads)?)?;
    report.rows(mixed(&table, &zipf)?)
}

/// NumPy's format, a row after the other; the number of a row is its key.
fn write_table(folder: &Path) -> std::io::Result<()> {
    let mut file = BufWriter::with_capacity(1 << 20, File::create(folder.join("rows.npy"))?);
    let mut header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({ROWS}, {DIM}), }}");
    while !(10 + header.len() + 1).is_multiple_of(64) {
        header.push(' ');
    }
    file.write_all(b"\x93NUMPY\x01\x00")?;
    file.write_all(&(header.len() as u16 + 1).to_le_bytes())?;
    writeln!(file, "{header}")?;
    for key in 0..ROWS as i64 {
        let row: Vec<u8> = row(key).iter().flat_map(|number| number.to_le_bytes()).collect();
        file.write_all(&row)?;
    }
    file.flush()
}

fn row(key: i64) -> [f32; DIM] {
    std::array::from_fn(|place| key as f32 + place as f32)
}

/// Draws keys, the k-th with a probability in proportion to k to the power of -1.05, scattered over the table.
struct Zipf {
    cumulative: Vec<f64>,
}

impl Zipf {
    fn new() -> Self {
        let mut sum = 0.0;
        let mut add = |rank: usize| {
            sum += (rank as f64 + 1.0).powf(-EXPONENT);
            sum
        };
        Self { cumulative: (0..ROWS).map(&mut add).collect() }
    }

    fn batch(&self, random: &mut Random) -> Vec<i64> {
        let all = self.cumulative[ROWS - 1];
        let mut draw = || {
            let at = (random.bits() >> 11) as f64 / (1_u64 << 53) as f64 * all;
            let rank = self.cumulative.partition_point(|&sum| sum < at).min(ROWS - 1);
            // Coprime to 10 million, so that consecutive keys are not neighbours.
            (rank as u64 * 7_368_787 % ROWS as u64) as i64
        };
        (0..BATCH).map(|_| draw()).collect()
    }
}

/// Where rows go.
struct Room {
    numbers: Vec<f32>,
    found: Vec<bool>,
}

impl Room {
    fn new() -> Self {
        Self { numbers: vec![0.0; BATCH * DIM], found: vec![false; BATCH] }
    }
}

/// What is done with the keys of one batch.
type Work<'a> = &'a (dyn Fn(usize, &mut Room) -> Result<()> + Sync);

fn rooms(threads: u32) -> Vec<Room> {
    (0..threads).map(|_| Room::new()).collect()
}

fn look(table: &EmbeddingTable, keys: &[i64], room: &mut Room, miss: Miss) -> Result<()> {
    let (numbers, found) = (&mut room.numbers[..keys.len() * DIM], &mut room.found[..keys.len()]);
    table.lookup(keys, numbers, found, miss)?;
    std::hint::black_box(&room.numbers);
    Ok(())
}

/// Opens the table and looks up one batch. Its rows are on disk, or still in the page cache.
fn cold_start(config: &EmbeddingOptions, batch: &[i64]) -> Result<Row> {
    let mut room = Room::new();
    let start = Instant::now();
    let embeddings = Embeddings::open(config)?;
    look(&embeddings.table("table")?, batch, &mut room, Miss::Wait)?;
    let took = start.elapsed().as_secs_f64();
    for (&key, got) in batch.iter().zip(room.numbers.chunks_exact(DIM)) {
        if got != row(key) {
            return Err(Error::new(Status::Internal, format!("the row of key {key} is wrong")));
        }
    }
    Ok(Row {
        bench: "embedding",
        case: format!("disk cold start, {ROWS} rows of {DIM} f32, first {BATCH} keys"),
        value: took,
        unit: "s",
        baseline: 1.0,
        baseline_name: "goal",
        ratio: 1.0 / took,
    })
}

/// Cached keys, compared with the same rows from one array in the same order, and from a map behind a lock.
fn all_hit(table: &EmbeddingTable, batches: &[Vec<i64>], threads: u32) -> Result<Vec<Row>> {
    let mut room = Room::new();
    let mut hits = Vec::new();
    for batch in batches {
        look(table, batch, &mut room, Miss::Default)?;
        let there: Vec<i64> = batch.iter().zip(&room.found).filter(|&(_, &found)| found).map(|(&key, _)| key).collect();
        hits.push(there);
    }
    // The rows of all batches, each key once, so that the array is no larger than necessary.
    let mut places = HashMap::new();
    let mut array: Vec<f32> = Vec::new();
    let mut map: HashMap<u64, Box<[f32]>> = HashMap::new();
    for &key in hits.iter().flatten() {
        places.entry(key).or_insert_with(|| {
            array.extend(row(key));
            map.insert(key as u64, row(key).into());
            array.len() / DIM - 1
        });
    }
    let indices: Vec<Vec<usize>> = hits.iter().map(|keys| keys.iter().map(|key| places[key]).collect()).collect();
    let map = RwLock::new(map);
    let ours = |at: usize, room: &mut Room| look(table, &hits[at], room, Miss::Default);
    let gather = |at: usize, room: &mut Room| {
        for (to, &place) in room.numbers.chunks_exact_mut(DIM).zip(&indices[at]) {
            to.copy_from_slice(&array[place * DIM..][..DIM]);
        }
        std::hint::black_box(&room.numbers);
        Ok(())
    };
    let locked = |at: usize, room: &mut Room| {
        for (to, key) in room.numbers.chunks_exact_mut(DIM).zip(&hits[at]) {
            to.copy_from_slice(&map.read().expect("not poisoned")[&(*key as u64)]);
        }
        std::hint::black_box(&room.numbers);
        Ok(())
    };
    let mut cases: Vec<(u32, Work<'_>)> = vec![(1, &ours), (1, &gather), (1, &locked)];
    if threads > 1 {
        cases.extend([(threads, &ours as Work<'_>), (threads, &gather), (threads, &locked), (2, &ours)]);
    }
    // All cases alternate, and a round is compared with itself, because the speed of the machine varies over time. All
    // write to the same memory, because the speed of memory varies too.
    let (rooms, batches) = (&RefCell::new(rooms(threads.max(2))), hits.len());
    let run = |(threads, work)| move || on_threads(&mut rooms.borrow_mut()[..threads as usize], work, batches);
    let times = in_turns(15, &mut cases.iter().copied().map(run).collect::<Vec<_>>())?;
    let count = hits.iter().map(Vec::len).sum::<usize>() as f64 / hits.len() as f64;
    let speeds = |at: usize| -> Vec<f64> {
        let rows = count * f64::from(cases[at].0) * ROUNDS as f64;
        times[at].iter().map(|&round| rows / median(round) * 1e-6).collect()
    };
    let middle = |mut numbers: Vec<f64>| {
        numbers.sort_by(f64::total_cmp);
        numbers[numbers.len() / 2]
    };
    let row = |case: String, ours: usize, theirs: usize, baseline_name| {
        let (ours, theirs) = (speeds(ours), speeds(theirs));
        let ratio = middle(ours.iter().zip(&theirs).map(|(ours, theirs)| ours / theirs).collect());
        let (value, baseline) = (middle(ours), middle(theirs));
        Row { bench: "embedding", case, value, unit: "Mrow/s", baseline, baseline_name, ratio }
    };
    let mut rows = Vec::new();
    for ours in (0..cases.len() - 2).step_by(3) {
        let case = format!("all-hit, {DIM} f32, Zipf {EXPONENT}, {} threads", cases[ours].0);
        rows.push(row(case.clone(), ours, ours + 1, "gather"));
        rows.push(row(case, ours, ours + 2, "RwLock<HashMap>"));
    }
    if threads > 1 {
        rows.push(row("all-hit, scaling from 1 to 2 threads".into(), cases.len() - 1, 0, "1 thread"));
    }
    Ok(rows)
}

/// Batches that each thread does in one measurement.
const ROUNDS: usize = 8;
/// Batches so far. A measurement continues where the previous one ended, so that the processor's caches do not hold its
/// rows.
static BEGUN: AtomicUsize = AtomicUsize::new(0);

/// Does the work on as many threads as there are rooms.
fn on_threads(rooms: &mut [Room], work: Work<'_>, batches: usize) -> Result<()> {
    let first = BEGUN.fetch_add(ROUNDS, Ordering::Relaxed);
    let one = |thread: usize, room: &mut Room| {
        (first..first + ROUNDS).try_for_each(|round| work((round + 5 * thread) % batches, room))
    };
    let (own, others) = rooms.split_first_mut().expect("there is a room");
    std::thread::scope(|scope| {
        let others = others.iter_mut().zip(1..).map(|(room, thread)| scope.spawn(move || one(thread, room)));
        let others: Vec<_> = others.collect();
        let own = one(0, own);
        others.into_iter().map(|other| other.join().expect("it does not panic")).fold(own, Result::and)
    })
}

/// New keys all the time, in asynchronous mode: the cache inserts in the background while it is read. The baseline is a
/// bare gather of as many rows under the same load, because what slows that down slows down lookups too.
fn mixed(table: &EmbeddingTable, zipf: &Zipf) -> Result<[Row; 2]> {
    const LOOKUPS: usize = 400;
    let (mut room, mut other) = (Room::new(), Room::new());
    let mut random = Random(99);
    let batches: Vec<Vec<i64>> = (0..2 * LOOKUPS).map(|_| zipf.batch(&mut random)).collect();
    let before = table.stats();
    let mut times = Vec::with_capacity(LOOKUPS);
    for batch in &batches[..LOOKUPS] {
        let start = Instant::now();
        look(table, batch, &mut room, Miss::Default)?;
        times.push(start.elapsed());
    }
    // As many rows as the cache has.
    let array = vec![1.0_f32; ROWS / 10 * DIM];
    let mut bare = Vec::with_capacity(LOOKUPS);
    for batch in &batches[LOOKUPS..] {
        look(table, batch, &mut room, Miss::Default)?;
        let start = Instant::now();
        for (to, &key) in other.numbers.chunks_exact_mut(DIM).zip(batch) {
            to.copy_from_slice(&array[key as usize % (ROWS / 10) * DIM..][..DIM]);
        }
        std::hint::black_box(&other.numbers);
        bare.push(start.elapsed());
    }
    let after = table.stats();
    if after.defaults == before.defaults {
        return Err(Error::new(Status::Internal, "nothing was inserted meanwhile"));
    }
    Ok([slow_against_usual("mixed", times), slow_against_usual("bare gather beside mixed", bare)])
}

/// The 99th percentile, compared with twice the median.
fn slow_against_usual(what: &str, mut times: Vec<Duration>) -> Row {
    times.sort();
    let p99 = times[times.len() * 99 / 100].as_secs_f64() * 1e3;
    let p50 = median(times) * 1e3;
    Row {
        bench: "embedding",
        case: format!("{what}, {BATCH} keys, p99 against 2 p50"),
        value: p99,
        unit: "ms",
        baseline: 2.0 * p50,
        baseline_name: "2 p50",
        ratio: 2.0 * p50 / p99,
    }
}
