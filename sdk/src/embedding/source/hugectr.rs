//! Reads HugeCTR's sparse model folders: all keys in the file `key`, all rows in `emb_vector`, without headers.

use std::path::Path;

use super::columns::{Column, Columns, Element, KeyType, SourceOptions, open_file, wrong};
use crate::error::{Error, Result};

pub(super) fn open(folder: &Path, options: &SourceOptions) -> Result<Columns> {
    let dim = options.dim.map(u64::from).filter(|&dim| dim > 0).ok_or_else(|| {
        let message =
            format!("{}: a HugeCTR folder does not say how many numbers a row has: name it", folder.display());
        Error::invalid("dim", message)
    })?;
    let (keys_path, rows_path) = (folder.join("key"), folder.join("emb_vector"));
    let ((keys, keys_len), (rows, rows_len)) = (open_file(&keys_path)?, open_file(&rows_path)?);
    let (key_type, key_bytes) = if options.keys_are_32_bit { (KeyType::Bits32, 4) } else { (KeyType::Bits64, 8) };
    if keys_len % key_bytes != 0 {
        return Err(wrong(&keys_path, format!("{keys_len} bytes are no whole number of keys of {key_bytes} bytes")));
    }
    let len = keys_len / key_bytes;
    let expected = len.checked_mul(4 * dim);
    if expected != Some(rows_len) {
        let message = format!(
            "{rows_len} bytes are not the {} that {len} rows of {dim} f32 take: `key` has {len} keys of {key_bytes} \
             bytes. Check the dim and whether keys have 32 bits",
            expected.unwrap_or(u64::MAX)
        );
        return Err(wrong(&rows_path, message));
    }
    Ok(Columns {
        len,
        dim,
        keys: Some((Column { file: keys, path: keys_path, start: 0 }, key_type)),
        rows: Column { file: rows, path: rows_path, start: 0 },
        element: Element::F32,
        scales: None,
    })
}

#[cfg(test)]
mod tests {
    use std::fs::write;

    use pagoda_test_support::Folder;

    use super::super::Source;
    use super::super::tests::all;
    use super::*;

    fn bytes<const N: usize>(items: impl IntoIterator<Item = [u8; N]>) -> Vec<u8> {
        items.into_iter().flatten().collect()
    }

    #[test]
    fn keys_and_rows_come_from_their_files() {
        let folder = Folder::new();
        let keys = [1_i64 << 40, -3, 0];
        write(folder.path().join("key"), bytes(keys.map(i64::to_le_bytes))).unwrap();
        write(
            folder.path().join("emb_vector"),
            bytes([0.5_f32, 1.0, f32::INFINITY, 3.0, 4.0, 5.0].map(f32::to_le_bytes)),
        )
        .unwrap();
        let options = SourceOptions { dim: Some(2), ..SourceOptions::default() };
        let source = Source::open(folder.path(), &options).unwrap();
        for at_a_time in [1, 2, 100] {
            let rows = vec![vec![0.5, 1.0], vec![f32::INFINITY, 3.0], vec![4.0, 5.0]];
            assert_eq!(all(&source, at_a_time), (keys.to_vec(), rows));
        }
        // The sizes only tell that something is wrong, not what.
        for dim in [1, 3] {
            let error = Source::open(folder.path(), &SourceOptions { dim: Some(dim), ..options.clone() }).unwrap_err();
            assert!(error.message().contains("emb_vector: 24 bytes are not the"), "{error}");
        }
        assert_eq!(Source::open(folder.path(), &SourceOptions::default()).unwrap_err().argument(), Some("dim"));
    }

    #[test]
    fn keys_of_32_bits_keep_their_sign() {
        let folder = Folder::new();
        write(folder.path().join("key"), bytes([7_i32, -7].map(i32::to_le_bytes))).unwrap();
        write(folder.path().join("emb_vector"), bytes([0.5_f32, 1.0].map(f32::to_le_bytes))).unwrap();
        let options = SourceOptions { dim: Some(1), keys_are_32_bit: true, ..SourceOptions::default() };
        let source = Source::open(folder.path(), &options).unwrap();
        assert_eq!(all(&source, 9).0, [7, -7]);
    }

    #[test]
    fn files_that_do_not_fit_each_other_are_refused() {
        let folder = Folder::new();
        let options = SourceOptions { dim: Some(1), ..SourceOptions::default() };
        write(folder.path().join("key"), [0; 15]).unwrap();
        let error = Source::open(folder.path(), &options).unwrap_err();
        assert!(error.message().contains("emb_vector"), "{error}");
        write(folder.path().join("emb_vector"), [0; 4]).unwrap();
        let error = Source::open(folder.path(), &options).unwrap_err();
        assert!(error.message().contains("key: 15 bytes are no whole number"), "{error}");
        write(folder.path().join("key"), []).unwrap();
        assert!(Source::open(folder.path(), &options).is_err());
        write(folder.path().join("emb_vector"), []).unwrap();
        assert!(Source::open(folder.path(), &options).unwrap().is_empty());
    }

    #[test]
    fn a_file_that_becomes_shorter_is_an_error_when_it_is_read() {
        let folder = Folder::new();
        write(folder.path().join("key"), [0; 16]).unwrap();
        write(folder.path().join("emb_vector"), [0; 8]).unwrap();
        let source = Source::open(folder.path(), &SourceOptions { dim: Some(1), ..SourceOptions::default() }).unwrap();
        std::fs::OpenOptions::new().write(true).open(folder.path().join("emb_vector")).unwrap().set_len(7).unwrap();
        let chunks: Vec<_> = source.chunks(1).collect();
        assert!(chunks[0].is_ok());
        let error = chunks[1].as_ref().unwrap_err();
        assert!(error.message().contains("emb_vector: 4 bytes at 4 can not be read: it has become shorter"), "{error}");
    }
}
