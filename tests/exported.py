"""What the exporter's tests share: small models, the formulas in float64, and an engine of sorts that runs a folder."""

import copy
import json
import math

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
from capi import ROOT, number_of
from pagoda.export import export
from safetensors.numpy import save_file

OPS = ROOT / "target/release/libpagoda_ops.so"
SIDES = ("weight", "bias")
START, END = {"counted": "from_start", "buckets": 12}, {"counted": "from_end", "buckets": 9}
BEFORE = {"kind": "before_request", "buckets": 40}
HOURS = {"kind": "absolute", "bucket_seconds": 3600, "buckets": 24, "wrap": True}
# Some events are before the origin, none beyond the last.
QUARTERS = {"kind": "absolute", "bucket_seconds": 7_862_400, "buckets": 6, "origin": 1_668_000_000}
MLP = [{"linear": 24}, "swish_layer_norm", {"linear": 16, "bias": False}, "layer_norm"]
WIDE = {
    "item": {
        "features": [{"name": "item", "table": "items"}, {"name": "genre", "table": "genres"}],
        "combine": "concat",
        "mlp": [{"linear": 16}, "gelu", {"linear": 16}],
    },
    "action": {"features": [{"name": "rating", "table": "ratings"}], "mlp": MLP},
    "interleaved": True,
}


# ---- models and users --------------------------------------------------------------------------------------------


def settings(flavour="nvidia", interleaved=False, **changes):
    """A small model's configuration; changes go by path, block__layers=3, and None takes away."""
    made = {
        "embedding_size": 16,
        "block": {"flavour": flavour, "layers": 2, "heads": 2, "head_size": 8, "scaling_seqlen": 10},
        "kv": {"page_size": 8},
        "tables": {
            "items": {"rows": 40, "dim": 16},
            "genres": {"rows": 6, "dim": 16, "default_row": 0},
            "ratings": {"rows": 5, "dim": 16},
        },
        "tokens": {
            "item": {"features": [{"name": "item", "table": "items"}, {"name": "genre", "table": "genres"}]},
            "action": {"features": [{"name": "rating", "table": "ratings"}]},
            "interleaved": interleaved,
        },
        "positions": START,
        "head": {
            "mlp": [{"linear": 12}, "relu", {"linear": 2}],
            "tasks": [{"name": "like", "activation": "none"}, {"name": "click", "activation": "sigmoid"}],
        },
        "limits": {"max_history": 100, "max_candidates": 50},
        "lookup": "gather",
    }
    made = copy.deepcopy(made)
    for path, value in changes.items():
        *way, last = path.split("__")
        place = made
        for key in way:
            place = place[key]
        if value is None:
            place.pop(last)
        else:
            place[last] = copy.deepcopy(value)
    return made


def with_user(config, sees_history=False, mlp=()):
    config["tables"] |= {"ages": {"rows": 7, "dim": 16}, "towns": {"rows": 9, "dim": 16}}
    features = [{"name": "age", "table": "ages"}, {"name": "town", "table": "towns"}]
    config["tokens"]["user"] = {"features": features, "sees_history": sees_history, "mlp": list(mlp)}
    return config


def mlp_tensors(at, steps, width):
    """Names and shapes as a torch.nn.Sequential of the steps would have them."""
    shapes = {}
    for number, step in enumerate(steps):
        if isinstance(step, dict):
            shapes[f"{at}.{number}.weight"] = (step["linear"], width)
            width = step["linear"]
            if step.get("bias", True):
                shapes[f"{at}.{number}.bias"] = (width,)
        elif step.endswith("norm"):
            shapes |= {f"{at}.{number}.{side}": (width,) for side in SIDES}
    return shapes


def tensors(config, seed=1):
    """Random weights under Pagoda's names, of a size that makes every part count."""
    block, size = config["block"], config["embedding_size"]
    width = block["heads"] * block["head_size"]
    shapes = {}
    for layer in range(block["layers"]):
        norm = block["heads"] if block.get("group_norm") else width
        part = {"input_norm.weight": (size,), "input_norm.bias": (size,), "output_norm.weight": (norm,)}
        part |= {"output_norm.bias": (norm,), "uvqk.weight": (4 * width, size), "uvqk.bias": (4 * width,)}
        part["output.weight"] = (size, width * (3 if block["flavour"] == "meta" else 1))
        learned = {"input_norm": "input_norm_learned", "output_norm": "output_norm_learned", "uvqk.bias": "uvqk_bias"}
        for begins, flag in learned.items():
            if not block.get(flag, True):
                part = {name: shape for name, shape in part.items() if not name.startswith(begins)}
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in part.items()}
    for name in "positions", "times":
        if name in config:
            shapes[f"{name}.weight"] = (config[name]["buckets"], size)
    for kind in "item", "action", "user":
        token = config["tokens"].get(kind, {})
        dims = [config["tables"][feature["table"]]["dim"] for feature in token.get("features", [])]
        shapes |= mlp_tensors(
            f"{kind}.mlp", token.get("mlp", []), sum(dims) if token.get("combine") else max(dims, default=0)
        )
    if config.get("final_norm") == "layer_norm":
        shapes |= {f"final_norm.{side}": (size,) for side in SIDES}
    shapes |= mlp_tensors("head", config["head"]["mlp"], size)
    shapes |= {f"tables.{name}.rows": (table["rows"], table["dim"]) for name, table in config["tables"].items()}
    random = np.random.default_rng(seed)
    made = {}
    for name, shape in shapes.items():
        values = random.standard_normal(shape)
        if len(shape) == 2 and not name.startswith("tables"):
            values *= 1.5 / np.sqrt(shape[-1])
        made[name] = (values + (1 if "norm.weight" in name else 0)).astype(np.float32)
    return made


def people(config, counts, seed=2):
    """Users with so many events and candidates each."""
    random = np.random.default_rng(seed)
    tokens = config["tokens"]

    def keys(kind):
        named = {f["name"]: config["tables"][f["table"]]["rows"] for f in tokens.get(kind, {}).get("features", [])}
        return {name: int(random.integers(rows)) for name, rows in named.items()}

    users = []
    for events, candidates in counts:
        now = 1_700_000_000 + int(random.integers(10**6))
        times = sorted(now - random.integers(1, 40_000_000, events))
        history = [keys("item") | keys("action") | {"time": int(time)} for time in times]
        users.append(
            {
                "keys": keys("user"),
                "events": history,
                "candidates": [keys("item") for _ in range(candidates)],
                "now": now,
            }
        )
    return users


RAGGED = [(7, 4), (0, 3), (25, 0), (1, 1), (0, 0), (18, 6)]
BATCHES = {
    "nobody": [],
    "one": [(13, 5)],
    "three": [(9, 2), (0, 3), (17, 1)],
    "ragged": RAGGED,
    "no candidates": [(5, 0)],
}


# ---- the oracle: the formulas in float64, user by user -------------------------------------------------------------


def silu(x):
    return x / (1 + np.exp(-x))


def layer_norm(x, weight=1.0, bias=0.0, epsilon=1e-5):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + epsilon) * weight + bias


ACTIVATIONS = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / np.sqrt(2))),
    "silu": silu,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": np.tanh,
}


class Oracle:
    def __init__(self, config, weights):
        self.config, self.block = config, config["block"]
        self.weights = {name: array.astype(np.float64) for name, array in weights.items()}

    def scores(self, users):
        parts = [self.of_user(user) for user in users]
        return np.concatenate([np.zeros([0, len(self.config["head"]["tasks"])]), *parts])

    def of_user(self, user):
        tokens, config = self.config["tokens"], self.config
        rows, times = [], []
        contextual = tokens.get("user", {}).get("features", [])
        for feature in contextual:
            rows.append(self.mlp("user.mlp", tokens["user"]["mlp"], self.vector(feature, user["keys"])))
            times.append(0)
        for event in user["events"]:
            item = self.token("item", event)
            action = self.token("action", event) if "action" in tokens else np.zeros_like(item)
            rows += [item, action] if tokens["interleaved"] else [item + action]
            times += [event["time"]] * (2 if tokens["interleaved"] else 1)
        history = len(rows)
        for candidate in user["candidates"]:
            row = self.token("item", candidate)
            for feature in tokens.get("action", {}).get("features", []):
                if "candidate_key" in feature:
                    row = row + self.vector(feature, {feature["name"]: feature["candidate_key"]})
            rows.append(row)
            times.append(user["now"])
        if not rows:
            return np.zeros([0, len(config["head"]["tasks"])])
        x = np.array(rows)
        if config.get("scale_embeddings", "positions" in config or "times" in config):
            x = x * np.sqrt(config["embedding_size"])
        x = x + self.places(len(rows), history, len(contextual)) + self.moments(times)
        mask = self.mask(len(rows), history, len(contextual))
        for layer in range(self.block["layers"]):
            x = self.layer(x, mask, layer)
        return self.head(x[history:])

    def vector(self, feature, keys):
        key, table = keys[feature["name"]], self.config["tables"][feature["table"]]
        if key == -1:
            return np.zeros(table["dim"])
        if key >= table["rows"]:
            if "default_row" not in table:
                return np.zeros(table["dim"])
            key = table["default_row"]
        return self.weights[f"tables.{feature['table']}.rows"][key]

    def token(self, kind, keys):
        token = self.config["tokens"][kind]
        vectors = [self.vector(feature, keys) for feature in token["features"]]
        x = np.concatenate(vectors) if token.get("combine") == "concat" else sum(vectors)
        return self.mlp(f"{kind}.mlp", token.get("mlp", []), x)

    def mlp(self, at, steps, x):
        for number, step in enumerate(steps):
            weight, bias = (self.weights.get(f"{at}.{number}.{side}") for side in SIDES)
            if isinstance(step, dict):
                x = x @ weight.T + (0 if bias is None else bias)
            elif step == "layer_norm":
                x = layer_norm(x, weight, bias)
            elif step == "swish_layer_norm":
                x = x / (1 + np.exp(-layer_norm(x, weight, bias)))
            else:
                x = ACTIVATIONS[step](x)
        return x

    def places(self, count, history, contextual):
        if "positions" not in self.config:
            return 0
        last, found = self.config["positions"]["buckets"] - 1, []
        for row in range(count):
            if self.config["positions"]["counted"] == "from_start":
                found.append(min(row, history, last))
            elif row < contextual:
                found.append(row)
            else:
                found.append(min(history - min(row, history) + contextual, last))
        return self.weights["positions.weight"][found]

    def moments(self, times):
        if "times" not in self.config:
            return 0
        how, found = self.config["times"], []
        for time in times:
            if how["kind"] == "before_request":
                # float32, as both code bases have it
                ago = np.maximum(np.float32(times[-1] - time), np.float32(1e-6)) / np.float32(
                    how.get("bucket_seconds", 60)
                )
                bucket = np.log(ago) if how.get("function") == "log" else np.sqrt(ago)
                found.append(int(min(max(bucket, 0), how["buckets"] - 1)))
            else:
                bucket = (time - how.get("origin", 0)) // how["bucket_seconds"]
                count = how["buckets"]
                found.append(bucket % count if how.get("wrap") else min(max(bucket, 0), count - 1))
        return self.weights["times.weight"][found]

    def mask(self, count, history, contextual):
        sees = self.config["tokens"].get("user", {}).get("sees_history")
        group, window = self.block.get("target_group_size", 1), self.block.get("max_attn_len", 0)
        mask = np.zeros([count, count])
        for r in range(count):
            for c in range(count):
                if sees and r < contextual:
                    mask[r, c] = c < history
                elif c <= r and c >= history:
                    mask[r, c] = (c - history) // group == (r - history) // group
                elif c <= r:
                    near, far = min(r, history), min(c, history)
                    if sees:
                        near, far = max(near - contextual + 1, 0), max(far - contextual + 1, 0)
                    mask[r, c] = not window or near - far <= window
        return mask

    def norm(self, x, at):
        epsilon = self.block.get("epsilon", 1e-5 if self.block["flavour"] == "nvidia" else 1e-6)
        return layer_norm(x, self.weights.get(f"{at}.weight", 1.0), self.weights.get(f"{at}.bias", 0.0), epsilon)

    def uvqk(self, x, layer):
        """u, v, q and k, each [rows, heads, head size]."""
        made = x @ self.weights[f"layers.{layer}.uvqk.weight"].T + self.weights.get(f"layers.{layer}.uvqk.bias", 0.0)
        return made.reshape(len(x), 4, self.block["heads"], -1).swapaxes(0, 1)

    def output(self, y, layer):
        return y @ self.weights[f"layers.{layer}.output.weight"].T

    def input_norm(self, x, layer):
        return self.norm(x, f"layers.{layer}.input_norm")

    def output_norm(self, x, layer):
        at = f"layers.{layer}.output_norm"
        if not self.block.get("group_norm"):
            return self.norm(x, at)
        by_head = x.reshape(len(x), self.block["heads"], -1)
        weight, bias = (self.weights[f"{at}.{side}"][:, None] for side in SIDES)
        return layer_norm(by_head, weight, bias, 1e-6).reshape(x.shape)

    def layer(self, x, mask, layer):
        u, v, q, k = self.uvqk(self.input_norm(x, layer), layer)
        if self.block["flavour"] == "nvidia":
            u, v, q, k = silu(u), silu(v), silu(q), silu(k)
        else:
            u = silu(u)
        alpha = self.block.get("alpha", 0) or self.block["head_size"] ** -0.5
        seen = silu(alpha * np.einsum("rhd,chd->hrc", q, k)) * mask / self.block["scaling_seqlen"]
        a, u = np.einsum("hrc,chd->rhd", seen, v).reshape(len(x), -1), u.reshape(len(x), -1)
        y = u * self.output_norm(a, layer)
        if self.block["flavour"] == "meta":
            y = np.concatenate([u, a, y], axis=1)
        return self.output(y, layer) + (x if self.block.get("residual", True) else 0)

    def head(self, x):
        final = self.config.get("final_norm", "l2")
        if final == "l2":
            x = x / np.maximum(np.sqrt((x**2).sum(-1, keepdims=True)), 1e-6)
        elif final == "layer_norm":
            x = layer_norm(x, self.weights["final_norm.weight"], self.weights["final_norm.bias"])
        x = self.mlp("head", self.config["head"]["mlp"], x)
        for index, task in enumerate(self.config["head"]["tasks"]):
            if task.get("activation", "sigmoid") == "sigmoid":
                x[:, index] = ACTIVATIONS["sigmoid"](x[:, index])
            elif task["activation"] == "softmax":
                return np.exp(x) / np.exp(x).sum(-1, keepdims=True)
        return x


# ---- an engine of sorts: knows a folder by its pagoda.json alone ---------------------------------------------------

KV = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


class Engine:
    def __init__(self, folder, users, pages=64, seed=3):
        self.about = json.loads((folder / "pagoda.json").read_text())
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.register_custom_ops_library(str(OPS))
        self.session = ort.InferenceSession(folder / self.about["model"], options, providers=["CPUExecutionProvider"])
        kv, self.users = self.about["kv"], users
        shape = [pages, 2, kv["page_size"], kv["heads"], kv["head_size"]]
        # NaN: memory that was not written must not be read.
        self.pools = [np.full(shape, np.nan, KV[kv["type"]]) for _ in self.about["inputs"]["kv_pools"]]
        self.free = list(np.random.default_rng(seed).permutation(pages))
        self.pages = [[] for _ in users]
        self.cached = [0 for _ in users]

    def row(self, features, keys, position, time, candidate=False):
        """The keys, position and time of one row."""
        made = {}
        for feature in self.about["features"]:
            key = self.about["no_key"]
            if feature["name"] in features:
                key = feature["candidate_key"] if candidate and feature["source"] == "action" else keys[feature["name"]]
            made[feature["input"]] = key
        return made | {self.about["inputs"]["positions"]: position, self.about["inputs"]["times"]: time}

    def rows(self, user, events):
        """The rows of a user's first so many events."""
        sequence, made = self.about["sequence"], []
        for features in sequence["begin"]:
            made.append(self.row(features, user["keys"], len(made), 0))
        for event in user["events"][:events]:
            for features in sequence["event"]:
                made.append(self.row(features, event, len(made), event["time"]))
        return made

    def run(self, events=None, candidates=True):
        """Scores all candidates, or none, after so many events of each user (all if not said)."""
        inputs, kv = self.about["inputs"], self.about["kv"]
        events = [len(user["events"]) for user in self.users] if events is None else events
        rows, offsets, counts, scored = [], [0], [], []
        for index, (user, count) in enumerate(zip(self.users, events)):
            history = self.rows(user, count)
            rows += history[self.cached[index] :]
            here = user["candidates"] if candidates else []
            for candidate in here:
                scored.append(len(rows))
                features = self.about["sequence"]["candidate"][0]
                rows.append(self.row(features, candidate, len(history), user["now"], candidate=True))
            counts.append(len(here))
            offsets.append(len(rows))
            while len(self.pages[index]) * kv["page_size"] < len(history):
                self.pages[index].append(self.free.pop())
        lists = {f["input"]: [row[f["input"]] for row in rows] for f in self.about["features"]}
        lists |= {inputs[role]: [row[inputs[role]] for row in rows] for role in ("positions", "times")}
        fed = {name: np.array(values, np.int64) for name, values in lists.items() if name}
        fed[inputs["candidate_rows"]] = np.array(scored, np.int64)
        small = {"row_offsets": offsets, "num_candidates": counts, "cached_len": self.cached}
        small["num_contextual"] = [
            min(len(self.about["sequence"]["begin"]), o2 - o1 - t) for o1, o2, t in zip(offsets, offsets[1:], counts)
        ]
        small |= {
            "page_indptr": np.cumsum([0, *map(len, self.pages)]),
            "page_ids": [p for ps in self.pages for p in ps],
        }
        fed |= {inputs[role]: np.array(values, np.int32) for role, values in small.items() if inputs[role]}
        scores = self.bound(fed, np.full([len(scored), len(self.about["tasks"])], 123, np.float32))
        if kv["cache"]:
            self.cached = [len(self.rows(user, count)) for user, count in zip(self.users, events)]
        return scores

    def bound(self, fed, scores):
        """By address, the pools in place: as Pagoda runs it, and numpy's bf16 goes no other way."""
        outputs = {self.about["outputs"]["scores"]: scores}
        for name_in, name_out, pool in zip(
            self.about["inputs"]["kv_pools"], self.about["outputs"]["kv_pools"], self.pools
        ):
            fed[name_in] = outputs[name_out] = pool
        assert {i.name for i in self.session.get_inputs()} == set(fed)
        assert {o.name for o in self.session.get_outputs()} == set(outputs)
        binding = self.session.io_binding()
        for bind, arrays in (binding.bind_input, fed), (binding.bind_output, outputs):
            for name, array in arrays.items():
                bind(name, "cpu", 0, number_of(array.dtype), array.shape, array.ctypes.data)
        self.session.run_with_iobinding(binding)
        return scores


@pytest.fixture
def made(tmp_path):
    """Exports a configuration and weights, and gives the folder."""
    count = iter(range(100))

    def make(config, weights, **options):
        here = tmp_path / f"model{next(count)}"
        save_file(weights, f"{here}.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(config))
        export(f"{here}.safetensors", tmp_path / "config.json", here, **options)
        return here

    return make


def error(scores, expected):
    assert scores.shape == expected.shape
    return np.linalg.norm(scores - expected) / (np.linalg.norm(expected) or 1)


def check(made, config, batches=BATCHES, tolerance=1e-5, oracle=Oracle, stored=None, weights=None):
    """Everything that has to hold of a model: the oracle's scores in every batch, at once and in steps."""
    weights = weights or tensors(config)
    folder = made(config, stored or weights)
    for counts in batches.values():
        users = people(config, counts)
        expected = oracle(config, weights).scores(users)
        engine = Engine(folder, users)
        assert error(engine.run(), expected) <= tolerance
        # Again: with everything cached if anything is.
        assert error(engine.run(), expected) <= tolerance
        if engine.about["kv"]["cache"]:
            engine = Engine(folder, users)
            engine.run([len(user["events"]) // 3 for user in users], candidates=False)
            between = [2 * len(user["events"]) // 3 for user in users]
            earlier = [user | {"events": user["events"][:n]} for user, n in zip(users, between)]
            assert error(engine.run(between), oracle(config, weights).scores(earlier)) <= tolerance
            assert error(engine.run(), expected) <= tolerance
    return folder
