"""Keep a server busy for a while, and report errors and growth.

Clients with two keys use all protocols, streamed and whole, with tools and grammars; some disconnect, some are
cancelled, some send invalid bodies, and cached prefixes are read from disk and cleared. Alongside the model there are
an adapter, two models that take turns in the remaining memory, and the pooling and speech models that are on this
machine. The key file is replaced, and the server told to read it, every few seconds. A report with a plot of memory is
written into a folder. Exit status 1: something failed, hung, or kept growing.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final

from bench import servers
from bench.soak.acts import Act, Fault, Person
from bench.soak.further_acts import acts_with
from bench.soak.report import Report
from bench.soak.tables import MODELS, STAYS, TURNS, here, write_tables
from bench.soak.watch import Sight, Watch, complaints, make_scratch

KEYS: Final = {"anna": "anna-asks-in-turns", "bert": "bert-is-in-a-hurry"}
ADMIN: Final = "who-sees-everything"
EVERY_S: Final = 2.0
REPORT: Final = servers.ROOT / "build" / "soak"
WHOLE_MIN, GROWTH = 30.0, 0.02
"""The part by which memory at rest may grow in the second half of so many minutes, and be flat: allocators round. In a
shorter soak what is bounded still fills up in that half, so it may grow by more in proportion."""
SETTLED_MIN, COUNT_GROWTH = 4.0, 0.2
"""The same for what is counted."""
MEMORY: Final[dict[str, Callable[[Sight], float]]] = {
    "resident memory": lambda sight: sight.resident,
    "resident memory with child processes": lambda sight: sight.resident + sight.children,
    "MLX's memory": lambda sight: sight.active,
}
COUNTS: Final[dict[str, Callable[[Sight], float]]] = {
    "open files": lambda sight: sight.files,
    "threads": lambda sight: sight.threads,
    "temporary files": lambda sight: sight.temporary,
}
SMALL: Final = ("--cache-memory", "16MB", "--cache-disk-gb", "0.1", "--cache-disk-free-gb", "0")


class Crowd:
    """Clients that ask until they are told to stop."""

    def __init__(self, url: str, size: int, seed: int, acts: Mapping[Act, int]) -> None:
        keys = list(KEYS.values())
        self._acts, self._weights = list(acts), list(acts.values())
        self.people = [Person(url, keys[number % len(keys)], seed + number) for number in range(size)]
        self.done: Counter[str] = Counter()
        self.faults: list[str] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._live, args=(person,)) for person in self.people]
        for thread in self._threads:
            thread.start()

    def _live(self, person: Person) -> None:
        while not self._over.is_set():
            [act] = person.random.choices(self._acts, self._weights)
            try:
                act(person)
            except Fault as fault:
                self.faults.append(f"{act.__name__}: {fault}")
            self.done[act.__name__] += 1

    def leave(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--model", type=Path, default=MODELS / "dense", help="a folder (default: the foundry's dense)")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flags", default="", help="more flags of `ingot serve`")
    parser.add_argument("--log", type=Path, help="write the server's log here (default: nowhere)")
    parser.add_argument("--report", type=Path, default=REPORT, help=f"a folder (default: {REPORT})")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="ingot-soak-") as folder:
        report = soak(given, Path(folder))
    return report.publish(given.report)


def soak(given: argparse.Namespace, folder: Path) -> Report:
    log, keys, scratch = given.log or folder / "server.log", folder / "keys.toml", make_scratch(folder)
    write_keys(keys, 0)
    flags = [*SMALL, "--cache-dir", str(folder / "cache"), "--responses-store", str(folder / "responses.db")]
    flags += ["--api-key-file", str(keys), "--admin-api-key", ADMIN, "--config", str(write_tables(given.model, folder))]
    beside = [*TURNS, "rerank", *here()]
    flags += shlex.split(given.flags)
    with servers.ingot(None, log, streams=8, own_kernels=True, flags=flags, scratch=scratch) as server:
        url = server.client.url
        watch = Watch(Person(url, ADMIN, given.seed), server.pid, scratch)
        watch.note()
        crowds, rests, left = list[Crowd](), list[Sight](), list[str]()
        try:
            for half in range(2):
                crowd = Crowd(url, given.clients, given.seed + 1000 * half, acts_with([STAYS, *beside]))
                crowds.append(crowd)
                attend(watch, keys, time.monotonic() + 60 * given.minutes / 2)
                crowd.leave()
                left += watch.left_over([*crowd.people, watch.admin], beside)
                rests.append(watch.look())
        except (Fault, OSError) as error:
            left.append(f"the server was lost: {error}")
        finally:
            for crowd in crowds:
                crowd.leave()
    went = [*growth(rests, given.minutes)]
    done = sum((crowd.done for crowd in crowds), Counter[str]())
    acts = ", ".join(f"{name} {count}" for name, count in done.most_common())
    faults = dict.fromkeys(fault for crowd in crowds for fault in crowd.faults)
    wrong = [*faults, *left, *(line for line, grew in went if grew)]
    return Report(
        title=f"A soak of {given.minutes:g} minutes: {given.model.name}, {given.clients} clients",
        told=[acts, *busy(watch.seen), *(line for line, _ in went)],
        wrong=[*wrong, *complaints(log.read_text(errors="replace"))],
        seen=watch.seen,
        x=[(sight.at - watch.seen[0].at) / 60 for sight in watch.seen],
        axis="minutes",
    )


def attend(watch: Watch, keys: Path, until: float) -> None:
    """Look at the server again and again; every few looks its keys change."""
    turn = 0
    while time.monotonic() < until:
        time.sleep(EVERY_S)
        watch.note()
        turn += 1
        if turn % 5 == 0:
            write_keys(keys, turn)
            os.kill(watch.pid, signal.SIGHUP)


def write_keys(path: Path, turn: int) -> None:
    """The same keys, of whom another one goes first."""
    tables = (
        f'[{name}]\nkey = "{key}"\npriority = {turn * place % 3}\n' for place, (name, key) in enumerate(KEYS.items())
    )
    fresh = path.with_suffix(".new")
    fresh.write_text("".join(tables))
    fresh.chmod(0o600)
    fresh.replace(path)


def allowed(minutes: float, part: float = GROWTH, whole: float = WHOLE_MIN) -> float:
    return part * max(1.0, whole / minutes)


def growth(rests: Sequence[Sight], minutes: float) -> Iterator[tuple[str, bool]]:
    """How memory, files and threads differed between the first and the last time that nobody asked and nothing was
    kept, in words, and whether they grew by more than they may. While a server is busy, they depend on which models are
    loaded and for how long, by more than on any leak."""
    most, most_counted = allowed(minutes), allowed(minutes, COUNT_GROWTH, SETTLED_MIN)
    for name, of in MEMORY.items() if rests else ():
        first, last = of(rests[0]), of(rests[-1])
        grown = last / max(1.0, first) - 1
        yield (
            f"{name} at rest: {first / 1e6:.1f} -> {last / 1e6:.1f} MB ({grown:+.2%}, at most {most:.0%})",
            grown > most,
        )
    for name, of in COUNTS.items() if rests else ():
        first, last = of(rests[0]), of(rests[-1])
        yield f"{name} at rest: {first:.0f} -> {last:.0f}", last - first > max(2.0, most_counted * first)


def busy(seen: Sequence[Sight]) -> Iterator[str]:
    for name, of in MEMORY.items():
        values = [of(sight) / 1e6 for sight in seen]
        yield f"{name} while busy: {median(values):.1f} MB, {max(values):.1f} at most"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
