"""The actions of clients, one at a time, and how each must end."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, Final
from urllib.parse import urlsplit

JSON: Final = "application/json"
PATIENCE_S: Final = 120.0
"""A server that is silent for so long is stuck."""
WORDS: Final = (
    *("the", "river", "runs", "past", "an", "old", "mill", "where", "seven", "men"),
    *("count", "copper", "coins", "and", "sing", "of", "ships", "at", "sea"),
)
WEATHER: Final = {
    "name": "weather",
    "description": "The weather somewhere.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
PERSON: Final = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Fault(Exception):
    """The server did what it must not do."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    raw: bytes


class Person:
    """A client with a key and habits of its own: what it says again is what the server may have kept."""

    def __init__(self, url: str, key: str, seed: int) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port
        self._key = key
        self.random = Random(seed)
        self.history: list[dict[str, str]] = []
        self._manner = self.says(200)

    def says(self, words: int) -> str:
        return " ".join(self.random.choices(WORDS, k=words))

    def turns(self) -> list[dict[str, str]]:
        """A conversation that goes on where the last one ended, or begins anew."""
        if len(self.history) > 8 or not self.history:
            self.history = [{"role": "system", "content": self._manner}]
        self.history.append({"role": "user", "content": self.says(self.random.choice((3, 30, 120)))})
        return self.history

    @contextmanager
    def asking(
        self, path: str, body: Mapping[str, Any] | bytes | None = None, method: str = "POST", form: str = JSON
    ) -> Iterator[http.client.HTTPConnection]:
        """A connection on which the question was sent, closed at the end of the block. A body in bytes is sent as it
        is, and is of the `form` that is stated. Raises Fault."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=PATIENCE_S)
        headers = {"Content-Type": form, "Authorization": f"Bearer {self._key}"}
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body)
        try:
            connection.request(method, path, raw, headers)
            yield connection
        except TimeoutError:
            raise Fault(f"{path} did not answer for {PATIENCE_S:.0f} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise Fault(f"{path} ended early: {error or type(error).__name__}") from error
        finally:
            connection.close()

    def ask(
        self, path: str, body: Mapping[str, Any] | bytes | None = None, method: str = "POST", form: str = JSON
    ) -> Answer:
        with self.asking(path, body, method, form) as connection:
            response = connection.getresponse()
            return Answer(response.status, response.read())

    def told(self, path: str, body: Mapping[str, Any] | None, ending: bytes = b"", method: str = "POST") -> Answer:
        """The answer to what has to work. `ending` is what its last bytes have to hold."""
        answer = self.ask(path, body, method)
        if answer.status != 200:
            raise Fault(f"{path} answered {answer.status}: {answer.raw[:300]!r}")
        if ending not in answer.raw[-4096:]:
            raise Fault(f"{path} ended without {ending!r}: {answer.raw[-300:]!r}")
        return answer


Act = Callable[[Person], None]


def chat(person: Person) -> None:
    body = {"model": "default", "messages": person.turns(), "max_tokens": 24}
    said = json.loads(person.told("/v1/chat/completions", body).raw)["choices"][0]["message"]["content"]
    person.history.append({"role": "assistant", "content": said or ""})


def streamed_chat(person: Person) -> None:
    body = {"model": "default", "messages": person.turns(), "max_tokens": 24, "stream": True, "n": 2, "logprobs": True}
    person.told("/v1/chat/completions", body, b"data: [DONE]")


def hung_up(person: Person) -> None:
    """Leaves before the first token, or in the midst of the answer."""
    streams = person.random.random() < 0.7
    body = {"model": "default", "messages": person.turns(), "max_tokens": 400 if streams else 40, "stream": streams}
    with person.asking("/v1/chat/completions", body) as connection:
        if seen := person.random.choice((0, 200, 2000)):
            connection.getresponse().read(seen)


def cancelled(person: Person) -> None:
    """Ended from elsewhere, which the stream has to tell, unless it was at its end."""
    body = {"model": "default", "messages": person.turns(), "max_tokens": 400, "stream": True}
    with person.asking("/v1/chat/completions", body) as connection:
        response = connection.getresponse()
        answer = person.ask(f"/v1/requests/{response.headers['x-request-id']}", method="DELETE")
        said = response.read()
    if answer.status not in (200, 404):
        raise Fault(f"a cancel was answered with {answer.status}")
    if b"data: [DONE]" not in said and b'"error"' not in said:
        raise Fault(f"a cancelled stream ended in {said[-300:]!r}")


def completion(person: Person) -> None:
    body = {"model": "default", "prompt": [person.says(40), person.says(9)], "max_tokens": 16, "n": 2, "temperature": 1}
    person.told("/v1/completions", body | {"stop": ["mill"], "seed": 7})


def scored(person: Person) -> None:
    body = {"model": "default", "prompt": person.says(60), "max_tokens": 1, "echo": True, "logprobs": 2}
    person.told("/v1/completions", body)


def message(person: Person) -> None:
    [system, *turns] = person.turns()
    body = {"model": "default", "system": system["content"], "messages": turns, "max_tokens": 20, "stream": True}
    person.told("/v1/messages", body, b"message_stop")


def response(person: Person) -> None:
    """Stored, taken up again, and deleted."""
    body = {"model": "default", "input": person.says(20), "max_output_tokens": 16}
    first = json.loads(person.told("/v1/responses", body).raw)["id"]
    again = {**body, "previous_response_id": first, "stream": True}
    person.told("/v1/responses", again, b'"sequence_number"')
    person.told(f"/v1/responses/{first}", None, method="DELETE")


def ollama(person: Person) -> None:
    body = {"model": "default", "messages": person.turns(), "options": {"num_predict": 16}}
    person.told("/api/chat", body, b'"done":true')


def tools(person: Person) -> None:
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": f"What is the weather in {person.says(1)}?"}],
        "tools": [{"type": "function", "function": WEATHER}],
        "tool_choice": person.random.choice(("auto", "required")),
        "max_tokens": 48,
        "stream": True,
    }
    person.told("/v1/chat/completions", body, b"data: [DONE]")


def grammar(person: Person) -> None:
    """A new schema each time, so that compiled ones have to make way."""
    schema = {**PERSON, "title": person.says(2), "properties": {**PERSON["properties"], person.says(1): {"const": 1}}}
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": person.says(9)}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
        "max_tokens": 32,
    }
    person.told("/v1/chat/completions", body)


def long_prompt(person: Person) -> None:
    """Of its own, so that others' kept prompts have to go."""
    body = {"model": "default", "prompt": person.says(person.random.randint(500, 900)), "max_tokens": 4}
    person.told("/v1/completions", body)


def hostile(person: Person) -> None:
    """Bytes that are no body of ours."""
    raw = person.random.choice(
        (
            b"[" * 100_000,
            b'{"model": "default", "messages": [{"role": "user", "content": "\xff\xfe"}]}',
            b'{"model": "default", "prompt": "x", "max_tokens": 1e999}',
            b'{"model": "default", "prompt": "x", "seed": ' + b"9" * 5000 + b"}",
            b'{"model": "default", "messages": [',
            b"\0" * 4096,
        )
    )
    answer = person.ask("/v1/chat/completions", raw)
    if not 400 <= answer.status < 500:
        raise Fault(f"{raw[:80]!r} was answered with {answer.status}")


def reranked(person: Person) -> None:
    body = {"model": "rerank", "query": person.says(4), "documents": [person.says(20) for _ in range(8)]}
    person.told("/v1/rerank", body)


def wrong(person: Person) -> None:
    """What has to be refused."""
    body = person.random.choice(
        (
            {"model": "nobody", "messages": person.turns()},
            {"model": "default", "messages": "none"},
            {"model": "default", "messages": [{"role": "user", "content": "hi"}], "temperature": -1},
            {"model": "default", "messages": [{"role": "user", "content": person.says(20_000)}]},
        )
    )
    answer = person.ask("/v1/chat/completions", body)
    if answer.status not in (400, 404):
        raise Fault(f"an invalid request was answered with {answer.status}")


def watched(person: Person) -> None:
    person.told("/v1/cache", None, method="GET")
    person.told("/v1/tokenize", {"model": "default", "prompt": person.says(50)})
    person.told("/v1/cache/explain", {"model": "default", "messages": person.turns()})


def forgot(person: Person) -> None:
    person.told("/v1/cache", None, method="DELETE")


ACTS: Final[Mapping[Act, int]] = {
    chat: 6,
    streamed_chat: 4,
    hung_up: 5,
    cancelled: 2,
    completion: 2,
    scored: 1,
    message: 3,
    response: 2,
    ollama: 2,
    tools: 2,
    grammar: 2,
    long_prompt: 3,
    wrong: 1,
    hostile: 1,
    watched: 1,
    forgot: 1,
}
"""How often each is done, against the others."""
