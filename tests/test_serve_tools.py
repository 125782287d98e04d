"""`pagoda serve`: rates of keys, times to first tokens, tools that are not called, and the description of the interface."""

import json
import re

import openai
import pytest
from serving import LLAMA, Server
from test_serve_operation import configured

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
SHORT = {"model": "tiny", "prompt": "Hello", "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def server():
    with Server(f"tiny={LLAMA}", "--provider", "cpu") as server:
        yield server


# ---- rates -------------------------------------------------------------------------------------------------------


def test_a_key_may_ask_so_often_in_a_minute(tmp_path):
    (tmp_path / "keys").write_text("sk-one\nsk-two\n")
    with configured(tmp_path, 'keys_file = "keys"\n[limits]\nrequests_per_minute = 3\n') as server:
        one, two = ({"Authorization": f"Bearer sk-{name}"} for name in ("one", "two"))
        assert [server.post("/v1/completions", SHORT, one)[0] for _ in range(3)] == [200] * 3
        status, headers, answer = server.post("/v1/completions", SHORT, one)
        assert status == 429 and 1 <= int(headers["retry-after"]) <= 20
        assert "3 requests in a minute" in answer["error"]["message"]
        # The other key, and what does not compute, have nothing to do with it.
        assert server.post("/v1/completions", SHORT, two)[0] == 200
        assert server.get("/v1/models", one)[0] == 200
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="sk-one", max_retries=0)
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="tiny", prompt="a", max_tokens=1)


def test_a_key_may_use_so_many_tokens_in_a_minute(tmp_path):
    with configured(tmp_path, "[limits]\ntokens_per_minute = 50\n") as server:
        # It is not known before how many tokens a request has: the next one waits.
        assert server.post("/v1/completions", SHORT | {"max_tokens": 100})[0] == 200
        status, headers, answer = server.post("/v1/completions", SHORT)
        assert status == 429 and int(headers["retry-after"]) > 30
        assert "50 tokens in a minute" in answer["error"]["message"]


# ---- first tokens ------------------------------------------------------------------------------------------------


def test_the_time_to_the_first_token_is_counted(server):
    before = counted(server)
    for stream in (False, True):
        assert server.post("/v1/completions", SHORT | {"stream": stream, "prompt": ["a", "b"]})[0] == 200
    assert counted(server) == before + 4
    times = server.get("/v1/status")[2]["first_token_ms"]
    assert times["count"] >= 4 and 0 < times["p50"] <= times["p99"]


def counted(server):
    found = re.search(r'pagoda_http_first_token_seconds_count\{model="tiny"\} (\d+)', server.get("/metrics")[2].decode())
    return int(found[1]) if found else 0


# ---- tools -------------------------------------------------------------------------------------------------------


def test_text_that_is_no_call_stays_text(server):
    """With tools and without: the same template gives the same answer, whole and as a stream."""
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 30, "temperature": 0}
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    answer = client.chat.completions.create(**ask, tools=TOOLS).choices[0]
    assert answer.message.tool_calls is None and answer.message.content and answer.finish_reason in ("stop", "length")
    chunks = list(client.chat.completions.create(**ask, tools=TOOLS, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.message.content
    assert chunks[-1].choices[0].finish_reason == answer.finish_reason
    assert not any(chunk.choices[0].delta.tool_calls for chunk in chunks)


# ---- the interface -----------------------------------------------------------------------------------------------


def references(value):
    if isinstance(value, dict):
        yield from (inner for name, inner in value.items() if name == "$ref")
        value = value.values()
    if not isinstance(value, str) and hasattr(value, "__iter__"):
        for inner in value:
            yield from references(inner)


def test_the_interface_is_described(server):
    status, _, about = server.get("/v1/openapi.json")
    assert status == 200 and about["openapi"].startswith("3.1") and re.match(r"\d+\.\d+\.\d+", about["info"]["version"])
    for reference in references(about):
        found = about
        for name in reference.removeprefix("#/").split("/"):
            found = found[name]
    for path, methods in about["paths"].items():
        for method, operation in methods.items():
            assert operation["summary"] and operation["tags"] and "200" in operation["responses"]
            real = path.replace("{name}", "tiny").replace("{version}", "1")
            status, _, answer = server.request(method.upper(), real, "{}" if method == "post" else None)
            # There is such a path, and it takes this method.
            assert status != 405 and not (status == 404 and "unknown_path" in json.dumps(str(answer))), (path, status)
            named = set(re.findall(r"\{(\w+)\}", path))
            assert {one["name"] for one in operation.get("parameters", [])} == named, path
    for path in ("/page/api", "/page/api.js"):
        assert server.get(path)[0] == 200
