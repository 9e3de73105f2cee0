"""A mixture of experts on a GPU: of each token, the weighted sum of the few experts that it chose.

`moe` launches the bodies, which are in moe_bodies.py: two for few tokens, bound by the bytes of the chosen experts, and
five for many, which sort tokens by expert on the device. Only experts that a token chose are read, and the host never
waits to know which.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from lazyio.errors import Unsupported
from lazyio.kernels import packed
from lazyio.kernels.contract import Kernel, bodies, shared_bytes
from lazyio.kernels.moe_cases import CASES, CONTROLS
from lazyio.kernels.packed import PackedWeight

#: Of all experts, [experts, outputs, inputs].
Weight = torch.Tensor | PackedWeight

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Rows of weights are read in steps of so many values, at least, and those of packed ones.
_ALIGNED, _PACKED_ALIGNED = 16, 32
# Experts are numbered by int16 where tokens are sorted.
_MOST_EXPERTS = 1 << 15


@dataclass(frozen=True, slots=True)
class Config:
    """How a body is launched."""

    part: int  # outputs of a program
    step: int  # inputs of a step at most, a power of two; of packed weights, one by one: 32 times pieces, see below
    warps: int
    stages: int
    unroll: int = 1  # steps at once
    together: int = 1  # slots of a step at most


class Ways(NamedTuple):
    """How bodies are launched for weights that are plain, and for packed ones."""

    plain: Config
    packed: Config


@dataclass(frozen=True, slots=True)
class Launch:
    """How the products are launched where experts have `mean` pairs at most."""

    mean: float
    rows: int  # of a tile; 1 is pair by pair
    gate_up: Ways
    down: Ways


#: Up to so many tokens, pairs of a token and an expert are taken one by one, as BY_PAIR says.
FEW = 8
#: By what programs take of registers and memory of an H200, for qwen4_exp, as all of these.
BY_PAIR = Launch(
    math.inf,
    1,
    gate_up=Ways(Config(8, 512, 4, 1), Config(8, 1024, 4, 1, unroll=3)),
    down=Ways(Config(8, 128, 4, 1, unroll=5, together=2), Config(8, 1024, 4, 1, unroll=7)),
)
#: Tiles of few rows, if experts are packed and have at most so many pairs.
BY_FEW = Launch(
    2.5,
    4,
    gate_up=Ways(Config(64, 64, 4, 4), Config(16, 512, 4, 1)),
    down=Ways(Config(64, 64, 4, 4), Config(64, 256, 4, 1)),
)
#: The first whose mean is not less than that of the ubatch.
BY_TILE = (
    Launch(
        12, 16, Ways(Config(64, 64, 4, 4), Config(32, 256, 4, 3)), Ways(Config(64, 64, 4, 4), Config(32, 256, 4, 3))
    ),
    Launch(24, 32, Ways(Config(64, 64, 4, 4), Config(64, 64, 4, 3)), Ways(Config(64, 64, 4, 4), Config(64, 64, 4, 3))),
    Launch(96, 64, Ways(Config(64, 64, 4, 4), Config(64, 64, 4, 3)), Ways(Config(128, 64, 4, 4), Config(64, 64, 4, 3))),
    Launch(
        math.inf,
        128,
        gate_up=Ways(Config(128, 64, 8, 3), Config(128, 64, 8, 3)),
        down=Ways(Config(128, 64, 8, 3), Config(128, 64, 8, 3)),
    ),
)
# Rows of a tile up to which products are made without tensor cores.
_MOST_BY_VECTORS = 4
# Rows of a tile up to which codes of packed weights are multiplied as they are.
_MOST_BY_CODES = 16
# Larger tiles of float32, or beside what unpacks weights, have no room for their products.
_MOST_ROWS_BUT_PLAIN_HALVES = 64
# Compute capability from which on launches overlap.
_OVERLAPS = (9, 0)
# Pairs that are looked at at once where they are sorted, and values that are summed at once.
_SORTED, _SUMMED = 2048, 1024


def supports(dtype: torch.dtype, gate_up: Weight, down: Weight) -> bool:
    """Whether there is a kernel for such x, and such experts."""
    experts, hidden, width = down.shape
    aligned = _ALIGNED
    for one in (gate_up, down):
        if isinstance(one, PackedWeight):
            aligned = _PACKED_ALIGNED
        elif one.dtype != dtype:
            return False
    return dtype in _DTYPES and hidden % aligned == width % aligned == 0 and experts < _MOST_EXPERTS


def moe(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    launch: Launch | None = None,
) -> torch.Tensor:
    """y_t = sum over slots s of weights[t, s] E_e(x_t), e = chosen[t, s], in float32; never waits.

        E_e(x) = W_down,e (silu(G_e x) * (U_e x)),  gate_up[e] = [G_e ; U_e]

    x [tokens, hidden] bfloat16, float16 or float32, contiguous; chosen integers [tokens, slots], each a number of an
    expert, which is not checked; weights float32 [tokens, slots]; gate_up [experts, 2 * width, hidden] and down
    [experts, hidden, width] of x's dtype, or packed, contiguous. The result is float32 [tokens, hidden].
    `launch` is how bodies are launched, and by default follows from how many tokens and experts there are.
    Products are summed in float32. Values of packed weights are rounded to x's dtype before, unless experts have so few
    rows that codes are multiplied as they are. What goes into the last projection, times the weight, is rounded to x's
    dtype, and for more than FEW tokens so is what comes out of it. Source of the formula: engine/layers/moe.py.
    Raises Unsupported where Triton is missing, and for what `supports` does not have.
    """
    _check(x, chosen, weights, gate_up, down)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if not len(x):
        return out
    chosen, weights = chosen.contiguous(), weights.contiguous()
    is_packed = isinstance(gate_up, PackedWeight) or isinstance(down, PackedWeight)
    plain_halves = x.dtype != torch.float32 and not is_packed
    by_codes = all(_by_codes(one, BY_FEW.rows) for one in (gate_up, down))
    launch = launch or launch_of(len(x), chosen.shape[1], down.shape[0], plain_halves, by_codes)
    by = _by_pair if launch.rows == 1 else _by_tile
    by(launch, x, chosen, weights, gate_up, down, out)
    return out


def launch_of(tokens: int, slots: int, experts: int, plain_halves: bool, by_codes: bool = False) -> Launch:
    """How so many tokens are taken, where weights are plain and of 16 bits, where codes are multiplied, and else."""
    if tokens <= FEW:
        return BY_PAIR
    if by_codes and tokens * slots <= BY_FEW.mean * experts:
        return BY_FEW
    fitting = [one for one in BY_TILE if plain_halves or one.rows <= _MOST_ROWS_BUT_PLAIN_HALVES]
    return next((one for one in fitting if tokens * slots <= one.mean * experts), fitting[-1])


def reference(
    x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, gate_up: Weight, down: Weight
) -> torch.Tensor:
    """What `moe` does, in plain torch, without rounding anything to less than float32, on any device."""
    parts = torch.zeros(*chosen.shape, x.shape[1], device=x.device)
    for expert in torch.unique(chosen).tolist():
        token, slot = (chosen == expert).nonzero(as_tuple=True)
        gate, up = functional.linear(x[token].float(), _values(gate_up, expert)).chunk(2, -1)
        inner = functional.silu(gate) * up * weights[token, slot, None]
        parts[token, slot] = functional.linear(inner, _values(down, expert))
    return parts.sum(1)


def _values(weight: Weight, expert: int) -> torch.Tensor:
    """Those of one expert, float32."""
    one = weight[expert]
    return packed.reference_dequantise(one) if isinstance(one, PackedWeight) else one.float()


def _sizes(chosen: torch.Tensor, down: Weight) -> dict[str, int]:
    _, hidden, width = down.shape
    return {"HIDDEN": hidden, "WIDTH": width, "SLOTS": chosen.shape[1]}


def _by_pair(
    launch: Launch,
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    out: torch.Tensor,
) -> None:
    sizes = _sizes(chosen, down)
    hidden, width, slots = sizes.values()
    inner = torch.empty(chosen.numel(), width, dtype=x.dtype, device=x.device)
    x = packed.aligned(x)
    overlap = _by_codes(gate_up, 1) and _by_codes(down, 1) and _can_overlap(x.device)
    of_codes = {"OVERLAP": overlap, **({"launch_pdl": True} if overlap else {})}
    config = _config(launch.gate_up, gate_up)
    if _by_codes(gate_up, launch.rows):
        body, more = _code_bodies().gate_up_rows, _of_pieces(config, gate_up, 1) | of_codes
    else:
        body, more = _bodies().gate_up_rows, _of_values(config, gate_up)
    body[(-(-width // config.part), chosen.numel())](
        *(x, chosen, weights, *_planes(gate_up), inner), **sizes, **_constants(config, gate_up), **more
    )
    config = _config(launch.down, down)
    if _by_codes(down, launch.rows):
        body, more = _code_bodies().down_rows, _of_pieces(config, down, slots) | of_codes
    else:
        body, more = _bodies().down_rows, {**_of_values(config, down), "TOGETHER": math.gcd(config.together, slots)}
    body[(-(-hidden // config.part), len(x))](
        *(inner, chosen, *_planes(down), out), **sizes, **_constants(config, down), **more
    )


def _by_tile(
    launch: Launch,
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    out: torch.Tensor,
) -> None:
    sizes = _sizes(chosen, down)
    hidden, width, slots = sizes.values()
    tables = sorted_by_expert(chosen, down.shape[0], launch.rows)
    most_tiles = len(tables[1])
    inner = torch.empty(chosen.numel(), width, dtype=x.dtype, device=x.device)
    parts = torch.empty(chosen.numel(), hidden, dtype=x.dtype, device=x.device)
    x = packed.aligned(x)
    config = _config(launch.gate_up, gate_up)
    body, more = _of_tiles("gate_up", launch, gate_up, 2 * config.part, x)
    body[(-(-width // config.part), most_tiles)](
        *(x, *tables, weights, *_planes(gate_up), inner), **sizes, **_constants(config, gate_up), **more
    )
    config = _config(launch.down, down)
    body, more = _of_tiles("down", launch, down, config.part, x)
    body[(-(-hidden // config.part), most_tiles)](
        *(inner, *tables, *_planes(down), parts), HIDDEN=hidden, WIDTH=width, **_constants(config, down), **more
    )
    _bodies().combine[(len(x), -(-hidden // _SUMMED))](parts, out, HIDDEN=hidden, SLOTS=slots, PART=_SUMMED)


def _of_tiles(name: str, launch: Launch, weight: Weight, outputs: int, x: torch.Tensor) -> tuple[Any, dict[str, int]]:
    """The body of this name for tiles of this launch, and what it takes besides."""
    config = _config(getattr(launch, name), weight)
    if launch.rows <= _MOST_BY_VECTORS:
        return getattr(_code_bodies(), f"{name}_few"), _of_pieces(config, weight, 1)
    body = getattr(_code_bodies() if _by_codes(weight, launch.rows) else _bodies(), f"{name}_tiles")
    stages = _stages(config, weight, outputs, launch.rows, x)
    return body, {"ROWS": launch.rows, "STEP": _step(config, weight, launch.rows), "num_stages": stages}


def sorted_by_expert(chosen: torch.Tensor, experts: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pairs by expert, those of an expert as they come, int32 [pairs]; tiles of up to `rows` of them; how many tiles.

    Tiles, int32 [most, 3], have their expert and which pairs are theirs, from and to; `most` is known on the host, and
    only the first of them are filled: the last result, int32 [1], says how many.
    """
    pairs, device = chosen.numel(), chosen.device
    numbers = chosen.flatten().to(torch.int16)
    # As many tiles as experts that somebody chose, and one more for each `rows` pairs.
    most_tiles = min(experts, pairs) + pairs // rows
    order, total, counts = (torch.empty(size, dtype=torch.int32, device=device) for size in (pairs, 1, experts))
    tiles = torch.empty(most_tiles, 3, dtype=torch.int32, device=device)
    _bodies().count[(experts,)](numbers, counts, pairs, BLOCK=_SORTED)
    _bodies().place[(experts,)](
        *(numbers, counts, order, tiles, total, pairs),
        EXPERTS=experts,
        PADDED=1 << (experts - 1).bit_length(),
        ROWS=rows,
        BLOCK=_SORTED,
    )
    return order, tiles, total


def _config(ways: Ways, weight: Weight) -> Config:
    return ways.packed if isinstance(weight, PackedWeight) else ways.plain


def _by_codes(weight: Weight, rows: int) -> bool:
    """Whether tiles of so few rows are multiplied with the codes of a weight."""
    return isinstance(weight, PackedWeight) and rows <= _MOST_BY_CODES and weight.shares_scales


@functools.cache
def _can_overlap(device: torch.device) -> bool:
    """Whether a launch can begin before the end of the one before it, on this GPU. AMD numbers its own otherwise."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) >= _OVERLAPS


def _constants(config: Config, weight: Weight) -> dict[str, Any]:
    """What bodies are compiled for: how the weight is stored, and how they are launched."""
    stored, block = (weight.stored, weight.block) if isinstance(weight, PackedWeight) else ("dense", None)
    block_rows, block_columns = block or (1, 1)
    return {
        **{"STORED": stored, "BLOCK_ROWS": block_rows, "BLOCK_COLUMNS": block_columns},
        **{"PART": config.part, "num_warps": config.warps},
    }


def _of_values(config: Config, weight: Weight) -> dict[str, int]:
    """The steps of bodies that take pairs one by one, with values."""
    return {"STEP": math.gcd(config.step, weight.shape[-1]), "STAGES": config.stages, "UNROLL": config.unroll}


def _of_pieces(config: Config, weight: Weight, slots: int) -> dict[str, int]:
    """And with codes, of rows of so many slots. What is loaded goes to registers, so there are no stages."""
    assert isinstance(weight, PackedWeight)
    pieces, steps = packed.step_pieces(weight, config.step, slots)
    unroll = -(-steps // -(-steps // config.unroll))  # as many each time
    return {"PIECES": pieces, "UNROLL": unroll, "num_stages": 1}


def _step(config: Config, weight: Weight, rows: int) -> int:
    """Inputs of a step of tiles."""
    inputs = weight.shape[-1]
    if _by_codes(weight, rows):
        return min(config.step, max(64, 1 << (inputs - 1).bit_length()))
    return math.gcd(config.step, inputs)


def _stages(config: Config, weight: Weight, outputs: int, rows: int, x: torch.Tensor) -> int:
    """Steps that are loaded ahead of their product: as many as this GPU has memory for."""
    if x.device.type != "cuda":
        return 1
    has = shared_bytes(x.device)
    each = _planes(weight)[0].nbytes / math.prod(weight.shape)
    of_step = config.step * (outputs * each + rows * x.element_size())
    # Values of packed weights may go through that memory too.
    has -= config.step * outputs * x.element_size() if isinstance(weight, PackedWeight) else 0
    return max(1, min(config.stages, int(has / of_step)))


def _planes(weight: Weight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return weight.pointers() if isinstance(weight, PackedWeight) else (weight, weight, weight, weight)


def _bodies() -> Any:
    return bodies("moe_bodies", "the kernel of mixtures of experts")


def _code_bodies() -> Any:
    return bodies("moe_code_bodies", "the kernel of mixtures of packed experts")


def _check(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, gate_up: Weight, down: Weight) -> None:
    experts, hidden, width = down.shape
    if not supports(x.dtype, gate_up, down):
        raise Unsupported(
            f"mixtures of experts have no kernel for {x.dtype} and {experts} experts of {hidden} and {width}: they have"
            f" one for float32, bfloat16 and float16, with weights of the same dtype or packed, for sizes that are "
            f"multiples of {_ALIGNED} ({_PACKED_ALIGNED} if packed), and fewer than {_MOST_EXPERTS:,} experts"
        )
    assert x.shape == (len(chosen), hidden), "x is [tokens, hidden]"
    assert x.is_contiguous(), "x is not contiguous"
    assert chosen.shape == weights.shape, "chosen and weights are [tokens, slots]"
    assert chosen.shape[1] > 0, "a token chose no experts"
    assert not chosen.is_floating_point(), "chosen are integers"
    assert weights.dtype == torch.float32, "weights are float32"
    assert tuple(gate_up.shape) == (experts, 2 * width, hidden), "gate_up is [experts, 2 * width, hidden]"
    assert all(one.device == x.device for one in (chosen, weights, gate_up, down)), "tensors are on different devices"
    for one in (gate_up, down):
        whole = one.contiguous if isinstance(one, PackedWeight) else one.is_contiguous()
        assert whole, "weights of experts are not contiguous"


KERNEL = Kernel(
    name="moe",
    run=lambda given: given.results(moe),
    reference=lambda given: given.results(reference),
    cases=CASES,
    controls=CONTROLS,
    bodies=lambda: [
        *(_bodies().gate_up_rows, _bodies().down_rows, _bodies().count, _bodies().place),
        *(_bodies().gate_up_tiles, _bodies().down_tiles, _bodies().combine),
        *(_code_bodies().gate_up_rows, _code_bodies().down_rows),
        *(_code_bodies().gate_up_tiles, _code_bodies().down_tiles),
        *(_code_bodies().gate_up_few, _code_bodies().down_few),
    ],
)
