"""A decoder as an ONNX graph of standard operators, which runs in any ONNX Runtime: it reads pages by Gather and returns the
rows that are new, which the runtime puts into its pages. Of com.microsoft it has MatMulNBits alone, for quantised weights."""

import math

import numpy as np
from onnx import TensorProto

from . import graph
from .graph import LOGITS, MICROSOFT, TYPES

INPUT_IDS, POSITIONS, MASK = "input_ids", "position_ids", "attention_mask"
KEY_SLOTS, VALUE_SLOTS = "key_slots", "value_slots"
MIDDLE = 128.0
"""The code of 8 bits that stands for 0."""


def pool(layer):
    return f"kv_pool.{layer}"


def new_key(layer):
    return f"new_key.{layer}"


def new_value(layer):
    return f"new_value.{layer}"


def build(decoder, weights, compute):
    """The model without its weights, which are added to `weights`."""
    made = _Functional(decoder, weights, compute)
    logits = made.decoder_nodes()
    made.node("Reshape", [logits, made.batched(decoder.vocab_size)], [LOGITS])
    rows, kind = ["batch", "new"], TYPES[compute]
    heads = [decoder.kv_heads, decoder.head_size]
    layers = range(len(decoder.layers))
    inputs = [
        graph.value(INPUT_IDS, TensorProto.INT64, rows),
        graph.value(POSITIONS, TensorProto.INT64, rows),
        graph.value(KEY_SLOTS, TensorProto.INT64, ["batch", "past"]),
        graph.value(VALUE_SLOTS, TensorProto.INT64, ["batch", "past"]),
        graph.value(MASK, TensorProto.BOOL, ["batch", 1, "new", "past_and_new"]),
        *(graph.value(pool(layer), kind, ["rows", *heads]) for layer in layers),
    ]
    outputs = [graph.value(LOGITS, TensorProto.FLOAT, [*rows, decoder.vocab_size])]
    for layer in layers:
        outputs += [graph.value(name, kind, [*rows, *heads]) for name in (new_key(layer), new_value(layer))]
    domains = {node.domain for node in made.nodes if node.domain}
    assert domains <= {MICROSOFT}, domains
    return made.model(inputs, outputs, sorted(domains))


class _Functional(graph.Graph):
    """Between attentions the rows of all sequences are one dimension."""

    ids = "ids"

    def __init__(self, decoder, weights, compute):
        super().__init__(decoder, weights, compute, "native", for_cpu=False)
        self.shared = {}
        self.node("Reshape", [INPUT_IDS, self.integers("one_axis", -1)], [self.ids])

    def once(self, name, make):
        """What several layers use."""
        if name not in self.shared:
            self.shared[name] = make()
        return self.shared[name]

    def integers(self, name, *values):
        return self.constant(name, np.array(values, np.int64))

    def batched(self, *sizes):
        """The shape [batch, new, sizes...]."""
        name = "x".join(map(str, sizes))
        shape = self.once("shape", lambda: self.node("Shape", [INPUT_IDS]))
        return self.once(f"shape_{name}", lambda: self.node("Concat", [shape, self.integers(f"sizes_{name}", *sizes)], axis=0))

    # ---- parts that have operators of their own elsewhere --------------------------------------------------------

    def asked(self, rows):
        return rows

    def residual(self, hidden, added, norm):
        total = hidden if added is None else self.node("Add", [hidden, added])
        return self.norm(total, norm), total

    def gated(self, rows):
        gate, up = (f"{part}_{len(self.nodes)}" for part in ("gate", "up"))
        self.node("Split", [rows], [gate, up], axis=1, num_outputs=2)
        if self.decoder.activation == "silu":
            active = self.node("Mul", [gate, self.node("Sigmoid", [gate])])
        else:
            form = {"gelu": "none", "gelu_tanh": "tanh"}[self.decoder.activation]
            active = self.node("Gelu", [gate], approximate=form)
        return self.node("Mul", [active, up])

    def looked_up(self, stored):
        size = self.decoder.hidden_size
        codes = self.node("Gather", [stored.weight, self.ids], axis=0)
        centred = self.node("Sub", [self.cast(codes, self.compute), self.weights.vector("middle", np.float32(MIDDLE))])
        rows = self.node("Mul", [centred, self.of_blocks(stored.scales)])
        if stored.offsets:
            rows = self.node("Add", [rows, self.of_blocks(stored.offsets)])
        return self.node("Reshape", [rows, self.integers(f"rows_{size}", 0, size)])

    def of_blocks(self, table):
        """A number for each block of the rows that are looked up, [T, blocks, 1]."""
        return self.node("Unsqueeze", [self.node("Gather", [table, self.ids], axis=0), self.integers("last_axis", -1)])

    def cast(self, values, kind):
        return self.node("Cast", [values], to=TYPES[kind])

    # ---- attention -----------------------------------------------------------------------------------------------

    def attention(self, index, layer, rows):
        decoder = self.decoder
        size, heads, kv_heads = decoder.head_size, decoder.heads, decoder.kv_heads
        query, key, value = self.projected(index, layer, rows)
        query = self.rotated(self.node("Reshape", [query, self.batched(heads * size)]), layer.rope, heads)
        key = self.rotated(self.node("Reshape", [key, self.batched(kv_heads * size)]), layer.rope, kv_heads)
        self.node("Reshape", [key, self.batched(kv_heads, size)], [new_key(index)])
        self.node("Reshape", [value, self.batched(kv_heads, size)], [new_value(index)])
        keys = self.with_past(index, KEY_SLOTS, new_key(index))
        values = self.with_past(index, VALUE_SLOTS, new_value(index))
        attributes = {"q_num_heads": heads, "kv_num_heads": kv_heads, "scale": decoder.attention_scale or size**-0.5}
        if decoder.attention_softcap:
            attributes["softcap"] = decoder.attention_softcap
        attended = self.node("Attention", [query, keys, values, self.mask(layer.window)], **attributes)
        return self.node("Reshape", [attended, self.integers("heads_together", -1, heads * size)])

    def with_past(self, index, slots, new):
        """The rows that a sequence reads, past ones first: [batch, past + new, kv_heads * head_size]."""
        past = self.node("Gather", [pool(index), slots], axis=0)
        joined = self.node("Concat", [past, new], axis=1)
        width = self.decoder.kv_heads * self.decoder.head_size
        return self.node("Reshape", [joined, self.integers("kv_heads_together", 0, 0, width)])

    def rotated(self, rows, name, heads):
        """In f32, whatever the rows are: so are the tables."""
        if not name:
            return rows
        cos, sin = self.rotation(name)
        pairs = self.decoder.ropes[name].pairs
        part = {} if 2 * pairs == self.decoder.head_size else {"rotary_embedding_dim": 2 * pairs}
        exact = rows if self.compute == "f32" else self.cast(rows, "f32")
        turned = self.node("RotaryEmbedding", [exact, cos, sin, POSITIONS], num_heads=heads, **part)
        return turned if self.compute == "f32" else self.cast(turned, self.compute)

    def mask(self, window):
        """What the runtime says that a row sees, less what is out of the window; with slopes, scores to be added."""
        seen = MASK
        if window:
            seen = self.once(f"window_{window}", lambda: self.within(window))
        if self.decoder.slopes is None:
            return seen
        return self.once(f"slopes_{window}", lambda: self.sloped(seen))

    def within(self, window):
        near = self.node("Less", [self.distance(), self.integers(f"window.{window}", window)])
        return self.node("And", [MASK, near])

    def sloped(self, seen):
        slopes = self.constant("slopes", self.decoder.slopes.reshape(1, -1, 1, 1))
        back = self.node("Neg", [self.cast(self.distance(), "f32")])
        scores = self.node("Where", [seen, self.node("Mul", [back, slopes]), self.constant("unseen", np.float32(-math.inf))])
        return scores if self.compute == "f32" else self.cast(scores, self.compute)

    def distance(self):
        """How many positions a key is before a row, i64 [batch, 1, new, past + new]. Past keys are in order, from position 0."""
        return self.once("distance", self._distance)

    def _distance(self):
        slots = self.node("Shape", [KEY_SLOTS])
        past = self.node("Gather", [slots, self.constant("one", np.int64(1))], axis=0)
        places = self.node("Range", [self.constant("zero", np.int64(0)), past, self.constant("one", np.int64(1))])
        keys = self.node("Concat", [self.node("Expand", [places, slots]), POSITIONS], axis=1)
        rows = self.node("Unsqueeze", [POSITIONS, self.integers("row_axes", 1, 3)])
        return self.node("Sub", [rows, self.node("Unsqueeze", [keys, self.integers("key_axes", 1, 2)])])
