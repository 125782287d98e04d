package pagoda

// #include "bridge.h"
import "C"

import (
	"runtime"
	"strings"
	"unsafe"
)

// lent is Go memory that C reaches through pointers in other memory, and so must be pinned; until unpinned.
type lent struct{ runtime.Pinner }

// text is a text for C, in Go's memory. C reads up to a NUL, so there must be none inside.
func text(value, argument string) (*C.char, error) {
	if strings.IndexByte(value, 0) >= 0 {
		return nil, noNUL(value, argument)
	}
	bytes := make([]byte, len(value)+1)
	copy(bytes, value)
	return (*C.char)(unsafe.Pointer(unsafe.SliceData(bytes))), nil
}

func noNUL(value, argument string) error {
	at := strings.IndexByte(value, 0)
	return fail(ErrInvalidArgument, argument, "%q has a NUL at byte %d; texts must have none", value, at)
}

// optional is a pinned text, or nil for "".
func (l *lent) optional(value, argument string) (*C.char, error) {
	if value == "" {
		return nil, nil
	}
	pointer, err := text(value, argument)
	if err == nil {
		l.Pin(pointer)
	}
	return pointer, err
}

// texts is a list of texts, in one piece of memory.
func (l *lent) texts(values []string, argument string) ([]*C.char, error) {
	size := 0
	for _, value := range values {
		if strings.IndexByte(value, 0) >= 0 {
			return nil, noNUL(value, argument)
		}
		size += len(value) + 1
	}
	bytes := make([]byte, 0, size)
	pointers := make([]*C.char, len(values))
	for i, value := range values {
		at := len(bytes)
		bytes = append(append(bytes, value...), 0)
		pointers[i] = (*C.char)(unsafe.Pointer(&bytes[at]))
	}
	if len(values) > 0 {
		l.Pin(&bytes[0])
		l.Pin(&pointers[0])
	}
	return pointers, nil
}

// first is where a list lies. It is never nil, for that would be no list at all to C.
func first[T any](list []T) *T {
	if len(list) == 0 {
		return new(T)
	}
	return &list[0]
}
