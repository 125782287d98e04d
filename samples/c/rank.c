/*
 * Ranks movies for a returning user: rank FOLDER, which has a model and visits.txt (samples/movielens/prepare.py).
 *
 * Each visit sends only what the user did since the last one. What the model made of everything before that is in the
 * engine's cache, so a visit costs what is new, however long the history is.
 */
#include <inttypes.h>
#include <pagoda.h>
#include <stdio.h>
#include <stdlib.h>

enum { MOST = 4096 }; /* events of all visits; visits; candidates */

typedef struct {
    float score;
    size_t index;
} place;

/* What visits.txt says: the events of all visits, one after the other, and where those of each visit end. */
static uint64_t user;
static size_t visits, ends[MOST], candidates;
static int64_t movies[MOST], ratings[MOST], candidate_movies[MOST];
static char titles[MOST][128];

static float scores[MOST * 8];
static place places[MOST];
static pagoda_error *error;

static void fail(const char *what, const char *why) {
    fprintf(stderr, "rank: %s: %s\n", what, why);
    exit(1);
}

static void check(pagoda_status status) {
    if (status != PAGODA_STATUS_OK) fail(pagoda_status_name(status), pagoda_error_message(error));
}

static void read_visits(const char *path) {
    FILE *file = fopen(path, "r");
    if (!file) fail(path, "can not be opened; samples/movielens/prepare.py makes it");
    int good = fscanf(file, "user %" SCNu64, &user) == 1;
    size_t events = 0, count;
    while (good && fscanf(file, " visit %zu", &count) == 1) {
        good = visits < MOST && count <= MOST - events;
        for (size_t end = events + count; good && events < end; events++)
            good = fscanf(file, "%" SCNd64 " %" SCNd64, &movies[events], &ratings[events]) == 2;
        if (good) ends[visits++] = events;
    }
    good = good && fscanf(file, "candidates %zu", &candidates) == 1 && candidates <= MOST;
    for (size_t i = 0; good && i < candidates; i++)
        good = fscanf(file, "%" SCNd64 " %127[^\n]", &candidate_movies[i], titles[i]) == 2;
    fclose(file);
    if (!good) fail(path, "this is not what prepare.py writes; make it anew");
}

static int best_first(const void *left, const void *right) {
    const place *a = left, *b = right;
    if (a->score != b->score) return a->score < b->score ? 1 : -1;
    return a->index > b->index ? 1 : -1;
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
        return 2;
    }
    char path[4096];
    snprintf(path, sizeof path, "%s/visits.txt", argv[1]);
    read_visits(path);
    snprintf(path, sizeof path, "%s/model", argv[1]);
    pagoda_engine *engine = NULL;
    size_t tasks = 0;
    check(pagoda_engine_open(path, NULL, &engine, &error));
    check(pagoda_engine_tasks(engine, &tasks, &error));
    if (candidates * tasks > sizeof scores / sizeof *scores) fail(path, "the model has too many tasks for this sample");

    printf("User %" PRIu64 "\n", user);
    for (size_t visit = 0, start = 0; visit < visits; start = ends[visit++]) {
        pagoda_rank_request request = PAGODA_RANK_REQUEST_INIT;
        pagoda_rank_response response = PAGODA_RANK_RESPONSE_INIT;
        request.user = user;
        request.start = (int64_t)start;
        request.event_count = ends[visit] - start, request.event_feature_count = 2;
        request.event_features = (const char *[]){"movie", "rating"};
        request.event_keys = (const int64_t *[]){movies + start, ratings + start};
        request.candidate_count = candidates, request.candidate_feature_count = 1;
        request.candidate_features = (const char *[]){"movie"};
        request.candidate_keys = (const int64_t *[]){candidate_movies};
        check(pagoda_engine_rank(engine, &request, scores, candidates * tasks, &response, &error));
        printf("  visit %zu: %zu new events, %" PRIu64 " rows remembered, %" PRIu64 " computed\n", visit + 1,
               request.event_count, response.cached_rows, response.computed_rows);
    }
    /* A candidate has a score for each task; this is the first task's. */
    for (size_t i = 0; i < candidates; i++) places[i] = (place){scores[i * tasks], i};
    qsort(places, candidates, sizeof *places, best_first);
    printf("Top ten of %zu movies:\n", candidates);
    for (size_t i = 0; i < 10 && i < candidates; i++)
        printf("  %2zu. %.6f  %s\n", i + 1, places[i].score, titles[places[i].index]);
    pagoda_engine_free(engine);
    return 0;
}
