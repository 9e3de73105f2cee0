"""When a device got how far, without waiting for it meanwhile."""

from __future__ import annotations

import time
from itertools import pairwise

import torch


class Moments:
    """Marks in the order of a device's work; on a CPU, where work is done when it returns, plain times."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def mark(self) -> None:
        """Mark the end of all work launched so far."""
        if self._device.type != "cuda":
            self._times.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append(event)

    def wait(self) -> None:
        """Wait until the device has done all that was launched."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def seconds(self) -> list[float]:
        """Between one mark and the next, once the device was waited for."""
        if self._device.type != "cuda":
            return [end - start for start, end in pairwise(self._times)]
        return [1e-3 * start.elapsed_time(end) for start, end in pairwise(self._events)]
