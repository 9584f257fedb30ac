"""What compressing the KV cache saves, and what it costs: the table in docs/benchmarks.md.

python -m bench.codecs                          every codec, the default model, and the same with biases in its keys
python -m bench.codecs --models                 only vectors and speed
python -m bench.codecs --models dense window    the foundry's models, with their recall
python -m bench.codecs --codecs k8v4 turbo3 --tokens 512 --json figures.json

Models are measured on hits: the KV of a prefix is computed, encoded and decoded, and what follows is computed from
there. "last bit" is not a codec: it flips the last bit of every key and value. Speeds are those of the 16-bit numbers
that go in or come out, in processor time of all threads.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from bench.hits import LAST_BIT, codec_of, recall, text_figures
from foundry.key_biases import convert
from foundry.package import MODELS
from foundry.recall import PAIR, probe_rows
from foundry.shapes import SHAPES
from ingot.cache.codecs.pair import RAW_CODEC, PairCodec
from ingot.config import DEFAULT_MODEL, Settings
from ingot.kernels.device import current_device
from ingot.models.adapter import load_model_adapter
from ingot.models.files.packaged import ensure_packaged_model
from ingot.text.tokenizer.tokenizer import Tokenizer

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
RECALL_PREFIX = RECALL_TOKENS - QUESTIONS * PAIR - PAIR


@dataclass(frozen=True, slots=True)
class VectorFigures:
    """Distortion is the mean square error of the mean square; logit errors are of what logits spread by over keys."""

    ratio: float  # of 16 bits, everything counted
    distortion: float  # of values
    logit_error: float
    logit_error_with_offsets: float
    encode_gb_s: float
    decode_gb_s: float


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
    ratio = RAW_CODEC.nbytes(*shape) / codec.nbytes(*shape)
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


def held_out(folder: Path, tokens: int, count: int) -> list[list[int]]:
    """Texts that no model of the foundry was trained on."""
    text = lzma.decompress((FOUNDRY / "held_out.txt.xz").read_bytes()).decode()
    ids = Tokenizer.load(folder).encode(text[: 12 * tokens * count], add_special=False)
    return [ids[at * tokens : (at + 1) * tokens] for at in range(count)]


def probes(count: int) -> Iterator[tuple[list[int], list[int]]]:
    """Facts that fill so many tokens, and at their end the places of those that are to be known."""
    rows = probe_rows(0, count, RECALL_TOKENS, QUESTIONS)
    for tokens, weights in zip(rows.tokens.tolist(), rows.weights, strict=True):
        yield tokens, [place for place in range(RECALL_PREFIX + 1, len(tokens)) if weights[place] > 0]


@contextmanager
def model_folder(name: str) -> Iterator[Path]:
    default = ensure_packaged_model(DEFAULT_MODEL, Settings(), lambda *said: None)
    if name == "default":
        yield default
    elif name == "biased":
        with TemporaryDirectory() as made:
            convert(default, Path(made))
            yield Path(made)
    else:
        yield MODELS / name


def measured(name: str, asked: argparse.Namespace) -> dict[str, dict[str, float]]:
    """What is said of a model, by codec; that of a foundry model includes what it recalls."""
    codecs = [LAST_BIT, *asked.codecs]
    with model_folder(name) as folder:
        adapter = load_model_adapter(folder, current_device())
        texts = held_out(folder, asked.tokens, asked.texts)
    figures = {codec: asdict(found) for codec, found in text_figures(adapter, texts, asked.tokens // 2, codecs).items()}
    if name in SHAPES:
        for codec, share in recall(adapter, probes(asked.probes), RECALL_PREFIX, codecs).items():
            figures[codec]["recall"] = share
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench.codecs", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--codecs", nargs="+", default=CODECS)
    parser.add_argument("--models", nargs="*", default=["default", "biased"], choices=["default", "biased", *SHAPES])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=1024, help="of each text; the first half is the prefix")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--probes", type=int, default=2, help="of recall at 4,096 tokens")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    vectors = {name: vector_figures(codec_of(name), asked.rounds) for name in asked.codecs}
    print_vectors(vectors)
    models = {}
    for model in asked.models:
        models[model] = measured(model, asked)
        print_model(model, models[model])
    if asked.json is not None:
        told = {"vectors": {name: asdict(each) for name, each in vectors.items()}, "models": models}
        asked.json.write_text(json.dumps(told, indent=1))


def print_vectors(figures: dict[str, VectorFigures]) -> None:
    print(f"heads of {SIZE}, records of {RECORD} tokens")
    print(f"{'codec':14} {'ratio':>6} {'distortion':>10} {'logits':>7} {'offset':>7} {'encode':>7} {'decode':>7}  GB/s")
    for name, each in figures.items():
        print(
            f"{name:14} {each.ratio:5.2f}x {each.distortion:10.5f} {each.logit_error:7.3f} "
            f"{each.logit_error_with_offsets:7.3f} {each.encode_gb_s:7.2f} {each.decode_gb_s:7.2f}",
            flush=True,
        )


def print_model(model: str, figures: dict[str, dict[str, float]]) -> None:
    """Leads: how many times as likely the likeliest token is as the next, where another is chosen, and usually."""
    print(f"{model}: {next(iter(figures.values()))['tokens']} tokens")
    print(
        f"{'codec':14} {'perplexity':>10} {'change':>8} {'error':>7} {'agreement':>9} {'lead':>6} {'usual':>6}  recall"
    )
    for name, each in figures.items():
        known = f"{each['recall']:7.1%}" if "recall" in each else ""
        print(
            f"{name:14} {each['perplexity']:10.3f} {each['change']:+8.3%} {each['error']:7.3%} "
            f"{each['agreement']:9.2%} {each['flipped_lead']:6.3f} {each['usual_lead']:6.3f}  {known}",
            flush=True,
        )


if __name__ == "__main__":
    main()
