"""What GGUF files call the parameters of each model, and how the values that they store differ.

llama.cpp's converter changes some values on the way: gammas of zero-centred norms are stored with 1 added, decays as
-exp(A_log), convolutions without their middle dimension, experts' gates apart from their other halves, and the value
heads of gated delta nets in another order. Each `Stored` has the change in both directions: `undo` for who reads,
`do` for who writes. Source: `conversion/qwen.py`, `conversion/qwen4exp.py` and `conversion/gemma.py` of llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lazyio.engine.weights.tiles import Tiles

Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored tensor that holds a parameter, or the part `into` of it.

    `do` turns values of the part into stored ones, `undo` turns them back; both take a whole tensor and keep
    its shape, and dimensions of 1 are left out of what is stored. With `place` the values are only that entry of the
    stored tensor's first dimension, which several parameters share. `tiles` are there where `undo` is theirs and moves
    values without changing them.
    """

    name: str
    into: tuple[slice, ...] = ()
    do: Change | None = None
    undo: Change | None = None
    place: int | None = None
    tiles: Tiles | None = None


class GgufNames:
    """The stored tensors of a model, given its configuration in transformers' form."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._qwen = not str(config["model_type"]).startswith("gemma")

    def of(self, parameter: str) -> list[tuple[Stored, ...]]:
        """The ways in which a parameter may be stored, the usual one first; empty for an unknown one.

        A file has it in one of these ways, each a number of stored tensors that together make it up.
        """
        if parameter in _MODEL:
            return [(self._stored(parameter, _MODEL[parameter]),)]
        stacked = re.fullmatch(r"model\.altup_(unembed_)?projections\.(\d+)\.weight", parameter)
        if stacked:
            name = "altup_unembd_proj.weight" if stacked[1] else "altup_proj.weight"
            return [(Stored(name, place=int(stacked[2])),)]
        in_layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", parameter)
        return [] if in_layer is None else self._of_layer(f"blk.{in_layer[1]}.", in_layer[2])

    def _of_layer(self, block: str, name: str) -> list[tuple[Stored, ...]]:
        if name == "mlp.experts.gate_up_proj":
            half = self._config["moe_intermediate_size"]
            gate = Stored(f"{block}ffn_gate_exps.weight", (slice(None), slice(0, half)))
            up = Stored(f"{block}ffn_up_exps.weight", (slice(None), slice(half, 2 * half)))
            return [(gate, up), (Stored(f"{block}ffn_gate_up_exps.weight"),)]
        if name == "self_attn.indexer.index_qk_proj.weight":
            queries = self._config["indexer_n_heads"] * self._config["indexer_head_dim"]
            q = Stored(f"{block}indexer.q_proj.weight", (slice(0, queries),))
            return [(q, Stored(f"{block}indexer.k_proj.weight", (slice(queries, None),)))]
        if name in _LAYER:
            return [(self._stored(name, block + _LAYER[name]),)]
        return []

    def _stored(self, parameter: str, name: str) -> Stored:
        tiles = self._tiles(parameter)
        if parameter.endswith("A_log"):
            assert tiles is not None
            return Stored(name, do=lambda x: -tiles.do(x).exp(), undo=lambda x: tiles.undo(x.neg().log()))
        if tiles is not None:
            return Stored(name, do=tiles.do, undo=tiles.undo, tiles=tiles)
        if self._qwen and _is_zero_centred(parameter):
            return Stored(name, do=lambda x: x + 1, undo=lambda x: x - 1)
        return Stored(name)

    def _tiles(self, parameter: str) -> Tiles | None:
        """How the value heads of a parameter of a gated delta net are ordered; None where it has none."""
        _, _, name = parameter.rpartition("linear_attn.")
        if name == parameter or name == "norm.weight":
            return None
        config = self._config
        key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        wide = config["linear_value_head_dim"] if name.split(".")[0] in _WIDE else 1
        before = 2 * key_heads * config["linear_key_head_dim"] if name.split(".")[0] in _BEHIND_KEYS else 0
        return Tiles(key_heads, value_heads // key_heads, wide, before, dim=1 if name == "out_proj.weight" else 0)


# Of a gated delta net: what has a whole head of values for each value head, and what has queries and keys before them.
_WIDE = ("in_proj_qkv", "in_proj_z", "conv1d", "out_proj")
_BEHIND_KEYS = ("in_proj_qkv", "conv1d")


def _is_zero_centred(parameter: str) -> bool:
    """Whether it is a norm of y = rms(x) (1 + w): all of Qwen's are but that of a gated delta net's output."""
    return "norm" in parameter and "linear_attn" not in parameter


_MODEL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "model.norm.weight": "output_norm.weight",
    "model.hyper_connection_mixer.hc_norm.weight": "output_hc_norm.weight",
    "model.hyper_connection_mixer.input_mix_weight_down.weight": "output_hc_down.weight",
    "model.hyper_connection_mixer.input_mix_weight_up.weight": "output_hc_up.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}

_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.indexer.q_layernorm.weight": "indexer.q_norm.weight",
    "self_attn.indexer.k_layernorm.weight": "indexer.k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "attn_hyper_connection.hc_norm.weight": "hc_attn_norm.weight",
    "attn_hyper_connection.input_mix_weight_down.weight": "hc_attn_down.weight",
    "attn_hyper_connection.input_mix_weight_up.weight": "hc_attn_up.weight",
    "attn_hyper_connection.block_inject_weight.weight": "hc_attn_inject.weight",
    "mlp_hyper_connection.hc_norm.weight": "hc_ffn_norm.weight",
    "mlp_hyper_connection.input_mix_weight_down.weight": "hc_ffn_down.weight",
    "mlp_hyper_connection.input_mix_weight_up.weight": "hc_ffn_up.weight",
    "mlp_hyper_connection.block_inject_weight.weight": "hc_ffn_inject.weight",
    "ple.key_proj.weight": "ple_key.weight",
    "ple.value_proj.weight": "ple_value.weight",
    "ple.norm_key.weight": "ple_norm_key.weight",
    "ple.norm_query.weight": "ple_norm_query.weight",
    "ple.norm_conv.weight": "ple_norm_conv.weight",
    "ple.conv1d.weight": "ple_conv1d.weight",
    "per_layer_input_gate.weight": "inp_gate.weight",
    "per_layer_projection.weight": "proj.weight",
    "post_per_layer_input_norm.weight": "post_norm.weight",
    "layer_scalar": "layer_output_scale.weight",
    "altup.correct_output_scale": "altup_correct_scale.weight",
    "altup.correction_coefs.weight": "altup_correct_coef.weight",
    "altup.prediction_coefs.weight": "altup_predict_coef.weight",
    "altup.modality_router.weight": "altup_router.weight",
    "altup.router_norm.weight": "altup_router_norm.weight",
    "laurel.linear_left.weight": "laurel_l.weight",
    "laurel.linear_right.weight": "laurel_r.weight",
    "laurel.post_laurel_norm.weight": "laurel_post_norm.weight",
}
