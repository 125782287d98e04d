"""Makes the model folders that tests/engine serves, and the scores that the float64 oracle gives for them.

From the top of the repository: PYTHONPATH=tests:bindings/python target/venv/bin/python tests/data/engine/make.py
"""

import hashlib
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import onnx
from exported import BEFORE, END, HOURS, Oracle, people, settings, tensors, with_user
from pagoda.export import export
from safetensors.numpy import save_file

HERE = Path(__file__).parent
SIZES = {"embedding_size": 8, "block__heads": 1, "block__layers": 2, "block__head_size": 8}
DIMS = {f"tables__{name}__dim": 8 for name in ("items", "genres", "ratings")}
# Histories of several pages of 8 rows, of less than one, and of nothing.
USERS = [(23, 5), (9, 3), (3, 4), (0, 2), (14, 6), (30, 1)]


def small(**changes):
    config = settings(**(SIZES | DIMS | {"limits__max_history": 40} | changes))
    config["head"]["mlp"] = [{"linear": 6}, "relu", {"linear": 2}]
    return config


def even(config):
    """User tables as wide as the others here."""
    for table in config["tables"].values():
        table["dim"] = config["embedding_size"]
    return config


def make(name, config, seed=1, keys=None):
    """Exports a model and returns its weights."""
    weights, here = tensors(config, seed), HERE / name
    stored = dict(weights)
    if keys is not None:
        stored["tables.items.keys"] = keys
    shutil.rmtree(here, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        save_file(stored, f"{folder}/weights.safetensors")
        Path(f"{folder}/config.json").write_text(json.dumps(config))
        export(f"{folder}/weights.safetensors", f"{folder}/config.json", here)
    return weights


def columns(rows, names):
    return {name: [row[name] for row in rows] for name in names}


def cases(name, config, weights, users):
    """What the oracle says of users after some of their events."""
    oracle, tokens = Oracle(config, weights), config["tokens"]
    items = [feature["name"] for feature in tokens["item"]["features"]]
    actions = [feature["name"] for feature in tokens["action"]["features"]]
    made = []
    for user in users:
        count = len(user["events"])
        steps = []
        for events in sorted({0, count // 3, count // 2, max(count - 1, 0), count}):
            scores = oracle.scores([user | {"events": user["events"][:events]}])
            steps.append({"events": events, "scores": [float(f"{score:.9g}") for score in scores.ravel()]})
        made.append(
            {
                "keys": user["keys"],
                "events": columns(user["events"], items + actions),
                "times": [event["time"] for event in user["events"]],
                "candidates": columns(user["candidates"], items),
                "now": user["now"],
                "steps": steps,
            }
        )
    (HERE / f"{name}.json").write_text(json.dumps(made) + "\n")


def seal(folder, model):
    """Writes another graph into a folder, with the hashes that it then has."""
    (folder / "model.onnx").write_bytes(model.SerializeToString(deterministic=True))
    about = json.loads((folder / "pagoda.json").read_text())
    data = (folder / "model.onnx").read_bytes()
    about["files"]["model.onnx"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    about["version"] = "0" * 64
    text = json.dumps(about, indent=2) + "\n"
    version = hashlib.sha256(text.encode()).hexdigest()
    (folder / "pagoda.json").write_text(text.replace("0" * 64, version, 1))


# One model with its tables in the graph and in files, and the same trained anew.
config = even(with_user(small(interleaved=True, times=HOURS)))
users = people(config, USERS)
for name, lookup, seed in ("gather", "gather", 1), ("bag", "bag", 1), ("second", "gather", 5):
    cases(name, config | {"lookup": lookup}, make(name, config | {"lookup": lookup}, seed), users)

# The same features with another number of tasks, for swaps.
three = config | {"head": config["head"] | {"mlp": [{"linear": 6}, "relu", {"linear": 3}]}}
three["head"]["tasks"] = [*config["head"]["tasks"], {"name": "buy", "activation": "sigmoid"}]
cases("three", three, make("three", three, 7), users)

# The same with layers of Pagoda's operators, and a wider one whose layers compute in bf16.
fused = config | {"fused": True}
cases("fused", fused, make("fused", fused), users)
wide = {"embedding_size": 64, "block__heads": 2, "block__head_size": 32}
half = even(with_user(small(interleaved=True, times=HOURS, compute="bf16", **wide)))
cases("half", half, make("half", half), users)

# Keys that are not the numbers of rows.
config = small(flavour="meta", lookup="bag", tables__items__keyed=True)
keys = 10**12 + 7 * np.arange(40, dtype=np.int64) ** 2
weights = make("keyed", config, keys=keys)
users = people(config, USERS)
cases("keyed", config, weights, users)
made = json.loads((HERE / "keyed.json").read_text())
for user in made:
    for place in "events", "candidates":
        user[place]["item"] = [int(keys[row]) for row in user[place]["item"]]
(HERE / "keyed.json").write_text(json.dumps(made) + "\n")

# One whose keys and values can not be kept.
config = small(flavour="meta", positions=END, times=BEFORE)
cases("uncached", config, make("uncached", config), people(config, USERS))

# One that fails in ONNX Runtime when an event has a rating beyond the table: its index is not clipped.
config = small()
make("guilty", config)
model = onnx.load(HERE / "guilty/model.onnx")
clips = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "Clip"}
for node in model.graph.node:
    if node.op_type == "Gather" and node.input[1] in clips and node.input[0] == "tables.ratings":
        node.input[1] = clips[node.input[1]]
about = json.loads((HERE / "guilty/pagoda.json").read_text())
next(table for table in about["tables"] if table["name"] == "ratings")["rows"] = 1000
(HERE / "guilty/pagoda.json").write_text(json.dumps(about))
seal(HERE / "guilty", model)
