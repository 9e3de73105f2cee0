"""Memory for weights: packed matrices that take the same x lie behind one another, so that one product has them all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from lazyio.engine.layers.packed import Weight, cut
from lazyio.engine.weights.trunk import Form, Trunk
from lazyio.kernels.packed import PackedWeight, plane_shapes

# Every part begins where any plane has at a multiple of so many bytes what a kernel loads at once.
_ALIGNED_BYTES = 16


def memory(trunk: Trunk) -> Iterator[tuple[str, Weight]]:
    """Memory for all weights of a trunk, each by its name: together as much as their forms say."""
    alone = dict(trunk.forms)
    for names in trunk.model.joined:
        for run in _runs(names, trunk.forms):
            forms = [alone.pop(name) for name in run]
            yield from zip(run, _behind_one_another(forms, trunk.device), strict=True)
    yield from ((name, form.empty(trunk.device)) for name, form in alone.items())


def _runs(names: Sequence[str], forms: Mapping[str, Form]) -> Iterator[list[str]]:
    """Of these names, in order, those together that can lie behind one another."""
    run: list[str] = []
    for name in names:
        if run and not _follows([forms[one] for one in run], forms[name]):
            yield run
            run = []
        run.append(name)
    if run:
        yield run


def _follows(before: Sequence[Form], form: Form) -> bool:
    """Whether a weight can begin right behind others, which lie behind one another."""
    first, rows = before[0], sum(one.shape[0] for one in before)
    if form.packed is None or (first.packed, first.block, first.shape[1:]) != (form.packed, form.block, form.shape[1:]):
        return False
    if first.block is not None and rows % first.block[0]:
        return False
    planes = plane_shapes(form.packed, (rows, *form.shape[1:]), form.block)
    return all(math.prod(shape) * dtype.itemsize % _ALIGNED_BYTES == 0 for shape, dtype in planes)


def _behind_one_another(forms: Sequence[Form], device: torch.device) -> Iterator[Weight]:
    if len(forms) == 1:
        yield forms[0].empty(device)
        return
    first = forms[0]
    whole = Form((sum(form.shape[0] for form in forms), *first.shape[1:]), first.dtype, first.packed, first.block)
    weight, start = whole.empty(device), 0
    assert isinstance(weight, PackedWeight)
    for form in forms:
        yield cut(weight, [slice(start, start + form.shape[0])])
        start += form.shape[0]
