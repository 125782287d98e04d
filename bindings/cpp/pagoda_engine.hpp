// The ranking engine, for C++17. Part of pagoda.hpp, which includes it.
//
//     const pagoda::Engine engine("model");
//     pagoda::RankRequest request;
//     request.user = 7;
//     request.events.keys = {{"movie", {17, 4}}, {"rating", {5, 3}}};
//     request.candidates = {{"movie", {8, 15, 16}}};
//     const pagoda::RankResponse response = engine.rank(request);

#ifndef PAGODA_ENGINE_HPP
#define PAGODA_ENGINE_HPP

#include "pagoda.hpp"
#include "pagoda_embedding.hpp"
#include "pagoda_kv.hpp"

#include <optional>

namespace pagoda {

/// Keys by feature: the name of each feature and its keys. All features have the same number of keys; -1 stands for no
/// key.
using Columns = std::vector<std::pair<std::string, std::vector<std::int64_t>>>;

/// Events of a user, the earliest first.
struct Events {
    Columns keys;                     ///< The keys of each item feature and each action feature.
    std::vector<std::int64_t> times;  ///< The time of each event, in seconds; may be empty if the model has no times.
};

/// A request: score candidates for a user. See pagoda_rank_request.
struct RankRequest {
    std::uint64_t user = 0;                                       ///< The user.
    std::optional<std::int64_t> start;                            ///< The position of the first event; none: all.
    Events events;                                                ///< The whole history, or its new part.
    std::vector<std::pair<std::string, std::int64_t>> user_keys;  ///< The key of each user feature.
    Columns candidates;                                           ///< The keys of each item feature.
    std::optional<std::int64_t> time;                             ///< The time of the request, in seconds; none: now.
    std::chrono::microseconds timeout{0};                         ///< The time limit; 0: none.
    const Cancel* cancel = nullptr;                               ///< Cancels the request when triggered.
};

/// The answer to a request.
struct RankResponse {
    std::size_t tasks = 0;                  ///< The number of scores of a candidate.
    std::vector<float> scores;              ///< The scores of the first candidate, then those of the next.
    std::string version;                    ///< The version of the model that answered.
    std::uint32_t batched_with = 0;         ///< The number of other requests in the same batch.
    std::uint64_t cached_rows = 0;          ///< Rows of the history that were cached.
    std::uint64_t computed_rows = 0;        ///< Rows of the history that were computed.
    std::chrono::nanoseconds queue_time{};  ///< The time in the queue, until the batch was formed.
    std::chrono::nanoseconds run_time{};    ///< The time that ONNX Runtime ran.

    /// The number of candidates.
    std::size_t size() const noexcept { return tasks == 0 ? 0 : scores.size() / tasks; }
    /// The scores of a candidate, in the order of the tasks.
    Span<const float> candidate(std::size_t index) const noexcept { return {scores.data() + index * tasks, tasks}; }
};

/// The largest batch that a CUDA graph has room for; see pagoda_graph_shape.
struct GraphShape {
    std::int32_t users = 0;       ///< The maximum number of users.
    std::int32_t rows = 0;        ///< The maximum number of rows: new events and candidates.
    std::int32_t candidates = 0;  ///< The maximum number of candidates; 0: as many as rows.
    std::int32_t pages = 0;       ///< The maximum number of pages; 0: enough for the longest histories.
};

/// How to open an engine; see pagoda_engine_options.
struct EngineOptions {
    std::int32_t instances = 1;                             ///< How many batches run at the same time.
    std::int32_t max_batch = 64;                            ///< The maximum number of requests in a batch.
    std::int32_t max_batch_rows = 8192;                     ///< The maximum number of rows in a batch.
    std::int32_t queue = 4096;                              ///< The maximum number of queued requests.
    KvSize kv_size;                                         ///< The size of the pool; the default is 1 GiB.
    pagoda_kv_format kv_format = PAGODA_KV_FORMAT_DEFAULT;  ///< How pages hold keys and values.
    std::uint64_t host_bytes = 0;                           ///< Host memory for what was evicted from the pool; 0: none.
    pagoda_offload offload = PAGODA_OFFLOAD_ON_EVICTION;    ///< When keys and values are written to the store.
    std::int32_t ahead_percent = 12;                        ///< Percentage of the pool that is free or stored ahead.
    std::chrono::microseconds max_delay{0};               ///< The coalescing window; 0: requests do not wait.
    std::uint64_t remember_bytes = 64 << 20;              ///< Bytes for the event log; 0: none.
    std::uint64_t table_cache_bytes = 0;                  ///< Bytes for the cache of each table; 0: up to 256 MiB.
    std::string table_tiers_path;                         ///< A ps.json with the tiers of the tables; "": host memory.
    ModelOptions model;                                   ///< Where the model runs, and on how many threads.
    std::string store_path;                               ///< The folder of a store; "": none.
    StoreOptions store_options;                           ///< How the store is opened.
    std::vector<GraphShape> cuda_graphs;                  ///< On a GPU: batch shapes that become CUDA graphs.
};

/// The state and the counters of an engine.
using EngineStats = pagoda_engine_stats;

/// Where the model of an engine or a generator runs.
struct EngineProvider {
    pagoda_provider provider = PAGODA_PROVIDER_CPU;  ///< PAGODA_PROVIDER_CPU or PAGODA_PROVIDER_CUDA.
    std::int32_t device_id = -1;                     ///< The number of the GPU; -1 on the CPU.
    std::string reason;                              ///< Why PAGODA_PROVIDER_AUTO chose the CPU; else "".
};

namespace detail {

/// A text of a length that C says first.
template <class Function>
std::string text(Function function) {
    std::size_t length = 0;
    function(static_cast<char*>(nullptr), std::size_t{0}, &length);
    // A swap may put a longer one in its place.
    std::string text(length + 65536, '\0');
    function(text.data(), text.size(), &length);
    text.resize(length - 1);
    return text;
}

/// A request in C's form; what it points to lives as long as the two.
class CRequest {
public:
    explicit CRequest(const RankRequest& request) {
        request_.user = request.user;
        request_.start = request.start.value_or(-1);
        request_.event_count = columns(request.events.keys, "event_keys", event_names_, event_keys_);
        request_.event_feature_count = event_names_.size();
        request_.event_features = event_names_.data();
        request_.event_keys = event_keys_.data();
        if (!request.events.times.empty()) {
            same(request.events.times.size(), request_.event_count, "event_times");
            request_.event_times = request.events.times.data();
        }
        for (const auto& [name, key] : request.user_keys) {
            user_names_.push_back(name.c_str());
            user_keys_.push_back(key);
        }
        request_.user_feature_count = user_names_.size();
        request_.user_features = user_names_.data();
        request_.user_keys = user_keys_.data();
        request_.candidate_count = columns(request.candidates, "candidate_keys", candidate_names_, candidate_keys_);
        request_.candidate_feature_count = candidate_names_.size();
        request_.candidate_features = candidate_names_.data();
        request_.candidate_keys = candidate_keys_.data();
        request_.has_time = request.time ? 1 : 0;
        request_.time = request.time.value_or(0);
        request_.timeout_us = to_c(request.timeout, "request.timeout_us");
        request_.cancel = handle_of(request.cancel, "request.cancel");
    }
    CRequest(const CRequest&) = delete;
    CRequest& operator=(const CRequest&) = delete;

    const pagoda_rank_request* get() const noexcept { return &request_; }

private:
    using Names = std::vector<const char*>;
    using Lists = std::vector<const std::int64_t*>;

    static std::size_t columns(const Columns& columns, const char* what, Names& names, Lists& lists) {
        const std::size_t count = columns.empty() ? 0 : columns.front().second.size();
        for (const auto& [name, keys] : columns) {
            same(keys.size(), count, what);
            names.push_back(name.c_str());
            lists.push_back(keys.data());
        }
        return count;
    }

    /// C has one length for all of them.
    static void same(std::size_t size, std::size_t count, const char* what) {
        if (size == count) return;
        const std::string name = std::string("request.") + what;
        const std::string both = std::to_string(size) + " and " + std::to_string(count);
        throw Error(PAGODA_STATUS_INVALID_ARGUMENT, name + ": " + both + " numbers: give each as many", name);
    }

    pagoda_rank_request request_ = PAGODA_RANK_REQUEST_INIT;
    Names event_names_, user_names_, candidate_names_;
    Lists event_keys_, candidate_keys_;
    std::vector<std::int64_t> user_keys_;
};

}  // namespace detail

/// A model folder that is served. Any number of threads may use an engine at the same time.
class Engine {
public:
    /// Opens a model folder.
    explicit Engine(const std::string& folder, const EngineOptions& options = {}) : handle_(open(folder, options)) {}
    /// Takes a handle of pagoda.h.
    explicit Engine(pagoda_engine* handle) noexcept : handle_(handle) {}

    /// Scores candidates, and waits for the result. If a swap changes the number of tasks meanwhile, the new model
    /// answers.
    RankResponse rank(const RankRequest& request) const {
        const detail::CRequest c_request(request);
        RankResponse response;
        for (;;) {
            response.scores.resize(c_request.get()->candidate_count * tasks());
            pagoda_rank_response c_response = PAGODA_RANK_RESPONSE_INIT;
            // A place for none: the error is to be about the request, not about the missing place.
            float none = 0;
            try {
                float* const scores = response.scores.empty() ? &none : response.scores.data();
                detail::call(pagoda_engine_rank, get(), c_request.get(), scores, response.scores.size(), &c_response);
            } catch (const Error& error) {
                // A swap has changed the number of tasks since it was read.
                if (error.argument() == "score_count") continue;
                throw;
            }
            fill(response, c_response);
            return response;
        }
    }

    /// Scores candidates on a thread of Pagoda. An error in the request itself is thrown at once.
    std::future<RankResponse> rank_async(const RankRequest& request) const {
        const detail::CRequest c_request(request);
        using Promise = std::promise<RankResponse>;
        auto promise = std::make_unique<Promise>();
        auto future = promise->get_future();
        const pagoda_rank_callback done = [](void* to, pagoda_status status, const float* scores, std::size_t count,
                                             const pagoda_rank_response* c_response, const pagoda_error* error) {
            const std::unique_ptr<Promise> self(static_cast<Promise*>(to));
            try {
                if (status != PAGODA_STATUS_OK) throw detail::to_error(status, error);
                RankResponse response;
                response.scores.assign(scores, scores + count);
                fill(response, detail::known_of(c_response));
                self->set_value(std::move(response));
            } catch (...) {
                self->set_exception(std::current_exception());
            }
        };
        detail::call(pagoda_engine_rank_async, get(), c_request.get(), done, static_cast<void*>(promise.get()));
        promise.release();
        return future;
    }

    /// Replaces the model folder that is served. Requests that arrived before are answered by the old model.
    void swap(const std::string& folder) const { detail::call(pagoda_engine_swap, get(), folder.c_str()); }

    /// Removes all data of users; returns how many were known.
    std::size_t forget(Span<const std::uint64_t> users) const { return count(pagoda_engine_forget, users); }
    /// Starts to load keys and values of users into the pool; returns how many histories are being loaded.
    std::size_t prefetch(Span<const std::uint64_t> users) const { return count(pagoda_engine_prefetch, users); }
    /// Evicts keys and values of users from the pool; returns how many users had any there.
    std::size_t unload(Span<const std::uint64_t> users) const { return count(pagoda_engine_unload, users); }

    /// Where the model that is served runs.
    EngineProvider provider() const {
        EngineProvider result;
        result.reason = detail::text([&](char* buffer, std::size_t capacity, std::size_t* length) {
            detail::call(pagoda_engine_provider, get(), &result.provider, &result.device_id, buffer, capacity, length);
        });
        return result;
    }

    /// The number of scores of a candidate.
    std::size_t tasks() const {
        std::size_t tasks = 0;
        detail::call(pagoda_engine_tasks, get(), &tasks);
        return tasks;
    }

    /// The pagoda.json of the model that is served.
    std::string info() const {
        return detail::text([&](char* buffer, std::size_t capacity, std::size_t* length) {
            detail::call(pagoda_engine_info, get(), buffer, capacity, length);
        });
    }

    /// The names of the embedding tables that have statistics; none if they are in the graph.
    std::vector<std::string> tables() const {
        const std::string lines = detail::text([&](char* buffer, std::size_t capacity, std::size_t* length) {
            detail::call(pagoda_engine_tables, get(), buffer, capacity, length);
        });
        std::vector<std::string> names;
        for (std::size_t at = 0; at < lines.size();) {
            const std::size_t end = std::min(lines.find('\n', at), lines.size());
            names.push_back(lines.substr(at, end - at));
            at = end + 1;
        }
        return names;
    }

    /// The state and the counters of the engine.
    EngineStats stats() const {
        EngineStats stats = PAGODA_ENGINE_STATS_INIT;
        detail::call(pagoda_engine_get_stats, get(), &stats);
        return stats;
    }

    /// The statistics of the cache of keys and values; `pages` is 0 if nothing is cached.
    KvStats kv_stats() const {
        KvStats stats = PAGODA_KV_STATS_INIT;
        detail::call(pagoda_engine_get_kv_stats, get(), &stats);
        return stats;
    }

    /// The statistics of an embedding table.
    TableStats table_stats(const std::string& table) const {
        TableStats stats = PAGODA_TABLE_STATS_INIT;
        detail::call(pagoda_engine_get_table_stats, get(), table.c_str(), &stats);
        return stats;
    }

    /// The handle, for functions of pagoda.h. This object keeps it.
    const pagoda_engine* get() const noexcept { return handle_.get(); }

private:
    static pagoda_engine* open(const std::string& folder, const EngineOptions& options) {
        detail::check_abi();
        const pagoda_model_options model = detail::to_c(options.model);
        const pagoda_store_options store = detail::to_c(options.store_options);
        std::vector<pagoda_graph_shape> shapes;
        for (const GraphShape& from : options.cuda_graphs) {
            pagoda_graph_shape shape = PAGODA_GRAPH_SHAPE_INIT;
            shape.users = from.users;
            shape.rows = from.rows;
            shape.candidates = from.candidates;
            shape.pages = from.pages;
            shapes.push_back(shape);
        }
        pagoda_engine_options c_options = PAGODA_ENGINE_OPTIONS_INIT;
        c_options.instances = options.instances;
        c_options.max_batch = options.max_batch;
        c_options.max_batch_rows = options.max_batch_rows;
        c_options.queue = options.queue;
        c_options.kv_size_unit = options.kv_size.unit;
        c_options.kv_size = options.kv_size.value;
        c_options.kv_format = options.kv_format;
        c_options.host_bytes = options.host_bytes;
        c_options.offload = options.offload;
        c_options.ahead_percent = options.ahead_percent;
        c_options.max_delay_us = detail::to_c(options.max_delay, "options.max_delay_us");
        c_options.remember_bytes = options.remember_bytes;
        c_options.table_cache_bytes = options.table_cache_bytes;
        if (!options.table_tiers_path.empty()) c_options.table_tiers_path = options.table_tiers_path.c_str();
        c_options.model = &model;
        if (!options.store_path.empty()) c_options.store_path = options.store_path.c_str();
        c_options.store_options = &store;
        c_options.cuda_graphs = shapes.data();
        c_options.cuda_graph_count = shapes.size();
        return detail::make<pagoda_engine>(pagoda_engine_open, folder.c_str(), &c_options);
    }

    /// Everything but the scores.
    static void fill(RankResponse& response, const pagoda_rank_response& from) {
        response.tasks = from.tasks;
        if (from.version) response.version = from.version;
        response.batched_with = from.batched_with;
        response.cached_rows = from.cached_rows;
        response.computed_rows = from.computed_rows;
        response.queue_time = std::chrono::nanoseconds(from.queue_ns);
        response.run_time = std::chrono::nanoseconds(from.run_ns);
    }

    template <class Function>
    std::size_t count(Function function, Span<const std::uint64_t> users) const {
        std::size_t count = 0;
        detail::call(function, get(), users.data(), users.size(), &count);
        return count;
    }

    detail::Handle<pagoda_engine, pagoda_engine_free> handle_;
};

}  // namespace pagoda

#endif  // PAGODA_ENGINE_HPP
