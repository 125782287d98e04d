/* ai.pagoda.Cancel */
#include "common.h"

#include "ai_pagoda_Cancel.h"

NATIVE(jlong, Cancel, make)(JNIEnv *env, SELF) {
    call call = CALL;
    pagoda_cancel *cancel = NULL;
    check(&call, pagoda_cancel_new(&cancel, &call.error));
    end(&call);
    return HANDLE(cancel);
}

NATIVE(void, Cancel, trigger)(JNIEnv *env, SELF, jlong handle) {
    call call = CALL;
    check(&call, pagoda_cancel_trigger(AS(pagoda_cancel, handle), &call.error));
    end(&call);
}

NATIVE(void, Cancel, free)(__attribute__((unused)) JNIEnv *env, SELF, jlong handle) {
    pagoda_cancel_free(AS(pagoda_cancel, handle));
}
