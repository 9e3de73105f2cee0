"""Whether a model fits, before anything of it is loaded."""

from __future__ import annotations

import torch

from lazyio.errors import NeverFits
from lazyio.host import available_memory_bytes
from lazyio.units import format_bytes


def check_memory(weights_bytes: int, passing_bytes: int, device: torch.device, dtype: torch.dtype) -> None:
    """Raise NeverFits if weights, and what loading them takes for a while, are more than the device or host has left.

    `passing_bytes` is what loading takes on either beside the weights. `dtype` is that of the weights, for the message.
    """
    if device.type == "cuda":
        _check(weights_bytes, passing_bytes, left_on(device), f"device {device}", dtype, "another device")
        _check(0, passing_bytes, available_memory_bytes(), "the host", dtype, "a host with more memory")
    else:
        _check(weights_bytes, passing_bytes, available_memory_bytes(), "the host", dtype, "a host with more memory")


def _check(weights: int, passing: int, left: int, where: str, dtype: torch.dtype, instead: str) -> None:
    if weights + passing <= left:
        return
    name = str(dtype).removeprefix("torch.")
    smaller = "dtype bfloat16, which takes half" if dtype.itemsize > 2 and weights else ""
    raise NeverFits(
        f"the model needs {format_bytes(weights + passing)} on {where} ({format_bytes(weights)} for weights as {name}, "
        f"{format_bytes(passing)} while they are loaded), which has {format_bytes(left)} left; free some of it, or use "
        f"{', or '.join(filter(None, (smaller, instead)))}"
    )


def left_on(device: torch.device) -> int:
    """Bytes that torch can still have: what is free on the device, and what it holds already and does not use."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
