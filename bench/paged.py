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
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import mlx.core as mx

from ingot.kernels.device import Device, current_device
from ingot.kernels.gpu.launcher import kernel_launcher
from ingot.kernels.paged_attention.inputs import PAGE_LIMIT, KernelRows
from ingot.kernels.paged_attention.selfcheck import plain_attention
from ingot.kernels.paged_attention.shapes import TUNINGS, AttentionShape, MatrixTuning
from ingot.kernels.selfcheck import BOUNDS
from ingot.measure.subjects import PAGE, PagedTrial, work_seconds

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
REPEATS, ROUNDS = 50, 5


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


def measure(trial: PagedTrial, rows: str, repeats: int) -> Figure:
    off = mx.abs(trial.paged().astype(mx.float32) - trial.gathered().astype(mx.float32)).max()
    paged, gathered = [], []
    for _ in range(ROUNDS):
        paged.append(work_seconds(trial.paged, repeats))
        gathered.append(work_seconds(trial.gathered, 1))
    taken = statistics.median(paged)
    return Figure(
        _shape_name(trial.shape), rows, taken, statistics.median(gathered), trial.bytes(), float(off), trial.width
    )


def measure_widths(trial: PagedTrial, rows: str, arguments: argparse.Namespace) -> list[Figure]:
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
        trial = PagedTrial(device, shape, lengths, tuning)
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


def _alone(trial: PagedTrial) -> mx.array:
    """What the last query of each row gives if it is the only one asked for."""
    last = mx.contiguous(trial.queries[trial.width - 1 :: trial.width])
    return trial.attention.attend(last, KernelRows.of(trial.tables, trial.lengths), trial.slabs, trial.after)


def _exact(trial: PagedTrial) -> mx.array:
    """By plain operations in float32, one row after another: for short ones."""
    made = []
    for row, (table, length) in enumerate(zip(trial.tables, trial.lengths, strict=True)):
        keys, values = (
            mx.concatenate([slabs[page // PAGE_LIMIT][page % PAGE_LIMIT] for page in table], axis=1)[:, :length]
            for slabs in (trial.slabs.keys, trial.slabs.values)
        )
        asked = trial.queries[row * trial.width : (row + 1) * trial.width]
        made.append(plain_attention(asked, *trial.seen(keys, values), scale=trial.scale))
    return mx.concatenate(made)


def measure_ways(device: Device, shape: AttentionShape, longest: int, arguments: argparse.Namespace) -> list[Way]:
    """For rows alike, one row, a shorter one, and some of awkward lengths, which float32 tells right from wrong."""
    lengths = ([longest] * arguments.rows, [longest], [longest // 4])
    alike = {f"{len(each)} x {each[0]}": PagedTrial(device, shape, each) for each in lengths}
    made: list[Way] = []
    for rows, trial in {**alike, "short": PagedTrial(device, shape, SHORT)}.items():
        firsts: dict[str, float] = {}
        for width in (int(width) for width in arguments.widths.split(",")):
            trial.ask(width)
            wanted = trial.gathered() if rows in alike else _exact(trial)
            for name, tuning in WAYS.items():
                trial.cut(tuning)
                found = trial.paged()
                off, same = _off(found, wanted), mx.array_equal(found[width - 1 :: width], _alone(trial)).item()
                taken = statistics.median(work_seconds(trial.paged, arguments.repeats) for _ in range(ROUNDS))
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
