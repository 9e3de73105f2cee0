from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch

from lazyio.engine.layers import gated_delta_net
from lazyio.engine.layers.gated_delta_net import GatedDeltaNet
from lazyio.engine.state import State
from lazyio.engine.ubatch import Ubatch
from lazyio.errors import Unsupported
from lazyio.kernels import delta_net
from lazyio.kernels.delta_net import CONVOLVE, NORM, Arguments, convolve, gated_norm, rates, supports

SMALL = (40, 4, 3, 24)


def some(device: torch.device, lengths: Sequence[int], seed: int = 0) -> Arguments:
    return Arguments.random(device, seed, lengths, torch.float32, SMALL, "silu")


@pytest.mark.parametrize("sizes", [[20, 15], [1] * 9, [3, 2, 17], [19, 1]], ids=str)
def test_cuts_change_no_bit(sizes: list[int], device: torch.device):
    given = some(device, [sum(sizes)])
    whole, *_, last = given.run()
    history = [given.history[0].clone()]
    parts = [convolve(part, given.weight, [(0, len(part))], history) for part in given.inputs.split(sizes)]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(history[0], last)


def test_sequences_of_one_launch_are_those_of_a_launch_each(device: torch.device):
    given = some(device, [7, 1, 20, 1])
    history = [one.clone() for one in given.history]
    together = convolve(given.inputs, given.weight, given.spans, history)
    for i, (start, length) in enumerate(given.spans):
        alone = [given.history[i].clone()]
        found = convolve(given.inputs[start : start + length], given.weight, [(0, length)], alone)
        assert torch.equal(found, together[start : start + length])
        assert torch.equal(alone[0], history[i])


@pytest.mark.parametrize("gate", ["sigmoid", "silu"])
def test_a_layer_with_kernels_is_the_layer_without(gate: str, device: torch.device, monkeypatch: pytest.MonkeyPatch):
    net = GatedDeltaNet(24, 2, 4, 16, 32, 4, 1e-6, gate).to(device).requires_grad_(False)
    generator = torch.Generator().manual_seed(2)
    for parameter in net.parameters():
        parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    sizes = [[20, 1, 3], [2, 7, 1], [1, 1, 5]]
    steps = list(zip(*sizes, strict=True))
    x = torch.randn(sum(map(sum, sizes)), 24, generator=generator).to(device)
    launched = []
    for name in ("convolve", "rates", "gated_norm"):
        kernel = getattr(delta_net, name)
        monkeypatch.setattr(delta_net, name, lambda *of, kernel=kernel, name=name: launched.append(name) or kernel(*of))

    def outputs() -> list[torch.Tensor]:
        states = [State({net: net.new_piece(64, torch.float32, device)}, 64) for _ in sizes]
        ends, found = [0, *accumulate(map(sum, steps))], []
        for (start, stop), step in zip(pairwise(ends), steps, strict=True):
            ubatch = Ubatch.of([(state, [0] * n) for state, n in zip(states, step, strict=True)], device)
            with torch.inference_mode():
                found.append(net(x[start:stop], ubatch))
            for state, n in zip(states, step, strict=True):
                state.tokens += n
        pieces = [state.pieces[net] for state in states]
        return [torch.cat(found), *(piece.inputs.entries for piece in pieces), *(p.memory.value for p in pieces)]

    expected = outputs()
    assert not launched
    monkeypatch.setattr(GatedDeltaNet, "_fused", lambda *_: True)
    for found, one in zip(outputs(), expected, strict=True):
        torch.testing.assert_close(found, one, rtol=5e-5, atol=5e-5)
    assert launched == ["convolve", "rates", "gated_norm"] * 3


def test_where_kernels_are_used(monkeypatch: pytest.MonkeyPatch):
    net = GatedDeltaNet(24, 2, 4, 16, 32, 4, 1e-6, "silu")
    assert not net._fused(torch.zeros(1, 24, dtype=torch.bfloat16))
    monkeypatch.setattr(gated_delta_net, "usable", lambda _: True)
    assert net._fused(torch.zeros(1, 24, dtype=torch.bfloat16))
    assert not net._fused(torch.zeros(1, 24))


def test_what_has_no_kernel():
    assert supports(torch.bfloat16, 3, 128)
    assert not supports(torch.bfloat16, 17, 128)
    assert not supports(torch.bfloat16, 3, 2048)
    given = Arguments.random(torch.device("cpu"), 0, [2], torch.float64, SMALL, "silu")
    with pytest.raises(
        Unsupported, match=r"no kernel for torch\.float64, a convolution that reaches 3 tokens back and"
    ):
        given.run()


@pytest.mark.parametrize(
    "change",
    [
        lambda given: replace(given, inputs=given.inputs.T.contiguous().T),
        lambda given: replace(given, weight=given.weight[1:]),
        lambda given: replace(given, weight=given.weight.T.contiguous().T),
        lambda given: replace(given, spans=((0, 3),)),
        lambda given: replace(given, history=()),
        lambda given: replace(given, history=(given.history[0][1:],)),
        lambda given: replace(given, history=(given.history[0].half(),)),
        lambda given: replace(given, history=(given.history[0].to("meta"),)),
    ],
)
def test_what_does_not_fit_is_never_convolved(change):
    given = change(some(torch.device("cpu"), [4]))
    with pytest.raises(AssertionError):
        convolve(given.inputs, given.weight, given.spans, given.history)


@pytest.mark.parametrize("place", range(4))
def test_rates_that_do_not_fit_are_never_launched(place: int):
    sides = list(some(torch.device("cpu"), [4]).sides)
    sides[place] = sides[place][..., 1:]
    with pytest.raises(AssertionError):
        rates(*sides)


def test_norms_that_do_not_fit_are_never_launched():
    given = some(torch.device("cpu"), [4])
    for x, z, weight, gate in [
        (given.x, given.z[1:], given.norm, "silu"),
        (given.x, given.z.half(), given.norm, "silu"),
        (given.x, given.z, given.norm[1:], "silu"),
        (given.x, given.z, given.norm, "relu"),
        (given.x.transpose(0, 1), given.z.transpose(0, 1), given.norm, "silu"),
    ]:
        with pytest.raises(AssertionError):
            gated_norm(x, z, weight, 1e-6, gate)


def test_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from lazyio.kernels.delta_net import *\n"
        "given = Arguments.random(torch.device('cpu'), 0, [4], torch.float32, (8, 2, 2, 8), 'silu')\n"
        "given.expected(); given.run()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("lazyio.errors.Unsupported: the kernel around the delta rule needs Triton, which can't be")


def test_bodies_compile_for_an_h200(compile_for_h200: Callable[..., list[tuple[str, int, str]]]):
    """Which need not be there."""
    types = dict.fromkeys(("beta", "log_decay", "log_rate", "bias"), "*fp32")
    types |= {"eps": "fp32", "count": "i32", "blocks": "*i32", "places": "*i64"}
    rows, width, warps = CONVOLVE
    launches = [
        ("convolve", {"CHANNELS": 10240, "REACH": 3, "ROWS": rows, "KEPT": 4, "WIDTH": width}, warps, 3),
        ("rates", {"HEADS": 48, "BLOCK": 256}, 4, 3),
        ("gated_norm", {"DIM": 128, "BLOCK": 128, "ROWS": NORM[0], "SILU": False}, NORM[1], 3),
    ]
    found = compile_for_h200("lazyio.kernels.delta_net_bodies", launches, types)
    compiled = {name: text for name, _, text in found}
    assert list(compiled) == ["convolve", "rates", "gated_norm"]
    assert "ld.global.v4" in compiled["convolve"]
    assert "ld.global.v4" in compiled["gated_norm"]
    assert "bar.sync" in compiled["convolve"]
