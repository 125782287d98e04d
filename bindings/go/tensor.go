package pagoda

// #include "bridge.h"
import "C"

import (
	"math/bits"
	"runtime"
	"runtime/cgo"
	"slices"
	"unsafe"
)

// Tensor is a type, dimensions, and memory that is the caller's, Pagoda's, or ONNX Runtime's. Runs read and write that
// memory in place. Closing a tensor that a run uses is fine: its memory goes when the run is done.
type Tensor struct{ object *object }

var tensorKind = &kind{"tensor", func(token uintptr) C.pagoda_status {
	return C.pagoda_tensor_free(tensorHandle(token))
}}

func tensorHandle(token uintptr) *C.pagoda_tensor {
	return *(**C.pagoda_tensor)(unsafe.Pointer(&token))
}

// newTensor is a tensor that was made at a place; see callers.
func newTensor(handle *C.pagoda_tensor, made []uintptr) *Tensor {
	t := new(Tensor)
	t.object = own(t, tensorKind, *(*uintptr)(unsafe.Pointer(&handle)), made)
	return t
}

// NewTensor makes a tensor over values; nothing is copied. Runs read the slice, and write it where the tensor is an
// output: leave it alone meanwhile. It stays in its place until the tensor is closed and no run uses it. Strings are
// the exception: they are copied.
func NewTensor[T Element](dims []int64, values []T) (*Tensor, error) {
	if texts, ok := any(values).([]string); ok {
		return newStrings(dims, texts)
	}
	// C asks only that there are enough. Whether the dimensions make sense is for it to say.
	if count, ok := elements(dims); ok && count != uint64(len(values)) {
		return nil, fail(ErrInvalidArgument, "values", "there are %d, where the dimensions %v make %d", len(values), dims,
			count)
	}
	size := uint64(unsafe.Sizeof(*new(T)))
	return borrow(TypeOf[T](), dims, unsafe.Pointer(unsafe.SliceData(values)), uint64(len(values))*size)
}

// NewTensorOf makes a tensor of any type but strings over its bytes, as [NewTensor] does.
func NewTensorOf(elements ElementType, dims []int64, memory []byte) (*Tensor, error) {
	return borrow(elements, dims, unsafe.Pointer(unsafe.SliceData(memory)), uint64(len(memory)))
}

// Zeros makes a tensor of zeros, or of empty strings, in memory of its own.
func Zeros(elements ElementType, dims ...int64) (*Tensor, error) {
	if err := loaded(); err != nil {
		return nil, err
	}
	var handle *C.pagoda_tensor
	var failure *C.pagoda_error
	status := C.pagoda_tensor_new(C.pagoda_element_type(elements), cDims(dims), C.size_t(len(dims)), &handle, &failure)
	if err := check(status, &failure); err != nil {
		return nil, err
	}
	return newTensor(handle, callers()), nil
}

// Type is the type of the elements.
func (t *Tensor) Type() (ElementType, error) {
	handle, err := t.handle("tensor")
	if err != nil {
		return Undefined, err
	}
	defer runtime.KeepAlive(t)
	return typeOf(handle)
}

// Dims is a copy of the dimensions.
func (t *Tensor) Dims() ([]int64, error) {
	handle, err := t.hold()
	if err != nil {
		return nil, err
	}
	defer t.object.mu.RUnlock()
	dims, err := dimsOf(handle)
	return slices.Clone(dims), err
}

// Bytes is a copy of the memory, of any type but strings.
func (t *Tensor) Bytes() ([]byte, error) {
	handle, err := t.hold()
	if err != nil {
		return nil, err
	}
	defer t.object.mu.RUnlock()
	data, bytes, err := dataOf(handle)
	return slices.Clone(unsafe.Slice((*byte)(data), bytes)), err
}

// Values is a copy of the elements, in row-major order.
func Values[T Element](t *Tensor) ([]T, error) {
	handle, err := t.hold()
	if err != nil {
		return nil, err
	}
	defer t.object.mu.RUnlock()
	if texts, ok := any(new([]T)).(*[]string); ok {
		if *texts, err = stringsOf(handle); err != nil {
			return nil, err
		}
		return any(*texts).([]T), nil
	}
	values, err := view[T](handle)
	return slices.Clone(values), err
}

// View is the elements in place, to read or to write while no run uses them. It is the slice that [NewTensor] was
// given; for every other tensor it is memory outside Go, which goes with the tensor: touch it after Close and the
// program may crash, and keep a reference to the tensor as long (a deferred Close does), or the garbage collector
// closes it. Strings have none: see [Values].
func View[T Element](t *Tensor) ([]T, error) {
	handle, err := t.hold()
	if err != nil {
		return nil, err
	}
	defer t.object.mu.RUnlock()
	return view[T](handle)
}

// Close lets go of the tensor.
func (t *Tensor) Close() error { return t.it().close() }

func (t *Tensor) it() *object {
	if t == nil {
		return nil
	}
	return t.object
}

// handle is for a call; argument is what the call says if there is none.
func (t *Tensor) handle(argument string) (*C.pagoda_tensor, error) {
	token, err := t.it().get(argument)
	return tensorHandle(token), err
}

// hold is as object.hold.
func (t *Tensor) hold() (*C.pagoda_tensor, error) {
	token, err := t.it().hold("tensor")
	return tensorHandle(token), err
}

// elements is how many there are; not ok if no tensor has such dimensions.
func elements(dims []int64) (count uint64, ok bool) {
	count = 1
	for _, dim := range dims {
		high, low := bits.Mul64(count, uint64(dim))
		if dim < 0 || high != 0 {
			return 0, false
		}
		count = low
	}
	return count, true
}

func cDims(dims []int64) *C.int64_t { return (*C.int64_t)(first(dims)) }

func borrow(elements ElementType, dims []int64, data unsafe.Pointer, bytes uint64) (*Tensor, error) {
	if err := loaded(); err != nil {
		return nil, err
	}
	pinner := new(runtime.Pinner)
	if bytes == 0 {
		data = nil // where an empty slice lies is nothing to C
	} else {
		pinner.Pin(data)
	}
	held := cgo.NewHandle(pinner)
	var handle *C.pagoda_tensor
	var failure *C.pagoda_error
	status := C.pagoda_go_tensor_borrow(C.pagoda_element_type(elements), cDims(dims), C.size_t(len(dims)),
		C.uintptr_t(uintptr(data)), C.size_t(bytes), C.uintptr_t(held), &handle, &failure)
	if err := check(status, &failure); err != nil {
		pagodaGoReleased(C.uintptr_t(held))
		return nil, err
	}
	return newTensor(handle, callers()), nil
}

//export pagodaGoReleased
func pagodaGoReleased(held C.uintptr_t) {
	handle := cgo.Handle(held)
	handle.Value().(*runtime.Pinner).Unpin()
	handle.Delete()
}

func newStrings(dims []int64, values []string) (*Tensor, error) {
	if err := loaded(); err != nil {
		return nil, err
	}
	var l lent
	defer l.Unpin()
	pointers := make([]*C.char, len(values))
	lengths := make([]C.size_t, len(values))
	for i, value := range values {
		// The first byte, whatever it is, of an empty one: C wants an address.
		bytes := unsafe.StringData(value + "\x00")
		l.Pin(bytes)
		pointers[i], lengths[i] = (*C.char)(unsafe.Pointer(bytes)), C.size_t(len(value))
	}
	var handle *C.pagoda_tensor
	var failure *C.pagoda_error
	status := C.pagoda_tensor_new_strings(first(pointers), first(lengths), C.size_t(len(values)), cDims(dims),
		C.size_t(len(dims)), &handle, &failure)
	if err := check(status, &failure); err != nil {
		return nil, err
	}
	return newTensor(handle, callers()), nil
}

func typeOf(handle *C.pagoda_tensor) (ElementType, error) {
	var found C.pagoda_element_type
	var failure *C.pagoda_error
	err := check(C.pagoda_tensor_type(handle, &found, &failure), &failure)
	return ElementType(found), err
}

func dimsOf(handle *C.pagoda_tensor) ([]int64, error) {
	var dims *C.int64_t
	var rank C.size_t
	var failure *C.pagoda_error
	err := check(C.pagoda_tensor_dims(handle, &dims, &rank, &failure), &failure)
	return unsafe.Slice((*int64)(dims), rank), err
}

func dataOf(handle *C.pagoda_tensor) (unsafe.Pointer, uint64, error) {
	var data unsafe.Pointer
	var bytes C.size_t
	var failure *C.pagoda_error
	err := check(C.pagoda_tensor_data(handle, &data, &bytes, &failure), &failure)
	if bytes == 0 {
		return nil, 0, err // the address may be a small number, for which Go ends the program if it is on a stack
	}
	return data, uint64(bytes), err
}

func view[T Element](handle *C.pagoda_tensor) ([]T, error) {
	found, err := typeOf(handle)
	if err != nil {
		return nil, err
	}
	if wanted := TypeOf[T](); found != wanted {
		return nil, fail(ErrInvalidArgument, "T", "this is a tensor of %s, not of %s", found, wanted)
	}
	data, bytes, err := dataOf(handle)
	if err != nil || bytes == 0 {
		return nil, err
	}
	return unsafe.Slice((*T)(data), bytes/uint64(unsafe.Sizeof(*new(T)))), nil
}

func stringsOf(handle *C.pagoda_tensor) ([]string, error) {
	if found, err := typeOf(handle); err != nil || found != String {
		if err == nil {
			err = fail(ErrInvalidArgument, "T", "this is a tensor of %s, not of %s", found, String)
		}
		return nil, err
	}
	dims, err := dimsOf(handle)
	if err != nil {
		return nil, err
	}
	count, _ := elements(dims)
	values := make([]string, count)
	for i := range values {
		var text *C.char
		var length C.size_t
		var failure *C.pagoda_error
		if err := check(C.pagoda_tensor_string(handle, C.size_t(i), &text, &length, &failure), &failure); err != nil {
			return nil, err
		}
		values[i] = string(unsafe.Slice((*byte)(unsafe.Pointer(text)), length))
	}
	return values, nil
}
