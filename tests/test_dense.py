"""The dense operators in Python's ONNX Runtime: results, empty inputs, and error messages."""

import ml_dtypes
import numpy as np
import one_node
import pytest
from exported import error, layer_norm, silu

TYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
TOLERANCES = {"f32": 1e-5, "f16": 2e-3, "bf16": 1e-2}
E, H, D = 24, 3, 8
W = H * D


def session(op, inputs, outputs, kind, **attributes):
    """A model of one node, all of whose tensors are of one type; what is None is left out."""
    return one_node.session(op, inputs, dict.fromkeys(outputs, TYPES[kind]), **attributes)


def run(op, inputs, outputs, kind, **attributes):
    """Outputs by name, of these shapes."""
    made = {name: np.full(shape, np.nan, TYPES[kind]) for name, shape in outputs.items()}
    one_node.run(op, inputs, made, **attributes)
    return [array.astype(np.float64) for array in made.values()]


def numbers(kind, *shape, seed=1):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(TYPES[kind])


def taken(given, count):
    """Rows to take of those that there are; None: all."""
    return None if count is None else np.random.default_rng(count).integers(0, given, count)


def wide(inputs):
    return {name: None if array is None else array.astype(np.float64) for name, array in inputs.items()}


@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize("kind", TYPES)
def test_norm(kind, rows):
    inputs = {"x": numbers(kind, rows, E), "weight": numbers(kind, E), "bias": numbers(kind, E, seed=2)}
    [y] = run("HstuNorm", inputs, {"y": (rows, E)}, kind, epsilon=0.01)
    x, weight, bias = wide(inputs).values()
    assert error(y, layer_norm(x, weight, bias, 0.01)) <= TOLERANCES[kind]


@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("which", ["all", "u"])
@pytest.mark.parametrize("kind", TYPES)
def test_project(kind, which, biased, rows):
    weight = (numbers(kind, 4 * W, E).astype(np.float64) / np.sqrt(E)).astype(TYPES[kind])
    inputs = {"x": numbers(kind, rows, E), "weight": weight, "bias": numbers(kind, 4 * W) if biased else None}
    heads = rows, H, D
    got = run("HstuProject", inputs, {"u": (rows, W), "v": heads, "q": heads, "k": heads}, kind, heads=H, silu=which)
    x, weight, bias = wide(inputs).values()
    parts = np.split(x @ weight.T + (0 if bias is None else bias), 4, axis=1)
    for number, (output, part) in enumerate(zip(got, parts)):
        expected = silu(part) if which == "all" or number == 0 else part
        assert error(output.reshape(rows, W), expected) <= TOLERANCES[kind]


@pytest.mark.parametrize("given, count", [(0, None), (1, None), (37, None), (11, 0), (11, 37)])
@pytest.mark.parametrize("concat", [0, 1])
@pytest.mark.parametrize("norm", ["layer", "group"])
@pytest.mark.parametrize("kind", TYPES)
def test_gate(kind, norm, concat, given, count):
    learned, index = H if norm == "group" else W, taken(given, count)
    rows = given if count is None else count
    inputs = {"attended": numbers(kind, given, H, D), "u": numbers(kind, given, W)}
    inputs |= {"weight": numbers(kind, learned), "bias": numbers(kind, learned, seed=2), "index": index}
    shape = rows, 3 * W if concat else W
    [y] = run("HstuGate", inputs, {"y": shape}, kind, epsilon=0.01, norm=norm, concat=concat)
    attended, u, weight, bias, _ = wide(inputs).values()
    if index is not None:
        attended, u = attended[index], u[index]
    if norm == "group":
        normed = layer_norm(attended, weight[:, None], bias[:, None], 0.01).reshape(rows, W)
    else:
        normed = layer_norm(attended.reshape(rows, W), weight, bias, 0.01)
    expected = normed * u
    if concat:
        expected = np.concatenate([u, attended.reshape(rows, W), expected], axis=1)
    assert error(y, expected) <= TOLERANCES[kind]


@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize("biased, added", [(True, True), (True, False), (False, True), (False, False), (True, 11)])
@pytest.mark.parametrize("kind", TYPES)
def test_output(kind, biased, added, rows):
    """With a number `added`, rows of so many that there are of the residual are taken."""
    given, index = (rows, None) if added is True or added is False else (added, taken(added, rows))
    inputs = {"y": numbers(kind, rows, W), "weight": numbers(kind, E, W)}
    inputs |= {"bias": numbers(kind, E) if biased else None, "residual": numbers(kind, given, E) if added else None}
    [output] = run("HstuOutput", inputs | {"index": index}, {"output": (rows, E)}, kind)
    y, weight, bias, residual = wide(inputs).values()
    residual = residual if index is None else residual[index]
    expected = y @ weight.T + (0 if bias is None else bias) + (0 if residual is None else residual)
    assert error(output, expected) <= TOLERANCES[kind]


NORM = {"x": (5, E), "weight": (E,), "bias": (E,)}
PROJECT = {"x": (5, E), "weight": (4 * W, E), "bias": (4 * W,)}
GATE = {"attended": (5, H, D), "u": (5, W), "weight": (W,), "bias": (W,)}
OUTPUT = {"y": (5, W), "weight": (E, W), "bias": (E,), "residual": (5, E)}
HEADS, LAYER = {"heads": H, "silu": "all"}, {"norm": "layer"}
BAD = {
    "x of 3": ("HstuNorm", NORM | {"x": (5, 2, 12)}, {}, r"x: 2 dimensions expected, got 3"),
    "weight": ("HstuNorm", NORM | {"weight": (E + 1,)}, {}, r"weight: shape \[25\], expected \[24\]"),
    "bias": ("HstuNorm", NORM | {"bias": (1,)}, {}, r"bias: shape \[1\], expected \[24\]"),
    "epsilon": ("HstuNorm", NORM, {"epsilon": -1.0}, r"epsilon: -1, expected a number of at least 0"),
    "epsilon text": ("HstuNorm", NORM, {"epsilon": "x"}, r"epsilon: this attribute is a string, expected a float"),
    "no heads": ("HstuProject", PROJECT, {"silu": "all"}, r"the attribute heads is missing, expected an int"),
    "heads of 0": ("HstuProject", PROJECT, {"heads": 0, "silu": "all"}, r"the attribute heads is 0, expected"),
    "heads of 7": ("HstuProject", PROJECT, {"heads": 7, "silu": "u"}, r"weight: 96 rows, expected a multiple of 4 "),
    "no silu": ("HstuProject", PROJECT, {"heads": H}, r"the attribute silu is missing, expected all or u"),
    "other silu": ("HstuProject", PROJECT, {"heads": H, "silu": "v"}, r"the attribute silu is v, expected all or u"),
    "deep": ("HstuProject", PROJECT | {"weight": (4 * W, 25)}, HEADS, r"weight: shape \[96, 25\], expected \[96, 24"),
    "four": ("HstuProject", PROJECT | {"bias": (W,)}, HEADS, r"bias: shape \[24\], expected \[96\]"),
    "u": ("HstuGate", GATE | {"u": (4, W)}, LAYER, r"u: shape \[4, 24\], expected \[5, 24\]"),
    "by group": ("HstuGate", GATE, {"norm": "group"}, r"weight: shape \[24\], expected \[3\]"),
    "no norm": ("HstuGate", GATE, {}, r"the attribute norm is missing, expected layer or group"),
    "concat": ("HstuGate", GATE, {"norm": "layer", "concat": 2}, r"concat is 2, expected 0 or 1"),
    "inner": ("HstuOutput", OUTPUT | {"y": (5, W - 1)}, {}, r"weight: shape \[24, 24\], expected \[24, 23\]"),
    "residual": ("HstuOutput", OUTPUT | {"residual": (1, E)}, {}, r"residual: shape \[1, 24\], expected \[5, 24\]"),
    "beyond": ("HstuGate", GATE | {"index": [0, 5]}, LAYER, r"index: row 5 at 1, expected rows of the 5 that "),
    "below": ("HstuGate", GATE | {"index": [-1]}, LAYER, r"index: row -1 at 0, expected rows of the 5 that there are"),
    "2-d index": ("HstuGate", GATE | {"index": [[1]]}, LAYER, r"index: 1 dimensions expected, got 2"),
    "2-d index out": ("HstuOutput", OUTPUT | {"index": [[1]] * 5}, {}, r"index: shape \[5, 1\], expected \[5\]"),
    "beyond, out": ("HstuOutput", OUTPUT | {"index": [0, 1, 9, 0, 0]}, {}, r"index: row 9 at 2, expected rows of "),
    "few": ("HstuOutput", OUTPUT | {"index": [0]}, {}, r"index: shape \[1\], expected \[5\]"),
    "other width": ("HstuOutput", OUTPUT | {"residual": (9, 1), "index": [0] * 5}, {}, r"residual: shape \[9, 1\], "),
    "of nothing": ("HstuOutput", OUTPUT | {"residual": None, "index": [0] * 5}, {}, r"index names rows of residual, "),
}
OUTPUTS = {"HstuNorm": "y", "HstuProject": "uvqk", "HstuGate": "y", "HstuOutput": ["output"]}


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_is_said(what):
    op, shapes, attributes, message = BAD[what]
    with pytest.raises(Exception, match=message):
        given = {name: array for name, array in arrays(shapes).items() if array is not None}
        session(op, arrays(shapes), list(OUTPUTS[op]), "f32", **attributes).run(None, given)


def arrays(shapes):
    """Ones of these shapes, what is None left out; of an index the numbers themselves."""
    return {
        name: np.array(given) if name == "index" else given and np.ones(given, np.float32)
        for name, given in shapes.items()
    }


def test_an_index_of_which_nothing_is_known():
    inputs = arrays(GATE | {"index": [4, 0]})
    opened = session("HstuGate", inputs, ["y"], "f32", unknown=["index"], **LAYER)
    assert opened.get_outputs()[0].shape != ["T", W]
    assert [len(y) for y in opened.run(None, inputs)] == [2]


def test_shapes_are_known_before_a_run():
    def shapes(op, shapes, **attributes):
        opened = session(op, arrays(shapes), list(OUTPUTS[op]), "f32", **attributes)
        return [output.shape for output in opened.get_outputs()]

    assert shapes("HstuNorm", NORM) == [["T", E]]
    assert shapes("HstuProject", PROJECT, **HEADS) == [["T", W]] + [["T", H, D]] * 3
    assert shapes("HstuGate", GATE, **LAYER) == [["T", W]]
    assert shapes("HstuGate", GATE, **LAYER, concat=1) == [["T", 3 * W]]
    assert shapes("HstuGate", GATE | {"index": [0, 1]}, **LAYER) == [[2, W]]
    assert shapes("HstuGate", GATE | {"index": [0, 1]}, **LAYER, concat=1) == [[2, 3 * W]]
    assert shapes("HstuOutput", OUTPUT) == [["T", E]]
