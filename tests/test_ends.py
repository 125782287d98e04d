"""The operators around the layers in Python's ONNX Runtime: numbers, no rows, and what is wrong with a call in words."""

import ml_dtypes
import numpy as np
import one_node
import pytest
from exported import error

TYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
F32 = np.dtype(np.float32)
E = 24


def numbers(kind, *shape, seed=1):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(TYPES[kind])


@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize("kind", TYPES)
def test_unit(kind, rows):
    x = numbers(kind, rows, E)
    x[1::3] = (x[1::3].astype(np.float32) * 0.01).astype(x.dtype)
    y = np.full((rows, E), np.nan, np.float32)
    one_node.run("HstuUnit", {"x": x}, {"y": y}, epsilon=0.5)
    wide = x.astype(np.float64)
    length = np.linalg.norm(wide, axis=1, keepdims=True)
    assert rows < 2 or length.min() < 0.5 < length.max()
    assert error(y.astype(np.float64), wide / np.maximum(length, 0.5)) <= 1e-6


@pytest.mark.parametrize("count", [0, 1, 37])
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("kind", TYPES)
def test_select(kind, parts, count):
    index = np.random.default_rng(3).integers(0, 11, count)
    tensors = {"a": numbers(kind, 11, E), "b": numbers(kind, 11, 3, 5), "c": numbers(kind, 11, 7)}
    tensors = dict(list(tensors.items())[:parts])
    made = {f"{name}_rows": np.full((count, *t.shape[1:]), np.nan, t.dtype) for name, t in tensors.items()}
    one_node.run("HstuSelect", {"index": index} | tensors, made)
    for name, tensor in tensors.items():
        assert np.array_equal(made[f"{name}_rows"].astype(np.float32), tensor[index].astype(np.float32))


UNIT = {"x": np.ones((5, E), np.float32)}
SELECT = {"index": np.array([1, 4]), "a": np.ones((5, E), np.float32), "b": np.ones((5, 2), np.float32)}
BAD = {
    "unit of 3": ("HstuUnit", {"x": np.ones((5, 2, 12), np.float32)}, {}, r"x: 2 dimensions expected, got 3"),
    "epsilon": ("HstuUnit", UNIT, {"epsilon": -1.0}, r"epsilon: -1, expected a number of at least 0"),
    "epsilon text": ("HstuUnit", UNIT, {"epsilon": "x"}, r"epsilon: this attribute is a string, expected a float"),
    "beyond": ("HstuSelect", SELECT | {"index": np.array([0, 5])}, {}, r"index: row 5 at 1, expected rows of the 5 "),
    "below": ("HstuSelect", SELECT | {"index": np.array([-1])}, {}, r"index: row -1 at 0, expected rows of the 5 "),
    "2-d index": ("HstuSelect", SELECT | {"index": np.array([[1]])}, {}, r"index: 1 dimensions expected, got 2"),
    "fewer rows": ("HstuSelect", SELECT | {"b": np.ones((4, 2), np.float32)}, {}, r"b: shape \[4, 2\], expected \[5,"),
    "a scalar": ("HstuSelect", SELECT | {"b": np.ones((), np.float32)}, {}, r"b: shape \[\], expected \[5, \.\.\.\] as"),
    "no b": ("HstuSelect", SELECT | {"b": None}, {}, r"the input b and the output b_rows go together"),
    "c for nothing": ("HstuSelect", SELECT | {"c": UNIT["x"]}, {}, r"the input c and the output c_rows go together"),
}
OUTPUTS = {"HstuUnit": {"y": F32}, "HstuSelect": {"a_rows": F32, "b_rows": F32}}


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_is_said(what):
    op, inputs, attributes, message = BAD[what]
    with pytest.raises(Exception, match=message):
        given = {name: array for name, array in inputs.items() if array is not None}
        one_node.session(op, inputs, OUTPUTS[op], **attributes).run(None, given)


def test_shapes_are_known_before_a_run():
    [y] = one_node.session("HstuUnit", {"x": numbers("bf16", 5, E)}, {"y": F32}).get_outputs()
    assert (y.shape, y.type) == (["T", E], "tensor(float)")
    inputs = {"index": np.arange(6), "a": numbers("f16", 9, E), "b": numbers("f16", 9, 3, 5)}
    made = one_node.session("HstuSelect", inputs, {"a_rows": np.float16, "b_rows": np.float16}).get_outputs()
    assert [(y.shape, y.type) for y in made] == [(["T", E], "tensor(float16)"), (["T", 3, 5], "tensor(float16)")]
