"""The generator through C, on a small Llama, against the logits that transformers gives for it."""

import ctypes
import json
import re
import subprocess
import threading

import numpy as np
import pytest
from capi import HEADER, LLAMA, PATIENCE, ROOT, Failure, address, generator_options, initialised, pointed_to, struct
from capi import texts, until
from safetensors.numpy import load_file
from test_samples import VALGRIND

C = HEADER.constants
EXPECTED = load_file(ROOT / "tests/data/llm/llama/expected.safetensors")
PROMPTS = [EXPECTED[f"input_ids.{index}"].tolist() for index in range(2)]
STOP, LENGTH, CANCELLED, TIMEOUT = (C[f"PAGODA_FINISH_REASON_{n}"] for n in ("STOP", "LENGTH", "CANCELLED", "TIMEOUT"))


def numbers(kind, where, count):
    return (kind * count).from_address(where)[:] if count else []


def text_at(where, length):
    """A text, which has a NUL behind it."""
    assert ctypes.string_at(where + length, 1) == b"\0"
    return ctypes.string_at(where, length).decode()


def request(prompt=None, **fields):
    """A request for the most likely tokens, which no token ends. Texts, lists of tokens and of texts become memory."""
    made = {"do_sample": 0, "ignore_eos": 1, "max_new_tokens": 12}
    if isinstance(prompt, str):
        made["prompt"] = prompt
    elif prompt is not None:
        made |= {"tokens": pointed_to((ctypes.c_uint32 * max(len(prompt), 1))(*prompt)), "token_count": len(prompt)}
    if stop := fields.pop("stop", None):
        made |= {"stop": pointed_to(texts(stop)), "stop_count": len(stop)}
    if stop := fields.pop("stop_tokens", None):
        made |= {"stop_tokens": pointed_to((ctypes.c_uint32 * len(stop))(*stop)), "stop_token_count": len(stop)}
    if bias := fields.pop("logit_bias", None):
        elements = [struct("pagoda_logit_bias", token=token, bias=value) for token, value in bias.items()]
        array = (HEADER.structs["pagoda_logit_bias"] * len(bias))(*elements)
        made |= {"logit_bias": pointed_to(array), "logit_bias_count": len(bias)}
    for name, value in (made | fields).items():
        made[name] = pointed_to(ctypes.create_string_buffer(value.encode())) if isinstance(value, str) else value
    return initialised("pagoda_generate_request", **made)


class Logprobs:
    def __init__(self, read):
        self.logprob, self.rank = read.logprob, read.rank
        ids = numbers(ctypes.c_uint32, read.top_tokens, read.top_count)
        self.top = list(zip(ids, numbers(ctypes.c_float, read.top_logprobs, read.top_count)))


class Choice:
    def __init__(self, read):
        self.text, self.finish_reason = text_at(read.text, read.text_length), read.finish_reason
        self.tokens = numbers(ctypes.c_uint32, read.tokens, read.token_count)
        self.times = read.queued_ns, read.first_token_ns, read.generation_ns
        self.has_score, self.score = read.has_score, read.score
        self.missing = ctypes.string_at(read.missing).decode() if read.missing else None


class Response:
    """All of a response, which is then freed."""

    def __init__(self, pagoda, handle):
        self.pagoda, self.handle = pagoda, handle
        info = self.read("pagoda_generate_info", "info")
        self.cached, self.computed = info.cached_tokens, info.computed_tokens
        self.version = ctypes.string_at(info.version).decode()
        self.prompt_tokens = numbers(ctypes.c_uint32, info.prompt_tokens, info.prompt_token_count)
        self.prompt_logprobs = [self.logprobs("prompt_logprobs", i) for i in range(info.prompt_logprob_count)]
        self.choices = []
        for index in range(info.choice_count):
            read = self.read("pagoda_generate_choice", "choice", index)
            self.choices.append(Choice(read))
            self.choices[-1].logprobs = [self.logprobs("logprobs", index, i) for i in range(read.logprob_count)]
        pagoda.free("pagoda_generate_response", handle)
        self.text, self.tokens = self.choices[0].text, self.choices[0].tokens
        self.finish_reason = self.choices[0].finish_reason

    def read(self, kind, what, *index):
        out = struct(kind)
        self.pagoda.call(f"pagoda_generate_response_{what}", self.handle, *index, address(out))
        return out

    def logprobs(self, what, *index):
        return Logprobs(self.read("pagoda_token_logprobs", what, *index))


class Stream:
    """An asynchronous request: its tokens as they come, and its end."""

    def __init__(self, generator, request, on_token=None, on_end=None):
        self.pagoda, self.tokens, self.ended, self.ends = generator.pagoda, [], threading.Event(), 0
        self.status = self.handle = self.failure = None

        def token(user_data, where):
            assert user_data == 42
            read = HEADER.structs["pagoda_generate_token"].from_address(where)
            logprobs = read.logprobs and HEADER.structs["pagoda_token_logprobs"].from_address(read.logprobs)
            text = text_at(read.text, read.text_length)
            self.tokens.append((read.choice, read.id, text, read.finish_reason, logprobs and Logprobs(logprobs)))
            if on_token:
                on_token(self)

        def end(user_data, status, response, error):
            self.status, self.handle, self.ends = status, response, self.ends + 1
            if error:
                self.failure = self.pagoda.raw("pagoda_error_message", error)
            if on_end:
                on_end(self)
            self.ended.set()

        self.kept = HEADER.callbacks["pagoda_token_callback"](token), HEADER.callbacks["pagoda_generate_callback"](end)
        self.pagoda.call("pagoda_generator_generate_async", generator.handle, address(request), *self.kept, 42)

    def response(self):
        assert self.ended.wait(PATIENCE), "the request did not end"
        assert (self.status, self.ends, self.failure) == (0, 1, None)
        return Response(self.pagoda, self.handle)


class Generator:
    def __init__(self, pagoda, folder=LLAMA, **options):
        self.pagoda = pagoda
        path, options = ctypes.create_string_buffer(str(folder).encode()), generator_options(**options)
        self.handle = pagoda.make("pagoda_generator_open", address(path), address(options))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.handle:
            self.close()

    def close(self):
        self.pagoda.free("pagoda_generator", self.handle)
        self.handle = None

    def answer(self, prompt=None, **fields):
        asked = request(prompt, **fields)
        return Response(self.pagoda, self.pagoda.make("pagoda_generator_generate", self.handle, address(asked)))

    def stream(self, prompt=None, on_token=None, on_end=None, **fields):
        return Stream(self, request(prompt, **fields), on_token, on_end)

    def step(self):
        more = ctypes.c_int32(7)
        self.pagoda.call("pagoda_generator_step", self.handle, address(more))
        return {0: False, 1: True}[more.value]

    def count(self, what, *sessions, stored=None):
        out = ctypes.c_size_t(99)
        listed = (pointed_to(texts(sessions)), len(sessions)) if stored is None else (stored,)
        self.pagoda.call(f"pagoda_generator_{what}", self.handle, *listed, address(out))
        return out.value

    def stats(self, kind="generator"):
        out = struct(f"pagoda_{kind}_stats")
        self.pagoda.call(f"pagoda_generator_get_{'kv_' if kind == 'kv' else ''}stats", self.handle, address(out))
        return out

    def tokenize(self, prompt=None, **fields):
        asked, count, room = request(prompt, **fields), ctypes.c_size_t(), (ctypes.c_uint32 * 64)()
        given = self.handle, address(asked)
        self.pagoda.call("pagoda_generator_tokenize", *given, None, 0, address(count))
        needed = count.value
        self.pagoda.call("pagoda_generator_tokenize", *given, address(room), needed, address(count))
        assert count.value == needed
        return room[:needed]

    def detokenize(self, tokens, skip_special=1):
        given, room = (ctypes.c_uint32 * len(tokens))(*tokens), ctypes.create_string_buffer(1 << 12)
        into = address(room), len(room), address(length := ctypes.c_size_t())
        self.pagoda.call("pagoda_generator_detokenize", self.handle, address(given), len(tokens), skip_special, *into)
        return room.raw[: length.value - 1].decode()

    def refused(self, status, argument, prompt=None, **fields):
        """The message of a refusal, by every function that takes a request."""
        asked, out = request(prompt, **fields), ctypes.c_void_p()
        with pytest.raises(Failure) as failure:
            self.pagoda.call("pagoda_generator_generate", self.handle, address(asked), address(out))
        with pytest.raises(Failure) as streamed:
            self.stream(prompt, **fields)
        assert streamed.value.message == failure.value.message
        assert (failure.value.status, failure.value.argument) == (C[f"PAGODA_STATUS_{status}"], argument)
        assert failure.value.message.startswith(f"{argument}: ")
        return failure.value.message.removeprefix(f"{argument}: ")


@pytest.fixture
def open_generator(pagoda):
    """Opens generators, which are closed after the test."""
    opened = []

    def open_one(**options):
        opened.append(Generator(pagoda, **options))
        return opened[-1]

    yield open_one
    for generator in opened:
        generator.__exit__()


@pytest.fixture
def generator(open_generator):
    return open_generator()


def run_steps(generator, *streams):
    while generator.step():
        pass
    return [stream.response() for stream in streams]


# ---- tokens ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(2))
def test_probabilities_and_the_first_token_are_those_of_transformers(generator, index):
    logits = EXPECTED[f"logits.{index}"].astype(np.float64)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    answer = generator.answer(PROMPTS[index], logprobs=5, prompt_logprobs=3, max_new_tokens=4)
    assert answer.prompt_tokens == PROMPTS[index]
    first, *others = answer.prompt_logprobs
    assert (first.rank, first.top) == (0, [])
    assert len(others) == len(PROMPTS[index]) - 1
    for token, row, found in zip(PROMPTS[index][1:], logs, others):
        assert abs(found.logprob - row[token]) <= 1e-3
        assert abs(found.rank - (row > row[token]).sum() - 1) <= 1
        assert np.allclose([log for _, log in found.top], np.sort(row)[: -4 : -1], atol=1e-3)
    assert answer.tokens[0] == logs[-1].argmax()
    for token, found in zip(answer.tokens, answer.choices[0].logprobs, strict=True):
        assert (found.rank, found.top[0][0], len(found.top)) == (1, token, 5)
        assert found.logprob == found.top[0][1] <= 0
        assert sorted(found.top, key=lambda pair: -pair[1]) == found.top


def test_one_call_callbacks_and_steps_give_the_same_answer(open_generator):
    generator, stepped = open_generator(), open_generator(driver=C["PAGODA_DRIVER_CALLER"])
    for prompt in PROMPTS:
        whole = generator.answer(prompt, logprobs=2)
        assert (len(whole.tokens), whole.finish_reason) == (12, LENGTH)
        stream = generator.stream(prompt, logprobs=2)
        streamed = stream.response()
        (by_steps,) = run_steps(stepped, stepped.stream(prompt, logprobs=2))
        for other in streamed, by_steps, stepped.answer(prompt, logprobs=2):
            assert (other.tokens, other.text, other.finish_reason) == (whole.tokens, whole.text, LENGTH)
            assert other.version == whole.version == json.loads((LLAMA / "pagoda.json").read_text())["version"]
        assert [(choice, id) for choice, id, *_ in stream.tokens] == [(0, token) for token in whole.tokens]
        assert "".join(text for _, _, text, *_ in stream.tokens) == whole.text
        assert [reason for *_, reason, _ in stream.tokens] == [0] * 11 + [LENGTH]
        pairs = zip(stream.tokens, whole.choices[0].logprobs, strict=True)
        assert all(token[-1].logprob == logprobs.logprob and token[-1].top == logprobs.top for token, logprobs in pairs)


def test_a_step_is_one_token(open_generator):
    generator = open_generator(driver=C["PAGODA_DRIVER_CALLER"])
    assert generator.step() is False
    stream = generator.stream(PROMPTS[1], max_new_tokens=5)
    for count in range(1, 6):
        assert generator.step() is (count < 5)
        until(lambda count=count: len(stream.tokens) == count, f"{count} tokens")
    assert len(stream.response().tokens) == 5


def test_a_request_without_a_token_callback_ends_once(generator):
    asked, ended, told = request(PROMPTS[0]), threading.Event(), []

    @HEADER.callbacks["pagoda_generate_callback"]
    def end(user_data, status, response, error):
        told.append((user_data, status, response, error))
        ended.set()

    generator.pagoda.call("pagoda_generator_generate_async", generator.handle, address(asked), None, end, None)
    assert ended.wait(PATIENCE)
    ((user_data, status, response, error),) = told
    assert (user_data, status, error) == (None, 0, None)
    assert Response(generator.pagoda, response).tokens == generator.answer(PROMPTS[0]).tokens


def test_many_answers_are_those_of_their_seeds(generator):
    drawn = {"do_sample": 1, "temperature": 1.5, "top_k": 0, "top_p": 1.0, "has_seed": 1, "seed": 7}
    answer = generator.answer(PROMPTS[0], n=4, **drawn)
    again = generator.answer(PROMPTS[0], n=4, **drawn)
    other = generator.answer(PROMPTS[0], n=4, **drawn | {"seed": 1007})
    lists = [[choice.tokens for choice in response.choices] for response in (answer, again, other)]
    assert lists[0] == lists[1] != lists[2]
    assert len({tuple(tokens) for tokens in lists[0]}) == 4
    greedy = generator.answer(PROMPTS[0])
    assert [choice.tokens for choice in generator.answer(PROMPTS[0], n=3).choices] == [greedy.tokens] * 3
    stream = generator.stream(PROMPTS[0], n=4, **drawn)
    assert [choice.tokens for choice in stream.response().choices] == lists[0]
    assert [[id for choice, id, *_ in stream.tokens if choice == index] for index in range(4)] == lists[0]


def test_what_is_not_given_is_as_the_model_says(generator):
    """Its folder says: drawn, temperature 0.7, top_k 20, top_p 0.9."""
    given = {"do_sample": 1, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "has_seed": 1, "seed": 3}
    left_out = given | dict.fromkeys(["do_sample", "temperature", "top_k", "top_p"], -1)
    assert generator.answer(PROMPTS[0], **left_out).tokens == generator.answer(PROMPTS[0], **given).tokens
    # Without a seed every request has another one.
    many = {tuple(generator.answer(PROMPTS[0], **left_out | {"has_seed": 0}).tokens) for _ in range(5)}
    assert len(many) > 1
    assert generator.answer(PROMPTS[0], do_sample=-1, temperature=0).tokens == generator.answer(PROMPTS[0]).tokens


def test_biases_bans_and_forced_tokens(generator):
    plain = generator.answer(PROMPTS[0]).tokens
    assert plain[0] not in generator.answer(PROMPTS[0], logit_bias={plain[0]: -1e30}).tokens
    assert generator.answer(PROMPTS[0], logit_bias={77: 1e6, 3: 1.0}).tokens == [77] * 12
    assert generator.answer(PROMPTS[0], forced_eos=2).tokens == [*plain[:11], 2]
    assert len(set(generator.answer(PROMPTS[0], logit_bias={77: 1e3}, no_repeat_ngram_size=1).tokens)) == 12


def test_stop_tokens_and_end_of_sequence_tokens_end_an_answer(generator):
    plain = generator.answer(PROMPTS[0]).tokens
    stop = plain[5]
    answer = generator.answer(PROMPTS[0], stop_tokens=[stop])
    assert (answer.tokens, answer.finish_reason) == (plain[: plain.index(stop) + 1], STOP)
    assert generator.answer(PROMPTS[0], logit_bias={2: 1e6}, ignore_eos=0).tokens == [2]
    assert generator.answer(PROMPTS[0], logit_bias={2: 1e6, 4: -1e30}, ignore_eos=0, min_new_tokens=3).tokens[3:] == [2]


def test_answers_keep_to_a_grammar(generator):
    drawn = {"do_sample": 1, "temperature": 1.5, "has_seed": 1, "max_new_tokens": 100}
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
    found = set()
    for seed in range(8):
        answer = generator.answer(PROMPTS[0], grammar=json.dumps({"json_schema": schema}), seed=seed, **drawn)
        if answer.finish_reason == STOP:
            found.add(json.loads(answer.text)["n"])
            assert answer.choices[0].missing is None
    assert len(found) > 1
    answer = generator.answer(PROMPTS[0], grammar='{"regex": "[0-9]{5}x"}', seed=1, **drawn)
    assert re.fullmatch("[0-9]{5}x", answer.text)
    cut = generator.answer(PROMPTS[0], grammar='{"choice": ["abcdefgh"]}', max_new_tokens=2, logprobs=0)
    assert cut.finish_reason == LENGTH and "abcdefgh".startswith(cut.text)
    assert cut.choices[0].missing.startswith("next is ")


def beams(**fields):
    return pointed_to(initialised("pagoda_beam_options", **fields))


def test_beams_are_the_best_answers_with_their_scores(generator):
    plain = generator.answer(PROMPTS[0])
    assert plain.choices[0].has_score == 0
    one = generator.answer(PROMPTS[0], beams=beams(width=1))
    assert one.tokens == plain.tokens and one.choices[0].has_score == 1
    found = generator.answer(PROMPTS[0], n=4, logprobs=0, beams=beams())
    scores = [choice.score for choice in found.choices]
    assert len(scores) == 4 and scores == sorted(scores, reverse=True)
    for choice in found.choices:
        sum_of = sum(token.logprob for token in choice.logprobs)
        assert choice.score == pytest.approx(sum_of / len(choice.tokens), rel=1e-4)
    never = generator.answer(PROMPTS[0], n=2, ignore_eos=0, beams=beams(width=3, length_penalty=-2.0, early_stop=2))
    assert len(never.choices) == 2
    generator.refused("INVALID_ARGUMENT", "request.n", PROMPTS[0], n=5, beams=beams())
    generator.refused("INVALID_ARGUMENT", "request.session", PROMPTS[0], session="s", beams=beams())
    generator.refused("INVALID_ARGUMENT", "request.temperature", PROMPTS[0], do_sample=-1, temperature=0.5, beams=beams())


def test_stop_texts_end_an_answer(generator):
    whole = generator.answer(PROMPTS[0], max_new_tokens=40).text
    stop = whole[10:12]
    before = whole[: whole.index(stop)]
    for include, expected in (0, before), (1, before + stop):
        stream = generator.stream(PROMPTS[0], max_new_tokens=40, stop=["never there", stop], include_stop=include)
        answer = stream.response()
        assert (answer.text, answer.finish_reason) == (expected, STOP)
        assert "".join(text for _, _, text, *_ in stream.tokens) == expected
        assert len(answer.tokens) < 40


def test_texts_have_the_tokens_of_their_tokenizer(generator):
    words = "the quick brown 狐 fox"
    tokens = generator.tokenize(words)
    assert tokens[0] == 1, "the beginning of a sequence"
    assert generator.detokenize(tokens) == words
    assert generator.detokenize(tokens, skip_special=0) == f"<s>{words}"
    by_text, by_tokens = generator.answer(words, echo=1), generator.answer(tokens)
    assert (by_text.prompt_tokens, by_text.tokens) == (tokens, by_tokens.tokens)
    assert by_text.text == words + by_tokens.text


def test_a_chat_is_as_the_template_of_the_model_has_it(generator):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello \u72d0"}]
    rendered = "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in messages)
    chat = {"messages": json.dumps(messages)}
    tokens = generator.tokenize(**chat)
    assert generator.detokenize(tokens, skip_special=0) == f"{rendered}<|im_start|>assistant\n"
    without = generator.tokenize(**chat, add_generation_prompt=0)
    assert generator.detokenize(without, skip_special=0) == rendered
    answer = generator.answer(**chat)
    assert (answer.prompt_tokens, answer.tokens) == (tokens, generator.answer(tokens).tokens)
    assert "3 is not a message" in generator.refused("INVALID_ARGUMENT", "request.messages[1]", messages="[{}, 3]")
    assert "not a list" in generator.refused("INVALID_ARGUMENT", "request.tools", **chat, tools="{}")


def test_threads_get_their_own_answers(generator):
    prompts = [[5 + index, *PROMPTS[index % 2]] for index in range(8)]
    alone = [generator.answer(prompt).tokens for prompt in prompts]
    found = {}

    def body(index):
        found[index] = [generator.answer(prompts[index]).tokens for _ in range(5)]

    threads = [threading.Thread(target=body, args=[index], daemon=True) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert found == {index: [tokens] * 5 for index, tokens in enumerate(alone)}


# ---- ends --------------------------------------------------------------------------------------------------------


def test_a_cancel_within_a_callback_ends_the_answer(open_generator, pagoda):
    generator, cancel = open_generator(driver=C["PAGODA_DRIVER_CALLER"]), pagoda.make("pagoda_cancel_new")

    def on_token(stream):
        if len(stream.tokens) == 3:
            pagoda.call("pagoda_cancel_trigger", cancel)

    stream = generator.stream(PROMPTS[0], max_new_tokens=400, cancel=cancel, on_token=on_token)
    for count in range(1, 4):
        assert generator.step()
        until(lambda count=count: len(stream.tokens) == count, f"{count} tokens")
    (answer,) = run_steps(generator, stream)
    assert (answer.finish_reason, len(stream.tokens)) == (CANCELLED, 3)
    assert answer.tokens == generator.answer(PROMPTS[0], max_new_tokens=3).tokens
    # It stays triggered: a later request with it has no token.
    late = generator.answer(PROMPTS[0], cancel=cancel)
    assert (late.finish_reason, late.tokens) == (CANCELLED, [])
    pagoda.free("pagoda_cancel", cancel)
    assert (generator.stats().ended_early, generator.stats().failed) == (2, 0)


def test_a_cancel_from_another_thread_ends_a_call(generator, pagoda):
    cancel, answers = pagoda.make("pagoda_cancel_new"), []

    def body():
        answers.append(generator.answer(PROMPTS[0], max_new_tokens=480, cancel=cancel))

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    pagoda.call("pagoda_cancel_trigger", cancel)
    thread.join(PATIENCE)
    assert answers[0].finish_reason == CANCELLED and len(answers[0].tokens) < 480
    pagoda.free("pagoda_cancel", cancel)


def test_a_time_limit_ends_an_answer(open_generator):
    generator = open_generator(driver=C["PAGODA_DRIVER_CALLER"])
    late, later = generator.stream(PROMPTS[0], timeout_us=1), generator.stream(PROMPTS[0], timeout_us=3_600_000_000)
    ended, whole = run_steps(generator, late, later)
    assert (ended.finish_reason, ended.tokens, ended.text) == (TIMEOUT, [], "")
    assert (whole.finish_reason, len(whole.tokens)) == (LENGTH, 12)
    assert (generator.stats().answered, generator.stats().ended_early) == (1, 1)


def test_freeing_a_generator_ends_its_requests_first(open_generator):
    generator = open_generator(max_batch=1)
    streams = [generator.stream(PROMPTS[0], max_new_tokens=480) for _ in range(4)]
    generator.close()
    assert all(stream.ended.is_set() for stream in streams)
    reasons = [stream.response().finish_reason for stream in streams]
    assert reasons[-1] == CANCELLED and set(reasons) <= {CANCELLED, LENGTH}


def test_a_call_goes_on_when_its_generator_is_freed(open_generator):
    generator, answers = open_generator(), []

    def body():
        answers.append(generator.answer(PROMPTS[0], max_new_tokens=480))

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    until(lambda: generator.stats().running == 1, "the answer is being generated")
    generator.close()
    thread.join(PATIENCE)
    assert (len(answers[0].tokens), answers[0].finish_reason) == (480, LENGTH)


def test_a_callback_may_free_the_generator(open_generator, pagoda):
    generator = open_generator()
    live = pagoda.live()
    stream = generator.stream(PROMPTS[0], on_end=lambda stream: generator.close())
    assert len(stream.response().tokens) == 12
    assert pagoda.live() == live - 1


# ---- sessions ----------------------------------------------------------------------------------------------------


def test_a_session_goes_on_after_a_restart(open_generator, tmp_path):
    first_turn, other, more = (PROMPTS[0] * 3)[:70], [9, *PROMPTS[0], *PROMPTS[1]], [9, 8, 7]
    store = {"store_path": pointed_to(ctypes.create_string_buffer(str(tmp_path / "store").encode()))}
    with open_generator(**store) as generator:
        first = generator.answer(first_turn, session="a", max_new_tokens=10)
        generator.answer(other, session="b")
    second_turn = first_turn + first.tokens + more
    expected = open_generator().answer(second_turn)
    assert expected.cached == 0
    with open_generator(**store) as generator:
        second = generator.answer(second_turn, session="a")
        assert second.tokens == expected.tokens
        # All of the first turn but for its last token, which was never computed.
        assert second.cached == 79
        assert second.computed == expected.computed - 79
        assert generator.count("unload", "a", "never") == 1
        assert generator.count("prefetch", "a", "b", "never") == 2
        third = generator.answer(second_turn + second.tokens, session="a")
        assert third.cached == len(second_turn) + 11
        assert generator.count("forget", "a", "never") == 1
        assert generator.count("forget", "a") == 0
    with open_generator(**store) as generator:
        assert generator.answer(second_turn, session="a").cached == 0
        # A prompt that ends before the session does has its whole pages.
        assert generator.answer(other, session="b").cached == 32


def test_clearing_drops_what_is_cached(open_generator, tmp_path):
    store = {"store_path": pointed_to(ctypes.create_string_buffer(str(tmp_path / "store").encode()))}
    prompt = (PROMPTS[0] * 3)[:70]
    with open_generator(**store) as generator:
        generator.answer(prompt, session="a")
        assert generator.answer(prompt, session="a").cached > 60
        assert generator.count("clear", stored=0) >= 1
        assert generator.stats("kv").resident_owners == 0
        assert generator.answer(prompt, session="a").cached > 60, "the store has it"
        assert generator.count("clear", stored=1) >= 1
        assert generator.answer(prompt, session="a").cached == 0


def test_equal_prefixes_are_shared_unless_they_must_not(open_generator):
    prompt = (PROMPTS[0] * 3)[:70]
    shared, alone = open_generator(), open_generator(share_prefixes=0)
    for generator, cached in (shared, 64), (alone, 0):
        first, second = generator.answer(prompt), generator.answer(prompt)
        assert first.tokens == second.tokens
        assert (first.cached, second.cached >= cached, second.cached <= 69) == (0, True, True)
        assert (second.cached > 0) == (cached > 0)


# ---- what is known of a generator --------------------------------------------------------------------------------


def test_statistics_count(open_generator):
    # With steps of its own an answer may come before its last step is counted.
    generator = open_generator(driver=C["PAGODA_DRIVER_CALLER"])
    answers = [generator.answer(prompt) for prompt in PROMPTS]
    with pytest.raises(Failure):
        generator.answer([])
    stats = generator.stats()
    assert (stats.answered, stats.ended_early, stats.failed) == (2, 0, 1)
    assert (stats.generated_tokens, stats.waiting, stats.running, stats.preemptions) == (24, 0, 0, 0)
    assert stats.computed_tokens == sum(answer.computed for answer in answers)
    assert 24 <= stats.steps and 0 < stats.model_us <= stats.step_us
    assert generator.stats("kv").pages == 64
    queued, first, rest = answers[0].choices[0].times
    assert 0 < queued < first and 0 < rest


def test_drafts_change_no_token(open_generator):
    repeated = [5, 6, 7, 8] * 12
    folder = pointed_to(ctypes.create_string_buffer(str(LLAMA).encode()))
    plain = open_generator().answer(repeated, max_new_tokens=60).tokens
    for options in [{}, {"max_draft": 8}, {"max_draft": 4, "draft_model": folder}]:
        generator = open_generator(**options)
        for request in [{}, {"max_draft": 0}, {"max_draft": 6}]:
            assert generator.answer(repeated, max_new_tokens=60, **request).tokens == plain
        stats = generator.stats()
        assert 0 < stats.drafts <= stats.drafted_tokens and stats.accepted_tokens <= stats.drafted_tokens
        generator.pagoda.call("pagoda_generator_set_speculation", generator.handle, 0, 1)
        assert generator.answer(repeated, max_new_tokens=60, max_draft=6).tokens == plain
        assert generator.stats().drafts == 0
    generator.refused("INVALID_ARGUMENT", "request.max_draft", repeated, max_draft=65)


def test_where_it_runs_and_what_it_serves(generator):
    provider, device, length = ctypes.c_int32(), ctypes.c_int32(), ctypes.c_size_t()
    buffer = ctypes.create_string_buffer(1 << 14)
    into = address(buffer), len(buffer), address(length)
    generator.pagoda.call("pagoda_generator_provider", generator.handle, address(provider), address(device), *into)
    assert (provider.value, device.value, buffer.value) == (C["PAGODA_PROVIDER_CPU"], -1, b"")
    generator.pagoda.call("pagoda_generator_info", generator.handle, *into)
    assert json.loads(buffer.value) == json.loads((LLAMA / "pagoda.json").read_text())


def test_the_initial_options_are_the_defaults():
    """0 and NULL are defaults of their own; the others are those of the Rust interface, which its documentation has."""
    options = initialised("pagoda_generator_options")
    assert (options.max_batch, options.max_batch_tokens, options.queue, options.share_prefixes) == (64, 512, 4096, 1)
    assert abs(options.max_stretch - 1.5) < 1e-6
    asked = initialised("pagoda_generate_request")
    left_out = ["max_new_tokens", "min_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p"]
    left_out += ["repetition_penalty", "no_repeat_ngram_size", "forced_eos", "logprobs", "prompt_logprobs", "max_draft"]
    assert {name for name, _ in asked._fields_ if getattr(asked, name) == -1} == set(left_out)
    ones = {name for name, _ in asked._fields_ if getattr(asked, name) == 1}
    assert ones == {"n", "skip_special", "add_generation_prompt"}


# ---- refusals ----------------------------------------------------------------------------------------------------


def test_refusals_say_what_is_wrong(open_generator):
    generator = open_generator(max_prompt_tokens=100, max_new_tokens=20, queue=2, kv_size=3)

    def refused(argument, *given, status="INVALID_ARGUMENT", **fields):
        return generator.refused(status, argument, *given, **fields)

    assert refused("request.prompt") == "NULL, and so are tokens and messages: set one of them"
    assert refused("request.messages", "a", messages="[]") == "prompt has a prompt already: set one of them"
    assert refused("request.tools", "a", tools="[]").startswith("only a chat has them, and the prompt is in prompt")
    assert "EOF while parsing" in (message := refused("request.messages", messages='[{"role": "user"'))
    assert "line 1 column 16" in message
    assert refused("request.messages", messages="{}") == "an object, where an array of messages is needed"
    assert refused("request.variables", messages="[]", variables="3").startswith("a number, where an object")
    assert "line 2 column 2" in refused("request.tools", messages="[]", tools="[\n]]")
    assert refused("request.tokens", []) == "it has no tokens: a model continues at least one"
    assert refused("request.tokens[2]", [5, 6, 300]) == "300 is no token: the model has 272, from 0 on"
    assert "101 tokens are more than the 100 of options.max_prompt_tokens" in refused("request.tokens", [5] * 101)
    too_many = refused("request.max_new_tokens", [5], max_new_tokens=21)
    assert too_many == "21 is more than the 20 of options.max_new_tokens"
    assert refused("request.top_p", [5], top_p=1.5) == "is 1.5; it must be from 0 to 1 (1: off)"
    assert refused("request.top_k", [5], top_k=-2) == "-2 is neither -1, which leaves it out, nor 0 or more"
    assert "token 272 is not in the vocabulary" in refused("request.logit_bias[1]", [5], logit_bias={1: 2.0, 272: 1.0})
    too_large = refused("request.max_new_tokens", [5] * 90, status="CAPACITY")
    assert "need 4 pages and the pool has 3: raise options.kv_size" in too_large
    with pytest.raises(Failure) as full:
        generator.answer([5], n=3)
    assert full.value.status == C["PAGODA_STATUS_CAPACITY"]
    assert "3 more would exceed the 2 of options.queue: try again later" in full.value.message
    assert len(generator.answer([5]).tokens) == 12


def test_the_end_of_the_context_refuses_or_stops(generator):
    message = generator.refused("INVALID_ARGUMENT", "request.max_new_tokens", [5] * 505)
    assert "12 tokens after a prompt of 505 are more than the model's context of 512: ask for 7 at most" in message
    answer = generator.answer([5] * 505, context_end=C["PAGODA_CONTEXT_END_STOP"])
    assert (len(answer.tokens), answer.finish_reason) == (7, LENGTH)


def policy(name, **fields):
    return pointed_to(initialised("pagoda_kv_policy", name=pointed_to(ctypes.create_string_buffer(name)), **fields))


def test_a_request_chooses_its_policy(open_generator):
    long = [5 + index * 7 % 250 for index in range(300)]
    opened = open_generator(kv_policy=policy(b"h2o", cache_length=64))
    heavy, recent = opened.answer(long), opened.answer(long, kv_policy=policy(b"lastrec", protect=3))
    assert heavy.tokens != recent.tokens
    assert recent.tokens == open_generator(kv_policy=policy(b"lastrec", cache_length=64, protect=3)).answer(long).tokens
    again = opened.answer(long, kv_policy=policy(b"h2o", cache_length=64))
    assert again.tokens == heavy.tokens == opened.answer(long).tokens
    shorter = policy(b"h2o", cache_length=32)
    other = opened.refused("UNSUPPORTED", "request.kv_policy.cache_length", long, kv_policy=shorter)
    assert other == "the slots of all sequences are those that the generator was opened with: leave this 0"
    opened.refused("UNSUPPORTED", "request.kv_policy.name", long, kv_policy=policy(b"h2o-vlen"))
    without = open_generator().refused("UNSUPPORTED", "request.kv_policy", long, kv_policy=policy(b"lastrec"))
    assert "was opened without slots, which lastrec needs: set options.kv_policy" in without


def test_log_probabilities_that_were_not_asked_for(generator, pagoda):
    asked, out = request(PROMPTS[0]), struct("pagoda_token_logprobs")
    handle = pagoda.make("pagoda_generator_generate", generator.handle, address(asked))
    for what, index in ("logprobs", (0, 0)), ("prompt_logprobs", (0,)):
        with pytest.raises(Failure, match="there are no log probabilities: the request did not ask for them"):
            pagoda.call(f"pagoda_generate_response_{what}", handle, *index, address(out))
    with pytest.raises(Failure, match="choice: 1 is beyond the 1 answers that there are"):
        pagoda.call("pagoda_generate_response_logprobs", handle, 1, 0, address(out))
    pagoda.free("pagoda_generate_response", handle)


def test_a_folder_of_a_ranking_model_is_refused(pagoda):
    with pytest.raises(Failure) as failure:
        Generator(pagoda, ROOT / "tests/data/engine/bag")
    assert failure.value.status == C["PAGODA_STATUS_UNSUPPORTED"]


# ---- a program in C ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    made, release = tmp_path_factory.mktemp("program") / "generate", ROOT / "target/release"
    flags = ["-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/include", "-pthread"]
    link = [f"-L{release}", "-lpagoda", f"-Wl,-rpath,{release}"]
    subprocess.run(["cc", *flags, ROOT / "tests/c/generate.c", "-o", made, *link], check=True)
    return made


@pytest.mark.parametrize("before", [[], VALGRIND], ids=["plain", "valgrind"])
def test_a_program_in_c_works_and_leaks_nothing(program, before):
    done = subprocess.run([*before, program, LLAMA], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == 6 and len(set(lines)) == 1, done.stdout
    assert len(lines[0].split()) == 9 and lines[0].endswith(" with 6 2")
