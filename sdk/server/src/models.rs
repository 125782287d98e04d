//! The models that are served, by name.

use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use axum::http::StatusCode;
use pagoda::engine::EngineStore;
use pagoda::folder::{AnyFolder, GenerateFolder, ModelKind};
use pagoda::{
    Engine, EngineOptions, Error, Generator, GeneratorOptions, KvSize, Model, ModelOptions, Offload, Result, Status,
};
use parking_lot::{RwLock, RwLockReadGuard};
use serde_json::Value;

use crate::config::ModelConfig;
use crate::failure::Failure;
use crate::openai::ToolForm;
use crate::statistics::Statistics;

/// A model that is served.
pub struct Served {
    /// Its name.
    pub name: String,
    /// What it does.
    pub kind: Kind,
    /// How calls of tools are written, where a grammar says so.
    pub tool_form: ToolForm,
    /// What its requests have cost.
    pub statistics: Arc<Statistics>,
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
        let tool_form = match &kind {
            Kind::Generate(generator) => ToolForm::of(generator),
            _ => ToolForm::Hermes,
        };
        Ok(Self { name: config.name.clone(), kind, tool_form, statistics: Arc::default(), since })
    }

    /// Whether a request holds it, beside the one that asks.
    pub fn is_in_use(self: &Arc<Self>) -> bool {
        let inner = match &self.kind {
            Kind::Generate(generator) => Arc::strong_count(generator),
            Kind::Rank(engine) => Arc::strong_count(engine),
            Kind::Plain(model) => Arc::strong_count(model),
        };
        Arc::strong_count(self) > 1 || inner > 1
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

/// The models, in the order of the configuration. Requests that run keep the model that they began with.
#[derive(Default)]
pub struct Models {
    slots: RwLock<Vec<Slot>>,
}

/// A model of the configuration.
struct Slot {
    config: ModelConfig,
    /// Nothing if it is unloaded.
    served: Option<Arc<Served>>,
}

/// A model of the configuration, and whether it takes requests.
pub struct Listed {
    /// Its name.
    pub name: String,
    /// The model, unless it is unloaded.
    pub served: Option<Arc<Served>>,
}

impl Models {
    /// Opens all.
    pub fn open(configs: &[ModelConfig]) -> Result<Self> {
        let slot = |config: &ModelConfig| {
            let served = Some(Arc::new(Served::open(config)?));
            Ok(Slot { config: config.clone(), served })
        };
        Ok(Self { slots: RwLock::new(configs.iter().map(slot).collect::<Result<_>>()?) })
    }

    /// Those that take requests.
    pub fn all(&self) -> Vec<Arc<Served>> {
        self.read().iter().filter_map(|slot| slot.served.clone()).collect()
    }

    /// Those of the configuration.
    pub fn list(&self) -> Vec<Listed> {
        let listed = |slot: &Slot| Listed { name: slot.config.name.clone(), served: slot.served.clone() };
        self.read().iter().map(listed).collect()
    }

    /// The model of a name.
    pub fn get(&self, name: &str) -> Result<Arc<Served>, Failure> {
        self.slot(name, |slot| slot.served.clone())?.ok_or_else(|| {
            let message = format!("{name} is unloaded");
            Failure::new(StatusCode::NOT_FOUND, "model_not_loaded", message)
        })
    }

    /// How the model of a name is opened.
    pub fn config(&self, name: &str) -> Result<ModelConfig, Failure> {
        self.slot(name, |slot| slot.config.clone())
    }

    /// Serves another model of this name, or none, from now on. Returns the one before.
    pub fn replace(&self, name: &str, served: Option<Arc<Served>>) -> Option<Arc<Served>> {
        let mut slots = self.slots.write();
        let slot = slots.iter_mut().find(|slot| slot.config.name == name)?;
        std::mem::replace(&mut slot.served, served)
    }

    /// The model of a name that generates text.
    pub fn generator(&self, name: &str) -> Result<(Arc<Served>, Arc<Generator>), Failure> {
        let served = self.get(name)?;
        match &served.kind {
            Kind::Generate(generator) => Ok((Arc::clone(&served), Arc::clone(generator))),
            kind => {
                let message = format!("{name} does not generate text: it is a model of the kind {}", kind.name());
                Err(Error::new(Status::Unsupported, message).about("model").into())
            }
        }
    }

    /// The model of a name that generates text; without a name, the first one.
    pub fn generator_or_first(&self, name: Option<&str>) -> Result<(Arc<Served>, Arc<Generator>), Failure> {
        if let Some(name) = name {
            return self.generator(name);
        }
        let first = self.all().into_iter().find_map(|served| match &served.kind {
            Kind::Generate(generator) => Some((Arc::clone(&served), Arc::clone(generator))),
            _ => None,
        });
        first.ok_or_else(|| {
            Error::new(Status::Unsupported, "no model that generates text is served").about("model").into()
        })
    }

    /// The ranker of a name; without a name, the only one.
    pub fn ranker(&self, name: Option<&str>) -> Result<(Arc<Served>, Arc<Engine>), Failure> {
        let as_ranker = |served: &Arc<Served>| match &served.kind {
            Kind::Rank(engine) => Some((Arc::clone(served), Arc::clone(engine))),
            _ => None,
        };
        if let Some(name) = name {
            let served = self.get(name)?;
            return as_ranker(&served).ok_or_else(|| {
                let message = format!("{name} does not rank: it is a model of the kind {}", served.kind.name());
                Error::new(Status::Unsupported, message).about("model").into()
            });
        }
        let all = self.all();
        let mut rankers = all.iter().filter_map(as_ranker);
        match (rankers.next(), rankers.next()) {
            (Some(only), None) => Ok(only),
            (None, _) => Err(Error::new(Status::Unsupported, "no model that ranks is served").about("model").into()),
            (Some(_), Some(_)) => {
                Err(Error::invalid("model", "missing: several models rank, and GET /v1/models names them").into())
            }
        }
    }

    fn slot<T>(&self, name: &str, read: impl Fn(&Slot) -> T) -> Result<T, Failure> {
        let slots = self.read();
        slots.iter().find(|slot| slot.config.name == name).map(read).ok_or_else(|| {
            let names: Vec<&str> = slots.iter().map(|slot| slot.config.name.as_str()).collect();
            Failure::no_model(name, &names)
        })
    }

    fn read(&self) -> RwLockReadGuard<'_, Vec<Slot>> {
        self.slots.read()
    }
}

fn open(config: &ModelConfig) -> Result<Kind> {
    let model = ModelOptions {
        provider: config.provider,
        device_id: config.device,
        intra_op_threads: config.threads,
        sleep_when_idle: !config.spin,
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
        None if GenerateFolder::is_foreign(folder) => Ok(ModelKind::Generate),
        // Its error says what is wrong with the folder.
        _ => AnyFolder::open(folder).map(|folder| folder.kind),
    }
}
