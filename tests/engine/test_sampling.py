from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lazyio.engine.sampling import Sampler, Sampling
from lazyio.errors import SettingError

PROBABILITIES = torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15])
LOGITS = PROBABILITIES.log() + 3


def frequencies(logits: torch.Tensor = LOGITS, draws: int = 2000, **options: float) -> torch.Tensor:
    sampler = Sampler(Sampling(seed=1, **options), len(logits))
    drawn = torch.stack([sampler.choose(logits) for _ in range(draws)])
    return torch.bincount(drawn, minlength=len(logits)) / draws


def kept(**options: float) -> list[float]:
    """The probabilities that limits leave, by a slow way, for the five tokens above."""
    temperature = options.get("temperature", 1.0)
    weights = {token: float(p) ** (1 / temperature) for token, p in enumerate(PROBABILITIES)}
    order = sorted(weights, key=lambda token: -weights[token])
    order = order[: int(options.get("top_k", 0)) or None]
    total, nucleus = sum(weights[token] for token in order), []
    for token in order:
        if sum(weights[other] for other in nucleus) / total >= options.get("top_p", 1.0):
            break
        nucleus.append(token)
    left = [token for token in nucleus if weights[token] >= options.get("min_p", 0.0) * weights[order[0]]]
    total = sum(weights[token] for token in left)
    return [weights[token] / total if token in left else 0.0 for token in weights]


def test_greedy_takes_the_lowest_of_equals():
    logits = torch.tensor([1.0, 7.0, 7.0, -3.0])
    chosen = Sampler(Sampling(), 4).choose(logits)
    assert (chosen.shape, chosen.dtype, int(chosen)) == ((), torch.int64, 1)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.75},
        {"temperature": 1.0, "min_p": 0.3},
        {"temperature": 1.0, "top_k": 4, "top_p": 0.85, "min_p": 0.2},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_k": 99, "top_p": 1e-9},
    ],
)
def test_tokens_come_by_what_limits_leave_of_their_probability(options: dict[str, float]):
    wanted = torch.tensor(kept(**options))
    measured = frequencies(**options)
    assert torch.equal(measured == 0, wanted == 0)
    # Five standard deviations of a frequency over 2,000 draws.
    assert (measured - wanted).abs().max() < 5 * math.sqrt(0.25 / 2000)


def test_choices_are_tokens_of_the_vocabulary_in_type_and_shape():
    chosen = Sampler(Sampling(temperature=1.0, top_k=2, seed=3), 5).choose(LOGITS)
    assert (chosen.shape, chosen.dtype) == ((), torch.int64)


def test_a_seed_repeats_choices_and_another_does_not():
    logits = torch.zeros(1000)

    def drawn(seed: int | None) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.0, seed=seed), 1000)
        return [int(sampler.choose(logits)) for _ in range(8)]

    assert drawn(5) == drawn(5) != drawn(6)
    assert drawn(None) != drawn(None)


def test_a_sequence_is_not_disturbed_by_another():
    logits = torch.zeros(1000)
    one, other = (Sampler(Sampling(temperature=1.0, seed=seed), 1000) for seed in (5, 6))
    alone = Sampler(Sampling(temperature=1.0, seed=5), 1000)
    mixed = [(int(one.choose(logits)), int(other.choose(logits)))[0] for _ in range(8)]
    assert mixed == [int(alone.choose(logits)) for _ in range(8)]


def test_a_tiny_temperature_and_impossible_tokens():
    logits = torch.tensor([-math.inf, 1e30, 2e30, -math.inf])
    sampler = Sampler(Sampling(temperature=1e-30, seed=1), 4)
    assert {int(sampler.choose(logits)) for _ in range(50)} == {2}
    flat = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    sampler = Sampler(Sampling(temperature=1.0, seed=1), 5)
    assert {int(sampler.choose(flat)) for _ in range(200)} == {1, 3}


@pytest.mark.parametrize("point", [0.0, 1 - 2**-53])
def test_the_ends_of_chance(monkeypatch: pytest.MonkeyPatch, point: float):
    monkeypatch.setattr(torch, "rand", lambda *_, **options: torch.tensor(point, dtype=options["dtype"]))
    sampler = Sampler(Sampling(temperature=1.0), 4)
    assert int(sampler.choose(torch.tensor([-math.inf, 0.0, 0.0, -math.inf]))) == (1 if point == 0 else 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be 0"),
        ({"temperature": math.nan}, "got nan"),
        ({"temperature": math.inf}, "got inf"),
        ({"temperature": 1, "top_k": -1}, "top_k must be an integer, 0"),
        ({"temperature": 1, "top_k": 1.5}, "got 1.5"),
        ({"temperature": 1, "top_p": 0}, "top_p must be more than 0"),
        ({"temperature": 1, "top_p": 1.1}, "got 1.1"),
        ({"temperature": 1, "min_p": 2}, "min_p must be 0"),
        ({"seed": -1}, "seed must be 0 to"),
        ({"seed": 2**63}, "seed must be 0 to"),
        ({"top_k": 5}, "top_k 5 has no effect at temperature 0"),
        ({"top_p": 0.5}, "top_p 0.5 has no effect"),
        ({"min_p": 0.5}, "leave min_p out"),
    ],
)
def test_wrong_values_are_refused(options: dict[str, float], message: str):
    with pytest.raises(SettingError, match=message):
        Sampling(**options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{}, {"top_k": 40}, {"top_p": 0.9, "min_p": 0.01}])
def test_a_seed_means_the_same_on_a_gpu_and_nothing_waits_for_it(never_waiting: Any, options: dict[str, float]):
    logits = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    on_host, on_device = (Sampler(Sampling(temperature=0.8, seed=5, **options), 4096) for _ in range(2))
    moved = logits.cuda()
    on_device.choose(moved)
    on_host.choose(logits)
    with never_waiting():
        chosen = [on_device.choose(moved) for _ in range(20)]
    assert torch.stack(chosen).tolist() == [int(on_host.choose(logits)) for _ in range(20)]
