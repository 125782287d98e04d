package pagoda

// #include "bridge.h"
import "C"

import (
	"context"
	"runtime"
	"time"
	"unsafe"
)

// EngineOptions is how to open an engine.
type EngineOptions struct {
	// Instances is how many batches run at the same time, on one set of weights, tables and caches; 0: 1.
	Instances int32
	// MaxBatch is the most requests of one batch; 0: 64.
	MaxBatch int32
	// MaxBatchRows is the most rows of one batch: new events, and candidates; 0: 8192.
	MaxBatchRows int32
	// MaxDelay is how long a request waits for others to run with, rounded up to whole microseconds; 0: not at all.
	MaxDelay time.Duration
	// Queue is the most requests that wait; more are refused with [ErrCapacity]. 0: 4096.
	Queue int32
	// KVPages is how many pages of keys and values are kept in memory; 0: KVBytes says it.
	KVPages int32
	// KVBytes is how many bytes of keys and values are kept in memory; 0: 1 GiB, or what KVPages or KVPercent says. With
	// [None] every request computes its whole history.
	KVBytes int64
	// KVPercent is how many percent of the memory that is free on the GPU of the model are for keys and values; 0: KVBytes
	// says it. Refused where the model runs on the CPU.
	KVPercent int32
	// HostBytes is for keys and values that have left the pool: bytes of host memory, pinned where the model can be on a
	// GPU; 0: none.
	HostBytes uint64
	// CUDAGraphs is, on a GPU, shapes of batches that are captured into CUDA graphs when first used and replayed from then
	// on; "": none. They are separated by commas, each the most users, the most rows, and, if they are fewer, the most
	// candidates: "1x384, 8x3072x2048". Every node of the model has to be on the GPU.
	CUDAGraphs string
	// Offload is when keys and values go to the store.
	Offload Offload
	// AheadPercent is as in [KVOptions]; 0: 12, or [None].
	AheadPercent int32
	// RememberBytes is for the events of users as they were sent, so that requests with only new events are served also
	// when the keys and values of the earlier ones are gone; 0: 64 MiB, or [None].
	RememberBytes int64
	// TableCacheBytes is for the cache of each embedding table; 0: all of a table of up to 256 MiB.
	TableCacheBytes uint64
	// Model is where the model runs, and on how many threads. Its Embeddings must be nil.
	Model *ModelOptions
	// Store is the folder of a store for keys and values; "": none. One process has it open at a time.
	Store string
	// StoreOptions is how the store behaves.
	StoreOptions *StoreOptions
}

func (o *EngineOptions) toC(l *lent) (*C.pagoda_engine_options, error) {
	c := C.pagoda_engine_options_init()
	for _, option := range []struct {
		to    *C.int32_t
		value int32
	}{{&c.instances, o.Instances}, {&c.max_batch, o.MaxBatch}, {&c.max_batch_rows, o.MaxBatchRows}, {&c.queue, o.Queue}} {
		if option.value != 0 {
			*option.to = C.int32_t(option.value)
		}
	}
	c.kv_pages, c.kv_percent = C.int32_t(o.KVPages), C.int32_t(o.KVPercent)
	if o.KVPages != 0 || o.KVPercent != 0 {
		c.kv_bytes = 0
	}
	c.host_bytes = C.uint64_t(o.HostBytes)
	orNone(&c.ahead_percent, o.AheadPercent)
	c.offload = C.pagoda_offload(o.Offload)
	c.table_cache_bytes = C.uint64_t(o.TableCacheBytes)
	if o.KVBytes < None {
		return nil, fail(ErrInvalidArgument, "options.kv_bytes", "%d is negative; for none use pagoda.None", o.KVBytes)
	}
	if o.RememberBytes < None {
		return nil, fail(ErrInvalidArgument, "options.remember_bytes", "%d is negative; for none use pagoda.None",
			o.RememberBytes)
	}
	orNone(&c.kv_bytes, o.KVBytes)
	orNone(&c.remember_bytes, o.RememberBytes)
	var err error
	if c.max_delay_us, err = microseconds(o.MaxDelay, "options.max_delay_us"); err != nil {
		return nil, err
	}
	if o.Model != nil {
		if c.model, err = o.Model.toC(l); err != nil {
			return nil, err
		}
		l.Pin(c.model)
	}
	if c.cuda_graphs, err = l.optional(o.CUDAGraphs, "options.cuda_graphs"); err != nil {
		return nil, err
	}
	if c.store_path, err = l.optional(o.Store, "options.store_path"); err != nil {
		return nil, err
	}
	if o.StoreOptions != nil {
		c.store_options = o.StoreOptions.toC()
		l.Pin(c.store_options)
	}
	return &c, nil
}

// EngineStats is what an engine did since it was opened.
type EngineStats struct {
	Answered        uint64 // Requests that were answered.
	Failed          uint64 // Requests that failed, for whatever reason.
	Batches         uint64 // Batches that ran.
	CachedRows      uint64 // Rows of histories that were cached.
	ComputedRows    uint64 // Rows of histories that were computed.
	Waiting         uint64 // Requests that wait now.
	RememberedUsers uint64 // Users whose events are remembered.
	RememberedBytes uint64 // Bytes that those take.
}

// Engine is a ranking engine: a model folder that is being served, with its tables and the keys and values of its
// users.
type Engine struct{ object *object }

var engineKind = &kind{"engine", func(token uintptr) C.pagoda_status {
	return C.pagoda_engine_free(engineHandle(token))
}}

func engineHandle(token uintptr) *C.pagoda_engine {
	return *(**C.pagoda_engine)(unsafe.Pointer(&token))
}

// OpenEngine opens a model folder, checks all its files, and runs the model once.
func OpenEngine(ctx context.Context, folder string, options *EngineOptions) (*Engine, error) {
	if err := loaded(); err != nil {
		return nil, err
	}
	cFolder, err := text(folder, "folder")
	if err != nil {
		return nil, err
	}
	options, made := copied(options), callers()
	if options.Model != nil {
		options.Model = copied(options.Model)
	}
	if options.StoreOptions != nil {
		options.StoreOptions = copied(options.StoreOptions)
	}
	return await(ctx, func() (*Engine, error) {
		var l lent
		defer l.Unpin()
		cOptions, err := options.toC(&l)
		if err != nil {
			return nil, err
		}
		var handle *C.pagoda_engine
		var failure *C.pagoda_error
		err = check(C.pagoda_engine_open(cFolder, cOptions, &handle, &failure), &failure)
		runtime.KeepAlive(options)
		if err != nil {
			return nil, err
		}
		e := new(Engine)
		e.object = own(e, engineKind, *(*uintptr)(unsafe.Pointer(&handle)), made)
		return e, nil
	}, func(e *Engine) { e.Close() })
}

// Swap serves another model folder from now on. It is opened and run once beside the old one; requests that came before
// end on that, and no request fails. On an error all stays as it was.
func (e *Engine) Swap(ctx context.Context, folder string) error {
	cFolder, err := text(folder, "folder")
	if err != nil {
		return err
	}
	return awaitError(ctx, func() error {
		handle, err := e.handle()
		if err != nil {
			return err
		}
		defer runtime.KeepAlive(e)
		var failure *C.pagoda_error
		return check(C.pagoda_engine_swap(handle, cFolder, &failure), &failure)
	})
}

// Forget forgets users: their events, and their keys and values in the version that is served now, also those in the
// store. It returns how many were known.
func (e *Engine) Forget(ctx context.Context, users ...uint64) (int, error) {
	users = lasting(ctx, users)
	return await(ctx, func() (int, error) {
		handle, err := e.handle()
		if err != nil {
			return 0, err
		}
		defer runtime.KeepAlive(e)
		var forgotten C.size_t
		var failure *C.pagoda_error
		status := C.pagoda_engine_forget(handle, cUsers(users), C.size_t(len(users)), &forgotten, &failure)
		err = check(status, &failure)
		return int(forgotten), err
	}, nil)
}

// Tasks is how many tasks the model that is served now has: the scores of one candidate.
func (e *Engine) Tasks() (int, error) {
	handle, err := e.handle()
	if err != nil {
		return 0, err
	}
	defer runtime.KeepAlive(e)
	var tasks C.size_t
	var failure *C.pagoda_error
	err = check(C.pagoda_engine_tasks(handle, &tasks, &failure), &failure)
	return int(tasks), err
}

// Info is the pagoda.json of the model that is served now: its features, tasks, limits and version.
func (e *Engine) Info() (string, error) {
	handle, err := e.handle()
	if err != nil {
		return "", err
	}
	defer runtime.KeepAlive(e)
	return grown(func(buffer *C.char, capacity C.size_t, length *C.size_t, failure **C.pagoda_error) C.pagoda_status {
		return C.pagoda_engine_info(handle, buffer, capacity, length, failure)
	})
}

// Stats is what the engine did since it was opened.
func (e *Engine) Stats() (EngineStats, error) {
	handle, err := e.handle()
	if err != nil {
		return EngineStats{}, err
	}
	defer runtime.KeepAlive(e)
	c := C.pagoda_engine_stats_init()
	var failure *C.pagoda_error
	if err := check(C.pagoda_engine_get_stats(handle, &c, &failure), &failure); err != nil {
		return EngineStats{}, err
	}
	return EngineStats{
		Answered:        uint64(c.answered),
		Failed:          uint64(c.failed),
		Batches:         uint64(c.batches),
		CachedRows:      uint64(c.cached_rows),
		ComputedRows:    uint64(c.computed_rows),
		Waiting:         uint64(c.waiting),
		RememberedUsers: uint64(c.remembered_users),
		RememberedBytes: uint64(c.remembered_bytes),
	}, nil
}

// Close lets go of the engine. Requests that wait are answered first, and what is cached is stored if there is a store;
// this waits for both, unless someone else is in a call: then that one does.
func (e *Engine) Close() error { return e.it().close() }

func (e *Engine) it() *object {
	if e == nil {
		return nil
	}
	return e.object
}

func (e *Engine) handle() (*C.pagoda_engine, error) {
	token, err := e.it().get("engine")
	return engineHandle(token), err
}
