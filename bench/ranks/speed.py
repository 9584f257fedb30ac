"""The speed of ranks on this machine relative to one process with all of its cores, alternating.

    python -m bench.ranks speed [--model llama-150m] [--ranks 2] [--streams 1,8] [--rounds 3]

Over TCP on one machine ranks are slower: this shows what their sums cost, not what a second machine gains.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench import model_folders, servers
from bench.arguments import numbers
from bench.random_models import SHAPES
from ingot.cli.bench import LoadPlan, LoadTarget, prepare_target, run_level
from ingot.cli.client import ServerError
from ingot.models.files.progress import TerminalProgress


def compare(targets: Sequence[LoadTarget], plan: LoadPlan, streams: int, rounds: int) -> list[float]:
    """Tokens a second that each gives, the median of the rounds. Raises ServerError."""
    found: list[list[float]] = [[] for _ in targets]
    for round_ in range(rounds):
        for target, figures in zip(targets, found, strict=True):
            level = run_level(target, replace(plan, model=target.model, requests=streams, seed=round_), streams)
            if level.failed:
                raise ServerError(f"{level.failed} requests failed: {next(iter(level.errors))}")
            figures.append(level.output_tokens_per_second)
    return [statistics.median(figures) for figures in found]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "bench.ranks speed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="llama-150m", help="with random weights")
    parser.add_argument("--streams", type=numbers, default=(1, 8))
    for name, default in (("ranks", 2), ("rounds", 3), ("prompt-tokens", 64), ("output-tokens", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args(arguments)
    plan = LoadPlan(prompt_tokens=asked.prompt_tokens, output_tokens=asked.output_tokens)
    most = max(asked.streams)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        model_folders.write(asked.model, folder, TerminalProgress())
        group = ("--hosts", str(asked.ranks))
        with (
            servers.ingot(folder, Path(name) / "one.log", most, own_kernels=True) as one,
            servers.ingot(folder, Path(name) / "group.log", most, own_kernels=True, flags=group) as several,
        ):
            targets = [prepare_target(each.client, replace(plan, model=each.model)) for each in (one, several)]
            for streams in asked.streams:
                alone, together = compare(targets, plan, streams, asked.rounds)
                print(
                    f"{asked.model}, {streams} at once: {alone:.1f} tokens/s by one process, {together:.1f} by "
                    f"{asked.ranks} ranks ({together / alone:.2f}x)",
                    flush=True,
                )
