from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from lazyio.engine.layers.linear import Embedding, Linear
from lazyio.engine.layers.norm import RmsNorm
from lazyio.engine.models import Model
from lazyio.engine.weights import load

VOCAB, HIDDEN, WIDE, EXPERTS = 40, 16, 24, 3
TABLE = "model.layers.1.ple.ple_embedding.ngram_embedding"


class Experts(nn.Module):
    packs = ("gate_up_proj", "down_proj")

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(EXPERTS, 2 * WIDE, HIDDEN))
        self.down_proj = nn.Parameter(torch.empty(EXPERTS, HIDDEN, WIDE))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(2000))
        self.dt_bias = nn.Parameter(torch.empty(2000))
        self.conv1d = nn.Conv1d(WIDE, WIDE, 4, groups=WIDE, bias=False)
        self.proj = Linear(HIDDEN, WIDE)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centred = RmsNorm(1000, 1e-6, offset=1.0)
        self.norm = RmsNorm(1000, 1e-6)
        self.mixer = Mixer()
        self.mlp = nn.ModuleDict({"experts": Experts()})


class Small(Model):
    """One of each kind of parameter, and no computation."""

    table = f"{TABLE}.weight"
    vocab, max_tokens, row_values = VOCAB, 64, 8
    float32 = frozenset({"model.layers.0.mixer.A_log"})
    built_from: ClassVar[list[Mapping[str, Any]]] = []

    def __init__(self, layers: int, tied: bool) -> None:
        super().__init__()
        self.model = nn.ModuleDict(
            {"embed_tokens": Embedding(VOCAB, HIDDEN), "layers": nn.ModuleList(Layer() for _ in range(layers))}
        )
        self.lm_head = Linear(HIDDEN, VOCAB)
        self.tied = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Model:
        return cls(config["num_hidden_layers"], config["tie_word_embeddings"])

    def forward(self, ubatch: Any, rows: Any) -> torch.Tensor:
        raise NotImplementedError

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


CONFIG = {"model_type": "small", "num_hidden_layers": 2, "num_experts": EXPERTS, "tie_word_embeddings": False}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model_type "small" is known."""
    known = load.model_class
    monkeypatch.setattr(load, "model_class", lambda kind: Small if kind == "small_text" else known(kind))


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    """Values of all parameters of the small model."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.randn(value.shape, generator=generator) for name, value in Small(2, tied=False).state_dict().items()
    }


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """`write(tensors, ..., config=CONFIG)`: a folder with a config.json, and a file for each set of tensors."""
    from safetensors.torch import save_file

    def write(*files: Mapping[str, torch.Tensor], config: object = CONFIG) -> Path:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        for number, tensors in enumerate(files):
            save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / f"part-{number}.safetensors")
        return folder

    return write


@pytest.fixture
def table() -> dict[str, torch.Tensor]:
    """A table in two shards, and the constants beside it."""
    return {
        f"{TABLE}.shard_0.weight": torch.full((3, 4), float("nan")),
        f"{TABLE}.shard_1.weight": torch.full((3, 4), float("nan")),
        **{
            f"{TABLE.removesuffix('ngram_embedding')}{name}": torch.arange(2)
            for name in ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
        },
    }
