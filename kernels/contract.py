"""What every kernel offers, so that all of them are checked in the same way.

A module with a kernel has a launcher, which checks its arguments and starts the GPU's bodies; a `reference` that does
the same in plain torch; and KERNEL, a `Kernel`, that says on what to compare the two and how near they must be.

A comparison is worth what it can see. So a kernel names faults, as changes of its arguments: what the launcher makes of
changed arguments is what a body with that fault would make of the right ones, and must differ from the reference.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from lazyio.errors import Unsupported

Arguments = TypeVar("Arguments")


@dataclass(frozen=True, slots=True)
class Case(Generic[Arguments]):
    """Arguments to compare a kernel and its reference on."""

    name: str
    make: Callable[[torch.device, int], Arguments]  # on a device, from a seed
    within: float = 0.0  # ||found - expected|| / ||expected|| of each result at most; 0 is equal bit for bit
    planted: bool = False  # every control must be seen in it
    compiled_only: bool = False  # too large for the interpreter, or of a type that it rounds in another way


@dataclass(frozen=True, slots=True)
class Kernel(Generic[Arguments]):
    """A kernel and all that is needed to check it. Neither `run` nor `reference` changes its arguments."""

    name: str
    run: Callable[[Arguments], Sequence[torch.Tensor]]
    reference: Callable[[Arguments], Sequence[torch.Tensor]]
    cases: Sequence[Case[Arguments]]
    controls: Mapping[str, Callable[[Arguments], Arguments]]
    bodies: Callable[[], Sequence[Any]]  # its functions decorated with @triton.jit that are launched


@dataclass(frozen=True, slots=True)
class Resources:
    """What one compiled body takes."""

    body: str
    registers: int  # of a thread
    spilled_bytes: int  # of a thread, in memory for want of registers
    shared_bytes: int  # of a program


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def usable(device: torch.device) -> bool:
    """Whether bodies can be launched on this device: a GPU of compute capability 8.0 or later, and Triton."""
    return device.type == "cuda" and has_triton() and torch.cuda.get_device_capability(device) >= (8, 0)


# What a driver says of a GPU takes longer to ask for than a body takes to run.
@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Bytes of shared memory that a program may have on a GPU, at most."""
    has: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    return has


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@contextmanager
def interpreted() -> Iterator[None]:
    """Triton's interpreter runs bodies on the CPU, if Triton and they are imported for the first time within."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


@functools.cache
def bodies(module: str, what: str) -> Any:
    """The module lazyio.kernels.<module>, which needs Triton; raises Unsupported, naming `what`, without it."""
    try:
        return importlib.import_module(f"lazyio.kernels.{module}")
    except ImportError as error:
        raise Unsupported(
            f"{what} needs Triton, which can't be imported ({error}): install triton, or use the CPU"
        ) from (error)


def error_of(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], within: float) -> float:
    """The largest ||found - expected|| / ||expected||; infinite for results of another shape, or that are not finite.

    Where `within` is 0 it is infinite unless all bits are equal, dtypes and signs of zeros too, but for the payload of
    NaNs.
    """
    if len(found) != len(expected) or any(a.shape != b.shape for a, b in zip(found, expected, strict=True)):
        return math.inf
    compare = _distance if within else _unless_equal
    return max(compare(a, b) for a, b in zip(found, expected, strict=True))


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    return error.item() if error.isfinite() else math.inf


def _unless_equal(found: torch.Tensor, expected: torch.Tensor) -> float:
    if found.dtype != expected.dtype:
        return math.inf
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    equal = (found.view(bits) == expected.view(bits)) | (found.isnan() & expected.isnan())
    return 0.0 if equal.all() else math.inf


def resources(kernel: Kernel[Any], device: torch.device) -> list[Resources]:
    """Of every body that was compiled for a GPU in this process so far, in all its specialisations."""
    found = []
    for body in kernel.bodies():
        compiled, *_ = body.device_caches[device.index or 0]
        found += [
            # The driver's count of spills is one of words.
            Resources(body.__name__, one.n_regs, 4 * one.n_spills, one.metadata.shared)
            for one in compiled.values()
        ]
    return found
