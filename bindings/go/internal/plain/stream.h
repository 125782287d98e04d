/* A stream of tokens in plain C: what those of the bindings are compared with. */
#include <pthread.h>

/* A generator, and the request that runs: how many tokens came, and whether it has ended. */
static pagoda_generator *generator;
static size_t tokens;
static int ended;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t more = PTHREAD_COND_INITIALIZER;

static pagoda_status open_generator(const char *folder) {
    pagoda_model_options model = PAGODA_MODEL_OPTIONS_INIT;
    model.provider = PAGODA_PROVIDER_CPU;
    model.intra_op_threads = 1;
    model.sleep_when_idle = 1;
    pagoda_generator_options options = PAGODA_GENERATOR_OPTIONS_INIT;
    options.model = &model;
    options.kv_size_unit = PAGODA_KV_SIZE_UNIT_PAGES;
    options.kv_size = 256;
    return pagoda_generator_open(folder, &options, &generator, NULL);
}

static void close_generator(void) { pagoda_generator_free(generator); }

static void tell(size_t added, int at_end) {
    pthread_mutex_lock(&mutex);
    tokens += added;
    ended = at_end;
    pthread_mutex_unlock(&mutex);
    pthread_cond_signal(&more);
}

static void on_token(void *user_data, const pagoda_generate_token *token) {
    (void)user_data, (void)token;
    tell(1, 0);
}

static void on_end(void *user_data, pagoda_status status, pagoda_generate_response *response,
                   const pagoda_error *error) {
    (void)user_data, (void)status, (void)error;
    pagoda_generate_response_free(response);
    tell(0, 1);
}

/* The caller reads each token as it comes, as the caller of a stream does. */
static size_t stream(int32_t answers, int32_t count) {
    const uint32_t prompt[] = {5, 6, 7, 8, 9, 10, 11, 12};
    pagoda_generate_request request = PAGODA_GENERATE_REQUEST_INIT;
    request.tokens = prompt;
    request.token_count = sizeof prompt / sizeof *prompt;
    request.do_sample = 0;
    request.ignore_eos = 1;
    request.n = answers;
    request.max_new_tokens = count;
    tokens = 0;
    ended = 0;
    if (pagoda_generator_generate_async(generator, &request, on_token, on_end, NULL, NULL)) return 0;
    size_t read = 0;
    pthread_mutex_lock(&mutex);
    for (;;) {
        while (read == tokens && !ended) pthread_cond_wait(&more, &mutex);
        if (read == tokens) break;
        read = tokens;
    }
    pthread_mutex_unlock(&mutex);
    return read;
}
