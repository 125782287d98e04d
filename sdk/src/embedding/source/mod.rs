//! Tables as they come: safetensors, NumPy arrays, HugeCTR's sparse model folders. Nothing is loaded whole: a table is
//! read from its beginning to its end, in chunks.

mod hugectr;
mod npy;
mod safetensors;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::row::{Layout, RowType};
use crate::error::{Error, Result, Status};

/// What a table that comes as a folder may consist of.
const PARTS: [&str; 5] = ["emb_vector", "key", "keys.npy", "rows.npy", "scales.npy"];

/// The files that the table at a path is read from, in order; what else lies in a folder is none of it.
pub(super) fn files(path: &Path) -> Vec<PathBuf> {
    if !path.is_dir() {
        return vec![path.to_owned()];
    }
    PARTS.iter().map(|name| path.join(name)).filter(|file| file.exists()).collect()
}

/// What a source can not tell by itself.
#[derive(Clone, Debug, Default)]
pub struct SourceOptions {
    /// Numbers a row has. HugeCTR's folders need it; for others it is checked if given.
    pub dim: Option<u32>,
    /// Whether the `key` file of a HugeCTR folder has 32-bit keys, not 64-bit ones.
    pub keys_are_32_bit: bool,
    /// The name of the rows in a safetensors file; else `rows`, `weight` or `embeddings`.
    pub rows_tensor: Option<String>,
    /// The name of the keys in a safetensors file; else `keys`, and without that the number of a row is its key.
    pub keys_tensor: Option<String>,
    /// The name of the scales of int8 rows in a safetensors file; else `scales`.
    pub scales_tensor: Option<String>,
}

/// A table in someone else's files.
#[derive(Debug)]
pub struct Source {
    layout: Layout,
    len: u64,
    /// Without them the number of a row is its key.
    keys: Option<(Column, KeyType)>,
    rows: Column,
    element: Element,
    scales: Option<Column>,
}

/// Some rows of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Their keys. One may come again later: then the later row counts.
    pub keys: Vec<i64>,
    /// The rows, one after the other, in the layout of the source.
    pub rows: Vec<u8>,
}

impl Source {
    /// Opens what lies at a path: a file that ends in `.safetensors` or `.npy`, a folder with `key` and `emb_vector`, or a
    /// folder with `rows.npy`.
    pub fn open(path: impl AsRef<Path>, options: &SourceOptions) -> Result<Self> {
        let path = path.as_ref();
        let columns = Self::columns(path, options)?;
        let source = columns.into_source(path)?;
        match options.dim {
            Some(dim) if dim as usize != source.layout.dim() => {
                Err(wrong(path, format!("rows have {} numbers, and {dim} were expected", source.layout.dim())))
            }
            _ => Ok(source),
        }
    }

    fn columns(path: &Path, options: &SourceOptions) -> Result<Columns> {
        if path.is_dir() {
            let has = |name: &str| path.join(name).exists();
            return match (has("key"), has("emb_vector"), has("rows.npy")) {
                (false, false, true) => npy::open_folder(path),
                (false, false, false) => Err(wrong(
                    path,
                    "the folder has neither HugeCTR's `key` and `emb_vector` nor NumPy's `rows.npy`: name the folder \
                     that has them",
                )),
                (_, _, true) => Err(wrong(
                    path,
                    "the folder has `rows.npy` beside HugeCTR's `key` or `emb_vector`: move the one that is not meant",
                )),
                _ => hugectr::open(path, options),
            };
        }
        match path.extension().and_then(|ending| ending.to_str()) {
            Some("safetensors") => safetensors::open(path, options),
            Some("npy") => npy::open_rows(path),
            // A file that is not there is more likely than one of another kind.
            _ => Err(open_file(path).err().unwrap_or_else(|| {
                wrong(path, "a table comes as .safetensors, as .npy, or as a folder; this file's name ends in neither")
            })),
        }
    }

    /// What the rows look like that [`Source::chunks`] gives.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// How many rows there are; more than keys if some come twice.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All rows from the first to the last, `rows` at a time.
    ///
    /// # Panics
    /// If `rows` is 0.
    pub fn chunks(&self, rows: usize) -> impl Iterator<Item = Result<Chunk>> + '_ {
        self.chunks_from(0, rows)
    }

    /// As [`Source::chunks`], from one row on.
    ///
    /// # Panics
    /// If `rows` is 0.
    pub fn chunks_from(&self, first: u64, rows: usize) -> impl Iterator<Item = Result<Chunk>> + '_ {
        assert!(rows > 0, "a chunk has rows");
        (first..self.len)
            .step_by(rows)
            .map(move |first| self.chunk(first, (self.len - first).min(rows as u64) as usize))
    }

    /// Reads a row of a chunk for a table that keeps its rows in another layout; an error if that can not hold them.
    pub(super) fn decode_for(&self, to: Layout, key: i64, row: &[u8], numbers: &mut [f32]) -> Result<()> {
        self.layout.decode(row, numbers);
        match to.refuses(numbers) {
            Some(why) => Err(wrong(
                &self.rows.path,
                format!(
                    "the row of key {key}: {why}; correct it, or keep the table's rows as f32 (row_type_per_table)"
                ),
            )),
            None => Ok(()),
        }
    }

    fn chunk(&self, first: u64, count: usize) -> Result<Chunk> {
        let keys = match &self.keys {
            None => (first..first + count as u64).map(u64::cast_signed).collect(),
            Some((column, KeyType::Bits64)) => {
                let bytes = column.read(first, count, 8)?;
                bytes.as_chunks().0.iter().map(|key| i64::from_le_bytes(*key)).collect()
            }
            Some((column, KeyType::Bits32)) => {
                let bytes = column.read(first, count, 4)?;
                bytes.as_chunks().0.iter().map(|key| i64::from(i32::from_le_bytes(*key))).collect()
            }
        };
        let dim = self.layout.dim();
        let rows = self.rows.read(first, count, dim * self.element.bytes())?;
        let rows = match (self.element, &self.scales) {
            (Element::Bf16, _) => {
                rows.as_chunks().0.iter().flat_map(|&[low, high]: &[u8; 2]| [0, 0, low, high]).collect()
            }
            (Element::I8, Some(scales)) => {
                let scales = scales.read(first, count, 4)?;
                let pairs = scales.chunks_exact(4).zip(rows.chunks_exact(dim));
                let mut with_scales = Vec::with_capacity(count * self.layout.row_bytes());
                pairs.for_each(|(scale, row)| with_scales.extend(scale.iter().chain(row)));
                with_scales
            }
            _ => rows,
        };
        Ok(Chunk { keys, rows })
    }
}

/// The parts of a table, as one of the formats found them.
struct Columns {
    len: u64,
    dim: u64,
    keys: Option<(Column, KeyType)>,
    rows: Column,
    element: Element,
    scales: Option<Column>,
}

impl Columns {
    fn into_source(self, path: &Path) -> Result<Source> {
        let Self { len, dim, keys, rows, element, scales } = self;
        if (element == Element::I8) != scales.is_some() {
            let message = match scales {
                None => "int8 rows need `scales`, one f32 for each row, and there are none",
                Some(_) => "there are `scales`, which only int8 rows have, and the rows are not int8",
            };
            return Err(wrong(path, message));
        }
        let dim = u32::try_from(dim).unwrap_or(u32::MAX);
        let layout = Layout::new(dim, element.row_type()).map_err(|error| wrong(path, error.message()))?;
        Ok(Source { layout, len, keys, rows, element, scales })
    }
}

/// How the numbers of rows are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Element {
    F32,
    F16,
    /// Read as f32.
    Bf16,
    I8,
}

impl Element {
    fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::I8 => 1,
        }
    }

    fn row_type(self) -> RowType {
        match self {
            Self::F32 | Self::Bf16 => RowType::F32,
            Self::F16 => RowType::F16,
            Self::I8 => RowType::I8,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KeyType {
    /// With a sign or without: the bits count.
    Bits64,
    Bits32,
}

/// Bytes of a file that belong together.
///
/// They are read, not mapped: they are needed once and in order, and a file that someone cuts meanwhile is an error so,
/// and not a signal.
#[derive(Debug)]
struct Column {
    file: Arc<File>,
    path: PathBuf,
    start: u64,
}

impl Column {
    /// Reads `count` items of `bytes` bytes each.
    fn read(&self, first: u64, count: usize, bytes: usize) -> Result<Vec<u8>> {
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

/// Opens a file and gives its length.
fn open_file(path: &Path) -> Result<(Arc<File>, u64)> {
    let opened = File::open(path).and_then(|file| {
        let facts = file.metadata()?;
        if facts.is_file() { Ok((Arc::new(file), facts.len())) } else { Err(io::Error::other("it is no file")) }
    });
    opened.map_err(|error| {
        let status = if error.kind() == io::ErrorKind::NotFound { Status::NotFound } else { Status::Io };
        Error::new(status, format!("{} can not be opened: {error}", path.display()))
    })
}

/// Reads the beginning of a file.
fn read_at(file: &File, path: &Path, at: u64, buffer: &mut [u8]) -> Result<()> {
    file.read_exact_at(buffer, at)
        .map_err(|error| Error::new(Status::Io, format!("{} can not be read: {error}", path.display())))
}

/// A file that is not what it should be.
fn wrong(path: &Path, message: impl AsRef<str>) -> Error {
    Error::new(Status::InvalidArgument, format!("{}: {}", path.display(), message.as_ref()))
}

#[cfg(test)]
mod tests {
    use pagoda_test_support::Folder;

    use super::*;

    /// Everything in a source, its rows as numbers.
    pub(super) fn all(source: &Source, at_a_time: usize) -> (Vec<i64>, Vec<Vec<f32>>) {
        let (mut keys, mut rows) = (Vec::new(), Vec::new());
        for chunk in source.chunks(at_a_time) {
            let chunk = chunk.unwrap();
            assert_eq!(chunk.rows.len(), chunk.keys.len() * source.layout().row_bytes());
            for row in chunk.rows.chunks(source.layout().row_bytes()) {
                let mut numbers = vec![0.0; source.layout().dim()];
                source.layout().decode(row, &mut numbers);
                rows.push(numbers);
            }
            keys.extend(chunk.keys);
        }
        assert_eq!(keys.len() as u64, source.len());
        (keys, rows)
    }

    /// Opens and reads what may be damaged: an error is fine, a panic is not.
    pub(super) fn survive(path: &Path, options: &SourceOptions) -> bool {
        let Ok(source) = Source::open(path, options) else { return false };
        source.chunks(3).all(|chunk| chunk.is_ok())
    }

    #[test]
    fn a_path_that_is_no_table_is_named_with_what_would_be_one() {
        let folder = Folder::new();
        let at = |name: &str| folder.path().join(name);
        let open = |name: &str| Source::open(at(name), &SourceOptions::default()).unwrap_err();
        assert_eq!(open("missing.npy").status(), Status::NotFound);
        assert_eq!(open("missing").status(), Status::NotFound);
        std::fs::write(at("table.csv"), "1,2").unwrap();
        assert!(open("table.csv").message().contains(".safetensors"));
        assert!(open("").message().contains("emb_vector"));
        std::fs::write(at("key"), "").unwrap();
        std::fs::write(at("rows.npy"), "").unwrap();
        assert!(open("").message().contains("beside"));
        std::fs::create_dir(at("folder.safetensors")).unwrap();
        assert!(open("folder.safetensors").message().contains("neither"));
    }

    #[test]
    fn files_that_python_wrote_are_read() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/embedding");
        let rows: Vec<Vec<f32>> =
            (0..3_u8).map(|row| (0..4_u8).map(|place| f32::from(row * 10 + place) + 0.5).collect()).collect();
        let (named, counted) = (vec![-1, 1 << 40, 7], vec![0, 1, 2]);
        for (name, row_type, keys) in [
            ("f32.safetensors", RowType::F32, &named),
            ("f16.safetensors", RowType::F16, &counted),
            ("bf16.safetensors", RowType::F32, &named),
            ("i8.safetensors", RowType::I8, &named),
            ("v1.npy", RowType::F32, &counted),
            ("v2.npy", RowType::F32, &counted),
            ("v3.npy", RowType::F32, &counted),
            ("f16", RowType::F16, &named),
            ("i8", RowType::I8, &named),
        ] {
            let source = Source::open(folder.join(name), &SourceOptions::default()).unwrap();
            assert_eq!(source.layout(), Layout::new(4, row_type).unwrap(), "{name}");
            assert_eq!(all(&source, 2), (keys.clone(), rows.clone()), "{name}");
        }
        for (name, message) in [("fortran.npy", "Fortran order"), ("big_endian.npy", "'>f4'")] {
            let error = Source::open(folder.join(name), &SourceOptions::default()).unwrap_err();
            assert!(error.message().contains(message), "{error}");
        }
    }
}
