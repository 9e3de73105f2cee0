import os
from pathlib import Path

import numpy as np
import pytest

from lazyio import forms
from lazyio.errors import SettingError
from lazyio.fetchers import FetcherOptions
from lazyio.modes import MODES
from lazyio.settings import SETTINGS, applies, check, differing, document, fetcher_options, resolve


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in list(os.environ):
        if variable.startswith("LAZYIO_"):
            monkeypatch.delenv(variable)


def test_an_argument_goes_over_the_environment_and_that_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("workers") == 32
    monkeypatch.setenv("LAZYIO_WORKERS", "8")
    assert resolve("workers") == 8
    assert resolve("workers", 4) == 4


@pytest.mark.parametrize("name", SETTINGS)
def test_every_default_is_a_value_that_could_have_been_given(name: str) -> None:
    setting = SETTINGS[name]
    assert resolve(name, setting.form.write(setting.default)) == resolve(name, setting.default) == setting.default


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("lazy_mode", "on-bare", "on-bare"),
        ("lazy_mode", " OFF ", "off"),
        ("lazy_mode", "pread", "pread"),
        ("direct_io", "On", "on"),
        ("workers", np.int64(5), 5),
        ("queue_depth", "32768", 32768),
        ("block_bytes", "4KiB", 4096),
        ("block_bytes", 0, 0),
        ("budget", "1.5GiB", 3 << 29),
        ("row_cache", "64MiB", 64 << 20),
        ("row_cache", 0, 0),
        ("row_cache", "Auto", None),
        ("reserve", 0, 0),
        ("mmap_rss", "0", 0),
        ("lookahead", 0, 0),
        ("lookahead", "64", 64),
        ("ubatch", "512", 512),
        ("ubatch", "AUTO", None),
        ("mmap_safe", True, True),
        ("strict", "no", False),
        ("strict", 1, True),
    ],
)
def test_accepted(monkeypatch: pytest.MonkeyPatch, name: str, given: object, value: object) -> None:
    assert resolve(name, given) == value
    assert type(resolve(name, given)) is type(value)
    monkeypatch.setenv(SETTINGS[name].variable, str(given))
    assert resolve(name) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lazy_mode", "fast"),
        ("lazy_mode", ""),
        ("direct_io", "true"),
        ("workers", "0"),
        ("workers", "1025"),
        ("workers", "-1"),
        ("workers", "8.0"),
        ("workers", "9" * 5000),
        ("workers", "٣"),
        ("workers", ""),
        ("queue_depth", "32769"),
        ("block_bytes", "1000"),
        ("block_bytes", "256"),
        ("block_bytes", "2MiB"),
        ("budget", "0"),
        ("budget", "1023KiB"),
        ("row_cache", "1023KiB"),
        ("row_cache", "on"),
        ("reserve", "some"),
        ("mmap_rss", "-1"),
        ("mmap_safe", "maybe"),
        ("lookahead", "65"),
        ("lookahead", "auto"),
        ("ubatch", "0"),
        ("ubatch", "all"),
        ("strict", "2"),
    ],
)
def test_bad_text_is_refused_with_the_accepted_forms(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    setting = SETTINGS[name]
    with pytest.raises(SettingError) as argument:
        resolve(name, text)
    monkeypatch.setenv(setting.variable, text)
    with pytest.raises(SettingError) as environment:
        resolve(name)
    assert str(argument.value) == f"{name} is {text!r}; it can be {setting.form.accepts}"
    assert str(environment.value) == f"{setting.variable} is {text!r}; it can be {setting.form.accepts}"


@pytest.mark.parametrize("given", [2.5, True, [8], b"8"])
def test_arguments_of_another_type_are_refused(given: object) -> None:
    with pytest.raises(SettingError, match="workers is"):
        resolve("workers", given)


def test_an_unknown_setting_is_named_with_those_there_are() -> None:
    with pytest.raises(SettingError, match=r"no setting 'depth'; there are: lazy_mode, .*queue_depth"):
        resolve("depth")


def test_fetchers_of_third_parties_are_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "available", lambda: {"theirs": "their.package:Theirs"})
    assert resolve("lazy_mode", "theirs") == "theirs"
    assert all(applies(name, "theirs") for name in SETTINGS)


@pytest.mark.parametrize(
    ("mode", "without_effect"),
    [
        ("auto", set()),
        ("uring", {"workers", "reserve"}),
        ("on-direct", {"queue_depth", "reserve"}),
        ("pread", {"queue_depth", "reserve"}),
        ("on", {"direct_io", "workers", "queue_depth", "block_bytes", "row_cache", "reserve"}),
        ("off", {"direct_io", "workers", "queue_depth", "block_bytes", "row_cache", "mmap_rss", "mmap_safe"}),
    ],
)
def test_which_settings_have_effect_in_which_mode(mode: str, without_effect: set[str]) -> None:
    assert {name for name in SETTINGS if not applies(name, mode)} == without_effect


def test_options_of_fetchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYIO_WORKERS", "8")
    monkeypatch.setenv("LAZYIO_LOOKAHEAD", "8")  # of the engine: no fetcher hears of it
    options = fetcher_options({"queue_depth": 64, "mmap_rss": "1g", "reserve": None}, {"theirs": 1})
    assert options == FetcherOptions(
        workers=8, queue_depth=64, mmap_rss_bytes=1 << 30, reserve_bytes=2 << 30, extra={"theirs": 1}
    )
    with pytest.raises(SettingError, match="block_bytes is '3'"):
        fetcher_options({"block_bytes": 3})


def test_every_mode_of_the_table_is_a_mode() -> None:
    assert all(set(setting.modes) <= set(MODES) for setting in SETTINGS.values())


def test_an_argument_without_effect_is_refused() -> None:
    check("uring", {"queue_depth": 8, "workers": None})
    with pytest.raises(SettingError, match="workers has no effect in mode uring, only in auto, on-direct"):
        check("uring", {"queue_depth": 8, "workers": 8})


def test_a_variable_without_effect_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYIO_WORKERS", "8")
    check("uring", {"queue_depth": 8})


@pytest.mark.parametrize("from_environment", [False, True])
def test_a_block_for_direct_reads_without_direct_reads(monkeypatch: pytest.MonkeyPatch, from_environment: bool) -> None:
    given: dict[str, object] = {"block_bytes": 4096}
    check("uring", given)
    if from_environment:
        monkeypatch.setenv("LAZYIO_DIRECT_IO", "off")
    else:
        given["direct_io"] = "off"
    with pytest.raises(SettingError, match="block_bytes has no effect while direct_io is off"):
        check("uring", given)


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("LAZYIO_QUEUEDEPTH", "LAZYIO_QUEUE_DEPTH"),
        ("LAZYIO_MODE", "LAZYIO_LAZY_MODE"),
        ("LAZYIO_lazy_mode", "LAZYIO_LAZY_MODE"),
        ("lazyio_workers", "LAZYIO_WORKERS"),
        ("LAZYIO_CACHE", "LAZYIO_ROW_CACHE"),
        ("LAZYIO_SOMETHING_ELSE", "LAZYIO_"),
    ],
)
def test_a_variable_that_is_no_setting_is_refused(monkeypatch: pytest.MonkeyPatch, variable: str, nearest: str) -> None:
    monkeypatch.setenv("LAZYIO_WORKERS", "8")
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    check("auto", {})
    monkeypatch.setenv(variable, "1")
    with pytest.raises(SettingError, match=f"has {variable}, which is no setting: did you mean {nearest}"):
        check("auto", {})


def test_what_differs_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    assert differing() == []
    monkeypatch.setenv("LAZYIO_BUDGET", "1g")
    monkeypatch.setenv("LAZYIO_WORKERS", "32")
    monkeypatch.setenv("LAZYIO_QUEUE_DEPTH", "7")
    given = {"queue_depth": 64, "strict": True, "lazy_mode": "auto"}
    assert differing(given) == ["queue_depth=64", "budget=1.0 GiB (LAZYIO_BUDGET)", "strict=on"]


def test_the_page_of_settings_is_the_one_that_this_table_makes() -> None:
    page = Path(__file__).parents[2] / "docs" / "settings.md"
    assert page.read_text() == document(), "run: lazyio settings > docs/settings.md"
