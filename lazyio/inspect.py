"""What tables a model has, where they lie, and how `auto` would read them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lazyio.errors import LazyIOError, TableError
from lazyio.fetchers.base import Alignment, FetcherOptions
from lazyio.host import Filesystem, direct_alignment, filesystem_of, owns_or_writes
from lazyio.modes import choose
from lazyio.ple.rowids import row_ids_of
from lazyio.ple.spec import TableSpec
from lazyio.ple.tables import find_tables
from lazyio.settings import fetcher_options

__all__ = ["FileFacts", "TableFacts", "as_json", "inspect"]

_OS_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class FileFacts:
    """A file that holds rows, and what lies under it."""

    path: str
    filesystem: Filesystem
    direct_io: Alignment | None  # what direct reads must be aligned to; None where the filesystem has none


@dataclass(frozen=True, slots=True)
class TableFacts:
    """A table that could be opened. `mode` is what `auto` takes for it here and now, None where nothing can."""

    spec: TableSpec
    row_ids: str | None  # what a row's id comes from: "token" or "ngram"; None where that is not known
    payload_alignment: int  # largest power of two that divides the place of every extent, at most an OS page
    files: tuple[FileFacts, ...]
    mode: str | None
    why: str
    warnings: tuple[str, ...]


def inspect(path: str | os.PathLike[str]) -> list[TableFacts]:
    """Look at every candidate table of a model file, a set of parts or a folder; per-layer embeddings come first.

    No rows are read, but for the one block that shows whether a way of reading works. Empty where the model has no
    table; raises TableError where a file can't be used, SettingError for a bad setting of the environment.
    """
    options = fetcher_options({})
    return [_look_at(spec, options) for spec in find_tables(path)]


def as_json(path: str | os.PathLike[str], tables: Sequence[TableFacts]) -> dict[str, Any]:
    """Plain values for `json.dumps`; docs/inspect.md describes them."""
    return {"path": os.fspath(path), "tables": [_table_as_json(table) for table in tables]}


def _look_at(spec: TableSpec, options: FetcherOptions) -> TableFacts:
    files = tuple(_look_at_file(path) for path in dict.fromkeys(extent.path for extent in spec.extents))
    try:
        mode, why = choose(spec, options)
    except LazyIOError as error:
        mode, why = None, str(error)
    return TableFacts(
        spec=spec,
        row_ids=_source_of_ids(spec),
        payload_alignment=min(_power_of_two_in(extent.offset) for extent in spec.extents),
        files=files,
        mode=mode,
        why=why,
        warnings=tuple(_warnings(spec, files)),
    )


def _look_at_file(path: str) -> FileFacts:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return FileFacts(path, filesystem_of(descriptor), direct_alignment(descriptor))
    finally:
        os.close(descriptor)


def _source_of_ids(spec: TableSpec) -> str | None:
    if not spec.is_ple:
        return None
    try:
        row_ids_of(spec)
    except TableError:
        return None
    return "token" if spec.ngram is None else "ngram"


def _power_of_two_in(offset: int) -> int:
    return min(offset & -offset, _OS_PAGE_BYTES) if offset else _OS_PAGE_BYTES


def _warnings(spec: TableSpec, files: Sequence[FileFacts]) -> Iterator[str]:
    for kind in sorted({file.filesystem.kind for file in files if file.filesystem.network}):
        yield (
            f"the table lies on {kind}, where each small read is a message to another program: copy the files to a "
            "local disk, or use mode off if they fit in memory"
        )
    for kind in sorted({file.filesystem.kind for file in files if not file.filesystem.drops_cache}):
        yield f"the table lies on {kind}, whose cache can't be dropped: cold reads can't be measured there"
    unproved = [file.path for file in files if not owns_or_writes(file.path)]
    if unproved:
        yield (
            f"{unproved[0]} is neither yours nor writable for you, so the kernel hides what of it is cached: cold "
            "reads can't be measured; take a copy of your own for that"
        )
    if spec.is_ple and _source_of_ids(spec) is None:
        yield "which rows a token needs is not to be known from these files: open the whole folder of the model"
    if not spec.row_values:
        yield f"the type {spec.dtype} is unknown: rows can be gathered as stored, but not decoded"


def _table_as_json(table: TableFacts) -> dict[str, Any]:
    spec = asdict(table.spec)
    del spec["path"]
    return {
        **spec,
        "row_ids": table.row_ids,
        "table_bytes": table.spec.table_bytes,
        "payload_alignment": table.payload_alignment,
        "files": [_file_as_json(file) for file in table.files],
        "auto": {"mode": table.mode, "why": table.why},
        "warnings": list(table.warnings),
    }


def _file_as_json(file: FileFacts) -> dict[str, Any]:
    filesystem = file.filesystem
    return {
        "path": file.path,
        "filesystem": {
            **asdict(filesystem),
            "network": filesystem.network,
            "drops_cache": filesystem.drops_cache,
        },
        "direct_io": None if file.direct_io is None else asdict(file.direct_io),
    }
