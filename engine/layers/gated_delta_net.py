"""Gated delta net: linear attention with a state of one matrix a head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from lazyio.engine.layers.delta_rule import Tokens, follow, step
from lazyio.engine.layers.linear import Joined, Linear
from lazyio.engine.layers.norm import rms
from lazyio.engine.state import Composite, Recent, Recurrent
from lazyio.engine.ubatch import Span, Ubatch, together
from lazyio.kernels import delta_net
from lazyio.kernels.contract import usable
from lazyio.kernels.gated_delta_rule import Chunk, gated_delta_rule, supports

_GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": functional.silu, "sigmoid": torch.sigmoid}


@dataclass(slots=True)
class DeltaState(Composite):
    """What the convolution reaches back to, [channels], and S, float32 [value_heads, key_dim, value_dim]."""

    inputs: Recent
    memory: Recurrent


class GatedDeltaNet(nn.Module):
    """A causal convolution, the delta rule, and a norm with a gate.

        [q | k | v]_t = silu(sum over i of w_i * (W_qkv x)_{t - conv_kernel + 1 + i})     per channel
        q, k = q / |q| / sqrt(key_dim), k / |k|     value head j has those of key head j * key_heads / value_heads
        beta = sigmoid(W_b x);   log decay = -exp(A_log) * softplus(W_a x + dt_bias)      per value head
        o = delta rule of q, k, v, beta and the log decay
        y = W_out (w * rms(o) * gate(W_z x))     rms per value head

    Source: `Qwen3_5GatedDeltaNet` and `Qwen4ExpTextGatedDeltaNet` of transformers; layers/delta_rule.py has the rule.
    Log decay, norms and S are float32; A_log and dt_bias are to be, whatever the dtype of the rest.
    """

    def __init__(
        self,
        hidden: int,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        conv_kernel: int,
        eps: float,
        gate: str,
    ) -> None:
        """`gate` is "silu" or "sigmoid"."""
        super().__init__()
        self._key_heads, self._value_heads = key_heads, value_heads
        self._key_dim, self._value_dim = key_dim, value_dim
        self._channels = 2 * key_heads * key_dim + value_heads * value_dim
        self.in_proj_qkv = Linear(hidden, self._channels)
        self.in_proj_z = Linear(hidden, value_heads * value_dim)
        self.in_proj_b = Linear(hidden, value_heads)
        self.in_proj_a = Linear(hidden, value_heads)
        self._products = Joined(self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
        self.conv1d = Convolution(self._channels, conv_kernel)
        self.A_log = nn.Parameter(torch.empty(value_heads))
        self.dt_bias = nn.Parameter(torch.empty(value_heads))
        self.norm = GatedNorm(value_dim, eps, gate)
        self.out_proj = Linear(value_heads * value_dim, hidden)

    def new_piece(self, capacity: int, dtype: torch.dtype, device: torch.device) -> DeltaState:
        """Zeros."""
        return DeltaState(
            Recent(self.conv1d.reach, self._channels, dtype=dtype, device=device),
            Recurrent(self._value_heads, self._key_dim, self._value_dim, dtype=torch.float32, device=device),
        )

    def forward(self, x: torch.Tensor, ubatch: Ubatch) -> torch.Tensor:
        """Of x [tokens, hidden]: [tokens, hidden]."""
        if self._fused(x):
            return self._by_kernels(x, ubatch)
        mixed, z, of_beta, of_decay = self._products(x)
        beta = of_beta.float().sigmoid()
        log_decay = -self.A_log.float().exp() * functional.softplus(of_decay.float() + self.dt_bias.float())
        groups = list(together(ubatch.spans))
        q, k, v = self._heads(torch.cat([self._convolved(spans, mixed) for spans in groups]))
        if usable(x.device) and supports(self._key_dim, self._value_dim):
            memory = [span.state.pieces[self].memory.value for span in ubatch.spans]
            of_each = [Chunk(span.start, span.length, span.before) for span in ubatch.spans]
            found = gated_delta_rule(q, k, v, beta, log_decay, of_each, memory)
        else:
            q, k = _unit(q.float()) * self._key_dim**-0.5, _unit(k.float())
            each = self._value_heads // self._key_heads
            q, k = q.repeat_interleave(each, 1), k.repeat_interleave(each, 1)
            tokens = Tokens(q, k, v.float(), beta, log_decay)
            found = torch.cat([self._follow(spans, tokens) for spans in groups]).to(x.dtype)
        gated = self.norm(found, z.view(found.shape))
        y: torch.Tensor = self.out_proj(gated.flatten(1))
        return y

    def _fused(self, x: torch.Tensor) -> bool:
        """Whether kernels do all but products: float32 is left to torch, whose results are the ones to compare with."""
        if x.dtype == torch.float32 or not usable(x.device):
            return False
        around = delta_net.supports(x.dtype, self.conv1d.reach, self._value_dim)
        return around and supports(self._key_dim, self._value_dim)

    def _by_kernels(self, x: torch.Tensor, ubatch: Ubatch) -> torch.Tensor:
        pieces: list[DeltaState] = [span.state.pieces[self] for span in ubatch.spans]
        here = [(span.start, span.length) for span in ubatch.spans]
        history = [piece.inputs.entries for piece in pieces]
        mixed, z, of_beta, of_decay = (one.contiguous() for one in self._products(x))
        q, k, v = self._heads(delta_net.convolve(mixed, self.conv1d.weight[:, 0], here, history))
        rates = delta_net.rates(of_beta, of_decay, self.A_log, self.dt_bias)
        chunks = [Chunk(span.start, span.length, span.before) for span in ubatch.spans]
        found = gated_delta_rule(q, k, v, *rates, chunks, [piece.memory.value for piece in pieces])
        gated = delta_net.gated_norm(found, z.view(found.shape), self.norm.weight, self.norm.eps, self.norm.gate)
        y: torch.Tensor = self.out_proj(gated.flatten(1))
        return y

    def _convolved(self, spans: list[Span], mixed: torch.Tensor) -> torch.Tensor:
        """[q | k | v] of the tokens of these sequences, as many of each: [tokens, channels]."""
        inputs = mixed[spans[0].start : spans[-1].here.stop].view(len(spans), -1, self._channels)
        recent = [span.state.pieces[self].inputs for span in spans]
        return functional.silu(self.conv1d(Recent.extend_each(recent, inputs))).reshape(-1, self._channels)

    def _heads(self, convolved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k [tokens, key_heads, key_dim] and v [tokens, value_heads, value_dim], as they are."""
        of_qk = 2 * self._key_heads * self._key_dim
        q, k = convolved[:, :of_qk].reshape(-1, 2, self._key_heads, self._key_dim).unbind(1)
        return q, k, convolved[:, of_qk:].reshape(-1, self._value_heads, self._value_dim)

    def _follow(self, spans: list[Span], tokens: Tokens) -> torch.Tensor:
        """The delta rule over tokens of one sequence, or one token of each of several: [tokens, value_heads, dim]."""
        here = tokens[spans[0].start : spans[-1].here.stop]
        memory = [span.state.pieces[self].memory for span in spans]
        if len(spans) == 1:
            outputs, memory[0].value = follow(here, spans[0].before, memory[0].value)
            return outputs
        outputs, values = step(here, torch.stack([one.value for one in memory]))
        for one, value in zip(memory, values, strict=True):
            one.value = value
        return outputs


class Convolution(nn.Module):
    """A causal convolution of each channel by itself."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel))
        self.reach = kernel - 1  # how many tokens back

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Of `windows` [sequences, reach + tokens, channels]: [sequences, tokens, channels]."""
        # Laid out by channels, it gets torch's own kernel on a GPU, whose sums are the same wherever ubatches are cut.
        by_channel = windows.transpose(1, 2).contiguous()
        return functional.conv1d(by_channel, self.weight, groups=len(self.weight)).transpose(1, 2)


class GatedNorm(nn.Module):
    """y = w * rms(x) * gate(z): w times the norm in x's dtype, the gate in float32, then x's dtype."""

    def __init__(self, width: int, eps: float, gate: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps, self.gate = eps, gate

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Of x and z [..., width]."""
        normed = self.weight * rms(x, self.eps).to(x.dtype)
        gated: torch.Tensor = normed * _GATES[self.gate](z.float())
        return gated.to(x.dtype)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum(x**2) + 1e-6) over the last dimension."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)
