package pagoda

// #include "bridge.h"
import "C"

import (
	"context"
	"errors"
	"runtime"
	"runtime/cgo"
	"slices"
	"time"
	"unsafe"
)

// Columns is keys by feature. All features have the same number of keys; -1 stands for no key.
type Columns map[string][]int64

// RankRequest is a request: score candidates for a user. Features are named as in pagoda.json.
type RankRequest struct {
	// User is the user.
	User uint64
	// Start is the position of the first sent event in the history of the user. 0: the events are the whole history, and
	// the engine finds out which of them are new.
	Start int64
	// Events is the keys of each feature of events, the earliest event first. There may be none.
	Events Columns
	// EventTimes is the time of each event, in seconds; may be nil if the model has no times.
	EventTimes []int64
	// UserKeys is the key of each user feature. It may be nil if Start is greater than 0: then they are those of earlier
	// requests.
	UserKeys map[string]int64
	// Candidates is the keys of each item feature.
	Candidates Columns
	// Time is the time of the request; zero: now.
	Time time.Time
	// Timeout is the time limit, rounded up to whole microseconds; 0: none. A request that exceeds it ends with
	// [ErrCancelled]. A context with a deadline does the same.
	Timeout time.Duration
}

// RankResponse is the answer to a request.
type RankResponse struct {
	// Tasks is the number of scores of a candidate.
	Tasks int
	// Version is the version of the model that answered.
	Version string
	// Scores is those of the first candidate, in the order of the tasks, then those of the next.
	Scores []float32
	// BatchedWith is the number of other requests in the same batch.
	BatchedWith int
	// CachedRows of the history were cached, ComputedRows were computed.
	CachedRows, ComputedRows uint64
	// QueueTime is the time in the queue until the batch was formed, RunTime the time that ONNX Runtime ran.
	QueueTime, RunTime time.Duration
}

// Candidate is the scores of one candidate, in the order of the tasks.
func (r *RankResponse) Candidate(index int) []float32 {
	return r.Scores[index*r.Tasks : (index+1)*r.Tasks]
}

func newRankResponse(scores []float32, c *C.pagoda_rank_response) *RankResponse {
	return &RankResponse{
		Tasks:        int(c.tasks),
		Version:      C.GoString(c.version),
		Scores:       scores,
		BatchedWith:  int(c.batched_with),
		CachedRows:   uint64(c.cached_rows),
		ComputedRows: uint64(c.computed_rows),
		QueueTime:    time.Duration(c.queue_ns),
		RunTime:      time.Duration(c.run_ns),
	}
}

// Rank scores candidates, and waits for the result. Concurrent requests may run in one batch. If a swap changes the
// number of tasks meanwhile, the new model answers.
//
// When ctx is done, it returns at once. A context that can be done has a small cost: the request then runs on a thread of
// the engine.
//
// [ErrNotFound] about "request.start" is a gap: events before Start are missing here, so send the whole history.
func (e *Engine) Rank(ctx context.Context, request *RankRequest) (*RankResponse, error) {
	return e.rank(ctx, request, e.Tasks)
}

// rank is Rank with another way to ask for the number of tasks.
func (e *Engine) rank(ctx context.Context, request *RankRequest, tasksOf func() (int, error)) (*RankResponse, error) {
	var l lent
	defer l.Unpin()
	handle, c, stopper, err := e.prepare(ctx, request, &l)
	if err != nil {
		return nil, err
	}
	defer stopper.end()
	defer runtime.KeepAlive(e)
	for {
		tasks, err := tasksOf()
		if err != nil {
			return nil, err
		}
		scores := make([]float32, int(c.candidate_count)*tasks)
		response := C.pagoda_rank_response_init()
		var failure *C.pagoda_error
		err = check(C.pagoda_engine_rank(handle, c, cNumbers(scores), C.size_t(len(scores)), &response, &failure),
			&failure)
		if err == nil {
			return newRankResponse(scores, &response), nil
		}
		// A swap has changed the number of tasks since it was read.
		var failed *Error
		if !errors.As(err, &failed) || failed.Argument != "score_count" {
			return nil, blame(ctx, err)
		}
	}
}

// RankResult is how an asynchronous request ended.
type RankResult struct {
	// Response is the answer.
	Response *RankResponse
	// Err says why there is none.
	Err error
}

// RankAsync starts to score candidates on a thread of Pagoda, and returns at once; the result comes through the channel.
// An error in the request itself is returned at once. When this returns, the arguments may be reused. The channel need not
// be read.
func (e *Engine) RankAsync(ctx context.Context, request *RankRequest) (<-chan RankResult, error) {
	var l lent
	defer l.Unpin()
	handle, c, stopper, err := e.prepare(ctx, request, &l)
	if err != nil {
		return nil, err
	}
	defer runtime.KeepAlive(e)
	// Room for the result, so that the thread of Pagoda does not wait for a reader.
	rank := &asyncRank{ctx, stopper, make(chan RankResult, 1)}
	held := cgo.NewHandle(rank)
	var failure *C.pagoda_error
	if err := check(C.pagoda_go_engine_rank_async(handle, c, C.uintptr_t(held), &failure), &failure); err != nil {
		held.Delete()
		stopper.end()
		return nil, blame(ctx, err)
	}
	return rank.result, nil
}

// asyncRank is what is kept until a request has ended.
type asyncRank struct {
	ctx     context.Context
	stopper stopper
	result  chan RankResult
}

//export pagodaGoRanked
func pagodaGoRanked(held C.uintptr_t, status C.pagoda_status, scores *C.float, count C.size_t,
	response *C.pagoda_rank_response, failure *C.pagoda_error) {
	rank := cgo.Handle(held).Value().(*asyncRank)
	cgo.Handle(held).Delete()
	rank.stopper.end()
	if status != C.PAGODA_STATUS_OK {
		rank.result <- RankResult{Err: blame(rank.ctx, toError(status, failure))}
	} else {
		copied := slices.Clone(unsafe.Slice((*float32)(scores), count))
		rank.result <- RankResult{Response: newRankResponse(copied, response)}
	}
	close(rank.result)
}

// prepare is what both ways of ranking begin with. What it makes must be unpinned and ended, unless there is an error.
func (e *Engine) prepare(ctx context.Context, request *RankRequest, l *lent) (*C.pagoda_engine, *C.pagoda_rank_request,
	stopper, error) {
	handle, err := e.handle()
	if err != nil {
		return nil, nil, stopper{}, err
	}
	if request == nil {
		return nil, nil, stopper{}, fail(ErrInvalidArgument, "request", "nil, where a request is needed")
	}
	c, err := request.toC(l)
	if err != nil {
		return nil, nil, stopper{}, err
	}
	stopper, err := newStopper(ctx)
	c.cancel = stopper.handle
	return handle, c, stopper, err
}

func (r *RankRequest) toC(l *lent) (*C.pagoda_rank_request, error) {
	c := C.pagoda_rank_request_init()
	c.user, c.start = C.uint64_t(r.User), C.int64_t(r.Start)
	var err error
	if c.event_count, c.event_features, c.event_keys, err = r.Events.toC(l, "request.event_keys"); err != nil {
		return nil, err
	}
	c.event_feature_count = C.size_t(len(r.Events))
	if len(r.EventTimes) > 0 {
		if len(r.EventTimes) != int(c.event_count) {
			return nil, fail(ErrInvalidArgument, "request.event_times", "there are %d, and %d events: give one for each",
				len(r.EventTimes), c.event_count)
		}
		l.Pin(&r.EventTimes[0])
		c.event_times = cKeys(r.EventTimes)
	}
	if c.user_features, c.user_keys, err = userKeys(l, r.UserKeys); err != nil {
		return nil, err
	}
	c.user_feature_count = C.size_t(len(r.UserKeys))
	c.candidate_count, c.candidate_features, c.candidate_keys, err = r.Candidates.toC(l, "request.candidate_keys")
	if err != nil {
		return nil, err
	}
	c.candidate_feature_count = C.size_t(len(r.Candidates))
	if !r.Time.IsZero() {
		c.has_time, c.time = 1, C.int64_t(r.Time.Unix())
	}
	c.timeout_us, err = microseconds(r.Timeout, "request.timeout_us")
	return &c, err
}

// toC is how many keys each column has, the names, and where the keys lie.
func (columns Columns) toC(l *lent, argument string) (C.size_t, **C.char, **C.int64_t, error) {
	if len(columns) == 0 {
		return 0, nil, nil, nil
	}
	names, keys := make([]string, 0, len(columns)), make([]*C.int64_t, 0, len(columns))
	count := -1
	for name, column := range columns {
		if count < 0 {
			count = len(column)
		}
		if len(column) != count {
			return 0, nil, nil, fail(ErrInvalidArgument, argument, "%q has %d keys and %q has %d: give each as many", names[0],
				count, name, len(column))
		}
		pointer := cKeys(column)
		l.Pin(pointer)
		names, keys = append(names, name), append(keys, pointer)
	}
	l.Pin(&keys[0])
	cNames, err := l.texts(names, argument)
	return C.size_t(count), first(cNames), &keys[0], err
}

func userKeys(l *lent, of map[string]int64) (**C.char, *C.int64_t, error) {
	if len(of) == 0 {
		return nil, nil, nil
	}
	names, keys := make([]string, 0, len(of)), make([]int64, 0, len(of))
	for name, key := range of {
		names, keys = append(names, name), append(keys, key)
	}
	l.Pin(&keys[0])
	cNames, err := l.texts(names, "request.user_features")
	return first(cNames), cKeys(keys), err
}
