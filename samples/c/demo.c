/*
 * A model that remembers. demo-c MODEL.onnx, with the model that samples/make_model.py writes.
 *
 * A recommender reads a user's whole history to score a few candidates. The history hardly changes between two visits,
 * so this program has the model work it out once, keeps what the model's attention needs of it (keys and values) in a
 * cache, and shows that the next visit gets the same scores for a small part of the work.
 */
#include <math.h>
#include <pagoda.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define HISTORY 500   /* items that the user has seen before */
#define NEW 3         /* items that the user has seen since */
#define CANDIDATES 10 /* items to score */
#define ITEMS 1000    /* items that the model knows */
#define LAYERS 2
#define ROWS (HISTORY + NEW + CANDIDATES)
#define REPEATS 9

/* A model and what it remembers: a cache, and the cache's pools of keys and values, one for each layer. */
typedef struct {
    pagoda_model *model;
    pagoda_kv_cache *cache;
    pagoda_tensor *pools[LAYERS];
} ranker;

/* One visit of a user: items from the position `start` of the history on, then items to score. */
typedef struct {
    uint64_t user;
    int64_t start;
    int64_t *items;
    int32_t new_items, candidates;
} visit;

/* Why the last call failed. One for the program will do, for it has one thread. */
static pagoda_error *error;

/* Every call of Pagoda that may fail goes through here. */
static void check(pagoda_status status) {
    if (status == PAGODA_STATUS_OK) return;
    fprintf(stderr, "%s: %s\n", pagoda_status_name(status), pagoda_error_message(error));
    pagoda_error_free(error);
    exit(1);
}

static double now_ms(void) {
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return now.tv_sec * 1e3 + now.tv_nsec * 1e-6;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print_value(const char *role, const pagoda_value_info *info) {
    printf("  %-7s %-15s %s [", role, info->name, pagoda_element_type_name(info->type));
    for (size_t i = 0; i < info->rank; i++) {
        if (i > 0) printf(", ");
        if (info->dims[i] >= 0) printf("%lld", (long long)info->dims[i]);
        else printf("%s", info->symbols[i][0] != '\0' ? info->symbols[i] : "?");
    }
    printf("]\n");
}

static void print_model(const char *path, const pagoda_model *model) {
    pagoda_provider provider;
    const char *reason;
    check(pagoda_model_provider(model, &provider, &reason, &error));
    printf("Pagoda %s runs %s on the %s.\n", pagoda_version(), path, provider == PAGODA_PROVIDER_CUDA ? "GPU" : "CPU");
    if (reason[0] != '\0') printf("  (Not on a GPU: %s)\n", reason);

    size_t inputs, outputs;
    check(pagoda_model_input_count(model, &inputs, &error));
    check(pagoda_model_output_count(model, &outputs, &error));
    pagoda_value_info info = PAGODA_VALUE_INFO_INIT;
    for (size_t i = 0; i < inputs; i++) {
        check(pagoda_model_input(model, i, &info, &error));
        print_value("input", &info);
    }
    for (size_t i = 0; i < outputs; i++) {
        check(pagoda_model_output(model, i, &info, &error));
        print_value("output", &info);
    }
}

/* A ranker with an empty cache. The keys and values have the shape that the model asks for. */
static ranker ranker_new(pagoda_model *model) {
    ranker made = {model, NULL, {NULL}};
    size_t inputs;
    check(pagoda_model_input_count(model, &inputs, &error));
    pagoda_value_info pool = PAGODA_VALUE_INFO_INIT; /* of the last layer */
    check(pagoda_model_input(model, inputs - 1, &pool, &error));

    pagoda_kv_options options = PAGODA_KV_OPTIONS_INIT;
    options.layers = LAYERS;
    options.heads = (int32_t)pool.dims[3];
    options.head_size = (int32_t)pool.dims[4];
    options.size_unit = PAGODA_KV_SIZE_UNIT_BYTES, options.size = 4 << 20;
    check(pagoda_kv_cache_open(&options, &made.cache, &error));
    for (int i = 0; i < LAYERS; i++) check(pagoda_kv_cache_pool(made.cache, i, &made.pools[i], &error));
    return made;
}

static void ranker_free(ranker *r) {
    for (int i = 0; i < LAYERS; i++) pagoda_tensor_free(r->pools[i]);
    pagoda_kv_cache_free(r->cache);
    pagoda_model_free(r->model);
}

/* A tensor with one dimension over an array of ours. */
static pagoda_tensor *borrow(pagoda_element_type type, void *data, size_t count, size_t size) {
    pagoda_tensor *tensor;
    check(pagoda_tensor_borrow(type, &(int64_t){(int64_t)count}, 1, data, count * size, NULL, NULL, &tensor, &error));
    return tensor;
}

/*
 * Runs the model for one visit; a server would run many at once. `scores` gets a number for each item. What is new
 * becomes part of the user's history if `keep` says so; candidates never do.
 */
static void rank(const ranker *r, const visit *v, int keep, float *scores) {
    pagoda_kv_request request = PAGODA_KV_REQUEST_INIT;
    request.owner = v->user;
    request.start = v->start;
    request.tokens = v->new_items;
    request.candidates = v->candidates;
    pagoda_kv_lease *lease; /* it holds the user's history, and room for what is new */
    check(pagoda_kv_cache_prepare(r->cache, &request, 1, &lease, &error));

    /* The first five are the tensors of the lease, in their order in pagoda.h. */
    const char *input_names[] = {"row_offsets", "num_candidates", "cached_len", "page_indptr",
                                 "page_ids",    "item_ids",       "kv_pool_0",  "kv_pool_1"};
    pagoda_tensor *inputs[8];
    for (int i = 0; i < 5; i++)
        check(pagoda_kv_lease_tensor(lease, PAGODA_KV_TENSOR_ROW_OFFSETS + i, &inputs[i], &error));
    size_t rows = (size_t)(v->new_items + v->candidates);
    inputs[5] = borrow(PAGODA_ELEMENT_TYPE_I64, v->items, rows, sizeof *v->items);
    inputs[6] = r->pools[0];
    inputs[7] = r->pools[1];
    /* The pools are inputs and outputs at once: the model adds the new items where the old ones lie. */
    const char *output_names[] = {"scores", "kv_pool_0_out", "kv_pool_1_out"};
    pagoda_tensor *outputs[] = {borrow(PAGODA_ELEMENT_TYPE_F32, scores, rows, sizeof *scores), r->pools[0],
                                r->pools[1]};

    check(pagoda_model_run(r->model, input_names, inputs, 8, output_names, outputs, 3, NULL, &error));
    check(keep ? pagoda_kv_lease_commit(lease, 0, &error) : pagoda_kv_lease_abort(lease, &error));
    for (int i = 0; i < 6; i++) pagoda_tensor_free(inputs[i]);
    pagoda_tensor_free(outputs[0]);
    pagoda_kv_lease_free(lease);
}

/* Runs a few times and returns the median time: the first run warms up and does not count. */
static double time_ms(const ranker *r, const visit *v, float *scores) {
    double times[REPEATS], sum = 0;
    int count = 0;
    rank(r, v, 0, scores);
    /* Not for longer than a second: under valgrind one run takes several. */
    for (; count < REPEATS && sum < 1000; count++) {
        double start = now_ms();
        rank(r, v, 0, scores);
        times[count] = now_ms() - start;
        sum += times[count];
    }
    qsort(times, count, sizeof *times, ascending);
    return times[count / 2];
}

/* Prints the candidates from the best to the worst and returns how far the two lists of scores are apart. */
static double compare(const int64_t *candidates, const float *recomputed, const float *remembered) {
    double difference = 0, largest = 0;
    int order[CANDIDATES];
    for (int i = 0; i < CANDIDATES; i++) {
        int place = i;
        for (; place > 0 && recomputed[order[place - 1]] < recomputed[i]; place--) order[place] = order[place - 1];
        order[place] = i;
        double apart = fabs((double)recomputed[i] - remembered[i]);
        /* Not fmax, which would pass over a NaN. */
        if (!(apart <= difference)) difference = apart;
        largest = fmax(largest, fabs(recomputed[i]));
    }
    printf("\n  rank   item   score, recomputed   score, remembered\n");
    for (int i = 0; i < CANDIDATES; i++) {
        int best = order[i];
        printf("  %4d  %5lld  %18.6f  %18.6f\n", i + 1, (long long)candidates[best], recomputed[best],
               remembered[best]);
    }
    return difference / largest;
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: %s MODEL.onnx\n", argv[0]);
        return 2;
    }
    pagoda_model *model;
    check(pagoda_abi_check(PAGODA_ABI_VERSION, &error));
    check(pagoda_model_open(argv[1], NULL, &model, &error));
    print_model(argv[1], model);

    int64_t items[ROWS]; /* the history, then what is new, then the candidates */
    for (int i = 0; i < ROWS; i++) items[i] = (i * 7919LL + 17) % ITEMS;
    const int64_t *candidates = items + HISTORY + NEW;
    float recomputed[ROWS], remembered[ROWS];

    printf("\nA user has %d items of history and %d new ones. Which of %d candidates comes next?\n\n", HISTORY, NEW,
           CANDIDATES);

    ranker r = ranker_new(model);
    /* This user is new: everything has to be computed. */
    visit stranger = {1, 0, items, HISTORY + NEW, CANDIDATES};
    double slow = time_ms(&r, &stranger, recomputed);

    /* What happened at earlier visits of this one: the history came in two parts, each computed once. */
    rank(&r, &(visit){2, 0, items, 300, 0}, 1, remembered);
    rank(&r, &(visit){2, 300, items + 300, HISTORY - 300, 0}, 1, remembered);
    visit known = {2, HISTORY, items + HISTORY, NEW, CANDIDATES};
    double fast = time_ms(&r, &known, remembered);

    printf("                                           rows computed      time\n");
    printf("  recomputed: history, new, candidates     %13d %6.2f ms\n", ROWS, slow);
    printf("  remembered: only new and candidates      %13d %6.2f ms   %.0f times as fast\n", NEW + CANDIDATES, fast,
           slow / fast);

    double apart = compare(candidates, recomputed + HISTORY + NEW, remembered + NEW);
    int agree = apart <= 1e-4;
    printf("\nThe scores %s: they differ by at most %.0e of the largest one.\n", agree ? "agree" : "DISAGREE", apart);

    ranker_free(&r);
    size_t alive = pagoda_live_objects();
    printf("Everything is freed: %zu objects are left.\n", alive);
    return agree && alive == 0 ? 0 : 1;
}
