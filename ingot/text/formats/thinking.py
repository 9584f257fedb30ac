"""The ways in which families mark their thinking."""

from __future__ import annotations

from ingot.text.formats.format import Thinking

THINK = Thinking("think", "<think>", "</think>")
INTERLEAVED_THINK = Thinking("interleaved-think", "<think>", "</think>", interleaved=True)
MISTRAL_THINK = Thinking("mistral", "[THINK]", "[/THINK]")
GEMMA_THINK = Thinking("gemma4", "<|channel>thought", "<channel|>")
SEED_THINK = Thinking("seed-oss", "<seed:think>", "</seed:think>")
MINIMAX_M3_THINK = Thinking("minimax-m3", "<mm:think>", "</mm:think>", interleaved=True)

THINKINGS: tuple[Thinking, ...] = (
    SEED_THINK,
    MINIMAX_M3_THINK,
    MISTRAL_THINK,
    GEMMA_THINK,
    THINK,
    INTERLEAVED_THINK,
)
