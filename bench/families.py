"""ingot on CPUs against mlx-lm's own loop, for the families that people run: small models of real structure.

python -m bench.families                         prefill and decode of each, and the geometric mean of the ratios
python -m bench.families --families gemma3,lfm2 --rounds 3
python -m bench.families --families gemma3 --prompt 64 --output 4

Each side is measured in a process of its own, and both alternate. Weights are random, of 4 bits, or, of GPT-OSS, as its
checkpoints have them; mlx-lm computes in float32, which is its fastest format on most CPUs. The note behind a row is
what the ready line would say.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.children import hear
from bench.family_shapes import FAMILIES, WIDE, random_model

SIDES = ("ours", "stock")
WARM_STEPS = 3
LIMIT_S = 600


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens per second of each round."""

    prefill: list[float]
    decode: list[float]

    @property
    def medians(self) -> tuple[float, float]:
        return statistics.median(self.prefill), statistics.median(self.decode)


class NotMeasured(Exception):
    """Why one side has no figures."""


def compare(family: str, prompt: int, output: int, rounds: int) -> tuple[dict[str, Speeds], list[str]]:
    """The speeds of both sides, and what ingot notes about the model."""
    speeds, notes = {side: Speeds([], []) for side in SIDES}, list[str]()
    for round_ in range(rounds):
        for side in SIDES if round_ % 2 == 0 else reversed(SIDES):
            command = [sys.executable, "-m", "bench.families", "--measure", side, "--families", family]
            command += ["--prompt", str(prompt), "--output", str(output)]
            lines: list[str] = []
            if (outcome := hear(command, {}, LIMIT_S, lines.append)).wrong is not None:
                raise NotMeasured(f"{side} {outcome.wrong}")
            found = json.loads(lines[-1])
            speeds[side].prefill.append(found["prefill"])
            speeds[side].decode.append(found["decode"])
            notes = found["notes"] or notes
    return speeds, notes


def measure(side: str, family: str, prompt: int, output: int) -> dict[str, Any]:
    if side == "ours":
        import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
    return (_ours if side == "ours" else _stock)(family, prompt, output)


def _ours(family: str, prompt: int, output: int) -> dict[str, Any]:
    import mlx.core as mx

    from ingot.cache.forward_batch import ForwardPart
    from ingot.kernels.device import current_device
    from ingot.models.adapter import adapt_model
    from ingot.models.precision import settle_precision

    config, model = random_model(family, "float32", changes=WIDE)
    settle_precision(model, current_device(), None)
    adapter = adapt_model(model, config, current_device())

    def run(row: Any, width: int) -> None:
        tokens = mx.random.randint(0, adapter.vocab, (width,))
        logits = adapter.run(rows, tokens, [ForwardPart((row,), width)], [width - 1])
        mx.eval(logits, rows.pending())

    rows, seconds = adapter.new_batch_state(), dict[str, float]()
    for tokens in (min(16, prompt), prompt):  # of which the first makes storage and compiles
        row = rows.new()
        began = time.perf_counter()
        run(row, tokens)
        seconds["prefill"] = time.perf_counter() - began
        for _ in range(WARM_STEPS):
            run(row, 1)
        began = time.perf_counter()
        for _ in range(output):
            run(row, 1)
        seconds["decode"] = time.perf_counter() - began
        rows.leave(row)
    return _speeds(seconds, prompt, output, list(adapter.notes))


def _stock(family: str, prompt: int, output: int) -> dict[str, Any]:
    import mlx.core as mx

    from ingot.upstream import import_upstream

    _, model = random_model(family, "float32", changes=WIDE)
    make_cache = import_upstream("mlx_lm.models.cache").make_prompt_cache
    tokens = mx.random.randint(0, WIDE["vocab_size"], (1, prompt))
    mx.eval(model(tokens[:, :2], cache=make_cache(model)))
    cache = make_cache(model)
    began = time.perf_counter()
    mx.eval(model(tokens, cache=cache)[:, -1])
    prompted = time.perf_counter()
    for _ in range(output):
        mx.eval(model(tokens[:, :1], cache=cache))
    seconds = {"prefill": prompted - began, "decode": time.perf_counter() - prompted}
    return _speeds(seconds, prompt, output, [])


def _speeds(seconds: dict[str, float], prompt: int, output: int, notes: list[str]) -> dict[str, Any]:
    return {"prefill": prompt / seconds["prefill"], "decode": output / seconds["decode"], "notes": notes}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "bench.families", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", default=",".join(FAMILIES), help="separated by commas (default: all)")
    parser.add_argument("--prompt", type=int, default=256, help="tokens (default: %(default)s)")
    parser.add_argument("--output", type=int, default=16, help="tokens (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", choices=SIDES, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    families = chosen.families.split(",")
    if unknown := {*families} - {*FAMILIES}:
        parser.error(f"there is no family {', '.join(sorted(unknown))}; choose from {', '.join(FAMILIES)}")
    if chosen.measure is not None:
        print(json.dumps(measure(chosen.measure, families[0], chosen.prompt, chosen.output)))
        return 0
    figures: dict[str, Any] = {}
    print(f"{'tokens/s':16} {'prefill':>9} {'mlx-lm':>9} {'ratio':>7} {'decode':>9} {'mlx-lm':>9} {'ratio':>7}")
    for family in families:
        try:
            speeds, notes = compare(family, chosen.prompt, chosen.output, chosen.rounds)
        except NotMeasured as error:
            print(f"{family:16} NOT MEASURED: {error}", flush=True)
            continue
        cells = [f"{ours:9.1f} {stock:9.1f} {ours / stock:6.2f}x" for ours, stock in _pairs(speeds)]
        print(f"{family:16} {' '.join(cells)}", *(f"\n    {note}" for note in notes), flush=True)
        figures[family] = {side: asdict(each) for side, each in speeds.items()} | {"notes": notes}
        figures[family]["ratios"] = [ours / stock for ours, stock in _pairs(speeds)]
    for number, work in enumerate(("prefill", "decode")):
        if ratios := [each["ratios"][number] for each in figures.values()]:
            print(f"{work}: {statistics.geometric_mean(ratios):.2f}x on average, {min(ratios):.2f}x at least")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(figures, indent=1))
    return 0 if len(figures) == len(families) else 1


def _pairs(speeds: dict[str, Speeds]) -> list[tuple[float, float]]:
    """Ours and mlx-lm's, of prefill and of decode."""
    return [*zip(speeds["ours"].medians, speeds["stock"].medians, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
