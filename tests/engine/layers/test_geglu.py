from __future__ import annotations

import pytest
import torch
from transformers import Gemma3nTextConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP

from lazyio.engine.layers.geglu import GeGlu

HIDDEN, WIDTH = 24, 40


def both(sparsity: float) -> tuple[Gemma3nTextMLP, GeGlu]:
    config = Gemma3nTextConfig(
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        num_hidden_layers=5,
        num_kv_shared_layers=0,
        activation_sparsity_pattern=[sparsity] * 5,
    )
    torch.manual_seed(1)
    reference = Gemma3nTextMLP(config).requires_grad_(False)
    ours = GeGlu(HIDDEN, WIDTH, sparsity)
    ours.load_state_dict(reference.state_dict())
    return reference, ours.requires_grad_(False)


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.95])
def test_gates_are_cut_as_in_transformers(sparsity: float):
    reference, ours = both(sparsity)
    x = 5 * torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(ours(x), reference(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_cut_is_that_of_the_dtype(dtype: torch.dtype):
    reference, ours = both(0.95)
    reference, ours = reference.to(dtype), ours.to(dtype)
    x = (5 * torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(2))).to(dtype)
    assert torch.equal(ours(x), reference(x))
