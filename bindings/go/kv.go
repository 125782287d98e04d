package pagoda

// #include "bridge.h"
import "C"

import (
	"context"
	"runtime"
	"unsafe"
)

// Overlap is what becomes of new tokens that are cached already.
type Overlap int32

// What becomes of new tokens that are cached already.
const (
	OverlapRefuse Overlap = C.PAGODA_OVERLAP_REFUSE // The request is refused.
	OverlapTrim   Overlap = C.PAGODA_OVERLAP_TRIM   // They are cut off; [KVLease.Owner] tells how many.
)

// Edited is what happens when the items of a request are not those that the cached history was computed from.
type Edited int32

// What happens when a history was edited.
const (
	EditedUnnoticed  Edited = C.PAGODA_EDITED_UNNOTICED  // Items are not checked: requests have none.
	EditedRefuse     Edited = C.PAGODA_EDITED_REFUSE     // The request is refused.
	EditedInvalidate Edited = C.PAGODA_EDITED_INVALIDATE // What was computed from the edited part is dropped.
)

// KVFormat is how pages hold keys and values.
type KVFormat int32

// How pages hold keys and values.
const (
	KVFormatDefault KVFormat = C.PAGODA_KV_FORMAT_DEFAULT // As the model was exported.
	KVFormatNative  KVFormat = C.PAGODA_KV_FORMAT_NATIVE  // Numbers of the type that the model computes in.
	KVFormatInt8    KVFormat = C.PAGODA_KV_FORMAT_INT8    // 8 bits, with a scale and a low end for each head of each token.
	KVFormatInt4    KVFormat = C.PAGODA_KV_FORMAT_INT4    // 4 bits, in the same way.
	KVFormatFP8     KVFormat = C.PAGODA_KV_FORMAT_FP8     // Floats of 8 bits (e4m3fn), with a scale for each head of each token.
)

// Offload is when histories go to the store.
type Offload int32

// When histories go to the store.
const (
	OffloadOnEviction Offload = C.PAGODA_OFFLOAD_ON_EVICTION // When an owner is evicted to make room.
	OffloadAtCommit   Offload = C.PAGODA_OFFLOAD_AT_COMMIT   // With every commit, in the background.
	OffloadByHand     Offload = C.PAGODA_OFFLOAD_BY_HAND     // Only when the caller says so.
)

// Tier is where an owner's history lies.
type Tier int32

// Where an owner's history lies.
const (
	TierNone     Tier = C.PAGODA_TIER_NONE     // Nowhere.
	TierResident Tier = C.PAGODA_TIER_RESIDENT // In the pool.
	TierStore    Tier = C.PAGODA_TIER_STORE    // In the store, or on its way from there to the pool.
)

// Tiers is several places where histories lie.
type Tiers int32

// Places where histories lie.
const (
	TiersResident Tiers = C.PAGODA_TIERS_RESIDENT // The pool.
	TiersStore    Tiers = C.PAGODA_TIERS_STORE    // The store.
	TiersAll      Tiers = C.PAGODA_TIERS_ALL      // Both.
)

// KVSizeUnit is the unit of a [KVSize].
type KVSizeUnit int32

// Units of the size of a pool of keys and values.
const (
	KVSizeUnitDefault KVSizeUnit = C.PAGODA_KV_SIZE_UNIT_DEFAULT // No size is given.
	KVSizeUnitPages   KVSizeUnit = C.PAGODA_KV_SIZE_UNIT_PAGES   // Pages.
	KVSizeUnitBytes   KVSizeUnit = C.PAGODA_KV_SIZE_UNIT_BYTES   // Bytes, all layers together.
	KVSizeUnitPercent KVSizeUnit = C.PAGODA_KV_SIZE_UNIT_PERCENT // Percent of the free memory of the GPU.
)

// KVSize is the size of a pool of keys and values. The zero value is the default of an engine, 1 GiB.
type KVSize struct {
	// Unit is the unit of Value.
	Unit KVSizeUnit
	// Value is how many.
	Value uint64
}

// KVPages is a size in pages.
func KVPages(count uint64) KVSize { return KVSize{KVSizeUnitPages, count} }

// KVBytes is a size in bytes, all layers together: as many pages as fit.
func KVBytes(count uint64) KVSize { return KVSize{KVSizeUnitBytes, count} }

// KVPercent is a size in percent of the free memory of the GPU that the pool is on.
func KVPercent(count uint64) KVSize { return KVSize{KVSizeUnitPercent, count} }

// KVNone is no pool, for engines: nothing is cached.
func KVNone() KVSize { return KVPages(0) }

// KVOptions is the shape, the size and the behaviour of a cache. Layers, Heads, HeadSize and Size have no default.
type KVOptions struct {
	// Layers of the model keep keys and values; each has so many Heads of HeadSize.
	Layers, Heads, HeadSize int32
	// PageSize is how many tokens a page holds, a multiple of 8; 0: 32.
	PageSize int32
	// Type is that of keys and values: F32, F16 or BF16; 0: F32.
	Type ElementType
	// Size is the size of the pool.
	Size KVSize
	// OnGPU puts the pool into the memory of a GPU instead of host memory. Its tensors have no [Values] and no [View].
	OnGPU bool
	// DeviceID is the number of the GPU, with OnGPU.
	DeviceID int32
	// MaxHistory is the most tokens of a history that are kept; 0: all. Older ones leave page by page.
	MaxHistory int32
	// Overlap is what becomes of new tokens that are cached already.
	Overlap Overlap
	// Edited is whether requests bring the items of the history, and what happens when they are not those cached.
	Edited Edited
	// Offload is when histories go to the store.
	Offload Offload
	// OnloadInBackground has [KVCache.Prepare] return before everything has come from the store; see [KVLease.Wait].
	OnloadInBackground bool
	// OnloadThreads read the store; 0: 2.
	OnloadThreads int32
	// AheadPercent is how much of the pool is kept free or stored already, with OffloadOnEviction; 0: 12, or [None].
	AheadPercent int32
	// ModelVersion is the version of the model. Histories that another version has stored are never seen.
	ModelVersion string
	// Store is where histories go that the pool has no room for; nil: nowhere. The cache keeps it open.
	Store *Store
}

func (o *KVOptions) toC(l *lent) (*C.pagoda_kv_options, error) {
	c, f := C.pagoda_kv_options_init(), &fields{lent: l}
	c.layers, c.heads, c.head_size = C.int32_t(o.Layers), C.int32_t(o.Heads), C.int32_t(o.HeadSize)
	orDefault(&c.page_size, o.PageSize)
	if o.Type != Undefined {
		c._type = C.pagoda_element_type(o.Type)
	}
	c.size_unit, c.size = C.pagoda_kv_size_unit(o.Size.Unit), C.uint64_t(o.Size.Value)
	f.err = o.device(&c)
	c.max_history = C.int32_t(o.MaxHistory)
	c.overlap = C.pagoda_overlap(o.Overlap)
	c.edited = C.pagoda_edited(o.Edited)
	c.offload = C.pagoda_offload(o.Offload)
	c.onload_in_background = flag(o.OnloadInBackground)
	c.onload_threads = C.int32_t(o.OnloadThreads)
	orNone(&c.ahead_percent, o.AheadPercent)
	f.text(&c.model_version, o.ModelVersion, "options.model_version")
	if o.Store != nil && f.err == nil {
		c.store, f.err = o.Store.handle("options.store")
	}
	return &c, f.err
}

// device says where the pool lies. To C -1 is the host, which must not come of a mistake.
func (o *KVOptions) device(c *C.pagoda_kv_options) error {
	switch {
	case o.DeviceID < 0:
		return fail(ErrInvalidArgument, "options.device_id", "%d is no GPU: DeviceID is 0 or more", o.DeviceID)
	case o.OnGPU:
		c.device_id = C.int32_t(o.DeviceID)
	case o.DeviceID != 0:
		return fail(ErrInvalidArgument, "options.device_id", "%d, where the pool is in host memory: set OnGPU too", o.DeviceID)
	}
	return nil
}

// KVStats is what a cache has, and what it did since it was opened.
type KVStats struct {
	Pages           uint64 // Pages of the pool.
	FreePages       uint64 // Free pages.
	SharedPages     uint64 // Pages that more than one owner has, by [KVCache.Fork].
	ResidentOwners  uint64 // Owners in the pool.
	ResidentTokens  uint64 // Their tokens.
	TokensFromPool  uint64 // Tokens of prepared histories that were in the pool.
	TokensFromStore uint64 // Tokens of prepared histories that came from the store.
	TokensNew       uint64 // Tokens that were new.
	EvictedOwners   uint64 // Owners that left the pool.
	FailedOffloads  uint64 // Owners that could not be handed to the store.
	FailedOnloads   uint64 // Histories that could not be read from the store.
}

func newKVStats(s *C.pagoda_kv_stats) KVStats {
	return KVStats{
		Pages:           uint64(s.pages),
		FreePages:       uint64(s.free_pages),
		SharedPages:     uint64(s.shared_pages),
		ResidentOwners:  uint64(s.resident_owners),
		ResidentTokens:  uint64(s.resident_tokens),
		TokensFromPool:  uint64(s.tokens_from_pool),
		TokensFromStore: uint64(s.tokens_from_store),
		TokensNew:       uint64(s.tokens_new),
		EvictedOwners:   uint64(s.evicted_owners),
		FailedOffloads:  uint64(s.failed_offloads),
		FailedOnloads:   uint64(s.failed_onloads),
	}
}

// CachedOwner is what a cache has of an owner.
type CachedOwner struct {
	// Start is the position where the cached history begins.
	Start int64
	// Length is how many tokens it has.
	Length int64
	// Tier is where it lies.
	Tier Tier
}

// KVRequest is what one owner of a batch brings.
type KVRequest struct {
	// Owner is the owner.
	Owner uint64
	// Start is the position of the first new token in the owner's history.
	Start int64
	// Tokens is how many new tokens there are.
	Tokens int32
	// Candidates is how many candidates follow them.
	Candidates int32
	// Items is for caches that look out for edited histories: the items up to the last new token, of all new tokens at
	// least, and of as many before them as are to be checked.
	Items []uint64
}

// KVCache is a cache of keys and values: each owner's history as pages in a pool, those of owners not seen for long in a
// store.
type KVCache struct{ object *object }

var cacheKind = &kind{"cache", func(token uintptr) C.pagoda_status {
	return C.pagoda_kv_cache_free(cacheHandle(token))
}}

func cacheHandle(token uintptr) *C.pagoda_kv_cache {
	return *(**C.pagoda_kv_cache)(unsafe.Pointer(&token))
}

// OpenKVCache opens a cache.
func OpenKVCache(ctx context.Context, options *KVOptions) (*KVCache, error) {
	if err := loaded(); err != nil {
		return nil, err
	}
	options, made := copied(options), callers()
	return await(ctx, func() (*KVCache, error) {
		var l lent
		defer l.Unpin()
		cOptions, err := options.toC(&l)
		if err != nil {
			return nil, err
		}
		var handle *C.pagoda_kv_cache
		var failure *C.pagoda_error
		err = check(C.pagoda_kv_cache_open(cOptions, &handle, &failure), &failure)
		runtime.KeepAlive(options)
		if err != nil {
			return nil, err
		}
		c := new(KVCache)
		c.object = own(c, cacheKind, *(*uintptr)(unsafe.Pointer(&handle)), made)
		return c, nil
	}, func(c *KVCache) { c.Close() })
}

// Pool is the pool of one layer, [pages, 2, page size, heads, head size]: an input and an output of the model. Its
// memory is for the model alone to read and write, and lives as long as the tensor.
func (c *KVCache) Pool(layer int) (*Tensor, error) {
	handle, err := c.handle()
	if err != nil {
		return nil, err
	}
	defer runtime.KeepAlive(c)
	var pool *C.pagoda_tensor
	var failure *C.pagoda_error
	if err := check(C.pagoda_kv_cache_pool(handle, number(layer), &pool, &failure), &failure); err != nil {
		return nil, err
	}
	return newTensor(pool, callers()), nil
}

// Lookup is what the cache has of owners. By the time the answer is read, others may have changed it.
func (c *KVCache) Lookup(owners ...uint64) ([]CachedOwner, error) {
	handle, err := c.handle()
	if err != nil {
		return nil, err
	}
	defer runtime.KeepAlive(c)
	starts, lengths := make([]C.int64_t, len(owners)), make([]C.int64_t, len(owners))
	tiers := make([]C.pagoda_tier, len(owners))
	var failure *C.pagoda_error
	if err := check(C.pagoda_kv_cache_lookup(handle, cUsers(owners), C.size_t(len(owners)), first(starts), first(lengths),
		first(tiers), &failure), &failure); err != nil {
		return nil, err
	}
	found := make([]CachedOwner, len(owners))
	for i := range found {
		found[i] = CachedOwner{int64(starts[i]), int64(lengths[i]), Tier(tiers[i])}
	}
	return found, nil
}

// cUsers is a list of users or of owners for C.
func cUsers(numbers []uint64) *C.uint64_t { return (*C.uint64_t)(first(numbers)) }

// Fork lets the owner to, which must have no history, begin with the first tokens of the owner from: a prompt that many
// conversations begin with, or the beams of a search. Whole pages are shared; it returns how many tokens they have. What
// to appends goes to pages of its own. If from is in the store, it is loaded first.
func (c *KVCache) Fork(ctx context.Context, from, to uint64, tokens int32) (int32, error) {
	return await(ctx, func() (int32, error) {
		handle, err := c.handle()
		if err != nil {
			return 0, err
		}
		defer runtime.KeepAlive(c)
		var shared C.int32_t
		var failure *C.pagoda_error
		status := C.pagoda_kv_cache_fork(handle, C.uint64_t(from), C.uint64_t(to), C.int32_t(tokens), &shared, &failure)
		return int32(shared), check(status, &failure)
	}, nil)
}

// Offload writes the histories of owners to the store, and waits until they are as durable as it promises. It returns
// how many owners had something that was not stored.
func (c *KVCache) Offload(ctx context.Context, owners ...uint64) (int, error) {
	return c.offload(ctx, cUsers(lasting(ctx, owners)), len(owners))
}

// OffloadAll is [KVCache.Offload] for all owners in the pool.
func (c *KVCache) OffloadAll(ctx context.Context) (int, error) { return c.offload(ctx, nil, 0) }

func (c *KVCache) offload(ctx context.Context, owners *C.uint64_t, count int) (int, error) {
	return c.count(ctx, func(handle *C.pagoda_kv_cache, done *C.size_t, failure **C.pagoda_error) C.pagoda_status {
		return C.pagoda_kv_cache_offload(handle, owners, C.size_t(count), done, failure)
	})
}

// Evict removes the histories of owners from tiers. Those that leave the pool alone go to the store first, unless that
// is done by hand; those that leave the store are gone for good. It returns how many owners had something there.
func (c *KVCache) Evict(ctx context.Context, tiers Tiers, owners ...uint64) (int, error) {
	return c.evict(ctx, tiers, cUsers(lasting(ctx, owners)), len(owners))
}

// EvictAll is [KVCache.Evict] for all owners that no lease holds.
func (c *KVCache) EvictAll(ctx context.Context, tiers Tiers) (int, error) {
	return c.evict(ctx, tiers, nil, 0)
}

func (c *KVCache) evict(ctx context.Context, tiers Tiers, owners *C.uint64_t, count int) (int, error) {
	return c.count(ctx, func(handle *C.pagoda_kv_cache, done *C.size_t, failure **C.pagoda_error) C.pagoda_status {
		return C.pagoda_kv_cache_evict(handle, owners, C.size_t(count), C.pagoda_tiers(tiers), done, failure)
	})
}

// Prefetch begins to bring histories from the store into the pool and returns at once, with how many are on their way.
func (c *KVCache) Prefetch(owners ...uint64) (int, error) {
	return c.count(context.Background(),
		func(handle *C.pagoda_kv_cache, done *C.size_t, failure **C.pagoda_error) C.pagoda_status {
			return C.pagoda_kv_cache_prefetch(handle, cUsers(owners), C.size_t(len(owners)), done, failure)
		})
}

func (c *KVCache) count(ctx context.Context,
	call func(*C.pagoda_kv_cache, *C.size_t, **C.pagoda_error) C.pagoda_status) (int, error) {
	return await(ctx, func() (int, error) {
		handle, err := c.handle()
		if err != nil {
			return 0, err
		}
		defer runtime.KeepAlive(c)
		var done C.size_t
		var failure *C.pagoda_error
		err = check(call(handle, &done, &failure), &failure)
		return int(done), err
	}, nil)
}

// Flush waits until everything that was handed to the store is as durable as it promises; without a store, not at all.
func (c *KVCache) Flush(ctx context.Context) error {
	return awaitError(ctx, func() error {
		handle, err := c.handle()
		if err != nil {
			return err
		}
		defer runtime.KeepAlive(c)
		var failure *C.pagoda_error
		return check(C.pagoda_kv_cache_flush(handle, &failure), &failure)
	})
}

// Stats is what the cache has, and what it did since it was opened.
func (c *KVCache) Stats() (KVStats, error) {
	handle, err := c.handle()
	if err != nil {
		return KVStats{}, err
	}
	defer runtime.KeepAlive(c)
	s := C.pagoda_kv_stats_init()
	var failure *C.pagoda_error
	if err := check(C.pagoda_kv_cache_get_stats(handle, &s, &failure), &failure); err != nil {
		return KVStats{}, err
	}
	return newKVStats(&s), nil
}

// Close lets go of the cache. If there is a store, what is in the pool goes there, which is waited for, unless that is
// done by hand. Leases that are out stay good.
func (c *KVCache) Close() error { return c.it().close() }

func (c *KVCache) it() *object {
	if c == nil {
		return nil
	}
	return c.object
}

func (c *KVCache) handle() (*C.pagoda_kv_cache, error) {
	token, err := c.it().get("cache")
	return cacheHandle(token), err
}
