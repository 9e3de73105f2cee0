"""What a user gets who installs the package: one importable name, with all that belongs to it."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import lazyio

CHECKOUT = Path(__file__).parents[2]

PUBLIC = [
    "MODES",
    "Backend",
    "CacheStats",
    "Cancelled",
    "LazyIOError",
    "LazyTable",
    "Lookahead",
    "ModelError",
    "NetworkFilesystemWarning",
    "NeverFits",
    "NgramHash",
    "NoRoom",
    "NotCold",
    "PromptError",
    "ReadError",
    "RowIndexError",
    "RunsDifferError",
    "SettingError",
    "Started",
    "TableCache",
    "TableError",
    "TableSpec",
    "TableStats",
    "Ticket",
    "Unsupported",
    "__version__",
    "find_table",
    "find_tables",
    "open_table",
    "plan_cuts",
    "raw_table",
    "row_ids_of",
]


def test_public_names() -> None:
    assert lazyio.__all__ == PUBLIC
    assert all(hasattr(lazyio, name) for name in PUBLIC)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout, built away from it so that nothing is left behind."""
    if int(importlib.metadata.version("setuptools").split(".")[0]) < 77:
        pytest.skip("building the wheel needs setuptools 77")
    source = tmp_path_factory.mktemp("source")
    (source / "dist").mkdir()
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(CHECKOUT / name, source)
    (source / "README.md").write_text("# lazyio\n")
    shutil.copytree(CHECKOUT / "lazyio", source / "lazyio", symlinks=True)
    for link in (CHECKOUT / "lazyio").iterdir():
        if link.is_symlink():
            shutil.copytree(link, source / link.name)
    for name in ("tests", "tools", "docs"):
        (source / name).mkdir()
        (source / name / "__init__.py").touch()
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        "dist",
        ".",
    ]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (built,) = (source / "dist").glob("*.whl")
    return built


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_nothing_but_lazyio_becomes_importable(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in files_of(wheel)}
    assert tops == {"lazyio", f"lazyio-{lazyio.__version__}.dist-info"}


def test_all_of_lazyio_is_in_the_wheel(wheel: Path) -> None:
    belonging = {
        os.path.relpath(os.path.join(folder, name), CHECKOUT)
        for folder, _, names in os.walk(CHECKOUT / "lazyio", followlinks=True)
        for name in names
        if not folder.endswith("__pycache__")
    }
    assert belonging - files_of(wheel) == set()


ELSEWHERE = """
import sys
sys.path[:] = [path for path in sys.path if path not in ("", {checkout!r})]
sys.path.insert(0, {installed!r})
import lazyio, lazyio.fetchers, lazyio.ple, lazyio.cli
print(lazyio.__file__)
"""


def test_the_wheel_works_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    code = ELSEWHERE.format(checkout=str(CHECKOUT), installed=str(installed))
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(installed / "lazyio" / "__init__.py")]


def test_reading_does_not_import_what_only_programs_for_people_need() -> None:
    code = (
        "import lazyio, sys; print([name for name in ('torch', 'rich', 'typer', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
