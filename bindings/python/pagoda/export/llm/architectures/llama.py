"""Llama 2, 3 and 3.1, and the many models of the same form: Vicuna, Yi, TinyLlama, SmolLM2."""

from . import common


def describe(config, max_context):
    size = common.sizes(config)
    bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    layers = [common.layer(size, index, bias=bias, out_bias=bias, mlp_bias=mlp_bias) for index in range(size.layers)]
    return common.decoder(config, size, layers, **common.rotation(config, size, max_context))
