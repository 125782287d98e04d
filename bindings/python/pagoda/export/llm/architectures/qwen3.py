"""Qwen3: Llama's layers, with a norm of each query and key head."""

from ..decoder import Norm
from . import common, qwen2


def describe(config, max_context):
    size = common.sizes(config)
    bias = config.flag("attention_bias", False)
    layers = [
        common.layer(
            size,
            index,
            bias=bias,
            out_bias=bias,
            window=window,
            query_norm=Norm(f"model.layers.{index}.self_attn.q_norm.weight", size.epsilon),
            key_norm=Norm(f"model.layers.{index}.self_attn.k_norm.weight", size.epsilon),
        )
        for index, window in enumerate(qwen2.windows(config, size.layers))
    ]
    return common.decoder(config, size, layers, **common.rotation(config, size, max_context))
