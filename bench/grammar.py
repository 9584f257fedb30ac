"""What constrained decoding costs: the time for grammar masks as a share of decoding, on the default model.

python -m bench.grammar
python -m bench.grammar --streams 1,8 --tokens 64 --model FOLDER

And how many of the calls that a model begins by itself can be parsed, with and without the grammar for them:

python -m bench.grammar --calls 1000 --model FOLDER
python -m bench.grammar --calls 100 --model FOLDER --no-hold-calls
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench import servers
from ingot.cli.client import ServerClient
from ingot.config import DEFAULT_MODEL, Settings
from ingot.engine.engine import Engine
from ingot.engine.loading.language_model import start_engine
from ingot.engine.request import Ended, Failed, Request, Sampling, Stop
from ingot.models.files.packaged import ensure_packaged_model
from ingot.models.files.progress import no_progress
from ingot.text.grammar.grammars import Grammars
from ingot.text.grammar.matcher import CompiledGrammar, GrammarMatcher, TokenMask

_TEXT = {"type": "string"}
_PERSON = {
    "type": "object",
    "properties": {
        "name": _TEXT,
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "role": {"enum": ["admin", "user", "guest"]},
        "tags": {"type": "array", "items": _TEXT},
    },
    "required": ["name", "age", "email", "role", "tags"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "an object": {"type": "object"},
    "a person": _PERSON,
    "a list of people": {"type": "array", "items": _PERSON, "minItems": 20},
    "a long text": {"type": "string", "minLength": 2000},
}
QUESTION = "Tell me about some people that you know, in as much detail as you can, as JSON."


@dataclass
class Meter:
    """Seconds that guides took, token by token."""

    spent: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Timed:
    """A plan whose guides are timed."""

    plan: CompiledGrammar
    meter: Meter

    def begin(self) -> GrammarMatcher:
        return _TimedGuide(self.plan.begin(), self.meter)


class _TimedGuide:
    def __init__(self, matcher: GrammarMatcher, meter: Meter) -> None:
        self._matcher, self._meter = matcher, meter

    @property
    def free(self) -> bool:
        return self._matcher.free

    @property
    def done(self) -> bool:
        return self._matcher.done

    def mask(self) -> TokenMask | None:
        began = time.perf_counter()
        try:
            return self._matcher.mask()
        finally:
            self._meter.spent.append(time.perf_counter() - began)

    def accept(self, token: int) -> None:
        began = time.perf_counter()
        self._matcher.accept(token)
        self._meter.spent[-1] += time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class Figures:
    subject: str
    streams: int
    tokens: int
    step_ms: float  # between two tokens of a stream
    free_step_ms: float  # the same without a grammar
    mask_ms: float  # of all streams' masks, per step
    worst_ms: float
    apply_ms: float  # to apply them, per step

    @property
    def share(self) -> float:
        return (self.mask_ms + self.apply_ms) / self.free_step_ms


def start(model: str, memory: str) -> Engine:
    settings = Settings(memory=memory, context=2048)
    folder = ensure_packaged_model(model, settings, no_progress) if model == DEFAULT_MODEL else Path(model)
    return start_engine(settings, folder, name=Path(model).name, source=model)


def decode(engine: Engine, name: str, streams: int, tokens: int, plan: CompiledGrammar | None) -> tuple[float, int]:
    """Seconds of decoding, and the tokens of the longest answer."""
    template = engine.tokenizer.template
    text = template.render([{"role": "user", "content": QUESTION}]) if template else QUESTION
    prompt = tuple(engine.tokenizer.encode(text, add_special=template is None))
    ends = []
    opened = [
        engine.generate(
            Request(
                f"{name}-{number}",
                (prompt,),
                max_tokens=tokens,
                sampling=Sampling(temperature=0.7, seed=number),
                stop=Stop(ignore_eos=plan is None),
                grammar=plan,
            )
        )
        for number in range(streams)
    ]
    for stream in opened:
        last = [event for batch in stream for event in batch][-1]
        if isinstance(last, Failed):
            raise last.error
        assert isinstance(last, Ended)
        ends.append(last)
    return max(end.timing.decode for end in ends), max(end.usage.completion_tokens for end in ends)


def apply_seconds(vocab: int, rows: int, repeats: int = 30) -> float:
    """To apply masks to logits of that size, with nothing else to do; the median."""
    import mlx.core as mx
    import numpy as np

    from ingot.engine.sampling import apply_masks

    logits = mx.zeros((rows, vocab))
    masks = [np.full(vocab // 32 + 1, 0x5A5A5A5A, dtype=np.uint32)] * rows
    mx.eval(logits)
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        mx.eval(apply_masks(logits, masks))
        taken.append(time.perf_counter() - began)
    return sorted(taken)[repeats // 2]


def measure(engine: Engine, grammars: Grammars, streams: int, tokens: int) -> Iterator[Figures]:
    decode(engine, f"warm-{streams}", streams, 8, None)
    seconds, longest = decode(engine, f"free-{streams}", streams, tokens, None)
    free_step = seconds / max(1, longest - 1)
    for subject, schema in SCHEMAS.items():
        meter = Meter()
        plan = Timed(grammars.json_schema(schema), meter)
        seconds, longest = decode(engine, f"{subject}-{streams}", streams, tokens, plan)
        yield Figures(
            subject=subject,
            streams=streams,
            tokens=len(meter.spent),
            step_ms=1000 * seconds / max(1, longest - 1),
            free_step_ms=1000 * free_step,
            mask_ms=1000 * sum(meter.spent) / longest,
            worst_ms=1000 * max(meter.spent),
            apply_ms=1000 * apply_seconds(engine.card.vocab, streams),
        )


_CALLED = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 24},
            "unit": {"enum": ["celsius", "fahrenheit"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    "add": {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "minimum": -999, "maximum": 999},
            "b": {"type": "integer", "minimum": -999, "maximum": 999},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
_TOOLS = [{"type": "function", "function": {"name": name, "parameters": said}} for name, said in _CALLED.items()]
_PLACES = ("Paris", "Lima", "Oslo", "Quito", "Berlin", "Hanoi")


@dataclass
class Calls:
    """Of streamed answers to questions that call for a tool."""

    answers: int = 0
    calls: int = 0
    unparsable: int = 0  # arguments that are no JSON
    invalid: int = 0  # or not what the tool's schema says
    lost: int = 0  # answers with the marker that opens calls in their text
    cut: int = 0  # calls that the limit of tokens ended


def conversation(number: int) -> list[dict[str, Any]]:
    """A question, every other time behind past calls, as agents have them: some models only then call again."""
    said: list[dict[str, Any]] = []
    for past in range(3 * (number % 2)):
        place = _PLACES[(number + past) % len(_PLACES)]
        call = {"name": "get_weather", "arguments": f'{{"city": "{place}", "unit": "celsius"}}'}
        said += [
            {"role": "user", "content": f"What is the weather in {place}?"},
            {"role": "assistant", "tool_calls": [{"id": f"call_{past}", "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": f"call_{past}", "content": '{"sky": "clear"}'},
            {"role": "assistant", "content": "It is clear."},
        ]
    return [*said, {"role": "user", "content": f"What is the weather in {_PLACES[(number + 4) % len(_PLACES)]}?"}]


def ask(client: ServerClient, number: int, tokens: int, found: Calls) -> None:
    import jsonschema

    body = {
        "model": "default",
        "messages": conversation(number),
        "tools": _TOOLS,
        "temperature": 1.4,
        "top_p": 1.0,
        "top_k": 0,
        "seed": number,
        "enable_thinking": False,
        "max_tokens": tokens,
        "stream": True,
    }
    calls: dict[int, list[str]] = {}
    text, reason = "", None
    for chunk in client.stream("/v1/chat/completions", body):
        for choice in chunk.data["choices"]:
            reason = choice["finish_reason"] or reason
            text += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls") or ():
                said = calls.setdefault(call["index"], ["", ""])
                said[0] += call["function"].get("name") or ""
                said[1] += call["function"].get("arguments") or ""
    found.answers += 1
    found.lost += "<tool_call>" in text
    for place, (name, arguments) in calls.items():
        if reason == "length" and place == len(calls) - 1:
            found.cut += 1
            continue
        found.calls += 1
        try:
            jsonschema.validate(json.loads(arguments), _CALLED[name])
        except ValueError:
            found.unparsable += 1
        except (KeyError, jsonschema.ValidationError):
            found.invalid += 1


def count_calls(model: str, wanted: int, streams: int, tokens: int, *, hold: bool) -> Calls:
    """Ask until so many calls were made."""
    found = Calls()
    flags = ["--context", "1024"] + ([] if hold else ["--no-hold-calls"])
    numbers = iter(range(100 * wanted))
    with tempfile.TemporaryDirectory() as folder:
        weights = None if model == DEFAULT_MODEL else Path(model)
        with servers.ingot(weights, Path(folder) / "log", streams, own_kernels=True, flags=flags) as running:

            def work() -> None:
                while found.calls < wanted and (number := next(numbers, None)) is not None:
                    ask(running.client, number, tokens, found)

            with ThreadPoolExecutor(streams) as workers:
                for each in [workers.submit(work) for _ in range(streams)]:
                    each.result()
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.grammar", description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the default model, or a folder")
    parser.add_argument("--memory", default="3GB")
    parser.add_argument("--streams", default="1,8", help="how many at once, separated by commas")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--calls", type=int, help="count this many calls instead, and those that cannot be parsed")
    parser.add_argument("--hold-calls", action=argparse.BooleanOptionalAction, default=True)
    given = parser.parse_args(arguments)
    if given.calls is not None:
        if importlib.util.find_spec("jsonschema") is None:
            parser.error("--calls checks what was called with jsonschema, which `make bench` installs")
        found = count_calls(given.model, given.calls, 8, given.tokens, hold=given.hold_calls)
        print(", ".join(f"{name} {count}" for name, count in asdict(found).items()))
        return int(given.hold_calls and found.unparsable + found.invalid + found.lost > 0)
    engine = start(given.model, given.memory)
    grammars = Grammars(engine.tokenizer, engine.card.vocab)
    grammars.prepare()
    print(f"{'subject':>18} streams tokens   step ms  free step  masks ms  worst ms  apply ms   share")
    try:
        for streams in map(int, given.streams.split(",")):
            for row in measure(engine, grammars, streams, given.tokens):
                print(
                    f"{row.subject:>18} {row.streams:7} {row.tokens:6} {row.step_ms:9.2f} {row.free_step_ms:10.2f} "
                    f"{row.mask_ms:9.3f} {row.worst_ms:9.3f} {row.apply_ms:9.3f} {row.share:7.1%}",
                    flush=True,
                )
    finally:
        grammars.close()
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
