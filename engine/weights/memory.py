"""Whether a model fits, before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lazyio.engine.weights.trunk import Trunk, lack_of
from lazyio.errors import NeverFits
from lazyio.host import available_memory_bytes
from lazyio.kernels.packed import PACKED_TYPES
from lazyio.units import format_bytes


def check_memory(trunk: Trunk, passing_bytes: int) -> None:
    """Raise NeverFits if weights, and what using and loading them takes, are more than the device or host has left.

    `passing_bytes` is what loading takes on either for a while.
    """
    device = trunk.device
    if device.type == "cuda":
        _check(trunk, passing_bytes, left_on(device), f"device {device}", "another device")
        _check_host(passing_bytes, available_memory_bytes())
    else:
        _check(trunk, passing_bytes, available_memory_bytes(), "the host", "a host with more memory")


def _check(trunk: Trunk, passing: int, left: int, where: str, instead: str) -> None:
    needed = trunk.nbytes + passing
    if needed <= left:
        return
    scratch = f"{format_bytes(trunk.scratch_bytes)} to expand the largest matrix, " if trunk.scratch_bytes else ""
    raise NeverFits(
        f"the model needs {format_bytes(needed)} on {where} (for weights {trunk}, {scratch}"
        f"{format_bytes(passing)} while they are loaded), which has {format_bytes(left)} left; free some of it, or use "
        f"{', or '.join([*_smaller(trunk), instead])}"
    )


def _smaller(trunk: Trunk) -> Iterator[str]:
    """Settings and files that would take less."""
    can_pack = not lack_of(trunk.device)
    if trunk.note and can_pack:
        yield "weights packed"
    if trunk.steps is None:
        if can_pack and not trunk.packed_bytes:
            yield "trunk Q4_0"
        yield "fewer layers"
    if any(form.why for form in trunk.forms.values()):
        yield f"a file of types that need not be expanded: {', '.join(sorted(PACKED_TYPES))}"
    if trunk.dtype.itemsize > 2 and 2 * trunk.packed_bytes < trunk.weights_bytes:
        yield "dtype bfloat16"


def _check_host(passing: int, left: int) -> None:
    if passing > left:
        raise NeverFits(
            f"loading the model takes {format_bytes(passing)} on the host for a while, which has {format_bytes(left)} "
            "left; free some of it, or use a host with more memory"
        )


def left_on(device: torch.device) -> int:
    """Bytes that torch can still have: what is free on the device, and what it holds already and does not use."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
