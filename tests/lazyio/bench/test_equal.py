from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lazyio.bench.equal import Verifier, read_row
from lazyio.bench.workload import Cut, Workload, uniform
from lazyio.errors import RunsDifferError
from lazyio.fetchers.base import Bytes
from lazyio.ple.spec import TableSpec
from lazyio.ple.synthetic import expected_rows


@pytest.fixture
def workload(table: TableSpec) -> Workload:
    return uniform(table, 100, Cut(50), 0)


def rows_of(workload: Workload, ubatch: int) -> Bytes:
    return expected_rows(workload.ubatches[ubatch], "IQ4_NL", 160)


def test_true_rows_pass(table: TableSpec, workload: Workload) -> None:
    verifier = Verifier(table, workload, 0)
    for arm in ("on", "uring", "on"):
        for ubatch in range(2):
            verifier.check(arm, ubatch, rows_of(workload, ubatch))


def test_one_changed_byte_is_found_in_whichever_row(table: TableSpec, workload: Workload) -> None:
    verifier = Verifier(table, workload, 0)
    verifier.check("on", 1, rows_of(workload, 1))
    for row in (0, 399, 799):
        rows = rows_of(workload, 1)
        rows[row, -1] ^= 1
        with pytest.raises(
            RunsDifferError, match=r"^uring (and on gave different bytes for|gave wrong bytes.*) ubatch 1"
        ):
            verifier.check("uring", 1, rows)


def test_bytes_that_are_wrong_in_every_arm_alike_are_found(table: TableSpec, workload: Workload) -> None:
    with pytest.raises(RunsDifferError, match=r"on gave wrong bytes: row .* of ubatch 0 is not what a plain read"):
        Verifier(table, workload, 0).check("on", 0, np.roll(rows_of(workload, 0), 1, axis=0))


def test_a_plain_read_finds_its_extent(table: TableSpec) -> None:
    (extent,) = table.extents
    parts = (
        replace(extent, rows=7),
        replace(extent, offset=extent.offset + 7 * table.row_bytes, first_row=7, rows=extent.rows - 7),
    )
    split = replace(table, extents=parts)
    for row in (0, 6, 7, 8, table.rows - 1):
        assert read_row(split, row) == expected_rows(np.array([row]), "IQ4_NL", 160).tobytes()
