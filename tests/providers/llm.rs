//! The operators of language models on either provider: the golden results and random calls, apart and in place, what is
//! rejected, and replays of a CUDA graph.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use pagoda::device::Gpu;
use pagoda::{Model, ModelOptions, Provider, Tensor};
use pagoda_kernels::cpu::OperatorElement;
use pagoda_kernels::cpu::reference::{Attended, paged_attention};
use pagoda_kernels::{GluActivation, KvFormat, Pairs, bf16, f16};
use pagoda_test_support::{Attribute, Dim, F32, Folder, Graph, Random};

use crate::common::{bits, error, tolerance};
use crate::glu_cases::{Gated, worst};
use crate::llm_cases::random::{longest, random_case, random_slots};
use crate::llm_cases::{Case, Golden, Pool, each_golden};
use crate::operators::{Number, options};
use crate::placement;
use crate::session::{Binding, Memory, Session};

/// The inputs of PagedAttention in order.
const INPUTS: [&str; 16] = [
    "query",
    "key",
    "value",
    "row_offsets",
    "cached_len",
    "page_indptr",
    "page_ids",
    "kv_pool",
    "kv_scales",
    "positions",
    "cos",
    "sin",
    "sinks",
    "write_slots",
    "token_pos",
    "slopes",
];

/// The tensors of a case by name.
struct Tensors<T> {
    inputs: Vec<(&'static str, Tensor)>,
    pool: Pool<T>,
    weights: [i64; 3],
}

impl<T: Number> Tensors<T> {
    fn new(case: &Case<T>, weights_len: usize) -> Self {
        let (heads, kv_heads, size) = (case.query_heads as i64, case.kv_heads as i64, case.head_size as i64);
        let rows = case.total_rows() as i64;
        let list = |values: &[i32]| Tensor::from_slice(&[values.len() as i64], values).unwrap();
        let of = |dims: &[i64], values: &[T]| Tensor::from_slice(dims, values).unwrap();
        let mut inputs = vec![
            ("query", of(&[rows, heads, size], &case.query)),
            ("key", of(&[rows, kv_heads, size], &case.key)),
            ("value", of(&[rows, kv_heads, size], &case.value)),
            ("row_offsets", list(&case.row_offsets)),
            ("cached_len", list(&case.cached_len)),
            ("page_indptr", list(&case.page_indptr)),
            ("page_ids", list(&case.page_ids)),
        ];
        let pages = |width: usize| [case.pool_pages as i64, 2, case.page_size as i64, kv_heads, width as i64];
        match &case.pool {
            Pool::Native(pool) => inputs.push(("kv_pool", of(&pages(case.head_size), pool))),
            Pool::Quantised(codes, scales) => {
                let [pool, beside] = [case.format.pool_width(case.head_size), case.format.scales_width()].map(pages);
                inputs.push(("kv_pool", Tensor::from_slice(&pool, codes).unwrap()));
                inputs.push(("kv_scales", Tensor::from_slice(&beside, scales).unwrap()));
            }
        }
        inputs.extend(case.positions.as_ref().map(|positions| ("positions", list(positions))));
        if let Some((cos, sin, half_width, _)) = &case.rotation {
            let dims = [(cos.len() / half_width) as i64, *half_width as i64];
            inputs.extend(
                [("cos", cos), ("sin", sin)].map(|(name, values)| (name, Tensor::from_slice(&dims, values).unwrap())),
            );
        }
        inputs.extend(case.sinks.as_ref().map(|sinks| ("sinks", of(&[heads], sinks))));
        let sequences = case.cached_len.len() as i64;
        if let Some((write_slots, token_pos, len)) = &case.slots {
            inputs.push(("write_slots", Tensor::from_slice(&[rows, kv_heads], write_slots).unwrap()));
            let dims = [sequences, kv_heads, *len as i64];
            inputs.push(("token_pos", Tensor::from_slice(&dims, token_pos).unwrap()));
        }
        inputs.extend(case.slopes.as_ref().map(|slopes| ("slopes", Tensor::from_slice(&[heads], slopes).unwrap())));
        Self { inputs, pool: case.pool.clone(), weights: [sequences, kv_heads, weights_len as i64] }
    }

    fn get(&self, name: &str) -> &Tensor {
        &self.inputs.iter().find(|(at, _)| *at == name).unwrap().1
    }

    /// Each output with the input that it has the type and the shape of.
    fn outputs(&self) -> Vec<(&'static str, &'static str)> {
        let mut outputs = vec![("output", "query"), ("kv_pool_out", "kv_pool")];
        outputs.extend(matches!(self.pool, Pool::Quantised(..)).then_some(("kv_scales_out", "kv_scales")));
        outputs
    }

    /// A graph of one node, with inputs of any shape.
    fn graph(&self, case: &Case<T>) -> Graph {
        let dims = |tensor: &Tensor| -> Vec<Dim> { tensor.dims().iter().map(|dim| Dim::Is(*dim)).collect() };
        // A shape that is wrong is the operator's to reject.
        let free = |name: &'static str, tensor: &Tensor| -> Vec<Dim> {
            (0..tensor.dims().len()).map(|at| Dim::Any(format!("{name}.{at}").leak())).collect()
        };
        let mut graph = Graph::new();
        for (name, tensor) in &self.inputs {
            graph = graph.input(name, tensor.element_type() as i32, &free(name, tensor));
        }
        for (name, like) in self.outputs() {
            let tensor = self.get(like);
            graph = graph.output(name, tensor.element_type() as i32, &free(like, tensor));
        }
        let weights = Tensor::zeros(pagoda::ElementType::F32, &self.weights).unwrap();
        graph = graph.output("key_weights", F32, &dims(&weights));
        let used = |name: &&'static str| self.inputs.iter().any(|(at, _)| at == name);
        let last = INPUTS.iter().rposition(&used).unwrap();
        let inputs: Vec<&str> = INPUTS[..=last].iter().map(|name| if used(name) { *name } else { "" }).collect();
        let scales = if case.format == KvFormat::Native { "" } else { "kv_scales_out" };
        let outputs = ["output", "kv_pool_out", scales, "key_weights"];
        graph.node("ai.pagoda.PagedAttention", &inputs, &outputs, &self.attributes(case))
    }

    fn attributes(&self, case: &Case<T>) -> Vec<Attribute> {
        let rotary = match case.rotation {
            None => "none",
            Some((.., Pairs::Half)) => "half",
            Some((.., Pairs::Interleaved)) => "interleaved",
        };
        let format = match case.format {
            KvFormat::Native => "native",
            KvFormat::Int8 => "int8",
            KvFormat::Int4 => "int4",
            KvFormat::Fp8 => "fp8",
        };
        vec![
            Attribute::Float("scale", case.scale),
            Attribute::Int("window", case.window),
            Attribute::Float("softcap", case.softcap),
            Attribute::Text("rotary", rotary),
            Attribute::Text("kv_format", format),
            Attribute::Int("weights_len", self.weights[2]),
        ]
    }

    fn fed(&self) -> Vec<(&str, &Tensor)> {
        self.inputs.iter().map(|(name, tensor)| (*name, tensor)).collect()
    }

    /// Runs with the pool and its successor apart.
    fn run(&self, model: &Model) -> pagoda::Result<Results<T>> {
        let mut names: Vec<&str> = self.outputs().into_iter().map(|(name, _)| name).collect();
        names.push("key_weights");
        let before = self.stored();
        let made = model.run(&self.fed(), &names)?;
        assert!(self.stored() == before, "the input was written to");
        let stored = made[1..made.len() - 1].iter().map(|tensor| tensor_bytes(tensor).to_vec()).collect();
        let weights = made[made.len() - 1].as_slice()?.to_vec();
        Ok(Results { output: made[0].as_slice()?.to_vec(), weights, stored })
    }

    /// Runs with the pool, and its scales, as input and output at once, as the engine does.
    fn run_in_place(&self, model: &Model) -> Results<T> {
        let bound = |(name, like): (&'static str, &str)| (name, (name != "output").then(|| self.get(like)));
        let mut outputs: Vec<(&str, Option<&Tensor>)> = self.outputs().into_iter().map(bound).collect();
        outputs.push(("key_weights", None));
        // SAFETY: nothing else uses the tensors.
        let made = unsafe { model.run_bound(&self.fed(), &outputs, None) }.unwrap();
        let [output, weights] = [&made[0], &made[made.len() - 1]].map(|tensor| tensor.as_ref().unwrap());
        let (output, weights) = (output.as_slice().unwrap().to_vec(), weights.as_slice().unwrap().to_vec());
        Results { output, weights, stored: self.stored() }
    }

    /// The bytes of the pool and of its scales.
    fn stored(&self) -> Vec<Vec<u8>> {
        self.outputs()[1..].iter().map(|(_, like)| tensor_bytes(self.get(like)).to_vec()).collect()
    }
}

struct Results<T> {
    output: Vec<T>,
    weights: Vec<f32>,
    /// The bytes of the pool and of its scales.
    stored: Vec<Vec<u8>>,
}

fn tensor_bytes(tensor: &Tensor) -> &[u8] {
    let (data, len) = tensor.memory().unwrap();
    // SAFETY: the memory of the tensor; the driver and Rust take no null for an empty one.
    if len == 0 { &[] } else { unsafe { std::slice::from_raw_parts(data.cast(), len) } }
}

/// What the reference gives, and the bytes of the pool and of its scales behind it.
fn expected_of<T: Number>(case: &Case<T>, weights_len: usize) -> (Attended, Vec<Vec<u8>>) {
    let mut pool = case.pool.clone();
    let attended = paged_attention(&case.call(), &mut pool.borrow(), weights_len).unwrap();
    let after = Case { pool, ..case.clone() };
    (attended, Tensors::new(&after, weights_len).stored())
}

fn compare<T: OperatorElement>(
    got: &Results<T>,
    expected: &Attended,
    stored: &[Vec<u8>],
    provider: Provider,
    what: &str,
) {
    let (output, weights) = (error(&got.output, &expected.output), error(&got.weights, &expected.key_weights));
    assert!(output <= tolerance::<T>(), "{what}: output {output:e}");
    // What tensor cores multiply is rounded to T: the bound of the kernels' own tests.
    let most = if provider == Provider::Cuda { tolerance::<T>() } else { 1e-5 };
    assert!(weights <= most, "{what}: key_weights {weights:e}");
    assert!(got.stored == stored, "{what}: the pool");
}

/// Runs a case with the pools apart and in place. Compares both with the reference, and a GPU with the CPU.
fn check<T: Number>(case: &Case<T>, weights_len: usize, provider: Provider, what: &str) {
    let (expected, stored) = expected_of(case, weights_len);
    let tensors = Tensors::new(case, weights_len);
    let graph = tensors.graph(case).to_bytes();
    let model = Model::open_memory(&graph, &options(provider)).unwrap();
    let apart = tensors.run(&model).unwrap_or_else(|error| panic!("{what}: {error}"));
    compare(&apart, &expected, &stored, provider, what);
    if provider == Provider::Cuda {
        let on_cpu = tensors.run(&Model::open_memory(&graph, &options(Provider::Cpu)).unwrap()).unwrap();
        let wide: Vec<f64> = on_cpu.output.iter().map(|number| f64::from(number.to_f32())).collect();
        let error = error(&apart.output, &wide);
        assert!(error <= 2.0 * tolerance::<T>(), "{what}: the GPU against the CPU: {error:e}");
    }
    // Twice: the same rows are written again.
    for round in 0..2 {
        let in_place = tensors.run_in_place(&model);
        let same = bits(&in_place.output) == bits(&apart.output) && bits(&in_place.weights) == bits(&apart.weights);
        assert!(same && in_place.stored == stored, "{what}: in place, round {round}");
    }
}

pub fn golden(provider: Provider) {
    fn one<T: Number>(provider: Provider, name: &str, golden: Golden<T>) {
        let Golden { case, output, key_weights, weights_len, .. } = golden;
        check(&case, weights_len, provider, name);
        let tensors = Tensors::new(&case, weights_len);
        let folder = Folder::new();
        let profile = folder.path().join("profile.json");
        let with_profile = ModelOptions { profile_path: Some(profile.clone()), ..options(provider) };
        let model = Model::open_memory(&tensors.graph(&case).to_bytes(), &with_profile).unwrap();
        let got = tensors.run(&model).unwrap();
        let stored = got.stored.clone();
        compare(&got, &Attended { output, key_weights }, &stored, provider, name);
        drop(model);
        placement::check(&profile, placement::name(provider), &["PagedAttention"]);
    }
    each_golden!(one, provider);
}

/// The kernels have their own tests of this kind. Here some calls show that the operators pass arguments on.
pub fn random(provider: Provider) {
    let mut random = Random(71);
    // A weights_len of 0 stands for none, so a call without any token has 1.
    for number in 0..if provider == Provider::Cpu { 4 } else { 12 } {
        let case = random_case::<f32>(&mut random);
        check(&case, longest(&case).max(1), provider, &format!("f32 {number}"));
        let case = random_case::<f16>(&mut random);
        check(&case, longest(&case).max(1), provider, &format!("f16 {number}"));
        let case = random_case::<bf16>(&mut random);
        check(&case, longest(&case).max(1), provider, &format!("bf16 {number}"));
    }
}

pub fn slots(provider: Provider) {
    let mut random = Random(72);
    for number in 0..4 {
        let case = random_slots::<f32>(&mut random);
        check(&case, case.slots.as_ref().unwrap().2, provider, &format!("f32 {number}"));
        let case = random_slots::<bf16>(&mut random);
        check(&case, case.slots.as_ref().unwrap().2, provider, &format!("bf16 {number}"));
    }
}

/// What the host can check is checked on both providers, with a message.
pub fn bad_shapes(provider: Provider) {
    let fits = |case: &Case<f32>| {
        let quantised = !matches!(case.format, KvFormat::Native | KvFormat::Fp8);
        quantised && case.rotation.is_some() && case.sinks.is_some() && case.slopes.is_some() && case.total_rows() > 1
    };
    let mut random = Random(73);
    let case = std::iter::repeat_with(|| random_case::<f32>(&mut random)).find(fits).unwrap();
    let len = longest(&case);
    let model = Model::open_memory(&Tensors::new(&case, len).graph(&case).to_bytes(), &options(provider)).unwrap();
    Tensors::new(&case, len).run(&model).unwrap();
    for name in ["row_offsets", "cached_len", "page_indptr", "key", "value", "kv_pool", "kv_scales", "positions", "sin"]
        .into_iter()
        .chain(["sinks", "slopes"])
    {
        let mut tensors = Tensors::new(&case, len);
        let tensor = tensors.inputs.iter_mut().find(|(at, _)| *at == name).map(|(_, tensor)| tensor).unwrap();
        // One more of the last dimension.
        let mut dims = tensor.dims().to_vec();
        *dims.last_mut().unwrap() += 1;
        *tensor = Tensor::zeros(tensor.element_type(), &dims).unwrap();
        let error = tensors.run(&model).map(drop).unwrap_err();
        // A list of another length may make the list that it is compared with wrong.
        let named = match name {
            "cached_len" => error.message().contains("row_offsets") || error.message().contains("page_indptr"),
            _ => error.message().contains(name),
        };
        assert!(named, "{name}: {error}");
    }
    let mut wrong = Tensors::new(&case, len).attributes(&case);
    wrong[1] = Attribute::Int("window", -1);
    let names: Vec<&str> = INPUTS.into_iter().collect();
    let plain = Graph::new().node("ai.pagoda.PagedAttention", &names[..8], &["output", "kv_pool_out"], &wrong[..3]);
    let plain = names[..8].iter().fold(plain, |graph, name| {
        let (element, rank) = match *name {
            "query" | "key" | "value" => (F32, 3),
            "kv_pool" => (F32, 5),
            _ => (pagoda_test_support::I32, 1),
        };
        let dims: Vec<Dim> = (0..rank).map(|at| Dim::Any(format!("{name}.{at}").leak())).collect();
        graph.input(name, element, &dims)
    });
    let rows = ["query.0", "query.1", "query.2"].map(Dim::Any);
    let error =
        Model::open_memory(&plain.output("output", F32, &rows).to_bytes(), &options(provider)).map(drop).unwrap_err();
    assert!(error.message().contains("window"), "{error}");
}

/// Every type and activation, at sizes of one vector, of several and of none.
pub fn glu(provider: Provider) {
    fn one<T: Number>(provider: Provider, rows: usize, width: usize, activation: GluActivation) {
        let glu = Gated::<T>::new(&mut Random(width as u64), rows, width, activation);
        let attribute = Attribute::Text("activation", activation.name());
        let graph = Graph::new()
            .input("x", T::TYPE as i32, &[Dim::Any("T"), Dim::Is(2 * width as i64)])
            .output("y", T::TYPE as i32, &[Dim::Any("T"), Dim::Is(width as i64)])
            .node("ai.pagoda.Glu", &["x"], &["y"], &[attribute]);
        let folder = Folder::new();
        let profile = folder.path().join("profile.json");
        let with_profile = ModelOptions { profile_path: Some(profile.clone()), ..options(provider) };
        let model = Model::open_memory(&graph.to_bytes(), &with_profile).unwrap();
        let x = Tensor::from_slice(&[rows as i64, 2 * width as i64], &glu.x).unwrap();
        let made = model.run(&[("x", &x)], &["y"]).unwrap();
        let off = worst(&glu, made[0].as_slice::<T>().unwrap(), &glu.expected());
        assert!(off <= 1.0, "{} {activation:?} {rows} rows, F={width}: {off} of the bound", T::NAME);
        drop(model);
        placement::check(&profile, placement::name(provider), &["Glu"]);
    }
    for (rows, width) in [(1, 1), (3, 17), (40, 256), (1, 20_000)] {
        for activation in GluActivation::ALL {
            one::<f32>(provider, rows, width, activation);
            one::<f16>(provider, rows, width, activation);
            one::<bf16>(provider, rows, width, activation);
        }
    }
}

/// The first run is an ordinary one, the second is captured, the others are replays: each computes what the tensors hold then, in
/// place on the pool.
#[test]
#[ignore = "needs a GPU and ONNX Runtime's CUDA provider"]
fn a_captured_step_of_a_language_model_follows_its_tensors() {
    let _alone = crate::GPU.write().unwrap_or_else(std::sync::PoisonError::into_inner);
    let gpu = Gpu::open(0).unwrap();
    let stream = gpu.context().new_stream().unwrap();
    for format in [KvFormat::Native, KvFormat::Int8, KvFormat::Int4, KvFormat::Fp8] {
        captured::<f16>(format, &stream);
        captured::<bf16>(format, &stream);
    }
}

fn captured<T: Number>(format: KvFormat, stream: &Arc<CudaStream>) {
    let mut random = Random(74);
    let fits = |case: &Case<T>| case.format == format && case.total_rows() > 1 && case.rotation.is_some();
    let first = std::iter::repeat_with(|| random_case::<T>(&mut random)).find(fits).unwrap();
    // The same shapes: other numbers, and other pages.
    let mut second = first.clone();
    second.query.reverse();
    second.key.reverse();
    second.value.reverse();
    second.page_ids.reverse();
    let len = longest(&first);
    let cases = [&first, &second].map(|case| (Tensors::new(case, len), expected_of(case, len)));
    let units = [1, 2].map(|seed| Gated::<T>::new(&mut Random(seed), 5, 96, GluActivation::Silu));
    let activation = Attribute::Text("activation", "silu");
    let rows = |width: i64| [Dim::Any("T"), Dim::Is(width)];
    let graph = cases[0].0.graph(&first);
    let graph = graph.input("x", T::TYPE as i32, &rows(192)).output("y", T::TYPE as i32, &rows(96));
    let session = Session::open(&graph.node("ai.pagoda.Glu", &["x"], &["y"], &[activation]).to_bytes());

    let binding = Binding::new(&session);
    let mut inputs: Vec<(&str, Memory)> = Vec::new();
    for (name, tensor) in &cases[0].0.inputs {
        inputs.push((name, Memory::new(stream, tensor_bytes(tensor))));
        binding.input(name, &inputs.last().unwrap().1, tensor.element_type() as i32, tensor.dims());
    }
    let mut x = Memory::new(stream, bytes(&units[0].x));
    binding.input("x", &x, T::TYPE as i32, &[5, 192]);
    let query = cases[0].0.get("query");
    let mut written = [tensor_bytes(query).len(), 5 * 96 * size_of::<T>(), product(&cases[0].0.weights) * 4]
        .map(|len| Memory::new(stream, &vec![0xff; len]));
    binding.output("output", &written[0], T::TYPE as i32, query.dims());
    binding.output("y", &written[1], T::TYPE as i32, &[5, 96]);
    binding.output("key_weights", &written[2], F32, &cases[0].0.weights);
    for (name, like) in cases[0].0.outputs().into_iter().skip(1) {
        let memory = &inputs.iter().find(|(at, _)| *at == like).unwrap().1;
        let tensor = cases[0].0.get(like);
        binding.output(name, memory, tensor.element_type() as i32, tensor.dims());
    }
    for round in 0..6 {
        let at = [0, 0, 1, 0, 1, 1][round];
        let (tensors, (expected, stored)) = &cases[at];
        for ((_, memory), (_, tensor)) in inputs.iter_mut().zip(&tensors.inputs) {
            stream.memcpy_htod(tensor_bytes(tensor), &mut memory.memory).unwrap();
        }
        stream.memcpy_htod(bytes(&units[at].x), &mut x.memory).unwrap();
        for memory in &mut written {
            stream.memset_zeros(&mut memory.memory).unwrap();
        }
        stream.synchronize().unwrap();
        binding.run();
        let read = |memory: &Memory| -> Vec<u8> {
            let content = stream.clone_dtoh(&memory.memory).unwrap();
            stream.synchronize().unwrap();
            content
        };
        let stored_now = tensors.outputs().into_iter().skip(1);
        let stored_now = stored_now.map(|(_, like)| read(&inputs.iter().find(|(name, _)| *name == like).unwrap().1));
        let got = Results {
            output: numbers::<T>(&read(&written[0])),
            weights: numbers::<f32>(&read(&written[2])),
            stored: stored_now.collect(),
        };
        let what = format!("{} {format:?} round {round}", T::NAME);
        compare(&got, expected, stored, Provider::Cuda, &what);
        let off = worst(&units[at], &numbers::<T>(&read(&written[1])), &units[at].expected());
        assert!(off <= 1.0, "{what}: Glu: {off} of the bound");
    }
}

fn product(dims: &[i64]) -> usize {
    dims.iter().product::<i64>() as usize
}

fn bytes<T>(values: &[T]) -> &[u8] {
    // SAFETY: numbers without padding, seen as bytes.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

fn numbers<T: Copy>(content: &[u8]) -> Vec<T> {
    // SAFETY: the content is elements of this type, wherever it lies.
    content.chunks_exact(size_of::<T>()).map(|at| unsafe { at.as_ptr().cast::<T>().read_unaligned() }).collect()
}
