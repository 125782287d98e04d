//! What is served, where, and within which limits.

mod file;
mod redis;
mod size;

use std::path::{Path, PathBuf};
use std::time::Duration;

use pagoda::{Error, KvFormat, Provider, Result};

use crate::logging::LogFormat;
use crate::traces::TracesConfig;

pub use redis::RedisConfig;

/// The longest name of a model.
const LONGEST_NAME: usize = 128;

/// What is served, and where.
#[derive(Clone, Debug)]
pub struct Config {
    /// The address and the port, such as `127.0.0.1:8000`. Port 0: one that is free.
    pub listen: String,
    /// The models.
    pub models: Vec<ModelConfig>,
    /// The limits.
    pub limits: Limits,
    /// Where API keys come from; `None`: requests need none.
    pub keys: Option<KeysFrom>,
    /// The certificate and the key of TLS; `None`: plain HTTP.
    pub tls: Option<TlsFiles>,
    /// The origins of web pages that may ask, such as `https://app.example`; `*`: all.
    pub cors: Vec<String>,
    /// Whether requests may load and unload models.
    pub repository_control: bool,
    /// Where traces of requests are sent; `None`: nowhere.
    pub traces: Option<TracesConfig>,
    /// How the log is written.
    pub log: LogFormat,
    /// The least severe lines of the log: `error`, `warn`, `info`, `debug`, or `off`.
    pub log_level: String,
}

/// Where API keys come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeysFrom {
    /// A file with a key on each line.
    File(PathBuf),
    /// A variable of the environment, with keys that commas part.
    Variable(String),
}

/// The files of TLS, in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate, and those that it rests on.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:8000".into(),
            models: Vec::new(),
            limits: Limits::default(),
            keys: None,
            tls: None,
            cors: Vec::new(),
            repository_control: false,
            traces: None,
            log: LogFormat::Text,
            log_level: "info".into(),
        }
    }
}

/// A model, and how it is opened.
#[derive(Clone, Debug)]
pub struct ModelConfig {
    /// The name that requests have for it.
    pub name: String,
    /// A model folder, or an ONNX file.
    pub path: PathBuf,
    /// Where it runs.
    pub provider: Provider,
    /// Which GPU.
    pub device: u32,
    /// Compute threads; 0: one for each core.
    pub threads: u32,
    /// Whether those threads spin for a while after each run. They wake sooner, and take cores from connections.
    pub spin: bool,
    /// Bytes for keys and values: GPU memory if the model runs there.
    pub cache: u64,
    /// Bytes of host memory for keys and values that leave `cache`; 0: none.
    pub host_cache: u64,
    /// The folder in which keys and values survive a restart.
    pub store: Option<PathBuf>,
    /// The Redis Cluster that has the embedding tables of a ranker; `None`: they are in host memory.
    pub redis: Option<RedisConfig>,
    /// How keys and values are kept; `None`: as the model was exported.
    pub kv_format: Option<KvFormat>,
    /// The maximum number of sequences, or of requests to rank, that run together.
    pub max_batch: u32,
    /// The maximum number of answers, or of requests to rank, that wait.
    pub queue: u32,
}

impl ModelConfig {
    /// The model at a path, named like its last part.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        Self {
            name: default_name(&path),
            path,
            provider: Provider::Auto,
            device: 0,
            threads: 0,
            spin: false,
            cache: 1 << 30,
            host_cache: 0,
            store: None,
            redis: None,
            kv_format: None,
            max_batch: 64,
            queue: 256,
        }
    }

    /// Reads `PATH` or `NAME=PATH`.
    pub fn parse(text: &str) -> Self {
        match text.split_once('=') {
            Some((name, path)) if !name.is_empty() && !name.contains('/') => {
                Self { name: name.to_owned(), ..Self::new(path) }
            }
            _ => Self::new(text),
        }
    }
}

/// What a client may use up.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Bytes of a request's body.
    pub body: u64,
    /// How long a client may take for the head of a request, and how long a connection may be idle between two.
    pub header_timeout: Duration,
    /// How long a client may take for the body.
    pub body_timeout: Duration,
    /// How long a client may read nothing of a response that is there.
    pub write_timeout: Duration,
    /// Connections that are open at the same time.
    pub connections: u32,
    /// Requests that are answered at the same time; one more is rejected with 429.
    pub requests: u32,
    /// Requests that a key may send in a minute; 0: any number.
    pub requests_per_minute: u32,
    /// Tokens of prompts and answers that a key may use in a minute; 0: any number.
    pub tokens_per_minute: u32,
    /// How long requests may still run after a signal to end. Then they are cut.
    pub drain_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body: 16 << 20,
            header_timeout: Duration::from_secs(30),
            body_timeout: Duration::from_secs(60),
            write_timeout: Duration::from_secs(60),
            connections: 4096,
            requests: 1024,
            requests_per_minute: 0,
            tokens_per_minute: 0,
            drain_timeout: Duration::from_secs(30),
        }
    }
}

impl Config {
    /// Reads a file such as `serve.toml`. Paths in it are relative to its folder.
    ///
    /// # Errors
    /// NOT_FOUND and IO if it can not be read. INVALID_ARGUMENT for a value that can not be used, with its place.
    pub fn read(path: &Path) -> Result<Self> {
        file::read(path)
    }

    /// Checks what can be checked before models are opened.
    ///
    /// # Errors
    /// INVALID_ARGUMENT.
    pub fn check(&self) -> Result<()> {
        if self.models.is_empty() {
            return Err(Error::invalid("MODEL", "none is given: name a model folder or an ONNX file"));
        }
        let limits = [("limits.connections", self.limits.connections), ("limits.requests", self.limits.requests)];
        if let Some((name, _)) = limits.iter().find(|(_, most)| *most == 0) {
            return Err(Error::invalid(*name, "0 would refuse everything; expected 1 or more"));
        }
        for (at, model) in self.models.iter().enumerate() {
            check_name(&model.name)?;
            if let Some(other) = self.models[..at].iter().find(|other| other.name == model.name) {
                let (a, b, name) = (other.path.display(), model.path.display(), &model.name);
                let message = format!("{a} and {b} would both be `{name}`: name one of them, OTHER={b}");
                return Err(Error::invalid("MODEL", message));
            }
        }
        Ok(())
    }
}

fn check_name(name: &str) -> Result<()> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-:".contains(c);
    if name.is_empty() || name.len() > LONGEST_NAME || !name.chars().all(is_plain) {
        let message = format!(
            "{name:?} is no name for a model: expected up to {LONGEST_NAME} letters, digits, `.`, `_`, `-` and `:`; \
             NAME=PATH gives another one"
        );
        return Err(Error::invalid("MODEL", message));
    }
    Ok(())
}

fn default_name(path: &Path) -> String {
    // `.` and `..` have no last part until they are resolved.
    let resolved = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let is_file = resolved.extension().is_some_and(|extension| extension == "onnx");
    let last = if is_file { resolved.file_stem() } else { resolved.file_name() };
    let plain = |c: char| if c.is_ascii_alphanumeric() || "._-:".contains(c) { c } else { '-' };
    last.map(|name| name.to_string_lossy().chars().map(plain).collect()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(models: &[&str]) -> Config {
        Config { models: models.iter().map(|text| ModelConfig::parse(text)).collect(), ..Config::default() }
    }

    #[test]
    fn models_are_named_like_their_paths_or_as_said() {
        let named = |text: &str| {
            let model = ModelConfig::parse(text);
            (model.name, model.path.display().to_string())
        };
        assert_eq!(named("a/smol lm"), ("smol-lm".into(), "a/smol lm".into()));
        assert_eq!(named("a/net.onnx"), ("net".into(), "a/net.onnx".into()));
        assert_eq!(named("big=a/net.onnx"), ("big".into(), "a/net.onnx".into()));
        assert_eq!(named("a/b=c"), ("b-c".into(), "a/b=c".into()));
    }

    #[test]
    fn what_can_not_be_served_is_said() {
        assert!(with(&["a", "b=c/a", "x:1=d"]).check().is_ok());
        for (models, message) in [
            (&[][..], "MODEL: none is given"),
            (&["a", "b/a"], "MODEL: a and b/a would both be `a`: name one of them, OTHER=b/a"),
            (&["é=a"], "MODEL: \"é\" is no name for a model"),
        ] {
            let error = with(models).check().unwrap_err().to_string();
            assert!(error.starts_with(message), "{error}");
        }
    }
}
