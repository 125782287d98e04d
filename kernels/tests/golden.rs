//! The kernels give the results that a program written apart from them gave (`tests/data/golden`).
#![cfg(not(miri))] // reads files

mod common;

use common::{Case, error, tolerance};
use pagoda_kernels::cpu::{Isa, reference};
use pagoda_kernels::parallel::{Serial, Threads};
use pagoda_kernels::{Element, bf16, f16};
use safetensors::SafeTensors;

struct Golden {
    name: String,
    case: Case<f32>,
    expected_output: Vec<f64>,
    expected_pool: Vec<f32>,
}

fn golden() -> Vec<Golden> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/golden");
    let mut cases: Vec<Golden> = std::fs::read_dir(folder).unwrap().map(|entry| load(&entry.unwrap().path())).collect();
    cases.sort_by(|a, b| a.name.cmp(&b.name));
    assert!(cases.len() >= 9, "{} cases in {folder}", cases.len());
    cases
}

fn load(path: &std::path::Path) -> Golden {
    let bytes = std::fs::read(path).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let attributes = header.metadata().clone().unwrap();
    let attribute = |name: &str| attributes[name].parse::<f64>().unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let data = |name: &str| tensors.tensor(name).unwrap().data();
    let floats = |name| data(name).as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect::<Vec<_>>();
    let ints = |name| data(name).as_chunks().0.iter().map(|b| i32::from_le_bytes(*b)).collect::<Vec<_>>();
    let shape = tensors.tensor("kv_pool").unwrap().shape().to_vec();
    Golden {
        name: path.file_stem().unwrap().to_string_lossy().into_owned(),
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
        },
        expected_output: data("expected_output").as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
        expected_pool: floats("expected_pool"),
    }
}

fn rounded<T: Element>(case: &Case<f32>) -> Case<T> {
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
    }
}

#[test]
fn the_reference_gives_the_golden_outputs() {
    for Golden { name, case, expected_output, .. } in golden() {
        let output = reference::hstu_attention(&case.attention()).unwrap();
        let worst = output.iter().zip(&expected_output).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        // Only alpha differs, which is an f32 here.
        assert!(worst < 1e-7, "{name}: {worst:e}");
    }
}

#[test]
fn every_instruction_set_gives_the_golden_outputs() {
    for Golden { name, case, expected_output, .. } in golden() {
        for isa in Isa::available() {
            let error = error(&case.output(isa), &expected_output);
            assert!(error <= tolerance::<f32>(), "{name} {isa:?}: {error:e}");
        }
    }
}

#[test]
fn half_precision_stays_within_its_bound() {
    fn check<T: Element>(name: &str, case: &Case<f32>) {
        let case = rounded::<T>(case);
        let expected = reference::hstu_attention(&case.attention()).unwrap();
        for isa in Isa::available() {
            let error = error(&case.output(isa), &expected);
            assert!(error <= tolerance::<T>(), "{name} {} {isa:?}: {error:e}", T::NAME);
        }
    }
    for Golden { name, case, .. } in golden() {
        check::<f16>(&name, &case);
        check::<bf16>(&name, &case);
    }
}

#[test]
fn append_gives_the_golden_pools() {
    let threads = Threads::new(3);
    for Golden { name, case, expected_pool, .. } in golden() {
        let same = |pool: &[f32]| common::bits(pool) == common::bits(&expected_pool);
        let mut pool = case.pool.clone();
        reference::paged_kv_append(&case.append(), &mut pool).unwrap();
        assert!(same(&pool), "{name}: reference");
        let mut pool = case.pool.clone();
        case.append().run(&mut pool, &Serial).unwrap();
        assert!(same(&pool), "{name}");
        let mut pool = case.pool.clone();
        case.append().run(&mut pool, &threads).unwrap();
        assert!(same(&pool), "{name}: threads");
    }
}
