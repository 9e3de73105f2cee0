"""The comparison as a picture."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from lazyio.bench.figures import short
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
    """Write a picture: a panel a temperature, a bar a mode, a point a run, a line for what the runs are compared with.

    Raises OSError where the file can't be written.
    """
    from matplotlib.figure import Figure  # an optional dependency

    widths = [1.6 + 0.95 * len(section.arms) for section in outcome.sections]
    figure = Figure(figsize=(max(6.0, sum(widths)), 4.8), layout="constrained")
    panels = figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]
    for axes, section in zip(panels, outcome.sections, strict=True):
        _panel(axes, outcome, section)
    spec = outcome.spec
    figure.suptitle(f"{Path(spec.path).name}: {spec.rows:,} rows of {spec.row_bytes:,} bytes", fontsize=11)
    figure.savefig(path, dpi=150, format="png")


def _panel(axes: Axes, outcome: Outcome, section: Section) -> None:
    from matplotlib.ticker import EngFormatter

    decode = outcome.workload.decode
    value, unit = ("p50_us", "us a step of decoding, median") if decode else ("rows_per_s", "rows/s")
    summary = section.summary()
    for place, arm in enumerate(summary.arms):
        spread = getattr(arm, value)
        points = [getattr(run, value) for run in _points(section, arm.arm, summary.counted_rounds > 0)]
        axes.bar(place, spread.median, color=_BAR, width=0.6)
        axes.plot([place] * len(points), points, "o", color=_POINT, markersize=3.5, alpha=0.7)
        # Above all that is drawn there, so that nothing is hidden.
        axes.annotate(
            short(spread.median),
            (place, max(spread.median, *points)),
            xytext=(0, 6),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            bbox={"boxstyle": "square,pad=0.1", "color": "white", "alpha": 0.8},
        )
    _yardstick_line(axes, outcome, section)
    axes.set_title(f"{section.temperature}: median of {summary.counted_rounds} of {summary.rounds} rounds", fontsize=10)
    axes.set_xticks(range(len(summary.arms)), [arm.arm for arm in summary.arms])
    axes.set_ylabel(unit)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.margins(y=0.12)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)


def _points(section: Section, label: str, counted: bool) -> list[Run]:
    return [run for run in section.runs if run.arm == label and run.counted >= counted]


def _yardstick_line(axes: Axes, outcome: Outcome, section: Section) -> None:
    """The device's limit over cold bars, np.take over warm ones; steps of decoding are compared with the limit only."""
    decode, limit, take = outcome.workload.decode, outcome.limit.as_json(), outcome.take.as_json()
    if section.temperature == "cold" and limit is not None:
        # The limit counts windows; as many rows come with them as the workload has rows a window.
        rows_a_window = outcome.workload.rows / outcome.limit.windows
        height = limit["p50_us"] if decode else limit["iops"] * rows_a_window
        name = f"device limit: {short(height)} us" if decode else f"device limit: {short(limit['iops'])} reads/s"
    elif section.temperature == "warm" and take is not None and not decode:
        height = take["rows_per_s"]
        name = f"np.take: {short(height)} rows/s"
    else:
        return
    axes.axhline(height, color=_LIMIT, linestyle="--", linewidth=1.2, label=name)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), frameon=False, fontsize=9)
