"""A checkpoint into a model: names, shapes and memory are checked first, then weights stream in file by file."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import groupby

import torch

from lazyio.engine.models import Model, model_class
from lazyio.engine.weights.dummy import fill_dummy, first_layers
from lazyio.engine.weights.filling import fill, fill_packed, passing_bytes
from lazyio.engine.weights.finite import check_loaded
from lazyio.engine.weights.folder import FolderSource
from lazyio.engine.weights.gguf import GgufSource
from lazyio.engine.weights.joining import memory
from lazyio.engine.weights.memory import check_memory
from lazyio.engine.weights.plan import Step
from lazyio.engine.weights.reading import FileOnce, Landing, identity_of
from lazyio.engine.weights.source import Source
from lazyio.engine.weights.trunk import Trunk, check_device
from lazyio.errors import ModelError, SettingError
from lazyio.kernels.packed import PackedWeight
from lazyio.ple.gguf import is_gguf

#: Ways to come by weights: from the checkpoint, or random ones of the same shape.
LOAD_FORMATS = ("auto", "dummy")

Progress = Callable[[int, int], None]


def open_source(path: str | os.PathLike[str]) -> Source:
    """The checkpoint at a path: a folder, a safetensors index or file, or a GGUF file (any part of a split one).

    Its configuration is read. Raises ModelError or TableError where that can't be used.
    """
    name = os.fspath(path)
    if not os.path.exists(name):
        raise ModelError(f"there is no {name}")
    return GgufSource(name) if is_gguf(name) else FolderSource(name)


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


def load_model(trunk: Trunk, *, progress: Progress | None = None, seed: int = 0) -> Model:
    """The model of a trunk on its device, without gradients.

    Weights that are read do not stay in the page cache; the table is not loaded. Random ones are the same for a `seed`
    on every device of one type. `progress` is called with bytes read so far and bytes to read in all.

    Raises what `check_room` raises, before anything is loaded; ModelError where files are damaged or change meanwhile,
    or where a value, or the scale of a quantised one, is no finite number.
    """
    check_room(trunk)
    for name, weight in memory(trunk):
        trunk.put(name, weight)
    if trunk.steps is None:
        fill_dummy(trunk, seed)
    else:
        _stream(trunk, trunk.steps, progress)
        check_loaded(trunk)
    for name, other in trunk.model.tied.items():
        trunk.put(name, trunk.model.weight(other))
    return trunk.model.eval()


def check_room(trunk: Trunk) -> None:
    """Raise Unsupported for a device that is not there, NeverFits where memory is too little to load a trunk."""
    check_device(trunk.device)
    check_memory(trunk, passing_bytes(step.part for step in trunk.steps) if trunk.steps else 0)


def _stream(trunk: Trunk, steps: Sequence[Step], progress: Progress | None) -> None:
    """Read every step's tensor once, in order."""
    everything, done = sum(step.size_bytes for step in steps), 0
    identities = {path: identity_of(path) for path in dict.fromkeys(step.part.stored.path for step in steps)}
    with Landing(trunk.device) as landing:
        for path, of_file in groupby(steps, lambda step: step.part.stored.path):
            with FileOnce(path, identities[path]) as file:
                for step in of_file:
                    weight = trunk.model.weight(step.parameter)
                    if isinstance(weight, PackedWeight):
                        fill_packed(weight, step.part, file, landing)
                    else:
                        fill(weight, step.part, file, landing)
                    done += step.size_bytes
                    if progress is not None:
                        progress(done, everything)
                file.check()
