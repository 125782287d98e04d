// Talks with a language model: chat FOLDER [SEED]. Each line of the input is a message; the answer is printed as it is
// generated. The same seed gives the same answers.
//
// The generator keeps the keys and values of the session, so a turn costs what is new, however long the talk is.
#include <cstdint>
#include <exception>
#include <iostream>
#include <pagoda.hpp>
#include <stdexcept>
#include <string>
#include <vector>

// The word for why an answer ended.
std::string word_for(pagoda_finish_reason reason) {
    switch (reason) {
    case PAGODA_FINISH_REASON_STOP: return "stop";
    case PAGODA_FINISH_REASON_LENGTH: return "length";
    case PAGODA_FINISH_REASON_CANCELLED: return "cancelled";
    default: return "timeout";
    }
}

void chat(const std::string& folder, std::uint64_t seed) {
    const pagoda::Generator generator(folder);
    std::vector<pagoda::Message> messages;
    pagoda::GenerateRequest request;
    request.max_new_tokens = 200;
    request.temperature = 0.2f;
    request.top_p = 0.9f;
    request.repetition_penalty = 1.1f;
    request.seed = seed;
    request.session = "chat";
    request.context_end = PAGODA_CONTEXT_END_STOP;
    for (std::string line; std::getline(std::cin, line);) {
        messages.push_back({"user", line});
        request.messages = pagoda::to_json(messages);
        pagoda::TokenStream stream = generator.stream(request);
        for (const pagoda::Token& token : stream) std::cout << token.text << std::flush;
        const pagoda::GenerateResponse response = stream.response();
        const pagoda::Choice& answer = response.choices[0];
        std::cout << "\n[" << answer.tokens.size() << " tokens; " << response.cached_tokens << " of the prompt's "
                  << response.prompt_tokens.size() << " were cached; " << word_for(answer.finish_reason) << "]\n";
        messages.push_back({"assistant", std::string(answer.text)});
    }
}

// A seed: digits and nothing else.
bool read(const std::string& text, std::uint64_t& seed) {
    std::size_t read = 0;
    try {
        seed = std::stoull(text, &read);
    } catch (const std::logic_error&) {
        return false;
    }
    return read == text.size() && text[0] != '-';
}

int main(int argc, char** argv) {
    std::uint64_t seed = 0;
    if (argc < 2 || argc > 3 || (argc == 3 && !read(argv[2], seed))) {
        std::cerr << "usage: " << argv[0] << " FOLDER [SEED]\n";
        return 2;
    }
    try {
        chat(argv[1], seed);
    } catch (const std::exception& error) {
        std::cerr << "chat: " << error.what() << "\n";
        return 1;
    }
}
