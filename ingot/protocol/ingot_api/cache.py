"""`/v1/cache`, `/v1/cache/tree` and `/v1/cache/explain`: what the prefix cache holds, how it branches, and what a
request would find in it.

`explain` takes a body of any protocol, which is known by its own fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from msgspec import UNSET, Struct, UnsetType

from ingot.engine.request import CacheReport
from ingot.engine.status import CacheBranch, CacheStatus, CacheTotals, DiskStatus, SaltStatus
from ingot.errors import BadRequest, IngotError
from ingot.protocol.anthropic.request import MESSAGES_BODY, read_messages
from ingot.protocol.chat.answers import CacheReceipt, GenerationTask, IgnoredNote
from ingot.protocol.ollama import request
from ingot.protocol.openai.chat import CHAT_BODY, read_chat
from ingot.protocol.openai.completions import COMPLETION_BODY, read_completion
from ingot.protocol.responses.request import RESPONSES_BODY, ResponseContext, read_response
from ingot.protocol.schema.fields import BodyReading, FieldKind, Schema
from ingot.protocol.schema.objects import ObjectOf, field_specs
from ingot.protocol.served import ServedModel
from ingot.protocol.terms import Terms


class CacheBody(Struct):
    """`limit_bytes` is the whole server's, the rest is the asking tenant's. `disk` is null without `--cache-dir`. The
    administrator, and everybody where there are no keys, is given the `totals` too. `codec` is `--cache-codec`, and
    `live_codec` is `--kv-codec`."""

    limit_bytes: int
    used_bytes: int
    evictions: int
    prompts: int
    hits: int
    prompt_tokens: int
    matched_tokens: int
    salts: tuple[SaltStatus, ...]
    disk: DiskStatus | None = None
    codec: str = "raw"
    live_codec: str = "raw"
    totals: CacheTotals | UnsetType = UNSET

    @classmethod
    def of(cls, status: CacheStatus, *, admin: bool) -> CacheBody:
        body = cls(*(getattr(status, name) for name in cls.__struct_fields__))
        if not admin:
            body.totals = UNSET
        return body


class ClearedBody(Struct):
    freed_bytes: int


class ImportedBody(Struct):
    """Tokens of prompts that are cached now and were not before."""

    added_tokens: int


class ExplainedBody(Struct):
    """What the request would reuse if it came now, and why no more."""

    prompt_tokens: int
    cache: CacheReceipt | UnsetType = UNSET
    ingot: IgnoredNote | UnsetType = UNSET

    @classmethod
    def of(cls, job: GenerationTask, reports: Sequence[CacheReport]) -> ExplainedBody:
        head = job.head
        assert head is not None
        note = IgnoredNote(head.ignored) if head.ignored else UNSET
        return cls(sum(map(len, job.request.prompts)), CacheReceipt.of(reports, head.source), note)


class CacheTreeBody(Struct, kw_only=True):
    """The asking key's, of each loaded model. Those that were used most come first, parents before what goes on from
    them; `more` says how many that go on from one are not listed."""

    object: Literal["list"] = "list"
    data: list[CacheBranch]

    @classmethod
    def of(cls, trees: Iterable[Sequence[CacheBranch]]) -> CacheTreeBody:
        branches: list[CacheBranch] = []
        for tree in trees:
            before = len(branches)  # of other models, which come first
            branches += [
                branch if branch.parent is None else replace(branch, parent=before + branch.parent) for branch in tree
            ]
        return cls(data=branches)


ReadWire = Callable[[Any, ServedModel, str, ResponseContext], Any]


def _without_surroundings(read: Callable[[Any, ServedModel, str], Any]) -> ReadWire:
    """Of a protocol whose bodies say all themselves."""
    return lambda value, served, request_id, around: read(value, served, request_id)


def _first_task(value: Any, served: ServedModel, request_id: str, around: ResponseContext) -> GenerationTask:
    return read_response(value, served, request_id, around).first


@dataclass(frozen=True, slots=True)
class ExplainableWire:
    """A protocol's body, and how it becomes a job. `prompts` are the fields one of which each has."""

    body: ObjectOf
    read: ReadWire
    prompts: tuple[str, ...]

    def schema(self, terms: Terms) -> Schema:
        present = [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in self.prompts]
        return {"allOf": [self.body.schema(terms), {"anyOf": present}]}


# Of those that a body may be of alike, the first is taken.
EXPLAINABLE_WIRES: Final = (
    ExplainableWire(CHAT_BODY, _without_surroundings(read_chat), ("messages",)),
    ExplainableWire(MESSAGES_BODY, _without_surroundings(read_messages), ("messages",)),
    ExplainableWire(request.OLLAMA_CHAT_BODY, _without_surroundings(request.read_ollama_chat), ("messages",)),
    ExplainableWire(COMPLETION_BODY, _without_surroundings(read_completion), ("prompt",)),
    ExplainableWire(request.OLLAMA_GENERATE_BODY, _without_surroundings(request.read_ollama_generate), ("prompt",)),
    ExplainableWire(RESPONSES_BODY, _first_task, ("input", "previous_response_id", "conversation")),
)
EXPLAINABLE_FIELDS: Final = "an object with 'messages', 'prompt' or 'input'"


@dataclass(frozen=True, slots=True)
class ExplainableBody(FieldKind):
    types, words = (dict,), EXPLAINABLE_FIELDS

    def parse(self, value: object, path: str, reading: BodyReading) -> Any:
        wire = detect_wire(value, lambda: BodyReading(reading.terms))
        if wire is None:
            raise self.refuse(value, path, reading)
        return wire.body.parse(value, path, reading)

    def schema(self, terms: Terms) -> Schema:
        return {"anyOf": [wire.schema(terms) for wire in EXPLAINABLE_WIRES]}


EXPLAIN_BODY = ExplainableBody()


def detect_wire(value: object, reading: Callable[[], BodyReading]) -> ExplainableWire | None:
    """The protocol that a body is of: the one that knows the most of its fields' names, and of those that know as many
    the first that can read it. None where no protocol has its prompt's field."""
    if not isinstance(value, dict):
        return None
    possible = [wire for wire in EXPLAINABLE_WIRES if any(value.get(name) is not None for name in wire.prompts)]
    known = [(_unknown_fields(wire.body, value), wire) for wire in possible]
    nearest = [wire for unknown, wire in known if unknown == min(known, key=lambda one: one[0])[0]]
    return next((wire for wire in nearest if _can_read(wire.body, value, reading())), next(iter(nearest), None))


def _unknown_fields(body: ObjectOf, value: dict[str, Any]) -> int:
    return len(value.keys() - field_specs(body.cls).keys() - body.foreign.keys())


def _can_read(body: ObjectOf, value: object, reading: BodyReading) -> bool:
    try:
        body.parse(value, "", reading)
    except IngotError:
        return False
    return True


def read_explainable_body(value: Any, served: ServedModel, request_id: str, around: ResponseContext) -> GenerationTask:
    """The job that a body would become. It is not for running."""
    wire = detect_wire(value, served.reading)
    if wire is None:
        raise BadRequest(f"The body holds no request: expected {EXPLAINABLE_FIELDS}.")
    job = wire.read(value, served, request_id, around)
    if not isinstance(job, GenerationTask):
        raise BadRequest("The body asks for nothing but a model to be loaded: it has no prompt.")
    return job
