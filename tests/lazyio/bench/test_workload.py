from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyio.bench import save_trace
from lazyio.bench.workload import UNKNOWN_HEADS, Cut, Workload, from_ids_file, from_text, from_trace, uniform
from lazyio.errors import RowIndexError, TableError
from lazyio.ple.rowids import row_ids_of
from lazyio.ple.spec import TableSpec
from lazyio.ple.synthetic import write_gguf
from lazyio.ple.tables import find_table

GATHERS = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=20), min_size=1, max_size=10)
PLAIN = TableSpec("plain", "rows", "F32", 100, 4, 16, ())


def saved(folder: Path, ids: object) -> str:
    np.save(folder / "these.npy", ids)
    return str(folder / "these.npy")


def test_ids_become_the_rows_of_the_whole_sequence(table: TableSpec, ids_path: Path) -> None:
    # An n-gram that reaches over a cut needs the tokens before it.
    found = from_ids_file(table, str(ids_path), None, 16_384, Cut(64))
    expected = row_ids_of(table)(np.load(ids_path))
    assert np.array_equal(np.concatenate(found.ubatches), expected.reshape(-1))
    assert [len(ids) for ids in found.ubatches] == [64 * 16] * 9 + [24 * 16]
    assert (found.tokens, found.ubatch_tokens, found.rows) == (600, 64, 9600)


def test_as_many_tokens_as_asked(table: TableSpec, ids_path: Path) -> None:
    assert from_ids_file(table, str(ids_path), 10, 16_384, Cut(64)).tokens == 10
    assert from_ids_file(table, str(ids_path), None, 500, Cut(64)).tokens == 500
    with pytest.raises(TableError, match=r"has 600 token ids, and 601 are asked for"):
        from_ids_file(table, str(ids_path), 601, 16_384, Cut(64))


@pytest.mark.parametrize("wrong", [-1, 1 << 40], ids=["negative", "beyond the vocabulary"])
def test_ids_that_the_table_has_no_rows_for(table: TableSpec, tmp_path: Path, wrong: int) -> None:
    with pytest.raises(RowIndexError, match=rf"these\.npy: token id {wrong} is outside"):
        from_ids_file(table, saved(tmp_path, [1, wrong, 2]), None, 100, Cut(64))


@pytest.mark.parametrize(
    ("ids", "said"),
    [([0.5], "float64"), ([[1, 2]], r"shape \[1, 2\]"), (np.empty(0, np.int32), r"shape \[0\]"), ([True], "bool")],
)
def test_files_that_hold_no_ids(table: TableSpec, tmp_path: Path, ids: object, said: str) -> None:
    with pytest.raises(TableError, match=said):
        from_ids_file(table, saved(tmp_path, ids), None, 100, Cut(64))


def test_files_that_are_no_arrays(table: TableSpec, tmp_path: Path) -> None:
    path = tmp_path / "ids.npy"
    for content in (b"", b"1 2 3", b"\x93NUMPY\x01", b"PK\x03\x04"):
        path.write_bytes(content)
        with pytest.raises(
            TableError, match=r"can't read token ids .*: it is no \.npy file of integers, or a damaged one$"
        ):
            from_ids_file(table, str(path), None, 100, Cut(64))
    np.savez(tmp_path / "ids.npz", ids=[1])
    with pytest.raises(TableError, match="it holds an archive"):
        from_ids_file(table, str(tmp_path / "ids.npz"), None, 100, Cut(64))
    with pytest.raises(TableError, match="No such file"):
        from_ids_file(table, str(tmp_path / "absent.npy"), None, 100, Cut(64))


def test_the_text_that_comes_with_the_package(table: TableSpec) -> None:
    found = from_text(table, 16_384, Cut(2048))
    assert found is not None
    assert (found.tokens, found.rows, len(found.ubatches)) == (16_384, 16 * 16_384, 8)
    assert found.unique_rows < found.rows
    assert from_text(table, 16_385, Cut(2048)) is None


def test_the_text_does_not_suit_a_small_vocabulary(tmp_path: Path) -> None:
    (path,) = write_gguf(tmp_path / "gemma.gguf", 1000, "Q8_0", 256, architecture="gemma4")
    spec = find_table(path)
    assert from_text(spec, 100, Cut(64)) is None
    found = uniform(spec, 100, Cut(64), 0)
    assert (found.rows, "token ids" in found.source) == (100, True)


def test_random_tokens_follow_the_seed(table: TableSpec) -> None:
    one, same, other = (uniform(table, 50, Cut(20), seed) for seed in (1, 1, 2))
    assert all(map(np.array_equal, one.ubatches, same.ubatches))
    assert not np.array_equal(one.ubatches[0], other.ubatches[0])
    assert "seed 1" in one.source


def test_a_table_of_which_nothing_is_known_gets_random_rows() -> None:
    assert from_text(PLAIN, 10, Cut(4)) is None
    found = uniform(PLAIN, 10, Cut(4), 0)
    assert [len(ids) for ids in found.ubatches] == [4 * UNKNOWN_HEADS, 4 * UNKNOWN_HEADS, 2 * UNKNOWN_HEADS]
    assert "not known" in found.source


def test_a_hashed_table_without_constants_gets_random_rows(table: TableSpec) -> None:
    spec = replace(table, ngram=None)
    assert from_text(spec, 10, Cut(4)) is None
    found = uniform(spec, 10, Cut(4), 0)
    assert found.rows == 10 * UNKNOWN_HEADS
    assert "not known" in found.source


def test_constants_of_another_table_are_no_reason_for_random_rows(table: TableSpec) -> None:
    with pytest.raises(TableError, match="address"):
        from_text(replace(table, rows=100), 10, Cut(4))


@given(GATHERS, st.integers(1, 30), st.integers(0, 300))
def test_groups_are_all_ubatches_in_order(gathers: list[list[int]], row_bytes: int, limit_bytes: int) -> None:
    workload = Workload(tuple(np.array(ids) for ids in gathers), "", None, None)
    groups = list(workload.groups(row_bytes, limit_bytes))
    assert [number for group in groups for number in range(group.start, group.stop)] == list(range(len(gathers)))
    for group in groups:
        ids = gathers[group]
        assert len(ids) == 1 or sum(map(len, ids)) * row_bytes <= limit_bytes


@given(GATHERS)
def test_unique_rows_are_counted_a_gather(gathers: list[list[int]]) -> None:
    workload = Workload(tuple(np.array(ids) for ids in gathers), "", None, None)
    assert workload.unique_rows == sum(len(set(ids)) for ids in gathers)


# --- traces ----------------------------------------------------------------------------------------------------------


@given(gathers=GATHERS)
def test_a_trace_gives_back_what_was_saved(tmp_path_factory: pytest.TempPathFactory, gathers: list[list[int]]) -> None:
    path = tmp_path_factory.getbasetemp() / "trace.npz"
    save_trace(path, [np.array(ids, np.int32) for ids in gathers])
    found = from_trace(PLAIN, str(path), None, None, False)
    assert [ids.tolist() for ids in found.ubatches] == gathers
    assert (found.tokens, found.ubatch_tokens) == (None, None)


def test_gathers_of_any_shape_can_be_saved_and_empty_ones_fall_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    save_trace(path, [np.array([[1, 2], [3, 4]]), np.empty(0, np.int64), np.array([5])])
    assert np.load(path)["lengths"].tolist() == [4, 0, 1]
    found = from_trace(PLAIN, str(path), None, None, False)
    assert [ids.tolist() for ids in found.ubatches] == [[1, 2, 3, 4], [5]]


def test_steps_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    save_trace(path, [np.array([number]) for number in range(5)])
    assert len(from_trace(PLAIN, str(path), 3, 500, True).ubatches) == 3
    assert len(from_trace(PLAIN, str(path), None, 2, True).ubatches) == 2
    assert len(from_trace(PLAIN, str(path), None, 500, True).ubatches) == 5
    with pytest.raises(TableError, match="has 5 gathers, and 6 are asked for"):
        from_trace(PLAIN, str(path), 6, 500, True)


@pytest.mark.parametrize("wrong", [-1, 100])
def test_a_trace_of_another_table(tmp_path: Path, wrong: int) -> None:
    save_trace(tmp_path / "trace.npz", [np.array([3, wrong])])
    with pytest.raises(RowIndexError, match=f"row {wrong}, and rows has rows 0 to 99"):
        from_trace(PLAIN, str(tmp_path / "trace.npz"), None, None, False)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"row_ids": [1, 2]}, "lengths"),
        ({"row_ids": [1, 2], "lengths": [3]}, "has 2 row ids, and its lengths add up to 3"),
        ({"row_ids": [1, 2], "lengths": [3, -1]}, "add up to 2"),
        ({"row_ids": [], "lengths": []}, "integers"),
        ({"row_ids": [1.5], "lengths": [1]}, "integers"),
        ({"row_ids": [[1]], "lengths": [1]}, "one dimension"),
    ],
)
def test_files_that_are_no_traces(tmp_path: Path, content: dict[str, object], said: str) -> None:
    np.savez(tmp_path / "trace.npz", **content)  # type: ignore[arg-type]
    with pytest.raises(TableError, match=said):
        from_trace(PLAIN, str(tmp_path / "trace.npz"), None, None, False)


def test_a_trace_that_can_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "trace.npz").write_bytes(b"nothing")
    np.save(tmp_path / "ids.npy", [1, 2])
    said = {"trace.npz": "no such file, or a damaged one", "ids.npy": "no such file", "absent.npz": "No such file or"}
    for name, reason in said.items():
        with pytest.raises(TableError, match=f"can't read a trace .* row_ids and lengths: .*{reason}"):
            from_trace(PLAIN, str(tmp_path / name), None, None, False)
