from typing import Any

from lazyio.engine.waits import Wait


class Event:
    def __init__(self, at_ms: float) -> None:
        self.at_ms, self.awaited = at_ms, False

    def synchronize(self) -> None:
        self.awaited = True

    def elapsed_time(self, other: Any) -> float:
        assert other.awaited
        return float(other.at_ms - self.at_ms)


def test_without_events_it_is_what_the_host_waited() -> None:
    assert Wait(0.25).seconds() == 0.25
    assert Wait().seconds() == 0


def test_events_tell_better() -> None:
    stalls: Any = ((Event(1), Event(3)), (Event(10), Event(11)))
    assert Wait(0.25, stalls).seconds() == 0.003
