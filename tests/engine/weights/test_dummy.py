from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lazyio.engine.models import Model
from lazyio.engine.weights.dummy import first_layers
from lazyio.engine.weights.load import load_model, open_source, outline
from lazyio.engine.weights.trunk import plan_dummy
from lazyio.errors import ModelError, SettingError

Write = Callable[..., Path]
CPU = torch.device("cpu")
CONFIG = {"num_hidden_layers": 4, "layer_types": ["a", "b", "c", "d"], "ple_layer_ids": [2], "eos": [1, 2, 3, 4]}


def dummy(
    folder: Path,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    *,
    layers: int | None = None,
    trunk: str | None = None,
    seed: int = 0,
) -> Model:
    model = outline(open_source(folder), "dummy", layers)
    return load_model(plan_dummy(model, device=device, dtype=dtype, trunk=trunk), seed=seed)


def test_values_are_where_those_of_trained_models_are(write: Write) -> None:
    layer = dict(dummy(write()).get_submodule("model.layers.1").named_parameters())
    assert abs(layer["norm.weight"].mean() - 1) < 0.02
    assert abs(layer["centred.weight"].mean()) < 0.02
    assert abs(layer["centred.weight"].std() - 0.1) < 0.02
    for name in ("mixer.proj.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
        assert abs(layer[name].std() * math.sqrt(layer[name].shape[-1]) - 1) < 0.15
        assert abs(layer[name].mean()) < 0.05
    assert 0.1 < layer["mixer.conv1d.weight"].std() < 0.3
    rates = layer["mixer.A_log"].exp()
    assert 1 <= rates.min() < 1.1 < 14 < rates.max() <= 16
    steps = torch.nn.functional.softplus(layer["mixer.dt_bias"])
    assert 0.000999 <= steps.min() < 0.0011
    assert 0.098 < steps.max() <= 0.1001


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_seed_gives_the_same_again(write: Write, dtype: torch.dtype) -> None:
    first, again, other = (dict(dummy(write(), dtype=dtype, seed=seed).state_dict()) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    assert all(tensor.isfinite().all() for tensor in first.values())
    assert not torch.equal(first["model.layers.0.norm.weight"], first["model.layers.1.norm.weight"])
    assert {tensor.dtype for name, tensor in first.items() if name != "model.layers.0.mixer.A_log"} == {dtype}
    assert first["model.layers.0.mixer.A_log"].dtype == torch.float32


def test_nothing_but_the_configuration_is_read(write: Write, table: dict[str, torch.Tensor]) -> None:
    folder = write(table)
    (folder / "part-0.safetensors").write_bytes(b"damaged")
    assert not any(parameter.is_meta for parameter in dummy(folder).parameters())


def test_quantised_weights_do_not_matter(write: Write) -> None:
    config = {"model_type": "small", "num_hidden_layers": 1, "tie_word_embeddings": True}
    model = dummy(write(config=config | {"quantization_config": {"quant_method": "exl3"}}))
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")


def test_fewer_layers_have_the_values_of_the_first(write: Write) -> None:
    whole, first = dummy(write()).state_dict(), dummy(write(), layers=1).state_dict()
    assert whole.keys() - first.keys() == {name for name in whole if ".1." in name}
    assert all(torch.equal(whole[name], first[name]) for name in first)


def test_a_configuration_with_fewer_layers() -> None:
    assert first_layers(CONFIG, 3) == CONFIG | {"num_hidden_layers": 3, "layer_types": ["a", "b", "c"]}
    assert first_layers(CONFIG, 4) == CONFIG
    assert first_layers({"num_hidden_layers": 4}, 1) == {"num_hidden_layers": 1}


@pytest.mark.parametrize("layers", [-1, 0, 1, 5])
def test_layers_that_can_not_be(layers: int) -> None:
    with pytest.raises(SettingError, match=f"layers is {layers}; this model can have 2 to 4"):
        first_layers(CONFIG, layers)


def test_rows_for_all_layers_need_all_layers() -> None:
    config = {"num_hidden_layers": 4, "hidden_size_per_layer_input": 256}
    assert first_layers(config, 4) == config
    with pytest.raises(SettingError, match="layers is 3 and must be 4: a row of this model's table"):
        first_layers(config, 3)
    with pytest.raises(ModelError, match=re.escape("must say num_hidden_layers, a number, and has '4'")):
        first_layers({"num_hidden_layers": "4"}, 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device(write: Write) -> None:
    first, again = (dummy(write(), torch.device("cuda"), torch.bfloat16).state_dict() for _ in range(2))
    assert all(tensor.is_cuda and torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert abs(first["model.layers.0.norm.weight"].float().mean() - 1) < 0.02
