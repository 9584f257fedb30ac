"""Gated MLPs on CPUs, where MLX's sigmoid costs half as much again as its exponential and a division."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ingot.models.modules import adopt

KNOWN = frozenset(
    (
        *("Klear.KlearMLP", "afm7.MLP", "afmoe.MLP", "baichuan_m1.MLP", "bailing_hybrid.MLP"),
        *("bailing_moe.BailingMoeMLP", "bailing_moe_linear.MLP", "bailing_moe_v3.BailingMLP", "cohere.MLP"),
        *("cohere2.MLP", "deepseek.DeepseekMLP", "deepseek_v2.DeepseekV2MLP", "deepseek_v3.DeepseekV3MLP"),
        *("deepseek_v32.DeepseekV32MLP", "dots1.Dots1MLP", "ernie4_5.MLP", "ernie4_5_moe.Ernie4_5_MLP", "exaone4.MLP"),
        *("exaone_moe.MLP", "falcon_h1.FalconH1MLP", "glm4_moe.MLP", "glm4_moe_lite.Glm4MoeLiteMLP", "granite.MLP"),
        *("granitemoehybrid.GraniteMoeHybridMLP", "helium.HeliumMLP", "hunyuan.MLP", "hunyuan_v1_dense.MLP"),
        *("internlm3.MLP", "jamba.JambaMLP", "kimi_linear.KimiMLP", "laguna.MLP", "lfm2_moe.MLP", "llama.MLP"),
        *("llama4.MLP", "llama4_text.MLP", "longcat_flash.LongcatFlashMLP", "mimo.MLP", "mimo_v2_flash.MLP"),
        *("minicpm.MLP", "minicpm3.MLP", "ministral3.MLP", "muse_glimmer.MLP", "nanbeige.MLP", "olmo2.MLP"),
        *("olmo3.Olmo3MLP", "olmo_hybrid.MLP", "plamo.MLP", "qwen2.MLP", "qwen2_moe.MLP", "qwen3.MLP", "qwen3_moe.MLP"),
        *("qwen3_next.Qwen3NextMLP", "seed_oss.MLP", "stablelm.MLP", "telechat3.Telechat3MLP"),
        "youtu_llm.YoutuLLMMLP",
    )
)
"""Classes of mlx-lm's that compute down(silu(gate(x)) * up(x)) and nothing else, by module and name."""


class DividedGate(nn.Module):
    """Computes what the MLP that it extends computes, in fewer instructions."""

    def __call__(self, x: mx.array) -> Any:
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(gate / (1 + mx.exp(-gate)) * up)


@cache
def _extended(kind: type) -> type:
    return type(f"Divided{kind.__name__}", (DividedGate, kind), {})


def swap_gates(model: nn.Module) -> int:
    """Swap every known MLP of the model; returns how many were swapped."""
    found = [(path, module) for path, module in model.named_modules() if _name(type(module)) in KNOWN]
    model.update_modules(tree_unflatten([(path, _swapped(module)) for path, module in found]))
    return len(found)


def _swapped(module: nn.Module) -> nn.Module:
    swapped: nn.Module = adopt(module, _extended(type(module)))
    return swapped


def _name(kind: type) -> str:
    return f"{kind.__module__.rsplit('.', 1)[-1]}.{kind.__name__}"
