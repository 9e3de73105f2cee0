"""From what a user writes to a plan: every key known, every setting used, nothing left to chance."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from lazyio.bench.abba.paths import Place
from lazyio.bench.abba.plan import ONLY_CELL, OUT_FILE, ColdTable, Job, Metric, Plan
from lazyio.errors import SettingError

#: The setting that stands for the file which a command may write its document to.
OUT = "out"
_COMMON = ("command", "env", "before_each", "cold")
_KEYS = (*_COMMON, "cells", "arms", "reference", "metrics", "equal", "rounds", "timeout_s")
_DEFAULT_ROUNDS = 6
_DEFAULT_EQUAL = ["tokens", "logits"]
_DEFAULT_METRICS = {"wall_s": {"path": "process.wall_s", "better": "lower"}}
_NAME = re.compile(r"\{\{(\w+)\}\}|\{(\w+)\}")
_PLAIN = re.compile(r"[A-Za-z0-9_.+@-]+")

T = TypeVar("T")


def plan_of(given: Mapping[str, Any]) -> Plan:
    """The plan of a definition, as docs/abba.md describes it. Raises SettingError, which names the place."""
    _check_keys("the definition", given, _KEYS)
    arms = _tables("arms", given.get("arms", {}))
    cells = _tables("cells", given.get("cells", {ONLY_CELL: {}}))
    if len(arms) < 2 or not cells:
        raise SettingError(f"there are {len(arms)} arms and {len(cells)} cells; two arms and a cell are the least")
    reference = _text("reference", given.get("reference", next(iter(arms))))
    if reference not in arms:
        raise SettingError(f"reference is {reference!r}, which is none of the arms: {', '.join(arms)}")
    jobs = _jobs(given, cells, arms)
    _check_distinct(jobs)
    return Plan(
        jobs=jobs,
        reference=reference,
        metrics=_metrics(given.get("metrics", _DEFAULT_METRICS)),
        equal=tuple(Place.parse(text) for text in _texts("equal", given.get("equal", _DEFAULT_EQUAL))),
        rounds=_rounds(given.get("rounds", _DEFAULT_ROUNDS)),
        timeout_s=_seconds("timeout_s", given.get("timeout_s")),
    )


def _jobs(given: Mapping[str, Any], cells: Mapping[str, Any], arms: Mapping[str, Any]) -> dict[str, dict[str, Job]]:
    for kind, tables in (("cells", cells), ("arms", arms)):
        for name, table in tables.items():
            _check_keys(f"{kind}.{name}", table, ("command", "env", "set"))
    used = set[str]()
    jobs = {
        cell: {arm: _job(f"arm {arm} in cell {cell}", given, of_cell, of_arm, used) for arm, of_arm in arms.items()}
        for cell, of_cell in cells.items()
    }
    for kind, tables in (("cells", cells), ("arms", arms)):
        for name, table in tables.items():
            if idle := [key for key in table.get("set", {}) if key not in used]:
                raise SettingError(f"{kind}.{name}.set has {idle[0]}, and no command has the word {{{idle[0]}}}")
    return jobs


def _job(where: str, given: Mapping[str, Any], cell: Mapping[str, Any], arm: Mapping[str, Any], used: set[str]) -> Job:
    if "command" in cell and "command" in arm:
        raise SettingError(f"{where}: both have a command of their own; only one of them can")
    words = _Words(where, _settings(where, cell, arm), used)
    command = arm.get("command", cell.get("command", given.get("command")))
    if command is None:
        raise SettingError(f"{where} has no command; give `command` for all, for the arm or for the cell")
    env: dict[str, str] = {}
    for source in (given, cell, arm):
        env |= {
            _variable(key): words.filled(_value(f"env.{key}", value)) for key, value in _table("env", source).items()
        }
    before = given.get("before_each")
    return Job(
        command=words.command("command", command, out=True),
        env=env,
        before_each=None if before is None else words.command("before_each", before),
        cold=_cold(words, given),
    )


def _variable(name: str) -> str:
    if not re.fullmatch(r"[^=\0]+", name):
        raise SettingError(f"env has {name!r}, which can't be the name of a variable")
    return name


def _settings(where: str, cell: Mapping[str, Any], arm: Mapping[str, Any]) -> dict[str, str]:
    of_cell, of_arm = _table("set", cell), _table("set", arm)
    if twice := sorted(of_cell.keys() & of_arm.keys()):
        raise SettingError(f"{where}: {twice[0]} is set by both the cell and the arm")
    both = {key: _value(f"set.{key}", value) for key, value in (of_cell | of_arm).items()}
    if wrong := [key for key in both if key == OUT or not re.fullmatch(r"\w+", key)]:
        raise SettingError(f"{where}: a setting can't be called {wrong[0]!r}; it is a word, and not {OUT!r}")
    return both


class _Words:
    """Puts settings in the place of their names in braces, and notes which were used."""

    def __init__(self, where: str, settings: Mapping[str, str], used: set[str]) -> None:
        self._where, self._settings, self._used = where, settings, used

    def command(self, name: str, given: Any, *, out: bool = False) -> tuple[str, ...]:
        """A command as words, from words or from a line that is cut as a shell would, without running one."""
        try:
            words = shlex.split(given) if isinstance(given, str) else _texts(name, given)
        except ValueError as error:  # a quotation that is not closed
            raise SettingError(f"{self._where}: {name} is {given!r}: {error}") from None
        if not words:
            raise SettingError(f"{self._where}: {name} is empty")
        return tuple(self.filled(word, out=out) for word in words)

    def filled(self, text: str, *, out: bool = False) -> str:
        """The text with settings for names, and with single braces for doubled ones."""

        def setting(match: re.Match[str]) -> str:
            doubled, name = match.groups()
            if doubled:
                return f"{{{doubled}}}"
            if out and name == OUT:
                return OUT_FILE
            if name not in self._settings:
                known = ", ".join([*self._settings, *([OUT] if out else [])]) or "nothing"
                raise SettingError(
                    f"{self._where}: there is no setting {name} for {match[0]} in {text!r}; there is {known}; "
                    f"braces that are meant as such are written {{{match[0]}}}"
                )
            self._used.add(name)
            return self._settings[name]

        if "\0" in text:
            raise SettingError(f"{self._where}: {text!r} has a NUL, which no command can be given")
        return _NAME.sub(setting, text)


def _cold(words: _Words, given: Mapping[str, Any]) -> ColdTable | None:
    if "cold" not in given:
        return None
    table = _table("cold", given)
    _check_keys("cold", table, ("model", "tensor"))
    if "model" not in table:
        raise SettingError("cold has no model; give the file or folder whose table is to be made cold")
    tensor = table.get("tensor")
    model = words.filled(_text("cold.model", table["model"]))
    return ColdTable(model, None if tensor is None else words.filled(_text("cold.tensor", tensor)))


def _metrics(given: Any) -> tuple[Metric, ...]:
    metrics = []
    for name, table in _tables("metrics", given).items():
        where = f"metrics.{name}"
        _check_keys(where, table, ("path", "better"))
        better = table.get("better")
        if better not in (None, "lower", "higher"):
            raise SettingError(f"{where}.better is {better!r}; it can be 'lower' or 'higher', or left out")
        metrics.append(Metric(name, Place.parse(_text(f"{where}.path", table.get("path", f"metrics.{name}"))), better))
    if not any(metric.better for metric in metrics):
        raise SettingError("no metric is judged: say of at least one whether 'lower' or 'higher' is better")
    return tuple(metrics)


def _check_distinct(jobs: Mapping[str, Mapping[str, Job]]) -> None:
    seen: dict[str, str] = {}
    for arm in next(iter(jobs.values())):
        same = seen.setdefault(repr([of_cell[arm].as_json() for of_cell in jobs.values()]), arm)
        if same != arm:
            raise SettingError(f"arms {same} and {arm} are the same in every cell; the reference runs twice by itself")


def _rounds(value: Any) -> int:
    if type(value) is not int or value < 2 or value % 2:
        raise SettingError(f"rounds is {value!r}; it can be 2, 4, 6 ...: every other round goes backwards")
    return value


def _seconds(name: str, value: Any) -> float | None:
    if value is not None and (type(value) not in (int, float) or not 0 < value < math.inf):
        raise SettingError(f"{name} is {value!r}; it can be a number of seconds above 0")
    return None if value is None else float(value)


def _check_keys(where: str, table: Mapping[str, Any], known: Iterable[str]) -> None:
    for key in table:
        if key not in known:
            near = get_close_matches(key, list(known), 1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise SettingError(f"{where} has {key!r}, which it can't have; {meant}it can have: {', '.join(known)}")


def _tables(name: str, value: Any) -> dict[str, dict[str, Any]]:
    tables = _typed(name, value, dict, "a table of tables")
    for key, table in tables.items():
        _typed(f"{name}.{key}", table, dict, "a table")
        if not _PLAIN.fullmatch(key):
            raise SettingError(f"{name} has {key!r}; a name is letters, digits and any of _ . + @ -")
    return tables


def _table(name: str, of: Mapping[str, Any]) -> dict[str, Any]:
    return _typed(name, of.get(name, {}), dict, "a table")


def _text(name: str, value: Any) -> str:
    return _typed(name, value, str, "text")


def _texts(name: str, value: Any) -> list[str]:
    return [_text(f"an entry of {name}", each) for each in _typed(name, value, list, "a list of texts")]


def _value(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise SettingError(f"{name} is {value!r}; it can be text or a number")
    return str(value)


def _typed(name: str, value: Any, kind: type[T], words: str) -> T:
    if not isinstance(value, kind):
        raise SettingError(f"{name} is {value!r}; it should be {words}")
    return value
