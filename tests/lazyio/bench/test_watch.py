from __future__ import annotations

import io
import threading

from rich.console import Console

from lazyio.bench.watch import Watch


def test_elsewhere_than_on_a_terminal_each_step_is_a_line() -> None:
    file = io.StringIO()
    with Watch(Console(file=file, width=40), 2) as watch:
        watch.mark()
        watch.begin("first")
        watch.done("first went " + "well " * 20)
        watch.step_back("again [bold]")
    assert file.getvalue().splitlines() == ["first went " + "well " * 20, "again [bold]"]


def test_on_a_terminal_there_is_a_bar_and_no_thread() -> None:
    file, before = io.StringIO(), threading.active_count()
    with Watch(Console(file=file, width=80, force_terminal=True), 2) as watch:
        watch.mark()
        watch.begin("first")
        assert threading.active_count() == before
        watch.done("not shown")
        assert "1/2" in file.getvalue()
        watch.step_back("once more")
        watch.begin("second")
    assert "not shown" not in file.getvalue()
    assert "once more" in file.getvalue()
    assert "0/2" in file.getvalue().split("once more")[1]
