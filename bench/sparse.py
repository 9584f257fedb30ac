r"""Specprefill: time to the first token of long prompts, scoring included, against the best possible one, and tokens
per second after it, on random models or the foundry's.

python -m bench.sparse --target llama-15m --draft llama-5m --lengths 8192,32768 --warm-up 2048
python -m bench.sparse --target dense --draft draft --lengths 8192,32768 --warm-up 2048
python -m bench.sparse --target llama-8b --draft llama-600m --dtype bfloat16 --memory-gb 24 --lengths 8192,32768,65536
python -m bench.sparse --target llama-32b --draft llama-1.7b --dtype bfloat16 --memory-gb 40 --lengths 8192,32768,65536
python -m bench.sparse --target qwen3.5-35b-a3b --draft qwen3.5-0.8b --dtype bfloat16 --memory-gb 40 --keep 0.2 \
    --lengths 8192,32768,131072
python -m bench.sparse --target qwen3.5-122b-a10b --draft qwen3.5-2b --dtype bfloat16 --memory-gb 40 --keep 0.2 \
    --lengths 8192,32768,131072

Shapes of Qwen 3.5 have weights in 4 bits. The best gain is 1 / (computed fraction + time of the draft model / time of
the target), both for the whole prompt. What the foundry's models write after that many tokens is meaningless, but takes
as long.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import log
from typing import Any

from bench.engine import started
from bench.family_shapes import OTHER_SIZES, family_config, random_model
from bench.random_models import SHAPES, build
from foundry.package import MODELS
from foundry.shapes import SHAPES as TRAINED
from ingot.engine.engine import Engine
from ingot.engine.memory_budget import MemoryBudget
from ingot.engine.request import Ended, Failed, Request, Sampling, SpecPrefillRequest, Stop
from ingot.engine.specprefill.prefill import SpecPrefillSetup
from ingot.engine.specprefill.scorers import DraftScorer
from ingot.engine.speculation.draft_model import LONGEST_DRAFT_PASS, DraftModel
from ingot.upstream import load_config, load_model

WORDS = 500
"""Tokens that prompts are made of: all shapes have them."""
AHEAD = 64
"""Tokens that are written behind each prompt."""


@dataclass(frozen=True, slots=True)
class Figures:
    tokens: int
    dense_s: float
    sparse_s: float
    draft_s: float
    scoring_s: float
    kept: int
    dense_speed: float  # tokens a second behind the prompt
    sparse_speed: float

    @property
    def gain(self) -> float:
        return self.dense_s / self.sparse_s

    @property
    def best(self) -> float:
        return 1 / (self.kept / self.tokens + self.draft_s / self.dense_s)


def shape(name: str, context: int) -> dict[str, Any]:
    if name in OTHER_SIZES:
        family, sizes = OTHER_SIZES[name]
        config = family_config(family, {}, sizes)
    else:
        config = load_config(MODELS / name) if name in TRAINED else SHAPES[name]
    return config | {"max_position_embeddings": context}


def make(name: str, dtype: str, context: int) -> Any:
    from ingot.models.precision import DTYPES

    if name in OTHER_SIZES:
        family, sizes = OTHER_SIZES[name]
        return random_model(family, dtype, changes={"max_position_embeddings": context}, sizes=sizes)[1]
    if name not in TRAINED:
        return build(shape(name, context), dtype=DTYPES[dtype])
    model, _ = load_model(MODELS / name)
    model.set_dtype(DTYPES[dtype])
    return model


def scorer(name: str, dtype: str, context: int, memory_gb: float) -> DraftScorer:
    from ingot.kernels.device import current_device
    from ingot.models.adapter import adapt_model

    here = current_device()
    adapter = adapt_model(make(name, dtype, context), shape(name, context), here)
    total = adapter.weight_bytes + int(memory_gb * 1e9)
    budget = MemoryBudget(
        total, adapter.weight_bytes, adapter.footprint, context=context, widest=LONGEST_DRAFT_PASS, rows=4
    )
    return DraftScorer(DraftModel(adapter, budget))


@contextmanager
def engine_of(name: str, asked: argparse.Namespace, *, draft: str | None = None) -> Iterator[Engine]:
    context = max(asked.lengths) + 1024
    offer = None
    if draft is not None:
        offer = lambda: SpecPrefillSetup(scorer(draft, asked.dtype, context, asked.memory_gb), 1, asked.keep)  # noqa: E731
    engine = started(
        name,
        shape(name, context),
        lambda: make(name, asked.dtype, context),
        memory_gb=asked.memory_gb,
        context=context,
        specprefill=offer,
    )
    try:
        yield engine
    finally:
        engine.close()


def measure(engine: Engine, tokens: int, seed: int, *, sparse: bool = False) -> Ended:
    dice = random.Random(f"{tokens} {seed}")
    request = Request(
        f"{tokens}-{seed}-{sparse}",
        (tuple(dice.randrange(WORDS) for _ in range(tokens)),),
        max_tokens=AHEAD,
        sampling=Sampling(temperature=0.0),
        stop=Stop(ignore_eos=True),
        specprefill=SpecPrefillRequest() if sparse else None,
    )
    *_, batch = engine.generate(request)
    if isinstance(failed := batch[-1], Failed):
        raise failed.error
    assert isinstance(batch[-1], Ended)
    return batch[-1]


def best_of(engine: Engine, tokens: int, asked: argparse.Namespace, *, sparse: bool = False) -> Ended:
    """The quickest of some, behind one that warms up."""
    measure(engine, min(tokens, asked.warm_up or tokens), 0, sparse=sparse)
    ends = [measure(engine, tokens, 1 + round, sparse=sparse) for round in range(asked.rounds)]
    return min(ends, key=first_token_s)


def first_token_s(end: Ended) -> float:
    return end.timing.queue + end.timing.prefill


def figures(asked: argparse.Namespace) -> Iterator[Figures]:
    with engine_of(asked.draft, asked) as engine:
        alone = [first_token_s(best_of(engine, tokens, asked)) for tokens in asked.lengths]
    with engine_of(asked.target, asked, draft=asked.draft) as engine:
        for tokens, draft_s in zip(asked.lengths, alone, strict=True):
            dense, thin = best_of(engine, tokens, asked), best_of(engine, tokens, asked, sparse=True)
            [told] = thin.specprefill
            if told.unused is not None:
                print(f"{tokens}: {told.unused}", flush=True)
                continue
            speeds = [(AHEAD - 1) / end.timing.decode for end in (dense, thin)]
            seconds = (first_token_s(dense), first_token_s(thin), draft_s, told.scoring_s)
            yield Figures(tokens, *seconds, told.kept, *speeds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*SHAPES, *OTHER_SIZES, *TRAINED]
    parser.add_argument("--target", choices=names, default="llama-150m")
    parser.add_argument("--draft", choices=names, default="llama-15m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--lengths", type=lambda text: [int(part) for part in text.split(",")], default=[2048, 8192])
    parser.add_argument("--keep", type=float, default=0.3)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--warm-up", type=int, help="tokens of the warm-up prompt, if fewer: for CPUs")
    parser.add_argument("--memory-gb", type=float, default=2.0)
    asked = parser.parse_args()
    print("| tokens | all tokens | specprefill | scoring | draft alone | computed | gain | at best | share | decode |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    found: list[Figures] = []
    for each in figures(asked):
        found.append(each)
        print(
            f"| {each.tokens} | {each.dense_s:.3f} s | {each.sparse_s:.3f} s | {each.scoring_s:.3f} s "
            f"| {each.draft_s:.3f} s | {each.kept / each.tokens:.2f} | {each.gain:.2f} | {each.best:.2f} "
            f"| {each.gain / each.best:.2f} | {each.sparse_speed / each.dense_speed:.2f} |",
            flush=True,
        )
    if len(found) > 1:
        first, last = found[0], found[-1]
        exponent = log(last.scoring_s / first.scoring_s) / log(last.tokens / first.tokens)
        print(f"scoring grows with the length to the power of {exponent:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
