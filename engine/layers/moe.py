"""A mixture of experts, of which each token takes a few, beside one that all take."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from lazyio.engine.layers.linear import Linear
from lazyio.engine.layers.mlp import SiluMlp
from lazyio.engine.layers.packed import Weight, times
from lazyio.kernels import moe, route
from lazyio.kernels.contract import usable

#: Of rows sorted by expert: where those of each expert end, int32 [experts] on the device, or how many each has.
Groups = torch.Tensor | list[int]

# torch's kernel for groups takes fewer than these.
_MOST_GROUPS = 1024


class SparseMoe(nn.Module):
    """Routed experts and a shared one.

        p = softmax(W_r x);   w_e = p_e of the `chosen` largest, divided by their sum
        y = sum of w_e * E_e(x) + sigmoid(w_s . x) * E_s(x),   E(x) = W_down(silu(W_gate x) * W_up x)

    Probabilities and the sums over experts are in float32; the sum of a token is over its own experts, largest
    probability first, whatever else is in the ubatch. Source: `Qwen3_5MoeSparseMoeBlock` of transformers.
    """

    def __init__(
        self, hidden: int, experts: int, chosen: int, width: int, shared_width: int, normalise: bool = True
    ) -> None:
        """Without `normalise`, w_e = p_e."""
        super().__init__()
        self.gate = Linear(hidden, experts, packs=False)  # decides which experts are taken, and is small
        self.experts = Experts(hidden, experts, width)
        self.shared_expert = SiluMlp(hidden, shared_width)
        self.shared_expert_gate = Linear(hidden, 1)
        self._chosen, self._normalise = chosen, normalise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of x [tokens, hidden]: [tokens, hidden]."""
        weights, chosen = self._route(self.gate(x))
        routed = self.experts(x, chosen, weights)
        shared = self.shared_expert_gate(x).float().sigmoid() * self.shared_expert(x)
        both: torch.Tensor = routed + shared
        return both.to(x.dtype)

    def _route(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights, float32, and numbers, int64, of the experts of each token: [tokens, chosen] both."""
        if usable(logits.device) and route.supports(logits.dtype, logits.shape[1]):
            return route.route(logits, self._chosen, self._normalise)
        weights, chosen = functional.softmax(logits, -1, dtype=torch.float32).topk(self._chosen)
        return weights / weights.sum(-1, keepdim=True) if self._normalise else weights, chosen


class Experts(nn.Module):
    """The experts' weights, gate and up projection joined. `packs` are the names of those that may be held packed."""

    gate_up_proj: Weight
    down_proj: Weight
    packs = ("gate_up_proj", "down_proj")

    def __init__(self, hidden: int, experts: int, width: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum of the experts `chosen`, int64 [tokens, slots], of x [tokens, hidden].

        `weights` are float32 [tokens, slots]; so is the result, [tokens, hidden].
        """
        if usable(x.device) and moe.supports(x.dtype, self.gate_up_proj, self.down_proj):
            return moe.moe(x.contiguous(), chosen, weights, self.gate_up_proj, self.down_proj)
        slots = chosen.shape[1]
        expert, order = chosen.flatten().sort(stable=True)
        groups = self._groups(expert, x)
        gate, up = _by_expert(x[order // slots], self.gate_up_proj, groups).chunk(2, -1)
        # Weights before the last projection rather than after it: it is narrower there, and float16 less likely to end.
        inner = functional.silu(gate.float()) * up * weights.flatten()[order, None]
        outputs = _by_expert(inner.to(x.dtype), self.down_proj, groups)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        return outputs[places].view(len(x), slots, -1).sum(1, dtype=torch.float32)

    def _groups(self, expert: torch.Tensor, x: torch.Tensor) -> Groups:
        """Of the experts of all tokens and slots, sorted."""
        each = torch.arange(self.down_proj.shape[0], device=expert.device)
        ends = torch.searchsorted(expert, each, right=True, out_int32=True)
        if isinstance(self.gate_up_proj, torch.Tensor) and _grouped(x, self.down_proj):
            return ends
        return [end - start for start, end in pairwise([0, *ends.tolist()])]


def _grouped(x: torch.Tensor, down_proj: Weight) -> bool:
    """Whether one launch can do all experts: then the host need not know how many tokens each has."""
    if not isinstance(down_proj, torch.Tensor):
        return False
    experts, hidden, width = down_proj.shape
    aligned = hidden % 8 == width % 8 == 0  # rows begin at multiples of 16 bytes
    fits = aligned and experts < _MOST_GROUPS
    return fits and x.is_cuda and x.dtype == torch.bfloat16 and hasattr(functional, "grouped_mm")


def _by_expert(x: torch.Tensor, weight: Weight, groups: Groups) -> torch.Tensor:
    """x W_e^T for the rows of each expert e: [rows, outputs] of x [rows, inputs], weight [experts, outputs, inputs]."""
    if isinstance(groups, torch.Tensor):
        assert isinstance(weight, torch.Tensor)
        return functional.grouped_mm(x, weight.transpose(1, 2), offs=groups)
    parts = enumerate(torch.split(x, groups))
    return torch.cat([times(rows, weight[expert]) for expert, rows in parts if len(rows)])
