"""A table out of the tensors that hold its rows: one tensor, or numbered shards."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Sequence

from lazyio.errors import TableError
from lazyio.fetchers.base import Extent
from lazyio.ple.checkpoint import Checkpoint, StoredTensor, read_tensor
from lazyio.ple.dtypes import TYPES
from lazyio.ple.spec import TableSpec

_SHARD = re.compile(r"(?P<table>.+)\.shard_(?P<number>[0-9]{1,9})\.weight", re.DOTALL)


def group_shards(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Names of tables, and the tensors that each consists of, shards in the order of their numbers.

    Shards `T.shard_N.weight` make up the table `T.weight`; any other tensor is a table by itself.
    """
    tables: dict[str, tuple[str, ...]] = {}
    shards: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        shard = _SHARD.fullmatch(name)
        if shard is None:
            tables[name] = (name,)
        else:
            shards.setdefault(shard["table"] + ".weight", []).append((int(shard["number"]), name))
    for table, numbered in shards.items():
        # A table that is there whole as well as in shards keeps both names apart: the shards stay tensors of their own.
        if table not in tables:
            tables[table] = tuple(name for _, name in sorted(numbered))
    return tables


def build_table(checkpoint: Checkpoint, table: str, parts: Sequence[str], *, is_ple: bool) -> TableSpec:
    """The table whose rows are those of `parts`, one after the other.

    Raises TableError for parts that are missing or don't fit each other, tensors that have no rows of values, and
    layouts that can't be read row by row.
    """
    if parts != (table,):
        _check_numbers(checkpoint, table, parts)
    _refuse_other_layouts(checkpoint, table, parts)
    tensors = [checkpoint.tensor(part) for part in parts]
    row_bytes = _row_bytes(tensors)
    first = tensors[0]
    return TableSpec(
        path=checkpoint.path,
        tensor=table,
        dtype=first.dtype,
        rows=sum(tensor.shape[0] for tensor in tensors),
        row_values=first.shape[1] if first.dtype in TYPES else 0,
        row_bytes=row_bytes,
        extents=_extents(tensors, row_bytes),
        architecture=checkpoint.architecture,
        ngram=checkpoint.ngram(table) if is_ple else None,
        scale=_scale(checkpoint, table) if first.dtype.startswith("F8_") else None,
        is_ple=is_ple,
    )


def _check_numbers(checkpoint: Checkpoint, table: str, parts: Sequence[str]) -> None:
    for wanted, part in enumerate(parts):
        shard = _SHARD.fullmatch(part)
        number = -1 if shard is None else int(shard["number"])
        if number > wanted:
            raise TableError(
                f"{checkpoint.path}: table {table} has {len(parts)} shards here and lacks shard {wanted}; "
                "if it lies in another file, give the path of the model's folder"
            )
        if number < wanted:
            raise TableError(f"{checkpoint.path}: table {table} has shard {number} twice")


def _refuse_other_layouts(checkpoint: Checkpoint, table: str, parts: Sequence[str]) -> None:
    for part in parts:
        if part.removesuffix(".weight") + ".scales" in checkpoint.names:
            raise TableError(
                f"{checkpoint.path}: table {table} is in MLX's group-quantised layout (weight, scales, biases), "
                "which can't be read row by row; use a GGUF, bf16 or fp8 version of the model"
            )
    per_shard = [part + "_scale" for part in parts if part != table]
    for scale in (table + "_scale_inv", *per_shard, *(name + "_inv" for name in per_shard)):
        if scale in checkpoint.names:
            raise TableError(
                f"{checkpoint.path}: table {table} is scaled by {scale}; only one scale for the whole table, "
                f"{table}_scale, is read"
            )


def _row_bytes(tensors: Sequence[StoredTensor]) -> int:
    first = tensors[0]
    for tensor in tensors:
        where = f"{tensor.path}: tensor {tensor.name!r}"
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            raise TableError(f"{where} has shape {list(tensor.shape)}; a table has rows and values, some of each")
        if (tensor.dtype, tensor.shape[1]) != (first.dtype, first.shape[1]):
            raise TableError(
                f"{where} has rows of {tensor.shape[1]} values of {tensor.dtype}, unlike {first.name!r} with "
                f"{first.shape[1]} of {first.dtype}; shards of one table must be alike"
            )
        if not tensor.size_bytes or tensor.size_bytes % tensor.shape[0]:
            raise TableError(
                f"{where} has the type {tensor.dtype}, which is unknown here, and the room it takes does not tell how "
                "many bytes a row has; give the geometry of its rows and open it as a raw table"
            )
        if tensor.size_bytes // tensor.shape[0] != (first.size_bytes or 0) // first.shape[0]:
            raise TableError(f"{where} has rows of other bytes than {first.name!r}; shards of one table must be alike")
    row_bytes = (first.size_bytes or 0) // first.shape[0]
    if first.dtype in TYPES and row_bytes != TYPES[first.dtype].row_bytes(first.shape[1]):
        raise TableError(
            f"{first.path}: tensor {first.name!r} has {row_bytes} bytes a row, which can't be {first.shape[1]} values "
            f"of {first.dtype}"
        )
    return row_bytes


def _extents(tensors: Sequence[StoredTensor], row_bytes: int) -> tuple[Extent, ...]:
    """One extent a run of tensors that lie back to back in one file."""
    extents: list[Extent] = []
    first_row = 0
    for tensor in tensors:
        rows = tensor.shape[0]
        last = extents[-1] if extents else None
        if last is not None and (tensor.path, tensor.offset) == (last.path, last.offset + last.rows * row_bytes):
            extents[-1] = Extent(last.path, last.offset, last.first_row, last.rows + rows)
        else:
            extents.append(Extent(tensor.path, tensor.offset, first_row, rows))
        first_row += rows
    return tuple(extents)


def _scale(checkpoint: Checkpoint, table: str) -> float | None:
    """The one scale of an fp8 table, None where it has none."""
    name = table + "_scale"
    if name not in checkpoint.names:
        return None
    tensor = checkpoint.tensor(name)
    if math.prod(tensor.shape) != 1 or tensor.dtype not in ("BF16", "F32"):
        raise TableError(
            f"{tensor.path}: {name} is {tensor.dtype} {list(tensor.shape)}; a table is read with one scale in BF16 or "
            "F32, not with a scale for each block"
        )
    # BF16 is the upper half of F32.
    (scale,) = struct.unpack("<f", read_tensor(tensor).rjust(4, b"\0"))
    if not math.isfinite(scale) or scale == 0:
        raise TableError(f"{tensor.path}: {name} is {scale}, which can't scale a table")
    return float(scale)
