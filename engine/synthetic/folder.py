"""Made models as folders, in the form that transformers saves a text model in."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from lazyio.engine.synthetic.configs import Table
from lazyio.engine.synthetic.output import NewFile, NewTensor, Progress, write_files
from lazyio.engine.synthetic.plan import Plan
from lazyio.engine.synthetic.rows import SCALE, Rows, encode
from lazyio.engine.synthetic.tokenizer import CHAT_TEMPLATE, END, TURN_END, token_id
from lazyio.errors import SettingError
from lazyio.fetchers.base import Bytes
from lazyio.ple.dtypes import TYPES

#: Types that parameters can have in a folder, and rows of a table.
TRUNK_TYPES = ("F32", "BF16", "F16")
TABLE_TYPES = (*TRUNK_TYPES, "F8_E4M3")

_FILE_BYTES = 4 << 30
_PIECE_BYTES = 8 << 20
_INDEX = "model.safetensors.index.json"
_CLASSES = {
    "gemma3n": "Gemma3nForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "qwen4_exp": "Qwen4ExpForCausalLM",
}
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def write_folder(
    plan: Plan,
    path: str | os.PathLike[str],
    *,
    trunk: str = "BF16",
    table: str = "BF16",
    shards: int = 4,
    with_trunk: bool = True,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> tuple[Path, ...]:
    """Write a model into a folder, made if need be, and return the paths of the files.

    `trunk` and `table` are types of the parameters and of the rows. A table of n-grams is cut in `shards` tensors, a
    number that must divide its rows. Without the trunk there are configuration, tokenizer and table only.
    Raises SettingError for types or shards that can't be, and what `write_files` raises; then no file is left behind.
    """
    folder = Path(path)
    if trunk not in TRUNK_TYPES or table not in TABLE_TYPES:
        raise SettingError(
            f"a folder can have parameters of {', '.join(TRUNK_TYPES)} and a table of {', '.join(TABLE_TYPES)}; got "
            f"{trunk} and {table}"
        )
    groups: list[list[NewTensor]] = []
    if with_trunk:
        groups += _by_file([_parameter(plan, name, shape, trunk) for name, shape in plan.shapes.items()])
    if plan.table is not None:
        groups += _by_file([*_beside(plan.table, table), *_rows(plan.table, table, plan.seed, shards)])
    new_folder = not folder.exists()
    with suppress(FileExistsError):
        folder.mkdir()
    try:
        return write_files(
            [*_weights(folder, groups), *_others(plan, folder, trunk, shards)], overwrite=overwrite, progress=progress
        )
    except BaseException:
        if new_folder:
            with suppress(OSError):
                folder.rmdir()
        raise


def _parameter(plan: Plan, name: str, shape: tuple[int, ...], trunk: str) -> NewTensor:
    def pieces() -> Iterator[Bytes]:
        for values in plan.values(name):
            yield encode(values, trunk)

    return NewTensor(name, trunk, shape, math.prod(shape) * TYPES[trunk].block_bytes, pieces)


def _rows(table: Table, stored: str, seed: int, shards: int) -> Iterator[NewTensor]:
    """The tensors of the table: in a table of n-grams so many shards, else the one."""
    count = shards if table.ngram else 1
    each, rest = divmod(table.rows, count)
    if rest:
        raise SettingError(
            f"{count} shards don't divide the {table.rows} rows of the table; a power of 2 up to 128 does"
        )
    rows = Rows(stored, table.row_values, seed)
    shard = table.tensor.removesuffix("weight") + "shard_{}.weight"
    for number in range(count):
        name = shard.format(number) if table.ngram else table.tensor
        yield rows_tensor(name, stored, rows, (each, table.row_values), number * each)


def rows_tensor(name: str, stored: str, rows: Rows, shape: tuple[int, int], first: int = 0) -> NewTensor:
    """A tensor of rows from `first` on."""
    count, step = shape[0], max(1, _PIECE_BYTES // rows.row_bytes)

    def pieces() -> Iterator[Bytes]:
        for start in range(0, count, step):
            piece = np.empty((min(step, count - start), rows.row_bytes), np.uint8)
            rows.fill(first + start, piece)
            yield piece

    return NewTensor(name, stored, shape, count * rows.row_bytes, pieces)


def _beside(table: Table, stored: str) -> Iterator[NewTensor]:
    """The small tensors that belong to the table: constants of its row ids, and a scale."""
    base = table.tensor.removesuffix("ngram_embedding.weight")
    if table.ngram:
        for name, numbers in (
            ("layer_multipliers", table.ngram.multipliers),
            ("ngram_heads_offsets", table.ngram.head_offsets),
            ("ngram_heads_vocab_sizes", table.ngram.head_sizes),
        ):
            yield _small(base + name, "I64", np.array(numbers, "<i8"))
    if stored.startswith("F8_"):
        yield _small(f"{table.tensor}_scale", "F32", np.array([SCALE], "<f4"))


def _small(name: str, dtype: str, values: np.ndarray[Any, Any]) -> NewTensor:
    data: Bytes = values.view(np.uint8)
    return NewTensor(name, dtype, values.shape, data.nbytes, lambda: iter([data]))


def _by_file(tensors: Sequence[NewTensor]) -> list[list[NewTensor]]:
    """Tensors in order, as many in a file as it should have bytes for."""
    groups: list[list[NewTensor]] = []
    room = 0
    for tensor in tensors:
        if tensor.size_bytes > room or not groups:
            groups.append([])
            room = _FILE_BYTES
        groups[-1].append(tensor)
        room -= tensor.size_bytes
    return groups


def _weights(folder: Path, groups: Sequence[Sequence[NewTensor]]) -> Iterator[NewFile]:
    """The files of tensors, and their index."""
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(groups, 1):
        name = f"model-{number:05}-of-{len(groups):05}.safetensors"
        weight_map |= {tensor.name: name for tensor in tensors}
        yield NewFile(folder / name, _head(tensors), tensors)
    total = sum(tensor.size_bytes for tensors in groups for tensor in tensors)
    yield _json(folder / _INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def _head(tensors: Sequence[NewTensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.size_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _others(plan: Plan, folder: Path, trunk: str, shards: int) -> Iterator[NewFile]:
    """Configuration and tokenizer."""
    config = {"architectures": [_CLASSES[plan.architecture]], **plan.config, "dtype": _DTYPES[trunk]}
    if plan.table is not None and plan.table.ngram:
        config["split_ngram_parts"] = shards
    yield _json(folder / "config.json", config)
    tokenizer = plan.tokenizer
    yield NewFile(folder / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
    named = {"bos_token": None, "eos_token": TURN_END, "pad_token": END, "chat_template": CHAT_TEMPLATE}
    yield _json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **named})
    ends = [token_id(tokenizer, token) for token in (TURN_END, END)]
    yield _json(folder / "generation_config.json", {"eos_token_id": ends, "pad_token_id": ends[1]})


def _json(path: Path, content: dict[str, Any]) -> NewFile:
    return NewFile(path, json.dumps(content, indent=2, sort_keys=True).encode() + b"\n")
