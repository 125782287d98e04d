package pagoda

// #include "bridge.h"
import "C"

import (
	"encoding/json"
	"time"
)

// fields fills in the fields of a struct of C. The first that can not be is the error; it leaves those after it alone.
type fields struct {
	lent *lent
	err  error
}

// text is a text, or NULL for "".
func (f *fields) text(to **C.char, value, argument string) {
	if f.err == nil {
		*to, f.err = f.lent.optional(value, argument)
	}
}

// texts is a list of texts, or NULL if there are none.
func (f *fields) texts(values []string, argument string) (**C.char, C.size_t) {
	if f.err != nil || len(values) == 0 {
		return nil, 0
	}
	var texts []*C.char
	texts, f.err = f.lent.texts(values, argument)
	return first(texts), C.size_t(len(texts))
}

// json is JSON, or NULL for nil.
func (f *fields) json(to **C.char, value any, argument string) {
	if f.err != nil || value == nil {
		return
	}
	var made string
	switch value := value.(type) {
	case string:
		made = value
	case []byte:
		made = string(value)
	case json.RawMessage:
		made = string(value)
	default:
		bytes, err := json.Marshal(value)
		if err != nil {
			f.err = fail(ErrInvalidArgument, argument, "%T can not become JSON: %v", value, err)
			return
		}
		made = string(bytes)
	}
	// A text without anything is no JSON. The library says so, which NULL would not.
	var pointer *C.char
	if pointer, f.err = text(made, argument); f.err == nil {
		f.lent.Pin(pointer)
		*to = pointer
	}
}

// flag is 0 or 1, or the default for nil.
func (f *fields) flag(to *C.int32_t, value *bool) {
	if value != nil {
		*to = flag(*value)
	}
}

// count is 0 or more, or the default for nil. Less than 0 would be the default to C.
func (f *fields) count(to *C.int32_t, value *int, argument string) {
	if value == nil || f.err != nil {
		return
	}
	if *value < 0 {
		f.err = fail(ErrInvalidArgument, argument, "%d is negative: give 0 or more, or nil for the default", *value)
	}
	*to = number(*value)
}

// number is 0 or more, or the default for nil. Less than 0 would be the default to C.
func (f *fields) number(to *C.float, value *float64, argument string) {
	if value == nil || f.err != nil {
		return
	}
	if *value < 0 {
		f.err = fail(ErrInvalidArgument, argument, "%v is negative: give 0 or more, or nil for the default", *value)
	}
	*to = C.float(*value)
}

// duration is whole microseconds.
func (f *fields) duration(to *C.uint64_t, value time.Duration, argument string) {
	if f.err == nil {
		*to, f.err = microseconds(value, argument)
	}
}

// model is options of a model, or NULL for nil.
func (f *fields) model(to **C.pagoda_model_options, options *ModelOptions) {
	if options == nil || f.err != nil {
		return
	}
	if *to, f.err = options.toC(f.lent); f.err == nil {
		f.lent.Pin(*to)
	}
}

// store is options of a store, or NULL for nil.
func (f *fields) store(to **C.pagoda_store_options, options *StoreOptions) {
	if options != nil {
		*to = options.toC()
		f.lent.Pin(*to)
	}
}

// list is where a list lies, which is pinned. It is not nil, not even of an empty one.
func list[T any](f *fields, values []T) *T {
	pointer := first(values)
	f.lent.Pin(pointer)
	return pointer
}

// orDefault sets an option unless it is 0, which leaves the default.
func orDefault[Option, Value ~int32 | ~uint64](option *Option, value Value) {
	if value != 0 {
		*option = Option(value)
	}
}

// orNone sets an option: 0 leaves the default, None is C's 0.
func orNone[Option ~int32 | ~uint64 | ~float32, Value int32 | int64 | float32](option *Option, value Value) {
	switch value {
	case 0:
	case None:
		*option = 0
	default:
		*option = Option(value)
	}
}

// number is an int for C, where too large and too small ones are what C has no use for either.
func number(value int) C.int32_t { return C.int32_t(max(min(value, 1<<31-1), -1<<31)) }

func flag(on bool) C.int32_t {
	if on {
		return 1
	}
	return 0
}

// copied is a copy of options, which the caller may change as soon as a call returns.
func copied[T any](options *T) *T {
	it := new(T)
	if options != nil {
		*it = *options
	}
	return it
}

// copiedIfAny is the same, but nil stays nil.
func copiedIfAny[T any](options *T) *T {
	if options == nil {
		return nil
	}
	return copied(options)
}
