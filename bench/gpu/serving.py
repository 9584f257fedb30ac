"""The engine on models of real shapes with random weights, next to mlx-lm's loops on the same weights."""

from __future__ import annotations

import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from bench import engine as bench_engine
from bench.family_shapes import REAL, family_config, random_model
from bench.gpu import stock
from bench.gpu.goals import Figure
from bench.gpu.scale import Scale
from bench.pages import Gauge, request, waits
from ingot.engine.engine import Engine
from ingot.engine.request import Request, TextDelta

WARM = 8
"""Tokens of an answer before what is measured."""


class Subject(NamedTuple):
    """A model of random weights."""

    name: str
    config: dict[str, Any]
    make: Callable[[], Any]


def dense(scale: Scale) -> Iterator[Figure]:
    return _served(_subject("8B bf16", scale.dense), scale, scale.streams, host=True)


def packed(scale: Scale) -> Iterator[Figure]:
    """mlx-lm's beside it is one stream behind one token: what MLX multiplies prompts of packed models by, it compiles
    when they first come, for half a minute."""
    return _served(_subject("8B 4-bit", scale.dense, bits=4), scale, scale.streams[:2], stock_streams=1, stock_prompt=1)


def hybrid(scale: Scale) -> Iterator[Figure]:
    return _served(_subject("hybrid 9B bf16", scale.hybrid), scale, scale.streams[:2])


def family(name: str, scale: Scale) -> Iterator[Figure]:
    """One of `family_shapes`, with weights of 4 bits."""
    real = not scale.tiny
    config = family_config(name, {}, REAL[name] if real else {})
    subject = Subject(f"{name} 4-bit", config, lambda: random_model(name, real=real)[1])
    return _served(subject, scale, scale.streams[:2], stock_streams=1, stock_prompt=scale.prompt)


def _subject(name: str, config: dict[str, Any], bits: int = 0) -> Subject:
    return Subject(name, config, lambda: built(config, bits))


def _served(
    subject: Subject,
    scale: Scale,
    streams: tuple[int, ...],
    *,
    stock_streams: int | None = None,
    stock_prompt: int | None = None,
    host: bool = False,
) -> Iterator[Figure]:
    """Ours first, each figure when it is there; then those that mlx-lm has one beside, once more with that: of the
    first so many numbers of streams, and of prompts of so many tokens."""
    ours: dict[str, Figure] = {}
    for key, figure in _ours(subject, scale, streams, host):
        ours[key] = figure
        yield figure
    model, vocab = subject.make(), subject.config["vocab_size"] - 1
    prompt = stock_prompt or scale.prompt
    for key, theirs in stock.measured(model, scale, vocab, streams[:stock_streams], prompt):
        if key in ours:
            yield replace(ours[key], beside=theirs)


def _ours(subject: Subject, scale: Scale, streams: tuple[int, ...], host: bool) -> Iterator[tuple[str, Figure]]:
    """Figures, by what mlx-lm's are called."""
    name, config = subject.name, subject.config
    steps: list[Figure] = []

    def look(adapter: Any) -> None:
        if host:
            spent, whole = step_times(adapter, scale.streams[-1], scale.prompt)
            steps.append(Figure(f"{name}, host time of a step of {scale.streams[-1]}", spent, "ms"))
            steps.append(Figure(f"{name}, whole step of {scale.streams[-1]}", whole, "ms"))

    engine = _started(subject, scale, 8192, look)
    prefill = 0.0
    try:
        yield from ((step.name, step) for step in steps)
        for count in streams:
            bench_engine.measure(engine, _asked("warm", count, config, scale, WARM))
            found = bench_engine.measure(engine, _asked("measured", count, config, scale, scale.output))
            prefill = max(prefill, found.prefill_tokens_per_second)
            label = f"{name}, 1 stream" if count == 1 else f"{name}, {count} unequal streams"
            yield str(count), Figure(label, found.decode_tokens_per_second, "tok/s")
        yield "prefill", Figure(f"{name}, prefill", prefill, "tok/s")
        engine.check()
    finally:
        engine.close()


def _started(
    subject: Subject, scale: Scale, context: int, look: Callable[[Any], None] = lambda adapter: None
) -> Engine:
    """An engine; how long it took is said, as what nobody sees is not mended."""
    began = time.monotonic()
    made = [began]

    def make() -> Any:
        model = subject.make()
        made[0] = time.monotonic()
        return model

    engine = bench_engine.started(
        subject.name, subject.config, make, memory_gb=scale.memory_gb, context=context, look=look
    )
    ended, name = time.monotonic(), subject.name
    print(f"{name}: weights made in {made[0] - began:.1f} s, loaded in {ended - made[0]:.1f} s", file=sys.stderr)
    for note in engine.card.notes:
        print(f"{name}: {note}", file=sys.stderr)
    return engine


def _asked(turn: str, count: int, config: dict[str, Any], scale: Scale, output: int) -> list[Request]:
    vocab, name = config["vocab_size"] - 1, f"{turn}-{count}"
    return bench_engine.requests(name, count, scale.prompt, output, vocab, unequal=count > 1)


def built(config: dict[str, Any], bits: int = 0) -> Any:
    import mlx.core as mx
    import mlx.nn as nn

    from bench.random_models import build

    model = build(config, dtype=mx.bfloat16)
    if bits:
        nn.quantize(model, group_size=64 if config["hidden_size"] % 64 == 0 else 32, bits=bits)
        mx.eval(model.parameters())
    return model


def step_times(adapter: Any, count: int, prompt: int) -> tuple[float, float]:
    """Milliseconds: what Python takes to ask for a step while the device has nothing else to do; the whole step."""
    import mlx.core as mx

    from ingot.cache.forward_batch import ForwardPart

    rows, dice = adapter.new_batch_state(), random.Random(1)
    made = [rows.new() for _ in range(count)]
    for row in made:
        width = dice.randrange(prompt // 2, prompt)
        mx.eval(adapter.run(rows, mx.ones(width, mx.uint32), [ForwardPart((row,), width)], [width - 1]), rows.pending())
    groups = [tuple(made)] if adapter.ragged else [(row,) for row in made]
    asked, whole = [], []
    for _ in range(24):
        mx.synchronize()
        began = time.perf_counter()
        for group in groups:
            logits = adapter.run(rows, mx.ones(len(group), mx.uint32), [ForwardPart(group, 1)])
            mx.async_eval(mx.argmax(logits, axis=-1), rows.pending())
        asked.append(time.perf_counter() - began)
        mx.synchronize()
        whole.append(time.perf_counter() - began)
    return 1000 * statistics.median(asked[4:]), 1000 * statistics.median(whole[4:])


def long(scale: Scale) -> Iterator[Figure]:
    """A long prompt beside short ones: how soon they are answered, and what all of them take."""
    config, peak = scale.dense, [0]
    engine = _started(_subject("8B bf16", config), scale, 2 * scale.long)
    try:
        first = _first_token(engine, config["vocab_size"] - 1, scale)
        yield Figure("first token of 64 beside a prompt of 32K", first, "ms")
        taken = _memory(engine, config["vocab_size"] - 1, scale, peak)
        yield Figure("memory of 1 x 32K + 7 x 256, over what they hold", taken, "x")
        yield Figure("peak memory beyond weights", (peak[0] - engine.card.weight_bytes) / 1e9, "GB")
        engine.check()
    finally:
        engine.close()


def _tokens(name: str, count: int, vocab: int) -> tuple[int, ...]:
    dice = random.Random(name)
    return tuple(dice.randrange(vocab) for _ in range(count))


def _first_token(engine: Engine, vocab: int, scale: Scale) -> float:
    """Milliseconds, the median of a few that come one after another while the long prompt is computed."""
    waits(engine, request("warm", _tokens("warm", 64, vocab), 4), [])
    behind = threading.Thread(target=waits, args=(engine, request("long", _tokens("l", scale.long, vocab), 2), []))
    behind.start()
    while not any(status.prefilled_tokens for status in engine.status()) and behind.is_alive():
        time.sleep(0.001)
    found: list[float] = []
    while not found or (behind.is_alive() and len(found) < 5):
        name = f"short{len(found)}"
        began = time.monotonic()
        stream = engine.generate(request(name, _tokens(name, 64, vocab), 2))
        shown = [time.monotonic() for batch in stream if any(isinstance(event, TextDelta) for event in batch)]
        found.append(1000 * (shown[0] - began))
    engine.cancel("long")
    behind.join()
    return statistics.median(found)


def _memory(engine: Engine, vocab: int, scale: Scale, peak: list[int]) -> float:
    """What exists for states over what sequences hold of it, when both are largest."""
    import mlx.core as mx

    mx.reset_peak_memory()
    gauge = Gauge(engine)
    asked = [request("m-long", _tokens("m", scale.long - 100, vocab), 16)]
    asked += [request(f"m{number}", _tokens(f"m{number}", 256, vocab), scale.output) for number in range(7)]
    work: Callable[..., None] = waits
    threads = [threading.Thread(target=work, args=(engine, each, [])) for each in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gauge.close()
    peak[0] = mx.get_peak_memory()
    return gauge.taken / gauge.held if gauge.held else 0.0
