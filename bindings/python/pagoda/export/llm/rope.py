"""Rotary position embeddings: the tables of cosines and sines, with the scalings that Hugging Face's configurations name."""

import math

import numpy as np

from ..error import ExportError
from .decoder import Rope

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "factors")


def table(scaling, base, size, positions, trained):
    """The tables for `positions` positions and `size` rotated numbers of a head.

    `scaling` is the Section of the configuration's rope_scaling, or None; `trained` is the context without scaling.
    """
    kind = _kind(scaling)
    exponents = np.arange(0, size, 2, dtype=np.float64) / size
    if kind == "dynamic":
        return Rope(positions, size // 2, _dynamic(scaling, base, exponents, trained))
    frequencies, factor = base**-exponents, 1.0
    if kind == "linear":
        frequencies = frequencies / scaling.number("factor", above=0)
    elif kind == "llama3":
        frequencies = _llama3(scaling, frequencies)
    elif kind == "yarn":
        frequencies, factor = _yarn(scaling, base, frequencies, size, trained)
    elif kind == "factors":
        frequencies = frequencies / _factors(scaling, size)
    return Rope(positions, size // 2, lambda at: at[:, None] * frequencies, factor)


def _kind(scaling):
    if scaling is None:
        return "default"
    key = "rope_type" if "rope_type" in scaling.values else "type"
    kind = scaling.text(key, "default")
    if kind not in KINDS:
        raise ExportError(
            f"{scaling.path(key)} is {kind!r}: the exporter has {', '.join(KINDS[:-1])}. Export a model with one of these, or "
            "without scaling"
        )
    return kind


def _dynamic(scaling, base, exponents, trained):
    """The base grows with the length, once that is beyond the trained one. Keys stay in pages as they were rotated, so each
    position is rotated by the base of the length that ends with it: what transformers does token by token."""
    size = 2 * len(exponents)
    factor = scaling.number("factor", above=0)

    def angles(at):
        lengths = np.maximum(at + 1, trained)
        bases = base * (factor * lengths / trained - (factor - 1)) ** (size / (size - 2))
        return at[:, None] * bases[:, None] ** -exponents

    return angles


def _llama3(scaling, frequencies):
    """Low frequencies are divided by the factor, high ones stay, those between are blended."""
    factor = scaling.number("factor", above=0)
    low = scaling.number("low_freq_factor", above=0)
    high = scaling.number("high_freq_factor", above=low)
    trained = scaling.integer("original_max_position_embeddings")
    turns = trained * frequencies / (2 * math.pi)
    blend = np.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (blend + (1 - blend) / factor)


def _yarn(scaling, base, frequencies, size, trained):
    """Dimensions that turn seldom within the trained context are interpolated, those that turn often are not."""
    factor = scaling.number("factor", above=0)
    trained = scaling.integer("original_max_position_embeddings", trained)
    fast, slow = scaling.number("beta_fast", 32.0, above=0), scaling.number("beta_slow", 1.0, above=0)

    def dimension(turns):
        return size * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = dimension(fast), dimension(slow)
    if scaling.flag("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    last += 0.001 if first == last else 0
    interpolated = np.clip((np.arange(len(frequencies)) - first) / (last - first), 0, 1)
    scaled = frequencies * (1 - interpolated) + frequencies / factor * interpolated
    return scaled, _yarn_attention(scaling, factor)


def _yarn_attention(scaling, factor):
    def temperature(mscale):
        return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0

    given = scaling.number("attention_factor", None)
    if given is not None:
        return given
    mscale, over_all = scaling.number("mscale", None), scaling.number("mscale_all_dim", None)
    return temperature(mscale) / temperature(over_all) if mscale and over_all else temperature(1.0)


def _factors(scaling, size):
    """A divisor of each frequency, as GGUF files have them in rope_freqs."""
    factors = np.asarray(scaling.list("factors"), np.float64)
    if factors.shape != (size // 2,) or not (factors > 0).all():
        raise ExportError(f"{scaling.path('factors')} has {factors.size} numbers: it has to have {size // 2}, all above 0")
    return factors
