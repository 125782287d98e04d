"""`pagoda serve`: rates of keys, times to first tokens, calls of tools, and the description of the interface."""

import json
import re
from typing import Literal

import jsonschema
import openai
import pydantic
import pytest
from capi import ROOT
from serving import HANGS, LLAMA, Server
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


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"$ref": "#/$defs/days"},
        "units": {"type": "array", "items": {"enum": ["C", "F"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["city", "days", "units"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
CLOCK = {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "additionalProperties": False}
SCHEMAS = {"weather": WEATHER, "clock": CLOCK}
CALLED = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]


def streamed_calls(chunks):
    """The calls of each answer as (name, arguments, pieces of arguments), put together as OpenAI says; why each ended."""
    calls, reasons = {}, {}
    for chunk in chunks:
        for choice in chunk.choices:
            assert not choice.delta.content
            found = calls.setdefault(choice.index, [])
            for part in choice.delta.tool_calls or []:
                if part.index == len(found):
                    # The first part of a call names it.
                    assert part.id.startswith("call_") and part.type == "function"
                    found.append([part.function.name, "", 0])
                else:
                    assert part.index == len(found) - 1 and part.id is None and part.function.name is None
                found[-1][1] += part.function.arguments
                found[-1][2] += bool(part.function.arguments)
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    return calls, reasons


def test_calls_fit_their_schemas_and_stream_in_pieces(server):
    """A random model calls whatever the grammar lets it."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=HANGS)
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "tools": CALLED, "temperature": 1.5}
    ask |= {"max_tokens": 300, "n": 2, "parallel_tool_calls": False}
    named = set()
    for seed in range(4):
        fields = ask | {"tool_choice": "required", "seed": seed}
        calls, reasons = streamed_calls(client.chat.completions.create(**fields, stream=True))
        whole = client.chat.completions.create(**fields)
        assert reasons == {0: "tool_calls", 1: "tool_calls"}
        for choice in whole.choices:
            [call], [(name, arguments, pieces)] = choice.message.tool_calls, calls[choice.index]
            assert choice.finish_reason == "tool_calls" and choice.message.content is None
            assert (call.function.name, call.function.arguments) == (name, arguments)
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
            assert pieces > 1 or arguments == "{}"
            named.add(name)
    assert named == set(SCHEMAS)
    chosen = {"type": "function", "function": {"name": "clock"}}
    calls, _ = streamed_calls(client.chat.completions.create(**ask, tool_choice=chosen, stream=True))
    assert {name for found in calls.values() for name, *_ in found} == {"clock"}


def test_an_answer_may_have_several_calls(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=HANGS)
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "tools": CALLED, "tool_choice": "required"}
    most = 0
    for seed in range(8):
        chunks = client.chat.completions.create(**ask, stream=True, temperature=1.5, seed=seed, max_tokens=400)
        calls, reasons = streamed_calls(chunks)
        whole = calls[0] if reasons[0] == "tool_calls" else calls[0][:-1]
        for name, arguments, _ in whole:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
        most = max(most, len(whole))
    assert most > 1


def test_a_call_that_is_cut_says_so(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=HANGS)
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "tools": CALLED[:1], "temperature": 0}
    chosen = {"type": "function", "function": {"name": "weather"}}
    whole = client.chat.completions.create(**ask, tool_choice=chosen).choices[0]
    tokens = client.chat.completions.create(**ask, tool_choice=chosen).usage.completion_tokens
    cut = client.chat.completions.create(**ask, tool_choice=chosen, max_tokens=tokens - 24).choices[0]
    [before], [after] = whole.message.tool_calls, cut.message.tool_calls
    assert cut.finish_reason == "length" and after.function.name == "weather"
    assert before.function.arguments.startswith(after.function.arguments) and before != after


class Weather(pydantic.BaseModel):
    """The weather of a place."""

    city: str = pydantic.Field(max_length=20)
    unit: Literal["celsius", "fahrenheit"]


@pytest.fixture(scope="module")
def chat():
    """A client of SmolLM2."""
    with Server(f"chat={ROOT / 'target/models/smollm2'}", "--provider", "cpu") as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=HANGS)


def test_a_real_model_calls_a_function(chat):
    """OpenAI's own reader of streams puts the arguments together and checks them."""
    messages = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]
    ask = {"model": "chat", "messages": messages, "tools": [openai.pydantic_function_tool(Weather)], "temperature": 0}
    ask |= {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    with chat.chat.completions.stream(**ask) as stream:
        deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        answer = stream.get_final_completion().choices[0]
    [call] = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls" and call.function.name == "Weather"
    assert len(deltas) > 2 and deltas[-1].arguments == call.function.arguments
    weather = call.function.parsed_arguments
    assert isinstance(weather, Weather) and len(weather.city) <= 20


def test_text_with_strict_tools_is_free(chat):
    """A model that does not call says what it says without tools: the template of this one has no place for them."""
    ask = {"model": "chat", "messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 12}
    plain = chat.chat.completions.create(**ask, temperature=0).choices[0]
    tools = [openai.pydantic_function_tool(Weather)]
    assert tools[0]["function"]["strict"] is True
    free = chat.chat.completions.create(**ask, temperature=0, tools=tools).choices[0]
    assert (free.message.content, free.finish_reason) == (plain.message.content, plain.finish_reason)


def test_a_strict_call_that_begins_in_text_fits(chat):
    """The model says a call after its example; its name and arguments are those of the tool, whatever the example has."""
    example = '<tool_call>\n{"name": "other", "arguments": {"x": 1}}\n</tool_call>'
    messages = [{"role": "user", "content": "Call."}, {"role": "assistant", "content": example}] * 3
    ask = {"model": "chat", "messages": messages + messages[:1], "max_tokens": 80, "temperature": 0}
    tools = [openai.pydantic_function_tool(Weather)]
    without = chat.chat.completions.create(**ask).choices[0].message.content
    assert without.startswith("<tool_call>") and '"other"' in without
    call = chat.chat.completions.create(**ask, tools=tools).choices[0].message.tool_calls[0]
    assert call.function.name == "Weather"
    Weather.model_validate_json(call.function.arguments)


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
