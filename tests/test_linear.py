"""Linear in Python's ONNX Runtime: results, empty inputs, several outputs, shapes, and error messages."""

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
# Half a unit of the type.
UNITS = {"f32": 2**-24, "f16": 2**-11, "bf16": 2**-8}
EPSILON = 1e-3


def tensors(kind, rows, inner, columns, width, seed=7):
    random = np.random.default_rng([seed, rows, inner, columns])
    shapes = {"x": (rows, inner), "weight": (columns, inner), "bias": (columns,), "residual": (rows, width), "norm": (inner,)}
    made = {name: random.standard_normal(shape) for name, shape in shapes.items()}
    made["weight"] /= math.sqrt(max(inner, 1))
    return {name: array.astype(TYPES[kind]) for name, array in made.items()}


def reference(inputs, activation):
    """The result, and how far it may be off for each unit that the sums are."""
    wide = {name: None if array is None else array.astype(np.float64) for name, array in inputs.items()}
    x = wide["x"]
    if wide["norm"] is not None:
        x = x / np.sqrt((x**2).sum(-1, keepdims=True) / max(x.shape[-1], 1) + EPSILON) * wide["norm"]
    bias = 0 if wide["bias"] is None else wide["bias"]
    y, off = x @ wide["weight"].T + bias, np.abs(x) @ np.abs(wide["weight"]).T + np.abs(bias)
    if activation in ACTIVATIONS:
        (gate, up), (gate_off, up_off) = np.split(y, 2, -1), np.split(off, 2, -1)
        y, off = ACTIVATIONS[activation](gate) * up, 1.13 * gate_off * (np.abs(up) + 0.1 * up_off) + np.abs(gate) * up_off
    return (y if wide["residual"] is None else y + wide["residual"]), off


@pytest.mark.parametrize("rows, inner, columns", [(0, 8, 6), (3, 0, 4), (2, 5, 0), (1, 576, 96), (5, 33, 70), (140, 40, 26)])
@pytest.mark.parametrize("activation", [None, "none", *ACTIVATIONS])
@pytest.mark.parametrize("left_out", [(), ("bias",), ("residual",), ("norm",), ("bias", "residual", "norm")])
@pytest.mark.parametrize("kind", TYPES)
def test_linear(kind, left_out, activation, rows, inner, columns):
    width = columns // 2 if activation in ACTIVATIONS else columns
    inputs = tensors(kind, rows, inner, columns, width) | dict.fromkeys(left_out)
    y = np.full((rows, width), np.nan, TYPES[kind])
    attributes = {} if activation is None else {"activation": activation}
    one_node.run("Linear", inputs, {"y": y}, epsilon=EPSILON, **attributes)
    expected, off = reference(inputs, activation)
    lost = 3e-6 + (0 if inputs["norm"] is None else UNITS[kind])
    step = 2**-25 if kind == "f16" else 0
    assert np.all(np.abs(y.astype(np.float64) - expected) <= off * lost + np.abs(expected) * UNITS[kind] * 1.01 + step)


@pytest.mark.parametrize("cut", [(16, 16), (5, 0), (0, 7), (0, 64), (30, 34)])
@pytest.mark.parametrize("kind", TYPES)
def test_columns_go_to_several_outputs(kind, cut):
    inputs = tensors(kind, 3, 40, 64, 64) | {"residual": None}
    whole = np.full((3, 64), np.nan, TYPES[kind])
    one_node.run("Linear", inputs, {"y": whole}, epsilon=EPSILON)
    widths = (64 - sum(cut), *cut)
    outputs = {name: np.full((3, width), np.nan, TYPES[kind]) for name, width in zip(("y", "y2", "y3"), widths)}
    outputs = {name: array if name == "y" or array.shape[1] else None for name, array in outputs.items()}
    one_node.run("Linear", inputs, outputs, epsilon=EPSILON, width2=cut[0], width3=cut[1])
    found = np.concatenate([array for array in outputs.values() if array is not None], -1)
    assert np.array_equal(found.astype(np.float64), whole.astype(np.float64))


WHOLE = tensors("f32", 5, 8, 6, 6)
GATED = WHOLE | {"residual": WHOLE["residual"][:, :3].copy()}
CUT = WHOLE | {"residual": None}
Y, BOTH = {"y": np.float32}, {"y": np.float32, "y2": np.float32}


def ones(*shape):
    return np.ones(shape, np.float32)


BAD = {
    "3 dimensions": (WHOLE | {"x": ones(5, 2, 4)}, Y, {}, r"x: 2 dimensions expected, got 3"),
    "another inner": (WHOLE | {"weight": ones(6, 7)}, Y, {}, r"weight: shape \[6, 7\], expected \[6, 8\]"),
    "bias": (WHOLE | {"bias": ones(5)}, Y, {}, r"bias: shape \[5\], expected \[6\]"),
    "bias of outputs": (GATED | {"bias": ones(3)}, Y, {"activation": "silu"}, r"bias: shape \[3\], expected \[6\]"),
    "norm": (WHOLE | {"norm": ones(6)}, Y, {}, r"norm: shape \[6\], expected \[8\]"),
    "residual": (WHOLE | {"residual": ones(4, 6)}, Y, {}, r"residual: shape \[4, 6\], expected \[5, 6\]"),
    "residual of sums": (WHOLE, Y, {"activation": "gelu"}, r"residual: shape \[5, 6\], expected \[5, 3\]"),
    "odd": (GATED | {"weight": ones(7, 8)}, Y, {"activation": "silu"}, r"weight: shape \[7, 8\], expected an even number of rows"),
    "relu": (WHOLE, Y, {"activation": "relu"}, r"activation: this attribute is \"relu\", expected none, silu, gelu or gelu_tanh"),
    "a number": (WHOLE, Y, {"activation": 1}, r"activation: this attribute is an int, expected a string"),
    "epsilon": (WHOLE, Y, {"epsilon": -1.0}, r"epsilon: this attribute is -1, expected a finite number of at least 0"),
    "no epsilon": (WHOLE, Y, {"epsilon": math.nan}, r"epsilon: this attribute is NaN"),
    "below 0": (CUT, BOTH, {"width2": -1}, r"width2: this attribute is -1, expected a number of columns"),
    "too wide": (CUT, BOTH, {"width2": 7}, r"weight: shape \[6, 8\], expected at least as many rows as width2 and width3"),
    "cut and gated": (CUT, BOTH, {"width2": 2, "activation": "silu"}, r"width2: .* 2, expected 0 beside an activation"),
    "cut and added": (WHOLE, BOTH, {"width2": 2}, r"width2: .* 2, expected 0 beside the input residual"),
    "width3 and added": (WHOLE, Y | {"y2": None, "y3": np.float32}, {"width3": 2}, r"width3: .* beside the input residual"),
    "no output": (CUT, Y, {"width2": 2}, r"y2: this output and the attribute width2 go together"),
    "no width": (CUT, BOTH, {}, r"y2: this output and the attribute width2 go together"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_is_said(what):
    inputs, outputs, attributes, message = BAD[what]
    given = {name: array for name, array in inputs.items() if array is not None}
    with pytest.raises(Exception, match=message):
        one_node.session("Linear", inputs, outputs, **attributes).run(None, given)


@pytest.mark.parametrize("name", WHOLE)
def test_outputs_lie_apart_from_inputs(name):
    inputs = tensors("f32", 6, 6, 6, 6)
    memory = np.zeros(36, np.float32)
    inputs[name] = memory[: inputs[name].size].reshape(inputs[name].shape)
    with pytest.raises(Exception, match=rf"{name}: its memory overlaps that of the output y: bind them apart"):
        one_node.run("Linear", inputs, {"y": memory.reshape(6, 6)})


def test_outputs_lie_apart():
    memory = np.zeros(30, np.float32)
    outputs = {"y": memory[:20].reshape(5, 4), "y2": memory[15:25].reshape(5, 2)}
    with pytest.raises(Exception, match=r"y: its memory overlaps that of the output y2: bind them apart"):
        one_node.run("Linear", CUT, outputs, width2=2)


def test_shapes_are_known_before_a_run():
    def shapes(inputs, outputs, **attributes):
        opened = one_node.session("Linear", inputs, outputs, **attributes)
        assert all(output.type == "tensor(float)" for output in opened.get_outputs())
        return [output.shape for output in opened.get_outputs()]

    assert shapes(WHOLE, Y) == [["T", 6]]
    assert shapes(GATED, Y, activation="gelu") == [["T", 3]]
    three = dict.fromkeys(("y", "y2", "y3"), np.float32)
    assert shapes(CUT, three, width2=2, width3=1) == [["T", 3], ["T", 2], ["T", 1]]
    assert len(shapes(WHOLE, Y, unknown=["x"])) == 1
    assert len(shapes(WHOLE, Y, unknown=["weight"])) == 1
