"""Every setting: its name, what it takes, its value when unset, the modes in which it has effect, what it is for.

An argument goes over the environment variable `LAZYIO_<NAME>`, which goes over the default. The same table makes
docs/settings.md: `lazyio settings` prints it.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lazyio import forms
from lazyio.errors import SettingError
from lazyio.fetchers.base import FetcherOptions
from lazyio.fetchers.direct import BUFFERED_FROM_ROW_BYTES
from lazyio.forms import Form
from lazyio.modes import FETCHERS, MODES, Backend
from lazyio.units import format_bytes

__all__ = [
    "SETTINGS",
    "Setting",
    "applies",
    "check",
    "check_lanes",
    "check_opened",
    "differing",
    "document",
    "fetcher_options",
    "resolve",
]

_PREFIX = "LAZYIO_"

# A mode may also be the name of a fetcher, and then has the settings of the first mode that stands for it.
_MODE_OF_FETCHER = {fetcher: mode for mode, fetcher in reversed(FETCHERS.items())}

# Fetchers whose rows are copied from a map where they are read through the page cache and not kept in a row cache.
_MAPPED_IF_BUFFERED = ("pread", "uring")


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. In modes other than `modes` it has no effect; fetchers of third parties are given all of them."""

    name: str
    form: Form
    default: Any
    help: str
    modes: tuple[str, ...] = MODES

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return _PREFIX + self.name.upper()

    def read(self, value: object, source: str) -> Any:
        """Parse a value that was given as `source`. Raises SettingError that names source, value and accepted forms."""
        try:
            return self.form.parse(str(value).strip())
        except ValueError:
            raise SettingError(f"{source} is {str(value)!r}; it can be {self.form.accepts}") from None


# Whatever reads the cold rows of a file through the page cache, warm ones are copied out of a map of it.
_MAPPING = tuple(mode for mode in MODES if mode != "off")

SETTINGS: dict[str, Setting] = {
    setting.name: setting
    for setting in (
        Setting("lazy_mode", forms.mode(), "auto", "How rows are fetched."),
        Setting(
            "direct_io",
            forms.choice("auto", "on", "off"),
            "auto",
            "Whether reads bypass the page cache. auto: yes, unless rows are as large as an OS page.",
            ("auto", "uring", "on-direct"),
        ),
        Setting(
            "workers", forms.count(1, 1024), 32, "Reads that a pool makes at the same time.", ("auto", "on-direct")
        ),
        Setting(
            "queue_depth",
            forms.count(1, 32768),
            4096,
            "Reads that a queue has in flight at the same time.",
            ("auto", "uring"),
        ),
        Setting("block_bytes", forms.block(), 0, "Least length of a direct read.", ("auto", "uring", "on-direct")),
        Setting(
            "budget",
            forms.size(least=1 << 20),
            512 << 20,
            "Memory of our own that a table may take for the blocks it has read, and for rows read ahead.",
        ),
        Setting(
            "row_cache",
            forms.cache_size(),
            None,
            "Memory for rows that were read, so that they are not read again. auto: 256MiB where reads bypass the page "
            "cache, else none.",
            ("auto", "uring", "on-direct"),
        ),
        Setting(
            "reserve",
            forms.size(),
            2 << 30,
            "Memory that must stay free beside a table which is loaded whole.",
            ("auto", "off"),
        ),
        Setting(
            "mmap_rss",
            forms.size(zero="leaves it to the kernel"),
            0,
            "Mapped pages of a table beyond this are given back.",
            _MAPPING,
        ),
        Setting(
            "mmap_safe",
            forms.switch(),
            False,
            "Copy rows out of the map through the kernel: slower, but then a file that is truncated meanwhile gives an "
            "error instead of killing the process.",
            _MAPPING,
        ),
        Setting(
            "verify",
            forms.count(0, 1 << 20),
            0,
            "Rows of every gather, chosen at random, that are read once more through the page cache and compared.",
        ),
        Setting(
            "lookahead",
            forms.count(0, 64),
            2,
            "Of the engine: ubatches of a prompt whose rows are read ahead of the one that is computed. 0: each at its "
            "turn.",
        ),
        Setting(
            "ubatch",
            forms.ubatch(),
            2048,
            "Of the engine: tokens of a prompt that are computed together. auto: cuts planned from what reading and "
            "computing took when the model was loaded, so that they may vary from run to run.",
        ),
        Setting("parallel", forms.count(1, 1024), 1, "Of the engine: requests that are computed at once, the lanes."),
        Setting(
            "mixed",
            forms.count(1, 1 << 20),
            512,
            "Of the engine: tokens of prompts that are computed together where replies of others go on beside them, at "
            "most those of ubatch. Fewer keep replies waiting for less, and prompts for more.",
        ),
        Setting(
            "batch_invariant",
            forms.switch(),
            False,
            "Of the engine: compute nothing together, but each sequence by itself and in blocks of 256 positions, so "
            "that no bit depends on what else is computed. A step of N replies takes as long as N steps.",
        ),
        Setting(
            "weights",
            forms.choice("auto", "packed", "dequantised"),
            "auto",
            "Of the engine: whether quantised weights stay packed on the device. auto: yes on a GPU that kernels for "
            "them can run on, no on the CPU.",
        ),
        Setting(
            "trunk",
            forms.trunk(),
            None,
            "Of the engine: the type of random matrices (load format dummy). auto: values of the model's dtype.",
        ),
        Setting(
            "kv_pages",
            forms.pages(),
            0,
            "Of the engine: pages of 256 positions that all sequences take keys, values and states from, as they need "
            "them. auto: as many as there is memory for. off: room for its whole length for each sequence by itself.",
        ),
        Setting(
            "prefix_reuse",
            forms.switch(),
            True,
            "Of the engine, with kv_pages: keep what ended sequences leave, as long as nobody needs the pages, so that "
            "prompts which begin alike are computed from there on.",
        ),
        Setting(
            "poison_state",
            forms.switch(),
            False,
            "Of the engine, with kv_pages: fill pages with values that are no numbers before they are used, so that a "
            "read of what was never written shows.",
        ),
        Setting(
            "strict",
            forms.switch(),
            False,
            "Fail where something that was asked for can't be had, instead of falling back.",
        ),
    )
}


def resolve(name: str, given: object = None) -> Any:
    """The value of a setting: `given` unless None, else that of the environment, else the default.

    Raises SettingError for an unknown name and for a value that is not of an accepted form.
    """
    setting = _named(name)
    if given is not None:
        return setting.read(given, name)
    text = os.environ.get(setting.variable)
    return setting.default if text is None else setting.read(text, setting.variable)


def fetcher_options(given: Mapping[str, object], extra: dict[str, Any] | None = None) -> FetcherOptions:
    """Options of a fetcher, resolved from the arguments by name; `extra` is handed on. Raises as `resolve` does."""
    value = {name: resolve(name, given.get(name)) for name in SETTINGS}
    return FetcherOptions(
        direct_io=value["direct_io"],
        workers=value["workers"],
        queue_depth=value["queue_depth"],
        block_bytes=value["block_bytes"],
        mmap_rss_bytes=value["mmap_rss"],
        mmap_safe=value["mmap_safe"],
        reserve_bytes=value["reserve"],
        extra=extra or {},
    )


def applies(name: str, mode: str) -> bool:
    """Whether a setting has effect in a mode."""
    mode = _MODE_OF_FETCHER.get(mode, mode)
    return mode not in MODES or mode in _named(name).modes


def check(mode: str, given: Mapping[str, object]) -> None:
    """Raise SettingError if a setting given as an argument, not None, would be ignored, or a variable is no setting.

    Variables of the environment are meant for all tables, so one that does not apply to this mode is left alone. What
    can be known only of an open table, `check_opened` finds.
    """
    for name, value in given.items():
        if value is not None and not applies(name, mode):
            modes = ", ".join(_named(name).modes)
            raise SettingError(f"{name} has no effect in mode {mode}, only in {modes}: leave it out or change the mode")
    if given.get("block_bytes") is not None and resolve("direct_io", given.get("direct_io")) == "off":
        raise SettingError("block_bytes has no effect while direct_io is off: leave one of them out")
    _refuse_strange_variables()


def check_lanes(parallel: int | None, mixed: int | None) -> None:
    """Raise SettingError if `mixed` is given as an argument and there is one lane, where it would be ignored."""
    if mixed is not None and resolve("parallel", parallel) == 1:
        raise SettingError(
            f"mixed {mixed} has no effect while parallel is 1, where no prompt is computed beside a reply: raise "
            "parallel, or leave it out"
        )


def check_opened(given: Mapping[str, object], backend: Backend, row_bytes: int) -> None:
    """Raise SettingError if a setting given as an argument has no effect on a table that was opened with it.

    A value that is the default is had anyway. What `auto` did not take may have its settings, and fetchers of third
    parties may use any.
    """
    if backend.mode == "auto" or backend.fetcher not in _MAPPED_IF_BUFFERED:
        return
    asked = {
        name for name, value in given.items() if value is not None and resolve(name, value) != _named(name).default
    }
    direct_io, row_cache = (resolve(name, given.get(name)) for name in ("direct_io", "row_cache"))
    if "block_bytes" in asked and direct_io == "auto" and row_bytes >= BUFFERED_FROM_ROW_BYTES:
        raise SettingError(
            f"block_bytes has no effect where direct_io auto has rows of {row_bytes} bytes read through the page "
            "cache: leave it out, or set direct_io to on"
        )
    for name in sorted(asked & {"mmap_rss", "mmap_safe"}):
        if backend.direct_io:
            raise SettingError(
                f"{name} has no effect where direct_io is {direct_io} and reads bypass the page cache, so that no map "
                "is made: leave it out, or set direct_io to off"
            )
        if row_cache:
            raise SettingError(
                f"{name} has no effect beside row_cache={format_bytes(row_cache)}, which rows are copied from, so that "
                "no map is made: leave one of them out"
            )


def differing(given: Mapping[str, object] | None = None) -> list[str]:
    """What is not at its default, as 'name=value', with the variable's name behind it where that is the reason."""
    found = []
    for name, setting in SETTINGS.items():
        argument = (given or {}).get(name)
        value = resolve(name, argument)
        if value != setting.default:
            source = f" ({setting.variable})" if argument is None else ""
            found.append(f"{name}={setting.form.write(value)}{source}")
    return found


def document() -> str:
    """The page docs/settings.md."""
    lines = [
        "# Settings",
        "",
        "An argument goes over the environment variable, which goes over the default. A value of another form is an",
        "error, never the default. So is an argument that has no effect in the chosen mode or beside the others; a",
        "variable, which is meant for all tables, is then left alone. A variable `LAZYIO_...` that is not in this",
        "table is an error too.",
        "",
        "| setting | variable | default | modes | meaning | values |",
        "|---|---|---|---|---|---|",
    ]
    for setting in SETTINGS.values():
        modes = "all" if setting.modes == MODES else ", ".join(f"`{mode}`" for mode in setting.modes)
        cells = [f"`{setting.name}`", f"`{setting.variable}`", setting.form.write(setting.default), modes]
        lines.append(f"| {' | '.join([*cells, setting.help, setting.form.accepts])} |")
    lines += ["", "This page is what `lazyio settings` prints.", ""]
    return "\n".join(lines)


def _named(name: str) -> Setting:
    if name not in SETTINGS:
        raise SettingError(f"there is no setting {name!r}; there are: {', '.join(SETTINGS)}")
    return SETTINGS[name]


def _refuse_strange_variables() -> None:
    variables = [setting.variable for setting in SETTINGS.values()]
    for variable in os.environ:
        if variable not in variables and (variable.startswith(_PREFIX) or variable.upper() in variables):
            nearest = difflib.get_close_matches(variable.upper(), variables, n=1, cutoff=0)[0]
            raise SettingError(f"the environment has {variable}, which is no setting: did you mean {nearest}?")
