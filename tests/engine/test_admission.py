"""Windows: a contiguous one a lane, and who has to wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lazyio.engine import place as place_module
from lazyio.engine.admission import Windows
from lazyio.errors import NeverFits, NoRoom

PROMPT = np.arange(30)


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Any]) -> Any:
    return tiny("qwen3_5").model


@pytest.fixture
def memory(model: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """`memory(2.5)`: what can be had is so many times the state of a prompt and its reply."""
    one = model.new_state(40, torch.device("meta")).nbytes
    return lambda times: monkeypatch.setattr(place_module, "available_memory_bytes", lambda: int(times * one))


def test_lanes_are_taken_and_given_back(model: Any) -> None:
    windows = Windows(model, 2)
    seats = [windows.seat(PROMPT, 10) for _ in range(2)]
    assert [seat.state.capacity for seat in seats] == [40, 40]
    assert seats[0].state is not seats[1].state
    with pytest.raises(NoRoom, match="all 2 lanes are taken: wait for one, or raise parallel"):
        windows.seat(PROMPT, 10)
    windows.release(seats[0])
    assert len(windows) == 1
    windows.seat(PROMPT, 10)


def test_what_has_no_room_beside_others_waits(model: Any, memory: Callable[[float], None]) -> None:
    windows = Windows(model, 3)
    seat = windows.seat(PROMPT, 10)
    memory(0.9)
    with pytest.raises(NoRoom, match="the state of a sequence of 40 tokens takes"):
        windows.seat(PROMPT, 10)
    windows.release(seat)
    with pytest.raises(NeverFits, match="lower max_tokens"):
        windows.seat(PROMPT, 10)
    assert len(windows) == 0


def test_every_lane_may_rely_on_its_share(model: Any, memory: Callable[[float], None]) -> None:
    windows = Windows(model, 3)
    memory(3)
    windows.fits_ever(40)
    memory(2.99)
    with pytest.raises(NeverFits, match=r"one for each lane of parallel 3, takes .*: lower parallel, shorten"):
        windows.fits_ever(40)
    # What lanes hold already is theirs.
    windows.seat(PROMPT, 10)
    memory(2)
    windows.fits_ever(40)
    memory(1.99)
    with pytest.raises(NeverFits):
        windows.fits_ever(40)
