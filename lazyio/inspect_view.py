"""Facts of tables as text for people: one line for each table, and all about those that hold per-layer embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lazyio.inspect import FileFacts, TableFacts
from lazyio.ple.spec import NgramHash
from lazyio.units import format_bytes

# Of a table cut in many parts, the first ones show the pattern.
_EXTENTS_SHOWN = 4


def show(tables: Sequence[TableFacts], console: Console) -> None:
    """Print them. Without a known per-layer embedding, the first table is shown in full."""
    if not tables:
        console.print("no tensor is known to be a table of embeddings")
        return
    console.print(_overview(tables))
    for table in [table for table in tables if table.spec.is_ple] or tables[:1]:
        console.print()
        console.print(Text(table.spec.tensor, style="bold"))
        console.print(Padding(_details(table), (0, 0, 0, 2)))


def _overview(tables: Sequence[TableFacts]) -> Table:
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    grid.add_column("tensor", overflow="fold", ratio=1)
    grid.add_column("type")
    for name in ("rows", "values", "row bytes", "size"):
        grid.add_column(name, justify="right", no_wrap=True)
    grid.add_column("auto", no_wrap=True)
    for table in tables:
        spec = table.spec
        grid.add_row(
            Text(spec.tensor, style="bold" if spec.is_ple else ""),
            spec.dtype,
            f"{spec.rows:,}",
            f"{spec.row_values:,}" if spec.row_values else "?",
            f"{spec.row_bytes:,}",
            format_bytes(spec.table_bytes),
            table.mode or "none",
        )
    return grid


def _details(table: TableFacts) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in _lines(table):
        grid.add_row(label, Text(text, style="yellow" if label == "warning" else ""))
    return grid


def _lines(table: TableFacts) -> Iterator[tuple[str, str]]:
    spec = table.spec
    if spec.architecture:
        yield "model", spec.architecture
    yield "row ids", _row_ids(table)
    if spec.ngram is not None:
        yield from _ngram(spec.ngram)
    if spec.scale is not None:
        yield "scale", f"{spec.scale:g}"
    for extent in spec.extents[:_EXTENTS_SHOWN]:
        last = extent.first_row + extent.rows - 1
        yield "extent", f"rows {extent.first_row:,} to {last:,} from byte {extent.offset:,} of {extent.path}"
    if len(spec.extents) > _EXTENTS_SHOWN:
        yield "", f"and {len(spec.extents) - _EXTENTS_SHOWN} extents more, which --json lists"
    yield "alignment", f"extents begin at multiples of {table.payload_alignment} bytes"
    places: dict[tuple[str, str], int] = {}
    for file in table.files:
        place = _filesystem(file), _direct_io(file)
        places[place] = places.get(place, 0) + 1
    for (filesystem, direct_io), files in places.items():
        yield "filesystem", filesystem if len(places) == 1 else f"{filesystem} ({files} of {len(table.files)} files)"
        yield "direct I/O", direct_io
    yield "auto", f"{table.mode or 'none'}: {table.why}"
    for warning in table.warnings:
        yield "warning", warning


def _row_ids(table: TableFacts) -> str:
    ngram = table.spec.ngram
    if table.row_ids == "ngram" and ngram is not None:
        return f"{len(ngram.head_sizes)} for each token, by a hash of n-grams of up to {len(ngram.multipliers)} tokens"
    return "the token id" if table.row_ids == "token" else "not known"


def _ngram(ngram: NgramHash) -> Iterator[tuple[str, str]]:
    yield "multipliers", " ".join(map(str, ngram.multipliers))
    sizes = ngram.head_sizes
    yield "heads", f"{ngram.heads_per_ngram} for each length of n-gram, of {min(sizes):,} to {max(sizes):,} rows"
    yield "eos", str(ngram.eos)


def _filesystem(file: FileFacts) -> str:
    filesystem = file.filesystem
    text = f"{filesystem.kind} at {filesystem.mount}"
    if filesystem.device is None:
        return f"{text}, from {filesystem.source}" if filesystem.source else text
    facts = [filesystem.device]
    if filesystem.queue_requests is not None:
        facts.append(f"queue of {filesystem.queue_requests} requests")
    if filesystem.rotational is not None:
        facts.append("said to rotate" if filesystem.rotational else "does not rotate")
    return f"{text}, on {', '.join(facts)}"


def _direct_io(file: FileFacts) -> str:
    if file.direct_io is None:
        return "not on this filesystem"
    return f"offsets in multiples of {file.direct_io.offset} bytes, memory of {file.direct_io.memory}"
