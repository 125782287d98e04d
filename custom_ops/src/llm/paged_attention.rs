//! `ai.pagoda.PagedAttention`: softmax attention over the paged KV cache, with the append of the new tokens.

use std::marker::PhantomData;
use std::mem::MaybeUninit;

use pagoda_kernels::cpu;
use pagoda_kernels::{HeadSlots, KvFormat, KvPool, Pages, Pairs, Rotation, f16};

use crate::ort::{
    F32, I32, Input, InputTensor, KernelContext, KernelInfo, OnnxElement, OpError, Operator, Output, OutputTensor,
    Shape, ShapeInferContext, U8,
};

/// The attention over a pool of numbers of the type of the keys.
pub struct PagedAttention<T> {
    attributes: Attributes,
    element: PhantomData<T>,
}

/// The attention over a pool of codes, with the scales beside it.
pub struct QuantisedPagedAttention<T> {
    attributes: Attributes,
    element: PhantomData<T>,
}

/// The inputs by number.
mod input {
    pub const POOL: usize = 7;
    pub const SCALES: usize = 8;
    pub const POSITIONS: usize = 9;
    pub const COS: usize = 10;
    pub const SIN: usize = 11;
    pub const SINKS: usize = 12;
    pub const WRITE_SLOTS: usize = 13;
    pub const TOKEN_POS: usize = 14;
    pub const SLOPES: usize = 15;
}

/// The inputs of both forms, which differ in the pool's type alone: ONNX Runtime takes kernels of one name only if they agree in
/// what is optional.
macro_rules! inputs {
    ($pool:expr) => {
        &[
            Input::required("query", T::ONNX),
            Input::required("key", T::ONNX),
            Input::required("value", T::ONNX),
            Input::required("row_offsets", I32),
            Input::required("cached_len", I32),
            Input::required("page_indptr", I32),
            Input::required("page_ids", I32),
            Input::required("kv_pool", $pool),
            Input::optional("kv_scales", <f16 as OnnxElement>::ONNX),
            Input::optional("positions", I32),
            Input::optional("cos", F32),
            Input::optional("sin", F32),
            Input::optional("sinks", T::ONNX),
            Input::optional("write_slots", I32),
            Input::optional("token_pos", I32),
            Input::optional("slopes", F32),
        ]
    };
}

impl<T: OnnxElement> Operator for PagedAttention<T> {
    const INPUTS: &'static [Input] = inputs!(T::ONNX);
    const OUTPUTS: &'static [Output] = &[
        Output::required("output", T::ONNX),
        Output::required("kv_pool_out", T::ONNX),
        Output::optional("kv_scales_out", <f16 as OnnxElement>::ONNX),
        Output::optional("key_weights", F32),
    ];

    fn infer_shapes(node: &ShapeInferContext) -> Result<Vec<Option<Shape>>, OpError> {
        Ok(vec![node.input(0)?, node.input(input::POOL)?])
    }

    fn new(info: &KernelInfo) -> Result<Self, OpError> {
        let attributes = Attributes::read(info)?;
        if attributes.format != KvFormat::Native {
            return Err(OpError::invalid("kv_format: a quantised format takes a kv_pool of uint8, and kv_scales"));
        }
        Ok(Self { attributes, element: PhantomData })
    }

    fn compute(&self, context: &KernelContext) -> Result<(), OpError> {
        let inputs = Inputs::read(context, self.attributes.format)?;
        let outputs = Outputs::new(&inputs, context, self.attributes.weights_len)?;
        // SAFETY: tensors of the CPU provider are in host memory and have the element types of `INPUTS`. Nothing writes to an
        // input of a running node, except that this call may write the pool, of which `call` holds no slice. The outputs are
        // disjoint from everything else. f32, f16 and bf16 have no invalid bit patterns.
        unsafe {
            let call = self.attributes.call::<T>(&inputs);
            call.check(&KvPool::Native(outputs.pool.slice_mut::<T>()), outputs.weights_len())?;
            outputs.copy_pool::<T>(&inputs, context);
            outputs.run(&call, &mut KvPool::Native(outputs.pool.slice_mut()), context)
        }
    }
}

impl<T: OnnxElement> Operator for QuantisedPagedAttention<T> {
    const INPUTS: &'static [Input] = inputs!(U8);
    const OUTPUTS: &'static [Output] = &[
        Output::required("output", T::ONNX),
        Output::required("kv_pool_out", U8),
        Output::optional("kv_scales_out", <f16 as OnnxElement>::ONNX),
        Output::optional("key_weights", F32),
    ];

    fn infer_shapes(node: &ShapeInferContext) -> Result<Vec<Option<Shape>>, OpError> {
        Ok(vec![node.input(0)?, node.input(input::POOL)?, node.input(input::SCALES)?])
    }

    fn new(info: &KernelInfo) -> Result<Self, OpError> {
        let attributes = Attributes::read(info)?;
        if attributes.format == KvFormat::Native {
            return Err(OpError::invalid("kv_format: a kv_pool of uint8 takes one of int8, int4 and fp8, not native"));
        }
        if !info.has_input(input::SCALES)? || !info.has_output(2)? {
            return Err(OpError::invalid("kv_scales: a quantised pool takes this input, and the output kv_scales_out"));
        }
        Ok(Self { attributes, element: PhantomData })
    }

    fn compute(&self, context: &KernelContext) -> Result<(), OpError> {
        let inputs = Inputs::read(context, self.attributes.format)?;
        let outputs = Outputs::new(&inputs, context, self.attributes.weights_len)?;
        // SAFETY: as above; u8 has no invalid bit patterns either.
        unsafe {
            let call = self.attributes.call::<T>(&inputs);
            let pool = || KvPool::Quantised {
                codes: outputs.pool.slice_mut(),
                scales: outputs.scales.as_ref().map_or(&mut [], |scales| scales.slice_mut()),
            };
            call.check(&pool(), outputs.weights_len())?;
            outputs.copy_pool::<u8>(&inputs, context);
            outputs.run(&call, &mut pool(), context)
        }
    }
}

/// The attributes of a node.
struct Attributes {
    scale: f32,
    window: i64,
    softcap: f32,
    pairs: Option<Pairs>,
    format: KvFormat,
    weights_len: Option<usize>,
}

impl Attributes {
    fn read(info: &KernelInfo) -> Result<Self, OpError> {
        let pairs = match info.string(c"rotary")?.as_deref() {
            None | Some("none") => None,
            Some("half") => Some(Pairs::Half),
            Some("interleaved") => Some(Pairs::Interleaved),
            Some(other) => {
                let message = format!("rotary: this attribute is {other:?}, expected none, half or interleaved");
                return Err(OpError::invalid(message));
            }
        };
        let format = match info.string(c"kv_format")? {
            None => KvFormat::Native,
            Some(name) => KvFormat::named(&name).ok_or_else(|| {
                let message = format!("kv_format: this attribute is {name:?}, expected native, int8, int4 or fp8");
                OpError::invalid(message)
            })?,
        };
        for index in [input::COS, input::SIN] {
            if info.has_input(index)? != pairs.is_some() {
                let message =
                    "rotary: a rotation takes the inputs positions, cos and sin; without one leave cos and sin out";
                return Err(OpError::invalid(message));
            }
        }
        if info.has_input(input::WRITE_SLOTS)? != info.has_input(input::TOKEN_POS)? {
            return Err(OpError::invalid("write_slots and token_pos go together: give both or neither"));
        }
        let weights_len =
            match info.int(c"weights_len")? {
                None | Some(0) => None,
                Some(len) => Some(usize::try_from(len).map_err(|_| {
                    OpError::invalid(format!("weights_len: this attribute is {len}, expected 0 or more"))
                })?),
            };
        Ok(Self {
            scale: info.float(c"scale")?.unwrap_or(0.0),
            window: info.int(c"window")?.unwrap_or(0),
            softcap: info.float(c"softcap")?.unwrap_or(0.0),
            pairs,
            format,
            weights_len,
        })
    }
}

impl Attributes {
    /// The call, for the CPU kernels. It holds no slice of the pool.
    ///
    /// # Safety
    /// The tensors are in host memory and have the element types of the operator's inputs. Nothing writes to them while the
    /// call lives, except to the pool.
    unsafe fn call<'a, T: OnnxElement>(&self, inputs: &'a Inputs<'a>) -> pagoda_kernels::PagedAttention<'a, T> {
        let Inputs { pages, page_size, .. } = *inputs;
        // SAFETY: by contract.
        unsafe {
            pagoda_kernels::PagedAttention {
                row_offsets: inputs.row_offsets.slice(),
                total_rows: inputs.query.dims[0],
                query_heads: inputs.query.dims[1],
                kv_heads: inputs.key.dims[1],
                head_size: inputs.query.dims[2],
                query: inputs.query.slice(),
                key: inputs.key.slice(),
                value: inputs.value.slice(),
                pages: Pages {
                    cached_len: inputs.cached_len.slice(),
                    page_indptr: inputs.page_indptr.slice(),
                    page_ids: inputs.page_ids.slice(),
                    pool_pages: pages,
                    page_size,
                },
                format: self.format,
                positions: inputs.positions.as_ref().map(|tensor| tensor.slice()),
                rotation: inputs.rotation.as_ref().zip(self.pairs).map(|((cos, sin), pairs)| Rotation {
                    cos: cos.slice(),
                    sin: sin.slice(),
                    half_width: cos.dims[1],
                    pairs,
                }),
                sinks: inputs.sinks.as_ref().map(|tensor| tensor.slice()),
                slopes: inputs.slopes.as_ref().map(|tensor| tensor.slice()),
                slots: inputs.slots.as_ref().map(|(write_slots, token_pos)| HeadSlots {
                    write_slots: write_slots.slice(),
                    token_pos: token_pos.slice(),
                    len: token_pos.dims[2],
                }),
                scale: self.scale,
                window: self.window,
                softcap: self.softcap,
            }
        }
    }
}

/// The inputs of a call, with consistent shapes.
struct Inputs<'a> {
    query: InputTensor<'a>,
    key: InputTensor<'a>,
    value: InputTensor<'a>,
    row_offsets: InputTensor<'a>,
    cached_len: InputTensor<'a>,
    page_indptr: InputTensor<'a>,
    page_ids: InputTensor<'a>,
    pool: InputTensor<'a>,
    pages: usize,
    page_size: usize,
    scales: Option<InputTensor<'a>>,
    positions: Option<InputTensor<'a>>,
    rotation: Option<(InputTensor<'a>, InputTensor<'a>)>,
    sinks: Option<InputTensor<'a>>,
    slopes: Option<InputTensor<'a>>,
    slots: Option<(InputTensor<'a>, InputTensor<'a>)>,
}

impl<'a> Inputs<'a> {
    fn read(context: &'a KernelContext, format: KvFormat) -> Result<Self, OpError> {
        let [query, key, value] = [context.input(0)?, context.input(1)?, context.input(2)?];
        let ([rows, _, size], [_, kv_heads, _]) = (query.shape::<3>()?, key.shape::<3>()?);
        key.expect_shape(&[rows, kv_heads, size])?;
        value.expect_shape(&[rows, kv_heads, size])?;
        let [row_offsets, cached_len, page_indptr, page_ids] =
            [context.input(3)?, context.input(4)?, context.input(5)?, context.input(6)?];
        for tensor in [&row_offsets, &cached_len, &page_indptr, &page_ids] {
            tensor.shape::<1>()?;
        }
        let pool = context.input(input::POOL)?;
        let [pages, _, page_size, _, _] = pool.shape::<5>()?;
        pool.expect_shape(&[pages, 2, page_size, kv_heads, format.pool_width(size)])?;
        let scales = context.optional_input(input::SCALES)?.filter(|_| format != KvFormat::Native);
        if let Some(scales) = &scales {
            scales.expect_shape(&[pages, 2, page_size, kv_heads, format.scales_width()])?;
        }
        let lists = [input::POSITIONS, input::SINKS, input::SLOPES].map(|index| context.optional_input(index));
        let [positions, sinks, slopes] = lists;
        let (positions, sinks, slopes) = (positions?, sinks?, slopes?);
        for tensor in [&positions, &sinks, &slopes].into_iter().flatten() {
            tensor.shape::<1>()?;
        }
        let rotation = context.optional_input(input::COS)?.zip(context.optional_input(input::SIN)?);
        if let Some((cos, sin)) = &rotation {
            cos.shape::<2>()?;
            sin.expect_shape(&cos.dims)?;
        }
        let slots = context.optional_input(input::WRITE_SLOTS)?.zip(context.optional_input(input::TOKEN_POS)?);
        if let Some((write_slots, token_pos)) = &slots {
            write_slots.expect_shape(&[rows, kv_heads])?;
            let [_, _, len] = token_pos.shape::<3>()?;
            token_pos.expect_shape(&[cached_len.dims[0], kv_heads, len])?;
        }
        Ok(Self {
            query,
            key,
            value,
            row_offsets,
            cached_len,
            page_indptr,
            page_ids,
            pool,
            pages,
            page_size,
            scales,
            positions,
            rotation,
            sinks,
            slopes,
            slots,
        })
    }

    /// Every input but the pool and its scales.
    fn tensors(&self) -> impl Iterator<Item = &InputTensor<'a>> {
        let required = [
            &self.query,
            &self.key,
            &self.value,
            &self.row_offsets,
            &self.cached_len,
            &self.page_indptr,
            &self.page_ids,
        ];
        let optional = [&self.positions, &self.sinks, &self.slopes].into_iter().flatten();
        let pairs = [&self.rotation, &self.slots].into_iter().flatten().flat_map(|(a, b)| [a, b]);
        required.into_iter().chain(optional).chain(pairs)
    }
}

/// The outputs of a call. The pool and the scales are the input itself, or disjoint from it; all are disjoint from everything
/// else.
struct Outputs {
    output: OutputTensor,
    pool: OutputTensor,
    scales: Option<OutputTensor>,
    key_weights: Option<(OutputTensor, usize)>,
}

impl Outputs {
    fn new(inputs: &Inputs<'_>, context: &KernelContext, weights_len: Option<usize>) -> Result<Self, OpError> {
        let output = context.output(0, &inputs.query.dims)?;
        let pool = context.output(1, &inputs.pool.dims)?;
        let scales = inputs.scales.as_ref().map(|scales| context.output(2, &scales.dims)).transpose()?;
        let len = inputs.slots.as_ref().map(|(_, token_pos)| token_pos.dims[2]).or(weights_len);
        let dims = [inputs.cached_len.dims[0], inputs.key.dims[1], len.unwrap_or(0)];
        let key_weights = context.optional_output(3, &dims)?;
        if key_weights.is_some() && len.is_none() {
            return Err(OpError::invalid("key_weights: this output takes token_pos, or the attribute weights_len"));
        }
        let written: Vec<&OutputTensor> =
            [Some(&output), Some(&pool), scales.as_ref(), key_weights.as_ref()].into_iter().flatten().collect();
        for (index, tensor) in written.iter().enumerate() {
            tensor.check_disjoint(inputs.tensors())?;
            for other in &written[index + 1..] {
                tensor.check_disjoint_output(other)?;
            }
            for stored in [Some(&inputs.pool), inputs.scales.as_ref()].into_iter().flatten() {
                // In place: the very same memory.
                let own = [(&pool, Some(&inputs.pool)), (scales.as_ref().unwrap_or(&pool), inputs.scales.as_ref())];
                let in_place = own.iter().any(|(out, from)| {
                    std::ptr::eq(*out, *tensor)
                        && from.is_some_and(|from| std::ptr::eq(from, stored) && std::ptr::eq(from.data, out.data))
                });
                if !in_place {
                    tensor.check_disjoint([stored])?;
                }
            }
        }
        let key_weights = key_weights.zip(len);
        Ok(Self { output, pool, scales, key_weights })
    }

    fn weights_len(&self) -> Option<usize> {
        self.key_weights.as_ref().map(|(_, len)| *len)
    }

    /// Copies the pool and its scales to the outputs, unless they are the same memory.
    ///
    /// # Safety
    /// The tensors are in host memory; the pool has elements of `P`. Nothing else reads or writes the outputs.
    unsafe fn copy_pool<P: Copy + Send + Sync>(&self, inputs: &Inputs<'_>, context: &KernelContext) {
        // SAFETY: by contract; input and output have the same length and are disjoint.
        unsafe {
            if !std::ptr::eq(inputs.pool.data, self.pool.data) {
                cpu::copy(inputs.pool.slice::<P>(), self.pool.slice_mut::<MaybeUninit<P>>(), context);
            }
            if let (Some(from), Some(to)) = (&inputs.scales, &self.scales)
                && !std::ptr::eq(from.data, to.data)
            {
                cpu::copy(from.slice::<f16>(), to.slice_mut::<MaybeUninit<f16>>(), context);
            }
        }
    }

    /// Runs the call on the pool of the outputs.
    ///
    /// # Safety
    /// The outputs are in host memory and have the element types of the operator. Nothing else reads or writes them.
    unsafe fn run<T: OnnxElement>(
        &self,
        call: &pagoda_kernels::PagedAttention<'_, T>,
        pool: &mut KvPool<'_, T>,
        context: &KernelContext,
    ) -> Result<(), OpError> {
        // SAFETY: by contract.
        let (output, weights) = unsafe {
            let weights = self.key_weights.as_ref().map(|(weights, len)| (weights.slice_mut::<f32>(), *len));
            (self.output.slice_mut::<T>(), weights)
        };
        Ok(call.run(pool, output, weights, context)?)
    }
}
