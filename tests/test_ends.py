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


UNIT = {"x": np.ones((5, E), np.float32)}
BAD = {
    "unit of 3": ("HstuUnit", {"x": np.ones((5, 2, 12), np.float32)}, {}, r"x: 2 dimensions expected, got 3"),
    "epsilon": ("HstuUnit", UNIT, {"epsilon": -1.0}, r"epsilon: -1, expected a number of at least 0"),
    "epsilon text": ("HstuUnit", UNIT, {"epsilon": "x"}, r"epsilon: this attribute is a string, expected a float"),
}
OUTPUTS = {"HstuUnit": {"y": F32}}


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_is_said(what):
    op, inputs, attributes, message = BAD[what]
    with pytest.raises(Exception, match=message):
        one_node.session(op, inputs, OUTPUTS[op], **attributes).run(None, inputs)


def test_shapes_are_known_before_a_run():
    [y] = one_node.session("HstuUnit", {"x": numbers("bf16", 5, E)}, {"y": F32}).get_outputs()
    assert (y.shape, y.type) == (["T", E], "tensor(float)")
