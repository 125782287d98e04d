"""Glu in Python's ONNX Runtime: results, empty inputs, shapes, and error messages."""

import math

import ml_dtypes
import numpy as np
import one_node
import pytest

TYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x / 2 * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


def numbers(kind, *shape):
    return (3 * np.random.default_rng([7, *shape]).standard_normal(shape)).astype(TYPES[kind])


@pytest.mark.parametrize("rows, width", [(0, 8), (3, 0), (1, 1), (37, 24), (2, 30_001)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind", TYPES)
def test_glu(kind, activation, rows, width):
    x = numbers(kind, rows, 2 * width)
    y = np.full((rows, width), np.nan, TYPES[kind])
    one_node.run("Glu", {"x": x}, {"y": y}, activation=activation)
    gate, up = x[:, :width].astype(np.float64), x[:, width:].astype(np.float64)
    expected = ACTIVATIONS[activation](gate) * up
    # Computed in f32 and rounded once: half a unit of the type, and what f32 loses.
    unit = {"f32": 0, "f16": 2**-11, "bf16": 2**-8}[kind]
    bound = np.abs(expected) * (unit * 1.001 + 2e-6) + np.abs(up) * 2e-7 + (2**-25 if kind == "f16" else 0)
    assert np.all(np.abs(y.astype(np.float64) - expected) <= bound)


X = {"x": np.ones((5, 8), np.float32)}
BAD = {
    "3 dimensions": ({"x": np.ones((5, 2, 4), np.float32)}, {"activation": "silu"}, r"x: 2 dimensions expected, got 3"),
    "odd": ({"x": np.ones((5, 7), np.float32)}, {"activation": "silu"}, r"x: shape \[5, 7\], expected an even number"),
    "no activation": (X, {}, r"Glu: the attribute activation is missing, expected silu, gelu or gelu_tanh"),
    "relu": (X, {"activation": "relu"}, r"Glu: the attribute activation is relu, expected silu, gelu or gelu_tanh"),
    "a number": (X, {"activation": 1}, r"activation: this attribute is an int, expected a string"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_is_said(what):
    inputs, attributes, message = BAD[what]
    with pytest.raises(Exception, match=message):
        one_node.session("Glu", inputs, {"y": np.float32}, **attributes).run(None, inputs)


def test_shapes_are_known_before_a_run():
    [y] = one_node.session("Glu", X, {"y": np.float32}, activation="gelu").get_outputs()
    assert (y.shape, y.type) == (["T", 4], "tensor(float)")
    [y] = one_node.session("Glu", X, {"y": np.float32}, unknown=["x"], activation="gelu").get_outputs()
    assert y.type == "tensor(float)"
