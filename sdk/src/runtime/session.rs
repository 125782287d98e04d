//! Opening an ONNX Runtime session by the caller's options.

use std::ffi::{CStr, CString, c_char};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::Arc;

use ort_sys::{GraphOptimizationLevel, OrtSession, OrtSessionOptions};
use pagoda_custom_ops::Providers;
use pagoda_custom_ops::side_channel::tables::{Bound, ENTRY};

use super::api::Api;
use super::options::{GraphTables, ModelOptions, Optimization, Provider};
use super::run_options::{NO_GRAPH, RunOptions};
use super::value::ValueInfo;
use crate::device::{Gpu, KeptCounters, SideStream, no_capture};
use crate::error::{Error, Result, Status};
use crate::sync::{Mutex, RwLock};

/// Each spins while it waits for work; more threads than any machine has cores would take minutes to start.
const MAX_THREADS: u32 = 1024;

/// Whether a session was made. The first one adds the operators' domain to a process-wide list, for which ONNX Runtime
/// has no lock: two at the same time fail.
static IS_DOMAIN_KNOWN: Mutex<bool> = Mutex::new(false);

/// The session's entry for the folder of external weights, for a model that is not opened from a file.
const EXTERNAL_FOLDER: &CStr = c"session.model_external_initializers_file_folder_path";

/// Where a model comes from.
pub(super) enum Source<'a> {
    /// A file, and the one that the CPU provider takes instead; mostly it is the same.
    File {
        path: &'a Path,
        on_cpu: &'a Path,
    },
    Memory(&'a [u8]),
    /// Bytes, those that the CPU provider takes instead, and the folder of the files that both refer to.
    Graphs {
        graph: &'a [u8],
        on_cpu: &'a [u8],
        folder: &'a Path,
    },
}

impl Source<'_> {
    /// The argument that names it, for errors.
    fn argument(&self) -> &'static str {
        match self {
            Self::File { .. } => "path",
            Self::Memory(_) | Self::Graphs { .. } => "bytes",
        }
    }
}

/// A session and where it runs.
pub(super) struct Session {
    api: &'static Api,
    raw: *mut OrtSession,
    profile: Option<PathBuf>,
    pub(super) provider: Provider,
    /// Whether the ai.pagoda operators are on a GPU. Then ONNX Runtime copies host memory that is bound to them to the
    /// GPU and back.
    pub(super) operators_on_gpu: bool,
    /// The GPU, if it runs on one.
    pub(super) device: Option<u32>,
    /// Locked exclusively by a run that replays a graph: the work memory of a graph was freed after its capture, and
    /// other runs allocate it.
    pub(super) replaying: RwLock<()>,
    /// Options for runs that are not captured, in a session that captures others.
    pub(super) uncaptured: Option<RunOptions>,
    /// The stream of all runs, if the session captures.
    pub(super) stream: Option<SideStream>,
    /// Why `Provider::Auto` did not choose the GPU; empty otherwise.
    pub(super) reason: String,
    /// The counters of captured launches.
    pub(super) counters: Mutex<Vec<KeptCounters>>,
    /// The tables of the graph's nodes. Kept here too, so that the last reference is not a node's: nodes are dropped
    /// when the session is released, while captures are blocked, and closing tables waits for threads.
    _tables: Option<GraphTables>,
}

// SAFETY: ONNX Runtime's sessions may be run from any number of threads at once.
unsafe impl Send for Session {}
// SAFETY: as above.
unsafe impl Sync for Session {}

impl Session {
    /// `captures`: on a GPU, whether runs can be captured into CUDA graphs. Every node has to run on the GPU then.
    pub(super) fn open(api: &'static Api, source: &Source, options: &ModelOptions, captures: bool) -> Result<Self> {
        if let Some(path) = &options.profile_path {
            check_profile_path(path)?;
        }
        if options.intra_op_threads > MAX_THREADS {
            let message = format!("{} threads are more than the {MAX_THREADS} there can be", options.intra_op_threads);
            return Err(Error::invalid("options.intra_op_threads", message));
        }
        let open_on = |provider| Self::open_on(api, source, options, captures, provider);
        match options.provider {
            Provider::Cpu => open_on(Provider::Cpu),
            Provider::Cuda => open_on(Provider::Cuda),
            Provider::Auto => match open_on(Provider::Cuda) {
                Ok(session) => Ok(session),
                Err(no_gpu) => {
                    let mut session = open_on(Provider::Cpu)?;
                    session.reason = no_gpu.to_string();
                    log::warn!("the model runs on the CPU: {}", session.reason);
                    Ok(session)
                }
            },
        }
    }

    fn open_on(
        api: &'static Api,
        source: &Source,
        options: &ModelOptions,
        captures: bool,
        provider: Provider,
    ) -> Result<Self> {
        let built = Options::new(api)?;
        built.apply(options)?;
        if let Source::Graphs { folder, .. } = source {
            let folder = folder.to_str().ok_or_else(|| {
                Error::invalid("path", format!("{} is not UTF-8, which weights beside a graph need", folder.display()))
            })?;
            built.set(EXTERNAL_FOLDER, folder)?;
        }
        // Only until the session is made: then its nodes hold the tables.
        let tables = options.tables.as_ref().map(|tables| Bound::new(Arc::clone(&tables.0)));
        if let Some(bound) = &tables {
            built.set(ENTRY, bound.entry())?;
        }
        let stream = if provider == Provider::Cuda { built.append_cuda(options, captures)? } else { None };
        let table = api.table();
        let _hold = (provider == Provider::Cuda).then(no_capture);
        let mut raw = null_mut();
        let known = IS_DOMAIN_KNOWN.lock();
        let first = (!*known).then_some(known);
        let open_bytes = |bytes: &[u8], raw: &mut *mut OrtSession| {
            // SAFETY: every pointer is live for the call; ONNX Runtime copies what it needs of the bytes.
            unsafe { (table.CreateSessionFromArray)(api.env(), bytes.as_ptr().cast(), bytes.len(), built.raw, raw) }
        };
        let status = match source {
            Source::File { path, on_cpu } => {
                let path = c_path(if provider == Provider::Cpu { on_cpu } else { path }, "path")?;
                // SAFETY: every pointer is live for the call.
                unsafe { (table.CreateSession)(api.env(), path.as_ptr(), built.raw, &mut raw) }
            }
            Source::Memory(bytes) => open_bytes(bytes, &mut raw),
            Source::Graphs { graph, on_cpu, .. } => {
                open_bytes(if provider == Provider::Cpu { on_cpu } else { graph }, &mut raw)
            }
        };
        api.check(status).map_err(|error| {
            // ONNX Runtime reports broken models in many ways.
            let status = match error.status() {
                known @ (Status::NotFound | Status::Unsupported) => known,
                _ => Status::Model,
            };
            Error::new(status, error.message()).about(source.argument())
        })?;
        if let Some(mut known) = first {
            *known = true;
        }
        let operators_on_gpu = provider == Provider::Cuda && !options.host_pools && pagoda_custom_ops::has_cuda();
        let profile = options.profile_path.clone();
        let device = (provider == Provider::Cuda).then_some(options.device_id);
        let mut session = Self {
            api,
            raw,
            profile,
            provider,
            operators_on_gpu,
            device,
            replaying: RwLock::default(),
            uncaptured: None,
            stream,
            reason: String::new(),
            counters: Mutex::default(),
            _tables: options.tables.clone(),
        };
        if captures && provider == Provider::Cuda {
            session.uncaptured = Some(RunOptions::new(api, NO_GRAPH)?);
        }
        Ok(session)
    }

    /// The session itself.
    pub(super) fn raw(&self) -> *mut OrtSession {
        self.raw
    }

    /// The inputs and the outputs.
    pub(super) fn inputs_and_outputs(&self) -> Result<(Vec<ValueInfo>, Vec<ValueInfo>)> {
        let table = self.api.table();
        let inputs =
            self.values(table.SessionGetInputCount, table.SessionGetInputName, table.SessionGetInputTypeInfo)?;
        let outputs =
            self.values(table.SessionGetOutputCount, table.SessionGetOutputName, table.SessionGetOutputTypeInfo)?;
        Ok((inputs, outputs))
    }

    fn values(&self, count: CountFn, name: NameFn, type_info: TypeInfoFn) -> Result<Vec<ValueInfo>> {
        let api = self.api;
        let mut len = 0;
        // SAFETY: the session is live; what the calls hand out is taken or released here.
        unsafe {
            api.check(count(self.raw, &mut len))?;
            (0..len)
                .map(|index| {
                    let mut text: *mut c_char = null_mut();
                    api.check(name(self.raw, index, api.allocator, &mut text))?;
                    let text = api.take_text(text);
                    let mut info = null_mut();
                    api.check(type_info(self.raw, index, &mut info))?;
                    let read = ValueInfo::read(api, text, info);
                    (api.table().ReleaseTypeInfo)(info);
                    read
                })
                .collect()
        }
    }
}

type CountFn = unsafe extern "system" fn(*const OrtSession, *mut usize) -> ort_sys::OrtStatusPtr;
type NameFn = unsafe extern "system" fn(
    *const OrtSession,
    usize,
    *mut ort_sys::OrtAllocator,
    *mut *mut c_char,
) -> ort_sys::OrtStatusPtr;
type TypeInfoFn =
    unsafe extern "system" fn(*const OrtSession, usize, *mut *mut ort_sys::OrtTypeInfo) -> ort_sys::OrtStatusPtr;

impl Drop for Session {
    fn drop(&mut self) {
        if let Some(wanted) = &self.profile
            && let Err(error) = self.end_profile(wanted)
        {
            log::error!("the profile could not be written to {}: {error}", wanted.display());
        }
        let _hold = (self.provider == Provider::Cuda).then(no_capture);
        // SAFETY: ours, released once; a run holds the session, so none is under way.
        unsafe { (self.api.table().ReleaseSession)(self.raw) };
    }
}

impl Session {
    /// Ends the profile and renames its file: ONNX Runtime adds a time to the name that the caller gave.
    fn end_profile(&self, wanted: &Path) -> Result<()> {
        let api = self.api;
        let mut name = null_mut();
        // SAFETY: the session is live and the name is taken once.
        let written = unsafe {
            api.check((api.table().SessionEndProfiling)(self.raw, api.allocator, &mut name))?;
            api.take_text(name)
        };
        std::fs::rename(&written, wanted)
            .map_err(|error| Error::new(Status::Io, format!("moving {written} there failed: {error}")))
    }
}

/// Session options being filled in.
struct Options {
    api: &'static Api,
    raw: *mut OrtSessionOptions,
}

impl Drop for Options {
    fn drop(&mut self) {
        // SAFETY: ours, released once.
        unsafe { (self.api.table().ReleaseSessionOptions)(self.raw) };
    }
}

impl Options {
    fn new(api: &'static Api) -> Result<Self> {
        let mut raw = null_mut();
        // SAFETY: the out pointer is live.
        api.check(unsafe { (api.table().CreateSessionOptions)(&mut raw) })?;
        Ok(Self { api, raw })
    }

    fn apply(&self, options: &ModelOptions) -> Result<()> {
        let (api, table) = (self.api, self.api.table());
        let level = match options.optimization {
            Optimization::None => GraphOptimizationLevel::ORT_DISABLE_ALL,
            Optimization::Basic => GraphOptimizationLevel::ORT_ENABLE_BASIC,
            Optimization::Extended => GraphOptimizationLevel::ORT_ENABLE_EXTENDED,
            Optimization::All => GraphOptimizationLevel::ORT_ENABLE_ALL,
        };
        // ONNX Runtime's INFO is as verbose as our debug, and so on.
        let severity = match log::max_level() {
            log::LevelFilter::Trace => 0,
            log::LevelFilter::Debug => 1,
            _ => 2,
        };
        // SAFETY: the options are live; the operators' domain lives as long as the process.
        unsafe {
            api.check((table.SetSessionGraphOptimizationLevel)(self.raw, level))?;
            api.check((table.SetIntraOpNumThreads)(self.raw, options.intra_op_threads as i32))?;
            api.check((table.SetSessionLogSeverityLevel)(self.raw, severity))?;
            if options.sleep_when_idle {
                self.set(c"session.intra_op.allow_spinning", "0")?;
            }
            if let Some(path) = &options.profile_path {
                let prefix = c_path(path, "options.profile_path")?;
                api.check((table.EnableProfiling)(self.raw, prefix.as_ptr()))?;
            }
            let providers = if options.host_pools { Providers::Cpu } else { Providers::All };
            api.check(pagoda_custom_ops::register(table, self.raw, providers))
        }
    }

    fn set(&self, key: &CStr, value: &str) -> Result<()> {
        let value = CString::new(value).expect("what we set has no NUL");
        // SAFETY: the options are live and the texts are copied.
        self.api.check(unsafe { (self.api.table().AddSessionConfigEntry)(self.raw, key.as_ptr(), value.as_ptr()) })
    }

    /// Returns the stream of all runs, if the session captures; it must outlive the session.
    fn append_cuda(&self, options: &ModelOptions, captures: bool) -> Result<Option<SideStream>> {
        let (api, table) = (self.api, self.api.table());
        if !has_cuda(api)? {
            return Err(Error::new(
                Status::Unsupported,
                format!("this ONNX Runtime ({}) has no CUDA provider: install onnxruntime-gpu", api.version),
            )
            .about("options.provider"));
        }
        // Without one ONNX Runtime makes its own.
        let gpu = captures.then(|| Gpu::shared(options.device_id as usize));
        let stream = gpu.and_then(Result::ok).map(SideStream::new).transpose()?;
        let device = CString::new(options.device_id.to_string()).expect("digits have no NUL");
        let flag = |on| if on { c"1".as_ptr() } else { c"0".as_ptr() };
        let keys = [c"device_id".as_ptr(), c"use_tf32".as_ptr(), c"enable_cuda_graph".as_ptr()];
        let values = [device.as_ptr(), flag(options.tf32), flag(captures)];
        let mut cuda = null_mut();
        // SAFETY: the options are live, the texts too, and the CUDA options are released whatever happens between.
        let appended = unsafe {
            api.check((table.CreateCUDAProviderOptions)(&mut cuda))?;
            let key = c"user_compute_stream".as_ptr();
            let appended = api
                .check((table.UpdateCUDAProviderOptions)(cuda, keys.as_ptr(), values.as_ptr(), keys.len()))
                .and_then(|()| match &stream {
                    Some(own) => api.check((table.UpdateCUDAProviderOptionsWithValue)(cuda, key, own.raw().cast())),
                    None => Ok(()),
                })
                .and_then(|()| api.check((table.SessionOptionsAppendExecutionProvider_CUDA_V2)(self.raw, cuda)));
            (table.ReleaseCUDAProviderOptions)(cuda);
            appended
        };
        appended.map(|()| stream).map_err(|error| {
            Error::new(Status::Unsupported, format!("the GPU can not be used: {}", error.message()))
                .about("options.provider")
        })
    }
}

/// Whether this ONNX Runtime has its CUDA provider. No GPU is opened for that.
pub(crate) fn has_cuda(api: &Api) -> Result<bool> {
    let mut names: *mut *mut c_char = null_mut();
    let mut count = 0;
    // SAFETY: the list is read once and released.
    unsafe {
        api.check((api.table().GetAvailableProviders)(&mut names, &mut count))?;
        let list = std::slice::from_raw_parts(names, count as usize);
        let found = list.iter().any(|&name| CStr::from_ptr(name) == c"CUDAExecutionProvider");
        api.check((api.table().ReleaseAvailableProviders)(names, count))?;
        Ok(found)
    }
}

/// Refuses a path that can not be written: ONNX Runtime would silently write the profile somewhere else.
fn check_profile_path(path: &Path) -> Result<()> {
    let folder = match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => return Err(Error::invalid("options.profile_path", format!("{path:?} does not name a file"))),
    };
    if path.file_name().is_none() || path.is_dir() || !folder.is_dir() {
        return Err(Error::invalid(
            "options.profile_path",
            format!("{path:?} does not name a file in a folder that is there"),
        ));
    }
    Ok(())
}

fn c_path(path: &Path, argument: &str) -> Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| Error::invalid(argument, format!("{path:?} has a NUL in it")))
}
