/* ai.pagoda.Store */
#include "common.h"

#include "ai_pagoda_Store.h"

pagoda_store_options store_options(call *call, jlongArray numbers) {
    pagoda_store_options options = PAGODA_STORE_OPTIONS_INIT;
    size_t count;
    const int64_t *from = longs(call, numbers, &count);
    if (call->failed) return options;
    take32(&from, &options.durability);
    take64(&from, &options.max_bytes);
    take64(&from, &options.segment_bytes);
    take64(&from, &options.queue_bytes);
    take64(&from, &options.garbage_bytes);
    return options;
}

NATIVE(jlong, Store, open)(JNIEnv *env, SELF, jbyteArray folder, jlongArray numbers) {
    call call = CALL;
    pagoda_store *store = NULL;
    const pagoda_store_options options = store_options(&call, numbers);
    const char *path = text(&call, folder);
    if (!call.failed) check(&call, pagoda_store_open(path, &options, &store, &call.error));
    end(&call);
    return HANDLE(store);
}

NATIVE(void, Store, flush)(JNIEnv *env, SELF, jlong handle) {
    call call = CALL;
    check(&call, pagoda_store_flush(AS(pagoda_store, handle), &call.error));
    end(&call);
}

NATIVE(void, Store, compact)(JNIEnv *env, SELF, jlong handle) {
    call call = CALL;
    check(&call, pagoda_store_compact(AS(pagoda_store, handle), &call.error));
    end(&call);
}

NATIVE(jlongArray, Store, stats)(JNIEnv *env, SELF, jlong handle) {
    call call = CALL;
    pagoda_store_stats stats = PAGODA_STORE_STATS_INIT;
    jlongArray numbers = NULL;
    if (check(&call, pagoda_store_get_stats(AS(pagoda_store, handle), &stats, &call.error)))
        numbers = to_longs(env, STATS_NUMBERS(stats), STATS_COUNT(stats));
    end(&call);
    return numbers;
}

NATIVE(void, Store, free)(__attribute__((unused)) JNIEnv *env, SELF, jlong handle) {
    pagoda_store_free(AS(pagoda_store, handle));
}
