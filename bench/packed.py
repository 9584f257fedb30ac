"""Products with quantised weights: the GPU's kernel against MLX's own, in one run, alternating.

python -m bench.packed                      an 8B model's products, 1 to 16 rows; other cuts; experts; prompts; mixtures
python -m bench.packed --bits 8 --group 32 --rows 1,8
python -m bench.packed --mode mxfp4                 floats of few bits: mxfp4, nvfp4 or mxfp8
python -m bench.packed --only cuts,prompts
python -m bench.packed --mlx                also MLX's own, which take half a minute to compile

Bytes are those of the quantised weights, their scales and biases. Each product waits for the one before, as in a model,
and has other weights, so that no cache of the device has them; the cost of waiting is subtracted. On a CPU it needs
INGOT_AS=cuda, and measures the emulator, which says nothing about a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import mlx.core as mx

from ingot.kernels.device import Device, current_device
from ingot.kernels.gpu.launcher import Launcher, compile_kernels, kernel_launcher
from ingot.kernels.packed_matmul.experts import GROUPED_TUNING, GroupedExperts, GroupedTuning
from ingot.kernels.packed_matmul.kernels import (
    FLOAT_FORMATS,
    MXFP4,
    PACKED_TUNING,
    PackedCut,
    PackedFormat,
    PackedProduct,
    PackedTuning,
    PackedWeights,
    UnpackScratch,
    make_scratch,
)
from ingot.measure.subjects import Mixture, MixtureTrial, drawn_parts

SHAPES = "6144x4096,4096x4096,28672x4096,4096x14336,128256x4096"
CUTS = (
    *(
        PackedCut(8, 1),
        PackedCut(8, 1, stages=4),
        PackedCut(8, 1, stages=4, ahead=False),
        PackedCut(16, 1),
        PackedCut(4, 1, stages=4),
    ),
    *(PackedCut(4, 2), PackedCut(4, 2, stages=4), PackedCut(4, 2, stages=4, ahead=False), PackedCut(4, 2, ahead=False)),
)
MANY = (16, 32, 64, 128, 256, 2048)
BEYOND_CACHES, QUEUED, ROUNDS = 256 << 20, 6 << 30, 5
LARGE, EXPERTS, CHOSEN = 1 << 29, 128, 8
FLOATS = {packing.mode: packing for packing in FLOAT_FORMATS}
SECTIONS = ("products", "cuts", "experts", "prompts", "mixtures")


class Trial:
    """Weights of one shape, as many of them as no cache holds."""

    def __init__(self, packing: PackedFormat, outputs: int, columns: int, *, beyond: int = BEYOND_CACHES) -> None:
        self.packing, self.outputs, self.columns, self._beyond = packing, outputs, columns, beyond
        words = columns * packing.bits // 32
        self.bytes = 4 * outputs * words + (4 if packing.affine else 1) * outputs * (columns // packing.group)
        self._weights = [self._drawn() for _ in range(max(1, -(-beyond // self.bytes)))]
        self._next = cycle(self._weights)

    def _drawn(self) -> PackedWeights:
        parts = drawn_parts(self.packing, (self.outputs,), self.columns)
        return PackedWeights.of(self.packing, *parts, dtype=mx.bfloat16)

    @property
    def first(self) -> PackedWeights:
        return self._weights[0]

    def repeats(self, most: int = 200) -> int:
        """As many as a device's queue takes at once."""
        return max(2, min(most, QUEUED // self.bytes, self._beyond * 8 // self.bytes))

    def drawn(self, rows: int) -> mx.array:
        x = mx.random.normal((rows, self.columns)).astype(mx.bfloat16)
        mx.eval(x)
        return x

    def ours(self, product: PackedProduct, x: mx.array) -> mx.array:
        return product(x, next(self._next))

    def theirs(self, x: mx.array) -> mx.array:
        return next(self._next).by_mlx(x)

    def unpacked(self, x: mx.array) -> mx.array:
        return x @ next(self._next).unpacked(x.dtype).T

    def by_turns(self, room: UnpackScratch, x: mx.array) -> mx.array:
        return room.multiply(x, next(self._next))

    def off(self, product: PackedProduct, x: mx.array) -> float:
        """The largest difference from products in float32, of the largest of them."""
        weights = self._weights[0]
        wanted = x.astype(mx.float32) @ weights.unpacked(mx.float32).T
        return float(mx.abs(product(x, weights).astype(mx.float32) - wanted).max() / mx.abs(wanted).max())


@mx.compile
def waiting(x: mx.array, last: mx.array) -> mx.array:
    """`x`, once the device has `last`."""
    return x + last.reshape(-1)[:1] * 0


class Clock:
    """Measures the device alone: while it adds to a large array, the host asks for all that is measured."""

    def __init__(self, size: int) -> None:
        self._large = mx.zeros(size, mx.bfloat16)
        self._waited: dict[tuple[tuple[int, ...], int], float] = {}
        mx.eval(self._large)

    def seconds(self, work: Callable[[mx.array], mx.array], x: mx.array, repeats: int) -> float:
        """Of one of many, each of which waits for the one before."""
        mx.eval(work(x))
        key = (x.shape, repeats)
        if key not in self._waited:
            self._waited[key] = min(self._chained(lambda x: x, x, repeats) for _ in range(ROUNDS))
        taken = min(self._chained(work, x, repeats) for _ in range(ROUNDS))
        return max(taken - self._waited[key], 0.1e-6 * repeats) / repeats

    def _chained(self, work: Callable[[mx.array], mx.array], x: mx.array, repeats: int) -> float:
        last, before = x, self._large
        for _ in range(repeats):
            last = work(waiting(x, last))
        for _ in range(12):
            before = before + 1
        mx.synchronize()
        begun = time.perf_counter()
        mx.async_eval(before)
        mx.async_eval(last)
        mx.synchronize()
        return time.perf_counter() - begun


def products(device: Device, clock: Clock, arguments: argparse.Namespace) -> None:
    compile_kernels(device, partial(_rehearsed, arguments, [PACKED_TUNING]))
    print(f"{'weights':>14} {'rows':>4}   ours us   TB/s | MLX's us   TB/s |  off")
    product = _product(device, arguments, PACKED_TUNING)
    for trial in _trials(arguments):
        for rows in arguments.rows:
            x = trial.drawn(rows)
            off = trial.off(product, x)
            ours = clock.seconds(partial(trial.ours, product), x, trial.repeats())
            theirs = clock.seconds(trial.theirs, x, trial.repeats(16)) if arguments.mlx and rows in (1, 8) else None
            speeds = " | ".join(_speed(taken, trial.bytes) for taken in (ours, theirs))
            print(f"{_name(trial)} {rows:4}  {speeds} | {off:.4f}", flush=True)


def prompts(device: Device, clock: Clock, arguments: argparse.Namespace) -> None:
    print(f"{'weights':>14} rows   ours us | MLX's us | unpacked by MLX | unpacked by us, us")
    product, rows = _product(device, arguments, PACKED_TUNING), (17, 80) if arguments.tiny else MANY
    for trial in _trials(arguments):
        for count in rows if arguments.tiny or trial.outputs in (4096, 28672) else ():
            x = trial.drawn(count)
            ours = clock.seconds(partial(trial.ours, product), x, trial.repeats(16)) if count <= 256 else None
            room = make_scratch(device, trial.outputs * trial.columns, mx.bfloat16)
            assert room is not None
            works = (trial.theirs if arguments.mlx else None, trial.unpacked, partial(trial.by_turns, room))
            others = [None if work is None else clock.seconds(work, x, trial.repeats(16)) for work in works]
            print(_name(trial), f"{count:4}", " | ".join(_microseconds(taken) for taken in (ours, *others)), flush=True)


def experts(device: Device, clock: Clock, arguments: argparse.Namespace) -> None:
    print(f"{'weights':>14} tokens   ours us   TB/s | MLX's us   TB/s |  off")
    product, packing = _product(device, arguments, PACKED_TUNING), arguments.packing
    for outputs, columns in ((48, 128),) if arguments.tiny else ((768, 2048), (2048, 768)):
        trial = ExpertsTrial(packing, outputs, columns)
        for tokens in (1, 2) if arguments.tiny else (1, 4, 8, 16, 32):
            trial.choose(tokens)
            x = trial.drawn(tokens)
            off = trial.off(product, x)
            ours = clock.seconds(partial(trial.ours, product), x, 64)
            theirs = clock.seconds(trial.theirs, x, 64) if arguments.mlx else None
            speeds = " | ".join(_speed(each, trial.bytes) for each in (ours, theirs))
            print(f"{_name(trial)} {tokens:6}  {speeds} | {off:.4f}", flush=True)


class ExpertsTrial:
    """A layer of 128 experts, of which each token chooses eight."""

    def __init__(self, packing: PackedFormat, outputs: int, columns: int) -> None:
        parts = drawn_parts(packing, (EXPERTS, outputs), columns)
        self.outputs, self.columns = outputs, columns
        self._weights = PackedWeights.of(packing, *parts, dtype=mx.bfloat16)

    def drawn(self, tokens: int) -> mx.array:
        x = mx.random.normal((tokens, self.columns)).astype(mx.bfloat16)
        mx.eval(x)
        return x

    def choose(self, tokens: int) -> None:
        """Experts for so many tokens, others each time."""
        drawn = [[mx.random.permutation(EXPERTS)[:CHOSEN] for _ in range(tokens)] for _ in range(16)]
        chosen = [mx.stack(each).astype(mx.int32) for each in drawn]
        mx.eval(chosen)
        self._chosen, self._next = chosen, cycle(chosen)

    @property
    def bytes(self) -> float:
        """Of the experts that are chosen, each once."""
        parts = (self._weights.weight, self._weights.scales, self._weights.biases)
        each = sum(part.nbytes for part in parts if part is not None) / EXPERTS
        return each * statistics.mean(len({*chosen.flatten().tolist()}) for chosen in self._chosen)  # type: ignore[arg-type]

    def ours(self, product: PackedProduct, x: mx.array) -> mx.array:
        return product.gather(x, self._weights, next(self._next).flatten())

    def theirs(self, x: mx.array) -> mx.array:
        weights, packing = self._weights, self._weights.packing
        given = (weights.weight.view(mx.uint32), weights.scales, weights.biases)
        options: dict[str, Any] = {"group_size": packing.group, "bits": packing.bits, "mode": packing.mode}
        found = mx.gather_qmm(x[:, None, None], *given, rhs_indices=next(self._next), transpose=True, **options)
        return found.reshape(-1, self.outputs)

    def off(self, product: PackedProduct, x: mx.array) -> float:
        """The largest difference from products in float32, of the largest of them, for one choice."""
        chosen = self._chosen[0]
        found = product.gather(x, self._weights, chosen.flatten()).astype(mx.float32).reshape(*chosen.shape, -1)
        wanted = mx.stack(
            [
                mx.stack(
                    [
                        row.astype(mx.float32) @ self._weights.part(int(expert)).unpacked(mx.float32).T
                        for expert in experts
                    ]
                )
                for row, experts in zip(x, chosen.tolist(), strict=True)  # type: ignore[arg-type]
            ]
        )
        return float(mx.abs(found - wanted).max() / mx.abs(wanted).max())


MIXTURES = {
    "Qwen3 30B-A3B": Mixture(PackedFormat(4, 64), 128, 8, 2048, 768),
    "GPT-OSS 20B": Mixture(MXFP4, 32, 4, 2880, 2880, True),
    "GLM 4.7 Flash": Mixture(PackedFormat(4, 64), 64, 4, 2048, 1536),
}
TINY_MIXTURES = {
    "tiny": Mixture(PackedFormat(4, 64), 4, 2, 128, 64),
    "tiny clipped": Mixture(MXFP4, 4, 2, 64, 128, True),
}
GROUPED = (
    *(GroupedTuning((128,), stages=stages, fours=fours) for fours, stages in ((1, 3), (1, 4), (1, 5), (2, 4), (2, 6))),
    *(GroupedTuning((rows,)) for rows in (32, 64)),
    GroupedTuning((64,), units=False),
)


def mixtures(device: Device, clock: Clock, arguments: argparse.Namespace) -> None:
    """Milliseconds of a layer's experts for so many tokens, with other tunings for the most of them."""
    run = _launcher(device)
    for name, mixture in (TINY_MIXTURES if arguments.tiny else MIXTURES).items():
        for tokens in (5, 40) if arguments.tiny else (128, 512, 2048):
            trial = MixtureTrial(mixture, tokens)
            work = _grouped(trial, run, GROUPED_TUNING)
            parts = [clock.seconds(part, trial.x, 8) for part in _parts_of(work, trial.chosen)]
            print(f"{name:>14} {tokens:5}  {_experts_speed(trial, parts[-1])}", end="", flush=True)
            print(f"  (sorted {parts[0] * 1e3:.3f}, gated {parts[1] * 1e3:.3f})", end="", flush=True)
            theirs = trial.theirs()
            if arguments.mlx:
                taken = clock.seconds(lambda x, own=theirs, chosen=trial.chosen: own(x, chosen), trial.x, 2)
                print(f"  MLX's {_experts_speed(trial, taken)}, {taken / parts[-1]:.1f}x", end="", flush=True)
                found, wanted = work(trial.x, trial.chosen), theirs(trial.x, trial.chosen)
                print(f"  off {float(mx.abs(found - wanted).max() / mx.abs(wanted).max()):.4f}", end="")
            print(flush=True)
        for tuning in () if arguments.tiny else GROUPED:
            taken = clock.seconds(partial(_grouped(trial, run, tuning), chosen=trial.chosen), trial.x, 8)
            units = "" if tuning.units else ", units that read registers"
            said = f"{tuning.rows[0]} rows, {tuning.fours * 4} warps, {tuning.stages} stages{units}"
            print(f"{'':20}  {_experts_speed(trial, taken)}  {said}", flush=True)


def _parts_of(work: GroupedExperts, chosen: mx.array) -> list[Callable[[mx.array], mx.array]]:
    """Sorting; with gates; all."""
    return [
        lambda x: work.sorted_rows(x, chosen)[0],
        lambda x: work.activated(*work.sorted_rows(x, chosen)),
        lambda x: work(x, chosen),
    ]


def _grouped(trial: MixtureTrial, run: Launcher, tuning: GroupedTuning) -> GroupedExperts:
    activation: Any = "swiglu_oai" if trial.mixture.clipped else "silu"
    weights = (trial.gate, trial.up, trial.down)
    return GroupedExperts(run, *weights, dtype=mx.bfloat16, activation=activation, tuning=tuning)


def _experts_speed(trial: MixtureTrial, taken: float) -> str:
    flops = 6 * trial.chosen.size * trial.mixture.hidden * trial.mixture.inner
    return f"{taken * 1e3:8.3f} ms {flops / taken / 1e12:6.1f} TFLOP/s"


def cuts(device: Device, clock: Clock, arguments: argparse.Namespace) -> None:
    """Of one shape after another, TB/s at some numbers of rows."""
    tried = CUTS[:1] if arguments.tiny else CUTS
    compile_kernels(
        device, partial(_rehearsed, arguments, [PackedTuning(few=(cut, cut), many=(cut, cut)) for cut in tried])
    )
    for trial in _trials(arguments):
        for cut in tried:
            product, found = _product(device, arguments, PackedTuning(few=(cut, cut), many=(cut, cut))), []
            for rows in (1, 8, 16):
                x = trial.drawn(rows)
                wrong = trial.off(product, x) > 0.02
                taken = clock.seconds(partial(trial.ours, product), x, trial.repeats())
                found.append(f"{rows}: {trial.bytes / taken / 1e12:5.2f}" + (" WRONG" if wrong else ""))
            said = cut.fitting(arguments.packing.bits, arguments.packing.held)
            print(
                _name(trial),
                "  ".join(found),
                f" {said.warps}x{said.tiles} {said.fetch}x{said.stages}{' ahead' if said.ahead else ''}",
                flush=True,
            )


def _rehearsed(arguments: argparse.Namespace, tried: Sequence[PackedTuning], run: Launcher) -> None:
    """Launches all kernels that will be measured, so that they are compiled at once."""
    packing = arguments.packing
    for trial in _trials(arguments, few=True):
        for tuning in tried:
            for rows in (8, 16):
                PackedProduct(run, packing, mx.bfloat16, tuning)(trial.drawn(rows), trial.first)


def _launcher(device: Device) -> Launcher:
    run = kernel_launcher(device)
    if run is None:
        raise SystemExit("bench.packed: no kernels here; on a CPU set INGOT_AS=cuda, and install g++")
    return run


def _product(device: Device, arguments: argparse.Namespace, tuning: PackedTuning) -> PackedProduct:
    return PackedProduct(_launcher(device), arguments.packing, mx.bfloat16, tuning)


def _trials(arguments: argparse.Namespace, *, few: bool = False) -> Iterator[Trial]:
    """With weights beyond all caches, or `few` of them."""
    packing, beyond = arguments.packing, 1 if few or arguments.tiny else BEYOND_CACHES
    for shape in arguments.shapes.split(","):
        outputs, columns = map(int, shape.split("x"))
        yield Trial(packing, outputs, columns, beyond=beyond)


def _name(trial: Trial | ExpertsTrial) -> str:
    return f"{f'{trial.outputs}x{trial.columns}':>14}"


def _speed(taken: float | None, bytes: float) -> str:
    return f"{_microseconds(taken)} {'     -' if taken is None else f'{bytes / taken / 1e12:6.2f}'}"


def _microseconds(taken: float | None) -> str:
    return "       -" if taken is None else f"{taken * 1e6:8.1f}"


def _sections(text: str) -> list[str]:
    asked = text.split(",")
    if unknown := {*asked} - {*SECTIONS}:
        raise argparse.ArgumentTypeError(f"there is no section {', '.join(sorted(unknown))}")
    return asked


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--mode", choices=FLOATS, help="floats, whose bits and groups are known")
    parser.add_argument("--shapes", help=f"outputs x columns ({SHAPES})")
    parser.add_argument("--rows", type=lambda text: [int(rows) for rows in text.split(",")], default=[1, 2, 4, 8, 16])
    parser.add_argument(
        "--only", type=_sections, default=SECTIONS, help=f"of {', '.join(SECTIONS)}, separated by commas"
    )
    parser.add_argument("--mlx", action="store_true", help="MLX's own products, too")
    parser.add_argument("--tiny", action="store_true", help="sizes for the emulator, to see whether it runs")
    arguments, device = parser.parse_args(given), current_device()
    arguments.packing = FLOATS.get(arguments.mode) or PackedFormat(arguments.bits, arguments.group)
    arguments.shapes = arguments.shapes or ("48x256" if arguments.tiny else SHAPES)
    clock = Clock(32 if arguments.tiny else LARGE)
    print(device.name)
    for name, section in zip(SECTIONS, (products, cuts, experts, prompts, mixtures), strict=True):
        if name in arguments.only:
            begun = time.perf_counter()
            section(device, clock, arguments)
            print(f"{name}: {time.perf_counter() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
