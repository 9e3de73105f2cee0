"""One command in a process of its own, and the document that it gives."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import IO, Any

from lazyio.bench.abba.plan import OUT_FILE
from lazyio.errors import RunFailed

#: The variable that names the file which a command may write its document to.
OUT_VARIABLE = "ABBA_OUT"
_LAST_BYTES = 2000  # of what a failed command said
_LONGEST_BYTES = 256 << 20  # of a document
_LAUNCH_S = 20.0  # for a process to be made
#: Seconds that a command which takes too long is given to end by itself, before it is ended.
GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A command that succeeded."""

    document: dict[str, Any]
    wall_s: float  # from before the process was made until it ended


def ask(command: Sequence[str], env: Mapping[str, str], timeout_s: float | None, keep: int) -> Answer:
    """Run a command and take its document: from the file that it was told of, else the last line of its output that
    is an object, else all of its output.

    `keep` is a descriptor that the process inherits, so that what it locks stays locked while any process is left.
    Raises RunFailed where the command can't be started, fails, takes longer than `timeout_s` or gives no document.
    """
    with tempfile.TemporaryDirectory(prefix="abba-") as folder:
        out, output = Path(folder) / "out.json", Path(folder) / "output"
        words = [word.replace(OUT_FILE, str(out)) for word in command]
        with output.open("w+b") as said, tempfile.TemporaryFile(dir=folder) as complained:
            wall_s = _run(words, {**env, OUT_VARIABLE: str(out)}, timeout_s, keep, said, complained)
            document = _document(out) if out.exists() else _printed(output)
            if document is None:
                raise RunFailed(
                    f"{_line(words)} gave no JSON object, neither on its output nor in the file that {OUT_VARIABLE} "
                    f"names{_last(said, complained)}"
                )
    return Answer(document, wall_s)


def do(command: Sequence[str], env: Mapping[str, str], timeout_s: float | None, keep: int) -> None:
    """Run a command whose output is of no interest. Raises RunFailed as `ask` does."""
    with tempfile.TemporaryFile() as said:
        _run(command, env, timeout_s, keep, said, said)


def _run(
    words: Sequence[str],
    env: Mapping[str, str],
    timeout_s: float | None,
    keep: int,
    said: IO[bytes],
    complained: IO[bytes],
) -> float:
    """Seconds that a command took which ended with status 0. Nothing that it started in its session outlives it."""
    child = _Child(words, env, keep, said, complained)
    try:
        child.start()
        in_time = child.ended(timeout_s)
        if not in_time:
            child.signal(signal.SIGTERM)
            child.ended(GRACE_S)
    finally:
        status = child.collect()
    if isinstance(status, OSError):
        raise RunFailed(f"can't run {_line(words)}: {status.strerror or status}")
    if not in_time:
        raise RunFailed(f"{_line(words)} took longer than {timeout_s:,.1f} s and was ended{_last(said, complained)}")
    if status:
        how = (
            f"was ended by signal {-status} ({signal.strsignal(-status)})"
            if status < 0
            else f"ended with status {status}"
        )
        raise RunFailed(f"{_line(words)} {how}{_last(said, complained)}")
    return child.wall_s


class _Child:
    """A process, started and waited for in a thread.

    So its end is noticed at once, a wait can be cut short, and an interrupt, which reaches the main thread alone, never
    comes between the process and its being known.
    """

    def __init__(
        self, words: Sequence[str], env: Mapping[str, str], keep: int, said: IO[bytes], complained: IO[bytes]
    ) -> None:
        self._words, self._env, self._keep = words, {**os.environ, **env}, keep
        self._said, self._complained = said, complained
        self._thread = Thread(target=self._run, name="abba-child", daemon=True)
        self._launched, self._over = Event(), Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._refused: OSError | None = None
        self._begun = False
        self.wall_s = 0.0

    def start(self) -> None:
        self._begun = True
        self._thread.start()

    def ended(self, timeout_s: float | None) -> bool:
        """Whether the process ended within that time, or never was one."""
        return self._over.wait(timeout_s)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and all that it started in its session."""
        if self._begun and self._launched.wait(_LAUNCH_S) and self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def collect(self) -> int | OSError | None:
        """End what is left of it; its status, or why there never was a process; None where it was not begun."""
        # The number of a process is not given to another one before it was waited for here.
        self.signal(signal.SIGKILL)
        return self._process.wait() if self._process is not None else self._refused

    def _run(self) -> None:
        start = time.perf_counter()
        try:
            self._process = subprocess.Popen(
                self._words,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._complained,
                start_new_session=True,
                pass_fds=(self._keep,),
            )
            self._launched.set()
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        except OSError as error:
            self._refused = error
        self.wall_s = time.perf_counter() - start
        self._launched.set()
        self._over.set()


def _document(path: Path) -> dict[str, Any] | None:
    if path.stat().st_size > _LONGEST_BYTES:
        raise RunFailed(
            f"a document of {path.stat().st_size:,} bytes is longer than the {_LONGEST_BYTES:,} that it may"
        )
    return _object(path.read_bytes())


def _printed(output: Path) -> dict[str, Any] | None:
    if (whole := _document(output)) is not None:
        return whole
    lines = reversed(output.read_bytes().splitlines())
    return next((found for line in lines if line.lstrip().startswith(b"{") and (found := _object(line))), None)


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _line(words: Sequence[str]) -> str:
    line = " ".join(words)
    return f"`{line if len(line) <= 200 else line[:200] + '...'}`"


def _last(*files: IO[bytes]) -> str:
    """What was said last: of the first that has anything, complaints before output."""
    for file in reversed(files):
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - _LAST_BYTES))
        if text := file.read().decode(errors="replace").strip():
            return f"; it said last:\n{text}"
    return "; it said nothing"
