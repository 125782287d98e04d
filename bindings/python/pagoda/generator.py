"""Generators: language models, served. Prompts in, text out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, cast

from ._native import Numbers, Object, StrPath, Struct, call, ffi, lib, listed, numbers, out, takes, text, texts, written
from .cancel import Cancel, awaited
from .engine import ProviderInfo, provider_info
from .generate import GenerateRequest, GenerateResponse, KvPolicy
from .kv import KvFormat, KvSizeUnit, KvStats
from .model import ModelOptions, opening
from .store import StoreOptions
from .stream import TokenStream, start


class Driver(IntEnum):
    """What runs the steps of a generator."""

    THREAD = 0
    """A thread of the generator."""
    CALLER = 1
    """The caller: `Generator.step` runs one step, and `Generator.generate` as many as its request needs."""


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


class Generator(Object):
    """A generator: an open model folder of a language model, with the keys and values of its sequences. Requests of
    concurrent callers run together by continuous batching.

    `close` cancels the requests that wait or run, writes the pool to the store if there is one, and waits for both.
    """

    _free = "pagoda_generator_free"

    def __init__(self, folder: StrPath, options: GeneratorOptions | None = None) -> None:
        """Opens a model folder of a language model, and checks all its files."""
        options = GeneratorOptions.given(options)
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
            answer = start(self, request, request.cancel or own)
            try:
                return answer.result()
            except KeyboardInterrupt:
                own.trigger()
                raise

    @takes(GenerateRequest)
    async def generate_async(self, request: GenerateRequest) -> GenerateResponse:
        """`generate` for asyncio. A task that is cancelled cancels the request, unless that has a `cancel` of the
        caller."""
        return await awaited(lambda stop: start(self, request, stop), request.cancel)

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
