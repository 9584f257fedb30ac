"""Attention of a prompt's tokens over pages: the GPU's kernel against pages gathered for MLX's own, in one run.

python -m bench.prompts                           2,048 tokens after 0, 6K and 30K others, in shapes of common models
python -m bench.prompts --shapes 16/4x256 --before 0,14336 --warps 4,8

A line has the device's time for both, their operations per second (of unmasked scores), MLX's time for a length that it
meets for the first time, and the difference between the two. On a CPU it needs INGOT_AS=cuda, and measures the
emulator, which says nothing about a GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx

from ingot.kernels.device import current_device
from ingot.kernels.gpu.launcher import kernel_launcher
from ingot.kernels.paged_attention.inputs import KernelRows, KVSlabs
from ingot.kernels.paged_attention.kernels import PagedAttention
from ingot.kernels.paged_attention.shapes import TUNINGS, AttentionShape
from ingot.measure.subjects import work_seconds

SHAPES = "32/8x128,16/4x256,64/8x64"


class Trial:
    """One row's last tokens, whose pages lie in any order."""

    def __init__(self, shape: AttentionShape, before: int, width: int) -> None:
        self.shape, self.width, self.length = shape, width, before + width
        pages = -(-self.length // shape.page)
        self.table = mx.random.permutation(pages).tolist()
        slab = [
            mx.random.normal((pages, shape.kv_heads, shape.page, shape.key_size)).astype(mx.bfloat16) for _ in range(2)
        ]
        self.slabs = KVSlabs([slab[0]], [slab[1]])
        self.queries = mx.random.normal((width, shape.heads, shape.key_size)).astype(mx.bfloat16)
        self.rows, self.after = KernelRows.of([self.table], [self.length], counts=[width]), mx.zeros(1, mx.int32)
        mx.eval(slab, self.queries, self.after)

    def paged(self, attention: PagedAttention) -> mx.array:
        return attention.attend(self.queries, self.rows, self.slabs, self.after)

    def gathered(self) -> mx.array:
        table, shape = mx.array(self.table), self.shape
        keys, values = (
            slab[0][table].swapaxes(0, 1).reshape(1, shape.kv_heads, -1, shape.key_size)[:, :, : self.length]
            for slab in (self.slabs.keys, self.slabs.values)
        )
        queries = self.queries.swapaxes(0, 1)[None]
        scale = shape.key_size**-0.5
        attended = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask="causal")
        return attended[0].swapaxes(0, 1)

    def operations(self) -> float:
        seen = self.width * (self.length - self.width) + self.width * (self.width + 1) / 2
        return 4 * seen * self.shape.heads * self.shape.key_size


def once(work: Callable[[], mx.array]) -> float:
    mx.synchronize()
    begun = time.perf_counter()
    mx.eval(work())
    return time.perf_counter() - begun


def compare(shape: AttentionShape, before: int, width: int, warps: list[int], repeats: int) -> None:
    run = kernel_launcher(current_device())
    if run is None:
        raise SystemExit("bench.prompts: no kernels here; on a CPU set INGOT_AS=cuda, and install g++")
    trial = Trial(shape, before, width)
    attentions = {
        each: PagedAttention(
            run, replace(TUNINGS["cuda"], prompts=each), shape, mx.bfloat16, scale=shape.key_size**-0.5
        )
        for each in warps
    }
    first, plain = once(trial.gathered), trial.gathered().astype(mx.float32)
    taken = work_seconds(trial.gathered, repeats)
    name = f"{shape.heads}/{shape.kv_heads}x{shape.key_size} {width} behind {before}"
    print(f"{name:32} MLX       {_said(taken, trial)}, the first time {first * 1e3:.1f} ms", flush=True)
    for each, attention in attentions.items():
        off = mx.abs(trial.paged(attention).astype(mx.float32) - plain).max().item()
        own = work_seconds(lambda attention=attention: trial.paged(attention), repeats)  # type: ignore[misc]
        print(f"{name:32} {each} warps   {_said(own, trial)}, {taken / own:.2f}x, off {off:.4f}", flush=True)


def _said(taken: float, trial: Trial) -> str:
    return f"{taken * 1e3:8.3f} ms {trial.operations() / taken / 1e12:6.1f} TFLOP/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES, help="heads/heads of keys x size (%(default)s)")
    parser.add_argument("--before", default="0,6144,30720")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--page", type=int, default=512)
    parser.add_argument("--warps", default="4,8")
    parser.add_argument("--repeats", type=int, default=10)
    given = parser.parse_args()
    print(current_device().name)
    for text in given.shapes.split(","):
        heads, kv_heads, size = map(int, text.replace("x", "/").split("/"))
        for before in map(int, given.before.split(",")):
            shape = AttentionShape(heads, kv_heads, size, size, given.page)
            compare(shape, before, given.width, [int(each) for each in given.warps.split(",")], given.repeats)


if __name__ == "__main__":
    main()
