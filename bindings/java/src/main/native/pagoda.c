/* ai.pagoda.Pagoda: what concerns the whole process. */
#include "common.h"

#include "ai_pagoda_Pagoda.h"

static jclass logging; /* Pagoda.Logging */
static jmethodID logged;
static jobject handler; /* of the log; Java's setLog is synchronized */

bool find_log(JNIEnv *env) {
    jclass found = (*env)->FindClass(env, "ai/pagoda/Pagoda$Logging");
    if (!found) return false;
    logging = (*env)->NewGlobalRef(env, found);
    logged = (*env)->GetStaticMethodID(env, found, "logged", "(Lai/pagoda/LogHandler;I[B[B)V");
    return logging && logged;
}

NATIVE(jint, Pagoda, abiVersion)(__attribute__((unused)) JNIEnv *env, SELF) { return (jint)pagoda_abi_version(); }

NATIVE(jlong, Pagoda, liveObjects)(__attribute__((unused)) JNIEnv *env, SELF) { return (jlong)pagoda_live_objects(); }

NATIVE(jint, Pagoda, versionNumber)(__attribute__((unused)) JNIEnv *env, SELF) {
    return (jint)pagoda_version_number();
}

NATIVE(jbyteArray, Pagoda, versionText)(JNIEnv *env, SELF) { return to_text(env, pagoda_version()); }

NATIVE(jbyteArray, Pagoda, statusName)(JNIEnv *env, SELF, jint status) {
    return to_text(env, pagoda_status_name(status));
}

NATIVE(jbyteArray, Pagoda, typeName)(JNIEnv *env, SELF, jint type) {
    return to_text(env, pagoda_element_type_name(type));
}

NATIVE(jbyteArray, Pagoda, metricsText)(JNIEnv *env, SELF) {
    call call = CALL;
    size_t length = 0;
    jbyteArray metrics = NULL;
    if (check(&call, pagoda_metrics_text(NULL, 0, &length, &call.error))) {
        /* It may grow meanwhile. */
        size_t capacity = 2 * length + 4096;
        char *buffer = room(&call, capacity, 1);
        if (buffer && check(&call, pagoda_metrics_text(buffer, capacity, &length, &call.error)))
            metrics = to_bytes(env, buffer, length - 1);
    }
    end(&call);
    return metrics;
}

static void line(void *to, pagoda_log_level level, const char *source, const char *message) {
    JNIEnv *env = enter();
    if (!env) return;
    jbyteArray who = to_text(env, source), what = who ? to_text(env, message) : NULL;
    if (what) (*env)->CallStaticVoidMethod(env, logging, logged, (jobject)to, (jint)level, who, what);
    leave(env);
}

NATIVE(void, Pagoda, setLog)(JNIEnv *env, SELF, jint level, jobject next) {
    call call = CALL;
    jobject other = next ? kept(&call, next) : NULL;
    if (!call.failed && check(&call, pagoda_log_set(level, other ? line : NULL, other, &call.error))) {
        jobject before = handler;
        handler = other;
        other = before;
    }
    if (other) (*env)->DeleteGlobalRef(env, other);
    end(&call);
}
