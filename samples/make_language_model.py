"""Writes a language model with made-up weights, for benchmarks: python make_language_model.py OUT main | draft | 8b | 8b-int4

`main` and `draft` are a pair whose acceptance is known. Both are bigrams: each layer is computed, and adds nothing, so the
likeliest next token depends on the last one alone. After `main` the 256 tokens follow each other in a circle; `draft` knows four
fifths of it. `8b` has the shape of Llama 3 8B, in bf16, with random weights: times do not depend on them. `8b-int4` has them in
blocks of 4 bits.
"""

import json
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from ml_dtypes import bfloat16
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).parent.parent / "bindings/python"))

from pagoda.export import llm, model  # noqa: E402

BYTES = 256
FIRST = "model.layers.0."
RIGHT = 0.8
SHAPES = {
    "main": {"hidden_size": 768, "layers": 8, "heads": 12, "kv_heads": 4, "mlp": 2048, "vocab": BYTES, "context": 2048},
    "draft": {"hidden_size": 128, "layers": 1, "heads": 2, "kv_heads": 1, "mlp": 256, "vocab": BYTES, "context": 2048},
    "8b": {
        "hidden_size": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "mlp": 14336, "vocab": 128256, "context": 8448,
    },
}  # fmt: skip


def config(shape):
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape["hidden_size"],
        "intermediate_size": shape["mlp"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "vocab_size": shape["vocab"],
        "max_position_embeddings": shape["context"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def tokenizer():
    """Bytes are tokens; a larger vocabulary has tokens without a text."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in shown}
    hidden = (byte for byte in range(BYTES) if byte not in letters)
    letters |= {byte: chr(256 + index) for index, byte in enumerate(hidden)}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {"type": "BPE", "vocab": {letters[byte]: byte for byte in range(BYTES)}, "merges": []},
    }


def layer(shape, random, dtype):
    """Matrices that keep the magnitude of what they are multiplied with."""
    size, mlp = shape["hidden_size"], shape["mlp"]
    kv = size // shape["heads"] * shape["kv_heads"]
    shapes = {"self_attn.q_proj": (size, size), "self_attn.k_proj": (kv, size), "self_attn.v_proj": (kv, size)}
    shapes |= {"self_attn.o_proj": (size, size), "mlp.gate_proj": (mlp, size), "mlp.up_proj": (mlp, size)}
    shapes |= {"mlp.down_proj": (size, mlp)}
    made = {
        f"{name}.weight": (random.standard_normal(of, np.float32) * of[1] ** -0.5).astype(dtype)
        for name, of in shapes.items()
    }
    norms = ("input_layernorm", "post_attention_layernorm")
    return made | {f"{name}.weight": np.ones(size, dtype) for name in norms}


def weights(kind):
    """The tensors of a checkpoint whose layers are all the first one."""
    shape = SHAPES[kind]
    dtype = bfloat16 if kind == "8b" else np.float32
    random = np.random.default_rng(7)
    of_layer = layer(shape, random, dtype)
    if kind != "8b":
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            of_layer[name][:] = 0
    made = {f"{FIRST}{name}": value for name, value in of_layer.items()}
    rows = random.standard_normal((shape["vocab"], shape["hidden_size"]), np.float32)
    made["model.embed_tokens.weight"] = rows.astype(dtype)
    made["model.norm.weight"] = np.ones(shape["hidden_size"], dtype)
    made["lm_head.weight"] = rows.astype(dtype) if kind == "8b" else head(rows, kind)
    return made


def head(rows, kind):
    """Gives the token after each token of the circle the largest logit."""
    circle = np.random.default_rng(1).permutation(BYTES)
    after = np.empty(BYTES, int)
    after[circle] = np.roll(circle, -1)
    if kind == "draft":
        wrong = np.random.default_rng(2).permutation(BYTES)[: round(BYTES * (1 - RIGHT))]
        after[wrong] = np.roll(after[wrong], 1)
    head = np.empty_like(rows)
    head[after] = rows
    assert (np.argmax(rows @ head.T, axis=1) == after).all(), "the rows are too much alike"
    return head


class SameLayers(model.Initializers):
    """Weights of the graph. Those of all layers are the same bytes of the file, and tensors of their own once the model is open."""

    def stream(self, name, dtype, shape, parts):
        first = re.sub(r"\blayers\.\d+\.", "layers.0.", name)
        if first in self.tensors:
            self.alias(name, first, shape)
        else:
            super().stream(name, dtype, shape, parts)


def with_all_layers(checkpoint, count):
    tensors = dict(checkpoint.tensors)
    for name, tensor in checkpoint.tensors.items():
        if name.startswith(FIRST):
            tensors |= {name.replace(FIRST, f"model.layers.{index}."): tensor for index in range(1, count)}
    return replace(checkpoint, tensors=tensors)


def main():
    out, kind = Path(sys.argv[1]), sys.argv[2]
    kind, _, stored = kind.partition("-")
    model.Initializers = SameLayers
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        folder = Path(folder)
        (folder / "config.json").write_text(json.dumps(config(SHAPES[kind])))
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer()))
        save_file(weights(kind), folder / "model.safetensors")
        checkpoint = with_all_layers(llm.read(folder), SHAPES[kind]["layers"])
        compute = "bf16" if kind == "8b" else "f32"
        llm.folder.write(checkpoint, out, force=True, compute=compute, weights=stored or "native")


main()
