"""One forward pass, together or each sequence by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lazyio.engine.forward import BLOCK, BatchInvariant, Forward
from lazyio.engine.ubatch import Ubatch


class Model:
    """Hidden states are positions and rows; it writes down what it was given."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.given: list[list[tuple[int, int]]] = []

    def step(self, ubatch: Ubatch, rows: Any) -> torch.Tensor:
        self.given.append([(span.before, span.length) for span in ubatch.spans])
        for span in ubatch.spans:
            span.state.tokens += span.length
        values = torch.zeros(len(ubatch), 1) if rows is None else rows.values()
        return torch.cat([ubatch.positions[:, None].float(), ubatch.tokens[:, None].float(), values], 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.given.append([(0, len(hidden))])
        return hidden * 2


def chunks() -> list[Any]:
    lengths = ((0, 1), (200, 400), (300, 1), (BLOCK, BLOCK))
    return [(SimpleNamespace(tokens=before), list(range(length))) for before, length in lengths]


@pytest.mark.parametrize("with_rows", [True, False])
def test_apart_is_the_same_in_other_parts(with_rows: bool) -> None:
    rows: Any = SimpleNamespace(values=lambda: torch.arange(658.0)[:, None]) if with_rows else None
    together, apart = Model(), Model()
    expected = Forward(together).step(chunks(), rows)  # type: ignore[arg-type]
    found = BatchInvariant(apart).step(chunks(), rows)  # type: ignore[arg-type]
    assert torch.equal(found, expected)
    assert together.given == [[(0, 1), (200, 400), (300, 1), (BLOCK, BLOCK)]]
    one_by_one = [(0, 1), (200, 56), (256, 256), (512, 88), (300, 1), (BLOCK, BLOCK)]
    assert apart.given == [[part] for part in one_by_one]


def test_cuts_at_blocks_change_no_shape() -> None:
    whole, cut = Model(), Model()
    state: Any = SimpleNamespace(tokens=0)
    BatchInvariant(whole).step([(state, list(range(600)))], None)  # type: ignore[arg-type]
    state = SimpleNamespace(tokens=0)
    for length in (256, 256, 88):
        BatchInvariant(cut).step([(state, list(range(length)))], None)  # type: ignore[arg-type]
    assert whole.given == cut.given


def test_logits_one_by_one() -> None:
    hidden = torch.arange(6.0).view(3, 2)
    model = Model()
    assert torch.equal(BatchInvariant(model).logits(hidden), 2 * hidden)  # type: ignore[arg-type]
    assert model.given == [[(0, 1)]] * 3
