/* ai.pagoda.KvCache and ai.pagoda.KvLease */
#include "common.h"

#include "ai_pagoda_KvCache.h"
#include "ai_pagoda_KvLease.h"

NATIVE(jlong, KvCache, open)(JNIEnv *env, SELF, jlongArray numbers, jbyteArray model_version) {
    call call = CALL;
    size_t count;
    pagoda_kv_cache *cache = NULL;
    pagoda_kv_options options = PAGODA_KV_OPTIONS_INIT;
    const int64_t *from = longs(&call, numbers, &count);
    options.model_version = text(&call, model_version);
    if (!call.failed) {
        take32(&from, &options.layers);
        take32(&from, &options.heads);
        take32(&from, &options.head_size);
        take32(&from, &options.page_size);
        take32(&from, &options.type);
        take32(&from, &options.size_unit);
        take64(&from, &options.size);
        take32(&from, &options.max_history);
        take32(&from, &options.overlap);
        take32(&from, &options.edited);
        take32(&from, &options.offload);
        take32(&from, &options.onload_in_background);
        take32(&from, &options.onload_threads);
        take32(&from, &options.ahead_percent);
        take32(&from, &options.device_id);
        options.store = AS(pagoda_store, *from);
        check(&call, pagoda_kv_cache_open(&options, &cache, &call.error));
    }
    end(&call);
    return HANDLE(cache);
}

NATIVE(jlong, KvCache, pool)(JNIEnv *env, SELF, jlong handle, jint layer) {
    call call = CALL;
    pagoda_tensor *pool = NULL;
    check(&call, pagoda_kv_cache_pool(AS(pagoda_kv_cache, handle), layer, &pool, &call.error));
    end(&call);
    return HANDLE(pool);
}

/* For each owner three numbers: the start, the length, the tier. */
NATIVE(void, KvCache, lookup)(JNIEnv *env, SELF, jlong handle, jlongArray owners, jlongArray found) {
    call call = CALL;
    size_t count;
    const int64_t *all = longs(&call, owners, &count);
    int64_t *starts = room(&call, count, sizeof *starts), *lengths = room(&call, count, sizeof *lengths);
    pagoda_tier *tiers = room(&call, count, sizeof *tiers);
    if (!call.failed && check(&call, pagoda_kv_cache_lookup(AS(pagoda_kv_cache, handle), (const uint64_t *)all, count,
                                                            starts, lengths, tiers, &call.error))) {
        for (size_t i = 0; i < count; i++) {
            const jlong three[] = {starts[i], lengths[i], tiers[i]};
            (*env)->SetLongArrayRegion(env, found, (jsize)(3 * i), 3, three);
        }
    }
    end(&call);
}

/* For each request five numbers, and the items of all one after the other. */
NATIVE(jlong, KvCache, prepare)(JNIEnv *env, SELF, jlong handle, jlongArray numbers, jlongArray items) {
    call call = CALL;
    size_t count, item_count;
    pagoda_kv_lease *lease = NULL;
    const int64_t *from = longs(&call, numbers, &count);
    const int64_t *item = longs(&call, items, &item_count);
    pagoda_kv_request *requests = room(&call, count / 5, sizeof *requests);
    if (!call.failed) {
        for (size_t i = 0; i < count / 5; i++, from += 5) {
            pagoda_kv_request request = PAGODA_KV_REQUEST_INIT;
            request.owner = (uint64_t)from[0];
            request.start = from[1];
            request.tokens = (int32_t)from[2];
            request.candidates = (int32_t)from[3];
            request.item_count = (size_t)from[4];
            request.items = request.item_count ? (const uint64_t *)item : NULL;
            item += request.item_count;
            requests[i] = request;
        }
        check(&call,
              pagoda_kv_cache_prepare(AS(pagoda_kv_cache, handle), requests, count / 5, &lease, &call.error));
    }
    end(&call);
    return HANDLE(lease);
}

NATIVE(jint, KvCache, fork)(JNIEnv *env, SELF, jlong handle, jlong from, jlong to, jint tokens) {
    call call = CALL;
    int32_t shared = 0;
    check(&call, pagoda_kv_cache_fork(AS(pagoda_kv_cache, handle), (uint64_t)from, (uint64_t)to, tokens, &shared,
                                      &call.error));
    end(&call);
    return shared;
}

/* In the three below null means all owners; an array without owners is not NULL to C either, and means none. */
NATIVE(jlong, KvCache, offload)(JNIEnv *env, SELF, jlong handle, jlongArray owners) {
    call call = CALL;
    size_t count, offloaded = 0;
    const uint64_t *all = (const uint64_t *)longs(&call, owners, &count);
    if (!call.failed)
        check(&call, pagoda_kv_cache_offload(AS(pagoda_kv_cache, handle), all, count, &offloaded, &call.error));
    end(&call);
    return (jlong)offloaded;
}

NATIVE(jlong, KvCache, evict)(JNIEnv *env, SELF, jlong handle, jlongArray owners, jint tiers) {
    call call = CALL;
    size_t count, evicted = 0;
    const uint64_t *all = (const uint64_t *)longs(&call, owners, &count);
    if (!call.failed)
        check(&call, pagoda_kv_cache_evict(AS(pagoda_kv_cache, handle), all, count, tiers, &evicted, &call.error));
    end(&call);
    return (jlong)evicted;
}

NATIVE(jlong, KvCache, prefetch)(JNIEnv *env, SELF, jlong handle, jlongArray owners) {
    call call = CALL;
    size_t count, started = 0;
    const uint64_t *all = (const uint64_t *)longs(&call, owners, &count);
    if (!call.failed)
        check(&call, pagoda_kv_cache_prefetch(AS(pagoda_kv_cache, handle), all, count, &started, &call.error));
    end(&call);
    return (jlong)started;
}

NATIVE(void, KvCache, flush)(JNIEnv *env, SELF, jlong handle) {
    call call = CALL;
    check(&call, pagoda_kv_cache_flush(AS(pagoda_kv_cache, handle), &call.error));
    end(&call);
}

NATIVE(jlongArray, KvCache, stats)(JNIEnv *env, SELF, jlong handle) {
    call call = CALL;
    pagoda_kv_stats stats = PAGODA_KV_STATS_INIT;
    jlongArray numbers = NULL;
    if (check(&call, pagoda_kv_cache_get_stats(AS(pagoda_kv_cache, handle), &stats, &call.error)))
        numbers = to_longs(env, STATS_NUMBERS(stats), STATS_COUNT(stats));
    end(&call);
    return numbers;
}

NATIVE(void, KvCache, free)(__attribute__((unused)) JNIEnv *env, SELF, jlong handle) {
    pagoda_kv_cache_free(AS(pagoda_kv_cache, handle));
}

NATIVE(jlong, KvLease, tensor)(JNIEnv *env, SELF, jlong handle, jint which) {
    call call = CALL;
    pagoda_tensor *tensor = NULL;
    check(&call, pagoda_kv_lease_tensor(AS(pagoda_kv_lease, handle), which, &tensor, &call.error));
    end(&call);
    return HANDLE(tensor);
}

NATIVE(jlongArray, KvLease, owner)(JNIEnv *env, SELF, jlong handle, jlong index) {
    call call = CALL;
    pagoda_kv_leased_owner owner = PAGODA_KV_LEASED_OWNER_INIT;
    jlongArray numbers = NULL;
    if (check(&call, pagoda_kv_lease_owner(AS(pagoda_kv_lease, handle), (size_t)index, &owner, &call.error))) {
        const jlong five[] = {(jlong)owner.owner, owner.start, owner.cached, owner.tokens, owner.trimmed};
        numbers = to_longs(env, five, 5);
    }
    end(&call);
    return numbers;
}

NATIVE(jboolean, KvLease, ready)(JNIEnv *env, SELF, jlong handle, jint layer) {
    call call = CALL;
    int32_t ready = 0;
    check(&call, pagoda_kv_lease_ready(AS(pagoda_kv_lease, handle), layer, &ready, &call.error));
    end(&call);
    return ready != 0;
}

NATIVE(void, KvLease, await)(JNIEnv *env, SELF, jlong handle, jint layer) {
    call call = CALL;
    check(&call, pagoda_kv_lease_wait(AS(pagoda_kv_lease, handle), layer, &call.error));
    end(&call);
}

NATIVE(void, KvLease, commit)(JNIEnv *env, SELF, jlong handle, jboolean wait) {
    call call = CALL;
    check(&call, pagoda_kv_lease_commit(AS(pagoda_kv_lease, handle), wait ? 1 : 0, &call.error));
    end(&call);
}

NATIVE(void, KvLease, abort)(JNIEnv *env, SELF, jlong handle) {
    call call = CALL;
    check(&call, pagoda_kv_lease_abort(AS(pagoda_kv_lease, handle), &call.error));
    end(&call);
}

NATIVE(void, KvLease, free)(__attribute__((unused)) JNIEnv *env, SELF, jlong handle) {
    pagoda_kv_lease_free(AS(pagoda_kv_lease, handle));
}
