from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from lazyio.errors import TableError
from lazyio.ple.gguf import is_gguf, open_gguf
from lazyio.ple.spec import NgramHash

CONSTANTS = NgramHash((23703573157769, 20109073645365, 8052911324071), (101, 103, 107, 109), (0, 101, 204, 311), 2, 255)


def write(path: Path, tensors: dict[str, int], split: tuple[int, int, int] | None = None, **constants: object) -> None:
    """A file of float tensors [rows, 4] by name and rows, with the split keys no, count and tensors.count."""
    writer = gguf.GGUFWriter(path, "qwen4exp")
    if split is not None:
        writer.add_uint16("split.no", split[0])
        writer.add_uint16("split.count", split[1])
        writer.add_int32("split.tensors.count", split[2])
    for name, value in constants.items():
        key = f"qwen4exp.ple.{name}"
        if isinstance(value, tuple) and isinstance(value[0], int):
            writer.add_key_value(key, list(value), gguf.GGUFValueType.ARRAY, sub_type=gguf.GGUFValueType.UINT64)
        elif isinstance(value, tuple):
            writer.add_array(key, list(value))
        elif isinstance(value, int):
            writer.add_uint32(key, value)
    for name, rows in tensors.items():
        writer.add_tensor(name, np.full((rows, 4), rows, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def part(folder: Path, number: int, count: int = 3) -> Path:
    return folder / f"m-{number:05}-of-{count:05}.gguf"


@pytest.fixture
def split(tmp_path: Path) -> Path:
    write(part(tmp_path, 1), {}, (0, 3, 3))
    write(part(tmp_path, 2), {"a": 2, "b": 3}, (1, 3, 3))
    write(part(tmp_path, 3), {"table": 5}, (2, 3, 3))
    return tmp_path


def refusal(path: Path) -> str:
    with pytest.raises(TableError) as caught:
        open_gguf(str(path))
    return str(caught.value)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_any_part_opens_all(split: Path, number: int) -> None:
    checkpoint = open_gguf(str(part(split, number)))
    assert checkpoint.path == str(part(split, number))
    assert checkpoint.architecture == "qwen4exp"
    assert list(checkpoint.names) == ["a", "b", "table"]
    table = checkpoint.tensor("table")
    assert table.path == str(part(split, 3))
    assert Path(table.path).read_bytes()[table.offset :][:80] == np.full(20, 5, np.float32).tobytes()


def test_a_missing_part_is_named(split: Path) -> None:
    part(split, 3).unlink()
    assert f"1 of the model's 3 parts missing: {part(split, 3)}" in refusal(part(split, 1))


def test_a_part_number_outside_the_count(split: Path) -> None:
    write(part(split, 4), {"c": 1}, (3, 3, 3))
    assert "calls itself part 4 of 3" in refusal(part(split, 4))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ((1, 3, 3), "its split.no is 1 and should be 2"),
        ((2, 4, 3), "its split.count is 4 and should be 3"),
        ((2, 3, 9), "its split.tensors.count is 9 and should be 3"),
        (None, "its split.no is missing and should be 2"),
    ],
)
def test_a_part_of_another_model(split: Path, keys: tuple[int, int, int] | None, message: str) -> None:
    write(part(split, 3), {"table": 5}, keys)
    assert f"{part(split, 3)} is no part of this model: {message}" in refusal(part(split, 1))


def test_a_wrong_total(split: Path) -> None:
    write(part(split, 3), {"table": 5, "extra": 1}, (2, 3, 3))
    assert "have 4 tensors and should have 3" in refusal(part(split, 1))


def test_a_tensor_in_two_parts(split: Path) -> None:
    write(part(split, 3), {"a": 5}, (2, 3, 3))
    assert f"'a' is in two parts: {part(split, 2)} and {part(split, 3)}" in refusal(part(split, 1))


def test_a_part_under_another_name(split: Path) -> None:
    part(split, 2).rename(split / "renamed.gguf")
    assert "is one of 3 parts" in refusal(split / "renamed.gguf")


def test_one_part_of_one_is_a_whole_model(tmp_path: Path) -> None:
    write(part(tmp_path, 1, 1), {"a": 2}, (0, 1, 1))
    assert list(open_gguf(str(part(tmp_path, 1, 1))).names) == ["a"]


def complete() -> dict[str, object]:
    return {
        "layer_multipliers": CONSTANTS.multipliers,
        "head_vocab_sizes": CONSTANTS.head_sizes,
        "head_offsets": CONSTANTS.head_offsets,
        "heads_per_ngram": CONSTANTS.heads_per_ngram,
        "eos_token_id": CONSTANTS.eos,
        "ngram_size": 3,
    }


def test_constants_of_row_ids(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(path, {"table": 5}, **complete())
    assert open_gguf(str(path)).ngram("table") == CONSTANTS
    write(path, {"table": 5})
    assert open_gguf(str(path)).ngram("table") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eos_token_id": None}, "qwen4exp.ple.eos_token_id must be an integer and is missing"),
        ({"head_offsets": None}, "qwen4exp.ple.head_offsets must be a short array of integers and is missing"),
        ({"layer_multipliers": (1.0, 2.0)}, r"must be a short array of integers and is \(1.0, 2.0\)"),
        ({"ngram_size": 4}, "ngram_size is 4, but there are 3 multipliers"),
    ],
)
def test_incomplete_constants(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "m.gguf"
    write(path, {"table": 5}, **(complete() | change))
    with pytest.raises(TableError, match=message):
        open_gguf(str(path)).ngram("table")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("model.gguf", b"", True),  # by its name, and then what is wrong with it is said
        ("sha256-1f", b"GGUF\3\0\0\0", True),
        ("sha256-1f", b"GGU", False),
        ("model.safetensors", b"\2\0\0\0\0\0\0\0{}", False),
    ],
)
def test_what_is_a_gguf_file(tmp_path: Path, name: str, content: bytes, expected: bool) -> None:
    (tmp_path / name).write_bytes(content)
    assert is_gguf(str(tmp_path / name)) == expected
    (tmp_path / "folder.gguf").mkdir()
    assert not is_gguf(str(tmp_path / "folder.gguf"))
