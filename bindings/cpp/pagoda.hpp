// Pagoda for C++17: pagoda.h with types, ownership and exceptions. Header only; link with -lpagoda.
//
//     pagoda::Model model("model.onnx");
//     auto x = pagoda::Tensor::from<float>({1, 4}, {1, 2, 3, 4});
//     auto outputs = model.run({{"x", x}}, {"y"});
//     for (float score : outputs[0].data<float>()) ...
//
// - This file includes the others: pagoda_embedding.hpp (Embeddings), pagoda_kv.hpp (Store, KvCache, KvLease),
//   pagoda_engine.hpp (Engine) and pagoda_generator.hpp (Generator).
// - Enums (element types, statuses, providers, log levels) are the PAGODA_... constants of pagoda.h.
// - A failed call throws pagoda::Error. An exception that a callback throws is swallowed: it can not cross C.
// - Objects can be moved, not copied. Any thread may use any object. The rules for memory are those of pagoda.h.

#ifndef PAGODA_HPP
#define PAGODA_HPP

#include <pagoda.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace pagoda {

/// A failed call; `what()` is the message.
class Error : public std::runtime_error {
public:
    /// An error with a status, a message, and the argument at fault ("" if there is none).
    Error(pagoda_status status, const std::string& message, std::string argument = "")
        : std::runtime_error(message), status_(status), argument_(std::move(argument)) {}

    /// The status, e.g. PAGODA_STATUS_INVALID_ARGUMENT.
    pagoda_status status() const noexcept { return status_; }
    /// The name of the status, e.g. "INVALID_ARGUMENT".
    const char* name() const noexcept { return pagoda_status_name(status_); }
    /// The argument of the C function at fault, e.g. "inputs[1]"; "" if there is none.
    const std::string& argument() const noexcept { return argument_; }

private:
    pagoda_status status_;
    std::string argument_;
};

/// A view of contiguous elements: the part of C++20's std::span that is needed here.
template <class T>
class Span {
    // For containers whose elements are T, or T without const.
    template <class Container, class Element = std::remove_pointer_t<decltype(std::declval<Container&>().data())>>
    using From = std::enable_if_t<std::is_convertible_v<Element (*)[], T (*)[]>>;

public:
    /// No elements.
    constexpr Span() noexcept = default;
    /// `size` elements from `data` on.
    constexpr Span(T* data, std::size_t size) noexcept : data_(data), size_(size) {}
    /// All elements of a std::vector, std::array or other container that has them in one piece.
    template <class Container, class = From<Container>>
    constexpr Span(Container& from) noexcept : data_(from.data()), size_(from.size()) {}
    template <class Container, class = From<const Container>>
    constexpr Span(const Container& from) noexcept : data_(from.data()), size_(from.size()) {}
    /// All elements of an array.
    template <std::size_t Size>
    constexpr Span(T (&array)[Size]) noexcept : data_(array), size_(Size) {}

    constexpr T* data() const noexcept { return data_; }                       ///< Where the elements are.
    constexpr std::size_t size() const noexcept { return size_; }              ///< How many there are.
    constexpr T* begin() const noexcept { return data_; }                      ///< The first.
    constexpr T* end() const noexcept { return data_ + size_; }                ///< Past the last.
    constexpr T& operator[](std::size_t index) const { return data_[index]; }  ///< One; `index` is not checked.

private:
    T* data_ = nullptr;
    std::size_t size_ = 0;
};

/// The bits of a 16-bit float (IEEE half).
struct Float16 { std::uint16_t bits; };

/// The bits of a 16-bit float with the exponent of a 32-bit one.
struct BFloat16 { std::uint16_t bits; };

/// The dimensions of a tensor.
using Dims = std::vector<std::int64_t>;

/// The PAGODA_ELEMENT_TYPE_... of a C++ type.
template <class T>
constexpr pagoda_element_type type_of() {
    constexpr bool is_signed = std::is_signed_v<T>;
    if constexpr (std::is_same_v<T, float>) return PAGODA_ELEMENT_TYPE_F32;
    else if constexpr (std::is_same_v<T, double>) return PAGODA_ELEMENT_TYPE_F64;
    else if constexpr (std::is_same_v<T, Float16>) return PAGODA_ELEMENT_TYPE_F16;
    else if constexpr (std::is_same_v<T, BFloat16>) return PAGODA_ELEMENT_TYPE_BF16;
    else if constexpr (std::is_same_v<T, bool>) return PAGODA_ELEMENT_TYPE_BOOL;
    else {
        // By size, not by name: long and long long are two types, and both may be 64 bits wide.
        static_assert(std::is_integral_v<T>, "tensors have no elements of this type");
        if constexpr (sizeof(T) == 1) return is_signed ? PAGODA_ELEMENT_TYPE_I8 : PAGODA_ELEMENT_TYPE_U8;
        else if constexpr (sizeof(T) == 2) return is_signed ? PAGODA_ELEMENT_TYPE_I16 : PAGODA_ELEMENT_TYPE_U16;
        else if constexpr (sizeof(T) == 4) return is_signed ? PAGODA_ELEMENT_TYPE_I32 : PAGODA_ELEMENT_TYPE_U32;
        else return is_signed ? PAGODA_ELEMENT_TYPE_I64 : PAGODA_ELEMENT_TYPE_U64;
    }
}

namespace detail {

/// Owns a T. The deleter is the function itself, as a type without state.
template <class T, auto free>
using Handle = std::unique_ptr<T, std::integral_constant<decltype(free), free>>;

inline Error to_error(pagoda_status status, const pagoda_error* error) {
    return Error(status, pagoda_error_message(error), pagoda_error_argument(error));
}

/// Calls a function of pagoda.h with a place for its error, and throws what it puts there.
template <class Function, class... Arguments>
void call(Function function, Arguments... arguments) {
    pagoda_error* raw = nullptr;
    const pagoda_status status = function(arguments..., &raw);
    const Handle<pagoda_error, pagoda_error_free> error(raw);
    if (status != PAGODA_STATUS_OK) throw to_error(status, raw);
}

/// Calls a function of pagoda.h that makes a T.
template <class T, class Function, class... Arguments>
T* make(Function function, Arguments... arguments) {
    T* made = nullptr;
    call(function, arguments..., &made);
    return made;
}

/// A struct that the library wrote. One of an older library has fewer fields than this header knows, and the rest is 0;
/// one of a newer library has more, which have no place here.
template <class T>
T known_of(const T* from) noexcept {
    T known{};
    std::memcpy(&known, from, std::min<std::size_t>(from->struct_size, sizeof known));
    known.struct_size = std::uint32_t{sizeof known};
    return known;
}

/// Throws if the library is not of this header: looked at once a process, but said each time.
inline void check_abi() {
    [[maybe_unused]] static const bool fits = (call(pagoda_abi_check, std::uint32_t{PAGODA_ABI_VERSION}), true);
}

/// A duration in C's form, whole microseconds. C has no negative ones.
inline std::uint64_t to_c(std::chrono::microseconds time, const char* argument) {
    if (time.count() < 0) {
        const std::string name = argument, value = std::to_string(time.count());
        throw Error(PAGODA_STATUS_INVALID_ARGUMENT, name + ": " + value + " is negative: give 0 or more", name);
    }
    return static_cast<std::uint64_t>(time.count());
}

/// Calls a function of the user's from within C, where no exception may come out.
template <class Function, class... Arguments>
void guarded(const Function& function, Arguments... arguments) noexcept {
    try { function(arguments...); } catch (...) {}
}

}  // namespace detail

/// Cancels runs and requests. Any number of them may share one. Once triggered, it stays triggered.
class Cancel {
public:
    /// One that is not triggered.
    Cancel() : handle_(detail::make<pagoda_cancel>(pagoda_cancel_new)) {}
    /// Cancels all runs and requests that have it, now and later. They fail with PAGODA_STATUS_CANCELLED; the answers of
    /// a generator end with what they have.
    void trigger() const { detail::call(pagoda_cancel_trigger, handle_.get()); }
    /// The handle, for functions of pagoda.h. This object keeps it.
    const pagoda_cancel* get() const noexcept { return handle_.get(); }

private:
    detail::Handle<pagoda_cancel, pagoda_cancel_free> handle_;
};

namespace detail {

/// The handle of a cancel, NULL of none.
inline const pagoda_cancel* handle_of(const Cancel* cancel, const char* argument) {
    // To C this would mean that nothing stops the run.
    if (cancel && !cancel->get()) throw Error(PAGODA_STATUS_INVALID_HANDLE, "the cancel was moved away", argument);
    return cancel ? cancel->get() : nullptr;
}

}  // namespace detail

/// A tensor: an element type, dimensions, and memory of Pagoda, the caller or ONNX Runtime.
class Tensor {
public:
    /// Makes a tensor of zeros in memory of its own.
    template <class T>
    static Tensor zeros(const Dims& dims) { return zeros(type_of<T>(), dims); }
    /// Makes a tensor of zeros, or of empty strings, of a type that is known at run time.
    static Tensor zeros(pagoda_element_type type, const Dims& dims) {
        return Tensor(detail::make<pagoda_tensor>(pagoda_tensor_new, type, dims.data(), dims.size()));
    }

    /// Makes a tensor with a copy of `values`.
    template <class T>
    static Tensor from(const Dims& dims, std::initializer_list<T> values) { return copy<T>(dims, values); }
    template <class T>
    static Tensor from(const Dims& dims, const std::vector<T>& values) { return copy<T>(dims, values); }
    template <class T>
    static Tensor from(const Dims& dims, Span<T> values) { return copy<std::remove_const_t<T>>(dims, values); }

    /// Makes a tensor of one dimension with a copy of `values`.
    template <class T>
    static Tensor from(const std::vector<T>& values) { return copy<T>({std::int64_t(values.size())}, values); }

    /// Makes a tensor over memory of the caller; nothing is copied. The memory must stay until `release` is called,
    /// once, from any thread; without one, until the tensor is gone and every run that uses it is done. If this
    /// throws, `release` is not called.
    template <class T>
    static Tensor borrow(const Dims& dims, Span<T> memory, std::function<void()> release = {}) {
        using Release = std::function<void()>;
        auto kept = release ? std::make_unique<Release>(std::move(release)) : nullptr;
        const pagoda_release_callback released = [](void* user_data) {
            const std::unique_ptr<Release> mine(static_cast<Release*>(user_data));
            detail::guarded(*mine);
        };
        Tensor tensor(detail::make<pagoda_tensor>(pagoda_tensor_borrow, type_of<T>(), dims.data(), dims.size(),
                                                  static_cast<void*>(memory.data()), memory.size() * sizeof(T),
                                                  kept ? released : nullptr, static_cast<void*>(kept.get())));
        kept.release();
        return tensor;
    }

    /// Makes a tensor with a copy of UTF-8 texts.
    static Tensor strings(const Dims& dims, const std::vector<std::string>& values) {
        std::vector<const char*> texts;
        std::vector<std::size_t> lengths;
        for (const std::string& value : values) {
            texts.push_back(value.data());
            lengths.push_back(value.size());
        }
        return Tensor(detail::make<pagoda_tensor>(pagoda_tensor_new_strings, texts.data(), lengths.data(),
                                                  texts.size(), dims.data(), dims.size()));
    }

    /// Takes over a handle of pagoda.h.
    explicit Tensor(pagoda_tensor* handle) noexcept : handle_(handle) {}

    /// The type of the elements, a PAGODA_ELEMENT_TYPE_...
    pagoda_element_type type() const {
        pagoda_element_type type = PAGODA_ELEMENT_TYPE_UNDEFINED;
        detail::call(pagoda_tensor_type, get(), &type);
        return type;
    }

    /// The dimensions; they live as long as the tensor.
    Span<const std::int64_t> dims() const {
        const std::int64_t* dims = nullptr;
        std::size_t rank = 0;
        detail::call(pagoda_tensor_dims, get(), &dims, &rank);
        return {dims, rank};
    }

    /// How many elements there are.
    std::size_t size() const {
        std::size_t size = 1;
        for (const std::int64_t dim : dims()) size *= static_cast<std::size_t>(dim);
        return size;
    }

    /// The elements in place, to read or to write while no run uses them; they live as long as the tensor. Throws if
    /// they are not of type T.
    template <class T>
    Span<T> data() { return memory<T>(); }
    /// The elements in place, to read.
    template <class T>
    Span<const T> data() const { return memory<const T>(); }

    /// One text of a tensor of strings; it lives as long as the tensor.
    std::string_view text(std::size_t index) const {
        const char* text = nullptr;
        std::size_t length = 0;
        detail::call(pagoda_tensor_string, get(), index, &text, &length);
        return {text, length};
    }

    /// The handle, for functions of pagoda.h. This object keeps it.
    pagoda_tensor* get() const noexcept { return handle_.get(); }

private:
    template <class T, class Values>
    static Tensor copy(const Dims& dims, const Values& values) {
        Tensor tensor = zeros<T>(dims);
        const Span<T> data = tensor.data<T>();
        if (data.size() != values.size()) {
            const std::string both = std::to_string(values.size()) + ", not " + std::to_string(data.size());
            throw Error(PAGODA_STATUS_INVALID_ARGUMENT, "the number of values is " + both, "values");
        }
        std::copy(values.begin(), values.end(), data.begin());
        return tensor;
    }

    template <class T>
    Span<T> memory() const {
        const pagoda_element_type asked = type_of<std::remove_const_t<T>>(), real = type();
        if (asked != real) {
            const std::string name = pagoda_element_type_name(real);
            const std::string both = name + ", not " + pagoda_element_type_name(asked);
            throw Error(PAGODA_STATUS_INVALID_ARGUMENT, "T: this is a tensor of " + both, "T");
        }
        void* data = nullptr;
        std::size_t bytes = 0;
        detail::call(pagoda_tensor_data, get(), &data, &bytes);
        return {static_cast<T*>(data), bytes / sizeof(T)};
    }

    detail::Handle<pagoda_tensor, pagoda_tensor_free> handle_;
};

/// A tensor and which input or output of a run it is; the tensor must live until the call returns.
template <class T>
struct Named {
    Named(std::string of, T& is) : name(std::move(of)), tensor(&is) {}  ///< The input or output `of` is `is`.
    std::string name;                                                   ///< The name.
    T* tensor;                                                          ///< The tensor.
};

/// An input of a run.
using Input = Named<const Tensor>;
/// An output of a run that is written into a tensor that is there, which may be an input of the same run too.
using Output = Named<Tensor>;

/// An input or an output of a model.
struct ValueInfo {
    std::string name;                          ///< Its name.
    pagoda_element_type type = PAGODA_ELEMENT_TYPE_UNDEFINED;  ///< The element type; undefined: not a tensor.
    bool has_dims = false;                     ///< Whether the model says how many dimensions there are.
    Dims dims;                                 ///< Its dimensions, -1 where one is free.
    std::vector<std::string> symbols;          ///< For each dimension the name of its symbol, "" where it has none.
};

/// How to open a model; see pagoda_model_options.
struct ModelOptions {
    pagoda_provider provider = PAGODA_PROVIDER_AUTO;             ///< Where the model runs.
    std::int32_t device_id = 0;                                  ///< The number of the GPU.
    std::int32_t intra_op_threads = 0;                           ///< Threads that work on one run; 0 = one a core.
    pagoda_optimization optimization = PAGODA_OPTIMIZATION_ALL;  ///< How far the graph is optimized.
    bool sleep_when_idle = false;                                ///< Whether idle threads sleep instead of spinning.
    bool tf32 = false;                                           ///< Whether f32 products on a GPU may use TF32.
    bool host_pools = false;                                     ///< Whether ai.pagoda operators stay on the CPU.
    std::string onnxruntime_path;                                ///< The ONNX Runtime library; "" = search for it.
    std::string profile_path;                                    ///< Where to write a profile; "" = no profile.
    const pagoda_embeddings* tables = nullptr;                   ///< Tables that the graph names: Embeddings::get().
};

namespace detail {

/// Model options in C's form; the texts are those of `options`.
inline pagoda_model_options to_c(const ModelOptions& options) noexcept {
    pagoda_model_options c_options = PAGODA_MODEL_OPTIONS_INIT;
    c_options.provider = options.provider;
    c_options.device_id = options.device_id;
    c_options.intra_op_threads = options.intra_op_threads;
    c_options.optimization = options.optimization;
    c_options.sleep_when_idle = options.sleep_when_idle ? 1 : 0;
    c_options.tf32 = options.tf32 ? 1 : 0;
    c_options.host_pools = options.host_pools ? 1 : 0;
    if (!options.onnxruntime_path.empty()) c_options.onnxruntime_path = options.onnxruntime_path.c_str();
    if (!options.profile_path.empty()) c_options.profile_path = options.profile_path.c_str();
    c_options.tables = options.tables;
    return c_options;
}

}  // namespace detail

/// An open model. Any number of threads may run one at the same time.
class Model {
public:
    /// Opens the model in an .onnx file.
    explicit Model(const std::string& path, const ModelOptions& options = {})
        : handle_(open(options, pagoda_model_open, path.c_str())) {}

    /// Opens a model from the bytes of an .onnx file; they are copied.
    static Model open_memory(Span<const std::uint8_t> bytes, const ModelOptions& options = {}) {
        return Model(open(options, pagoda_model_open_memory, static_cast<const void*>(bytes.data()), bytes.size()));
    }

    /// Takes over a handle of pagoda.h.
    explicit Model(pagoda_model* handle) noexcept : handle_(handle) {}

    /// Where the model runs: PAGODA_PROVIDER_CPU or PAGODA_PROVIDER_CUDA.
    pagoda_provider provider() const { return provider_and_reason().first; }
    /// Why PAGODA_PROVIDER_AUTO became the CPU; "" if it did not or was not asked for.
    std::string provider_reason() const { return provider_and_reason().second; }
    /// What goes in.
    std::vector<ValueInfo> inputs() const { return infos(pagoda_model_input_count, pagoda_model_input); }
    /// What comes out.
    std::vector<ValueInfo> outputs() const { return infos(pagoda_model_output_count, pagoda_model_output); }

    /// Runs the model and waits. Returns new tensors for the outputs `names`; those in `bound` are written in place.
    std::vector<Tensor> run(const std::vector<Input>& inputs, const std::vector<std::string>& names,
                            const std::vector<Output>& bound = {}, const Cancel* cancel = nullptr) const {
        Lists lists(inputs, names, bound);
        std::vector<Tensor> made;
        made.reserve(names.size());
        lists.call(pagoda_model_run, *this, cancel);
        for (std::size_t i = 0; i < names.size(); ++i) made.emplace_back(lists.outputs[i]);
        return made;
    }

    /// Runs the model with every output written in place.
    void run_into(const std::vector<Input>& inputs, const std::vector<Output>& bound,
                  const Cancel* cancel = nullptr) const {
        run(inputs, {}, bound, cancel);
    }

    /// Has the model run on a thread of Pagoda's. The future has what `run` returns or throws; what is wrong with the
    /// arguments is thrown at once. The objects may go as soon as this returns, memory that was borrowed not before
    /// the future is ready.
    std::future<std::vector<Tensor>> run_async(const std::vector<Input>& inputs, const std::vector<std::string>& names,
                                               const std::vector<Output>& bound = {},
                                               const Cancel* cancel = nullptr) const {
        Lists lists(inputs, names, bound);
        auto pending = std::make_unique<Pending>();
        for (std::size_t i = 0; i < names.size(); ++i) pending->made.emplace_back(nullptr);
        auto future = pending->promise.get_future();
        lists.call(pagoda_model_run_async, *this, cancel, &Pending::done, static_cast<void*>(pending.get()));
        pending.release();
        return future;
    }

    /// The handle, for functions of pagoda.h. This object keeps it.
    const pagoda_model* get() const noexcept { return handle_.get(); }

private:
    template <class Opener, class... Source>
    static pagoda_model* open(const ModelOptions& options, Opener opener, Source... source) {
        detail::check_abi();
        const pagoda_model_options c_options = detail::to_c(options);
        return detail::make<pagoda_model>(opener, source..., &c_options);
    }

    std::pair<pagoda_provider, const char*> provider_and_reason() const {
        std::pair<pagoda_provider, const char*> result{PAGODA_PROVIDER_AUTO, ""};
        detail::call(pagoda_model_provider, handle_.get(), &result.first, &result.second);
        return result;
    }

    template <class Count, class Get>
    std::vector<ValueInfo> infos(Count count, Get one) const {
        std::size_t size = 0;
        detail::call(count, handle_.get(), &size);
        std::vector<ValueInfo> result;
        for (std::size_t i = 0; i < size; ++i) {
            pagoda_value_info info = PAGODA_VALUE_INFO_INIT;
            detail::call(one, handle_.get(), i, &info);
            result.push_back({info.name, info.type, info.dims != nullptr, {info.dims, info.dims + info.rank},
                              {info.symbols, info.symbols + info.rank}});
        }
        return result;
    }

    /// The arguments of a run as C takes them: new outputs first, then bound ones.
    struct Lists {
        std::vector<const char*> input_names, output_names;
        std::vector<pagoda_tensor*> inputs, outputs;

        Lists(const std::vector<Input>& ins, const std::vector<std::string>& names, const std::vector<Output>& bound)
            : outputs(names.size(), nullptr) {
            for (const Input& input : ins) {
                input_names.push_back(input.name.c_str());
                inputs.push_back(input.tensor->get());
            }
            for (const std::string& name : names) output_names.push_back(name.c_str());
            for (const Output& output : bound) {
                output_names.push_back(output.name.c_str());
                // To C this would ask for a new tensor, which would leak.
                if (!output.tensor->get())
                    throw Error(PAGODA_STATUS_INVALID_HANDLE, "the tensor was moved away", output.name);
                outputs.push_back(output.tensor->get());
            }
        }

        template <class Run, class... Rest>
        void call(Run run, const Model& model, const Cancel* cancel, Rest... rest) {
            detail::call(run, model.get(), input_names.data(), inputs.data(), inputs.size(), output_names.data(),
                         outputs.data(), outputs.size(), detail::handle_of(cancel, "cancel"), rest...);
        }
    };

    /// An asynchronous run under way.
    struct Pending {
        std::promise<std::vector<Tensor>> promise;
        std::vector<Tensor> made;  // as many as there will be, so that taking them over can not fail halfway

        static void done(void* user_data, pagoda_status status, pagoda_tensor* const* outputs, std::size_t,
                         const pagoda_error* error) noexcept {
            const std::unique_ptr<Pending> self(static_cast<Pending*>(user_data));
            try {
                if (status != PAGODA_STATUS_OK) throw detail::to_error(status, error);
                for (std::size_t i = 0; i < self->made.size(); ++i) self->made[i] = Tensor(outputs[i]);
                self->promise.set_value(std::move(self->made));
            } catch (...) {
                self->promise.set_exception(std::current_exception());
            }
        }
    };

    detail::Handle<pagoda_model, pagoda_model_free> handle_;
};

/// Receives a line of the log: a level, the component that logs, and the message. The texts are valid during the call
/// only.
using Log = std::function<void(pagoda_log_level level, std::string_view source, std::string_view message)>;

/// Sends the log to `log`, up to `level`, on any thread. An empty function stops the log. When this returns, the
/// previous function is not running and will not be called again. Do not call this from such a function.
inline void set_log(pagoda_log_level level, Log log) {
    struct Current {
        std::mutex mutex;
        std::unique_ptr<Log> log;
        // Threads of ONNX Runtime may outlive the statics of the program. Within the function itself the log can not be
        // stopped: if the program ends there, the function must outlive them too.
        ~Current() {
            if (log && pagoda_log_set(PAGODA_LOG_LEVEL_OFF, nullptr, nullptr, nullptr) != PAGODA_STATUS_OK)
                (void)log.release();
        }
    };
    static Current current;
    const pagoda_log_callback callback = [](void* to, pagoda_log_level line, const char* source, const char* message) {
        detail::guarded(*static_cast<const Log*>(to), line, source, message);
    };
    auto next = log ? std::make_unique<Log>(std::move(log)) : nullptr;
    const std::lock_guard<std::mutex> lock(current.mutex);
    detail::call(pagoda_log_set, level, next ? callback : nullptr, static_cast<void*>(next.get()));
    current.log = std::move(next);
}

/// The version of the library, e.g. "0.1.0"; PAGODA_VERSION is that of the header.
inline const char* version() noexcept { return pagoda_version(); }
/// The version of the library as a number; PAGODA_VERSION_NUMBER is that of the header.
inline std::uint32_t version_number() noexcept { return pagoda_version_number(); }

/// The number of handles in the process that were not freed.
inline std::size_t live_objects() noexcept { return pagoda_live_objects(); }

/// The metrics of the process as Prometheus text.
inline std::string metrics() {
    std::string text(4096, '\0');
    std::size_t length = 0;
    pagoda_status status;
    while ((status = pagoda_metrics_text(&text[0], text.size(), &length, nullptr)) == PAGODA_STATUS_CAPACITY)
        text.resize(2 * text.size());
    if (status != PAGODA_STATUS_OK) throw Error(status, "the metrics can not be read");
    text.resize(length - 1);  // without the NUL
    return text;
}

}  // namespace pagoda

#include "pagoda_embedding.hpp"
#include "pagoda_kv.hpp"
#include "pagoda_engine.hpp"
#include "pagoda_generator.hpp"

#endif  // PAGODA_HPP
