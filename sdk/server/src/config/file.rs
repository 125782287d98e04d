//! The configuration file, in TOML.

use std::path::{Path, PathBuf};

use pagoda::{Error, KvFormat, Provider, Result, Status};
use serde::Deserialize;

use super::size::{Bytes, Seconds};
use super::{Config, KeysFrom, Limits, ModelConfig, RedisConfig, TlsFiles};
use crate::logging::LogFormat;
use crate::traces::{Endpoint, TracesConfig};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    listen: Option<String>,
    keys_file: Option<PathBuf>,
    keys_variable: Option<String>,
    tls: Option<TlsTable>,
    #[serde(default)]
    cors: Vec<String>,
    #[serde(default)]
    repository_control: bool,
    log: Option<LogWord>,
    log_level: Option<String>,
    traces: Option<TracesTable>,
    #[serde(default)]
    limits: LimitsTable,
    #[serde(default)]
    model: Vec<ModelTable>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TlsTable {
    certificate: PathBuf,
    key: PathBuf,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TracesTable {
    endpoint: String,
    service: Option<String>,
    ratio: Option<f64>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum LogWord {
    Text,
    Json,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct LimitsTable {
    body: Option<Bytes>,
    header_timeout: Option<Seconds>,
    body_timeout: Option<Seconds>,
    write_timeout: Option<Seconds>,
    connections: Option<u32>,
    requests: Option<u32>,
    requests_per_minute: Option<u32>,
    tokens_per_minute: Option<u32>,
    drain_timeout: Option<Seconds>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelTable {
    path: PathBuf,
    name: Option<String>,
    provider: Option<ProviderWord>,
    device: Option<u32>,
    threads: Option<u32>,
    spin: Option<bool>,
    cache: Option<Bytes>,
    host_cache: Option<Bytes>,
    store: Option<PathBuf>,
    redis: Option<RedisConfig>,
    kv_format: Option<String>,
    max_batch: Option<u32>,
    queue: Option<u32>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum ProviderWord {
    Auto,
    Cpu,
    Cuda,
}

/// See [`Config::read`].
pub fn read(path: &Path) -> Result<Config> {
    let text = std::fs::read_to_string(path).map_err(|error| {
        let status = if error.kind() == std::io::ErrorKind::NotFound { Status::NotFound } else { Status::Io };
        Error::new(status, format!("{} can not be read: {error}", path.display())).about("--config")
    })?;
    parse(&text, path.parent().unwrap_or(Path::new("")))
        .map_err(|message| Error::invalid("--config", format!("{}: {message}", path.display())))
}

fn parse(text: &str, folder: &Path) -> Result<Config, String> {
    let file: File = toml::from_str(text).map_err(|error| one_line(text, &error))?;
    let mut config = Config::default();
    if let Some(listen) = file.listen {
        config.listen = listen;
    }
    config.keys = match (file.keys_file, file.keys_variable) {
        (Some(file), None) => Some(KeysFrom::File(folder.join(file))),
        (None, Some(name)) => Some(KeysFrom::Variable(name)),
        (None, None) => None,
        (Some(_), Some(_)) => return Err("keys_file and keys_variable are both there: name one of them".into()),
    };
    config.tls = file.tls.map(|tls| TlsFiles { certificate: folder.join(tls.certificate), key: folder.join(tls.key) });
    config.cors = file.cors;
    config.repository_control = file.repository_control;
    if let Some(LogWord::Json) = file.log {
        config.log = LogFormat::Json;
    }
    if let Some(level) = file.log_level {
        config.log_level = level;
    }
    config.traces = file.traces.map(TracesTable::config).transpose()?;
    config.limits = file.limits.over(config.limits);
    config.models = file.model.into_iter().map(|table| table.model(folder)).collect::<Result<_, _>>()?;
    Ok(config)
}

/// `line 3: unknown field …`: the crate's own form has several lines.
fn one_line(text: &str, error: &toml::de::Error) -> String {
    let message = error.message().replace('\n', ", ");
    match error.span() {
        Some(span) => format!("line {}: {message}", text[..span.start.min(text.len())].matches('\n').count() + 1),
        None => message,
    }
}

impl TracesTable {
    fn config(self) -> Result<TracesConfig, String> {
        let endpoint = Endpoint::parse(&self.endpoint).map_err(|message| format!("traces.endpoint: {message}"))?;
        let ratio = self.ratio.unwrap_or(1.0);
        if !(0.0..=1.0).contains(&ratio) {
            return Err(format!("traces.ratio: {ratio} is not between 0 and 1"));
        }
        Ok(TracesConfig { endpoint, service: self.service.unwrap_or_else(|| "pagoda".into()), ratio })
    }
}

impl LimitsTable {
    fn over(self, limits: Limits) -> Limits {
        let time = |own: Option<Seconds>, default| own.map_or(default, |seconds| seconds.0);
        Limits {
            body: self.body.map_or(limits.body, |bytes| bytes.0),
            header_timeout: time(self.header_timeout, limits.header_timeout),
            body_timeout: time(self.body_timeout, limits.body_timeout),
            write_timeout: time(self.write_timeout, limits.write_timeout),
            connections: self.connections.unwrap_or(limits.connections),
            requests: self.requests.unwrap_or(limits.requests),
            requests_per_minute: self.requests_per_minute.unwrap_or(limits.requests_per_minute),
            tokens_per_minute: self.tokens_per_minute.unwrap_or(limits.tokens_per_minute),
            drain_timeout: time(self.drain_timeout, limits.drain_timeout),
        }
    }
}

impl ModelTable {
    fn model(self, folder: &Path) -> Result<ModelConfig, String> {
        let default = ModelConfig::new(folder.join(self.path));
        let kv_format =
            match self.kv_format.as_deref() {
                None => None,
                Some(word) => Some(KvFormat::named(word).ok_or_else(|| {
                    format!("kv_format: {word:?} is none of \"native\", \"int8\", \"int4\" and \"fp8\"")
                })?),
            };
        Ok(ModelConfig {
            name: self.name.unwrap_or(default.name),
            path: default.path,
            provider: match self.provider.unwrap_or(ProviderWord::Auto) {
                ProviderWord::Auto => Provider::Auto,
                ProviderWord::Cpu => Provider::Cpu,
                ProviderWord::Cuda => Provider::Cuda,
            },
            device: self.device.unwrap_or(default.device),
            threads: self.threads.unwrap_or(default.threads),
            spin: self.spin.unwrap_or(default.spin),
            cache: self.cache.map_or(default.cache, |bytes| bytes.0),
            host_cache: self.host_cache.map_or(default.host_cache, |bytes| bytes.0),
            store: self.store.map(|store| folder.join(store)),
            redis: self.redis,
            kv_format,
            max_batch: self.max_batch.unwrap_or(default.max_batch),
            queue: self.queue.unwrap_or(default.queue),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn every_field_is_read() {
        let text = r#"
            listen = "0.0.0.0:80"
            keys_file = "keys"
            cors = ["https://a"]
            repository_control = true
            log = "json"
            log_level = "warn"
            [tls]
            certificate = "tls/cert.pem"
            key = "/key.pem"
            [traces]
            endpoint = "http://otel:4318"
            service = "chat"
            ratio = 0.25
            [limits]
            body = "1MiB"
            header_timeout = 2.5
            body_timeout = 3
            write_timeout = 4
            connections = 7
            requests = 8
            requests_per_minute = 60
            tokens_per_minute = 9000
            drain_timeout = 1
            [[model]]
            path = "models/smol"
            name = "smol"
            provider = "cpu"
            device = 1
            threads = 2
            spin = true
            cache = "512MiB"
            host_cache = 4096
            store = "/var/lib/smol"
            kv_format = "int8"
            max_batch = 9
            queue = 10
            [[model]]
            path = "/models/net.onnx"
            [model.redis]
            nodes = ["a:1"]
            password_variable = "P"
            tls = true
        "#;
        let config = parse(text, Path::new("/etc/pagoda")).unwrap();
        assert_eq!(config.listen, "0.0.0.0:80");
        assert_eq!(config.keys, Some(KeysFrom::File("/etc/pagoda/keys".into())));
        let tls = TlsFiles { certificate: "/etc/pagoda/tls/cert.pem".into(), key: "/key.pem".into() };
        assert_eq!((config.tls, config.cors), (Some(tls), vec!["https://a".to_owned()]));
        assert!(config.repository_control);
        assert_eq!((config.log, config.log_level.as_str()), (LogFormat::Json, "warn"));
        let endpoint = Endpoint::parse("http://otel:4318").unwrap();
        assert_eq!(config.traces, Some(TracesConfig { endpoint, service: "chat".into(), ratio: 0.25 }));
        let limits = &config.limits;
        assert_eq!((limits.body, limits.connections, limits.requests), (1 << 20, 7, 8));
        assert_eq!((limits.requests_per_minute, limits.tokens_per_minute), (60, 9000));
        assert_eq!(limits.header_timeout, Duration::from_millis(2500));
        assert_eq!(limits.drain_timeout, Duration::from_secs(1));
        assert_eq!((limits.body_timeout, limits.write_timeout), (Duration::from_secs(3), Duration::from_secs(4)));
        let [smol, net] = &config.models[..] else { panic!("not two models") };
        assert_eq!((smol.name.as_str(), smol.path.as_path()), ("smol", Path::new("/etc/pagoda/models/smol")));
        assert_eq!((smol.provider, smol.device, smol.threads, smol.spin), (Provider::Cpu, 1, 2, true));
        assert_eq!((smol.cache, smol.host_cache), (512 << 20, 4096));
        assert_eq!(smol.store.as_deref(), Some(Path::new("/var/lib/smol")));
        assert_eq!((smol.kv_format, smol.max_batch, smol.queue), (Some(KvFormat::Int8), 9, 10));
        let redis =
            RedisConfig { nodes: vec!["a:1".into()], user: None, password_variable: Some("P".into()), tls: true };
        assert_eq!((&smol.redis, &net.redis), (&None, &Some(redis)));
        assert_eq!((net.name.as_str(), net.path.as_path()), ("net", Path::new("/models/net.onnx")));
    }

    #[test]
    fn errors_name_the_line() {
        for (text, message) in [
            ("listen = 1", "line 1: invalid type: integer `1`, expected a string"),
            ("\nlistne = 'a'", "line 2: unknown field `listne`, expected"),
            ("[limits]\nbody = 'much'", "line 2: \"much\" is not a number of bytes such as"),
            ("[limits]\nbody = -1", "line 2: -1 bytes are less than none"),
            ("[limits]\nheader_timeout = 0.0", "line 2: 0 is not a number of seconds above 0"),
            ("[[model]]\nname = 'a'", "line 1: missing field `path`"),
            ("[[model]]\npath = 'a'\nprovider = 'tpu'", "line 3: unknown variant `tpu`, expected"),
            ("[[model]]\npath = 'a'\nkv_format = 'int2'", "kv_format: \"int2\" is none of"),
            ("keys_file = 'a'\nkeys_variable = 'b'", "keys_file and keys_variable are both there"),
            ("[traces]\nendpoint = 'a'", "traces.endpoint: \"a\" "),
            ("[traces]\nendpoint = 'http://a'\nratio = 2.0", "traces.ratio: 2 is not between 0 and 1"),
            ("log = 'xml'", "line 1: unknown variant `xml`"),
            ("a =", "line 1: "),
        ] {
            let error = parse(text, Path::new("")).unwrap_err();
            assert!(error.starts_with(message), "{text}\n{error}");
        }
    }
}
