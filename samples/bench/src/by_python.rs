//! Other runtimes, measured in the same run by a Python that has them.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::process::Command;

use pagoda::{Error, Result, Status};

/// Tokens per second: of a prompt of 512, of decoding after it, and of 8 sequences at once.
pub struct Figures {
    pub prefill: f64,
    pub decode: f64,
    pub eight: f64,
}

/// What `script` prints, run by the Python that the environment variable names; nothing if it names none.
pub fn measure(variable: &'static str, script: &str, arguments: &[&OsStr]) -> Result<Option<Figures>> {
    let Some(python) = std::env::var_os(variable).filter(|python| !python.is_empty()) else { return Ok(None) };
    let failed = |why: String| {
        Error::new(Status::Runtime, format!("the benchmark's script, run by {}: {why}", python.display()))
            .about(variable)
    };
    let output = Command::new(&python)
        .args(["-c", script])
        .args(arguments)
        .output()
        .map_err(|error| failed(error.to_string()))?;
    if !output.status.success() {
        return Err(failed(format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim())));
    }
    let printed = || String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let figures: HashMap<String, f64> = serde_json::from_slice(&output.stdout)
        .map_err(|error| failed(format!("it printed {:?}: {error}", printed())))?;
    let figure = |key: &str| {
        figures.get(key).copied().ok_or_else(|| failed(format!("it printed {:?}, without {key}", printed())))
    };
    Ok(Some(Figures { prefill: figure("prefill")?, decode: figure("decode")?, eight: figure("eight")? }))
}
