"""How the weights of a model are held: which stay packed, which become values, and the bytes that takes.

Settled from headers alone, and the only place where bytes of weights are worked out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lazyio.engine.layers.linear import Embedding
from lazyio.engine.layers.packed import Weight
from lazyio.engine.models import Model
from lazyio.engine.weights.fp8 import FP8_TYPES
from lazyio.engine.weights.plan import Step, plan, shapes_of
from lazyio.engine.weights.source import Part, Source
from lazyio.errors import SettingError, Unsupported
from lazyio.kernels.contract import has_triton, usable
from lazyio.kernels.packed import PACKED_TYPES, PackedWeight, empty, plane_shapes
from lazyio.ple.dtypes import TYPES
from lazyio.units import format_bytes

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_FP8, _FP8_BLOCK = "F8_E4M3", (128, 128)
# Of dummy weights, where rows are no whole blocks of the type: what llama.cpp's quantiser takes instead.
_INSTEAD = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


@dataclass(frozen=True, slots=True)
class Form:
    """How one parameter is held: packed as it is stored, else as values of `dtype`.

    `why` says, of one that is stored packed and becomes values, why; `stored_bytes` are those of its file.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    packed: str | None = None
    block: tuple[int, int] | None = None
    why: str = ""
    stored_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        if self.packed is None:
            return math.prod(self.shape) * self.dtype.itemsize
        return sum(math.prod(size) * kind.itemsize for size, kind in plane_shapes(self.packed, self.shape, self.block))

    def empty(self, device: torch.device) -> Weight:
        """Memory for it."""
        if self.packed is not None:
            return empty(self.packed, self.shape, device, self.block)
        return nn.Parameter(torch.empty(self.shape, dtype=self.dtype, device=device), requires_grad=False)


@dataclass(frozen=True, slots=True)
class Trunk:
    """A model, on the meta device until it is loaded, and how each of its parameters will be held.

    `steps` read them; None for random weights. `note` says why what could stay packed does not.
    """

    model: Model
    device: torch.device
    dtype: torch.dtype
    forms: Mapping[str, Form]
    steps: Sequence[Step] | None
    note: str = ""

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(form.nbytes for form in self.forms.values())

    @property
    def packed_bytes(self) -> int:
        """Bytes of those that stay packed."""
        return sum(form.nbytes for form in self.forms.values() if form.packed)

    @property
    def scratch_bytes(self) -> int:
        """What a GPU takes for the values of the largest packed matrix, while a prompt is multiplied by it."""
        if self.device.type != "cuda":
            return 0
        matrices = (form for form in self.forms.values() if form.packed and len(form.shape) == 2)
        return max((math.prod(form.shape) * form.dtype.itemsize for form in matrices), default=0)

    @property
    def nbytes(self) -> int:
        """What the model takes of its device when it is loaded."""
        return self.weights_bytes + self.scratch_bytes

    @property
    def packed_types(self) -> list[str]:
        """The stored types that weights are kept in."""
        return sorted({form.packed for form in self.forms.values() if form.packed})

    def put(self, parameter: str, weight: Weight) -> None:
        """Have the model hold a weight by the name of a parameter."""
        path, _, last = parameter.rpartition(".")
        module = self.model.get_submodule(path)
        if isinstance(weight, PackedWeight):
            delattr(module, last)  # nothing else takes the place of a parameter
        if isinstance(module, Embedding):
            module.packed_dtype = self.dtype
        setattr(module, last, weight)

    def __str__(self) -> str:
        """Bytes by what they are of, for people: one line."""
        values = str(self.dtype).removeprefix("torch.")
        packed = self.packed_bytes
        said = f"{format_bytes(self.weights_bytes)} of {values}"
        if packed:
            said = (
                f"{format_bytes(packed)} packed as {', '.join(self.packed_types)} and "
                f"{format_bytes(self.weights_bytes - packed)} of {values}"
            )
        if self.note:
            said += f", weights dequantised ({self.note})"
        expanded = self.expanded()
        return f"{said}, of which converted: {'; '.join(expanded)}" if expanded else said

    def expanded(self) -> list[str]:
        """What was stored packed and becomes values, by reason, with the bytes before and after."""
        before, after = Counter[str](), Counter[str]()
        for form in self.forms.values():
            if form.why:
                before[form.why] += form.stored_bytes
                after[form.why] += form.nbytes
        return [f"{format_bytes(before[why])} of {why} to {format_bytes(after[why])}" for why in before]


def plan_trunk(
    source: Source, model: Model, *, device: torch.device, dtype: torch.dtype, weights: str = "auto"
) -> Trunk:
    """How the weights of a checkpoint are held. `model` is its outline, `weights` the setting of that name.

    Raises ModelError where the checkpoint does not hold the model, Unsupported where `weights` is packed and the device
    can't multiply by packed weights, SettingError for a dtype that can't be.
    """
    check_device(device)
    _check(dtype)
    steps = plan(source, model)
    of_parameters: dict[str, list[Part]] = {}
    for step in steps:
        of_parameters.setdefault(step.parameter, []).append(step.part)
    stays, reason = stays_packed(weights, device)
    may = set(model.packable)
    forms, note = {}, ""
    for name, shape in shapes_of(model).items():
        parts = of_parameters[name]
        form = _form(shape, parts, model.dtype_of(name, dtype), may=name in may)
        if not stays and (form.packed or form.why):
            form, note = Form(shape, form.dtype), reason
        forms[name] = form
    return Trunk(model, device, dtype, forms, steps, note)


def plan_dummy(
    model: Model, *, device: torch.device, dtype: torch.dtype, weights: str = "auto", trunk: str | None = None
) -> Trunk:
    """How random weights are held: matrices as the type `trunk`, all in `dtype` without one. The device is not asked.

    Raises SettingError for settings that contradict each other.
    """
    _check(dtype)
    if trunk is not None and _DTYPES.get(trunk, dtype) != dtype:
        raise SettingError(
            f"trunk is {trunk}, and dtype is {_name(dtype)}: set dtype to {_name(_DTYPES[trunk])}, or leave trunk out"
        )
    if trunk in _DTYPES:
        trunk = None
    if trunk is not None and weights == "dequantised":
        raise SettingError(f"trunk is {trunk}, and weights is dequantised: leave one of them out")
    may = set(model.packable)
    forms = {}
    for name, shape in shapes_of(model).items():
        packed = None if trunk is None or name not in may else _whole_blocks(trunk, shape[-1])
        block = _FP8_BLOCK if packed == _FP8 else None
        forms[name] = Form(shape, model.dtype_of(name, dtype), packed, block)
    return Trunk(model, device, dtype, forms, None)


def check_device(device: torch.device) -> None:
    """Raise Unsupported for a device that is not there."""
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise Unsupported(f"device is {str(device)!r}, and torch sees {count} CUDA devices here: set device to cpu")


def _check(dtype: torch.dtype) -> None:
    if dtype not in _DTYPES.values():
        raise SettingError(f"dtype is {dtype}; it can be {', '.join(map(str, _DTYPES.values()))}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def stays_packed(weights: str, device: torch.device) -> tuple[bool, str]:
    """Whether what can stay packed does, and why not. Raises Unsupported where it was asked for and can't be."""
    if weights == "dequantised":
        return False, "as asked"
    if device.type == "cpu":
        # Each use would take the values of a whole matrix first, which costs many times what multiplying does.
        return weights == "packed", "on the CPU that is faster"
    if weights == "packed":
        check_kernels(device, "set weights to dequantised")
    lack = lack_of(device)
    return not lack, lack


def check_kernels(device: torch.device, advice: str) -> None:
    """Raise Unsupported, with the advice, for a device that can't multiply by packed weights."""
    if lack := lack_of(device):
        raise Unsupported(f"packed weights need kernels that can't run here: {lack}; {advice}")


def lack_of(device: torch.device) -> str:
    """Why a device can't multiply by packed weights, empty if it can."""
    if device.type == "cpu" or usable(device):
        return ""
    if not has_triton():
        return "Triton is not installed"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{device} has compute capability {major}.{minor}, and kernels need 8.0"


def _whole_blocks(stored: str, inputs: int) -> str | None:
    """The type, or the one instead of it, of whose blocks rows can be made; None if of neither."""
    for kind in (stored, _INSTEAD.get(stored)):
        if kind is not None and inputs % TYPES[kind].block_values == 0:
            return kind
    return None


def _form(shape: tuple[int, ...], parts: Sequence[Part], dtype: torch.dtype, *, may: bool) -> Form:
    stored = {part.stored.dtype for part in parts}
    if all(TYPES[kind].block_values == 1 and kind not in FP8_TYPES for kind in stored):
        return Form(shape, dtype)
    block = _common_block(shape, parts)
    why = "" if may else "a router, or few rows"
    why = why or _why_not(shape, parts, block)
    if why:
        stored_bytes = sum(part.stored.size_bytes or 0 for part in parts)
        return Form(shape, dtype, why=f"{', '.join(sorted(stored))} ({why})", stored_bytes=stored_bytes)
    return Form(shape, dtype, stored.pop(), block)


def _why_not(shape: tuple[int, ...], parts: Sequence[Part], block: tuple[int, int] | None) -> str:
    """Why the stored parts of a parameter can't be held as they are, empty if they can."""
    stored = {part.stored.dtype for part in parts}
    if len(stored) > 1:
        return "parts of different types"
    if not stored <= PACKED_TYPES:
        return "no kernel"
    if stored == {_FP8} and block is None:
        return "scales of which blocks are no blocks of the whole"
    if any(len(part.into) >= len(shape) for part in parts) or any(map(_why_not_changed, parts)):
        return "columns in another order"
    return ""


def _why_not_changed(part: Part) -> bool:
    """Whether a part's change can't be made to packed values: heads that are moved must be whole blocks."""
    if part.change is None or part.tiles is None:
        return part.change is not None
    if part.tiles.dim == 0:
        return part.scale is not None
    return part.tiles.of_elements(TYPES[part.stored.dtype].block_values) is None


def _common_block(shape: tuple[int, ...], parts: Sequence[Part]) -> tuple[int, int] | None:
    """Of fp8: rows and columns of blocks, if those of all parts are blocks of the whole."""
    blocks = {part.scale.block for part in parts if part.scale is not None}
    if len(blocks) != 1 or any(part.scale is None for part in parts):
        return None
    block = blocks.pop()
    starts = (part.into[len(shape) - 2].indices(shape[-2])[0] for part in parts if len(part.into) > len(shape) - 2)
    return block if all(start % block[0] == 0 for start in starts) else None
