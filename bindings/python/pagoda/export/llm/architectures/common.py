"""What Hugging Face's decoders have in common: the names of sizes and weights, and most of a layer."""

from dataclasses import dataclass

from ...error import ExportError
from .. import rope
from ..decoder import Decoder, Layer, Linear, Norm

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
# Tables of rotations are this long at most: 8 GB for heads of 128.
MOST_POSITIONS = 2**24


@dataclass(frozen=True)
class Sizes:
    vocab_size: int
    hidden_size: int
    mlp_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    epsilon: float


def sizes(config):
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    kv_heads = _or(config.integer("num_key_value_heads", None), heads)
    head_size = config.integer("head_dim", None)
    if head_size is None:
        if hidden % heads:
            raise ExportError(f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}: add head_dim")
        head_size = hidden // heads
    if heads % kv_heads:
        raise ExportError(f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    return Sizes(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        mlp_size=config.integer("intermediate_size"),
        layers=config.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        epsilon=config.number("rms_norm_eps", 1e-6, above=0),
    )


def layer(size, index, *, bias=False, out_bias=False, mlp_bias=False, **other):
    """A layer by Llama's names. `other` replaces fields of it."""
    at = f"model.layers.{index}"
    fields = {
        "attention_norm": Norm(f"{at}.input_layernorm.weight", size.epsilon),
        "qkv": linear(
            f"layers.{index}.qkv",
            {
                f"{at}.self_attn.q_proj": size.heads * size.head_size,
                f"{at}.self_attn.k_proj": size.kv_heads * size.head_size,
                f"{at}.self_attn.v_proj": size.kv_heads * size.head_size,
            },
            size.hidden_size,
            bias,
        ),
        "attention_out": linear(
            f"layers.{index}.attention_out",
            {f"{at}.self_attn.o_proj": size.hidden_size},
            size.heads * size.head_size,
            out_bias,
        ),
        "mlp_norm": Norm(f"{at}.post_attention_layernorm.weight", size.epsilon),
        "gate_up": linear(
            f"layers.{index}.gate_up",
            {f"{at}.mlp.gate_proj": size.mlp_size, f"{at}.mlp.up_proj": size.mlp_size},
            size.hidden_size,
            mlp_bias,
        ),
        "down": linear(f"layers.{index}.down", {f"{at}.mlp.down_proj": size.hidden_size}, size.mlp_size, mlp_bias),
    }
    return Layer(**fields | other)


def linear(name, parts, inputs, bias=False):
    """`parts` are modules with their rows."""
    return Linear(
        name,
        tuple(f"{part}.weight" for part in parts),
        tuple(parts.values()),
        inputs,
        tuple(f"{part}.bias" for part in parts) if bias else (),
    )


def decoder(config, size, layers, *, tied=False, **other):
    """The whole of it, by Llama's names. `other` replaces fields of it."""
    embedding = "model.embed_tokens.weight"
    tied = config.flag("tie_word_embeddings", tied)
    head = embedding if tied else "lm_head.weight"
    fields = {
        "architecture": config.text("model_type"),
        "vocab_size": size.vocab_size,
        "hidden_size": size.hidden_size,
        "heads": size.heads,
        "kv_heads": size.kv_heads,
        "head_size": size.head_size,
        "layers": tuple(layers),
        "final_norm": Norm("model.norm.weight", size.epsilon),
        "embedding": embedding,
        "head": Linear("head", (head,), (size.vocab_size,), size.hidden_size),
        "activation": activation(config),
    }
    return Decoder(**fields | other)


def activation(config, key="hidden_act", default="silu"):
    return ACTIVATIONS[config.text(key, default, of=ACTIVATIONS)]


def rotation(config, size, max_context, longer=True):
    """The context and the one table of rotations that all layers use. `longer`: the scaling lengthens the context, which
    max_position_embeddings does not say."""
    trained = config.integer("max_position_embeddings")
    scaling, base = scaling_of(config, None)
    context = lengthened(scaling, trained) if longer else trained
    context = served(context, max_context)
    place = scaling if scaling and "partial_rotary_factor" in scaling.values else config
    part = place.number("partial_rotary_factor", 1.0, above=0)
    rotated = int(size.head_size * part)
    if rotated % 2 or not 2 <= rotated <= size.head_size:
        raise ExportError(
            f"{place.path('partial_rotary_factor')} is {part:g}: of heads of {size.head_size} it rotates {rotated} numbers, which "
            "has to be an even number, at least 2"
        )
    return {"max_context": context, "ropes": {"rope": rope.table(scaling, base, rotated, context, trained)}}


def scaling_of(config, layer_type, base_key="rope_theta", base=10000.0):
    """The section that scales the rotation, or None, and the rotation's base. transformers 5 writes both into
    rope_parameters, where models with several kinds of layers have one for each."""
    parameters = config.section("rope_parameters", None)
    if parameters is not None and layer_type is not None and layer_type in parameters.values:
        parameters = parameters.section(layer_type)
    if parameters is not None:
        return parameters, parameters.number("rope_theta", config.number(base_key, base, above=1), above=1)
    return config.section("rope_scaling", None), config.number(base_key, base, above=1)


def lengthened(scaling, trained):
    """The context after scaling, as vLLM derives it: llama3's is in max_position_embeddings already."""
    if scaling is None:
        return trained
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind not in ("linear", "dynamic", "yarn"):
        return trained
    before = scaling.integer("original_max_position_embeddings", trained) if kind == "yarn" else trained
    return int(max(trained, min(before * scaling.number("factor", above=0), 2**53)))


def served(context, max_context):
    """The context to serve: the model's own, or a shorter one."""
    if max_context is not None and not 1 <= max_context <= context:
        raise ExportError(f"--max-context is {max_context}: it has to be at least 1 and at most the model's {context}")
    context = max_context or context
    if context > MOST_POSITIONS:
        raise ExportError(
            f"config.json: the context is {context:,} tokens: the exporter makes tables for at most {MOST_POSITIONS:,}. Give "
            "--max-context"
        )
    return context


def windows(config, layers, default_layers=None):
    """The window of each layer, for configurations that say which layers slide."""
    window = _or(config.integer("sliding_window", None), 0)
    types = config.list("layer_types", None)
    if types is not None:
        if len(types) != layers:
            raise ExportError(f"config.json: layer_types has {len(types)} entries for {layers} layers")
        for kind in types:
            if kind not in ("sliding_attention", "full_attention"):
                raise ExportError(f"config.json: layer_types has {kind!r}: the exporter has sliding_attention and full_attention")
        if "sliding_attention" in types and not window:
            raise ExportError("config.json: layer_types has sliding_attention and there is no sliding_window: add it")
        return [window if kind == "sliding_attention" else 0 for kind in types]
    return default_layers(window) if default_layers else [window] * layers


def _or(value, default):
    return default if value is None else value


