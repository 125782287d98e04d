/* ai.pagoda.Model */
#include "common.h"

#include "ai_pagoda_Model.h"

static jmethodID done; /* of Model.Run */

bool find_run(JNIEnv *env) {
    jclass run = (*env)->FindClass(env, "ai/pagoda/Model$Run");
    if (run) done = (*env)->GetMethodID(env, run, "done", "(Ljava/lang/Throwable;[J)V");
    return done != NULL;
}

pagoda_model_options model_options(call *call, jlongArray numbers, jbyteArray onnxruntime, jbyteArray profile) {
    pagoda_model_options options = PAGODA_MODEL_OPTIONS_INIT;
    size_t count;
    const int64_t *from = longs(call, numbers, &count);
    options.onnxruntime_path = text(call, onnxruntime);
    options.profile_path = text(call, profile);
    if (call->failed) return options;
    take32(&from, &options.provider);
    take32(&from, &options.device_id);
    take32(&from, &options.intra_op_threads);
    take32(&from, &options.optimization);
    take32(&from, &options.sleep_when_idle);
    take32(&from, &options.tf32);
    take32(&from, &options.host_pools);
    options.tables = AS(pagoda_embeddings, *from);
    return options;
}

NATIVE(jlong, Model, open)(JNIEnv *env, SELF, jbyteArray path, jlongArray numbers, jbyteArray onnxruntime,
                           jbyteArray profile) {
    call call = CALL;
    pagoda_model *model = NULL;
    const pagoda_model_options options = model_options(&call, numbers, onnxruntime, profile);
    const char *file = text(&call, path);
    if (!call.failed) check(&call, pagoda_model_open(file, &options, &model, &call.error));
    end(&call);
    return HANDLE(model);
}

NATIVE(jlong, Model, openMemory)(JNIEnv *env, SELF, jbyteArray from, jlongArray numbers, jbyteArray onnxruntime,
                                 jbyteArray profile) {
    call call = CALL;
    size_t size;
    pagoda_model *model = NULL;
    const pagoda_model_options options = model_options(&call, numbers, onnxruntime, profile);
    const char *data = bytes(&call, from, &size);
    if (!call.failed) check(&call, pagoda_model_open_memory(data, size, &options, &model, &call.error));
    end(&call);
    return HANDLE(model);
}

NATIVE(jint, Model, provider)(JNIEnv *env, SELF, jlong handle, jobjectArray reasons) {
    call call = CALL;
    pagoda_provider provider = 0;
    const char *reason = NULL;
    if (check(&call, pagoda_model_provider(AS(pagoda_model, handle), &provider, &reason, &call.error))) {
        jbyteArray words = to_text(env, reason);
        if (words) (*env)->SetObjectArrayElement(env, reasons, 0, words);
    }
    end(&call);
    return provider;
}

NATIVE(jlong, Model, count)(JNIEnv *env, SELF, jlong handle, jboolean outputs) {
    call call = CALL;
    size_t count = 0;
    const pagoda_model *model = AS(pagoda_model, handle);
    check(&call, outputs ? pagoda_model_output_count(model, &count, &call.error)
                         : pagoda_model_input_count(model, &count, &call.error));
    end(&call);
    return (jlong)count;
}

/* The symbols with a NUL after each; NULL if there is no memory. */
static jbyteArray joined(call *call, const char *const *symbols, size_t rank) {
    size_t length = 0;
    for (size_t i = 0; i < rank; i++) length += strlen(symbols[i]) + 1;
    char *all = room(call, length, 1), *at = all;
    for (size_t i = 0; all && i < rank; at += strlen(symbols[i++]) + 1) strcpy(at, symbols[i]);
    return all ? to_bytes(call->env, all, length) : NULL;
}

/* The parts: the name, the dimensions or null, the symbols. */
NATIVE(jint, Model, value)(JNIEnv *env, SELF, jlong handle, jboolean outputs, jlong index, jobjectArray parts) {
    call call = CALL;
    pagoda_value_info info = PAGODA_VALUE_INFO_INIT;
    const pagoda_model *model = AS(pagoda_model, handle);
    if (check(&call, outputs ? pagoda_model_output(model, (size_t)index, &info, &call.error)
                             : pagoda_model_input(model, (size_t)index, &info, &call.error))) {
        jbyteArray name = to_text(env, info.name);
        jlongArray dims = name && info.dims ? to_longs(env, (const jlong *)info.dims, (jsize)info.rank) : NULL;
        jbyteArray symbols = dims ? joined(&call, info.symbols, info.rank) : NULL;
        if (!(*env)->ExceptionCheck(env)) {
            (*env)->SetObjectArrayElement(env, parts, 0, name);
            (*env)->SetObjectArrayElement(env, parts, 1, dims);
            (*env)->SetObjectArrayElement(env, parts, 2, symbols);
        }
    }
    end(&call);
    return info.type;
}

/* The lists of a run. */
typedef struct {
    const char **input_names, **output_names;
    pagoda_tensor **inputs, **outputs;
    size_t input_count, output_count;
} lists;

static lists run_lists(call *call, jbyteArray input_names, jlongArray inputs, jbyteArray output_names,
                       jlongArray outputs) {
    lists all = {0};
    const char *in = text(call, input_names), *out = text(call, output_names);
    all.inputs = (pagoda_tensor **)handles(call, inputs, &all.input_count);
    all.outputs = (pagoda_tensor **)handles(call, outputs, &all.output_count);
    all.input_names = texts(call, &in, all.input_count);
    all.output_names = texts(call, &out, all.output_count);
    return all;
}

NATIVE(void, Model, run)(JNIEnv *env, SELF, jlong handle, jbyteArray input_names, jlongArray inputs,
                         jbyteArray output_names, jlongArray outputs, jlong cancel) {
    call call = CALL;
    lists all = run_lists(&call, input_names, inputs, output_names, outputs);
    jlong *made = room(&call, all.output_count, sizeof *made);
    if (!call.failed && check(&call, pagoda_model_run(AS(pagoda_model, handle), all.input_names, all.inputs,
                                                      all.input_count, all.output_names, all.outputs, all.output_count,
                                                      AS(pagoda_cancel, cancel), &call.error))) {
        for (size_t i = 0; i < all.output_count; i++) made[i] = HANDLE(all.outputs[i]);
        (*env)->SetLongArrayRegion(env, outputs, 0, (jsize)all.output_count, made);
    }
    end(&call);
}

/* Tells Java; false if it had no memory to hear it. Says too whether it took the outputs. */
static bool tell(JNIEnv *env, const pending *pending, pagoda_status status, pagoda_tensor *const *outputs,
                 const pagoda_error *error, bool *taken) {
    jthrowable failure = status == PAGODA_STATUS_OK ? NULL : to_exception(env, status, error);
    jlongArray made = status == PAGODA_STATUS_OK ? (*env)->NewLongArray(env, (jsize)pending->made) : NULL;
    if (!failure && !made) {
        /* No memory, which is what is told then. */
        failure = (*env)->ExceptionOccurred(env);
        (*env)->ExceptionClear(env);
    }
    for (size_t i = 0; made && i < pending->made; i++) {
        jlong handle = HANDLE(outputs[i]);
        (*env)->SetLongArrayRegion(env, made, (jsize)i, 1, &handle);
    }
    (*env)->CallVoidMethod(env, pending->whom, done, failure, made);
    const bool told = !(*env)->ExceptionCheck(env);
    *taken = told && made;
    return told;
}

static void ended(void *user_data, pagoda_status status, pagoda_tensor *const *outputs,
                  __attribute__((unused)) size_t count, const pagoda_error *error) {
    pending *run = user_data;
    JNIEnv *env = enter();
    bool taken = false, told = env && tell(env, run, status, outputs, error, &taken);
    if (status == PAGODA_STATUS_OK && !taken)
        for (size_t i = 0; i < run->made; i++) pagoda_tensor_free(outputs[i]);
    if (told) over(env, run);
    else untold(run);
    if (env) leave(env);
}

NATIVE(void, Model, runAsync)(JNIEnv *env, SELF, jlong handle, jbyteArray input_names, jlongArray inputs,
                              jbyteArray output_names, jlongArray outputs, jint made, jlong cancel, jobject run) {
    call call = CALL;
    lists all = run_lists(&call, input_names, inputs, output_names, outputs);
    pending *waiting = await(&call, run, (size_t)made);
    if (waiting && !check(&call, pagoda_model_run_async(AS(pagoda_model, handle), all.input_names, all.inputs,
                                                        all.input_count, all.output_names, all.outputs,
                                                        all.output_count, AS(pagoda_cancel, cancel), ended, waiting,
                                                        &call.error)))
        over(env, waiting);
    end(&call);
}

NATIVE(void, Model, free)(__attribute__((unused)) JNIEnv *env, SELF, jlong handle) {
    pagoda_model_free(AS(pagoda_model, handle));
}
