"""Numbers as people read them: three digits of each."""

from __future__ import annotations


def short(value: float) -> str:
    """With k and M from five digits on: '0.48', '10.5', '1,234', '88.5k', '111k', '1.50M'."""
    if value < 9.995:
        return f"{value:.2f}"
    if value < 9_999.5:
        return f"{value:.1f}".removesuffix(".0") if value < 99.95 else f"{value:,.0f}"
    thousands = value / 1e3
    return f"{_three(thousands)}k" if thousands < 999.5 else f"{_three(value / 1e6)}M"


def ratio(value: float) -> str:
    """Three decimals of a small one: '12.3', '1.25', '0.006'."""
    return f"{value:.3f}" if value < 0.0995 else _three(value)


def _three(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"
