"""What speculation gains if a given share of draft tokens is right: plain decoding against the controller's choice, in
short turns on one engine, on a random model of a given shape; and against fixed depths, if requested.

python -m bench.speculate
python -m bench.speculate --shape llama-8b
python -m bench.speculate --shape llama-8b --depths 1,2,4,8 --rates 0.9,0.2 --batch 1
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from bench.engine import requests, start
from bench.random_models import SHAPES, decided
from bench.synthetic import Prompt, Synthetic
from ingot.engine.engine import Engine
from ingot.engine.request import Ended, Failed, Request, SequenceEnded

NOBODY: tuple[str, ...] = ()
USUAL: dict[str, tuple[str, int | None]] = {"llama-150m": ("float32", 8), "dispatch": ("float32", None)}
"""What shapes for CPUs are computed in, and how many bits their weights are packed into: the kernels there are made for
such weights. All others are bfloat16, which is not packed."""
FAR = 0.05
"""How far what was right may be from what was asked for, besides what chance does to so few."""
SETTLED = 64
"""Rounds after which the controller is to know what a new share of right guesses is worth; they are not measured."""


@dataclass(frozen=True, slots=True)
class Turn:
    """So many tokens, in so many seconds and so many that processors were busy for this process."""

    tokens: int
    wall: float
    cpu: float
    answers: dict[Prompt, tuple[int, ...]]
    rounds: int = 0  # that the longest answer took


@dataclass(frozen=True, slots=True)
class Figures:
    """Ratios are medians of pairs of turns, one behind the other."""

    batch: int
    rate: float
    pairs: int  # of turns
    judged: int  # guesses in measured turns up to the first wrong ones
    right: int  # of those
    plain: float  # tokens a second
    auto: float  # over plain, like all that follow
    auto_cpu: float  # the same by processors' time
    fixed: dict[int, float]  # by depth
    same: bool  # every way gave the same tokens
    made: int = 0  # measured rounds that had to make something first, as a GPU's graph for so many tokens

    @property
    def best(self) -> float:
        """At the best fixed depth, none included."""
        return max([1.0, *self.fixed.values()])

    @property
    def as_asked(self) -> bool:
        """Whether about as many guesses were right as were meant to be: else nothing was measured of that rate."""
        chance = 3 * math.sqrt(self.judged * self.rate * (1 - self.rate))
        return abs(self.right - self.judged * self.rate) <= FAR * self.judged + chance + 1


class Bench:
    """In one engine the controller decides. In another of the same weights, which is there only where fixed depths are
    to be measured, all that is offered is verified."""

    def __init__(self, shape: str, memory_gb: float, *, fixed: bool) -> None:
        dtype, bits = USUAL.get(shape, ("bfloat16", None))
        self._free, self._fixed = Synthetic({}, (0.0,)), Synthetic({}, (0.0,))
        made = partial(start, shape, dtype, bits=bits, memory_gb=memory_gb, weights=decided)
        self._auto = made(proposers=(self._free,))
        self._always = made(proposers=(self._fixed,), fixed_draft_tokens=self._fixed.most) if fixed else None
        self._vocab = SHAPES[shape]["vocab_size"] - 1

    def figures(
        self, batch: int, rate: float, depths: Sequence[int], output: int, pairs: int, until: float = math.inf
    ) -> Figures:
        """Where that is later than `until`, on the clock of time.monotonic(), turns are fewer: one at least."""
        asked = requests(f"{batch}-{rate}", batch, 8, output, self._vocab)
        plainly = [replace(request, speculate=NOBODY) for request in asked]
        answers = run(self._auto, plainly).answers
        for guessing in (self._free, self._fixed):
            guessing.answers, guessing.rates = dict(answers), (rate,)
        self._settle(asked, until)
        counts = self._auto.speculation
        judged, right, made = self._free.judged, counts.accepted_tokens, counts.made
        plain, autos = in_turns(partial(run, self._auto, plainly), partial(run, self._auto, asked), pairs, until)
        judged, right = self._free.judged - judged, counts.accepted_tokens - right
        made = counts.made - made
        fixed, always = {}, list[Turn]()
        for depth in depths:
            beside, turns = in_turns(partial(run, self._auto, plainly), partial(self._at, depth, asked), 1, until)
            fixed[depth] = ratio(turns, beside)
            always += turns
        return Figures(
            batch,
            rate,
            len(autos),
            judged,
            right,
            statistics.median(turn.tokens / turn.wall for turn in plain),
            ratio(autos, plain),
            ratio(autos, plain, cpu=True),
            fixed,
            all(turn.answers == answers for turn in (*plain, *autos, *always)),
            made,
        )

    @property
    def rounds(self) -> str:
        """What those took that the controller saw, by rows and tokens."""
        found = sorted(self._auto.speculation.rounds.items())
        return ", ".join(
            f"{rows}/{tokens} {1000 * spent / ran:.2f} ms ({ran})" for (rows, tokens), (ran, spent) in found
        )

    def close(self) -> None:
        for engine in (self._auto, self._always):
            if engine is not None:
                engine.check()
                engine.close()

    def _settle(self, asked: list[Request], until: float) -> None:
        rounds = 0
        while rounds < SETTLED and time.monotonic() < until:
            rounds += run(self._auto, asked).rounds

    def _at(self, depth: int, asked: list[Request]) -> Turn:
        assert self._always is not None, "there is no engine for fixed depths"
        self._fixed.most = depth
        return run(self._always, asked)


def run(engine: Engine, asked: list[Request]) -> Turn:
    """Ask all at once. They are read one after another by this one thread, which so costs the engine nothing."""
    wall, cpu, now = time.perf_counter(), time.process_time(), time.monotonic()
    streams = [engine.generate(replace(request, arrived=now)) for request in asked]
    answers, rounds = {}, 0
    for request, stream in zip(asked, streams, strict=True):
        for event in (event for batch in stream for event in batch):
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, SequenceEnded):
                answers[request.prompts[0]] = event.tokens
            if isinstance(event, Ended):
                rounds = max(rounds, event.speculation.passes)
    tokens = sum(map(len, answers.values()))
    return Turn(tokens, time.perf_counter() - wall, time.process_time() - cpu, answers, rounds)


def in_turns(
    one: Callable[[], Turn], other: Callable[[], Turn], pairs: int, until: float = math.inf
) -> tuple[list[Turn], list[Turn]]:
    """Each so often, one behind the other; who comes first changes. Later than `until` no second pair is begun."""
    ones, others = list[Turn](), list[Turn]()
    for number in range(pairs):
        if ones and time.monotonic() > until:
            break
        if number % 2:
            others.append(other())
        ones.append(one())
        if not number % 2:
            others.append(other())
    return ones, others


def ratio(some: Sequence[Turn], plain: Sequence[Turn], *, cpu: bool = False) -> float:
    """How many times as many tokens a second: the median of the pairs'."""
    speeds = [[turn.tokens / (turn.cpu if cpu else turn.wall) for turn in turns] for turns in (some, plain)]
    return statistics.median(own / other for own, other in zip(*speeds, strict=True))


def main() -> int:
    chosen = _parser().parse_args()
    depths = [int(depth) for depth in chosen.depths.split(",") if depth]
    bench, found = Bench(chosen.shape, chosen.memory_gb, fixed=bool(depths)), []
    batches, rates = (list(map(float, text.split(","))) for text in (chosen.batch, chosen.rates))
    wanted = [(int(batch), rate) for batch in batches for rate in rates]
    until = time.monotonic() + chosen.seconds
    for number, (batch, rate) in enumerate(wanted, 1):
        found.append(bench.figures(batch, rate, depths, chosen.output, chosen.pairs, until))
        print(_line(found[-1]), flush=True)
        if time.monotonic() > until and number < len(wanted):
            print(f"{chosen.seconds:.0f} seconds are over: {wanted[number:]} were skipped (--seconds)")
            break
    print(f"rounds by rows/tokens: {bench.rounds}")
    bench.close()
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(each) for each in found], indent=1))
    return complain(found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-150m")
    parser.add_argument(
        "--rates", default="0.9,0.65,0.5,0.2", help="how often a draft token is right that follows right ones"
    )
    parser.add_argument("--batch", default="1,4,16")
    parser.add_argument(
        "--depths", default="", help="fixed depths to measure as well, such as 1,2,4,8, with a second engine"
    )
    parser.add_argument("--output", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--pairs", type=int, default=3, help="turns of plain and speculative decoding")
    parser.add_argument("--seconds", type=float, default=120.0, help="after which nothing more is started")
    parser.add_argument("--memory-gb", type=float, default=2.0, help="for each engine, besides the weights")
    parser.add_argument("--json", type=Path)
    return parser


def _line(figures: Figures) -> str:
    told = (
        f"batch {figures.batch:2}  rate {figures.rate:.2f}  plain {figures.plain:.4g} tok/s  "
        f"auto {figures.auto:.2f}x  by CPU time {figures.auto_cpu:.2f}x ({figures.pairs} pairs)"
    )
    right = f"  right {figures.right / figures.judged:.2f} of {figures.judged}" if figures.judged else ""
    made = f"  {figures.made} rounds made something" if figures.made else ""
    fixed = "".join(f"  {depth}: {ratio:.2f}x" for depth, ratio in figures.fixed.items())
    best = f"  ({figures.auto / figures.best:.2f} of the best depth)" if figures.fixed else ""
    return told + right + made + fixed + best + ("" if figures.same else "  OTHER TOKENS")


def complain(found: Sequence[Figures]) -> int:
    """What makes figures worthless is an error."""
    for each in found:
        about = f"bench.speculate: batch {each.batch}, rate {each.rate:.2f}"
        if not each.same:
            print(f"{about}: not all variants gave the same tokens", file=sys.stderr)
        if not each.as_asked:
            told = f"{each.right} of {each.judged} guesses were right"
            print(f"{about}: {told}, so this does not measure that rate", file=sys.stderr)
    return 0 if all(each.same and each.as_asked for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
