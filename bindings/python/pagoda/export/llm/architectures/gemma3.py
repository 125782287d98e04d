"""Gemma 3, text alone: norms before and after attention and MLP, scaled embeddings, GeGLU, and layers that see a window
(with a rotation of their own) between layers that see everything."""

from dataclasses import replace

from ...error import ExportError
from .. import rope
from ..decoder import Norm
from . import common


def describe(config, max_context):
    size = common.sizes(config)
    if config.flag("use_bidirectional_attention", False):
        raise ExportError("config.json: use_bidirectional_attention is true: the exporter has causal attention alone")
    windows = common.windows(config, size.layers, lambda window: _pattern(config, size.layers, window))
    layers = [_layer(size, index, window) for index, window in enumerate(windows)]
    # max_position_embeddings is the length after the scaling.
    trained = config.integer("max_position_embeddings", 131072)
    context = common.served(trained, max_context)
    ropes = {}
    for name, kind, key, base in (
        ("rope", "full_attention", "rope_theta", 1e6),
        ("rope_local", "sliding_attention", "rope_local_base_freq", 1e4),
    ):
        scaling, base = common.scaling_of(config, kind, key, base)
        # The scaling is of the layers that see everything, unless it is given for each kind.
        if name == "rope_local" and kind not in (config.section("rope_parameters", None) or config).values:
            scaling, base = None, config.number(key, base if scaling is None else 1e4, above=1)
        ropes[name] = rope.table(scaling, base, size.head_size, context, trained)
    return common.decoder(
        config,
        size,
        layers,
        tied=True,
        max_context=context,
        ropes=ropes,
        final_norm=Norm("model.norm.weight", size.epsilon, plus_one=True),
        embedding_scale=size.hidden_size**0.5,
        attention_scale=config.number("query_pre_attn_scalar", 256, above=0) ** -0.5,
        attention_softcap=config.number("attn_logit_softcapping", None) or 0.0,
        logits_softcap=config.number("final_logit_softcapping", None) or 0.0,
        activation=common.activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        no_f16="its activations are beyond the range of f16",
    )


def text_part(checkpoint):
    """The text model of a checkpoint with images: `gemma3` is `gemma3_text` and a vision tower."""
    given = checkpoint.config.get("text_config")
    if not isinstance(given, dict):
        raise ExportError("config.json: model_type is 'gemma3', and text_config, the text model, is missing")
    # What transformers takes where text_config has no word of it.
    defaults = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208}
    config = defaults | {key: value for key, value in given.items() if value is not None}
    tensors = {}
    for name, tensor in checkpoint.tensors.items():
        if "vision_tower." in name or "multi_modal_projector." in name:
            continue
        for prefix, place in (("language_model.", ""), ("model.language_model.", "model.")):
            if name.startswith(prefix):
                name = place + name.removeprefix(prefix)
                break
        tensors[name] = tensor
    kept = {key: checkpoint.config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in checkpoint.config}
    return replace(checkpoint, config=kept | config | {"model_type": "gemma3_text"}, tensors=tensors)


def _layer(size, index, window):
    at = f"model.layers.{index}"

    def norm(name):
        return Norm(f"{at}.{name}.weight", size.epsilon, plus_one=True)

    return common.layer(
        size,
        index,
        window=window,
        rope="rope_local" if window else "rope",
        attention_norm=norm("input_layernorm"),
        query_norm=norm("self_attn.q_norm"),
        key_norm=norm("self_attn.k_norm"),
        after_attention=norm("post_attention_layernorm"),
        mlp_norm=norm("pre_feedforward_layernorm"),
        after_mlp=norm("post_feedforward_layernorm"),
    )


def _pattern(config, layers, window):
    """Every sixth layer sees everything."""
    every = config.integer("sliding_window_pattern", config.integer("_sliding_window_pattern", 6))
    return [window if (index + 1) % every else 0 for index in range(layers)]
