"""What servers are compared by, one function for each kind of work, as users have it.

A work is a generator: each step of it does a part of the work on one server and yields its figures by name. The
comparison lets servers take turns step by step, so that whatever else the machine does meets both. A work raises
NotSupported where a server, or the model, cannot do it, and ServerError where the server should have.
"""

from __future__ import annotations

import base64
import json
import random
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, Final, Self

from ingot.cli.bench import (
    ENDPOINT_PATHS,
    LoadLevel,
    LoadPlan,
    LoadTarget,
    RequestSample,
    measure_request,
    request_body,
    run_concurrently,
    run_level,
)
from ingot.cli.client import ServerError
from ingot.cli.peers.models import Traits
from ingot.cli.peers.processes import MemoryWatch, Server, tree_bytes
from ingot.cli.peers.session import Course, Heard, Player, Session, listen, prose, tools

Figures = dict[str, float | None]
"""What a step found, by figure; None where the server does not say."""
PROBE_PAUSE_S: Final = 0.05
CALLED_TOOLS: Final = 6
TOKENS_OF_A_TOOL: Final = 300
"""At most, and its share of the answer, by the foundry's tokenizer, whose tokens are short."""
BESIDE_STREAMS: Final = 2
FEW_TOKENS: Final = 8
"""Of an answer of which only the first token counts, which may have no text."""
STREAM_WORDS: Final = 8
STREAM_TOKENS: Final = 4
"""That come of a stream before a prompt is sent beside it."""
REFUSED: Final = ("(HTTP 429)", "(HTTP 503)")


class NotSupported(Exception):
    """The server or the model cannot do this; its message says which."""


@dataclass(frozen=True)
class Load:
    """How much of each work is done. Tokens are about so many, and never more than the model's context allows."""

    traits: Traits
    rounds: int = 3
    streams: tuple[int, ...] = (1, 8, 16, 32)
    prompt_tokens: int = 192
    output_tokens: int = 64
    turns: int = 10
    opening: int = 10_000
    session_tokens: int = 16_000
    long_prompt: int = 20_000
    questions: int = 4
    answers: int = 6
    words: int = 150  # that make a prompt of `prompt_tokens`
    characters: float = 5.0  # of prose, a token
    session: Session = field(default_factory=lambda: Session(False))

    @property
    def most_streams(self) -> int:
        """What servers are to take at once: also a prompt beside streams, which would wait for their ends otherwise."""
        return max(*self.streams, BESIDE_STREAMS + 1)

    def within(self, tokens: int, spare: int = 512) -> int:
        """So many, or what the context has room for."""
        return max(64, min(tokens, self.traits.context - spare))

    @property
    def course(self) -> Course:
        last = self.within(self.session_tokens, 1024)
        return Course(self.turns, last, self.opening * last // self.session_tokens)

    def plan(self, model: str, round_: int, output: int | None = None) -> LoadPlan:
        return LoadPlan(
            model=model,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens if output is None else output,
            seed=round_,
        )

    def text(self, name: str, tokens: int) -> str:
        """Words that make about so many tokens, other ones for each name."""
        return prose(random.Random(name), int(tokens * self.characters))


def target(server: Server, load: Load) -> LoadTarget:
    return LoadTarget(server.client, server.model, is_ingot="ignore_eos" in server.peer.body, words=load.words)


def chat(server: Server, text: str) -> Heard:
    return listen(server.client, chat_body(server, FEW_TOKENS, ("user", text)))


def chat_body(server: Server, output: int, *said: tuple[str, str]) -> dict[str, Any]:
    """Of a request with these messages, whose answer is as long as it may be."""
    messages = [{"role": role, "content": text} for role, text in said]
    return server.ask({"messages": messages, "max_tokens": output, **server.peer.body})


def run_clients(server: Server, load: Load, plan: LoadPlan, requests: int, clients: int) -> list[RequestSample]:
    """So many requests, each with its own prompt, by so many clients at once."""
    bodies = [request_body(target(server, load), plan, f"client {number}") for number in range(requests)]
    return run_concurrently(partial(measure_request, server.client, ENDPOINT_PATHS[plan.endpoint]), bodies, clients)


def agent(server: Server, load: Load) -> Iterator[Figures]:
    """A session: instructions and tools, results turn by turn, one of them edited, and then questions about them."""
    player = Player(server.client, server.model, load.session, load.course, server.peer.body)
    for number in range(load.turns):
        turn = player.step()
        if number == 0:
            yield {"first turn": turn.heard.ttft}
            continue
        yield {"next turn": turn.heard.ttft, "reused": turn.share}
        if number == load.turns // 2:
            edited = player.edit()
            yield {"edited turn": edited.heard.ttft, "reused after an edit": edited.share}
    asked = random.Random(load.session.seed).sample(range(load.turns), min(load.questions, load.turns))
    for number in asked:
        _, right = player.recall(number)
        yield {"right answers": float(right)}


def streams(server: Server, load: Load) -> Iterator[Figures]:
    """So many at once, each with its own prompt."""
    for round_ in range(load.rounds):
        for count in load.streams:
            plan = replace(load.plan(server.model, round_), requests=max(4, count))
            level = run_level(target(server, load), plan, count)
            yield level_figures(level, f"{count} at once: ", load.output_tokens)


def level_figures(level: LoadLevel, name: str, output: int) -> Figures:
    """Raises ServerError if requests failed. Where answers are shorter than wanted, it says how long they are."""
    if level.errors or level.ttft is None or level.seconds_per_token is None:
        raise ServerError(f"{level.failed} of {level.requests} requests failed: {'; '.join(level.errors)}")
    found: Figures = {
        f"{name}tokens/s": level.output_tokens_per_second,
        f"{name}first token": level.ttft.p50,
        f"{name}time per token": level.seconds_per_token.p50,
    }
    each = level.output_tokens / level.requests
    return found if each == output else found | {f"{name}tokens of an answer": each}


class Stream:
    """An answer that goes on until it is left."""

    def __init__(self, server: Server, load: Load, name: str) -> None:
        self.arrivals: list[float] = []
        self._left = False
        plan = load.plan(server.model, 0, load.within(4000, 512))
        body = request_body(replace(target(server, load), words=STREAM_WORDS), plan, name)
        self._events = server.client.stream(ENDPOINT_PATHS[plan.endpoint], body)
        self._flows = threading.Event()
        self._error: ServerError | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        try:
            for event in self._events:
                self.arrivals.append(event.at)
                if len(self.arrivals) > STREAM_TOKENS:
                    self._flows.set()
                if self._left:
                    return
        except ServerError as error:
            self._error = error
        finally:
            self._events.close()
            self._flows.set()

    def __enter__(self) -> Self:
        self._thread.start()
        self._flows.wait()
        if not self._thread.is_alive():
            raise self._error or ServerError("the stream ended before the prompt came")
        return self

    def __exit__(self, *_: object) -> None:
        self._left = True
        self._thread.join()

    def waits(self, since: float, until: float) -> list[float]:
        """Seconds between its tokens in that time, the last up to its end. Several that come at once are one."""
        within = sorted({round(at, 3) for at in self.arrivals if since <= at <= until})
        return [later - sooner for sooner, later in pairwise([since, *within, until])]


class HealthProbes:
    """Asks a server whether it is well, over and over, and keeps how long each answer took."""

    def __init__(self, server: Server) -> None:
        self.seconds: list[float] = []
        self._server, self._over = server, threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)

    def _ask(self) -> None:
        while not self._over.is_set():
            began = time.perf_counter()
            try:
                self._server.client.get(self._server.peer.health)
            except ServerError as error:
                if error.answered is None and "with JSON" not in error.message:
                    return
            self.seconds.append(time.perf_counter() - began)
            self._over.wait(PROBE_PAUSE_S)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def beside(server: Server, load: Load) -> Iterator[Figures]:
    """A long prompt by itself, and beside streams while the server is probed."""
    tokens = load.within(load.long_prompt, 256)
    for round_ in range(load.rounds):
        alone = chat(server, load.text(f"alone {round_}", tokens)).ttft
        with ExitStack() as stack:
            flowing = [stack.enter_context(Stream(server, load, f"{round_} {each}")) for each in range(BESIDE_STREAMS)]
            probes = stack.enter_context(HealthProbes(server))
            since = time.perf_counter()
            together = chat(server, load.text(f"beside {round_}", tokens)).ttft
            until = time.perf_counter()
            waits = [wait for stream in flowing for wait in stream.waits(since, until)]
        yield {
            "prompt alone": alone,
            "prompt beside streams": together,
            "speed it keeps": alone / together,
            "streams' longest wait": max(waits),
            "streams' usual wait": median(waits),
            "slowest health probe": max(probes.seconds, default=together),
        }


def restart(server: Server, load: Load) -> Iterator[Figures]:
    """A conversation, and its next turn: cold, at once, and after the server was stopped and started."""
    yield from _interrupted(server, load, "a restart", server.stop)


def kill(server: Server, load: Load) -> Iterator[Figures]:
    """The same after kill -9 in the middle of an answer."""

    def end() -> None:
        with Stream(server, load, "interrupted"):
            server.kill()

    yield from _interrupted(server, load, "kill -9", end)


def _interrupted(server: Server, load: Load, name: str, end: Callable[[], None]) -> Iterator[Figures]:
    for round_ in range(load.rounds):
        rules = load.text(f"conversation {round_} of {name}", load.within(load.opening, 768))

        def ask(question: str, rules: str = rules) -> Heard:
            return listen(server.client, chat_body(server, FEW_TOKENS, ("system", rules), ("user", question)))

        first = ask("What comes first?")
        again = ask("What comes next?")
        end()
        ready = server.start()
        after = ask("What comes last?")
        cached = after.cached_tokens
        yield {
            "cold": first.ttft,
            "next turn": again.ttft,
            f"ready after {name}": ready,
            f"next turn after {name}": after.ttft,
            f"start and next turn after {name}": ready + after.ttft,  # some are ready before their model is loaded
            f"cached after {name}": None if cached is None else cached / after.prompt_tokens,
        }


_PERSON: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "role": {"enum": ["admin", "user", "guest"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["name", "age", "role", "tags"],
    "additionalProperties": False,
}
_NAMES: Final = ("Ada", "Boris", "Chen", "Dora", "Emil", "Fatima", "Goran", "Hana")


def structured(server: Server, load: Load) -> Iterator[Figures]:
    """JSON by a schema, as `response_format` asks for it; the share of answers that have it."""
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": _PERSON, "strict": True}}
    for number in range(load.answers):
        said = [{"role": "user", "content": f"Tell me about {_NAMES[number % len(_NAMES)]}, as JSON."}]
        body = {"messages": said, "max_tokens": 200, "response_format": wanted}
        heard = _if_supported(server, body)
        valid = problem_with(heard.text, _PERSON) is None
        yield {"valid JSON": float(valid), "seconds": heard.seconds if valid else None}


def calls(server: Server, load: Load) -> Iterator[Figures]:
    """Calls of a tool that the request names; the share that names it, with arguments by its schema."""
    listed = tools()[: min(CALLED_TOOLS, load.traits.context // TOKENS_OF_A_TOOL)]
    for number in range(load.answers):
        wanted = listed[number % len(listed)]["function"]
        choice = {"type": "function", "function": {"name": wanted["name"]}}
        said = [{"role": "user", "content": f"Please {wanted['description'].lower()}"}]
        body = {"messages": said, "max_tokens": 200, "tools": listed, "tool_choice": choice}
        made = _if_supported(server, body).calls
        right = len(made) == 1 and made[0]["function"]["name"] == wanted["name"]
        right = right and problem_with(made[0]["function"]["arguments"], wanted["parameters"]) is None
        yield {"valid calls": float(right)}


def _if_supported(server: Server, body: Mapping[str, Any]) -> Heard:
    """What a server answers. One that refuses the request by its form does not support it."""
    try:
        return listen(server.client, server.ask(body))
    except ServerError as error:
        if error.answered in (400, 404, 422, 501):
            raise NotSupported(error.message) from error
        raise


def draft(server: Server, load: Load) -> Iterator[Figures]:
    """A hybrid model with a draft head: prompts with a prefix in common, eight at once."""
    if not load.traits.draft_head:
        raise NotSupported("the model has no draft head (MTP)")
    for round_ in range(load.rounds):
        rules = load.text(f"drafts {round_}", load.within(2048, 1024))
        questions = ("Are you there?", *(f"What is it that {name} did? Repeat the rules." for name in _NAMES))
        first, *others = (
            chat_body(server, load.output_tokens, ("system", rules), ("user", question)) for question in questions
        )
        listen(server.client, first)
        began = time.perf_counter()
        heard = run_concurrently(partial(listen, server.client), others, len(others))
        seconds = time.perf_counter() - began
        cached = [each.cached_tokens for each in heard]
        known = [each for each in cached if each is not None]
        yield {
            "tokens/s": sum(each.completion_tokens for each in heard) / seconds,
            "first token": median(each.ttft for each in heard),
            "cached": sum(known) / sum(each.prompt_tokens for each in heard) if len(known) == len(cached) else None,
        }


def memory(server: Server, load: Load) -> Iterator[Figures]:
    """Resident memory of the server's processes, once it has answered, and at its most under streams."""
    chat(server, load.text("at rest", 64))
    rest = tree_bytes(server.pid)
    count = min(8, load.most_streams)
    with MemoryWatch(server.pid) as watch:
        longer = replace(load, words=4 * load.words)
        run_clients(server, longer, load.plan(server.model, 1000), requests=2 * count, clients=count)
    yield {"at rest": rest / 1e6, "at its peak": watch.peak / 1e6}


def overload(server: Server, load: Load) -> Iterator[Figures]:
    """Four times as many clients as the server takes at once."""
    count = 4 * load.most_streams
    for round_ in range(load.rounds):
        plan = load.plan(server.model, 2000 + round_, output=min(16, load.output_tokens))
        began = time.perf_counter()
        samples = run_clients(server, load, plan, requests=count, clients=count)
        seconds = time.perf_counter() - began
        errors = [sample.problem for sample in samples if sample.problem is not None]
        refused = sum(any(word in error for word in REFUSED) for error in errors)
        yield {
            "answered": (count - len(errors)) / count,
            "refused with 429 or 503": refused / count,
            "failed": (len(errors) - refused) / count,
            "seconds for all": seconds,
        }


def images(server: Server, load: Load) -> Iterator[Figures]:
    """A picture, and another question about it."""
    if not load.traits.vision:
        raise NotSupported("the model takes no images")
    for round_ in range(load.rounds):
        address = f"data:image/png;base64,{base64.b64encode(picture(224, round_)).decode()}"
        image = {"type": "image_url", "image_url": {"url": address}}

        def ask(question: str, image: Mapping[str, Any] = image) -> Heard:
            said = [{"role": "user", "content": [image, {"type": "text", "text": question}]}]
            return _if_supported(server, {"messages": said, "max_tokens": 16, **server.peer.body})

        yield {"first question": ask("What is there?").ttft}
        yield {"second question": ask("Which colour has it?").ttft}


def picture(size: int, seed: int) -> bytes:
    """A PNG file with a field of some colour on another."""
    dice = random.Random(seed)
    ground, colour = (bytes(dice.randrange(256) for _ in range(3)) for _ in range(2))
    half = size // 2
    both, below = b"\0" + colour * half + ground * (size - half), b"\0" + ground * size
    rows = both * half + below * (size - half)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@dataclass(frozen=True, slots=True)
class Work:
    """`endless`: its answers go on until their limit, so the model must not end them."""

    name: str
    about: str
    run: Callable[[Server, Load], Iterator[Figures]]
    endless: bool = True


WORKS: Final = (
    Work("agent", "an agent's session: first tokens, reuse, right answers", agent),
    Work("streams", "1, 8, 16 and 32 streams at once", streams),
    Work("beside", "a long prompt beside streams and health probes", beside),
    Work("restart", "a restart, and the conversation's next turn", restart),
    Work("draft", "a model with a draft head: prefix cache, drafts and batch together", draft),
    Work("memory", "resident memory at rest and under streams", memory),
    Work("images", "questions about images", images),
    Work("overload", "four times as many clients as the server takes", overload),
    Work("kill", "kill -9, and what the next start serves", kill),
    Work("structured", "JSON by a schema", structured, endless=False),
    Work("calls", "calls of a tool that the request names", calls, endless=False),
)
WORK_NAMES: Final = tuple(work.name for work in WORKS)


_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_KNOWN: Final = {
    *("type", "enum", "properties", "required", "additionalProperties", "items", "maxItems", "maxLength"),
    *("minimum", "maximum", "description"),
}


def problem_with(text: str, schema: Mapping[str, Any]) -> str | None:
    """Why a text is no JSON by that schema; None when it is."""
    try:
        value = json.loads(text)
    except ValueError:
        return "it is not JSON"
    return _problem(value, schema, "it")


def _problem(value: Any, schema: Mapping[str, Any], place: str) -> str | None:
    if unknown := schema.keys() - _KNOWN:
        raise ValueError(f"nobody checks {', '.join(sorted(unknown))}")
    wanted = _TYPES.get(schema.get("type", ""))
    if wanted is not None and (not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted)):
        return f"{place} is no {schema['type']}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{place} is none of {schema['enum']}"
    if isinstance(value, dict):
        return _object_problem(value, schema, place)
    if isinstance(value, list):
        if len(value) > schema.get("maxItems", len(value)):
            return f"{place} has {len(value)} items"
        found = (_problem(each, schema.get("items", {}), f"{place}[{number}]") for number, each in enumerate(value))
        return next(filter(None, found), None)
    if isinstance(value, str) and len(value) > schema.get("maxLength", len(value)):
        return f"{place} has {len(value)} characters"
    if isinstance(value, int | float) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        return f"{place} is {value}"
    return None


def _object_problem(value: Mapping[str, Any], schema: Mapping[str, Any], place: str) -> str | None:
    if missing := [name for name in schema.get("required", ()) if name not in value]:
        return f"{place} has no {missing[0]}"
    listed = schema.get("properties", {})
    if schema.get("additionalProperties") is False and (more := [name for name in value if name not in listed]):
        return f"{place} has {more[0]}, which is not in the schema"
    found = (_problem(value[name], about, f"{place}.{name}") for name, about in listed.items() if name in value)
    return next(filter(None, found), None)
