"""Random weights of true shape, for trying out and measuring a model whose weights are not at hand.

They are not those of any trained model, but activations stay in the range where such a model has them: matrices keep
the size of what they multiply, norms scale by about 1, recurrent states decay at usual rates.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lazyio.engine.weights.trunk import Trunk
from lazyio.errors import ModelError, SettingError
from lazyio.kernels.packed import PackedWeight, fill_random

_NORM_SPREAD = 0.1
_CONV_STD = 0.2
# Decay rates and step sizes that linear attention is usually begun with, drawn evenly by their logarithm.
_RATES = (1.0, 16.0)
_STEPS = (1e-3, 1e-1)


def fill_dummy(trunk: Trunk, seed: int) -> None:
    """Give the weights of a model, which are in the forms of `trunk`, random values, made on its device.

    Those of a parameter depend on the seed, its name, shape and form, and the type of the device.
    """
    generator = torch.Generator(trunk.device)
    for name, form in trunk.forms.items():
        generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        weight = trunk.model.weight(name)
        if isinstance(weight, PackedWeight):
            fill_random(weight, generator, matrix_std(form.shape))
            continue
        module, _, last = name.rpartition(".")
        with torch.no_grad():
            draw(trunk.model.get_submodule(module), last, weight, generator)


def draw(module: nn.Module, name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    """Random values for the parameter of that name of a module, or for a part of its first dimension."""
    if name == "A_log":
        _log_uniform(parameter, *_RATES, generator)
    elif name == "dt_bias":
        # softplus of it is the size of a step.
        _log_uniform(parameter, *_STEPS, generator)
        parameter.copy_(parameter.float().exp().expm1().log())
    elif parameter.ndim == 1:
        neutral = 1.0 - getattr(module, "offset", 0.0)
        parameter.normal_(neutral, _NORM_SPREAD, generator=generator)
    elif parameter.ndim == 3 and parameter.shape[1] == 1:
        parameter.normal_(0.0, _CONV_STD, generator=generator)
    else:
        parameter.normal_(0.0, matrix_std(parameter.shape), generator=generator)


def matrix_std(shape: Sequence[int]) -> float:
    """The standard deviation of values with which a matrix keeps the size of what it multiplies."""
    return 1 / math.sqrt(shape[-1])


def _log_uniform(parameter: torch.Tensor, least: float, most: float, generator: torch.Generator) -> None:
    """Logarithms of what is spread between the two, evenly."""
    parameter.uniform_(math.log(least), math.log(most), generator=generator)


def first_layers(config: Mapping[str, Any], layers: int) -> Mapping[str, Any]:
    """The configuration of a model with only the first layers of another.

    Raises SettingError for more layers than there are, for so few that the table would feed none of them, and for
    models whose rows have values for every layer.
    """
    has = config.get("num_hidden_layers")
    if not isinstance(has, int):
        raise ModelError(f"the configuration must say num_hidden_layers, a number, and has {has!r}")
    least = max(config.get("ple_layer_ids") or [1])
    if not least <= layers <= has:
        raise SettingError(f"layers is {layers}; this model can have {least} to {has}")
    if config.get("hidden_size_per_layer_input") and layers < has:
        raise SettingError(
            f"layers is {layers} and must be {has}: a row of this model's table has values for each of its {has} layers"
        )
    cut = {key: value[:layers] for key, value in config.items() if isinstance(value, list) and key == "layer_types"}
    return {**config, **cut, "num_hidden_layers": layers}
