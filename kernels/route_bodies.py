"""What the GPU does to choose experts: the body of `route`, which launches it."""

# What Triton compiles into a kernel is in capitals, as its own documentation has it; its decorator has no types.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl


@triton.jit
def choose(
    logits: tl.tensor,  # [tokens, EXPERTS]
    weights: tl.tensor,  # float32 [tokens, SLOTS]
    chosen: tl.tensor,  # int64 [tokens, SLOTS]
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    NORMALISE: tl.constexpr,
    PADDED: tl.constexpr,  # experts, and slots, as powers of two
    PADDED_SLOTS: tl.constexpr,
) -> None:
    """Of one token: its largest probabilities, one after the other."""
    token = tl.program_id(0).to(tl.int64)
    expert, slot = tl.arange(0, PADDED), tl.arange(0, PADDED_SLOTS)
    is_one = expert < EXPERTS
    of_each = tl.load(logits + token * EXPERTS + expert, mask=is_one, other=float("-inf")).to(tl.float32)
    exponentials = tl.where(is_one, tl.exp(of_each - tl.max(of_each, 0)), 0.0)
    probabilities = exponentials / tl.sum(exponentials, 0)
    # No number is the largest of all, as it is for torch: it is chosen, and seen in what comes out.
    left = tl.where(probabilities == probabilities, probabilities, float("inf"))
    left = tl.where(is_one, left, -1.0)
    values, numbers = tl.zeros((PADDED_SLOTS,), tl.float32), tl.zeros((PADDED_SLOTS,), tl.int32)
    for i in tl.static_range(SLOTS):
        value = tl.max(left, 0)
        number = tl.min(tl.where(left == value, expert, PADDED), 0)
        left = tl.where(expert == number, -1.0, left)
        values, numbers = tl.where(slot == i, value, values), tl.where(slot == i, number, numbers)
    values = tl.where(values == float("inf"), float("nan"), values)
    if NORMALISE:
        values = values / tl.sum(values, 0)
    place = token * SLOTS + slot
    tl.store(weights + place, values, mask=slot < SLOTS)
    tl.store(chosen + place, numbers.to(tl.int64), mask=slot < SLOTS)
