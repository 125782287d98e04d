//! Readers of tables in the formats of others: safetensors, NumPy arrays, HugeCTR's sparse model folders. A table is
//! read from its beginning to its end in chunks, and never loaded as a whole.

mod columns;
mod files;
pub(super) mod fingerprint;
mod hugectr;
mod npy;
mod safetensors;

use std::path::Path;

use self::columns::{Column, Columns, Element, KeyType, open_file, wrong};
use crate::embedding::row::Layout;
use crate::error::Result;

pub use self::columns::SourceOptions;

/// A table in the files of another program.
#[derive(Debug)]
pub struct Source {
    layout: Layout,
    len: u64,
    /// `None`: the index of a row is its key.
    keys: Option<(Column, KeyType)>,
    rows: Column,
    element: Element,
    scales: Option<Column>,
}

/// Some rows of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Their keys. A key may occur again: the last row counts.
    pub keys: Vec<i64>,
    /// The rows, contiguous, in the layout of the source.
    pub rows: Vec<u8>,
}

impl Source {
    /// Opens the table at a path: a file that ends in `.safetensors` or `.npy`, a folder with `key` and `emb_vector`,
    /// or a folder with `rows.npy`.
    pub fn open(path: impl AsRef<Path>, options: &SourceOptions) -> Result<Self> {
        let path = path.as_ref();
        let columns = Self::columns(path, options)?;
        let source = Self::from_columns(columns, path)?;
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
            // The likely mistake is a path that does not exist, not a file of another kind.
            _ => Err(open_file(path).err().unwrap_or_else(|| {
                wrong(path, "a table comes as .safetensors, as .npy, or as a folder; this file's name ends in neither")
            })),
        }
    }

    fn from_columns(columns: Columns, path: &Path) -> Result<Self> {
        let Columns { len, dim, keys, rows, element, scales } = columns;
        if (element == Element::I8) != scales.is_some() {
            let message = match scales {
                None => "int8 rows need `scales`, one f32 for each row, and there are none",
                Some(_) => "there are `scales`, which only int8 rows have, and the rows are not int8",
            };
            return Err(wrong(path, message));
        }
        let dim = u32::try_from(dim).unwrap_or(u32::MAX);
        let layout = Layout::new(dim, element.row_type()).map_err(|error| wrong(path, error.message()))?;
        Ok(Self { layout, len, keys, rows, element, scales })
    }

    /// The layout of the rows that [`Source::chunks`] returns.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The number of rows. There are fewer keys if some occur more than once.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All rows in order, `rows` at a time.
    ///
    /// # Panics
    /// If `rows` is 0.
    pub fn chunks(&self, rows: usize) -> impl Iterator<Item = Result<Chunk>> + '_ {
        self.chunks_from(0, rows)
    }

    /// As [`Source::chunks`], beginning at the row `first`.
    ///
    /// # Panics
    /// If `rows` is 0.
    pub fn chunks_from(&self, first: u64, rows: usize) -> impl Iterator<Item = Result<Chunk>> + '_ {
        assert!(rows > 0, "a chunk has rows");
        (first..self.len)
            .step_by(rows)
            .map(move |first| self.chunk(first, (self.len - first).min(rows as u64) as usize))
    }

    /// Decodes a row of a chunk for a table with another layout.
    ///
    /// # Errors
    /// If the other layout can not represent a number.
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

#[cfg(test)]
mod tests {
    use pagoda_test_support::Folder;

    use super::*;
    use crate::embedding::row::RowType;
    use crate::error::Status;

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
