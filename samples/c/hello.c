/* The smallest program: opens target/demo/hello.onnx (y = softmax(x W), made by samples/make_model.py) and runs it. */
#include <pagoda.h>
#include <stdio.h>

int main(int argc, char **argv) {
    float numbers[4] = {1, 2, 3, 4};
    void *scores = NULL;
    size_t bytes = 0;
    pagoda_model *model = NULL;
    pagoda_tensor *x = NULL, *y = NULL;
    pagoda_error *error = NULL;
    int failed =
        pagoda_model_open(argc > 1 ? argv[1] : "hello.onnx", NULL, &model, &error) ||
        pagoda_tensor_borrow(PAGODA_ELEMENT_TYPE_F32, (int64_t[]){1, 4}, 2, numbers, sizeof numbers, NULL, NULL, &x,
                             &error) ||
        pagoda_model_run(model, (const char *[]){"x"}, &x, 1, (const char *[]){"y"}, &y, 1, NULL, &error) ||
        pagoda_tensor_data(y, &scores, &bytes, &error);
    if (failed) fprintf(stderr, "%s\n", pagoda_error_message(error));
    for (size_t i = 0; i < bytes / sizeof(float); i++) printf("y[%zu] = %.4f\n", i, ((float *)scores)[i]);
    pagoda_error_free(error);
    pagoda_tensor_free(y);
    pagoda_tensor_free(x);
    pagoda_model_free(model);
    return failed;
}
