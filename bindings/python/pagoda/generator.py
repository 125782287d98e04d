"""Generators: language models, served. Prompts in, text out."""

from __future__ import annotations

import asyncio
import json
import os
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias, cast

from ._native import (
    Numbers,
    Object,
    StrPath,
    Struct,
    call,
    decoded,
    ffi,
    initialised,
    instance_of,
    kept,
    lib,
    listed,
    numbers,
    out,
    pending,
    read_error,
    streams,
    taken,
    takes,
    text,
    texts,
    written,
)
from .cancel import Cancel, awaited
from .engine import ProviderInfo, provider_info
from .kv import KvSizeUnit, KvStats
from .model import ModelOptions, opening
from .store import StoreOptions

Json: TypeAlias = str | Mapping[str, Any] | Sequence[Any]
"""JSON as a text, or as what json.dumps takes."""


class Driver(IntEnum):
    """What runs the steps of a generator."""

    THREAD = 0
    """A thread of the generator."""
    CALLER = 1
    """The caller: `Generator.step` runs one step, and `Generator.generate` as many as its request needs."""


class KvFormat(IntEnum):
    """How pages hold keys and values."""

    DEFAULT = 0
    """As the model was exported."""
    NATIVE = 1
    """Numbers of the type that the model computes in."""
    INT8 = 2
    """8 bits, with a scale and a low end for each head of each token."""
    INT4 = 3
    """4 bits, with a scale and a low end for each head of each token."""
    FP8 = 4
    """Floating-point numbers of 8 bits (e4m3fn), with a scale for each head of each token."""


class ContextEnd(IntEnum):
    """What happens if prompt and answer do not fit into the model's context."""

    REFUSE = 0
    """The request is rejected."""
    STOP = 1
    """The answer ends where the context does, as if `max_new_tokens` were less."""


class FinishReason(IntEnum):
    """Why an answer ended."""

    NONE = 0
    """It has not ended."""
    STOP = 1
    """An end-of-sequence token, a stop token, or a stop text."""
    LENGTH = 2
    """`max_new_tokens`, or the end of the context."""
    CANCELLED = 3
    """It was cancelled."""
    TIMEOUT = 4
    """Its time limit was exceeded."""


class EarlyStop(IntEnum):
    """When a beam search ends that has as many finished answers as beams."""

    WHEN_UNLIKELY = 0
    """When no beam has a better score at its length than the worst of them."""
    WHEN_FULL = 1
    """At once."""
    NEVER = 2
    """When no beam can get a better score at any length than the worst of them."""


_REASONS = {reason.value: reason for reason in FinishReason}


@dataclass(kw_only=True)
class KvPolicy(Struct, struct="pagoda_kv_policy"):
    """A fixed number of slots for the keys and values of each sequence, however long it is."""

    name: str
    """Which tokens stay: "dense" (all of them, and a longer sequence is rejected), "lastrec", "smart-lastrec", "h2o",
    "h2o-orig", "h2o-vlen" and, for quantised pages, "qh2o" and "qh2o-vlen"."""
    cache_length: int = 0
    """The slots of a sequence in each layer. With "dense" 0 is no limit."""
    chunk_size: int = 64
    """The maximum number of tokens of a prompt that one step reads once the slots are full."""
    protect: int | None = None
    """With lastrec and smart-lastrec: the tokens at the beginning that always stay; None: for lastrec an eighth of the
    slots, from 1 to 16; for smart-lastrec half of them."""
    grace_period: int = 0
    """With h2o: the newest tokens, so many of them, stay whatever their weights."""
    keep_initial_fraction: float = 0.05
    """With h2o: the part of the slots that the first eviction leaves alone at the beginning."""
    normalise: bool = False
    """With h2o: the weights that a token got are divided by the time that it has been there."""
    score_share: float = 0.5
    """With qh2o: how much a token's weights count against what quantisation took from it, from 0 to 1."""
    cache_lengths: Numbers | None = None
    """The slots of each layer, instead of `cache_length`; None: all have as many."""
    protect_first_message: bool = False
    """With lastrec and smart-lastrec: the tokens of a chat's first message always stay."""


@dataclass(kw_only=True)
class GeneratorOptions(Struct, struct="pagoda_generator_options"):
    """How to open a generator."""

    driver: Driver = Driver.THREAD
    """What runs the steps."""
    share_prefixes: bool = True
    """Sequences share the pages of equal prefixes."""
    max_batch: int = 64
    """The maximum number of sequences that run at the same time."""
    max_batch_tokens: int = 512
    """The maximum number of rows of a step: one for each sequence that decodes, and the chunks of prompts."""
    max_stretch: float = 1.5
    """How much longer a step may take than one without prompts, while sequences decode. At least 1.1; 0: no limit but
    `max_batch_tokens`."""
    max_prompt_tokens: int = 0
    """The maximum number of tokens of a prompt; 0: what the model's context has."""
    max_new_tokens: int = 0
    """The maximum number of new tokens that a request may ask for; 0: what the model's context has."""
    queue: int = 4096
    """The maximum number of answers that wait for their turn. A request beyond it is a `CapacityError`."""
    kv_size_unit: KvSizeUnit = KvSizeUnit.DEFAULT
    """The unit of `kv_size`; DEFAULT: 1 GiB."""
    kv_size: int = 0
    """The size of the pool of keys and values. A sequence that does not fit into it is rejected."""
    kv_format: KvFormat = KvFormat.DEFAULT
    """How pages hold keys and values, on the GPU, in host memory and on disk."""
    host_bytes: int = 0
    """Bytes of host memory for keys and values that were evicted from the pool; 0: none."""
    model: ModelOptions | None = None
    """Where the model runs, and on how many threads. Its `tables` must be None."""
    store_path: StrPath | None = None
    """The folder of a store for keys and values; None: none. Sessions survive a restart in it."""
    store_options: StoreOptions | None = None
    """How the store is opened."""
    kv_policy: KvPolicy | None = None
    """A fixed number of slots for the keys and values of each sequence; None: all tokens stay."""
    max_draft: int = 0
    """The `max_draft` of requests that do not say, 0 to 64; 0: nothing is guessed."""
    draft_model: StrPath | None = None
    """The folder of a smaller model with the same tokenizer, which guesses tokens; None: they are looked up in the prompt
    and the answer."""
    draft_kv_bytes: int = 256 << 20
    """Bytes of that model's pool of keys and values. What does not fit is not guessed."""

    def fill(self, made: Any, argument: str, keep: list[Any]) -> None:
        super().fill(made, argument, keep)
        if self.model is None:
            made.model = ModelOptions().to_c(f"{argument}.model", keep)


@dataclass(kw_only=True)
class BeamOptions(Struct, struct="pagoda_beam_options"):
    """A beam search."""

    width: int = 4
    """The number of beams, 1 to 16."""
    length_penalty: float = 1
    """The score of an answer is the sum of its log probabilities over its number of tokens to this power. Above 0 long
    answers get better scores, below 0 short ones."""
    early_stop: EarlyStop = EarlyStop.WHEN_UNLIKELY
    """When the search ends."""


@dataclass
class GenerateRequest(Struct, struct="pagoda_generate_request"):
    """A request for text. It has one of `prompt`, `tokens` and `messages`.

    A number that is None is not given: it is as `generation` in the model's pagoda.json says, or, if that does not say
    either, as the comment of the field says.
    """

    json_fields: ClassVar[frozenset[str]] = frozenset({"messages", "tools", "variables", "grammar"})

    prompt: str | None = None
    """What the text follows, as a text. The special tokens that the model's tokenizer puts before a text are added."""
    # Only the prompt goes without its name.
    _: KW_ONLY
    tokens: Numbers | None = None
    """What the text follows, as tokens."""
    messages: Json | None = None
    """What the text follows, as the messages of a chat: a list of mappings with `role` and `content`, and whatever else
    the model's chat template takes."""
    tools: Json | None = None
    """With `messages`: the tools that the model may call."""
    variables: Json | None = None
    """With `messages`: more variables of the chat template."""
    add_generation_prompt: bool = True
    """With `messages`: the prompt ends before an answer of the model; otherwise after the last message."""
    max_new_tokens: int | None = None
    """The maximum number of tokens of an answer; None: as many as the context has room for."""
    min_new_tokens: int | None = None
    """The number of tokens before which no end-of-sequence token is taken; None: 0."""
    do_sample: bool | None = None
    """Whether tokens are drawn, or the most likely one is taken; None: drawn if `temperature` is given and not 0."""
    temperature: float | None = None
    """What logits are divided by; 0: the most likely token is taken; None: 1."""
    top_k: int | None = None
    """The number of most likely tokens that are drawn from; None or 0: all."""
    top_p: float | None = None
    """The probability that the tokens drawn from have together, 0 to 1; None: 1."""
    min_p: float | None = None
    """The least probability of a token that is drawn, relative to the most likely one, 0 to 1; None: 0."""
    repetition_penalty: float | None = None
    """The penalty of tokens in the prompt and in the answer so far, above 0; None: 1, which is none."""
    presence_penalty: float = 0
    """Subtracted from the logits of tokens that the answer has, -2 to 2."""
    frequency_penalty: float = 0
    """Subtracted from the logits of tokens as often as the answer has them, -2 to 2."""
    no_repeat_ngram_size: int | None = None
    """No sequence of so many tokens occurs twice; None or 0: any may."""
    forced_eos: int | None = None
    """The token that the last of `max_new_tokens` is forced to be; None: none is forced."""
    ignore_eos: bool = False
    """End-of-sequence tokens do not end the answer."""
    stop: Sequence[str] = ()
    """Texts that end the answer. The answer does not have them."""
    stop_tokens: Numbers = ()
    """Tokens that end the answer, beside the model's end-of-sequence tokens."""
    include_stop: bool = False
    """The answer's text has the stop text that ended it."""
    skip_special: bool = True
    """The answer's text leaves special tokens out."""
    logit_bias: Mapping[int, float] | None = None
    """What is added to the logits of tokens; -1e30 bans a token."""
    logprobs: int | None = None
    """The log probabilities of the answer's tokens, and of so many most likely tokens in their places; None: none."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens. The prompt is then computed as a whole."""
    n: int = 1
    """The number of answers."""
    echo: bool = False
    """The text of an answer begins with the prompt."""
    priority: int = 0
    """Requests of higher priority run first."""
    context_end: ContextEnd = ContextEnd.REFUSE
    """What happens if prompt and answer do not fit into the model's context."""
    seed: int | None = None
    """The seed of the draws; None: another one for each request."""
    timeout_us: int = 0
    """The time limit in microseconds; 0: none. The answer then has what was generated until then."""
    session: str | None = None
    """The conversation that the request belongs to. Its keys and values are kept, in the store too. Send the whole
    conversation as the prompt: only what is new is computed."""
    cancel: Cancel | None = None
    """Cancels the request when triggered. The answer then has what was generated until then."""
    kv_policy: KvPolicy | None = None
    """Which tokens stay in the slots of the request's sequences; None: as the generator was opened."""
    grammar: Json | None = None
    """What the answer has to look like: {"json_schema": {...}}, {"regex": "[0-9]+"}, {"choice": ["yes", "no"]} or
    {"lark": "start: ..."}."""
    max_draft: int | None = None
    """The maximum number of tokens that are guessed for one step, 0 to 64. The answer is the same, sooner where much of it
    repeats the prompt. None: as the generator was opened."""
    beams: BeamOptions | None = None
    """A beam search, of which the answers are the `n` best, the best first. There are fewer answers where fewer are found.
    Nothing is drawn, and the request has no session. A stream gets no token before the search has ended: then those of the
    first answer come, then those of the second, and so on."""


@dataclass(frozen=True)
class TokenLogprobs(Struct, struct="pagoda_token_logprobs"):
    """What the model thought of a token, before anything that the request asked for."""

    made_of: ClassVar[Mapping[str, str]] = {"top_tokens": "top", "top_logprobs": "top", "top_count": "top"}

    logprob: float
    """The natural logarithm of the token's probability."""
    rank: int
    """Its place among all tokens, 1 for the most likely; 0: it has no probability, as the first token of a prompt."""
    top: list[tuple[int, float]]
    """The most likely tokens and their log probabilities, the most likely first: as many as were asked for."""

    @classmethod
    def from_c(cls, read: Any) -> TokenLogprobs:
        count = read.top_count
        top = zip(listed(read.top_tokens, count), listed(read.top_logprobs, count), strict=True)
        return cls(read.logprob, read.rank, list(top))


class Token(NamedTuple):
    """A token of an answer, as it is generated."""

    text: str
    """The text that is new. Empty if the token ends inside a character, or if the text may begin a stop text."""
    id: int
    """The token."""
    choice: int
    """Which answer it belongs to."""
    finish_reason: FinishReason
    """Why the answer ends with this token; NONE if it does not."""
    logprobs: TokenLogprobs | None
    """The log probabilities, if they were asked for."""


@dataclass(frozen=True)
class Choice(Struct, struct="pagoda_generate_choice"):
    """One answer."""

    made_of: ClassVar[Mapping[str, str]] = {"text_length": "text", "logprob_count": "logprobs"}

    text: str
    """Its text."""
    tokens: list[int]
    """Its tokens. Those that ended it are the last ones."""
    finish_reason: FinishReason
    """Why it ended."""
    logprobs: list[TokenLogprobs]
    """The log probabilities of its tokens, if they were asked for."""
    queued_ns: int
    """Nanoseconds from the request to its first step."""
    first_token_ns: int
    """Nanoseconds from the request to the first token."""
    generation_ns: int
    """Nanoseconds from the first token to the last."""
    missing: str | None
    """What the request's grammar expects next, if the answer ended before it was valid."""
    score: float | None
    """Of an answer of a beam search: the sum of its log probabilities over its number of tokens to the power of the length
    penalty. Penalties and `logit_bias` are part of it."""


@dataclass(frozen=True)
class GenerateResponse(Struct, struct="pagoda_generate_info"):
    """The answers to a request."""

    made_of: ClassVar[Mapping[str, str]] = {"choice_count": "choices", "prompt_logprob_count": "prompt_logprobs"}

    choices: list[Choice]
    """The answers."""
    prompt_tokens: list[int]
    """The tokens of the prompt."""
    prompt_logprobs: list[TokenLogprobs]
    """The log probabilities of the prompt's tokens, if they were asked for."""
    cached_tokens: int
    """The number of prompt tokens whose keys and values were cached, of the first answer."""
    computed_tokens: int
    """The number of rows that were computed for all answers."""
    version: str
    """The version of the model, as in its pagoda.json."""

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return self.choices[0].text

    @property
    def tokens(self) -> list[int]:
        """The tokens of the first answer."""
        return self.choices[0].tokens

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first answer ended."""
        return self.choices[0].finish_reason

    @classmethod
    def _taken(cls, handle: Any) -> GenerateResponse:
        """All of a response in C, which is freed."""
        try:
            info = initialised("pagoda_generate_info")
            call(lib.pagoda_generate_response_info, handle, info)
            prompt = lib.pagoda_generate_response_prompt_logprobs
            return cls(
                choices=[_choice(handle, index) for index in range(info.choice_count)],
                prompt_tokens=listed(info.prompt_tokens, info.prompt_token_count),
                prompt_logprobs=[
                    TokenLogprobs.filled(prompt, handle, index) for index in range(info.prompt_logprob_count)
                ],
                cached_tokens=info.cached_tokens,
                computed_tokens=info.computed_tokens,
                version=decoded(info.version),
            )
        finally:
            lib.pagoda_generate_response_free(handle)


def _choice(handle: Any, index: int) -> Choice:
    read = initialised("pagoda_generate_choice")
    call(lib.pagoda_generate_response_choice, handle, index, read)
    logprobs = lib.pagoda_generate_response_logprobs
    return Choice(
        text=_text(read),
        tokens=listed(read.tokens, read.token_count),
        finish_reason=FinishReason(read.finish_reason),
        logprobs=[TokenLogprobs.filled(logprobs, handle, index, token) for token in range(read.logprob_count)],
        queued_ns=read.queued_ns,
        first_token_ns=read.first_token_ns,
        generation_ns=read.generation_ns,
        missing=decoded(read.missing) if read.missing else None,
        score=read.score if read.has_score else None,
    )


def _text(read: Any) -> str:
    """The text of an answer or of a token, which may have NULs in it."""
    return cast(bytes, ffi.unpack(read.text, read.text_length)).decode() if read.text_length else ""


@dataclass(frozen=True)
class GeneratorStats(Struct, struct="pagoda_generator_stats"):
    """The state of a generator, and counters since it was opened."""

    answered: int
    """Answers that ended with a stop or at their length."""
    ended_early: int
    """Answers that were cancelled or exceeded their time limit."""
    failed: int
    """Answers that failed, and requests that were rejected."""
    steps: int
    """Steps."""
    computed_tokens: int
    """Rows that were computed."""
    cached_tokens: int
    """Tokens of prompts whose keys and values were cached."""
    generated_tokens: int
    """Tokens of answers."""
    preemptions: int
    """Sequences that were preempted because pages ran out."""
    waiting: int
    """Sequences that wait."""
    running: int
    """Sequences that run."""
    step_us: int
    """Microseconds that the steps took in all."""
    model_us: int
    """Microseconds of them that the model took."""
    drafted_tokens: int
    """Tokens that were guessed and computed."""
    accepted_tokens: int
    """Those of them that were right."""
    drafts: int
    """Steps of a sequence with such tokens."""


# ---- streams -----------------------------------------------------------------------------------------------------


class _Answer:
    """A request that runs, until its end."""

    def __init__(self) -> None:
        self.response: Future[GenerateResponse] = pending()

    def end(self) -> None:
        """Called after the response is there."""


class _Tokens(_Answer):
    """A request whose tokens go into a queue in C (native/stream.h). The library's threads do not wait for a reader, and
    take the GIL only at the end of a request."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = streams.pagoda_python_stream_new()
        if not self.queue:
            raise MemoryError
        weakref.finalize(self, streams.pagoda_python_stream_free, self.queue).atexit = False

    def end(self) -> None:
        streams.pagoda_python_stream_end(self.queue)

    def next(self, milliseconds: int) -> Token | bool:
        """The next token; False at the end; True if there may be more later."""
        place = ffi.new("pagoda_generate_token **")
        found = streams.pagoda_python_stream_next(self.queue, milliseconds, place)
        if found != 1:
            if found == -2:
                raise MemoryError("there was no memory for a token of the stream")
            return bool(found)
        token = place[0]
        length, logprobs = token.text_length, token.logprobs
        text = ffi.unpack(token.text, length).decode() if length else ""
        told = TokenLogprobs.from_c(logprobs) if logprobs else None
        made = Token(text, token.id, token.choice, _REASONS[token.finish_reason], told)
        streams.pagoda_python_token_free(token)
        return made


class _Waker:
    """Wakes a task of a loop when there is a token."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self.fd = loop, os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.waiter: asyncio.Future[None] | None = None
        loop.add_reader(self.fd, self.wake)

    def wake(self) -> None:
        os.eventfd_read(self.fd)
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def wait(self, tokens: _Tokens) -> None:
        self.waiter = self.loop.create_future()
        if not streams.pagoda_python_stream_watch(tokens.queue, self.fd):
            await self.waiter

    def close(self) -> None:
        if not self.loop.is_closed():
            self.loop.remove_reader(self.fd)
            if self.waiter is not None and not self.waiter.done():
                self.waiter.set_result(None)
        os.close(self.fd)


@ffi.callback("pagoda_generate_callback")  # type: ignore[untyped-decorator]
def _ended(user_data: Any, status: int, response: Any, error: Any) -> None:
    answer = taken(user_data)
    try:
        if status:
            answer.response.set_exception(read_error(status, error))
        else:
            answer.response.set_result(GenerateResponse._taken(response))
    except BaseException as failure:
        answer.response.set_exception(failure)
        raise
    finally:
        answer.end()


class TokenStream(Iterator[Token], AsyncIterator[Token]):
    """The tokens of a request as they are generated, for `for` and for `async for`. The request runs whether the tokens
    are read or not; one that failed raises after its last token. A stream that is closed, left by its `with`, or
    forgotten before its end is cancelled, unless the request has a `cancel` of the caller. Threads may share a stream;
    of tasks only one may wait for it at a time.

    ```python
    with generator.stream("Once upon a time", max_new_tokens=100) as stream:
        for token in stream:
            print(token.text, end="", flush=True)
    ```
    """

    def __init__(self, generator: Generator, request: GenerateRequest) -> None:
        """Streams are made by `Generator.stream`."""
        # The generator is not closed as garbage while its stream is read.
        self._generator, self._read, self._waker = generator, True, cast(_Waker | None, None)
        self._shared = request.cancel is not None
        keep: list[Any] = []
        made = request.to_c("request", keep)
        self._tokens = _Tokens()
        self._cancel = Cancel() if request.cancel is None else request.cancel
        made.cancel = self._cancel.handle
        user_data = kept(self._tokens, ffi.cast("void *", self._tokens.queue))
        try:
            push = streams.pagoda_python_stream_push
            call(lib.pagoda_generator_generate_async, generator.handle, made, push, _ended, user_data)
        except BaseException:
            taken(user_data)
            if not self._shared:
                self._cancel.close()
            raise
        self._read = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Token:
        while not self._read:
            # Not for ever, so that Ctrl-C is noticed.
            if isinstance(token := self._tokens.next(100), Token):
                return token
            if not token:
                self._end()
        raise StopIteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        while not self._read:
            if isinstance(token := self._tokens.next(0), Token):
                return token
            if not token:
                self._end()
            else:
                await self._wait()
        raise StopAsyncIteration

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        if self._waker is None or self._waker.loop is not loop:
            self._sleep()
            self._waker = _Waker(loop)
        await self._waker.wait(self._tokens)

    def _sleep(self) -> None:
        """Wakes no task any more."""
        waker, self._waker = self._waker, None
        if waker is not None:
            streams.pagoda_python_stream_watch(self._tokens.queue, -1)
            try:
                inside = asyncio.get_running_loop() is waker.loop
            except RuntimeError:
                inside = False
            if inside or waker.loop.is_closed():
                waker.close()
            else:
                waker.loop.call_soon_threadsafe(waker.close)

    def _end(self) -> None:
        """After the last token: raises what the request failed with."""
        self._read = True
        self._sleep()
        if not self._shared:
            self._cancel.close()
        self._tokens.response.result()

    def response(self, timeout: float | None = None) -> GenerateResponse:
        """The whole answer; waits for its end, up to `timeout` seconds. It need not be read token by token."""
        return self._tokens.response.result(timeout)

    async def response_async(self) -> GenerateResponse:
        """The whole answer; waits for its end."""
        return await asyncio.shield(asyncio.wrap_future(self._tokens.response))

    @property
    def ended(self) -> bool:
        """Whether the request has ended."""
        return self._tokens.response.done()

    def cancel(self) -> None:
        """Triggers the cancel of the request. The answer ends with what it has; tokens that were generated before
        still follow."""
        if not self.ended and not self._cancel.closed:
            self._cancel.trigger()

    def close(self) -> None:
        """Stops reading, and cancels the request unless it has a `cancel` of the caller."""
        self._read = True
        self._sleep()
        if not self._shared:
            self.cancel()
            self._cancel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_read", True):
            self.close()


# ---- generators --------------------------------------------------------------------------------------------------


class Generator(Object):
    """A generator: an open model folder of a language model, with the keys and values of its sequences. Requests of
    concurrent callers run together by continuous batching.

    `close` cancels the requests that wait or run, writes the pool to the store if there is one, and waits for both.
    """

    _free = "pagoda_generator_free"

    def __init__(self, folder: StrPath, options: GeneratorOptions | None = None) -> None:
        """Opens a model folder of a language model, and checks all its files."""
        options = instance_of(GeneratorOptions, options or GeneratorOptions(), "options")
        self._by_caller = options.driver == Driver.CALLER
        self._own(opening(lib.pagoda_generator_open, "pagoda_generator *", (text(folder, "folder"),), options))

    @takes(GenerateRequest)
    def generate(self, request: GenerateRequest) -> GenerateResponse:
        """Answers a request, and waits for the end of all its answers: takes a `GenerateRequest` or its fields. A
        request that was cancelled or exceeded its time limit is no error: `finish_reason` says so. Ctrl-C cancels it."""
        if self._by_caller:
            keep: list[Any] = []
            made, function = request.to_c("request", keep), lib.pagoda_generator_generate
            return GenerateResponse._taken(out(function, "pagoda_generate_response *", self.handle, made))
        with Cancel() as own:
            answer = self._start(request, request.cancel or own)
            try:
                return answer.result()
            except KeyboardInterrupt:
                own.trigger()
                raise

    @takes(GenerateRequest)
    async def generate_async(self, request: GenerateRequest) -> GenerateResponse:
        """`generate` for asyncio. A task that is cancelled cancels the request, unless that has a `cancel` of the
        caller."""
        return await awaited(lambda stop: self._start(request, stop), request.cancel)

    def _start(self, request: GenerateRequest, cancel: Cancel) -> Future[GenerateResponse]:
        keep: list[Any] = []
        made = request.to_c("request", keep)
        made.cancel = cancel.handle
        answer = _Answer()
        user_data = kept(answer)
        try:
            call(lib.pagoda_generator_generate_async, self.handle, made, ffi.NULL, _ended, user_data)
        except BaseException:
            taken(user_data)
            raise
        return answer.response

    @takes(GenerateRequest)
    def stream(self, request: GenerateRequest) -> TokenStream:
        """Starts to answer a request, and returns at once with its tokens as they come. An error in the request itself
        is raised here."""
        return TokenStream(self, request)

    def step(self) -> bool:
        """Runs one step of a generator with `Driver.CALLER`: the model once, for all sequences that run. Returns whether
        there is more to do."""
        return bool(out(lib.pagoda_generator_step, "int32_t", self.handle))

    @takes(GenerateRequest)
    def tokenize(self, request: GenerateRequest) -> list[int]:
        """The tokens of the prompt of a request, as a request with it would have them."""
        keep: list[Any] = []
        made, count = request.to_c("request", keep), ffi.new("size_t *")
        call(lib.pagoda_generator_tokenize, self.handle, made, ffi.NULL, 0, count)
        room = ffi.new("uint32_t[]", count[0] or 1)
        call(lib.pagoda_generator_tokenize, self.handle, made, room, count[0], count)
        return listed(room, count[0])

    def detokenize(self, tokens: Numbers, skip_special: bool = True) -> str:
        """The text of tokens, without special ones unless `skip_special` is False."""
        keep: list[Any] = []
        return written(
            lib.pagoda_generator_detokenize, self.handle, *numbers(tokens, "uint32_t", "tokens", keep), skip_special
        )

    def forget(self, sessions: Sequence[str]) -> int:
        """Removes all data of sessions, in the pool, in host memory and in the store. Returns the number of sessions
        that were known."""
        return self._count(lib.pagoda_generator_forget, sessions)

    def unload(self, sessions: Sequence[str]) -> int:
        """Evicts the keys and values of sessions from the pool to host memory and the store. Without either they are
        lost. Returns the number of sessions that had any in the pool."""
        return self._count(lib.pagoda_generator_unload, sessions)

    def prefetch(self, sessions: Sequence[str]) -> int:
        """Starts to load the keys and values of sessions into the pool, and returns at once: how many are being
        loaded."""
        return self._count(lib.pagoda_generator_prefetch, sessions)

    def _count(self, function: Any, sessions: Sequence[str]) -> int:
        keep: list[Any] = []
        return int(out(function, "size_t", self.handle, *texts(sessions, "sessions", keep)))

    def clear(self, stored: bool = False) -> int:
        """Drops all sessions, and all prefixes that no request uses now, from the pool; with `stored` from host memory
        and the store, too. Returns the number of histories that there were."""
        return int(out(lib.pagoda_generator_clear, "size_t", self.handle, stored))

    def set_speculation(self, on: bool, clear: bool = False) -> None:
        """Sets whether tokens are guessed where requests allow it (`max_draft`), from the next step on. They are when the
        generator was opened. With `clear` that step also forgets how good guesses were and what they cost, and counts them
        from 0 again."""
        call(lib.pagoda_generator_set_speculation, self.handle, on, clear)

    @property
    def provider(self) -> ProviderInfo:
        """Where the model runs."""
        return provider_info(lib.pagoda_generator_provider, self.handle)

    @property
    def info(self) -> dict[str, Any]:
        """The pagoda.json of the model: its special tokens, defaults of generation, limits and version."""
        return cast(dict[str, Any], json.loads(written(lib.pagoda_generator_info, self.handle)))

    def stats(self) -> GeneratorStats:
        """The state and the counters of the generator."""
        return GeneratorStats.filled(lib.pagoda_generator_get_stats, self.handle)

    def kv_stats(self) -> KvStats:
        """The statistics of the cache of keys and values. Owners are sequences and sessions."""
        return KvStats.filled(lib.pagoda_generator_get_kv_stats, self.handle)
