"""Products with 16-bit weights for NVIDIA GPUs: of few rows at memory bandwidth, and of many in the same bits.

Tuning affects speed, never results: only `spans` determines the order in which a product is summed, whatever its
outputs and rows; nothing else changes any bits. They are compared with MLX's own on the device at hand: a kernel that
differs or is slower is not used. Each kind of layer is compared once, and the largest is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import ClassVar, NamedTuple

import mlx.core as mx

from ingot.kernels.device import Device
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.kernel_source import Kernel, KernelTemplate, LaunchConfig, OutputSpec, read_source
from ingot.kernels.gpu.launcher import Launched, Launcher, compile_kernels, kernel_launcher, required_launcher
from ingot.kernels.measured import DENSE
from ingot.kernels.selfcheck import BOUNDS, Case, Verdicts, check_cases

LINE = 64
"""Spans are multiples of so many columns: a memory transaction."""
WIDTHS = (8, 16, 32)
"""The most rows of each kernel."""


@dataclass(frozen=True, slots=True)
class RegisterCut:
    """For few rows: weights are loaded to registers."""

    warps: int  # that share the columns
    tiles: int  # of sixteen outputs
    depth: int  # stages of weights that a warp prefetches

    split: ClassVar[int] = 1

    def __str__(self) -> str:
        return f"registers for {self.depth}, {self.warps} warps, {self.tiles} tiles"

    @property
    def outputs(self) -> int:
        """Outputs of a group of threads."""
        return self.tiles * 16


@dataclass(frozen=True, slots=True)
class StreamCut:
    """For more rows: weights and activations are copied to shared memory asynchronously."""

    warps: int  # each with other outputs
    tiles: int  # of sixteen outputs of a warp
    stages: int  # in shared memory, all but one of which are being copied
    split: int = 1  # groups of threads that share the columns (split-K); a second kernel sums their results

    def __str__(self) -> str:
        return f"stream of {self.stages}, {self.warps} warps/{self.split}, {self.tiles} tiles"

    @property
    def outputs(self) -> int:
        """Outputs of a group of threads."""
        return self.warps * self.tiles * 16

    def lent(self, width: int) -> int:
        """Bytes of shared memory for so many rows."""
        return self.stages * (self.outputs + width) * LINE * 2


@dataclass(frozen=True, slots=True)
class TileCut:
    """For prompts: groups of threads multiply tiles of weights and activations, both in shared memory."""

    out_warps: int = 2  # warps beside each other, with other outputs
    row_warps: int = 4  # and with other rows
    tiles: int = 4  # of sixteen outputs of a warp
    eights: int = 4  # eights of rows of a warp
    stages: int = 3  # in shared memory, all but one of which are being copied: as many as any device has room for

    halves: int = 2  # of 64 columns in a stage

    def __str__(self) -> str:
        return f"tiles of {self.outputs}x{self.rows}, {self.stages} stages"

    @property
    def outputs(self) -> int:
        """Outputs of a group of threads."""
        return self.out_warps * self.tiles * 16

    @property
    def rows(self) -> int:
        return self.row_warps * self.eights * 8

    @property
    def warps(self) -> int:
        return self.out_warps * self.row_warps

    @property
    def lent(self) -> int:
        """Bytes of shared memory."""
        return self.stages * (self.outputs + self.rows) * self.halves * LINE


ENOUGH_GROUPS = 96
"""Of threads, for a GPU to be busy."""


def tile_cut(cuts: tuple[TileCut, TileCut], outputs: int, rows: int) -> TileCut:
    """The larger one, where there are enough groups of threads."""
    small, large = cuts
    return large if -(-outputs // large.outputs) * -(-rows // large.rows) >= ENOUGH_GROUPS else small


SMALL_TILE, LARGE_TILE = TileCut(2, 2, 2, 4, 4), TileCut()


@dataclass(frozen=True, slots=True)
class DenseTuning:
    """A cut for each of the widths: where outputs are fewer than `wide`, and elsewhere."""

    spans: int = 8  # that columns are cut into
    wide: int = 8192
    few: tuple[RegisterCut | StreamCut, ...] = (RegisterCut(8, 1, 2), RegisterCut(8, 1, 2), StreamCut(4, 2, 4, split=8))
    many: tuple[RegisterCut | StreamCut, ...] = (RegisterCut(8, 1, 2), RegisterCut(8, 1, 2), StreamCut(8, 1, 4))
    prompts: tuple[TileCut, TileCut] = (SMALL_TILE, LARGE_TILE)  # for more rows than the largest width

    def cut_of(self, outputs: int, width: int) -> RegisterCut | StreamCut:
        return (self.many if outputs >= self.wide else self.few)[WIDTHS.index(width)]


DENSE_TUNING = DenseTuning()
_IN_REGISTERS = (RegisterCut(8, 1, 2), RegisterCut(8, 1, 2), RegisterCut(8, 2, 2))
TUNING_CHOICES = (DENSE_TUNING, DenseTuning(few=_IN_REGISTERS, many=_IN_REGISTERS))
"""The fastest first; all give the same bits."""


SOURCE = Path(__file__).parent / "source"
DTYPES = (mx.float16, mx.bfloat16)
MOST_ROWS = 32
"""For more, MLX's own products are faster, in other bits."""
CHUNK = 8
"""Columns are read in chunks of so many."""
ENDS = {
    "multiply": (),
    "multiply_biased": ("bias",),
    "multiply_added": ("residual",),
    "multiply_biased_added": ("bias", "residual"),
    "multiply_gated": (),
    "multiply_parted": (),
}
"""Epilogues of a product, and their inputs."""
JOINING = 8
"""Warps of a group that sums split products."""


@cache
def dense_kernel(name: str) -> Kernel:
    return Kernel(
        "dense", name, ("given", "weight", *ENDS[name]), ("y",), _header(name), read_source(SOURCE / "multiply.h"), True
    )


@cache
def streaming_kernel(name: str) -> Kernel:
    """The same for more rows."""
    inputs, body = ("given", "weight", *ENDS[name]), read_source(SOURCE / "stream.h")
    return Kernel("dense", f"stream_{name}", inputs, ("y",), _header(name), body, True)


@cache
def tile_kernel(name: str) -> Kernel:
    """The same for prompts."""
    inputs, body = ("given", "weight", *ENDS[name], "arranged"), read_source(SOURCE / "tile.h")
    return Kernel("dense", f"tile_{name}", inputs, ("y",), _header(name), body, True)


@cache
def arranging_kernel() -> Kernel:
    """Puts activations into the order in which tiles are multiplied."""
    return Kernel("dense", "arrange", ("given",), ("arranged",), "", read_source(SOURCE / "arrange.h"), True)


@cache
def joining_kernel(name: str) -> Kernel:
    """Sums split products, with the epilogue of `name`."""
    return Kernel(
        "dense", f"join_{name}", ("sums", *ENDS[name]), ("y",), _header(name), read_source(SOURCE / "join.h"), True
    )


def _header(name: str) -> str:
    defined = "".join(f"#define {end.upper()}\n" for end in name.split("_")[1:])
    return (
        defined
        + read_source(SOURCE / "chunks.h")
        + (read_source(SOURCE / "gate.h") if name == "multiply_gated" else "")
    )


class DenseWeights(NamedTuple):
    """A layer's weight [outputs, columns] and bias [outputs], of one dtype."""

    weight: mx.array
    bias: mx.array | None = None

    @property
    def kind(self) -> tuple[mx.Dtype, tuple[int, ...], bool]:
        """What its kernels depend on."""
        return self.weight.dtype, self.weight.shape, self.bias is not None

    @property
    def is_covered(self) -> bool:
        """Whether there could be a kernel for it."""
        one_format = self.bias is None or self.bias.dtype == self.weight.dtype
        return one_format and self.weight.dtype in DTYPES and self.weight.shape[-1] % CHUNK == 0

    def __str__(self) -> str:
        outputs, columns = self.weight.shape
        return f"{outputs}x{columns} in {self.weight.dtype}{'' if self.bias is None else ' with a bias'}"


class DenseProduct(Launched):
    """Multiplies rows x [rows, columns] by contiguous weight [outputs, columns], all of one dtype. The bits of a row
    depend only on it and the weights."""

    def __init__(self, run: Launcher, tuning: DenseTuning = DENSE_TUNING) -> None:
        self._run, self._tuning = run, tuning
        self._plans: dict[tuple[str, int, mx.Dtype, tuple[int, ...]], _Plan] = {}  # by form, rows and weights

    def __call__(
        self, x: mx.array, weight: mx.array, *, bias: mx.array | None = None, residual: mx.array | None = None
    ) -> mx.array:
        """[rows, outputs]. `bias` [outputs] is added before the product is rounded, `residual` [rows, outputs] after
        that."""
        return self.launched(
            mx.contiguous(x), weight, bias=bias, residual=None if residual is None else mx.contiguous(residual)
        )

    def launched(
        self, x: mx.array, weight: mx.array, *, bias: mx.array | None = None, residual: mx.array | None = None
    ) -> mx.array:
        """The same for contiguous inputs."""
        inputs, name = [x, weight], "multiply"
        if bias is not None:
            inputs, name = [*inputs, bias], f"{name}_biased"
        if residual is not None:
            inputs, name = [*inputs, residual], f"{name}_added"
        return self._launched(name, inputs)

    def gated(self, x: mx.array, weight: mx.array) -> mx.array:
        """silu(gate) * up, [rows, outputs / 2], with the weights of both concatenated, the gate's first: the same bits
        as MLX's operations on the two products. x is contiguous."""
        return self._launched("multiply_gated", [x, weight], parts=2)

    def _launched(self, name: str, inputs: list[mx.array], parts: int = 1) -> mx.array:
        rows, dtype, shape = inputs[0].shape[0], inputs[1].dtype, inputs[1].shape
        plan = self._plans.get((name, rows, dtype, shape))
        if plan is None:  # once for each shape: planning is most of a launch's Python time
            plan = self._plans[name, rows, dtype, shape] = self._plan(name, rows, dtype, shape, parts)
        if plan.arranging is not None:
            inputs = [*inputs, *self._run(arranging_kernel(), inputs[:1], plan.arranging)]
        if plan.joining is None:
            return self._run(plan.kernel, inputs, plan.work)[0]
        sums = self._run(plan.kernel, inputs[:2], plan.work)
        return self._run(plan.joining[0], [*sums, *inputs[2:]], plan.joining[1])[0]

    def _plan(self, name: str, rows: int, dtype: mx.Dtype, shape: tuple[int, ...], parts: int) -> _Plan:
        outputs, columns = shape
        if rows > MOST_ROWS:
            return self._tiled(name, rows, dtype, shape, parts)
        width = next(width for width in WIDTHS if rows <= width)
        cut, y = self._tuning.cut_of(outputs, width), OutputSpec((rows, outputs // parts), dtype)
        work = LaunchConfig(
            _template(dtype, columns, width, self._tuning.spans, cut),
            (-(-outputs // cut.outputs) * cut.split, 1, 1),
            cut.warps * 32,
            (y,),
            cut.lent(width) if isinstance(cut, StreamCut) else 0,
        )
        if cut.split > 1:
            sums = OutputSpec((cut.split, rows, outputs), mx.float32)
            joining = joining_kernel(name), _joining(cut.split, y)
            return _Plan(streaming_kernel("multiply_parted"), work._replace(outputs=(sums,)), joining)
        return _Plan(streaming_kernel(name) if isinstance(cut, StreamCut) else dense_kernel(name), work)

    def _tiled(self, name: str, rows: int, dtype: mx.Dtype, shape: tuple[int, ...], parts: int) -> _Plan:
        outputs, cut = shape[0], tile_cut(self._tuning.prompts, shape[0], rows)
        template: KernelTemplate = (
            *(("T", dtype), ("SPANS", self._tuning.spans), ("OUT_WARPS", cut.out_warps), ("ROW_WARPS", cut.row_warps)),
            *(("TILES", cut.tiles), ("EIGHTS", cut.eights), ("STAGES", cut.stages), ("HALVES", cut.halves)),
        )
        groups = (-(-outputs // cut.outputs) * -(-rows // cut.rows), 1, 1)
        y = OutputSpec((rows, outputs // parts), dtype)
        width, halves = -(-rows // cut.rows) * cut.rows, -(-shape[1] // 32)
        arranging = LaunchConfig(
            (("WIDTH", width), ("WARPS", JOINING)),
            (-(-width * halves // (16 * JOINING)), 1, 1),
            JOINING * 32,
            (OutputSpec((width, halves * 32), dtype),),
        )
        work = LaunchConfig(template, groups, cut.warps * 32, (y,), cut.lent)
        return _Plan(tile_kernel(name), work, arranging=arranging)


class _Plan(NamedTuple):
    """The launches of a product: one, or one for split-K sums and one that adds them up, or one that arranges
    activations and one for tiles."""

    kernel: Kernel
    work: LaunchConfig
    joining: tuple[Kernel, LaunchConfig] | None = None
    arranging: LaunchConfig | None = None


def _joining(split: int, y: OutputSpec) -> LaunchConfig:
    template: KernelTemplate = (("T", y.dtype), ("SPLIT", split), ("WARPS", JOINING))
    groups = (-(-y.shape[0] * y.shape[1] // (JOINING * 32)), 1, 1)
    return LaunchConfig(template, groups, JOINING * 32, (y,))


def _template(dtype: mx.Dtype, columns: int, width: int, spans: int, cut: RegisterCut | StreamCut) -> KernelTemplate:
    common: KernelTemplate = (
        *(("T", dtype), ("EIGHTS", width // 8), ("SPANS", spans), ("WARPS", cut.warps), ("TILES", cut.tiles)),
    )
    if isinstance(cut, StreamCut):
        return (*common, ("STAGES", cut.stages), ("SPLIT", cut.split))
    aligned = columns % (LINE * spans) == 0
    even = aligned and columns // LINE // cut.warps % cut.depth == 0
    return (*common, ("DEPTH", cut.depth), ("ALIGNED", aligned), ("EVEN", even))


def dense_product(device: Device, tuning: DenseTuning = DENSE_TUNING) -> DenseProduct:
    """Raises ValueError where there is none."""
    return DenseProduct(required_launcher(device), tuning)


RACED_BYTES = 1 << 27
"""Weights of this size are larger than caches, and a product takes longer than its launch."""
DenseKey = tuple[mx.Dtype, tuple[int, ...], bool]


class CheckedDense(Verdicts[DenseKey, DenseTuning]):
    """The dense products of a device. Metal uses MLX's."""

    _slower: str | None = None

    def meet(self, layers: Iterable[DenseWeights]) -> None:
        """Compile for all layers of a model at once, and time the largest."""
        kinds = {weights.kind: weights for weights in layers if self._is_covered(weights)}
        if not kinds:
            return
        compile_dense_kernels(self._device, kinds.values())
        largest = max(kinds.values(), key=lambda weights: weights.weight.nbytes)
        if largest.weight.nbytes >= RACED_BYTES and not isinstance(kernel_launcher(self._device), Emulator):
            tuning = self._tuning(largest)
            if tuning is not None:
                self._slower = race_dense_product(dense_product(self._device, tuning), largest)
            if self._slower is not None:
                self.wrong[largest.kind] = self._slower

    def of(self, weights: DenseWeights) -> DenseProduct | None:
        """None where there is no kernel for such weights that is right and fast."""
        if self._slower is not None or not self._is_covered(weights) or self._slower_parts.leave_out(DENSE):
            return None
        tuning = self._tuning(weights)
        return None if tuning is None else dense_product(self._device, tuning)

    def _is_covered(self, weights: DenseWeights) -> bool:
        return self._device.kind == "cuda" and kernel_launcher(self._device) is not None and weights.is_covered

    def _tuning(self, weights: DenseWeights) -> DenseTuning | None:
        """The first tuning that is right; None where none is."""
        tuning = self._first_right(
            weights.kind, TUNING_CHOICES, lambda tuning: check_dense_product(self._device, weights, tuning)
        )
        if tuning is not None:
            self.wrong.pop(weights.kind, None)  # of an earlier tuning
        return tuning


ROWS = (MOST_ROWS, 20, 11, 3, 1)
"""Some of each width."""
COMPARED_ENDS = 128
"""Outputs at both ends that are compared: as float32, all of them might not fit into memory."""
RACED, ROUNDS, TIMES, SLACK = (1, 8), 9, 4, 1.3
"""Batch-invariant bits, and whole layers as one launch, are worth that slowdown."""


def compile_dense_kernels(device: Device, layers: Iterable[DenseWeights]) -> None:
    """All kernels for such layers at once, where we compile them."""
    compile_kernels(device, lambda run: [[*_cases(DenseProduct(run), weights)] for weights in layers])


def check_dense_product(device: Device, weights: DenseWeights, tuning: DenseTuning = DENSE_TUNING) -> str | None:
    """The first wrong product of a layer on this device; None where all are right."""
    kind = ("dense", weights.kind, tuning)
    return check_cases(device, kind, lambda: dense_product(device, tuning), lambda product: _cases(product, weights))


def race_dense_product(
    product: DenseProduct, weights: DenseWeights, clock: Callable[[], float] = time.perf_counter
) -> str | None:
    """How much slower it is than MLX's own; None where it is not slower, or hardly."""
    for rows in RACED:
        x = _random_rows(rows, weights)
        ours, mlx = _median_times([partial(product, x, weights.weight), partial(mx.matmul, x, weights.weight.T)], clock)
        if ours > SLACK * mlx:
            return f"takes {ours / mlx:.2f} times as long as MLX's own for {rows} rows, {weights}"
    return None


def _median_times(works: list[Callable[[], mx.array]], clock: Callable[[], float]) -> list[float]:
    """Seconds of each, in alternation."""
    for work in works:
        mx.eval(work())
    rounds = [[_time_work(work, clock) for work in works] for _ in range(ROUNDS)]
    return [median(each) for each in zip(*rounds, strict=True)]


def _time_work(work: Callable[[], mx.array], clock: Callable[[], float]) -> float:
    start = clock()
    mx.eval([work() for _ in range(TIMES)])
    return clock() - start


def _cases(product: DenseProduct, weights: DenseWeights) -> Iterator[Case]:
    x = _random_rows(max(ROWS), weights)
    outputs = [product(x[:rows], weights.weight, bias=weights.bias) for rows in ROWS]
    for ends in (slice(None, COMPARED_ENDS), slice(-COMPARED_ENDS, None)):
        expected = x.astype(mx.float32) @ weights.weight[ends].astype(mx.float32).T
        expected = expected if weights.bias is None else expected + weights.bias[ends]
        yield Case(f"multiply differs for {weights}", outputs[0][:, ends], expected, BOUNDS[weights.weight.dtype])
    for output in outputs:
        message = f"a row's product depends on how many rows there are, for {weights}"
        yield Case(message, output, outputs[0][: output.shape[0]])


def _random_rows(rows: int, weights: DenseWeights) -> mx.array:
    return mx.random.normal((rows, weights.weight.shape[1]), key=mx.random.key(7)).astype(weights.weight.dtype)
