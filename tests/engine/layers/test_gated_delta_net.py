from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from lazyio.engine.layers.gated_delta_net import Convolution, GatedDeltaNet, GatedNorm
from lazyio.engine.state import State
from lazyio.engine.ubatch import Ubatch

CPU = torch.device("cpu")
HIDDEN, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, KERNEL, EPS = 24, 2, 4, 8, 6, 4, 1e-6


def net(gate: str = "silu", dtype: torch.dtype = torch.float32) -> GatedDeltaNet:
    layer = GatedDeltaNet(HIDDEN, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, KERNEL, EPS, gate)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in layer.named_parameters():
        values = 0.5 * torch.randn(parameter.shape, generator=generator)
        parameter.data = values if name in ("A_log", "dt_bias") else values.to(dtype)
    return layer.requires_grad_(False)


def inputs(tokens: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


def new_state(layer: GatedDeltaNet, dtype: torch.dtype = torch.float32) -> State:
    return State({layer: layer.new_piece(300, dtype, CPU)}, 300)


def run(layer: GatedDeltaNet, chunks: Sequence[tuple[State, torch.Tensor]]) -> list[torch.Tensor]:
    """Chunks of several sequences in one ubatch."""
    ubatch = Ubatch.of([(state, [0] * len(x)) for state, x in chunks], CPU)
    with torch.inference_mode():
        found = layer(torch.cat([x for _, x in chunks]), ubatch)
    for state, x in chunks:
        state.tokens += len(x)
    return list(found.split([len(x) for _, x in chunks]))


def as_written(layer: GatedDeltaNet, x: torch.Tensor, gate: str) -> torch.Tensor:
    """The formulas of the class, token by token and head by head, in float64."""
    w = {name: parameter.double() for name, parameter in layer.named_parameters()}
    x = x.double()
    mixed = torch.cat([torch.zeros(KERNEL - 1, len(w["in_proj_qkv.weight"])), x @ w["in_proj_qkv.weight"].T])
    z = (x @ w["in_proj_z.weight"].T).view(-1, VALUE_HEADS, VALUE_DIM)
    beta = (x @ w["in_proj_b.weight"].T).sigmoid()
    rate = (x @ w["in_proj_a.weight"].T + w["dt_bias"]).exp().log1p()
    memory = torch.zeros(VALUE_HEADS, KEY_DIM, VALUE_DIM, dtype=torch.float64)
    found = []
    for t in range(len(x)):
        c = sum(w["conv1d.weight"][:, 0, i] * mixed[t + i] for i in range(KERNEL))
        c = c * c.sigmoid()
        heads = []
        for head in range(VALUE_HEADS):
            of = head // (VALUE_HEADS // KEY_HEADS)
            q, k = (c[start : start + KEY_DIM] for start in (of * KEY_DIM, (KEY_HEADS + of) * KEY_DIM))
            q, k = (vector / (vector @ vector + 1e-6).sqrt() for vector in (q, k))
            v = c[2 * KEY_HEADS * KEY_DIM :][head * VALUE_DIM :][:VALUE_DIM]
            memory[head] *= (-w["A_log"][head].exp() * rate[t, head]).exp()
            memory[head] += torch.outer(k, beta[t, head] * (v - memory[head].T @ k))
            o = memory[head].T @ q / KEY_DIM**0.5
            normed = w["norm.weight"] * o / ((o @ o) / VALUE_DIM + EPS).sqrt()
            heads.append(normed * z[t, head].sigmoid() * (z[t, head] if gate == "silu" else 1.0))
        found.append(torch.cat(heads))
    return torch.stack(found) @ w["out_proj.weight"].T


@pytest.mark.parametrize("size", [1.0, 2e-3])  # with the small ones, what is added to squared norms counts
@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
def test_the_formulas(gate: str, size: float):
    layer, x = net(gate), size * inputs(75)
    expected = as_written(layer, x, gate)
    (found,) = run(layer, [(new_state(layer), x)])
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("cuts", [[1] * 10, [1, 2, 70, 1, 1], [3, 61, 11], [64, 11], [74, 1]], ids=str)
def test_state_is_carried_from_chunk_to_chunk(cuts: list[int]):
    layer, x = net(), inputs(sum(cuts))
    (expected,) = run(layer, [(new_state(layer), x)])
    state = new_state(layer)
    found = torch.cat([run(layer, [(state, part)])[0] for part in x.split(cuts)])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * expected.abs().max().item())


def test_sequences_of_one_ubatch_do_not_touch_each_other():
    layer = net()
    steps = [[3, 1, 1, 1, 1], [1, 1, 5, 1, 1], [2, 1, 1, 1, 9], [1, 1, 1, 1, 1]]
    parts = [inputs(sum(sizes), seed).split(sizes) for seed, sizes in enumerate(steps)]
    states = [new_state(layer) for _ in steps]
    together = [run(layer, list(zip(states, chunks, strict=True))) for chunks in zip(*parts, strict=True)]
    for i, chunks in enumerate(parts):
        state = new_state(layer)
        alone = torch.cat([run(layer, [(state, x)])[0] for x in chunks])
        found = torch.cat([outputs[i] for outputs in together])
        torch.testing.assert_close(found, alone, rtol=0, atol=2e-5 * alone.abs().max().item())


def test_a_clone_of_a_state_is_a_point_to_come_back_to():
    layer, x = net(), inputs(20)
    state, other = new_state(layer), new_state(layer)
    run(layer, [(state, x[:10]), (other, x[5:9])])
    run(layer, [(state, x[10:11]), (other, x[9:10])])  # steps of several, whose new S lie in one tensor
    kept = state.clone()
    assert kept.nbytes == state.nbytes == 4 * (VALUE_HEADS * KEY_DIM * VALUE_DIM + 3 * (32 + VALUE_HEADS * VALUE_DIM))
    first = [run(layer, [(state, part)])[0] for part in x[11:].split([1, 8])]
    again = [run(layer, [(kept, part)])[0] for part in x[11:].split([1, 8])]
    assert all(map(torch.equal, first, again))


@pytest.mark.parametrize(("dtype", "within"), [(torch.bfloat16, 0.03), (torch.float16, 0.005)])
def test_half_precision(dtype: torch.dtype, within: float):
    layer = net(dtype=dtype)
    x = inputs(70).to(dtype)
    state = new_state(layer, dtype)
    found = torch.cat([run(layer, [(state, part)])[0] for part in x.split([66, 1, 3])])
    assert found.dtype == dtype
    assert state.pieces[layer].memory.value.dtype == torch.float32
    expected = as_written(layer, x, "silu")
    assert (found - expected).abs().max() <= within * expected.abs().max()


@pytest.mark.parametrize("kernel", [1, 2, 5])
def test_a_convolution_of_another_width(kernel: int):
    convolution = Convolution(3, kernel)
    convolution.weight.data = torch.randn(3, 1, kernel, generator=torch.Generator().manual_seed(1))
    windows = torch.randn(2, convolution.reach + 4, 3, generator=torch.Generator().manual_seed(2))
    found = convolution(windows)
    expected = sum(windows[:, i : i + 4] * convolution.weight[:, 0, i] for i in range(kernel))
    torch.testing.assert_close(found, expected)


def test_the_weight_of_the_norm_is_multiplied_in_the_dtype_of_the_input():
    norm = GatedNorm(4, EPS, "sigmoid").to(torch.bfloat16)
    norm.weight.data = torch.tensor([1.01, 0.3, -2.0, 1.0]).bfloat16()
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).bfloat16()
    normed = (x.float() / (x.float().pow(2).mean() + EPS).sqrt()).bfloat16()
    z = torch.tensor([[0.1, -0.2, 3.0, 0.0]]).bfloat16()
    expected = ((normed * norm.weight).float() * z.float().sigmoid()).bfloat16()
    assert torch.equal(norm(x, z), expected)
