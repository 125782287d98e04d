//! libpagoda.so, loaded at run time: the functions of its C interface that open and read embedding tables.

use std::error::Error as _;
use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};

use libloading::Library;
use parking_lot::Mutex;

/// The file names of libpagoda.so, in order of preference.
const NAMES: [&str; 2] = ["libpagoda.so.1", "libpagoda.so"];

/// The version of the C interface that declares the functions below.
const ABI_VERSION: u32 = 1;

/// The functions of libpagoda.so, which the first successful call loads. A failure is not cached: the file may appear later.
pub(crate) fn functions() -> Result<Functions, String> {
    static LOADED: Mutex<Option<Functions>> = Mutex::new(None);
    let mut loaded = LOADED.lock();
    if let Some(functions) = *loaded {
        return Ok(functions);
    }
    let folder = own_folder().ok_or("the folder of libpagoda_ops.so can not be told")?;
    let path = NAMES.map(|name| folder.join(name)).into_iter().find(|path| path.exists()).ok_or_else(|| {
        format!("embedding tables need libpagoda.so, which is not in {}: put it there", folder.display())
    })?;
    // SAFETY: loading a library runs its initialisers. This library was installed together with libpagoda_ops.so.
    let library = unsafe { Library::new(&path) }.map_err(|error| {
        // The message of the dynamic loader, which names the missing file or symbol.
        let reason = error.source().map_or_else(|| error.to_string(), |source| source.to_string());
        format!("{} can not be loaded: {reason}", path.display())
    })?;
    let functions = Functions::find(&library, &path)?;
    // Never unloaded: its threads run and its functions are callable until the process exits.
    std::mem::forget(library);
    *loaded = Some(functions);
    Ok(functions)
}

/// Functions of libpagoda.so, as `pagoda.h` declares them. The library is never unloaded.
#[derive(Clone, Copy)]
pub(crate) struct Functions {
    /// `pagoda_embeddings_open(const char *path, pagoda_embeddings **embeddings, pagoda_error **error)`
    pub(crate) open: unsafe extern "C" fn(*const c_char, *mut *mut c_void, *mut *mut c_void) -> i32,
    /// `pagoda_embeddings_dim(pagoda_embeddings *embeddings, const char *table, size_t *dim, pagoda_error **error)`
    pub(crate) dim: unsafe extern "C" fn(*mut c_void, *const c_char, *mut usize, *mut *mut c_void) -> i32,
    /// `pagoda_embeddings_lookup(const pagoda_embeddings *embeddings, const char *table, const int64_t *keys,
    /// size_t key_count, const pagoda_lookup_options *options, float *numbers, size_t number_count, uint8_t *found,
    /// pagoda_error **error)`
    pub(crate) lookup: unsafe extern "C" fn(
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
    /// `pagoda_embeddings_free(pagoda_embeddings *embeddings)`
    pub(crate) free: unsafe extern "C" fn(*mut c_void) -> i32,
    /// `pagoda_error_message(const pagoda_error *error)`
    error_message: unsafe extern "C" fn(*const c_void) -> *const c_char,
    /// `pagoda_error_free(pagoda_error *error)`
    error_free: unsafe extern "C" fn(*mut c_void) -> i32,
}

impl Functions {
    fn find(library: &Library, path: &Path) -> Result<Self, String> {
        // SAFETY: the types are those of this version of the C interface, and the version is checked first.
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
                open: symbol(library, path, c"pagoda_embeddings_open")?,
                dim: symbol(library, path, c"pagoda_embeddings_dim")?,
                lookup: symbol(library, path, c"pagoda_embeddings_lookup")?,
                free: symbol(library, path, c"pagoda_embeddings_free")?,
                error_message: symbol(library, path, c"pagoda_error_message")?,
                error_free: symbol(library, path, c"pagoda_error_free")?,
            })
        }
    }

    /// Makes a call that reports errors through a `pagoda_error **`.
    pub(crate) fn call(&self, function: impl FnOnce(*mut *mut c_void) -> i32) -> Result<(), String> {
        let mut error = null_mut();
        let status = function(&mut error);
        if status == 0 {
            return Ok(());
        }
        if error.is_null() {
            return Err(format!("libpagoda.so gave the status {status} and no words"));
        }
        // SAFETY: the error is live until it is freed, once. Its message is a C string that lives as long.
        unsafe {
            let message = CStr::from_ptr((self.error_message)(error)).to_string_lossy().into_owned();
            (self.error_free)(error);
            Err(message)
        }
    }
}

/// # Safety
/// `F` is the type of the function `name`.
unsafe fn symbol<F: Copy>(library: &Library, path: &Path, name: &CStr) -> Result<F, String> {
    // SAFETY: by contract.
    let found = unsafe { library.get::<F>(name.to_bytes_with_nul()) };
    found.map(|function| *function).map_err(|_| {
        let (path, name) = (path.display(), name.to_string_lossy());
        format!("{path} has no function {name}: install the libpagoda.so that came with libpagoda_ops.so")
    })
}

/// The folder of the file that this code was loaded from.
fn own_folder() -> Option<PathBuf> {
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
    // SAFETY: `info` has the layout of Dl_info. The loader owns the file name.
    let file = unsafe {
        if dladdr(own_folder as *const c_void, &mut info) == 0 || info.file.is_null() {
            return None;
        }
        OsStr::from_bytes(CStr::from_ptr(info.file).to_bytes()).to_owned()
    };
    std::fs::canonicalize(file).ok()?.parent().map(Path::to_owned)
}
