"""`pagoda serve`: rankers in JSON as `pagoda rank` answers them, the names of older servers, and metrics."""

import contextlib
import json
import socket
import subprocess
import threading

import pytest
from capi import ROOT
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from serving import COMMAND, HANGS, LLAMA, Server, until

THREE = ROOT / "tests/data/engine/three"
# Its tables are in files of their own.
BAG = ROOT / "tests/data/engine/bag"


@pytest.fixture(scope="module")
def server():
    with Server(f"tiny={LLAMA}", f"movies={THREE}", "--provider", "cpu") as server:
        yield server


@pytest.fixture(scope="module")
def asked():
    """A request that the model takes, with as many features as it has."""
    features = json.loads((THREE / "pagoda.json").read_text())["features"]
    of = {
        kind: [feature["name"] for feature in features if feature["source"] == kind]
        for kind in ("user", "item", "action")
    }
    events = {name: [1, 2, 3] for name in of["item"] + of["action"]} | {"time": [10, 20, 30]}
    request = {"user": 7, "events": events, "candidates": {name: [4, 5, 6, 1] for name in of["item"]}, "time": 99}
    return request | ({"user_keys": {name: 1 for name in of["user"]}} if of["user"] else {})


# ---- ranking -----------------------------------------------------------------------------------------------------


def test_an_answer_is_a_line_of_the_command(server, asked):
    command = [COMMAND, "rank", THREE, "--json", "--top", "3"]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, timeout=HANGS)
    expected = json.loads(done.stdout)
    status, _, answer = server.post("/v1/rank", asked | {"top": 3})
    assert status == 200, answer
    assert set(expected) - set(answer) == {"line"} and set(answer) <= set(expected)
    assert answer["top"] == expected["top"] and answer["candidates"] == 4
    assert answer["cached_rows"] == 0 and answer["computed_rows"] == expected["computed_rows"]
    again = server.post("/v1/rank", asked | {"top": 3, "model": "movies"})[2]
    assert again["cached_rows"] > 0 and [place["index"] for place in again["top"][next(iter(again["top"]))]]


def test_many_users_at_once(server, asked):
    alone = {user: server.post("/v1/rank", asked | {"user": user, "top": 0})[2]["top"] for user in range(100, 108)}
    found = {}

    def ask(user):
        found[user] = server.post("/v1/rank", asked | {"user": user, "top": 0})[2]["top"]

    threads = [threading.Thread(target=ask, args=(user,)) for user in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS)
    for user, top in alone.items():
        for task, places in top.items():
            order = {place["index"]: place["score"] for place in found[user][task]}
            assert order == pytest.approx({place["index"]: place["score"] for place in places}, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"user": -1}, 400, "user: -1 is not a whole number"),
        ({"candidates": None}, 400, "candidates"),
        ({"usr": 1}, 400, "usr: no such field; did you mean `user`?"),
        ({"model": "tiny"}, 400, "model: tiny does not rank"),
        ({"model": "other"}, 404, "no model is named"),
        ({"top": -1}, 400, "top: -1"),
    ],
)
def test_what_is_wrong_is_said(server, asked, change, status, message):
    found, _, answer = server.post("/v1/rank", asked | change)
    assert found == status and answer["error"]["message"].startswith(message), answer


def test_a_ranker_does_not_generate(server):
    status, _, answer = server.post("/v1/completions", {"model": "movies", "prompt": "a"})
    assert status == 400 and "movies does not generate text" in answer["error"]["message"]


# ---- older names -------------------------------------------------------------------------------------------------


def events(server, path, body):
    data = server.post(path, body | {"stream": True})[2].decode()
    lines = [line[len("data: ") :] for line in data.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_the_names_of_older_servers(server):
    assert server.get("/ping")[0::2] == (200, {"status": "Healthy"})
    assert server.get("/engine_check")[0::2] == (200, {"status": "Running"})
    body = {"prompt": "Hello", "max_new_tokens": 20, "temperature": 0}
    status, _, answer = server.post("/completion", body)
    assert status == 200 and set(answer) == {"request_id", "text"}
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_new_tokens": 20, "seed": 3}
    status, _, said = server.post("/chat", chat)
    assert status == 200 and set(said) == {"role", "text"} and said["role"] == "assistant"
    parts = events(server, "/completion", body)
    assert "".join(part["text"] for part in parts) == answer["text"]
    assert len({part["request_id"] for part in parts}) == 1
    parts = events(server, "/chat", chat)
    assert "".join(part["text"] for part in parts) == said["text"] and parts[0]["role"] == "assistant"
    several = server.post("/chat", chat | {"n": 2})[2]
    assert [answer["role"] for answer in several] == ["assistant"] * 2
    echoed = server.post("/completion", body | {"echo": True})[2]
    assert echoed["text"].startswith("Hello") and echoed["text"].endswith(answer["text"])
    for path, wrong in [("/chat", body), ("/completion", chat), ("/completion", {"prompt": 1}), ("/chat", {})]:
        status, _, answer = server.post(path, wrong)
        assert status == 400 and answer["error"]["message"]


# ---- metrics -----------------------------------------------------------------------------------------------------


def metrics(server):
    """The values of /metrics by name and labels; the text is checked on the way."""
    status, headers, data = server.get("/metrics")
    text = data.decode()
    # Prometheus's own reader of the format: names, types, units, labels, buckets, order.
    assert list(text_string_to_metric_families(text))
    assert status == 200 and headers["content-type"].startswith("application/openmetrics-text")
    assert text.endswith("# EOF\n") and text.count("# EOF") == 1
    types, values = {}, {}
    for line in text.splitlines()[:-1]:
        if line.startswith("# TYPE "):
            name, kind = line[len("# TYPE ") :].split()
            assert name not in types
            types[name] = kind
        elif not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            assert name not in values
            values[name] = float(value)
    assert {"pagoda_http_requests", "pagoda_http_request_seconds", "pagoda_generator_tokens"} <= set(types)
    return values


def test_metrics_count_requests_and_models(server, asked):
    name = 'pagoda_http_requests_total{path="/v1/rank",status="200"}'
    before = metrics(server).get(name, 0)
    server.post("/v1/rank", asked)
    server.get("/no/such/path")
    after = until(lambda: (found := metrics(server))[name] == before + 1 and found)
    assert after['pagoda_http_requests_total{path="other",status="404"}'] >= 1
    assert after['pagoda_http_request_seconds_count{path="/v1/rank"}'] >= before + 1
    assert after["pagoda_http_requests_in_flight"] == 1
    for model in ("tiny", "movies"):
        assert after[f'pagoda_http_model_pages{{model="{model}",state="free"}}'] > 0
        assert after[f'pagoda_http_model_waiting{{model="{model}"}}'] == 0


def test_a_client_that_hangs_up_cancels_its_request(server):
    cancelled = 'pagoda_generator_answers_total{kind="cancelled"}'
    generated = 'pagoda_generator_tokens_total{kind="generated"}'
    for stream in [True, False]:
        before = metrics(server)
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 400, "ignore_eos": True, "n": 32, "stream": stream}
        text = json.dumps(body)
        with socket.create_connection((server.host, server.port)) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n"
            connection.sendall((head + text).encode())
            if stream:
                assert b"200 OK" in connection.recv(100)
            else:
                until(lambda: metrics(server)['pagoda_http_model_running{model="tiny"}'] == 32)
        after = until(lambda: (found := metrics(server)).get(cancelled, 0) >= before.get(cancelled, 0) + 32 and found)
        assert after[generated] - before.get(generated, 0) < 32 * 400
        assert until(lambda: metrics(server)['pagoda_http_model_running{model="tiny"}'] == 0 or None)
        assert until(lambda: metrics(server)["pagoda_http_requests_in_flight"] == 1)


def test_tiers_under_the_pool_are_shown(tmp_path):
    """What a session leaves on disk is counted, and the page's figures are those of /metrics."""
    options = ["--host-cache", "16MiB", "--store", tmp_path / "store"]
    with Server(f"tiny={LLAMA}", "--provider", "cpu", *options) as server:

        def used():
            [model] = server.get("/v1/status")[2]["models"]
            tiers = {tier["name"]: tier for tier in model["kv"]["tiers"]}
            assert list(tiers) == ["host", "disk"] and tiers["host"]["bytes"] == 16 << 20 and tiers["disk"]["bytes"] == 0
            return {name: tier["used"] for name, tier in tiers.items()}

        assert used() == {"host": 0, "disk": 0}
        ask = {"model": "tiny", "prompt": "Hello " * 20, "max_tokens": 20, "session": "s"}
        assert server.post("/v1/completions", ask)[0] == 200
        after = until(lambda: (found := used())["disk"] > 0 and found)
        values = metrics(server)
        for name, bytes_ in after.items():
            assert values[f'pagoda_http_model_tier_bytes{{model="tiny",tier="{name}"}}'] == bytes_


# ---- replicas ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def redis(folder, password):
    """A Redis Cluster of one node. Its port, and what asks it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1] % 50_000 + 5_000
    options = ["--port", port, "--cluster-enabled", "yes", "--save", "", "--appendonly", "no", "--requirepass", password]
    process = subprocess.Popen(["redis-server", *map(str, options)], cwd=folder, stdout=subprocess.DEVNULL)

    def ask(*words):
        command = ["redis-cli", "-p", str(port), "--no-auth-warning", "-a", password, *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, timeout=HANGS).stdout

    try:
        until(lambda: "OK" in ask("cluster", "addslotsrange", 0, 16383))
        until(lambda: "cluster_state:ok" in ask("cluster", "info"))
        yield port, ask
    finally:
        process.kill()
        process.wait(HANGS)


def test_replicas_share_tables_in_redis(tmp_path, monkeypatch):
    """A ranker's embedding rows are in a cluster, which two servers read; scores are those of a server with all rows in memory."""
    case = json.loads(BAG.with_suffix(".json").read_text())[0]
    line = {
        "user": 7,
        "user_keys": case["keys"],
        "events": case["events"] | {"time": case["times"]},
        "candidates": case["candidates"],
        "time": case["now"],
        "top": 0,
    }
    monkeypatch.setenv("TEST_REDIS", "secret-of-redis")
    with redis(tmp_path, "secret-of-redis") as (port, ask):
        shared = f'redis = {{ nodes = ["127.0.0.1:{port}"], password_variable = "TEST_REDIS" }}\n'
        answers = []
        for more in ["", shared, shared]:
            (tmp_path / "serve.toml").write_text(f'[[model]]\nname = "bag"\npath = "{BAG}"\nprovider = "cpu"\n{more}')
            with Server("--config", tmp_path / "serve.toml") as server:
                status, _, answer = server.post("/v1/rank", line)
                assert status == 200, answer
                answers.append(answer["top"])
                server.stop()
                assert "secret-of-redis" not in "".join(server.errors)
            assert (int(ask("dbsize")) > 0) == bool(more)
        assert answers[0] == answers[1] == answers[2]
