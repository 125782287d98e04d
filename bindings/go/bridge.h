/* What Go can not say itself: structs from their PAGODA_..._INIT, and callbacks that end in Go. */
#ifndef PAGODA_GO_BRIDGE_H
#define PAGODA_GO_BRIDGE_H

/* The copy beside this file, not one that is installed: the Go code was written against it. */
#include "include/pagoda.h"

#define PAGODA_GO_INIT(type, value) \
    static inline type type##_init(void) { \
        type it = value; \
        return it; \
    }

PAGODA_GO_INIT(pagoda_model_options, PAGODA_MODEL_OPTIONS_INIT)
PAGODA_GO_INIT(pagoda_value_info, PAGODA_VALUE_INFO_INIT)
PAGODA_GO_INIT(pagoda_store_options, PAGODA_STORE_OPTIONS_INIT)
PAGODA_GO_INIT(pagoda_store_stats, PAGODA_STORE_STATS_INIT)
PAGODA_GO_INIT(pagoda_kv_options, PAGODA_KV_OPTIONS_INIT)
PAGODA_GO_INIT(pagoda_kv_stats, PAGODA_KV_STATS_INIT)
PAGODA_GO_INIT(pagoda_kv_request, PAGODA_KV_REQUEST_INIT)
PAGODA_GO_INIT(pagoda_kv_leased_owner, PAGODA_KV_LEASED_OWNER_INIT)
PAGODA_GO_INIT(pagoda_lookup_options, PAGODA_LOOKUP_OPTIONS_INIT)
PAGODA_GO_INIT(pagoda_table_stats, PAGODA_TABLE_STATS_INIT)
PAGODA_GO_INIT(pagoda_graph_shape, PAGODA_GRAPH_SHAPE_INIT)
PAGODA_GO_INIT(pagoda_engine_options, PAGODA_ENGINE_OPTIONS_INIT)
PAGODA_GO_INIT(pagoda_rank_request, PAGODA_RANK_REQUEST_INIT)
PAGODA_GO_INIT(pagoda_rank_response, PAGODA_RANK_RESPONSE_INIT)
PAGODA_GO_INIT(pagoda_engine_stats, PAGODA_ENGINE_STATS_INIT)
PAGODA_GO_INIT(pagoda_kv_policy, PAGODA_KV_POLICY_INIT)
PAGODA_GO_INIT(pagoda_generator_options, PAGODA_GENERATOR_OPTIONS_INIT)
PAGODA_GO_INIT(pagoda_generator_stats, PAGODA_GENERATOR_STATS_INIT)
PAGODA_GO_INIT(pagoda_beam_options, PAGODA_BEAM_OPTIONS_INIT)
PAGODA_GO_INIT(pagoda_logit_bias, PAGODA_LOGIT_BIAS_INIT)
PAGODA_GO_INIT(pagoda_generate_request, PAGODA_GENERATE_REQUEST_INIT)
PAGODA_GO_INIT(pagoda_generate_info, PAGODA_GENERATE_INFO_INIT)
PAGODA_GO_INIT(pagoda_generate_choice, PAGODA_GENERATE_CHOICE_INIT)
PAGODA_GO_INIT(pagoda_token_logprobs, PAGODA_TOKEN_LOGPROBS_INIT)

/* `bytes` has a type here: for a void * cgo looks at all of the object that it points into, which may have pointers. */
static inline pagoda_status pagoda_go_model_open_memory(const uint8_t *bytes, size_t count,
                                                        const pagoda_model_options *options, pagoda_model **model,
                                                        pagoda_error **error) {
    return pagoda_model_open_memory(bytes, count, options, model, error);
}

/* Functions of pagoda.h that take a callback. `held` is a cgo.Handle of what the callback needs. */

/* `data` is a number for the same reason; it is pinned. */
pagoda_status pagoda_go_tensor_borrow(pagoda_element_type type, const int64_t *dims, size_t rank, uintptr_t data, size_t bytes,
                                      uintptr_t held, pagoda_tensor **tensor, pagoda_error **error);
/* `names` is those of the inputs, then of the outputs, each with its NUL. With `held` 0 it waits, and puts new outputs
 * into `outputs`. */
pagoda_status pagoda_go_model_run(const pagoda_model *model, const char *names, pagoda_tensor *const *inputs,
                                  size_t input_count, pagoda_tensor **outputs, size_t output_count,
                                  const pagoda_cancel *cancel, uintptr_t held, pagoda_error **error);
pagoda_status pagoda_go_engine_rank_async(const pagoda_engine *engine, const pagoda_rank_request *request,
                                          uintptr_t held, pagoda_error **error);
/* With `streams` 1 each token is handed on as it comes. */
pagoda_status pagoda_go_generator_generate_async(const pagoda_generator *generator, const pagoda_generate_request *request,
                                                 int32_t streams, uintptr_t held, pagoda_error **error);
/* With `held` 0 nothing is logged. */
pagoda_status pagoda_go_log_set(pagoda_log_level level, uintptr_t held, pagoda_error **error);

#endif
