"""What a streamed token costs in Python, beyond what it costs in C: `make build`, and run this in target/venv.

A program in C and one in Python each have a thread that waits for the tokens of a request, one request after the other.
They take turns, so that both see the machine quiet and busy. The figures are the least of all rounds, in microseconds
for each token: the time until the reader has it, and the time of the processor, on all threads.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests/data/generate/llama"
TOKENS, REQUESTS, ROUNDS = 400, 1, 200

C = r"""
#include <pagoda.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

/* A queue with a reader, as Python has one. */
typedef struct { pthread_mutex_t lock; pthread_cond_t more; size_t count; int ended; char text[4096][32]; } queue;

static void on_token(void *data, const pagoda_generate_token *token) {
    queue *q = data;
    pthread_mutex_lock(&q->lock);
    memcpy(q->text[q->count++], token->text, token->text_length < 31 ? token->text_length + 1 : 31);
    pthread_cond_signal(&q->more);
    pthread_mutex_unlock(&q->lock);
}

static void on_end(void *data, pagoda_status status, pagoda_generate_response *response, const pagoda_error *error) {
    queue *q = data;
    (void)error;
    pagoda_generate_response_free(response);
    pthread_mutex_lock(&q->lock);
    q->ended = status ? -1 : 1;
    pthread_cond_signal(&q->more);
    pthread_mutex_unlock(&q->lock);
}

static double now(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

int main(int argc, char **argv) {
    pagoda_model_options model = PAGODA_MODEL_OPTIONS_INIT;
    model.intra_op_threads = 1;
    pagoda_generator_options options = PAGODA_GENERATOR_OPTIONS_INIT;
    options.model = &model;
    pagoda_generator *generator = NULL;
    if (argc != 2 || pagoda_generator_open(argv[1], &options, &generator, NULL)) return 1;
    pagoda_generate_request request = PAGODA_GENERATE_REQUEST_INIT;
    request.tokens = (const uint32_t[]){5, 6}, request.token_count = 2;
    request.do_sample = 0, request.ignore_eos = 1, request.max_new_tokens = %(tokens)d;
    while (getchar() == 10) {
        double wall = now(CLOCK_MONOTONIC), cpu = now(CLOCK_PROCESS_CPUTIME_ID);
        size_t read = 0;
        for (int i = 0; i < %(requests)d; i++) {
            static queue q;
            memset(&q, 0, sizeof q);
            pthread_mutex_init(&q.lock, NULL);
            pthread_cond_init(&q.more, NULL);
            if (pagoda_generator_generate_async(generator, &request, on_token, on_end, &q, NULL)) return 1;
            pthread_mutex_lock(&q.lock);
            for (size_t at = 0; !q.ended || at < q.count;) {
                while (at == q.count && !q.ended) pthread_cond_wait(&q.more, &q.lock);
                for (; at < q.count; at++) read++;
            }
            pthread_mutex_unlock(&q.lock);
            if (q.ended < 0) return 1;
        }
        double count = (double)read;
        printf("[%%f, %%f]\n", (now(CLOCK_MONOTONIC) - wall) / count, (now(CLOCK_PROCESS_CPUTIME_ID) - cpu) / count);
        fflush(stdout);
    }
    return pagoda_generator_free(generator);
}
"""


def in_c(folder):
    """The program in C."""
    source, program = folder / "overhead.c", folder / "overhead"
    source.write_text(C % {"tokens": TOKENS, "requests": REQUESTS})
    release = ROOT / "target/release"
    flags = ["-O2", f"-I{ROOT / 'include'}", f"-L{release}", "-lpagoda", f"-Wl,-rpath,{release}", "-lpthread"]
    subprocess.run(["cc", source, "-o", program, *flags], check=True)
    return [program, FOLDER]


def in_python(read):
    """What the program in C does: a round for each line."""
    import pagoda

    options = pagoda.GeneratorOptions(model=pagoda.ModelOptions(intra_op_threads=1))
    fields = {"tokens": [5, 6], "do_sample": False, "ignore_eos": True, "max_new_tokens": TOKENS}
    with pagoda.Generator(FOLDER, options) as generator:
        for _ in sys.stdin:
            wall, cpu = time.monotonic(), time.process_time()
            count = read(generator, fields)
            print([1e6 * (time.monotonic() - wall) / count, 1e6 * (time.process_time() - cpu) / count], flush=True)


def for_loop(generator, fields):
    return sum(len(token.text) >= 0 for _ in range(REQUESTS) for token in generator.stream(**fields))


def async_for(generator, fields):
    async def read():
        count = 0
        for _ in range(REQUESTS):
            async for _ in generator.stream(**fields):
                count += 1
        return count

    return asyncio.run(read())


def main():
    sys.path.insert(0, str(ROOT / "bindings/python"))
    os.environ.setdefault("PAGODA_LIBRARY", str(ROOT / "target/release/libpagoda.so"))
    if sys.argv[1:]:
        in_python({"for": for_loop, "async for": async_for}[sys.argv[1]])
        return
    with tempfile.TemporaryDirectory() as folder:
        commands = {"C": in_c(Path(folder))} | {name: [sys.executable, __file__, name] for name in ("for", "async for")}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        programs = {name: subprocess.Popen(command, **pipes) for name, command in commands.items()}
        rounds = {name: [] for name in programs}
        for _ in range(ROUNDS):
            for name, program in programs.items():
                print(file=program.stdin, flush=True)
                rounds[name].append(json.loads(program.stdout.readline()))
        for program in programs.values():
            program.communicate()
    least = {name: [min(column) for column in zip(*figures)] for name, figures in rounds.items()}
    for name, (wall, cpu) in least.items():
        more = f"; more than C: {wall - least['C'][0]:.1f} µs, {cpu - least['C'][1]:.1f} µs of processor"
        print(f"{name:10} {wall:7.1f} µs a token, {cpu:7.1f} µs of processor{more if name != 'C' else ''}")


if __name__ == "__main__":
    main()
