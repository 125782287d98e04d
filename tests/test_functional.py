"""Language models in the functional form: standard operators in a stock ONNX Runtime, with the page table of samples/functional.

No session here has Pagoda's operators, except for the paged form that results are compared with."""

import functools
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from capi import ROOT
from paged import Paged
from pagoda.export import ExportError, export_language_model
from pagoda.export.__main__ import main as command
from test_export_llm import MODELS, NAMES, error, prompts, set_accuracy

sys.path.insert(0, str(ROOT / "samples/functional"))
from decode import Decoder

# SmolLM2 in f32; `make test` makes both folders.
SMOLLM2, SMOLLM2_PAGED = ROOT / "target/models/smollm2-functional", ROOT / "target/models/smollm2-f32"
CASES = json.loads((ROOT / "tests/data/llm/smollm2.json").read_text())["cases"]
# `make soak` takes 200, which is more than a minute.
STEPS = int(os.environ.get("PAGODA_FUNCTIONAL_STEPS", "30"))


@pytest.fixture(scope="module")
def functional(tmp_path_factory):
    """Makes folders in the functional form, each once."""

    @functools.cache
    def make(name, **options):
        out = tmp_path_factory.mktemp("folder") / "out"
        export_language_model(MODELS / name, out, form="functional", **options)
        return out

    return make


# ---- the graph ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_names_types_and_shapes_are_those_of_the_page(functional, name):
    manifest = json.loads((functional(name) / "pagoda.json").read_text())
    kv, layers = manifest["kv"], range(manifest["kv"]["layers"])
    heads = [kv["heads"], kv["head_size"]]
    session = ort.InferenceSession(functional(name) / "model.onnx", providers=["CPUExecutionProvider"])
    rows = ["batch", "new"]
    expected = {
        "input_ids": ("tensor(int64)", rows),
        "position_ids": ("tensor(int64)", rows),
        "key_slots": ("tensor(int64)", ["batch", "past"]),
        "value_slots": ("tensor(int64)", ["batch", "past"]),
        "attention_mask": ("tensor(bool)", ["batch", 1, "new", "past_and_new"]),
        **{f"kv_pool.{layer}": ("tensor(float)", ["rows", *heads]) for layer in layers},
    }
    assert {value.name: (value.type, value.shape) for value in session.get_inputs()} == expected
    expected = {"logits": ("tensor(float)", [*rows, manifest["vocab_size"]])}
    for layer in layers:
        expected |= {f"new_{part}.{layer}": ("tensor(float)", [*rows, *heads]) for part in ("key", "value")}
    assert {value.name: (value.type, value.shape) for value in session.get_outputs()} == expected
    named = [manifest[side].values() for side in ("inputs", "outputs")]
    flat = [[name for value in side for name in ([value] if isinstance(value, str) else value)] for side in named]
    assert sorted(flat[0]) == sorted(value.name for value in session.get_inputs())
    assert sorted(flat[1]) == sorted(value.name for value in session.get_outputs())
    assert (manifest["form"], manifest["kind"]) == ("functional", "generate")


@pytest.mark.parametrize("name", NAMES)
def test_operators_are_those_of_onnx(functional, name):
    graph = onnx.load(functional(name) / "model.onnx", load_external_data=False)
    assert [opset.domain for opset in graph.opset_import] == [""]
    graph = onnx.load(functional(name, weights="int4") / "model.onnx", load_external_data=False)
    assert {node.op_type for node in graph.graph.node if node.domain} <= {"MatMulNBits"}


def test_quantised_pages_are_refused(tmp_path):
    with pytest.raises(ExportError, match="--kv int8: the functional form has native pages alone"):
        export_language_model(MODELS / "llama", tmp_path / "out", kv="int8", form="functional")
    with pytest.raises(ExportError, match="form is 'plain': it has to be one of paged, functional"):
        export_language_model(MODELS / "llama", tmp_path / "out", form="plain")
    assert not (tmp_path / "out").exists()


def test_the_command_writes_it_and_says_so(tmp_path, capsys):
    assert command([str(MODELS / "llama"), str(tmp_path / "out"), "--form", "functional"]) == 0
    assert "functional form: standard operators alone, which any ONNX Runtime runs" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command(["a.safetensors", "config.json", str(tmp_path / "ranker"), "--form", "functional"])
    assert "--form is for language models, and three paths export a ranking model" in capsys.readouterr().err


# ---- logits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(functional, name):
    for tokens, want in prompts(name):
        assert error(Decoder(functional(name), pages=16).step({"a": tokens})["a"], want) <= 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_padded_batches_give_the_same_logits_and_read_only_what_was_written(functional, name):
    """Rows of the pools that were not written are NaN."""
    (first, of_first), (second, of_second) = prompts(name)
    decoder = Decoder(functional(name), pages=16)
    # Empty and full caches, one token and several, in one call; pages in turn.
    parts = [
        {"a": first[:7]},
        {"b": second[:3], "a": first[7:8]},
        {"a": first[8:-1], "b": second[3:4]},
        {"b": second[4:], "a": first[-1:]},
    ]
    got = [decoder.step(part) for part in parts]
    for sequence, want in (("a", of_first), ("b", of_second)):
        logits = np.concatenate([step[sequence] for step in got if sequence in step])
        assert np.isfinite(logits).all()
        assert error(logits, want) <= 1e-4
    assert np.isnan(decoder.pages.pools[0]).any()


def test_a_padding_slot_that_was_not_written_would_be_seen(functional):
    """What the runtime has to take care of, and that the NaNs of the test above would be found."""
    (first, _), (second, _) = prompts("llama")
    decoder = Decoder(functional("llama"), pages=16)
    decoder.step({"a": first})
    for pool in decoder.pages.pools:
        pool[: 2 * decoder.pages.size] = np.nan
    logits = decoder.step({"a": first[:1], "b": second[:1]})
    assert np.isfinite(logits["a"]).all() and np.isnan(logits["b"]).all()


def test_outputs_may_lie_in_the_pool(functional):
    """One sequence, new rows in one page: nothing is copied."""
    tokens, want = prompts("llama")[0]
    decoder = Decoder(functional("llama"), pages=16)
    first = decoder.step({"a": tokens[:7]})["a"]
    pages, count = decoder.pages, len(tokens) - 7
    slot = int(pages.slots("a", 6, 7)[0]) + 1
    assert slot % pages.size + count <= pages.size
    slots, new = pages.slots("a", 0, 7)[None], np.arange(7, 7 + count)[None]
    inputs = {
        "input_ids": np.array(tokens[7:], np.int64)[None],
        "position_ids": new,
        "key_slots": slots,
        "value_slots": slots + pages.size,
        "attention_mask": np.tri(7 + count, dtype=bool)[None, None, 7:],
    }
    binding = decoder.session.io_binding()
    for name, array in inputs.items():
        binding.bind_cpu_input(name, array)
    for layer, pool in enumerate(pages.pools):
        binding.bind_cpu_input(f"kv_pool.{layer}", pool)
        for part, at in (("key", slot), ("value", slot + pages.size)):
            rows = pool[at : at + count]
            binding.bind_output(f"new_{part}.{layer}", "cpu", 0, np.float32, [1, *rows.shape], rows.ctypes.data)
    binding.bind_output("logits")
    decoder.session.run_with_iobinding(binding)
    logits = binding.get_outputs()[-1].numpy()[0]
    assert error(np.concatenate([first, logits]), want) <= 1e-4
    whole = Decoder(functional("llama"), pages=16)
    whole.step({"a": tokens})
    for pool, filled in zip(pages.pools, whole.pages.pools):
        for at in (0, pages.size):
            assert np.allclose(pool[slot - 7 + at :][: len(tokens)], filled[slot - 7 + at :][: len(tokens)], atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "baichuan2-13b"])
def test_half_precision_is_close(functional, name):
    for tokens, want in prompts(name):
        assert error(Decoder(functional(name, compute="f16"), pages=16).step({"a": tokens})["a"], want) <= 1e-2


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama-tied", "qwen2"])
def test_quantised_weights_are_those_of_the_paged_form(tmp_path, name, weights):
    """Products that round nothing, so that the two can be compared."""
    for form in ("paged", "functional"):
        export_language_model(MODELS / name, tmp_path / form, weights=weights, form=form)
        set_accuracy(tmp_path / form, 0)
    tokens, _ = prompts(name)[0]
    want = Paged(tmp_path / "paged", graph="model").step({"a": tokens})["a"]
    assert error(Decoder(tmp_path / "functional", pages=16).step({"a": tokens})["a"], want) <= 1e-5


def test_caps_of_scores_and_logits_are_those_of_the_paged_form(tmp_path):
    """A cap is applied before the mask: what is not seen stays so."""
    shutil.copytree(MODELS / "gemma3", tmp_path / "capped")
    config = json.loads((tmp_path / "capped/config.json").read_text())
    config |= {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    (tmp_path / "capped/config.json").write_text(json.dumps(config))
    for form in ("paged", "functional"):
        export_language_model(tmp_path / "capped", tmp_path / form, form=form)
    tokens, without = prompts("gemma3")[0]
    want = Paged(tmp_path / "paged").step({"a": tokens})["a"]
    assert error(Decoder(tmp_path / "functional", pages=16).step({"a": tokens})["a"], want) <= 1e-5
    assert error(want, without) > 0.01


# ---- SmolLM2 -----------------------------------------------------------------------------------------------------


def test_smollm2_decodes_as_its_paged_form_does():
    """Ten prompts at once, greedily, an end token or not."""
    prompts = {case["name"]: case["prompt_ids"] for case in CASES[:10]}
    functional, paged = Decoder(SMOLLM2, pages=128, threads=2), Paged(SMOLLM2_PAGED, pages=128)
    new = prompts
    for step in range(STEPS):
        got, want = functional.step(new), paged.step(new)
        for name in prompts:
            assert np.abs(got[name] - want[name]).max() <= 1e-3, (step, name)
            assert got[name][-1].argmax() == want[name][-1].argmax(), (step, name)
        new = {name: [int(logits[-1].argmax())] for name, logits in got.items()}


def test_the_sample_runs_without_pagoda():
    command = [sys.executable, "-I", ROOT / "samples/functional/decode.py", SMOLLM2, "--tokens", "8"]
    texts = ["The capital of France is", "1, 2, 3, 4,"]
    done = subprocess.run([*command, *texts], capture_output=True, text=True, env={})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("The capital of France is Paris.") and "\n1, 2, 3, 4, 5, 6" in done.stdout, done.stdout
    done = subprocess.run([*command[:3], SMOLLM2_PAGED, *texts], capture_output=True, text=True, env={})
    assert "is not in the functional form: export it with --form functional" in done.stderr
