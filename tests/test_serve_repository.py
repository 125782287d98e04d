"""`pagoda serve`: models are listed, loaded anew and unloaded by NVIDIA's client, and no request fails by it."""

import json
import shutil
import threading

import numpy as np
import onnx
import pytest
import tritonclient.http as triton
from capi import ROOT
from onnx import TensorProto, helper
from serving import HANGS, LLAMA, Server, until
from tritonclient.utils import InferenceServerException

THREE = ROOT / "tests/data/engine/three"


def times(factor, path):
    """A model that multiplies."""
    constant = helper.make_tensor("factor", TensorProto.FLOAT, [], [factor])
    node = helper.make_node("Mul", ["x", "factor"], ["y"])
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in "xy")
    graph = helper.make_graph([node], "times", [x], [y], [constant])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)


@pytest.fixture
def serve(tmp_path):
    """Starts a server whose model `times` is the file that a link names."""
    times(2, tmp_path / "two.onnx")
    times(3, tmp_path / "three.onnx")
    (tmp_path / "times.onnx").symlink_to("two.onnx")

    def start(control=True):
        models = {"times": tmp_path / "times.onnx", "tiny": LLAMA, "movies": THREE}
        tables = [f'[[model]]\nname = "{name}"\npath = "{path}"\nprovider = "cpu"\n' for name, path in models.items()]
        head = "repository_control = true\n" if control else ""
        (tmp_path / "serve.toml").write_text(head + "".join(tables))
        return Server("--config", tmp_path / "serve.toml")

    return start


def connect(server):
    return triton.InferenceServerClient(f"{server.host}:{server.port}", network_timeout=HANGS, concurrency=4)


def multiplied(client):
    x = triton.InferInput("x", [1], "FP32")
    x.set_data_from_numpy(np.ones([1], np.float32))
    return float(client.infer("times", [x]).as_numpy("y")[0])


def test_models_are_listed_and_stay_unless_the_configuration_allows(serve):
    with serve(control=False) as server, connect(server) as client:
        index = client.get_model_repository_index()
        names = ["times", "tiny", "movies"]
        assert [(model["name"], model["state"]) for model in index] == [(name, "READY") for name in names]
        for change in (client.load_model, client.unload_model):
            with pytest.raises(InferenceServerException, match="repository_control"):
                change("times")
        assert multiplied(client) == 2


def test_a_new_version_takes_over_without_a_failed_request(serve, tmp_path):
    with serve() as server, connect(server) as client:
        found, failed, done = [], [], threading.Event()

        def ask():
            with connect(server) as own:
                while not done.is_set():
                    try:
                        found.append(multiplied(own))
                    except Exception as error:
                        failed.append(error)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        until(lambda: len(found) > 20)
        for version in ("three", "two", "three"):
            (tmp_path / "next").symlink_to(f"{version}.onnx")
            (tmp_path / "next").replace(tmp_path / "times.onnx")
            client.load_model("times")
            assert multiplied(client) == (3 if version == "three" else 2)
        done.set()
        for thread in threads:
            thread.join(HANGS)
        assert failed == [] and set(found) == {2.0, 3.0}
        # A file that is no model leaves the one before.
        (tmp_path / "times.onnx").unlink()
        (tmp_path / "times.onnx").write_text("no model")
        with pytest.raises(InferenceServerException, match="times"):
            client.load_model("times")
        assert multiplied(client) == 3
        # A ranker swaps by itself, a language model while it streams.
        client.load_model("movies")
        client.load_model("tiny")


def test_what_runs_ends_on_the_model_that_was_unloaded(serve):
    with serve() as server, connect(server) as client:
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 400, "ignore_eos": True, "n": 8, "stream": True}
        connection = server.connect()
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        assert response.readline().startswith(b"data: ")
        client.unload_model("tiny")
        states = {model["name"]: model["state"] for model in client.get_model_repository_index()}
        assert states == {"times": "READY", "tiny": "UNAVAILABLE", "movies": "READY"}
        assert not client.is_model_ready("tiny")
        status, _, answer = server.post("/v1/completions", body)
        assert (status, answer["error"]["code"]) == (404, "model_not_loaded")
        assert "tiny" not in [model["id"] for model in server.get("/v1/models")[2]["data"]]
        lines = response.read().decode().strip().split("\n\n")
        assert lines[-1] == "data: [DONE]" and sum('"finish_reason":"length"' in line for line in lines) == 8
        connection.close()
        client.load_model("tiny")
        assert server.post("/v1/completions", body | {"stream": False, "max_tokens": 1})[0] == 200


def test_metrics_forget_a_model_that_is_unloaded(serve):
    def named(server, name):
        text = server.get("/metrics")[2].decode()
        return [line for line in text.splitlines() if line.startswith("pagoda_http_model_") and f'model="{name}"' in line]

    with serve() as server, connect(server) as client:
        assert named(server, "tiny") and named(server, "movies")
        client.unload_model("tiny")
        assert named(server, "tiny") == [] and named(server, "movies")
        client.load_model("tiny")
        assert named(server, "tiny")


# ---- a language model with a store -------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path):
    """A server of a language model that a link names, with a store."""
    shutil.copytree(LLAMA, tmp_path / "one")
    (tmp_path / "model").symlink_to("one")
    (tmp_path / "serve.toml").write_text(
        "repository_control = true\n[limits]\ndrain_timeout = 60.0\n"
        '[[model]]\nname = "tiny"\npath = "model"\nprovider = "cpu"\nstore = "store"\n'
    )
    with Server("--config", tmp_path / "serve.toml") as server:
        yield server


def test_a_model_with_a_store_is_swapped_without_a_failed_request(stored, tmp_path):
    """Its store is one model's at a time: requests wait meanwhile, and none is refused."""
    statuses, done = [], threading.Event()
    body = {"model": "tiny", "prompt": "Hello " * 20, "max_tokens": 4, "temperature": 0, "session": "s"}

    def ask():
        while not done.is_set():
            status, _, answer = stored.post("/v1/completions", body)
            statuses.append((status, answer["choices"][0]["text"] if status == 200 else answer))

    assert stored.post("/v1/completions", body)[0] == 200
    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    with connect(stored) as client:
        for _ in range(3):
            before = len(statuses)
            client.load_model("tiny")
            until(lambda: len(statuses) > before + 6)
        # A version that can not be opened: the one before comes back, from where it was.
        (tmp_path / "two").mkdir()
        (tmp_path / "next").symlink_to("two")
        (tmp_path / "next").replace(tmp_path / "model")
        with pytest.raises(InferenceServerException, match="can not be served"):
            client.load_model("tiny")
        before = len(statuses)
        until(lambda: len(statuses) > before + 6)
    done.set()
    for thread in threads:
        thread.join(HANGS)
    assert len(set(map(str, statuses))) == 1 and statuses[0][0] == 200, set(map(str, statuses))
    # What was cached before is found after: it came through the store.
    usage = stored.post("/v1/completions", body)[2]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_model_with_a_store_is_loaded_right_after_it_was_unloaded(stored):
    with connect(stored) as client:
        long = {"model": "tiny", "prompt": "Hello", "max_tokens": 400, "ignore_eos": True, "n": 8}
        running = threading.Thread(target=stored.post, args=("/v1/completions", long))
        running.start()
        until(lambda: "pagoda_http_model_running{model=\"tiny\"} 8" in stored.get("/metrics")[2].decode())
        client.unload_model("tiny")
        client.load_model("tiny")
        running.join(HANGS)
        assert stored.post("/v1/completions", long | {"max_tokens": 1})[0] == 200


def test_links_lead_nowhere_else(stored, tmp_path):
    """The path of a model may be a link; inside of its folder none leads out, not even to the very same bytes."""
    weights, outside = tmp_path / "one" / "weights.bin", tmp_path / "weights.bin"
    weights.rename(outside)

    def link(target):
        weights.unlink(missing_ok=True)
        weights.symlink_to(target)

    with connect(stored) as client:
        shutil.copy(outside, tmp_path / "one" / "bytes")
        link("bytes")
        client.load_model("tiny")
        link("../weights.bin")
        with pytest.raises(InferenceServerException, match="weights.bin is a link out of the folder"):
            client.load_model("tiny")
    # The one before never stopped.
    assert stored.post("/v1/completions", {"model": "tiny", "prompt": "Hello", "max_tokens": 1})[0] == 200


def test_a_request_brings_no_model(serve):
    with serve() as server, connect(server) as client:
        with pytest.raises(InferenceServerException, match="as the configuration says"):
            client.load_model("times", config="{}")
        for name in ("other", "..%2Ftimes", "%2Fetc%2Fpasswd"):
            assert server.post(f"/v2/repository/models/{name}/load", {})[0] == 404
        assert server.post("/v2/repository/models/times/load", {"path": "/etc"})[0] == 400
        assert multiplied(client) == 2
