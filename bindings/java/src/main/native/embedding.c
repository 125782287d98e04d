/* ai.pagoda.Embeddings */
#include "common.h"

#include "ai_pagoda_Embeddings.h"

NATIVE(jlong, Embeddings, open)(JNIEnv *env, SELF, jbyteArray path) {
    call call = CALL;
    pagoda_embeddings *embedding = NULL;
    const char *file = text(&call, path);
    if (!call.failed) check(&call, pagoda_embeddings_open(file, &embedding, &call.error));
    end(&call);
    return HANDLE(embedding);
}

NATIVE(void, Embeddings, estimate)(JNIEnv *env, SELF, jbyteArray path, jlongArray both) {
    call call = CALL;
    uint64_t memory = 0, disk = 0;
    const char *file = text(&call, path);
    if (!call.failed && check(&call, pagoda_embeddings_estimate(file, &memory, &disk, &call.error))) {
        const jlong numbers[] = {(jlong)memory, (jlong)disk};
        (*env)->SetLongArrayRegion(env, both, 0, 2, numbers);
    }
    end(&call);
}

NATIVE(void, Embeddings, add)(JNIEnv *env, SELF, jlong handle, jbyteArray model, jbyteArray folder) {
    call call = CALL;
    const char *json = text(&call, model), *path = text(&call, folder);
    if (!call.failed) check(&call, pagoda_embeddings_add(AS(pagoda_embeddings, handle), json, path, &call.error));
    end(&call);
}

NATIVE(void, Embeddings, retire)(JNIEnv *env, SELF, jlong handle, jbyteArray model) {
    call call = CALL;
    const char *name = text(&call, model);
    if (!call.failed) check(&call, pagoda_embeddings_retire(AS(pagoda_embeddings, handle), name, &call.error));
    end(&call);
}

NATIVE(jlong, Embeddings, dim)(JNIEnv *env, SELF, jlong handle, jbyteArray table) {
    call call = CALL;
    size_t dim = 0;
    const char *name = text(&call, table);
    if (!call.failed) check(&call, pagoda_embeddings_dim(AS(pagoda_embeddings, handle), name, &dim, &call.error));
    end(&call);
    return (jlong)dim;
}

/* What a lookup is of, and where its result goes. */
typedef struct {
    const char *table;
    const int64_t *keys;
    size_t key_count;
    jlongArray offsets; /* null: a row for each key */
    pagoda_combiner combiner;
    pagoda_lookup_options options;
    float *numbers;
    size_t number_count;
    uint8_t *found;
} lookup;

static bool look(call *call, jlong handle, const lookup *of) {
    const pagoda_embeddings *embedding = AS(pagoda_embeddings, handle);
    size_t offset_count;
    const int64_t *offsets = longs(call, of->offsets, &offset_count);
    if (call->failed) return false;
    if (!of->offsets)
        return check(call, pagoda_embeddings_lookup(embedding, of->table, of->keys, of->key_count, &of->options,
                                                   of->numbers, of->number_count, of->found, &call->error));
    return check(call, pagoda_embeddings_pool(embedding, of->table, of->keys, of->key_count, offsets, offset_count,
                                             of->combiner, &of->options, of->numbers, of->number_count, of->found,
                                             &call->error));
}

static pagoda_lookup_options lookup_options(jint miss, jlong limit_us) {
    pagoda_lookup_options options = PAGODA_LOOKUP_OPTIONS_INIT;
    options.miss = miss;
    options.limit_us = (uint64_t)limit_us;
    return options;
}

NATIVE(void, Embeddings, look)(JNIEnv *env, SELF, jlong handle, jbyteArray table, jlongArray keys, jlongArray offsets,
                              jint combiner, jint miss, jlong limit_us, jfloatArray numbers, jbyteArray found) {
    call call = CALL;
    lookup of = {.offsets = offsets, .combiner = combiner, .options = lookup_options(miss, limit_us)};
    of.table = text(&call, table);
    of.keys = longs(&call, keys, &of.key_count);
    of.number_count = (size_t)(*env)->GetArrayLength(env, numbers);
    of.numbers = room(&call, of.number_count, sizeof *of.numbers);
    of.found = room(&call, of.key_count, 1);
    if (look(&call, handle, &of)) {
        (*env)->SetFloatArrayRegion(env, numbers, 0, (jsize)of.number_count, of.numbers);
        (*env)->SetByteArrayRegion(env, found, 0, (jsize)of.key_count, (const jbyte *)of.found);
    }
    end(&call);
}

NATIVE(void, Embeddings, lookDirect)(JNIEnv *env, SELF, jlong handle, jbyteArray table, jobject keys, jlong key_count,
                                    jlongArray offsets, jint combiner, jint miss, jlong limit_us, jobject numbers,
                                    jlong number_count, jobject found) {
    call call = CALL;
    lookup of = {.offsets = offsets, .combiner = combiner, .options = lookup_options(miss, limit_us)};
    of.table = text(&call, table);
    of.keys = (*env)->GetDirectBufferAddress(env, keys);
    of.key_count = (size_t)key_count;
    of.numbers = (*env)->GetDirectBufferAddress(env, numbers);
    of.number_count = (size_t)number_count;
    of.found = found ? (*env)->GetDirectBufferAddress(env, found) : NULL;
    look(&call, handle, &of);
    end(&call);
}

NATIVE(void, Embeddings, upsert)(JNIEnv *env, SELF, jlong handle, jbyteArray table, jlong version, jlongArray keys,
                                jfloatArray numbers, jint reach) {
    call call = CALL;
    size_t key_count, number_count;
    const char *name = text(&call, table);
    const int64_t *which = longs(&call, keys, &key_count);
    const float *rows = floats(&call, numbers, &number_count);
    if (!call.failed)
        check(&call, pagoda_embeddings_upsert(AS(pagoda_embeddings, handle), name, (uint64_t)version, which, key_count,
                                             rows, number_count, reach, &call.error));
    end(&call);
}

NATIVE(void, Embeddings, delete)(JNIEnv *env, SELF, jlong handle, jbyteArray table, jlong version, jlongArray keys,
                                jint reach) {
    call call = CALL;
    size_t key_count;
    const char *name = text(&call, table);
    const int64_t *which = longs(&call, keys, &key_count);
    if (!call.failed)
        check(&call, pagoda_embeddings_delete(AS(pagoda_embeddings, handle), name, (uint64_t)version, which, key_count,
                                             reach, &call.error));
    end(&call);
}

NATIVE(jlong, Embeddings, prefetch)(JNIEnv *env, SELF, jlong handle, jbyteArray table, jlongArray keys) {
    call call = CALL;
    size_t key_count, queued = 0;
    const char *name = text(&call, table);
    const int64_t *which = longs(&call, keys, &key_count);
    if (!call.failed)
        check(&call,
              pagoda_embeddings_prefetch(AS(pagoda_embeddings, handle), name, which, key_count, &queued, &call.error));
    end(&call);
    return (jlong)queued;
}

NATIVE(void, Embeddings, refresh)(JNIEnv *env, SELF, jlong handle, jbyteArray table) {
    call call = CALL;
    const char *name = text(&call, table);
    if (!call.failed) check(&call, pagoda_embeddings_refresh(AS(pagoda_embeddings, handle), name, &call.error));
    end(&call);
}

NATIVE(void, Embeddings, await)(JNIEnv *env, SELF, jlong handle) {
    call call = CALL;
    check(&call, pagoda_embeddings_wait(AS(pagoda_embeddings, handle), &call.error));
    end(&call);
}

NATIVE(jlongArray, Embeddings, stats)(JNIEnv *env, SELF, jlong handle, jbyteArray table) {
    call call = CALL;
    pagoda_table_stats stats = PAGODA_TABLE_STATS_INIT;
    jlongArray numbers = NULL;
    const char *name = text(&call, table);
    if (!call.failed &&
        check(&call, pagoda_embeddings_get_stats(AS(pagoda_embeddings, handle), name, &stats, &call.error)))
        numbers = to_longs(env, STATS_NUMBERS(stats), STATS_COUNT(stats));
    end(&call);
    return numbers;
}

NATIVE(void, Embeddings, free)(__attribute__((unused)) JNIEnv *env, SELF, jlong handle) {
    pagoda_embeddings_free(AS(pagoda_embeddings, handle));
}
