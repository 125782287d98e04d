//! Embedding tables as the operators of a graph read them.

use std::sync::Arc;

use pagoda_custom_ops::side_channel::tables::{DeviceRows, TableRows, Tables};
use pagoda_kernels::cuda::Gpu;

use super::Miss;
use super::gpu_lookup::GpuTable;
use crate::embedding::table::registry::Embeddings;
use crate::embedding::table::table_handle::EmbeddingTable;
use crate::runtime::GraphTables;

impl Tables for Embeddings {
    fn table(&self, name: &str) -> std::result::Result<Arc<dyn TableRows>, String> {
        let table = Self::table(self, name).map_err(|error| error.to_string())?;
        Ok(Arc::new(table))
    }
}

impl From<Arc<Embeddings>> for GraphTables {
    fn from(embeddings: Arc<Embeddings>) -> Self {
        Self(embeddings)
    }
}

impl TableRows for EmbeddingTable {
    fn dim(&self) -> usize {
        Self::dim(self)
    }

    fn lookup(&self, keys: &[i64], numbers: &mut [f32], found: &mut [bool]) -> std::result::Result<(), String> {
        Self::lookup(self, keys, numbers, found, Miss::ByHitRate).map(drop).map_err(|error| error.to_string())
    }

    fn on_device(&self, gpu: &'static Gpu) -> std::result::Result<Option<Arc<dyn DeviceRows>>, String> {
        self.device_rows(gpu, Miss::ByHitRate, None)
    }
}

impl EmbeddingTable {
    /// The rows of the table in the memory of a GPU; `None` if it has no cache there. `no_key` is padding: it is not
    /// looked up.
    pub(crate) fn device_rows(
        &self,
        gpu: &'static Gpu,
        miss: Miss,
        no_key: Option<i64>,
    ) -> std::result::Result<Option<Arc<dyn DeviceRows>>, String> {
        let rows = GpuTable::open(self, gpu, miss, no_key).map_err(|error| error.to_string())?;
        Ok(rows.map(|rows| Arc::new(rows) as Arc<dyn DeviceRows>))
    }
}
