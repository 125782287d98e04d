"""Weights in blocks of 32 along a row, at 4 or 8 bits: what com.microsoft.MatMulNBits multiplies by."""

import numpy as np

from ..readers.checkpoint import Blocks

BLOCK = 32
# Parts of the block's range that are tried for 4 bits; the one with the least squared error is kept.
SHRINKS = np.linspace(1.0, 0.8, 9, dtype=np.float32)


def quantised(rows, bits, dtype=np.float32):
    """The Blocks nearest to f32 rows [N, K], with scales that `dtype` holds. 8 bits are symmetric; 4 bits have the low end of each
    block too, which halves the error."""
    blocks = rows.reshape(len(rows), -1, BLOCK)
    return _eight(blocks, dtype) if bits == 8 else _four(blocks, dtype)


def _eight(blocks, dtype):
    scale = _held(np.abs(blocks).max(-1) / 127, dtype)
    codes = _rounded(blocks, scale, np.float32(0)[None, None], -127, 127) + 128
    return Blocks(codes.astype(np.uint8).reshape(len(blocks), -1), 8, scale, None)


def _four(blocks, dtype):
    low, high = blocks.min(-1), blocks.max(-1)
    middle = low / 2 + high / 2
    best = None
    for shrink in SHRINKS:
        scale = _held((high / 15 - low / 15) * shrink, dtype)
        from_low = middle + (low - middle) * shrink
        codes = _rounded(blocks, scale, from_low, 0, 15)
        error = ((codes * scale[..., None] + from_low[..., None] - blocks) ** 2).sum(-1)
        if best is None:
            best = [error, codes, scale, from_low]
            continue
        better = error < best[0]
        for kept, new in zip(best, (error, codes, scale, from_low)):
            kept[better] = new[better]
    _, codes, scale, from_low = best
    return Blocks(codes.astype(np.uint8).reshape(len(blocks), -1), 4, scale, from_low)


def _held(scale, dtype):
    return scale.astype(dtype).astype(np.float32)


def _rounded(blocks, scale, low, least, most):
    """Codes of the blocks; a block whose scale is 0 has codes 0."""
    scale = scale[..., None]
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    return np.clip(np.rint((blocks - low[..., None]) * inverse), least, most)


def values(blocks):
    """The f32 weights that Blocks stand for."""
    codes = blocks.codes.reshape(len(blocks.codes), -1, BLOCK).astype(np.float32)
    scale = blocks.scale[..., None].astype(np.float32)
    if blocks.low is None:
        return ((codes - 2 ** (blocks.bits - 1)) * scale).reshape(blocks.codes.shape)
    return (codes * scale + blocks.low[..., None].astype(np.float32)).reshape(blocks.codes.shape)


def packed(blocks):
    """The codes as MatMulNBits has them: u8 [N, K / 32, bytes of a block]."""
    codes = blocks.codes.reshape(len(blocks.codes), -1, BLOCK)
    return codes if blocks.bits == 8 else codes[..., 0::2] | codes[..., 1::2] << 4


def offset(blocks):
    """What a block adds to each weight beyond MatMulNBits' scale * (code - middle), f32 [N, K / 32]; None: nothing."""
    if blocks.low is None:
        return None
    return blocks.low.astype(np.float32) + blocks.scale.astype(np.float32) * 2 ** (blocks.bits - 1)


def widened(blocks):
    """The same weights at 8 bits. Codes stay around the middle: MatMulNBits rounds its inputs, and a product of codes far from
    it, which an offset has to take back, would be rounding errors alone."""
    if blocks.bits == 8:
        return blocks
    scale = blocks.scale.astype(np.float32)
    low = None if blocks.low is None else blocks.low.astype(np.float32) - 120 * scale
    return Blocks(blocks.codes + np.uint8(120), 8, scale, low)
