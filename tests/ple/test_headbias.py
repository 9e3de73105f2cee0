"""Rows of an EXL3 table, from the file to values."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lazyio import LazyTable, ReadError, RowIndexError, TableError, open_table
from lazyio.fetchers.files import FileSet
from lazyio.ple.codec import decode
from lazyio.ple.headbias import HeadBias
from lazyio.ple.tables import find_table

KEY = "model.layers.1.ple.ple_embedding.ngram_embedding."
OFFSETS, SIZES = (0, 11, 24, 41), (11, 13, 17, 19)
CONFIG = {"model_type": "qwen4_exp", "text_config": {"eos_token_id": 255, "ngram_size": 3, "heads_per_ngram": 2}}
RNG = np.random.default_rng(3)
BIAS = RNG.normal(size=(4, 160)).astype(np.float16)
ROWS = RNG.integers(0, 256, (63, 82), np.uint8) & 0xBF

Tensors = dict[str, tuple[str, list[int], bytes]]


@pytest.fixture
def tensors() -> Tensors:
    lists = {"layer_multipliers": (3, 5, 7), "head_vocab_sizes": SIZES, "head_offsets": OFFSETS}
    tensors = {KEY + name: ("I64", [len(v)], struct.pack(f"<{len(v)}q", *v)) for name, v in lists.items()}
    tensors[KEY + "head_bias"] = ("F16", [4, 160], BIAS.tobytes())
    for number in range(3):
        part = ROWS[21 * number : 21 * (number + 1)]
        tensors[f"{KEY}shard_{number}.trellis"] = ("I16", [21, 41], part.tobytes())
    return tensors


@pytest.fixture
def folder(tmp_path: Path, write_safetensors, tensors: Tensors) -> Path:
    write_safetensors(tmp_path / "ngram_embedding.safetensors", tensors)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture
def table(folder: Path):
    with open_table(folder, mode="on") as table:
        yield table


def test_values_have_the_bias_of_their_head(table: LazyTable) -> None:
    # The last three rows are behind the last head.
    heads = np.repeat([0, 1, 2, 3, 3], [*SIZES, 3])
    wanted = decode(ROWS, "EXL3_K4") + BIAS[heads].astype(np.float32)
    ids = np.array([[0, 10, 11, 23], [24, 40, 41, 62], [59, 60, 7, 7]])
    np.testing.assert_array_equal(table.decode(table.gather(ids), ids=ids), wanted[ids])
    rows, inverse = table.gather_unique(ids)
    np.testing.assert_array_equal(table.decode(rows, ids=np.unique(ids))[inverse], wanted[ids])
    halves = table.decode(rows, np.float16, ids=np.unique(ids).astype(np.uint64))
    np.testing.assert_array_equal(halves[inverse], wanted[ids].astype(np.float16))
    np.testing.assert_array_equal(table.decode(table.gather(5), ids=5), wanted[5])
    assert table.decode(table.gather([]), ids=[]).shape == (0, 160)


def test_decoding_needs_the_ids(table: LazyTable) -> None:
    rows = table.gather([1, 2, 3])
    with pytest.raises(TableError, match=r"decode needs their ids, of shape \[3\], and got none"):
        table.decode(rows)
    with pytest.raises(TableError, match=r"of shape \[3\], and got ids of shape \[2\]"):
        table.decode(rows, ids=[1, 2])
    with pytest.raises(RowIndexError, match="row 63"):
        table.decode(rows, ids=[1, 2, 63])
    with pytest.raises(TypeError, match="integers"):
        table.decode(rows, ids=[1.0, 2.0, 3.0])


def test_without_constants_rows_can_be_had_packed(folder: Path) -> None:
    (folder / "config.json").unlink()
    with open_table(folder, mode="on") as table:
        np.testing.assert_array_equal(table.gather([1, 2]), ROWS[[1, 2]])
        with pytest.raises(TableError, match=r"open the folder of the model, with its config\.json"):
            table.decode(table.gather([1]), ids=[1])


@pytest.mark.parametrize("mode", ["off", "on"])
def test_a_file_that_is_replaced_does_not_change_the_biases(
    folder: Path, write_safetensors, tensors: Tensors, mode: str
) -> None:
    path = folder / "ngram_embedding.safetensors"
    wanted = decode(ROWS[:1], "EXL3_K4") + BIAS[:1].astype(np.float32)
    with open_table(folder, mode=mode, **({"reserve": 0} if mode == "off" else {})) as table:
        path.unlink()
        write_safetensors(path, tensors | {KEY + "head_bias": ("F16", [4, 160], bytes(2 * 4 * 160))})
        np.testing.assert_array_equal(table.decode(table.gather([0]), ids=[0]), wanted)
        path.unlink()
        np.testing.assert_array_equal(table.decode(ROWS[:1], ids=[0]), wanted)


def test_rows_and_biases_come_from_one_state_of_a_file(folder: Path) -> None:
    spec = find_table(folder)
    path = folder / "ngram_embedding.safetensors"
    files = FileSet([str(path)])
    path.write_bytes(path.read_bytes() + b"0")
    with pytest.raises(ReadError, match="changed after the table was opened"):
        HeadBias(spec, files)
    files.close()


@pytest.mark.parametrize("own_file", [False, True])
def test_biases_that_are_not_there_are_refused_when_the_table_is_opened(folder: Path, own_file: bool) -> None:
    spec = find_table(folder)
    assert spec.head_bias is not None
    path = folder / "alone"
    path.write_bytes(BIAS.tobytes()[:-1])
    size = Path(spec.head_bias.path).stat().st_size
    place = {"path": str(path), "offset": 0} if own_file else {"offset": size - 1279}
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TableError, match=r"cut short: the biases .* take 1280 bytes from \d+ on, and 1279 are there"):
        open_table(replace(spec, head_bias=replace(spec.head_bias, **place)), mode="on")
    path.unlink()
    if own_file:
        with pytest.raises(TableError, match="can't open"):
            open_table(replace(spec, head_bias=replace(spec.head_bias, **place)), mode="on")
    assert len(os.listdir("/proc/self/fd")) == before


def test_biases_in_a_file_of_their_own(folder: Path) -> None:
    spec = find_table(folder)
    assert spec.head_bias is not None
    (folder / "alone").write_bytes(b"12" + BIAS.tobytes())
    place = replace(spec.head_bias, path=str(folder / "alone"), offset=2)
    before = len(os.listdir("/proc/self/fd"))
    with open_table(replace(spec, head_bias=place), mode="on") as table:
        wanted = decode(ROWS[:1], "EXL3_K4") + BIAS[:1].astype(np.float32)
        np.testing.assert_array_equal(table.decode(ROWS[:1], ids=[0]), wanted)
    assert len(os.listdir("/proc/self/fd")) == before


def test_tables_without_biases_do_without_ids(folder: Path, write_safetensors) -> None:
    write_safetensors(folder / "ngram_embedding.safetensors", {f"{KEY}trellis": ("I16", [63, 41], ROWS.tobytes())})
    with open_table(folder, mode="on") as table:
        np.testing.assert_array_equal(table.decode(table.gather([4, 2])), decode(ROWS[[4, 2]], "EXL3_K4"))
