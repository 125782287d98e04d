"""Embedding tables: rows by key, a cache over host memory, a Redis Cluster and disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ._native import (
    Numbers,
    Object,
    StrPath,
    Struct,
    call,
    ffi,
    instance_of,
    lib,
    numbers,
    out,
    pointer,
    text,
)


class Miss(IntEnum):
    """What a lookup does with keys that are not in the cache."""

    BY_HIT_RATE = 0
    """WAIT if the hit rate of the lookup is below the hit_rate_threshold of the table, else DEFAULT."""
    WAIT = 1
    """The lookup waits for their rows from the backing tiers."""
    DEFAULT = 2
    """They get the default vector of the table, and are inserted into the cache in the background."""
    WITHIN = 3
    """The lookup waits up to `limit_us`; keys whose rows have not arrived by then get the default vector."""


class Combiner(IntEnum):
    """How a pooled lookup combines the rows of a slot into one vector."""

    SUM = 0
    """The sum."""
    MEAN = 1
    """The mean."""
    SQRTN = 2
    """The sum, divided by the square root of the number of rows."""


class Reach(IntEnum):
    """When lookups see an update."""

    AT_ONCE = 0
    """When the call returns."""
    BY_REFRESH = 1
    """At the next refresh of the cache."""


@dataclass(kw_only=True)
class LookupOptions(Struct, struct="pagoda_lookup_options"):
    """The options of a lookup."""

    miss: Miss = Miss.BY_HIT_RATE
    """What happens to keys that are not in the cache."""
    limit_us: int = 0
    """With WITHIN: the time limit in microseconds."""


@dataclass(frozen=True)
class TableStats(Struct, struct="pagoda_table_stats"):
    """Statistics of a table since it was opened."""

    lookups: int
    """Lookups."""
    keys: int
    """Keys that were looked up, without the duplicates within a lookup."""
    hits: int
    """Keys that were in the cache."""
    defaults: int
    """Keys that got the default vector."""
    dropped: int
    """Keys that were not inserted in the background because the queue was full."""
    cached_rows: int
    """Rows in the cache."""
    cache_rows: int
    """The capacity of the cache in rows."""
    memory: int
    """Bytes of memory of the cache and the tiers, approximately."""
    stale_seconds: int
    """An update by another process is visible after at most this many seconds; negative: it may never be."""


class EmbeddingRows(NamedTuple):
    """What a lookup found."""

    rows: npt.NDArray[np.float32]
    """A row for each key, or a vector for each slot."""
    found: npt.NDArray[np.bool_]
    """For each key whether it has a row; the others got the default vector."""


class Embeddings(Object):
    """Embedding tables of any number of models. Each table has a cache over backing tiers. A table is named
    "model/table", or "table" if that is unique."""

    _free = "pagoda_embeddings_free"

    def __init__(self, path: StrPath) -> None:
        """Opens the tables of a configuration file: HugeCTR's ps.json, or one with Pagoda's own keys."""
        self._own(out(lib.pagoda_embeddings_open, "pagoda_embeddings *", text(path, "path")))

    @staticmethod
    def estimate(path: StrPath) -> tuple[int, int]:
        """The bytes of memory and of disk space that the tables of a configuration file need, approximately."""
        memory, disk = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        call(lib.pagoda_embeddings_estimate, text(path, "path"), memory, disk)
        return memory[0], disk[0]

    def add(self, model: str | Mapping[str, Any], folder: StrPath | None = None) -> None:
        """Adds a model while others are in use: an element of `models` in the configuration, as JSON or as a mapping.
        Relative paths in it are relative to `folder`, or to the working directory."""
        made = model if isinstance(model, str) else json.dumps(model)
        where = ffi.NULL if folder is None else text(folder, "folder")
        call(lib.pagoda_embeddings_add, self.handle, text(made, "model"), where)

    def retire(self, model: str) -> None:
        """Removes a model. A table is closed when no model uses it."""
        call(lib.pagoda_embeddings_retire, self.handle, text(model, "model"))

    def dim(self, table: str) -> int:
        """The number of elements in a row of a table."""
        return int(out(lib.pagoda_embeddings_dim, "size_t", self.handle, text(table, "table")))

    def lookup(self, table: str, keys: Numbers, options: LookupOptions | None = None) -> EmbeddingRows:
        """The rows of keys, in their order: float32 [keys, dim]. A tier that does not answer is no error: its keys get
        the default vector of the table."""
        keep: list[Any] = []
        ids, count = numbers(keys, "int64_t", "keys", keep)
        rows = np.empty((count, self.dim(table)), np.float32)
        found = np.empty(count, np.uint8)
        given = ids, count, _options(options, keep)
        results = pointer(rows, "float"), rows.size, pointer(found, "uint8_t")
        call(lib.pagoda_embeddings_lookup, self.handle, text(table, "table"), *given, *results)
        return EmbeddingRows(rows, found.view(np.bool_))

    def pool(
        self, table: str, keys: Numbers, offsets: Numbers, combiner: Combiner, options: LookupOptions | None = None
    ) -> EmbeddingRows:
        """The rows of keys, combined by slot: float32 [slots, dim]. Slot i has the keys from `offsets[i]` up to, but not
        including, `offsets[i + 1]`; a slot without keys gets zeros."""
        keep: list[Any] = []
        ids, count = numbers(keys, "int64_t", "keys", keep)
        ends, end_count = numbers(offsets, "int64_t", "offsets", keep)
        rows = np.empty((max(end_count - 1, 0), self.dim(table)), np.float32)
        found = np.empty(count, np.uint8)
        given = ids, count, ends, end_count, combiner, _options(options, keep)
        results = pointer(rows, "float"), rows.size, pointer(found, "uint8_t")
        call(lib.pagoda_embeddings_pool, self.handle, text(table, "table"), *given, *results)
        return EmbeddingRows(rows, found.view(np.bool_))

    def upsert(
        self, table: str, version: int, keys: Numbers, rows: npt.ArrayLike, reach: Reach = Reach.AT_ONCE
    ) -> None:
        """Replaces or inserts rows, in all tiers and in the cache. A row that has a higher version is not changed. After
        an `IoError` repeat the call."""
        keep: list[Any] = []
        ids, count = numbers(keys, "int64_t", "keys", keep)
        values = np.ascontiguousarray(rows, np.float32)
        given = ids, count, pointer(values, "float"), values.size, reach
        call(lib.pagoda_embeddings_upsert, self.handle, text(table, "table"), version, *given)

    def delete(self, table: str, version: int, keys: Numbers, reach: Reach = Reach.AT_ONCE) -> None:
        """Deletes rows, in all tiers and from the cache. A row that has a higher version is not deleted."""
        keep: list[Any] = []
        given = *numbers(keys, "int64_t", "keys", keep), reach
        call(lib.pagoda_embeddings_delete, self.handle, text(table, "table"), version, *given)

    def prefetch(self, table: str, keys: Numbers) -> int:
        """Starts to load keys into the cache, and returns at once: how many were not in the cache and are loaded."""
        keep: list[Any] = []
        given = numbers(keys, "int64_t", "keys", keep)
        return int(out(lib.pagoda_embeddings_prefetch, "size_t", self.handle, text(table, "table"), *given))

    def refresh(self, table: str) -> None:
        """Reloads all rows in the cache of a table from the backing tiers, and waits for that."""
        call(lib.pagoda_embeddings_refresh, self.handle, text(table, "table"))

    def wait(self) -> None:
        """Waits until all background fetches and loads are done."""
        call(lib.pagoda_embeddings_wait, self.handle)

    def stats(self, table: str) -> TableStats:
        """The statistics of a table."""
        return TableStats.filled(lib.pagoda_embeddings_get_stats, self.handle, text(table, "table"))


def _options(options: LookupOptions | None, keep: list[Any]) -> Any:
    return ffi.NULL if options is None else instance_of(LookupOptions, options, "options").to_c("options", keep)
