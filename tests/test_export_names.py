"""Checkpoints of NVIDIA's recsys-examples and Meta's generative-recommenders are read as their own formulas compute."""

import numpy as np
import pytest
from exported import BEFORE, END, KV, RAGGED, SIDES, WIDE, Oracle, check, layer_norm, settings, tensors, with_user
from exported import made  # noqa: F401  (a fixture)
from pagoda.export import ExportError


class Native(Oracle):
    """NVIDIA's native layer: silu(linear(x)) seen as [rows, heads, 4 · head size], in parts u, v, q and k."""

    BLOCK, LAYER = "_hstu_block.", "_hstu_block._attention_layers.{}."

    def of(self, layer, name):
        return self.theirs[self.LAYER.format(layer) + name]

    def uvqk(self, x, layer):
        mixed = x @ self.of(layer, "_linear_uvqk.weight").T + self.of(layer, "_linear_uvqk.bias")
        mixed = mixed.reshape(len(x), self.block["heads"], 4 * self.block["head_size"])
        return np.split(mixed, 4, axis=2)

    def input_norm(self, x, layer):
        return layer_norm(x, self.of(layer, "_input_layernorm_weight"), self.of(layer, "_input_layernorm_bias"))

    def output_norm(self, x, layer):
        return layer_norm(x, *(self.of(layer, f"_output_ln_dropout_mul.{side}") for side in SIDES))

    def output(self, y, layer):
        return y @ self.of(layer, "_linear_proj.weight").T


class Fused(Native):
    """NVIDIA's fused layer: x W + b, [rows, 4 · heads · head size], in four parts one after the other."""

    def uvqk(self, x, layer):
        mixed = x @ self.of(layer, "_linear_uvqk_weight") + self.of(layer, "_linear_uvqk_bias")
        return [part.reshape(len(x), self.block["heads"], -1) for part in np.split(mixed, 4, axis=1)]

    def output_norm(self, x, layer):
        return layer_norm(x, *(self.of(layer, f"_output_layernorm_{side}") for side in SIDES))

    def output(self, y, layer):
        return y @ self.of(layer, "_linear_proj_weight")


class Inference(Fused):
    """NVIDIA's layer for inference: the fused one's order, in torch.nn.Linear."""

    def uvqk(self, x, layer):
        mixed = x @ self.of(layer, "_linear_uvqk.weight").T + self.of(layer, "_linear_uvqk.bias")
        return [part.reshape(len(x), self.block["heads"], -1) for part in np.split(mixed, 4, axis=1)]

    output = Native.output


class Meta(Native):
    """Meta's STU layer: x W + beta, split into u, v, q, k; the output over [u, a, u · norm(a)]."""

    LAYER = "_hstu_transducer._stu_module._stu_layers.{}."

    def uvqk(self, x, layer):
        mixed = x @ self.of(layer, "_uvqk_weight") + self.of(layer, "_uvqk_beta")
        size = self.block["heads"] * self.block["head_size"]
        parts = mixed[:, :size], mixed[:, size : 2 * size], mixed[:, 2 * size : 3 * size], mixed[:, 3 * size :]
        return [part.reshape(len(x), self.block["heads"], -1) for part in parts]

    def input_norm(self, x, layer):
        return layer_norm(x, self.of(layer, "_input_norm_weight"), self.of(layer, "_input_norm_bias"), 1e-6)

    def output_norm(self, x, layer):
        return layer_norm(x, self.of(layer, "_output_norm_weight"), self.of(layer, "_output_norm_bias"), 1e-6)

    def output(self, y, layer):
        return y @ self.of(layer, "_output_weight")


def nvidia_layer(size, width, kind):
    linear = {
        "_linear_uvqk.weight": (4 * width, size),
        "_linear_uvqk.bias": (4 * width,),
        "_linear_proj.weight": (size, width),
    }
    if kind is Fused:
        linear = {
            "_linear_uvqk_weight": (size, 4 * width),
            "_linear_uvqk_bias": (4 * width,),
            "_linear_proj_weight": (width, size),
        }
    norm = "_output_ln_dropout_mul." if kind is Native else "_output_layernorm_"
    norms = {f"_input_layernorm_{side}": (size,) for side in SIDES} | {f"{norm}{side}": (width,) for side in SIDES}
    return linear | norms


def meta_layer(size, width, _):
    norms = {f"_input_norm_{side}": (size,) for side in SIDES} | {f"_output_norm_{side}": (width,) for side in SIDES}
    return norms | {"_uvqk_weight": (size, 4 * width), "_uvqk_beta": (4 * width,), "_output_weight": (3 * width, size)}


NVIDIA_REST = {
    "positions.weight": "_hstu_block._preprocessor._positional_encoder._position_embeddings_weight",
    "item.mlp.": "_hstu_block._preprocessor._item_mlp._mlp.",
    "action.mlp.": "_hstu_block._preprocessor._item_mlp._mlp.",
    "user.mlp.": "_hstu_block._preprocessor._contextual_mlp._mlp.",
    "head.": "_mlp._mlp.",
}
META_REST = {
    "positions.weight": "_hstu_transducer._positional_encoder._position_embeddings_weight",
    "times.weight": "_hstu_transducer._positional_encoder._timestamp_embeddings_weight",
    "item.mlp.": "_hstu_transducer._input_preprocessor._content_embedding_mlp.",
    "action.mlp.": "_hstu_transducer._input_preprocessor._action_embedding_mlp.",
    "final_norm.": "_hstu_transducer._output_postprocessor._layer_norm.",
    "head.": "_multitask_module._prediction_module.",
    **{
        f"tables.{name}.rows": f"_embedding_collection.embeddings.{name}.weight"
        for name in ("items", "genres", "ratings")
    },
}


def foreign(config, kind):
    """Weights under Pagoda's names for what is not a layer, and all of them under theirs, layers made from nothing."""
    flavour = config["block"]["flavour"]
    rest, layer_of = (META_REST, meta_layer) if flavour == "meta" else (NVIDIA_REST, nvidia_layer)
    ours = {name: array for name, array in tensors(config).items() if not name.startswith("layers")}
    theirs = {}
    for name, array in ours.items():
        begins = next((begins for begins in rest if name.startswith(begins)), None)
        called = rest[begins] + name.removeprefix(begins) if begins else name
        theirs.setdefault(called, array)
        ours[name] = theirs[called]
    random, block = np.random.default_rng(5), config["block"]
    for layer in range(block["layers"]):
        for name, shape in layer_of(config["embedding_size"], block["heads"] * block["head_size"], kind).items():
            values = random.standard_normal(shape) * (0.4 if len(shape) == 2 else 1)
            theirs[kind.LAYER.format(layer) + name] = values.astype(np.float32)
    return ours, theirs


def told(config, names):
    """The same with the names of a code base; where it keeps tables differs, so NVIDIA's are named one by one."""
    config["checkpoint"] = {"names": names}
    if names != "meta":
        for name, table in config["tables"].items():
            table["rows_tensor"] = f"tables.{name}.rows"
    return config


TWO = [{"linear": 16}, "relu", {"linear": 16}]
NVIDIA_TOKENS = {
    "item": {"features": [{"name": "item", "table": "items"}], "mlp": TWO},
    "action": {"features": [{"name": "rating", "table": "ratings"}], "mlp": TWO},
    "interleaved": True,
}
NVIDIA_TABLES = {"items": {"rows": 40, "dim": 16}, "ratings": {"rows": 5, "dim": 16}}
CODE_BASES = {
    "nvidia-native": (Native, lambda: with_user(settings(tokens=NVIDIA_TOKENS, tables=NVIDIA_TABLES), mlp=TWO)),
    "nvidia-fused": (Fused, lambda: settings(interleaved=True)),
    "nvidia-inference": (Inference, lambda: settings(interleaved=True)),
    "meta": (Meta, lambda: settings("meta", positions=END, times=BEFORE, final_norm="layer_norm", tokens=WIDE)),
}


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("names", CODE_BASES)
def test_checkpoints_of_public_code_bases_are_read_as_those_compute(made, names, prefix):
    kind, configured = CODE_BASES[names]
    config = told(configured(), names)
    ours, theirs = foreign(config, kind)

    class Theirs(kind):
        def __init__(self, config, weights):
            super().__init__(config, weights)
            self.theirs = {name: array.astype(np.float64) for name, array in theirs.items()}

    stored = {(name if name.startswith("tables.") else prefix + name): array for name, array in theirs.items()}
    check(made, config, {"ragged": RAGGED}, oracle=Theirs, weights=ours, stored=stored)


def test_a_checkpoint_of_other_names_is_recognised(made):
    config = told(settings(), "nvidia-fused")
    _, theirs = foreign(config, Native)
    with pytest.raises(ExportError, match="it looks like names of nvidia-native or nvidia-inference"):
        made(config, theirs)


def test_a_tensor_may_be_called_anything(made):
    config = settings()
    weights = tensors(config)
    stored = dict(weights)
    stored["the.places"] = stored.pop("positions.weight")
    config["checkpoint"] = {"rename": {"positions.weight": "the.places"}}
    check(made, config, {"one": [(5, 3)]}, stored=stored, weights=weights)
    stored["optimizer.step"] = np.ones(1, np.float32)
    with pytest.raises(ExportError, match="all but these tensors: optimizer.step. .*config.checkpoint.ignore"):
        made(config, stored)
    config["checkpoint"]["ignore"] = ["optimizer.*"]
    made(config, stored)


@pytest.mark.parametrize("kind", [np.float64, np.float16, KV["bf16"]])
def test_weights_may_be_of_any_float_type(made, kind):
    config = settings()
    stored = {name: array.astype(kind) for name, array in tensors(config).items()}
    check(made, config, {"one": [(5, 3)]}, weights={n: a.astype(np.float32) for n, a in stored.items()}, stored=stored)


def test_a_part_that_a_code_base_does_not_have_is_asked_for(made):
    config = told(settings(final_norm="layer_norm"), "nvidia-fused")
    ours, theirs = foreign(config, Fused)
    with pytest.raises(
        ExportError, match=r"final_norm\.weight: checkpoints of nvidia-fused have no such part: say where"
    ):
        made(config, theirs)
    config["checkpoint"]["rename"] = {f"final_norm.{side}": f"final_norm.{side}" for side in SIDES}
    made(config, theirs)
    del config["tables"]["items"]["rows_tensor"]
    with pytest.raises(
        ExportError, match=r"config\.tables\.items: nvidia-fused keeps tables .*\(rows_tensor\), or which"
    ):
        made(config, theirs)


def test_two_models_in_one_checkpoint_need_a_prefix(made):
    config = settings()
    weights = tensors(config)
    both = {f"teacher.{name}": array for name, array in tensors(config, seed=8).items()}
    both |= {f"student.{name}": array for name, array in weights.items()}
    with pytest.raises(
        ExportError, match=r"layers\.0\.uvqk\.weight 2 times \(student\.layers.*config\.checkpoint\.prefix"
    ):
        made(config, both)
    config["checkpoint"] = {"prefix": "student.", "ignore": ["teacher.*"]}
    check(made, config, {"one": [(5, 3)]}, weights=weights, stored=both)
    del config["checkpoint"]["prefix"]  # what is ignored is not meant
    check(made, config, {"one": [(5, 3)]}, weights=weights, stored=both)
    both = {name.removeprefix("student."): array for name, array in both.items()}
    config["checkpoint"] = {"prefix": "", "ignore": ["teacher.*"]}
    check(made, config, {"one": [(5, 3)]}, weights=weights, stored=both)


def test_a_pattern_that_covers_every_model_is_said(made):
    config = settings()
    weights = tensors(config)
    stored = {f"model.{name}": array for name, array in weights.items()}
    stored["model.extra"] = np.zeros(2, np.float32)
    config["checkpoint"] = {"ignore": ["model.*"]}
    with pytest.raises(ExportError, match=r"ignore covers every .*model\.layers\.0.*set config\.checkpoint\.prefix"):
        check(made, config, {"one": [(5, 3)]}, weights=weights, stored=stored)
    config["checkpoint"]["prefix"] = "model."
    check(made, config, {"one": [(5, 3)]}, weights=weights, stored=stored)
