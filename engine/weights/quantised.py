"""What a config.json says of quantised weights, and which of that can be loaded: fp8."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lazyio.errors import ModelError

_USUAL_BLOCK = (128, 128)

# What names of quantised tensors end in, where no config.json tells.
_ENDINGS = {
    ".trellis": "EXL3",
    ".qweight": "GPTQ or AWQ",
    ".weight_packed": "compressed-tensors",
    ".scales": "groups, as MLX does",
    ".weight_scale_2": "NVFP4",
}


def check_quantisation(config_path: str, config: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise ModelError if weights are quantised in a way that can't be loaded.

    `config` is all of config.json, `names` are those of all stored tensors but the table's.
    """
    said = _said(config_path, config)
    kind = "" if said is None or _is_fp8(said) else _kind(said)
    for name in names:
        kind = kind or next((_ENDINGS[ending] for ending in _ENDINGS if name.endswith(ending)), "")
    if kind:
        raise ModelError(
            f"{config_path}: the model's weights are quantised with {kind}, which can't be loaded here; use the "
            "unquantised model, one in fp8 or a GGUF file (its table alone can be used, with load_format 'dummy')"
        )


def weight_block(config_path: str, config: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of the blocks that have a scale each, in fp8 weights that have blocks."""
    said = _said(config_path, config) or {}
    block = said.get("weight_block_size") or _USUAL_BLOCK
    match block:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise ModelError(f"{config_path}: weight_block_size must be two numbers above 0, rows and columns; it is {block!r}")


def _said(config_path: str, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The part that tells of quantisation. MLX calls it `quantization`."""
    text = config.get("text_config")
    for place in (config, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "quantization"):
            said = place.get(key)
            if said is not None:
                if not isinstance(said, dict):
                    raise ModelError(f"{config_path}: {key} is no object")
                return said
    return None


def _is_fp8(said: Mapping[str, Any]) -> bool:
    match said:
        case {"quant_method": "fp8" | "fbgemm_fp8"} | {"quant_method": "modelopt", "quant_algo": "FP8"}:
            return True
        case {"quant_method": "compressed-tensors", "format": "float-quantized"}:
            return True
    return False


def _kind(said: Mapping[str, Any]) -> str:
    method = said.get("quant_method")
    algorithm = said.get("quant_algo") or said.get("format")
    if not isinstance(method, str):
        return "groups, as MLX does" if "group_size" in said else "a method that config.json does not name"
    return f"{method} ({algorithm})" if isinstance(algorithm, str) else method.upper() if method == "exl3" else method
