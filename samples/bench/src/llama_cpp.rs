//! llama.cpp, measured in the same run where it is installed.

use std::path::{Path, PathBuf};
use std::process::Command;

use pagoda::{Error, Result, Status};

/// The environment variable that names a Python with llama.cpp's binding cyllama.
const PYTHON: &str = "PAGODA_LLAMA_CPP";
const SCRIPT: &str = include_str!("llama_cpp.py");

/// Tokens per second of llama.cpp with Q4_0 weights, its fastest form.
pub struct LlamaCpp {
    pub name: &'static str,
    pub prefill: f64,
    pub decode: f64,
    pub eight: f64,
}

impl LlamaCpp {
    /// As measured once on two cores, and written down.
    const NOTED: Self = Self { name: "llama.cpp Q4_0, noted", prefill: 375.0, decode: 55.0, eight: 115.0 };

    /// Measures it on the GGUF file beside the model folder, if the environment variable names a Python for it.
    pub fn measure(folder: &Path, threads: u32) -> Result<Self> {
        let Some(python) = std::env::var_os(PYTHON).filter(|python| !python.is_empty()) else { return Ok(Self::NOTED) };
        let gguf = gguf_beside(folder)?;
        let failed = |why: String| {
            Error::new(Status::Runtime, format!("llama.cpp by {}: {why}", python.display())).about(PYTHON)
        };
        let output = Command::new(&python)
            .args(["-c", SCRIPT])
            .arg(gguf)
            .arg(threads.to_string())
            .output()
            .map_err(|error| failed(error.to_string()))?;
        if !output.status.success() {
            return Err(failed(format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim())));
        }
        let text = String::from_utf8_lossy(&output.stdout);
        let figure = |key: &str| {
            let after = text.split(&format!("\"{key}\": ")).nth(1);
            let number =
                after.and_then(|rest| rest.split([',', '}']).next()).and_then(|number| number.trim().parse().ok());
            number.ok_or_else(|| failed(format!("it printed {:?}, without {key}", text.trim())))
        };
        let (prefill, decode, eight) = (figure("prefill")?, figure("decode")?, figure("eight")?);
        Ok(Self { name: "llama.cpp Q4_0", prefill, decode, eight })
    }
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
