from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lazyio.engine.weights.load import open_source, outline
from lazyio.engine.weights.plan import Step, plan, shapes_of
from lazyio.engine.weights.source import Part, Source
from lazyio.errors import ModelError, TableError
from lazyio.ple.checkpoint import StoredTensor

Write = Callable[..., Path]
Tensors = dict[str, torch.Tensor]

GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


def planned(folder: Path) -> list[Step]:
    source = open_source(folder)
    return plan(source, outline(source))


def complaint(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        planned(folder)
    return str(caught.value)


def test_every_parameter_once_in_the_order_of_the_files(write: Write, weights: Tensors, table: Tensors) -> None:
    names = list(weights)
    folder = write({name: weights[name] for name in names[::2]}, {name: weights[name] for name in names[1::2]} | table)
    steps = planned(folder)
    assert sorted(step.parameter for step in steps) == sorted(names)
    places = [(step.part.stored.path, step.part.stored.offset) for step in steps]
    assert places == sorted(places)
    assert len({path for path, _ in places}) == 2
    assert sum(step.size_bytes for step in steps) == sum(tensor.nbytes for tensor in weights.values())


def test_tied_parameters_are_not_asked_for(write: Write, weights: Tensors) -> None:
    config = {"model_type": "small", "num_hidden_layers": 2, "tie_word_embeddings": True, "num_experts": 3}
    for stored in (weights, {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}):
        source = open_source(write(stored, config=config))
        model = outline(source)
        assert "lm_head.weight" not in shapes_of(model)
        assert {step.parameter for step in plan(source, model)} == weights.keys() - {"lm_head.weight"}


def test_what_is_wrong_is_listed_all_at_once(write: Write, weights: Tensors) -> None:
    weights["model.layers.0.norm.weight"] = torch.zeros(999)
    weights["model.layers.1.mixer.proj.weight"] = torch.zeros(16, 24)
    weights["model.layers.2.norm.weight"] = weights.pop("model.layers.1.norm.weight")
    folder = write(weights)
    assert complaint(folder) == (
        f"{folder} is not the model that its configuration describes; "
        "lacks (1): model.layers.1.norm.weight; "
        "does not fit (2): "
        "model.layers.0.norm.weight is [999] and should be [1000] for model.layers.0.norm.weight, "
        "model.layers.1.mixer.proj.weight is [16, 24] and should be [24, 16] for model.layers.1.mixer.proj.weight; "
        "is of no parameter (1): model.layers.2.norm.weight"
    )


def test_the_first_few_are_shown(write: Write, weights: Tensors) -> None:
    told = complaint(write(weights | {f"spare.{number}": torch.zeros(1) for number in range(9)}))
    assert "is of no parameter (9): spare.0, spare.1, spare.2, spare.3, ..." in told
    assert "spare.4" not in told


def test_types_that_are_no_weights(write: Write, weights: Tensors) -> None:
    weights["model.layers.0.norm.weight"] = torch.zeros(1000, dtype=torch.int32)
    assert "model.layers.0.norm.weight is of type I32, which can't be read as weights" in complaint(write(weights))


def test_an_expert_of_another_shape(write: Write, weights: Tensors) -> None:
    fused = weights.pop(GATE_UP)
    for number, expert in enumerate(fused):
        for which, half in zip(("gate", "up"), expert.chunk(2), strict=True):
            weights[f"model.layers.0.mlp.experts.{number}.{which}_proj.weight"] = half
    assert len(planned(write(weights))) == len(weights)
    name = "model.layers.0.mlp.experts.2.up_proj.weight"
    weights[name] = torch.zeros(16, 24)
    assert f"{name} is [16, 24] and should be [1, 24, 16] for {GATE_UP}" in complaint(write(weights))


def test_a_parameter_that_is_filled_in_part(write: Write, weights: Tensors) -> None:
    class Half(Source):
        path, config = "half", open_source(write(weights)).config

        def parts(self, parameter: str, shape: tuple[int, ...]) -> list[Part]:
            whole = StoredTensor(parameter, "F32", shape, "half", 0, 4)
            if parameter != GATE_UP:
                return [Part(whole)]
            return [Part(StoredTensor(parameter, "F32", (3, 24, 16), "half", 0, 4), (slice(None), slice(0, 24)))]

        def left_over(self, parameters: object) -> list[str]:
            return []

    with pytest.raises(ModelError, match=rf"{GATE_UP} has 2304 values, of which 1152 are stored"):
        plan(Half(), outline(Half()))


def test_a_folder_with_a_table_and_nothing_else(write: Write, table: Tensors) -> None:
    folder = write(table)
    told = complaint(folder)
    assert told.startswith(f"{folder} has none of the 18 parameters of the model that its configuration describes")
    assert "load_format 'dummy'" in told


def test_a_shard_that_is_cut_short(write: Write, weights: Tensors) -> None:
    folder = write(weights)
    file = folder / "part-0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(TableError, match=r"part-0\.safetensors is cut short"):
        planned(folder)
