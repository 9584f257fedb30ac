"""Where the time goes that a draft takes to score a prompt: to read it, to write what may come behind it, and to ask
what that attends to; beside reading alone, on random models.

python -m bench.sparse_scoring --draft llama-5m --tokens 8192
python -m bench.sparse_scoring --draft llama-600m --dtype bfloat16 --tokens 8192 --rounds 5
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass

import mlx.core as mx

from bench.random_models import SHAPES
from bench.sparse import WORDS, scorer
from ingot.cache.launch import Part
from ingot.engine.draft_model import AT_ONCE
from ingot.engine.request import Request
from ingot.engine.sequence import Sequence
from ingot.engine.sparse.draft_scorer import DraftScorer
from ingot.models.adapter import Adapter


@dataclass(frozen=True, slots=True)
class Seconds:
    read: float
    write: float
    ask: float

    @property
    def total(self) -> float:
        return self.read + self.write + self.ask


def some(tokens: int, seed: int) -> tuple[int, ...]:
    dice = random.Random(f"{tokens} {seed}")
    return tuple(dice.randrange(WORDS) for _ in range(tokens))


def scored(scorer: DraftScorer, prompt: tuple[int, ...]) -> Seconds:
    """It yields behind each piece that is read, and behind what is written. Each is awaited, so that it is known how
    long it takes: in all that is a little longer."""
    scoring = scorer.score(Sequence(Request("bench", (prompt,), cache=False), 0, 0, prompt, 1, 0))
    times = [time.monotonic()]
    for _ in scoring:
        mx.synchronize()
        times.append(time.monotonic())
    *_, read, written = times
    return Seconds(read - times[0], written - read, time.monotonic() - written)


def read_alone(adapter: Adapter, prompt: tuple[int, ...]) -> float:
    """As long as it takes to have a token behind it, seeing everything."""
    rows, began = adapter.new_rows(), time.monotonic()
    row = rows.new()
    for begin in range(0, len(prompt), AT_ONCE):
        piece = mx.array(prompt[begin : begin + AT_ONCE], dtype=mx.uint32)
        logits = adapter.run(rows, piece, [Part((row,), piece.size)], [piece.size - 1])
        mx.async_eval(logits, rows.pending())
    mx.eval(logits, rows.pending())
    return time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", choices=SHAPES, default="llama-5m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--memory-gb", type=float, default=2.0)
    asked = parser.parse_args()
    made = scorer(asked.draft, asked.dtype, asked.tokens + 1024, asked.memory_gb)
    found = [scored(made, some(asked.tokens, seed)) for seed in range(asked.rounds + 1)][1:]
    best = min(found, key=lambda each: each.total)
    alone = min(read_alone(made.adapter, some(asked.tokens, seed)) for seed in range(asked.rounds + 1))
    print("| tokens | read | write | ask | in all | read alone |", "|---" * 6 + "|", sep="\n")
    seconds = " | ".join(f"{each:.3f} s" for each in (best.read, best.write, best.ask, best.total, alone))
    print(f"| {asked.tokens} | {seconds} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
