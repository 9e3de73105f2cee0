from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from lazyio.engine.layers import moe as layers
from lazyio.errors import Unsupported
from lazyio.kernels import contract, moe
from lazyio.kernels.moe import reference, sorted_by_expert, supports
from lazyio.kernels.moe_cases import Arguments
from lazyio.kernels.packed import PACKED_TYPES, PackedWeight, empty, random
from lazyio.ple.dtypes import TYPES

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of overflows in the interpreter


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes as long for a program whatever its size: without a GPU, those of few rows are large."""
    if torch.cuda.is_available():
        return
    for name in ("BY_PAIR", "BY_FEW"):
        launch = getattr(moe, name)
        large = {body: ways._replace(packed=replace(ways.packed, part=256)) for body, ways in ways_of(launch)}
        monkeypatch.setattr(moe, name, replace(launch, **large))


def ways_of(launch: moe.Launch) -> list[tuple[str, moe.Ways]]:
    return [("gate_up", launch.gate_up), ("down", launch.down)]


def of(tokens: int, device: torch.device, **rest: object) -> Arguments:
    return Arguments.random(device, 3, tokens, **rest)


def run(given: Arguments) -> torch.Tensor:
    (found,) = given.results(moe.moe)
    return found


def some_of(given: Arguments, tokens: slice) -> Arguments:
    return replace(given, x=given.x[tokens], chosen=given.chosen[tokens], weights=given.weights[tokens])


def by_tiles(monkeypatch: pytest.MonkeyPatch, rows: int = 16) -> None:
    """Tiles have so many rows, however few or many tokens there are."""
    launch = next(one for one in (moe.BY_FEW, *moe.BY_TILE) if one.rows == rows)
    monkeypatch.setattr(moe, "launch_of", lambda *of: launch)


@pytest.mark.parametrize(
    ("pairs", "experts", "rows"), [(1, 1, 16), (1, 7, 16), (5000, 12, 16), (700, 600, 32), (64, 4, 16)], ids=str
)
@pytest.mark.parametrize("skewed", [False, True])
def test_pairs_are_sorted_and_cut_in_tiles(pairs: int, experts: int, rows: int, skewed: bool, device: torch.device):
    made = torch.Generator().manual_seed(pairs)
    chosen = torch.randint(experts, (pairs,), generator=made)
    if skewed:
        chosen = chosen.clamp(max=experts // 3)
    order, tiles, total = sorted_by_expert(chosen.to(device), experts, rows)
    assert order.tolist() == chosen.sort(stable=True).indices.tolist()
    expected, first = [], 0
    for expert, has in enumerate(chosen.bincount(minlength=experts).tolist()):
        stop = first + has
        expected += [[expert, at, min(at + rows, stop)] for at in range(first, stop, rows)]
        first = stop
    assert total.tolist() == [len(expected)]
    assert len(expected) <= len(tiles)
    assert tiles[: len(expected)].tolist() == expected


def test_there_is_room_for_as_many_tiles_as_can_be(device: torch.device):
    """One row too many in each expert's last tile."""
    chosen = torch.arange(5, device=device).repeat_interleave(17)
    _, tiles, total = sorted_by_expert(chosen, 5, 16)
    assert total.tolist() == [len(tiles)] == [10]


@pytest.mark.parametrize("rows", [launch.rows for launch in moe.BY_TILE])
def test_every_tiling(rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch):
    given = of(60, device, slots=2, sizes=(3, 32, 16))
    by_tiles(monkeypatch, rows)
    assert contract.error_of([run(given)], given.results(reference), 1e-5) <= 1e-5


def test_few_and_many_tokens_are_the_same_but_for_rounding(device: torch.device, monkeypatch: pytest.MonkeyPatch):
    given = of(4, device)
    one_by_one = run(given)
    by_tiles(monkeypatch)
    assert contract.error_of([run(given)], [one_by_one], 1e-5) <= 1e-5


@pytest.mark.parametrize("stored", [None, ("Q4_0", "Q8_0")], ids=str)
def test_a_token_is_the_same_whatever_few_others_there_are(stored: tuple[str, str] | None, device: torch.device):
    given = of(4, device, stored=stored, slots=2, sizes=(5, 64, 32))
    alone = [run(some_of(given, slice(token, token + 1))) for token in range(4)]
    assert torch.equal(run(given), torch.cat(alone))


@pytest.mark.parametrize(
    ("rows", "stored"),
    [(16, None), (32, None), *((rows, ("Q4_0", "Q8_0")) for rows in (4, 16, 32))],
    ids=str,
)
def test_a_token_is_the_same_whatever_others_there_are_in_tiles(
    rows: int, stored: tuple[str, str] | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    given = of(30 if rows > 4 else 9, device, stored=stored, slots=2, sizes=(5, 64, 32))
    by_tiles(monkeypatch, rows)
    whole = run(given)
    parts = [run(some_of(given, part)) for part in (slice(0, 1), slice(1, 5), slice(5, None))]
    assert torch.equal(whole, torch.cat(parts))


@pytest.mark.parametrize("tokens", [2, 20])
def test_experts_that_nobody_chose_are_not_read(tokens: int, device: torch.device):
    given = of(tokens, device, among=4)
    expected = run(given)
    others = [expert for expert in range(13) if expert not in given.chosen.unique().tolist()]
    assert others
    given.gate_up[others], given.down[others] = torch.nan, torch.nan
    assert torch.equal(run(given), expected)


@pytest.mark.parametrize("tokens", [2, 20])
def test_a_token_that_is_not_finite_stays_alone(tokens: int, device: torch.device):
    given = of(tokens, device)
    expected = run(given)
    given.x[1] = torch.nan
    found = run(given)
    assert found[1].isnan().all()
    others = torch.arange(tokens, device=device) != 1
    assert torch.equal(found[others], expected[others])


def test_float16_does_not_end_before_the_weight_of_an_expert_is_applied(device: torch.device):
    for tokens in (2, 20):
        given = of(tokens, device, dtype=torch.float16, slots=10)
        for tensor, value in ((given.x, 1.0), (given.gate_up, 4.0), (given.down, 1 / 64), (given.weights, 0.1)):
            tensor.fill_(value)
        inner = (4.0 * given.x.shape[1]) ** 2  # silu(a) = a here
        assert inner / 10 < torch.finfo(torch.float16).max < inner
        expected = torch.full_like(given.x, inner * given.down.shape[2] / 64, dtype=torch.float32)
        torch.testing.assert_close(run(given), expected, rtol=2e-3, atol=0)


@pytest.mark.parametrize("tokens", [2, 20])
def test_neighbours_that_share_no_scale(tokens: int, device: torch.device):
    """Codes of such blocks can't be multiplied as they are, 32 at a time."""
    given, made = of(tokens, device, sizes=(5, 64, 32)), torch.Generator(device).manual_seed(0)
    shapes = (given.gate_up.shape, given.down.shape)
    gate_up, down = (random("F8_E4M3", shape, device, made, 0.1, (24, 20)) for shape in shapes)
    given = replace(given, gate_up=gate_up, down=down)
    assert contract.error_of([run(given)], given.results(reference), 1e-5) <= 1e-5


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [*((stored, torch.float32) for stored in sorted(PACKED_TYPES)), ("Q4_0", torch.float16)],
    ids=str,
)
def test_few_tokens_with_every_packed_type(stored: str, dtype: torch.dtype, device: torch.device):
    """Rows of several steps, the last of them not whole; rows that are no whole number of 64 where there are."""
    odd = TYPES[stored].block_values < 256
    given = of(1, device, stored=(stored, stored), slots=2, sizes=(3, 608 if odd else 768, 96 if odd else 256))
    given = replace(given, x=given.x.to(dtype))
    within = 2e-6 if dtype == torch.float32 else 1e-3
    assert contract.error_of([run(given)], given.results(reference), within) <= within


@pytest.mark.parametrize("stored", sorted(PACKED_TYPES))
def test_tiles_of_few_rows_with_every_packed_type(stored: str, device: torch.device, monkeypatch: pytest.MonkeyPatch):
    """Tiles of one row, of two, and of more, the last of them not full."""
    odd = TYPES[stored].block_values < 256
    given = of(6, device, stored=(stored, stored), slots=1, sizes=(3, 160 if odd else 256, 96 if odd else 256))
    given = replace(given, chosen=torch.tensor([0, 1, 2, 2, 1, 2], device=device)[:, None])
    by_tiles(monkeypatch, moe.BY_FEW.rows)
    assert contract.error_of([run(given)], given.results(reference), 2e-6) <= 2e-6


@pytest.mark.parametrize("slots", [1, 7])
def test_few_tokens_with_any_number_of_slots(slots: int, device: torch.device):
    given = of(2, device, stored=("Q4_0", "Q8_0"), slots=slots, sizes=(9, 64, 32))
    assert contract.error_of([run(given)], given.results(reference), 2e-6) <= 2e-6


@pytest.mark.parametrize("rows", [1, 4])
def test_inputs_that_begin_anywhere(rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch):
    """8 bytes of them are multiplied at a time."""
    if device.type == "cpu":
        pytest.skip("CPUs read 8 bytes from anywhere")
    given = of(2, device, stored=("Q4_0", "Q4_0"), slots=2, sizes=(3, 64, 32))
    x = torch.cat([given.x.new_zeros(1), given.x.flatten()])[1:].view(given.x.shape)
    assert x.data_ptr() % 8
    if rows > 1:
        by_tiles(monkeypatch, rows)
    assert torch.equal(run(replace(given, x=x)), run(given))


@pytest.mark.parametrize(("hip", "overlaps"), [(None, True), ("7.0", False)])
def test_launches_overlap_where_gpus_can(hip: str | None, overlaps: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, device.index))
    assert moe._can_overlap.__wrapped__(torch.device("cuda", 4)) == overlaps
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert not moe._can_overlap.__wrapped__(torch.device("cuda", 4))
    assert not moe._can_overlap.__wrapped__(torch.device("cpu"))


def test_the_first_launch_reads_nothing_before_it_has_waited(
    compile_for_h200: Callable[..., list[tuple[str, int, str]]],
):
    """Nor does it let the second one begin, which reads what experts are chosen before it waits for the first."""
    constants = {"HIDDEN": 256, "WIDTH": 64, "SLOTS": 2, "STORED": "Q4_0", "BLOCK_ROWS": 1, "BLOCK_COLUMNS": 1}
    constants |= {"PART": 8, "PIECES": 8, "UNROLL": 1, "OVERLAP": True}
    types = {"chosen": "*i64", "weights": "*fp32", "w0": "*i32", "w1": "*i32", "w2": "*fp16", "w3": "*fp16"}
    ((_, _, ptx),) = compile_for_h200("lazyio.kernels.moe_code_bodies", [("gate_up_rows", constants, 4, 1)], types)
    waits = ptx.index("griddepcontrol.wait")
    assert waits < ptx.index("griddepcontrol.launch_dependents")
    assert waits < ptx.index("ld.global")


def test_what_the_launch_before_makes_is_there(device: torch.device):
    given = of(1, device, dtype=torch.float16, sizes=(64, 256, 64), stored=("Q4_0", "Q4_0"))
    expected = run(given)
    late = replace(given, x=torch.zeros_like(given.x), chosen=torch.zeros_like(given.chosen))
    for _ in range(5 if device.type == "cuda" else 1):
        late.x.zero_()
        late.chosen.zero_()
        if device.type == "cuda":
            torch.cuda._sleep(1_000_000)
        torch.add(given.x, 0, out=late.x)
        torch.add(given.chosen, 0, out=late.chosen)
        assert torch.equal(run(late), expected)


def test_no_tokens(device: torch.device):
    given = some_of(of(3, device), slice(0, 0))
    assert run(given).shape == (0, given.x.shape[1])


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_numbers_of_experts_are_any_integers(dtype: torch.dtype, device: torch.device):
    for tokens in (2, 20):
        given = of(tokens, device)
        assert torch.equal(run(replace(given, chosen=given.chosen.to(dtype))), run(given))


def test_how_bodies_are_launched():
    rows = [moe.launch_of(tokens, 10, 512, plain_halves=True).rows for tokens in (1, 8, 9, 600, 700, 2048, 8192)]
    assert rows == [1, 1, 16, 16, 32, 64, 128]
    assert moe.launch_of(8192, 10, 512, plain_halves=False).rows == 64
    rows = [moe.launch_of(tokens, 10, 512, plain_halves=False, by_codes=True).rows for tokens in (8, 9, 128, 129, 8192)]
    assert rows == [1, 4, 4, 16, 64]


def test_what_has_no_kernel():
    def has(dtype: torch.dtype, *sizes: int, of: torch.dtype | None = None) -> bool:
        experts, hidden, width = sizes
        down = torch.empty(sizes, dtype=of or dtype, device="meta")
        return supports(dtype, torch.empty(experts, 2 * width, hidden, dtype=of or dtype, device="meta"), down)

    assert has(torch.bfloat16, 512, 2560, 640)
    assert not has(torch.float64, 512, 2560, 640)
    assert not has(torch.bfloat16, 512, 2560, 640, of=torch.float32)
    assert not has(torch.bfloat16, 512, 2560, 648)
    assert not has(torch.bfloat16, 1 << 15, 2560, 640)
    packed = [empty("F8_E4M3", shape, torch.device("cpu"), (8, 8)) for shape in ((2, 96, 64), (2, 64, 48))]
    assert not supports(torch.bfloat16, *packed)
    with pytest.raises(Unsupported, match=r"no kernel for torch.float64 and 13 experts of 96 and 32"):
        run(of(2, torch.device("cpu"), dtype=torch.float64))


def test_without_triton(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> object:
        raise ImportError(name)

    contract.bodies.cache_clear()
    monkeypatch.setattr(contract.importlib, "import_module", missing)
    with pytest.raises(Unsupported, match="mixtures of experts needs Triton"):
        run(of(2, torch.device("cpu")))


def test_the_layer_takes_the_kernel_where_there_is_one(device: torch.device, monkeypatch: pytest.MonkeyPatch):
    given, launched = of(3, device), []

    def counted(*arguments: torch.Tensor) -> torch.Tensor:
        launched.append(len(arguments[0]))
        return reference(*arguments)

    monkeypatch.setattr(layers.moe, "moe", counted)
    monkeypatch.setattr(layers, "usable", lambda of: True)
    layer = layers.Experts(96, 13, 32)
    layer.gate_up_proj.data, layer.down_proj.data = given.gate_up, given.down
    layer.requires_grad_(False)
    found = layer(given.x, given.chosen, given.weights)
    assert launched == [3]
    monkeypatch.setattr(layers, "usable", lambda of: False)
    torch.testing.assert_close(layer(given.x, given.chosen, given.weights), found)
    assert launched == [3]


@pytest.mark.parametrize("tokens", [1, 9])
def test_packed_experts_without_a_kernel(tokens: int):
    given = of(tokens, torch.device("cpu"), stored=("Q4_K", "Q5_0"), sizes=(7, 256, 32))
    layer = layers.Experts(256, 7, 32)
    for name, packed in (("gate_up_proj", given.gate_up), ("down_proj", given.down)):
        delattr(layer, name)
        setattr(layer, name, packed)
        others = [expert for expert in range(7) if expert not in given.chosen.unique().tolist()]
        assert isinstance(packed, PackedWeight)
        packed.planes[-1][others] = torch.nan if packed.planes[-1].is_floating_point() else 0x7E007E00
    found = layer(given.x, given.chosen, given.weights)
    assert contract.error_of([found], given.results(reference), 1e-5) <= 1e-5
