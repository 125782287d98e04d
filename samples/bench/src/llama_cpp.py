"""The figures of `pagoda bench generate` for llama.cpp, by its Python binding cyllama: `python llama_cpp.py GGUF THREADS`.

Prints tokens per second as JSON: prefill of 512, decode after it, and 8 sequences at once. The weights are requantised to Q4_0,
which is llama.cpp's fastest form."""

import json
import os
import statistics
import sys
import tempfile
import time

from cyllama.llama import llama_cpp

PROMPT, NEW, SEQUENCES, ROUNDS = 512, 64, 8, 3
Q4_0 = 2  # llama_ftype


def context(model, threads, sequences):
    params = llama_cpp.LlamaContextParams()
    params.n_ctx, params.n_batch, params.n_ubatch = 2048, PROMPT, PROMPT
    params.n_seq_max, params.n_threads, params.n_threads_batch = sequences, threads, threads
    return llama_cpp.LlamaContext(model, params, verbose=False)


def decode(context, rows):
    """Runs rows (token, position, sequence, whether its logits are needed). Returns the seconds."""
    batch = llama_cpp.LlamaBatch(n_tokens=len(rows), embd=0, n_seq_max=1, verbose=False)
    for token, position, sequence, logits in rows:
        batch.add(token, position, [sequence], logits)
    begun = time.perf_counter()
    context.decode(batch)
    context.synchronize()
    return time.perf_counter() - begun


def prompt(count, sequence):
    return [(1000 + (sequence * 7919 + at * 104729) % 40000, at, sequence, at == count - 1) for at in range(count)]


def measure(model, threads):
    prefill, single, eight = [], [], []
    for _ in range(ROUNDS + 1):
        alone = context(model, threads, 1)
        prefill.append(PROMPT / decode(alone, prompt(PROMPT, 0)))
        single.append(NEW / sum(decode(alone, [(1000 + at, PROMPT + at, 0, True)]) for at in range(NEW)))
        alone.close()
        together = context(model, threads, SEQUENCES)
        for sequence in range(SEQUENCES):
            decode(together, prompt(16, sequence))
        steps = [decode(together, [(1000 + at, 16 + at, of, True) for of in range(SEQUENCES)]) for at in range(2 * NEW)]
        eight.append(SEQUENCES * 2 * NEW / sum(steps))
        together.close()
    # The first round wakes threads and touches weights.
    figures = {"prefill": prefill, "decode": single, "eight": eight}
    return {name: statistics.median(values[1:]) for name, values in figures.items()}


def main(gguf, threads):
    llama_cpp.disable_logging()
    llama_cpp.ggml_backend_load_all()
    with tempfile.TemporaryDirectory() as folder:
        quantised = os.path.join(folder, "q4_0.gguf")
        params = llama_cpp.LlamaModelQuantizeParams()
        params.ftype, params.allow_requantize, params.nthread = Q4_0, True, threads
        llama_cpp.model_quantize(gguf, quantised, params)
        model = llama_cpp.LlamaModel(quantised, llama_cpp.LlamaModelParams(), verbose=False)
        print(json.dumps(measure(model, threads)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
