//! A disk that is really full: a file system of three megabytes.

use std::ops::Range;
use std::path::Path;
use std::process::Command;

use pagoda::store::{DiskStore, Room, Store};
use pagoda::{Durability, Error, Status, StoreOptions};
use pagoda_test_support::Folder;

use crate::workload::{read, record};

/// A small file system, as long as this lives.
struct Small(Folder);

impl Small {
    fn new() -> Option<Self> {
        let folder = Folder::new();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=3m", "pagoda-test"])
            .arg(folder.path())
            .output()
            .is_ok_and(|output| output.status.success());
        mounted.then_some(Self(folder))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.path()).output();
    }
}

#[test]
fn a_full_disk_refuses_writes_and_nothing_else() {
    for durability in [Durability::Power, Durability::Process] {
        let Some(disk) = Small::new() else {
            println!("skipped: this process may not mount a file system, so there is no disk to fill");
            return;
        };
        let options = StoreOptions { durability, segment_bytes: 1 << 18, ..StoreOptions::default() };
        let path = disk.path().join("store");
        let store = DiskStore::open(&path, &options).unwrap();
        let mut written = 0;
        let error = fill(&store, &mut written);
        assert_eq!(error.status(), Status::Io);
        assert!(error.message().contains("Free space, or set max_bytes"), "{error}");
        assert!(error.message().contains(&path.display().to_string()), "{error}");
        assert!(written > 10, "{written}");
        // Reads go on; what failed is a miss, again and again.
        for _ in 0..3 {
            whole(&store, 0..written);
            assert_eq!(read(&store, written).unwrap(), None);
            assert!(store.write(record(written, 0, 0, 2000, 1), Room::Wait).unwrap().wait().is_err());
        }
        assert_eq!(store.flush().unwrap_err().status(), Status::Io);
        assert!(store.stats().write_errors >= 4, "{:?}", store.stats());
        drop(store);
        let store = DiskStore::open(&path, &options).unwrap_or_else(|error| panic!("does not open when full: {error}"));
        whole(&store, 0..written);
        // What the first one left of its last segment may hold a few.
        assert_eq!(fill(&store, &mut written).status(), Status::Io);
        make_room(disk.path());
        for owner in written..written + 5 {
            store.write(record(owner, 0, 0, 2000, 1), Room::Wait).unwrap().wait().unwrap();
        }
        whole(&store, 0..written + 5);
        assert_eq!(store.flush().unwrap_err().status(), Status::Io, "of what failed before");
        store.flush().unwrap();
        drop(store);
        assert!(DiskStore::check(&path).unwrap().is_sound());
        whole(&DiskStore::open(&path, &options).unwrap(), 0..written + 5);
    }
}

/// Writes owners until the disk is full.
fn fill(store: &DiskStore, written: &mut u64) -> Error {
    loop {
        let ticket = store.write(record(*written, 0, 0, 2000, 1), Room::Wait).unwrap();
        if let Err(error) = ticket.wait() {
            return error;
        }
        *written += 1;
        assert!(*written < 1000, "a disk of three megabytes does not get full");
    }
}

fn whole(store: &DiskStore, owners: Range<u64>) {
    for owner in owners {
        assert_eq!(read(store, owner).unwrap(), Some((0, vec![1; 2000])), "owner {owner}");
    }
}

/// More room on the same file system.
fn make_room(path: &Path) {
    let grown = Command::new("mount").args(["-o", "remount,size=8m"]).arg(path).status();
    assert!(grown.is_ok_and(|status| status.success()), "what was mounted can be made larger");
}
