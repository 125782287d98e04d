/* ai.pagoda.Generator */
#include "common.h"

#include "ai_pagoda_Generator.h"

static jmethodID token_of, done; /* of TokenStream.Generating */
static jclass object_class;

bool find_generating(JNIEnv *env) {
    jclass found = (*env)->FindClass(env, "java/lang/Object");
    object_class = found ? (*env)->NewGlobalRef(env, found) : NULL;
    jclass generating = object_class ? (*env)->FindClass(env, "ai/pagoda/TokenStream$Generating") : NULL;
    if (generating) token_of = (*env)->GetMethodID(env, generating, "token", "(III[BFI[I[F)V");
    if (token_of) done = (*env)->GetMethodID(env, generating, "done", "(Ljava/lang/Throwable;J)V");
    return done != NULL;
}

/* ---- from Java --------------------------------------------------------------------------------------------------- */

/* What Packed of Java has, to be taken in its order. */
typedef struct {
    const int64_t *numbers;
    const char *texts;
    const int32_t *ints;
} packed;

static packed unpack(call *call, jlongArray numbers, jbyteArray names, jintArray lists) {
    size_t count;
    packed from;
    from.numbers = longs(call, numbers, &count);
    from.texts = text(call, names);
    from.ints = ints(call, lists, &count);
    return from;
}

static size_t take_count(packed *from) { return (size_t)*from->numbers++; }

/* A text; NULL of null. */
static const char *take_text(packed *from) {
    if (take_count(from) == 0) return NULL;
    const char *text = from->texts;
    from->texts += strlen(text) + 1;
    return text;
}

static const int32_t *take_ints(packed *from, size_t *count) {
    const int32_t *list = from->ints;
    *count = take_count(from);
    from->ints += *count;
    return list;
}

/* A policy, into `policy`; NULL if there is none. */
static const pagoda_kv_policy *take_policy(packed *from, pagoda_kv_policy *policy) {
    if (take_count(from) == 0) return NULL;
    size_t count;
    *policy = (pagoda_kv_policy)PAGODA_KV_POLICY_INIT;
    policy->name = take_text(from);
    take32(&from->numbers, &policy->cache_length);
    take32(&from->numbers, &policy->chunk_size);
    take32(&from->numbers, &policy->protect);
    take32(&from->numbers, &policy->grace_period);
    take_float(&from->numbers, &policy->keep_initial_fraction);
    take32(&from->numbers, &policy->normalise);
    take_float(&from->numbers, &policy->score_share);
    take32(&from->numbers, &policy->protect_first_message);
    const int32_t *lengths = take_ints(from, &count);
    if (count > 0) policy->cache_lengths = lengths;
    policy->cache_length_count = (int32_t)count;
    return policy;
}

/* A beam search, into `beams`; NULL if there is none. */
static const pagoda_beam_options *take_beams(packed *from, pagoda_beam_options *beams) {
    if (take_count(from) == 0) return NULL;
    *beams = (pagoda_beam_options)PAGODA_BEAM_OPTIONS_INIT;
    take32(&from->numbers, &beams->width);
    take_float(&from->numbers, &beams->length_penalty);
    take32(&from->numbers, &beams->early_stop);
    return beams;
}

NATIVE(jlong, Generator, open)(JNIEnv *env, SELF, jbyteArray folder, jlongArray numbers, jbyteArray names,
                               jintArray lists, jlongArray model, jbyteArray onnxruntime, jbyteArray profile,
                               jlongArray store_numbers) {
    call call = CALL;
    pagoda_generator *generator = NULL;
    pagoda_generator_options options = PAGODA_GENERATOR_OPTIONS_INIT;
    pagoda_kv_policy policy;
    const pagoda_model_options of_model = model_options(&call, model, onnxruntime, profile);
    const pagoda_store_options of_store = store_options(&call, store_numbers);
    const char *path = text(&call, folder);
    packed from = unpack(&call, numbers, names, lists);
    if (!call.failed) {
        take32(&from.numbers, &options.driver);
        take32(&from.numbers, &options.share_prefixes);
        take32(&from.numbers, &options.max_batch);
        take32(&from.numbers, &options.max_batch_tokens);
        take_float(&from.numbers, &options.max_stretch);
        take32(&from.numbers, &options.max_prompt_tokens);
        take32(&from.numbers, &options.max_new_tokens);
        take32(&from.numbers, &options.queue);
        take32(&from.numbers, &options.kv_format);
        take64(&from.numbers, &options.host_bytes);
        take32(&from.numbers, &options.kv_size_unit);
        take64(&from.numbers, &options.kv_size);
        options.store_path = take_text(&from);
        options.kv_policy = take_policy(&from, &policy);
        take32(&from.numbers, &options.max_draft);
        take64(&from.numbers, &options.draft_kv_bytes);
        options.draft_model = take_text(&from);
        options.model = &of_model;
        options.store_options = &of_store;
        check(&call, pagoda_generator_open(path, &options, &generator, &call.error));
    }
    end(&call);
    return HANDLE(generator);
}

/* A request as GenerateRequest.pack lays it out. What it points to ends with the call. */
static const pagoda_generate_request *unpacked(call *call, jlongArray numbers, jbyteArray names, jintArray lists,
                                               jintArray tokens, jobject direct, jlong cancel) {
    packed from = unpack(call, numbers, names, lists);
    pagoda_generate_request *request = room(call, 1, sizeof *request);
    pagoda_kv_policy *policy = room(call, 1, sizeof *policy);
    pagoda_beam_options *beams = room(call, 1, sizeof *beams);
    if (call->failed) return NULL;
    *request = (pagoda_generate_request)PAGODA_GENERATE_REQUEST_INIT;
    take32(&from.numbers, &request->max_new_tokens);
    take32(&from.numbers, &request->min_new_tokens);
    take32(&from.numbers, &request->do_sample);
    take_float(&from.numbers, &request->temperature);
    take32(&from.numbers, &request->top_k);
    take_float(&from.numbers, &request->top_p);
    take_float(&from.numbers, &request->min_p);
    take_float(&from.numbers, &request->repetition_penalty);
    take_float(&from.numbers, &request->presence_penalty);
    take_float(&from.numbers, &request->frequency_penalty);
    take32(&from.numbers, &request->no_repeat_ngram_size);
    take32(&from.numbers, &request->forced_eos);
    take32(&from.numbers, &request->ignore_eos);
    take32(&from.numbers, &request->include_stop);
    take32(&from.numbers, &request->skip_special);
    take32(&from.numbers, &request->logprobs);
    take32(&from.numbers, &request->prompt_logprobs);
    take32(&from.numbers, &request->n);
    take32(&from.numbers, &request->echo);
    take32(&from.numbers, &request->priority);
    take32(&from.numbers, &request->context_end);
    take32(&from.numbers, &request->add_generation_prompt);
    take32(&from.numbers, &request->max_draft);
    take32(&from.numbers, &request->has_seed);
    /* Any number is a seed. */
    request->seed = (uint64_t)*from.numbers++;
    take64(&from.numbers, &request->timeout_us);
    request->prompt = take_text(&from);
    request->messages = take_text(&from);
    request->tools = take_text(&from);
    request->variables = take_text(&from);
    request->session = take_text(&from);
    request->grammar = take_text(&from);
    request->stop_count = take_count(&from);
    request->stop = texts(call, &from.texts, request->stop_count);
    request->stop_tokens = (const uint32_t *)take_ints(&from, &request->stop_token_count);
    const uint32_t *biased = (const uint32_t *)take_ints(&from, &request->logit_bias_count);
    const int32_t *bits = take_ints(&from, &request->logit_bias_count);
    pagoda_logit_bias *biases = room(call, request->logit_bias_count, sizeof *biases);
    for (size_t i = 0; biases && i < request->logit_bias_count; i++) {
        biases[i] = (pagoda_logit_bias)PAGODA_LOGIT_BIAS_INIT;
        biases[i].token = biased[i];
        memcpy(&biases[i].bias, &bits[i], sizeof biases[i].bias);
    }
    request->logit_bias = biases;
    request->kv_policy = take_policy(&from, policy);
    request->beams = take_beams(&from, beams);
    request->cancel = AS(pagoda_cancel, cancel);
    if (direct) {
        /* An empty buffer may have no address; NULL would be no list at all. */
        static const uint32_t none = 0;
        const void *address = (*call->env)->GetDirectBufferAddress(call->env, direct);
        request->tokens = address ? address : &none;
        request->token_count = (size_t)(*call->env)->GetDirectBufferCapacity(call->env, direct);
    } else {
        request->tokens = (const uint32_t *)ints(call, tokens, &request->token_count);
    }
    return request;
}

/* ---- answers ----------------------------------------------------------------------------------------------------- */

NATIVE(jlong, Generator, generate)(JNIEnv *env, SELF, jlong handle, jlongArray numbers, jbyteArray names,
                                   jintArray lists, jintArray tokens, jobject direct, jlong cancel) {
    call call = CALL;
    pagoda_generate_response *response = NULL;
    const pagoda_generate_request *request = unpacked(&call, numbers, names, lists, tokens, direct, cancel);
    if (!call.failed)
        check(&call, pagoda_generator_generate(AS(pagoda_generator, handle), request, &response, &call.error));
    end(&call);
    return HANDLE(response);
}

/* Tells Java of a token; false if it had no memory to hear it. */
static bool tell_token(JNIEnv *env, jobject generating, const pagoda_generate_token *token) {
    const pagoda_token_logprobs *logprobs = token->logprobs;
    jintArray top = NULL;
    jfloatArray top_logprobs = NULL;
    jbyteArray text = to_bytes(env, token->text, token->text_length);
    if (!text) return false;
    if (logprobs) {
        top = to_ints(env, logprobs->top_tokens, logprobs->top_count);
        top_logprobs = top ? to_floats(env, logprobs->top_logprobs, logprobs->top_count) : NULL;
        if (!top_logprobs) return false;
    }
    /* By an array: a float among variable arguments would become a double. */
    const jvalue all[] = {{.i = (jint)token->choice}, {.i = (jint)token->id}, {.i = token->finish_reason}, {.l = text},
                          {.f = logprobs ? logprobs->logprob : 0}, {.i = logprobs ? (jint)logprobs->rank : 0},
                          {.l = top}, {.l = top_logprobs}};
    (*env)->CallVoidMethodA(env, generating, token_of, all);
    return !(*env)->ExceptionCheck(env);
}

static void on_token(void *user_data, const pagoda_generate_token *token) {
    pending *generating = user_data;
    JNIEnv *env = enter();
    if (!env || !tell_token(env, generating->whom, token)) generating->lost = true;
    if (env) leave(env);
}

/* Tells Java of the end; false if it had no memory to hear it. */
static bool tell(JNIEnv *env, jobject generating, pagoda_status status, pagoda_generate_response *response,
                 const pagoda_error *error) {
    jthrowable failure = NULL;
    if (status != PAGODA_STATUS_OK) {
        failure = to_exception(env, status, error);
        if (!failure) {
            /* No memory, which is what is told then. */
            failure = (*env)->ExceptionOccurred(env);
            (*env)->ExceptionClear(env);
        }
    }
    (*env)->CallVoidMethod(env, generating, done, failure, HANDLE(response));
    return !(*env)->ExceptionCheck(env);
}

static void on_end(void *user_data, pagoda_status status, pagoda_generate_response *response,
                   const pagoda_error *error) {
    pending *generating = user_data;
    JNIEnv *env = enter();
    if (env && !generating->lost && tell(env, generating->whom, status, response, error)) over(env, generating);
    else untold(generating);
    pagoda_generate_response_free(response);
    if (env) leave(env);
}

NATIVE(void, Generator, generateAsync)(JNIEnv *env, SELF, jlong handle, jlongArray numbers, jbyteArray names,
                                       jintArray lists, jintArray tokens, jobject direct, jlong cancel,
                                       jboolean streams, jobject generating) {
    call call = CALL;
    const pagoda_generate_request *request = unpacked(&call, numbers, names, lists, tokens, direct, cancel);
    pending *waiting = await(&call, generating, 0);
    if (waiting &&
        !check(&call, pagoda_generator_generate_async(AS(pagoda_generator, handle), request, streams ? on_token : NULL,
                                                      on_end, waiting, &call.error)))
        over(env, waiting);
    end(&call);
}

NATIVE(jboolean, Generator, step)(JNIEnv *env, SELF, jlong handle) {
    call call = CALL;
    int32_t more = 0;
    check(&call, pagoda_generator_step(AS(pagoda_generator, handle), &more, &call.error));
    end(&call);
    return more != 0;
}

/* An array of objects; NULL if one of them is: then there is no memory, and an exception is pending. */
static jobjectArray to_objects(JNIEnv *env, jsize count, const jobject *objects) {
    for (jsize i = 0; i < count; i++)
        if (!objects[i]) return NULL;
    jobjectArray array = (*env)->NewObjectArray(env, count, object_class, NULL);
    for (jsize i = 0; array && i < count; i++) (*env)->SetObjectArrayElement(env, array, i, objects[i]);
    return array;
}

NATIVE(jobjectArray, Generator, responseInfo)(JNIEnv *env, SELF, jlong response) {
    call call = CALL;
    pagoda_generate_info info = PAGODA_GENERATE_INFO_INIT;
    jobjectArray all = NULL;
    if (check(&call, pagoda_generate_response_info(AS(pagoda_generate_response, response), &info, &call.error))) {
        const jlong numbers[] = {info.cached_tokens, (jlong)info.computed_tokens, (jlong)info.choice_count,
                                 (jlong)info.prompt_logprob_count};
        jobject parts[3] = {to_longs(env, numbers, 4)};
        if (parts[0]) parts[1] = to_ints(env, info.prompt_tokens, info.prompt_token_count);
        if (parts[1]) parts[2] = to_text(env, info.version);
        all = to_objects(env, 3, parts);
    }
    end(&call);
    return all;
}

NATIVE(jobjectArray, Generator, responseChoice)(JNIEnv *env, SELF, jlong response, jlong index) {
    call call = CALL;
    pagoda_generate_choice choice = PAGODA_GENERATE_CHOICE_INIT;
    jobjectArray all = NULL;
    if (check(&call, pagoda_generate_response_choice(AS(pagoda_generate_response, response), (size_t)index, &choice,
                                                     &call.error))) {
        jint score;
        memcpy(&score, &choice.score, sizeof score);
        const jlong numbers[] = {choice.finish_reason, (jlong)choice.logprob_count, (jlong)choice.queued_ns,
                                 (jlong)choice.first_token_ns, (jlong)choice.generation_ns, choice.has_score, score};
        jobject parts[4] = {to_longs(env, numbers, 7)};
        if (parts[0]) parts[1] = to_bytes(env, choice.text, choice.text_length);
        if (parts[1]) parts[2] = to_ints(env, choice.tokens, choice.token_count);
        if (parts[2]) parts[3] = to_text(env, choice.missing ? choice.missing : "");
        all = to_objects(env, 4, parts);
    }
    end(&call);
    return all;
}

/* Of a token of an answer; with `choice` -1 of one of the prompt. */
NATIVE(jobjectArray, Generator, responseLogprobs)(JNIEnv *env, SELF, jlong handle, jlong choice, jlong index) {
    call call = CALL;
    pagoda_token_logprobs logprobs = PAGODA_TOKEN_LOGPROBS_INIT;
    const pagoda_generate_response *response = AS(pagoda_generate_response, handle);
    jobjectArray all = NULL;
    const pagoda_status status =
        choice < 0
            ? pagoda_generate_response_prompt_logprobs(response, (size_t)index, &logprobs, &call.error)
            : pagoda_generate_response_logprobs(response, (size_t)choice, (size_t)index, &logprobs, &call.error);
    if (check(&call, status)) {
        jint own[2] = {0, (jint)logprobs.rank};
        memcpy(&own[0], &logprobs.logprob, sizeof own[0]);
        jobject parts[3] = {to_ints(env, own, 2)};
        if (parts[0]) parts[1] = to_ints(env, logprobs.top_tokens, logprobs.top_count);
        if (parts[1]) parts[2] = to_floats(env, logprobs.top_logprobs, logprobs.top_count);
        all = to_objects(env, 3, parts);
    }
    end(&call);
    return all;
}

NATIVE(void, Generator, freeResponse)(__attribute__((unused)) JNIEnv *env, SELF, jlong response) {
    pagoda_generate_response_free(AS(pagoda_generate_response, response));
}

/* ---- tokens, sessions, state ------------------------------------------------------------------------------------- */

NATIVE(jintArray, Generator, tokenize)(JNIEnv *env, SELF, jlong handle, jlongArray numbers, jbyteArray names,
                                       jintArray lists, jintArray tokens, jobject direct) {
    call call = CALL;
    size_t count = 0;
    jintArray made = NULL;
    const pagoda_generator *generator = AS(pagoda_generator, handle);
    const pagoda_generate_request *request = unpacked(&call, numbers, names, lists, tokens, direct, 0);
    if (!call.failed && check(&call, pagoda_generator_tokenize(generator, request, NULL, 0, &count, &call.error))) {
        uint32_t *found = room(&call, count, sizeof *found);
        if (found && check(&call, pagoda_generator_tokenize(generator, request, found, count, &count, &call.error)))
            made = to_ints(env, found, count);
    }
    end(&call);
    return made;
}

NATIVE(jbyteArray, Generator, detokenize)(JNIEnv *env, SELF, jlong handle, jintArray tokens, jboolean skip_special) {
    call call = CALL;
    size_t count, length = 0;
    jbyteArray text = NULL;
    const pagoda_generator *generator = AS(pagoda_generator, handle);
    const uint32_t *all = (const uint32_t *)ints(&call, tokens, &count);
    if (!call.failed && check(&call, pagoda_generator_detokenize(generator, all, count, skip_special ? 1 : 0, NULL, 0,
                                                                 &length, &call.error))) {
        char *buffer = room(&call, length, 1);
        if (buffer && check(&call, pagoda_generator_detokenize(generator, all, count, skip_special ? 1 : 0, buffer,
                                                               length, &length, &call.error)))
            text = to_bytes(env, buffer, length - 1);
    }
    end(&call);
    return text;
}

/* A function of pagoda.h that counts sessions. */
typedef pagoda_status count_sessions(const pagoda_generator *, const char *const *, size_t, size_t *, pagoda_error **);

static jlong counted(JNIEnv *env, count_sessions *function, jlong handle, jbyteArray names, jlong name_count) {
    call call = CALL;
    size_t count = 0;
    const char *name = text(&call, names);
    const char **sessions = texts(&call, &name, call.failed ? 0 : (size_t)name_count);
    if (!call.failed)
        check(&call, function(AS(pagoda_generator, handle), sessions, (size_t)name_count, &count, &call.error));
    end(&call);
    return (jlong)count;
}

NATIVE(jlong, Generator, forget)(JNIEnv *env, SELF, jlong handle, jbyteArray sessions, jlong count) {
    return counted(env, &pagoda_generator_forget, handle, sessions, count);
}

NATIVE(jlong, Generator, unload)(JNIEnv *env, SELF, jlong handle, jbyteArray sessions, jlong count) {
    return counted(env, &pagoda_generator_unload, handle, sessions, count);
}

NATIVE(jlong, Generator, prefetch)(JNIEnv *env, SELF, jlong handle, jbyteArray sessions, jlong count) {
    return counted(env, &pagoda_generator_prefetch, handle, sessions, count);
}

NATIVE(jlong, Generator, clear)(JNIEnv *env, SELF, jlong handle, jboolean stored) {
    call call = CALL;
    size_t cleared = 0;
    check(&call, pagoda_generator_clear(AS(pagoda_generator, handle), stored ? 1 : 0, &cleared, &call.error));
    end(&call);
    return (jlong)cleared;
}

NATIVE(void, Generator, setSpeculation)(JNIEnv *env, SELF, jlong handle, jboolean on, jboolean clear) {
    call call = CALL;
    check(&call, pagoda_generator_set_speculation(AS(pagoda_generator, handle), on ? 1 : 0, clear ? 1 : 0, &call.error));
    end(&call);
}

/* The provider and the device go into `where`. */
NATIVE(jbyteArray, Generator, provider)(JNIEnv *env, SELF, jlong handle, jlongArray where) {
    call call = CALL;
    size_t length = 0;
    pagoda_provider provider = 0;
    int32_t device = -1;
    jbyteArray reason = NULL;
    const pagoda_generator *generator = AS(pagoda_generator, handle);
    if (check(&call, pagoda_generator_provider(generator, &provider, &device, NULL, 0, &length, &call.error))) {
        char *buffer = room(&call, length, 1);
        if (buffer &&
            check(&call, pagoda_generator_provider(generator, &provider, &device, buffer, length, &length, &call.error))) {
            const jlong both[] = {provider, device};
            (*env)->SetLongArrayRegion(env, where, 0, 2, both);
            reason = to_bytes(env, buffer, length - 1);
        }
    }
    end(&call);
    return reason;
}

NATIVE(jbyteArray, Generator, info)(JNIEnv *env, SELF, jlong handle) {
    call call = CALL;
    size_t length = 0;
    jbyteArray info = NULL;
    const pagoda_generator *generator = AS(pagoda_generator, handle);
    if (check(&call, pagoda_generator_info(generator, NULL, 0, &length, &call.error))) {
        char *buffer = room(&call, length, 1);
        if (buffer && check(&call, pagoda_generator_info(generator, buffer, length, &length, &call.error)))
            info = to_bytes(env, buffer, length - 1);
    }
    end(&call);
    return info;
}

NATIVE(jlongArray, Generator, stats)(JNIEnv *env, SELF, jlong handle) {
    call call = CALL;
    pagoda_generator_stats stats = PAGODA_GENERATOR_STATS_INIT;
    jlongArray numbers = NULL;
    if (check(&call, pagoda_generator_get_stats(AS(pagoda_generator, handle), &stats, &call.error)))
        numbers = to_longs(env, STATS_NUMBERS(stats), STATS_COUNT(stats));
    end(&call);
    return numbers;
}

NATIVE(jlongArray, Generator, kvStats)(JNIEnv *env, SELF, jlong handle) {
    call call = CALL;
    pagoda_kv_stats stats = PAGODA_KV_STATS_INIT;
    jlongArray numbers = NULL;
    if (check(&call, pagoda_generator_get_kv_stats(AS(pagoda_generator, handle), &stats, &call.error)))
        numbers = to_longs(env, STATS_NUMBERS(stats), STATS_COUNT(stats));
    end(&call);
    return numbers;
}

NATIVE(void, Generator, free)(__attribute__((unused)) JNIEnv *env, SELF, jlong handle) {
    pagoda_generator_free(AS(pagoda_generator, handle));
}
