//! Locks of table files: any number of readers, or one writer.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::error::{Error, Result, Status};
use crate::files::Locked;

/// Opens a file and locks it, exclusively if `alone`.
pub(super) fn open_locked(path: &Path, options: &OpenOptions, alone: bool) -> Result<Locked> {
    loop {
        let file = options.open(path).map_err(|error| {
            let status = if error.kind() == io::ErrorKind::NotFound { Status::NotFound } else { Status::Io };
            let hint = match error.kind() {
                io::ErrorKind::NotFound => ". Build the table first",
                io::ErrorKind::PermissionDenied if alone => ". Check the permissions, or open the table read-only",
                _ => "",
            };
            Error::new(status, format!("the table {} can not be opened: {error}{hint}", path.display()))
        })?;
        match if alone { file.try_lock() } else { file.try_lock_shared() } {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let message = format!(
                    "the table {} is in use: either any number can have it open read-only, or one can write to it",
                    path.display()
                );
                return Err(Error::new(Status::Busy, message));
            }
            Err(TryLockError::Error(error)) => {
                return Err(Error::new(Status::Io, format!("{} can not be locked: {error}", path.display())));
            }
        }
        // A build may have replaced the file before it was locked.
        if is_at(&file, path) {
            return Ok(Locked(file));
        }
    }
}

fn is_at(file: &File, path: &Path) -> bool {
    let place = |facts: std::fs::Metadata| (facts.dev(), facts.ino());
    match (file.metadata(), std::fs::metadata(path)) {
        (Ok(file), Ok(path)) => place(file) == place(path),
        _ => false,
    }
}
