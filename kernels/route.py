"""Which experts a token takes, and with which weights, in one launch: the body is in route_bodies.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from lazyio.errors import Unsupported
from lazyio.kernels.contract import Case, Kernel, bodies

# A program has all experts of a token in the registers of one warp.
_MOST_EXPERTS = 2048
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def supports(dtype: torch.dtype, experts: int) -> bool:
    """Whether there is a kernel for logits of so many experts."""
    return dtype in _DTYPES and experts <= _MOST_EXPERTS


def route(logits: torch.Tensor, slots: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights, float32 [tokens, slots], and numbers, int64 [tokens, slots], of the experts of each token.

        p = softmax(logits);   weights = p of the `slots` largest, divided by their sum if `normalise`

    logits [tokens, experts] float32, bfloat16 or float16, contiguous; arithmetic is in float32. The largest comes
    first, and of equal ones the expert with the lowest number. Never waits.
    Raises Unsupported where Triton is missing, and for what `supports` does not have.
    """
    tokens, experts = logits.shape
    if not supports(logits.dtype, experts):
        raise Unsupported(
            f"there is no kernel that chooses from {experts:,} experts by logits of {logits.dtype}: there is one for up"
            f" to {_MOST_EXPERTS:,}, and float32, bfloat16 and float16"
        )
    assert 0 < slots <= experts, "a token chooses at least one expert, and none twice"
    assert logits.is_contiguous(), "logits are not contiguous"
    weights = torch.empty(tokens, slots, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, slots, dtype=torch.int64, device=logits.device)
    if tokens:
        _bodies().choose[(tokens,)](
            *(logits, weights, chosen),
            EXPERTS=experts,
            SLOTS=slots,
            NORMALISE=normalise,
            PADDED=_padded(experts),
            PADDED_SLOTS=_padded(slots),
            num_warps=1,
        )
    return weights, chosen


def reference(logits: torch.Tensor, slots: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What `route` does, in plain torch and on any device."""
    largest, order = logits.softmax(-1, dtype=torch.float32).sort(dim=-1, descending=True, stable=True)
    weights = largest[:, :slots]
    return weights / weights.sum(-1, keepdim=True) if normalise else weights, order[:, :slots]


def _padded(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _bodies() -> Any:
    return bodies("route_bodies", "the kernel that chooses experts")


@dataclass(frozen=True, slots=True)
class Arguments:
    """Those of `route`."""

    logits: torch.Tensor
    slots: int
    normalise: bool

    @classmethod
    def random(
        cls,
        device: torch.device,
        seed: int,
        shape: tuple[int, int] = (9, 13),
        dtype: torch.dtype = torch.float32,
        slots: int = 3,
        normalise: bool = True,
    ) -> Arguments:
        """Logits of bfloat16 are often equal."""
        made = torch.Generator(device).manual_seed(seed)
        return cls(torch.randn(shape, generator=made, device=device).to(dtype), slots, normalise)

    def results(
        self, function: Callable[[torch.Tensor, int, bool], tuple[torch.Tensor, torch.Tensor]]
    ) -> list[torch.Tensor]:
        """What `route` or `reference` makes of them."""
        return list(function(self.logits, self.slots, self.normalise))


def _cases() -> list[Case[Arguments]]:
    def case(name: str, planted: bool = False, compiled_only: bool = False, **rest: Any) -> Case[Arguments]:
        return Case(name, functools.partial(Arguments.random, **rest), 1e-6, planted, compiled_only)

    return [
        case("a few", planted=True),
        case("one expert of each token", shape=(5, 16), slots=1),
        case("as they are", shape=(9, 40), slots=8, normalise=False, planted=True),
        case("equal ones", shape=(20, 300), slots=10, dtype=torch.bfloat16),
        case("all of them", shape=(3, 7), slots=7, dtype=torch.float16),
        case("many", compiled_only=True, shape=(3000, 512), slots=10, dtype=torch.bfloat16),
        case("many, float32", compiled_only=True, shape=(3000, 512), slots=10),
    ]


def _last_lost(given: Arguments) -> Arguments:
    logits = given.logits.clone()
    logits[:, -1] = -torch.inf
    return replace(given, logits=logits)


#: Faults by name.
CONTROLS: Mapping[str, Callable[[Arguments], Arguments]] = {
    "the smallest instead": lambda given: replace(given, logits=-given.logits),
    "logits rounded": lambda given: replace(given, logits=given.logits.bfloat16().to(given.logits.dtype)),
    "experts one off": lambda given: replace(given, logits=given.logits.roll(1, 1)),
    "tokens one off": lambda given: replace(given, logits=given.logits.roll(1, 0)),
    "the last expert lost": _last_lost,
    "normalised or not": lambda given: replace(given, normalise=not given.normalise),
}

KERNEL = Kernel(
    name="route",
    run=lambda given: given.results(route),
    reference=lambda given: given.results(reference),
    cases=_cases(),
    controls=CONTROLS,
    bodies=lambda: [_bodies().choose],
)
