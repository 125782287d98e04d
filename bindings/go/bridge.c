#include "_cgo_export.h"

#include <stdlib.h>
#include <string.h>

/* In C a handle of Go's is a number; it travels as the void * that callbacks get back. */

static void released(void *held) {
    pagodaGoReleased((uintptr_t)held);
}

static void ran(void *held, pagoda_status status, pagoda_tensor *const *outputs, size_t count,
                const pagoda_error *error) {
    pagodaGoRan((uintptr_t)held, status, (pagoda_tensor **)outputs, count, (pagoda_error *)error);
}

static void ranked(void *held, pagoda_status status, const float *scores, size_t count,
                   const pagoda_rank_response *response, const pagoda_error *error) {
    pagodaGoRanked((uintptr_t)held, status, (float *)scores, count, (pagoda_rank_response *)response,
                   (pagoda_error *)error);
}

static void generated_token(void *held, const pagoda_generate_token *token) {
    pagodaGoToken((uintptr_t)held, (pagoda_generate_token *)token);
}

static void generated(void *held, pagoda_status status, pagoda_generate_response *response, const pagoda_error *error) {
    pagodaGoGenerated((uintptr_t)held, status, response, (pagoda_error *)error);
}

static void logged(void *held, pagoda_log_level level, const char *source, const char *message) {
    pagodaGoLogged((uintptr_t)held, level, (char *)source, (char *)message);
}

pagoda_status pagoda_go_tensor_borrow(pagoda_element_type type, const int64_t *dims, size_t rank, uintptr_t data, size_t bytes,
                                      uintptr_t held, pagoda_tensor **tensor, pagoda_error **error) {
    return pagoda_tensor_borrow(type, dims, rank, (void *)data, bytes, released, (void *)held, tensor, error);
}

pagoda_status pagoda_go_model_run(const pagoda_model *model, const char *names, pagoda_tensor *const *inputs,
                                  size_t input_count, pagoda_tensor **outputs, size_t output_count,
                                  const pagoda_cancel *cancel, uintptr_t held, pagoda_error **error) {
    /* The list is made here: in Go it would be pointers in Go's memory, which take time to pin. */
    const char *few[32], **list = few;
    const size_t count = input_count + output_count;
    if (count > sizeof few / sizeof *few && !(list = malloc(count * sizeof *list))) return PAGODA_STATUS_CAPACITY;
    for (size_t i = 0; i < count; i++) {
        list[i] = names;
        names += strlen(names) + 1;
    }
    const char **more = list + input_count;
    const pagoda_status status =
        held == 0 ? pagoda_model_run(model, list, inputs, input_count, more, outputs, output_count, cancel, error)
                  : pagoda_model_run_async(model, list, inputs, input_count, more, outputs, output_count, cancel, ran,
                                           (void *)held, error);
    if (list != few) free(list);
    return status;
}

pagoda_status pagoda_go_engine_rank_async(const pagoda_engine *engine, const pagoda_rank_request *request,
                                          uintptr_t held, pagoda_error **error) {
    return pagoda_engine_rank_async(engine, request, ranked, (void *)held, error);
}

pagoda_status pagoda_go_generator_generate_async(const pagoda_generator *generator, const pagoda_generate_request *request,
                                                 int32_t streams, uintptr_t held, pagoda_error **error) {
    return pagoda_generator_generate_async(generator, request, streams ? generated_token : NULL, generated, (void *)held,
                                           error);
}

pagoda_status pagoda_go_log_set(pagoda_log_level level, uintptr_t held, pagoda_error **error) {
    return pagoda_log_set(level, held == 0 ? NULL : logged, (void *)held, error);
}
