from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from lazyio.engine.layers import ngram_embedding
from lazyio.engine.layers.ngram_embedding import NgramEmbedding
from lazyio.engine.state import State
from lazyio.engine.ubatch import Ubatch
from lazyio.errors import Unsupported
from lazyio.kernels.ple_block import CONVOLVE, Arguments, ple_block, supports


def in_parts(given: Arguments, sizes: Sequence[int]) -> list[torch.Tensor]:
    """The tokens of one sequence in chunks of these sizes: what is added, and the history."""
    history, found = [given.history[0].clone()], []
    parts = zip(*(x.split(list(sizes)) for x in (given.streams, given.keys, given.values)), strict=True)
    for streams, keys, values in parts:
        found.append(ple_block(streams, keys, values, given.weights, [(0, len(values))], history))
    return [torch.cat(found), *history]


@pytest.mark.parametrize("sizes", [[20, 15], [1] * 11, [9, 8, 10], [19, 1]], ids=str)
def test_cuts_change_no_bit(sizes: list[int], device: torch.device):
    given = Arguments.random(device, 1, [sum(sizes)])
    for found, expected in zip(in_parts(given, sizes), given.results(ple_block), strict=True):
        assert torch.equal(found, expected)


def test_sequences_of_one_launch_are_those_of_a_launch_each(device: torch.device):
    lengths = [7, 1, 20, 1]
    given = Arguments.random(device, 2, lengths)
    together, *histories = given.results(ple_block)
    for i, (start, length) in enumerate(given.spans):
        here = slice(start, start + length)
        alone = replace(
            given,
            streams=given.streams[here],
            keys=given.keys[here],
            values=given.values[here],
            spans=((0, length),),
            history=(given.history[i],),
        )
        found, last = alone.results(ple_block)
        assert torch.equal(found, together[here])
        assert torch.equal(last, histories[i])


def test_the_smallest_gate(device: torch.device):
    """A key at right angles to the streams opens the gate half."""
    given = Arguments.random(device, 3, [4])
    given = replace(given, keys=torch.zeros_like(given.keys), history=(torch.zeros_like(given.history[0]),))
    no_taps = given.weights._replace(conv=torch.zeros_like(given.weights.conv))
    found = replace(given, weights=no_taps).results(ple_block)[0]
    torch.testing.assert_close(found, 0.5 * given.values.repeat(1, 3))


class Ready:
    """Rows that are there."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def values(self) -> torch.Tensor:
        return self._rows


def test_a_layer_with_the_kernel_is_the_layer_without(device: torch.device, monkeypatch: pytest.MonkeyPatch):
    layer = NgramEmbedding(16, 3, 48, 4, 3, 1e-6).to(device).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    sizes = [[14, 1], [3, 7], [1, 1]]
    given = torch.randn(sum(map(sum, sizes)), 3 * 16 + 48, generator=generator).to(device)
    launched = []
    monkeypatch.setattr(ngram_embedding, "ple_block", lambda *of: launched.append(len(of[4])) or ple_block(*of))

    def outputs() -> torch.Tensor:
        states = [State({layer.conv1d: layer.conv1d.new_piece(64, torch.float32, device)}, 64) for _ in sizes]
        ends, found = [0, *accumulate(sum(step) for step in zip(*sizes, strict=True))], []
        for at, stop, step in zip(ends, ends[1:], zip(*sizes, strict=True), strict=False):
            ubatch = Ubatch.of([(state, [0] * n) for state, n in zip(states, step, strict=True)], device)
            streams, rows = given[at:stop].split([48, 48], 1)
            found.append(layer(streams.contiguous(), ubatch, Ready(rows.contiguous())))
            for state, n in zip(states, step, strict=True):
                state.tokens += n
        return torch.cat([*found, *(state.pieces[layer.conv1d].entries for state in states)])

    expected = outputs()
    assert not launched
    monkeypatch.setattr(NgramEmbedding, "_fused", lambda *_: True)
    torch.testing.assert_close(outputs(), expected, rtol=2e-5, atol=2e-5)
    assert launched == [3, 3]


def test_where_the_kernel_is_used(monkeypatch: pytest.MonkeyPatch):
    layer = NgramEmbedding(16, 3, 48, 4, 3, 1e-6)
    assert not layer._fused(torch.zeros(1, 48, dtype=torch.bfloat16))
    monkeypatch.setattr(ngram_embedding, "usable", lambda _: True)
    assert layer._fused(torch.zeros(1, 48, dtype=torch.bfloat16))
    assert not layer._fused(torch.zeros(1, 48))


def test_what_has_no_kernel():
    assert supports(torch.bfloat16, 2560, 9)
    assert not supports(torch.float64, 2560, 9)
    assert not supports(torch.bfloat16, 2560, 17)
    given = Arguments.random(torch.device("cpu"), 0, [2], torch.float64)
    with pytest.raises(
        Unsupported, match=r"no kernel for torch\.float64, streams of 24 and a convolution that reaches 9"
    ):
        given.results(ple_block)


@pytest.mark.parametrize(
    "change",
    [
        lambda given: replace(given, streams=given.streams[:3]),
        lambda given: replace(given, keys=given.keys.T.contiguous().T),
        lambda given: replace(given, values=given.values.half()),
        lambda given: replace(given, weights=given.weights._replace(norm_key=given.weights.norm_key[1:])),
        lambda given: replace(given, weights=given.weights._replace(conv=given.weights.conv.T.contiguous().T)),
        lambda given: replace(given, spans=((0, 3),)),
        lambda given: replace(given, history=()),
        lambda given: replace(given, history=(given.history[0][1:],)),
        lambda given: replace(given, history=(given.history[0].half(),)),
        lambda given: replace(given, keys=given.keys.to("meta")),
    ],
)
def test_what_does_not_fit_is_never_launched(change):
    given = change(Arguments.random(torch.device("cpu"), 0, [4]))
    with pytest.raises(AssertionError):
        given.results(ple_block)


def test_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from lazyio.kernels.ple_block import *\n"
        "given = Arguments.random(torch.device('cpu'), 0, [4])\n"
        "given.results(reference); given.results(ple_block)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "lazyio.errors.Unsupported: the kernel of the block of a table of n-grams needs Triton, which"
    )


def test_bodies_compile_for_an_h200(compile_for_h200: Callable[..., list[tuple[str, int, str]]]):
    """Which need not be there."""
    types = {"gates": "*fp32", "eps": "fp32", "blocks": "*i32", "places": "*i64"}
    rows, width, warps = CONVOLVE
    shape = {"STREAMS": 4, "HIDDEN": 2560}
    launches = [
        ("gate", dict(shape, BLOCK=4096), warps, 3),
        ("convolve", dict(shape, KERNEL=4, DILATION=3, REACH=9, ROWS=rows, KEPT=16, WIDTH=width), warps, 3),
    ]
    found = compile_for_h200("lazyio.kernels.ple_block_bodies", launches, types)
    compiled = {name: text for name, _, text in found}
    assert list(compiled) == ["gate", "convolve"]
    assert all("ld.global.v4" in text or "ld.global.v2" in text for text in compiled.values())
    assert "bar.sync" in compiled["convolve"]
