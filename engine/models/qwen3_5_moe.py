"""Qwen 3.5 with a mixture of experts in each layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from lazyio.engine.models.qwen import Qwen, configuration, experts
from lazyio.engine.models.qwen3_5 import Text

# What a configuration means by a key that it leaves out. Source: `Qwen3_5MoeTextConfig` of transformers.
_DEFAULTS = {
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}


class Qwen35Moe(Qwen):
    """The one with experts. Source: `Qwen3_5MoeForCausalLM` of transformers."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """See `Model`."""
        read = configuration(config, _DEFAULTS)
        read.expect(norm_topk_prob=True)
        return cls(read, Text(read, lambda: experts(read)))
