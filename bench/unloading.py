"""Models that a server loads, answers with and unloads by turns, over HTTP: whether all of their memory is freed each
time, how long that takes, and how long the tokens of one wait while another is loaded.

    python -m bench.unloading --cycles 20
    python -m bench.unloading --cycles 100 --models llama-150m,llama-15m

In a cycle each model is loaded, asked and unloaded once. Memory, threads and files are read when none is loaded, and
what MLX has in use when one is. They vary with pages that threads touch or free, so growth is measured between medians:
of the tenth of the cycles behind the first quarter, and of the last. A report with a plot of memory is written into a
folder. Needs /proc.

Exit status 1: memory grew by more than 2 % (in fewer than 100 cycles by more in proportion), threads, open or temporary
files became more, a request failed or was answered differently than before, a model's weights were not freed, or the
server's log holds errors.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

from bench import servers
from bench.random_models import SHAPES, write
from bench.soak.acts import Fault, Person
from bench.soak.report import Report
from bench.soak.tables import MODELS
from bench.soak.watch import Sight, Watch, complaints, make_scratch
from ingot.config.settings import DEFAULT_MODEL
from ingot.models.files.packaged import find_packaged_model

ADMIN: Final = "who-loads-and-unloads"
REPORT: Final = servers.ROOT / "build" / "cycles"
WARM: Final = 1 / 4
"""The part of the cycles before growth counts: allocators fill their pools, each thread its own."""
WHOLE, GROWTH = 100, 0.02
"""The part by which memory may grow in so many cycles. In fewer, what is bounded still fills up."""
COUNT_GROWTH: Final = 2
"""By how many threads or files there may be more: a pool starts its threads when they are first needed."""
SHOWN: Final = 10
"""Every so many cycles there is a line."""
NOT_FREED: Final = "are free again"
"""In a warning about a model that was unloaded."""
ASKED: Final = {"prompt": "The river runs past an old mill", "temperature": 0, "ignore_eos": True}
MEMORY: Final[dict[str, Callable[[Sight], float]]] = {
    "resident memory": lambda sight: sight.resident,
    "resident memory with child processes": lambda sight: sight.resident + sight.children,
    "memory taken on the device": lambda sight: sight.device,
}
COUNTS: Final[dict[str, Callable[[Sight], float]]] = {
    "threads": lambda sight: sight.threads,
    "open files": lambda sight: sight.files,
    "temporary files": lambda sight: sight.temporary,
}


@dataclass
class Cycles:
    """What came of them: MLX's memory with each model, its answers, and the longest times."""

    models: Sequence[str]
    watch: Watch
    wrong: list[str] = field(default_factory=list)
    longest_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.active: dict[str, list[float]] = {name: [] for name in self.models}
        self.answers: dict[str, str] = {}

    def run(self, count: int) -> None:
        """Ends early where the server is lost."""
        try:
            for cycle in range(count):
                for name in self.models:
                    self._turn(name)
                self.watch.note()
                if cycle < 2 or cycle % SHOWN == 0 or cycle == count - 1:
                    seen = self.watch.seen[-1]
                    counts = ", ".join(f"{of(seen):.0f} {thing}" for thing, of in COUNTS.items())
                    print(f"cycle {cycle}: {seen.resident / 1e6:.1f} MB resident, {counts}", flush=True)
            self._disturb()
        except (Fault, OSError) as error:
            self.wrong.append(f"after {len(self.watch.seen)} cycles: {error}")

    def _turn(self, name: str) -> None:
        admin = self.watch.admin
        self._timed("load", lambda: admin.told(f"/v1/models/{name}/load", None))
        answer = json.loads(admin.told("/v1/completions", {"model": name, "max_tokens": 8, **ASKED}).raw)
        text = answer["choices"][0]["text"]
        if text != self.answers.setdefault(name, text):
            self.wrong.append(f"{name} answered {text!r}, and {self.answers[name]!r} when it was first loaded")
        self.active[name].append(self.watch.look().active)
        self._timed("unload", lambda: admin.told(f"/v1/models/{name}/unload", None))

    def _timed(self, what: str, done: Callable[[], object]) -> None:
        began = time.monotonic()
        done()
        self.longest_s[what] = max(self.longest_s.get(what, 0.0), time.monotonic() - began)

    def _disturb(self) -> None:
        """How long an answer of the first waits while another is loaded."""
        [first, *others], admin = self.models, self.watch.admin
        admin.told(f"/v1/models/{first}/load", None)
        self.longest_s["wait between tokens"] = longest_wait(admin, first, 100)
        if others:
            with ThreadPoolExecutor(1) as pool:
                beside = pool.submit(longest_wait, admin, first, 400)
                admin.told(f"/v1/models/{others[0]}/load", None)
            self.longest_s["wait between tokens during a load"] = beside.result()


def longest_wait(person: Person, name: str, tokens: int) -> float:
    """Between two tokens of an answer."""
    longest, before = 0.0, None
    with person.asking("/v1/completions", {"model": name, "max_tokens": tokens, "stream": True, **ASKED}) as connection:
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                now = time.monotonic()
                longest, before = max(longest, now - (before or now)), now
    return longest


def usual(values: Sequence[float]) -> tuple[float, float]:
    """Of what was read in one cycle after another: what was usual behind the warm-up, and at the end."""
    kept = values[int(WARM * len(values)) :]
    tenth = max(1, len(kept) // 10)
    return median(kept[:tenth]), median(kept[-tenth:])


def growth(seen: Sequence[Sight], active: dict[str, list[float]]) -> Iterator[tuple[str, bool]]:
    """How memory, threads and files went, in words, and whether they grew by more than they may."""
    memory = {name: [of(sight) for sight in seen] for name, of in MEMORY.items()}
    memory |= {with_model(name): values for name, values in active.items()}
    most = GROWTH * max(1.0, WHOLE / max(1, len(seen)))
    for name, values in memory.items():
        if any(values):
            first, last = usual(values)
            grown = last / max(1.0, first) - 1
            yield f"{name}: {first / 1e6:.1f} -> {last / 1e6:.1f} MB ({grown:+.2%}, at most {most:.0%})", grown > most
    for name, of in COUNTS.items() if seen else ():
        first, last = usual([of(sight) for sight in seen])
        yield f"{name}: {first:.0f} -> {last:.0f}", last > first + COUNT_GROWTH


def with_model(name: str) -> str:
    return f"MLX's memory with {name}"


def write_model(folder: Path, model: str) -> str:
    """A folder with a random model, if that is the name of a shape, or what is named: a packaged model or a folder."""
    if model not in SHAPES:
        return model if find_packaged_model(model) else str(Path(model).expanduser())
    if not (folder / model).exists():
        (folder / model).mkdir()
        write(folder / model, model)
    return str(folder / model)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.unloading", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = f"{DEFAULT_MODEL},{MODELS / 'hybrid'}"
    parser.add_argument("--cycles", type=int, default=WHOLE)
    parser.add_argument(
        "--models", default=models, help=f"packaged models, folders, or of {', '.join(SHAPES)} (default: {models})"
    )
    parser.add_argument("--log", type=Path, help="write the server's log here (default: nowhere)")
    parser.add_argument("--report", type=Path, default=REPORT, help=f"a folder (default: {REPORT})")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="ingot-cycles-") as folder:
        return measure(given, Path(folder)).publish(given.report)


def measure(given: argparse.Namespace, folder: Path) -> Report:
    paths = {Path(model).name: write_model(folder, model) for model in given.models.split(",")}
    tables, log, scratch = folder / "tables.toml", given.log or folder / "server.log", make_scratch(folder)
    tables.write_text("lazy = true\n" + "".join(f'[models."{name}"]\npath = "{paths[name]}"\n' for name in paths))
    flags = ["--config", str(tables), "--admin-api-key", ADMIN]
    with servers.ingot(None, log, streams=8, own_kernels=True, flags=flags, scratch=scratch) as server:
        cycles = Cycles([*paths], Watch(Person(server.client.url, ADMIN, 0), server.pid, scratch))
        cycles.run(given.cycles)
    seen, said = cycles.watch.seen, log.read_text(errors="replace")
    went = [*growth(seen, cycles.active)]
    not_freed = [line for line in said.splitlines() if NOT_FREED in line]
    longest = ", ".join(f"{what} {seconds:.2f} s" for what, seconds in cycles.longest_s.items())
    return Report(
        title=f"{given.cycles} cycles of loading and unloading {', '.join(paths)}",
        told=[*(line for line, _ in went), f"longest {longest}"],
        wrong=[*cycles.wrong, *(line for line, grew in went if grew), *not_freed, *complaints(said)],
        seen=seen,
        x=range(1, len(seen) + 1),
        axis="cycles",
        more={with_model(name): values[: len(seen)] for name, values in cycles.active.items()},
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
