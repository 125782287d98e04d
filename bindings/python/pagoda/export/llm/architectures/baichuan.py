"""Baichuan 2: Llama's layers, with one weight W_pack for queries, keys and values, and a head of rows of length 1. 7B
rotates; 13B has ALiBi, and its config.json has no max_position_embeddings."""

import math

import numpy as np

from ..decoder import Linear
from . import common

# Baichuan 1 has the same model_type, this vocabulary, and an ordinary head.
FIRST_VOCABULARY = 64000


def describe(config, max_context):
    size = common.sizes(config)
    alibi = config.integer("max_position_embeddings", None) is None
    width = size.heads * size.head_size
    layers = [
        common.layer(
            size,
            index,
            qkv=common.linear(
                f"layers.{index}.qkv", {f"model.layers.{index}.self_attn.W_pack": 3 * width}, size.hidden_size
            ),
            rope=None if alibi else "rope",
        )
        for index in range(size.layers)
    ]
    if alibi:
        context = common.served(config.integer("model_max_length"), max_context)
        positions = {"max_context": context, "slopes": slopes(size.heads)}
    else:
        positions = common.rotation(config, size, max_context)
    unit_rows = size.vocab_size != FIRST_VOCABULARY
    head = Linear("head", ("lm_head.weight",), (size.vocab_size,), size.hidden_size, unit_rows=unit_rows)
    return common.decoder(config, size, layers, head=head, **positions)


def slopes(heads):
    """ALiBi's slopes: powers of 2^(-8/n) for n heads; where n is no power of two, every second one of the next power's
    fills up."""

    def of_power(count):
        return [2 ** (-8 * (index + 1) / count) for index in range(count)]

    below = 2 ** int(math.log2(heads))
    return np.array((of_power(below) + of_power(2 * below)[::2])[:heads], np.float32)
