"""The known families, and which of them a model uses.

A new family is a table in the file of its kind, and one name here. The order matters: the first table whose signs are
in the chat template wins, so specific signs come before common ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from ingot.errors import BadRequest, nearest_name
from ingot.text.parser.events import PastCall, ToolCallArguments, ToolSchema, call_id_maker, merge_events
from ingot.text.parser.parser import Parser, ThinkingStart
from ingot.text.tool_formats import channels, json_like, python_like, xml_like
from ingot.text.tool_formats.format import Format, ThinkingFormat
from ingot.text.tool_formats.rendering import render_calls
from ingot.text.tool_formats.response_template import UnsupportedResponseTemplate, compile_response_template
from ingot.text.tool_formats.shapes import THINKING_FORMATS

FormatSource = Literal["setting", "template", "response_template", "model_type", "guess"]

PLAIN_FORMAT = Format(name="plain")  # no thinking and no calls: every character is the answer's

FORMATS: tuple[Format, ...] = (
    *(xml_like.MINIMAX_M3, xml_like.MINIMAX_M2, xml_like.SEED_OSS),
    *(channels.MUSE, channels.INKLING),
    *(xml_like.DOTS, xml_like.LONGCAT, xml_like.IQUEST, xml_like.K2_HORIZON),
    json_like.PLAMO3,
    xml_like.STEP3,
    json_like.KIMI_VL,
    xml_like.KIMI_K3,
    *(json_like.APERTUS, json_like.COHERE, json_like.SOLAR_OPEN, json_like.INTERNLM2, json_like.NEMOTRON_NANO),
    xml_like.GIGACHAT35,
    *(json_like.GIGACHAT31, json_like.GIGACHAT3, json_like.FIREFUNCTION),
    *(xml_like.HUNYUAN_V3_SUFFIXED, xml_like.HUNYUAN_V3, xml_like.HUNYUAN_V4),
    *(python_like.GEMMA4, python_like.FUNCTION_GEMMA),
    *(xml_like.GLM, xml_like.KIMI_K2, xml_like.DEEPSEEK_V41, xml_like.DEEPSEEK_V4, xml_like.DEEPSEEK_V32),
    *(xml_like.DEEPSEEK_V3, xml_like.DEEPSEEK_V31),
    channels.HARMONY,
    python_like.LFM2,
    *(json_like.MISTRAL_NAMED, json_like.MISTRAL, json_like.PHI4_MINI, json_like.GRANITE, json_like.FUNCTIONARY),
    json_like.FUNCTIONARY32,
    *(xml_like.MIMO_V2, xml_like.QWEN3_CODER, xml_like.MINICPM5),
    *(json_like.APRIEL, json_like.HUNYUAN_A13B, json_like.MINIMAX_M1, json_like.JAMBA, json_like.GRANITE_20B),
    json_like.XLAM,
    *(python_like.OLMO3, python_like.UI_TARS, python_like.PYTHONIC),
    *(json_like.LLAMA, json_like.ERNIE),
    xml_like.QWEN,
    json_like.HERMES,
    PLAIN_FORMAT,
)
_FORMATS_BY_NAME = {table.name: table for table in FORMATS}
_THINKING_BY_NAME: dict[str, ThinkingFormat | None] = {tags.name: tags for tags in THINKING_FORMATS} | {"none": None}

FORMAT_NAMES = tuple(sorted(_FORMATS_BY_NAME))
THINKING_NAMES = tuple(sorted(_THINKING_BY_NAME))


@dataclass(frozen=True, slots=True)
class FoundFormat:
    """A format, and how it was found. `unused`: why the checkpoint's own response template was not used, where it has
    one that cannot be compiled."""

    format: Format
    source: FormatSource
    unused: str = ""

    @property
    def guessed(self) -> bool:
        """Whether the template did not show it: a model's type does not say what its makers trained it on."""
        return self.source in ("model_type", "guess")


def find_format(chat_template: str | None, model_type: str, response_template: Any = None) -> FoundFormat:
    """The format that a model's chat template shows; without a sign there, that of its `model_type`.

    The checkpoint's own response template comes between the two, and before a table that cannot parse its calls. A
    model of which nothing is known gets Hermes's, which can be taught in a prompt. Thinking tags are detected apart
    from calls, as fine-tunes add them to templates of any family.
    """
    template = chat_template or ""
    source: FormatSource = "template"
    shown = (table for table in FORMATS for group in table.signs if all(sign in template for sign in group))
    found = next(shown, None)
    typed = next((table for table in FORMATS if model_type in table.model_types), None)
    own, unused = _own_format(response_template)
    if own is not None and own.can_call and not (found is not None and _can_read(found, own)):
        return FoundFormat(own, "response_template")
    if found is None:
        source, found = "model_type", typed
    elif typed is not None and typed.refines == found.name:
        found = typed
    if found is None:
        source, found = "guess", json_like.HERMES
    if found.fitted is not None:
        found = found.fitted(found, template)
    thinking = _choose_thinking(template, found)
    if own is not None and own.thinking is not None and not _thinking_shown(template):
        thinking = own.thinking
    return FoundFormat(replace(found, thinking=thinking), source, unused)


def format_by_name(name: str, *, param: str | None = None) -> Format:
    """Raises BadRequest, which lists the known names."""
    if (problem := tool_format_problem(name)) is not None:
        raise BadRequest(problem, param=param)
    return _FORMATS_BY_NAME[name]


def thinking_by_name(name: str, *, param: str | None = None) -> ThinkingFormat | None:
    """The tags of that name, None for `none`. Raises BadRequest, which lists the known names."""
    if (problem := thinking_format_problem(name)) is not None:
        raise BadRequest(problem, param=param)
    return _THINKING_BY_NAME[name]


def tool_format_problem(name: str, meant: str | None = None) -> str | None:
    """What is wrong with a format's name, for checking settings; None if nothing is. `meant` is what it is known to
    mean."""
    return None if name in _FORMATS_BY_NAME else _unknown_name("tool format", name, FORMAT_NAMES, meant)


def thinking_format_problem(name: str, meant: str | None = None) -> str | None:
    return None if name in _THINKING_BY_NAME else _unknown_name("thinking format", name, THINKING_NAMES, meant)


def _unknown_name(what: str, name: str, names: Iterable[str], meant: str | None) -> str:
    near = meant or nearest_name(name, names)
    hint = f" Did you mean {near}?" if near else ""
    return f"There is no {what} {name!r}.{hint} Known: {', '.join(names)}."


def _own_format(response_template: Any) -> tuple[Format | None, str]:
    """The compiled response template of a checkpoint, or why it cannot be compiled."""
    if response_template is None:
        return None, ""
    try:
        return compile_response_template(response_template), ""
    except UnsupportedResponseTemplate as reason:
        return None, str(reason)


def _can_read(table: Format, own: Format) -> bool:
    """Whether a table parses the calls that another one renders: then it covers the family, and more of it."""
    call = PastCall("f", {"a": "b", "n": 1})
    tool = ToolSchema(call.name, {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}})
    parser = Parser(table, tools=[tool], thinking=ThinkingStart.UNOPENED, ids=call_id_maker(table.ids))
    events = merge_events([*parser.push(render_calls(own, [call])), *parser.flush()])
    written = [event.fragment for event in events if isinstance(event, ToolCallArguments)]
    return len(written) == 1 and json.loads(written[0]) == call.arguments


def _thinking_shown(template: str) -> list[ThinkingFormat]:
    """The thinking tags that a template writes or looks for."""
    return [tags for tags in THINKING_FORMATS if tags.open in template or tags.close in template]


def _choose_thinking(template: str, found: Format) -> ThinkingFormat | None:
    if found.channels is not None:
        return None
    shown = _thinking_shown(template)
    if found.thinking is not None and (not shown or found.thinking in shown):
        return found.thinking
    return shown[0] if shown else found.thinking
