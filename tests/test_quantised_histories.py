"""HstuAttention over quantised pools in Python's ONNX Runtime, against a quantiser and a float64 attention in numpy."""

import ml_dtypes
import numpy as np
import pytest
from one_node import run, session
from test_parity import ATTENTION, FLOATS, GOLDEN, TOLERANCE, error, load, reference, rounded

FORMATS = ["int8", "int4", "fp8"]
OUTPUTS = "output", "kv_pool_out", "kv_scales_out"


def quantise(numbers, format):
    """Codes and scales of heads [..., D], as the specification words it; all arithmetic in f32."""
    numbers, smallest = numbers.astype(np.float32), np.float32(2**-24)
    if format == "fp8":
        scale = np.maximum(np.abs(numbers).max(-1) / np.float32(448), smallest).astype(np.float16)[..., None]
        codes = np.clip(numbers / scale.astype(np.float32), -448, 448).astype(ml_dtypes.float8_e4m3fn)
        return codes.view(np.uint8), scale
    most = np.float32(255 if format == "int8" else 15)
    low = numbers.min(-1).astype(np.float16).astype(np.float32)
    scale = np.maximum((numbers.max(-1) - low) / most, smallest).astype(np.float16)
    scales = np.stack([scale, low.astype(np.float16)], -1)
    codes = np.clip(np.rint((numbers - low[..., None]) / scale.astype(np.float32)[..., None]), 0, most).astype(np.uint8)
    return (codes[..., ::2] | codes[..., 1::2] << 4 if format == "int4" else codes), scales


def stored(codes, scales, format):
    """What is read of them."""
    scales = scales.astype(np.float32)
    if format == "fp8":
        return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales
    if format == "int4":
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
    return scales[..., 1:] + codes * scales[..., :1]


def new_rows(inputs):
    """The new history rows of every user: each with its page and its slot."""
    page_size = inputs["kv_pool"].shape[2]
    for user, candidates in enumerate(inputs["num_candidates"]):
        begin, end = inputs["row_offsets"][user : user + 2]
        for row in range(begin, end - candidates):
            position = inputs["cached_len"][user] + row - begin
            page = inputs["page_ids"][inputs["page_indptr"][user] + position // page_size]
            yield row, page, position % page_size


def call(inputs, format):
    """The inputs of a quantised node, the pools that it writes, and what a native node would read instead."""
    pool, native = inputs["kv_pool"].astype(np.float32), dict(inputs)
    written = ~np.isnan(pool).any(-1)
    codes, scales = quantise(np.where(written[..., None], pool, 0), format)
    # Slots that no token is in hold what would be seen.
    codes[~written], scales[~written] = 0x7F, np.nan
    new_codes, new_scales = codes.copy(), scales.copy()
    native["key"], native["value"] = (inputs[name].astype(np.float32) for name in ("key", "value"))
    for row, page, slot in new_rows(inputs):
        for side, name in enumerate(["key", "value"]):
            new_codes[page, side, slot], new_scales[page, side, slot] = quantise(inputs[name][row], format)
            native[name][row] = stored(new_codes[page, side, slot], new_scales[page, side, slot], format)
    with np.errstate(invalid="ignore"):
        native["kv_pool"] = stored(codes, scales, format)
    fed = {name: inputs[name] for name in ATTENTION} | {"kv_pool": codes}
    fed |= {"num_contextual": inputs.get("num_contextual"), "kv_scales": scales}
    return fed, (new_codes, new_scales), native


def case(path, kind, format):
    tensors, attributes = load(path)
    inputs = rounded(tensors, kind)
    return *call(inputs, format), attributes | {"kv_format": format}


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden(path, format, kind, in_place):
    fed, (codes, scales), native, attributes = case(path, kind, format)
    outputs = {"output": np.empty_like(fed["query"]), "kv_pool_out": fed["kv_pool"], "kv_scales_out": fed["kv_scales"]}
    if not in_place:
        outputs |= {name: np.empty_like(outputs[name]) for name in OUTPUTS[1:]}
    run("HstuAttention", fed, outputs, **attributes)
    assert np.array_equal(outputs["kv_pool_out"], codes)
    assert np.array_equal(outputs["kv_scales_out"].view(np.uint16), scales.view(np.uint16))
    assert error(outputs["output"], reference(native, attributes)) <= TOLERANCE[kind]


CASE = next(path for path in GOLDEN if path.stem == "cached_ragged")


def refused(changes=None, outputs=OUTPUTS, **attributes):
    """What is said of a changed call; nothing is written."""
    fed, _, _, known = case(CASE, "f32", "int8")
    fed |= changes or {}
    made = {"output": fed["query"], "kv_pool_out": fed["kv_pool"], "kv_scales_out": fed["kv_scales"]}
    made = {name: np.full_like(made[name], 7) if name in outputs else None for name in OUTPUTS}
    before = {name: array.copy() for name, array in made.items() if array is not None}
    with pytest.raises(Exception) as caught:
        kinds = {name: None if array is None else array.dtype for name, array in made.items()}
        # It says in its own words what a run through bindings does not.
        session("HstuAttention", fed, kinds, **(known | attributes))
        run("HstuAttention", fed, made, **(known | attributes))
    for name, array in before.items():
        assert np.array_equal(array.view(np.uint8), made[name].view(np.uint8)), f"{name} was written"
    return str(caught.value)


def test_bad_input_is_refused_by_name_and_nothing_is_written():
    fed, *_ = case(CASE, "f32", "int8")
    assert "kv_scales" in refused({"kv_scales": fed["kv_scales"][..., :1].copy()})
    assert "kv_scales" in refused({"kv_scales": fed["kv_scales"][1:].copy()})
    assert "kv_pool" in refused({"kv_pool": fed["kv_pool"][..., :-1].copy()})
    assert "page_ids" in refused({"page_ids": fed["page_ids"] + 100})
    assert "cached_len" in refused({"cached_len": -fed["cached_len"] - 1})


def test_a_node_that_makes_no_sense_is_refused_when_the_model_is_opened():
    fed, *_ = case(CASE, "f32", "int8")
    assert "'int3'" in refused(kv_format="int3").replace('"', "'")
    assert "not native" in refused(kv_format="native")
    assert "kv_scales: a quantised pool takes this input" in refused(outputs=OUTPUTS[:2])
    pool = np.zeros([*fed["kv_pool"].shape[:-1], fed["query"].shape[-1]], np.float32)
    assert "kv_format: a quantised format takes a kv_pool of uint8" in refused({"kv_pool": pool})
    assert "kv_scales: a native pool has none" in refused({"kv_pool": pool}, kv_format="native")
