// Ranks movies for a returning user: rank FOLDER, which has a model and visits.txt (samples/movielens/prepare.py).
// Each visit sends only what is new; what the model made of everything before that is in the engine's cache.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <fstream>
#include <numeric>
#include <pagoda.hpp>
#include <stdexcept>
#include <string>
#include <vector>

// The number after a word of visits.txt: "visit 3".
template <class Number>
bool read(std::ifstream& file, std::string& word, Number& number) { return bool(file >> word >> number); }

void rank(const std::string& folder) {
    std::ifstream file(folder + "/visits.txt");
    std::uint64_t user = 0;
    std::vector<pagoda::Events> visits;
    std::vector<std::int64_t> movies;
    std::vector<std::string> titles;
    std::string word;
    std::size_t count = 0;
    bool good = read(file, word, user) && read(file, word, count);
    for (; good && word == "visit"; good = read(file, word, count)) {
        std::vector<std::int64_t> rated(count), ratings(count);
        for (std::size_t i = 0; i < count; ++i) file >> rated[i] >> ratings[i];
        visits.push_back({{{"movie", rated}, {"rating", ratings}}, {}});
    }
    movies.resize(count), titles.resize(count);
    for (std::size_t i = 0; i < count; ++i) std::getline(file >> movies[i] >> std::ws, titles[i]);
    if (!file) throw std::runtime_error(folder + "/visits.txt is missing or cut: movielens/prepare.py makes it");

    const pagoda::Engine engine(folder + "/model");
    pagoda::RankRequest request;
    request.user = user;
    request.start = 0;
    request.candidates = {{"movie", movies}};
    pagoda::RankResponse response;
    std::printf("User %llu\n", static_cast<unsigned long long>(user));
    for (std::size_t i = 0; i < visits.size(); ++i) {
        request.events = visits[i];
        response = engine.rank(request);
        const std::size_t events = visits[i].keys[0].second.size();
        *request.start += std::int64_t(events);
        std::printf("  visit %zu: %zu new events, %zu rows remembered, %zu computed\n", i + 1, events,
                    std::size_t(response.cached_rows), std::size_t(response.computed_rows));
    }
    // A candidate has a score for each task; this is the first task's.
    std::vector<std::size_t> order(movies.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        return response.candidate(a)[0] > response.candidate(b)[0];
    });
    std::printf("Top ten of %zu movies:\n", order.size());
    for (std::size_t i = 0; i < std::min<std::size_t>(10, order.size()); ++i)
        std::printf("  %2zu. %.6f  %s\n", i + 1, double(response.candidate(order[i])[0]), titles[order[i]].c_str());
}

int main(int argc, char** argv) {
    if (argc != 2) {
        std::fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
        return 2;
    }
    try {
        rank(argv[1]);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "rank: %s\n", error.what());
        return 1;
    }
}
