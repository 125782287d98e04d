"""The operators compute what the specification says, the same to the bit in Python's ONNX Runtime and in libpagoda."""

import json
import subprocess

import capi
import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
from capi import ROOT, graph, number_of
from onnx import helper
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

GOLDEN = sorted((ROOT / "tests/data/golden").glob("*.safetensors"))
OPS = ROOT / "target/release/libpagoda_ops.so"
FLOATS = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
TOLERANCE = {"f32": 1e-5, "f16": 2e-3, "bf16": 1e-2}

PAGES = ["cached_len", "page_indptr", "page_ids"]
ATTENTION = ["query", "key", "value", "row_offsets", "num_candidates", *PAGES, "kv_pool"]
APPEND = ["kv_pool", "key", "value", "row_offsets", "num_candidates", *PAGES]


# ---- cases -------------------------------------------------------------------------------------------------------


def load(path):
    """The tensors and attributes of a golden case."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    attributes = {name: float(value) for name, value in header.pop("__metadata__").items()}
    attributes = {name: value if name == "alpha" else int(value) for name, value in attributes.items()}
    types = {"F32": np.float32, "F64": np.float64, "I32": np.int32}
    tensors = {}
    for name, info in header.items():
        begin, end = (8 + size + offset for offset in info["data_offsets"])
        tensors[name] = np.frombuffer(data[begin:end], types[info["dtype"]]).reshape(info["shape"])
    return tensors, attributes


def rounded(tensors, kind):
    """The inputs with their floats as `kind`."""
    inputs = {name: tensor for name, tensor in tensors.items() if not name.startswith("expected")}
    return {name: t.astype(FLOATS[kind]) if t.dtype == np.float32 else t.copy() for name, t in inputs.items()}


def silu(x):
    return x / (1 + np.exp(-x))


def reference(inputs, attributes):
    """HstuAttention in float64, pair by pair as the specification states it."""
    query, key, value, pool = (inputs[name].astype(np.float64) for name in ("query", "key", "value", "kv_pool"))
    alpha = np.float64(np.float32(attributes["alpha"])) or 1 / np.sqrt(query.shape[2])
    group, window, page_size = attributes["target_group_size"], attributes["max_attn_len"], pool.shape[2]
    output = np.zeros(query.shape)
    for user, candidates in enumerate(inputs["num_candidates"]):
        begin, end = inputs["row_offsets"][user : user + 2]
        cached = inputs["cached_len"][user]
        contextual = inputs["num_contextual"][user] if "num_contextual" in inputs else 0
        history = cached + end - begin - candidates
        pages = inputs["page_ids"][inputs["page_indptr"][user] :]
        slots = [(pages[p // page_size], p % page_size) for p in range(cached)]
        keys, values = (
            np.array([*(pool[page, side, slot] for page, slot in slots), *rows[begin:end]]).reshape(-1, *key.shape[1:])
            for side, rows in ((0, key), (1, value))
        )
        r, c = np.arange(cached, len(keys))[:, None], np.arange(len(keys))[None, :]

        def place(x):
            capped = np.minimum(x, history)
            return np.maximum(capped - contextual + 1, 0) if contextual else capped

        near = (place(r) - place(c) <= window) if window else np.full(np.broadcast_shapes(r.shape, c.shape), True)
        own_group = (c - history) // group == (r - history) // group
        mask = np.where(r < contextual, c < history, (c <= r) & np.where(c < history, near, own_group))
        scores = silu(alpha * np.einsum("ihd,jhd->hij", query[begin:end], keys)) * mask
        output[begin:end] = np.einsum("hij,jhd->ihd", scores, values)
    return output / attributes["scaling_seqlen"]


def appended(inputs):
    """PagedKvAppend, row by row."""
    pool = inputs["kv_pool"].copy()
    for user, candidates in enumerate(inputs["num_candidates"]):
        begin, end = inputs["row_offsets"][user : user + 2]
        for row in range(begin, end - candidates):
            position = inputs["cached_len"][user] + row - begin
            page = inputs["page_ids"][inputs["page_indptr"][user] + position // pool.shape[2]]
            pool[page, 0, position % pool.shape[2]] = inputs["key"][row]
            pool[page, 1, position % pool.shape[2]] = inputs["value"][row]
    return pool


def error(output, expected):
    norm = np.linalg.norm(expected)
    return np.linalg.norm(output.astype(np.float64) - expected) / (norm or 1)


# ---- graphs and runtimes -----------------------------------------------------------------------------------------


def model(inputs, names, operator, output, like, **attributes):
    """A graph of one operator."""
    node = helper.make_node(operator, names, [output], domain="ai.pagoda", **attributes)
    return graph([node], *described({n: inputs[n] for n in names if n}, {output: inputs[like]}))


def described(*sides):
    """What `graph` needs of arrays: the type, and only the number of dimensions."""

    def what(name, array):
        return number_of(array.dtype), [f"{name}{axis}" for axis in range(array.ndim)]

    return [{name: what(name, array) for name, array in side.items()} for side in sides]


def attention_model(inputs, attributes, names=None):
    names = names or [*ATTENTION, *(["num_contextual"] if "num_contextual" in inputs else [])]
    return model(inputs, names, "HstuAttention", "output", "query", **attributes)


def append_model(inputs):
    return model(inputs, APPEND, "PagedKvAppend", "kv_pool_out", "kv_pool")


def layer_model(inputs, attributes, appends):
    """A layer that attends and remembers, by two nodes or by an attention that appends too."""
    contextual = ["num_contextual"] if "num_contextual" in inputs else []
    if appends:
        outputs, nodes = ["output", "kv_pool_out"], []
        names = [*ATTENTION, *contextual]
    else:
        outputs, nodes = ["output"], [helper.make_node("PagedKvAppend", APPEND, ["kv_pool_out"], domain="ai.pagoda")]
        names = [*ATTENTION[:-1], "kv_pool_out", *contextual]
    nodes.append(helper.make_node("HstuAttention", names, outputs, domain="ai.pagoda", **attributes))
    fed, made = used(inputs, [*ATTENTION, *contextual]), {"output": inputs["query"], "kv_pool_out": inputs["kv_pool"]}
    return graph(nodes, *described(fed, made))


def python_session(model):
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(OPS))
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def in_python(model, inputs, outputs):
    """Runs in Python's ONNX Runtime. Everything is bound by address: numpy has no bf16 that it would take."""
    session = python_session(model)
    binding = session.io_binding()
    for bind, arrays in (binding.bind_input, inputs), (binding.bind_output, outputs):
        for name, array in arrays.items():
            bind(name, "cpu", 0, number_of(array.dtype), array.shape, array.ctypes.data)
    session.run_with_iobinding(binding)


def in_pagoda(pagoda, model, inputs, outputs):
    handle = pagoda.open(model, threads=2)
    try:
        pagoda.run(handle, inputs, outputs)
    finally:
        pagoda.free("pagoda_model", handle)


def in_both(pagoda, model, inputs, name, like):
    """The result of both runtimes, which must be the same to the bit."""
    from_python, from_pagoda = (np.full_like(like, 123) for _ in range(2))
    in_python(model, inputs, {name: from_python})
    in_pagoda(pagoda, model, inputs, {name: from_pagoda})
    assert from_python.tobytes() == from_pagoda.tobytes()
    return from_pagoda


def used(inputs, names):
    return {name: inputs[name] for name in names if name in inputs}


# ---- the tests ---------------------------------------------------------------------------------------------------

every_case = pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
every_float = pytest.mark.parametrize("kind", FLOATS)


def test_there_are_golden_cases():
    assert len(GOLDEN) >= 9


@every_case
def test_the_reference_of_this_file_gives_the_golden_outputs(path):
    tensors, attributes = load(path)
    assert error(reference(tensors, attributes), tensors["expected_output"]) < 1e-7
    assert appended(tensors).tobytes() == tensors["expected_pool"].tobytes()


@every_case
@every_float
def test_attention_is_right_and_the_same_to_the_bit_in_both_runtimes(pagoda, path, kind):
    tensors, attributes = load(path)
    inputs = rounded(tensors, kind)
    made, fed = attention_model(inputs, attributes), used(inputs, [*ATTENTION, "num_contextual"])
    output = in_both(pagoda, made, fed, "output", inputs["query"])
    expected = tensors["expected_output"] if kind == "f32" else reference(inputs, attributes)
    assert error(output, expected) <= TOLERANCE[kind]
    if not inputs["cached_len"].any():
        # Without tokens in the cache the graph may as well leave it out.
        names = [*ATTENTION[:5], *(["", "", "", "", "num_contextual"] if "num_contextual" in inputs else [])]
        without = in_both(pagoda, attention_model(inputs, attributes, names), used(inputs, names), "output", output)
        assert without.tobytes() == output.tobytes()


@every_case
@every_float
def test_append_is_right_and_the_same_to_the_bit_in_both_runtimes(pagoda, path, kind):
    inputs = rounded(load(path)[0], kind)
    before = inputs["kv_pool"].tobytes()
    pool = in_both(pagoda, append_model(inputs), used(inputs, APPEND), "kv_pool_out", inputs["kv_pool"])
    assert pool.tobytes() == appended(inputs).tobytes()
    assert inputs["kv_pool"].tobytes() == before, "the input was written to"


@every_case
def test_append_in_place_writes_the_new_rows_and_nothing_else(pagoda, path):
    inputs = rounded(load(path)[0], "f32")
    expected, made = appended(inputs), append_model(inputs)
    for run in in_python, lambda *arguments: in_pagoda(pagoda, *arguments):
        pool = inputs["kv_pool"].copy()
        run(made, used(inputs, APPEND) | {"kv_pool": pool}, {"kv_pool_out": pool})
        assert pool.tobytes() == expected.tobytes()


@every_case
@every_float
@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in place"])
def test_attention_that_appends_gives_what_two_nodes_give_to_the_bit(pagoda, path, kind, in_place):
    tensors, attributes = load(path)
    inputs = rounded(tensors, kind)
    before, results = inputs["kv_pool"].tobytes(), []
    for appends in False, True:
        made = layer_model(inputs, attributes, appends)
        for run in in_python, lambda *arguments: in_pagoda(pagoda, *arguments):
            fed = used(inputs, [*ATTENTION, "num_contextual"]) | {"kv_pool": inputs["kv_pool"].copy()}
            output = np.full_like(inputs["query"], 123)
            pool = fed["kv_pool"] if in_place else np.full_like(fed["kv_pool"], 123)
            run(made, fed, {"output": output, "kv_pool_out": pool})
            results.append((output.tobytes(), pool.tobytes()))
            assert in_place or fed["kv_pool"].tobytes() == before, "the input was written to"
    assert results == [results[0]] * 4
    assert results[0][1] == appended(inputs).tobytes()


@pytest.mark.parametrize("outputs", [["output"], ["output", ""]], ids=["left out", "without a name"])
def test_attention_whose_second_output_has_no_name_appends_nothing(pagoda, outputs):
    tensors, attributes = load(ROOT / "tests/data/golden/cached_ragged.safetensors")
    inputs = rounded(tensors, "f32")
    node = helper.make_node("HstuAttention", ATTENTION, outputs, domain="ai.pagoda", **attributes)
    made = graph([node], *described(used(inputs, ATTENTION), {"output": inputs["query"]}))
    before = inputs["kv_pool"].tobytes()
    output = in_both(pagoda, made, used(inputs, ATTENTION), "output", inputs["query"])
    assert error(output, tensors["expected_output"]) <= TOLERANCE["f32"]
    assert inputs["kv_pool"].tobytes() == before


@pytest.mark.parametrize("missing", [PAGES + ["kv_pool"], *([name] for name in PAGES + ["kv_pool"])], ids=" ".join)
def test_attention_that_appends_needs_a_cache(pagoda, missing):
    tensors, attributes = load(ROOT / "tests/data/golden/cached_ragged.safetensors")
    inputs = rounded(tensors, "f32")
    names = ["" if name in missing else name for name in ATTENTION]
    node = helper.make_node("HstuAttention", names, ["output", "kv_pool_out"], domain="ai.pagoda", **attributes)
    outputs = {"output": inputs["query"], "kv_pool_out": inputs["kv_pool"]}
    made = graph([node], *described(used(inputs, names), outputs))
    message = f"kv_pool_out: this output takes the inputs .*, and {missing[0]} is missing"
    with pytest.raises(Exception, match=message):
        python_session(made)
    with pytest.raises(capi.Failure, match=message):
        pagoda.open(made)


BAD = {
    "a page beyond the pool": ("page_ids", lambda t: t.__setitem__(slice(None), 99), ["page_ids", "user 0", "page 99"]),
    "a page that is not allocated": ("page_ids", lambda t: t.__setitem__(1, -1), ["page_ids", "user 0", "page -1"]),
    "offsets going down": ("row_offsets", lambda t: t.__setitem__(1, t[2] + 1), ["row_offsets", "user 1", "goes down"]),
    "a negative length": ("cached_len", lambda t: t.__setitem__(1, -5), ["cached_len", "user 1", "-5"]),
    "too many candidates": ("num_candidates", lambda t: t.__setitem__(0, 999), ["num_candidates", "user 0", "999"]),
    "a slot of two users": ("page_ids", lambda t: t.__setitem__(slice(None), 0), ["page_ids", "written twice"]),
    "contextual beside cached": ("num_contextual", lambda t: t.__setitem__(1, 1), ["num_contextual", "user 1", "1 c"]),
}


# What only one of the two refuses.
OF_ATTENTION, OF_APPEND = "contextual beside cached", "a slot of two users"


@pytest.mark.parametrize(
    "operator, what",
    [("HstuAttention", what) for what in BAD if what != OF_APPEND]
    + [("PagedKvAppend", what) for what in BAD if what != OF_ATTENTION]
    + [("both in one", what) for what in BAD],
)
def test_a_bad_input_is_refused_by_name_and_nothing_is_written(pagoda, operator, what):
    tensors, attributes = load(ROOT / "tests/data/golden/cached_ragged.safetensors")
    inputs = rounded(tensors, "f32")
    inputs["num_contextual"] = np.zeros_like(inputs["cached_len"])
    # Users 0 and 1 read from the cache and bring history of their own: whatever is spoilt below matters.
    inputs["cached_len"][:2] = np.maximum(inputs["cached_len"][:2], 1)
    likes = {"output": inputs["query"], "kv_pool_out": inputs["kv_pool"]}
    fed = used(inputs, [*ATTENTION, "num_contextual"])
    if operator == "both in one":
        made = layer_model(inputs, attributes, appends=True)
    elif operator == "HstuAttention":
        made = attention_model(inputs, attributes)
        del likes["kv_pool_out"]
    else:
        made, fed = append_model(inputs), used(inputs, APPEND)
        del likes["output"]
    tensor, spoil, words = BAD[what]
    outputs = {name: np.full_like(like, 123) for name, like in likes.items()}
    in_python(made, fed, outputs)
    in_pagoda(pagoda, made, fed, outputs)
    spoil(inputs[tensor])
    for output in outputs.values():
        output.fill(123)
    with pytest.raises(RuntimeError):  # With bound outputs Python's ONNX Runtime does not say what kind it was.
        in_python(made, fed, outputs)
    with pytest.raises(InvalidArgument) as from_python:
        python_session(made).run(None, fed)
    with pytest.raises(capi.Failure) as from_pagoda:
        in_pagoda(pagoda, made, fed, outputs)
    assert from_pagoda.value.status == capi.PAGODA_STATUS_INVALID_ARGUMENT
    for word in words:
        assert word in str(from_python.value)
        assert word in from_pagoda.value.message
    for output in outputs.values():
        assert (output == 123).all()


def test_history_in_pieces_gives_what_history_at_once_gives(pagoda):
    """A layer that attends and remembers, fed 45 tokens in four pieces for one user and fewer for another."""
    random, page_size, heads, size = np.random.default_rng(7), 8, 2, 32
    lengths, cuts, candidates = [45, 19], [[7, 1, 20, 17], [0, 19, 0, 0]], 3
    rows = [random.standard_normal([3, length, heads, size], np.float32) for length in lengths]
    scored = [random.standard_normal([3, candidates, heads, size], np.float32) for _ in lengths]
    pool = np.full([12, 2, page_size, heads, size], np.nan, np.float32)
    page_indptr, page_ids = np.array([0, 6, 9], np.int32), random.permutation(12)[:9].astype(np.int32)
    attributes = {"alpha": 0.0, "scaling_seqlen": 64}
    attention = helper.make_node("HstuAttention", ATTENTION, ["output"], domain="ai.pagoda", **attributes)
    append = helper.make_node("PagedKvAppend", APPEND, ["kv_pool_out"], domain="ai.pagoda")

    def step(handle, begins, counts, pool):
        parts = [p for u in range(2) for p in (rows[u][:, begins[u] : begins[u] + counts[u]], scored[u])]
        query, key, value = np.concatenate(parts, axis=1).copy()
        inputs = {"query": query, "key": key, "value": value, "kv_pool": pool}
        inputs |= {"row_offsets": np.cumsum([0, *(count + candidates for count in counts)]).astype(np.int32)}
        inputs |= {"num_candidates": np.full(2, candidates, np.int32), "cached_len": np.array(begins, np.int32)}
        inputs |= {"page_indptr": page_indptr, "page_ids": page_ids}
        if handle is None:
            return graph([attention, append], *described(inputs, {"output": query, "kv_pool_out": pool}))
        output = np.empty_like(query)
        pagoda.run(handle, inputs, {"output": output, "kv_pool_out": pool})
        return [output[begin:end] for begin, end in zip(inputs["row_offsets"], inputs["row_offsets"][1:])]

    handle = pagoda.open(step(None, [0, 0], lengths, pool))
    at_once = step(handle, [0, 0], lengths, pool.copy())
    begins, pieces = [0, 0], [[], []]
    for counts in zip(*cuts):
        outputs = step(handle, begins, counts, pool)
        for user, output in enumerate(outputs):
            pieces[user].append(output[: counts[user]])
        begins = [begin + count for begin, count in zip(begins, counts)]
    pagoda.free("pagoda_model", handle)
    for user, output in enumerate(outputs):
        whole = np.concatenate([*pieces[user], output[counts[user] :]])
        assert error(whole, at_once[user].astype(np.float64)) <= TOLERANCE["f32"]


@every_float
@pytest.mark.parametrize("dims", [None, [None, 2, 8], ["rows", 2, 8]], ids=["no rank", "no name", "named"])
def test_shapes_that_a_graph_leaves_open_stay_open(kind, dims):
    """Nothing is made up for them, and what the graph says of an output stays."""
    element, index = number_of(FLOATS[kind]), number_of(np.int32)
    inputs = {name: (element, dims) for name in ATTENTION[:3]} | {name: (index, ["n"]) for name in ATTENTION[3:5]}
    node = helper.make_node("HstuAttention", list(inputs), ["output"], domain="ai.pagoda", scaling_seqlen=1)
    for said, expected in (["T", 2, 8], ["T", 2, 8]), (None, dims if dims and dims[0] else []):
        session = python_session(graph([node], inputs, {"output": (element, said)}))
        assert session.get_outputs()[0].shape == expected


@every_float
def test_the_second_output_of_attention_has_the_shape_of_the_pool(kind):
    element, index = number_of(FLOATS[kind]), number_of(np.int32)
    inputs = {name: (element, ["T", 2, 8]) for name in ATTENTION[:3]}
    inputs |= {name: (index, ["n"]) for name in ATTENTION[3:8]} | {"kv_pool": (element, ["pages", 2, 16, 2, 8])}
    outputs = {"output": (element, None), "kv_pool_out": (element, None)}
    node = helper.make_node("HstuAttention", ATTENTION, list(outputs), domain="ai.pagoda", scaling_seqlen=1)
    output, pool = python_session(graph([node], inputs, outputs)).get_outputs()
    assert (output.shape, pool.shape) == (["T", 2, 8], ["pages", 2, 16, 2, 8])


def test_the_operator_library_exports_one_function():
    listed = subprocess.run(["nm", "-D", "--defined-only", OPS], capture_output=True, text=True, check=True)
    assert [line.split()[-1] for line in listed.stdout.splitlines()] == ["RegisterCustomOps"]
