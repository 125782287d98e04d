/*
 * A model that remembers. demo-c MODEL.onnx, with the model that samples/make_model.py writes.
 *
 * A recommender reads a user's whole history to score a few candidates. The history hardly changes between two visits,
 * so this program has the model work it out once, keeps what the model's attention needs of it (keys and values, in
 * pages of a pool), and shows that the next visit gets the same scores for a small part of the work.
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
#define PAGE_SIZE 32
#define PAGES ((HISTORY + NEW + PAGE_SIZE - 1) / PAGE_SIZE)
#define ROWS (HISTORY + NEW + CANDIDATES)
#define REPEATS 9

/* What the model remembers of one user: a pool for each layer, and how many items are in it. */
typedef struct {
    pagoda_tensor *pools[LAYERS];
    int32_t length;
} memory;

/* Why the last call failed. One for the program will do, for it has one thread. */
static pagoda_error *error;

/* Every call of Pagoda that may fail goes through here. */
static void check(pagoda_status status) {
    if (status == PAGODA_OK) return;
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
    printf("  %-7s %-15s %s [", role, info->name, pagoda_type_name(info->type));
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

/* An empty memory. The pools are made in the shape that the model asks for. */
static memory memory_new(const pagoda_model *model) {
    memory user = {{NULL}, 0};
    size_t inputs;
    check(pagoda_model_input_count(model, &inputs, &error));
    for (int layer = 0; layer < LAYERS; layer++) {
        pagoda_value_info info = PAGODA_VALUE_INFO_INIT;
        check(pagoda_model_input(model, inputs - LAYERS + layer, &info, &error));
        int64_t dims[] = {PAGES, 2, PAGE_SIZE, info.dims[3], info.dims[4]};
        check(pagoda_tensor_new(PAGODA_TYPE_F32, dims, 5, &user.pools[layer], &error));
    }
    return user;
}

static void memory_free(memory *user) {
    for (int layer = 0; layer < LAYERS; layer++) pagoda_tensor_free(user->pools[layer]);
}

/* A tensor with one dimension over an array of ours. */
static pagoda_tensor *borrow(pagoda_type type, void *data, size_t count, size_t size) {
    pagoda_tensor *tensor;
    check(pagoda_tensor_borrow(type, &(int64_t){(int64_t)count}, 1, data, count * size, NULL, NULL, &tensor, &error));
    return tensor;
}

/*
 * Runs the model for one user on `history` items, which are added to the memory, then `candidates` items, which are
 * not. `scores` gets one number for each of them. A server would run many users at once: the arrays of one element
 * here have one for each user.
 */
static void run(const pagoda_model *model, memory *user, int64_t *items, int32_t history, int32_t candidates,
                float *scores) {
    int32_t rows = history + candidates;
    int32_t row_offsets[] = {0, rows}, page_indptr[] = {0, PAGES}, page_ids[PAGES];
    /* Pages lie anywhere in the pool, wherever some were free. */
    for (int i = 0; i < PAGES; i++) page_ids[i] = PAGES - 1 - i;

    pagoda_tensor *made[] = {
        borrow(PAGODA_TYPE_I64, items, rows, sizeof *items),
        borrow(PAGODA_TYPE_I32, row_offsets, 2, sizeof(int32_t)),
        borrow(PAGODA_TYPE_I32, &candidates, 1, sizeof(int32_t)),
        borrow(PAGODA_TYPE_I32, &user->length, 1, sizeof(int32_t)),
        borrow(PAGODA_TYPE_I32, page_indptr, 2, sizeof(int32_t)),
        borrow(PAGODA_TYPE_I32, page_ids, PAGES, sizeof(int32_t)),
        borrow(PAGODA_TYPE_F32, scores, rows, sizeof *scores),
    };
    const char *input_names[] = {"item_ids",    "row_offsets", "num_candidates", "cached_len",
                                 "page_indptr", "page_ids",    "kv_pool_0",      "kv_pool_1"};
    pagoda_tensor *inputs[] = {made[0], made[1], made[2], made[3], made[4], made[5],
                                     user->pools[0], user->pools[1]};
    /* The pools are inputs and outputs at once: the model adds the new items where the old ones lie. */
    const char *output_names[] = {"scores", "kv_pool_0_out", "kv_pool_1_out"};
    pagoda_tensor *outputs[] = {made[6], user->pools[0], user->pools[1]};

    check(pagoda_model_run(model, input_names, inputs, 8, output_names, outputs, 3, NULL, &error));
    for (size_t i = 0; i < sizeof made / sizeof *made; i++) pagoda_tensor_free(made[i]);
    user->length += history;
}

/* Runs a few times from the same memory and returns the median time: the first run warms up and does not count. */
static double time_ms(const pagoda_model *model, memory *user, int64_t *items, int32_t history, float *scores) {
    double times[REPEATS], sum = 0;
    int count = 0;
    int32_t before = user->length;
    run(model, user, items, history, CANDIDATES, scores);
    /* Not for longer than a second: under valgrind one run takes several. */
    for (; count < REPEATS && sum < 1000; count++) {
        user->length = before;
        double start = now_ms();
        run(model, user, items, history, CANDIDATES, scores);
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

    memory nothing = memory_new(model);
    double slow = time_ms(model, &nothing, items, HISTORY + NEW, recomputed);

    /* What happened at earlier visits: the history came in two parts, each computed once. */
    memory user = memory_new(model);
    run(model, &user, items, 300, 0, remembered);
    run(model, &user, items + 300, HISTORY - 300, 0, remembered);
    double fast = time_ms(model, &user, items + HISTORY, NEW, remembered);

    printf("                                           rows computed      time\n");
    printf("  recomputed: history, new, candidates     %13d %6.2f ms\n", ROWS, slow);
    printf("  remembered: only new and candidates      %13d %6.2f ms   %.0f times as fast\n", NEW + CANDIDATES, fast,
           slow / fast);

    double apart = compare(candidates, recomputed + HISTORY + NEW, remembered + NEW);
    int agree = apart <= 1e-4;
    printf("\nThe scores %s: they differ by at most %.0e of the largest one.\n", agree ? "agree" : "DISAGREE", apart);

    memory_free(&user);
    memory_free(&nothing);
    pagoda_model_free(model);
    size_t alive = pagoda_live_objects();
    printf("Everything is freed: %zu objects are left.\n", alive);
    return agree && alive == 0 ? 0 : 1;
}
