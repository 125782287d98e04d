"""A decoder as an ONNX graph. Rows are jagged: sequence b has rows row_offsets[b] to row_offsets[b + 1], so that one graph
serves prefill, decode and batches of both."""

import math

import numpy as np
from onnx import TensorProto, helper

from .decoder import Linear
from .quantise import BLOCK
from .weights import NUMPY

OPSET, IR_VERSION = 23, 11
PAGODA, MICROSOFT = "ai.pagoda", "com.microsoft"
TYPES = {"f32": TensorProto.FLOAT, "f16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
# Inputs that are indices, i32, with their shapes.
INDICES = {
    "input_ids": ["tokens"],
    "positions": ["tokens"],
    "row_offsets": ["sequences_and_1"],
    "cached_len": ["sequences"],
    "page_indptr": ["sequences_and_1"],
    "page_ids": ["pages_of_sequences"],
    "logits_rows": ["logits_rows"],
}
LOGITS = "logits"
# The largest of each OUTPUT_BLOCK logits of a row, for the likeliest token: an output of the graph for the CPU.
LOGITS_MAX, OUTPUT_BLOCK = "logits_max", 32
# MatMulNBits' accuracy_level: inputs as they are, or rounded to 8 bits in blocks.
EXACT, ROUNDED = 0, 4
# Bytes of a number in a page, and numbers of f16 that describe a block.
FORMATS = {"native": (None, 0), "int8": (1, 2), "int4": (0.5, 2), "fp8": (1, 1)}


def pool(layer):
    return f"kv_pool_{layer}"


def scales(layer):
    return f"kv_scales_{layer}"


def build(decoder, weights, compute, kv_format, page_size, for_cpu=False):
    """The model without its weights, which are added to `weights`. `for_cpu`: with operators that run on the CPU alone."""
    graph = Graph(decoder, weights, compute, kv_format, for_cpu)
    logits = graph.decoder_nodes()
    graph.node("Identity", [logits], [LOGITS])
    inputs = [value(name, TensorProto.INT32, shape) for name, shape in INDICES.items() if name in graph.used]
    outputs = [value(LOGITS, TensorProto.FLOAT, ["logits_rows", decoder.vocab_size])]
    if any(LOGITS_MAX in node.output for node in graph.nodes):
        outputs.append(value(LOGITS_MAX, TensorProto.FLOAT, ["logits_rows", math.ceil(decoder.vocab_size / OUTPUT_BLOCK)]))
    for layer in range(len(decoder.layers)):
        for name, kind, shape in graph.pools(layer, page_size):
            inputs.append(value(name, kind, shape))
            outputs.append(value(f"{name}_out", kind, shape))
    return graph.model(inputs, outputs, (PAGODA, MICROSOFT))


def value(name, kind, shape):
    return helper.make_tensor_value_info(name, kind, shape)


class Graph:
    """Nodes in the making; methods return the names of what they added."""

    ids = "input_ids"
    """The tokens of all rows, in one dimension."""

    def __init__(self, decoder, weights, compute, kv_format, for_cpu):
        self.decoder, self.weights, self.compute, self.kv_format = decoder, weights, compute, kv_format
        self.for_cpu = for_cpu
        self.nodes, self.used = [], {"row_offsets", "cached_len", "page_indptr", "page_ids"}

    def node(self, op, inputs, outputs=None, domain="", **attributes):
        outputs = outputs or [f"{op}_{len(self.nodes)}"]
        self.used.update(name for name in inputs if name in INDICES)
        self.nodes.append(helper.make_node(op, inputs, outputs, domain=domain, **attributes))
        return outputs[0] if len(outputs) == 1 else outputs

    def model(self, inputs, outputs, domains):
        """The nodes so far as a model, with operators of ONNX and of `domains`."""
        made = helper.make_graph(self.nodes, self.decoder.architecture, inputs, outputs)
        opsets = [helper.make_opsetid("", OPSET), *(helper.make_opsetid(domain, 1) for domain in domains)]
        return helper.make_model(made, opset_imports=opsets, ir_version=IR_VERSION, producer_name="pagoda.export")

    def constant(self, name, values):
        if name not in self.weights.initializers.tensors:
            self.weights.initializers.add(name, values)
        return name

    # ---- the whole -----------------------------------------------------------------------------------------------

    def decoder_nodes(self):
        decoder = self.decoder
        hidden, added = self.embedded(), None
        for index, layer in enumerate(decoder.layers):
            normal, hidden = self.residual(hidden, added, layer.attention_norm)
            attended = self.attention(index, layer, normal)
            if index == len(decoder.layers) - 1:
                # Only the rows whose logits are asked for are needed from here on.
                attended, hidden = self.asked(attended), self.asked(hidden)
            added = self.norm(self.linear(attended, layer.attention_out), layer.after_attention)
            normal, hidden = self.residual(hidden, added, layer.mlp_norm)
            wide = self.gated(self.linear(normal, layer.gate_up))
            added = self.norm(self.linear(wide, layer.down), layer.after_mlp)
        normal, _ = self.residual(hidden, added, decoder.final_norm)
        # What a cap makes of logits has other maxima.
        maxima = None if decoder.logits_softcap else LOGITS_MAX
        logits = self.linear(normal, decoder.head, "int8" if self.weights.form == "int4" else None, maxima)
        if self.compute != "f32":
            logits = self.node("Cast", [logits], to=TensorProto.FLOAT)
        return self.capped(logits)

    def asked(self, rows):
        return self.node("Gather", [rows, "logits_rows"], axis=0)

    def gated(self, rows):
        return self.node("Glu", [rows], domain=PAGODA, activation=self.decoder.activation)

    def capped(self, logits):
        cap = self.decoder.logits_softcap
        if not cap:
            return logits
        factor = self.constant("logits_softcap", np.float32(cap))
        return self.node("Mul", [self.node("Tanh", [self.node("Div", [logits, factor])]), factor])

    # ---- parts ---------------------------------------------------------------------------------------------------

    def embedded(self):
        decoder, weights = self.decoder, self.weights
        table = Linear("embedding", (decoder.embedding,), (decoder.vocab_size,), decoder.hidden_size)
        # Rows that are looked up lose more by 4 bits than the bytes are worth.
        stored = weights.matrix(table, "native" if weights.form == "native" else "int8", least=8)
        rows = self.looked_up(stored) if stored.bits else self.node("Gather", [stored.weight, self.ids], axis=0)
        if decoder.embedding_scale == 1:
            return rows
        return self.node("Mul", [rows, weights.vector("embedding_scale", np.float32(decoder.embedding_scale))])

    def looked_up(self, stored):
        """Rows of a table in blocks."""
        size = self.decoder.hidden_size
        name = "embedding.rows"
        self.weights.initializers.alias(name, stored.weight, (self.decoder.vocab_size, size))
        rows = self.node(
            "GatherBlockQuantized",
            [name, self.ids, stored.scales],
            domain=MICROSOFT,
            bits=8,
            block_size=BLOCK,
            gather_axis=0,
            quantize_axis=1,
        )
        if not stored.offsets:
            return rows
        offsets = self.node("Gather", [stored.offsets, self.ids], axis=0)
        offsets = self.node("Unsqueeze", [offsets, self.constant("last_axis", np.array([-1]))])
        blocks = self.node("Add", [self.node("Reshape", [rows, self.blocks(size)]), offsets])
        return self.node("Reshape", [blocks, self.constant(f"rows_{size}", np.array([0, size]))])

    def residual(self, hidden, added, norm):
        """hidden + added, if there is something to add, and the norm of it."""
        if added is None:
            return self.norm(hidden, norm), hidden
        name = f"SkipSimplifiedLayerNormalization_{len(self.nodes)}"
        self.node(
            "SkipSimplifiedLayerNormalization",
            [hidden, added, self.weights.norm(norm)],
            [name, "", "", f"{name}_sum"],
            domain=MICROSOFT,
            epsilon=norm.epsilon,
        )
        return name, f"{name}_sum"

    def norm(self, rows, norm):
        if norm is None:
            return rows
        return self.node("RMSNormalization", [rows, self.weights.norm(norm)], axis=-1, epsilon=norm.epsilon)

    def linear(self, rows, linear, form=None, maxima=None):
        """The product. `maxima`: the name of the output for the largest numbers, where the operator has one."""
        stored = self.weights.matrix(linear, form)
        bias = [self.weights.bias(linear)] if linear.biases else []
        if not stored.bits:
            return self.node("Gemm", [rows, stored.weight, *bias], transB=1)
        if self.for_cpu:
            inputs = [rows, stored.weight, stored.scales, stored.offsets or "", *bias]
            names = [f"BlockLinear_{len(self.nodes)}"] + ([maxima] if maxima else [])
            self.node("BlockLinear", inputs, names, domain=PAGODA)
            return names[0]
        product = self.node(
            "MatMulNBits",
            [rows, stored.weight, stored.scales] + (["", "", *bias] if bias else []),
            domain=MICROSOFT,
            K=linear.inputs,
            N=linear.outputs,
            bits=stored.bits,
            block_size=BLOCK,
            # Rounding makes the KL divergence of 4 bits to f32 six times as large. ONNX Runtime's kernel of 8 bits that does not
            # round is a hundred times slower on the CPU.
            accuracy_level=EXACT if stored.bits == 4 else ROUNDED,
        )
        return self.with_offsets(product, rows, linear, stored) if stored.offsets else product

    def with_offsets(self, product, rows, linear, stored):
        """MatMulNBits has no exact form for blocks with a low end of their own: the sum of a block's inputs times its offset is
        added."""
        blocks = self.node("Reshape", [rows, self.blocks(linear.inputs)])
        sums = self.node("ReduceSum", [blocks, self.constant("last_axis", np.array([-1]))], keepdims=0)
        return self.node("Gemm", [sums, stored.offsets, product], transB=1)

    def blocks(self, size):
        """The shape that cuts rows into blocks."""
        return self.constant(f"blocks_{size}", np.array([0, size // BLOCK, BLOCK]))

    def attention(self, index, layer, rows):
        decoder = self.decoder
        query, key, value = self.projected(index, layer, rows)
        pools, outputs = [pool(index)], [f"attention_{index}", f"{pool(index)}_out"]
        if self.kv_format != "native":
            pools.append(scales(index))
            outputs.append(f"{scales(index)}_out")
        inputs = [query, key, value, "row_offsets", "cached_len", "page_indptr", "page_ids", *pools]
        attributes = self.attention_attributes(layer)
        if layer.rope:
            inputs += [""] * (9 - len(inputs)) + ["positions", *self.rotation(layer.rope)]
            attributes["rotary"] = "half"
        if decoder.slopes is not None:
            inputs += [""] * (15 - len(inputs)) + [self.constant("slopes", decoder.slopes)]
        self.node("PagedAttention", inputs, outputs, domain=PAGODA, **attributes)
        width = decoder.heads * decoder.head_size
        return self.node("Reshape", [outputs[0], self.constant("heads_together", np.array([0, width]))])

    def projected(self, index, layer, rows):
        """Queries, keys and values before their rotation, [T, heads, head_size] each."""
        size, heads, kv_heads = self.decoder.head_size, self.decoder.heads, self.decoder.kv_heads
        packed = self.linear(rows, layer.qkv)
        lengths = self.constant("qkv_lengths", np.array([heads * size, kv_heads * size, kv_heads * size]))
        names = [f"{part}_{index}" for part in ("query", "key", "value")]
        self.node("Split", [packed, lengths], names, axis=1)
        query, key, value = (
            self.node("Reshape", [name, self.constant(f"heads_{count}", np.array([0, count, size]))])
            for name, count in zip(names, (heads, kv_heads, kv_heads))
        )
        return self.norm(query, layer.query_norm), self.norm(key, layer.key_norm), value

    def rotation(self, name):
        """The tables of a rotation, written in parts."""
        rope, initializers = self.decoder.ropes[name], self.weights.initializers
        for part, function in (("cos", np.cos), ("sin", np.sin)):
            if f"{name}.{part}" not in initializers.tensors:
                shape = rope.positions, rope.pairs
                initializers.stream(f"{name}.{part}", np.float32, shape, rope.parts(function))
        return f"{name}.cos", f"{name}.sin"

    def attention_attributes(self, layer):
        decoder = self.decoder
        given = {"scale": decoder.attention_scale, "window": layer.window, "softcap": decoder.attention_softcap}
        attributes = {name: value for name, value in given.items() if value}
        return attributes | ({} if self.kv_format == "native" else {"kv_format": self.kv_format})

    def pools(self, layer, page_size):
        """The pools of a layer: name, type, shape."""
        decoder = self.decoder
        shape = ["pages", 2, page_size, decoder.kv_heads]
        wide, described = FORMATS[self.kv_format]
        if wide is None:
            yield pool(layer), TYPES[self.compute], [*shape, decoder.head_size]
            return
        yield pool(layer), TensorProto.UINT8, [*shape, int(decoder.head_size * wide)]
        yield scales(layer), TensorProto.FLOAT16, [*shape, described]


def bytes_per_token(decoder, compute, kv_format):
    """Bytes that a token takes in all pools."""
    wide, described = FORMATS[kv_format]
    wide = np.dtype(NUMPY[compute]).itemsize if wide is None else wide
    return len(decoder.layers) * 2 * decoder.kv_heads * (math.ceil(decoder.head_size * wide) + 2 * described)
