"""Opens GGUF files with the `gguf` package: metadata as Python values, tensors as parts of the mapped file."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..error import ExportError

MAGIC = b"GGUF"

# A number's type in a file: little-endian, whatever the machine is.
LITTLE = {np.dtype(kind): np.dtype(kind).newbyteorder("<") for kind in "bBhHiIqQefd?"}

# What the package raises on headers that make no sense.
DAMAGED = (ValueError, LookupError, TypeError, ArithmeticError, MemoryError, RecursionError)


@dataclass
class Entry:
    """A tensor as it lies in the file."""

    name: str
    """GGUF's name, such as blk.0.attn_q.weight."""
    shape: tuple[int, ...]
    """Rows first, as numpy and Hugging Face have it; GGUF counts the other way round."""
    kind: Any
    """gguf.GGMLQuantizationType."""
    data: npt.NDArray[Any]
    """The mapped bytes: numbers for f32 and f16, rows of u8 for everything else."""


@dataclass
class File:
    """One GGUF model, all its parts."""

    path: Path
    metadata: dict[str, Any]
    """Values by key. 32-bit floats are the shortest decimal that stands for them, so 1e-05 is 1e-05."""
    entries: dict[str, Entry]

    def error(self, message: str) -> ExportError:
        """An ExportError that begins with the path."""
        return ExportError(f"{self.path}: {message}")


def open_file(path: str | Path) -> File:
    """The metadata and tensors of a file, or of all parts where `path` is the first part of a split model."""
    path = Path(path)
    metadata, entries = _read(path)
    count = metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return File(path, metadata, entries)
    if metadata.get("split.no", 0) != 0:
        raise ExportError(
            f"{path} is part {metadata['split.no'] + 1} of a model in {count} files: give the first one, "
            f"whose name ends in -00001-of-{count:05}.gguf"
        )
    for other in _other_parts(path, count):
        if not other.is_file():
            raise ExportError(f"{path} is the first of {count} files, and {other.name} is not beside it: put it there")
        more = _read(other)[1]
        for name in more:
            if name in entries:
                raise ExportError(f"{other} holds {name}, which an earlier part holds too: fetch the parts again")
        entries.update(more)
    wanted = metadata.get("split.tensors.count", len(entries))
    if wanted != len(entries):
        raise ExportError(
            f"{path}: split.tensors.count says {wanted} tensors, the {count} parts hold {len(entries)}: "
            "the parts are not of one model, fetch them again"
        )
    return File(path, metadata, entries)


def _other_parts(path: Path, count: int) -> list[Path]:
    found = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", path.name)
    if not found or int(found[2]) != count:
        raise ExportError(
            f"{path} is the first part of a model in {count} files, and its name does not say so: parts are found by "
            f"their names, rename it to <name>-00001-of-{count:05}.gguf, the others likewise"
        )
    return [path.with_name(f"{found[1]}-{part:05}-of-{count:05}.gguf") for part in range(2, count + 1)]


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Entry]]:
    _check_head(path)
    try:
        reader = _reader(path)
        metadata = {key: _value(field) for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    except DAMAGED as error:
        raise ExportError(f"{path} is a damaged GGUF file ({error}): fetch it again") from error
    entries = {
        tensor.name: Entry(tensor.name, tuple(reversed(tensor.shape.tolist())), tensor.tensor_type, tensor.data)
        for tensor in reader.tensors
    }
    return metadata, entries


def _check_head(path: Path) -> None:
    if not path.is_file():
        raise ExportError(f"{path} is not a file: give the path of a .gguf file")
    with path.open("rb") as file:
        head = file.read(24)
    if head[:4] != MAGIC:
        raise ExportError(f"{path} is not a GGUF file: it begins with {head[:4]!r}, not with {MAGIC!r}")
    if len(head) < 24:
        raise ExportError(f"{path} was cut: a GGUF file begins with 24 bytes, this one has {len(head)}: fetch it again")
    version = int.from_bytes(head[4:8], "little")
    if version & 0xFFFF == 0:
        raise ExportError(
            f"{path} is a big-endian GGUF file: convert it with llama.cpp's gguf_convert_endian.py little"
        )
    if version not in (2, 3):
        raise ExportError(f"{path} is GGUF of version {version}: versions 2 and 3 are read, convert the model again")


def _reader(path: Path) -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ExportError(
            f"{path}: GGUF files are read with the package gguf, which is not installed: pip install 'pagoda[gguf]'"
        ) from error

    class Reader(gguf.GGUFReader):
        """gguf's own slices past the end of the file without a word; this one says what is missing.

        A header is read in hundreds of thousands of small parts, so a part is one call: a third of the package's time.
        """

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> npt.NDArray[Any]:
            kind, offset, count = LITTLE[np.dtype(dtype)], int(offset), int(count)
            end = offset + kind.itemsize * count
            if end > len(self.data):
                raise ExportError(
                    f"{path} was cut: its header needs byte {end}, the file ends at {len(self.data)}: fetch it again"
                )
            return np.frombuffer(self.data, kind, count, offset)

        def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
            for field in fields:
                self._check_tensor(start_offs, field)
            super()._build_tensors(start_offs, fields)

        def _check_tensor(self, start: int, field: Any) -> None:
            name, (_, _, _, dims, kind, offset) = field.name, field.parts
            known = {int(each): each for each in gguf.GGML_QUANT_SIZES}
            if int(kind[0]) not in known:
                raise ExportError(
                    f"{path}: {name} is of type {int(kind[0])}, which gguf {_version()} does not know: "
                    "upgrade the package gguf"
                )
            block, size = gguf.GGML_QUANT_SIZES[known[int(kind[0])]]
            elements = 1
            for dim in dims.tolist():
                elements *= dim
            if len(dims) == 0 or elements == 0 or dims.tolist()[0] % block:
                raise ExportError(
                    f"{path}: {name} has shape {dims.tolist()}, which {known[int(kind[0])].name} can not have "
                    f"(rows in blocks of {block}): the file is damaged, fetch it again"
                )
            end = start + int(offset[0]) + elements // block * size
            if end > len(self.data):
                raise ExportError(
                    f"{path} was cut: {name} ends at byte {end}, the file at {len(self.data)}: fetch it again"
                )

    return Reader(path)


def _version() -> str:
    from importlib.metadata import version

    return version("gguf")


def _value(field: Any) -> Any:
    from gguf import GGUFValueType

    value = field.contents()
    if field.types[-1] == GGUFValueType.FLOAT32:
        if isinstance(value, list):
            return np.array(value, np.float32)
        return float(str(np.float32(value)))
    return value
