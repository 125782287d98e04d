"""BlockLinear in Python's ONNX Runtime: results, maxima, empty inputs, shapes, and error messages."""

import ml_dtypes
import numpy as np
import one_node
import pytest

BLOCK = 32
HALVES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}
# Half a unit of the type.
UNITS = {"f16": 2**-11, "bf16": 2**-8}


def matrix(bits, width, inner):
    random = np.random.default_rng([bits, width, inner])
    codes = random.integers(0, 2**bits, (width, inner), dtype=np.uint8)
    scales = random.standard_normal((width, inner // BLOCK)).astype(np.float32)
    offsets = random.standard_normal(scales.shape).astype(np.float32)
    blocks = codes.reshape(width, inner // BLOCK, BLOCK)
    packed = blocks if bits == 8 else blocks[..., 0::2] | blocks[..., 1::2] << 4
    weights = scales[..., None].astype(np.float64) * (blocks.astype(np.float64) - 2 ** (bits - 1)) + offsets[..., None]
    return {"codes": packed, "scales": scales, "offsets": offsets}, weights.reshape(width, inner)


@pytest.mark.parametrize("rows, inner, width", [(0, 32, 8), (3, 64, 0), (1, 576, 33), (5, 96, 40), (40, 64, 21), (300, 32, 9)])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("biased", [False, True])
def test_block_linear(bits, rows, inner, width, biased):
    inputs, weights = matrix(bits, width, inner)
    random = np.random.default_rng(3)
    x = random.standard_normal((rows, inner)).astype(np.float32)
    expected = x.astype(np.float64) @ weights.T
    bound = np.abs(x).astype(np.float64) @ np.abs(weights).T
    if biased:
        inputs["bias"] = random.standard_normal(width).astype(np.float32)
        expected, bound = expected + inputs["bias"], bound + np.abs(inputs["bias"])
    y = np.full((rows, width), np.nan, np.float32)
    maxima = np.full((rows, -(-width // BLOCK)), np.nan, np.float32)
    one_node.run("BlockLinear", {"x": x, **inputs}, {"y": y, "maxima": maxima})
    assert np.all(np.abs(y - expected) <= bound * 1e-5)
    for block in range(maxima.shape[1]):
        assert np.array_equal(maxima[:, block], y[:, block * BLOCK : (block + 1) * BLOCK].max(-1))


WHOLE = {"x": np.ones((5, 64), np.float32), **matrix(4, 3, 64)[0]}
BAD = {
    "no whole blocks": ({"x": np.ones((5, 63), np.float32)}, r"x: shape \[5, 63\], expected rows of a multiple of 32"),
    "bytes": ({"codes": np.ones((3, 2, 8), np.uint8)}, r"codes: shape \[3, 2, 8\], expected 16 bytes a block of 32 \(4 bits\) or 32"),
    "another inner": ({"codes": np.ones((3, 3, 16), np.uint8)}, r"codes: shape \[3, 3, 16\], expected \[3, 2, 16\]"),
    "scales": ({"scales": np.ones((3, 3), np.float32)}, r"scales: shape \[3, 3\], expected \[3, 2\]"),
    "offsets": ({"offsets": np.ones((4, 2), np.float32)}, r"offsets: shape \[4, 2\], expected \[3, 2\]"),
    "bias": ({"bias": np.ones(4, np.float32)}, r"bias: shape \[4\], expected \[3\]"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_is_said(what):
    wrong, message = BAD[what]
    inputs = WHOLE | wrong
    with pytest.raises(Exception, match=message):
        one_node.session("BlockLinear", inputs, {"y": np.float32}).run(None, inputs)


def test_rows_may_have_more_dimensions():
    x = np.random.default_rng(1).standard_normal((2, 3, 64)).astype(np.float32)

    def product(x):
        inputs = WHOLE | {"x": x}
        return one_node.session("BlockLinear", inputs, {"y": np.float32}).run(None, inputs)[0]

    y = product(x)
    assert y.shape == (2, 3, 3) and np.array_equal(y.reshape(6, 3), product(x.reshape(6, 64)))


def test_shapes_are_known_before_a_run():
    y, maxima = one_node.session("BlockLinear", WHOLE, {"y": np.float32, "maxima": np.float32}).get_outputs()
    assert (y.shape, y.type) == (["T", 3], "tensor(float)")
    assert (maxima.shape, maxima.type) == (["T", 1], "tensor(float)")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("around", ["nothing", "norm and gate", "bias and residual", "cut"])
def test_half_precision_has_what_stands_around_it(around, kind, bits):
    rows, inner, width = 5, 96, 48
    (packed, _), random = matrix(bits, width, inner), np.random.default_rng(5)
    half = lambda *shape: random.standard_normal(shape).astype(HALVES[kind])  # noqa: E731
    scales = (half(width, inner // BLOCK).astype(np.float32) / 2 ** (bits - 1)).astype(HALVES[kind])
    inputs = {"x": half(rows, inner), "codes": packed["codes"], "scales": scales, "offsets": None}
    codes = packed["codes"]
    codes = codes if bits == 8 else np.stack([codes & 15, codes >> 4], -1).reshape(width, inner // BLOCK, BLOCK)
    weights = (scales.astype(np.float64)[..., None] * (codes.astype(np.float64) - 2 ** (bits - 1))).reshape(width, inner)
    x, attributes, outputs = inputs["x"].astype(np.float64), {}, {"y": (rows, width)}
    if around == "norm and gate":
        inputs |= {"bias": None, "residual": None, "norm": half(inner)}
        attributes = {"activation": "silu", "epsilon": 0.01}
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.01) * inputs["norm"].astype(np.float64)
        x = x.astype(np.float32).astype(HALVES[kind]).astype(np.float64)
        outputs = {"y": (rows, width // 2)}
    elif around == "bias and residual":
        inputs |= {"bias": half(width), "residual": half(rows, width)}
    elif around == "cut":
        attributes, outputs = {"width2": 10, "width3": 6}, {"y": (rows, 32), "y2": (rows, 10), "y3": (rows, 6)}
    expected = x @ weights.T
    off = np.abs(x) @ np.abs(weights).T
    if around == "norm and gate":
        (gate, up), off = np.split(expected, 2, -1), off.max()
        expected = gate / (1 + np.exp(-gate)) * up
    elif around == "bias and residual":
        expected = expected + inputs["bias"].astype(np.float64) + inputs["residual"].astype(np.float64)
    found = {name: np.full(shape, np.nan, HALVES[kind]) for name, shape in outputs.items()}
    one_node.run("BlockLinear", inputs, found, **attributes)
    y = np.concatenate([array.astype(np.float64) for array in found.values()], -1)
    assert np.all(np.abs(y - expected) <= np.abs(expected) * UNITS[kind] * 1.01 + off * 1e-5)


@pytest.mark.parametrize("name", ["residual", "norm"])
def test_products_in_f32_are_alone(name):
    around = {"residual": np.ones((5, 3), np.float32), "norm": np.ones(64, np.float32)}
    inputs = WHOLE | {"bias": None, "residual": None} | {name: around[name]}
    with pytest.raises(Exception, match=f"{name}: this input is one of products in f16 and bf16"):
        one_node.session("BlockLinear", inputs, {"y": np.float32})
    with pytest.raises(Exception, match="activation, width2, width3: these attributes are those of products in f16 and bf16"):
        one_node.session("BlockLinear", WHOLE, {"y": np.float32}, activation="silu")


def test_shapes_of_half_precision_are_known_before_a_run():
    inputs = {name: array if name == "codes" else array.astype(np.float16) for name, array in WHOLE.items()}
    y, y2 = one_node.session("BlockLinear", inputs, {"y": np.float16, "y2": np.float16}, width2=1).get_outputs()
    assert (y.shape, y2.shape, y.type) == (["T", 2], ["T", 1], "tensor(float16)")
