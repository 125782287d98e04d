//! Reads NumPy's .npy files: a magic number, the length of the header, the header as a Python dict, then the elements.
//! Versions 1 to 3 differ in the longest header and in its character set.

use std::path::Path;

use super::columns::{Column, Columns, Element, KeyType, open_file, read_at, wrong};
use crate::error::Result;

const MAGIC: &[u8] = b"\x93NUMPY";
/// The longest header: far more than a plain array needs.
const MAX_HEADER: u64 = 1 << 20;

/// Opens one array of rows. The index of a row is its key.
pub(super) fn open_rows(path: &Path) -> Result<Columns> {
    open_parts(path, None, None)
}

/// Opens a folder with `rows.npy`, and `keys.npy` and `scales.npy` if there are any.
pub(super) fn open_folder(folder: &Path) -> Result<Columns> {
    let optional = |name: &str| Some(folder.join(name)).filter(|path| path.exists());
    open_parts(&folder.join("rows.npy"), optional("keys.npy").as_deref(), optional("scales.npy").as_deref())
}

fn open_parts(rows: &Path, keys: Option<&Path>, scales: Option<&Path>) -> Result<Columns> {
    let rows = Array::open(rows)?;
    let &[len, dim] = rows.shape.as_slice() else {
        return Err(rows.wrong("rows have (number of rows, dim)"));
    };
    let element = match rows.kind.as_str() {
        "<f4" => Element::F32,
        "<f2" => Element::F16,
        "|i1" => Element::I8,
        _ => return Err(rows.wrong("rows are '<f4', '<f2' or '|i1'")),
    };
    let one_a_row = |path: &Path, kinds: &[&str]| {
        let array = Array::open(path)?;
        if !kinds.contains(&array.kind.as_str()) || array.shape != [len] {
            let kinds = kinds.join("' or '");
            return Err(array.wrong(&format!("with {len} rows it should be '{kinds}' with the shape ({len},)")));
        }
        Ok(array.column)
    };
    let keys = keys.map(|path| one_a_row(path, &["<i8", "<u8"])).transpose()?;
    let scales = scales.map(|path| one_a_row(path, &["<f4"])).transpose()?;
    Ok(Columns { len, dim, keys: keys.map(|keys| (keys, KeyType::Bits64)), rows: rows.column, element, scales })
}

struct Array {
    /// The name in NumPy, for example `<f4`.
    kind: String,
    shape: Vec<u64>,
    column: Column,
}

impl Array {
    fn open(path: &Path) -> Result<Self> {
        let (file, length) = open_file(path)?;
        let mut start = [0; 12];
        let known = length.min(12) as usize;
        read_at(&file, path, 0, &mut start[..known])?;
        if known < 10 || !start.starts_with(MAGIC) {
            return Err(wrong(path, format!("it has {length} bytes and does not begin as a .npy file does")));
        }
        let (at, size) = match start[6] {
            1 => (10, u64::from(u16::from_le_bytes([start[8], start[9]]))),
            2 | 3 => (12, u64::from(u32::from_le_bytes([start[8], start[9], start[10], start[11]]))),
            version => {
                return Err(wrong(path, format!("it has version {version} of the .npy format; 1 to 3 are known")));
            }
        };
        if size > MAX_HEADER || at + size > length {
            let message =
                format!("the header should have {size} bytes, and the file has {length}: it is damaged or cut");
            return Err(wrong(path, message));
        }
        let mut header = vec![0; size as usize];
        read_at(&file, path, at, &mut header)?;
        let header = parse_header(&header)
            .ok_or_else(|| wrong(path, "the header is damaged: no dict of 'descr', 'fortran_order' and 'shape'"))?;
        let array = Self {
            kind: header.kind,
            shape: header.shape,
            column: Column { file, path: path.to_owned(), start: at + size },
        };
        if header.fortran_order && array.shape.len() > 1 {
            return Err(array.wrong("columns come first (Fortran order). Save numpy.ascontiguousarray(array)"));
        }
        array.check_length(length - at - size)?;
        Ok(array)
    }

    fn check_length(&self, found: u64) -> Result<()> {
        let size = match self.kind.as_str() {
            "|i1" => 1,
            "<f2" => 2,
            "<f4" => 4,
            "<i8" | "<u8" => 8,
            // The caller names the types that it accepts.
            _ => return Ok(()),
        };
        let expected = self.shape.iter().try_fold(size, |product: u64, &size| product.checked_mul(size));
        match expected {
            Some(expected) if expected == found => Ok(()),
            _ => Err(self.wrong(&format!(
                "that takes {} bytes after the header, and the file has {found}",
                expected.unwrap_or(u64::MAX)
            ))),
        }
    }

    fn wrong(&self, message: &str) -> crate::Error {
        let shape: Vec<_> = self.shape.iter().map(u64::to_string).collect();
        let comma = if shape.len() == 1 { "," } else { "" };
        let shape = format!("({}{comma})", shape.join(", "));
        wrong(&self.column.path, format!("it holds '{}' with the shape {shape}: {message}", self.kind))
    }
}

struct Header {
    kind: String,
    fortran_order: bool,
    shape: Vec<u64>,
}

/// Parses the dict: three entries in any order, with the syntax of Python.
fn parse_header(bytes: &[u8]) -> Option<Header> {
    let mut text = Text { rest: bytes };
    let (mut kind, mut fortran_order, mut shape) = (None, None, None);
    text.expect(b'{')?;
    while !text.accept(b'}') {
        let name = text.string()?;
        text.expect(b':')?;
        // A duplicate name is an error, as an unknown name is.
        match name.as_str() {
            "descr" if kind.is_none() => kind = Some(text.string()?),
            "fortran_order" if fortran_order.is_none() => fortran_order = Some(text.boolean()?),
            "shape" if shape.is_none() => shape = Some(text.tuple()?),
            _ => return None,
        }
        if !text.accept(b',') {
            text.expect(b'}')?;
            break;
        }
    }
    text.skip_space();
    text.rest.is_empty().then_some(())?;
    Some(Header { kind: kind?, fortran_order: fortran_order?, shape: shape? })
}

/// The rest of a Python literal.
struct Text<'a> {
    rest: &'a [u8],
}

impl Text<'_> {
    fn skip_space(&mut self) {
        self.rest = self.rest.trim_ascii_start();
    }

    fn accept(&mut self, character: u8) -> bool {
        self.skip_space();
        let rest = self.rest.strip_prefix(&[character]);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn expect(&mut self, character: u8) -> Option<()> {
        self.accept(character).then_some(())
    }

    fn string(&mut self) -> Option<String> {
        self.skip_space();
        let (&quote, rest) = self.rest.split_first().filter(|(first, _)| matches!(first, b'\'' | b'"'))?;
        let end = rest.iter().position(|&byte| byte == quote)?;
        let text = std::str::from_utf8(&rest[..end]).ok()?;
        // Names and types contain no backslash.
        (!text.contains(['\\', '\n'])).then_some(())?;
        self.rest = &rest[end + 1..];
        Some(text.to_owned())
    }

    fn boolean(&mut self) -> Option<bool> {
        self.skip_space();
        for (word, value) in [("True", true), ("False", false)] {
            if let Some(rest) = self.rest.strip_prefix(word.as_bytes()) {
                self.rest = rest;
                return Some(value);
            }
        }
        None
    }

    fn tuple(&mut self) -> Option<Vec<u64>> {
        self.expect(b'(')?;
        let mut sizes = Vec::new();
        while !self.accept(b')') {
            sizes.push(self.number()?);
            if !self.accept(b',') {
                // One number in parentheses without a comma is a number, not a tuple.
                self.expect(b')')?;
                return (sizes.len() > 1).then_some(sizes);
            }
        }
        Some(sizes)
    }

    fn number(&mut self) -> Option<u64> {
        self.skip_space();
        let end = self.rest.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(self.rest.len());
        let (digits, rest) = self.rest.split_at(end);
        // Python 2 wrote an L after long numbers.
        self.rest = rest.strip_prefix(b"L").unwrap_or(rest);
        std::str::from_utf8(digits).ok()?.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use pagoda_test_support::Folder;

    use super::super::tests::{all, survive};
    use super::super::{Source, SourceOptions};
    use super::*;
    use crate::embedding::RowType;

    /// A file as NumPy writes it.
    fn array(version: u8, kind: &str, shape: &str, data: &[u8]) -> Vec<u8> {
        let dict = format!("{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}");
        with_header(version, &format!("{dict:<117}\n"), data)
    }

    fn with_header(version: u8, header: &str, data: &[u8]) -> Vec<u8> {
        let size = match version {
            1 => (header.len() as u16).to_le_bytes().to_vec(),
            _ => (header.len() as u32).to_le_bytes().to_vec(),
        };
        [MAGIC, &[version, 0], &size, header.as_bytes(), data].concat()
    }

    fn floats(numbers: &[f32]) -> Vec<u8> {
        numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
    }

    fn open_bytes(bytes: &[u8]) -> Result<Source> {
        let folder = Folder::new();
        let path = folder.path().join("table.npy");
        std::fs::write(&path, bytes).unwrap();
        Source::open(path, &SourceOptions::default())
    }

    fn open_folder(files: &[(&str, Vec<u8>)]) -> Result<Source> {
        let folder = Folder::new();
        for (name, bytes) in files {
            std::fs::write(folder.path().join(name), bytes).unwrap();
        }
        Source::open(folder.path(), &SourceOptions::default())
    }

    #[test]
    fn one_array_has_its_numbers_as_keys() {
        for version in 1..=3 {
            let source = open_bytes(&array(version, "<f4", "(3, 1)", &floats(&[1.0, f32::MAX, 3.0]))).unwrap();
            assert_eq!(all(&source, 2), (vec![0, 1, 2], vec![vec![1.0], vec![f32::MAX], vec![3.0]]));
        }
        let halves: Vec<u8> = [1.0, 0.5].iter().flat_map(|&x| half::f16::from_f32(x).to_le_bytes()).collect();
        let source = open_bytes(&array(1, "<f2", "(1, 2)", &halves)).unwrap();
        assert_eq!(source.layout().row_type(), RowType::F16);
        assert_eq!(all(&source, 2).1, [[1.0, 0.5]]);
        assert!(open_bytes(&array(1, "<f4", "(0, 4)", &[])).unwrap().is_empty());
    }

    #[test]
    fn a_folder_has_keys_and_scales() {
        let keys: Vec<u8> = [-5_i64, 1 << 33].iter().flat_map(|key| key.to_le_bytes()).collect();
        let source = open_folder(&[
            ("rows.npy", array(1, "|i1", "(2, 2)", &[1, 2, 255, 0])),
            ("scales.npy", array(1, "<f4", "(2,)", &floats(&[0.5, 3.0]))),
            ("keys.npy", array(2, "<u8", "(2,)", &keys)),
        ]);
        assert_eq!(all(&source.unwrap(), 1), (vec![-5, 1 << 33], vec![vec![0.5, 1.0], vec![-3.0, 0.0]]));
        let error = open_folder(&[("rows.npy", array(1, "|i1", "(2, 2)", &[1, 2, 255, 0]))]).unwrap_err();
        assert!(error.message().contains("int8 rows need `scales`"), "{error}");
        let rows = array(1, "<f4", "(1, 1)", &floats(&[1.0]));
        for (kind, shape, data) in [("<i8", "(2,)", 16), ("<i8", "(1, 1)", 8), ("<i4", "(1,)", 4), (">i8", "(1,)", 8)] {
            let keys = array(1, kind, shape, &vec![0; data]);
            let error = open_folder(&[("rows.npy", rows.clone()), ("keys.npy", keys)]).unwrap_err();
            assert!(error.message().contains("keys.npy: it holds") && error.message().contains("(1,)"), "{error}");
        }
    }

    #[test]
    fn headers_are_read_as_python_reads_them() {
        for (header, right) in [
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2), }\n", true),
            ("{\"shape\":(1,2,),\"fortran_order\":False,\"descr\":\"<f4\"}", true),
            ("  {\n'shape' : ( 1L , 2L ) , 'descr' : '<f4' , 'fortran_order' : False }  ", true),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2), 'shape': (1, 2)}", false),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2), 'more': 1}", false),
            ("{'descr': '<f4', 'fortran_order': False}", false),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2)} more", false),
            ("{'descr': '<f4', 'fortran_order': False 'shape': (1, 2)}", false),
            ("{'descr': '<f4', 'fortran_order': 0, 'shape': (1, 2)}", false),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 2)}", false),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (2)}", false),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999, 2)}", false),
            ("{'descr': [('x', '<f4')], 'fortran_order': False, 'shape': (1, 2)}", false),
            ("{'descr': '>f4', 'fortran_order': False, 'shape': (1, 2)}", false),
            ("{'descr': '<f4', 'fortran_order': True, 'shape': (1, 2)}", false),
            ("", false),
        ] {
            assert_eq!(open_bytes(&with_header(1, header, &[0; 8])).is_ok(), right, "{header}");
        }
        let (huge, empty) = ("(9223372036854775808, 9223372036854775808)", "(9223372036854775808, 0)");
        assert!(open_bytes(&array(1, "<f4", huge, &[])).unwrap_err().message().contains("and the file has 0"));
        assert!(open_bytes(&array(1, "<f4", empty, &[])).is_err());
    }

    #[test]
    fn damaged_files_are_refused_or_read_but_never_a_panic() {
        let folder = Folder::new();
        let path = folder.path().join("table.npy");
        for version in [1, 2] {
            let bytes = array(version, "<f4", "(3, 2)", &floats(&[1.0; 6]));
            for length in 0..bytes.len() {
                std::fs::write(&path, &bytes[..length]).unwrap();
                assert!(!survive(&path, &SourceOptions::default()), "cut to {length} bytes");
            }
            for at in 0..bytes.len() {
                for flip in [1, 2, 4, 8, 16, 32, 64, 128, 255] {
                    let mut bytes = bytes.clone();
                    bytes[at] ^= flip;
                    std::fs::write(&path, &bytes).unwrap();
                    survive(&path, &SourceOptions::default());
                }
            }
        }
        assert!(open_bytes(&[&array(1, "<f4", "(1, 1)", &[0; 4])[..], &[0]].concat()).is_err(), "a byte too many");
    }
}
