//! The store on a disk that fails.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use pagoda_test_support::{Folder, Random};

use super::disk::{Disk, DiskFile, RealClock, RealDisk};
use super::index::MemoryIndex;
use super::tests::{Model, compare, key, model_cut, model_put, read, record, small};
use super::*;
use crate::error::Status;

/// A disk that is full when the test says so.
#[derive(Clone)]
struct Faulty {
    disk: RealDisk,
    /// 0 = works, 1 = writes fail halfway, 2 = syncs fail, 3 = files can not be made.
    fault: Arc<AtomicU64>,
}

struct FaultyFile(Box<dyn DiskFile>, Arc<AtomicU64>);

fn fault(active: bool) -> io::Result<()> {
    if active { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
}

impl Disk for Faulty {
    fn path(&self) -> &Path {
        self.disk.path()
    }
    fn make_folder(&self) -> io::Result<()> {
        self.disk.make_folder()
    }
    fn list(&self) -> io::Result<Vec<String>> {
        self.disk.list()
    }
    fn lock(&self) -> Result<Box<dyn std::any::Any + Send + Sync>> {
        self.disk.lock()
    }
    fn create(&self, name: &str, capacity: u64) -> io::Result<Box<dyn DiskFile>> {
        fault(self.fault.load(Relaxed) == 3)?;
        Ok(Box::new(FaultyFile(self.disk.create(name, capacity)?, self.fault.clone())))
    }
    fn open(&self, name: &str, capacity: u64) -> io::Result<Box<dyn DiskFile>> {
        Ok(Box::new(FaultyFile(self.disk.open(name, capacity)?, self.fault.clone())))
    }
    fn remove(&self, name: &str) -> io::Result<()> {
        self.disk.remove(name)
    }
    fn sync(&self) -> io::Result<()> {
        self.disk.sync()
    }
}

impl DiskFile for FaultyFile {
    fn write_at(&self, offset: u64, parts: &[&[u8]]) -> io::Result<()> {
        if self.1.load(Relaxed) == 1 {
            self.0.write_at(offset, &parts[..1])?;
        }
        fault(self.1.load(Relaxed) == 1)?;
        self.0.write_at(offset, parts)
    }
    fn sync(&self) -> io::Result<()> {
        fault(self.1.load(Relaxed) == 2)?;
        self.0.sync()
    }
    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }
    fn truncate(&self, len: u64) -> io::Result<()> {
        self.0.truncate(len)
    }
    fn view(&self, offset: u64, len: usize) -> io::Result<&[u8]> {
        self.0.view(offset, len)
    }
}

#[test]
fn a_disk_that_fails_loses_what_it_said_it_lost_and_nothing_else() {
    for kind in 1..=3 {
        let folder = Folder::new();
        let disk = Faulty { disk: RealDisk::new(folder.path()), fault: Default::default() };
        // Segments that hold one batch, so that every kind of fault is met.
        let options = StoreOptions { segment_bytes: 4096, garbage_bytes: 1 << 40, ..StoreOptions::default() };
        let open = || {
            let index = Box::new(MemoryIndex::default());
            DiskStore::open_with(Box::new(disk.clone()), index, Box::new(RealClock), &options).unwrap()
        };
        let store = open();
        let write = |user, start, version| {
            store.write(record(user, 0, start, 100, version), Room::Wait).and_then(|ticket| ticket.wait())
        };
        write(1, 0, 1).unwrap();
        write(2, 0, 1).unwrap();
        write(3, 0, 1).unwrap();
        disk.fault.store(kind, Relaxed);
        // Replaces half of the first piece, and fails: what it would have replaced is not current any more.
        assert_eq!(write(1, 50, 2).unwrap_err().status(), Status::Io);
        assert_eq!(store.cut(key(2), 30).unwrap().wait().unwrap_err().status(), Status::Io);
        assert_eq!(write(4, 0, 2).unwrap_err().status(), Status::Io);
        assert_eq!(store.flush().unwrap_err().status(), Status::Io);
        let check = |store: &DiskStore| {
            assert_eq!(read(store, 1).unwrap(), Some((0, vec![1; 50])), "fault {kind}");
            assert_eq!(read(store, 2).unwrap(), Some((0, vec![1; 30])), "fault {kind}");
            assert_eq!(read(store, 4).unwrap(), None, "fault {kind}");
        };
        check(&store);
        assert_eq!(read(&store, 3).unwrap(), Some((0, vec![1; 100])));
        disk.fault.store(0, Relaxed);
        write(3, 100, 3).unwrap();
        store.flush().unwrap();
        assert!(store.stats().write_errors >= 3);
        check(&store);
        drop(store);
        let store = open();
        check(&store);
        assert_eq!(read(&store, 3).unwrap().unwrap().1.len(), 200);
        assert_eq!((store.stats().damaged_regions, store.stats().dropped_users), (0, 0));
    }
}

#[test]
fn random_histories_on_a_disk_that_comes_and_goes() {
    for seed in 1..4 {
        let folder = Folder::new();
        let disk = Faulty { disk: RealDisk::new(folder.path()), fault: Default::default() };
        let index = MemoryIndex::default();
        let durability = if seed % 2 == 0 { Durability::Process } else { Durability::Power };
        let options = StoreOptions { durability, ..small() };
        let open = || {
            let (disk, index) = (Box::new(disk.clone()), Box::new(index.clone()));
            DiskStore::open_with(disk, index, Box::new(RealClock), &options).unwrap()
        };
        let mut random = Random(seed * 77);
        let (mut model, mut failures) = (Model::new(), 0);
        for round in 0..5 {
            let store = open();
            compare(&store, &model, 8);
            for step in 0..200 {
                disk.fault.store(if random.below_u64(3) == 0 { 1 + random.below_u64(3) } else { 0 }, Relaxed);
                let user = random.below_u64(8);
                let (first, end) =
                    model.get(&user).map_or((0, 0), |(first, tokens)| (*first, first + tokens.len() as u64));
                let ticket = if random.below_u64(5) == 0 {
                    let from = first + random.below_u64(end - first + 1);
                    model_cut(&mut model, user, from);
                    store.cut(key(user), from).unwrap()
                } else {
                    let start = if random.below_u64(3) == 0 { first + random.below_u64(end - first + 1) } else { end };
                    let (tokens, version) = (1 + random.below_u64(40) as u32, round * 1000 + step);
                    assert!(model_put(&mut model, user, first, start, tokens, version));
                    store.write(record(user, first, start, tokens, version), Room::Wait).unwrap()
                };
                if random.below_u64(20) == 0 {
                    let _ = store.compact();
                }
                if ticket.wait().is_err() {
                    // What is left is a beginning of what would be there.
                    failures += 1;
                    let wanted = model.remove(&user);
                    if let Some((start, versions)) = read(&store, user).unwrap() {
                        let wanted = wanted.unwrap();
                        assert!(
                            wanted.0 == start && wanted.1.starts_with(&versions),
                            "{wanted:?} {start} {versions:?}"
                        );
                        model.insert(user, (start, versions));
                    }
                }
            }
            compare(&store, &model, 8);
            disk.fault.store(0, Relaxed);
            // A write that succeeds takes the removals with it that were owed.
            assert!(model_put(&mut model, 9, 0, 0, 1, round));
            store.write(record(9, 0, 0, 1, round), Room::Wait).unwrap();
            store.flush().unwrap_err();
            model.remove(&9);
            store.cut(key(9), 0).unwrap().wait().unwrap();
            drop(store);
            if round % 2 == 0 {
                index.pairs.lock().unwrap().clear();
            }
        }
        assert!(failures > 50);
    }
}

#[test]
fn no_flipped_byte_brings_old_tokens_back() {
    let folder = Folder::new();
    let index = MemoryIndex::default();
    let open = |index: &MemoryIndex| {
        let disk = Box::new(RealDisk::new(folder.path()));
        DiskStore::open_with(disk, Box::new(index.clone()), Box::new(RealClock), &StoreOptions::default())
    };
    let store = open(&index).unwrap();
    let mut model = Model::new();
    let puts = [(1, 0, 0, 5, 1), (2, 0, 0, 5, 1), (1, 0, 3, 5, 2), (2, 0, 0, 4, 2), (1, 5, 8, 2, 3), (3, 0, 0, 5, 1)];
    for (user, history_start, start, tokens, version) in puts {
        assert!(model_put(&mut model, user, history_start, start, tokens, version));
        store.write(record(user, history_start, start, tokens, version), Room::Wait).unwrap().wait().unwrap();
    }
    store.cut(key(3), 2).unwrap().wait().unwrap();
    model_cut(&mut model, 3, 2);
    // The last record could be a torn write, if nothing but the segment is left.
    store.write(record(9, 0, 0, 1, 1), Room::Wait).unwrap().wait().unwrap();
    drop(store);
    let path = folder.path().join(format::segment_name(1));
    let whole = std::fs::read(&path).unwrap();
    let pairs = index.pairs.lock().unwrap().clone();
    let (mut right, mut missed) = (0, 0);
    for at in 0..whole.len() {
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << (at % 8);
        for known in [true, false] {
            // An opening that finds damage writes down what left, in a segment of its own.
            std::fs::remove_dir_all(folder.path()).unwrap();
            std::fs::create_dir(folder.path()).unwrap();
            std::fs::write(&path, &bytes).unwrap();
            let index = MemoryIndex::default();
            if known {
                *index.pairs.lock().unwrap() = pairs.clone();
            }
            let store = open(&index).unwrap_or_else(|error| panic!("byte {at}: {error}"));
            for user in 1..=3 {
                let wanted = &model[&user];
                match read(&store, user) {
                    Ok(Some(found)) if found == *wanted => right += 1,
                    Ok(Some(found)) => panic!("byte {at}, index {known}: user {user} has {found:?}, not {wanted:?}"),
                    Ok(None) | Err(_) => missed += 1,
                }
                // What is left after a piece was found bad is a beginning.
                if let Ok(Some((start, versions))) = read(&store, user) {
                    assert!(start == wanted.0 && wanted.1.starts_with(&versions), "byte {at}: user {user}");
                }
            }
        }
    }
    assert!(right > missed && missed > 0, "{right} right, {missed} missed");
}
