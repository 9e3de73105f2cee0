from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from lazyio.errors import TableError
from lazyio.ple import safetensors_header
from lazyio.ple.safetensors_header import read_json, read_safetensors


def framed(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(begin: int, end: int, shape: list[int], dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(TableError) as caught:
        read_safetensors(str(path))
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_agrees_with_the_safetensors_package(path: Path) -> None:
    random = np.random.default_rng(0)
    arrays = {
        "floats": random.standard_normal((7, 5), np.float32),
        "halves": random.standard_normal((3, 5)).astype(np.float16),
        "integers": random.integers(-(2**62), 2**62, 16),
        "bytes": random.integers(0, 256, (2, 3, 4), np.uint8),
    }
    safetensors.numpy.save_file(arrays, path, metadata={"format": "np"})
    content = path.read_bytes()
    tensors = read_safetensors(str(path))
    with safe_open(path, framework="numpy") as theirs:
        assert tensors.keys() == set(theirs.keys())
        for name, tensor in tensors.items():
            assert tensor.dtype == theirs.get_slice(name).get_dtype()
            assert list(tensor.shape) == theirs.get_slice(name).get_shape()
            stored = content[tensor.offset : tensor.offset + (tensor.size_bytes or 0)]
            assert stored == theirs.get_tensor(name).tobytes()


def test_gaps_and_unknown_types_are_read(path: Path) -> None:
    path.write_bytes(framed({"a": entry(10, 16, [2, 3]), "b": entry(0, 5, [2, 5], "NEW4")}, bytes(20)))
    tensors = read_safetensors(str(path))
    start = path.stat().st_size - 20
    assert (tensors["a"].offset, tensors["a"].size_bytes) == (start + 10, 6)
    assert (tensors["b"].dtype, tensors["b"].size_bytes) == ("NEW4", 5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "bytes 0 to 8 are needed and it has 0"),
        ((2**63).to_bytes(8, "little") + b"{}", "should take 9223372036854775808 bytes, the file has 10"),
        ((3).to_bytes(8, "little") + b"{}", "should take 3 bytes"),
        (framed(b"{'a'}"), "no readable JSON"),
        (framed(b"\xff\xfe"), "no readable JSON"),
        (framed(b"[" * 100_000), "no readable JSON"),
        (framed(b'{"a": ' + b"9" * 5000 + b"}"), "no readable JSON"),
        (framed(b'{"a": 1, "a": 2}'), "twice"),
        (framed([1]), "is no object"),
        (framed({"a": 1}), "no proper dtype, shape and data_offsets of tensor 'a'"),
        (framed({"a": entry(0, 4, [2, -2])}), "no proper"),
        (framed({"a": entry(0, 4, [2**63])}), "no proper"),
        (framed({"a": entry(0, 4, [1] * 17)}), "no proper"),
        (framed({"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}), "no proper"),
        (framed({"a": {"dtype": "U8", "shape": [1.0], "data_offsets": [0, 1]}}), "no proper"),
        (framed({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0]}}), "no proper"),
        (framed({"a": {"dtype": 8, "shape": [1], "data_offsets": [0, 1]}}), "no proper"),
        (framed({"a": entry(8, 4, [2, 2])}, bytes(8)), "'a' ends at byte 4, before it starts at 8"),
        (framed({"a": entry(0, 7, [2, 2], "F16")}, bytes(8)), r"'a' of F16 [2, 2] needs 8 bytes and has 7"),
        (framed({"a": entry(0, 4, [4]), "b": entry(3, 7, [4])}, bytes(8)), "'a' and 'b' overlap"),
        (framed({"a": entry(5, 9, [4])}, bytes(8)), "cut short"),
    ],
)
def test_damage_is_named(path: Path, content: bytes, message: str) -> None:
    assert message in refusal(path, content)


def test_headers_beyond_the_limit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_header, "LONGEST_JSON_BYTES", 50)
    assert "a header at most 50" in refusal(path, framed({"a": entry(0, 4, [4])}, bytes(4)))
    path.write_bytes(b"{" + b" " * 60 + b"}")
    with pytest.raises(TableError, match="has 62 bytes, more than the 50"):
        read_json(str(path))


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "model.safetensors"


def read_or_refuse(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        tensors = read_safetensors(str(path))
    except TableError:
        return
    assert all(tensor.offset + (tensor.size_bytes or 0) <= len(content) for tensor in tensors.values())


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=100), header=st.binary(max_size=100))
def test_random_bytes(fuzzed: Path, content: bytes, header: bytes) -> None:
    read_or_refuse(fuzzed, content)
    read_or_refuse(fuzzed, framed(header, content))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["U8", "F32", "", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "a", "__metadata__"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(header=JSON)
def test_random_json(fuzzed: Path, header: object) -> None:
    read_or_refuse(fuzzed, framed(header, bytes(16)))


@settings(max_examples=150, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), replacement=st.binary(min_size=1, max_size=9), cut=st.integers(0, 30))
def test_mutated_headers(fuzzed: Path, place: float, replacement: bytes, cut: int) -> None:
    content = bytearray(framed({"a": entry(0, 8, [2, 4]), "b": entry(8, 16, [2, 2], "F16")}, bytes(16)))
    at = int(place * (len(content) - 16))
    content[at : at + len(replacement)] = replacement
    read_or_refuse(fuzzed, bytes(content[: len(content) - cut]))
