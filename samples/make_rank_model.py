"""Writes the model folder of `pagoda bench rank`: python make_rank_model.py target/bench/rank

A ranking model of a size that is served: 8 HSTU layers (NVIDIA's flavour) of 4 heads with 64 numbers each over rows of
256, an item and an action added up in each row, two tasks. Weights are random: times do not depend on them.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).parent.parent / "bindings/python"))

from pagoda.export import export  # noqa: E402

LAYERS, HEADS, HEAD_SIZE, SIZE, HIDDEN = 8, 4, 64, 256, 128
ITEMS, ACTIONS, HISTORY = 10_000, 8, 4096
CONFIG = {
    "embedding_size": SIZE,
    "block": {"flavour": "nvidia", "layers": LAYERS, "heads": HEADS, "head_size": HEAD_SIZE, "scaling_seqlen": HISTORY},
    "kv": {"page_size": 32, "type": "f32"},
    "tables": {"items": {"rows": ITEMS, "dim": SIZE, "default_row": 0}, "actions": {"rows": ACTIONS, "dim": SIZE}},
    "tokens": {
        "item": {"features": [{"name": "item", "table": "items"}]},
        "action": {"features": [{"name": "action", "table": "actions"}]},
    },
    "positions": {"counted": "from_start", "buckets": HISTORY},
    "head": {
        "mlp": [{"linear": HIDDEN}, "relu", {"linear": 2}],
        "tasks": [{"name": "click", "activation": "sigmoid"}, {"name": "like", "activation": "sigmoid"}],
    },
    "limits": {"max_history": HISTORY, "max_candidates": 1000},
    "lookup": "bag",
}


def weights():
    """Random, of a size that keeps what goes through them at about the size it had."""
    width = HEADS * HEAD_SIZE
    shapes = {"positions.weight": (HISTORY, SIZE), "head.0.weight": (HIDDEN, SIZE), "head.0.bias": (HIDDEN,)}
    shapes |= {"head.2.weight": (2, HIDDEN), "head.2.bias": (2,)}
    shapes |= {"tables.items.rows": (ITEMS, SIZE), "tables.actions.rows": (ACTIONS, SIZE)}
    for layer in range(LAYERS):
        at = f"layers.{layer}"
        shapes |= {f"{at}.uvqk.weight": (4 * width, SIZE), f"{at}.uvqk.bias": (4 * width,)}
        shapes |= {f"{at}.output.weight": (SIZE, width)}
        shapes |= {f"{at}.{norm}.{side}": (SIZE,) for norm in ("input_norm", "output_norm") for side in ("weight", "bias")}
    random = np.random.default_rng(2024)
    made = {}
    for name, shape in shapes.items():
        values = random.standard_normal(shape) / np.sqrt(shape[-1])
        made[name] = (values + ("norm.weight" in name)).astype(np.float32)
    return made


def write(out):
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, config = Path(folder, "weights.safetensors"), Path(folder, "config.json")
        save_file(weights(), checkpoint)
        config.write_text(json.dumps(CONFIG))
        export(checkpoint, config, out, force=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__.splitlines()[0])
    write(Path(sys.argv[1]))
