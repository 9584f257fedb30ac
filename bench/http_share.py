"""What HTTP costs: tokens per second of `ingot serve` as a share of the engine's own, in one run, alternating.

python -m bench.http_share
python -m bench.http_share --models dispatch --streams 1,8 --rounds 7 --json shares.json

The engine's own figure is that of an engine in this process, with the same model and settings, whose events one thread
reads. Both get as many requests at once as there are streams. With several numbers of streams, the gain over the first
of them is shown too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench import model_folders, servers
from bench.arguments import numbers, words
from bench.engine import measure, requests
from bench.random_models import SHAPES
from ingot.cli.bench import LoadPlan, LoadTarget, prepare_target, run_level
from ingot.cli.client import ServerError
from ingot.cli.peers.report import surroundings
from ingot.config import Settings
from ingot.engine.engine import Engine
from ingot.engine.loading.language_model import start_engine
from ingot.errors import IngotError
from ingot.models.files.progress import TerminalProgress


@dataclass
class Shares:
    """Tokens per second at one number of streams; `http[i]` and `engine[i]` were measured one right after the other."""

    streams: int
    http: list[float] = field(default_factory=list)
    engine: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Of the medians."""
        return statistics.median(self.http) / statistics.median(self.engine)

    @property
    def share_of_rounds(self) -> list[float]:
        return [through / own for through, own in zip(self.http, self.engine, strict=True)]


def measure_round(target: LoadTarget, engine: Engine, plan: LoadPlan, streams: int, round_: int) -> tuple[float, float]:
    """(through HTTP, the engine's own); the engine gets prompts as long as those that came through HTTP."""
    level = run_level(target, plan, streams)
    if level.errors or level.output_tokens != level.requests * plan.output_tokens:
        raise ServerError(f"{streams} streams: {level.output_tokens} tokens, and errors: {level.errors}")
    prompt = round(level.prompt_tokens / level.requests)
    vocab = engine.card.vocab - 1
    measure(engine, requests(f"warm-up-{round_}-{streams}", plan.warmup, prompt, plan.output_tokens, vocab))
    own = measure(engine, requests(f"{round_}-{streams}", streams, prompt, plan.output_tokens, vocab))
    return level.output_tokens_per_second, own.tokens_per_second


def compare(target: LoadTarget, engine: Engine, plan: LoadPlan, streams: Sequence[int], rounds: int) -> list[Shares]:
    found = {number: Shares(number) for number in streams}
    for round_ in range(rounds):
        for number, shares in found.items():
            through, own = measure_round(target, engine, replace(plan, requests=number, seed=round_), number, round_)
            shares.http.append(through)
            shares.engine.append(own)
            print(f"  round {round_ + 1} of {rounds}, {number} streams: done", file=sys.stderr, flush=True)
    return list(found.values())


def run(model: str, chosen: argparse.Namespace) -> list[Shares]:
    progress = TerminalProgress()
    with tempfile.TemporaryDirectory(prefix="ingot-bench-") as scratch:
        folder = Path(scratch) / model
        progress(f"writing {model}")
        model_folders.write(model, folder, progress)
        progress(f"starting the server and the engine on {model}")
        progress.finish()
        with servers.ingot(folder, Path(scratch) / "ingot.log", max(chosen.streams), own_kernels=True) as server:
            engine = start_engine(Settings(), folder, name=model, source="benchmark")
            try:
                plan = plan_for(server.model, chosen)
                found = compare(prepare_target(server.client, plan), engine, plan, chosen.streams, chosen.rounds)
            finally:
                engine.close()
    _print(model, found)
    return found


def plan_for(model: str, chosen: argparse.Namespace) -> LoadPlan:
    """Completions, as a chat's template begins all prompts alike, and the server would reuse what it knows of that."""
    return LoadPlan(
        endpoint="completions",
        model=model,
        prompt_tokens=chosen.prompt_tokens,
        output_tokens=chosen.output_tokens,
    )


def _print(model: str, found: Sequence[Shares]) -> None:
    first = found[0]
    print(f"\n{model}\n{'streams':>7}{'HTTP tok/s':>12}{'engine tok/s':>14}{'share':>8}{'rounds':>16}", end="")
    print(f"   gain over {first.streams} over HTTP, in the engine")
    for shares in found:
        http, engine = statistics.median(shares.http), statistics.median(shares.engine)
        rounds = f"{min(shares.share_of_rounds):.0%} to {max(shares.share_of_rounds):.0%}"
        gains = f"{http / statistics.median(first.http):.2f}x, {engine / statistics.median(first.engine):.2f}x"
        print(f"{shares.streams:>7}{http:>12.1f}{engine:>14.1f}{shares.share:>8.0%}{rounds:>16}   {gains}", flush=True)


def as_json(model: str, found: Sequence[Shares]) -> dict[str, Any]:
    return {
        "model": model,
        "levels": [
            {"streams": each.streams, "share": each.share, "http_rounds": each.http, "engine_rounds": each.engine}
            for each in found
        ],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "bench.http_share", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    known = (model_folders.DEFAULT, *SHAPES)
    parser.add_argument("--models", type=words(known), default=("dispatch", "default"), help=f"of {', '.join(known)}")
    parser.add_argument("--streams", type=numbers, default=(1, 8, 16), help="default: 1,8,16")
    parser.add_argument("--prompt-tokens", type=int, default=96, help="approximate (default: 96)")
    parser.add_argument("--output-tokens", type=int, default=64, help="default: 64")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--json", type=Path, help="write every round's figures here")
    chosen = parser.parse_args(arguments)
    around = surroundings()
    try:
        found = {model: run(model, chosen) for model in chosen.models}
    except IngotError as error:
        print(f"bench.http_share: {error.message}", file=sys.stderr)
        return 1
    if chosen.json:
        report = {"surroundings": around, "models": [as_json(model, shares) for model, shares in found.items()]}
        chosen.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
