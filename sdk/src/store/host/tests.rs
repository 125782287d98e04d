use super::*;
use crate::store::tests::{key, record};
use crate::store::{DiskStore, StoreOptions};

const SPACE: Space = Space(7);

/// What is stored of an owner, layer by layer.
fn read(store: &dyn Store, owner: u64) -> Option<(u64, u64, Vec<Vec<u8>>)> {
    let history = store.history(key(owner))?;
    let pieces = 0..history.pieces().len();
    let layers = pieces.flat_map(|piece| (0..3).map(move |layer| (piece, layer)));
    let read = layers.map(|(piece, layer)| history.layer(piece, layer).unwrap().to_vec()).collect();
    Some((history.start(), history.end(), read))
}

/// The same calls on a store in memory and on one on disk leave the same behind.
#[test]
fn it_keeps_what_a_store_on_disk_keeps() {
    let folder = pagoda_test_support::Folder::new();
    let disk = DiskStore::open(folder.path(), &StoreOptions::default()).unwrap();
    let host = HostStore::new(16 << 20, None, None).unwrap();
    let mut random = pagoda_test_support::Random(3);
    for version in 0..3000 {
        let owner = random.below(5) as u64;
        let found = disk.find(key(owner));
        assert_eq!(
            host.find(key(owner)).map(|found| (found.start, found.end)),
            found.as_ref().map(|f| (f.start, f.end))
        );
        let (start, end) = found.map_or((0, 0), |found| (found.start, found.end));
        match random.below(4) {
            0 => {
                let from = random.below(end as usize + 2) as u64;
                host.cut(key(owner), from).unwrap();
                disk.cut(key(owner), from).unwrap();
            }
            kind => {
                let history_start = if kind == 1 { start } else { start + random.below(3) as u64 };
                let from = history_start + random.below((end.saturating_sub(history_start) + 3) as usize) as u64;
                let record = record(owner, history_start, from, 1 + random.below(6) as u32, version);
                let (ours, theirs) = (host.write(record.clone(), Room::Wait), disk.write(record, Room::Wait));
                assert_eq!(ours.is_ok(), theirs.is_ok(), "{:?} {:?}", ours.err(), theirs.err());
            }
        }
        disk.flush().unwrap();
        assert_eq!(read(&host, owner), read(&disk, owner), "owner {owner} after {version}");
    }
}

#[test]
fn the_least_recently_used_make_room() {
    let one = record(1, 0, 0, 4, 0).data.len();
    assert!(one <= 4096);
    let host = HostStore::new(3 * 4096, None, None).unwrap();
    for owner in 1..=3 {
        host.write(record(owner, 0, 0, 4, 0), Room::Wait).unwrap();
    }
    drop(host.history(key(1)));
    host.write(record(4, 0, 0, 4, 0), Room::Wait).unwrap();
    let mut there = host.owners(key(1).space);
    there.sort_unstable();
    assert_eq!(there, [1, 3, 4].map(Owner));
    // A snapshot stays readable when its owner was evicted.
    let history = host.history(key(3)).unwrap();
    let before = history.layer(0, 0).unwrap().to_vec();
    for owner in 5..9 {
        let _ = host.write(record(owner, 0, 0, 4, 0), Room::Wait);
    }
    assert!(host.find(key(3)).is_none());
    assert_eq!(history.layer(0, 0).unwrap(), before);
    drop(history);
    host.write(record(8, 0, 0, 4, 0), Room::Wait).unwrap();
    let before = host.owners(key(1).space).len();
    let error = host.write(record(9, 0, 0, 9999, 0), Room::Wait).unwrap_err();
    assert_eq!(error.status(), Status::Capacity, "{error}");
    assert_eq!(host.owners(key(1).space).len(), before, "nothing is evicted for a record that can not fit");
}

#[test]
fn what_leaves_is_found_below() {
    let folder = pagoda_test_support::Folder::new();
    let disk: Arc<dyn Store> = Arc::new(DiskStore::open(folder.path(), &StoreOptions::default()).unwrap());
    let host = HostStore::new(2 * 4096, None, Some(Arc::clone(&disk))).unwrap();
    assert!(host.claim(SPACE) && !host.claim(SPACE) && !disk.claim(SPACE));
    for owner in 1..=4 {
        host.write(record(owner, 0, 0, 4, owner), Room::Wait).unwrap();
    }
    host.flush().unwrap();
    for owner in 1..=4 {
        assert_eq!(read(&host, owner), read(&*disk, owner));
        assert!(read(&host, owner).is_some());
    }
    let here = |owner| host.find(key(owner)).unwrap().pieces[0].id & HERE != 0;
    assert_eq!([1, 2, 3, 4].map(here), [false, false, true, true]);
    // Tokens that continue a history which is only below: they go there alone.
    host.write(record(1, 0, 4, 2, 9), Room::Wait).unwrap();
    assert!(!here(1) && host.find(key(1)).unwrap().end == 6);
    host.cut(key(3), 0).unwrap();
    assert!(host.find(key(3)).is_none());
    let mut owners = host.owners(key(1).space);
    owners.sort_unstable();
    assert_eq!(owners, [1, 2, 4].map(Owner));
    // A history that was removed below, as after a disk failure, does not count as stored.
    disk.cut(key(4), 0).unwrap();
    assert!(host.find(key(4)).is_none() && host.history(key(4)).is_none());
    host.release(SPACE);
    assert!(disk.claim(SPACE));
}
