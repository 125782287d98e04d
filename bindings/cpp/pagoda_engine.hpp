// The ranking engine, for C++17. Part of pagoda.hpp, which includes it.
//
//     const pagoda::Engine engine("model");
//     pagoda::RankRequest request;
//     request.user = 7;
//     request.events.keys = {{"movie", {17, 4}}, {"rating", {5, 3}}};
//     request.candidates = {{"movie", {8, 15, 16}}};
//     const pagoda::Ranked ranked = engine.rank(request);

#ifndef PAGODA_ENGINE_HPP
#define PAGODA_ENGINE_HPP

#include "pagoda.hpp"

#include <optional>

namespace pagoda {

/// Keys by feature: the name of each, and its keys, as many for one as for another; -1 for none.
using Columns = std::vector<std::pair<std::string, std::vector<std::int64_t>>>;

/// Things that a user did, the earliest first.
struct Events {
    Columns keys;                     ///< The keys of each item feature and each action feature.
    std::vector<std::int64_t> times;  ///< When they were, in seconds; may be empty if the model has no times.
};

/// A request: score candidates for a user. pagoda_rank_request tells more.
struct RankRequest {
    std::uint64_t user = 0;                                       ///< The user.
    std::optional<std::int64_t> start;                            ///< The first event's number; none: all are sent.
    Events events;                                                ///< The whole history, or what is new of it.
    std::vector<std::pair<std::string, std::int64_t>> user_keys;  ///< The key of each user feature.
    Columns candidates;                                           ///< The keys of each item feature.
    std::optional<std::int64_t> time;                             ///< The time of the request, in seconds; none: now.
    std::uint64_t timeout_us = 0;                                 ///< Microseconds that it may take; 0: any number.
    const Cancel* cancel = nullptr;                               ///< Ends it before that.
};

/// The answer to a request.
struct Ranked {
    std::size_t tasks = 0;                                       ///< How many scores a candidate has.
    std::vector<float> scores;                                   ///< Those of the first candidate, then the next.
    pagoda_rank_response response = PAGODA_RANK_RESPONSE_INIT;  ///< How it went.

    /// How many candidates there are.
    std::size_t size() const noexcept { return tasks == 0 ? 0 : scores.size() / tasks; }
    /// The scores of one, in the order of the tasks.
    Span<const float> candidate(std::size_t index) const noexcept { return {scores.data() + index * tasks, tasks}; }
};

namespace detail {

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
        request_.timeout_us = request.timeout_us;
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
        throw Error(PAGODA_INVALID_ARGUMENT, name + ": " + std::to_string(size) + " and " + std::to_string(count) +
                                                 " numbers: give each as many", name);
    }

    pagoda_rank_request request_ = PAGODA_RANK_REQUEST_INIT;
    Names event_names_, user_names_, candidate_names_;
    Lists event_keys_, candidate_keys_;
    std::vector<std::int64_t> user_keys_;
};

}  // namespace detail

/// A model folder that is being served. Any number of threads may use one at the same time.
class Engine {
public:
    /// Opens a model folder.
    explicit Engine(const std::string& folder, pagoda_engine_options options = PAGODA_ENGINE_OPTIONS_INIT)
        : handle_(open(folder, options)) {}
    /// Takes over a handle of pagoda.h.
    explicit Engine(pagoda_engine* handle) noexcept : handle_(handle) {}

    /// Scores candidates.
    Ranked rank(const RankRequest& request) const {
        const detail::CRequest c_request(request);
        Ranked ranked;
        ranked.tasks = tasks();
        ranked.scores.resize(c_request.get()->candidate_count * ranked.tasks);
        // Room for none is not where the result goes: what is wrong with the request is to be said, not that.
        float none = 0;
        detail::call(pagoda_engine_rank, get(), c_request.get(), ranked.scores.empty() ? &none : ranked.scores.data(),
                     ranked.scores.size(), &ranked.response);
        return ranked;
    }

    /// Scores candidates on a thread of Pagoda's. What is wrong with the request itself is thrown at once.
    std::future<Ranked> rank_async(const RankRequest& request) const {
        const detail::CRequest c_request(request);
        struct Waiting {
            std::promise<Ranked> promise;
            std::size_t candidates = 0;
        };
        auto waiting = std::make_unique<Waiting>();
        waiting->candidates = c_request.get()->candidate_count;
        auto future = waiting->promise.get_future();
        const pagoda_rank_callback done = [](void* to, pagoda_status status, const float* scores, std::size_t count,
                                             const pagoda_rank_response* response, const pagoda_error* error) {
            const std::unique_ptr<Waiting> self(static_cast<Waiting*>(to));
            try {
                if (status != PAGODA_OK) throw detail::to_error(status, error);
                Ranked ranked;
                ranked.scores.assign(scores, scores + count);
                ranked.tasks = self->candidates == 0 ? 0 : count / self->candidates;
                ranked.response = detail::known_of(response);
                self->promise.set_value(std::move(ranked));
            } catch (...) {
                self->promise.set_exception(std::current_exception());
            }
        };
        detail::call(pagoda_engine_rank_async, get(), c_request.get(), done, static_cast<void*>(waiting.get()));
        waiting.release();
        return future;
    }

    /// Serves another model folder from now on.
    void swap(const std::string& folder) const { detail::call(pagoda_engine_swap, get(), folder.c_str()); }

    /// Forgets users; says how many were known.
    std::size_t forget(Span<const std::uint64_t> users) const {
        std::size_t forgotten = 0;
        detail::call(pagoda_engine_forget, get(), users.data(), users.size(), &forgotten);
        return forgotten;
    }

    /// How many scores a candidate has.
    std::size_t tasks() const {
        std::size_t tasks = 0;
        detail::call(pagoda_engine_tasks, get(), &tasks);
        return tasks;
    }

    /// The pagoda.json of the model that is served now.
    std::string info() const {
        std::size_t length = 0;
        detail::call(pagoda_engine_info, get(), static_cast<char*>(nullptr), std::size_t{0}, &length);
        // A swap may put a longer one in its place.
        std::string text(length + 65536, '\0');
        detail::call(pagoda_engine_info, get(), text.data(), text.size(), &length);
        text.resize(length - 1);
        return text;
    }

    /// What the engine did since it was opened.
    pagoda_rank_stats stats() const {
        pagoda_rank_stats stats = PAGODA_RANK_STATS_INIT;
        detail::call(pagoda_engine_stats, get(), &stats);
        return stats;
    }

    /// The handle, for functions of pagoda.h; it stays this object's.
    const pagoda_engine* get() const noexcept { return handle_.get(); }

private:
    static pagoda_engine* open(const std::string& folder, const pagoda_engine_options& options) {
        detail::check_abi();
        return detail::make<pagoda_engine>(pagoda_engine_open, folder.c_str(), &options);
    }

    detail::Handle<pagoda_engine, pagoda_engine_free> handle_;
};

}  // namespace pagoda

#endif  // PAGODA_ENGINE_HPP
