/* For OverheadProgram: a stream that C alone reads, as bindings/go compares its own with. */
#include <jni.h>
#include <pagoda.h>

#include "stream.h"

JNIEXPORT jint JNICALL Java_ai_pagoda_OverheadProgram_openPlain(JNIEnv *env, __attribute__((unused)) jclass type,
                                                                jstring folder) {
    const char *path = (*env)->GetStringUTFChars(env, folder, NULL);
    const pagoda_status status = open_generator(path);
    (*env)->ReleaseStringUTFChars(env, folder, path);
    return status;
}

JNIEXPORT jint JNICALL Java_ai_pagoda_OverheadProgram_streamPlain(__attribute__((unused)) JNIEnv *env,
                                                                  __attribute__((unused)) jclass type, jint answers,
                                                                  jint count) {
    return (jint)stream(answers, count);
}

JNIEXPORT void JNICALL Java_ai_pagoda_OverheadProgram_closePlain(__attribute__((unused)) JNIEnv *env,
                                                                 __attribute__((unused)) jclass type) {
    close_generator();
}
