/*
 * Pagoda: inference for models that keep the history of their users. The C interface.
 *
 * This file is generated from sdk/src/ffi by `make header`. Do not edit it.
 *
 * A tour: open a model folder, score three candidates for a user, print the scores of the first task.
 *
 *     pagoda_engine *engine = NULL;
 *     pagoda_error *error = NULL;
 *     pagoda_rank_request request = PAGODA_RANK_REQUEST_INIT;
 *     request.user = 7;
 *     request.event_count = 2, request.event_feature_count = 2;
 *     request.event_features = (const char *[]){"movie", "rating"};
 *     request.event_keys = (const int64_t *[]){(int64_t[]){17, 4}, (int64_t[]){5, 3}};
 *     request.candidate_count = 3, request.candidate_feature_count = 1;
 *     request.candidate_features = (const char *[]){"movie"};
 *     request.candidate_keys = (const int64_t *[]){(int64_t[]){8, 15, 16}};
 *     float scores[3 * 2];
 *     if (pagoda_engine_open("model", NULL, &engine, &error) ||
 *         pagoda_engine_rank(engine, &request, scores, 3 * 2, NULL, &error))
 *         fprintf(stderr, "%s\n", pagoda_error_message(error));
 *     else
 *         for (int i = 0; i < 3; i++) printf("%.4f\n", scores[2 * i]);
 *     pagoda_error_free(error);
 *     pagoda_engine_free(engine);
 *
 * The file has a section for each kind of object: errors, the library, tensors, embedding tables, models, stores,
 * caches of keys and values, leases, engines, generators. An application that serves a model folder needs the first
 * two sections and one of the last two: engines for ranking models, generators for language models.
 *
 * Rules for every function
 * - Errors. A function that can fail returns a pagoda_status; 0 is success. Its last argument is a `pagoda_error **`,
 *   which may be NULL. On failure the function stores an error there, and the caller frees it. Other outputs are
 *   written on success only. The comment of a function lists its statuses without the prefix PAGODA_STATUS_.
 * - Handles. The caller frees a handle (pagoda_model *, pagoda_tensor *, ...) with the _free function of its type.
 *   _free(NULL) does nothing. A handle is a checked number and not an address: a freed, forged or mistyped handle is an
 *   error, never a crash.
 * - Threads. Any thread may call any function, unless its comment says otherwise.
 * - Structs. A struct begins with its size, `struct_size`: initialise it with its PAGODA_..._INIT. New fields are only
 *   ever added at the end. All elements of an array of structs have the same `struct_size`.
 * - Types. Text is UTF-8 and ends with a NUL. Dimensions are int64_t, counts are size_t.
 * - Limits. A list of users, owners or sessions has at most 1,048,576 elements; one of keys, items or the tokens of a
 *   prompt 268,435,456; any other, as those of requests, inputs or outputs, 65,536. A longer list is INVALID_ARGUMENT.
 */

#ifndef PAGODA_H
#define PAGODA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Statuses and errors -------------------------------------------------------------------------------------------
 * How a call ended, and why.
 */

/**
 * The description of a failure: a status, a message, and the argument at fault. A function that fails stores one
 * through its last argument, unless that is NULL. The caller frees it with pagoda_error_free.
 */
typedef struct pagoda_error pagoda_error;

/** How a call ended. 0 is success. A number is never reused for another meaning. Later versions may add numbers. */
typedef int32_t pagoda_status;

/** Success. */
#define PAGODA_STATUS_OK 0
/**
 * An argument has an invalid value; pagoda_error_argument names it. If an operator of the model found it during a run,
 * the message names the tensor instead.
 */
#define PAGODA_STATUS_INVALID_ARGUMENT 1
/** A handle is NULL, freed, of another type, or not a handle at all. */
#define PAGODA_STATUS_INVALID_HANDLE 2
/** A file, a library or a name does not exist. */
#define PAGODA_STATUS_NOT_FOUND 3
/** The build, the model or the machine does not support this. */
#define PAGODA_STATUS_UNSUPPORTED 4
/** A limit is reached: a queue is full, a buffer is too small, or memory is exhausted. */
#define PAGODA_STATUS_CAPACITY 5
/** The call was cancelled, or its time limit was exceeded. */
#define PAGODA_STATUS_CANCELLED 6
/** The model can not be loaded. */
#define PAGODA_STATUS_MODEL 7
/** ONNX Runtime failed while it ran the model. */
#define PAGODA_STATUS_RUNTIME 8
/** A file could not be read or written. */
#define PAGODA_STATUS_IO 9
/** A bug in Pagoda: a panic was caught. Please report it. */
#define PAGODA_STATUS_INTERNAL 10
/** The object is in use; try again later. */
#define PAGODA_STATUS_BUSY 11

/**
 * Returns the name of a status without its prefix, e.g. "INVALID_ARGUMENT"; "UNKNOWN" for an unknown number.
 *
 * Ownership: the text is static. Threads: any. Errors: none.
 */
const char *pagoda_status_name(pagoda_status status);

/**
 * Returns the status of an error; PAGODA_STATUS_INVALID_HANDLE if the handle is invalid.
 *
 * Ownership: the caller keeps the error. Threads: any. Errors: none.
 */
pagoda_status pagoda_error_status(const pagoda_error *error);

/**
 * Returns the message of an error: which value was wrong, and what to do about it. Returns "" if the handle is
 * invalid.
 *
 * Ownership: the text belongs to the error and is valid until the error is freed. Threads: any. Errors: none.
 */
const char *pagoda_error_message(const pagoda_error *error);

/**
 * Returns the argument at fault, e.g. "inputs[1]" or "options.provider"; "" if there is none or the handle is invalid.
 *
 * Ownership: the text belongs to the error and is valid until the error is freed. Threads: any. Errors: none.
 */
const char *pagoda_error_argument(const pagoda_error *error);

/**
 * Frees an error. NULL is allowed.
 *
 * Ownership: takes the error. Threads: any. Errors: INVALID_HANDLE, which is also logged.
 */
pagoda_status pagoda_error_free(pagoda_error *error);

/* ---- The library ---------------------------------------------------------------------------------------------------
 * Versions, the log, the metrics, live objects.
 */

/** The version of this header, as text. pagoda_version returns that of the library. */
#define PAGODA_VERSION "0.1.0"

/** The first part of the version of this header. */
#define PAGODA_VERSION_MAJOR 0

/** The second part. */
#define PAGODA_VERSION_MINOR 1

/** The third part. */
#define PAGODA_VERSION_PATCH 0

/** The version of this header as one number, for comparisons. pagoda_version_number returns that of the library. */
#define PAGODA_VERSION_NUMBER (PAGODA_VERSION_MAJOR * 1000000 + PAGODA_VERSION_MINOR * 1000 + PAGODA_VERSION_PATCH)
/**
 * The version of the binary interface. It changes only if a program that was built with the header of another version
 * would not work.
 */
#define PAGODA_ABI_VERSION 1

/** How much is logged. A level includes the levels before it. */
typedef int32_t pagoda_log_level;

/** Nothing. */
#define PAGODA_LOG_LEVEL_OFF 0
/** Failures, above all those that no call returns. */
#define PAGODA_LOG_LEVEL_ERROR 1
/** What is probably not intended, such as a model that runs on the CPU because there is no GPU. */
#define PAGODA_LOG_LEVEL_WARN 2
/** Rare events, such as a model swap. */
#define PAGODA_LOG_LEVEL_INFO 3
/** Details for debugging, such as every error that a call returns. */
#define PAGODA_LOG_LEVEL_DEBUG 4
/** Everything. */
#define PAGODA_LOG_LEVEL_TRACE 5

/**
 * Receives the lines of the log, on any thread. `source` is the component that logs, e.g. "onnxruntime". The texts are
 * valid during the call only. The callback must not call pagoda_log_set and must not open models. Lines that are
 * logged on the same thread while the callback runs are dropped.
 */
typedef void (*pagoda_log_callback)(void *user_data, pagoda_log_level level, const char *source, const char *message);

/**
 * Returns the ABI version of the library: the PAGODA_ABI_VERSION that it was built with.
 *
 * Threads: any. Errors: none.
 */
uint32_t pagoda_abi_version(void);

/**
 * Checks that the library works with a program that was built with the header of ABI version `header_version`. Call it
 * first, with PAGODA_ABI_VERSION.
 *
 * Threads: any. Errors: UNSUPPORTED; the message has both versions.
 */
pagoda_status pagoda_abi_check(uint32_t header_version, pagoda_error **error);

/**
 * Returns the version of the library as text, e.g. "0.1.0". PAGODA_VERSION is that of the header.
 *
 * Ownership: the text is static. Threads: any. Errors: none.
 */
const char *pagoda_version(void);

/**
 * Returns the version of the library as a number: major * 1,000,000 + minor * 1,000 + patch. PAGODA_VERSION_NUMBER is
 * that of the header.
 *
 * Threads: any. Errors: none.
 */
uint32_t pagoda_version_number(void);

/**
 * Returns the number of handles of all types that were not freed. 0 means that nothing leaks.
 *
 * Threads: any. Errors: none.
 */
size_t pagoda_live_objects(void);

/**
 * Writes the metrics of the process to `buffer` as Prometheus text, for the content type
 * "application/openmetrics-text; version=1.0.0". `length` receives the number of bytes with the NUL. With `buffer`
 * NULL and `capacity` 0 only `length` is written. The text can be longer in the next call: allocate some more.
 *
 * Ownership: the caller keeps the buffer. Threads: any. Errors: INVALID_ARGUMENT for a NULL; CAPACITY if the text does
 * not fit, and then nothing is written.
 */
pagoda_status pagoda_metrics_text(char *buffer, size_t capacity, size_t *length, pagoda_error **error);

/**
 * Sends the log of Pagoda and of ONNX Runtime to `callback`, up to `level`. NULL stops the log. Without a callback
 * nothing is logged. When this returns, the previous callback is not running and will not be called again.
 *
 * Ownership: `user_data` must be valid until another callback is set. Threads: any, but not from the callback. Errors:
 * INVALID_ARGUMENT for an unknown level; UNSUPPORTED from the callback, and in a Rust program that has its own logger.
 */
pagoda_status pagoda_log_set(pagoda_log_level level,
                             pagoda_log_callback callback,
                             void *user_data,
                             pagoda_error **error);

/* ---- Tensors -------------------------------------------------------------------------------------------------------
 * Typed arrays: the inputs and outputs of models.
 */

/**
 * A tensor: an element type, dimensions, and memory. The memory belongs to Pagoda, to the caller or to ONNX Runtime.
 * Runs read and write it in place. A tensor may be freed while a run uses it: the memory is released when the run
 * ends.
 */
typedef struct pagoda_tensor pagoda_tensor;

/** The type of the elements of a tensor. The numbers are those of ONNX (TensorProto.DataType). */
typedef int32_t pagoda_element_type;

/** Not a tensor (some models have sequences or maps as outputs), or a type that this library does not know. */
#define PAGODA_ELEMENT_TYPE_UNDEFINED 0
/** 32-bit float. */
#define PAGODA_ELEMENT_TYPE_F32 1
/** Unsigned 8-bit integer. */
#define PAGODA_ELEMENT_TYPE_U8 2
/** Signed 8-bit integer. */
#define PAGODA_ELEMENT_TYPE_I8 3
/** Unsigned 16-bit integer. */
#define PAGODA_ELEMENT_TYPE_U16 4
/** Signed 16-bit integer. */
#define PAGODA_ELEMENT_TYPE_I16 5
/** Signed 32-bit integer. */
#define PAGODA_ELEMENT_TYPE_I32 6
/** Signed 64-bit integer. */
#define PAGODA_ELEMENT_TYPE_I64 7
/** UTF-8 text. */
#define PAGODA_ELEMENT_TYPE_STRING 8
/** Boolean, one byte, 0 or 1. */
#define PAGODA_ELEMENT_TYPE_BOOL 9
/** 16-bit float (IEEE half). */
#define PAGODA_ELEMENT_TYPE_F16 10
/** 64-bit float. */
#define PAGODA_ELEMENT_TYPE_F64 11
/** Unsigned 32-bit integer. */
#define PAGODA_ELEMENT_TYPE_U32 12
/** Unsigned 64-bit integer. */
#define PAGODA_ELEMENT_TYPE_U64 13
/** Two 32-bit floats. */
#define PAGODA_ELEMENT_TYPE_COMPLEX64 14
/** Two 64-bit floats. */
#define PAGODA_ELEMENT_TYPE_COMPLEX128 15
/** 16-bit float with the exponent of a 32-bit float (bfloat16). */
#define PAGODA_ELEMENT_TYPE_BF16 16
/** 8-bit float, 4 bits of exponent, no infinity. */
#define PAGODA_ELEMENT_TYPE_F8E4M3FN 17
/** 8-bit float, 4 bits of exponent, no infinity, no negative zero. */
#define PAGODA_ELEMENT_TYPE_F8E4M3FNUZ 18
/** 8-bit float, 5 bits of exponent. */
#define PAGODA_ELEMENT_TYPE_F8E5M2 19
/** 8-bit float, 5 bits of exponent, no infinity, no negative zero. */
#define PAGODA_ELEMENT_TYPE_F8E5M2FNUZ 20
/** Unsigned 4-bit integer, two a byte, the first in the low bits. */
#define PAGODA_ELEMENT_TYPE_U4 21
/** Signed 4-bit integer, two a byte, the first in the low bits. */
#define PAGODA_ELEMENT_TYPE_I4 22
/** 4-bit float, two a byte, the first in the low bits. */
#define PAGODA_ELEMENT_TYPE_F4E2M1 23
/** 8-bit power of two, used as a scale. */
#define PAGODA_ELEMENT_TYPE_F8E8M0 24
/** Unsigned 2-bit integer, four a byte, the first in the low bits. */
#define PAGODA_ELEMENT_TYPE_U2 25
/** Signed 2-bit integer, four a byte, the first in the low bits. */
#define PAGODA_ELEMENT_TYPE_I2 26

/** Called once, on any thread, when Pagoda no longer uses memory that the caller lent. */
typedef void (*pagoda_release_callback)(void *user_data);

/**
 * Returns the name of an element type, e.g. "f32"; "undefined" for an unknown number.
 *
 * Ownership: the text is static. Threads: any. Errors: none.
 */
const char *pagoda_element_type_name(pagoda_element_type type);

/**
 * Makes a tensor with its own memory, aligned to 64 bytes. The elements are zeros or empty strings.
 *
 * Ownership: the caller frees the tensor. Threads: any. Errors: INVALID_ARGUMENT for an unknown type, a negative
 * dimension, a shape that overflows, a NULL; CAPACITY if there is not enough memory.
 */
pagoda_status pagoda_tensor_new(pagoda_element_type type,
                                const int64_t *dims,
                                size_t rank,
                                pagoda_tensor **tensor,
                                pagoda_error **error);

/**
 * Makes a tensor over memory of the caller, without a copy. `data` must be aligned for the type. It must stay valid
 * until `release` is called; with `release` NULL, until the tensor is freed and every run that uses it has ended. If
 * this fails, `release` is not called.
 *
 * Ownership: the caller frees the tensor, and keeps the memory. Threads: any. Errors: INVALID_ARGUMENT for an unknown
 * type, strings, a negative dimension, a shape that overflows, too few bytes, a misaligned pointer, a NULL.
 */
pagoda_status pagoda_tensor_borrow(pagoda_element_type type,
                                   const int64_t *dims,
                                   size_t rank,
                                   void *data,
                                   size_t bytes,
                                   pagoda_release_callback release,
                                   void *user_data,
                                   pagoda_tensor **tensor,
                                   pagoda_error **error);

/**
 * Makes a tensor with a copy of strings. `lengths` has the number of bytes of each string; the strings may then
 * contain NULs and need no NUL at the end. With `lengths` NULL each string ends at its NUL.
 *
 * Ownership: the caller frees the tensor. Threads: any. Errors: INVALID_ARGUMENT if `count` does not match the
 * dimensions, for a NULL, and for text that is not UTF-8.
 */
pagoda_status pagoda_tensor_new_strings(const char *const *values,
                                        const size_t *lengths,
                                        size_t count,
                                        const int64_t *dims,
                                        size_t rank,
                                        pagoda_tensor **tensor,
                                        pagoda_error **error);

/**
 * Gets the element type of a tensor.
 *
 * Ownership: the caller keeps the tensor. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL.
 */
pagoda_status pagoda_tensor_type(const pagoda_tensor *tensor, pagoda_element_type *type, pagoda_error **error);

/**
 * Gets the dimensions of a tensor.
 *
 * Ownership: `dims` belongs to the tensor and is valid until the tensor is freed. Threads: any. Errors:
 * INVALID_HANDLE; INVALID_ARGUMENT for a NULL.
 */
pagoda_status pagoda_tensor_dims(const pagoda_tensor *tensor, const int64_t **dims, size_t *rank, pagoda_error **error);

/**
 * Gets the memory of a tensor. It may be read and written while no run uses the tensor.
 *
 * Ownership: the memory belongs to the tensor and is valid until the tensor is freed. Threads: any; the caller orders
 * its own reads and writes. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL; UNSUPPORTED for strings and for
 * tensors on a GPU.
 */
pagoda_status pagoda_tensor_data(const pagoda_tensor *tensor, void **data, size_t *bytes, pagoda_error **error);

/**
 * Gets one element of a string tensor: `length` bytes of UTF-8, without a NUL at the end.
 *
 * Ownership: the text belongs to the tensor and is valid until the tensor is freed. Threads: any. Errors:
 * INVALID_HANDLE; INVALID_ARGUMENT for a NULL, an index out of range, or a tensor of numbers.
 */
pagoda_status pagoda_tensor_string(const pagoda_tensor *tensor,
                                   size_t index,
                                   const char **text,
                                   size_t *length,
                                   pagoda_error **error);

/**
 * Frees a tensor. NULL is allowed. A run that uses the tensor continues; the memory is released when it ends.
 *
 * Ownership: takes the tensor. Threads: any. Errors: INVALID_HANDLE, which is also logged.
 */
pagoda_status pagoda_tensor_free(pagoda_tensor *tensor);

/* ---- Embedding tables ----------------------------------------------------------------------------------------------
 * Rows by key: a cache over host memory, a Redis Cluster and disk.
 */

/**
 * Embedding tables of any number of models. Each table has a cache over backing tiers: host memory, a Redis Cluster,
 * disk. A configuration file says which. Any number of threads may use a handle at the same time.
 */
typedef struct pagoda_embeddings pagoda_embeddings;

/** What a lookup does with keys that are not in the cache. */
typedef int32_t pagoda_miss;

/**
 * PAGODA_MISS_WAIT if the hit rate of the lookup is below the hit_rate_threshold of the table, else
 * PAGODA_MISS_DEFAULT.
 */
#define PAGODA_MISS_BY_HIT_RATE 0
/** The lookup waits for their rows from the backing tiers. */
#define PAGODA_MISS_WAIT 1
/** They get the default vector of the table, and are inserted into the cache in the background. */
#define PAGODA_MISS_DEFAULT 2
/**
 * The lookup waits up to `limit_us`. Keys whose rows have not arrived by then get the default vector, and are inserted
 * when the rows arrive.
 */
#define PAGODA_MISS_WITHIN 3

/** How a pooled lookup combines the rows of a slot into one vector. */
typedef int32_t pagoda_combiner;

/** The sum. */
#define PAGODA_COMBINER_SUM 0
/** The mean. */
#define PAGODA_COMBINER_MEAN 1
/** The sum, divided by the square root of the number of rows. */
#define PAGODA_COMBINER_SQRTN 2

/** When lookups see an update. */
typedef int32_t pagoda_reach;

/** When the call returns. */
#define PAGODA_REACH_AT_ONCE 0
/** At the next refresh of the cache. The backing tiers have the update when the call returns. */
#define PAGODA_REACH_BY_REFRESH 1

/** The options of a lookup. Start from PAGODA_LOOKUP_OPTIONS_INIT, which sets `struct_size` and the defaults. */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** What happens to keys that are not in the cache; default PAGODA_MISS_BY_HIT_RATE. */
    pagoda_miss miss;
    /** With PAGODA_MISS_WITHIN: the time limit in microseconds; default 0. */
    uint64_t limit_us;
} pagoda_lookup_options;

/** The default options of a lookup. */
#define PAGODA_LOOKUP_OPTIONS_INIT { sizeof(pagoda_lookup_options), 0, 0 }

/** Statistics of a table since it was opened. Start from PAGODA_TABLE_STATS_INIT, which sets `struct_size`. */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** Lookups. */
    uint64_t lookups;
    /**
     * Keys that were looked up, without the duplicates within a lookup. A lookup that finds all its keys in the cache
     * counts every key.
     */
    uint64_t keys;
    /** Keys that were in the cache. */
    uint64_t hits;
    /** Keys that got the default vector. */
    uint64_t defaults;
    /** Keys that were not inserted in the background because the queue was full. */
    uint64_t dropped;
    /** Rows in the cache. */
    uint64_t cached_rows;
    /** The capacity of the cache in rows. */
    uint64_t cache_rows;
    /** Bytes of memory of the cache and the tiers, approximately. */
    uint64_t memory;
    /**
     * An update by another process is visible after at most this many seconds; negative if it may never be visible,
     * because the cache is not refreshed.
     */
    int64_t stale_seconds;
} pagoda_table_stats;

/** An empty pagoda_table_stats, for pagoda_embeddings_get_stats and pagoda_engine_get_table_stats to fill in. */
#define PAGODA_TABLE_STATS_INIT { sizeof(pagoda_table_stats), 0, 0, 0, 0, 0, 0, 0, 0, 0 }

/**
 * Opens the tables of a configuration file: HugeCTR's ps.json, or one with Pagoda's own keys. Relative paths in the
 * file are relative to its folder.
 *
 * Ownership: the caller frees the tables. Threads: any. Errors: NOT_FOUND for a missing file; INVALID_ARGUMENT for a
 * key or value that is not understood, which the message names; UNSUPPORTED for a feature that Pagoda does not have;
 * BUSY if another process has a table open, or if the source of a table was changed while its table file was built;
 * CAPACITY if there is not enough memory; IO.
 */
pagoda_status pagoda_embeddings_open(const char *path, pagoda_embeddings **embeddings, pagoda_error **error);

/**
 * Estimates the memory and the disk space of the tables of a configuration file. Only the headers of the tables are
 * read. `memory` and `disk` receive a number of bytes; each may be NULL.
 *
 * Ownership: nothing is opened. Threads: any. Errors: those of pagoda_embeddings_open.
 */
pagoda_status pagoda_embeddings_estimate(const char *path, uint64_t *memory, uint64_t *disk, pagoda_error **error);

/**
 * Adds a model while other models are in use. `model` is JSON: an element of `models` in the configuration. Relative
 * paths in it are relative to `folder`, or to the working directory if `folder` is NULL. A table that another model
 * has open already is shared.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE, and those of
 * pagoda_embeddings_open.
 */
pagoda_status pagoda_embeddings_add(const pagoda_embeddings *embeddings,
                                    const char *model,
                                    const char *folder,
                                    pagoda_error **error);

/**
 * Removes a model. A table is closed when no model uses it. Lookups that are running end normally.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; NOT_FOUND for an
 * unknown model.
 */
pagoda_status pagoda_embeddings_retire(const pagoda_embeddings *embeddings, const char *model, pagoda_error **error);

/**
 * Gets the number of elements in a row of a table. A table is named "model/table", or "table" if that is unique.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; NOT_FOUND for an
 * unknown table.
 */
pagoda_status pagoda_embeddings_dim(const pagoda_embeddings *embeddings,
                                    const char *table,
                                    size_t *dim,
                                    pagoda_error **error);

/**
 * Looks up keys. A key may occur more than once. `numbers` receives one row for each key, in the order of the keys:
 * the row of the key, or the default vector of the table. `number_count` is the capacity of `numbers`; it must be
 * `key_count` times pagoda_embeddings_dim. `found` receives 1 for each key that has a row and 0 for each that got the
 * default vector; it may be NULL. `options` may be NULL.
 *
 * A tier that does not answer is not an error: its keys get the default vector, which is counted and logged.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; NOT_FOUND for an
 * unknown table.
 */
pagoda_status pagoda_embeddings_lookup(const pagoda_embeddings *embeddings,
                                       const char *table,
                                       const int64_t *keys,
                                       size_t key_count,
                                       const pagoda_lookup_options *options,
                                       float *numbers,
                                       size_t number_count,
                                       uint8_t *found,
                                       pagoda_error **error);

/**
 * Looks up keys and combines the rows of each slot into one vector. Slot i has the keys from `offsets[i]` up to, but
 * not including, `offsets[i + 1]`; a slot without keys gets zeros. `offsets` has one element more than there are
 * slots, begins with 0, never decreases, and ends with `key_count`. `vectors` receives one vector for each slot. The
 * rest is as for pagoda_embeddings_lookup.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; NOT_FOUND for an
 * unknown table.
 */
pagoda_status pagoda_embeddings_pool(const pagoda_embeddings *embeddings,
                                     const char *table,
                                     const int64_t *keys,
                                     size_t key_count,
                                     const int64_t *offsets,
                                     size_t offset_count,
                                     pagoda_combiner combiner,
                                     const pagoda_lookup_options *options,
                                     float *vectors,
                                     size_t number_count,
                                     uint8_t *found,
                                     pagoda_error **error);

/**
 * Replaces or inserts rows, in all tiers and in the cache. `numbers` has one row for each key; if a key occurs twice,
 * the last row counts. A row that has a higher version already is not changed. Rows from the file of the table have
 * version 0.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; NOT_FOUND for an
 * unknown table; UNSUPPORTED if every tier is read-only; IO if a tier failed. After IO the tiers below that one have
 * the update, and those above do not: repeat the call.
 */
pagoda_status pagoda_embeddings_upsert(const pagoda_embeddings *embeddings,
                                       const char *table,
                                       uint64_t version,
                                       const int64_t *keys,
                                       size_t key_count,
                                       const float *numbers,
                                       size_t number_count,
                                       pagoda_reach reach,
                                       pagoda_error **error);

/**
 * Deletes rows, in all tiers and from the cache. Their keys then get the default vector. A row that has a higher
 * version is not deleted.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: those of pagoda_embeddings_upsert.
 */
pagoda_status pagoda_embeddings_delete(const pagoda_embeddings *embeddings,
                                       const char *table,
                                       uint64_t version,
                                       const int64_t *keys,
                                       size_t key_count,
                                       pagoda_reach reach,
                                       pagoda_error **error);

/**
 * Starts to load keys into the cache, and returns at once. `queued` receives the number of keys that were not in the
 * cache and were queued.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; NOT_FOUND for an
 * unknown table.
 */
pagoda_status pagoda_embeddings_prefetch(const pagoda_embeddings *embeddings,
                                         const char *table,
                                         const int64_t *keys,
                                         size_t key_count,
                                         size_t *queued,
                                         pagoda_error **error);

/**
 * Reloads all rows in the cache of a table from the backing tiers, and waits for that. A configuration can have this
 * done at intervals (`refresh_interval`).
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; NOT_FOUND for an
 * unknown table.
 */
pagoda_status pagoda_embeddings_refresh(const pagoda_embeddings *embeddings, const char *table, pagoda_error **error);

/**
 * Waits until all background fetches and loads are done.
 *
 * Ownership: the caller keeps the tables. Threads: any. Errors: INVALID_HANDLE.
 */
pagoda_status pagoda_embeddings_wait(const pagoda_embeddings *embeddings, pagoda_error **error);

/**
 * Gets the statistics of a table.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL or an
 * invalid `struct_size`; NOT_FOUND for an unknown table.
 */
pagoda_status pagoda_embeddings_get_stats(const pagoda_embeddings *embeddings,
                                          const char *table,
                                          pagoda_table_stats *stats,
                                          pagoda_error **error);

/**
 * Frees tables. NULL is allowed. A model that uses some of them keeps those open.
 *
 * Ownership: takes the tables. Threads: any. Errors: INVALID_HANDLE, which is also logged.
 */
pagoda_status pagoda_embeddings_free(pagoda_embeddings *embeddings);

/* ---- Models --------------------------------------------------------------------------------------------------------
 * ONNX models, opened and run by themselves.
 */

/** An open model. Any number of threads may use a handle at the same time. */
typedef struct pagoda_model pagoda_model;

/** Cancels runs and requests. Any number of them may share one. Once triggered, it stays triggered. */
typedef struct pagoda_cancel pagoda_cancel;

/** The execution provider: where a model runs. */
typedef int32_t pagoda_provider;

/**
 * On a GPU if there is one, else on the CPU. pagoda_model_provider and pagoda_engine_provider return which, and why.
 */
#define PAGODA_PROVIDER_AUTO 0
/** On the CPU. */
#define PAGODA_PROVIDER_CPU 1
/** On an NVIDIA GPU. Opening the model fails if that is not possible. */
#define PAGODA_PROVIDER_CUDA 2

/** How far ONNX Runtime optimizes the graph when a model is opened. */
typedef int32_t pagoda_optimization;

/** All optimizations. */
#define PAGODA_OPTIMIZATION_ALL 0
/** None. */
#define PAGODA_OPTIMIZATION_NONE 1
/** Only those whose result is standard ONNX. */
#define PAGODA_OPTIMIZATION_BASIC 2
/** Node fusions too, but no changes of memory layouts. */
#define PAGODA_OPTIMIZATION_EXTENDED 3

/** How to open a model. Start from PAGODA_MODEL_OPTIONS_INIT, which sets `struct_size` and the defaults. */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** Where the model runs; default PAGODA_PROVIDER_AUTO. */
    pagoda_provider provider;
    /** The number of the GPU; default 0. */
    int32_t device_id;
    /** The number of threads that work on one run; default 0 = one for each core. */
    int32_t intra_op_threads;
    /** How far the graph is optimized; default PAGODA_OPTIMIZATION_ALL. */
    pagoda_optimization optimization;
    /**
     * 1: idle threads sleep. 0, the default: they spin for a while after each run. That wakes them sooner, and takes
     * cores from everything else in the process, other models included. The threads of an engine do the same.
     */
    int32_t sleep_when_idle;
    /**
     * 1: f32 matrix products on a GPU may use TF32, which keeps 10 bits of the fraction and is several times as fast.
     * 0, the default: they are computed in f32, except in nodes that ask for TF32 themselves. No effect on the CPU.
     */
    int32_t tf32;
    /**
     * 1: the ai.pagoda operators run on the CPU even if the rest of the model runs on a GPU, so that pools of keys and
     * values in host memory are used in place. 0, the default: they run where the model runs. With pools in host
     * memory ONNX Runtime then copies every pool to the GPU and back in each run, and runs can not share a pool.
     */
    int32_t host_pools;
    /**
     * The ONNX Runtime library, UTF-8. NULL: the environment variable PAGODA_ONNXRUNTIME; then libonnxruntime.so.1 or
     * libonnxruntime.so in the folder `pagoda` beside libpagoda.so, or beside libpagoda.so itself; then the loader of
     * the system. A process loads one ONNX Runtime, for the first model that it opens.
     */
    const char *onnxruntime_path;
    /** Where to write a profile of all runs when the model is freed, in Chrome's trace format; NULL = no profile. */
    const char *profile_path;
    /**
     * The tables that EmbeddingBag nodes of the graph name; NULL = none. The model keeps the tables that it uses open,
     * even after the handle is freed or their model is retired.
     */
    const pagoda_embeddings *tables;
} pagoda_model_options;

/** The default options of a model. */
#define PAGODA_MODEL_OPTIONS_INIT { sizeof(pagoda_model_options), 0, 0, 0, 0, 0, 0, 0, NULL, NULL, NULL }

/** An input or an output of a model. Start from PAGODA_VALUE_INFO_INIT, which sets `struct_size`. */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** The element type; PAGODA_ELEMENT_TYPE_UNDEFINED if it is not a tensor. */
    pagoda_element_type type;
    /** The name. */
    const char *name;
    /** The number of dimensions. */
    size_t rank;
    /** The dimensions, -1 for a dynamic one; NULL if the model does not specify the rank. */
    const int64_t *dims;
    /** The symbolic name of each dimension; "" if it is fixed or has no name. */
    const char *const *symbols;
} pagoda_value_info;

/** An empty pagoda_value_info, for pagoda_model_input and pagoda_model_output to fill in. */
#define PAGODA_VALUE_INFO_INIT { sizeof(pagoda_value_info), 0, NULL, 0, NULL, NULL }

/**
 * Opens the model in an .onnx file. The ai.pagoda operators are always available. `options` may be NULL.
 *
 * Ownership: the caller frees the model. Threads: any. Errors: NOT_FOUND if the file or ONNX Runtime is missing; IO if
 * the file can not be read; MODEL if it is not a model that can be run; UNSUPPORTED if the GPU is missing;
 * INVALID_ARGUMENT.
 */
pagoda_status pagoda_model_open(const char *path,
                                const pagoda_model_options *options,
                                pagoda_model **model,
                                pagoda_error **error);

/**
 * Opens a model from the bytes of an .onnx file. `options` may be NULL.
 *
 * Ownership: the caller frees the model, and keeps the bytes, which are copied. Threads: any. Errors: those of
 * pagoda_model_open.
 */
pagoda_status pagoda_model_open_memory(const void *bytes,
                                       size_t size,
                                       const pagoda_model_options *options,
                                       pagoda_model **model,
                                       pagoda_error **error);

/**
 * Gets where a model runs: PAGODA_PROVIDER_CPU or PAGODA_PROVIDER_CUDA. `reason` says why PAGODA_PROVIDER_AUTO chose
 * the CPU; "" in all other cases.
 *
 * Ownership: `reason` belongs to the model and is valid until the model is freed. Threads: any. Errors:
 * INVALID_HANDLE; INVALID_ARGUMENT for a NULL.
 */
pagoda_status pagoda_model_provider(const pagoda_model *model,
                                    pagoda_provider *provider,
                                    const char **reason,
                                    pagoda_error **error);

/**
 * Gets the number of inputs of a model.
 *
 * Ownership: the caller keeps the model. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL.
 */
pagoda_status pagoda_model_input_count(const pagoda_model *model, size_t *count, pagoda_error **error);

/**
 * Gets the number of outputs of a model.
 *
 * Ownership: the caller keeps the model. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL.
 */
pagoda_status pagoda_model_output_count(const pagoda_model *model, size_t *count, pagoda_error **error);

/**
 * Gets one input of a model.
 *
 * Ownership: the pointers in `info` belong to the model and are valid until the model is freed. Threads: any. Errors:
 * INVALID_HANDLE; INVALID_ARGUMENT for a NULL, an invalid `struct_size`, or an index out of range.
 */
pagoda_status pagoda_model_input(const pagoda_model *model,
                                 size_t index,
                                 pagoda_value_info *info,
                                 pagoda_error **error);

/**
 * Gets one output of a model.
 *
 * Ownership: the pointers in `info` belong to the model and are valid until the model is freed. Threads: any. Errors:
 * INVALID_HANDLE; INVALID_ARGUMENT for a NULL, an invalid `struct_size`, or an index out of range.
 */
pagoda_status pagoda_model_output(const pagoda_model *model,
                                  size_t index,
                                  pagoda_value_info *info,
                                  pagoda_error **error);

/**
 * Frees a model. NULL is allowed. Runs that are in progress end normally.
 *
 * Ownership: takes the model. Threads: any. Errors: INVALID_HANDLE, which is also logged.
 */
pagoda_status pagoda_model_free(pagoda_model *model);

/**
 * Called once when an asynchronous run has ended, on a thread of Pagoda. Other asynchronous runs may wait until it
 * returns.
 *
 * `status` is PAGODA_STATUS_OK, or says why there are no outputs; `error` then has the message, and is freed after the
 * callback returns. `outputs` is the list of the call, with a new tensor in place of each NULL. The callback owns the
 * new tensors: it frees or keeps them. The list itself is valid during the callback only.
 */
typedef void (*pagoda_run_callback)(void *user_data,
                                    pagoda_status status,
                                    pagoda_tensor *const *outputs,
                                    size_t output_count,
                                    const pagoda_error *error);

/**
 * Runs a model and waits for the result. `inputs[i]` is the input named `input_names[i]`; all inputs must be given. If
 * `outputs[i]` is a tensor, the output named `output_names[i]` is written to its memory; if it is NULL, a new tensor
 * is stored there. Nothing but strings is copied. A tensor may be both an input and an output if the operators of the
 * model allow that, as with pools of keys and values. `cancel` may be NULL.
 *
 * Ownership: the caller frees new outputs, and keeps the rest. Threads: any number at once on a model; during the run
 * the memory of inputs must not be written, and that of bound outputs neither written nor read. Errors:
 * INVALID_HANDLE; NOT_FOUND for an unknown name; INVALID_ARGUMENT for a wrong type or shape, and for bound outputs
 * that overlap; UNSUPPORTED for an output that is not a tensor or is also an input; CANCELLED; RUNTIME. On an error
 * the list `outputs` is not changed, but the memory of bound outputs may have been written. Pools of keys and values
 * stay valid for what they held before.
 */
pagoda_status pagoda_model_run(const pagoda_model *model,
                               const char *const *input_names,
                               pagoda_tensor *const *inputs,
                               size_t input_count,
                               const char *const *output_names,
                               pagoda_tensor **outputs,
                               size_t output_count,
                               const pagoda_cancel *cancel,
                               pagoda_error **error);

/**
 * Starts a run on a thread of Pagoda, and returns at once. The arguments are as for pagoda_model_run. An error in the
 * arguments is returned at once, and `callback` is not called. When this returns, the handles may be freed and the
 * lists reused. The memory of the tensors must not change until `callback` is called.
 *
 * Ownership: the callback owns new outputs. Threads: any. Errors: INVALID_HANDLE, NOT_FOUND, INVALID_ARGUMENT,
 * CAPACITY if too many runs are queued; through the callback CANCELLED and RUNTIME.
 */
pagoda_status pagoda_model_run_async(const pagoda_model *model,
                                     const char *const *input_names,
                                     pagoda_tensor *const *inputs,
                                     size_t input_count,
                                     const char *const *output_names,
                                     pagoda_tensor *const *outputs,
                                     size_t output_count,
                                     const pagoda_cancel *cancel,
                                     pagoda_run_callback callback,
                                     void *user_data,
                                     pagoda_error **error);

/**
 * Makes a cancel that is not triggered.
 *
 * Ownership: the caller frees it. Threads: any. Errors: INVALID_ARGUMENT for a NULL; CAPACITY.
 */
pagoda_status pagoda_cancel_new(pagoda_cancel **cancel, pagoda_error **error);

/**
 * Cancels all runs and requests that have this cancel, now and later. They fail with CANCELLED; the answers of a
 * generator end with what they have.
 *
 * Ownership: the caller keeps it. Threads: any. Errors: INVALID_HANDLE.
 */
pagoda_status pagoda_cancel_trigger(const pagoda_cancel *cancel, pagoda_error **error);

/**
 * Frees a cancel. NULL is allowed. Runs that have it continue.
 *
 * Ownership: takes it. Threads: any. Errors: INVALID_HANDLE, which is also logged.
 */
pagoda_status pagoda_cancel_free(pagoda_cancel *cancel);

/* ---- Stores --------------------------------------------------------------------------------------------------------
 * Histories on disk.
 */

/**
 * Histories of owners in the files of a folder. They survive restarts and crashes. A damaged record counts as missing;
 * it is never returned. One process at a time has a store open. In it, any number of caches and threads may use a
 * handle at the same time.
 */
typedef struct pagoda_store pagoda_store;

/** When a write to a store is acknowledged. */
typedef int32_t pagoda_durability;

/** When it is on the disk: it survives a loss of power. */
#define PAGODA_DURABILITY_POWER 0
/** When the operating system has it: it survives a crash of the process, but not a loss of power. */
#define PAGODA_DURABILITY_PROCESS 1
/** When it is queued: queued writes are lost if the process crashes. */
#define PAGODA_DURABILITY_NONE 2

/** How to open a store. Start from PAGODA_STORE_OPTIONS_INIT, which sets `struct_size` and the defaults. */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** When a write is acknowledged; default PAGODA_DURABILITY_POWER. */
    pagoda_durability durability;
    /**
     * The maximum size of the files in bytes; default 0 = no limit. At the limit the least recently used owners are
     * evicted. A compaction may exceed the limit for a while.
     */
    uint64_t max_bytes;
    /**
     * The maximum size of a segment file in bytes; default 0 = 256 MiB, or an eighth of `max_bytes` if that is less.
     */
    uint64_t segment_bytes;
    /** The maximum number of bytes in the write queue; default 0 = 256 MiB. A write beyond it waits or is rejected. */
    uint64_t queue_bytes;
    /**
     * The maximum number of bytes of garbage, the removed and replaced records in the files, before segment files are
     * compacted; default 0 = 64 MiB. Garbage of less than half of the files is never compacted by itself.
     */
    uint64_t garbage_bytes;
} pagoda_store_options;

/** The default options of a store. */
#define PAGODA_STORE_OPTIONS_INIT { sizeof(pagoda_store_options), 0, 0, 0, 0, 0 }

/**
 * The state of a store, and counters since it was opened. Start from PAGODA_STORE_STATS_INIT, which sets
 * `struct_size`.
 */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** Stored owners, of all model versions. */
    uint64_t owners;
    /** Stored records; a history has one or more. */
    uint64_t records;
    /** Bytes of the files that are in use. */
    uint64_t live_bytes;
    /** Bytes of all files. */
    uint64_t file_bytes;
    /** Segment files. */
    uint64_t segments;
    /** Bytes in the write queue. */
    uint64_t queued_bytes;
    /** Records written, removals included. */
    uint64_t writes;
    /** Bytes written, compactions included. */
    uint64_t written_bytes;
    /** Failed writes. */
    uint64_t write_errors;
    /** Records with damaged data. */
    uint64_t corrupt_records;
    /** Incomplete writes that were found when the store was opened. */
    uint64_t torn_tails;
    /** Regions of files where records were expected and not found. */
    uint64_t damaged_regions;
    /** Owners that were removed because damage left it uncertain which record is current. */
    uint64_t dropped_owners;
    /** 1 if the index was rebuilt when the store was opened. */
    uint64_t index_rebuilds;
    /** Failures of the index. After one the index is not used until the store is opened again. */
    uint64_t index_errors;
    /** Owners that were evicted at the size limit. */
    uint64_t evicted_owners;
    /** Compacted segment files. */
    uint64_t compacted_segments;
} pagoda_store_stats;

/** An empty pagoda_store_stats, for pagoda_store_get_stats to fill in. */
#define PAGODA_STORE_STATS_INIT { sizeof(pagoda_store_stats), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

/**
 * Opens the store in a folder. If the folder is empty or missing, a new store is made. `options` may be NULL.
 *
 * Ownership: the caller frees the store. Threads: any. Errors: BUSY if the store is open already, in this or another
 * process; INVALID_ARGUMENT, also for a folder with other files in it; UNSUPPORTED for a store of a later version; IO.
 */
pagoda_status pagoda_store_open(const char *path,
                                const pagoda_store_options *options,
                                pagoda_store **store,
                                pagoda_error **error);

/**
 * Waits until all writes so far are as durable as the options say.
 *
 * Ownership: the caller keeps the store. Threads: any. Errors: INVALID_HANDLE; IO if a write failed since the last
 * flush.
 */
pagoda_status pagoda_store_flush(const pagoda_store *store, pagoda_error **error);

/**
 * Frees the disk space of removed and replaced records, and waits for that. A store also does this by itself.
 *
 * Ownership: the caller keeps the store. Threads: any; other threads may use the store meanwhile. Errors:
 * INVALID_HANDLE; IO.
 */
pagoda_status pagoda_store_compact(const pagoda_store *store, pagoda_error **error);

/**
 * Gets the state and the counters of a store.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL or an
 * invalid `struct_size`.
 */
pagoda_status pagoda_store_get_stats(const pagoda_store *store, pagoda_store_stats *stats, pagoda_error **error);

/**
 * Frees a store. NULL is allowed. When no cache uses the store any more, the write queue is written and the store is
 * closed.
 *
 * Ownership: takes the store. Threads: any. Errors: INVALID_HANDLE, which is also logged.
 */
pagoda_status pagoda_store_free(pagoda_store *store);

/* ---- Caches of keys and values -------------------------------------------------------------------------------------
 * The histories of owners, as pages in a pool.
 */

/**
 * A cache of keys and values: the history of each owner as pages in a pool. An owner is a number that the caller
 * chooses: a user of a ranking model, a conversation of a language model, or a prompt that conversations share. When
 * the pool is full, the least recently used owners are evicted, to a store if there is one. Another order of eviction
 * is possible in Rust only, where it is a trait. Any number of threads may use a handle at the same time.
 */
typedef struct pagoda_kv_cache pagoda_kv_cache;

/** The unit of the size of a pool of keys and values. */
typedef int32_t pagoda_kv_size_unit;

/** No size is given; the size must be 0. An engine then uses 1 GiB. A cache that is opened by itself has no default. */
#define PAGODA_KV_SIZE_UNIT_DEFAULT 0
/** Pages. */
#define PAGODA_KV_SIZE_UNIT_PAGES 1
/** Bytes, all layers together: the pool has as many pages as fit. */
#define PAGODA_KV_SIZE_UNIT_BYTES 2
/** Percent of the free memory of the GPU that the pool is on; 1 to 100. Not possible in host memory. */
#define PAGODA_KV_SIZE_UNIT_PERCENT 3

/** How pages hold keys and values. */
typedef int32_t pagoda_kv_format;

/** As the model was exported. */
#define PAGODA_KV_FORMAT_DEFAULT 0
/** Numbers of the type that the model computes in. */
#define PAGODA_KV_FORMAT_NATIVE 1
/** 8 bits, with a scale and a low end for each head of each token. */
#define PAGODA_KV_FORMAT_INT8 2
/** 4 bits, with a scale and a low end for each head of each token. */
#define PAGODA_KV_FORMAT_INT4 3
/** Floating-point numbers of 8 bits (e4m3fn), with a scale for each head of each token. */
#define PAGODA_KV_FORMAT_FP8 4

/** What happens to new tokens that are cached already. */
typedef int32_t pagoda_overlap;

/** The request is rejected. */
#define PAGODA_OVERLAP_REFUSE 0
/** They are trimmed; pagoda_kv_lease_owner returns how many. */
#define PAGODA_OVERLAP_TRIM 1

/** What happens if the items of a request differ from those that the cached history was computed from. */
typedef int32_t pagoda_edited;

/** Items are not checked: requests have none. */
#define PAGODA_EDITED_UNNOTICED 0
/** The request is rejected. */
#define PAGODA_EDITED_REFUSE 1
/** The cached history is invalidated from the first edited item on. The part before it stays. */
#define PAGODA_EDITED_INVALIDATE 2

/** When histories are written to the store. */
typedef int32_t pagoda_offload;

/** When an owner is evicted from the pool. */
#define PAGODA_OFFLOAD_ON_EVICTION 0
/** With every commit, in the background. */
#define PAGODA_OFFLOAD_AT_COMMIT 1
/** Only by pagoda_kv_cache_offload; what is evicted without it is lost. */
#define PAGODA_OFFLOAD_BY_HAND 2

/**
 * The shape, the size and the behaviour of a cache. Start from PAGODA_KV_OPTIONS_INIT, which sets `struct_size` and
 * the defaults. `layers`, `heads`, `head_size`, `size` and `size_unit` have no default.
 */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** The number of layers that keep keys and values. */
    int32_t layers;
    /** The number of key and value heads in a layer. */
    int32_t heads;
    /** The number of elements in a head. */
    int32_t head_size;
    /** The number of tokens in a page, a multiple of 8; default 32. */
    int32_t page_size;
    /** The type of keys and values: PAGODA_ELEMENT_TYPE_F32 (the default), _F16 or _BF16. */
    pagoda_element_type type;
    /** The GPU whose memory holds the pool; default -1: host memory. pagoda_tensor_data rejects tensors on a GPU. */
    int32_t device_id;
    /** The unit of `size`; PAGODA_KV_SIZE_UNIT_PAGES, _BYTES or _PERCENT. */
    pagoda_kv_size_unit size_unit;
    /** The size of the pool, in `size_unit`; 1 or more. */
    uint64_t size;
    /** The maximum number of tokens of a history that are kept; default 0: all. The oldest pages are removed first. */
    int32_t max_history;
    /** What happens to new tokens that are cached already; default PAGODA_OVERLAP_REFUSE. */
    pagoda_overlap overlap;
    /**
     * Whether requests have the items of the history, and what happens if the cached ones differ; default
     * PAGODA_EDITED_UNNOTICED.
     */
    pagoda_edited edited;
    /** When histories are written to the store; default PAGODA_OFFLOAD_ON_EVICTION. */
    pagoda_offload offload;
    /**
     * 1: pagoda_kv_cache_prepare returns before the histories are loaded from the store, and pagoda_kv_lease_wait
     * waits for them. 0, the default: pagoda_kv_cache_prepare waits.
     */
    int32_t onload_in_background;
    /** The number of threads that read the store; default 0 = 2. */
    int32_t onload_threads;
    /**
     * With PAGODA_OFFLOAD_ON_EVICTION: the percentage of the pool that is kept free or stored ahead of eviction, so
     * that an eviction needs no copy. A background thread stores the least recently used owners as the pool fills up.
     * Default 12; 0: nothing is stored ahead.
     */
    int32_t ahead_percent;
    /** The version of the model, UTF-8; NULL = "". A history that was stored for another version is not used. */
    const char *model_version;
    /**
     * The store for evicted histories; NULL = none. Several caches may share a store. The cache keeps the store open,
     * even after its handle is freed.
     */
    const pagoda_store *store;
} pagoda_kv_options;

/** The default options of a cache. `layers`, `heads`, `head_size`, `size_unit` and `size` must still be set. */
#define PAGODA_KV_OPTIONS_INIT { sizeof(pagoda_kv_options), 0, 0, 0, 32, 1, -1, 0, 0, 0, 0, 0, 0, 0, 0, 12, NULL, NULL }

/** Where the history of an owner is. */
typedef int32_t pagoda_tier;

/** Not cached. */
#define PAGODA_TIER_NONE 0
/** In the pool. */
#define PAGODA_TIER_RESIDENT 1
/** In the store, or being loaded from there into the pool. */
#define PAGODA_TIER_STORE 2

/** A set of tiers: a sum of PAGODA_TIERS_... numbers. */
typedef int32_t pagoda_tiers;

/** The pool. */
#define PAGODA_TIERS_RESIDENT 1
/** The store. */
#define PAGODA_TIERS_STORE 2
/** Both. */
#define PAGODA_TIERS_ALL 3

/**
 * The state of a cache, and counters since it was opened. Start from PAGODA_KV_STATS_INIT, which sets `struct_size`.
 */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** Pages of the pool. */
    uint64_t pages;
    /** Free pages. */
    uint64_t free_pages;
    /** Pages that more than one owner has, by pagoda_kv_cache_fork. */
    uint64_t shared_pages;
    /** Owners in the pool. */
    uint64_t resident_owners;
    /** Tokens of those owners. */
    uint64_t resident_tokens;
    /** Cache hits: tokens of prepared histories that were in the pool. */
    uint64_t tokens_from_pool;
    /** Tokens of prepared histories that were loaded from the store. */
    uint64_t tokens_from_store;
    /** Tokens that were new. */
    uint64_t tokens_new;
    /** Owners that were evicted from the pool. */
    uint64_t evicted_owners;
    /** Owners whose write to the store failed, at an eviction or a commit. */
    uint64_t failed_offloads;
    /** Histories that could not be read from the store. */
    uint64_t failed_onloads;
} pagoda_kv_stats;

/** An empty pagoda_kv_stats, for pagoda_kv_cache_get_stats, pagoda_engine_get_kv_stats and
 * pagoda_generator_get_kv_stats to fill in. */
#define PAGODA_KV_STATS_INIT { sizeof(pagoda_kv_stats), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

/**
 * Opens a cache. `options` must not be NULL: it has the shape of the keys and values.
 *
 * Ownership: the caller frees the cache. Threads: any. Errors: INVALID_ARGUMENT; INVALID_HANDLE for `options.store`;
 * CAPACITY if there is not enough memory for the pool; UNSUPPORTED if the GPU `options.device_id` does not exist; BUSY
 * if another cache of the same model version and shape uses the store.
 */
pagoda_status pagoda_kv_cache_open(const pagoda_kv_options *options, pagoda_kv_cache **cache, pagoda_error **error);

/**
 * Gets the pool of a layer as a tensor, [pages, 2, page_size, heads, head_size]. Bind it to an input and to the
 * matching output of the model. The pool is the same for every lease. Only the model may read and write its memory.
 *
 * Ownership: the caller frees the tensor; the memory is valid until all these tensors and the cache are freed.
 * Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL or a layer out of range.
 */
pagoda_status pagoda_kv_cache_pool(const pagoda_kv_cache *cache,
                                   int32_t layer,
                                   pagoda_tensor **pool,
                                   pagoda_error **error);

/**
 * Gets for each owner the first position of the cached history, its number of tokens, and its tier. Each of `starts`,
 * `lengths` and `tiers` is NULL or has room for `owner_count` elements. Other threads may change the cache before the
 * caller reads the result.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT.
 */
pagoda_status pagoda_kv_cache_lookup(const pagoda_kv_cache *cache,
                                     const uint64_t *owners,
                                     size_t owner_count,
                                     int64_t *starts,
                                     int64_t *lengths,
                                     pagoda_tier *tiers,
                                     pagoda_error **error);

/**
 * Lets the owner `to` begin with the first `tokens` tokens of the owner `from`, as many as it has: a prompt that many
 * conversations begin with, or the beams of a search. Only whole pages are shared: `shared` receives the number of
 * tokens, 0 if there is no whole page. `to` must have no history; what it appends goes to pages of its own. If `from`
 * is in the store, it is loaded first.
 *
 * A shared page takes room once. It is free when its last owner has left. In a store each owner has its own copy.
 * Until a lease holds it, `to` can be evicted like any owner.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a negative
 * number of tokens, for a NULL, and about "to" if it has a history or is `from`; CAPACITY if the pool has no room to
 * load `from`; BUSY if `from` could not be read or is evicted at the same time; IO.
 */
pagoda_status pagoda_kv_cache_fork(const pagoda_kv_cache *cache,
                                   uint64_t from,
                                   uint64_t to,
                                   int32_t tokens,
                                   int32_t *shared,
                                   pagoda_error **error);

/**
 * Writes histories to the store, and waits until they are durable. `owners` NULL with `owner_count` 0 means all owners
 * in the pool; an empty list that is not NULL means none. `offloaded` receives the number of owners that had tokens to
 * write.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; UNSUPPORTED
 * without a store; IO.
 */
pagoda_status pagoda_kv_cache_offload(const pagoda_kv_cache *cache,
                                      const uint64_t *owners,
                                      size_t owner_count,
                                      size_t *offloaded,
                                      pagoda_error **error);

/**
 * Removes histories from tiers. Histories that are removed only from the pool are written to the store first, unless
 * offload is PAGODA_OFFLOAD_BY_HAND. Histories that are removed from the store are lost when this returns. `owners`
 * NULL with `owner_count` 0 means all owners that no lease holds; an empty list that is not NULL means none. `evicted`
 * receives the number of owners that had something in these tiers.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; BUSY if a lease
 * holds an owner of the list; IO.
 */
pagoda_status pagoda_kv_cache_evict(const pagoda_kv_cache *cache,
                                    const uint64_t *owners,
                                    size_t owner_count,
                                    pagoda_tiers tiers,
                                    size_t *evicted,
                                    pagoda_error **error);

/**
 * Starts to load histories from the store into the pool, and returns at once, so that the next request of these owners
 * need not wait. Stops when the pool is full. `started` receives the number of histories that are being loaded.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; IO.
 */
pagoda_status pagoda_kv_cache_prefetch(const pagoda_kv_cache *cache,
                                       const uint64_t *owners,
                                       size_t owner_count,
                                       size_t *started,
                                       pagoda_error **error);

/**
 * Waits until all writes to the store so far are durable. Without a store it returns at once.
 *
 * Ownership: the caller keeps the cache. Threads: any. Errors: INVALID_HANDLE; IO if a write failed since the last
 * flush.
 */
pagoda_status pagoda_kv_cache_flush(const pagoda_kv_cache *cache, pagoda_error **error);

/**
 * Gets the state and the counters of a cache.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL or an
 * invalid `struct_size`.
 */
pagoda_status pagoda_kv_cache_get_stats(const pagoda_kv_cache *cache, pagoda_kv_stats *stats, pagoda_error **error);

/**
 * Frees a cache. NULL is allowed. Leases stay valid. If there is a store, the pool is written to it, and this waits
 * for that, unless offload is PAGODA_OFFLOAD_BY_HAND.
 *
 * Ownership: takes the cache. Threads: any. Errors: INVALID_HANDLE, which is also logged.
 */
pagoda_status pagoda_kv_cache_free(pagoda_kv_cache *cache);

/* ---- Leases --------------------------------------------------------------------------------------------------------
 * The part of a cache that a batch uses while a model runs.
 */

/** Holds the owners of a batch in the pool, with room for their new tokens. It ends with a commit or an abort. */
typedef struct pagoda_kv_lease pagoda_kv_lease;

/** An index tensor of a lease: the input of the same name of the ai.pagoda operators. */
typedef int32_t pagoda_kv_tensor;

/** The offset of the first row of each owner: i32 [owners + 1]. */
#define PAGODA_KV_TENSOR_ROW_OFFSETS 0
/** The number of candidates of each owner: i32 [owners]. */
#define PAGODA_KV_TENSOR_NUM_CANDIDATES 1
/** The number of cached tokens of each owner: i32 [owners]. */
#define PAGODA_KV_TENSOR_CACHED_LEN 2
/** The offset of each owner in the list of pages: i32 [owners + 1]. */
#define PAGODA_KV_TENSOR_PAGE_INDPTR 3
/** The pages of all owners, each owner's in order of position: i32. */
#define PAGODA_KV_TENSOR_PAGE_IDS 4

/**
 * What a batch has of one owner. Start from PAGODA_KV_REQUEST_INIT, which sets `struct_size`. All elements of an array
 * must have the same `struct_size`.
 */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** The number of new tokens. */
    int32_t tokens;
    /** The number of candidates after the new tokens. */
    int32_t candidates;
    /** The owner. */
    uint64_t owner;
    /** The position of the first new token in the history of the owner. */
    int64_t start;
    /**
     * The items of the history up to the last new token, if the cache checks them (`edited`): those of all new tokens,
     * and of as many tokens before them as are to be checked. Else NULL.
     */
    const uint64_t *items;
    /** The number of items. */
    size_t item_count;
} pagoda_kv_request;

/** A request of owner 0 without tokens. */
#define PAGODA_KV_REQUEST_INIT { sizeof(pagoda_kv_request), 0, 0, 0, 0, NULL, 0 }

/** An owner in a lease. Start from PAGODA_KV_LEASED_OWNER_INIT, which sets `struct_size`. */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** The number of cached tokens. */
    int32_t cached;
    /** The number of new tokens, which the model appends. */
    int32_t tokens;
    /**
     * The number of tokens at the start of the request that were cached already and trimmed. Leave their rows out of
     * the inputs of the model.
     */
    int32_t trimmed;
    /** The owner. */
    uint64_t owner;
    /** The position of the first token of the history that the model uses. */
    int64_t start;
} pagoda_kv_leased_owner;

/** An empty pagoda_kv_leased_owner, for pagoda_kv_lease_owner to fill in. */
#define PAGODA_KV_LEASED_OWNER_INIT { sizeof(pagoda_kv_leased_owner), 0, 0, 0, 0, 0 }

/**
 * Makes room for a batch, and returns a lease with the tensors for the model. Evicts the least recently used owners if
 * necessary, and loads those of the batch from the store. The owners of the batch stay in the pool until the lease
 * ends. Any number of leases may read a history at the same time; only one may append to it.
 *
 * Then run the model on the tensors of the lease and the pools of the cache. Its rows are, for each owner, the new
 * tokens and then the candidates. A call that fails changes no history.
 *
 * Ownership: the caller frees the lease. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a gap between the
 * cached history and the new tokens, an overlap, edited items, or an owner that occurs twice; CAPACITY if too few
 * pages are free or evictable, about `requests` if the whole pool is too small; BUSY if another lease appends to one
 * of the histories; IO.
 */
pagoda_status pagoda_kv_cache_prepare(const pagoda_kv_cache *cache,
                                      const pagoda_kv_request *requests,
                                      size_t request_count,
                                      pagoda_kv_lease **lease,
                                      pagoda_error **error);

/**
 * Gets an index tensor of a lease, an input of the model.
 *
 * Ownership: the caller frees the tensor, before or after the lease. Threads: any. Errors: INVALID_HANDLE;
 * INVALID_ARGUMENT for a NULL, an unknown PAGODA_KV_TENSOR_... number, or a lease that has ended.
 */
pagoda_status pagoda_kv_lease_tensor(const pagoda_kv_lease *lease,
                                     pagoda_kv_tensor which,
                                     pagoda_tensor **tensor,
                                     pagoda_error **error);

/**
 * Gets an owner of a lease, by its index in the batch.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL, an
 * invalid `struct_size`, an index out of range, or a lease that has ended.
 */
pagoda_status pagoda_kv_lease_owner(const pagoda_kv_lease *lease,
                                    size_t index,
                                    pagoda_kv_leased_owner *owner,
                                    pagoda_error **error);

/**
 * Tells whether a layer of all owners was loaded from the store: `ready` receives 1 or 0. Does not wait.
 *
 * Ownership: the caller keeps the lease. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL, a layer
 * out of range, or a lease that has ended; IO if a history could not be read. The lease is then unusable, and the next
 * one has less in the cache.
 */
pagoda_status pagoda_kv_lease_ready(const pagoda_kv_lease *lease, int32_t layer, int32_t *ready, pagoda_error **error);

/**
 * Waits until a layer of all owners was loaded from the store; with `layer` -1, all layers. It is needed only if
 * `options.onload_in_background` is 1, before the model runs.
 *
 * Ownership: the caller keeps the lease. Threads: any number at once on a lease. Errors: those of
 * pagoda_kv_lease_ready.
 */
pagoda_status pagoda_kv_lease_wait(const pagoda_kv_lease *lease, int32_t layer, pagoda_error **error);

/**
 * Adds the new tokens, which the model has appended, to the histories, and ends the lease. The handle must still be
 * freed. With PAGODA_OFFLOAD_AT_COMMIT the histories are queued for the store when this returns; with `wait` 1 it
 * waits until they are durable.
 *
 * Ownership: the caller keeps the handle. Threads: any; if two threads end a lease, the second one gets an error.
 * Errors: INVALID_HANDLE; INVALID_ARGUMENT for a lease that has ended; IO if a history could not be read from the
 * store, and then this was an abort. With `wait` 1 also CAPACITY or IO about "wait": the tokens are committed, but
 * they are not durable.
 */
pagoda_status pagoda_kv_lease_commit(const pagoda_kv_lease *lease, int32_t wait, pagoda_error **error);

/**
 * Ends a lease without a change of the histories. The handle must still be freed.
 *
 * Ownership: the caller keeps the handle. Threads: any; waits for other threads that wait for this lease. Errors:
 * INVALID_HANDLE; INVALID_ARGUMENT for a lease that has ended.
 */
pagoda_status pagoda_kv_lease_abort(const pagoda_kv_lease *lease, pagoda_error **error);

/**
 * Frees a lease, and aborts it if it has not ended. NULL is allowed.
 *
 * Ownership: takes the lease. Threads: any. Errors: INVALID_HANDLE, which is also logged.
 */
pagoda_status pagoda_kv_lease_free(pagoda_kv_lease *lease);

/* ---- Engines -------------------------------------------------------------------------------------------------------
 * Model folders, served: users and candidates in, scores out.
 */

/**
 * A ranking engine: an open model folder with its embedding tables and the keys and values of its users. Requests of
 * concurrent callers run in batches. Any number of threads may use a handle at the same time.
 */
typedef struct pagoda_engine pagoda_engine;

/** The largest batch that a CUDA graph has room for. Start from PAGODA_GRAPH_SHAPE_INIT, which sets `struct_size`. */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** The maximum number of users; 1 or more. */
    int32_t users;
    /** The maximum number of rows of all users together: new events and candidates; 1 or more. */
    int32_t rows;
    /** The maximum number of candidates of all users together; 0: as many as `rows`. */
    int32_t candidates;
    /**
     * The maximum number of pages of all users together; 0: enough for the longest history of each user, but no more
     * than the pool has.
     */
    int32_t pages;
} pagoda_graph_shape;

/** An empty shape. `users` and `rows` must still be set. */
#define PAGODA_GRAPH_SHAPE_INIT { sizeof(pagoda_graph_shape), 0, 0, 0, 0 }

/** How to open an engine. Start from PAGODA_ENGINE_OPTIONS_INIT, which sets `struct_size` and the defaults. */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /**
     * How many batches run at the same time; 1 to 256, default 1. They share the weights, the tables and the caches.
     */
    int32_t instances;
    /** The maximum number of requests in a batch; default 64. */
    int32_t max_batch;
    /**
     * The maximum number of rows in a batch: new events and candidates; default 8192. A request with more rows runs
     * alone.
     */
    int32_t max_batch_rows;
    /**
     * The maximum number of queued requests; default 4096. A request beyond it is rejected with
     * PAGODA_STATUS_CAPACITY.
     */
    int32_t queue;
    /** The unit of `kv_size`; default PAGODA_KV_SIZE_UNIT_DEFAULT: 1 GiB. */
    pagoda_kv_size_unit kv_size_unit;
    /** When keys and values are written to the store; default PAGODA_OFFLOAD_ON_EVICTION. */
    pagoda_offload offload;
    /** As in pagoda_kv_options; default 12. */
    int32_t ahead_percent;
    /**
     * The size of the pool of keys and values, in `kv_size_unit`. With 0 pages or 0 bytes nothing is cached: every
     * request computes its whole history.
     */
    uint64_t kv_size;
    /**
     * Bytes of host memory for keys and values that were evicted from the pool; default 0: none. The memory is pinned
     * if the model can run on a GPU.
     */
    uint64_t host_bytes;
    /**
     * The coalescing window: how many microseconds a request waits for other requests, to run in one batch with them;
     * default 0: it does not wait. A batch then has the requests that arrived while all instances were busy.
     */
    uint64_t max_delay_us;
    /**
     * Bytes for the event log: the events of users as they were sent; default 64 MiB, 0: none. With it, a request that
     * sends only new events is served even if the keys and values of the earlier events were evicted.
     */
    uint64_t remember_bytes;
    /**
     * Bytes for the cache of each embedding table; default 0: a table of up to 256 MiB is cached as a whole, a larger
     * one with 256 MiB.
     */
    uint64_t table_cache_bytes;
    /**
     * A configuration file (ps.json) that names the backing tiers of the embedding tables, UTF-8; NULL: host memory,
     * with all rows. The models in the file are ignored. The tables are those of the model folder.
     */
    const char *table_tiers_path;
    /** Where the model runs, and on how many threads; NULL = the defaults. Its `tables` must be NULL. */
    const pagoda_model_options *model;
    /** The folder of a store for keys and values, UTF-8; NULL = none. One process at a time has it open. */
    const char *store_path;
    /** How the store is opened; NULL = the defaults. */
    const pagoda_store_options *store_options;
    /**
     * On a GPU: batch shapes that are captured into CUDA graphs, `cuda_graph_count` of them; NULL = none. A graph is
     * captured when its shape is first used, and replayed after that. A batch uses the shape with the fewest rows that
     * it fits into; a batch that fits into none runs without a graph. Every node of the model must run on the GPU. On
     * the CPU the shapes are checked and not used.
     */
    const pagoda_graph_shape *cuda_graphs;
    /** How many shapes `cuda_graphs` has; default 0. */
    size_t cuda_graph_count;
    /** How pages hold keys and values, in memory and in the store; default PAGODA_KV_FORMAT_DEFAULT. */
    pagoda_kv_format kv_format;
} pagoda_engine_options;

/** The default options of an engine. */
#define PAGODA_ENGINE_OPTIONS_INIT \
    { sizeof(pagoda_engine_options), 1, 64, 8192, 4096, 0, 0, 12, 0, 0, 0, 67108864, 0, \
      NULL, NULL, NULL, NULL, NULL, 0, 0 }

/**
 * A request: score candidates for a user. Start from PAGODA_RANK_REQUEST_INIT, which sets `struct_size` and the
 * defaults.
 *
 * A feature is named as in pagoda.json. It has one key for every event, candidate or user; -1 stands for no key.
 */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** 1: the time of the request is `time`; 0, the default: it is the current time. */
    int32_t has_time;
    /** The user. */
    uint64_t user;
    /**
     * The position of the first sent event in the history of the user. Default -1: the events are the whole history,
     * and the engine finds out which of them are new.
     */
    int64_t start;
    /** How many events are sent; may be 0. */
    size_t event_count;
    /** How many event features are sent: all features of the model, or 0 if `event_count` is 0. */
    size_t event_feature_count;
    /** The names of the event features. */
    const char *const *event_features;
    /** For each event feature an array of `event_count` keys. */
    const int64_t *const *event_keys;
    /** The time of each event, in seconds; may be NULL if the model has no times. */
    const int64_t *event_times;
    /**
     * How many user features are sent: all features of the model, or 0 if `start` is greater than 0; they are then
     * those of earlier requests. If they are sent with such a `start`, the engine compares them with its event log;
     * without an entry there, the request fails as a gap does.
     */
    size_t user_feature_count;
    /** The names of the user features. */
    const char *const *user_features;
    /** The key of each user feature. */
    const int64_t *user_keys;
    /** How many candidates there are; 1 or more. */
    size_t candidate_count;
    /** How many candidate features are sent: all item features of the model. */
    size_t candidate_feature_count;
    /** The names of the candidate features. */
    const char *const *candidate_features;
    /** For each candidate feature an array of `candidate_count` keys. */
    const int64_t *const *candidate_keys;
    /** The time of the request, in seconds, if `has_time` is 1. */
    int64_t time;
    /**
     * The time limit in microseconds; default 0: none. A request that exceeds it ends at once with
     * PAGODA_STATUS_CANCELLED; the other requests of its batch are not affected.
     */
    uint64_t timeout_us;
    /** Cancels the request when triggered; NULL = none. */
    const pagoda_cancel *cancel;
} pagoda_rank_request;

/** A request of user 0 without events and candidates. */
#define PAGODA_RANK_REQUEST_INIT \
    { sizeof(pagoda_rank_request), 0, 0, -1, 0, 0, NULL, NULL, NULL, 0, NULL, NULL, 0, 0, NULL, NULL, 0, 0, NULL }

/** How a request was answered. Start from PAGODA_RANK_RESPONSE_INIT, which sets `struct_size`. */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** The number of other requests in the same batch. */
    uint32_t batched_with;
    /** Rows of the history that were cached. */
    uint64_t cached_rows;
    /** Rows of the history that were computed. */
    uint64_t computed_rows;
    /** Nanoseconds in the queue, until the batch was formed. */
    uint64_t queue_ns;
    /** Nanoseconds that ONNX Runtime ran. */
    uint64_t run_ns;
    /** The number of tasks of the model that answered: the scores of one candidate. */
    size_t tasks;
    /** The version of the model that answered, as in its pagoda.json. The text is static: it is never freed. */
    const char *version;
} pagoda_rank_response;

/** An empty pagoda_rank_response, for pagoda_engine_rank to fill in. */
#define PAGODA_RANK_RESPONSE_INIT { sizeof(pagoda_rank_response), 0, 0, 0, 0, 0, 0, NULL }

/**
 * The state of an engine, and counters since it was opened. Start from PAGODA_ENGINE_STATS_INIT, which sets
 * `struct_size`.
 */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** Requests that were answered. */
    uint64_t answered;
    /** Requests that failed, for any reason. */
    uint64_t failed;
    /** Batches. */
    uint64_t batches;
    /** Rows of histories that were cached. */
    uint64_t cached_rows;
    /** Rows of histories that were computed. */
    uint64_t computed_rows;
    /** Requests in the queue. */
    uint64_t waiting;
    /** Users in the event log. */
    uint64_t remembered_users;
    /** Bytes of the event log. */
    uint64_t remembered_bytes;
} pagoda_engine_stats;

/** An empty pagoda_engine_stats, for pagoda_engine_get_stats to fill in. */
#define PAGODA_ENGINE_STATS_INIT { sizeof(pagoda_engine_stats), 0, 0, 0, 0, 0, 0, 0, 0 }

/**
 * Called once when an asynchronous request has ended, on a thread of Pagoda or on the thread that cancels the request.
 * It must not wait for other requests of the engine, which may be answered on the same thread. It may free the engine.
 *
 * `status` is PAGODA_STATUS_OK, or says why there are no scores; `error` then has the message, and is freed after the
 * callback returns. `scores` has a score for each candidate and task: those of the first candidate, then those of the
 * next. `scores` and `response` are valid during the callback only.
 */
typedef void (*pagoda_rank_callback)(void *user_data,
                                     pagoda_status status,
                                     const float *scores,
                                     size_t score_count,
                                     const pagoda_rank_response *response,
                                     const pagoda_error *error);

/**
 * Opens a model folder, checks all its files, and runs the model once. `options` may be NULL.
 *
 * Ownership: the caller frees the engine. Threads: any. Errors: NOT_FOUND for a missing file; UNSUPPORTED for a folder
 * of another format; MODEL for a file that was changed or truncated, and for weights that are not finite;
 * INVALID_ARGUMENT; INVALID_HANDLE; CAPACITY; BUSY if another process has the store open; IO.
 */
pagoda_status pagoda_engine_open(const char *folder,
                                 const pagoda_engine_options *options,
                                 pagoda_engine **engine,
                                 pagoda_error **error);

/**
 * Scores candidates, and waits for the result. `scores` receives a score for each candidate and task: those of the
 * first candidate in the order of the tasks, then those of the next. `score_count` is the capacity of `scores`; it
 * must be candidates times tasks (pagoda_engine_tasks). `response` may be NULL.
 *
 * If a swap changes the number of tasks before or during this call, it fails with INVALID_ARGUMENT about
 * "score_count". Get the number of tasks again, and repeat the call.
 *
 * Ownership: the caller keeps the arguments. Threads: any number at once; concurrent requests may run in one batch.
 * Errors: INVALID_HANDLE; INVALID_ARGUMENT for an invalid request; NOT_FOUND for a feature that the model does not
 * have, and about "request.start" for a gap: events before `start` are missing here, so send the whole history;
 * CAPACITY if the queue is full, or the history is larger than the pool; CANCELLED if the request was cancelled or
 * exceeded its time limit; RUNTIME if the model fails. A failed request does not affect other requests. Its events are
 * not kept, with two exceptions: they may be kept if the request was cancelled while its batch ran, and after the
 * "score_count" error above.
 */
pagoda_status pagoda_engine_rank(const pagoda_engine *engine,
                                 const pagoda_rank_request *request,
                                 float *scores,
                                 size_t score_count,
                                 pagoda_rank_response *response,
                                 pagoda_error **error);

/**
 * Starts to score candidates on a thread of Pagoda, and returns at once. An error in the request itself is returned at
 * once, and `callback` is not called. When this returns, all arguments may be freed.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: those of pagoda_engine_rank; those that occur later
 * go to the callback.
 */
pagoda_status pagoda_engine_rank_async(const pagoda_engine *engine,
                                       const pagoda_rank_request *request,
                                       pagoda_rank_callback callback,
                                       void *user_data,
                                       pagoda_error **error);

/**
 * Replaces the model folder that is served. The new one is opened and run once while the old one still serves.
 * Requests that arrived before the swap are answered by the old model; no request fails. Keys and values of the old
 * model are not used for the new one. On an error the old folder stays in service.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: those of pagoda_engine_open; BUSY also if this
 * version was swapped out a moment ago and is still being closed.
 */
pagoda_status pagoda_engine_swap(const pagoda_engine *engine, const char *folder, pagoda_error **error);

/**
 * Removes all data of users: their events, and their keys and values in the version that is served, also in the store.
 * What another version left in the store is not removed: swap to that version, and call this again. `forgotten`
 * receives the number of users that were known.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; BUSY if a request
 * of one of the users runs or is being put into a batch; IO. After an error some users may be removed: repeat the
 * call.
 */
pagoda_status pagoda_engine_forget(const pagoda_engine *engine,
                                   const uint64_t *users,
                                   size_t user_count,
                                   size_t *forgotten,
                                   pagoda_error **error);

/**
 * Starts to load the keys and values of users from host memory and the store into the pool, and returns at once, so
 * that the next request of these users need not wait. Stops when the pool is full. `started` receives the number of
 * histories that are being loaded.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; IO.
 */
pagoda_status pagoda_engine_prefetch(const pagoda_engine *engine,
                                     const uint64_t *users,
                                     size_t user_count,
                                     size_t *started,
                                     pagoda_error **error);

/**
 * Evicts the keys and values of users from the pool to host memory and the store. Without either they are lost, and
 * must be computed again. `unloaded` receives the number of users that had any in the pool.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; BUSY if a request
 * of one of the users runs or is being put into a batch; IO.
 */
pagoda_status pagoda_engine_unload(const pagoda_engine *engine,
                                   const uint64_t *users,
                                   size_t user_count,
                                   size_t *unloaded,
                                   pagoda_error **error);

/**
 * Gets where the model that is served runs: PAGODA_PROVIDER_CPU with `device_id` -1, or PAGODA_PROVIDER_CUDA with the
 * number of the GPU. Also writes to `buffer` why PAGODA_PROVIDER_AUTO chose the CPU; "" in all other cases. `length`
 * receives the number of bytes with the NUL. With `buffer` NULL and `capacity` 0 the text is not written.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL;
 * CAPACITY if the text does not fit, and then nothing is written.
 */
pagoda_status pagoda_engine_provider(const pagoda_engine *engine,
                                     pagoda_provider *provider,
                                     int32_t *device_id,
                                     char *buffer,
                                     size_t capacity,
                                     size_t *length,
                                     pagoda_error **error);

/**
 * Gets the number of tasks of the model that is served: the scores of one candidate.
 *
 * Ownership: the caller keeps the engine. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL.
 */
pagoda_status pagoda_engine_tasks(const pagoda_engine *engine, size_t *tasks, pagoda_error **error);

/**
 * Writes the pagoda.json of the model that is served to `buffer`: its features, tasks, limits and version, as JSON.
 * `length` receives the number of bytes with the NUL. With `buffer` NULL and `capacity` 0 only `length` is written.
 *
 * Ownership: the caller keeps the buffer. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL; CAPACITY
 * if the text does not fit, and then nothing is written.
 */
pagoda_status pagoda_engine_info(const pagoda_engine *engine,
                                 char *buffer,
                                 size_t capacity,
                                 size_t *length,
                                 pagoda_error **error);

/**
 * Writes the names of the embedding tables that have statistics to `buffer`, one a line; "" if the model has its
 * tables in the graph. `length` receives the number of bytes with the NUL. With `buffer` NULL and `capacity` 0 only
 * `length` is written.
 *
 * Ownership: the caller keeps the buffer. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL; CAPACITY
 * if the text does not fit, and then nothing is written.
 */
pagoda_status pagoda_engine_tables(const pagoda_engine *engine,
                                   char *buffer,
                                   size_t capacity,
                                   size_t *length,
                                   pagoda_error **error);

/**
 * Gets the state and the counters of an engine.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL or an
 * invalid `struct_size`.
 */
pagoda_status pagoda_engine_get_stats(const pagoda_engine *engine, pagoda_engine_stats *stats, pagoda_error **error);

/**
 * Gets the statistics of the cache of keys and values. All are 0 if nothing is cached; `pages` is 0 only then. A swap
 * starts a new cache, and with it new counters.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL or an
 * invalid `struct_size`.
 */
pagoda_status pagoda_engine_get_kv_stats(const pagoda_engine *engine, pagoda_kv_stats *stats, pagoda_error **error);

/**
 * Gets the statistics of an embedding table, by its name in pagoda.json. A swap opens new tables, and with them new
 * counters.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL or an
 * invalid `struct_size`; NOT_FOUND for an unknown table, and for one that is part of the graph.
 */
pagoda_status pagoda_engine_get_table_stats(const pagoda_engine *engine,
                                            const char *table,
                                            pagoda_table_stats *stats,
                                            pagoda_error **error);

/**
 * Frees an engine. NULL is allowed. Queued requests are answered first, and the pool is written to the store if there
 * is one; this waits for both. If another thread is in a call with the handle, that call does the waiting instead. In
 * a callback of the engine, what the request uses is closed after the callback returns.
 *
 * Ownership: takes the engine. Threads: any. Errors: INVALID_HANDLE, which is also logged.
 */
pagoda_status pagoda_engine_free(pagoda_engine *engine);

/* ---- Generators ----------------------------------------------------------------------------------------------------
 * Language models, served: prompts in, text out.
 */

/** The answers to a request. Nothing in it changes. Any number of threads may use a handle at the same time. */
typedef struct pagoda_generate_response pagoda_generate_response;

/**
 * A generator: an open model folder of a language model, with the keys and values of its sequences. Requests of
 * concurrent callers run together by continuous batching. Any number of threads may use a handle at the same time.
 */
typedef struct pagoda_generator pagoda_generator;

/** What runs the steps of a generator. */
typedef int32_t pagoda_driver;

/** A thread of the generator. */
#define PAGODA_DRIVER_THREAD 0
/**
 * The caller: pagoda_generator_step runs one step. pagoda_generator_generate runs steps until its request has ended.
 */
#define PAGODA_DRIVER_CALLER 1

/**
 * A fixed number of slots for the keys and values of each sequence, however long it is. Start from PAGODA_KV_POLICY_INIT, which
 * sets `struct_size` and the defaults.
 */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** The slots of a sequence in each layer: its pages hold so many tokens. With "dense" 0 is no limit. */
    int32_t cache_length;
    /**
     * The maximum number of tokens of a prompt that one step reads once the slots are full; default 64. The tokens of a step
     * replace others before it attends.
     */
    int32_t chunk_size;
    /**
     * With lastrec and smart-lastrec: the tokens at the beginning that always stay; default -1: for lastrec an eighth of the
     * slots, from 1 to 16; for smart-lastrec half of them.
     */
    int32_t protect;
    /** With h2o: the newest tokens, so many of them, stay whatever their weights; default 0. */
    int32_t grace_period;
    /** With h2o: the part of the slots that the first eviction leaves alone at the beginning; default 0.05. */
    float keep_initial_fraction;
    /** With h2o: 1 divides the weights that a token got by the time that it has been there; default 0. */
    int32_t normalise;
    /**
     * Which tokens stay, UTF-8: "dense" (all of them, and a sequence of more than `cache_length` is rejected), "lastrec",
     * "smart-lastrec", "h2o", "h2o-orig", "h2o-vlen" and, for quantised pages, "qh2o" and "qh2o-vlen".
     */
    const char *name;
    /** With qh2o: how much a token's weights count against what quantisation took from it, from 0 to 1; default 0.5. */
    float score_share;
    /** The number of layers that `cache_lengths` has; default 0. */
    int32_t cache_length_count;
    /**
     * The slots of each layer, instead of `cache_length`; NULL, the default: all have as many. A sequence's pages are those of the
     * layer that has the most.
     */
    const int32_t *cache_lengths;
    /**
     * With lastrec and smart-lastrec: 1 has the tokens of a chat's first message always stay, as the model's template writes it;
     * mostly it is the system prompt. `protect` holds for other prompts. Default 0.
     */
    int32_t protect_first_message;
} pagoda_kv_policy;

/** A policy that has no name and no slots yet. */
#define PAGODA_KV_POLICY_INIT { sizeof(pagoda_kv_policy), 0, 64, -1, 0, 0.05f, 0, NULL, 0.5f, 0, NULL, 0 }

/** How to open a generator. Start from PAGODA_GENERATOR_OPTIONS_INIT, which sets `struct_size` and the defaults. */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** What runs the steps; default PAGODA_DRIVER_THREAD. */
    pagoda_driver driver;
    /** 1, the default: sequences share the pages of equal prefixes. 0: each has pages of its own. */
    int32_t share_prefixes;
    /** The maximum number of sequences that run at the same time; default 64. */
    int32_t max_batch;
    /**
     * The maximum number of rows of a step: one for each sequence that decodes, and the chunks of prompts; default
     * 512.
     */
    int32_t max_batch_tokens;
    /**
     * How much longer a step may take than one without prompts, while sequences decode; default 1.5. The chunks of
     * prompts are cut to keep it. At least 1.1; 0: no limit but `max_batch_tokens`.
     */
    float max_stretch;
    /** The maximum number of tokens of a prompt; default 0: what the model's context has. */
    int32_t max_prompt_tokens;
    /** The maximum number of new tokens that a request may ask for; default 0: what the model's context has. */
    int32_t max_new_tokens;
    /**
     * The maximum number of answers that wait for their turn; default 4096. A request beyond it is rejected with
     * PAGODA_STATUS_CAPACITY.
     */
    int32_t queue;
    /** The unit of `kv_size`; default PAGODA_KV_SIZE_UNIT_DEFAULT: 1 GiB. */
    pagoda_kv_size_unit kv_size_unit;
    /** How pages hold keys and values, on the GPU, in host memory and on disk; default PAGODA_KV_FORMAT_DEFAULT. */
    pagoda_kv_format kv_format;
    /** The size of the pool of keys and values, in `kv_size_unit`. A sequence that does not fit into it is rejected. */
    uint64_t kv_size;
    /**
     * Bytes of host memory for keys and values that were evicted from the pool; default 0: none. The memory is pinned
     * if the model can run on a GPU.
     */
    uint64_t host_bytes;
    /** Where the model runs, and on how many threads; NULL = the defaults. Its `tables` must be NULL. */
    const pagoda_model_options *model;
    /**
     * The folder of a store for keys and values, UTF-8; NULL = none. Sessions survive a restart in it. One process at
     * a time has it open.
     */
    const char *store_path;
    /** How the store is opened; NULL = the defaults. */
    const pagoda_store_options *store_options;
    /**
     * A fixed number of slots for the keys and values of each sequence; NULL, the default: all tokens stay. With a policy nothing
     * is shared between sequences, and a session goes on only behind what was computed of it.
     */
    const pagoda_kv_policy *kv_policy;
    /** The `max_draft` of requests that do not say, 0 to 64; default 0: nothing is guessed. */
    int32_t max_draft;
    /**
     * The folder of a smaller model with the same tokenizer, which guesses tokens, UTF-8; NULL, the default: they are looked up in
     * the prompt and the answer.
     */
    const char *draft_model;
    /** Bytes of that model's pool of keys and values; default 256 MiB. What does not fit is not guessed. */
    uint64_t draft_kv_bytes;
} pagoda_generator_options;

/** The default options of a generator. */
#define PAGODA_GENERATOR_OPTIONS_INIT \
    { sizeof(pagoda_generator_options), 0, 1, 64, 512, 1.5f, 0, 0, 4096, 0, 0, 0, 0, NULL, NULL, NULL, NULL, 0, \
      NULL, 268435456 }

/** What happens if prompt and answer do not fit into the model's context. */
typedef int32_t pagoda_context_end;

/** The request is rejected. */
#define PAGODA_CONTEXT_END_REFUSE 0
/** The answer ends where the context does, as if `max_new_tokens` were less. */
#define PAGODA_CONTEXT_END_STOP 1

/** What is added to the logit of a token. Start from PAGODA_LOGIT_BIAS_INIT, which sets `struct_size`. */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** The token. */
    uint32_t token;
    /** What is added; finite. -1e30 bans the token. */
    float bias;
} pagoda_logit_bias;

/** No token and no bias. */
#define PAGODA_LOGIT_BIAS_INIT { sizeof(pagoda_logit_bias), 0, 0 }

/** When a beam search ends that has as many finished answers as beams: `early_stopping` of transformers. */
typedef int32_t pagoda_early_stop;

/** When no beam has a better score at its length than the worst of them. */
#define PAGODA_EARLY_STOP_WHEN_UNLIKELY 0
/** At once. */
#define PAGODA_EARLY_STOP_WHEN_FULL 1
/** When no beam can get a better score at any length than the worst of them. */
#define PAGODA_EARLY_STOP_NEVER 2

/** A beam search. Start from PAGODA_BEAM_OPTIONS_INIT, which sets `struct_size` and the defaults. */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** The number of beams, 1 to 16; default 4. */
    int32_t width;
    /**
     * The score of an answer is the sum of its log probabilities over its number of tokens to this power; default 1. Above 0
     * long answers get better scores, below 0 short ones.
     */
    float length_penalty;
    /** When the search ends; default PAGODA_EARLY_STOP_WHEN_UNLIKELY. */
    pagoda_early_stop early_stop;
} pagoda_beam_options;

/** A search with 4 beams. */
#define PAGODA_BEAM_OPTIONS_INIT { sizeof(pagoda_beam_options), 4, 1, 0 }

/**
 * A request for text. Start from PAGODA_GENERATE_REQUEST_INIT, which sets `struct_size` and the defaults. The request
 * has one of `prompt`, `tokens` and `messages`.
 *
 * Where the default of a number is -1, the number is not given: it is as `generation` in the model's pagoda.json says,
 * or, if that does not say either, as the comment of the field says.
 */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** The maximum number of tokens of an answer; default -1: as many as the context has room for. */
    int32_t max_new_tokens;
    /** The number of tokens before which no end-of-sequence token is taken; default -1: 0. */
    int32_t min_new_tokens;
    /** 1: tokens are drawn. 0: the most likely one is taken. Default -1: drawn if `temperature` is given and not 0. */
    int32_t do_sample;
    /** What logits are divided by; 0: the most likely token is taken. Default -1: 1. */
    float temperature;
    /** The number of most likely tokens that are drawn from; 0: all. Default -1: all. */
    int32_t top_k;
    /** The probability that the tokens drawn from have together, 0 to 1; default -1: 1. */
    float top_p;
    /** The least probability of a token that is drawn, relative to the most likely one, 0 to 1; default -1: 0. */
    float min_p;
    /** The penalty of tokens in the prompt and in the answer so far, above 0; default -1: 1, which is none. */
    float repetition_penalty;
    /** Subtracted from the logits of tokens that the answer has, -2 to 2; default 0. */
    float presence_penalty;
    /** Subtracted from the logits of tokens as often as the answer has them, -2 to 2; default 0. */
    float frequency_penalty;
    /** No sequence of so many tokens occurs twice; 0: any may. Default -1: 0. */
    int32_t no_repeat_ngram_size;
    /** The token that the last of `max_new_tokens` is forced to be; default -1: none is forced. */
    int32_t forced_eos;
    /** 1: end-of-sequence tokens do not end the answer; default 0. */
    int32_t ignore_eos;
    /** 1: the answer's text has the stop text that ended it; default 0. */
    int32_t include_stop;
    /** 1, the default: the answer's text leaves special tokens out. */
    int32_t skip_special;
    /**
     * The log probabilities of the answer's tokens, and of so many most likely tokens in their places; default -1:
     * none.
     */
    int32_t logprobs;
    /** The same of the prompt's tokens; default -1: none. The prompt is then computed as a whole. */
    int32_t prompt_logprobs;
    /** The number of answers; default 1. */
    int32_t n;
    /** 1: the text of an answer begins with the prompt; default 0. */
    int32_t echo;
    /** Requests of higher priority run first; default 0. Requests of one priority run in order of arrival. */
    int32_t priority;
    /** What happens if prompt and answer do not fit into the model's context; default PAGODA_CONTEXT_END_REFUSE. */
    pagoda_context_end context_end;
    /** 1: the seed of the draws is `seed`; 0, the default: another one for each request. */
    int32_t has_seed;
    /** With `messages`: 1, the default: the prompt ends before an answer of the model; 0: after the last message. */
    int32_t add_generation_prompt;
    /** The seed, if `has_seed` is 1. The same request with the same seed gets the same tokens. */
    uint64_t seed;
    /** The time limit in microseconds; default 0: none. The answer then has what was generated until then. */
    uint64_t timeout_us;
    /**
     * What the text follows, as a text; NULL = `tokens` or `messages`. The special tokens that the model's tokenizer
     * puts before a text are added.
     */
    const char *prompt;
    /** What the text follows, as tokens; NULL = `prompt` or `messages`. */
    const uint32_t *tokens;
    /** How many tokens there are; default 0. */
    size_t token_count;
    /**
     * What the text follows, as the messages of a chat; NULL = `prompt` or `tokens`. JSON: an array of objects with
     * `role` and `content`, and whatever else the model's chat template takes.
     */
    const char *messages;
    /** With `messages`: the tools that the model may call, JSON; NULL = none. */
    const char *tools;
    /** With `messages`: more variables of the chat template, a JSON object; NULL = none. */
    const char *variables;
    /** Texts that end the answer, `stop_count` of them; NULL = none. The answer does not have them. */
    const char *const *stop;
    /** How many texts `stop` has; default 0. */
    size_t stop_count;
    /**
     * Tokens that end the answer, beside the model's end-of-sequence tokens, `stop_token_count` of them; NULL = none.
     */
    const uint32_t *stop_tokens;
    /** How many tokens `stop_tokens` has; default 0. */
    size_t stop_token_count;
    /** What is added to the logits of tokens, `logit_bias_count` of them, each token once; NULL = none. */
    const pagoda_logit_bias *logit_bias;
    /** How many elements `logit_bias` has; default 0. */
    size_t logit_bias_count;
    /**
     * The conversation that the request belongs to; NULL = none. Its keys and values are kept, in the store too. Send
     * the whole conversation as the prompt: only what is new is computed. Requests of one session run one at a time.
     */
    const char *session;
    /** Cancels the request when triggered; NULL = none. The answer then has what was generated until then. */
    const pagoda_cancel *cancel;
    /**
     * Which tokens stay in the slots of the request's sequences; NULL, the default: as the generator was opened. The generator
     * must have been opened with a policy that needs as much of the model: with "h2o" that is "lastrec", "smart-lastrec", "h2o" and
     * "h2o-orig". `cache_length` stays the generator's: leave it 0.
     */
    const pagoda_kv_policy *kv_policy;
    /**
     * What the answer has to look like, JSON; NULL = any text. `{"json_schema": {...}}`: JSON that is valid by this JSON
     * Schema; `{"regex": "[0-9]+"}`: a text that matches as a whole; `{"choice": ["yes", "no"]}`: one of these texts;
     * `{"lark": "start: ..."}`: a text of this grammar.
     */
    const char *grammar;
    /**
     * The maximum number of tokens that are guessed for one step, by what followed the same tokens earlier in the prompt or in
     * the answer, 0 to 64. The answer is the same, sooner where much of it repeats the prompt. Default -1: as the generator was
     * opened.
     */
    int32_t max_draft;
    /**
     * A beam search, of which the answers are the `n` best, the best first; NULL, the default: none. There are fewer answers
     * where fewer are found. Nothing is drawn, and the request has no session. With `_generate_async` no token comes
     * before the search has ended: then those of the first answer come, then those of the second, and so on.
     */
    const pagoda_beam_options *beams;
} pagoda_generate_request;

/** A request with the model's defaults. Its prompt must still be set. */
#define PAGODA_GENERATE_REQUEST_INIT \
    { sizeof(pagoda_generate_request), -1, -1, -1, -1, -1, -1, -1, -1, 0, 0, -1, -1, 0, 0, 1, -1, -1, 1, 0, 0, 0, 0, 1, \
      0, 0, NULL, NULL, 0, NULL, NULL, NULL, NULL, 0, NULL, 0, NULL, 0, NULL, NULL, NULL, NULL, -1, NULL }

/** Why an answer ended. */
typedef int32_t pagoda_finish_reason;

/** It has not ended. */
#define PAGODA_FINISH_REASON_NONE 0
/** An end-of-sequence token, a stop token, or a stop text. */
#define PAGODA_FINISH_REASON_STOP 1
/** `max_new_tokens`, or the end of the context. */
#define PAGODA_FINISH_REASON_LENGTH 2
/** It was cancelled. */
#define PAGODA_FINISH_REASON_CANCELLED 3
/** Its time limit was exceeded. */
#define PAGODA_FINISH_REASON_TIMEOUT 4

/**
 * What a response has beside its answers. Start from PAGODA_GENERATE_INFO_INIT, which sets `struct_size`. The lists and
 * texts belong to the response and are valid until it is freed.
 */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** The number of prompt tokens whose keys and values were cached, of the first answer. */
    uint32_t cached_tokens;
    /** The number of rows that were computed for all answers. */
    uint64_t computed_tokens;
    /** The number of answers. */
    size_t choice_count;
    /** The tokens of the prompt. */
    const uint32_t *prompt_tokens;
    /** How many there are. */
    size_t prompt_token_count;
    /** How many tokens of the prompt have log probabilities: all of them if they were asked for, else 0. */
    size_t prompt_logprob_count;
    /** The version of the model, as in its pagoda.json. The text is static: it is never freed. */
    const char *version;
} pagoda_generate_info;

/** An empty pagoda_generate_info, for pagoda_generate_response_info to fill in. */
#define PAGODA_GENERATE_INFO_INIT { sizeof(pagoda_generate_info), 0, 0, 0, NULL, 0, 0, NULL }

/**
 * One answer. Start from PAGODA_GENERATE_CHOICE_INIT, which sets `struct_size`. The lists and texts belong to the
 * response and are valid until it is freed.
 */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** Why it ended. */
    pagoda_finish_reason finish_reason;
    /** Its text. A model can generate a NUL: then the text goes on after it. */
    const char *text;
    /** The number of bytes of the text, without the NUL at its end. */
    size_t text_length;
    /** Its tokens. Those that ended it are the last ones. */
    const uint32_t *tokens;
    /** How many there are. */
    size_t token_count;
    /** How many tokens have log probabilities: all of them if they were asked for, else 0. */
    size_t logprob_count;
    /** Nanoseconds from the request to its first step. */
    uint64_t queued_ns;
    /** Nanoseconds from the request to the first token. */
    uint64_t first_token_ns;
    /** Nanoseconds from the first token to the last. */
    uint64_t generation_ns;
    /** What the request's grammar expects next, if the answer ended before it was valid; else NULL. */
    const char *missing;
    /** 1: the answer is of a beam search, and has a score. */
    int32_t has_score;
    /**
     * Its score: the sum of its log probabilities over its number of tokens to the power of the length penalty. Penalties and
     * `logit_bias` are part of it.
     */
    float score;
} pagoda_generate_choice;

/** An empty pagoda_generate_choice, for pagoda_generate_response_choice to fill in. */
#define PAGODA_GENERATE_CHOICE_INIT { sizeof(pagoda_generate_choice), 0, NULL, 0, NULL, 0, 0, 0, 0, 0, NULL, 0, 0 }

/**
 * What the model thought of a token, before anything that the request asked for. Start from
 * PAGODA_TOKEN_LOGPROBS_INIT, which sets `struct_size`.
 */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** The natural logarithm of the token's probability. */
    float logprob;
    /** Its place among all tokens, 1 for the most likely; 0: it has no probability, as the first token of a prompt. */
    uint32_t rank;
    /** How many of the most likely tokens there are: as many as were asked for. */
    size_t top_count;
    /** Those tokens, the most likely first. */
    const uint32_t *top_tokens;
    /** Their log probabilities. */
    const float *top_logprobs;
} pagoda_token_logprobs;

/** An empty pagoda_token_logprobs, for pagoda_generate_response_logprobs and
 * pagoda_generate_response_prompt_logprobs to fill in. */
#define PAGODA_TOKEN_LOGPROBS_INIT { sizeof(pagoda_token_logprobs), 0, 0, 0, NULL, NULL }

/** A token of an answer, as it is generated. */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** Which answer it belongs to. */
    uint32_t choice;
    /** The token. */
    uint32_t id;
    /** Why the answer ends with this token; PAGODA_FINISH_REASON_NONE if it does not. */
    pagoda_finish_reason finish_reason;
    /** The text that is new. Empty if the token ends inside a character, or if the text may begin a stop text. */
    const char *text;
    /** The number of bytes of the text, without the NUL at its end. */
    size_t text_length;
    /** The log probabilities; NULL if they were not asked for. */
    const pagoda_token_logprobs *logprobs;
} pagoda_generate_token;

/**
 * Gets what a response has beside its answers.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL or an
 * invalid `struct_size`.
 */
pagoda_status pagoda_generate_response_info(const pagoda_generate_response *response,
                                            pagoda_generate_info *info,
                                            pagoda_error **error);

/**
 * Gets an answer of a response, the first one with `index` 0.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL, an
 * invalid `struct_size`, and an `index` out of range.
 */
pagoda_status pagoda_generate_response_choice(const pagoda_generate_response *response,
                                              size_t index,
                                              pagoda_generate_choice *choice,
                                              pagoda_error **error);

/**
 * Gets the log probabilities of the token `index` of the answer `choice`. The lists belong to the response and are
 * valid until it is freed.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL, an
 * invalid `struct_size`, a `choice` or an `index` out of range, and if they were not asked for.
 */
pagoda_status pagoda_generate_response_logprobs(const pagoda_generate_response *response,
                                                size_t choice,
                                                size_t index,
                                                pagoda_token_logprobs *logprobs,
                                                pagoda_error **error);

/**
 * Gets the log probabilities of the token `index` of the prompt. The first token has none: its `rank` is 0. The lists
 * belong to the response and are valid until it is freed.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL, an
 * invalid `struct_size`, an `index` out of range, and if they were not asked for.
 */
pagoda_status pagoda_generate_response_prompt_logprobs(const pagoda_generate_response *response,
                                                       size_t index,
                                                       pagoda_token_logprobs *logprobs,
                                                       pagoda_error **error);

/**
 * Frees a response. NULL is allowed.
 *
 * Ownership: takes the response. Threads: any. Errors: INVALID_HANDLE, which is also logged.
 */
pagoda_status pagoda_generate_response_free(pagoda_generate_response *response);

/**
 * The state of a generator, and counters since it was opened. Start from PAGODA_GENERATOR_STATS_INIT, which sets
 * `struct_size`.
 */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** Answers that ended with a stop or at their length. */
    uint64_t answered;
    /** Answers that were cancelled or exceeded their time limit. */
    uint64_t ended_early;
    /** Answers that failed, and requests that were rejected. */
    uint64_t failed;
    /** Steps. */
    uint64_t steps;
    /** Rows that were computed. */
    uint64_t computed_tokens;
    /** Tokens of prompts whose keys and values were cached. */
    uint64_t cached_tokens;
    /** Tokens of answers. */
    uint64_t generated_tokens;
    /** Sequences that were preempted because pages ran out. */
    uint64_t preemptions;
    /** Sequences that wait. */
    uint64_t waiting;
    /** Sequences that run. */
    uint64_t running;
    /** Microseconds that the steps took in all. */
    uint64_t step_us;
    /** Microseconds of them that the model took. */
    uint64_t model_us;
    /** Tokens that were guessed and computed. */
    uint64_t drafted_tokens;
    /** Those of them that were right. */
    uint64_t accepted_tokens;
    /** Steps of a sequence with such tokens. */
    uint64_t drafts;
} pagoda_generator_stats;

/** An empty pagoda_generator_stats, for pagoda_generator_get_stats to fill in. */
#define PAGODA_GENERATOR_STATS_INIT { sizeof(pagoda_generator_stats), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

/**
 * Called for each token of an asynchronous request, in their order, on a thread of Pagoda. `token` and what it points
 * to are valid during the call only. It may trigger the cancel of the request; tokens that were generated before that
 * still follow.
 */
typedef void (*pagoda_token_callback)(void *user_data, const pagoda_generate_token *token);

/**
 * Called once when an asynchronous request has ended, after its last token, on a thread of Pagoda. Tokens of other
 * requests wait until it returns: it must not wait for requests of the generator. It may free the generator.
 *
 * `status` is PAGODA_STATUS_OK, or says why there is no response; `error` then has the message, and is freed after the
 * callback returns. The callback owns `response`: it frees or keeps it.
 */
typedef void (*pagoda_generate_callback)(void *user_data,
                                         pagoda_status status,
                                         pagoda_generate_response *response,
                                         const pagoda_error *error);

/**
 * Opens a model folder of a language model, and checks all its files. `options` may be NULL.
 *
 * Ownership: the caller frees the generator. Threads: any. Errors: NOT_FOUND for a missing file; UNSUPPORTED for a
 * folder of another format or kind; MODEL for a file that was changed or truncated, and for a tokenizer or a template
 * that can not be read; INVALID_ARGUMENT; INVALID_HANDLE; CAPACITY; BUSY if another process has the store open; IO.
 */
pagoda_status pagoda_generator_open(const char *folder,
                                    const pagoda_generator_options *options,
                                    pagoda_generator **generator,
                                    pagoda_error **error);

/**
 * Answers a request, and waits for the end of all its answers. A request that was cancelled or exceeded its time limit
 * is no error: the answers have what was generated until then, and their `finish_reason` says so.
 *
 * Ownership: the caller keeps the arguments and frees the response. Threads: any number at once; concurrent requests
 * run together. Errors: INVALID_HANDLE; INVALID_ARGUMENT for an invalid request, and for one that does not fit into
 * the model's context or the limits of the options; CAPACITY if too many answers wait, or the sequence is larger than
 * the pool; UNSUPPORTED for a chat where the model has no template; RUNTIME if the model fails. A failed request does
 * not affect other requests.
 */
pagoda_status pagoda_generator_generate(const pagoda_generator *generator,
                                        const pagoda_generate_request *request,
                                        pagoda_generate_response **response,
                                        pagoda_error **error);

/**
 * Starts to answer a request, and returns at once. `token_callback` is called for each token, and may be NULL;
 * `callback` is called once, at the end. An error in the request itself is returned at once, and neither is called.
 * When this returns, all arguments may be freed. With PAGODA_DRIVER_CALLER the request proceeds in
 * pagoda_generator_step.
 *
 * Ownership: the caller keeps the arguments; `user_data` must be valid until `callback` returns. Threads: any. Errors:
 * those of pagoda_generator_generate; those that occur later go to the callback.
 */
pagoda_status pagoda_generator_generate_async(const pagoda_generator *generator,
                                              const pagoda_generate_request *request,
                                              pagoda_token_callback token_callback,
                                              pagoda_generate_callback callback,
                                              void *user_data,
                                              pagoda_error **error);

/**
 * Runs one step of a generator with PAGODA_DRIVER_CALLER: the model once, for all sequences that run. `more` receives
 * 1 if there is more to do, else 0. A request that waits for the store is more to do.
 *
 * Ownership: the caller keeps the arguments. Threads: any; one step runs at a time. Errors: INVALID_HANDLE;
 * INVALID_ARGUMENT for a NULL; UNSUPPORTED if the generator runs its steps itself. A failure of the model is an error
 * of the requests.
 */
pagoda_status pagoda_generator_step(const pagoda_generator *generator, int32_t *more, pagoda_error **error);

/**
 * Writes the tokens of the prompt of a request to `tokens`, as a request with it would have them. `count` receives
 * their number. With `tokens` NULL and `capacity` 0 only `count` is written. The other fields of the request are
 * checked, and not used.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; CAPACITY if they
 * do not fit, and then nothing is written; UNSUPPORTED for a chat where the model has no template; MODEL for a text
 * that the model's vocabulary can not spell.
 */
pagoda_status pagoda_generator_tokenize(const pagoda_generator *generator,
                                        const pagoda_generate_request *request,
                                        uint32_t *tokens,
                                        size_t capacity,
                                        size_t *count,
                                        pagoda_error **error);

/**
 * Writes the text of tokens to `buffer`; with `skip_special` 1 without special tokens. `length` receives the number of
 * bytes with the NUL. With `buffer` NULL and `capacity` 0 only `length` is written. Bytes that are not UTF-8 become
 * U+FFFD, and a NUL becomes a backslash and a 0. A token that the vocabulary does not have has no text.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; CAPACITY if the
 * text does not fit, and then nothing is written; MODEL if the tokenizer fails.
 */
pagoda_status pagoda_generator_detokenize(const pagoda_generator *generator,
                                          const uint32_t *tokens,
                                          size_t token_count,
                                          int32_t skip_special,
                                          char *buffer,
                                          size_t capacity,
                                          size_t *length,
                                          pagoda_error **error);

/**
 * Removes all data of sessions: their keys and values, in the pool, in host memory and in the store. Pages that they
 * share with others stay. `forgotten` receives the number of sessions that were known.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; BUSY if a request
 * of one of the sessions runs; IO. After an error some sessions may be removed: repeat the call.
 */
pagoda_status pagoda_generator_forget(const pagoda_generator *generator,
                                      const char *const *sessions,
                                      size_t session_count,
                                      size_t *forgotten,
                                      pagoda_error **error);

/**
 * Evicts the keys and values of sessions from the pool to host memory and the store. Without either they are lost, and
 * must be computed again. `unloaded` receives the number of sessions that had any in the pool.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; BUSY if a request
 * of one of the sessions runs; IO.
 */
pagoda_status pagoda_generator_unload(const pagoda_generator *generator,
                                      const char *const *sessions,
                                      size_t session_count,
                                      size_t *unloaded,
                                      pagoda_error **error);

/**
 * Starts to load the keys and values of sessions from host memory and the store into the pool, and returns at once, so
 * that the next request of these sessions need not wait. Stops when the pool is full. `started` receives the number of
 * sessions that are being loaded.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; IO.
 */
pagoda_status pagoda_generator_prefetch(const pagoda_generator *generator,
                                        const char *const *sessions,
                                        size_t session_count,
                                        size_t *started,
                                        pagoda_error **error);

/**
 * Drops all sessions, and all prefixes that no request uses now, from the pool; with `stored` 1 from host memory and
 * the store, too. `cleared` receives the number of histories that there were.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; BUSY if a request
 * runs; IO.
 */
pagoda_status pagoda_generator_clear(const pagoda_generator *generator,
                                     int32_t stored,
                                     size_t *cleared,
                                     pagoda_error **error);

/**
 * Sets whether tokens are guessed where requests allow it (`max_draft`), from the next step on: 1, as when the generator was
 * opened, or 0. With `clear` 1 the next step also forgets how good guesses were and what they cost, and counts them from 0
 * again.
 *
 * Ownership: the caller keeps the generator. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT.
 */
pagoda_status pagoda_generator_set_speculation(const pagoda_generator *generator,
                                               int32_t on,
                                               int32_t clear,
                                               pagoda_error **error);

/**
 * Gets where the model runs: PAGODA_PROVIDER_CPU with `device_id` -1, or PAGODA_PROVIDER_CUDA with the number of the
 * GPU. Also writes to `buffer` why PAGODA_PROVIDER_AUTO chose the CPU; "" in all other cases. `length` receives the
 * number of bytes with the NUL. With `buffer` NULL and `capacity` 0 the text is not written.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL;
 * CAPACITY if the text does not fit, and then nothing is written.
 */
pagoda_status pagoda_generator_provider(const pagoda_generator *generator,
                                        pagoda_provider *provider,
                                        int32_t *device_id,
                                        char *buffer,
                                        size_t capacity,
                                        size_t *length,
                                        pagoda_error **error);

/**
 * Writes the pagoda.json of the model to `buffer`: its special tokens, defaults of generation, limits and version, as
 * JSON. `length` receives the number of bytes with the NUL. With `buffer` NULL and `capacity` 0 only `length` is
 * written.
 *
 * Ownership: the caller keeps the buffer. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL; CAPACITY
 * if the text does not fit, and then nothing is written.
 */
pagoda_status pagoda_generator_info(const pagoda_generator *generator,
                                    char *buffer,
                                    size_t capacity,
                                    size_t *length,
                                    pagoda_error **error);

/**
 * Gets the state and the counters of a generator.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL or an
 * invalid `struct_size`.
 */
pagoda_status pagoda_generator_get_stats(const pagoda_generator *generator,
                                         pagoda_generator_stats *stats,
                                         pagoda_error **error);

/**
 * Gets the statistics of the cache of keys and values. Owners are sequences and sessions.
 *
 * Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL or an
 * invalid `struct_size`.
 */
pagoda_status pagoda_generator_get_kv_stats(const pagoda_generator *generator,
                                            pagoda_kv_stats *stats,
                                            pagoda_error **error);

/**
 * Frees a generator. NULL is allowed. Asynchronous requests that wait or run are cancelled, and their callbacks called
 * first; the pool is written to the store if there is one. This waits for both. If another thread is in a call with the
 * handle, that call goes on to its end and does the waiting instead. In a callback of the generator, the other
 * callbacks are called after it returns.
 *
 * Ownership: takes the generator. Threads: any. Errors: INVALID_HANDLE, which is also logged.
 */
pagoda_status pagoda_generator_free(pagoda_generator *generator);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* PAGODA_H */
