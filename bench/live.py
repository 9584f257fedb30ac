"""Decode attention over a compressed KV cache (--kv-codec), against a raw one: in one run, alternating.

python -m bench.live                                        the default model's shape and an 8B model's
python -m bench.live --shape llama-8b --dtype bfloat16      one of them; the dtype is for GPUs, CPUs use float16
python -m bench.live --lengths 2048,16384 --rows 1,8 --codecs k8v4,affine8
python -m bench.live --at-once 16,32                        other GPU kernels: this many keys per warp at once

Each line is a number of rows with a number of tokens, all but the newest compressed, over enough layers to exceed the
processor's caches; 1.10x is ten percent faster than raw.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import mlx.core as mx

from ingot.cache.codecs.names import CodecName
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.footprint import coded_page_count
from ingot.cache.kv_storage import KernelStorage, ReservedStorage
from ingot.cache.page_groups import PageGroup
from ingot.cache.pages import PAGE, PageTable
from ingot.kernels.cpu import native
from ingot.kernels.device import Device, current_device
from ingot.kernels.paged_attention.kernels import PagedAttention, has_paged_kernels, paged_attention
from ingot.kernels.paged_attention.shapes import TUNINGS, AttentionShape, AttentionTuning

SHAPES = {"default": AttentionShape(9, 3, 64, 64), "llama-8b": AttentionShape(32, 8, 128, 128)}
DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16}
TRAFFIC = 192 << 20
"""Bytes of raw keys and values that are read in a round, so that none of them are still in a cache."""
MOST_LAYERS, ROUNDS = 32, 9
LEAST_CALLS = 64
"""That a GPU is given at once: of a single one, handing it over is most of the time."""


@dataclass(frozen=True)
class Layers:
    """Some layers with the same rows: how each attends, by number."""

    attend: Callable[[int], mx.array]
    count: int
    nbytes: int  # that the rows hold in a layer


class Trial:
    """Rows of so many tokens in several layers, raw or coded."""

    def __init__(
        self,
        device: Device,
        shape: AttentionShape,
        dtype: mx.Dtype,
        length: int,
        rows: int,
        tuning: AttentionTuning | None,
    ) -> None:
        self.device, self.shape, self.dtype, self.tuning = device, shape, dtype, tuning
        self.length, self.rows = length, rows
        each = rows * length * shape.kv_heads * 2 * shape.key_size * dtype.size
        self.layers = max(1, min(MOST_LAYERS, -(-TRAFFIC // each)))

    def made(self, codec: PairCodec | None) -> Layers:
        group = PageGroup(0, None, codec=codec)
        tables = [PageTable(group.pages) for _ in range(self.rows)]
        for table in tables:
            table.grow(0, self.length)
        group.provide()
        storages = [self._storage(group) for _ in range(self.layers)]
        for storage in storages:
            self._fill(group, storage, tables)
        if codec is not None:
            fresh = [page for table in tables for page in table.encode(coded_page_count(self.length))]
            if fresh:
                assert group.coded is not None
                group.coded.provide()
                group.encode(fresh)
        return Layers(self._attending(group, storages, tables), self.layers, group.held_bytes // self.layers)

    def _storage(self, group: PageGroup) -> Any:
        shape, sizes = self.shape, (self.shape.key_size, self.shape.value_size)
        if self.device.kind == "cpu":
            return ReservedStorage(group, self.layers, shape.kv_heads, sizes, self.dtype)
        kernel = paged_attention(
            self.device, AttentionShape(shape.kv_heads, shape.kv_heads, *sizes), self.dtype, scale=1.0
        )
        return KernelStorage(group, shape.kv_heads, sizes, self.dtype, kernel, kernel)

    def _fill(self, group: PageGroup, storage: Any, tables: Sequence[PageTable]) -> None:
        for table in tables:
            keys, values = (
                mx.random.normal((self.length, self.shape.kv_heads, size)).astype(self.dtype) for size in storage.sizes
            )
            runs = [
                (place, min(PAGE, self.length - place), group.slot_of(table.numbers[place // PAGE]), 0)
                for place in range(0, self.length, PAGE)
            ]
            storage.write(keys, values, runs)
            mx.eval(storage.pending())

    def _attending(
        self, group: PageGroup, storages: Sequence[Any], tables: Sequence[PageTable]
    ) -> Callable[[int], mx.array]:
        shape = self.shape
        queries = mx.random.normal((self.rows, shape.heads, shape.key_size)).astype(self.dtype)
        mx.eval(queries)
        if self.device.kind == "cpu":
            return partial(self._natively, storages, self._operation(), self._spans(group, tables), queries)
        kernel = paged_attention(self.device, shape, self.dtype, scale=shape.key_size**-0.5, tuning=self.tuning)
        rows = storages[0].rows(tables, [self.length] * self.rows, [1] * self.rows)
        assert storages[0].reads(rows), "no kernel reads these pages as they lie"
        return partial(_by_kernel, storages, kernel, rows, queries)

    def _operation(self) -> native.NativeAttention:
        shape = self.shape
        return native.NativeAttention(
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            size=shape.key_size,
            scale=shape.key_size**-0.5,
            cap=None,
            sinks=None,
            norms=(None, None),
            rotation=None,
            gated=False,
        )

    def _spans(self, group: PageGroup, tables: Sequence[PageTable]) -> Any:
        place = self.length - 1
        spans = [(row, 1, row, place, place) for row in range(self.rows)]
        return native.attention_spans(spans, [group.native_table(table) for table in tables])

    def _natively(
        self,
        storages: Sequence[ReservedStorage],
        attention: native.NativeAttention,
        spans: Any,
        queries: mx.array,
        layer: int,
    ) -> mx.array:
        storage, shape = storages[layer], self.shape
        new = mx.zeros((1, self.rows, shape.kv_heads * shape.key_size))
        attended, storage.keys[0], storage.values[0] = attention(
            queries.reshape(1, self.rows, -1).astype(mx.float32),
            new,
            new,
            storage.keys[0],
            storage.values[0],
            spans,
            0,
            storage.native_coded,
        )
        return attended


def _by_kernel(
    storages: Sequence[KernelStorage], kernel: PagedAttention, rows: Any, queries: mx.array, layer: int
) -> mx.array:
    return storages[layer].attend(kernel, queries, rows)


def seconds(layers: Layers) -> float:
    """Of one layer. What Python takes to ask for it is not counted, nor on a CPU what others take of it meanwhile."""
    clock = time.process_time if current_device().kind == "cpu" else time.perf_counter
    calls = max(layers.count, LEAST_CALLS if current_device().kind != "cpu" else 1)
    asked = [layers.attend(number % layers.count) for number in range(calls)]
    mx.synchronize()
    begun = clock()
    mx.eval(asked)
    mx.synchronize()
    return (clock() - begun) / calls


def measure(trial: Trial, name: str, codecs: Sequence[str]) -> None:
    raw = trial.made(None)
    for codec in codecs:
        coded = trial.made(PairCodec(CodecName.parse(codec)))
        seconds(raw), seconds(coded)
        taken = [(seconds(raw), seconds(coded)) for _ in range(ROUNDS)]
        plain, packed = (statistics.median(each) for each in zip(*taken, strict=True))
        ratio = statistics.median(one / other for one, other in taken)
        print(
            f"{name} {trial.rows:3} x {trial.length:6} tokens, {codec:8}: raw {plain * 1e6:8.1f} us "
            f"{raw.nbytes / plain / 1e9:6.1f} GB/s, coded {packed * 1e6:8.1f} us, {ratio:.2f}x as fast "
            f"in {raw.nbytes / coded.nbytes:.2f}x less memory",
            flush=True,
        )


def tunings(device: Device, at_once: str | None) -> Iterator[tuple[str, AttentionTuning | None]]:
    """How kernels are cut, and what to call that."""
    usual = None if device.kind == "cpu" else TUNINGS[device.kind]
    if at_once is None or usual is None or usual.matrix is None:
        yield "", None
        return
    for keys in map(int, at_once.split(",")):
        yield f", {keys} at once", replace(usual, matrix=replace(usual.matrix, coded=keys))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="default: all")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of keys and values on a GPU")
    parser.add_argument("--lengths", default="2048,16384")
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--codecs", default="k8v4,affine8,affine4")
    parser.add_argument("--at-once", help="compressed keys that a warp of a GPU takes at once, several to compare")
    arguments = parser.parse_args()
    device = current_device()
    if device.kind != "cpu" and not has_paged_kernels(device):
        parser.error(f"there are no kernels for {device.name}")
    if device.kind == "cpu" and not native.available():
        parser.error("there are no native kernels here")
    dtype = mx.float16 if device.kind == "cpu" else DTYPES[arguments.dtype]
    print(f"{device.name} ({device.kind}), {dtype}; {native.describe() or 'kernels of a GPU'}", flush=True)
    settings = product(
        arguments.shape or SHAPES,
        map(int, arguments.rows.split(",")),
        map(int, arguments.lengths.split(",")),
        tunings(device, arguments.at_once),
    )
    for name, rows, length, (cut, tuning) in settings:
        trial = Trial(device, SHAPES[name], dtype, length, rows, tuning)
        measure(trial, f"{name}{cut}", arguments.codecs.split(","))


if __name__ == "__main__":
    main()
