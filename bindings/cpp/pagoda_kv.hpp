// What a model remembers, for C++17: stores, caches of keys and values, leases. Part of pagoda.hpp, which includes it.
//
//     const pagoda::Store store("/var/lib/ranker");
//     const pagoda::KvCache cache(options, &store);
//     pagoda::KvLease lease = cache.prepare({{user, start, tokens, candidates}});
//     ... run the model on the lease's tensors and the cache's pools ...
//     lease.commit();

#ifndef PAGODA_KV_HPP
#define PAGODA_KV_HPP

#include "pagoda.hpp"

namespace pagoda {

/// How to open a store; pagoda_store_options tells more.
struct StoreOptions {
    pagoda_durability durability = PAGODA_DURABILITY_POWER;  ///< When a write counts as done.
    std::uint64_t max_bytes = 0;                             ///< How many bytes the files may take; 0 = no limit.
    std::uint64_t segment_bytes = 0;                         ///< How long a file gets; 0 = the default.
    std::uint64_t queue_bytes = 0;                           ///< How many bytes may wait; 0 = the default.
};

/// Histories on disk, in a folder that one process at a time has open. Any number of caches may share one.
class Store {
public:
    /// Opens the store in a folder, or makes one there.
    explicit Store(const std::string& path, const StoreOptions& options = {}) : handle_(open(path, options)) {}
    /// Takes over a handle of pagoda.h.
    explicit Store(pagoda_store* handle) noexcept : handle_(handle) {}

    /// Waits until everything that was handed to the store is as durable as it promises.
    void flush() const { detail::call(pagoda_store_flush, get()); }
    /// Gives back the space of everything that was removed or replaced, and waits for that.
    void compact() const { detail::call(pagoda_store_compact, get()); }
    /// What the store has now, and what happened since it was opened.
    pagoda_store_info stats() const {
        pagoda_store_info info = PAGODA_STORE_INFO_INIT;
        detail::call(pagoda_store_stats, get(), &info);
        return info;
    }

    /// The handle, for functions of pagoda.h; it stays this object's.
    const pagoda_store* get() const noexcept { return handle_.get(); }

private:
    static pagoda_store* open(const std::string& path, const StoreOptions& options) {
        detail::check_abi();
        pagoda_store_options c_options = PAGODA_STORE_OPTIONS_INIT;
        c_options.durability = options.durability;
        c_options.max_bytes = options.max_bytes;
        c_options.segment_bytes = options.segment_bytes;
        c_options.queue_bytes = options.queue_bytes;
        return detail::make<pagoda_store>(pagoda_store_open, path.c_str(), &c_options);
    }

    detail::Handle<pagoda_store, pagoda_store_free> handle_;
};

/// What a cache is for and how it behaves; pagoda_kv_options tells more. The first three, and one of `pages`, `bytes`
/// and `percent`, must be set.
struct KvOptions {
    std::int32_t layers = 0;                              ///< Layers that keep keys and values.
    std::int32_t heads = 0;                               ///< Heads in each.
    std::int32_t head_size = 0;                           ///< The size of a head.
    std::int32_t page_size = 32;                          ///< Tokens that a page holds.
    pagoda_type type = PAGODA_TYPE_F32;                   ///< The type of keys and values.
    std::int32_t pages = 0;                               ///< How many pages the pool has,
    std::uint64_t bytes = 0;                              ///< or how many bytes, all layers together.
    std::int32_t max_history = 0;                         ///< The most tokens of a history that are kept; 0 = all.
    pagoda_overlap overlap = PAGODA_OVERLAP_REFUSE;       ///< What becomes of new tokens that are cached already.
    pagoda_edited edited = PAGODA_EDITED_UNNOTICED;       ///< What happens when items are not those that are cached.
    pagoda_offload offload = PAGODA_OFFLOAD_ON_EVICTION;  ///< When histories go to the store.
    bool onload_in_background = false;                    ///< Whether `prepare` returns before all has arrived.
    std::int32_t onload_threads = 0;                      ///< Threads that read the store; 0 = the default.
    std::int32_t ahead_percent = 12;                      ///< How much of the pool is free or stored before it is needed.
    std::string model_version;                            ///< Histories of another version are never seen.
    std::int32_t device = -1;                             ///< The GPU whose memory the pool is in; -1: host memory.
    std::int32_t percent = 0;                             ///< On a GPU: percent of its free memory, not `pages`.
};

/// What one user of a batch brings.
struct KvRequest {
    std::uint64_t user = 0;           ///< The user.
    std::int64_t start = 0;           ///< The position of the first new token in the user's history.
    std::int32_t tokens = 0;          ///< How many new tokens there are.
    std::int32_t candidates = 0;      ///< How many candidates follow them.
    Span<const std::uint64_t> items;  ///< Items of the history, if the cache looks out for edited ones.
};

/// What is cached of one user.
struct CachedUser {
    std::int64_t start = 0;               ///< The position of the first token.
    std::int64_t length = 0;              ///< How many tokens there are.
    pagoda_tier tier = PAGODA_TIER_NONE;  ///< Where they lie.
};

/// A batch's hold on its users, until it is committed or aborted; one that is neither is aborted at its end.
class KvLease {
public:
    /// Takes over a handle of pagoda.h.
    explicit KvLease(pagoda_kv_lease* handle) noexcept : handle_(handle) {}

    Tensor row_offsets() const { return tensor(PAGODA_KV_ROW_OFFSETS); }        ///< Where each user's rows begin.
    Tensor num_candidates() const { return tensor(PAGODA_KV_NUM_CANDIDATES); }  ///< How many candidates each has.
    Tensor cached_len() const { return tensor(PAGODA_KV_CACHED_LEN); }          ///< How many tokens are cached.
    Tensor page_indptr() const { return tensor(PAGODA_KV_PAGE_INDPTR); }        ///< Where each list of pages begins.
    Tensor page_ids() const { return tensor(PAGODA_KV_PAGE_IDS); }              ///< Pages in order of position.

    /// One of the tensors above, by its number.
    Tensor tensor(pagoda_kv_tensor which) const {
        return Tensor(detail::make<pagoda_tensor>(pagoda_kv_lease_tensor, get(), which));
    }

    /// What the lease has of one user, by its place in the batch.
    pagoda_kv_leased_user user(std::size_t index) const {
        pagoda_kv_leased_user user = PAGODA_KV_LEASED_USER_INIT;
        detail::call(pagoda_kv_lease_user, get(), index, &user);
        return user;
    }

    /// Whether a layer of every user has arrived from the store.
    bool ready(std::int32_t layer) const {
        std::int32_t ready = 0;
        detail::call(pagoda_kv_lease_ready, get(), layer, &ready);
        return ready != 0;
    }

    /// Waits until a layer of every user, or every layer, has arrived from the store.
    void wait(std::int32_t layer = -1) const { detail::call(pagoda_kv_lease_wait, get(), layer); }

    /// Makes the new tokens part of their histories, and ends the lease. With `durable` it waits until what goes to the
    /// store at commit is as durable as that promises; an Error about "wait" means that it is committed, not durable.
    void commit(bool durable = false) const { detail::call(pagoda_kv_lease_commit, get(), durable ? 1 : 0); }
    /// Ends the lease and leaves everything as it was.
    void abort() const { detail::call(pagoda_kv_lease_abort, get()); }

    /// The handle, for functions of pagoda.h; it stays this object's.
    const pagoda_kv_lease* get() const noexcept { return handle_.get(); }

private:
    detail::Handle<pagoda_kv_lease, pagoda_kv_lease_free> handle_;
};

/// A cache of keys and values: each user's history as pages in a pool. Any number of threads may use one at the same
/// time. Leases that are out stay good when it goes.
class KvCache {
public:
    /// Opens a cache, above a store if there is one; it keeps the store open.
    explicit KvCache(const KvOptions& options, const Store* store = nullptr) : handle_(open(options, store)) {}
    /// Takes over a handle of pagoda.h.
    explicit KvCache(pagoda_kv_cache* handle) noexcept : handle_(handle) {}

    /// The pool of one layer: an input and an output of the model, both bound to it.
    Tensor pool(std::int32_t layer) const {
        return Tensor(detail::make<pagoda_tensor>(pagoda_kv_cache_pool, get(), layer));
    }

    /// What is cached of each user.
    std::vector<CachedUser> lookup(Span<const std::uint64_t> users) const {
        const std::size_t count = users.size();
        std::vector<std::int64_t> starts(count), lengths(count);
        std::vector<pagoda_tier> tiers(count);
        detail::call(pagoda_kv_cache_lookup, get(), users.data(), count, starts.data(), lengths.data(), tiers.data());
        std::vector<CachedUser> cached(count);
        for (std::size_t i = 0; i < count; ++i) cached[i] = {starts[i], lengths[i], tiers[i]};
        return cached;
    }
    /// What is cached of one user.
    CachedUser lookup(std::uint64_t user) const { return lookup({&user, 1})[0]; }

    /// Makes room for a batch and says where everything lies.
    KvLease prepare(const std::vector<KvRequest>& batch) const {
        std::vector<pagoda_kv_request> requests;
        for (const KvRequest& from : batch) {
            pagoda_kv_request request = PAGODA_KV_REQUEST_INIT;
            request.user = from.user;
            request.start = from.start;
            request.tokens = from.tokens;
            request.candidates = from.candidates;
            request.items = from.items.data();
            request.item_count = from.items.size();
            requests.push_back(request);
        }
        return KvLease(
            detail::make<pagoda_kv_lease>(pagoda_kv_cache_prepare, get(), requests.data(), requests.size()));
    }

    /// Writes the histories of these users to the store and waits; says how many had something that was not stored.
    std::size_t offload(Span<const std::uint64_t> users) const { return these(pagoda_kv_cache_offload, users); }
    /// The same of everyone.
    std::size_t offload_all() const { return everyone(pagoda_kv_cache_offload); }

    /// Removes the histories of these users from tiers; says how many had something there.
    std::size_t evict(Span<const std::uint64_t> users, pagoda_tiers tiers) const {
        return these(pagoda_kv_cache_evict, users, tiers);
    }
    /// The same of everyone whom no lease holds.
    std::size_t evict_all(pagoda_tiers tiers) const { return everyone(pagoda_kv_cache_evict, tiers); }

    /// Begins to bring histories from the store into the pool; says how many are on their way.
    std::size_t prefetch(Span<const std::uint64_t> users) const { return these(pagoda_kv_cache_prefetch, users); }

    /// Waits until everything that was handed to the store is as durable as it promises.
    void flush() const { detail::call(pagoda_kv_cache_flush, get()); }

    /// What the cache has, and what it did since it was opened.
    pagoda_kv_stats stats() const {
        pagoda_kv_stats stats = PAGODA_KV_STATS_INIT;
        detail::call(pagoda_kv_cache_stats, get(), &stats);
        return stats;
    }

    /// The handle, for functions of pagoda.h; it stays this object's.
    const pagoda_kv_cache* get() const noexcept { return handle_.get(); }

private:
    static pagoda_kv_cache* open(const KvOptions& options, const Store* store) {
        detail::check_abi();
        pagoda_kv_options c_options = PAGODA_KV_OPTIONS_INIT;
        c_options.layers = options.layers;
        c_options.heads = options.heads;
        c_options.head_size = options.head_size;
        c_options.page_size = options.page_size;
        c_options.type = options.type;
        c_options.pages = options.pages;
        c_options.bytes = options.bytes;
        c_options.max_history = options.max_history;
        c_options.overlap = options.overlap;
        c_options.edited = options.edited;
        c_options.offload = options.offload;
        c_options.onload_in_background = options.onload_in_background ? 1 : 0;
        c_options.onload_threads = options.onload_threads;
        c_options.ahead_percent = options.ahead_percent;
        c_options.model_version = options.model_version.c_str();
        c_options.device = options.device;
        c_options.percent = options.percent;
        // To C this would mean that no store is wanted.
        if (store && !store->get()) throw Error(PAGODA_INVALID_HANDLE, "the store was moved away", "options.store");
        c_options.store = store ? store->get() : nullptr;
        return detail::make<pagoda_kv_cache>(pagoda_kv_cache_open, &c_options);
    }

    template <class Function, class... Rest>
    std::size_t these(Function function, Span<const std::uint64_t> users, Rest... rest) const {
        // An empty list that lies nowhere would mean everyone to C.
        const std::uint64_t no_one = 0;
        std::size_t count = 0;
        detail::call(function, get(), users.size() == 0 ? &no_one : users.data(), users.size(), rest..., &count);
        return count;
    }

    template <class Function, class... Rest>
    std::size_t everyone(Function function, Rest... rest) const {
        std::size_t count = 0;
        detail::call(function, get(), static_cast<const std::uint64_t*>(nullptr), std::size_t{0}, rest..., &count);
        return count;
    }

    detail::Handle<pagoda_kv_cache, pagoda_kv_cache_free> handle_;
};

}  // namespace pagoda

#endif  // PAGODA_KV_HPP
