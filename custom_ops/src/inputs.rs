//! What operators have in common: users' rows and the pages that they lie in, shapes, and attributes. Shapes are checked
//! here, whatever the provider; what indices hold is checked by the kernels of the CPU, and clamped by those of the GPU.

use std::ffi::CStr;

use ort_sys::ONNXTensorElementDataType as OnnxType;
use pagoda_kernels::batch::{Pages, Rows};
use pagoda_kernels::cuda;

use crate::context::{Attributes, Context, InputTensor};
use crate::op::OpError;

/// The type of index tensors.
pub const I32: OnnxType = OnnxType::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;

/// The type of keys, positions and numbers of rows.
pub const I64: OnnxType = OnnxType::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;

/// How the rows of a call are shared out among its users.
pub struct RowInputs<'a> {
    row_offsets: InputTensor<'a>,
    num_candidates: InputTensor<'a>,
    total_rows: usize,
    heads: usize,
    head_size: usize,
}

impl<'a> RowInputs<'a> {
    /// Reads inputs 3 and 4, for rows of the shape of the first of `tensors`, which the others have to have too.
    pub fn read(context: &'a Context, tensors: &[&InputTensor<'_>]) -> Result<Self, OpError> {
        let [total_rows, heads, head_size] = tensors[0].shape()?;
        for tensor in &tensors[1..] {
            if tensor.shape::<3>()? != [total_rows, heads, head_size] {
                return Err(OpError::invalid(format!(
                    "{}: shape {:?} differs from that of {}, {:?}",
                    tensor.name, tensor.dims, tensors[0].name, tensors[0].dims
                )));
            }
        }
        let [row_offsets, num_candidates] = [context.input(3)?, context.input(4)?];
        row_offsets.shape::<1>()?;
        num_candidates.shape::<1>()?;
        Ok(Self { row_offsets, num_candidates, total_rows, heads, head_size })
    }

    /// The tensors themselves.
    pub fn tensors(&self) -> [&InputTensor<'a>; 2] {
        [&self.row_offsets, &self.num_candidates]
    }

    /// For the kernels of the CPU.
    ///
    /// # Safety
    /// The tensors are in host memory, and nothing writes to them while the slices live.
    pub unsafe fn on_host(&self) -> Rows<'a> {
        let Self { total_rows, heads, head_size, .. } = *self;
        // SAFETY: the caller's; the elements are those of `I32`.
        let (row_offsets, num_candidates) = unsafe { (self.row_offsets.slice(), self.num_candidates.slice()) };
        Rows { row_offsets, num_candidates, total_rows, heads, head_size }
    }

    /// For the kernels of the GPU.
    pub fn on_device(&self) -> Result<cuda::Rows, OpError> {
        let Self { total_rows, heads, head_size, .. } = *self;
        let users = self.num_candidates.dims[0];
        expect_len(&self.row_offsets, users + 1, "one more than there are users")?;
        if users == 0 && total_rows > 0 {
            return Err(OpError::invalid(format!("num_candidates: 0 users, expected some for {total_rows} rows")));
        }
        let (row_offsets, num_candidates) = (self.row_offsets.address(), self.num_candidates.address());
        Ok(cuda::Rows { row_offsets, num_candidates, users, total_rows, heads, head_size })
    }
}

/// The users' pages, and the pool that they lie in.
pub struct CacheInputs<'a> {
    cached_len: InputTensor<'a>,
    page_indptr: InputTensor<'a>,
    page_ids: InputTensor<'a>,
    /// The pool.
    pub pool: InputTensor<'a>,
    pool_pages: usize,
    page_size: usize,
}

impl<'a> CacheInputs<'a> {
    /// Takes inputs 5 to 7 and the pool, if they are all there; none if none is.
    pub fn read(
        context: &'a Context,
        pool: Option<InputTensor<'a>>,
        rows: &RowInputs<'_>,
    ) -> Result<Option<Self>, OpError> {
        let [cached_len, page_indptr, page_ids] =
            [context.optional_input(5)?, context.optional_input(6)?, context.optional_input(7)?];
        let (cached_len, page_indptr, page_ids, pool) = match (cached_len, page_indptr, page_ids, pool) {
            (None, None, None, None) => return Ok(None),
            (Some(cached_len), Some(page_indptr), Some(page_ids), Some(pool)) => {
                (cached_len, page_indptr, page_ids, pool)
            }
            _ => {
                return Err(OpError::invalid(
                    "cached_len, page_indptr, page_ids and kv_pool go together: give all four or none",
                ));
            }
        };
        for tensor in [&cached_len, &page_indptr, &page_ids] {
            tensor.shape::<1>()?;
        }
        let [pool_pages, page_size] = pool.pool_shape(rows.heads, rows.head_size)?;
        Ok(Some(Self { cached_len, page_indptr, page_ids, pool, pool_pages, page_size }))
    }

    /// The tensors themselves, but for the pool.
    pub fn tensors(&self) -> [&InputTensor<'a>; 3] {
        [&self.cached_len, &self.page_indptr, &self.page_ids]
    }

    /// For the kernels of the CPU.
    ///
    /// # Safety
    /// The tensors are in host memory, and nothing writes to them while the slices live.
    pub unsafe fn on_host(&self) -> Pages<'a> {
        let Self { pool_pages, page_size, .. } = *self;
        // SAFETY: the caller's; the elements are those of `I32`.
        let (cached_len, page_indptr, page_ids) =
            unsafe { (self.cached_len.slice(), self.page_indptr.slice(), self.page_ids.slice()) };
        Pages { cached_len, page_indptr, page_ids, pool_pages, page_size }
    }

    /// For the kernels of the GPU.
    pub fn on_device(&self, users: usize) -> Result<cuda::Cache, OpError> {
        expect_len(&self.cached_len, users, "one a user")?;
        expect_len(&self.page_indptr, users + 1, "one more than there are users")?;
        Ok(cuda::Cache {
            pool: self.pool.address(),
            cached_len: self.cached_len.address(),
            page_indptr: self.page_indptr.address(),
            page_ids: self.page_ids.address(),
            page_entries: self.page_ids.dims[0],
            pool_pages: self.pool_pages,
            page_size: self.page_size,
        })
    }
}

/// Refuses a list of numbers that is not as long as that.
pub fn expect_len(tensor: &InputTensor<'_>, len: usize, why: &str) -> Result<(), OpError> {
    let [found] = tensor.shape()?;
    if found != len {
        return Err(OpError::invalid(format!("{}: {found} numbers, expected {len}, {why}", tensor.name)));
    }
    Ok(())
}

/// Refuses a tensor of another shape.
pub fn expect_shape(tensor: &InputTensor<'_>, shape: &[usize]) -> Result<(), OpError> {
    if tensor.dims != shape {
        return Err(OpError::invalid(format!("{}: shape {:?}, expected {shape:?}", tensor.name, tensor.dims)));
    }
    Ok(())
}

/// An attribute that has to be there and at least 1.
pub fn positive(attributes: &Attributes, operator: &str, name: &CStr) -> Result<usize, OpError> {
    let found = attributes.int(name)?;
    let fits = |value: i64| usize::try_from(value).ok().filter(|value| (1..=i32::MAX as usize).contains(value));
    found.and_then(fits).ok_or_else(|| {
        let (name, found) = (name.to_string_lossy(), found.map_or("missing".into(), |value| value.to_string()));
        OpError::invalid(format!("{operator}: the attribute {name} is {found}, expected an int of at least 1"))
    })
}

/// An attribute that has to be there and one of the names that `choose` knows.
pub fn named<V>(
    attributes: &Attributes,
    operator: &str,
    name: &CStr,
    known: &str,
    choose: impl Fn(&str) -> Option<V>,
) -> Result<V, OpError> {
    let found = attributes.text(name)?;
    found.as_deref().and_then(choose).ok_or_else(|| {
        let (name, found) = (name.to_string_lossy(), found.as_deref().unwrap_or("missing"));
        OpError::invalid(format!("{operator}: the attribute {name} is {found}, expected {known}"))
    })
}

/// An attribute that is 0, which it is where it is missing, or 1.
pub fn flag(attributes: &Attributes, operator: &str, name: &CStr) -> Result<bool, OpError> {
    match attributes.int(name)?.unwrap_or(0) {
        0 => Ok(false),
        1 => Ok(true),
        other => {
            let name = name.to_string_lossy();
            Err(OpError::invalid(format!("{operator}: the attribute {name} is {other}, expected 0 or 1")))
        }
    }
}
