"""Two models that are loaded and unloaded in turn: how much of their memory is freed, how long it takes, and how long
the answers of one wait while the other is loaded.

    python -m bench.unloading --cycles 20 --shapes llama-150m,llama-15m
    python -m bench.unloading --cycles 100 --shapes ~/.cache/ingot/models/smollm2-135m

The memory after an unload varies with pages that threads touch or free, so growth is measured between medians: of the
first tenth of the unloads after the warm-up, and of the last.

Exit status 1: the memory of the process or the device grew by more than 1 %.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Final

from bench.random_models import SHAPES, write
from ingot.config import Settings, model_entries
from ingot.engine.fleet import Fleet
from ingot.engine.loading.model_loader import ModelLoader
from ingot.engine.request import Request
from ingot.kernels.device import active_memory

WARM: Final = 5
"""Times that each model is loaded before growth counts: allocators fill their pools."""
GROWTH: Final = 0.01
TOLD: Final = 10
"""Every so many cycles there is a line."""


def resident() -> int:
    """What the device's driver says is taken, or the process' resident bytes where it says nothing."""
    import mlx.core as mx

    info = mx.device_info()
    if info.get("free_memory"):
        return int(info["total_memory"]) - int(info["free_memory"])
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * 4096 if status.exists() else 0


async def answer(fleet: Fleet, name: str, tokens: int) -> float:
    """The longest wait between two batches of an answer."""
    async with fleet.lease(name) as engine:
        stream = await engine.open(Request(id=f"{name}-{time.monotonic_ns()}", prompts=((5, 6, 7),), max_tokens=tokens))
        longest, before = 0.0, time.monotonic()
        async for _ in stream:
            longest, before = max(longest, time.monotonic() - before), time.monotonic()
        stream.close()
        return longest


def written(folder: Path, shape: str) -> Path:
    """A folder with a random model of a shape, or the one that is named."""
    if shape not in SHAPES:
        return Path(shape).expanduser()
    if not (folder / shape).exists():
        (folder / shape).mkdir()
        write(folder / shape, shape)
    return folder / shape


def growth(taken: Sequence[int]) -> tuple[float, float]:
    """Of bytes that are taken after one unload after another: what was usual at the beginning, and at the end."""
    tenth = max(1, len(taken) // 10)
    return median(taken[:tenth]), median(taken[-tenth:])


async def measure(folder: Path, shapes: list[str], cycles: int) -> float:
    """The part by which the memory in use grew after each model was there for the first few times."""
    tables = {f"m{number}": {"path": str(written(folder, shape))} for number, shape in enumerate(shapes)}
    settings = Settings(models=tables, lazy=True)
    garage = ModelLoader(settings)
    fleet = Fleet(model_entries(settings), garage, garage.memory)
    empty, longest, taken = active_memory(), 0.0, list[int]()
    for cycle, name in zip(range(cycles), itertools.cycle(tables), strict=False):
        began = time.monotonic()
        await answer(fleet, name, 8)
        loaded, there = time.monotonic() - began, active_memory()
        began = time.monotonic()
        await fleet.unload(name)
        longest = max(longest, time.monotonic() - began)
        back = (there - active_memory()) / max(1, there - empty)
        taken.append(resident())
        if cycle < 2 * len(tables) or cycle % TOLD == 0 or cycle == cycles - 1:
            told = f"{cycle}: {name} loaded and answered in {loaded:.2f} s, {there / 1e6:.1f} MB; back {back:.2%}"
            print(f"{told}; {taken[-1] / 1e6:.1f} MB used", flush=True)
    print(f"longest unload {longest:.2f} s; active {empty} -> {active_memory()} bytes")
    warm = min(WARM * len(tables), cycles - 1)
    first, last = growth(taken[warm:])
    grown = last / max(1, first) - 1
    print(f"used by the process or device {first / 1e6:.1f} -> {last / 1e6:.1f} MB ({grown:+.2%}), medians of tenths")
    if len(tables) > 1:
        await disturb(fleet, [*tables])
    garage.close()
    return grown


async def disturb(fleet: Fleet, names: list[str]) -> None:
    """How long an answer of one waits while another is loaded."""
    await answer(fleet, names[0], 8)
    alone = await answer(fleet, names[0], 100)
    beside, _ = await asyncio.gather(answer(fleet, names[0], 400), answer(fleet, names[1], 1))
    print(f"longest wait between tokens: {alone * 1e3:.0f} ms alone, {beside * 1e3:.0f} ms while the other is loaded")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument(
        "--shapes", default="llama-150m,llama-15m", help=f"of {', '.join(SHAPES)}, or folders of models"
    )
    asked = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        grown = asyncio.run(measure(Path(folder), asked.shapes.split(","), asked.cycles))
    return 1 if grown > GROWTH else 0


if __name__ == "__main__":
    raise SystemExit(main())
