"""A body of any protocol, told by its own fields: what `POST /v1/cache/explain` takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from ingot.errors import BadRequest, IngotError
from ingot.protocol.anthropic.request import MESSAGES_BODY, read_messages
from ingot.protocol.chat.answers import GenerationTask
from ingot.protocol.ollama import request
from ingot.protocol.openai.chat import CHAT_BODY, read_chat
from ingot.protocol.openai.completions import COMPLETION_BODY, read_completion
from ingot.protocol.responses.body import RESPONSES_BODY
from ingot.protocol.responses.request import Surroundings, read_response
from ingot.protocol.schema.fields import BodyReading, Kind, Schema
from ingot.protocol.schema.objects import ObjectOf, specs_of
from ingot.protocol.served import Served
from ingot.protocol.terms import Terms

Read = Callable[[Any, Served, str, Surroundings], Any]


def _alone(read: Callable[[Any, Served, str], Any]) -> Read:
    """Of a protocol whose bodies say all themselves."""
    return lambda value, served, request_id, around: read(value, served, request_id)


def _first_job(value: Any, served: Served, request_id: str, around: Surroundings) -> GenerationTask:
    return read_response(value, served, request_id, around).first


@dataclass(frozen=True, slots=True)
class Wire:
    """A protocol's body, and how it becomes a job. `prompts` are the fields one of which each has."""

    body: ObjectOf
    read: Read
    prompts: tuple[str, ...]

    def schema(self, terms: Terms) -> Schema:
        present = [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in self.prompts]
        return {"allOf": [self.body.schema(terms), {"anyOf": present}]}


# Of those that a body may be of alike, the first is taken.
WIRES: Final = (
    Wire(CHAT_BODY, _alone(read_chat), ("messages",)),
    Wire(MESSAGES_BODY, _alone(read_messages), ("messages",)),
    Wire(request.CHAT_BODY, _alone(request.read_ollama_chat), ("messages",)),
    Wire(COMPLETION_BODY, _alone(read_completion), ("prompt",)),
    Wire(request.GENERATE_BODY, _alone(request.read_ollama_generate), ("prompt",)),
    Wire(RESPONSES_BODY, _first_job, ("input", "previous_response_id", "conversation")),
)
WANTED: Final = "an object with 'messages', 'prompt' or 'input'"


@dataclass(frozen=True, slots=True)
class Question(Kind):
    types, words = (dict,), WANTED

    def parse(self, value: object, path: str, reading: BodyReading) -> Any:
        wire = wire_of(value, lambda: BodyReading(reading.terms))
        if wire is None:
            raise self.refuse(value, path, reading)
        return wire.body.parse(value, path, reading)

    def schema(self, terms: Terms) -> Schema:
        return {"anyOf": [wire.schema(terms) for wire in WIRES]}


EXPLAIN_BODY = Question()


def wire_of(value: object, reading: Callable[[], BodyReading]) -> Wire | None:
    """The protocol that a body is of: the one that knows the most of its fields' names, and of those that know as many
    the first that can read it. None where no protocol has its prompt's field."""
    if not isinstance(value, dict):
        return None
    possible = [wire for wire in WIRES if any(value.get(name) is not None for name in wire.prompts)]
    known = [(_unknown(wire.body, value), wire) for wire in possible]
    nearest = [wire for unknown, wire in known if unknown == min(known, key=lambda one: one[0])[0]]
    return next((wire for wire in nearest if _reads(wire.body, value, reading())), next(iter(nearest), None))


def _unknown(body: ObjectOf, value: dict[str, Any]) -> int:
    return len(value.keys() - specs_of(body.cls).keys() - body.foreign.keys())


def _reads(body: ObjectOf, value: object, reading: BodyReading) -> bool:
    try:
        body.parse(value, "", reading)
    except IngotError:
        return False
    return True


def read_question(value: Any, served: Served, request_id: str, around: Surroundings) -> GenerationTask:
    """The job that a body would become. It is not for running."""
    wire = wire_of(value, served.reading)
    if wire is None:
        raise BadRequest(f"The body holds no request: expected {WANTED}.")
    job = wire.read(value, served, request_id, around)
    if not isinstance(job, GenerationTask):
        raise BadRequest("The body asks for nothing but a model to be loaded: it has no prompt.")
    return job
