"""Writes a model folder of `pagoda bench rank`: python make_rank_model.py target/bench/rank [gpu-1024 | gpu-512]

Ranking models of realistic sizes: 8 HSTU layers (NVIDIA's flavour) of 4 heads, an item and an action added up in each
row, two tasks. On the CPU heads of 64 numbers over rows of 256, in f32; on a GPU heads of 256 or 128 over rows of 1024 or
512, in bf16. Weights are random: times do not depend on them.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).parent.parent / "bindings/python"))

from pagoda.export import export  # noqa: E402

LAYERS, HEADS, HIDDEN = 8, 4, 128
ITEMS, ACTIONS = 10_000, 8
# The head size, the longest history, and the parts of the configuration that differ.
KINDS = {
    "cpu": (64, 4096, {"kv": {"page_size": 32, "type": "f32"}, "lookup": "bag"}),
    "gpu-1024": (256, 4352, {"kv": {"page_size": 64}, "compute": "bf16", "lookup": "gather"}),
    "gpu-512": (128, 8448, {"kv": {"page_size": 64}, "compute": "bf16", "lookup": "gather"}),
}


def config(head_size, history, others):
    size = HEADS * head_size
    block = {"flavour": "nvidia", "layers": LAYERS, "heads": HEADS, "head_size": head_size, "scaling_seqlen": history}
    return others | {
        "embedding_size": size,
        "block": block,
        "tables": {"items": {"rows": ITEMS, "dim": size, "default_row": 0}, "actions": {"rows": ACTIONS, "dim": size}},
        "tokens": {
            "item": {"features": [{"name": "item", "table": "items"}]},
            "action": {"features": [{"name": "action", "table": "actions"}]},
        },
        "positions": {"counted": "from_start", "buckets": history},
        "head": {
            "mlp": [{"linear": HIDDEN}, "relu", {"linear": 2}],
            "tasks": [{"name": "click", "activation": "sigmoid"}, {"name": "like", "activation": "sigmoid"}],
        },
        "limits": {"max_history": history, "max_candidates": 1000},
    }


def weights(head_size, history):
    """Random weights that keep the magnitude of what they are multiplied with."""
    size = width = HEADS * head_size
    shapes = {"positions.weight": (history, size), "head.0.weight": (HIDDEN, size), "head.0.bias": (HIDDEN,)}
    shapes |= {"head.2.weight": (2, HIDDEN), "head.2.bias": (2,)}
    shapes |= {"tables.items.rows": (ITEMS, size), "tables.actions.rows": (ACTIONS, size)}
    for layer in range(LAYERS):
        at = f"layers.{layer}"
        shapes |= {f"{at}.uvqk.weight": (4 * width, size), f"{at}.uvqk.bias": (4 * width,)}
        shapes |= {f"{at}.output.weight": (size, width)}
        shapes |= {f"{at}.{norm}.{side}": (size,) for norm in ("input_norm", "output_norm") for side in ("weight", "bias")}
    random = np.random.default_rng(2024)
    made = {}
    for name, shape in shapes.items():
        values = random.standard_normal(shape) / np.sqrt(shape[-1])
        made[name] = (values + ("norm.weight" in name)).astype(np.float32)
    return made


def write(out, kind):
    head_size, history, others = KINDS[kind]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, path = Path(folder, "weights.safetensors"), Path(folder, "config.json")
        save_file(weights(head_size, history), checkpoint)
        path.write_text(json.dumps(config(head_size, history, others)))
        export(checkpoint, path, out, force=True)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or (len(sys.argv) == 3 and sys.argv[2] not in KINDS):
        sys.exit(__doc__.splitlines()[0])
    write(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) == 3 else "cpu")
