"""Models of the fused operators compute what those of ONNX's own operators do, and may compute in half precision."""

import json
from collections import Counter

import numpy as np
import onnx
import pytest
from exported import (
    BATCHES,
    BEFORE,
    END,
    HOURS,
    QUARTERS,
    RAGGED,
    WIDE,
    Engine,
    check,
    error,
    made,  # noqa: F401  (a fixture)
    people,
    settings,
    tensors,
    with_user,
)
from pagoda.export import ExportError
from pagoda.export.hstu.config import parse

VARIANTS = {
    "nvidia": settings(),
    "meta": settings("meta", True),
    "no residual": settings(block__residual=False),
    "no bias": settings("meta", block__uvqk_bias=False),
    "nothing learned": settings(block__input_norm_learned=False, block__output_norm_learned=False),
    "nothing learned, no bias, no residual": settings(
        block__input_norm_learned=False,
        block__output_norm_learned=False,
        block__uvqk_bias=False,
        block__residual=False,
    ),
    "group norm": settings("meta", block__group_norm=True),
    "odd sizes": settings("meta", block__heads=3, block__head_size=5, block__group_norm=True),
    "one head": settings(block__heads=1, block__head_size=40, block__layers=1),
    "epsilon": settings("meta", block__epsilon=0.1),
    "scaled": settings(scale_embeddings=True, positions=None, times=QUARTERS),
    "nothing but keys": settings("meta", positions=None),
    "with a user": with_user(settings(scale_embeddings=True)),
    "from the end": settings("meta", positions=END),
    "seconds before": settings("meta", times=BEFORE),
    "more than a sum": settings(tokens=WIDE),
    "not cached": with_user(settings("meta", positions=END, times=HOURS), sees_history=True),
    "no final norm": settings(final_norm="none"),
    "layer norm at the end": settings("meta", final_norm="layer_norm"),
    "half the keys": settings(kv__type="bf16"),
}


def scores(made, config, weights, counts):
    users = people(config, counts)
    return Engine(made(config, weights), users).run()


@pytest.mark.parametrize("variant", VARIANTS)
def test_fused_and_not_fused_give_the_same_scores(made, variant):
    config = VARIANTS[variant]
    weights = tensors(config)
    for counts in RAGGED, BATCHES["no candidates"], BATCHES["nobody"]:
        fused = scores(made, config | {"fused": True}, weights, counts)
        plain = scores(made, config | {"fused": False}, weights, counts)
        # Keys are rounded to bf16, where the last bit of an f32 may decide.
        assert error(fused, plain) <= (2e-2 if "half" in variant else 1e-5)


@pytest.mark.parametrize("compute, tolerance", [("f16", 6e-3), ("bf16", 5e-2)])
@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant != "half the keys"])
def test_blocks_may_compute_in_half_precision(made, variant, compute, tolerance):
    config = VARIANTS[variant] | {"compute": compute}
    folder = check(made, config, {"ragged": RAGGED, "nobody": [], "no candidates": [(5, 0)]}, tolerance)
    assert json.loads((folder / "pagoda.json").read_text())["kv"]["type"] == compute
    # Half of the bytes: the weights of blocks are stored so.
    kinds = {tensor.name: tensor.data_type for tensor in onnx.load(folder / "model.onnx").graph.initializer}
    half = {"f16": onnx.TensorProto.FLOAT16, "bf16": onnx.TensorProto.BFLOAT16}[compute]
    assert all((kind == half) == name.startswith("layers.") for name, kind in kinds.items())


def test_a_block_is_of_five_operators(made):
    config = settings(block__layers=3)
    fused = config | {"fused": True}
    graph = onnx.load(made(fused, tensors(config)) / "model.onnx").graph
    nodes = Counter(node.op_type for node in graph.node)
    of_block = "HstuNorm", "HstuProject", "HstuAttention", "HstuGate", "HstuOutput"
    assert [nodes[name] for name in of_block] == [3] * 5
    assert not nodes["Split"] and not nodes["LayerNormalization"] and not nodes["PagedKvAppend"]
    attention = [node for node in graph.node if node.op_type == "HstuAttention"]
    assert [node.output[1] for node in attention] == [f"kv_pool_{layer}_out" for layer in range(3)]
    only = [[a.i for a in node.attribute if a.name == "candidates_only"] for node in attention]
    assert only == [[], [], [1]], "behind the last layer's attention nothing but candidates is looked at"
    # In f32 ONNX's own, unless it is said.
    for plain in config, config | {"fused": False}:
        nodes = Counter(node.op_type for node in onnx.load(made(plain, tensors(config)) / "model.onnx").graph.node)
        assert nodes["Split"] == nodes["PagedKvAppend"] == 3 and not nodes["HstuProject"]


def test_what_is_around_the_layers_is_of_few_operators(made):
    def nodes(**changes):
        config = settings(**changes)
        return Counter(node.op_type for node in onnx.load(made(config, tensors(config)) / "model.onnx").graph.node)

    for changes in {"fused": True}, {"compute": "bf16"}, {"compute": "f16", "block__residual": False}:
        fused = nodes(**changes)
        assert fused["HstuEmbed"] == fused["HstuUnit"] == 1
        assert not fused["ReduceL2"] and not fused["Gather"] and not fused["Cast"]
    plain = nodes()
    assert plain["ReduceL2"] == 1 and not plain["HstuEmbed"] and not plain["HstuUnit"]
    # What is more than a sum out of tables in the graph is of ONNX's own operators.
    for changes in {"tokens": WIDE}, {"tokens__item__mlp": [{"linear": 16}]}, {"lookup": "bag"}:
        assert not nodes(fused=True, **changes)["HstuEmbed"]


def test_a_layer_of_an_mlp_is_one_operator_with_its_activation(made):
    def layers(**changes):
        config = settings(**changes)
        graph = onnx.load(made(config, tensors(config)) / "model.onnx").graph
        own = [node for node in graph.node if node.op_type == "HstuLinear"]
        assert all(next(a.i for a in node.attribute if a.name == "tf32") == 1 for node in own)
        return [next(a.s.decode() for a in node.attribute if a.name == "activation") for node in own], graph.node

    def tasks(activation):
        return [{"name": name, "activation": activation} for name in ("like", "click")]

    two = {"head__mlp": [{"linear": 6}, "relu", {"linear": 2}], "head__tasks": tasks("sigmoid")}
    for compute in "bf16", "f16":
        own, nodes = layers(compute=compute, **two)
        assert own == ["relu", "sigmoid"]
        assert list(nodes[-1].output) == ["scores"] and nodes[-1].op_type == "HstuLinear"
        assert not {node.op_type for node in nodes} & {"Relu", "Sigmoid", "Gemm"}
    odd = [{"linear": 6}, "gelu", {"linear": 5, "bias": False}, "layer_norm", {"linear": 4}, "tanh", "silu"]
    odd.append({"linear": 2})
    own, nodes = layers(compute="bf16", head__mlp=odd, head__tasks=tasks("none"))
    assert own == ["none", "none", "tanh", "none"]
    rest = Counter(node.op_type for node in nodes)
    assert (rest["Erf"], rest["LayerNormalization"], rest["Sigmoid"], rest["Tanh"]) == (1, 1, 1, 0)
    # In f32 the options of the model decide on TF32.
    for changes in {}, {"fused": True}:
        own, nodes = layers(**two, **changes)
        assert not own and sum(node.op_type == "Gemm" for node in nodes) >= 2


@pytest.mark.parametrize("compute, tolerance", [("f16", 6e-3), ("bf16", 5e-2)])
def test_every_activation_of_a_layer_in_half_precision(made, compute, tolerance):
    head = [{"linear": 12}, "silu", {"linear": 9}, "tanh", {"linear": 8}, "sigmoid", {"linear": 2}]
    tasks = [{"name": name, "activation": "sigmoid"} for name in ("like", "click")]
    config = settings(compute=compute, head__mlp=head, head__tasks=tasks)
    check(made, config, {"ragged": RAGGED, "nobody": [], "no candidates": [(5, 0)]}, tolerance)


def test_scores_do_not_depend_on_the_rest_of_the_batch(made):
    config = settings("meta", compute="bf16")
    folder, users = made(config, tensors(config)), people(config, [(9, 3), (30, 40), (2, 1)])
    together = Engine(folder, users).run()
    alone = [Engine(folder, [user]).run() for user in users]
    assert np.array_equal(together, np.concatenate(alone))


BAD = {
    "compute f64": ({"compute": "f64"}, r"config\.compute is 'f64': it has to be one of f32, f16, bf16"),
    "not fused": ({"compute": "bf16", "fused": False}, r"config\.fused is false and config\.compute is bf16"),
    "fused 1": ({"fused": 1}, r"config\.fused is 1: it has to be true or false"),
    "other keys": ({"compute": "bf16", "kv__type": "f16"}, r"config\.kv\.type is f16 and config\.compute is bf16"),
    "f32 keys": ({"compute": "f16", "kv__type": "f32"}, r"config\.kv\.type is f32 and config\.compute is f16"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_does_not_go_together_is_refused(what):
    changes, message = BAD[what]
    with pytest.raises(ExportError, match=message):
        parse(settings(**changes))


def test_weights_that_half_precision_can_not_hold_are_refused(made):
    config = settings(compute="f16")
    weights = tensors(config)
    weights["layers.1.output.weight"][3, 2] = 1e5
    with pytest.raises(ExportError, match=r"layers\.1\.output\.weight has numbers that are not finite in f16.*100000"):
        made(config, weights)
    made(config | {"compute": "bf16"}, weights)
