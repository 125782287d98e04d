//! The tiers under the pool of an engine: host memory, and a store on disk.

use std::path::PathBuf;
use std::sync::Arc;

use pagoda_kernels::cuda::Gpu;

use crate::error::Result;
use crate::runtime::{ModelOptions, Provider};
use crate::store::{DiskStore, HostStore, Store, StoreOptions};

/// The store of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct EngineStore {
    /// Its folder. One process at a time has it open.
    pub path: PathBuf,
    /// How it is opened.
    #[cfg_attr(feature = "serde", serde(default))]
    pub options: StoreOptions,
}

impl EngineStore {
    /// A store in a folder, with the default options.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), options: StoreOptions::default() }
    }
}

/// Opens the tiers that the options of an engine ask for; `None` if they ask for none. Host memory is pinned if the model
/// can run on a GPU.
pub(super) fn open(
    store: Option<&EngineStore>,
    host_bytes: u64,
    model: &ModelOptions,
) -> Result<Option<Arc<dyn Store>>> {
    let store = match store {
        Some(store) => Some(Arc::new(DiskStore::open(&store.path, &store.options)?) as Arc<dyn Store>),
        None => None,
    };
    if host_bytes == 0 {
        return Ok(store);
    }
    let gpu = match model.provider {
        Provider::Cpu => None,
        Provider::Cuda => Some(Gpu::shared(model.device_id as usize)?),
        Provider::Auto => Gpu::shared(model.device_id as usize).ok(),
    };
    let host = HostStore::new(host_bytes, gpu, store).map_err(|error| match error.argument() {
        Some("bytes") => error.about("options.host_bytes"),
        _ => error,
    })?;
    Ok(Some(Arc::new(host)))
}
