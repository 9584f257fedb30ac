"""Where the time of scoring a prompt goes: reading it, writing a few tokens after it, and computing their attention;
compared with reading alone, on random models. And how scoring grows with the length.

python -m bench.sparse_scoring --draft llama-5m --tokens 8192,65536
python -m bench.sparse_scoring --draft llama-600m --dtype bfloat16 --tokens 8192 --rounds 5

`processors` is the time of all threads together, which depends less on what else the machine does.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass
from math import log

import mlx.core as mx

from bench.random_models import SHAPES
from bench.sparse import WORDS, scorer
from ingot.cache.forward_batch import ForwardPart
from ingot.engine.request import Request
from ingot.engine.sequence import TokenSequence
from ingot.engine.specprefill.scorers import DraftScorer
from ingot.engine.speculation.draft_model import LONGEST_DRAFT_PASS
from ingot.models.adapter import ModelAdapter


@dataclass(frozen=True, slots=True)
class Seconds:
    read: float
    write: float
    ask: float
    processors: float

    @property
    def total(self) -> float:
        return self.read + self.write + self.ask


def some(tokens: int, seed: int) -> tuple[int, ...]:
    dice = random.Random(f"{tokens} {seed}")
    return tuple(dice.randrange(WORDS) for _ in range(tokens))


def scored(scorer: DraftScorer, prompt: tuple[int, ...]) -> Seconds:
    """It yields behind each piece that is read, and behind what is written. Each is awaited, so that it is known how
    long it takes: in all that is a little longer."""
    scoring = scorer.score(TokenSequence(Request("bench", (prompt,), cache=False), 0, 0, prompt, 1, 0))
    times, before = [time.monotonic()], time.process_time()
    for _ in scoring:
        mx.synchronize()
        times.append(time.monotonic())
    *_, read, written = times
    asked, processors = time.monotonic() - written, time.process_time() - before
    return Seconds(read - times[0], written - read, asked, processors)


def read_alone(adapter: ModelAdapter, prompt: tuple[int, ...]) -> tuple[float, float]:
    """As long as it takes to have a token behind it, seeing everything, and what that takes of processors."""
    rows, began, before = adapter.new_batch_state(), time.monotonic(), time.process_time()
    row = rows.new()
    for begin in range(0, len(prompt), LONGEST_DRAFT_PASS):
        piece = mx.array(prompt[begin : begin + LONGEST_DRAFT_PASS], dtype=mx.uint32)
        logits = adapter.run(rows, piece, [ForwardPart((row,), piece.size)], [piece.size - 1])
        mx.async_eval(logits, rows.pending())
    mx.eval(logits, rows.pending())
    return time.monotonic() - began, time.process_time() - before


def exponent(one: tuple[int, float], other: tuple[int, float]) -> float:
    """The power of its length that something grew with, by two lengths and what they took."""
    return log(other[1] / one[1]) / log(other[0] / one[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", choices=SHAPES, default="llama-5m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=lambda text: [int(part) for part in text.split(",")], default=[8192])
    parser.add_argument(
        "--alone-up-to", type=int, default=32768, help="tokens up to which reading alone is measured, which is slow"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--memory-gb", type=float, default=2.0)
    asked = parser.parse_args()
    made = scorer(asked.draft, asked.dtype, max(asked.tokens) + 1024, asked.memory_gb)
    scored(made, some(min(asked.tokens), 0))
    read_alone(made.adapter, some(min(asked.tokens), 0))
    print(
        "| tokens | read | write | attention | total | processors | read alone | processors |",
        "|---" * 8 + "|",
        sep="\n",
    )
    found: list[tuple[int, Seconds]] = []
    for tokens in asked.tokens:
        prompts = [some(tokens, seed) for seed in range(1, asked.rounds + 1)]
        best = min((scored(made, prompt) for prompt in prompts), key=lambda each: each.total)
        alone = [read_alone(made.adapter, prompt) for prompt in prompts if tokens <= asked.alone_up_to]
        seconds = (best.read, best.write, best.ask, best.total, best.processors, *(min(alone) if alone else ()))
        print(f"| {tokens} | {' | '.join(f'{each:.3f} s' for each in seconds)} |", flush=True)
        found.append((tokens, best))
    if len(found) > 1:
        (first, least), (last, most) = found[0], found[-1]
        by_time, by_processors = (
            exponent((first, one), (last, other))
            for one, other in ((least.total, most.total), (least.processors, most.processors))
        )
        print(f"scoring grows with the length to the power of {by_time:.2f}, by processors {by_processors:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
