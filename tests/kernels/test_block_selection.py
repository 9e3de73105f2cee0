from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from lazyio.engine.layers import block_selection as layer_module
from lazyio.engine.layers.block_selection import BlockSelection, best, scores
from lazyio.engine.layers.rope import Rope
from lazyio.engine.state import State
from lazyio.engine.ubatch import Span
from lazyio.errors import Unsupported
from lazyio.kernels import block_selection
from lazyio.kernels.block_selection import (
    BITS,
    Arguments,
    Selected,
    _choose,
    _empty,
    block_scores,
    reference,
    select_blocks,
    select_steps,
    supports,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of overflows in the interpreter
CPU = torch.device("cpu")


def random(tokens: int, before: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Arguments:
    given = Arguments.random(device, 4, tokens, before, dtype=dtype)
    made = torch.Generator(device).manual_seed(5)
    queries, keys = (torch.randn(x.shape, generator=made, device=device) for x in (given.queries, given.keys))
    return replace(given, queries=queries.to(dtype), keys=keys.to(dtype))


def visible(tokens: int, before: int, columns: int, device: torch.device, ratio: int = 4) -> torch.Tensor:
    length = before + 1 + torch.arange(tokens, device=device)[:, None]
    return torch.arange(columns, device=device) < length // ratio


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 23, 90])
def test_scores_are_those_of_the_layer(tokens: int, dtype: torch.dtype, device: torch.device):
    if device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter does not multiply bfloat16")
    given = random(tokens, 211, device, dtype)
    found = block_scores(given.queries, given.keys, 211, ratio=4, width=80)
    expected = scores(given.queries, given.keys)
    seen = visible(tokens, 211, len(given.keys), device)
    torch.testing.assert_close(
        found[:, : len(given.keys)][seen], expected[seen], rtol=1e-5, atol=1e-5 if device.type == "cpu" else 1e-4
    )


def with_ties(kind: str, tokens: int, columns: int, device: torch.device) -> torch.Tensor:
    made = torch.Generator(device).manual_seed(6)
    if kind == "floats":
        return torch.randn(tokens, columns, generator=made, device=device).relu_()
    if kind == "integers":
        return torch.randint(0, 5, (tokens, columns), generator=made, device=device).float()
    if kind == "zeros":
        return torch.zeros(tokens, columns, device=device)
    # All floats there are have a place: infinite, the largest, those that are not normal.
    few = torch.tensor([0.0, 1e-45, 3e-39, 1e-30, 1.0, 3.4028234e38, float("inf")], device=device)
    return few[torch.randint(0, len(few), (tokens, columns), generator=made, device=device)]


@pytest.mark.parametrize("kind", ["floats", "integers", "zeros", "extremes"])
@pytest.mark.parametrize("count", [1, 16, 37])
@pytest.mark.parametrize("group", [1, 4])
def test_of_given_scores_the_best_are_those_of_the_layer(kind: str, count: int, group: int, device: torch.device):
    tokens, before, width = 11, 190, 64
    given = with_ties(kind, tokens, width, device)
    lists = _empty(given, width, count, 4, group)
    _choose(given, before, count, 4, lists)
    found = lists.mask(width)
    seen = visible(tokens, before, width, device)
    expected = (best(given.masked_fill(~seen, -1), count)) & seen
    length = before + 1 + torch.arange(tokens, device=device)[:, None]
    tail = (torch.arange(width, device=device) == length // 4) & (length % 4 != 0)
    assert torch.equal(found, expected | tail)


def test_queries_are_taken_in_pieces(device: torch.device, monkeypatch: pytest.MonkeyPatch):
    given = random(23, 118, device)
    whole = given.results(select_blocks)
    sizes = []

    def counted(queries: torch.Tensor, *others: object, **sizes_: object) -> torch.Tensor:
        sizes.append(len(queries))
        return block_scores(queries, *others, **sizes_)

    monkeypatch.setattr(block_selection, "_MOST_SCORES", 48 * 7)
    monkeypatch.setattr(block_selection, "block_scores", counted)
    for found, expected in zip(given.results(select_blocks), whole, strict=True):
        assert torch.equal(found, expected)
    assert sizes == [6, 6, 6, 5]  # whole groups of 3


LENGTHS = [102, 1, 33, 150, 2, 4]


def test_steps_of_one_launch_are_those_of_a_launch_each(device: torch.device):
    of_each = [random(1, length - 1, device) for length in LENGTHS]
    positions = torch.tensor(LENGTHS, device=device) - 1
    together = select_steps(
        torch.cat([one.queries for one in of_each]), [one.keys for one in of_each], positions, count=8, ratio=4
    )
    masks = together.mask(38)
    for one, mask, seen in zip(of_each, masks, together.counts, strict=True):
        alone = select_blocks(one.queries, one.keys, one.before, count=8, ratio=4, group=1)
        assert torch.equal(mask, alone.mask(38)[0])
        assert torch.equal(seen, alone.counts[0])


@pytest.mark.parametrize(
    "change",
    [
        lambda q, keys, positions: (q[:1], keys, positions),
        lambda q, keys, positions: (q, keys, positions[:1]),
        lambda q, keys, positions: (q, keys, positions.int()),
        lambda q, keys, positions: (q, [keys[0], keys[1].half()], positions),
        lambda q, keys, positions: (q, [keys[0], keys[1][:, :8]], positions),
        lambda q, keys, positions: (q, [keys[0], keys[1].flatten()[1:113].view(7, 16)], positions),
    ],
)
def test_steps_that_do_not_fit_are_never_launched(change):
    q, keys, positions = torch.zeros(2, 2, 16), [torch.zeros(9, 16), torch.zeros(8, 16)], torch.tensor([36, 33])
    with pytest.raises(AssertionError):
        select_steps(*change(q, keys, positions), count=4, ratio=4)


@pytest.mark.parametrize("group", [1, 3, BITS])
def test_lists_say_what_a_mask_says(group: int):
    made = torch.Generator().manual_seed(7)
    mask = torch.rand(14, 50, generator=made) < 0.2
    mask[3] = False
    lists = Selected.of(mask, group, 4)
    assert torch.equal(lists.mask(50), mask)
    for i, of_some in enumerate(mask.split(group)):
        entries = lists.entries[i, : int(lists.counts[i])]
        assert (entries >> BITS).tolist() == of_some.any(0).nonzero().flatten().tolist()


def test_within_the_budget_all_blocks_are_seen(device: torch.device):
    given = random(3, 32, device)
    mask, _ = given.results(select_blocks)
    assert torch.equal(mask != 0, torch.arange(9, device=device) < torch.tensor([[9], [9], [9]], device=device))


def test_what_has_no_kernel():
    assert supports(128, 50_000)
    assert not supports(24, 100)
    assert not supports(128, 2**16)
    given = Arguments.random(CPU, 0, 4, 20, dim=8)
    with pytest.raises(
        Unsupported, match=r"no kernel for torch\.float32, queries of 8 values and 6 blocks: it has those"
    ):
        given.results(select_blocks)
    with pytest.raises(Unsupported, match=r"no kernel for torch\.float64"):
        Arguments.random(CPU, 0, 4, 20, dtype=torch.float64).results(select_blocks)


@pytest.mark.parametrize(
    "change",
    [
        {"before": 30},
        {"group": 0},
        {"group": BITS + 1},
        {"count": 0},
        {"keys": torch.zeros(6, 16, dtype=torch.float16)},
        {"keys": torch.zeros(6, 32)[:, :16]},
        {"queries": torch.zeros(2, 4, 16).transpose(0, 1)},
        {"keys": torch.zeros(6, 16, device="meta")},
    ],
)
def test_what_does_not_fit_is_never_launched(change: dict[str, object]):
    with pytest.raises(AssertionError):
        replace(Arguments.random(CPU, 0, 4, 20), **change).results(select_blocks)


def test_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from lazyio.kernels.block_selection import *\n"
        "given = Arguments.random(torch.device('cpu'), 0, 4, 20)\n"
        "given.results(reference); given.results(select_blocks)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("lazyio.errors.Unsupported: the kernel of block selection needs Triton, which can't be")


def test_the_reference_is_the_rule_written_out():
    given = random(9, 50, CPU)
    mask, _ = given.results(reference)
    for i, position in enumerate(range(50, 59)):
        complete = (position + 1) // 4
        of_each = [
            sum(max(0.0, float(q.double() @ key.double())) for q in given.queries[i]) for key in given.keys[:complete]
        ]
        order = sorted(range(complete), key=lambda block: -of_each[block])
        assert set(mask[i].nonzero().flatten().tolist()) - {complete} == set(order[: given.count])


@pytest.mark.parametrize("cuts", [[61], [1, 30, 1, 1, 8, 20]], ids=str)
def test_a_layer_selects_the_same_with_the_kernel(
    cuts: list[int], device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    rope = Rope(1e4, 8)
    layer = BlockSelection(32, 3, 16, 12, 4, rope, 1e-6, serves=(12, 2)).requires_grad_(False).to(device)
    made = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        parameter.copy_(0.5 * torch.randn(parameter.shape, generator=made))
    x = torch.randn(61, 32, generator=made).to(device)

    def found() -> list[torch.Tensor | Selected | None]:
        state = State({layer: layer.new_piece(64, torch.float32, device)}, 64)
        results = []
        for part in x.split(cuts):
            span = Span(state, 0, len(part), state.tokens)
            state.tokens += len(part)
            positions = torch.arange(span.before, state.tokens, device=device)
            results.append(layer(part, rope.angles(positions, torch.float32), span))
        return results

    monkeypatch.setattr(layer_module, "usable", lambda _: False)
    masks = found()
    monkeypatch.setattr(layer_module, "usable", lambda _: True)
    lists = found()
    assert any(one is not None for one in masks)
    for mask, some in zip(masks, lists, strict=True):
        if mask is None:
            assert some is None
            continue
        assert isinstance(some, Selected)
        keys = mask.shape[1]
        of_keys = some.mask(-(-keys // 4)).repeat_interleave(4, 1)[:, :keys]
        before = keys - len(mask)
        up_to = torch.arange(keys, device=device) <= torch.arange(before, keys, device=device)[:, None]
        assert torch.equal(of_keys & up_to, mask)
    layer._serves = (0, 0)
    assert not any(isinstance(one, Selected) for one in found())


def test_steps_together_keep_what_steps_alone_do(device: torch.device):
    rope, made = Rope(1e4, 8), torch.Generator().manual_seed(3)
    layer = BlockSelection(32, 2, 16, 400, 4, rope, 1e-6, serves=(12, 2)).requires_grad_(False).to(device)
    for parameter in layer.parameters():
        parameter.copy_(0.5 * torch.randn(parameter.shape, generator=made))
    x = torch.randn(3, 10, 32, generator=made).to(device)
    together, alone = ([State({layer: layer.new_piece(64, torch.float32, device)}, 64) for _ in x] for _ in range(2))

    def step(states: list[State], tokens: torch.Tensor) -> None:
        spans = [Span(state, i, 1, state.tokens) for i, state in enumerate(states)]
        positions = torch.tensor([state.tokens for state in states], device=device)
        assert layer.steps(tokens, rope.angles(positions, torch.float32), spans, positions) is None
        for state in states:
            state.tokens += 1

    for i, state in enumerate(alone[:2]):  # one after the other, so that blocks end at different steps
        for some in (together[i], state):
            for token in x[i, : i + 1]:
                step([some], token[None])
    for at in range(8):
        step(together, torch.stack([x[0, at + 1], x[1, at + 2], x[2, at]]))
        for state, token in zip(alone, (x[0, at + 1], x[1, at + 2], x[2, at]), strict=True):
            step([state], token[None])
    for one, other in zip(together, alone, strict=True):
        for kept, expected in zip(one.pieces[layer]._pieces(), other.pieces[layer]._pieces(), strict=True):
            torch.testing.assert_close(kept.entries, expected.entries)
            assert len(kept.entries) >= 2
