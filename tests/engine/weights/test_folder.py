from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lazyio.engine.weights.folder import FolderSource
from lazyio.errors import ModelError, TableError

Write = Callable[..., Path]
Tensors = dict[str, torch.Tensor]

EXPERTS = "model.layers.0.mlp.experts"
ONE = {"model.embed_tokens.weight": torch.zeros(40, 16)}


def source_of(folder: Path) -> FolderSource:
    return FolderSource(str(folder))


def names_of(source: FolderSource, parameter: str, *shape: int) -> list[str]:
    return [part.stored.name for part in source.parts(parameter, shape)]


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"model_type": "small"}, "small_text"),
        ({"model_type": "small_text"}, "small_text"),
        ({"model_type": "small", "text_config": {"model_type": "small_text"}}, "small_text"),
        ({"model_type": "small", "text_config": {}}, "small_text"),
    ],
)
def test_the_model_type_is_that_of_the_text_part(write: Write, config: Any, kind: str) -> None:
    assert source_of(write(config=config)).config["model_type"] == kind


def test_text_part_and_what_is_said_beside_it(write: Write) -> None:
    text = {"model_type": "small_text", "hidden_size": 7}
    config = {"model_type": "small", "hidden_size": 8, "tie_word_embeddings": True, "text_config": text}
    assert source_of(write(config=config)).config == text | {"tie_word_embeddings": True}
    text["tie_word_embeddings"] = False
    assert source_of(write(config=config)).config == text


@pytest.mark.parametrize(
    "config", [{}, {"model_type": 3}, {"text_config": []}, {"model_type": "a", "text_config": None}]
)
def test_a_configuration_of_no_text_model(write: Write, config: Any) -> None:
    with pytest.raises(ModelError, match=r"config\.json does not say what model it is"):
        source_of(write(config=config))


def test_folders_without_a_readable_configuration(tmp_path: Path, write: Write) -> None:
    with pytest.raises(ModelError, match=r"^there is no .*/elsewhere; give the path"):
        source_of(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match=rf"^{tmp_path} has no config\.json"):
        source_of(tmp_path)
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelError, match=r"/model\.bin is no GGUF file, and .* has no config\.json"):
        source_of(tmp_path / "model.bin")
    folder = write(config=[])
    with pytest.raises(TableError, match=r"config\.json is damaged"):
        source_of(folder)


def test_an_index_or_a_file_stands_for_its_folder(write: Write) -> None:
    folder = write(ONE)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(ONE, "part-0.safetensors")}))
    for path in (folder, index, folder / "part-0.safetensors"):
        source = source_of(path)
        assert source.config["model_type"] == "small_text"
        assert names_of(source, "model.embed_tokens.weight", 40, 16) == ["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("stored", "parameter"),
    [
        ("model.language_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("language_model.model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_names_of_the_text_model_inside_another(write: Write, stored: str, parameter: str) -> None:
    source = source_of(write({stored: torch.zeros(4, 2)}))
    assert names_of(source, parameter, 4, 2) == [stored]
    assert source.left_over([parameter]) == []
    assert source.left_over([]) == [stored]


def test_one_parameter_under_two_names(write: Write) -> None:
    tensor = torch.zeros(1)
    source = source_of(write({"model.norm.weight": tensor, "model.language_model.norm.weight": tensor}))
    with pytest.raises(ModelError, match=r"has model\.norm\.weight twice: as .* and as "):
        source.parts("model.norm.weight", (1,))


def test_other_parts_and_the_table_are_not_left_over(write: Write, table: Tensors) -> None:
    others = [
        "mtp.layers.0.weight",
        "model.visual.blocks.0.weight",
        "model.vision_tower.patch.weight",
        "audio_tower.conv.weight",
        "model.embed_vision.embedding.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.mlp.proj.input_scale",
    ]
    tables = [*table, "model.embed_tokens_per_layer.weight", "model.embed_tokens_per_layer.weight_scale"]
    source = source_of(write({name: torch.zeros(2, 2) for name in [*others, *tables, "model.visuals.weight"]}))
    assert source.left_over([]) == ["model.visuals.weight"]


def test_a_table_is_never_a_parameter(write: Write, table: Tensors) -> None:
    source = source_of(write(table))
    for name in table:
        with pytest.raises(ModelError, match="lacks"):
            source.parts(name, (3, 4))


def test_keys_of_layers_that_share_those_of_another(write: Write) -> None:
    names = [
        f"model.layers.{layer}.self_attn.{what}.weight"
        for layer in (2, 3)
        for what in ("k_norm", "k_proj", "q_proj", "v_proj")
    ]
    source = source_of(write({name: torch.zeros(1) for name in names}))
    assert source.left_over(names) == source.left_over([name for name in names if "q_proj" in name]) == []
    assert source.left_over([]) == names
    assert source.left_over([name for name in names if "2.self_attn.q_proj" in name or ".k_proj" in name]) == [
        "model.layers.2.self_attn.k_norm.weight",
        "model.layers.2.self_attn.v_proj.weight",
        "model.layers.3.self_attn.k_norm.weight",
        "model.layers.3.self_attn.q_proj.weight",
        "model.layers.3.self_attn.v_proj.weight",
    ]


def test_experts_together_and_one_by_one(write: Write) -> None:
    fused = {f"{EXPERTS}.gate_up_proj": torch.zeros(3, 8, 4), f"{EXPERTS}.down_proj": torch.zeros(3, 4, 4)}
    source = source_of(write(fused))
    assert names_of(source, f"{EXPERTS}.gate_up_proj", 3, 8, 4) == [f"{EXPERTS}.gate_up_proj"]
    assert source.left_over(fused) == []

    single = {
        f"{EXPERTS}.{number}.{which}_proj.weight": torch.zeros(4, 4)
        for number in range(3)
        for which in ("gate", "up", "down")
    }
    source = source_of(write(single))
    parts = source.parts(f"{EXPERTS}.gate_up_proj", (3, 8, 4))
    assert [(part.stored.name, part.into) for part in parts[2:4]] == [
        (f"{EXPERTS}.1.gate_proj.weight", (slice(1, 2), slice(0, 4))),
        (f"{EXPERTS}.1.up_proj.weight", (slice(1, 2), slice(4, 8))),
    ]
    assert names_of(source, f"{EXPERTS}.down_proj", 3, 4, 4) == [
        f"{EXPERTS}.{number}.down_proj.weight" for number in range(3)
    ]
    assert source.left_over(fused) == []


def test_an_expert_too_many_or_too_few(write: Write) -> None:
    single = {f"{EXPERTS}.{number}.down_proj.weight": torch.zeros(4, 4) for number in (0, 2, 3)}
    source = source_of(write(single))
    assert source.left_over([f"{EXPERTS}.down_proj"]) == [f"{EXPERTS}.3.down_proj.weight"]
    with pytest.raises(ModelError, match=r"lacks model\.layers\.0\.mlp\.experts\.1\.down_proj\.weight"):
        source.parts(f"{EXPERTS}.down_proj", (3, 4, 4))


def test_scales_belong_to_what_they_scale(write: Write) -> None:
    weight, scale = torch.zeros(4, 4).to(torch.float8_e4m3fn), torch.ones(1)
    tensors = {"a.weight": weight, "a.weight_scale": scale, "b.weight": weight, "a.correct_output_scale": scale}
    source = source_of(write(tensors))
    (part,) = source.parts("a.weight", (4, 4))
    assert part.scale is not None
    assert (part.scale.stored.name, part.scale.block) == ("a.weight_scale", (128, 128))
    assert sorted(source.left_over(["a.weight"])) == ["a.correct_output_scale", "b.weight"]
    assert source.left_over(["a.weight", "a.correct_output_scale"]) == ["b.weight"]
    with pytest.raises(ModelError, match=r"lacks b\.weight_scale_inv, without which its fp8 values mean nothing"):
        source.parts("b.weight", (4, 4))


def test_quantised_weights_are_refused_and_a_quantised_table_is_not(write: Write) -> None:
    rows = {"model.layers.1.ple.ple_embedding.ngram_embedding.shard_0.trellis": torch.zeros(2, 41, dtype=torch.int16)}
    source = source_of(write(ONE | rows))
    assert names_of(source, "model.embed_tokens.weight", 40, 16) == list(ONE)
    assert source.left_over(ONE) == []
    source = source_of(write(ONE | rows | {"model.layers.0.mlp.up_proj.trellis": torch.zeros(2, 2)}))
    with pytest.raises(ModelError, match="quantised with EXL3"):
        source.parts("model.embed_tokens.weight", (40, 16))


def test_opening_reads_the_configuration_alone(write: Write) -> None:
    folder = write()
    (folder / "part.safetensors").write_bytes(b"damaged")
    source = source_of(folder)
    with pytest.raises(TableError, match=r"part\.safetensors"):
        source.parts("model.embed_tokens.weight", (40, 16))
