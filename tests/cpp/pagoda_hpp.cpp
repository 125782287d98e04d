// Proves bindings/cpp/pagoda.hpp: pagoda_hpp HELLO.onnx MODEL.onnx FOLDER, with the models that samples/make_model.py
// writes and a model folder of tests/data/engine. Says what does not hold and exits with 1.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <pagoda.h>
#include <thread>

// What pagoda.hpp asks of an engine goes through here, so that the answer can be that of another version of Pagoda.
static pagoda_status asked_of_any_version(const pagoda_engine* engine, const pagoda_rank_request* request,
                                          pagoda_rank_callback callback, void* user_data, pagoda_error** error);
// And what it asks about tasks through here, so that a swap can come right after.
static pagoda_status tasks_before_a_swap(const pagoda_engine* engine, std::size_t* tasks, pagoda_error** error);
#define pagoda_engine_rank_async asked_of_any_version
#define pagoda_engine_tasks tasks_before_a_swap
#include <pagoda.hpp>
#undef pagoda_engine_rank_async
#undef pagoda_engine_tasks

#include "check.hpp"

using namespace pagoda;

static_assert(!std::is_copy_constructible_v<Tensor> && std::is_nothrow_move_constructible_v<Tensor>);
static_assert(!std::is_copy_constructible_v<Model> && std::is_nothrow_move_constructible_v<Model>);
static_assert(!std::is_copy_constructible_v<Cancel> && std::is_nothrow_move_constructible_v<Cancel>);
static_assert(!std::is_copy_constructible_v<Store> && std::is_nothrow_move_constructible_v<Store>);
static_assert(!std::is_copy_constructible_v<KvCache> && std::is_nothrow_move_constructible_v<KvCache>);
static_assert(!std::is_copy_constructible_v<KvLease> && std::is_nothrow_move_constructible_v<KvLease>);
static_assert(!std::is_copy_assignable_v<Tensor> && std::is_nothrow_move_assignable_v<Tensor>);
static_assert(type_of<long>() == type_of<long long>() && type_of<unsigned char>() == PAGODA_ELEMENT_TYPE_U8);
static_assert(std::is_convertible_v<Span<float>, Span<const float>>);
static_assert(!std::is_constructible_v<Span<float>, const std::vector<float>&>);
static_assert(!std::is_constructible_v<Span<float>, std::vector<double>&>);

template <class T>
static void type_is(pagoda_element_type type, std::array<T, 2> values) {
    const Tensor tensor = Tensor::from({2}, Span<T>(values));
    CHECK(tensor.type() == type && tensor.size() == 2);
    CHECK(std::memcmp(tensor.data<T>().data(), values.data(), sizeof values) == 0);
}

static void types() {
    type_is<float>(PAGODA_ELEMENT_TYPE_F32, {1.5f, -2});
    type_is<double>(PAGODA_ELEMENT_TYPE_F64, {1.5, -2});
    type_is<std::int8_t>(PAGODA_ELEMENT_TYPE_I8, {1, -2});
    type_is<std::int16_t>(PAGODA_ELEMENT_TYPE_I16, {1, -2});
    type_is<std::int32_t>(PAGODA_ELEMENT_TYPE_I32, {1, -2});
    type_is<std::int64_t>(PAGODA_ELEMENT_TYPE_I64, {1, -2});
    type_is<std::uint8_t>(PAGODA_ELEMENT_TYPE_U8, {1, 255});
    type_is<std::uint16_t>(PAGODA_ELEMENT_TYPE_U16, {1, 65535});
    type_is<std::uint32_t>(PAGODA_ELEMENT_TYPE_U32, {1, ~0u});
    type_is<std::uint64_t>(PAGODA_ELEMENT_TYPE_U64, {1, ~std::uint64_t{0}});
    type_is<bool>(PAGODA_ELEMENT_TYPE_BOOL, {true, false});
    type_is<Float16>(PAGODA_ELEMENT_TYPE_F16, {Float16{0x3c00}, Float16{0xc000}});
    type_is<BFloat16>(PAGODA_ELEMENT_TYPE_BF16, {BFloat16{0x3f80}, BFloat16{0xc000}});
}

static void tensors() {
    Tensor zeros = Tensor::zeros<float>({2, 3});
    CHECK(zeros.dims().size() == 2 && zeros.dims()[0] == 2 && zeros.dims()[1] == 3);
    for (const float value : zeros.data<float>()) CHECK(value == 0);
    zeros.data<float>()[5] = 7;
    CHECK(zeros.data<float>()[5] == 7);

    CHECK(Tensor::from<float>({1, 4}, {1, 2, 3, 4}).data<float>()[3] == 4);
    CHECK(Tensor::from({2}, std::vector<bool>{false, true}).data<bool>()[1]);
    CHECK(Tensor::from<std::int32_t>({0, 13}).dims()[0] == 2);
    CHECK(Tensor::from<double>({}, {2.5}).dims().size() == 0);
    CHECK(Tensor::zeros<float>({0, 3}).data<float>().size() == 0);

    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "values", [] { Tensor::from<float>({3}, {1, 2}); }));
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "T", [&] { zeros.data<double>(); }));
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "dims[0]", [] { Tensor::zeros<float>({-1}); }));
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "type", [] { Tensor::zeros(99, {1}); }));
}

static void borrowing() {
    std::vector<float> memory{1, 2, 3};
    std::atomic<int> released{0};
    {
        Tensor tensor = Tensor::borrow<float>({3}, memory, [&] { ++released; });
        CHECK(tensor.data<float>().data() == memory.data());
        tensor.data<float>()[0] = 9;
        CHECK(memory[0] == 9);
        const Tensor moved = std::move(tensor);
        CHECK(released == 0);
    }
    CHECK(released == 1);
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "bytes",
                 [&] { Tensor::borrow<float>({4}, memory, [&] { ++released; }); }));
    CHECK(released == 1);
    // What a callback throws must not reach Rust.
    { const Tensor tensor = Tensor::borrow<float>({3}, memory, [&] { ++released; throw 1; }); }
    CHECK(released == 2);
    { const Tensor tensor = Tensor::borrow<float>({3}, memory); }
}

static void moving(const std::string& path) {
    Tensor a = Tensor::from<float>({1.0f});
    pagoda_tensor* handle = a.get();
    Tensor b = std::move(a);
    CHECK(a.get() == nullptr && b.get() == handle);
    CHECK(throws(PAGODA_STATUS_INVALID_HANDLE, "tensor", [&] { a.type(); }));
    const std::size_t before = pagoda_live_objects();
    b = Tensor::from<float>({2.0f});
    CHECK(pagoda_live_objects() == before && b.data<float>()[0] == 2);

    Model model(path, cpu());
    Model other = std::move(model);
    CHECK(model.get() == nullptr && other.inputs().size() == 1);
    CHECK(throws(PAGODA_STATUS_INVALID_HANDLE, "model", [&] { model.inputs(); }));
    // To C it would ask for a new tensor, which would leak.
    const Tensor x = Tensor::zeros<float>({1, 4});
    CHECK(throws(PAGODA_STATUS_INVALID_HANDLE, "y", [&] { other.run_into({{"x", x}}, {{"y", a}}); }));
    // A handle that was freed is an error, not a crash.
    pagoda_tensor* stale = Tensor::zeros<float>({1}).get();
    Tensor ghost(stale);
    CHECK(throws(PAGODA_STATUS_INVALID_HANDLE, "tensor", [&] { ghost.type(); }));
}

static void describing(const std::string& path) {
    const Model model(path, cpu());
    CHECK(model.provider() == PAGODA_PROVIDER_CPU && model.provider_reason().empty());
    const ValueInfo x = model.inputs().at(0), y = model.outputs().at(0);
    CHECK(x.name == "x" && x.type == PAGODA_ELEMENT_TYPE_F32 && x.has_dims && x.dims == Dims({-1, 4}));
    CHECK(y.name == "y" && y.symbols == std::vector<std::string>({"n", ""}));
}

static void running(const std::string& path) {
    const Model model(path, cpu());
    const Tensor x = Tensor::from<float>({2, 4}, {1, 2, 3, 4, 0, 0, 0, 0});
    const auto outputs = model.run({{"x", x}}, {"y"});
    const Span<const float> y = outputs.at(0).data<float>();
    CHECK(y.size() == 6 && std::abs(y[0] + y[1] + y[2] - 1) < 1e-6 && std::abs(y[3] - 1.0f / 3) < 1e-6);

    Tensor bound = Tensor::zeros<float>({2, 3});
    const float* memory = bound.data<float>().data();
    model.run_into({{"x", x}}, {{"y", bound}});
    CHECK(bound.data<float>().data() == memory && std::memcmp(memory, y.data(), 6 * sizeof(float)) == 0);

    std::ifstream file(path, std::ios::binary);
    const std::vector<std::uint8_t> bytes{std::istreambuf_iterator<char>(file), {}};
    const auto again = Model::open_memory(bytes, cpu()).run({{"x", x}}, {"y"});
    CHECK(again.at(0).data<float>()[0] == y[0]);
}

static void errors(const std::string& path) {
    const Model model(path, cpu());
    const Tensor x = Tensor::zeros<float>({1, 4}), wide = Tensor::zeros<float>({1, 5});
    CHECK(throws(PAGODA_STATUS_NOT_FOUND, "path", [] { Model("no such file.onnx"); }));
    CHECK(throws(PAGODA_STATUS_MODEL, "bytes", [] { Model::open_memory(std::vector<std::uint8_t>(64, 1), cpu()); }));
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "inputs[0]", [&] { model.run({{"x", wide}}, {"y"}); }));
    CHECK(throws(PAGODA_STATUS_NOT_FOUND, "input_names[0]", [&] { model.run({{"z", x}}, {"y"}); }));
    CHECK(throws(PAGODA_STATUS_NOT_FOUND, "output_names[0]", [&] { model.run({{"x", x}}, {"z"}); }));
    CHECK(throws(PAGODA_STATUS_NOT_FOUND, "output_names[0]", [&] { model.run_async({{"x", x}}, {"z"}); }));
    ModelOptions options = cpu();
    options.device_id = -1;
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "options.device_id", [&] { Model(path, options); }));
    CHECK(std::string(Error(PAGODA_STATUS_CANCELLED, "").name()) == "CANCELLED" && std::strlen(version()) >= 5);
}

static void strings() {
    // y = x, of strings [n].
    static const char bytes[] =
        "\x08\x08\x12\x00:9\n\x10\n\x01x\x12\x01y\"\x08Identity\x12\x01g"
        "Z\x10\n\x01x\x12\x0b\n\t\x08\x08\x12\x05\n\x03\x12\x01n"
        "b\x10\n\x01y\x12\x0b\n\t\x08\x08\x12\x05\n\x03\x12\x01nB\x04\n\x00\x10\x11";
    const auto* unsigned_bytes = reinterpret_cast<const std::uint8_t*>(bytes);
    const Model model = Model::open_memory({unsigned_bytes, sizeof bytes - 1}, cpu());
    const std::vector<std::string> texts{"", "pagoda", "\u5854", std::string("b\0c", 3)};
    const auto outputs = model.run({{"x", Tensor::strings({4}, texts)}}, {"y"});
    CHECK(outputs.at(0).type() == PAGODA_ELEMENT_TYPE_STRING && outputs[0].size() == 4);
    for (std::size_t i = 0; i < 4; ++i) CHECK(outputs[0].text(i) == texts[i]);
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "index", [&] { outputs[0].text(4); }));
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "count", [] { Tensor::strings({2}, {"a"}); }));
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "values[0]", [] { Tensor::strings({1}, {"\xff"}); }));
}

static void asynchronous(const std::string& path) {
    std::vector<std::future<std::vector<Tensor>>> futures;
    std::atomic<int> released{0};
    std::vector<std::array<float, 4>> memory(50);
    {
        // Model, tensors and lists go while the runs are under way.
        const Model model(path, cpu());
        for (auto& x : memory) {
            const Tensor tensor = Tensor::borrow<float>({1, 4}, x, [&] { ++released; });
            futures.push_back(model.run_async({{"x", tensor}}, {"y"}));
        }
    }
    for (auto& future : futures) CHECK(std::abs(future.get().at(0).data<float>()[1] - 1.0f / 3) < 1e-6);
    CHECK(released == 50);

    const Model model(path, cpu());
    Tensor bound = Tensor::zeros<float>({1, 3});
    CHECK(model.run_async({{"x", Tensor::zeros<float>({1, 4})}}, {}, {{"y", bound}}).get().empty());
    CHECK(std::abs(bound.data<float>()[2] - 1.0f / 3) < 1e-6);
    // A future that is dropped leaves nothing behind.
    model.run_async({{"x", Tensor::zeros<float>({1, 4})}}, {"y"});
}

static void cancelling(const std::string& path) {
    const Model model(path, cpu());
    const Tensor x = Tensor::zeros<float>({1, 4});
    const Cancel cancel;
    CHECK(model.run({{"x", x}}, {"y"}, {}, &cancel).size() == 1);
    cancel.trigger();
    CHECK(throws(PAGODA_STATUS_CANCELLED, "", [&] { model.run({{"x", x}}, {"y"}, {}, &cancel); }));
    auto future = model.run_async({{"x", x}}, {"y"}, {}, &cancel);
    CHECK(throws(PAGODA_STATUS_CANCELLED, "", [&] { future.get(); }));

    // To C one that was moved away would be none.
    Cancel gone;
    const Cancel there = std::move(gone);
    CHECK(throws(PAGODA_STATUS_INVALID_HANDLE, "cancel", [&] { gone.trigger(); }));
    CHECK(throws(PAGODA_STATUS_INVALID_HANDLE, "cancel", [&] { model.run({{"x", x}}, {"y"}, {}, &gone); }));
    CHECK(throws(PAGODA_STATUS_INVALID_HANDLE, "cancel", [&] { model.run_async({{"x", x}}, {"y"}, {}, &gone); }));
    CHECK(model.run({{"x", x}}, {"y"}, {}, &there).size() == 1);
}

// One user's history through the pools: scores, or what the run throws, by a function that runs it.
template <class Run>
static auto ranked(Tensor& pool_0, Tensor& pool_1, std::int32_t cached, std::int32_t page, Run run) {
    return run(std::vector<Input>{{"item_ids", Tensor::from<std::int64_t>({5, 6, 7})},
                                  {"row_offsets", Tensor::from<std::int32_t>({0, 3})},
                                  {"num_candidates", Tensor::from<std::int32_t>({1})},
                                  {"cached_len", Tensor::from<std::int32_t>({cached})},
                                  {"page_indptr", Tensor::from<std::int32_t>({0, 1})},
                                  {"page_ids", Tensor::from<std::int32_t>({page})},
                                  {"kv_pool_0", pool_0},
                                  {"kv_pool_1", pool_1}},
               std::vector<Output>{{"kv_pool_0_out", pool_0}, {"kv_pool_1_out", pool_1}});
}

static void remembering(const std::string& path) {
    const Model model(path, cpu());
    Tensor pool_0 = Tensor::zeros<float>({2, 2, 8, 2, 32}), pool_1 = Tensor::zeros<float>({2, 2, 8, 2, 32});
    const auto now = [&](const auto& inputs, const auto& pools) { return model.run(inputs, {"scores"}, pools); };
    const auto later = [&](const auto& inputs, const auto& pools) {
        return model.run_async(inputs, {"scores"}, pools);
    };
    const auto first = ranked(pool_0, pool_1, 0, 1, now);
    CHECK(first.at(0).size() == 3);
    const auto pool = pool_0.data<float>();
    CHECK(pool[0] == 0 && pool[pool.size() / 2] != 0);  // page 1 was written in place, page 0 was not
    const auto second = ranked(pool_0, pool_1, 2, 1, later).get();
    CHECK(second.at(0).data<float>()[2] != first.at(0).data<float>()[2]);  // the memory counts

    // Right by names, types and shapes, wrong by its numbers: the run itself fails.
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "", [&] { ranked(pool_0, pool_1, 0, 9, now); }));
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "", [&] { ranked(pool_0, pool_1, 0, 9, later).get(); }));
}

// A folder of its own, and nothing of it is left afterwards.
struct Folder {
    std::string path = (std::filesystem::temp_directory_path() / "pagoda-XXXXXX").string();
    Folder() { if (!mkdtemp(&path[0])) throw std::runtime_error("no folder"); }
    ~Folder() { std::filesystem::remove_all(path); }
};

static KvOptions shape() {
    KvOptions options;
    options.layers = options.heads = 2;
    options.head_size = 32;
    options.page_size = 8;
    options.size = KvSize::pages(16);
    return options;
}

// Rows of two numbers, the key and its negative, for the keys 1 to 4; in HugeCTR's format.
static void write_table(const std::string& folder) {
    std::ofstream keys(folder + "/key", std::ios::binary), rows(folder + "/emb_vector", std::ios::binary);
    for (std::int64_t key = 1; key <= 4; ++key) {
        const float row[] = {static_cast<float>(key), -static_cast<float>(key)};
        keys.write(reinterpret_cast<const char*>(&key), sizeof key);
        rows.write(reinterpret_cast<const char*>(row), sizeof row);
    }
}

static void embedding() {
    const Folder folder;
    write_table(folder.path);
    const std::string model = R"("sparse_files": ["."], "embedding_table_names": ["t"], "embedding_vecsize_per_table": [2],
        "default_value_for_each_table": [[7, 8]], "gpucacheper": 1.0, "hit_rate_threshold": 1.0})";
    const std::string path = folder.path + "/ps.json";
    std::ofstream(path) << R"({"models": [{"model": "m", )" << model << "]}";
    CHECK(Embeddings::estimate(path).memory > 0);
    const Embeddings tables(path);
    CHECK(tables.dim("m/t") == 2);
    const std::vector<std::int64_t> keys = {2, 9, 2, 4};
    const EmbeddingRows rows = tables.lookup("t", keys, {PAGODA_MISS_WAIT, {}});
    CHECK((rows.numbers == std::vector<float>{2, -2, 7, 8, 2, -2, 4, -4}));
    CHECK((rows.found == std::vector<std::uint8_t>{1, 0, 1, 1}) && rows.size() == 4 && rows.row(1)[1] == 8);
    std::array<float, 8> into{};
    tables.lookup_into("t", keys, into);
    CHECK(std::equal(into.begin(), into.end(), rows.numbers.begin()));
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "number_count",
                 [&] { tables.lookup_into("t", keys, {into.data(), 7}); }));
    const std::vector<std::int64_t> offsets = {0, 1, 1, 4};
    const EmbeddingRows pooled = tables.pool("t", keys, offsets, PAGODA_COMBINER_MEAN);
    CHECK((pooled.numbers == std::vector<float>{2, -2, 0, 0, (7.f + 2 + 4) / 3, (8.f - 2 - 4) / 3}));
    const std::vector<float> changed = {5, 5};
    tables.upsert("t", 1, {keys.data(), 1}, changed);
    CHECK(tables.lookup("t", {keys.data(), 1}).numbers == changed);
    tables.remove("t", 2, {keys.data(), 1});
    CHECK(tables.lookup("t", {keys.data(), 1}).found[0] == 0);
    tables.add("{\"model\": \"n\", " + model, folder.path);
    CHECK(tables.prefetch("n/t", keys) <= 3);
    tables.wait();
    tables.refresh("n/t");
    CHECK(tables.stats("t").lookups >= 3);
    tables.retire("n");
    CHECK(throws(PAGODA_STATUS_NOT_FOUND, "table", [&] { tables.dim("n/t"); }));
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "offsets", [&] { tables.pool("t", keys, {keys.data(), 4}, 0); }));
    CHECK(throws(PAGODA_STATUS_NOT_FOUND, "path", [] { Embeddings("/nowhere/ps.json"); }));
}

static void stores() {
    const Folder folder;
    StoreOptions options;
    options.durability = PAGODA_DURABILITY_NONE;
    options.garbage_bytes = 1 << 20;
    {
        const Store store(folder.path, options);
        CHECK(throws(PAGODA_STATUS_BUSY, "path", [&] { Store(folder.path); }));
        store.flush();
        store.compact();
        CHECK(store.stats().owners == 0 && store.stats().write_errors == 0);
    }
    {
        // A cache keeps it open.
        Store store(folder.path, options);
        const KvCache cache(shape(), &store);
        { const Store gone = std::move(store); }
        CHECK(throws(PAGODA_STATUS_INVALID_HANDLE, "options.store", [&] { KvCache(shape(), &store); }));
        CHECK(throws(PAGODA_STATUS_BUSY, "path", [&] { Store(folder.path); }));
    }
    { const Store again(folder.path); }
    options.durability = 9;
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "options.durability", [&] { Store(folder.path, options); }));
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "path", [] { Store(""); }));
}

// Pages of a prompt that other owners begin with.
static void forks() {
    const KvCache cache(shape());
    cache.prepare({{1, 0, 20, 0, {}}}).commit();
    CHECK(cache.fork(1, 2, 20) == 16 && cache.fork(1, 3, 9) == 8);
    CHECK(cache.fork(1, 4, 7) == 0 && cache.fork(5, 6, 8) == 0);
    CHECK(cache.lookup(2).length == 16 && cache.lookup(3).length == 8 && cache.lookup(4).length == 0);
    const KvStats stats = cache.stats();
    CHECK(stats.shared_pages == 2 && stats.free_pages == stats.pages - 3 && stats.resident_owners == 3);
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "to", [&] { cache.fork(1, 2, 8); }));
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "tokens", [&] { cache.fork(1, 7, -1); }));
    cache.prepare({{2, 16, 1, 0, {}}}).commit();
    CHECK(cache.lookup(2).length == 17 && cache.lookup(1).length == 20);
    CHECK(cache.stats().free_pages == stats.free_pages - 1);
    CHECK(cache.evict_all(PAGODA_TIERS_ALL) == 3 && cache.stats().free_pages == stats.pages);
}

static void caches() {
    const Folder folder;
    const Store store(folder.path);
    KvOptions options = shape();
    options.overlap = PAGODA_OVERLAP_TRIM;
    options.edited = PAGODA_EDITED_REFUSE;
    options.offload = PAGODA_OFFLOAD_AT_COMMIT;
    options.model_version = "one";
    const KvCache cache(options, &store);
    const std::vector<std::uint64_t> items{5, 6, 7, 8}, users{1, 2}, no_one;

    KvLease lease = cache.prepare({{1, 0, 3, 2, {items.data(), 3}}, {2, 0, 0, 1, {}}});
    CHECK(lease.row_offsets().data<std::int32_t>()[1] == 5 && lease.num_candidates().data<std::int32_t>()[1] == 1);
    CHECK(lease.cached_len().size() == 2 && lease.page_indptr().data<std::int32_t>()[2] == 1);
    CHECK(lease.page_ids().size() == 1 && lease.ready(1));
    lease.wait();
    lease.wait(1);
    CHECK(throws(PAGODA_STATUS_BUSY, "", [&] { cache.prepare({{1, 0, 3, 0, {items.data(), 3}}}); }));
    lease.commit(true);
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "lease", [&] { lease.commit(); }));
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "lease", [&] { lease.abort(); }));
    CHECK(store.stats().owners == 1);

    KvLease other = cache.prepare({{1, 2, 2, 0, items}});
    const LeasedOwner owner = other.owner(0);
    CHECK(owner.owner == 1 && owner.start == 0 && owner.cached == 3 && owner.tokens == 1 && owner.trimmed == 1);
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "index", [&] { other.owner(1); }));
    lease = std::move(other);
    CHECK(throws(PAGODA_STATUS_INVALID_HANDLE, "lease", [&] { other.wait(); }));
    lease.abort();
    const CachedOwner cached = cache.lookup(1);
    CHECK(cached.start == 0 && cached.length == 3 && cached.tier == PAGODA_TIER_RESIDENT);

    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "requests[1].start",
                 [&] { cache.prepare({{2, 0, 0, 1, {}}, {1, 9, 0, 1, {}}}); }));
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "layer", [&] { cache.pool(2); }));
    CHECK(cache.pool(1).dims().size() == 5);

    cache.flush();
    CHECK(cache.offload_all() == 0 && cache.offload(users) == 0 && cache.offload({}) == 0);
    CHECK(cache.evict(no_one, PAGODA_TIERS_ALL) == 0 && cache.evict({}, PAGODA_TIERS_ALL) == 0);
    CHECK(cache.evict(users, PAGODA_TIERS_RESIDENT) == 1 && cache.stats().free_pages == 16);
    CHECK(cache.lookup(users)[0].tier == PAGODA_TIER_STORE && cache.lookup(no_one).empty());
    CHECK(cache.prefetch(users) == 1);
    cache.prepare({{1, 3, 0, 1, {}}}).wait();
    CHECK(cache.lookup(1).tier == PAGODA_TIER_RESIDENT);
    CHECK(cache.evict_all(PAGODA_TIERS_ALL) == 1 && cache.lookup(1).tier == PAGODA_TIER_NONE);

    for (const KvSize size :
         {KvSize::none(), KvSize::bytes(1), KvSize::percent(0), KvSize::percent(50), KvSize::percent(101)}) {
        options.size = size;
        CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "options.size", [&] { KvCache{options}; }));
    }
    options.size = {};
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "options.size_unit", [&] { KvCache{options}; }));
    options.size = KvSize::percent(50);
    options.device_id = -2;
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "options.device_id", [&] { KvCache{options}; }));
    // A number that no machine has a GPU of.
    options.device_id = 4096;
    CHECK(throws(PAGODA_STATUS_UNSUPPORTED, "options.device_id", [&] { KvCache{options}; }));
    CHECK(throws(PAGODA_STATUS_UNSUPPORTED, "", [] { KvCache(shape()).offload_all(); }));
}

// The pools of a cache through the model.
static void ranking_with_a_cache(const std::string& path) {
    const Model model(path, cpu());
    const KvCache cache(shape());
    Tensor pool_0 = cache.pool(0), pool_1 = cache.pool(1);
    const auto rank = [&](std::int64_t start, const std::vector<std::int64_t>& rows) {
        const auto tokens = static_cast<std::int32_t>(rows.size()) - 1;
        const KvLease lease = cache.prepare({{1, start, tokens, 1, {}}});
        const auto scores = model.run({{"item_ids", Tensor::from(rows)}, {"row_offsets", lease.row_offsets()},
                                       {"num_candidates", lease.num_candidates()}, {"cached_len", lease.cached_len()},
                                       {"page_indptr", lease.page_indptr()}, {"page_ids", lease.page_ids()},
                                       {"kv_pool_0", pool_0}, {"kv_pool_1", pool_1}},
                                      {"scores"}, {{"kv_pool_0_out", pool_0}, {"kv_pool_1_out", pool_1}});
        lease.commit();
        return scores.at(0).data<float>()[rows.size() - 1];
    };
    const float whole = rank(0, {1, 2, 3, 4, 5, 99});
    cache.evict_all(PAGODA_TIERS_RESIDENT);
    rank(0, {1, 2, 3, 99});
    CHECK(std::abs(rank(3, {4, 5, 99}) - whole) < 1e-5);
}

static void logging(const std::string& path) {
    std::atomic<int> lines{0}, wrong{0};
    set_log(PAGODA_LOG_LEVEL_DEBUG, [&](pagoda_log_level level, std::string_view source, std::string_view message) {
        ++lines;
        if (level < PAGODA_LOG_LEVEL_ERROR || level > PAGODA_LOG_LEVEL_DEBUG || source.empty() || message.empty()) ++wrong;
        throw std::runtime_error("must not reach Rust");
    });
    CHECK(throws(PAGODA_STATUS_NOT_FOUND, "path", [] { Model("no such file.onnx"); }));
    { const Model model(path, cpu()); }
    CHECK(lines > 0 && wrong == 0);
    set_log(PAGODA_LOG_LEVEL_OFF, {});
    const int before = lines;
    CHECK(throws(PAGODA_STATUS_NOT_FOUND, "path", [] { Model("no such file.onnx"); }));
    CHECK(lines == before);
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "level", [] { set_log(99, [](auto...) {}); }));
    // Left on at the end of the program.
    set_log(PAGODA_LOG_LEVEL_ERROR, [](auto...) {});
}

// A process of its own, which ends within its log function. The function must be there as long as the log goes to it.
static int end_in_log() {
    static bool ended = false, gone = false;
    struct Witness {
        ~Witness() { gone = true; }
    };
    // Before set_log has statics, so that it is called after they are gone.
    std::atexit([] { std::_Exit(!ended ? 1 : gone ? 2 : 0); });
    set_log(PAGODA_LOG_LEVEL_DEBUG, [witness = std::make_shared<Witness>()](auto...) {
        ended = true;
        std::exit(0);
    });
    CHECK(throws(PAGODA_STATUS_NOT_FOUND, "path", [] { Model("no such file.onnx"); }));
    return 1;
}

static EngineOptions engine_options() {
    EngineOptions options;
    options.model = cpu();
    options.model.intra_op_threads = 1;
    options.kv_size = KvSize::bytes(1 << 20);
    return options;
}

// How many bytes a pagoda_rank_response has in the library; 0: as many as it really has.
static std::uint32_t response_size = 0;

static pagoda_status asked_of_any_version(const pagoda_engine* engine, const pagoda_rank_request* request,
                                          pagoda_rank_callback callback, void* user_data, pagoda_error** error) {
    if (response_size == 0) return pagoda_engine_rank_async(engine, request, callback, user_data, error);
    struct Asked {
        pagoda_rank_callback callback;
        void* user_data;
    };
    const pagoda_rank_callback answered = [](void* to, pagoda_status status, const float* scores, std::size_t count,
                                             const pagoda_rank_response* response, const pagoda_error* failure) {
        const std::unique_ptr<Asked> asked(static_cast<Asked*>(to));
        struct {
            pagoda_rank_response known;
            std::uint64_t more;
        } other;
        // What lies behind the response is not zeros.
        std::memset(&other, 0xff, sizeof other);
        std::memcpy(&other, response, std::min<std::size_t>(response_size, sizeof *response));
        other.known.struct_size = response_size;
        asked->callback(asked->user_data, status, scores, count, &other.known, failure);
    };
    auto asked = std::make_unique<Asked>(Asked{callback, user_data});
    const pagoda_status status = pagoda_engine_rank_async(engine, request, answered, asked.get(), error);
    if (status == PAGODA_STATUS_OK) asked.release();
    return status;
}

static void other_versions(const std::string& folder) {
    const Engine engine(folder, engine_options());
    RankRequest request;
    request.events.keys = {{"item", {3, 7}}, {"genre", {1, 0}}, {"rating", {4, 2}}};
    request.events.times = {1700000000, 1700001000};
    request.user_keys = {{"age", 6}, {"town", 8}};
    request.candidates = {{"item", {5}}, {"genre", {5}}};
    const std::uint32_t size = sizeof(pagoda_rank_response);
    for (const std::uint32_t in_library : {std::uint32_t{offsetof(pagoda_rank_response, queue_ns)}, size, size + 8}) {
        response_size = in_library;
        const RankResponse ranked = engine.rank_async(request).get();
        response_size = 0;
        CHECK(ranked.cached_rows + ranked.computed_rows == 6);
        CHECK(ranked.queue_time.count() >= 0 && ranked.run_time.count() >= 0);
        CHECK(in_library >= size || (ranked.queue_time.count() == 0 && ranked.run_time.count() == 0));
    }
}

static void serving(const std::string& folder) {
    const Engine engine(folder, engine_options());
    CHECK(engine.tasks() == 2 && engine.info().find("\"format\": 1") != std::string::npos);

    RankRequest request;
    request.user = 7;
    request.events.keys = {{"item", {3, 7}}, {"genre", {1, 0}}, {"rating", {4, 2}}};
    request.events.times = {1700000000, 1700001000};
    request.user_keys = {{"age", 6}, {"town", 8}};
    request.candidates = {{"item", {5, 6, 39}}, {"genre", {5, 2, -1}}};
    request.time = 1700002000;
    const RankResponse cold = engine.rank(request);
    CHECK(cold.size() == 3 && cold.tasks == 2 && cold.candidate(2)[1] > 0 && cold.candidate(2)[1] < 1);
    CHECK(cold.cached_rows == 0 && cold.computed_rows == 6);
    CHECK(cold.version.size() == 64 && engine.info().find(cold.version) != std::string::npos);
    const RankResponse warm = engine.rank_async(request).get();
    CHECK(warm.size() == 3 && warm.version == cold.version && warm.cached_rows == 6 && warm.computed_rows == 0);
    for (std::size_t i = 0; i < 6; ++i) CHECK(std::abs(warm.scores[i] - cold.scores[i]) < 1e-4);

    RankRequest more = request;
    more.start = 2;
    more.events.keys = {{"item", {9}}, {"genre", {1}}, {"rating", {0}}};
    more.events.times = {1700001500};
    more.user_keys.clear();
    CHECK(engine.rank(more).cached_rows == 6);
    more.start = 9;
    CHECK(throws(PAGODA_STATUS_NOT_FOUND, "request.start", [&] { engine.rank(more); }));
    CHECK(throws(PAGODA_STATUS_NOT_FOUND, "request.start", [&] { engine.rank_async(more).get(); }));
    RankRequest bad = request;
    bad.candidates.clear();
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "request.candidate_keys", [&] { engine.rank(bad); }));
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "request.candidate_keys", [&] { engine.rank_async(bad); }));
    bad = request;
    bad.timeout = std::chrono::microseconds(-1);
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "request.timeout_us", [&] { engine.rank(bad); }));
    bad = request;
    bad.events.keys[1].second.pop_back();
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "request.event_keys", [&] { engine.rank(bad); }));
    const Cancel cancel;
    cancel.trigger();
    bad = request;
    bad.cancel = &cancel;
    CHECK(throws(PAGODA_STATUS_CANCELLED, "", [&] { engine.rank(bad); }));
    Cancel gone;
    const Cancel there = std::move(gone);
    bad.cancel = &gone;
    CHECK(throws(PAGODA_STATUS_INVALID_HANDLE, "request.cancel", [&] { engine.rank(bad); }));
    CHECK(throws(PAGODA_STATUS_INVALID_HANDLE, "request.cancel", [&] { engine.rank_async(bad); }));

    engine.swap((std::filesystem::path(folder).parent_path() / "second").string());
    const RankResponse swapped = engine.rank(request);
    CHECK(swapped.cached_rows == 0 && swapped.scores[0] != cold.scores[0] && swapped.version != cold.version);
    const std::array<std::uint64_t, 2> users{7, 8};
    CHECK(engine.kv_stats().resident_owners == 1 && engine.kv_stats().pages > engine.kv_stats().free_pages);
    CHECK(engine.unload(users) == 1 && engine.kv_stats().resident_owners == 0 && engine.prefetch(users) == 0);
    CHECK(engine.forget(users) == 1);
    const EngineProvider provider = engine.provider();
    CHECK(provider.provider == PAGODA_PROVIDER_CPU && provider.device_id == -1 && provider.reason.empty());
    CHECK(engine.tables().empty());
    CHECK(throws(PAGODA_STATUS_NOT_FOUND, "table", [&] { engine.table_stats("items"); }));
    CHECK(engine.stats().answered == 4 && engine.stats().failed == 5);
    CHECK(throws(PAGODA_STATUS_NOT_FOUND, "folder", [] { Engine("/nowhere/model"); }));
}

// The folder to swap to when the number of tasks was read; "": none.
static std::string swapped_to;

static pagoda_status tasks_before_a_swap(const pagoda_engine* engine, std::size_t* tasks, pagoda_error** error) {
    const pagoda_status status = pagoda_engine_tasks(engine, tasks, error);
    if (!swapped_to.empty()) pagoda_engine_swap(engine, std::exchange(swapped_to, "").c_str(), nullptr);
    return status;
}

// Swaps between a model of two tasks and one of three while other threads rank: every answer is a whole one of either.
static void swaps_that_change_the_tasks(const std::string& folder) {
    const std::filesystem::path folders = std::filesystem::path(folder).parent_path();
    const Engine engine(folder, engine_options());
    RankRequest request;
    request.events.keys = {{"item", {3, 7}}, {"genre", {1, 0}}, {"rating", {4, 2}}};
    request.events.times = {1700000000, 1700001000};
    request.user_keys = {{"age", 6}, {"town", 8}};
    request.candidates = {{"item", {5, 6, 39}}, {"genre", {5, 2, -1}}};
    request.time = 1700002000;
    // At the worst moment: between the number of tasks and the request.
    for (const char* name : {"three", "gather", "three", "bag"}) {
        swapped_to = (folders / name).string();
        const RankResponse response = engine.rank(request);
        CHECK(swapped_to.empty() && response.tasks == engine.tasks() && response.scores.size() == 3 * response.tasks);
    }
    std::atomic<bool> stop{false};
    std::atomic<int> wrong{0}, with_two{0}, with_three{0};
    std::vector<std::thread> threads;
    for (std::uint64_t user = 1; user <= 3; ++user) {
        threads.emplace_back([&, user] {
            RankRequest mine = request;
            mine.user = user;
            for (std::uint64_t round = 0; !stop; ++round) {
                try {
                    const RankResponse response = round % 4 == 0 ? engine.rank_async(mine).get() : engine.rank(mine);
                    ++(response.tasks == 2 ? with_two : with_three);
                    const bool whole = response.size() == 3 && response.scores.size() == 3 * response.tasks;
                    if (!whole || response.tasks > 3) ++wrong;
                } catch (const Error& error) {
                    std::fprintf(stderr, "a swap failed a request: %s\n", error.what());
                    ++wrong;
                }
            }
        });
    }
    const auto until = [&](const std::atomic<int>& count) {
        const int before = count;
        for (int i = 0; i < 60000 && count < before + 5; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        CHECK(count >= before + 5);
    };
    for (int round = 0; round < 5; ++round) {
        until(with_two);
        engine.swap((folders / "three").string());
        until(with_three);
        engine.swap((folders / "gather").string());
    }
    stop = true;
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == 0);
}

static void tables_of_engines(const std::string& folder) {
    const Folder tiers;
    EngineOptions options = engine_options();
    options.table_tiers_path = tiers.path + "/ps.json";
    CHECK(throws(PAGODA_STATUS_NOT_FOUND, "options.table_tiers_path", [&] { Engine(folder, options); }));
    std::ofstream(options.table_tiers_path) << R"({"models": []})";
    const Engine engine((std::filesystem::path(folder).parent_path() / "bag").string(), options);
    const std::vector<std::string> names = engine.tables();
    CHECK(names.size() == 5 && std::find(names.begin(), names.end(), "items") != names.end());
    CHECK(engine.table_stats("items").cached_rows == 40);
    CHECK(throws(PAGODA_STATUS_NOT_FOUND, "table", [&] { engine.table_stats("nothing"); }));
}

static void options_of_engines(const std::string& folder) {
    EngineOptions options = engine_options();
    options.cuda_graphs = {{8, 0}};
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "options.cuda_graphs[0]", [&] { Engine(folder, options); }));
    options.cuda_graphs = {{1, 384}, {8, 3072, 2048}};
    { const Engine without_a_gpu(folder, options); }
    for (const KvSize size : {KvSize::percent(50), KvSize::percent(101), KvSize{PAGODA_KV_SIZE_UNIT_DEFAULT, 1}}) {
        options.kv_size = size;
        CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "options.kv_size", [&] { Engine(folder, options); }));
    }
    options.kv_size = {99, 1};
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "options.kv_size_unit", [&] { Engine(folder, options); }));
    options.kv_size = KvSize::none();
    { CHECK(Engine(folder, options).kv_stats().pages == 0); }
    options.kv_format = 9;
    CHECK(throws(PAGODA_STATUS_INVALID_ARGUMENT, "options.kv_format", [&] { Engine(folder, options); }));
    // Of 2 layers of a head of 8 f32: 32 bytes, and 12 as int8.
    options.kv_size = KvSize::bytes(1 << 20);
    for (const auto& [format, head] : {std::pair{PAGODA_KV_FORMAT_NATIVE, 32}, std::pair{PAGODA_KV_FORMAT_INT8, 12}}) {
        options.kv_format = format;
        CHECK(Engine(folder, options).kv_stats().pages == std::uint64_t((1 << 20) / (2 * 2 * 8 * head)));
    }
    options = engine_options();
    options.host_bytes = UINT64_MAX;
    CHECK(throws(PAGODA_STATUS_CAPACITY, "options.host_bytes", [&] { Engine(folder, options); }));
}

// A pool with room for two of them: by the time that one comes back, the others have had its pages.
static void host_memory(const std::string& folder) {
    RankRequest request;
    request.events.keys = {{"item", {}}, {"genre", {}}, {"rating", {}}};
    for (std::int64_t i = 0; i < 20; ++i) {
        const std::int64_t keys[] = {i, i % 6, i % 5};
        for (std::size_t feature = 0; feature < 3; ++feature) {
            request.events.keys[feature].second.push_back(keys[feature]);
        }
        request.events.times.push_back(1700000000 + i);
    }
    request.user_keys = {{"age", 6}, {"town", 8}};
    request.candidates = {{"item", {5}}, {"genre", {5}}};
    request.time = 1700002000;
    for (const std::uint64_t host_bytes : {1 << 20, 0}) {
        EngineOptions options = engine_options();
        options.kv_size = KvSize::pages(14);
        options.host_bytes = host_bytes;
        options.remember_bytes = 0;
        const Engine engine(folder, options);
        std::vector<float> scores;
        for (const bool came : {false, true}) {
            for (request.user = 1; request.user <= 6; ++request.user) {
                const RankResponse ranked = engine.rank(request);
                CHECK((ranked.cached_rows > 0) == (came && host_bytes > 0));
                if (scores.empty()) scores = ranked.scores;
                for (std::size_t i = 0; i < scores.size(); ++i) CHECK(std::abs(ranked.scores[i] - scores[i]) < 1e-4);
            }
        }
    }
}

static void versions() {
    CHECK(std::string(version()) == PAGODA_VERSION && version_number() == PAGODA_VERSION_NUMBER);
}

int main(int argc, char** argv) {
    if (argc == 2 && std::strcmp(argv[1], "end-in-log") == 0) return end_in_log();
    if (argc != 4) {
        std::fprintf(stderr, "usage: %s HELLO.onnx MODEL.onnx FOLDER\n", argv[0]);
        return 2;
    }
    try {
        versions();
        types();
        tensors();
        borrowing();
        moving(argv[1]);
        describing(argv[1]);
        running(argv[1]);
        errors(argv[1]);
        strings();
        asynchronous(argv[1]);
        cancelling(argv[1]);
        remembering(argv[2]);
        embedding();
        stores();
        caches();
        forks();
        ranking_with_a_cache(argv[2]);
        serving(argv[3]);
        other_versions(argv[3]);
        options_of_engines(argv[3]);
        tables_of_engines(argv[3]);
        swaps_that_change_the_tasks(argv[3]);
        host_memory(argv[3]);
        logging(argv[1]);
        CHECK(std::system(("'" + std::string(argv[0]) + "' end-in-log").c_str()) == 0);
        const std::string text = metrics();
        CHECK(text.find("# TYPE pagoda_") != std::string::npos && std::strlen(text.c_str()) == text.size());
    } catch (const std::exception& error) {
        std::fprintf(stderr, "it threw: %s\n", error.what());
        ++failures;
    }
    // A future was dropped: its tensor goes when the run is done. And the error of an asynchronous run goes a moment
    // after the future is ready.
    using std::chrono::milliseconds;
    for (int i = 0; i < 500 && live_objects() != 0; ++i) std::this_thread::sleep_for(milliseconds(10));
    CHECK(live_objects() == 0);
    std::printf(failures == 0 ? "pagoda.hpp: all well\n" : "pagoda.hpp: %d failures\n", failures);
    return failures == 0 ? 0 : 1;
}
