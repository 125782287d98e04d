"""EmbeddingBag in Python's ONNX Runtime and in libpagoda: it computes what the specification says, the same as a pooled
lookup does, refuses what it must, and finds its tables."""

import ctypes
import gc
import json
import shutil
import subprocess
from pathlib import Path

import capi
import numpy as np
import onnxruntime as ort
import pytest
from capi import ROOT, address, graph
from onnx import TensorProto, helper
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

OPS = ROOT / "target/release/libpagoda_ops.so"
FLOAT, INT, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
DIMS = {"users": 4, "items": 33}
KEYS = np.int64([7, -1, 7, 10, 2**40 + 3, -(2**63), 2**63 - 1, 0, 12])
MANY = np.random.default_rng(5).integers(-(2**63), 2**63 - 1, 5000, dtype=np.int64, endpoint=True)
CUTS = [0, *np.sort(np.random.default_rng(6).integers(0, 5000, 700)), 5000]


class Tables:
    """A configuration with two tables, which hold the keys above that are no multiple of 5."""

    def __init__(self, folder):
        keys = np.unique(np.concatenate([KEYS, MANY]))
        for table, dim in DIMS.items():
            numbers, found = rows(keys, dim)
            (folder / table).mkdir()
            np.save(folder / table / "keys.npy", keys[found])
            np.save(folder / table / "rows.npy", numbers[found])
        model = {
            "model": "m",
            "sparse_files": list(DIMS),
            "embedding_table_names": list(DIMS),
            "embedding_vecsize_per_table": list(DIMS.values()),
            "default_value_for_each_table": [-0.25, -0.25],
            "gpucacheper": 0.5,
            "hit_rate_threshold": 1.0,
        }
        self.path = folder / "tables.json"
        self.path.write_text(json.dumps({"models": [model]}))
        # What libpagoda_ops.so finds beside it.
        self.live = ctypes.CDLL(str(OPS.parent / "libpagoda.so")).pagoda_live_objects

    def session(self, model):
        return session(model, self.path)


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    made = Tables(tmp_path_factory.mktemp("tables"))
    before = made.live()
    yield made
    gc.collect()
    assert made.live() == before, "something was not freed"


def session(model, tables, ops=OPS):
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(ops))
    if tables is not None:
        options.add_session_config_entry("ai.pagoda.tables", str(tables))
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def node(table, combiner, inputs=("keys", "offsets"), outputs=("vectors", "hit")):
    inputs = inputs[:1] if combiner == "none" else inputs
    return helper.make_node("EmbeddingBag", inputs, outputs, domain="ai.pagoda", table=table, combiner=combiner)


def bag(table, combiner, keys=("K",), offsets=("R+1",), vectors=None, hit=None):
    """A graph of one operator that leaves the shapes of its outputs to the operator."""
    inputs = {"keys": (INT, keys)} | ({} if combiner == "none" else {"offsets": (INT, offsets)})
    return graph([node(table, combiner)], inputs, {"vectors": (FLOAT, vectors), "hit": (BOOL, hit)})


def rows(keys, dim):
    """What the tables hold, and whether they do."""
    unsigned = keys.view(np.uint64)[:, None]
    found = unsigned % 5 != 0
    numbers = ((unsigned + np.uint64(31) * np.arange(dim, dtype=np.uint64)) % 101).astype(np.float32) / np.float32(7)
    return np.where(found, numbers, np.float32(-0.25)), found[:, 0]


def combined(keys, offsets, dim, combiner):
    """Slot by slot in float64."""
    vectors = rows(keys, dim)[0].astype(np.float64)
    sums = np.array([vectors[begin:end].sum(0) for begin, end in zip(offsets, offsets[1:])]).reshape(-1, dim)
    counts = np.maximum(np.diff(offsets), 1)[:, None]
    return sums / {"sum": 1, "mean": counts, "sqrtn": np.sqrt(counts)}[combiner]


# ---- the numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", DIMS)
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_rows_are_combined_slot_by_slot(tables, table, combiner):
    opened = tables.session(bag(table, combiner))
    cases = [(KEYS, [0, 0, 3, 3, 4, 9, 9]), (KEYS[:0], [0]), (KEYS[:0], [0, 0]), (MANY, CUTS)]
    for keys, offsets in cases:
        vectors, hit = opened.run(None, {"keys": keys, "offsets": np.int64(offsets)})
        assert vectors.shape == (len(offsets) - 1, DIMS[table])
        assert np.allclose(vectors, combined(keys, offsets, DIMS[table], combiner), rtol=1e-5, atol=1e-5)
        assert np.array_equal(hit, rows(keys, 1)[1])


@pytest.mark.parametrize("table", DIMS)
def test_without_a_combiner_each_key_has_a_row(tables, table):
    opened = tables.session(bag(table, "none"))
    for keys in KEYS, KEYS[:0]:
        vectors, hit = opened.run(None, {"keys": keys})
        expected, found = rows(keys, DIMS[table])
        assert vectors.tobytes() == expected.tobytes() and vectors.shape == expected.shape
        assert np.array_equal(hit, found)


def test_bags_of_two_tables_join_a_model(tables):
    """Values follow one another in the same memory where ONNX Runtime takes them for equally large."""
    nodes = []
    for table in DIMS:
        nodes.append(node(table, "sum", outputs=[f"{table}_raw"]))
        nodes.append(helper.make_node("Neg", [f"{table}_raw"], [f"{table}_less"]))
        nodes.append(helper.make_node("Abs", [f"{table}_less"], [f"{table}_bag"]))
        nodes.append(node(table, "none", outputs=[f"{table}_rows"]))
        nodes.append(helper.make_node("ReduceSum", [f"{table}_rows", "axis"], [f"{table}_sum"], keepdims=0))
        nodes.append(helper.make_node("Add", [f"{table}_bag", f"{table}_sum"], [f"{table}_out"]))
    nodes.append(helper.make_node("Concat", [f"{table}_out" for table in DIMS], ["vectors"], axis=1))
    inputs = {"keys": (INT, ["K"]), "offsets": (INT, ["R+1"]), "axis": (INT, [1])}
    opened = tables.session(graph(nodes, inputs, {"vectors": (FLOAT, None)}))
    for offsets in [0, 4, 9], [0, 9], [0, 0, 0, 5, 9]:
        fed = {"keys": KEYS, "offsets": np.int64(offsets), "axis": np.int64([0])}
        parts = [abs(combined(KEYS, offsets, d, "sum")) + rows(KEYS, d)[0].sum(0) for d in DIMS.values()]
        assert np.allclose(opened.run(None, fed)[0], np.concatenate(parts, axis=1), rtol=1e-5)


# ---- shapes ------------------------------------------------------------------------------------------------------


def shapes(tables, *given, **described):
    return [output.shape for output in tables.session(bag(*given, **described)).get_outputs()]


def test_shapes_are_told_as_far_as_a_graph_knows_them(tables):
    width = "ai.pagoda.tables users"
    assert shapes(tables, "users", "sum") == [["R+1 - 1", width], ["K"]]
    assert shapes(tables, "users", "none") == [["K", width], ["K"]]
    assert shapes(tables, "users", "mean", keys=[9], offsets=[5]) == [[4, width], [9]]
    # What the graph says is not unsaid.
    assert shapes(tables, "users", "mean", vectors=["rows", 4], hit=["keys"]) == [["rows", 4], ["keys"]]
    # Nothing is known of inputs without a number of dimensions, or without a name for one.
    for nothing in None, [None]:
        unknown = bag("users", "sum", keys=nothing, offsets=nothing)
        vectors, hit = tables.session(unknown).run(None, {"keys": KEYS, "offsets": np.int64([0, 9])})
        assert (vectors.shape, hit.shape) == ((1, 4), (9,))


# ---- what is refused ---------------------------------------------------------------------------------------------

BAD = {
    "offsets that do not start at 0": ([1, 9], "offsets: first offset 1, expected 0"),
    "offsets that go down": ([0, 5, 3, 9], "offsets: row 1: offset goes down from 5 to 3"),
    "offsets beyond the keys": ([0, 10], "offsets: last offset 10, expected 9, the number of keys"),
    "offsets short of the keys": ([0, 8], "offsets: last offset 8, expected 9, the number of keys"),
    "no offsets": ([], "offsets: 0 offsets"),
}


def bound(opened, inputs, outputs):
    binding = opened.io_binding()
    kinds = {np.dtype(np.int64): INT, np.dtype(np.float32): FLOAT, np.dtype(bool): BOOL}
    for bind, arrays in (binding.bind_input, inputs), (binding.bind_output, outputs):
        for name, array in arrays.items():
            bind(name, "cpu", 0, kinds[array.dtype], array.shape, array.ctypes.data)
    opened.run_with_iobinding(binding)


@pytest.mark.parametrize("what", BAD)
def test_bad_offsets_are_refused_and_nothing_is_written(tables, what):
    opened = tables.session(bag("users", "sum"))
    offsets, words = BAD[what]
    fed = {"keys": KEYS, "offsets": np.int64(offsets)}
    with pytest.raises(InvalidArgument, match=words):
        opened.run(None, fed)
    outputs = {"vectors": np.full([max(len(offsets) - 1, 0), 4], 123, np.float32), "hit": np.ones(9, bool)}
    with pytest.raises(RuntimeError, match=words):
        bound(opened, fed, outputs)
    assert (outputs["vectors"] == 123).all() and outputs["hit"].all()


def test_memory_that_overlaps_is_refused(tables):
    opened = tables.session(bag("users", "none"))
    memory = np.zeros(100, np.int64)
    keys = memory[:9]
    keys[:] = KEYS
    over = {"vectors": memory[8:26].view(np.float32).reshape(9, 4), "hit": np.ones(9, bool)}
    with pytest.raises(RuntimeError, match="keys: its memory overlaps that of the output vectors"):
        bound(opened, {"keys": keys}, over)
    apart = memory[10:28].view(np.float32).reshape(9, 4)
    with pytest.raises(RuntimeError, match="vectors: its memory overlaps that of the output hit"):
        bound(opened, {"keys": keys}, {"vectors": apart, "hit": memory[27:29].view(bool)[:9]})
    assert np.array_equal(keys, KEYS) and not memory[9:].any()
    hit = memory[28:30].view(bool)[:9]
    bound(opened, {"keys": keys}, {"vectors": apart, "hit": hit})
    assert np.array_equal(apart, rows(KEYS, 4)[0]) and np.array_equal(hit, rows(KEYS, 4)[1])


# ---- finding the tables ------------------------------------------------------------------------------------------


def refused(model, tables, ops=OPS):
    with pytest.raises(Exception) as caught:
        session(model, tables, ops)
    return str(caught.value)


def test_a_session_that_names_no_tables_is_told_how(pagoda):
    told = refused(bag("users", "sum"), None)
    with pytest.raises(capi.Failure) as caught:
        pagoda.open(bag("users", "sum"))
    for message in told, caught.value.message:
        assert 'table "users"' in message and "ai.pagoda.tables" in message


def test_a_configuration_that_is_not_there_is_named(tables):
    message = refused(bag("users", "sum"), "/nowhere/tables.json")
    assert 'table "users": ai.pagoda.tables is "/nowhere/tables.json": path: /nowhere/tables.json: ' in message


def test_a_table_that_is_not_there_is_named(tables):
    message = refused(bag("others", "sum"), tables.path)
    assert 'table "others"' in message and 'no model has a table "others"' in message and str(tables.path) in message


def test_tables_are_opened_once_and_closed_with_the_last_session(tables):
    gc.collect()
    before = tables.live()
    both = graph(
        [node("users", "sum", outputs=["u"]), node("items", "sum", outputs=["i"])],
        {"keys": (INT, ["K"]), "offsets": (INT, ["R+1"])},
        {"u": (FLOAT, None), "i": (FLOAT, None)},
    )
    sessions = [tables.session(both) for _ in range(2)]
    assert tables.live() == before + 1
    sessions.pop()
    gc.collect()
    assert tables.live() == before + 1
    sessions.pop()
    gc.collect()
    assert tables.live() == before


def test_a_libpagoda_that_does_not_fit_is_told(tmp_path):
    alone = Path(shutil.copy(OPS, tmp_path))
    tables = tmp_path / "tables.json"
    tables.write_text("{}")
    model = bag("users", "sum")
    assert f"libpagoda.so, which is not in {tmp_path}" in refused(model, tables, alone)
    # A file that is no library, a library of something else, and a libpagoda of another time.
    (tmp_path / "libpagoda.so").write_text("nothing")
    assert f"{tmp_path}/libpagoda.so can not be loaded: " in refused(model, tables, alone)
    shutil.copy(OPS, tmp_path / "libpagoda.so.1")
    assert "libpagoda.so.1 has no function pagoda_abi_version" in refused(model, tables, alone)
    for number, (code, words) in enumerate(WRONG.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        library = ["cc", "-shared", "-fPIC", "-xc", "-", "-o", folder / "libpagoda.so"]
        subprocess.run(library, input=code.encode(), check=True)
        assert words in refused(model, tables, shutil.copy(OPS, folder))


# Libraries of another time: what is in them, and what is said of it.
WRONG = {
    "unsigned pagoda_abi_version(void) { return 2; }": "has version 2 of the C interface, expected 1",
    "unsigned pagoda_abi_version(void) { return 1; }": "has no function pagoda_embeddings_open",
}


# ---- the same in libpagoda ---------------------------------------------------------------------------------------


def pooled(pagoda, embedding, table, keys, offsets, combiner):
    """What pagoda_embeddings_pool, or without a combiner pagoda_embeddings_lookup, gives."""
    name = ctypes.create_string_buffer(f"m/{table}".encode())
    keys, offsets = np.ascontiguousarray(keys), np.int64(offsets)
    slots = len(keys) if combiner == "none" else len(offsets) - 1
    vectors, found = np.full([slots, DIMS[table]], np.nan, np.float32), np.full(len(keys), 7, np.uint8)
    out = None, vectors.ctypes.data, vectors.size, found.ctypes.data
    if combiner == "none":
        pagoda.call("pagoda_embeddings_lookup", embedding, address(name), keys.ctypes.data, len(keys), *out)
    else:
        number = capi.HEADER.constants[f"PAGODA_COMBINER_{combiner.upper()}"]
        given = keys.ctypes.data, len(keys), offsets.ctypes.data, len(offsets), number
        pagoda.call("pagoda_embeddings_pool", embedding, address(name), *given, *out)
    return vectors, found.astype(bool)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", "none"])
def test_a_graph_and_a_lookup_give_the_same_in_both_runtimes(pagoda, tables, combiner):
    before = pagoda.live()
    path = ctypes.create_string_buffer(str(tables.path).encode())
    embedding = pagoda.make("pagoda_embeddings_open", address(path))
    for table in DIMS:
        model = bag(table, combiner)
        options = capi.good_options()
        options.tables = embedding
        ours = pagoda.make("pagoda_model_open_memory", address(model), len(model), address(options))
        for keys, offsets in (KEYS, [0, 0, 3, 3, 4, 9, 9]), (MANY, CUTS), (KEYS[:0], [0]):
            fed = {"keys": keys, "offsets": np.int64(offsets)}
            if combiner == "none":
                del fed["offsets"]
            vectors, hit = pooled(pagoda, embedding, table, keys, offsets, combiner)
            assert np.array_equal(hit, rows(keys, 1)[1])
            theirs = tables.session(model).run(None, fed)
            assert vectors.tobytes() == theirs[0].tobytes() and np.array_equal(hit, theirs[1])
            made = pagoda.run(ours, fed, {"vectors": None, "hit": None})
            assert vectors.tobytes() == pagoda.read(made[0]).tobytes()
            assert np.array_equal(hit, pagoda.read(made[1]))
            for tensor in made:
                pagoda.free("pagoda_tensor", tensor)
        pagoda.free("pagoda_model", ours)
    pagoda.free("pagoda_embeddings", embedding)
    assert pagoda.live() == before


def test_a_model_keeps_its_tables(pagoda, tables):
    path = ctypes.create_string_buffer(str(tables.path).encode())
    embedding = pagoda.make("pagoda_embeddings_open", address(path))
    model, options = bag("users", "none"), capi.good_options()
    options.tables = embedding
    ours = pagoda.make("pagoda_model_open_memory", address(model), len(model), address(options))
    name = ctypes.create_string_buffer(b"m")
    pagoda.call("pagoda_embeddings_retire", embedding, address(name))
    pagoda.free("pagoda_embeddings", embedding)
    made = pagoda.run(ours, {"keys": KEYS}, {"vectors": None})
    assert np.array_equal(pagoda.read(made[0]), rows(KEYS, 4)[0])
    pagoda.free("pagoda_tensor", made[0])
    pagoda.free("pagoda_model", ours)
    with pytest.raises(capi.Failure, match="options.tables"):
        pagoda.make("pagoda_model_open_memory", address(model), len(model), address(options))
