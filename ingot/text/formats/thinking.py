"""The ways in which families mark their thinking."""

from __future__ import annotations

from ingot.text.tool_formats.format import ThinkingFormat

THINK = ThinkingFormat("think", "<think>", "</think>")
INTERLEAVED_THINK = ThinkingFormat("interleaved-think", "<think>", "</think>", interleaved=True)
MISTRAL_THINK = ThinkingFormat("mistral", "[THINK]", "[/THINK]")
GEMMA_THINK = ThinkingFormat("gemma4", "<|channel>thought", "<channel|>")
SEED_THINK = ThinkingFormat("seed-oss", "<seed:think>", "</seed:think>")
MINIMAX_M3_THINK = ThinkingFormat("minimax-m3", "<mm:think>", "</mm:think>", interleaved=True)

LONGCAT_THINK = ThinkingFormat("longcat", "<longcat_think>", "</longcat_think>")
KIMI_K3_THINK = ThinkingFormat("kimi-k3", "<|open|>think<|sep|>", "<|close|>think<|sep|>")
APERTUS_THINK = ThinkingFormat("apertus", "<|inner_prefix|>", "<|inner_suffix|>")
COHERE_THINK = ThinkingFormat("cohere", "<|START_THINKING|>", "<|END_THINKING|>")
SOLAR_THINK = ThinkingFormat("solar-open", "<|think|>", "<|end|><|begin|>assistant")
APRIEL_THINK = ThinkingFormat("apriel", "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]")
HUNYUAN_THINK = ThinkingFormat("hunyuan", "<think:opensource>", "</think:opensource>")
KIMI_VL_THINK = ThinkingFormat("kimi-vl", "◁think▷", "◁/think▷")
PLAMO_THINK = ThinkingFormat("plamo3", "<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>")
MARKED_THINK = ThinkingFormat("think-markers", "<|think:start|>", "<|think:end|>")
# K2 Horizon has tags for each effort.
_IFM_FAST = ThinkingFormat("k2-horizon-fast", "<ifm|think_fast>", "</ifm|think_fast>")
_IFM_FASTER = ThinkingFormat("k2-horizon-faster", "<ifm|think_faster>", "</ifm|think_faster>")
IFM_THINK = ThinkingFormat("k2-horizon", "<ifm|think>", "</ifm|think>", variants=(_IFM_FAST, _IFM_FASTER))

THINKINGS: tuple[ThinkingFormat, ...] = (
    SEED_THINK,
    MINIMAX_M3_THINK,
    MISTRAL_THINK,
    GEMMA_THINK,
    LONGCAT_THINK,
    KIMI_K3_THINK,
    APERTUS_THINK,
    COHERE_THINK,
    SOLAR_THINK,
    HUNYUAN_THINK,
    APRIEL_THINK,
    KIMI_VL_THINK,
    PLAMO_THINK,
    MARKED_THINK,
    IFM_THINK,
    *IFM_THINK.variants,
    THINK,
    INTERLEAVED_THINK,
)
