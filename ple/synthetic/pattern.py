"""Rows whose bytes follow from their id, so that any row read back can be checked without the file.

Row r of a table with `row_bytes` bytes a row:

    from byte 0                words of 8 bytes, little-endian, as many as fit, the last one cut short;
                               word k = splitmix64(r) * (2 * k + 1) mod 2**64, with bit 6 (0x40) of each byte cleared
    in the last 16 bytes       r in decimal digits, ASCII, zeros in front

    xxd -s $((OFFSET + r * ROW_BYTES)) -l ROW_BYTES FILE

therefore ends in the number of the row. No two rows are equal, a piece of one is hardly ever the same piece of another,
and the table does not compress.

With bit 6 clear in every byte, no float among them, wherever a type's blocks have their scales, has an exponent of ones
only. So rows are valid in every type of GGUF and safetensors, and decode to finite values.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lazyio.errors import RowIndexError, TableError
from lazyio.fetchers.base import Bytes
from lazyio.ple.dtypes import TYPES
from lazyio.ple.ngram import UInt64, splitmix64

_DIGITS = 16
_CLEAR = np.uint64(0xBFBFBFBFBFBFBFBF)
# The digits of 0000 to 9999, four bytes each.
_FOUR_DIGITS = np.frombuffer(b"".join(b"%04d" % number for number in range(10_000)), np.uint32)


def row_bytes_of(dtype: str, row_values: int) -> int:
    """Bytes of a row. Raises TableError for an unknown type, part of a block, or a row too short for its number."""
    if dtype not in TYPES:
        raise TableError(f"there is no type {dtype}; types are {', '.join(sorted(TYPES))}")
    row_bytes = TYPES[dtype].row_bytes(row_values)
    if row_bytes < _DIGITS:
        raise TableError(
            f"a row of {row_values} values of {dtype} has {row_bytes} bytes; to be checkable it needs {_DIGITS} or more"
        )
    return row_bytes


def expected_rows(ids: ArrayLike, dtype: str = "IQ4_NL", row_values: int = 160) -> Bytes:
    """The rows of a synthetic table, uint8 [n, row_bytes], for row ids [n].

    Raises TableError as `row_bytes_of` does, RowIndexError for ids that are not integers from 0 to 10**16 - 1.
    """
    given = np.asarray(ids)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise RowIndexError(
            f"row ids must be integers in one dimension; got {given.dtype} of shape {list(given.shape)}"
        )
    if given.size and (given.min() < 0 or given.max() >= 10**_DIGITS):
        raise RowIndexError(f"row ids must lie in 0 to {10**_DIGITS - 1}; got {given.min()} to {given.max()}")
    rows = np.empty((given.size, row_bytes_of(dtype, row_values)), np.uint8)
    fill_rows(given.astype(np.uint64), rows)
    return rows


def fill_rows(ids: UInt64, out: Bytes) -> None:
    """Put the rows `ids` [n] into `out` uint8 [n, row_bytes]."""
    noise_bytes = out.shape[1] - _DIGITS
    factors = np.arange(-(-noise_bytes // 8), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    words: NDArray[np.uint64] = splitmix64(ids)[:, None] * factors
    words &= _CLEAR
    out[:, :noise_bytes] = words.astype("<u8", copy=False).view(np.uint8)[:, :noise_bytes]
    out[:, noise_bytes:] = _digits(ids).view(np.uint8)


def _digits(ids: UInt64) -> NDArray[np.uint32]:
    """The decimal digits of ids [n], four to an entry: [n, 4]."""
    groups = np.empty((len(ids), _DIGITS // 4), np.uint32)
    base = np.uint64(10_000)
    for group in reversed(range(groups.shape[1])):
        quotient = ids // base
        groups[:, group] = _FOUR_DIGITS[(ids - quotient * base).view(np.int64)]
        ids = quotient
    return groups
