"""Decode attention over pages: the GPU's kernel against pages gathered for MLX's own, in one run, alternating.

python -m bench.paged                            shapes of common models, eight rows of 8K and of 32K
python -m bench.paged --lengths 1024,65536 --rows 1
python -m bench.paged --lengths 32768 --widths 1,4,8        several queries per row, as for verification
python -m bench.paged --lengths 32768 --widths 1,4,8 --matrix      with CUDA's matrix units, in several variants
python -m bench.paged --shapes 16/2x512,20/1x512+64,128/1x512+64 --lengths 8192      large heads, and latents of 512
                                                                                     with 64 numbers that are rotated
python -m bench.paged --split 256 --warps 8 --most 4 --run 4     without matrix units, another variant

Bytes are those of the rows' keys and values. On a CPU it needs INGOT_AS=cuda or metal, and measures the emulator, which
says nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import mlx.core as mx

from ingot.kernels.device import Device, current_device
from ingot.kernels.gpu.launcher import kernel_launcher
from ingot.kernels.paged_attention.inputs import PAGE_LIMIT, KernelRows, KVSlabs, page_number
from ingot.kernels.paged_attention.kernels import PagedAttention
from ingot.kernels.paged_attention.selfcheck import plain_attention
from ingot.kernels.paged_attention.shapes import TUNINGS, AttentionShape, AttentionTuning, MatrixTuning
from ingot.kernels.selfcheck import BOUNDS

SHAPES = "32/8x128,16/2x256,64/8x128,32/4x128,64/4x128,14/2x64,32/32x128,24/8x80"
MATRIX_SHAPES = "32/8x128,16/2x256"
CUTS = ("split", "warps", "most", "run")
CUDA = TUNINGS["cuda"]
WAYS = {
    "vectors": replace(CUDA, matrix=None),
    "64 in 8K": replace(CUDA, split=64, matrix=MatrixTuning(piece=8192, slots=5)),
    "128 in 8K": replace(CUDA, split=128, matrix=MatrixTuning(piece=8192, slots=5)),
    "256 in 8K": replace(CUDA, split=256, matrix=MatrixTuning(piece=8192, slots=5)),
    "128 in 16K": replace(CUDA, split=128, matrix=MatrixTuning(piece=16384, slots=2)),
}
"""What `--matrix` measures: tokens of the first KV splits, in pieces of so many bytes."""
SHORT = [16, 90, 577, 1030]
PAGE, SLABS, REPEATS, ROUNDS = 64, 4, 50, 5


class Trial:
    """Rows whose pages lie anywhere in four slabs."""

    width = 1

    def __init__(
        self, device: Device, shape: AttentionShape, lengths: list[int], tuning: AttentionTuning | None = None
    ) -> None:
        """Cut as usual on that device, if not told how."""
        self.device, self.shape, self.lengths = device, shape, lengths
        counts = [-(-length // PAGE) for length in lengths]
        each = -(-sum(counts) // SLABS)
        free = [page_number(at // each, at % each) for at in mx.random.permutation(each * SLABS).tolist()]
        self.tables = [[free.pop() for _ in range(count)] for count in counts]
        sizes = [(each, shape.kv_heads, PAGE, size) for size in (shape.key_size, shape.value_size)]
        self.slabs = KVSlabs(*([mx.random.normal(size).astype(mx.bfloat16) for _ in range(SLABS)] for size in sizes))
        self.after = mx.zeros(1, mx.int32)
        self.scale = shape.query_size**-0.5
        self.cut(tuning or TUNINGS[device.kind])
        self.ask(1)
        mx.eval(self.slabs.keys, self.slabs.values, self.after)

    def cut(self, tuning: AttentionTuning) -> None:
        """From now on, attend that way."""
        run = kernel_launcher(self.device)
        assert run is not None, "who measures has looked"
        self.attention = PagedAttention(run, tuning, self.shape, mx.bfloat16, scale=self.scale)

    def ask(self, width: int) -> None:
        """From now on, attend for so many queries a row."""
        self.width, rows = width, len(self.lengths)
        size = (rows * width, self.shape.heads, self.shape.query_size)
        self.queries = mx.random.normal(size).astype(mx.bfloat16)
        self.rows = KernelRows.of(self.tables, self.lengths, counts=[width] * rows)
        mx.eval(self.queries)

    def paged(self) -> mx.array:
        return self.attention.attend(self.queries, self.rows, self.slabs, self.after)

    def alone(self) -> mx.array:
        """What the last query of each row gives if it is the only one asked for."""
        rows, last = KernelRows.of(self.tables, self.lengths), mx.contiguous(self.queries[self.width - 1 :: self.width])
        return self.attention.attend(last, rows, self.slabs, self.after)

    def gathered(self) -> mx.array:
        """As long as the longest row, with a mask: what MLX offers for rows of different lengths."""
        longest = max(len(table) for table in self.tables)
        each = self.slabs.keys[0].shape[0]
        at = [[page // (1 << 20) * each + page % (1 << 20) for page in table] for table in self.tables]
        table = mx.array([[*row, *[0] * (longest - len(row))] for row in at])
        shape, rows = self.shape, len(at)
        keys, values = (
            mx.concatenate(slabs)[table].transpose(0, 2, 1, 3, 4).reshape(rows, shape.kv_heads, longest * PAGE, -1)
            for slabs in (self.slabs.keys, self.slabs.values)
        )
        keys, values = self._seen(keys, values)
        ragged = len({*self.lengths}) > 1 or self.lengths[0] % PAGE != 0
        ends = mx.array(self.lengths)[:, None] + mx.arange(1 - self.width, 1)
        mask = (mx.arange(longest * PAGE) < ends[..., None])[:, None] if ragged or self.width > 1 else None
        queries = self.queries.reshape(rows, self.width, *self.queries.shape[1:]).swapaxes(1, 2)
        attended = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self.scale, mask=mask)
        return attended.swapaxes(1, 2).reshape(*self.queries.shape[:2], -1)

    def _seen(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """What is stored, as keys and values that queries see."""
        return (mx.concatenate([keys, values], axis=-1), keys) if self.shape.latent else (keys, values)

    def exact(self) -> mx.array:
        """By plain operations in float32, one row after another: for short ones."""
        made = []
        for row, (table, length) in enumerate(zip(self.tables, self.lengths, strict=True)):
            keys, values = (
                mx.concatenate([slabs[page // PAGE_LIMIT][page % PAGE_LIMIT] for page in table], axis=1)[:, :length]
                for slabs in (self.slabs.keys, self.slabs.values)
            )
            asked = self.queries[row * self.width : (row + 1) * self.width]
            made.append(plain_attention(asked, *self._seen(keys, values), scale=self.scale))
        return mx.concatenate(made)

    def bytes(self) -> int:
        return sum(self.lengths) * self.shape.kv_heads * (self.shape.key_size + self.shape.value_size) * 2


def seconds(work: Callable[[], mx.array], repeats: int) -> float:
    """What the device takes; what Python takes to ask for it, it does while the device works on an earlier step."""
    asked = [work() for _ in range(repeats)]
    mx.synchronize()
    begun = time.perf_counter()
    mx.eval(asked)
    mx.synchronize()
    return (time.perf_counter() - begun) / repeats


@dataclass(frozen=True)
class Figure:
    shape: str
    rows: str
    paged: float  # seconds
    gathered: float
    bytes: int
    off: float  # the largest difference
    width: int = 1  # queries of a row
    ratio: float = 1.0  # of the time to that of the first width asked for

    def __str__(self) -> str:
        paged = f"{self.paged * 1e6:8.0f} us {self.bytes / self.paged / 1e12:6.2f} TB/s"
        gathered = f"gathered {self.gathered * 1e6:8.0f} us, {self.gathered / self.paged:6.1f}x"
        width = f", {self.ratio:.2f}x of the first width" if self.ratio != 1 else ""
        return f"{self.shape:10} {self.rows:18} {self.width:2} wide {paged}, {gathered}, off {self.off:.4f}{width}"


def _shape_name(shape: AttentionShape) -> str:
    rotated = f"+{shape.value_size}" if shape.latent else ""
    return f"{shape.heads}/{shape.kv_heads}x{shape.key_size}{rotated}"


def _shape(name: str) -> AttentionShape:
    heads, kv_heads, *sizes = map(int, name.replace("x", "/").replace("+", "/").split("/"))
    return AttentionShape(heads, kv_heads, sizes[0], sizes[-1], PAGE, latent=len(sizes) > 1)


def measure(trial: Trial, rows: str, repeats: int) -> Figure:
    off = mx.abs(trial.paged().astype(mx.float32) - trial.gathered().astype(mx.float32)).max()
    paged, gathered = [], []
    for _ in range(ROUNDS):
        paged.append(seconds(trial.paged, repeats))
        gathered.append(seconds(trial.gathered, 1))
    taken = statistics.median(paged)
    return Figure(
        _shape_name(trial.shape), rows, taken, statistics.median(gathered), trial.bytes(), float(off), trial.width
    )


def measure_widths(trial: Trial, rows: str, arguments: argparse.Namespace) -> list[Figure]:
    figures: list[Figure] = []
    for width in (int(width) for width in arguments.widths.split(",")):
        trial.ask(width)
        figure = measure(trial, rows, arguments.repeats)
        figures.append(replace(figure, ratio=figure.paged / figures[0].paged if figures else 1.0))
        print(figures[-1], flush=True)
    return figures


def measure_lengths(device: Device, shape: AttentionShape, longest: int, arguments: argparse.Namespace) -> list[Figure]:
    rows, figures = arguments.rows, []
    given = {name: getattr(arguments, name) for name in CUTS if getattr(arguments, name)}
    usual = TUNINGS[device.kind]
    tuning = replace(usual, matrix=None, **given) if given else usual
    ragged = [longest * (row + 1) // rows for row in range(rows)]
    for name, lengths in (("alike", [longest] * rows), ("ragged", ragged)):
        trial = Trial(device, shape, lengths, tuning)
        figures += measure_widths(trial, f"{rows} x {longest} {name}", arguments)
    return figures


@dataclass(frozen=True)
class Way:
    """How one way of cutting did."""

    name: str
    shape: str
    rows: str
    width: int
    paged: float  # seconds
    bytes: int
    ratio: float  # of the time to that of the first width
    off: float  # the largest difference, to the largest number
    same: bool  # bits of a query alone and among others

    def __str__(self) -> str:
        said = "right" if self.off <= BOUNDS[mx.bfloat16] else "WRONG"
        said = said if self.same else f"{said}, OTHER BITS THAN ALONE"
        speed = f"{self.paged * 1e6:8.1f} us {self.bytes / self.paged / 1e12:6.2f} TB/s, {self.ratio:.2f}x"
        return f"{self.name:14} {self.shape:10} {self.rows:10} {self.width:2} wide {speed}, {said} to {self.off:.1e}"


def _off(found: mx.array, wanted: mx.array) -> float:
    found, wanted = found.astype(mx.float32), wanted.astype(mx.float32)
    return float(mx.abs(found - wanted).max() / mx.abs(wanted).max())


def measure_ways(device: Device, shape: AttentionShape, longest: int, arguments: argparse.Namespace) -> list[Way]:
    """For rows alike, one row, a shorter one, and some of awkward lengths, which float32 tells right from wrong."""
    lengths = ([longest] * arguments.rows, [longest], [longest // 4])
    alike = {f"{len(each)} x {each[0]}": Trial(device, shape, each) for each in lengths}
    made: list[Way] = []
    for rows, trial in {**alike, "short": Trial(device, shape, SHORT)}.items():
        firsts: dict[str, float] = {}
        for width in (int(width) for width in arguments.widths.split(",")):
            trial.ask(width)
            wanted = trial.gathered() if rows in alike else trial.exact()
            for name, tuning in WAYS.items():
                trial.cut(tuning)
                found = trial.paged()
                off, same = _off(found, wanted), mx.array_equal(found[width - 1 :: width], trial.alone()).item()
                taken = statistics.median(seconds(trial.paged, arguments.repeats) for _ in range(ROUNDS))
                over = taken / firsts.setdefault(name, taken)
                made.append(Way(name, _shape_name(shape), rows, width, taken, trial.bytes(), over, off, bool(same)))
                print(made[-1], flush=True)
    return made


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--lengths", default="8192,32768")
    parser.add_argument(
        "--shapes",
        help=f"heads/heads of keys x size, or latents x rank+rotated ({SHAPES}; with --matrix {MATRIX_SHAPES})",
    )
    parser.add_argument("--widths", default="1", help="queries per row, 1 to 16 (%(default)s)")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--matrix", action="store_true", help="with CUDA's matrix units, in each variant, and without")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    for name in CUTS:
        parser.add_argument(f"--{name}", type=int)
    parsed = parser.parse_args(arguments)
    if parsed.matrix and any(getattr(parsed, name) for name in CUTS):
        parser.error(f"--matrix cuts in ways of its own: leave {', '.join(f'--{name}' for name in CUTS)} away")
    return parsed


def main(given: list[str] | None = None) -> None:
    arguments, device = parsed(given), current_device()
    if kernel_launcher(device) is None:
        raise SystemExit("bench.paged: no kernels here; on a CPU set INGOT_AS=cuda or metal, and install g++")
    print(device.name)
    figures: list[Figure | Way] = []
    for shape in (arguments.shapes or (MATRIX_SHAPES if arguments.matrix else SHAPES)).split(","):
        for longest in (int(length) for length in arguments.lengths.split(",")):
            measured = measure_ways if arguments.matrix else measure_lengths
            figures += measured(device, _shape(shape), longest, arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=1))


if __name__ == "__main__":
    main()
