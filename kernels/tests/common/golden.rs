//! The cases of `tests/data/golden`, made by a program written apart from the kernels.

use pagoda_kernels::cpu::OperatorElement;
use safetensors::SafeTensors;

use super::Case;

macro_rules! file {
    ($name:literal) => {
        ($name, include_bytes!(concat!("../../../tests/data/golden/", $name, ".safetensors")))
    };
}

const FILES: [(&str, &[u8]); 9] = [
    file!("cached_d256"),
    file!("cached_page_edge"),
    file!("cached_ragged"),
    file!("contextual"),
    file!("empty_user"),
    file!("fresh_candidates"),
    file!("fresh_causal"),
    file!("groups_of_two"),
    file!("window"),
];

/// A case with what it has to give.
pub struct Golden {
    pub name: String,
    pub case: Case<f32>,
    pub expected_output: Vec<f64>,
    pub expected_pool: Vec<f32>,
}

/// Every case of `tests/data/golden`; they are inside the program, which may run where the folder is not.
pub fn golden() -> Vec<Golden> {
    FILES.iter().map(|(name, bytes)| load(name, bytes)).collect()
}

fn load(name: &str, bytes: &[u8]) -> Golden {
    let (_, header) = SafeTensors::read_metadata(bytes).unwrap();
    let attributes = header.metadata().clone().unwrap();
    let attribute = |name: &str| attributes[name].parse::<f64>().unwrap();
    let tensors = SafeTensors::deserialize(bytes).unwrap();
    let data = |name: &str| tensors.tensor(name).unwrap().data();
    let floats = |name| data(name).as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect::<Vec<_>>();
    let ints = |name| data(name).as_chunks().0.iter().map(|b| i32::from_le_bytes(*b)).collect::<Vec<_>>();
    let shape = tensors.tensor("kv_pool").unwrap().shape().to_vec();
    Golden {
        name: name.to_owned(),
        case: Case {
            users: vec![],
            heads: shape[3],
            head_size: shape[4],
            row_offsets: ints("row_offsets"),
            num_candidates: ints("num_candidates"),
            query: floats("query"),
            key: floats("key"),
            value: floats("value"),
            cached_len: ints("cached_len"),
            page_indptr: ints("page_indptr"),
            page_ids: ints("page_ids"),
            pool_pages: shape[0],
            page_size: shape[2],
            pool: floats("kv_pool"),
            num_contextual: tensors.names().contains(&"num_contextual").then(|| ints("num_contextual")),
            alpha: attribute("alpha") as f32,
            scaling_seqlen: attribute("scaling_seqlen") as i64,
            target_group_size: attribute("target_group_size") as i64,
            max_attn_len: attribute("max_attn_len") as i64,
            candidates_only: false,
        },
        expected_output: data("expected_output").as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
        expected_pool: floats("expected_pool"),
    }
}

/// The case in another type.
pub fn rounded<T: OperatorElement>(case: &Case<f32>) -> Case<T> {
    let round = |tensor: &[f32]| tensor.iter().map(|x| T::from_f32(*x)).collect::<Vec<T>>();
    Case {
        users: vec![],
        heads: case.heads,
        head_size: case.head_size,
        row_offsets: case.row_offsets.clone(),
        num_candidates: case.num_candidates.clone(),
        query: round(&case.query),
        key: round(&case.key),
        value: round(&case.value),
        cached_len: case.cached_len.clone(),
        page_indptr: case.page_indptr.clone(),
        page_ids: case.page_ids.clone(),
        pool_pages: case.pool_pages,
        page_size: case.page_size,
        pool: round(&case.pool),
        num_contextual: case.num_contextual.clone(),
        alpha: case.alpha,
        scaling_seqlen: case.scaling_seqlen,
        target_group_size: case.target_group_size,
        max_attn_len: case.max_attn_len,
        candidates_only: case.candidates_only,
    }
}
