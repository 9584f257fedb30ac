"""Train one model: `python -m foundry.train MODEL --minutes M --out DIR`.

Writes DIR/model.safetensors (bfloat16, tensor names as published checkpoints have them) and DIR/training.json
(what was run, the losses on the way, the figures at the end). `foundry.package` makes a model folder of them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from pathlib import Path
from typing import Any

import torch

from foundry.feed import Batch, Feed
from foundry.measure import measured
from foundry.network import Network
from foundry.recall import pairs_in
from foundry.shapes import SHAPES
from foundry.step import FIGURES, Updater
from foundry.tensors import save
from foundry.versions import versions

WARM_STEPS = 100
LONG_FROM = 0.3
"""The part of the time after which long rows come in, at the latest."""
LONG_SHARE = 0.3
EASY_KEYS, SHORT_KEYS, LONG_KEYS = 32, 300, 1400
DRILLS: list[tuple[int, int | None]] = [(16, 64), (32, 256), (64, 1024), (128, None), (256, None), (512, None)]
"""Row length and number of different words of the recall drills. Attention learns to look a key up within a few
hundred steps where a row holds two or three, and not at all, in any time we have, where it starts with more."""


def main() -> None:
    asked = arguments()
    torch.manual_seed(asked.seed)
    random.seed(asked.seed)
    torch.set_float32_matmul_precision("high")
    shape = SHAPES[asked.model]
    feed = Feed(shape.style, asked.device, processes=asked.writers, seed=asked.seed, divisor=asked.divisor)
    network = Network(shape).to(asked.device)
    size = sum(parameter.numel() for parameter in network.parameters())
    print(f"{asked.model}: {size / 1e6:.2f} million parameters", flush=True)
    if asked.compile:
        torch._dynamo.config.recompile_limit = 64
        torch._dynamo.config.suppress_errors = True
        network.compile_layers()
    trainer = Trainer(network, feed, asked.device, rate=shape.rate)
    trainer.run(asked.minutes * 60)
    feed.stop()
    asked.out.mkdir(parents=True, exist_ok=True)
    save(network, asked.out / "model.safetensors")
    # Measuring sees many shapes once each: not worth compiling for.
    with torch.compiler.set_stance("force_eager"):
        figures = measured(network, shape.style, asked.device, share=asked.share)
    record = {
        "model": asked.model,
        "parameters": size,
        "seed": asked.seed,
        "minutes": asked.minutes,
        "compiled": asked.compile,
        "versions": versions(),
        "rows_written": {kind: feed.written(kind) for kind in ("short", "long")},
        "steps": trainer.steps,
        "tokens": trainer.tokens,
        "figures": figures,
        "log": trainer.log,
    }
    (asked.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    print(asked.model, json.dumps(figures), flush=True)
    # The writers' queues may still hold rows, which would keep the process waiting for a reader.
    os._exit(0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train one of the foundry's language models.")
    parser.add_argument("model", choices=[name for name, shape in SHAPES.items() if not shape.made_of])
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", action="store_true", help="compile the layers, which takes about a minute")
    parser.add_argument("--writers", type=int, default=3, help="processes that write lessons")
    parser.add_argument("--divisor", type=int, default=1, help="make batches this much smaller")
    parser.add_argument("--share", type=float, default=1.0, help="measure on this share of the samples")
    return parser.parse_args()


class Trainer:
    def __init__(self, network: Network, feed: Feed, device: str, *, rate: float) -> None:
        self._feed, self._rate = feed, rate
        self._updater = Updater(network, device, rate=rate)
        self.steps = self.tokens = 0
        self.log: list[dict[str, Any]] = []
        self._most_keys, self._drill = EASY_KEYS, 0
        self._chance = random.Random(0)
        self._recall = 0.0

    def run(self, seconds: float) -> None:
        start = said = time.monotonic()
        while (elapsed := time.monotonic() - start) < seconds:
            progress = elapsed / seconds
            warm = min(1.0, (self.steps + 1) / WARM_STEPS)
            self._updater.set_rate(self._rate * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))))
            batch = self._next(progress)
            figures = self._updater.update(batch)
            self.steps += 1
            self.tokens += batch.tokens.numel()
            if self.steps % 10 == 0:
                self._advance(float(figures[-1]))
                self._feed.refresh()
            if time.monotonic() - said > 5:
                said = time.monotonic()
                self._say(said - start, figures)

    def _next(self, progress: float) -> Batch:
        """Every other batch is a drill until all drills are done; later some batches have long rows."""
        drilling = self._drill < len(DRILLS)
        if drilling and self.steps % 2 == 1:
            length, words = DRILLS[self._drill]
            return self._feed.drill(length, self._chance.randint(2, max(2, pairs_in(length) // 2)), words)
        most = self._most_keys
        ready = progress > LONG_FROM or most >= SHORT_KEYS
        if ready and self._chance.random() < LONG_SHARE:
            return self._feed.batch("long", self._chance.randint(most // 2, min(LONG_KEYS, 4 * most)))
        return self._feed.batch("short", self._chance.randint(most // 4, most))

    def _advance(self, accuracy: float) -> None:
        """A harder drill, or more keys, as soon as most of the present ones are recalled."""
        self._recall = 0.7 * self._recall + 0.3 * accuracy
        if self._recall < 0.9:
            return
        self._recall = 0.0
        if self._drill < len(DRILLS):
            self._drill += 1
        else:
            self._most_keys = min(SHORT_KEYS, self._most_keys * 2)

    def _say(self, elapsed: float, figures: torch.Tensor) -> None:
        line = {"seconds": round(elapsed), "step": self.steps, "drill": self._drill, "keys": self._most_keys}
        line |= {name: round(value, 3) for name, value in zip(FIGURES, figures.tolist(), strict=True)}
        self.log.append(line)
        speed = self.tokens / elapsed / 1e3
        print(
            " ".join(f"{key} {value}" for key, value in line.items()),
            f"{speed:.0f}K tokens/s",
            self._updater.eager_because or "",
            flush=True,
        )


if __name__ == "__main__":
    main()
