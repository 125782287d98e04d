"""Weights of a GGUF file, read in parts: rows as numbers, rows as exact blocks, rows in Hugging Face's order."""

from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .checkpoint import Blocks
from .gguf_file import Entry, File
from ..error import ExportError

FLOATS = ("f32", "f16", "bf16")
Bytes: TypeAlias = npt.NDArray[np.uint8]


class GgufTensor:
    """One tensor of the file.

    `order` gives Hugging Face's rows: row i is row order[i] of the file. `minus_one` takes 1 from every number, in
    f32: llama.cpp's converter adds 1 to Gemma's norms. A number of 0.5 or more, and any that was a bf16 before, is
    the file's again when 1 is added, to the last bit.
    """

    def __init__(
        self, source: File, name: str, entry: Entry, order: npt.NDArray[np.intp] | None = None, minus_one: bool = False
    ) -> None:
        self.name, self.shape, self.type = name, entry.shape, entry.kind.name.lower()
        self._source, self._entry, self._order, self._minus_one = source, entry, order, minus_one
        _check_readable(source, entry)
        if self._minus_one:
            self.type = "f32"

    def rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Part of axis 0: f32, f16 or bf16 as it is stored, f32 for everything else."""
        stored, kind = self._stored(start, stop), self._entry.kind
        name = kind.name.lower()
        numbers: npt.NDArray[Any]
        if name == "bf16":
            numbers = stored.view(ml_dtypes.bfloat16)
        elif name in FLOATS:
            numbers = stored
        else:
            from gguf.quants import dequantize

            # An empty part has no row that could be dequantised.
            numbers = dequantize(stored, kind) if len(stored) else np.empty((0, *self.shape[1:]), np.float32)
        if self._minus_one:
            numbers = numbers.astype(np.float32) - np.float32(1)
        return numbers

    def blocks(self, start: int, stop: int) -> Blocks | None:
        """Part of axis 0 as codes, scales and lows of the file, or None where it is not of q4_0, q4_1 or q8_0."""
        unpack = {"q4_0": _q4_0, "q4_1": _q4_1, "q8_0": _q8_0}.get(self._entry.kind.name.lower())
        if unpack is None or len(self.shape) != 2:
            return None
        return unpack(self._stored(start, stop), self.shape[1])

    def _stored(self, start: int, stop: int) -> npt.NDArray[Any]:
        if not 0 <= start <= stop <= self.shape[0]:
            raise ExportError(f"{self.name} has {self.shape[0]} rows: {start} to {stop} can not be read")
        if self._order is not None:
            return np.asarray(self._entry.data[self._order[start:stop]])
        # A copy, so that nothing outside holds on to pages of the mapped file.
        return np.array(self._entry.data[start:stop], subok=False)


class StackedTensor:
    """Tensors of the file one below the other, as Hugging Face keeps fused projections."""

    def __init__(self, name: str, parts: list[GgufTensor]) -> None:
        self.name, self._parts = name, parts
        self.shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        types = {part.type for part in parts}
        self.type = types.pop() if len(types) == 1 else "f32"

    def rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Part of axis 0; f32 where the tensors are of different types."""
        pieces = [part.rows(*span) for part, span in self._spans(start, stop)]
        if self.type not in ("f16", "bf16"):
            pieces = [piece.astype(np.float32, copy=False) for piece in pieces]
        return np.concatenate(pieces)

    def blocks(self, start: int, stop: int) -> Blocks | None:
        """Part of axis 0, or None where the tensors are not all of one type that is kept exactly."""
        if any(part.type != self.type for part in self._parts):
            return None
        spans = self._spans(start, stop)
        pieces = [piece for part, span in spans if (piece := part.blocks(*span)) is not None]
        if len(pieces) < len(spans):
            return None
        low = None if pieces[0].low is None else np.concatenate([piece.low for piece in pieces])
        codes, scale = (np.concatenate([getattr(piece, field) for piece in pieces]) for field in ("codes", "scale"))
        return Blocks(codes, pieces[0].bits, scale, low)

    def _spans(self, start: int, stop: int) -> list[tuple[GgufTensor, tuple[int, int]]]:
        if not 0 <= start <= stop <= self.shape[0]:
            raise ExportError(f"{self.name} has {self.shape[0]} rows: {start} to {stop} can not be read")
        spans: list[tuple[GgufTensor, tuple[int, int]]] = []
        first = 0
        for part in self._parts:
            begin, end = (min(max(row - first, 0), part.shape[0]) for row in (start, stop))
            if begin < end or part is self._parts[-1] and not spans:
                spans.append((part, (begin, end)))
            first += part.shape[0]
        return spans


def unrotated(heads: int, head_dim: int) -> npt.NDArray[np.intp]:
    """Row order that undoes llama.cpp's permutation of query and key rows.

    In a head of the file, rows 2i and 2i + 1 are Hugging Face's rows i and i + dim/2: rotation there works on
    neighbours. Blocks lie along a row, so the order is exact on quantised tensors too.
    """
    in_head = np.arange(head_dim).reshape(head_dim // 2, 2).T.reshape(-1)
    return (np.arange(heads)[:, None] * head_dim + in_head).reshape(-1)


def _check_readable(source: File, entry: Entry) -> None:
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    name = entry.kind.name.lower()
    if name in FLOATS:
        return
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[entry.kind][1]), np.uint8), entry.kind)
    except NotImplementedError as error:
        raise source.error(
            f"{entry.name} is of type {name}, which the package gguf can not dequantise: "
            "quantise the model to another type, such as Q4_1 or Q8_0"
        ) from error
    if len(entry.shape) != 2:
        raise source.error(f"{entry.name} is of type {name}, shape {list(entry.shape)}: only matrices are quantised")


def _q4_0(stored: Bytes, width: int) -> Blocks:
    blocks = stored.reshape(len(stored), width // 32, 18)
    return Blocks(_nibbles(blocks[..., 2:], width), 4, _halves(blocks, 0), None)


def _q4_1(stored: Bytes, width: int) -> Blocks:
    blocks = stored.reshape(len(stored), width // 32, 20)
    return Blocks(_nibbles(blocks[..., 4:], width), 4, _halves(blocks, 0), _halves(blocks, 2))


def _q8_0(stored: Bytes, width: int) -> Blocks:
    blocks = stored.reshape(len(stored), width // 32, 34)
    # int8 and 128 more is the sign bit turned over.
    codes = (blocks[..., 2:] ^ np.uint8(0x80)).reshape(len(stored), width)
    return Blocks(codes, 8, _halves(blocks, 0), None)


def _nibbles(packed: Bytes, width: int) -> Bytes:
    """The low halves of 16 bytes are codes 0 to 15 of a block, the high halves codes 16 to 31."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=-1).reshape(len(packed), width)


def _halves(blocks: Bytes, at: int) -> npt.NDArray[np.float16]:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]
