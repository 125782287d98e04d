use std::path::{Path, PathBuf};

use pagoda_test_support::{BOOL, Dim, Element, F16, F32, Folder, Graph, I32, I64};
use serde_json::{Value, json};

use super::super::generate::{Generation, PastAttention, PastPresent};
use super::super::{AnyFolder, ModelFolder};
use super::*;
use crate::tensor::ElementType;

fn data(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(path)
}

/// One of `tests/data/decoders`, with its tokenizer.
fn decoder(name: &str) -> Folder {
    let folder = Folder::new();
    let own = std::fs::read_dir(data("decoders").join(name)).unwrap().map(|file| file.unwrap().path());
    let texts = ["tokenizer.json", "tokenizer_config.json"].map(|name| data("llm/llama").join(name));
    for file in own.chain(texts) {
        std::fs::copy(&file, folder.path().join(file.file_name().unwrap())).unwrap();
    }
    folder
}

fn form(folder: &GenerateFolder) -> &PastPresent {
    match &folder.form {
        Form::PastPresent(form) => form,
        other => panic!("{other:?}"),
    }
}

/// Changes entries of a JSON file, by place.
fn edit(folder: &Folder, name: &str, changes: &[(&str, Value)]) {
    let path = folder.path().join(name);
    let mut json: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    for (place, value) in changes {
        let (object, key) = place.rsplit_once('/').unwrap();
        json.pointer_mut(object).unwrap()[key] = value.clone();
    }
    std::fs::write(path, json.to_string()).unwrap();
}

/// The error of a folder, which does not depend on what opens it.
fn refused(folder: &Folder) -> Error {
    let error = GenerateFolder::open(folder.path()).expect_err("it is refused");
    assert_eq!(AnyFolder::open(folder.path()).unwrap_err(), error);
    assert_eq!(error.argument(), Some("folder"));
    assert!(error.message().starts_with(&folder.path().display().to_string()), "{error}");
    error
}

fn assert_refused(folder: &Folder, status: Status, message: &str) {
    let error = refused(folder);
    assert!(error.message().contains(message), "{error}\nis not: {message}");
    assert_eq!(error.status(), status, "{error}");
}

#[test]
fn every_exporters_decoders_are_taken() {
    use PastAttention::{ByColumn, GroupQuery, Masked};
    let (f32, f16) = (ElementType::F32, ElementType::F16);
    for (name, attention, positions, element, layers, heads, windows) in [
        ("llama-optimum", Masked, true, f32, 2, 2, vec![0, 0]),
        ("qwen2-optimum", Masked, true, f32, 2, 2, vec![0, 6]),
        ("gemma3-optimum", ByColumn, false, f32, 2, 1, vec![6, 0]),
        ("llama-1-optimum-merged", Masked, true, f32, 1, 2, vec![0]),
        ("llama-genai", GroupQuery, false, f32, 2, 2, vec![0, 0]),
        ("llama-genai-unpacked", GroupQuery, false, f32, 2, 2, vec![0, 0]),
        ("llama-genai-int4", GroupQuery, false, f32, 2, 2, vec![0, 0]),
        ("llama-genai-dml", GroupQuery, true, f16, 2, 2, vec![0, 0]),
        ("qwen2-genai", GroupQuery, false, f32, 2, 2, vec![0, 6]),
    ] {
        let files = decoder(name);
        let folder = GenerateFolder::open(files.path()).unwrap();
        let form = form(&folder);
        assert_eq!((form.attention, form.position_ids.is_some()), (attention, positions), "{name}");
        assert_eq!(form.use_cache_branch.is_some(), name.contains("merged"), "{name}");
        assert_eq!((form.logits_element, folder.compute, folder.kv.element), (element, element, element), "{name}");
        assert_eq!(folder.attention, Attention { layers, heads: 4, windows }, "{name}");
        let bytes = u64::from(layers * 2 * heads * 16) * element.bits() as u64 / 8;
        assert_eq!((folder.kv.layers, folder.kv.heads, folder.kv.head_size), (layers, heads, 16), "{name}");
        assert_eq!((folder.kv.format, folder.kv.bytes_per_token), (KvFormat::Native, bytes), "{name}");
        assert_eq!((folder.vocab_size, folder.hidden_size, folder.limits.max_context), (272, 32, 128), "{name}");
        assert_eq!(folder.weights == WeightFormat::Int4, name.contains("int4"), "{name}");
        assert_eq!(form.past_values[layers as usize - 1], format!("past_key_values.{}.value", layers - 1));
        assert_eq!(form.present_keys[0], "present.0.key");
        assert_eq!(folder.architecture, name.split_once('-').unwrap().0.replace("gemma3", "gemma3_text"));
        let listed = |name: &str| folder.files.iter().any(|file| file.name == name && file.sha256.len() == 64);
        assert!(listed("tokenizer.json") && listed("config.json") && listed(&folder.model), "{:?}", folder.files);
        assert_eq!(listed("model.onnx.data"), name.contains("genai"), "{:?}", folder.files);
        assert_eq!(folder.form.notes().len(), 3);
    }
}

#[test]
fn tokens_defaults_and_the_template_come_from_the_files_of_the_checkpoint() {
    let files = decoder("llama-genai");
    let folder = GenerateFolder::open(files.path()).unwrap();
    let tokens = &folder.tokens;
    assert_eq!((tokens.bos, &tokens.eos[..], tokens.pad, tokens.unk), (Some(1), &[2][..], Some(0), None));
    assert!(tokens.add_bos);
    // What genai_config.json has under `search`.
    let search = Generation {
        do_sample: Some(false),
        temperature: Some(1.0),
        top_k: Some(50),
        top_p: Some(1.0),
        repetition_penalty: Some(1.0),
        no_repeat_ngram_size: Some(0),
        ..Generation::default()
    };
    assert_eq!(folder.generation, search);
    assert_eq!(folder.text.chat_template.as_deref(), Some("tokenizer_config.json"));
    assert!(folder.chat_template().unwrap().unwrap().starts_with("{% for message in messages %}"));
    let bos = ("bos_token".to_owned(), "<s>".to_owned());
    assert!(folder.text.template_tokens.contains(&bos), "{:?}", folder.text.template_tokens);

    // generation_config.json comes before both, and a file of its own before the template in tokenizer_config.json.
    std::fs::copy(data("llm/llama/generation_config.json"), files.path().join("generation_config.json")).unwrap();
    std::fs::write(files.path().join("chat_template.jinja"), "{{ messages }}").unwrap();
    let folder = GenerateFolder::open(files.path()).unwrap();
    assert_eq!((folder.generation.do_sample, folder.generation.top_k), (Some(true), Some(20)));
    assert_eq!(folder.tokens.eos, [2, 4]);
    assert_eq!(folder.chat_template().unwrap().as_deref(), Some("{{ messages }}"));

    // Several templates by name.
    std::fs::remove_file(files.path().join("chat_template.jinja")).unwrap();
    let list = json!([{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]);
    edit(&files, "tokenizer_config.json", &[("/chat_template", list), ("/add_bos_token", Value::Null)]);
    let folder = GenerateFolder::open(files.path()).unwrap();
    assert_eq!(folder.chat_template().unwrap().as_deref(), Some("d"));
    assert!(folder.tokens.add_bos, "by the post-processor of tokenizer.json");
    edit(&files, "tokenizer_config.json", &[("/chat_template", Value::Null), ("/pad_token", json!("<pad>"))]);
    edit(&files, "generation_config.json", &[("/pad_token_id", json!(-1))]);
    let folder = GenerateFolder::open(files.path()).unwrap();
    assert_eq!((folder.chat_template().unwrap(), folder.tokens.pad), (None, None));
}

#[test]
fn the_version_is_that_of_all_files_and_they_are_described() {
    let files = decoder("llama-optimum");
    let first = GenerateFolder::open(files.path()).unwrap();
    assert_eq!(GenerateFolder::open(files.path()).unwrap(), first);
    let described: Value = serde_json::from_str(first.json()).unwrap();
    assert_eq!(described["version"], json!(first.version));
    assert_eq!((&described["form"], &described["kv"]["heads"]), (&json!("past_present"), &json!(2)));
    edit(&files, "config.json", &[("/rope_theta", json!(5))]);
    assert_ne!(GenerateFolder::open(files.path()).unwrap().version, first.version);
    match AnyFolder::open(files.path()).unwrap() {
        AnyFolder::Generate(folder) => assert_ne!(folder.version, first.version),
        other => panic!("{other:?}"),
    }
    let error = ModelFolder::open(files.path()).unwrap_err();
    assert!(error.message().contains("there is no pagoda.json in it"), "{error}");
}

#[test]
fn a_graph_may_lie_in_the_folder_onnx_with_its_weights() {
    let files = decoder("llama-genai");
    let path = files.path();
    std::fs::create_dir(path.join("onnx")).unwrap();
    for name in ["model.onnx", "model.onnx.data"] {
        std::fs::rename(path.join(name), path.join("onnx").join(name)).unwrap();
    }
    std::fs::remove_file(path.join("genai_config.json")).unwrap();
    let folder = GenerateFolder::open(path).unwrap();
    assert_eq!(folder.model, "onnx/model.onnx");
    assert!(folder.files.iter().any(|file| file.name == "onnx/model.onnx.data"));
    // config.json says it where genai_config.json is not there to.
    assert_eq!(folder.kv.head_size, 16);
}

#[test]
fn a_ring_of_tokens_is_refused_with_what_to_do() {
    let message = "model.onnx: the past of layer 1, \"past_key_values.1.key\", is a ring (sliding_window_cache), in which the \
                   oldest tokens are overwritten: it can not be shared or cut. Rewrite the graph with `pagoda convert`, or build \
                   it again with `--extra_options windowed_kv_cache=false`";
    assert_refused(&decoder("qwen2-genai-ring"), Status::Unsupported, message);
}

#[test]
fn contradictions_are_refused_with_both_numbers() {
    for (name, changes, message) in [
        (
            "config.json",
            ("/num_hidden_layers", json!(3)),
            "layers: the past of model.onnx has 2, and `num_hidden_layers` of config.json 3: they do not belong together",
        ),
        (
            "config.json",
            ("/num_key_value_heads", json!(1)),
            "heads of keys and values: \"past_key_values.0.key\" of model.onnx has 2, and `num_key_value_heads` of config.json 1",
        ),
        (
            "genai_config.json",
            ("/model/decoder/head_size", json!(8)),
            "numbers a head: `head_dim` of config.json has 16, and `model.decoder.head_size` of genai_config.json 8",
        ),
        (
            "config.json",
            ("/vocab_size", json!(300)),
            "logits a row: \"logits\" of model.onnx has 272, and `vocab_size` of config.json 300",
        ),
        ("config.json", ("/vocab_size", json!("272")), "`vocab_size`: expected a whole number from 1 to 2147483647"),
        ("config.json", ("/eos_token_id", json!(272)), "genai"),
        (
            "genai_config.json",
            ("/model/eos_token_id", json!([2, 272])),
            "genai_config.json: `model.eos_token_id[1]`: expected a whole number from 0 to 271, found 272",
        ),
        (
            "genai_config.json",
            ("/model/decoder/inputs/past_key_names", json!("past")),
            "`model.decoder.inputs.past_key_names`: expected a name with one %d for the layer, found \"past\"",
        ),
        (
            "genai_config.json",
            ("/model/decoder/filename", json!("../model.onnx")),
            "`model.decoder.filename`: expected the path of a file inside the folder",
        ),
    ] {
        let files = decoder("llama-genai");
        edit(&files, name, &[changes]);
        if message == "genai" {
            // genai_config.json is asked first.
            GenerateFolder::open(files.path()).unwrap();
            continue;
        }
        assert_refused(&files, Status::Model, message);
    }
}

#[test]
fn what_is_missing_is_named() {
    let without = |name: &str| {
        let files = decoder("llama-genai");
        std::fs::remove_file(files.path().join(name)).unwrap();
        files
    };
    assert_refused(&without("tokenizer.json"), Status::NotFound, "there is no tokenizer.json in it: copy the one of");
    let message = "model.onnx.data is missing, and weights of model.onnx are in it: copy the whole folder";
    assert_refused(&without("model.onnx.data"), Status::NotFound, message);
    let message = "model.onnx is missing, and genai_config.json names it as the graph";
    assert_refused(&without("model.onnx"), Status::NotFound, message);
    // What config.json alone says is not needed where genai_config.json says it too.
    GenerateFolder::open(without("config.json").path()).unwrap();
    let files = without("model.onnx");
    std::fs::remove_file(files.path().join("genai_config.json")).unwrap();
    let message = "there is neither a pagoda.json in it nor the graph of a decoder: none of model.onnx, decoder_model_merged.onnx";
    assert_refused(&files, Status::NotFound, message);
    let files = decoder("llama-optimum");
    edit(&files, "config.json", &[("/max_position_embeddings", Value::Null)]);
    let message =
        "config.json: `max_position_embeddings` is missing, and nothing else says how many tokens a sequence may have";
    assert_refused(&files, Status::Model, message);
    std::fs::write(files.path().join("config.json"), "[]").unwrap();
    assert_refused(&files, Status::Model, "config.json: expected an object");
}

#[test]
fn weights_and_tokenizers_are_checked() {
    let files = decoder("llama-genai");
    let path = files.path().join("model.onnx.data");
    let mut bytes = std::fs::read(&path).unwrap();
    let at = bytes.len() - 4;
    bytes[at..].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(path, bytes).unwrap();
    assert_refused(&files, Status::Model, " has NaN at index ");

    let files = decoder("llama-optimum");
    edit(&files, "tokenizer.json", &[("/model/vocab/beyond", json!(272))]);
    let message = "tokenizer.json: it has the token 272, \"beyond\", and the model has 272, from 0 on: they do not belong together";
    assert_refused(&files, Status::Model, message);
    edit(&files, "tokenizer.json", &[("/model", json!({}))]);
    assert_refused(&files, Status::Model, "tokenizer.json: there is no vocabulary under `model.vocab`");
    std::fs::write(files.path().join("model.onnx"), "no graph").unwrap();
    assert_refused(&files, Status::Model, "model.onnx: this is no ONNX model");
}

/// The declared inputs and outputs of a decoder of one layer, some of them others.
struct Declaration {
    inputs: Vec<(&'static str, Element, Vec<Dim>)>,
    outputs: Vec<(&'static str, Element, Vec<Dim>)>,
}

impl Declaration {
    fn new() -> Self {
        let any = |count: usize| (0..count).map(|_| Dim::Any("n")).collect::<Vec<_>>();
        let past = || vec![Dim::Any("batch"), Dim::Is(2), Dim::Any("past"), Dim::Is(16)];
        let inputs = vec![
            ("input_ids", I64, any(2)),
            ("attention_mask", I64, any(2)),
            ("position_ids", I64, any(2)),
            ("past_key_values.0.key", F32, past()),
            ("past_key_values.0.value", F32, past()),
        ];
        let outputs = vec![
            ("logits", F32, vec![Dim::Any("batch"), Dim::Any("new"), Dim::Is(272)]),
            ("present.0.key", F32, past()),
            ("present.0.value", F32, past()),
        ];
        Self { inputs, outputs }
    }

    /// Another declaration of an input or an output; without dimensions it is removed.
    fn with(mut self, name: &'static str, element: Element, dims: Vec<Dim>) -> Self {
        let is_output = self.outputs.iter().any(|(other, ..)| *other == name);
        let values = if is_output { &mut self.outputs } else { &mut self.inputs };
        values.retain(|(other, ..)| *other != name);
        if !dims.is_empty() {
            values.push((name, element, dims));
        }
        self
    }

    fn folder(&self) -> Folder {
        let mut graph = Graph::new();
        for (name, element, dims) in &self.inputs {
            graph = graph.input(name, *element, dims);
        }
        for (name, element, dims) in &self.outputs {
            graph = graph.output(name, *element, dims);
        }
        let files = decoder("llama-1-optimum-merged");
        std::fs::write(files.path().join("decoder_model_merged.onnx"), graph.to_bytes()).unwrap();
        files
    }
}

#[test]
fn graphs_that_can_not_be_run_are_refused_by_name() {
    use Dim::{Any, Is};
    let any = || Any("n");
    GenerateFolder::open(Declaration::new().folder().path()).unwrap();
    for (name, element, dims, status, message) in [
        (
            "present.0.value",
            F32,
            vec![],
            Status::Model,
            "it has no output \"present.0.value\", which has the keys or values that the next call needs; it has logits, \
             present.0.key. Export the model again",
        ),
        ("logits", F32, vec![], Status::Model, "it has no output \"logits\", which has the scores of the next token"),
        ("attention_mask", I64, vec![], Status::Model, "it has no input \"attention_mask\"; it takes input_ids, "),
        (
            "past_key_values.0.key",
            F32,
            vec![],
            Status::Unsupported,
            "it takes no \"past_key_values.0.key\", so that it is no decoder with a past; it takes input_ids, attention_mask, ",
        ),
        (
            "past_key_values.0.value",
            F32,
            vec![any(), Is(4), any(), Is(16)],
            Status::Model,
            "\"past_key_values.0.value\" has 4 heads, and \"past_key_values.0.key\" has 2: only decoders whose layers",
        ),
        (
            "present.0.key",
            F32,
            vec![any(), Is(2), any(), Is(8)],
            Status::Model,
            "\"present.0.key\" has 8 numbers a head, and \"past_key_values.0.key\" has 16",
        ),
        (
            "present.0.key",
            F32,
            vec![any(), any(), any()],
            Status::Unsupported,
            "\"present.0.key\" has 3 dimensions, expected 4",
        ),
        (
            "past_key_values.0.value",
            F16,
            vec![any(), Is(2), any(), Is(16)],
            Status::Unsupported,
            "\"past_key_values.0.value\" has the type f16, and \"past_key_values.0.key\" f32",
        ),
        (
            "past_key_values.0.key",
            I32,
            vec![any(), Is(2), any(), Is(16)],
            Status::Unsupported,
            "\"past_key_values.0.key\" has the type i32, and here it has to be f32 or f16 or bf16",
        ),
        (
            "input_ids",
            I32,
            vec![any(), any()],
            Status::Unsupported,
            "\"input_ids\" has the type i32, and here it has to be i64",
        ),
        (
            "logits",
            F32,
            vec![any(), Is(1), Is(272)],
            Status::Unsupported,
            "dimension 1 of \"logits\" is 1, and has to be free, for batches and sequences of any size",
        ),
        (
            "past_key_values.0.key",
            F32,
            vec![Is(1), Is(2), any(), Is(16)],
            Status::Unsupported,
            "dimension 0 of \"past_key_values.0.key\" is 1, and has to be free",
        ),
        (
            "inputs_embeds",
            F32,
            vec![any(), any(), Is(32)],
            Status::Unsupported,
            "it takes the input \"inputs_embeds\", which is not known here: export a decoder of text alone",
        ),
        ("use_cache_branch", I64, vec![Is(1)], Status::Unsupported, "\"use_cache_branch\" has the type i64"),
    ] {
        let files = Declaration::new().with(name, element, dims).folder();
        assert_refused(&files, status, &format!("decoder_model_merged.onnx: {message}"));
    }
    let files = Declaration::new().with("use_cache_branch", BOOL, vec![Is(1)]).folder();
    assert!(form(&GenerateFolder::open(files.path()).unwrap()).use_cache_branch.is_some());
}
