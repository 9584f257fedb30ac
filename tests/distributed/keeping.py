"""Prompts that come again when memory has no room for what was kept of them, or none of it any more: asked of a group
of ranks, and of one process alone."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.config import Settings
from ingot.distributed.follower import run_follower
from ingot.distributed.place import read_rank_config
from ingot.engine import prefix_cache
from ingot.engine.engine import Engine
from ingot.engine.request import Ended, Request
from tests.distributed.playing import GREEDY, ON, prompt, started
from tests.engines import answer, text_of

ENCOURAGED = {"COMPRESSION_SLICE_S": 60.0, "FIRST_DECODING_SPEED": 1e12}
"""Of `condensing`, so that records are encoded rather than dropped however slow the machine is."""


@dataclass
class Kept:
    """Answers, and of each what it took over: the codec, tokens, and those of them that were read from disk."""

    texts: list[str]
    taken: list[tuple[str, int, int]]


def play(engine: Engine, count: int = 4) -> Kept:
    """So many prompts; then the same again, whole, and parting inside of a page."""
    prompts = [prompt(each, 300) for each in range(count)]
    parting = [(*tokens[:200], *prompt(70, 30)) for tokens in prompts]
    cached = Kept([], [])
    for number, tokens in enumerate([*prompts, *prompts, *parting]):
        events = answer(engine, Request(f"{number}", (tokens,), 4, sampling=GREEDY, stop=ON))
        ended = events[-1]
        assert isinstance(ended, Ended)
        [report] = ended.cache
        cached.texts.append(text_of(events))
        cached.taken.append((report.codec, report.matched, report.read))
    engine.check()
    return cached


def played(folder: Path, settings: Settings) -> Kept:
    engine = started(folder, settings)
    try:
        return play(engine)
    finally:
        engine.close()


def settings_of(asked: dict[str, Any]) -> Settings:
    """As JSON has them."""
    return Settings(**{name: Path(value) if name == "cache_dir" else value for name, value in asked.items()})


def main(games: list[tuple[str, dict[str, Any]]]) -> None:
    """One after another, by the same processes, each with an engine that knows nothing of the one before."""
    for name, value in ENCOURAGED.items():
        setattr(prefix_cache, name, value)
    where = read_rank_config(os.environ)
    for folder, asked in games:
        settings = settings_of(asked)
        if where is not None and where.rank:
            run_follower(settings, Path(folder), where, lambda step: None)
        else:
            print(json.dumps(asdict(played(Path(folder), settings))), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
