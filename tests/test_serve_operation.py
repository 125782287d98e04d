"""`pagoda serve` in operation: keys, TLS, limits with clear answers, logs, and an end that cuts no request short."""

import contextlib
import http.client
import json
import resource
import signal
import socket
import ssl
import subprocess
import threading
import time

import openai
import pytest
from serving import HANGS, LLAMA, Server, until

LONG = {"model": "tiny", "prompt": "Hello", "max_tokens": 490, "ignore_eos": True}


def configured(tmp_path, text):
    file = tmp_path / "serve.toml"
    file.write_text(text + f'\n[[model]]\nname = "tiny"\npath = "{LLAMA}"\nprovider = "cpu"\n')
    return Server("--config", file)


class Stream:
    """A streamed completion whose lines a thread reads."""

    def __init__(self, server, **fields):
        self.lines, self.begun = [], threading.Event()
        self.thread = threading.Thread(target=self.read, args=(server, LONG | {"stream": True} | fields))
        self.thread.start()
        assert self.begun.wait(HANGS)

    def read(self, server, body):
        connection = server.connect()
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        self.status, self.retry_after = response.status, response.headers["retry-after"]
        try:
            for line in response:
                self.begun.set()
                if line.startswith(b"data: "):
                    self.lines.append(line[len(b"data: ") :].strip())
        except (ConnectionError, http.client.HTTPException):
            self.lines.append(b"the server went away")
        self.begun.set()
        connection.close()

    def finish_reasons(self):
        self.thread.join(HANGS)
        assert self.lines[-1] == b"[DONE]"
        chunks = [json.loads(line) for line in self.lines[:-1]]
        return [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]

    def tokens(self):
        return len(self.lines) - 1


# ---- keys --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["file", "variable"])
def test_without_a_key_nothing_is_said(tmp_path, monkeypatch, source):
    if source == "file":
        (tmp_path / "keys").write_text("# of tests\nsk-test-one\nsk-test-two\n")
        setting = 'keys_file = "keys"'
    else:
        monkeypatch.setenv("TEST_KEYS", "sk-test-one, sk-test-two")
        setting = 'keys_variable = "TEST_KEYS"'
    with configured(tmp_path, setting) as server:
        answers = set()
        for headers in [{}, {"Authorization": "Bearer sk-test-three"}, {"Authorization": "Bearer sk-test-on"}]:
            for path in ["/v1/models", "/v1/models/tiny", "/v1/models/other", "/nothing"]:
                status, sent, answer = server.get(path, headers)
                assert (status, sent["www-authenticate"]) == (401, "Bearer")
                answers.add(json.dumps(answer))
            assert server.post("/v1/completions", LONG, headers)[0] == 401
        # The same words for all: nothing about what is there.
        assert len(answers) == 1 and "tiny" not in answers.pop()
        assert server.get("/health")[0] == 200
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="sk-test-two", max_retries=0)
        assert client.models.list().data[0].id == "tiny"
        with pytest.raises(openai.AuthenticationError) as error:
            client.with_options(api_key="sk-wrong").models.list()
        assert error.value.code == "invalid_api_key"
        server.stop()
        log = "".join(server.errors)
        assert "/v1/models: 401" in log and "sk-" not in log


def test_keys_that_can_not_be_had_end_the_start(tmp_path):
    for text, message in [
        ('keys_file = "nowhere"', "nowhere can not be read"),
        ('keys_variable = "NO_SUCH_KEYS"', "the variable NO_SUCH_KEYS is not set"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            configured(tmp_path, text)


def test_a_refused_request_is_read_to_its_end(tmp_path):
    """Clients that send their whole body first get the answer, not a broken pipe, and their connection stays."""
    (tmp_path / "keys").write_text("sk-one\n")
    with configured(tmp_path, 'keys_file = "keys"\n[limits]\nbody = "4MiB"\n') as server:
        key = {"Authorization": "Bearer sk-one"}
        connection = server.connect()
        for size, headers, expected in [(3 << 20, {}, 401), (6 << 20, key, 413), (3 << 20, {}, 401), (10, key, 400)]:
            connection.request("POST", "/v1/completions", b"x" * size, headers)
            first = connection.sock
            response = connection.getresponse()
            response.read()
            assert response.status == expected and connection.sock is first is not None
        # One whose body has no meaning.
        for _ in range(3):
            connection.request("POST", "/v2/repository/index", b"x" * (1 << 20), key)
            response = connection.getresponse()
            assert (response.status, connection.sock is first) == (200, True) and response.read()
        # One that waits for a word before it sends is refused at once.
        command = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code} %{size_upload}", "-H", "Expect: 100-continue",
                   "--data-binary", f"@{LLAMA}/model.onnx", f"{server.url}/v1/completions"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
        assert done.stdout == "401 0"


# ---- TLS and web pages -------------------------------------------------------------------------------------------


def test_tls(tmp_path):
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", tmp_path / "key.pem"]
    command = ["openssl", "req", "-x509", "-days", "2", "-out", tmp_path / "cert.pem", *key, *subject]
    subprocess.run(command, check=True, capture_output=True)
    with configured(tmp_path, '[tls]\ncertificate = "cert.pem"\nkey = "key.pem"') as server:
        assert server.line.startswith("listening on https://127.0.0.1:")
        trust = ssl.create_default_context(cafile=tmp_path / "cert.pem")

        def connect():
            return trust.wrap_socket(socket.create_connection((server.host, server.port)), server_hostname="127.0.0.1")

        with connect() as tls:
            tls.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            answer = b"".join(iter(lambda: tls.recv(4096), b""))
            assert answer.startswith(b"HTTP/1.1 200 OK") and tls.version() == "TLSv1.3"
        # Plain HTTP, and nothing at all, harm no other.
        with socket.create_connection((server.host, server.port)) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert not plain.recv(4096).startswith(b"HTTP")
        with connect() as tls:
            tls.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert tls.recv(4096).startswith(b"HTTP/1.1 200 OK")
    (tmp_path / "key.pem").write_text("no key")
    with pytest.raises(RuntimeError, match="tls.key: .*key.pem is not a private key in PEM"):
        configured(tmp_path, '[tls]\ncertificate = "cert.pem"\nkey = "key.pem"')


def test_pages_of_other_origins_may_ask_only_if_named(tmp_path):
    ask = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    with configured(tmp_path, "") as server:
        status, headers, _ = server.request("OPTIONS", "/v1/completions", headers=ask)
        assert status == 405 and "access-control-allow-origin" not in headers
        assert "access-control-allow-origin" not in server.get("/health", ask)[1]
    with configured(tmp_path, 'cors = ["https://app.example"]') as server:
        status, headers, _ = server.request("OPTIONS", "/v1/completions", headers=ask)
        assert (status, headers["access-control-allow-origin"]) == (204, "https://app.example")
        assert server.get("/health", ask)[1]["access-control-allow-origin"] == "https://app.example"
        other = {"Origin": "https://other.example"}
        assert "access-control-allow-origin" not in server.get("/health", other)[1]


def test_a_page_of_another_origin_changes_nothing(tmp_path):
    """Browsers send such a request without asking before, if its body is plain text."""
    control = "repository_control = true\n"
    foreign = {"Origin": "http://evil.example", "Content-Type": "text/plain"}
    with configured(tmp_path, control) as server:
        own = {"Origin": server.url, "Sec-Fetch-Site": "same-origin"}
        for headers in [foreign, foreign | {"Sec-Fetch-Site": "cross-site"}, own | {"Sec-Fetch-Site": "same-site"}]:
            for path in ["/v2/repository/models/tiny/unload", "/v1/completions", "/v1/rank"]:
                status, _, answer = server.post(path, "{}", headers)
                assert status == 403 and "cors" in json.dumps(answer)
        assert server.get("/v1/models")[2]["data"][0]["id"] == "tiny"
        assert server.post("/v1/completions", LONG | {"max_tokens": 1}, own)[0] == 200
    with configured(tmp_path, control + 'cors = ["http://evil.example"]\n') as server:
        assert server.post("/v2/repository/models/tiny/unload", "{}", foreign)[0] == 200


# ---- limits ------------------------------------------------------------------------------------------------------


def test_slow_clients_are_cut(tmp_path):
    with configured(tmp_path, "[limits]\nheader_timeout = 0.5\nbody_timeout = 0.5\n") as server:
        address = (server.host, server.port)
        for begun in [b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"]:
            with socket.create_connection(address, timeout=HANGS) as slow:
                slow.sendall(begun)
                since = time.monotonic()
                answer = slow.recv(4096)
                assert not answer.startswith(b"HTTP/1.1 200") and time.monotonic() - since < 20
        with socket.create_connection(address, timeout=HANGS) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            assert slow.recv(4096).startswith(b"HTTP/1.1 408 ")
        # A connection that is used again is cut if it is idle.
        with socket.create_connection(address, timeout=HANGS) as idle:
            idle.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert idle.recv(4096).startswith(b"HTTP/1.1 200 OK")
            assert until(lambda: idle.recv(4096) == b"")
        assert server.get("/health")[0] == 200


def test_clients_that_read_nothing_are_cut(tmp_path):
    """The socket stays open, and takes nothing more: the request ends all the same, and others have its place."""
    with configured(tmp_path, "[limits]\nwrite_timeout = 0.5\nrequests = 1\n") as server:
        body = json.dumps(LONG | {"stream": True, "n": 32, "logprobs": 20})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect((server.host, server.port))
            slow.sendall((head + body).encode())
            assert slow.recv(100).startswith(b"HTTP/1.1 200 OK")
            until(lambda: server.post("/v1/completions", LONG | {"max_tokens": 1})[0] == 200)
        until(lambda: "the client went away" in "".join(server.errors))
        # One that reads slowly gets all.
        with socket.create_connection((server.host, server.port), timeout=HANGS) as slow:
            slow.sendall((head.replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n") + body).encode())
            answer = bytearray()
            while part := slow.recv(1 << 20):
                answer += part
                time.sleep(0.01)
            assert b"data: [DONE]" in answer[-100:]


def test_too_many_requests_are_told_to_come_again(tmp_path):
    with configured(tmp_path, "[limits]\nrequests = 2\n") as server:
        streams = [Stream(server) for _ in range(2)]
        third = Stream(server)
        third.thread.join(HANGS)
        assert (third.status, third.retry_after) == (429, "1")
        # What tells about the server is answered all the same.
        assert server.get("/v1/models")[0] == 200
        assert [stream.finish_reasons() for stream in streams] == [["length"], ["length"]]
        assert Stream(server, max_tokens=1).finish_reasons() == ["length"]


def test_a_full_queue_is_told(tmp_path):
    file = tmp_path / "serve.toml"
    file.write_text(f'[[model]]\nname = "tiny"\npath = "{LLAMA}"\nprovider = "cpu"\nmax_batch = 1\nqueue = 1\n')
    with Server("--config", file) as server:
        streams = [Stream(server)]
        statuses = []

        def ask():
            statuses.append(server.post("/v1/completions", LONG)[0::2])

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANGS)
        assert streams[0].finish_reasons() == ["length"]
        refused = [answer for status, answer in statuses if status == 429]
        assert refused and all(answer["error"]["code"] == "rate_limit_exceeded" for answer in refused)
        assert all(status in (200, 429) for status, _ in statuses)


def test_connections_have_files(tmp_path):
    """The usual limit of open files is lower than that of connections: the server raises it as far as it may."""
    file = tmp_path / "serve.toml"
    file.write_text(f'[limits]\nconnections = 900\n[[model]]\npath = "{LLAMA}"\nprovider = "cpu"\n')
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        server = Server("--config", file)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    with server, contextlib.ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(socket.create_connection((server.host, server.port), timeout=HANGS))
        assert server.get("/health")[0] == 200
        assert "no connection can be accepted" not in "".join(server.errors)


# ---- logs --------------------------------------------------------------------------------------------------------


def test_lines_of_the_log_have_the_id_of_the_request():
    with Server(f"tiny={LLAMA}", "--provider", "cpu", "--log", "json") as server:
        _, headers, _ = server.post("/v1/completions", LONG | {"max_tokens": 1})
        server.get("/health?secret=1", {"X-Request-Id": "mine"})
        server.stop()
    lines = [json.loads(line) for line in server.errors]
    by_id = {line["request_id"]: line for line in lines if line["target"] == "request"}
    assert by_id["mine"]["path"] == "/health" and by_id["mine"]["status"] == 200
    line = by_id[headers["x-request-id"]]
    assert (line["method"], line["path"], line["complete"]) == ("POST", "/v1/completions", True) and line["ms"] > 0
    assert all(line["time"].endswith("Z") and line["level"] for line in lines)


# ---- the end -----------------------------------------------------------------------------------------------------


def test_requests_that_run_may_end_and_new_ones_are_refused(tmp_path):
    with configured(tmp_path, "") as server:
        streams = [Stream(server), Stream(server, n=2)]
        waiting = server.connect()
        waiting.request("GET", "/health")
        waiting.getresponse().read()
        server.process.send_signal(signal.SIGTERM)
        assert until(lambda: server.get("/health")[0] == 503)
        assert server.get("/health")[2] == {"status": "ending"}
        status, headers, answer = server.post("/v1/completions", LONG)
        assert (status, headers["retry-after"], answer["error"]["code"]) == (503, "1", "shutting_down")
        assert [stream.finish_reasons() for stream in streams] == [["length"], ["length", "length"]]
        assert server.process.wait(HANGS) == 0
        waiting.close()


def test_requests_are_cut_at_the_deadline_with_a_last_event(tmp_path):
    with configured(tmp_path, "[limits]\ndrain_timeout = 0.05\n") as server:
        stream = Stream(server, n=16)
        server.process.send_signal(signal.SIGTERM)
        assert stream.finish_reasons() == ["length"] * 16
        assert stream.tokens() < 16 * 490
        assert server.process.wait(HANGS) == 0
        server.stop()
        assert "1 requests are cut" in "".join(server.errors)


def test_a_second_signal_ends_at_once(tmp_path):
    with configured(tmp_path, "[limits]\ndrain_timeout = 600\n") as server:
        stream = Stream(server, n=64)
        server.process.send_signal(signal.SIGTERM)
        assert until(lambda: "ending" in "".join(server.errors))
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(HANGS) == 143
        stream.thread.join(HANGS)
        assert stream.lines[-1] != b"[DONE]"
