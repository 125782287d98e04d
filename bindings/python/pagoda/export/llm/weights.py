"""Stores the weights of a decoder, part by part, in the form that was asked for."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ..error import ExportError
from . import quantise

NUMPY = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
BITS = {"int8": 8, "int4": 4}
# Numbers that are read at once: 16 MB in f32, and several times that while they are quantised.
PART = 2**22


@dataclass(frozen=True)
class Stored:
    """The names of a matrix in the graph."""

    weight: str
    """[N, K] of the compute type, or codes u8 [N, K / 32, …]."""
    bits: int = 0
    """0: native."""
    scales: str | None = None
    offsets: str | None = None
    """[N, K / 32]: what is added to each weight of a block."""


class Weights:
    """Reads tensors of a checkpoint and adds what the graph needs of them to its initializers."""

    def __init__(self, checkpoint, initializers, compute, form, progress):
        self.checkpoint, self.initializers, self.progress = checkpoint, initializers, progress
        self.dtype, self.form = NUMPY[compute], form
        self.matrices = {}

    def vector(self, name, values):
        """Adds a small array of the compute type."""
        if name not in self.initializers.tensors:
            self.initializers.add(name, self._cast(name, values))
        return name

    def norm(self, norm):
        values = self._read(norm.name).astype(np.float32)
        return self.vector(norm.name, values + 1 if norm.plus_one else values)

    def bias(self, linear):
        values = np.concatenate([self._read(name).astype(np.float32) for name in linear.biases])
        return self.vector(f"{linear.name}.bias", values)

    def matrix(self, linear, form=None, least=4):
        """Adds the matrix of a product, in `form` (native, int8, int4) or the one that was asked for, with no fewer bits than
        `least`."""
        form, key = form or self.form, (linear.parts, linear.unit_rows)
        if key not in self.matrices:
            native = form == "native" or linear.inputs % quantise.BLOCK
            self.matrices[key] = self.native(linear) if native else self._quantised(linear, max(BITS[form], least), least)
        return self.matrices[key]

    def native(self, linear):
        """Adds a matrix as it is, in the compute type."""
        name, shape = f"{linear.name}.weight", (linear.outputs, linear.inputs)
        parts = (self._cast(tensor.name, rows) for tensor, rows, _ in self._parts(linear))
        self.initializers.stream(name, self.dtype, shape, parts)
        return Stored(name)

    def _quantised(self, linear, bits, least):
        """Codes go to the file as they come; scales and offsets, much smaller, after them."""
        bits, exact = self._bits(linear, bits, least)
        scales, offsets = [], []

        def parts():
            for tensor, rows, span in self._parts(linear):
                blocks = tensor.blocks(*span) if exact[tensor.name] else self._rounded(tensor, rows, bits)
                blocks = quantise.widened(blocks) if bits == 8 else blocks
                scales.append(blocks.scale.astype(np.float32))
                offset = quantise.offset(blocks)
                offsets.append(np.zeros_like(scales[-1]) if offset is None else offset)
                yield quantise.packed(blocks)

        of_block = linear.inputs // quantise.BLOCK
        stored = Stored(f"{linear.name}.codes", bits, f"{linear.name}.scales", f"{linear.name}.offsets")
        shape = (linear.outputs, of_block, quantise.BLOCK * bits // 8)
        self.initializers.stream(stored.weight, np.uint8, shape, parts())
        self._add(stored.scales, scales, (linear.outputs, of_block))
        if not any(part.any() for part in offsets):
            return Stored(stored.weight, bits, stored.scales)
        self._add(stored.offsets, offsets, (linear.outputs, of_block))
        return stored

    def _add(self, name, parts, shape):
        self.initializers.stream(name, self.dtype, shape, (self._cast(name, part) for part in parts))

    def _rounded(self, tensor, rows, bits):
        values = self._finite(tensor, rows)
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            blocks = quantise.quantised(values, bits, self.dtype)
        if not np.isfinite(blocks.scale).all():
            raise self._not_finite(tensor.name, values)
        return blocks

    def _bits(self, linear, bits, least):
        """The bits of a matrix, which has to have one form, and which of its tensors keep their codes. Tensors that a GGUF
        file has in such blocks keep their values, in the wider form where the parts differ."""
        tensors = [self.checkpoint.tensors[part] for part in linear.parts]
        of_type = {"q4_0": 4, "q4_1": 4, "q8_0": 8}
        exact = {tensor.name: tensor.type in of_type and not linear.unit_rows for tensor in tensors}
        kept = [of_type[tensor.type] for tensor in tensors if exact[tensor.name]]
        return max(kept + [least] + [bits] * (len(kept) < len(tensors))), exact

    def _parts(self, linear):
        """Rows of all tensors in order, as (tensor, rows, (start, stop)). Rows are read only if they are used."""
        step = max(1, PART // linear.inputs)
        for name, count in zip(linear.parts, linear.rows):
            tensor = self.checkpoint.tensors[name]
            for start in range(0, count, step):
                span = start, min(start + step, count)
                yield tensor, _Rows(tensor, span, linear.unit_rows), span
                self.progress.add((span[1] - start) * linear.inputs)

    def _read(self, name):
        tensor = self.checkpoint.tensors[name]
        return tensor.rows(0, tensor.shape[0])

    def _cast(self, name, values):
        values = values.read() if isinstance(values, _Rows) else np.asarray(values)
        with np.errstate(over="ignore"):
            cast = values.astype(self.dtype)
        if not np.isfinite(cast).all():
            raise self._not_finite(name, values)
        return cast

    def _finite(self, tensor, rows):
        values = rows.read().astype(np.float32)
        if not np.isfinite(values).all():
            raise self._not_finite(tensor.name, values)
        return values

    def _not_finite(self, name, values):
        flat = np.asarray(values, np.float32).reshape(-1)
        if not np.isfinite(flat).all():
            worst = flat[~np.isfinite(flat)][0]
            return ExportError(f"{self.checkpoint.source}: {name} has {worst}: weights have to be finite numbers")
        worst = flat[np.abs(flat).argmax()]
        return ExportError(
            f"{self.checkpoint.source}: {name} has {worst:.6g}, which {np.dtype(self.dtype).name} can not hold: export with "
            "--compute bf16 or f32"
        )


@dataclass(frozen=True)
class _Rows:
    """Rows of a tensor that are not read yet."""

    tensor: object
    span: tuple[int, int]
    unit: bool

    def read(self):
        rows = self.tensor.rows(*self.span)
        if not self.unit:
            return rows
        rows = rows.astype(np.float32)
        return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-7)
