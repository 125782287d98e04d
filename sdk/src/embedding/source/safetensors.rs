//! safetensors files: eight bytes with the length of a JSON header, which says where each tensor is, then the tensors. Only
//! the header is read here; rows are read from the file as they are needed.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use ::safetensors::Dtype;
use ::safetensors::tensor::TensorInfo;
use serde_json::{Map, Value};

use super::columns::{Column, Columns, Element, KeyType, SourceOptions, open_file, read_at, wrong};
use crate::error::Result;

/// The longest header of the format.
const MAX_HEADER: u64 = 100_000_000;
const ROWS: [&str; 3] = ["rows", "weight", "embeddings"];

pub(super) fn open(path: &Path, options: &SourceOptions) -> Result<Columns> {
    let tensors = Tensors::open(path)?;
    let rows = match &options.rows_tensor {
        Some(name) => tensors.get(name)?,
        None => tensors.one_of(&ROWS)?,
    };
    let &[len, dim] = rows.shape.as_slice() else {
        let message = format!("`{}` has the shape {:?}; rows have [number of rows, dim]", rows.name, rows.shape);
        return Err(wrong(path, message));
    };
    let element = match rows.kind {
        Dtype::F32 => Element::F32,
        Dtype::F16 => Element::F16,
        Dtype::BF16 => Element::Bf16,
        Dtype::I8 => Element::I8,
        other => {
            return Err(wrong(path, format!("`{}` has the type {other}; rows are F32, F16, BF16 or I8", rows.name)));
        }
    };
    let keys = tensors.optional(options.keys_tensor.as_deref(), "keys")?;
    if let Some(keys) = &keys {
        keys.expect(path, &[Dtype::I64, Dtype::U64], len)?;
    }
    let scales = tensors.optional(options.scales_tensor.as_deref(), "scales")?;
    if let Some(scales) = &scales {
        scales.expect(path, &[Dtype::F32], len)?;
    }
    let column = |tensor: Tensor| Column { file: tensors.file.clone(), path: path.to_owned(), start: tensor.start };
    Ok(Columns {
        len,
        dim,
        keys: keys.map(|keys| (column(keys), KeyType::Bits64)),
        rows: column(rows),
        element,
        scales: scales.map(column),
    })
}

/// The header of a file.
struct Tensors<'a> {
    path: &'a Path,
    file: Arc<File>,
    header: BTreeMap<String, TensorInfo>,
    /// Where the tensors begin, and how many bytes the file has from there.
    start: u64,
    bytes: u64,
}

struct Tensor {
    name: String,
    kind: Dtype,
    shape: Vec<u64>,
    /// The offset in the file.
    start: u64,
}

impl<'a> Tensors<'a> {
    fn open(path: &'a Path) -> Result<Self> {
        let (file, length) = open_file(path)?;
        if length < 8 {
            return Err(wrong(path, format!("{length} bytes are too few for a safetensors file")));
        }
        let mut size = [0; 8];
        read_at(&file, path, 0, &mut size)?;
        let size = u64::from_le_bytes(size);
        if size > (length - 8).min(MAX_HEADER) {
            let message =
                format!("the header should have {size} bytes, and the file has {length}: it is damaged or cut");
            return Err(wrong(path, message));
        }
        let mut header = vec![0; size as usize];
        read_at(&file, path, 8, &mut header)?;
        let header =
            read_header(&header).map_err(|message| wrong(path, format!("the header is damaged: {message}")))?;
        let tensors = Self { path, file, header, start: 8 + size, bytes: length - 8 - size };
        // Also of tensors that are not wanted: a file that was cut there is not the one that was written.
        let mut end = 0;
        for name in tensors.names() {
            let (from, bytes) = tensors.place(name)?;
            end = end.max(from + bytes);
        }
        if end != tensors.bytes {
            let message = format!("the tensors take {end} bytes after the header, and the file has {}", tensors.bytes);
            return Err(wrong(path, message));
        }
        Ok(tensors)
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        self.header.keys().map(String::as_str)
    }

    /// The offset of a tensor after the header, and its number of bytes.
    fn place(&self, name: &str) -> Result<(u64, u64)> {
        let (from, to) = self.header[name].data_offsets;
        let (from, to, bytes) = (from as u64, to as u64, self.bytes);
        if from <= to && to <= bytes {
            return Ok((from, to - from));
        }
        let message =
            format!("tensor `{name}` lies at [{from}, {to}], and the file has {bytes} bytes after the header");
        Err(wrong(self.path, message))
    }

    fn get(&self, name: &str) -> Result<Tensor> {
        let Some(TensorInfo { dtype, shape, .. }) = self.header.get(name) else {
            return Err(self.missing(&format!("no tensor `{name}`")));
        };
        let (from, bytes) = self.place(name)?;
        let bits = shape.iter().try_fold(dtype.bitsize(), |bits, &size| bits.checked_mul(size));
        if bits.map(|bits| bits as u64) != bytes.checked_mul(8) {
            let message = format!("tensor `{name}` takes {bytes} bytes, which {shape:?} of {dtype} do not");
            return Err(wrong(self.path, message));
        }
        let shape = shape.iter().map(|&size| size as u64).collect();
        Ok(Tensor { name: name.to_owned(), kind: *dtype, shape, start: self.start + from })
    }

    fn optional(&self, named: Option<&str>, usual: &str) -> Result<Option<Tensor>> {
        match named {
            Some(name) => self.get(name).map(Some),
            None => self.header.contains_key(usual).then(|| self.get(usual)).transpose(),
        }
    }

    fn one_of(&self, names: &[&str]) -> Result<Tensor> {
        let there: Vec<_> = names.iter().filter(|&&name| self.header.contains_key(name)).collect();
        match there.as_slice() {
            [name] => self.get(name),
            [] => Err(self.missing(&format!("no tensor of rows, which would be one of {names:?}"))),
            both => Err(wrong(self.path, format!("{both:?} could all be the rows: name the one that is meant"))),
        }
    }

    fn missing(&self, what: &str) -> crate::Error {
        // A model has many tensors. A few names show the pattern.
        let names: Vec<_> = self.names().take(8).collect();
        let (count, more) = (self.names().count(), if self.names().count() > names.len() { " …" } else { "" });
        wrong(
            self.path,
            format!("{what} is in the file: name one of the {count} there are: {}{more}", names.join(", ")),
        )
    }
}

/// The tensors of a header, by name.
fn read_header(header: &[u8]) -> Result<BTreeMap<String, TensorInfo>, String> {
    let mut tensors: Map<String, Value> =
        serde_json::from_slice(header).map_err(|error| format!("no JSON object: {error}"))?;
    tensors.remove("__metadata__");
    let tensor = |(name, about)| match serde_json::from_value(about) {
        Ok(tensor) => Ok((name, tensor)),
        Err(error) => Err(format!("tensor `{name}`: {error}")),
    };
    tensors.into_iter().map(tensor).collect()
}

impl Tensor {
    fn expect(&self, path: &Path, kinds: &[Dtype], len: u64) -> Result<()> {
        if kinds.contains(&self.kind) && self.shape == [len] {
            return Ok(());
        }
        let Self { name, kind, shape, .. } = self;
        let kinds = kinds.iter().map(Dtype::to_string).collect::<Vec<_>>().join(" or ");
        Err(wrong(path, format!("`{name}` is {kind} {shape:?}, and with {len} rows it should be {kinds} [{len}]")))
    }
}

#[cfg(test)]
mod tests {
    use pagoda_test_support::Folder;

    use super::super::Source;
    use super::super::tests::{all, survive};
    use super::*;
    use crate::embedding::RowType;

    /// A file with these tensors.
    fn file(tensors: &[(&str, &str, &[u64], Vec<u8>)]) -> Vec<u8> {
        let (mut header, mut data) = (Map::new(), Vec::new());
        for (name, kind, shape, bytes) in tensors {
            let offsets = [data.len(), data.len() + bytes.len()];
            data.extend(bytes);
            let tensor = serde_json::json!({ "dtype": kind, "shape": shape, "data_offsets": offsets });
            header.insert((*name).to_owned(), tensor);
        }
        let header = serde_json::to_vec(&header).unwrap();
        [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat()
    }

    fn open_bytes(bytes: &[u8], options: &SourceOptions) -> Result<Source> {
        let folder = Folder::new();
        let path = folder.path().join("table.safetensors");
        std::fs::write(&path, bytes).unwrap();
        Source::open(path, options)
    }

    fn floats(numbers: &[f32]) -> Vec<u8> {
        numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
    }

    fn keys(keys: &[i64]) -> Vec<u8> {
        keys.iter().flat_map(|key| key.to_le_bytes()).collect()
    }

    #[test]
    fn tensors_of_every_type_come_back() {
        let numbers = [1.0, -2.0, 0.5, 4.0];
        let right = vec![vec![1.0, -2.0], vec![0.5, 4.0]];
        let halves: Vec<u8> = numbers.iter().flat_map(|&number| half::f16::from_f32(number).to_le_bytes()).collect();
        let brains: Vec<u8> = numbers.iter().flat_map(|&number| half::bf16::from_f32(number).to_le_bytes()).collect();
        for (kind, row_type, bytes) in
            [("F32", RowType::F32, floats(&numbers)), ("F16", RowType::F16, halves), ("BF16", RowType::F32, brains)]
        {
            for (name, key) in [("rows", "I64"), ("weight", "U64"), ("embeddings", "I64")] {
                let keys_bytes = keys(&[-1, 1 << 40]);
                let bytes = file(&[("keys", key, &[2], keys_bytes), (name, kind, &[2, 2], bytes.clone())]);
                let source = open_bytes(&bytes, &SourceOptions::default()).unwrap();
                assert_eq!(source.layout().row_type(), row_type);
                assert_eq!(all(&source, 1), (vec![-1, 1 << 40], right.clone()), "{kind} {name}");
            }
        }
    }

    #[test]
    fn bytes_with_a_scale_come_back_and_names_can_be_given() {
        let bytes = file(&[
            ("item", "I8", &[2, 3], vec![1, 2, 3, 255, 254, 128]),
            ("item_scale", "F32", &[2], floats(&[0.5, 2.0])),
            ("rows", "F32", &[0, 1], vec![]),
        ]);
        let options = SourceOptions {
            rows_tensor: Some("item".into()),
            scales_tensor: Some("item_scale".into()),
            ..SourceOptions::default()
        };
        let source = open_bytes(&bytes, &options).unwrap();
        assert_eq!(source.layout(), crate::embedding::Layout::new(3, RowType::I8).unwrap());
        assert_eq!(all(&source, 2), (vec![0, 1], vec![vec![0.5, 1.0, 1.5], vec![-2.0, -4.0, -256.0]]));
        let options = SourceOptions { scales_tensor: None, ..options };
        assert!(open_bytes(&bytes, &options).unwrap_err().message().contains("int8 rows need `scales`"));
        let options = SourceOptions { keys_tensor: Some("other".into()), ..options };
        let error = open_bytes(&bytes, &options).unwrap_err();
        assert!(error.message().contains("no tensor `other`") && error.message().contains("item_scale"), "{error}");
    }

    #[test]
    fn what_does_not_fit_is_said() {
        let rows = || ("rows", "F32", &[2, 1][..], floats(&[1.0, 2.0]));
        for (tensors, message) in [
            (vec![("keys", "I64", &[3][..], keys(&[1, 2, 3])), rows()], "should be I64 or U64 [2]"),
            (vec![("keys", "F32", &[2][..], floats(&[1.0, 2.0])), rows()], "`keys` is F32 [2]"),
            (vec![("rows", "F32", &[2][..], floats(&[1.0, 2.0]))], "rows have [number of rows, dim]"),
            (vec![("rows", "F64", &[1, 1][..], vec![0; 8])], "has the type F64"),
            (vec![("rows", "F32", &[2, 2][..], floats(&[1.0, 2.0]))], "takes 8 bytes, which [2, 2] of F32 do not"),
            (vec![("rows", "F32", &[1 << 63, 1 << 62][..], vec![])], "do not"),
            (vec![("rows", "F32", &[1, 0][..], vec![])], "not between 1 and 65536"),
            (vec![rows(), ("weight", "F32", &[1, 1][..], floats(&[1.0]))], "name the one that is meant"),
            (vec![("other", "F32", &[1, 1][..], floats(&[1.0]))], "name one of the 1 there are: other"),
            (vec![rows(), ("scales", "F32", &[2][..], floats(&[1.0, 1.0]))], "which only int8 rows have"),
        ] {
            let error = open_bytes(&file(&tensors), &SourceOptions::default()).unwrap_err();
            assert!(error.message().contains(message), "{error}");
        }
        let options = SourceOptions { dim: Some(3), ..SourceOptions::default() };
        assert!(open_bytes(&file(&[rows()]), &options).unwrap_err().message().contains("3 were expected"));
    }

    #[test]
    fn damaged_files_are_refused_or_read_but_never_a_panic() {
        let bytes = file(&[("keys", "I64", &[3], keys(&[1, 2, 3])), ("rows", "F32", &[3, 2], floats(&[1.0; 6]))]);
        let folder = Folder::new();
        let path = folder.path().join("table.safetensors");
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
        for header in ["{}", "[]", "1", "", "{\"rows\":1}", &"[".repeat(100_000), "{\"__metadata__\":{}}"] {
            let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
            assert!(open_bytes(&bytes, &SourceOptions::default()).is_err(), "{header:.20}");
        }
        assert!(open_bytes(&[255; 16], &SourceOptions::default()).is_err());
    }
}
