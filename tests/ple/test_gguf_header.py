from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyio.errors import TableError
from lazyio.ple import gguf_header
from lazyio.ple.checkpoint import StoredTensor
from lazyio.ple.gguf_header import read_gguf, read_values

U8, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = 0, 4, 5, 6, 7, 8, 9, 10, 11, 12
TYPE_F32, TYPE_Q8_0, TYPE_UNKNOWN = 0, 8, 999

Entry = tuple[str, Sequence[int], int, int]


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str) -> bytes:
    return u64(len(value.encode())) + value.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + u32(kind) + value


def array(kind: int, *items: bytes) -> bytes:
    return u32(kind) + u64(len(items)) + b"".join(items)


def gguf_bytes(keys: Sequence[bytes] = (), tensors: Sequence[Entry] = (), data: bytes = b"", version: int = 3) -> bytes:
    """A little-endian file with an alignment of 32."""
    header = b"GGUF" + u32(version) + u64(len(tensors)) + u64(len(keys)) + b"".join(keys)
    for name, dimensions, kind, offset in tensors:
        header += text(name) + u32(len(dimensions)) + b"".join(map(u64, dimensions)) + u32(kind) + u64(offset)
    return header + bytes(-len(header) % 32) + data


def sample(long: int = 2000) -> bytes:
    """A file with a value of every kind and two tensors, the second of quantised rows."""
    keys = [
        key("general.architecture", STRING, text("gemma4")),
        key("long string", STRING, text("x" * long)),
        key("u8", U8, b"\xff"),
        key("i32", I32, struct.pack("<i", -5)),
        key("f32", F32, struct.pack("<f", 0.5)),
        key("flag", BOOL, b"\1"),
        key("u64", U64, u64(2**64 - 1)),
        key("i64", I64, struct.pack("<q", -(2**63))),
        key("f64", F64, struct.pack("<d", 1e300)),
        key("strings", ARRAY, array(STRING, *(text("ab" * n) for n in range(40)))),
        key("short", ARRAY, array(U64, u64(23703573157769), u64(2**63 + 1))),
        key("long", ARRAY, array(U32, *map(u32, range(long)))),
        key("nested", ARRAY, array(ARRAY, array(STRING, text("a"), text("")), array(U8, b"\1", b"\2", b"\3"))),
    ]
    tensors = [("a", (3, 2), TYPE_F32, 0), ("b", (32, 2), TYPE_Q8_0, 32)]
    return gguf_bytes(keys, tensors, bytes(32 + 68))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(TableError) as caught:
        read_gguf(str(path))
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("window", [8, 13, 64, 1 << 18])
def test_values_and_tensors(path: Path, monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    monkeypatch.setattr(gguf_header, "_WINDOW_BYTES", window)
    content = sample()
    path.write_bytes(content)
    file = read_gguf(str(path))
    assert file.metadata == {
        "general.architecture": "gemma4",
        "u8": 255,
        "i32": -5,
        "f32": 0.5,
        "flag": True,
        "u64": 2**64 - 1,
        "i64": -(2**63),
        "f64": 1e300,
        "short": (23703573157769, 2**63 + 1),
    }
    first, second = file.tensors
    data_offset = len(content) - 100
    assert first == StoredTensor("a", "F32", (2, 3), str(path), data_offset, 24)
    assert second == StoredTensor("b", "Q8_0", (2, 32), str(path), data_offset + 32, 68)


@pytest.mark.parametrize("alignment", [32, 64, 8])
def test_agrees_with_the_gguf_package(path: Path, alignment: int) -> None:
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "qwen4exp")
    writer.add_custom_alignment(alignment)
    writer.add_token_list([f"token {n}" for n in range(500)])
    kinds = gguf.GGMLQuantizationType
    writer.add_tensor("floats", random.standard_normal((7, 5), np.float32))
    writer.add_tensor("halves", random.standard_normal((3, 5)).astype(np.float16))
    for name, row_bytes, kind in (("q8", 170, kinds.Q8_0), ("iq4", 90, kinds.IQ4_NL), ("k", 144, kinds.Q4_K)):
        writer.add_tensor(name, random.integers(0, 256, (11, row_bytes), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    content = path.read_bytes()
    ours = {tensor.name: tensor for tensor in read_gguf(str(path)).tensors}
    theirs = gguf.GGUFReader(path).tensors
    assert len(ours) == len(theirs) == 5
    for tensor in theirs:
        mine = ours[tensor.name]
        assert (mine.offset, mine.size_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert mine.dtype == tensor.tensor_type.name
        assert mine.shape == tuple(int(length) for length in tensor.shape[::-1])
        assert content[mine.offset : mine.offset + (mine.size_bytes or 0)] == tensor.data.tobytes()


def test_a_long_vocabulary_takes_no_memory(path: Path) -> None:
    words = key("tokenizer.ggml.tokens", ARRAY, array(STRING, *[text("word" * 25)] * 20_000))
    path.write_bytes(gguf_bytes([words], [("a", (3, 2), TYPE_F32, 0)], bytes(32)))
    tracemalloc.start()
    try:
        assert [tensor.name for tensor in read_gguf(str(path)).tensors] == ["a"]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_every_truncation_is_refused(path: Path) -> None:
    content = sample()
    for length in (*range(200), *range(200, len(content), 37), len(content) - 1):
        refusal(path, content[:length])


def test_other_files_and_versions(path: Path) -> None:
    assert "not a GGUF file" in refusal(path, b"")
    assert "not a GGUF file" in refusal(path, b"GGML" + bytes(60))
    assert "big-endian" in refusal(path, b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    assert "version 1;" in refusal(path, gguf_bytes(version=1))
    assert "version 4;" in refusal(path, gguf_bytes(version=4))
    path.write_bytes(gguf_bytes(version=2))
    assert read_gguf(str(path)).tensors == ()


@pytest.mark.parametrize(
    ("keys", "tensors", "message"),
    [
        ([key("a", 13, b"")], [], "key 'a' has the unknown value type 13"),
        ([key("a", ARRAY, array(13, b"0" * 8))], [], "array of the unknown value type 13"),
        ([key("a", ARRAY, array(ARRAY, *[b""] * 8) + (u32(ARRAY) + u64(8)) * 20)], [], "unknown value type 9"),
        ([key("a", ARRAY, u32(STRING) + u64(2**63))], [], "cut short"),
        ([key("a", ARRAY, u32(U64) + u64(2**61))], [], "cut short"),
        ([key("a", STRING, u64(2**63))], [], "cut short"),
        ([key("a", ARRAY, array(STRING, text("b"), u64(2**64 - 1)))], [], "cut short"),
        ([u64(70_000) + bytes(70_000)], [], "a key at byte 32 has 70000 bytes, more than 65535"),
        ([key("a", U8, b"1"), key("a", U8, b"2")], [], "the key 'a' twice"),
        ([key("general.alignment", U32, u32(0))], [], "must be a positive integer and is 0"),
        ([key("general.alignment", STRING, text("32"))], [], "must be a positive integer and is '32'"),
        ([], [("t", (1,) * 5, TYPE_F32, 0)], "'t' has 5 dimensions"),
        ([], [("t", (1, 1), TYPE_F32, 0), ("t", (1, 1), TYPE_F32, 32)], "two tensors of one name"),
        ([], [("t", (8, 4), TYPE_F32, 0), ("u", (8, 4), TYPE_F32, 96)], "overlap"),
        ([], [("t", (2**40, 2**40), TYPE_F32, 0)], "cut short"),
        ([], [("t", (33, 2), TYPE_Q8_0, 0)], "'t': a row of 33 values is no whole number of Q8_0 blocks"),
        ([], [("t", (8, 4), TYPE_F32, 2**64 - 32)], "cut short"),
    ],
)
def test_damage_is_named(path: Path, keys: Sequence[bytes], tensors: Sequence[Entry], message: str) -> None:
    assert message in refusal(path, gguf_bytes(keys, tensors, bytes(256)))


def test_long_values_are_read_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(sample())
    wanted = {"long string", "u8", "strings", "short", "long", "absent"}
    for window in (gguf_header._WINDOW_BYTES, 7):  # a string may begin and end anywhere in a window
        monkeypatch.setattr(gguf_header, "_WINDOW_BYTES", window)
        values = read_values(str(path), wanted)
        assert values.keys() == wanted - {"absent"}
        assert (values["long string"], values["u8"]) == ("x" * 2000, 255)
        assert values["strings"] == ["ab" * n for n in range(40)]
        assert isinstance(values["long"], np.ndarray)
        assert (values["long"].dtype, values["long"].tolist()) == (np.uint32, list(range(2000)))
        assert np.array_equal(values["short"], np.array([23703573157769, 2**63 + 1], np.uint64))


def test_a_long_value_that_is_none_is_refused(path: Path) -> None:
    path.write_bytes(sample())
    with pytest.raises(TableError, match="'nested' must be a number, a string or an array"):
        read_values(str(path), {"nested"})
    keys = [key("strings", ARRAY, u32(STRING) + u64(2) + text("a") + u64(10**12))]
    path.write_bytes(gguf_bytes(keys))
    with pytest.raises(TableError, match="cut short or damaged"):
        read_values(str(path), {"strings"})
    path.write_bytes(gguf_bytes([key("strings", ARRAY, u32(STRING) + u64(2**62))]))
    with pytest.raises(TableError, match="cut short or damaged"):
        read_values(str(path), {"strings"})


def test_a_range_past_the_end_is_refused_with_its_numbers(path: Path) -> None:
    content = gguf_bytes([], [("t", (8, 4), TYPE_F32, 32)], bytes(159))
    message = refusal(path, content)
    start = len(content) - 159 + 32
    assert f"'t' takes bytes {start} to {start + 128}, and the file has {len(content)}" in message


def test_counts_no_file_can_hold_are_refused_at_once(path: Path) -> None:
    assert "cut short" in refusal(path, b"GGUF" + u32(3) + u64(2**64 - 1) + u64(0) + bytes(64))
    assert "cut short" in refusal(path, b"GGUF" + u32(3) + u64(0) + u64(2**64 - 1) + bytes(64))


def test_an_endless_header_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_header, "_LONGEST_HEADER_BYTES", 100)
    monkeypatch.setattr(gguf_header, "_WINDOW_BYTES", 8)
    assert "header is longer than 100 bytes" in refusal(path, sample())


def unknown_sizes(path: Path, tensors: Sequence[Entry], data_bytes: int) -> list[int | None]:
    path.write_bytes(gguf_bytes([], tensors, bytes(data_bytes)))
    return [tensor.size_bytes for tensor in read_gguf(str(path)).tensors if tensor.dtype == "type-999"]


def test_the_room_of_an_unknown_type_tells_its_size(path: Path) -> None:
    # 100 rows of 21 bytes, then 12 bytes up to the next multiple of 32.
    rows: Entry = ("t", (40, 100), TYPE_UNKNOWN, 0)
    assert unknown_sizes(path, [rows, ("u", (8, 4), TYPE_F32, 2112)], 2112 + 128) == [2100]
    assert unknown_sizes(path, [rows], 2112) == [2100]
    assert unknown_sizes(path, [rows], 2100) == [2100]


@pytest.mark.parametrize(
    ("tensors", "data_bytes"),
    [
        ([("t", (40, 31), TYPE_UNKNOWN, 0)], 672),  # fewer rows than bytes of alignment: several widths fit
        ([("t", (40, 100), TYPE_UNKNOWN, 0)], 2150),  # 50 bytes more than whole rows
        ([("t", (40, 100), TYPE_UNKNOWN, 0)], 50),  # less than a byte a row
        ([("t", (40, 0), TYPE_UNKNOWN, 0)], 64),
        # A gap elsewhere: nothing says that there is none after this tensor.
        ([("u", (8, 1), TYPE_F32, 0), ("t", (40, 100), TYPE_UNKNOWN, 96)], 96 + 2112),
    ],
)
def test_otherwise_it_stays_unknown(path: Path, tensors: Sequence[Entry], data_bytes: int) -> None:
    assert unknown_sizes(path, tensors, data_bytes) == [None]


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "model.gguf"


def read_or_refuse(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        file = read_gguf(str(path))
    except TableError:
        return
    assert all(tensor.offset + (tensor.size_bytes or 0) <= len(content) for tensor in file.tensors)


@settings(max_examples=150, deadline=None)
@given(content=st.binary(max_size=200), counts=st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_random_bytes(fuzzed: Path, content: bytes, counts: tuple[int, int]) -> None:
    read_or_refuse(fuzzed, content)
    read_or_refuse(fuzzed, b"GGUF" + u32(3) + u64(counts[0]) + u64(counts[1]) + content)


PLACES = st.floats(0, 1, exclude_max=True)


@settings(max_examples=250, deadline=None)
@given(
    edits=st.lists(st.tuples(PLACES, st.binary(min_size=1, max_size=9)), min_size=1, max_size=3),
    cut=st.integers(0, 300),
)
def test_mutated_headers(fuzzed: Path, edits: list[tuple[float, bytes]], cut: int) -> None:
    content = bytearray(sample(long=3))
    for place, replacement in edits:
        at = int(place * len(content))
        content[at : at + len(replacement)] = replacement
    read_or_refuse(fuzzed, bytes(content[: len(content) - cut]))
