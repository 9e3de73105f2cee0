"""Synthetic tables as safetensors: one file, or a folder with an index and the model's config.json."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lazyio.errors import SettingError, TableError
from lazyio.ple.dtypes import SAFETENSORS_TYPES
from lazyio.ple.synthetic.models import LAYER_VALUES, Model, model_of
from lazyio.ple.synthetic.output import NewFile, Progress, Run, write_files
from lazyio.ple.synthetic.pattern import row_bytes_of

#: What an fp8 table is scaled by.
SCALE = 2.0**-7

_PLE = "model.language_model.layers.1.ple.ple_embedding."
_GEMMA_TABLE = "model.language_model.embed_tokens_per_layer.weight"
_INDEX = "model.safetensors.index.json"
_USUAL_SHARDS = 128


def write_safetensors(
    path: str | os.PathLike[str],
    rows: int,
    dtype: str = "BF16",
    row_values: int | None = None,
    *,
    shards: int | None = None,
    files: int = 1,
    architecture: str = "qwen4exp",
    sparse: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> tuple[Path, ...]:
    """Write a table of `rows` rows, each as `pattern` says, and return the paths of the safetensors files.

    A path that ends in `.safetensors` is one file; any other is a folder, made if need be, that gets `files` of them,
    an index and a config.json, without which the row ids of an n-gram table can't be known. `shards` cuts the table of
    qwen4exp in tensors of about equal size, 128 by default; other models have it whole. An fp8 table gets a scale. The
    rest is as for `write_gguf`.
    """
    path = Path(path)
    if dtype not in SAFETENSORS_TYPES:
        raise TableError(f"safetensors has no type {dtype}; it has {', '.join(sorted(SAFETENSORS_TYPES))}")
    model = model_of(architecture, rows, row_values)
    row_bytes = row_bytes_of(dtype, model.row_values)
    tensors = list(_shards(model, dtype, _checked_shards(model, shards)))
    beside = list(_beside(model, dtype))
    is_file = path.suffix == ".safetensors"
    if not 1 <= files <= (1 if is_file else len(tensors)):
        most = "its name ends in .safetensors" if is_file else f"the table has {len(tensors)} shards"
        raise SettingError(f"{path} can't consist of {files} files: {most}")
    planned = [_file(path, [*beside, *tensors])] if is_file else _folder(path, model, tensors, beside, files)
    new_folder = not is_file and not path.exists()
    if new_folder:
        _make_folder(path)
    try:
        written = write_files(planned, row_bytes, sparse=sparse, overwrite=overwrite, progress=progress)
    except BaseException:
        if new_folder:
            with suppress(OSError):
                path.rmdir()
        raise
    return tuple(file for file in written if file.suffix == ".safetensors")


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor with its bytes, or, where these are None, with the rows from `first_row`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | None = None
    first_row: int = 0

    @property
    def size_bytes(self) -> int:
        return SAFETENSORS_TYPES[self.dtype].block_bytes * math.prod(self.shape)


def _checked_shards(model: Model, shards: int | None) -> int:
    if model.ngram is None and shards not in (None, 1):
        raise SettingError(f"the table of {model.architecture} is one tensor; got {shards} shards")
    number = shards if shards is not None else _USUAL_SHARDS if model.ngram else 1
    if not 1 <= number <= model.rows:
        raise SettingError(f"a table of {model.rows} rows can have 1 to {model.rows} shards; got {number}")
    return number


def _shards(model: Model, dtype: str, shards: int) -> Iterable[_Tensor]:
    """The table, cut in shards whose numbers of rows differ by one at most."""
    each, longer = divmod(model.rows, shards)
    first_row = 0
    for number in range(shards):
        rows = each + (number < longer)
        name = f"{_PLE}ngram_embedding.shard_{number}.weight" if model.ngram else _GEMMA_TABLE
        yield _Tensor(name, dtype, (rows, model.row_values), first_row=first_row)
        first_row += rows


def _beside(model: Model, dtype: str) -> Iterable[_Tensor]:
    """The small tensors that belong to the table."""
    if model.ngram:
        for name, numbers in (
            ("layer_multipliers", model.ngram.multipliers),
            ("ngram_heads_offsets", model.ngram.head_offsets),
            ("ngram_heads_vocab_sizes", model.ngram.head_sizes),
        ):
            yield _Tensor(_PLE + name, "I64", (len(numbers),), struct.pack(f"<{len(numbers)}q", *numbers))
    if dtype.startswith("F8_"):
        name = f"{_PLE}ngram_embedding.weight_scale" if model.ngram else f"{_GEMMA_TABLE}_scale"
        # A bfloat16 is the upper half of a float32.
        yield _Tensor(name, "BF16", (1,), struct.pack("<f", SCALE)[2:])


def _file(path: Path, tensors: Iterable[_Tensor]) -> NewFile:
    """A file of these tensors: those with data, then the others, each by name, so that shard_10 is before shard_2."""
    ordered = sorted(tensors, key=lambda tensor: (tensor.data is None, tensor.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        start, end = end, end + tensor.size_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text + b"".join(tensor.data or b"" for tensor in ordered)
    data_offset = 8 + len(text)
    runs = [
        Run(data_offset + header[tensor.name]["data_offsets"][0], tensor.first_row, tensor.shape[0])
        for tensor in ordered
        if tensor.data is None
    ]
    return NewFile(path, head, tuple(runs), data_offset + end)


def _folder(
    folder: Path, model: Model, tensors: Sequence[_Tensor], beside: Sequence[_Tensor], files: int
) -> list[NewFile]:
    """The files of a model's folder: shards one after the other, the small tensors in the first file."""
    planned: list[NewFile] = []
    weight_map: dict[str, str] = {}
    for number in range(files):
        start, stop = (len(tensors) * edge // files for edge in (number, number + 1))
        part = [*(beside if number == 0 else ()), *tensors[start:stop]]
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        planned.append(_file(folder / name, part))
        weight_map |= {tensor.name: name for tensor in part}
    total = sum(tensor.size_bytes for tensor in (*beside, *tensors))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return [*planned, _json(folder / _INDEX, index), _json(folder / "config.json", _config(model))]


def _json(path: Path, content: dict[str, Any]) -> NewFile:
    text = json.dumps(content, indent=2).encode() + b"\n"
    return NewFile(path, text, (), len(text))


def _config(model: Model) -> dict[str, Any]:
    text: dict[str, Any] = {"model_type": f"{model.model_type}_text", "num_hidden_layers": model.layers}
    if model.ngram is None:
        text |= {"hidden_size_per_layer_input": LAYER_VALUES, "vocab_size_per_layer_input": model.rows}
    else:
        heads = len(model.ngram.head_sizes)
        text |= {
            "eos_token_id": model.ngram.eos,
            "heads_per_ngram": model.ngram.heads_per_ngram,
            "ngram_size": len(model.ngram.multipliers),
            "ngram_vocab_size_base": model.ngram.head_sizes[0],
            "ple_embed_dim": heads * model.row_values,
            "ple_layer_ids": [2],
            "vocab_size": model.vocab,
        }
    return {"model_type": model.model_type, "text_config": text}


def _make_folder(path: Path) -> None:
    try:
        path.mkdir()
    except OSError as error:
        raise SettingError(f"can't make the folder {path}: {error.strerror}") from error
