"""A table in a file without a header, whose geometry the caller states."""

from __future__ import annotations

import operator
import os
from typing import SupportsIndex

from lazyio.errors import TableError
from lazyio.fetchers.base import Extent
from lazyio.ple.checkpoint import SourceFile
from lazyio.ple.dtypes import TYPES
from lazyio.ple.spec import TableSpec


def raw_table(
    path: str | bytes | os.PathLike[str],
    *,
    rows: int | None = None,
    row_bytes: int,
    offset: int = 0,
    dtype: str = "U8",
    row_values: int | None = None,
) -> TableSpec:
    """The table of `rows` rows of `row_bytes` bytes that starts `offset` bytes into a file.

    `rows` None takes as many whole rows as the file has. `dtype` is the name of a stored type, such as "IQ4_NL" or
    "BF16"; `row_values` follows from it and is only checked where given. Raises TableError for a geometry that
    contradicts itself or does not fit the file, TypeError for numbers that are not whole.
    """
    path = os.fsdecode(path)
    row_bytes, offset = _whole("row_bytes", row_bytes), _whole("offset", offset)
    if row_bytes < 1 or offset < 0:
        raise TableError(f"{path}: rows of {row_bytes} bytes from byte {offset} can't be; state at least 1 and 0")
    if dtype not in TYPES:
        raise TableError(f"{path}: rows of the unknown type {dtype!r}; known are {', '.join(sorted(TYPES))}")
    try:
        values = TYPES[dtype].row_values(row_bytes)
    except TableError as error:
        raise TableError(f"{path}: {error}") from None
    if row_values is not None and row_values != values:
        raise TableError(f"{path}: {row_bytes} bytes of {dtype} hold {values} values, not {row_values}")
    with SourceFile(path) as source:
        fitting = max(0, source.size - offset) // row_bytes
    rows = fitting if rows is None else _whole("rows", rows)
    if rows < 1 or rows > fitting:
        raise TableError(
            f"{path} has {source.size} bytes, which is room for {fitting} rows of {row_bytes} bytes from byte {offset} "
            f"on; {rows} rows can't be a table in it"
        )
    return TableSpec(
        path=path,
        tensor=os.path.basename(path),
        dtype=dtype,
        rows=rows,
        row_values=values,
        row_bytes=row_bytes,
        extents=(Extent(path, offset, 0, rows),),
    )


def _whole(name: str, value: SupportsIndex) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, and is {value!r}") from None
