/*
 * The generator in C, for valgrind: answers by one call, with callbacks and by steps, sessions, and errors. Prints the
 * tokens of the three ways, a line each. The argument is a model folder.
 */
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>

#include "pagoda.h"

static void check(pagoda_status status, pagoda_error *error) {
    if (status == PAGODA_STATUS_OK) return;
    fprintf(stderr, "%s: %s\n", pagoda_status_name(status), error ? pagoda_error_message(error) : "no message");
    exit(1);
}

/* The tokens of the first answer, and their log probabilities are read. */
static void print(pagoda_generate_response *response) {
    pagoda_error *error = NULL;
    pagoda_generate_info info = PAGODA_GENERATE_INFO_INIT;
    check(pagoda_generate_response_info(response, &info, &error), error);
    for (size_t i = 0; i < info.choice_count; i++) {
        pagoda_generate_choice choice = PAGODA_GENERATE_CHOICE_INIT;
        check(pagoda_generate_response_choice(response, i, &choice, &error), error);
        float sum = 0;
        for (size_t j = 0; j < choice.logprob_count; j++) {
            pagoda_token_logprobs logprobs = PAGODA_TOKEN_LOGPROBS_INIT;
            check(pagoda_generate_response_logprobs(response, i, j, &logprobs, &error), error);
            for (size_t k = 0; k < logprobs.top_count; k++) sum += logprobs.top_logprobs[k];
        }
        for (size_t j = 0; j < choice.token_count; j++) printf("%u ", choice.tokens[j]);
        printf("%s %zu %d\n", sum < 0 ? "with" : "without", choice.logprob_count, choice.finish_reason);
    }
    pagoda_generate_response_free(response);
}

typedef struct {
    sem_t ended;
    size_t tokens, bytes;
    pagoda_generate_response *response;
} received;

static void on_token(void *user_data, const pagoda_generate_token *token) {
    received *all = user_data;
    all->tokens += 1;
    all->bytes += token->text_length;
    if (token->logprobs && token->logprobs->rank == 0) exit(2);
}

static void on_end(void *user_data, pagoda_status status, pagoda_generate_response *response,
                   const pagoda_error *error) {
    received *all = user_data;
    if (status) fprintf(stderr, "%s\n", pagoda_error_message(error));
    all->response = response;
    sem_post(&all->ended);
}

int main(int count, char **arguments) {
    if (count != 2) return 2;
    pagoda_error *error = NULL;
    check(pagoda_abi_check(PAGODA_ABI_VERSION, &error), error);
    pagoda_model_options model = PAGODA_MODEL_OPTIONS_INIT;
    model.provider = PAGODA_PROVIDER_CPU, model.intra_op_threads = 1, model.sleep_when_idle = 1;
    pagoda_generator_options options = PAGODA_GENERATOR_OPTIONS_INIT;
    options.model = &model, options.kv_size_unit = PAGODA_KV_SIZE_UNIT_PAGES, options.kv_size = 16;
    pagoda_generator *generator = NULL, *stepped = NULL;
    check(pagoda_generator_open(arguments[1], &options, &generator, &error), error);
    options.driver = PAGODA_DRIVER_CALLER;
    check(pagoda_generator_open(arguments[1], &options, &stepped, &error), error);

    pagoda_logit_bias bias = PAGODA_LOGIT_BIAS_INIT;
    bias.token = 9, bias.bias = -1e30f;
    pagoda_generate_request request = PAGODA_GENERATE_REQUEST_INIT;
    request.prompt = "the quick brown fox", request.do_sample = 0, request.ignore_eos = 1;
    request.max_new_tokens = 6, request.n = 2, request.logprobs = 3;
    request.logit_bias = &bias, request.logit_bias_count = 1;
    request.stop = (const char *[]){"no text has this"}, request.stop_count = 1;
    pagoda_generate_response *response = NULL;
    check(pagoda_generator_generate(generator, &request, &response, &error), error);
    print(response);

    for (int i = 0; i < 2; i++) {
        received all = {.tokens = 0};
        sem_init(&all.ended, 0, 0);
        pagoda_generator *by = i ? stepped : generator;
        check(pagoda_generator_generate_async(by, &request, on_token, on_end, &all, &error), error);
        for (int32_t more = i; more;) check(pagoda_generator_step(stepped, &more, &error), error);
        sem_wait(&all.ended);
        if (!all.response || all.tokens != 12) return 3;
        print(all.response);
        sem_destroy(&all.ended);
    }

    size_t forgotten = 0;
    request.session = "a session", request.n = 1;
    check(pagoda_generator_generate(generator, &request, &response, NULL), NULL);
    pagoda_generate_response_free(response);
    check(pagoda_generator_forget(generator, &request.session, 1, &forgotten, &error), error);
    if (forgotten != 1) return 4;
    request.messages = "[", request.prompt = NULL;
    if (pagoda_generator_generate(generator, &request, &response, &error) != PAGODA_STATUS_INVALID_ARGUMENT) return 5;
    pagoda_error_free(error);
    pagoda_generator_free(generator);
    pagoda_generator_free(stepped);
    return pagoda_live_objects() ? 6 : 0;
}
