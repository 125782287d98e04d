"""The ranking engine and the generator from Python: calls, asyncio, streams, threads, and how they end."""

import asyncio
import contextvars
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pagoda
import pytest
from capi import ENGINE, LLAMA, ROOT
from pagoda import FinishReason
from test_generate import EXPECTED, PROMPTS

pytestmark = pytest.mark.usefixtures("nothing_left")

ONE = pagoda.ModelOptions(intra_op_threads=1, provider=pagoda.Provider.CPU)
SMALL = {"kv_size": 64, "kv_size_unit": pagoda.KvSizeUnit.PAGES, "model": ONE}
GREEDY = {"do_sample": False, "ignore_eos": True, "max_new_tokens": 12}
# As long as the model's context.
ENDLESS = {"tokens": PROMPTS[0], "ignore_eos": True, "context_end": pagoda.ContextEnd.STOP}
REQUEST = {
    "events": {"item": [3, 7], "genre": [1, 0], "rating": [4, 2]},
    "event_times": [1_700_000_000, 1_700_001_000],
    "candidates": {"item": [5, 6, 39], "genre": [5, 9, -1]},
    "user_keys": {"age": 6, "town": 8},
    "time": 1_700_002_000,
}


@pytest.fixture
def engine():
    with pagoda.Engine(ENGINE, pagoda.EngineOptions(**SMALL)) as engine:
        yield engine


@pytest.fixture
def generator():
    with pagoda.Generator(LLAMA, pagoda.GeneratorOptions(**SMALL)) as generator:
        yield generator


# ---- ranking -----------------------------------------------------------------------------------------------------


def test_scores_are_those_of_c(engine, pagoda_c):
    answer = engine.rank(user=1, **REQUEST)
    assert answer.scores.shape == (3, 2) and answer.scores.dtype == np.float32
    assert np.array_equal(answer.scores, pagoda_c())
    assert (answer.tasks, answer.version, answer.cached_rows) == (2, engine.info["version"], 0)
    again = engine.rank(pagoda.RankRequest(user=1, **REQUEST))
    assert np.array_equal(again.scores, answer.scores) and (again.cached_rows, again.computed_rows) == (6, 0)


def test_quantised_pages_of_so_many_bytes_are_more():
    def pages(kv_format):
        options = SMALL | {"kv_size": 1 << 20, "kv_size_unit": pagoda.KvSizeUnit.BYTES, "kv_format": kv_format}
        with pagoda.Engine(ENGINE, pagoda.EngineOptions(**options)) as engine:
            return engine.kv_stats().pages

    # Of 2 layers of a head of 8 f32: 32 bytes, then 12 as int8 and 10 as fp8.
    formats = pagoda.KvFormat.DEFAULT, pagoda.KvFormat.INT8, pagoda.KvFormat.FP8
    assert [pages(kv_format) for kv_format in formats] == [(1 << 20) // (2 * 2 * 8 * head) for head in (32, 12, 10)]
    with pytest.raises(pagoda.InvalidArgumentError, match="options.kv_format"):
        pages(9)


@pytest.fixture
def pagoda_c():
    """The same request through C, as the tests of C make it."""
    import ctypes

    from capi import Pagoda, address, engine_options, rank_request

    def rank():
        library = Pagoda()
        path, options = ctypes.create_string_buffer(str(ENGINE).encode()), engine_options()
        handle = library.make("pagoda_engine_open", address(path), address(options))
        scores, request = np.zeros((3, 2), np.float32), rank_request()
        library.call("pagoda_engine_rank", handle, address(request), scores.ctypes.data, 6, None)
        library.free("pagoda_engine", handle)
        return scores

    return rank


def test_ranking_for_asyncio(engine):
    async def many():
        return await asyncio.gather(*(engine.rank_async(user=user, **REQUEST) for user in range(32)))

    first, *others = asyncio.run(many())
    assert all(np.allclose(other.scores, first.scores, atol=1e-5) for other in others)
    assert engine.stats().answered == 32


def test_what_else_an_engine_does(engine):
    engine.rank(user=1, **REQUEST)
    assert engine.tasks == 2 and engine.provider == (pagoda.Provider.CPU, -1, "")
    assert "items" in engine.tables and engine.table_stats("items").lookups == 1
    assert engine.kv_stats().resident_owners == 1
    assert engine.unload([1]) == 1 and engine.prefetch([1]) == 0
    engine.swap(ENGINE)
    assert engine.forget(np.array([1, 2], np.uint64)) == 1


def test_requests_that_are_wrong(engine):
    with pytest.raises(pagoda.NotFoundError, match="events 0 to 4 of user 7") as failure:
        engine.rank(user=7, **REQUEST | {"start": 5})
    assert failure.value.argument == "request.start"
    with pytest.raises(pagoda.InvalidArgumentError, match="different numbers of keys"):
        engine.rank(user=7, **REQUEST | {"candidates": {"item": [1, 2], "genre": [3]}})
    with pytest.raises(pagoda.InvalidArgumentError, match="request.user: -1 does not fit"):
        engine.rank(user=-1, **REQUEST)
    with pytest.raises(pagoda.InvalidArgumentError, match="there are 1, and 2 events"):
        engine.rank(user=1, **REQUEST | {"event_times": [3]})
    with pytest.raises(TypeError, match="user"):
        engine.rank(**REQUEST)
    with pytest.raises(TypeError, match="request.cancel"):
        engine.rank(user=1, **REQUEST, cancel=engine)
    with pytest.raises(TypeError, match="float64 are not numbers"):
        engine.rank(user=1, **REQUEST | {"candidates": {"item": [1.5], "genre": [3]}})


def test_a_ranking_request_that_was_cancelled(engine):
    with pagoda.Cancel() as cancel:
        cancel.trigger()
        with pytest.raises(pagoda.CancelledError):
            engine.rank(user=1, **REQUEST, cancel=cancel)
        with pytest.raises(pagoda.CancelledError):
            asyncio.run(engine.rank_async(user=1, **REQUEST, cancel=cancel))


# ---- generating --------------------------------------------------------------------------------------------------


def test_the_first_token_is_that_of_transformers(generator):
    answer = generator.generate(tokens=PROMPTS[0], **GREEDY, logprobs=3, prompt_logprobs=1)
    assert answer.tokens[0] == EXPECTED["logits.0"][-1].argmax()
    assert answer.prompt_tokens == PROMPTS[0] and len(answer.prompt_logprobs) == len(PROMPTS[0])
    assert (answer.prompt_logprobs[0].rank, answer.prompt_logprobs[0].top) == (0, [])
    assert [logprobs.top[0][0] for logprobs in answer.choices[0].logprobs] == answer.tokens
    assert (len(answer.tokens), answer.finish_reason, answer.version) == (
        12,
        FinishReason.LENGTH,
        generator.info["version"],
    )


def test_every_way_to_ask_gives_the_same_answer(generator):
    request = pagoda.GenerateRequest(tokens=PROMPTS[0], **GREEDY, logprobs=1)
    whole = generator.generate(request)
    with generator.stream(request) as stream:
        tokens = list(stream)
    assert [token.id for token in tokens] == whole.tokens == stream.response().tokens
    assert "".join(token.text for token in tokens) == whole.text
    assert [token.finish_reason for token in tokens] == [FinishReason.NONE] * 11 + [FinishReason.LENGTH]
    assert [token.logprobs for token in tokens] == whole.choices[0].logprobs
    assert list(stream) == [], "a stream that was read has no more"

    async def in_asyncio():
        async with generator.stream(request) as stream:
            streamed = [token async for token in stream]
        return streamed, await stream.response_async(), await generator.generate_async(request)

    streamed, *answers = asyncio.run(in_asyncio())
    assert streamed == tokens and [answer.tokens for answer in answers] == [whole.tokens] * 2
    options = pagoda.GeneratorOptions(**SMALL, driver=pagoda.Driver.CALLER)
    with pagoda.Generator(LLAMA, options) as stepped:
        stream = stepped.stream(request)
        steps = 1
        while stepped.step():
            steps += 1
        assert (stream.response(10).tokens, steps) == (whole.tokens, 12)


def test_fields_of_a_request_arrive(generator):
    plain = generator.generate(tokens=PROMPTS[0], **GREEDY).tokens
    assert generator.generate(tokens=PROMPTS[0], **GREEDY, logit_bias={77: 1e6, 3: 1.0}).tokens == [77] * 12
    assert generator.generate(tokens=PROMPTS[0], **GREEDY, stop_tokens=[plain[5]]).finish_reason == FinishReason.STOP
    drawn = {
        "tokens": PROMPTS[0],
        "do_sample": True,
        "temperature": 1.5,
        "max_new_tokens": 8,
        "n": 3,
        "ignore_eos": True,
    }
    answers = [[choice.tokens for choice in generator.generate(**drawn, seed=7).choices] for _ in range(2)]
    assert answers[0] == answers[1] and len({tuple(tokens) for tokens in answers[0]}) == 3
    chosen = generator.generate(tokens=PROMPTS[0], grammar={"choice": ["yes", "no"]}, max_new_tokens=20)
    assert chosen.text in ("yes", "no") and chosen.choices[0].missing is None
    cut = generator.generate(tokens=PROMPTS[0], grammar='{"regex": "[0-9]{50}"}', max_new_tokens=2)
    assert cut.choices[0].missing
    assert generator.generate("hello", max_new_tokens=1, echo=True).text.startswith("hello")


def test_tokens_and_texts(generator):
    messages = [{"role": "user", "content": "Hi 塔"}]
    tokens = generator.tokenize(messages=messages)
    assert tokens == generator.tokenize(messages=json.dumps(messages))
    assert generator.generate(messages=messages, max_new_tokens=1).prompt_tokens == tokens
    assert "Hi 塔" in generator.detokenize(np.array(tokens, np.uint32))
    assert len(generator.detokenize(tokens, skip_special=False)) > len(generator.detokenize(tokens))
    assert generator.tokenize("") == generator.tokenize(pagoda.GenerateRequest(""))


def test_sessions(generator):
    for known in 0, 1:
        answer = generator.generate(tokens=PROMPTS[0] * 4, session="a", **GREEDY)
        assert (answer.cached_tokens > 0) == bool(known)
    assert generator.forget(["a", "b"]) == 1
    generator.generate(tokens=PROMPTS[0], session="a", **GREEDY)
    assert (generator.unload(["a", "b"]), generator.prefetch(["a"])) == (1, 0)
    generator.generate(tokens=PROMPTS[0], session="a", **GREEDY)
    assert generator.clear(stored=True) > 0
    assert generator.stats().answered == 4 and generator.kv_stats().resident_owners == 0
    assert generator.provider == (pagoda.Provider.CPU, -1, "")


def test_a_policy(generator):
    policy = pagoda.KvPolicy(name="lastrec", cache_length=16)
    with pagoda.Generator(LLAMA, pagoda.GeneratorOptions(**SMALL, kv_policy=policy)) as small:
        answer = small.generate(tokens=PROMPTS[0], **GREEDY | {"max_new_tokens": 40})
        assert len(answer.tokens) == 40


@pytest.mark.parametrize("model", [None, LLAMA])
def test_drafts_change_no_token(generator, model):
    request = GREEDY | {"tokens": [5, 6, 7, 8] * 12, "max_new_tokens": 60}
    plain = generator.generate(**request).tokens
    assert generator.stats().drafts == 0
    assert generator.generate(**request, max_draft=8).tokens == plain and generator.stats().drafts > 0
    options = pagoda.GeneratorOptions(**SMALL, max_draft=4, draft_model=model, draft_kv_bytes=1 << 20)
    with pagoda.Generator(LLAMA, options) as drafting:
        assert drafting.generate(**request, max_draft=0).tokens == plain and drafting.stats().drafts == 0
        assert drafting.generate(**request).tokens == plain
        stats = drafting.stats()
        assert 0 < stats.drafts <= stats.drafted_tokens and stats.accepted_tokens <= stats.drafted_tokens
        drafting.set_speculation(False)
        drafting.generate(**request)
        assert drafting.stats().drafts == stats.drafts
        drafting.set_speculation(True)
        drafting.generate(**request)
        assert drafting.stats().drafts > stats.drafts
        drafting.set_speculation(False, clear=True)
        assert drafting.generate(**request).tokens == plain
        stats = drafting.stats()
        assert stats.drafts == stats.drafted_tokens == stats.accepted_tokens == 0


def test_beams_are_the_best_answers_with_their_scores(generator):
    request = GREEDY | {"tokens": PROMPTS[0]}
    plain = generator.generate(**request)
    assert plain.choices[0].score is None
    one = generator.generate(**request, beams=pagoda.BeamOptions(width=1, early_stop=pagoda.EarlyStop.WHEN_FULL))
    assert one.tokens == plain.tokens and one.choices[0].score < 0
    for penalty in 1, -2:
        beams = pagoda.BeamOptions(length_penalty=penalty, early_stop=pagoda.EarlyStop.NEVER)
        found = generator.generate(**request, n=4, logprobs=0, beams=beams).choices
        scores = [choice.score for choice in found]
        assert len(found) == 4 and scores == sorted(scores, reverse=True)
        for choice in found:
            total = sum(token.logprob for token in choice.logprobs)
            assert choice.score == pytest.approx(total / len(choice.tokens) ** penalty, rel=1e-3)
    with pytest.raises(pagoda.InvalidArgumentError) as failure:
        generator.generate(**request, beams=pagoda.BeamOptions(width=17))
    assert failure.value.argument == "request.beams.width"


def test_requests_for_text_that_are_wrong(generator):
    def waiting(**fields):
        asyncio.run(generator.generate_async(**fields))

    wrong = {
        "request.top_p": {"top_p": 7.0},
        "request.tokens": {"tokens": [-1]},
        "request.grammar.nonsense": {"grammar": {"nonsense": 1}},
        "request.prompt": {"tokens": None, "prompt": "a\0b"},
        "request.seed": {"seed": -1},
    }
    for argument, fields in wrong.items():
        for ask in generator.generate, generator.stream, waiting:
            with pytest.raises(pagoda.InvalidArgumentError) as failure:
                ask(**{"tokens": PROMPTS[0]} | fields)
            assert failure.value.argument == argument and str(failure.value).startswith(argument)
    with pytest.raises(TypeError, match="beams"):
        generator.generate("x", beams=4)
    with pytest.raises(TypeError, match="is one text"):
        generator.generate("x", stop="one text")
    with pytest.raises(TypeError, match="options: .* is no GeneratorOptions"):
        pagoda.Generator(LLAMA, pagoda.EngineOptions())


# ---- ending early ------------------------------------------------------------------------------------------------


@pytest.fixture
def stepped():
    """A generator whose answers wait for the steps of the test, so that none ends too early."""
    with pagoda.Generator(LLAMA, pagoda.GeneratorOptions(**SMALL, driver=pagoda.Driver.CALLER)) as generator:
        yield generator


def ended_early(generator):
    """How many answers did not come to their end, when there is nothing left to do."""
    while generator.step():
        pass
    stats = generator.stats()
    assert (stats.waiting, stats.running, stats.answered, stats.failed) == (0, 0, 0, 0)
    return stats.ended_early


def test_an_answer_that_was_cancelled_has_what_it_has(stepped):
    with stepped.stream(**ENDLESS) as stream:
        for _ in range(3):
            stepped.step()
            next(stream)
        assert not stream.ended
        stream.cancel()
        assert ended_early(stepped) == 1
        assert list(stream) == [] and stream.ended
        assert (stream.response().finish_reason, len(stream.response().tokens)) == (FinishReason.CANCELLED, 3)
    assert stepped.generate(**ENDLESS, timeout_us=1).finish_reason == FinishReason.TIMEOUT


def test_the_cancel_of_the_caller_is_the_callers(stepped):
    with pagoda.Cancel() as cancel:
        stream = stepped.stream(**ENDLESS, cancel=cancel)
        stepped.step()
        stream.close()
        assert stepped.step() and not stream.ended, "closing has cancelled it"
        cancel.trigger()
        assert ended_early(stepped) == 1
        assert stream.response(10).finish_reason == FinishReason.CANCELLED


def test_a_stream_that_is_left_is_cancelled(stepped):
    with stepped.stream(**ENDLESS) as stream:
        stepped.step()
        next(stream)
    assert ended_early(stepped) == 1
    stream = stepped.stream(**ENDLESS)
    stepped.step()
    for _ in stream:
        break
    del stream
    assert ended_early(stepped) == 2, "the stream was forgotten"


def test_a_task_that_is_cancelled_cancels_its_request(stepped):
    async def leave():
        stream = stepped.stream(**ENDLESS)
        stepped.step()
        async for _ in stream:
            break
        del stream
        task = asyncio.create_task(stepped.generate_async(**ENDLESS))
        reader = asyncio.create_task(anext(stepped.stream(**ENDLESS)))
        await asyncio.sleep(0.01)
        for waiting in task, reader:
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

        stream = stepped.stream(**ENDLESS)
        reader = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.01)
        stream.close()
        with pytest.raises(StopAsyncIteration):
            await reader

    asyncio.run(leave())
    assert ended_early(stepped) == 4


@pytest.mark.parametrize("kind", [asyncio.Task, asyncio.tasks._PyTask], ids=["in C", "in Python"])
def test_a_task_that_has_waited_too_long_can_go_on(stepped, kind):
    """The stream is what such a task awaits, and not a future of asyncio."""
    variable = contextvars.ContextVar("variable")

    async def read():
        variable.set(7)
        stream = stepped.stream(tokens=PROMPTS[0], **GREEDY)
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await anext(stream)
        asyncio.get_running_loop().call_later(0.01, stepped.step)
        read = [await anext(stream)]
        while stepped.step():
            pass
        assert variable.get() == 7
        return read + [token async for token in stream]

    async def main():
        loop = asyncio.get_running_loop()
        loop.set_task_factory(lambda loop, coroutine, **more: kind(coroutine, loop=loop, **more))
        return await loop.create_task(read())

    assert [token.id for token in asyncio.run(main())] == stepped.generate(tokens=PROMPTS[0], **GREEDY).tokens


def test_a_reader_that_does_not_read_holds_nobody_up(generator):
    idle = [generator.stream(tokens=PROMPTS[0], **GREEDY) for _ in range(4)]
    assert len(generator.generate(tokens=PROMPTS[1], **GREEDY).tokens) == 12
    assert [len(stream.response(10).tokens) for stream in idle] == [12] * 4
    assert [len(list(stream)) for stream in idle] == [12] * 4, "the tokens are still there"


def test_closing_ends_what_runs(stepped):
    stream = stepped.stream(**ENDLESS)
    stepped.step()
    next(stream)
    stepped.close()
    stepped.close()
    assert stream.response(10).finish_reason == FinishReason.CANCELLED
    assert list(stream) == []
    with pytest.raises(pagoda.InvalidHandleError):
        stepped.stream(**ENDLESS)


def test_a_request_that_fails_says_so_to_its_stream():
    options = pagoda.GeneratorOptions(kv_size=2, kv_size_unit=pagoda.KvSizeUnit.PAGES, model=ONE)
    with pagoda.Generator(LLAMA, options) as generator:
        with pytest.raises(pagoda.CapacityError):
            list(generator.stream(tokens=PROMPTS[0] * 3, **GREEDY))


def test_a_busy_interpreter_holds_nobody_up(generator):
    """The GIL is not free for half a second, and the tokens come all the same."""
    generator.generate(tokens=PROMPTS[0], **GREEDY)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        stream = generator.stream(tokens=PROMPTS[0], **GREEDY)
        until = time.perf_counter() + 0.5
        while time.perf_counter() < until:
            pass
        came = [stream._tokens.next(0) for _ in range(12)]
    finally:
        sys.setswitchinterval(interval)
    assert all(isinstance(token, pagoda.Token) for token in came), came
    assert len(stream.response(10).tokens) == 12


# ---- threads -----------------------------------------------------------------------------------------------------


def test_eight_threads(engine, generator):
    expected = engine.rank(user=1, **REQUEST).scores
    tokens = generator.generate(tokens=PROMPTS[0], **GREEDY).tokens

    def work(number):
        for _ in range(5):
            assert np.allclose(engine.rank(user=number, **REQUEST).scores, expected, atol=1e-5)
            assert generator.generate(tokens=PROMPTS[0], **GREEDY).tokens == tokens
            with generator.stream(tokens=PROMPTS[0], **GREEDY) as stream:
                assert [token.id for token in stream] == tokens
        return number

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == list(range(8))


def test_eight_tasks(generator):
    tokens = generator.generate(tokens=PROMPTS[0], **GREEDY).tokens

    async def read():
        return [token.id async for token in generator.stream(tokens=PROMPTS[0], **GREEDY)]

    async def leave():
        async for token in generator.stream(tokens=PROMPTS[0], **GREEDY):
            return [token.id]

    async def many(do):
        return await asyncio.gather(*(do() for _ in range(8)))

    # Of earlier tests something may be left to be collected.
    gc.collect()
    files = os.listdir("/proc/self/fd")
    assert asyncio.run(many(read)) == [tokens] * 8
    assert asyncio.run(many(leave)) == [tokens[:1]] * 8
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == len(files), "a stream has left a file open"


def test_closing_while_others_call():
    """Calls end well, or with the error of an object that was closed."""

    def use(opened, call):
        for _ in range(1000):
            try:
                call(opened)
            except pagoda.InvalidHandleError:
                return True

    for open_it, call in (
        (lambda: pagoda.Engine(ENGINE, pagoda.EngineOptions(**SMALL)), lambda it: it.rank(user=1, **REQUEST)),
        (
            lambda: pagoda.Generator(LLAMA, pagoda.GeneratorOptions(**SMALL)),
            lambda it: it.generate(tokens=PROMPTS[0], **GREEDY),
        ),
    ):
        opened = open_it()
        with ThreadPoolExecutor(8) as pool:
            used = [pool.submit(use, opened, call) for _ in range(7)]
            time.sleep(0.05)
            opened.close()
            assert all(future.result(60) for future in used)


def test_the_gil_is_free_during_a_call():
    """A call that takes 0.3 s, and what another thread does meanwhile."""
    spans, times = [], []
    # The request waits so long for others that could run with it.
    with pagoda.Engine(ENGINE, pagoda.EngineOptions(**SMALL, max_delay_us=300_000)) as engine:

        def wait():
            began = time.monotonic()
            engine.rank(user=1, **REQUEST)
            spans.append((began, time.monotonic()))

        thread = threading.Thread(target=wait)
        thread.start()
        while thread.is_alive():
            times.append(time.monotonic())
            time.sleep(0.001)
        thread.join()
    ((began, ended),) = spans
    inside = [moment for moment in times if began + 0.01 < moment < ended - 0.01]
    # If the call held the GIL, there would be none; on a busy machine there are at least some.
    assert ended - began > 0.25 and len(inside) > 2, (ended - began, len(inside))


# ---- the end of the process --------------------------------------------------------------------------------------


def program(code):
    """Another process with a generator whose requests wait until it takes a step."""
    options = "pagoda.GeneratorOptions(driver=pagoda.Driver.CALLER)"
    begin = f"import pagoda\ngenerator = pagoda.Generator({str(LLAMA)!r}, {options})\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "bindings/python")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", begin + code], env=environment, **pipes)


def test_a_process_ends_while_a_stream_runs():
    code = "pagoda.set_log(pagoda.LogLevel.TRACE)\nstream = generator.stream('x')\ngenerator.step()\nprint(next(stream).choice)"
    ended = program(code)
    assert ended.communicate(timeout=60) == ("0\n", "") and ended.returncode == 0


def test_ctrl_c_cancels_an_answer():
    """One that takes more than a minute: 1,000 answers of 500 tokens, one after the other."""
    code = "slow = pagoda.Generator(generator_folder, pagoda.GeneratorOptions(max_batch=1))\nprint('go', flush=True)\ntry:\n"
    code = code.replace("generator_folder", repr(str(LLAMA)))
    code += (
        "    slow.generate(tokens=[5], ignore_eos=True, n=1000, context_end=1)\nexcept KeyboardInterrupt:\n    pass\n"
    )
    code += "slow.close()\nprint(slow.closed, pagoda.live_objects())"
    waiting = program(code)
    assert waiting.stdout.readline() == "go\n"
    time.sleep(0.3)
    began = time.monotonic()
    waiting.send_signal(signal.SIGINT)
    # The generator of `program` is the one that is open.
    assert waiting.communicate(timeout=60) == ("True 1\n", "") and waiting.returncode == 0
    assert time.monotonic() - began < 30


def test_ctrl_c_reaches_a_reader():
    code = "stream = generator.stream('x')\nprint('go', flush=True)\ntry:\n    next(stream)\n"
    waiting = program(code + "except KeyboardInterrupt:\n    print('interrupted')")
    assert waiting.stdout.readline() == "go\n"
    time.sleep(0.2)
    waiting.send_signal(signal.SIGINT)
    assert waiting.communicate(timeout=60) == ("interrupted\n", "") and waiting.returncode == 0
