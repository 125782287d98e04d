// Package plain calls pagoda.h by cgo and nothing else: what the benchmarks of package pagoda are compared with.
package plain

// #cgo pkg-config: pagoda
// #include <pthread.h>
// #include <stdlib.h>
// #include "../../include/pagoda.h"
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
//
// /* A generator, and the request that runs: how many tokens came, and whether it has ended. */
// static pagoda_generator *generator;
// static size_t tokens;
// static int ended;
// static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
// static pthread_cond_t more = PTHREAD_COND_INITIALIZER;
//
// static pagoda_status open_generator(const char *folder) {
//     pagoda_model_options model = PAGODA_MODEL_OPTIONS_INIT;
//     model.provider = PAGODA_PROVIDER_CPU;
//     model.intra_op_threads = 1;
//     model.sleep_when_idle = 1;
//     pagoda_generator_options options = PAGODA_GENERATOR_OPTIONS_INIT;
//     options.model = &model;
//     options.kv_size_unit = PAGODA_KV_SIZE_UNIT_PAGES;
//     options.kv_size = 256;
//     return pagoda_generator_open(folder, &options, &generator, NULL);
// }
//
// static void close_generator(void) { pagoda_generator_free(generator); }
//
// static void tell(size_t added, int at_end) {
//     pthread_mutex_lock(&mutex);
//     tokens += added;
//     ended = at_end;
//     pthread_mutex_unlock(&mutex);
//     pthread_cond_signal(&more);
// }
//
// static void on_token(void *user_data, const pagoda_generate_token *token) {
//     (void)user_data, (void)token;
//     tell(1, 0);
// }
//
// static void on_end(void *user_data, pagoda_status status, pagoda_generate_response *response,
//                    const pagoda_error *error) {
//     (void)user_data, (void)status, (void)error;
//     pagoda_generate_response_free(response);
//     tell(0, 1);
// }
//
// /* The caller reads each token as it comes, as the caller of a stream does. */
// static size_t stream(int32_t answers, int32_t count) {
//     const uint32_t prompt[] = {5, 6, 7, 8, 9, 10, 11, 12};
//     pagoda_generate_request request = PAGODA_GENERATE_REQUEST_INIT;
//     request.tokens = prompt;
//     request.token_count = sizeof prompt / sizeof *prompt;
//     request.do_sample = 0;
//     request.ignore_eos = 1;
//     request.n = answers;
//     request.max_new_tokens = count;
//     tokens = 0;
//     ended = 0;
//     if (pagoda_generator_generate_async(generator, &request, on_token, on_end, NULL, NULL)) return 0;
//     size_t read = 0;
//     pthread_mutex_lock(&mutex);
//     for (;;) {
//         while (read == tokens && !ended) pthread_cond_wait(&more, &mutex);
//         if (read == tokens) break;
//         read = tokens;
//     }
//     pthread_mutex_unlock(&mutex);
//     return read;
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
