"""Reads a Hugging Face folder: config.json, safetensors in one file or several, tokenizer and chat template."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from ..error import ExportError
from .checkpoint import Checkpoint

TYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
NUMPY = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
INDEX, ONE = "model.safetensors.index.json", "model.safetensors"


def open_folder(path):
    """The Checkpoint in a folder. Weights are read when their rows are asked for."""
    folder = Path(path)
    tokenizer_config = _json(folder, "tokenizer_config.json", {})
    return Checkpoint(
        source=str(path),
        config=_json(folder, "config.json"),
        tensors=_tensors(folder),
        tokenizer=_json(folder, "tokenizer.json", hint=_tokenizer_hint(folder)),
        tokenizer_config=tokenizer_config,
        generation_config=_json(folder, "generation_config.json", {}),
        chat_template=_template(folder, tokenizer_config),
    )


def _json(folder, name, default=None, hint="the folder has to have it"):
    path = folder / name
    if not path.is_file():
        if default is None:
            raise ExportError(f"{path} is missing: {hint}")
        return default
    _refuse_pointer(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ExportError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ExportError(f"{path} is {type(value).__name__}: it has to be an object")
    return value


def _tokenizer_hint(folder):
    if (folder / "tokenizer.model").is_file():
        return (
            "the folder has a SentencePiece tokenizer.model alone. Make tokenizer.json of it with transformers: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    return "the folder has to have it"


def _template(folder, tokenizer_config):
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ExportError(f"{file} is not UTF-8: {error}") from None
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default", template)
    if template is not None and not isinstance(template, str):
        raise ExportError(
            f"{folder / 'tokenizer_config.json'}: chat_template is {type(template).__name__}: it has to be a text, or a list with an "
            "entry `default`"
        )
    return template


def _refuse_pointer(path):
    with open(path, "rb") as file:
        if file.read(24) == b"version https://git-lfs.":
            raise ExportError(f"{path} is a pointer of Git LFS, not the file itself: run git lfs pull")


def _tensors(folder):
    index = _json(folder, INDEX, {})
    if not index:
        if not (folder / ONE).is_file():
            other = next((file.name for kind in ("*.bin", "*.pt", "*.pth") for file in folder.glob(kind)), None)
            found = f" There is {other}: save the model again with safe_serialization=True." if other else ""
            raise ExportError(f"{folder} has neither {ONE} nor {INDEX}.{found}")
        return _of_file(folder / ONE)
    places = index.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise ExportError(f"{folder / INDEX} has no weight_map: it has to name the file of each tensor")
    files = {}
    for file in dict.fromkeys(places.values()):
        if Path(file).name != file:
            raise ExportError(f"{folder / INDEX} names {file!r}: files have to be in the folder itself")
        files[file] = _of_file(folder / file)
    tensors = {}
    for name, file in places.items():
        if name not in files[file]:
            raise ExportError(f"{folder / INDEX} says that {name} is in {file}, and it is not: the files do not belong together")
        tensors[name] = files[file][name]
    return tensors


def _of_file(path):
    if not path.is_file():
        raise ExportError(f"{path} is missing: fetch all files of the model")
    _refuse_pointer(path)
    try:
        # Checks the header: types, shapes, and that the tensors fill the file.
        with safe_open(path, "numpy") as file:
            file.keys()
    except SafetensorError as error:
        raise ExportError(f"{path} is damaged or no safetensors file: {error}") from None
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {name: _tensor(path, 8 + size, name, entry) for name, entry in header.items()}


def _tensor(path, start, name, entry):
    kind = TYPES.get(entry["dtype"], entry["dtype"].lower())
    return _Tensor(name, tuple(entry["shape"]), kind, path, start + entry["data_offsets"][0])


@dataclass(frozen=True)
class _Tensor:
    """Rows are read, not mapped: pages of a mapping would count as memory of the process."""

    name: str
    shape: tuple[int, ...]
    type: str
    path: Path
    offset: int

    def rows(self, start, stop):
        if self.type not in NUMPY:
            raise ExportError(f"{self.path}: {self.name} is of type {self.type}: the exporter reads f32, f16 and bf16")
        dtype, inner = np.dtype(NUMPY[self.type]), self.shape[1:]
        row = math.prod(inner)
        read = np.fromfile(self.path, dtype, (stop - start) * row, offset=self.offset + start * row * dtype.itemsize)
        return read.reshape(stop - start, *inner)

    def blocks(self, start, stop):
        return None
