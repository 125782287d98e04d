"""`pagoda convert`: decoders of other exporters, rewritten to PagedAttention. Converted graphs give what transformers gives, whole, in
chunks and in batches, and what is not recognised is refused by the name of its node."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from capi import ROOT
from onnx import TensorProto, helper, numpy_helper
from paged import Paged
from test_cli import RELEASE, pagoda
from test_decoders import DECODERS, RING, ROUNDED, cases
from test_decoders import NAMES as TAKEN

sys.path.insert(0, str(ROOT / "samples/functional"))
from decode import Decoder

NAMES = sorted([*TAKEN, RING])
TEXTS = [ROOT / "tests/data/llm/llama" / name for name in ("tokenizer.json", "tokenizer_config.json")]


def source(name, path):
    """The folder of a decoder, with its tokenizer."""
    shutil.copytree(DECODERS / name, path)
    for file in TEXTS:
        shutil.copy(file, path)
    return path


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    @functools.cache
    def make(name):
        folder = tmp_path_factory.mktemp("convert")
        done = pagoda("convert", source(name, folder / "in"), folder / "out")
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return folder / "out"

    return make


def graph_of(folder):
    return onnx.load(folder / "model.onnx", load_external_data=False)


def check(model, folder, into):
    """The checker takes no weights out of files with several links, as those of a converted folder are."""
    for file in folder.glob("*.data"):
        shutil.copy(file, into)
    onnx.save(model, into / "model.onnx")
    onnx.checker.check_model(str(into / "model.onnx"))


# ---- the folder --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_converted_folder_is_a_model_folder(converted, name):
    folder = converted(name)
    about = json.loads((folder / "pagoda.json").read_text())
    assert (about["kind"], about["model"]) == ("generate", "model.onnx")
    layers = 1 if "merged" in name else 2
    kv = about["kv"]
    assert (kv["layers"], kv["heads"], kv["head_size"]) == (layers, 1 if "gemma3" in name else 2, 16)
    assert about["attention"]["windows"] == {"qwen2": [0, 6], "gemma3": [6, 0]}.get(name.split("-")[0], [0] * layers)
    done = pagoda("inspect", folder, "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["whole"] and report["version"] == about["version"]


@pytest.mark.parametrize("name", NAMES)
def test_a_converted_graph_is_valid_and_has_no_rest_of_the_past(converted, name, tmp_path):
    model = graph_of(converted(name))
    # ONNX Runtime has it in ONNX's own domain, in which the checker does not know it; builders write it so.
    for node in model.graph.node:
        node.domain = "com.microsoft" if node.op_type == "SimplifiedLayerNormalization" else node.domain
    check(model, converted(name), tmp_path)
    inputs = [value.name for value in model.graph.input]
    pools = [f"kv_pool_{layer}" for layer in range(1 if "merged" in name else 2)]
    indices = ["input_ids", "positions", "row_offsets", "cached_len", "page_indptr", "page_ids", "logits_rows"]
    assert inputs == indices + pools
    assert [value.name for value in model.graph.output] == ["logits", *(f"{pool}_out" for pool in pools)]
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("PagedAttention") == len(pools)
    assert not {"GroupQueryAttention", "Softmax", "IsNaN", "LessOrEqual", "If", "Range", "ReduceSum"} & set(kinds)
    # Only rows that are asked for go through the last product.
    made_by = {output: node for node in model.graph.node for output in node.output}
    node = made_by["logits"]
    while node.op_type not in ("MatMul", "MatMulNBits"):
        node = made_by[node.input[0]]
    assert made_by[node.input[0]].op_type == "Gather" and made_by[node.input[0]].input[1] == "logits_rows"


def test_weights_outside_the_graph_are_not_copied(tmp_path):
    folder = source("llama-genai", tmp_path / "in")
    # As in a cache of downloads, where files are links.
    (folder / "model.onnx.data").rename(tmp_path / "blob")
    (folder / "model.onnx.data").symlink_to("../blob")
    assert pagoda("convert", folder, tmp_path / "out").returncode == 0
    assert (tmp_path / "out/model.onnx.data").samefile(tmp_path / "blob")
    assert not (tmp_path / "out/model.onnx.data").is_symlink()
    assert not (tmp_path / "out/tokenizer.json").samefile(folder / "tokenizer.json")


# ---- logits and tokens -------------------------------------------------------------------------------------------


def tolerance(name):
    return ROUNDED.get(name, 1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens_are_those_of_transformers(converted, name):
    model = Paged(converted(name))
    for at, case in enumerate(cases(name)):
        rows = model.step({at: case["prompt_ids"]})[at]
        assert np.linalg.norm(rows[-1] - case["logits"]) <= tolerance(name) * np.linalg.norm(case["logits"])
        if name in ROUNDED:
            continue
        assert np.abs(rows[-1] - case["logits"]).max() <= 1e-3
        assert rows.argmax(-1).tolist() == case["argmax"]
        tokens = [int(rows[-1].argmax())]
        while len(tokens) < len(case["greedy_ids"]):
            tokens.append(int(model.step({at: tokens[-1:]})[at][-1].argmax()))
        assert tokens == case["greedy_ids"]


@pytest.mark.parametrize("name", NAMES)
def test_chunks_and_batches_give_the_same_logits(converted, name):
    """Pages that were not written are NaN."""
    alone, together = Paged(converted(name)), Paged(converted(name))
    prompts = [case["prompt_ids"] for case in cases(name)]
    whole = [alone.step({at: prompt})[at] for at, prompt in enumerate(prompts)]
    parts = [[prompt[:1], prompt[1:4], prompt[4:]] for prompt in prompts]
    # A prefill, a decode and a chunk on a past in one call, in any order.
    steps = [{0: parts[0][0]}, {1: parts[1][0], 0: parts[0][1]}, {2: prompts[2], 1: parts[1][1], 0: parts[0][2]}, {1: parts[1][2]}]
    made = {}
    for step in steps:
        for at, rows in together.step(step).items():
            made.setdefault(at, []).append(rows)
    for at, rows in enumerate(whole):
        assert np.abs(np.concatenate(made[at]) - rows).max() <= (0.05 if name in ROUNDED else 1e-4)
    # Of all rows, some alone are asked for.
    last = Paged(converted(name)).step({0: prompts[2]}, rows=[len(prompts[2]) - 1])[0]
    assert last.shape[0] == 1 and np.abs(last[0] - whole[2][-1]).max() <= 1e-4


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ROUNDED])
def test_pagoda_generates_the_same_tokens(converted, name):
    options = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}
    lines = [json.dumps({"prompt": case["prompt_ids"]} | options) + "\n" for case in cases(name)]
    command = [RELEASE / "pagoda", "generate", converted(name), "--requests", "-", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, input="".join(lines))
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.split("\n")[:-1]]
    assert [answer["choices"][0]["tokens"] for answer in answers] == [case["greedy_ids"] for case in cases(name)]


@pytest.mark.parametrize("name", ["llama-genai", "llama-optimum", "llama-1-optimum-merged"])
def test_pages_may_have_another_form(converted, name):
    case = cases(name)[1]
    options = {"prompt": case["prompt_ids"], "max_new_tokens": 24, "temperature": 0, "ignore_eos": True}

    def tokens(*arguments):
        command = [RELEASE / "pagoda", "generate", converted(name), "--requests", "-", "--json", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, input=json.dumps(options) + "\n")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["choices"][0]["tokens"]

    # Nothing is evicted.
    assert tokens("--kv-policy", "h2o", "--cache-length", 96) == case["greedy_ids"]
    assert tokens("--kv-format", "int8")[:1] == case["greedy_ids"][:1]
    assert len(tokens("--kv-policy", "lastrec", "--cache-length", 16)) == 24


# ---- the functional form -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def functional(tmp_path_factory):
    @functools.cache
    def make(name):
        folder = tmp_path_factory.mktemp("functional")
        done = pagoda("convert", source(name, folder / "in"), folder / "out", "--to", "functional")
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return folder / "out"

    return make


@pytest.mark.parametrize("name", NAMES)
def test_the_functional_form_has_standard_operators(functional, name, tmp_path):
    """In a stock ONNX Runtime: of com.microsoft there are quantised products alone."""
    check(graph_of(functional(name)), functional(name), tmp_path)
    kinds = {(node.domain, node.op_type) for node in graph_of(functional(name)).graph.node}
    quantised = {("com.microsoft", "MatMulNBits"), ("com.microsoft", "GatherBlockQuantized")}
    assert {kind for kind in kinds if kind[0]} <= (quantised if "int4" in name else set())
    assert not {"GroupQueryAttention", "If", "IsNaN", "LessOrEqual"} & {op for _, op in kinds}


@pytest.mark.parametrize("name", NAMES)
def test_the_functional_form_gives_the_same_logits(functional, name):
    model, of = Decoder(functional(name), pages=32), cases(name)
    for at, case in enumerate(of):
        rows = model.step({at: case["prompt_ids"]})[at]
        assert np.linalg.norm(rows[-1] - case["logits"]) <= tolerance(name) * np.linalg.norm(case["logits"])
    # Sequences of several lengths in one call, some with several tokens.
    whole = {at: Decoder(functional(name), pages=32).step({at: case["prompt_ids"] + [5, 6, 7]})[at] for at, case in enumerate(of)}
    made = model.step({0: [5], 1: [5, 6, 7], 2: [5, 6]})
    for at, rows in made.items():
        expected = whole[at][len(of[at]["prompt_ids"]) :][: len(rows)]
        assert np.abs(rows - expected).max() <= (0.05 if name in ROUNDED else 1e-4)


# ---- ONNX's own Attention ----------------------------------------------------------------------------------------


def attention_decoder(folder, with_past):
    """A decoder of one layer with opset 23's Attention: the past is an input of it, or is joined before it. Heads are apart, as torch
    writes them; the mask is a window of 5, without a padding mask."""
    random = np.random.default_rng(3)
    heads, kv_heads, size, vocab, hidden = 4, 2, 16, 272, 32

    def weight(name, *shape):
        return numpy_helper.from_array(random.normal(0, 0.3, shape).astype(np.float32), name)

    weights = [weight("embedding", vocab, hidden), weight("head", heads * size, vocab)]
    weights += [weight(f"w{part}", hidden, count * size) for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))]
    for name, numbers in {
        "heads": [0, 0, heads, size], "kv_heads": [0, 0, kv_heads, size], "flat": [0, 0, heads * size], "zero": 0, "one": 1, "two": 2,
        "window": 5, "rows": [1], "columns": [0],
    }.items():
        weights.append(numpy_helper.from_array(np.array(numbers, np.int64), name))
    nodes = [helper.make_node("Gather", ["embedding", "input_ids"], ["x"])]
    for part, shape in (("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads")):
        nodes += [
            helper.make_node("MatMul", ["x", f"w{part}"], [f"{part}1"]),
            helper.make_node("Reshape", [f"{part}1", shape], [f"{part}2"]),
            helper.make_node("Transpose", [f"{part}2"], [f"{part}3"], perm=[0, 2, 1, 3]),
        ]
    past, present = ["past_key_values.0.key", "past_key_values.0.value"], ["present.0.key", "present.0.value"]
    nodes += [
        helper.make_node("Shape", [past[0]], ["past_shape"]),
        helper.make_node("Gather", ["past_shape", "two"], ["past"], axis=0),
        helper.make_node("Shape", ["input_ids"], ["new_shape"]),
        helper.make_node("Gather", ["new_shape", "one"], ["new"], axis=0),
        helper.make_node("Add", ["past", "new"], ["total"]),
        helper.make_node("Range", ["past", "total", "one"], ["row"]),
        helper.make_node("Unsqueeze", ["row", "rows"], ["at_row"]),
        helper.make_node("Range", ["zero", "total", "one"], ["column"]),
        helper.make_node("Unsqueeze", ["column", "columns"], ["at_column"]),
        helper.make_node("Sub", ["at_row", "at_column"], ["distance"]),
        helper.make_node("GreaterOrEqual", ["distance", "zero"], ["causal"]),
        helper.make_node("Less", ["distance", "window"], ["near"]),
        helper.make_node("And", ["causal", "near"], ["mask"], name="both"),
    ]
    if with_past:
        nodes.append(helper.make_node("Attention", ["q3", "k3", "v3", "mask", *past], ["a1", *present], name="attend"))
    else:
        nodes += [helper.make_node("Concat", [past[at], f"{part}3"], [present[at]], axis=2) for at, part in enumerate("kv")]
        nodes.append(helper.make_node("Attention", ["q3", *present, "mask"], ["a1"], name="attend"))
    nodes += [
        helper.make_node("Transpose", ["a1"], ["a2"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["a2", "flat"], ["a3"]),
        helper.make_node("MatMul", ["a3", "head"], ["logits"]),
    ]

    def value(name, kind, *shape):
        return helper.make_tensor_value_info(name, kind, shape)

    of_past = [value(name, TensorProto.FLOAT, "b", kv_heads, "p", size) for name in past]
    inputs = [value(name, TensorProto.INT64, "b", width) for name, width in (("input_ids", "s"), ("attention_mask", "t"))] + of_past
    outputs = [value("logits", TensorProto.FLOAT, "b", "s", vocab)]
    outputs += [value(name, TensorProto.FLOAT, "b", kv_heads, "t", size) for name in present]
    graph = helper.make_graph(nodes, "decoder", inputs, outputs, weights)
    shutil.copytree(DECODERS / "llama-1-optimum-merged", folder, ignore=shutil.ignore_patterns("*.onnx"))
    for file in TEXTS:
        shutil.copy(file, folder)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10), folder / "model.onnx")
    return folder


@pytest.mark.parametrize("with_past", [True, False])
def test_attention_of_onnx_is_converted(tmp_path, with_past):
    folder = attention_decoder(tmp_path / "in", with_past)
    done = pagoda("convert", folder, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out/pagoda.json").read_text())["attention"]["windows"] == [5]
    tokens = cases("llama-genai")[2]["prompt_ids"]
    session = ort.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    empty = np.zeros([1, 2, 0, 16], np.float32)
    given = {"input_ids": [tokens], "attention_mask": [[1] * len(tokens)]}
    given = {name: np.array(array) for name, array in given.items()}
    [expected] = session.run(["logits"], given | {f"past_key_values.0.{part}": empty for part in ("key", "value")})
    model = Paged(tmp_path / "out")
    made = np.concatenate([model.step({0: part})[0] for part in (tokens[:9], tokens[9:10], tokens[10:])])
    assert np.abs(made - expected[0]).max() <= 1e-4


# ---- what is refused ---------------------------------------------------------------------------------------------


def refused(tmp_path, name, change, *expected):
    """Changes the graph of a decoder; converting it fails with these words, and leaves nothing."""
    folder = source(name, tmp_path / "in")
    (path,) = folder.glob("*.onnx")
    model = onnx.load(path, load_external_data=False)
    change(model.graph)
    onnx.save(model, path)
    done = pagoda("convert", folder, tmp_path / "out")
    assert done.returncode == 1 and done.stdout == ""
    for words in expected:
        assert words in done.stderr, done.stderr
    assert os.listdir(tmp_path) == ["in"]


def named(graph, op, at=0):
    return [node for node in graph.node if node.op_type == op][at]


def set_attribute(node, name, value):
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def test_missing_outputs_are_named(tmp_path):
    def change(graph):
        graph.output.remove(next(value for value in graph.output if value.name == "present.1.value"))

    refused(tmp_path, "llama-genai", change, "present.1.value")


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("kv_num_heads", 1, "kv_num_heads is 1, and the past of the layer has 2 heads"),
        ("num_heads", 8, "heads of 16 are needed"),
        ("qk_output", 1, 'the attribute "qk_output" is not known here'),
        ("novelty", 0.5, 'the attribute "novelty" is not known here'),
    ],
)
def test_attention_nodes_that_do_not_fit_are_named(tmp_path, name, value, words):
    def change(graph):
        set_attribute(named(graph, "GroupQueryAttention", 1), name, value)

    refused(tmp_path, "llama-genai", change, 'GroupQueryAttention "/model/layers.1/attn/GroupQueryAttention": ', words)


def test_a_bias_of_scores_is_named(tmp_path):
    def change(graph):
        named(graph, "GroupQueryAttention").input[10] = "cos_cache"

    refused(tmp_path, "llama-genai", change, "GroupQueryAttention", "attention_bias")


def test_lengths_that_are_others_are_named(tmp_path):
    def change(graph):
        named(graph, "Sub").op_type = "Add"

    refused(tmp_path, "llama-genai", change, "seqlens_k", "does not follow from the sum or the width of the attention mask")


def test_masks_that_are_not_causal_are_named(tmp_path):
    def change(graph):
        named(graph, "LessOrEqual").op_type = "Less"

    refused(tmp_path, "llama-optimum", change, "Softmax", "is neither causal nor a window", "does not see")


def test_a_window_that_is_turned_round_is_named(tmp_path):
    """Its number is in the graph, so that a trial is longer."""

    def change(graph):
        constant = next(node for node in graph.node if node.output[0] == named(graph, "Sub").input[1])
        constant.attribute[0].t.CopyFrom(numpy_helper.from_array(np.array(100, np.int64)))
        named(graph, "Greater").op_type = "Less"

    refused(tmp_path, "qwen2-optimum", change, "/model/layers.1/self_attn/Softmax", "is neither causal nor a window")


def test_operators_of_a_mask_that_are_not_known_are_named(tmp_path):
    def change(graph):
        node = named(graph, "LessOrEqual")
        node.op_type, node.domain = "Compare", "com.example"

    refused(tmp_path, "llama-optimum", change, "adds to scores does not follow from masks and lengths")


def test_scores_that_are_changed_are_named(tmp_path):
    def change(graph):
        softmax = named(graph, "Softmax")
        node = helper.make_node("Sigmoid", [softmax.input[0]], ["changed"], name="strange")
        graph.node.insert(list(graph.node).index(softmax), node)
        softmax.input[0] = "changed"

    refused(tmp_path, "llama-optimum", change, 'Sigmoid "strange" between scores and softmax is not known here')


def test_heads_that_are_repeated_in_another_order_are_named(tmp_path):
    """Query heads that read keys in turn: [2, 1] in place of [1, 2] groups, by the axis that is repeated."""

    def change(graph):
        for node in graph.node:
            if node.op_type == "Unsqueeze" and node.input[0].startswith("present.0."):
                constant = next(made for made in graph.node if made.output[0] == node.input[1])
                constant.attribute[0].t.CopyFrom(numpy_helper.from_array(np.array([1])))
            if node.op_type == "Concat" and len(node.input) == 5:
                node.input[1], node.input[2] = node.input[2], node.input[1]

    refused(tmp_path, "llama-optimum", change, '"present.0.key", or repeats its heads in another order')


def test_nodes_that_mix_tokens_are_named(tmp_path):
    def change(graph):
        head = named(graph, "MatMul", -1)
        graph.initializer.append(numpy_helper.from_array(np.array(1), "tokens"))
        graph.node.insert(
            len(graph.node) - 1, helper.make_node("CumSum", [head.input[0], "tokens"], ["summed"], name="sums")
        )
        head.input[0] = "summed"

    refused(tmp_path, "llama-optimum", change, 'CumSum "sums" counts the tokens of a call')


def test_what_still_reads_the_mask_is_named(tmp_path):
    def change(graph):
        head = named(graph, "MatMul", -1)
        made = [
            helper.make_node("Cast", ["attention_mask"], ["counted"], name="casts", to=TensorProto.FLOAT),
            helper.make_node("ReduceSum", ["counted"], ["total"], name="sums", keepdims=0),
            helper.make_node("Mul", [head.input[0], "total"], ["more"], name="multiplies"),
        ]
        for node in made:
            graph.node.insert(len(graph.node) - 1, node)
        head.input[0] = "more"

    for name in ("llama-optimum", "llama-genai"):
        folder = tmp_path / name
        folder.mkdir()
        refused(folder, name, change, 'Cast "casts" reads "attention_mask", which a graph of pages does not have')


def test_folders_that_can_not_be_written_are_refused(tmp_path, converted):
    folder = source("llama-genai", tmp_path / "in")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    for out, words in ((tmp_path / "full", "exists and is not empty"), (tmp_path / "full/file", "is a file")):
        done = pagoda("convert", folder, out)
        assert done.returncode == 1 and words in done.stderr
    done = pagoda("convert", converted("llama-genai"), tmp_path / "out")
    assert done.returncode == 1 and "it is a model folder of Pagoda already" in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["full", "in"]
    # An empty folder may be there.
    (tmp_path / "out").mkdir()
    assert pagoda("convert", folder, tmp_path / "out").returncode == 0


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_conversion_that_is_ended_leaves_nothing(tmp_path, name):
    folder = source("llama-genai", tmp_path / "in")
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("weights are copied only from another file system")
    with tempfile.TemporaryDirectory(dir=memory) as other:
        # Copying takes a while.
        shutil.move(folder / "model.onnx.data", Path(other) / "blob")
        os.truncate(Path(other) / "blob", 256 << 20)
        (folder / "model.onnx.data").symlink_to(Path(other) / "blob")
        for _ in range(5):
            process = subprocess.Popen([RELEASE / "pagoda", "convert", folder, tmp_path / "out"])
            while process.poll() is None and os.listdir(tmp_path) == ["in"]:
                pass
            process.send_signal(getattr(signal, name))
            if process.wait(60) != 0:
                break
            # It was done before the signal came.
            shutil.rmtree(tmp_path / "out")
    assert process.returncode == 128 + getattr(signal, name)
    assert os.listdir(tmp_path) == ["in"]
