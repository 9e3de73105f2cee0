"""Where a model runs and in which precision, and what memory there is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lazyio.engine.models.base import Model
from lazyio.engine.weights.memory import left_on
from lazyio.engine.weights.trunk import check_device
from lazyio.errors import NeverFits, SettingError
from lazyio.host import available_memory_bytes
from lazyio.units import format_bytes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def device_of(asked: str | torch.device | None) -> torch.device:
    """The device that was asked for; without that, a CUDA device if there is one, else the CPU.

    Raises SettingError for another kind of device, Unsupported where it is not there.
    """
    if asked is None:
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(asked)
    except (RuntimeError, TypeError) as error:
        raise SettingError(f"device is {asked!r}; it can be cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index is not None):
        raise SettingError(f"device is {str(device)!r}; it can be cpu, cuda or cuda:N")
    check_device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def dtype_of(asked: str | torch.dtype | None, config: Mapping[str, Any], device: torch.device) -> torch.dtype:
    """The dtype that was asked for; without that, float32 on the CPU and the checkpoint's own on a CUDA device.

    A checkpoint that does not name one of float32, bfloat16 and float16 counts as bfloat16. Raises SettingError for
    another.
    """
    if asked is None:
        own = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
        return torch.float32 if device.type == "cpu" else DTYPES.get(own, torch.bfloat16)
    name = str(asked).removeprefix("torch.")
    if name not in DTYPES:
        raise SettingError(f"dtype is {name!r}; it can be {', '.join(DTYPES)}")
    return DTYPES[name]


def check_state(model: Model, capacity: int) -> None:
    """Raise NeverFits if the state of a sequence of `capacity` tokens is more than there is memory for."""
    needed = model.new_state(capacity, torch.device("meta")).nbytes
    what = f"the state of a sequence of {capacity} tokens"
    check_memory(needed, what, model.device, "shorten the prompt, or lower max_tokens")


def check_memory(
    needed_bytes: int,
    what: str,
    device: torch.device,
    advice: str,
    *,
    held_bytes: int = 0,
    weights_bytes: int = 0,
) -> None:
    """Raise NeverFits, which names what takes them and gives the advice, if a device does not have so many bytes.

    `held_bytes` are those that it has for them already, `weights_bytes` those of weights that are still to be loaded.
    """
    free = max(0, free_bytes(device) + held_bytes - weights_bytes)
    beside = f" beside weights of {format_bytes(weights_bytes)}" if weights_bytes else ""
    if needed_bytes > free:
        raise NeverFits(
            f"{what} takes {format_bytes(needed_bytes)}, and {format_bytes(free)} of memory can be had on {device}"
            f"{beside}: {advice}"
        )


def free_bytes(device: torch.device) -> int:
    """Memory that can still be had on a device."""
    return available_memory_bytes() if device.type == "cpu" else left_on(device)
