"""Is ingot correct on this GPU, and does it reach its goals? One command of about ten minutes.

python -m bench.gpu                         everything; a table of figures, goals and ratios to mlx-lm's
python -m bench.gpu --only checks,attention
python -m bench.gpu --families              the families that people run, in 4 bits, next to mlx-lm
python -m bench.gpu --families gemma3,qwen3.5
python -m bench.gpu --quick                 fewer tokens and streams
INGOT_AS=cuda python -m bench.gpu --tiny    on a CPU, to see that it works: its figures say nothing

Each section is a process of its own with a time limit, and prints each figure at once: one that fails or takes too long
loses only its remaining figures, and the others continue. Both sides of a ratio are measured in the same process on the
same random weights.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from bench.children import hear
from bench.family_shapes import FAMILIES
from bench.gpu.goals import DIFFERING, Figure, row, table
from bench.gpu.scale import FULL, QUICK, TINY, Scale


@dataclass(frozen=True)
class Section:
    work: str  # module:function
    limit_s: float
    environment: tuple[tuple[str, str], ...] = ()


SECTIONS = {
    # Products of float32 in full: in fewer bits, which is what mlx does by default, rounding depends on the batch.
    "checks": Section("checks:checks", 100, (("MLX_ENABLE_TF32", "0"),)),
    "deterministic": Section("deterministic:deterministic", 160, (("MLX_ENABLE_TF32", "0"),)),
    "attention": Section("kernels:attention", 40),
    "delta": Section("kernels:delta", 25),
    "recurrent": Section("kernels:recurrent", 20),
    "dense": Section("serving:dense", 80),
    "packed": Section("serving:packed", 70),
    "hybrid": Section("serving:hybrid", 75),
    "long": Section("serving:long", 55),
    "turn": Section("agents:turn", 150),
    "mtp": Section("agents:mtp", 90),
}

FAMILY, FAMILY_LIMIT_S = "family/", 120
"""Begins a section of one family, which may take so long."""
FIGURE = "figure: "
"""Begins a line of a section's output that is one; a library may say something, too."""


def work_of(name: str) -> Callable[[Scale], Iterator[Figure]]:
    if name.startswith(FAMILY):
        serving = importlib.import_module("bench.gpu.serving")
        return partial(serving.family, name.removeprefix(FAMILY))
    module, function = SECTIONS[name].work.split(":")
    found: Callable[[Scale], Iterator[Figure]] = getattr(importlib.import_module(f"bench.gpu.{module}"), function)
    return found


def run(name: str, scale: str) -> tuple[list[Figure], str | None]:
    """The figures that a section came to, and why there are no more. One that is told again, with what was measured
    beside it, takes the earlier one's place."""
    section = Section("serving:family", FAMILY_LIMIT_S) if name.startswith(FAMILY) else SECTIONS[name]
    figures = dict[str, Figure]()
    command = [sys.executable, "-m", "bench.gpu", "--child", name, *([scale] if scale else [])]

    def told(line: str) -> None:
        if line.startswith(FIGURE):
            figure = Figure(**json.loads(line.removeprefix(FIGURE)))
            figures[figure.name], line = figure, row(figure)
        print(line, file=sys.stderr, flush=True)

    outcome = hear(command, dict(section.environment), section.limit_s, told)
    return [*figures.values()], outcome.wrong


def main(given: Sequence[str] | None = None) -> int:
    chosen = _parsed(given)
    scale, flag = (TINY, "--tiny") if chosen.tiny else (QUICK, "--quick") if chosen.quick else (FULL, "")
    if chosen.child:
        logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms: %(message)s")
        for figure in work_of(chosen.child)(scale):
            print(f"{FIGURE}{json.dumps(asdict(figure))}", flush=True)
        return 0
    figures, failed = [], {}
    families = [FAMILY + each for each in chosen.families or ()]
    for name in chosen.only or families or SECTIONS:
        began = time.monotonic()
        found, wrong = run(name, flag)
        figures += found
        if wrong is not None:
            failed[name] = f"{wrong}, after {len(found)} figures" if found else wrong
        print(f"{name}: {wrong or 'done'}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        if chosen.json is not None:
            _write(chosen.json, figures, failed)
    print(table(figures))
    if chosen.tiny:
        print("Of these only the checks mean anything: shapes are tiny, and emulated kernels run outside the clock.")
    for name, wrong in failed.items():
        print(f"NOT {'ALL ' if 'after' in wrong else ''}MEASURED: {name}, which {wrong}")
    differing = [figure for figure in figures if figure.unit == DIFFERING and figure.value]
    return 1 if failed or differing else 0


def _write(file: Path, figures: Sequence[Figure], failed: Mapping[str, str]) -> None:
    file.write_text(json.dumps({"figures": [asdict(each) for each in figures], "failed": failed}, indent=1))


def _parsed(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("bench.gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", type=_sections, help=f"of {', '.join(SECTIONS)}, separated by commas")
    parser.add_argument(
        "--families",
        type=_families,
        nargs="?",
        const=[*FAMILIES],
        help="families: all, or some of these, separated by commas",
    )
    parser.add_argument("--quick", action="store_true", help="fewer tokens and streams")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, for a CPU with INGOT_AS=cuda or metal")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(given)


def _sections(text: str) -> list[str]:
    asked = text.split(",")
    for name in asked:
        if name not in SECTIONS:
            raise argparse.ArgumentTypeError(f"there is no section {name!r}")
    return asked


def _families(text: str) -> list[str]:
    asked = text.split(",")
    for name in asked:
        if name not in FAMILIES:
            raise argparse.ArgumentTypeError(f"there is no family {name!r}; choose from {', '.join(FAMILIES)}")
    return asked


if __name__ == "__main__":
    sys.exit(main())
