"""Attention over long contexts on CPUs: the default kernels against others, in one run, alternating.

python -m bench.attention                        against --deterministic
python -m bench.attention --before FOLDER        against the kernels in FOLDER, such as an earlier version's
python -m bench.attention --depths 0,16384 --rounds 9

One layer of Qwen2.5-0.5B's shape: 14 heads of 64 share 2 heads of keys and values, in 16 bits, in pages in random
order. For --before, build the other version, which must have the same interface, with
`pip install --no-build-isolation --no-deps --target FOLDER ./native` in a clone of it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.cpu import Figure

HEADS, KV_HEADS, SIZE = 14, 2, 64
PROMPT, STEPS = 512, 64
"""Tokens of a prompt's chunk, and single ones, at each depth."""
DEPTHS = "0,4096,16384"
PAGE = 512


class Layer:
    """One layer's attention over the states of one sequence."""

    def __init__(self, deepest: int) -> None:
        import mlx.core as mx

        import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
        from ingot.kernels.cpu import native

        if not native.available():
            raise SystemExit(f"bench.attention: {native.advice()}")
        pages = -(-(deepest + PROMPT + STEPS) // PAGE)
        self.table = array("i", random.Random(0).sample(range(pages), pages))
        rotation = native.rope_rotation(1e6 ** (-mx.arange(0, SIZE, 2) / SIZE), dims=SIZE, neighbours=False, gain=1.0)
        self.operation = native.NativeAttention(
            heads=HEADS,
            kv_heads=KV_HEADS,
            size=SIZE,
            scale=SIZE**-0.5,
            cap=None,
            sinks=None,
            norms=(None, None),
            rotation=rotation,
            gated=False,
        )
        shape = (pages, KV_HEADS, PAGE, SIZE)
        self.states = tuple(mx.random.normal(shape).astype(mx.float16) for _ in range(2))
        widths = (HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE)
        self.given = tuple(mx.random.normal((PROMPT, width)) for width in widths)
        mx.eval(self.states, self.given)

    def speed(self, depth: int, tokens: int, launches: int) -> float:
        """Tokens per second."""
        self._run(depth, tokens)
        began = time.perf_counter()
        for launch in range(launches):
            self._run(depth + launch * tokens, tokens)
        return tokens * launches / (time.perf_counter() - began)

    def _run(self, depth: int, tokens: int) -> None:
        import mlx.core as mx

        from ingot.kernels.cpu import native

        q, k, v = (x[:tokens] for x in self.given)
        spans = native.attention_spans([(0, tokens, 0, depth, depth)], [(0, self.table)])
        attended, *states = self.operation(q, k, v, *self.states, spans)
        self.states = tuple(states)
        mx.eval(attended, *states)


def measured(depths: Sequence[int]) -> dict[str, float]:
    layer = Layer(max(depths))
    prompts = {f"prompt at {depth}": layer.speed(depth, PROMPT, 1) for depth in depths}
    return prompts | {f"step at {depth}": layer.speed(depth, 1, STEPS) for depth in depths}


def in_own_process(depths: str, one_path: bool, kernels: Path | None) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.attention", "--measure", "--depths", depths]
    paths = [str(kernels)] if kernels else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    command += ["--one-path"] if one_path else []
    said = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, float] = json.loads(said.splitlines()[-1])
    return found


def compare(depths: str, rounds: int, before: Path | None) -> list[Figure]:
    figures: dict[str, Figure] = {}
    for round_ in range(rounds):
        turns: list[tuple[str, bool, Path | None]] = [("ours", False, None), ("theirs", before is None, before)]
        for side, one_path, kernels in turns if round_ % 2 == 0 else reversed(turns):
            for subject, speed in in_own_process(depths, one_path, kernels).items():
                getattr(figures.setdefault(subject, Figure(subject, [], [])), side).append(speed)
        print(f"  round {round_ + 1} of {rounds}: done", file=sys.stderr, flush=True)
    return list(figures.values())


def _measure(depths: str, one_path: bool) -> dict[str, float]:
    import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
    from ingot.kernels.cpu import native

    native.use_one_path(one_path)
    return measured([int(depth) for depth in depths.split(",")])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "bench.attention", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--depths", default=DEPTHS, help=f"tokens that are stored already (default {DEPTHS})")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", type=Path, help="a folder with other kernels")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--one-path", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.measure:
        print(json.dumps(_measure(chosen.depths, chosen.one_path)))
        return 0
    found = compare(chosen.depths, chosen.rounds, chosen.before)
    print(f"{'tokens/s of one layer':24} {'now':>10} {'other':>10} {'ratio':>9}")
    for figure in found:
        print(figure.row())
    if chosen.json is not None:
        rows: list[dict[str, Any]] = [{**asdict(figure), "ratio": figure.ratio} for figure in found]
        chosen.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
