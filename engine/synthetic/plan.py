"""What a model to make consists of, whatever the format of its files."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from lazyio.engine.models import Model, model_class
from lazyio.engine.synthetic.configs import Config, Table, config_of
from lazyio.engine.synthetic.tokenizer import END, token_id, train_tokenizer
from lazyio.engine.weights.dummy import draw
from lazyio.engine.weights.plan import shapes_of

# Values made at a time: what is written never waits for a whole tensor, nor needs the memory for one.
_VALUES_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class Plan:
    """A model to make: its configuration, its tokenizer, its table if it has one, and its parameters."""

    architecture: str
    config: Config
    tokenizer: Tokenizer
    table: Table | None
    seed: int
    model: Model  # on the meta device: names and shapes

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all parameters that a checkpoint has."""
        return shapes_of(self.model)

    def values(self, parameter: str) -> Iterator[torch.Tensor]:
        """The values of a parameter, float32, a part of its first dimension at a time.

        They depend on the seed, the name and the shape alone.
        """
        module_name, _, name = parameter.rpartition(".")
        module, shape = self.model.get_submodule(module_name), self.shapes[parameter]
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {parameter}".encode()))
        step = max(1, _VALUES_AT_ONCE // math.prod(shape[1:]))
        for start in range(0, shape[0], step):
            part = torch.empty(min(step, shape[0] - start), *shape[1:])
            draw(module, name, part, generator)
            yield part


def plan_model(
    architecture: str, size: str = "tiny", *, layers: int | None = None, rows: int | None = None, seed: int = 0
) -> Plan:
    """A model of an architecture, as `configs.config_of` has it. Raises what that raises."""
    tokenizer = train_tokenizer()
    end, vocab = token_id(tokenizer, END), tokenizer.get_vocab_size()
    config, table = config_of(architecture, size, end, vocab, layers, rows)
    with torch.device("meta"):
        model = model_class(config["model_type"]).from_config(config)
    return Plan(architecture, config, tokenizer, table, seed, model)
