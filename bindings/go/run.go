package pagoda

// #include "bridge.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"runtime/cgo"
	"strings"
	"sync"
	"unsafe"
)

// Tensors is the inputs or outputs of a run, by their names.
type Tensors map[string]*Tensor

// Run runs the model and waits for it. Every input must be there. It returns a new tensor for each output that is asked
// for, in that order. Any number of goroutines may run one model at the same time.
//
// When ctx is done, the run stops before its graph's next node; one that is at its last node may still end well.
func (m *Model) Run(ctx context.Context, inputs Tensors, outputs ...string) ([]*Tensor, error) {
	return m.RunInto(ctx, inputs, nil, outputs...)
}

// RunInto is [Model.Run] with some outputs, or all, written into tensors that are there. One memory may be an input and
// an output at once if the model's operators allow that, as pools of keys and values do. A run that fails half-way or
// is stopped may have written to such tensors.
func (m *Model) RunInto(ctx context.Context, inputs, into Tensors, outputs ...string) ([]*Tensor, error) {
	handle, err := m.handle()
	if err != nil {
		return nil, err
	}
	lists := listsPool.Get().(*lists)
	defer listsPool.Put(lists)
	if err := lists.fill(inputs, into, outputs); err != nil {
		return nil, err
	}
	stopper, err := newStopper(ctx)
	if err != nil {
		return nil, err
	}
	defer stopper.end()
	err = lists.run(handle, stopper, 0)
	runtime.KeepAlive(m)
	runtime.KeepAlive(inputs)
	runtime.KeepAlive(into)
	if err != nil {
		return nil, blame(ctx, err)
	}
	return newTensors(lists.outputs[len(into):], callers()), nil
}

// RunResult is how an asynchronous run ended.
type RunResult struct {
	// Outputs is a new tensor for each output that was asked for.
	Outputs []*Tensor
	// Err says why there are none.
	Err error
}

// RunAsync has the model run on a thread of Pagoda's and returns at once; the result comes through the channel.
// Arguments are as for [Model.RunInto]; what is wrong with them is said at once. The objects may be closed as soon as
// this returns; the memory of the tensors must be left alone until the result is there. It is fine never to read the
// channel.
func (m *Model) RunAsync(ctx context.Context, inputs, into Tensors, outputs ...string) (<-chan RunResult, error) {
	handle, err := m.handle()
	if err != nil {
		return nil, err
	}
	lists := listsPool.Get().(*lists)
	defer listsPool.Put(lists)
	if err := lists.fill(inputs, into, outputs); err != nil {
		return nil, err
	}
	stopper, err := newStopper(ctx)
	if err != nil {
		return nil, err
	}
	// Room for the result, so that the thread of Pagoda does not wait for a reader.
	run := &asyncRun{ctx, stopper, len(into), callers(), make(chan RunResult, 1)}
	held := cgo.NewHandle(run)
	err = lists.run(handle, stopper, held)
	runtime.KeepAlive(m)
	runtime.KeepAlive(inputs)
	runtime.KeepAlive(into)
	if err != nil {
		held.Delete()
		stopper.end()
		return nil, blame(ctx, err)
	}
	return run.result, nil
}

// asyncRun is what is kept until a run is done.
type asyncRun struct {
	ctx     context.Context
	stopper stopper
	into    int
	made    []uintptr
	result  chan RunResult
}

//export pagodaGoRan
func pagodaGoRan(held C.uintptr_t, status C.pagoda_status, outputs **C.pagoda_tensor, count C.size_t,
	failure *C.pagoda_error) {
	run := cgo.Handle(held).Value().(*asyncRun)
	cgo.Handle(held).Delete()
	run.stopper.end()
	if status != C.PAGODA_STATUS_OK {
		run.result <- RunResult{Err: blame(run.ctx, toError(status, failure))}
	} else {
		run.result <- RunResult{Outputs: newTensors(unsafe.Slice(outputs, count)[run.into:], run.made)}
	}
	close(run.result)
}

func newTensors(handles []*C.pagoda_tensor, made []uintptr) []*Tensor {
	tensors := make([]*Tensor, len(handles))
	for i, handle := range handles {
		tensors[i] = newTensor(handle, made)
	}
	return tensors
}

// lists is the inputs and outputs of a run in C's form. Outputs that are there come first, then those to be made.
type lists struct {
	names           []byte // of inputs, then of outputs, each with a NUL
	inputs, outputs []*C.pagoda_tensor
	failure         *C.pagoda_error
}

// Lists are used again, for a run may be so short that making them would show.
var listsPool = sync.Pool{New: func() any { return new(lists) }}

func (l *lists) fill(inputs, into Tensors, outputs []string) error {
	l.names, l.inputs, l.outputs = l.names[:0], l.inputs[:0], l.outputs[:0]
	for name, tensor := range inputs {
		handle, err := tensor.handleOf("inputs", name)
		if err != nil {
			return err
		}
		if l.inputs = append(l.inputs, handle); !l.name(name) {
			return noNUL(name, "inputs")
		}
	}
	for name, tensor := range into {
		handle, err := tensor.handleOf("outputs", name)
		if err != nil {
			return err
		}
		if l.outputs = append(l.outputs, handle); !l.name(name) {
			return noNUL(name, "outputs")
		}
	}
	for _, name := range outputs {
		if l.outputs = append(l.outputs, nil); !l.name(name) {
			return noNUL(name, "outputs")
		}
	}
	return nil
}

func (l *lists) name(name string) bool {
	l.names = append(append(l.names, name...), 0)
	return strings.IndexByte(name, 0) < 0
}

// run runs a model, and waits if nothing is held for a callback.
func (l *lists) run(model *C.pagoda_model, stopper stopper, held cgo.Handle) error {
	l.failure = nil
	status := C.pagoda_go_model_run(model, (*C.char)(unsafe.Pointer(first(l.names))), first(l.inputs),
		C.size_t(len(l.inputs)), first(l.outputs), C.size_t(len(l.outputs)), stopper.handle, C.uintptr_t(held), &l.failure)
	return l.named(check(status, &l.failure))
}

// handleOf is handle for one of several tensors; the words are put together only if they are needed.
func (t *Tensor) handleOf(list, name string) (*C.pagoda_tensor, error) {
	handle, err := t.handle("tensor")
	if err != nil {
		_, err = t.handle(fmt.Sprintf("%s[%q]", list, name))
	}
	return handle, err
}

// named has an error speak of names. In C the tensors have numbers.
func (l *lists) named(err error) error {
	var e *Error
	if !errors.As(err, &e) {
		return err
	}
	for i, name := range strings.Split(strings.TrimSuffix(string(l.names), "\x00"), "\x00") {
		side, at := "input", i
		if i >= len(l.inputs) {
			side, at = "output", i-len(l.inputs)
		}
		for _, list := range []string{side + "s", side + "_names"} {
			if number := fmt.Sprintf("%s[%d]", list, at); number == e.Argument {
				e.Argument = fmt.Sprintf("%ss[%q]", side, name)
				e.Message = strings.Replace(e.Message, number, e.Argument, 1)
				return e
			}
		}
	}
	return e
}
