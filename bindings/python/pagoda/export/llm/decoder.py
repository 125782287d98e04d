"""What a decoder-only language model is, whatever its architecture's checkpoint calls it. The graph is made from this."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Norm:
    """RMS normalisation by the weight `name`."""

    name: str
    epsilon: float
    plus_one: bool = False
    """The factor is 1 + weight, as Gemma has it."""


@dataclass(frozen=True)
class Linear:
    """A product with the rows of several weights [out, in], one below the other."""

    name: str
    """The name in the graph."""
    parts: tuple[str, ...]
    rows: tuple[int, ...]
    """Rows of each part."""
    inputs: int
    biases: tuple[str, ...] = ()
    """A bias of each part; none: no bias."""
    unit_rows: bool = False
    """Each row is scaled to length 1, as Baichuan 2 does with its head."""

    @property
    def outputs(self):
        return sum(self.rows)


@dataclass(frozen=True)
class Layer:
    """Attention and a gated MLP, each with a residual around it."""

    attention_norm: Norm
    qkv: Linear
    """Rows of all query heads, then all key heads, then all value heads."""
    attention_out: Linear
    mlp_norm: Norm
    gate_up: Linear
    """Rows of the gate projection, then of the up projection."""
    down: Linear
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    after_attention: Norm | None = None
    """Between attention and its residual."""
    after_mlp: Norm | None = None
    window: int = 0
    """Tokens that a row sees, itself included; 0: all."""
    rope: str | None = "rope"
    """The name of the rotation's tables; None: no rotation."""


@dataclass(frozen=True)
class Rope:
    """Tables of a rotation, f32 [positions, pairs], for pairs (i, i + pairs)."""

    positions: int
    pairs: int
    angles: Callable[[np.ndarray], np.ndarray]
    """The angles f64 [n, pairs] of positions f64 [n]."""
    factor: float = 1.0

    def parts(self, function, step=2**14):
        """The table of a function, np.cos or np.sin, in parts: for long contexts it is larger than the weights of a layer.
        Computed in f64, and rounded once."""
        for start in range(0, self.positions, step):
            positions = np.arange(start, min(start + step, self.positions), dtype=np.float64)
            yield (function(self.angles(positions)) * self.factor).astype(np.float32)


@dataclass(frozen=True)
class Decoder:
    architecture: str
    vocab_size: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_size: int
    max_context: int
    layers: tuple[Layer, ...]
    final_norm: Norm
    embedding: str
    """The weight [vocab_size, hidden_size]."""
    head: Linear
    """Its part is the embedding itself where the two are tied."""
    ropes: dict[str, Rope] = field(default_factory=dict)
    slopes: np.ndarray | None = None
    """f32 [heads]: ALiBi."""
    embedding_scale: float = 1.0
    attention_scale: float = 0.0
    """0: 1 / sqrt(head_size)."""
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0
    activation: str = "silu"
    no_f16: str | None = None
    """Why it can not compute in f16."""

    def tensors(self):
        """All weights that are read, with their shapes."""
        shapes = {self.embedding: (self.vocab_size, self.hidden_size)}
        norms = [(self.final_norm, self.hidden_size)]
        linears = [self.head]
        for layer in self.layers:
            linears += [layer.qkv, layer.attention_out, layer.gate_up, layer.down]
            around = (layer.attention_norm, layer.mlp_norm, layer.after_attention, layer.after_mlp)
            norms += [(norm, self.hidden_size) for norm in around]
            norms += [(norm, self.head_size) for norm in (layer.query_norm, layer.key_norm)]
        for linear in linears:
            for part, rows in zip(linear.parts, linear.rows):
                shapes[part] = (rows, linear.inputs)
            for bias, rows in zip(linear.biases, linear.rows):
                shapes[bias] = (rows,)
        return shapes | {norm.name: (size,) for norm, size in norms if norm}
