// Generators of language models, for C++17. Part of pagoda.hpp, which includes it.
//
//     const pagoda::Generator generator("model");
//     pagoda::GenerateRequest request;
//     request.messages = pagoda::to_json({{"user", "Hello"}});
//     request.temperature = 0.7f;
//     pagoda::TokenStream stream = generator.stream(request);
//     for (const pagoda::Token& token : stream) std::cout << token.text;
//     const pagoda::GenerateResponse response = stream.response();

#ifndef PAGODA_GENERATOR_HPP
#define PAGODA_GENERATOR_HPP

#include "pagoda.hpp"
#include "pagoda_engine.hpp"
#include "pagoda_kv.hpp"

#include <condition_variable>
#include <deque>
#include <iterator>
#include <optional>

namespace pagoda {

/// A message of a chat.
struct Message {
    std::string role;     ///< Who speaks: "system", "user", "assistant", or what else the model's chat template knows.
    std::string content;  ///< The text, UTF-8.
};

/// Messages as the JSON that GenerateRequest::messages takes.
inline std::string to_json(const std::vector<Message>& messages) {
    std::string json = "[";
    const auto add = [&](const std::string& text) {
        json += '"';
        for (const char c : text) {
            if (c == '"' || c == '\\') json += '\\';
            if (static_cast<unsigned char>(c) >= 0x20) {
                json += c;
            } else {
                const char* const digits = "0123456789abcdef";
                json += "\\u00";
                json += digits[c >> 4];
                json += digits[c & 15];
            }
        }
        json += '"';
    };
    for (const Message& message : messages) {
        json += json.size() > 1 ? ",{\"role\":" : "{\"role\":";
        add(message.role);
        json += ",\"content\":";
        add(message.content);
        json += '}';
    }
    return json + ']';
}

/// A fixed number of slots for the keys and values of each sequence, however long it is; see pagoda_kv_policy.
struct KvPolicy {
    std::string name;                         ///< Which tokens stay: "dense", "lastrec", "h2o" and others.
    std::int32_t cache_length = 0;            ///< The slots of a sequence in each layer.
    std::vector<std::int32_t> cache_lengths;  ///< The slots of each layer, instead of cache_length; empty: that.
    std::int32_t chunk_size = 64;             ///< Tokens of a prompt that a step reads once the slots are full.
    std::optional<std::int32_t> protect;      ///< Tokens at the beginning that always stay; none: as the policy has it.
    std::int32_t grace_period = 0;            ///< With h2o: so many of the newest tokens stay.
    float keep_initial_fraction = 0.05f;      ///< With h2o: the part that the first eviction leaves alone.
    bool normalise = false;                   ///< With h2o: whether weights count by the time that a token was there.
    float score_share = 0.5f;                 ///< With qh2o: how much weights count against errors of quantisation.
    bool protect_first_message = false;       ///< Whether the tokens of a chat's first message always stay.
};

/// How to open a generator; see pagoda_generator_options.
struct GeneratorOptions {
    pagoda_driver driver = PAGODA_DRIVER_THREAD;            ///< What runs the steps.
    bool share_prefixes = true;                             ///< Whether sequences share the pages of equal prefixes.
    std::int32_t max_batch = 64;                            ///< The maximum number of sequences that run.
    std::int32_t max_batch_tokens = 512;                    ///< The maximum number of rows of a step.
    float max_stretch = 1.5f;                               ///< How much prompts may stretch a step; 0: no limit.
    std::int32_t max_prompt_tokens = 0;                     ///< Of a prompt; 0: what the model's context has.
    std::int32_t max_new_tokens = 0;                        ///< Of an answer; 0: what the model's context has.
    std::int32_t queue = 4096;                              ///< The maximum number of answers that wait.
    KvSize kv_size;                                         ///< The size of the pool; the default is 1 GiB.
    pagoda_kv_format kv_format = PAGODA_KV_FORMAT_DEFAULT;  ///< How pages hold keys and values.
    std::uint64_t host_bytes = 0;                           ///< Host memory for what was evicted; 0: none.
    ModelOptions model;                                     ///< Where the model runs, and on how many threads.
    std::string store_path;                                 ///< The folder of a store; "": none.
    StoreOptions store_options;                             ///< How the store is opened.
    std::optional<KvPolicy> kv_policy;                      ///< A fixed number of slots; none: all tokens stay.
    std::int32_t max_draft = 0;                             ///< Of requests that do not say; 0: nothing is guessed.
    std::string draft_model;                                ///< The folder of a model that guesses; "": by lookup.
    std::uint64_t draft_kv_bytes = 256 << 20;               ///< That model's pool of keys and values.
};

/// A beam search; see pagoda_beam_options.
struct BeamOptions {
    std::int32_t width = 4;    ///< The number of beams, 1 to 16.
    float length_penalty = 1;  ///< A score is the sum of log probabilities over the number of tokens to this power.
    pagoda_early_stop early_stop = PAGODA_EARLY_STOP_WHEN_UNLIKELY;  ///< When the search ends.
};

/// A request for text; see pagoda_generate_request. It has one of `prompt`, `tokens` and `messages`. What is not given is
/// as the model's pagoda.json says.
struct GenerateRequest {
    std::string prompt;                          ///< What the text follows, as a text; "": another one.
    std::vector<std::uint32_t> tokens;           ///< What the text follows, as tokens; empty: another one.
    std::string messages;                        ///< What the text follows, a chat as JSON: see to_json; "": another one.
    std::string tools;                           ///< With messages: the tools that the model may call, JSON; "": none.
    std::string variables;                       ///< With messages: more variables of the template, JSON; "": none.
    bool add_generation_prompt = true;           ///< With messages: whether an answer of the model follows.
    std::optional<std::int32_t> max_new_tokens;  ///< The maximum number of tokens of an answer.
    std::optional<std::int32_t> min_new_tokens;  ///< Tokens before which no end-of-sequence token is taken.
    std::optional<bool> do_sample;               ///< Whether tokens are drawn; else the most likely one is taken.
    std::optional<float> temperature;            ///< What logits are divided by; 0: the most likely token is taken.
    std::optional<std::int32_t> top_k;           ///< How many of the most likely tokens are drawn from; 0: all.
    std::optional<float> top_p;                  ///< The probability that the tokens drawn from have together.
    std::optional<float> min_p;                  ///< The least probability, relative to the most likely token.
    std::optional<float> repetition_penalty;     ///< The penalty of tokens in the prompt and in the answer; 1: none.
    float presence_penalty = 0;                  ///< Subtracted from the logits of tokens that the answer has.
    float frequency_penalty = 0;                 ///< The same, as often as the answer has them.
    std::optional<std::int32_t> no_repeat_ngram_size;          ///< No sequence of so many tokens occurs twice; 0: any.
    std::vector<std::pair<std::uint32_t, float>> logit_bias;   ///< What is added to the logits of tokens.
    std::optional<std::uint64_t> seed;                         ///< The seed of the draws; none: another one each time.
    std::optional<std::int32_t> forced_eos;                    ///< The token that the last one is forced to be.
    bool ignore_eos = false;                                   ///< Whether end-of-sequence tokens end nothing.
    std::vector<std::string> stop;                             ///< Texts that end the answer.
    std::vector<std::uint32_t> stop_tokens;                    ///< Tokens that end the answer.
    bool include_stop = false;                                 ///< Whether the text has the stop text that ended it.
    bool skip_special = true;                                  ///< Whether the text leaves special tokens out.
    std::optional<std::int32_t> logprobs;         ///< Log probabilities, and those of so many most likely tokens.
    std::optional<std::int32_t> prompt_logprobs;  ///< The same of the prompt's tokens.
    std::int32_t n = 1;                           ///< The number of answers.
    bool echo = false;                            ///< Whether the text of an answer begins with the prompt.
    std::int32_t priority = 0;                    ///< Requests of higher priority run first.
    pagoda_context_end context_end = PAGODA_CONTEXT_END_REFUSE;  ///< What happens if the context is too short.
    std::chrono::microseconds timeout{0};                        ///< The time limit; 0: none.
    std::string session;                                         ///< The conversation that it belongs to; "": none.
    const Cancel* cancel = nullptr;                              ///< Ends the request when triggered.
    std::optional<KvPolicy> kv_policy;                           ///< Which tokens stay; none: as the generator has it.
    std::string grammar;                                         ///< What the answer has to look like, JSON; "": any text.
    std::optional<std::int32_t> max_draft;  ///< Tokens that are guessed for one step; none: as the generator has it.
    std::optional<BeamOptions> beams;       ///< A beam search, whose `n` best answers there are; none: no search.
};

/// One of the most likely tokens in a place.
struct TopLogprob {
    std::uint32_t token = 0;  ///< The token.
    float logprob = 0;        ///< The natural logarithm of its probability.
};

/// What the model thought of a token, before anything that the request asked for.
struct TokenLogprobs {
    float logprob = 0;            ///< The natural logarithm of the token's probability.
    std::uint32_t rank = 0;       ///< Its place among all tokens, 1 for the most likely; 0: it has no probability.
    std::vector<TopLogprob> top;  ///< The most likely tokens, the most likely first.
};

/// A token of an answer, as it is generated.
struct Token {
    std::uint32_t choice = 0;                                       ///< Which answer it belongs to.
    std::uint32_t id = 0;                                           ///< The token.
    pagoda_finish_reason finish_reason = PAGODA_FINISH_REASON_NONE;  ///< Why the answer ends with it, if it does.
    std::string text;                                               ///< The text that is new; may be empty.
    std::optional<TokenLogprobs> logprobs;                          ///< The log probabilities, if they were asked for.
};

/// One answer. Its text and its tokens belong to the GenerateResponse, and live as long as that.
struct Choice {
    pagoda_finish_reason finish_reason = PAGODA_FINISH_REASON_NONE;  ///< Why it ended.
    std::string_view text;                                          ///< Its text.
    Span<const std::uint32_t> tokens;                               ///< Its tokens.
    std::vector<TokenLogprobs> logprobs;                            ///< Of its tokens, if they were asked for.
    std::string_view missing;  ///< What the grammar expects next, if the answer ended before it was valid.
    std::chrono::nanoseconds queued{};       ///< The time from the request to its first step.
    std::chrono::nanoseconds first_token{};  ///< The time from the request to the first token.
    std::chrono::nanoseconds generation{};   ///< The time from the first token to the last.
    std::optional<float> score;              ///< Of an answer of a beam search.
};

/// The answers to a request. Texts and tokens are in memory of the response: nothing is copied.
struct GenerateResponse {
    std::vector<Choice> choices;                 ///< The answers.
    Span<const std::uint32_t> prompt_tokens;     ///< The tokens of the prompt.
    std::vector<TokenLogprobs> prompt_logprobs;  ///< Of the prompt, if asked for; the first token has rank 0.
    std::uint32_t cached_tokens = 0;             ///< Prompt tokens whose keys and values were cached.
    std::uint64_t computed_tokens = 0;           ///< Rows that were computed for all answers.
    std::string_view version;                    ///< The version of the model.

    /// None.
    GenerateResponse() = default;
    /// Takes a handle of pagoda.h, and reads what it has.
    explicit GenerateResponse(pagoda_generate_response* handle);
    /// The handle, for functions of pagoda.h. This object keeps it.
    const pagoda_generate_response* get() const noexcept { return handle_.get(); }

private:
    detail::Handle<pagoda_generate_response, pagoda_generate_response_free> handle_;
};

/// The state and the counters of a generator.
using GeneratorStats = pagoda_generator_stats;

namespace detail {

/// A text in C's form; NULL of "". C reads up to a NUL, so there must be none inside.
inline const char* to_c(const std::string& text, const char* argument) {
    const std::size_t at = text.find('\0');
    if (at != std::string::npos) {
        const std::string name = argument;
        const std::string place = std::to_string(at);
        throw Error(PAGODA_STATUS_INVALID_ARGUMENT, name + ": a NUL at byte " + place + "; texts must have none", name);
    }
    return text.empty() ? nullptr : text.c_str();
}

/// Sets a number if it is given. Less than 0 would be the default to C.
template <class T>
void set(T& to, const std::optional<T>& value, const char* argument) {
    if (!value) return;
    if (*value < 0) {
        const std::string name = argument, is = std::to_string(*value);
        throw Error(PAGODA_STATUS_INVALID_ARGUMENT, name + ": " + is + " is negative: give 0 or more, or none", name);
    }
    to = *value;
}

inline std::vector<const char*> to_c(const std::vector<std::string>& texts, const char* argument) {
    std::vector<const char*> c_texts;
    // An empty one is a text, too.
    for (const std::string& text : texts) c_texts.push_back(to_c(text, argument) ? text.c_str() : "");
    return c_texts;
}

/// A policy in C's form; what it points to is that of `policy`.
inline pagoda_kv_policy to_c(const KvPolicy& policy, const std::string& argument) {
    pagoda_kv_policy c_policy = PAGODA_KV_POLICY_INIT;
    c_policy.name = to_c(policy.name, (argument + ".name").c_str());
    c_policy.cache_length = policy.cache_length;
    if (!policy.cache_lengths.empty()) {
        c_policy.cache_lengths = policy.cache_lengths.data();
        c_policy.cache_length_count = static_cast<std::int32_t>(policy.cache_lengths.size());
    }
    c_policy.chunk_size = policy.chunk_size;
    set(c_policy.protect, policy.protect, (argument + ".protect").c_str());
    c_policy.grace_period = policy.grace_period;
    c_policy.keep_initial_fraction = policy.keep_initial_fraction;
    c_policy.normalise = policy.normalise ? 1 : 0;
    c_policy.score_share = policy.score_share;
    c_policy.protect_first_message = policy.protect_first_message ? 1 : 0;
    return c_policy;
}

/// A request in C's form; what it points to lives as long as the two. A new field is one of GenerateRequest and a line here.
class CGenerateRequest {
public:
    explicit CGenerateRequest(const GenerateRequest& from) {
        to_.prompt = to_c(from.prompt, "request.prompt");
        if (!from.tokens.empty()) to_.tokens = from.tokens.data(), to_.token_count = from.tokens.size();
        to_.messages = to_c(from.messages, "request.messages");
        to_.tools = to_c(from.tools, "request.tools");
        to_.variables = to_c(from.variables, "request.variables");
        to_.add_generation_prompt = from.add_generation_prompt ? 1 : 0;
        set(to_.max_new_tokens, from.max_new_tokens, "request.max_new_tokens");
        set(to_.min_new_tokens, from.min_new_tokens, "request.min_new_tokens");
        if (from.do_sample) to_.do_sample = *from.do_sample ? 1 : 0;
        set(to_.temperature, from.temperature, "request.temperature");
        set(to_.top_k, from.top_k, "request.top_k");
        set(to_.top_p, from.top_p, "request.top_p");
        set(to_.min_p, from.min_p, "request.min_p");
        set(to_.repetition_penalty, from.repetition_penalty, "request.repetition_penalty");
        to_.presence_penalty = from.presence_penalty;
        to_.frequency_penalty = from.frequency_penalty;
        set(to_.no_repeat_ngram_size, from.no_repeat_ngram_size, "request.no_repeat_ngram_size");
        for (const auto& [token, bias] : from.logit_bias) {
            pagoda_logit_bias one = PAGODA_LOGIT_BIAS_INIT;
            one.token = token;
            one.bias = bias;
            logit_bias_.push_back(one);
        }
        to_.logit_bias = logit_bias_.data();
        to_.logit_bias_count = logit_bias_.size();
        to_.has_seed = from.seed ? 1 : 0;
        to_.seed = from.seed.value_or(0);
        set(to_.forced_eos, from.forced_eos, "request.forced_eos");
        to_.ignore_eos = from.ignore_eos ? 1 : 0;
        stop_ = to_c(from.stop, "request.stop");
        to_.stop = stop_.data();
        to_.stop_count = stop_.size();
        to_.stop_tokens = from.stop_tokens.data();
        to_.stop_token_count = from.stop_tokens.size();
        to_.include_stop = from.include_stop ? 1 : 0;
        to_.skip_special = from.skip_special ? 1 : 0;
        set(to_.logprobs, from.logprobs, "request.logprobs");
        set(to_.prompt_logprobs, from.prompt_logprobs, "request.prompt_logprobs");
        to_.n = from.n;
        to_.echo = from.echo ? 1 : 0;
        to_.priority = from.priority;
        to_.context_end = from.context_end;
        to_.timeout_us = to_c(from.timeout, "request.timeout_us");
        to_.session = to_c(from.session, "request.session");
        to_.cancel = handle_of(from.cancel, "request.cancel");
        if (from.kv_policy) {
            kv_policy_ = to_c(*from.kv_policy, "request.kv_policy");
            to_.kv_policy = &kv_policy_;
        }
        to_.grammar = to_c(from.grammar, "request.grammar");
        set(to_.max_draft, from.max_draft, "request.max_draft");
        if (from.beams) {
            beams_.width = from.beams->width;
            beams_.length_penalty = from.beams->length_penalty;
            beams_.early_stop = from.beams->early_stop;
            to_.beams = &beams_;
        }
    }
    CGenerateRequest(const CGenerateRequest&) = delete;
    CGenerateRequest& operator=(const CGenerateRequest&) = delete;

    const pagoda_generate_request* get() const noexcept { return &to_; }
    void use(const Cancel& cancel) noexcept { to_.cancel = cancel.get(); }

private:
    pagoda_generate_request to_ = PAGODA_GENERATE_REQUEST_INIT;
    pagoda_kv_policy kv_policy_ = PAGODA_KV_POLICY_INIT;
    pagoda_beam_options beams_ = PAGODA_BEAM_OPTIONS_INIT;
    std::vector<pagoda_logit_bias> logit_bias_;
    std::vector<const char*> stop_;
};

inline TokenLogprobs from_c(const pagoda_token_logprobs& from) {
    TokenLogprobs to;
    to.logprob = from.logprob;
    to.rank = from.rank;
    to.top.reserve(from.top_count);
    for (std::size_t i = 0; i < from.top_count; ++i) to.top.push_back({from.top_tokens[i], from.top_logprobs[i]});
    return to;
}

inline Token from_c(const pagoda_generate_token& from) {
    Token to;
    to.choice = from.choice;
    to.id = from.id;
    to.finish_reason = from.finish_reason;
    to.text.assign(from.text, from.text_length);
    if (from.logprobs) to.logprobs = from_c(known_of(from.logprobs));
    return to;
}

/// The log probabilities of so many tokens.
template <class Function, class... Arguments>
std::vector<TokenLogprobs> logprobs(std::size_t count, Function function, Arguments... arguments) {
    std::vector<TokenLogprobs> all;
    all.reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
        pagoda_token_logprobs one = PAGODA_TOKEN_LOGPROBS_INIT;
        call(function, arguments..., i, &one);
        all.push_back(from_c(one));
    }
    return all;
}

/// What a request is answered to: tokens to a function, the response to a future.
struct Answering {
    std::promise<GenerateResponse> promise;
    std::function<void(const Token&)> on_token;

    static void token(void* self, const pagoda_generate_token* token) noexcept {
        const auto& on_token = static_cast<Answering*>(self)->on_token;
        guarded([&] { on_token(from_c(known_of(token))); });
    }

    static void end(void* to, pagoda_status status, pagoda_generate_response* response,
                    const pagoda_error* error) noexcept {
        const std::unique_ptr<Answering> self(static_cast<Answering*>(to));
        try {
            if (status != PAGODA_STATUS_OK) throw to_error(status, error);
            self->promise.set_value(GenerateResponse(response));
        } catch (...) {
            self->promise.set_exception(std::current_exception());
        }
    }
};

/// What a stream and the thread that calls back share.
struct Streaming {
    std::mutex mutex;
    std::condition_variable more;
    std::deque<Token> tokens;  // those that were not read yet
    bool ended = false;
    std::exception_ptr error;
    GenerateResponse response;

    /// Waits for a token; none at the end.
    std::optional<Token> next() {
        std::unique_lock<std::mutex> lock(mutex);
        more.wait(lock, [&] { return ended || !tokens.empty(); });
        if (tokens.empty()) {
            if (error) std::rethrow_exception(error);
            return {};
        }
        std::optional<Token> token = std::move(tokens.front());
        tokens.pop_front();
        return token;
    }

    static void token(void* to, const pagoda_generate_token* token) noexcept {
        Streaming& self = **static_cast<std::shared_ptr<Streaming>*>(to);
        {
            const std::lock_guard<std::mutex> lock(self.mutex);
            try {
                self.tokens.push_back(from_c(known_of(token)));
            } catch (...) {
                self.error = std::current_exception();
            }
        }
        self.more.notify_one();
    }

    static void end(void* to, pagoda_status status, pagoda_generate_response* response,
                    const pagoda_error* error) noexcept {
        const std::unique_ptr<std::shared_ptr<Streaming>> shared(static_cast<std::shared_ptr<Streaming>*>(to));
        Streaming& self = **shared;
        {
            const std::lock_guard<std::mutex> lock(self.mutex);
            try {
                if (status != PAGODA_STATUS_OK) throw to_error(status, error);
                self.response = GenerateResponse(response);
            } catch (...) {
                self.error = std::current_exception();
            }
            self.ended = true;
        }
        self.more.notify_all();
    }
};

}  // namespace detail

inline GenerateResponse::GenerateResponse(pagoda_generate_response* handle) : handle_(handle) {
    pagoda_generate_info info = PAGODA_GENERATE_INFO_INIT;
    detail::call(pagoda_generate_response_info, handle, &info);
    cached_tokens = info.cached_tokens;
    computed_tokens = info.computed_tokens;
    prompt_tokens = {info.prompt_tokens, info.prompt_token_count};
    prompt_logprobs = detail::logprobs(info.prompt_logprob_count, pagoda_generate_response_prompt_logprobs, handle);
    if (info.version) version = info.version;
    choices.resize(info.choice_count);
    for (std::size_t i = 0; i < choices.size(); ++i) {
        pagoda_generate_choice from = PAGODA_GENERATE_CHOICE_INIT;
        detail::call(pagoda_generate_response_choice, handle, i, &from);
        Choice& choice = choices[i];
        choice.finish_reason = from.finish_reason;
        choice.text = {from.text, from.text_length};
        choice.tokens = {from.tokens, from.token_count};
        choice.logprobs = detail::logprobs(from.logprob_count, pagoda_generate_response_logprobs, handle, i);
        if (from.missing) choice.missing = from.missing;
        choice.queued = std::chrono::nanoseconds(from.queued_ns);
        choice.first_token = std::chrono::nanoseconds(from.first_token_ns);
        choice.generation = std::chrono::nanoseconds(from.generation_ns);
        if (from.has_score) choice.score = from.score;
    }
}

/// The answers to a request as they are generated: a range of tokens, to be read once. Tokens that are not read yet wait in
/// it: a slow reader stops neither the request nor others. A stream that goes ends its request, unless the request has a
/// `cancel`: that alone ends it then.
class TokenStream {
public:
    /// An input iterator over the tokens of a stream. Going on waits for the next token; it throws if the request failed.
    class Iterator {
    public:
        using iterator_category = std::input_iterator_tag;  ///< It reads each token once.
        using value_type = Token;                           ///< What it reads.
        using difference_type = std::ptrdiff_t;             ///< As all iterators have it.
        using pointer = const Token*;                       ///< As all iterators have it.
        using reference = const Token&;                     ///< As all iterators have it.

        /// The end.
        Iterator() = default;

        reference operator*() const { return *token_; }                  ///< The token.
        pointer operator->() const { return &*token_; }                  ///< The token.
        Iterator& operator++() { return token_ = from_->next(), *this; }  ///< Waits for the next token, or the end.
        void operator++(int) { ++*this; }                                 ///< The same.
        /// Whether both are at the end.
        bool operator==(const Iterator& other) const { return !token_ && !other.token_; }
        bool operator!=(const Iterator& other) const { return !(*this == other); }  ///< Whether one is not.

    private:
        friend class TokenStream;
        explicit Iterator(detail::Streaming& from) : from_(&from), token_(from.next()) {}
        detail::Streaming* from_ = nullptr;
        std::optional<Token> token_;
    };

    TokenStream(TokenStream&&) noexcept = default;
    TokenStream& operator=(TokenStream&& other) noexcept {
        std::swap(shared_, other.shared_);
        std::swap(cancel_, other.cancel_);
        return *this;
    }
    ~TokenStream() {
        if (cancel_.get()) pagoda_cancel_trigger(cancel_.get(), nullptr);
    }

    /// Waits for the next token that was not read yet.
    Iterator begin() { return Iterator(*shared_); }
    /// The end of all answers.
    Iterator end() const noexcept { return {}; }

    /// Waits for the next token that was not read yet; none at the end. Throws if the request failed.
    std::optional<Token> next() { return shared_->next(); }

    /// Waits for the end, and hands the response over: to be called once. The tokens need not have been read. Throws if the
    /// request failed.
    GenerateResponse response() {
        std::unique_lock<std::mutex> lock(shared_->mutex);
        shared_->more.wait(lock, [&] { return shared_->ended; });
        if (shared_->error) std::rethrow_exception(shared_->error);
        return std::move(shared_->response);
    }

    /// Ends the request, and does not wait for that: its answers have what was generated until then. Does nothing if the
    /// request has a `cancel`.
    void cancel() const { cancel_.trigger(); }

private:
    friend class Generator;
    TokenStream() : shared_(std::make_shared<detail::Streaming>()) {}

    std::shared_ptr<detail::Streaming> shared_;
    Cancel cancel_;
};

/// An open model folder of a language model. Any number of threads may use a generator at the same time; their requests run
/// together.
class Generator {
public:
    /// Opens a model folder.
    explicit Generator(const std::string& folder, const GeneratorOptions& options = {})
        : handle_(open(folder, options)) {}
    /// Takes a handle of pagoda.h.
    explicit Generator(pagoda_generator* handle) noexcept : handle_(handle) {}

    /// Answers a request, and waits for the end of all its answers. A request that was cancelled or exceeded its time limit
    /// is no error: its answers have what was generated until then.
    GenerateResponse generate(const GenerateRequest& request) const {
        const detail::CGenerateRequest c_request(request);
        return GenerateResponse(
            detail::make<pagoda_generate_response>(pagoda_generator_generate, get(), c_request.get()));
    }

    /// Answers a request on a thread of Pagoda. `on_token` is called there for each token, in their order; it may trigger the
    /// request's cancel, and must not wait for requests of the generator. An error in the request itself is thrown at once.
    std::future<GenerateResponse> generate_async(const GenerateRequest& request,
                                                 std::function<void(const Token&)> on_token = {}) const {
        const detail::CGenerateRequest c_request(request);
        auto answering = std::make_unique<detail::Answering>();
        answering->on_token = std::move(on_token);
        auto future = answering->promise.get_future();
        detail::call(pagoda_generator_generate_async, get(), c_request.get(),
                     answering->on_token ? &detail::Answering::token : nullptr, &detail::Answering::end,
                     static_cast<void*>(answering.get()));
        answering.release();
        return future;
    }

    /// Answers a request on a thread of Pagoda, for the caller to read the tokens as they come. An error in the request
    /// itself is thrown at once. With PAGODA_DRIVER_CALLER another thread has to run the steps.
    TokenStream stream(const GenerateRequest& request) const {
        detail::CGenerateRequest c_request(request);
        TokenStream stream;
        if (!request.cancel) c_request.use(stream.cancel_);
        auto shared = std::make_unique<std::shared_ptr<detail::Streaming>>(stream.shared_);
        detail::call(pagoda_generator_generate_async, get(), c_request.get(), &detail::Streaming::token,
                     &detail::Streaming::end, static_cast<void*>(shared.get()));
        shared.release();
        return stream;
    }

    /// Runs one step of a generator with PAGODA_DRIVER_CALLER; returns whether there is more to do.
    bool step() const {
        std::int32_t more = 0;
        detail::call(pagoda_generator_step, get(), &more);
        return more != 0;
    }

    /// The tokens of the prompt of a request.
    std::vector<std::uint32_t> tokenize(const GenerateRequest& request) const {
        const detail::CGenerateRequest c_request(request);
        std::size_t count = 0;
        std::uint32_t* none = nullptr;
        detail::call(pagoda_generator_tokenize, get(), c_request.get(), none, std::size_t{0}, &count);
        std::vector<std::uint32_t> tokens(count);
        detail::call(pagoda_generator_tokenize, get(), c_request.get(), tokens.data(), tokens.size(), &count);
        return tokens;
    }

    /// The text of tokens; with `skip_special` without special tokens.
    std::string detokenize(Span<const std::uint32_t> tokens, bool skip_special = true) const {
        return detail::text([&](char* buffer, std::size_t capacity, std::size_t* length) {
            // A place for none: NULL is no list.
            const std::uint32_t none = 0;
            detail::call(pagoda_generator_detokenize, get(), tokens.size() == 0 ? &none : tokens.data(), tokens.size(),
                         skip_special ? 1 : 0, buffer, capacity, length);
        });
    }

    /// Removes all data of sessions; returns how many were known.
    std::size_t forget(const std::vector<std::string>& sessions) const {
        return count(pagoda_generator_forget, sessions);
    }
    /// Evicts keys and values of sessions from the pool; returns how many had any there.
    std::size_t unload(const std::vector<std::string>& sessions) const {
        return count(pagoda_generator_unload, sessions);
    }
    /// Starts to load keys and values of sessions into the pool; returns how many are being loaded.
    std::size_t prefetch(const std::vector<std::string>& sessions) const {
        return count(pagoda_generator_prefetch, sessions);
    }
    /// Drops all sessions and unused prefixes from the pool, with `stored` from host memory and the store, too; returns how
    /// many histories there were.
    std::size_t clear(bool stored) const {
        std::size_t cleared = 0;
        detail::call(pagoda_generator_clear, get(), stored ? 1 : 0, &cleared);
        return cleared;
    }

    /// Sets whether tokens are guessed where requests allow it (`max_draft`), from the next step on. With `clear` that
    /// step also forgets how good guesses were and what they cost, and counts them from 0 again.
    void set_speculation(bool on, bool clear = false) const {
        detail::call(pagoda_generator_set_speculation, get(), on ? 1 : 0, clear ? 1 : 0);
    }

    /// Where the model runs.
    EngineProvider provider() const {
        EngineProvider result;
        result.reason = detail::text([&](char* buffer, std::size_t capacity, std::size_t* length) {
            detail::call(pagoda_generator_provider, get(), &result.provider, &result.device_id, buffer, capacity,
                         length);
        });
        return result;
    }

    /// The pagoda.json of the model.
    std::string info() const {
        return detail::text([&](char* buffer, std::size_t capacity, std::size_t* length) {
            detail::call(pagoda_generator_info, get(), buffer, capacity, length);
        });
    }

    /// The state and the counters of the generator.
    GeneratorStats stats() const {
        GeneratorStats stats = PAGODA_GENERATOR_STATS_INIT;
        detail::call(pagoda_generator_get_stats, get(), &stats);
        return stats;
    }

    /// The statistics of the cache of keys and values. Owners are sequences and sessions.
    KvStats kv_stats() const {
        KvStats stats = PAGODA_KV_STATS_INIT;
        detail::call(pagoda_generator_get_kv_stats, get(), &stats);
        return stats;
    }

    /// The handle, for functions of pagoda.h. This object keeps it.
    const pagoda_generator* get() const noexcept { return handle_.get(); }

private:
    static pagoda_generator* open(const std::string& folder, const GeneratorOptions& options) {
        detail::check_abi();
        const pagoda_model_options model = detail::to_c(options.model);
        const pagoda_store_options store = detail::to_c(options.store_options);
        pagoda_kv_policy policy = PAGODA_KV_POLICY_INIT;
        pagoda_generator_options c_options = PAGODA_GENERATOR_OPTIONS_INIT;
        c_options.driver = options.driver;
        c_options.share_prefixes = options.share_prefixes ? 1 : 0;
        c_options.max_batch = options.max_batch;
        c_options.max_batch_tokens = options.max_batch_tokens;
        c_options.max_stretch = options.max_stretch;
        c_options.max_prompt_tokens = options.max_prompt_tokens;
        c_options.max_new_tokens = options.max_new_tokens;
        c_options.queue = options.queue;
        c_options.kv_size_unit = options.kv_size.unit;
        c_options.kv_size = options.kv_size.value;
        c_options.kv_format = options.kv_format;
        c_options.host_bytes = options.host_bytes;
        c_options.model = &model;
        c_options.store_path = detail::to_c(options.store_path, "options.store_path");
        c_options.store_options = &store;
        if (options.kv_policy) {
            policy = detail::to_c(*options.kv_policy, "options.kv_policy");
            c_options.kv_policy = &policy;
        }
        c_options.max_draft = options.max_draft;
        c_options.draft_model = detail::to_c(options.draft_model, "options.draft_model");
        c_options.draft_kv_bytes = options.draft_kv_bytes;
        return detail::make<pagoda_generator>(pagoda_generator_open, folder.c_str(), &c_options);
    }

    template <class Function>
    std::size_t count(Function function, const std::vector<std::string>& sessions) const {
        const std::vector<const char*> texts = detail::to_c(sessions, "sessions");
        // A place for none: NULL is no list.
        const char* const none = nullptr;
        std::size_t count = 0;
        detail::call(function, get(), texts.empty() ? &none : texts.data(), texts.size(), &count);
        return count;
    }

    detail::Handle<pagoda_generator, pagoda_generator_free> handle_;
};

}  // namespace pagoda

#endif  // PAGODA_GENERATOR_HPP
