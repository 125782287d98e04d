//! llama.cpp, measured in the same run where it is installed.

use std::path::{Path, PathBuf};

use pagoda::{Error, Result, Status};

use super::by_python::{self, Figures};

/// The environment variable that names a Python with llama.cpp's binding cyllama.
const PYTHON: &str = "PAGODA_LLAMA_CPP";
const SCRIPT: &str = include_str!("llama_cpp.py");

/// As measured once on two cores, and written down.
const NOTED: Figures = Figures { prefill: 375.0, decode: 55.0, eight: 115.0 };

/// Its name and its figures with Q4_0 weights, its fastest form, on the GGUF file beside the model folder; figures that were noted
/// where no Python has it.
pub fn measure(folder: &Path, threads: u32) -> Result<(&'static str, Figures)> {
    if std::env::var_os(PYTHON).is_none_or(|python| python.is_empty()) {
        return Ok(("llama.cpp Q4_0, noted", NOTED));
    }
    let (gguf, threads) = (gguf_beside(folder)?, threads.to_string());
    let measured = by_python::measure(PYTHON, SCRIPT, &[gguf.as_os_str(), threads.as_ref()])?;
    Ok(("llama.cpp Q4_0", measured.unwrap_or(NOTED)))
}

/// The file that the model folder was made of.
fn gguf_beside(folder: &Path) -> Result<PathBuf> {
    let parent = folder.parent().unwrap_or(Path::new("."));
    let is_gguf = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "gguf");
    let mut found = std::fs::read_dir(parent).into_iter().flatten().flatten().map(|entry| entry.path()).filter(is_gguf);
    found.next().ok_or_else(|| {
        let message =
            format!("{} has no .gguf file for llama.cpp: `make model-smollm2` puts one there", parent.display());
        Error::new(Status::NotFound, message).about("--model")
    })
}
