"""What was measured so far, in a file that survives whatever ends the measuring.

A line is a JSON object. The first has the plan, and nothing is added for another plan. Others say that measuring began
(`sitting`), that a round of a cell is complete (`round`), that a cell gave different outputs (`void`) or could not be
measured (`failed`), or that it is to be measured from its start (`again`). A line is written whole or not at all; one
that a sudden end cut short is taken off. The file is locked while a process of a measurement lives that uses it.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lazyio.bench.abba.plan import differences
from lazyio.errors import SettingError

_FORMAT = 1
_TOLD = 6  # changes that an error names
_ATTEMPTS = 10  # to lock the file
_PAUSE_S = 0.1
_BEGINNING = b'{"event": "plan", "format": '


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one arm."""

    arm: str
    again: bool  # the second run of the reference in its round
    metrics: Mapping[str, float]
    equal: Mapping[str, str]  # what the runs of a cell must agree on, by its path
    wall_s: float  # of the command's process
    took_s: float  # with all that came before it
    started: str  # UTC
    cold_pages: int | None  # looked at, of which none was in memory; None where nothing was to be cold
    before: Mapping[str, Any]  # the machine
    after: Mapping[str, Any]

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"{self.arm} (again)" if self.again else self.arm


@dataclass(slots=True)
class CellRecord:
    """A cell so far."""

    rounds: list[list[Run]] = field(default_factory=list)  # complete ones
    sittings: list[int] = field(default_factory=list)  # the place of that in which each round was measured
    void: str | None = None  # why its figures mean nothing
    failed: str | None = None  # why it could not be measured when that was last tried

    @property
    def runs(self) -> list[Run]:
        """Of all complete rounds."""
        return [run for turns in self.rounds for run in turns]


class Journal:
    """The file, what is in it, and adding to it."""

    def __init__(self, path: Path, plan: Mapping[str, Any]) -> None:
        """Go on with the file, or begin it. `plan` is the JSON form of a plan.

        Raises SettingError for a file that is no journal or is damaged, of another plan, or in use; OSError where it
        can't be opened or written.
        """
        self.path = path
        self.cells: dict[str, CellRecord] = {name: CellRecord() for name in plan["cells"]}
        self.sittings: list[dict[str, Any]] = []  # the machine of each
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            self._lock()
            events = self._events()
            if not events:
                self._add("plan", format=_FORMAT, plan=plan)
            elif changed := differences(events[0]["plan"], plan):
                more = f"; and {len(changed) - _TOLD} more" if len(changed) > _TOLD else ""
                raise SettingError(
                    f"{path} has the figures of another definition: {'; '.join(changed[:_TOLD])}{more}; undo that, or "
                    "give another --state"
                )
            for event in events[1:]:
                self._take(event)
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    @property
    def lock(self) -> int:
        """A descriptor; the file stays locked while any process has it."""
        return self._descriptor

    def begin(self, machine: Mapping[str, Any], started: str) -> None:
        """Measuring begins, on that machine."""
        self._note("sitting", machine=machine, started=started)

    def add_round(self, cell: str, runs: Sequence[Run]) -> None:
        """A round is complete."""
        self._note("round", cell=cell, runs=[asdict(run) for run in runs])

    def add_void(self, cell: str, reason: str) -> None:
        """Outputs of a cell differ."""
        self._note("void", cell=cell, reason=reason)

    def add_failed(self, cell: str, reason: str) -> None:
        """A cell could not be measured further."""
        self._note("failed", cell=cell, reason=reason)

    def again(self, cell: str) -> None:
        """What there is of a cell counts no more. Raises SettingError for a cell that is not in the plan."""
        if cell not in self.cells:
            raise SettingError(f"there is no cell {cell!r} to measure again; there are {', '.join(self.cells)}")
        self._note("again", cell=cell)

    def _lock(self) -> None:
        for _ in range(_ATTEMPTS):
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(_PAUSE_S)  # what was just killed takes a moment to be gone
        raise SettingError(
            f"{self.path} is in use: by another measurement, or by a command that one which was killed has left "
            "running; wait for its end, or end it"
        )

    def _events(self) -> list[dict[str, Any]]:
        content = self.path.read_bytes()
        if content and not content[: len(_BEGINNING)] == _BEGINNING[: len(content)]:
            raise SettingError(f"{self.path} is no state of a comparison, and is left as it is; give another --state")
        whole = content[: content.rfind(b"\n") + 1]
        os.ftruncate(self._descriptor, len(whole))
        try:
            events: list[dict[str, Any]] = [json.loads(line) for line in whole.splitlines()]
        except ValueError as error:
            raise SettingError(f"{self.path} is damaged: {error}; give another --state") from None
        if events and events[0]["format"] != _FORMAT:
            raise SettingError(f"{self.path} is of format {events[0]['format']}, not {_FORMAT}; give another --state")
        return events

    def _note(self, event: str, **more: Any) -> None:
        self._take(self._add(event, **more))

    def _take(self, event: dict[str, Any]) -> None:
        """Have an event count, whether it is new or from the file."""
        if event["event"] == "sitting":
            self.sittings.append(event["machine"])
            for record in self.cells.values():
                record.failed = None  # it is tried again
            return
        record = self.cells[event["cell"]]
        match event["event"]:
            case "round":
                record.rounds.append([Run(**run) for run in event["runs"]])
                record.sittings.append(len(self.sittings) - 1)
            case "void":
                record.void = event["reason"]
            case "failed":
                record.failed = event["reason"]
            case "again":
                self.cells[event["cell"]] = CellRecord()

    def _add(self, event: str, **more: Any) -> dict[str, Any]:
        """Write a line, or leave the file as it was. Raises OSError."""
        line = json.dumps({"event": event, **more}).encode() + b"\n"
        before = os.fstat(self._descriptor).st_size
        try:
            written = 0
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
            os.fsync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, before)
            raise OSError(error.errno, f"{error.strerror}; what was measured before is kept", str(self.path)) from None
        result: dict[str, Any] = json.loads(line)
        return result
