// What the programs that prove the C++ headers share. Included after pagoda.hpp.
#ifndef PAGODA_CHECK_HPP
#define PAGODA_CHECK_HPP

#include <cstdio>

static int failures = 0;

#define CHECK(condition)                                                             \
    do {                                                                             \
        if (!(condition)) {                                                          \
            std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            ++failures;                                                              \
        }                                                                            \
    } while (false)

// Whether `function` throws an Error with this status about this argument.
template <class Function>
static bool throws(pagoda_status status, const char* argument, Function function) {
    try {
        function();
    } catch (const pagoda::Error& error) {
        if (error.status() == status && error.argument() == argument && error.what()[0] != '\0') return true;
        std::fprintf(stderr, "it threw %d about \"%s\": %s\n", error.status(), error.argument().c_str(), error.what());
        return false;
    }
    std::fprintf(stderr, "it did not throw\n");
    return false;
}

// The tests run on the CPU with one thread, wherever they run.
[[maybe_unused]] static pagoda::ModelOptions cpu() {
    pagoda::ModelOptions options;
    options.provider = PAGODA_PROVIDER_CPU;
    options.intra_op_threads = 1;
    return options;
}

#endif  // PAGODA_CHECK_HPP
