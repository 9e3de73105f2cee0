from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lazyio.bench.outcome import Outcome
from lazyio.bench.plot import draw, require_matplotlib
from lazyio.errors import Unsupported

Compare = Callable[..., Outcome]


@pytest.fixture
def panels(monkeypatch: pytest.MonkeyPatch) -> list[Axes]:
    """The panels of the pictures that were saved."""
    seen: list[Axes] = []
    true_save = Figure.savefig

    def save(figure: Figure, *arguments: Any, **more: Any) -> None:
        seen.extend(figure.axes)
        true_save(figure, *arguments, **more)

    monkeypatch.setattr(Figure, "savefig", save)
    return seen


def test_a_panel_a_temperature_a_bar_an_arm_a_point_a_run(compare: Compare, tmp_path: Path, panels: list[Axes]) -> None:
    outcome = compare(cold=True, warm=True, modes="on-bare,on", rounds=2)
    draw(outcome, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    cold, warm = panels
    for axes, section in zip(panels, outcome.sections, strict=True):
        on_bare, on = section.summary().arms
        heights = [arm.rows_per_s.median for arm in (on_bare, on) if arm.rows_per_s]
        assert [bar.get_height() for bar in axes.patches] == heights
        assert [label.get_text() for label in axes.get_xticklabels()] == ["on-bare", "on"]
        assert [len(line.get_ydata()) for line in axes.lines[:2]] == [2, 4]  # type: ignore[arg-type]
    assert cold.get_legend_handles_labels()[1][0].startswith("device limit: ")
    assert warm.get_legend_handles_labels()[1][0].startswith("np.take: ")


def test_the_limit_is_as_high_as_rows_come_with_its_reads(compare: Compare, tmp_path: Path, panels: list[Axes]) -> None:
    outcome = compare()
    draw(outcome, tmp_path / "picture.png")
    (axes,) = panels
    rows_a_window = outcome.workload.rows / outcome.limit.windows
    assert axes.lines[-1].get_ydata()[0] == pytest.approx(outcome.limit.iops * rows_a_window)  # type: ignore[index]


def test_steps_of_decoding(compare: Compare, tmp_path: Path, panels: list[Axes]) -> None:
    outcome = compare(decode=True, steps=5, cold=True, warm=True)
    draw(outcome, tmp_path / "picture.png")
    assert [axes.get_ylabel() for axes in panels] == ["us a step of decoding, median"] * 2
    assert panels[0].get_legend_handles_labels()[1][0].endswith(" us")
    assert panels[1].get_legend() is None


def test_without_matplotlib_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    require_matplotlib()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unsupported, match=r"pip install 'lazyio\[plot\]'"):
        require_matplotlib()
