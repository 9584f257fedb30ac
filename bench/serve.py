"""ingot against mlx_lm.server: the same weights, prompts, kernels and machine, in one run, alternating.

python -m bench.serve                        the default model and a random one, at 1, 4 and 16 streams
python -m bench.serve --quick                a small load, to see that it works; its ratios mean little
python -m bench.serve --models default --json figures.json --plot figures.png
taskset -c 0 python -m bench.serve --beside --busy 1
                                             only ingot: prompts alongside a stream against prompts alone, on a core
                                             that another process uses as well
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from bench import comparison_report as report
from bench import model_folders, servers
from bench.comparison import Duel, Figures, unequal
from bench.random_models import SHAPES
from ingot.cli.bench import (
    ENDPOINT_PATHS,
    LoadLevel,
    LoadPlan,
    LoadTarget,
    prepare_target,
    request_body,
    require_plotting,
    run_level,
)
from ingot.cli.bench import measure_request as request
from ingot.cli.client import ServerError
from ingot.errors import IngotError
from ingot.models.files.progress import TerminalProgress

OURS, THEIRS = "ingot", "mlx_lm.server"
ENDLESS, STREAM_WORDS, STREAM_TOKENS = 4000, 8, 8
"""Of the stream beside which prompts are computed: its most tokens, its words, its tokens before the prompt comes."""


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
def started(folder: Path, load: Load) -> Iterator[tuple[LoadTarget, LoadTarget]]:
    """Both servers on one folder, asked for prompts of the same words."""
    logs = folder.parent
    most = max(load.streams)
    with (
        servers.ingot(folder, logs / "ingot.log", most) as ours,
        servers.mlx_lm(folder, logs / "mlx_lm.log", most) as theirs,
    ):
        target = prepare_target(ours.client, load.plan(ours.model, 1, 0))
        yield target, LoadTarget(theirs.client, theirs.model, is_ingot=False, words=target.words)


def measure(
    targets: tuple[LoadTarget, LoadTarget], load: Load, streams: int, round_: int
) -> tuple[LoadLevel, LoadLevel]:
    """One right after the other; who goes first changes with the round."""
    found: dict[int, LoadLevel] = {}
    for side in (0, 1) if round_ % 2 == 0 else (1, 0):
        found[side] = run_level(targets[side], load.plan(targets[side].model, streams, round_), streams)
    problem = unequal([found[0], found[1]], load.output_tokens)
    if problem is not None:
        raise ServerError(f"{streams} streams: {problem}")
    return found[0], found[1]


def compare(model: str, targets: tuple[LoadTarget, LoadTarget], load: Load) -> report.Match:
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


@dataclass(frozen=True, slots=True)
class Beside:
    """Prompt tokens per second of one prompt by itself and beside a stream, and that stream's waits meanwhile."""

    alone: float
    beside: float
    waits: tuple[float, ...]

    @property
    def kept(self) -> float:
        return self.beside / self.alone


def prompt_speed(target: LoadTarget, plan: LoadPlan, name: str) -> float:
    """Prompt tokens per second up to the first token, which is the only one."""
    sample = request(target.client, ENDPOINT_PATHS[plan.endpoint], request_body(target, plan, name))
    if sample.error is not None or not sample.prompt_tokens:
        raise ServerError(sample.error or "the server says nothing of the prompt's length")
    return sample.prompt_tokens / (sample.ended - sample.started)


class Stream:
    """An answer that goes on until it is left."""

    def __init__(self, target: LoadTarget, plan: LoadPlan, name: str) -> None:
        self.arrivals: list[float] = []
        self._left = False
        body = request_body(replace(target, words=STREAM_WORDS), replace(plan, output_tokens=ENDLESS), name)
        self._events = target.client.stream(ENDPOINT_PATHS[plan.endpoint], body)
        self._flows = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        try:
            for event in self._events:
                self.arrivals.append(event.at)
                if len(self.arrivals) > STREAM_TOKENS:
                    self._flows.set()
                if self._left:
                    return
        finally:
            self._events.close()
            self._flows.set()

    def __enter__(self) -> Stream:
        self._thread.start()
        self._flows.wait()
        if not self._thread.is_alive():
            raise ServerError("the stream ended before the prompt came")
        return self

    def __exit__(self, *_: object) -> None:
        self._left = True
        self._thread.join()

    def waits(self, since: float, until: float) -> tuple[float, ...]:
        """Seconds between its tokens in that time. Several that come at once are one."""
        within = sorted({round(at, 3) for at in self.arrivals if since <= at <= until})
        return tuple(later - sooner for sooner, later in pairwise(within))


def measure_beside(target: LoadTarget, plan: LoadPlan, round_: int) -> Beside:
    """By turns: what goes first changes with the round."""
    found: dict[str, float] = {}
    waits: tuple[float, ...] = ()
    for side in ("alone", "beside") if round_ % 2 == 0 else ("beside", "alone"):
        if side == "alone":
            found[side] = prompt_speed(target, plan, f"alone {round_}")
            continue
        with Stream(target, plan, f"stream {round_}") as stream:
            since = time.perf_counter()
            found[side] = prompt_speed(target, plan, f"beside {round_}")
            waits = stream.waits(since, time.perf_counter())
    return Beside(found["alone"], found["beside"], waits)


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many others on the cores that this process may use."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def run_beside(model: str, load: Load, others: int) -> list[Beside]:
    """ingot as it comes, with its own kernels."""
    with tempfile.TemporaryDirectory(prefix="ingot-bench-") as scratch:
        folder = None if model == model_folders.DEFAULT else Path(scratch) / model
        if folder is not None:
            model_folders.write(model, folder, TerminalProgress())
        with servers.ingot(folder, Path(scratch) / "ingot.log", 1, own_kernels=True) as ours, busy(others):
            plan = replace(load.plan(ours.model, 1, 0), output_tokens=1)
            target = prepare_target(ours.client, plan)
            prompt_speed(target, plan, "warm-up")
            rounds = []
            for round_ in range(load.rounds):
                rounds.append(measure_beside(target, plan, round_))
                print(beside_row(str(round_ + 1), rounds[-1]), flush=True)
    print(f"{model}: the median of {len(rounds)} rounds keeps {median(each.kept for each in rounds):.0%}")
    return rounds


def beside_row(name: str, round_: Beside) -> str:
    waits = sorted(round_.waits) or [0.0]
    return (
        f"  round {name}: {round_.alone:.1f} prompt tokens/s alone, {round_.beside:.1f} beside a stream "
        f"({round_.kept:.0%}), whose tokens then took {median(waits):.2f} s (median) and {waits[-1]:.2f} s (most)"
    )


def surroundings() -> dict[str, Any]:
    """What the figures depend on besides the servers. The load is that of the minute before."""
    packages = {name: version(name) for name in ("ingot-mlx", "mlx", "mlx-lm")}
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
    parser.add_argument("--prompt-tokens", type=int, help=f"approximate (default: {USUAL.prompt_tokens})")
    parser.add_argument("--output-tokens", type=int, help=f"default: {USUAL.output_tokens}")
    parser.add_argument("--rounds", type=int, help=f"default: {USUAL.rounds}")
    parser.add_argument("--requests-per-stream", type=int, help=f"in a round (default: {USUAL.requests_per_stream})")
    parser.add_argument("--endpoint", choices=tuple(ENDPOINT_PATHS), help=f"default: {USUAL.endpoint}")
    parser.add_argument("--beside", action="store_true", help="only ingot: prompts alongside a stream and alone")
    parser.add_argument("--busy", type=int, default=0, help="with --beside: this many busy processes on the same cores")
    parser.add_argument("--json", type=Path, help="write every round's figures here")
    parser.add_argument("--plot", type=Path, help="plot them here (.png, .svg or .pdf)")
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
            require_plotting(chosen.plot)
        if chosen.beside:
            measured = {model: run_beside(model, load, chosen.busy) for model in chosen.models}
        else:
            matches = [run(model, load) for model in chosen.models]
    except IngotError as error:
        print(f"bench.serve: {error.message}", file=sys.stderr)
        return 1
    if chosen.beside:
        if chosen.json:
            rounds = {model: [asdict(round_) for round_ in found] for model, found in measured.items()}
            _write(chosen.json, {"surroundings": around, "beside": rounds})
        return 0
    print(f"\n{verdict(matches)}")
    if chosen.json:
        _write(chosen.json, {"surroundings": around, "matches": [report.as_json(m, OURS, THEIRS) for m in matches]})
    if chosen.plot:
        report.write_plot(chosen.plot, matches, OURS, THEIRS)
    return 0


def _write(path: Path, found: dict[str, Any]) -> None:
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
