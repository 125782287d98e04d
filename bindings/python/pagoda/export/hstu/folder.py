"""Writes a model folder: model.onnx, tables/, and pagoda.json, which tells an engine all it has to know of them."""

import numpy as np
from safetensors.numpy import save_file

from .. import folder, model
from . import checkpoint, graph
from .config import NO_KEY

KIND = "rank"
BYTES = {"f32": 4, "f16": 2, "bf16": 2}


def write(config, source, out, force=False, max_model_bytes=model.MAX_MODEL_BYTES):
    """Makes the folder `out` whole or not at all, and returns what pagoda.json says."""
    return folder.write(out, force, KIND, lambda made: _fill(made, config, source, max_model_bytes))


def _fill(made, config, source, max_model_bytes):
    weights = checkpoint.weights(config, source)
    in_graph, table_files = {}, {}
    for table in config.tables.values():
        rows, keys = checkpoint.table(config, table, source)
        if config.lookup == "gather":
            in_graph[table.name] = _with_default(table, rows)
            continue
        file = f"tables/{table.name}.safetensors"
        (made / "tables").mkdir(exist_ok=True)
        save_file({"rows": rows} | ({} if keys is None else {"keys": keys}), made / file)
        # safetensors makes files for their owner alone, and a model is often served by another user.
        (made / file).chmod(0o644)
        table_files[table.name] = file
    checkpoint.refuse_unused(config, source)
    files = model.write(made, *graph.build(config, weights, in_graph), max_model_bytes)
    manifest = _manifest(config, table_files)
    manifest["files"] = files | {file: folder.described(made / file) for file in table_files.values()}
    return manifest


def _with_default(table, rows):
    zeros = np.zeros((1, table.dim), np.float32)
    default = zeros if table.default_row is None else rows[table.default_row][None]
    return np.concatenate([rows, default, zeros])


def _manifest(config, table_files):
    block, cached = config.block, config.not_cacheable is None
    begin, event, candidate = sequence(config)
    pools = [f"kv_pool_{layer}" for layer in range(block.layers if cached else 0)]
    rows_most = len(begin) + config.max_history * len(event)
    one_token = 2 * block.layers * block.width * BYTES[config.kv_type]
    return {
        "model": model.MODEL,
        "block": block.flavour,
        "compute": config.compute,
        "embedding_size": config.embedding_size,
        "lookup": config.lookup,
        "no_key": NO_KEY,
        "features": [
            {
                "name": feature.name,
                "source": feature.source,
                "table": feature.table,
                "input": graph.key_input(feature),
                "candidate_key": feature.candidate_key,
            }
            for feature in config.features
        ],
        "tables": [
            {
                "name": table.name,
                "file": table_files.get(table.name),
                "rows": table.rows,
                "dim": table.dim,
                "keyed": table.keyed,
                "default_row": table.default_row,
            }
            for table in config.tables.values()
        ],
        "sequence": {"begin": begin, "event": event, "candidate": candidate, "interleaved": config.interleaved},
        "positions": config.positions.counted if config.positions else None,
        "times": config.times.kind if config.times else None,
        "tasks": [
            {"name": task.name, "index": index, "activation": task.activation}
            for index, task in enumerate(config.tasks)
        ],
        "attention": {
            "layers": block.layers,
            "heads": block.heads,
            "head_size": block.head_size,
            "scaling_seqlen": block.scaling_seqlen,
            "alpha": block.alpha or block.head_size**-0.5,
            "max_attn_len": block.max_attn_len,
            "target_group_size": block.target_group_size,
        },
        "kv": {
            "cache": cached,
            "reason": config.not_cacheable,
            "layers": block.layers,
            "heads": block.heads,
            "head_size": block.head_size,
            "page_size": config.page_size,
            "type": config.kv_type,
            "bytes_per_token": one_token,
        },
        "limits": {
            "max_history": config.max_history,
            "max_candidates": config.max_candidates,
            "max_history_rows": rows_most,
        },
        "inputs": {
            "positions": "positions" if config.positions else None,
            "times": "times" if config.times else None,
            "row_offsets": "row_offsets",
            "num_candidates": "num_candidates",
            "num_contextual": "num_contextual" if config.user_sees_history and not cached else None,
            "cached_len": "cached_len" if cached else None,
            "page_indptr": "page_indptr" if cached else None,
            "page_ids": "page_ids" if cached else None,
            "candidate_rows": "candidate_rows",
            "kv_pools": pools,
        },
        "outputs": {"scores": "scores", "kv_pools": [f"{pool}_out" for pool in pools]},
    }


def sequence(config):
    """The rows that a user, an event and a candidate become: for each row the features that have keys in it."""
    items = [feature.name for feature in config.item.features]
    actions = [feature.name for feature in config.action.features] if config.action else []
    begin = [[feature.name] for feature in config.user.features] if config.user else []
    event = [items, actions] if config.interleaved else [items + actions]
    known = [f.name for f in config.action.features if f.candidate_key is not None] if config.action else []
    return begin, event, [items + known]
