from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from lazyio.errors import NeverFits, SettingError, TableError
from lazyio.ple.dtypes import TYPES
from lazyio.ple.ngram import derive_constants
from lazyio.ple.rowids import row_ids_of
from lazyio.ple.synthetic import expected_rows, write_gguf
from lazyio.ple.synthetic.gguf import TABLE
from lazyio.ple.tables import find_table

ROWS = 1001


def metadata_of(reader: GGUFReader) -> dict[str, object]:
    return {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}


@pytest.mark.parametrize(
    ("dtype", "architecture", "values"),
    [
        ("IQ4_NL", "qwen4exp", 160),
        ("Q8_0", "qwen4exp", 160),
        ("BF16", "qwen4exp", 160),
        ("Q5_K", "gemma4", 8960),
        ("IQ1_S", "gemma3n", 7680),
    ],
)
def test_the_gguf_package_reads_the_rows(tmp_path: Path, dtype: str, architecture: str, values: int):
    path = tmp_path / "table.gguf"
    assert write_gguf(path, ROWS, dtype, architecture=architecture) == (path,)
    (tensor,) = GGUFReader(path).tensors
    assert (tensor.name, tensor.tensor_type.name, tensor.shape.tolist()) == (TABLE, dtype, [values, ROWS])
    packed = np.asarray(tensor.data).view(np.uint8).reshape(ROWS, -1)
    np.testing.assert_array_equal(packed, expected_rows(range(ROWS), dtype, values))
    assert tensor.data_offset % 32 == 0
    assert tensor.data_offset % 4096 != 0
    assert path.stat().st_size % 32 == 0


def test_metadata_of_an_ngram_table(tmp_path: Path):
    (path,) = write_gguf(tmp_path / "table.gguf", 48_000_000, sparse=True)
    metadata, constants = metadata_of(GGUFReader(path)), derive_constants(48_000_000)
    assert metadata["general.architecture"] == "qwen4exp"
    assert metadata["qwen4exp.embedding_length_per_layer_input"] == 160
    assert metadata["qwen4exp.ple.layers"] == [1]
    assert metadata["qwen4exp.ple.ngram_size"] == 3
    assert metadata["qwen4exp.ple.heads_per_ngram"] == 8
    assert metadata["qwen4exp.ple.eos_token_id"] == 248_044
    assert tuple(metadata["qwen4exp.ple.layer_multipliers"]) == constants.multipliers
    assert tuple(metadata["qwen4exp.ple.head_offsets"]) == constants.head_offsets
    assert tuple(metadata["qwen4exp.ple.head_vocab_sizes"]) == constants.head_sizes
    assert len(metadata["qwen4exp.attention.compress_ratios"]) == 48
    assert sum(metadata["qwen4exp.attention.compress_ratios"]) == 48
    assert not any(key.startswith(("tokenizer.", "split.")) for key in metadata)


def test_metadata_of_a_gemma_table(tmp_path: Path):
    (path,) = write_gguf(tmp_path / "table.gguf", 300, "Q4_0", 10_752, architecture="gemma4")
    metadata = metadata_of(GGUFReader(path))
    assert metadata["gemma4.block_count"] == 42
    assert metadata["gemma4.embedding_length_per_layer_input"] == 256
    assert not any(".ple." in key for key in metadata)


@pytest.mark.parametrize("vocab", [1, 27, 1500])
def test_a_vocabulary(tmp_path: Path, vocab: int):
    (path,) = write_gguf(tmp_path / "table.gguf", ROWS, vocab=vocab)
    metadata = metadata_of(GGUFReader(path))
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = metadata["tokenizer.ggml.merges"]
    assert len(set(tokens)) == len(tokens) == len(metadata["tokenizer.ggml.token_type"]) == vocab
    assert len(merges) == sum(len(token) > 1 for token in tokens)
    assert {merge.replace(" ", "") for merge in merges} <= set(tokens)
    assert metadata["qwen4exp.ple.eos_token_id"] == vocab - 1
    spec = find_table(str(path))
    assert row_ids_of(spec, vocab)(range(vocab)).max() < ROWS


@pytest.mark.parametrize(("parts", "table_in"), [(2, 2), (3, 3), (5, 3)])
def test_parts(tmp_path: Path, parts: int, table_in: int):
    paths = write_gguf(tmp_path / "table.gguf", ROWS, parts=parts, vocab=50)
    assert [path.name for path in paths] == [f"table-{n:05}-of-{parts:05}.gguf" for n in range(1, parts + 1)]
    assert sorted(os.listdir(tmp_path)) == [path.name for path in paths]
    readers = [GGUFReader(path) for path in paths]
    assert [len(reader.tensors) for reader in readers] == [0] + [1] * (parts - 1)
    for number, reader in enumerate(readers):
        metadata = metadata_of(reader)
        assert metadata["split.no"] == number
        assert metadata["split.count"] == parts
        assert metadata["split.tensors.count"] == parts - 1
        assert ("general.architecture" in metadata) == (number == 0)
    tensor = readers[table_in - 1].tensors[0]
    assert tensor.name == TABLE
    np.testing.assert_array_equal(tensor.data, expected_rows(range(ROWS)))


@pytest.mark.parametrize("parts", [1, 3])
def test_our_own_reader_finds_the_table(tmp_path: Path, parts: int):
    paths = write_gguf(tmp_path / "table.gguf", ROWS, "Q8_0", parts=parts, vocab=300)
    spec = find_table(str(paths[0]))
    assert (spec.rows, spec.row_values, spec.row_bytes, spec.dtype) == (ROWS, 160, 170, "Q8_0")
    assert (spec.architecture, spec.is_ple) == ("qwen4exp", True)
    assert spec.ngram == derive_constants(ROWS, vocab=300, eos=299)
    (extent,) = spec.extents
    with open(extent.path, "rb") as file:
        file.seek(extent.offset + 700 * spec.row_bytes)
        assert file.read(spec.row_bytes) == expected_rows([700], "Q8_0").tobytes()


def test_a_sparse_table_of_released_size(tmp_path: Path):
    rows = 320_001_536
    paths = write_gguf(tmp_path / "table.gguf", rows, "Q8_0", parts=3, sparse=True)
    assert paths[2].stat().st_size > rows * 170
    assert sum(path.stat().st_blocks * 512 for path in paths) < 100_000
    assert find_table(str(paths[0])).table_bytes == rows * 170


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        (TableError, {"dtype": "F8_E4M3"}, "GGUF has no type F8_E4M3"),
        (TableError, {"dtype": "Q4_K"}, "no whole number of Q4_K blocks"),
        (TableError, {"row_values": 0}, "1 or more values; got 0"),
        (TableError, {"architecture": "gemma4", "row_values": 160}, "multiple of 256"),
        (SettingError, {"architecture": "gemma5"}, "no architecture 'gemma5'"),
        (SettingError, {"parts": 0}, "1 to 65535 parts; got 0"),
        (SettingError, {"vocab": -1}, "got 1001 and -1"),
        (SettingError, {"rows": 0}, "got 0 and 0"),
        (NeverFits, {"rows": 380}, "380 rows can't hold 16 n-gram heads"),
    ],
)
def test_tables_that_can_t_be(tmp_path: Path, error: type[Exception], options: dict[str, object], message: str):
    with pytest.raises(error, match=message):
        write_gguf(tmp_path / "table.gguf", **{"rows": ROWS, **options})
    assert os.listdir(tmp_path) == []


def test_every_type_of_gguf_can_be_written(tmp_path: Path):
    for dtype in ("F32", "MXFP4", "NVFP4", "TQ1_0", "Q6_K"):
        (path,) = write_gguf(tmp_path / f"{dtype}.gguf", 400, dtype, 512)
        assert find_table(str(path)).row_bytes == TYPES[dtype].row_bytes(512)
