from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lazyio.engine.state import State
from lazyio.engine.ubatch import Ubatch

Make = Callable[..., Any]
Agree = Callable[..., None]
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Asked:
    """Rows that note in `events` when they were asked for."""

    def __init__(self, rows: torch.Tensor, events: list[str]) -> None:
        self.rows, self.events = rows, events

    def values(self) -> torch.Tensor:
        self.events.append("rows")
        return self.rows


@pytest.fixture(params=["gemma4", "gemma3n"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(name: str, tiny: Make) -> Any:
    return tiny(name)


def step(pair: Any, state: State, tokens: list[int]) -> torch.Tensor:
    rows = Asked(pair.table[torch.tensor(tokens)], [])
    return pair.model.step(Ubatch.of([(state, tokens)], pair.model.device), rows)


def in_dtype(pair: Any, dtype: torch.dtype) -> Any:
    pair.reference.to(dtype)
    return pair._replace(model=pair.model.to(dtype), table=pair.table.to(dtype))


def test_logits_are_those_of_transformers(pair: Any, check_logits: Callable[[Any], None]):
    check_logits(pair)


def test_a_prompt_of_many_windows(pair: Any, agree: Agree):
    tokens = pair.tokens(200)
    expected = pair.expected(tokens)
    agree(pair.logits(tokens), expected)
    agree(pair.logits(tokens, [150, 1, 1, 30]), expected)


def test_a_zeroed_table_is_seen(pair: Any, check_logits: Callable[[Any], None]):
    with pytest.raises(AssertionError):
        check_logits(pair._replace(table=torch.zeros_like(pair.table)))


@pytest.mark.parametrize(("dtype", "noise"), [(torch.bfloat16, 0.05), (torch.float16, 0.007)], ids=str)
def test_half_types_are_as_exact_as_in_transformers(pair: Any, dtype: torch.dtype, noise: float):
    tokens = pair.tokens(100)
    half = in_dtype(pair, dtype)
    found, theirs = half.logits(tokens, [60, 1]), half.expected(tokens)
    pair.reference.float()
    exact = pair.expected(tokens)
    assert found.dtype == torch.float32
    assert (theirs - exact).abs().mean() < noise
    assert (found - exact).abs().mean() < noise


def test_factors_are_rounded_where_transformers_rounds_them(tiny: Make, name: str):
    # Neither the root of 96 nor that of 24 is a number that bfloat16 has.
    pair = in_dtype(tiny(name, hidden_size=96, hidden_size_per_layer_input=24), torch.bfloat16)
    text, theirs = pair.model.model, pair.reference.model
    tokens = torch.tensor(pair.tokens(100))
    x = text.embedded(tokens)
    assert torch.equal(x, theirs.embed_tokens(tokens))
    inputs = text.inputs(x, Asked(pair.table[tokens], []))
    expected = theirs.project_per_layer_inputs(x[None], theirs.get_per_layer_inputs(tokens[None]))[0]
    for layer in range(6):
        # Norms of the last bit may differ.
        assert (inputs.of(layer) == expected[:, layer]).float().mean() > 0.99


def test_rows_are_asked_for_once_and_after_the_first_feed_forward(pair: Any):
    events: list[str] = []
    for number, layer in enumerate(pair.model.model.layers):
        layer.mlp.register_forward_hook(lambda *_, number=number: events.append(f"mlp {number}"))
    tokens = pair.tokens(4)
    rows = Asked(pair.table[torch.tensor(tokens)], events)
    pair.model.step(Ubatch.of([(pair.model.new_state(4), tokens)], torch.device("cpu")), rows)
    assert events == ["mlp 0", "rows", *(f"mlp {number}" for number in range(1, 6))]


def test_a_sequence_goes_on_from_a_copy_of_its_state(pair: Any):
    tokens = pair.tokens(40)
    state = pair.model.new_state(40)
    step(pair, state, tokens[:20])
    copy = state.clone()
    step(pair, state, [230] * 10)
    found = step(pair, copy, tokens[20:])
    assert (copy.tokens, state.tokens) == (40, 30)
    undisturbed = pair.model.new_state(40)
    step(pair, undisturbed, tokens[:20])
    assert torch.equal(found, step(pair, undisturbed, tokens[20:]))


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize(
    ("dtype", "within"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1), (torch.float16, 0.02)], ids=str
)
def test_on_a_gpu(pair: Any, agree: Agree, dtype: torch.dtype, within: float):
    pair = in_dtype(pair, dtype)
    tokens, other = pair.tokens(150), pair.tokens(41, seed=9)
    expected = [pair.expected(tokens).float(), pair.expected(other).float()]
    on_gpu = pair._replace(model=pair.model.to("cuda"), table=pair.table.cuda())
    found = on_gpu.logits_of([tokens, other], [[70, 1, 1, 64], [1, 1, 1, 9]])
    for ours, theirs in zip(found, expected, strict=True):
        if dtype == torch.float32:
            agree(ours.cpu(), theirs)
        assert (ours.cpu() - theirs).abs().mean() < within


@pytest.mark.gpu
@GPU
def test_on_a_gpu_the_host_never_waits(never_waiting: Any, pair: Any):
    model = in_dtype(pair, torch.bfloat16).model.to("cuda")

    def prompts_and_a_step() -> None:
        states = [model.new_state(80) for _ in range(2)]
        for sizes in ([70, 3], [1, 1]):
            chunks = [(state, pair.tokens(size)) for state, size in zip(states, sizes, strict=True)]
            rows = torch.ones(sum(sizes), model.row_values, dtype=torch.bfloat16, device="cuda")
            model.step(Ubatch.of(chunks, model.device), Asked(rows, []))

    prompts_and_a_step()  # libraries that are loaded on first use may wait
    torch.cuda.synchronize()
    with never_waiting():
        prompts_and_a_step()
