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
 * - A list of users has at most 1,048,576 elements, one of requests, inputs or outputs 65,536, one of keys or items
 *   268,435,456; more are INVALID_ARGUMENT.
 * - Structs begin with struct_size; start from their PAGODA_..._INIT. They only ever grow at the end. The elements of an
 *   array of structs all have the same struct_size.
 */

#ifndef PAGODA_H
#define PAGODA_H

#include <stddef.h>
#include <stdint.h>

/* Default options for opening a model. */
#define PAGODA_MODEL_OPTIONS_INIT { sizeof(pagoda_model_options), 0, 0, 0, 0, 0, NULL, NULL, NULL }

/* A pagoda_value_info to be filled in. */
#define PAGODA_VALUE_INFO_INIT { sizeof(pagoda_value_info), 0, NULL, 0, NULL, NULL }

/* Default options for opening a store. */
#define PAGODA_STORE_OPTIONS_INIT { sizeof(pagoda_store_options), 0, 0, 0, 0 }

/* A pagoda_store_info to be filled in. */
#define PAGODA_STORE_INFO_INIT { sizeof(pagoda_store_info), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

/* Options for opening a cache; layers, heads, head_size, and one of pages, bytes and percent are still to be set. */
#define PAGODA_KV_OPTIONS_INIT { sizeof(pagoda_kv_options), 0, 0, 0, 32, 1, 0, 0, 0, 0, 0, 0, 0, 12, 0, NULL, NULL, -1, 0 }

/* A pagoda_kv_stats to be filled in. */
#define PAGODA_KV_STATS_INIT { sizeof(pagoda_kv_stats), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

/* A request of user 0 with nothing in it. */
#define PAGODA_KV_REQUEST_INIT { sizeof(pagoda_kv_request), 0, 0, 0, 0, NULL, 0 }

/* A pagoda_kv_leased_user to be filled in. */
#define PAGODA_KV_LEASED_USER_INIT { sizeof(pagoda_kv_leased_user), 0, 0, 0, 0, 0 }

/* Default options for a lookup. */
#define PAGODA_LOOKUP_OPTIONS_INIT { sizeof(pagoda_lookup_options), 0, 0 }

/* A pagoda_table_stats to be filled in. */
#define PAGODA_TABLE_STATS_INIT { sizeof(pagoda_table_stats), 0, 0, 0, 0, 0, 0, 0, 0, 0 }

/* Default options for opening an engine. */
#define PAGODA_ENGINE_OPTIONS_INIT { sizeof(pagoda_engine_options), 1, 64, 8192, 4096, 0, 0, 12, 1073741824, 0, 67108864, 0, NULL, NULL, NULL, NULL, 0, 0, 0 }

/* A request of user 0 with nothing in it. */
#define PAGODA_RANK_REQUEST_INIT { sizeof(pagoda_rank_request), 0, 0, -1, 0, 0, NULL, NULL, NULL, 0, NULL, NULL, 0, 0, NULL, NULL, 0, 0, NULL }

/* A pagoda_rank_response to be filled in. */
#define PAGODA_RANK_RESPONSE_INIT { sizeof(pagoda_rank_response), 0, 0, 0, 0, 0 }

/* A pagoda_rank_stats to be filled in. */
#define PAGODA_RANK_STATS_INIT { sizeof(pagoda_rank_stats), 0, 0, 0, 0, 0, 0, 0, 0 }

/** The version of the binary interface. It changes only if a program built against another one would break. */
#define PAGODA_ABI_VERSION 1

/** Stops runs. One may be handed to any number of runs; once triggered it stays so. */
typedef struct pagoda_cancel pagoda_cancel;

/**
 * Tables of embedding rows, of any number of models: a cache over host memory, a Redis Cluster, and disk, as a
 * configuration says. Any number of threads may use one handle at the same time.
 */
typedef struct pagoda_embedding pagoda_embedding;

/**
 * A ranking engine: a model folder that is being served, with its tables and the keys and values of its users. Any
 * number of threads may use one handle at the same time.
 */
typedef struct pagoda_engine pagoda_engine;

/**
 * What went wrong, in words. Functions that fail hand one out through their last argument, unless that is NULL; it
 * belongs to the caller, who frees it with pagoda_error_free.
 */
typedef struct pagoda_error pagoda_error;

/**
 * A cache of keys and values: each user's history as pages in a pool, those of users not seen for long in a store. Any
 * number of threads may use one handle at the same time.
 */
typedef struct pagoda_kv_cache pagoda_kv_cache;

/** A batch's hold on its users: where their histories lie, and room for what is new. Ends with a commit or an abort. */
typedef struct pagoda_kv_lease pagoda_kv_lease;

/** An open model. Any number of threads may use one handle at the same time. */
typedef struct pagoda_model pagoda_model;

/**
 * A store: histories in the files of a folder, which survive restarts and crashes. What is damaged there counts as not
 * stored; it never comes back wrong. One process at a time has a store open; in it, any number of caches and threads may
 * use one handle at the same time.
 */
typedef struct pagoda_store pagoda_store;

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

/** What a lookup does about keys that the cache does not have. */
typedef int32_t pagoda_miss;

/** How to look up. Start from PAGODA_LOOKUP_OPTIONS_INIT, which sets `struct_size` and the defaults. */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** What is done about keys that the cache does not have; default PAGODA_MISS_BY_HIT_RATE. */
    pagoda_miss miss;
    /** With PAGODA_MISS_WITHIN: how many microseconds are waited; default 0. */
    uint64_t limit_us;
} pagoda_lookup_options;

/** How the rows of a slot's keys become one vector. */
typedef int32_t pagoda_combiner;

/** When lookups see a change. */
typedef int32_t pagoda_reach;

/** What a table did since it was opened. Start from PAGODA_TABLE_STATS_INIT, which sets `struct_size`. */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** Lookups. */
    uint64_t lookups;
    /** Keys, the different ones of each lookup; where the cache had all of them, every key as it was given. */
    uint64_t keys;
    /** Those that the cache had. */
    uint64_t hits;
    /** Those that got the default vector. */
    uint64_t defaults;
    /** Keys that were to be inserted in the background and found no room in the queue. */
    uint64_t dropped;
    /** Rows that are in the cache. */
    uint64_t cached_rows;
    /** Rows that it has room for. */
    uint64_t cache_rows;
    /** Bytes of memory that the cache and the floors take, about. */
    uint64_t memory;
    /**
     * For how many seconds at most a change that did not go through this process may not have been seen; negative if it
     * may not be seen at all, because nothing refreshes the cache.
     */
    int64_t stale_seconds;
} pagoda_table_stats;

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
     * each run, which wakes them sooner and takes cores from everything else in the process, other models too. So do the
     * threads of an engine.
     */
    int32_t sleep_when_idle;
    /**
     * The ONNX Runtime library, UTF-8. NULL: the environment variable PAGODA_ONNXRUNTIME, then libonnxruntime.so.1 or
     * libonnxruntime.so in the folder pagoda beside libpagoda.so or right beside it, then the system's loader. A process
     * uses one; the first model decides.
     */
    const char *onnxruntime_path;
    /** Where to write a profile of every run, in Chrome's trace format, when the model is freed; NULL = none. */
    const char *profile_path;
    /**
     * The tables that EmbeddingBag nodes of the graph name; NULL = none. The model keeps them open, also when the handle
     * is freed, and those that it names also when their model is retired.
     */
    const pagoda_embedding *embedding;
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
 * the callback returns, and counts as a live object until then. `outputs` is the list of the call, with a new tensor
 * where it had NULL: those belong to the callback, which frees them or keeps them. The list itself is valid during the
 * callback only.
 */
typedef void (*pagoda_run_callback)(void *user_data,
                                    pagoda_status status,
                                    pagoda_tensor *const *outputs,
                                    size_t output_count,
                                    const pagoda_error *error);

/** When a write to a store counts as done. */
typedef int32_t pagoda_durability;

/** How to open a store. Start from PAGODA_STORE_OPTIONS_INIT, which sets `struct_size` and the defaults. */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** When a write counts as done; default PAGODA_DURABILITY_POWER. */
    pagoda_durability durability;
    /**
     * How many bytes the files may take before the users that were not used for longest leave; default 0 = no limit.
     * While files are compacted they may take some more.
     */
    uint64_t max_bytes;
    /** How long a file gets before the next one is begun; default 0 = 256 MiB, or an eighth of `max_bytes` if that is less. */
    uint64_t segment_bytes;
    /** How many bytes may wait to be written before a write has to wait or is refused; default 0 = 256 MiB. */
    uint64_t queue_bytes;
} pagoda_store_options;

/**
 * What a store has now, and what happened since it was opened. Start from PAGODA_STORE_INFO_INIT, which sets
 * `struct_size`.
 */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** Users stored, of all models. */
    uint64_t users;
    /** Pieces of their histories. */
    uint64_t records;
    /** Bytes of the files that are in use. */
    uint64_t live_bytes;
    /** Bytes of all files. */
    uint64_t file_bytes;
    /** Files. */
    uint64_t segments;
    /** Bytes that wait to be written. */
    uint64_t queued_bytes;
    /** Records written, removals too. */
    uint64_t writes;
    /** Bytes written, those of compactions too. */
    uint64_t written_bytes;
    /** Times the disk failed to write. */
    uint64_t write_errors;
    /** Records whose data was damaged. */
    uint64_t corrupt_records;
    /** Unfinished writes found when the store was opened. */
    uint64_t torn_tails;
    /** Places in files where records should have been and were not. */
    uint64_t damaged_regions;
    /** Users who left because damage made it uncertain what is current. */
    uint64_t dropped_users;
    /** 1 if the index had to be made anew when the store was opened. */
    uint64_t index_rebuilds;
    /** Times the index failed; it is not used again until the store is opened anew. */
    uint64_t index_errors;
    /** Users who left to make room. */
    uint64_t evicted_users;
    /** Files compacted. */
    uint64_t compacted_segments;
} pagoda_store_info;

/** What becomes of new tokens that are cached already. */
typedef int32_t pagoda_overlap;

/** What happens when the items of a request are not those that the cached history was computed from. */
typedef int32_t pagoda_edited;

/** When histories go to the store. */
typedef int32_t pagoda_offload;

/**
 * What a cache is for, how large it is, and how it behaves. Start from PAGODA_KV_OPTIONS_INIT, which sets `struct_size`
 * and the defaults; layers, heads, head_size, and one of pages, bytes and percent have none.
 */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** Layers of the model that keep keys and values. */
    int32_t layers;
    /** Heads of keys and values in each. */
    int32_t heads;
    /** The size of a head. */
    int32_t head_size;
    /** Tokens that a page holds, a multiple of 8; default 32. */
    int32_t page_size;
    /** The type of keys and values: PAGODA_TYPE_F32 (the default), _F16 or _BF16. */
    pagoda_type type;
    /** How many pages the pool has; 0 if `bytes` says it. */
    int32_t pages;
    /** The most tokens of a history that are kept; default 0 = all. Older ones leave page by page. */
    int32_t max_history;
    /** What becomes of new tokens that are cached already; default PAGODA_OVERLAP_REFUSE. */
    pagoda_overlap overlap;
    /**
     * Whether requests bring the items of the history, and what happens when they are not those that are cached; default
     * PAGODA_EDITED_UNNOTICED.
     */
    pagoda_edited edited;
    /** When histories go to the store; default PAGODA_OFFLOAD_ON_EVICTION. */
    pagoda_offload offload;
    /**
     * 1: pagoda_kv_cache_prepare returns before everything has arrived from the store, and pagoda_kv_lease_wait waits
     * for it; 0, the default: it waits itself.
     */
    int32_t onload_in_background;
    /** Threads that read the store; default 0 = 2. */
    int32_t onload_threads;
    /**
     * With PAGODA_OFFLOAD_ON_EVICTION: of how many percent of the pool the pages are kept free or stored already, so that
     * evicting those users takes no copy. A thread in the background stores the least recently used ones as the pool
     * fills up. Default 12; 0: none are stored before they are evicted.
     */
    int32_t ahead_percent;
    /** How many bytes the pool may take, all layers together; 0 if `pages` says it. */
    uint64_t bytes;
    /** The version of the model, UTF-8; NULL = "". Histories that another version has stored are never seen. */
    const char *model_version;
    /**
     * Where histories go that the pool has no room for; NULL: nowhere. Several caches may share one. The cache keeps the
     * store open, also when its handle is freed.
     */
    const pagoda_store *store;
    /**
     * The GPU whose memory the pool is in; default -1: it is in host memory. pagoda_tensor_data refuses tensors on a
     * GPU.
     */
    int32_t device;
    /**
     * How many percent of the memory that is free on that GPU the pool may take; default 0: `pages` or `bytes` says
     * it.
     */
    int32_t percent;
} pagoda_kv_options;

/** Where a user's history lies. */
typedef int32_t pagoda_tier;

/** Which tiers: a sum of the PAGODA_TIERS_... numbers. */
typedef int32_t pagoda_tiers;

/** What a cache has, and what it did since it was opened. Start from PAGODA_KV_STATS_INIT, which sets `struct_size`. */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** Pages of the pool. */
    uint64_t pages;
    /** Those that no one has. */
    uint64_t free_pages;
    /** Users in the pool. */
    uint64_t resident_users;
    /** Their tokens. */
    uint64_t resident_tokens;
    /** Tokens of prepared histories that were in the pool. */
    uint64_t tokens_from_pool;
    /** Tokens of prepared histories that came from the store. */
    uint64_t tokens_from_store;
    /** Tokens that were new. */
    uint64_t tokens_new;
    /** Users that left the pool. */
    uint64_t evicted_users;
    /** Users that left the pool, or were committed, and could not be handed to the store. */
    uint64_t failed_offloads;
    /** Histories that could not be read from the store. */
    uint64_t failed_onloads;
} pagoda_kv_stats;

/**
 * What one user of a batch brings. Start from PAGODA_KV_REQUEST_INIT, which sets `struct_size`: in an array it is what
 * tells where the next element lies, so all elements must have the same.
 */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** How many new tokens there are. */
    int32_t tokens;
    /** How many candidates follow them. */
    int32_t candidates;
    /** The user. */
    uint64_t user;
    /** The position of the first new token in the user's history. */
    int64_t start;
    /**
     * If the cache looks out for edited histories: the items of the history up to the last new token, of all new tokens
     * at least, and of as many before them as are to be checked. Else NULL.
     */
    const uint64_t *items;
    /** How many items there are. */
    size_t item_count;
} pagoda_kv_request;

/** Which of the index tensors of a lease: the inputs of ai.pagoda's operators of the same names. */
typedef int32_t pagoda_kv_tensor;

/** One user in a lease. Start from PAGODA_KV_LEASED_USER_INIT, which sets `struct_size`. */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** How many of its tokens are cached. */
    int32_t cached;
    /** How many are new; the model appends them. */
    int32_t tokens;
    /**
     * How many rows at the beginning of the request were cached already, where overlaps are trimmed: they must be left
     * out of the model's rows.
     */
    int32_t trimmed;
    /** The user. */
    uint64_t user;
    /** The position where the history begins, as the model sees it. */
    int64_t start;
} pagoda_kv_leased_user;

/** How to open an engine. Start from PAGODA_ENGINE_OPTIONS_INIT, which sets `struct_size` and the defaults. */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** How many batches run at the same time, on one set of weights, tables and caches; 1 to 256, default 1. */
    int32_t instances;
    /** The most requests of one batch; default 64. */
    int32_t max_batch;
    /** The most rows of one batch: new events, and candidates; default 8192. A request that alone has more runs alone. */
    int32_t max_batch_rows;
    /** The most requests that wait; more are refused with PAGODA_CAPACITY. Default 4096. */
    int32_t queue;
    /**
     * How many pages of keys and values are kept in memory; default 0: `kv_bytes` says it. Where this says it, set
     * `kv_bytes` to 0, which it is not by itself.
     */
    int32_t kv_pages;
    /** When keys and values go to the store; default PAGODA_OFFLOAD_ON_EVICTION. */
    pagoda_offload offload;
    /** As in pagoda_kv_options; default 12. */
    int32_t ahead_percent;
    /**
     * How many bytes of keys and values are kept in memory; default 1 GiB. With 0, and 0 pages, every request computes
     * its whole history.
     */
    uint64_t kv_bytes;
    /**
     * How many microseconds a request waits for others to run with; default 0: not at all. Then requests run together
     * that came while all instances were busy.
     */
    uint64_t max_delay_us;
    /**
     * Bytes for the events of users as they were sent, so that requests with only new events are served also when the
     * keys and values of the earlier ones are gone; default 64 MiB. 0: none are remembered.
     */
    uint64_t remember_bytes;
    /**
     * Bytes for the cache of each embedding table; default 0: all of a table of up to 256 MiB, and that much of a
     * larger one.
     */
    uint64_t table_cache_bytes;
    /** Where the model runs, and on how many threads; NULL = the defaults. Its `embedding` must be NULL. */
    const pagoda_model_options *model;
    /** The folder of a store for keys and values, UTF-8; NULL = none. One process has it open at a time. */
    const char *store_path;
    /** How the store behaves; NULL = the defaults. */
    const pagoda_store_options *store_options;
    /**
     * On a GPU: shapes of batches that are captured into CUDA graphs when first used and replayed from then on; NULL =
     * none. UTF-8, separated by commas, each the most users, the most rows, and, if they are fewer, the most
     * candidates: "1x384, 8x3072x2048". A batch takes the first that it fits into, in the order of their rows; one that
     * fits into none runs without. Every node of the model has to be on the GPU. Elsewhere they are read, and not used.
     */
    const char *cuda_graphs;
    /**
     * Bytes of host memory for keys and values that have left the pool, pinned where the model can be on a GPU; default
     * 0: none.
     */
    uint64_t host_bytes;
    /**
     * With a model on a GPU: how many percent of the memory that is free there are for keys and values; default 0:
     * `kv_pages` or `kv_bytes` says it. Where this says it, set `kv_bytes` to 0, which it is not by itself. Refused with
     * INVALID_ARGUMENT where the model runs on the CPU, also if it was PAGODA_PROVIDER_AUTO that became the CPU.
     */
    int32_t kv_percent;
    /** 0. */
    int32_t reserved;
} pagoda_engine_options;

/**
 * A request: score candidates for a user. Start from PAGODA_RANK_REQUEST_INIT, which sets `struct_size` and the
 * defaults. Features go by their names in pagoda.json; each has one key for every event, candidate or user, -1 for
 * none.
 */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** 1: the time of the request is `time`; 0, the default: it is now. */
    int32_t has_time;
    /** The user. */
    uint64_t user;
    /**
     * Which event of the user's history is the first of those that are sent; default -1: they are the whole history,
     * and the engine works out what of it is new.
     */
    int64_t start;
    /** How many events are sent; there may be none. */
    size_t event_count;
    /** How many features of events are sent: all that there are, or 0 if there are no events. */
    size_t event_feature_count;
    /** Their names. */
    const char *const *event_features;
    /** For each of them its keys, `event_count` of them. */
    const int64_t *const *event_keys;
    /** When each event was, in seconds; may be NULL if the model has no times. */
    const int64_t *event_times;
    /**
     * How many features of the user are sent: all that there are, or 0 where `start` is beyond 0: then they are what
     * they were. Sent with `start`, they are compared with those remembered; where none are, it is a gap.
     */
    size_t user_feature_count;
    /** Their names. */
    const char *const *user_features;
    /** For each of them its key. */
    const int64_t *user_keys;
    /** How many candidates there are, 1 or more. */
    size_t candidate_count;
    /** How many features of candidates are sent: all that items have. */
    size_t candidate_feature_count;
    /** Their names. */
    const char *const *candidate_features;
    /** For each of them its keys, `candidate_count` of them. */
    const int64_t *const *candidate_keys;
    /** The time of the request, in seconds, if `has_time` is 1. */
    int64_t time;
    /**
     * How many microseconds it may take; default 0: as long as it does. After that it ends with PAGODA_CANCELLED at
     * once; requests that ran with it go on.
     */
    uint64_t timeout_us;
    /** Ends it before that; NULL = nothing does. */
    const pagoda_cancel *cancel;
} pagoda_rank_request;

/** How a request was answered. Start from PAGODA_RANK_RESPONSE_INIT, which sets `struct_size`. */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** How many other requests ran in the same batch. */
    uint32_t batched_with;
    /** Rows of the history that were cached. */
    uint64_t cached_rows;
    /** Rows of the history that were computed. */
    uint64_t computed_rows;
    /** Nanoseconds from when it came to when its batch was put together. */
    uint64_t queue_ns;
    /** Nanoseconds that ONNX Runtime ran. */
    uint64_t run_ns;
} pagoda_rank_response;

/**
 * Called once when an asynchronous request has ended, on a thread of Pagoda's, or on the one that cancels it; it must
 * not wait for other requests of the engine, which may be answered on the same thread, and may free the engine.
 * `status` is PAGODA_OK or says why there are no scores; then `error` has the words, and is freed after the callback
 * returns. `scores` has a score for each candidate and task, those of the first candidate first. `scores` and
 * `response` are valid during the callback only.
 */
typedef void (*pagoda_rank_callback)(void *user_data,
                                     pagoda_status status,
                                     const float *scores,
                                     size_t score_count,
                                     const pagoda_rank_response *response,
                                     const pagoda_error *error);

/** What an engine did since it was opened. Start from PAGODA_RANK_STATS_INIT, which sets `struct_size`. */
typedef struct {
    /** The size of this struct. */
    uint32_t struct_size;
    /** Requests that were answered. */
    uint64_t answered;
    /** Requests that failed, for whatever reason. */
    uint64_t failed;
    /** Batches that ran. */
    uint64_t batches;
    /** Rows of histories that were cached. */
    uint64_t cached_rows;
    /** Rows of histories that were computed. */
    uint64_t computed_rows;
    /** Requests that wait now. */
    uint64_t waiting;
    /** Users whose events are remembered. */
    uint64_t remembered_users;
    /** Bytes that those take. */
    uint64_t remembered_bytes;
} pagoda_rank_stats;

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

/** What the table's hit_rate_threshold says: below it as PAGODA_MISS_WAIT, otherwise as PAGODA_MISS_DEFAULT. */
#define PAGODA_MISS_BY_HIT_RATE 0

/** They are fetched from the floors below, and their rows returned. */
#define PAGODA_MISS_WAIT 1

/** They get the table's default vector, and are inserted in the background. */
#define PAGODA_MISS_DEFAULT 2

/**
 * They are fetched; those that have not arrived after `limit_us` get the default vector, and are inserted when they
 * arrive.
 */
#define PAGODA_MISS_WITHIN 3

/** Their sum. */
#define PAGODA_COMBINER_SUM 0

/** Their mean. */
#define PAGODA_COMBINER_MEAN 1

/** Their sum, divided by the square root of how many there are. */
#define PAGODA_COMBINER_SQRTN 2

/** When the call returns. */
#define PAGODA_REACH_AT_ONCE 0

/** When the cache is refreshed next; the floors below have it when the call returns. */
#define PAGODA_REACH_BY_REFRESH 1

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

/** When the disk has it: it survives a loss of power. */
#define PAGODA_DURABILITY_POWER 0

/** When the operating system has it: it survives the end of the process, but not a loss of power. */
#define PAGODA_DURABILITY_PROCESS 1

/** As soon as it is queued: what is queued is lost with the process. */
#define PAGODA_DURABILITY_NONE 2

/** The request is refused. */
#define PAGODA_OVERLAP_REFUSE 0

/** They are cut off; pagoda_kv_lease_user tells how many. */
#define PAGODA_OVERLAP_TRIM 1

/** No one looks: requests bring no items. */
#define PAGODA_EDITED_UNNOTICED 0

/** The request is refused. */
#define PAGODA_EDITED_REFUSE 1

/** What was computed from the edited part is dropped; what came before it stays. */
#define PAGODA_EDITED_INVALIDATE 2

/** When a user is evicted to make room. */
#define PAGODA_OFFLOAD_ON_EVICTION 0

/** With every commit, in the background. */
#define PAGODA_OFFLOAD_AT_COMMIT 1

/** Only when the caller says so; what is evicted before is lost. */
#define PAGODA_OFFLOAD_BY_HAND 2

/** Nowhere. */
#define PAGODA_TIER_NONE 0

/** In the pool. */
#define PAGODA_TIER_RESIDENT 1

/** In the store, or on its way from there to the pool. */
#define PAGODA_TIER_STORE 2

/** The pool. */
#define PAGODA_TIERS_RESIDENT 1

/** The store. */
#define PAGODA_TIERS_STORE 2

/** Both. */
#define PAGODA_TIERS_ALL 3

/** Where each user's rows begin: i32 [users + 1]. */
#define PAGODA_KV_ROW_OFFSETS 0

/** How many candidates each user has: i32 [users]. */
#define PAGODA_KV_NUM_CANDIDATES 1

/** How many tokens of each user are cached: i32 [users]. */
#define PAGODA_KV_CACHED_LEN 2

/** Where each user's list of pages begins: i32 [users + 1]. */
#define PAGODA_KV_PAGE_INDPTR 3

/** Each user's pages in order of position: i32. */
#define PAGODA_KV_PAGE_IDS 4

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
 * How many objects (errors, models, tensors, caches and so on) the caller holds handles of: 0 if everything was freed.
 *
 * Threads: any. Errors: none.
 */
size_t pagoda_live_objects(void);

/**
 * The metrics of the process as Prometheus text (to be served as "application/openmetrics-text; version=1.0.0"). With
 * `buffer` NULL and `capacity` 0 only `length` is written: the bytes needed, with the NUL at the end. The text may have
 * grown by the next call: leave some room.
 *
 * Ownership: takes nothing over. Threads: any. Errors: INVALID_ARGUMENT for a NULL, CAPACITY if the text does not fit;
 * then nothing is written.
 */
pagoda_status pagoda_metrics_text(char *buffer, size_t capacity, size_t *length, pagoda_error **error);

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
 * when is for the caller to order. Errors: INVALID_HANDLE, INVALID_ARGUMENT for a NULL, UNSUPPORTED for strings and for
 * tensors on a GPU.
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
 * Opens the tables of a configuration file, HugeCTR's ps.json or one with Pagoda's own words. Relative paths in it are
 * relative to its folder.
 *
 * Ownership: the caller frees the tables. Threads: any. Errors: NOT_FOUND for a file that is not there; INVALID_ARGUMENT
 * for a key or value that is not understood, which the message names; UNSUPPORTED for what there is none of; BUSY if
 * another process has a table open, or the source of one was changed while its table file was built; CAPACITY if there
 * is no memory; IO.
 */
pagoda_status pagoda_embedding_open(const char *path,
                                    pagoda_embedding **embedding,
                                    pagoda_error **error);

/**
 * How much memory the tables of a configuration file will take in this process, and how much disk their files, about;
 * nothing is opened but the headers of the tables. `memory` and `disk` are NULL or get a number of bytes.
 *
 * Ownership: takes nothing over. Threads: any. Errors: as pagoda_embedding_open.
 */
pagoda_status pagoda_embedding_estimate(const char *path, uint64_t *memory, uint64_t *disk, pagoda_error **error);

/**
 * Adds a model while others serve. `model` is JSON, an element of the configuration's `models`; relative paths in it are
 * relative to `folder`, or to the working directory if that is NULL. Tables that another model has already are shared.
 *
 * Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE; else as pagoda_embedding_open.
 */
pagoda_status pagoda_embedding_add(const pagoda_embedding *embedding,
                                   const char *model,
                                   const char *folder,
                                   pagoda_error **error);

/**
 * Takes a model out of service. Its tables go when no other model has them; lookups that are under way end well.
 *
 * Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT, NOT_FOUND for a model that there
 * is not.
 */
pagoda_status pagoda_embedding_retire(const pagoda_embedding *embedding,
                                      const char *model,
                                      pagoda_error **error);

/**
 * How many numbers a row of a table has. A table is named `model/table`, or `table` alone if that is no other's name.
 *
 * Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT, NOT_FOUND for a table that there
 * is not.
 */
pagoda_status pagoda_embedding_dim(const pagoda_embedding *embedding,
                                   const char *table,
                                   size_t *dim,
                                   pagoda_error **error);

/**
 * Looks keys up, any number of times each. `numbers` gets the row of each key, or the table's default vector, one after
 * the other; `number_count` says for how many numbers there is room, key_count times what pagoda_embedding_dim says.
 * `found` is NULL or gets a 1 for each key whose row it is and a 0 for each that got the default. `options` may be NULL.
 * A floor that does not answer is no error: its keys get the default vector, which is counted and logged.
 *
 * Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT, NOT_FOUND for a table that there
 * is not.
 */
pagoda_status pagoda_embedding_lookup(const pagoda_embedding *embedding,
                                      const char *table,
                                      const int64_t *keys,
                                      size_t key_count,
                                      const pagoda_lookup_options *options,
                                      float *numbers,
                                      size_t number_count,
                                      uint8_t *found,
                                      pagoda_error **error);

/**
 * Looks keys up and combines them: slot i gets one vector of the keys from `offsets[i]` on to before `offsets[i + 1]`, or
 * zeros if there are none. `offsets` begin with 0, do not go down, and end with `key_count`; there is one more of them than
 * slots. Everything else is as in pagoda_embedding_lookup, with a vector for each slot.
 *
 * Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT, NOT_FOUND for a table that there
 * is not.
 */
pagoda_status pagoda_embedding_pool(const pagoda_embedding *embedding,
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
 * Replaces rows or adds them, on every floor and in the cache. `numbers` has a row for each key; of a key that comes twice
 * the last one counts. A row that has a higher version already stays; rows that the table was loaded with have version 0.
 *
 * Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT, NOT_FOUND for a table that there
 * is not, UNSUPPORTED if every floor is read-only, IO if a floor could not take it: floors below that one have the change,
 * and those above do not; call again.
 */
pagoda_status pagoda_embedding_upsert(const pagoda_embedding *embedding,
                                      const char *table,
                                      uint64_t version,
                                      const int64_t *keys,
                                      size_t key_count,
                                      const float *numbers,
                                      size_t number_count,
                                      pagoda_reach reach,
                                      pagoda_error **error);

/**
 * Deletes rows, on every floor and from the cache: from now on their keys get the default vector. A row that has a higher
 * version stays.
 *
 * Ownership: takes nothing over. Threads: any. Errors: as pagoda_embedding_upsert.
 */
pagoda_status pagoda_embedding_delete(const pagoda_embedding *embedding,
                                      const char *table,
                                      uint64_t version,
                                      const int64_t *keys,
                                      size_t key_count,
                                      pagoda_reach reach,
                                      pagoda_error **error);

/**
 * Begins to bring keys that are expected soon into the cache and returns at once. `queued` gets how many were not there
 * and found room in the queue.
 *
 * Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT, NOT_FOUND for a table that there
 * is not.
 */
pagoda_status pagoda_embedding_prefetch(const pagoda_embedding *embedding,
                                        const char *table,
                                        const int64_t *keys,
                                        size_t key_count,
                                        size_t *queued,
                                        pagoda_error **error);

/**
 * Reads what is in a table's cache again from the floors below, all of it, now. A configuration can have that done every
 * so often (`refresh_interval`).
 *
 * Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT, NOT_FOUND for a table that there
 * is not.
 */
pagoda_status pagoda_embedding_refresh(const pagoda_embedding *embedding,
                                       const char *table,
                                       pagoda_error **error);

/**
 * Waits until everything that was to be fetched or loaded in the background is.
 *
 * Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE.
 */
pagoda_status pagoda_embedding_wait(const pagoda_embedding *embedding, pagoda_error **error);

/**
 * What a table did since it was opened.
 *
 * Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT for a NULL or a small struct_size,
 * NOT_FOUND for a table that there is not.
 */
pagoda_status pagoda_embedding_stats(const pagoda_embedding *embedding,
                                     const char *table,
                                     pagoda_table_stats *stats,
                                     pagoda_error **error);

/**
 * Frees tables. NULL is fine. A model that is open and names some of them keeps them.
 *
 * Ownership: takes the tables over. Threads: any. Errors: PAGODA_INVALID_HANDLE, and a line in the log.
 */
pagoda_status pagoda_embedding_free(pagoda_embedding *embedding);

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

/**
 * Opens the store in a folder, or makes one there if the folder is empty or missing. `options` may be NULL.
 *
 * Ownership: the caller frees the store. Threads: any. Errors: BUSY if it is open already, here or in another process;
 * INVALID_ARGUMENT, also for a folder with other things in it; UNSUPPORTED for a store of a later version; IO.
 */
pagoda_status pagoda_store_open(const char *path,
                                const pagoda_store_options *options,
                                pagoda_store **store,
                                pagoda_error **error);

/**
 * Waits until everything that was handed to a store is as durable as it promises.
 *
 * Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, IO if something could not be written since the
 * last flush.
 */
pagoda_status pagoda_store_flush(const pagoda_store *store, pagoda_error **error);

/**
 * Gives back the space of everything that was removed or replaced, and waits for that. A store does so by itself when
 * there is much of it.
 *
 * Ownership: takes nothing over. Threads: any; others may use the store meanwhile. Errors: INVALID_HANDLE, IO.
 */
pagoda_status pagoda_store_compact(const pagoda_store *store, pagoda_error **error);

/**
 * What a store has now, and what happened since it was opened.
 *
 * Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT for a NULL or a small
 * struct_size.
 */
pagoda_status pagoda_store_stats(const pagoda_store *store, pagoda_store_info *info, pagoda_error **error);

/**
 * Frees a store. NULL is fine. Once no cache uses it any more, everything that is queued is written and the store is
 * closed.
 *
 * Ownership: takes the store over. Threads: any. Errors: PAGODA_INVALID_HANDLE, and a line in the log.
 */
pagoda_status pagoda_store_free(pagoda_store *store);

/**
 * Opens a cache. `options` must not be NULL, for they have the shape of the keys and values.
 *
 * Ownership: the caller frees the cache. Threads: any. Errors: INVALID_ARGUMENT, INVALID_HANDLE for `options.store`,
 * CAPACITY if there is no memory for the pool, UNSUPPORTED if there is no GPU `options.device`, BUSY if another cache of
 * this model version and shape uses the store.
 */
pagoda_status pagoda_kv_cache_open(const pagoda_kv_options *options,
                                   pagoda_kv_cache **cache,
                                   pagoda_error **error);

/**
 * The pool of one layer, [pages, 2, page_size, heads, head_size]: an input and an output of the model, both bound to it.
 * The pool is the same for every lease; its memory is for the model alone to read and write.
 *
 * Ownership: the caller frees the tensor; the memory lives until every such handle and the cache are freed. Threads:
 * any. Errors: INVALID_HANDLE, INVALID_ARGUMENT for a NULL or a layer that there is not.
 */
pagoda_status pagoda_kv_cache_pool(const pagoda_kv_cache *cache,
                                   int32_t layer,
                                   pagoda_tensor **pool,
                                   pagoda_error **error);

/**
 * Where each user's cached history begins, how many tokens it has, and where it lies. Each of `starts`, `lengths` and
 * `tiers` is NULL or has room for `user_count` elements. Changes nothing; by the time the answer is read, other threads
 * may have changed it.
 *
 * Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT.
 */
pagoda_status pagoda_kv_cache_lookup(const pagoda_kv_cache *cache,
                                     const uint64_t *users,
                                     size_t user_count,
                                     int64_t *starts,
                                     int64_t *lengths,
                                     pagoda_tier *tiers,
                                     pagoda_error **error);

/**
 * Writes histories to the store and waits until they are as durable as it promises. With `users` NULL and `user_count` 0
 * those of everyone in the pool; a list that is not NULL and empty means no one. `offloaded` gets how many users had
 * something that was not stored.
 *
 * Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT, UNSUPPORTED without a store, IO.
 */
pagoda_status pagoda_kv_cache_offload(const pagoda_kv_cache *cache,
                                      const uint64_t *users,
                                      size_t user_count,
                                      size_t *offloaded,
                                      pagoda_error **error);

/**
 * Removes histories from tiers. Those that leave the pool alone go to the store first, unless that is done by hand; those
 * that leave the store are gone for good when this returns. With `users` NULL and `user_count` 0 those of everyone whom no
 * lease holds; a list that is not NULL and empty means no one. `evicted` gets how many users had something there.
 *
 * Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT, BUSY if a lease holds a user of
 * the list, IO.
 */
pagoda_status pagoda_kv_cache_evict(const pagoda_kv_cache *cache,
                                    const uint64_t *users,
                                    size_t user_count,
                                    pagoda_tiers tiers,
                                    size_t *evicted,
                                    pagoda_error **error);

/**
 * Begins to bring histories from the store into the pool and returns at once, so that a request that comes soon need not
 * wait for them. Stops where there is no more room. `started` gets how many histories are on their way.
 *
 * Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT, IO.
 */
pagoda_status pagoda_kv_cache_prefetch(const pagoda_kv_cache *cache,
                                       const uint64_t *users,
                                       size_t user_count,
                                       size_t *started,
                                       pagoda_error **error);

/**
 * Waits until everything that was handed to the store is as durable as it promises; without a store, not at all.
 *
 * Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, IO if something could not be written since the
 * last flush.
 */
pagoda_status pagoda_kv_cache_flush(const pagoda_kv_cache *cache, pagoda_error **error);

/**
 * What a cache has, and what it did since it was opened.
 *
 * Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT for a NULL or a small
 * struct_size.
 */
pagoda_status pagoda_kv_cache_stats(const pagoda_kv_cache *cache, pagoda_kv_stats *stats, pagoda_error **error);

/**
 * Frees a cache. NULL is fine. Leases that are out stay good. If there is a store, what is in the pool goes there, which is
 * waited for, unless offload is PAGODA_OFFLOAD_BY_HAND.
 *
 * Ownership: takes the cache over. Threads: any. Errors: PAGODA_INVALID_HANDLE, and a line in the log.
 */
pagoda_status pagoda_kv_cache_free(pagoda_kv_cache *cache);

/**
 * Makes room for a batch and says where everything lies. Evicts the least recently used users if need be, and brings those
 * of the batch back from the store. The users of the batch stay where they are until the lease ends. Any number of
 * leases may read a user's history at the same time; one at most may add to it.
 *
 * Then run the model on the tensors of the lease and the pools of the cache: for each user the rows of its new tokens,
 * then those of its candidates. A call that fails changes no history.
 *
 * Ownership: the caller frees the lease. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT (a gap between the cached
 * history and the new tokens, an overlap, edited items, a user twice), CAPACITY if the pool has too few pages that no
 * lease holds, about `requests` if it would have too few without any, BUSY if another lease adds to one of the histories, IO.
 */
pagoda_status pagoda_kv_cache_prepare(const pagoda_kv_cache *cache,
                                      const pagoda_kv_request *requests,
                                      size_t request_count,
                                      pagoda_kv_lease **lease,
                                      pagoda_error **error);

/**
 * One of the index tensors of a lease, to be an input of the model.
 *
 * Ownership: the caller frees the tensor, before or after the lease. Threads: any. Errors: INVALID_HANDLE,
 * INVALID_ARGUMENT for a NULL, a number that is none of the PAGODA_KV_... tensors, or a lease that has ended.
 */
pagoda_status pagoda_kv_lease_tensor(const pagoda_kv_lease *lease,
                                     pagoda_kv_tensor which,
                                     pagoda_tensor **tensor,
                                     pagoda_error **error);

/**
 * What a lease has of one user, by its place in the batch.
 *
 * Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT for a NULL, a small struct_size,
 * an index beyond the end, or a lease that has ended.
 */
pagoda_status pagoda_kv_lease_user(const pagoda_kv_lease *lease,
                                   size_t index,
                                   pagoda_kv_leased_user *user,
                                   pagoda_error **error);

/**
 * Whether a layer of every user has arrived from the store: `ready` gets 1 or 0. Does not wait.
 *
 * Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT for a NULL, a layer that there is
 * not, or a lease that has ended; IO if something could not be read: the lease is of no use then, and the next one will
 * find less in the cache.
 */
pagoda_status pagoda_kv_lease_ready(const pagoda_kv_lease *lease,
                                    int32_t layer,
                                    int32_t *ready,
                                    pagoda_error **error);

/**
 * Waits until a layer of every user has arrived from the store; with `layer` -1 until all have. Needed before the model
 * runs only where `options.onload_in_background` is 1.
 *
 * Ownership: takes nothing over. Threads: any number at once on one lease. Errors: as for pagoda_kv_lease_ready.
 */
pagoda_status pagoda_kv_lease_wait(const pagoda_kv_lease *lease, int32_t layer, pagoda_error **error);

/**
 * Makes the new tokens part of their histories: the model has appended them. Ends the lease; the handle is still to be
 * freed. Where histories go to the store at commit, they are on their way when this returns; with `wait` 1 it waits until
 * they are as durable as the store promises.
 *
 * Ownership: takes nothing over. Threads: any; of two that end one lease, the second is told so. Errors: INVALID_HANDLE;
 * INVALID_ARGUMENT for a lease that has ended; IO if something could not be read from the store, and then this was an
 * abort. With `wait` 1 also CAPACITY or IO about "wait": the tokens are committed, but the store does not have them as
 * it should.
 */
pagoda_status pagoda_kv_lease_commit(const pagoda_kv_lease *lease,
                                     int32_t wait,
                                     pagoda_error **error);

/**
 * Ends a lease and leaves everything as it was before; the handle is still to be freed.
 *
 * Ownership: takes nothing over. Threads: any; waits for other threads that wait for this lease. Errors: INVALID_HANDLE,
 * INVALID_ARGUMENT for a lease that has ended.
 */
pagoda_status pagoda_kv_lease_abort(const pagoda_kv_lease *lease,
                                    pagoda_error **error);

/**
 * Frees a lease, and aborts it if it has not ended. NULL is fine.
 *
 * Ownership: takes the lease over. Threads: any. Errors: PAGODA_INVALID_HANDLE, and a line in the log.
 */
pagoda_status pagoda_kv_lease_free(pagoda_kv_lease *lease);

/**
 * Opens a model folder, checks all its files, and runs the model once. `options` may be NULL.
 *
 * Ownership: the caller frees the engine. Threads: any. Errors: NOT_FOUND for what is not there, UNSUPPORTED for a
 * folder of another format, MODEL for files that were changed or cut and for weights that are not finite,
 * INVALID_ARGUMENT, INVALID_HANDLE, CAPACITY, BUSY if another process has the store open, IO.
 */
pagoda_status pagoda_engine_open(const char *folder,
                                 const pagoda_engine_options *options,
                                 pagoda_engine **engine,
                                 pagoda_error **error);

/**
 * Scores candidates and waits for it. `scores` gets a score for each candidate and task, those of the first candidate,
 * in the order of the tasks, then those of the next; `score_count`, how many it has room for, must be candidates x
 * tasks. `response` is NULL or gets how it went.
 *
 * Ownership: takes nothing over. Threads: any number at once; requests that come at the same time may run together.
 * Errors: INVALID_HANDLE; INVALID_ARGUMENT for what can not be asked; NOT_FOUND for features that the model does not
 * have, and about "start" for a gap: events before it are not known here, so send the whole history. CAPACITY if too
 * many requests wait or the history is larger than the cache; CANCELLED if it was cancelled or its time is over;
 * RUNTIME if the model fails. Whatever fails, fails alone, and leaves nothing of itself behind; only what was
 * cancelled or out of time while it ran with others may be kept, and what fails about "score_count" because a swap
 * changed the tasks is.
 */
pagoda_status pagoda_engine_rank(const pagoda_engine *engine,
                                 const pagoda_rank_request *request,
                                 float *scores,
                                 size_t score_count,
                                 pagoda_rank_response *response,
                                 pagoda_error **error);

/**
 * Has candidates scored on a thread of Pagoda's and returns at once. What is wrong with the request itself is said at
 * once, and then `callback` is not called. Everything that was passed may be freed as soon as this returns.
 *
 * Ownership: takes nothing over. Threads: any. Errors: as pagoda_engine_rank; those that are found while it runs go to
 * the callback.
 */
pagoda_status pagoda_engine_rank_async(const pagoda_engine *engine,
                                       const pagoda_rank_request *request,
                                       pagoda_rank_callback callback,
                                       void *user_data,
                                       pagoda_error **error);

/**
 * Serves another model folder from now on. It is opened and run once beside the old one; requests that came before end
 * on that, no request fails, and nothing that the old model computed is used for the new one. On an error all stays as
 * it was.
 *
 * Ownership: takes nothing over. Threads: any. Errors: as pagoda_engine_open; BUSY also if the version was served a
 * moment ago and is still being closed.
 */
pagoda_status pagoda_engine_swap(const pagoda_engine *engine, const char *folder, pagoda_error **error);

/**
 * Forgets users: their events, and their keys and values in the version that is served now, also those in the store.
 * What another version left in the store is found when that is served again: forget them there too. `forgotten` gets
 * how many were known.
 *
 * Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT, BUSY if a request of one of
 * them runs now or is just being put into a batch, IO. After an error some of it may be forgotten: repeat the call.
 */
pagoda_status pagoda_engine_forget(const pagoda_engine *engine,
                                   const uint64_t *users,
                                   size_t user_count,
                                   size_t *forgotten,
                                   pagoda_error **error);

/**
 * How many tasks the model that is served now has: the scores of one candidate.
 *
 * Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT for a NULL.
 */
pagoda_status pagoda_engine_tasks(const pagoda_engine *engine, size_t *tasks, pagoda_error **error);

/**
 * The pagoda.json of the model that is served now: its features, tasks, limits and version, as JSON. With `buffer`
 * NULL and `capacity` 0 only `length` is written: the bytes needed, with the NUL at the end.
 *
 * Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT for a NULL, CAPACITY if the
 * text does not fit; then nothing is written.
 */
pagoda_status pagoda_engine_info(const pagoda_engine *engine,
                                 char *buffer,
                                 size_t capacity,
                                 size_t *length,
                                 pagoda_error **error);

/**
 * What an engine did since it was opened.
 *
 * Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT.
 */
pagoda_status pagoda_engine_stats(const pagoda_engine *engine, pagoda_rank_stats *stats, pagoda_error **error);

/**
 * Frees an engine. NULL is fine. Requests that wait are answered first, and what is cached is stored if there is a
 * store; this waits for both, unless another thread is in a call with the handle: then that one does. In a callback of
 * the engine, what that request uses is closed after the callback returns.
 *
 * Ownership: takes it over. Threads: any. Errors: PAGODA_INVALID_HANDLE, and a line in the log.
 */
pagoda_status pagoda_engine_free(pagoda_engine *engine);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* PAGODA_H */
