"""GGUF models against the logits that transformers and llama.cpp give for the same files."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lazyio import ModelError, TableError, open_table, row_ids_of
from lazyio.engine.models import Model
from lazyio.engine.ubatch import Ubatch
from lazyio.engine.weights.gguf import GgufSource
from lazyio.engine.weights.load import load_model, outline
from lazyio.engine.weights.trunk import plan_trunk

DATA = Path(__file__).parents[2] / "data" / "gguf"
FILES = {"qwen4_exp": DATA / "qwen4_exp-Q4_0-split-00001-of-00003.gguf", "gemma4": DATA / "gemma4-Q8_0.gguf"}
EXPECTED = np.load(DATA / "expected.npz")
# llama.cpp and transformers themselves are 2.2e-4 apart for gemma4.
CLOSE = {("gemma4", "llamacpp"): 4e-4}
UNEVEN = (1, 7, 3, 1, 1)


class Given:
    """Rows that are there."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def values(self) -> torch.Tensor:
        return self._values


def load(path: Path) -> Model:
    source = GgufSource(str(path))
    return load_model(plan_trunk(source, outline(source), device=torch.device("cpu"), dtype=torch.float32))


def logits_of(
    model: Model, path: Path, ids: np.ndarray[Any, Any], cuts: Sequence[int], scale: float = 1
) -> torch.Tensor:
    state, found, before = model.new_state(len(ids)), [], None
    with open_table(path, mode="on") as table:
        row_ids = row_ids_of(table.spec)
        for tokens in np.split(ids, np.cumsum(cuts)[:-1]):
            rows = row_ids(tokens, before)
            before = row_ids.tail(tokens, before)
            values = torch.from_numpy(table.decode(table.gather(rows))).reshape(len(tokens), -1)
            ubatch = Ubatch.of([(state, tokens.tolist())], torch.device("cpu"))
            found.append(model.logits(model.step(ubatch, Given(values * scale))))
    return torch.cat(found)


def cuts_of(ids: np.ndarray[Any, Any], how: str) -> list[int]:
    if how == "whole":
        return [len(ids)]
    if how == "at EOS":
        ends = [*np.flatnonzero(ids == 256), *(np.flatnonzero(ids == 256) + 1), 0, len(ids)]
        return [int(count) for count in np.diff(np.unique(ends))]
    return [*UNEVEN, len(ids) - sum(UNEVEN)]


def assert_close(found: torch.Tensor, expected: np.ndarray[Any, Any], part: float = 1e-4) -> None:
    wanted = torch.from_numpy(expected)
    bound = part * max(1.0, float(wanted.abs().max()))
    assert float((found - wanted).abs().max()) <= bound
    best = wanted.topk(2).values
    clear = best[:, 0] - best[:, 1] > 2 * bound
    assert torch.equal(found.argmax(1)[clear], wanted.argmax(1)[clear])


@pytest.fixture(scope="module", params=FILES)
def loaded(request: pytest.FixtureRequest) -> tuple[str, Model]:
    return request.param, load(FILES[request.param])


@pytest.mark.parametrize("how", ["whole", "uneven", "at EOS"])
@pytest.mark.parametrize("case", ["short", "long"])
def test_logits(loaded: tuple[str, Model], case: str, how: str) -> None:
    name, model = loaded
    ids = EXPECTED[f"{name}_{case}_ids"]
    found = logits_of(model, FILES[name], ids, cuts_of(ids, how))
    for by in ("hf", "llamacpp"):
        assert_close(found, EXPECTED[f"{name}_{case}_{by}"], CLOSE.get((name, by), 1e-4))


def test_a_table_of_zeros_shows(loaded: tuple[str, Model]) -> None:
    name, model = loaded
    ids = EXPECTED[f"{name}_short_ids"]
    with pytest.raises(AssertionError):
        assert_close(logits_of(model, FILES[name], ids, [len(ids)], scale=0), EXPECTED[f"{name}_short_hf"])


def test_greedy_tokens(loaded: tuple[str, Model]) -> None:
    name, model = loaded
    ids, wanted = EXPECTED[f"{name}_short_ids"], EXPECTED[f"{name}_short_greedy"]
    whole = np.concatenate([ids, wanted])
    found = logits_of(model, FILES[name], whole, [len(ids), *[1] * len(wanted)])
    assert found[len(ids) - 1 : -1].argmax(1).tolist() == wanted.tolist()


def test_any_part_stands_for_all() -> None:
    third = Path(str(FILES["qwen4_exp"]).replace("00001-of", "00003-of"))
    assert GgufSource(str(third)).config == GgufSource(str(FILES["qwen4_exp"])).config


def test_a_part_that_is_missing(tmp_path: Path) -> None:
    shutil.copy(FILES["qwen4_exp"], tmp_path)
    with pytest.raises(TableError, match="00002-of-00003"):
        GgufSource(str(tmp_path / FILES["qwen4_exp"].name))


def test_every_tensor_has_its_parameter(loaded: tuple[str, Model]) -> None:
    name, model = loaded
    source = GgufSource(str(FILES[name]))
    parameters = [parameter for parameter, _ in model.named_parameters()]
    assert source.left_over(parameters) == []
    lost = parameters.pop()
    stored = [part.stored.name for part in source.parts(lost, tuple(model.get_parameter(lost).shape))]
    assert source.left_over(parameters) == stored


def test_a_parameter_that_is_not_there() -> None:
    source = GgufSource(str(FILES["gemma4"]))
    with pytest.raises(ModelError, match=r"lacks blk\.8\.attn_q\.weight for the parameter model\.layers\.8"):
        source.parts("model.layers.8.self_attn.q_proj.weight", (1, 1))
    with pytest.raises(ModelError, match="lacks any tensor for the parameter model"):
        source.parts("model.layers.0.other", (1,))


def test_another_architecture(tmp_path: Path) -> None:
    import gguf

    path = tmp_path / "llama.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"'llama'.*qwen4exp"):
        GgufSource(str(path))
