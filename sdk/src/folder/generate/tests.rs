use std::path::Path;

use pagoda_test_support::{Folder, Graph};
use serde_json::{Value, json};

use super::*;
use crate::checksum::sha256_hex;
use crate::error::{Error, Status};
use crate::folder::{AnyFolder, ModelKind};
use crate::tensor::ElementType;

/// What pagoda.json says of a model of two layers with int8 pages.
fn manifest() -> Value {
    json!({
        "format": 1,
        "kind": "generate",
        "version": "0".repeat(64),
        "model": "model.onnx",
        "architecture": "llama",
        "compute": "f16",
        "weights": "int4",
        "vocab_size": 100,
        "hidden_size": 24,
        "attention": {"layers": 2, "heads": 6, "windows": [0, 512]},
        "kv": {
            "layers": 2, "heads": 3, "head_size": 8, "page_size": 32, "type": "f16", "format": "int8",
            "bytes_per_token": 2 * 2 * 3 * (8 + 4),
        },
        "limits": {"max_context": 2048},
        "tokens": {"bos": 1, "eos": [2, 99], "pad": null, "unk": 0, "add_bos": true},
        "generation": {"do_sample": true, "temperature": 0.2, "top_p": 0.9, "top_k": 50, "max_new_tokens": 20},
        "text": {"tokenizer": "tokenizer.json", "chat_template": "chat_template.jinja", "template_tokens": {"bos_token": "<s>"}},
        "inputs": {
            "input_ids": "input_ids", "positions": "positions", "row_offsets": "row_offsets",
            "cached_len": "cached_len", "page_indptr": "page_indptr", "page_ids": "page_ids",
            "logits_rows": "logits_rows", "kv_pools": ["kv_pool_0", "kv_pool_1"],
            "kv_scales": ["kv_scales_0", "kv_scales_1"],
        },
        "outputs": {
            "logits": "logits", "kv_pools": ["kv_pool_0_out", "kv_pool_1_out"],
            "kv_scales": ["kv_scales_0_out", "kv_scales_1_out"],
        },
    })
}

/// Writes a folder with this pagoda.json, and with `files` and `version` as they have to be.
fn write(path: &Path, mut manifest: Value) {
    let graph = Graph::new().weight("w", &[2], &[1.0, 2.0]).to_bytes();
    let files =
        [("model.onnx", graph), ("tokenizer.json", b"{}".to_vec()), ("chat_template.jinja", b"{{ x }}".to_vec())];
    let mut listed = json!({});
    for (name, bytes) in files {
        listed[name] = json!({"bytes": bytes.len(), "sha256": sha256_hex(&bytes)});
        std::fs::write(path.join(name), bytes).unwrap();
    }
    if manifest.get("files").is_none() {
        manifest["files"] = listed;
    }
    let text = manifest.to_string();
    let version = sha256_hex(text.as_bytes());
    std::fs::write(path.join("pagoda.json"), text.replacen(&"0".repeat(64), &version, 1)).unwrap();
}

fn open(manifest: Value) -> Result<GenerateFolder> {
    let folder = Folder::new();
    write(folder.path(), manifest);
    let opened = GenerateFolder::open(folder.path());
    let any = AnyFolder::open(folder.path());
    assert_eq!(any.map(|any| any.kind), opened.as_ref().map(|opened| opened.kind).map_err(Error::clone));
    opened
}

/// The manifest with other values, by place.
fn with(changes: &[(&str, Value)]) -> Value {
    let mut manifest = manifest();
    for (place, value) in changes {
        let (object, key) = place.rsplit_once('/').unwrap();
        manifest.pointer_mut(object).unwrap()[key] = value.clone();
    }
    manifest
}

#[test]
fn a_folder_says_what_it_is() {
    let folder = open(manifest()).unwrap();
    assert_eq!((folder.kind, folder.architecture.as_str()), (ModelKind::Generate, "llama"));
    assert_eq!((folder.compute, folder.weights), (ElementType::F16, WeightFormat::Int4));
    assert_eq!((folder.vocab_size, folder.hidden_size, folder.limits.max_context), (100, 24, 2048));
    assert_eq!(folder.attention, Attention { layers: 2, heads: 6, windows: vec![0, 512] });
    assert_eq!((folder.kv.format, folder.kv.format_name(), folder.kv.bytes_per_token), (KvFormat::Int8, "int8", 144));
    let tokens = SpecialTokens { bos: Some(1), eos: vec![2, 99], pad: None, unk: Some(0), add_bos: true };
    assert_eq!(folder.tokens, tokens);
    let generation = Generation {
        do_sample: Some(true),
        temperature: Some(0.2),
        top_k: Some(50),
        top_p: Some(0.9),
        max_new_tokens: Some(20),
        ..Generation::default()
    };
    assert_eq!(folder.generation, generation);
    assert_eq!(folder.text.chat_template.as_deref(), Some("chat_template.jinja"));
    assert_eq!(folder.text.template_tokens, [("bos_token".to_owned(), "<s>".to_owned())]);
    assert_eq!(folder.inputs.positions.as_deref(), Some("positions"));
    assert_eq!(folder.outputs.kv_scales, ["kv_scales_0_out", "kv_scales_1_out"]);
    assert_eq!((folder.sequence_bytes(32), folder.sequence_bytes(33)), (32 * 144, 64 * 144));
    // The graph alone.
    assert_eq!(folder.model_bytes(), folder.files.iter().find(|file| file.name == "model.onnx").unwrap().bytes);
}

#[test]
fn the_cpu_may_have_a_graph_of_its_own_whose_weights_are_checked() {
    let folder = Folder::new();
    let graph = |number: f32| Graph::new().weight("w", &[2], &[1.0, number]).to_bytes();
    let write = |for_cpu: Vec<u8>| {
        let described = |bytes: &[u8]| json!({"bytes": bytes.len(), "sha256": sha256_hex(bytes)});
        let files = json!({
            "model.onnx": described(&graph(2.0)), "model.cpu.onnx": described(&for_cpu),
            "tokenizer.json": described(b"{}"), "chat_template.jinja": described(b"{{ x }}"),
        });
        let changes =
            [("/cpu_model", json!("model.cpu.onnx")), ("/outputs/logits_max", json!("max")), ("/files", files)];
        write(folder.path(), with(&changes));
        std::fs::write(folder.path().join("model.cpu.onnx"), for_cpu).unwrap();
        GenerateFolder::open(folder.path())
    };
    let opened = write(graph(3.0)).unwrap();
    assert_eq!(opened.cpu_model.as_deref(), Some("model.cpu.onnx"));
    assert_eq!(opened.outputs.logits_max.as_deref(), Some("max"));
    let error = write(graph(f32::NAN)).unwrap_err();
    assert!(error.message().contains("model.cpu.onnx: the tensor \"w\""), "{error}");
    assert!(open(manifest()).unwrap().cpu_model.is_none());
}

#[test]
fn what_a_model_may_lack_may_be_null_or_empty() {
    let folder = open(with(&[
        ("/tokens/bos", Value::Null),
        ("/tokens/add_bos", json!(false)),
        ("/tokens/eos", json!([])),
        ("/generation", json!({})),
        ("/text/chat_template", Value::Null),
        ("/inputs/positions", Value::Null),
    ]))
    .unwrap();
    assert_eq!(
        (folder.tokens.bos, folder.text.chat_template.as_ref(), folder.inputs.positions.as_ref()),
        Default::default()
    );
    assert!(folder.tokens.eos.is_empty() && folder.generation == Generation::default());
}

#[test]
fn every_format_of_pages_has_its_bytes_and_scales() {
    for (compute, format, bytes) in [
        ("f32", "native", 8 * 4),
        ("bf16", "native", 8 * 2),
        ("f16", "int8", 8 + 4),
        ("f32", "int4", 4 + 4),
        ("f16", "fp8", 8 + 2),
    ] {
        let names =
            |name: &str| if format == "native" { json!([]) } else { json!([format!("{name}0"), format!("{name}1")]) };
        let manifest = |bytes: usize| {
            with(&[
                ("/compute", json!(compute)),
                ("/kv/type", json!(compute)),
                ("/kv/format", json!(format)),
                ("/kv/bytes_per_token", json!(2 * 2 * 3 * bytes)),
                ("/inputs/kv_scales", names("s")),
                ("/outputs/kv_scales", names("t")),
            ])
        };
        assert_eq!(open(manifest(bytes)).unwrap().kv.format_name(), format);
        let error = open(manifest(bytes + 1)).unwrap_err();
        let message = format!("`kv.bytes_per_token`: expected {}, by the other entries of `kv`, found ", 12 * bytes);
        assert!(error.message().contains(&message), "{error}");
    }
}

#[test]
fn what_does_not_fit_is_refused_by_its_place() {
    let (none, three) = (json!([]), json!(["a", "b", "c"]));
    for (place, value, message) in [
        ("/architecture", json!(""), "`architecture`: expected a text that is not empty, found \"\""),
        ("/compute", json!("i8"), "`compute`: expected f32 or f16 or bf16, found \"i8\""),
        ("/weights", json!("int3"), "`weights`: expected native or int8 or int4, found \"int3\""),
        ("/vocab_size", json!(0), "`vocab_size`: expected a whole number from 1 to 2147483647, found 0"),
        ("/vocab_size", json!(99), "`tokens.eos[1]`: expected a whole number from 0 to 98, found 99"),
        ("/hidden_size", json!(-1), "`hidden_size`: expected a whole number"),
        ("/attention/layers", json!(3), "`kv.layers` is 2, and `attention.layers` 3"),
        ("/attention/heads", json!(7), "`attention.heads` is 7, which is no multiple of `kv.heads`, 3"),
        ("/attention/windows", json!([0]), "`attention.windows` has 1 windows for 2 layers"),
        ("/attention/windows", json!([0, -1]), "`attention.windows[1]`: expected a whole number"),
        ("/kv/heads", json!(0), "`kv.heads`: expected a whole number from 1 to"),
        ("/kv/page_size", json!(20), "`kv.page_size`: expected a multiple of 8, found 20"),
        ("/kv/type", json!("f32"), "`kv.type` is f32, and keys and values are computed in f16"),
        ("/kv/format", json!("int2"), "`kv.format`: expected native or int8 or int4 or fp8, found \"int2\""),
        ("/kv/bytes_per_token", json!(145), "`kv.bytes_per_token`: expected 144, by the other entries"),
        ("/kv/head_size", json!(i32::MAX), "`kv.bytes_per_token`: expected 25769803812, by the other entries"),
        ("/limits", json!({}), "`limits.max_context` is missing"),
        ("/limits/max_context", json!(1_u64 << 31), "`limits.max_context`: expected a whole number from 1 to"),
        ("/tokens/bos", json!(100), "`tokens.bos`: expected a whole number from 0 to 99, found 100"),
        ("/tokens/bos", Value::Null, "`tokens.add_bos`: expected false, for `tokens.bos` is null, found true"),
        ("/tokens/eos", json!(2), "`tokens.eos`: expected a list of tokens, found 2"),
        ("/tokens/pad", json!(-1), "`tokens.pad`: expected a whole number from 0 to 99, found -1"),
        ("/tokens/unk", json!("?"), "`tokens.unk`: expected a whole number"),
        ("/generation", json!([]), "`generation`: expected an object, found a list of 0"),
        ("/generation/do_sample", json!(1), "`generation.do_sample`: expected true or false, found 1"),
        ("/generation/temperature", json!(-0.1), "`generation.temperature`: expected a number, 0 or more, found -0.1"),
        ("/generation/top_k", json!(0.5), "`generation.top_k`: expected a whole number"),
        ("/generation/top_p", json!(1.5), "`generation.top_p`: expected a number from 0 to 1, found 1.5"),
        ("/generation/min_p", json!(1.1), "`generation.min_p`: expected a number from 0 to 1, found 1.1"),
        ("/generation/repetition_penalty", json!(0.0), "`generation.repetition_penalty`: expected a number above 0"),
        ("/generation/repetition_penalty", json!(-1), "`generation.repetition_penalty`: expected a number, 0 or more"),
        ("/generation/no_repeat_ngram_size", json!(-1), "`generation.no_repeat_ngram_size`: expected a whole number"),
        ("/generation/max_new_tokens", json!(0), "`generation.max_new_tokens`: expected a whole number from 1 to"),
        (
            "/generation/min_new_tokens",
            json!(21),
            "`generation.min_new_tokens`: expected at most `generation.max_new_tokens`, 20, found 21",
        ),
        ("/text/tokenizer", json!("../t.json"), "`text.tokenizer`: expected the path of a file inside the folder"),
        ("/text/tokenizer", json!("other.json"), "`files` does not have other.json"),
        (
            "/text/template_tokens",
            json!({"eos_token": 3}),
            "`text.template_tokens.eos_token`: expected a text, found 3",
        ),
        ("/text/chat_template", json!("other.jinja"), "`files` does not have other.jinja"),
        ("/inputs/logits_rows", Value::Null, "`inputs.logits_rows`: expected a text that is not empty, found null"),
        ("/inputs/page_ids", json!("kv_pool_1"), "`inputs` has \"kv_pool_1\" twice"),
        (
            "/inputs/kv_pools",
            three.clone(),
            "`inputs.kv_pools` has 3 names, and pages of the format int8 in 2 layers have 2",
        ),
        (
            "/inputs/kv_scales",
            none.clone(),
            "`inputs.kv_scales` has 0 names, and pages of the format int8 in 2 layers have 2",
        ),
        ("/outputs/logits", json!("kv_pool_0_out"), "`outputs` has \"kv_pool_0_out\" twice"),
        ("/outputs/logits_max", json!("logits"), "`outputs` has \"logits\" twice"),
        ("/cpu_model", json!("other.onnx"), "`files` does not have other.onnx"),
        ("/cpu_model", json!("../m.onnx"), "`cpu_model`: expected the path of a file inside the folder"),
        ("/outputs/kv_pools", none, "`outputs.kv_pools` has 0 names"),
        ("/outputs/kv_scales", three, "`outputs.kv_scales` has 3 names"),
        ("/files", json!({}), "`files` does not have tokenizer.json"),
    ] {
        let error = open(with(&[(place, value.clone())])).expect_err(place);
        assert_eq!((error.status(), error.argument()), (Status::Model, Some("folder")), "{error}");
        assert!(error.message().contains(&format!("pagoda.json: {message}")), "{place} = {value}: {error}");
    }
}

#[test]
fn native_pages_have_no_scales() {
    let native = [("/kv/format", json!("native")), ("/kv/bytes_per_token", json!(2 * 2 * 3 * 16))];
    let error = open(with(&native)).unwrap_err();
    let message = "`inputs.kv_scales` has 2 names, and pages of the format native in 2 layers have 0";
    assert!(error.message().contains(message), "{error}");
}

/// A manifest in the functional form, as `pagoda-export --form functional` writes it.
fn functional(changes: &[(&str, Value)]) -> Value {
    let mut manifest = manifest();
    manifest["form"] = json!("functional");
    manifest["kv"]["format"] = json!("native");
    manifest["kv"]["bytes_per_token"] = json!(2 * 2 * 3 * 16);
    manifest["inputs"] = json!({
        "input_ids": "input_ids", "position_ids": "position_ids", "key_slots": "key_slots", "value_slots": "value_slots",
        "attention_mask": "attention_mask", "kv_pools": ["kv_pool.0", "kv_pool.1"],
    });
    manifest["outputs"] = json!({
        "logits": "logits", "new_keys": ["new_key.0", "new_key.1"], "new_values": ["new_value.0", "new_value.1"],
    });
    for (place, value) in changes {
        let (object, key) = place.rsplit_once('/').unwrap();
        manifest.pointer_mut(object).unwrap()[key] = value.clone();
    }
    manifest
}

#[test]
fn the_functional_form_has_names_of_its_own() {
    let folder = open(functional(&[])).unwrap();
    let Form::Functional(names) = &folder.form else { panic!("{:?}", folder.form) };
    assert_eq!((names.key_slots.as_str(), names.new_values[1].as_str()), ("key_slots", "new_value.1"));
    assert_eq!(folder.inputs, Inputs::default());
    let (inputs, outputs) = folder.graph_names();
    assert_eq!((inputs.len(), outputs.len()), (7, 5));
    assert_eq!((folder.form.name(), folder.form.notes().len()), ("functional", 3));
    for (changes, message) in [
        (("/inputs/key_slots", Value::Null), "`inputs.key_slots`: expected a text that is not empty, found null"),
        (("/inputs/value_slots", json!("key_slots")), "`inputs` has \"key_slots\" twice"),
        (("/inputs/kv_pools", json!(["a"])), "`inputs.kv_pools` has 1 names for 2 layers"),
        (("/outputs/new_keys", json!([])), "`outputs.new_keys` has 0 names for 2 layers"),
        (
            ("/cpu_model", json!("model.onnx")),
            "`cpu_model` is for the form \"paged\", and this folder has \"functional\"",
        ),
    ] {
        let error = open(functional(&[changes])).unwrap_err();
        assert!(error.message().contains(message), "{error}");
    }
    let int8 = [("/kv/format", json!("int8")), ("/kv/bytes_per_token", json!(144))];
    let error = open(functional(&int8)).unwrap_err();
    assert!(
        error.message().contains("`kv.format` is \"int8\", and the form \"functional\" has native pages alone"),
        "{error}"
    );
}

#[test]
fn a_form_that_is_not_known_is_refused() {
    let mut other = manifest();
    other["form"] = json!("folded");
    let error = open(other).unwrap_err();
    assert_eq!(error.status(), Status::Unsupported, "{error}");
    assert!(
        error.message().contains("the form \"folded\" and this Pagoda knows \"paged\" and \"functional\""),
        "{error}"
    );
    let mut paged = manifest();
    paged["form"] = json!("paged");
    assert_eq!(open(paged).unwrap().form, Form::Paged);
}

#[test]
fn heads_of_int4_pages_are_of_an_even_size() {
    let odd = [("/kv/format", json!("int4")), ("/kv/head_size", json!(7))];
    let error = open(with(&odd)).unwrap_err();
    assert!(error.message().contains("`kv.head_size`: expected an even number"), "{error}");
}

#[test]
fn every_entry_is_needed() {
    let mut places: Vec<String> = manifest().as_object().unwrap().keys().map(|key| format!("/{key}")).collect();
    for object in ["attention", "kv", "limits", "tokens", "text", "inputs", "outputs"] {
        places.extend(manifest()[object].as_object().unwrap().keys().map(|key| format!("/{object}/{key}")));
    }
    for place in places.iter().filter(|place| *place != "/kind") {
        let (object, key) = place.rsplit_once('/').unwrap();
        let mut manifest = manifest();
        manifest.pointer_mut(object).unwrap().as_object_mut().unwrap().remove(key);
        let error = open(manifest).expect_err(place);
        let message = format!("pagoda.json: `{}` is missing", place[1..].replace('/', "."));
        assert!(error.message().contains(&message), "{error}");
    }
}

#[test]
fn a_file_that_was_changed_is_named() {
    for name in ["model.onnx", "tokenizer.json", "chat_template.jinja"] {
        let folder = Folder::new();
        write(folder.path(), manifest());
        let path = folder.path().join(name);
        let mut bytes = std::fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&path, bytes).unwrap();
        let error = GenerateFolder::open(folder.path()).unwrap_err();
        assert_eq!(error.status(), Status::Model);
        assert!(error.message().contains(&format!("{name} was changed: its SHA-256 is ")), "{error}");
    }
}
