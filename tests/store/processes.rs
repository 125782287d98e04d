//! One store, two processes: the second is refused, with the first one's number, until the first has ended.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use pagoda::store::{DiskStore, Room, Store};
use pagoda::{Status, StoreOptions};
use pagoda_test_support::Folder;

use crate::workload::{read, record};

const CHILD: &str = "PAGODA_TEST_HOLDS";

#[test]
fn a_store_that_another_process_has_is_busy_until_that_one_is_gone() {
    for killed in [false, true] {
        let folder = Folder::new();
        let mut child = holder(folder.path());
        let error = DiskStore::open(folder.path(), &StoreOptions::default()).err().expect("another has it");
        assert_eq!(error.status(), Status::Busy);
        let message = error.message();
        assert!(message.contains(&folder.path().display().to_string()), "{message}");
        assert!(message.contains(&format!("process {}", child.id())), "{message}");
        assert_eq!(DiskStore::check(folder.path()).unwrap_err().status(), Status::Busy);
        assert_eq!(DiskStore::rebuild(folder.path()).unwrap_err().status(), Status::Busy);
        if killed {
            child.kill().unwrap();
        } else {
            // The end of its input is its sign to close the store.
            drop(child.stdin.take());
        }
        assert_eq!(child.wait().unwrap().success(), !killed);
        let store = DiskStore::open(folder.path(), &StoreOptions::default()).unwrap();
        assert_eq!(read(&store, 1).unwrap(), Some((0, vec![1; 10])), "what the other wrote");
        store.write(record(1, 0, 10, 5, 2), Room::Wait).unwrap().wait().unwrap();
    }
}

/// Between fork and exec a process has all files of its parent open.
#[test]
fn a_process_that_is_being_started_does_not_keep_a_closed_store() {
    let folder = Folder::new();
    let store = DiskStore::open(folder.path(), &StoreOptions::default()).unwrap();
    let ((mut here, there), (mut go_on, mut told)) = (std::io::pipe().unwrap(), std::io::pipe().unwrap());
    let told_there = told.as_raw_fd();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "none"]).stdout(Stdio::null());
    // SAFETY: closes, writes and reads pipes, which a process may do before its program begins.
    unsafe {
        command.pre_exec(move || {
            // Its own copy, without which it sees the end of the pipe if this process ends.
            libc::close(told_there);
            (&there).write_all(&[1])?;
            go_on.read(&mut [0]).map(drop)
        })
    };
    let started = std::thread::spawn(move || command.status().unwrap());
    here.read_exact(&mut [0]).unwrap();
    drop(store);
    let opened = DiskStore::open(folder.path(), &StoreOptions::default());
    told.write_all(&[1]).unwrap();
    opened.unwrap();
    assert!(started.join().unwrap().success());
}

fn holder(path: &Path) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "processes::child", "--ignored", "--nocapture"])
        .env(CHILD, path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    // The harness says things of its own first.
    while lines.next().expect("the child opens the store").unwrap() != "open" {}
    // Read to the end: a process that writes into a closed pipe is ended by a signal.
    std::thread::spawn(move || lines.for_each(drop));
    child
}

#[test]
#[ignore = "the process that holds the store in the test above"]
fn child() {
    let Ok(path) = std::env::var(CHILD) else { return };
    let store = DiskStore::open(path, &StoreOptions::default()).unwrap();
    store.write(record(1, 0, 0, 10, 1), Room::Wait).unwrap().wait().unwrap();
    // On a line of its own, whatever the harness has written.
    writeln!(std::io::stdout().lock(), "\nopen").unwrap();
    std::io::stdin().lines().for_each(drop);
}
