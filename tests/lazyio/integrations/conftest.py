"""Tiny models of transformers in folders, as `save_pretrained` leaves them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

COMMON = {"vocab_size": 256, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 512}
GEMMA = COMMON | {
    **{"hidden_size_per_layer_input": 16, "intermediate_size": 96, "num_hidden_layers": 6, "num_kv_shared_layers": 3},
    **{"head_dim": 16, "num_key_value_heads": 1, "sliding_window": 8, "final_logit_softcapping": 30.0},
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    **{"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 2},
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0}
MROPE = ROPE | {"partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
TEXT: dict[str, dict[str, Any]] = {
    "Gemma4": GEMMA
    | {
        **{"global_head_dim": 32, "vocab_size_per_layer_input": 256, "attention_k_eq_v": False},
        "rope_parameters": {"sliding_attention": ROPE, "full_attention": PROPORTIONAL},
    },
    "Gemma3n": GEMMA
    | {
        **{"vocab_size_per_layer_input": 256, "laurel_rank": 8, "altup_num_inputs": 4},
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
    },
    "Qwen4Exp": COMMON
    | {
        **{"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 32, "rope_parameters": MROPE},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16},
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 8},
        **{"num_experts_per_tok": 2, "hc_lowrank": 16, "ple_layer_ids": [2], "ple_embed_dim": 256},
        **{"heads_per_ngram": 4, "ngram_vocab_size_base": 500, "split_ngram_parts": 4, "indexer_n_heads": 2},
        **{"indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 4},
        **{"output_gate_type": "sigmoid", "eos_token_id": 255, "bos_token_id": 255, "pad_token_id": None},
    },
}
VISION = {
    **{"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64},
    "num_position_embeddings": 16,
}


def text_config(name: str, **changes: Any) -> Any:
    import transformers

    return getattr(transformers, f"{name}TextConfig")(**(TEXT[name] | changes))


def tiny(name: str, **changes: Any) -> Any:
    """A model of random weights. Norms and convolutions that start at zero or one are random too."""
    import transformers

    if name.endswith("ForConditionalGeneration"):
        text = text_config(name.removesuffix("ForConditionalGeneration"), **changes)
        if name.startswith("Gemma4"):
            config = transformers.Gemma4Config(text_config=text, vision_config=None, audio_config=None)
        else:
            config = transformers.Qwen4ExpConfig(text_config=text.to_dict(), vision_config=VISION)
        model = getattr(transformers, name)(config)
    else:
        model = getattr(transformers, f"{name}ForCausalLM")(text_config(name, **changes))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter + 0.1 * noise if parameter.ndim < 2 else noise * parameter.shape[-1] ** -0.5)
    return model.eval()


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`saved(name)`: the folder of a tiny model, made once; `changes` are keys of its configuration."""
    pytest.importorskip("transformers")
    made: dict[Any, Path] = {}

    def save(name: str, **changes: Any) -> Path:
        key = (name, *sorted(changes.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(name)
            tiny(name, **changes).save_pretrained(made[key])
        return made[key]

    return save
