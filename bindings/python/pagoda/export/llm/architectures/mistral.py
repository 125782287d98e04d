"""Mistral: Llama's layers with a sliding window in all of them."""

from . import common


def describe(config, max_context):
    size = common.sizes(config)
    windows = common.windows(config, size.layers)
    layers = [common.layer(size, index, window=window) for index, window in enumerate(windows)]
    return common.decoder(config, size, layers, **common.rotation(config, size, max_context))
