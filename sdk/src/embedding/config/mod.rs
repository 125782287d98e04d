//! Reads the options of embedding tables from HugeCTR's ps.json, with some keys of our own.
//!
//! `sdk/docs/embedding-config.md` describes every key.

mod address;
mod hugectr_fields;
mod keys;
mod models;
mod tables;
mod tiers;

#[cfg(test)]
mod tests;

use std::io::ErrorKind;
use std::path::Path;

use self::models::ModelFields;
use super::options::{EmbeddingOptions, ModelTables, TierOptions};
use crate::error::{Error, Result, Status};
use crate::json::{Field, Json, Keys, Object};

pub use self::hugectr_fields::{Batch, HugeCtrDisk, HugeCtrFields, HugeCtrGpuCache, HugeCtrMemory, HugeCtrModel};

/// A configuration file in the format of HugeCTR's ps.json.
#[derive(Clone, Debug, PartialEq)]
pub struct PsJson {
    /// The options of the tables and the tiers.
    pub options: EmbeddingOptions,
    /// The values that only HugeCTR uses.
    pub hugectr: HugeCtrFields,
}

impl PsJson {
    /// Parses a configuration. Relative paths in it are relative to `folder`, if there is one.
    ///
    /// # Errors
    /// If a key is unknown or not supported, or a value has the wrong type or is out of range. The argument of the
    /// error names the place, for example `models[0].sparse_files[1]`.
    pub fn from_json(text: &str, folder: Option<&Path>) -> Result<Self> {
        let json = Json::parse(text)?;
        let top = Object::top(&json, &KEYS)?;
        if let Some(fused) = top.get("fuse_embedding_table")
            && fused.flag()?
        {
            return Err(
                fused.unsupported("true is not supported: tables are not fused, each has keys of its own; say false")
            );
        }
        if let Some(source) = top.get("update_source") {
            tiers::refuse_update_source(&source)?;
        }
        let (memory, redis) = tiers::volatile(top.get("volatile_db"), folder)?;
        let disk = top.get("persistent_db").map(|disk| tiers::persistent(&disk, folder)).transpose()?.flatten();
        let long_keys = top.flag("supportlonglong", true)?;
        let models = models::read(&top.required("models", "the models, a list")?, folder)?;
        let (models, hugectr_models) = models.into_iter().map(|model| (model.tables, model.hugectr)).unzip();
        let (memory, hugectr_memory) = memory.unzip();
        let (redis, hugectr_redis) = redis.unzip();
        let (disk, hugectr_disk) = disk.unzip();
        Ok(Self {
            options: EmbeddingOptions { models, tiers: TierOptions { memory, redis, disk }, long_keys },
            hugectr: HugeCtrFields {
                models: hugectr_models,
                memory: hugectr_memory,
                redis: hugectr_redis,
                disk: hugectr_disk,
            },
        })
    }

    /// Reads a configuration file. Relative paths in it are relative to its folder.
    ///
    /// # Errors
    /// As [`Self::from_json`], with the file named before the place; and if the file can not be read.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let name = path.display();
        let text = std::fs::read_to_string(path).map_err(|error| {
            let status = if error.kind() == ErrorKind::NotFound { Status::NotFound } else { Status::Io };
            Error::new(status, format!("can not be read: {error}")).about(name.to_string())
        })?;
        Self::from_json(&text, path.parent()).map_err(|error| {
            let place = error.argument().unwrap_or("configuration");
            Error::new(error.status(), error.message()).about(format!("{name}: {place}"))
        })
    }

    /// Parses one model, an element of the list `models` of a configuration. Relative paths in it are relative to
    /// `folder`, if there is one.
    ///
    /// # Errors
    /// As [`Self::from_json`], about `model` and places in it.
    pub fn model_from_json(text: &str, folder: Option<&Path>) -> Result<ModelTables> {
        let json = Json::parse(text).map_err(|error| error.about("model"))?;
        let ModelFields { tables, .. } = models::read_model(&Field::new("model", &json), folder)?;
        Ok(tables)
    }

    /// An error about options, said of the keys that set them: `persistent_db.path` instead of
    /// `EmbeddingOptions.tiers.disk.path`.
    pub(crate) fn name_keys(error: Error) -> Error {
        let named = Error::new(error.status(), keys::name_keys(error.message()));
        match error.argument() {
            Some(argument) => named.about(keys::name_keys(argument)),
            None => named,
        }
    }
}

const KEYS: Keys = Keys {
    known: &["supportlonglong", "fuse_embedding_table", "models", "volatile_db", "persistent_db", "update_source"],
    refused: &[("i64_input_key", "it is Python's name; in JSON it is `supportlonglong`")],
};
