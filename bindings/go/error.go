package pagoda

// #include "bridge.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
)

// Status is the kind of an [Error], for errors.Is. Later versions may add numbers.
type Status int32

// What can go wrong.
const (
	ErrInvalidArgument Status = C.PAGODA_STATUS_INVALID_ARGUMENT // An invalid value; Error.Argument names it.
	ErrInvalidHandle   Status = C.PAGODA_STATUS_INVALID_HANDLE   // An object is nil or was closed.
	ErrNotFound        Status = C.PAGODA_STATUS_NOT_FOUND        // A file, a library or a name does not exist.
	ErrUnsupported     Status = C.PAGODA_STATUS_UNSUPPORTED      // Not with this build, this model or this machine.
	ErrCapacity        Status = C.PAGODA_STATUS_CAPACITY         // A queue is full, memory is exhausted.
	ErrCancelled       Status = C.PAGODA_STATUS_CANCELLED        // The context was done, or the time of the request over.
	ErrModel           Status = C.PAGODA_STATUS_MODEL            // The model can not be loaded.
	ErrRuntime         Status = C.PAGODA_STATUS_RUNTIME          // ONNX Runtime failed while running the model.
	ErrIO              Status = C.PAGODA_STATUS_IO               // Reading or writing a file failed.
	ErrInternal        Status = C.PAGODA_STATUS_INTERNAL         // A bug in Pagoda. Please report it.
	ErrBusy            Status = C.PAGODA_STATUS_BUSY             // The object is in use; try again later.
)

// Error is the name of the status, such as "pagoda: NOT_FOUND".
func (s Status) Error() string {
	return "pagoda: " + C.GoString(C.pagoda_status_name(C.pagoda_status(s)))
}

// Error is what every call of this package returns that fails.
type Error struct {
	// Status is the kind of the error.
	Status Status
	// Argument is what was at fault, such as `inputs["x"]` or "options.provider"; "" if nothing was. It goes by the
	// names of pagoda.h.
	Argument string
	// Message says what was wrong with which value, and what to do.
	Message string

	cause error
}

// Error is the message.
func (e *Error) Error() string { return "pagoda: " + e.Message }

// Is tells whether target is the status of the error.
func (e *Error) Is(target error) bool {
	status, ok := target.(Status)
	return ok && status == e.Status
}

// Unwrap is the error of the context that ended the call, or nil.
func (e *Error) Unwrap() error { return e.cause }

func fail(status Status, argument, format string, values ...any) *Error {
	message := fmt.Sprintf(format, values...)
	if argument != "" {
		message = argument + ": " + message
	}
	return &Error{Status: status, Argument: argument, Message: message}
}

// check turns what a function of pagoda.h returned into an error. `from` is where the function put its words; they are
// freed. It is a pointer because Go may read a plain argument before it calls the function.
func check(status C.pagoda_status, from **C.pagoda_error) error {
	if status == C.PAGODA_STATUS_OK {
		return nil
	}
	err := toError(status, *from)
	C.pagoda_error_free(*from)
	return err
}

func toError(status C.pagoda_status, from *C.pagoda_error) *Error {
	if from == nil {
		return &Error{Status: Status(status), Message: "the library gives no reason: " + Status(status).Error()}
	}
	return &Error{
		Status:   Status(C.pagoda_error_status(from)),
		Argument: C.GoString(C.pagoda_error_argument(from)),
		Message:  C.GoString(C.pagoda_error_message(from)),
	}
}

// blame says that a context ended a call, if that is how it ended.
func blame(ctx context.Context, err error) error {
	var e *Error
	if ctx.Err() != nil && errors.As(err, &e) && e.Status == ErrCancelled {
		e.cause = ctx.Err()
		e.Message += ": " + ctx.Err().Error()
	}
	return err
}

// done is the error of a call whose context is done, or nil.
func done(ctx context.Context) error {
	if ctx == nil {
		return fail(ErrInvalidArgument, "ctx", "nil, where a context is needed; context.Background() is one")
	}
	if err := ctx.Err(); err != nil {
		return &Error{Status: ErrCancelled, Message: "the context is done: " + err.Error(), cause: err}
	}
	return nil
}
