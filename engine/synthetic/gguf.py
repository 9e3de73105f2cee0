"""Made models as GGUF files, whole or in parts: names, values and keys as llama.cpp's converter has them."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from lazyio.engine.synthetic.folder import rows_tensor
from lazyio.engine.synthetic.gguf_keys import ARCHITECTURES, add_keys
from lazyio.engine.synthetic.output import NewFile, NewTensor, Progress, write_files
from lazyio.engine.synthetic.plan import Plan
from lazyio.engine.synthetic.rows import ROW_TYPES, Rows, encode
from lazyio.engine.weights.gguf_names import GgufNames, Stored
from lazyio.errors import SettingError
from lazyio.fetchers.base import Bytes
from lazyio.ple.dtypes import TYPES
from lazyio.ple.synthetic.gguf import TABLE

#: Types that parameters can have in a GGUF file, and rows of a table.
TRUNK_TYPES = ("F32", "BF16", "F16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
TABLE_TYPES = tuple(stored for stored in ROW_TYPES if not stored.startswith("F8_"))

_ALIGNMENT = 32
_MOST_PARTS = 65_535
# What divides the frequency of a pair that does not rotate.
_STILL = 1e30


def write_gguf(
    plan: Plan,
    path: str | os.PathLike[str],
    *,
    trunk: str = "BF16",
    table: str = "Q8_0",
    parts: int = 1,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> tuple[Path, ...]:
    """Write a model as GGUF, and return the paths of its files, the one to open first.

    `trunk` is the type of matrices whose rows are whole blocks of it; what else there is stays F32. With `parts` above
    1 the files are `<stem>-00001-of-<parts>.gguf` and so on: the first has the metadata and no tensor, the third (of
    two, the second) the table.
    Raises SettingError for types or parts that can't be, and what `write_files` raises; then no file is left behind.
    """
    if trunk not in TRUNK_TYPES or table not in TABLE_TYPES:
        raise SettingError(
            f"a GGUF file can have parameters of {', '.join(TRUNK_TYPES)} and a table of {', '.join(TABLE_TYPES)}; got "
            f"{trunk} and {table}"
        )
    if not 1 <= parts <= _MOST_PARTS:
        raise SettingError(f"a GGUF model can have 1 to {_MOST_PARTS} parts; got {parts}")
    tensors = [*_parameters(plan, trunk), *_rope_factors(plan)]
    rows: list[NewTensor] = []
    if plan.table is not None:
        of_table = Rows(table, plan.table.row_values, plan.seed)
        rows.append(rows_tensor(TABLE, table, of_table, (plan.table.rows, plan.table.row_values)))
    return write_files(list(_files(plan, Path(path), parts, tensors, rows)), overwrite=overwrite, progress=progress)


def _files(
    plan: Plan, path: Path, parts: int, tensors: Sequence[NewTensor], rows: Sequence[NewTensor]
) -> Iterator[NewFile]:
    if parts == 1:
        yield _file(plan, path, [*rows, *tensors], None)
        return
    total = len(tensors) + len(rows)
    of_table = min(3, parts) if rows else 0
    others = [number for number in range(2, parts + 1) if number != of_table] or [2]
    for number in range(1, parts + 1):
        name = path.with_name(f"{path.stem}-{number:05}-of-{parts:05}.gguf")
        own = list(rows) if number == of_table else []
        if number in others:
            at = others.index(number)
            own += tensors[len(tensors) * at // len(others) : len(tensors) * (at + 1) // len(others)]
        yield _file(plan, name, own, (number - 1, parts, total))


def _file(plan: Plan, path: Path, tensors: Sequence[NewTensor], split: tuple[int, int, int] | None) -> NewFile:
    """A file of these tensors, with the metadata if it is the first. `split`: its number, of how many, all tensors."""
    with tempfile.TemporaryDirectory() as folder:
        head = Path(folder) / "head"
        writer = GGUFWriter(head, ARCHITECTURES[plan.architecture])
        if split is None or split[0] == 0:
            add_keys(writer, plan)
        if split is not None:
            writer.add_uint16("split.no", split[0])
            writer.add_uint16("split.count", split[1])
            writer.add_int32("split.tensors.count", split[2])
        for tensor in tensors:
            kind = GGMLQuantizationType[tensor.dtype]
            # Of a plain dtype with the type beside it, the package takes the shape as it is.
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.size_bytes, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        content = head.read_bytes()
    return NewFile(path, content + bytes(-len(content) % _ALIGNMENT), tensors, _ALIGNMENT)


def _parameters(plan: Plan, trunk: str) -> Iterator[NewTensor]:
    """The stored tensors of all parameters; one that several share follows on the last of them."""
    names = GgufNames(plan.config)
    shared: dict[str, list[str]] = {}
    for parameter, shape in plan.shapes.items():
        for stored in names.of(parameter)[0]:
            if stored.place is None:
                yield _parameter(plan, [parameter], stored, _part_shape(shape, stored), trunk)
            else:
                shared.setdefault(stored.name, []).append(parameter)
    for name, parameters in shared.items():
        shape = (len(parameters), *plan.shapes[parameters[0]])
        yield _parameter(plan, parameters, Stored(name), shape, trunk)


def _part_shape(shape: tuple[int, ...], stored: Stored) -> tuple[int, ...]:
    """The shape of the part of a parameter that a tensor stores, without dimensions of 1."""
    cuts = (*stored.into, *(slice(None),) * (len(shape) - len(stored.into)))
    lengths = [len(range(*cut.indices(length))) for cut, length in zip(cuts, shape, strict=True)]
    return tuple(length for length in lengths if length > 1) or (1,)


def _parameter(plan: Plan, parameters: Sequence[str], stored: Stored, shape: tuple[int, ...], trunk: str) -> NewTensor:
    fits = len(shape) > 1 and shape[-1] % TYPES[trunk].block_values == 0 and "conv1d" not in stored.name
    kept = trunk if fits else "F32"

    def pieces() -> Iterator[Bytes]:
        for parameter in parameters:
            for values in _stored_values(plan, parameter, stored):
                yield encode(values.reshape(-1, shape[-1]), kept)

    return NewTensor(stored.name, kept, shape, math.prod(shape[:-1]) * TYPES[kept].row_bytes(shape[-1]), pieces)


def _stored_values(plan: Plan, parameter: str, stored: Stored) -> Iterator[torch.Tensor]:
    """What is stored of a parameter, a piece of its first dimension at a time where that can be."""
    values = plan.values(parameter)
    if stored.do is not None or stored.into[:1] not in ((), (slice(None),)):
        values = iter([torch.cat(list(values))])
    for piece in values:
        part = piece[stored.into]
        yield part if stored.do is None else stored.do(part)


def _rope_factors(plan: Plan) -> Iterator[NewTensor]:
    """What divides the frequencies of full layers, where some of them are still."""
    if plan.architecture != "gemma4":
        return
    pairs = plan.config["global_head_dim"] // 2
    rotated = int(pairs * plan.config["rope_parameters"]["full_attention"]["partial_rotary_factor"])
    data = np.array([1.0] * rotated + [_STILL] * (pairs - rotated), "<f4").view(np.uint8)
    yield NewTensor("rope_freqs.weight", "F32", (pairs,), data.nbytes, lambda: iter([data]))
