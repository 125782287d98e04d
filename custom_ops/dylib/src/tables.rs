//! Embedding tables of libpagoda.so, which lies beside libpagoda_ops.so and is loaded when a model names a table.

use std::error::Error as _;
use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};
use std::sync::{Arc, Mutex, PoisonError};

use libloading::Library;
use pagoda_custom_ops::tables::{TableRows, Tables};

/// The names libpagoda.so goes by.
const NAMES: [&str; 2] = ["libpagoda.so.1", "libpagoda.so"];

/// The version of the C interface that the functions below are of.
const ABI_VERSION: u32 = 1;

/// Opens the tables of the JSON configuration in the file `path`.
pub(crate) fn open(path: &str) -> Result<Arc<dyn Tables>, String> {
    let functions = functions()?;
    let path = c_text(path)?;
    let mut handle = null_mut();
    // SAFETY: the arguments are live for the call and of the types of the C interface.
    functions.call(|error| unsafe { (functions.open)(path.as_ptr(), &mut handle, error) })?;
    Ok(Arc::new(Opened(Arc::new(Embedding { functions, handle }))))
}

/// Tables, as long as a node or a session has them.
struct Opened(Arc<Embedding>);

impl Tables for Opened {
    fn table(&self, name: &str) -> Result<Arc<dyn TableRows>, String> {
        let embedding = Arc::clone(&self.0);
        let (name, mut dim) = (c_text(name)?, 0);
        let Functions { dim: ask, .. } = embedding.functions;
        // SAFETY: the handle is live, and so are the arguments for the call.
        embedding.functions.call(|error| unsafe { ask(embedding.handle, name.as_ptr(), &mut dim, error) })?;
        Ok(Arc::new(Table { embedding, name, dim }))
    }
}

/// One of them.
struct Table {
    embedding: Arc<Embedding>,
    name: CString,
    dim: usize,
}

/// A `pagoda_embedding`.
struct Embedding {
    functions: Functions,
    handle: *mut c_void,
}

// SAFETY: every function of the C interface may be called from any thread.
unsafe impl Send for Embedding {}
// SAFETY: as above, at the same time too.
unsafe impl Sync for Embedding {}

impl TableRows for Table {
    fn dim(&self) -> usize {
        self.dim
    }

    fn lookup(&self, keys: &[i64], numbers: &mut [f32], found: &mut [bool]) -> Result<(), String> {
        assert_eq!(keys.len(), found.len(), "one mark a key");
        let Embedding { functions, handle } = &*self.embedding;
        // SAFETY: the handle is live; the lengths go with the pointers; a mark is written as 0 or 1.
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

/// What is called of libpagoda.so, as `pagoda.h` declares it. The library is never unloaded.
#[derive(Clone, Copy)]
struct Functions {
    /// `pagoda_embedding_open(const char *path, pagoda_embedding **embedding, pagoda_error **error)`
    open: unsafe extern "C" fn(*const c_char, *mut *mut c_void, *mut *mut c_void) -> i32,
    /// `pagoda_embedding_dim(pagoda_embedding *embedding, const char *table, size_t *dim, pagoda_error **error)`
    dim: unsafe extern "C" fn(*mut c_void, *const c_char, *mut usize, *mut *mut c_void) -> i32,
    /// `pagoda_embedding_lookup(const pagoda_embedding *embedding, const char *table, const int64_t *keys,
    /// size_t key_count, const pagoda_lookup_options *options, float *numbers, size_t number_count, uint8_t *found,
    /// pagoda_error **error)`
    lookup: unsafe extern "C" fn(
        *mut c_void,
        *const c_char,
        *const i64,
        usize,
        *const c_void,
        *mut f32,
        usize,
        *mut u8,
        *mut *mut c_void,
    ) -> i32,
    /// `pagoda_embedding_free(pagoda_embedding *embedding)`
    free: unsafe extern "C" fn(*mut c_void) -> i32,
    /// `pagoda_error_message(const pagoda_error *error)`
    error_message: unsafe extern "C" fn(*const c_void) -> *const c_char,
    /// `pagoda_error_free(pagoda_error *error)`
    error_free: unsafe extern "C" fn(*mut c_void) -> i32,
}

impl Functions {
    fn find(library: &Library, path: &Path) -> Result<Self, String> {
        // SAFETY: these are the types of the C interface of this version, which is asked for first.
        unsafe {
            let version = symbol::<unsafe extern "C" fn() -> u32>(library, path, c"pagoda_abi_version")?();
            if version != ABI_VERSION {
                let path = path.display();
                return Err(format!(
                    "{path} has version {version} of the C interface, expected {ABI_VERSION}: install it together \
                     with libpagoda_ops.so"
                ));
            }
            Ok(Self {
                open: symbol(library, path, c"pagoda_embedding_open")?,
                dim: symbol(library, path, c"pagoda_embedding_dim")?,
                lookup: symbol(library, path, c"pagoda_embedding_lookup")?,
                free: symbol(library, path, c"pagoda_embedding_free")?,
                error_message: symbol(library, path, c"pagoda_error_message")?,
                error_free: symbol(library, path, c"pagoda_error_free")?,
            })
        }
    }

    /// Makes a call that tells its errors through a `pagoda_error **`.
    fn call(&self, function: impl FnOnce(*mut *mut c_void) -> i32) -> Result<(), String> {
        let mut error = null_mut();
        let status = function(&mut error);
        if status == 0 {
            return Ok(());
        }
        if error.is_null() {
            return Err(format!("libpagoda.so gave the status {status} and no words"));
        }
        // SAFETY: the error is live until it is freed, once; its message is a C string as long.
        unsafe {
            let message = CStr::from_ptr((self.error_message)(error)).to_string_lossy().into_owned();
            (self.error_free)(error);
            Err(message)
        }
    }
}

/// # Safety
/// `F` is the type of that function.
unsafe fn symbol<F: Copy>(library: &Library, path: &Path, name: &CStr) -> Result<F, String> {
    // SAFETY: by contract.
    let found = unsafe { library.get::<F>(name.to_bytes_with_nul()) };
    found.map(|function| *function).map_err(|_| {
        let (path, name) = (path.display(), name.to_string_lossy());
        format!("{path} has no function {name}: install the libpagoda.so that came with libpagoda_ops.so")
    })
}

/// Loads libpagoda.so once. A failure is not kept: it may be there the next time.
fn functions() -> Result<Functions, String> {
    static LOADED: Mutex<Option<Functions>> = Mutex::new(None);
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(functions) = *loaded {
        return Ok(functions);
    }
    let folder = beside_us().ok_or("the folder of libpagoda_ops.so can not be told")?;
    let path = NAMES.map(|name| folder.join(name)).into_iter().find(|path| path.exists()).ok_or_else(|| {
        format!("embedding tables need libpagoda.so, which is not in {}: put it there", folder.display())
    })?;
    // SAFETY: loading a library runs its initialisers; it is the one that belongs to this one.
    let library = unsafe { Library::new(&path) }.map_err(|error| {
        // The loader's own words, which say which file or symbol is missing.
        let reason = error.source().map_or_else(|| error.to_string(), |source| source.to_string());
        format!("{} can not be loaded: {reason}", path.display())
    })?;
    let functions = Functions::find(&library, &path)?;
    // Its threads and its functions are in use until the process ends.
    std::mem::forget(library);
    *loaded = Some(functions);
    Ok(functions)
}

/// The folder of the file this code was loaded from.
fn beside_us() -> Option<PathBuf> {
    #[repr(C)]
    struct DlInfo {
        file: *const c_char,
        base: *mut c_void,
        symbol: *const c_char,
        address: *mut c_void,
    }
    unsafe extern "C" {
        fn dladdr(address: *const c_void, info: *mut DlInfo) -> c_int;
    }
    let mut info = DlInfo { file: null(), base: null_mut(), symbol: null(), address: null_mut() };
    // SAFETY: `info` has the layout of Dl_info; the name it is given points into the loader's own list.
    let file = unsafe {
        if dladdr(beside_us as *const c_void, &mut info) == 0 || info.file.is_null() {
            return None;
        }
        OsStr::from_bytes(CStr::from_ptr(info.file).to_bytes()).to_owned()
    };
    std::fs::canonicalize(file).ok()?.parent().map(Path::to_owned)
}

fn c_text(text: &str) -> Result<CString, String> {
    CString::new(text).map_err(|_| format!("{text:?} has a NUL in it"))
}
