"""Models in safetensors files with a config.json beside them, as the parameters that transformers makes of them."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from lazyio.engine.weights.fp8 import FP8_TYPES, block_scale
from lazyio.engine.weights.quantised import check_quantisation, weight_block
from lazyio.engine.weights.source import BlockScale, Part, Source
from lazyio.errors import ModelError
from lazyio.ple.checkpoint import StoredTensor
from lazyio.ple.safetensors import SafetensorsCheckpoint, constants_of, open_safetensors
from lazyio.ple.safetensors_header import read_json
from lazyio.ple.shards import group_shards
from lazyio.ple.tables import is_ple_name

# The text model inside one that also sees and hears, as it is called today and was before.
_PREFIXES = (("model.language_model.", "model."), ("language_model.model.", "model."), ("language_model.", ""))
# Parts of a checkpoint that text does not need: prediction of further tokens, towers of other senses and what leads
# from them, and numbers that are computed here or belong to quantised activations.
_OTHER_PARTS = re.compile(
    r"(.*\.)?(mtp|visual|vision_tower|vision_model|audio_tower|embed_vision|embed_audio|multi_modal_projector)\..*"
    r"|.*\.(rotary_emb\.inv_freq|input_scale|activation_scale|k_scale|v_scale)"
)
_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<number>\d+)\.(?P<which>gate|up|down)_proj\.weight")
_SCALES = ("_scale_inv", "_scale")
_KEYS_AND_VALUES = re.compile(r"(?P<attention>.*\.self_attn)\.(k_proj|v_proj|k_norm|v_norm)\..*")


class FolderSource(Source):
    """A model in one folder: config.json, and safetensors files with or without an index.

    `path` is the folder, the index or the one file. Raises TableError for files that are damaged, ModelError where
    there is no configuration of a text model.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        if not os.path.exists(path):
            raise ModelError(f"there is no {path}; give the path of a model's folder or file")
        folder = path if os.path.isdir(path) else os.path.dirname(path)
        self._config_path = os.path.join(folder, "config.json")
        if not os.path.exists(self._config_path):
            no_gguf = "" if os.path.isdir(path) else f"{path} is no GGUF file, and "
            raise ModelError(f"{no_gguf}{folder or '.'} has no config.json, which says what model it is; copy it there")
        self._whole_config = read_json(self._config_path)
        self.config = self._text_config()

    def parts(self, parameter: str, shape: tuple[int, ...]) -> list[Part]:
        """The stored tensors of a parameter; experts may be stored together or one by one."""
        if parameter in self._names:
            return [self._part(parameter)]
        if parameter.endswith(".experts.gate_up_proj"):
            half = shape[1] // 2
            halves = {"gate": slice(0, half), "up": slice(half, 2 * half)}
        elif parameter.endswith(".experts.down_proj"):
            halves = {"down": slice(0, shape[1])}
        else:
            raise ModelError(f"{self.path} lacks {parameter}")
        experts = parameter.rpartition(".")[0]
        return [
            self._part(f"{experts}.{number}.{which}_proj.weight", (slice(number, number + 1), half))
            for number in range(shape[0])
            for which, half in halves.items()
        ]

    def left_over(self, parameters: Collection[str]) -> list[str]:
        """Names of stored tensors, as they are stored, of which no parameter is made and which are of no other part."""
        known = set(parameters)
        return [
            stored
            for name, stored in self._names.items()
            if self._parameter_of(name) not in known and not _is_of_another_part(name, known)
        ]

    def _part(self, name: str, into: tuple[slice, ...] = ()) -> Part:
        if name not in self._names:
            raise ModelError(f"{self.path} lacks {name}")
        stored = self._checkpoint.tensor(self._names[name])
        return Part(stored, into, scale=self._scale(name, stored))

    def _scale(self, name: str, weight: StoredTensor) -> BlockScale | None:
        for ending in _SCALES:
            if name + ending in self._names:
                scale = self._checkpoint.tensor(self._names[name + ending])
                return block_scale(weight, scale, weight_block(self._config_path, self._whole_config))
        if weight.dtype in FP8_TYPES:
            raise ModelError(f"{self.path} lacks {name}{_SCALES[0]}, without which its fp8 values mean nothing")
        return None

    def _parameter_of(self, name: str) -> str:
        """What a stored tensor is a part of, or a scale of a part of."""
        for ending in _SCALES:
            if name.removesuffix(ending) in self._names:
                name = name.removesuffix(ending)
        expert = _EXPERT.fullmatch(name)
        if expert is None or int(expert["number"]) >= (self.config.get("num_experts") or 0):
            return name
        return f"{expert['experts']}.{'down_proj' if expert['which'] == 'down' else 'gate_up_proj'}"

    @functools.cached_property
    def _checkpoint(self) -> SafetensorsCheckpoint:
        checkpoint = open_safetensors(self.path)
        check_quantisation(self._config_path, self._whole_config, set(checkpoint.names) - set(_of_tables(checkpoint)))
        return checkpoint

    @functools.cached_property
    def _names(self) -> dict[str, str]:
        """Names of stored tensors by what a text-only model calls them, without tables and what belongs to them."""
        of_tables = set(_of_tables(self._checkpoint))
        names: dict[str, str] = {}
        for stored in self._checkpoint.names:
            if stored in of_tables:
                continue
            name = _in_text_model(stored)
            if name in names:
                raise ModelError(f"{self.path} has {name} twice: as {names[name]} and as {stored}")
            names[name] = stored
        return names

    def _text_config(self) -> Mapping[str, Any]:
        whole = self._whole_config
        text = whole.get("text_config", whole)
        kind = text.get("model_type", whole.get("model_type")) if isinstance(text, dict) else None
        if not isinstance(kind, str):
            raise ModelError(f"{self._config_path} does not say what model it is: it has no model_type of a text model")
        config = {**text, "model_type": kind if kind.endswith("_text") else f"{kind}_text"}
        if "tie_word_embeddings" in whole:
            config.setdefault("tie_word_embeddings", whole["tie_word_embeddings"])
        return config


def _is_of_another_part(name: str, parameters: Collection[str]) -> bool:
    if _OTHER_PARTS.fullmatch(name):
        return True
    # The last layers of Gemma have queries, and attend to the keys and values of an earlier layer; some checkpoints
    # have keys and values of theirs that are never used.
    of = _KEYS_AND_VALUES.fullmatch(name)
    return (
        of is not None
        and f"{of['attention']}.q_proj.weight" in parameters
        and f"{of['attention']}.k_proj.weight" not in parameters
    )


def _in_text_model(name: str) -> str:
    for prefix, instead in _PREFIXES:
        if name.startswith(prefix):
            return instead + name.removeprefix(prefix)
    return name


def _of_tables(checkpoint: SafetensorsCheckpoint) -> Iterator[str]:
    """Names of the tensors of tables: their rows, and what else is read with them."""
    for table, parts in group_shards(checkpoint.names).items():
        if is_ple_name(table):
            yield from (*parts, *constants_of(table), table + "_scale")
            yield table.rpartition(".")[0] + ".head_bias"
