"""Makes `glide` of `llama`: a model that drafts for it and attends to its pages, by standard operators alone.

Each row sees what llama has cached before it, and itself. So the first token that it drafts is llama's own next token, if the
pages are the right ones. Its own attention layer, whose pool is its own, does not count: `gate` is 0.

    python tests/data/generate/make_glide.py
"""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HERE = Path(__file__).parent
LLAMA, GLIDE = HERE / "llama", HERE / "glide"
LAYERS, HEADS, KV_HEADS, SIZE, PAGE = 2, 4, 2, 8, 32
GROUP = HEADS // KV_HEADS


class Nodes:
    """The nodes and constants of a graph."""

    def __init__(self):
        self.nodes, self.constants = [], {}

    def __call__(self, kind, *inputs, name=None, outputs=1, **attributes):
        names = [name or f"{kind}_{len(self.nodes)}"]
        names += [f"{names[0]}.{index}" for index in range(1, outputs)]
        inputs = [value if isinstance(value, str) else self.constant(value) for value in inputs]
        self.nodes.append(helper.make_node(kind, inputs, names, **attributes))
        return names[0] if outputs == 1 else names

    def constant(self, value):
        value = np.asarray(value)
        name = f"constant.{value.dtype}.{'_'.join(map(str, value.ravel()))}.{value.ndim}"
        self.constants[name] = numpy_helper.from_array(value, name)
        return name


def slots_of_rows(add):
    """Where the keys and values are that each row sees: [rows, longest], and whether there is one."""
    to_i64 = lambda value: add("Cast", value, to=TensorProto.INT64)
    rows = add("Range", 0, add("Squeeze", add("Shape", "input_ids")), 1)
    ends = to_i64(add("Slice", "row_offsets", [1], [2**31]))
    past = add("LessOrEqual", add("Unsqueeze", ends, [0]), add("Unsqueeze", rows, [1]))
    sequence = add("ReduceSum", to_i64(past), [1], keepdims=0)
    cached = to_i64(add("Gather", "main_cached_len", sequence))
    visible = add("Unsqueeze", add("Min", cached, to_i64("positions")), [1])
    slots = add("Unsqueeze", add("Range", 0, add("ReduceMax", cached, keepdims=0), 1), [0])
    is_seen = add("Less", slots, visible)
    # A slot that a row does not see is the sequence's first: it has been written, and 0 times NaN is NaN.
    slots = add("Where", is_seen, slots, 0)
    first = add("Unsqueeze", to_i64(add("Gather", "main_page_indptr", sequence)), [1])
    pages = to_i64(add("Gather", "main_page_ids", add("Add", first, add("Div", slots, PAGE))))
    keys = add("Add", add("Mul", pages, 2 * PAGE), add("Mod", slots, PAGE))
    return keys, add("Add", keys, PAGE), is_seen


def rotate(add, heads):
    angles = [add("Unsqueeze", add("Gather", f"rope.{name}", "positions"), [1]) for name in ("cos", "sin")]
    first, second = add("Split", heads, outputs=2, num_outputs=2, axis=-1)
    product = lambda half, angle: add("Mul", half, angles[angle])
    rotated = [
        add("Sub", product(first, 0), product(second, 1)),
        add("Add", product(second, 0), product(first, 1)),
    ]
    return add("Concat", *rotated, axis=-1)


def attend(add, layer, query, key, value, seen):
    """The attention of each row over llama's pages and itself."""
    keys, values, is_seen = seen
    pool = add("Reshape", f"main_kv_pool_{layer}", [-1, KV_HEADS, SIZE])
    of_rows = lambda slots, own: add(
        "Transpose", add("Concat", add("Gather", pool, slots), add("Unsqueeze", own, [1]), axis=1), perm=[0, 2, 1, 3]
    )
    keys, values = of_rows(keys, rotate(add, key)), of_rows(values, value)
    query = add("Reshape", rotate(add, query), [-1, KV_HEADS, GROUP, SIZE])
    scores = add("MatMul", query, add("Transpose", keys, perm=[0, 1, 3, 2]))
    scores = add("Mul", scores, np.float32(SIZE**-0.5))
    itself = add("Expand", np.asarray([[True]]), add("Concat", add("Shape", "input_ids"), [1], axis=0))
    is_seen = add("Unsqueeze", add("Concat", is_seen, itself, axis=1), [1, 2])
    weights = add("Softmax", add("Where", is_seen, scores, np.float32(-1e30)), axis=-1)
    return add("Reshape", add("MatMul", weights, values), [-1, HEADS, SIZE])


def graph():
    model = onnx.load(LLAMA / "model.onnx", load_external_data=False)
    add = Nodes()
    seen = slots_of_rows(add)
    for node in model.graph.node:
        if node.op_type != "PagedAttention":
            add.nodes.append(node)
            continue
        layer = int(node.output[0].removeprefix("attention_"))
        output = node.output[0]
        attended = attend(add, layer, *node.input[:3], seen)
        if layer > 0:
            add("Identity", attended, name=output)
            continue
        node.output[0] = "own"
        add.nodes.append(node)
        add("Add", add("Mul", "own", np.float32(0)), attended, name=output)
    del model.graph.node[:]
    model.graph.node.extend(add.nodes)
    model.graph.initializer.extend(add.constants.values())
    own = [value for value in model.graph.input if value.name != "kv_pool_1"]
    kept = [value for value in model.graph.output if value.name != "kv_pool_1_out"]
    for values, new in [(model.graph.input, own), (model.graph.output, kept)]:
        new = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in new]
        del values[:]
        values.extend(new)
    shape = [d.dim_value or f"main_{d.dim_param}" for d in own[-1].type.tensor_type.shape.dim]
    int32 = [("main_cached_len", "batch"), ("main_page_indptr", "bounds"), ("main_page_ids", "main_pages_listed")]
    for name, size in int32:
        model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.INT32, [size]))
    for layer in range(LAYERS):
        model.graph.input.append(
            helper.make_tensor_value_info(f"main_kv_pool_{layer}", TensorProto.FLOAT, shape)
        )
    del model.graph.value_info[:]
    return model


def main():
    GLIDE.mkdir(exist_ok=True)
    for name in ("weights.bin", "tokenizer.json", "chat_template.jinja"):
        shutil.copy(LLAMA / name, GLIDE / name)
    (GLIDE / "model.onnx").write_bytes(graph().SerializeToString(deterministic=True))
    onnx.checker.check_model(GLIDE / "model.onnx")
    about = json.loads((LLAMA / "pagoda.json").read_text())
    about["version"] = "0" * 64
    about["architecture"] = "glide"
    about["attention"] |= {"layers": 1, "windows": [0]}
    about["kv"] |= {"layers": 1, "bytes_per_token": about["kv"]["bytes_per_token"] // LAYERS}
    about["inputs"]["kv_pools"] = ["kv_pool_0"]
    about["outputs"]["kv_pools"] = ["kv_pool_0_out"]
    about["main"] = {
        "layers": [0, 1],
        "heads": KV_HEADS,
        "head_size": SIZE,
        "page_size": PAGE,
        "type": "f32",
        "inputs": {
            "cached_len": "main_cached_len",
            "page_indptr": "main_page_indptr",
            "page_ids": "main_page_ids",
            "kv_pools": ["main_kv_pool_0", "main_kv_pool_1"],
        },
    }
    for name, file in about["files"].items():
        content = (GLIDE / name).read_bytes()
        file |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    text = json.dumps(about, indent=2) + "\n"
    version = hashlib.sha256(text.encode()).hexdigest()
    (GLIDE / "pagoda.json").write_text(text.replace("0" * 64, version, 1))


main()
