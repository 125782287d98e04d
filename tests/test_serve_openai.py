"""`pagoda serve` with OpenAI's own client: answers are those of `pagoda generate`, errors have OpenAI's shape.

The tiny model has random weights and tokens of one byte: what it says means nothing, but is always the same."""

import json
import math
import shutil
import signal
import socket
import subprocess
import threading
import time

import openai
import pytest
from capi import ROOT
from pagoda.export import export_language_model
from serving import COMMAND, HANGS, LLAMA, Server, until
from tokenizers import Tokenizer

MESSAGES = [{"role": "user", "content": "Hello the world"}]


@pytest.fixture(scope="module")
def server():
    with Server(f"tiny={LLAMA}", "--provider", "cpu") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=HANGS)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(LLAMA / "tokenizer.json"))


def generate(request, *arguments):
    """What the command answers."""
    command = [COMMAND, "generate", LLAMA, "--provider", "cpu", "--json", "--requests", "-", *arguments]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


# ---- what is served ----------------------------------------------------------------------------------------------


def test_the_first_line_says_where_and_what(server):
    assert server.line.startswith(f"listening on {server.url}, serving tiny (generate)")
    assert server.get("/health")[0::2] == (200, {"status": "ready"})


def test_models_are_listed(client):
    [model] = client.models.list().data
    assert (model.id, model.object, model.kind, model.max_context) == ("tiny", "model", "generate", 512)
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("tony")
    assert error.value.code == "model_not_found" and "did you mean `tiny`?" in str(error.value)


# ---- completions -------------------------------------------------------------------------------------------------


def test_a_completion_is_what_the_command_says(client):
    answer = client.completions.create(model="tiny", prompt="Hello the", max_tokens=24, temperature=0)
    expected = generate({"prompt": "Hello the", "max_new_tokens": 24, "temperature": 0})
    [choice], [other] = answer.choices, expected["choices"]
    assert (choice.index, choice.text, choice.finish_reason) == (0, other["text"], other["finish_reason"])
    assert answer.usage.prompt_tokens == expected["usage"]["prompt_tokens"]
    assert answer.usage.completion_tokens == len(other["tokens"])
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.object == "text_completion" and answer.model == "tiny" and answer.id.startswith("cmpl-")
    # OpenAI's default.
    answer = client.completions.create(model="tiny", prompt="a", extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16


def test_every_field_reaches_the_generator(client):
    """A seed gives the same tokens only if all fields are the same."""
    fields = {"temperature": 1.5, "top_p": 0.8, "seed": 7, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    fields |= {"stop": ["zz"], "logit_bias": {"70": 3}}
    own = {"top_k": 50, "min_p": 0.001, "repetition_penalty": 1.1, "no_repeat_ngram_size": 2, "min_new_tokens": 4}
    expected = generate({"prompt": "Hello", "max_new_tokens": 40, "n": 3} | fields | own)
    answer = client.completions.create(model="tiny", prompt="Hello", max_tokens=40, n=3, extra_body=own, **fields)
    assert [choice.text for choice in answer.choices] == [choice["text"] for choice in expected["choices"]]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) == 3


def test_prompts_may_be_many_and_tokens(client, tokenizer):
    texts = ["Hello", "the world", "pages"]
    alone = [client.completions.create(model="tiny", prompt=text, temperature=0).choices[0].text for text in texts]
    for prompt in [texts, [tokenizer.encode(text).ids for text in texts]]:
        answer = client.completions.create(model="tiny", prompt=prompt, temperature=0, n=2)
        assert [choice.text for choice in answer.choices] == [text for text in alone for _ in range(2)]
        assert answer.usage.prompt_tokens == sum(len(tokenizer.encode(text).ids) for text in texts)


@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_adds_up_to_the_answer(client, echo):
    fields = {"model": "tiny", "prompt": ["Hello", "é the"], "max_tokens": 30, "temperature": 1, "seed": 3, "n": 2}
    fields |= {"echo": echo}
    whole = client.completions.create(**fields)
    texts, ends, usage = [""] * 4, [None] * 4, None
    stream = client.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    for chunk in stream:
        assert usage is None, "something follows the usage"
        usage = chunk.usage
        for choice in chunk.choices:
            assert ends[choice.index] is None
            texts[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_a_stop_text_is_not_in_the_answer(client):
    whole = client.completions.create(model="tiny", prompt="Hello", max_tokens=60, temperature=0).choices[0]
    stop = whole.text[10:13]
    cut = client.completions.create(model="tiny", prompt="Hello", max_tokens=60, temperature=0, stop=stop).choices[0]
    assert (cut.text, cut.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")


def test_log_probabilities_of_a_completion(client, tokenizer):
    fields = {"model": "tiny", "prompt": "Hello", "max_tokens": 12, "temperature": 0, "logprobs": 3}
    answer = client.completions.create(**fields, echo=True)
    same = {"prompt": "Hello", "max_new_tokens": 12, "temperature": 0, "logprobs": 3, "prompt_logprobs": 3}
    expected = generate(same)
    found = answer.choices[0].logprobs
    theirs = expected["prompt_logprobs"] + expected["choices"][0]["logprobs"]
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    for at, other in list(enumerate(theirs))[1:]:
        assert found.tokens[at] == other["text"]
        assert found.token_logprobs[at] == pytest.approx(other["logprob"], abs=1e-4)
        top = {}
        for likely in other["top"]:
            top.setdefault(likely["text"], pytest.approx(likely["logprob"], abs=1e-4))
        assert found.top_logprobs[at] == top
    lengths = [len(token) for token in found.tokens]
    assert found.text_offset == [sum(lengths[:at]) for at in range(len(lengths))]
    streamed = [chunk.choices[0].logprobs for chunk in client.completions.create(**fields, stream=True)]
    tokens = [token for chunk in streamed if chunk for token in chunk.tokens]
    assert tokens == found.tokens[len(expected["prompt_logprobs"]) :]


# ---- chats -------------------------------------------------------------------------------------------------------


def test_a_chat_is_what_the_command_says(client):
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=24, temperature=0)
    expected = generate({"messages": MESSAGES, "max_new_tokens": 24, "temperature": 0})
    [choice], [other] = answer.choices, expected["choices"]
    assert (choice.message.role, choice.message.content) == ("assistant", other["text"])
    assert choice.finish_reason == other["finish_reason"]
    assert answer.usage.prompt_tokens == expected["usage"]["prompt_tokens"]
    parts = [{"role": "user", "content": [{"type": "text", "text": part} for part in ["Hello ", "the world"]]}]
    again = client.chat.completions.create(model="tiny", messages=parts, max_tokens=24, temperature=0)
    assert again.choices[0].message.content == choice.message.content


def test_a_chat_streams(client):
    fields = {"model": "tiny", "messages": MESSAGES, "max_tokens": 40, "temperature": 1, "seed": 11, "n": 2}
    whole = client.chat.completions.create(**fields)
    texts, roles, ends, usages = ["", ""], [[], []], [None, None], []
    stream = client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    for chunk in stream:
        assert chunk.object == "chat.completion.chunk"
        usages.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += [choice.delta.role] if choice.delta.role else []
            ends[choice.index] = ends[choice.index] or choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert roles == [["assistant"], ["assistant"]]
    assert usages[-1].completion_tokens == whole.usage.completion_tokens and not any(usages[:-1])
    # Without being asked a stream has no usage.
    assert not any(chunk.usage for chunk in client.chat.completions.create(**fields, stream=True))


def test_log_probabilities_of_a_chat(client):
    fields = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "temperature": 0, "logprobs": True}
    answer = client.chat.completions.create(**fields, top_logprobs=2)
    expected = generate({"messages": MESSAGES, "max_new_tokens": 12, "temperature": 0, "logprobs": 2})
    content = answer.choices[0].logprobs.content
    for token, other in zip(content, expected["choices"][0]["logprobs"], strict=True):
        assert token.logprob == pytest.approx(other["logprob"], abs=1e-4)
        assert [likely.logprob for likely in token.top_logprobs] == pytest.approx(
            [likely["logprob"] for likely in other["top"]], abs=1e-4
        )
        assert math.exp(token.logprob) <= 1
    said = bytes(byte for token in content for byte in token.bytes)
    text = answer.choices[0].message.content
    assert said.decode(errors="replace").startswith(text.replace("\ufffd", "")[:1])
    parts = [chunk.choices[0].logprobs for chunk in client.chat.completions.create(**fields, stream=True)]
    streamed = [token.logprob for part in parts if part for token in part.content]
    assert streamed == [token.logprob for token in content]


def test_tools_reach_the_template(tmp_path):
    """With a template that prints them, they are in the prompt: more tokens, unless tool_choice is none."""
    source, folder = tmp_path / "source", tmp_path / "tools"
    shutil.copytree(ROOT / "tests/data/llm/llama", source)
    template = (LLAMA / "chat_template.jinja").read_text()
    (source / "chat_template.jinja").write_text("{{ tools | tojson if tools else 'none' }}" + template)
    export_language_model(source, folder)
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    with Server(folder, "--provider", "cpu") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

        def tokens(**fields):
            fields = {"model": "tools", "messages": MESSAGES, "max_tokens": 1} | fields
            return client.chat.completions.create(**fields).usage.prompt_tokens

        assert tokens(tools=[tool]) > tokens() + len("weather")
        assert tokens(tools=[tool], tool_choice="auto") == tokens(tools=[tool])
        assert tokens(tools=[tool], tool_choice="none") == tokens()
        assert tokens(tools=[tool], tool_choice="required") == tokens(tools=[tool])


# ---- answers with a grammar --------------------------------------------------------------------------------------


def test_answers_are_json_of_the_schema(client):
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}, "people": {"type": "integer", "maximum": 99}},
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema, "strict": True}}
    whole = 0
    for seed in range(8):
        fields = {"model": "tiny", "messages": MESSAGES, "max_tokens": 200, "temperature": 1.5, "seed": seed}
        choice = client.chat.completions.create(**fields, response_format=wanted).choices[0]
        # A random model can write blanks or digits without end.
        if choice.finish_reason == "stop":
            place = json.loads(choice.message.content)
            assert set(place) == {"city", "people"} and len(place["city"]) <= 8 and place["people"] <= 99
            whole += 1
        pieces = client.chat.completions.create(**fields, response_format=wanted, stream=True)
        streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        assert streamed == choice.message.content
    assert whole > 2
    choice = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=100, extra_body={"grammar": {"choice": ["left", "right"]}}
    ).choices[0]
    assert choice.message.content in ("left", "right") and choice.finish_reason == "stop"
    choice = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=9, response_format={"type": "json_object"}
    ).choices[0]
    assert choice.message.content.startswith("{")


# ---- errors ------------------------------------------------------------------------------------------------------


def tool(schema, **fields):
    """A function of one argument, which has this schema."""
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return {"type": "function", "function": {"name": "f1", "parameters": parameters} | fields}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"max_tokens": 0}, "max_new_tokens", "invalid_value"),
        ({"max_tokens": 100000}, "max_new_tokens", "invalid_value"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "invalid_value"),
        ({"response_format": {"type": "json"}}, "response_format.type", "invalid_value"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema.schema",
         "invalid_value"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "strange"}}}},
         "grammar.json_schema", "invalid_value"),
        ({"extra_body": {"temprature": 1}}, "temprature", "invalid_value"),
        ({"tools": [tool({}), tool({"type": "strange"})], "tool_choice": "required"}, "tools[1].function.parameters",
         "invalid_value"),
        ({"tools": [tool({"type": "integer", "minimum": 5, "maximum": 1})], "tool_choice": "required"},
         "tools[0].function.parameters", "invalid_value"),
        ({"tools": [tool({"enum": ["x" * (1 << 20)]})], "tool_choice": "required"}, "tools", "invalid_value"),
        ({"tools": [tool({"type": "strange"}, strict=True)]}, "tools[0].function.parameters", "invalid_value"),
        ({"tools": [tool({})], "tool_choice": {"type": "function", "function": {"name": "f2"}}},
         "tool_choice.function.name", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "prompt", "invalid_value"),
    ],
)
def test_what_is_wrong_is_said(client, fields, param, code):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES} | fields)
    assert error.value.type == "invalid_request_error" and error.value.code == code
    assert error.value.param.startswith(param), error.value
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES} | fields, stream=True)


def test_other_errors_have_the_same_shape(server, client):
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert error.value.param == "model"
    for method, path, body, expected in [
        ("GET", "/v1/nothing", None, 404),
        ("GET", "/v1/completions", None, 405),
        ("POST", "/v1/completions", "{", 400),
        ("POST", "/v1/completions", b'{"model": "\xff"}', 400),
        ("POST", "/v1/completions", "x" * (17 << 20), 413),
    ]:
        status, headers, answer = server.request(method, path, body)
        assert status == expected and set(answer["error"]) == {"message", "type", "param", "code"}, answer
        assert headers["x-request-id"].startswith("req-")
    assert server.get("/health", {"X-Request-Id": "mine-7"})[1]["x-request-id"] == "mine-7"


# ---- clients that go away, and conversations that stay ------------------------------------------------------------


def test_a_client_that_hangs_up_cancels_its_request():
    with Server(f"tiny={LLAMA}", "--provider", "cpu") as server:
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 500, "ignore_eos": True, "session": "s"}
        for stream in [True, False]:
            text = json.dumps(body | {"stream": stream})
            with socket.create_connection((server.host, server.port)) as connection:
                head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n"
                connection.sendall((head + text).encode())
                if stream:
                    assert b"200 OK" in connection.recv(100)
                else:
                    time.sleep(0.05)
            # Requests of one session run one at a time: the next one waits for the end of the first.
            since = time.monotonic()
            status, _, answer = server.post("/v1/completions", body | {"max_tokens": 1, "stream": False})
            assert status == 200 and time.monotonic() - since < 5, answer


def test_conversations_survive_kill_9(tmp_path):
    talk = list(MESSAGES)
    arguments = [f"tiny={LLAMA}", "--provider", "cpu", "--store", tmp_path / "store"]

    def turn(server, text):
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        talk.append({"role": "user", "content": text})
        fields = {"model": "tiny", "messages": talk, "max_tokens": 40, "temperature": 0}
        answer = client.chat.completions.create(**fields, extra_body={"session": "ada"})
        talk.append({"role": "assistant", "content": answer.choices[0].message.content})
        return answer.usage

    with Server(*arguments) as server:
        assert turn(server, "one")
        # The turn is stored before its answer has ended.
        server.stop(signal.SIGKILL)
    with Server(*arguments) as server:
        usage = turn(server, "two")
        assert usage.prompt_tokens_details.cached_tokens >= 32
        server.stop(signal.SIGKILL)
    with Server(*arguments) as server:
        assert turn(server, "three").prompt_tokens_details.cached_tokens > usage.prompt_tokens_details.cached_tokens


def test_many_clients_at_once_get_what_each_gets_alone(client):
    def ask(seed, stream):
        fields = {"model": "tiny", "prompt": f"Hello {seed}", "max_tokens": 30, "temperature": 1, "seed": seed}
        if not stream:
            return client.completions.create(**fields).choices[0].text
        return "".join(chunk.choices[0].text for chunk in client.completions.create(**fields, stream=True))

    alone = [ask(seed, False) for seed in range(8)]
    together = [None] * 16

    def one(at):
        together[at] = ask(at % 8, at >= 8)

    threads = [threading.Thread(target=one, args=(at,)) for at in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS)
    assert together == alone * 2


# ---- starting ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required arguments were not provided"),
        (["nowhere"], "nowhere can not be served: "),
        ([LLAMA, f"llama={LLAMA}"], "would both be `llama`"),
        ([LLAMA, "--config", "nowhere.toml"], "--config: nowhere.toml can not be read"),
    ],
)
def test_what_can_not_be_served_is_said_in_a_line(arguments, message):
    done = subprocess.run([COMMAND, "serve", *map(str, arguments)], capture_output=True, text=True, timeout=HANGS)
    assert done.returncode in (1, 2) and message in done.stderr, done.stderr


def test_a_taken_port_is_said(server):
    command = [COMMAND, "serve", LLAMA, "--listen", f"{server.host}:{server.port}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 1 and "another program has this port" in done.stderr


def test_a_configuration_file_names_models_and_limits(tmp_path):
    file = tmp_path / "serve.toml"
    models = "".join(f'[[model]]\nname = "{name}"\npath = "{LLAMA}"\n' for name in "ab")
    file.write_text(f"[limits]\nbody = 1000\n{models}")
    with Server("--config", file) as server:
        assert "serving a (generate), b (generate)" in server.line
        body = {"model": "b", "prompt": "Hello", "max_tokens": 1}
        assert server.post("/v1/completions", body)[0] == 200
        status, _, answer = server.post("/v1/completions", body | {"prompt": "x" * 1000})
        assert status == 413 and answer["error"]["code"] == "body_too_large"
        assert server.stop() == 0
    assert until(lambda: server.process.returncode is not None)
