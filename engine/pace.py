"""How fast rows are read and tokens computed here, measured once, so that a prompt can be cut accordingly."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lazyio.bench.figures import short
from lazyio.engine.models.base import Model
from lazyio.engine.ubatch import Ubatch
from lazyio.ple.cuts import plan_cuts
from lazyio.table import LazyTable

_PROBE_ROWS = 4096
_FEW_TOKENS = 64
# The longer of the two forwards has as many tokens as take about so long, in these bounds.
_LONG_S = 0.5
_LONG_TOKENS = (128, 2048)
_STEP = 32
_SEED = 0


@dataclass(frozen=True, slots=True)
class MeasuredPace:
    """What cuts are planned from: seconds a row and seconds a token, and of a forward whatever its size."""

    row_s: float
    token_s: float
    forward_s: float
    rows_per_token: int

    def cuts(self, tokens: int, most: int) -> list[int]:
        """Cuts of a prompt into ubatches of at most `most` tokens, which need not be multiples of anything."""
        return plan_cuts(
            tokens,
            self.rows_per_token,
            1 / self.row_s,
            1 / self.token_s,
            most,
            step=_STEP,
            compute_fixed_s=self.forward_s,
        )

    def __str__(self) -> str:
        return f"{short(1 / self.row_s)} rows/s and {short(1 / self.token_s)} tokens/s"


def measure_pace(model: Model, table: LazyTable, rows_per_token: int) -> MeasuredPace:
    """Gather some thousand random rows, cold or not as they lie, and time two forwards with rows of zeros.

    What the device still has in its caches is read faster than the rest will be: cuts are then planned for faster reads
    than there are, which costs time and nothing else.
    """
    token_s, forward_s = _compute_s(model)
    return MeasuredPace(_row_s(table), token_s, forward_s, rows_per_token)


def _row_s(table: LazyTable) -> float:
    ids = np.random.default_rng(_SEED).integers(0, table.n_rows, _PROBE_ROWS)
    began = time.perf_counter()
    table.gather_unique(ids)
    return (time.perf_counter() - began) / len(ids)


def _compute_s(model: Model) -> tuple[float, float]:
    """Seconds a token, and whatever the number of tokens, from forwards of two lengths."""
    few = min(_FEW_TOKENS, model.max_tokens)
    few_s = _forward_s(model, few)
    least, most = _LONG_TOKENS
    many = min(most, model.max_tokens, max(least, round(few * _LONG_S / few_s)))
    if many <= few:
        return few_s / few, 0.0
    token_s = max(_forward_s(model, many) - few_s, 0.01 * few_s) / (many - few)
    return token_s, max(0.0, few_s - few * token_s)


def _forward_s(model: Model, tokens: int) -> float:
    """Seconds of the second forward of so many tokens: the first one has libraries make up their minds."""
    ids: Sequence[int] = np.random.default_rng(_SEED).integers(0, model.vocab, tokens).tolist()
    rows = _Zeros(torch.zeros(tokens, model.row_values, dtype=model.dtype, device=model.device))
    for _ in range(2):
        ubatch = Ubatch.of([(model.new_state(tokens), ids)], model.device)
        _synchronize(model.device)
        began = time.perf_counter()
        model.step(ubatch, rows)
        _synchronize(model.device)
        seconds = time.perf_counter() - began
    return seconds


class _Zeros:
    """Rows that are there."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def values(self) -> torch.Tensor:
        return self._values


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
