"""Edited rows take the place of stored ones, however these are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyio import LazyTable, TableError, TableSpec, open_table, overlay
from lazyio.fetchers.conformance import MadeTable
from lazyio.gate import TableStats
from lazyio.overlay import EditedRows, OverlaidRows, read_overlay

EDITED = {17: b"\xab" * 90, 4200: b"\x01" * 90, 0: bytes(range(90)), 2500: bytearray(90)}


def edited(content: np.ndarray, overlay: dict[int, Any] = EDITED) -> np.ndarray:
    content = content.copy()
    for row, packed in overlay.items():
        content[row] = np.frombuffer(packed, np.uint8)
    return content


def save(path: Path, overlay: dict[int, Any] = EDITED) -> Path:
    rows = np.array([np.frombuffer(packed, np.uint8) for packed in overlay.values()])
    np.savez(path, ids=np.array(list(overlay), np.int64), rows=rows)
    return path


def refusal(given: Any, spec: TableSpec) -> str:
    with pytest.raises(TableError) as caught:
        open_table(spec, overlay=given)
    return str(caught.value)


@pytest.mark.parametrize("shape", [(4,), (16,), (40, 50), (3, 1), (0,)])
def test_edited_rows_are_served_in_every_mode(open_way: Any, spec: TableSpec, made: MadeTable, shape: Any) -> None:
    wanted = edited(made.content)
    ids = np.random.default_rng(0).integers(0, len(wanted), shape)
    ids.reshape(-1)[: len(EDITED)] = list(EDITED)[: ids.size]
    with open_way(spec, overlay=EDITED) as table:
        for _ in range(2):  # cold, then from what is mapped
            np.testing.assert_array_equal(table.gather(ids), wanted[ids])
            rows, inverse = table.gather_unique(ids)
            np.testing.assert_array_equal(rows, wanted[np.unique(ids)])
            np.testing.assert_array_equal(rows[inverse], wanted[ids])
        np.testing.assert_array_equal(table.gather(ids.T[::-1]), wanted[ids.T[::-1]])
        out = np.empty((*shape, 90), np.uint8)
        assert table.gather(ids.astype(np.uint16), out) is out
        np.testing.assert_array_equal(out, wanted[ids])


def test_edited_rows_are_read_ahead_too(spec: TableSpec, made: MadeTable) -> None:
    ids = [2500, 3, 17, 17]
    with open_table(spec, mode="on", overlay=EDITED) as table:
        rows, inverse = table.prefetch(ids).result()
        np.testing.assert_array_equal(rows[inverse], edited(made.content)[ids])


def test_an_overlay_from_a_file(tmp_path: Path, spec: TableSpec, made: MadeTable) -> None:
    path = save(tmp_path / "edited.npz")
    for form in (path, str(path)):
        with open_table(spec, mode="on", overlay=form) as table:
            np.testing.assert_array_equal(table.gather(np.arange(4201)), edited(made.content))


def test_an_empty_overlay_costs_nothing(tmp_path: Path, spec: TableSpec) -> None:
    np.savez(tmp_path / "none.npz", ids=np.empty(0, np.int64), rows=np.empty((0, 90), np.uint8))
    for nothing in (None, {}, tmp_path / "none.npz"):
        with open_table(spec, mode="on", overlay=nothing) as table:
            assert not isinstance(table._rows, OverlaidRows)


def test_the_files_stay_as_they_are(spec: TableSpec, made: MadeTable) -> None:
    with open_table(spec, mode="on", overlay=EDITED) as table:
        table.gather(list(EDITED))[:] = 7
        np.testing.assert_array_equal(table.gather(list(EDITED)), edited(made.content)[list(EDITED)])
    with open_table(spec, mode="on") as table:
        np.testing.assert_array_equal(table.gather(list(EDITED)), made.content[list(EDITED)])


class Under:
    """Rows of one byte, which is their id."""

    def gather(self, asked: np.ndarray, rows: np.ndarray, stats: TableStats) -> None:
        rows[:, 0] = asked.reshape(-1)

    read = gather

    def close(self) -> None:
        pass


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.integers(0, 99), st.integers(100, 255), min_size=1), st.lists(st.integers(0, 99)))
def test_any_overlay_and_any_ids(changes: dict[int, int], asked: list[int]) -> None:
    ids = np.array(sorted(changes), np.int64)
    rows = np.array([[changes[row]] for row in ids.tolist()], np.uint8)
    out = np.empty((len(asked), 1), np.uint8)
    OverlaidRows(Under(), EditedRows(ids, rows)).gather(np.array(asked, np.int64), out, TableStats())
    assert out[:, 0].tolist() == [changes.get(row, row) for row in asked]


def test_long_requests_are_looked_up_in_parts(monkeypatch: pytest.MonkeyPatch, spec: TableSpec, made: Any) -> None:
    monkeypatch.setattr(overlay, "_IDS_AT_ONCE", 7)
    with open_table(spec, mode="on", overlay=EDITED) as table:
        np.testing.assert_array_equal(table.gather(np.arange(4201)), edited(made.content))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({4201: bytes(90)}, "replaces row 4201 of rows, which has rows 0 to 4200"),
        ({-1: bytes(90)}, "replaces row -1 of rows"),
        ({5: bytes(89)}, "row 5 of the overlay has 89 bytes, and rows of rows have 90"),
        ({5: b""}, "row 5 of the overlay has 0 bytes"),
        ({5: "x" * 90}, "row 5 of the overlay is a str, not bytes"),
        ({5: 90}, "row 5 of the overlay is a int, not bytes"),
        ({5: None}, "row 5 of the overlay is a NoneType, not bytes"),
        ({"5": bytes(90)}, "has the row id '5'"),
        ({1.5: bytes(90)}, "has the row id 1.5"),
        ({2**63: bytes(90)}, "has the row id 9223372036854775808"),
    ],
)
def test_overlays_that_can_not_be(spec: TableSpec, given: Any, message: str) -> None:
    assert message in refusal(given, spec)


@pytest.mark.parametrize(
    ("ids", "rows", "message"),
    [
        (np.array([3, 9, 3]), np.zeros((3, 90), np.uint8), "has row 3 twice"),
        (np.array([3, 4201]), np.zeros((2, 90), np.uint8), "replaces row 4201"),
        (np.array([3]), np.zeros((1, 89), np.uint8), "rows uint8 [1, 89]; an overlay of rows has"),
        (np.array([3]), np.zeros((2, 90), np.uint8), "ids int64 [1] and rows uint8 [2, 90]"),
        (np.array([3]), np.zeros((1, 90), np.int8), "rows int8 [1, 90]"),
        (np.array([3], np.int32), np.zeros((1, 90), np.uint8), "ids int32 [1]"),
        (np.array([3.0]), np.zeros((1, 90), np.uint8), "ids float64 [1]"),
        (np.array(3), np.zeros((1, 90), np.uint8), "ids int64 []"),
        (np.array([object()]), np.zeros((1, 90), np.uint8), "can't be read as an overlay"),
    ],
)
def test_files_that_are_no_overlay(tmp_path: Path, spec: TableSpec, ids: Any, rows: Any, message: str) -> None:
    path = tmp_path / "overlay.npz"
    np.savez(path, ids=ids, rows=rows)
    told = refusal(path, spec)
    assert message in told
    assert str(path) in told


def test_files_that_can_not_be_read(tmp_path: Path, spec: TableSpec) -> None:
    whole = save(tmp_path / "whole.npz").read_bytes()
    np.savez(tmp_path / "other.npz", ids=np.arange(3))
    np.save(tmp_path / "array.npy", np.arange(3))
    (tmp_path / "short.npz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.npz").write_text("rows")
    (tmp_path / "empty.npz").touch()
    damaged = bytearray(whole)
    damaged[60:200] = bytes(140)
    (tmp_path / "damaged.npz").write_bytes(damaged)
    for name in ("other.npz", "array.npy", "short.npz", "text.npz", "empty.npz", "damaged.npz", "missing.npz", "."):
        told = refusal(tmp_path / name, spec)
        assert "can't be read as an overlay" in told
        assert str(tmp_path / name) in told
        assert "pickle" not in told
    for name in ("text.npz", "empty.npz", "other.npz", "array.npy"):
        assert refusal(tmp_path / name, spec).endswith("row_bytes]: it is no such file, or a damaged one")
    assert refusal(tmp_path / "missing.npz", spec).endswith("No such file or directory")


def test_a_refused_overlay_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch, spec: TableSpec) -> None:
    monkeypatch.setattr(LazyTable, "__init__", lambda *_, **__: pytest.fail("opened"))
    refusal({-1: bytes(90)}, spec)


def test_rows_are_kept_in_ascending_order(spec: TableSpec) -> None:
    kept = read_overlay(EDITED, spec)
    assert kept is not None
    assert kept.ids.tolist() == sorted(EDITED)
    assert bytes(kept.rows[1]) == EDITED[17]
