//! Embedding tables of the libpagoda.so beside libpagoda_ops.so, which is loaded when a model first names a table.

use std::ffi::{CString, c_void};
use std::ptr::{null, null_mut};
use std::sync::Arc;

use pagoda_custom_ops::side_channel::tables::{TableRows, Tables};

use crate::libpagoda::{Functions, functions};

/// Opens the tables of the JSON configuration file at `path`.
pub(crate) fn open(path: &str) -> Result<Arc<dyn Tables>, String> {
    let functions = functions()?;
    let path = c_text(path)?;
    let mut handle = null_mut();
    // SAFETY: the arguments are live for the call and have the types of the C interface.
    functions.call(|error| unsafe { (functions.open)(path.as_ptr(), &mut handle, error) })?;
    Ok(Arc::new(OpenedTables(Arc::new(Embedding { functions, handle }))))
}

/// The tables of one configuration file.
struct OpenedTables(Arc<Embedding>);

impl Tables for OpenedTables {
    fn table(&self, name: &str) -> Result<Arc<dyn TableRows>, String> {
        let embedding = Arc::clone(&self.0);
        let (name, mut dim) = (c_text(name)?, 0);
        let Functions { dim: read_dim, .. } = embedding.functions;
        // SAFETY: the handle is live, and the arguments are live for the call.
        embedding.functions.call(|error| unsafe { read_dim(embedding.handle, name.as_ptr(), &mut dim, error) })?;
        Ok(Arc::new(Table { embedding, name, dim }))
    }
}

/// One table.
struct Table {
    embedding: Arc<Embedding>,
    name: CString,
    dim: usize,
}

/// An owned `pagoda_embeddings` handle.
struct Embedding {
    functions: Functions,
    handle: *mut c_void,
}

// SAFETY: every function of the C interface may be called from any thread.
unsafe impl Send for Embedding {}
// SAFETY: as above; concurrent calls are allowed.
unsafe impl Sync for Embedding {}

impl TableRows for Table {
    fn dim(&self) -> usize {
        self.dim
    }

    fn lookup(&self, keys: &[i64], numbers: &mut [f32], found: &mut [bool]) -> Result<(), String> {
        assert_eq!(keys.len(), found.len(), "one mark a key");
        let Embedding { functions, handle } = &*self.embedding;
        // SAFETY: the handle is live, and the lengths are those of the slices. The function writes 0 or 1 to each of `found`.
        functions.call(|error| unsafe {
            (functions.lookup)(
                *handle,
                self.name.as_ptr(),
                keys.as_ptr(),
                keys.len(),
                null(),
                numbers.as_mut_ptr(),
                numbers.len(),
                found.as_mut_ptr().cast(),
                error,
            )
        })
    }
}

impl Drop for Embedding {
    fn drop(&mut self) {
        // SAFETY: the handle is live and freed once.
        unsafe { (self.functions.free)(self.handle) };
    }
}

fn c_text(text: &str) -> Result<CString, String> {
    CString::new(text).map_err(|_| format!("{text:?} has a NUL in it"))
}
