//! Whether every weight is a finite number: one that is not would make every score it reaches useless, and what is
//! cached of it too.

use half::{bf16, f16};

use super::ModelFolder;
use crate::embedding::{Source, SourceOptions};
use crate::error::{Error, Result, Status};
use crate::tensor::ElementType;

/// Rows of a table that are looked at in one go.
const CHUNK: usize = 4096;

/// Looks at the tables and at the initialisers of the graph.
pub(super) fn finite(folder: &ModelFolder) -> Result<()> {
    for table in &folder.tables {
        let Some(file) = &table.file else { continue };
        let source =
            Source::open(folder.file(file), &SourceOptions { dim: Some(table.dim), ..SourceOptions::default() })
                .map_err(|error| Error::new(Status::Model, error.to_string()))?;
        if source.len() != table.rows {
            let message = format!("{file} has {} rows and pagoda.json says {}", source.len(), table.rows);
            return Err(Error::new(Status::Model, message));
        }
        let layout = source.layout();
        let mut numbers = vec![0.0; layout.dim()];
        let mut at = 0_u64;
        for chunk in source.chunks(CHUNK) {
            for row in chunk?.rows.chunks_exact(layout.row_bytes()) {
                layout.decode(row, &mut numbers);
                if let Some(bad) = numbers.iter().find(|number| !number.is_finite()) {
                    let message = format!("table {:?} ({file}) has {bad} in row {at}", table.name);
                    return Err(Error::new(Status::Model, format!("{message}: train or export it again")));
                }
                at += 1;
            }
        }
    }
    let bytes = std::fs::read(folder.file(&folder.model))
        .map_err(|error| Error::new(Status::Io, format!("{} can not be read: {error}", folder.model)))?;
    initialisers(&bytes).map_err(|message| Error::new(Status::Model, format!("{}: {message}", folder.model)))
}

/// Fields of ONNX's messages: ModelProto.graph, GraphProto.initializer, and those of TensorProto.
const GRAPH: u64 = 7;
const INITIALIZER: u64 = 5;
const DATA_TYPE: u64 = 2;
const FLOAT_DATA: u64 = 4;
const NAME: u64 = 8;
const RAW_DATA: u64 = 9;
const DOUBLE_DATA: u64 = 10;
const DATA_LOCATION: u64 = 14;

/// Looks at every initialiser of a model. What is no model is for ONNX Runtime to say.
fn initialisers(model: &[u8]) -> Result<(), String> {
    for (_, graph) in fields(model).filter(|(field, _)| *field == GRAPH) {
        for (_, tensor) in fields(graph.bytes()).filter(|(field, _)| *field == INITIALIZER) {
            let tensor = tensor.bytes();
            let (mut name, mut kind, mut elsewhere) = (&[][..], None, false);
            for (field, value) in fields(tensor) {
                match field {
                    NAME => name = value.bytes(),
                    DATA_TYPE => kind = ElementType::from_number(value.number() as i32),
                    // 1: EXTERNAL.
                    DATA_LOCATION => elsewhere = value.number() != 0,
                    _ => {}
                }
            }
            if elsewhere {
                // No hash and so no version covers that file: what is cached could be of other weights than it has later.
                let name = String::from_utf8_lossy(name);
                return Err(format!("the tensor {name:?} lies in another file: save the model with all weights in it"));
            }
            let bad = fields(tensor).find_map(|(field, value)| match field {
                RAW_DATA => not_finite(kind?, value.bytes()),
                FLOAT_DATA => not_finite(ElementType::F32, value.bytes()),
                DOUBLE_DATA => not_finite(ElementType::F64, value.bytes()),
                _ => None,
            });
            if let Some((index, bad)) = bad {
                let name = String::from_utf8_lossy(name);
                return Err(format!("the tensor {name:?} has {bad} at index {index}: train or export it again"));
            }
        }
    }
    Ok(())
}

/// The first number that is not finite, and where it is.
fn not_finite(kind: ElementType, bytes: &[u8]) -> Option<(usize, f64)> {
    fn find<const N: usize>(bytes: &[u8], number: impl Fn([u8; N]) -> f64) -> Option<(usize, f64)> {
        let numbers = bytes.as_chunks::<N>().0.iter().map(|&bytes| number(bytes));
        numbers.enumerate().find(|(_, number)| !number.is_finite())
    }
    match kind {
        ElementType::F32 => find(bytes, |bytes| f32::from_le_bytes(bytes).into()),
        ElementType::F64 => find(bytes, f64::from_le_bytes),
        ElementType::F16 => find(bytes, |bytes| f16::from_le_bytes(bytes).into()),
        ElementType::Bf16 => find(bytes, |bytes| bf16::from_le_bytes(bytes).into()),
        _ => None,
    }
}

/// The value of a field of a protobuf message.
enum Field<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

impl<'a> Field<'a> {
    fn bytes(&self) -> &'a [u8] {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Number(_) => &[],
        }
    }

    fn number(&self) -> u64 {
        match self {
            Self::Bytes(_) => 0,
            Self::Number(number) => *number,
        }
    }
}

/// The fields of a protobuf message, up to where it is none.
fn fields(mut message: &[u8]) -> impl Iterator<Item = (u64, Field<'_>)> {
    std::iter::from_fn(move || {
        let tag = varint(&mut message)?;
        let value = match tag & 7 {
            0 => Field::Number(varint(&mut message)?),
            1 => Field::Bytes(take(&mut message, 8)?),
            2 => {
                let length = varint(&mut message)?;
                Field::Bytes(take(&mut message, length)?)
            }
            5 => Field::Bytes(take(&mut message, 4)?),
            _ => return None,
        };
        Some((tag >> 3, value))
    })
}

fn varint(message: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = message.split_first()?;
        *message = rest;
        number |= u64::from(byte & 0x7F) << shift;
        if byte < 0x80 {
            return Some(number);
        }
    }
    None
}

fn take<'a>(message: &mut &'a [u8], length: u64) -> Option<&'a [u8]> {
    let (taken, rest) = message.split_at_checked(usize::try_from(length).ok()?)?;
    *message = rest;
    Some(taken)
}

#[cfg(test)]
mod tests {
    use pagoda_test_support::Graph;

    use super::*;

    #[test]
    fn a_weight_that_is_not_finite_is_named() {
        let graph = |bad: f32| Graph::new().weight("good", &[2], &[1.0, 2.0]).weight("w", &[3], &[0.0, bad, 0.0]);
        assert_eq!(initialisers(&graph(5.0).to_bytes()), Ok(()));
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let error = initialisers(&graph(bad).to_bytes()).unwrap_err();
            assert!(error.contains("\"w\"") && error.contains("index 1"), "{error}");
        }
    }

    #[test]
    fn a_weight_in_another_file_is_refused() {
        // TensorProto: name "w", data_location `place`; around it GraphProto.initializer and ModelProto.graph.
        let model = |place: u8| [0x3A, 7, 0x2A, 5, 0x42, 1, b'w', 0x70, place];
        assert_eq!(initialisers(&model(0)), Ok(()));
        let error = initialisers(&model(1)).unwrap_err();
        assert!(error.contains("\"w\" lies in another file"), "{error}");
    }

    #[test]
    fn what_is_cut_ends_without_a_word() {
        let whole = Graph::new().weight("w", &[3], &[0.0, 1.0, f32::NAN]).to_bytes();
        for end in 0..whole.len() {
            let _ = initialisers(&whole[..end]);
        }
        assert_eq!(initialisers(&[0xFF; 30]), Ok(()));
    }
}
