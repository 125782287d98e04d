package pagoda

// #include "bridge.h"
import "C"

import (
	"context"
	"runtime"
	"slices"
	"time"
	"unsafe"
)

// Miss is what a lookup does with keys that are not in the cache.
type Miss int32

// What a lookup does with keys that are not in the cache.
const (
	MissByHitRate Miss = C.PAGODA_MISS_BY_HIT_RATE // Below the table's hit_rate_threshold MissWait, else MissDefault.
	MissWait      Miss = C.PAGODA_MISS_WAIT        // The lookup waits for the backing tiers.
	MissDefault   Miss = C.PAGODA_MISS_DEFAULT     // They get the default vector, and are inserted in the background.
	MissWithin    Miss = C.PAGODA_MISS_WITHIN      // They are fetched, or get the default vector after a limit.
)

// LookupOptions is the options of a lookup.
type LookupOptions struct {
	// Miss is what happens to keys that are not in the cache.
	Miss Miss
	// Limit is the time limit with MissWithin, rounded up to whole microseconds.
	Limit time.Duration
}

func (o *LookupOptions) toC() (*C.pagoda_lookup_options, error) {
	c := C.pagoda_lookup_options_init()
	if o == nil {
		return &c, nil
	}
	limit, err := microseconds(o.Limit, "options.limit_us")
	c.miss, c.limit_us = C.pagoda_miss(o.Miss), limit
	return &c, err
}

// microseconds rounds up: a limit that is less than one must not become 0, which may be none at all.
func microseconds(value time.Duration, argument string) (C.uint64_t, error) {
	if value < 0 {
		return 0, fail(ErrInvalidArgument, argument, "%v is negative", value)
	}
	return (C.uint64_t(value) + 999) / 1000, nil
}

// Combiner is how the rows of a slot's keys become one vector.
type Combiner int32

// How rows become one vector.
const (
	CombinerSum   Combiner = C.PAGODA_COMBINER_SUM   // Their sum.
	CombinerMean  Combiner = C.PAGODA_COMBINER_MEAN  // Their mean.
	CombinerSqrtN Combiner = C.PAGODA_COMBINER_SQRTN // Their sum, divided by the square root of how many there are.
)

// Reach is when lookups see an update.
type Reach int32

// When lookups see an update.
const (
	ReachAtOnce    Reach = C.PAGODA_REACH_AT_ONCE    // When the call returns.
	ReachByRefresh Reach = C.PAGODA_REACH_BY_REFRESH // When the cache is refreshed next.
)

// TableStats is statistics of a table since it was opened.
type TableStats struct {
	Lookups    uint64 // Lookups.
	Keys       uint64 // Keys, the different ones of each lookup; where the cache had all of them, every key.
	Hits       uint64 // Those that the cache had.
	Defaults   uint64 // Those that got the default vector.
	Dropped    uint64 // Keys that were not inserted in the background because the queue was full.
	CachedRows uint64 // Rows in the cache.
	CacheRows  uint64 // The capacity of the cache in rows.
	Memory     uint64 // Bytes of memory of the cache and the tiers, approximately.
	// StaleSeconds is for how long at most a change that did not go through this process may not have been seen;
	// negative if it may not be seen at all.
	StaleSeconds int64
}

func newTableStats(c *C.pagoda_table_stats) TableStats {
	return TableStats{
		Lookups:      uint64(c.lookups),
		Keys:         uint64(c.keys),
		Hits:         uint64(c.hits),
		Defaults:     uint64(c.defaults),
		Dropped:      uint64(c.dropped),
		CachedRows:   uint64(c.cached_rows),
		CacheRows:    uint64(c.cache_rows),
		Memory:       uint64(c.memory),
		StaleSeconds: int64(c.stale_seconds),
	}
}

// Rows is what a lookup found: a vector for each key or slot, one after the other.
type EmbeddingRows struct {
	// Dim is how many numbers a vector has.
	Dim int
	// Numbers is the vectors.
	Numbers []float32
	// Found is for each key whether it has a row; those without got the table's default vector.
	Found []bool
}

// Row is the vector of one key or slot.
func (r *EmbeddingRows) Row(index int) []float32 { return r.Numbers[index*r.Dim : (index+1)*r.Dim] }

// Embeddings is embedding tables of any number of models. Each has a cache over backing tiers: host memory, a Redis
// Cluster, disk. A table is named model/table, or table if that is unique.
type Embeddings struct{ object *object }

var embeddingKind = &kind{"table set", func(token uintptr) C.pagoda_status {
	return C.pagoda_embeddings_free(embeddingHandle(token))
}}

func embeddingHandle(token uintptr) *C.pagoda_embeddings {
	return *(**C.pagoda_embeddings)(unsafe.Pointer(&token))
}

// OpenEmbeddings opens the tables of a configuration file, HugeCTR's ps.json or one with Pagoda's own words.
func OpenEmbeddings(ctx context.Context, path string) (*Embeddings, error) {
	if err := loaded(); err != nil {
		return nil, err
	}
	cPath, err := text(path, "path")
	if err != nil {
		return nil, err
	}
	made := callers()
	return await(ctx, func() (*Embeddings, error) {
		var handle *C.pagoda_embeddings
		var failure *C.pagoda_error
		if err := check(C.pagoda_embeddings_open(cPath, &handle, &failure), &failure); err != nil {
			return nil, err
		}
		e := new(Embeddings)
		e.object = own(e, embeddingKind, *(*uintptr)(unsafe.Pointer(&handle)), made)
		return e, nil
	}, func(e *Embeddings) { e.Close() })
}

// EmbeddingEstimate is what tables will take, approximately.
type EmbeddingEstimate struct {
	Memory uint64 // Bytes of memory in this process.
	Disk   uint64 // Bytes of their files.
}

// EstimateEmbeddings estimates what the tables of a configuration file will take.
func EstimateEmbeddings(path string) (EmbeddingEstimate, error) {
	if err := loaded(); err != nil {
		return EmbeddingEstimate{}, err
	}
	cPath, err := text(path, "path")
	if err != nil {
		return EmbeddingEstimate{}, err
	}
	var memory, disk C.uint64_t
	var failure *C.pagoda_error
	err = check(C.pagoda_embeddings_estimate(cPath, &memory, &disk, &failure), &failure)
	return EmbeddingEstimate{uint64(memory), uint64(disk)}, err
}

// Add adds a model while others serve. model is JSON, an element of the configuration's models; relative paths in it
// are relative to folder, or to the working directory if that is "".
func (e *Embeddings) Add(ctx context.Context, model, folder string) error {
	cModel, err := text(model, "model")
	if err != nil {
		return err
	}
	var cFolder *C.char
	if folder != "" {
		if cFolder, err = text(folder, "folder"); err != nil {
			return err
		}
	}
	return awaitError(ctx, func() error {
		return e.call(func(handle *C.pagoda_embeddings, failure **C.pagoda_error) C.pagoda_status {
			return C.pagoda_embeddings_add(handle, cModel, cFolder, failure)
		})
	})
}

// Retire takes a model out of service. Its tables go when no other model has them; lookups that are under way end well.
func (e *Embeddings) Retire(model string) error {
	cModel, err := text(model, "model")
	if err != nil {
		return err
	}
	return e.call(func(handle *C.pagoda_embeddings, failure **C.pagoda_error) C.pagoda_status {
		return C.pagoda_embeddings_retire(handle, cModel, failure)
	})
}

// Dim is how many numbers a row of a table has.
func (e *Embeddings) Dim(table string) (int, error) {
	cTable, err := text(table, "table")
	if err != nil {
		return 0, err
	}
	var dim C.size_t
	err = e.call(func(handle *C.pagoda_embeddings, failure **C.pagoda_error) C.pagoda_status {
		return C.pagoda_embeddings_dim(handle, cTable, &dim, failure)
	})
	return int(dim), err
}

// Lookup looks keys up, any number of times each; nil options are the defaults. A tier that does not answer is no
// error: its keys get the default vector.
func (e *Embeddings) Lookup(ctx context.Context, table string, keys []int64, options *LookupOptions) (*EmbeddingRows, error) {
	return e.rows(ctx, table, keys, len(keys), options, func(handle *C.pagoda_embeddings, table *C.char, keys []int64,
		options *C.pagoda_lookup_options, rows *EmbeddingRows, failure **C.pagoda_error) C.pagoda_status {
		return C.pagoda_embeddings_lookup(handle, table, cKeys(keys), C.size_t(len(keys)), options,
			cNumbers(rows.Numbers), C.size_t(len(rows.Numbers)), cFound(rows.Found), failure)
	})
}

// Pool looks keys up and combines them: slot i gets one vector of the keys from offsets[i] on to before offsets[i+1],
// or zeros if there are none. The offsets begin with 0, do not go down, and end with how many keys there are.
func (e *Embeddings) Pool(ctx context.Context, table string, keys, offsets []int64, combiner Combiner,
	options *LookupOptions) (*EmbeddingRows, error) {
	offsets = lasting(ctx, offsets)
	return e.rows(ctx, table, keys, max(len(offsets)-1, 0), options, func(handle *C.pagoda_embeddings, table *C.char,
		keys []int64, options *C.pagoda_lookup_options, rows *EmbeddingRows, failure **C.pagoda_error) C.pagoda_status {
		return C.pagoda_embeddings_pool(handle, table, cKeys(keys), C.size_t(len(keys)), cKeys(offsets),
			C.size_t(len(offsets)), C.pagoda_combiner(combiner), options, cNumbers(rows.Numbers),
			C.size_t(len(rows.Numbers)), cFound(rows.Found), failure)
	})
}

// rows makes room for so many vectors and has them filled.
func (e *Embeddings) rows(ctx context.Context, table string, keys []int64, vectors int, options *LookupOptions,
	fill func(*C.pagoda_embeddings, *C.char, []int64, *C.pagoda_lookup_options, *EmbeddingRows, **C.pagoda_error) C.pagoda_status,
) (*EmbeddingRows, error) {
	cTable, err := text(table, "table")
	if err != nil {
		return nil, err
	}
	cOptions, err := options.toC()
	if err != nil {
		return nil, err
	}
	look := func(keys []int64) (*EmbeddingRows, error) {
		dim, err := e.Dim(table)
		if err != nil {
			return nil, err
		}
		rows := &EmbeddingRows{dim, make([]float32, vectors*dim), make([]bool, len(keys))}
		err = e.call(func(handle *C.pagoda_embeddings, failure **C.pagoda_error) C.pagoda_status {
			return fill(handle, cTable, keys, cOptions, rows, failure)
		})
		if err != nil {
			return nil, err
		}
		return rows, nil
	}
	// What waits for nothing need not be left behind.
	if err := done(ctx); err == nil && (ctx.Done() == nil || options != nil && options.Miss == MissDefault) {
		return look(keys)
	}
	keys = slices.Clone(keys)
	return await(ctx, func() (*EmbeddingRows, error) { return look(keys) }, nil)
}

// Upsert replaces rows or adds them, in all tiers and in the cache. numbers has a row for each key; of a key that
// comes twice the last one counts. A row that has a higher version already stays; rows that the table was loaded with
// have version 0.
func (e *Embeddings) Upsert(ctx context.Context, table string, version uint64, keys []int64, numbers []float32,
	reach Reach) error {
	cTable, err := text(table, "table")
	if err != nil {
		return err
	}
	keys, numbers = lasting(ctx, keys), lasting(ctx, numbers)
	return awaitError(ctx, func() error {
		return e.call(func(handle *C.pagoda_embeddings, failure **C.pagoda_error) C.pagoda_status {
			return C.pagoda_embeddings_upsert(handle, cTable, C.uint64_t(version), cKeys(keys), C.size_t(len(keys)),
				cNumbers(numbers), C.size_t(len(numbers)), C.pagoda_reach(reach), failure)
		})
	})
}

// Delete deletes rows, in all tiers and from the cache: from now on their keys get the default vector. A row that has
// a higher version stays.
func (e *Embeddings) Delete(ctx context.Context, table string, version uint64, keys []int64, reach Reach) error {
	cTable, err := text(table, "table")
	if err != nil {
		return err
	}
	keys = lasting(ctx, keys)
	return awaitError(ctx, func() error {
		return e.call(func(handle *C.pagoda_embeddings, failure **C.pagoda_error) C.pagoda_status {
			return C.pagoda_embeddings_delete(handle, cTable, C.uint64_t(version), cKeys(keys), C.size_t(len(keys)),
				C.pagoda_reach(reach), failure)
		})
	})
}

// Prefetch begins to bring keys that are expected soon into the cache and returns at once, with how many were not there
// and found room in the queue.
func (e *Embeddings) Prefetch(table string, keys []int64) (int, error) {
	cTable, err := text(table, "table")
	if err != nil {
		return 0, err
	}
	var queued C.size_t
	err = e.call(func(handle *C.pagoda_embeddings, failure **C.pagoda_error) C.pagoda_status {
		return C.pagoda_embeddings_prefetch(handle, cTable, cKeys(keys), C.size_t(len(keys)), &queued, failure)
	})
	return int(queued), err
}

// Refresh reloads all rows in the cache of a table from the backing tiers.
func (e *Embeddings) Refresh(ctx context.Context, table string) error {
	cTable, err := text(table, "table")
	if err != nil {
		return err
	}
	return awaitError(ctx, func() error {
		return e.call(func(handle *C.pagoda_embeddings, failure **C.pagoda_error) C.pagoda_status {
			return C.pagoda_embeddings_refresh(handle, cTable, failure)
		})
	})
}

// Wait waits until everything that was to be fetched or loaded in the background is.
func (e *Embeddings) Wait(ctx context.Context) error {
	return awaitError(ctx, func() error {
		return e.call(func(handle *C.pagoda_embeddings, failure **C.pagoda_error) C.pagoda_status {
			return C.pagoda_embeddings_wait(handle, failure)
		})
	})
}

// Stats is the statistics of a table.
func (e *Embeddings) Stats(table string) (TableStats, error) {
	cTable, err := text(table, "table")
	if err != nil {
		return TableStats{}, err
	}
	c := C.pagoda_table_stats_init()
	if err := e.call(func(handle *C.pagoda_embeddings, failure **C.pagoda_error) C.pagoda_status {
		return C.pagoda_embeddings_get_stats(handle, cTable, &c, failure)
	}); err != nil {
		return TableStats{}, err
	}
	return newTableStats(&c), nil
}

// Close closes the tables. A model that uses some of them keeps those open.
func (e *Embeddings) Close() error { return e.it().close() }

func (e *Embeddings) it() *object {
	if e == nil {
		return nil
	}
	return e.object
}

func (e *Embeddings) handle(argument string) (*C.pagoda_embeddings, error) {
	token, err := e.it().get(argument)
	return embeddingHandle(token), err
}

func (e *Embeddings) call(call func(*C.pagoda_embeddings, **C.pagoda_error) C.pagoda_status) error {
	handle, err := e.handle("embedding")
	if err != nil {
		return err
	}
	defer runtime.KeepAlive(e)
	var failure *C.pagoda_error
	return check(call(handle, &failure), &failure)
}

func cKeys(keys []int64) *C.int64_t { return (*C.int64_t)(first(keys)) }

func cNumbers(numbers []float32) *C.float { return (*C.float)(first(numbers)) }

// cFound is for C to write: a Go bool is a byte, 0 or 1, and those are what C writes.
func cFound(found []bool) *C.uint8_t { return (*C.uint8_t)(unsafe.Pointer(first(found))) }
