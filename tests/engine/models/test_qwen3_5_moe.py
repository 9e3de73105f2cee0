from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lazyio.engine.models import model_class
from lazyio.engine.ubatch import Ubatch
from lazyio.errors import ModelError

Make = Callable[..., Any]
Agree = Callable[..., None]
NAME = "qwen3_5_moe"
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def pair(tiny: Make) -> Any:
    """The models of most tests; none of them changes it."""
    return tiny(NAME)


def test_logits(pair: Any, check_logits: Callable[[Any], None]):
    check_logits(pair)


@pytest.mark.parametrize(("dtype", "within"), [(torch.bfloat16, 0.05), (torch.float16, 0.01)])
def test_other_dtypes(tiny: Make, dtype: torch.dtype, within: float):
    """Close to float32, with what is to stay in it staying so."""
    pair = tiny(NAME)
    tokens = pair.tokens(70)
    expected = pair.expected(tokens)
    found = in_dtype(pair, dtype).logits(tokens, [65, 1])
    assert found.dtype == torch.float32
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.median() < within


def in_dtype(pair: Any, dtype: torch.dtype) -> Any:
    for name, parameter in pair.model.named_parameters():
        if name not in pair.model.float32:
            parameter.data = parameter.data.to(dtype)
    return pair


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize(
    ("dtype", "within"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1), (torch.float16, 0.02)], ids=str
)
def test_on_a_gpu(tiny: Make, agree: Agree, dtype: torch.dtype, within: float):
    pair = in_dtype(tiny(NAME), dtype)
    tokens, other = pair.tokens(150), pair.tokens(41, seed=9)
    expected = [pair.expected(tokens), pair.expected(other)]
    pair.model.to("cuda")
    found = pair.logits_of([tokens, other], [[70, 1, 1, 64], [1, 1, 1, 9]])
    for ours, theirs in zip(found, expected, strict=True):
        if dtype == torch.float32:
            agree(ours.cpu(), theirs)
        error = (ours.cpu() - theirs).norm(dim=-1) / theirs.norm(dim=-1)
        assert error.median() < within


@pytest.mark.gpu
@GPU
def test_on_a_gpu_the_host_never_waits(never_waiting: Any, tiny: Make):
    pair = in_dtype(tiny(NAME), torch.bfloat16)
    pair.model.to("cuda")
    states = [pair.model.new_state(300) for _ in range(2)]

    def ubatch(*sizes: int) -> Ubatch:
        chunks = [(state, pair.tokens(size)) for state, size in zip(states, sizes, strict=True)]
        return Ubatch.of(chunks, pair.model.device)

    for sizes in ((70, 3), (1, 1)):
        pair.model.step(ubatch(*sizes), None)  # libraries that are loaded on first use may wait
        again = ubatch(*sizes)
        torch.cuda.synchronize()
        with never_waiting():
            pair.model.step(again, None)


def test_parameters_have_the_names_of_transformers(pair: Any):
    theirs = shapes_of(pair.reference.named_parameters())
    assert shapes_of(pair.model.named_parameters()) == theirs
    assert pair.model.float32 == {name for name in theirs if name.endswith((".A_log", ".dt_bias"))}
    assert pair.model.table is None
    assert pair.model.row_values == 0


def shapes_of(parameters: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in parameters}


@pytest.mark.parametrize("changes", [{"num_experts_per_tok": 1}, {"num_experts_per_tok": 8}], ids=str)
def test_other_settings(tiny: Make, agree: Agree, changes: dict[str, Any]):
    pair = tiny(NAME, **changes)
    tokens = pair.tokens(29)
    agree(pair.logits(tokens, [5, 1, 9]), pair.expected(tokens))


# The 35B model, of which 3B are used for a token.
RELEASED = {
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}


def built(**config: Any) -> Any:
    with torch.device("meta"):
        return model_class(NAME + "_text").from_config(config)


def test_the_released_size():
    model = built(**RELEASED)
    assert 34e9 < sum(parameter.numel() for parameter in model.parameters()) < 36e9
    assert model.get_parameter("model.layers.0.mlp.experts.gate_up_proj").shape == (256, 1024, 2048)


def test_keys_that_are_absent_mean_the_defaults_of_transformers():
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    with torch.device("meta"):
        theirs = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig())
    assert shapes_of(built().named_parameters()) == shapes_of(theirs.named_parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 300}, "num_experts_per_tok = 300; there are 256 experts"),
        ({"num_experts": 0}, "num_experts = 0; it must be an integer, 1 or more"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"shared_expert_intermediate_size": 1.5}, "shared_expert_intermediate_size"),
    ],
)
def test_a_configuration_that_can_not_be_followed(changes: dict[str, Any], message: str):
    with pytest.raises(ModelError, match=message):
        built(**{**RELEASED, **changes})
