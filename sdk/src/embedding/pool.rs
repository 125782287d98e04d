//! Lookups that give one vector for several keys, inside a graph and outside.

use std::sync::Arc;

use pagoda_custom_ops::tables::{DeviceRows, TableRows, Tables};
pub use pagoda_kernels::Combiner;
use pagoda_kernels::cuda::Gpu;
use pagoda_kernels::parallel::Serial;
use pagoda_kernels::{InputError, Pool, check_offsets};

use super::device::DeviceView;
use super::lookup::{Looked, Miss};
use super::server::Embeddings;
use super::view::EmbeddingTable;
use crate::error::{Error, Result, Status};
use crate::runtime::GraphTables;

impl EmbeddingTable {
    /// Looks keys up and combines them: slot i of `vectors` gets one vector of the keys from `offsets[i]` on to before
    /// `offsets[i + 1]`, or zeros if there are none. `found` tells of each key whether it was there.
    pub fn pool(
        &self,
        keys: &[i64],
        offsets: &[i64],
        combiner: Combiner,
        vectors: &mut [f32],
        found: &mut [bool],
        miss: Miss,
    ) -> Result<Looked> {
        check_offsets(offsets, keys.len()).map_err(refused)?;
        let (slots, dim) = (offsets.len() - 1, self.dim());
        if vectors.len() != slots * dim {
            let (room, table) = (vectors.len(), self.name());
            let message =
                format!("there is room for {room} numbers, and {slots} slots of table {table} take {dim} each");
            return Err(Error::invalid("vectors", message));
        }
        let numbers = keys.len().saturating_mul(dim);
        let mut rows = Vec::new();
        rows.try_reserve_exact(numbers).map_err(|error| {
            let message = format!("no memory for {} rows of {dim} numbers: {error}; ask for fewer at once", keys.len());
            Error::new(Status::Capacity, message)
        })?;
        rows.resize(numbers, 0.0);
        let looked = self.lookup(keys, &mut rows, found, miss)?;
        let pool = Pool { rows: &rows, dim, index: None, offsets, combiner };
        pool.run(vectors, &Serial).map_err(refused)?;
        Ok(looked)
    }
}

impl EmbeddingTable {
    /// What a graph on a GPU reads, if it is cached there; keys that are `no_key` are none.
    pub(crate) fn device_rows(
        &self,
        gpu: &'static Gpu,
        miss: Miss,
        no_key: Option<i64>,
    ) -> std::result::Result<Option<Arc<dyn DeviceRows>>, String> {
        let rows = DeviceView::open(self, gpu, miss, no_key).map_err(|error| error.to_string())?;
        Ok(rows.map(|rows| Arc::new(rows) as Arc<dyn DeviceRows>))
    }
}

fn refused(error: InputError) -> Error {
    Error::invalid(error.tensor, error.to_string())
}

/// What a graph's EmbeddingBag reads.
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
