from pathlib import Path

import pytest

from lazyio.errors import SettingError
from lazyio.fetchers import Fetcher, available, load


@pytest.fixture
def register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package that registers good, bad and borrowed names, as if it were installed."""
    metadata = tmp_path / "another-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: another\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[lazyio.fetchers]\n"
        "another = lazyio.fetchers.mmap:MmapFetcher\n"
        "uring = lazyio.fetchers.mmap:MmapFetcher\n"
        "function = os:getpid\n"
        "class = pathlib:Path\n"
        "no-module = there_is_no_such_module:Fetcher\n"
        "no-attribute = lazyio.fetchers.mmap:NoFetcher\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("name", ["resident", "mmap", "pread", "uring"])
def test_ours_are_found_and_know_their_names(name: str) -> None:
    fetcher = load(name)
    assert issubclass(fetcher, Fetcher)
    assert fetcher.name == name


def test_an_unknown_name_is_answered_with_those_there_are() -> None:
    with pytest.raises(SettingError, match=r"'urring'; there are: .*mmap, pread, resident, uring"):
        load("urring")


@pytest.mark.usefixtures("register")
def test_another_package_adds_a_name() -> None:
    assert available()["another"] == "lazyio.fetchers.mmap:MmapFetcher"
    assert load("another").name == "mmap"


@pytest.mark.usefixtures("register")
def test_another_package_does_not_take_a_name_of_ours() -> None:
    assert load("uring").name == "uring"


@pytest.mark.usefixtures("register")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("function", "os:getpid, which is not a Fetcher class"),
        ("class", "pathlib:Path, which is not a Fetcher class"),
        ("no-module", "which can't be loaded: No module named"),
        ("no-attribute", "which can't be loaded: .*NoFetcher"),
    ],
)
def test_what_is_no_fetcher_is_refused(name: str, reason: str) -> None:
    with pytest.raises(SettingError, match=f"'{name}' is registered as .*{reason}"):
        load(name)
