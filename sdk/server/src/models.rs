//! The models that are served, by name.

use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use pagoda::engine::EngineStore;
use pagoda::folder::{AnyFolder, ModelKind};
use pagoda::{
    Engine, EngineOptions, Error, Generator, GeneratorOptions, KvSize, Model, ModelOptions, Offload, Result, Status,
};
use serde_json::Value;

use crate::config::ModelConfig;
use crate::failure::Failure;

/// A model that is served.
pub struct Served {
    /// Its name.
    pub name: String,
    /// What it does.
    pub kind: Kind,
    /// When it was opened, in seconds since 1970.
    pub since: u64,
}

/// A model by what it does.
pub enum Kind {
    /// It generates text.
    Generate(Arc<Generator>),
    /// It ranks candidates.
    Rank(Arc<Engine>),
    /// It takes tensors and gives tensors.
    Plain(Arc<Model>),
}

impl Kind {
    /// Its word.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Generate(_) => ModelKind::Generate.name(),
            Self::Rank(_) => ModelKind::Rank.name(),
            Self::Plain(_) => "plain",
        }
    }
}

impl Served {
    /// Opens a model.
    pub fn open(config: &ModelConfig) -> Result<Self> {
        let said = |error: Error| {
            let message = format!("{} can not be served: {error}", config.path.display());
            Error::new(error.status(), message).about(&config.name)
        };
        let kind = open(config).map_err(said)?;
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs());
        Ok(Self { name: config.name.clone(), kind, since })
    }

    /// The version of the folder; none for a plain model.
    pub fn version(&self) -> String {
        match &self.kind {
            Kind::Generate(generator) => generator.folder().version.clone(),
            Kind::Rank(engine) => engine.folder().version.clone(),
            Kind::Plain(_) => String::new(),
        }
    }
}

/// The models, in the order of the configuration.
#[derive(Default)]
pub struct Models {
    models: Vec<Arc<Served>>,
}

impl Models {
    /// Opens all.
    pub fn open(configs: &[ModelConfig]) -> Result<Self> {
        let models = configs.iter().map(|config| Served::open(config).map(Arc::new));
        Ok(Self { models: models.collect::<Result<_>>()? })
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Served>> {
        self.models.iter()
    }

    /// The model of a name.
    pub fn get(&self, name: &str) -> Result<&Arc<Served>, Failure> {
        self.models.iter().find(|model| model.name == name).ok_or_else(|| {
            let names: Vec<&str> = self.models.iter().map(|model| model.name.as_str()).collect();
            Failure::no_model(name, &names)
        })
    }

    /// The model of a name that generates text.
    pub fn generator(&self, name: &str) -> Result<(&Arc<Served>, &Arc<Generator>), Failure> {
        let served = self.get(name)?;
        match &served.kind {
            Kind::Generate(generator) => Ok((served, generator)),
            kind => {
                let message = format!("{name} does not generate text: it is a model of the kind {}", kind.name());
                Err(Error::new(Status::Unsupported, message).about("model").into())
            }
        }
    }

    /// The model of a name that generates text; without a name, the first one.
    pub fn generator_or_first(&self, name: Option<&str>) -> Result<(&Arc<Served>, &Arc<Generator>), Failure> {
        let first = self.models.iter().find(|served| matches!(served.kind, Kind::Generate(_)));
        match (name, first) {
            (Some(name), _) => self.generator(name),
            (None, Some(first)) => self.generator(&first.name),
            (None, None) => {
                Err(Error::new(Status::Unsupported, "no model that generates text is served").about("model").into())
            }
        }
    }

    /// The ranker of a name; without a name, the only one.
    pub fn ranker(&self, name: Option<&str>) -> Result<(&Arc<Served>, &Arc<Engine>), Failure> {
        let Some(name) = name else {
            let mut rankers = self.models.iter().filter_map(|served| match &served.kind {
                Kind::Rank(engine) => Some((served, engine)),
                _ => None,
            });
            return match (rankers.next(), rankers.next()) {
                (Some(only), None) => Ok(only),
                (None, _) => {
                    Err(Error::new(Status::Unsupported, "no model that ranks is served").about("model").into())
                }
                (Some(_), Some(_)) => {
                    Err(Error::invalid("model", "missing: several models rank, and GET /v1/models names them").into())
                }
            };
        };
        let served = self.get(name)?;
        match &served.kind {
            Kind::Rank(engine) => Ok((served, engine)),
            kind => {
                let message = format!("{name} does not rank: it is a model of the kind {}", kind.name());
                Err(Error::new(Status::Unsupported, message).about("model").into())
            }
        }
    }
}

fn open(config: &ModelConfig) -> Result<Kind> {
    let model = ModelOptions {
        provider: config.provider,
        device_id: config.device,
        intra_op_threads: config.threads,
        ..ModelOptions::default()
    };
    if !config.path.is_dir() {
        return Model::open(&config.path, &model).map(|model| Kind::Plain(Arc::new(model)));
    }
    let store = config.store.clone().map(EngineStore::new);
    match kind_of(&config.path)? {
        ModelKind::Generate => {
            let options = GeneratorOptions {
                model,
                kv_size: KvSize::Bytes(config.cache),
                kv_format: config.kv_format,
                host_bytes: config.host_cache,
                store,
                max_batch: config.max_batch,
                queue: config.queue,
                ..GeneratorOptions::default()
            };
            Generator::open(&config.path, options).map(|generator| Kind::Generate(Arc::new(generator)))
        }
        _ => {
            let options = EngineOptions {
                model,
                kv_size: (config.cache > 0).then_some(KvSize::Bytes(config.cache)),
                host_bytes: config.host_cache,
                store,
                // Committed histories survive the end of this process, however it ends.
                offload: Offload::AtCommit,
                max_batch: config.max_batch,
                queue: config.queue,
                ..EngineOptions::default()
            };
            Engine::open(&config.path, options).map(|engine| Kind::Rank(Arc::new(engine)))
        }
    }
}

/// The kind of a folder, without the hashes of all files: those are checked when it is opened.
fn kind_of(folder: &Path) -> Result<ModelKind> {
    let json = std::fs::read_to_string(folder.join("pagoda.json")).ok();
    let json = json.and_then(|text| serde_json::from_str::<Value>(&text).ok());
    match json.as_ref().and_then(|json| json.get("kind")).and_then(Value::as_str) {
        Some("generate") => Ok(ModelKind::Generate),
        Some("rank") => Ok(ModelKind::Rank),
        // Its error says what is wrong with the folder.
        _ => AnyFolder::open(folder).map(|folder| folder.kind),
    }
}
