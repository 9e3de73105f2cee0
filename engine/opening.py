"""Finding the table of a model, whether it is that model's, and opening it beside the trunk."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypedDict

import torch

from lazyio import settings
from lazyio.engine.feed import FirstRowBeyond
from lazyio.engine.models import Model
from lazyio.engine.weights.source import Source
from lazyio.engine.weights.trunk import Trunk, check_kernels, plan_dummy, plan_trunk
from lazyio.errors import ModelError, SettingError, Unsupported
from lazyio.kernels.packed import PACKED_TYPES
from lazyio.overlay import Overlay
from lazyio.ple.rowids import RowIds, row_ids_of
from lazyio.ple.spec import TableSpec
from lazyio.ple.tables import find_table
from lazyio.table import LazyTable, Wrap, open_table


class TableOptions(TypedDict, total=False):
    """What `lazyio.open_table` takes beside the mode."""

    strict: bool | None
    direct_io: str | None
    workers: int | None
    queue_depth: int | None
    block_bytes: int | str | None
    budget: int | str | None
    row_cache: int | str | None
    reserve: int | str | None
    mmap_rss: int | str | None
    mmap_safe: bool | None
    verify: int | None
    overlay: Overlay | None
    wrap: Wrap | None
    extra: dict[str, Any] | None


def find_rows(
    outline: Model, path: str, table: str | os.PathLike[str] | TableSpec | None
) -> tuple[TableSpec, RowIds] | None:
    """The table of a model, and which rows of it a token needs; None for a model that has none.

    Raises ModelError for a table that is another model's, Unsupported for rows of an unknown type, and what
    `find_table` raises.
    """
    if not outline.row_values:
        return None
    spec = table if isinstance(table, TableSpec) else find_table(table or path)
    row_ids = row_ids_of(spec, outline.vocab)
    if not spec.row_values:
        raise Unsupported(f"{spec.path}: rows of type {spec.dtype} of {spec.tensor} can't be decoded here")
    if row_ids.heads * spec.row_values != outline.row_values:
        raise ModelError(
            f"{spec.path}: {spec.tensor} has {row_ids.heads} rows of {spec.row_values} values a token, which makes "
            f"{row_ids.heads * spec.row_values}, and the model of {path} takes {outline.row_values}: the table is "
            "another model's"
        )
    tokens = outline.vocab if outline.row_vocab is None else outline.row_vocab
    if spec.ngram is None and spec.rows < tokens:
        raise ModelError(
            f"{spec.path}: {spec.tensor} has {spec.rows} rows, and the model of {path} needs one for each of {tokens} "
            "tokens: the table is another model's"
        )
    return spec, row_ids if tokens == outline.vocab else FirstRowBeyond(row_ids, tokens)


def refuse_ignored(path: str, given: Mapping[str, object]) -> None:
    """Raise SettingError for an argument about a table, not None, that a model without one would ignore."""
    for name, value in given.items():
        if value is not None:
            raise SettingError(f"{name} has no effect: the model of {path} has no table; leave it out")


def plan_weights(
    source: Source,
    model: Model,
    device: torch.device,
    dtype: torch.dtype,
    load_format: str,
    weights: str | None,
    trunk: str | None,
) -> Trunk:
    """How the weights of a model are held, by the settings `weights` and `trunk`, None where they are not given.

    Raises SettingError for what would be ignored, and what `plan_trunk` and `plan_dummy` raise. What comes from the
    environment is left alone where it has no effect.
    """
    held, stored = settings.resolve("weights", weights), settings.resolve("trunk", trunk)
    if load_format == "dummy":
        planned = plan_dummy(model, device=device, dtype=dtype, weights=held, trunk=stored)
        if planned.packed_types:
            check_kernels(device, "leave trunk out")
        elif weights is not None and held != "auto":
            of = f"trunk {stored}" if stored else "no trunk"
            raise SettingError(f"weights {held} has no effect with load_format 'dummy' and {of}: leave it out")
        return planned
    if trunk is not None and stored is not None:
        raise SettingError(f"trunk is {stored}, and only weights with load_format 'dummy' can be of any type")
    planned = plan_trunk(source, model, device=device, dtype=dtype, weights=held)
    if weights is not None and held == "packed" and not planned.packed_types:
        raise SettingError(
            f"weights packed has no effect: {source.path} has no matrix that can stay packed ({planned}): leave it "
            f"out, or take a file of {', '.join(sorted(PACKED_TYPES))}"
        )
    return planned


def open_beside(spec: TableSpec, trunk: Trunk, mode: str | None, options: TableOptions) -> LazyTable:
    """Open a table so that the trunk, which is loaded next, has room. Raises what `open_table` raises.

    A table in memory must leave free what the trunk will take where that is the same memory.
    """
    if trunk.device.type == "cpu" and settings.applies("reserve", settings.resolve("lazy_mode", mode)):
        reserve: int = settings.resolve("reserve", options.get("reserve"))
        options = {**options, "reserve": reserve + trunk.nbytes}
    return open_table(spec, mode=mode, **options)
