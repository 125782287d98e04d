//! Checks that the files of a folder are those that were exported, and that the weights of its graph are finite.
//!
//! The graph is mapped. Every other file is streamed through a buffer once, hashed, and scanned where the graph has
//! weights in it. So a folder of any size takes little memory.

use std::fs::File;
use std::io::{ErrorKind, Read};

use memmap2::Mmap;
use prost::bytes::Bytes;

use super::contents::{FolderContents, FolderFile, damaged};
use super::weights::{Outside, ScalarWeights, check_graph};
use crate::checksum::{Sha256, sha256_hex};
use crate::error::{Error, Result, Status};

/// Bytes that are read at once.
const CHUNK: usize = 1 << 20;

/// Checks that `version` is the hash of the text of pagoda.json with zeros in the version's place.
pub(super) fn version(text: &str, version: &str) -> Result<()> {
    if version.len() != 64 || !version.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return Err(damaged(format!("`version`: expected 64 hexadecimal digits, found {version:?}")));
    }
    let hash = sha256_hex(text.replacen(version, &"0".repeat(64), 1).as_bytes());
    if hash != version {
        let message = format!("it was changed after it was exported: its hash is {hash} and its version {version}");
        return Err(damaged(format!("{message}. Export the model again")));
    }
    Ok(())
}

/// Checks the size and the hash of every file, and the weights of the graph wherever they are.
pub(super) fn files(folder: &FolderContents) -> Result<()> {
    walk(folder, ScalarWeights::AreWeights, |_, file, hash| compare(file, hash))
}

/// As [`files`], of files whose hashes are not known: returns them, by their places in the list.
pub(super) fn hashes(folder: &FolderContents) -> Result<Vec<(usize, String)>> {
    let mut found = Vec::new();
    // torch's exporter has constants of nodes, such as what a mask adds, among the weights.
    walk(folder, ScalarWeights::MayBeConstants, |at, _, hash| {
        found.push((at, hash));
        Ok(())
    })?;
    Ok(found)
}

fn walk(
    folder: &FolderContents,
    scalars: ScalarWeights,
    mut hashed: impl FnMut(usize, &FolderFile, String) -> Result<()>,
) -> Result<()> {
    // All sizes first: a folder that was copied in part is found before hours of hashing. One file is open at a time.
    folder.files.iter().try_for_each(|file| open(folder, file).map(drop))?;
    let (models, others): (Vec<_>, Vec<_>) =
        folder.files.iter().enumerate().partition(|(_, file)| folder.graphs().any(|name| *name == file.name));
    let mut outside = Vec::new();
    for (at, file) in models {
        let model = map(file, &open(folder, file)?)?;
        hashed(at, file, sha256_hex(&model))?;
        let found = check_graph(folder, &file.name, model.clone(), scalars);
        outside.extend(found.map_err(|error| of_graph(&file.name, &error))?);
        feed(&mut outside, file, 0, &model);
    }
    for (at, file) in others {
        hashed(at, file, stream(file, &open(folder, file)?, &mut outside)?)?;
    }
    outside.iter().try_for_each(|tensor| tensor.check().map_err(|error| of_graph(tensor.graph, &error)))
}

/// An error that continues the name of a graph's file.
fn of_graph(name: &str, error: &Error) -> Error {
    Error::new(error.status(), format!("{name}: {}", error.message()))
}

/// Opens a file and checks its size.
fn open(folder: &FolderContents, file: &FolderFile) -> Result<File> {
    let name = &file.name;
    let opened = File::open(folder.file(name)).map_err(|error| match error.kind() {
        ErrorKind::NotFound => Error::new(Status::NotFound, format!("{name} is missing; copy the whole folder")),
        _ => unreadable(file, error),
    })?;
    let bytes = opened.metadata().map_err(|error| unreadable(file, error))?.len();
    if bytes != file.bytes {
        let what = if bytes < file.bytes { "was cut" } else { "is not the one that was exported" };
        let message = format!("{name} {what}: it has {bytes} bytes and pagoda.json says {}", file.bytes);
        return Err(Error::new(Status::Model, format!("{message}. Copy the whole folder again")));
    }
    Ok(opened)
}

pub(super) fn map(file: &FolderFile, opened: &File) -> Result<Bytes> {
    // SAFETY: nothing writes to the files of a folder that is in use: that is the contract of model folders, and ONNX
    // Runtime maps them too.
    let mapped = unsafe { Mmap::map(opened) }.map_err(|error| unreadable(file, error))?;
    Ok(Bytes::from_owner(mapped))
}

/// Reads a file from beginning to end: scans the weights that are in it, and returns its hash.
fn stream(file: &FolderFile, mut opened: &File, outside: &mut [Outside<'_>]) -> Result<String> {
    let (mut hash, mut buffer, mut at) = (Sha256::new(), vec![0; CHUNK], 0);
    loop {
        let piece = match opened.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => &buffer[..count],
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(unreadable(file, error)),
        };
        hash.update(piece);
        feed(outside, file, at, piece);
        at += piece.len() as u64;
    }
    Ok(hash.hex())
}

fn feed(outside: &mut [Outside<'_>], file: &FolderFile, at: u64, piece: &[u8]) {
    let here = outside.iter_mut().filter(|tensor| tensor.region.file == file.name);
    here.for_each(|tensor| tensor.region.feed(at, piece));
}

fn compare(file: &FolderFile, hash: String) -> Result<()> {
    if hash == file.sha256.to_ascii_lowercase() {
        return Ok(());
    }
    let message = format!("{} was changed: its SHA-256 is {hash} and pagoda.json says {}", file.name, file.sha256);
    Err(Error::new(Status::Model, format!("{message}. Copy the whole folder again")))
}

fn unreadable(file: &FolderFile, error: std::io::Error) -> Error {
    Error::new(Status::Io, format!("{} can not be read: {error}", file.name))
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, SeekFrom, Write};

    use pagoda_test_support::Folder;
    use prost::Message;

    use super::super::external::tests::elsewhere;
    use super::super::onnx::{GraphProto, ModelProto, TensorProto};
    use super::*;

    /// A folder with a model whose one weight, of `count` f32, is in a file that is all zeros but for its last number.
    fn with_weights(folder: &Folder, count: u64, last: f32) -> FolderContents {
        let location = [("location", "w.bin"), ("offset", "4")];
        with_tensors(folder, vec![elsewhere("w", count as i64, &location)], 4 + 4 * count, last)
    }

    /// A folder with a model of these tensors, and a w.bin of zeros that ends with the number `last`.
    fn with_tensors(folder: &Folder, initializer: Vec<TensorProto>, bytes: u64, last: f32) -> FolderContents {
        let graph = Some(GraphProto { initializer, ..GraphProto::default() });
        let model = ModelProto { graph, ..ModelProto::default() }.encode_to_vec();
        std::fs::write(folder.path().join("model.onnx"), &model).unwrap();
        let path = folder.path().join("w.bin");
        let mut file = File::create(&path).unwrap();
        file.set_len(bytes).unwrap();
        file.seek(SeekFrom::End(-4)).unwrap();
        file.write_all(&last.to_le_bytes()).unwrap();
        let (mut hash, mut file, mut buffer) = (Sha256::new(), File::open(&path).unwrap(), vec![0; CHUNK]);
        while let count @ 1.. = file.read(&mut buffer).unwrap() {
            hash.update(&buffer[..count]);
        }
        let listed = |name: &str, bytes, sha256| FolderFile { name: name.to_owned(), bytes, sha256 };
        let files =
            vec![listed("w.bin", bytes, hash.hex()), listed("model.onnx", model.len() as u64, sha256_hex(&model))];
        FolderContents::of_files(folder.path(), "model.onnx", files)
    }

    fn check_weights(count: u64) {
        let folder = Folder::new();
        files(&with_weights(&folder, count, 1.0)).unwrap();
        let message = format!("model.onnx: the tensor \"w\" has NaN at index {}: train or export it again", count - 1);
        assert_eq!(files(&with_weights(&folder, count, f32::NAN)), Err(Error::new(Status::Model, message)));
        // A file that was changed is refused as such, whatever is in it.
        let contents = with_weights(&folder, count, 1.0);
        with_weights(&folder, count, f32::NAN);
        let error = files(&contents).unwrap_err();
        assert!(error.message().starts_with("w.bin was changed: its SHA-256 is "), "{error}");
        File::options().write(true).open(folder.path().join("w.bin")).unwrap().set_len(4 * count).unwrap();
        assert!(files(&contents).unwrap_err().message().starts_with("w.bin was cut: "));
        std::fs::remove_file(folder.path().join("w.bin")).unwrap();
        assert_eq!(files(&contents).unwrap_err().status(), Status::NotFound);
    }

    #[test]
    fn weights_in_other_files_are_hashed_and_scanned() {
        check_weights(1);
        check_weights(CHUNK as u64 / 2 + 3);
    }

    #[test]
    fn tensors_may_share_bytes() {
        let part = |name, count, offset: &str| elsewhere(name, count, &[("location", "w.bin"), ("offset", offset)]);
        let folder = Folder::new();
        // A tied head, which has the shape of the embedding or another; codes of one that is quantised; and a part.
        let tensors = || {
            let codes = TensorProto { data_type: 2, ..part("codes", 4096, "0") };
            let other = TensorProto { dims: vec![32, 32], ..part("head", 1, "0") };
            vec![part("embedding", 1024, "0"), other, codes, part("last", 1, "4092")]
        };
        files(&with_tensors(&folder, tensors(), 4096, 1.0)).unwrap();
        let error = files(&with_tensors(&folder, tensors(), 4096, f32::INFINITY)).unwrap_err();
        let message = "model.onnx: the tensor \"embedding\" has inf at index 1023: train or export it again";
        assert_eq!(error, Error::new(Status::Model, message));
        // Each is scanned on its own.
        let error = files(&with_tensors(&folder, tensors().split_off(3), 4096, f32::INFINITY)).unwrap_err();
        assert!(error.message().contains("the tensor \"last\" has inf at index 0"), "{error}");
    }

    /// For `make soak`: a sparse file, of more than protobuf and 32 bits can say.
    #[test]
    #[ignore = "reads 30 GiB of zeros"]
    fn weights_of_more_than_4_gib_are_hashed_and_scanned() {
        check_weights((1 << 30) + 7);
    }
}
