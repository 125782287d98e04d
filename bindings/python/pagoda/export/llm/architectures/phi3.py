"""Phi-3: Llama's layers, with one weight for queries, keys and values, one for gate and up, and a sliding window."""

from . import common


def describe(config, max_context):
    size = common.sizes(config)
    windows = common.windows(config, size.layers)
    heads = (size.heads + 2 * size.kv_heads) * size.head_size
    layers = [
        common.layer(
            size,
            index,
            window=window,
            qkv=common.linear(
                f"layers.{index}.qkv", {f"model.layers.{index}.self_attn.qkv_proj": heads}, size.hidden_size
            ),
            gate_up=common.linear(
                f"layers.{index}.gate_up", {f"model.layers.{index}.mlp.gate_up_proj": 2 * size.mlp_size}, size.hidden_size
            ),
        )
        for index, window in enumerate(windows)
    ]
    return common.decoder(config, size, layers, **common.rotation(config, size, max_context))
