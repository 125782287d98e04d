"""Qwen2 and Qwen2.5: Llama's layers, with biases of queries, keys and values."""

from . import common


def describe(config, max_context):
    size = common.sizes(config)
    layers = [
        common.layer(size, index, bias=True, window=window)
        for index, window in enumerate(windows(config, size.layers))
    ]
    return common.decoder(config, size, layers, **common.rotation(config, size, max_context))


def windows(config, layers):
    """sliding_window counts only with use_sliding_window, and only from layer max_window_layers on."""
    if not config.flag("use_sliding_window", False):
        return [0] * layers
    first = config.integer("max_window_layers", 28, least=0)
    return common.windows(config, layers, lambda window: [window if index >= first else 0 for index in range(layers)])
