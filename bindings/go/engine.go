package pagoda

// #include "bridge.h"
import "C"

import (
	"context"
	"runtime"
	"slices"
	"strings"
	"time"
	"unsafe"
)

// EngineOptions is how to open an engine.
type EngineOptions struct {
	// Instances is how many batches run at the same time; 0: 1. They share the weights, the tables and the caches.
	Instances int32
	// MaxBatch is the maximum number of requests in a batch; 0: 64.
	MaxBatch int32
	// MaxBatchRows is the maximum number of rows in a batch: new events and candidates; 0: 8192.
	MaxBatchRows int32
	// MaxDelay is the coalescing window: how long a request waits for other requests, to run in one batch with them. It is
	// rounded up to whole microseconds. 0: it does not wait.
	MaxDelay time.Duration
	// Queue is the maximum number of queued requests; 0: 4096. A request beyond it is rejected with [ErrCapacity].
	Queue int32
	// KVSize is the size of the pool of keys and values; zero: 1 GiB. With [KVNone] nothing is cached: every request
	// computes its whole history.
	KVSize KVSize
	// KVFormat is how pages hold keys and values, in memory and in the store.
	KVFormat KVFormat
	// HostBytes is bytes of host memory for keys and values that were evicted from the pool; 0: none. The memory is pinned
	// if the model can run on a GPU.
	HostBytes uint64
	// CUDAGraphs is, on a GPU, the batch shapes that are captured into CUDA graphs when they are first used, and replayed
	// after that. Every node of the model must run on the GPU. On the CPU the shapes are checked and not used.
	CUDAGraphs []GraphShape
	// Offload is when keys and values are written to the store.
	Offload Offload
	// AheadPercent is as in [KVOptions]; 0: 12, or [None].
	AheadPercent int32
	// RememberBytes is bytes for the event log, the events of users as they were sent; 0: 64 MiB, or [None]. With it, a
	// request that sends only new events is served even if the keys and values of the earlier events were evicted.
	RememberBytes int64
	// TableCacheBytes is bytes for the cache of each embedding table; 0: a table of up to 256 MiB is cached as a whole.
	TableCacheBytes uint64
	// TableTiersPath is a configuration file (ps.json) that names the backing tiers of the embedding tables; "": host
	// memory, with all rows. The models in the file are ignored.
	TableTiersPath string
	// Model is where the model runs, and on how many threads. Its Tables must be nil.
	Model *ModelOptions
	// StorePath is the folder of a store for keys and values; "": none. One process at a time has it open.
	StorePath string
	// StoreOptions is how the store is opened.
	StoreOptions *StoreOptions
}

// GraphShape is the largest batch that a CUDA graph has room for.
type GraphShape struct {
	// Users is the maximum number of users; 1 or more.
	Users int32
	// Rows is the maximum number of rows of all users together: new events and candidates; 1 or more.
	Rows int32
	// Candidates is the maximum number of candidates of all users together; 0: as many as Rows.
	Candidates int32
	// Pages is the maximum number of pages of all users together; 0: enough for the longest histories.
	Pages int32
}

func (o *EngineOptions) toC(l *lent) (*C.pagoda_engine_options, error) {
	c, f := C.pagoda_engine_options_init(), &fields{lent: l}
	orDefault(&c.instances, o.Instances)
	orDefault(&c.max_batch, o.MaxBatch)
	orDefault(&c.max_batch_rows, o.MaxBatchRows)
	orDefault(&c.queue, o.Queue)
	c.kv_size_unit, c.kv_size = C.pagoda_kv_size_unit(o.KVSize.Unit), C.uint64_t(o.KVSize.Value)
	c.kv_format = C.pagoda_kv_format(o.KVFormat)
	c.host_bytes = C.uint64_t(o.HostBytes)
	orNone(&c.ahead_percent, o.AheadPercent)
	c.offload = C.pagoda_offload(o.Offload)
	c.table_cache_bytes = C.uint64_t(o.TableCacheBytes)
	if o.RememberBytes < None {
		return nil, fail(ErrInvalidArgument, "options.remember_bytes", "%d is negative; for none use pagoda.None",
			o.RememberBytes)
	}
	orNone(&c.remember_bytes, o.RememberBytes)
	f.duration(&c.max_delay_us, o.MaxDelay, "options.max_delay_us")
	f.model(&c.model, o.Model)
	if len(o.CUDAGraphs) > 0 {
		shapes := make([]C.pagoda_graph_shape, len(o.CUDAGraphs))
		for i, from := range o.CUDAGraphs {
			shapes[i] = C.pagoda_graph_shape_init()
			shapes[i].users, shapes[i].rows = C.int32_t(from.Users), C.int32_t(from.Rows)
			shapes[i].candidates, shapes[i].pages = C.int32_t(from.Candidates), C.int32_t(from.Pages)
		}
		c.cuda_graphs, c.cuda_graph_count = list(f, shapes), C.size_t(len(shapes))
	}
	f.text(&c.table_tiers_path, o.TableTiersPath, "options.table_tiers_path")
	f.text(&c.store_path, o.StorePath, "options.store_path")
	f.store(&c.store_options, o.StoreOptions)
	return &c, f.err
}

// EngineStats is the state of an engine, and counters since it was opened.
type EngineStats struct {
	Answered        uint64 // Requests that were answered.
	Failed          uint64 // Requests that failed, for any reason.
	Batches         uint64 // Batches.
	CachedRows      uint64 // Rows of histories that were cached.
	ComputedRows    uint64 // Rows of histories that were computed.
	Waiting         uint64 // Requests in the queue.
	RememberedUsers uint64 // Users in the event log.
	RememberedBytes uint64 // Bytes of the event log.
}

// Engine is a ranking engine: an open model folder with its embedding tables and the keys and values of its users.
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
	options.Model, options.StoreOptions = copiedIfAny(options.Model), copiedIfAny(options.StoreOptions)
	options.CUDAGraphs = slices.Clone(options.CUDAGraphs)
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

// Swap replaces the model folder that is served. The new one is opened and run once while the old one still serves.
// Requests that arrived before are answered by the old model, and no request fails. On an error the old folder stays.
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

// Forget removes all data of users: their events, and their keys and values in the version that is served, also in the
// store. It returns how many users were known.
func (e *Engine) Forget(ctx context.Context, users ...uint64) (int, error) {
	return e.count(ctx, users, func(handle *C.pagoda_engine, users *C.uint64_t, count C.size_t, done *C.size_t,
		failure **C.pagoda_error) C.pagoda_status {
		return C.pagoda_engine_forget(handle, users, count, done, failure)
	})
}

// Prefetch starts to load the keys and values of users from host memory and the store into the pool, and returns at once
// with how many histories are being loaded.
func (e *Engine) Prefetch(users ...uint64) (int, error) {
	return e.count(context.Background(), users, func(handle *C.pagoda_engine, users *C.uint64_t, count C.size_t,
		done *C.size_t, failure **C.pagoda_error) C.pagoda_status {
		return C.pagoda_engine_prefetch(handle, users, count, done, failure)
	})
}

// Unload evicts the keys and values of users from the pool to host memory and the store. Without either they are lost. It
// returns how many users had any in the pool.
func (e *Engine) Unload(ctx context.Context, users ...uint64) (int, error) {
	return e.count(ctx, users, func(handle *C.pagoda_engine, users *C.uint64_t, count C.size_t, done *C.size_t,
		failure **C.pagoda_error) C.pagoda_status {
		return C.pagoda_engine_unload(handle, users, count, done, failure)
	})
}

func (e *Engine) count(ctx context.Context, users []uint64, call func(*C.pagoda_engine, *C.uint64_t, C.size_t, *C.size_t,
	**C.pagoda_error) C.pagoda_status) (int, error) {
	users = lasting(ctx, users)
	return await(ctx, func() (int, error) {
		handle, err := e.handle()
		if err != nil {
			return 0, err
		}
		defer runtime.KeepAlive(e)
		var done C.size_t
		var failure *C.pagoda_error
		err = check(call(handle, cUsers(users), C.size_t(len(users)), &done, &failure), &failure)
		return int(done), err
	}, nil)
}

// EngineProvider is where the model of an engine or a generator runs.
type EngineProvider struct {
	// Provider is [ProviderCPU] or [ProviderCUDA].
	Provider Provider
	// DeviceID is the number of the GPU; -1 on the CPU.
	DeviceID int32
	// Reason is why [ProviderAuto] chose the CPU; "" in all other cases.
	Reason string
}

// Provider is where the model that is served runs.
func (e *Engine) Provider() (EngineProvider, error) {
	handle, err := e.handle()
	if err != nil {
		return EngineProvider{}, err
	}
	defer runtime.KeepAlive(e)
	var provider C.pagoda_provider
	var device C.int32_t
	reason, err := grown(func(buffer *C.char, capacity C.size_t, length *C.size_t,
		failure **C.pagoda_error) C.pagoda_status {
		return C.pagoda_engine_provider(handle, &provider, &device, buffer, capacity, length, failure)
	})
	return EngineProvider{Provider(provider), int32(device), reason}, err
}

// Tasks is the number of tasks of the model that is served: the scores of one candidate.
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

// Info is the pagoda.json of the model that is served: its features, tasks, limits and version.
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

// Tables is the names of the embedding tables that have statistics; none if they are in the graph.
func (e *Engine) Tables() ([]string, error) {
	handle, err := e.handle()
	if err != nil {
		return nil, err
	}
	defer runtime.KeepAlive(e)
	names, err := grown(func(buffer *C.char, capacity C.size_t, length *C.size_t,
		failure **C.pagoda_error) C.pagoda_status {
		return C.pagoda_engine_tables(handle, buffer, capacity, length, failure)
	})
	if names == "" {
		return nil, err
	}
	return strings.Split(names, "\n"), err
}

// KVStats is the statistics of the cache of keys and values; Pages is 0 if nothing is cached.
func (e *Engine) KVStats() (KVStats, error) {
	handle, err := e.handle()
	if err != nil {
		return KVStats{}, err
	}
	defer runtime.KeepAlive(e)
	c := C.pagoda_kv_stats_init()
	var failure *C.pagoda_error
	err = check(C.pagoda_engine_get_kv_stats(handle, &c, &failure), &failure)
	return newKVStats(&c), err
}

// TableStats is the statistics of an embedding table, by its name in pagoda.json.
func (e *Engine) TableStats(table string) (TableStats, error) {
	handle, err := e.handle()
	if err != nil {
		return TableStats{}, err
	}
	defer runtime.KeepAlive(e)
	cTable, err := text(table, "table")
	if err != nil {
		return TableStats{}, err
	}
	c := C.pagoda_table_stats_init()
	var failure *C.pagoda_error
	err = check(C.pagoda_engine_get_table_stats(handle, cTable, &c, &failure), &failure)
	return newTableStats(&c), err
}

// Stats is the state and the counters of the engine.
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

// Close closes the engine. Queued requests are answered first, and the pool is written to the store if there is one; this
// waits for both. If another goroutine is in a call, that call does the waiting instead.
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
