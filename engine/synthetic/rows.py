"""Rows of a table that look like a model's: values about as a normal distribution has them, stored in any type.

A row is put together of blocks out of a pool, chosen by a hash of the row's number, so that hardly two rows of a table
are equal, any row can be made alone, and making them is no slower than writing them.
"""

from __future__ import annotations

import numpy as np
import torch

from lazyio.errors import Unsupported
from lazyio.fetchers.base import Bytes
from lazyio.ple.codec import decode
from lazyio.ple.dtypes import TYPES
from lazyio.ple.ngram import UInt64, splitmix64

#: What the values of an fp8 table are divided by before they are stored.
SCALE = 2.0**-7

_POOL_BITS = 14  # of the number of a block
_PLAIN_BLOCK_VALUES = 32  # of a type that stores value by value
_QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")
# Types that no package quantises to: where a block has its float16 scales, and how each compares to the first, so that
# values spread around 0. The second one of Q4_K and Q5_K is what is taken off them.
_RAW: dict[str, tuple[tuple[int, float], ...]] = {
    "IQ4_NL": ((0, 1.0),),
    "Q4_K": ((0, 1.0), (2, 7.5)),
    "Q5_K": ((0, 1.0), (2, 15.5)),
    "Q6_K": ((208, 1.0),),
}
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn}

#: Types that rows can be made in.
ROW_TYPES = (*_FLOATS, *_QUANTISED, *_RAW)


class Rows:
    """The rows of one table, any of them, in any order."""

    def __init__(self, stored: str, row_values: int, seed: int) -> None:
        """Raises Unsupported for a type that rows can't be made in, TableError for rows of no whole blocks."""
        if stored not in ROW_TYPES:
            raise Unsupported(f"rows of {stored} can't be made; these can: {', '.join(ROW_TYPES)}")
        self.row_bytes = TYPES[stored].row_bytes(row_values)
        block_values = TYPES[stored].block_values
        if block_values == 1:
            block_values = _PLAIN_BLOCK_VALUES if row_values % _PLAIN_BLOCK_VALUES == 0 else row_values
        self._seed = np.uint64(seed)
        self._pool = _pool(stored, block_values, seed)
        blocks = row_values // block_values
        # Odd and large, so that the first bits of a product depend on all bits of the other factor.
        self._factors = splitmix64(np.arange(blocks, dtype=np.uint64)) | np.uint64(1)

    def fill(self, first: int, out: Bytes) -> None:
        """Put the rows from `first` on into `out`, uint8 [n, row_bytes]."""
        ids: UInt64 = np.arange(first, first + len(out), dtype=np.uint64)
        words = splitmix64(splitmix64(ids) ^ self._seed)[:, None] * self._factors
        blocks = (words >> np.uint64(64 - _POOL_BITS)).astype(np.intp)
        np.take(self._pool, blocks, axis=0, out=out.reshape(*blocks.shape, -1), mode="clip")


def encode(values: torch.Tensor, stored: str) -> Bytes:
    """Float32 values [..., n] as they are stored: uint8 [..., bytes]. `stored` is a float type or a quantised one."""
    if stored in _FLOATS:
        most = torch.finfo(_FLOATS[stored]).max  # what lies beyond would be no number in fp8
        return values.clamp(-most, most).to(_FLOATS[stored]).contiguous().view(torch.uint8).numpy()
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    packed: Bytes = quantize(values.contiguous().numpy(), GGMLQuantizationType[stored])
    return packed


def _pool(stored: str, block_values: int, seed: int) -> Bytes:
    """Blocks, uint8 [blocks, block_bytes], of values with a standard deviation of 1."""
    generator = torch.Generator().manual_seed(seed)
    if stored in _RAW:
        return _raw_blocks(stored, generator)
    scale = SCALE if stored.startswith("F8_") else 1.0
    return encode(torch.randn(1 << _POOL_BITS, block_values, generator=generator) / scale, stored)


def _raw_blocks(stored: str, generator: torch.Generator) -> Bytes:
    """Random bits, with scales that give their values that spread."""
    block_bytes = TYPES[stored].block_bytes
    blocks: Bytes = torch.randint(
        0, 256, (1 << _POOL_BITS, block_bytes), dtype=torch.uint8, generator=generator
    ).numpy()
    _set_scales(blocks, stored, 1.0)
    _set_scales(blocks, stored, 1 / float(decode(blocks[:4096], stored).std()))
    return blocks


def _set_scales(blocks: Bytes, stored: str, scale: float) -> None:
    for offset, factor in _RAW[stored]:
        blocks[:, offset : offset + 2] = np.array([scale * factor], np.float16).view(np.uint8)
