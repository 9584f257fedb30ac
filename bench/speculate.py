"""What guessing ahead gains where a given share of guesses is right: plain against the controller's choice and against
each fixed depth, in turns, on a random model of a given shape.

python -m bench.speculate --shape llama-150m
python -m bench.speculate --shape llama-8b --dtype bfloat16 --rates 0.9,0.65,0.5,0.2 --batch 1,4,16 --depths 1,2,4,8
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from bench.engine import measure, requests, start
from bench.random_models import SHAPES
from bench.synthetic import Prompt, Synthetic
from ingot.engine.engine import Engine
from ingot.engine.request import Failed, Request, SequenceEnded

NOBODY: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Figures:
    batch: int
    rate: float
    plain: float  # tokens a second while all streams decode
    auto: float  # over plain, like all that follow
    fixed: dict[int, float]  # by depth
    same: bool  # every way gave the same tokens

    @property
    def best(self) -> float:
        """At the best fixed depth, none included."""
        return max(1.0, *self.fixed.values())


class Bench:
    """Two engines of the same weights: in one the controller decides, in the other all that is offered is verified."""

    def __init__(self, shape: str, dtype: str, memory_gb: float) -> None:
        self._free, self._fixed = Synthetic({}, (0.0,)), Synthetic({}, (0.0,))
        self._auto = start(shape, dtype, memory_gb=memory_gb, proposers=(self._free,))
        self._always = start(
            shape, dtype, memory_gb=memory_gb, proposers=(self._fixed,), guessed_tokens=self._free.most
        )
        self._vocab = SHAPES[shape]["vocab_size"] - 1

    def figures(self, batch: int, rate: float, depths: list[int], prompt: int, output: int, turns: int) -> Figures:
        asked = requests(f"{batch}-{rate}", batch, prompt, output, self._vocab)
        plainly = [replace(request, speculate=NOBODY) for request in asked]
        answers = rehearse(self._auto, plainly)
        for guessing in (self._free, self._fixed):
            guessing.answers, guessing.rates = dict(answers), (rate,)
        ways: dict[str, Callable[[], float]] = {
            "plain": partial(_speed, self._auto, plainly),
            "auto": partial(_speed, self._auto, asked),
            **{str(depth): partial(self._at, depth, asked) for depth in depths},
        }
        speeds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(turns):
            for name, way in ways.items():
                speeds[name].append(way())
        plain = statistics.median(speeds["plain"])
        ratios = {name: statistics.median(some) / plain for name, some in speeds.items()}
        same = rehearse(self._auto, asked) == answers == rehearse(self._always, asked)
        return Figures(batch, rate, plain, ratios["auto"], {depth: ratios[str(depth)] for depth in depths}, same)

    def close(self) -> None:
        for engine in (self._auto, self._always):
            engine.check()
            engine.close()

    def _at(self, depth: int, asked: list[Request]) -> float:
        self._fixed.most = depth
        return _speed(self._always, asked)


def rehearse(engine: Engine, asked: list[Request]) -> dict[Prompt, tuple[int, ...]]:
    """What each prompt is answered."""
    streams = [engine.generate(request) for request in asked]
    answers = {}
    for request, stream in zip(asked, streams, strict=True):
        for event in (event for batch in stream for event in batch):
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, SequenceEnded):
                answers[request.prompts[0]] = event.tokens
    return answers


def _speed(engine: Engine, asked: list[Request]) -> float:
    now = time.monotonic()
    return measure(engine, [replace(request, arrived=now) for request in asked]).decode_tokens_per_second


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-150m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument(
        "--rates", default="0.9,0.65,0.5,0.2", help="how often a guess is right that follows right ones"
    )
    parser.add_argument("--batch", default="1,4,16")
    parser.add_argument("--depths", default="1,2,4,8")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--memory-gb", type=float, default=4.0, help="for each of two engines, besides the weights")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    bench, found = Bench(chosen.shape, chosen.dtype, chosen.memory_gb), []
    depths = [int(depth) for depth in chosen.depths.split(",")]
    for batch in (int(number) for number in chosen.batch.split(",")):
        for rate in (float(number) for number in chosen.rates.split(",")):
            found.append(bench.figures(batch, rate, depths, chosen.prompt, chosen.output, chosen.turns))
            print(_line(found[-1]), flush=True)
    bench.close()
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(each) for each in found], indent=1))
    return 0 if all(each.same for each in found) else 1


def _line(figures: Figures) -> str:
    fixed = "  ".join(f"{depth}: {ratio:.2f}x" for depth, ratio in figures.fixed.items())
    told = (
        f"batch {figures.batch:2}  right {figures.rate:.2f}  plain {figures.plain:.4g} tok/s  auto {figures.auto:.2f}x"
    )
    return f"{told} ({figures.auto / figures.best:.2f} of the best)  {fixed}{'' if figures.same else '  OTHER TOKENS'}"


if __name__ == "__main__":
    sys.exit(main())
