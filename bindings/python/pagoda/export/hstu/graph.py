"""The dense part of a model as an ONNX graph over the operators of ai.pagoda."""

import math

import ml_dtypes
import numpy as np
from onnx import TensorProto, helper

from .config import NO_KEY, Step
from ..error import ExportError

OPSET, IR_VERSION, DOMAIN = 17, 8, "ai.pagoda"
TYPES = {"f32": TensorProto.FLOAT, "f16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
NUMPY = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
# HstuEmbed takes no more.
MOST_TABLES = 8
# What HstuLinear does too.
WITH_LINEAR = "relu", "silu", "sigmoid", "tanh"


def key_input(feature):
    return f"keys.{feature.name}"


class Graph:
    """Nodes and weights in the making; every method returns the name of what it added."""

    def __init__(self, config, weights, tables):
        self.config, self.weights, self.tables = config, weights, tables
        self.nodes, self.constants, self.inputs = [], {}, []
        self.about_rows = None

    # ---- small things --------------------------------------------------------------------------------------------

    def node(self, op, inputs, output=None, domain="", **attributes):
        output = output or f"{op}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [output], domain=domain, **attributes))
        return output

    def nodes_of(self, op, inputs, parts, domain="", **attributes):
        """A node with several outputs."""
        names = [f"{op}_{len(self.nodes)}_{part}" for part in range(parts)]
        self.nodes.append(helper.make_node(op, inputs, names, domain=domain, **attributes))
        return names

    def constant(self, name, array):
        known = self.constants.setdefault(name, array)
        assert known is array or (known.dtype == array.dtype and np.array_equal(known, array)), name
        return name

    def number(self, value, dtype=np.float32):
        return self.constant(f"number.{np.dtype(dtype).name}.{value!r}", np.array(value, dtype))

    def axis(self, value):
        return self.constant(f"axis.{value}", np.array([value], np.int64))

    def weight(self, name):
        return self.constant(name, self.weights[name])

    def input(self, name, element, *dims):
        self.inputs.append(helper.make_tensor_value_info(name, element, dims))
        return name

    # ---- layers --------------------------------------------------------------------------------------------------

    def linear(self, x, at):
        return self.node("Gemm", self.layer(x, at), transB=1)

    def own_linear(self, x, at, activation):
        """`linear` and what is behind it, by one operator."""
        return self.node("HstuLinear", self.layer(x, at), domain=DOMAIN, activation=activation, tf32=1)

    def layer(self, x, at):
        """x, the weight, and the bias where there is one."""
        layer = [x, self.weight(f"{at}.weight")]
        if f"{at}.bias" in self.weights:
            layer.append(self.weight(f"{at}.bias"))
        return layer

    def silu(self, x):
        return self.node("Mul", [x, self.node("Sigmoid", [x])])

    def norm(self, x, at, width, epsilon):
        scale = self.weights.get(f"{at}.weight", np.ones(width, np.float32))
        bias = self.weights.get(f"{at}.bias", np.zeros(width, np.float32))
        names = [self.constant(f"{at}.weight", scale), self.constant(f"{at}.bias", bias)]
        return self.node("LayerNormalization", [x, *names], axis=-1, epsilon=epsilon)

    def group_norm(self, x, at):
        """Each head apart, with one scale and one bias for all of a head."""
        block = self.config.block
        by_head = self.node("Reshape", [x, self.shape(0, block.heads, block.head_size)])
        plain = self.norm(by_head, f"{at}.plain", block.head_size, block.epsilon)
        for op, side in ("Mul", "weight"), ("Add", "bias"):
            learned = self.weights.get(f"{at}.{side}")
            if learned is not None:
                plain = self.node(op, [plain, self.constant(f"{at}.{side}", learned[:, None])])
        return self.node("Reshape", [plain, self.shape(0, block.width)])

    def shape(self, *dims):
        # 0 = as many as there are: unlike -1 it keeps the dimension's name, and holds when there are no rows.
        return self.constant("shape." + ".".join(map(str, dims)), np.array(dims, np.int64))

    def mlp(self, x, at, steps):
        # In models that are f32 throughout ONNX's own operators leave it to the session whether TF32 is good enough.
        own, done = self.config.compute != "f32", False
        for number, step in enumerate(steps):
            here = f"{at}.{number}"
            if done:
                done = False
            elif step.kind == "linear" and own:
                behind = steps[number + 1].kind if number + 1 < len(steps) else ""
                done = behind in WITH_LINEAR
                x = self.own_linear(x, here, behind if done else "none")
            elif step.kind == "linear":
                x = self.linear(x, here)
            elif step.kind == "layer_norm":
                x = self.norm(x, here, step.size, 1e-5)
            elif step.kind == "swish_layer_norm":
                x = self.node("Mul", [x, self.node("Sigmoid", [self.norm(x, here, step.size, 1e-5)])])
            else:
                x = self.activation(x, step.kind)
        return x

    def activation(self, x, kind):
        if kind == "silu":
            return self.silu(x)
        if kind == "gelu":
            erf = self.node("Erf", [self.node("Mul", [x, self.number(math.sqrt(0.5))])])
            half = self.node("Mul", [x, self.number(0.5)])
            return self.node("Mul", [half, self.node("Add", [erf, self.number(1.0)])])
        return self.node({"relu": "Relu", "sigmoid": "Sigmoid", "tanh": "Tanh"}[kind], [x])

    # ---- from keys to rows ---------------------------------------------------------------------------------------

    def rows(self):
        """What goes into the first layer, in the type that blocks compute in."""
        if self.is_sum():
            return self.embedded()
        kinds = [self.token(kind, token) for kind, token in self.config.tokens.items()]
        x = self.encoded(self.node("Sum", kinds) if len(kinds) > 1 else kinds[0])
        kind = TYPES[self.config.compute]
        return x if kind == TensorProto.FLOAT else self.node("Cast", [x], to=kind)

    def is_sum(self):
        """Whether a row is nothing but a sum of rows of few tables in the graph, and Pagoda's operators are wanted."""
        config, tokens = self.config, self.config.tokens.values()
        plain = all(not token.mlp and (token.combine == "sum" or len(token.features) == 1) for token in tokens)
        return config.fused and config.lookup == "gather" and plain and len(config.features) <= MOST_TABLES

    def embedded(self):
        """The same as `encoded` of every `token`, added up one table after the other, by one operator."""
        config, inputs = self.config, [""] * 4
        if config.positions:
            # What is counted from the start is clipped by the operator.
            own = config.positions.counted == "from_start"
            index = self.input("positions", TensorProto.INT64, "T") if own else self.position_index()
            inputs[:2] = self.weight("positions.weight"), index
        if config.times:
            inputs[2:] = self.weight("times.weight"), self.time_index()
        for feature in config.features:
            inputs += [self.table(feature), key_input(feature)]
        scale = math.sqrt(config.embedding_size) if config.scale_embeddings else 1.0
        return self.node("HstuEmbed", inputs, domain=DOMAIN, scale=scale, to=TYPES[config.compute])

    def table(self, feature):
        """The table, then the default row for keys beyond it, then zeros for no key."""
        return self.constant(f"tables.{feature.table}", self.tables[feature.table])

    def token(self, kind, token):
        """What the features of one kind give each row: zeros where the row has none of them."""
        vectors = [self.lookup(feature) for feature in token.features]
        x = vectors[0]
        if len(vectors) > 1:
            x = self.node("Concat", vectors, axis=1) if token.combine == "concat" else self.node("Sum", vectors)
        if not token.mlp:
            return x
        # An MLP makes something of zeros too.
        present = [self.node("Not", [self.absent(feature)]) for feature in token.features]
        has = present[0]
        for other in present[1:]:
            has = self.node("Or", [has, other])
        has = self.node("Unsqueeze", [has, self.axis(1)])
        return self.node("Where", [has, self.mlp(x, f"{kind}.mlp", token.mlp), self.number(0.0)])

    def absent(self, feature):
        return self.node("Equal", [key_input(feature), self.number(NO_KEY, np.int64)])

    def lookup(self, feature):
        keys, table = key_input(feature), self.config.tables[feature.table]
        if self.config.lookup == "bag":
            # A key that is not there gives the default vector; no key at all gives zeros.
            rows = self.node("EmbeddingBag", [keys], domain=DOMAIN, table=table.name, combiner="none")
            absent = self.node("Unsqueeze", [self.absent(feature), self.axis(1)])
            return self.node("Where", [absent, self.number(0.0), rows])
        # No key, -1, is the last row in ONNX as well.
        limits = [self.number(NO_KEY, np.int64), self.number(table.rows, np.int64)]
        index = self.node("Clip", [keys, *limits])
        return self.node("Gather", [self.table(feature), index])

    def encoded(self, x):
        """Rows with what is learned of positions and times added."""
        config = self.config
        if config.scale_embeddings:
            x = self.node("Mul", [x, self.number(math.sqrt(config.embedding_size))])
        if config.positions:
            x = self.node("Add", [x, self.node("Gather", [self.weight("positions.weight"), self.position_index()])])
        if config.times:
            x = self.node("Add", [x, self.node("Gather", [self.weight("times.weight"), self.time_index()])])
        return x

    def position_index(self):
        positions, last = self.config.positions, self.number(self.config.positions.buckets - 1, np.int64)
        absolute = self.input("positions", TensorProto.INT64, "T")
        zero = self.number(0, np.int64)
        if positions.counted == "from_start":
            return self.node("Clip", [absolute, zero, last])
        contextual = len(self.config.user.features) if self.config.user else 0
        back = self.node("Sub", [self.of_user("history"), absolute])
        if not contextual:
            return self.node("Clip", [back, zero, last])
        count = self.number(contextual, np.int64)
        back = self.node("Clip", [self.node("Add", [back, count]), zero, last])
        own = self.node("Clip", [absolute, zero, last])
        return self.node("Where", [self.node("Less", [absolute, count]), own, back])

    def time_index(self):
        times, last = self.config.times, self.number(self.config.times.buckets - 1, np.int64)
        own, zero = self.input("times", TensorProto.INT64, "T"), self.number(0, np.int64)
        if times.kind == "absolute":
            since = self.node("Sub", [own, self.number(times.origin, np.int64)])
            width = self.number(int(times.bucket_seconds), np.int64)
            # Rounded down, also before the origin: what is over is taken off first.
            over = self.node("Mod", [since, width])
            bucket = self.node("Div", [self.node("Sub", [since, over]), width])
            if times.wrap:
                return self.node("Mod", [bucket, self.number(times.buckets, np.int64)])
            return self.node("Clip", [bucket, zero, last])
        # In float32 as in training: which side of a bucket's edge a time falls on depends on it.
        ago = self.node("Sub", [self.node("Gather", [own, self.of_user("last")]), own])
        ago = self.node("Max", [self.node("Cast", [ago], to=TensorProto.FLOAT), self.number(1e-6)])
        ago = self.node("Div", [ago, self.number(times.bucket_seconds)])
        bucket = self.node({"sqrt": "Sqrt", "log": "Log"}[times.function], [ago])
        return self.node("Clip", [self.node("Cast", [bucket], to=TensorProto.INT64), zero, last])

    def of_user(self, what):
        """For every row: how long the history of its user is, or the last row of its user."""
        if self.about_rows is None:
            i64, one, axis = TensorProto.INT64, self.number(1, np.int64), self.axis(0)
            offsets = self.node("Cast", ["row_offsets"], to=i64)
            ends = self.node("Slice", [offsets, self.axis(1), self.axis(2**31 - 1), axis])
            begins = self.node("Slice", [offsets, axis, self.axis(-1), axis])
            count = self.node("Squeeze", [self.node("Shape", [key_input(self.config.features[0])])])
            rows = self.node("Unsqueeze", [self.node("Range", [self.number(0, np.int64), count, one]), self.axis(1)])
            # A row's user: how many users end at it or before.
            past = self.node("GreaterOrEqual", [rows, self.node("Unsqueeze", [ends, axis])])
            user = self.node("ReduceSum", [self.node("Cast", [past], to=i64), self.axis(1)], keepdims=0)
            candidates = self.node("Cast", ["num_candidates"], to=i64)
            history = self.node("Sub", [self.node("Sub", [ends, begins]), candidates])
            last = self.node("Sub", [self.node("Gather", [ends, user]), one])
            self.about_rows = {"history": self.node("Gather", [history, user]), "last": last}
        return self.about_rows[what]

    # ---- blocks --------------------------------------------------------------------------------------------------

    def blocks(self, x):
        """The layers; what goes in and what comes out is of the type that they compute in."""
        block = self.fused_block if self.config.fused else self.block
        for layer in range(self.config.block.layers):
            x = block(x, layer)
        return x

    def fused_block(self, x, layer):
        """The same as `block`, by five operators."""
        config, block, at = self.config, self.config.block, f"layers.{layer}"
        nvidia = block.flavour == "nvidia"
        normed = [x, *self.learned(f"{at}.input_norm", config.embedding_size)]
        normed = self.node("HstuNorm", normed, domain=DOMAIN, epsilon=block.epsilon)
        uvqk = [normed, *self.computed(f"{at}.uvqk.weight", f"{at}.uvqk.bias")]
        silu = "all" if nvidia else "u"
        u, v, q, k = self.nodes_of("HstuProject", uvqk, 4, DOMAIN, heads=block.heads, silu=silu)
        attended = self.attention(q, k, v, layer)
        # Behind the last attention every row is on its own, and only candidates are scored.
        taken = ["candidate_rows"] if layer == block.layers - 1 else []
        gate = [attended, u, *self.learned(f"{at}.output_norm", block.heads if block.group_norm else block.width)]
        norm = "group" if block.group_norm else "layer"
        y = self.node("HstuGate", gate + taken, domain=DOMAIN, epsilon=block.epsilon, norm=norm, concat=int(not nvidia))
        output = [y, *self.computed(f"{at}.output.weight", f"{at}.output.bias")]
        return self.node("HstuOutput", [*output, x, *taken] if block.residual else output, domain=DOMAIN)

    def computed(self, *names):
        """Weights of a block in the type that it computes in; those that there are not are left out."""
        return [self.typed(name, self.weights[name]) if name in self.weights else "" for name in names]

    def learned(self, at, width):
        """The scale and the bias of a norm in the type that blocks compute in."""
        scale = self.weights.get(f"{at}.weight", np.ones(width, np.float32))
        bias = self.weights.get(f"{at}.bias", np.zeros(width, np.float32))
        return [self.typed(f"{at}.weight", scale), self.typed(f"{at}.bias", bias)]

    def typed(self, name, array):
        with np.errstate(over="ignore"):
            typed = array.astype(NUMPY[self.config.compute])
        if not np.isfinite(typed.astype(np.float32)).all():
            raise ExportError(
                f"{name} has numbers that are not finite in {self.config.compute}, the largest "
                f"{np.abs(array).max():g}: use compute bf16 or f32"
            )
        return self.constant(name, typed)

    def block(self, x, layer):
        config, block, at = self.config, self.config.block, f"layers.{layer}"
        nvidia = block.flavour == "nvidia"
        uvqk = self.linear(self.norm(x, f"{at}.input_norm", config.embedding_size, block.epsilon), f"{at}.uvqk")
        u, v, q, k = self.nodes_of("Split", [self.silu(uvqk) if nvidia else uvqk], 4, axis=1)
        u = u if nvidia else self.silu(u)
        q, k, v = (self.node("Reshape", [rows, self.shape(0, block.heads, block.head_size)]) for rows in (q, k, v))
        attended = self.node("Reshape", [self.attention(q, k, v, layer), self.shape(0, block.width)])
        if layer == block.layers - 1:
            # From here on every row is on its own, and only candidates are scored.
            u, attended, x = (self.node("Gather", [rows, "candidate_rows"]) for rows in (u, attended, x))
        if block.group_norm:
            normed = self.group_norm(attended, f"{at}.output_norm")
        else:
            normed = self.norm(attended, f"{at}.output_norm", block.width, block.epsilon)
        y = self.node("Mul", [u, normed])
        if not nvidia:
            y = self.node("Concat", [u, attended, y], axis=1)
        y = self.linear(y, f"{at}.output")
        return self.node("Add", [y, x]) if block.residual else y

    def attention(self, q, k, v, layer):
        """Of q, k and v [T, heads, head size]; the result is of the type that blocks compute in too."""
        block, kind, own = self.config.block, TYPES[self.config.kv_type], TYPES[self.config.compute]
        if kind != own:
            q, k, v = (self.node("Cast", [rows], to=kind) for rows in (q, k, v))
        inputs = [q, k, v, "row_offsets", "num_candidates"]
        if self.config.not_cacheable is None:
            pool, pages = f"kv_pool_{layer}", ["cached_len", "page_indptr", "page_ids"]
            if not self.config.fused:
                written = [pool, k, v, "row_offsets", "num_candidates", *pages]
                # The pool after the append, so that the two operators have an order.
                pool = self.node("PagedKvAppend", written, f"kv_pool_{layer}_out", DOMAIN)
            inputs += [*pages, pool]
        elif self.config.user_sees_history:
            inputs += ["", "", "", "", "num_contextual"]
        attributes = {
            "alpha": block.alpha,
            "scaling_seqlen": block.scaling_seqlen,
            "target_group_size": block.target_group_size,
            "max_attn_len": block.max_attn_len,
        }
        if layer == block.layers - 1:
            # Behind it `HstuGate`, or Gather, takes nothing but candidates.
            attributes["candidates_only"] = 1
        output = self.node("HstuAttention", inputs, domain=DOMAIN, **attributes)
        if self.config.fused and self.config.not_cacheable is None:
            # With its second output the operator appends too.
            self.nodes[-1].output.append(f"kv_pool_{layer}_out")
        return output if kind == own else self.node("Cast", [output], to=own)

    def final_norm(self, x):
        """In f32, of rows of the type that blocks compute in."""
        config = self.config
        if config.final_norm == "l2" and config.fused:
            return self.node("HstuUnit", [x], domain=DOMAIN, epsilon=1e-6)
        if config.compute != "f32":
            x = self.node("Cast", [x], to=TensorProto.FLOAT)
        if config.final_norm == "l2":
            length = self.node("ReduceL2", [x], axes=[1], keepdims=1)
            x = self.node("Div", [x, self.node("Max", [length, self.number(1e-6)])])
        elif config.final_norm == "layer_norm":
            x = self.norm(x, "final_norm", config.embedding_size, 1e-5)
        return x

    def head(self, x):
        config = self.config
        kinds = [task.activation for task in config.tasks]
        if set(kinds) == {"sigmoid"}:
            self.mlp(self.final_norm(x), "head", (*config.head, Step("sigmoid", len(kinds))))
            # Whatever the last step was, it made the last node.
            self.nodes[-1].output[0] = "scores"
            return "scores"
        x = self.mlp(self.final_norm(x), "head", config.head)
        if set(kinds) == {"none"}:
            return self.node("Identity", [x], "scores")
        if set(kinds) == {"softmax"}:
            return self.node("Softmax", [x], "scores", axis=1)
        squashed = self.constant("head.sigmoid", np.array([[kind == "sigmoid" for kind in kinds]]))
        return self.node("Where", [squashed, self.node("Sigmoid", [x]), x], "scores")


def build(config, weights, tables):
    """The model without its weights, and the weights by name. `tables` holds, for lookup gather, each table with the
    rows added that stand for no row of it."""
    graph, i32, i64 = Graph(config, weights, tables), TensorProto.INT32, TensorProto.INT64
    cached = config.not_cacheable is None
    for feature in config.features:
        graph.input(key_input(feature), i64, "T")
    x = graph.rows()
    graph.input("row_offsets", i32, "B+1")
    graph.input("num_candidates", i32, "B")
    if cached:
        graph.input("cached_len", i32, "B")
        graph.input("page_indptr", i32, "B+1")
        graph.input("page_ids", i32, "P")
    elif config.user_sees_history:
        graph.input("num_contextual", i32, "B")
    graph.input("candidate_rows", i64, "S")
    outputs = [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["S", len(config.tasks)])]
    for layer in range(config.block.layers if cached else 0):
        pool = TYPES[config.kv_type], "pages", 2, config.page_size, config.block.heads, config.block.head_size
        graph.input(f"kv_pool_{layer}", *pool)
        outputs.append(helper.make_tensor_value_info(f"kv_pool_{layer}_out", pool[0], pool[1:]))
    graph.head(graph.blocks(x))

    made = helper.make_graph(graph.nodes, "pagoda", graph.inputs, outputs)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(made, opset_imports=opsets, ir_version=IR_VERSION, producer_name="pagoda.export")
    return model, graph.constants
