"""Models by the name of their architecture, imported when they are asked for."""

from __future__ import annotations

from importlib import import_module

from lazyio.engine.models.base import Model
from lazyio.errors import ModelError

# By the model_type of the text part of a config.json.
_CLASSES = {
    "gemma3n_text": "gemma3n:Gemma3n",
    "gemma4_text": "gemma4:Gemma4",
    "qwen3_5_moe_text": "qwen3_5_moe:Qwen35Moe",
    "qwen3_5_text": "qwen3_5:Qwen35",
    "qwen4_exp_text": "qwen4_exp:Qwen4Exp",
}


def model_class(model_type: str) -> type[Model]:
    """The model of the `model_type` of a text configuration. Raises ModelError for one that is not known here."""
    if model_type not in _CLASSES:
        known = ", ".join(name.removesuffix("_text") for name in _CLASSES)
        raise ModelError(
            f"{model_type.removesuffix('_text')!r} is an architecture that can't be run here; these can: {known}"
        )
    module, name = _CLASSES[model_type].split(":")
    found: type[Model] = getattr(import_module(f"lazyio.engine.models.{module}"), name)
    return found


__all__ = ["Model", "model_class"]
