package pagoda_test

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"testing"

	"pagoda"
)

func shape() *pagoda.KVOptions {
	return &pagoda.KVOptions{Layers: 2, Heads: 2, HeadSize: 32, PageSize: 8, Size: pagoda.KVPages(16)}
}

func openStore(t *testing.T, folder string, options *pagoda.StoreOptions) *pagoda.Store {
	t.Helper()
	it := must[*pagoda.Store](t)(pagoda.OpenStore(ctx, folder, options))
	t.Cleanup(func() { ok(t, it.Close()) })
	return it
}

func openCache(t *testing.T, options *pagoda.KVOptions) *pagoda.KVCache {
	t.Helper()
	it := must[*pagoda.KVCache](t)(pagoda.OpenKVCache(ctx, options))
	t.Cleanup(func() { ok(t, it.Close()) })
	return it
}

func TestStores(t *testing.T) {
	folder := t.TempDir()
	options := &pagoda.StoreOptions{Durability: pagoda.DurabilityNone, MaxBytes: 1 << 30, GarbageBytes: 1 << 20}
	store := openStore(t, folder, options)
	_, err := pagoda.OpenStore(ctx, folder, nil)
	fails(t, err, pagoda.ErrBusy, "path")
	ok(t, store.Flush(t.Context()))
	ok(t, store.Compact(ctx))
	stats := must[pagoda.StoreStats](t)(store.Stats())
	equal(t, "owners", stats.Owners, 0)

	// A cache keeps it open.
	with := shape()
	with.Store = store
	cache := openCache(t, with)
	ok(t, store.Close())
	_, err = pagoda.OpenKVCache(ctx, with)
	fails(t, err, pagoda.ErrInvalidHandle, "options.store")
	_, err = pagoda.OpenStore(ctx, folder, nil)
	fails(t, err, pagoda.ErrBusy, "path")
	ok(t, cache.Close())
	openStore(t, folder, nil)

	options.Durability = 9
	_, err = pagoda.OpenStore(ctx, t.TempDir(), options)
	fails(t, err, pagoda.ErrInvalidArgument, "options.durability")
	_, err = pagoda.OpenStore(ctx, "", nil)
	fails(t, err, pagoda.ErrInvalidArgument, "path")
}

func TestCaches(t *testing.T) {
	store := openStore(t, t.TempDir(), nil)
	options := shape()
	options.Overlap, options.Edited, options.Offload = pagoda.OverlapTrim, pagoda.EditedRefuse, pagoda.OffloadAtCommit
	options.ModelVersion, options.Store = "one", store
	cache := openCache(t, options)
	items := []uint64{5, 6, 7, 8}

	for _, c := range []context.Context{ctx, t.Context()} {
		lease := must[*pagoda.KVLease](t)(cache.Prepare(c,
			pagoda.KVRequest{Owner: 1, Tokens: 3, Candidates: 2, Items: items[:3]}, pagoda.KVRequest{Owner: 2, Candidates: 1}))
		for which, want := range map[pagoda.KVTensor]string{
			pagoda.KVTensorRowOffsets: "[0 5 6]", pagoda.KVTensorNumCandidates: "[2 1]", pagoda.KVTensorCachedLen: "[0 0]",
			pagoda.KVTensorPageIndptr: "[0 1 1]",
		} {
			index := must[*pagoda.Tensor](t)(lease.Tensor(which))
			equal(t, "tensor", fmt.Sprint(must[[]int32](t)(pagoda.Values[int32](index))), want)
			ok(t, index.Close())
		}
		pages := must[*pagoda.Tensor](t)(lease.Tensor(pagoda.KVTensorPageIDs))
		equal(t, "pages", len(must[[]int32](t)(pagoda.Values[int32](pages))), 1)
		ok(t, pages.Close())
		equal(t, "ready", must[bool](t)(lease.Ready(1)), true)
		ok(t, lease.Wait(c, -1))
		ok(t, lease.Wait(c, 1))
		_, err := lease.Ready(2)
		fails(t, err, pagoda.ErrInvalidArgument, "layer")
		fails(t, lease.Wait(c, 1<<40), pagoda.ErrInvalidArgument, "layer")
		_, err = lease.Tensor(9)
		fails(t, err, pagoda.ErrInvalidArgument, "which")
		_, err = cache.Prepare(c, pagoda.KVRequest{Owner: 1, Tokens: 3, Items: items[:3]})
		fails(t, err, pagoda.ErrBusy, "")
		ok(t, lease.Abort())
		fails(t, lease.Abort(), pagoda.ErrInvalidArgument, "lease")
		ok(t, lease.Close())
	}

	lease := must[*pagoda.KVLease](t)(cache.Prepare(ctx, pagoda.KVRequest{Owner: 1, Tokens: 3, Items: items[:3]}))
	gone, cancel := context.WithCancel(ctx)
	cancel()
	isDone(t, lease.Commit(gone, false), context.Canceled)
	ok(t, lease.Commit(t.Context(), true))
	fails(t, lease.Commit(ctx, false), pagoda.ErrInvalidArgument, "lease")
	ok(t, lease.Close())
	fails(t, lease.Commit(ctx, false), pagoda.ErrInvalidHandle, "lease")
	equal(t, "owners stored", must[pagoda.StoreStats](t)(store.Stats()).Owners, 1)

	lease = must[*pagoda.KVLease](t)(cache.Prepare(ctx, pagoda.KVRequest{Owner: 1, Start: 2, Tokens: 2, Items: items}))
	owner := must[pagoda.LeasedOwner](t)(lease.Owner(0))
	equal(t, "owner", owner, pagoda.LeasedOwner{Owner: 1, Cached: 3, Tokens: 1, Trimmed: 1})
	for _, index := range []int{1, -1} {
		_, err := lease.Owner(index)
		fails(t, err, pagoda.ErrInvalidArgument, "index")
	}
	ok(t, lease.Close()) // which aborts it
	cached := must[[]pagoda.CachedOwner](t)(cache.Lookup(1))
	equal(t, "cached", cached[0], pagoda.CachedOwner{Length: 3, Tier: pagoda.TierResident})

	_, err := cache.Prepare(ctx, pagoda.KVRequest{Owner: 2, Candidates: 1},
		pagoda.KVRequest{Owner: 1, Start: 9, Candidates: 1})
	fails(t, err, pagoda.ErrInvalidArgument, "requests[1].start")
	ok(t, must[*pagoda.KVLease](t)(cache.Prepare(ctx)).Close())
	_, err = cache.Prepare(ctx, pagoda.KVRequest{Owner: 1, Start: 2, Tokens: 2, Items: []uint64{5, 9, 7, 8}})
	fails(t, err, pagoda.ErrInvalidArgument, "requests[0].items")
	for _, layer := range []int{2, -1, 1 << 40} {
		_, err = cache.Pool(layer)
		fails(t, err, pagoda.ErrInvalidArgument, "layer")
	}
	pool := must[*pagoda.Tensor](t)(cache.Pool(1))
	equal(t, "pool", fmt.Sprint(must[[]int64](t)(pool.Dims())), "[16 2 8 2 32]")
	ok(t, pool.Close())

	ok(t, cache.Flush(ctx))
	number := must[int](t)
	equal(t, "offloaded", number(cache.OffloadAll(t.Context())), 0)
	equal(t, "offloaded", number(cache.Offload(ctx, 1, 2))+number(cache.Offload(ctx)), 0)
	equal(t, "evicted", number(cache.Evict(ctx, pagoda.TiersAll)), 0)
	equal(t, "evicted", number(cache.Evict(t.Context(), pagoda.TiersResident, 1, 2)), 1)
	equal(t, "free pages", must[pagoda.KVStats](t)(cache.Stats()).FreePages, 16)
	equal(t, "tier", must[[]pagoda.CachedOwner](t)(cache.Lookup(1, 2))[0].Tier, pagoda.TierStore)
	equal(t, "no users", len(must[[]pagoda.CachedOwner](t)(cache.Lookup())), 0)
	equal(t, "on their way", number(cache.Prefetch(1, 2)), 1)
	lease = must[*pagoda.KVLease](t)(cache.Prepare(ctx, pagoda.KVRequest{Owner: 1, Start: 3, Candidates: 1}))
	ok(t, lease.Close())
	equal(t, "tier", must[[]pagoda.CachedOwner](t)(cache.Lookup(1))[0].Tier, pagoda.TierResident)
	equal(t, "evicted", number(cache.EvictAll(ctx, pagoda.TiersAll)), 1)
	equal(t, "tier", must[[]pagoda.CachedOwner](t)(cache.Lookup(1))[0].Tier, pagoda.TierNone)
	_, err = cache.EvictAll(ctx, 9)
	fails(t, err, pagoda.ErrInvalidArgument, "tiers")

	_, err = pagoda.OpenKVCache(ctx, nil)
	fails(t, err, pagoda.ErrInvalidArgument, "options.size_unit")
	options = shape()
	options.Size = pagoda.KVSize{}
	_, err = pagoda.OpenKVCache(ctx, options)
	fails(t, err, pagoda.ErrInvalidArgument, "options.size_unit")
	for _, size := range []pagoda.KVSize{{Value: 1}, pagoda.KVNone(), pagoda.KVBytes(1), pagoda.KVPercent(50)} {
		options.Size = size
		_, err = pagoda.OpenKVCache(ctx, options)
		fails(t, err, pagoda.ErrInvalidArgument, "options.size")
	}
	// 4096 is a number that no machine has a GPU of.
	for _, c := range []struct {
		onGPU    bool
		deviceID int32
		code     pagoda.Status
	}{{true, 4096, pagoda.ErrUnsupported}, {false, 4096, pagoda.ErrInvalidArgument}, {true, -1, pagoda.ErrInvalidArgument}} {
		options.OnGPU, options.DeviceID = c.onGPU, c.deviceID
		_, err = pagoda.OpenKVCache(ctx, options)
		fails(t, err, c.code, "options.device_id")
	}
	options = shape()
	options.AheadPercent = 101
	_, err = pagoda.OpenKVCache(ctx, options)
	fails(t, err, pagoda.ErrInvalidArgument, "options.ahead_percent")
	options.AheadPercent = pagoda.None
	_, err = openCache(t, options).OffloadAll(ctx)
	fails(t, err, pagoda.ErrUnsupported, "")
}

// Pages of a prompt that other owners begin with.
func TestForks(t *testing.T) {
	cache := openCache(t, shape())
	lease := must[*pagoda.KVLease](t)(cache.Prepare(ctx, pagoda.KVRequest{Owner: 1, Tokens: 20}))
	ok(t, lease.Commit(ctx, false))
	ok(t, lease.Close())
	shared := must[int32](t)
	for _, c := range []struct {
		from, to uint64
		tokens   int32
		shared   int32
	}{{1, 2, 20, 16}, {1, 3, 9, 8}, {1, 4, 7, 0}, {5, 6, 8, 0}} {
		equal(t, "shared", shared(cache.Fork(t.Context(), c.from, c.to, c.tokens)), c.shared)
		equal(t, "cached", must[[]pagoda.CachedOwner](t)(cache.Lookup(c.to))[0].Length, int64(c.shared))
	}
	stats := must[pagoda.KVStats](t)(cache.Stats())
	equal(t, "shared pages", stats.SharedPages, 2)
	equal(t, "free pages", stats.FreePages, 13)
	equal(t, "owners", stats.ResidentOwners, 3)
	_, err := cache.Fork(ctx, 1, 2, 8)
	fails(t, err, pagoda.ErrInvalidArgument, "to")
	_, err = cache.Fork(ctx, 1, 7, -1)
	fails(t, err, pagoda.ErrInvalidArgument, "tokens")
	equal(t, "evicted", must[int](t)(cache.EvictAll(ctx, pagoda.TiersAll)), 3)
	equal(t, "free pages", must[pagoda.KVStats](t)(cache.Stats()).FreePages, 16)
}

// doneMeanwhile is a context that is done right after it was first asked whether it is.
type doneMeanwhile struct {
	context.Context
	asked bool
}

func (c *doneMeanwhile) Err() error {
	if !c.asked {
		c.asked = true
		return nil
	}
	return c.Context.Err()
}

// A caller that no longer waits for a commit may close the lease: the commit goes on.
func TestACommitOutlivesItsContextAndItsLease(t *testing.T) {
	held := settled(0) + 2
	// On one processor the goroutine of the commit begins after the Close.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	options := shape()
	options.Offload, options.Store = pagoda.OffloadAtCommit, openStore(t, t.TempDir(), nil)
	cache := openCache(t, options)
	gone, cancel := context.WithCancel(ctx)
	cancel()
	for user := range uint64(8) {
		lease := must[*pagoda.KVLease](t)(cache.Prepare(ctx, pagoda.KVRequest{Owner: user, Tokens: 1}))
		err := lease.Commit(&doneMeanwhile{Context: gone}, true)
		if user%2 == 0 {
			fails(t, lease.Abort(), pagoda.ErrInvalidArgument, "lease")
		}
		ok(t, lease.Close())
		if err != nil { // it may also have been quick
			isDone(t, err, context.Canceled)
		}
		fails(t, lease.Commit(ctx, true), pagoda.ErrInvalidHandle, "lease")
		equal(t, "objects held", settled(held), held)
		equal(t, "cached", must[[]pagoda.CachedOwner](t)(cache.Lookup(user))[0].Length, 1)
	}
	equal(t, "owners stored", must[pagoda.StoreStats](t)(options.Store.Stats()).Owners, 8)
}

// What is remembered gives what computing it anew gives.
func TestRankingWithACache(t *testing.T) {
	m, cache := open(t, model), openCache(t, shape())
	names := map[string]pagoda.KVTensor{
		"row_offsets": pagoda.KVTensorRowOffsets, "num_candidates": pagoda.KVTensorNumCandidates, "cached_len": pagoda.KVTensorCachedLen,
		"page_indptr": pagoda.KVTensorPageIndptr, "page_ids": pagoda.KVTensorPageIDs,
	}
	rank := func(start int64, rows ...int64) float64 {
		t.Helper()
		lease := must[*pagoda.KVLease](t)(cache.Prepare(ctx,
			pagoda.KVRequest{Owner: 1, Start: start, Tokens: int32(len(rows)) - 1, Candidates: 1}))
		defer lease.Close()
		inputs := pagoda.Tensors{"item_ids": tensor(t, []int64{int64(len(rows))}, rows)}
		for name, which := range names {
			inputs[name] = must[*pagoda.Tensor](t)(lease.Tensor(which))
			defer inputs[name].Close()
		}
		pools := pagoda.Tensors{}
		for layer := range 2 {
			pool := must[*pagoda.Tensor](t)(cache.Pool(layer))
			defer pool.Close()
			inputs[fmt.Sprintf("kv_pool_%d", layer)], pools[fmt.Sprintf("kv_pool_%d_out", layer)] = pool, pool
		}
		outputs := must[[]*pagoda.Tensor](t)(m.RunInto(ctx, inputs, pools, "scores"))
		defer outputs[0].Close()
		ok(t, lease.Commit(ctx, false))
		scores := must[[]float32](t)(pagoda.Values[float32](outputs[0]))
		return float64(scores[len(rows)-1])
	}
	whole := rank(0, 1, 2, 3, 4, 5, 99)
	must[int](t)(cache.EvictAll(ctx, pagoda.TiersResident))
	alone := rank(0, 1, 2, 3, 99)
	if later := rank(3, 4, 5, 99); math.Abs(later-whole) > 1e-5 || alone == whole {
		t.Errorf("%v from the cache, %v without; %v before", later, whole, alone)
	}
}
