from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lazyio.errors import TableError
from lazyio.fetchers.base import Extent
from lazyio.ple.raw import raw_table


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "rows.bin").write_bytes(bytes(1000))
    return tmp_path / "rows.bin"


def test_as_many_rows_as_fit(path: Path) -> None:
    spec = raw_table(path, row_bytes=90, offset=7, dtype="IQ4_NL")
    assert (spec.rows, spec.row_values, spec.row_bytes, spec.dtype) == (11, 160, 90, "IQ4_NL")
    assert spec.extents == (Extent(str(path), 7, 0, 11),)
    assert (spec.path, spec.tensor, spec.is_ple, spec.ngram) == (str(path), "rows.bin", False, None)


def test_stated_geometry(path: Path) -> None:
    spec = raw_table(str(path), rows=10, row_bytes=100, row_values=50, dtype="F16")
    assert (spec.rows, spec.row_values) == (10, 50)
    assert raw_table(path, row_bytes=1000).rows == 1


@pytest.mark.parametrize(
    ("geometry", "message"),
    [
        ({"row_bytes": 0}, "rows of 0 bytes"),
        ({"row_bytes": 10, "offset": -1}, "from byte -1"),
        ({"row_bytes": 90, "rows": 12}, "room for 11 rows of 90 bytes from byte 0 on; 12 rows"),
        ({"row_bytes": 90, "rows": 0}, "0 rows can't"),
        ({"row_bytes": 90, "rows": -1}, "-1 rows can't"),
        ({"row_bytes": 90, "offset": 2000}, "has 1000 bytes, which is room for 0 rows"),
        ({"row_bytes": 90, "dtype": "IQ9"}, "unknown type 'IQ9'; known are BF16"),
        ({"row_bytes": 91, "dtype": "IQ4_NL"}, "rows.bin: a row of 91 bytes is no whole number of IQ4_NL blocks"),
        ({"row_bytes": 90, "dtype": "IQ4_NL", "row_values": 90}, "90 bytes of IQ4_NL hold 160 values, not 90"),
    ],
)
def test_what_can_not_be(path: Path, geometry: dict[str, int], message: str) -> None:
    with pytest.raises(TableError) as caught:
        raw_table(path, **geometry)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "geometry", [{"row_bytes": 91.0}, {"row_bytes": 9, "offset": "1"}, {"row_bytes": 9, "rows": 1.5}]
)
def test_numbers_that_are_not_whole(path: Path, geometry: dict[str, Any]) -> None:
    name, value = list(geometry.items())[-1]
    with pytest.raises(TypeError, match=f"^{name} must be a whole number, and is {value!r}$"):
        raw_table(path, **geometry)


def test_a_path_of_bytes(path: Path) -> None:
    assert raw_table(os.fsencode(path), row_bytes=9) == raw_table(path, row_bytes=9)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="can't open"):
        raw_table(tmp_path / "none", row_bytes=1)
