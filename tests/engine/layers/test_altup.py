from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import Gemma3nTextConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextAltUp, Gemma3nTextLaurelBlock

from lazyio.engine.layers.altup import AltUp, Laurel, rescaled

HIDDEN, STREAMS, EPS, TOKENS = 24, 3, 1e-6, 7
CONFIG = Gemma3nTextConfig(
    hidden_size=HIDDEN, altup_num_inputs=STREAMS, num_hidden_layers=5, num_kv_shared_layers=0, laurel_rank=4
)


def same_weights(ours: nn.Module, reference: nn.Module) -> None:
    reference.requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in reference.parameters():
        parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    ours.load_state_dict(reference.state_dict())
    ours.requires_grad_(False)


def random(*shape: int, seed: int) -> torch.Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_streams_are_predicted_and_corrected():
    ours, reference = AltUp(STREAMS, HIDDEN, EPS), Gemma3nTextAltUp(CONFIG)
    same_weights(ours, reference)
    # transformers has streams first, and a batch.
    streams = random(TOKENS, STREAMS, HIDDEN, seed=2)
    theirs = reference.predict(streams.transpose(0, 1)[:, None])
    predicted = ours.predict(streams)
    torch.testing.assert_close(predicted, theirs[:, 0].transpose(0, 1))
    active = random(TOKENS, HIDDEN, seed=3)
    corrected = reference.correct(theirs, active[None])
    torch.testing.assert_close(ours.correct(predicted, active), corrected[:, 0].transpose(0, 1))


def test_the_residual_of_low_rank():
    ours, reference = Laurel(HIDDEN, 4, EPS), Gemma3nTextLaurelBlock(CONFIG)
    same_weights(ours, reference)
    x = random(TOKENS, HIDDEN, seed=4)
    torch.testing.assert_close(ours(x), reference(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rescaling_gives_one_the_size_of_the_other(dtype: torch.dtype):
    # The square of 1,000 is not a number that float16 has.
    x, like = ((size * random(TOKENS, HIDDEN, seed=5)).to(dtype) for size in (1000, 2000))
    found = rescaled(x, like)
    assert found.dtype == dtype
    size, wanted = (y.double().pow(2).mean(-1).sqrt() for y in (found, like))
    torch.testing.assert_close(size, wanted, rtol=1e-2, atol=0)
    assert (nn.functional.cosine_similarity(found.double(), x.double()) > 1 - 1e-5).all()


def test_what_is_almost_nothing_is_not_blown_up():
    tiny = torch.full((1, HIDDEN), 1e-4)
    found = rescaled(tiny, torch.ones(1, HIDDEN))
    torch.testing.assert_close(found, tiny / 1e-5**0.5)
