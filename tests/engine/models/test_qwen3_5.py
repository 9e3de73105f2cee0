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
NAME = "qwen3_5"
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def pair(tiny: Make) -> Any:
    """The models of most tests; none of them changes it."""
    return tiny(NAME)


def test_logits(pair: Any, check_logits: Callable[[Any], None]):
    check_logits(pair)


@pytest.mark.parametrize("cuts", [[], [1, 7, 3, 60, 1, 1, 1, 64], [128]], ids=str)
def test_logits_of_a_prompt_of_several_blocks(pair: Any, agree: Agree, cuts: list[int]):
    tokens = pair.tokens(150)
    agree(pair.logits(tokens, cuts), pair.expected(tokens))


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]},
        {"linear_conv_kernel_dim": 2, "linear_num_value_heads": 2, "linear_value_head_dim": 24},
        {"num_key_value_heads": 4, "rms_norm_eps": 1e-2},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]}},
    ],
    ids=str,
)
def test_other_settings(tiny: Make, agree: Agree, changes: dict[str, Any]):
    pair = tiny(NAME, **changes)
    tokens = pair.tokens(29)
    agree(pair.logits(tokens, [5, 1, 9]), pair.expected(tokens))


def test_a_state_is_a_point_to_come_back_to(pair: Any):
    state = pair.model.new_state(40)
    tokens = pair.tokens(40)
    assert state.nbytes == pair.model.new_state(40).clone().nbytes > 0

    def step(of: Any, some: list[int]) -> torch.Tensor:
        return pair.model.step(Ubatch.of([(of, some)], pair.model.device), None)

    step(state, tokens[:9])
    kept = state.clone()
    first = [step(state, tokens[9:10]), step(state, tokens[10:])]
    again = [step(kept, tokens[9:10]), step(kept, tokens[10:])]
    assert (state.tokens, kept.tokens) == (40, 40)
    assert all(map(torch.equal, first, again))


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
    theirs = {name: parameter.shape for name, parameter in pair.reference.named_parameters()}
    assert {name: parameter.shape for name, parameter in pair.model.named_parameters()} == theirs
    assert pair.model.float32 == {name for name in theirs if name.endswith((".A_log", ".dt_bias"))}
    assert pair.model.table is None
    assert pair.model.row_values == 0
    assert pair.model.tied == {}


def test_a_head_that_is_the_embedding(tiny: Make):
    pair = tiny(NAME, tie_word_embeddings=True)
    assert pair.model.tied == {"lm_head.weight": "model.embed_tokens.weight"}


# The 27B model.
RELEASED = {
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "linear_num_value_heads": 48,
    "full_attention_interval": 4,
    "max_position_embeddings": 262144,
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}


def built(**config: Any) -> Any:
    with torch.device("meta"):
        return model_class(NAME + "_text").from_config(config)


def test_the_released_size():
    model = built(**RELEASED)
    assert (model.vocab, model.max_tokens) == (248320, 262144)
    assert 26e9 < sum(parameter.numel() for parameter in model.parameters()) < 28e9
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes["model.layers.62.linear_attn.in_proj_qkv.weight"] == (10240, 5120)
    assert shapes["model.layers.62.linear_attn.conv1d.weight"] == (10240, 1, 4)
    assert shapes["model.layers.63.self_attn.q_proj.weight"] == (12288, 5120)
    assert "model.layers.63.linear_attn.A_log" not in shapes


def shapes_of(parameters: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in parameters}


@pytest.mark.parametrize("absent", [{}, {"hidden_size": None, "layer_types": None}], ids=["absent", "null"])
def test_keys_that_are_absent_mean_the_defaults_of_transformers(absent: dict[str, Any]):
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig()
    model = built(**absent)
    assert (model.vocab, model.max_tokens) == (config.vocab_size, config.max_position_embeddings)
    with torch.device("meta"):
        theirs = Qwen3_5ForCausalLM(config)
    assert shapes_of(model.named_parameters()) == shapes_of(theirs.named_parameters())


def test_older_places_of_the_keys_of_the_rope(pair: Any):
    """At the top of the configuration, or below "rope_scaling"."""
    config = {key: value for key, value in pair.config.items() if key != "rope_parameters"}
    old = config | {"rope_theta": 1e7, "partial_rotary_factor": 0.25}
    older = old | {"rope_scaling": {"type": "default", "mrope_section": [2, 1, 1]}}
    tokens = pair.tokens(20)
    for changed in (old, older):
        model = built(**changed)
        model.load_state_dict(pair.model.state_dict(), assign=True)
        assert torch.equal(pair._replace(model=model).logits(tokens), pair.logits(tokens))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'; only \"silu\" can be run here"),
        ({"attention_bias": True}, "attention_bias = True; only false can be run here"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
        ({"hidden_size": "64"}, "hidden_size = '64'; it must be an integer"),
        ({"num_key_value_heads": 5}, "num_attention_heads = 24; it must be a multiple of the 5 heads of keys"),
        ({"linear_num_key_heads": 5}, "linear_num_value_heads = 48; it must be a multiple of the 5 key heads"),
        ({"layer_types": ["linear_attention"]}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 64}, "layer_types"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7}}, r"rope_parameters\.rope_type = 'yarn'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2}}, r"rope_scaling\.type = 'linear'"),
        ({"rope_parameters": {"rope_theta": -1}}, r"rope_parameters\.rope_theta"),
        ({"rope_parameters": {"partial_rotary_factor": 2.0}}, r"partial_rotary_factor = 2\.0; .* even number"),
        ({"rope_parameters": {"partial_rotary_factor": 0.13}}, r"partial_rotary_factor = 0\.13"),
        ({"rope_parameters": 4}, "rope_parameters = 4; it must be an object"),
    ],
)
def test_a_configuration_that_can_not_be_followed(changes: dict[str, Any], message: str):
    with pytest.raises(ModelError, match=message):
        built(**{**RELEASED, **changes})
