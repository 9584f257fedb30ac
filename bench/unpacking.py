"""Prompts with a compressed KV cache (--kv-codec): their time and memory relative to a raw one.

python -m bench.unpacking                                        an 8B model's layers, k8v4
python -m bench.unpacking --tokens 8192,32768 --codecs k8v4,turbo3 --layers 4

A prompt is computed from its first token on, in chunks as on a server; the weights are random. Time is that of all
chunks, the second time, when everything is compiled. Memory is the peak of the last chunk, next to what the budget
reserves for such a chunk.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from bench import random_models
from ingot.cache.codecs.names import CodecName
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.footprint import batch_end_limit
from ingot.cache.forward_batch import ForwardPart
from ingot.engine.memory_budget import MemoryBudget, PassPart
from ingot.kernels.device import current_device
from ingot.models.adapter import ModelAdapter, adapt_model
from ingot.models.kv_codec import with_kv_codec

# isort: split
import mlx.core as mx

CHUNK = 2048
"""Tokens of a piece at most."""
MEMORY = 1 << 40
"""So that nothing is cut for the lack of it."""


@dataclass(frozen=True, slots=True)
class Found:
    seconds: float
    again: float
    peak: int
    predicted: int


def measured(adapter: ModelAdapter, tokens: int) -> Found:
    taken = []
    for _ in range(2):
        begun = time.perf_counter()
        peak, width = computed(adapter, tokens)
        taken.append(time.perf_counter() - begun)
    budget = MemoryBudget(MEMORY, 0, adapter.footprint, context=tokens, widest=CHUNK, rows=1)
    predicted = budget.pass_bytes([PassPart(width, tokens)]) + adapter.footprint.scratch
    return Found(taken[0], taken[1], peak, predicted)


def computed(adapter: ModelAdapter, tokens: int) -> tuple[int, int]:
    """What the last piece held at a time beside the rest, and how long it was."""
    rows = adapter.new_batch_state()
    row = rows.new()
    peak = width = 0
    for end in ends(adapter, tokens):
        width = end - row.length
        mx.synchronize()  # what the piece before held is free then
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        logits = adapter.run(rows, mx.full((width,), 5, mx.uint32), [ForwardPart((row,), width)], [width - 1])
        mx.eval(logits, rows.pending())
        peak = mx.get_peak_memory() - before
    rows.leave(row)
    return peak, width


def ends(adapter: ModelAdapter, tokens: int) -> Iterator[int]:
    """Where the pieces of a prompt end."""
    length = 0
    while length < tokens:
        most = CHUNK if adapter.live is None else min(CHUNK, batch_end_limit(length) - length)
        length = min(tokens, length + most)
        yield length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-8b", choices=random_models.SHAPES)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", default="8192,32768")
    parser.add_argument("--codecs", default="k8v4")
    asked = parser.parse_args()
    device = current_device()
    config = {**random_models.SHAPES[asked.shape], "num_hidden_layers": asked.layers, "vocab_size": 1024}
    raw = adapt_model(random_models.build(config, dtype=mx.bfloat16), config, device, widest=CHUNK)
    print(f"{asked.shape}, {asked.layers} layers, {device.name} ({device.kind})", flush=True)
    for tokens in map(int, asked.tokens.split(",")):
        plain = measured(raw, tokens)
        told("raw", tokens, plain, plain)
        for name in asked.codecs.split(","):
            live = with_kv_codec(raw, PairCodec(CodecName.parse(name)))
            for note in (note for note in live.notes if "kv_codec" in note):
                print(f"  {note}")
            told(name, tokens, measured(live, tokens), plain)


def told(name: str, tokens: int, found: Found, raw: Found) -> None:
    took = f"{found.seconds:6.2f} s, {found.again:6.2f} s again, {found.again / raw.again:5.2f} of raw"
    held = f"peak {found.peak / 1e6:7.1f} MB of {found.predicted / 1e6:7.1f} predicted"
    print(f"{name:8} {tokens:6} tokens: {took}; {held}", flush=True)


if __name__ == "__main__":
    main()
