"""What a reader makes of a checkpoint, whatever its files are: names, shapes and layout are Hugging Face's."""

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


@dataclass
class Blocks:
    """Rows of weights that are quantised in blocks of 32: weight = scale * code + low."""

    codes: npt.NDArray[np.uint8]
    """u8 [rows, K]. 4 bits: 0 to 15; 8 bits: code + 128, so that 128 stands for zero."""
    bits: int
    """4 or 8."""
    scale: npt.NDArray[Any]
    """f16, or f32 where the exporter quantised, [rows, K / 32]."""
    low: npt.NDArray[Any] | None
    """As scale. None: blocks are symmetric, weight = scale * (code - 2**(bits - 1))."""


class Tensor(Protocol):
    """A weight that is read in parts. Nothing of it is in memory before a part is asked for."""

    name: str
    shape: tuple[int, ...]
    type: str
    """f32, f16, bf16, or the name of a GGUF type, such as q4_1."""

    def rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Part of axis 0: f32, f16 or bf16 (ml_dtypes) as it is stored; what is quantised comes as f32."""

    def blocks(self, start: int, stop: int) -> Blocks | None:
        """Part of axis 0 with its exact codes, or None where the tensor is not of q4_0, q4_1 or q8_0."""


@dataclass
class Checkpoint:
    """A model as it was trained."""

    source: str
    """The path, for messages."""
    config: dict[str, Any]
    """Hugging Face's config.json."""
    tensors: dict[str, Tensor]
    """By Hugging Face's name."""
    tokenizer: dict[str, Any]
    """Hugging Face's tokenizer.json."""
    tokenizer_config: dict[str, Any] = field(default_factory=dict)
    """Hugging Face's tokenizer_config.json."""
    generation_config: dict[str, Any] = field(default_factory=dict)
    """Hugging Face's generation_config.json."""
    chat_template: str | None = None
    """Jinja, as Hugging Face's apply_chat_template takes it."""
