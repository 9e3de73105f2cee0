import dataclasses
import json
import re
from pathlib import Path

import gguf
import numpy as np
import pytest

from lazyio import inspect as facts
from lazyio.errors import TableError, Unsupported
from lazyio.fetchers import Alignment, Extent
from lazyio.host import Filesystem
from lazyio.ple.spec import TableSpec

ROWS = 64
DISK = Filesystem("ext4", "/", "/dev/sda1", 8, 1, device="sda", rotational=False, queue_requests=64, sector_bytes=512)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A GGUF file with a token embedding and a table of 90-byte rows with n-gram constants."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen4exp")
    for name, values in (
        ("layer_multipliers", [23703573157769, 20109073645365]),
        ("head_vocab_sizes", [29, 31]),
        ("head_offsets", [0, 29]),
    ):
        writer.add_key_value(
            f"qwen4exp.ple.{name}", values, gguf.GGUFValueType.ARRAY, sub_type=gguf.GGUFValueType.UINT64
        )
    writer.add_uint32("qwen4exp.ple.heads_per_ngram", 2)
    writer.add_uint32("qwen4exp.ple.ngram_size", 2)
    writer.add_uint32("qwen4exp.ple.eos_token_id", 7)
    writer.add_tensor("token_embd.weight", np.zeros((10, 32), np.float16))
    rows = np.zeros((ROWS, 90), np.uint8)
    writer.add_tensor("per_layer_token_embd.weight", rows, raw_dtype=gguf.GGMLQuantizationType.IQ4_NL)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_table_is_shown_and_the_per_layer_embedding_first(model: Path) -> None:
    tables = facts.inspect(model)
    assert [table.spec.tensor for table in tables] == ["per_layer_token_embd.weight", "token_embd.weight"]
    spec = tables[0].spec
    assert (spec.dtype, spec.rows, spec.row_values, spec.row_bytes, spec.is_ple) == ("IQ4_NL", ROWS, 160, 90, True)
    assert spec.ngram is not None
    assert spec.ngram.multipliers == (23703573157769, 20109073645365)
    assert tables[0].mode == "off"
    assert "it fits in memory" in tables[0].why


def test_what_row_ids_come_from(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed, embedding = facts.inspect(model)
    assert (hashed.row_ids, embedding.row_ids) == ("ngram", None)
    without = dataclasses.replace(hashed.spec, ngram=None)
    monkeypatch.setattr(
        facts, "find_tables", lambda path: [without, dataclasses.replace(without, architecture="gemma4")]
    )
    unknown, token = facts.inspect(model)
    assert (unknown.row_ids, token.row_ids) == (None, "token")
    assert "open the whole folder" in unknown.warnings[0]
    assert token.warnings == ()


def test_settings_of_the_environment_count_for_auto(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYIO_RESERVE", "1000T")
    table = facts.inspect(model)[0]
    assert table.mode not in {None, "off"}
    assert "1000.0 TiB must stay free" in table.why


def test_where_nothing_can_read_a_table_the_reason_is_shown(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise Unsupported("maps are forbidden here")

    monkeypatch.setattr(facts, "choose", refuse)
    table = facts.inspect(model)[0]
    assert (table.mode, table.why) == (None, "maps are forbidden here")


def test_what_is_no_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="none"):
        facts.inspect(tmp_path / "none.gguf")


def test_files_are_looked_at_once_each(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = facts.inspect(model)[0].spec
    offset = spec.extents[0].offset
    cut = dataclasses.replace(
        spec, extents=(Extent(str(model), offset, 0, 32), Extent(str(model), offset + 32 * 90, 32, 32))
    )
    monkeypatch.setattr(facts, "find_tables", lambda path: [cut])
    (table,) = facts.inspect(model)
    assert [file.path for file in table.files] == [str(model)]


@pytest.mark.parametrize(("offsets", "alignment"), [((0,), 4096), ((192,), 64), ((192, 96), 32), ((1 << 20,), 4096)])
def test_alignment_of_the_payload(
    model: Path, monkeypatch: pytest.MonkeyPatch, offsets: tuple[int, ...], alignment: int
) -> None:
    extents = tuple(Extent(str(model), offset, row, 1) for row, offset in enumerate(offsets))
    spec = TableSpec(str(model), "raw", "U8", len(extents), 90, 90, extents)
    monkeypatch.setattr(facts, "find_tables", lambda path: [spec])
    assert facts.inspect(model)[0].payload_alignment == alignment


@pytest.mark.parametrize(
    ("filesystem", "owned", "row_values", "warning"),
    [
        (DISK, True, 160, None),
        (
            dataclasses.replace(DISK, kind="nfs4"),
            True,
            160,
            "the table lies on nfs4, .* copy the files to a local disk",
        ),
        (dataclasses.replace(DISK, kind="tmpfs"), True, 160, "tmpfs, whose cache can't be dropped"),
        (DISK, False, 160, "model.gguf is neither yours nor writable for you"),
        (DISK, True, 0, "the type IQ4_NL is unknown: .* not decoded"),
    ],
)
def test_warnings(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    filesystem: Filesystem,
    owned: bool,
    row_values: int,
    warning: str | None,
) -> None:
    spec = dataclasses.replace(facts.inspect(model)[0].spec, row_values=row_values)
    monkeypatch.setattr(facts, "find_tables", lambda path: [spec])
    monkeypatch.setattr(facts, "filesystem_of", lambda path: filesystem)
    monkeypatch.setattr(facts, "owns_or_writes", lambda path: owned)
    warnings = facts.inspect(model)[0].warnings
    assert len(warnings) == (warning is not None)
    assert warning is None or re.search(warning, warnings[0])


def test_json_has_what_its_page_lists(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "filesystem_of", lambda path: DISK)
    monkeypatch.setattr(facts, "direct_alignment", lambda descriptor: Alignment(offset=512, memory=4))
    document = json.loads(json.dumps(facts.as_json(model, facts.inspect(model))))
    assert document["path"] == str(model)
    table = document["tables"][0]
    assert table["extents"] == [
        {"path": str(model), "offset": table["extents"][0]["offset"], "first_row": 0, "rows": ROWS}
    ]
    assert table["table_bytes"] == ROWS * 90
    assert table["ngram"]["head_sizes"] == [29, 31]
    assert table["auto"]["mode"] == "off"
    (file,) = table["files"]
    assert file["direct_io"] == {"offset": 512, "memory": 4}
    assert file["filesystem"]["device"] == "sda"
    assert file["filesystem"]["network"] is False


def test_the_page_names_every_key(model: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "inspect.md").read_text()
    table = facts.as_json(model, facts.inspect(model))["tables"][0]
    for keys in (table, table["ngram"], table["extents"][0], table["auto"], table["files"][0]):
        assert [key for key in keys if key != "filesystem" and f"`{key}`" not in page] == []
    for key in table["files"][0]["filesystem"]:
        assert f"`filesystem.{key}`" in page or f"`.{key}`" in page


def test_json_without_direct_io(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "direct_alignment", lambda descriptor: None)
    assert facts.as_json(model, facts.inspect(model))["tables"][0]["files"][0]["direct_io"] is None
