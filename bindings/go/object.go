package pagoda

// #include "bridge.h"
import "C"

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
)

// object is a handle of pagoda.h. It is apart from the Model or Tensor that users hold, so that it can outlive that and
// be freed when the garbage collector finds that Close was forgotten.
//
// A handle is a number that may look like an address in Go's heap, so it is never kept as a pointer that the garbage
// collector would follow: here it is a uintptr. (*C.pagoda_model and the like are fine too: C does not say what is in
// those structs, so Go takes pointers to them for numbers.)
type object struct {
	kind *kind
	// mu is held while memory is read that goes with the handle.
	mu sync.RWMutex
	// token is the handle, 0 when it was freed or is left to who keeps it.
	token uintptr
	// keepers is how many calls are under way that a Close must not stop; left is the handle if it was closed meanwhile,
	// for the last of them to free.
	keepers atomic.Int32
	left    uintptr
	// made is where, if that is logged.
	made []uintptr
}

// kind is a type of pagoda.h.
type kind struct {
	name string
	free func(token uintptr) C.pagoda_status
}

// own has an object freed when its owner is closed or forgotten.
func own[T any](owner *T, kind *kind, token uintptr, made []uintptr) *object {
	it := &object{kind: kind, token: token, made: made}
	runtime.AddCleanup(owner, (*object).forgotten, it)
	return it
}

// get is the handle. It may be freed by the time that it is used: then the call returns an error.
func (o *object) get(name string) (uintptr, error) {
	token, err := o.hold(name)
	if err == nil {
		o.mu.RUnlock()
	}
	return token, err
}

// hold is the handle, which is not freed until o.mu is unlocked for reading.
func (o *object) hold(name string) (uintptr, error) {
	if o == nil {
		return 0, fail(ErrInvalidHandle, name, "nil, or made by hand; use the functions that open or make one")
	}
	o.mu.RLock()
	if o.token == 0 {
		o.mu.RUnlock()
		return 0, fail(ErrInvalidHandle, name, "the %s was closed already", o.kind.name)
	}
	return o.token, nil
}

// keep is the handle, which is not freed until let is called. A Close before that does not wait: it leaves that to let.
func (o *object) keep(name string) (token uintptr, err error) {
	token, err = o.hold(name)
	if err == nil {
		o.keepers.Add(1)
		o.mu.RUnlock()
	}
	return token, err
}

// isKept is whether a call is under way that nothing must stop.
func (o *object) isKept() bool { return o.keepers.Load() > 0 }

// let lets go of a handle that was kept.
func (o *object) let() {
	o.mu.Lock()
	o.keepers.Add(-1)
	token := o.spare()
	o.mu.Unlock()
	if token != 0 {
		o.kind.free(token)
	}
}

// spare is the handle that was closed, if nothing keeps it.
func (o *object) spare() (token uintptr) {
	if o.keepers.Load() == 0 {
		token, o.left = o.left, 0
	}
	return token
}

// close frees the handle, the first time that it is called.
func (o *object) close() error {
	token := o.take()
	if token == 0 {
		return nil
	}
	if status := o.kind.free(token); status != C.PAGODA_STATUS_OK {
		return fail(Status(status), o.kind.name, "could not be closed: %s", Status(status))
	}
	return nil
}

func (o *object) take() (token uintptr) {
	if o != nil {
		o.mu.Lock()
		if o.token != 0 {
			o.token, o.left = 0, o.token
			token = o.spare()
		}
		o.mu.Unlock()
	}
	return token
}

// forgotten is called when the owner is gone.
func (o *object) forgotten() {
	token := o.take()
	if token == 0 {
		return
	}
	// Not here: cleanups run one after the other, and what has a store or requests under way takes a while.
	go o.kind.free(token)
	if logs(LogLevelDebug) {
		logLine(LogLevelDebug, "go", fmt.Sprintf("a %s was not closed%s", o.kind.name, o.where()))
	}
}

// callers is where something is being made, if that is logged.
func callers() []uintptr {
	if !logs(LogLevelDebug) {
		return nil
	}
	made := make([]uintptr, 16)
	return made[:runtime.Callers(2, made)]
}

// where is the line of the program, outside this package, that made the object.
func (o *object) where() string {
	frames := runtime.CallersFrames(o.made)
	for len(o.made) > 0 {
		frame, more := frames.Next()
		if !inPackage(frame.Function) {
			return fmt.Sprintf("; it was made at %s:%d", frame.File, frame.Line)
		}
		if !more {
			break
		}
	}
	return ""
}
