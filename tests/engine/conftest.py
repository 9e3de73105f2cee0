"""Tiny random models of transformers with ours beside them, and what it means that they agree."""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from lazyio.engine.models import Model, model_class
from lazyio.engine.state import State
from lazyio.engine.ubatch import Ubatch
from lazyio.ple.rowids import IdentityRowIds, NgramRowIds, RowIds
from lazyio.ple.spec import NgramHash

ROPE = {
    "rope_type": "default",
    "rope_theta": 10_000_000.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
COMMON = {"vocab_size": 256, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 512}
QWEN = COMMON | {
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "rope_parameters": ROPE,
    "eos_token_id": 255,
    "pad_token_id": None,
}
EXPERTS = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
GEMMA = COMMON | {
    "hidden_size_per_layer_input": 16,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "head_dim": 16,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 3,
    "final_logit_softcapping": 30.0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 2,
}
# By name: the class of the configuration and of the model in transformers, and the configuration.
TINY: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", QWEN | {"intermediate_size": 96}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", QWEN | EXPERTS),
    "qwen4_exp": (
        "Qwen4ExpTextConfig",
        "Qwen4ExpForCausalLM",
        QWEN
        | EXPERTS
        | {
            "hc_lowrank": 16,
            "ple_layer_ids": [2],
            "ple_embed_dim": 64,
            "heads_per_ngram": 4,  # 8 heads of 8 values
            "ngram_vocab_size_base": 1000,
            "split_ngram_parts": 4,
            "indexer_n_heads": 4,  # with fewer, scores of 0 are so common that they decide what is selected
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 8,  # so little that it does select
            "indexer_compress_ratio": 4,
            "output_gate_type": "sigmoid",
            "bos_token_id": 255,
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        GEMMA
        | {
            "num_key_value_heads": 1,
            "global_head_dim": 32,
            "use_double_wide_mlp": True,
            "vocab_size_per_layer_input": 256,
            "attention_k_eq_v": False,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1_000_000.0,
                },
            },
        },
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        GEMMA
        | {
            "num_key_value_heads": 2,
            "vocab_size_per_layer_input": 240,
            "laurel_rank": 8,
            "altup_num_inputs": 4,
            "altup_active_idx": 0,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
        },
    ),
}


class Tiny(NamedTuple):
    """A model of transformers, ours with the same weights, and the table that ours is fed from."""

    reference: Any
    model: Model
    table: torch.Tensor | None

    @property
    def config(self) -> dict[str, Any]:
        """As it would stand in config.json, where values that are the defaults of the class are left out."""
        return config_of(self.reference)

    def tokens(self, length: int, seed: int = 3) -> list[int]:
        """Token ids with an EOS, and two in a row."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(3, 200, (length,), generator=generator).tolist()
        for place in (5, 6, 17):
            if place < length:
                tokens[place] = self.reference.config.eos_token_id
        return tokens

    def expected(self, tokens: Sequence[int]) -> torch.Tensor:
        """The logits of transformers, [tokens, vocab], computed all at once."""
        with torch.no_grad():
            return self.reference(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]

    def logits(self, tokens: Sequence[int], cuts: Sequence[int] = ()) -> torch.Tensor:
        """Ours, [tokens, vocab], of chunks of the sizes `cuts` and one of what is left."""
        return self.logits_of([tokens], [cuts])[0]

    def logits_of(self, sequences: Sequence[Sequence[int]], cuts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Ours, of several sequences, whose chunks share ubatches: the first of each, the second of each and so on."""
        states = [self.model.new_state(len(tokens)) for tokens in sequences]
        waiting = [_cut(tokens, sizes) for tokens, sizes in zip(sequences, cuts, strict=True)]
        before: list[Any] = [None] * len(sequences)
        found: list[list[torch.Tensor]] = [[] for _ in sequences]
        while any(waiting):
            chunks = [(i, chunks.pop(0)) for i, chunks in enumerate(waiting) if chunks]
            logits = self._step([(states[i], tokens) for i, tokens in chunks], [before[i] for i, _ in chunks])
            for (i, tokens), part in zip(chunks, logits, strict=True):
                found[i].append(part)
                before[i] = None if self.table is None else self.row_ids.tail(tokens, before[i])
        return [torch.cat(parts) for parts in found]

    def _step(self, chunks: list[tuple[State, list[int]]], before: list[Any]) -> tuple[torch.Tensor, ...]:
        rows = None
        if self.table is not None:
            ids = [torch.from_numpy(self.row_ids(tokens, b)) for (_, tokens), b in zip(chunks, before, strict=True)]
            rows = Ready(self.table[torch.cat(ids)].flatten(1))
        with torch.inference_mode():
            hidden = self.model.step(Ubatch.of(chunks, self.model.device), rows)
            return self.model.logits(hidden).split([len(tokens) for _, tokens in chunks])

    @property
    def row_ids(self) -> RowIds:
        """Which rows of the table a token needs."""
        assert self.table is not None
        if self.reference.config.model_type != "qwen4_exp_text":
            return IdentityRowIds(len(self.table))
        constants = next(m for m in self.reference.modules() if hasattr(m, "layer_multipliers"))
        return NgramRowIds(
            NgramHash(
                tuple(constants.layer_multipliers.tolist()),
                tuple(constants.head_vocab_sizes),
                tuple(constants.head_offsets),
                constants.heads_per_ngram,
                self.reference.config.eos_token_id,
            )
        )


class Ready(NamedTuple):
    """Rows that are there."""

    rows: torch.Tensor

    def values(self) -> torch.Tensor:
        return self.rows


def config_of(reference: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(reference.config.to_json_string())
    return found


def make_tiny(name: str, **changes: Any) -> Tiny:
    """Both models; weights that transformers starts at zero or one are random, or a test would be blind to them.

    `changes` are keys of the configuration that have another value.
    """
    import transformers

    config_class, class_name, settings = TINY[name]
    config = getattr(transformers, config_class)(**(settings | changes))
    torch.manual_seed(0)
    reference = getattr(transformers, class_name)(config).eval().requires_grad_(False)
    _randomise(reference)
    weights = reference.state_dict()
    config = config_of(reference)
    with torch.device("meta"):
        model = model_class(config["model_type"]).from_config(config)
    table = None if model.table is None else weights[model.table]
    ours = {key: weights[key].clone() for key in model.state_dict()}
    model.load_state_dict(ours, assign=True)
    return Tiny(reference, model.requires_grad_(False), table)


def assert_agree(ours: torch.Tensor, expected: torch.Tensor, within: float = 1e-4) -> None:
    """Logits [tokens, vocab] differ by at most `within` of the largest, and have the same token on top.

    That only where the two best of `expected` are farther apart than twice the difference allowed.
    """
    allowed = within * max(1.0, expected.abs().max().item())
    assert ours.shape == expected.shape
    assert (ours - expected).abs().max().item() <= allowed
    best = expected.topk(2).values
    clear = best[:, 0] - best[:, 1] > 2 * allowed
    assert clear.any()
    assert torch.equal(ours.argmax(-1)[clear], expected.argmax(-1)[clear])


def check(tiny: Tiny) -> None:
    """Ours against transformers, whole, in uneven chunks with an EOS inside and at a cut, and two sequences at once."""
    tokens, other = tiny.tokens(29), tiny.tokens(23, seed=4)
    expected, expected_other = tiny.expected(tokens), tiny.expected(other)
    assert_agree(tiny.logits(tokens), expected)
    assert_agree(tiny.logits(tokens, [1, 7, 3, 9, *[1] * 8]), expected)
    assert_agree(tiny.logits(tokens, [6, 12]), expected)
    both = tiny.logits_of([tokens, other], [[1, 7, 3, 9, 1], [9, 1, 1, 5]])
    assert_agree(both[0], expected)
    assert_agree(both[1], expected_other)


def _cut(tokens: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """`tokens` in chunks of these sizes, and what is left as the last one."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    chunks = [list(tokens[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
    return [chunk for chunk in [*chunks, list(tokens[sum(sizes) :])] if chunk]


def _randomise(model: nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not tensor.is_floating_point() or name not in model.state_dict():
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim < 2:
            tensor.add_(0.1 * noise)
        else:
            tensor.copy_(noise * (0.3 if "conv1d" in name else tensor.shape[-1] ** -0.5))


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Tiny]:
    """`tiny(name)`: a fresh pair of models, by the name of the architecture; `make_tiny` says what else."""
    return make_tiny


@pytest.fixture(scope="session")
def saved(tiny: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """`saved(name)`: a tiny pair of models, and the folder in which transformers saved its own."""
    known: dict[str, tuple[Any, Path]] = {}

    def save(name: str) -> tuple[Any, Path]:
        if name not in known:
            pair, folder = tiny(name), tmp_path_factory.mktemp(name)
            pair.reference.generation_config.eos_token_id = None
            pair.reference.save_pretrained(folder, max_shard_size="400KB")
            known[name] = pair, folder
        return known[name]

    return save


@pytest.fixture(scope="session")
def check_logits() -> Callable[[Tiny], None]:
    """`check_logits(tiny(name))` fails where our logits are not those of transformers."""
    return check


@pytest.fixture(scope="session")
def agree() -> Callable[..., None]:
    """`agree(ours, expected, within=1e-4)` fails where logits are not the same by the rule for float32."""
    return assert_agree


@contextmanager
def _never_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this mode may miss some
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(scope="session")
def never_waiting() -> Callable[[], AbstractContextManager[None]]:
    """`with never_waiting():` fails where the host waits for a CUDA device."""
    return _never_waiting
