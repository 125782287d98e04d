/* ai.pagoda.Engine */
#include "common.h"

#include "ai_pagoda_Engine.h"

static jmethodID done; /* of Engine.Ranking */

bool find_ranking(JNIEnv *env) {
    jclass ranking = (*env)->FindClass(env, "ai/pagoda/Engine$Ranking");
    if (ranking) done = (*env)->GetMethodID(env, ranking, "done", "(Ljava/lang/Throwable;[F[J[B)V");
    return done != NULL;
}

/* Shapes, four numbers each. */
static const pagoda_graph_shape *shapes(call *call, jlongArray numbers, size_t *shape_count) {
    size_t count;
    const int64_t *from = longs(call, numbers, &count);
    pagoda_graph_shape *shapes = room(call, count / 4, sizeof *shapes);
    *shape_count = count / 4;
    for (size_t i = 0; shapes && i < count / 4; i++, from += 4) {
        pagoda_graph_shape shape = PAGODA_GRAPH_SHAPE_INIT;
        shape.users = (int32_t)from[0];
        shape.rows = (int32_t)from[1];
        shape.candidates = (int32_t)from[2];
        shape.pages = (int32_t)from[3];
        shapes[i] = shape;
    }
    return shapes;
}

NATIVE(jlong, Engine, open)(JNIEnv *env, SELF, jbyteArray folder, jlongArray numbers, jlongArray model,
                            jbyteArray onnxruntime, jbyteArray profile, jlongArray graphs, jbyteArray tiers,
                            jbyteArray store, jlongArray store_numbers) {
    call call = CALL;
    size_t count;
    pagoda_engine *engine = NULL;
    pagoda_engine_options options = PAGODA_ENGINE_OPTIONS_INIT;
    const pagoda_model_options of_model = model_options(&call, model, onnxruntime, profile);
    const pagoda_store_options of_store = store_options(&call, store_numbers);
    const int64_t *from = longs(&call, numbers, &count);
    const char *path = text(&call, folder);
    options.model = &of_model;
    options.cuda_graphs = shapes(&call, graphs, &options.cuda_graph_count);
    options.table_tiers_path = text(&call, tiers);
    options.store_path = text(&call, store);
    options.store_options = &of_store;
    if (!call.failed) {
        take32(&from, &options.instances);
        take32(&from, &options.max_batch);
        take32(&from, &options.max_batch_rows);
        take32(&from, &options.queue);
        take32(&from, &options.kv_size_unit);
        take64(&from, &options.kv_size);
        take32(&from, &options.offload);
        take32(&from, &options.ahead_percent);
        take64(&from, &options.max_delay_us);
        take64(&from, &options.remember_bytes);
        take64(&from, &options.table_cache_bytes);
        take64(&from, &options.host_bytes);
        take32(&from, &options.kv_format);
        check(&call, pagoda_engine_open(path, &options, &engine, &call.error));
    }
    end(&call);
    return HANDLE(engine);
}

/* The lists of `features` features, `count` keys each, that lie one after the other; `at` moves behind them. */
static const int64_t **columns(call *call, const int64_t **at, size_t features, size_t count) {
    const int64_t **starts = room(call, features, sizeof *starts);
    for (size_t i = 0; starts && i < features; i++, *at += count) starts[i] = *at;
    return starts;
}

/* A request as RankRequest.Packed lays it out. */
static pagoda_rank_request unpacked(call *call, jlongArray numbers, jbyteArray names, jlong cancel) {
    pagoda_rank_request request = PAGODA_RANK_REQUEST_INIT;
    size_t count;
    const int64_t *at = longs(call, numbers, &count);
    const char *name = text(call, names);
    if (call->failed) return request;
    request.user = (uint64_t)at[0];
    request.start = at[1];
    request.event_count = (size_t)at[2];
    request.event_feature_count = (size_t)at[3];
    const bool event_times = at[4] != 0;
    request.user_feature_count = (size_t)at[5];
    request.candidate_count = (size_t)at[6];
    request.candidate_feature_count = (size_t)at[7];
    request.has_time = (int32_t)at[8];
    request.time = at[9];
    request.timeout_us = (uint64_t)at[10];
    request.cancel = AS(pagoda_cancel, cancel);
    at += 11;
    request.event_keys = columns(call, &at, request.event_feature_count, request.event_count);
    request.event_times = event_times ? at : NULL;
    at += event_times ? request.event_count : 0;
    request.user_keys = at;
    at += request.user_feature_count;
    request.candidate_keys = columns(call, &at, request.candidate_feature_count, request.candidate_count);
    request.event_features = texts(call, &name, request.event_feature_count);
    request.user_features = texts(call, &name, request.user_feature_count);
    request.candidate_features = texts(call, &name, request.candidate_feature_count);
    return request;
}

/* The numbers of a response for RankResponse. */
typedef struct {
    jlong fields[6];
} response;

static response response_of(const pagoda_rank_response *from) {
    return (response){{from->batched_with, (jlong)from->cached_rows, (jlong)from->computed_rows,
                       (jlong)from->queue_ns, (jlong)from->run_ns, (jlong)from->tasks}};
}

/* Returns the version of the model; the rest goes into `scores` and `answer`. */
NATIVE(jbyteArray, Engine, rank)(JNIEnv *env, SELF, jlong handle, jlongArray numbers, jbyteArray names, jlong cancel,
                                 jfloatArray scores, jlongArray answer) {
    call call = CALL;
    jbyteArray version = NULL;
    const pagoda_rank_request request = unpacked(&call, numbers, names, cancel);
    pagoda_rank_response how = PAGODA_RANK_RESPONSE_INIT;
    const size_t count = (size_t)(*env)->GetArrayLength(env, scores);
    float *made = room(&call, count, sizeof *made);
    if (!call.failed && check(&call, pagoda_engine_rank(AS(pagoda_engine, handle), &request, made, count, &how,
                                                        &call.error))) {
        const response all = response_of(&how);
        (*env)->SetFloatArrayRegion(env, scores, 0, (jsize)count, made);
        (*env)->SetLongArrayRegion(env, answer, 0, 6, all.fields);
        version = to_text(env, how.version);
    }
    end(&call);
    return version;
}

/* Tells Java; false if it had no memory to hear it. */
static bool tell(JNIEnv *env, jobject ranking, pagoda_status status, const float *scores, size_t count,
                 const pagoda_rank_response *how, const pagoda_error *error) {
    jthrowable failure = NULL;
    jfloatArray made = NULL;
    jlongArray answer = NULL;
    jbyteArray version = NULL;
    if (status != PAGODA_STATUS_OK) {
        failure = to_exception(env, status, error);
    } else {
        const response all = response_of(how);
        made = (*env)->NewFloatArray(env, (jsize)count);
        if (made) (*env)->SetFloatArrayRegion(env, made, 0, (jsize)count, scores);
        answer = made ? to_longs(env, all.fields, 6) : NULL;
        version = answer ? to_text(env, how->version) : NULL;
    }
    if (!failure && !version) {
        /* No memory, which is what is told then. */
        failure = (*env)->ExceptionOccurred(env);
        (*env)->ExceptionClear(env);
    }
    (*env)->CallVoidMethod(env, ranking, done, failure, made, answer, version);
    return !(*env)->ExceptionCheck(env);
}

static void ended(void *user_data, pagoda_status status, const float *scores, size_t count,
                  const pagoda_rank_response *how, const pagoda_error *error) {
    pending *ranking = user_data;
    JNIEnv *env = enter();
    if (env && tell(env, ranking->whom, status, scores, count, how, error)) over(env, ranking);
    else untold(ranking);
    if (env) leave(env);
}

NATIVE(void, Engine, rankAsync)(JNIEnv *env, SELF, jlong handle, jlongArray numbers, jbyteArray names, jlong cancel,
                                jobject ranking) {
    call call = CALL;
    const pagoda_rank_request request = unpacked(&call, numbers, names, cancel);
    pending *waiting = await(&call, ranking, 0);
    if (waiting &&
        !check(&call, pagoda_engine_rank_async(AS(pagoda_engine, handle), &request, ended, waiting, &call.error)))
        over(env, waiting);
    end(&call);
}

NATIVE(void, Engine, swap)(JNIEnv *env, SELF, jlong handle, jbyteArray folder) {
    call call = CALL;
    const char *path = text(&call, folder);
    if (!call.failed) check(&call, pagoda_engine_swap(AS(pagoda_engine, handle), path, &call.error));
    end(&call);
}

NATIVE(jlong, Engine, forget)(JNIEnv *env, SELF, jlong handle, jlongArray users) {
    call call = CALL;
    size_t count, forgotten = 0;
    const uint64_t *all = (const uint64_t *)longs(&call, users, &count);
    if (!call.failed)
        check(&call, pagoda_engine_forget(AS(pagoda_engine, handle), all, count, &forgotten, &call.error));
    end(&call);
    return (jlong)forgotten;
}

NATIVE(jlong, Engine, prefetch)(JNIEnv *env, SELF, jlong handle, jlongArray users) {
    call call = CALL;
    size_t count, started = 0;
    const uint64_t *all = (const uint64_t *)longs(&call, users, &count);
    if (!call.failed)
        check(&call, pagoda_engine_prefetch(AS(pagoda_engine, handle), all, count, &started, &call.error));
    end(&call);
    return (jlong)started;
}

NATIVE(jlong, Engine, unload)(JNIEnv *env, SELF, jlong handle, jlongArray users) {
    call call = CALL;
    size_t count, unloaded = 0;
    const uint64_t *all = (const uint64_t *)longs(&call, users, &count);
    if (!call.failed)
        check(&call, pagoda_engine_unload(AS(pagoda_engine, handle), all, count, &unloaded, &call.error));
    end(&call);
    return (jlong)unloaded;
}

/* The provider and the device go into `where`. */
NATIVE(jbyteArray, Engine, provider)(JNIEnv *env, SELF, jlong handle, jlongArray where) {
    call call = CALL;
    size_t length = 0;
    pagoda_provider provider = 0;
    int32_t device = -1;
    jbyteArray reason = NULL;
    const pagoda_engine *engine = AS(pagoda_engine, handle);
    if (check(&call, pagoda_engine_provider(engine, &provider, &device, NULL, 0, &length, &call.error))) {
        /* A swap may put a longer text in its place. */
        size_t capacity = length + 65536;
        char *buffer = room(&call, capacity, 1);
        if (buffer &&
            check(&call, pagoda_engine_provider(engine, &provider, &device, buffer, capacity, &length, &call.error))) {
            const jlong both[] = {provider, device};
            (*env)->SetLongArrayRegion(env, where, 0, 2, both);
            reason = to_bytes(env, buffer, length - 1);
        }
    }
    end(&call);
    return reason;
}

NATIVE(jbyteArray, Engine, tables)(JNIEnv *env, SELF, jlong handle) {
    call call = CALL;
    size_t length = 0;
    jbyteArray names = NULL;
    const pagoda_engine *engine = AS(pagoda_engine, handle);
    if (check(&call, pagoda_engine_tables(engine, NULL, 0, &length, &call.error))) {
        /* A swap may put a longer text in its place. */
        size_t capacity = length + 65536;
        char *buffer = room(&call, capacity, 1);
        if (buffer && check(&call, pagoda_engine_tables(engine, buffer, capacity, &length, &call.error)))
            names = to_bytes(env, buffer, length - 1);
    }
    end(&call);
    return names;
}

NATIVE(jlongArray, Engine, kvStats)(JNIEnv *env, SELF, jlong handle) {
    call call = CALL;
    pagoda_kv_stats stats = PAGODA_KV_STATS_INIT;
    jlongArray numbers = NULL;
    if (check(&call, pagoda_engine_get_kv_stats(AS(pagoda_engine, handle), &stats, &call.error)))
        numbers = to_longs(env, STATS_NUMBERS(stats), STATS_COUNT(stats));
    end(&call);
    return numbers;
}

NATIVE(jlongArray, Engine, tableStats)(JNIEnv *env, SELF, jlong handle, jbyteArray table) {
    call call = CALL;
    pagoda_table_stats stats = PAGODA_TABLE_STATS_INIT;
    jlongArray numbers = NULL;
    const char *name = text(&call, table);
    if (!call.failed &&
        check(&call, pagoda_engine_get_table_stats(AS(pagoda_engine, handle), name, &stats, &call.error)))
        numbers = to_longs(env, STATS_NUMBERS(stats), STATS_COUNT(stats));
    end(&call);
    return numbers;
}

NATIVE(jlong, Engine, tasks)(JNIEnv *env, SELF, jlong handle) {
    call call = CALL;
    size_t tasks = 0;
    check(&call, pagoda_engine_tasks(AS(pagoda_engine, handle), &tasks, &call.error));
    end(&call);
    return (jlong)tasks;
}

NATIVE(jbyteArray, Engine, info)(JNIEnv *env, SELF, jlong handle) {
    call call = CALL;
    size_t length = 0;
    jbyteArray info = NULL;
    const pagoda_engine *engine = AS(pagoda_engine, handle);
    if (check(&call, pagoda_engine_info(engine, NULL, 0, &length, &call.error))) {
        /* A swap may put a longer one in its place. */
        size_t capacity = length + 65536;
        char *buffer = room(&call, capacity, 1);
        if (buffer && check(&call, pagoda_engine_info(engine, buffer, capacity, &length, &call.error)))
            info = to_bytes(env, buffer, length - 1);
    }
    end(&call);
    return info;
}

NATIVE(jlongArray, Engine, stats)(JNIEnv *env, SELF, jlong handle) {
    call call = CALL;
    pagoda_engine_stats stats = PAGODA_ENGINE_STATS_INIT;
    jlongArray numbers = NULL;
    if (check(&call, pagoda_engine_get_stats(AS(pagoda_engine, handle), &stats, &call.error)))
        numbers = to_longs(env, STATS_NUMBERS(stats), STATS_COUNT(stats));
    end(&call);
    return numbers;
}

NATIVE(void, Engine, free)(__attribute__((unused)) JNIEnv *env, SELF, jlong handle) {
    pagoda_engine_free(AS(pagoda_engine, handle));
}
