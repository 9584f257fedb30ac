"""A model on this device: each lowered part beside mlx-lm's own module, all layers as one operation beside module by
module, and tokens a second beside mlx-lm's own loops. All of it on the same weights and the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx
import mlx.nn as nn

from ingot.cache.forward_batch import ForwardPart, Row
from ingot.kernels import measured
from ingot.kernels.device import Device
from ingot.measure.figures import Figure
from ingot.measure.subjects import largest_difference, times_in_turns, times_of
from ingot.models.adapter import ModelAdapter, load_model_adapter
from ingot.models.draft_heads.checkpoint import model_classes_for
from ingot.models.files.model_config import older_config_names
from ingot.models.layers.attention import MixedAttention
from ingot.models.layers.decode_graph import DecodeGraphs, decode_graphs_of
from ingot.models.layers.fused_layers import FusedLayers
from ingot.models.layers.layer_program import decoder_layers_of
from ingot.models.layers.mlp import GatedMLP, GroupedSwitchGLU, JoinedMLP
from ingot.models.layers.modules import measured_part, own_class
from ingot.models.layers.moe import JoinedMoe
from ingot.models.layers.recurrent import KernelRecurrence, NativeRecurrence
from ingot.upstream import import_upstream, load_config, load_model

PARTS, STEPS = "lowered parts of the model", "steps as one operation, beside module by module"
TOKENS_PER_SECOND = ("prefill, 1 stream", "decode, 1 stream", "decode, 8 streams")
STREAMS = 8
PROMPT, SHORT = 256, 8
"""Tokens of a prompt: of what prefill is measured by where there is time, and of the streams that decode."""
LEAST_TOKENS, MOST_TOKENS = 2, 32
"""That are decoded in a turn."""
MOST_TURNS = 5
LOWERED: tuple[tuple[type, str], ...] = (
    *((MixedAttention, "attention"), (JoinedMLP, "MLP"), (GatedMLP, "MLP"), (JoinedMoe, "MoE")),
    *((GroupedSwitchGLU, "experts"), (KernelRecurrence, "recurrent mixer"), (NativeRecurrence, "recurrent mixer")),
)
"""Classes of ours that stand for modules of mlx-lm's."""
Begin = Callable[[str], None]
T = TypeVar("T")


def planned_names() -> list[str]:
    """What will be measured of a model, before it is known which parts it has."""
    return [*TOKENS_PER_SECOND[:2], STEPS, PARTS, *TOKENS_PER_SECOND[2:]]


def model_figures(name: str, device: Device, deadline: float, begin: Begin) -> Iterator[Figure]:
    """Loads the model in a folder. What there is no time for has no figure."""
    folder = Path(name)
    begin("loading the model")
    try:
        adapter = load_model_adapter(folder, device)
    except Exception as error:  # from the code of a hundred families
        why = f"the model cannot be loaded: {_said(error)}"
        yield from (Figure(each, "model", note=why) for each in planned_names())
        return
    stock = _stock_model(folder, adapter)
    works: dict[str, Callable[[float], Iterator[Figure]]] = {
        **{each: partial(_tokens_per_second, each, adapter, stock) for each in TOKENS_PER_SECOND},
        STEPS: partial(_steps, adapter, folder),
        PARTS: partial(_parts, adapter, stock, folder),
    }
    for number, each in enumerate(planned_names()):  # last what may take longest, as a call cannot be broken off
        left = deadline - time.monotonic()
        if left <= 0:
            return
        begin(each)
        try:
            yield from works[each](time.monotonic() + left / (len(works) - number))
        except Exception as error:  # whatever another package does not do on this device
            yield Figure(each, "model", note=f"fails: {_said(error)}")


def _said(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _stock_model(folder: Path, adapter: ModelAdapter) -> Any:
    """mlx-lm's own, unchanged; or why there is none."""
    if 2 * adapter.weight_bytes > adapter.device.memory:
        return "the model does not fit in memory twice"
    try:
        stated = load_config(folder)
        classes = model_classes_for(folder, stated)
        model, _ = load_model(folder, model_config=older_config_names(stated), get_model_classes=classes)
        mx.eval(model.parameters())
        model.eval()
    except Exception as error:
        return f"mlx-lm cannot load the model: {_said(error)}"
    return model


# Tokens a second


class OurLoop:
    """A model behind its adapter, decoding greedily; each step is asked for while the one before runs."""

    def __init__(self, adapter: ModelAdapter, prompts: Sequence[Sequence[int]]) -> None:
        self._adapter, self._prompts = adapter, [mx.array([*prompt], mx.uint32) for prompt in prompts]
        self._states = adapter.new_batch_state()
        self._rows: list[Row] = []
        self._tokens = mx.zeros(len(prompts), mx.uint32)

    def prefill(self) -> None:
        for row in self._rows:
            self._states.leave(row)
        self._rows = [self._states.new() for _ in self._prompts]
        firsts = [self._filled(row, prompt) for row, prompt in zip(self._rows, self._prompts, strict=True)]
        self._tokens = mx.concatenate(firsts)
        mx.eval(self._tokens, self._states.pending())

    def _filled(self, row: Row, prompt: mx.array) -> mx.array:
        logits = self._adapter.run(self._states, prompt, [ForwardPart((row,), prompt.size)], [prompt.size - 1])
        return mx.argmax(logits, axis=-1).astype(mx.uint32)

    def decode(self, count: int) -> None:
        for _ in range(count):
            before, self._tokens = self._tokens, self._step()
            mx.async_eval(self._tokens, self._states.pending())
            before.tolist()
        mx.eval(self._tokens)

    def _step(self) -> mx.array:
        adapter, rows = self._adapter, self._rows
        groups = [tuple(rows)] if adapter.ragged or len(rows) == 1 else [(row,) for row in rows]
        made, begin = [], 0
        for group in groups:
            own = self._tokens[begin : begin + len(group)]
            begin += len(group)
            made.append(adapter.run(self._states, own, [ForwardPart(group, 1)]))
        return mx.argmax(mx.concatenate(made), axis=-1).astype(mx.uint32)


def _prompts(vocab: int, count: int, length: int) -> list[list[int]]:
    drawn = mx.random.randint(0, vocab - 1, (count, length), key=mx.random.key(count))
    prompts: list[list[int]] = drawn.tolist()  # type: ignore[assignment]
    return prompts


def _tokens_per_second(name: str, adapter: ModelAdapter, stock: Any, end: float) -> Iterator[Figure]:
    count, prefill, length = STREAMS if str(STREAMS) in name else 1, name.startswith("prefill"), SHORT
    note = stock if isinstance(stock, str) else None

    def sides(length: int) -> list[Callable[[int], float]]:
        prompts = _prompts(adapter.vocab, count, length)
        ours = _our_seconds(adapter, prompts, prefill)
        return [ours] if note is not None else [ours, _stock_seconds(stock, prompts, prefill)]

    both = sides(length)
    first = [_timed_result(partial(side, LEAST_TOKENS)) for side in both]
    share = max(0.0, end - time.monotonic()) / (len(both) * MOST_TURNS)
    tokens = [int(max(LEAST_TOKENS, min(MOST_TOKENS, LEAST_TOKENS * share / took))) for took, _ in first]
    if prefill and (longer := int(min(PROMPT, length * share / max(took for took, _ in first)))) > length:
        both, length = sides(longer), longer
    turns: list[tuple[float, ...]] = []
    began = time.monotonic()
    while len(turns) < MOST_TURNS and time.monotonic() + (time.monotonic() - began) / max(1, len(turns)) < end:
        turns.append(tuple(side(count) for side, count in zip(both, tokens, strict=True)))
    if not turns:  # even the first ones took all of the time
        turns.append(tuple(each for _, each in first))
    size = length if prefill else 1
    if note is not None:
        yield _speed(name, median(each for (each,) in turns), None, count, size, note)
        return
    times = times_of([(ours, mlx) for ours, mlx in turns])
    note = f"{length} tokens" if prefill else None
    figure = _speed(name, times.ours, times.mlx, count, size, note)
    yield replace(figure, ratio=round(times.ratio, 3), turns=times.turns)


def _timed_result(work: Callable[[], T]) -> tuple[float, T]:
    """Seconds that it took, and what it returned."""
    began = time.perf_counter()
    found = work()
    return max(time.perf_counter() - began, 1e-6), found


def _speed(name: str, ours: float, mlx: float | None, streams: int, tokens: int, note: str | None = None) -> Figure:
    """Of seconds that a step or a prompt takes."""
    speeds = [None if each is None else round(streams * tokens / each, 2) for each in (ours, mlx)]
    return Figure(name, "model", ours=speeds[0], mlx=speeds[1], unit="tokens/s", note=note)


def _our_seconds(adapter: ModelAdapter, prompts: Sequence[Sequence[int]], prefill: bool) -> Callable[[int], float]:
    """Seconds of a prompt, or of one of so many steps."""
    loop = OurLoop(adapter, prompts)

    def seconds(tokens: int) -> float:
        if prefill:
            return _timed_result(loop.prefill)[0]
        loop.prefill()
        return _timed_result(lambda: loop.decode(tokens))[0] / tokens

    return seconds


def _stock_seconds(stock: Any, prompts: Sequence[list[int]], prefill: bool) -> Callable[[int], float]:
    """The same by mlx-lm's `generate_step`, or its `BatchGenerator` for several."""
    loops = import_upstream("mlx_lm.generate")

    def alone(tokens: int) -> float:
        began = time.perf_counter()
        first = began
        count = 1 if prefill else tokens + 1
        for number, _ in enumerate(loops.generate_step(mx.array(prompts[0]), stock, max_tokens=count)):
            if number == 0:
                first = time.perf_counter()
        return first - began if prefill else (time.perf_counter() - first) / tokens

    def together(tokens: int) -> float:
        generator = loops.BatchGenerator(stock, max_tokens=tokens + 2, completion_batch_size=len(prompts))
        generator.insert([*prompts])
        steps, began, ended = 0, 0.0, 0.0
        while responses := generator.next_generated():
            if any(response.finish_reason is not None for response in responses):
                break
            if len(responses) == len(prompts):
                began = began or time.perf_counter()
                steps, ended = steps + 1, time.perf_counter()
        generator.close()
        return (ended - began) / max(1, steps - 1)

    return alone if len(prompts) == 1 else together


# All layers as one operation


def _steps(adapter: ModelAdapter, folder: Path, end: float) -> Iterator[Figure]:
    """Decode steps of one stream and of several, with the layers as one operation and module by module."""
    found = _as_one_operation(adapter)
    if found is None:
        yield Figure(STEPS, "model", note="its layers are not one operation here")
        return
    part = measured.steps_part(adapter.family, len(decoder_layers_of(adapter.model)), found)
    with _module_by_module(adapter, folder) as apart:
        if isinstance(apart, str):
            yield Figure(STEPS, "model", note=apart)
            return
        for count in (1, STREAMS):
            whole, alone = (OurLoop(each, _prompts(adapter.vocab, count, SHORT)) for each in (adapter, apart))
            turns: list[tuple[float, float]] = []
            while len(turns) < 1 or (len(turns) < MOST_TURNS and time.monotonic() < end):
                turns.append((_step_seconds(whole), _step_seconds(alone)))
            times = times_of(turns)
            name = STEPS if count == 1 else f"{STEPS}, {count} streams"
            figure = _speed(name, times.ours, times.mlx, count, 1, found)
            yield replace(figure, part=part, ratio=round(times.ratio, 3), turns=times.turns)


def _step_seconds(loop: OurLoop) -> float:
    """Of one of a few, behind those at which graphs are compared."""
    loop.prefill()
    loop.decode(6)
    return _timed_result(lambda: loop.decode(8))[0] / 8


def _as_one_operation(adapter: ModelAdapter) -> str | None:
    stack = decode_graphs_of(adapter.model)
    if stack is not None and stack.refusal is None:
        return measured.WHOLE_LAYERS["cuda"]
    if adapter.steps is not None and adapter.steps.refusal is None:
        return measured.COMPILED_STEPS
    if any(isinstance(module, FusedLayers) for module in adapter.model.modules()):
        return measured.WHOLE_LAYERS["cpu"]
    return None


@contextmanager
def _module_by_module(adapter: ModelAdapter, folder: Path) -> Iterator[ModelAdapter | str]:
    """The same model whose layers are computed by their own modules."""
    stack = decode_graphs_of(adapter.model)
    if stack is not None:
        yield replace(adapter, model=_Ungraphed(adapter.model, stack))
    elif adapter.steps is not None:
        yield replace(adapter, steps=None)
    elif 2 * adapter.weight_bytes > adapter.device.memory:
        yield "the model does not fit in memory twice"
    else:
        yield load_model_adapter(folder, adapter.device, apart=True)


class _Ungraphed:
    """A model that is called without its graphs."""

    def __init__(self, model: Any, stack: DecodeGraphs) -> None:
        self._model, self._stack = model, stack

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        before, self._stack.refusal = self._stack.refusal, "measured without graphs"
        try:
            return self._model(*args, **options)
        finally:
            self._stack.refusal = before


# Lowered parts


class _Call(NamedTuple):
    """What a module was called with, and what it gave."""

    args: tuple[Any, ...]
    options: dict[str, Any]
    output: mx.array


def _parts(adapter: ModelAdapter, stock: Any, folder: Path, end: float) -> Iterator[Figure]:
    """One module of each class and shape, called as the model calls it: with one token, and with prompts."""
    if isinstance(stock, str):
        yield Figure(PARTS, "model", note=stock)
        return
    alone = _as_one_operation(adapter) is None
    with _module_by_module(adapter, folder) as apart:
        if isinstance(apart, str):
            yield Figure(PARTS, "model", note=apart)
            return
        theirs = dict(stock.named_modules())
        found = {path: each for path, each in _lowered(apart.model).items() if path in theirs}
        missing = list[str]()
        took = 0.0
        for width in (1, SHORT, PROMPT):
            began = time.monotonic()
            if began + took * width / SHORT < end:
                modules = [(kind, module, theirs[path]) for path, (kind, module) in found.items()]
                for figure in _compared(apart, stock, modules, width, end, alone=alone):
                    took = took or time.monotonic() - began  # most of it is the pass before the first
                    yield figure
            else:
                missing.append(f"{width} tokens")
    note = ", ".join(kind for kind, _ in found.values()) or "mlx-lm's own modules compute all of it"
    yield Figure(PARTS, "model", note=f"{note}; no time for {' and '.join(missing)}" if missing else note)


def _lowered(model: nn.Module) -> dict[str, tuple[str, nn.Module]]:
    """By path, the kind and the first module of each class and shape."""
    found: dict[object, tuple[str, str, nn.Module]] = {}
    for path, module in model.named_modules():
        kind = next((name for each, name in LOWERED if isinstance(module, each)), None)
        if kind is not None:
            found.setdefault((kind, measured_part(kind, module)), (path, kind, module))
    return {path: (kind, module) for path, kind, module in found.values()}


def _compared(
    adapter: ModelAdapter,
    stock: Any,
    modules: Sequence[tuple[str, nn.Module, nn.Module]],
    width: int,
    end: float,
    *,
    alone: bool,
) -> Iterator[Figure]:
    """Of a pass over so many tokens, behind a prompt where it is one token. `alone`: these modules run in steps, which
    are not one operation, so that slower ones can be left out."""
    states, caches = adapter.new_batch_state(), import_upstream("mlx_lm.models.cache").make_prompt_cache(stock)
    row, tokens = states.new(), mx.array(_prompts(adapter.vocab, 1, width), mx.uint32)
    if width == 1:
        before = mx.array(_prompts(adapter.vocab, 1, SHORT), mx.uint32)
        mx.eval(adapter.run(states, before, [ForwardPart((row,), SHORT)], [SHORT - 1]), states.pending())
        mx.eval(stock(before, cache=caches))
    with states.launch([ForwardPart((row,), width)], mixed=adapter.mixed) as layers:
        mine = _noted([module for _, module, _ in modules], lambda: adapter.model(tokens, cache=layers))
        theirs = _noted([module for _, _, module in modules], lambda: stock(tokens, cache=caches))
        for number, (kind, module, other) in enumerate(modules):
            one, two = mine.get(number), theirs.get(number)
            name = f"{kind} ({own_class(module).__name__}), {width} tokens"
            if one is None or two is None:
                yield Figure(name, "model", note="the model did not call it")
                continue
            off = largest_difference(one.output, two.output)
            seconds = max(0.0, end - time.monotonic()) / (2 * len(modules))
            again = partial(_again, module, one, 0), partial(_again, other, two, width)
            times, right = times_in_turns(*again, seconds=seconds), off <= MOST_OFF
            yield Figure(
                name,
                "model",
                measured_part(kind, module) if alone else None,
                right,
                None if right else f"differs from mlx-lm's by {off:.2g} of the largest number",
                round(off, 6),
                round(times.ours * 1e6, 2),
                round(times.mlx * 1e6, 2),
                ratio=round(times.ratio, 3),
                turns=times.turns,
            )


MOST_OFF = 0.1
"""Of modules behind others, in another number format."""


def _noted(modules: Sequence[nn.Module], run: Callable[[], mx.array]) -> dict[int, _Call]:
    """The first call of each module, by its number, while something runs."""
    calls: dict[int, _Call] = {}
    with ExitStack() as stack:
        for number, module in enumerate(modules):
            stack.enter_context(_noting(module, partial(calls.setdefault, number)))
        mx.eval(run(), [call.output for call in calls.values()])
    return calls


@contextmanager
def _noting(module: nn.Module, note: Callable[[_Call], object]) -> Iterator[None]:
    """While this is open, the module notes its calls. It stays the same object, as others hold it, too."""

    class Noting:
        def __call__(self, *args: Any, **options: Any) -> Any:
            output = super().__call__(*args, **options)  # type: ignore[misc]
            note(_Call(args, options, output[0] if isinstance(output, tuple) else output))
            return output

    kind: Any = type(module)
    module.__class__ = type(kind.__name__, (Noting, kind), {})
    try:
        yield
    finally:
        module.__class__ = kind


def _again(module: Any, call: _Call, trimmed: int) -> mx.array:
    """The same call once more. mlx-lm's caches forget the `trimmed` tokens that it stored."""
    output = module(*call.args, **call.options)
    for value in (*call.args, *call.options.values()) if trimmed else ():
        if not isinstance(value, mx.array) and hasattr(value, "is_trimmable") and value.is_trimmable():
            value.trim(trimmed)
    found: mx.array = output[0] if isinstance(output, tuple) else output
    return found
