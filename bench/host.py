"""What a decode step costs the host by Metal's rules, on any machine: the operations that MLX is asked for, and its
thread's time to ask for them. On a Mac that is often all that a step takes. Nothing is computed within the clock.

python -m bench.host
python -m bench.host --families llama,qwen3 --steps 200
python -m bench.host --families llama --profile

Ours is a pass of `ModelAdapter.run` and the runner's sampling; mlx-lm's are the steps of `generate_step`, for one row,
and of its `GenerationBatch`, for several, on the same weights. Steps of both alternate. The models are narrow and have
few layers, but those of each kind in their real proportion.

MLX lets Metal kernels be asked for without Metal while a function is exported, so all steps are inside of one that
is: a launch then costs what it costs on a Mac. MLX's own norms, rotations and attention, which it takes apart where
there is no GPU, are one operation each. States are put back behind each step, since nothing gives them new contents.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
from mlx.utils import tree_flatten

from bench.family_shapes import FAMILIES, random_model
from ingot.cache.attention_state import AppendState
from ingot.cache.forward_batch import ForwardPart, Row
from ingot.cache.kv_storage import KernelStorage, SlabStorage
from ingot.cache.layer_state import RecurrentState
from ingot.engine.request import Request, Sampling
from ingot.engine.sampling import Sampler, draft_positions
from ingot.engine.sequence import TokenSequence
from ingot.kernels.device import Device
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.launcher import MlxLauncher, kernel_launcher
from ingot.models import forward
from ingot.models.adapter import ModelAdapter, adapt_model
from ingot.models.forward import CompiledSteps
from ingot.upstream import import_upstream

METAL = Device("metal", "Metal, pretended", 1 << 34)
LENGTHS: dict[int, tuple[int, ...]] = {1: (700,), 8: tuple(600 + 37 * number for number in range(8))}
"""The tokens of each row, by the number of rows."""
WARM_UPS = 3
"""Steps after which what is learned of them is learned."""
FUSED_HEADS = (64, 96, 128, 192, 256)
"""Sizes of heads for which MLX's attention of one query is one operation on Metal."""


@dataclass(frozen=True, slots=True)
class Side:
    operations: int
    microseconds: float


@dataclass(frozen=True, slots=True)
class Figures:
    family: str
    rows: int
    ours: Side
    stock: Side

    @property
    def operations(self) -> float:
        return self.ours.operations / self.stock.operations

    @property
    def time(self) -> float:
        return self.ours.microseconds / self.stock.microseconds


# Metal, as far as asking for operations goes


def _one_operation(x: mx.array, *others: Any) -> mx.array:
    """An array like `x` that a single operation gives."""
    y: mx.array = mx.depends(x, [other for other in others if isinstance(other, mx.array)])
    return y


def _rms_norm(x: mx.array, weight: mx.array | None, eps: float, **_: Any) -> mx.array:
    return _one_operation(x, weight)


def _layer_norm(x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float, **_: Any) -> mx.array:
    return _one_operation(x, weight, bias)


def _rope(x: mx.array, dims: int, *, offset: Any, freqs: mx.array | None = None, **_: Any) -> mx.array:
    return _one_operation(x, offset, freqs)


_unfused_attention = mx.fast.scaled_dot_product_attention


def _attention(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
    size = q.shape[-1]
    if size not in FUSED_HEADS or v.shape[-1] != size or q.shape[2] * q.shape[1] > 32 * k.shape[1]:
        attended: mx.array = _unfused_attention(q, k, v, **options)
        return attended
    return _one_operation(q, k, v, options.get("mask"), options.get("sinks"))


class _Done(Exception):
    """Nothing is to be exported."""


@contextmanager
def _metal_rules() -> Iterator[None]:
    """While this is open, models and kernels take the ways that they take on Metal, without running."""
    emulator = kernel_launcher(METAL)
    assert isinstance(emulator, Emulator), "this machine has a GPU"
    launcher = MlxLauncher("metal")
    with ExitStack() as stack:
        stack.enter_context(patch.object(Emulator, "__call__", MlxLauncher.__call__))
        stack.enter_context(patch.object(Emulator, "_compiled", MlxLauncher._compiled, create=True))
        stack.enter_context(patch.dict(vars(emulator), vars(launcher)))
        for name, stand_in in _STAND_INS.items():
            stack.enter_context(patch.object(mx.fast, name, stand_in))
        stack.enter_context(patch.object(forward, "STEP_TRIALS", 0))  # there is nothing to compare
        stack.enter_context(patch.object(mx.metal, "is_available", lambda: True))
        gpu = mx.Device(mx.gpu)
        stack.enter_context(patch.object(mx, "default_device", lambda: gpu))
        for module, name, make in _upstream_kernels():
            stack.enter_context(patch.object(module, name, make()))
        yield


_STAND_INS: dict[str, Callable[..., mx.array]] = {
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "rope": _rope,
    "scaled_dot_product_attention": _attention,
}


def _upstream_kernels() -> list[tuple[Any, str, Callable[[], Any]]]:
    """Kernels that mlx-lm makes when it is imported, where there is Metal."""
    delta, ssm = (import_upstream(f"mlx_lm.models.{name}") for name in ("gated_delta", "ssm"))
    return [
        (delta, "_gated_delta_kernel", delta._make_gated_delta_kernel),
        (delta, "_gated_delta_kernel_vec", partial(delta._make_gated_delta_kernel, vectorized=True)),
        (delta, "_gated_delta_kernel_packed", delta._make_gated_delta_packed_kernel),
        (ssm, "_ssm_kernel", ssm.make_ssm_kernel),
    ]


def as_on_metal(work: Callable[[], None]) -> None:
    """Do some work that asks for operations, Metal kernels among them, and evaluates none of them."""

    def exported(_: mx.array) -> mx.array:
        with _metal_rules():
            work()
        raise _Done

    with tempfile.TemporaryDirectory() as folder:
        try:
            mx.export_function(str(Path(folder) / "nothing.mlxfn"), exported, mx.zeros(1))
        except _Done:
            return
    raise AssertionError("the work was not done")


# One step


class OurSteps:
    def __init__(self, adapter: ModelAdapter, lengths: Sequence[int]) -> None:
        self._adapter, self._states = adapter, adapter.new_batch_state()
        self._sampler, self._rows = Sampler(adapter.vocab), [self._states.new() for _ in lengths]
        for row, length in zip(self._rows, lengths, strict=True):
            self._fill(row, length)
        sequences = [_greedy_sequence(number) for number in range(len(lengths))]
        self._positions = tuple(position for each in sequences for position in draft_positions(each, ()))
        self._tokens = mx.zeros(len(lengths), mx.uint32)
        mx.eval(self._tokens, self._states.pending())

    def _fill(self, row: Row, length: int) -> None:
        """A few tokens are computed, since storage and states are made then; then it only gets longer."""
        mx.eval(self._adapter.run(self._states, mx.arange(3), [ForwardPart((row,), 3)]), self._states.pending())
        with self._states.launch([ForwardPart((row,), length - 3)]):
            pass

    def __call__(self) -> list[mx.array]:
        """What the runner does for a step that decodes: what has to be evaluated."""
        logits = self._adapter.run(self._states, self._tokens, [ForwardPart(tuple(self._rows), 1)], None)
        sampled = self._sampler.sample(logits[-len(self._positions) :], self._positions, lambda: None)
        return [*sampled.arrays(), *self._states.pending()]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Puts evaluated arrays back behind a step."""
        kept = [(state, _kept(state)) for state in self._states.states]
        yield
        for state, before in kept:
            _put_back(state, before)


def _greedy_sequence(number: int) -> TokenSequence:
    request = Request(f"host-{number}", ((1, 2, 3),), max_tokens=1 << 16, sampling=Sampling(temperature=0.0))
    return TokenSequence(request, 0, number, (1, 2, 3), limit=1 << 16, seed=number)


def _kept(state: Any) -> Any:
    if isinstance(state, RecurrentState):
        return _same(state.cache)
    storage = state.storage if isinstance(state, AppendState) else None
    if isinstance(storage, KernelStorage):
        return storage.token
    return None if not isinstance(storage, SlabStorage) else (_same(storage.keys), _same(storage.values))


def _put_back(state: Any, before: Any) -> None:
    if isinstance(state, RecurrentState):
        state.cache = before
    elif isinstance(state.storage, KernelStorage):
        state.storage.go_on(before)
    elif isinstance(state.storage, SlabStorage):
        state.storage.keys, state.storage.values = before


class StockSteps:
    def __init__(self, model: Any, lengths: Sequence[int]) -> None:
        self._model, self._several = model, len(lengths) > 1
        loops = import_upstream("mlx_lm.generate")
        caches = [self._filled(length) for length in lengths]
        self._cache = loops._merge_caches(caches) if self._several else caches[0]
        self._stream, self._sampler = loops.generation_stream, loops.greedy_sampler
        self._tokens = mx.zeros(len(lengths), mx.uint32)
        for _ in range(2):  # caches of windows are put in order
            mx.eval(self(), [value for cache in self._cache for value in _arrays(cache)])

    def _filled(self, length: int) -> list[Any]:
        caches = import_upstream("mlx_lm.models.cache").make_prompt_cache(self._model)
        mx.eval(self._model(mx.arange(3)[None], cache=caches))
        for cache in caches:
            for part in getattr(cache, "caches", [cache]):
                if getattr(part, "keys", None) is not None:
                    more = [mx.zeros((*x.shape[:2], length - 3, x.shape[3]), x.dtype) for x in (part.keys, part.values)]
                    mx.eval(part.update_and_fetch(*more))
        return list(caches)

    def __call__(self) -> list[mx.array]:
        """What its loops do for a step: what they evaluate."""
        return self._together() if self._several else self._alone()

    def _alone(self) -> list[mx.array]:
        with mx.stream(self._stream):
            logits = self._model(self._tokens[None], cache=self._cache)
            logits = logits[:, -1, :]
            logprobs = logits - mx.logsumexp(logits, keepdims=True)
            return [self._sampler(logprobs), logprobs.squeeze(0)]

    def _together(self) -> list[mx.array]:
        with mx.stream(self._stream):
            logits = self._model(self._tokens[:, None], cache=self._cache)
            logits = logits[:, -1, :]
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            return [self._sampler(logprobs), *logprobs]

    @contextmanager
    def restored(self) -> Iterator[None]:
        kept = [_same(cache) for cache in self._cache]
        yield
        self._cache = kept


def _same(value: Any) -> Any:
    """The same arrays as objects of their own, which are not changed where the others are written to."""
    if isinstance(value, mx.array):
        return copy(value)
    if isinstance(value, list):
        return [_same(each) for each in value]
    if type(value).__module__.endswith("models.cache"):
        made = object.__new__(type(value))
        made.__dict__.update({name: _same(each) for name, each in vars(value).items()})
        return made
    return value


def _arrays(cache: Any) -> list[mx.array]:
    values = [value for each in getattr(cache, "caches", [cache]) for value in vars(each).values()]
    flat = [each for value in values for each in (value if isinstance(value, list) else [value])]
    return [value for value in flat if isinstance(value, mx.array)]


# Figures


def counted(outputs: list[mx.array]) -> Counter[str]:
    """The operations that give these arrays, by name."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "graph.dot"
        mx.export_to_dot(str(file), *outputs)
        return Counter(re.findall(r'label ="(\w+)"', file.read_text()))


VIEWS = {
    "Broadcast",
    "ExpandDims",
    "Flatten",
    "Full",
    "Reshape",
    "Slice",
    "Squeeze",
    "StopGradient",
    "Transpose",
    "View",
}


class HostWork:
    """Counts what steps ask MLX for: operations that are more than another view of an array, launches of our kernels,
    evaluations, and waits for one."""

    def __init__(self) -> None:
        self.counts, self._inside = Counter[str](), False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Within, time means nothing."""
        with ExitStack() as stack:
            for owner, name in ((mx, "eval"), (mx, "async_eval"), (Emulator, "__call__")):
                own = getattr(owner, name)
                stack.enter_context(patch.object(owner, name, self._counting(own, owner is Emulator)))
            yield

    def _counting(self, own: Callable[..., Any], is_launch: bool) -> Callable[..., Any]:
        waiting = mx.eval

        def call(*given: Any) -> Any:
            if self._inside:  # of what stands in for a GPU
                return own(*given)
            self._inside = True
            pending = [each for _, each in tree_flatten([*given[2:3]] if is_launch else [*given]) if each is not None]
            found = counted(pending) if pending else Counter[str]()
            self.counts["operations"] += sum(number for name, number in found.items() if name not in VIEWS)
            self.counts["launches"] += is_launch
            self.counts["evaluations"] += bool(found) and not is_launch
            self.counts["waits"] += own is waiting
            made = own(*given)
            if is_launch:
                mx.eval(pending, made)
            self._inside = False
            return made

        return call


def operations_of(side: OurSteps | StockSteps) -> Counter[str]:
    """Those of one step."""
    found: list[Counter[str]] = []

    def count() -> None:
        for _ in range(WARM_UPS):
            with side.restored():
                side()
        with side.restored():
            found.append(counted(side()))

    as_on_metal(count)
    return found[0]


def as_compiled_there(adapter: ModelAdapter) -> ModelAdapter:
    """The same with compiled steps, which are not made where kernels run as soon as they are asked for."""
    return replace(adapter, steps=CompiledSteps(adapter.model))


class Host:
    """Both sides of one family."""

    def __init__(self, family: str) -> None:
        self.family = family
        config, model = random_model(family)
        self._stock = random_model(family)[1]
        self.adapter = as_compiled_there(adapt_model(model, config, METAL))

    def sides(self, rows: int) -> tuple[OurSteps, StockSteps]:
        return OurSteps(self.adapter, LENGTHS[rows]), StockSteps(self._stock, LENGTHS[rows])

    def operations(self, rows: int) -> tuple[Counter[str], Counter[str]]:
        """Those of a step of ours, and of mlx-lm's."""
        ours, stock = self.sides(rows)
        return operations_of(ours), operations_of(stock)

    def measured(self, rows: int, steps: int) -> Figures:
        operations = [sum(each.values()) for each in self.operations(rows)]
        sides, times = self.sides(rows), ([], [])  # type: ignore[var-annotated]
        as_on_metal(lambda: _alternate(sides, times, steps))
        ours, stock = (Side(*each) for each in zip(operations, map(_microseconds, times), strict=True))
        return Figures(self.family, rows, ours, stock)

    def profiled(self, rows: int, steps: int) -> pstats.Stats:
        """Where ours spends its time."""
        [side, _], profile = self.sides(rows), cProfile.Profile()

        def run() -> None:
            for number in range(WARM_UPS + steps):
                with side.restored():
                    if number >= WARM_UPS:
                        profile.enable()
                    made = side()
                    profile.disable()
                    del made

        as_on_metal(run)
        return pstats.Stats(profile)


def _alternate(sides: Sequence[OurSteps | StockSteps], times: Sequence[list[float]], steps: int) -> None:
    for number in range(WARM_UPS + steps):
        for side, own in zip(sides, times, strict=True):
            gc.collect(0)
            gc.disable()
            with side.restored():
                began = time.thread_time()
                made = side()
                spent = time.thread_time() - began
                del made
            gc.enable()
            if number >= WARM_UPS:
                own.append(spent)


def _microseconds(times: Sequence[float]) -> float:
    return 1e6 * statistics.median(times)


def table(figures: Sequence[Figures]) -> str:
    lines = ["| family | rows | operations | ratio | Python, us | ratio |", "|---|---|---|---|---|---|"]
    for each in figures:
        ours, stock = each.ours, each.stock
        lines.append(
            f"| {each.family} | {each.rows} | {ours.operations} / {stock.operations} | {each.operations:.2f} "
            f"| {ours.microseconds:.0f} / {stock.microseconds:.0f} | {each.time:.2f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.host", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", default=",".join(FAMILIES), help="some of these, with commas")
    parser.add_argument("--rows", default="1,8", help=f"of {', '.join(map(str, LENGTHS))}")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--profile", action="store_true", help="show where Python's time goes, and which operations")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    rows = [int(number) for number in chosen.rows.split(",")]
    found: list[Figures] = []
    for family in chosen.families.split(","):
        host = Host(family)
        for number in rows:
            if chosen.profile:
                _show_profile(host, number, chosen.steps)
            found.append(host.measured(number, chosen.steps))
            if (steps := host.adapter.steps) is not None and steps.refusal is not None:
                print(f"{family}: {steps.refusal}", file=sys.stderr)
            print(table(found[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    print(table(found))
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(each) for each in found], indent=1))
    return 0


def _show_profile(host: Host, rows: int, steps: int) -> None:
    for name, operations in zip(("ours", "mlx-lm"), host.operations(rows), strict=True):
        print(f"{name}: {', '.join(f'{count} {kind}' for kind, count in operations.most_common())}")
    host.profiled(rows, steps).sort_stats("cumtime").print_stats(60)


if __name__ == "__main__":
    sys.exit(main())
