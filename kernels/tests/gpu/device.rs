//! A call of either operator with its tensors on the GPU.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use pagoda_kernels::cpu::OperatorElement;
use pagoda_kernels::cuda::{Append, Attention, CUdeviceptr, Cache, Gpu, Path, Rows, Scratch, Type};
use pagoda_kernels::{bf16, f16};

use crate::common::Case;

/// What outputs hold beforehand: NaN in every type, and not one that arithmetic gives.
const POISON: u8 = 0xff;

/// The bytes of elements.
pub fn bytes<T: Copy>(values: &[T]) -> &[u8] {
    // SAFETY: numbers without padding, seen as bytes.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// Elements out of their bytes.
pub fn elements<T: OperatorElement>(bytes: &[u8]) -> Vec<T> {
    let short = |b: &[u8]| u16::from_le_bytes([b[0], b[1]]);
    match T::NAME {
        "f32" => bytes.chunks_exact(4).map(|b| T::from_f32(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))).collect(),
        "f16" => bytes.chunks_exact(2).map(|b| T::from_f32(f16::from_bits(short(b)).to_f32())).collect(),
        _ => bytes.chunks_exact(2).map(|b| T::from_f32(bf16::from_bits(short(b)).to_f32())).collect(),
    }
}

/// A tensor on the device. The driver takes no empty one, so there is always a byte.
pub struct Tensor {
    memory: CudaSlice<u8>,
    pub address: CUdeviceptr,
    len: usize,
}

impl Tensor {
    pub fn new(stream: &Arc<CudaStream>, content: &[u8]) -> Self {
        let memory = stream.clone_htod(if content.is_empty() { &[0_u8][..] } else { content }).unwrap();
        let address = memory.device_ptr(stream).0;
        Self { memory, address, len: content.len() }
    }

    pub fn read(&self, stream: &Arc<CudaStream>) -> Vec<u8> {
        let mut content = stream.clone_dtoh(&self.memory).unwrap();
        content.truncate(self.len);
        content
    }
}

/// Every tensor of a case.
pub struct OnDevice<'a, T> {
    pub case: &'a Case<T>,
    stream: Arc<CudaStream>,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pool: Tensor,
    /// row_offsets, num_candidates, cached_len, page_indptr, page_ids, num_contextual.
    indices: [Tensor; 6],
}

impl<'a, T: OperatorElement> OnDevice<'a, T> {
    pub fn new(case: &'a Case<T>, stream: &Arc<CudaStream>) -> Self {
        let tensor = |values: &[T]| Tensor::new(stream, bytes(values));
        let none = vec![];
        let contextual = case.num_contextual.as_ref().unwrap_or(&none);
        let indices =
            [&case.row_offsets, &case.num_candidates, &case.cached_len, &case.page_indptr, &case.page_ids, contextual];
        Self {
            case,
            stream: stream.clone(),
            query: tensor(&case.query),
            key: tensor(&case.key),
            value: tensor(&case.value),
            pool: tensor(&case.pool),
            indices: indices.map(|values| Tensor::new(stream, bytes(values))),
        }
    }

    fn rows(&self) -> Rows {
        let rows = self.case.rows();
        Rows {
            row_offsets: self.indices[0].address,
            num_candidates: self.indices[1].address,
            users: rows.num_candidates.len(),
            total_rows: rows.total_rows,
            heads: rows.heads,
            head_size: rows.head_size,
        }
    }

    pub fn cache(&self) -> Cache {
        Cache {
            pool: self.pool.address,
            cached_len: self.indices[2].address,
            page_indptr: self.indices[3].address,
            page_ids: self.indices[4].address,
            page_entries: self.case.page_ids.len(),
            pool_pages: self.case.pool_pages,
            page_size: self.case.page_size,
        }
    }

    pub fn attention(&self, output: CUdeviceptr) -> Attention {
        Attention {
            element: Type::of::<T>(),
            rows: self.rows(),
            query: self.query.address,
            key: self.key.address,
            value: self.value.address,
            output,
            cache: Some(self.cache()),
            append: false,
            num_contextual: self.case.num_contextual.as_ref().map(|_| self.indices[5].address),
            alpha: self.case.alpha,
            scaling_seqlen: self.case.scaling_seqlen,
            target_group_size: self.case.target_group_size,
            max_attn_len: self.case.max_attn_len,
            candidates_only: self.case.candidates_only,
            settled_indices: false,
        }
    }

    pub fn append(&self) -> Append {
        let (key, value) = (self.key.address, self.value.address);
        Append { element: Type::of::<T>(), rows: self.rows(), key, value, cache: self.cache() }
    }

    pub fn paths(&self, gpu: &Gpu) -> Vec<Path> {
        gpu.paths(&self.attention(0))
    }

    /// The attention's output, written over poison.
    pub fn output(&self, gpu: &Gpu, path: Path) -> Vec<T> {
        self.output_of(gpu, path, self.attention(0), None)
    }

    /// As `output`, of a call that is like this one's; of one that appends with the pool that it appends to.
    pub fn output_of(&self, gpu: &Gpu, path: Path, call: Attention, pool: Option<&Tensor>) -> Vec<T> {
        let output = Tensor::new(&self.stream, &vec![POISON; size_of_val(&self.case.query[..])]);
        let call = Attention { output: output.address, ..call };
        // SAFETY: every tensor is as long as its shape says; the stream is waited for below.
        unsafe { gpu.attention_by(path, &call, self.stream.cu_stream()) }.unwrap();
        let bytes = output.read(&self.stream);
        if path == Path::Hopper {
            self.same_with_scratch(gpu, call, &bytes, pool.map(|pool| pool.read(&self.stream)));
        }
        elements(&bytes)
    }

    /// The output and the pool of a call that appends too, on a pool of its own.
    pub fn output_and_pool(&self, gpu: &Gpu, path: Path) -> (Vec<T>, Vec<T>) {
        let pool = Tensor::new(&self.stream, bytes(&self.case.pool));
        let cache = Some(Cache { pool: pool.address, ..self.cache() });
        let output = self.output_of(gpu, path, Attention { cache, append: true, ..self.attention(0) }, Some(&pool));
        (output, elements(&pool.read(&self.stream)))
    }

    /// With memory to work in, the output is the same to the bit, and nothing around that memory is touched.
    fn same_with_scratch(&self, gpu: &Gpu, call: Attention, expected: &[u8], given_pool: Option<Vec<u8>>) {
        const AROUND: usize = 1 << 12;
        let most = gpu.most_scratch_bytes(&call).unwrap();
        assert!(gpu.scratch_bytes(&call).unwrap() <= most);
        if most == 0 {
            return;
        }
        let scratch = Tensor::new(&self.stream, &vec![POISON; most + 2 * AROUND]);
        let output = Tensor::new(&self.stream, &vec![POISON; expected.len()]);
        // A pool of its own again: the one that was given has the rows that this call is to append.
        let pool = Tensor::new(&self.stream, bytes(&self.case.pool));
        let cache = if call.append { Some(Cache { pool: pool.address, ..self.cache() }) } else { call.cache };
        let call = Attention { output: output.address, cache, ..call };
        let given = Scratch { address: scratch.address + AROUND as CUdeviceptr, bytes: most };
        // SAFETY: as in `output_of`; the scratch memory is this call's own.
        unsafe { gpu.attention_in(&call, given, self.stream.cu_stream()) }.unwrap();
        assert!(output.read(&self.stream) == expected, "scratch changes the output");
        if let Some(before) = given_pool {
            assert!(pool.read(&self.stream) == before, "scratch changes the pool");
        }
        let after = scratch.read(&self.stream);
        let untouched = after[..AROUND].iter().chain(&after[AROUND + most..]).all(|byte| *byte == POISON);
        assert!(untouched, "around the scratch memory");
    }

    /// The pool after the append.
    pub fn appended(&self, gpu: &Gpu) -> Vec<T> {
        // SAFETY: as above.
        unsafe { gpu.append(&self.append(), self.stream.cu_stream()) }.unwrap();
        elements(&self.pool.read(&self.stream))
    }
}
