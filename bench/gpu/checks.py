"""The same answers alone, batched, from the cache and after preemption, on this device, for each layer kind."""

from __future__ import annotations

import random
from collections.abc import Iterator

from bench.gpu.goals import DIFFERING, Figure
from bench.gpu.scale import Scale
from ingot.engine.admission import EngineLimits
from ingot.engine.engine import Engine
from ingot.engine.request import Request, Sampling, Stop
from tests import engines

KINDS = ("kernel", "kernel-window", "kernel-hybrid", "moe")
"""Of the tests' tiny models one a layer kind; heads of the first three are large enough for the kernels."""
CONTEXT = 540


def checks(scale: Scale) -> Iterator[Figure]:
    for kind in KINDS[:1] if scale.tiny else KINDS:
        yield from _checked(kind)


def _checked(kind: str) -> Iterator[Figure]:
    asked = [_request(f"r{number}", length, 12) for number, length in enumerate((1, 20, 64, 65, 130, 300))]
    roomy = engines.start(kind, context=CONTEXT, cache_bytes=1 << 24)
    alone = [_texts(roomy, [request])[0] for request in asked]
    yield Figure(f"{kind}: alone and batched", _unlike(alone, _texts(roomy, asked)), DIFFERING)
    _texts(roomy, [_kept(request, "first") for request in asked])
    kept = _texts(roomy, [_kept(request, "again") for request in asked])
    yield Figure(f"{kind}: alone and from what was kept", _unlike(alone, kept), DIFFERING)
    grown = [_request(f"p{number}", 250 + number, 285) for number in range(2)]
    whole = [_texts(roomy, [request])[0] for request in grown]
    memory = engines.tight_memory(roomy, rows=2, tokens=512)
    roomy.check()
    roomy.close()
    tight = engines.start(kind, context=CONTEXT, memory=memory, limits=EngineLimits(max_sequences=2))
    preempted, times = engines.preempted(tight, grown)
    tight.check()
    tight.close()
    unlike = _unlike(whole, preempted) if times else len(whole)
    yield Figure(f"{kind}: alone and after {times} preemptions", unlike, DIFFERING)


def _request(name: str, length: int, output: int) -> Request:
    dice = random.Random(name)
    prompt = tuple(dice.randrange(95) for _ in range(length))
    greedy = Sampling(temperature=0.0)
    return Request(name, (prompt,), max_tokens=output, sampling=greedy, stop=Stop(ignore_eos=True), cache=False)


def _kept(request: Request, turn: str) -> Request:
    return Request(
        f"{request.id}-{turn}",
        request.prompts,
        max_tokens=request.max_tokens,
        sampling=request.sampling,
        stop=request.stop,
        cache=True,
    )


def _texts(engine: Engine, requests: list[Request]) -> list[str]:
    streams = [engine.generate(request) for request in requests]
    return [engines.text_of([event for batch in stream for event in batch]) for stream in streams]


def _unlike(some: list[str], others: list[str]) -> int:
    return sum(one != other for one, other in zip(some, others, strict=True))
