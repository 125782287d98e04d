#include "common.h"

#include "ai_pagoda_Native.h"

#include <pthread.h>

static JavaVM *vm;
static jclass exception_class;
static jmethodID new_exception;
static pthread_key_t attached;

static void detach(__attribute__((unused)) void *value) { (*vm)->DetachCurrentThread(vm); }

JNIEXPORT jint JNICALL JNI_OnLoad(JavaVM *java, __attribute__((unused)) void *reserved) {
    JNIEnv *env = NULL;
    vm = java;
    if ((*vm)->GetEnv(vm, (void **)&env, JNI_VERSION_10) != JNI_OK) return JNI_ERR;
    if (pthread_key_create(&attached, detach) != 0) return JNI_ERR;
    jclass found = (*env)->FindClass(env, "ai/pagoda/PagodaException");
    if (!found) return JNI_ERR;
    exception_class = (*env)->NewGlobalRef(env, found);
    new_exception = (*env)->GetMethodID(env, found, "<init>", "(I[B[B)V");
    if (!exception_class || !new_exception) return JNI_ERR;
    return find_log(env) && find_run(env) && find_ranking(env) && find_generating(env) ? JNI_VERSION_10 : JNI_ERR;
}

NATIVE(void, Native, checkAbi)(JNIEnv *env, SELF) {
    call call = CALL;
    check(&call, pagoda_abi_check(PAGODA_ABI_VERSION, &call.error));
    end(&call);
}

/* ---- a call ------------------------------------------------------------------------------------------------------ */

void end(call *call) {
    for (int i = 0; i < call->count; i++) free(call->blocks[i]);
    pagoda_error_free(call->error);
}

static void no_memory(call *call) {
    JNIEnv *env = call->env;
    call->failed = true;
    jclass type = (*env)->FindClass(env, "java/lang/OutOfMemoryError");
    if (type) (*env)->ThrowNew(env, type, "no native memory for a call");
}

bool check(call *call, pagoda_status status) {
    if (status == PAGODA_STATUS_OK) return true;
    JNIEnv *env = call->env;
    jthrowable thrown = to_exception(env, status, call->error);
    if (thrown) (*env)->Throw(env, thrown);
    call->failed = true;
    return false;
}

jthrowable to_exception(JNIEnv *env, pagoda_status status, const pagoda_error *error) {
    jbyteArray message = to_text(env, pagoda_error_message(error));
    jbyteArray argument = message ? to_text(env, pagoda_error_argument(error)) : NULL;
    if (!argument) return NULL;
    return (*env)->NewObject(env, exception_class, new_exception, (jint)status, message, argument);
}

jobject kept(call *call, jobject object) {
    if (call->failed) return NULL;
    jobject reference = (*call->env)->NewGlobalRef(call->env, object);
    if (!reference) no_memory(call);
    return reference;
}

/* ---- from Java --------------------------------------------------------------------------------------------------- */

void *room(call *call, size_t count, size_t size) {
    if (call->failed) return NULL;
    const size_t most = sizeof call->blocks / sizeof *call->blocks;
    void *block = (size_t)call->count < most ? calloc(count + 1, size) : NULL;
    if (!block) no_memory(call);
    else call->blocks[call->count++] = block;
    return block;
}

/* Room for an array, and how long it is; NULL where there is nothing to copy. */
static void *room_for(call *call, jarray array, size_t *count, size_t size) {
    *count = 0;
    if (call->failed || !array) return NULL;
    *count = (size_t)(*call->env)->GetArrayLength(call->env, array);
    return room(call, *count, size);
}

int64_t *longs(call *call, jlongArray array, size_t *count) {
    int64_t *copy = room_for(call, array, count, sizeof *copy);
    if (copy) (*call->env)->GetLongArrayRegion(call->env, array, 0, (jsize)*count, (jlong *)copy);
    return copy;
}

int32_t *ints(call *call, jintArray array, size_t *count) {
    int32_t *copy = room_for(call, array, count, sizeof *copy);
    if (copy) (*call->env)->GetIntArrayRegion(call->env, array, 0, (jsize)*count, copy);
    return copy;
}

float *floats(call *call, jfloatArray array, size_t *count) {
    float *copy = room_for(call, array, count, sizeof *copy);
    if (copy) (*call->env)->GetFloatArrayRegion(call->env, array, 0, (jsize)*count, copy);
    return copy;
}

char *bytes(call *call, jbyteArray array, size_t *count) {
    char *copy = room_for(call, array, count, sizeof *copy);
    if (copy) (*call->env)->GetByteArrayRegion(call->env, array, 0, (jsize)*count, (jbyte *)copy);
    return copy;
}

const char *text(call *call, jbyteArray array) {
    size_t count;
    return bytes(call, array, &count);
}

const char **texts(call *call, const char **at, size_t count) {
    const char **starts = room(call, count, sizeof *starts);
    for (size_t i = 0; starts && i < count; i++) {
        starts[i] = *at;
        *at += strlen(*at) + 1;
    }
    return starts;
}

void **handles(call *call, jlongArray array, size_t *count) {
    int64_t *numbers = longs(call, array, count);
    void **all = room(call, *count, sizeof *all);
    for (size_t i = 0; all && i < *count; i++) all[i] = AS(void, numbers[i]);
    return all;
}

void take32(const int64_t **numbers, int32_t *to) {
    int64_t number = *(*numbers)++;
    if (number != UNSET) *to = (int32_t)number;
}

void take64(const int64_t **numbers, uint64_t *to) {
    int64_t number = *(*numbers)++;
    if (number != UNSET) *to = (uint64_t)number;
}

void take_float(const int64_t **numbers, float *to) {
    int64_t number = *(*numbers)++;
    const uint32_t bits = (uint32_t)number;
    if (number != UNSET) memcpy(to, &bits, sizeof *to);
}

/* ---- to Java ----------------------------------------------------------------------------------------------------- */

jbyteArray to_bytes(JNIEnv *env, const char *data, size_t length) {
    jbyteArray array = (*env)->NewByteArray(env, (jsize)length);
    if (array) (*env)->SetByteArrayRegion(env, array, 0, (jsize)length, (const jbyte *)data);
    return array;
}

jbyteArray to_text(JNIEnv *env, const char *text) { return to_bytes(env, text, strlen(text)); }

jlongArray to_longs(JNIEnv *env, const jlong *data, jsize count) {
    jlongArray array = (*env)->NewLongArray(env, count);
    if (array) (*env)->SetLongArrayRegion(env, array, 0, count, data);
    return array;
}

jintArray to_ints(JNIEnv *env, const void *data, size_t count) {
    jintArray array = (*env)->NewIntArray(env, (jsize)count);
    if (array) (*env)->SetIntArrayRegion(env, array, 0, (jsize)count, data);
    return array;
}

jfloatArray to_floats(JNIEnv *env, const float *data, size_t count) {
    jfloatArray array = (*env)->NewFloatArray(env, (jsize)count);
    if (array) (*env)->SetFloatArrayRegion(env, array, 0, (jsize)count, data);
    return array;
}

/* ---- callbacks --------------------------------------------------------------------------------------------------- */

JNIEnv *enter(void) {
    JNIEnv *env = NULL;
    if ((*vm)->GetEnv(vm, (void **)&env, JNI_VERSION_10) != JNI_OK) {
        JavaVMAttachArgs arguments = {JNI_VERSION_10, "pagoda", NULL};
        if ((*vm)->AttachCurrentThreadAsDaemon(vm, (void **)&env, &arguments) != JNI_OK) return NULL;
        if (pthread_setspecific(attached, vm) != 0) {
            detach(NULL);
            return NULL;
        }
    }
    if ((*env)->PushLocalFrame(env, 16) == 0) return env;
    (*env)->ExceptionClear(env);
    return NULL;
}

void leave(JNIEnv *env) {
    if ((*env)->ExceptionCheck(env)) (*env)->ExceptionClear(env);
    (*env)->PopLocalFrame(env, NULL);
}

/* ---- asynchronous calls ------------------------------------------------------------------------------------------ */

static pthread_mutex_t telling = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t one_more = PTHREAD_COND_INITIALIZER;
static pending *all_untold;

pending *await(call *call, jobject whom, size_t made) {
    jobject reference = kept(call, whom);
    if (!reference) return NULL;
    pending *waiting = malloc(sizeof *waiting);
    if (waiting) {
        *waiting = (pending){.whom = reference, .made = made};
    } else {
        no_memory(call);
        (*call->env)->DeleteGlobalRef(call->env, reference);
    }
    return waiting;
}

void over(JNIEnv *env, pending *pending) {
    (*env)->DeleteGlobalRef(env, pending->whom);
    free(pending);
}

void untold(pending *pending) {
    pthread_mutex_lock(&telling);
    pending->next = all_untold;
    all_untold = pending;
    pthread_cond_signal(&one_more);
    pthread_mutex_unlock(&telling);
}

/* Waits for one that could not be told; NULL if there is no memory for that either, and then it is still to be told. */
NATIVE(jobject, Native, untold)(JNIEnv *env, SELF) {
    pthread_mutex_lock(&telling);
    while (!all_untold) pthread_cond_wait(&one_more, &telling);
    pending *first = all_untold;
    all_untold = first->next;
    pthread_mutex_unlock(&telling);
    jobject whom = (*env)->NewLocalRef(env, first->whom);
    if (whom) over(env, first);
    else untold(first);
    return whom;
}
