/* Remembers a user from one run of this program to the next: remember MODEL.onnx FOLDER, with make_model.py's model. */
#include <pagoda.h>
#include <stdio.h>

int main(int argc, char **argv) {
    pagoda_model *model = NULL;
    pagoda_store *store = NULL;
    pagoda_kv_cache *cache = NULL;
    pagoda_kv_lease *lease = NULL;
    pagoda_tensor *in[8] = {NULL}, *out[3] = {NULL};
    pagoda_error *error = NULL;
    if (argc != 3) return 2;
    /* A cache for the keys and values of the model: some of it in memory, all of it in a store on disk. */
    pagoda_kv_options options = PAGODA_KV_OPTIONS_INIT;
    options.layers = options.heads = 2;
    options.head_size = 32;
    options.size_unit = PAGODA_KV_SIZE_UNIT_BYTES, options.size = 4 << 20;
    options.offload = PAGODA_OFFLOAD_AT_COMMIT;
    options.model_version = "1";
    int failed = pagoda_model_open(argv[1], NULL, &model, &error) || pagoda_store_open(argv[2], NULL, &store, &error);
    options.store = store;
    /* What user 7 did since: a whole history at first, three items later. Then an item to score. */
    pagoda_kv_request visit = PAGODA_KV_REQUEST_INIT;
    visit.owner = 7;
    visit.candidates = 1;
    failed = failed || pagoda_kv_cache_open(&options, &cache, &error) ||
             pagoda_kv_cache_lookup(cache, &visit.owner, 1, NULL, &visit.start, NULL, &error);
    visit.tokens = visit.start == 0 ? 500 : 3;
    int64_t items[501], rows = visit.tokens + 1;
    for (int64_t i = 0; i < rows; i++) items[i] = (visit.start + i) * 7919 % 1000;
    items[visit.tokens] = 42;
    float scores[501];
    /* The lease says where the history lies; the model reads it in the pools and adds what is new. */
    failed = failed || pagoda_kv_cache_prepare(cache, &visit, 1, &lease, &error);
    for (int i = 0; i < 5; i++) failed = failed || pagoda_kv_lease_tensor(lease, i, &in[i], &error);
    for (int i = 0; i < 2; i++) failed = failed || pagoda_kv_cache_pool(cache, i, &in[5 + i], &error);
    const char *inputs[] = {"row_offsets", "num_candidates", "cached_len", "page_indptr",
                            "page_ids",    "kv_pool_0",      "kv_pool_1",  "item_ids"};
    const char *outputs[] = {"kv_pool_0_out", "kv_pool_1_out", "scores"};
    out[0] = in[5];
    out[1] = in[6];
    failed = failed ||
             pagoda_tensor_borrow(PAGODA_ELEMENT_TYPE_I64, &rows, 1, items, sizeof items, NULL, NULL, &in[7], &error) ||
             pagoda_tensor_borrow(PAGODA_ELEMENT_TYPE_F32, &rows, 1, scores, sizeof scores, NULL, NULL, &out[2],
                                  &error) ||
             pagoda_model_run(model, inputs, in, 8, outputs, out, 3, NULL, &error) ||
             pagoda_kv_lease_commit(lease, 1, &error); /* on disk when this returns */
    if (failed) fprintf(stderr, "%s\n", pagoda_error_message(error));
    else printf("%d items remembered, %d computed, score %f\n", (int)visit.start, visit.tokens, scores[rows - 1]);
    for (int i = 0; i < 8; i++) pagoda_tensor_free(in[i]);
    pagoda_tensor_free(out[2]);
    pagoda_kv_lease_free(lease);
    pagoda_kv_cache_free(cache);
    pagoda_store_free(store);
    pagoda_model_free(model);
    pagoda_error_free(error);
    return failed;
}
