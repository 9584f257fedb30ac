"""Keep a server busy for a while, and report errors and growth.

Clients with two keys use all protocols, streamed and whole, with tools and grammars; some disconnect, some are
cancelled, some send invalid bodies, and cached prefixes are read from disk and cleared. Alongside the model there are
an adapter, two models that take turns in the remaining memory, and the pooling and speech models that are on this
machine. The key file is replaced, and the server told to read it, every few seconds. Exit status 1: something failed,
hung, or kept growing.
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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from bench import servers
from bench.soak.acts import Act, Fault, Person
from bench.soak.further_acts import acts_with
from bench.soak.tables import MODELS, STAYS, TURNS, here, write_tables
from bench.soak.watch import Sight, Watch, complaints

KEYS: Final = {"anna": "anna-asks-in-turns", "bert": "bert-is-in-a-hurry"}
ADMIN: Final = "who-sees-everything"
EVERY_S: Final = 2.0
WHOLE_MIN, GROWTH = 30.0, 0.02
"""The part by which memory may grow after the warm part of so many minutes, and be flat: allocators round. In a shorter
soak what is bounded still fills up in that part, so it may grow by more in proportion."""
MEMORY: Final[dict[str, Callable[[Sight], float]]] = {
    "resident memory": lambda sight: sight.resident,
    "MLX's memory": lambda sight: sight.active,
}
COUNTS: Final[dict[str, Callable[[Sight], float]]] = {
    "open files": lambda sight: sight.files,
    "threads": lambda sight: sight.threads,
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
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="ingot-soak-") as folder:
        wrong = soak(given, Path(folder))
    for line in wrong:
        print(f"WRONG: {line}")
    return 1 if wrong else 0


def soak(given: argparse.Namespace, folder: Path) -> list[str]:
    log, keys = given.log or folder / "server.log", folder / "keys.toml"
    write_keys(keys, 0)
    flags = [*SMALL, "--cache-dir", str(folder / "cache"), "--responses-store", str(folder / "responses.db")]
    flags += ["--api-key-file", str(keys), "--admin-api-key", ADMIN, "--config", str(write_tables(given.model, folder))]
    beside = [*TURNS, "rerank", *here()]
    flags += shlex.split(given.flags)
    with servers.ingot(None, log, streams=8, own_kernels=True, flags=flags) as server:
        url = server.client.url
        watch = Watch(Person(url, ADMIN, given.seed), server.pid)
        watch.look()
        crowd = Crowd(url, given.clients, given.seed, acts_with([STAYS, *beside]))
        try:
            attend(watch, keys, time.monotonic() + 60 * given.minutes)
        finally:
            crowd.leave()
        print(", ".join(f"{name} {count}" for name, count in crowd.done.most_common()), flush=True)
        grown = list(growth(watch, allowed(given.minutes)))
        wrong = [*dict.fromkeys(crowd.faults), *watch.left_over([*crowd.people, watch.admin], beside), *grown]
    return [*wrong, *complaints(log.read_text(errors="replace"))]


def attend(watch: Watch, keys: Path, until: float) -> None:
    """Look at the server again and again; every few looks its keys change."""
    turn = 0
    while time.monotonic() < until:
        time.sleep(EVERY_S)
        watch.look()
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


def allowed(minutes: float) -> float:
    return GROWTH * max(1.0, WHOLE_MIN / minutes)


def growth(watch: Watch, most: float) -> Iterator[str]:
    """Tells how memory, files and threads went; yields what did not stay: memory that grew by a larger part than
    `most`."""
    for name, of in MEMORY.items():
        found = watch.trend(of)
        told = (
            f"{name}: {found.level / 1e6:.1f} MB, {found.growth / 1e6:+.2f} MB ({found.share:+.2%}) after the warm part"
        )
        print(told, flush=True)
        if found.share > most:
            yield told
    for name, of in COUNTS.items():
        found = watch.trend(of)
        told = f"{name}: {found.level:.0f}, {found.growth:+.1f}"
        print(told, flush=True)
        if found.growth > max(2.0, found.level / 5):
            yield told


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
