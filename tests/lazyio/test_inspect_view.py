import dataclasses
import io

import pytest
from rich.console import Console

from lazyio.fetchers import Alignment, Extent
from lazyio.host import Filesystem
from lazyio.inspect import FileFacts, TableFacts
from lazyio.inspect_view import show
from lazyio.ple.spec import NgramHash, TableSpec

DISK = Filesystem("ext4", "/data", "/dev/nvme0n1p2", 259, 2, "nvme0n1", False, 1023, 512)
NGRAM = NgramHash((23703573157769, 20109073645365), (20000003, 20000023), (0, 20000003), 2, 248044)
TENSOR = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.weight"


def facts(parts: int = 1, **changes: object) -> TableFacts:
    extents = tuple(Extent(f"/data/model-{part:05}.gguf", 192, part * 1_000_000, 1_000_000) for part in range(parts))
    rows = parts * 1_000_000
    spec = TableSpec("/data", TENSOR, "IQ4_NL", rows, 160, 90, extents, "qwen4exp", NGRAM, is_ple=True)
    files = tuple(FileFacts(extent.path, DISK, Alignment(512, 4)) for extent in extents)
    table = TableFacts(spec, "ngram", 64, files, "uring", "it does not fit in memory", ())
    return dataclasses.replace(table, **changes)  # type: ignore[arg-type]


def shown(*tables: TableFacts, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    show(tables, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_all_there_is_to_know_of_a_table() -> None:
    text = shown(facts())
    for fact in (
        TENSOR,
        "IQ4_NL",
        "1,000,000",
        "85.8 MiB",
        "qwen4exp",
        "by a hash of n-grams of up to 2 tokens",
        "23703573157769 20109073645365",
        "2 for each length of n-gram, of 20,000,003 to 20,000,023 rows",
        "248044",
        "rows 0 to 999,999 from byte 192 of /data/model-00000.gguf",
        "multiples of 64 bytes",
        "ext4 at /data, on nvme0n1, queue of 1023 requests, does not rotate",
        "offsets in multiples of 512 bytes, memory of 4",
        "uring: it does not fit in memory",
    ):
        assert fact in text
    assert "warning" not in text


@pytest.mark.parametrize("width", [80, 100])
def test_lines_fit(width: int) -> None:
    text = shown(facts(parts=7, warnings=("the table lies on nfs4, " * 9,)), width=width)
    assert max(map(len, text.splitlines())) <= width


def test_of_many_extents_the_first_are_shown() -> None:
    text = shown(facts(parts=7))
    assert text.count("rows 0 to") == 1
    assert "model-00003" in text
    assert "model-00004" not in text
    assert "and 3 extents more" in text


def test_files_on_two_disks() -> None:
    table = facts(parts=3)
    elsewhere = dataclasses.replace(DISK, kind="tmpfs", mount="/fast", source="tmpfs", device=None)
    text = shown(dataclasses.replace(table, files=(*table.files[:2], FileFacts("/fast/x", elsewhere, None))))
    assert "does not rotate (2 of 3 files)" in text
    assert "tmpfs at /fast, from tmpfs (1 of 3 files)" in text
    assert "not on this filesystem" in text


def test_only_per_layer_embeddings_are_shown_in_full() -> None:
    other = facts()
    other = dataclasses.replace(other, spec=dataclasses.replace(other.spec, tensor="token_embd.weight", is_ple=False))
    text = shown(facts(), other)
    assert text.count("token_embd.weight") == 1
    assert text.count("direct I/O") == 1
    assert shown(other).count("direct I/O") == 1


def test_unknowns() -> None:
    table = facts(mode=None, why="maps are forbidden here", warnings=("it is unknown",))
    spec = dataclasses.replace(table.spec, row_values=0, ngram=None, architecture=None, scale=0.5)
    text = shown(dataclasses.replace(table, spec=spec, row_ids=None))
    for fact in ("none: maps are forbidden here", "it is unknown", "not known", "0.5"):
        assert fact in text


def test_a_table_without_hash() -> None:
    table = facts(row_ids="token")
    text = shown(dataclasses.replace(table, spec=dataclasses.replace(table.spec, ngram=None)))
    assert "the token id" in text
    assert "eos" not in text


def test_no_tables() -> None:
    assert shown() == "no tensor is known to be a table of embeddings\n"


def test_brackets_in_names_are_not_markup() -> None:
    table = facts()
    assert "[bold]x" in shown(dataclasses.replace(table, spec=dataclasses.replace(table.spec, tensor="[bold]x")))
