"""Which tensors a model has, under Pagoda's names, and what the public code bases call them.

Matrices are [out, in] under Pagoda's names, as torch.nn.Linear has them. The rows of uvqk are u, then v, q and k, each
ordered by head. sdk/docs/model-folder.md lists all names.
"""

import numpy as np

SIDES = ("weight", "bias")


def wanted(config):
    """The shape of every tensor that the configuration calls for, by Pagoda's name; tables apart."""
    block, size = config.block, config.embedding_size
    parts = 3 if block.flavour == "meta" else 1
    shapes = {}
    for layer in range(block.layers):
        at = f"layers.{layer}"
        if block.input_norm_learned:
            shapes |= {f"{at}.input_norm.{side}": (size,) for side in SIDES}
        shapes[f"{at}.uvqk.weight"] = (4 * block.width, size)
        if block.uvqk_bias:
            shapes[f"{at}.uvqk.bias"] = (4 * block.width,)
        if block.output_norm_learned:
            shapes |= {
                f"{at}.output_norm.{side}": (block.heads if block.group_norm else block.width,) for side in SIDES
            }
        shapes[f"{at}.output.weight"] = (size, parts * block.width)
    if config.positions:
        shapes["positions.weight"] = (config.positions.buckets, size)
    if config.times:
        shapes["times.weight"] = (config.times.buckets, size)
    for kind, token in config.tokens.items():
        shapes |= _of_mlp(f"{kind}.mlp", token.mlp, token.width)
    if config.final_norm == "layer_norm":
        shapes |= {f"final_norm.{side}": (size,) for side in SIDES}
    return shapes | _of_mlp("head", config.head, size)


def _of_mlp(at, steps, width):
    shapes = {}
    for number, step in enumerate(steps):
        if step.kind == "linear":
            shapes[f"{at}.{number}.weight"] = (step.size, width)
            if step.bias:
                shapes[f"{at}.{number}.bias"] = (step.size,)
        elif step.kind.endswith("norm"):
            shapes |= {f"{at}.{number}.{side}": (step.size,) for side in SIDES}
        width = step.size
    return shapes


def anchor(names):
    """The tensor that every checkpoint of these names has, by which one that stands under a prefix is found."""
    return theirs(names, "layers.0.uvqk.weight")[0]


def theirs(names, name):
    """What a code base calls the tensor of Pagoda's name, and the order that it is stored in; None if it has none."""
    if names == "pagoda":
        return name, "same"
    layers, parts, others = _CODE_BASES[names]
    if name.startswith("layers."):
        _, layer, part = name.split(".", 2)
        called, order = parts[part]
        return f"{layers}{layer}.{called}", order
    for ours, called in others.items():
        if name.startswith(ours):
            return called + name.removeprefix(ours), "same"
    return None


def table(names, name):
    """What a code base calls the rows of a table; None where they are not in its checkpoints under one name."""
    return {"pagoda": f"tables.{name}.rows", "meta": f"_embedding_collection.embeddings.{name}.weight"}.get(names)


def stored_shape(shape, order):
    return shape[::-1] if order == "transposed" else shape


def restore(array, order, heads):
    """A tensor as Pagoda has it, out of how a code base stores it."""
    if order == "transposed":
        return array.T
    if order == "by_head":
        # Head by head, and in each u, v, q, k: as it has to be where the heads are spread over devices.
        split = array.reshape(heads, 4, -1, *array.shape[1:])
        return np.swapaxes(split, 0, 1).reshape(array.shape)
    return array


_NVIDIA_OTHERS = {
    "positions.weight": "_hstu_block._preprocessor._positional_encoder._position_embeddings_weight",
    "times.weight": "_hstu_block._preprocessor._positional_encoder._timestamp_embeddings_weight",
    # One MLP for items and actions alike.
    "item.mlp.": "_hstu_block._preprocessor._item_mlp._mlp.",
    "action.mlp.": "_hstu_block._preprocessor._item_mlp._mlp.",
    "user.mlp.": "_hstu_block._preprocessor._contextual_mlp._mlp.",
    "head.": "_mlp._mlp.",
}

_NVIDIA_NORMS = {f"input_norm.{side}": (f"_input_layernorm_{side}", "same") for side in SIDES} | {
    f"output_norm.{side}": (f"_output_layernorm_{side}", "same") for side in SIDES
}

_NVIDIA_LAYERS = "_hstu_block._attention_layers."

# For each: where the layers are, what their tensors are called and how they are stored, and the same of other parts.
_CODE_BASES = {
    "nvidia-native": (
        _NVIDIA_LAYERS,
        _NVIDIA_NORMS
        | {
            "uvqk.weight": ("_linear_uvqk.weight", "by_head"),
            "uvqk.bias": ("_linear_uvqk.bias", "by_head"),
            "output_norm.weight": ("_output_ln_dropout_mul.weight", "same"),
            "output_norm.bias": ("_output_ln_dropout_mul.bias", "same"),
            "output.weight": ("_linear_proj.weight", "same"),
        },
        _NVIDIA_OTHERS,
    ),
    "nvidia-fused": (
        _NVIDIA_LAYERS,
        _NVIDIA_NORMS
        | {
            "uvqk.weight": ("_linear_uvqk_weight", "transposed"),
            "uvqk.bias": ("_linear_uvqk_bias", "same"),
            "output.weight": ("_linear_proj_weight", "transposed"),
        },
        _NVIDIA_OTHERS,
    ),
    "nvidia-inference": (
        _NVIDIA_LAYERS,
        _NVIDIA_NORMS
        | {
            "uvqk.weight": ("_linear_uvqk.weight", "same"),
            "uvqk.bias": ("_linear_uvqk.bias", "same"),
            "output.weight": ("_linear_proj.weight", "same"),
        },
        _NVIDIA_OTHERS,
    ),
    "meta": (
        "_hstu_transducer._stu_module._stu_layers.",
        {
            "input_norm.weight": ("_input_norm_weight", "same"),
            "input_norm.bias": ("_input_norm_bias", "same"),
            "uvqk.weight": ("_uvqk_weight", "transposed"),
            "uvqk.bias": ("_uvqk_beta", "same"),
            "output_norm.weight": ("_output_norm_weight", "same"),
            "output_norm.bias": ("_output_norm_bias", "same"),
            "output.weight": ("_output_weight", "transposed"),
        },
        {
            "positions.weight": "_hstu_transducer._positional_encoder._position_embeddings_weight",
            "times.weight": "_hstu_transducer._positional_encoder._timestamp_embeddings_weight",
            "item.mlp.": "_hstu_transducer._input_preprocessor._content_embedding_mlp.",
            "action.mlp.": "_hstu_transducer._input_preprocessor._action_embedding_mlp.",
            "final_norm.": "_hstu_transducer._output_postprocessor._layer_norm.",
            "head.": "_multitask_module._prediction_module.",
        },
    ),
}
