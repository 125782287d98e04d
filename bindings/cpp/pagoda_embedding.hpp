// Embedding tables, for C++17. Part of pagoda.hpp, which includes it.
//
//     const pagoda::Embeddings embeddings("ps.json");
//     const pagoda::EmbeddingRows rows = embeddings.lookup("model/table", keys);

#ifndef PAGODA_EMBEDDING_HPP
#define PAGODA_EMBEDDING_HPP

#include "pagoda.hpp"

namespace pagoda {

/// The options of a lookup; see pagoda_lookup_options.
struct LookupOptions {
    pagoda_miss miss = PAGODA_MISS_BY_HIT_RATE;  ///< What happens to keys that are not in the cache.
    std::chrono::microseconds limit{0};          ///< With PAGODA_MISS_WITHIN: the time limit.
};

/// What a lookup found.
struct EmbeddingRows {
    std::size_t dim = 0;              ///< How many numbers a row has.
    std::vector<float> numbers;       ///< The rows, one after the other.
    std::vector<std::uint8_t> found;  ///< For each key 1 if it was found, and 0 if it got the default vector.

    /// How many rows there are.
    std::size_t size() const noexcept { return dim == 0 ? 0 : numbers.size() / dim; }
    /// One of the rows.
    Span<const float> row(std::size_t index) const noexcept { return {numbers.data() + index * dim, dim}; }
};

/// What tables will take, approximately.
struct EmbeddingEstimate {
    std::uint64_t memory = 0;  ///< Bytes of memory in this process.
    std::uint64_t disk = 0;    ///< Bytes of their files.
};

/// Statistics of a table.
using TableStats = pagoda_table_stats;

/// Embedding tables of any number of models. A table is named "model/table", or "table" if that is
/// unique. Any number of threads may use one at the same time.
class Embeddings {
public:
    /// Opens the tables of a configuration file.
    explicit Embeddings(const std::string& path) : handle_(open(path)) {}
    /// Takes over a handle of pagoda.h.
    explicit Embeddings(pagoda_embeddings* handle) noexcept : handle_(handle) {}

    /// Estimates what the tables of a configuration file will take.
    static EmbeddingEstimate estimate(const std::string& path) {
        detail::check_abi();
        EmbeddingEstimate bytes;
        detail::call(pagoda_embeddings_estimate, path.c_str(), &bytes.memory, &bytes.disk);
        return bytes;
    }

    /// Adds a model while others are in use: an element of `models` in the configuration, as JSON.
    void add(const std::string& model, const std::string& folder = {}) const {
        detail::call(pagoda_embeddings_add, get(), model.c_str(), folder.empty() ? nullptr : folder.c_str());
    }
    /// Removes a model.
    void retire(const std::string& model) const { detail::call(pagoda_embeddings_retire, get(), model.c_str()); }

    /// The number of elements in a row of a table.
    std::size_t dim(const std::string& table) const {
        std::size_t dim = 0;
        detail::call(pagoda_embeddings_dim, get(), table.c_str(), &dim);
        return dim;
    }

    /// The rows of keys.
    EmbeddingRows lookup(const std::string& table, Span<const std::int64_t> keys, LookupOptions options = {}) const {
        EmbeddingRows rows = room(table, keys.size(), keys.size());
        lookup_into(table, keys, rows.numbers, rows.found.data(), options);
        return rows;
    }
    /// The same into memory of the caller: keys x dim numbers, and nothing or for each key whether it was found.
    void lookup_into(const std::string& table, Span<const std::int64_t> keys, Span<float> numbers,
                     std::uint8_t* found = nullptr, LookupOptions options = {}) const {
        const pagoda_lookup_options c_options = c(options);
        detail::call(pagoda_embeddings_lookup, get(), table.c_str(), keys.data(), keys.size(), &c_options,
                     numbers.data(), numbers.size(), found);
    }

    /// One vector for each slot, of the keys from offsets[slot] on to before offsets[slot + 1].
    EmbeddingRows pool(const std::string& table, Span<const std::int64_t> keys, Span<const std::int64_t> offsets,
                       pagoda_combiner combiner, LookupOptions options = {}) const {
        EmbeddingRows rows = room(table, offsets.size() == 0 ? 0 : offsets.size() - 1, keys.size());
        const pagoda_lookup_options c_options = c(options);
        detail::call(pagoda_embeddings_pool, get(), table.c_str(), keys.data(), keys.size(), offsets.data(),
                     offsets.size(), combiner, &c_options, rows.numbers.data(), rows.numbers.size(),
                     rows.found.data());
        return rows;
    }

    /// Replaces rows or adds them; a row that has a higher version stays.
    void upsert(const std::string& table, std::uint64_t version, Span<const std::int64_t> keys,
                Span<const float> numbers, pagoda_reach reach = PAGODA_REACH_AT_ONCE) const {
        detail::call(pagoda_embeddings_upsert, get(), table.c_str(), version, keys.data(), keys.size(), numbers.data(),
                     numbers.size(), reach);
    }
    /// Deletes rows; a row that has a higher version stays.
    void remove(const std::string& table, std::uint64_t version, Span<const std::int64_t> keys,
                pagoda_reach reach = PAGODA_REACH_AT_ONCE) const {
        detail::call(pagoda_embeddings_delete, get(), table.c_str(), version, keys.data(), keys.size(), reach);
    }

    /// Starts to load keys into the cache; returns how many were not there and were queued.
    std::size_t prefetch(const std::string& table, Span<const std::int64_t> keys) const {
        std::size_t queued = 0;
        detail::call(pagoda_embeddings_prefetch, get(), table.c_str(), keys.data(), keys.size(), &queued);
        return queued;
    }
    /// Reloads all rows in the cache of a table from the backing tiers.
    void refresh(const std::string& table) const { detail::call(pagoda_embeddings_refresh, get(), table.c_str()); }
    /// Waits until all background fetches and loads are done.
    void wait() const { detail::call(pagoda_embeddings_wait, get()); }

    /// The statistics of a table.
    TableStats stats(const std::string& table) const {
        TableStats stats = PAGODA_TABLE_STATS_INIT;
        detail::call(pagoda_embeddings_get_stats, get(), table.c_str(), &stats);
        return stats;
    }

    /// The handle, for functions of pagoda.h. This object keeps it.
    const pagoda_embeddings* get() const noexcept { return handle_.get(); }

private:
    static pagoda_embeddings* open(const std::string& path) {
        detail::check_abi();
        return detail::make<pagoda_embeddings>(pagoda_embeddings_open, path.c_str());
    }

    EmbeddingRows room(const std::string& table, std::size_t rows, std::size_t keys) const {
        EmbeddingRows room;
        room.dim = dim(table);
        room.numbers.resize(rows * room.dim);
        room.found.resize(keys);
        return room;
    }

    static pagoda_lookup_options c(LookupOptions options) {
        pagoda_lookup_options c_options = PAGODA_LOOKUP_OPTIONS_INIT;
        c_options.miss = options.miss;
        c_options.limit_us = detail::to_c(options.limit, "options.limit_us");
        return c_options;
    }

    detail::Handle<pagoda_embeddings, pagoda_embeddings_free> handle_;
};

}  // namespace pagoda

#endif  // PAGODA_EMBEDDING_HPP
