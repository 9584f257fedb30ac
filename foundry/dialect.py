"""Lessons as text: the prompt that the chat template makes, and the completion that the model should write.

The two dialects differ in how a tool call is written: `xml` as Qwen3.5 does, `json` as Qwen3 (Hermes) does.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2

from foundry.lesson import Call, Lesson

TEMPLATES = Path(__file__).parent / "templates"
DIALECTS = ("xml", "json")
TURN_END = "<|im_end|>"


def template_text(dialect: str) -> str:
    return (TEMPLATES / f"{dialect}.jinja").read_text()


def prompt(lesson: Lesson, dialect: str) -> str:
    """The prompt, up to where the model goes on."""
    return _template(dialect).render(
        messages=lesson.messages,
        tools=lesson.tools,
        add_generation_prompt=True,
        enable_thinking=lesson.thinking is not None,
    )


def completion(lesson: Lesson, dialect: str) -> str:
    """All that the model should write after the prompt, its end of turn included."""
    thought = "" if lesson.thinking is None else f"{lesson.thinking}\n</think>\n\n"
    calls = "\n".join(_call(call, dialect) for call in lesson.calls)
    between = "\n" if lesson.content and calls else ""
    return f"{thought}{lesson.content}{between}{calls}{TURN_END}"


def finished(lesson: Lesson, dialect: str) -> str:
    """The whole conversation as the template renders it once the answer is a message like the others."""
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": lesson.content,
        "reasoning_content": lesson.thinking or "",
        "tool_calls": [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in lesson.calls
        ],
    }
    return _template(dialect).render(messages=[*lesson.messages, answer], tools=lesson.tools)


def _call(call: Call, dialect: str) -> str:
    if dialect == "json":
        return f'<tool_call>\n{{"name": {_json(call.name)}, "arguments": {_json(call.arguments)}}}\n</tool_call>'
    parts = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else _json(value)}\n</parameter>\n"
        for key, value in call.arguments.items()
    )
    return f"<tool_call>\n<function={call.name}>\n{parts}</function>\n</tool_call>"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


@cache
def _template(dialect: str) -> jinja2.Template:
    world = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    world.filters["tojson"] = _json
    world.globals["raise_exception"] = _refuse
    return world.from_string(template_text(dialect))
