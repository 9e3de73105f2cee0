"""Numbers as people read them."""

from __future__ import annotations


def short(value: float) -> str:
    """Three digits, with k or M where there are more than four: '88.5k', '111k', '1,234', '0.48'."""
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if value >= 9.9995 * unit:
            value /= unit
            return f"{value:.1f}{name}" if value < 99.95 else f"{value:,.0f}{name}"
    return f"{value:,.0f}" if value >= 9.995 else f"{value:.2f}"


def ratio(value: float) -> str:
    """Two decimals, three of a small one: '1.25', '0.006'."""
    return f"{value:.2f}" if value >= 0.0995 else f"{value:.3f}"
