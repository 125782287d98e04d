"""Ranking engines: model folders, served. Users and candidates in, scores out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from ._native import (
    Numbers,
    Object,
    StrPath,
    Struct,
    begin,
    call,
    decoded,
    ffi,
    initialised,
    lib,
    numbers,
    out,
    pending,
    pointer,
    read_error,
    taken,
    takes,
    text,
    texts,
    written,
)
from .cancel import Cancel, awaited
from .embedding import TableStats
from .error import InvalidArgumentError
from .kv import KvFormat, KvSizeUnit, KvStats, Offload
from .model import ModelOptions, Provider, opening
from .store import StoreOptions


@dataclass(kw_only=True)
class GraphShape(Struct, struct="pagoda_graph_shape"):
    """The largest batch that a CUDA graph has room for."""

    users: int
    """The maximum number of users; 1 or more."""
    rows: int
    """The maximum number of rows of all users together: new events and candidates; 1 or more."""
    candidates: int = 0
    """The maximum number of candidates of all users together; 0: as many as `rows`."""
    pages: int = 0
    """The maximum number of pages of all users together; 0: enough for the longest history of each user."""


@dataclass(kw_only=True)
class EngineOptions(Struct, struct="pagoda_engine_options"):
    """How to open an engine."""

    instances: int = 1
    """How many batches run at the same time; 1 to 256. They share the weights, the tables and the caches."""
    max_batch: int = 64
    """The maximum number of requests in a batch."""
    max_batch_rows: int = 8192
    """The maximum number of rows in a batch: new events and candidates. A request with more rows runs alone."""
    queue: int = 4096
    """The maximum number of queued requests. A request beyond it is a `CapacityError`."""
    kv_size_unit: KvSizeUnit = KvSizeUnit.DEFAULT
    """The unit of `kv_size`; DEFAULT: 1 GiB."""
    kv_size: int = 0
    """The size of the pool of keys and values. With 0 pages or 0 bytes nothing is cached."""
    kv_format: KvFormat = KvFormat.DEFAULT
    """How pages hold keys and values, in memory and in the store."""
    offload: Offload = Offload.ON_EVICTION
    """When keys and values are written to the store."""
    ahead_percent: int = 12
    """As in `KvOptions`."""
    host_bytes: int = 0
    """Bytes of host memory for keys and values that were evicted from the pool; 0: none."""
    max_delay_us: int = 0
    """The coalescing window: how many microseconds a request waits for other requests, to run in one batch with them."""
    remember_bytes: int = 67108864
    """Bytes for the event log: the events of users as they were sent; 0: none. With it, a request that sends only new
    events is served even if the keys and values of the earlier events were evicted."""
    table_cache_bytes: int = 0
    """Bytes for the cache of each embedding table; 0: a table of up to 256 MiB is cached as a whole."""
    table_tiers_path: StrPath | None = None
    """A configuration file (ps.json) that names the backing tiers of the embedding tables; None: host memory."""
    model: ModelOptions | None = None
    """Where the model runs, and on how many threads. Its `tables` must be None."""
    store_path: StrPath | None = None
    """The folder of a store for keys and values; None: none. One process at a time has it open."""
    store_options: StoreOptions | None = None
    """How the store is opened."""
    cuda_graphs: Sequence[GraphShape] = ()
    """On a GPU: batch shapes that are captured into CUDA graphs when they are first used, and replayed after that."""


@dataclass(kw_only=True)
class RankRequest(Struct, struct="pagoda_rank_request"):
    """A request: score candidates for a user. Features are named as in pagoda.json; each has one key for every event,
    candidate or user, and -1 stands for no key."""

    made_of: ClassVar[Mapping[str, str]] = {
        "event_count": "events",
        "event_feature_count": "events",
        "event_features": "events",
        "event_keys": "events",
        "user_feature_count": "user_keys",
        "user_features": "user_keys",
        "candidate_count": "candidates",
        "candidate_feature_count": "candidates",
        "candidate_features": "candidates",
        "candidate_keys": "candidates",
    }
    by_hand: ClassVar[frozenset[str]] = frozenset({"user_keys", "event_times"})

    user: int
    """The user."""
    candidates: Mapping[str, Numbers]
    """The keys of each item feature, one for each candidate."""
    events: Mapping[str, Numbers] = field(default_factory=dict)
    """The keys of each event feature, the earliest event first. There may be none."""
    event_times: Numbers | None = None
    """The time of each event, in seconds; may be None if the model has no times."""
    user_keys: Mapping[str, int] = field(default_factory=dict)
    """The key of each user feature. It may be empty if `start` is greater than 0."""
    start: int = -1
    """The position of the first sent event in the history of the user. -1: the events are the whole history, and the
    engine finds out which of them are new."""
    time: int | None = None
    """The time of the request, in seconds; None: the current time."""
    timeout_us: int = 0
    """The time limit in microseconds; 0: none. A request that exceeds it is a `CancelledError`."""
    cancel: Cancel | None = None
    """Cancels the request when triggered."""

    def fill(self, made: Any, argument: str, keep: list[Any]) -> None:
        super().fill(made, argument, keep)
        _columns(made, "event", self.events, argument, keep)
        _columns(made, "candidate", self.candidates, argument, keep)
        made.user_features, made.user_feature_count = texts(self.user_keys, f"{argument}.user_features", keep)
        made.user_keys, _ = numbers([*self.user_keys.values()], "int64_t", f"{argument}.user_keys", keep)
        if self.event_times is not None and len(self.event_times):
            made.event_times, count = numbers(self.event_times, "int64_t", f"{argument}.event_times", keep)
            if count != made.event_count:
                message = f"there are {count}, and {made.event_count} events: give one for each"
                raise InvalidArgumentError(f"{argument}.event_times: {message}", f"{argument}.event_times")


def _columns(made: Any, what: str, columns: Mapping[str, Numbers], argument: str, keep: list[Any]) -> None:
    features, feature_count = texts(columns, f"{argument}.{what}_features", keep)
    where = f"{argument}.{what}_keys"
    lists = [numbers(keys, "int64_t", f"{where}[{name!r}]", keep) for name, keys in columns.items()]
    counts = {name: count for name, (_, count) in zip(columns, lists, strict=True)}
    if len(set(counts.values())) > 1:
        message = f"features have different numbers of keys, {counts}: give one key of each for every {what}"
        raise InvalidArgumentError(f"{where}: {message}", where)
    keep.append(array := ffi.new("const int64_t *[]", [keys for keys, _ in lists] or [ffi.NULL]))
    setattr(made, f"{what}_count", lists[0][1] if lists else 0)
    setattr(made, f"{what}_feature_count", feature_count)
    setattr(made, f"{what}_features", features)
    setattr(made, f"{what}_keys", array)


@dataclass(frozen=True)
class RankResponse(Struct, struct="pagoda_rank_response"):
    """How a request was answered."""

    scores: npt.NDArray[np.float32]
    """A score for each candidate and task, [candidates, tasks]."""
    tasks: int
    """The number of tasks of the model that answered."""
    version: str
    """The version of the model that answered, as in its pagoda.json."""
    batched_with: int
    """The number of other requests in the same batch."""
    cached_rows: int
    """Rows of the history that were cached."""
    computed_rows: int
    """Rows of the history that were computed."""
    queue_ns: int
    """Nanoseconds in the queue, until the batch was formed."""
    run_ns: int
    """Nanoseconds that ONNX Runtime ran."""

    @classmethod
    def _of(cls, scores: npt.NDArray[np.float32], read: Any) -> RankResponse:
        rows = read.cached_rows, read.computed_rows, read.queue_ns, read.run_ns
        shaped = scores.reshape(-1, read.tasks)
        return cls(shaped, read.tasks, decoded(read.version), read.batched_with, *rows)


@dataclass(frozen=True)
class EngineStats(Struct, struct="pagoda_engine_stats"):
    """The state of an engine, and counters since it was opened."""

    answered: int
    """Requests that were answered."""
    failed: int
    """Requests that failed, for any reason."""
    batches: int
    """Batches."""
    cached_rows: int
    """Rows of histories that were cached."""
    computed_rows: int
    """Rows of histories that were computed."""
    waiting: int
    """Requests in the queue."""
    remembered_users: int
    """Users in the event log."""
    remembered_bytes: int
    """Bytes of the event log."""


class ProviderInfo(NamedTuple):
    """Where the model of an engine or a generator runs."""

    provider: Provider
    """CPU or CUDA."""
    device_id: int
    """The number of the GPU; -1 on the CPU."""
    reason: str
    """Why AUTO chose the CPU; "" in all other cases."""


def provider_info(function: Any, handle: Any) -> ProviderInfo:
    """Asks an engine or a generator where its model runs."""
    provider, device = ffi.new("pagoda_provider *"), ffi.new("int32_t *")
    reason = written(function, handle, provider, device)
    return ProviderInfo(Provider(provider[0]), device[0], reason)


@ffi.callback("pagoda_rank_callback")  # type: ignore[untyped-decorator]
def _ranked(user_data: Any, status: int, scores: Any, count: int, response: Any, error: Any) -> None:
    future = taken(user_data)
    if status:
        future.set_exception(read_error(status, error))
    else:
        copied = np.frombuffer(ffi.buffer(scores, count * 4), np.float32).copy()
        future.set_result(RankResponse._of(copied, response))


class Engine(Object):
    """A ranking engine: an open model folder with its embedding tables and the keys and values of its users. Requests of
    concurrent callers run in batches.

    `close` answers queued requests first, writes the pool to the store if there is one, and waits for both.
    """

    _free = "pagoda_engine_free"

    def __init__(self, folder: StrPath, options: EngineOptions | None = None) -> None:
        """Opens a model folder, checks all its files, and runs the model once."""
        options = EngineOptions.given(options)
        self._own(opening(lib.pagoda_engine_open, "pagoda_engine *", (text(folder, "folder"),), options))

    @takes(RankRequest)
    def rank(self, request: RankRequest) -> RankResponse:
        """Scores candidates, and waits for the result: takes a `RankRequest` or its fields. Concurrent requests may run
        in one batch. If a swap changes the number of tasks meanwhile, the new model answers.

        A `NotFoundError` about "request.start" is a gap: events before `start` are missing here, so send the whole
        history.
        """
        keep: list[Any] = []
        made, response = request.to_c("request", keep), initialised("pagoda_rank_response")
        while True:
            scores = np.empty(made.candidate_count * self.tasks, np.float32)
            try:
                call(lib.pagoda_engine_rank, self.handle, made, pointer(scores, "float"), scores.size, response)
            except InvalidArgumentError as failure:
                # A swap has changed the number of tasks since it was read.
                if failure.argument != "score_count":
                    raise
            else:
                return RankResponse._of(scores, response)

    @takes(RankRequest)
    async def rank_async(self, request: RankRequest) -> RankResponse:
        """`rank` for asyncio, on a thread of Pagoda. A task that is cancelled cancels the request, unless that has a
        `cancel` of the caller."""

        def start(stop: Cancel) -> Future[RankResponse]:
            keep: list[Any] = []
            made = request.to_c("request", keep)
            made.cancel = stop.handle
            future = pending()
            begin(future, lib.pagoda_engine_rank_async, self.handle, made, _ranked)
            return future

        return await awaited(start, request.cancel)

    def swap(self, folder: StrPath) -> None:
        """Replaces the model folder that is served. The new one is opened and run once while the old one still serves;
        no request fails. On an error the old folder stays in service."""
        call(lib.pagoda_engine_swap, self.handle, text(folder, "folder"))

    def forget(self, users: Numbers) -> int:
        """Removes all data of users: their events, and their keys and values, also in the store. Returns the number of
        users that were known."""
        return self._count(lib.pagoda_engine_forget, users)

    def prefetch(self, users: Numbers) -> int:
        """Starts to load the keys and values of users from host memory and the store into the pool, and returns at
        once: how many histories are being loaded."""
        return self._count(lib.pagoda_engine_prefetch, users)

    def unload(self, users: Numbers) -> int:
        """Evicts the keys and values of users from the pool to host memory and the store. Without either they are lost.
        Returns the number of users that had any in the pool."""
        return self._count(lib.pagoda_engine_unload, users)

    def _count(self, function: Any, users: Numbers) -> int:
        keep: list[Any] = []
        return int(out(function, "size_t", self.handle, *numbers(users, "uint64_t", "users", keep)))

    @property
    def provider(self) -> ProviderInfo:
        """Where the model that is served runs."""
        return provider_info(lib.pagoda_engine_provider, self.handle)

    @property
    def tasks(self) -> int:
        """The number of tasks of the model that is served: the scores of one candidate."""
        return int(out(lib.pagoda_engine_tasks, "size_t", self.handle))

    @property
    def info(self) -> dict[str, Any]:
        """The pagoda.json of the model that is served: its features, tasks, limits and version."""
        return cast(dict[str, Any], json.loads(written(lib.pagoda_engine_info, self.handle)))

    @property
    def tables(self) -> list[str]:
        """The names of the embedding tables that have statistics; none if they are in the graph."""
        return written(lib.pagoda_engine_tables, self.handle).splitlines()

    def stats(self) -> EngineStats:
        """The state and the counters of the engine."""
        return EngineStats.filled(lib.pagoda_engine_get_stats, self.handle)

    def kv_stats(self) -> KvStats:
        """The statistics of the cache of keys and values; `pages` is 0 only if nothing is cached."""
        return KvStats.filled(lib.pagoda_engine_get_kv_stats, self.handle)

    def table_stats(self, table: str) -> TableStats:
        """The statistics of an embedding table, by its name in pagoda.json."""
        return TableStats.filled(lib.pagoda_engine_get_table_stats, self.handle, text(table, "table"))
