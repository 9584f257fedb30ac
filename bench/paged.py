"""Decode attention over pages: the GPU's kernel against pages gathered for MLX's own, in one run, turn by turn.

python -m bench.paged                            shapes of common models, eight rows of 8K and of 32K
python -m bench.paged --lengths 1024,65536 --rows 1
python -m bench.paged --lengths 32768 --widths 1,4,8        several queries a row, as for verifying guesses
python -m bench.paged --lengths 32768 --widths 1,4,8 --matrix
python -m bench.paged --stretch 256 --warps 8 --most 4     cut otherwise

Bytes are those of the keys and values that the rows hold. On a CPU it asks for INGOT_AS=cuda or metal, and measures the
emulator, which says nothing about a GPU.
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

from ingot.kernels.device import Device, current
from ingot.kernels.gpu.launchers import launcher
from ingot.kernels.paged.kernels import PagedAttention, Rows, Shape, Slabs, page_number
from ingot.kernels.paged.tuning import MATRIX, TUNINGS

SHAPES = "32/8x128,16/2x256,64/8x128,32/4x128,64/4x128,14/2x64,32/32x128,24/8x80"
CUTS = ("stretch", "warps", "most", "run")
PAGE, SLABS, REPEATS, ROUNDS = 64, 4, 50, 5


class Trial:
    """Rows whose pages lie anywhere in four slabs."""

    width = 1

    def __init__(self, device: Device, shape: Shape, lengths: list[int], arguments: argparse.Namespace) -> None:
        run = launcher(device)
        if run is None:
            raise SystemExit("bench.paged: no kernels here; on a CPU set INGOT_AS=cuda or metal, and install g++")
        self.shape, self.lengths = shape, lengths
        counts = [-(-length // PAGE) for length in lengths]
        each = -(-sum(counts) // SLABS)
        free = [page_number(at // each, at % each) for at in mx.random.permutation(each * SLABS).tolist()]
        self.tables = [[free.pop() for _ in range(count)] for count in counts]
        size = (each, shape.kv_heads, PAGE, shape.key_size)
        slabs = [[mx.random.normal(size).astype(mx.bfloat16) for _ in range(SLABS)] for _ in range(2)]
        self.slabs = Slabs(*slabs)
        self.after = mx.zeros(1, mx.int32)
        given = {name: getattr(arguments, name) for name in CUTS if getattr(arguments, name)}
        self.scale = shape.key_size**-0.5
        tuning = MATRIX if arguments.matrix else TUNINGS[device.kind]
        self.attention = PagedAttention(run, replace(tuning, **given), shape, mx.bfloat16, scale=self.scale)
        self.ask(1)
        mx.eval(self.slabs.keys, self.slabs.values, self.after)

    def ask(self, width: int) -> None:
        """From now on, attend for so many queries a row."""
        self.width, rows = width, len(self.lengths)
        size = (rows * width, self.shape.heads, self.shape.key_size)
        self.queries = mx.random.normal(size).astype(mx.bfloat16)
        self.rows = Rows.of(self.tables, self.lengths, counts=[width] * rows)
        mx.eval(self.queries)

    def paged(self) -> mx.array:
        return self.attention.attend(self.queries, self.rows, self.slabs, self.after)

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
        ragged = len({*self.lengths}) > 1 or self.lengths[0] % PAGE != 0
        ends = mx.array(self.lengths)[:, None] + mx.arange(1 - self.width, 1)
        mask = (mx.arange(longest * PAGE) < ends[..., None])[:, None] if ragged or self.width > 1 else None
        queries = self.queries.reshape(rows, self.width, *self.queries.shape[1:]).swapaxes(1, 2)
        attended = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self.scale, mask=mask)
        return attended.swapaxes(1, 2).reshape(self.queries.shape)

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


def measure(trial: Trial, rows: str, repeats: int) -> Figure:
    off = mx.abs(trial.paged().astype(mx.float32) - trial.gathered().astype(mx.float32)).max()
    paged, gathered = [], []
    for _ in range(ROUNDS):
        paged.append(seconds(trial.paged, repeats))
        gathered.append(seconds(trial.gathered, 1))
    shape = f"{trial.shape.heads}/{trial.shape.kv_heads}x{trial.shape.key_size}"
    taken = statistics.median(paged)
    return Figure(shape, rows, taken, statistics.median(gathered), trial.bytes(), float(off), trial.width)


def measure_widths(trial: Trial, rows: str, arguments: argparse.Namespace) -> list[Figure]:
    figures: list[Figure] = []
    for width in (int(width) for width in arguments.widths.split(",")):
        trial.ask(width)
        figure = measure(trial, rows, arguments.repeats)
        figures.append(replace(figure, ratio=figure.paged / figures[0].paged if figures else 1.0))
        print(figures[-1], flush=True)
    return figures


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--lengths", default="8192,32768")
    parser.add_argument("--shapes", default=SHAPES, help="heads/heads of keys x size (%(default)s)")
    parser.add_argument("--widths", default="1", help="queries of a row, 1 to 16 (%(default)s)")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--matrix", action="store_true", help="by matrix units, on CUDA")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    for name in ("--stretch", "--warps", "--most", "--run"):
        parser.add_argument(name, type=int)
    return parser.parse_args(arguments)


def main(given: list[str] | None = None) -> None:
    arguments, device, figures = parsed(given), current(), []
    rows, lengths = arguments.rows, [int(length) for length in arguments.lengths.split(",")]
    print(device.name)
    for shape in arguments.shapes.split(","):
        heads, kv_heads, size = map(int, shape.replace("x", "/").split("/"))
        for longest in lengths:
            for name, each in (
                ("alike", [longest] * rows),
                ("ragged", [longest * (row + 1) // rows for row in range(rows)]),
            ):
                trial = Trial(device, Shape(heads, kv_heads, size, size, PAGE), each, arguments)
                figures += measure_widths(trial, f"{rows} x {longest} {name}", arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=1))


if __name__ == "__main__":
    main()
