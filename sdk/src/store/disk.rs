//! The disk under a store, as a trait: tests inject faults by another one.

use std::any::Any;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, IoSlice, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::error::{Error, Result, Status};
use crate::files::{Locked, make_folder};
use crate::sync::Mutex;
use memmap2::{Advice, MmapOptions, MmapRaw};

/// The folder of a store. All access to segment files goes through it.
pub trait Disk: Send + Sync {
    /// The folder, for messages.
    fn path(&self) -> &Path;

    /// Makes the folder, and those above it, if they are missing.
    fn make_folder(&self) -> io::Result<()>;

    /// The names of what is in the folder.
    fn list(&self) -> io::Result<Vec<String>>;

    /// Locks the folder until the result is dropped; BUSY if another store has it.
    fn lock(&self) -> Result<Box<dyn Any + Send + Sync>>;

    /// Makes a new file, which must not exist yet. The store writes at most `capacity` bytes to it.
    fn create(&self, name: &str, capacity: u64) -> io::Result<Box<dyn DiskFile>>;

    /// Opens a file to read and append. It never grows beyond `capacity`, or beyond its present length if that is more.
    fn open(&self, name: &str, capacity: u64) -> io::Result<Box<dyn DiskFile>>;

    /// Removes a file. Views of it stay valid while its [`DiskFile`] lives.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Makes what was created and removed in the folder durable.
    fn sync(&self) -> io::Result<()>;
}

/// A segment file: written by one thread, always at its end; read by any.
pub trait DiskFile: Send + Sync {
    /// Writes all the parts, one after the other, at `offset`, which is the end of the file. After an error any part of
    /// them may be there.
    fn write_at(&self, offset: u64, parts: &[&[u8]]) -> io::Result<()>;

    /// Makes everything written durable.
    fn sync(&self) -> io::Result<()>;

    /// How long the file is.
    fn len(&self) -> io::Result<u64>;

    /// Whether it is empty.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Truncates the file. The caller has no view of the part that is cut off, and asks for none before it is written
    /// again.
    fn truncate(&self, len: u64) -> io::Result<()>;

    /// Ends writing, when everything is durable: frees what only writing needs. Views stay valid; `sync` does nothing
    /// from then on.
    fn close(&self) {}

    /// A view of the bytes at `offset`, which does not change while it lives. The range lies within one `write_at`, or
    /// within the file as it was opened; any other range is an error.
    fn view(&self, offset: u64, len: usize) -> io::Result<&[u8]>;
}

/// The time, in milliseconds since 1970.
pub trait Clock: Send + Sync {
    /// Now.
    fn now(&self) -> u64;
}

/// The time of the machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct RealClock;

impl Clock for RealClock {
    fn now(&self) -> u64 {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64)
    }
}

/// A folder of the file system.
#[derive(Clone, Debug)]
pub struct RealDisk {
    path: PathBuf,
}

impl RealDisk {
    /// The folder, which need not exist yet.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }
}

impl Disk for RealDisk {
    fn path(&self) -> &Path {
        &self.path
    }

    fn make_folder(&self) -> io::Result<()> {
        make_folder(&self.path)
    }

    fn list(&self) -> io::Result<Vec<String>> {
        fs::read_dir(&self.path)?.map(|item| Ok(item?.file_name().to_string_lossy().into_owned())).collect()
    }

    fn lock(&self) -> Result<Box<dyn Any + Send + Sync>> {
        let path = self.path.join(super::LOCK);
        let failed = |error: io::Error| {
            Error::new(Status::Io, format!("{} can not be locked: {error}. Check the permissions", path.display()))
        };
        let mut file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path).map_err(failed)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut owner = String::new();
                let _ = file.read_to_string(&mut owner);
                let owner = owner.trim();
                let owner = if owner.is_empty() { "another process".into() } else { format!("process {owner}") };
                return Err(Error::new(
                    Status::Busy,
                    format!(
                        "the store {} is in use by {owner}: one process at a time can have it open, and only once",
                        self.path.display()
                    ),
                ));
            }
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        // Only for the message above; a full disk must not keep the store from opening.
        let _ = file.set_len(0).and_then(|()| file.write_all(std::process::id().to_string().as_bytes()));
        Ok(Box::new(Locked(file)))
    }

    fn create(&self, name: &str, capacity: u64) -> io::Result<Box<dyn DiskFile>> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(self.path.join(name))?;
        Ok(Box::new(RealFile::new(file, capacity)?))
    }

    fn open(&self, name: &str, capacity: u64) -> io::Result<Box<dyn DiskFile>> {
        let file = OpenOptions::new().read(true).write(true).open(self.path.join(name))?;
        Ok(Box::new(RealFile::new(file, capacity)?))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.path.join(name))
    }

    fn sync(&self) -> io::Result<()> {
        File::open(&self.path)?.sync_all()
    }
}

struct RealFile {
    file: Mutex<Handle>,
    /// The whole capacity is mapped once, also beyond the end of the file, so that views never move.
    map: MmapRaw,
}

/// A file, or after `close` only its length: a store may have more segments than a process may have open files.
enum Handle {
    Open(Arc<File>),
    Closed(u64),
}

impl RealFile {
    fn new(file: File, capacity: u64) -> io::Result<Self> {
        let capacity = capacity.max(file.metadata()?.len()).max(1);
        let capacity = usize::try_from(capacity).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
        let map = MmapOptions::new().len(capacity).map_raw_read_only(&file)?;
        Ok(Self { file: Mutex::new(Handle::Open(Arc::new(file))), map })
    }

    /// Reads the pages of a range into memory. A mapped page that the disk can not read raises SIGBUS when it is
    /// touched; populating it first returns an error instead.
    fn read_in(&self, from: usize, len: usize) -> io::Result<()> {
        // If all pages are in memory, the last one tells whether the file was truncated meanwhile.
        let (from, len) = if self.is_resident(from, len) { (from + len - 1, 1) } else { (from, len) };
        match self.map.advise_range(Advice::PopulateRead, from, len) {
            // Kernels before 5.14 do not know this advice.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => self.inside(from, len),
            result => result,
        }
    }

    /// An error if the file is shorter than the end of a range.
    fn inside(&self, from: usize, len: usize) -> io::Result<()> {
        let inside = (from + len) as u64 <= self.len()?;
        if inside { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    /// Whether all pages of a range are in memory. This looks at the page table alone. Populating pages that are there
    /// costs a tenth of reading them: the kernel touches its record of each page, which is in no cache.
    fn is_resident(&self, from: usize, len: usize) -> bool {
        // The smallest page size; on systems with larger pages some are asked about twice.
        const PAGE: usize = 4096;
        let first = from / PAGE * PAGE;
        let mut pages = vec![0_u8; (from + len - first).div_ceil(PAGE)];
        // SAFETY: the range is inside the mapping, which is of whole pages and begins with one; there is a byte for
        // each.
        let asked = unsafe {
            libc::mincore(self.map.as_mut_ptr().add(first).cast(), from + len - first, pages.as_mut_ptr().cast())
        };
        asked == 0 && pages.iter().all(|page| page & 1 == 1)
    }

    fn file(&self) -> io::Result<Arc<File>> {
        match &*self.file.lock() {
            Handle::Open(file) => Ok(Arc::clone(file)),
            Handle::Closed(_) => Err(io::Error::other("the segment is closed to writing")),
        }
    }
}

impl DiskFile for RealFile {
    fn write_at(&self, offset: u64, parts: &[&[u8]]) -> io::Result<()> {
        let mut slices: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
        let mut slices = &mut slices[..];
        let file = self.file()?;
        let mut file = &*file;
        file.seek(SeekFrom::Start(offset))?;
        IoSlice::advance_slices(&mut slices, 0);
        while !slices.is_empty() {
            match file.write_vectored(slices) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => IoSlice::advance_slices(&mut slices, written),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.file().map_or(Ok(()), |file| file.sync_data())
    }

    fn len(&self) -> io::Result<u64> {
        match &*self.file.lock() {
            Handle::Open(file) => Ok(file.metadata()?.len()),
            Handle::Closed(len) => Ok(*len),
        }
    }

    fn truncate(&self, len: u64) -> io::Result<()> {
        self.file()?.set_len(len)
    }

    fn close(&self) {
        // If its length can not be read the file stays open.
        if let Ok(len) = self.len() {
            *self.file.lock() = Handle::Closed(len);
        }
    }

    fn view(&self, offset: u64, len: usize) -> io::Result<&[u8]> {
        if len == 0 {
            return Ok(&[]);
        }
        let inside =
            usize::try_from(offset).ok().filter(|&from| from.checked_add(len).is_some_and(|end| end <= self.map.len()));
        let from = inside.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?;
        self.read_in(from, len)?;
        // SAFETY: the range lies within the mapping, which lives as long as `self`, and within the file, as was just
        // checked. The bytes do not change while the slice lives: the file is only appended to, no part that is viewed
        // is cut off (see the trait), and the lock keeps other stores out.
        Ok(unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(from), len) })
    }
}

#[cfg(test)]
mod tests {
    use pagoda_test_support::Folder;

    use super::*;

    #[test]
    fn what_is_appended_can_be_viewed() {
        let folder = Folder::new();
        let disk = RealDisk::new(folder.path());
        let file = disk.create("x", 1 << 20).unwrap();
        file.write_at(0, &[b"", b"abc", b"defg"]).unwrap();
        let first = file.view(1, 3).unwrap();
        file.write_at(7, &[&[9; 100_000]]).unwrap();
        assert_eq!(first, b"bcd");
        assert_eq!(file.view(100_000, 7).unwrap(), [9; 7]);
        assert_eq!(file.len().unwrap(), 100_007);
        drop(file);
        let file = disk.open("x", 0).unwrap();
        file.close();
        assert_eq!(file.view(0, 7).unwrap(), b"abcdefg");
        assert!(file.sync().is_ok() && file.write_at(100_007, &[b"x"]).is_err());
    }

    #[test]
    fn on_an_old_kernel_the_length_tells_what_can_be_viewed() {
        let folder = Folder::new();
        let path = folder.path().join("x");
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(path).unwrap();
        let file = RealFile::new(file, 1 << 20).unwrap();
        file.write_at(0, &[&[7; 20_000]]).unwrap();
        let check = || {
            assert!(file.inside(0, 20_000).is_ok() && file.inside(19_999, 1).is_ok());
            assert!(file.inside(19_999, 2).is_err());
        };
        check();
        file.close();
        check();
        assert_eq!(file.len().unwrap(), 20_000);
    }

    #[test]
    fn a_file_that_was_cut_is_an_error_not_a_signal() {
        let folder = Folder::new();
        let disk = RealDisk::new(folder.path());
        let file = disk.create("x", 1 << 20).unwrap();
        file.write_at(0, &[&[7; 20_000]]).unwrap();
        OpenOptions::new().write(true).open(folder.path().join("x")).unwrap().set_len(4096).unwrap();
        assert!(file.view(8192, 100).is_err());
        assert!(file.view(1 << 20, 1).is_err());
        assert_eq!(file.view(0, 4096).unwrap(), [7; 4096]);
    }
}
