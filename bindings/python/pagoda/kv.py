"""Caches of keys and values: the histories of owners, as pages in a pool; and leases, the part that a batch uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any, NamedTuple

import numpy as np

from ._native import (
    Numbers,
    Object,
    Struct,
    call,
    ffi,
    instance_of,
    lib,
    numbers,
    out,
    pointer,
    struct_array,
)
from .store import Store
from .tensor import ElementType, Tensor


class KvSizeUnit(IntEnum):
    """The unit of the size of a pool of keys and values."""

    DEFAULT = 0
    """No size is given: an engine or a generator then uses 1 GiB. A `KvCache` has no default."""
    PAGES = 1
    """Pages."""
    BYTES = 2
    """Bytes, all layers together."""
    PERCENT = 3
    """Percent of the free memory of the GPU that the pool is on, 1 to 100."""


class Overlap(IntEnum):
    """What happens to new tokens that are cached already."""

    REFUSE = 0
    """The request is rejected."""
    TRIM = 1
    """They are trimmed; `KvLease.owner` says how many."""


class Edited(IntEnum):
    """What happens if the items of a request differ from those that the cached history was computed from."""

    UNNOTICED = 0
    """Items are not checked: requests have none."""
    REFUSE = 1
    """The request is rejected."""
    INVALIDATE = 2
    """The cached history is invalidated from the first edited item on."""


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


class Offload(IntEnum):
    """When histories are written to the store."""

    ON_EVICTION = 0
    """When an owner is evicted from the pool."""
    AT_COMMIT = 1
    """With every commit, in the background."""
    BY_HAND = 2
    """Only by `KvCache.offload`; what is evicted without it is lost."""


class Tier(IntEnum):
    """Where the history of an owner is."""

    NONE = 0
    """Not cached."""
    RESIDENT = 1
    """In the pool."""
    STORE = 2
    """In the store, or being loaded from there into the pool."""


class Tiers(IntFlag):
    """A set of tiers."""

    RESIDENT = 1
    """The pool."""
    STORE = 2
    """The store."""
    ALL = 3
    """Both."""


class KvTensor(IntEnum):
    """An index tensor of a lease: the input of the same name of the ai.pagoda operators."""

    ROW_OFFSETS = 0
    """The offset of the first row of each owner: i32 [owners + 1]."""
    NUM_CANDIDATES = 1
    """The number of candidates of each owner: i32 [owners]."""
    CACHED_LEN = 2
    """The number of cached tokens of each owner: i32 [owners]."""
    PAGE_INDPTR = 3
    """The offset of each owner in the list of pages: i32 [owners + 1]."""
    PAGE_IDS = 4
    """The pages of all owners, each owner's in order of position: i32."""


@dataclass(kw_only=True)
class KvOptions(Struct, struct="pagoda_kv_options"):
    """The shape, the size and the behaviour of a cache. The first five have no default."""

    layers: int
    """The number of layers that keep keys and values."""
    heads: int
    """The number of key and value heads in a layer."""
    head_size: int
    """The number of elements in a head."""
    size: int
    """The size of the pool, in `size_unit`; 1 or more."""
    size_unit: KvSizeUnit
    """The unit of `size`: PAGES, BYTES or PERCENT."""
    page_size: int = 32
    """The number of tokens in a page, a multiple of 8."""
    type: ElementType = ElementType.F32
    """The type of keys and values: F32, F16 or BF16."""
    device_id: int = -1
    """The GPU whose memory holds the pool; -1: host memory."""
    max_history: int = 0
    """The maximum number of tokens of a history that are kept; 0: all. The oldest pages are removed first."""
    overlap: Overlap = Overlap.REFUSE
    """What happens to new tokens that are cached already."""
    edited: Edited = Edited.UNNOTICED
    """Whether requests have the items of the history, and what happens if the cached ones differ."""
    offload: Offload = Offload.ON_EVICTION
    """When histories are written to the store."""
    onload_in_background: bool = False
    """`KvCache.prepare` returns before the histories are loaded from the store, and `KvLease.wait` waits for them."""
    onload_threads: int = 0
    """The number of threads that read the store; 0: 2."""
    ahead_percent: int = 12
    """With ON_EVICTION: the percentage of the pool that is kept free or stored ahead of eviction; 0: none."""
    model_version: str | None = None
    """The version of the model; None: "". A history that was stored for another version is not used."""
    store: Store | None = None
    """The store for evicted histories. The cache keeps it open."""


@dataclass(frozen=True)
class KvStats(Struct, struct="pagoda_kv_stats"):
    """The state of a cache, and counters since it was opened."""

    pages: int
    """Pages of the pool."""
    free_pages: int
    """Free pages."""
    shared_pages: int
    """Pages that more than one owner has, by `KvCache.fork`."""
    resident_owners: int
    """Owners in the pool."""
    resident_tokens: int
    """Tokens of those owners."""
    tokens_from_pool: int
    """Cache hits: tokens of prepared histories that were in the pool."""
    tokens_from_store: int
    """Tokens of prepared histories that were loaded from the store."""
    tokens_new: int
    """Tokens that were new."""
    evicted_owners: int
    """Owners that were evicted from the pool."""
    failed_offloads: int
    """Owners whose write to the store failed, at an eviction or a commit."""
    failed_onloads: int
    """Histories that could not be read from the store."""


@dataclass(kw_only=True)
class KvRequest(Struct, struct="pagoda_kv_request"):
    """What a batch has of one owner."""

    owner: int
    """The owner."""
    tokens: int = 0
    """The number of new tokens."""
    candidates: int = 0
    """The number of candidates after the new tokens."""
    start: int = 0
    """The position of the first new token in the history of the owner."""
    items: Numbers | None = None
    """The items of the history up to the last new token, if the cache checks them (`KvOptions.edited`)."""


class CachedOwner(NamedTuple):
    """What a cache has of an owner."""

    start: int
    """The first position of the cached history."""
    length: int
    """Its number of tokens."""
    tier: Tier
    """Where it is."""


@dataclass(frozen=True)
class LeasedOwner(Struct, struct="pagoda_kv_leased_owner"):
    """An owner in a lease."""

    owner: int
    """The owner."""
    start: int
    """The position of the first token of the history that the model uses."""
    cached: int
    """The number of cached tokens."""
    tokens: int
    """The number of new tokens, which the model appends."""
    trimmed: int
    """The number of tokens at the start of the request that were cached already and trimmed. Leave their rows out of
    the inputs of the model."""


class KvCache(Object):
    """A cache of keys and values: the history of each owner as pages in a pool. An owner is a number that the caller
    chooses: a user of a ranking model, a conversation of a language model. When the pool is full, the least recently
    used owners are evicted, to a store if there is one."""

    _free = "pagoda_kv_cache_free"

    def __init__(self, options: KvOptions) -> None:
        keep: list[Any] = []
        made = instance_of(KvOptions, options, "options").to_c("options", keep)
        self._own(out(lib.pagoda_kv_cache_open, "pagoda_kv_cache *", made))

    def pool(self, layer: int) -> Tensor:
        """The pool of a layer, [pages, 2, page_size, heads, head_size]. Bind it to an input and to the matching output
        of the model. Only the model may read and write its memory."""
        return Tensor._of(out(lib.pagoda_kv_cache_pool, "pagoda_tensor *", self.handle, layer))

    def prepare(self, requests: Sequence[KvRequest]) -> KvLease:
        """Makes room for a batch, and returns a lease with the tensors for the model. The owners of the batch stay in
        the pool until the lease ends. Any number of leases may read a history at the same time; only one may append to
        it.

        Then run the model on the tensors of the lease and the pools of the cache. Its rows are, for each owner, the new
        tokens and then the candidates.
        """
        keep: list[Any] = []
        array = struct_array("pagoda_kv_request", requests, "requests", keep)
        return KvLease(out(lib.pagoda_kv_cache_prepare, "pagoda_kv_lease *", self.handle, array, len(requests)))

    def lookup(self, owners: Numbers) -> list[CachedOwner]:
        """What the cache has of each owner. Other threads may change that before the caller reads it."""
        keep: list[Any] = []
        ids, count = numbers(owners, "uint64_t", "owners", keep)
        starts, lengths, tiers = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int32)
        places = pointer(starts, "int64_t"), pointer(lengths, "int64_t"), pointer(tiers, "int32_t")
        call(lib.pagoda_kv_cache_lookup, self.handle, ids, count, *places)
        found = zip(starts.tolist(), lengths.tolist(), map(Tier, tiers.tolist()), strict=True)
        return [CachedOwner(*owner) for owner in found]

    def fork(self, source: int, to: int, tokens: int) -> int:
        """Lets the owner `to`, which has no history, begin with the first `tokens` tokens of the owner `source`: a
        prompt that many conversations begin with. Only whole pages are shared. Returns the number of their tokens."""
        return int(out(lib.pagoda_kv_cache_fork, "int32_t", self.handle, source, to, tokens))

    def offload(self, owners: Numbers | None = None) -> int:
        """Writes histories to the store, and waits until they are durable; None: those of all owners in the pool.
        Returns the number of owners that had tokens to write."""
        keep: list[Any] = []
        return int(out(lib.pagoda_kv_cache_offload, "size_t", self.handle, *_owners(owners, keep)))

    def evict(self, owners: Numbers | None = None, tiers: Tiers = Tiers.RESIDENT) -> int:
        """Removes histories from tiers; None: those of all owners that no lease holds. Histories that are removed only
        from the pool are written to the store first, unless offload is BY_HAND. Returns the number of owners that had
        something in these tiers."""
        keep: list[Any] = []
        return int(out(lib.pagoda_kv_cache_evict, "size_t", self.handle, *_owners(owners, keep), tiers))

    def prefetch(self, owners: Numbers) -> int:
        """Starts to load histories from the store into the pool, and returns at once: how many are being loaded."""
        keep: list[Any] = []
        given = numbers(owners, "uint64_t", "owners", keep)
        return int(out(lib.pagoda_kv_cache_prefetch, "size_t", self.handle, *given))

    def flush(self) -> None:
        """Waits until all writes to the store so far are durable."""
        call(lib.pagoda_kv_cache_flush, self.handle)

    def stats(self) -> KvStats:
        """The state and the counters of the cache."""
        return KvStats.filled(lib.pagoda_kv_cache_get_stats, self.handle)


def _owners(owners: Numbers | None, keep: list[Any]) -> tuple[Any, int]:
    return (ffi.NULL, 0) if owners is None else numbers(owners, "uint64_t", "owners", keep)


class KvLease(Object):
    """Holds the owners of a batch in the pool, with room for their new tokens. It ends with `commit` or `abort`; one
    that is closed before that is aborted."""

    _free = "pagoda_kv_lease_free"

    def __init__(self, handle: Any) -> None:
        """Leases are made by `KvCache.prepare`."""
        self._own(handle)

    def tensor(self, which: KvTensor) -> Tensor:
        """An index tensor, an input of the model."""
        return Tensor._of(out(lib.pagoda_kv_lease_tensor, "pagoda_tensor *", self.handle, which))

    def owner(self, index: int) -> LeasedOwner:
        """An owner of the lease, by its index in the batch."""
        return LeasedOwner.filled(lib.pagoda_kv_lease_owner, self.handle, index)

    def ready(self, layer: int) -> bool:
        """Whether a layer of all owners was loaded from the store. Does not wait."""
        return bool(out(lib.pagoda_kv_lease_ready, "int32_t", self.handle, layer))

    def wait(self, layer: int = -1) -> None:
        """Waits until a layer of all owners was loaded from the store; -1: all layers. It is needed only with
        `KvOptions.onload_in_background`, before the model runs."""
        call(lib.pagoda_kv_lease_wait, self.handle, layer)

    def commit(self, wait: bool = False) -> None:
        """Adds the new tokens, which the model has appended, to the histories, and ends the lease. With `wait` it waits
        until they are durable, if histories are written at commit."""
        call(lib.pagoda_kv_lease_commit, self.handle, wait)

    def abort(self) -> None:
        """Ends the lease without a change of the histories."""
        call(lib.pagoda_kv_lease_abort, self.handle)
