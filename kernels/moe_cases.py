"""What the kernel of mixtures of experts is checked on, and faults that must be seen."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from lazyio.kernels import packed
from lazyio.kernels.contract import Case
from lazyio.kernels.packed import PackedWeight

if TYPE_CHECKING:
    from lazyio.kernels.moe import Weight

# Of fp8 weights that are checked: rows and columns.
_BLOCK = (48, 64)


@dataclass(frozen=True, slots=True)
class Arguments:
    """Those of `moe`."""

    x: torch.Tensor
    chosen: torch.Tensor
    weights: torch.Tensor
    gate_up: Weight
    down: Weight

    @classmethod
    def random(
        cls,
        device: torch.device,
        seed: int,
        tokens: int,
        dtype: torch.dtype = torch.float32,
        slots: int = 3,
        sizes: tuple[int, int, int] = (13, 96, 32),
        among: int | None = None,
        stored: tuple[str, str] | None = None,
    ) -> Arguments:
        """Experts, hidden and width as `sizes`; tokens choose `among` the last so many experts.

        Weights are packed if `stored` are the types of gate_up and of down.
        """
        made = torch.Generator(device).manual_seed(seed)
        experts, hidden, width = sizes

        def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device).normal_(0, std, generator=made)

        # Random numbers of experts, sorted: different for each slot of a token.
        some = experts if among is None else among
        chosen = experts - 1 - torch.rand(tokens, some, generator=made, device=device).argsort(1)[:, :slots]
        weights = torch.rand(tokens, slots, generator=made, device=device) + 0.1

        def weight(number: int, *shape: int) -> Weight:
            std = shape[-1] ** -0.5
            if stored is None:
                return normal(*shape, std=std)
            return packed.random(stored[number], shape, device, made, std, _BLOCK)

        x, weights = normal(tokens, hidden), weights / weights.sum(1, keepdim=True)
        return cls(x, chosen, weights, weight(0, experts, 2 * width, hidden), weight(1, experts, hidden, width))

    def results(self, function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        """What `moe` or `reference` makes of them."""
        return [function(self.x, self.chosen, self.weights, self.gate_up, self.down)]


def _cases() -> list[Case[Arguments]]:
    within = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}

    def case(
        name: str,
        tokens: int,
        dtype: torch.dtype = torch.float32,
        planted: bool = False,
        compiled_only: bool = False,
        **rest: Any,
    ) -> Case[Arguments]:
        make = functools.partial(Arguments.random, tokens=tokens, dtype=dtype, **rest)
        return Case(name, make, within[dtype], planted, compiled_only)

    q4_0 = "Q4_0/Q4_0"
    real: dict[str, Any] = {"dtype": torch.bfloat16, "compiled_only": True, "slots": 10, "sizes": (100, 2560, 640)}
    return [
        case("one token", 1),
        case("a few", 3, planted=True),
        case("many", 60, planted=True),
        case("one slot", 20, slots=1),
        case("all choose one expert", 70, slots=1, among=1),
        case("experts that nobody chose", 40, among=4),
        *(case(f"{name}, float16", tokens, torch.float16) for name, tokens in (("a few", 2), ("many", 30))),
        case("a few, bfloat16", 2, torch.bfloat16),
        case("many, bfloat16", 30, torch.bfloat16, compiled_only=True),
        *(
            case(f"{name}, {types}", tokens, stored=tuple(types.split("/")), sizes=size, planted=types == q4_0)
            for types, size in ((q4_0, (7, 64, 32)), ("Q4_K/Q5_0", (7, 256, 32)), ("F8_E4M3/F8_E4M3", (7, 96, 64)))
            for name, tokens in (("a few", 2), ("many", 40))
        ),
        *(case(f"{tokens} of true size", tokens, **real) for tokens in (1, 8, 100, 200, 500, 2000)),
        *(
            case(f"{tokens} of true size, {types}", tokens, stored=tuple(types.split("/")), **real)
            for types in (q4_0, "Q4_K/Q5_0", "Q6_K/Q8_0")
            for tokens in (1, 100, 2000)
        ),
    ]


def _rolled(weight: Weight, dimension: int, by: float) -> Weight:
    """Experts, or rows, further by 1 or by a part of their number."""
    if isinstance(weight, PackedWeight):
        planes = [plane.roll(max(1, int(by * plane.shape[dimension])), dimension) for plane in weight.planes]
        return replace(weight, planes=tuple(planes))
    return weight.roll(max(1, int(by * weight.shape[dimension])), dimension)


def _without_last_slot(given: Arguments) -> Arguments:
    weights = given.weights.clone()
    weights[:, -1] = 0
    return replace(given, weights=weights)


def _without_last_inputs(given: Arguments) -> Arguments:
    x = given.x.clone()
    x[:, -16:] = 0
    return replace(given, x=x)


CASES = _cases()

#: Faults by name.
CONTROLS: Mapping[str, Callable[[Arguments], Arguments]] = {
    "order one off": lambda given: replace(given, chosen=given.chosen.roll(1, 0)),
    "slots one off": lambda given: replace(given, chosen=given.chosen.roll(1, 1)),
    "weights of the slot beside": lambda given: replace(given, weights=given.weights.roll(1, 1)),
    "a slot lost": _without_last_slot,
    "last inputs lost": _without_last_inputs,
    "gate and up swapped": lambda given: replace(given, gate_up=_rolled(given.gate_up, 1, 0.5)),
    "gate and up of another expert": lambda given: replace(given, gate_up=_rolled(given.gate_up, 0, 0)),
    "down of another expert": lambda given: replace(given, down=_rolled(given.down, 0, 0)),
}
