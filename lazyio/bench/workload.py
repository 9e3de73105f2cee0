"""Which rows are asked for, and how they are cut into gathers."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lazyio.errors import RowIndexError, TableError
from lazyio.fetchers.base import Int64
from lazyio.ple.rowids import NgramRowIds, RowIds, row_ids_of
from lazyio.ple.spec import TableSpec

#: Tokens of a workload that is not told how many.
DEFAULT_TOKENS = 16_384
#: Rows a token of a table whose way from tokens to rows is not known.
UNKNOWN_HEADS = 16


@dataclass(frozen=True, slots=True)
class Workload:
    """Row ids of every gather, in order. With `decode` each gather is timed on its own."""

    ubatches: tuple[Int64, ...]  # each [rows of that gather]
    source: str  # where the ids come from, in words
    tokens: int | None  # None where only rows are known
    ubatch_tokens: int | None
    decode: bool = False

    @property
    def rows(self) -> int:
        """Rows asked for, duplicates and all."""
        return sum(map(len, self.ubatches))

    @property
    def unique_rows(self) -> int:
        """Rows that are left when each gather asks for each row once."""
        return sum(len(np.unique(ids)) for ids in self.ubatches)

    def groups(self, row_bytes: int, limit_bytes: int) -> Iterator[slice]:
        """Runs of ubatches whose rows together fit `limit_bytes`; one that is larger comes alone."""
        start, held = 0, 0
        for number, ids in enumerate(self.ubatches):
            size = len(ids) * row_bytes
            if number > start and held + size > limit_bytes:
                yield slice(start, number)
                start, held = number, 0
            held += size
        yield slice(start, len(self.ubatches))

    def as_json(self) -> dict[str, Any]:
        """What the report says of it."""
        return {
            "source": self.source,
            "tokens": self.tokens,
            "ubatch_tokens": self.ubatch_tokens,
            "ubatches": len(self.ubatches),
            "rows": self.rows,
            "unique_rows": self.unique_rows,
            "decode": self.decode,
        }


@dataclass(frozen=True, slots=True)
class Cut:
    """How tokens become gathers."""

    tokens: int  # a ubatch
    decode: bool = False


def from_ids_file(spec: TableSpec, path: str, tokens: int | None, usual: int, cut: Cut) -> Workload:
    """The rows of the first `tokens` token ids in a .npy file of integers in one dimension; None takes up to `usual`.

    Raises TableError for a file that is no such array or is too short, RowIndexError for an id the table has no rows
    for.
    """
    ids = load_ids(path)
    if tokens is not None and tokens > len(ids):
        raise TableError(f"{path} has {len(ids)} token ids, and {tokens} are asked for; ask for fewer")
    try:
        return _of_tokens(row_ids_of(spec), ids[: tokens or usual], f"token ids of {path}", cut)
    except RowIndexError as error:
        raise RowIndexError(f"{path}: {error}") from error


def from_text(spec: TableSpec, tokens: int, cut: Cut) -> Workload | None:
    """The rows of the text that comes with the package.

    None where the text is too short, or the table is not asked by such token ids.
    """
    row_ids = _known_row_ids(spec)
    if row_ids is None:
        return None
    with resources.as_file(resources.files("lazyio.bench") / "data" / "text.ids.npy") as path:
        ids = np.load(path)
    if int(ids.max()) >= _vocab(row_ids, spec) or tokens > len(ids):
        return None
    return _of_tokens(row_ids, ids[:tokens], "token ids of the text that comes with lazyio", cut)


def uniform(spec: TableSpec, tokens: int, cut: Cut, seed: int) -> Workload:
    """Random tokens, each id as likely as the others; for a table without known row ids, random rows."""
    random = np.random.default_rng(seed)
    row_ids = _known_row_ids(spec)
    if row_ids is not None:
        ids = random.integers(0, _vocab(row_ids, spec), tokens)
        return _of_tokens(row_ids, ids, f"uniform random token ids, seed {seed}", cut)
    rows = random.integers(0, spec.rows, (tokens, UNKNOWN_HEADS))
    source = f"uniform random rows, {UNKNOWN_HEADS} a token, seed {seed}, since how tokens choose rows is not known"
    return _cut(rows, source, cut)


def _known_row_ids(spec: TableSpec) -> RowIds | None:
    """How tokens choose rows; None where that is not known: no table of a known model, or a hash without constants."""
    if spec.ngram is None and not spec.is_ple:
        return None
    try:
        return row_ids_of(spec)
    except TableError:
        if spec.ngram is None:
            return None
        raise


def _of_tokens(row_ids: RowIds, tokens: NDArray[Any], source: str, cut: Cut) -> Workload:
    # The context is carried over the cuts, so one call for all gives what one call a ubatch would.
    return _cut(row_ids(tokens), source, cut)


def _cut(rows: Int64, source: str, cut: Cut) -> Workload:
    """Cut row ids [tokens, rows a token] into ubatches."""
    ubatches = [rows[start : start + cut.tokens].reshape(-1) for start in range(0, len(rows), cut.tokens)]
    return Workload(tuple(ubatches), source, len(rows), cut.tokens, cut.decode)


def _vocab(row_ids: RowIds, spec: TableSpec) -> int:
    return row_ids.vocab if isinstance(row_ids, NgramRowIds) else spec.rows


def load_ids(path: str) -> NDArray[Any]:
    """Token ids, integers [n], of a .npy file. Raises TableError for a file that has none."""
    try:
        with open(path, "rb") as file:
            ids = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        reason = getattr(error, "strerror", None) or "it is no .npy file of integers, or a damaged one"
        raise TableError(f"can't read token ids from {path}: {reason}") from error
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
        found = f"{ids.dtype} of shape {list(ids.shape)}" if isinstance(ids, np.ndarray) else "an archive"
        raise TableError(f"{path} must hold token ids as a .npy array of integers in one dimension; it holds {found}")
    return ids


# --- traces ----------------------------------------------------------------------------------------------------------


def save_trace(path: str | os.PathLike[str], gathers: Sequence[NDArray[Any]]) -> None:
    """Write the row ids of some gathers, in order, as a trace.

    A trace is a .npz file of two arrays: `row_ids` int64 [all rows], the gathers one after the other, and `lengths`
    int64 [gathers], how many rows each one has.
    """
    flat = [np.asarray(ids, np.int64).reshape(-1) for ids in gathers]
    with open(path, "wb") as file:
        np.savez_compressed(
            file,
            row_ids=np.concatenate(flat) if flat else np.empty(0, np.int64),
            lengths=np.array([len(ids) for ids in flat], np.int64),
        )


def from_trace(spec: TableSpec, path: str, steps: int | None, usual: int | None, decode: bool) -> Workload:
    """The first `steps` gathers of a trace; None takes up to `usual`, and all if that is None too.

    Raises TableError for a file that is no trace or is too short, RowIndexError for a row outside the table.
    """
    rows, lengths = _load_trace(path)
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < spec.rows:
        wrong = int(rows.min()) if rows.min() < 0 else int(rows.max())
        raise RowIndexError(f"{path} asks for row {wrong}, and {spec.tensor} has rows 0 to {spec.rows - 1}")
    gathers = [ids for ids in np.split(rows, lengths.cumsum()[:-1]) if len(ids)]
    if steps is not None and steps > len(gathers):
        raise TableError(f"{path} has {len(gathers)} gathers, and {steps} are asked for; ask for fewer")
    return Workload(tuple(gathers[: steps or usual]), f"trace {path}", None, None, decode)


def _load_trace(path: str) -> tuple[Int64, Int64]:
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            rows, lengths = archive["row_ids"], archive["lengths"]
    except (OSError, ValueError, EOFError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        reason = getattr(error, "strerror", None) or "it is no such file, or a damaged one"
        raise TableError(
            f"can't read a trace from {path}, a .npz file with the arrays row_ids and lengths: {reason}"
        ) from error
    if any(array.ndim != 1 or array.dtype.kind not in "iu" for array in (rows, lengths)):
        raise TableError(f"row_ids and lengths of {path} must be integers in one dimension")
    if not len(rows) or (len(lengths) and int(lengths.min()) < 0) or int(lengths.sum()) != len(rows):
        raise TableError(f"{path} has {len(rows)} row ids, and its lengths add up to {int(lengths.sum())}")
    return rows.astype(np.int64), lengths.astype(np.int64)
