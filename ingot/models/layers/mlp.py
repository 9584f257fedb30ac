"""Gated MLPs on CPUs: the gate as one native operation, or in the fewest that MLX has for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ingot.kernels import native
from ingot.models.layers.modules import adopt
from ingot.models.layers.norms import named


@dataclass(frozen=True)
class MLPWiring:
    """What an MLP computes: down(act(gate(x)) * up(x))."""

    act: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    gate: str = "gate_proj"
    up: str | None = "up_proj"  # None: one projection gives the gate and, behind it, what is gated
    down: str = "down_proj"


_JOINT = MLPWiring(gate="gate_up_proj", up=None)
_NUMBERED = MLPWiring(gate="w1", up="w3", down="w2")

GATINGS: dict[str, MLPWiring] = {
    **dict.fromkeys(
        (
            *("Klear.KlearMLP", "afm7.MLP", "afmoe.MLP", "baichuan_m1.MLP", "bailing_hybrid.MLP", "cohere.MLP"),
            *("bailing_moe.BailingMoeMLP", "bailing_moe_linear.MLP", "bailing_moe_v3.BailingMLP", "cohere2.MLP"),
            *("deepseek.DeepseekMLP", "deepseek_v2.DeepseekV2MLP", "deepseek_v3.DeepseekV3MLP", "dots1.Dots1MLP"),
            *("deepseek_v32.DeepseekV32MLP", "ernie4_5.MLP", "ernie4_5_moe.Ernie4_5_MLP", "exaone4.MLP"),
            *("exaone_moe.MLP", "falcon_h1.FalconH1MLP", "glm4_moe.MLP", "glm4_moe_lite.Glm4MoeLiteMLP"),
            *("granite.MLP", "granitemoehybrid.GraniteMoeHybridMLP", "helium.HeliumMLP", "hunyuan.MLP"),
            *("hunyuan_v1_dense.MLP", "internlm3.MLP", "jamba.JambaMLP", "kimi_linear.KimiMLP", "laguna.MLP"),
            *("lfm2_moe.MLP", "llama.MLP", "llama4.MLP", "llama4_text.MLP", "longcat_flash.LongcatFlashMLP"),
            *("mimo.MLP", "mimo_v2_flash.MLP", "minicpm.MLP", "minicpm3.MLP", "ministral3.MLP", "muse_glimmer.MLP"),
            *("nanbeige.MLP", "olmo2.MLP", "olmo3.Olmo3MLP", "olmo_hybrid.MLP", "plamo.MLP", "qwen2.MLP"),
            *("qwen2_moe.MLP", "qwen3.MLP", "qwen3_moe.MLP", "qwen3_next.Qwen3NextMLP", "seed_oss.MLP"),
            *("stablelm.MLP", "telechat3.Telechat3MLP", "youtu_llm.YoutuLLMMLP"),
        ),
        MLPWiring(),
    ),
    **dict.fromkeys(("glm.GLMMLP", "glm4.Glm4MLP", "phi3.MLP", "plamo2.MLP", "plamo3.MLP"), _JOINT),
    **dict.fromkeys(("internlm2.MLP", "lfm2.MLP"), _NUMBERED),
    **dict.fromkeys(("gemma.MLP", "spark2_5.MLP"), MLPWiring(act="gelu")),
    **dict.fromkeys(
        ("gemma2.MLP", "gemma3_text.MLP", "gemma4_text.MLP", "recurrent_gemma.MLPBlock"), MLPWiring(act="gelu_tanh")
    ),
    "dbrx.MLP": MLPWiring(gate="w1", up="v1", down="w2"),
    "exaone.MLP": MLPWiring(gate="c_fc_0", up="c_fc_1", down="c_proj"),
    "granitemoehybrid.GraniteMoeHybridSharedMLP": MLPWiring(gate="input_linear", up=None, down="output_linear"),
    "openelm.MLP": MLPWiring(gate="proj_1", up=None, down="proj_2"),
    "qwen.MLP": MLPWiring(gate="w2", up="w1", down="c_proj"),
    "talkie.MLP": MLPWiring(gate="mlp_gate", up="mlp_linear", down="mlp_resid"),
}
"""Classes of mlx-lm's that compute a gated MLP and nothing else, by module and name."""


class GatedMLP(nn.Module):
    """Computes what the MLP that it extends computes, float32 in fewer steps."""

    _gating: MLPWiring
    _native: bool

    def __call__(self, x: mx.array) -> Any:
        gating = self._gating
        if x.dtype != mx.float32:
            return super().__call__(x)
        gate = self[gating.gate](x)
        up = None if gating.up is None else self[gating.up](x)
        return self[gating.down](native.gated(gating.act, gate, up) if self._native else _divided(gate, up))


def _divided(gate: mx.array, up: mx.array | None) -> mx.array:
    """Silu alone: MLX's sigmoid costs half as much again as its exponential and a division."""
    if up is None:
        gate, up = mx.split(gate, 2, axis=-1)
    return gate / (1 + mx.exp(-gate)) * up


@cache
def _extended(kind: type) -> type:
    return type(f"Gated{kind.__name__}", (GatedMLP, kind), {})


def swap_gates(model: nn.Module) -> int:
    """Swap every known MLP of the model that can be computed faster; returns how many were."""
    found = [(path, module, GATINGS.get(named(type(module)))) for path, module in model.named_modules()]
    quick = native.available()
    swapped = [
        (path, _swapped(module, gating, quick))
        for path, module, gating in found
        if gating is not None and (quick or gating.act == "silu")
    ]
    model.update_modules(tree_unflatten(swapped))
    return len(swapped)


def _swapped(module: nn.Module, gating: MLPWiring, quick: bool) -> nn.Module:
    swapped: Any = adopt(module, _extended(type(module)))
    swapped._gating, swapped._native = gating, quick
    return swapped
