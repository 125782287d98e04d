// Proves bindings/cpp/pagoda_generator.hpp: generator_hpp FOLDER, with the language model of tests/data/generate. Says what
// does not hold and exits with 1.
#include <pagoda.hpp>

#include "check.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <thread>

using namespace pagoda;

static_assert(!std::is_copy_constructible_v<Generator> && std::is_nothrow_move_constructible_v<Generator>);
static_assert(!std::is_copy_constructible_v<TokenStream> && std::is_nothrow_move_constructible_v<TokenStream>);
static_assert(std::is_nothrow_move_assignable_v<TokenStream>);
static_assert(!std::is_copy_constructible_v<GenerateResponse> && std::is_move_constructible_v<GenerateResponse>);

using Tokens = std::vector<std::uint32_t>;

static Tokens of(Span<const std::uint32_t> tokens) { return {tokens.begin(), tokens.end()}; }

static GeneratorOptions options() {
    GeneratorOptions options;
    options.model = cpu();
    options.model.sleep_when_idle = true;
    options.max_batch = 4;
    options.kv_size = KvSize::pages(64);
    return options;
}

template <class Change>
static GeneratorOptions options(Change change) {
    GeneratorOptions changed = options();
    change(changed);
    return changed;
}

// A request for the most likely tokens, which no token ends.
static GenerateRequest likely(std::int32_t count = 12) {
    GenerateRequest request;
    request.tokens = {5, 6, 7, 8, 9, 10, 11, 12};
    request.do_sample = false;
    request.ignore_eos = true;
    request.max_new_tokens = count;
    return request;
}

template <class Change>
static GenerateRequest likely(Change change) {
    GenerateRequest request = likely();
    change(request);
    return request;
}

static GenerateRequest drawn(std::uint64_t seed) {
    return likely([&](GenerateRequest& r) {
        r.do_sample = true;
        r.temperature = 1.5f;
        r.top_k = 0;
        r.top_p = 1;
        r.seed = seed;
    });
}

static void ways_to_an_answer(const std::string& folder) {
    const Generator generator(folder, options());
    const Generator stepped(folder, options([](GeneratorOptions& o) { o.driver = PAGODA_DRIVER_CALLER; }));
    GenerateRequest request = likely();
    request.logprobs = 2;
    request.prompt_logprobs = 1;
    const GenerateResponse whole = generator.generate(request);
    const Choice& first = whole.choices.at(0);
    CHECK(whole.choices.size() == 1 && of(whole.prompt_tokens) == request.tokens && whole.computed_tokens > 0);
    CHECK(first.tokens.size() == 12 && first.finish_reason == PAGODA_FINISH_REASON_LENGTH && first.missing.empty());
    CHECK(generator.info().find(whole.version) != std::string::npos && whole.version.size() == 64);
    CHECK(first.queued.count() > 0 && first.queued < first.first_token && first.generation.count() > 0);
    CHECK(whole.prompt_logprobs.size() == 8 && whole.prompt_logprobs[0].rank == 0 && whole.prompt_logprobs[1].rank > 0);
    CHECK(first.logprobs.size() == 12);
    for (std::size_t i = 0; i < first.logprobs.size(); ++i) {
        const TokenLogprobs& found = first.logprobs[i];
        CHECK(found.rank == 1 && found.top.size() == 2 && found.top[0].token == first.tokens[i]);
        CHECK(found.top[0].logprob == found.logprob && found.logprob < 0 && found.top[1].logprob <= found.logprob);
    }
    // The response is read where it lies.
    CHECK(whole.get() != nullptr);
    pagoda_generate_choice there = PAGODA_GENERATE_CHOICE_INIT;
    CHECK(pagoda_generate_response_choice(whole.get(), 0, &there, nullptr) == PAGODA_STATUS_OK);
    CHECK(there.tokens == first.tokens.data() && there.text == first.text.data());

    // By callbacks.
    Tokens tokens;
    std::string text;
    const GenerateResponse called = generator.generate_async(request, [&](const Token& token) {
        CHECK(token.logprobs && token.logprobs->logprob == first.logprobs[tokens.size()].logprob);
        tokens.push_back(token.id);
        text += token.text;
        CHECK(token.choice == 0 && (token.finish_reason == PAGODA_FINISH_REASON_LENGTH) == (tokens.size() == 12));
    }).get();
    CHECK(tokens == of(first.tokens) && text == first.text && of(called.choices[0].tokens) == tokens);
    const GenerateResponse unheard = generator.generate_async(request).get();
    CHECK(of(unheard.choices[0].tokens) == tokens);
    // What a callback throws ends nothing.
    const auto thrower = [](const Token&) { throw std::runtime_error("no"); };
    CHECK(of(generator.generate_async(request, thrower).get().choices[0].tokens) == tokens);

    // By a loop.
    request.logprobs.reset();
    request.prompt_logprobs.reset();
    TokenStream stream = generator.stream(request);
    Tokens read;
    for (const Token& token : stream) {
        CHECK(!token.logprobs);
        read.push_back(token.id);
    }
    CHECK(read == tokens && stream.begin() == stream.end() && !stream.next());
    const GenerateResponse of_stream = stream.response();
    CHECK(of_stream.choices.size() == 1 && of(of_stream.choices[0].tokens) == tokens);
    stream = generator.stream(request);
    TokenStream::Iterator at = stream.begin();
    CHECK(at->id == tokens[0] && stream.next()->id == tokens[1] && (*++stream.begin()).id == tokens[3]);
    at++;
    CHECK(at->id == tokens[4]);

    // By steps.
    CHECK(of(stepped.generate(request).choices[0].tokens) == tokens);
    TokenStream steps = stepped.stream(request);
    int count = 1;
    while (stepped.step()) ++count;
    CHECK(count == 12 && of(steps.response().choices[0].tokens) == tokens && steps.next()->id == tokens[0]);
    CHECK(throws(PAGODA_STATUS_UNSUPPORTED, "options.driver", [&] { generator.step(); }));
}

static void seeds(const std::string& folder) {
    const Generator generator(folder, options());
    GenerateRequest request = drawn(7);
    request.n = 4;
    const GenerateResponse one = generator.generate(request), again = generator.generate(request);
    std::vector<Tokens> streamed(4);
    TokenStream stream = generator.stream(request);
    for (const Token& token : stream) streamed[token.choice].push_back(token.id);
    request.seed = 1007;
    const GenerateResponse other = generator.generate(request);
    for (std::size_t i = 0; i < 4; ++i) {
        const Tokens tokens = of(one.choices[i].tokens);
        CHECK(of(again.choices[i].tokens) == tokens && streamed[i] == tokens && of(other.choices[i].tokens) != tokens);
    }
}

static void fields(const std::string& folder) {
    const Generator generator(folder, options());
    const auto answer = [&](auto change) { return of(generator.generate(likely(change)).choices[0].tokens); };
    const auto text = [&](auto change) { return std::string(generator.generate(likely(change)).choices[0].text); };
    const Tokens plain = of(generator.generate(likely()).choices[0].tokens);
    using R = GenerateRequest;
    CHECK(answer([](R& r) { r.logit_bias = {{77, 1e6f}, {3, 1.0f}}; }) == Tokens(12, 77));
    Tokens forced = plain;
    forced.back() = 2;
    CHECK(answer([](R& r) { r.forced_eos = 2; }) == forced);
    CHECK(answer([](R& r) { r.logit_bias = {{2, 1e6f}}, r.ignore_eos = false; }) == Tokens{2});
    CHECK(answer([](R& r) {
              r.logit_bias = {{2, 1e6f}, {4, -1e30f}}, r.ignore_eos = false, r.min_new_tokens = 3;
          }).size() == 4);
    CHECK(answer([&](R& r) { r.stop_tokens = {plain[5]}; }).back() == plain[5]);
    Tokens once = answer([](R& r) { r.logit_bias = {{77, 1e3f}}, r.no_repeat_ngram_size = 1; });
    std::sort(once.begin(), once.end());
    CHECK(std::adjacent_find(once.begin(), once.end()) == once.end());
    CHECK(answer([](R& r) { r.do_sample.reset(), r.temperature = 0.0f; }) == plain);
    CHECK(answer([](R& r) { r.do_sample = true, r.top_k = 1; }) == plain);
    CHECK(answer([](R& r) { r.do_sample = true, r.top_k = 0, r.top_p = 0.0f; }) == plain);
    CHECK(answer([](R& r) { r.do_sample = true, r.top_k = 0, r.top_p = 1.0f, r.min_p = 1.0f; }) == plain);
    CHECK(answer([](R& r) { r.repetition_penalty = 30.0f; }) != plain);
    // Some tokens that are far ahead of the others, and close together.
    const auto some = [](R& r) { for (std::uint32_t i = 70; i < 100; ++i) r.logit_bias.emplace_back(i, 30.0f); };
    CHECK(answer([&](R& r) { some(r), r.presence_penalty = 2; }) != answer(some));
    CHECK(answer([&](R& r) { some(r), r.frequency_penalty = 2; }) != answer(some));
    const auto specials = [](R& r) { r.logit_bias = {{2, 1e6f}}, r.max_new_tokens = 2; };
    CHECK(text(specials).empty());
    CHECK(text([&](R& r) { specials(r), r.skip_special = false; }) == "</s></s>");
    CHECK(text([](R& r) { r.grammar = "{\"choice\": [\"yes\"]}"; }) == "yes");
    CHECK(text([](R& r) { r.grammar = "{\"choice\": [\"yes\"]}", r.stop = {"never", "e"}; }) == "y");
    CHECK(text([](R& r) { r.grammar = "{\"choice\": [\"yes\"]}", r.stop = {"e"}, r.include_stop = true; }) == "ye");
    const GenerateResponse cut = generator.generate(likely([](R& r) {
        r.grammar = "{\"choice\": [\"abcdefgh\"]}", r.max_new_tokens = 2;
    }));
    CHECK(cut.choices[0].missing.substr(0, 8) == "next is ");

    // Prompts of other kinds.
    const std::string words = "the quick brown \xe7\x8b\x90 fox";
    GenerateRequest by_text = likely();
    by_text.tokens.clear();
    by_text.prompt = words;
    const Tokens tokens = generator.tokenize(by_text);
    CHECK(generator.detokenize(tokens) == words && generator.detokenize(tokens, false) == "<s>" + words);
    CHECK(generator.detokenize({}).empty());
    by_text.echo = true;
    const GenerateResponse echoed = generator.generate(by_text);
    CHECK(of(echoed.prompt_tokens) == tokens && echoed.choices[0].text.substr(0, words.size()) == words);
    GenerateRequest chat;
    chat.messages = to_json({{"system", "be \"brief\"\\"}, {"user", words + "\n\t" + std::string(1, '\0')}});
    const std::string written = "<|im_start|>system\nbe \"brief\"\\<|im_end|>\n<|im_start|>user\n" + words + "\n\t\\0<|im_end|>\n";
    CHECK(generator.detokenize(generator.tokenize(chat), false) == written + "<|im_start|>assistant\n");
    chat.add_generation_prompt = false;
    chat.tools = "[]";
    chat.variables = "{}";
    CHECK(generator.detokenize(generator.tokenize(chat), false) == written);
    CHECK(to_json({}) == "[]");

    // The end of the context.
    const auto full = [](R& r) { r.tokens = Tokens(505, 5); };
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "request.max_new_tokens", [&] { answer(full); }));
    CHECK(answer([&](R& r) { full(r), r.context_end = PAGODA_CONTEXT_END_STOP; }).size() == 7);
}

// Waits until so many answers have ended early.
static bool ended_early(const Generator& generator, std::uint64_t count) {
    for (int i = 0; i < 3000 && generator.stats().ended_early < count; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return generator.stats().ended_early == count;
}

static void ends(const std::string& folder) {
    const Generator generator(folder, options());
    GenerateRequest request = likely(480);
    const auto cancelled = [](const GenerateResponse& response) {
        const Choice& choice = response.choices.at(0);
        return choice.finish_reason == PAGODA_FINISH_REASON_CANCELLED && choice.tokens.size() < 480;
    };
    // A stream that goes, and one that is left.
    { TokenStream gone = generator.stream(request); }
    CHECK(ended_early(generator, 1));
    TokenStream left = generator.stream(request);
    for (const Token& token : left) {
        CHECK(token.finish_reason == PAGODA_FINISH_REASON_NONE);
        break;
    }
    left.cancel();
    CHECK(cancelled(left.response()));
    // One that another is moved to.
    left = generator.stream(request);
    left = generator.stream(likely());
    CHECK(ended_early(generator, 3));
    // A cancel of the request, within a callback and from elsewhere.
    Cancel cancel;
    request.cancel = &cancel;
    int seen = 0;
    CHECK(cancelled(generator.generate_async(request, [&](const Token&) { if (++seen == 3) cancel.trigger(); }).get()));
    CHECK(seen >= 3 && cancelled(generator.generate(request)));
    Cancel other;
    request.cancel = &other;
    {
        TokenStream kept = generator.stream(request);
        kept.cancel();  // it is not this that the request has
        CHECK(kept.next() && ended_early(generator, 5));
        other.trigger();
        CHECK(cancelled(kept.response()));
    }
    Cancel gone;
    const Cancel there = std::move(gone);
    request.cancel = &gone;
    CHECK(throws(PAGODA_STATUS_INVALID_HANDLE, "request.cancel", [&] { generator.generate(request); }));
    CHECK(throws(PAGODA_STATUS_INVALID_HANDLE, "request.cancel", [&] { generator.stream(request); }));
    // A time limit.
    const Generator stepped(folder, options([](GeneratorOptions& o) { o.driver = PAGODA_DRIVER_CALLER; }));
    const GenerateResponse late = stepped.generate(likely([](GenerateRequest& r) { r.timeout = std::chrono::microseconds(1); }));
    CHECK(late.choices[0].finish_reason == PAGODA_FINISH_REASON_TIMEOUT);
    // The end of the generator.
    std::vector<TokenStream> streams;
    {
        const Generator closed(folder, options([](GeneratorOptions& o) { o.max_batch = 1; }));
        for (int i = 0; i < 3; ++i) streams.push_back(closed.stream(likely(480)));
    }
    CHECK(cancelled(streams.back().response()));
    // Priorities.
    const Generator one(folder, options([](GeneratorOptions& o) { o.driver = PAGODA_DRIVER_CALLER, o.max_batch = 1; }));
    TokenStream low = one.stream(likely(3)), high = one.stream(likely([](GenerateRequest& r) { r.priority = 1; }));
    while (one.step()) {}
    CHECK(high.response().choices[0].first_token < low.response().choices[0].first_token);
}

static void sessions(const std::string& folder) {
    std::string name = (std::filesystem::temp_directory_path() / "generator_hpp.XXXXXX").string();
    CHECK(mkdtemp(name.data()) != nullptr);
    const std::filesystem::path place(name);
    const auto stored = options([&](GeneratorOptions& o) { o.store_path = place.string(); });
    GenerateRequest request = likely(10);
    request.tokens = Tokens(70, 9);
    request.session = "a";
    { Generator(folder, stored).generate(request); }
    {
        const Generator generator(folder, stored);
        CHECK(generator.generate(request).cached_tokens >= 64);
        CHECK(generator.unload({"a", "never"}) == 1 && generator.prefetch({"a", "never"}) == 1);
        CHECK(generator.forget({"a", "never"}) == 1 && generator.forget({}) == 0);
        CHECK(generator.generate(request).cached_tokens == 0);
        CHECK(generator.clear(false) >= 1 && generator.kv_stats().resident_owners == 0);
        CHECK(generator.generate(request).cached_tokens > 0 && generator.clear(true) >= 1);
        CHECK(generator.generate(request).cached_tokens == 0);
        CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "sessions", [&] { generator.forget({std::string(1, '\0')}); }));
    }
    std::filesystem::remove_all(place);
    request.session.clear();
    for (const bool shared : {true, false}) {
        const Generator generator(folder, options([&](GeneratorOptions& o) { o.share_prefixes = shared; }));
        generator.generate(request);
        CHECK((generator.generate(request).cached_tokens > 0) == shared);
    }
}

static void policies(const std::string& folder) {
    GenerateRequest request = likely();
    request.tokens.clear();
    for (std::uint32_t i = 0; i < 300; ++i) request.tokens.push_back(5 + i * 7 % 250);
    KvPolicy h2o, recent;
    h2o.name = "h2o", h2o.cache_length = 64;
    recent.name = "lastrec", recent.protect = 3;
    const Generator generator(folder, options([&](GeneratorOptions& o) { o.kv_policy = h2o; }));
    const Tokens heavy = of(generator.generate(request).choices[0].tokens);
    request.kv_policy = recent;
    const Tokens chosen = of(generator.generate(request).choices[0].tokens);
    CHECK(heavy != chosen);
    request.kv_policy.reset();
    recent.cache_lengths = {64, 64};
    const Generator opened(folder, options([&](GeneratorOptions& o) { o.kv_policy = recent; }));
    CHECK(of(opened.generate(request).choices[0].tokens) == chosen);
    request.kv_policy = h2o;
    request.kv_policy->cache_length = 32;
    CHECK(throws(PAGODA_STATUS_UNSUPPORTED, "request.kv_policy.cache_length", [&] { generator.generate(request); }));
    h2o.name = "best";
    const auto open = [&] { Generator(folder, options([&](GeneratorOptions& o) { o.kv_policy = h2o; })); };
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "options.kv_policy.name", open));
    h2o.protect = -1;
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "options.kv_policy.protect", open));
    request.kv_policy.reset();
    const Generator quantised(folder, options([](GeneratorOptions& o) { o.kv_format = PAGODA_KV_FORMAT_INT8; }));
    CHECK(quantised.generate(request).choices[0].tokens.size() == 12);
}

static void speculation(const std::string& folder) {
    const auto repeated = [](std::optional<std::int32_t> max_draft = {}) {
        GenerateRequest request = likely(60);
        for (int i = 0; i < 5; ++i) request.tokens.insert(request.tokens.end(), {5, 6, 7, 8, 9, 10, 11, 12});
        request.max_draft = max_draft;
        return request;
    };
    const Generator plain(folder, options());
    const Tokens tokens = of(plain.generate(repeated()).choices[0].tokens);
    CHECK(plain.stats().drafts == 0);
    CHECK(of(plain.generate(repeated(8)).choices[0].tokens) == tokens && plain.stats().drafts > 0);
    for (const std::string& model : {std::string(), folder}) {
        const Generator drafting(folder, options([&](GeneratorOptions& o) {
            o.max_draft = 4;
            o.draft_model = model;
            o.draft_kv_bytes = 1 << 20;
        }));
        CHECK(of(drafting.generate(repeated(0)).choices[0].tokens) == tokens && drafting.stats().drafts == 0);
        CHECK(of(drafting.generate(repeated()).choices[0].tokens) == tokens);
        const GeneratorStats stats = drafting.stats();
        CHECK(stats.drafts > 0 && stats.drafts <= stats.drafted_tokens && stats.accepted_tokens <= stats.drafted_tokens);
        drafting.set_speculation(false);
        drafting.generate(repeated());
        CHECK(drafting.stats().drafts == stats.drafts);
        drafting.set_speculation(true);
        drafting.generate(repeated());
        CHECK(drafting.stats().drafts > stats.drafts);
        drafting.set_speculation(false, true);
        CHECK(of(drafting.generate(repeated()).choices[0].tokens) == tokens);
        CHECK(drafting.stats().drafts == 0 && drafting.stats().drafted_tokens == 0 && drafting.stats().accepted_tokens == 0);
    }
}

static void beams(const std::string& folder) {
    const Generator generator(folder, options());
    const GenerateResponse plain = generator.generate(likely());
    CHECK(!plain.choices[0].score);
    const auto search = [&](std::int32_t n, BeamOptions beams) {
        return generator.generate(likely([&](GenerateRequest& r) {
            r.n = n;
            r.logprobs = 0;
            r.beams = beams;
        }));
    };
    const GenerateResponse one = search(1, {1, 1, PAGODA_EARLY_STOP_WHEN_FULL});
    CHECK(of(one.choices[0].tokens) == of(plain.choices[0].tokens) && one.choices[0].score);
    for (const float penalty : {1.0f, -2.0f}) {
        const GenerateResponse found = search(4, {4, penalty, PAGODA_EARLY_STOP_NEVER});
        CHECK(found.choices.size() == 4);
        for (std::size_t i = 0; i < found.choices.size(); ++i) {
            const Choice& choice = found.choices[i];
            double sum = 0;
            for (const TokenLogprobs& token : choice.logprobs) sum += token.logprob;
            const double score = sum / std::pow(double(choice.tokens.size()), double(penalty));
            CHECK(choice.score && std::abs(*choice.score - score) < 1e-3 * std::abs(score));
            CHECK(i == 0 || *choice.score <= *found.choices[i - 1].score);
        }
    }
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "request.beams.width", [&] { search(1, {17, 1, 0}); }));
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "request.beams.early_stop", [&] { search(1, {4, 1, 3}); }));
}

static void misuse(const std::string& folder) {
    const Generator generator(folder, options([](GeneratorOptions& o) { o.max_prompt_tokens = 100, o.max_new_tokens = 20; }));
    using R = GenerateRequest;
    const auto refused = [&](const char* argument, auto change, pagoda_status status = PAGODA_STATUS_INVALID_ARGUMENT) {
        const GenerateRequest bad = likely(change);
        return throws(status, argument, [&] { generator.generate(bad); }) &&
               throws(status, argument, [&] { generator.generate_async(bad); }) &&
               throws(status, argument, [&] { generator.stream(bad); });
    };
    const std::string nul(1, '\0');
    CHECK(refused("request.prompt", [](R& r) { r.tokens.clear(); }));
    CHECK(refused("request.tokens", [](R& r) { r.prompt = "a"; }));
    CHECK(refused("request.tokens[1]", [](R& r) { r.tokens = {5, 300}; }));
    CHECK(refused("request.prompt", [&](R& r) { r.prompt = nul; }));
    CHECK(refused("request.messages", [](R& r) { r.tokens.clear(), r.messages = "[{"; }));
    CHECK(refused("request.tools", [](R& r) { r.tools = "[]"; }));
    CHECK(refused("request.max_new_tokens", [](R& r) { r.max_new_tokens = 21; }));
    CHECK(refused("request.max_new_tokens", [](R& r) { r.max_new_tokens = -1; }));
    CHECK(refused("request.temperature", [](R& r) { r.temperature = -1.0f; }));
    CHECK(refused("request.top_p", [](R& r) { r.top_p = 1.5f; }));
    CHECK(refused("request.logit_bias[0]", [](R& r) { r.logit_bias = {{272, 1.0f}}; }));
    CHECK(refused("request.stop", [&](R& r) { r.stop = {nul}; }));
    CHECK(refused("request.stop", [](R& r) { r.stop = {""}; }));
    CHECK(refused("request.n", [](R& r) { r.n = 0; }));
    CHECK(refused("request.timeout_us", [](R& r) { r.timeout = std::chrono::microseconds(-1); }));
    CHECK(refused("request.kv_policy", [](R& r) { r.kv_policy = KvPolicy{}, r.kv_policy->name = "lastrec"; },
                  PAGODA_STATUS_UNSUPPORTED));
    CHECK(refused("request.grammar.verse", [](R& r) { r.grammar = "{\"verse\": 1}"; }));
    CHECK(generator.generate(likely()).choices[0].tokens.size() == 12);
    Generator moved(folder, options());
    const Generator elsewhere = std::move(moved);
    CHECK(throws(PAGODA_STATUS_INVALID_HANDLE, "generator", [&] { moved.generate(likely()); }));
    CHECK(throws(PAGODA_STATUS_INVALID_HANDLE, "generator", [&] { moved.stream(likely()); }));
    CHECK(throws(PAGODA_STATUS_NOT_FOUND, "folder", [] { Generator("/nowhere/model"); }));
    const auto opening = [&](const char* argument, auto change) {
        return throws(PAGODA_STATUS_INVALID_ARGUMENT, argument, [&] { Generator(folder, options(change)); });
    };
    using O = GeneratorOptions;
    CHECK(opening("options.driver", [](O& o) { o.driver = 9; }));
    CHECK(opening("options.max_batch", [](O& o) { o.max_batch = 0; }));
    CHECK(opening("options.max_batch_tokens", [](O& o) { o.max_batch_tokens = 0; }));
    CHECK(opening("options.max_stretch", [](O& o) { o.max_stretch = 1.01f; }));
    CHECK(opening("options.queue", [](O& o) { o.queue = -1; }));
    CHECK(opening("options.kv_format", [](O& o) { o.kv_format = 9; }));
    CHECK(opening("options.store_path", [&](O& o) { o.store_path = nul; }));
}

static void what_is_known(const std::string& folder) {
    const Generator generator(folder, options([](GeneratorOptions& o) { o.driver = PAGODA_DRIVER_CALLER; }));
    const GenerateResponse response = generator.generate(likely());
    const GeneratorStats stats = generator.stats();
    CHECK(stats.answered == 1 && stats.generated_tokens == 12 && stats.computed_tokens == response.computed_tokens);
    CHECK(generator.kv_stats().pages == 64);
    const EngineProvider provider = generator.provider();
    CHECK(provider.provider == PAGODA_PROVIDER_CPU && provider.device_id == -1 && provider.reason.empty());
    CHECK(generator.info().find("\"kind\": \"generate\"") != std::string::npos);
}

int main(int argc, char** argv) {
    if (argc != 2) {
        std::fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
        return 2;
    }
    try {
        ways_to_an_answer(argv[1]);
        seeds(argv[1]);
        fields(argv[1]);
        ends(argv[1]);
        sessions(argv[1]);
        policies(argv[1]);
        speculation(argv[1]);
        beams(argv[1]);
        misuse(argv[1]);
        what_is_known(argv[1]);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "it threw: %s\n", error.what());
        ++failures;
    }
    CHECK(live_objects() == 0);
    std::printf(failures == 0 ? "pagoda_generator.hpp: all well\n" : "pagoda_generator.hpp: %d failures\n", failures);
    return failures == 0 ? 0 : 1;
}
