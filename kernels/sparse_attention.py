"""Attention on a GPU, of tokens to all keys before them or to selected blocks of these.

`attend_selected` and `attend_causal` launch the bodies, which are in attention_bodies.py: one program loads keys for
several tokens in a row and all query heads that share these keys.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lazyio.errors import Unsupported
from lazyio.kernels.block_selection import BITS, Selected
from lazyio.kernels.contract import Case, Kernel, bodies, processors, shared_bytes
from lazyio.kernels.pages import PAGE, Entries, Pages, check_pages, found_by, places_of
from lazyio.kernels.places import UNIT

_DIMS = (16, 32, 64, 128, 256)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_EACH = 64
_RATIOS = (1, 2, 4, 8, 16, 32)

# So many programs that each multiprocessor of a large GPU has one or two.
_PROGRAMS = 256
_LEAST_SPAN = 64


@dataclass(frozen=True, slots=True)
class Config:
    """How `attend` is launched."""

    rows: int  # queries of a program, a token's heads apart: at most so many
    keys: int  # of a tile
    warps: int
    stages: int
    shared_bytes: int = 0  # that a program may have on this GPU, at least


#: By the bytes of an element, for tokens that see all keys or selected ones, and for one token; the first whose memory
#: is there. Chosen for 24 heads of 256, 2 of keys, on an H200.
CAUSAL = {2: [Config(128, 64, 8, 2, 200_000), Config(64, 32, 4, 2)], 4: [Config(32, 32, 8, 1)]}
SELECTED = {2: [Config(128, 64, 8, 3, 200_000), Config(64, 32, 4, 2)], 4: [Config(32, 32, 8, 1)]}
STEP = {2: [Config(16, 64, 4, 2)], 4: [Config(16, 32, 4, 1)]}


def supports(heads: int, kv_heads: int, dim: int, ratio: int = 1) -> bool:
    """Whether there is a kernel for so many heads of queries and keys of this dimension, and blocks of `ratio`."""
    return dim in _DIMS and heads % kv_heads == 0 and heads // kv_heads <= _MOST_EACH and ratio in _RATIOS


def group_of(tokens: int, heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device) -> int:
    """Of how many tokens `attend_selected` takes the blocks from one list: the `group` of its Selected."""
    config = _fitting(STEP if tokens == 1 else SELECTED, dtype, device)
    most = min(BITS, tokens, max(1, config.rows // (heads // kv_heads)))
    if device.type != "cuda":
        return most
    return _even(tokens, most, kv_heads, processors(device))


def _even(tokens: int, most: int, kv_heads: int, processors: int) -> int:
    """The fewest tokens of a program with which all of them take as many rounds as with the `most`.

    A multiprocessor has room for one program, and fewer tokens see fewer blocks.
    """
    programs = -(-tokens // most) * kv_heads
    if programs <= _PROGRAMS // 4:  # these are cut in parts
        return most
    rounds = -(-programs // processors)
    return -(-tokens // (rounds * processors // kv_heads))


def attend_causal(q: torch.Tensor, k: Entries, v: Entries, *, scale: float) -> torch.Tensor:
    """softmax(q k^T * scale over the keys up to each token) v: [tokens, heads, dim], in the dtype of q; never waits.

    q [tokens, heads, dim] of the last tokens of k and v [keys, kv_heads, dim], each of which serves heads / kv_heads
    query heads in order: float32, bfloat16 or float16, of one dtype. Tokens may lie apart, or k and v in pages.
    Raises Unsupported where Triton is missing, and for what has no kernel.
    """
    _check(q, k, v)
    each = q.shape[1] // k.shape[1]
    tokens = q.shape[0]
    config = _fitting(STEP if tokens == 1 else CAUSAL, q.dtype, q.device)
    group = max(1, min(tokens, config.rows // each))
    return _launch(q, k, v, k.shape[0], None, scale, config, group)


def attend_selected(q: torch.Tensor, k: Entries, v: Entries, selected: Selected, *, scale: float) -> torch.Tensor:
    """`attend_causal` over the keys in selected blocks alone. Every token must see a key."""
    _check(q, k, v)
    tokens = q.shape[0]
    config = _fitting(STEP if tokens == 1 else SELECTED, q.dtype, q.device)
    assert selected.tokens == tokens, "blocks were selected for other tokens"
    assert selected.ratio in _RATIOS, "tiles have no whole blocks"
    assert selected.group * (q.shape[1] // k.shape[1]) <= config.rows or selected.group == 1, "groups are too large"
    return _launch(q, k, v, k.shape[0], selected, scale, config, selected.group)


def attend_steps(
    q: torch.Tensor,
    keys: Sequence[Entries],
    values: Sequence[Entries],
    positions: torch.Tensor,
    selected: Selected | None,
    *,
    scale: float,
) -> torch.Tensor:
    """`attend_selected`, or `attend_causal` where nothing is selected, of one token of each of several sequences.

    q [sequences, heads, dim]; keys and values [keys, kv_heads, dim] of each, up to its token, and all of one layout;
    positions int64 [sequences], of the tokens.
    """
    longest = max(range(len(keys)), key=lambda i: keys[i].shape[0])
    _check(q[:1], keys[longest], values[longest])
    _check_steps(q, keys, values, positions)
    steps = (positions, places_of(keys, values))
    config = _fitting(STEP, q.dtype, q.device)
    return _launch(q, keys[0], values[0], keys[longest].shape[0], selected, scale, config, 1, steps)


def _launch(
    q: torch.Tensor,
    k: Entries,
    v: Entries,
    keys: int,
    selected: Selected | None,
    scale: float,
    config: Config,
    group: int,
    steps: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    (tokens, heads, dim), kv_heads = q.shape, k.shape[1]
    rows = max(config.rows, 1 << (heads // kv_heads - 1).bit_length())
    groups = -(-tokens // group)
    slots = keys if selected is None else selected.entries.shape[1] * selected.ratio
    parts, span = _parts(groups * kv_heads, slots, config.keys)
    out = q.new_empty(tokens, heads, dim)
    partial = weights = out
    if parts > 1:
        partial = torch.empty(groups, kv_heads, parts, rows, dim, device=q.device)
        weights = torch.empty(groups, kv_heads, parts, 2, rows, device=q.device)
    shape = {"HEADS": heads, "EACH": heads // kv_heads, "DIM": dim, "ROWS": rows}
    lists = (out, out) if selected is None else (selected.entries, selected.counts)
    (k_lie, table, paging), (v_lie, *_) = found_by(k), found_by(v)
    _bodies().attend[(groups, kv_heads, parts)](
        *(q, k_lie, v_lie, table, *lists, *(steps or (out, out)), out, partial, weights, tokens, keys - tokens),
        *(group, span, lists[0].shape[1], scale * math.log2(math.e)),
        **{**shape, "Q_STRIDE": q.stride(0), "K_STRIDE": k.stride()[0], "V_STRIDE": v.stride()[0]},
        KEYS=config.keys,
        RATIO=1 if selected is None else selected.ratio,
        SELECTED=selected is not None,
        SPLIT=parts > 1,
        STEPS=steps is not None,
        UNIT=UNIT // q.element_size(),
        **paging,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    if parts > 1:
        width = min(32, dim)
        _bodies().combine[(tokens, heads, dim // width)](
            partial, weights, out, group, parts, **shape, PARTS=64 if parts <= 64 else _PROGRAMS, WIDTH=width
        )
    return out


def _parts(programs: int, keys: int, tile: int) -> tuple[int, int]:
    """Where whole lists would keep few multiprocessors busy: in how many parts of how many keys to cut them."""
    parts = max(1, _PROGRAMS // programs) if programs <= _PROGRAMS // 4 else 1
    span = max(_LEAST_SPAN, -(-keys // (parts * tile)) * tile)
    return -(-keys // span), span


def _fitting(configs: Mapping[int, Sequence[Config]], dtype: torch.dtype, device: torch.device) -> Config:
    some = configs[dtype.itemsize]
    if device.type != "cuda":
        return some[0]
    return next(config for config in some if config.shared_bytes <= shared_bytes(device))


def _bodies() -> Any:
    return bodies("attention_bodies", "the kernel of attention")


def _check(q: torch.Tensor, k: Entries, v: Entries) -> None:
    (tokens, heads, dim), (keys, kv_heads, _) = q.shape, k.shape
    if not supports(heads, kv_heads, dim) or q.dtype not in _DTYPES:
        raise Unsupported(
            f"attention has no kernel for {q.dtype}, {heads} heads of {dim} and {kv_heads} of keys: it has those for"
            f" float32, bfloat16 and float16, dimensions of {_DIMS}, and up to {_MOST_EACH} heads for one of keys"
        )
    assert k.shape == v.shape == (keys, kv_heads, dim), "keys and values are [keys, kv_heads, dim]"
    assert 0 < tokens <= keys, "there are fewer keys than tokens"
    assert q.dtype == k.dtype == v.dtype, "q, k and v are of one dtype"
    assert q.device == k.device == v.device, "q, k and v are on different devices"
    assert q.stride()[1:] == k.stride()[1:] == v.stride()[1:] == (dim, 1), "q, k or v of a token is not contiguous"
    if isinstance(k, Pages) or isinstance(v, Pages):
        check_pages(([k], [v]))
        (_, _, paging), (_, _, other) = found_by(k), found_by(v)
        assert paging["PAGE"] == other["PAGE"] == PAGE, f"a page has {PAGE} keys and values"


def _check_steps(q: torch.Tensor, keys: Sequence[Entries], values: Sequence[Entries], positions: torch.Tensor) -> None:
    assert q.shape[0] == len(keys) == len(values), "there are a query, keys and values for each sequence"
    assert positions.shape == (len(keys),), "positions are [sequences]"
    assert positions.dtype == torch.int64, "positions are int64"
    assert positions.is_contiguous(), "positions are not contiguous"
    assert positions.device == q.device, "positions are on another device"
    if isinstance(keys[0], Pages):
        check_pages((keys, values))
        return
    for k, v in zip(keys, values, strict=True):
        assert k.shape == v.shape, "keys and values are [keys, kv_heads, dim]"
        for of_first, one in ((keys[0], k), (values[0], v)):
            assert one.shape[1:] == of_first.shape[1:], "heads of sequences differ"
            assert one.stride() == of_first.stride(), "layouts of sequences differ"
            assert one.dtype == q.dtype, "q, k and v are of one dtype"
            assert one.device == q.device, "q, k and v are on different devices"
            assert isinstance(one, torch.Tensor), "some lie in pages, and some do not"
            assert one.data_ptr() % UNIT == 0, "keys and values begin at a multiple of 16 bytes"


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, selected: Selected | None, *, scale: float
) -> torch.Tensor:
    """What `attend_selected` does, or without blocks `attend_causal`, in float64 on any device."""
    tokens, keys = len(q), len(k)
    position = torch.arange(keys, device=q.device)
    allowed = position <= position[keys - tokens :, None]
    if selected is not None:
        allowed &= selected.mask(-(-keys // selected.ratio)).repeat_interleave(selected.ratio, 1)[:, :keys]
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("thd,khd->htk", q.double(), k) * scale
    return torch.einsum("htk,khd->thd", scores.masked_fill(~allowed, -math.inf).softmax(-1), v).to(q.dtype)


@dataclass(frozen=True, slots=True)
class Arguments:
    """Those of `attend_selected`; of `attend_causal` where nothing is selected."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    selected: Selected | None
    scale: float

    @classmethod
    def random(
        cls,
        device: torch.device,
        seed: int,
        tokens: int,
        before: int,
        *,
        count: int = 0,
        ratio: int = 4,
        heads: tuple[int, int] = (6, 2),
        dim: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> Arguments:
        """With a `count` each token sees so many blocks by chance, and the one that it lies in."""
        made = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=made, device=device)

        keys = before + tokens
        q, k, v = (normal(n, of, dim).to(dtype) for n, of in ((tokens, heads[0]), (keys, heads[1]), (keys, heads[1])))
        if not count:
            return cls(q, k, v, None, dim**-0.5)
        block, length = (torch.arange(n, device=device) for n in (-(-keys // ratio), keys))
        length = length[before:, None] + 1
        chance = normal(tokens, len(block)).masked_fill(block >= length // ratio, -math.inf)
        mask = torch.zeros_like(chance, dtype=torch.bool)
        mask.scatter_(1, chance.topk(min(count, len(block))).indices, True)
        mask &= chance > -math.inf
        mask |= (block == length // ratio) & (length % ratio != 0)
        selected = Selected.of(mask, group_of(tokens, *heads, dtype, device), ratio)
        return cls(q, k, v, selected, dim**-0.5)

    def found(self) -> list[torch.Tensor]:
        """What the launchers make of them."""
        if self.selected is None:
            return [attend_causal(self.q, self.k, self.v, scale=self.scale)]
        return [attend_selected(self.q, self.k, self.v, self.selected, scale=self.scale)]


def _cases() -> list[Case[Arguments]]:
    within = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}
    true: dict[str, Any] = {"heads": (24, 2), "dim": 256, "dtype": torch.bfloat16}
    sizes: dict[str, dict[str, Any]] = {
        "selected, a chunk": {"tokens": 13, "before": 82, "count": 9, "planted": True},
        "selected, from the start": {"tokens": 40, "before": 0, "count": 4},
        "selected, a step": {"tokens": 1, "before": 165, "count": 37},
        "selected, blocks of 2, a head of keys each": {
            "tokens": 21,
            "before": 30,
            "count": 7,
            "ratio": 2,
            "heads": (2, 2),
        },
        "all, a chunk": {"tokens": 31, "before": 70},
        "all, from the start": {"tokens": 75, "before": 0},
        "all, a step": {"tokens": 1, "before": 150},
        "selected, float16": {"tokens": 15, "before": 80, "count": 9, "dtype": torch.float16},
        "all, float16": {"tokens": 15, "before": 80, "dtype": torch.float16},
        "selected, 500 tokens at 7,777": {"tokens": 500, "before": 7777, "count": 512, **true},
        "selected, 7 tokens at 7,777": {"tokens": 7, "before": 7777, "count": 512, **true},
        "selected, a step at 131,070": {"tokens": 1, "before": 131070, "count": 512, **true},
        "all, 700 tokens at 1,234": {"tokens": 700, "before": 1234, **true},
        "all, 9 tokens at 9,000": {"tokens": 9, "before": 9000, **true},
        "selected, float32 at 3,000": {"tokens": 130, "before": 3000, "count": 512, **true, "dtype": torch.float32},
        "all, float32 at 900": {"tokens": 130, "before": 900, **true, "dtype": torch.float32},
    }
    cases = []
    for name, size in sizes.items():
        planted = size.pop("planted", False)
        make, dtype = functools.partial(Arguments.random, **size), size.get("dtype", torch.float32)
        cases.append(Case(name, make, within[dtype], planted, compiled_only="dim" in size))
    return cases


def _with_mask(given: Arguments, change: Callable[[torch.Tensor], torch.Tensor]) -> Arguments:
    assert given.selected is not None
    mask = given.selected.mask(-(-len(given.k) // given.selected.ratio))
    return replace(given, selected=Selected.of(change(mask), given.selected.group, given.selected.ratio))


def _without_tail(mask: torch.Tensor) -> torch.Tensor:
    mask[:, -1] = False
    return mask


#: Faults by name.
CONTROLS: Mapping[str, Callable[[Arguments], Arguments]] = {
    "blocks one further on": lambda given: _with_mask(given, lambda mask: mask.roll(1, 1)),
    "blocks of the token before": lambda given: _with_mask(given, lambda mask: mask.roll(1, 0)),
    "the last block left out": lambda given: _with_mask(given, _without_tail),
    "keys one token late": lambda given: replace(given, k=given.k.roll(1, 0)),
    "heads of keys swapped": lambda given: replace(given, k=given.k.flip(1)),
    "heads of values swapped": lambda given: replace(given, v=given.v.flip(1)),
    "values rounded": lambda given: replace(given, v=given.v.bfloat16().to(given.v.dtype)),
    "another scale": lambda given: replace(given, scale=given.scale * 1.01),
}

KERNEL = Kernel(
    name="sparse_attention",
    run=lambda given: given.found(),
    reference=lambda given: [reference(given.q, given.k, given.v, given.selected, scale=given.scale)],
    cases=_cases(),
    controls=CONTROLS,
    bodies=lambda: [_bodies().attend, _bodies().combine],
)
