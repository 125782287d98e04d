/* What the files here share. Java calls with arrays and numbers, checked there; pagoda.h checks the rest. */
#ifndef PAGODA_JNI_COMMON_H
#define PAGODA_JNI_COMMON_H

#include <jni.h>
#include <pagoda.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* The function of a native method; the headers that javac makes of the classes check that it is one. */
#define NATIVE(result, type, name) JNIEXPORT result JNICALL Java_ai_pagoda_##type##_##name
#define SELF __attribute__((unused)) jobject self

/* A handle of pagoda.h out of Java's number, and back. */
#define AS(type, handle) ((type *)(uintptr_t)(handle))
#define HANDLE(object) ((jlong)(uintptr_t)(object))

/* As Native.UNSET. */
#define UNSET INT64_MIN

/* Numbers of a struct of statistics: all that follows struct_size, 8 bytes each. */
#define STATS_COUNT(stats) ((jsize)(sizeof(stats) / 8 - 1))
#define STATS_NUMBERS(stats) ((const jlong *)(const void *)&(stats) + 1)

/*
 * One call of a native method: the error that pagoda.h gives, and copies of Java's arrays, which end with it. Once
 * something has failed an exception is pending, and everything below does nothing more.
 */
typedef struct {
    JNIEnv *env;
    pagoda_error *error;
    bool failed;
    int count;
    void *blocks[12];
} call;

#define CALL {.env = env}

/* Frees what the call has. */
void end(call *call);

/* Throws what pagoda.h said, unless it said OK. Give it `&call->error` as the place for the error. */
bool check(call *call, pagoda_status status);

/* Memory that ends with the call, zeroed, and never of no size. */
void *room(call *call, size_t count, size_t size);

/* Copies of arrays; NULL of null. Texts have a NUL at the end already. */
int64_t *longs(call *call, jlongArray array, size_t *count);
int32_t *ints(call *call, jintArray array, size_t *count);
float *floats(call *call, jfloatArray array, size_t *count);
char *bytes(call *call, jbyteArray array, size_t *count);
const char *text(call *call, jbyteArray array);

/* The starts of `count` texts that lie one after the other, each with a NUL at its end; `at` moves behind them. */
const char **texts(call *call, const char **at, size_t count);

/* A global reference to an object; NULL if there is no memory, and then an exception is pending. */
jobject kept(call *call, jobject object);

/* An array of handles, to be cast to that of their type. */
void **handles(call *call, jlongArray array, size_t *count);

/* New arrays; NULL if there is no memory, and then an exception is pending. */
jbyteArray to_bytes(JNIEnv *env, const char *data, size_t length);
jbyteArray to_text(JNIEnv *env, const char *text);
jlongArray to_longs(JNIEnv *env, const jlong *data, jsize count);
jintArray to_ints(JNIEnv *env, const void *data, size_t count);
jfloatArray to_floats(JNIEnv *env, const float *data, size_t count);

/* Takes the next number of options; one that was not set leaves the default. */
void take32(const int64_t **numbers, int32_t *to);
void take64(const int64_t **numbers, uint64_t *to);
/* The same of one that Packed.bits has made. */
void take_float(const int64_t **numbers, float *to);

/* An exception with what an error says; NULL if there is no memory, and then another one is pending. */
jthrowable to_exception(JNIEnv *env, pagoda_status status, const pagoda_error *error);

/*
 * For callbacks: the JNIEnv of this thread, with a frame for local references, or NULL if Java is gone or has no memory
 * for that. A thread of Pagoda's is attached as a daemon, and detached when it ends.
 */
JNIEnv *enter(void);
/* Ends the frame. What Java threw goes no further. */
void leave(JNIEnv *env);

/* An asynchronous call under way. */
typedef struct pending {
    jobject whom;         /* to tell: a Pending of Java's */
    size_t made;          /* of a run: how many of its outputs will be new */
    bool lost;            /* of a stream: whether there was no memory for one of its tokens */
    struct pending *next; /* of those that could not be told */
} pending;

/* Makes one; NULL if there is no memory, and then an exception is pending. It outlives the call. */
pending *await(call *call, jobject whom, size_t made);
/* Ends it. */
void over(JNIEnv *env, pending *pending);
/* Ends it where Java could not be told: a thread of Java's tells the waiting one that there was no memory. */
void untold(pending *pending);

/* Reads the options that engines have too. */
pagoda_model_options model_options(call *call, jlongArray numbers, jbyteArray onnxruntime, jbyteArray profile);
pagoda_store_options store_options(call *call, jlongArray numbers);

/*
 * Each file finds the Java methods that it calls when the library is loaded; false if one is not there. That is within
 * the initialiser of Native, and to find a class initialises it: it must be none that waits for Native.
 */
bool find_log(JNIEnv *env);
bool find_run(JNIEnv *env);
bool find_ranking(JNIEnv *env);
bool find_generating(JNIEnv *env);

#endif
