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

constexpr int history_size = 500, new_size = 3, candidate_count = 10, page_size = 32;
constexpr int row_count = history_size + new_size + candidate_count;
constexpr int page_count = (history_size + new_size + page_size - 1) / page_size;

// What the model remembers of one user: the keys and values of each layer, and of how many items they are.
struct Memory {
    Tensor pool_0 = Tensor::zeros<float>({page_count, 2, page_size, 2, 32});
    Tensor pool_1 = Tensor::zeros<float>({page_count, 2, page_size, 2, 32});
    std::int32_t length = 0;
};

// Adds `history` to the memory and returns the scores of the `candidates`, the best guesses for what comes next.
std::vector<float> rank(const pagoda::Model& model, Memory& user, const Items& history, const Items& candidates) {
    Items items = history;
    items.insert(items.end(), candidates.begin(), candidates.end());
    std::vector<std::int32_t> pages(page_count);
    for (int i = 0; i < page_count; ++i) pages[i] = page_count - 1 - i;  // they may lie in any order
    const auto rows = static_cast<std::int32_t>(items.size());

    const auto item_ids = Tensor::borrow<std::int64_t>({rows}, items);
    const auto row_offsets = Tensor::from<std::int32_t>({0, rows});
    const auto num_candidates = Tensor::from<std::int32_t>({static_cast<std::int32_t>(candidates.size())});
    const auto cached_len = Tensor::from<std::int32_t>({user.length});
    const auto page_indptr = Tensor::from<std::int32_t>({0, page_count});
    const auto page_ids = Tensor::borrow<std::int32_t>({page_count}, pages);
    // The pools are inputs and outputs at once: the model adds the new items where the old ones lie.
    const auto outputs = model.run(
        {{"item_ids", item_ids}, {"row_offsets", row_offsets}, {"num_candidates", num_candidates},
         {"cached_len", cached_len}, {"page_indptr", page_indptr}, {"page_ids", page_ids},
         {"kv_pool_0", user.pool_0}, {"kv_pool_1", user.pool_1}},
        {"scores"}, {{"kv_pool_0_out", user.pool_0}, {"kv_pool_1_out", user.pool_1}});
    user.length += static_cast<std::int32_t>(history.size());
    const auto scores = outputs[0].data<float>();
    return {scores.end() - candidates.size(), scores.end()};
}

// Ranks a few times from the same memory, for a second at most; returns the scores and puts the median time into `ms`.
std::vector<float> timed(const pagoda::Model& model, Memory& user, const Items& history, const Items& candidates,
                         double& ms) {
    std::vector<double> times;
    std::vector<float> scores;
    const auto before = user.length;
    for (double sum = 0; times.size() < 9 && sum < 1000; sum += times.back()) {
        user.length = before;
        const auto start = std::chrono::steady_clock::now();
        scores = rank(model, user, history, candidates);
        times.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
    }
    std::sort(times.begin(), times.end());
    ms = times[times.size() / 2];
    return scores;
}

bool demo(const char* path) {
    const pagoda::Model model(path);
    std::printf("%s: %zu inputs, %zu outputs, on the %s\n", path, model.inputs().size(), model.outputs().size(),
                model.provider() == PAGODA_PROVIDER_CUDA ? "GPU" : "CPU");

    Items items;
    for (std::int64_t i = 0; i < row_count; ++i) items.push_back((i * 7919 + 17) % 1000);
    const auto part = [&](int from, int to) { return Items(items.begin() + from, items.begin() + to); };
    const Items candidates = part(history_size + new_size, row_count);

    double slow = 0, fast = 0;
    Memory nothing;
    const auto recomputed = timed(model, nothing, part(0, history_size + new_size), candidates, slow);

    Memory user;  // the history comes in two parts, as on two earlier visits
    rank(model, user, part(0, 300), {});
    rank(model, user, part(300, history_size), {});
    const auto remembered = timed(model, user, part(history_size, history_size + new_size), candidates, fast);

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
