"""Writes the models of the samples: python make_model.py target/demo/model.onnx

OUT.onnx is a small ranking model of the HSTU kind, with random weights: two blocks that attend over a user's history,
then a score for each row. The keys and values of the history are in the pools kv_pool_0 and kv_pool_1, one for each
block, which are inputs and outputs. hello.onnx, written beside it, is only y = softmax(x W).
"""

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

LAYERS, HEADS, HEAD_SIZE, ITEMS = 2, 2, 32, 1000
WIDTH = HEADS * HEAD_SIZE  # of an item's embedding, and of u, v, q and k each
PAGED = ["row_offsets", "num_candidates", "cached_len", "page_indptr", "page_ids"]


class Graph:
    """A graph that is being built; every method returns the name of what it added."""

    def __init__(self):
        self.random = np.random.default_rng(2024)
        self.nodes, self.weights = [], []

    def constant(self, array):
        name = f"weight_{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def weight(self, *shape):
        """Random numbers that keep the magnitude of what they are multiplied with."""
        values = self.random.standard_normal(shape) / np.sqrt(shape[0])
        return self.constant(values.astype(np.float32))

    def node(self, op, inputs, outputs=None, domain="", **attributes):
        outputs = outputs or [f"{op}_{len(self.nodes)}"]
        self.nodes.append(helper.make_node(op, inputs, outputs, domain=domain, **attributes))
        return outputs[0] if len(outputs) == 1 else outputs

    def norm(self, x):
        ones, zeros = np.ones(WIDTH, np.float32), np.zeros(WIDTH, np.float32)
        return self.node("LayerNormalization", [x, self.constant(ones), self.constant(zeros)], axis=-1, epsilon=1e-5)

    def linear(self, x, width_in, width_out):
        bias = self.constant(self.random.normal(0, 0.1, width_out).astype(np.float32))
        return self.node("Gemm", [x, self.weight(width_in, width_out), bias])

    def silu(self, x):
        return self.node("Mul", [x, self.node("Sigmoid", [x])])

    def block(self, x, layer):
        """One HSTU block: attention over the history, gated by u, plus the residual."""
        uvqk = self.silu(self.linear(self.norm(x), WIDTH, 4 * WIDTH))
        u, *vqk = self.node("Split", [uvqk], [f"{name}_{layer}" for name in "uvqk"], axis=1)
        # 0 keeps the dimension: unlike -1 it keeps the name T.
        by_head = self.constant(np.array([0, HEADS, HEAD_SIZE], np.int64))
        v, q, k = (self.node("Reshape", [part, by_head]) for part in vqk)
        pool_in, pool_out = f"kv_pool_{layer}", f"kv_pool_{layer}_out"
        self.node("PagedKvAppend", [pool_in, k, v, *PAGED], [pool_out], domain="ai.pagoda")
        # The pool after the append, so that the two operators have an order.
        attention = self.node("HstuAttention", [q, k, v, *PAGED, pool_out], domain="ai.pagoda", scaling_seqlen=512)
        flat = self.node("Reshape", [attention, self.constant(np.array([0, WIDTH], np.int64))])
        gated = self.node("Mul", [self.norm(flat), u])
        return self.node("Add", [self.linear(gated, WIDTH, WIDTH), x])

    def save(self, path, inputs, outputs):
        graph = helper.make_graph(self.nodes, path.stem, inputs, outputs, self.weights)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.pagoda", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8, producer_name="pagoda")
        onnx.checker.check_model(model)
        onnx.save(model, path)


def value(name, element, *dims):
    return helper.make_tensor_value_info(name, element, dims)


def ranking_model(path):
    graph = Graph()
    x = graph.node("Gather", [graph.constant(graph.random.normal(0, 1, (ITEMS, WIDTH)).astype(np.float32)), "item_ids"])
    for layer in range(LAYERS):
        x = graph.block(x, layer)
    hidden = graph.silu(graph.linear(graph.norm(x), WIDTH, 32))
    axis = graph.constant(np.array([1], np.int64))
    graph.node("Squeeze", [graph.linear(hidden, 32, 1), axis], ["scores"])

    f32, i32 = TensorProto.FLOAT, TensorProto.INT32
    pools = [f"kv_pool_{layer}" for layer in range(LAYERS)]
    pool_dims = ["pages", 2, "page_size", HEADS, HEAD_SIZE]
    lengths = {"row_offsets": "B+1", "num_candidates": "B", "cached_len": "B", "page_indptr": "B+1", "page_ids": "P"}
    inputs = [value("item_ids", TensorProto.INT64, "T")]
    inputs += [value(name, i32, lengths[name]) for name in PAGED]
    inputs += [value(name, f32, *pool_dims) for name in pools]
    outputs = [value("scores", f32, "T")] + [value(name + "_out", f32, *pool_dims) for name in pools]
    graph.save(path, inputs, outputs)


def hello_model(path):
    graph = Graph()
    graph.node("Softmax", [graph.node("MatMul", ["x", graph.weight(4, 3)])], ["y"], axis=-1)
    graph.save(path, [value("x", TensorProto.FLOAT, "n", 4)], [value("y", TensorProto.FLOAT, "n", 3)])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__.splitlines()[0])
    ranking_model(Path(sys.argv[1]))
    hello_model(Path(sys.argv[1]).with_name("hello.onnx"))
