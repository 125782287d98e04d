//! The parts of a table, as a format reader finds them in its files.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::embedding::row::RowType;
use crate::error::{Error, Result, Status};

/// Facts that the files of a source do not contain.
#[derive(Clone, Debug, Default)]
pub struct SourceOptions {
    /// The number of elements of a row. Required for HugeCTR folders; checked against other files if given.
    pub dim: Option<u32>,
    /// Whether the `key` file of a HugeCTR folder has 32-bit keys. Otherwise they have 64 bits.
    pub keys_are_32_bit: bool,
    /// The tensor of the rows in a safetensors file. `None`: `rows`, `weight` or `embeddings`.
    pub rows_tensor: Option<String>,
    /// The tensor of the keys in a safetensors file. `None`: `keys`; without that tensor the index of a row is its key.
    pub keys_tensor: Option<String>,
    /// The tensor of the scales of int8 rows in a safetensors file. `None`: `scales`.
    pub scales_tensor: Option<String>,
}

/// The parts of a table.
pub(super) struct Columns {
    pub(super) len: u64,
    pub(super) dim: u64,
    pub(super) keys: Option<(Column, KeyType)>,
    pub(super) rows: Column,
    pub(super) element: Element,
    pub(super) scales: Option<Column>,
}

/// The type of the elements of rows in the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Element {
    F32,
    F16,
    /// Converted to f32.
    Bf16,
    I8,
}

impl Element {
    pub(super) fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::I8 => 1,
        }
    }

    pub(super) fn row_type(self) -> RowType {
        match self {
            Self::F32 | Self::Bf16 => RowType::F32,
            Self::F16 => RowType::F16,
            Self::I8 => RowType::I8,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeyType {
    /// Signed or unsigned: the bits are taken as they are.
    Bits64,
    Bits32,
}

/// A contiguous part of a file.
///
/// It is read and not mapped: it is needed once and in order. If the file is truncated meanwhile, a read returns an
/// error, and a mapping would raise a signal.
#[derive(Debug)]
pub(super) struct Column {
    pub(super) file: Arc<File>,
    pub(super) path: PathBuf,
    pub(super) start: u64,
}

impl Column {
    /// Reads `count` items of `bytes` bytes each.
    pub(super) fn read(&self, first: u64, count: usize, bytes: usize) -> Result<Vec<u8>> {
        let mut buffer = vec![0; count * bytes];
        let at = self.start + first * bytes as u64;
        self.file.read_exact_at(&mut buffer, at).map_err(|error| {
            let what = match error.kind() {
                io::ErrorKind::UnexpectedEof => "it has become shorter since it was opened".into(),
                _ => error.to_string(),
            };
            let message = format!("{}: {} bytes at {at} can not be read: {what}", self.path.display(), buffer.len());
            Error::new(Status::Io, message)
        })?;
        Ok(buffer)
    }
}

/// Opens a file and returns its length.
pub(super) fn open_file(path: &Path) -> Result<(Arc<File>, u64)> {
    let opened = File::open(path).and_then(|file| {
        let facts = file.metadata()?;
        if facts.is_file() { Ok((Arc::new(file), facts.len())) } else { Err(io::Error::other("it is no file")) }
    });
    opened.map_err(|error| {
        let status = if error.kind() == io::ErrorKind::NotFound { Status::NotFound } else { Status::Io };
        Error::new(status, format!("{} can not be opened: {error}", path.display()))
    })
}

/// Reads `buffer.len()` bytes of a file.
pub(super) fn read_at(file: &File, path: &Path, at: u64, buffer: &mut [u8]) -> Result<()> {
    file.read_exact_at(buffer, at)
        .map_err(|error| Error::new(Status::Io, format!("{} can not be read: {error}", path.display())))
}

/// An error about the contents of a file.
pub(super) fn wrong(path: &Path, message: impl AsRef<str>) -> Error {
    Error::new(Status::InvalidArgument, format!("{}: {}", path.display(), message.as_ref()))
}
