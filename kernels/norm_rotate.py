"""Heads of queries and keys normed and rotated in one pass on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from lazyio.errors import Unsupported
from lazyio.kernels.contract import Case, Kernel, bodies

_DIMS = (16, 32, 64, 128, 256, 512)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Elements of a program, and its warps.
_ELEMENTS, _WARPS = 2048, 4


def supports(dim: int) -> bool:
    """Whether heads of this dimension have a kernel."""
    return dim in _DIMS


def norm_rotate(
    x: torch.Tensor, weight: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], *, eps: float, offset: float
) -> torch.Tensor:
    """The pairs (i, i + half) of y = x / sqrt(mean(x**2) + eps) * (offset + weight) turned; never waits.

    x [tokens, heads, dim]: float32, bfloat16 or float16, of which tokens and heads may lie apart; weight [dim]; cosines
    and sines [tokens, 1, half] of its dtype. y is rounded to that dtype, and turned in float32. Contiguous, as x.
    Raises Unsupported where Triton is missing, and for what has no kernel.
    """
    _check(x, weight, angles)
    tokens, heads, dim = x.shape
    out = x.new_empty(x.shape)
    rows = max(1, _ELEMENTS // dim)
    _bodies().turn[(-(-tokens * heads // rows),)](
        *(x, weight, *angles, out, tokens * heads, eps, offset),
        HEADS=heads,
        DIM=dim,
        HALF=angles[0].shape[-1],
        TOKEN_STRIDE=x.stride(0),
        HEAD_STRIDE=x.stride(1),
        ROWS=rows,
        num_warps=_WARPS,
    )
    return out


def reference(
    x: torch.Tensor, weight: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], *, eps: float, offset: float
) -> torch.Tensor:
    """What `norm_rotate` does, in float64 on any device."""
    wide = x.double()
    y = wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + offset)
    cos, sin = (angle.double() for angle in angles)
    first, second, rest = y.to(x.dtype).double().tensor_split((cos.shape[-1], 2 * cos.shape[-1]), -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1).to(x.dtype)


def _bodies() -> Any:
    return bodies("norm_rotate_bodies", "the kernel of norms and rotations")


def _check(x: torch.Tensor, weight: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> None:
    tokens, _, dim = x.shape
    if not supports(dim) or x.dtype not in _DTYPES:
        raise Unsupported(
            f"norms and rotations have no kernel for {x.dtype} and heads of {dim}: they have those for float32,"
            f" bfloat16 and float16, and dimensions of {_DIMS}"
        )
    assert x.stride(2) == 1, "a head is not contiguous"
    assert weight.shape == (dim,), "there is a weight for each dimension"
    assert weight.is_contiguous(), "weights are not contiguous"
    for angle in angles:
        assert angle.shape == (tokens, 1, angles[0].shape[-1]), "angles are [tokens, 1, half]"
        assert 0 < 2 * angle.shape[-1] <= dim, "more is rotated than there is"
        assert angle.dtype == x.dtype, "angles are of the dtype of what they rotate"
        assert angle.is_contiguous(), "angles are not contiguous"
        assert angle.device == x.device == weight.device, "tensors are on different devices"


@dataclass(frozen=True, slots=True)
class Arguments:
    """Those of `norm_rotate`."""

    x: torch.Tensor
    weight: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    offset: float

    @classmethod
    def random(
        cls,
        device: torch.device,
        seed: int,
        tokens: int,
        heads: int,
        dim: int,
        half: int,
        dtype: torch.dtype = torch.float32,
        offset: float = 1.0,
    ) -> Arguments:
        """Heads between others, as those of queries lie between gates."""
        made = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=made, device=device)

        x = normal(tokens, heads, 2 * dim).to(dtype)[..., :dim]
        angle = 3 * normal(tokens, 1, half)
        return cls(x, normal(dim).to(dtype), angle.cos().to(dtype), angle.sin().to(dtype), offset)

    def results(self, function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        """What `norm_rotate` or `reference` makes of them."""
        return [function(self.x, self.weight, (self.cos, self.sin), eps=1e-6, offset=self.offset)]


def _cases() -> list[Case[Arguments]]:
    within = {torch.float32: 1e-6, torch.float16: 3e-4, torch.bfloat16: 3e-3}
    sizes: dict[str, dict[str, Any]] = {
        "a part of each head": {"tokens": 9, "heads": 3, "dim": 32, "half": 4, "planted": True},
        "whole heads": {"tokens": 5, "heads": 1, "dim": 16, "half": 8, "offset": 0.0},
        "float16": {"tokens": 70, "heads": 2, "dim": 64, "half": 3, "dtype": torch.float16},
        "2,048 tokens": {"tokens": 2048, "heads": 24, "dim": 256, "half": 32, "dtype": torch.bfloat16},
        "a step": {"tokens": 1, "heads": 24, "dim": 256, "half": 32, "dtype": torch.bfloat16},
    }
    cases = []
    for name, size in sizes.items():
        planted, dtype = size.pop("planted", False), size.get("dtype", torch.float32)
        make = functools.partial(Arguments.random, **size)
        cases.append(Case(name, make, within[dtype], planted, compiled_only=dtype == torch.bfloat16))
    return cases


#: Faults by name.
CONTROLS: Mapping[str, Callable[[Arguments], Arguments]] = {
    "angles one token late": lambda given: replace(given, cos=given.cos.roll(1, 0), sin=given.sin.roll(1, 0)),
    "turned the other way": lambda given: replace(given, sin=-given.sin),
    "not turned": lambda given: replace(given, cos=torch.ones_like(given.cos), sin=torch.zeros_like(given.sin)),
    "another offset": lambda given: replace(given, offset=given.offset - 1),
    "weights one dimension late": lambda given: replace(given, weight=given.weight.roll(1, 0)),
    "heads swapped": lambda given: replace(given, x=given.x.flip(1)),
}

KERNEL = Kernel(
    name="norm_rotate",
    run=lambda given: given.results(norm_rotate),
    reference=lambda given: given.results(reference),
    cases=_cases(),
    controls=CONTROLS,
    bodies=lambda: [_bodies().turn],
)
