from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lazyio.engine.layers import hyper_connection as layers
from lazyio.engine.layers.hyper_connection import HyperConnection, StreamMixer, Streams
from lazyio.engine.layers.linear import Linear
from lazyio.errors import Unsupported
from lazyio.kernels.hyper_connection import BLEND, CONNECT, MIX, Arguments, blend, connect, mix, supports

HIDDEN, COUNT, RANK = 24, 3, 5


def some(device: torch.device, seed: int = 0, tokens: int = 5) -> Arguments:
    return Arguments.random(device, seed, tokens, COUNT, HIDDEN, RANK, torch.float32)


def test_added_then_normed_is_as_in_one_pass(device: torch.device):
    given = some(device)
    both = connect(given.streams, COUNT, given.given, given.norm)
    added = connect(given.streams, COUNT, given.given)
    assert added.normed is None
    assert added.logits is None
    then = connect(added.streams, COUNT, None, given.norm)
    assert then.streams is added.streams
    for found, expected in zip(then, both, strict=True):
        assert torch.equal(found, expected)
    without = connect(added.streams, COUNT, None, given.norm._replace(inject=None))
    assert torch.equal(without.normed, both.normed)
    assert without.logits is None


def test_tokens_do_not_depend_on_those_beside_them(device: torch.device):
    given = some(device, tokens=5)
    whole = connect(given.streams, COUNT, given.given, given.norm)
    of_one = type(given.given)(*(x[4:] for x in given.given))
    last = connect(given.streams[4:], COUNT, of_one, given.norm)
    for found, expected in zip(last, whole, strict=True):
        assert torch.equal(found, expected[4:])


def test_logits_in_any_number_of_parts(device: torch.device):
    given = some(device)
    one = given.given._replace(logits=given.given.logits.sum(1, keepdim=True))
    found, expected = (connect(given.streams, COUNT, x).streams for x in (one, given.given))
    torch.testing.assert_close(found, expected)


@pytest.fixture
def net(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Callable[[type], HyperConnection | StreamMixer]:
    """Layers that use kernels in float32 too."""
    monkeypatch.setattr(Streams, "fused", True)

    def make(kind: type) -> HyperConnection | StreamMixer:
        layer = kind(HIDDEN, COUNT, RANK, 1e-6).to(device)
        generator = torch.Generator().manual_seed(2)
        for parameter in layer.parameters():
            parameter.data = 0.5 * torch.randn(parameter.shape, generator=generator).to(device)
        return layer.requires_grad_(False)

    return make


class Packed(Linear):
    """One whose weight is not as it is multiplied."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.float().T


@pytest.mark.parametrize("tokens", [3, 17])
@pytest.mark.parametrize("packed", [False, True])
def test_layers_with_kernels_are_those_without(net, packed: bool, tokens: int, device: torch.device, monkeypatch):
    one_net, other_net, mixer = net(HyperConnection), net(HyperConnection), net(StreamMixer)
    other_net.hc_norm.weight.mul_(-0.3)
    if packed:
        for one in (one_net.block_inject_weight, one_net.input_mix_weight_up, mixer.input_mix_weight_up):
            one.__class__, one.weight = Packed, torch.nn.Parameter(one.weight.double(), requires_grad=False)
    streams = Streams(some(device, tokens=tokens).streams, COUNT)

    def outputs() -> list[torch.Tensor]:
        after = other_net(one_net(streams, lambda x: torch.sin(3 * x)), torch.cos)
        return [after.now(), mixer(after)]

    launched = []
    for name in ("connect", "mix", "blend"):
        kernel = getattr(layers, name)
        monkeypatch.setattr(
            layers, name, lambda *given, kernel=kernel, name=name: launched.append(name) or kernel(*given)
        )
    fused = outputs()
    first, second, last = ["blend", "mix", "blend"] if packed else ["mix"] * 3
    assert launched == ["connect", first, "connect", second, "connect", "connect", last]
    monkeypatch.setattr(Streams, "fused", False)
    for found, expected in zip(fused, outputs(), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def test_where_kernels_are_used(monkeypatch: pytest.MonkeyPatch):
    assert not Streams(torch.zeros(1, 8, dtype=torch.bfloat16), 2).fused
    monkeypatch.setattr(layers, "usable", lambda _: True)
    assert Streams(torch.zeros(1, 8, dtype=torch.bfloat16), 2).fused
    assert not Streams(torch.zeros(1, 8), 2).fused


def test_what_has_no_kernel():
    assert supports(torch.bfloat16, 4, 2560)
    assert not supports(torch.float64, 4, 2560)
    assert not supports(torch.float32, 17, 8)
    with pytest.raises(Unsupported, match=r"no kernel for torch\.float64 and 3 streams of 8: it is for float32, bf"):
        connect(torch.zeros(1, 24, dtype=torch.float64), 3)


@pytest.mark.parametrize(
    "change",
    [
        lambda given: replace(given, streams=given.streams[:, :-1]),
        lambda given: replace(given, streams=given.streams.T.contiguous().T),
        lambda given: replace(given, given=given.given._replace(output=given.given.output[:3])),
        lambda given: replace(given, given=given.given._replace(output=given.given.output.half())),
        lambda given: replace(given, given=given.given._replace(logits=given.given.logits[:, 0])),
        lambda given: replace(given, given=given.given._replace(logits=given.given.logits.half())),
        lambda given: replace(given, norm=given.norm._replace(weight=given.norm.weight[:-1])),
        lambda given: replace(given, norm=given.norm._replace(inject=given.norm.inject.T)),
        lambda given: replace(given, up=given.up.T.contiguous().T),
        lambda given: replace(given, up=given.up.half()),
        lambda given: replace(given, given=given.given._replace(logits=given.given.logits.to("meta"))),
    ],
)
def test_what_does_not_fit_is_never_launched(change, device: torch.device):
    given = some(device)
    launch_both(given)
    with pytest.raises(AssertionError):
        launch_both(change(given))


def launch_both(given: Arguments) -> None:
    connect(given.streams, given.count, given.given, given.norm)
    mix(given.streams[:, :RANK].contiguous(), given.up, given.streams, given.count)


def test_a_gate_of_other_streams_is_never_launched():
    with pytest.raises(AssertionError):
        blend(torch.zeros(5, 8), torch.zeros(5, 16), 2)


def test_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from lazyio.kernels.hyper_connection import *\n"
        "given = Arguments.random(torch.device('cpu'), 0, 1, 2, 8, 4, torch.float32)\n"
        "given.expected(); given.run()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("lazyio.errors.Unsupported: the kernel of hyper-connections needs Triton, which can't be")


def test_bodies_compile_for_an_h200(compile_for_h200: Callable[..., list[tuple[str, int, str]]]):
    """Which need not be there."""
    shape = {"STREAMS": 4, "HIDDEN": 2560}
    types = {"logits": "*fp32", "injected": "*fp32", "eps": "fp32", "tokens": "i32"}
    rows, warps = CONNECT
    connect = dict(shape, BLOCK=4096, ROWS=rows, PARTS=4, NORM=True, INJECT=True)
    launches: list[tuple[str, dict[str, Any], int, int]] = [("connect", connect, warps, 3)]
    for one in MIX:
        sizes = {"RANK": 320, "BESIDE": 4, "ROWS": one.rows, "WIDTH": one.width, "PART": 64, "ACTIVATE": one.activate}
        launches.append(("mix", shape | sizes, one.warps, one.stages))
    launches.append(("blend", dict(shape, WIDTH=BLEND[0]), BLEND[1], 3))
    compiled = compile_for_h200("lazyio.kernels.hyper_connection_bodies", launches, types)
    assert [name for name, _, _ in compiled] == ["connect", "mix", "mix", "blend"]
    for name, shared_bytes, text in compiled:
        assert shared_bytes <= 100_000  # so that two programs have room beside each other
        assert "ld.global.v4" in text or "cp.async.cg.shared.global" in text, name
    assert "wgmma.mma_async" in compiled[2][2]
