"""The comparison as a picture."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from lazyio.bench.outcome import Outcome
from lazyio.bench.rounds import Section
from lazyio.bench.runs import Run
from lazyio.errors import Unsupported

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BAR, _POINT, _LIMIT = "#7da7d9", "#1f3b57", "#b03a2e"


def require_matplotlib() -> None:
    """Raise Unsupported, before anything is measured, if the picture could not be drawn in the end."""
    if importlib.util.find_spec("matplotlib") is None:
        raise Unsupported(
            "--plot needs matplotlib, which is not installed: pip install 'lazyio[plot]', or leave --plot out"
        )


def draw(outcome: Outcome, path: Path) -> None:
    """Write a picture: a panel a temperature, a bar a mode, a point a round, a line for the device's limit."""
    from matplotlib.figure import Figure  # an optional dependency

    count = len(outcome.sections)
    figure = Figure(figsize=(2.5 + 4.5 * count, 4.8), layout="constrained")
    panels = figure.subplots(1, count, squeeze=False)[0]
    for axes, section in zip(panels, outcome.sections, strict=True):
        _panel(axes, outcome, section)
    spec = outcome.spec
    figure.suptitle(f"{Path(spec.path).name}: {spec.rows:,} rows of {spec.row_bytes:,} bytes", fontsize=11)
    figure.savefig(path, dpi=150)


def _panel(axes: Axes, outcome: Outcome, section: Section) -> None:
    decode = outcome.workload.decode
    value, unit = ("p50_us", "us a step of decoding, median") if decode else ("rows_per_s", "rows/s")
    labels = [arm.label for arm in section.arms]
    summary = section.summary()
    medians = [spread.median if (spread := getattr(arm, value)) else 0.0 for arm in summary.arms]
    bars = axes.bar(labels, medians, color=_BAR, width=0.6)
    axes.bar_label(bars, [f"{median:,.0f}" for median in medians], padding=3, fontsize=9)
    for place, label in enumerate(labels):
        points = [getattr(run, value) for run in _points(section, label, summary.counted_rounds > 0)]
        axes.plot([place] * len(points), points, "o", color=_POINT, markersize=3.5, alpha=0.7)
    _limit_line(axes, outcome, section)
    axes.set_title(f"{section.temperature}, {summary.counted_rounds} of {summary.rounds} rounds", fontsize=10)
    axes.set_ylabel(unit)
    axes.yaxis.set_major_formatter(lambda number, _: f"{number:,.0f}")
    axes.set_ylim(bottom=0)
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)


def _points(section: Section, label: str, counted: bool) -> list[Run]:
    return [run for run in section.runs if run.arm == label and run.counted >= counted]


def _limit_line(axes: Axes, outcome: Outcome, section: Section) -> None:
    limit = outcome.limit.as_json()
    if section.temperature != "cold" or limit is None:
        return
    # The limit counts windows; as many rows come with them as the workload has rows a window.
    rows_a_window = outcome.workload.rows / outcome.limit.windows
    height = limit["p50_us"] if outcome.workload.decode else limit["iops"] * rows_a_window
    axes.axhline(height, color=_LIMIT, linestyle="--", linewidth=1.2)
    name = f"device limit: {height:,.0f}" if outcome.workload.decode else f"device limit: {limit['iops']:,.0f} reads/s"
    axes.annotate(
        name,
        (0.0, height),
        xycoords=("axes fraction", "data"),
        xytext=(4, 4),
        textcoords="offset points",
        color=_LIMIT,
        fontsize=8.5,
    )
