"""Mixtures whose experts do not fit in memory: what reading them from disk costs, and what reading ahead gains.

python -m bench.experts                          the foundry's mixture, and the same with experts of 1.3 MB
python -m bench.experts --shape wide --disk-gbps 0.5,2 --shares 50 --streams 1
python -m bench.experts --model FOLDER           any mixture of experts, with its own routing
python -m bench.experts --shape qwen3-30b-a3b    as many and as large ones as Qwen3-30B-A3B's, for a GPU
python -m bench.experts --host                   what a layer costs the host where all experts it needs are in memory;
INGOT_AS=cuda python -m bench.experts --host     the same by another device's rules, where only the counts mean anything

Text that no model was trained on is continued greedily with 25, 50 and 75 % of the experts in memory, in turns with all
of them in memory and with experts that are read when a layer needs them and not before. Printed are tokens a second and
their ratio to both, and to the limit: what takes longer, computing with all experts in memory, or reading the bytes
that had to be read (wrong guesses had not) at the speed of the disk. Between turns another text is read, so that no
turn finds the experts of its own text.

Routing is real: `wide` and `qwen3-30b-a3b` are the foundry's mixture with padding around its experts, so that its
trained routers choose as they do there. Deeper ones have its layers several times, and more experts are copies with
noise in their routers. Their experts are records, as `ingot convert --experts` lays them. The page cache must not pass
for a disk: reads pass it by, or what was read is dropped from it at once; with --disk-gbps it is left there, and reads
are slowed down to that speed instead.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from bench.host import HostWork
from foundry import corpus
from foundry.package import MODELS
from foundry.shapes import EXPERT_PARTS
from ingot.cache.forward_batch import ForwardPart, Row
from ingot.kernels.device import acting_as, current_device
from ingot.models.adapter import ModelAdapter, load_model_adapter
from ingot.models.checkpoint import checkpoint_files
from ingot.models.experts.loading import ExpertMemory
from ingot.models.experts.records import write_record_file
from ingot.models.experts.streaming import ExpertStats, ExpertStore
from ingot.models.files.drive_speed import read_speed
from ingot.text.tokenizer.tokenizer import Tokenizer
from ingot.upstream import load_config

# isort: split
import mlx.core as mx
import numpy as np

MIXTURE = MODELS / "mixture"
OF_LIMIT, OVER_WAITING = 0.8, 2.0
"""The goals: of the limit, and over reading without overlap at one stream."""
SPEEDS = 3
"""Measurements of the disk, of which the fastest counts."""
PIECE = 2400
"""Characters of a prompt's text, from which as many tokens are taken as the prompt is to have."""
NORMS, HEAD_NORMS = ("input_layernorm", "post_attention_layernorm"), ("q_norm", "k_norm")
LAST_WRITTEN = "tokenizer_config.json"
WAYS = ("whole", "ahead", "waiting")
ONE_STREAM = "1 stream"
STEPS, WARM_UPS, TIMED = 2, 4, 40
"""Decode steps of which the host's part is measured, and how often they are taken before and while they are."""
NOISE = 0.5
"""Of a copied router, relative to its length."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The foundry's mixture in another size: padded to `hidden` and `inner`, its layers `repeats` times one after
    another, its experts `copies` times."""

    hidden: int = 256
    inner: int = 64
    repeats: int = 1
    copies: int = 1


SHAPES = {
    "mixture": Shape(),
    "wide": Shape(1024, 768),
    "qwen3-30b-a3b": Shape(2048, 768, repeats=12, copies=2),
}
TINY = {"mixture": Shape(), "wide": Shape(512, 128), "qwen3-30b-a3b": Shape(copies=2)}


@dataclass(frozen=True, slots=True)
class Turn:
    seconds: float
    cpu: float  # seconds that processors were busy for this process
    host: float  # and for this thread
    tokens: int
    answers: tuple[tuple[int, ...], ...]
    stats: ExpertStats
    reads: int


@dataclass(frozen=True, slots=True)
class Figures:
    """Ratios are medians of rounds, in each of which all ways follow one another."""

    shape: str
    disk_gbps: float
    share: float  # of the experts that have slots
    slots: int  # of the layer with the fewest
    work: str  # "prefill", or so many streams
    tokens_per_second: float
    of_all: float
    over_waiting: float  # over reading without overlap
    of_limit: float
    hits: float  # shares of the experts that passes needed
    guessed: float
    missed: float
    megabytes_a_token: float
    wasted: float  # the share of these that nobody needed
    reads_a_token: float
    waited: float  # the share of the time that passes waited for experts
    same: bool  # all ways gave the same tokens
    seconds: tuple[tuple[float, ...], ...] = ()  # of each round: all in memory, read ahead, without overlap
    cpu: tuple[tuple[float, ...], ...] = ()


class Disk:
    """Reads past the page cache, or from it at so many gigabytes a second."""

    def __init__(self, gbps: float | None) -> None:
        self._gbps, self._lock, self._free = gbps, threading.Lock(), 0.0
        self.drops = False
        self.reads = 0

    def read(self, descriptor: int, into: Sequence[memoryview], offset: int) -> int:
        count = os.preadv(descriptor, into, offset)
        if self.drops:
            os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_DONTNEED)
        with self._lock:
            self.reads += 1
            if self._gbps is not None:
                self._free = max(self._free, time.monotonic()) + count / (self._gbps * 1e9)
            until = self._free
        if self._gbps is not None:
            time.sleep(max(0.0, until - time.monotonic()))
        return count

    def memory(self, share: float) -> ExpertMemory:
        """For that share of the experts."""
        return ExpertMemory(lambda _, experts: int(experts * share), past_cache=self._gbps is None, read=self.read)

    def begin(self, store: ExpertStore) -> float:
        """Nothing of a model is in the page cache any more, unless reads are slowed down. Returns the disk's speed for
        its experts, in bytes a second."""
        if self._gbps is not None:
            return self._gbps * 1e9
        self.drops = not store.files.passes_cache and hasattr(os, "posix_fadvise")
        for path in checkpoint_files(store.files.folder) if self.drops else ():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        speeds = [read_speed(store.files.largest, size=store.expert_bytes) for _ in range(SPEEDS)]
        return max(speed for speed in (*speeds, 1.0) if speed is not None)

    @property
    def words(self) -> str:
        if self._gbps is not None:
            return f"reads slowed down to {self._gbps:g} GB/s"
        return "pages dropped after each read" if self.drops else "past the page cache"


class Side:
    """A model with all of its experts in memory, or with a share of them."""

    def __init__(self, folder: Path, share: float | None, disk: Disk) -> None:
        memory = None if share is None else disk.memory(share)
        self.adapter: ModelAdapter = load_model_adapter(folder, current_device(), expert_memory=memory)
        if share is not None and self.adapter.experts is None:
            raise SystemExit(f"bench.experts: all experts fit into {share:.0%} of their bytes")
        self._rows, self._disk = self.adapter.new_batch_state(), disk

    @property
    def store(self) -> ExpertStore:
        assert self.adapter.experts is not None
        return self.adapter.experts

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Turn:
        """One prompt after another, each in one pass."""

        def one(tokens: Sequence[int]) -> list[int]:
            row = self._rows.new()
            found = self._prompt(row, tokens)
            self._rows.leave(row)
            return [found]

        return self._timed(lambda: [one(tokens) for tokens in prompts], sum(map(len, prompts)))

    def decode(self, prompts: Sequence[Sequence[int]], output: int) -> Turn:
        """So many tokens behind each prompt, which is computed before."""
        live = [self._rows.new() for _ in prompts]
        first = [self._prompt(row, tokens) for row, tokens in zip(live, prompts, strict=True)]

        def steps() -> list[list[int]]:
            tokens, said = mx.array(first), [[each] for each in first]
            for _ in range(output):
                logits = self.adapter.run(self._rows, tokens, [ForwardPart(tuple(live), 1)], None)
                tokens = mx.argmax(logits, axis=-1)
                mx.eval(tokens, self._rows.pending())
                for answer, token in zip(said, tokens.tolist(), strict=True):
                    answer.append(token)
            return said

        turn = self._timed(steps, output * len(prompts))
        for row in live:
            self._rows.leave(row)
        return turn

    def _timed(self, work: Callable[[], list[list[int]]], tokens: int) -> Turn:
        before, reads = self._stats(), self._disk.reads
        clocks = time.perf_counter, time.process_time, time.thread_time
        began = [clock() for clock in clocks]
        answers = work()
        seconds, cpu, host = (clock() - since for clock, since in zip(clocks, began, strict=True))
        reads = self._disk.reads - reads
        return Turn(seconds, cpu, host, tokens, tuple(map(tuple, answers)), self._stats().since(before), reads)

    def _stats(self) -> ExpertStats:
        return ExpertStats() if self.adapter.experts is None else self.adapter.experts.stats

    def _prompt(self, row: Row, tokens: Sequence[int]) -> int:
        """The likeliest token behind it."""
        parts = [ForwardPart((row,), len(tokens))]
        logits = self.adapter.run(self._rows, mx.array(list(tokens)), parts, [len(tokens) - 1])
        chosen = mx.argmax(logits[-1])
        mx.eval(chosen, self._rows.pending())
        return int(chosen.item())


def host_line(name: str, some: Side, prompt: Sequence[int]) -> str:
    """Of decode steps that find all experts in memory, without guesses: the same ones again and again."""
    some.store.read_ahead, work = False, HostWork()

    def steps() -> Turn:
        return some.decode([prompt[:1]], STEPS)

    for _ in range(WARM_UPS):
        steps()
    turns = [steps() for _ in range(WARM_UPS if acting_as() else TIMED)]
    assert not any(turn.stats.misses for turn in turns), "an expert was read"
    with work.counting():
        steps()
        first = work.counts.copy()
        some.decode([prompt[:1]], 0)
    layers = len(some.store.layers) * STEPS
    counts = {key: (2 * first[key] - work.counts[key]) / layers for key in first}
    said = ", ".join(f"{value:.3g} {key}" for key, value in counts.items())
    least = 1e6 * min(turn.host for turn in turns) / layers
    return f"{name}, {some.store.share:.0%} of the experts: {least:.0f} us of the host, {said} a layer"


class Bench:
    """One mixture, with all of its experts in memory and with a share of them."""

    def __init__(self, name: str, folder: Path, disk: Disk, texts: Iterator[list[int]]) -> None:
        self._name, self._folder, self._disk, self._texts = name, folder, disk, texts
        self._whole = Side(folder, None, disk)

    def figures(
        self, share: float, streams: Sequence[int], prompt: int, output: int, prefill: int, rounds: int
    ) -> Iterator[Figures]:
        began = time.monotonic()
        some = Side(self._folder, share, self._disk)
        print(f"{self._name}: loaded with {share:.0%} in {time.monotonic() - began:.0f} s", file=sys.stderr)
        speed = self._disk.begin(some.store)
        works: list[tuple[str, Callable[[Side, list[list[int]]], Turn], list[int]]] = [
            (
                ONE_STREAM if count == 1 else f"{count} streams",
                lambda side, texts: side.decode(texts, output),
                [prompt] * count,
            )
            for count in streams
        ]
        if prefill:
            works.append(("prefill", Side.prefill, [prefill]))
        for work, turn, lengths in works:
            yield self._in_turns(some, work, speed, rounds, turn, lengths)
        some.store.check()
        some.adapter.close()

    def _in_turns(
        self,
        some: Side,
        work: str,
        speed: float,
        rounds: int,
        turn: Callable[[Side, list[list[int]]], Turn],
        lengths: Sequence[int],
    ) -> Figures:
        """`speed` is the disk's, in bytes a second. The first round is not counted."""
        found = list[tuple[Turn, Turn, Turn]]()
        for number in range(rounds + 1):
            asked, turns = [next(self._texts)[:length] for length in lengths], dict[str, Turn]()
            for way in WAYS if number % 2 else reversed(WAYS):
                some.store.read_ahead = way == "ahead"
                some.prefill([next(self._texts)[: max(lengths)]])
                turns[way] = turn(self._whole if way == "whole" else some, asked)
            found.append((turns["whole"], turns["ahead"], turns["waiting"]))
        return self._compared(some, work, speed, found)

    @staticmethod
    def _same(whole: Turn, waiting: Turn) -> Sequence[Turn]:
        """Those that give the same bits. On NVIDIA GPUs prompts are computed by other kernels where all experts are in
        memory."""
        return (waiting,) if current_device().kind == "cuda" else (whole, waiting)

    def _compared(self, some: Side, work: str, speed: float, found: Sequence[tuple[Turn, Turn, Turn]]) -> Figures:
        counted, store = found[1:], some.store
        stats = [ahead.stats for _, ahead, _ in counted]
        hits, guessed, missed = (sum(getattr(each, name) for each in stats) for name in ("hits", "predicted", "misses"))
        tokens, read = sum(ahead.tokens for _, ahead, _ in counted), sum(each.bytes_read for each in stats)
        needed = (guessed + missed) * store.expert_bytes

        def limit(whole: Turn, ahead: Turn) -> float:
            had_to = (ahead.stats.predicted + ahead.stats.misses) * store.expert_bytes
            return max(whole.seconds, had_to / speed)

        return Figures(
            self._name,
            speed / 1e9,
            store.share,
            min(layer.slots.count for layer in store.layers),
            work,
            statistics.median(ahead.tokens / ahead.seconds for _, ahead, _ in counted),
            statistics.median(whole.seconds / ahead.seconds for whole, ahead, _ in counted),
            statistics.median(waiting.seconds / ahead.seconds for _, ahead, waiting in counted),
            statistics.median(limit(whole, ahead) / ahead.seconds for whole, ahead, _ in counted),
            *(part / max(1, hits + guessed + missed) for part in (hits, guessed, missed)),
            read / tokens / 1e6,
            max(0.0, 1 - needed / max(1, read)),
            sum(ahead.reads for _, ahead, _ in counted) / tokens,
            sum(each.waited_s for each in stats) / sum(ahead.seconds for _, ahead, _ in counted),
            all(
                turn.answers == ahead.answers for whole, ahead, waiting in found for turn in self._same(whole, waiting)
            ),
            tuple(tuple(turn.seconds for turn in turns) for turns in counted),
            tuple(tuple(turn.cpu for turn in turns) for turns in counted),
        )


class Padded:
    """The foundry's mixture in another size."""

    def __init__(self, shape: Shape) -> None:
        weights, self.config = mx.load(str(MIXTURE / "model.safetensors")), load_config(MIXTURE)
        assert isinstance(weights, dict)
        self._weights, self._shape, self._packing = weights, shape, self.config["quantization"]
        self._hidden, self._layers = self.config["hidden_size"], self.config["num_hidden_layers"]
        self._usual = {key: self._packing[key] for key in ("group_size", "bits")}
        self._experts = {"group_size": self._packing["group_size"], "bits": 4}
        self.config |= {
            "hidden_size": shape.hidden,
            "moe_intermediate_size": shape.inner,
            "num_hidden_layers": self._layers * shape.repeats,
            "num_experts": self.config["num_experts"] * shape.copies,
        }
        names = [f"model.layers.{n}.mlp.switch_mlp.{part}" for n in range(self.layers) for part in EXPERT_PARTS]
        self.config["quantization"] = self._usual | dict.fromkeys(names, self._experts)

    @property
    def layers(self) -> int:
        return self._layers * self._shape.repeats

    def write(self, folder: Path) -> None:
        """A file for the experts of each layer, and one for all else of it."""
        for number in range(self._layers):
            experts = self._expert_arrays(number)
            for layer in range(number, self.layers, self._layers):
                self._write_experts(folder / f"model-experts-{layer:05}.safetensors", layer, experts)
        parts = {f"{number:05}": self._layer(number) for number in range(self.layers)}
        parts["rest"] = self._packed("model.embed_tokens", self._plain("model.embed_tokens")) | {
            "model.norm.weight": self._norm("model.norm")
        }
        for name, weights in parts.items():
            mx.save_safetensors(str(folder / f"model-{name}.safetensors"), weights, {"format": "mlx"})
        (folder / "config.json").write_text(json.dumps(self.config))
        for file in ("tokenizer.json", LAST_WRITTEN):
            shutil.copyfile(MIXTURE / file, folder / file)
        os.sync()  # pages that were not written yet cannot be dropped

    def _expert_arrays(self, number: int) -> dict[tuple[str, str], mx.array]:
        """Of a layer of the foundry's, by projection and name."""
        hidden, inner, made = self._shape.hidden, self._shape.inner, dict[tuple[str, str], mx.array]()
        for part in EXPERT_PARTS:
            path, sizes = self._experts_at(number, part), (hidden, inner) if part == "down_proj" else (inner, hidden)
            packed = self._packed(path, self._plain(path), *sizes)
            made |= {(part, name.rpartition(".")[2]): array for name, array in packed.items()}
        mx.eval(list(made.values()))
        return made

    def _write_experts(self, file: Path, layer: int, arrays: dict[tuple[str, str], mx.array]) -> None:
        """Copies of an expert are the same."""
        form = [(part, name, array.dtype, array.shape[1:]) for (part, name), array in arrays.items()]
        held = [np.array(array.view(mx.uint8)).reshape(array.shape[0], -1) for array in arrays.values()]

        def fill(expert: int, parts: Sequence[memoryview]) -> None:
            for own, into in zip(held, parts, strict=True):
                into[:] = own[expert % len(own)].data

        path = self._experts_at(layer, "").removesuffix(".")
        write_record_file(file, path, self.config["num_experts"], form, fill)

    @staticmethod
    def _experts_at(layer: int, part: str) -> str:
        return f"model.layers.{layer}.mlp.switch_mlp.{part}"

    def _layer(self, number: int) -> dict[str, mx.array]:
        own, hidden = f"model.layers.{number % self._layers}", self._shape.hidden
        made = {f"{own}.{name}.weight": self._norm(f"{own}.{name}") for name in NORMS}
        made |= {f"{own}.self_attn.{name}.weight": self._plain(f"{own}.self_attn.{name}") for name in HEAD_NORMS}
        for name in ("q_proj", "k_proj", "v_proj"):
            made |= self._packed(f"{own}.self_attn.{name}", self._plain(f"{own}.self_attn.{name}"))
        output = self._plain(f"{own}.self_attn.o_proj")
        made |= self._packed(f"{own}.self_attn.o_proj", output, hidden, output.shape[1])
        made |= self._packed(f"{own}.mlp.gate", self._router(self._plain(f"{own}.mlp.gate"), number))
        return {name.replace(own, f"model.layers.{number}", 1): array for name, array in made.items()}

    def _router(self, trained: mx.array, number: int) -> mx.array:
        """With noise in the copies, so that they are chosen for other tokens."""
        count = (self._shape.copies - 1) * len(trained)
        if not count:
            return trained
        noise = mx.random.normal((count, trained.shape[1]), key=mx.random.key(number))
        copies = mx.concatenate([trained] * (self._shape.copies - 1))
        return mx.concatenate([trained, copies + NOISE * mx.sqrt(mx.mean(trained * trained)) * noise])

    def _plain(self, name: str) -> mx.array:
        weight = self._weights[f"{name}.weight"]
        if f"{name}.scales" not in self._weights:
            return weight
        form = self._packing.get(name, self._usual)
        return mx.dequantize(weight, self._weights[f"{name}.scales"], self._weights[f"{name}.biases"], **form)

    def _norm(self, name: str) -> mx.array:
        """Zeros in a state make the root of its mean square smaller."""
        return _padded(self._plain(name), self._shape.hidden) * (self._hidden / self._shape.hidden) ** 0.5

    def _packed(self, name: str, weight: mx.array, *sizes: int) -> dict[str, mx.array]:
        form = self._experts if "switch_mlp" in name else self._usual
        parts = mx.quantize(_padded(weight.astype(mx.bfloat16), *(sizes or (self._shape.hidden,))), **form)
        return dict(zip((f"{name}.weight", f"{name}.scales", f"{name}.biases"), parts, strict=True))


def _padded(weight: mx.array, *sizes: int) -> mx.array:
    """With zeros, up to these last sizes."""
    more = [size - now for size, now in zip(sizes, weight.shape[-len(sizes) :], strict=True)]
    return mx.pad(weight, [(0, 0)] * (weight.ndim - len(sizes)) + [(0, count) for count in more])


def texts_for(folder: Path) -> Iterator[list[int]]:
    """Pieces of held-out text, again from the beginning at the end."""
    tokenizer = Tokenizer.load(folder)
    while True:
        for text in corpus.documents(held_out=True):
            for begin in range(0, len(text), PIECE):
                yield tokenizer.encode(text[begin : begin + PIECE], add_special=True)


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = _parser().parse_args(arguments)
    found = list[Figures]()
    for name in ("",) if chosen.model else chosen.shape.split(","):
        with _made(name, chosen) as folder:
            for gbps in chosen.disk_gbps or (None,):
                found += _measured(name or folder.name, folder, Disk(gbps), chosen)
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(each) for each in found], indent=1))
    return complain(found)


@contextmanager
def _made(name: str, chosen: argparse.Namespace) -> Iterator[Path]:
    """The folder of a model, or of a shape, which stays where somebody says where it is to be."""
    if chosen.model:
        yield chosen.model
        return
    with nullcontext(chosen.folder) if chosen.folder else tempfile.TemporaryDirectory() as made:
        folder = Path(made) / (f"{name}-tiny" if chosen.tiny else name)
        if not (folder / LAST_WRITTEN).exists():
            folder.mkdir(parents=True, exist_ok=True)
            began = time.monotonic()
            Padded((TINY if chosen.tiny else SHAPES)[name]).write(folder)
            size = sum(file.stat().st_size for file in checkpoint_files(folder))
            print(f"{name}: {size / 1e9:.3g} GB written in {time.monotonic() - began:.0f} s", file=sys.stderr)
        yield folder


def _measured(name: str, folder: Path, disk: Disk, chosen: argparse.Namespace) -> Iterator[Figures]:
    if chosen.host:
        for share in chosen.shares:
            print(host_line(name, Side(folder, share / 100, disk), next(texts_for(folder))), flush=True)
        return
    bench = Bench(name, folder, disk, texts_for(folder))
    for share in chosen.shares:
        for figures in bench.figures(
            share / 100, chosen.streams, chosen.prompt, chosen.output, chosen.prefill, chosen.rounds
        ):
            print(_line(figures, disk), flush=True)
            yield figures


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "bench.experts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="mixture,wide", help=f"separated by commas, of {', '.join(SHAPES)}")
    parser.add_argument("--model", type=Path, help="a model folder, instead of a shape")
    parser.add_argument("--shares", type=_numbers, default=(25.0, 50.0, 75.0), help="percent of the experts in memory")
    parser.add_argument("--streams", type=_counts, default=(1, 4))
    parser.add_argument("--disk-gbps", type=_numbers, help="slow reads down to these speeds (default: the disk itself)")
    parser.add_argument("--prompt", type=int, default=64, help="tokens before an answer")
    parser.add_argument("--output", type=int, default=24, help="tokens of an answer")
    parser.add_argument("--prefill", type=int, default=256, help="tokens of a prompt whose own speed is measured, or 0")
    parser.add_argument("--rounds", type=int, default=3, help="besides one to warm up")
    parser.add_argument("--folder", type=Path, help="where shapes are written to and stay (default: they do not stay)")
    parser.add_argument("--tiny", action="store_true", help="small experts and few layers: shows that all of it works")
    parser.add_argument("--host", action="store_true", help="what a layer costs the host when nothing is read")
    parser.add_argument("--json", type=Path)
    return parser


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


def _counts(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _line(figures: Figures, disk: Disk) -> str:
    return (
        f"{figures.shape}, {figures.share:.0%} of the experts, {figures.work}: {figures.tokens_per_second:.4g} tok/s, "
        f"{figures.of_all:.2f}x all in memory, {figures.over_waiting:.2f}x without overlap, "
        f"{figures.of_limit:.2f} of the limit; hits {figures.hits:.0%}, guessed {figures.guessed:.0%}, missed "
        f"{figures.missed:.0%}; {figures.megabytes_a_token:.3g} MB in {figures.reads_a_token:.3g} reads a token, "
        f"{figures.wasted:.0%} of it for nothing; waited {figures.waited:.0%} of the time; "
        f"disk {figures.disk_gbps:.2g} GB/s ({disk.words})" + ("" if figures.same else "  OTHER TOKENS")
    )


def complain(found: Sequence[Figures]) -> int:
    """Other tokens are an error. Goals that were missed are said."""
    for each in found:
        about = f"{each.shape}, {each.share:.0%}, {each.work}"
        if each.of_limit < OF_LIMIT:
            print(f"missed: {about}: {each.of_limit:.2f} of the limit, not {OF_LIMIT}")
        if each.work == ONE_STREAM and each.over_waiting < OVER_WAITING:
            print(f"missed: {about}: {each.over_waiting:.2f}x reading without overlap, not {OVER_WAITING}x")
        if not each.same:
            print(f"bench.experts: {about}: not all ways gave the same tokens", file=sys.stderr)
    return 0 if all(each.same for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
