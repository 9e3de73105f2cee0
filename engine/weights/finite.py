"""Weights that are no finite numbers, from files that are damaged: told by tensor and row.

Values that are packed, or were, are looked through as they are read; all that are held as values once they are there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lazyio.engine.weights.plan import Step
from lazyio.engine.weights.trunk import Trunk
from lazyio.errors import ModelError
from lazyio.kernels.packed import PackedWeight

# Rows that are looked through at once for fp8 values that are no numbers.
_ROWS_AT_ONCE = 1 << 14
# Values whose extremes are found at once: indices of 32 bits do.
_VALUES_AT_ONCE = 1 << 30
# And looked at one by one, when they are known to have what is looked for.
_FEW_VALUES = 1 << 24


def check_values(values: torch.Tensor, name: str, stored: str, shape: Sequence[int], first: int) -> None:
    """Raise ModelError for a value that is no finite number. Waits for the device.

    `values` are those from number `first` on of a tensor of that name, stored type and shape.
    """
    finite = values.isfinite()
    if not bool(finite.all()):
        place = int((~finite).flatten().nonzero()[0])
        what = f"a value that is {values.flatten()[place].item()}"
        raise _damaged(name, stored, shape, what, (first + place) // shape[-1])


def check_packed(weight: PackedWeight, name: str) -> None:
    """Raise ModelError for a scale or a value that is no finite number. Waits for the device."""
    for plane in weight.planes[1:]:
        paired = plane.dtype == torch.int32 and plane is not weight.pointers()[1]
        floats = plane.view(torch.float16) if paired else plane
        if floats.is_floating_point() and not bool((finite := floats.isfinite()).all()):
            *expert, row, column = (~finite).nonzero()[0].tolist()
            what = f"a scale that is {floats[(*expert, row, column)].item()}"
            row *= weight.block[0] if weight.block else 1
            raise _damaged(name, weight.stored, weight.shape, what, sum(expert) * weight.shape[-2] + row)
    if weight.stored == "F8_E4M3":
        rows = weight.planes[0].view(torch.uint8).flatten(0, -2)
        for number, part in enumerate(torch.split(rows, _ROWS_AT_ONCE)):
            if bool((wrong := (part & 127) == 127).any()):
                row = number * _ROWS_AT_ONCE + int(wrong.nonzero()[0, 0])
                raise _damaged(name, weight.stored, weight.shape, "a value that is nan", row)


def check_loaded(trunk: Trunk) -> None:
    """Raise ModelError for a weight held as values of which one is no finite number. Waits for the device once."""
    held = {name: weight for name in trunk.forms if isinstance(weight := trunk.model.weight(name), torch.Tensor)}
    parts = {name: torch.split(weight.flatten(), _VALUES_AT_ONCE) for name, weight in held.items()}
    # One pass without memory of its own; what is no number is the least and the greatest of all.
    ends = [end.float() for values in parts.values() for part in values if len(part) for end in part.aminmax()]
    if ends and not bool(torch.stack(ends).isfinite().all()):
        for step in trunk.steps or ():
            if step.parameter in held:
                _check_step(step, held[step.parameter])


def _check_step(step: Step, weight: torch.Tensor) -> None:
    """Raise ModelError if what a step has filled of a weight has a value that is no finite number."""
    stored, first = step.part.stored, 0
    for values in torch.split(weight[step.part.into].flatten(), _FEW_VALUES):
        if not bool((finite := values.isfinite()).all()):
            place = int((~finite).nonzero()[0])
            value = values[place].item()
            if weight.dtype == torch.float16 and stored.dtype != "F16" and not math.isnan(value):
                raise ModelError(
                    f"{stored.path}: {stored.name} ({stored.dtype} {list(stored.shape)}) has a value that float16 "
                    "does not hold: set dtype to bfloat16 or float32"
                )
            # A change may move rows, and a vector has none.
            told = len(stored.shape) > 1 and step.part.change is None
            row = (first + place) // stored.shape[-1] if told else None
            name = f"{stored.path}: {stored.name}"
            raise _damaged(name, stored.dtype, stored.shape, f"a value that is {value}", row)
        first += len(values)


def _damaged(name: str, stored: str, shape: Sequence[int], what: str, row: int | None) -> ModelError:
    """`row` is counted through all experts, and None where there is none to be told."""
    place = "" if row is None else f", in row {row}"
    if row is not None and len(shape) == 3 and shape[-2] > 1:
        place = f", in row {row % shape[-2]} of expert {row // shape[-2]}"
    return ModelError(
        f"{name} ({stored} {list(shape)}) has {what}{place}: the file is damaged, or was made from a model with such "
        "values; get it anew"
    )
