"""The engine without HTTP: tokens per second at several concurrencies, on a random model of a given shape.

python -m bench.engine --shape dispatch
python -m bench.engine --shape llama-8b --dtype bfloat16 --streams 1,8,32 --prompt 512 --output 128
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path

from bench.random_models import SHAPES, build, write_tokenizer
from ingot.engine.budget import Budget
from ingot.engine.engine import Engine, Limits, Loaded
from ingot.engine.request import Failed, ModelCard, Request, Sampling, Stop
from ingot.text.tokenizer import Tokenizer


def start(shape: str, dtype: str, *, memory_gb: float) -> Engine:
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), SHAPES[shape]["vocab_size"])
        tokenizer = Tokenizer.load(Path(folder))

    def load() -> Loaded:
        import mlx.core as mx

        from ingot.kernels.device import current
        from ingot.models.adapter import adapt

        adapter = adapt(build(SHAPES[shape], dtype=getattr(mx, dtype)), SHAPES[shape], current())
        total = adapter.weight_bytes + int(memory_gb * 1e9)
        budget = Budget(total, adapter.weight_bytes, adapter.footprint, context=8192, widest=2048, rows=64)
        card = ModelCard(
            shape, "random", "llama", 8192, adapter.vocab, "", dtype, adapter.weight_bytes, total, 64, 0, adapter.notes
        )
        return Loaded(adapter, tokenizer, card, budget)

    return Engine(load, Limits(max_sequences=64))


def run(engine: Engine, name: str, prompt: tuple[int, ...], output: int, times: dict[str, list[float]]) -> None:
    sampling = Sampling(temperature=0.0)
    request = Request(name, (prompt,), max_tokens=output, sampling=sampling, stop=Stop(ignore_eos=True))
    times[name] = [time.perf_counter()]
    for batch in engine.generate(request):
        if isinstance(batch[-1], Failed):
            raise batch[-1].error
        times[name].append(time.perf_counter())


def measure(engine: Engine, streams: int, prompt: int, output: int, vocab: int) -> dict[str, float]:
    rng = random.Random(streams)
    prompts = [tuple(rng.randrange(vocab) for _ in range(prompt)) for _ in range(streams)]
    times: dict[str, list[float]] = {}
    threads = [
        threading.Thread(target=run, args=(engine, f"{streams}-{number}", own, output, times))
        for number, own in enumerate(prompts)
    ]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ended = time.perf_counter()
    first = [stamps[1] - stamps[0] for stamps in times.values()]
    return {
        "streams": streams,
        "tokens_per_second": streams * output / (ended - began),
        "decode_tokens_per_second": streams * (output - 1) / (ended - max(stamps[1] for stamps in times.values())),
        "prefill_tokens_per_second": streams * prompt / max(first),
        "ttft_s": statistics.median(first),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="dispatch")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--streams", default="1,8,16")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--memory-gb", type=float, default=4.0)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    engine = start(chosen.shape, chosen.dtype, memory_gb=chosen.memory_gb)
    vocab = SHAPES[chosen.shape]["vocab_size"] - 1
    measure(engine, 1, chosen.prompt, 8, vocab)
    rows = []
    for streams in (int(number) for number in chosen.streams.split(",")):
        rows.append(measure(engine, streams, chosen.prompt, chosen.output, vocab))
        print(" ".join(f"{name} {value:.4g}" for name, value in rows[-1].items()), flush=True)
    print(f"ratio to one stream: {[round(row['tokens_per_second'] / rows[0]['tokens_per_second'], 2) for row in rows]}")
    engine.check()
    engine.close()
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
