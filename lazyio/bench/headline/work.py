"""What is measured, what is left of it to do, and the files in which what was measured is kept."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from lazyio.bench.abba.plan import differences
from lazyio.bench.kept import write_whole
from lazyio.errors import SettingError

#: The lazy mode that others are compared with.
BASELINE = "on-bare"
#: The architecture of the model.
ARCHITECTURE = "qwen4_exp"
#: Rounds of a step: one there, one back.
STEP_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured. Figures of different ones are not mixed."""

    size: str
    stored: str
    rows: int
    layers: int | None  # None while it is left to the device's memory
    device: str
    modes: str
    lookahead: str
    ids: str | None
    trunk: str | None = None  # the type of the weights; None: values, as the configuration says

    def as_json(self) -> dict[str, Any]:
        """With the settings that the environment has, which commands take from there."""
        environment = {name: text for name, text in sorted(os.environ.items()) if name.startswith("LAZYIO_")}
        return asdict(self) | {"environment": environment}


@dataclass(frozen=True, slots=True)
class Work:
    """What is left to do where, and how long that may take."""

    maker: Path  # tools/make_model.py
    model: Path
    results: Path
    lengths: list[int]
    steps: int  # of every length
    step_s: float
    budget_s: float
    ends: float  # of the budget, by time.monotonic()
    lock: int  # a descriptor; children have it too

    @property
    def left_s(self) -> float:
        """Of the budget."""
        return self.ends - time.monotonic()

    def file_of(self, tokens: int, step: int) -> Path:
        """Of what a step measured."""
        return self.results / f"{tokens}-{step}.json"

    def partial_of(self, tokens: int, step: int) -> Path:
        """What `bench-engine` writes to while it measures a step."""
        return self.file_of(tokens, step).with_suffix(".partial")

    def missing(self) -> list[tuple[int, int]]:
        """Lengths and steps that are still to be measured, or not complete: the first steps of all lengths first."""
        both = product(range(1, self.steps + 1), self.lengths)
        return [(tokens, step) for step, tokens in both if self._kept(tokens, step) < STEP_ROUNDS]

    def measured(self, tokens: int) -> list[dict[str, Any]]:
        """Steps of a length in order, each of a complete round or more. Raises SettingError for a damaged file."""
        files = [self.file_of(tokens, step) for step in range(1, self.steps + 1)]
        return [_read(file) for file in files if file.exists()]

    def before(self) -> dict[str, Any]:
        """The subject of what is measured already, empty if nothing is. Raises SettingError for a damaged file."""
        file = next(iter(sorted(self.results.glob("*-*.json"))), None)
        return {} if file is None else dict(_read(file)["asked"])

    def keep(self, tokens: int, step: int, subject: Subject, document: Mapping[str, Any], took_s: float) -> None:
        """Keep what a step measured, the JSON of bench-engine, and of what."""
        self.results.mkdir(parents=True, exist_ok=True)
        write_whole(self.file_of(tokens, step), {"asked": subject.as_json(), "took_s": took_s, **document})

    def keep_partial(self, tokens: int, step: int, subject: Subject, took_s: float) -> int:
        """Keep what a step measured that has ended, or was ended, if that is more than is kept; its complete rounds."""
        partial = self.partial_of(tokens, step)
        if not partial.exists():
            return 0
        document = json.loads(partial.read_text())
        partial.unlink()
        if _rounds_of(document) > self._kept(tokens, step):
            self.keep(tokens, step, subject, document, took_s)
        return _rounds_of(document)

    def _kept(self, tokens: int, step: int) -> int:
        """How many complete rounds of a step are kept."""
        file = self.file_of(tokens, step)
        return _rounds_of(_read(file)) if file.exists() else 0


def _rounds_of(document: Mapping[str, Any]) -> int:
    """How many complete rounds a step has of its prompt."""
    return sum(len(prompt["rounds"]) for prompt in document["prompts"])


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Make a folder if need be; a descriptor that keeps others out of it while any process has it.

    Raises SettingError where another one has it: a measurement, or a command that a killed one has left running.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield descriptor
    except BlockingIOError:
        raise SettingError(
            f"{folder} is in use: by another measurement, or by a command that one which was killed has left running; "
            "wait for its end, or end it"
        ) from None
    finally:
        os.close(descriptor)


def check_unchanged(results: Path, before: Mapping[str, Any], subject: Subject) -> None:
    """Raise SettingError where what was measured before, if anything, is something else."""
    changed = differences(before, subject.as_json()) if before else []
    if changed:
        raise SettingError(
            f"{results} has figures of something else: {'; '.join(changed)}; undo that, or give another RESULTS"
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
        if {"asked", "took_s", "subject", "prompts"} <= found.keys():
            return dict(found)
    except (ValueError, AttributeError):  # no JSON, or no object
        pass
    raise SettingError(f"{path} is no step of a measurement, or is damaged; remove it")
