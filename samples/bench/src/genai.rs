//! ONNX Runtime GenAI, measured in the same run where it is installed.

use std::path::Path;

use pagoda::Result;

use super::by_python::{self, Figures};

/// The environment variable that names a Python with the package onnxruntime-genai.
const PYTHON: &str = "PAGODA_GENAI";
const SCRIPT: &str = include_str!("genai.py");

/// Its figures for the decoder in a folder; nothing where no Python has it.
pub fn measure(folder: &Path, threads: u32) -> Result<Option<Figures>> {
    by_python::measure(PYTHON, SCRIPT, &[folder.as_os_str(), threads.to_string().as_ref()])
}
