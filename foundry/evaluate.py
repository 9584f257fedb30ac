"""What a shipped model can do, measured with ingot's own engine: `python -m foundry.evaluate MODEL [--share S]`.

Prints each figure and writes them to the model's evaluation.json. All of it is on held-out seeds and documents.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from foundry import dialect
from foundry.package import MODELS
from foundry.recall import probe_rows
from foundry.rows import lesson, prose_tokens, written
from foundry.shapes import SHAPES
from ingot.config import Settings
from ingot.engine.engine import Engine
from ingot.engine.loading.language_model import start_engine
from ingot.engine.request import Event, Failed, PromptScored, Request, Sampling, TextDelta

LENGTHS = (256, 1024, 2048, 4096)
QUESTIONS = 32
PROSE_ROW = 512
AT_ONCE = 8


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a shipped model with ingot's engine.")
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("--share", type=float, default=1.0, help="measure on this share of the samples")
    asked = parser.parse_args()
    folder = MODELS / asked.model
    figures = dict(_figures(asked.model, folder, asked.share))
    (folder / "evaluation.json").write_text(json.dumps(figures, indent=1) + "\n")


def _figures(model: str, folder: Path, share: float) -> Iterator[tuple[str, Any]]:
    def said(name: str, value: Any) -> tuple[str, Any]:
        print(f"{model} {name}: {json.dumps(value)}", flush=True)
        return name, value

    with running(folder) as engine:
        yield said("perplexity", round(perplexity(engine, max(1, round(64 * share))), 2))
        for length in LENGTHS:
            yield said(f"recall at {length}", recall(engine, length, max(1, round(4 * share))))
        yield said("exact", exactness(engine, SHAPES[model].style, range(max(8, round(200 * share)))))
    if SHAPES[model].mtp:
        from foundry.mtp_acceptance import acceptance

        yield said(
            "mtp acceptance", round(acceptance(folder, SHAPES[model].style, range(max(4, round(60 * share)))), 4)
        )


@contextmanager
def running(folder: Path) -> Iterator[Engine]:
    """ingot's engine over the model in `folder`."""
    engine = start_engine(Settings(), folder, name=folder.name, source=str(folder))
    try:
        yield engine
    finally:
        engine.close()


def perplexity(engine: Engine, rows: int) -> float:
    """Of held-out prose, in rows of PROSE_ROW tokens."""
    tokens = prose_tokens(held_out=True)
    places = np.linspace(0, len(tokens) - PROSE_ROW, rows).astype(int)
    total, count = 0.0, 0
    for place in places:
        scored = _scored(engine, tokens[place : place + PROSE_ROW].tolist(), top=0)
        known = [info.chosen.logprob for info in scored.tokens if info is not None]
        total, count = total + sum(known), count + len(known)
    return math.exp(-total / count)


def recall(engine: Engine, length: int, rows: int, questions: int = QUESTIONS) -> float:
    """The share of values that are the likeliest token after their key, asked for at the end of `length` tokens."""
    probes = probe_rows(length, rows, length, questions)
    right = 0
    for row, counts in zip(probes.tokens.tolist(), probes.weights, strict=True):
        likeliest = [info.top[0].token if info else None for info in _scored(engine, row, top=1).tokens]
        right += sum(likeliest[place] == row[place] for place in np.flatnonzero(counts))
    return right / (rows * questions)


def exactness(engine: Engine, style: str, seeds: range) -> dict[str, float]:
    """By kind of lesson, the share of greedy answers that are right to the last character."""

    def exact(seed: int) -> tuple[str, bool]:
        taught = lesson(seed, held_out=True)
        wanted = dialect.completion(taught, style).removesuffix(dialect.TURN_END)
        asked, answer = written(taught, style)
        said = _text(_events(engine, Request(f"exact-{seed}", (tuple(asked),), len(answer) + 8, sampling=_GREEDY)))
        return taught.kind, said == wanted

    right: dict[str, list[bool]] = {}
    with ThreadPoolExecutor(AT_ONCE) as asking:
        for kind, hit in asking.map(exact, seeds):
            right.setdefault(kind, []).append(hit)
    return {kind: round(float(np.mean(values)), 4) for kind, values in sorted(right.items())}


_GREEDY = Sampling(temperature=0.0)


def _scored(engine: Engine, tokens: list[int], *, top: int) -> PromptScored:
    request = Request("scored", (tuple(tokens),), 1, sampling=Sampling(temperature=0.0, prompt_logprobs=top))
    return next(event for event in _events(engine, request) if isinstance(event, PromptScored))


def _events(engine: Engine, request: Request) -> list[Event]:
    events = [event for batch in engine.generate(request) for event in batch]
    if isinstance(failed := events[-1], Failed):
        raise failed.error
    return events


def _text(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


if __name__ == "__main__":
    main()
