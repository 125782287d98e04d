//! HstuAttention over quantised pools: on both providers pages are those of the reference, and outputs what their numbers give.

use pagoda::{Model, Provider, Tensor};
use pagoda_kernels::cpu::reference;
use pagoda_kernels::{bf16, f16};
use pagoda_test_support::{Attribute, Dim, Graph};

use crate::common::quantised::{FORMATS, Pool};
use crate::common::{Case, Random, User, bits, error, tolerance};
use crate::operators::{Inputs, Number, attention_inputs, attributes, options, with_tensors};

const U8: i32 = 2;
const F16: i32 = 10;
const OUTPUTS: [&str; 3] = ["output", "kv_pool_out", "kv_scales_out"];

fn graph<T: Number>(case: &Case<T>, format: &'static str) -> Vec<u8> {
    let pool = || [Dim::Any("pages"), Dim::Is(2), Dim::Any("slots"), Dim::Any("heads"), Dim::Any("codes")];
    let scales = || [Dim::Any("pages"), Dim::Is(2), Dim::Any("slots"), Dim::Any("heads"), Dim::Any("scales")];
    let mut names = attention_inputs(case);
    names.resize(10, "");
    names.push("kv_scales");
    let attributes = attributes(case).into_iter().chain([Attribute::Text("kv_format", format)]);
    with_tensors(Graph::new().input("kv_pool", U8, &pool()).input("kv_scales", F16, &scales()), case)
        .output("kv_pool_out", U8, &pool())
        .output("kv_scales_out", F16, &scales())
        .node("ai.pagoda.HstuAttention", &names, &OUTPUTS, &attributes.collect::<Vec<_>>())
        .to_bytes()
}

/// The pool apart from its successor, then in place, twice: the same rows are written again.
fn check<T: Number>(case: &Case<T>, provider: Provider, before: &Pool, what: &str) {
    let mut stored = before.clone();
    reference::paged_kv_append_quantised(&case.append(), &mut stored.writes()).unwrap();
    // The CPU computes with the stored numbers, kernels of a GPU with those in the type of the rows.
    let expected = match provider {
        Provider::Cpu => reference::hstu_attention(&stored.attention(case)),
        _ => reference::hstu_attention(&stored.opened(case).attention()),
    };
    let name = match before.format {
        pagoda_kernels::KvFormat::Int8 => "int8",
        pagoda_kernels::KvFormat::Int4 => "int4",
        _ => "fp8",
    };
    let what = format!("{what} {} {name} D={} {:?}", T::NAME, case.head_size, case.users);
    let model = Model::open_memory(&graph(case, name), &options(provider)).unwrap();
    assert_eq!(model.provider(), provider);
    let inputs = Inputs::new(case);
    let dims = |width: usize| [case.pool_pages, 2, case.page_size, case.heads, width].map(|dim| dim as i64);
    let (format, size) = (before.format, case.head_size);
    let codes = Tensor::from_slice(&dims(format.pool_width(size)), &before.codes).unwrap();
    let scales = before.scales.iter().map(|&bits| f16::from_bits(bits)).collect::<Vec<_>>();
    let scales = Tensor::from_slice(&dims(format.scales_width()), &scales).unwrap();
    let fed: Vec<_> = inputs.tensors.iter().map(|(name, tensor)| (*name, tensor)).collect();
    let fed = [&fed[..], &[("kv_pool", &codes), ("kv_scales", &scales)]].concat();
    let same = |found: [&Tensor; 2], expected: &Pool, what: &str| {
        assert!(found[0].as_slice::<u8>().unwrap() == expected.codes, "{what}: codes");
        let scales = found[1].as_slice::<f16>().unwrap().iter().map(|scale| scale.to_bits());
        assert!(scales.eq(expected.scales.iter().copied()), "{what}: scales");
    };
    let made = model.run(&fed, &OUTPUTS).unwrap_or_else(|error| panic!("{what}: {error}"));
    same([&codes, &scales], before, &format!("{what}: before"));
    same([&made[1], &made[2]], &stored, &what);
    let output = made[0].as_slice::<T>().unwrap();
    let error = error(output, &expected.unwrap());
    assert!(error <= tolerance::<T>(), "{what}: error {error:e}");
    for round in 0..2 {
        let outputs = [("output", None), ("kv_pool_out", Some(&codes)), ("kv_scales_out", Some(&scales))];
        // SAFETY: nothing else uses the tensors.
        let again = unsafe { model.run_bound(&fed, &outputs, None) }.unwrap();
        let again = again[0].as_ref().unwrap().as_slice::<T>().unwrap();
        assert!(bits(again) == bits(output), "{what}: in place, round {round}");
        same([&codes, &scales], &stored, &format!("{what}: in place, round {round}"));
    }
}

pub fn pools(provider: Provider) {
    fn check_all<T: Number>(head_size: usize, provider: Provider) {
        let user = |cached, new, candidates| User { cached, new, candidates, contextual: 0 };
        let few = [user(13, 7, 9), user(0, 40, 3), user(0, 0, 0), user(47, 0, 15), user(9, 1, 0)];
        let long = [user(2000, 5, 12), user(10, 90, 0)];
        for (seed, users) in [(1, &few[..]), (2, &long[..])] {
            for (number, format) in FORMATS.into_iter().enumerate() {
                let mut case = Case::<T>::new(&mut Random(seed), users, 2, head_size, 16 << number);
                case.max_attn_len = [0, 30, 0][number];
                check(&case, provider, &Pool::new(&case, format), &format!("seed {seed}"));
            }
        }
    }
    check_all::<f32>(36, provider);
    check_all::<f16>(64, provider);
    check_all::<bf16>(128, provider);
}
