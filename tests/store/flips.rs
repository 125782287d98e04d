//! Damage to a store that was closed: any byte, any length, the index as a whole. What is read is right or a miss.

use std::collections::BTreeMap;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use pagoda::store::disk::{RealClock, RealDisk};
use pagoda::store::index::{Index, MemoryIndex, SledIndex};
use pagoda::store::{DiskStore, Room, Store};
use pagoda::{Durability, Result, StoreOptions};
use pagoda_test_support::Folder;

use crate::workload::{Past, State, cut, is_beginning, key, put, read, record};

/// Owners whose every state matters; another one writes last.
const OWNERS: u64 = 4;
const LAST: u64 = 9;

/// Every so many bytes are damaged; `make soak` damages each.
fn stride() -> usize {
    std::env::var("PAGODA_DAMAGE_STRIDE").map_or(23, |text| text.parse().expect("a number of bytes"))
}

fn options() -> StoreOptions {
    StoreOptions { durability: Durability::Process, segment_bytes: 4096, ..StoreOptions::default() }
}

/// A store that was closed in good order: its files, and what it holds.
struct Closed {
    folder: Folder,
    files: BTreeMap<PathBuf, Vec<u8>>,
    wanted: Vec<State>,
}

impl Closed {
    fn new(durability: Durability) -> Self {
        let folder = Folder::new();
        let options = StoreOptions { durability, ..options() };
        let store = DiskStore::open(folder.path(), &options).unwrap();
        let mut pasts: Vec<_> = (0..OWNERS).map(|_| Past::new()).collect();
        let mut write = |owner: u64, history_start, start, tokens, version| {
            let past = &mut pasts[owner as usize];
            past.settle(put(past.now(), history_start, start, tokens, version));
            store.write(record(owner, history_start, start, tokens, version), Room::Wait).unwrap().wait().unwrap();
        };
        // A segment that is compacted away, so that an index from before that is of no use.
        (0..13).for_each(|version| write(0, 0, 0, 4, version));
        store.compact().unwrap();
        for (owner, history_start, start, tokens, version) in [
            (1, 0, 0, 5, 21),
            (2, 0, 0, 5, 22),
            (1, 0, 3, 5, 23),
            (2, 0, 0, 4, 24),
            (1, 5, 8, 2, 25),
            (3, 0, 0, 5, 26),
            (0, 0, 4, 30, 27),
            (0, 0, 34, 30, 28),
            (1, 5, 10, 30, 29),
            (3, 0, 5, 30, 30),
        ] {
            write(owner, history_start, start, tokens, version);
        }
        store.cut(key(3), 20).unwrap().wait().unwrap();
        store.cut(key(2), 2).unwrap().wait().unwrap();
        for (owner, from) in [(3, 20), (2, 2)] {
            let past = &mut pasts[owner as usize];
            past.settle(cut(past.now(), from));
        }
        // Without an index, damage to the last record looks like a write that was under way.
        store.write(record(LAST, 0, 0, 1, 1), Room::Wait).unwrap().wait().unwrap();
        assert_eq!(store.stats().segments, 2);
        drop(store);
        let wanted = pasts.iter().map(|past| past.now().clone()).collect();
        let files = contents(folder.path());
        Self { folder, files, wanted }
    }

    fn segments(&self) -> Vec<PathBuf> {
        self.files.keys().filter(|path| path.extension().is_some_and(|it| it == "pgd")).cloned().collect()
    }

    fn index_files(&self) -> Vec<PathBuf> {
        let index = self.folder.path().join("index");
        self.files.keys().filter(|path| path.starts_with(&index)).cloned().collect()
    }

    /// What the index holds.
    fn pairs(&self) -> MemoryIndex {
        self.restore(true);
        let pairs = SledIndex::new(self.folder.path().join("index")).load().unwrap();
        let index = MemoryIndex::default();
        index.pairs.lock().extend(pairs);
        index
    }

    /// Puts everything back as it was.
    fn restore(&self, index: bool) {
        fs::remove_dir_all(self.folder.path()).unwrap();
        fs::create_dir(self.folder.path()).unwrap();
        for (path, bytes) in &self.files {
            if index || !path.starts_with(self.folder.path().join("index")) {
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, bytes).unwrap();
            }
        }
    }

    /// Opens the store and reads all owners, twice; then writes. Returns how many could be read the first time.
    fn look(&self, place: &str, open: impl FnOnce() -> Result<DiskStore>) -> u64 {
        let attempt = catch_unwind(AssertUnwindSafe(|| {
            let store = open().unwrap_or_else(|error| panic!("does not open: {error}"));
            let mut right = 0;
            for (owner, wanted) in self.wanted.iter().enumerate() {
                match read(&store, owner as u64) {
                    Ok(state) if state == *wanted => right += 1,
                    Ok(None) | Err(_) => {}
                    Ok(state) => panic!("owner {owner} has {state:?} and not {wanted:?}"),
                }
                // Where a piece was found bad, what comes before it is left.
                let left = read(&store, owner as u64).unwrap_or_else(|error| panic!("again: {error}"));
                assert!(is_beginning(&left, wanted), "owner {owner} has {left:?}, which is not of {wanted:?}");
            }
            store.write(record(LAST + 1, 0, 0, 3, 1), Room::Wait).unwrap().wait().unwrap();
            assert_eq!(read(&store, LAST + 1).unwrap(), Some((0, vec![1; 3])));
            right
        }));
        attempt.unwrap_or_else(|_| panic!("the damage above: {place}"))
    }
}

fn contents(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    for item in fs::read_dir(folder).unwrap() {
        let path = item.unwrap().path();
        if path.is_dir() {
            files.extend(contents(&path));
        } else {
            files.insert(path.clone(), fs::read(path).unwrap());
        }
    }
    files
}

/// A watchdog: ends the process if there is no progress for long, for a hang is a failure too.
fn watch(moves: &'static AtomicU64) {
    std::thread::spawn(move || {
        let mut seen = (moves.load(Relaxed), Instant::now());
        loop {
            std::thread::sleep(Duration::from_secs(1));
            let now = moves.load(Relaxed);
            if now == u64::MAX {
                return;
            }
            if now != seen.0 {
                seen = (now, Instant::now());
            } else if seen.1.elapsed() > Duration::from_secs(60) {
                eprintln!("a damaged store hangs, at step {now}");
                std::process::exit(101);
            }
        }
    });
}

// Two tests, so that two threads share what takes the longest.

#[test]
fn no_damage_to_a_segment_gives_wrong_data() {
    static MOVES: AtomicU64 = AtomicU64::new(0);
    look_at_damaged_segments(&MOVES, |whole, look| {
        for at in (0..whole.len()).step_by(stride()) {
            for flip in [1 << (at % 8), 0xff] {
                let mut bytes = whole.to_vec();
                bytes[at] ^= flip;
                look(&bytes, true, &format!("byte {at} ^ {flip}"));
            }
        }
    });
}

#[test]
fn no_damage_to_a_segment_without_its_index_and_no_cut_gives_wrong_data() {
    static MOVES: AtomicU64 = AtomicU64::new(0);
    look_at_damaged_segments(&MOVES, |whole, look| {
        for at in (0..whole.len()).step_by(stride()) {
            // Two things are broken then; the segments alone tell as well as long as only bytes are damaged.
            let mut bytes = whole.to_vec();
            bytes[at] ^= 0xff;
            look(&bytes, false, &format!("byte {at} ^ 255"));
        }
        for length in (0..whole.len()).step_by(stride()) {
            look(&whole[..length], true, &format!("{length} of {} bytes", whole.len()));
        }
        // What is longer than it was written: a file that was copied carelessly.
        look(&[whole, &[0; 777]].concat(), true, "longer");
    });
}

/// Opens the store with each segment damaged in every way that `damage` gives: the bytes in its place, whether the index is
/// there, and what was done.
fn look_at_damaged_segments(moves: &'static AtomicU64, damage: impl Fn(&[u8], &mut dyn FnMut(&[u8], bool, &str))) {
    watch(moves);
    // Each record says what was durable before it: damage there is told from a write that was under way.
    let closed = Closed::new(Durability::Power);
    let pairs = closed.pairs().pairs.lock().clone();
    let (mut right, mut cases) = (0, 0);
    for path in closed.segments() {
        damage(&closed.files[&path], &mut |bytes, known, place| {
            moves.fetch_add(1, Relaxed);
            closed.restore(false);
            fs::write(&path, bytes).unwrap();
            let index = MemoryIndex::default();
            if known {
                *index.pairs.lock() = pairs.clone();
            }
            let place = format!("{}: {place}, index: {known}", path.display());
            right += closed.look(&place, || {
                let disk = Box::new(RealDisk::new(closed.folder.path()));
                DiskStore::open_with(disk, Box::new(index), Box::new(RealClock), &options())
            });
            cases += 1;
        });
    }
    moves.store(u64::MAX, Relaxed);
    println!("{cases} damaged stores, {:.1} of {OWNERS} owners read in each", right as f64 / f64::from(cases));
    assert!(right > 0);
}

#[test]
fn no_damage_to_the_index_gives_wrong_data() {
    static MOVES: AtomicU64 = AtomicU64::new(0);
    watch(&MOVES);
    // Here the index is written less often, and is a file of a few kilobytes.
    let closed = Closed::new(Durability::Process);
    let (mut cases, mut missed) = (0, 0);
    for path in closed.index_files() {
        let whole = &closed.files[&path];
        // sled pads with zeros: of each run of them the first will do.
        let used = (0..whole.len()).filter(|&at| whole[at] != 0 || at == 0 || whole[at - 1] != 0);
        for at in used.step_by(stride()) {
            MOVES.fetch_add(1, Relaxed);
            closed.restore(true);
            let mut bytes = whole.clone();
            bytes[at] ^= if at % 2 == 0 { 0xff } else { 1 << (at % 8) };
            fs::write(&path, &bytes).unwrap();
            let place = format!("{}: byte {at}", path.display());
            let right = closed.look(&place, || DiskStore::open(closed.folder.path(), &options()));
            missed += u64::from(right < OWNERS);
            cases += 1;
        }
    }
    println!("{cases} damaged indexes, {missed} of them cost owners");
    MOVES.store(u64::MAX, Relaxed);
}

#[test]
fn no_index_and_any_lock_will_do() {
    let closed = Closed::new(Durability::Power);
    let index = closed.folder.path().join("index");
    let cases: [(&str, &dyn Fn()); 6] = [
        ("nothing", &|| {}),
        ("no index", &|| fs::remove_dir_all(&index).unwrap()),
        ("an empty index", &|| {
            fs::remove_dir_all(&index).unwrap();
            fs::create_dir(&index).unwrap();
        }),
        ("a file for an index", &|| {
            fs::remove_dir_all(&index).unwrap();
            fs::write(&index, "?").unwrap();
        }),
        ("an index of empty files", &|| {
            closed.index_files().iter().for_each(|path| fs::write(path, "").unwrap());
        }),
        ("a lock full of garbage", &|| fs::write(closed.folder.path().join("LOCK"), [0xff; 9999]).unwrap()),
    ];
    for (place, damage) in cases {
        closed.restore(true);
        damage();
        let right = closed.look(place, || DiskStore::open(closed.folder.path(), &options()));
        assert_eq!(right, OWNERS, "{place}");
    }
}

#[test]
fn a_segment_out_of_another_past_of_the_store_is_a_miss() {
    let folder = Folder::new();
    let open = |index: &MemoryIndex| {
        let disk = Box::new(RealDisk::new(folder.path()));
        DiskStore::open_with(disk, Box::new(index.clone()), Box::new(RealClock), &options()).unwrap()
    };
    let index = MemoryIndex::default();
    let write = |owner| {
        open(&index).write(record(owner, 0, 0, 5, 1), Room::Wait).unwrap().wait().unwrap();
    };
    write(0);
    let (files, pairs) = (contents(folder.path()), index.pairs.lock().clone());
    write(1);
    let newer = std::mem::replace(&mut *index.pairs.lock(), pairs);
    // Back to where it was, by a backup say, and on from there.
    files.iter().for_each(|(path, bytes)| fs::write(path, bytes).unwrap());
    write(2);
    *index.pairs.lock() = newer;
    let store = open(&index);
    assert_eq!(read(&store, 0).unwrap(), Some((0, vec![1; 5])));
    // Where the index says that its record is, another's is.
    assert!(read(&store, 1).is_err());
    assert_eq!(read(&store, 1).unwrap(), None);
    assert_eq!(store.stats().corrupt_records, 1);
}
