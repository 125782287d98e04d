//! The operators around the layers on either provider: one behind the other, from keys to rows of length 1 and through
//! two layers to scores, with a product of zeros between them that takes some of the rows.

use pagoda::{Model, ModelOptions, Provider, Tensor};
use pagoda_kernels::cpu::reference;
use pagoda_kernels::{Activation, HstuLinear, HstuUnit, bf16, f16};
use pagoda_test_support::{Attribute, Dim, F32, Folder, Graph, I64, Random};

use crate::common::{bits, error, tolerance};
use crate::dense_cases::Numbers;
use crate::embed_output_cases::Embed;
use crate::operators::{Number, options};
use crate::placement;

/// Rows of the batch, and how many of them are candidates.
const ROWS: usize = 70;
const TAKEN: usize = 33;
/// The depth of the product.
const INNER: usize = 8;
/// What the layers make of a row.
const LAYERS: [usize; 2] = [48, 2];

pub fn from_keys_to_scores(provider: Provider) {
    for width in [64, 37] {
        check::<f32>(width, provider);
        check::<f16>(width, provider);
        check::<bf16>(width, provider);
    }
}

/// `x` is what the keys give, `some` rows of it, `y` those at length 1, `inside` and `scores` what the layers make of
/// them.
fn graph<T: Number>(case: &Embed, layers: &[Layer; 2]) -> Vec<u8> {
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
    for (name, layer) in ["first", "second"].into_iter().zip(layers) {
        let dims = [layer.width as i64, layer.inner as i64];
        graph = graph.weight(name, &dims, &layer.weight).weight(&format!("{name}.bias"), &dims[..1], &layer.bias);
    }
    let [relu, sigmoid] =
        ["relu", "sigmoid"].map(|name| [Attribute::Text("activation", name), Attribute::Int("tf32", 1)]);
    graph
        .output("x", element, &rows("T"))
        .output("some", element, &rows("S"))
        .output("y", F32, &rows("S"))
        .output("inside", F32, &[Dim::Any("S"), Dim::Is(LAYERS[0] as i64)])
        .output("scores", F32, &[Dim::Any("S"), Dim::Is(LAYERS[1] as i64)])
        .node("ai.pagoda.HstuEmbed", &inputs, &["x"], &attributes)
        .node("ai.pagoda.HstuOutput", &["left", "right", "", "x", "index"], &["some"], &[])
        .node("ai.pagoda.HstuUnit", &["some"], &["y"], &[Attribute::Float("epsilon", 1e-6)])
        .node("ai.pagoda.HstuLinear", &["y", "first", "first.bias"], &["inside"], &relu)
        .node("ai.pagoda.HstuLinear", &["inside", "second", "second.bias"], &["scores"], &sigmoid)
        .to_bytes()
}

/// A layer of the head.
struct Layer {
    inner: usize,
    width: usize,
    weight: Vec<f32>,
    bias: Vec<f32>,
    activation: Activation,
}

impl Layer {
    fn new(inner: usize, width: usize, activation: Activation) -> Self {
        let mut numbers = Numbers(Random(inner as u64));
        Self { inner, width, weight: numbers.weight(width, inner), bias: numbers.tensor(width, 1.0), activation }
    }

    fn expected(&self, x: &[f32]) -> Vec<f64> {
        let Self { inner, width, activation, .. } = *self;
        let (weight, bias) = (&self.weight[..], Some(&self.bias[..]));
        reference::hstu_linear(&HstuLinear { rows: TAKEN, inner, width, x, weight, bias, activation }).unwrap()
    }
}

fn check<T: Number>(width: usize, provider: Provider) {
    let case = Embed::new(&mut Numbers(Random(width as u64)), ROWS, width, 2, 1);
    let mut random = Random(4);
    let index: Vec<i64> = (0..TAKEN).map(|_| random.below(ROWS) as i64).collect();
    let layers = [(width, LAYERS[0], Activation::Relu), (LAYERS[0], LAYERS[1], Activation::Sigmoid)];
    let layers = layers.map(|(inner, width, activation)| Layer::new(inner, width, activation));
    let folder = Folder::new();
    let profile = folder.path().join("profile.json");
    let with_profile = ModelOptions { profile_path: Some(profile.clone()), ..options(provider) };
    let model = Model::open_memory(&graph::<T>(&case, &layers), &with_profile).unwrap();
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
    let made = model.run(&fed, &["x", "some", "y", "inside", "scores"]).unwrap();
    let what = format!("{} E={width}", T::NAME);
    let [x, some] = [0, 1].map(|at| made[at].as_slice::<T>().unwrap());
    assert!(bits(x) == bits(&case.rounded::<T>()), "{what}: embedded");
    let expected: Vec<T> = index.iter().flat_map(|row| x[*row as usize * width..][..width].to_vec()).collect();
    assert!(bits(some) == bits(&expected), "{what}: taken");
    let unit = HstuUnit { rows: TAKEN, width, x: some, epsilon: 1e-6 };
    let [y, inside, scores] = [2, 3, 4].map(|at| made[at].as_slice::<f32>().unwrap());
    let off = error(y, &reference::hstu_unit(&unit).unwrap());
    assert!(off <= tolerance::<f32>(), "{what}: of length 1: {off:e}");
    // Of few columns the sums are exact on a GPU too.
    let first = if provider == Provider::Cpu { tolerance::<f32>() } else { 1e-3 };
    for (layer, from, to, tolerance) in
        [(&layers[0], y, inside, first), (&layers[1], inside, scores, tolerance::<f32>())]
    {
        let off = error(to, &layer.expected(from));
        assert!(off <= tolerance, "{what}: {:?}: {off:e}", layer.activation);
    }
    drop(model);
    placement::check(&profile, placement::name(provider), &["HstuEmbed", "HstuOutput", "HstuUnit", "HstuLinear"]);
}
