import gc

from lazyio.fetchers.conformance import run_in_child
from lazyio.forking import renew_in_child


class Counter:
    def __init__(self) -> None:
        self.renewals = 0

    def renew(self) -> None:
        self.renewals += 1


def test_a_child_renews_and_its_parent_does_not() -> None:
    counter = Counter()
    renew_in_child(counter)
    renew_in_child(counter)

    def grandchild() -> None:
        assert counter.renewals == 2

    def child() -> None:
        assert counter.renewals == 1
        run_in_child(grandchild)

    run_in_child(child)
    assert counter.renewals == 0


def test_what_is_gone_is_forgotten() -> None:
    renewed: list[str] = []

    class Telling(Counter):
        def renew(self) -> None:
            renewed.append("gone")

    thing = Telling()
    renew_in_child(thing)
    del thing
    gc.collect()

    def check() -> None:
        assert renewed == []

    run_in_child(check)
