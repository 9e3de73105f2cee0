from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from lazyio.errors import SettingError, TableError
from lazyio.ple.ngram import derive_constants
from lazyio.ple.rowids import row_ids_of
from lazyio.ple.spec import TableSpec
from lazyio.ple.synthetic import expected_rows, write_safetensors
from lazyio.ple.synthetic.safetensors import SCALE
from lazyio.ple.tables import find_table

ROWS = 1001
PREFIX = "model.language_model.layers.1.ple.ple_embedding."


def rows_of(spec: TableSpec) -> np.ndarray:
    rows = np.zeros((spec.rows, spec.row_bytes), np.uint8)
    for extent in spec.extents:
        data = np.fromfile(extent.path, np.uint8, extent.rows * spec.row_bytes, offset=extent.offset)
        rows[extent.first_row : extent.first_row + extent.rows] = data.reshape(extent.rows, -1)
    return rows


def test_the_safetensors_library_reads_the_rows(tmp_path: Path):
    (path,) = write_safetensors(tmp_path / "table.safetensors", ROWS, "F16", shards=12)
    constants = derive_constants(ROWS)
    with safe_open(path, framework="numpy") as file:
        names = set(file.keys())
        shards = [file.get_tensor(f"{PREFIX}ngram_embedding.shard_{number}.weight") for number in range(12)]
        assert file.get_tensor(PREFIX + "layer_multipliers").tolist() == list(constants.multipliers)
        assert file.get_tensor(PREFIX + "ngram_heads_offsets").tolist() == list(constants.head_offsets)
        assert file.get_tensor(PREFIX + "ngram_heads_vocab_sizes").tolist() == list(constants.head_sizes)
    assert len(names) == 12 + 3
    assert {len(shard) for shard in shards} == {83, 84}
    packed = np.concatenate(shards).view(np.uint8)
    np.testing.assert_array_equal(packed, expected_rows(range(ROWS), "F16"))


def test_shards_lie_in_the_order_of_their_names(tmp_path: Path):
    (path,) = write_safetensors(tmp_path / "table.safetensors", ROWS, shards=12)
    spec = find_table(str(path))
    offsets = [extent.offset for extent in spec.extents]
    assert offsets != sorted(offsets)
    np.testing.assert_array_equal(rows_of(spec), expected_rows(range(ROWS), "BF16"))


@pytest.mark.parametrize("files", [1, 3, 128])
@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3"])
def test_a_folder(tmp_path: Path, files: int, dtype: str):
    folder = tmp_path / "model"
    paths = write_safetensors(folder, ROWS, dtype, files=files)
    assert [path.name for path in paths] == [f"model-{n:05}-of-{files:05}.safetensors" for n in range(1, files + 1)]
    assert len(os.listdir(folder)) == files + 2
    spec = find_table(str(folder))
    assert (spec.rows, spec.row_values, spec.dtype, spec.is_ple) == (ROWS, 160, dtype, True)
    assert spec.scale == (SCALE if dtype == "F8_E4M3" else None)
    assert spec.ngram == derive_constants(ROWS)
    assert row_ids_of(spec)(range(100)).shape == (100, 16)
    np.testing.assert_array_equal(rows_of(spec), expected_rows(range(ROWS), dtype))


def test_the_index_tells_the_size_of_all_tensors(tmp_path: Path):
    paths = write_safetensors(tmp_path / "model", ROWS, "F8_E4M3", shards=4, files=2)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == ROWS * 160 + 8 * (3 + 16 + 16) + 2
    assert set(index["weight_map"].values()) == {path.name for path in paths}


@pytest.mark.parametrize(("architecture", "values"), [("gemma4", 8960), ("gemma3n", 7680)])
def test_gemma_has_its_table_in_one_tensor(tmp_path: Path, architecture: str, values: int):
    write_safetensors(tmp_path / "model", 64, architecture=architecture)
    spec = find_table(str(tmp_path / "model"))
    assert (spec.architecture, spec.row_values, spec.ngram, spec.is_ple) == (architecture, values, None, True)
    np.testing.assert_array_equal(rows_of(spec), expected_rows(range(64), "BF16", values))


def test_holes(tmp_path: Path):
    (path,) = write_safetensors(tmp_path / "table.safetensors", 1_000_000, sparse=True)
    assert path.stat().st_size > 320_000_000
    assert path.stat().st_blocks * 512 < 100_000
    assert find_table(str(path)).rows == 1_000_000


@pytest.mark.parametrize(
    ("error", "name", "options", "message"),
    [
        (TableError, "model", {"dtype": "IQ4_NL"}, "safetensors has no type IQ4_NL"),
        (TableError, "model", {"dtype": "U8", "row_values": 15}, "15 bytes"),
        (SettingError, "model", {"shards": 0}, "1 to 1001 shards; got 0"),
        (SettingError, "model", {"shards": 1002}, "1 to 1001 shards; got 1002"),
        (SettingError, "model", {"shards": 2, "architecture": "gemma4"}, "one tensor; got 2 shards"),
        (SettingError, "model", {"shards": 4, "files": 5}, "5 files: the table has 4 shards"),
        (SettingError, "model", {"files": 0}, "0 files"),
        (SettingError, "table.safetensors", {"files": 2}, "2 files: its name ends in .safetensors"),
        (SettingError, "absent/model", {}, "can't make the folder"),
    ],
)
def test_tables_that_can_t_be(
    tmp_path: Path, error: type[Exception], name: str, options: dict[str, object], message: str
):
    with pytest.raises(error, match=message):
        write_safetensors(tmp_path / name, **{"rows": ROWS, **options})
    assert os.listdir(tmp_path) == []


def test_an_interrupted_folder_leaves_nothing(tmp_path: Path):
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_safetensors(tmp_path / "model", ROWS, files=3, progress=interrupt)
    assert os.listdir(tmp_path) == []


def test_a_folder_with_other_files_keeps_them(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    write_safetensors(tmp_path, ROWS)
    with pytest.raises(SettingError, match="exists"):
        write_safetensors(tmp_path, ROWS)
    write_safetensors(tmp_path, ROWS, overwrite=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert find_table(str(tmp_path)).rows == ROWS
