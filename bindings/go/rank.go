package pagoda

// #include "bridge.h"
import "C"

import (
	"context"
	"runtime"
	"runtime/cgo"
	"slices"
	"time"
	"unsafe"
)

// Columns is keys by feature: as many for one as for another, -1 for none.
type Columns map[string][]int64

// RankRequest is a request: score candidates for a user. Features go by their names in pagoda.json.
type RankRequest struct {
	// User is the user.
	User uint64
	// Start is which event of the user's history is the first of those sent: 0 if they are the whole history, and then
	// the engine works out what of it is new; else how many events came before, which are not sent again.
	Start int64
	// Events is the keys of each feature of events, the earliest event first. There may be none.
	Events Columns
	// Times is when each event was, in seconds; may be nil if the model has no times.
	Times []int64
	// UserKeys is the key of each user feature. It may be left out where Start is beyond 0: then they are what they
	// were.
	UserKeys map[string]int64
	// Candidates is the keys of each item feature.
	Candidates Columns
	// Time is the time of the request; zero: now.
	Time time.Time
	// Timeout is how long it may take, rounded up to whole microseconds; 0: as long as it does. After that it ends
	// with [ErrCancelled]. A context with a deadline does the same.
	Timeout time.Duration
}

// RankResponse is the answer to a request.
type RankResponse struct {
	// Tasks is how many scores a candidate has.
	Tasks int
	// Scores is those of the first candidate, in the order of the tasks, then those of the next.
	Scores []float32
	// BatchedWith is how many other requests ran in the same batch.
	BatchedWith int
	// CachedRows of the history were cached, ComputedRows were computed.
	CachedRows, ComputedRows uint64
	// Queued is how long it waited until its batch was put together, Ran how long ONNX Runtime ran.
	Queued, Ran time.Duration
}

// Candidate is the scores of one candidate, in the order of the tasks.
func (r *RankResponse) Candidate(index int) []float32 { return r.Scores[index*r.Tasks : (index+1)*r.Tasks] }

func newRankResponse(candidates C.size_t, scores []float32, c *C.pagoda_rank_response) *RankResponse {
	return &RankResponse{
		Tasks:        len(scores) / max(int(candidates), 1),
		Scores:       scores,
		BatchedWith:  int(c.batched_with),
		CachedRows:   uint64(c.cached_rows),
		ComputedRows: uint64(c.computed_rows),
		Queued:       time.Duration(c.queue_ns),
		Ran:          time.Duration(c.run_ns),
	}
}

// Rank scores candidates and waits for it. Requests that come at the same time may run together.
//
// When ctx is done, it returns at once. A context that can be done costs a little: the request runs on a thread of the
// engine then, so that it can be left.
//
// [ErrNotFound] about "request.start" is a gap: events before Start are not known here, so send the whole history.
// [ErrInvalidArgument] about "score_count": meanwhile the engine was swapped to a model with another number of tasks,
// so ask again.
func (e *Engine) Rank(ctx context.Context, request *RankRequest) (*RankResponse, error) {
	var l lent
	defer l.Unpin()
	handle, c, stopper, err := e.prepare(ctx, request, &l)
	if err != nil {
		return nil, err
	}
	defer stopper.end()
	defer runtime.KeepAlive(e)
	tasks, err := e.Tasks()
	if err != nil {
		return nil, err
	}
	scores := make([]float32, int(c.candidate_count)*tasks)
	response := C.pagoda_rank_response_init()
	var failure *C.pagoda_error
	err = check(C.pagoda_engine_rank(handle, c, cNumbers(scores), C.size_t(len(scores)), &response, &failure), &failure)
	if err != nil {
		return nil, blame(ctx, err)
	}
	return newRankResponse(c.candidate_count, scores, &response), nil
}

// RankResult is how an asynchronous request ended.
type RankResult struct {
	// RankResponse is the answer.
	RankResponse *RankResponse
	// Err says why there is none.
	Err error
}

// RankAsync has candidates scored on a thread of Pagoda's and returns at once; the result comes through the channel.
// What is wrong with the request itself is said at once. Everything that was passed may be reused as soon as this
// returns. It is fine never to read the channel.
func (e *Engine) RankAsync(ctx context.Context, request *RankRequest) (<-chan RankResult, error) {
	var l lent
	defer l.Unpin()
	handle, c, stopper, err := e.prepare(ctx, request, &l)
	if err != nil {
		return nil, err
	}
	defer runtime.KeepAlive(e)
	// Room for the result, so that the thread of Pagoda's need not wait for anyone.
	rank := &asyncRank{ctx, stopper, c.candidate_count, make(chan RankResult, 1)}
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
	ctx        context.Context
	stopper    stopper
	candidates C.size_t
	result     chan RankResult
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
		rank.result <- RankResult{RankResponse: newRankResponse(rank.candidates, copied, response)}
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
	if len(r.Times) > 0 {
		if len(r.Times) != int(c.event_count) {
			return nil, fail(ErrInvalidArgument, "request.event_times", "there are %d, and %d events: give one for each",
				len(r.Times), c.event_count)
		}
		l.Pin(&r.Times[0])
		c.event_times = cKeys(r.Times)
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
