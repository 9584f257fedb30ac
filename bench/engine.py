"""The engine without HTTP: tokens per second at several concurrencies, on a random model of a given shape.

python -m bench.engine --shape dispatch
python -m bench.engine --shape llama-8b --dtype bfloat16 --streams 1,8,32 --prompt 512 --output 128
python -m bench.engine --shape llama-8b --dtype bfloat16 --streams 16 --prompt 512 --unequal --penalties
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.random_models import SHAPES, build, write_tokenizer
from ingot.cache.disk.backend import DiskBackend
from ingot.engine.admission import EngineLimits
from ingot.engine.core import LoadedModel
from ingot.engine.engine import Engine
from ingot.engine.memory_budget import MemoryBudget
from ingot.engine.request import Ended, Failed, ModelCard, Request, Sampling, Stop
from ingot.engine.specprefill.prefill import SpecPrefillSetup
from ingot.engine.speculation.proposer import Proposer
from ingot.engine.streams import BlockingStream
from ingot.text.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Figures:
    streams: int
    tokens_per_second: float
    decode_tokens_per_second: float  # once every stream has its first token
    prefill_tokens_per_second: float
    ttft_s: float


def start(
    shape: str,
    dtype: str,
    *,
    bits: int | None = None,
    memory_gb: float,
    context: int = 8192,
    cache_gb: float = 0.0,
    proposers: Sequence[Proposer] = (),
    fixed_draft_tokens: int | None = None,
    weights: Callable[..., Any] = build,
) -> Engine:
    """`bits`: pack the weights into so many each; `weights`: who makes a model of a shape's."""

    def make() -> Any:
        from ingot.models.precision import DTYPES

        model = weights(SHAPES[shape], dtype=DTYPES[dtype])
        if bits is not None:
            from mlx import nn

            from ingot.kernels.device import current_device
            from ingot.models.precision import settle_precision

            nn.quantize(model, group_size=64, bits=bits)
            settle_precision(model, current_device(), None)
        return model

    return started(
        shape,
        SHAPES[shape],
        make,
        memory_gb=memory_gb,
        context=context,
        cache_gb=cache_gb,
        proposers=proposers,
        fixed_draft_tokens=fixed_draft_tokens,
    )


def started(
    name: str,
    config: dict[str, Any],
    make: Callable[[], Any],
    *,
    memory_gb: float,
    context: int = 8192,
    cache_gb: float = 0.0,
    proposers: Sequence[Proposer] = (),
    fixed_draft_tokens: int | None = None,
    look: Callable[[Any], None] = lambda adapter: None,
    change: Callable[[Any], Any] = lambda adapter: adapter,
    disk: Callable[[], DiskBackend] | None = None,
    specprefill: Callable[[], SpecPrefillSetup] | None = None,
    deterministic: bool = False,
) -> Engine:
    """An engine over the model that `make` gives. That, `look`, which is shown the adapter, `change`, which may return
    another one, `disk`, where prefixes are offloaded to, and `specprefill`, which makes who scores long prompts, are
    called in the engine's thread."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), config["vocab_size"])
        tokenizer = Tokenizer.load(Path(folder))

    def load() -> LoadedModel:
        from ingot.kernels.device import current_device
        from ingot.kernels.gpu.launcher import begin_mlx_compilation
        from ingot.kernels.gpu.mlx_kernels import CompilationNeeds
        from ingot.models.adapter import adapt_model, rehearse_steps
        from ingot.models.forward import can_compile_steps

        compilation, model = begin_mlx_compilation(current_device(), CompilationNeeds.of(config, None)), make()
        if compilation is not None:
            compilation.wait(lambda: None)
        adapter = adapt_model(model, config, current_device(), deterministic=deterministic)
        if can_compile_steps(adapter.device):
            rehearse_steps(adapter)
        look(adapter)
        adapter = change(adapter)
        offer = None if specprefill is None else specprefill()
        total = adapter.weight_bytes + int(memory_gb * 1e9)
        budget = MemoryBudget(total, adapter.weight_bytes, adapter.footprint, context=context, widest=2048, rows=64)
        card = ModelCard(
            name,
            "random",
            adapter.family,
            context,
            adapter.vocab,
            "",
            adapter.dtype,
            adapter.weight_bytes,
            total,
            64,
            0,
            adapter.notes,
            scorer="" if offer is None else offer.scorer.name,
        )
        cache_bytes = int(cache_gb * 1e9)
        return LoadedModel(
            *(adapter, tokenizer, card, budget, cache_bytes),
            proposers=proposers,
            fixed_draft_tokens=fixed_draft_tokens,
            specprefill=offer,
            disk=None if disk is None else disk(),
        )

    return Engine(load, EngineLimits(max_sequences=64))


def requests(
    name: str, streams: int, prompt: int, output: int, vocab: int, *, unequal: bool = False, penalty: float = 0.0
) -> list[Request]:
    """Greedy ones, on random prompts that share nothing: of exactly that length, or up to half as long again."""
    dice = random.Random(name)
    lengths = [prompt + (dice.randrange(prompt // 2 + 1) if unequal else 0) for _ in range(streams)]
    return [
        Request(
            f"{name}-{number}",
            (tuple(dice.randrange(vocab) for _ in range(lengths[number])),),
            max_tokens=output,
            sampling=Sampling(temperature=0.0, frequency_penalty=penalty),
            stop=Stop(ignore_eos=True),
        )
        for number in range(streams)
    ]


def measure(engine: Engine, wanted: Sequence[Request]) -> Figures:
    """Run them all at once. They are read one after another by this one thread, which so costs the engine nothing."""
    began = time.monotonic()
    streams = [engine.generate(request) for request in wanted]
    ends = [_end(stream) for stream in streams]
    seconds = time.monotonic() - began
    waits = [end.timing.queue + end.timing.prefill for end in ends]
    prompt = sum(end.usage.prompt_tokens for end in ends)
    output = sum(end.usage.completion_tokens for end in ends)
    return Figures(
        streams=len(ends),
        tokens_per_second=output / seconds,
        decode_tokens_per_second=(output - len(ends)) / (seconds - max(waits)),
        prefill_tokens_per_second=prompt / max(waits),
        ttft_s=statistics.median(waits),
    )


def _end(stream: BlockingStream) -> Ended:
    *_, batch = stream
    last = batch[-1]
    if isinstance(last, Failed):
        raise last.error
    assert isinstance(last, Ended)
    return last


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="dispatch")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--streams", default="1,8,16")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--unequal", action="store_true", help="prompts of different lengths, up to half as long again")
    parser.add_argument("--penalties", action="store_true", help="every stream with a frequency penalty")
    parser.add_argument("--memory-gb", type=float, default=4.0)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    engine = start(chosen.shape, chosen.dtype, memory_gb=chosen.memory_gb)
    vocab = SHAPES[chosen.shape]["vocab_size"] - 1
    measure(engine, requests("warm-up", 1, chosen.prompt, 8, vocab))
    rows = []
    for streams in (int(number) for number in chosen.streams.split(",")):
        penalty = 0.5 if chosen.penalties else 0.0
        asked = requests(
            str(streams), streams, chosen.prompt, chosen.output, vocab, unequal=chosen.unequal, penalty=penalty
        )
        rows.append(measure(engine, asked))
        print(" ".join(f"{name} {value:.4g}" for name, value in asdict(rows[-1]).items()), flush=True)
    print(f"ratio to one stream: {[round(row.tokens_per_second / rows[0].tokens_per_second, 2) for row in rows]}")
    engine.check()
    engine.close()
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
