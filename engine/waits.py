"""How long computing stood still for rows, told when somebody asks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Two events, between which a device stood still.
Stall = tuple[torch.cuda.Event, torch.cuda.Event]


@dataclass(frozen=True, slots=True)
class Wait:
    """One ubatch's: of the host, or, which tells it better, what a device stood still between pairs of events."""

    host_s: float = 0.0
    stalls: tuple[Stall, ...] = ()

    def seconds(self) -> float:
        """The time. Waits until the device is past the events."""
        if not self.stalls:
            return self.host_s
        for _, end in self.stalls:
            end.synchronize()
        return sum(float(start.elapsed_time(end)) for start, end in self.stalls) / 1e3
