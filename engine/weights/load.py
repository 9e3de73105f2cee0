"""A checkpoint into a model: names, shapes and memory are checked first, then weights stream in file by file."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import nn

from lazyio.engine.models import Model, model_class
from lazyio.engine.weights.dummy import fill_dummy, first_layers
from lazyio.engine.weights.filling import fill, passing_bytes
from lazyio.engine.weights.folder import FolderSource
from lazyio.engine.weights.gguf import GgufSource
from lazyio.engine.weights.memory import check_memory
from lazyio.engine.weights.plan import Step, plan, shapes_of
from lazyio.engine.weights.reading import FileOnce, Landing, identity_of
from lazyio.engine.weights.source import Source
from lazyio.errors import ModelError, SettingError, Unsupported

#: Ways to come by weights: from the checkpoint, or random ones of the same shape.
LOAD_FORMATS = ("auto", "dummy")

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Progress = Callable[[int, int], None]


def open_source(path: str | os.PathLike[str]) -> Source:
    """The checkpoint at a path: a folder, a safetensors index or file, or a GGUF file (any part of a split one).

    Its configuration is read. Raises ModelError or TableError where that can't be used.
    """
    name = os.fspath(path)
    if not os.path.exists(name):
        raise ModelError(f"there is no {name}")
    return GgufSource(name) if name.endswith(".gguf") else FolderSource(name)


def outline(source: Source, load_format: str = "auto", layers: int | None = None) -> Model:
    """The model that `load_model` makes of a checkpoint, without weights: on the meta device.

    Raises ModelError for a configuration that can't be followed, SettingError for arguments that can't be.
    """
    if load_format not in LOAD_FORMATS:
        raise SettingError(f"load_format is {load_format!r}; it can be {' or '.join(LOAD_FORMATS)}")
    if layers is not None and load_format != "dummy":
        raise SettingError(f"layers is {layers}, and only a model with load_format 'dummy' can have fewer than it has")
    config = source.config if layers is None else first_layers(source.config, layers)
    with torch.device("meta"):
        return model_class(config["model_type"]).from_config(config)


def load_model(
    source: Source,
    *,
    device: torch.device,
    dtype: torch.dtype,
    load_format: str = "auto",
    progress: Progress | None = None,
    layers: int | None = None,
    seed: int = 0,
) -> Model:
    """The model of a checkpoint on `device`, its weights in `dtype` (float32, bfloat16 or float16), without gradients.

    The table is not loaded. `load_format` "auto" reads the weights; what was read does not stay in the page cache.
    "dummy" reads none and makes random ones: the same `seed` gives the same on every device of one type, and `layers`
    takes that many of the model's first layers alone. `progress` is called with bytes read so far and bytes to read in
    all.

    Raises ModelError or TableError where the checkpoint is damaged, changes meanwhile or does not hold the model that
    its configuration describes, NeverFits where memory is too little; both before anything is loaded, but for files
    that change. Raises SettingError for arguments that can't be, Unsupported for a device that is not there.
    """
    _check_arguments(device, dtype)
    model = outline(source, load_format, layers)
    steps = plan(source, model) if load_format == "auto" else []
    dtypes = {name: torch.float32 if name in model.float32 else dtype for name in shapes_of(model)}
    sizes = (math.prod(shape) * dtypes[name].itemsize for name, shape in shapes_of(model).items())
    passing = passing_bytes(step.part for step in steps) if steps else 0
    check_memory(sum(sizes), passing, device, dtype)
    _materialise(model, device, dtypes)
    if load_format == "auto":
        _stream(model, steps, progress)
    else:
        fill_dummy(model, seed)
    return model.eval()


def _check_arguments(device: torch.device, dtype: torch.dtype) -> None:
    if dtype not in _DTYPES:
        raise SettingError(f"dtype is {dtype}; it can be {', '.join(map(str, _DTYPES))}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise Unsupported(f"device is {device}, and torch finds {torch.cuda.device_count()} CUDA devices here; use cpu")


def _materialise(model: Model, device: torch.device, dtypes: dict[str, torch.dtype]) -> None:
    for name, shape in shapes_of(model).items():
        _put(model, name, nn.Parameter(torch.empty(shape, dtype=dtypes[name], device=device), requires_grad=False))
    for name, other in model.tied.items():
        _put(model, name, model.get_parameter(other))


def _put(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    module, _, last = name.rpartition(".")
    setattr(model.get_submodule(module), last, parameter)


def _stream(model: Model, steps: Sequence[Step], progress: Progress | None) -> None:
    """Read every step's tensor once, in order."""
    everything, done = sum(step.size_bytes for step in steps), 0
    identities = {path: identity_of(path) for path in dict.fromkeys(step.part.stored.path for step in steps)}
    with Landing(model.device) as landing:
        for path, of_file in groupby(steps, lambda step: step.part.stored.path):
            with FileOnce(path, identities[path]) as file:
                for step in of_file:
                    fill(model.get_parameter(step.parameter), step.part, file, landing)
                    done += step.size_bytes
                    if progress is not None:
                        progress(done, everything)
                file.check()
