"""Models in GGUF files, whole or split in parts: their tensors, and the constants of their row ids."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence

from lazyio.errors import TableError
from lazyio.ple.checkpoint import Checkpoint, SourceFile, StoredTensor
from lazyio.ple.gguf_header import MAGIC, GgufFile, Value, described, read_gguf
from lazyio.ple.spec import NgramHash

_PART_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)


class GgufCheckpoint(Checkpoint):
    """A model in one GGUF file, or in all parts of a split one."""

    def __init__(self, path: str, files: Sequence[GgufFile]) -> None:
        self.path = path
        self.first_path = files[0].path  # of the file that has the metadata
        self.metadata = files[0].metadata
        architecture = self.metadata.get("general.architecture")
        self.architecture = architecture if isinstance(architecture, str) else None
        self._tensors = {tensor.name: tensor for file in files for tensor in file.tensors}

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors, in the order of the files."""
        return self._tensors.keys()

    def tensor(self, name: str) -> StoredTensor:
        """The tensor of that name."""
        return self._tensors[name]

    def ngram(self, table: str) -> NgramHash | None:
        """Constants of the row ids, from the keys `<architecture>.ple.*`."""
        prefix = f"{self.architecture}.ple."
        if prefix + "layer_multipliers" not in self.metadata:
            return None
        constants = NgramHash(
            multipliers=self._integers(prefix + "layer_multipliers"),
            head_sizes=self._integers(prefix + "head_vocab_sizes"),
            head_offsets=self._integers(prefix + "head_offsets"),
            heads_per_ngram=self._integer(prefix + "heads_per_ngram"),
            eos=self._integer(prefix + "eos_token_id"),
        )
        ngram_size = self._integer(prefix + "ngram_size")
        multipliers = len(constants.multipliers)
        if ngram_size != multipliers:
            raise TableError(
                f"{self.path}: {prefix}ngram_size is {ngram_size}, but there are {multipliers} multipliers"
            )
        return constants

    def _integer(self, key: str) -> int:
        value = self.metadata.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise TableError(f"{self.path}: key {key} must be an integer and is {described(value)}")
        return value

    def _integers(self, key: str) -> tuple[int, ...]:
        value = self.metadata.get(key)
        items = value if isinstance(value, tuple) else ()
        integers = tuple(item for item in items if isinstance(item, int) and not isinstance(item, bool))
        if not integers or len(integers) != len(items):
            raise TableError(f"{self.path}: key {key} must be a short array of integers and is {described(value)}")
        return integers


def is_gguf(path: str) -> bool:
    """Whether a path is that of a GGUF file: by its name, else by how the file begins.

    Raises TableError for what can't be read.
    """
    if os.path.isdir(path):
        return False
    if path.endswith(".gguf"):
        return True
    with SourceFile(path) as source:
        return source.read(0, min(source.size, len(MAGIC))) == MAGIC


def open_gguf(path: str) -> GgufCheckpoint:
    """Read the headers of a GGUF model; any part of a split model stands for all.

    Raises TableError for a file that is no GGUF file, is damaged or cut short, and for parts that are missing or do not
    belong together.
    """
    named = _PART_NAME.fullmatch(path)
    if named is not None and int(named["count"]) > 1:
        return GgufCheckpoint(path, _read_parts(path, named))
    file = read_gguf(path)
    count = file.metadata.get("split.count", 1)
    if count not in (0, 1):
        raise TableError(
            f"{path} is one of {count} parts of a split model, but is not named like one; "
            f"give the parts their names back: PREFIX-00001-of-{count:0>5}.gguf and so on"
        )
    return GgufCheckpoint(path, [file])


def _read_parts(path: str, named: re.Match[str]) -> list[GgufFile]:
    count = int(named["count"])
    if not 1 <= int(named["number"]) <= count:
        raise TableError(f"{path} calls itself part {int(named['number'])} of {count}; the parts are numbered from 1")
    paths = [f"{named['prefix']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    missing = [part for part in paths if not os.path.exists(part)]
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise TableError(f"{path}: {len(missing)} of the model's {count} parts missing: {shown}")
    files = [read_gguf(part) for part in paths]
    total = files[0].metadata.get("split.tensors.count")
    for number, file in enumerate(files):
        _check_part(file, {"split.no": number, "split.count": count, "split.tensors.count": total})
    _check_total(path, files, total)
    return files


def _check_part(file: GgufFile, wanted: Mapping[str, Value | None]) -> None:
    for key, value in wanted.items():
        if file.metadata.get(key) != value:
            raise TableError(
                f"{file.path} is no part of this model: its {key} is {described(file.metadata.get(key))} "
                f"and should be {described(value)}"
            )


def _check_total(path: str, files: Sequence[GgufFile], total: Value | None) -> None:
    owners: dict[str, str] = {}
    for file in files:
        for tensor in file.tensors:
            if tensor.name in owners:
                raise TableError(f"tensor {tensor.name!r} is in two parts: {owners[tensor.name]} and {file.path}")
            owners[tensor.name] = file.path
    if total is not None and len(owners) != total:
        raise TableError(
            f"{path}: its {len(files)} parts have {len(owners)} tensors and should have {described(total)}; "
            "a part is of another model, or damaged"
        )
