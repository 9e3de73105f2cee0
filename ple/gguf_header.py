"""The header of one GGUF file: a walk that keeps what a table needs and steps over the rest.

The layout is that of ggml's docs/gguf.md, versions 2 and 3, little-endian. A vocabulary is hundreds of thousands of
strings that no table needs, so long arrays are stepped over without making a value of any element.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lazyio.errors import TableError
from lazyio.ple.checkpoint import SourceFile, StoredTensor, check_ranges
from lazyio.ple.dtypes import GGUF_TYPES

MAGIC = b"GGUF"

Value = int | float | bool | str | tuple[int | float | bool, ...]
#: What `read_values` gives: strings and arrays of any length.
LongValue = int | float | bool | str | list[str] | NDArray[Any]

_VERSIONS = (2, 3)
_WINDOW_BYTES = 256 << 10
_LONGEST_HEADER_BYTES = 256 << 20
_LONGEST_NAME_BYTES = 65535
_LONGEST_KEPT_STRING_BYTES = 1024
_LONGEST_KEPT_ARRAY = 1024
_DEEPEST_ARRAY = 8
_MOST_DIMENSIONS = 4
_SMALLEST_KEY_BYTES = 13  # an empty name, a type and one byte
_SMALLEST_TENSOR_BYTES = 24  # an empty name, no dimensions, a type and an offset

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SCALARS = {
    kind: struct.Struct("<" + layout) for kind, layout in zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True)
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufFile:
    """One file: its small metadata (no long strings and arrays) and its tensors."""

    path: str
    metadata: Mapping[str, Value]
    tensors: tuple[StoredTensor, ...]


def read_gguf(path: str) -> GgufFile:
    """Read the header of one GGUF file. Raises TableError if it is damaged, cut short, or of another version."""
    with SourceFile(path) as source:
        header = _Header(source)
        _check_magic(source, header)
        tensor_count, key_count = header.unpack(_U64), header.unpack(_U64)
        header.expect(tensor_count * _SMALLEST_TENSOR_BYTES + key_count * _SMALLEST_KEY_BYTES)
        metadata = _read_metadata(header, key_count)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise TableError(f"{path}: general.alignment must be a positive integer and is {described(alignment)}")
        entries = [_read_tensor_entry(header) for _ in range(tensor_count)]
        data_offset = _aligned(header.position, alignment)
        tensors = tuple(_placed(path, entry, data_offset) for entry in entries)
        if len({tensor.name for tensor in tensors}) < len(tensors):
            raise TableError(f"{path} has two tensors of one name; the file is damaged")
        check_ranges(tensors, source.size)
        return GgufFile(path, metadata, _sized(tensors, source.size, alignment))


def read_values(path: str, keys: Collection[str]) -> dict[str, LongValue]:
    """The values of those `keys` that the header of one GGUF file has, whole however long: a vocabulary, a template.

    Arrays of strings are lists, those of numbers numpy arrays. Raises TableError if the header is damaged or cut short,
    or if a wanted key holds arrays of arrays.
    """
    found: dict[str, LongValue] = {}
    with SourceFile(path) as source:
        header = _Header(source)
        _check_magic(source, header)
        header.unpack(_U64)  # the number of tensors
        for _ in range(header.unpack(_U64)):
            key = header.string(_LONGEST_NAME_BYTES, "a key")
            kind = header.unpack(_U32)
            if key in keys:
                found[key] = _read_whole(header, key, kind)
            else:
                _read_value(header, key, kind)
    return found


def described(value: Value | None) -> str:
    """A value as an error message shows it, shortened."""
    if value is None:
        return "missing"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class _Header:
    """A position in the header, with a window of the file around it."""

    def __init__(self, source: SourceFile) -> None:
        self.source = source
        self._window = b""
        self._window_offset = 0
        self._at = 0  # in the window; may lie past its end

    @property
    def position(self) -> int:
        return self._window_offset + self._at

    def unpack(self, layout: struct.Struct) -> int:
        if self._at + layout.size > len(self._window):
            self._slide(layout.size)
        value: int = layout.unpack_from(self._window, self._at)[0]  # a float under the layout of one
        self._at += layout.size
        return value

    def take(self, length: int) -> bytes:
        if self._at + length > len(self._window):
            self._slide(length)
        self._at += length
        return self._window[self._at - length : self._at]

    def string(self, longest: int, what: str) -> str:
        length = self.unpack(_U64)
        if length > longest:
            raise TableError(
                f"{self.source.path}: {what} at byte {self.position} has {length} bytes, more than {longest}; "
                "the file is damaged"
            )
        return self.take(length).decode(errors="replace")

    def skip(self, length: int) -> None:
        self.expect(length)
        self._at += length

    def skip_strings(self, count: int) -> None:
        self.expect(count * _U64.size)
        length_at = _U64.unpack_from
        window, at, last = self._window, self._at, len(self._window) - _U64.size
        for _ in range(count):
            if at > last:
                self._at = at
                self._slide(_U64.size)
                window, at, last = self._window, self._at, len(self._window) - _U64.size
            at += length_at(window, at)[0] + _U64.size
        self._at = at
        self.expect(0)

    def strings(self, count: int) -> list[str]:
        self.expect(count * _U64.size)
        length_at, found = _U64.unpack_from, []
        for _ in range(count):
            if self._at + _U64.size > len(self._window):
                self._slide(_U64.size)
            start = self._at + _U64.size
            end = start + length_at(self._window, self._at)[0]
            if end > len(self._window):
                self._slide(end - self._at)
                start, end = _U64.size, end - start + _U64.size
            found.append(self._window[start:end].decode(errors="replace"))
            self._at = end
        return found

    def expect(self, length: int) -> None:
        end = self.position + length
        if end > self.source.size:
            raise TableError(
                f"{self.source.path} is cut short or damaged: its header needs bytes up to {end}, "
                f"and the file has {self.source.size}; copy or download it again"
            )

    def _slide(self, length: int) -> None:
        self.expect(length)
        start = self.position
        if start + length > _LONGEST_HEADER_BYTES:
            raise TableError(
                f"{self.source.path}: its header is longer than {_LONGEST_HEADER_BYTES} bytes; the file is damaged"
            )
        self._window = self.source.read(start, min(max(length, _WINDOW_BYTES), self.source.size - start))
        self._window_offset, self._at = start, 0


def _check_magic(source: SourceFile, header: _Header) -> None:
    path = source.path
    if source.size < 8 or header.take(4) != MAGIC:
        raise TableError(f"{path} is not a GGUF file: it does not start with {MAGIC.decode()}")
    version = header.unpack(_U32)
    if version in _VERSIONS:
        return
    if version & 0xFFFF == 0:
        raise TableError(f"{path} is a big-endian GGUF file; only little-endian ones are read: convert it")
    raise TableError(f"{path} is a GGUF file of version {version}; versions 2 and 3 are read: convert it")


def _read_metadata(header: _Header, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(count):
        key = header.string(_LONGEST_NAME_BYTES, "a key")
        value = _read_value(header, key, header.unpack(_U32))
        if value is None:
            continue
        if key in metadata:
            raise TableError(f"{header.source.path} has the key {key!r} twice; the file is damaged")
        metadata[key] = value
    return metadata


def _read_value(header: _Header, key: str, kind: int) -> Value | None:
    """The value of a key, or None where it is too long to be kept."""
    if kind in _SCALARS:
        return header.unpack(_SCALARS[kind])
    if kind == _STRING:
        length = header.unpack(_U64)
        if length <= _LONGEST_KEPT_STRING_BYTES:
            return header.take(length).decode(errors="replace")
        header.skip(length)
        return None
    if kind != _ARRAY:
        raise TableError(f"{header.source.path}: key {key!r} has the unknown value type {kind}; the file is damaged")
    item_kind, count = header.unpack(_U32), header.unpack(_U64)
    if item_kind in _SCALARS and count <= _LONGEST_KEPT_ARRAY:
        scalar = _SCALARS[item_kind]
        return tuple(value for (value,) in scalar.iter_unpack(header.take(count * scalar.size)))
    _skip_array(header, key, item_kind, count, depth=1)
    return None


def _read_whole(header: _Header, key: str, kind: int) -> LongValue:
    if kind in _SCALARS:
        return header.unpack(_SCALARS[kind])
    if kind == _STRING:
        return header.string(_LONGEST_HEADER_BYTES, f"the value of {key!r}")
    item_kind, count = (header.unpack(_U32), header.unpack(_U64)) if kind == _ARRAY else (kind, 0)
    if item_kind in _SCALARS:
        layout = _SCALARS[item_kind]
        return np.frombuffer(header.take(count * layout.size), np.dtype(layout.format))
    if item_kind == _STRING:
        return header.strings(count)
    raise TableError(
        f"{header.source.path}: key {key!r} must be a number, a string or an array of these, and has the value type "
        f"{item_kind}; the file is damaged"
    )


def _skip_array(header: _Header, key: str, item_kind: int, count: int, depth: int) -> None:
    if item_kind in _SCALARS:
        header.skip(count * _SCALARS[item_kind].size)
    elif item_kind == _STRING:
        header.skip_strings(count)
    elif item_kind == _ARRAY and depth < _DEEPEST_ARRAY:
        for _ in range(count):
            _skip_array(header, key, header.unpack(_U32), header.unpack(_U64), depth + 1)
    else:
        raise TableError(
            f"{header.source.path}: key {key!r} is an array of the unknown value type {item_kind}; the file is damaged"
        )


def _read_tensor_entry(header: _Header) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape (values of a row last), id of the type, and offset in the data."""
    name = header.string(_LONGEST_NAME_BYTES, "a tensor's name")
    dimensions = header.unpack(_U32)
    if dimensions > _MOST_DIMENSIONS:
        raise TableError(
            f"{header.source.path}: tensor {name!r} has {dimensions} dimensions, more than {_MOST_DIMENSIONS}; "
            "the file is damaged"
        )
    shape = tuple(header.unpack(_U64) for _ in range(dimensions))[::-1]
    return name, shape, header.unpack(_U32), header.unpack(_U64)


def _placed(path: str, entry: tuple[str, tuple[int, ...], int, int], data_offset: int) -> StoredTensor:
    name, shape, type_id, offset = entry
    stored = GGUF_TYPES.get(type_id)
    if stored is None:
        return StoredTensor(name, f"type-{type_id}", shape, path, data_offset + offset, None)
    try:
        row_bytes = stored.row_bytes(shape[-1] if shape else 1)
    except TableError as error:
        raise TableError(f"{path}: tensor {name!r}: {error}; the file is damaged") from None
    return StoredTensor(name, stored.name, shape, path, data_offset + offset, row_bytes * math.prod(shape[:-1]))


def _sized(tensors: tuple[StoredTensor, ...], file_bytes: int, alignment: int) -> tuple[StoredTensor, ...]:
    """Tensors of an unknown type with the size that the room up to the next tensor implies.

    The room is rows times row bytes, rounded up to the alignment, so it tells the row bytes where there are at least as
    many rows as bytes of alignment. It tells nothing in a file that leaves more room between tensors than it must.
    """
    ordered = sorted(tensors, key=lambda tensor: tensor.offset)
    rooms: dict[str, int] = {}
    for tensor, following in pairwise(ordered):
        rooms[tensor.name] = following.offset - tensor.offset
        if tensor.size_bytes is not None and rooms[tensor.name] >= tensor.size_bytes + alignment:
            return tensors
    for tensor in ordered[-1:]:
        rooms[tensor.name] = file_bytes - tensor.offset
    return tuple(
        tensor if tensor.size_bytes is not None else _filling(tensor, rooms[tensor.name], alignment)
        for tensor in tensors
    )


def _filling(tensor: StoredTensor, room: int, alignment: int) -> StoredTensor:
    rows = math.prod(tensor.shape[:-1])
    size_bytes = room - room % rows if rows >= alignment else 0
    if not size_bytes or room - size_bytes >= alignment:
        return tensor
    return replace(tensor, size_bytes=size_bytes)


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
