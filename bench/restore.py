"""What reusing a cached prefix costs against computing it, and what caching it costs other requests.

python -m bench.restore                        the packaged model, 8,000 tokens
python -m bench.restore --tokens 1000 --rounds 5 --json figures.json

Three things, in one process: computing, caching and reusing a prefix, each by itself, against copying its keys and
values; a whole request, cold and warm; and the longest wait between two tokens of a stream while another prompt is
computed, with and without caching it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.cli.peers.report import surroundings
from ingot.config import DEFAULT_MODEL, Settings
from ingot.engine.admission import EngineLimits
from ingot.engine.core import LoadedModel
from ingot.engine.engine import Engine
from ingot.engine.loading.language_model import load_language_model
from ingot.engine.prefix_cache import CACHE_STRIDE
from ingot.engine.request import Ended, Failed, Request, Sampling, Stop, TextDelta
from ingot.models.files.locate import locate_model
from ingot.models.files.progress import TerminalProgress
from ingot.text.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    import mlx.core as mx

    from ingot.cache.batch_state import BatchState
    from ingot.cache.forward_batch import Row
    from ingot.cache.records import Record

BESIDE = 2 * CACHE_STRIDE
"""Tokens of the prompt that is computed beside a stream."""
TURNS = 5
"""Of restoring and copying, in each round."""
WANTED = 100.0
"""How many times cheaper restoring must be than copying."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds for all tokens together; keeping was done in pieces as long as the engine's.

    What is restored is the pages of the one who computed it, who has gone on since: where they end in the middle of
    one, that one is copied. `copy` is what writing all keys and values to arrays of one's own takes instead.
    """

    compute: float
    keep: float
    restore: float
    copy: float


@dataclass(frozen=True, slots=True)
class Whole:
    """Seconds to the first token of a request: nothing kept, kept as it is computed, and taken over."""

    cold: float
    kept: float
    warm: float


@dataclass(frozen=True, slots=True)
class Stall:
    """The longest wait between two tokens of a stream, in seconds, while another prompt is computed."""

    without: float
    keeping: float


def measure_parts(loaded: LoadedModel, tokens: Sequence[int]) -> Parts:
    """On the engine thread, before the engine runs."""
    import mlx.core as mx

    from ingot.cache.forward_batch import ForwardPart
    from ingot.cache.records import take_record

    adapter = loaded.adapter
    rows = adapter.new_batch_state()
    row = rows.new()

    def compute(part: Sequence[int]) -> float:
        began = time.perf_counter()
        logits = adapter.run(rows, mx.array(list(part)), [ForwardPart((row,), len(part))], [len(part) - 1])
        mx.eval(logits, rows.pending())
        return time.perf_counter() - began

    def keep(begin: int) -> tuple[float, Record]:
        began = time.perf_counter()
        record = take_record(rows, row, begin)
        mx.eval(record.checkpoint.arrays() if record.checkpoint else [])
        return time.perf_counter() - began, record

    computed = kept = 0.0
    records: list[Record] = []
    for begin in range(0, len(tokens), CACHE_STRIDE):
        computed += compute(tokens[begin : begin + CACHE_STRIDE])
        spent, record = keep(begin)
        kept += spent
        records.append(record)
    dense = dense_arrays(rows, row)
    compute(tokens[:1])
    turns = [(restored(rows, records, len(tokens)), copied(dense)) for _ in range(TURNS)]
    restore, copy = (statistics.median(times) for times in zip(*turns, strict=True))
    return Parts(computed, kept, restore, copy)


def restored(rows: BatchState, records: Sequence[Record], length: int) -> float:
    """Until a row has taken them over and is about to compute its next token."""
    import mlx.core as mx

    from ingot.cache.forward_batch import ForwardPart
    from ingot.cache.records import restore_row

    mx.eval(rows.pending())
    began = time.perf_counter()
    row = rows.new()
    restore_row(rows, row, records, length)
    with rows.launch([ForwardPart((row,), 1)]):
        mx.eval(rows.pending())
    spent = time.perf_counter() - began
    rows.leave(row)
    return spent


def dense_arrays(rows: BatchState, row: Row) -> list[list[mx.array]]:
    """All keys and values of a row [heads, tokens, size], each in pieces as long as the engine keeps."""
    import mlx.core as mx

    pieces = []
    for group, table in zip(rows.groups, row.tables, strict=True):
        for storage in group.storages:
            for pages in storage.gathered(group.index(table.numbers)):
                whole = pages.swapaxes(0, 1).reshape(pages.shape[1], -1, pages.shape[3])
                pieces.append([mx.contiguous(piece) for piece in mx.split(whole, _cuts(whole.shape[1]), axis=1)])
    mx.eval(pieces)
    return pieces


def _cuts(tokens: int) -> list[int]:
    return list(range(CACHE_STRIDE, tokens, CACHE_STRIDE))


def copied(dense: Sequence[Sequence[mx.array]]) -> float:
    """Until all pieces are written to arrays that exist already."""
    import mlx.core as mx

    targets = [mx.concatenate(list(pieces), axis=1) for pieces in dense]
    mx.eval(targets)
    began = time.perf_counter()
    for target, pieces in zip(targets, dense, strict=True):
        for number, piece in enumerate(pieces):
            target[:, number * CACHE_STRIDE : number * CACHE_STRIDE + piece.shape[1]] = piece
    mx.eval(targets)
    return time.perf_counter() - began


def request(name: str, tokens: Sequence[int], *, output: int = 1, cache: bool) -> Request:
    greedy, endless = Sampling(temperature=0.0), Stop(ignore_eos=True)
    return Request(name, (tuple(tokens),), max_tokens=output, sampling=greedy, stop=endless, cache=cache)


def ended(engine: Engine, wanted: Request) -> Ended:
    *_, last = (event for batch in engine.generate(wanted) for event in batch)
    if isinstance(last, Failed):
        raise last.error
    assert isinstance(last, Ended)
    return last


def measure_whole(engine: Engine, name: str, tokens: list[int]) -> Whole:
    cold = ended(engine, request(f"{name}-cold", tokens, cache=False))
    kept = ended(engine, request(f"{name}-kept", tokens, cache=True))
    warm = ended(engine, request(f"{name}-warm", [*tokens[:-1], (tokens[-1] + 1) % 1000], cache=True))
    assert warm.usage.cached_tokens >= len(tokens) - 1 - CACHE_STRIDE, "the prefix was not taken over"
    return Whole(cold.timing.prefill, kept.timing.prefill, warm.timing.prefill)


def measure_stall(engine: Engine, name: str, tokens: list[int], *, cache: bool) -> float:
    """A stream runs; when it has its first tokens, a prompt comes and is computed beside it."""
    stream = engine.generate(request(f"{name}-stream", tokens[:16], output=512, cache=False))
    other = None
    times: list[float] = []
    for batch in stream:
        if any(isinstance(event, TextDelta) for event in batch):
            times.append(time.perf_counter())
        if len(times) == 8 and other is None:
            other = engine.generate(request(f"{name}-other", tokens, cache=cache))
            began = len(times)
    assert other is not None
    list(other)
    gaps = [later - earlier for earlier, later in zip(times[began:], times[began + 1 :], strict=False)]
    return max(gaps)


def run(chosen: argparse.Namespace) -> dict[str, Any]:
    dice = random.Random(chosen.seed)
    settings = Settings(model=chosen.model)
    folder = locate_model(settings.model, settings, TerminalProgress())
    tokenizer = Tokenizer.load(folder.path)
    parts: list[Parts] = []

    def prompt() -> list[int]:
        return [dice.randrange(1000) for _ in range(chosen.tokens)]

    def begin() -> LoadedModel:
        loaded = load_language_model(settings, folder, lambda: tokenizer, {})
        parts.extend(measure_parts(loaded, prompt()) for _ in range(chosen.rounds))
        return loaded

    engine = Engine(begin, EngineLimits())
    try:
        wholes = [measure_whole(engine, str(number), prompt()) for number in range(chosen.rounds)]
        stalls = [
            Stall(
                measure_stall(engine, f"{number}-without", prompt()[:BESIDE], cache=False),
                measure_stall(engine, f"{number}-keeping", prompt()[:BESIDE], cache=True),
            )
            for number in range(chosen.rounds)
        ]
    finally:
        engine.close()
    show(chosen, parts, wholes, stalls)
    return {
        "parts": [asdict(each) for each in parts],
        "whole": [asdict(each) for each in wholes],
        "stall": [asdict(each) for each in stalls],
    }


def middle(rounds: Sequence[Any], name: str) -> float:
    return statistics.median(asdict(each)[name] for each in rounds)


def show(chosen: argparse.Namespace, parts: Sequence[Parts], wholes: Sequence[Whole], stalls: Sequence[Stall]) -> None:
    compute, keep, restore, copy = (middle(parts, name) for name in ("compute", "keep", "restore", "copy"))
    cold, kept, warm = (middle(wholes, name) for name in ("cold", "kept", "warm"))
    without, keeping = (middle(stalls, name) for name in ("without", "keeping"))
    print(f"{chosen.model}: {chosen.tokens} tokens, medians of {chosen.rounds} rounds, in ms")
    print(f"computed in {_ms(compute)}, reused in {_ms(restore)}: {compute / restore:.0f}x")
    print(f"copied in {_ms(copy)}, reused in {_ms(restore)}: {copy / restore:.0f}x, wanted {WANTED:.0f}x")
    print(f"cached in {_ms(keep)}, {CACHE_STRIDE} tokens at a time: {keep / compute:.1%} of computing them")
    print(f"first token after {_ms(cold)}, or {_ms(kept)} if it is cached; then after {_ms(warm)}: {cold / warm:.0f}x")
    print(f"longest wait of a stream alongside {_ms(without)}, or {_ms(keeping)} if it is cached")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "bench.restore", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a model as for `ingot serve`")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write every round's figures here")
    chosen = parser.parse_args(arguments)
    around = surroundings()
    found = run(chosen)
    if chosen.json:
        chosen.json.write_text(json.dumps({"surroundings": around, **found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
