"""`pagoda serve` by KServe's protocol, with NVIDIA's client: plain models, rankers, language models; JSON and bytes."""

import json
import subprocess
import time

import numpy as np
import onnx
import pytest
import tritonclient.http as triton
from capi import ROOT
from onnx import TensorProto, helper
from serving import COMMAND, HANGS, LLAMA, Server
from tritonclient.utils import InferenceServerException

THREE = ROOT / "tests/data/engine/three"
TYPES = {
    "BOOL": (np.bool_, TensorProto.BOOL),
    "UINT8": (np.uint8, TensorProto.UINT8),
    "UINT16": (np.uint16, TensorProto.UINT16),
    "UINT32": (np.uint32, TensorProto.UINT32),
    "UINT64": (np.uint64, TensorProto.UINT64),
    "INT8": (np.int8, TensorProto.INT8),
    "INT16": (np.int16, TensorProto.INT16),
    "INT32": (np.int32, TensorProto.INT32),
    "INT64": (np.int64, TensorProto.INT64),
    "FP16": (np.float16, TensorProto.FLOAT16),
    "FP32": (np.float32, TensorProto.FLOAT),
    "FP64": (np.float64, TensorProto.DOUBLE),
    "BYTES": (np.object_, TensorProto.STRING),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A model that gives back a tensor of each type, and a sum."""
    nodes = [helper.make_node("Identity", [f"in_{name}"], [f"out_{name}"]) for name in TYPES]
    nodes.append(helper.make_node("Add", ["in_FP32", "in_FP32"], ["twice"]))
    inputs = [helper.make_tensor_value_info(f"in_{name}", kind, ["n", 2]) for name, (_, kind) in TYPES.items()]
    outputs = [helper.make_tensor_value_info(f"out_{name}", kind, ["n", 2]) for name, (_, kind) in TYPES.items()]
    outputs.append(helper.make_tensor_value_info("twice", TensorProto.FLOAT, ["n", 2]))
    graph = helper.make_graph(nodes, "plain", inputs, outputs)
    path = tmp_path_factory.mktemp("plain") / "plain.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


@pytest.fixture(scope="module")
def server(plain):
    with Server(plain, f"movies={THREE}", f"tiny={LLAMA}", "--provider", "cpu") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with triton.InferenceServerClient(f"{server.host}:{server.port}", network_timeout=HANGS) as client:
        yield client


def values(name, rows=3):
    numpy, _ = TYPES[name]
    if name == "BYTES":
        return np.array([["a", ""], ["ü", "\u2713 text"], ["x" * 300, "\n"]][:rows], dtype=object)
    return (np.arange(rows * 2).reshape(rows, 2) % 7).astype(numpy)


def tensor(name, array, datatype, binary=True):
    made = triton.InferInput(name, array.shape, datatype)
    made.set_data_from_numpy(array, binary_data=binary)
    return made


def texts(array):
    return [item.decode() if isinstance(item, bytes) else item for item in array.reshape(-1)]


# ---- what is served ----------------------------------------------------------------------------------------------


def test_the_server_and_its_models_are_described(client):
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("plain") and not client.is_model_ready("nothing")
    about = client.get_server_metadata()
    assert about["name"] == "pagoda" and "binary_tensor_data" in about["extensions"]
    about = client.get_model_metadata("plain")
    assert about["platform"] == "onnxruntime_onnx" and about["versions"] == ["1"]
    assert {"name": "in_FP32", "datatype": "FP32", "shape": [-1, 2]} in about["inputs"]
    assert {"name": "out_BYTES", "datatype": "BYTES", "shape": [-1, 2]} in about["outputs"]
    assert client.is_model_ready("plain", "1") and not client.is_model_ready("plain", "2")
    for name, platform in [("movies", "pagoda_rank"), ("tiny", "pagoda_generate")]:
        about = client.get_model_metadata(name)
        assert about["platform"] == platform and about["versions"][0].isdigit()
        assert client.get_model_metadata(name, about["versions"][0]) == about


# ---- plain models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", [True, False])
@pytest.mark.parametrize("back", [True, False])
def test_tensors_of_every_type_come_back(client, to, back):
    # The client does not send FP16 in JSON.
    inputs = [tensor(f"in_{name}", values(name), name, to or name == "FP16") for name in TYPES]
    outputs = [triton.InferRequestedOutput(f"out_{name}", binary_data=back) for name in TYPES]
    answer = client.infer("plain", inputs, outputs=outputs, request_id="mine")
    response = answer.get_response()
    assert (response["id"], response["model_name"], response["model_version"]) == ("mine", "plain", "1")
    assert [output["name"] for output in response["outputs"]] == [f"out_{name}" for name in TYPES]
    for name in TYPES:
        found, expected = answer.as_numpy(f"out_{name}"), values(name)
        if name == "BYTES":
            assert texts(found) == texts(expected)
        else:
            assert found.dtype == expected.dtype and np.array_equal(found, expected)


def test_all_outputs_come_if_none_is_named(client):
    inputs = [tensor(f"in_{name}", values(name, 1), name) for name in TYPES]
    answer = client.infer("plain", inputs)
    assert np.array_equal(answer.as_numpy("twice"), values("FP32", 1) * 2)
    assert len(answer.get_response()["outputs"]) == len(TYPES) + 1


def test_large_tensors(client):
    """A megabyte and more, in bytes."""
    array = np.random.default_rng(0).normal(size=(150_000, 2)).astype(np.float32)
    # Without elements there is nothing to send for the others.
    inputs = [tensor(f"in_{name}", np.zeros([0, 2], TYPES[name][0]), name) for name in TYPES if name != "FP32"]
    outputs = [triton.InferRequestedOutput("twice")]
    answer = client.infer("plain", [*inputs, tensor("in_FP32", array, "FP32")], outputs=outputs)
    assert np.array_equal(answer.as_numpy("twice"), array * 2)


def test_plain_json(server):
    data = {"inputs": [{"name": f"in_{name}", "datatype": name, "shape": [0, 2], "data": []} for name in TYPES]}
    data["inputs"][10] |= {"shape": [2, 2], "data": [[1, 2], [3, 4.5]]}
    data["outputs"] = [{"name": "twice"}]
    status, _, answer = server.post("/v2/models/plain/infer", data)
    assert status == 200 and answer["outputs"] == [
        {"name": "twice", "datatype": "FP32", "shape": [2, 2], "data": [2, 4, 6, 9]}
    ]
    assert server.post("/v2/models/plain/versions/1/infer", data)[0] == 200
    assert server.post("/v2/models/plain/versions/7/infer", data)[0] == 404


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": None}, "inputs: null is not a list"),
        ({"inputs": []}, "in_BOOL"),
        ({"inputs": [{"name": "x"}]}, "inputs[0].datatype: missing"),
        ({"inputs": [{"name": "x", "datatype": "FP31", "shape": [1]}]}, 'inputs[0].datatype: "FP31" is no type'),
        ({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1]}]}, "inputs[0].data: missing"),
        ({"inputs": [{"name": "x", "datatype": "FP32", "shape": [9], "data": [1]}]}, "inputs[0].data: 1 elements"),
        ({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}]}, 'no input "x"'),
        ({"outputs": [{"name": "a"}, {"name": "a"}], "inputs": []}, 'outputs: "a" is there twice'),
        ({"input": []}, "input: no such field"),
    ],
)
def test_what_is_wrong_is_said(server, change, message):
    status, _, answer = server.post("/v2/models/plain/infer", change)
    assert status == 400 and message in answer["error"], answer


def test_broken_bytes_are_refused(server):
    head = {"name": "in_FP32", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}
    for length, body in [
        ("x", b"{}"),
        ("99999", b"{}"),
        ("-1", b"{}"),
        ("2", b"{}" + b"\0" * 8),
        (None, json.dumps({"inputs": [head]}).encode()),
        (len(json.dumps({"inputs": [head]})), json.dumps({"inputs": [head]}).encode() + b"\0" * 7),
        (len(json.dumps({"inputs": [head]})), json.dumps({"inputs": [head]}).encode() + b"\0" * 9),
    ]:
        headers = {} if length is None else {"Inference-Header-Content-Length": str(length)}
        status, _, answer = server.post("/v2/models/plain/infer", body, headers)
        assert status == 400 and isinstance(answer["error"], str), answer


def test_the_client_understands_errors(client):
    with pytest.raises(InferenceServerException, match="no model is named"):
        client.infer("nothing", [])
    with pytest.raises(InferenceServerException, match="in_BOOL"):
        client.infer("plain", [tensor("in_FP32", values("FP32"), "FP32")])


# ---- rankers and language models ---------------------------------------------------------------------------------


def test_a_ranker_takes_tensors(server, client):
    features = json.loads((THREE / "pagoda.json").read_text())["features"]
    of = {kind: [f["name"] for f in features if f["source"] == kind] for kind in ("user", "item", "action")}
    whole = lambda *numbers: np.array(numbers, np.int64)  # noqa: E731
    made = {"user": whole(7), "time": whole(99), "events.time": whole(10, 20, 30)}
    made |= {f"user_keys.{name}": whole(1) for name in of["user"]}
    made |= {f"events.{name}": whole(1, 2, 3) for name in of["item"] + of["action"]}
    made |= {f"candidates.{name}": whole(4, 5, 6, 1) for name in of["item"]}
    answer = client.infer("movies", [tensor(name, array, "INT64") for name, array in made.items()])
    request = {"user": 7, "time": 99, "top": 0, "user_keys": {name: 1 for name in of["user"]}}
    request["events"] = {name: [1, 2, 3] for name in of["item"] + of["action"]} | {"time": [10, 20, 30]}
    request["candidates"] = {name: [4, 5, 6, 1] for name in of["item"]}
    expected = server.post("/v1/rank", request)[2]
    scores = answer.as_numpy("scores")
    assert scores.shape == (4, len(expected["top"])) and answer.as_numpy("computed_rows")[0] > 0
    for column, places in enumerate(expected["top"].values()):
        for place in places:
            assert scores[place["index"], column] == pytest.approx(place["score"], rel=1e-4, abs=1e-5)
    with pytest.raises(InferenceServerException, match="did you mean `events.item`"):
        client.infer("movies", [tensor("user", whole(7), "INT64"), tensor("events.itme", whole(1), "INT64")])


def test_a_language_model_takes_text(client):
    prompt = tensor("text_input", np.array(["Hello"], object), "BYTES")
    parameters = {"max_tokens": 20, "temperature": 0, "n": 2}
    answer = client.infer("tiny", [prompt], parameters=parameters)
    command = [COMMAND, "generate", LLAMA, "--prompt", "Hello", "-m", "20", "--greedy", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
    [expected] = json.loads(done.stdout)["choices"]
    assert texts(answer.as_numpy("text_output")) == [expected["text"]] * 2
    assert texts(answer.as_numpy("finish_reason")) == [expected["finish_reason"]] * 2
    with pytest.raises(InferenceServerException, match="parameters.temprature: no such field"):
        client.infer("tiny", [prompt], parameters={"temprature": 1})
    with pytest.raises(InferenceServerException, match="either `text_input` or `tokens_input`"):
        client.infer("tiny", [])


# ---- statistics --------------------------------------------------------------------------------------------------


def test_statistics_count_requests_and_their_time(server, client):
    def of(name):
        [stats] = client.get_inference_statistics(name)["model_stats"]
        assert stats["name"] == name and client.get_model_metadata(name)["versions"] == [stats["version"]]
        return stats

    prompt = tensor("text_input", np.array(["Hello"], object), "BYTES")
    before, began = of("tiny"), time.time()
    client.infer("tiny", [prompt], parameters={"max_tokens": 20, "ignore_eos": True})
    # Whatever protocol a request came by, it counts.
    assert server.post("/v1/completions", {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 4})[0] == 200
    with pytest.raises(InferenceServerException):
        client.infer("tiny", [prompt], parameters={"max_tokens": 100000})
    took, after = (time.time() - began) * 1e9, of("tiny")
    grown = {
        name: {key: after["inference_stats"][name][key] - before["inference_stats"][name][key] for key in ("count", "ns")}
        for name in before["inference_stats"]
    }
    assert after["inference_count"] - before["inference_count"] == 3 and grown["success"]["count"] == 3
    assert grown["fail"]["count"] == 1 and grown["queue"]["count"] == grown["compute_infer"]["count"] == 3
    assert 0 < grown["queue"]["ns"] + grown["compute_infer"]["ns"] == grown["success"]["ns"] < 3 * took
    assert after["execution_count"] - before["execution_count"] >= 20
    assert began * 1000 - 1 <= after["last_inference"] <= time.time() * 1000 + 1
    # What is not measured takes no time, and counts.
    for name in ("compute_input", "compute_output"):
        assert after["inference_stats"][name] == {"count": after["inference_count"], "ns": 0}
    for name in ("cache_hit", "cache_miss"):
        assert after["inference_stats"][name] == {"count": 0, "ns": 0}
    assert (after["batch_stats"], after["memory_usage"], after["response_stats"]) == ([], [], {})

    before = of("plain")
    client.infer("plain", [tensor(f"in_{name}", values(name), name) for name in TYPES])
    with pytest.raises(InferenceServerException):
        client.infer("plain", [])
    after = of("plain")
    for name, count in [("success", 1), ("fail", 1), ("compute_infer", 1), ("queue", 1)]:
        assert after["inference_stats"][name]["count"] - before["inference_stats"][name]["count"] == count, name
    assert {one["name"] for one in client.get_inference_statistics()["model_stats"]} == {"plain", "movies", "tiny"}
    assert client.get_inference_statistics("plain", "1")["model_stats"][0]["version"] == "1"
    with pytest.raises(InferenceServerException, match="no model is named"):
        client.get_inference_statistics("nothing")
