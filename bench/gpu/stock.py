"""mlx-lm's own loops on an unchanged model in memory."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from bench.gpu.scale import Scale
from ingot.upstream import import_upstream


def measured(model: Any, scale: Scale, vocab: int, streams: Sequence[int], prompt: int) -> Iterator[tuple[str, float]]:
    """Tokens per second of decoding by so many streams, and of prefill, of prompts of so many tokens. What fails there
    is left out, and said."""
    loops = import_upstream("mlx_lm.generate")
    for count in streams:
        try:
            if count == 1:
                yield from _alone(loops, model, scale, vocab, prompt).items()
            else:
                yield from _together(loops, model, scale, vocab, count).items()
        except Exception as error:  # whatever another package does not do on this device
            print(f"mlx-lm with {count} streams: {' '.join(str(error).split())[:200]}", file=sys.stderr)


def _alone(loops: Any, model: Any, scale: Scale, vocab: int, length: int) -> dict[str, float]:
    import mlx.core as mx

    prompt = mx.array(_prompts(scale, vocab, 1)[0][:length])
    for round_ in range(2):  # of which the first compiles
        began, first = time.perf_counter(), 0.0
        for number, _ in enumerate(loops.generate_step(prompt, model, max_tokens=scale.output if round_ else 4)):
            first = time.perf_counter() if number == 0 else first
        ended = time.perf_counter()
    prefill = {"prefill": prompt.size / (first - began)} if length > 1 else {}
    return {"1": (scale.output - 1) / (ended - first), **prefill}


def _together(loops: Any, model: Any, scale: Scale, vocab: int, count: int) -> dict[str, float]:
    """Between the first step that all of them share and the first that ends one."""
    generator = loops.BatchGenerator(model, max_tokens=scale.output, completion_batch_size=count)
    generator.insert(_prompts(scale, vocab, count))
    steps, began, ended = 0, 0.0, 0.0
    while responses := generator.next_generated():
        if any(response.finish_reason is not None for response in responses):
            break
        if len(responses) == count:
            began = began or time.perf_counter()
            steps, ended = steps + 1, time.perf_counter()
    generator.close()
    return {str(count): count * (steps - 1) / (ended - began)} if steps > 1 else {}


def _prompts(scale: Scale, vocab: int, count: int) -> list[list[int]]:
    """Alike for one, else up to half as long again."""
    dice = random.Random(count)
    lengths = [scale.prompt + (dice.randrange(scale.prompt // 2 + 1) if count > 1 else 0) for _ in range(count)]
    return [[dice.randrange(vocab) for _ in range(length)] for length in lengths]
