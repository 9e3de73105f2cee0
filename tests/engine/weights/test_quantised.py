from __future__ import annotations

from typing import Any

import pytest

from lazyio.engine.weights.quantised import check_quantisation, weight_block
from lazyio.errors import ModelError

PATH = "config.json"


def said(**values: Any) -> dict[str, Any]:
    return {"quantization_config": values}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"quantization_config": None},
        said(quant_method="fp8", weight_block_size=[128, 128]),
        said(quant_method="fbgemm_fp8"),
        said(quant_method="modelopt", quant_algo="FP8"),
        said(quant_method="compressed-tensors", format="float-quantized"),
        {"text_config": said(quant_method="fp8")},
    ],
)
def test_what_can_be_loaded(config: dict[str, Any]) -> None:
    check_quantisation(PATH, config, ["model.norm.weight", "model.norm.weight_scale"])


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (said(quant_method="exl3", bits=4), "EXL3"),
        (said(quant_method="gptq"), "gptq"),
        (said(quant_method="awq"), "awq"),
        (said(quant_method="modelopt", quant_algo="NVFP4"), r"modelopt \(NVFP4\)"),
        (said(quant_method="compressed-tensors", format="pack-quantized"), r"compressed-tensors \(pack-quantized\)"),
        (said(bits=4), "a method that config.json does not name"),
        ({"quantization": {"bits": 4, "group_size": 32}}, "groups, as MLX does"),
        ({"text_config": said(quant_method="bitsandbytes")}, "bitsandbytes"),
    ],
)
def test_what_is_refused_by_name(config: dict[str, Any], kind: str) -> None:
    with pytest.raises(ModelError, match=rf"^config\.json: the model's weights are quantised with {kind}, which can't"):
        check_quantisation(PATH, config, [])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.0.mlp.up_proj.trellis", "EXL3"),
        ("model.layers.0.mlp.up_proj.qweight", "GPTQ or AWQ"),
        ("model.layers.0.mlp.up_proj.weight_packed", "compressed-tensors"),
        ("model.layers.0.mlp.up_proj.scales", "groups, as MLX does"),
        ("model.layers.0.mlp.up_proj.weight_scale_2", "NVFP4"),
    ],
)
def test_names_of_tensors_tell_where_the_configuration_does_not(name: str, kind: str) -> None:
    with pytest.raises(ModelError, match=rf"quantised with {kind}, which can't"):
        check_quantisation(PATH, {}, ["model.norm.weight", name])


def test_blocks() -> None:
    assert weight_block(PATH, {}) == (128, 128)
    assert weight_block(PATH, said(weight_block_size=None)) == (128, 128)
    assert weight_block(PATH, said(weight_block_size=[64, 32])) == (64, 32)
    for block in ([128], [0, 128], "128", [128, 1.5], 128):
        with pytest.raises(ModelError, match="weight_block_size must be two numbers above 0"):
            weight_block(PATH, said(weight_block_size=block))


def test_a_configuration_that_is_no_object() -> None:
    with pytest.raises(ModelError, match=r"config\.json: quantization_config is no object"):
        check_quantisation(PATH, {"quantization_config": "fp8"}, [])
