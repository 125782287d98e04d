package pagoda

// #include "bridge.h"
import "C"

import (
	"context"
	"runtime"
	"unsafe"
)

// Durability is when a write to a store counts as done.
type Durability int32

// When a write counts as done.
const (
	DurabilityPower   Durability = C.PAGODA_DURABILITY_POWER   // When it survives a loss of power.
	DurabilityProcess Durability = C.PAGODA_DURABILITY_PROCESS // When it survives the end of the process.
	DurabilityNone    Durability = C.PAGODA_DURABILITY_NONE    // At once: what is queued is lost with the process.
)

// StoreOptions is how a store behaves.
type StoreOptions struct {
	// Durability is when a write counts as done.
	Durability Durability
	// MaxBytes is how much the files may take before the owners that were not used for longest leave; 0: no limit.
	MaxBytes uint64
	// SegmentBytes is how long a file gets; 0: 256 MiB, or an eighth of MaxBytes if that is less.
	SegmentBytes uint64
	// QueueBytes is how much may wait to be written before a write has to wait or is refused; 0: 256 MiB.
	QueueBytes uint64
	// GarbageBytes is how much removed and replaced data the files may have before they are compacted; 0: 64 MiB.
	GarbageBytes uint64
}

func (o *StoreOptions) toC() *C.pagoda_store_options {
	c := C.pagoda_store_options_init()
	c.durability = C.pagoda_durability(o.Durability)
	c.max_bytes = C.uint64_t(o.MaxBytes)
	c.segment_bytes = C.uint64_t(o.SegmentBytes)
	c.queue_bytes = C.uint64_t(o.QueueBytes)
	c.garbage_bytes = C.uint64_t(o.GarbageBytes)
	return &c
}

// StoreStats is what a store has now, and what happened since it was opened.
type StoreStats struct {
	Owners            uint64 // Owners stored, of all models.
	Records           uint64 // Pieces of their histories.
	LiveBytes         uint64 // Bytes of the files that are in use.
	FileBytes         uint64 // Bytes of all files.
	Segments          uint64 // Files.
	QueuedBytes       uint64 // Bytes that wait to be written.
	Writes            uint64 // Records written, removals too.
	WrittenBytes      uint64 // Bytes written, those of compactions too.
	WriteErrors       uint64 // Times the disk failed to write.
	CorruptRecords    uint64 // Records whose data was damaged.
	TornTails         uint64 // Unfinished writes found when the store was opened.
	DamagedRegions    uint64 // Places in files where records should have been and were not.
	DroppedOwners     uint64 // Owners that left because damage made it uncertain what is current.
	IndexRebuilds     uint64 // 1 if the index had to be made anew when the store was opened.
	IndexErrors       uint64 // Times the index failed; it is not used again until the store is opened anew.
	EvictedOwners     uint64 // Owners that left to make room.
	CompactedSegments uint64 // Files compacted.
}

// Store is histories in the files of a folder, which survive restarts and crashes. One process at a time has a store
// open.
type Store struct{ object *object }

var storeKind = &kind{"store", func(token uintptr) C.pagoda_status {
	return C.pagoda_store_free(storeHandle(token))
}}

func storeHandle(token uintptr) *C.pagoda_store { return *(**C.pagoda_store)(unsafe.Pointer(&token)) }

// OpenStore opens the store in a folder, or makes one there if the folder is empty or missing.
func OpenStore(ctx context.Context, path string, options *StoreOptions) (*Store, error) {
	if err := loaded(); err != nil {
		return nil, err
	}
	cPath, err := text(path, "path")
	if err != nil {
		return nil, err
	}
	cOptions, made := copied(options).toC(), callers()
	return await(ctx, func() (*Store, error) {
		var handle *C.pagoda_store
		var failure *C.pagoda_error
		if err := check(C.pagoda_store_open(cPath, cOptions, &handle, &failure), &failure); err != nil {
			return nil, err
		}
		s := new(Store)
		s.object = own(s, storeKind, *(*uintptr)(unsafe.Pointer(&handle)), made)
		return s, nil
	}, func(s *Store) { s.Close() })
}

// Flush waits until everything that was handed to the store is as durable as it promises.
func (s *Store) Flush(ctx context.Context) error {
	return awaitError(ctx, func() error {
		handle, err := s.handle("store")
		if err != nil {
			return err
		}
		defer runtime.KeepAlive(s)
		var failure *C.pagoda_error
		return check(C.pagoda_store_flush(handle, &failure), &failure)
	})
}

// Compact gives back the space of everything that was removed or replaced. A store does so by itself when there is much
// of it.
func (s *Store) Compact(ctx context.Context) error {
	return awaitError(ctx, func() error {
		handle, err := s.handle("store")
		if err != nil {
			return err
		}
		defer runtime.KeepAlive(s)
		var failure *C.pagoda_error
		return check(C.pagoda_store_compact(handle, &failure), &failure)
	})
}

// Stats is what the store has now, and what happened since it was opened.
func (s *Store) Stats() (StoreStats, error) {
	handle, err := s.handle("store")
	if err != nil {
		return StoreStats{}, err
	}
	defer runtime.KeepAlive(s)
	c := C.pagoda_store_stats_init()
	var failure *C.pagoda_error
	if err := check(C.pagoda_store_get_stats(handle, &c, &failure), &failure); err != nil {
		return StoreStats{}, err
	}
	return StoreStats{
		Owners:            uint64(c.owners),
		Records:           uint64(c.records),
		LiveBytes:         uint64(c.live_bytes),
		FileBytes:         uint64(c.file_bytes),
		Segments:          uint64(c.segments),
		QueuedBytes:       uint64(c.queued_bytes),
		Writes:            uint64(c.writes),
		WrittenBytes:      uint64(c.written_bytes),
		WriteErrors:       uint64(c.write_errors),
		CorruptRecords:    uint64(c.corrupt_records),
		TornTails:         uint64(c.torn_tails),
		DamagedRegions:    uint64(c.damaged_regions),
		DroppedOwners:     uint64(c.dropped_owners),
		IndexRebuilds:     uint64(c.index_rebuilds),
		IndexErrors:       uint64(c.index_errors),
		EvictedOwners:     uint64(c.evicted_owners),
		CompactedSegments: uint64(c.compacted_segments),
	}, nil
}

// Close lets go of the store. Once no cache uses it any more, everything that is queued is written, and it is closed.
func (s *Store) Close() error { return s.it().close() }

func (s *Store) it() *object {
	if s == nil {
		return nil
	}
	return s.object
}

func (s *Store) handle(argument string) (*C.pagoda_store, error) {
	token, err := s.it().get(argument)
	return storeHandle(token), err
}
