//! Folders that are damaged, or changed after the export.

use std::fs;
use std::path::Path;

use pagoda::engine::{EngineOptions, Lookup, ModelFolder, SourceOf};
use pagoda::{Engine, Error, Status};
use pagoda_test_support::Folder;
use ring::digest::{SHA256, digest};

use crate::cases::{cases, folder, open, options};

/// A copy of a model folder, to be damaged.
fn copy(model: &str) -> Folder {
    let made = Folder::new();
    for file in
        ModelFolder::open(folder(model)).unwrap().files.iter().map(|file| file.name.as_str()).chain(["pagoda.json"])
    {
        let to = made.path().join(file);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(folder(model).join(file), to).unwrap();
    }
    made
}

fn refused(folder: &Path) -> Error {
    let error = ModelFolder::open(folder).unwrap_err();
    let again = Engine::open(folder, options()).err().expect("an engine rejects it too");
    assert_eq!(again, error);
    assert_eq!(error.argument(), Some("folder"));
    error
}

fn check(folder: &Path, status: Status, text: &str) {
    let error = refused(folder);
    assert_eq!(error.status(), status, "{error}");
    assert!(error.message().contains(text), "{error} does not say {text:?}");
}

fn hash(bytes: &[u8]) -> String {
    digest(&SHA256, bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Changes a file, and updates pagoda.json accordingly.
fn reseal(folder: &Path, file: &str, change: impl Fn(&mut Vec<u8>)) {
    let mut bytes = fs::read(folder.join(file)).unwrap();
    let before = hash(&bytes);
    change(&mut bytes);
    fs::write(folder.join(file), &bytes).unwrap();
    let text = fs::read_to_string(folder.join("pagoda.json")).unwrap();
    let version = ModelFolder::open(crate::cases::folder("bag")).unwrap().version.clone();
    let text = text.replace(&before, &hash(&bytes)).replace(&version, &"0".repeat(64));
    let sealed = text.replacen(&"0".repeat(64), &hash(text.as_bytes()), 1);
    fs::write(folder.join("pagoda.json"), sealed).unwrap();
}

#[test]
fn a_folder_says_what_it_is() {
    let opened = ModelFolder::open(folder("bag")).unwrap();
    assert_eq!((opened.lookup, opened.version.len(), opened.tables.len()), (Lookup::Bag, 64, 5));
    let names: Vec<_> = opened.features.iter().map(|feature| (feature.name.as_str(), feature.source)).collect();
    assert!(names.contains(&("rating", SourceOf::Action)) && names.contains(&("age", SourceOf::User)));
    assert_eq!((opened.history_rows(0), opened.history_rows(3)), (2, 8));
    assert_eq!(opened.history_bytes(4), 2 * 8 * opened.kv.bytes_per_token);
    assert_eq!(opened.model_bytes(), fs::metadata(opened.file("model.onnx")).unwrap().len());
    assert_eq!(opened.table_bytes(), (40 + 6 + 5 + 7 + 9) * 8 * 4);
}

#[test]
fn nothing_there() {
    let empty = Folder::new();
    check(&empty.path().join("no"), Status::NotFound, "there is no such folder");
    check(empty.path(), Status::NotFound, "there is no pagoda.json in it");
    check(Path::new(""), Status::InvalidArgument, "an empty text");
}

#[test]
fn a_file_is_missing_cut_or_changed() {
    for file in ["model.onnx", "tables/items.safetensors", "tables/ratings.safetensors"] {
        let made = copy("bag");
        let path = made.path().join(file);
        let good = fs::read(&path).unwrap();
        for length in [0, 1, good.len() / 2, good.len() - 1] {
            fs::write(&path, &good[..length]).unwrap();
            check(made.path(), Status::Model, &format!("{file} was cut: it has {length} bytes"));
        }
        for place in [0, good.len() / 2, good.len() - 1] {
            let mut bytes = good.clone();
            bytes[place] ^= 1;
            fs::write(&path, bytes).unwrap();
            check(made.path(), Status::Model, &format!("{file} was changed: its SHA-256 is "));
        }
        fs::remove_file(&path).unwrap();
        check(made.path(), Status::NotFound, &format!("{file} is missing"));
        fs::write(&path, good).unwrap();
        ModelFolder::open(made.path()).unwrap();
    }
}

#[test]
fn pagoda_json_is_cut_or_changed() {
    let made = copy("bag");
    let path = made.path().join("pagoda.json");
    let good = fs::read_to_string(&path).unwrap();
    for length in (0..good.len() - 2).step_by(7) {
        fs::write(&path, &good[..length]).unwrap();
        check(made.path(), Status::Model, "pagoda.json: not JSON");
    }
    let with = |from: &str, to: &str| {
        assert!(good.contains(from), "{from}");
        fs::write(&path, good.replacen(from, to, 1)).unwrap();
    };
    with("\"format\": 1", "\"format\": 2");
    check(made.path(), Status::Unsupported, "this folder has format 2 and this Pagoda reads format 1");
    with("\"max_candidates\": 50", "\"max_candidates\": 51");
    check(made.path(), Status::Model, "it was changed after it was exported");
    with("\"lookup\": \"bag\"", "\"lookup\": \"sack\"");
    check(made.path(), Status::Model, "`lookup`: expected bag or gather, found \"sack\"");
    with("\"page_size\"", "\"page_sise\"");
    check(made.path(), Status::Model, "`kv.page_size` is missing");
    with("\"dim\": 8", "\"dim\": -8");
    check(made.path(), Status::Model, "`tables[0].dim`: expected a whole number");
    with("\"max_history\": 40", "\"max_history\": 9223372036854775807");
    check(made.path(), Status::Model, "`limits.max_history_rows` is 82, and 18446744073709551616 by the sequence");
    for key in ["5", "-2"] {
        let of_rating = "\"keys.rating\",\n      \"candidate_key\": ";
        let of_candidate = "\"candidate\": [\n      [\n        ";
        let text = good.replacen(&format!("{of_rating}null"), &format!("{of_rating}{key}"), 1);
        fs::write(&path, text.replacen(of_candidate, &format!("{of_candidate}\"rating\", "), 1)).unwrap();
        let message = format!("`candidate_key` of \"rating\" is {key}, and table \"ratings\" has 5 rows");
        check(made.path(), Status::Model, &message);
    }
    with("tables/items.safetensors", "../items.safetensors");
    check(made.path(), Status::Model, "the path of a file inside the folder");
    // Every missing member is an error.
    let lines: Vec<&str> = good.lines().collect();
    for (number, line) in lines.iter().enumerate().filter(|(_, line)| line.ends_with(',') && line.contains("\": ")) {
        let fewer: Vec<_> =
            lines.iter().enumerate().filter(|&(other, _)| other != number).map(|(_, line)| *line).collect();
        fs::write(&path, fewer.join("\n")).unwrap();
        assert_eq!(refused(made.path()).status(), Status::Model, "{line}");
    }
    fs::write(&path, good).unwrap();
    ModelFolder::open(made.path()).unwrap();
}

#[test]
fn weights_that_are_not_finite() {
    for (number, name) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        let made = copy("bag");
        // The last number of the last row.
        reseal(made.path(), "tables/items.safetensors", |bytes| {
            let end = bytes.len();
            bytes[end - 4..].copy_from_slice(&number.to_le_bytes());
        });
        check(made.path(), Status::Model, &format!("table \"items\" (tables/items.safetensors) has {name} in row 39"));
    }
    let made = copy("bag");
    let weights = b"layers.0.uvqk.weight";
    reseal(made.path(), "model.onnx", |bytes| {
        // The name of an initialiser, then its numbers: a tag, the length in two bytes, and they.
        let at = bytes.windows(weights.len()).rposition(|part| part == weights).unwrap() + weights.len();
        assert_eq!(bytes[at], 9 << 3 | 2);
        bytes[at + 3 + 4 * 5..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    });
    check(made.path(), Status::Model, "the tensor \"layers.0.uvqk.weight\" has NaN at index 5");
    // What reseal does is what the exporter does.
    let made = copy("bag");
    reseal(made.path(), "model.onnx", |_| {});
    ModelFolder::open(made.path()).unwrap();
}

#[test]
fn options_that_can_not_be() {
    let refused = |options: EngineOptions, argument: &str| {
        let error = Engine::open(folder("gather"), options).err().unwrap();
        assert_eq!((error.status(), error.argument()), (Status::InvalidArgument, Some(argument)), "{error}");
    };
    refused(EngineOptions { instances: 0, ..options() }, "options.instances");
    refused(EngineOptions { instances: 257, ..options() }, "options.instances");
    refused(EngineOptions { max_batch: 0, ..options() }, "options.max_batch");
    refused(EngineOptions { max_batch_rows: 0, ..options() }, "options.max_batch_rows");
    refused(EngineOptions { queue: 0, ..options() }, "options.queue");
    refused(EngineOptions { kv_size: Some(pagoda::KvSize::Bytes(1)), ..options() }, "options.kv_size");
    refused(EngineOptions { ahead_percent: 101, ..options() }, "ahead_percent");
    let case = &cases("gather")[0];
    case.check(&open("gather", options()).rank(&case.whole(case.len())).unwrap(), case.len());
}
