//! The models that are served, by name.

use std::path::{Path, PathBuf};
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
use tokio::sync::{Notify, watch};

use crate::config::{ModelConfig, RedisConfig};
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
    /// Where it was opened: the path of the configuration may be a link, which names another folder later.
    pub opened: PathBuf,
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
    /// Refuses a folder that can not be opened, as far as that can be known without opening it: its files have their hashes.
    pub fn check(config: &ModelConfig) -> Result<()> {
        stays_inside(&config.path)
            .and_then(|()| AnyFolder::open(&config.path))
            .map(drop)
            .map_err(|error| said(config, &error))
    }

    /// Opens a model.
    pub fn open(config: &ModelConfig) -> Result<Self> {
        let kind = open(config).map_err(|error| said(config, &error))?;
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let tool_form = match &kind {
            Kind::Generate(generator) => ToolForm::of(generator),
            _ => ToolForm::Hermes,
        };
        let opened = config.path.canonicalize().unwrap_or_else(|_| config.path.clone());
        Ok(Self { name: config.name.clone(), kind, tool_form, statistics: Arc::default(), since, opened })
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
    /// A model is held no more.
    released: Notify,
}

/// A model of the configuration.
struct Slot {
    config: ModelConfig,
    /// Nothing if it is unloaded.
    served: Option<Arc<Served>>,
    /// Whether new requests wait, as while one that has a store makes room for the next.
    is_held: bool,
    /// Ends when the one before is closed.
    closing: Option<watch::Receiver<()>>,
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
            Ok(Slot { config: config.clone(), served, is_held: false, closing: None })
        };
        let slots = configs.iter().map(slot).collect::<Result<_>>()?;
        Ok(Self { slots: RwLock::new(slots), released: Notify::new() })
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
        let mut before = None;
        self.change(name, |slot| before = std::mem::replace(&mut slot.served, served));
        before
    }

    /// Lets new requests for a model wait, until what it returns is dropped.
    pub fn hold(&self, name: &str) -> Held<'_> {
        self.change(name, |slot| slot.is_held = true);
        Held { models: self, name: name.to_owned() }
    }

    /// Waits while the model of a name is held.
    pub async fn wait(&self, name: &str) {
        loop {
            let released = self.released.notified();
            if !self.slot(name, |slot| slot.is_held).unwrap_or(false) {
                return;
            }
            released.await;
        }
    }

    /// Notes that a model of this name, which is served no more, is closed when `closing` has no sender.
    pub fn set_closing(&self, name: &str, closing: watch::Receiver<()>) {
        self.change(name, |slot| slot.closing = Some(closing));
    }

    /// Waits until the one before is closed.
    pub async fn wait_for_close(&self, name: &str) {
        if let Ok(Some(mut closing)) = self.slot(name, |slot| slot.closing.clone()) {
            while closing.changed().await.is_ok() {}
        }
    }

    fn change(&self, name: &str, change: impl FnOnce(&mut Slot)) {
        if let Some(slot) = self.slots.write().iter_mut().find(|slot| slot.config.name == name) {
            change(slot);
        }
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
    pub async fn generator_or_first(&self, name: Option<&str>) -> Result<(Arc<Served>, Arc<Generator>), Failure> {
        if let Some(name) = name {
            self.wait(name).await;
            return self.generator(name);
        }
        // It may be the first one that is held.
        let held = self.read().iter().find(|slot| slot.is_held).map(|slot| slot.config.name.clone());
        if let Some(held) = held {
            self.wait(&held).await;
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

/// A model whose new requests wait, until it is dropped.
pub struct Held<'a> {
    models: &'a Models,
    name: String,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.models.change(&self.name, |slot| slot.is_held = false);
        self.models.released.notify_waiters();
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
    stays_inside(&config.path)?;
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
                tables: config.redis.as_ref().map(RedisConfig::tables).transpose()?.unwrap_or_default(),
                kv_size: (config.cache > 0).then_some(KvSize::Bytes(config.cache)),
                kv_format: config.kv_format,
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

/// The same error, with the model that it is about.
fn said(config: &ModelConfig, error: &Error) -> Error {
    let message = format!("{} can not be served: {error}", config.path.display());
    Error::new(error.status(), message).about(&config.name)
}

/// Refuses a folder with a link out of it: what is served is in the folder that the configuration names, which may itself be a link.
fn stays_inside(folder: &Path) -> Result<()> {
    let unreadable = |path: &Path, error: &std::io::Error| {
        Error::new(Status::Io, format!("{} can not be read: {error}", path.display())).about("folder")
    };
    let root = folder.canonicalize().map_err(|error| unreadable(folder, &error))?;
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).map_err(|error| unreadable(&folder, &error))? {
            let path = entry.map_err(|error| unreadable(&folder, &error))?.path();
            // A link to nothing is no file of the model: its folder says what is missing.
            let Ok(target) = path.canonicalize() else { continue };
            if !target.starts_with(&root) {
                let message = format!("{} is a link out of the folder: put the file there", path.display());
                return Err(Error::invalid("folder", message));
            }
            if path.is_dir() && !path.is_symlink() {
                folders.push(path);
            }
        }
    }
    Ok(())
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
