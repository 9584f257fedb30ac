"""Tools for a chat template that does not know of them: described in the system message, past calls as text.

What is taught is the form that the answer will be parsed in. A template that knows a part of it (how calls are written,
say, but not what tools there are) is left to do that part itself.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, islice, takewhile
from typing import Any, Final

from ingot.errors import Unsupported
from ingot.text.chat_template.messages import TemplateMessage, content_as_text, media_in_messages
from ingot.text.chat_template.traits import REASONING_KEYS, TemplateTraits
from ingot.text.parser.arguments import arguments_as_object
from ingot.text.parser.events import PastCall
from ingot.text.prompt.canonical import reasoning_of, visible_text
from ingot.text.tool_formats.format import Format
from ingot.text.tool_formats.rendering import render_calls

_EXAMPLE_CALL: Final = PastCall("function_name", {"argument_name": "value"}, "functions.function_name:0")
_TOOL_LESSON: Final = """# Tools

You can call functions. Each line between the tags describes one, its parameters as a JSON schema:
<tools>
{tools}
</tools>

To call a function, write this, with its own name and arguments, once for each call:
{example}

Write nothing after your calls. Their results come with the next message."""


def teach_tools(
    lines: Sequence[TemplateMessage],
    tools: Sequence[Mapping[str, Any]],
    traits: TemplateTraits,
    format: Format,
    cached: Collection[int] = (),
) -> tuple[list[TemplateMessage], tuple[str, ...]]:
    """The lines with whatever the template would not show of tools written into them, and the names of these changes.
    `cached` messages are in the prompt as they were generated, whatever the template makes of them.

    Raises Unsupported for tools where the model's format has no calls.
    """
    done: list[str] = []
    changed = list(lines)
    if tools and not traits.tools:
        changed = _with_lesson(changed, _write_tool_lesson(tools, format))
        done.append("tools-taught")
    if not traits.text_with_reasoning and any(map(_has_text_and_thinking, changed)):
        changed = [_move_text_into_thinking(line) if _has_text_and_thinking(line) else line for line in changed]
        done.append("text-joined-to-thinking")
    if not traits.calls_with_text and any(_has_text_and_calls(line, cached) for line in changed):
        changed = [
            part
            for line in changed
            for part in (split_text_from_calls(line) if _has_text_and_calls(line, cached) else [line])
        ]
        done.append("text-separated-from-calls")
    if not traits.several_calls and any(len(line.message.get("tool_calls") or ()) > 1 for line in changed):
        changed = _split_calls(changed)
        done.append("calls-separated")
    if not traits.calls and any(line.message.get("tool_calls") for line in changed):
        changed = [_write_calls_as_text(line, format) for line in changed]
        done.append("calls-written")
    if not traits.results and any(line.role == "tool" for line in changed):
        changed = _write_results_as_text(changed)
        done.append("results-told")
    return changed, tuple(done)


def _write_tool_lesson(tools: Sequence[Mapping[str, Any]], format: Format) -> str:
    if not format.can_call:
        raise Unsupported("tools: the served model has no form for tool calls.", param="tools")
    described = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    return _TOOL_LESSON.format(tools=described, example=render_calls(format, [_EXAMPLE_CALL]))


def _with_lesson(lines: list[TemplateMessage], lesson: str) -> list[TemplateMessage]:
    if lines and lines[0].role in ("system", "developer"):
        first, *rest = lines
        content = first.message.get("content") or ""
        if isinstance(content, str):
            content = f"{content}\n\n{lesson}" if content else lesson
        else:
            content = [*content, {"type": "text", "text": f"\n\n{lesson}"}]
        return [TemplateMessage({**first.message, "content": content}, first.sources), *rest]
    return [TemplateMessage({"role": "system", "content": lesson}, ()), *lines]


def _has_text_and_thinking(line: TemplateMessage) -> bool:
    message = line.message
    return bool(message.get("tool_calls") and reasoning_of(message) and visible_text(message))


def _move_text_into_thinking(line: TemplateMessage) -> TemplateMessage:
    """Text next to a call, at the end of the thinking, for a template that shows only one of them."""
    reasoning = f"{reasoning_of(line.message)}\n\n{visible_text(line.message)}"
    others = {key: value for key, value in line.message.items() if key not in REASONING_KEYS}
    return replace(line, message={**others, "content": None, "reasoning_content": reasoning})


def _has_text_and_calls(line: TemplateMessage, cached: Collection[int]) -> bool:
    is_cached = any(source in cached for source in line.sources)
    return bool(not is_cached and line.message.get("tool_calls") and visible_text(line.message))


def split_text_from_calls(line: TemplateMessage) -> list[TemplateMessage]:
    """Text and calls in two messages, for a template that leaves out calls next to text."""
    calls = {"role": line.role, "content": None, "tool_calls": line.message["tool_calls"]}
    text = {key: value for key, value in line.message.items() if key != "tool_calls"}
    return [replace(line, message=text), replace(line, message=calls)]


def _split_calls(lines: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """Each call in a message of its own, followed by its result, for a template that shows one call of a message."""
    apart: list[TemplateMessage] = []
    at = 0
    while at < len(lines):
        line, at = lines[at], at + 1
        calls = line.message.get("tool_calls") or ()
        if len(calls) < 2:
            apart.append(line)
            continue
        results = list(takewhile(lambda each: each.role == "tool", islice(lines, at, None)))
        at += len(results)
        for call in calls:
            apart.append(replace(line, message={**line.message, "tool_calls": [call]}))
            line = replace(line, message={"role": line.role, "content": None})  # the text stays with the first
            apart += [each for each in results if each.message.get("tool_call_id") == call.get("id")]
        ids = {call.get("id") for call in calls}
        apart += [each for each in results if each.message.get("tool_call_id") not in ids]
    return apart


def _write_calls_as_text(line: TemplateMessage, format: Format) -> TemplateMessage:
    calls = line.message.get("tool_calls")
    if not calls:
        return line
    made = [_past_call(call) for call in calls]
    # A model whose format has no calls may go on after one that had.
    plain = (json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False) for call in made)
    written = render_calls(format, made) if format.can_call else "\n".join(plain)
    content = line.message.get("content") or ""
    others = {key: value for key, value in line.message.items() if key != "tool_calls"}
    if isinstance(content, str):
        return TemplateMessage({**others, "content": f"{content}\n{written}" if content else written}, line.sources)
    return TemplateMessage({**others, "content": [*content, {"type": "text", "text": f"\n{written}"}]}, line.sources)


def _past_call(call: Mapping[str, Any]) -> PastCall:
    function = call.get("function") or {}
    return PastCall(str(function.get("name")), arguments_as_object(function.get("arguments")), call.get("id"))


def _write_results_as_text(lines: list[TemplateMessage]) -> list[TemplateMessage]:
    """Results that follow one another make one message, as the calls they answer did."""
    changed: list[TemplateMessage] = []
    for results, group in groupby(lines, lambda line: line.role == "tool"):
        messages = list(group)
        changed += [_results_message(messages)] if results else messages
    return changed


def _results_message(results: list[TemplateMessage]) -> TemplateMessage:
    sources = tuple(source for line in results for source in line.sources)
    if media_in_messages([line.message for line in results]):
        parts = [part for line in results for part in _result_parts(line.message["content"])]
        return TemplateMessage({"role": "user", "content": parts}, sources)
    texts = [f"<tool_response>\n{content_as_text(line.message.get('content'))}\n</tool_response>" for line in results]
    return TemplateMessage({"role": "user", "content": "\n".join(texts)}, sources)


def _result_parts(content: Any) -> list[Any]:
    """A result with images in it, which stay where they are."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content_as_text(content)}]
    before, after = ({"type": "text", "text": text} for text in ("<tool_response>\n", "\n</tool_response>\n"))
    return [before, *parts, after]
