"""Decode attention over pages: the GPU's kernel against pages gathered for MLX's own, in one run, turn by turn.

python -m bench.paged                            shapes of common models, eight rows of 8K and of 32K
python -m bench.paged --lengths 1024,65536 --rows 1
python -m bench.paged --stretch 256 --warps 8 --most 4     cut otherwise

Bytes are those of the keys and values that the rows hold. On a CPU it asks for INGOT_AS=cuda or metal, and measures the
emulator, which says nothing about a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx

from ingot.kernels.device import Device, current
from ingot.kernels.paged.kernels import PagedAttention, Rows, Shape, Slabs, page_number
from ingot.kernels.paged.launchers import launcher
from ingot.kernels.paged.tuning import TUNINGS

SHAPES = (
    *((32, 8, 128), (16, 2, 256), (64, 8, 128), (32, 4, 128), (64, 4, 128), (14, 2, 64), (32, 32, 128)),
    (24, 8, 80),
)
CUTS = ("stretch", "warps", "most", "unroll")
PAGE, SLABS, REPEATS, ROUNDS = 64, 4, 50, 5


class Trial:
    """Rows whose pages lie anywhere in four slabs."""

    def __init__(self, device: Device, shape: Shape, lengths: list[int], arguments: argparse.Namespace) -> None:
        self.shape, self.lengths = shape, lengths
        counts = [-(-length // PAGE) for length in lengths]
        each = -(-sum(counts) // SLABS)
        free = [page_number(at // each, at % each) for at in mx.random.permutation(each * SLABS).tolist()]
        self.tables = [[free.pop() for _ in range(count)] for count in counts]
        size = (each, shape.kv_heads, PAGE, shape.key_size)
        slabs = [[mx.random.normal(size).astype(mx.bfloat16) for _ in range(SLABS)] for _ in range(2)]
        self.slabs = Slabs(*slabs)
        self.queries = mx.random.normal((len(lengths), shape.heads, shape.key_size)).astype(mx.bfloat16)
        self.after = mx.zeros(1, mx.int32)
        given = {name: getattr(arguments, name) for name in CUTS if getattr(arguments, name)}
        run = launcher(device)
        if run is None:
            raise SystemExit("bench.paged: no kernels here; on a CPU set INGOT_AS=cuda or metal, and install g++")
        self.scale = shape.key_size**-0.5
        self.attention = PagedAttention(
            run, replace(TUNINGS[device.kind], **given), shape, mx.bfloat16, scale=self.scale
        )
        self.rows = Rows.of(self.tables, lengths)
        mx.eval(self.slabs.inputs, self.queries, self.after)

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
        mask = (mx.arange(longest * PAGE) < mx.array(self.lengths)[:, None])[:, None, None] if ragged else None
        queries = self.queries[:, :, None]
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self.scale, mask=mask)[:, :, 0]

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


def measure(trial: Trial, repeats: int) -> str:
    off = mx.abs(trial.paged().astype(mx.float32) - trial.gathered().astype(mx.float32)).max().item()
    paged, gathered = [], []
    for _ in range(ROUNDS):
        paged.append(seconds(trial.paged, repeats))
        gathered.append(seconds(trial.gathered, 1))
    fast, slow = statistics.median(paged), statistics.median(gathered)
    rate = trial.bytes() / fast / 1e12
    return f"{fast * 1e6:8.0f} us {rate:6.2f} TB/s  gathered {slow * 1e6:8.0f} us  {slow / fast:6.1f}x  off {off:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--lengths", default="8192,32768")
    parser.add_argument("--shapes", help="such as 32/8x128,16/2x256")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    for name in CUTS:
        parser.add_argument(f"--{name}", type=int)
    arguments = parser.parse_args()
    device = current()
    shapes = [tuple(map(int, s.replace("x", "/").split("/"))) for s in (arguments.shapes or "").split(",") if s]
    print(device.name)
    for heads, kv_heads, size in shapes or SHAPES:
        for longest in map(int, arguments.lengths.split(",")):
            for name, lengths in (
                ("alike", [longest] * arguments.rows),
                ("ragged", [longest * (row + 1) // arguments.rows for row in range(arguments.rows)]),
            ):
                trial = Trial(device, Shape(heads, kv_heads, size, size, PAGE), lengths, arguments)
                print(
                    f"{heads}/{kv_heads}x{size} {arguments.rows} x {longest} {name:6}",
                    measure(trial, arguments.repeats),
                )


if __name__ == "__main__":
    main()
