//! Calls of `PagedAttention` that own their tensors, and the cases of `tests/data/golden/llm`, made by a program written apart
//! from the kernels.

#![allow(dead_code, reason = "each test file uses a part")]

pub mod random;

use pagoda_kernels::cpu::OperatorElement;
use pagoda_kernels::{HeadSlots, InputError, KvFormat, KvPool, PagedAttention, Pages, Pairs, Rotation, f16};
use safetensors::SafeTensors;

macro_rules! file {
    ($name:literal) => {
        ($name, include_bytes!(concat!("../../../tests/data/golden/llm/attention-", $name, ".safetensors")))
    };
}

/// Inside the program, which may run where the folder is not.
pub const FILES: [(&str, &[u8]); 10] = [
    file!("bf16-mqa-d128"),
    file!("f16-mha"),
    file!("f32-gqa"),
    file!("f32-rotary-half"),
    file!("f32-rotary-interleaved-partial"),
    file!("f32-softcap-sinks"),
    file!("f32-window"),
    file!("fp8-f16"),
    file!("int4"),
    file!("int8-rotary"),
];

/// A pool that owns its memory.
#[derive(Clone, Debug)]
pub enum Pool<T> {
    Native(Vec<T>),
    Quantised(Vec<u8>, Vec<f16>),
}

impl<T: OperatorElement> Pool<T> {
    /// Numbers that are equal where two pools are the same to the bit.
    pub fn bits(&self) -> Vec<u32> {
        match self {
            Self::Native(pool) => pool.iter().map(|number| number.to_f32().to_bits()).collect(),
            Self::Quantised(codes, scales) => {
                codes.iter().map(|&code| code.into()).chain(scales.iter().map(|scale| scale.to_bits().into())).collect()
            }
        }
    }

    pub fn borrow(&mut self) -> KvPool<'_, T> {
        match self {
            Self::Native(pool) => KvPool::Native(pool),
            Self::Quantised(codes, scales) => KvPool::Quantised { codes, scales },
        }
    }
}

/// A call that owns its tensors.
#[derive(Clone)]
pub struct Case<T> {
    pub row_offsets: Vec<i32>,
    pub query_heads: usize,
    pub kv_heads: usize,
    pub head_size: usize,
    pub query: Vec<T>,
    pub key: Vec<T>,
    pub value: Vec<T>,
    pub cached_len: Vec<i32>,
    pub page_indptr: Vec<i32>,
    pub page_ids: Vec<i32>,
    pub pool_pages: usize,
    pub page_size: usize,
    pub format: KvFormat,
    pub pool: Pool<T>,
    pub positions: Option<Vec<i32>>,
    pub rotation: Option<(Vec<f32>, Vec<f32>, usize, Pairs)>,
    pub sinks: Option<Vec<T>>,
    pub slopes: Option<Vec<f32>>,
    pub slots: Option<(Vec<i32>, Vec<i32>, usize)>,
    pub scale: f32,
    pub window: i64,
    pub softcap: f32,
}

impl<T: OperatorElement> Case<T> {
    pub fn total_rows(&self) -> usize {
        *self.row_offsets.last().unwrap() as usize
    }

    pub fn call(&self) -> PagedAttention<'_, T> {
        PagedAttention {
            row_offsets: &self.row_offsets,
            total_rows: self.total_rows(),
            query_heads: self.query_heads,
            kv_heads: self.kv_heads,
            head_size: self.head_size,
            query: &self.query,
            key: &self.key,
            value: &self.value,
            pages: Pages {
                cached_len: &self.cached_len,
                page_indptr: &self.page_indptr,
                page_ids: &self.page_ids,
                pool_pages: self.pool_pages,
                page_size: self.page_size,
            },
            format: self.format,
            positions: self.positions.as_deref(),
            rotation: self.rotation.as_ref().map(|(cos, sin, half_width, pairs)| Rotation {
                cos,
                sin,
                half_width: *half_width,
                pairs: *pairs,
            }),
            sinks: self.sinks.as_deref(),
            slopes: self.slopes.as_deref(),
            slots: self.slots.as_ref().map(|(write_slots, token_pos, len)| HeadSlots {
                write_slots,
                token_pos,
                len: *len,
            }),
            scale: self.scale,
            window: self.window,
            softcap: self.softcap,
        }
    }

    pub fn check(&self) -> Result<(), InputError> {
        self.call().check(&self.pool.clone().borrow(), None)
    }
}

/// A case with what it has to give.
pub struct Golden<T> {
    pub case: Case<T>,
    pub output: Vec<f64>,
    pub key_weights: Vec<f64>,
    pub weights_len: usize,
    pub pool: Pool<T>,
}

/// The name of the element type of a case.
pub fn element(bytes: &[u8]) -> safetensors::Dtype {
    SafeTensors::deserialize(bytes).unwrap().tensor("query").unwrap().dtype()
}

pub fn load<T: OperatorElement>(bytes: &[u8], read: fn([u8; 4], usize) -> T, size: usize) -> Golden<T> {
    let (_, header) = SafeTensors::read_metadata(bytes).unwrap();
    let attributes = header.metadata().clone().unwrap_or_default();
    let number = |name: &str| attributes.get(name).map_or(0.0, |text| text.parse::<f32>().unwrap());
    let tensors = SafeTensors::deserialize(bytes).unwrap();
    let data = |name: &str| tensors.tensor(name).ok().map(|tensor| tensor.data().to_vec());
    let elements = |name: &str| -> Option<Vec<T>> {
        let element = |bytes: &[u8]| {
            let mut padded = [0; 4];
            padded[..size].copy_from_slice(bytes);
            read(padded, size)
        };
        data(name).map(|bytes| bytes.chunks_exact(size).map(element).collect())
    };
    let floats = |name: &str| -> Option<Vec<f32>> {
        data(name).map(|bytes| bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    };
    let halves = |name: &str| -> Vec<f16> {
        data(name).unwrap().as_chunks().0.iter().map(|bytes| f16::from_le_bytes(*bytes)).collect()
    };
    let ints = |name: &str| -> Option<Vec<i32>> {
        data(name).map(|bytes| bytes.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect())
    };
    let doubles = |name: &str| -> Vec<f64> {
        data(name).unwrap().as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect()
    };
    let shape = |name: &str| tensors.tensor(name).unwrap().shape().to_vec();
    let format = attributes.get("kv_format").map_or(KvFormat::Native, |name| KvFormat::named(name).unwrap());
    let pool = |prefix: &str| match format {
        KvFormat::Native => Pool::Native(elements(&format!("{prefix}kv_pool")).unwrap()),
        _ => Pool::Quantised(data(&format!("{prefix}kv_pool")).unwrap(), halves(&format!("{prefix}kv_scales"))),
    };
    let pairs = attributes.get("rotary").map(|name| match name.as_str() {
        "half" => Pairs::Half,
        "interleaved" => Pairs::Interleaved,
        other => panic!("rotary {other}"),
    });
    let case = Case {
        row_offsets: ints("row_offsets").unwrap(),
        query_heads: shape("query")[1],
        kv_heads: shape("key")[1],
        head_size: shape("query")[2],
        query: elements("query").unwrap(),
        key: elements("key").unwrap(),
        value: elements("value").unwrap(),
        cached_len: ints("cached_len").unwrap(),
        page_indptr: ints("page_indptr").unwrap(),
        page_ids: ints("page_ids").unwrap(),
        pool_pages: shape("kv_pool")[0],
        page_size: shape("kv_pool")[2],
        format,
        pool: pool(""),
        positions: ints("positions"),
        rotation: pairs.map(|pairs| (floats("cos").unwrap(), floats("sin").unwrap(), shape("cos")[1], pairs)),
        sinks: elements("sinks"),
        slopes: None,
        slots: None,
        scale: number("scale"),
        window: number("window") as i64,
        softcap: number("softcap"),
    };
    Golden {
        case,
        output: doubles("expected.output"),
        key_weights: doubles("expected.key_weights"),
        weights_len: shape("expected.key_weights")[2],
        pool: pool("expected."),
    }
}

/// Calls `check` with every golden case, in its element type, behind the arguments.
macro_rules! each_golden {
    ($check:ident $(, $argument:expr)*) => {
        for (name, bytes) in $crate::llm_cases::FILES {
            use $crate::llm_cases::{element, load};
            match element(bytes) {
                safetensors::Dtype::F32 => $check($($argument,)* name, load::<f32>(bytes, |bytes, _| f32::from_le_bytes(bytes), 4)),
                safetensors::Dtype::F16 => {
                    $check($($argument,)* name, load::<f16>(bytes, |bytes, _| f16::from_le_bytes([bytes[0], bytes[1]]), 2))
                }
                safetensors::Dtype::BF16 => {
                    $check($($argument,)* name, load::<bf16>(bytes, |bytes, _| bf16::from_le_bytes([bytes[0], bytes[1]]), 2))
                }
                other => panic!("{name} is of {other:?}"),
            }
        }
    };
}
pub(crate) use each_golden;
