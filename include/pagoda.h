/*
 * Pagoda: inference for models that remember. The C interface.
 *
 * This file is generated from sdk/src/ffi by `make header`. Do not edit it.
 *
 * Conventions
 * - Functions that can fail return a pagoda_status, 0 for success, and take a `pagoda_error **` last. It may be NULL;
 *   otherwise a failure puts an error there that the caller frees. Other outputs are written on success only.
 * - Handles (pagoda_model *, pagoda_tensor *, ...) are numbers, not addresses: a freed, forged or mixed-up handle is an
 *   error, never a crash. Every handle is freed with the _free of its type; _free(NULL) is fine.
 * - Every function may be called from any thread.
 * - Texts are UTF-8. Dimensions are int64_t, counts size_t.
 * - Structs begin with struct_size; start from their PAGODA_..._INIT. They only ever grow at the end.
 */

#ifndef PAGODA_H
#define PAGODA_H

#include <stddef.h>
#include <stdint.h>

/* Default options for opening a model. */
#define PAGODA_MODEL_OPTIONS_INIT { sizeof(pagoda_model_options), 0, 0, 0, 0, 0, NULL, NULL }

/* A pagoda_value_info to be filled in. */
#define PAGODA_VALUE_INFO_INIT { sizeof(pagoda_value_info), 0, NULL, 0, NULL, NULL }

/** The version of the binary interface. It changes only if a program built against another one would break. */
#define PAGODA_ABI_VERSION 1

/** Stops runs. One may be handed to any number of runs; once triggered it stays so. */
typedef struct pagoda_cancel pagoda_cancel;

/**
 * What went wrong, in words. Functions that fail hand one out through their last argument, unless that is NULL; it
 * belongs to the caller, who frees it with pagoda_error_free.
 */
typedef struct pagoda_error pagoda_error;

/** An open model. Any number of threads may use one handle at the same time. */
typedef struct pagoda_model pagoda_model;

/**
 * A tensor: a type, dimensions, and memory that is Pagoda's, the caller's, or ONNX Runtime's. Runs read and write
 * that memory in place. Freeing the handle while a run uses the tensor is fine: the memory goes when the run is done.
 */
typedef struct pagoda_tensor pagoda_tensor;

/** How a call ended. 0 is success; numbers are never reused. A caller must expect numbers that it does not know. */
typedef int32_t pagoda_status;

/** How much is logged. */
typedef int32_t pagoda_log_level;

/**
 * Called with each line of the log, from any thread. `source` says who speaks, e.g. "onnxruntime". The texts are valid
 * during the call only. It must not call pagoda_log_set or open models; lines that arise while it runs are dropped.
 */
typedef void (*pagoda_log_callback)(void *user_data, pagoda_log_level level, const char *source, const char *message);

/** The type of a tensor's elements: ONNX's numbers (TensorProto.DataType). */
typedef int32_t pagoda_type;

/** Called once, from any thread, when Pagoda is done with memory that it was lent. */
typedef void (*pagoda_release_callback)(void *user_data);

/** Where a model runs. */
typedef int32_t pagoda_provider;

/** How much ONNX Runtime rewrites the graph when a model is opened. */
typedef int32_t pagoda_optimization;

/** How to open a model. Start from PAGODA_MODEL_OPTIONS_INIT, which sets `struct_size` and the defaults. */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** Where it runs; default PAGODA_PROVIDER_AUTO. */
    pagoda_provider provider;
    /** Which GPU; default 0. */
    int32_t device_id;
    /** Threads that work on one run; default 0 = one for each core. */
    int32_t intra_op_threads;
    /** How much the graph is rewritten; default PAGODA_OPTIMIZATION_ALL. */
    pagoda_optimization optimization;
    /**
     * 1: those threads sleep while there is nothing to do; 0, the default: they look out for work for a while after
     * each run, which wakes them sooner and takes cores from everything else in the process, other models too.
     */
    int32_t sleep_when_idle;
    /**
     * The ONNX Runtime library, UTF-8. NULL: the environment variable PAGODA_ONNXRUNTIME, then libonnxruntime.so.1 or
     * libonnxruntime.so beside libpagoda.so, then the system's loader. A process uses one; the first model decides.
     */
    const char *onnxruntime_path;
    /** Where to write a profile of every run, in Chrome's trace format, when the model is freed; NULL = none. */
    const char *profile_path;
} pagoda_model_options;

/** An input or an output of a model. Start from PAGODA_VALUE_INFO_INIT, which sets `struct_size`. */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** The type of its elements; PAGODA_TYPE_UNDEFINED if it is not a tensor. */
    pagoda_type type;
    /** Its name. */
    const char *name;
    /** How many dimensions it has. */
    size_t rank;
    /** Its dimensions, -1 where one is free; NULL if the model does not even say how many there are. */
    const int64_t *dims;
    /** For each dimension the name of its symbol; "" where it is fixed or has none. */
    const char *const *symbols;
} pagoda_value_info;

/**
 * Called once when an asynchronous run is done, on a thread of Pagoda's; what it does holds up other asynchronous
 * runs. `status` is PAGODA_OK or says why there are no outputs; then `error` has the words. `error` is freed after
 * the callback returns, and counts as a live object until then. `outputs` is the list of the call, with a new tensor where it had NULL: those belong to the callback,
 * which frees them or keeps them. The list itself is valid during the callback only.
 */
typedef void (*pagoda_run_callback)(void *user_data,
                                    pagoda_status status,
                                    pagoda_tensor *const *outputs,
                                    size_t output_count,
                                    const pagoda_error *error);

/** Success. */
#define PAGODA_OK 0

/**
 * An argument has a value that can not be used; pagoda_error_argument names it. Where the model's operators found it
 * during a run, the message names the tensor instead.
 */
#define PAGODA_INVALID_ARGUMENT 1

/** A handle is NULL, was freed, is of another type, or never was one. */
#define PAGODA_INVALID_HANDLE 2

/** A file, a library or a name does not exist. */
#define PAGODA_NOT_FOUND 3

/** What was asked for is not possible with this build, this model or this machine. */
#define PAGODA_UNSUPPORTED 4

/** A limit is reached: a queue is full, a buffer too small, memory exhausted. */
#define PAGODA_CAPACITY 5

/** The caller cancelled the run. */
#define PAGODA_CANCELLED 6

/** The model can not be loaded. */
#define PAGODA_MODEL 7

/** ONNX Runtime failed while running the model. */
#define PAGODA_RUNTIME 8

/** Reading or writing a file failed. */
#define PAGODA_IO 9

/** A bug in Pagoda: something panicked. Please report it. */
#define PAGODA_INTERNAL 10

/** Someone else uses it now; try again when they are done. */
#define PAGODA_BUSY 11

/** Nothing. */
#define PAGODA_LOG_OFF 0

/** What failed, above all where there is no caller to tell. */
#define PAGODA_LOG_ERROR 1

/** What is likely not as the caller wants it, such as a model on the CPU where a GPU was hoped for. */
#define PAGODA_LOG_WARN 2

/** What happens rarely and is good to know. */
#define PAGODA_LOG_INFO 3

/** What helps to find a mistake, such as every error that a call returned. */
#define PAGODA_LOG_DEBUG 4

/** Everything. */
#define PAGODA_LOG_TRACE 5

/** Not a tensor (a sequence or a map, as an output of some models), or a type that this library does not know. */
#define PAGODA_TYPE_UNDEFINED 0

/** 32-bit float. */
#define PAGODA_TYPE_F32 1

/** Unsigned 8-bit integer. */
#define PAGODA_TYPE_U8 2

/** Signed 8-bit integer. */
#define PAGODA_TYPE_I8 3

/** Unsigned 16-bit integer. */
#define PAGODA_TYPE_U16 4

/** Signed 16-bit integer. */
#define PAGODA_TYPE_I16 5

/** Signed 32-bit integer. */
#define PAGODA_TYPE_I32 6

/** Signed 64-bit integer. */
#define PAGODA_TYPE_I64 7

/** UTF-8 text. */
#define PAGODA_TYPE_STRING 8

/** Truth value, one byte, 0 or 1. */
#define PAGODA_TYPE_BOOL 9

/** 16-bit float (IEEE half). */
#define PAGODA_TYPE_F16 10

/** 64-bit float. */
#define PAGODA_TYPE_F64 11

/** Unsigned 32-bit integer. */
#define PAGODA_TYPE_U32 12

/** Unsigned 64-bit integer. */
#define PAGODA_TYPE_U64 13

/** Two 32-bit floats. */
#define PAGODA_TYPE_COMPLEX64 14

/** Two 64-bit floats. */
#define PAGODA_TYPE_COMPLEX128 15

/** 16-bit float with the exponent of a 32-bit one. */
#define PAGODA_TYPE_BF16 16

/** 8-bit float, 4 bits of exponent, no infinity. */
#define PAGODA_TYPE_F8E4M3FN 17

/** 8-bit float, 4 bits of exponent, no infinity, no negative zero. */
#define PAGODA_TYPE_F8E4M3FNUZ 18

/** 8-bit float, 5 bits of exponent. */
#define PAGODA_TYPE_F8E5M2 19

/** 8-bit float, 5 bits of exponent, no infinity, no negative zero. */
#define PAGODA_TYPE_F8E5M2FNUZ 20

/** Unsigned 4-bit integer, two a byte, the first in the low bits. */
#define PAGODA_TYPE_U4 21

/** Signed 4-bit integer, two a byte, the first in the low bits. */
#define PAGODA_TYPE_I4 22

/** 4-bit float, two a byte, the first in the low bits. */
#define PAGODA_TYPE_F4E2M1 23

/** 8-bit power of two, used as a scale. */
#define PAGODA_TYPE_F8E8M0 24

/** Unsigned 2-bit integer, four a byte, the first in the low bits. */
#define PAGODA_TYPE_U2 25

/** Signed 2-bit integer, four a byte, the first in the low bits. */
#define PAGODA_TYPE_I2 26

/** On a GPU where there is one, else on the CPU; pagoda_model_provider says which it became and why. */
#define PAGODA_PROVIDER_AUTO 0

/** On the CPU. */
#define PAGODA_PROVIDER_CPU 1

/** On an NVIDIA GPU, or not at all. */
#define PAGODA_PROVIDER_CUDA 2

/** Everything it can do. */
#define PAGODA_OPTIMIZATION_ALL 0

/** Nothing. */
#define PAGODA_OPTIMIZATION_NONE 1

/** What keeps the graph standard ONNX. */
#define PAGODA_OPTIMIZATION_BASIC 2

/** Fusions of nodes too, but not of memory layouts. */
#define PAGODA_OPTIMIZATION_EXTENDED 3

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * The name of a status without its prefix, e.g. "INVALID_ARGUMENT"; "UNKNOWN" for a number that has none.
 *
 * Ownership: the text is static. Threads: any. Errors: none.
 */
const char *pagoda_status_name(pagoda_status status);

/**
 * The status of an error. A handle that is not one gives PAGODA_INVALID_HANDLE.
 *
 * Ownership: takes nothing over. Threads: any. Errors: none but that.
 */
pagoda_status pagoda_error_code(const pagoda_error *error);

/**
 * What was wrong with which value and what to do about it. A handle that is not one gives "".
 *
 * Ownership: the text belongs to the error and lives until it is freed. Threads: any. Errors: none but that.
 */
const char *pagoda_error_message(const pagoda_error *error);

/**
 * Which argument was at fault, e.g. "inputs[1]" or "options.provider"; "" if none was. A handle that is not one gives
 * "".
 *
 * Ownership: the text belongs to the error and lives until it is freed. Threads: any. Errors: none but that.
 */
const char *pagoda_error_argument(const pagoda_error *error);

/**
 * Frees an error. NULL is fine.
 *
 * Ownership: takes the error over. Threads: any. Errors: PAGODA_INVALID_HANDLE, and a line in the log.
 */
pagoda_status pagoda_error_free(pagoda_error *error);

/**
 * The version of the binary interface of this library: PAGODA_ABI_VERSION of the header it was built with.
 *
 * Threads: any. Errors: none.
 */
uint32_t pagoda_abi_version(void);

/**
 * Whether a program built with a header of version `header_version` works with this library. Call it first, with
 * PAGODA_ABI_VERSION.
 *
 * Threads: any. Errors: UNSUPPORTED, naming both versions.
 */
pagoda_status pagoda_abi_check(uint32_t header_version, pagoda_error **error);

/**
 * The version of this library, e.g. "0.1.0".
 *
 * Ownership: the text is static. Threads: any. Errors: none.
 */
const char *pagoda_version(void);

/**
 * How many objects (errors, models, tensors, cancels) the caller holds handles of: 0 if everything was freed.
 *
 * Threads: any. Errors: none.
 */
size_t pagoda_live_objects(void);

/**
 * The metrics of the process as Prometheus text (to be served as "application/openmetrics-text; version=1.0.0"). With `buffer` NULL and `capacity` 0 only `length` is written: the
 * bytes needed, with the NUL at the end. The text may have grown by the next call: leave some room.
 *
 * Ownership: takes nothing over. Threads: any. Errors: INVALID_ARGUMENT for a NULL, CAPACITY if the text does not fit;
 * then nothing is written.
 */
pagoda_status pagoda_metrics_text(char *buffer,
                                  size_t capacity,
                                  size_t *length,
                                  pagoda_error **error);

/**
 * Has the log of Pagoda and of ONNX Runtime sent to `callback`, up to `level`; NULL stops it. Without a callback nothing
 * is logged. When this returns, the callback of before is not running and will not be called again.
 *
 * Ownership: `user_data` must live until another callback is set. Threads: any, but not from within the callback.
 * Errors: INVALID_ARGUMENT for a level that there is not, UNSUPPORTED in a Rust program with a logger of its own.
 */
pagoda_status pagoda_log_set(pagoda_log_level level,
                             pagoda_log_callback callback,
                             void *user_data,
                             pagoda_error **error);

/**
 * The name of a type, e.g. "f32"; "undefined" for a number that has none.
 *
 * Ownership: the text is static. Threads: any. Errors: none.
 */
const char *pagoda_type_name(pagoda_type type);

/**
 * Makes a tensor in memory of its own, aligned to 64 bytes: zeros, or empty strings.
 *
 * Ownership: the caller frees the tensor. Threads: any. Errors: INVALID_ARGUMENT for a type that there is not, a
 * negative or overflowing shape, a NULL; CAPACITY if there is no memory.
 */
pagoda_status pagoda_tensor_new(pagoda_type type,
                                const int64_t *dims,
                                size_t rank,
                                pagoda_tensor **tensor,
                                pagoda_error **error);

/**
 * Makes a tensor over memory of the caller; nothing is copied. `data` must be aligned for the type and stay valid until
 * `release` is called (or, without one, until the tensor is freed and every run that uses it is done). If this fails,
 * `release` is not called.
 *
 * Ownership: the caller frees the tensor, and the memory after `release`. Threads: any. Errors: INVALID_ARGUMENT for
 * a type that there is not, strings, a negative or overflowing shape, too few bytes, a misaligned or NULL pointer.
 */
pagoda_status pagoda_tensor_borrow(pagoda_type type,
                                   const int64_t *dims,
                                   size_t rank,
                                   void *data,
                                   size_t bytes,
                                   pagoda_release_callback release,
                                   void *user_data,
                                   pagoda_tensor **tensor,
                                   pagoda_error **error);

/**
 * Makes a tensor of strings with a copy of them. `lengths` has the bytes of each string, which may then hold NULs and
 * need none at its end; with `lengths` NULL each string ends at its NUL.
 *
 * Ownership: the caller frees the tensor. Threads: any. Errors: INVALID_ARGUMENT for a count that is not that of the
 * dimensions, a NULL, a text that is not UTF-8.
 */
pagoda_status pagoda_tensor_new_strings(const char *const *values,
                                        const size_t *lengths,
                                        size_t count,
                                        const int64_t *dims,
                                        size_t rank,
                                        pagoda_tensor **tensor,
                                        pagoda_error **error);

/**
 * The type of a tensor's elements.
 *
 * Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT for a NULL.
 */
pagoda_status pagoda_tensor_type(const pagoda_tensor *tensor, pagoda_type *type, pagoda_error **error);

/**
 * The dimensions of a tensor.
 *
 * Ownership: `dims` belongs to the tensor and lives until it is freed. Threads: any. Errors: INVALID_HANDLE,
 * INVALID_ARGUMENT for a NULL.
 */
pagoda_status pagoda_tensor_dims(const pagoda_tensor *tensor, const int64_t **dims, size_t *rank, pagoda_error **error);

/**
 * The memory of a tensor, to read or to write while no run uses it.
 *
 * Ownership: the memory belongs to the tensor and lives until it is freed. Threads: any, but who reads and who writes
 * when is for the caller to order. Errors: INVALID_HANDLE, INVALID_ARGUMENT for a NULL, UNSUPPORTED for strings.
 */
pagoda_status pagoda_tensor_data(const pagoda_tensor *tensor, void **data, size_t *bytes, pagoda_error **error);

/**
 * One element of a tensor of strings: `length` bytes of UTF-8, without a NUL at the end.
 *
 * Ownership: the text belongs to the tensor and lives until it is freed. Threads: any. Errors: INVALID_HANDLE,
 * INVALID_ARGUMENT for a NULL, an index beyond the end, or a tensor of numbers.
 */
pagoda_status pagoda_tensor_string(const pagoda_tensor *tensor,
                                   size_t index,
                                   const char **text,
                                   size_t *length,
                                   pagoda_error **error);

/**
 * Frees a tensor. NULL is fine. A run that uses it goes on; its memory goes when the run is done.
 *
 * Ownership: takes the tensor over. Threads: any. Errors: PAGODA_INVALID_HANDLE, and a line in the log.
 */
pagoda_status pagoda_tensor_free(pagoda_tensor *tensor);

/**
 * Opens the model in an .onnx file. The ai.pagoda operators are there without further ado. `options` may be NULL.
 *
 * Ownership: the caller frees the model. Threads: any. Errors: NOT_FOUND for the file or for ONNX Runtime, IO for a file
 * that can not be read, MODEL for one that is not a model that can be run, UNSUPPORTED for a GPU that is not there,
 * INVALID_ARGUMENT.
 */
pagoda_status pagoda_model_open(const char *path,
                                const pagoda_model_options *options,
                                pagoda_model **model,
                                pagoda_error **error);

/**
 * Opens a model from the bytes of an .onnx file. `options` may be NULL.
 *
 * Ownership: the caller frees the model; the bytes are copied. Threads: any. Errors: as for pagoda_model_open.
 */
pagoda_status pagoda_model_open_memory(const void *bytes,
                                       size_t size,
                                       const pagoda_model_options *options,
                                       pagoda_model **model,
                                       pagoda_error **error);

/**
 * Where a model runs, PAGODA_PROVIDER_CPU or PAGODA_PROVIDER_CUDA, and why PAGODA_PROVIDER_AUTO became the CPU ("" if
 * it did not or was not asked for).
 *
 * Ownership: `reason` belongs to the model and lives until it is freed. Threads: any. Errors: INVALID_HANDLE,
 * INVALID_ARGUMENT for a NULL.
 */
pagoda_status pagoda_model_provider(const pagoda_model *model,
                                    pagoda_provider *provider,
                                    const char **reason,
                                    pagoda_error **error);

/**
 * How many inputs a model has.
 *
 * Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT for a NULL.
 */
pagoda_status pagoda_model_input_count(const pagoda_model *model, size_t *count, pagoda_error **error);

/**
 * How many outputs a model has.
 *
 * Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT for a NULL.
 */
pagoda_status pagoda_model_output_count(const pagoda_model *model, size_t *count, pagoda_error **error);

/**
 * One input of a model.
 *
 * Ownership: what `info` points to belongs to the model and lives until it is freed. Threads: any. Errors:
 * INVALID_HANDLE, INVALID_ARGUMENT for a NULL, a small struct_size, an index beyond the end.
 */
pagoda_status pagoda_model_input(const pagoda_model *model,
                                 size_t index,
                                 pagoda_value_info *info,
                                 pagoda_error **error);

/**
 * One output of a model.
 *
 * Ownership: what `info` points to belongs to the model and lives until it is freed. Threads: any. Errors:
 * INVALID_HANDLE, INVALID_ARGUMENT for a NULL, a small struct_size, an index beyond the end.
 */
pagoda_status pagoda_model_output(const pagoda_model *model,
                                  size_t index,
                                  pagoda_value_info *info,
                                  pagoda_error **error);

/**
 * Frees a model. NULL is fine. Runs that are under way go on to their end.
 *
 * Ownership: takes the model over. Threads: any. Errors: PAGODA_INVALID_HANDLE, and a line in the log.
 */
pagoda_status pagoda_model_free(pagoda_model *model);

/**
 * Runs a model and waits for it. `inputs[i]` is the input named `input_names[i]`; every input must be there. Where
 * `outputs[i]` is a tensor, the output named `output_names[i]` is written into its memory; where it is NULL, a new
 * tensor is put in its place. Nothing is copied between those memories and the run (except strings). One memory may
 * be an input and an output at once, if the model's operators allow that, as pools of keys and values do.
 * `cancel` may be NULL.
 *
 * Ownership: takes nothing over; the caller frees new outputs. Threads: any number at once on one model; the memory
 * of the tensors must not be written to meanwhile, and that of bound outputs not be read either. Errors:
 * INVALID_HANDLE, NOT_FOUND for a name, INVALID_ARGUMENT for types and shapes that do not fit or bound outputs that
 * overlap, UNSUPPORTED for an output that is not a tensor or is an input too, CANCELLED, RUNTIME. On an error the list
 * `outputs` is as it was. A run that fails half-way or is cancelled may have written to the memory of bound outputs;
 * pools of keys and values stay good for what was in them before.
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
 * Has a model run on a thread of Pagoda's and returns at once. Arguments as for pagoda_model_run; everything that is
 * wrong with them is said at once, and then `callback` is not called. The handles may be freed and the lists reused as
 * soon as this returns; the memory of the tensors must stay as it is until `callback` is called.
 *
 * Ownership: takes nothing over; new outputs belong to the callback. Threads: any. Errors: INVALID_HANDLE, NOT_FOUND,
 * INVALID_ARGUMENT, CAPACITY if too many runs wait; later, through the callback, CANCELLED, RUNTIME.
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
 * Makes a way to stop runs.
 *
 * Ownership: the caller frees it. Threads: any. Errors: INVALID_ARGUMENT for a NULL.
 */
pagoda_status pagoda_cancel_new(pagoda_cancel **cancel, pagoda_error **error);

/**
 * Stops the runs that were handed `cancel`, now and later: each ends with PAGODA_CANCELLED before its graph's next
 * node. A run that is at its last node may still end well.
 *
 * Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE.
 */
pagoda_status pagoda_cancel_trigger(const pagoda_cancel *cancel, pagoda_error **error);

/**
 * Frees a way to stop runs. NULL is fine. Runs that were handed it go on.
 *
 * Ownership: takes it over. Threads: any. Errors: PAGODA_INVALID_HANDLE, and a line in the log.
 */
pagoda_status pagoda_cancel_free(pagoda_cancel *cancel);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* PAGODA_H */
