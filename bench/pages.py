"""Memory and cost of the KV cache: a long row alongside short ones, and many agents with one prompt.

python -m bench.pages --shape dispatch
python -m bench.pages --shape llama-8b --dtype bfloat16 --long 60000 --agents 16 --memory-gb 60

Prints the allocated KV memory relative to what sequences hold, at most; the longest wait of a short stream for a token
while a long one joined, grew and left, relative to the longest step that the engine planned; and the KV of agents that
share a prompt, relative to that of one of them.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections.abc import Iterator

from bench.engine import start
from bench.random_models import SHAPES
from ingot.cache.pages import PAGE
from ingot.engine.engine import Engine
from ingot.engine.request import Failed, Request, Sampling, Stop
from ingot.errors import Cancelled


class Gauge:
    """Looks on while the engine runs: at what states take, and at what sequences and records hold of it."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._done = engine, threading.Event()
        self.taken = self.held = 0
        self.worst = 0.0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(0.05):
            taken, held = self._engine.memory()
            self.taken, self.held = max(self.taken, taken), max(self.held, held)
            self.worst = max(self.worst, taken / held if held else 0.0)

    def close(self) -> None:
        self._done.set()
        self._thread.join()


def request(name: str, tokens: tuple[int, ...], output: int) -> Request:
    return Request(name, (tokens,), max_tokens=output, sampling=Sampling(temperature=0.0), stop=Stop(ignore_eos=True))


def prompts(vocab: int) -> Iterator[tuple[int, ...]]:
    dice = random.Random(5)
    while True:
        yield tuple(dice.randrange(vocab) for _ in range(256))


def waits(engine: Engine, asked: Request, into: list[float]) -> None:
    """The gaps between a stream's tokens."""
    last: float | None = None
    for batch in engine.generate(asked):
        if isinstance(batch[-1], Failed) and not isinstance(batch[-1].error, Cancelled):
            raise batch[-1].error
        now = time.monotonic()
        if last is not None:
            into.append(now - last)
        last = now


def beside(engine: Engine, vocab: int, long: int, short: int) -> None:
    make, dice = prompts(vocab), random.Random(1)
    alone: list[float] = []
    waits(engine, request("alone", next(make), 200), alone)
    gaps: list[list[float]] = [[] for _ in range(short)]
    threads = [
        threading.Thread(target=waits, args=(engine, request(f"s{number}", next(make), 2000), gaps[number]))
        for number in range(short)
    ]
    for thread in threads:
        thread.start()
    while min(map(len, gaps)) < 20:
        time.sleep(0.05)
    before = [max(own[5:]) for own in gaps]
    mark = [len(own) for own in gaps]
    gauge = Gauge(engine)
    began = time.monotonic()
    joined: list[float] = []
    waits(engine, request("long", tuple(dice.randrange(vocab) for _ in range(long)), 50), joined)
    took = time.monotonic() - began
    time.sleep(1.0)
    for number in range(short):
        engine.cancel(f"s{number}")
    for thread in threads:
        thread.join()
    gauge.close()
    during = [max(own[at:], default=0.0) for own, at in zip(gaps, mark, strict=True)]
    print(
        f"a row of {long} alongside {short}: {took:.1f} s; KV {gauge.taken / 1e9:.2f} GB "
        f"for {gauge.held / 1e9:.2f} GB held ({gauge.worst:.2f}x at most); a short stream waited "
        f"{1000 * max(before):.0f} ms at most before it, {1000 * max(during):.0f} ms while it joined, grew and left",
        flush=True,
    )


def shared(engine: Engine, vocab: int, agents: int, prefix: int) -> None:
    dice = random.Random(2)
    system = tuple(dice.randrange(vocab) for _ in range(prefix))
    for batch in engine.generate(request("first", system, 2)):
        assert not isinstance(batch[-1], Failed)
    _, one = engine.memory()
    gauge = Gauge(engine)
    asked = [request(f"a{n}", (*system, *(dice.randrange(vocab) for _ in range(40))), 200) for n in range(agents)]
    for stream in [engine.generate(each) for each in asked]:
        for _ in stream:
            pass
    gauge.close()
    print(
        f"{agents} agents with a prompt of {prefix}: {gauge.held / 1e6:.1f} MB; the prompt alone {one / 1e6:.1f} MB "
        f"({gauge.held / one:.2f}x; {agents}x if each had its own); pages of {PAGE}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="dispatch")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--long", type=int, default=8000)
    parser.add_argument("--short", type=int, default=7)
    parser.add_argument("--agents", type=int, default=16)
    parser.add_argument("--prefix", type=int, default=4096)
    parser.add_argument("--memory-gb", type=float, default=4.0)
    chosen = parser.parse_args()
    engine = start(chosen.shape, chosen.dtype, memory_gb=chosen.memory_gb, context=2 * chosen.long, cache_gb=1.0)
    vocab = SHAPES[chosen.shape]["vocab_size"] - 1
    beside(engine, vocab, chosen.long, chosen.short)
    engine.kept.clear("")
    shared(engine, vocab, chosen.agents, chosen.prefix)
    engine.check()
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
