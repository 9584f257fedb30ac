"""What keeping keys and values in fewer bits saves, and what it costs: the table in docs/codecs.md.

python -m bench.codecs                          every codec, the packaged model and a foundry model
python -m bench.codecs --no-models              vectors and speed alone
python -m bench.codecs --codecs k8v4 turbo3 --tokens 512 --json figures.json

Models are measured on hits: the states of a prefix are computed, put into the codec and read back, and what follows is
computed from there. Speeds are of the 16 bits that go in or come out, by the processor's time in all threads.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.cache.codecs.names import CodecName
from ingot.cache.codecs.pair import PairCodec
from ingot.config import DEFAULT_MODEL, Settings

# isort: split
import mlx.core as mx

CODECS = ("raw", "affine8", "k8v4", "affine4", "turbo4", "affine8/turbo3", "turbo3", "turbo2", "turbo1")
SIZE = 128
RECORD = 512
"""Tokens of a record whose bytes are counted."""
OFFSET = 30.0
"""What keys have in common in a few channels, where they have: as much as biases of real models."""
FOUNDRY = Path(__file__).parents[1] / "foundry"
RECALL_TOKENS, QUESTIONS = 4096, 32


@dataclass(frozen=True, slots=True)
class VectorFigures:
    """Distortion is the mean square error of the mean square; logit errors are of what logits spread by over keys."""

    ratio: float  # of 16 bits, everything counted
    distortion: float  # of values
    logit_error: float
    logit_error_with_offsets: float
    encode_gb_s: float
    decode_gb_s: float


@dataclass(frozen=True, slots=True)
class ModelFigures:
    perplexity: float
    agreement: float  # of the likeliest tokens with those that raw states give


def drawn(*shape: int, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def offset(keys: mx.array) -> mx.array:
    size = keys.shape[-1]
    return keys + mx.array([OFFSET if channel % (size // 4) == 0 else 0.0 for channel in range(size)])


def logit_error(keys: mx.array, again: mx.array) -> float:
    """What is added to all logits of a query alike is nothing to softmax, and does not count."""
    queries = drawn(*keys.shape[:2], 64, keys.shape[-1], seed=9)
    logits, others = (queries @ each.swapaxes(-1, -2) for each in (keys, again))
    off, spread = (each - each.mean(axis=-1, keepdims=True) for each in (others - logits, logits))
    return math.sqrt(float(mx.mean(off * off) / mx.mean(spread * spread)))


def vector_figures(codec: PairCodec, rounds: int) -> VectorFigures:
    keys, values = (drawn(1, 4, RECORD, SIZE, seed=seed) for seed in (1, 2))
    errors = []
    for given in (keys, offset(keys)):
        again, _ = codec.decode(codec.encode(given, values), mx.float32)
        errors.append(logit_error(given, again))
    _, back = codec.decode(codec.encode(keys, values), mx.float32)
    shape = (RECORD, 4, (SIZE, SIZE), mx.float16)
    ratio = PairCodec(CodecName()).nbytes(*shape) / codec.nbytes(*shape)
    lost = float(mx.mean((back - values) ** 2) / mx.mean(values * values))
    return VectorFigures(ratio, lost, *errors, *speeds(codec, rounds))


def speeds(codec: PairCodec, rounds: int) -> tuple[float, float]:
    """Gigabytes of float16 a second, encoding and decoding."""
    keys, values = (drawn(1, 8, 8 * RECORD, SIZE, seed=seed).astype(mx.float16) for seed in (3, 4))
    mx.eval(keys, values)
    held = codec.encode(keys, values)
    mx.eval(held)
    amount = (keys.nbytes + values.nbytes) / 1e9

    def median(work: Callable[[], object]) -> float:
        taken = []
        for _ in range(rounds):
            began = time.process_time()
            mx.eval(work())
            taken.append(time.process_time() - began)
        return statistics.median(taken)

    encoding = median(lambda: codec.encode(keys, values))
    return amount / encoding, amount / median(lambda: codec.decode(held, mx.float16))


def hit_logits(adapter: Any, tokens: Sequence[int], prefix: int, codec: PairCodec) -> mx.array:
    """Logits at the tokens from `prefix` on, whose states before were put into the codec and read back."""
    from ingot.cache.encoding import LossyEncoding
    from ingot.cache.launch import Part
    from ingot.cache.records import put, take
    from ingot.engine.form import form_of

    rows = adapter.new_rows()
    form = form_of(adapter, rows)
    row = rows.new()
    for begin in range(0, prefix, adapter.widest):
        part = tokens[begin : min(begin + adapter.widest, prefix)]
        mx.eval(adapter.run(rows, mx.array(part), [Part((row,), len(part))], [len(part) - 1]), rows.pending())
    if codec.lossy:
        encoding = LossyEncoding(rows, codec, form)
        record = take(rows, row, 0)
        rows.leave(row)
        record = encoding.shrunk(record)
        row = rows.new()
        put(rows, row, encoding.with_pages([record], prefix), prefix)
    rest = tokens[prefix:]
    logits: mx.array = adapter.run(rows, mx.array(rest), [Part((row,), len(rest))], list(range(len(rest))))
    mx.eval(logits, rows.pending())
    return logits


def model_figures(
    adapter: Any, texts: Sequence[Sequence[int]], prefix: int, codecs: Sequence[str]
) -> dict[str, ModelFigures]:
    """By codec. Agreement is with what raw states give."""
    losses: dict[str, list[float]] = {name: [] for name in codecs}
    agreed: dict[str, list[float]] = {name: [] for name in codecs}
    for text in texts:
        likeliest = mx.argmax(hit_logits(adapter, text, prefix, PairCodec(CodecName())), axis=-1)
        for name in codecs:
            logits = hit_logits(adapter, text, prefix, PairCodec(CodecName.parse(name)))[:-1]
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            asked = mx.array(text[prefix + 1 :])[:, None]
            losses[name].append(-float(mx.mean(mx.take_along_axis(logprobs, asked, axis=-1))))
            agreed[name].append(float(mx.mean((mx.argmax(logits, axis=-1) == likeliest[:-1]).astype(mx.float32))))
    return {
        name: ModelFigures(math.exp(statistics.mean(losses[name])), statistics.mean(agreed[name])) for name in codecs
    }


def recall(adapter: Any, codecs: Sequence[str], probes: int) -> dict[str, float]:
    """The share of facts, told anywhere in 4,096 tokens, that are known at their end."""
    from foundry.recall import PAIR, probe_rows

    rows = probe_rows(0, probes, RECALL_TOKENS, QUESTIONS)
    prefix = RECALL_TOKENS - QUESTIONS * PAIR - PAIR
    right: dict[str, list[float]] = {name: [] for name in codecs}
    for tokens, weights in zip(rows.tokens.tolist(), rows.weights, strict=True):
        places = [place for place in range(prefix + 1, len(tokens)) if weights[place] > 0]
        for name in codecs:
            logits = hit_logits(adapter, tokens, prefix, PairCodec(CodecName.parse(name)))
            told = mx.argmax(logits, axis=-1).tolist()
            right[name].append(statistics.mean(told[place - 1 - prefix] == tokens[place] for place in places))
    return {name: statistics.mean(shares) for name, shares in right.items()}


def default_texts(tokens: int, count: int) -> tuple[Any, list[list[int]]]:
    from ingot.kernels.device import current
    from ingot.models import adapter
    from ingot.models.files.packaged import ensure
    from ingot.text.tokens.tokenizer import Tokenizer

    folder = ensure(DEFAULT_MODEL, Settings(), lambda *said: None)
    text = lzma.decompress((FOUNDRY / "held_out.txt.xz").read_bytes()).decode()
    ids = Tokenizer.load(folder).encode(text[: 12 * tokens * count], add_special=False)
    return adapter.load(folder, current()), [ids[at * tokens : (at + 1) * tokens] for at in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench.codecs", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--codecs", nargs="+", default=CODECS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=1024, help="of each text; the first half is the prefix")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--probes", type=int, default=2, help="of recall at 4,096 tokens")
    parser.add_argument("--no-models", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    vectors = {name: vector_figures(PairCodec(CodecName.parse(name)), asked.rounds) for name in asked.codecs}
    print_vectors(vectors)
    models: dict[str, ModelFigures] = {}
    known: dict[str, float] = {}
    if not asked.no_models:
        adapter, texts = default_texts(asked.tokens, asked.texts)
        models = model_figures(adapter, texts, asked.tokens // 2, asked.codecs)
        print_models(models)
        known = recall(foundry_model(), asked.codecs, asked.probes)
        for name, share in known.items():
            print(f"recall at {RECALL_TOKENS} tokens, {name:14} {share:6.1%}")
    if asked.json is not None:
        shares = {name: {"recall": share} for name, share in known.items()}
        told = {name: asdict(models[name]) if models else {} for name in asked.codecs}
        figures = {name: asdict(vectors[name]) | told[name] | shares.get(name, {}) for name in asked.codecs}
        asked.json.write_text(json.dumps(figures, indent=1))


def foundry_model() -> Any:
    from ingot.kernels.device import current
    from ingot.models import adapter

    return adapter.load(FOUNDRY / "models" / "dense", current())


def print_vectors(figures: dict[str, VectorFigures]) -> None:
    print(f"heads of {SIZE}, records of {RECORD} tokens")
    print(f"{'codec':14} {'ratio':>6} {'distortion':>10} {'logits':>7} {'offset':>7} {'encode':>7} {'decode':>7}  GB/s")
    for name, each in figures.items():
        print(
            f"{name:14} {each.ratio:5.2f}x {each.distortion:10.5f} {each.logit_error:7.3f} "
            f"{each.logit_error_with_offsets:7.3f} {each.encode_gb_s:7.2f} {each.decode_gb_s:7.2f}"
        )


def print_models(figures: dict[str, ModelFigures]) -> None:
    plain = figures["raw"].perplexity if "raw" in figures else None
    print(f"{'codec':14} {'perplexity':>10} {'change':>8} {'agreement':>9}")
    for name, each in figures.items():
        change = "" if plain is None else f"{each.perplexity / plain - 1:+8.2%}"
        print(f"{name:14} {each.perplexity:10.3f} {change:>8} {each.agreement:9.1%}")


if __name__ == "__main__":
    main()
