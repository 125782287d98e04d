//! The attributes of a node, and the call that they make of its tensors, on either provider.

use pagoda_kernels::cuda;
use pagoda_kernels::{HeadSlots, KvFormat, KvPool, Pages, Pairs, Rotation};

use super::tensors::{Inputs, Outputs, input};
use crate::ort::{InputTensor, KernelInfo, OnnxElement, OpError};
use crate::side_channel::{is_settled, rows_each};

/// The attributes of a node.
pub(super) struct Attributes {
    pub(super) scale: f32,
    pub(super) window: i64,
    pub(super) softcap: f32,
    pub(super) pairs: Option<Pairs>,
    pub(super) format: KvFormat,
    pub(super) weights_len: Option<usize>,
}

impl Attributes {
    /// Reads and checks them.
    pub(super) fn read(info: &KernelInfo) -> Result<Self, OpError> {
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
        let attributes = Self {
            scale: info.float(c"scale")?.unwrap_or(0.0),
            window: info.int(c"window")?.unwrap_or(0),
            softcap: info.float(c"softcap")?.unwrap_or(0.0),
            pairs,
            format,
            weights_len,
        };
        attributes.check()?;
        Ok(attributes)
    }

    /// An empty batch checks the attributes alone, so that an invalid one fails when the model is opened.
    fn check(&self) -> Result<(), OpError> {
        let (cached_len, page_ids): (&[i32], &[i32]) = (&[], &[]);
        let empty = pagoda_kernels::PagedAttention::<f32> {
            row_offsets: &[0],
            total_rows: 0,
            query_heads: 1,
            kv_heads: 1,
            head_size: 2,
            query: &[],
            key: &[],
            value: &[],
            pages: Pages { cached_len, page_indptr: &[0], page_ids, pool_pages: 0, page_size: 8 },
            format: KvFormat::Native,
            positions: None,
            rotation: None,
            sinks: None,
            slopes: None,
            slots: None,
            scale: self.scale,
            window: self.window,
            softcap: self.softcap,
        };
        Ok(empty.check(&KvPool::Native(&mut []), None)?)
    }

    /// The call, for the CPU kernels. It holds no slice of the pool.
    ///
    /// # Safety
    /// The tensors are in host memory and have the element types of the operator's inputs. Nothing writes to them while the
    /// call lives, except to the pool.
    pub(super) unsafe fn call<'a, T: OnnxElement>(
        &self,
        inputs: &'a Inputs<'a>,
    ) -> pagoda_kernels::PagedAttention<'a, T> {
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

    /// The call, for the CUDA kernels, without the memory that key weights take. Index tensors are on the device, so only their
    /// lengths are checked.
    pub(super) fn call_on_device<T: OnnxElement>(
        &self,
        inputs: &Inputs<'_>,
        outputs: &Outputs,
    ) -> Result<cuda::PagedAttention, OpError> {
        let sequences = inputs.cached_len.dims[0];
        let ([total_rows, query_heads, head_size], kv_heads) = (inputs.query.shape()?, inputs.key.dims[1]);
        inputs.row_offsets.expect_len(sequences + 1, "one more than sequences")?;
        inputs.page_indptr.expect_len(sequences + 1, "one more than sequences")?;
        if let Some(positions) = &inputs.positions {
            positions.expect_len(total_rows, "one a row")?;
        }
        for tensor in [&inputs.sinks, &inputs.slopes].into_iter().flatten() {
            tensor.expect_len(query_heads, "one a query head")?;
        }
        let address = |tensor: &Option<InputTensor<'_>>| tensor.as_ref().map(InputTensor::address);
        Ok(cuda::PagedAttention {
            element: cuda::Type::of::<T>(),
            sequences,
            total_rows,
            query_heads,
            kv_heads,
            head_size,
            query: inputs.query.address(),
            key: inputs.key.address(),
            value: inputs.value.address(),
            output: outputs.output.address(),
            row_offsets: inputs.row_offsets.address(),
            cached_len: inputs.cached_len.address(),
            page_indptr: inputs.page_indptr.address(),
            page_ids: inputs.page_ids.address(),
            page_entries: inputs.page_ids.dims[0],
            pool: outputs.pool.address(),
            scales: outputs.scales.as_ref().map(|scales| scales.address()),
            format: self.format,
            pool_pages: inputs.pages,
            page_size: inputs.page_size,
            positions: address(&inputs.positions),
            rotation: inputs.rotation.as_ref().zip(self.pairs).map(|((cos, sin), pairs)| cuda::Rotation {
                cos: cos.address(),
                sin: sin.address(),
                rows: cos.dims[0],
                half_width: cos.dims[1],
                pairs,
            }),
            sinks: address(&inputs.sinks),
            slopes: address(&inputs.slopes),
            slots: inputs.slots.as_ref().map(|(write_slots, token_pos)| cuda::HeadSlots {
                write_slots: write_slots.address(),
                token_pos: token_pos.address(),
                len: token_pos.dims[2],
            }),
            key_weights: None,
            kv_norms: outputs.kv_norms.as_ref().map(|norms| norms.address()),
            scale: self.scale,
            window: self.window,
            softcap: self.softcap,
            settled: [&inputs.row_offsets, &inputs.cached_len, &inputs.page_indptr, &inputs.page_ids]
                .into_iter()
                .chain(inputs.slots.iter().flat_map(|(write_slots, token_pos)| [write_slots, token_pos]))
                .all(|tensor| is_settled(tensor.address())),
            rows_each: rows_each(),
            scratch: None,
        })
    }
}
