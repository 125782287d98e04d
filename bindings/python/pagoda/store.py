"""Stores: histories on disk."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from ._native import Object, StrPath, Struct, call, lib, out, text


class Durability(IntEnum):
    """When a write to a store is acknowledged."""

    POWER = 0
    """When it is on the disk: it survives a loss of power."""
    PROCESS = 1
    """When the operating system has it: it survives a crash of the process, but not a loss of power."""
    NONE = 2
    """When it is queued: queued writes are lost if the process crashes."""


@dataclass(kw_only=True)
class StoreOptions(Struct, struct="pagoda_store_options"):
    """How to open a store."""

    durability: Durability = Durability.POWER
    """When a write is acknowledged."""
    max_bytes: int = 0
    """The maximum size of the files in bytes; 0: no limit. At the limit the least recently used owners are evicted."""
    segment_bytes: int = 0
    """The maximum size of a segment file in bytes; 0: 256 MiB, or an eighth of `max_bytes` if that is less."""
    queue_bytes: int = 0
    """The maximum number of bytes in the write queue; 0: 256 MiB. A write beyond it waits or is rejected."""
    garbage_bytes: int = 0
    """The maximum number of bytes of removed and replaced records before files are compacted; 0: 64 MiB."""


@dataclass(frozen=True)
class StoreStats(Struct, struct="pagoda_store_stats"):
    """The state of a store, and counters since it was opened."""

    owners: int
    """Stored owners, of all model versions."""
    records: int
    """Stored records; a history has one or more."""
    live_bytes: int
    """Bytes of the files that are in use."""
    file_bytes: int
    """Bytes of all files."""
    segments: int
    """Segment files."""
    queued_bytes: int
    """Bytes in the write queue."""
    writes: int
    """Records written, removals included."""
    written_bytes: int
    """Bytes written, compactions included."""
    write_errors: int
    """Failed writes."""
    corrupt_records: int
    """Records with damaged data."""
    torn_tails: int
    """Incomplete writes that were found when the store was opened."""
    damaged_regions: int
    """Regions of files where records were expected and not found."""
    dropped_owners: int
    """Owners that were removed because damage left it uncertain which record is current."""
    index_rebuilds: int
    """1 if the index was rebuilt when the store was opened."""
    index_errors: int
    """Failures of the index."""
    evicted_owners: int
    """Owners that were evicted at the size limit."""
    compacted_segments: int
    """Compacted segment files."""


class Store(Object):
    """Histories of owners in the files of a folder. They survive restarts and crashes. One process at a time has a store
    open; in it, any number of caches may use it."""

    _free = "pagoda_store_free"

    def __init__(self, path: StrPath, options: StoreOptions | None = None) -> None:
        """Opens the store in a folder. If the folder is empty or missing, a new store is made."""
        keep: list[Any] = []
        made = StoreOptions.given(options).to_c("options", keep)
        self._own(out(lib.pagoda_store_open, "pagoda_store *", text(path, "path"), made))

    def flush(self) -> None:
        """Waits until all writes so far are as durable as the options say."""
        call(lib.pagoda_store_flush, self.handle)

    def compact(self) -> None:
        """Frees the disk space of removed and replaced records, and waits for that. A store also does this by itself."""
        call(lib.pagoda_store_compact, self.handle)

    def stats(self) -> StoreStats:
        """The state and the counters of the store."""
        return StoreStats.filled(lib.pagoda_store_get_stats, self.handle)
