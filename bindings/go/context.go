package pagoda

// #include "bridge.h"
import "C"

import (
	"context"
	"slices"
)

// stopper is a context in C's form: a pagoda_cancel that is triggered when the context is done. Its handle is nil if
// the context never is.
type stopper struct {
	handle *C.pagoda_cancel
	stop   func() bool
}

func newStopper(ctx context.Context) (stopper, error) {
	if err := done(ctx); err != nil || ctx.Done() == nil {
		return stopper{}, err
	}
	handle, err := newCancel()
	if err != nil {
		return stopper{}, err
	}
	// It may run after end() has freed the handle: then C rejects the handle, and the error is ignored.
	return stopper{handle, context.AfterFunc(ctx, func() { C.pagoda_cancel_trigger(handle, nil) })}, nil
}

// end lets go of the context. It does not wait for a trigger that is under way: that may be what has called us.
func (s stopper) end() {
	if s.handle == nil {
		return
	}
	if s.stop() {
		select {
		case idleCancels <- s.handle:
			return
		default:
		}
	}
	C.pagoda_cancel_free(s.handle)
}

// idleCancels are those that were not triggered and never will be by who had them. They are used again: a new one, and
// what ONNX Runtime makes for it at its first run, would be two fifths of what a context costs.
var idleCancels = make(chan *C.pagoda_cancel, 64)

func newCancel() (*C.pagoda_cancel, error) {
	select {
	case handle := <-idleCancels:
		return handle, nil
	default:
	}
	var handle *C.pagoda_cancel
	var failure *C.pagoda_error
	err := check(C.pagoda_cancel_new(&handle, &failure), &failure)
	return handle, err
}

// await makes a call that C can not stop. If the context is done before that, it returns, and the call goes on behind:
// it must use nothing that is the caller's. What it returns then goes to discard, if there is one.
func await[T any](ctx context.Context, call func() (T, error), discard func(T)) (T, error) {
	if err := done(ctx); err != nil {
		var none T
		return none, err
	}
	return begun(ctx, call, discard)
}

// begun is await of a call that is made in any case, be the context done or not.
func begun[T any](ctx context.Context, call func() (T, error), discard func(T)) (T, error) {
	if ctx.Done() == nil {
		return call()
	}
	type result struct {
		value T
		err   error
	}
	results := make(chan result)
	go func() {
		value, err := call()
		select {
		case results <- result{value, err}:
		case <-ctx.Done():
			if err == nil && discard != nil {
				discard(value)
			}
		}
	}()
	select {
	case r := <-results:
		return r.value, r.err
	case <-ctx.Done():
		var none T
		return none, done(ctx)
	}
}

// lasting is a list that a call may use that goes on behind: a copy, if that can happen.
func lasting[T any](ctx context.Context, list []T) []T {
	if ctx == nil || ctx.Done() == nil {
		return list
	}
	return slices.Clone(list)
}

// awaitError is await for calls that return nothing but an error.
func awaitError(ctx context.Context, call func() error) error {
	_, err := await(ctx, func() (struct{}, error) { return struct{}{}, call() }, nil)
	return err
}
