/* ai.pagoda.Tensor */
#include "common.h"

#include "ai_pagoda_Tensor.h"

NATIVE(jlong, Tensor, make)(JNIEnv *env, SELF, jint type, jlongArray dims) {
    call call = CALL;
    size_t rank;
    pagoda_tensor *tensor = NULL;
    const int64_t *shape = longs(&call, dims, &rank);
    if (!call.failed) check(&call, pagoda_tensor_new(type, shape, rank, &tensor, &call.error));
    end(&call);
    return HANDLE(tensor);
}

NATIVE(jlong, Tensor, makeStrings)(JNIEnv *env, SELF, jbyteArray all, jintArray sizes, jlongArray dims) {
    call call = CALL;
    size_t length, rank, count = (size_t)(*env)->GetArrayLength(env, sizes);
    pagoda_tensor *tensor = NULL;
    const char *at = bytes(&call, all, &length);
    const int64_t *shape = longs(&call, dims, &rank);
    jint *numbers = room(&call, count, sizeof *numbers);
    const char **values = room(&call, count, sizeof *values);
    size_t *lengths = room(&call, count, sizeof *lengths);
    if (!call.failed) {
        (*env)->GetIntArrayRegion(env, sizes, 0, (jsize)count, numbers);
        for (size_t i = 0; i < count; at += lengths[i++]) {
            values[i] = at;
            lengths[i] = (size_t)numbers[i];
        }
        check(&call, pagoda_tensor_new_strings(values, lengths, count, shape, rank, &tensor, &call.error));
    }
    end(&call);
    return HANDLE(tensor);
}

/* Pagoda is done with a buffer of Java's. If Java can not be entered it stays: nothing waits for it. */
static void release(void *buffer) {
    JNIEnv *env = enter();
    if (!env) return;
    (*env)->DeleteGlobalRef(env, buffer);
    leave(env);
}

NATIVE(jlong, Tensor, borrow)(JNIEnv *env, SELF, jint type, jlongArray dims, jobject memory, jlong size) {
    call call = CALL;
    size_t rank;
    pagoda_tensor *tensor = NULL;
    const int64_t *shape = longs(&call, dims, &rank);
    jobject buffer = kept(&call, memory);
    if (buffer) {
        void *data = (*env)->GetDirectBufferAddress(env, memory);
        if (!check(&call, pagoda_tensor_borrow(type, shape, rank, data, (size_t)size, release, buffer, &tensor,
                                               &call.error)))
            (*env)->DeleteGlobalRef(env, buffer);
    }
    end(&call);
    return HANDLE(tensor);
}

NATIVE(jint, Tensor, type)(JNIEnv *env, SELF, jlong handle) {
    call call = CALL;
    pagoda_element_type type = PAGODA_ELEMENT_TYPE_UNDEFINED;
    check(&call, pagoda_tensor_type(AS(pagoda_tensor, handle), &type, &call.error));
    end(&call);
    return type;
}

NATIVE(jlongArray, Tensor, dims)(JNIEnv *env, SELF, jlong handle) {
    call call = CALL;
    const int64_t *dims = NULL;
    size_t rank = 0;
    jlongArray shape = NULL;
    if (check(&call, pagoda_tensor_dims(AS(pagoda_tensor, handle), &dims, &rank, &call.error)))
        shape = to_longs(env, (const jlong *)dims, (jsize)rank);
    end(&call);
    return shape;
}

/* NULL, and no exception, for what is too large for a buffer. */
NATIVE(jobject, Tensor, view)(JNIEnv *env, SELF, jlong handle) {
    static char nothing;
    call call = CALL;
    void *data = NULL;
    size_t size = 0;
    jobject buffer = NULL;
    if (check(&call, pagoda_tensor_data(AS(pagoda_tensor, handle), &data, &size, &call.error)) && size <= INT32_MAX)
        buffer = (*env)->NewDirectByteBuffer(env, data ? data : &nothing, (jlong)size);
    end(&call);
    return buffer;
}

NATIVE(jbyteArray, Tensor, string)(JNIEnv *env, SELF, jlong handle, jlong index) {
    call call = CALL;
    const char *text = NULL;
    size_t length = 0;
    jbyteArray string = NULL;
    if (check(&call, pagoda_tensor_string(AS(pagoda_tensor, handle), (size_t)index, &text, &length, &call.error)))
        string = to_bytes(env, text, length);
    end(&call);
    return string;
}

NATIVE(void, Tensor, free)(__attribute__((unused)) JNIEnv *env, SELF, jlong handle) {
    pagoda_tensor_free(AS(pagoda_tensor, handle));
}
