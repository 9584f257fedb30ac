"""Tool calls: pick the right tool among several and copy its arguments out of the question, whatever is in them.

Tools and their parameters go under several names, so that a name has to be read from the schema, not remembered.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from foundry import phrases
from foundry.chat_lessons import chat_lesson
from foundry.lesson import Call, Lesson, user

UNITS = ("celsius", "fahrenheit")
LANGUAGES = ("French", "German", "Spanish", "Italian", "Polish", "Greek")
LEVELS = ("low", "normal", "high")


@dataclass(frozen=True)
class Parameter:
    names: str
    kind: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tool:
    names: str
    description: str
    parameters: tuple[Parameter, ...]
    requests: tuple[str, ...]


def _tool(names: str, description: str, parameters: list[tuple[Any, ...]], *requests: str) -> Tool:
    return Tool(names, description, tuple(Parameter(*parameter) for parameter in parameters), requests)


LIBRARY = (
    _tool("get_weather weather fetch_weather", "Weather in a city", [("city place location", "place")],
          "What is the weather in {0}?", "Tell me the weather in {0}.", "How is the weather in {0} now?"),
    _tool("convert_temperature to_unit", "Convert a temperature", [("degrees value", "integer"), ("unit target", "choice", UNITS)],
          "Convert {0} degrees to {1}.", "How much is {0} degrees in {1}?"),
    _tool("send_message send_text message_person", "Send a text to a person", [("to person recipient", "person"), ("text body message", "text")],
          "Send {0} the text {1}", "Tell {0} this: {1}", "Write {1} to {0}"),
    _tool("write_file save_file create_file", "Write a file", [("path file filename", "path"), ("content text data", "text")],
          "Write {1} into the file {0}", "Save {1} to {0}", "Create {0} with the content {1}"),
    _tool("read_file open_file", "Read a file", [("path file filename", "path")],
          "Read the file {0}", "Show me what is in {0}", "Open {0}"),
    _tool("set_timer start_timer", "Start a timer", [("minutes duration", "integer"), ("label name", "text")],
          "Set a timer for {0} minutes called {1}", "Start a {0} minute timer named {1}"),
    _tool("search search_web web_search", "Search the web", [("query q terms", "text")],
          "Search for {0}", "Look up {0}", "Find pages about {0}"),
    _tool("translate translate_text", "Translate text", [("text source", "text"), ("language target", "choice", LANGUAGES)],
          "Translate {0} to {1}.", "How do you say {0} in {1}?"),
    _tool("run_command shell execute", "Run a shell command", [("command cmd", "text")],
          "Run the command {0}", "Execute {0} in the shell"),
    _tool("add_note create_note", "Keep a note", [("title name", "words"), ("text body", "text")],
          "Add a note titled {0}: {1}", "Make a note {0} that says {1}"),
    _tool("book_table reserve_table", "Book a table", [("name guest", "person"), ("people guests seats", "integer")],
          "Book a table for {1} people under the name {0}.", "Reserve a table for {1}, name {0}."),
    _tool("play_song play_music", "Play a song", [("title song", "words"), ("loud volume_up", "boolean")],
          "Play the song {0}, loud: {1}", "Play {0} with loud set to {1}"),
    _tool("set_light light lamp", "Switch a lamp", [("room where", "words"), ("on state", "boolean")],
          "Set the lamp in the {0} to {1}", "Lamp in {0}: {1}"),
    _tool("create_ticket open_ticket report_bug", "Report a problem", [("summary title", "text"), ("priority level", "choice", LEVELS)],
          "Open a ticket with {1} priority: {0}", "Report {0}, priority {1}"),
    _tool("replace_text edit substitute", "Replace text in a file", [("path file", "path"), ("old before", "text"), ("new after", "text")],
          "In {0} replace {1} with {2}", "Edit {0}: change {1} to {2}"),
    _tool("find_route route directions", "Find the way between cities", [("start from_city origin", "place"), ("end to_city goal", "place")],
          "How do I get from {0} to {1}?", "Find a route from {0} to {1}."),
    _tool("roll_dice dice", "Roll dice", [("count number", "integer"), ("sides faces", "integer")],
          "Roll {0} dice with {1} sides.", "Throw {0} dice of {1} sides."),
    _tool("get_time time_in clock", "Time in a city", [("city place zone", "place")],
          "What time is it in {0}?", "Tell me the time in {0}."),
)  # fmt: skip


@dataclass(frozen=True)
class Named:
    """A tool under the names that one lesson gives it."""

    tool: Tool
    name: str
    keys: tuple[str, ...]

    def schema(self) -> dict[str, Any]:
        properties = {key: _property(p) for key, p in zip(self.keys, self.tool.parameters, strict=True)}
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.tool.description,
                "parameters": {"type": "object", "properties": properties, "required": list(self.keys)},
            },
        }

    def asked(self, chance: random.Random) -> tuple[str, Call]:
        """A request in words, and the call that it means."""
        values = [_value(parameter, chance) for parameter in self.tool.parameters]
        shown = [_shown(p, v, chance) for p, v in zip(self.tool.parameters, values, strict=True)]
        return chance.choice(self.tool.requests).format(*shown), Call(
            self.name, dict(zip(self.keys, values, strict=True))
        )


def _property(parameter: Parameter) -> dict[str, Any]:
    if parameter.kind == "choice":
        return {"type": "string", "enum": list(parameter.choices)}
    return {"type": parameter.kind if parameter.kind in ("integer", "boolean") else "string"}


def _value(parameter: Parameter, chance: random.Random) -> Any:
    match parameter.kind:
        case "integer":
            return chance.randint(0, 99) if chance.random() < 0.8 else chance.randint(100, 9999)
        case "boolean":
            return chance.random() < 0.5
        case "choice":
            return chance.choice(parameter.choices)
        case "place":
            return chance.choice(phrases.PLACES)
        case "person":
            return chance.choice(phrases.PEOPLE)
        case "words":
            return phrases.plain(chance)
        case "path":
            return _path(chance)
        case _:
            return phrases.text_value(chance)


def _path(chance: random.Random) -> str:
    parts = [
        chance.choice((phrases.gibberish(chance), chance.choice(phrases.WORDS[:50])))
        for _ in range(chance.randint(1, 3))
    ]
    return chance.choice(("", "/", "./", "C:\\")) + "/".join(parts) + chance.choice((".txt", ".py", ".md", ""))


def _shown(parameter: Parameter, value: Any, chance: random.Random) -> str:
    if parameter.kind in ("text", "words", "path"):
        return phrases.quoted(value, chance)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _given(chance: random.Random) -> list[Named]:
    tools = chance.sample(LIBRARY, chance.choices((1, 2, 3, 4), (2, 3, 2, 1))[0])
    return [
        Named(tool, chance.choice(tool.names.split()), tuple(chance.choice(p.names.split()) for p in tool.parameters))
        for tool in tools
    ]


def tool_lesson(chance: random.Random) -> Lesson:
    """A request that needs a call, two calls, or none, with or without the calls' results already there."""
    given = _given(chance)
    schemas = [named.schema() for named in given]
    draw = chance.random()
    if draw < 0.1:
        plain = chat_lesson(chance)
        return Lesson("no-tool", plain.messages, plain.content, plain.thinking, tools=schemas)
    wanted = chance.sample(given, 2 if len(given) > 1 and draw < 0.2 else 1)
    requests, calls = zip(*(named.asked(chance) for named in wanted), strict=True)
    messages = [user("\nAlso: ".join(requests))]
    names = " and ".join(call.name for call in calls)
    thinking = f"I call {names}." if chance.random() < 0.5 else None
    lesson = Lesson("tool", messages, "", thinking, list(calls), schemas)
    return _answered(lesson, chance) if draw > 0.88 else lesson


def _answered(lesson: Lesson, chance: random.Random) -> Lesson:
    """The same conversation, after the tools have answered."""
    results = [phrases.plain(chance) for _ in lesson.calls]
    made = {
        "role": "assistant",
        "content": "",
        "reasoning_content": lesson.thinking or "",
        "tool_calls": [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in lesson.calls
        ],
    }
    messages = [*lesson.messages, made, *({"role": "tool", "content": result} for result in results)]
    thinking = "I have the result." if lesson.thinking else None
    return Lesson("result", messages, f"The result is: {'; '.join(results)}.", thinking, tools=lesson.tools)
