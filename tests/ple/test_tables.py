from __future__ import annotations

import json
import os
import struct
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyio.errors import TableError
from lazyio.fetchers.base import Extent
from lazyio.ple.ngram import derive_constants
from lazyio.ple.spec import NgramHash, TableSpec
from lazyio.ple.synthetic import write_gguf
from lazyio.ple.tables import find_table, find_tables

CONSTANTS = NgramHash((23703573157769, 20109073645365, 8052911324071), (11, 13, 17, 19), (0, 11, 24, 41), 2, 255)
CONFIG = {"model_type": "qwen4_exp", "text_config": {"eos_token_id": 255, "ngram_size": 3, "heads_per_ngram": 2}}
GGUF_PLE = "per_layer_token_embd.weight"


def written_gguf(path: Path, architecture: str, *, ngram: NgramHash | None = None, rows: int = 64) -> bytes:
    """A GGUF model of a PLE table, a token embedding, a linear layer and a norm; returns the bytes of the first."""
    writer = gguf.GGUFWriter(path, architecture)
    if ngram is not None:
        ple = f"{architecture}.ple."
        lists = {"layer_multipliers": ngram.multipliers, "head_vocab_sizes": ngram.head_sizes}
        for name, values in (lists | {"head_offsets": ngram.head_offsets}).items():
            kind = gguf.GGUFValueType
            writer.add_key_value(ple + name, list(values), kind.ARRAY, sub_type=kind.UINT64)
        writer.add_uint32(ple + "ngram_size", len(ngram.multipliers))
        writer.add_uint32(ple + "heads_per_ngram", ngram.heads_per_ngram)
        writer.add_uint32(ple + "eos_token_id", ngram.eos)
    table = np.random.default_rng(0).integers(0, 256, (rows, 90), np.uint8)
    writer.add_tensor("token_embd.weight", np.zeros((10, 8), np.float16))
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((8, 8), np.float32))
    writer.add_tensor("blk.0.attn_norm.weight", np.zeros(8, np.float32))
    writer.add_tensor(GGUF_PLE, table, raw_dtype=gguf.GGMLQuantizationType.IQ4_NL)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return table.tobytes()


def stored(spec: TableSpec) -> bytes:
    """All rows, read one extent after the other."""
    parts = []
    for extent in spec.extents:
        content = Path(extent.path).read_bytes()
        parts.append(content[extent.offset : extent.offset + extent.rows * spec.row_bytes])
    return b"".join(parts)


def refusal(path: Path, tensor: str | None = None) -> str:
    with pytest.raises(TableError) as caught:
        find_table(path, tensor)
    return str(caught.value)


@pytest.mark.parametrize("architecture", ["qwen4exp", "gemma3n", "gemma4"])
def test_the_table_of_a_gguf_model(tmp_path: Path, architecture: str) -> None:
    path = tmp_path / "model.gguf"
    ngram = CONSTANTS if architecture == "qwen4exp" else None
    content = written_gguf(path, architecture, ngram=ngram)
    spec = find_table(path)
    assert (spec.tensor, spec.dtype, spec.rows, spec.row_values, spec.row_bytes) == (GGUF_PLE, "IQ4_NL", 64, 160, 90)
    assert (spec.path, spec.architecture, spec.ngram, spec.is_ple) == (str(path), architecture, ngram, True)
    assert stored(spec) == content
    assert find_table(path, "per_layer_token_embd") == spec == find_table(str(path), GGUF_PLE)
    assert [table.tensor for table in find_tables(path)] == [GGUF_PLE, "token_embd.weight"]


def shards(prefix: str, count: int, dtype: str = "BF16") -> dict[str, tuple[str, list[int], bytes]]:
    """Shards of 5 rows of 4 values, each row of another byte."""
    size = {"BF16": 2, "F8_E4M3": 1, "U32": 4}[dtype] * 4
    tensors = {}
    for number in range(count):
        content = b"".join(bytes([5 * number + row]) * size for row in range(5))
        tensors[f"{prefix}.ngram_embedding.shard_{number}.weight"] = (dtype, [5, 4], content)
    return tensors


def constants(prefix: str, ngram: NgramHash = CONSTANTS) -> dict[str, tuple[str, list[int], bytes]]:
    lists = {
        "layer_multipliers": ngram.multipliers,
        "ngram_heads_vocab_sizes": ngram.head_sizes,
        "ngram_heads_offsets": ngram.head_offsets,
    }
    return {f"{prefix}.{name}": ("I64", [len(v)], struct.pack(f"<{len(v)}q", *v)) for name, v in lists.items()}


@pytest.fixture
def write_folder(tmp_path: Path, write_safetensors):
    """Deals tensors to three files in turn, and writes the index and the config."""

    def write(tensors) -> Path:
        files = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
        owner = {name: files[number % 3] for number, name in enumerate(sorted(tensors))}
        for file in files:
            write_safetensors(tmp_path / file, {name: tensors[name] for name in owner if owner[name] == file})
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": owner}))
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        return tmp_path

    return write


@pytest.mark.parametrize(
    "prefix", ["model.language_model.layers.1.ple.ple_embedding", "model.layers.1.ple.ple_embedding"]
)
def test_the_shards_of_qwen4_exp(write_folder, prefix: str) -> None:
    linear = {"model.layers.0.mlp.gate.weight": ("F32", [4, 4], bytes(64))}
    tokens = {"model.embed_tokens.weight": ("BF16", [3, 4], bytes(24))}
    folder = write_folder(shards(prefix, 14) | constants(prefix) | linear | tokens)
    spec = find_table(folder)
    assert spec.tensor == f"{prefix}.ngram_embedding.weight"
    assert (spec.dtype, spec.rows, spec.row_values, spec.row_bytes, spec.scale) == ("BF16", 70, 4, 8, None)
    assert (spec.architecture, spec.ngram, spec.is_ple) == ("qwen4_exp", CONSTANTS, True)
    assert stored(spec) == b"".join(bytes([row]) * 8 for row in range(70))
    assert [table.tensor for table in find_tables(folder)] == [spec.tensor, "model.embed_tokens.weight"]
    assert find_table(folder, f"{prefix}.ngram_embedding") == spec == find_table(folder, spec.tensor)
    assert f"nearest names: {spec.tensor};" in refusal(folder, "ngram_embeding")
    assert f"nearest names: {spec.tensor};" in refusal(folder, "ple_embedding.ngram_embedding.weight")
    one = find_table(folder, f"{prefix}.ngram_embedding.shard_3.weight")
    assert (one.rows, one.is_ple, stored(one)) == (5, False, b"".join(bytes([row]) * 8 for row in range(15, 20)))


def test_an_fp8_table_and_its_scale(write_folder) -> None:
    prefix = "model.layers.1.ple.ple_embedding"
    scale = {f"{prefix}.ngram_embedding.weight_scale": ("BF16", [1], struct.pack("<f", 0.5)[2:])}
    spec = find_table(write_folder(shards(prefix, 12, "F8_E4M3") | constants(prefix) | scale))
    assert (spec.dtype, spec.row_bytes, spec.scale, spec.ngram) == ("F8_E4M3", 4, 0.5, CONSTANTS)


@pytest.mark.parametrize("prefix", ["model.language_model.", "model."])
def test_the_table_of_gemma(tmp_path: Path, write_safetensors, prefix: str) -> None:
    name = prefix + "embed_tokens_per_layer.weight"
    vision = {"model.vision_tower.patch_embed.proj.weight": ("BF16", [2, 2], bytes(8))}
    tokens = {prefix + "embed_tokens.weight": ("BF16", [3, 4], bytes(24))}
    write_safetensors(tmp_path / "model.safetensors", tokens | vision | {name: ("BF16", [3, 8], bytes(range(48)))})
    for path in (tmp_path, tmp_path / "model.safetensors"):
        spec = find_table(path)
        assert (spec.tensor, spec.rows, spec.row_values, spec.ngram, spec.is_ple) == (name, 3, 8, None, True)
        assert stored(spec) == bytes(range(48))
        assert [table.tensor for table in find_tables(path)] == [name, prefix + "embed_tokens.weight"]


def test_files_are_told_by_their_content(tmp_path: Path, write_safetensors) -> None:
    written_gguf(tmp_path / "a", "gemma4")
    write_safetensors(tmp_path / "b", {"embed_tokens_per_layer.weight": ("BF16", [3, 8], bytes(48))})
    (tmp_path / "c").write_bytes(bytes(100))
    (tmp_path / "d").write_bytes(b"")
    assert find_table(tmp_path / "a").dtype == "IQ4_NL"
    assert find_table(tmp_path / "b").extents == (
        Extent(str(tmp_path / "b"), (tmp_path / "b").stat().st_size - 48, 0, 3),
    )
    for name in ("c", "d"):
        assert "neither a GGUF nor a safetensors file; a file of bare rows" in refusal(tmp_path / name)
    assert "can't open" in refusal(tmp_path / "e")


def test_a_name_that_matches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    written_gguf(path, "gemma4")
    message = refusal(path, "per_layer_token_embedding.weight")
    assert "has no tensor 'per_layer_token_embedding.weight'" in message
    assert f"nearest names: {GGUF_PLE};" in message
    assert f"tables found: {GGUF_PLE} (IQ4_NL, 64 rows of 90 bytes), token_embd.weight (F16, 10 rows" in message
    assert "nearest names: blk.0.attn_q.weight, blk.0.attn_norm.weight;" in refusal(path, "blk.0")
    assert "nearest names: none;" in refusal(path, "?")
    assert "has shape [8]" in refusal(path, "blk.0.attn_norm.weight")
    assert find_table(path, "blk.0.attn_q.weight").is_ple is False


def test_no_table_and_several(tmp_path: Path, write_safetensors) -> None:
    path = tmp_path / "model.safetensors"
    norm = ("BF16", [4], bytes(8))
    write_safetensors(path, {"norm.weight": norm})
    assert find_tables(path) == []
    assert "no tables found among its 1 tensors: norm.weight" in refusal(path)
    write_safetensors(path, {"norm.weight": norm, "embed_tokens.weight": ("BF16", [2, 4], bytes(16))})
    assert "tables found: embed_tokens.weight (BF16, 2 rows of 8 bytes)" in refusal(path)
    tables = {f"layers.{n}.ngram_embedding.weight": ("BF16", [2, 4], bytes(16)) for n in (1, 2)}
    write_safetensors(path, tables)
    message = refusal(path)
    assert "several" in message
    assert all(name in message for name in tables)
    assert find_table(path, "layers.2.ngram_embedding").rows == 2


def test_a_token_embedding_that_can_not_be_used_is_left_out(write_folder) -> None:
    tensors = {
        "embed_tokens_per_layer.weight": ("BF16", [3, 8], bytes(48)),
        "embed.weight": ("BF16", [2, 4], bytes(16)),
    }
    folder = write_folder(tensors)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    (folder / index["weight_map"]["embed.weight"]).unlink()
    assert [table.tensor for table in find_tables(folder)] == ["embed_tokens_per_layer.weight"]
    assert "which is missing" in refusal(folder, "embed.weight")


EXL3 = "model.layers.1.ple.ple_embedding.ngram_embedding"


def exl3(bits: int, shards: int | None, rows: int = 63) -> dict[str, tuple[str, list[int], bytes]]:
    """An EXL3 table in so many shards, or in one tensor, with its constants and biases."""
    words = 1 + 10 * bits
    lists = {
        "layer_multipliers": CONSTANTS.multipliers,
        "head_vocab_sizes": CONSTANTS.head_sizes,
        "head_offsets": CONSTANTS.head_offsets,
    }
    tensors = {f"{EXL3}.{name}": ("I64", [len(v)], struct.pack(f"<{len(v)}q", *v)) for name, v in lists.items()}
    tensors[f"{EXL3}.head_bias"] = ("F16", [4, 160], bytes(2 * 4 * 160))
    content = np.random.default_rng(bits).integers(0, 256, rows * words * 2, np.uint8).tobytes()
    names = [f"{EXL3}.trellis"] if shards is None else [f"{EXL3}.shard_{number}.trellis" for number in range(shards)]
    each = rows // len(names)
    for number, name in enumerate(names):
        part = content[number * each * words * 2 : (number + 1) * each * words * 2]
        tensors[name] = ("I16", [each, words], part)
    return tensors


@pytest.mark.parametrize("shards", [None, 1, 3])
@pytest.mark.parametrize("bits", [4, 5, 6])
def test_exl3_tables(write_folder, bits: int, shards: int | None) -> None:
    tensors = exl3(bits, shards)
    folder = write_folder(tensors)
    spec = find_table(folder)
    assert (spec.tensor, spec.dtype, spec.rows, spec.row_values) == (f"{EXL3}.trellis", f"EXL3_K{bits}", 63, 160)
    assert (spec.row_bytes, spec.ngram, spec.is_ple) == (2 + 20 * bits, CONSTANTS, True)
    assert stored(spec) == b"".join(tensor[2] for name, tensor in tensors.items() if name.endswith("trellis"))
    assert spec == find_table(folder, EXL3) == find_table(folder, f"{EXL3}.trellis")
    assert [table.tensor for table in find_tables(folder)] == [spec.tensor]
    assert spec.head_bias is not None
    assert spec.head_bias.rows == 4


def test_an_exl3_table_alone(tmp_path: Path, write_safetensors) -> None:
    path = tmp_path / "ngram_embedding.safetensors"
    write_safetensors(path, {f"{EXL3}.trellis": exl3(4, None)[f"{EXL3}.trellis"]})
    assert (find_table(path).head_bias, find_table(path).ngram) == (None, None)


@pytest.mark.parametrize(
    "dtype_and_shape", [("I16", [63, 40]), ("I16", [63, 91]), ("U16", [63, 41]), ("I16", [2, 3, 41])]
)
def test_exl3_tables_of_other_shapes(write_folder, dtype_and_shape: tuple[str, list[int]]) -> None:
    dtype, shape = dtype_and_shape
    content = bytes(2 * int(np.prod(shape)))
    folder = write_folder(exl3(4, None) | {f"{EXL3}.trellis": (dtype, shape, content)})
    assert f"is {dtype} {shape}, and by its name should be I16 [rows, 1 + 10 * bits" in refusal(folder)


@pytest.mark.parametrize("dtype_and_shape", [("F16", [3, 160]), ("F16", [4, 161]), ("F32", [4, 160]), ("F16", [4])])
def test_other_biases_of_heads(write_folder, dtype_and_shape: tuple[str, list[int]]) -> None:
    dtype, shape = dtype_and_shape
    content = bytes((4 if dtype == "F32" else 2) * int(np.prod(shape)))
    folder = write_folder(exl3(4, None) | {f"{EXL3}.head_bias": (dtype, shape, content)})
    assert f"head_bias is {dtype} {shape} and must be F16 [4, 160]" in refusal(folder)


def test_mlx_tables_are_to_be_interleaved(write_folder) -> None:
    prefix = "model.layers.1.ple.ple_embedding"
    part = f"{prefix}.ngram_embedding.shard_0"
    scales = {f"{part}.scales": ("BF16", [5, 1], bytes(10))}
    biases = {f"{part}.biases": ("BF16", [5, 1], bytes(10))}
    folder = write_folder(shards(prefix, 2, "U32") | scales | biases)
    assert f"python tools/interleave.py {folder} NEW_FOLDER" in refusal(folder)
    assert "MLX's group-quantised layout" in refusal(folder, "nothing")
    folder = write_folder(shards(prefix, 2, "U32") | scales)
    assert "quantised in groups with scales and without biases" in refusal(folder)


def test_interleaved_tables(write_folder) -> None:
    prefix = "model.layers.1.ple.ple_embedding"
    name = f"{prefix}.ngram_embedding.mlx_q4_g32"
    content = np.random.default_rng(0).integers(0, 256, (63, 100), np.uint8).tobytes()
    folder = write_folder(constants(prefix) | {name: ("U8", [63, 100], content)})
    spec = find_table(folder)
    assert (spec.tensor, spec.dtype, spec.row_values, spec.row_bytes) == (name, "MLX_Q4_G32", 160, 100)
    assert (spec.ngram, spec.is_ple) == (CONSTANTS, True)
    assert stored(spec) == content
    assert find_table(folder, f"{prefix}.ngram_embedding") == spec
    folder = write_folder({name: ("U8", [63, 90], bytes(63 * 90))})
    assert "by its name should be U8 [rows, multiple of 20]" in refusal(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_sizes": (12, 13, 17, 19)}, "n-gram head 0 ends at row 12, beyond the start of the next at row 11"),
        ({"head_offsets": (0, 24, 11, 41)}, "n-gram head 1 ends at row 37"),
        ({"head_offsets": (0, 11, 24, 46)}, "64"),
        ({"head_offsets": (0, 11, 24)}, "do not fit each other"),
        ({"heads_per_ngram": 3}, "do not fit each other"),
        ({"head_sizes": (0, 13, 17, 19)}, "sizes of n-gram heads"),
    ],
)
def test_constants_that_can_not_be(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "model.gguf"
    fields = {name: getattr(CONSTANTS, name) for name in NgramHash.__dataclass_fields__}
    written_gguf(path, "qwen4exp", ngram=NgramHash(**(fields | change)))
    assert f"{path}: constants of {GGUF_PLE}" in refusal(path)
    assert message in refusal(path)


def test_the_table_of_another_model_in_place_of_a_part(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    parts = write_gguf(tmp_path / "m.gguf", 20_000, parts=3, sparse=True)
    others = write_gguf(tmp_path / "other" / "m.gguf", 30_000, parts=3, sparse=True)
    assert find_table(parts[0]).rows == 20_000
    others[2].replace(parts[2])
    addressed = sum(derive_constants(20_000).head_sizes)
    assert f"address {addressed} rows, and the table has 30000, more than 4096 beyond them" in refusal(parts[0])


def test_paths_and_names_of_other_types(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    written_gguf(path, "gemma4")
    assert find_table(os.fsencode(path)) == find_table(path)
    assert find_tables(os.fsencode(path)) == find_tables(path)
    with pytest.raises(TypeError, match=r"^tensor must be the name of one, and is 5$"):
        find_table(path, 5)  # type: ignore[arg-type]


def test_offsets_beyond_4_gib(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    written_gguf(path, "gemma4", rows=1)
    header = path.read_bytes()[: -find_table(path).row_bytes]
    rows = 2**26
    # The row count of the last tensor stands before its type and its offset.
    at = header.rindex(struct.pack("<QQ", 160, 1)) + 8
    with path.open("r+b") as file:
        file.seek(at)
        file.write(struct.pack("<Q", rows))
        file.truncate(2**33)
    spec = find_table(path)
    assert (spec.rows, spec.table_bytes) == (rows, rows * 90)
    with path.open("r+b") as file:
        file.truncate(2**32)
    assert "and the file has 4294967296" in refusal(path)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory, write_safetensors) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    written_gguf(folder / "model.gguf", "qwen4exp", ngram=CONSTANTS)
    prefix = "model.layers.1.ple.ple_embedding"
    scale = {f"{prefix}.ngram_embedding.weight_scale": ("F32", [1], struct.pack("<f", 2))}
    write_safetensors(folder / "model.safetensors", shards(prefix, 13, "F8_E4M3") | constants(prefix) | scale)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def search_or_refuse(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with suppress(TableError):
        find_tables(path)
    with suppress(TableError):
        spec = find_table(path)
        assert sum(extent.rows for extent in spec.extents) == spec.rows
        assert all(extent.offset + extent.rows * spec.row_bytes <= len(content) for extent in spec.extents)


@pytest.mark.parametrize(("name", "header_bytes"), [("model.gguf", 700), ("model.safetensors", 2200)])
def test_the_files_to_be_fuzzed_are_sound(fuzzed: Path, name: str, header_bytes: int) -> None:
    assert find_table(fuzzed / name).extents[0].offset > header_bytes


@settings(max_examples=200, deadline=None)
@given(place=st.integers(0, 700), replacement=st.binary(min_size=1, max_size=9))
def test_mutated_gguf_files(fuzzed: Path, place: int, replacement: bytes) -> None:
    content = (fuzzed / "model.gguf").read_bytes()
    search_or_refuse(fuzzed / "mutated.gguf", content[:place] + replacement + content[place + len(replacement) :])


@settings(max_examples=200, deadline=None)
@given(place=st.integers(8, 2200), replacement=st.sampled_from([*b'0123456789[]{},:"_.FBI48', *range(4)]))
def test_mutated_safetensors_files(fuzzed: Path, place: int, replacement: int) -> None:
    content = bytearray((fuzzed / "model.safetensors").read_bytes())
    content[place] = replacement
    search_or_refuse(fuzzed / "mutated.safetensors", bytes(content))
