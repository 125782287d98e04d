//! Models: opened once, run by any number of threads.

use std::ffi::c_char;
use std::ops::Range;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::Instant;

use ort_sys::{OrtRunOptions, OrtValue};

use super::api::{self, Api};
use super::cancel::{Cancel, cancelled};
use super::executor;
use super::options::{ModelOptions, Provider};
use super::request::Request;
use super::run_options::RunOptions;
use super::session::{Session, Source};
use super::value::{Value, ValueInfo};
use crate::device::{Gpu, KeptCounters, SideStream, no_capture};
use crate::error::{Error, Result, Status};
use crate::metrics::ModelMetrics;
use crate::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use crate::tensor::{ElementType, Tensor};

/// An ONNX model, ready to run. Any number of threads may run it at the same time.
pub struct Model {
    api: &'static Api,
    session: Session,
    inputs: Vec<ValueInfo>,
    outputs: Vec<ValueInfo>,
    metrics: ModelMetrics,
}

/// The name of a model in metrics.
fn name_of(path: &Path) -> std::borrow::Cow<'_, str> {
    path.file_stem().map_or("model".into(), |stem| stem.to_string_lossy())
}

impl Model {
    /// Opens the model in a file. The ai.pagoda operators are registered.
    pub fn open(path: impl AsRef<Path>, options: &ModelOptions) -> Result<Self> {
        Self::open_file(path.as_ref(), path.as_ref(), options, false)
    }

    /// As [`open`](Self::open), with another graph for the CPU provider. If it `captures`, runs on a GPU can be captured into CUDA
    /// graphs; every node of the model has to run on the GPU then.
    pub(crate) fn open_file(path: &Path, on_cpu: &Path, options: &ModelOptions, captures: bool) -> Result<Self> {
        if path.as_os_str().is_empty() {
            return Err(Error::invalid("path", "an empty text; name the .onnx file"));
        }
        let metadata = std::fs::metadata(path).map_err(|error| {
            let status = if error.kind() == std::io::ErrorKind::NotFound { Status::NotFound } else { Status::Io };
            Error::new(status, format!("{}: {error}", path.display())).about("path")
        })?;
        if metadata.is_dir() {
            return Err(Error::invalid("path", format!("{} is a folder; name the .onnx file", path.display())));
        }
        Self::from_source(&Source::File { path, on_cpu }, &name_of(path), options, captures)
    }

    /// As [`open_file`](Self::open_file), with other graphs than those in the files. Their weights are where those of `path`
    /// are.
    pub(crate) fn open_graphs(
        (graph, on_cpu): (&[u8], &[u8]),
        path: &Path,
        options: &ModelOptions,
        captures: bool,
    ) -> Result<Self> {
        let folder = path.parent().unwrap_or(Path::new(""));
        Self::from_source(&Source::Graphs { graph, on_cpu, folder }, &name_of(path), options, captures)
    }

    /// Opens a model from the bytes of an .onnx file.
    pub fn open_memory(bytes: &[u8], options: &ModelOptions) -> Result<Self> {
        if bytes.is_empty() {
            return Err(Error::invalid("bytes", "0 bytes are not an ONNX model"));
        }
        Self::from_source(&Source::Memory(bytes), "memory", options, false)
    }

    fn from_source(source: &Source, name: &str, options: &ModelOptions, captures: bool) -> Result<Self> {
        let api = api::api(options.onnxruntime_path.as_deref())?;
        let session = Session::open(api, source, options, captures)?;
        let (inputs, outputs) = session.inputs_and_outputs()?;
        Ok(Self { api, session, inputs, outputs, metrics: ModelMetrics::new(name) })
    }

    /// Its inputs.
    pub fn inputs(&self) -> &[ValueInfo] {
        &self.inputs
    }

    /// Its outputs.
    pub fn outputs(&self) -> &[ValueInfo] {
        &self.outputs
    }

    /// Where the model runs: the CPU or a GPU, never `Auto`.
    pub fn provider(&self) -> Provider {
        self.session.provider
    }

    /// Why `Provider::Auto` chose the CPU; empty otherwise.
    pub fn provider_reason(&self) -> &str {
        &self.session.reason
    }

    /// Whether the ai.pagoda operators run on a GPU; then pools should be in its memory.
    pub fn operators_on_gpu(&self) -> bool {
        self.session.operators_on_gpu
    }

    /// The version of the ONNX Runtime library it runs on.
    pub fn onnxruntime_version(&self) -> &str {
        &self.api.version
    }

    /// Runs the model and returns the outputs asked for.
    pub fn run(&self, inputs: &[(&str, &Tensor)], outputs: &[&str]) -> Result<Vec<Tensor>> {
        let outputs: Vec<_> = outputs.iter().map(|&name| (name, None)).collect();
        // SAFETY: no output is bound.
        let tensors = unsafe { self.run_bound(inputs, &outputs, None) }?;
        Ok(tensors.into_iter().map(|tensor| tensor.expect("not bound, so it is new")).collect())
    }

    /// Runs the model and writes the outputs into tensors of the caller.
    pub fn run_into(&self, inputs: &[(&str, &Tensor)], outputs: &mut [(&str, &mut Tensor)]) -> Result<()> {
        let outputs: Vec<_> = outputs.iter_mut().map(|(name, tensor)| (*name, Some(&**tensor))).collect();
        // SAFETY: the caller lent the outputs exclusively.
        unsafe { self.run_bound(inputs, &outputs, None) }.map(drop)
    }

    /// Runs the model. An output with a tensor is written into it, and `None` is returned in its place; the other
    /// outputs are returned. The same memory may be an input and an output, as pools of keys and values are. If it is
    /// host memory and the model runs on a GPU, such runs exclude one another, unless the model was opened with
    /// `host_pools`.
    ///
    /// # Safety
    /// During the run nothing else writes to the tensors, or reads those that are outputs.
    pub unsafe fn run_bound(
        &self,
        inputs: &[(&str, &Tensor)],
        outputs: &[(&str, Option<&Tensor>)],
        cancel: Option<&Cancel>,
    ) -> Result<Vec<Option<Tensor>>> {
        let start = Instant::now();
        // SAFETY: by contract.
        let result = unsafe { self.run_uncounted(inputs, outputs, cancel) };
        self.count(start, &result);
        result
    }

    pub(super) fn count<T>(&self, start: Instant, result: &Result<T>) {
        match result {
            Ok(_) => self.metrics.succeeded(start.elapsed()),
            Err(error) => self.metrics.failed(error),
        }
    }

    pub(super) fn api(&self) -> &'static Api {
        self.api
    }

    /// Locked exclusively by a run that replays a graph.
    pub(super) fn replaying(&self) -> &RwLock<()> {
        &self.session.replaying
    }

    /// Keeps the counters of a graph that was captured.
    pub(super) fn keep(&self, counters: KeptCounters) {
        self.session.counters.lock().push(counters);
    }

    /// The stream that graphs are replayed on.
    pub(super) fn stream(&self) -> Option<&SideStream> {
        self.session.stream.as_ref()
    }

    /// Runs the model on a worker thread, which calls `done` with what [`Model::run_bound`] returns. An invalid request
    /// is an error at once, and `done` is not called.
    pub fn run_async(
        self: &Arc<Self>,
        request: Request,
        done: impl FnOnce(Result<Vec<Option<Tensor>>>) + Send + 'static,
    ) -> Result<()> {
        let (inputs, outputs) = borrow(&request);
        self.resolve(&inputs, &outputs)?;
        let model = Arc::clone(self);
        executor::submit(Box::new(move || {
            let result = {
                let (inputs, outputs) = borrow(&request);
                let run = || {
                    // SAFETY: what `Request::output_into` asks of its caller.
                    unsafe { model.run_bound(&inputs, &outputs, request.cancel.as_deref()) }
                };
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(run))
                    .unwrap_or_else(|payload| Err(Error::from_panic(payload.as_ref())))
            };
            // The tensors are released before `done` is called, so that the caller owns its memory again.
            drop(request);
            drop(model);
            done(result);
        }))
    }

    unsafe fn run_uncounted(
        &self,
        inputs: &[(&str, &Tensor)],
        outputs: &[(&str, Option<&Tensor>)],
        cancel: Option<&Cancel>,
    ) -> Result<Vec<Option<Tensor>>> {
        let names = self.resolve(inputs, outputs)?;
        let (input_names, output_names) = names.split_at(inputs.len());
        let options = match cancel {
            // A session that captures would capture every run without these options.
            None => self.session.uncaptured.as_ref().map_or(null_mut(), RunOptions::raw),
            Some(cancel) => {
                cancel.check()?;
                cancel.options(self.api)?
            }
        };
        let _held = self.hold(inputs, outputs);
        let values = inputs.iter().map(|(_, tensor)| Value::over(self.api, tensor)).collect::<Result<Vec<_>>>()?;
        let bound = outputs.iter().map(|(_, tensor)| tensor.map(|tensor| Value::over(self.api, tensor)).transpose());
        let bound = bound.collect::<Result<Vec<_>>>()?;
        let raw_inputs: Vec<*const OrtValue> = values.iter().map(|value| value.raw().cast_const()).collect();
        let mut raw_outputs: Vec<*mut OrtValue> =
            bound.iter().map(|value| value.as_ref().map_or(null_mut(), Value::raw)).collect();
        let replays = self.session.uncaptured.is_some();
        let _shared = replays.then(|| self.session.replaying.read());
        let _hold = (self.session.provider == Provider::Cuda).then(no_capture);
        // SAFETY: the session, the names and the values live for the whole call.
        let ran = unsafe { self.run_raw(options, input_names, &raw_inputs, output_names, &mut raw_outputs) };
        let made: Vec<Option<Value>> = raw_outputs
            .into_iter()
            .zip(&bound)
            // SAFETY: what was not bound and is not NULL was made by this run and is ours.
            .map(|(raw, bound)| (bound.is_none() && !raw.is_null()).then(|| unsafe { Value::from_raw(self.api, raw) }))
            .collect();
        if ran.is_err() {
            self.let_it_end();
        }
        ran.map_err(|error| match cancel {
            Some(cancel) if cancel.is_triggered() => cancelled(),
            _ => error,
        })?;
        let tensors = made.into_iter().zip(outputs).map(|(value, (name, _))| {
            let tensor = value.map(Value::into_tensor).transpose();
            tensor.map_err(|error| Error::new(error.status(), format!("output {name:?}: {}", error.message())))
        });
        tensors.collect()
    }

    /// Runs the session.
    ///
    /// # Safety
    /// Everything is live for the whole call, and there are as many values as names.
    pub(super) unsafe fn run_raw(
        &self,
        options: *const OrtRunOptions,
        input_names: &[*const c_char],
        inputs: &[*const OrtValue],
        output_names: &[*const c_char],
        outputs: &mut [*mut OrtValue],
    ) -> Result<()> {
        debug_assert!(input_names.len() == inputs.len() && output_names.len() == outputs.len());
        // SAFETY: by contract. Sessions may be run from many threads at once.
        self.api.check(unsafe {
            (self.api.table().Run)(
                self.session.raw(),
                options,
                input_names.as_ptr(),
                inputs.as_ptr(),
                inputs.len(),
                output_names.as_ptr(),
                output_names.len(),
                outputs.as_mut_ptr(),
            )
        })
    }

    /// After a failed run: waits for the work that it enqueued on a GPU, for which ONNX Runtime may not have waited.
    /// The memory of its tensors is used for other runs next.
    pub(super) fn let_it_end(&self) {
        if let Some(gpu) = self.session.device.and_then(|device| Gpu::shared(device as usize).ok())
            && let Err(error) = gpu.let_all_end()
        {
            log::error!("a run failed, and what it had begun on the GPU too: {error}");
        }
    }

    /// Locks tensors that are inputs and outputs at once, for the time of a run. On the CPU a run writes its own part
    /// of such a tensor, and any number of runs share it. If ONNX Runtime copies the tensor to a GPU, the whole of it
    /// is copied back, over what other runs wrote meanwhile; so the lock is exclusive.
    fn hold<'a>(&self, inputs: &[(&str, &Tensor)], outputs: &[(&str, Option<&'a Tensor>)]) -> Vec<Held<'a>> {
        let is_input = |tensor: &&Tensor| {
            let inputs = || inputs.iter().filter_map(|(_, input)| bytes_of(input));
            bytes_of(tensor).is_some_and(|range| inputs().any(|input| overlap(&range, &input)))
        };
        let mut shared: Vec<&Tensor> = outputs.iter().filter_map(|(_, tensor)| *tensor).filter(is_input).collect();
        // Always in the same order, or two runs could deadlock.
        shared.sort_by_key(|tensor| std::ptr::from_ref(*tensor).addr());
        let hold = |tensor: &'a Tensor| match self.session.operators_on_gpu && tensor.device().is_none() {
            true => Held::Whole { _guard: tensor.hold_whole() },
            false => Held::Part { _guard: tensor.hold_part() },
        };
        shared.into_iter().map(hold).collect()
    }

    /// Checks a call and returns the names of its inputs, then those of its outputs, as ONNX Runtime takes them.
    pub(super) fn resolve(
        &self,
        inputs: &[(&str, &Tensor)],
        outputs: &[(&str, Option<&Tensor>)],
    ) -> Result<Vec<*const c_char>> {
        let mut names = Vec::with_capacity(inputs.len() + outputs.len());
        for (index, (name, tensor)) in inputs.iter().enumerate() {
            let info = find(&self.inputs, name, "input", index)?;
            fits(info, tensor).map_err(|error| error.about(format!("inputs[{index}]")))?;
            names.push(once(&names, info, "input", index)?);
        }
        if let Some(missing) = self.inputs.iter().find(|info| !names.contains(&info.c_name().as_ptr())) {
            return Err(Error::invalid("input_names", format!("the model's input {:?} is missing", missing.name())));
        }
        for (index, (name, tensor)) in outputs.iter().enumerate() {
            let info = find(&self.outputs, name, "output", index)?;
            // Checked before the run: ONNX Runtime crashes when it is asked for the type of an empty optional.
            tensor_type(info).map_err(|error| error.about(format!("output_names[{index}]")))?;
            // ONNX Runtime would return the input itself: memory of the caller, which the output could outlive.
            if self.inputs.iter().any(|input| input.name() == info.name()) {
                let message = format!("{:?} is an input too: use the tensor that goes in", info.name());
                return Err(Error::new(Status::Unsupported, message).about(format!("output_names[{index}]")));
            }
            if let Some(tensor) = tensor {
                fits(info, tensor).map_err(|error| error.about(format!("outputs[{index}]")))?;
                if tensor.element_type() == ElementType::String {
                    let message = "an output of strings can not be bound: pass NULL and take the new tensor";
                    return Err(Error::new(Status::Unsupported, message).about(format!("outputs[{index}]")));
                }
            }
            names.push(once(&names[inputs.len()..], info, "output", index)?);
        }
        let bound: Vec<_> = outputs.iter().map(|(_, tensor)| tensor.and_then(bytes_of)).collect();
        for (index, range) in bound.iter().enumerate() {
            let shared = |other: &Range<usize>| range.as_ref().is_some_and(|range| overlap(range, other));
            if let Some(other) = bound[..index].iter().position(|other| other.as_ref().is_some_and(shared)) {
                let message = format!("its memory overlaps that of outputs[{other}]: one would overwrite the other");
                return Err(Error::invalid(format!("outputs[{index}]"), message));
            }
        }
        if outputs.is_empty() {
            return Err(Error::invalid("output_names", "no output is asked for: name at least one"));
        }
        Ok(names)
    }
}

/// A lock on a tensor.
enum Held<'a> {
    Part { _guard: RwLockReadGuard<'a, ()> },
    Whole { _guard: RwLockWriteGuard<'a, ()> },
}

type Inputs<'a> = Vec<(&'a str, &'a Tensor)>;
type Outputs<'a> = Vec<(&'a str, Option<&'a Tensor>)>;

fn borrow(request: &Request) -> (Inputs<'_>, Outputs<'_>) {
    let inputs = request.inputs.iter().map(|(name, tensor)| (name.as_str(), &**tensor)).collect();
    let outputs = request.outputs.iter().map(|(name, tensor)| (name.as_str(), tensor.as_deref())).collect();
    (inputs, outputs)
}

fn find<'a>(infos: &'a [ValueInfo], name: &str, what: &str, index: usize) -> Result<&'a ValueInfo> {
    infos.iter().find(|info| info.name() == name).ok_or_else(|| {
        let names: Vec<_> = infos.iter().map(ValueInfo::name).collect();
        Error::new(Status::NotFound, format!("the model has no {what} {name:?}; it has {}", names.join(", ")))
            .about(format!("{what}_names[{index}]"))
    })
}

/// The name of `info`, unless the call has it already.
fn once(names: &[*const c_char], info: &ValueInfo, what: &str, index: usize) -> Result<*const c_char> {
    let name = info.c_name().as_ptr();
    if names.contains(&name) {
        return Err(Error::invalid(format!("{what}_names[{index}]"), format!("{:?} is given twice", info.name())));
    }
    Ok(name)
}

/// The addresses of a tensor of numbers that has any.
fn bytes_of(tensor: &Tensor) -> Option<Range<usize>> {
    let (data, bytes) = tensor.place().ok()?;
    (bytes > 0).then(|| data.addr()..data.addr() + bytes)
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

/// The type of the elements of an input or output that is a tensor.
fn tensor_type(info: &ValueInfo) -> Result<ElementType> {
    info.element_type().ok_or_else(|| {
        let message = format!("{:?} is not a tensor but a sequence, a map, an optional or the like", info.name());
        Error::new(Status::Unsupported, message)
    })
}

/// Whether a tensor can be this input or output, as far as the model says.
fn fits(info: &ValueInfo, tensor: &Tensor) -> Result<()> {
    let element = tensor_type(info)?;
    if element != tensor.element_type() {
        return Err(Error::new(
            Status::InvalidArgument,
            format!(
                "{:?} has elements of {}, this tensor of {}",
                info.name(),
                element.name(),
                tensor.element_type().name()
            ),
        ));
    }
    let Some(expected) = info.dims() else { return Ok(()) };
    let dims = tensor.dims();
    let differs = |(&expected, &dim): (&i64, &i64)| expected >= 0 && expected != dim;
    if expected.len() != dims.len() || expected.iter().zip(dims).any(differs) {
        return Err(Error::new(
            Status::InvalidArgument,
            format!("{:?} has the shape {expected:?} (-1 = any), this tensor {dims:?}", info.name()),
        ));
    }
    Ok(())
}
