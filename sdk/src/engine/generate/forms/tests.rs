//! What steps read of pages: nothing that was not written.

use std::path::{Path, PathBuf};

use pagoda_test_support::Folder;

use super::super::{GenerateRequest, Generator, GeneratorOptions};
use crate::kv::KvSize;
use crate::runtime::{ModelOptions, Provider};

fn data(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(path)
}

/// One of `tests/data`, with a tokenizer.
fn copy_of(name: &str) -> Folder {
    let copy = Folder::new();
    for from in [data("llm/llama/tokenizer.json"), data(name)] {
        let files = if from.is_dir() {
            std::fs::read_dir(&from).unwrap().map(|file| file.unwrap().path()).collect()
        } else {
            vec![from]
        };
        for file in files {
            std::fs::copy(&file, copy.path().join(file.file_name().unwrap())).unwrap();
        }
    }
    copy
}

fn open(folder: &Folder) -> Generator {
    let model = ModelOptions { provider: Provider::Cpu, intra_op_threads: 1, ..ModelOptions::default() };
    let options =
        GeneratorOptions { model, kv_size: KvSize::Pages(24), max_stretch: 0.0, ..GeneratorOptions::default() };
    Generator::open(folder.path(), options).unwrap()
}

/// Has all pages hold NaN, in any type.
fn fill_with_nan(generator: &Generator) {
    let model = &generator.shared.model;
    for layer in 0..model.folder.kv.layers {
        let pool = model.kv.pool(layer).unwrap();
        let bytes = pool.memory().unwrap().1;
        // SAFETY: nothing runs yet.
        unsafe { pool.copy_in(0, &vec![0xff; bytes]) }.unwrap();
    }
}

/// Answers of several lengths, together, with drafts and with several answers to one prompt.
fn answers(generator: &Generator) -> Vec<Vec<u32>> {
    let request = |(n, len): (u32, usize)| GenerateRequest {
        do_sample: Some(false),
        ignore_eos: true,
        max_new_tokens: Some(40),
        max_draft: (n == 1).then_some(4),
        n: (n == 2).then_some(2),
        ..GenerateRequest::new((0..len as u32).map(|at| (at * (7 + n) + n) % 200 + 5).collect::<Vec<_>>())
    };
    let requests: Vec<_> = (0..).zip([1, 33, 5, 70, 5, 64]).map(request).collect();
    let answers = generator.generate_all(&requests, |_| ()).into_iter().map(Result::unwrap);
    answers.flat_map(|response| response.choices).map(|choice| choice.tokens).collect()
}

#[test]
fn no_row_is_read_that_was_not_written() {
    for name in [
        "generate/llama-functional",
        "decoders/llama-optimum",
        "decoders/gemma3-optimum",
        "decoders/llama-1-optimum-merged",
        "decoders/llama-genai",
        "decoders/qwen2-genai",
    ] {
        let folder = copy_of(name);
        let expected = answers(&open(&folder));
        assert_eq!(expected.len(), 7);
        let generator = open(&folder);
        fill_with_nan(&generator);
        assert_eq!(answers(&generator), expected, "{name}");
        // What it has cached is read again.
        assert_eq!(answers(&generator), expected, "{name}, again");
    }
}
