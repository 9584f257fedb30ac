"""The ways in which families mark their thinking."""

from __future__ import annotations

from ingot.text.formats.format import Thinking

THINK = Thinking("think", "<think>", "</think>")
INTERLEAVED_THINK = Thinking("interleaved-think", "<think>", "</think>", interleaved=True)
MISTRAL_THINK = Thinking("mistral", "[THINK]", "[/THINK]")
GEMMA_THINK = Thinking("gemma4", "<|channel>thought", "<channel|>")
SEED_THINK = Thinking("seed-oss", "<seed:think>", "</seed:think>")
MINIMAX_M3_THINK = Thinking("minimax-m3", "<mm:think>", "</mm:think>", interleaved=True)

LONGCAT_THINK = Thinking("longcat", "<longcat_think>", "</longcat_think>")
KIMI_K3_THINK = Thinking("kimi-k3", "<|open|>think<|sep|>", "<|close|>think<|sep|>")
APERTUS_THINK = Thinking("apertus", "<|inner_prefix|>", "<|inner_suffix|>")
COHERE_THINK = Thinking("cohere", "<|START_THINKING|>", "<|END_THINKING|>")
SOLAR_THINK = Thinking("solar-open", "<|think|>", "<|end|><|begin|>assistant")
APRIEL_THINK = Thinking("apriel", "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]")
HUNYUAN_THINK = Thinking("hunyuan", "<think:opensource>", "</think:opensource>")

THINKINGS: tuple[Thinking, ...] = (
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
    THINK,
    INTERLEAVED_THINK,
)
