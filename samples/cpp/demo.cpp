// A model that remembers, in C++: demo-cpp MODEL.onnx, with the model that samples/make_model.py writes.
// samples/c/demo.c tells the same story at length.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <pagoda.hpp>
#include <vector>

using pagoda::Tensor;
using Items = std::vector<std::int64_t>;

constexpr int history_size = 500, new_size = 3, candidate_count = 10;
constexpr int row_count = history_size + new_size + candidate_count;

pagoda::KvOptions cache_options() {
    pagoda::KvOptions options;
    options.layers = 2;
    options.heads = 2;
    options.head_size = 32;
    options.size = pagoda::KvSize::bytes(4 << 20);
    return options;
}

// A model and what it remembers of each user: the keys and values of each layer.
struct Ranker {
    pagoda::Model model;
    pagoda::KvCache cache{cache_options()};
    Tensor pool_0 = cache.pool(0), pool_1 = cache.pool(1);

    // Returns the scores of the `candidates` after `items`, which go on at the position `start` of the user's history.
    // They become part of it if `keep` says so.
    std::vector<float> rank(std::uint64_t user, std::int64_t start, Items items, const Items& candidates, bool keep) {
        const pagoda::KvLease lease =
            cache.prepare({{user, start, std::int32_t(items.size()), std::int32_t(candidates.size()), {}}});
        items.insert(items.end(), candidates.begin(), candidates.end());
        // The pools are inputs and outputs at once: the model adds the new items where the old ones lie.
        const auto outputs = model.run(
            {{"item_ids", Tensor::from(items)}, {"row_offsets", lease.row_offsets()},
             {"num_candidates", lease.num_candidates()}, {"cached_len", lease.cached_len()},
             {"page_indptr", lease.page_indptr()}, {"page_ids", lease.page_ids()},
             {"kv_pool_0", pool_0}, {"kv_pool_1", pool_1}},
            {"scores"}, {{"kv_pool_0_out", pool_0}, {"kv_pool_1_out", pool_1}});
        if (keep) lease.commit();  // else it is aborted
        const auto scores = outputs[0].data<float>();
        return {scores.end() - candidates.size(), scores.end()};
    }

    // The same a few times, for a second at most, without keeping anything; puts the median time into `ms`.
    std::vector<float> timed(std::uint64_t user, std::int64_t start, const Items& items, const Items& candidates,
                             double& ms) {
        std::vector<double> times;
        std::vector<float> scores;
        for (double sum = 0; times.size() < 9 && sum < 1000; sum += times.back()) {
            const auto begin = std::chrono::steady_clock::now();
            scores = rank(user, start, items, candidates, false);
            times.push_back(
                std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
        }
        std::sort(times.begin(), times.end());
        ms = times[times.size() / 2];
        return scores;
    }
};

bool demo(const char* path) {
    Ranker ranker{pagoda::Model(path)};
    const pagoda::Model& model = ranker.model;
    std::printf("%s: %zu inputs, %zu outputs, on the %s\n", path, model.inputs().size(), model.outputs().size(),
                model.provider() == PAGODA_PROVIDER_CUDA ? "GPU" : "CPU");

    Items items;
    for (std::int64_t i = 0; i < row_count; ++i) items.push_back((i * 7919 + 17) % 1000);
    const auto part = [&](int from, int to) { return Items(items.begin() + from, items.begin() + to); };
    const Items candidates = part(history_size + new_size, row_count);

    double slow = 0, fast = 0;
    const auto recomputed = ranker.timed(1, 0, part(0, history_size + new_size), candidates, slow);

    ranker.rank(2, 0, part(0, 300), {}, true);  // the history comes in two parts, as on two earlier visits
    ranker.rank(2, 300, part(300, history_size), {}, true);
    const auto remembered =
        ranker.timed(2, history_size, part(history_size, history_size + new_size), candidates, fast);

    float apart = 0, largest = 0;
    std::printf("\n   item   recomputed   remembered\n");
    for (std::size_t i = 0; i < candidates.size(); ++i) {
        std::printf("  %5lld  %11.6f  %11.6f\n", static_cast<long long>(candidates[i]), recomputed[i], remembered[i]);
        const float difference = std::abs(recomputed[i] - remembered[i]);
        if (!(difference <= apart)) apart = difference;  // not std::max, which would pass over a NaN
        largest = std::max(largest, std::abs(recomputed[i]));
    }
    const bool agree = apart <= 1e-4f * largest;
    std::printf("\n%d rows in %.2f ms, %d rows in %.2f ms: the scores %s.\n", row_count, slow,
                new_size + candidate_count, fast, agree ? "agree" : "DISAGREE");
    return agree;
}

int main(int argc, char** argv) {
    try {
        const bool agree = demo(argc > 1 ? argv[1] : "target/demo/model.onnx");
        std::printf("%zu objects are left.\n", pagoda_live_objects());
        return agree && pagoda_live_objects() == 0 ? 0 : 1;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
