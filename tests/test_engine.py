"""The ranking engine through C, on models as the exporter makes them, against the formulas in float64."""

import ctypes
import json

import capi
import numpy as np
import pytest
from capi import Failure, address, engine_options, pointed_to, struct, structs, texts
from exported import BEFORE, END, HOURS, MLP, QUARTERS, WIDE, Oracle, error, made, people, settings, tensors, with_user

COUNTS = [(13, 5), (0, 3), (25, 2), (1, 1), (18, 6)]
KNOWN = {"name": "rating", "table": "ratings", "candidate_key": 3}
MODELS = {
    "nvidia": (settings(), 1e-5),
    "meta": (settings("meta", block__group_norm=True), 1e-5),
    "interleaved": (settings(interleaved=True, lookup="bag"), 1e-5),
    "users": (with_user(settings(times=HOURS, lookup="bag"), mlp=MLP), 1e-5),
    "wide": (settings(tokens=WIDE, times=QUARTERS, final_norm="layer_norm"), 1e-5),
    "known action": (settings("meta", lookup="bag", tokens__action__features=[KNOWN]), 1e-5),
    "groups": (settings(block__target_group_size=2, block__max_attn_len=9), 1e-5),
    "f16": (settings(kv__type="f16"), 2e-3),
    "bf16": (settings("meta", True, kv__type="bf16"), 1e-2),
    "fused": (with_user(settings(scale_embeddings=True, fused=True)), 1e-5),
    "computed in f16": (settings("meta", True, compute="f16"), 6e-3),
    "from the end": (settings("meta", positions=END, times=BEFORE), 1e-5),
    "users see all": (with_user(settings(), sees_history=True), 1e-5),
}


class Engine:
    def __init__(self, pagoda, folder, **options):
        self.pagoda = pagoda
        path, options = ctypes.create_string_buffer(str(folder).encode()), engine_options(**options)
        self.handle = pagoda.make("pagoda_engine_open", address(path), address(options))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.pagoda.free("pagoda_engine", self.handle)

    def rank(self, config, user, name, start=None):
        """The scores for a user of `people`, and how many rows were cached and computed."""
        tokens = config["tokens"]
        kinds = {kind: [f["name"] for f in tokens[kind]["features"]] for kind in tokens if kind != "interleaved"}
        events = user["events"][start or 0 :]
        fields = self.columns("event", events, kinds["item"] + kinds.get("action", []))
        fields |= self.columns("candidate", user["candidates"], kinds["item"])
        fields["event_times"] = pointed_to((ctypes.c_int64 * max(len(events), 1))(*[event["time"] for event in events]))
        own = kinds.get("user", [])
        fields |= {"user_feature_count": len(own), "user_features": pointed_to(texts(own))}
        fields["user_keys"] = pointed_to((ctypes.c_int64 * max(len(own), 1))(*[user["keys"][name] for name in own]))
        fields |= {"start": -1 if start is None else start, "has_time": 1, "time": user["now"]}
        request, response = struct("pagoda_rank_request", user=name, **fields), struct("pagoda_rank_response")
        scores = np.full([len(user["candidates"]), len(config["head"]["tasks"])], 123, np.float32)
        self.pagoda.call(
            "pagoda_engine_rank", self.handle, address(request), scores.ctypes.data, scores.size, address(response)
        )
        self.version = ctypes.string_at(response.version).decode()
        return scores, response.cached_rows, response.computed_rows

    def swap(self, folder):
        path = ctypes.create_string_buffer(str(folder).encode())
        self.pagoda.call("pagoda_engine_swap", self.handle, address(path))

    @staticmethod
    def columns(what, rows, names):
        lists = [pointed_to((ctypes.c_int64 * max(len(rows), 1))(*[row[name] for row in rows])) for name in names]
        return {
            f"{what}_count": len(rows),
            f"{what}_feature_count": len(names),
            f"{what}_features": pointed_to(texts(names)),
            f"{what}_keys": pointed_to((ctypes.c_void_p * len(lists))(*lists)),
        }


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_the_scores_are_those_of_the_formulas(pagoda, made, model, cached):
    config, tolerance = MODELS[model]
    weights = tensors(config)
    folder, oracle = made(config, weights), Oracle(config, weights)
    with Engine(pagoda, folder, kv_size=64 if cached else 0, remember_bytes=1 << 20) as engine:
        for number, user in enumerate(people(config, COUNTS)):
            expected = oracle.scores([user])
            third = len(user["events"]) // 3
            early = user | {"events": user["events"][:third]}
            scores, *_ = engine.rank(config, early, number)
            assert error(scores, oracle.scores([early])) <= tolerance
            scores, old, _ = engine.rank(config, user, number, third or None)
            assert error(scores, expected) <= tolerance
            keeps = cached and model not in ("from the end", "users see all")
            assert (old > 0) == (keeps and (third > 0 or "user" in config["tokens"]))
            scores, old, again = engine.rank(config, user, number)
            assert error(scores, expected) <= tolerance
            assert (old == 0, again == 0) == ((False, True) if keeps and old + again else (True, old + again == 0))


def test_quantised_pages_hold_more_and_give_nearly_the_same_scores(pagoda, made):
    config, _ = MODELS["nvidia"]
    folder, user = made(config, tensors(config)), people(config, COUNTS)[0]
    found = []
    for kv_format in capi.PAGODA_KV_FORMAT_NATIVE, capi.PAGODA_KV_FORMAT_INT8:
        options = {"kv_size": 1 << 20, "kv_size_unit": capi.PAGODA_KV_SIZE_UNIT_BYTES, "kv_format": kv_format}
        with Engine(pagoda, folder, **options) as engine:
            stats = struct("pagoda_kv_stats")
            pagoda.call("pagoda_engine_get_kv_stats", engine.handle, address(stats))
            found.append((stats.pages, engine.rank(config, user, 1)[0]))
    (few, native), (many, int8) = found
    assert many > 2 * few and 0 < error(int8, native) < 1e-2


def test_what_is_not_known_is_said(pagoda, made):
    config, _ = MODELS["nvidia"]
    (user,) = people(config, [(13, 5)])
    with Engine(pagoda, made(config, tensors(config))) as engine:
        with pytest.raises(Failure) as failure:
            engine.rank(config, user, 7, start=5)
        assert failure.value.argument == "request.start" and "events 0 to 4 of user 7" in failure.value.message
        engine.rank(config, user, 7)
        engine.rank(config, user, 7, start=13)


def test_a_response_has_the_version_of_the_model_that_answered(pagoda, made):
    config, _ = MODELS["nvidia"]
    (user,) = people(config, [(13, 5)])
    folders = [made(config, tensors(config, seed)) for seed in (1, 2)]
    versions = [json.loads((folder / "pagoda.json").read_text())["version"] for folder in folders]
    assert versions[0] != versions[1]
    with Engine(pagoda, folders[0]) as engine:
        for folder, version in [*zip(folders, versions), (folders[0], versions[0])]:
            engine.swap(folder)
            for _ in range(2):
                engine.rank(config, user, 7)
                assert engine.version == version


@pytest.mark.parametrize("host_bytes", [1 << 20, 0])
def test_what_left_the_pool_comes_back_from_host_memory(pagoda, made, host_bytes):
    config, tolerance = MODELS["nvidia"]
    weights = tensors(config)
    users, oracle = people(config, [(24, 3)] * 8), Oracle(config, weights)
    # Room for two of them: by the time that one comes back, the others have had its pages.
    options = {"kv_size": 8, "host_bytes": host_bytes, "remember_bytes": 0}
    with Engine(pagoda, made(config, weights), **options) as engine:
        for came in False, True:
            for number, user in enumerate(users):
                scores, cached, _ = engine.rank(config, user, number)
                assert error(scores, oracle.scores([user])) <= tolerance
                assert (cached > 0) == (came and host_bytes > 0), number


def test_graphs_are_read_and_left_alone_on_the_cpu(pagoda, made):
    config, tolerance = MODELS["nvidia"]
    weights = tensors(config)
    (user,) = people(config, [(13, 5)])
    shapes = structs("pagoda_graph_shape", [{"users": 1, "rows": 384}, {"users": 8, "rows": 3072, "candidates": 2048}])
    with Engine(pagoda, made(config, weights), cuda_graphs=address(shapes), cuda_graph_count=2) as engine:
        scores, *_ = engine.rank(config, user, 7)
    assert error(scores, Oracle(config, weights).scores([user])) <= tolerance
