// Package plain calls pagoda.h by cgo and nothing else: what the benchmarks of package pagoda are compared with.
package plain

// #cgo pkg-config: pagoda
// #include <stdlib.h>
// #include "../../include/pagoda.h"
// #include "stream.h"
//
// static void nothing(void) {}
//
// /* The model, its input, and an output that is written in place; prepared once. */
// static pagoda_model *model;
// static pagoda_tensor *x, *y;
// static float numbers[4] = {1, 2, 3, 4}, scores[3];
//
// static pagoda_status prepare(const char *path) {
//     pagoda_model_options options = PAGODA_MODEL_OPTIONS_INIT;
//     options.provider = PAGODA_PROVIDER_CPU;
//     options.intra_op_threads = 1;
//     int64_t in[] = {1, 4}, out[] = {1, 3};
//     pagoda_status status = pagoda_model_open(path, &options, &model, NULL);
//     if (status == PAGODA_STATUS_OK)
//         status = pagoda_tensor_borrow(PAGODA_ELEMENT_TYPE_F32, in, 2, numbers, sizeof numbers, NULL, NULL, &x, NULL);
//     if (status == PAGODA_STATUS_OK)
//         status = pagoda_tensor_borrow(PAGODA_ELEMENT_TYPE_F32, out, 2, scores, sizeof scores, NULL, NULL, &y, NULL);
//     return status;
// }
//
// static void done(void) {
//     pagoda_model_free(model);
//     pagoda_tensor_free(x);
//     pagoda_tensor_free(y);
// }
//
// static pagoda_status run(void) {
//     const char *in[] = {"x"}, *out[] = {"y"};
//     return pagoda_model_run(model, in, &x, 1, out, &y, 1, NULL, NULL);
// }
//
// static pagoda_element_type type_of(void) {
//     pagoda_element_type type = PAGODA_ELEMENT_TYPE_UNDEFINED;
//     pagoda_tensor_type(x, &type, NULL);
//     return type;
// }
import "C"

import (
	"fmt"
	"unsafe"
)

// Prepare opens samples/make_model.py's hello.onnx. Done closes it.
func Prepare(path string) error {
	cPath := C.CString(path)
	defer C.free(unsafe.Pointer(cPath))
	if status := C.prepare(cPath); status != C.PAGODA_STATUS_OK {
		return fmt.Errorf("%s: status %d", path, status)
	}
	return nil
}

// Done closes what Prepare has opened.
func Done() { C.done() }

// Nothing calls a C function that does nothing.
func Nothing() { C.nothing() }

// Type asks for the type of a tensor.
func Type() int32 { return int32(C.type_of()) }

// Run runs the model, with its output in place.
func Run() int32 { return int32(C.run()) }

// OpenGenerator opens a folder of a language model. CloseGenerator closes it.
func OpenGenerator(folder string) error {
	cFolder := C.CString(folder)
	defer C.free(unsafe.Pointer(cFolder))
	if status := C.open_generator(cFolder); status != C.PAGODA_STATUS_OK {
		return fmt.Errorf("%s: status %d", folder, status)
	}
	return nil
}

// CloseGenerator closes what OpenGenerator has opened.
func CloseGenerator() { C.close_generator() }

// Stream has answers of so many tokens generated, which the caller reads in C as they come; it returns how many it read.
func Stream(answers, count int) int { return int(C.stream(C.int32_t(answers), C.int32_t(count))) }
