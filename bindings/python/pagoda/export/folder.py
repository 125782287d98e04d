"""Writes a model folder: model.onnx, tables/, and pagoda.json, which tells an engine all it has to know of them."""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from . import checkpoint, graph, model
from .config import NO_KEY
from .error import ExportError

FORMAT, KIND = 1, "rank"
BYTES = {"f32": 4, "f16": 2, "bf16": 2}


def write(config, source, out, force=False, max_model_bytes=model.MAX_MODEL_BYTES):
    """Makes the folder `out` whole or not at all, and returns what pagoda.json says."""
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise ExportError(f"{out} is a file: give the path of a folder that is to be made")
    if out.is_dir() and any(out.iterdir()) and not (force and (out / "pagoda.json").is_file()):
        hint = "add --force to replace it" if (out / "pagoda.json").is_file() else "give another path"
        raise ExportError(f"{out} exists and is not empty: {hint}")
    out.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        made.chmod(0o755)
        manifest = _fill(made, config, source, max_model_bytes)
        if out.is_dir() and any(out.iterdir()):
            old = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
            os.replace(out, old)
            os.replace(made, out)
            shutil.rmtree(old)
        else:
            os.replace(made, out)
        return manifest
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _fill(folder, config, source, max_model_bytes):
    weights = checkpoint.weights(config, source)
    in_graph, table_files = {}, {}
    for table in config.tables.values():
        rows, keys = checkpoint.table(config, table, source)
        if config.lookup == "gather":
            in_graph[table.name] = _with_default(table, rows)
            continue
        file = f"tables/{table.name}.safetensors"
        (folder / "tables").mkdir(exist_ok=True)
        save_file({"rows": rows} | ({} if keys is None else {"keys": keys}), folder / file)
        # safetensors makes files for their owner alone, and a model is often served by another user.
        (folder / file).chmod(0o644)
        table_files[table.name] = file
    checkpoint.refuse_unused(config, source)
    files = model.write(folder, *graph.build(config, weights, in_graph), max_model_bytes)
    manifest = _manifest(config, table_files)
    manifest["files"] = files | {file: _described(folder / file) for file in table_files.values()}
    # The version is the hash of pagoda.json with zeros in its place. All files' hashes are in there.
    text = json.dumps({"format": FORMAT, "kind": KIND, "version": "0" * 64} | manifest, indent=2) + "\n"
    version = hashlib.sha256(text.encode()).hexdigest()
    text = text.replace("0" * 64, version, 1)
    (folder / "pagoda.json").write_bytes(text.encode())
    return json.loads(text)


def _with_default(table, rows):
    zeros = np.zeros((1, table.dim), np.float32)
    default = zeros if table.default_row is None else rows[table.default_row][None]
    return np.concatenate([rows, default, zeros])


def _described(path):
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


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
