"""Quantised weights that are no finite numbers, from files that are damaged: told by tensor and row."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lazyio.errors import ModelError
from lazyio.kernels.packed import PackedWeight

# Rows that are looked through at once for fp8 values that are no numbers.
_ROWS_AT_ONCE = 1 << 14


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


def _damaged(name: str, stored: str, shape: Sequence[int], what: str, row: int) -> ModelError:
    """`row` is counted through all experts."""
    place = f"row {row}"
    if len(shape) == 3:
        place = f"row {row % shape[-2]} of expert {row // shape[-2]}"
    return ModelError(
        f"{name} ({stored} {list(shape)}) has {what}, in {place}: the file is damaged, or was made from a model with "
        "such values; get it anew"
    )
