"""Which stored tensor goes where, settled from headers alone before anything is read."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lazyio.engine.models import Model
from lazyio.engine.weights.source import Part, Source
from lazyio.errors import ModelError, Unsupported
from lazyio.ple.codec import decode
from lazyio.ple.dtypes import TYPES

_SHOWN = 4  # of each kind of problem


@dataclass(frozen=True, slots=True)
class Step:
    """One stored tensor to be read into one parameter."""

    parameter: str
    part: Part

    @property
    def size_bytes(self) -> int:
        """Bytes to be read."""
        return self.part.stored.size_bytes or 0


def shapes_of(model: Model) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters that are to be filled, by name; tied ones are left out."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: tuple(parameter.shape) for name, parameter in named if name not in model.tied}


def plan(source: Source, model: Model) -> list[Step]:
    """The steps that fill every parameter, file by file and in the order of each file.

    Raises ModelError if the checkpoint lacks something, has something else or has it in another shape; the message
    lists the first few of each.
    """
    shapes = shapes_of(model)
    steps: list[Step] = []
    missing: list[str] = []
    misshapen: list[str] = []
    for name, shape in shapes.items():
        try:
            parts = source.parts(name, shape)
        except ModelError as error:
            missing.append(str(error).removeprefix(f"{source.path} lacks "))
            continue
        misshapen += _misfits(name, shape, parts)
        steps += [Step(name, part) for part in parts]
    left_over = source.left_over([*shapes, *model.tied])
    if missing or misshapen or left_over:
        raise ModelError(_complaint(source, len(shapes), missing, misshapen, left_over))
    return sorted(steps, key=lambda step: (step.part.stored.path, step.part.stored.offset))


def _misfits(name: str, shape: tuple[int, ...], parts: Sequence[Part]) -> list[str]:
    found: list[str] = []
    filled = 0
    for part in parts:
        wanted = _selected(shape, part.into)
        filled += math.prod(wanted)
        stored = part.stored
        if _without_ones(wanted) != _without_ones(stored.shape):
            found.append(f"{stored.name} is {list(stored.shape)} and should be {list(wanted)} for {name}")
        elif not _decodes(stored.dtype):
            found.append(f"{stored.name} is of type {stored.dtype}, which can't be read as weights: take another file")
    if not found and filled != math.prod(shape):
        found.append(f"{name} has {math.prod(shape)} values, of which {filled} are stored")
    return found


def _selected(shape: tuple[int, ...], into: tuple[slice, ...]) -> tuple[int, ...]:
    cut = tuple(len(range(*each.indices(size))) for each, size in zip(into, shape, strict=False))
    return cut + shape[len(cut) :]


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


@functools.cache
def _decodes(dtype: str) -> bool:
    try:
        decode(np.zeros(TYPES[dtype].block_bytes, np.uint8), dtype)
    except (KeyError, Unsupported):
        return False
    return True


def _complaint(source: Source, parameters: int, missing: list[str], misshapen: list[str], extra: list[str]) -> str:
    if len(missing) == parameters:
        return (
            f"{source.path} has none of the {parameters} parameters of the model that its configuration describes, "
            f"such as {missing[0]}; give a folder with all of the model's files, or have random values put in their "
            "place with load_format 'dummy'"
        )
    kinds = {
        f"lacks ({len(missing)})": missing,
        f"does not fit ({len(misshapen)})": misshapen,
        f"is of no parameter ({len(extra)})": extra,
    }
    listed = (f"{kind}: {_first(problems)}" for kind, problems in kinds.items() if problems)
    return f"{source.path} is not the model that its configuration describes; {'; '.join(listed)}"


def _first(problems: list[str]) -> str:
    return ", ".join(problems[:_SHOWN]) + (", ..." if len(problems) > _SHOWN else "")
