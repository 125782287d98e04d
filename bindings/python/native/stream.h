/*
 * The tokens of a request on their way from a thread of Pagoda to a reader in Python. The library's thread does not take
 * the interpreter's lock for them. Part of bindings/python; not an interface for others.
 */

#ifndef PAGODA_PYTHON_STREAM_H
#define PAGODA_PYTHON_STREAM_H

#include <pagoda.h>

/** A queue of tokens. Any number of threads may use it at the same time. */
typedef struct pagoda_python_stream pagoda_python_stream;

/** Makes a queue; NULL if there is no memory. The caller frees it, after the end of its request. */
pagoda_python_stream *pagoda_python_stream_new(void);

/** Appends a copy of a token. It is a pagoda_token_callback, and the queue its `user_data`. */
void pagoda_python_stream_push(void *stream, const pagoda_generate_token *token);

/** Says that no token follows. */
void pagoda_python_stream_end(pagoda_python_stream *stream);

/**
 * Waits up to `milliseconds` for a token. Returns 1, and the token, which the caller frees; 0 at the end; -1 if none
 * came in time; -2 if a token was lost because there was no memory. After -1 the eventfd `fd` is written, once, when there
 * is something else to return; -1 is no eventfd.
 */
int32_t pagoda_python_stream_next(pagoda_python_stream *stream, int32_t milliseconds, int32_t fd,
                                  pagoda_generate_token **token);

/** Writes to no eventfd any more. */
void pagoda_python_stream_unwatch(pagoda_python_stream *stream);

/** Frees a token. */
void pagoda_python_token_free(pagoda_generate_token *token);

/** Frees a queue with the tokens that are in it. */
void pagoda_python_stream_free(pagoda_python_stream *stream);

#endif /* PAGODA_PYTHON_STREAM_H */
