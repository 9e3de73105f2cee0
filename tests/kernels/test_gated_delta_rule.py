from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from lazyio.engine.layers import gated_delta_net
from lazyio.engine.layers.gated_delta_net import GatedDeltaNet
from lazyio.engine.state import State
from lazyio.engine.ubatch import Ubatch
from lazyio.errors import Unsupported
from lazyio.kernels.gated_delta_rule import ADVANCE, Arguments, Chunk, _work, gated_delta_rule, reference, supports


def of_one(tokens: int, before: int, device: torch.device, seed: int = 3) -> Arguments:
    """A sequence as the device's way of running kernels allows: small where they are interpreted."""
    if device.type == "cpu":
        return Arguments.random(device, seed, [(tokens, before)])
    return Arguments.random(device, seed, [(tokens, before)], torch.bfloat16, (16, 48), (128, 128))


def run(given: Arguments) -> tuple[torch.Tensor, list[torch.Tensor]]:
    outputs, *memory = given.results(gated_delta_rule)
    return outputs, memory


def in_parts(given: Arguments, sizes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of one sequence in chunks of these sizes."""
    before, memory, outputs = given.chunks[0].before, given.memory[0].clone(), []
    tensors = [x.split(list(sizes)) for x in (given.q, given.k, given.v, given.beta, given.log_decay)]
    for q, k, v, beta, log_decay in zip(*tensors, strict=True):
        chunk = Chunk(0, len(q), before)
        outputs.append(gated_delta_rule(q, k, v, beta.contiguous(), log_decay.contiguous(), [chunk], [memory]))
        before += len(q)
    return torch.cat(outputs), memory


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize(
    ("before", "sizes"), [(0, [64, 10]), (37, [27, 64, 3]), (0, [64, 1]), (60, [4, 64, 1])], ids=str
)
def test_cuts_between_blocks_change_no_bit(before: int, sizes: list[int], device: torch.device):
    given = of_one(sum(sizes), before, device)
    whole, (last,) = run(given)
    found, memory = in_parts(given, sizes)
    assert torch.equal(found, whole)
    assert torch.equal(memory, last)


@pytest.mark.parametrize("sizes", [[40, 30], [69, 1], [30, *[1] * 10, 30]], ids=str)
def test_cuts_within_blocks_and_steps_give_the_same_but_for_rounding(sizes: list[int], device: torch.device):
    given = of_one(70, 10, device)
    found, memory = in_parts(given, sizes)
    exact, last = replace(given, memory=tuple(one.double() for one in given.memory)).results(reference)
    within = 1e-6 if device.type == "cpu" else 1e-2
    assert relative(found, exact) < within
    assert relative(memory, last) < within


def test_one_token_is_a_step_wherever_it_lies():
    work = _work((Chunk(0, 1, 9), Chunk(1, 66, 63), Chunk(67, 8, 0)), torch.device("cpu"))
    assert (work.stepping, work.tokens.tolist()) == ((0, 1), [0, 66])
    assert (work.following, work.sequences.tolist()) == ((1, 2), [[-62, 1, 66, 0], [67, 67, 75, 2]])
    assert work.blocks.tolist() == [[-62, 1, 66], [2, 1, 66], [67, 67, 75]]


def test_all_steps_share_their_tables(device: torch.device):
    of_one(1, 5, device).results(gated_delta_rule)
    before = _work.cache_info().misses
    of_one(1, 6, device).results(gated_delta_rule)
    assert _work.cache_info().misses == before


def test_sequences_of_one_launch_are_those_of_a_launch_each(device: torch.device):
    sizes = [(3, 62), (1, 70), (1, 0), (65, 0), (8, 100)]
    of_each = [of_one(tokens, before, device, seed) for seed, (tokens, before) in enumerate(sizes)]
    starts = [sum(tokens for tokens, _ in sizes[:i]) for i in range(len(sizes))]
    together = Arguments(
        *(torch.cat([getattr(one, name) for one in of_each]) for name in ("q", "k", "v", "beta", "log_decay")),
        tuple(Chunk(start, *size) for start, size in zip(starts, sizes, strict=True)),
        tuple(one.memory[0] for one in of_each),
    )
    outputs, memories = run(together)
    for one, chunk, memory in zip(of_each, together.chunks, memories, strict=True):
        alone, (last,) = run(one)
        assert torch.equal(outputs[chunk.start : chunk.start + chunk.length], alone)
        assert torch.equal(memory, last)


def test_bfloat16_is_as_near_as_its_rounding_allows(device: torch.device):
    if device.type == "cpu":
        pytest.skip("the interpreter does not round to bfloat16")
    given = Arguments.random(device, 5, [(2000, 0)], torch.bfloat16, (16, 48), (128, 128))
    found, memory = (x.double() for x in given.results(gated_delta_rule))
    exact, last = replace(given, memory=tuple(one.double() for one in given.memory)).results(reference)
    assert relative(found, exact) < 6e-3
    assert relative(memory, last) < 6e-3
    assert abs((found * exact).sum() / (exact * exact).sum() - 1) < 1e-3  # rounding has no direction


@pytest.mark.parametrize("dims", [(16, 64), (64, 16)], ids=str)
def test_heads_of_other_dimensions(dims: tuple[int, int], device: torch.device):
    given = Arguments.random(device, 6, [(9, 60), (1, 3)], heads=(1, 3), dims=dims)
    for found, expected in zip(given.results(gated_delta_rule), given.results(reference), strict=True):
        assert relative(found, expected) < 2e-5


def test_tensors_may_lie_anywhere(device: torch.device):
    given = of_one(5, 61, device)
    moved = {}
    for name in ("q", "k", "v"):
        x = getattr(given, name)
        wide = torch.full((len(x), 3 * x.shape[1] + 1, x.shape[2]), float("nan"), dtype=x.dtype, device=device)
        moved[name] = wide[:, 1 : 1 + x.shape[1]].copy_(x)
    for found, expected in zip(run(replace(given, **moved)), run(given), strict=True):
        assert torch.equal(torch.stack([*found]), torch.stack([*expected]))


def test_what_has_no_kernel():
    assert supports(128, 64)
    assert not supports(8, 128)
    assert not supports(128, 96)
    given = Arguments.random(torch.device("cpu"), 0, [(2, 0)], dims=(16, 8))
    with pytest.raises(Unsupported, match=r"no kernel for torch\.float32 and heads of 16 and 8: it has those for"):
        given.results(gated_delta_rule)
    given = Arguments.random(torch.device("cpu"), 0, [(2, 0)], torch.float64)
    with pytest.raises(Unsupported, match=r"no kernel for torch\.float64"):
        given.results(gated_delta_rule)


@pytest.mark.parametrize(
    "change",
    [
        lambda given: replace(given, beta=given.beta.half()),
        lambda given: replace(given, log_decay=given.log_decay[:3]),
        lambda given: replace(given, k=given.k[:3]),
        lambda given: replace(given, q=given.q.half()),
        lambda given: replace(given, v=given.v.transpose(0, 1).contiguous().transpose(0, 1)),
        lambda given: replace(given, memory=()),
        lambda given: replace(given, memory=(given.memory[0].transpose(1, 2),)),
        lambda given: replace(given, chunks=(Chunk(0, 3, 0),)),
        lambda given: replace(given, beta=given.beta.to("meta")),
    ],
)
def test_what_does_not_fit_is_never_launched(change):
    with pytest.raises(AssertionError):
        change(Arguments.random(torch.device("cpu"), 0, [(4, 0)])).results(gated_delta_rule)


def test_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from lazyio.kernels.gated_delta_rule import *\n"
        "given = Arguments.random(torch.device('cpu'), 0, [(4, 0)])\n"
        "given.results(reference); given.results(gated_delta_rule)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("lazyio.errors.Unsupported: the kernel of the gated delta rule needs Triton, which can't be")


COMPILE = """
import json
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from lazyio.kernels import delta_rule_bodies as bodies
from lazyio.kernels.gated_delta_rule import ADVANCE, PREPARE, STEP, torch

shape = dict(HEADS=48, EACH=3, KEY=128, VALUE=128, Q_STRIDE=10240, K_STRIDE=10240, V_STRIDE=10240)
types = dict.fromkeys(("q", "k", "v", "out", "solved", "scores"), "*bf16")
types |= dict.fromkeys(("beta", "log_decay", "factors", "memory"), "*fp32")
types |= dict.fromkeys(("blocks", "sequences", "tokens"), "*i32") | {"places": "*i64"}
configs = {"prepare": PREPARE[torch.bfloat16][0], "advance": ADVANCE[torch.bfloat16][0], "step": STEP}
for name, config in configs.items():
    body = getattr(bodies, name)
    constants = {**shape, "PART": config.part, "WIDTH": config.part, "OPERAND": tl.bfloat16}
    at = {argument: (body.arg_names.index(argument),) for argument in body.arg_names}
    source = ASTSource(
        body,
        {argument: types.get(argument, "constexpr") for argument in at},
        {at[argument]: value for argument, value in constants.items() if argument in at},
        {place: [["tt.divisibility", 16]] for argument, place in at.items() if argument in types},
    )
    options = {"num_warps": config.warps, "num_stages": config.stages}
    compiled = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(json.dumps([name, [compiled.metadata.shared, compiled.asm["ptx"]]]))
"""


def test_bodies_compile_for_an_h200():
    """Which need not be there."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    compiled = dict(map(json.loads, done.stdout.splitlines()))
    assert list(compiled) == ["prepare", "advance", "step"]
    for name, (shared_bytes, text) in compiled.items():
        assert shared_bytes <= ADVANCE[torch.bfloat16][0].shared_bytes
        assert ("wgmma.mma_async" in text) == (name != "step")
        assert ("st.global.v4" in text) or ("st.global.v2" in text)
    # Every matrix that D and S are multiplied with arrives in shared memory by itself.
    assert "cp.async.cg.shared.global" in compiled["advance"][1]


@pytest.fixture
def layer(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> GatedDeltaNet:
    """With a kernel, interpreted on the CPU."""
    net = GatedDeltaNet(24, 2, 4, 16, 32, 4, 1e-6, "sigmoid").to(device)
    generator = torch.Generator().manual_seed(2)
    for parameter in net.parameters():
        parameter.data = 0.5 * torch.randn(parameter.shape, generator=generator).to(device)
    monkeypatch.setattr(gated_delta_net, "usable", lambda _: True)
    return net.requires_grad_(False)


def test_a_layer_with_the_kernel_is_the_layer_without(
    layer: GatedDeltaNet, device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    sizes = [[66, 1, 3], [3, 1, 1], [1, 1, 70]]
    generator = torch.Generator().manual_seed(1)
    ubatches = [
        [torch.randn(step, 24, generator=generator).to(device) for step in steps] for steps in zip(*sizes, strict=True)
    ]

    def outputs() -> torch.Tensor:
        states = [State({layer: layer.new_piece(80, torch.float32, device)}, 80) for _ in sizes]
        found = []
        for chunks in ubatches:
            ubatch = Ubatch.of([(state, [0] * len(x)) for state, x in zip(states, chunks, strict=True)], device)
            with torch.inference_mode():
                found.append(layer(torch.cat(chunks), ubatch))
            for state, x in zip(states, chunks, strict=True):
                state.tokens += len(x)
        memory = [state.pieces[layer].memory.value for state in states]
        return torch.cat([x.flatten() for x in (*found, *memory)])

    launched = []
    monkeypatch.setattr(
        gated_delta_net, "gated_delta_rule", lambda *given: launched.append(given) or gated_delta_rule(*given)
    )
    with_kernel = outputs()
    assert [chunk.before for _, _, _, _, _, chunks, _ in launched for chunk in chunks] == [0, 0, 0, 66, 3, 1, 67, 4, 2]
    monkeypatch.setattr(gated_delta_net, "usable", lambda _: False)
    assert relative(with_kernel, outputs()) < 2e-5
    assert len(launched) == len(ubatches)
