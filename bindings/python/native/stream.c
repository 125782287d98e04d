#define _GNU_SOURCE
#include "stream.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* A token with what it points to: behind it lie the log probabilities, the tokens of these, and the text. */
typedef struct node {
    pagoda_generate_token token;
    pagoda_token_logprobs logprobs;
    struct node *next;
} node;

struct pagoda_python_stream {
    pthread_mutex_t lock;
    pthread_cond_t more;
    node *first, *last;
    int32_t fd;
    int ended, lost;
};

pagoda_python_stream *pagoda_python_stream_new(void) {
    pagoda_python_stream *stream = calloc(1, sizeof *stream);
    if (stream == NULL) return NULL;
    stream->fd = -1;
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->more, &attributes);
    pthread_condattr_destroy(&attributes);
    return stream;
}

/* The library may have a smaller or a larger struct. */
static void copy_struct(void *to, const void *from, size_t size) {
    uint32_t given;
    memcpy(&given, from, sizeof given);
    memcpy(to, from, given < size ? given : size);
}

static node *copied(const pagoda_generate_token *from) {
    pagoda_token_logprobs logprobs;
    memset(&logprobs, 0, sizeof logprobs);
    if (from->logprobs != NULL) copy_struct(&logprobs, from->logprobs, sizeof logprobs);
    size_t tokens = logprobs.top_count * sizeof(uint32_t), numbers = logprobs.top_count * sizeof(float);
    node *made = calloc(1, sizeof *made + tokens + numbers + from->text_length + 1);
    if (made == NULL) return NULL;
    char *behind = (char *)(made + 1);
    copy_struct(&made->token, from, sizeof made->token);
    if (from->logprobs != NULL) {
        made->logprobs = logprobs;
        if (logprobs.top_count > 0) {
            made->logprobs.top_tokens = memcpy(behind, logprobs.top_tokens, tokens);
            made->logprobs.top_logprobs = memcpy(behind + tokens, logprobs.top_logprobs, numbers);
        }
        made->token.logprobs = &made->logprobs;
    }
    made->token.text = memcpy(behind + tokens + numbers, from->text, from->text_length);
    return made;
}

/* Lets go of the lock, and wakes readers. After it, so that they need not wait for the lock. The queue is still there: it is
 * freed after the end of its request, which comes after this. */
static void wake(pagoda_python_stream *stream, int (*readers)(pthread_cond_t *)) {
    int32_t fd = stream->fd;
    stream->fd = -1;
    if (fd >= 0) {
        uint64_t one = 1;
        /* With the lock, for the reader closes it. It is 0 before this: there is room. */
        ssize_t done = write(fd, &one, sizeof one);
        (void)done;
    }
    pthread_mutex_unlock(&stream->lock);
    readers(&stream->more);
}

void pagoda_python_stream_push(void *user_data, const pagoda_generate_token *token) {
    pagoda_python_stream *stream = user_data;
    node *made = copied(token);
    pthread_mutex_lock(&stream->lock);
    if (made == NULL)
        stream->lost = 1;
    else if (stream->first == NULL)
        stream->first = stream->last = made;
    else
        stream->last = stream->last->next = made;
    wake(stream, pthread_cond_signal);
}

void pagoda_python_stream_end(pagoda_python_stream *stream) {
    pthread_mutex_lock(&stream->lock);
    stream->ended = 1;
    wake(stream, pthread_cond_broadcast);
}

int32_t pagoda_python_stream_next(pagoda_python_stream *stream, int32_t milliseconds, int32_t fd,
                                  pagoda_generate_token **token) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += milliseconds / 1000;
    until.tv_nsec += (long)(milliseconds % 1000) * 1000000;
    if (until.tv_nsec >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
    pthread_mutex_lock(&stream->lock);
    int waited = milliseconds > 0 ? 0 : 1;
    while (stream->first == NULL && !stream->ended && !stream->lost && waited == 0)
        waited = pthread_cond_timedwait(&stream->more, &stream->lock, &until);
    int32_t found = stream->lost ? -2 : stream->ended ? 0 : -1;
    if (stream->first != NULL) {
        node *first = stream->first;
        stream->first = first->next;
        *token = &first->token;
        found = 1;
    }
    if (found == -1 && fd >= 0) stream->fd = fd;
    pthread_mutex_unlock(&stream->lock);
    return found;
}

void pagoda_python_stream_unwatch(pagoda_python_stream *stream) {
    pthread_mutex_lock(&stream->lock);
    stream->fd = -1;
    pthread_mutex_unlock(&stream->lock);
}

void pagoda_python_token_free(pagoda_generate_token *token) {
    /* The token is the first member of its node. */
    free(token);
}

void pagoda_python_stream_free(pagoda_python_stream *stream) {
    for (node *at = stream->first, *next; at != NULL; at = next) {
        next = at->next;
        free(at);
    }
    pthread_cond_destroy(&stream->more);
    pthread_mutex_destroy(&stream->lock);
    free(stream);
}
