"""An agent's session as a client drives it: instructions with many tools, then calls and their results, turn by turn.

The words are random and the same in every run. The assistant's text is the server's own answer; the tool call after it
is the client's, because small or random models make none, so that every server gets the same kind of history. If the
chat template supports tools it renders them, otherwise they are written into the text.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

VERBS = ("read", "write", "list", "find", "move", "copy", "drop", "open")
NOUNS = ("file", "folder", "branch")
WORDS: tuple[str, ...] = (
    "anchor",
    "basket",
    "candle",
    "desert",
    "engine",
    "forest",
    "garden",
    "harbor",
    "island",
    "jacket",
    "kettle",
)
WORDS += ("ladder", "marble", "needle", "orchard", "pencil", "quarry", "ribbon", "saddle", "timber", "umbrella")
WORDS += ("valley", "window", "yellow", "amber", "bridge", "copper", "dinner", "eleven", "famous", "gentle", "hollow")
USER_SPEAKS_EVERY = 6
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


@dataclass
class Session:
    """`told` are the texts that the client adds, turn by turn: made on the first replay, kept for the others."""

    native: bool
    seed: int = 0
    told: list[str] = field(default_factory=list)

    def opening(self) -> list[Message]:
        instructions = "You are an agent that works on a project with tools. Think little, call one tool at a time."
        if not self.native:
            listed = "\n".join(json.dumps(tool["function"]) for tool in tools())
            instructions += f"\n\nTools:\n{listed}\n\nTo call one write <tool_call>, its name and arguments as JSON."
        return [{"role": "system", "content": instructions}, {"role": "user", "content": "Put the project in order."}]

    @property
    def body(self) -> dict[str, Any]:
        """What every request has besides the messages."""
        return {"tools": tools(), "chat_template_kwargs": {"enable_thinking": False}} if self.native else {}

    def tell(self, turn: int, characters: int) -> str:
        """What the client says after this turn; `characters` counts only the first time."""
        if turn == len(self.told):
            self.told.append(prose(random.Random(f"{self.seed}-{turn}"), characters))
        return self.told[turn]

    def following(self, turn: int, answer: Message, text: str) -> list[Message]:
        """The messages that a turn adds: the answer, and what the client has to say to it."""
        if answer.get("tool_calls"):
            return [answer, {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": text}]
        if turn % USER_SPEAKS_EVERY == USER_SPEAKS_EVERY - 1:
            return [answer, {"role": "user", "content": text}]
        return self._called(turn, answer, text)

    def _called(self, turn: int, answer: Message, text: str) -> list[Message]:
        dice = random.Random(f"call-{self.seed}-{turn}")
        name, path = dice.choice(tools())["function"]["name"], "/".join(dice.choices(WORDS, k=3))
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
