//! Records the changes of this process to the files below one folder, and makes calls fail.
//!
//! This file redefines the functions of the C library by which Rust's standard library and sled change files. A
//! program's own functions have priority over those of a shared library, so every call in this program comes here. It
//! is passed on to the kernel unchanged.

use std::collections::HashMap;
use std::ffi::{CStr, OsStr};
use std::os::fd::RawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use libc::{c_char, c_int, c_long, c_void, mode_t, off_t, size_t, ssize_t};
use pagoda_test_support::power;

/// A change of a file, or the acknowledgement of an update.
pub type Event = power::Event<u64>;

/// Which of the calls that change something below the folder fail.
#[derive(Clone, Copy)]
pub struct Fault {
    /// The number of the first.
    pub from: u64,
    /// How many.
    pub count: u64,
    pub errno: c_int,
}

#[derive(Default)]
struct Record {
    root: PathBuf,
    events: Vec<Event>,
    /// The numbers of files, by inode.
    files: HashMap<u64, u64>,
    next: u64,
    calls: u64,
    failed: u64,
    fault: Option<Fault>,
}

static RECORD: Mutex<Option<Record>> = Mutex::new(None);
/// One recording at a time: the functions here see the whole process.
static ONE: Mutex<()> = Mutex::new(());

/// While it lives, changes below its folder are recorded.
pub struct Recording(#[expect(dead_code, reason = "it is held")] MutexGuard<'static, ()>);

impl Recording {
    /// Records what is done below a folder, which is empty.
    pub fn start(root: &Path) -> Self {
        let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let root = root.canonicalize().unwrap();
        *lock() = Some(Record { root, ..Record::default() });
        Self(one)
    }

    /// Records that an update was acknowledged as durable.
    pub fn acknowledge(&self, change: u64) {
        lock().as_mut().unwrap().events.push(Event::Told(change));
    }

    pub fn events(&self) -> Vec<Event> {
        lock().as_ref().unwrap().events.clone()
    }

    /// Makes calls fail from now on. Calls are counted from 0 again.
    pub fn set_fault(&self, fault: Option<Fault>) {
        let mut record = lock();
        let record = record.as_mut().unwrap();
        (record.fault, record.calls, record.failed) = (fault, 0, 0);
    }

    /// The number of calls since the fault was set, and how many of them failed.
    pub fn calls(&self) -> (u64, u64) {
        let record = lock();
        let record = record.as_ref().unwrap();
        (record.calls, record.failed)
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        *lock() = None;
    }
}

fn lock() -> MutexGuard<'static, Option<Record>> {
    RECORD.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Record {
    /// The name of a path below the root.
    fn name(&self, path: &Path) -> Option<String> {
        // Parent folders may be links; the last part need not exist.
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let whole =
            if path == self.root { self.root.clone() } else { parent.canonicalize().ok()?.join(path.file_name()?) };
        Some(whole.strip_prefix(&self.root).ok()?.to_str()?.to_owned())
    }

    /// The number of the file that is open under a descriptor.
    fn file(&self, fd: RawFd) -> Option<u64> {
        self.files.get(&inode(fd)?).copied()
    }

    /// Counts a call that changes a file. Returns the error if it has to fail.
    fn fails(&mut self) -> Option<c_int> {
        let number = self.calls;
        self.calls += 1;
        let fault = self.fault?;
        let fails = number >= fault.from && number - fault.from < fault.count;
        self.failed += u64::from(fails);
        fails.then_some(fault.errno)
    }
}

fn inode(fd: RawFd) -> Option<u64> {
    // SAFETY: a zeroed stat is valid, and the call writes to one only.
    unsafe {
        let mut facts: libc::stat = std::mem::zeroed();
        (libc::fstat(fd, &raw mut facts) == 0).then_some(facts.st_ino)
    }
}

fn path_of(fd: RawFd) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{fd}")).ok()
}

/// # Safety
/// The text must end in a zero.
unsafe fn path(text: *const c_char) -> PathBuf {
    // SAFETY: by contract.
    PathBuf::from(OsStr::from_bytes(unsafe { CStr::from_ptr(text) }.to_bytes()))
}

fn refuse(errno: c_int) -> c_long {
    // SAFETY: this thread's own.
    unsafe { *libc::__errno_location() = errno };
    -1
}

/// A call that changes the name at `path`; `event` describes it after a success.
fn change(
    path: &Path,
    call: impl FnOnce() -> c_long,
    event: impl FnOnce(String, &mut Record) -> Option<Event>,
) -> c_long {
    let mut record = lock();
    let Some(record) = record.as_mut() else { return call() };
    let Some(name) = record.name(path) else { return call() };
    if let Some(errno) = record.fails() {
        return refuse(errno);
    }
    let result = call();
    if result >= 0
        && let Some(event) = event(name, record)
    {
        record.events.push(event);
    }
    result
}

/// A call that changes or syncs an open file.
fn touch(fd: RawFd, call: impl FnOnce() -> c_long, event: impl FnOnce(u64, c_long) -> Event) -> c_long {
    let mut record = lock();
    let Some(record) = record.as_mut() else { return call() };
    let Some(file) = record.file(fd) else { return call() };
    if let Some(errno) = record.fails() {
        return refuse(errno);
    }
    let result = call();
    if result >= 0 {
        record.events.push(event(file, result));
    }
    result
}

// SAFETY of all below: they take the arguments of the functions of the same names, and pass them on. The bytes of a
// write are readable, since the kernel has just read them.

fn open_at(folder: c_int, name: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    // SAFETY: see above.
    let call = || unsafe { libc::syscall(libc::SYS_openat, folder, name, flags | libc::O_LARGEFILE, mode) };
    // SAFETY: see above.
    let mut path = unsafe { path(name) };
    if flags & (libc::O_CREAT | libc::O_TRUNC) == 0 {
        return call() as c_int;
    }
    if folder != libc::AT_FDCWD
        && let Some(base) = path_of(folder)
    {
        path = base.join(path);
    }
    let there = path.symlink_metadata().is_ok();
    let made = change(&path, call, |name, record| {
        // The caller gets the descriptor after this; the file is looked up by its path.
        let number = std::os::unix::fs::MetadataExt::ino(&path.metadata().ok()?);
        if there {
            let file = *record.files.get(&number)?;
            return (flags & libc::O_TRUNC != 0).then_some(Event::Truncate(file, 0));
        }
        record.next += 1;
        record.files.insert(number, record.next);
        Some(Event::Create(name, record.next))
    });
    made as c_int
}

#[unsafe(no_mangle)]
extern "C" fn open(name: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    open_at(libc::AT_FDCWD, name, flags, mode)
}

#[unsafe(no_mangle)]
extern "C" fn open64(name: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    open_at(libc::AT_FDCWD, name, flags, mode)
}

#[unsafe(no_mangle)]
extern "C" fn openat(folder: c_int, name: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    open_at(folder, name, flags, mode)
}

#[unsafe(no_mangle)]
extern "C" fn openat64(folder: c_int, name: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    open_at(folder, name, flags, mode)
}

fn bytes(from: *const c_void, count: c_long) -> Vec<u8> {
    // SAFETY: see above.
    unsafe { std::slice::from_raw_parts(from.cast(), count as usize) }.to_vec()
}

#[unsafe(no_mangle)]
extern "C" fn write(fd: c_int, from: *const c_void, count: size_t) -> ssize_t {
    // SAFETY: see above.
    let call = || unsafe { libc::syscall(libc::SYS_write, fd, from, count) };
    touch(fd, call, |file, written| {
        // SAFETY: see above.
        let end = unsafe { libc::syscall(libc::SYS_lseek, fd, 0, libc::SEEK_CUR) };
        Event::Write(file, (end - written) as u64, bytes(from, written))
    }) as ssize_t
}

fn write_at(fd: c_int, from: *const c_void, count: size_t, offset: off_t) -> ssize_t {
    // SAFETY: see above.
    let call = || unsafe { libc::syscall(libc::SYS_pwrite64, fd, from, count, offset) };
    touch(fd, call, |file, written| Event::Write(file, offset as u64, bytes(from, written))) as ssize_t
}

#[unsafe(no_mangle)]
extern "C" fn pwrite(fd: c_int, from: *const c_void, count: size_t, offset: off_t) -> ssize_t {
    write_at(fd, from, count, offset)
}

#[unsafe(no_mangle)]
extern "C" fn pwrite64(fd: c_int, from: *const c_void, count: size_t, offset: off_t) -> ssize_t {
    write_at(fd, from, count, offset)
}

#[unsafe(no_mangle)]
extern "C" fn writev(fd: c_int, parts: *const libc::iovec, count: c_int) -> ssize_t {
    // SAFETY: see above.
    let call = || unsafe { libc::syscall(libc::SYS_writev, fd, parts, count) };
    touch(fd, call, |file, written| {
        // SAFETY: see above.
        let (end, parts) = unsafe {
            (libc::syscall(libc::SYS_lseek, fd, 0, libc::SEEK_CUR), std::slice::from_raw_parts(parts, count as usize))
        };
        let mut all: Vec<u8> = parts.iter().flat_map(|part| bytes(part.iov_base, part.iov_len as c_long)).collect();
        all.truncate(written as usize);
        Event::Write(file, (end - written) as u64, all)
    }) as ssize_t
}

fn set_length(fd: c_int, length: off_t) -> c_int {
    // SAFETY: see above.
    let call = || unsafe { libc::syscall(libc::SYS_ftruncate, fd, length) };
    touch(fd, call, |file, _| Event::Truncate(file, length as u64)) as c_int
}

#[unsafe(no_mangle)]
extern "C" fn ftruncate(fd: c_int, length: off_t) -> c_int {
    set_length(fd, length)
}

#[unsafe(no_mangle)]
extern "C" fn ftruncate64(fd: c_int, length: off_t) -> c_int {
    set_length(fd, length)
}

/// A folder becomes durable when it is synced, as a file does.
fn sync(fd: c_int, number: c_long) -> c_int {
    // SAFETY: see above.
    let call = || unsafe { libc::syscall(number, fd) };
    let folder = path_of(fd).filter(|path| path.is_dir());
    match folder {
        Some(folder) => change(&folder, call, |name, _| Some(Event::SyncFolder(name))) as c_int,
        None => touch(fd, call, |file, _| Event::SyncFile(file)) as c_int,
    }
}

#[unsafe(no_mangle)]
extern "C" fn fsync(fd: c_int) -> c_int {
    sync(fd, libc::SYS_fsync)
}

#[unsafe(no_mangle)]
extern "C" fn fdatasync(fd: c_int) -> c_int {
    sync(fd, libc::SYS_fdatasync)
}

#[unsafe(no_mangle)]
extern "C" fn rename(from: *const c_char, to: *const c_char) -> c_int {
    // SAFETY: see above.
    let (call, old, new) = unsafe { (|| libc::syscall(libc::SYS_rename, from, to), path(from), path(to)) };
    change(&new, call, |name, record| Some(Event::Rename(record.name(&old)?, name))) as c_int
}

#[unsafe(no_mangle)]
extern "C" fn unlink(name: *const c_char) -> c_int {
    // SAFETY: see above.
    let (call, path) = unsafe { (|| libc::syscall(libc::SYS_unlink, name), path(name)) };
    change(&path, call, |name, _| Some(Event::Remove(name))) as c_int
}

#[unsafe(no_mangle)]
extern "C" fn unlinkat(folder: c_int, name: *const c_char, flags: c_int) -> c_int {
    // SAFETY: see above.
    let (call, mut path) = unsafe { (|| libc::syscall(libc::SYS_unlinkat, folder, name, flags), path(name)) };
    if let Some(base) = path_of(folder) {
        path = base.join(path);
    }
    change(&path, call, |name, _| Some(Event::Remove(name))) as c_int
}

#[unsafe(no_mangle)]
extern "C" fn rmdir(name: *const c_char) -> c_int {
    // SAFETY: see above.
    let (call, path) = unsafe { (|| libc::syscall(libc::SYS_rmdir, name), path(name)) };
    change(&path, call, |name, _| Some(Event::Remove(name))) as c_int
}

#[unsafe(no_mangle)]
extern "C" fn mkdir(name: *const c_char, mode: mode_t) -> c_int {
    // SAFETY: see above.
    let (call, path) = unsafe { (|| libc::syscall(libc::SYS_mkdir, name, mode), path(name)) };
    change(&path, call, |name, _| Some(Event::MakeFolder(name))) as c_int
}

#[test]
fn every_change_of_a_file_is_recorded() {
    use std::fs::{self, File};
    use std::io::Write as _;
    use std::os::unix::fs::FileExt as _;

    let folder = pagoda_test_support::Folder::new();
    let recording = Recording::start(folder.path());
    let at = |name: &str| folder.path().join(name);
    fs::create_dir_all(at("a/b")).unwrap();
    let mut file = File::create(at("a/b/file")).unwrap();
    file.write_all(b"hello").unwrap();
    file.write_all_at(b"J", 0).unwrap();
    file.set_len(8).unwrap();
    file.sync_data().unwrap();
    fs::rename(at("a/b/file"), at("a/other")).unwrap();
    File::open(at("a")).unwrap().sync_all().unwrap();
    fs::write(at("gone"), "x").unwrap();
    fs::remove_file(at("gone")).unwrap();
    fs::remove_dir_all(at("a/b")).unwrap();
    fs::write(std::env::temp_dir().join("pagoda-elsewhere"), "not below the folder").unwrap();
    let image = power::killed(&recording.events());
    assert_eq!(image.files, [("a/other".to_owned(), b"Jello\0\0\0".to_vec())].into());
    assert_eq!(image.folders, ["a".to_owned()].into());
    recording.set_fault(Some(Fault { from: 0, count: 1, errno: libc::ENOSPC }));
    assert_eq!(fs::write(at("full"), "x").unwrap_err().raw_os_error(), Some(libc::ENOSPC));
    assert_eq!(recording.calls(), (1, 1));
}
