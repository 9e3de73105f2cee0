"""What `lazyio bench` is asked to do, checked as a whole before anything is measured."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lazyio import settings
from lazyio.bench.rounds import Rules
from lazyio.bench.runs import Arm
from lazyio.bench.workload import DEFAULT_TOKENS, Cut, Workload, from_ids_file, from_text, from_trace, uniform
from lazyio.errors import SettingError
from lazyio.ple.spec import TableSpec

DEFAULT_MODES = "on-bare,on,on-direct,uring"
DEFAULT_UBATCH = 2048
DEFAULT_STEPS = 500
DEFAULT_LIMIT_READS = 32_768

# Either of the two may be given; the second is why.
_EXCLUDE = (
    ("--ids", "--uniform", "both say which tokens are asked for"),
    ("--ids", "--trace", "both say which rows are asked for"),
    ("--uniform", "--trace", "both say which rows are asked for"),
    ("--trace", "--tokens", "a trace says itself which rows are asked for"),
    ("--trace", "--ubatch", "a trace is cut already"),
    ("--decode", "--tokens", "decoding goes in steps of one token: use --steps"),
    ("--decode", "--ubatch", "decoding goes in steps of one token"),
    ("--decode", "--limit-reads", "there the limit reads what each step needs"),
    *(
        ("--pipeline", other, "a pipeline is that of one cold prompt, in rounds of its own")
        for other in ("--warm", "--preload", "--decode", "--trace", "--aa", "--min-iops", "--max-repeats")
    ),
    ("--preload", "--cold", "a cold table has none of its rows in memory"),
    ("--preload", "--warm", "a warm table has all of its rows in memory"),
)
_NEED = (
    ("--steps", "--decode"),
    ("--pause", "--min-iops"),
    ("--tensor", "PATH"),
    ("--compute-us-per-token", "--pipeline"),
    ("--spin", "--pipeline"),
)
# The device's limit is measured in cold rounds alone.
_OF_THE_LIMIT = ("--min-iops", "--limit-reads")


@dataclass(frozen=True, slots=True)
class Request:
    """The options of the command, None where one was not given."""

    path: Path | None = None
    tensor: str | None = None
    cold: bool = False
    warm: bool = False
    preload: str | None = None
    modes: str = DEFAULT_MODES
    aa: str | None = None
    rounds: int = 5
    ids: Path | None = None
    uniform: bool = False
    trace: Path | None = None
    tokens: int | None = None
    ubatch: int | None = None
    decode: bool = False
    steps: int | None = None
    seed: int = 0
    workers: str | None = None
    direct_io: str | None = None
    queue_depth: int | None = None
    block_bytes: str | None = None
    verify: int | None = None
    strict: bool = False
    limit_reads: int | None = None
    min_iops: float | None = None
    max_repeats: int | None = None
    pause: float | None = None
    pipeline: bool = False
    compute_us_per_token: float | None = None
    spin: bool = False
    demo_dir: Path | None = None
    json: Path | None = None
    plot: Path | None = None

    def check(self) -> None:
        """Raise SettingError for options that contradict each other, or of which one would be ignored."""
        given = {f"--{name.replace('_', '-')}" for name in self.__slots__ if getattr(self, name) not in (None, False)}
        if self.path is not None:
            given.add("PATH")
        for one, other, why in _EXCLUDE:
            if {one, other} <= given:
                raise SettingError(f"{one} and {other} contradict each other: {why}")
        for one, needed in _NEED:
            if one in given and needed not in given:
                raise SettingError(f"{one} has no effect without {needed}")
        if self.pipeline and not (self.compute_us_per_token or 0) > 0:
            raise SettingError("--pipeline needs --compute-us-per-token: what a trunk takes with all rows in memory")
        if {"PATH", "--demo-dir"} <= given:
            raise SettingError("--demo-dir has no effect where PATH names a table")
        if "cold" not in self.sections and (ignored := sorted(given.intersection(_OF_THE_LIMIT))):
            raise SettingError(
                f"{ignored[0]} has no effect without --cold: the device's limit is measured in cold rounds only"
            )
        if self.preload and self.max_repeats is not None:
            raise SettingError("--max-repeats has no effect with --preload: preloaded rounds stand as they are")
        if self.preload not in (None, "hot-set"):
            raise SettingError(f"--preload is {self.preload!r}; it can be hot-set")
        if self.preload and self.direct_io == "on":
            raise SettingError(
                "--preload and --direct-io on contradict each other: direct reads do not see the page cache"
            )
        for path in (self.json, self.plot):
            check_writable(path)
        if self.plot is not None and self.plot.suffix != ".png":
            raise SettingError(f"--plot is {self.plot}; the picture is a .png file")

    @property
    def sections(self) -> tuple[str, ...]:
        """Temperatures to measure at, in order."""
        if self.preload:
            return ("preloaded",)
        return (("cold",) if self.cold or not self.warm else ()) + (("warm",) if self.warm else ())

    @property
    def rules(self) -> Rules:
        """Which rounds count."""
        asked: dict[str, Any] = {"max_repeats": self.max_repeats, "min_iops": self.min_iops, "pause_s": self.pause}
        return Rules(self.rounds, **{name: value for name, value in asked.items() if value is not None})

    def arms(self) -> tuple[list[Arm], Arm]:
        """The arms in the order named, and the one that runs twice. Raises SettingError."""
        modes = [settings.resolve("lazy_mode", word) for word in self.modes.split(",") if word.strip()]
        if not modes or len(set(modes)) < len(modes):
            raise SettingError(f"--modes is {self.modes!r}; name one mode or more, separated by commas, each once")
        shared = {
            "direct_io": "off" if self.preload else self.direct_io,
            "queue_depth": self.queue_depth,
            "block_bytes": self.block_bytes,
            "verify": None if self.verify is None else settings.resolve("verify", self.verify),
        }
        workers = (
            [settings.resolve("workers", text) for text in self.workers.split(",")] if self.workers is not None else []
        )
        if len(set(workers)) < len(workers):
            raise SettingError(f"--workers is {self.workers!r}; name each number once")
        for name, value in {**shared, "workers": self.workers}.items():
            if value is not None and not self.preload and not any(settings.applies(name, mode) for mode in modes):
                raise SettingError(f"--{name.replace('_', '-')} has no effect in --modes {self.modes}")
        arms = [arm for mode in modes for arm in _arms_of(mode, shared, workers)]
        for arm in arms:
            settings.check(arm.mode, arm.settings)
        twice = [arm for arm in arms if self.aa in (None, arm.label, arm.mode)]
        if not twice:
            raise SettingError(f"--aa is {self.aa!r}, which is not among {', '.join(arm.label for arm in arms)}")
        return arms, twice[-1]

    def workload(self, spec: TableSpec) -> Workload:
        """The rows to ask of a table. Raises what the makers of workloads raise."""
        if self.trace is not None:
            usual = DEFAULT_STEPS if self.decode else None
            return from_trace(spec, str(self.trace), self.steps, usual, self.decode)
        tokens, usual = (self.steps, DEFAULT_STEPS) if self.decode else (self.tokens, DEFAULT_TOKENS)
        cut = Cut(1, decode=True) if self.decode else Cut(self.ubatch or DEFAULT_UBATCH)
        if self.ids is not None:
            return from_ids_file(spec, str(self.ids), tokens, usual, cut)
        text = None if self.uniform else from_text(spec, tokens or usual, cut)
        return text or uniform(spec, tokens or usual, cut, self.seed)


def check_writable(path: Path | None) -> None:
    """Raise SettingError if no file can be written there; None is no file."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise SettingError(f"can't write {path}: there is no folder {path.parent}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise SettingError(f"can't write {path}: it is a folder, or this user may not write there")


def _arms_of(mode: str, shared: Mapping[str, Any], workers: list[int]) -> list[Arm]:
    """One arm, or one a number of workers for a mode that has workers."""
    own = {name: value for name, value in shared.items() if value is not None and settings.applies(name, mode)}
    if not workers or not settings.applies("workers", mode):
        return [Arm(mode, mode, own)]
    label = f"{mode}/{{}}" if len(workers) > 1 else mode
    return [Arm(label.format(count), mode, {**own, "workers": count}) for count in workers]
