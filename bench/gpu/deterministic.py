"""What `--deterministic` promises, on this GPU: a token's logits have the same bits however its prompt is cut and
whatever is computed beside it, and a request has the same tokens alone, among others, from the cache, after preemption
and with draft tokens. And what it costs: each figure with the flag, next to the same without."""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from bench import engine as bench_engine
from bench.family_shapes import family_config, random_model
from bench.gpu.goals import DIFFERING, Figure
from bench.gpu.scale import Scale
from bench.gpu.serving import built
from bench.random_models import SHAPES
from ingot.engine.engine import Engine
from ingot.engine.request import Request, Sampling, SequenceEnded, Stop
from tests import engines
from tests.rehearsed import Rehearsed

FAMILIES = (("llama", 0), ("llama", 4), ("qwen3.5", 0), ("gemma3", 4), ("qwen3-moe", 4), ("qwen3.5", 4))
"""And the bits of their weights; 0: bfloat16."""
LAYERS = 8
"""Of the large shape whose speed is measured."""
VOCAB = 500


class Subject(NamedTuple):
    name: str
    config: dict[str, Any]
    make: Callable[[], Any]


def deterministic(scale: Scale) -> Iterator[Figure]:
    for number, each in enumerate(FAMILIES[:1] if scale.tiny else FAMILIES):
        subject = _subject(*each)
        yield _schedules(subject, 2 if scale.tiny else 24, 40 if scale.tiny else 700)
        yield from _answers(subject, scale)
        if number < 2:
            yield from _costs(scale, each[1])


def _subject(family: str, bits: int) -> Subject:
    changes = {"num_hidden_layers": 6 if family == "gemma3" else 4, "vocab_size": VOCAB + 12}
    config = family_config(family, changes, {})
    name = f"{family} {bits}-bit" if bits else f"{family} bf16"
    return Subject(name, config, lambda: random_model(family, changes=changes, bits=bits)[1])


def _adapter(model: Any, config: dict[str, Any], *, flag: bool) -> Any:
    from ingot.kernels.device import current_device
    from ingot.models.adapter import adapt_model

    adapter = adapt_model(model, config, current_device(), deterministic=flag)
    if flag and adapter.irreproducible is not None:
        print(f"not reproducible: {adapter.irreproducible}", file=sys.stderr)
    for note in adapter.notes:
        print(note, file=sys.stderr)
    return adapter


def _schedules(subject: Subject, count: int, length: int) -> Figure:
    """Rows of logits that differ in any bit from those of a prompt computed at once and alone."""
    adapter, dice = _adapter(subject.make(), subject.config, flag=True), random.Random(subject.name)
    prompt = [dice.randrange(VOCAB) for _ in range(length)]
    whole = _logits(adapter, prompt, [length], dice, 0)
    wrong = 0
    for _ in range(count):
        cuts, beside = _random_cuts(length, dice), dice.choice((0, 0, 1, 3, 9))
        found = _logits(adapter, prompt, cuts, dice, beside)
        apart = int((found != whole).any(axis=1).sum().item())
        if apart:
            print(f"{subject.name}: {apart} rows differ of cuts {cuts[:12]} beside {beside}", file=sys.stderr)
        wrong += apart
    return Figure(f"{subject.name}: logits over {count} schedules of {length}", wrong, DIFFERING)


def _random_cuts(length: int, dice: random.Random) -> list[int]:
    """Token by token, in drafts, in small chunks, in large ones, or a bit of each."""
    most = dice.choice(((1,), (2, 5, 16), (17, 33, 64), (100, 300, 700), (1, 1, 1, 8, 40, 300)))
    cuts, left = [], length
    if most == (1,):  # after a chunk, as answers are
        cuts, left = [length - min(length, 60)], min(length, 60)
    while left:
        cuts.append(min(left, dice.randint(1, dice.choice(most))))
        left -= cuts[-1]
    return [cut for cut in cuts if cut]


def _logits(adapter: Any, prompt: Sequence[int], cuts: Sequence[int], dice: random.Random, company: int) -> Any:
    import mlx.core as mx

    from ingot.cache.forward_batch import ForwardPart

    rows = adapter.new_batch_state()
    row, others = rows.new(), [rows.new() for _ in range(company)]
    found, at = [], 0
    for cut in cuts:
        parts = [ForwardPart((row,), cut)]
        parts += [ForwardPart((other,), dice.choice((1, 1, 1, 4, 30))) for other in others]
        place = dice.randrange(len(parts))
        parts[0], parts[place] = parts[place], parts[0]
        tokens: list[int] = []
        for part in parts:
            if part.rows[0] is row:
                begin = len(tokens)
                tokens += prompt[at : at + cut]
            else:
                tokens += [dice.randrange(VOCAB) for _ in range(part.width)]
        logits = adapter.run(rows, mx.array(tokens), parts)[begin : begin + cut]
        mx.eval(logits, rows.pending())
        found.append(logits)
        at += cut
    return mx.concatenate(found)


def _answers(subject: Subject, scale: Scale) -> Iterator[Figure]:
    """Requests that share beginnings, alone and then at once, again from the cache, with draft tokens of which some are
    right, and where memory holds few of them."""
    count, output = (2, 4) if scale.tiny else (12, 40)
    asked = _requests(count, output, 20 if scale.tiny else 300)
    roomy = _engine(subject, memory_gb=1.0, cache_gb=0.5)
    alone = [_tokens(roomy, [request])[0] for request in asked]
    yield Figure(f"{subject.name}: alone and batched", _unlike(alone, _tokens(roomy, asked)), DIFFERING)
    kept = [replace(request, id=f"kept-{request.id}", cache=True) for request in asked]
    found = _tokens(roomy, kept) + _tokens(roomy, [replace(request, id=f"again-{request.id}") for request in kept])
    yield Figure(f"{subject.name}: alone and from the cache", _unlike(alone * 2, found), DIFFERING)
    memory = engines.tight_memory(roomy, rows=3, tokens=512) - roomy.card.weight_bytes
    roomy.check()
    roomy.close()
    answers = {(request.prompts[0], 0): tokens for request, tokens in zip(asked, alone, strict=True)}
    guesses = Rehearsed(answers, right=0.8)
    tight = _engine(subject, memory_gb=1.0 if scale.tiny else memory / 1e9, proposers=[guesses], fixed_draft_tokens=6)
    found = _tokens(tight, asked)
    yield Figure(f"{subject.name}: alone and with drafts in little memory", _unlike(alone, found), DIFFERING)
    tight.check()
    tight.close()


def _requests(count: int, output: int, length: int) -> list[Request]:
    dice = random.Random(count)
    shared = tuple(dice.randrange(VOCAB) for _ in range(length // 2))
    samplings = (
        Sampling(temperature=0.0),
        Sampling(temperature=1.0, seed=3),
        Sampling(temperature=0.8, top_p=0.9, seed=5),
    )
    return [
        Request(
            f"r{number}",
            ((*shared, *(dice.randrange(VOCAB) for _ in range(dice.randint(1, length)))),),
            max_tokens=output,
            sampling=samplings[number % 3],
            stop=Stop(ignore_eos=True),
            cache=False,
        )
        for number in range(count)
    ]


def _engine(subject: Subject, **options: Any) -> Engine:
    return bench_engine.started(subject.name, subject.config, subject.make, context=2048, deterministic=True, **options)


def _tokens(engine: Engine, requests: Sequence[Request]) -> list[tuple[int, ...]]:
    """The answers to all of them at once."""
    streams = [engine.generate(request) for request in requests]
    ends = [[event for batch in stream for event in batch if isinstance(event, SequenceEnded)] for stream in streams]
    return [end.tokens for [end] in ends]


def _unlike(some: Sequence[object], others: Sequence[object]) -> int:
    return sum(one != other for one, other in zip(some, others, strict=True))


def _costs(scale: Scale, bits: int) -> Iterator[Figure]:
    """With the flag and without, in turns on the same weights."""
    shape = "dispatch" if scale.tiny else "llama-8b"
    config = {**SHAPES[shape], "num_hidden_layers": 2 if scale.tiny else LAYERS}
    name = f"{LAYERS} layers of 8B, {f'{bits}-bit' if bits else 'bf16'}, deterministic"
    adapters = [_adapter(built(config, bits), config, flag=flag) for flag in (True, False)]
    for prompt in (scale.prompt, 4 * scale.prompt):
        ours, plain = _timed([partial(_prefill_s, adapter, prompt) for adapter in adapters], scale)
        yield Figure(f"{name}: prefill of {prompt}", prompt / ours, "tok/s", prompt / plain)
    for streams in (1, 8):
        ours, plain = _timed([partial(_step_s, adapter, streams, scale) for adapter in adapters], scale)
        yield Figure(f"{name}: {streams} streams", streams / ours, "tok/s", streams / plain)
    ours, plain = _timed([partial(_mixed_s, adapter, scale) for adapter in adapters], scale)
    yield Figure(f"{name}: 8 streams beside a prompt", 1 / ours, "steps/s", 1 / plain)
    del adapters
    gc.collect()


def _timed(works: Sequence[Callable[[], float]], scale: Scale) -> list[float]:
    """Medians of what they return, in alternation."""
    rounds = [[work() for work in works] for _ in range(1 if scale.tiny else 6)]
    return [statistics.median(each) for each in zip(*(rounds[1:] or rounds), strict=True)]


def _prefill_s(adapter: Any, prompt: int) -> float:
    import mlx.core as mx

    from ingot.cache.forward_batch import ForwardPart

    rows = adapter.new_batch_state()
    part = ForwardPart((rows.new(),), prompt)
    mx.synchronize()
    began = time.perf_counter()
    mx.eval(adapter.run(rows, mx.ones(prompt, mx.uint32), [part], [prompt - 1]), rows.pending())
    return time.perf_counter() - began


def _step_s(adapter: Any, streams: int, scale: Scale) -> float:
    """Of rows with a prompt each."""
    import mlx.core as mx

    from ingot.cache.forward_batch import ForwardPart

    rows = adapter.new_batch_state()
    made = tuple(rows.new() for _ in range(streams))
    for row in made:
        mx.eval(adapter.run(rows, mx.ones(scale.prompt, mx.uint32), [ForwardPart((row,), scale.prompt)], [0]))
    tokens, times = mx.ones(streams, mx.uint32), list[float]()
    for _ in range(2 if scale.tiny else 30):
        mx.synchronize()
        began = time.perf_counter()
        mx.eval(mx.argmax(adapter.run(rows, tokens, [ForwardPart(made, 1)]), axis=-1), rows.pending())
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _mixed_s(adapter: Any, scale: Scale) -> float:
    """A step of eight rows and a prompt."""
    import mlx.core as mx

    from ingot.cache.forward_batch import ForwardPart

    rows = adapter.new_batch_state()
    made = tuple(rows.new() for _ in range(8))
    mx.eval(adapter.run(rows, mx.ones(80, mx.uint32), [ForwardPart(made, 10)]), rows.pending())
    parts = [ForwardPart(made, 1), ForwardPart((rows.new(),), scale.prompt)]
    mx.synchronize()
    began = time.perf_counter()
    mx.eval(
        adapter.run(rows, mx.ones(8 + scale.prompt, mx.uint32), parts, [*range(8), 7 + scale.prompt]), rows.pending()
    )
    return time.perf_counter() - began
