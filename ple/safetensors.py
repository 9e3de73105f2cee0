"""Models in safetensors files: one file, a folder with an index, or a folder of files that needs none."""

from __future__ import annotations

import os
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lazyio.errors import TableError
from lazyio.ple.checkpoint import Checkpoint, StoredTensor, read_tensor
from lazyio.ple.safetensors_header import is_count, read_json, read_safetensors
from lazyio.ple.spec import NgramHash

INDEX_SUFFIX = ".safetensors.index.json"

_USUAL_INDEX = "model" + INDEX_SUFFIX
_MOST_CONSTANTS = 1024

Headers = dict[str, dict[str, StoredTensor]]  # by file, by name


class SafetensorsCheckpoint(Checkpoint):
    """Tensors spread over the files of one folder. A file's header is read when a tensor of it is asked for."""

    def __init__(self, path: str, folder: Path, file_of: Mapping[str, str], headers: Headers) -> None:
        self.path = path
        self.folder = folder
        self._file_of = file_of
        self._headers = headers  # of the files read so far
        self._config_path = str(folder / "config.json")
        self._config = read_json(self._config_path) if os.path.exists(self._config_path) else None
        model_type = (self._config or {}).get("model_type")
        self.architecture = model_type if isinstance(model_type, str) else None

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._file_of.keys()

    def tensor(self, name: str) -> StoredTensor:
        """The tensor of that name. Raises TableError where the index says what its file does not."""
        file = self._file_of[name]
        if file not in self._headers:
            if not os.path.exists(file):
                raise TableError(f"{self.path}: tensor {name!r} should be in {file}, which is missing; bring it there")
            self._headers[file] = read_safetensors(file)
        if name not in self._headers[file]:
            raise TableError(f"{self.path}: tensor {name!r} should be in {file} and is not; one of the two is outdated")
        return self._headers[file][name]

    def ngram(self, table: str) -> NgramHash | None:
        """Constants of the row ids: integer tensors beside the table, and what config.json says of the text model.

        None where there are no such tensors, or where no config.json lies beside the files.
        """
        multipliers_name, sizes_name, offsets_name = constants_of(table)
        if self._config is None or multipliers_name not in self._file_of:
            return None
        multipliers = self._integers(multipliers_name)
        config = self._text_config()
        ngram_size = self._setting(config, "ngram_size")
        if ngram_size != len(multipliers):
            raise TableError(
                f"{self._config_path}: ngram_size is {ngram_size}, but {multipliers_name} has {len(multipliers)}"
            )
        return NgramHash(
            multipliers=multipliers,
            head_sizes=self._integers(sizes_name),
            head_offsets=self._integers(offsets_name),
            heads_per_ngram=self._setting(config, "heads_per_ngram"),
            eos=self._setting(config, "eos_token_id"),
        )

    def _text_config(self) -> Mapping[str, Any]:
        config = self._config or {}
        text = config.get("text_config", config)
        if not isinstance(text, dict):
            raise TableError(f"{self._config_path}: text_config is no object")
        return text

    def _setting(self, config: Mapping[str, Any], key: str) -> int:
        value = config.get(key)
        # Where a model has several end tokens, the hash uses the first.
        if key == "eos_token_id" and isinstance(value, list) and value:
            value = value[0]
        if not isinstance(value, int) or not is_count(value):
            raise TableError(f"{self._config_path}: {key} of the text model must be a whole number and is {value!r}")
        return value

    def _integers(self, name: str) -> tuple[int, ...]:
        if name not in self._file_of:
            raise TableError(f"{self.path} lacks {name}, without which row ids can't be computed")
        tensor = self.tensor(name)
        if tensor.dtype != "I64" or len(tensor.shape) != 1 or not 1 <= tensor.shape[0] <= _MOST_CONSTANTS:
            raise TableError(
                f"{tensor.path}: {name} must be a short list of I64 and is {tensor.dtype} {list(tensor.shape)}"
            )
        return struct.unpack(f"<{tensor.shape[0]}q", read_tensor(tensor))


def constants_of(table: str) -> tuple[str, str, str]:
    """Names of the tensors with multipliers, head sizes and head offsets of a table of n-grams."""
    embedding, _, kind = table.rpartition(".")
    if kind == "trellis":
        return f"{embedding}.layer_multipliers", f"{embedding}.head_vocab_sizes", f"{embedding}.head_offsets"
    beside = embedding.removesuffix("ngram_embedding")
    return beside + "layer_multipliers", beside + "ngram_heads_vocab_sizes", beside + "ngram_heads_offsets"


def open_safetensors(path: str) -> SafetensorsCheckpoint:
    """Read what is needed of a safetensors file, an index, or a folder with either.

    Raises TableError for damaged files and for an index that names files outside its folder.
    """
    if not os.path.isdir(path):
        return _of_index(path, Path(path)) if path.endswith(INDEX_SUFFIX) else _of_files(path, [Path(path)])
    folder = Path(path)
    indexes = sorted(folder.glob("*" + INDEX_SUFFIX))
    if folder / _USUAL_INDEX in indexes:
        return _of_index(path, folder / _USUAL_INDEX)
    if len(indexes) > 1:
        names = ", ".join(index.name for index in indexes)
        raise TableError(f"{path} has several indexes: {names}; give the path of one")
    if indexes:
        return _of_index(path, indexes[0])
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise TableError(f"{path} is a folder without safetensors files; give the path of the model's file or folder")
    return _of_files(path, files)


def _of_files(path: str, files: list[Path]) -> SafetensorsCheckpoint:
    headers = {str(file): read_safetensors(str(file)) for file in files}
    file_of: dict[str, str] = {}
    for file, tensors in headers.items():
        for name in tensors:
            if name in file_of:
                raise TableError(f"tensor {name!r} is in two files: {file_of[name]} and {file}; give the path of one")
            file_of[name] = file
    return SafetensorsCheckpoint(path, files[0].parent, file_of, headers)


def _of_index(path: str, index: Path) -> SafetensorsCheckpoint:
    weight_map = read_json(str(index)).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise TableError(f"{index} is damaged: it has no weight_map of tensor names to file names")
    paths = {file: _inside(index, file) for file in set(weight_map.values())}
    file_of = {name: paths[file] for name, file in weight_map.items()}
    return SafetensorsCheckpoint(path, index.parent, file_of, {})


def _inside(index: Path, file: str) -> str:
    """The path of a file that an index names, which must not lead out of the index's folder."""
    folder = index.parent.resolve()
    allowed = [folder]
    # The hub's cache keeps a model's files in one folder and links to them from another.
    if folder.parent.name == "snapshots":
        allowed.append(folder.parent.parent / "blobs")
    try:
        real = (folder / file).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise TableError(f"{index} names a file that can't be: {file!r} ({error})") from error
    if not any(real.is_relative_to(place) for place in allowed):
        raise TableError(
            f"{index} names a file outside its folder: {file!r} leads to {real}; "
            "if that is meant, put the file itself into the folder"
        )
    if os.path.isdir(real):
        raise TableError(f"{index} is damaged: its weight_map names {file!r} as a file of tensors, which is a folder")
    return str(index.parent / file)
