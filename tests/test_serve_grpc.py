"""`pagoda serve` by KServe's protocol over gRPC, with NVIDIA's client: tensors, streams of tokens, keys, TLS, the end."""

import contextlib
import importlib.util
import queue
import random
import signal
import socket
import subprocess
import threading
import time

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from capi import ROOT
from serving import HANGS, LLAMA, Server, until
from test_serve_kserve import THREE, TYPES, plain, texts, values  # noqa: F401
from test_serve_load import metric, resident
from test_serve_operation import configured
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

PROTO = ROOT / "sdk/server/proto"
SERVICE = "/inference.GRPCInferenceService/"
LONG = {"max_tokens": 490, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(plain):  # noqa: F811
    with Server(plain, f"movies={THREE}", f"tiny={LLAMA}", "--provider", "cpu") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with connect(server) as client:
        yield client


def connect(server, **options):
    return triton.InferenceServerClient(f"{server.host}:{server.port}", **options)


def tensor(name, array, datatype):
    made = triton.InferInput(name, array.shape, datatype)
    made.set_data_from_numpy(array)
    return made


def prompt(text="Hello"):
    return tensor("text_input", np.array([text], object), "BYTES")


class Stream:
    """A stream of a client, and what came back."""

    def __init__(self, server, **options):
        self.client, self.answers = connect(server, **options), queue.Queue()
        self.client.start_stream(callback=lambda result, error: self.answers.put((result, error)))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.stop_stream(cancel_requests=True)
        self.client.close()

    def ask(self, model, inputs, **options):
        self.client.async_stream_infer(model, inputs, **options)

    def answer(self):
        result, error = self.answers.get(timeout=HANGS)
        if error:
            raise error
        return result


def parameter(result, name):
    return result.get_response().parameters[name]


def is_final(result):
    return parameter(result, "triton_final_response").bool_param


# ---- what is served ----------------------------------------------------------------------------------------------


def generator():
    spec = importlib.util.spec_from_file_location("generate", PROTO / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_messages_are_those_of_the_client():
    """proto/kserve.proto has the names and numbers that the client has, and the structs are made of it."""
    text = (PROTO / "kserve.proto").read_text()
    module = generator()
    assert (ROOT / "sdk/server/src/kserve/grpc/messages.rs").read_text() == module.rust(text), (
        "run sdk/server/proto/generate.py"
    )
    file = service_pb2.DESCRIPTOR
    known = dict(file.message_types_by_name)
    for dependency in file.dependencies:
        known |= dependency.message_types_by_name
    known |= {inner.name: inner for outer in list(known.values()) for inner in outer.nested_types}
    kinds = {"bool": 8, "int32": 5, "int64": 3, "uint32": 13, "uint64": 4, "float": 2, "double": 1, "string": 9}
    kinds |= {"bytes": 12}
    enumeration, message = 14, 11
    for name, fields in module.messages(text).items():
        ours = [one for field in fields for one in (field[1] if len(field) == 2 else [field])]
        theirs = {field.name: field for field in known[name].fields}
        for repeated, kind, own, number in ours:
            field = theirs[own]
            assert field.number == number, (name, own)
            assert field.is_repeated == (repeated or kind.startswith("map")), (name, own)
            assert field.type in (kinds.get(kind, message), enumeration if kind == "int32" else -1), (name, own)
    methods = set(file.services_by_name["GRPCInferenceService"].methods_by_name)
    assert {line.split()[1].split("(")[0] for line in text.splitlines() if line.startswith("  rpc ")} <= methods


def test_the_server_and_its_models_are_described(client):
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("plain") and not client.is_model_ready("nothing")
    assert client.is_model_ready("plain", "1") and not client.is_model_ready("plain", "2")
    about = client.get_server_metadata(as_json=True)
    assert about["name"] == "pagoda" and "model_repository" in about["extensions"]
    about = client.get_model_metadata("plain")
    assert about.platform == "onnxruntime_onnx" and about.versions == ["1"]
    assert {(one.name, one.datatype, *one.shape) for one in about.inputs} >= {("in_FP32", "FP32", -1, 2)}
    config = client.get_model_config("plain").config
    types = {one.name: one.data_type for one in config.input}
    expected = {f"in_{name}": f"TYPE_{'STRING' if name == 'BYTES' else name}" for name in TYPES}
    file = config.DESCRIPTOR.file
    assert types == {name: file.enum_types_by_name["DataType"].values_by_name[kind].number
                     for name, kind in expected.items()}
    assert not config.model_transaction_policy.decoupled
    assert client.get_model_config("tiny").config.model_transaction_policy.decoupled
    index = client.get_model_repository_index()
    assert [(model.name, model.state) for model in index.models] == [(n, "READY") for n in ("plain", "movies", "tiny")]
    with pytest.raises(InferenceServerException, match="no model is named") as failed:
        client.get_model_metadata("plian")
    assert failed.value.status() == "StatusCode.NOT_FOUND"


def test_http_2_is_for_every_path(server):
    """The same port, without TLS: a client of HTTP/2 reads what one of HTTP/1 reads."""
    command = ["curl", "-s", "--http2-prior-knowledge", "-w", "%{http_version} %{http_code}", f"{server.url}/health"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
    assert done.stdout == '{"status":"ready"}2 200'


# ---- one message, one answer -------------------------------------------------------------------------------------


def test_tensors_of_every_type_come_back(client):
    inputs = [tensor(f"in_{name}", values(name), name) for name in TYPES]
    outputs = [triton.InferRequestedOutput(f"out_{name}") for name in TYPES]
    answer = client.infer("plain", inputs, outputs=outputs, request_id="mine")
    response = answer.get_response()
    assert (response.id, response.model_name, response.model_version) == ("mine", "plain", "1")
    assert [output.name for output in response.outputs] == [f"out_{name}" for name in TYPES]
    for name in TYPES:
        found, expected = answer.as_numpy(f"out_{name}"), values(name)
        if name == "BYTES":
            assert texts(found) == texts(expected)
        else:
            assert found.dtype == expected.dtype and np.array_equal(found, expected)


def call(server, method, request, answer, metadata=()):
    """A message as other clients send it."""
    with grpc.insecure_channel(f"{server.host}:{server.port}") as channel:
        ask = channel.unary_unary(SERVICE + method, type(request).SerializeToString, answer.FromString)
        return ask(request, timeout=HANGS, metadata=metadata)


def test_tensors_in_typed_lists(server):
    lists = {"BOOL": "bool_contents", "UINT64": "uint64_contents", "INT64": "int64_contents", "BYTES": "bytes_contents"}
    lists |= {name: "uint_contents" for name in ("UINT8", "UINT16", "UINT32")}
    lists |= {name: "int_contents" for name in ("INT8", "INT16", "INT32")}
    lists |= {"FP32": "fp32_contents", "FP64": "fp64_contents", "FP16": "fp32_contents"}
    request = service_pb2.ModelInferRequest(model_name="plain")
    for name in TYPES:
        array = values(name)
        data = [text.encode() for text in texts(array)] if name == "BYTES" else array.reshape(-1).tolist()
        contents = service_pb2.InferTensorContents(**{lists[name]: data})
        request.inputs.add(name=f"in_{name}", datatype=name, shape=array.shape, contents=contents)
    answer = triton.InferResult(call(server, "ModelInfer", request, service_pb2.ModelInferResponse))
    for name in TYPES:
        found = answer.as_numpy(f"out_{name}")
        assert texts(found) == texts(values(name)) if name == "BYTES" else np.array_equal(found, values(name))
    request.inputs[0].contents.int_contents.append(1)
    with pytest.raises(grpc.RpcError) as failed:
        call(server, "ModelInfer", request, service_pb2.ModelInferResponse)
    assert failed.value.code() == grpc.StatusCode.INVALID_ARGUMENT and "int_contents" in failed.value.details()


def test_large_tensors(client):
    """Megabytes, in many frames."""
    array = np.random.default_rng(0).normal(size=(1_500_000, 2)).astype(np.float32)
    inputs = [tensor(f"in_{name}", np.zeros([0, 2], TYPES[name][0]), name) for name in TYPES if name != "FP32"]
    outputs = [triton.InferRequestedOutput("twice")]
    answer = client.infer("plain", [*inputs, tensor("in_FP32", array, "FP32")], outputs=outputs)
    assert np.array_equal(answer.as_numpy("twice"), array * 2)


def test_a_ranker_and_a_language_model(server, client):
    whole = lambda *numbers: np.array(numbers, np.int64)  # noqa: E731
    made = {"user": whole(7), "time": whole(99), "events.time": whole(10, 20)}
    made |= {f"user_keys.{name}": whole(1) for name in ("age", "town")}
    made |= {f"events.{name}": whole(1, 2) for name in ("item", "genre", "rating")}
    made |= {f"candidates.{name}": whole(4, 5, 6) for name in ("item", "genre")}
    answer = client.infer("movies", [tensor(name, array, "INT64") for name, array in made.items()])
    assert answer.as_numpy("scores").shape[0] == 3 and answer.as_numpy("computed_rows")[0] > 0
    answer = client.infer("tiny", [prompt()], parameters={"max_tokens": 12, "temperature": 0})
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 12, "temperature": 0}
    expected = server.post("/v1/completions", body)[2]["choices"][0]
    assert texts(answer.as_numpy("text_output")) == [expected["text"]]
    assert texts(answer.as_numpy("finish_reason")) == [expected["finish_reason"]]


@pytest.mark.parametrize(
    ("model", "inputs", "options", "message"),
    [
        ("nothing", [], {}, "no model is named"),
        ("plain", [], {}, "in_BOOL"),
        ("tiny", [], {}, "either `text_input` or `tokens_input`"),
        ("tiny", [prompt()], {"parameters": {"temprature": 1}}, "parameters.temprature: no such field"),
        ("tiny", [prompt()], {"outputs": [triton.InferRequestedOutput("logits")]}, 'outputs: there is no "logits"'),
        ("tiny", [prompt(), prompt()], {}, "is there twice"),
        ("tiny", [prompt()], {"parameters": {"n": 2**32 - 1}}, "n: 4294967295"),
        ("plain", [prompt()], {"model_version": "9"}, "has the version 1"),
    ],
)
def test_what_is_wrong_is_said(server, client, model, inputs, options, message):
    with pytest.raises(InferenceServerException, match=message):
        client.infer(model, inputs, **options)
    with Stream(server) as stream, pytest.raises(InferenceServerException, match=message):
        stream.ask(model, inputs, **options)
        stream.answer()


# ---- streams -----------------------------------------------------------------------------------------------------


def test_statistics_are_those_of_http(server, client):
    client.infer("tiny", [prompt()], parameters={"max_tokens": 4})
    for name in ("plain", "movies", "tiny"):
        [ours] = client.get_inference_statistics(name, as_json=True)["model_stats"]
        [theirs] = server.get(f"/v2/models/{name}/stats")[2]["model_stats"]
        for key in ("last_inference", "inference_count", "execution_count"):
            assert int(ours.get(key, 0)) == theirs[key], (name, key)
        for key, measured in theirs["inference_stats"].items():
            assert {part: int(ours["inference_stats"][key].get(part, 0)) for part in measured} == measured, (name, key)
    assert len(client.get_inference_statistics().model_stats) == 3
    with pytest.raises(InferenceServerException, match="no model is named"):
        client.get_inference_statistics("nothing")


@pytest.mark.parametrize("empty_final", [True, False])
def test_tokens_come_one_response_each(server, client, empty_final):
    parameters = {"max_tokens": 20, "temperature": 0}
    once = client.infer("tiny", [prompt()], parameters=parameters)
    [whole], [reason] = texts(once.as_numpy("text_output")), texts(once.as_numpy("finish_reason"))
    with Stream(server) as stream:
        stream.ask("tiny", [prompt()], request_id="mine", parameters=parameters,
                   enable_empty_final_response=empty_final)
        answers = [stream.answer()]
        while not is_final(answers[-1]):
            answers.append(stream.answer())
        if empty_final:
            assert not answers.pop().get_response().outputs
        assert all(answer.get_response().id == "mine" for answer in answers) and len(answers) > 10
        assert "".join(texts(answer.as_numpy("text_output"))[0] for answer in answers) == whole
        reasons = [texts(answer.as_numpy("finish_reason"))[0] for answer in answers]
        assert reasons[-1] == reason and set(reasons[:-1]) == {""}
        # The stream goes on after a failure, and after another model.
        stream.ask("tiny", [prompt()], request_id="wrong", parameters={"max_tokens": -1})
        with pytest.raises(InferenceServerException, match="max_new_tokens: -1"):
            stream.answer()
        stream.ask("tiny", [prompt()], request_id="two", parameters=parameters | {"n": 2})
        choices = {}
        while True:
            answer = stream.answer()
            choice = parameter(answer, "choice").int64_param
            choices[choice] = choices.get(choice, "") + texts(answer.as_numpy("text_output"))[0]
            if is_final(answer):
                break
        assert choices == {0: whole, 1: whole}
        array = np.ones([1, 2], np.float32)
        inputs = [tensor(f"in_{name}", np.zeros([0, 2], TYPES[name][0]), name) for name in TYPES if name != "FP32"]
        stream.ask("plain", [*inputs, tensor("in_FP32", array, "FP32")])
        answer = stream.answer()
        assert is_final(answer) and np.array_equal(answer.as_numpy("twice"), array * 2)


def test_a_client_that_goes_away_cancels(server):
    def running():
        return metric(server, 'pagoda_http_model_running{model="tiny"}')

    before = metric(server, "pagoda_http_requests_in_flight")
    with Stream(server) as stream:
        # So many that they run for seconds, also if the machine gives this client little time.
        for _ in range(16):
            stream.ask("tiny", [prompt()], parameters=LONG | {"n": 16})
        stream.answer()
        # The first token may come before the end of its step, with which it is counted.
        until(lambda: running() > 0)
    until(lambda: running() == 0)
    until(lambda: metric(server, "pagoda_http_requests_in_flight") <= before)
    # One that waits for an answer, and gives up.
    with connect(server) as client:
        with pytest.raises(InferenceServerException, match="Deadline"):
            client.infer("tiny", [prompt()], parameters=LONG | {"n": 16}, client_timeout=0.05)
    until(lambda: running() == 0)


def test_a_client_that_reads_nothing_is_cut(tmp_path):
    """Its responses stay unread, its connection lives: the requests end all the same, and the others of the connection do not."""
    with configured(tmp_path, "[limits]\nwrite_timeout = 0.5\nrequests = 4\n") as server:
        many = service_pb2.ModelInferRequest(model_name="tiny")
        many.parameters["max_tokens"].int64_param, many.parameters["n"].int64_param = 490, 64
        many.parameters["ignore_eos"].bool_param = True
        many.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        many.raw_input_contents.append(b"\5\0\0\0Hello")
        raw = {"request_serializer": bytes, "response_deserializer": bytes}
        with grpc.insecure_channel(f"{server.host}:{server.port}") as channel:
            end = threading.Event()

            def requests():
                # Far more than have a slot: they are refused, which is not read either.
                for _ in range(3000):
                    yield many.SerializeToString()
                end.wait(HANGS)

            unread = channel.stream_stream(SERVICE + "ModelStreamInfer", **raw)(requests())
            until(lambda: metric(server, 'pagoda_http_model_running{model="tiny"}') > 0)
            until(lambda: metric(server, 'pagoda_http_model_running{model="tiny"}') == 0)
            live = channel.unary_unary(SERVICE + "ServerLive", **raw)
            assert live(b"", timeout=HANGS)
            end.set()
            unread.cancel()
        with connect(server) as client:
            until(lambda: client.infer("tiny", [prompt()], parameters={"max_tokens": 1}))


# ---- models come and go ------------------------------------------------------------------------------------------


def test_models_are_loaded_and_unloaded(tmp_path, client):
    with pytest.raises(InferenceServerException, match="repository_control"):
        client.unload_model("tiny")
    with configured(tmp_path, "repository_control = true\n") as server, connect(server) as own:
        own.unload_model("tiny")
        assert not own.is_model_ready("tiny")
        [model] = own.get_model_repository_index().models
        assert (model.state, model.reason) == ("UNAVAILABLE", "unloaded")
        with pytest.raises(InferenceServerException, match="is unloaded"):
            own.infer("tiny", [prompt()])
        with pytest.raises(InferenceServerException, match="as the configuration says"):
            own.load_model("tiny", config="{}")
        own.load_model("tiny")
        assert own.infer("tiny", [prompt()], parameters={"max_tokens": 1})


# ---- operation ---------------------------------------------------------------------------------------------------


def test_without_a_key_nothing_is_said(tmp_path):
    (tmp_path / "keys").write_text("sk-one\n")
    with configured(tmp_path, 'keys_file = "keys"\n') as server, connect(server) as client:
        assert client.is_server_live() and client.is_server_ready()
        key = {"authorization": "Bearer sk-one"}
        calls = [
            lambda **options: client.infer("tiny", [prompt()], parameters={"max_tokens": 1}, **options),
            lambda **options: client.is_model_ready("tiny", **options),
            lambda **options: client.get_model_metadata("nothing", **options),
            lambda **options: client.get_server_metadata(**options),
        ]
        said = set()
        for ask in calls:
            for headers in (None, {"authorization": "Bearer sk-two"}):
                with pytest.raises(InferenceServerException) as refused:
                    ask(headers=headers)
                assert refused.value.status() == "StatusCode.UNAUTHENTICATED"
                said.add(refused.value.message())
        assert len(said) == 1 and "tiny" not in said.pop()
        assert client.is_model_ready("tiny", headers=key) and calls[0](headers=key)
        with pytest.raises(grpc.RpcError) as refused:
            call(server, "ModelStreamInfer", service_pb2.ModelInferRequest(), service_pb2.ModelStreamInferResponse)
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_tls(tmp_path):
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", tmp_path / "key.pem"]
    command = ["openssl", "req", "-x509", "-days", "2", "-out", tmp_path / "cert.pem", *key, *subject]
    subprocess.run(command, check=True, capture_output=True)
    with configured(tmp_path, '[tls]\ncertificate = "cert.pem"\nkey = "key.pem"') as server:
        with connect(server, ssl=True, root_certificates=str(tmp_path / "cert.pem")) as client:
            assert client.infer("tiny", [prompt()], parameters={"max_tokens": 1})
        with Stream(server, ssl=True, root_certificates=str(tmp_path / "cert.pem")) as stream:
            stream.ask("tiny", [prompt()], parameters={"max_tokens": 1})
            assert is_final(stream.answer())


def test_limits_have_clear_answers(tmp_path):
    limits = "[limits]\nrequests = 1\nbody = 65536\nheader_timeout = 0.5\nbody_timeout = 0.5\n"
    with configured(tmp_path, limits) as server, connect(server) as client, Stream(server) as stream:
        with pytest.raises(InferenceServerException, match="65536 bytes") as failed:
            client.infer("tiny", [prompt("x" * 70_000)])
        assert failed.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
        stream.ask("tiny", [prompt()], parameters=LONG | {"n": 8})
        stream.answer()
        with pytest.raises(InferenceServerException, match="1 requests are being answered") as failed:
            client.infer("tiny", [prompt()])
        assert failed.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
        stream.ask("tiny", [prompt()], request_id="second")
        until(lambda: any_error(stream, "1 requests are being answered"))
    with configured(tmp_path, limits) as server:
        # A client of HTTP/2 that says no more than that it is one.
        with socket.create_connection((server.host, server.port), timeout=HANGS) as slow:
            slow.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
            since = time.monotonic()
            while slow.recv(4096):
                pass
            assert time.monotonic() - since < 30
        with socket.create_connection((server.host, server.port), timeout=HANGS) as slow:
            slow.sendall(b"PR")
            with contextlib.suppress(ConnectionResetError):
                assert slow.recv(4096) == b""
        # One that is idle is told that its connection ends, and opens another.
        with connect(server) as client:
            assert client.is_server_live()
            time.sleep(1.5)
            assert client.is_server_live()


def any_error(stream, message):
    _, error = stream.answers.get(timeout=HANGS)
    return error and message in str(error)


def test_the_end(tmp_path):
    """What runs may end, new calls are refused, and the exit code is 0."""
    with configured(tmp_path, "[limits]\ndrain_timeout = 60\n") as server, Stream(server) as stream:
        stream.ask("tiny", [prompt()], parameters=LONG | {"n": 8})
        stream.answer()
        server.process.send_signal(signal.SIGTERM)
        with connect(server) as client:
            until(lambda: not client.is_server_ready())
            with pytest.raises(InferenceServerException, match="shutting down") as failed:
                client.infer("tiny", [prompt()])
            assert failed.value.status() == "StatusCode.UNAVAILABLE"
        ended = 0
        while ended < 8:
            ended += texts(stream.answer().as_numpy("finish_reason")) == ["length"]
        assert server.process.wait(HANGS) == 0


# ---- malformed messages ------------------------------------------------------------------------------------------


def bad(good, choose):
    """Bytes that are wrong somewhere; sometimes they are still a message."""
    body = bytearray(good)
    kind = choose.randrange(4)
    if kind == 0:
        return bytes(body[: choose.randrange(len(body))])
    if kind == 1:
        return bytes(choose.randrange(256) for _ in range(choose.randrange(300)))
    if kind == 2:
        at = choose.randrange(len(body))
        return bytes(body[:at] + body[choose.randrange(len(body)) :] + body[:at])
    for _ in range(choose.randint(1, 8)):
        body[choose.randrange(len(body))] = choose.randrange(256)
    return bytes(body)


def test_bad_messages_are_refused_by_the_hundred(server):
    choose = random.Random(3)
    parameters = {"max_tokens": service_pb2.InferParameter(int64_param=2)}
    good = service_pb2.ModelInferRequest(model_name="tiny", id="a", parameters=parameters)
    good.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    good.raw_input_contents.append(b"\5\0\0\0Hello")
    plain_one = service_pb2.ModelInferRequest(model_name="plain")
    for name in TYPES:
        plain_one.inputs.add(name=f"in_{name}", datatype=name, shape=[0, 2])
        plain_one.raw_input_contents.append(b"")
    codes, before = {}, None
    with grpc.insecure_channel(f"{server.host}:{server.port}") as channel:
        raw = {"request_serializer": bytes, "response_deserializer": bytes}
        unary = {name: channel.unary_unary(SERVICE + name, **raw)
                 for name in ("ModelInfer", "ModelMetadata", "ModelConfig", "RepositoryIndex", "Nothing")}
        stream = channel.stream_stream(SERVICE + "ModelStreamInfer", **raw)
        for turn in range(300):
            body = bad(choose.choice([good, plain_one]).SerializeToString(), choose)
            for name, ask in unary.items():
                try:
                    ask(body, timeout=HANGS)
                    code = "OK"
                except grpc.RpcError as error:
                    code = error.code().name
                    assert error.details(), name
                codes[code] = codes.get(code, 0) + 1
            for answer in stream(iter([body, good.SerializeToString()]), timeout=HANGS):
                assert answer
            before = before or (resident(server) if turn == 100 else None)
        # Eight million empty tensors.
        with pytest.raises(grpc.RpcError) as failed:
            unary["ModelInfer"](b"\x2a\0" * (6 << 20), timeout=HANGS)
        assert failed.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert set(codes) <= {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED"} and codes["INVALID_ARGUMENT"] > 300
    assert resident(server) - before < 64 << 20
    with connect(server) as client:
        assert client.infer("tiny", [prompt()], parameters={"max_tokens": 1})


def test_bad_frames_are_refused(server):
    """What is inside of HTTP/2 is not what gRPC has."""
    for head, status in [(b"", 3), (b"\0\0\0\0", 3), (b"\0\0\0\0\7abc", 3), (b"\1\0\0\0\0", 12), (b"\0\0\0\0\0x", 3)]:
        command = ["curl", "-s", "--http2-prior-knowledge", "-H", "content-type: application/grpc", "-D", "-",
                   "--data-binary", "@-", f"{server.url}{SERVICE}ServerLive"]
        done = subprocess.run(command, input=head, capture_output=True, timeout=HANGS)
        assert f"grpc-status: {status}\r\n".encode() in done.stdout, (head, done.stdout)
    status, _, answer = server.post(SERVICE + "ServerLive", b"")
    assert status == 415 and "application/grpc" in answer["error"]["message"]
