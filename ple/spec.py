"""What a table is, once its file has been read: geometry, type, place and the constants of its row ids."""

from __future__ import annotations

from dataclasses import dataclass

from lazyio.fetchers.base import Extent


@dataclass(frozen=True, slots=True)
class NgramHash:
    """Constants of the n-gram hash of qwen4_exp; ple/rowids.py has the formula."""

    multipliers: tuple[int, ...]  # one a position of the n-gram, the current token first
    head_sizes: tuple[int, ...]  # rows of each head, all prime
    head_offsets: tuple[int, ...]  # first row of each head
    heads_per_ngram: int
    eos: int  # the token id that cuts the context; not the chat end token


@dataclass(frozen=True, slots=True)
class TableSpec:
    """One table of rows, as found in a file, a set of parts or a folder.

    `dtype` is the name of the stored type: a GGUF type ("IQ4_NL", "Q8_0", "BF16", "F16", "F32", ...), "F8_E4M3", one of
    EXL3 ("EXL3_K4") or one of MLX ("MLX_Q4_G32").
    `row_values` is the number of values of a row, 0 where the type is unknown to this package and only packed rows can
    be had. `extents` are in order of their first row and together hold rows 0 .. rows-1.
    """

    path: str
    tensor: str
    dtype: str
    rows: int
    row_values: int
    row_bytes: int
    extents: tuple[Extent, ...]
    architecture: str | None = None  # as the file calls it
    ngram: NgramHash | None = None
    scale: float | None = None  # of an fp8 table: value = fp8 * scale
    head_bias: Extent | None = None  # of an EXL3 table: F16 [heads, row_values], added to a row of that n-gram head
    is_ple: bool = False  # whether it is a per-layer embedding table of a known model

    @property
    def table_bytes(self) -> int:
        """Bytes of all rows as stored."""
        return self.rows * self.row_bytes
