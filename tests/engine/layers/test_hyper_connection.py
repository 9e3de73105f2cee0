from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextGatedResidual

from lazyio.engine.layers.hyper_connection import HyperConnection, StreamMixer, Streams

HIDDEN, STREAMS, RANK, EPS = 24, 3, 5, 1e-6


def both(inject: bool) -> tuple[nn.Module, nn.Module]:
    """The module of transformers and ours, with the same random weights."""
    config = Qwen4ExpTextConfig(hidden_size=HIDDEN, hc_count=STREAMS, hc_lowrank=RANK, rms_norm_eps=EPS)
    reference = Qwen4ExpTextGatedResidual(config, use_combine=inject).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in reference.parameters():
        parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    ours = (HyperConnection if inject else StreamMixer)(HIDDEN, STREAMS, RANK, EPS)
    ours.load_state_dict(reference.state_dict())
    return reference, ours.requires_grad_(False)


def values(tokens: int) -> torch.Tensor:
    # Streams of different sizes, so that it matters which of them a norm is over.
    scale = torch.tensor([0.1, 1.0, 30.0]).repeat_interleave(HIDDEN)
    return scale * torch.randn(tokens, STREAMS * HIDDEN, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("tokens", [1, 7])
def test_the_input_of_a_block_and_its_output_in_the_streams(tokens: int):
    reference, ours = both(inject=True)
    mixed, before, weights = reference(values(tokens))
    seen = []

    def block(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return torch.sin(3 * x)

    found = ours(Streams(values(tokens), STREAMS), block)
    torch.testing.assert_close(seen[0], mixed)
    expected = before.unflatten(-1, (STREAMS, HIDDEN)) + weights[..., None] * torch.sin(3 * mixed)[:, None]
    torch.testing.assert_close(found.now(), expected.flatten(-2))
    seen.clear()
    ours(found, block)
    torch.testing.assert_close(seen[0], reference(expected.flatten(-2))[0])


def test_what_comes_out_of_the_streams():
    reference, ours = both(inject=False)
    torch.testing.assert_close(ours(Streams(values(7), STREAMS)), reference(values(7)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype):
    reference, ours = both(inject=True)
    mixed, before, weights = reference(values(5))
    expected = before + (weights[..., None] * mixed[:, None]).flatten(-2)
    found = ours.to(dtype)(Streams(values(5).to(dtype), STREAMS), lambda x: x).now()
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=3e-2, atol=3e-2)
