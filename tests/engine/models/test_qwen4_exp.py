from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from lazyio.engine.layers import block_selection
from lazyio.engine.models import model_class
from lazyio.engine.ubatch import Ubatch
from lazyio.errors import ModelError

Make = Callable[..., Any]
Agree = Callable[..., None]
NAME = "qwen4_exp"
LONG = 150  # tokens, of which a budget of 8 selects few
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Ready(NamedTuple):
    """Rows that are there."""

    rows: torch.Tensor

    def values(self) -> torch.Tensor:
        return self.rows


@pytest.fixture(scope="module")
def pair(tiny: Make) -> Any:
    """The models of most tests; none of them changes it."""
    return tiny(NAME)


def test_logits(pair: Any, check_logits: Callable[[Any], None]):
    check_logits(pair)


@pytest.mark.parametrize("cuts", [[], [1, 7, 3, 60, 1, 1, 1, 64], [128]], ids=str)
def test_logits_where_few_blocks_are_selected(pair: Any, agree: Agree, cuts: list[int]):
    tokens = pair.tokens(LONG)
    agree(pair.logits(tokens, cuts), pair.expected(tokens))


def test_every_block_within_the_budget(tiny: Make, agree: Agree):
    pair = tiny(NAME, indexer_budget=32)
    tokens = pair.tokens(48)
    agree(pair.logits(tokens, [34, 1, 1]), pair.expected(tokens))


def test_rows_of_32_values(tiny: Make, agree: Agree):
    pair = tiny(NAME, ple_embed_dim=256)
    assert pair.table.shape[1] == 32
    assert pair.model.row_values == 256
    tokens = pair.tokens(29)
    agree(pair.logits(tokens, [5, 1, 9]), pair.expected(tokens))


@pytest.mark.parametrize("layers", [[1], [3]], ids=str)
def test_the_layer_with_the_table_is_counted_from_one(tiny: Make, agree: Agree, layers: list[int]):
    pair = tiny(NAME, ple_layer_ids=layers)
    assert pair.model.table == f"model.layers.{layers[0] - 1}.ple.ple_embedding.ngram_embedding.weight"
    tokens = pair.tokens(29)
    agree(pair.logits(tokens, [5, 1, 9]), pair.expected(tokens))


def test_without_a_table(tiny: Make, agree: Agree):
    pair = tiny(NAME, ple_layer_ids=[])
    assert pair.model.table is None
    assert pair.model.row_values == 0
    tokens = pair.tokens(29)
    agree(pair.logits(tokens, [5, 1, 9]), pair.expected(tokens))


@pytest.mark.parametrize("changes", [{"output_gate_type": "silu"}, {"norm_topk_prob": False}, {"hc_count": 3}], ids=str)
def test_other_settings(tiny: Make, agree: Agree, changes: dict[str, Any]):
    pair = tiny(NAME, **changes)
    tokens = pair.tokens(29)
    agree(pair.logits(tokens, [5, 1, 9]), pair.expected(tokens))


def test_equal_scores_at_the_cut(tiny: Make, agree: Agree, monkeypatch: pytest.MonkeyPatch):
    """Where several blocks have the score 0, ours are the first of them and those of transformers are any."""
    pair = tiny(NAME, indexer_n_heads=2)
    tokens = pair.tokens(60)
    tied: list[torch.Tensor] = []

    def watched(scores: torch.Tensor, count: int) -> torch.Tensor:
        lowest = scores.topk(count).values[:, -1:]
        chosen_of_equal = count - (scores > lowest).sum(-1)
        tied.append((lowest[:, 0] == 0) & ((scores == lowest).sum(-1) > chosen_of_equal))
        return best(scores, count)

    best = block_selection.best
    monkeypatch.setattr(block_selection, "best", watched)
    found = pair.logits(tokens)
    assert len(tied) == 1  # of the only attention layer, which is the last: no other token sees what a tie changes
    assert 0 < tied[0].sum() < 20
    agree(found[~tied[0]], pair.expected(tokens)[~tied[0]])


@pytest.mark.parametrize("wrong", ["zeroed", "shifted"])
def test_wrong_rows_are_found_out(pair: Any, agree: Agree, wrong: str):
    table = torch.zeros_like(pair.table) if wrong == "zeroed" else pair.table.roll(1, 0)
    tokens = pair.tokens(29)
    with pytest.raises(AssertionError):
        agree(pair._replace(table=table).logits(tokens), pair.expected(tokens))


def test_sequences_of_one_ubatch_are_as_each_alone(pair: Any, agree: Agree):
    first, second = pair.tokens(70), pair.tokens(41, seed=9)
    cuts = [[30, 1, 1, 20], [1, 30, 1, 1]]
    both = pair.logits_of([first, second], cuts)
    agree(both[0], pair.logits(first, cuts[0]))
    agree(both[1], pair.logits(second, cuts[1]))


def test_a_cloned_state_is_resumed(pair: Any):
    """After its original went another way, and with the bits of a sequence that was never interrupted."""
    tokens, other = torch.tensor(pair.tokens(60)), torch.tensor(pair.tokens(20, seed=9))
    values = pair.table[torch.from_numpy(pair.row_ids(tokens.numpy()))].flatten(1)

    def step(state: Any, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return pair.model.step(Ubatch.of([(state, ids.tolist())], pair.model.device), Ready(rows))

    whole = pair.model.new_state(60)
    step(whole, tokens[:38], values[:38])
    uninterrupted = step(whole, tokens[38:], values[38:])

    state = pair.model.new_state(60)
    step(state, tokens[:38], values[:38])
    kept = state.clone()
    assert kept.nbytes == state.nbytes > 0
    step(state, other, values[:20])
    assert (kept.tokens, state.tokens) == (38, 58)
    assert torch.equal(step(kept, tokens[38:], values[38:]), uninterrupted)


@pytest.mark.parametrize(("dtype", "within"), [(torch.bfloat16, 0.05), (torch.float16, 0.01)], ids=str)
def test_other_dtypes(tiny: Make, dtype: torch.dtype, within: float):
    """Close to float32, with what is to stay in it staying so."""
    pair = in_dtype(tiny(NAME), dtype)
    tokens = pair.tokens(29)
    found = pair.logits(tokens, [5, 1, 9])
    assert found.dtype == torch.float32
    assert typical_error(found, pair.expected(tokens)) < within


def in_dtype(pair: Any, dtype: torch.dtype) -> Any:
    for name, parameter in pair.model.named_parameters():
        if name not in pair.model.float32:
            parameter.data = parameter.data.to(dtype)
    return pair._replace(table=pair.table.to(dtype))


def typical_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the middle token: one may take another expert or block, where two of them are close."""
    return ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median().item()


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize(
    ("dtype", "within"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1), (torch.float16, 0.02)], ids=str
)
def test_on_a_gpu(tiny: Make, agree: Agree, dtype: torch.dtype, within: float):
    pair = in_dtype(tiny(NAME), dtype)
    tokens, other = pair.tokens(LONG), pair.tokens(41, seed=9)
    expected = [pair.expected(tokens), pair.expected(other)]
    pair.model.to("cuda")
    found = pair._replace(table=pair.table.cuda()).logits_of([tokens, other], [[70, 1, 1, 64], [1, 1, 1, 9]])
    for ours, theirs in zip(found, expected, strict=True):
        if dtype == torch.float32:
            agree(ours.cpu(), theirs)
        assert typical_error(ours.cpu(), theirs) < within


@pytest.mark.gpu
@GPU
def test_on_a_gpu_the_host_never_waits(never_waiting: Any, tiny: Make):
    pair = in_dtype(tiny(NAME), torch.bfloat16)
    model = pair.model.to("cuda")

    def prompts_and_a_step() -> None:
        states = [model.new_state(80) for _ in range(2)]
        for sizes in ([70, 3], [1, 1]):
            chunks = [(state, pair.tokens(size)) for state, size in zip(states, sizes, strict=True)]
            rows = torch.ones(sum(sizes), model.row_values, dtype=torch.bfloat16, device="cuda")
            model.step(Ubatch.of(chunks, model.device), Ready(rows))

    prompts_and_a_step()  # libraries that are loaded on first use may wait
    torch.cuda.synchronize()
    with never_waiting():
        prompts_and_a_step()


def test_parameters_have_the_names_of_transformers(pair: Any):
    theirs = {name for name, _ in pair.reference.named_parameters()}
    assert {name for name, _ in pair.model.named_parameters()} == theirs - {pair.model.table}
    assert pair.model.float32 == {name for name in theirs if name.endswith((".A_log", ".dt_bias"))}


RELEASED = {
    "model_type": "qwen4_exp_text",
    "vocab_size": 248320,
    "hidden_size": 2560,
    "num_hidden_layers": 48,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 12,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 640,
    "hc_count": 4,
    "hc_lowrank": 320,
    "output_gate_type": "sigmoid",
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "ple_layer_ids": [2],
    "ple_embed_dim": 2560,
    "ngram_size": 3,
    "eos_token_id": 248044,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}


def built(**changes: Any) -> Any:
    with torch.device("meta"):
        return model_class(NAME + "_text").from_config(RELEASED | changes)


def test_the_released_size():
    model = built()
    assert (model.vocab, model.max_tokens, model.row_values) == (248320, 262144, 2560)
    assert model.table == "model.layers.1.ple.ple_embedding.ngram_embedding.weight"
    assert 120e9 < sum(parameter.numel() for parameter in model.parameters()) < 130e9
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes["model.layers.1.ple.key_proj.weight"] == (10240, 2560)
    assert shapes["model.layers.1.ple.conv1d.weight"] == (10240, 1, 4)
    assert shapes["model.layers.3.self_attn.indexer.index_qk_proj.weight"] == (640, 2560)
    assert shapes["model.layers.0.mlp.experts.gate_up_proj"] == (512, 1280, 2560)


@pytest.mark.parametrize("name", ["indexed_attention", "qwen_sparse_attention"])
def test_full_layers_have_other_names_in_files_that_transformers_wrote(name: str):
    model = built(layer_types=[*["linear_attention"] * 3, name] * 12)
    names = [parameter for parameter, _ in model.named_parameters()]
    assert names == [parameter for parameter, _ in built().named_parameters()]


def test_keys_that_are_absent_mean_the_defaults_of_transformers():
    given = {key: RELEASED[key] for key in RELEASED if key.startswith(("indexer", "layer_types", "rope_"))}
    given["num_hidden_layers"] = len(given["layer_types"])
    with torch.device("meta"):
        model = model_class(NAME + "_text").from_config(given)
    assert (model.vocab, model.max_tokens, model.row_values, model.table) == (248320, 32768, 0, None)
    assert model.get_parameter("model.embed_tokens.weight").shape == (248320, 2048)
    assert model.get_parameter("model.layers.0.mlp.gate.weight").shape == (512, 2048)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ple_layer_ids": [2, 3]}, r"ple_layer_ids = \[2, 3\]; it must name one layer, from 1 to 48, or none"),
        ({"ple_layer_ids": [49]}, "ple_layer_ids"),
        ({"ple_layer_ids": [0]}, "ple_layer_ids"),
        ({"ple_layer_ids": 2}, "ple_layer_ids"),
        ({"indexer_budget": 2050}, "indexer_budget = 2050; it must be a multiple of indexer_compress_ratio, 4"),
        ({"indexer_budget": None}, "indexer_budget"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads"),
        ({"indexer_head_dim": 32}, "indexer_head_dim = 32; it must be 64 or more"),
        ({"hc_count": 1}, "hc_count"),
        ({"output_gate_type": "relu"}, "output_gate_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"layer_types": ["sliding_attention"] * 48}, "layer_types"),
        ({"num_experts": 8}, "num_experts_per_tok"),
        ({"ngram_size": 1}, "ngram_size"),
    ],
)
def test_a_configuration_that_can_not_be_followed(changes: dict[str, Any], message: str):
    with pytest.raises(ModelError, match=message):
        built(**changes)
