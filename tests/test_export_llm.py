"""Language models: the exporter's folders give transformers' logits, however the tokens come; and what is refused.

tests/data/llm has a small random model of every architecture, with logits (make.py there says how they were made)."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import onnx
import pytest
import tiny_gguf
from capi import ROOT
from paged import Paged
from pagoda.export import ExportError, export_language_model
from pagoda.export.__main__ import main as command
from pagoda.export.llm import architectures, quantise
from safetensors.numpy import load_file, save_file

MODELS = ROOT / "tests/data/llm"
NAMES = sorted(path.parent.name for path in MODELS.glob("*/expected.safetensors"))
# Keys are rotated by the base of the length when they came, as transformers does it token by token.
STEPWISE = "llama-rope-dynamic"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Makes folders, each once."""
    made = {}

    def make(name, **options):
        key = (name, *options.items())
        if key not in made:
            made[key] = tmp_path_factory.mktemp("folder") / "out"
            export_language_model(MODELS / name, made[key], **options)
        return made[key]

    return make


def prompts(name):
    """The prompts of a model with their logits."""
    expected = load_file(MODELS / name / "expected.safetensors")
    logits = "logits_stepwise" if name == STEPWISE else "logits"
    return [(expected[f"input_ids.{index}"], expected[f"{logits}.{index}"]) for index in range(2)]


def error(got, want):
    return np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want)


# ---- logits ------------------------------------------------------------------------------------------------------


def test_every_architecture_has_a_model():
    types = {json.loads((MODELS / name / "config.json").read_text())["model_type"] for name in NAMES}
    assert types == set(architectures.BY_TYPE)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(exported, name):
    for tokens, want in prompts(name):
        assert error(Paged(exported(name)).step({"a": tokens})["a"], want) <= 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_chunks_tokens_and_batches_give_the_same_bits(exported, name):
    (first, _), (second, _) = prompts(name)
    whole = Paged(exported(name)).step({"a": first})["a"]
    model = Paged(exported(name), seed=2)
    steps = [model.step({"a": first[at : at + 1]})["a"] for at in range(len(first))]
    assert np.array_equal(np.concatenate(steps), whole)
    model = Paged(exported(name), seed=3)
    # A prefill beside a decode, in both orders.
    begun = model.step({"b": second[:3], "a": first[:7]})["a"]
    middle = model.step({"a": first[7:8], "b": second[3:]})["a"]
    assert np.array_equal(np.concatenate([begun, middle, model.step({"a": first[8:]})["a"]]), whole)


@pytest.mark.parametrize("name", ["llama", "gemma3", "baichuan2-13b"])
def test_logits_are_of_the_rows_that_are_asked_for(exported, name):
    (first, _), (second, _) = prompts(name)
    whole = Paged(exported(name)).step({"a": first, "b": second})
    last = [len(first) - 1, len(first) + len(second) - 1, len(first)]
    got = Paged(exported(name)).step({"a": first, "b": second}, last)
    assert np.array_equal(got["a"], whole["a"][-1:])
    assert np.array_equal(got["b"], whole["b"][[-1, 0]])
    none = Paged(exported(name)).step({"a": first, "b": second}, [])
    assert none["a"].shape == (0, 272)


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3"])
def test_half_precision_is_close(exported, name):
    for tokens, want in prompts(name):
        assert error(Paged(exported(name, compute="f16")).step({"a": tokens})["a"], want) <= 1e-2


@pytest.mark.parametrize("kv", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_quantised_pages_are_close_and_the_same_in_chunks(exported, name, kv):
    tokens, want = prompts(name)[0]
    whole = Paged(exported(name, kv=kv)).step({"a": tokens})["a"]
    assert 1e-5 < error(whole, want) <= {"int8": 0.03, "fp8": 0.15, "int4": 0.4}[kv]
    model = Paged(exported(name, kv=kv))
    chunks = [model.step({"a": part})["a"] for part in (tokens[:5], tokens[5:6], tokens[6:])]
    assert np.array_equal(np.concatenate(chunks), whole)


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "baichuan2-7b"])
def test_quantised_weights_are_those_of_their_blocks(exported, tmp_path, name, form):
    """The graphs with 8 and 4 bits against the native one of the same weights, rounded to blocks beforehand."""
    shutil.copytree(MODELS / name, tmp_path / "rounded")
    weights = load_weights(tmp_path / "rounded")
    for key, values in weights.items():
        if values.ndim == 2 and values.shape[1] % 32 == 0:
            values = values.astype(np.float32)
            if key == "lm_head.weight" and name.startswith("baichuan"):
                values /= np.linalg.norm(values, axis=1, keepdims=True)
            bits = 8 if form == "int8" or key in ("model.embed_tokens.weight", "lm_head.weight") else 4
            weights[key] = quantise.values(quantise.quantised(values, bits))
    save_weights(tmp_path / "rounded", weights)
    export_language_model(tmp_path / "rounded", tmp_path / "native")
    folder = tmp_path / "exact"
    shutil.copytree(exported(name, weights=form), folder)
    set_accuracy(folder, 0)
    tokens, _ = prompts(name)[0]
    want = Paged(tmp_path / "native").step({"a": tokens})["a"]
    tolerance = 1e-2 if name.startswith("baichuan") else 1e-4
    assert error(Paged(folder, graph="model").step({"a": tokens})["a"], want) <= tolerance
    # As it is exported: activations of products by 8 bits are rounded.
    assert error(Paged(exported(name, weights=form), graph="model").step({"a": tokens})["a"], want) <= 0.15
    # What the CPU runs rounds nothing.
    assert error(Paged(exported(name, weights=form)).step({"a": tokens})["a"], want) <= tolerance


def test_the_cpu_has_a_graph_of_its_own_where_it_is_faster(exported):
    for options, own in [
        ({}, False),
        ({"weights": "int4"}, True),
        ({"weights": "int8"}, True),
        ({"weights": "int4", "compute": "f16"}, False),
    ]:
        folder = exported("llama", **options)
        manifest = json.loads((folder / "pagoda.json").read_text())
        assert ("cpu_model" in manifest, "model.cpu.onnx" in manifest["files"]) == (own, own)
        assert ("logits_max" in manifest["outputs"]) == own
        graphs = [onnx.load(folder / name, load_external_data=False).graph for name in manifest["files"] if name.endswith("onnx")]
        inputs = [[value.name for value in graph.input] for graph in graphs]
        outputs = [[value.name for value in graph.output if value.name != "logits_max"] for graph in graphs]
        assert inputs == inputs[:1] * len(graphs) and outputs == outputs[:1] * len(graphs)
        for graph in graphs:
            used = {name for node in graph.node for name in node.input}
            assert {tensor.name for tensor in graph.initializer} <= used


def set_accuracy(folder, level):
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for attribute in (attribute for node in model.graph.node for attribute in node.attribute):
        if attribute.name == "accuracy_level":
            attribute.i = level
    (folder / "model.onnx").write_bytes(model.SerializeToString())


def load_weights(folder):
    files = sorted(folder.glob("model*.safetensors"))
    return {name: values for file in files for name, values in load_file(file).items()}


def save_weights(folder, weights):
    for file in folder.glob("model*.safetensors*"):
        file.unlink()
    save_file(weights, folder / "model.safetensors")


def test_blocks_of_zeros_and_of_one_value_are_exact():
    for bits in (4, 8):
        rows = np.zeros((2, 64), np.float32)
        rows[1, 32:] = 0.5
        assert np.array_equal(quantise.values(quantise.quantised(rows, bits)), rows)


def test_sharded_weights_are_one_model(exported, tmp_path):
    folder = tmp_path / "sharded"
    shutil.copytree(MODELS / "llama", folder)
    weights = load_weights(folder)
    for file in folder.glob("model*.safetensors*"):
        file.unlink()
    places = {}
    for part in range(3):
        names = sorted(weights)[part::3]
        save_file({name: weights[name] for name in names}, folder / f"model-{part}.safetensors")
        places |= {name: f"model-{part}.safetensors" for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    export_language_model(folder, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(exported("llama"))
    (folder / "model-1.safetensors").unlink()
    refused(folder, "model-1.safetensors is missing: fetch all files of the model")


def test_an_export_is_the_same_every_time(exported, tmp_path):
    export_language_model(MODELS / "gemma3", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(exported("gemma3"))


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_rope_parameters_of_transformers_5_are_read(exported, tmp_path):
    """Its configurations have the base and the scaling in one entry, by the kind of layer where kinds differ."""
    for name in ("llama-rope-linear", "llama-rope-llama3", "gemma3"):
        config = json.loads((MODELS / name / "config.json").read_text())
        scaling = (config.pop("rope_scaling", None) or {"rope_type": "default"}) | {"rope_theta": config.pop("rope_theta")}
        if name == "gemma3":
            local = {"rope_type": "default", "rope_theta": config.pop("rope_local_base_freq")}
            scaling = {"full_attention": scaling, "sliding_attention": local}
        shutil.copytree(MODELS / name, tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps(config | {"rope_parameters": scaling}))
        export_language_model(tmp_path / name, tmp_path / f"{name}-out")
        assert contents(tmp_path / f"{name}-out") == contents(exported(name))


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("types", [("Q4_0", "Q8_0"), ("Q4_1", "Q8_0"), ("Q4_0", "Q4_1"), ("Q4_1", "F16"), ("Q4_0", "F16")])
def test_parts_of_several_gguf_types_are_as_near_as_one(tmp_path, types, form):
    """Values of 4 bits beside others, in one matrix of 8 bits."""
    one, other = (tiny_gguf.TYPE[name] for name in types)
    tiny = tiny_gguf.Tiny("llama", kind=one, tied=True)
    # So that neither the weights nor the activations grow from layer to layer.
    tiny.theirs = {name: values / (8 if values.ndim == 2 else 1) for name, values in tiny.theirs.items()}
    tiny.kinds = {f"blk.{layer}.{part}.weight": other for layer in range(2) for part in ("attn_v", "ffn_up")}
    path = tmp_path / "mixed.gguf"
    tiny.write(path)
    for weights in ("native", form):
        export_language_model(path, tmp_path / weights, weights=weights)
    tokens = np.arange(24) % 30
    want = Paged(tmp_path / "native").step({"a": tokens})["a"]
    got = Paged(tmp_path / form).step({"a": tokens})["a"]
    # What the file does not have in blocks is quantised anew.
    assert 0 < error(got, want) <= (0.3 if form == "int4" and "F16" in types else 0.1)
    # A table of rows has no native copy, whatever its type.
    model = onnx.load(tmp_path / form / "model.onnx", load_external_data=False)
    assert not [tensor.name for tensor in model.graph.initializer if tensor.name == "embedding.weight"]


def test_tokens_beyond_the_vocabulary_are_left_out(exported, tmp_path):
    """Tokenizers of models with images have one that their text models have no logits for."""
    shutil.copytree(MODELS / "gemma3", tmp_path / "gemma3")
    tokenizer = json.loads((tmp_path / "gemma3/tokenizer.json").read_text())
    added = tokenizer.get("added_tokens", []) + [{"id": 272, "content": "<image_soft_token>", "special": True}]
    (tmp_path / "gemma3/tokenizer.json").write_text(json.dumps(tokenizer | {"added_tokens": added}))
    export_language_model(tmp_path / "gemma3", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(exported("gemma3"))


@pytest.mark.parametrize("layout", ["language_model.{}", "{}"])
def test_the_text_model_of_gemma_3_with_images(exported, tmp_path, layout):
    folder = tmp_path / "images"
    shutil.copytree(MODELS / "gemma3", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": config, "vision_config": {}}))
    names = {name: layout.format(name) for name in load_weights(folder)}
    if layout == "{}":
        names = {name: name.replace("model.", "model.language_model.", 1) for name in names}
    weights = {names[name]: values for name, values in load_weights(folder).items()}
    weights["vision_tower.patch.weight"] = weights["model.multi_modal_projector.norm.weight"] = np.zeros(3, np.float32)
    save_weights(folder, weights)
    export_language_model(folder, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(exported("gemma3"))


def test_null_stands_for_the_default(exported, tmp_path):
    folder = tmp_path / "llama"
    shutil.copytree(MODELS / "llama", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= dict.fromkeys(("attention_bias", "mlp_bias", "head_dim", "rope_scaling", "partial_rotary_factor", "hidden_act"))
    (folder / "config.json").write_text(json.dumps(config))
    export_language_model(folder, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(exported("llama"))


def test_gemma_in_half_precision_is_refused(tmp_path):
    shutil.copytree(MODELS / "gemma3", tmp_path / "gemma3")
    refused(tmp_path / "gemma3", "gemma3_text can not: its activations are beyond the range of f16", compute="f16")


# ---- the folder --------------------------------------------------------------------------------------------------


def test_a_folder_by_a_link_and_the_current_one(exported, tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for _ in range(2):
        export_language_model(MODELS / "llama", tmp_path / "link", force=True)
        assert (tmp_path / "link").is_symlink() and contents(tmp_path / "real") == contents(exported("llama"))
    monkeypatch.chdir(tmp_path / "real")
    export_language_model(MODELS / "llama", ".", force=True)
    assert contents(tmp_path / "real") == contents(exported("llama"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_what_fails_leaves_no_parents_and_what_is_made_has_the_umask(tmp_path, llama):
    (llama / "tokenizer.json").unlink()
    with pytest.raises(ExportError):
        export_language_model(llama, tmp_path / "a/b/c")
    assert not (tmp_path / "a").exists()
    before = os.umask(0o027)
    try:
        export_language_model(MODELS / "llama", tmp_path / "out")
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert ((tmp_path / "out").stat().st_mode & 0o777, modes) == (0o750, {0o640})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_export_leaves_nothing(tmp_path, number):
    """Stopped when all files but pagoda.json are written."""
    folder = tmp_path / "llama"
    shutil.copytree(MODELS / "llama", folder)
    code = (
        "import os, signal, sys; from pagoda.export import folder, __main__ as command;"
        # In the background of a shell SIGINT is ignored, and so it is in what runs there.
        f"signal.signal({int(number)}, signal.default_int_handler if {int(number)} == 2 else signal.SIG_DFL);"
        "real = folder._sealed;"
        f"folder._sealed = lambda *given: (os.kill(os.getpid(), {int(number)}), signal.pause(), real(*given));"
        "sys.exit(command.main(sys.argv[1:]))"
    )
    environment = {"PYTHONPATH": str(ROOT / "bindings/python")}
    given = [sys.executable, "-c", code, str(folder), str(tmp_path / "out")]
    done = subprocess.run(given, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 128 + number
    assert done.stderr == f"pagoda.export: stopped by {number.name}; nothing was written\n"
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


# ---- pagoda.json and the command ---------------------------------------------------------------------------------


def test_the_manifest_says_what_an_engine_needs(exported):
    manifest = json.loads((exported("llama", kv="int8") / "pagoda.json").read_text())
    config = json.loads((MODELS / "llama/config.json").read_text())
    assert (manifest["kind"], manifest["architecture"]) == ("generate", "llama")
    assert manifest["limits"] == {"max_context": config["max_position_embeddings"]}
    kv = manifest["kv"]
    blocks = 2 * kv["layers"] * kv["heads"]
    assert kv["bytes_per_token"] == blocks * (kv["head_size"] + 4)
    generation = json.loads((MODELS / "llama/generation_config.json").read_text())
    assert manifest["tokens"]["eos"] == generation["eos_token_id"]
    assert set(manifest["files"]) == {"model.onnx", "weights.bin", "tokenizer.json"} | (
        {"chat_template.jinja"} if manifest["text"]["chat_template"] else set()
    )
    model = onnx.load(exported("llama", kv="int8") / "model.onnx", load_external_data=False)
    inputs = [name for name in manifest["inputs"].values() if isinstance(name, str)]
    inputs += manifest["inputs"]["kv_pools"] + manifest["inputs"]["kv_scales"]
    assert sorted(inputs) == sorted(value.name for value in model.graph.input)
    outputs = [manifest["outputs"]["logits"], *manifest["outputs"]["kv_pools"], *manifest["outputs"]["kv_scales"]]
    assert sorted(outputs) == sorted(value.name for value in model.graph.output)


def test_the_documented_manifest_has_the_entries(exported):
    manifest = json.loads((exported("llama", kv="int8", weights="int4") / "pagoda.json").read_text())
    text = (ROOT / "sdk/docs/model-folder.md").read_text()
    example = re.findall(r"```json\n(.*?)```", text, re.DOTALL)[2]
    assert re.findall(r'^  "(\w+)":', example, re.MULTILINE) == list(manifest)
    for part in ("kv", "text", "inputs", "tokens", "limits", "attention", "outputs"):
        inner = re.search(rf'^  "{part}": (\{{.*?\}},?)$(?=\n  "|\n\}})', example, re.MULTILINE | re.DOTALL)[1]
        assert all(f'"{name}":' in inner for name in manifest[part]), part


def test_a_layer_has_few_nodes(exported):
    model = onnx.load(exported("llama") / "model.onnx", load_external_data=False)
    layers = json.loads((MODELS / "llama/config.json").read_text())["num_hidden_layers"]
    # Beside the layers: the embedding, the two gathers of rows that are asked for, the last norm, the head, its name.
    assert len(model.graph.node) == 13 * layers + 6


def test_the_command(tmp_path, capsys):
    assert command([str(MODELS / "llama"), str(tmp_path / "out"), "--weights", "int4", "--max-context", "64"]) == 0
    said = capsys.readouterr().out
    assert "llama: 2 layers" in said and "context 64" in said and "weights int4" in said
    assert command([str(MODELS / "llama"), str(tmp_path / "out")]) == 1
    assert "add --force to replace it" in capsys.readouterr().err
    assert command([str(MODELS / "llama"), str(tmp_path / "out"), "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["weights"] == "native"
    for wrong, message in (
        ([], "source and out_dir"),
        (["a", "b", "--max-model-bytes", "3"], "--max-model-bytes is for ranking models"),
        (["a", "b", "c", "--kv", "int8"], "--kv is for language models"),
    ):
        with pytest.raises(SystemExit):
            command(wrong or ["a"])
        assert message in capsys.readouterr().err


def test_memory_is_bounded_by_the_largest_tensor(tmp_path):
    """A model of 640 MB whose largest tensor has 128 MB: in another process, so that its peak is its own."""
    folder = tmp_path / "model"
    shutil.copytree(MODELS / "llama", folder)
    config = json.loads((folder / "config.json").read_text())
    layers, hidden, mlp = 6, 1024, 8192
    config |= {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers, "head_dim": 64}
    config |= {"num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 32768}
    (folder / "config.json").write_text(json.dumps(config))
    decoder = architectures.describe(config)
    row = np.linspace(-1, 1, mlp, dtype=np.float32)
    save_weights(folder, {name: np.resize(row, shape) for name, shape in decoder.tensors().items()})
    largest = config["vocab_size"] * hidden * 4
    total = (folder / "model.safetensors").stat().st_size
    assert total > 5 * largest
    for weights in ("native", "int8"):
        code = (
            "import re, sys; from pagoda.export import export_language_model;"
            "export_language_model(sys.argv[1], sys.argv[2], weights=sys.argv[3]);"
            # getrusage would have the peak of the process that forked this one.
            r"print(re.search(r'VmHWM:\s+(\d+) kB', open('/proc/self/status').read())[1])"
        )
        given = [sys.executable, "-c", code, str(folder), str(tmp_path / weights), weights]
        done = subprocess.run(given, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ROOT / "bindings/python")})
        assert int(done.stdout) * 1024 <= 2 * largest + 300e6
        shutil.rmtree(tmp_path / weights)


# ---- refusals ----------------------------------------------------------------------------------------------------


def refused(source, message, **options):
    out = source.parent / "refused"
    with pytest.raises(ExportError) as caught:
        export_language_model(source, out, **options)
    assert message in str(caught.value), caught.value
    assert not out.exists() and not list(source.parent.glob(".refused*"))


@pytest.fixture
def llama(tmp_path):
    folder = tmp_path / "llama"
    shutil.copytree(MODELS / "llama", folder)
    save_weights(folder, load_weights(folder))
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not known. The exporter has llama, mistral"),
        ({"model_type": None}, "config.json has no model_type"),
        ({"hidden_size": "many"}, "config.json.hidden_size is 'many': it has to be a whole number"),
        ({"hidden_size": None}, "config.json.hidden_size is None"),
        ({"hidden_size": 96}, "has the shape"),
        ({"vocab_size": 280}, "by config.json it has [280, "),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"num_hidden_layers": 3}, "the weight model.layers.2.self_attn.q_proj.weight"),
        ({"num_hidden_layers": 1}, "the weight model.layers.1."),
        ({"attention_bias": True}, "self_attn.q_proj.bias [32] is missing"),
        ({"hidden_act": "relu6"}, "config.json.hidden_act is 'relu6': it has to be one of silu"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "config.json.rope_scaling.rope_type is 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "config.json.rope_scaling.factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e30}}, "the exporter makes tables for at most 16,777,216"),
        ({"max_position_embeddings": 2147483647}, "the context is 2,147,483,647 tokens"),
        ({"rope_theta": 1.0}, "config.json.rope_theta is 1.0: it has to be above 1"),
        ({"partial_rotary_factor": 2.0}, "config.json.partial_rotary_factor is 2: of heads of 8 it rotates 16 numbers"),
        ({"partial_rotary_factor": 0.4}, "it rotates 3 numbers, which has to be an even number"),
        ({"quantization_config": [1]}, "config.json.quantization_config is [1]: it has to be an object"),
        ({"quantization_config": {"quant_method": "gptq"}}, "the weights are quantised by 'gptq'"),
        ({"eos_token_id": 4000}, "the eos token is 4000: it has to be a number below vocab_size 272"),
    ],
)
def test_configurations_that_are_wrong(llama, change, message):
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | change))
    generation = llama / "generation_config.json"
    generation.unlink(missing_ok=True)
    refused(llama, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "x"}, "there is no vocabulary under model.vocab"),
        ({"model": {}}, "there is no vocabulary under model.vocab"),
        ({"model": {"vocab": {"a": "b"}}}, "model.vocab has an id that is no number"),
        ({"model": {"vocab": [3]}}, "model.vocab is no list of texts with scores"),
        ({"model": {"vocab": {"a": 272}}}, "tokenizer.json has the token 272, and config.json has vocab_size 272"),
        ({"added_tokens": [{"id": 5}]}, "an entry of added_tokens has no id or no content"),
        ({"added_tokens": 5}, "an entry of added_tokens has no id or no content"),
    ],
)
def test_tokenizers_that_are_wrong(llama, change, message):
    tokenizer = json.loads((llama / "tokenizer.json").read_text())
    (llama / "tokenizer.json").write_text(json.dumps(tokenizer | change))
    refused(llama, message)


def test_templates_and_special_tokens_that_are_wrong(llama):
    config = json.loads((llama / "tokenizer_config.json").read_text())
    for change, message in (
        ({"eos_token": ["a"]}, "tokenizer_config.json: eos_token is ['a']: it has to be a text"),
        ({"chat_template": 3}, "chat_template is int: it has to be a text"),
        ({"chat_template": [{"name": "tools", "template": "x"}]}, "or a list with an entry `default`"),
        ({"chat_template": "\ud800"}, "the chat template is no text that UTF-8 can hold"),
    ):
        (llama / "tokenizer_config.json").write_text(json.dumps(config | change))
        refused(llama, message)
    (llama / "chat_template.jinja").write_bytes(b"\xff")
    refused(llama, "chat_template.jinja is not UTF-8")


def test_weights_that_are_wrong(llama):
    good = load_weights(llama)
    name = "model.layers.0.mlp.down_proj.weight"

    def with_weight(values, key=name):
        save_weights(llama, {other: array for other, array in good.items() if other != key} | ({key: values} if values is not None else {}))

    with_weight(None)
    refused(llama, f"the weight {name} [")
    with_weight(good[name], "model.layers.0.mlp.extra.weight")
    refused(llama, "the weight model.layers.0.mlp.extra.weight has no place in model_type 'llama'")
    with_weight(good[name].T.copy())
    refused(llama, "the two do not belong together")
    for value in (np.nan, np.inf):
        spoiled = good[name].copy()
        spoiled[3, 5] = value
        with_weight(spoiled)
        for weights in ("native", "int8", "int4"):
            refused(llama, f"{name} has {value}: weights have to be finite numbers", weights=weights)
    spoiled = good[name].copy()
    spoiled[3, 5] = 1e6
    with_weight(spoiled)
    refused(llama, f"{name} has 1e+06, which float16 can not hold: export with --compute bf16 or f32", compute="f16")
    spoiled[3, 5:7] = 3.4e38, -3.4e38
    with_weight(spoiled)
    refused(llama, f"{name} has", weights="int4", compute="f16")
    with_weight(good[name].astype(np.int8))
    refused(llama, f"{name} is of type i8: the exporter reads f32, f16 and bf16")


def test_files_that_are_wrong(llama, tmp_path):
    weights = llama / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    refused(llama, "is damaged or no safetensors file")
    weights.unlink()
    refused(llama, "has neither model.safetensors nor model.safetensors.index.json")
    (llama / "pytorch_model.bin").write_bytes(b"")
    refused(llama, "There is pytorch_model.bin: save the model again")
    weights.write_bytes(whole)
    (llama / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "../model.safetensors"}}')
    refused(llama, "files have to be in the folder itself")
    (llama / "model.safetensors.index.json").write_text('{"weight_map": {"lm.weight": "model.safetensors"}}')
    refused(llama, "says that lm.weight is in model.safetensors, and it is not")
    (llama / "model.safetensors.index.json").unlink()
    for name in ("tokenizer.json", "config.json"):
        text = (llama / name).read_text()
        (llama / name).write_text(text[:-5])
        refused(llama, f"{name} is not JSON")
        (llama / name).unlink()
        refused(llama, f"{name} is missing")
        (llama / name).write_text(text)
        (llama / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n")
        refused(llama, f"{name} is a pointer of Git LFS, not the file itself: run git lfs pull")
        (llama / name).write_text(text)
    refused(tmp_path / "nothing", "does not exist: give a Hugging Face folder or a .gguf file")
    (tmp_path / "model.txt").write_text("")
    refused(tmp_path / "model.txt", "is neither a folder nor a .gguf file")
    refused(llama, "compute is 'f64': it has to be one of f32, f16, bf16", compute="f64")
    refused(llama, "--max-context is 100000", max_context=100000)
