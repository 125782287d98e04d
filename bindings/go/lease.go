package pagoda

// #include "bridge.h"
import "C"

import (
	"context"
	"runtime"
	"slices"
	"unsafe"
)

// KVTensor is one of the index tensors of a lease: the inputs of ai.pagoda's operators of the same names.
type KVTensor int32

// The index tensors of a lease.
const (
	KVTensorRowOffsets    KVTensor = C.PAGODA_KV_TENSOR_ROW_OFFSETS    // Where each owner's rows begin: int32 [owners + 1].
	KVTensorNumCandidates KVTensor = C.PAGODA_KV_TENSOR_NUM_CANDIDATES // How many candidates each owner has: int32 [owners].
	KVTensorCachedLen     KVTensor = C.PAGODA_KV_TENSOR_CACHED_LEN     // How many tokens of each owner are cached: int32 [owners].
	KVTensorPageIndptr    KVTensor = C.PAGODA_KV_TENSOR_PAGE_INDPTR    // Where each owner's list of pages begins: int32 [owners + 1].
	KVTensorPageIDs       KVTensor = C.PAGODA_KV_TENSOR_PAGE_IDS       // Each owner's pages in order of position: int32.
)

// LeasedOwner is one owner in a lease.
type LeasedOwner struct {
	// Owner is the owner.
	Owner uint64
	// Start is the position where the history begins, as the model sees it.
	Start int64
	// Cached is how many of its tokens are cached.
	Cached int32
	// Tokens is how many are new; the model appends them.
	Tokens int32
	// Trimmed is how many rows at the beginning of the request were cached already, where overlaps are trimmed: they
	// must be left out of the model's rows.
	Trimmed int32
}

// KVLease is a batch's hold on its owners: where their histories lie, and room for what is new. It ends with Commit or
// Abort; closing one that has not ended aborts it.
type KVLease struct{ object *object }

var leaseKind = &kind{"lease", func(token uintptr) C.pagoda_status {
	return C.pagoda_kv_lease_free(leaseHandle(token))
}}

func leaseHandle(token uintptr) *C.pagoda_kv_lease {
	return *(**C.pagoda_kv_lease)(unsafe.Pointer(&token))
}

// Prepare makes room for a batch and says where everything lies: it evicts the least recently used owners if need be,
// and brings those of the batch back from the store. They stay where they are until the lease ends. Any number of
// leases may read an owner's history at the same time; one at most may add to it.
//
// Then run the model on the tensors of the lease and the pools of the cache: for each owner the rows of its new tokens,
// then those of its candidates.
func (c *KVCache) Prepare(ctx context.Context, requests ...KVRequest) (*KVLease, error) {
	requests, made := slices.Clone(requests), callers()
	for i := range requests {
		requests[i].Items = lasting(ctx, requests[i].Items)
	}
	return await(ctx, func() (*KVLease, error) {
		handle, err := c.handle()
		if err != nil {
			return nil, err
		}
		defer runtime.KeepAlive(c)
		var l lent
		defer l.Unpin()
		batch := make([]C.pagoda_kv_request, len(requests))
		for i, request := range requests {
			batch[i] = C.pagoda_kv_request_init()
			batch[i].owner, batch[i].start = C.uint64_t(request.Owner), C.int64_t(request.Start)
			batch[i].tokens, batch[i].candidates = C.int32_t(request.Tokens), C.int32_t(request.Candidates)
			if len(request.Items) > 0 {
				l.Pin(&request.Items[0])
				batch[i].items = (*C.uint64_t)(&request.Items[0])
				batch[i].item_count = C.size_t(len(request.Items))
			}
		}
		var lease *C.pagoda_kv_lease
		var failure *C.pagoda_error
		status := C.pagoda_kv_cache_prepare(handle, first(batch), C.size_t(len(batch)), &lease, &failure)
		if err := check(status, &failure); err != nil {
			return nil, err
		}
		it := new(KVLease)
		it.object = own(it, leaseKind, *(*uintptr)(unsafe.Pointer(&lease)), made)
		return it, nil
	}, func(it *KVLease) { it.Close() })
}

// Tensor is one of the index tensors, to be an input of the model.
func (l *KVLease) Tensor(which KVTensor) (*Tensor, error) {
	handle, err := l.handle()
	if err != nil {
		return nil, err
	}
	defer runtime.KeepAlive(l)
	var tensor *C.pagoda_tensor
	var failure *C.pagoda_error
	status := C.pagoda_kv_lease_tensor(handle, C.pagoda_kv_tensor(which), &tensor, &failure)
	if err := check(status, &failure); err != nil {
		return nil, err
	}
	return newTensor(tensor, callers()), nil
}

// Owner is what the lease has of one owner, by its place in the batch.
func (l *KVLease) Owner(index int) (LeasedOwner, error) {
	handle, err := l.handle()
	if err != nil {
		return LeasedOwner{}, err
	}
	defer runtime.KeepAlive(l)
	c := C.pagoda_kv_leased_owner_init()
	var failure *C.pagoda_error
	if err := check(C.pagoda_kv_lease_owner(handle, C.size_t(index), &c, &failure), &failure); err != nil {
		return LeasedOwner{}, err
	}
	return LeasedOwner{uint64(c.owner), int64(c.start), int32(c.cached), int32(c.tokens), int32(c.trimmed)}, nil
}

// Ready tells whether a layer of every owner has arrived from the store.
func (l *KVLease) Ready(layer int) (bool, error) {
	handle, err := l.handle()
	if err != nil {
		return false, err
	}
	defer runtime.KeepAlive(l)
	var ready C.int32_t
	var failure *C.pagoda_error
	err = check(C.pagoda_kv_lease_ready(handle, number(layer), &ready, &failure), &failure)
	return ready == 1, err
}

// Wait waits until a layer of every owner has arrived from the store; with -1, until all have. That is needed before the
// model runs only with KVOptions.OnloadInBackground.
func (l *KVLease) Wait(ctx context.Context, layer int) error {
	return awaitError(ctx, func() error {
		handle, err := l.handle()
		if err != nil {
			return err
		}
		defer runtime.KeepAlive(l)
		var failure *C.pagoda_error
		return check(C.pagoda_kv_lease_wait(handle, number(layer), &failure), &failure)
	})
}

// Commit makes the new tokens part of their histories: the model has appended them. It ends the lease. With wait it
// waits until the store has them as safe as it promises, where histories go there at commit. If ctx is done before it
// begins, nothing is committed; after that the commit goes on, and only the waiting ends.
func (l *KVLease) Commit(ctx context.Context, wait bool) error {
	if err := done(ctx); err != nil {
		return err
	}
	// Here, not where it is called: a Close after ctx is done would come before that, and abort the lease.
	token, err := l.it().keep("lease")
	if err != nil {
		return err
	}
	commit := func() (struct{}, error) {
		defer runtime.KeepAlive(l)
		defer l.it().let()
		var failure *C.pagoda_error
		return struct{}{}, check(C.pagoda_kv_lease_commit(leaseHandle(token), flag(wait), &failure), &failure)
	}
	if wait {
		_, err = begun(ctx, commit, nil)
	} else {
		_, err = commit()
	}
	return err
}

// Abort ends the lease and leaves everything as it was before. A commit that has begun goes on, and then this fails.
func (l *KVLease) Abort() error {
	handle, err := l.handle()
	if err != nil {
		return err
	}
	if l.it().isKept() {
		return fail(ErrInvalidArgument, "lease", "a commit of this lease has begun already: prepare another one")
	}
	defer runtime.KeepAlive(l)
	var failure *C.pagoda_error
	return check(C.pagoda_kv_lease_abort(handle, &failure), &failure)
}

// Close lets go of the lease, and aborts it if it has not ended. A commit that has begun goes on.
func (l *KVLease) Close() error { return l.it().close() }

func (l *KVLease) it() *object {
	if l == nil {
		return nil
	}
	return l.object
}

func (l *KVLease) handle() (*C.pagoda_kv_lease, error) {
	token, err := l.it().get("lease")
	return leaseHandle(token), err
}
