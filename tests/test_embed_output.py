"""The operators around the layers in Python's ONNX Runtime: results, empty inputs, and error messages."""

import ml_dtypes
import numpy as np
import one_node
import pytest
from exported import error
from onnx import helper

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


ACTIVATIONS = {
    "none": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": np.tanh,
}


@pytest.mark.parametrize("rows, width", [(0, 2), (1, 2), (37, 5), (300, 130)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_linear(activation, bias, rows, width):
    inputs = {"x": numbers("f32", rows, E), "weight": numbers("f32", width, E, seed=2)}
    inputs["bias"] = numbers("f32", width, seed=3) if bias else None
    y = np.full((rows, width), np.nan, np.float32)
    one_node.run("HstuLinear", inputs, {"y": y}, activation=activation, tf32=1)
    x, weight = (inputs[name].astype(np.float64) for name in ("x", "weight"))
    expected = ACTIVATIONS[activation](x @ weight.T + (inputs["bias"].astype(np.float64) if bias else 0))
    # TF32 is for GPUs.
    assert error(y.astype(np.float64), expected) <= 1e-6


def looked_up(table, index, below, beyond):
    """What Clip and Gather give."""
    last = len(table) - 1
    return table[np.where(index < 0, below % len(table), np.minimum(index, last if beyond else last - 1))]


@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize("tables, learned", [(1, ""), (3, "p"), (3, "pt"), (8, "t")])
@pytest.mark.parametrize("kind", TYPES)
def test_embed(kind, tables, learned, rows):
    random = np.random.default_rng(tables)

    def index(count):
        odd = np.array([-1, -1, -2, count - 2, count - 1, count, 2**62, -(2**62)])
        return np.where(random.random(rows) < 0.3, random.choice(odd, rows), random.integers(0, count, rows))

    sizes = [2, 40, 7, 11, 5, 3, 90, 13][:tables]
    pairs = {f"table_{n}": numbers("f32", size, E, seed=n) for n, size in enumerate(sizes)}
    keys = {f"keys_{n}": index(size) for n, size in enumerate(sizes)}
    inputs = {name: None for name in ("positions_table", "positions", "times_table", "times")}
    if "p" in learned:
        inputs |= {"positions_table": numbers("f32", 12, E), "positions": index(12)}
    if "t" in learned:
        inputs |= {"times_table": numbers("f32", 1, E), "times": index(1)}
    for n in range(tables):
        inputs |= {f"table_{n}": pairs[f"table_{n}"], f"keys_{n}": keys[f"keys_{n}"]}
    y = np.full((rows, E), np.nan, TYPES[kind])
    to = helper.np_dtype_to_tensor_dtype(np.dtype(TYPES[kind]))
    one_node.run("HstuEmbed", inputs, {"y": y}, scale=np.sqrt(E), to=to)
    # One operator after the other in f32 and then a cast: the same to the bit.
    x = looked_up(inputs["table_0"], inputs["keys_0"], -1, False)
    for n in range(1, tables):
        x = x + looked_up(inputs[f"table_{n}"], inputs[f"keys_{n}"], -1, False)
    x = x * np.float32(np.sqrt(E))
    for name in "positions", "times":
        if inputs[name] is not None:
            x = x + looked_up(inputs[f"{name}_table"], inputs[name], 0, True)
    assert x.dtype == np.float32
    assert np.array_equal(y.astype(np.float32), x.astype(TYPES[kind]).astype(np.float32))


UNIT = {"x": np.ones((5, E), np.float32)}
LINEAR = {"x": np.ones((5, E), np.float32), "weight": np.ones((3, E), np.float32), "bias": np.ones(3, np.float32)}
DEEP, SHORT = LINEAR | {"x": np.ones((5, 2, 12), np.float32)}, LINEAR | {"weight": LINEAR["weight"][:, 1:]}
RELU, GELU = {"activation": "relu"}, {"activation": "gelu"}
EMBED = {"positions_table": UNIT["x"], "positions": np.arange(5), "times_table": None, "times": None}
EMBED |= {"table_0": UNIT["x"], "keys_0": np.arange(5), "table_1": UNIT["x"], "keys_1": np.arange(5)}
BAD = {
    "unit of 3": ("HstuUnit", {"x": np.ones((5, 2, 12), np.float32)}, {}, r"x: 2 dimensions expected, got 3"),
    "epsilon": ("HstuUnit", UNIT, {"epsilon": -1.0}, r"epsilon: -1, expected a number of at least 0"),
    "epsilon text": ("HstuUnit", UNIT, {"epsilon": "x"}, r"epsilon: this attribute is a string, expected a float"),
    "linear of 3": ("HstuLinear", DEEP, RELU, r"x: 2 dimensions expected, got 3"),
    "depth": ("HstuLinear", SHORT, RELU, r"weight: shape \[3, 23\], expected \[3, 24\]"),
    "bias": ("HstuLinear", LINEAR | {"bias": np.ones(4, np.float32)}, RELU, r"bias: shape \[4\], expected \[3\]"),
    "no activation": ("HstuLinear", LINEAR, {}, r"activation is missing, expected one of none, relu, silu, sigmoid"),
    "gelu": ("HstuLinear", LINEAR, GELU, r"HstuLinear: the attribute activation is gelu, expected one of none"),
    "tf32": ("HstuLinear", LINEAR, RELU | {"tf32": 2}, r"HstuLinear: the attribute tf32 is 2, expected 0 or 1"),
    "no table": ("HstuEmbed", EMBED | {"table_1": None}, {}, r"table_1 and keys_1 go together: give both or none"),
    "no positions": ("HstuEmbed", EMBED | {"positions": None}, {}, r"positions_table and positions go together"),
    "fewer keys": ("HstuEmbed", EMBED | {"keys_1": np.arange(4)}, {}, r"keys_1: 4 numbers, expected 5, one a row"),
    "other width": ("HstuEmbed", EMBED | {"table_1": UNIT["x"][:, 1:]}, {}, r"table_1: shape \[5, 23\], expected 2 or"),
    "1 row": ("HstuEmbed", EMBED | {"table_0": UNIT["x"][:1]}, {}, r"table_0: shape \[1, 24\], expected 2 or more"),
    "0 rows": ("HstuEmbed", EMBED | {"positions_table": UNIT["x"][:0]}, {}, r"positions_table: shape \[0, 24\], exp"),
    "scale": ("HstuEmbed", EMBED, {"scale": float("nan")}, r"scale: NaN, expected a finite number"),
    "to": ("HstuEmbed", EMBED, {"to": 7}, r"the attribute to is 7, expected the type of the output"),
}
OUTPUTS = {"HstuUnit": {"y": F32}, "HstuLinear": {"y": F32}, "HstuEmbed": {"y": F32}}


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_is_said(what):
    op, inputs, attributes, message = BAD[what]
    with pytest.raises(Exception, match=message):
        given = {name: array for name, array in inputs.items() if array is not None}
        one_node.session(op, inputs, OUTPUTS[op], **attributes).run(None, given)


def test_shapes_are_known_before_a_run():
    [y] = one_node.session("HstuUnit", {"x": numbers("bf16", 5, E)}, {"y": F32}).get_outputs()
    assert (y.shape, y.type) == (["T", E], "tensor(float)")
    [y] = one_node.session("HstuLinear", LINEAR, {"y": F32}, **RELU).get_outputs()
    assert (y.shape, y.type) == (["T", 3], "tensor(float)")
    inputs = {name: None for name in ("positions_table", "positions", "times_table", "times")}
    inputs |= {"table_0": numbers("f32", 9, E), "keys_0": np.arange(6)}
    [y] = one_node.session("HstuEmbed", inputs, {"y": np.float16}, to=helper.TensorProto.FLOAT16).get_outputs()
    assert (y.shape, y.type) == ([6, E], "tensor(float16)")
