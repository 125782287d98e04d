"""Reads the weights: finds every tensor that the configuration calls for, and refuses what does not fit."""

import fnmatch
from pathlib import Path

import ml_dtypes  # noqa: F401  (numpy knows bfloat16 once this is there)
import numpy as np
from safetensors import SafetensorError, safe_open

from . import names as naming
from .config import NAMES, NO_KEY
from ..error import ExportError

FLOATS = ("float64", "float32", "float16", "bfloat16")


class Source:
    """The tensors of a file, each read when it is asked for."""

    def __init__(self, path, names, read):
        self.path, self.names, self._read, self.used = path, set(names), read, set()

    def tensor(self, name):
        self.used.add(name)
        return self._read(name)


def open_file(path):
    path = Path(path)
    if not path.is_file():
        raise ExportError(f"{path} is not a file: give the path of a .safetensors or .pt file")
    if path.suffix == ".safetensors":
        try:
            file = safe_open(path, "numpy")
            return Source(path, file.keys(), file.get_tensor)
        except (SafetensorError, OSError, ValueError) as error:
            raise ExportError(f"{path} is no safetensors file, or is damaged ({error}): write it again") from error
    if path.suffix in (".pt", ".pth"):
        return _open_torch(path)
    raise ExportError(f"{path} ends in {path.suffix!r}: checkpoints end in .safetensors, .pt or .pth")


def _open_torch(path):
    try:
        import torch
    except ImportError as error:
        raise ExportError(
            f"{path}: files of this kind are read with torch, which is not installed: pip install torch, or save the "
            "state dict with safetensors.torch.save_file"
        ) from error
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises what its unpickler and zip reader raise
        raise ExportError(f"{path} can not be read by torch ({error}): save a state dict with torch.save") from error
    # What trainers put around a state dict.
    for key in ("model_state_dict", "state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict):
        raise ExportError(f"{path} holds a {type(state).__name__}: it has to be a state dict, names with their tensors")
    tensors = {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}

    def read(name):
        tensor = tensors[name].detach()
        return (tensor.float() if tensor.is_floating_point() else tensor).cpu().numpy()

    return Source(path, tensors, read)


def weights(config, source):
    """Every tensor but the tables, as float32, by Pagoda's name."""
    wanted = naming.wanted(config)
    for name in config.checkpoint.rename:
        if name not in wanted:
            raise ExportError(f"config.checkpoint.rename.{name}: the configuration calls for no tensor of that name")
    prefix = _prefix(config.checkpoint, source)
    found = {}
    for name, shape in wanted.items():
        place = naming.theirs(config.checkpoint.names, name)
        called, order = place or (None, "same")
        called = config.checkpoint.rename.get(name, called and prefix + called)
        if called is None:
            raise ExportError(
                f"{name}: checkpoints of {config.checkpoint.names} have no such part: say where it is under "
                f"config.checkpoint.rename, or change the configuration to do without"
            )
        array = _floats(source, called, f"for {name}", naming.stored_shape(shape, order))
        found[name] = np.ascontiguousarray(naming.restore(array, order, config.block.heads))
    return found


def table(config, table, source):
    """The rows of a table as float32, and its keys or None."""
    prefix = "" if table.file else _prefix(config.checkpoint, source)
    by_name = naming.table(config.checkpoint.names, table.name)
    source = open_file(table.file) if table.file else source
    rows_name = table.rows_tensor or ("rows" if table.file else by_name and prefix + by_name)
    if rows_name is None:
        raise ExportError(
            f"config.tables.{table.name}: {config.checkpoint.names} keeps tables in more than one way: say which "
            "tensor holds it (rows_tensor), or which file (file)"
        )
    rows = _floats(source, rows_name, f"for the table {table.name}", (table.rows, table.dim))
    keys = None
    if table.keyed:
        keys_name = table.keys_tensor or ("keys" if table.file else f"{prefix}tables.{table.name}.keys")
        keys = _tensor(source, keys_name, f"for the table {table.name}", (table.rows,))
        if keys.dtype != np.int64:
            raise ExportError(f"{source.path}: {keys_name} has elements of {keys.dtype}: keys have to be int64")
        keys = np.ascontiguousarray(keys)
        _check_keys(source, keys_name, keys)
        _check_candidate_keys(config, table, keys)
    if table.file:
        refuse_unused(config, source)
    return rows, keys


def refuse_unused(config, source):
    """Refuses tensors that nothing reads: most often they are a part of the model that the configuration forgot."""
    left = sorted(name for name in source.names - source.used if not _ignored(config.checkpoint, name))
    if left:
        shown = ", ".join(left[:8]) + (f" and {len(left) - 8} more" if len(left) > 8 else "")
        raise ExportError(
            f"{source.path}: the configuration uses all but these tensors: {shown}. If the model needs them, add their "
            'part to the configuration; if not, name them in config.checkpoint.ignore (such as "optimizer.*")'
        )


def _ignored(checkpoint, name):
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in checkpoint.ignore)


def _prefix(checkpoint, source):
    """What stands before the names: some trainers wrap the model."""
    if checkpoint.prefix is not None:
        return checkpoint.prefix
    if "layers.0.uvqk.weight" in checkpoint.rename:
        return ""
    anchor = naming.anchor(checkpoint.names)
    matches = sorted(name for name in source.names if f".{name}".endswith("." + anchor))
    meant = [name for name in matches if not _ignored(checkpoint, name)]
    if len(meant) == 1:
        return meant[0].removesuffix(anchor)
    if meant:
        raise ExportError(
            f"{source.path} has {anchor} {len(meant)} times ({', '.join(meant)}): say which is meant by "
            'config.checkpoint.prefix, the text before it ("" if there is none)'
        )
    if matches:
        raise ExportError(
            f"{source.path}: config.checkpoint.ignore covers every {anchor} there is ({', '.join(matches)}). If one is "
            'meant, set config.checkpoint.prefix to the text before it ("" if there is none)'
        )
    alike = [n for n in NAMES if any(f".{name}".endswith("." + naming.anchor(n)) for name in source.names)]
    hint = f"; it looks like names of {' or '.join(alike)}" if alike else ""
    some = ", ".join(sorted(source.names)[:6]) or "none"
    raise ExportError(
        f"{source.path} has no tensor {anchor}, with which checkpoints of names {checkpoint.names} begin{hint}. Set "
        f"config.checkpoint.names, or say under config.checkpoint.rename what it is called. Tensors there: {some}"
    )


def _floats(source, name, what, shape):
    array = _tensor(source, name, what, shape)
    if array.dtype.name not in FLOATS:
        raise ExportError(
            f"{source.path}: {name} has elements of {array.dtype}: weights are one of {', '.join(FLOATS)}"
        )
    with np.errstate(over="ignore"):  # found below
        # In rows whatever it was: torch keeps transposed views as such, and files are written as memory lies.
        array = array.astype(np.float32, order="C")
    bad = ~np.isfinite(array)
    if bad.any():
        at = tuple(int(axis[0]) for axis in np.nonzero(bad))
        raise ExportError(
            f"{source.path}: {name} {what} has {int(bad.sum())} of {array.size} numbers that are NaN or infinite in "
            f"float32, the first at {list(at)}: train or save it again"
        )
    return array


def _tensor(source, name, what, shape):
    if name not in source.names:
        raise ExportError(
            f"{source.path} has no tensor {name} ({what}, of shape {list(shape)}): save it under that name, or change "
            "the configuration"
        )
    array = source.tensor(name)
    if array.shape != tuple(shape):
        raise ExportError(
            f"{source.path}: {name} ({what}) has the shape {list(array.shape)}, but the configuration makes it "
            f"{list(shape)}: correct the one that is wrong"
        )
    return array


def _check_keys(source, name, keys):
    if (keys == NO_KEY).any():
        raise ExportError(f"{source.path}: {name} has the key -1, which means no key: give that row another one")
    unique, counts = np.unique(keys, return_counts=True)
    if len(unique) != len(keys):
        twin = unique[counts > 1][0]
        raise ExportError(f"{source.path}: {name} has the key {twin} {counts.max()} times: a key may have one row")


def _check_candidate_keys(config, table, keys):
    for feature in config.features:
        key = feature.candidate_key
        if feature.table == table.name and key is not None and key not in keys:
            raise ExportError(
                f"candidate_key of {feature.name} is {key}, which the table {table.name} does not have: give a key of "
                "that table"
            )
