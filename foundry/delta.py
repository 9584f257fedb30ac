"""The gated delta layer for training: transformers' weights and result, an evaluation fit for long rows.

transformers' plain PyTorch fallback writes its output chunk by chunk into one tensor, which costs autograd a copy of
the whole for each chunk. Here everything but the state's recurrence runs for all chunks at once.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

CHUNK = 64


class GatedDelta(Qwen3_5GatedDeltaNet):
    """Whole sequences only: no cache, no padding mask."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        rows, length, _width = hidden_states.shape
        mixed = F.silu(_convolved(self.in_proj_qkv(hidden_states), self.conv1d.weight.squeeze(1)))
        query, key, value = torch.split(mixed, [self.key_dim, self.key_dim, self.value_dim], dim=-1)
        repeats = self.num_v_heads // self.num_k_heads
        query, key = (
            x.reshape(rows, length, -1, self.head_k_dim).repeat_interleave(repeats, dim=2) for x in (query, key)
        )
        value = value.reshape(rows, length, -1, self.head_v_dim)
        beta = self.in_proj_b(hidden_states).sigmoid()
        step = self.in_proj_a(hidden_states).float() + self.dt_bias
        decay = -self.A_log.float().exp() * torch.logaddexp(step, torch.zeros_like(step))
        with torch.autocast(hidden_states.device.type, enabled=False):
            made = gated_delta(*(x.float() for x in (query, key, value, decay, beta)))
        made = made.to(hidden_states.dtype).reshape(-1, self.head_v_dim)
        gate = self.in_proj_z(hidden_states).reshape(-1, self.head_v_dim)
        return self.out_proj(self.norm(made, gate).reshape(rows, length, -1))


def _convolved(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A causal depthwise convolution along the sequence: rows, length, channels."""
    width = weight.shape[1]
    padded = F.pad(x, (0, 0, width - 1, 0))
    weight = weight.to(x.dtype)
    shifted = (padded[:, tap : tap + x.shape[1]] * weight[:, tap] for tap in range(width))
    return functools.reduce(torch.add, shifted)


def gated_delta(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """The gated delta rule over rows, length, heads, width; `decay` is the logarithm of what the state keeps."""
    rows, length, heads, _ = value.shape
    query = _unit(query) * query.shape[-1] ** -0.5
    query, key, value = (_chunked(x) for x in (query, _unit(key), value))
    decay, beta = (_chunked(x.unsqueeze(-1)) for x in (decay, beta))
    total = decay.cumsum(dim=-2)
    kept = (total - total.transpose(-1, -2)).tril().exp().tril()
    scaled = key * beta
    inverse = unit_inverse(((scaled @ key.transpose(-1, -2)) * kept).tril(-1))
    fresh = inverse @ (value * beta)
    reading = inverse @ (scaled * total.exp())
    last = total[:, :, -1:]
    written = (key * (last - total).exp()).transpose(-1, -2)
    identity = torch.eye(key.shape[-1], device=key.device)
    states = states_before(last.exp() * identity - written @ reading, written @ fresh)
    inside = (query @ key.transpose(-1, -2)) * kept
    made = (query * total.exp()) @ states + inside @ (fresh - reading @ states)
    return made.reshape(rows, heads, -1, made.shape[-1])[:, :, :length].transpose(1, 2)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)


def _chunked(x: torch.Tensor) -> torch.Tensor:
    """From rows, length, heads, width to rows * heads, chunks, CHUNK, width, the end padded with zeros."""
    x = x.transpose(1, 2).flatten(0, 1)
    if missing := -x.shape[1] % CHUNK:
        x = F.pad(x, (0, 0, 0, missing))
    return x.contiguous().reshape(x.shape[0], -1, CHUNK, x.shape[-1])


@torch.library.custom_op("foundry::states", mutates_args=())
def states_before(keep: torch.Tensor, add: torch.Tensor) -> torch.Tensor:
    """The state before each chunk (dimension 1), where each chunk makes `keep @ state + add` of it."""
    before = torch.zeros_like(add, memory_format=torch.contiguous_format)
    for chunk in range(1, add.shape[1]):
        before[:, chunk] = torch.baddbmm(add[:, chunk - 1], keep[:, chunk - 1], before[:, chunk - 1])
    return before


@states_before.register_fake
def _(keep: torch.Tensor, add: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(add, memory_format=torch.contiguous_format)


@torch.library.custom_op("foundry::states_backward", mutates_args=())
def states_gradient(keep: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of what each chunk adds, from that of the states before each chunk."""
    added = torch.zeros_like(gradient, memory_format=torch.contiguous_format)
    turned = keep.transpose(-1, -2)
    for chunk in range(gradient.shape[1] - 2, -1, -1):
        added[:, chunk] = torch.baddbmm(gradient[:, chunk + 1], turned[:, chunk + 1], added[:, chunk + 1])
    return added


@states_gradient.register_fake
def _(keep: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(gradient, memory_format=torch.contiguous_format)


def _keep_for_states(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _states_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    keep, before = ctx.saved_tensors
    added = states_gradient(keep, gradient.contiguous())
    return added @ before.transpose(-1, -2), added


states_before.register_autograd(_states_backward, setup_context=_keep_for_states)


@torch.library.custom_op("foundry::unit_inverse", mutates_args=())
def unit_inverse(lower: torch.Tensor) -> torch.Tensor:
    """The inverse of I + lower, for strictly lower triangular matrices."""
    identity = torch.eye(lower.shape[-1], device=lower.device, dtype=lower.dtype).expand_as(lower)
    return torch.linalg.solve_triangular(lower, identity, upper=False, unitriangular=True).contiguous()


@unit_inverse.register_fake
def _(lower: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(lower, memory_format=torch.contiguous_format)


def _keep_inverse(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(output)


def _inverse_backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    (inverse,) = ctx.saved_tensors
    turned = inverse.transpose(-1, -2)
    return -(turned @ gradient @ turned).tril(-1)


unit_inverse.register_autograd(_inverse_backward, setup_context=_keep_inverse)
