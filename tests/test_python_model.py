"""Models, tensors, embedding tables, caches and stores from Python."""

import asyncio
import gc
import json
import weakref

import ml_dtypes
import numpy as np
import onnxruntime
import pagoda
import pytest
from capi import add_model, graph, write_table
from onnx import TensorProto, helper
from pagoda import ElementType

pytestmark = pytest.mark.usefixtures("nothing_left")

ONE = pagoda.ModelOptions(intra_op_threads=1, provider=pagoda.Provider.CPU)
X = np.arange(6, dtype=np.float32).reshape(3, 2)


@pytest.fixture
def add():
    with pagoda.Model(add_model(), ONE) as model:
        yield model


class Lender:
    """What torch is to us: something on the CPU that lends its memory by DLPack alone."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class OldLender(Lender):
    """The same, from before version 1 of DLPack."""

    def __dlpack__(self, *, stream=None):
        return self.array.__dlpack__()


# ---- tensors -----------------------------------------------------------------------------------------------------


def test_a_tensor_is_the_memory_of_its_array():
    array = X.copy()
    with pagoda.Tensor(array) as tensor:
        assert (tensor.type, tensor.type.short_name, tensor.shape) == (ElementType.F32, "f32", (3, 2))
        view = tensor.numpy()
        assert view.ctypes.data == array.ctypes.data
        array[1, 1] = 77
        assert view[1, 1] == 77
    # An array over a tensor that was closed keeps the memory.
    assert view[1, 1] == 77 and tensor.closed
    with pytest.raises(pagoda.InvalidHandleError, match="tensor: this Tensor was closed") as failure:
        tensor.numpy()
    assert failure.value.argument == "tensor"


def test_dlpack_goes_both_ways_without_a_copy():
    array = X.copy()
    with pagoda.Tensor(Lender(array)) as tensor:
        assert tensor.numpy().ctypes.data == array.ctypes.data
        assert np.from_dlpack(tensor).ctypes.data == array.ctypes.data
        assert np.asarray(tensor).ctypes.data == array.ctypes.data
        assert np.asarray(tensor, np.float64).tolist() == array.tolist()


def test_lent_memory_is_given_back():
    array = X.copy()
    alive = weakref.ref(array)
    tensor = pagoda.Tensor(array)
    view = tensor.numpy()
    del array
    tensor.close()
    gc.collect()
    assert alive() is not None, "the view still uses it"
    del view
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("kind", ["float16", "int64", "bool", "uint8", "complex64", "float64"])
def test_types_of_numpy(kind):
    array = np.array([0, 1, 1], kind)
    with pagoda.Tensor(array) as tensor:
        assert tensor.numpy().dtype == array.dtype and tensor.numpy().tolist() == array.tolist()


def test_types_that_numpy_does_not_have():
    array = np.array([1.5, -2], ml_dtypes.bfloat16)
    with pagoda.Tensor(array) as tensor, pagoda.Tensor(array.view(np.int16), ElementType.BF16) as same:
        assert tensor.type == same.type == ElementType.BF16
        assert same.numpy().tolist() == [1.5, -2] and same.numpy(np.uint16).tolist() == array.view(np.uint16).tolist()
    with pagoda.Tensor.zeros(ElementType.I4, [3]) as packed:
        assert (packed.shape, packed.numpy().tolist()) == ((3,), [0, 0])


def test_strings_scalars_and_nothing():
    with pagoda.Tensor.strings(["a", "", "塔\0"], [3, 1]) as tensor:
        assert tensor.numpy().tolist() == [["a"], [""], ["塔\0"]]
    with pagoda.Tensor(np.array(3, np.float32)) as scalar:
        assert (scalar.shape, float(scalar.numpy())) == ((), 3)
    with pagoda.Tensor.zeros(ElementType.F32, [0, 4]) as empty:
        assert empty.numpy().shape == (0, 4)


def test_arrays_that_can_not_be_lent():
    with pytest.raises(pagoda.InvalidArgumentError, match="ascontiguousarray"):
        pagoda.Tensor(np.zeros((4, 4), np.float32)[:, ::2])
    with pytest.raises(pagoda.UnsupportedError, match="datetime64"):
        pagoda.Tensor(np.zeros(2, "datetime64[s]"))
    with pytest.raises(pagoda.UnsupportedError, match=">f4"):
        pagoda.Tensor(np.zeros(2, ">f4"))
    with pytest.raises(TypeError, match="list"):
        pagoda.Tensor([1, 2])
    with pytest.raises(pagoda.InvalidArgumentError) as failure:
        pagoda.Tensor.zeros(ElementType.F32, [-1])
    assert failure.value.argument == "dims[0]"


# ---- models ------------------------------------------------------------------------------------------------------


def test_what_a_model_says_of_itself(add, tmp_path):
    (tmp_path / "add.onnx").write_bytes(add_model())
    with pagoda.Model(tmp_path / "add.onnx", ONE) as model:
        assert model.inputs == add.inputs and model.outputs == add.outputs
    assert add.inputs[0] == pagoda.ValueInfo("x", ElementType.F32, (-1, 2), ("N", ""))
    assert [value.name for value in add.inputs + add.outputs] == ["x", "y", "z"]
    assert add.provider == (pagoda.Provider.CPU, "")


def test_a_run_copies_nothing(add):
    x, y, z = X.copy(), pagoda.Tensor(X * 10), np.zeros_like(X)
    assert add.run({"x": x, "y": y})["z"].numpy().tolist() == (X * 11).tolist()
    found = add.run({"x": Lender(x), "y": y}, {"z": z})
    assert z.tolist() == (X * 11).tolist() and found["z"].numpy().ctypes.data == z.ctypes.data
    assert add.run({"x": x, "y": y}, ["z"])["z"].shape == (3, 2)
    y.close()


def test_memory_that_is_read_only_is_not_written(add):
    fixed = X.copy()
    fixed.flags.writeable = False
    assert add.run({"x": fixed, "y": fixed})["z"].numpy().tolist() == (X * 2).tolist()
    for output in fixed, Lender(fixed), pagoda.Tensor(fixed):
        with pytest.raises(pagoda.InvalidArgumentError, match="read-only"):
            add.run({"x": fixed, "y": fixed}, {"z": output})
    with pagoda.Tensor(fixed) as tensor:
        assert not tensor.writable and not tensor.numpy().flags.writeable
    old = np.zeros_like(X)
    add.run({"x": fixed, "y": fixed}, {"z": OldLender(old)})["z"].close()
    assert old.tolist() == (X * 2).tolist()


def test_nothing_at_all(add):
    empty = np.zeros((0, 2), np.float32)
    assert add.run({"x": empty, "y": empty})["z"].shape == (0, 2)


def test_runs_for_asyncio(add):
    async def many():
        runs = [add.run_async({"x": X + number, "y": X}) for number in range(20)]
        return [found["z"].numpy()[0, 0] for found in await asyncio.gather(*runs)]

    assert asyncio.run(many()) == list(range(20))

    async def wrong():
        with pytest.raises(pagoda.NotFoundError, match="nope"):
            await add.run_async({"nope": X, "y": X})

    asyncio.run(wrong())


def test_a_run_that_was_cancelled(add):
    with pagoda.Cancel() as cancel:
        assert add.run({"x": X, "y": X}, cancel=cancel)["z"].shape == (3, 2)
        cancel.trigger()
        with pytest.raises(pagoda.CancelledError):
            add.run({"x": X, "y": X}, cancel=cancel)
        with pytest.raises(pagoda.CancelledError):
            asyncio.run(add.run_async({"x": X, "y": X}, cancel=cancel))


def test_texts_as_inputs():
    value = (TensorProto.STRING, ["N"])
    model = graph([helper.make_node("Identity", ["a"], ["b"])], {"a": value}, {"b": value})
    with pagoda.Model(model, ONE) as same:
        assert same.run({"a": np.array(["x", "塔"])})["b"].numpy().tolist() == ["x", "塔"]


def test_the_operators_in_pythons_own_runtime():
    """`Glu` of ai.pagoda, in onnxruntime and here."""
    node = helper.make_node("Glu", ["x"], ["y"], domain="ai.pagoda", activation="silu")
    model = graph([node], {"x": (TensorProto.FLOAT, ["N", 8])}, {"y": (TensorProto.FLOAT, ["N", 4])})
    x = np.random.default_rng(1).standard_normal((3, 8)).astype(np.float32)
    options = onnxruntime.SessionOptions()
    pagoda.ops.register(options)
    (theirs,) = onnxruntime.InferenceSession(model, options).run(None, {"x": x})
    with pagoda.Model(model, ONE) as ours:
        assert np.array_equal(ours.run({"x": x})["y"].numpy(), theirs)
    assert np.allclose(theirs, x[:, :4] / (1 + np.exp(-x[:, :4])) * x[:, 4:], atol=1e-6)


# ---- embedding tables --------------------------------------------------------------------------------------------


def test_embedding_tables(tmp_path):
    path = write_table(tmp_path)
    memory, disk = pagoda.Embeddings.estimate(path)
    assert memory > 0 and disk >= 0
    with pagoda.Embeddings(path) as tables:
        assert tables.dim("m/t") == 3
        rows, found = tables.lookup("t", [1, 99, 1], pagoda.LookupOptions(miss=pagoda.Miss.WAIT))
        assert rows.tolist() == [[3, 4, 5], [-1, -2, -3], [3, 4, 5]] and found.tolist() == [True, False, True]
        pooled = tables.pool("t", np.array([0, 1, 2]), [0, 2, 2, 3], pagoda.Combiner.SUM)
        assert pooled.rows.tolist() == [[3, 5, 7], [0, 0, 0], [6, 7, 8]]
        tables.upsert("t", 1, [99], [[7, 8, 9]])
        assert tables.lookup("t", [99]).rows.tolist() == [[7, 8, 9]]
        tables.delete("t", 2, [99])
        assert not tables.lookup("t", [99]).found.any()
        assert tables.prefetch("t", [0, 3]) >= 0
        tables.refresh("t")
        tables.wait()
        assert tables.stats("t").lookups >= 3
        more = json.loads(path.read_text())["models"][0] | {"model": "other"}
        tables.add(more, tmp_path)
        assert tables.dim("other/t") == 3
        tables.retire("other")
        with pytest.raises(pagoda.NotFoundError, match="other"):
            tables.dim("other/t")
        with pytest.raises(pagoda.InvalidArgumentError) as failure:
            tables.upsert("t", 1, [1, 2], [[1, 2, 3]])
        assert failure.value.argument == "number_count"


# ---- caches and stores -------------------------------------------------------------------------------------------

SHAPE = {"layers": 2, "heads": 2, "head_size": 4, "page_size": 8, "size": 64, "size_unit": pagoda.KvSizeUnit.PAGES}


def test_a_cache_and_its_leases():
    with pagoda.KvCache(pagoda.KvOptions(**SHAPE)) as cache:
        pool = cache.pool(0)
        assert pool.shape == (64, 2, 8, 2, 4)
        pool.close()
        requests = [pagoda.KvRequest(owner=7, tokens=20, candidates=2), pagoda.KvRequest(owner=8, tokens=3)]
        with cache.prepare(requests) as lease:
            assert lease.tensor(pagoda.KvTensor.ROW_OFFSETS).numpy().tolist() == [0, 22, 25]
            assert lease.owner(0) == pagoda.LeasedOwner(owner=7, start=0, cached=0, tokens=20, trimmed=0)
            assert lease.ready(1)
            lease.wait()
            lease.commit()
        assert cache.lookup([7, 9]) == [(0, 20, pagoda.Tier.RESIDENT), (0, 0, pagoda.Tier.NONE)]
        with cache.prepare([pagoda.KvRequest(owner=7, tokens=1, start=20)]) as lease:
            assert lease.owner(0).cached == 20
            with pytest.raises(pagoda.BusyError):
                cache.prepare([pagoda.KvRequest(owner=7, tokens=1, start=20)])
            lease.abort()
            with pytest.raises(pagoda.InvalidArgumentError, match="ended"):
                lease.commit()
        assert cache.fork(7, 70, 20) == 16 and cache.stats().shared_pages == 2
        assert cache.evict([7], pagoda.Tiers.ALL) == 1 and cache.stats().resident_owners == 2
        with pytest.raises(pagoda.InvalidArgumentError, match="gap|missing|start"):
            cache.prepare([pagoda.KvRequest(owner=7, tokens=1, start=20)])


def test_histories_come_back_from_a_store(tmp_path):
    with pagoda.Store(tmp_path / "store", pagoda.StoreOptions(durability=pagoda.Durability.PROCESS)) as store:
        with pytest.raises(pagoda.BusyError):
            pagoda.Store(tmp_path / "store")
        for cached in 0, 12:
            with pagoda.KvCache(pagoda.KvOptions(**SHAPE, store=store, model_version="1")) as cache:
                assert cache.prefetch([5]) == (1 if cached else 0)
                with cache.prepare([pagoda.KvRequest(owner=5, tokens=12 - cached, start=cached)]) as lease:
                    assert lease.owner(0).cached == cached
                    lease.commit(wait=True)
                assert cache.offload() == (0 if cached else 1) and cache.offload([]) == 0
                cache.flush()
        store.flush()
        store.compact()
        assert store.stats().owners == 1
