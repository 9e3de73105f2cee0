"""Progress for people, without a thread that would take the interpreter from what is being timed."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Watch:
    """Shows what is being measured: a bar on a terminal, a line for each finished step elsewhere."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, auto_refresh=False, transient=True)
        self._task = self._bar.add_task("", total=steps)
        self._live = console.is_terminal

    def __enter__(self) -> Self:
        if self._live:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._bar.stop()

    def begin(self, what: str) -> None:
        """Say what comes next."""
        if self._live:
            self._bar.update(self._task, description=what, refresh=True)

    def done(self, what: str) -> None:
        """One step is finished; `what` says how it went."""
        if self._live:
            self._bar.update(self._task, advance=1, refresh=True)
        else:
            self.note(what)

    def mark(self) -> None:
        """Remember this step, so that `step_back` can return to it."""
        self._marked = self._bar.tasks[0].completed

    def step_back(self, why: str) -> None:
        """What was done since `mark` will be done again."""
        self._bar.update(self._task, completed=self._marked)
        self.note(why)

    def note(self, what: str) -> None:
        """Say something that stays on the screen."""
        self._console.print(what, highlight=False, markup=False, soft_wrap=True)
