"""Products with 16-bit weights: the GPU's kernel against MLX's own, in one run, alternating.

python -m bench.dense                       an 8B model's products, 1 to 32 rows; other cuts; as a graph of layers
python -m bench.dense --rows 1,8 --shapes 4096x4096
python -m bench.dense --only cuts

Bytes are those of the weights. Each product waits for the one before, as in a model, and has other weights, so that no
cache of the device has them; the cost of waiting is subtracted. On a CPU it needs INGOT_AS=cuda, and measures the
emulator, which says nothing about a GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial
from itertools import cycle

import mlx.core as mx
import mlx.nn as nn

from bench.packed import Clock
from ingot.kernels.decode_graph.capture import GraphCapture, GraphReplay, replay_stage
from ingot.kernels.dense_matmul.kernels import DENSE_TUNING, WIDTHS, DenseProduct, DenseTuning, RegisterCut, StreamCut
from ingot.kernels.device import Device, current_device
from ingot.kernels.gpu.launcher import Launcher, compile_kernels, kernel_launcher

SHAPES = "6144x4096,4096x4096,28672x4096,4096x14336,128256x4096"
TRIED, GATED = "6144x4096,4096x4096,28672x4096,4096x14336", "28672x4096"
CUTS: dict[int, tuple[RegisterCut | StreamCut, ...]] = {
    8: (
        RegisterCut(8, 1, 2),
        RegisterCut(8, 1, 4),
        StreamCut(8, 1, 4),
        StreamCut(8, 1, 4, split=8),
        StreamCut(4, 1, 5, split=4),
    ),
    16: (RegisterCut(8, 1, 2), StreamCut(8, 1, 4), StreamCut(8, 1, 4, split=8), StreamCut(4, 1, 5, split=4)),
    32: (
        *(RegisterCut(8, 2, 2), StreamCut(8, 1, 3), StreamCut(8, 1, 4), StreamCut(8, 1, 5), StreamCut(4, 2, 3)),
        *(
            StreamCut(8, 1, 4, split=2),
            StreamCut(8, 1, 4, split=4),
            StreamCut(4, 1, 5, split=4),
            StreamCut(8, 1, 3, split=8),
        ),
        *(StreamCut(8, 1, 4, split=8), StreamCut(4, 2, 4, split=8)),
    ),
}
"""By the width."""
PAIRS: dict[int, tuple[tuple[RegisterCut | StreamCut, RegisterCut | StreamCut], ...]] = {
    8: ((RegisterCut(8, 1, 2), RegisterCut(8, 1, 2)), (StreamCut(8, 1, 4, split=8), StreamCut(8, 1, 4))),
    16: ((RegisterCut(8, 1, 2), RegisterCut(8, 1, 2)), (StreamCut(8, 1, 4, split=8), StreamCut(8, 1, 4))),
    32: (
        *(
            (RegisterCut(8, 2, 2), RegisterCut(8, 2, 2)),
            (RegisterCut(8, 2, 2), StreamCut(8, 1, 4)),
            (StreamCut(4, 1, 5, split=4), StreamCut(8, 1, 4)),
        ),
        *((StreamCut(4, 2, 4, split=8), StreamCut(8, 1, 4)), (StreamCut(8, 1, 4, split=8), StreamCut(8, 1, 4))),
        *((StreamCut(8, 1, 3, split=8), StreamCut(8, 1, 4)), (StreamCut(4, 2, 4, split=8), StreamCut(8, 1, 3))),
        *((StreamCut(4, 2, 4, split=8), StreamCut(8, 1, 5)), (StreamCut(4, 2, 4, split=8), StreamCut(4, 2, 3))),
    ),
}
"""By the width: for few outputs, and for many."""
LAYERS, REPLAYS = 12, 8
BEYOND_CACHES, QUEUED, LARGE = 256 << 20, 4 << 30, 1 << 29
WRONG = 0.02
SECTIONS = ("products", "gates", "cuts", "layers")


@mx.compile
def gate_of(gate: mx.array, up: mx.array) -> mx.array:
    return nn.silu(gate) * up


class Trial:
    """Weights of one shape, as many of them as no cache holds."""

    def __init__(self, outputs: int, columns: int, *, beyond: int) -> None:
        self.outputs, self.columns, self.bytes = outputs, columns, 2 * outputs * columns
        self.repeats = max(2, min(64, QUEUED // self.bytes, beyond))
        self._weights = [self._drawn() for _ in range(max(1, -(-beyond // self.bytes)))]
        self._next = cycle(self._weights)

    def _drawn(self) -> mx.array:
        weight = mx.random.normal((self.outputs, self.columns), mx.bfloat16) * 0.02
        mx.eval(weight)
        return weight

    def drawn(self, rows: int) -> mx.array:
        x = mx.random.normal((rows, self.columns), mx.bfloat16)
        mx.eval(x)
        return x

    def ours(self, product: DenseProduct, x: mx.array) -> mx.array:
        return product(x, next(self._next))

    def gated(self, product: DenseProduct, x: mx.array, number: int | None = None) -> mx.array:
        return product.gated(x, next(self._next) if number is None else self._weights[number])

    def then_gated(self, product: DenseProduct, x: mx.array, number: int | None = None) -> mx.array:
        y = product(x, next(self._next) if number is None else self._weights[number])
        return gate_of(*mx.split(y, 2, axis=-1))

    def theirs(self, x: mx.array) -> mx.array:
        return x @ next(self._next).T

    def off(self, product: DenseProduct, x: mx.array) -> float:
        """The largest difference from MLX's own, of the largest product."""
        weight = self._weights[0]
        found, wanted = (each.astype(mx.float32) for each in (product(x, weight), x @ weight.T))
        return float(mx.abs(found - wanted).max() / mx.abs(wanted).max())

    def alike(self, product: DenseProduct, other: DenseProduct, x: mx.array) -> bool:
        """Whether both have the same bits."""
        weight = self._weights[0]
        return bool(mx.array_equal(product(x, weight), other(x, weight)).item())

    def __str__(self) -> str:
        return f"{self.outputs}x{self.columns}"


def products(device: Device, clock: Clock, arguments: argparse.Namespace) -> None:
    print(f"{'weights':>14} {'rows':>4}   ours us   TB/s | MLX's us   TB/s |  off")
    product = DenseProduct(_launcher(device))
    _compile(device, arguments.shapes, [(rows, DENSE_TUNING) for rows in arguments.rows])
    for trial in _trials(arguments.shapes, arguments):
        for rows in arguments.rows:
            x = trial.drawn(rows)
            off = trial.off(product, x)
            taken = (clock.seconds(work, x, trial.repeats) for work in (partial(trial.ours, product), trial.theirs))
            speeds = " | ".join(f"{each * 1e6:9.1f} {trial.bytes / each / 1e12:6.2f}" for each in taken)
            print(f"{trial!s:>14} {rows:4} {speeds} | {_judged(off)}", flush=True)


def gates(device: Device, clock: Clock, arguments: argparse.Namespace) -> None:
    print(f"{'weights':>14} rows  gated us | product, then gate us | other bits than MLX's, of so many")
    product = DenseProduct(_launcher(device))
    for trial in _trials(arguments.shapes if arguments.tiny else GATED, arguments):
        for rows in arguments.rows[:1] if arguments.tiny else (1, 8, 32):
            x = trial.drawn(rows)
            works = (partial(trial.gated, product), partial(trial.then_gated, product))
            taken = " | ".join(f"{clock.seconds(work, x, trial.repeats) * 1e6:9.1f}" for work in works)
            other = mx.sum(trial.gated(product, x, 0) != trial.then_gated(product, x, 0)).item()
            print(f"{trial!s:>14} {rows:4} {taken} | {other} of {rows * trial.outputs // 2}", flush=True)


def cuts(device: Device, clock: Clock, arguments: argparse.Namespace) -> None:
    shapes = arguments.shapes if arguments.tiny else TRIED
    trials = list(_trials(shapes, arguments))
    print(f"rows: TB/s of {shapes}")
    tried = {width: several[-1:] if arguments.tiny else several for width, several in CUTS.items()}
    widths = arguments.widths or [*CUTS]
    tunings = [(width, _everywhere(each)) for width in widths for each in tried[width]]
    _compile(device, shapes, tunings)
    for width, tuning in tunings:
        product, found = DenseProduct(_launcher(device), tuning), []
        for trial in trials:
            for rows in (1, 8) if width == 8 else (width,):
                x = trial.drawn(rows)
                right = trial.off(product, x) < WRONG and trial.alike(product, DenseProduct(_launcher(device)), x)
                taken = clock.seconds(partial(trial.ours, product), x, trial.repeats)
                found.append(f"{rows}: {trial.bytes / taken / 1e12:4.2f}{'' if right else ' WRONG'}")
        print(f"{width:3}: {tuning.few[0]!s:42} {'  '.join(found)}", flush=True)


class Layers:
    """The products of a model's layers, as one graph: each begins while the one before ends."""

    def __init__(self, size: int, hidden: int, count: int) -> None:
        shapes = ((size * 3 // 2, size), (size, size), (2 * hidden, size), (size, hidden))
        self.size = size
        self.weights = [[mx.random.normal(shape, mx.bfloat16) * 0.02 for shape in shapes] for _ in range(count)]
        self.bytes = sum(weight.nbytes for layer in self.weights for weight in layer)
        mx.eval(self.weights)

    def score(self, rows: int, tuning: DenseTuning) -> GraphCapture:
        score = GraphCapture()
        product, states = DenseProduct(score, tuning), score.give((rows, self.size), mx.bfloat16)
        for dtype in (mx.float32, mx.int32, mx.int32, mx.int32):
            score.give((8,), dtype)
        for into, out, both, down in self.weights:
            product.launched(states, into)
            states = product.launched(product.gated(product.launched(states, out), both), down)
        score.result = states
        return score

    def seconds(self, replay: GraphReplay, rows: int, rounds: int) -> float:
        given = [mx.ones((rows, self.size), mx.bfloat16), mx.zeros(8), *(mx.zeros(8, mx.int32) for _ in range(3))]
        after = mx.zeros(1, mx.int32)
        taken = []
        for _ in range(rounds):
            begun = time.perf_counter()
            mx.eval(replay(given, after)[0])
            taken.append(time.perf_counter() - begun)
        return min(taken)


def layers(device: Device, clock: Clock, arguments: argparse.Namespace) -> None:
    """Host's time is in it, too, which is about 0.1 ms of all layers."""
    model, where = Layers(32, 32, 1) if arguments.tiny else Layers(4096, 14336, LAYERS), replay_stage(device)
    for width in arguments.widths or ([8] if arguments.tiny else [*PAIRS]):
        for few, many in PAIRS[width][-1:] if arguments.tiny else PAIRS[width]:
            replay = where.ready(model.score(width, DenseTuning(few=(few,) * len(WIDTHS), many=(many,) * len(WIDTHS))))
            taken = model.seconds(replay, width, 1 if arguments.tiny else REPLAYS)
            speed = f"{taken * 1e6 / len(model.weights):6.1f} us a layer, {model.bytes / taken / 1e12:4.2f} TB/s"
            print(f"{width:3}: {speed}: {few!s:40} | {many}", flush=True)


def _everywhere(cut: RegisterCut | StreamCut) -> DenseTuning:
    return DenseTuning(few=(cut,) * len(WIDTHS), many=(cut,) * len(WIDTHS))


def _compile(device: Device, shapes: str, tunings: list[tuple[int, DenseTuning]]) -> None:
    """All at once what so many rows are multiplied by."""

    def rehearsed(run: Launcher) -> None:
        for outputs, columns in _sizes(shapes):
            for rows, tuning in tunings:
                given = mx.zeros((rows, columns), mx.bfloat16), mx.zeros((outputs, columns), mx.bfloat16)
                DenseProduct(run, tuning)(*given)

    compile_kernels(device, rehearsed)


def _launcher(device: Device) -> Launcher:
    run = kernel_launcher(device)
    if run is None:
        raise SystemExit("bench.dense: no kernels here; on a CPU set INGOT_AS=cuda, and install g++")
    return run


def _trials(shapes: str, arguments: argparse.Namespace) -> Iterator[Trial]:
    for outputs, columns in _sizes(shapes):
        yield Trial(outputs, columns, beyond=1 if arguments.tiny else BEYOND_CACHES)


def _sizes(shapes: str) -> list[tuple[int, int]]:
    return [(int(outputs), int(columns)) for outputs, columns in (shape.split("x") for shape in shapes.split(","))]


def _judged(off: float) -> str:
    return f"{off:.4f}{'' if off < WRONG else ' WRONG'}"


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", help=f"outputs x columns ({SHAPES})")
    rows = [1, 2, 4, 8, 16, 32]
    parser.add_argument("--rows", type=lambda text: [int(rows) for rows in text.split(",")], default=rows)
    parser.add_argument("--only", choices=SECTIONS)
    parser.add_argument("--widths", type=lambda text: [int(width) for width in text.split(",")], help="of which cuts")
    parser.add_argument("--tiny", action="store_true", help="sizes for the emulator, to see whether it runs")
    arguments, device = parser.parse_args(given), current_device()
    arguments.shapes = arguments.shapes or ("48x512" if arguments.tiny else SHAPES)
    _launcher(device)
    clock = Clock(32 if arguments.tiny else LARGE)
    print(f"{device.name}; {DENSE_TUNING}")
    for name, section in zip(SECTIONS, (products, gates, cuts, layers), strict=True):
        if arguments.only in (None, name):
            begun = time.perf_counter()
            section(device, clock, arguments)
            print(f"{name}: {time.perf_counter() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
