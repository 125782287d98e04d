//! `ai.pagoda.EmbeddingBag`: lookup in an embedding table, and pooling.

use std::ffi::CString;
use std::sync::Arc;

use pagoda_kernels::cuda::{CUstream, Gpu, Slots};
use pagoda_kernels::parallel::{Parallel, Serial};
use pagoda_kernels::{Combiner, Pool, check_offsets};
use parking_lot::{Mutex, MutexGuard};

use crate::ort::{
    BOOL, Dim, F32, I64, Input, InputTensor, KernelContext, KernelInfo, Launch, OpError, Operator, Output,
    OutputTensor, Shape, ShapeInferContext,
};
use crate::side_channel::tables::{self, DeviceBag, DeviceRows, TableRows, Tables};

/// The lookup of keys in one table, whose rows are combined into one vector per slot.
pub struct EmbeddingBag {
    name: String,
    table: Arc<dyn TableRows>,
    /// The part of the table in GPU memory, if the node is on the CUDA provider and the table has one.
    device_rows: Option<Arc<dyn DeviceRows>>,
    /// Keeps the tables open while a node uses one of them: other nodes share them, and their background work continues.
    _tables: Arc<dyn Tables>,
    dim: usize,
    /// `None`: one vector for each key.
    combiner: Option<Combiner>,
    /// Buffers of earlier calls, for reuse: the system would map and zero new ones of this size each time.
    buffers: Mutex<Vec<Buffers>>,
}

/// The result of a lookup: the rows of the keys, and which keys were found.
#[derive(Default)]
struct Buffers {
    numbers: Vec<f32>,
    found: Vec<bool>,
}

impl Operator for EmbeddingBag {
    const INPUTS: &'static [Input] = &[Input::required("keys", I64), Input::optional("offsets", I64)];
    const OUTPUTS: &'static [Output] = &[Output::required("vectors", F32), Output::optional("hit", BOOL)];

    fn infer_shapes(node: &ShapeInferContext) -> Result<Vec<Option<Shape>>, OpError> {
        let only = |index| -> Result<Option<Dim>, OpError> {
            let dims: Option<[Dim; 1]> = node.input(index)?.and_then(|shape| shape.dims.try_into().ok());
            Ok(dims.map(|[dim]| dim))
        };
        let keys = only(0)?;
        let rows = match (node.string(c"combiner").as_deref(), only(1)?) {
            (Some("none"), _) => keys.clone(),
            (_, Some(Dim::Fixed(offsets))) => Some(Dim::Fixed((offsets - 1).max(0))),
            (_, Some(Dim::Symbolic(offsets))) => Some(symbolic(&format!("{} - 1", offsets.to_string_lossy()))),
            _ => None,
        };
        // The configuration of the session determines the dimension of the table, which is fixed in one session.
        let dim = node.string(c"table").map(|table| symbolic(&format!("ai.pagoda.tables {table}")));
        let vectors = rows.zip(dim).map(|(rows, dim)| Shape { element: F32, dims: vec![rows, dim] });
        Ok(vec![vectors, keys.map(|keys| Shape { element: BOOL, dims: vec![keys] })])
    }

    fn new(info: &KernelInfo) -> Result<Self, OpError> {
        let combiner = combiner(info)?;
        check_offsets_input(info, combiner)?;
        let name = info.string(c"table")?.ok_or_else(|| {
            OpError::invalid("EmbeddingBag: the attribute table (the name of an embedding table) is missing")
        })?;
        let (tables, table) = bind(info, &name)?;
        let dim = table.dim();
        Ok(Self { name, table, device_rows: None, _tables: tables, dim, combiner, buffers: Mutex::default() })
    }

    fn compute(&self, context: &KernelContext) -> Result<(), OpError> {
        let keys = context.input(0)?;
        let offsets = self.combiner.map(|_| context.input(1)).transpose()?;
        let [count] = keys.shape()?;
        // The check precedes the outputs: an invalid call must not write a buffer that the caller bound.
        let pooling = match (self.combiner, &offsets) {
            (Some(combiner), Some(offsets)) => {
                offsets.shape::<1>()?;
                // SAFETY: tensors of the CPU provider are in host memory and have the element types of `INPUTS`. Nothing
                // writes to an input of a running node.
                let offsets = unsafe { offsets.slice() };
                check_offsets(offsets, count)?;
                Some((combiner, offsets))
            }
            _ => None,
        };
        let rows = pooling.map_or(count, |(_, offsets)| offsets.len() - 1);
        let (vectors, hit) = self.outputs(context, rows, &keys, offsets.as_ref())?;

        let mut buffers = self.buffers().pop().unwrap_or_default();
        // SAFETY: as above. The outputs are disjoint from every input and from each other. f32 has no invalid bit patterns, and
        // `hit` is written through a pointer, without a reference to uninitialised bools.
        unsafe {
            self.look_up_and_pool(keys.slice(), pooling, vectors.slice_mut(), &mut buffers, context)?;
            if let Some(hit) = &hit {
                hit.data.cast::<bool>().copy_from_nonoverlapping(buffers.found.as_ptr(), count);
            }
        }
        self.buffers().push(buffers);
        Ok(())
    }
}

impl Launch for EmbeddingBag {
    fn prepare(&mut self, gpu: &'static Gpu) -> Result<(), OpError> {
        self.device_rows = self.table.on_device(gpu).map_err(|error| self.failed(&error))?;
        Ok(())
    }

    fn launch(&self, gpu: &Gpu, stream: CUstream, context: &KernelContext) -> Result<(), OpError> {
        // SAFETY: the stream belongs to the device of the node.
        if unsafe { gpu.is_capturing(stream) }? {
            return Err(OpError::invalid(format!(
                "{}: this operator can not be captured into a CUDA graph, for the host brings the rows that are missing: \
                 open the model without CUDA graphs",
                about(&self.name)
            )));
        }
        let Some(device_rows) = &self.device_rows else { return self.through_host(gpu, stream, context) };
        let keys = context.input(0)?;
        let offsets = self.combiner.map(|_| context.input(1)).transpose()?;
        let [count] = keys.shape()?;
        let slots = match (self.combiner, &offsets) {
            (Some(combiner), Some(offsets)) => {
                let [len] = offsets.shape()?;
                let none = || OpError::invalid("offsets: 0 offsets, expected one more than rows");
                Some(Slots { offsets: offsets.address(), count: len.checked_sub(1).ok_or_else(none)?, combiner })
            }
            _ => None,
        };
        let rows = slots.map_or(count, |slots| slots.count);
        let (vectors, hit) = self.outputs(context, rows, &keys, offsets.as_ref())?;
        let (vectors, hit) = (vectors.address(), hit.map(|hit| hit.address()));
        let call = DeviceBag { keys: keys.address(), count, slots, vectors, hit };
        // SAFETY: tensors of the CUDA provider are on its device, have the sizes of their shapes, and stay allocated until the
        // stream has run the call. The outputs are disjoint from every input and from each other.
        unsafe { device_rows.bag(&call, stream) }.map_err(|error| self.failed(&error))
    }
}

impl EmbeddingBag {
    /// The outputs, which must be disjoint from every input and from each other.
    fn outputs(
        &self,
        context: &KernelContext,
        rows: usize,
        keys: &InputTensor<'_>,
        offsets: Option<&InputTensor<'_>>,
    ) -> Result<(OutputTensor, Option<OutputTensor>), OpError> {
        let vectors = context.output(0, &[rows, self.dim])?;
        let hit = context.optional_output(1, &keys.dims)?;
        let inputs = || [Some(keys), offsets].into_iter().flatten();
        vectors.check_disjoint(inputs())?;
        if let Some(hit) = &hit {
            hit.check_disjoint(inputs())?;
            hit.check_disjoint_output(&vectors)?;
        }
        Ok((vectors, hit))
    }

    /// A call on the CUDA provider for a table without rows in GPU memory: keys and vectors go through host memory.
    fn through_host(&self, gpu: &Gpu, stream: CUstream, context: &KernelContext) -> Result<(), OpError> {
        let read = |input: &InputTensor<'_>| -> Result<Vec<i64>, OpError> {
            let [len] = input.shape()?;
            let mut numbers = vec![0; len];
            // SAFETY: the tensor is on the device, has `len` elements, and lives for the whole call.
            unsafe { gpu.read(input.address(), &mut numbers, stream) }?;
            Ok(numbers)
        };
        let keys = context.input(0)?;
        let offsets = self.combiner.map(|_| context.input(1)).transpose()?;
        let (given, slots) = (read(&keys)?, offsets.as_ref().map(read).transpose()?);
        if let Some(slots) = &slots {
            check_offsets(slots, given.len())?;
        }
        let pooling = self.combiner.zip(slots.as_deref());
        let rows = pooling.map_or(given.len(), |(_, slots)| slots.len() - 1);
        let (vectors, hit) = self.outputs(context, rows, &keys, offsets.as_ref())?;
        let mut buffers = Buffers::default();
        let mut made = vec![0.0_f32; rows * self.dim];
        self.look_up_and_pool(&given, pooling, &mut made, &mut buffers, &Serial)?;
        // SAFETY: the outputs are on the device, have the sizes of their shapes, and are disjoint from everything else.
        unsafe {
            gpu.write(vectors.address(), &made, stream)?;
            if let Some(hit) = &hit {
                gpu.write(hit.address(), &buffers.found, stream)?;
            }
        }
        Ok(())
    }

    fn failed(&self, error: &str) -> OpError {
        OpError::failed(format!("{}: {error}", about(&self.name)))
    }

    fn look_up_and_pool(
        &self,
        keys: &[i64],
        pooling: Option<(Combiner, &[i64])>,
        vectors: &mut [f32],
        Buffers { numbers, found }: &mut Buffers,
        threads: &dyn Parallel,
    ) -> Result<(), OpError> {
        let look_up = |numbers: &mut [f32], found: &mut [bool]| {
            self.table.lookup(keys, numbers, found).map_err(|error| self.failed(&error))
        };
        found.clear();
        found.resize(keys.len(), false);
        let Some((combiner, offsets)) = pooling else {
            return look_up(vectors, found);
        };
        let len = keys.len().checked_mul(self.dim).ok_or_else(|| {
            OpError::invalid(format!("keys: {} keys with rows of {} numbers are too many", keys.len(), self.dim))
        })?;
        numbers.resize(len, 0.0);
        look_up(numbers, found)?;
        Ok(Pool { rows: numbers, dim: self.dim, index: None, offsets, combiner }.run(vectors, threads)?)
    }

    fn buffers(&self) -> MutexGuard<'_, Vec<Buffers>> {
        self.buffers.lock()
    }
}

fn combiner(info: &KernelInfo) -> Result<Option<Combiner>, OpError> {
    let expected = "expected sum, mean, sqrtn or none";
    let name = info
        .string(c"combiner")?
        .ok_or_else(|| OpError::invalid(format!("EmbeddingBag: the attribute combiner is missing, {expected}")))?;
    match Combiner::named(&name) {
        None if name != "none" => Err(OpError::invalid(format!("combiner: {name:?}, {expected}"))),
        combiner => Ok(combiner),
    }
}

/// Rejects offsets without a combiner, and a combiner without offsets.
fn check_offsets_input(info: &KernelInfo, combiner: Option<Combiner>) -> Result<(), OpError> {
    match (combiner, info.has_input(1)?) {
        (None, true) => Err(OpError::invalid("offsets: with the combiner none there are none, leave this input out")),
        (Some(_), false) => {
            Err(OpError::invalid("offsets: this input is missing, and only the combiner none goes without it"))
        }
        _ => Ok(()),
    }
}

/// A set of tables, and one table of the set.
type BoundTable = (Arc<dyn Tables>, Arc<dyn TableRows>);

/// Finds a table in the set of tables that the session's configuration names.
fn bind(info: &KernelInfo, table: &str) -> Result<BoundTable, OpError> {
    let about = about(table);
    let key = tables::ENTRY;
    let entry = info.session_entry(key)?.ok_or_else(|| {
        OpError::invalid(format!(
            "{about}: the session does not say where tables come from: open the model with tables \
             (pagoda_model_options.tables), or in another ONNX Runtime set the configuration entry {} of its session \
             (add_session_config_entry in Python) to the path of their JSON configuration",
            key.to_string_lossy()
        ))
    })?;
    let failed = |error: String| match tables::is_bound(&entry) {
        true => OpError::failed(format!("{about}: {error}")),
        false => OpError::failed(format!("{about}: {} is {entry:?}: {error}", key.to_string_lossy())),
    };
    let tables = tables::open(&entry).map_err(failed)?;
    let found = tables.table(table).map_err(failed)?;
    match found.dim() {
        0 => Err(failed("rows without numbers can not be used".to_owned())),
        _ => Ok((tables, found)),
    }
}

/// The prefix of error messages about a table.
fn about(table: &str) -> String {
    format!("EmbeddingBag: table {table:?}")
}

/// A symbolic dimension that this operator introduces.
fn symbolic(name: &str) -> Dim {
    Dim::Symbolic(CString::new(name.replace('\0', "\\0")).unwrap_or_default())
}
