//! Weights that a graph has in other files (ONNX's external data). The version of a folder covers the files that its
//! pagoda.json lists, and a model may use those alone: weights in another file could change while the version, and with
//! it what is cached, stays.

use std::path::{Component, Path};

use super::contents::{FolderContents, FolderFile};
use super::numbers::{Found, Scan};
use super::onnx::TensorProto;
use crate::error::{Error, Result, Status};
use crate::tensor::ElementType;

/// The files that the tensors of a model may be in.
pub(super) struct External<'a> {
    /// The file of the model: locations are relative to its folder.
    pub(super) model: &'a str,
    files: &'a [FolderFile],
}

/// Where the floats of a tensor are in another file. The file is read once, for its hash, and each piece of it is
/// passed to [`Region::feed`].
pub(super) struct Region<'a> {
    /// The name of the file.
    pub(super) file: &'a str,
    offset: u64,
    bytes: u64,
    scan: Scan,
    found: Option<Found>,
}

impl Region<'_> {
    /// Scans the part of a piece that is inside the region; `at` is the piece's offset in the file. Pieces come in
    /// order.
    pub(super) fn feed(&mut self, at: u64, piece: &[u8]) {
        let (from, to) = (self.offset.max(at), (self.offset + self.bytes).min(at + piece.len() as u64));
        if from < to && self.found.is_none() {
            self.found = self.scan.feed(&piece[(from - at) as usize..(to - at) as usize]);
        }
    }

    /// The first number that is not finite.
    pub(super) fn found(&self) -> Option<Found> {
        self.found
    }
}

/// The entries of a tensor's external data.
struct Place<'a> {
    location: &'a str,
    offset: u64,
    length: Option<u64>,
}

impl<'a> External<'a> {
    pub(super) fn new(folder: &'a FolderContents, model: &'a str) -> Self {
        Self { model, files: &folder.files }
    }

    /// Checks that a tensor which is not in the model's own file is in one of the folder's. Returns where its numbers
    /// are, unless they are of a type that is always finite. Error messages continue the name of the tensor.
    pub(super) fn region(&self, tensor: &TensorProto) -> Result<Option<Region<'a>>> {
        let place = Place::of(tensor).map_err(damaged)?;
        let file = self.listed(place.location)?;
        let element = ElementType::from_number(tensor.data_type).filter(|&element| element != ElementType::String);
        let Some(element) = element else {
            let message = format!("lies in another file and has type {}, which can not be there", tensor.data_type);
            return Err(damaged(message));
        };
        let bytes = place.bytes(tensor, element, file).map_err(damaged)?;
        let region = |scan| Region { file: &file.name, offset: place.offset, bytes, scan, found: None };
        Ok(Scan::new(element).map(region))
    }

    /// The file of the folder that a tensor's location means.
    fn listed(&self, location: &str) -> Result<&'a FolderFile> {
        // ONNX Runtime takes locations with a star for addresses in memory.
        let plain = !location.contains('*')
            && Path::new(location).components().all(|part| matches!(part, Component::Normal(_)));
        let path = Path::new(self.model).with_file_name(location);
        let file = self.files.iter().find(|file| plain && Path::new(&file.name) == path);
        file.ok_or_else(|| {
            let why = if plain {
                "which `files` of pagoda.json does not list, so that the version does not cover it: save the model with \
                 all weights in it, or list the file"
            } else {
                "which is no plain path from the model to a file inside the folder: save the model with all weights in it"
            };
            damaged(format!("lies in another file, {location:?}, {why}"))
        })
    }
}

impl<'a> Place<'a> {
    fn of(tensor: &'a TensorProto) -> Result<Self, String> {
        let (mut location, mut offset, mut length) = (None, None, None);
        for entry in &tensor.external_data {
            let (key, value) = (entry.key.as_str(), entry.value.as_str());
            let before = match key {
                "location" => location.replace(value),
                "offset" => offset.replace(value),
                "length" => length.replace(value),
                // Of the whole file, whose SHA-256 was compared.
                "checksum" => None,
                // Such as weights in the order of some kernel, which would be used in place of those that are checked.
                _ => return Err(format!("lies in another file, with {key:?}, which is not known here: {AGAIN}")),
            };
            if before.is_some() {
                return Err(format!("lies in another file, with {key:?} twice: {AGAIN}"));
            }
        }
        let Some(location) = location else {
            return Err(format!("lies in another file, and does not say in which: {AGAIN}"));
        };
        let number = |key: &str, text: &str| {
            let wrong =
                |_| format!("lies in another file, {location:?}, at {key} {text:?}, which is no number: {AGAIN}");
            text.parse().map_err(wrong)
        };
        let offset = offset.map_or(Ok(0), |text| number("offset", text))?;
        Ok(Self { location, offset, length: length.map(|text| number("length", text)).transpose()? })
    }

    /// How many bytes the numbers take, which must all be in the file.
    fn bytes(&self, tensor: &TensorProto, element: ElementType, file: &FolderFile) -> Result<u64, String> {
        let (name, dims) = (&file.name, &tensor.dims);
        let count = dims.iter().try_fold(1_u64, |count, &dim| count.checked_mul(dim.try_into().ok()?));
        let bits = count.and_then(|count| count.checked_mul(element.bits() as u64));
        let Some(bytes) = bits.map(|bits| bits.div_ceil(8)) else {
            return Err(format!("lies in {name} and has the shape {dims:?}, which can not be: {AGAIN}"));
        };
        if let Some(length) = self.length.filter(|&length| length != bytes) {
            return Err(format!("lies in {name} with {length} bytes, and its shape takes {bytes}: {AGAIN}"));
        }
        if self.offset.checked_add(bytes).is_none_or(|end| end > file.bytes) {
            let (offset, size) = (self.offset, file.bytes);
            let message = format!("lies in {name} at offset {offset} with {bytes} bytes, and the file has {size}");
            return Err(format!("{message}: {AGAIN}"));
        }
        Ok(bytes)
    }
}

const AGAIN: &str = "export the model again";

fn damaged(message: String) -> Error {
    Error::new(Status::Model, message)
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::onnx::StringStringEntryProto;
    use super::*;

    /// A tensor of `count` f32 numbers in another file.
    pub(in super::super) fn elsewhere(name: &str, count: i64, entries: &[(&str, &str)]) -> TensorProto {
        let entry = |&(key, value): &(&str, &str)| StringStringEntryProto { key: key.into(), value: value.into() };
        TensorProto {
            name: name.into(),
            dims: vec![count],
            data_type: 1,
            data_location: 1,
            external_data: entries.iter().map(entry).collect(),
            ..TensorProto::default()
        }
    }

    /// A folder that lists no file.
    pub(in super::super) fn none_listed() -> External<'static> {
        External { model: "model.onnx", files: &[] }
    }

    /// A listed file of this size.
    fn listed(name: &str, bytes: u64) -> [FolderFile; 1] {
        [FolderFile { name: name.into(), bytes, sha256: String::new() }]
    }

    #[test]
    fn a_listed_file_is_looked_through() {
        // Several pieces, whose ends are in the middle of numbers.
        const PIECE: usize = 1021;
        let mut numbers = vec![1.0_f32; 3000];
        numbers[2003] = f32::NAN;
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let files = listed("w.bin", bytes.len() as u64);
        let external = External { model: "model.onnx", files: &files };
        let look = |count: usize, entries: &[(&str, &str)]| {
            let entries = [&[("location", "w.bin")], entries].concat();
            let mut region = external.region(&elsewhere("w", count as i64, &entries)).unwrap().unwrap();
            for (number, piece) in bytes.chunks(PIECE).enumerate() {
                region.feed((number * PIECE) as u64, piece);
            }
            region.found()
        };
        assert!(matches!(look(numbers.len(), &[]), Some((2003, bad)) if bad.is_nan()));
        assert_eq!(look(2003, &[("length", &(4 * 2003).to_string()), ("checksum", "?")]), None);
        assert!(matches!(look(2, &[("offset", &(4 * 2002).to_string())]), Some((1, _))));
        assert_eq!(look(3, &[("offset", &(4 * 2004).to_string())]), None);
        assert_eq!(look(0, &[]), None);
    }

    #[test]
    fn locations_are_seen_from_the_model() {
        let files = listed("parts/w.bin", 4);
        let found = |external: &External<'_>, location| {
            external.region(&elsewhere("w", 1, &[("location", location)])).is_ok_and(|region| region.is_some())
        };
        let beside = External { model: "parts/model.onnx", files: &files };
        assert!(found(&beside, "w.bin") && !found(&beside, "parts/w.bin"));
        let above = External { model: "model.onnx", files: &files };
        assert!(found(&above, "parts/w.bin") && !found(&above, "w.bin"));
    }

    #[test]
    fn files_that_are_not_listed_are_refused() {
        let files = listed("w.bin", 4);
        let external = External { model: "model.onnx", files: &files };
        for (location, why) in [
            ("other.bin", "does not list"),
            ("", "does not list"),
            ("../w.bin", "no plain path"),
            ("./w.bin", "no plain path"),
            ("x/../w.bin", "no plain path"),
            ("/folder/w.bin", "no plain path"),
            ("*/_ORT_MEM_ADDR_/*", "no plain path"),
        ] {
            let error = external.region(&elsewhere("w", 1, &[("location", location)])).err().unwrap();
            assert_eq!(error.status(), Status::Model);
            assert!(error.message().contains(&format!("{location:?}, ")) && error.message().contains(why), "{error}");
        }
    }

    #[test]
    fn what_does_not_lie_in_the_file_is_refused() {
        let files = listed("w.bin", 16);
        let external = External { model: "model.onnx", files: &files };
        let refused = |tensor: &TensorProto, why: &str| {
            let error = external.region(tensor).err().unwrap();
            assert!(error.status() == Status::Model && error.message().contains(why), "{error}");
        };
        let tensor =
            |count, entries: &[(&str, &str)]| elsewhere("w", count, &[&[("location", "w.bin")], entries].concat());
        refused(&tensor(5, &[]), "w.bin at offset 0 with 20 bytes, and the file has 16");
        refused(&tensor(1, &[("offset", "13")]), "at offset 13 with 4 bytes, and the file has 16");
        refused(&tensor(1, &[("offset", "18446744073709551615")]), "and the file has 16");
        refused(&tensor(2, &[("length", "16")]), "with 16 bytes, and its shape takes 8");
        refused(&tensor(2, &[("length", "-8")]), "at length \"-8\", which is no number");
        refused(&tensor(2, &[("offset", "")]), "at offset \"\", which is no number");
        refused(&tensor(-1, &[]), "the shape [-1], which can not be");
        refused(&tensor(i64::MAX, &[]), "which can not be");
        refused(&tensor(2, &[("location", "w.bin")]), "with \"location\" twice");
        refused(&tensor(2, &[("prepacked_0", "key|0;8")]), "with \"prepacked_0\", which is not known here");
        refused(&elsewhere("w", 2, &[]), "does not say in which");
        refused(&TensorProto { data_type: 8, ..tensor(2, &[]) }, "has type 8");
        refused(&TensorProto { data_type: 99, ..tensor(2, &[]) }, "has type 99");
    }
}
