from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from lazyio.engine.layers import attention, block_selection, gated_attention
from lazyio.engine.layers.block_selection import BlockSelection
from lazyio.engine.layers.gated_attention import GatedAttention
from lazyio.engine.layers.rope import Rope
from lazyio.engine.state import State
from lazyio.engine.ubatch import Ubatch
from lazyio.errors import Unsupported
from lazyio.kernels import sparse_attention
from lazyio.kernels.block_selection import BITS, Selected
from lazyio.kernels.sparse_attention import Arguments, _even, _parts, attend_steps, group_of, reference, supports

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of overflows in the interpreter
CPU = torch.device("cpu")


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def expected_of(given: Arguments) -> torch.Tensor:
    return reference(given.q, given.k, given.v, given.selected, scale=given.scale)


@pytest.mark.parametrize("count", [0, 5])
@pytest.mark.parametrize("heads", [(1, 1), (8, 1), (40, 1), (5, 5)], ids=str)
def test_any_number_of_heads_to_one_of_keys(heads: tuple[int, int], count: int, device: torch.device):
    given = Arguments.random(device, 8, 19, 44, count=count, heads=heads)
    (found,) = given.found()
    assert found.shape == given.q.shape
    assert relative(found, expected_of(given)) < 1e-5


@pytest.mark.parametrize("dim", [32, 64])
def test_heads_of_other_dimensions(dim: int, device: torch.device):
    for count in (0, 5):
        given = Arguments.random(device, 9, 6, 41, count=count, dim=dim)
        assert relative(given.found()[0], expected_of(given)) < 1e-5


@pytest.mark.parametrize("count", [0, 9])
@pytest.mark.parametrize("tokens", [1, 13])
def test_parts_together_are_the_whole(tokens: int, count: int, device: torch.device, monkeypatch: pytest.MonkeyPatch):
    given = Arguments.random(device, 8, tokens, 300, count=count)
    monkeypatch.setattr(sparse_attention, "_LEAST_SPAN", 32)
    in_parts = given.found()[0]
    monkeypatch.setattr(sparse_attention, "_PROGRAMS", 1)
    whole = given.found()[0]
    assert relative(in_parts, whole) < (1e-6 if device.type == "cpu" else 1e-5)
    assert not torch.equal(in_parts, whole)  # they were summed in another order


@pytest.mark.parametrize(
    ("programs", "keys", "expected"),
    [(2, 2052, (33, 64)), (2, 131072, (128, 1024)), (64, 32768, (4, 8192)), (65, 32768, (1, 32768)), (2, 40, (1, 64))],
)
def test_few_programs_cut_their_keys(programs: int, keys: int, expected: tuple[int, int]):
    assert _parts(programs, keys, 64) == expected


@pytest.mark.parametrize("count", [0, 9])
def test_a_token_is_the_same_in_any_chunk_and_behind_it_lies_anything(count: int, device: torch.device):
    """Memory of a window that holds no keys yet may hold no numbers."""
    given = Arguments.random(device, 8, 23, 118, count=count)
    (whole,) = given.found()
    room = [torch.full((160, *x.shape[1:]), float("nan"), device=device) for x in (given.k, given.v)]
    for first, last in ((0, 6), (6, 7), (7, 23)):
        k, v = (a[: 118 + last].copy_(b[: 118 + last]) for a, b in zip(room, (given.k, given.v), strict=True))
        selected = given.selected
        if selected is not None:
            mask = selected.mask(36)[first:last, : -(-(118 + last) // 4)]
            selected = Selected.of(mask, group_of(last - first, 6, 2, torch.float32, device), 4)
        part = replace(given, q=given.q[first:last], k=k, v=v, selected=selected)
        assert relative(part.found()[0], whole[first:last]) < (1e-6 if device.type == "cpu" else 1e-5)


@pytest.mark.parametrize("count", [0, 9])
def test_steps_of_one_launch_are_those_of_a_launch_each(count: int, device: torch.device):
    lengths = [102, 1, 33, 150, 2, 4]
    of_each = [Arguments.random(device, length, 1, length - 1, count=count) for length in lengths]
    selected = None
    if count:
        masks = torch.zeros(len(lengths), 38, dtype=torch.bool, device=device)
        for mask, one in zip(masks, of_each, strict=True):
            assert one.selected is not None
            mask |= one.selected.mask(38)[0]
        selected = Selected.of(masks, 1, 4)
    positions = torch.tensor(lengths, device=device) - 1
    q, keys, values = torch.cat([one.q for one in of_each]), [one.k for one in of_each], [one.v for one in of_each]
    found = attend_steps(q, keys, values, positions, selected, scale=of_each[0].scale)
    for one, alone in zip(found, of_each, strict=True):
        assert relative(one, expected_of(alone)[0]) < 1e-5


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v, positions: (q[:1], k, v, positions),
        lambda q, k, v, positions: (q, k, v[:1], positions),
        lambda q, k, v, positions: (q, k, v, positions.int()),
        lambda q, k, v, positions: (q, k, [v[0], v[1].half()], positions),
        lambda q, k, v, positions: (q, k, [v[0], v[1][1:]], positions),
        lambda q, k, v, positions: (q, k, [v[0], v[1].transpose(0, 1).contiguous().transpose(0, 1)], positions),
        lambda q, k, v, positions: (q, [k[0], torch.zeros(193)[1:].view(6, 2, 16)], v, positions),
    ],
)
def test_steps_that_do_not_fit_are_never_launched(change):
    k, v = ([torch.zeros(length, 2, 16) for length in (9, 6)] for _ in range(2))
    with pytest.raises(AssertionError):
        attend_steps(*change(torch.zeros(2, 4, 16), k, v, torch.tensor([8, 5])), None, scale=1.0)


def test_tensors_may_lie_anywhere(device: torch.device):
    for count in (0, 9):
        given = Arguments.random(device, 8, 13, 80, count=count)
        moved = {}
        for name in ("q", "k", "v"):
            x = getattr(given, name)
            wide = torch.full((len(x), 2 * x.shape[1] + 1, x.shape[2]), float("nan"), device=device)
            moved[name] = wide[:, 1 : 1 + x.shape[1]].copy_(x)
        assert torch.equal(replace(given, **moved).found()[0], given.found()[0])


def test_a_list_is_for_as_many_tokens_as_have_room():
    assert group_of(1, 24, 2, torch.bfloat16, CPU) == 1
    assert group_of(100, 24, 2, torch.bfloat16, CPU) == 10
    assert group_of(3, 24, 2, torch.bfloat16, CPU) == 3
    assert group_of(100, 2, 2, torch.bfloat16, CPU) == BITS
    assert group_of(100, 64, 1, torch.float32, CPU) == 1


@pytest.mark.parametrize(
    ("tokens", "kv_heads", "expected"),
    [(2048, 2, 8), (512, 2, 8), (300, 2, 10), (528, 1, 10), (2640, 2, 10), (1320, 1, 10), (1320, 2, 10), (1321, 2, 7)],
)
def test_programs_take_whole_rounds(tokens: int, kv_heads: int, expected: int):
    group = _even(tokens, 10, kv_heads, 132)
    assert group == expected

    def rounds(group: int) -> int:
        return -(-(-(-tokens // group) * kv_heads) // 132)

    assert rounds(group) == rounds(10)
    assert group == 10 or -(-tokens // 10) * kv_heads > 64


def test_what_has_no_kernel():
    assert supports(24, 2, 256)
    assert not supports(24, 2, 96)
    assert not supports(24, 5, 64)
    assert not supports(128, 1, 64)
    assert supports(24, 2, 256, 4)
    assert not supports(24, 2, 256, 3)
    with pytest.raises(
        Unsupported, match=r"no kernel for torch\.float32, 6 heads of 24 and 2 of keys: it has those for"
    ):
        Arguments.random(CPU, 0, 4, 20, dim=24).found()
    with pytest.raises(Unsupported, match=r"no kernel for torch\.float64"):
        Arguments.random(CPU, 0, 4, 20, dtype=torch.float64).found()


@pytest.mark.parametrize(
    "change",
    [
        lambda given: replace(given, q=given.q[:0]),
        lambda given: replace(given, q=given.q[:3]),
        lambda given: replace(given, v=given.v[:9]),
        lambda given: replace(given, v=given.v.half()),
        lambda given: replace(given, k=given.k.transpose(0, 1).contiguous().transpose(0, 1)),
        lambda given: replace(given, k=given.k[:3], v=given.v[:3]),
        lambda given: replace(given, k=given.k.to("meta")),
    ],
)
def test_what_does_not_fit_is_never_launched(change):
    with pytest.raises(AssertionError):
        change(Arguments.random(CPU, 0, 4, 20, count=2)).found()


def test_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from lazyio.kernels.sparse_attention import *\n"
        "given = Arguments.random(torch.device('cpu'), 0, 4, 20)\n"
        "KERNEL.reference(given); given.found()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("lazyio.errors.Unsupported: the kernel of attention needs Triton, which can't be")


@pytest.mark.parametrize("selecting", [False, True])
def test_a_layer_with_the_kernels_is_the_layer_without(
    selecting: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    rope, made = Rope(100.0, 8), torch.Generator().manual_seed(2)
    selection = BlockSelection(24, 2, 16, 12, 4, rope, 1e-6, serves=(6, 2)) if selecting else None
    layer = GatedAttention(24, 6, 2, 16, 1e-6, selection).requires_grad_(False).to(device)
    for parameter in layer.parameters():
        parameter.copy_(0.5 * torch.randn(parameter.shape, generator=made))
    sizes = [[30, 1, 1, 38], [1, 1, 20, 1], [40, 1, 1, 1]]  # of sequences, in each ubatch
    ubatches = [
        [torch.randn(size, 24, generator=made).to(device) for size in of_all] for of_all in zip(*sizes, strict=True)
    ]

    def found() -> torch.Tensor:
        modules = [layer] if selection is None else [layer, selection]
        states = [State({module: module.new_piece(80, torch.float32, device) for module in modules}, 80) for _ in sizes]
        results = []
        for parts in ubatches:
            ubatch = Ubatch.of([(state, [0] * len(x)) for state, x in zip(states, parts, strict=True)], device)
            with torch.inference_mode():
                angles = rope.angles(ubatch.positions, torch.float32)
                results.append(layer(torch.cat(parts), angles, ubatch))
            for state, x in zip(states, parts, strict=True):
                state.tokens += len(x)
        return torch.cat(results)

    def switched(on: bool) -> None:
        for module in (attention, block_selection, gated_attention):
            monkeypatch.setattr(module, "usable", lambda _: on)

    switched(False)
    without = found()
    launched = []
    launch = sparse_attention._launch
    monkeypatch.setattr(sparse_attention, "_launch", lambda *given: launched.append(given) or launch(*given))
    switched(True)
    assert relative(found(), without) < 1e-5
    # Steps beside each other are launched together, chunks alone.
    assert [len(q) for q, *rest in launched if len(rest) == 8] == [3, 2]
    assert sorted(len(q) for q, *rest in launched if len(rest) < 8 and len(q) > 1) == [20, 30, 38, 40]


COMPILE = """
import json
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from lazyio.kernels import attention_bodies, page_bodies, selection_bodies
from lazyio.kernels.block_selection import BITS, SCORE
from lazyio.kernels.sparse_attention import CAUSAL, SELECTED, STEP

heads = dict(HEADS=24, EACH=12, DIM=256, Q_STRIDE=6144, K_STRIDE=512, V_STRIDE=512)
types = dict.fromkeys(("q", "k", "v", "out", "queries", "keys"), "*bf16")
types |= dict.fromkeys(("partial", "weights", "scores"), "*fp32") | dict.fromkeys(("entries", "counts"), "*i32")
types |= {"chosen": "*i8", "scale": "fp32", "positions": "*i64", "places": "*i64", "table": "*i64"}
types |= dict.fromkeys(("first", "second", "to_first", "to_second"), "*bf16")
stride = 3 * 2**20 + 128


def compiled(name, module, body, warps, stages, **constants):
    body = getattr(module, body)
    at = {argument: (body.arg_names.index(argument),) for argument in body.arg_names}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in at}
    aligned = [name for name in at if signature[name].startswith("*") or name in ("width", "capacity")]
    source = ASTSource(
        body,
        signature,
        {at[argument]: value for argument, value in constants.items()},
        {at[argument]: [["tt.divisibility", 16]] for argument in aligned},
    )
    options = {"num_warps": warps, "num_stages": stages}
    found = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(json.dumps([name, [found.metadata.shared, found.asm["ptx"]]]))


for name, [config, *_] in {"causal": CAUSAL[2], "selected": SELECTED[2], "step": STEP[2]}.items():
    selected, split = name != "causal", name == "step"
    shape = {**heads, "ROWS": config.rows, "KEYS": config.keys}
    shape |= {"RATIO": 4 if selected else 1, "SELECTED": selected, "SPLIT": split, "STEPS": split, "UNIT": 8}
    for paged in (False, True):
        found = f"paged {name}" if paged else name
        shape |= {"PAGE": 256 * paged, "PAGE_STRIDE": stride * paged}
        compiled(found, attention_bodies, "attend", config.warps, config.stages, **shape)
shape = dict(HEADS=24, EACH=12, DIM=256, ROWS=16, PARTS=64, WIDTH=32)
compiled("combine", attention_bodies, "combine", 4, 1, **shape)
config = SCORE[False]
shape = dict(RATIO=4, HEADS=4, DIM=128, ROWS=config.rows, COLUMNS=config.columns, OPERAND=tl.bfloat16)
for steps in (False, True):
    name = "score of steps" if steps else "score"
    for paged in (False, True):
        found = f"paged {name}" if paged else name
        shape |= {"STEPS": steps, "UNIT": 8, "PAGE": 64 * paged, "PAGE_STRIDE": stride * paged}
        compiled(found, selection_bodies, "score", config.warps, 3, **shape)
compiled("choose", selection_bodies, "choose", 8, 3, STEPS=True, LISTS=True, BITS=BITS, RATIO=4, TILE=8192)
compiled("unite", selection_bodies, "unite", 8, 3, BITS=BITS, TILE=8192)
shape = dict(WIDTH=512, FIRST_STRIDE=512, SECOND_STRIDE=512, TILE=512, PAGE=256, PAGE_STRIDE=stride, RATIO=1)
compiled("write", page_bodies, "write", 4, 3, PAIR=True, STEPS=True, **shape)
"""


def test_bodies_compile_for_an_h200():
    """Which need not be there."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    compiled = dict(map(json.loads, done.stdout.splitlines()))
    paged = ["causal", "selected", "step", "score", "score of steps"]
    alone = ["combine", "choose", "unite", "write"]
    assert set(compiled) == {*paged, *alone, *(f"paged {name}" for name in paged)}
    for name, (shared_bytes, text) in compiled.items():
        assert shared_bytes <= 232_448, name
        assert ("wgmma.mma_async" in text) == (name not in alone and "step" not in name.split()), name
        # What is multiplied arrives in shared memory by themselves while others are multiplied.
        assert ("cp.async.cg.shared.global" in text) == (name not in alone), name
