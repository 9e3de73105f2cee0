"""Synthetic tables as GGUF files, whole or split in parts. The layout is that of ggml's docs/gguf.md, version 3."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice, product
from pathlib import Path
from string import ascii_lowercase

import numpy as np
from numpy.typing import NDArray

from lazyio.errors import SettingError, TableError
from lazyio.ple.dtypes import GGUF_TYPES
from lazyio.ple.synthetic.models import LAYER_VALUES, Model, model_of
from lazyio.ple.synthetic.output import NewFile, Progress, Run, write_files
from lazyio.ple.synthetic.pattern import row_bytes_of

TABLE = "per_layer_token_embd.weight"

_ALIGNMENT = 32
_MOST_PARTS = 65_535
_TYPE_IDS = {stored.name: number for number, stored in GGUF_TYPES.items()}


def write_gguf(
    path: str | os.PathLike[str],
    rows: int,
    dtype: str = "IQ4_NL",
    row_values: int | None = None,
    *,
    parts: int = 1,
    vocab: int = 0,
    architecture: str = "qwen4exp",
    sparse: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> tuple[Path, ...]:
    """Write a table of `rows` rows, each as `pattern` says, and return the paths of its files, the one to open first.

    `row_values` None is what is usual for `architecture` (qwen4exp, gemma4 or gemma3n). `vocab` tokens, and about as
    many merges, make the header as long as a model's. With `parts` above 1 the files are `<stem>-00001-of-<parts>.gguf`
    and so on: the first has the metadata and no tensor, the third (of two, the second) the table, the others a small
    tensor. `sparse` leaves the rows as holes, which read as zeros. `progress` is called with the bytes of rows
    written so far. An existing file is only replaced with `overwrite`.
    Raises SettingError, TableError and NeverFits for what can't be made; then no file is left behind.
    """
    if dtype not in _TYPE_IDS:
        raise TableError(f"GGUF has no type {dtype}; it has {', '.join(sorted(_TYPE_IDS))}")
    if not 1 <= parts <= _MOST_PARTS:
        raise SettingError(f"a GGUF table can have 1 to {_MOST_PARTS} parts; got {parts}")
    model = model_of(architecture, rows, row_values, vocab)
    row_bytes = row_bytes_of(dtype, model.row_values)
    table = _Tensor(TABLE, (model.row_values, rows), dtype, rows * row_bytes)
    metadata = _metadata(model) | (_vocabulary(model) if vocab else {})
    return write_files(
        list(_files(Path(path), parts, metadata, table)),
        row_bytes,
        sparse=sparse,
        overwrite=overwrite,
        progress=progress,
    )


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]  # values of a row first
    dtype: str
    size_bytes: int


def _files(path: Path, parts: int, metadata: Mapping[str, bytes], table: _Tensor) -> Iterable[NewFile]:
    if parts == 1:
        yield _file(path, metadata, table, table)
        return
    for number in range(1, parts + 1):
        split = {"split.no": _u16(number - 1), "split.count": _u16(parts), "split.tensors.count": _i32(parts - 1)}
        name = path.with_name(f"{path.stem}-{number:05}-of-{parts:05}.gguf")
        if number == 1:
            yield _file(name, {**metadata, **split}, None, table)
        elif number == min(3, parts):
            yield _file(name, split, table, table)
        else:
            yield _file(name, split, _Tensor(f"blk.{number}.attn_k_norm.weight", (256,), "F32", 1024), table)


def _file(path: Path, metadata: Mapping[str, bytes], tensor: _Tensor | None, table: _Tensor) -> NewFile:
    """A file of one tensor or none, with a run of rows if it is the table; another tensor is left zero."""
    entries = [struct.pack("<4sIQQ", b"GGUF", 3, int(tensor is not None), len(metadata))]
    entries += [_text(key) + value for key, value in metadata.items()]
    if tensor is not None:
        dimensions = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        entries += [_text(tensor.name), dimensions, struct.pack("<IQ", _TYPE_IDS[tensor.dtype], 0)]
    head = b"".join(entries)
    head += bytes(-len(head) % _ALIGNMENT)
    size_bytes = len(head) + (_aligned(tensor.size_bytes) if tensor else 0)
    runs = (Run(len(head), 0, table.shape[1]),) if tensor is table else ()
    return NewFile(path, head, runs, size_bytes)


def _metadata(model: Model) -> dict[str, bytes]:
    own = _qwen4exp(model) if model.ngram else _gemma(model)
    own |= {
        "block_count": _u32(model.layers),
        "attention.layer_norm_rms_epsilon": _f32(1e-6),
        "embedding_length_per_layer_input": _u32(model.row_values if model.ngram else LAYER_VALUES),
    }
    return {
        "general.architecture": _string(model.architecture),
        "general.type": _string("model"),
        "general.name": _string(f"Synthetic {model.architecture} table"),
        "general.alignment": _u32(_ALIGNMENT),
        **{f"{model.architecture}.{key}": value for key, value in own.items()},
    }


def _qwen4exp(model: Model) -> dict[str, bytes]:
    constants = model.ngram
    assert constants is not None
    numbers = {
        "context_length": 262_144,
        "embedding_length": 2560,
        "attention.head_count": 24,
        "attention.head_count_kv": 2,
        "attention.key_length": 256,
        "attention.value_length": 256,
        "attention.indexer.head_count": 4,
        "attention.indexer.key_length": 128,
        "attention.indexer.top_k": 2048,
        "rope.dimension_count": 64,
        "full_attention_interval": 4,
        "expert_count": 512,
        "expert_used_count": 10,
        "expert_feed_forward_length": 640,
        "expert_shared_feed_forward_length": 640,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 128,
        "ssm.group_count": 16,
        "ssm.time_step_rank": 48,
        "ssm.inner_size": 6144,
        "hyper_connection.count": 4,
        "hyper_connection.low_rank": 320,
        "ple.ngram_size": len(constants.multipliers),
        "ple.heads_per_ngram": constants.heads_per_ngram,
        "ple.conv_kernel": 4,
        "ple.eos_token_id": constants.eos,
    }
    return {
        **{key: _u32(number) for key, number in numbers.items()},
        "rope.freq_base": _f32(1e7),
        "rope.dimension_sections": _array(5, "<i4", (11, 11, 10, 0)),
        "attention.compress_ratios": _array(4, "<u4", [4 if layer % 4 == 3 else 0 for layer in range(model.layers)]),
        "ple.layers": _array(4, "<u4", (1,)),
        "ple.layer_multipliers": _array(10, "<u8", constants.multipliers),
        "ple.head_offsets": _array(10, "<u8", constants.head_offsets),
        "ple.head_vocab_sizes": _array(10, "<u8", constants.head_sizes),
    }


def _gemma(model: Model) -> dict[str, bytes]:
    numbers = {
        "context_length": 131_072 if model.architecture == "gemma4" else 32_768,
        "embedding_length": 2560 if model.layers > 35 else 1536 if model.architecture == "gemma4" else 2048,
        "feed_forward_length": 10_240 if model.layers > 35 else 8192,
        "attention.head_count": 8,
        "attention.head_count_kv": 2,
        "attention.key_length": 512 if model.architecture == "gemma4" else 256,
        "attention.value_length": 512 if model.architecture == "gemma4" else 256,
        "attention.sliding_window": 512,
    }
    return {**{key: _u32(number) for key, number in numbers.items()}, "rope.freq_base": _f32(1e6)}


def _vocabulary(model: Model) -> dict[str, bytes]:
    """Different tokens of one to a few letters, half of them after a space, and a merge for each of two or more."""
    letters = chain.from_iterable(product(ascii_lowercase, repeat=length) for length in count(1))
    words = map("".join, islice(letters, -(-model.vocab // 2)))
    tokens = list(islice(chain.from_iterable((word, "Ġ" + word) for word in words), model.vocab))
    return {
        "tokenizer.ggml.model": _string("gpt2"),
        "tokenizer.ggml.pre": _string("qwen35" if model.ngram else "default"),
        "tokenizer.ggml.tokens": _strings(tokens),
        "tokenizer.ggml.token_type": _array(5, "<i4", np.ones(model.vocab, np.int32)),
        "tokenizer.ggml.merges": _strings([f"{token[:1]} {token[1:]}" for token in tokens if len(token) > 1]),
        "tokenizer.ggml.eos_token_id": _u32(model.ngram.eos if model.ngram else min(1, model.vocab - 1)),
    }


# Values of the metadata, each behind the id of its type.


def _u16(value: int) -> bytes:
    return struct.pack("<IH", 2, value)


def _u32(value: int) -> bytes:
    return struct.pack("<II", 4, value)


def _i32(value: int) -> bytes:
    return struct.pack("<Ii", 5, value)


def _f32(value: float) -> bytes:
    return struct.pack("<If", 6, value)


def _string(value: str) -> bytes:
    return struct.pack("<I", 8) + _text(value)


def _strings(values: Sequence[str]) -> bytes:
    return struct.pack("<IIQ", 9, 8, len(values)) + b"".join(map(_text, values))


def _array(item_type: int, layout: str, values: Sequence[int] | NDArray[np.int32]) -> bytes:
    return struct.pack("<IIQ", 9, item_type, len(values)) + np.array(values).astype(layout).tobytes()


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
