"""The figures of `pagoda bench decoder` for ONNX Runtime GenAI: `python genai.py FOLDER THREADS`.

Prints tokens per second as JSON: prefill of 512, decode after it, and 8 sequences at once, which GenAI runs as one batch. FOLDER has
model.onnx with GroupQueryAttention, config.json and tokenizer.json."""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime_genai as genai

PROMPT, NEW, SHORT, SEQUENCES, ROUNDS = 512, 64, 16, 8, 5


def describe(folder, threads):
    """genai_config.json of a folder that has config.json: one buffer for past and present, greedy, no end before the last token."""
    config = json.loads((folder / "config.json").read_text())
    layers = {"past_key_names": "past_key_values.%d.key", "past_value_names": "past_key_values.%d.value"}
    present = {"present_key_names": "present.%d.key", "present_value_names": "present.%d.value"}
    names = {name: name for name in ("input_ids", "attention_mask", "position_ids")}
    decoder = {
        "filename": "model.onnx",
        "head_size": config["head_dim"],
        "hidden_size": config["hidden_size"],
        "num_attention_heads": config["num_attention_heads"],
        "num_key_value_heads": config["num_key_value_heads"],
        "num_hidden_layers": config["num_hidden_layers"],
        "inputs": {**names, **layers},
        "outputs": {"logits": "logits", **present},
        "session_options": {"intra_op_num_threads": threads, "provider_options": []},
    }
    never = config["vocab_size"] - 1
    model = {
        "type": "llama",
        "vocab_size": config["vocab_size"],
        "context_length": config["max_position_embeddings"],
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": never,
        "pad_token_id": never,
        "decoder": decoder,
    }
    return {"model": model, "search": {"do_sample": False, "past_present_share_buffer": True}}


def prompt(count, seed):
    return [(1000 + (seed * 7919 + at * 104729) % 40000) for at in range(count)]


def run(model, prompts, new):
    """Seconds for the prompts with their first tokens, and for the others."""
    params = genai.GeneratorParams(model)
    params.set_search_options(max_length=len(prompts[0]) + new, batch_size=len(prompts), do_sample=False)
    generator = genai.Generator(model, params)
    begun = time.perf_counter()
    generator.append_tokens(np.array(prompts, np.int32))
    generator.generate_next_token()
    first = time.perf_counter()
    for at in range(new - 1):
        if generator.is_done():
            raise SystemExit(f"it ended after {at + 1} of {new} tokens")
        generator.generate_next_token()
    return first - begun, time.perf_counter() - first


def measure(model):
    prefill, single, eight = [], [], []
    for turn in range(ROUNDS + 1):
        first, others = run(model, [prompt(PROMPT, turn)], NEW)
        prefill.append(PROMPT / first)
        single.append((NEW - 1) / others)
        _, others = run(model, [prompt(SHORT, 100 + sequence) for sequence in range(SEQUENCES)], 2 * NEW)
        eight.append(SEQUENCES * (2 * NEW - 1) / others)
    # The first round wakes threads and touches weights.
    figures = {"prefill": prefill, "decode": single, "eight": eight}
    return {name: statistics.median(values[1:]) for name, values in figures.items()}


def main(folder, threads):
    with tempfile.TemporaryDirectory() as described:
        for file in folder.iterdir():
            (Path(described) / file.name).symlink_to(file.resolve())
        (Path(described) / "genai_config.json").write_text(json.dumps(describe(folder, threads)))
        print(json.dumps(measure(genai.Model(described))))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
