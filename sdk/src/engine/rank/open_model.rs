//! An open model folder: its model, its embedding tables, and its own KV cache.

use std::sync::Arc;

use super::super::exec::{Graphs, Shape};
use super::layout::{FeatureKeys, Layout};
use super::options::{EngineOptions, GraphShape};
use super::tables::FolderTables;
use crate::error::{Error, Result, Status};
use crate::folder::{Lookup, ModelFolder};
use crate::kv::{Edited, KvCache, KvOptions, KvSize, Overlap, Owner};
use crate::runtime::{GraphTables, Model, ModelOptions, Provider};
use crate::store::{Store, Ticket};
use crate::tensor::ElementType;

/// One open version of a model.
pub(super) struct OpenModel {
    pub(super) folder: Arc<ModelFolder>,
    pub(super) layout: Layout,
    pub(super) model: Arc<Model>,
    /// Present if the tables are files of the folder, not part of the graph.
    pub(super) tables: Option<Arc<FolderTables>>,
    /// Present if batches run as CUDA graphs. Dropped before `kv`: the graphs refer to its events.
    pub(super) graphs: Option<Graphs>,
    /// The pages for keys and values; `None` if the graph has no pools.
    pub(super) kv: Option<KvCache>,
    /// Whether keys and values are cached. If not, a request holds its pages only during its run.
    pub(super) caches_kv: bool,
    /// The version, for responses.
    pub(super) version: Arc<str>,
}

impl OpenModel {
    /// Opens a folder and everything under it.
    pub(super) fn open(folder: ModelFolder, options: &EngineOptions, store: Option<&Arc<dyn Store>>) -> Result<Self> {
        let (folder, graph) = match folder.with_format(options.kv_format.unwrap_or(folder.kv.format))? {
            Some((folder, graph)) => (folder, Some(graph)),
            None => (folder, None),
        };
        let tables = match folder.lookup {
            Lookup::Bag => Some(Arc::new(FolderTables::open(&folder, &options.tables)?)),
            Lookup::Gather => None,
        };
        let graph_tables = tables.as_ref().map(|tables| GraphTables(Arc::clone(tables) as _));
        // What comes out of such blocks is known to no more bits than a product of TF32 keeps.
        let tf32 = options.model.tf32 || folder.compute != ElementType::F32;
        let model_options = ModelOptions { tables: graph_tables, tf32, ..options.model.clone() };
        let file = folder.file(&folder.model);
        let captures = !options.cuda_graphs.is_empty();
        let model = Arc::new(match &graph {
            Some(graph) => Model::open_graphs((graph, graph), &file, &model_options, captures)?,
            None => Model::open_file(&file, &file, &model_options, captures)?,
        });
        let device_id = model.operators_on_gpu().then_some(options.model.device_id);
        let wanted = options.kv_size.filter(|size| !matches!(size, KvSize::Pages(0) | KvSize::Bytes(0)));
        let caches_kv = folder.kv.cache && wanted.is_some();
        let kv = folder.kv.cache.then(|| open_kv(&folder, options, wanted, device_id, store)).transpose()?;
        if let (Some(reason), Some(_)) = (&folder.kv.reason, wanted) {
            log::info!("keys and values of this model are not cached: {reason}");
        }
        let (layout, version) = (Layout::new(&folder), folder.version.as_str().into());
        if !options.cuda_graphs.is_empty() && model.provider() == Provider::Cuda && !model.operators_on_gpu() {
            let message =
                "the ai.pagoda operators of this model are on the CPU (host_pools): CUDA graphs need them on the GPU";
            return Err(Error::new(Status::Unsupported, message).about("options.cuda_graphs"));
        }
        let graphs = (!options.cuda_graphs.is_empty() && model.provider() == Provider::Cuda).then(|| {
            let (history, page) = (folder.limits.max_history_rows, u64::from(folder.kv.page_size).max(1));
            let pages = kv.as_ref().map_or(1, |kv| kv.stats().pages);
            Graphs::new(options.model.device_id, &shapes(options), history.div_ceil(page) + 1, pages)
        });
        Ok(Self { folder: Arc::new(folder), layout, model, tables, kv, graphs, caches_kv, version })
    }

    /// Whether a history of this many rows fits into an empty cache.
    pub(super) fn fits(&self, rows: u64) -> bool {
        let page = u64::from(self.folder.kv.page_size);
        self.kv.as_ref().is_none_or(|kv| rows.div_ceil(page) <= kv.stats().pages)
    }

    /// Rejects keys that a keyed table without a default row does not have. Other tables need no lookup for this.
    pub(super) fn refuse_unknown(&self, place: &str, feature: &FeatureKeys, keys: &[i64]) -> Result<()> {
        let Some(tables) = self.tables.as_ref().filter(|_| feature.keyed && !keys.is_empty()) else { return Ok(()) };
        if self.folder.table(&feature.table).is_none_or(|table| table.default_row.is_some()) {
            return Ok(());
        }
        let no_key = self.layout.no_key;
        let Some(key) = tables.first_unknown(&feature.table, keys, no_key)? else { return Ok(()) };
        let message = format!(
            "{:?} has the key {key}, which table {:?} does not have, and there is no default row: leave it out, send \
             {no_key} for none, or export the table with a default_row",
            feature.name, feature.table
        );
        Err(Error::invalid(place, message))
    }

    /// Forgets a user in the cache and its store. Returns whether the user was known. The removal is durable when the
    /// tickets are done.
    pub(super) fn forget(&self, user: u64, tickets: &mut Vec<Ticket>) -> Result<bool> {
        let kv = self.kv.as_ref().filter(|_| self.caches_kv);
        kv.map_or(Ok(false), |kv| kv.forget(Owner(user), tickets))
    }
}

/// The shapes that batches are captured for.
pub(super) fn shapes(options: &EngineOptions) -> Vec<Shape> {
    let shape = |shape: &GraphShape| Shape {
        sequences: shape.users,
        rows: shape.rows,
        outputs: shape.candidates,
        pages: shape.pages,
        longest: 0,
    };
    options.cuda_graphs.iter().map(shape).collect()
}

fn open_kv(
    folder: &ModelFolder,
    options: &EngineOptions,
    wanted: Option<KvSize>,
    device_id: Option<u32>,
    store: Option<&Arc<dyn Store>>,
) -> Result<KvCache> {
    let layout = &folder.kv;
    // Without a cache: enough pages for one batch on each instance.
    let rows = folder.limits.max_history_rows.max(options.max_batch_rows.into());
    let room = (rows.div_ceil(u64::from(layout.page_size).max(1)) + u64::from(options.max_batch))
        .saturating_mul(options.instances.into());
    let kv = KvOptions {
        layers: layout.layers,
        heads: layout.heads,
        head_size: layout.head_size,
        page_size: layout.page_size,
        element_type: layout.element,
        format: layout.format,
        size: wanted.unwrap_or(KvSize::Pages(u32::try_from(room).unwrap_or(u32::MAX))),
        device_id,
        model_version: folder.version.clone(),
        overlap: Overlap::Trim,
        edited: if wanted.is_some() { Edited::Invalidate } else { Edited::Unnoticed },
        offload: options.offload,
        ahead_percent: options.ahead_percent,
        ..KvOptions::default()
    };
    KvCache::open(&kv, store.filter(|_| wanted.is_some()).cloned()).map_err(|error| match error.argument() {
        Some("size") => error.about("options.kv_size"),
        Some("device_id") => error.about("options.model.device_id"),
        _ => error,
    })
}
