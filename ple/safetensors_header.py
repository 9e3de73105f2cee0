"""The header of one safetensors file, and the JSON files beside it.

Layout: the length of the header in 8 bytes, a JSON object with dtype, shape and data_offsets of every tensor, then the
data, from whose start the offsets count.
"""

from __future__ import annotations

import json
import math
from typing import Any

from lazyio.errors import TableError
from lazyio.ple.checkpoint import SourceFile, StoredTensor, check_ranges
from lazyio.ple.dtypes import SAFETENSORS_TYPES

#: The format's own limit of a header, and ours of any other JSON file.
LONGEST_JSON_BYTES = 100_000_000

_LENGTH_BYTES = 8
_MOST_DIMENSIONS = 16


def read_safetensors(path: str) -> dict[str, StoredTensor]:
    """Tensors of one file by name. Raises TableError if its header is damaged or describes what the file lacks."""
    with SourceFile(path) as source:
        length = int.from_bytes(source.read(0, _LENGTH_BYTES), "little")
        data_offset = _LENGTH_BYTES + length
        if length > LONGEST_JSON_BYTES or data_offset > source.size:
            raise TableError(
                f"{path} is no safetensors file, or is cut short: its header should take {length} bytes, the file has "
                f"{source.size} and a header at most {LONGEST_JSON_BYTES}"
            )
        entries = _parse(path, source.read(_LENGTH_BYTES, length))
        entries.pop("__metadata__", None)
        tensors = {name: _tensor(path, name, entry, data_offset) for name, entry in entries.items()}
        check_ranges(tensors.values(), source.size)
        return tensors


def read_json(path: str) -> dict[str, Any]:
    """A JSON file that holds an object. Raises TableError for any other."""
    with SourceFile(path) as source:
        if source.size > LONGEST_JSON_BYTES:
            raise TableError(f"{path} has {source.size} bytes, more than the {LONGEST_JSON_BYTES} that are read")
        return _parse(path, source.read(0, source.size))


def is_count(value: object) -> bool:
    """Whether a value out of JSON is a whole number, not negative and of a size that a file can mean."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _parse(path: str, text: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(text.decode(), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise TableError(f"{path} is damaged: it has no readable JSON where it should ({error})") from error
    if not isinstance(parsed, dict):
        raise TableError(f"{path} is damaged: its JSON is no object")
    return parsed


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a name appears twice in one object")
    return members


def _tensor(path: str, name: str, entry: Any, data_offset: int) -> StoredTensor:
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (
        isinstance(dtype, str)
        and isinstance(shape, list)
        and len(shape) <= _MOST_DIMENSIONS
        and isinstance(offsets, list)
        and len(offsets) == 2
        and all(map(is_count, (*shape, *offsets)))
    ):
        raise TableError(f"{path} is damaged: it has no proper dtype, shape and data_offsets of tensor {name!r}")
    begin, end = offsets
    if end < begin:
        raise TableError(f"{path} is damaged: tensor {name!r} ends at byte {end}, before it starts at {begin}")
    stored = SAFETENSORS_TYPES.get(dtype)
    needed = end - begin if stored is None else math.prod(shape) * stored.block_bytes
    if end - begin != needed:
        raise TableError(
            f"{path} is damaged: tensor {name!r} of {dtype} {shape} needs {needed} bytes and has {end - begin}"
        )
    return StoredTensor(name, dtype, tuple(shape), path, data_offset + begin, end - begin)
