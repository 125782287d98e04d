/* For NoMemoryTest: a Java that has no memory where it is told so. Its tables of functions are replaced for a while. */
#include <jni.h>
#include <stdbool.h>

static const struct JNIInvokeInterface_ *real_vm;
static struct JNIInvokeInterface_ poor_vm;
static const struct JNINativeInterface_ *real_env;
static struct JNINativeInterface_ poor_env;
static __thread bool is_test;

static jint JNICALL get_env(JavaVM *vm, void **env, jint version) {
    return is_test ? real_vm->GetEnv(vm, env, version) : JNI_EDETACHED;
}

static jint JNICALL attach(__attribute__((unused)) JavaVM *vm, __attribute__((unused)) void **env,
                           __attribute__((unused)) void *arguments) {
    return JNI_ENOMEM;
}

static jobject JNICALL new_global(__attribute__((unused)) JNIEnv *env, __attribute__((unused)) jobject object) {
    return NULL;
}

/* This thread makes no global reference. */
JNIEXPORT void JNICALL Java_ai_pagoda_NoMemoryTest_withoutReferences(JNIEnv *env, __attribute__((unused)) jclass type,
                                                                     jboolean without) {
    if (without) {
        real_env = *env;
        poor_env = *real_env;
        poor_env.NewGlobalRef = new_global;
    }
    *env = without ? &poor_env : real_env;
}

/* No other thread is let in. */
JNIEXPORT void JNICALL Java_ai_pagoda_NoMemoryTest_withoutThreads(JNIEnv *env, __attribute__((unused)) jclass type,
                                                                  jboolean without) {
    JavaVM *vm;
    if ((*env)->GetJavaVM(env, &vm) != JNI_OK) return;
    if (without) {
        is_test = true;
        real_vm = *vm;
        poor_vm = *real_vm;
        poor_vm.GetEnv = get_env;
        poor_vm.AttachCurrentThreadAsDaemon = attach;
    }
    *vm = without ? &poor_vm : real_vm;
}
