//! The operators around the layers on either provider: one behind the other, from keys to rows of length 1, with a product of
//! zeros between them that takes some of the rows.

use pagoda::{Model, ModelOptions, Provider, Tensor};
use pagoda_kernels::cpu::reference;
use pagoda_kernels::{HstuUnit, bf16, f16};
use pagoda_test_support::{Attribute, Dim, F32, Folder, Graph, I64, Random};

use crate::common::{bits, error, tolerance};
use crate::dense_cases::Numbers;
use crate::ends_cases::Embed;
use crate::operators::{Number, options};

/// Rows of the batch, and how many of them are candidates.
const ROWS: usize = 70;
const TAKEN: usize = 33;
/// The depth of the product.
const INNER: usize = 8;

pub fn from_keys_to_lengths(provider: Provider) {
    for width in [64, 37] {
        check::<f32>(width, provider);
        check::<f16>(width, provider);
        check::<bf16>(width, provider);
    }
}

/// `x` is what the keys give, `some` rows of it, `y` those at length 1.
fn graph<T: Number>(case: &Embed) -> Vec<u8> {
    let (element, width) = (T::TYPE as i32, case.width as i64);
    let rows = |name: &'static str| [Dim::Any(name), Dim::Is(width)];
    let inputs = ["positions_table", "positions", "", "", "table_0", "keys_0", "table_1", "keys_1"];
    let mut graph = Graph::new()
        .input("index", I64, &[Dim::Any("S")])
        .input("left", element, &[Dim::Any("S"), Dim::Is(INNER as i64)])
        .input("right", element, &[Dim::Is(width), Dim::Is(INNER as i64)]);
    for (lookup, at) in case.learned.iter().chain(&case.tables).zip([0, 4, 6]) {
        let dims = [lookup.0.len() as i64 / width, width];
        graph = graph.weight(inputs[at], &dims, &lookup.0).input(inputs[at + 1], I64, &[Dim::Any("T")]);
    }
    let attributes = [Attribute::Float("scale", case.scale), Attribute::Int("to", i64::from(element))];
    graph
        .output("x", element, &rows("T"))
        .output("some", element, &rows("S"))
        .output("y", F32, &rows("S"))
        .node("ai.pagoda.HstuEmbed", &inputs, &["x"], &attributes)
        .node("ai.pagoda.HstuOutput", &["left", "right", "", "x", "index"], &["some"], &[])
        .node("ai.pagoda.HstuUnit", &["some"], &["y"], &[Attribute::Float("epsilon", 1e-6)])
        .to_bytes()
}

fn check<T: Number>(width: usize, provider: Provider) {
    let case = Embed::new(&mut Numbers(Random(width as u64)), ROWS, width, 2, 1);
    let mut random = Random(4);
    let index: Vec<i64> = (0..TAKEN).map(|_| random.below(ROWS) as i64).collect();
    let folder = Folder::new();
    let profile = folder.path().join("profile.json");
    let with_profile = ModelOptions { profile_path: Some(profile.clone()), ..options(provider) };
    let model = Model::from_bytes(&graph::<T>(&case), &with_profile).unwrap();
    let ints = |values: &[i64]| Tensor::from_slice(&[values.len() as i64], values).unwrap();
    let zeros = |rows: usize| Tensor::zeros(T::TYPE, &[rows as i64, INNER as i64]).unwrap();
    let fed = [
        ("index", ints(&index)),
        ("left", zeros(TAKEN)),
        ("right", zeros(width)),
        ("positions", ints(&case.learned[0].1)),
        ("keys_0", ints(&case.tables[0].1)),
        ("keys_1", ints(&case.tables[1].1)),
    ];
    let fed = fed.each_ref().map(|(name, tensor)| (*name, tensor));
    let made = model.run(&fed, &["x", "some", "y"]).unwrap();
    let what = format!("{} E={width}", T::NAME);
    let [x, some] = [0, 1].map(|at| made[at].as_slice::<T>().unwrap());
    assert!(bits(x) == bits(&case.rounded::<T>()), "{what}: embedded");
    let expected: Vec<T> = index.iter().flat_map(|row| x[*row as usize * width..][..width].to_vec()).collect();
    assert!(bits(some) == bits(&expected), "{what}: taken");
    let unit = HstuUnit { rows: TAKEN, width, x: some, epsilon: 1e-6 };
    let off = error(made[2].as_slice::<f32>().unwrap(), &reference::hstu_unit(&unit).unwrap());
    assert!(off <= tolerance::<f32>(), "{what}: of length 1: {off:e}");
    drop(model);
    nodes_ran_on(provider, &std::fs::read(profile).unwrap());
}

/// ONNX Runtime's profile names the provider of each node that ran.
fn nodes_ran_on(provider: Provider, profile: &[u8]) {
    let expected = if provider == Provider::Cpu { "CPUExecutionProvider" } else { "CUDAExecutionProvider" };
    let events: serde_json::Value = serde_json::from_slice(profile).unwrap();
    for operator in ["HstuEmbed", "HstuOutput", "HstuUnit"] {
        let of_operator = events.as_array().unwrap().iter().filter(|event| event["args"]["op_name"] == operator);
        let providers: Vec<_> = of_operator.map(|event| event["args"]["provider"].as_str().unwrap()).collect();
        assert!(!providers.is_empty() && providers.iter().all(|at| *at == expected), "{operator}: {providers:?}");
    }
}
