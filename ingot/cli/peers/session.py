"""An agent's session as a client drives it: instructions with many tools, then calls and their results, turn by turn.

The words are random and the same in every run. The assistant's text is the server's own answer; the tool call after it
is the client's, because small or random models make none, so that every server gets the same kind of history. If the
chat template supports tools it renders them, otherwise they are written into the text. Each result states a fact, by
which the session ends with questions that have a right answer.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ingot.cli.client import ServerClient, ServerError, chunk_delta

VERBS: Final = ("read", "write", "list", "find", "move", "copy", "drop", "open")
NOUNS: Final = ("file", "folder", "branch")
_WORDS_TEXT: Final = (
    "anchor basket candle desert engine forest garden harbor island jacket kettle ladder marble needle orchard pencil "
    "quarry ribbon saddle timber umbrella valley window yellow amber bridge copper dinner eleven famous gentle hollow"
)
WORDS: Final = _WORDS_TEXT.split()
USER_SPEAKS_EVERY: Final = 6
ANSWER_TOKENS: Final = 24
INSTRUCTIONS: Final = "You are an agent that works on a project with tools. Think little, call one tool at a time."
Message = dict[str, Any]


def tools() -> list[dict[str, Any]]:
    """As many as verbs and nouns make, described as agents describe theirs."""
    return [_tool(verb, noun) for verb in VERBS for noun in NOUNS]


def _tool(verb: str, noun: str) -> dict[str, Any]:
    # Of a few values each, so that a random model that is held to them comes to an end.
    properties = {
        "path": {"type": "string", "enum": ["here", "there", "everywhere"], "description": f"Where the {noun} is."},
        "limit": {"type": "integer", "enum": [10, 100], "description": "Most lines of output."},
    }
    parameters = {"type": "object", "properties": properties, "required": ["path"]}
    about = f"{verb.capitalize()} a {noun} of the project, and say what came of it."
    return {"type": "function", "function": {"name": f"{verb}_{noun}", "description": about, "parameters": parameters}}


def prose(dice: random.Random, characters: int) -> str:
    words: list[str] = []
    length = 0
    while length < characters:
        words.append(dice.choice(WORDS))
        length += len(words[-1]) + 1
    return " ".join(words)


@dataclass(frozen=True, slots=True)
class Heard:
    """A streamed answer. Seconds are from before the client connects."""

    text: str
    calls: tuple[dict[str, Any], ...]
    ttft: float
    seconds: float
    usage: Mapping[str, Any]
    reason: str | None = None  # ingot's, why not more of the prompt was cached

    @property
    def prompt_tokens(self) -> int:
        return int(self.usage.get("prompt_tokens") or 0)

    @property
    def completion_tokens(self) -> int:
        return int(self.usage.get("completion_tokens") or 0)

    @property
    def cached_tokens(self) -> int | None:
        """None: the server does not say."""
        found = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        return found if isinstance(found, int) else None

    @property
    def message(self) -> Message:
        """The answer as clients send it back."""
        return {"role": "assistant", "content": self.text} | ({"tool_calls": list(self.calls)} if self.calls else {})


def listen(client: ServerClient, body: Mapping[str, Any]) -> Heard:
    """Stream a chat request's answer to its end. Raises ServerError, also for an answer of nothing."""
    began = time.perf_counter()
    first: float | None = None
    text, calls = "", dict[int, dict[str, Any]]()
    usage: Mapping[str, Any] = {}
    reason = None
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    for event in client.stream("chat/completions", streamed):
        choices = event.data.get("choices") or [{}]
        delta = choices[0].get("delta") or {}
        thought, said = chunk_delta(event.data)
        if first is None and (thought or said or delta.get("tool_calls")):
            first = event.at
        text += said
        for part in delta.get("tool_calls") or ():
            _add_call(calls, part)
        usage = event.data.get("usage") or usage
        reason = ((event.data.get("ingot") or {}).get("cache") or {}).get("reason") or reason
    if first is None:
        raise ServerError("the answer has no text")
    return Heard(text, tuple(calls.values()), first - began, time.perf_counter() - began, usage, reason)


def _add_call(calls: dict[int, dict[str, Any]], part: Mapping[str, Any]) -> None:
    index = int(part.get("index") or 0)
    call = calls.setdefault(index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    call["id"] = call["id"] or part.get("id") or ""
    for name in ("name", "arguments"):
        call["function"][name] += (part.get("function") or {}).get(name) or ""


@dataclass(frozen=True, slots=True)
class Course:
    """How long a session is. `opening` are tokens of its first prompt, `tokens` of its last one, about; `turns` are
    more than one."""

    turns: int
    tokens: int
    opening: int = 0

    def characters(self, heard: Heard, sent: int, turn: int) -> int:
        """How much the client says after a turn, so that the session ends as long as it should; `sent` are characters.
        The last turn is one of those that it is spread over."""
        left = max(1, self.turns - turn)
        a_token = sent / max(1, heard.prompt_tokens)
        return max(40, int((self.tokens - heard.prompt_tokens) / left * a_token) - 250)


@dataclass
class Session:
    """`texts` are what the client adds, turn by turn: made on the first replay, kept for the others. `padding` are
    characters that the instructions have besides the tools, of which there are so many as `tools` says."""

    native: bool
    seed: int = 0
    padding: int = 0
    tools: int = len(VERBS) * len(NOUNS)
    texts: list[str] = field(default_factory=list)

    def opening(self) -> list[Message]:
        instructions = INSTRUCTIONS
        if not self.native:
            listed = "\n".join(json.dumps(tool["function"]) for tool in tools()[: self.tools])
            instructions += f"\n\nTools:\n{listed}\n\nTo call one write <tool_call>, its name and arguments as JSON."
        if self.padding:
            instructions += f"\n\n{prose(random.Random(f'rules-{self.seed}'), self.padding)}"
        return [{"role": "system", "content": instructions}, {"role": "user", "content": "Put the project in order."}]

    @property
    def body(self) -> dict[str, Any]:
        """What every request has besides the messages."""
        return (
            {"tools": tools()[: self.tools], "chat_template_kwargs": {"enable_thinking": False}} if self.native else {}
        )

    def fact(self, turn: int) -> tuple[str, str]:
        """What a turn's result is about, and its number."""
        dice = random.Random(f"fact-{self.seed}-{turn}")
        return f"{WORDS[turn % len(WORDS)]} {NOUNS[turn % len(NOUNS)]}", str(dice.randrange(1000, 10000))

    def client_text(self, turn: int, characters: int) -> str:
        """What the client says after this turn; `characters` counts only the first time."""
        if turn == len(self.texts):
            about, number = self.fact(turn)
            said = prose(random.Random(f"{self.seed}-{turn}"), characters)
            self.texts.append(f"The ticket of the {about} is {number}. {said}")
        return self.texts[turn]

    def following(self, turn: int, answer: Message, text: str) -> list[Message]:
        """The messages that a turn adds: the answer, and what the client has to say to it."""
        if answer.get("tool_calls"):
            return [answer, {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": text}]
        if turn % USER_SPEAKS_EVERY == USER_SPEAKS_EVERY - 1:
            return [answer, {"role": "user", "content": text}]
        return self._called(turn, answer, text)

    def _called(self, turn: int, answer: Message, text: str) -> list[Message]:
        dice = random.Random(f"call-{self.seed}-{turn}")
        name, path = dice.choice(tools()[: self.tools])["function"]["name"], "/".join(dice.choices(WORDS, k=3))
        arguments = json.dumps({"path": path, "limit": dice.randrange(10, 90)})
        if not self.native:
            call = f'\n<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
            result = f"<tool_response>\n{text}\n</tool_response>"
            return [{**answer, "content": (answer["content"] or "") + call}, {"role": "user", "content": result}]
        made = {"id": f"call{turn:05}", "type": "function", "function": {"name": name, "arguments": arguments}}
        return [
            {**answer, "tool_calls": [made]},
            {"role": "tool", "tool_call_id": made["id"], "content": text},
        ]

    def question(self, turn: int) -> Message:
        about, _ = self.fact(turn)
        return {"role": "user", "content": f"What is the ticket of the {about}? Answer with the number alone."}


@dataclass(frozen=True, slots=True)
class Turn:
    """What one request cost. `possible` tokens of its prompt had been computed before."""

    heard: Heard
    possible: int

    @property
    def share(self) -> float | None:
        """Of what was possible, that was cached; None if the server does not say."""
        if self.heard.cached_tokens is None:
            return None
        return min(self.heard.cached_tokens, self.possible) / self.possible if self.possible else 1.0


def reused_share(turns: list[Turn]) -> float | None:
    """Of all that was possible over a session."""
    shares = [turn.share for turn in turns]
    if None in shares:
        return None
    taken = sum((share or 0.0) * turn.possible for share, turn in zip(shares, turns, strict=True))
    return taken / max(1, sum(turn.possible for turn in turns))


class Player:
    """Plays a session on one server, a turn at a time. `more` is in the body of every request."""

    def __init__(
        self, client: ServerClient, model: str, session: Session, course: Course, more: Mapping[str, Any] | None = None
    ) -> None:
        self.turns: list[Turn] = []
        self.sent: list[list[Message]] = []  # turn by turn
        self._client, self._session, self._course = client, session, course
        self._more = {"model": model, "temperature": 0, "max_tokens": ANSWER_TOKENS, **(more or {}), **session.body}
        self._messages = session.opening()
        self._before = 0  # tokens that were computed by the end of the turn before

    def step(self) -> Turn:
        """The next turn."""
        number = len(self.turns)
        turn = self._ask(self._messages, self._before)
        self.turns.append(turn)
        self.sent.append(self._messages)
        self._before = turn.heard.prompt_tokens + turn.heard.completion_tokens - 1
        sent = len(json.dumps(self._session.body)) + sum(len(json.dumps(message)) for message in self._messages)
        text = self._session.client_text(number, self._course.characters(turn.heard, sent, number + 1))
        self._messages = [*self._messages, *self._session.following(number, turn.heard.message, text)]
        return turn

    def edit(self) -> Turn:
        """The last turn again, after the user changed what it ended with. Up to there, all has been computed."""
        number = len(self.turns) - 1
        messages = self.sent[-1]
        edited = {**messages[-1], "content": f"No, wait. {messages[-1]['content'][: len(INSTRUCTIONS)]}"}
        before = self.turns[number - 1].heard
        return self._ask([*messages[:-1], edited], before.prompt_tokens + before.completion_tokens - 1)

    def recall(self, number: int) -> tuple[Turn, bool]:
        """Ask for a fact of a past turn, and whether the answer is right. The conversation stays as it was."""
        turn = self._ask([*self._messages, self._session.question(number)], self._before)
        return turn, self._session.fact(number)[1] in turn.heard.text

    def _ask(self, messages: list[Message], possible: int) -> Turn:
        heard = listen(self._client, {**self._more, "messages": messages})
        return Turn(heard, max(0, min(possible, heard.prompt_tokens - 1)))
