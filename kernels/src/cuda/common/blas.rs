//! Matrix products by cuBLASLt, which every host with ONNX Runtime's CUDA provider has.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::LazyLock;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{
    self, cublasComputeType_t as Compute, cublasLtEpilogue_t as Epilogue, cublasLtHandle_t, cublasLtMatmulAlgo_t,
    cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t as Attribute,
    cublasLtMatmulPreferenceAttributes_t as Preference, cublasLtMatrixLayout_t, cudaDataType_t as DataType,
};
use cudarc::driver::sys::{CUdeviceptr, CUstream};
use parking_lot::Mutex;

use super::element_type::Type;
use super::error::CudaError;

/// Bytes of scratch memory that cuBLASLt may use: NVIDIA's advice for Hopper.
pub const WORKSPACE: usize = 32 << 20;

/// `CUBLAS_OP_T`.
const TRANSPOSED: i32 = 1;

/// Whether the library is found. To look for it opens it anew, under a dozen names.
// SAFETY: only tries to load the library.
static IS_THERE: LazyLock<bool> = LazyLock::new(|| unsafe { sys::is_culib_present() });

/// Algorithms that are remembered. Row counts vary from call to call, so there is no bound by the model.
const MOST_KNOWN: usize = 1 << 14;

/// `y = x weightᵀ + bias + residual`: x `[rows, inner]`, weight `[width, inner]`, y and residual `[rows, width]`.
#[derive(Clone, Copy, Debug)]
pub struct BlasProduct {
    pub element: Type,
    pub rows: usize,
    pub inner: usize,
    pub width: usize,
    pub x: CUdeviceptr,
    pub weight: CUdeviceptr,
    pub bias: Option<CUdeviceptr>,
    pub residual: Option<CUdeviceptr>,
    pub y: CUdeviceptr,
    /// [`WORKSPACE`] bytes, or 0: none.
    pub workspace: CUdeviceptr,
}

/// What an algorithm is chosen by: type, sizes, what is added, alignments, whether there is a workspace.
type Key = (Type, [usize; 3], [bool; 2], [u32; 4], bool);

/// cuBLASLt on one device.
#[derive(Default)]
pub struct Blas(Mutex<Known>);

#[derive(Default)]
struct Known {
    handle: Option<Handle>,
    algorithms: HashMap<Key, cublasLtMatmulAlgo_t>,
}

/// Lives until the process ends.
#[derive(Clone, Copy)]
struct Handle(cublasLtHandle_t);

// SAFETY: any thread may use a handle of cuBLASLt, several at a time too.
unsafe impl Send for Handle {}

impl std::fmt::Debug for Blas {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Blas")
    }
}

impl Blas {
    /// Enqueues a product on a stream. The device's context is current.
    ///
    /// # Safety
    /// Addresses are of the device, of tensors as long as the call says, that live until the stream has done this; nothing else
    /// writes them meanwhile, and y is apart from the others.
    pub unsafe fn multiply(&self, call: &BlasProduct, stream: CUstream) -> Result<(), CudaError> {
        if !*IS_THERE {
            return Err(CudaError::Unsupported(
                "libcublasLt.so.13 is not found: install cuBLAS of CUDA 13, or add its folder to LD_LIBRARY_PATH"
                    .into(),
            ));
        }
        let asked = |error: CublasError| {
            let BlasProduct { element, rows, inner, width, .. } = call;
            let sizes = format!("{rows} rows of {inner} {} with a weight of {width} rows", element.name());
            CudaError::Unsupported(format!("the product of {sizes}: cuBLASLt says {:?}", error.0))
        };
        let plan = Plan::new(call).map_err(asked)?;
        let (handle, algorithm) = self.algorithm(call, &plan).map_err(asked)?;
        let (one, add) = (1.0_f32, if call.residual.is_some() { 1.0_f32 } else { 0.0 });
        // SAFETY: the caller's; scalars and descriptions live until the call has returned.
        unsafe {
            result::matmul(
                handle.0,
                plan.product,
                (&raw const one).cast(),
                (&raw const add).cast(),
                call.weight as *const c_void,
                plan.weight,
                call.x as *const c_void,
                plan.x,
                call.residual.unwrap_or(call.y) as *const c_void,
                plan.y,
                call.y as *mut c_void,
                plan.y,
                &algorithm,
                call.workspace as *mut c_void,
                workspace_bytes(call),
                stream.cast(),
            )
        }
        .map_err(asked)
    }

    fn algorithm(&self, call: &BlasProduct, plan: &Plan) -> Result<(Handle, cublasLtMatmulAlgo_t), CublasError> {
        let mut known = self.0.lock();
        let handle = match known.handle {
            Some(handle) => handle,
            None => *known.handle.insert(Handle(result::create_handle()?)),
        };
        let alignments = alignments(call);
        let added = [call.bias.is_some(), call.residual.is_some()];
        let key = (call.element, [call.rows, call.inner, call.width], added, alignments, call.workspace != 0);
        if let Some(algorithm) = known.algorithms.get(&key) {
            return Ok((handle, *algorithm));
        }
        let algorithm = plan.algorithm(handle, alignments, workspace_bytes(call))?;
        if known.algorithms.len() == MOST_KNOWN {
            known.algorithms.clear();
        }
        known.algorithms.insert(key, algorithm);
        Ok((handle, algorithm))
    }
}

fn workspace_bytes(call: &BlasProduct) -> usize {
    if call.workspace == 0 { 0 } else { WORKSPACE }
}

/// Of the weight, x, what is added, and y with the bias: the largest power of two, up to what cuBLASLt asks about. It does not ask
/// about the bias, which it reads as it writes y.
fn alignments(call: &BlasProduct) -> [u32; 4] {
    let of = |address: CUdeviceptr| 1 << address.trailing_zeros().min(8);
    [of(call.weight), of(call.x), of(call.residual.unwrap_or(call.y)), of(call.y | call.bias.unwrap_or(0))]
}

/// The descriptions of a call. cuBLAS counts by columns: its matrices are ours transposed.
struct Plan {
    product: cublasLtMatmulDesc_t,
    weight: cublasLtMatrixLayout_t,
    x: cublasLtMatrixLayout_t,
    y: cublasLtMatrixLayout_t,
}

impl Plan {
    fn new(call: &BlasProduct) -> Result<Self, CublasError> {
        let kind = match call.element {
            Type::F32 => DataType::CUDA_R_32F,
            Type::F16 => DataType::CUDA_R_16F,
            Type::Bf16 => DataType::CUDA_R_16BF,
        };
        let [rows, inner, width] = [call.rows, call.inner, call.width].map(|size| size as u64);
        let mut plan = Self { product: null_mut(), weight: null_mut(), x: null_mut(), y: null_mut() };
        plan.product = result::create_matmul_desc(Compute::CUBLAS_COMPUTE_32F, DataType::CUDA_R_32F)?;
        plan.weight = result::create_matrix_layout(kind, inner, width, inner as i64)?;
        plan.x = result::create_matrix_layout(kind, inner, rows, inner as i64)?;
        plan.y = result::create_matrix_layout(kind, width, rows, width as i64)?;
        plan.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, TRANSPOSED)?;
        if let Some(bias) = call.bias {
            plan.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, Epilogue::CUBLASLT_EPILOGUE_BIAS)?;
            plan.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias)?;
        }
        Ok(plan)
    }

    fn set<V>(&self, attribute: Attribute, value: V) -> Result<(), CublasError> {
        // SAFETY: the description lives; the value is of the type that the attribute has.
        unsafe { result::set_matmul_desc_attribute(self.product, attribute, (&raw const value).cast(), size_of::<V>()) }
    }

    fn algorithm(
        &self,
        handle: Handle,
        alignments: [u32; 4],
        workspace: usize,
    ) -> Result<cublasLtMatmulAlgo_t, CublasError> {
        let preference = result::create_matmul_pref()?;
        let names = [
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ];
        // SAFETY: what is described lives; a size is a size_t, an alignment a uint32_t; the preference is destroyed once.
        unsafe {
            let most = Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            let mut set =
                result::set_matmul_pref_attribute(preference, most, (&raw const workspace).cast(), size_of::<usize>());
            for (name, alignment) in names.into_iter().zip(&alignments) {
                let value = (&raw const *alignment).cast();
                set = set.and_then(|()| result::set_matmul_pref_attribute(preference, name, value, size_of::<u32>()));
            }
            let found = set.and_then(|()| {
                let Self { product, weight, x, y } = *self;
                result::get_matmul_algo_heuristic(handle.0, product, weight, x, y, y, preference)
            });
            let _ = result::destroy_matmul_pref(preference);
            found.map(|found| found.algo)
        }
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: made by `new`, which left null what it did not reach; destroyed once. Failing to leaks some bytes.
        unsafe {
            for layout in [self.weight, self.x, self.y] {
                if !layout.is_null() {
                    let _ = result::destroy_matrix_layout(layout);
                }
            }
            if !self.product.is_null() {
                let _ = result::destroy_matmul_desc(self.product);
            }
        }
    }
}
