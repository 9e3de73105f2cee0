"""A table out of the tensors that hold its rows: one tensor, or numbered shards.

Some tensors hold packed rows as if they were numbers. Their names end in what they are: "trellis" for rows of EXL3, and
the name of a type for what `tools/interleave.py` writes.
"""

from __future__ import annotations

import math
import re
import shlex
import struct
from collections.abc import Iterable, Sequence
from dataclasses import replace

from lazyio.errors import TableError
from lazyio.fetchers.base import Extent
from lazyio.ple.checkpoint import Checkpoint, StoredTensor, read_tensor
from lazyio.ple.dtypes import EXL3_TYPES, MLX_TYPES, TYPES
from lazyio.ple.exl3 import ROW_VALUES
from lazyio.ple.spec import NgramHash, TableSpec

#: What names of tables end in, the usual first.
KINDS = ("weight", "trellis", *(name.lower() for name in MLX_TYPES))

_SHARD = re.compile(r"(?P<table>.+)\.shard_(?P<number>[0-9]{1,9})\.(?P<kind>weight|trellis)", re.DOTALL)


def group_shards(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Names of tables, and the tensors that each consists of, shards in the order of their numbers.

    Shards `T.shard_N.weight` make up the table `T.weight`, and `T.shard_N.trellis` the table `T.trellis`; any other
    tensor is a table by itself.
    """
    tables: dict[str, tuple[str, ...]] = {}
    shards: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        shard = _SHARD.fullmatch(name)
        if shard is None:
            tables[name] = (name,)
        else:
            shards.setdefault(f"{shard['table']}.{shard['kind']}", []).append((int(shard["number"]), name))
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
        check_numbers(checkpoint, table, parts)
    _refuse_other_layouts(checkpoint, table, parts)
    tensors = [_as_rows(checkpoint.tensor(part)) for part in parts]
    row_bytes = _row_bytes(tensors)
    first = tensors[0]
    ngram = checkpoint.ngram(table) if is_ple else None
    return TableSpec(
        path=checkpoint.path,
        tensor=table,
        dtype=first.dtype,
        rows=sum(tensor.shape[0] for tensor in tensors),
        row_values=first.shape[1] if first.dtype in TYPES else 0,
        row_bytes=row_bytes,
        extents=_extents(tensors, row_bytes),
        architecture=checkpoint.architecture,
        ngram=ngram,
        scale=_scale(checkpoint, table) if first.dtype.startswith("F8_") else None,
        head_bias=_head_bias(checkpoint, table, ngram) if first.dtype in EXL3_TYPES else None,
        is_ple=is_ple,
    )


def check_numbers(checkpoint: Checkpoint, table: str, parts: Sequence[str]) -> None:
    """Raise TableError if the shards of a table are not numbered 0, 1, 2 and so on."""
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
        group_of = part.removesuffix(".weight")
        if group_of + ".scales" not in checkpoint.names:
            continue
        if group_of + ".biases" not in checkpoint.names:
            raise TableError(
                f"{checkpoint.path}: table {table} is quantised in groups with scales and without biases, which can't "
                "be decoded; use another version of the model"
            )
        raise TableError(
            f"{checkpoint.path}: table {table} is in MLX's group-quantised layout, with each row in three places "
            "(weight, scales, biases); bring its rows together once, and open what that writes: "
            f"python tools/interleave.py {shlex.quote(checkpoint.path)} NEW_FOLDER"
        )
    per_shard = [part + "_scale" for part in parts if part != table]
    for scale in (table + "_scale_inv", *per_shard, *(name + "_inv" for name in per_shard)):
        if scale in checkpoint.names:
            raise TableError(
                f"{checkpoint.path}: table {table} is scaled by {scale}; only one scale for the whole table, "
                f"{table}_scale, is read"
            )


def _as_rows(tensor: StoredTensor) -> StoredTensor:
    """A tensor of packed rows as one of values of their type; any other as it is."""
    kind = tensor.name.rpartition(".")[2]
    if kind == "trellis":
        words = tensor.shape[-1] if tensor.shape else 0
        stored, wanted = EXL3_TYPES.get(f"EXL3_K{(words - 1) // 10}"), "I16 [rows, 1 + 10 * bits of a value, 1 to 8]"
        proper = stored is not None and (tensor.dtype, words * 2) == ("I16", stored.block_bytes)
    elif kind.upper() in MLX_TYPES:
        stored, wanted = MLX_TYPES[kind.upper()], f"U8 [rows, multiple of {MLX_TYPES[kind.upper()].block_bytes}]"
        proper = tensor.dtype == "U8" and bool(tensor.shape) and tensor.shape[-1] % stored.block_bytes == 0
    else:
        return tensor
    if stored is None or not proper or len(tensor.shape) != 2:
        raise TableError(
            f"{tensor.path}: tensor {tensor.name!r} is {tensor.dtype} {list(tensor.shape)}, and by its name should be "
            f"{wanted}"
        )
    row_bytes = tensor.shape[1] * TYPES[tensor.dtype].block_bytes
    return replace(tensor, dtype=stored.name, shape=(tensor.shape[0], stored.row_values(row_bytes)))


def _row_bytes(tensors: Sequence[StoredTensor]) -> int:
    first = tensors[0]
    for tensor in tensors:
        where = f"{tensor.path}: tensor {tensor.name!r}"
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            raise TableError(f"{where} has shape {list(tensor.shape)}; a table has rows and values, some of each")
        if (tensor.dtype, tensor.shape[1]) != (first.dtype, first.shape[1]):
            raise _unlike(first, tensor)
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


def _unlike(first: StoredTensor, other: StoredTensor) -> TableError:
    # A type that is unknown is the likelier fault, whichever shard has it.
    odd, usual = (other, first) if first.dtype in TYPES else (first, other)
    unknown = "" if odd.dtype in TYPES else ", a type unknown here"
    return TableError(
        f"{odd.path}: tensor {odd.name!r} has rows of {odd.shape[1]} values of {odd.dtype}{unknown}, unlike "
        f"{usual.name!r} with {usual.shape[1]} of {usual.dtype}; shards of one table must be alike"
    )


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


def _head_bias(checkpoint: Checkpoint, table: str, ngram: NgramHash | None) -> Extent | None:
    """Where the biases of an EXL3 table lie, None where it has none."""
    name = table.removesuffix("trellis") + "head_bias"
    if name not in checkpoint.names:
        return None
    tensor = checkpoint.tensor(name)
    heads = len(ngram.head_sizes) if ngram else tensor.shape[0] if tensor.shape else 0
    if (tensor.dtype, tensor.shape) != ("F16", (heads, ROW_VALUES)) or not heads:
        raise TableError(
            f"{tensor.path}: {name} is {tensor.dtype} {list(tensor.shape)} and must be F16 "
            f"[{heads if ngram else 'heads'}, {ROW_VALUES}]: a bias for each n-gram head"
        )
    return Extent(tensor.path, tensor.offset, 0, heads)
