package pagoda

// #include "bridge.h"
import "C"

import (
	"sync"
	"unsafe"
)

// None is the value of an option that says: none at all. 0 is the default.
const None = -1

// Version is the version of the library, such as "0.1.0".
func Version() string { return C.GoString(C.pagoda_version()) }

// VersionNumber is the version of the library as a number: major * 1,000,000 + minor * 1,000 + patch.
func VersionNumber() uint32 { return uint32(C.pagoda_version_number()) }

// The version of the header that this package was written against, as text, as numbers, and as one number. The library may
// be a later one: see [Version].
const (
	HeaderVersion       = C.PAGODA_VERSION
	HeaderVersionMajor  = C.PAGODA_VERSION_MAJOR
	HeaderVersionMinor  = C.PAGODA_VERSION_MINOR
	HeaderVersionPatch  = C.PAGODA_VERSION_PATCH
	HeaderVersionNumber = C.PAGODA_VERSION_NUMBER
)

// ABIVersion is the version of the library's binary interface.
func ABIVersion() uint32 { return uint32(C.pagoda_abi_version()) }

// LiveObjects is how many objects of the library are held: 0 if everything was closed. What the package keeps for
// contexts that come later does not count.
func LiveObjects() int {
	idle := len(idleCancels)
	return max(int(C.pagoda_live_objects())-idle, 0)
}

// Metrics is the metrics of the process as Prometheus text, to be served as
// "application/openmetrics-text; version=1.0.0".
func Metrics() (string, error) {
	if err := loaded(); err != nil {
		return "", err
	}
	return grown(func(buffer *C.char, capacity C.size_t, length *C.size_t, failure **C.pagoda_error) C.pagoda_status {
		return C.pagoda_metrics_text(buffer, capacity, length, failure)
	})
}

// grown is a text of a length that C says first. It may have grown by the time that there is room for it.
func grown(call func(*C.char, C.size_t, *C.size_t, **C.pagoda_error) C.pagoda_status) (string, error) {
	var length C.size_t
	var failure *C.pagoda_error
	if err := check(call(nil, 0, &length, &failure), &failure); err != nil {
		return "", err
	}
	buffer := make([]byte, length+65536)
	at := (*C.char)(unsafe.Pointer(&buffer[0]))
	if err := check(call(at, C.size_t(len(buffer)), &length, &failure), &failure); err != nil {
		return "", err
	}
	return string(buffer[:length-1]), nil
}

// loaded is the error of a library that does not fit the header in this module. It is looked at once.
var loaded = sync.OnceValue(func() error { return checkABI(C.PAGODA_ABI_VERSION) })

func checkABI(version uint32) error {
	var failure *C.pagoda_error
	return check(C.pagoda_abi_check(C.uint32_t(version), &failure), &failure)
}
