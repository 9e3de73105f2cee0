"""The example of docs/fetchers/write-your-own.md works as it is printed."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

import lazyio
from lazyio.fetchers.conformance import write_rows

CHECKOUT = Path(lazyio.__file__).parents[1]
PAGE = Path(__file__).parents[2] / "docs/fetchers/write-your-own.md"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The files of the page, and the metadata that installing them would make."""
    folder = tmp_path / "package"
    folder.mkdir()
    for name, text in re.findall(r"^```\w+\n# (\S+)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        (folder / name).write_text(text)
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    metadata = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    return folder


def test_it_passes_the_suite(package: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{CHECKOUT}:{package}"}
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "test_one_by_one.py"]
    done = subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 20


def test_it_is_a_mode(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(package))
    made = write_rows(package, 90, [("rows", 33, 500)])
    spec = lazyio.raw_table(made.extents[0].path, row_bytes=90, offset=33)
    try:
        with lazyio.open_table(spec, mode="one-by-one") as table:
            assert table.backend.fetcher == "one-by-one"
            assert table.backend.fallback_reason is None
            np.testing.assert_array_equal(table.gather([3, 1, 3]), made.content[[3, 1, 3]])
            assert table.stats().reads >= 1
    finally:
        sys.modules.pop("one_by_one", None)


def test_its_script_runs(package: Path, model: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{CHECKOUT}:{package}"}
    command = [sys.executable, "-W", "error", "use.py", str(model)]
    done = subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "fetcher='one-by-one'" in done.stdout


@pytest.fixture
def model(tmp_path: Path) -> Path:
    safetensors = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "model.safetensors"
    name = "model.language_model.embed_tokens_per_layer.weight"
    safetensors.save_file({name: np.zeros((10, 256), np.float16)}, path)
    return path
