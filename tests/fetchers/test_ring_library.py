"""Where C liburing comes from: the wheel, else the system, else it is said what to install."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lazyio import Unsupported, open_table
from lazyio.fetchers import ring as rings
from lazyio.fetchers.conformance import write_rows
from lazyio.ple.raw import raw_table

CHECKOUT = Path(__file__).parents[2]
ROWS = 3000

# Gathers through the system's library, as on a machine without a wheel, and prints which file that was.
WITHOUT_WHEEL = """
import importlib.util, sys
import numpy as np
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *package: None if name == "liburing" else real(name, *package)
import lazyio
from lazyio.fetchers.ring import library
path, direct_io = sys.argv[1:]
with lazyio.open_table(lazyio.raw_table(path, row_bytes=90), mode="uring", direct_io=direct_io, strict=True) as table:
    ids = np.random.default_rng(0).integers(0, table.n_rows, 5000)
    assert (table.gather(ids) == np.fromfile(path, np.uint8).reshape(-1, 90)[ids]).all()
    for few in (ids[:16], ids[:1]):
        assert (table.gather(few) == np.fromfile(path, np.uint8).reshape(-1, 90)[few]).all()
print(library()._name, *{line.split()[-1] for line in open("/proc/self/maps") if "liburing" in line})
"""


@pytest.fixture
def table_path(tmp_path: Path) -> Path:
    write_rows(tmp_path, 90, [("rows", 0, ROWS)])
    return tmp_path / "rows"


@pytest.fixture
def without_wheel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "liburing" else real(name))
    rings.library.cache_clear()
    yield
    rings.library.cache_clear()


@pytest.mark.parametrize("direct_io", ["on", "off"])
def test_the_system_serves_where_there_is_no_wheel(tmp_path: Path, table_path: Path, direct_io: str) -> None:
    try:
        rings.Ring(1).close()
    except Unsupported as refused:
        pytest.skip(str(refused))
    wheel = Path(rings._library_paths()[0])
    if not wheel.is_absolute():
        pytest.skip("there is no liburing wheel here to stand for the system's library")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "liburing.so.2").symlink_to(wheel)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_WHEEL, str(table_path), direct_io],
        env=os.environ | {"LD_LIBRARY_PATH": str(tmp_path / "lib")},
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
    )
    if "Unsupported" in done.stderr and direct_io == "on":
        pytest.skip("no direct I/O here")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["liburing.so.2", str(wheel.resolve())]


@pytest.mark.usefixtures("without_wheel")
def test_without_the_wheel_only_the_system_is_asked() -> None:
    assert rings._library_paths() == ["liburing.so.2"]


@pytest.mark.usefixtures("without_wheel")
def test_with_neither_another_fetcher_takes_over(monkeypatch: pytest.MonkeyPatch, table_path: Path) -> None:
    load = ctypes.CDLL

    def refuse(name: str | None, *arguments: object, **named: object) -> ctypes.CDLL:
        if name == "liburing.so.2":
            raise OSError(f"{name}: cannot open shared object file")
        return load(name, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    said = "liburing.so.2: cannot open shared object file"
    with open_table(raw_table(table_path, row_bytes=90), mode="uring") as table:
        assert table.backend.fetcher != "uring"
        assert said in str(table.backend.fallback_reason)
        assert "install the liburing package, or the system's liburing2" in str(table.backend.fallback_reason)
        assert table.gather([5]).tobytes() == table_path.read_bytes()[450:540]
    with pytest.raises(Unsupported, match=r"liburing is not to be found \(liburing\.so\.2: "):
        open_table(raw_table(table_path, row_bytes=90), mode="uring", strict=True)
