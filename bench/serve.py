"""ingot against mlx_lm.server: the same weights, prompts, kernels and machine, in one run, turn by turn.

python -m bench.serve                        the default model and a random one, at 1, 4 and 16 streams
python -m bench.serve --quick                a small load, to see that it works; its ratios mean little
python -m bench.serve --models default --json figures.json --plot figures.png
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench import comparison_report as report
from bench import model_folders, servers
from bench.comparison import Duel, Figures, unequal
from bench.random_models import SHAPES
from ingot.cli.bench.load import PATHS, LoadPlan, Target, prepare, run_level
from ingot.cli.bench.report import require_plot
from ingot.cli.bench.stats import Level
from ingot.cli.client import ServerError
from ingot.errors import IngotError
from ingot.models.files.progress import TerminalProgress

OURS, THEIRS = "ingot", "mlx_lm.server"


@dataclass(frozen=True, slots=True)
class Load:
    streams: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    rounds: int
    requests_per_stream: int
    least_requests: int
    endpoint: str

    def plan(self, model: str, streams: int, round_: int) -> LoadPlan:
        """No prompt comes twice in a run: mlx_lm.server does not survive one that its cache holds whole."""
        return LoadPlan(
            endpoint=self.endpoint,
            model=model,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            requests=max(self.least_requests, self.requests_per_stream * streams),
            seed=round_,
        )


USUAL = Load((1, 4, 16), 192, 64, rounds=3, requests_per_stream=2, least_requests=4, endpoint="chat")
QUICK = Load((1, 4), 64, 16, rounds=1, requests_per_stream=1, least_requests=2, endpoint="chat")


@contextmanager
def started(folder: Path, load: Load) -> Iterator[tuple[Target, Target]]:
    """Both servers on one folder, asked for prompts of the same words."""
    logs = folder.parent
    most = max(load.streams)
    with (
        servers.ingot(folder, logs / "ingot.log", most) as ours,
        servers.mlx_lm(folder, logs / "mlx_lm.log", most) as theirs,
    ):
        target = prepare(ours.client, load.plan(ours.model, 1, 0))
        yield target, Target(theirs.client, theirs.model, is_ingot=False, words=target.words)


def measure(targets: tuple[Target, Target], load: Load, streams: int, round_: int) -> tuple[Level, Level]:
    """One right after the other; who goes first changes with the round."""
    found: dict[int, Level] = {}
    for side in (0, 1) if round_ % 2 == 0 else (1, 0):
        found[side] = run_level(targets[side], load.plan(targets[side].model, streams, round_), streams)
    problem = unequal([found[0], found[1]], load.output_tokens)
    if problem is not None:
        raise ServerError(f"{streams} streams: {problem}")
    return found[0], found[1]


def compare(model: str, targets: tuple[Target, Target], load: Load) -> report.Match:
    duels = {streams: Duel(streams) for streams in load.streams}
    prompts: list[float] = []
    for round_ in range(load.rounds):
        for streams, duel in duels.items():
            ours, theirs = measure(targets, load, streams, round_)
            duel.ours.append(Figures.of(ours))
            duel.theirs.append(Figures.of(theirs))
            prompts.append(ours.prompt_tokens / ours.requests)
            print(f"  round {round_ + 1} of {load.rounds}, {streams} streams: done", file=sys.stderr, flush=True)
    return report.Match(model, sum(prompts) / len(prompts), load.output_tokens, list(duels.values()))


def run(model: str, load: Load) -> report.Match:
    progress = TerminalProgress()
    with tempfile.TemporaryDirectory(prefix="ingot-bench-") as scratch:
        folder = Path(scratch) / model
        progress(f"writing {model}")
        model_folders.write(model, folder, progress)
        progress(f"starting {OURS} and {THEIRS} on {model}")
        progress.finish()
        with started(folder, load) as targets:
            match = compare(model, targets, load)
    print(f"\n{model}: {match.prompt_tokens:.0f} tokens in, {match.output_tokens} out, {load.rounds} rounds")
    for row in (report.HEAD, *(row for duel in match.duels for row in report.rows(duel, OURS, THEIRS))):
        print(row, flush=True)
    return match


def surroundings() -> dict[str, Any]:
    """What the figures depend on besides the servers. The load is that of the minute before."""
    packages = {name: version(name) for name in ("ingot", "mlx", "mlx-lm")}
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        **packages,
    }


def read(arguments: Sequence[str]) -> tuple[argparse.Namespace, Load]:
    parser = argparse.ArgumentParser("bench.serve", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    known = [model_folders.DEFAULT, *SHAPES]
    parser.add_argument("--quick", action="store_true", help="a small load; the flags below change it further")
    parser.add_argument("--models", type=words(known), default=("dispatch", "default"), help=f"of {', '.join(known)}")
    parser.add_argument("--streams", type=numbers, help=f"default: {','.join(map(str, USUAL.streams))}")
    parser.add_argument("--prompt-tokens", type=int, help=f"about so many (default: {USUAL.prompt_tokens})")
    parser.add_argument("--output-tokens", type=int, help=f"default: {USUAL.output_tokens}")
    parser.add_argument("--rounds", type=int, help=f"default: {USUAL.rounds}")
    parser.add_argument("--requests-per-stream", type=int, help=f"in a round (default: {USUAL.requests_per_stream})")
    parser.add_argument("--endpoint", choices=tuple(PATHS), help=f"default: {USUAL.endpoint}")
    parser.add_argument("--json", type=Path, help="write every round's figures here")
    parser.add_argument("--plot", type=Path, help="draw them here (.png, .svg or .pdf)")
    chosen = parser.parse_args(arguments)
    names = ("streams", "prompt_tokens", "output_tokens", "rounds", "requests_per_stream", "endpoint")
    given = {name: vars(chosen)[name] for name in names if vars(chosen)[name] is not None}
    return chosen, replace(QUICK if chosen.quick else USUAL, **given)


def words(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """For argparse: names with commas between them, each of them known."""

    def read(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return names

    return read


def numbers(text: str) -> tuple[int, ...]:
    """For argparse: whole numbers with commas between them."""
    found = tuple(int(part) for part in text.split(","))
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{min(found)} is less than 1")
    return found


def verdict(matches: Sequence[report.Match]) -> str:
    behind = [f"{match.model} at {duel.streams}" for match in matches for duel in match.duels if not duel.ahead]
    where = f"everywhere but on {', '.join(behind)}" if behind else "everywhere"
    return f"{OURS} is ahead of {THEIRS} in throughput and in TTFT {where}"


def main(arguments: Sequence[str] | None = None) -> int:
    chosen, load = read(sys.argv[1:] if arguments is None else arguments)
    around = surroundings()
    try:
        if chosen.plot:
            require_plot(chosen.plot)
        matches = [run(model, load) for model in chosen.models]
    except IngotError as error:
        print(f"bench.serve: {error.message}", file=sys.stderr)
        return 1
    print(f"\n{verdict(matches)}")
    if chosen.json:
        found = {"surroundings": around, "matches": [report.as_json(match, OURS, THEIRS) for match in matches]}
        chosen.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if chosen.plot:
        report.write_plot(chosen.plot, matches, OURS, THEIRS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
