"""ingot's CPU kernels against llama.cpp's: the same GGUF weights and number of threads, in one run, alternating.

python -m bench.cpu                                   prefill and decode of the default model
python -m bench.cpu --shape qwen3-0.6b --rounds 5     of a random model of that shape
python -m bench.cpu --streams 8,16                    also over HTTP, against llama-server with as many slots
python -m bench.cpu --limits                          also what part of this machine's speed is used
python -m bench.cpu --stock                           also against plain mlx-lm, which takes minutes
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import gguf_models, servers, stock
from ingot.cli.bench import LoadPlan, LoadTarget, prepare_target, run_level
from ingot.cli.peers import llama_cpp
from ingot.cli.peers.llama_cpp import Build
from ingot.cli.peers.processes import Placement, Server
from ingot.cli.peers.table import find_peer
from ingot.config import DEFAULT_MODEL
from ingot.errors import IngotError
from ingot.models.files.packaged import fetch_original_weights
from ingot.models.files.progress import TerminalProgress
from ingot.models.gguf.importer import convert_gguf

PROMPTS = (512, 2048)
DEPTHS = (0, 128, 512, 2048)
OUTPUT = 32
CHUNK = 512
"""Tokens of a launch by which a row gets to its depth."""
WARM_LAUNCHES = 4
"""Before the clock runs; llama-bench warms up too."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Tokens per second of both, and the ratio of the medians: above 1, ingot is faster."""

    subject: str
    ours: list[float]
    theirs: list[float]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ours) / statistics.median(self.theirs)

    def row(self) -> str:
        ours, theirs = statistics.median(self.ours), statistics.median(self.theirs)
        return f"{self.subject:24} {ours:10.1f} {theirs:10.1f} {self.ratio:8.2f}x"


class Model:
    """A loaded model on this thread, run as the engine runs it, without sampling."""

    def __init__(self, folder: Path) -> None:
        from ingot.kernels.device import current_device
        from ingot.models.adapter import load_model_adapter

        self.adapter = load_model_adapter(folder, current_device())
        self._rows = self.adapter.new_batch_state()
        self._begun: dict[int, Any] = {}  # records of so many tokens

    def products_per_token(self) -> int:
        """Multiplications with weights that each token of a prompt takes."""
        from ingot.models.layers.modules import PackedLinear

        shapes = [
            module.native.shape for _, module in self.adapter.model.named_modules() if isinstance(module, PackedLinear)
        ]
        return sum(rows * columns for rows, columns in shapes)

    def prefill(self, tokens: int) -> float:
        """Tokens per second of one prompt, in one launch, as it is computed while nobody decodes."""
        return tokens / self._timed(tokens, 0, launches=1)

    def decode(self, depth: int, tokens: int) -> float:
        return tokens / self._timed(1, depth, launches=tokens)

    def _timed(self, width: int, depth: int, launches: int) -> float:
        for _ in range(WARM_LAUNCHES):
            with self._row(depth) as row:
                self._launch(row, min(width, 64))
        with self._row(depth) as row:
            began = time.perf_counter()
            for _ in range(launches):
                self._launch(row, width)
            return time.perf_counter() - began

    @contextmanager
    def _row(self, depth: int) -> Iterator[Any]:
        """A row of so many tokens, which are computed the first time and then taken over."""
        from ingot.cache.records import restore_row, take_record

        row = self._rows.new()
        if depth in self._begun:
            restore_row(self._rows, row, [self._begun[depth]], depth)
        elif depth:
            for begin in range(0, depth, CHUNK):
                self._launch(row, min(CHUNK, depth - begin))
            self._begun[depth] = take_record(self._rows, row, 0)
        yield row
        self._rows.leave(row)

    def _launch(self, row: Any, width: int) -> None:
        import mlx.core as mx

        from ingot.cache.forward_batch import ForwardPart

        tokens = mx.random.randint(0, self.adapter.vocab, (width,))
        logits = self.adapter.run(self._rows, tokens, [ForwardPart((row,), width)], [width - 1])
        mx.eval(logits, self._rows.pending())


def compare(build: Build, weights: Path, model: Model, threads: int, rounds: int, quick: bool) -> list[Figure]:
    prompts, depths = (PROMPTS[:1], DEPTHS[:2]) if quick else (PROMPTS, DEPTHS)
    subjects: list[tuple[str, Callable[[], float], Callable[[], float]]] = [
        (
            f"prefill {prompt}",
            lambda prompt=prompt: model.prefill(prompt),
            lambda prompt=prompt: build.measure(weights, threads=threads, prompt=prompt),
        )
        for prompt in prompts
    ] + [
        (
            f"decode at {depth}",
            lambda depth=depth: model.decode(depth, OUTPUT),
            lambda depth=depth: build.measure(weights, threads=threads, output=OUTPUT, depth=depth),
        )
        for depth in depths
    ]
    found = [Figure(name, [], []) for name, _, _ in subjects]
    for round_ in range(rounds):
        for figure, (_, ours, theirs) in zip(found, subjects, strict=True):
            turns = [(figure.ours, ours), (figure.theirs, theirs)]
            for kept, run in turns if round_ % 2 == 0 else reversed(turns):
                kept.append(run())
        print(f"  round {round_ + 1} of {rounds}: done", file=sys.stderr, flush=True)
    return found


def through_http(build: Build, weights: Path, folder: Path, streams: Sequence[int], answer: int) -> list[Figure]:
    """Tokens per second, and the time to the first token, with many streams at once."""
    logs, most = folder.parent, max(streams)
    placed = Placement(weights, "default", most, 1024, logs, ("-ngl", "0", "--no-warmup"))
    found: list[Figure] = []
    with (
        servers.ingot(folder, logs / "ingot.log", most, own_kernels=True) as ours,
        Server(find_peer("llama-server"), build.server, placed) as theirs,
    ):
        plan = LoadPlan(endpoint="completions", prompt_tokens=192, output_tokens=answer, warmup=1)
        target = prepare_target(ours.client, plan)
        other = LoadTarget(theirs.client, theirs.model, is_ingot=False, words=target.words)
        for count in streams:
            levels = [run_level(each, plan, count) for each in (target, other)]
            if any(level.failed or level.ttft is None for level in levels):
                raise IngotError(f"requests failed: {[level.errors for level in levels]}")
            speeds = [level.output_tokens_per_second for level in levels]
            waits = [1 / level.ttft.p50 for level in levels if level.ttft is not None]
            found.append(Figure(f"{count} streams, tokens/s", [speeds[0]], [speeds[1]]))
            found.append(Figure(f"{count} streams, 1/TTFT", [waits[0]], [waits[1]]))
    return found


def memory_speed(threads: int, megabytes: int = 512) -> float:
    """Bytes per second that so many threads together read, by adding up a large array."""
    import threading

    import numpy as np

    parts = [np.ones(megabytes << 17, np.float64) for _ in range(threads)]
    best = 0.0
    for _ in range(5):
        readers = [threading.Thread(target=part.sum) for part in parts]
        began = time.perf_counter()
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        best = max(best, sum(part.nbytes for part in parts) / (time.perf_counter() - began))
    return best


def product_speed(size: int = 2048, rows: int = 512) -> float:
    """Multiplications with additions per second of one large product with packed weights, on all threads."""
    import mlx.core as mx

    from ingot.kernels.cpu import native

    packed = native.packed_weights(*mx.quantize(mx.random.normal((size, size)), 32, 4), None, 32, 4)
    x = mx.random.normal((rows, size))
    mx.eval(x)
    best = 0.0
    for _ in range(10):
        began = time.perf_counter()
        mx.eval(native.linear(x, packed))
        best = max(best, rows * size * size / (time.perf_counter() - began))
    return best


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("bench.cpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, help="a GGUF file whose tokenizer a random model gets")
    parser.add_argument("--shape", choices=tuple(gguf_models.SHAPES), help="a random model instead of the default one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of both (default: one for each core)")
    parser.add_argument("--streams", type=lambda text: tuple(map(int, text.split(","))), default=())
    parser.add_argument("--answer", type=int, default=64, help="tokens of each stream's answer (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer figures, to see that it works")
    parser.add_argument(
        "--limits", action="store_true", help="compare with this machine's memory bandwidth and matrix products"
    )
    parser.add_argument("--stock", action="store_true", help="compare with plain mlx-lm")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    if chosen.tokenizer and not chosen.shape:
        parser.error("--tokenizer is for random models: name a --shape too")
    os.environ["INGOT_THREADS"] = str(chosen.threads)
    progress = TerminalProgress()
    try:
        build = llama_cpp.build(progress)
        with tempfile.TemporaryDirectory(prefix="ingot-bench-") as scratch:
            home = Path(scratch)
            weights = (
                gguf_models.write(chosen.shape, home, progress, chosen.tokenizer)
                if chosen.shape
                else fetch_original_weights(DEFAULT_MODEL, llama_cpp.KEPT.expanduser(), progress)
            )
            folder = home / "model"
            folder.mkdir()
            convert_gguf(weights, folder, progress)
            progress.finish()
            model = Model(folder)
            found = compare(build, weights, model, chosen.threads, chosen.rounds, chosen.quick)
            if chosen.limits:
                _print_limits(model, found, chosen.threads)
            print(f"\n{chosen.shape or DEFAULT_MODEL}, {chosen.threads} threads, tokens per second")
            print(f"{'':24} {'ingot':>10} {'llama.cpp':>10} {'ratio':>9}")
            _print_rows(found)
            if chosen.stock:
                _print_stock(model, folder)
            if chosen.streams:
                served = through_http(build, weights, folder, chosen.streams, chosen.answer)
                _print_rows(served)
                _print_gains(served[::2])
                found += served
    except IngotError as error:
        print(f"bench.cpu: {error.message}", file=sys.stderr)
        return 1
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(figure) for figure in found], indent=1) + "\n", encoding="utf-8")
    return 0


def _print_rows(figures: Sequence[Figure]) -> None:
    for figure in figures:
        print(figure.row(), flush=True)


def _print_gains(speeds: Sequence[Figure]) -> None:
    """What more streams gain over the first number of them."""
    for figure in speeds[1:]:
        ours, theirs = figure.ours[0] / speeds[0].ours[0], figure.theirs[0] / speeds[0].theirs[0]
        name, one = (each.subject.split(",")[0] for each in (figure, speeds[0]))
        print(f"{name}: ingot {ours:.2f}x of {one}, llama-server {theirs:.2f}x", flush=True)


def _speed(found: Sequence[Figure], subject: str) -> float:
    return statistics.median(next(figure for figure in found if figure.subject == subject).ours)


def _print_stock(model: Model, folder: Path) -> None:
    """On prompts and at depths of the same length."""
    theirs = stock.measured(folder)
    ours = {
        "prefill": statistics.median(model.prefill(stock.PROMPT) for _ in range(3)),
        "decode": statistics.median(model.decode(stock.PROMPT, OUTPUT) for _ in range(3)),
    }
    for kind, speed in ours.items():
        ratio = speed / theirs[kind]
        print(f"{kind}: plain mlx-lm {theirs[kind]:.2f}, ingot {speed:.1f}: {ratio:.0f}x", flush=True)


def _print_limits(model: Model, found: Sequence[Figure], threads: int) -> None:
    read, used = memory_speed(threads), model.adapter.weight_bytes * _speed(found, f"decode at {DEPTHS[0]}")
    print(
        f"\nreading memory: {read / 1e9:.1f} GB/s; decoding reads {used / 1e9:.1f} GB/s of weights: {used / read:.0%}"
    )
    most, done = product_speed(), model.products_per_token() * _speed(found, f"prefill {PROMPTS[0]}")
    print(
        f"one large product: {most / 1e9:.0f} G multiply-adds/s; those of prefill: {done / 1e9:.0f}: {done / most:.0%}"
    )


if __name__ == "__main__":
    sys.exit(main())
