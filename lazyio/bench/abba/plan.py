"""What is compared: cells, arms, metrics, and the commands that come of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lazyio.bench.abba.paths import Place

#: The one cell of a comparison whose workload has no settings.
ONLY_CELL = "all"
#: Stands in a command for the file that it may write its document to; no word of a command can have it otherwise.
OUT_FILE = "\0"


@dataclass(frozen=True, slots=True)
class Metric:
    """A number that every run gives: the median of what its command's document has at that place."""

    name: str
    place: Place
    better: str | None  # lower | higher; None for one that is shown and not judged


@dataclass(frozen=True, slots=True)
class ColdTable:
    """A table that no page of may be in memory when a command starts."""

    model: str
    tensor: str | None


@dataclass(frozen=True, slots=True)
class Job:
    """What one run of an arm in a cell is; the words of the command may hold OUT_FILE."""

    command: tuple[str, ...]
    env: Mapping[str, str]  # on top of the environment
    before_each: tuple[str, ...] | None
    cold: ColdTable | None

    def as_json(self) -> dict[str, Any]:
        """The form that is compared when a run is gone on with."""
        cold = None if self.cold is None else {"model": self.cold.model, "tensor": self.cold.tensor}
        words = [word.replace(OUT_FILE, "{out}") for word in self.command]
        before = None if self.before_each is None else list(self.before_each)
        return {"command": words, "env": dict(self.env), "before_each": before, "cold": cold}


@dataclass(frozen=True, slots=True)
class Plan:
    """A comparison. Arms are in the order in which they take turns; the reference has a second run in each round."""

    jobs: Mapping[str, Mapping[str, Job]]  # by cell, then by arm
    reference: str
    metrics: tuple[Metric, ...]
    equal: tuple[Place, ...]  # what all runs of a cell must agree on
    rounds: int
    timeout_s: float | None  # of one command

    @property
    def cells(self) -> list[str]:
        """Their names."""
        return list(self.jobs)

    @property
    def arms(self) -> list[str]:
        """Their names."""
        return list(next(iter(self.jobs.values())))

    def as_json(self) -> dict[str, Any]:
        """Everything that the figures depend on."""
        return {
            "cells": {cell: {arm: job.as_json() for arm, job in jobs.items()} for cell, jobs in self.jobs.items()},
            "reference": self.reference,
            "metrics": {metric.name: {"path": str(metric.place), "better": metric.better} for metric in self.metrics},
            "equal": [str(place) for place in self.equal],
            "rounds": self.rounds,
            "timeout_s": self.timeout_s,
        }


def differences(old: Any, new: Any) -> list[str]:
    """What changed from one plan's JSON form to another's: 'rounds was 6 and is 8', a line for each place."""
    before, after = dict(_leaves("", old)), dict(_leaves("", new))
    names = list(dict.fromkeys((*before, *after)))
    return [
        f"{name} was {before.get(name, 'not there')} and is {after.get(name, 'not there')}"
        for name in names
        if before.get(name) != after.get(name)
    ] or (["the order of its parts changed"] if _ordered(old) != _ordered(new) else [])


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _leaves(f"{name}.{key}" if name else key, below)
    elif value is not None:
        yield name, repr(value)


def _ordered(value: Any) -> list[str]:
    return [name for name, _ in _leaves("", value)]
