"""The KV cache and its store, through pagoda.h and with a real model: cached histories give the scores of recomputed
ones, and histories from the store, also after a restart, give the same bits."""

import ctypes
import os
import re
import subprocess
import sys
import threading

import capi
import numpy as np
import pytest
from capi import HEADER, ROOT, address, struct, structs, until

sys.path.insert(0, str(ROOT / "samples"))
import make_model  # noqa: E402

C = HEADER.constants
INVALID_ARGUMENT, BUSY, UNSUPPORTED = (C[f"PAGODA_STATUS_{name}"] for name in ("INVALID_ARGUMENT", "BUSY", "UNSUPPORTED"))
PAGES, BYTES = C["PAGODA_KV_SIZE_UNIT_PAGES"], C["PAGODA_KV_SIZE_UNIT_BYTES"]
RESIDENT, STORE, ALL = C["PAGODA_TIERS_RESIDENT"], C["PAGODA_TIERS_STORE"], C["PAGODA_TIERS_ALL"]
INDEX = ["row_offsets", "num_candidates", "cached_len", "page_indptr", "page_ids"]
LAYERS, HEADS, HEAD_SIZE = make_model.LAYERS, make_model.HEADS, make_model.HEAD_SIZE
POOLS = [f"kv_pool_{layer}" for layer in range(LAYERS)]


# ---- what a caller writes ----------------------------------------------------------------------------------------


class Cache:
    """A cache, and the model that it is for."""

    def __init__(self, pagoda, store=None, **options):
        self.pagoda = pagoda
        shape = {"layers": LAYERS, "heads": HEADS, "head_size": HEAD_SIZE, "page_size": 8, "type": 1, "device_id": -1}
        shape |= {"size_unit": PAGES, "size": 64}
        self.options = struct("pagoda_kv_options", store=store, **shape | options)
        self.handle = pagoda.make("pagoda_kv_cache_open", address(self.options))
        self.pools = [pagoda.make("pagoda_kv_cache_pool", self.handle, layer) for layer in range(LAYERS)]

    def prepare(self, *requests):
        """A lease. Each request: owner, start, tokens, candidates, and perhaps items."""
        batch, kept = [], []
        for owner, start, tokens, candidates, *items in requests:
            kept += [(ctypes.c_uint64 * len(numbers))(*numbers) for numbers in items]
            given = {"items": address(kept[-1]), "item_count": len(kept[-1])} if items else {}
            batch.append({"owner": owner, "start": start, "tokens": tokens, "candidates": candidates, **given})
        array = structs("pagoda_kv_request", batch)
        return self.pagoda.make("pagoda_kv_cache_prepare", self.handle, address(array), len(batch))

    def add(self, *requests, wait=0):
        """Prepares and commits; the model might have run in between."""
        lease = self.prepare(*requests)
        self.pagoda.call("pagoda_kv_lease_commit", lease, wait)
        self.pagoda.free("pagoda_kv_lease", lease)

    def rank(self, model, *visits, commit=True):
        """Runs the model for several owners. Each visit: owner, start, new items, candidates. Gives the scores of each
        owner's candidates."""
        lease = self.prepare(*((owner, start, len(new), len(candidates)) for owner, start, new, candidates in visits))
        made = {name: self.tensor(lease, name) for name in INDEX}
        pools = dict(zip(POOLS, self.pools))
        rows = np.concatenate([np.concatenate([new, candidates]) for _, _, new, candidates in visits]).astype(np.int64)
        scores = np.zeros(len(rows), np.float32)
        outputs = {"scores": scores} | {f"{name}_out": pool for name, pool in pools.items()}
        self.pagoda.run(model, {"item_ids": rows} | made | pools, outputs)
        if commit:
            self.pagoda.call("pagoda_kv_lease_commit", lease, 0)
        for tensor in made.values():
            self.pagoda.free("pagoda_tensor", tensor)
        self.pagoda.free("pagoda_kv_lease", lease)
        ends = np.cumsum([len(new) + len(candidates) for _, _, new, candidates in visits])
        return [scores[end - len(visit[3]) : end] for end, visit in zip(ends, visits)]

    def tensor(self, lease, name):
        return self.pagoda.make("pagoda_kv_lease_tensor", lease, C[f"PAGODA_KV_TENSOR_{name.upper()}"])

    def lookup(self, *owners):
        """Start, length and tier of each owner."""
        count = len(owners)
        starts, lengths, tiers = (ctypes.c_int64 * count)(), (ctypes.c_int64 * count)(), (ctypes.c_int32 * count)()
        numbers = (ctypes.c_uint64 * count)(*owners)
        into = address(starts), address(lengths), address(tiers)
        self.pagoda.call("pagoda_kv_cache_lookup", self.handle, address(numbers), count, *into)
        return list(zip(starts, lengths, tiers))

    def fork(self, source, to, tokens):
        """How many tokens are shared."""
        shared = ctypes.c_int32(-1)
        self.pagoda.call("pagoda_kv_cache_fork", self.handle, source, to, tokens, ctypes.addressof(shared))
        return shared.value

    def count(self, what, owners, *more):
        """Calls evict, offload or prefetch. `owners` None: all owners."""
        numbers = None if owners is None else (ctypes.c_uint64 * max(len(owners), 1))(*owners)
        list_of = (None, 0) if owners is None else (address(numbers), len(owners))
        done = ctypes.c_size_t()
        self.pagoda.call(f"pagoda_kv_cache_{what}", self.handle, *list_of, *more, ctypes.addressof(done))
        return done.value

    def stats(self):
        stats = struct("pagoda_kv_stats")
        self.pagoda.call("pagoda_kv_cache_get_stats", self.handle, address(stats))
        return stats

    def owner(self, lease, index):
        owner = struct("pagoda_kv_leased_owner")
        self.pagoda.call("pagoda_kv_lease_owner", lease, index, address(owner))
        return owner.owner, owner.start, owner.cached, owner.tokens, owner.trimmed

    def close(self):
        for pool in self.pools:
            self.pagoda.free("pagoda_tensor", pool)
        self.pagoda.free("pagoda_kv_cache", self.handle)


def open_store(pagoda, folder, **options):
    path, options = ctypes.create_string_buffer(str(folder).encode()), struct("pagoda_store_options", **options)
    return pagoda.make("pagoda_store_open", address(path), address(options))


def recomputed(pagoda, model, visits):
    """The scores of each user's candidates without a cache: the whole history in one step, pages by hand."""
    pages = [-(-len(history) // 8) for history, _ in visits]
    pools = [np.zeros([sum(pages), 2, 8, HEADS, HEAD_SIZE], np.float32) for _ in POOLS]
    scores = []
    for history, candidates in visits:
        rows, count = np.concatenate([history, candidates]).astype(np.int64), -(-len(history) // 8)
        index = [[0, len(rows)], [len(candidates)], [0], [0, count], range(count)]
        inputs = {"item_ids": rows} | {name: np.array(values, np.int32) for name, values in zip(INDEX, index)}
        inputs |= dict(zip(POOLS, pools))
        out = np.zeros(len(rows), np.float32)
        outputs = {"scores": out} | {f"{name}_out": pool for name, pool in zip(POOLS, pools)}
        pagoda.run(model, inputs, outputs)
        scores.append(out[len(history) :])
    return scores


def failing(function, *arguments):
    with pytest.raises(capi.Failure) as failure:
        function(*arguments)
    return failure.value


@pytest.fixture(scope="module")
def model_bytes(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.onnx"
    make_model.ranking_model(path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def model(pagoda, model_bytes):
    handle = pagoda.open(model_bytes)
    yield handle
    pagoda.free("pagoda_model", handle)


@pytest.fixture
def cache(pagoda):
    """One without a store."""
    cache = Cache(pagoda)
    yield cache
    cache.close()


# ---- remembering -------------------------------------------------------------------------------------------------

HISTORIES = {11: np.arange(75) * 7 % 1000, 2**63 + 5: np.arange(40) * 13 % 1000, 3: np.arange(9) * 17 % 1000}
CANDIDATES = np.arange(6) * 101 % 1000
LATER = np.array([5, 4, 3])


def asked(new=()):
    """A visit of every user whose history is cached, with these new items."""
    return [(user, len(history), np.array(new, np.int64), CANDIDATES) for user, history in HISTORIES.items()]


def continued(folder, model):
    """In another process: what a cache over the store there has, its scores, and those after more items."""
    pagoda, before = capi.pagoda, capi.pagoda.live()
    store, model = open_store(pagoda, folder), pagoda.open(model)
    cache = Cache(pagoda, store, model_version=None)
    found = cache.lookup(*HISTORIES)
    again = cache.rank(model, *asked(), commit=False)
    more = cache.rank(model, *asked(new=LATER))
    stranger = Cache(pagoda, store, model_version=address(VERSION))
    unknown = stranger.lookup(*HISTORIES)
    stranger.close(), cache.close()
    pagoda.free("pagoda_store", store), pagoda.free("pagoda_model", model)
    return found, again, more, unknown, pagoda.live() - before


VERSION = ctypes.create_string_buffer(b"another version")


def equal(some, others):
    return all(np.array_equal(one, other) for one, other in zip(some, others, strict=True))


def test_what_is_remembered_is_what_is_computed(pagoda, model, model_bytes, tmp_path, process):
    store = open_store(pagoda, tmp_path / "a store")
    cache = Cache(pagoda, store, size=20)
    expected = recomputed(pagoda, model, [(history, CANDIDATES) for history in HISTORIES.values()])

    # Two steps, the second with the candidates, for three users at once.
    cache.rank(model, *((user, 0, history[: len(history) // 2], []) for user, history in HISTORIES.items()))
    rest = [(user, len(h) // 2, h[len(h) // 2 :], CANDIDATES) for user, h in HISTORIES.items()]
    for scores, right in zip(cache.rank(model, *rest), expected):
        np.testing.assert_allclose(scores, right, rtol=1e-5, atol=1e-5)
    assert [found[:2] for found in cache.lookup(*HISTORIES)] == [(0, len(h)) for h in HISTORIES.values()]
    first = cache.rank(model, *asked(), commit=False)
    for scores, right in zip(first, expected):
        np.testing.assert_allclose(scores, right, rtol=1e-5, atol=1e-5)
    more = cache.rank(model, *asked(new=LATER), commit=False)
    assert not equal(more, first), "new items make a difference"

    # Out to the store and back.
    assert cache.count("evict", None, RESIDENT) == 3
    assert {tier for _, _, tier in cache.lookup(*HISTORIES)} == {C["PAGODA_TIER_STORE"]}
    assert cache.stats().free_pages == 20
    assert equal(cache.rank(model, *asked(), commit=False), first)
    assert cache.stats().tokens_from_store == sum(map(len, HISTORIES.values()))
    assert {tier for _, _, tier in cache.lookup(*HISTORIES)} == {C["PAGODA_TIER_RESIDENT"]}

    # While it is open here, it can not be opened again, in this process or in another.
    failure = failing(open_store, pagoda, tmp_path / "a store")
    assert (failure.status, failure.argument) == (BUSY, "path")
    assert f"is in use by process {os.getpid()}" in failure.message
    assert process.run(status_of_opening, str(tmp_path / "a store")) == BUSY

    # Free everything, and continue: in this process, then in another.
    cache.close()
    pagoda.free("pagoda_store", store)
    store = open_store(pagoda, tmp_path / "a store")
    cache = Cache(pagoda, store, size=20)
    assert equal(cache.rank(model, *asked(), commit=False), first)
    assert equal(cache.rank(model, *asked(new=LATER), commit=False), more)
    cache.close()
    pagoda.free("pagoda_store", store)

    found, again, then, unknown, left = process.run(continued, str(tmp_path / "a store"), model_bytes)
    assert found == [(0, len(history), C["PAGODA_TIER_STORE"]) for history in HISTORIES.values()]
    assert equal(again, first) and equal(then, more)
    assert unknown == [(0, 0, C["PAGODA_TIER_NONE"])] * 3, "another version of the model must not see them"
    assert left == 0


def status_of_opening(folder):
    try:
        capi.pagoda.free("pagoda_store", open_store(capi.pagoda, folder))
    except capi.Failure as failure:
        return failure.status


def test_a_program_that_ends_without_freeing_anything_loses_only_what_it_did_not_commit(pagoda, tmp_path):
    script = f"""
import sys
sys.path[:0] = [{str(ROOT / "tests")!r}]
import os, capi, test_kv
pagoda = capi.Pagoda()
store = test_kv.open_store(pagoda, {str(tmp_path / "s")!r})
cache = test_kv.Cache(pagoda, store, offload=test_kv.C["PAGODA_OFFLOAD_AT_COMMIT"])
cache.add((1, 0, 20, 0), (2, 0, 7, 0), wait=1)
lease = cache.prepare((1, 20, 5, 0), (3, 0, 5, 0))
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    store = open_store(pagoda, tmp_path / "s")
    cache = Cache(pagoda, store)
    assert [found[:2] for found in cache.lookup(1, 2, 3)] == [(0, 20), (0, 7), (0, 0)]
    cache.close()
    pagoda.free("pagoda_store", store)


# ---- requests ----------------------------------------------------------------------------------------------------


def test_gaps_and_overlaps_are_told_in_words(cache):
    cache.add((1, 0, 10, 0))
    failure = failing(cache.prepare, (2, 0, 1, 0), (1, 20, 5, 0))
    missing = "The input sequence has missing tokens from 10 to 19 (both inclusive)."
    assert (failure.status, failure.argument) == (INVALID_ARGUMENT, "requests[1].start")
    assert failure.message == f"requests[1].start: {missing}"
    failure = failing(cache.prepare, (1, 5, 15, 0))
    overlapping = "The input sequence has overlapping tokens from 5 to 9 (both inclusive)."
    assert failure.message == f"requests[0].start: {overlapping}"
    assert cache.lookup(1, 2) == [(0, 10, C["PAGODA_TIER_RESIDENT"]), (0, 0, C["PAGODA_TIER_NONE"])]


def test_overlaps_can_be_trimmed(pagoda):
    cache = Cache(pagoda, overlap=C["PAGODA_OVERLAP_TRIM"])
    cache.add((7, 0, 10, 0))
    lease = cache.prepare((7, 5, 15, 2), (8, 0, 1, 0))
    assert cache.owner(lease, 0) == (7, 0, 10, 10, 5)
    assert cache.owner(lease, 1) == (8, 0, 0, 1, 0)
    pagoda.free("pagoda_kv_lease", lease)
    cache.close()


def test_a_window_slides(pagoda):
    cache = Cache(pagoda, max_history=16)
    for start in range(0, 40, 8):
        cache.add((1, start, 8, 0))
    assert cache.lookup(1) == [(24, 16, C["PAGODA_TIER_RESIDENT"])]
    cache.close()


def test_edited_histories_are_noticed(pagoda):
    items = np.arange(20)
    edited = np.where(items == 12, 99, items)
    refusing = Cache(pagoda, edited=C["PAGODA_EDITED_REFUSE"])
    refusing.add((1, 0, 16, 0, items[:16]))
    failure = failing(refusing.prepare, (1, 16, 4, 0, edited))
    assert (failure.status, failure.argument) == (INVALID_ARGUMENT, "requests[0].items")
    assert failing(refusing.prepare, (1, 16, 4, 0)).argument == "requests[0].items"
    refusing.add((1, 16, 4, 0, items))
    refusing.close()

    dropping = Cache(pagoda, edited=C["PAGODA_EDITED_INVALIDATE"])
    dropping.add((1, 0, 16, 0, items[:16]))
    failure = failing(dropping.prepare, (1, 16, 4, 0, edited))
    assert "missing tokens from 8 to 15" in failure.message
    dropping.add((1, 8, 12, 0, edited))
    assert dropping.lookup(1) == [(0, 20, C["PAGODA_TIER_RESIDENT"])]
    dropping.close()


def test_index_tensors_and_pools(pagoda, cache):
    cache.add((1, 0, 10, 0))
    lease = cache.prepare((1, 10, 7, 3), (2, 0, 0, 4), (3, 0, 9, 0))
    tensors = {name: cache.tensor(lease, name) for name in INDEX}
    # They stay good when the lease is gone.
    pagoda.free("pagoda_kv_lease", lease)
    values = {name: pagoda.read(tensor).tolist() for name, tensor in tensors.items()}
    pages = values.pop("page_ids")
    assert len(set(pages)) == 5 and set(pages) <= set(range(64))
    right = {"row_offsets": [0, 10, 14, 23], "num_candidates": [3, 4, 0], "cached_len": [10, 0, 0]}
    assert values == right | {"page_indptr": [0, 3, 3, 5]}
    assert pagoda.read(cache.pools[1]).shape == (64, 2, 8, HEADS, HEAD_SIZE)
    for tensor in tensors.values():
        pagoda.free("pagoda_tensor", tensor)


def test_requests_of_a_later_header_are_stepped_over(pagoda, cache):
    kind = HEADER.structs["pagoda_kv_request"]
    size = ctypes.sizeof(kind)
    memory = (ctypes.c_uint8 * (2 * (size + 24)))()
    for index in range(2):
        request = kind.from_buffer(memory, index * (size + 24))
        request.struct_size, request.owner, request.tokens = size + 24, 5 + index, 1 + index
    lease = pagoda.make("pagoda_kv_cache_prepare", cache.handle, address(memory), 2)
    assert [cache.owner(lease, index) for index in range(2)] == [(5, 0, 0, 1, 0), (6, 0, 0, 2, 0)]
    pagoda.free("pagoda_kv_lease", lease)


def test_a_pool_is_in_host_memory_by_default(pagoda):
    init = re.search(r"#define PAGODA_KV_OPTIONS_INIT \{ (.*) \}", (ROOT / "include/pagoda.h").read_text())[1].split(", ")
    names = [name for name, _ in HEADER.structs["pagoda_kv_options"]._fields_]
    options = capi.kv_options(device_id=int(init[names.index("device_id")]))
    cache = pagoda.make("pagoda_kv_cache_open", address(options))
    pool = pagoda.make("pagoda_kv_cache_pool", cache, 0)
    assert pagoda.read(pool).shape == (64, 2, 8, 2, 4)
    pagoda.free("pagoda_tensor", pool)
    pagoda.free("pagoda_kv_cache", cache)


def test_an_empty_batch_is_fine(pagoda, cache):
    lease = pagoda.make("pagoda_kv_cache_prepare", cache.handle, None, 0)
    pagoda.call("pagoda_kv_lease_commit", lease, 1)
    pagoda.free("pagoda_kv_lease", lease)
    assert cache.lookup() == []


# ---- leases ------------------------------------------------------------------------------------------------------


def test_a_lease_ends_once(pagoda, cache):
    for end in ["commit", 0], ["abort"]:
        lease = cache.prepare((1, cache.lookup(1)[0][1], 4, 0))
        pagoda.call(f"pagoda_kv_lease_{end[0]}", lease, *end[1:])
        ready, tensor = ctypes.c_int32(), ctypes.c_void_p()
        into = {"ready": (0, ctypes.addressof(ready)), "tensor": (0, ctypes.addressof(tensor)), "wait": (-1,)}
        for what, arguments in (into | {"commit": (0,), "abort": ()}).items():
            failure = failing(pagoda.call, f"pagoda_kv_lease_{what}", lease, *arguments)
            assert (failure.status, failure.argument) == (INVALID_ARGUMENT, "lease")
            assert "has ended already" in failure.message
        pagoda.free("pagoda_kv_lease", lease)
    assert cache.lookup(1)[0][:2] == (0, 4)


def test_a_lease_that_is_freed_is_aborted(pagoda, cache):
    pagoda.free("pagoda_kv_lease", cache.prepare((1, 0, 4, 0)))
    assert cache.lookup(1)[0][1] == 0
    assert cache.stats().free_pages == 64


def test_one_lease_at_a_time_adds_to_a_history(pagoda, cache):
    lease = cache.prepare((1, 0, 4, 0))
    failure = failing(cache.prepare, (1, 0, 4, 0))
    assert failure.status == BUSY and "owner 1 is being added to" in failure.message
    assert failing(cache.count, "evict", [1], RESIDENT).status == BUSY
    pagoda.call("pagoda_kv_lease_commit", lease, 0)
    pagoda.free("pagoda_kv_lease", lease)
    assert cache.count("evict", [1], RESIDENT) == 1


def test_a_lease_outlives_its_cache_and_a_cache_its_store(pagoda, model, tmp_path):
    store = open_store(pagoda, tmp_path)
    cache = Cache(pagoda, store, offload=C["PAGODA_OFFLOAD_AT_COMMIT"])
    pagoda.free("pagoda_store", store)
    lease = cache.prepare((1, 0, 4, 0))
    assert cache.count("offload", None) == 0
    cache.close()
    pagoda.call("pagoda_kv_lease_wait", lease, -1)
    pagoda.call("pagoda_kv_lease_commit", lease, 1)
    pagoda.free("pagoda_kv_lease", lease)
    # The last reference has closed it.
    store = open_store(pagoda, tmp_path)
    cache = Cache(pagoda, store)
    assert cache.lookup(1) == [(0, 4, C["PAGODA_TIER_STORE"])]
    cache.close()
    pagoda.free("pagoda_store", store)


def test_of_many_threads_that_end_a_lease_one_does(pagoda, tmp_path):
    store = open_store(pagoda, tmp_path, durability=C["PAGODA_DURABILITY_NONE"])
    cache = Cache(pagoda, store, onload_in_background=1, size=16)
    length = 0
    for turn in range(30):
        cache.count("evict", None, RESIDENT)
        lease = cache.prepare((1, length, 3, 0))
        start, told = threading.Barrier(6), []

        def end(what, *arguments):
            start.wait()
            try:
                pagoda.call(f"pagoda_kv_lease_{what}", lease, *arguments)
                told.append(what)
            except capi.Failure as failure:
                assert (failure.status, failure.argument) == (INVALID_ARGUMENT, "lease")

        calls = [("commit", 0), ("commit", 1), ("abort",), ("wait", -1), ("wait", 0), ("wait", 1)]
        threads = [threading.Thread(target=end, args=call) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pagoda.free("pagoda_kv_lease", lease)
        ended = [what for what in told if what != "wait"]
        assert len(ended) == 1
        length += 3 if ended == ["commit"] else 0
        assert cache.lookup(1)[0][1] == length
    cache.close()
    pagoda.free("pagoda_store", store)


# ---- tiers -------------------------------------------------------------------------------------------------------


def test_owners_leave_tiers_and_come_back(pagoda, tmp_path):
    store = open_store(pagoda, tmp_path, durability=C["PAGODA_DURABILITY_PROCESS"])
    cache = Cache(pagoda, store, offload=C["PAGODA_OFFLOAD_BY_HAND"], onload_in_background=1, onload_threads=1)
    cache.add(*((user, 0, 10, 0) for user in range(4)))
    tier = lambda: [tier for _, _, tier in cache.lookup(0, 1, 2, 3)]  # noqa: E731
    assert cache.count("offload", []) == 0, "a list that is empty and not NULL means no owner"
    assert cache.count("offload", [0, 1]) == 2
    assert cache.count("offload", None) == 2
    assert cache.count("offload", None) == 0
    pagoda.call("pagoda_kv_cache_flush", cache.handle)
    assert cache.count("evict", [], ALL) == 0
    assert cache.count("evict", [0, 1], RESIDENT) == 2
    assert cache.count("evict", [1, 2], STORE) == 2
    assert tier() == [2, 0, 1, 1]
    assert cache.count("prefetch", [0, 1, 2]) == 1
    lease, ready = cache.prepare((0, 10, 0, 1)), ctypes.c_int32()
    for layer in range(LAYERS):
        pagoda.call("pagoda_kv_lease_wait", lease, layer)
        pagoda.call("pagoda_kv_lease_ready", lease, layer, ctypes.addressof(ready))
        assert ready.value == 1
    pagoda.free("pagoda_kv_lease", lease)
    # It counts as on its way until the thread that has read it says otherwise.
    until(lambda: tier() == [1, 0, 1, 1], "who was prefetched is resident")
    assert cache.count("evict", None, ALL) == 3
    assert tier() == [0] * 4

    info = struct("pagoda_store_stats")
    pagoda.call("pagoda_store_flush", store)
    pagoda.call("pagoda_store_get_stats", store, address(info))
    assert (info.owners, info.live_bytes, info.write_errors) == (0, 0, 0) and info.writes >= 8
    held = info.file_bytes
    pagoda.call("pagoda_store_compact", store)
    pagoda.call("pagoda_store_get_stats", store, address(info))
    assert info.file_bytes < held
    cache.close()
    pagoda.free("pagoda_store", store)


def test_garbage_is_compacted_from_the_size_that_the_options_say(pagoda, tmp_path):
    for garbage_bytes, compacts in (256 << 10, True), (0, False):
        options = {"segment_bytes": 128 << 10, "garbage_bytes": garbage_bytes}
        store = open_store(pagoda, tmp_path / str(garbage_bytes), durability=C["PAGODA_DURABILITY_PROCESS"], **options)
        cache, info = Cache(pagoda, store, offload=C["PAGODA_OFFLOAD_AT_COMMIT"]), struct("pagoda_store_stats")

        def stats():
            pagoda.call("pagoda_store_get_stats", store, address(info))
            return info

        # 3 MiB of histories that are removed again, and one that stays.
        cache.add((0, 0, 8, 0), wait=1)
        for _ in range(40):
            cache.add((1, 0, 64, 0), wait=1)
            assert cache.count("evict", [1], ALL) == 1
        pagoda.call("pagoda_store_flush", store)
        if compacts:
            # How much is left depends on the moment: a cut stays while a record that it hides is in another segment.
            until(lambda: stats().compacted_segments > 0, "garbage is compacted")
        else:
            assert stats().compacted_segments == 0 and info.file_bytes > 2 << 20, "64 MiB are the default"
        assert info.owners == 1
        cache.close()
        pagoda.free("pagoda_store", store)


# ---- sharing -----------------------------------------------------------------------------------------------------


def test_an_owner_that_begins_with_the_pages_of_another_scores_as_if_it_had_computed_them(pagoda, model):
    cache, prompt = Cache(pagoda), np.arange(20, dtype=np.int64) % 7
    cache.rank(model, (1, 0, prompt, []))
    assert [cache.fork(1, to, tokens) for to, tokens in ((2, 20), (3, 9), (4, 7))] == [16, 8, 0]
    assert cache.fork(5, 6, 8) == 0, "5 has no history"
    stats = cache.stats()
    assert (stats.shared_pages, stats.resident_owners, stats.pages - stats.free_pages) == (2, 3, 3)
    assert [length for _, length, _ in cache.lookup(1, 2, 3, 4)] == [20, 16, 8, 0]
    new = {2: np.array([3, 1, 4]), 3: np.array([2, 6]), 1: np.array([5])}
    begin = {2: 16, 3: 8, 1: 20}
    scores = cache.rank(model, *((owner, begin[owner], new[owner], CANDIDATES) for owner in new))
    whole = [(np.concatenate([prompt[: begin[owner]], new[owner]]), CANDIDATES) for owner in new]
    for mine, expected in zip(scores, recomputed(pagoda, model, whole)):
        np.testing.assert_allclose(mine, expected, atol=1e-5)
    cache.close()


def test_what_can_not_begin_with_the_pages_of_another_is_told(pagoda, cache):
    cache.add((1, 0, 16, 0), (2, 0, 8, 0))
    for source, to, tokens, argument in (1, 2, 8, "to"), (1, 1, 8, "to"), (1, 3, -1, "tokens"):
        failure = failing(cache.fork, source, to, tokens)
        assert failure.status == INVALID_ARGUMENT and failure.argument == argument, failure.message
    assert cache.stats().shared_pages == 0
    # Pages are free when the last owner that has them has left.
    assert cache.fork(1, 3, 16) == 16
    assert cache.count("evict", [1], ALL) == 1 and cache.stats().shared_pages == 0
    assert cache.lookup(3) == [(0, 16, C["PAGODA_TIER_RESIDENT"])]
    assert cache.count("evict", None, ALL) == 2 and cache.stats().free_pages == 64


def test_a_pool_that_is_too_small_is_told(pagoda, cache):
    failure = failing(cache.prepare, (1, 0, 65 * 8, 0))
    assert failure.status == C["PAGODA_STATUS_CAPACITY"] and "the batch needs 65 pages and the cache has 64" in failure.message
    failure = failing(cache.count, "offload", None)
    assert failure.status == UNSUPPORTED and "no store" in failure.message


def test_a_pool_can_be_sized_by_bytes(pagoda):
    page = 2 * LAYERS * 8 * HEADS * HEAD_SIZE * 4
    cache = Cache(pagoda, size_unit=BYTES, size=5 * page + 1)
    assert cache.stats().pages == 5
    cache.close()
    assert failing(lambda: Cache(pagoda, size_unit=BYTES, size=page - 1)).argument == "options.size"
