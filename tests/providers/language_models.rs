//! Language models as `pagoda.export` makes them give transformers' logits on both providers: prompts in one run, in chunks
//! and token by token. The exporter runs in Python (target/venv, or the host's).

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use pagoda::folder::GenerateFolder;
use pagoda::{ElementType, Model, ModelOptions, Provider, Tensor};
use pagoda_test_support::Folder;
use safetensors::SafeTensors;

use crate::placement;

/// The small models, one of each architecture and rotation (tests/data/llm/make.py).
const MODELS: [&str; 14] = [
    "baichuan2-13b",
    "baichuan2-7b",
    "gemma3",
    "llama",
    "llama-mqa",
    "llama-rope-dynamic",
    "llama-rope-linear",
    "llama-rope-llama3",
    "llama-rope-yarn",
    "llama-tied",
    "mistral-window",
    "phi3",
    "qwen2",
    "qwen3",
];

/// Every architecture in f32: whole prompts, chunks, and token by token.
pub fn every_architecture(provider: Provider) {
    for model in Exported::all(&MODELS.map(|name| (name, &[][..])), provider) {
        let name = model.name;
        for prompt in model.prompts() {
            for chunk in [prompt.tokens.len(), 7, 1] {
                let error = error(&model.logits(&prompt.tokens, chunk), &prompt.logits);
                assert!(error <= 1e-4, "{name} in chunks of {chunk}: {error:e}");
            }
        }
        model.close();
    }
}

/// Half precision and quantised weights and pages, against the f32 logits.
pub fn other_forms(provider: Provider) {
    let forms: [(&[&str], f64); 7] = [
        (&["--compute", "f16"], 1e-2),
        (&["--compute", "bf16"], 8e-2),
        (&["--kv", "int8"], 0.03),
        (&["--kv", "fp8"], 0.15),
        (&["--compute", "f16", "--kv", "int4"], 0.4),
        (&["--weights", "int8"], 0.1),
        (&["--compute", "f16", "--weights", "int4"], 0.7),
    ];
    for (form, most) in forms {
        if provider == Provider::Cpu && form.contains(&"bf16") {
            // ONNX Runtime's CPU provider multiplies no bf16.
            continue;
        }
        // The exporter refuses Gemma in f16: activations of the real models are beyond the range.
        let names = ["llama", "llama-tied", "gemma3"].into_iter();
        let names = names.filter(|name| *name != "gemma3" || !form.contains(&"f16"));
        for model in Exported::all(&names.map(|name| (name, form)).collect::<Vec<_>>(), provider) {
            let name = model.name;
            for prompt in model.prompts() {
                let error = error(&model.logits(&prompt.tokens, prompt.tokens.len()), &prompt.logits);
                assert!(error <= most, "{name} {form:?}: {error:e}");
            }
            model.close();
        }
    }
}

/// Every architecture with its dense nodes fused, as a generator has them on a Hopper GPU: the logits of the plain graph.
pub fn fused(provider: Provider) {
    let of_type = |form: &'static [&'static str], most| {
        ["llama", "phi3", "qwen2", "qwen3"].map(move |name| (name, form, most)).into_iter()
    };
    let half = of_type(&["--compute", "f16"], 5e-3);
    // ONNX Runtime's CPU provider multiplies no bf16; on a GPU the plain graph and the fused one round sums at other places.
    let on_gpu = provider == Provider::Cuda;
    let brain = of_type(&["--compute", "bf16"], 3e-2).filter(move |_| on_gpu);
    let single = if on_gpu { 1e-4 } else { 1e-5 };
    let cases: Vec<_> = MODELS.into_iter().map(|name| (name, &[][..], single)).chain(half).chain(brain).collect();
    let models: Vec<_> = cases.iter().map(|&(name, form, _)| (name, form)).collect();
    for (plain, (name, form, most)) in Exported::all(&models, provider).zip(cases) {
        let fused = plain.fused();
        for prompt in plain.prompts() {
            for chunk in [prompt.tokens.len(), 7, 1] {
                let [expected, found] = [&plain, &fused].map(|model| model.logits(&prompt.tokens, chunk));
                let error = error(&found, &expected);
                assert!(error <= most, "{name} {form:?} in chunks of {chunk}: {error:e}");
            }
        }
        let operators = fused.close();
        assert!(operators.iter().all(|operator| operator != "Gemm"), "{name} {form:?}");
        plain.close();
    }
}

/// Products with quantised weights are other nodes, which stay; those of the same model whose rows are no whole blocks are fused.
pub fn fused_beside_quantised(provider: Provider) {
    for weights in ["int8", "int4"] {
        let plain = Exported::new("llama", &["--weights", weights], provider);
        let fused = plain.fused();
        let prompt = plain.prompts().remove(0);
        let [expected, found] = [&plain, &fused].map(|model| model.logits(&prompt.tokens, 7));
        // MatMulNBits rounds its inputs to 8 bits.
        let error = error(&found, &expected);
        assert!(error <= 2e-2, "{weights}: {error:e}");
        let [before, after] = [plain.close(), fused.close()].map(|operators| {
            let count = |name| operators.iter().filter(|operator| *operator == name).count();
            ["MatMulNBits", "Linear"].map(count)
        });
        assert!(before[0] > 0 && before[0] == after[0] && before[1] == 0 && after[1] > 0, "{before:?} {after:?}");
    }
}

/// In half precision, products with weights of 4 and of 8 bits become BlockLinear, which rounds no input either, with the norms,
/// gates, residuals and splits around them.
pub fn fused_blocks(provider: Provider) {
    // ONNX Runtime's CPU provider multiplies no bf16. The plain graph rounds what stands between its nodes.
    let kinds = [("f16", 1e-2), ("bf16", 3e-2)]
        .into_iter()
        .filter(|(compute, _)| *compute == "f16" || provider == Provider::Cuda);
    for ((compute, most), weights) in kinds.flat_map(|kind| [(kind, "int4"), (kind, "int8")]) {
        let form = ["--weights", weights, "--compute", compute];
        for plain in Exported::all(&["llama", "qwen2"].map(|name| (name, &form[..])), provider) {
            let what = format!("{} {compute} {weights}", plain.name);
            let fused = plain.fused();
            for (prompt, chunk) in plain.prompts().iter().flat_map(|prompt| [(prompt, 1), (prompt, 7), (prompt, 100)]) {
                let [expected, found] = [&plain, &fused].map(|model| model.logits(&prompt.tokens, chunk));
                let error = error(&found, &expected);
                // MatMulNBits with 8 bits rounds its inputs on the CPU.
                let most = if weights == "int8" { 5e-2 } else { most };
                assert!(error <= most, "{what} in chunks of {chunk}: {error:e}");
            }
            let [before, after] = [plain.close(), fused.close()].map(|operators| {
                let count = |name| operators.iter().filter(|operator| *operator == name).count();
                ["MatMulNBits", "BlockLinear", "Glu", "Split"].map(count)
            });
            assert!(before[0] > 0 && before[1] == 0 && before[2] > 0 && before[3] > 0, "{what}: {before:?}");
            // Weights of 4 bits have offsets here, whose products stand behind those of the codes.
            let left = if weights == "int4" { [before[2], before[3]] } else { [0, 0] };
            assert_eq!(after, [0, before[0], left[0], left[1]], "{what}");
        }
    }
}

/// What is left of the nodes of a Llama and of a Gemma, which norms the outputs of its layers too.
pub fn fused_nodes(provider: Provider) {
    // For each layer, and for the whole: embedding and head.
    let llama = [("Linear", 4, 1), ("PagedAttention", 1, 0), ("Reshape", 4, 0), ("Gather", 0, 3)];
    // Norms of queries, of keys, and behind both halves of a layer; sums with these, and norms of the sums.
    let gemma = [
        ("Linear", 4, 1),
        ("PagedAttention", 1, 0),
        ("Reshape", 4, 0),
        ("RMSNormalization", 4, 0),
        ("SkipSimplifiedLayerNormalization", 2, 0),
        ("Gather", 0, 3),
        ("Mul", 0, 1),
    ];
    for (name, layers, expected) in [("llama", 2, &llama[..]), ("gemma3", 4, &gemma[..])] {
        let model = Exported::new(name, &[], provider).fused();
        let prompt = model.prompts().remove(0);
        model.logits(&prompt.tokens, prompt.tokens.len());
        let mut nodes: Vec<(String, usize)> = Vec::new();
        for operator in model.close() {
            match nodes.iter_mut().find(|(known, _)| *known == operator) {
                Some((_, count)) => *count += 1,
                None => nodes.push((operator, 1)),
            }
        }
        nodes.sort();
        let mut expected: Vec<(String, usize)> =
            expected.iter().map(|&(operator, each, whole)| (operator.into(), each * layers + whole)).collect();
        expected.sort();
        assert_eq!(nodes, expected, "{name}");
    }
}

struct Prompt {
    tokens: Vec<i32>,
    logits: Vec<f32>,
}

/// A model that was exported to a folder that goes with it.
struct Exported {
    name: &'static str,
    model: Model,
    profile: PathBuf,
    folder: Arc<Folder>,
}

/// The arguments of each export are lines of an argument.
const EXPORT: &str = "import sys; from pagoda.export.__main__ import main
for lines in sys.argv[1:]:
    if failed := main(lines.split('\\n')): sys.exit(failed)";

const PAGES: i64 = 4;
const PAGE_SIZE: usize = 32;

impl Exported {
    fn new(name: &'static str, form: &[&str], provider: Provider) -> Self {
        Self::all(&[(name, form)], provider).next().expect("one model")
    }

    fn open(name: &'static str, file: &Path, folder: Arc<Folder>, provider: Provider) -> Self {
        let profile = file.with_extension("profile.json");
        let profile_path = Some(profile.clone());
        let options = ModelOptions { provider, intra_op_threads: 1, profile_path, ..ModelOptions::default() };
        let model = Model::open(file, &options).unwrap();
        assert_eq!(model.provider(), provider);
        Self { name, model, profile, folder }
    }

    /// Of names and forms, in this order. One process exports them all: its start takes longer than an export.
    fn all(models: &[(&'static str, &[&str])], provider: Provider) -> impl Iterator<Item = Self> {
        let folders: Vec<_> = models.iter().map(|_| Folder::new()).collect();
        let out = |folder: &Folder| folder.path().join("model");
        let calls = models.iter().zip(&folders).map(|((name, form), folder)| {
            let (source, out) = (format!("tests/data/llm/{name}"), out(folder));
            [&[&source, out.to_str().unwrap()], *form].concat().join("\n")
        });
        let venv = Path::new("target/venv/bin/python");
        let mut command = Command::new(if venv.exists() { venv } else { Path::new("python3") });
        command.env("PYTHONPATH", "bindings/python").args(["-c", EXPORT]).args(calls);
        let done = command.output().expect("Python runs");
        assert!(done.status.success(), "{models:?}: {}", String::from_utf8_lossy(&done.stderr));
        let names: Vec<_> = models.iter().map(|(name, _)| *name).collect();
        names.into_iter().zip(folders).map(move |(name, folder)| {
            let file = out(&folder).join("model.onnx");
            Self::open(name, &file, Arc::new(folder), provider)
        })
    }

    /// The same model with its dense nodes fused.
    fn fused(&self) -> Self {
        let out = self.folder.path().join("model");
        let file = out.join("fused.onnx");
        std::fs::write(&file, GenerateFolder::open(&out).unwrap().fused_graph().unwrap().unwrap()).unwrap();
        Self::open(self.name, &file, Arc::clone(&self.folder), self.model.provider())
    }

    fn prompts(&self) -> Vec<Prompt> {
        let bytes = std::fs::read(format!("tests/data/llm/{}/expected.safetensors", self.name)).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        // Keys are rotated by the length when they came, as transformers does it token by token.
        let logits = if self.name == "llama-rope-dynamic" { "logits_stepwise" } else { "logits" };
        let words = |name: String| {
            let data = tensors.tensor(&name).unwrap().data();
            data.as_chunks::<4>().0.to_vec()
        };
        let tokens = |index| {
            let tensor = tensors.tensor(&format!("input_ids.{index}")).unwrap();
            let size = tensor.data().len() / tensor.shape()[0];
            tensor.data().chunks(size).map(|id| i32::from_le_bytes([id[0], id[1], id[2], id[3]])).collect()
        };
        let prompt = |index| Prompt {
            tokens: tokens(index),
            logits: words(format!("{logits}.{index}")).into_iter().map(f32::from_le_bytes).collect(),
        };
        (0..2).map(prompt).collect()
    }

    /// Closes the model, and checks that each of its nodes ran on its provider. The operators of all nodes, run by run.
    fn close(self) -> Vec<String> {
        let provider = self.model.provider();
        drop(self.model);
        let ran = placement::nodes(&self.profile);
        assert!(!ran.is_empty());
        for (operator, at) in &ran {
            assert!(at == placement::name(provider), "{}: {operator} ran on {at}", self.name);
        }
        ran.into_iter().map(|(operator, _)| operator).collect()
    }

    /// The logits of all tokens, which come in chunks, on pages in no order.
    fn logits(&self, tokens: &[i32], chunk: usize) -> Vec<f32> {
        let is_pool = |name: &&str| name.starts_with("kv_");
        let names: Vec<&str> = self.model.inputs().iter().map(|input| input.name()).collect();
        let mut pools: Vec<(String, Tensor)> = Vec::new();
        for input in self.model.inputs().iter().filter(|input| is_pool(&input.name())) {
            let mut dims = input.dims().unwrap().to_vec();
            dims[0] = PAGES;
            pools.push((input.name().to_owned(), Tensor::zeros(input.element_type().unwrap(), &dims).unwrap()));
        }
        let mut logits = Vec::new();
        for (index, new) in tokens.chunks(chunk).enumerate() {
            let (cached, count) = (index * chunk, new.len());
            let pages = (cached + count).div_ceil(PAGE_SIZE);
            let ints = |values: &[i32]| Tensor::from_slice(&[values.len() as i64], values).unwrap();
            let range = |start: usize| (start..start + count).map(|value| value as i32).collect::<Vec<_>>();
            let page_ids: Vec<i32> = [2, 0, 3, 1][..pages].to_vec();
            let indices = [
                ("input_ids", ints(new)),
                ("positions", ints(&range(cached))),
                ("row_offsets", ints(&[0, count as i32])),
                ("cached_len", ints(&[cached as i32])),
                ("page_indptr", ints(&[0, pages as i32])),
                ("page_ids", ints(&page_ids)),
                ("logits_rows", ints(&range(0))),
            ];
            let mut inputs: Vec<(&str, &Tensor)> = indices.iter().map(|(name, tensor)| (*name, tensor)).collect();
            inputs.retain(|(name, _)| names.contains(name));
            inputs.extend(pools.iter().map(|(name, tensor)| (name.as_str(), tensor)));
            let outputs: Vec<String> = pools.iter().map(|(name, _)| format!("{name}_out")).collect();
            let asked: Vec<&str> = ["logits"].into_iter().chain(outputs.iter().map(String::as_str)).collect();
            let mut made = self.model.run(&inputs, &asked).unwrap().into_iter();
            let rows = made.next().unwrap();
            assert_eq!(rows.element_type(), ElementType::F32);
            logits.extend_from_slice(rows.as_slice::<f32>().unwrap());
            pools = pools.into_iter().map(|(name, _)| name).zip(made).collect();
        }
        logits
    }
}

fn error(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>();
    let difference = squares(&mut got.iter().zip(want).map(|(&got, &want)| f64::from(got) - f64::from(want)));
    (difference / squares(&mut want.iter().map(|&value| f64::from(value)))).sqrt()
}
