"""Two models that do not fit together, and clients that use them in turn: how often they are swapped, and the longest
wait.

    python -m bench.turns --clients 20 --asks 5 --residency-s 2
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.random_models import SHAPES, write
from ingot.config import ModelEntry, Settings, model_entries
from ingot.engine.engine import Engine
from ingot.engine.fleet import Fleet
from ingot.engine.loading.model_loader import ModelLoader
from ingot.engine.request import Ended, Request, Sampling, Stop

TOKENS: Final = 16


class Counted(ModelLoader):
    """Counts what it loads."""

    loads = 0

    async def load(self, entry: ModelEntry, claim: int, told: Callable[[float], None]) -> Engine:
        self.loads += 1
        return await super().load(entry, claim, told)


@dataclass
class Told:
    """What came of it. Waits are seconds from the question to the answer's end."""

    waits: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    loads: int = 0
    took_s: float = 0.0

    def swaps_at_most(self, residency_s: float, models: int) -> int:
        """A model that was just loaded stays for that long: so many loads, and each model's first."""
        return models + int(self.took_s / residency_s)


async def take_turns(settings: Settings, clients: int, asks: int) -> Told:
    """With room for the larger of the models of `settings`, and no more."""
    garage, told = Counted(settings), Told()
    entries = model_entries(settings)
    try:
        room = max([await garage.measure(entry) for entry in entries])
        fleet = Fleet(entries, garage, room, min_residency_s=settings.min_residency_s, swap_wait_s=settings.swap_wait_s)
        began = time.monotonic()
        await asyncio.gather(*(_ask(fleet, number, asks, told) for number in range(clients)))
        told.took_s, told.loads = time.monotonic() - began, garage.loads
    finally:
        garage.close()
    return told


async def _ask(fleet: Fleet, number: int, asks: int, told: Told) -> None:
    """One client, which names the next model each time."""
    for turn in range(asks):
        name = fleet.entries[(number + turn) % len(fleet.entries)].name
        asked = Request(
            *(f"{name}-{number}-{turn}", ((3, 4, 5 + number),)),
            max_tokens=TOKENS,
            sampling=Sampling(temperature=0.0),
            stop=Stop(ignore_eos=True),
        )
        began = time.monotonic()
        try:
            async with fleet.lease(name) as engine:
                last = [event async for batch in await engine.open(asked) for event in batch][-1]
        except Exception as error:
            told.failures.append(f"{asked.id}: {error}")
            continue
        if not isinstance(last, Ended):
            told.failures.append(f"{asked.id}: {last}")
        told.waits.append(time.monotonic() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--asks", type=int, default=5, help="of each client")
    parser.add_argument("--residency-s", type=float, default=2.0)
    parser.add_argument("--shapes", default="llama-150m,llama-15m", help=f"of {', '.join(SHAPES)}")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        tables = {}
        for number, shape in enumerate(given.shapes.split(",")):
            where = Path(folder) / str(number)
            where.mkdir()
            write(where, shape)
            tables[f"m{number}"] = {"path": str(where)}
        settings = Settings(models=tables, lazy=True, min_residency_s=given.residency_s)
        told = asyncio.run(take_turns(settings, given.clients, given.asks))
    most = told.swaps_at_most(given.residency_s, len(tables))
    print(f"{len(told.waits)} answers in {told.took_s:.1f} s, {len(told.failures)} failures")
    print(f"{told.loads} loads, {most} at most; longest wait {max(told.waits, default=0.0):.2f} s")
    for line in told.failures[:10]:
        print(f"WRONG: {line}")
    return 1 if told.failures or told.loads > most else 0


if __name__ == "__main__":
    raise SystemExit(main())
