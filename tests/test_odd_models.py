"""Models that are valid and unusual, and memory that is bound in unusual ways: an answer or an error, never a crash
or a wrong number."""

import ctypes
import mmap

import capi
import numpy as np
import pytest
from capi import HEADER, Failure, graph
from onnx import TensorProto, helper

C = HEADER.constants
FLOAT, INT = TensorProto.FLOAT, TensorProto.INT32
ROWS = {name: (FLOAT, ["T", 1, 4]) for name in ("query", "key", "value")}
INDICES = {"row_offsets": (INT, ["B+1"]), "num_candidates": (INT, ["B"])}
PAGES = {"cached_len": (INT, ["B"]), "page_indptr": (INT, ["B+1"]), "page_ids": (INT, ["P"])}
NO_ACCESS = 0
POOL = (FLOAT, ["pages", 2, 8, 1, 4])


@pytest.fixture
def opened(pagoda):
    """Opens models that are freed when the test is over."""
    models = []

    def open(model):
        models.append(pagoda.open(model))
        return models[-1]

    yield open
    for model in models:
        pagoda.free("pagoda_model", model)


def attention(**attributes):
    inputs = ROWS | INDICES
    node = helper.make_node("HstuAttention", list(inputs), ["output"], domain="ai.pagoda", **attributes)
    return graph([node], inputs, {"output": (FLOAT, ["T", 1, 4])})


def append():
    inputs = {"kv_pool": POOL, "key": ROWS["key"], "value": ROWS["value"]} | INDICES | PAGES
    node = helper.make_node("PagedKvAppend", list(inputs), ["kv_pool_out"], domain="ai.pagoda")
    return graph([node], inputs, {"kv_pool_out": POOL})


def layer():
    """Attention that appends too."""
    inputs = ROWS | INDICES | PAGES | {"kv_pool": POOL}
    outputs = {"output": (FLOAT, ["T", 1, 4]), "kv_pool_out": POOL}
    node = helper.make_node("HstuAttention", list(inputs), list(outputs), domain="ai.pagoda", scaling_seqlen=1)
    return graph([node], inputs, outputs)


def rows(users=1, count=5):
    random = np.random.default_rng(7)
    made = {name: random.standard_normal([users * count, 1, 4], np.float32) for name in ROWS}
    made["row_offsets"] = np.arange(users + 1, dtype=np.int32) * count
    return made | {"num_candidates": np.full(users, 2, np.int32)}


def result(pagoda, model, inputs, name):
    """A copy of one output."""
    [tensor] = pagoda.run(model, inputs, {name: None})
    try:
        return pagoda.read(tensor)
    finally:
        pagoda.free("pagoda_tensor", tensor)


def refused(pagoda, model, inputs, outputs):
    with pytest.raises(Failure) as caught:
        pagoda.run(model, inputs, outputs)
    return caught.value


def test_an_output_that_is_an_input_too_is_refused(pagoda, opened):
    value = (FLOAT, [2])
    model = opened(graph([helper.make_node("Neg", ["x"], ["y"])], {"x": value}, {"y": value, "x": value}))
    x = np.float32([1, 2])
    for bound in None, np.float32([9, 9]):
        failure = refused(pagoda, model, {"x": x}, {"x": bound})
        assert (failure.status, failure.argument) == (C["PAGODA_STATUS_UNSUPPORTED"], "output_names[0]")
    assert np.array_equal(result(pagoda, model, {"x": x}, "y"), -x)


def test_an_output_that_is_not_a_tensor_is_refused(pagoda, opened):
    kind = helper.make_optional_type_proto(helper.make_tensor_type_proto(FLOAT, [2]))
    nodes = [helper.make_node("Optional", [], ["o"], type=helper.make_tensor_type_proto(FLOAT, [2]))]
    nodes.append(helper.make_node("Neg", ["x"], ["y"]))
    value = helper.make_tensor_value_info
    outputs = [value("y", FLOAT, [2]), helper.make_value_info("o", kind)]
    made = helper.make_graph(nodes, "g", [value("x", FLOAT, [2])], outputs)
    made = helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    model = opened(made.SerializeToString())
    failure = refused(pagoda, model, {"x": np.float32([1, 2])}, {"y": None, "o": None})
    assert (failure.status, failure.argument) == (C["PAGODA_STATUS_UNSUPPORTED"], "output_names[1]")


def test_an_attribute_of_another_type_is_not_overlooked(pagoda, opened):
    inputs = rows()
    results = [
        result(pagoda, opened(attention(scaling_seqlen=1, **given)), inputs, "output")
        for given in ({"alpha": 2}, {"alpha": 2.0}, {})
    ]
    assert np.array_equal(results[0], results[1]) and not np.array_equal(results[0], results[2])
    for given in {"max_attn_len": 1.0}, {"target_group_size": 2.0}, {"alpha": "2"}, {"max_attn_len": "1"}:
        with pytest.raises(Failure, match=f"{next(iter(given))}: this attribute is a"):
            opened(attention(scaling_seqlen=1, **given))
    for given in {}, {"scaling_seqlen": 0}, {"scaling_seqlen": 1.0}:
        with pytest.raises(Failure, match="scaling_seqlen"):
            opened(attention(**given))
    with pytest.raises(Failure, match="candidates_only is 2, expected 0 or 1"):
        opened(attention(scaling_seqlen=1, candidates_only=2))


def test_candidates_alone_are_what_they_are_among_all(pagoda, opened):
    inputs = rows()
    every, some = (
        result(pagoda, opened(attention(scaling_seqlen=1, candidates_only=only)), inputs, "output") for only in (0, 1)
    )
    ends = inputs["row_offsets"][1:]
    history = np.ones(len(every), bool)
    for end, count in zip(ends, inputs["num_candidates"]):
        history[end - count : end] = False
    assert history.any() and not history.all() and every[history].any()
    assert not some[history].any() and np.array_equal(some[~history], every[~history])


def test_an_output_over_an_input_is_refused(pagoda, opened):
    model = opened(attention(scaling_seqlen=1))
    for name in "query", "key", "value":
        inputs = rows()
        before = inputs[name].copy()
        failure = refused(pagoda, model, inputs, {"output": inputs[name]})
        assert failure.status == C["PAGODA_STATUS_INVALID_ARGUMENT"] and f"{name}: its memory overlaps" in failure.message
        assert np.array_equal(inputs[name], before)


def test_a_pool_that_overlaps_itself_is_refused(pagoda, opened):
    model = opened(append())
    memory = np.zeros(200, np.float32)
    pool, shifted = memory[:128].reshape(2, 2, 8, 1, 4), memory[64:192].reshape(2, 2, 8, 1, 4)
    pages = {"cached_len": np.int32([0]), "page_indptr": np.int32([0, 1]), "page_ids": np.int32([1])}
    given = rows()
    inputs = {"kv_pool": pool, **{name: given[name] for name in ("key", "value", *INDICES)}, **pages}
    failure = refused(pagoda, model, inputs, {"kv_pool_out": shifted})
    assert failure.status == C["PAGODA_STATUS_INVALID_ARGUMENT"] and "kv_pool: its memory overlaps" in failure.message
    assert not memory.any()
    pagoda.run(model, inputs, {"kv_pool_out": pool})
    assert np.array_equal(pool[1, 0, :3], given["key"][:3])


def test_the_pool_of_attention_lies_over_the_pool_or_nothing(pagoda, opened):
    model = opened(layer())
    memory = np.zeros(200, np.float32)
    pool, shifted = memory[:128].reshape(2, 2, 8, 1, 4), memory[64:192].reshape(2, 2, 8, 1, 4)
    pages = {"cached_len": np.int32([0]), "page_indptr": np.int32([0, 1]), "page_ids": np.int32([1])}
    output, given = np.full([5, 1, 4], 9, np.float32), rows()
    inputs = given | pages | {"kv_pool": pool}
    failure = refused(pagoda, model, inputs, {"output": output, "kv_pool_out": shifted})
    assert failure.status == C["PAGODA_STATUS_INVALID_ARGUMENT"] and "kv_pool: its memory overlaps" in failure.message
    for name in "query", "key", "value":
        # Twenty numbers that lie where the output pool begins.
        over = inputs | {"kv_pool": np.zeros_like(pool), name: memory[64:84].reshape(5, 1, 4)}
        failure = refused(pagoda, model, over, {"output": output, "kv_pool_out": shifted})
        assert failure.status == C["PAGODA_STATUS_INVALID_ARGUMENT"] and f"{name}: its memory overlaps" in failure.message
    failure = refused(pagoda, model, inputs, {"output": memory[:20].reshape(5, 1, 4), "kv_pool_out": pool})
    assert failure.status == C["PAGODA_STATUS_INVALID_ARGUMENT"] and "overlap" in failure.message
    assert not memory.any() and (output == 9).all()
    pagoda.run(model, inputs, {"output": output, "kv_pool_out": pool})
    assert np.array_equal(pool[1, 0, :3], given["key"][:3])
    assert np.array_equal(output, result(pagoda, opened(attention(scaling_seqlen=1)), given, "output"))


def test_two_outputs_over_one_memory_are_refused(pagoda, opened):
    value = (FLOAT, [2])
    nodes = [helper.make_node("Neg", ["x"], ["y"]), helper.make_node("Abs", ["x"], ["z"])]
    model = opened(graph(nodes, {"x": value}, {"y": value, "z": value}))
    shared = np.float32([9, 9])
    failure = refused(pagoda, model, {"x": np.float32([1, -2])}, {"y": shared, "z": shared})
    assert (failure.status, failure.argument) == (C["PAGODA_STATUS_INVALID_ARGUMENT"], "outputs[1]")
    assert np.array_equal(shared, [9, 9])


def shape_of_what_can_not_be_read():
    """Runs a model that uses only the shape of its input, over memory that can not be read."""
    pagoda, libc = capi.pagoda, ctypes.CDLL(None)
    node = helper.make_node("Shape", ["x"], ["y"])
    model = pagoda.open(graph([node], {"x": (FLOAT, ["N"])}, {"y": (TensorProto.INT64, [1])}))
    libc.mmap.restype = ctypes.c_void_p
    memory = libc.mmap(None, ctypes.c_size_t(1 << 30), NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    dims = (ctypes.c_int64 * 1)(1 << 28)
    x = pagoda.make("pagoda_tensor_borrow", FLOAT, ctypes.addressof(dims), 1, memory, 1 << 30, None, None)
    shape = result(pagoda, model, {"x": x}, "y").tolist()
    pagoda.free("pagoda_tensor", x)
    pagoda.free("pagoda_model", model)
    return shape


def test_inputs_are_not_copied(process):
    assert process.run(shape_of_what_can_not_be_read) == [1 << 28]


def test_no_users_and_no_rows_are_fine(pagoda, opened):
    model = opened(attention(scaling_seqlen=1))
    nobody = rows(users=0)
    assert result(pagoda, model, nobody, "output").shape == (0, 1, 4)
    silent = nobody | {"row_offsets": np.zeros(4, np.int32), "num_candidates": np.zeros(3, np.int32)}
    assert result(pagoda, model, silent, "output").shape == (0, 1, 4)


def test_a_layer_without_rows_hands_its_pool_on(pagoda, opened):
    """Nothing to append is no reason to leave the output pool unwritten."""
    model, nobody = opened(layer()), rows(users=0)
    pages = {"cached_len": np.int32([]), "page_indptr": np.int32([0]), "page_ids": np.int32([])}
    for count in 0, 2:
        pool = np.arange(count * 64, dtype=np.float32).reshape(count, 2, 8, 1, 4)
        assert np.array_equal(result(pagoda, model, nobody | pages | {"kv_pool": pool}, "kv_pool_out"), pool)
