// Stores, caches of keys and values and leases, for C++17. Part of pagoda.hpp, which includes it.
//
//     const pagoda::Store store("/var/lib/ranker");
//     const pagoda::KvCache cache(options, &store);
//     pagoda::KvLease lease = cache.prepare({{owner, start, tokens, candidates}});
//     ... run the model on the lease's tensors and the cache's pools ...
//     lease.commit();

#ifndef PAGODA_KV_HPP
#define PAGODA_KV_HPP

#include "pagoda.hpp"

namespace pagoda {

/// How to open a store; see pagoda_store_options.
struct StoreOptions {
    pagoda_durability durability = PAGODA_DURABILITY_POWER;  ///< When a write is acknowledged.
    std::uint64_t max_bytes = 0;                             ///< The maximum size of the files; 0 = no limit.
    std::uint64_t segment_bytes = 0;                         ///< The maximum size of a segment file; 0 = the default.
    std::uint64_t queue_bytes = 0;                           ///< The maximum size of the write queue; 0 = the default.
    std::uint64_t garbage_bytes = 0;                         ///< Garbage before files are compacted; 0 = the default.
};

/// The state and the counters of a store.
using StoreStats = pagoda_store_stats;

namespace detail {

/// Store options in C's form.
inline pagoda_store_options to_c(const StoreOptions& options) noexcept {
    pagoda_store_options c_options = PAGODA_STORE_OPTIONS_INIT;
    c_options.durability = options.durability;
    c_options.max_bytes = options.max_bytes;
    c_options.segment_bytes = options.segment_bytes;
    c_options.queue_bytes = options.queue_bytes;
    c_options.garbage_bytes = options.garbage_bytes;
    return c_options;
}

}  // namespace detail

/// Histories on disk, in a folder. One process at a time has it open. Any number of caches may share one.
class Store {
public:
    /// Opens the store in a folder, or makes one there.
    explicit Store(const std::string& path, const StoreOptions& options = {}) : handle_(open(path, options)) {}
    /// Takes over a handle of pagoda.h.
    explicit Store(pagoda_store* handle) noexcept : handle_(handle) {}

    /// Waits until all writes so far are as durable as the options say.
    void flush() const { detail::call(pagoda_store_flush, get()); }
    /// Frees the disk space of removed and replaced records, and waits for that.
    void compact() const { detail::call(pagoda_store_compact, get()); }
    /// The state and the counters of the store.
    StoreStats stats() const {
        StoreStats stats = PAGODA_STORE_STATS_INIT;
        detail::call(pagoda_store_get_stats, get(), &stats);
        return stats;
    }

    /// The handle, for functions of pagoda.h. This object keeps it.
    const pagoda_store* get() const noexcept { return handle_.get(); }

private:
    static pagoda_store* open(const std::string& path, const StoreOptions& options) {
        detail::check_abi();
        const pagoda_store_options c_options = detail::to_c(options);
        return detail::make<pagoda_store>(pagoda_store_open, path.c_str(), &c_options);
    }

    detail::Handle<pagoda_store, pagoda_store_free> handle_;
};

/// The size of a pool of keys and values.
struct KvSize {
    pagoda_kv_size_unit unit = PAGODA_KV_SIZE_UNIT_DEFAULT;  ///< The unit of `value`.
    std::uint64_t value = 0;                                 ///< How many.

    /// Pages.
    static KvSize pages(std::uint64_t count) noexcept { return {PAGODA_KV_SIZE_UNIT_PAGES, count}; }
    /// As many pages as fit into so many bytes, all layers together.
    static KvSize bytes(std::uint64_t count) noexcept { return {PAGODA_KV_SIZE_UNIT_BYTES, count}; }
    /// Percent of the free memory of the GPU that the pool is on.
    static KvSize percent(std::uint64_t count) noexcept { return {PAGODA_KV_SIZE_UNIT_PERCENT, count}; }
    /// Nothing is cached: for engines.
    static KvSize none() noexcept { return pages(0); }
};

/// The shape, the size and the behaviour of a cache; see pagoda_kv_options. `layers`, `heads`, `head_size` and `size`
/// must be set.
struct KvOptions {
    std::int32_t layers = 0;                                       ///< Layers that keep keys and values.
    std::int32_t heads = 0;                                        ///< Heads in a layer.
    std::int32_t head_size = 0;                                    ///< Elements in a head.
    std::int32_t page_size = 32;                                   ///< Tokens in a page.
    pagoda_element_type type = PAGODA_ELEMENT_TYPE_F32;            ///< The type of keys and values.
    std::int32_t device_id = -1;                                   ///< The GPU that holds the pool; -1: host memory.
    KvSize size;                                                   ///< The size of the pool.
    std::int32_t max_history = 0;                                  ///< Maximum tokens of a history; 0 = all.
    pagoda_overlap overlap = PAGODA_OVERLAP_REFUSE;                ///< What happens to tokens that are cached already.
    pagoda_edited edited = PAGODA_EDITED_UNNOTICED;                ///< What happens if items were edited.
    pagoda_offload offload = PAGODA_OFFLOAD_ON_EVICTION;           ///< When histories are written to the store.
    bool onload_in_background = false;                             ///< Whether `prepare` returns before all is loaded.
    std::int32_t onload_threads = 0;                               ///< Threads that read the store; 0 = the default.
    std::int32_t ahead_percent = 12;                               ///< Percentage that is free or stored ahead.
    std::string model_version;                                     ///< Histories of another version are not used.
};

/// The state and the counters of a cache.
using KvStats = pagoda_kv_stats;

/// An owner in a lease.
using LeasedOwner = pagoda_kv_leased_owner;

/// What a batch has of one owner.
struct KvRequest {
    std::uint64_t owner = 0;           ///< The owner.
    std::int64_t start = 0;           ///< The position of the first new token in the owner's history.
    std::int32_t tokens = 0;          ///< The number of new tokens.
    std::int32_t candidates = 0;      ///< The number of candidates after them.
    Span<const std::uint64_t> items;  ///< Items of the history, if the cache checks them (`edited`).
};

/// What is cached of one owner.
struct CachedOwner {
    std::int64_t start = 0;               ///< The position of the first token.
    std::int64_t length = 0;              ///< How many tokens there are.
    pagoda_tier tier = PAGODA_TIER_NONE;  ///< Where they lie.
};

/// Holds the owners of a batch in the pool until a commit or an abort. The destructor aborts a lease that has not
/// ended.
class KvLease {
public:
    /// Takes over a handle of pagoda.h.
    explicit KvLease(pagoda_kv_lease* handle) noexcept : handle_(handle) {}

    /// The offset of the first row of each owner.
    Tensor row_offsets() const { return tensor(PAGODA_KV_TENSOR_ROW_OFFSETS); }
    /// The number of candidates of each owner.
    Tensor num_candidates() const { return tensor(PAGODA_KV_TENSOR_NUM_CANDIDATES); }
    /// The number of cached tokens of each owner.
    Tensor cached_len() const { return tensor(PAGODA_KV_TENSOR_CACHED_LEN); }
    /// The offset of each owner in the list of pages.
    Tensor page_indptr() const { return tensor(PAGODA_KV_TENSOR_PAGE_INDPTR); }
    /// The pages of all owners, each owner's in order of position.
    Tensor page_ids() const { return tensor(PAGODA_KV_TENSOR_PAGE_IDS); }

    /// One of the tensors above, by its number.
    Tensor tensor(pagoda_kv_tensor which) const {
        return Tensor(detail::make<pagoda_tensor>(pagoda_kv_lease_tensor, get(), which));
    }

    /// An owner of the lease, by its index in the batch.
    LeasedOwner owner(std::size_t index) const {
        LeasedOwner owner = PAGODA_KV_LEASED_OWNER_INIT;
        detail::call(pagoda_kv_lease_owner, get(), index, &owner);
        return owner;
    }

    /// Whether a layer of all owners was loaded from the store.
    bool ready(std::int32_t layer) const {
        std::int32_t ready = 0;
        detail::call(pagoda_kv_lease_ready, get(), layer, &ready);
        return ready != 0;
    }

    /// Waits until a layer of all owners, or all layers, were loaded from the store.
    void wait(std::int32_t layer = -1) const { detail::call(pagoda_kv_lease_wait, get(), layer); }

    /// Adds the new tokens to the histories, and ends the lease. With `wait` it waits until what is written to the
    /// store at commit is durable; an Error about "wait" means that the tokens are committed, but not durable.
    void commit(bool wait = false) const { detail::call(pagoda_kv_lease_commit, get(), wait ? 1 : 0); }
    /// Ends the lease without a change of the histories.
    void abort() const { detail::call(pagoda_kv_lease_abort, get()); }

    /// The handle, for functions of pagoda.h. This object keeps it.
    const pagoda_kv_lease* get() const noexcept { return handle_.get(); }

private:
    detail::Handle<pagoda_kv_lease, pagoda_kv_lease_free> handle_;
};

/// A cache of keys and values: each owner's history as pages in a pool. Any number of threads may use one at the same
/// time. Leases stay valid after it is destroyed.
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

    /// What is cached of each owner.
    std::vector<CachedOwner> lookup(Span<const std::uint64_t> owners) const {
        const std::size_t count = owners.size();
        std::vector<std::int64_t> starts(count), lengths(count);
        std::vector<pagoda_tier> tiers(count);
        detail::call(pagoda_kv_cache_lookup, get(), owners.data(), count, starts.data(), lengths.data(), tiers.data());
        std::vector<CachedOwner> cached(count);
        for (std::size_t i = 0; i < count; ++i) cached[i] = {starts[i], lengths[i], tiers[i]};
        return cached;
    }
    /// What is cached of one owner.
    CachedOwner lookup(std::uint64_t owner) const { return lookup({&owner, 1})[0]; }

    /// Makes room for a batch, and returns a lease with the tensors for the model.
    KvLease prepare(const std::vector<KvRequest>& requests) const {
        std::vector<pagoda_kv_request> c_requests;
        for (const KvRequest& from : requests) {
            pagoda_kv_request request = PAGODA_KV_REQUEST_INIT;
            request.owner = from.owner;
            request.start = from.start;
            request.tokens = from.tokens;
            request.candidates = from.candidates;
            request.items = from.items.data();
            request.item_count = from.items.size();
            c_requests.push_back(request);
        }
        return KvLease(
            detail::make<pagoda_kv_lease>(pagoda_kv_cache_prepare, get(), c_requests.data(), c_requests.size()));
    }

    /// Lets `to`, which must have no history, begin with the first tokens of `from`: their whole pages are shared.
    /// Returns how many tokens are shared.
    std::int32_t fork(std::uint64_t from, std::uint64_t to, std::int32_t tokens) const {
        std::int32_t shared = 0;
        detail::call(pagoda_kv_cache_fork, get(), from, to, tokens, &shared);
        return shared;
    }

    /// Writes the histories of these owners to the store and waits; says how many had something that was not stored.
    std::size_t offload(Span<const std::uint64_t> owners) const { return these(pagoda_kv_cache_offload, owners); }
    /// The same for all owners in the pool.
    std::size_t offload_all() const { return all(pagoda_kv_cache_offload); }

    /// Removes the histories of these owners from tiers; says how many had something there.
    std::size_t evict(Span<const std::uint64_t> owners, pagoda_tiers tiers) const {
        return these(pagoda_kv_cache_evict, owners, tiers);
    }
    /// The same for all owners that no lease holds.
    std::size_t evict_all(pagoda_tiers tiers) const { return all(pagoda_kv_cache_evict, tiers); }

    /// Begins to bring histories from the store into the pool; says how many are on their way.
    std::size_t prefetch(Span<const std::uint64_t> owners) const { return these(pagoda_kv_cache_prefetch, owners); }

    /// Waits until everything that was handed to the store is as durable as it promises.
    void flush() const { detail::call(pagoda_kv_cache_flush, get()); }

    /// What the cache has, and what it did since it was opened.
    KvStats stats() const {
        KvStats stats = PAGODA_KV_STATS_INIT;
        detail::call(pagoda_kv_cache_get_stats, get(), &stats);
        return stats;
    }

    /// The handle, for functions of pagoda.h. This object keeps it.
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
        c_options.device_id = options.device_id;
        c_options.size_unit = options.size.unit;
        c_options.size = options.size.value;
        c_options.max_history = options.max_history;
        c_options.overlap = options.overlap;
        c_options.edited = options.edited;
        c_options.offload = options.offload;
        c_options.onload_in_background = options.onload_in_background ? 1 : 0;
        c_options.onload_threads = options.onload_threads;
        c_options.ahead_percent = options.ahead_percent;
        c_options.model_version = options.model_version.c_str();
        // To C this would mean that no store is wanted.
        if (store && !store->get())
            throw Error(PAGODA_STATUS_INVALID_HANDLE, "the store was moved away", "options.store");
        c_options.store = store ? store->get() : nullptr;
        return detail::make<pagoda_kv_cache>(pagoda_kv_cache_open, &c_options);
    }

    template <class Function, class... Rest>
    std::size_t these(Function function, Span<const std::uint64_t> owners, Rest... rest) const {
        // To C an empty list at NULL would mean all owners.
        const std::uint64_t none = 0;
        std::size_t count = 0;
        detail::call(function, get(), owners.size() == 0 ? &none : owners.data(), owners.size(), rest..., &count);
        return count;
    }

    template <class Function, class... Rest>
    std::size_t all(Function function, Rest... rest) const {
        std::size_t count = 0;
        detail::call(function, get(), static_cast<const std::uint64_t*>(nullptr), std::size_t{0}, rest..., &count);
        return count;
    }

    detail::Handle<pagoda_kv_cache, pagoda_kv_cache_free> handle_;
};

}  // namespace pagoda

#endif  // PAGODA_KV_HPP
