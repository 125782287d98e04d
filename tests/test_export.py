"""The exporter's model folders compute what the formulas say, at once and in steps, and nothing wrong is exported."""

import copy
import hashlib
import json
import re
import subprocess
import sys
import types

import numpy as np
import onnx
import pytest
from capi import ROOT
from exported import (
    BATCHES,
    BEFORE,
    END,
    HOURS,
    MLP,
    QUARTERS,
    RAGGED,
    START,
    WIDE,
    Engine,
    Oracle,
    check,
    error,
    made,  # noqa: F401  (a fixture)
    people,
    settings,
    tensors,
    with_user,
)
from pagoda.export import ExportError, export
from pagoda.export.__main__ import main as command
from pagoda.export.hstu import checkpoint
from pagoda.export.hstu.config import parse
from safetensors.numpy import load_file, save_file

# ---- scores ------------------------------------------------------------------------------------------------------

WHEN = {
    "nothing": {"positions": None},
    "positions from the start": {"positions": START},
    "positions from the end": {"positions": END},
    "from the end, before the request": {"positions": END, "times": BEFORE},
    "before the request, log": {"positions": None, "times": BEFORE | {"function": "log", "buckets": 12}},
    "from the start, hours": {"positions": START, "times": HOURS},
    "quarters, not scaled": {"positions": None, "times": QUARTERS, "scale_embeddings": False},
}


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("interleaved", [False, True], ids=["summed", "interleaved"])
@pytest.mark.parametrize("flavour", ["nvidia", "meta"])
def test_scores_are_those_of_the_formulas_at_once_and_in_steps(made, flavour, interleaved, when):
    config = settings(flavour, interleaved, **WHEN[when])
    folder = check(made, config)
    kv = json.loads((folder / "pagoda.json").read_text())["kv"]
    assert kv["cache"] == ("end" not in when and "before" not in when)
    assert bool(kv["reason"]) == (not kv["cache"])


ACTION = {"features": [{"name": "rating", "table": "ratings", "candidate_key": 4}]}
ALONE = {"item": {"features": [{"name": "item", "table": "items"}]}, "interleaved": False}
TASKS = [{"name": f"task {number}"} for number in range(5)]

VARIANTS = {
    "one layer, one head": settings(block__layers=1, block__heads=1, block__head_size=16),
    "five layers": settings("meta", block__layers=5),
    "a width that is not heads times head size": settings("meta", block__heads=3, block__head_size=8),
    "a window": settings(block__max_attn_len=5),
    "a window, meta": settings("meta", True, block__max_attn_len=3),
    "groups of candidates": settings(block__target_group_size=2),
    "alpha": settings("meta", block__alpha=0.7),
    "no residual": settings(block__residual=False),
    "epsilon": settings(block__epsilon=0.1),
    "nothing learned of norms, no bias": settings(
        block__input_norm_learned=False, block__output_norm_learned=False, block__uvqk_bias=False
    ),
    "group norm": settings("meta", block__group_norm=True),
    "final layer norm": settings("meta", final_norm="layer_norm"),
    "no final norm": settings(final_norm="none"),
    "five tasks, swish norm": settings(
        head__mlp=[{"linear": 24}, "swish_layer_norm", {"linear": 5}], head__tasks=TASKS
    ),
    "softmax": settings(head__tasks=[{"name": n, "activation": "softmax"} for n in "ab"]),
    "silu and tanh": settings(head__mlp=[{"linear": 6}, "silu", {"linear": 6}, "tanh", {"linear": 2}, "sigmoid"]),
    "candidates with an action key": settings("meta", tokens__action=ACTION),
    "token mlps": settings("nvidia", True, tokens=WIDE),
    "items alone": settings(tokens=ALONE, tables={"items": {"rows": 40, "dim": 16}}),
    "user rows": with_user(settings(interleaved=True)),
    "user rows with an mlp": with_user(settings("meta", times=HOURS), mlp=MLP),
    "user rows, from the end": with_user(settings("meta", positions=END, times=BEFORE)),
    "user rows that see the history": with_user(settings(), sees_history=True),
    "user rows that see the history, in a window": with_user(
        settings("meta", block__max_attn_len=4), sees_history=True
    ),
    "large pages": settings(kv__page_size=48),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_setting_does_what_it_says(made, variant):
    check(made, VARIANTS[variant], {name: BATCHES[name] for name in ("nobody", "ragged")})


def test_every_part_of_a_model_counts():
    """Without this an oracle and a graph that both forget a part would agree."""
    for config in VARIANTS["user rows, from the end"], VARIANTS["token mlps"]:
        weights, users = tensors(config), people(config, [(9, 4)])
        before = Oracle(config, weights).scores(users)
        for name in weights:
            noise = np.random.default_rng(6).standard_normal(weights[name].shape)
            changed = weights | {name: weights[name] + 0.1 * noise}
            assert error(Oracle(config, changed).scores(users), before) > 1e-4, name


@pytest.mark.parametrize("kind, tolerance", [("f16", 3e-3), ("bf16", 2e-2)])
def test_the_pool_may_be_of_half_precision(made, kind, tolerance):
    config = settings(kv__type=kind, kv__page_size=8)
    folder = check(made, config, {"ragged": RAGGED}, tolerance)
    assert json.loads((folder / "pagoda.json").read_text())["kv"]["bytes_per_token"] == 2 * 2 * 16 * 2


def test_rows_of_almost_nothing_are_not_blown_up(made):
    config = settings(block__residual=False)
    weights = tensors(config)
    weights["layers.1.output.weight"] *= 1e-8
    check(made, config, {"one": [(5, 3)]}, weights=weights)


def test_unknown_keys_get_the_default_row_and_no_key_gets_nothing(made):
    config, seen = settings(), {}
    weights = tensors(config)
    folder = made(config, weights)
    for key in -1, 40, 2**40:
        users = people(config, [(5, 2)])
        users[0]["events"][1]["genre"] = users[0]["candidates"][0]["genre"] = users[0]["events"][2]["item"] = key
        seen[key] = Engine(folder, users).run()
        assert error(seen[key], Oracle(config, weights).scores(users)) <= 1e-5
    assert (seen[40] == seen[2**40]).all()
    assert error(seen[40], seen[-1]) > 1e-3


# ---- the folder --------------------------------------------------------------------------------------------------


def test_the_graph_is_what_pagoda_json_says(made):
    config = with_user(settings("nvidia", True, times=HOURS))
    folder = made(config, tensors(config))
    about, model = json.loads((folder / "pagoda.json").read_text()), onnx.load(folder / "model.onnx")
    onnx.checker.check_model(model, full_check=False)
    assert {(opset.domain, opset.version) for opset in model.opset_import} == {("", 17), ("ai.pagoda", 1)}
    assert model.ir_version == 8
    roles = [name for role, name in about["inputs"].items() if role != "kv_pools" and name]
    keys = [feature["input"] for feature in about["features"]]
    pools = about["inputs"]["kv_pools"]
    assert sorted(i.name for i in model.graph.input) == sorted(roles + keys + pools)
    assert [o.name for o in model.graph.output] == [about["outputs"]["scores"], *about["outputs"]["kv_pools"]]
    shape = [
        d.dim_value or d.dim_param
        for d in next(i for i in model.graph.input if i.name == pools[0]).type.tensor_type.shape.dim
    ]
    kv = about["kv"]
    assert shape == ["pages", 2, kv["page_size"], kv["heads"], kv["head_size"]]
    assert about["sequence"] == {
        "begin": [["age"], ["town"]],
        "event": [["item", "genre"], ["rating"]],
        "candidate": [["item", "genre"]],
        "interleaved": True,
    }
    assert about["limits"] == {"max_history": 100, "max_candidates": 50, "max_history_rows": 202}
    assert about["tasks"][1] == {"name": "click", "index": 1, "activation": "sigmoid"}
    assert about["attention"]["alpha"] == pytest.approx(8**-0.5)


def test_without_a_cache_the_graph_has_no_pools(made):
    config = settings(positions=END)
    model = onnx.load(made(config, tensors(config)) / "model.onnx")
    assert {i.name for i in model.graph.input} == {
        "keys.item",
        "keys.genre",
        "keys.rating",
        "positions",
        "row_offsets",
        "num_candidates",
        "candidate_rows",
    }
    assert [o.name for o in model.graph.output] == ["scores"]


def test_the_documented_example_is_true(made):
    text = (ROOT / "sdk/docs/model-folder.md").read_text()
    # The third is of a language model, cut short.
    manifest, config = (json.loads(block) for block in re.findall(r"```json\n(.*?)```", text, re.DOTALL)[:2])
    about = json.loads((made(config, tensors(config)) / "pagoda.json").read_text())
    assert list(about) == list(manifest)
    assert f"version {about['version']}\n" in (ROOT / "sdk/docs/cli.md").read_text()
    # There hashes are cut short.
    about["version"] = shortened(about["version"])
    for file in about["files"].values():
        file["sha256"] = shortened(file["sha256"])
    assert about == manifest


def shortened(sha256):
    return f"{sha256[:8]}…"


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def version(folder):
    return json.loads((folder / "pagoda.json").read_text())["version"]


@pytest.mark.parametrize("lookup", ["gather", "bag"])
def test_the_same_model_gives_the_same_bytes_and_another_one_another_version(made, lookup):
    config = settings(lookup=lookup)
    weights = tensors(config)
    first, again = made(config, weights), made(config, dict(reversed(weights.items())))
    assert contents(first) == contents(again)
    versions = {version(first)}
    for name in "layers.1.output.weight", "tables.items.rows", "head.2.bias":
        changed = weights[name].copy()
        changed.flat[-1] = np.nextafter(changed.flat[-1], np.float32(9))
        versions.add(version(made(config, weights | {name: changed})))
    versions.add(version(made(settings(lookup=lookup, limits__max_candidates=51), weights)))
    versions.add(
        version(made(settings(lookup=lookup, tables__items={"rows": 40, "dim": 16, "default_row": 3}), weights))
    )
    assert len(versions) == 6
    text = (first / "pagoda.json").read_bytes()
    assert hashlib.sha256(text.replace(version(first).encode(), b"0" * 64)).hexdigest() == version(first)
    for name, said in json.loads(text)["files"].items():
        data = (first / name).read_bytes()
        assert said == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


@pytest.mark.parametrize("compute", ["f32", "bf16"])
def test_weights_beyond_the_limit_are_in_a_file_beside_the_model(made, compute):
    config = settings(lookup="gather", compute=compute)
    weights = tensors(config)
    inside = made(config, weights)
    size = sum(onnx.numpy_helper.to_array(w).nbytes for w in onnx.load(inside / "model.onnx").graph.initializer)
    assert contents(made(config, weights, max_model_bytes=size)) == contents(inside)
    beside = made(config, weights, max_model_bytes=size - 1)
    assert contents(made(config, weights, max_model_bytes=0)) == contents(beside)
    files = json.loads((beside / "pagoda.json").read_text())["files"]
    assert list(files) == ["model.onnx", "weights.bin"] and version(beside) != version(inside)
    for name, said in files.items():
        data = (beside / name).read_bytes()
        assert said == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    large = 0
    for tensor in onnx.load(beside / "model.onnx", load_external_data=False).graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        if place:
            assert place["location"] == "weights.bin" and int(place["offset"]) % 4096 == 0
            large += 1
        else:
            assert onnx.numpy_helper.to_array(tensor).nbytes < 1024
    assert large >= 3
    loaded = [onnx.load(folder / "model.onnx").graph.initializer for folder in (inside, beside)]
    for one, other in zip(*loaded, strict=True):
        assert (one.name, one.data_type, one.dims, one.raw_data) == (
            other.name,
            other.data_type,
            other.dims,
            other.raw_data,
        )
    users = people(config, RAGGED)
    assert (Engine(beside, users).run() == Engine(inside, users).run()).all()


def test_a_bag_model_has_its_tables_in_files(made):
    config = settings(lookup="bag", tables__items={"rows": 40, "dim": 16, "keyed": True})
    keys = np.random.default_rng(4).permutation(np.arange(40) * 10**15 - 7)
    weights = tensors(config) | {"tables.items.keys": keys}
    folder = made(config, weights)
    about, model = json.loads((folder / "pagoda.json").read_text()), onnx.load(folder / "model.onnx")
    onnx.checker.check_model(model)
    bags = [node for node in model.graph.node if node.op_type == "EmbeddingBag"]
    attributes = [{a.name: onnx.helper.get_attribute_value(a) for a in node.attribute} for node in bags]
    assert attributes == [{"table": name, "combiner": b"none"} for name in (b"items", b"genres", b"ratings")]
    assert [(node.domain, list(node.input)) for node in bags] == [
        ("ai.pagoda", [f"keys.{name}"]) for name in ("item", "genre", "rating")
    ]
    assert not any(initializer.name.startswith("tables") for initializer in model.graph.initializer)
    for table in about["tables"]:
        stored = load_file(folder / table["file"])
        assert set(stored) == {"rows", *(["keys"] if table["keyed"] else [])}
        assert stored["rows"].tobytes() == weights[f"tables.{table['name']}.rows"].tobytes()
        status = (folder / table["file"]).stat()
        assert about["files"][table["file"]]["bytes"] == status.st_size
        assert status.st_mode & 0o777 == 0o644, "others may read it, as the rest of the folder"
    assert load_file(folder / "tables/items.safetensors")["keys"].tobytes() == keys.tobytes()
    assert about["tables"][1] == {
        "name": "genres",
        "file": "tables/genres.safetensors",
        "rows": 6,
        "dim": 16,
        "keyed": False,
        "default_row": 0,
    }


@pytest.mark.parametrize("tokens", [settings(interleaved=True)["tokens"], WIDE], ids=["plain", "mlp"])
def test_a_bag_model_computes_the_same_when_the_rows_are_looked_up_elsewhere(made, tokens):
    """The bag's graph with EmbeddingBag replaced by what it is to give: rows, or a default where there is none."""
    config = settings("meta", lookup="bag", tokens=tokens)
    weights, users = tensors(config), people(config, RAGGED)
    folder = made(config, weights)
    model = onnx.load(folder / "model.onnx")
    for node in model.graph.node:
        if node.op_type == "EmbeddingBag":
            name = next(a.s.decode() for a in node.attribute if a.name == "table")
            rows = np.vstack([weights[f"tables.{name}.rows"], np.full([1, 16], 5, np.float32)])
            model.graph.initializer.append(onnx.numpy_helper.from_array(rows, f"{node.output[0]}.rows"))
            keys = node.input[0]
            node.CopyFrom(onnx.helper.make_node("Gather", [f"{node.output[0]}.rows", keys], [node.output[0]]))
    onnx.save(model, folder / "model.onnx")
    assert error(Engine(folder, users).run(), Oracle(config, weights).scores(users)) <= 1e-5


def test_tables_may_be_in_files_of_their_own(made, tmp_path):
    config = settings(tables__items={"rows": 40, "dim": 16, "file": "movies.safetensors"})
    weights = tensors(config)
    save_file({"rows": weights["tables.items.rows"]}, tmp_path / "movies.safetensors")
    rest = {name: array for name, array in weights.items() if name != "tables.items.rows"}
    check(made, config, {"one": [(5, 3)]}, stored=rest)
    config["tables"]["items"]["rows_tensor"] = "embedding.weight"
    save_file({"embedding.weight": weights["tables.items.rows"]}, tmp_path / "movies.safetensors")
    check(made, config, {"one": [(5, 3)]}, stored=rest)
    save_file({"embedding.weight": weights["tables.items.rows"], "x": np.ones(1)}, tmp_path / "movies.safetensors")
    with pytest.raises(ExportError, match=r"movies.safetensors: .*all but these tensors: x\."):
        made(config, rest)


# ---- .pt files ---------------------------------------------------------------------------------------------------


class FakeTensor:
    """As much of a torch.Tensor as the exporter uses."""

    def __init__(self, array):
        self.array = array

    def detach(self):
        return self

    cpu = float = detach

    def is_floating_point(self):
        return self.array.dtype.kind == "f"

    def numpy(self):
        return self.array


def test_torch_files_are_read_with_torch(tmp_path, monkeypatch):
    config = settings()
    weights, (path, configured) = tensors(config), (tmp_path / "model.pt", tmp_path / "config.json")
    configured.write_text(json.dumps(config))
    save_file(weights, tmp_path / "same.safetensors")
    export(tmp_path / "same.safetensors", configured, tmp_path / "same")
    try:
        import torch
    except ImportError:
        path.write_bytes(b"")
        state = {
            "model_state_dict": {n: FakeTensor(a) for n, a in weights.items()} | {"layers.0._extra_state": b"none"}
        }
        load = lambda given, map_location, weights_only: state if given == path else None
        monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(load=load, Tensor=FakeTensor))
    else:
        torch.save({"model_state_dict": {name: torch.tensor(array) for name, array in weights.items()}}, path)
    export(path, configured, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "same")


def test_tensors_that_do_not_lie_in_rows_are_written_in_rows(tmp_path, monkeypatch):
    """torch.save keeps the strides of a view."""
    config = settings(lookup="bag", tables__items={"rows": 40, "dim": 16, "keyed": True})
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = tensors(config) | {"tables.items.keys": np.arange(40) * 3}
    views = {name: array.T.copy().T for name, array in weights.items()}
    views["tables.items.keys"] = np.stack([weights["tables.items.keys"], np.arange(40)], axis=1)[:, 0]
    assert not views["tables.items.rows"].flags.c_contiguous and not views["tables.items.keys"].flags.c_contiguous
    for at, kept in ("same", weights), ("views", views):
        source = checkpoint.Source(at, kept, kept.__getitem__)
        monkeypatch.setattr(checkpoint, "open_file", lambda _, source=source: source)
        export("model.pt", tmp_path / "config.json", tmp_path / at)
    assert contents(tmp_path / "views") == contents(tmp_path / "same")


def test_without_torch_a_torch_file_is_refused_with_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(settings()))
    (tmp_path / "model.pt").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        ExportError, match="torch, which is not installed: pip install torch, or save the state dict with"
    ):
        export(tmp_path / "model.pt", tmp_path / "config.json", tmp_path / "out")


# ---- what is wrong -----------------------------------------------------------------------------------------------


def nan(array):
    array = array.copy()
    array[1, 2] = np.nan
    return array


BAD_WEIGHTS = {
    "a missing tensor": ({"head.2.bias": None}, {}, r"no tensor head\.2\.bias \(for head\.2\.bias, of shape \[2\]\)"),
    "no layers": ({"layers.0.uvqk.weight": None}, {}, r"no tensor layers\.0\.uvqk\.weight, .*Tensors there: head\.0"),
    "a wrong shape": (
        {"head.0.weight": lambda a: a.T.copy()},
        {},
        r"head\.0\.weight .* shape \[16, 12\], .*\[12, 16\]",
    ),
    "too few rows": (
        {"tables.items.rows": lambda a: a[:9]},
        {},
        r"tables\.items\.rows .*\[9, 16\], .*makes it \[40, 16\]",
    ),
    "NaN": (
        {"layers.1.uvqk.weight": nan},
        {},
        r"layers\.1\.uvqk\.weight .*1 of 1024 numbers that are NaN.*at \[1, 2\]",
    ),
    "NaN in a table": ({"tables.items.rows": nan}, {}, r"tables\.items\.rows for the table items has 1 of 640 .* NaN"),
    "too large": (
        {"head.2.bias": lambda a: a.astype(float) * 1e300},
        {},
        r"head\.2\.bias .* 2 of 2 .*infinite in float32",
    ),
    "whole numbers": ({"head.2.bias": lambda a: a.astype(np.int32)}, {}, r"head\.2\.bias has elements of int32"),
    "a tensor too many": (
        {"times.weight": lambda _: np.ones(3)},
        {},
        r"all but these tensors: times\.weight\. If the model",
    ),
    "a key twice": (
        {"tables.items.keys": lambda _: np.arange(40) // 2},
        {"keyed": True},
        r"tables\.items\.keys has the key 0 2 times",
    ),
    "the key -1": (
        {"tables.items.keys": lambda _: np.arange(40) - 1},
        {"keyed": True},
        r"tables\.items\.keys has the key -1",
    ),
    "keys of i32": (
        {"tables.items.keys": lambda _: np.arange(40, dtype=np.int32)},
        {"keyed": True},
        r"elements of int32: keys have",
    ),
    "a candidate's key that is none": (
        {"tables.items.keys": lambda _: np.arange(40) * 2},
        {"keyed": True},
        r"candidate_key of seen is 7, which the table items does not have: give a key of that table",
    ),
    "no keys": ({}, {"keyed": True}, r"no tensor tables\.items\.keys \(for the table items, of shape \[40\]\)"),
}


@pytest.mark.parametrize("what", BAD_WEIGHTS)
def test_bad_weights_are_refused_by_name(made, tmp_path, what):
    changes, table, message = BAD_WEIGHTS[what]
    features = [{"name": "rating", "table": "ratings"}, {"name": "seen", "table": "items", "candidate_key": 7}]
    config = settings(
        lookup="bag", tables__items={"rows": 40, "dim": 16} | table, tokens__action__features=features
    )
    weights = tensors(config)
    for name, change in changes.items():
        weights[name] = change and np.ascontiguousarray(change(weights.get(name)))
    with pytest.raises(ExportError, match=message):
        made(config, {name: array for name, array in weights.items() if array is not None})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model0.safetensors"]


FEATURE = {"name": "item", "table": "items"}
BAD_SETTINGS = {
    "an unknown key": (
        {"positoins": {}},
        r"config\.positoins is not known \(did you mean positions\?\): remove it, or",
    ),
    "an unknown key inside": (
        {"block__dropout": 0.1},
        r"config\.block\.dropout is not known.*: remove it, or use one of",
    ),
    "a block of nothing": ({"block": []}, r"config\.block is \[\]: it has to be an object with named entries"),
    "no block": ({"block": None}, r"config\.block is missing: add it"),
    "no layers": ({"block__layers": None}, r"config\.block\.layers is missing"),
    "layers of 0": ({"block__layers": 0}, r"config\.block\.layers is 0: it has to be at least 1"),
    "too large": ({"block__scaling_seqlen": 2**70}, r"scaling_seqlen is 1180591620717411303424: .* at most 2147483647"),
    "too large a float": (
        {"block__alpha": 1e300},
        r"config\.block\.alpha is 1e\+300: it has to be a finite number in float32",
    ),
    "a text for a number": ({"block__heads": "2"}, r"config\.block\.heads is '2': it has to be a whole number"),
    "true for a number": ({"block__heads": True}, r"config\.block\.heads is True: it has to be a whole number"),
    "a number for a flag": ({"block__residual": 1}, r"config\.block\.residual is 1: it has to be true or false"),
    "v of another size": (
        {"block__hidden_size": 4},
        r"hidden_size is 4 and .*head_size is 8: .*one head size for queries",
    ),
    "a batch's scaling": ({"block__scaling_seqlen": -1}, r"scaling_seqlen is -1, .*depend on who else is in the batch"),
    "an unknown flavour": (
        {"block__flavour": "metta"},
        r"flavour is 'metta': .*one of nvidia, meta \(did you mean meta\?\)",
    ),
    "group norm of nvidia": (
        {"block__group_norm": True},
        r"group_norm is true, but blocks of flavour nvidia have none",
    ),
    "names of the other": ({"checkpoint": {"names": "meta"}}, r"names is meta and config\.block\.flavour is nvidia"),
    "an odd page": ({"kv__page_size": 12}, r"config\.kv\.page_size is 12: it has to be a multiple of 8"),
    "an unknown type": ({"kv__type": "f8"}, r"config\.kv\.type is 'f8': it has to be one of f32, f16, bf16"),
    "a candidate's key beyond its table": (
        {"tokens__action": {"features": [ACTION["features"][0] | {"candidate_key": 5}]}},
        r"candidate_key of rating is 5, but config\.tables\.ratings has rows 0 to 4: give the number of one",
    ),
    "a candidate's key before its table": (
        {"tokens__action": {"features": [ACTION["features"][0] | {"candidate_key": -2}]}},
        r"candidate_key of rating is -2, but config\.tables\.ratings has rows 0 to 4",
    ),
    "an unknown table": (
        {"tokens__item__features": [{"name": "a", "table": "b"}]},
        r"features\[0\]\.table is 'b', which is not",
    ),
    "a table too many": ({"tables__towns": {"rows": 2, "dim": 3}}, r"config\.tables\.towns is used by no feature"),
    "a bad table name": (
        {"tables__../x": {"rows": 2, "dim": 3}},
        r"config\.tables\.\.\./x: a table's name has letters",
    ),
    "a default beyond": (
        {"tables__genres__default_row": 6},
        r"default_row is 6: it has to be at least 0 and at most 5",
    ),
    "keys to gather": (
        {"tables__genres__keyed": True},
        r"config\.tables\.genres\.keyed is true, but with lookup gather",
    ),
    "widths that differ": ({"tables__genres__dim": 8}, r"different widths can not be added \(item 16, genre 8\)"),
    "a wrong width": (
        {"embedding_size": 32},
        r"config\.tokens\.item gives rows of width 16, but config\.embedding_size is 32",
    ),
    "a feature twice": ({"tokens__action__features": [FEATURE]}, r"config\.tokens has the name 'item' 2 times"),
    "no features": ({"tokens__item__features": []}, r"config\.tokens\.item\.features is empty: name at least one"),
    "interleaved nothing": ({"tokens": ALONE | {"interleaved": True}}, r"interleaved is true, but there is no action"),
    "tasks that do not fit": (
        {"head__tasks": [{"name": "a"}]},
        r"gives 2 numbers a candidate and config\.head\.tasks names 1",
    ),
    "a task twice": ({"head__tasks": [{"name": "a"}] * 2}, r"config\.head\.tasks has the name 'a' 2 times"),
    "an odd step": ({"head__mlp": [{"linear": 2}, "cube"]}, r"config\.head\.mlp\[1\] is 'cube': .*relu, gelu"),
    "infinite": ({"block__alpha": float("inf")}, r"config\.block\.alpha is inf: it has to be a finite number"),
    "a rename of nothing": (
        {"checkpoint": {"rename": {"x.weight": "y"}}},
        r"rename\.x\.weight: the configuration calls for no",
    ),
}


@pytest.mark.parametrize("what", BAD_SETTINGS)
def test_a_bad_configuration_is_refused_by_name(made, what):
    changes, message = BAD_SETTINGS[what]
    config = settings(**changes)
    with pytest.raises(ExportError, match=message):
        made(config, tensors(settings()))


def slips(value):
    """The same with one thing in it replaced, in every place."""
    for odd in None, True, -1, 0, 7, 2**70, 1.5, float("nan"), "", "x", [], [None], {}, {"x": None}:
        yield odd
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else []
    for key, part in entries:
        for slip in slips(part):
            changed = copy.copy(value)
            changed[key] = slip
            yield changed


@pytest.mark.parametrize("variant", ["user rows, from the end", "token mlps", "quarters"])
def test_a_slip_anywhere_in_a_configuration_is_refused_in_words_or_fine(variant):
    config = settings(times=QUARTERS) if variant == "quarters" else VARIANTS[variant]
    config = config | {"checkpoint": {"rename": {"x": "y"}, "ignore": ["z"]}}
    refused = 0
    for slip in slips(config):
        try:
            parse(slip)
        except ExportError as said:
            refused += 1
            assert len(str(said)) > 20
    assert refused > 500


def test_what_is_not_a_configuration_or_checkpoint_is_refused(tmp_path):
    config, weights, out = tmp_path / "config.json", tmp_path / "model.safetensors", tmp_path / "out"
    for text, message in {
        "{": r"config\.json is not JSON: line 1, column 2",
        "[]": r"config is \[\]: it has to be an object",
        '{"block": {}, "block": {}}': r"has the name 'block' 2 times",
    }.items():
        config.write_text(text)
        with pytest.raises(ExportError, match=message):
            export(weights, config, out)
    config.write_text(json.dumps(settings()))
    with pytest.raises(ExportError, match="model.safetensors is not a file"):
        export(weights, config, out)
    save_file(tensors(settings()), weights)
    whole = weights.read_bytes()
    for damaged in b"", whole[:100], whole[:-7], b"x" * 50:
        weights.write_bytes(damaged)
        with pytest.raises(ExportError, match="model.safetensors is no safetensors file, or is damaged"):
            export(weights, config, out)
    with pytest.raises(ExportError, match="checkpoints end in .safetensors, .pt or .pth"):
        export(config, config, out)
    with pytest.raises(ExportError, match="missing.json can not be read"):
        export(weights, tmp_path / "missing.json", out)
    assert not out.exists()


def test_the_command(tmp_path, capsys):
    config, weights, out = (tmp_path / name for name in ("config.json", "model.safetensors", "out/model"))
    config.write_text(json.dumps(settings()))
    save_file(tensors(settings()), weights)
    given = [str(weights), str(config), str(out)]
    assert command(given) == 0
    assert "version" in (said := capsys.readouterr().out) and "256 bytes for each row of history" in said
    before = contents(out)
    assert command(given) == 1
    assert "exists and is not empty: add --force to replace it" in capsys.readouterr().err
    save_file(tensors(settings(), seed=9), weights)
    assert command([*given, "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == version(out)
    assert contents(out).keys() == before.keys() and contents(out) != before
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").write_text("")
    assert command([*given[:2], str(tmp_path / "other"), "--force"]) == 1
    assert "exists and is not empty: give another path" in capsys.readouterr().err
    assert sorted(path.name for path in out.parent.iterdir()) == ["model"]
    run = [sys.executable, "-m", "pagoda.export", *given]
    done = subprocess.run(run, cwd=ROOT / "bindings/python", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "") and "pagoda.export: " in done.stderr
