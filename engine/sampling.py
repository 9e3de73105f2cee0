"""The next token, from logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lazyio.errors import ModelError, SettingError

_MOST_SEED = 2**63 - 1


def no_numbers(which: str) -> ModelError:
    """The error for logits that no token can be chosen by: `which` they are."""
    return ModelError(
        f"{which} are no finite numbers: the weights are damaged, or values outgrow the dtype; load the model with "
        "dtype float32, or copy it again"
    )


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose: the likeliest token at temperature 0, else one at random, by its probability.

    At a temperature T probabilities are softmax(logits / T). Of these remain, in this order: the `top_k` likeliest
    (0: all); the fewest likeliest whose probabilities, of what remains, sum to `top_p` or more (1: all); those that
    have at least `min_p` of the likeliest one's probability (0: all). With a `seed` choices can be repeated.
    Raises SettingError for values out of range, and for limits that temperature 0 would leave without effect.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0 <= self.temperature < math.inf, "0 (the likeliest token) or more")
        _check("top_k", self.top_k, _is_integer(self.top_k) and self.top_k >= 0, "an integer, 0 (all tokens) or more")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "more than 0 and at most 1 (all tokens)")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "0 (all tokens) to 1")
        if self.seed is not None:
            _check("seed", self.seed, _is_integer(self.seed) and 0 <= self.seed <= _MOST_SEED, f"0 to {_MOST_SEED}")
        if self.temperature == 0:
            for name, value, unset in (("top_k", self.top_k, 0), ("top_p", self.top_p, 1), ("min_p", self.min_p, 0)):
                if value != unset:
                    raise SettingError(
                        f"{name} {value} has no effect at temperature 0, which takes the likeliest token; "
                        f"give a temperature above 0, or leave {name} out"
                    )


class Sampler:
    """Chooses the tokens of one sequence, one after the other.

    The random numbers come from the host, one a token, and travel as arguments of kernels: nothing waits for the
    device, and a seed means the same on all of them.
    """

    def __init__(self, sampling: Sampling, vocab: int) -> None:
        self.sampling = sampling
        self.vocab = vocab
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    @property
    def is_greedy(self) -> bool:
        """Whether `choose` takes the likeliest token and does nothing else."""
        return self.sampling.temperature == 0

    def settle(self, token: int) -> int:
        """The token to go on with, where `choose` gave this one."""
        return token

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """The token for logits float32 [vocab]: int64 [], on their device. Of equal likeliest ones, the lowest id.

        -1 where the logits are no finite numbers, which nothing waits to find out.
        """
        assert logits.shape == (self.vocab,), f"logits of {self.vocab} tokens are needed; got {list(logits.shape)}"
        most, likeliest = logits.max(0)  # NaN where any of them is
        chosen = likeliest if self.sampling.temperature == 0 else self._random(logits - most)
        return chosen.where(most.isfinite(), -1)

    def _random(self, logits: torch.Tensor) -> torch.Tensor:
        """A token by its probability. Logits come less their maximum: a small temperature makes zeros of the others,
        where it would make infinities."""
        scaled = logits / self.sampling.temperature
        values, tokens = self._ranked(scaled)
        chosen = self._drawn(self._limited(values.softmax(-1)))
        return chosen if tokens is None else tokens.gather(0, chosen[None])[0]

    def _ranked(self, scaled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What `top_k` leaves, likeliest first, and which tokens these are; as it was where no order is needed."""
        if 0 < self.sampling.top_k < self.vocab:
            return scaled.topk(self.sampling.top_k)
        if self.sampling.top_p < 1:
            return scaled.sort(descending=True, stable=True)
        return scaled, None

    def _limited(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Probabilities with zeros where `top_p` and `min_p` leave nothing."""
        limited = probabilities
        if self.sampling.top_p < 1:
            before = probabilities.cumsum(-1, dtype=torch.float64) - probabilities
            limited = limited.where(before < self.sampling.top_p, 0)
        if self.sampling.min_p > 0:
            limited = limited.where(probabilities >= self.sampling.min_p * probabilities.max(), 0)
        return limited

    def _drawn(self, weights: torch.Tensor) -> torch.Tensor:
        """An index, int64 [], with a chance in proportion to its weight."""
        point = float(torch.rand((), generator=self._generator, dtype=torch.float64))
        sums = weights.cumsum(-1, dtype=torch.float64)
        return torch.searchsorted(sums, point * sums[-1:], right=True).clamp(max=len(weights) - 1)[0]


def choose_each(samplers: Sequence[Sampler], logits: torch.Tensor) -> torch.Tensor:
    """The token of each, int64 [n], as `Sampler.choose` has it, for logits float32 [n, vocab]."""
    most, likeliest = logits.max(-1)
    chosen = likeliest.where(most.isfinite(), -1)
    for i, sampler in enumerate(samplers):
        if not sampler.is_greedy:
            chosen[i] = sampler.choose(logits[i])
    return chosen


class Following(Sampler):
    """Chooses, and goes on with the tokens of a given text instead; `chosen` are those of its own."""

    def __init__(self, text: Sequence[int], vocab: int) -> None:
        super().__init__(Sampling(), vocab)
        self._text = iter(text)
        self.chosen: list[int] = []

    def settle(self, token: int) -> int:
        """The next token of the text; -1 stays what it is."""
        self.chosen.append(token)
        return token if token < 0 else next(self._text)


def _check(name: str, value: object, fits: bool, wanted: str) -> None:
    if not fits:
        raise SettingError(f"{name} must be {wanted}; got {value}")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
