//! Pooled lookups: one vector for several keys.

pub use pagoda_kernels::Combiner;
use pagoda_kernels::parallel::Serial;
use pagoda_kernels::{InputError, Pool, check_offsets};

use super::Miss;
use crate::embedding::table::stats::LookupStats;
use crate::embedding::table::table_handle::EmbeddingTable;
use crate::error::{Error, Result, Status};

impl EmbeddingTable {
    /// Looks up keys and combines the rows of each slot. Slot `i` has the keys from `offsets[i]` to before `offsets[i +
    /// 1]`. Writes one vector for each slot to `vectors`, zeros for a slot without keys, and to `found` whether each
    /// key was found.
    pub fn pool(
        &self,
        keys: &[i64],
        offsets: &[i64],
        combiner: Combiner,
        vectors: &mut [f32],
        found: &mut [bool],
        miss: Miss,
    ) -> Result<LookupStats> {
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
        let stats = self.lookup(keys, &mut rows, found, miss)?;
        let pool = Pool { rows: &rows, dim, index: None, offsets, combiner };
        pool.run(vectors, &Serial).map_err(refused)?;
        Ok(stats)
    }
}

fn refused(error: InputError) -> Error {
    Error::invalid(error.tensor, error.to_string())
}
