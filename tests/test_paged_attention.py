"""PagedAttention in Python's ONNX Runtime: the golden cases, in place and not, and what is refused."""

import json

import ml_dtypes
import numpy as np
import pytest
from capi import ROOT
from one_node import run, session

GOLDEN = sorted((ROOT / "tests/data/golden/llm").glob("attention-*.safetensors"))
TYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
TYPES |= {"I32": np.int32, "U8": np.uint8}
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
INPUTS = ["query", "key", "value", "row_offsets", "cached_len", "page_indptr", "page_ids", "kv_pool", "kv_scales",
          "positions", "cos", "sin", "sinks", "write_slots", "token_pos", "slopes"]


def load(path):
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    attributes = header.pop("__metadata__", {})
    tensors = {}
    for name, info in header.items():
        begin, end = (8 + size + offset for offset in info["data_offsets"])
        tensors[name] = np.frombuffer(data[begin:end], TYPES[info["dtype"]]).reshape(info["shape"]).copy()
    numbers = {"scale": float, "softcap": float, "window": int}
    return tensors, {name: numbers.get(name, str)(value) for name, value in attributes.items()}


def call(tensors, attributes, in_place):
    inputs = {name: tensors.get(name) for name in INPUTS}
    while inputs[list(inputs)[-1]] is None:
        inputs.popitem()
    pool = inputs["kv_pool"]
    outputs = {"output": np.empty_like(inputs["query"]), "kv_pool_out": pool if in_place else np.empty_like(pool)}
    if "kv_scales" in tensors:
        outputs["kv_scales_out"] = tensors["kv_scales"] if in_place else np.empty_like(tensors["kv_scales"])
    outputs.setdefault("kv_scales_out", None)
    weights = tensors["expected.key_weights"].shape
    outputs["key_weights"] = np.empty(weights, np.float32)
    return inputs, outputs, {**attributes, "weights_len": weights[2]}


def error(got, expected):
    return np.linalg.norm(got.astype(np.float64) - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem[10:])
def test_golden(path, in_place):
    tensors, attributes = load(path)
    inputs, outputs, attributes = call(tensors, attributes, in_place)
    kind = tensors["query"].dtype.name
    run("PagedAttention", inputs, outputs, **attributes)
    assert error(outputs["output"], tensors["expected.output"]) <= TOLERANCE[kind]
    assert error(outputs["key_weights"], tensors["expected.key_weights"]) <= 1e-5
    got, expected = (tensor.view(np.uint8) for tensor in (outputs["kv_pool_out"], tensors["expected.kv_pool"]))
    if "rotary" not in attributes or "kv_format" in attributes:
        assert np.array_equal(got, expected)
    if "kv_scales" in tensors:
        assert np.array_equal(outputs["kv_scales_out"].view(np.uint8), tensors["expected.kv_scales"].view(np.uint8))


def refused(tensors, attributes, **changes):
    changed = {**tensors, **changes}
    inputs, outputs, attributes = call(changed, attributes, False)
    before = {name: array.copy() for name, array in outputs.items() if array is not None}
    with pytest.raises(Exception) as caught:
        run("PagedAttention", inputs, outputs, **attributes)
    for name, array in before.items():
        assert np.array_equal(array.view(np.uint8), outputs[name].view(np.uint8)), f"{name} was written"
    return str(caught.value)


def test_bad_input_is_refused_by_name_and_nothing_is_written():
    tensors, attributes = load(GOLDEN[2])
    assert "page_ids" in refused(tensors, attributes, page_ids=tensors["page_ids"] + 100)
    assert "cached_len" in refused(tensors, attributes, cached_len=-tensors["cached_len"] - 1)
    assert "row_offsets" in refused(tensors, attributes, row_offsets=tensors["row_offsets"][::-1].copy())
    assert "sinks" in refused(tensors, attributes, sinks=np.zeros(5, np.float32))
    assert "key" in refused(tensors, attributes, key=tensors["key"][:, :, :32].copy())
    assert "window" in refused(tensors, {**attributes, "window": -1})
    assert "softcap" in refused(tensors, {**attributes, "softcap": -1.0})


def test_a_node_that_makes_no_sense_is_refused_when_the_model_is_opened():
    tensors, attributes = load(GOLDEN[2])
    inputs, outputs, _ = call(tensors, attributes, False)
    kinds = {name: outputs[name].dtype for name in ("output", "kv_pool_out")}
    for attribute, words in [({"rotary": "half"}, "rotary"), ({"rotary": "sideways"}, "sideways"),
                             ({"kv_format": "int8"}, "kv_format"), ({"kv_format": "int3"}, "int3")]:
        with pytest.raises(Exception, match=words):
            session("PagedAttention", inputs, kinds, **attribute)
