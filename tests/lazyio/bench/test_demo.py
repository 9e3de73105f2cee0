from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from lazyio.bench import demo
from lazyio.bench.demo import ROW_BYTES, SIZES, demo_table, is_complete
from lazyio.errors import NeverFits
from lazyio.ple.synthetic import expected_rows
from lazyio.ple.tables import find_table


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SIZES", (4000, 2000, 1000))


def free(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(demo.shutil, "disk_usage", lambda folder: SimpleNamespace(free=count))  # type: ignore[attr-defined]


def test_sizes_go_from_four_gibibytes_to_a_quarter_of_one() -> None:
    assert SIZES[0] == 48_000_000
    assert 4 << 30 <= SIZES[0] * ROW_BYTES + (32 << 20) < 5 << 30
    assert 240 << 20 <= SIZES[-1] * ROW_BYTES <= 270 << 20


def test_the_table_is_made_and_then_used_again(tmp_path: Path, console: Console) -> None:
    path = demo_table(tmp_path / "new" / "folder", console)
    written = path.stat().st_mtime_ns
    spec = find_table(path)
    assert (spec.rows, spec.row_bytes, spec.dtype, spec.is_ple) == (4000, ROW_BYTES, "IQ4_NL", True)
    assert demo_table(tmp_path / "new" / "folder", console) == path
    assert path.stat().st_mtime_ns == written
    made, used = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert made.startswith("making a demo table of 351.6 KiB")
    assert used.startswith("using the demo table")


def test_without_a_folder_it_lies_below_the_current_one(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert demo_table(None, console).parent == Path("lazyio-demo")


@pytest.mark.parametrize(("bytes_free", "rows"), [(3 * 4000 * ROW_BYTES, 4000), (3 * 4000 * ROW_BYTES - 1, 2000)])
def test_it_is_as_large_as_leaves_two_thirds_free(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch, bytes_free: int, rows: int
) -> None:
    free(monkeypatch, bytes_free)
    monkeypatch.setattr(demo, "write_gguf", lambda path, rows, *more, **named: path.write_text(str(rows)))
    assert demo_table(tmp_path, console).read_text() == str(rows)


def test_a_disk_too_small_is_refused(tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 3 * 1000 * ROW_BYTES - 1)
    with pytest.raises(NeverFits, match=r"asks for 3 times that free; .* has 263\.7 KiB: choose another folder"):
        demo_table(tmp_path, console)


def test_what_is_not_whole_is_not_used(tmp_path: Path, console: Console) -> None:
    path = demo_table(tmp_path, console)
    assert is_complete(path, 4000)
    assert not is_complete(path, 2000)
    assert not is_complete(tmp_path / "absent.gguf", 4000)
    spec = find_table(path)
    (extent,) = spec.extents
    with path.open("r+b") as file:  # the last row is still a hole
        file.seek(extent.offset + 3999 * ROW_BYTES)
        file.write(bytes(ROW_BYTES))
    assert not is_complete(path, 4000)
    with path.open("r+b") as file:
        file.seek(extent.offset + 3999 * ROW_BYTES)
        file.write(expected_rows(np.array([3999]), "IQ4_NL", 160).tobytes())
    assert is_complete(path, 4000)
    with path.open("r+b") as file:
        file.truncate(extent.offset + 10)
    assert not is_complete(path, 4000)
    assert demo_table(tmp_path, console) == path
    assert is_complete(path, 4000)
