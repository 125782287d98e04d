"""`pagoda serve` under clients that do everything wrong, and many that hang up: it never crashes and nothing leaks."""

import json
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from capi import ROOT
from serving import HANGS, LLAMA, Server, until

THREE = ROOT / "tests/data/engine/three"
MESSAGES = [{"role": "user", "content": "Hello"}]
# A good request for each path; the mutations begin with them.
GOOD = {
    "/v1/completions": {"model": "tiny", "prompt": ["Hello", "a"], "max_tokens": 2, "logprobs": 1, "n": 2, "stop": "z"},
    "/v1/chat/completions": {"model": "tiny", "messages": MESSAGES, "max_tokens": 2, "logit_bias": {"7": 1}, "seed": 1},
    "/v1/rank": {
        "model": "movies",
        "user": 7,
        "user_keys": {"age": 1, "town": 1},
        "events": {"item": [1, 2], "genre": [1, 2], "rating": [1, 2], "time": [10, 20]},
        "candidates": {"item": [4, 5], "genre": [1, 2]},
        "time": 99,
    },
    "/completion": {"prompt": "Hello", "max_new_tokens": 2, "temperature": 0.5},
    "/chat": {"messages": MESSAGES, "max_new_tokens": 2},
    "/v2/models/tiny/infer": {
        "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["Hello"]}],
        "parameters": {"max_tokens": 2},
    },
    "/v2/models/movies/infer": {
        "inputs": [{"name": "user", "datatype": "INT64", "shape": [1], "data": [7]}],
        "outputs": [{"name": "scores", "parameters": {"binary_data": True}}],
    },
}
# What a value is replaced by.
ODD = [None, True, -1, 0, 2**31, 2**63, 2**64, 10**40, -(2**63), 1e308, 1e-320, 0.5, "", "x", "\x00", "\ud800", [], {}]
ODD += [[[]], {"": {}}, ["a", 1], "é" * 3000, [1] * 3000, {"a": [{"b": None}]}, "NaN"]
# Mutations of each path.
TRIES = 300


@pytest.fixture(scope="module")
def server():
    with Server(f"tiny={LLAMA}", f"movies={THREE}", "--provider", "cpu") as server:
        yield server


def places(value, path=()):
    """The paths to all values inside of a value."""
    yield path
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


def replaced(value, path, new):
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def mutated(good, choose):
    """A body that is wrong somewhere; sometimes it is still good."""
    kind = choose.randrange(4)
    if kind == 0:
        for _ in range(choose.randint(1, 3)):
            at = choose.choice([path for path in places(good) if path] or [()])
            good = replaced(good, at, choose.choice(ODD)) if at else good
        return json.dumps(good).encode(errors="surrogatepass")
    if kind == 1:
        names = [*GOOD["/v1/completions"], "stream_options", "tools", "response_format", "echo", "nothing"]
        name = choose.choice(names)
        return json.dumps({**good, name: choose.choice(ODD)}).encode(errors="surrogatepass")
    body = bytearray(json.dumps(good).encode())
    if kind == 2:
        return bytes(body[: choose.randrange(len(body))])
    for _ in range(choose.randint(1, 8)):
        body[choose.randrange(len(body))] = choose.randrange(256)
    return bytes(body)


def resident(server):
    """Bytes of memory."""
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


def metric(server, name):
    text = server.get("/metrics")[2].decode()
    return next(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + " "))


# ---- malformed requests ------------------------------------------------------------------------------------------


def test_bodies_that_are_wrong_are_refused_by_the_thousand(server):
    choose = random.Random(7)
    for path, good in GOOD.items():
        status, _, answer = server.post(path, good)
        assert status in (200, 400), answer
    connection, statuses, before = server.connect(), {}, None
    for turn in range(TRIES):
        for path, good in GOOD.items():
            body = mutated(good, choose)
            connection.request("POST", path, body)
            response = connection.getresponse()
            answer = response.read()
            statuses[response.status] = statuses.get(response.status, 0) + 1
            assert response.status in (200, 400, 404), (path, body, response.status, answer)
            if response.status != 200:
                error = json.loads(answer)["error"]
                assert error if path.startswith("/v2") else error["message"], (path, body)
        # What is allocated once is there after a part of them.
        before = before or (resident(server) if turn == TRIES // 3 else None)
    connection.close()
    assert statuses[400] > TRIES, statuses
    assert resident(server) - before < 32 << 20, statuses
    assert server.post("/v1/completions", GOOD["/v1/completions"])[0] == 200


def test_broken_http_is_refused(server):
    """Requests that are no HTTP, or are cut: an error or the end of the connection, and never a hang."""
    choose = random.Random(3)
    text = json.dumps(GOOD["/v1/completions"])
    good = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()
    chunked = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    odd = [b"\0" * 100, b"GET / HTTP/9.9\r\n\r\n"]
    # HTTP/2 that begins well, and badly.
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    odd += [preface, preface[:20], preface.replace(b"SM", b"XY"), preface + b"\0" * 50, preface + b"\xff" * 50]
    odd += [chunked + b"zz\r\n", chunked + b"5\r\nab", chunked + b"ffffffffffffffff\r\n"]
    odd += [b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20_000 + b"\r\n"]
    odd += [good.replace(b"Content-Length: ", b"Content-Length: -"), good.replace(b"HTTP/1.1", b"HTTP/1.1\xff\xff")]
    odd += [b"POST /v1/rank HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n"]
    for _ in range(200):
        broken = bytearray(good)
        for _ in range(choose.randint(1, 6)):
            broken[choose.randrange(len(good) - len(text))] = choose.randrange(256)
        odd.append(bytes(broken[: choose.randint(1, len(broken))]))

    def send(request):
        with socket.create_connection((server.host, server.port), timeout=HANGS) as connection:
            try:
                connection.sendall(request)
                connection.shutdown(socket.SHUT_WR)
                answer = connection.recv(1 << 16)
            except OSError as error:
                # The server has closed the connection already. A time-out would be a hang.
                assert not isinstance(error, TimeoutError), request[:200]
                answer = b""
        # Settings are the first that a client of HTTP/2 gets, whatever it sends.
        expected = (b"HTTP/1.1 ", b"HTTP/1.0 ") if not request.startswith(b"PRI") else b"\0\0"
        assert answer == b"" or answer.startswith(expected), (request[:200], answer)

    # Some of them are cut, and the server waits for the rest as long as it waits for any.
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(send, odd))
    assert server.get("/health")[0] == 200
    assert until(lambda: metric(server, "pagoda_http_requests_in_flight") == 1)


def test_long_prompts_do_not_stop_the_others(server):
    """A megabyte takes seconds to become tokens: meanwhile the server answers, though such prompts come on more connections than it has cores."""
    body = json.dumps({"model": "tiny", "prompt": "Hello, world! " * 100_000, "max_tokens": 1})
    statuses = []
    threads = [threading.Thread(target=lambda: statuses.append(server.post("/v1/completions", body)[0])) for _ in range(8)]
    for thread in threads:
        thread.start()
    answered = 0
    while any(thread.is_alive() for thread in threads):
        answered += server.get("/health")[0] == 200
    assert statuses == [400] * 8 and answered > 30


# ---- many clients ------------------------------------------------------------------------------------------------


def test_many_streams_of_which_a_tenth_hangs_up(server):
    """64 clients, 20 streams each: those that stay get what they get alone, and all pages come back."""
    clients, streams, kinds = 64, 20, 8

    def body(seed):
        return {"model": "tiny", "prompt": f"Hello {seed}", "max_tokens": 12, "temperature": 1, "seed": seed}

    def text(seed):
        return server.post("/v1/completions", body(seed))[2]["choices"][0]["text"]

    expected = [text(seed) for seed in range(kinds)]
    wrong, left = [], []

    def client(number):
        choose = random.Random(number)
        connection = server.connect()
        for _ in range(streams):
            seed = choose.randrange(kinds)
            connection.request("POST", "/v1/completions", json.dumps(body(seed) | {"stream": True}))
            response = connection.getresponse()
            if choose.random() < 0.1:
                response.fp.readline()
                response.close()
                connection.close()
                connection = server.connect()
                left.append(seed)
                continue
            lines = [line[len("data: ") :] for line in response.read().decode().split("\n\n") if line]
            said = "".join(json.loads(line)["choices"][0]["text"] for line in lines if line != "[DONE]")
            if (response.status, said, lines[-1]) != (200, expected[seed], "[DONE]"):
                wrong.append((response.status, seed, said))
        connection.close()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS)
    assert not any(thread.is_alive() for thread in threads) and wrong == [] and left
    assert until(lambda: metric(server, 'pagoda_http_model_running{model="tiny"}') == 0 or None)
    assert until(lambda: metric(server, "pagoda_http_requests_in_flight") == 1)
    # What stays is the cache of prefixes: the same clients again take no more.
    used = metric(server, 'pagoda_http_model_pages{model="tiny",state="used"}')
    for seed in range(kinds):
        assert text(seed) == expected[seed]
    assert until(lambda: metric(server, 'pagoda_http_model_waiting{model="tiny"}') == 0 or None)
    assert metric(server, 'pagoda_http_model_pages{model="tiny",state="used"}') <= used + kinds
    open_files = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
    assert open_files < 100, f"{open_files} open files"
