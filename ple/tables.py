"""Finding tables in model files of any format, the per-layer embedding table first."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from itertools import islice, pairwise

from lazyio.errors import TableError
from lazyio.ple.checkpoint import Checkpoint, SourceFile
from lazyio.ple.gguf import is_gguf, open_gguf
from lazyio.ple.rowids import row_ids_of
from lazyio.ple.safetensors import INDEX_SUFFIX, open_safetensors
from lazyio.ple.shards import KINDS, build_table, group_shards
from lazyio.ple.spec import TableSpec

# What the per-layer embedding table is called: in GGUF files, by Gemma, by Qwen.
_PLE_NAMES = "per_layer_token_embd|embed_tokens_per_layer|ngram_embedding"
_PLE = re.compile(rf"(?:.*\.)?(?:{_PLE_NAMES})\.(?:{'|'.join(KINDS)})", re.DOTALL)
# Other tensors that are meant to be read by row: token and position embeddings. Weights of linear layers are not.
_EMBEDDING = re.compile(r"(?:.*\.)?(?:[^.]*(?:embd|embed)[^.]*|wte|wpe)\.weight", re.DOTALL)

_SHOWN = 8  # names that an error message lists


def find_tables(path: str | bytes | os.PathLike[str]) -> list[TableSpec]:
    """Every table that a model's files are known to have, per-layer embedding tables first, then token embeddings.

    `path` is a GGUF file (any part of a split one), a safetensors file, its index, or a folder with these. Token
    embeddings that can't be used are left out. Raises TableError for files that are damaged, and for a per-layer
    embedding table that is stored in a way that can't be read.
    """
    checkpoint = _open_checkpoint(os.fsdecode(path))
    tables = group_shards(checkpoint.names)
    return [*_ple_tables(checkpoint, tables), *_embeddings(checkpoint, tables)]


def find_table(path: str | bytes | os.PathLike[str], tensor: str | None = None) -> TableSpec:
    """The one per-layer embedding table of a model, or the table of the given name.

    `path` is as for `find_tables`. `tensor` is a tensor's name, or `T.weight` for shards `T.shard_N.weight`; ".weight",
    ".trellis" and the like may be left out. Raises TableError where no table or more than one fits; the message lists
    what there is. Raises TypeError for a name that is no text.
    """
    if tensor is not None and not isinstance(tensor, str):
        raise TypeError(f"tensor must be the name of one, and is {tensor!r}")
    checkpoint = _open_checkpoint(os.fsdecode(path))
    tables = group_shards(checkpoint.names)
    if tensor is not None:
        return _named_table(checkpoint, tables, tensor)
    found = list(_ple_tables(checkpoint, tables))
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(table.tensor for table in found)
        raise TableError(f"{checkpoint.path} has several per-layer embedding tables: {names}; give the name of one")
    raise TableError(
        f"{checkpoint.path} has no per-layer embedding table under a known name; if it has one under another, give "
        f"that; {_what_there_is(checkpoint, tables)}"
    )


def is_ple_name(name: str) -> bool:
    """Whether a table of that name is a per-layer embedding table of a known model."""
    return _PLE.fullmatch(name) is not None


def _open_checkpoint(path: str) -> Checkpoint:
    if os.path.isdir(path) or path.endswith((".safetensors", INDEX_SUFFIX)):
        return open_safetensors(path)
    if is_gguf(path):
        return open_gguf(path)
    with SourceFile(path) as source:
        start = source.read(0, min(source.size, 9))
    if start[8:] == b"{":
        return open_safetensors(path)
    raise TableError(
        f"{path} is neither a GGUF nor a safetensors file; a file of bare rows can be opened as a raw table, with the "
        "geometry of its rows"
    )


def _ple_tables(checkpoint: Checkpoint, tables: Mapping[str, Sequence[str]]) -> Iterator[TableSpec]:
    for name, parts in tables.items():
        if is_ple_name(name):
            yield _build(checkpoint, name, parts)


def _embeddings(checkpoint: Checkpoint, tables: Mapping[str, Sequence[str]]) -> Iterator[TableSpec]:
    for name, parts in tables.items():
        if _EMBEDDING.fullmatch(name) and not is_ple_name(name):
            with suppress(TableError):
                yield _build(checkpoint, name, parts)


def _named_table(checkpoint: Checkpoint, tables: Mapping[str, Sequence[str]], request: str) -> TableSpec:
    for name in (request, *(f"{request}.{kind}" for kind in KINDS)):
        if name in tables:
            return _build(checkpoint, name, tables[name])
        if name in checkpoint.names:  # one shard of a table
            return _build(checkpoint, name, (name,))
    raise TableError(
        f"{checkpoint.path} has no tensor {request!r}; "
        f"nearest names: {_listed(_nearest(request, checkpoint, tables))}; {_what_there_is(checkpoint, tables)}"
    )


def _build(checkpoint: Checkpoint, name: str, parts: Sequence[str]) -> TableSpec:
    spec = build_table(checkpoint, name, parts, is_ple=is_ple_name(name))
    if spec.ngram is None:
        return spec
    try:
        row_ids_of(spec)
    except TableError as error:
        raise TableError(f"{spec.path}: constants of {name}: {error}") from None
    heads = list(zip(spec.ngram.head_offsets, spec.ngram.head_sizes, strict=True))
    for number, ((offset, size), (following, _)) in enumerate(pairwise(heads)):
        if offset + size > following:
            raise TableError(
                f"{spec.path}: constants of {name}: n-gram head {number} ends at row {offset + size}, beyond the start "
                f"of the next at row {following}; the file is damaged"
            )
    return spec


def _nearest(request: str, checkpoint: Checkpoint, tables: Mapping[str, Sequence[str]]) -> Iterable[str]:
    """Up to three names that contain the request, else those whose endings of as many components are most alike."""
    containing = list(islice((name for name in tables if request and request in name), 3))
    if containing:
        return containing
    bare = request.removesuffix(".weight")
    components = bare.count(".") + 1
    names = (*checkpoint.names, *tables)
    endings = {".".join(name.removesuffix(".weight").split(".")[-components:]): name for name in names}
    return (endings[ending] for ending in get_close_matches(bare, endings, n=3))


def _what_there_is(checkpoint: Checkpoint, tables: Mapping[str, Sequence[str]]) -> str:
    found: list[TableSpec] = []
    unusable = ""
    try:
        found.extend(_ple_tables(checkpoint, tables))
    except TableError as error:
        unusable = f" ({error})"
    found.extend(_embeddings(checkpoint, tables))
    if found:
        shown = (f"{table.tensor} ({table.dtype}, {table.rows} rows of {table.row_bytes} bytes)" for table in found)
        return f"tables found: {_listed(shown)}{unusable}"
    return f"no tables found among its {len(checkpoint.names)} tensors: {_listed(checkpoint.names)}{unusable}"


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "") or "none"
