"""The known families, and how to tell which of them a model speaks.

A new family is a table in the file of its kind, and one line here. The order decides: the first table whose signs are
in the chat template wins, so the telling signs come before the common ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from ingot.errors import BadRequest, nearest_name
from ingot.text.parser.events import PastCall, ToolCallArguments, ToolSchema, call_id_maker, merge_events
from ingot.text.parser.parser import Parser, ThinkingStart
from ingot.text.tool_formats.channels import HARMONY, INKLING, MUSE
from ingot.text.tool_formats.format import Format, ThinkingFormat
from ingot.text.tool_formats.json_like import (
    APERTUS,
    APRIEL,
    COHERE,
    ERNIE,
    FIREFUNCTION,
    FUNCTIONARY,
    FUNCTIONARY32,
    GIGACHAT3,
    GIGACHAT31,
    GRANITE,
    GRANITE_20B,
    HERMES,
    HUNYUAN_A13B,
    INTERNLM2,
    JAMBA,
    KIMI_VL,
    LLAMA,
    MINIMAX_M1,
    MISTRAL,
    MISTRAL_NAMED,
    NEMOTRON_NANO,
    PHI4_MINI,
    PLAMO3,
    SOLAR_OPEN,
    XLAM,
)
from ingot.text.tool_formats.python_like import FUNCTION_GEMMA, GEMMA4, LFM2, OLMO3, PYTHONIC, UI_TARS
from ingot.text.tool_formats.rendering import render_calls
from ingot.text.tool_formats.response_template import UnsupportedResponseTemplate, compile_response_template
from ingot.text.tool_formats.shapes import THINKING_FORMATS
from ingot.text.tool_formats.xml_like import (
    DEEPSEEK_V3,
    DEEPSEEK_V4,
    DEEPSEEK_V31,
    DEEPSEEK_V32,
    DEEPSEEK_V41,
    DOTS,
    GIGACHAT35,
    GLM,
    HUNYUAN_V3,
    HUNYUAN_V3_SUFFIXED,
    HUNYUAN_V4,
    IQUEST,
    K2_HORIZON,
    KIMI_K2,
    KIMI_K3,
    LONGCAT,
    MIMO_V2,
    MINICPM5,
    MINIMAX_M2,
    MINIMAX_M3,
    QWEN,
    QWEN3_CODER,
    SEED_OSS,
    STEP3,
)

FormatSource = Literal["setting", "template", "response_template", "model_type", "guess"]

PLAIN_FORMAT = Format(name="plain")
"""No thinking and no calls: every character is the answer's."""

FORMATS: tuple[Format, ...] = (
    MINIMAX_M3,
    MINIMAX_M2,
    SEED_OSS,
    MUSE,
    INKLING,
    DOTS,
    LONGCAT,
    IQUEST,
    K2_HORIZON,
    PLAMO3,
    STEP3,
    KIMI_VL,
    KIMI_K3,
    APERTUS,
    COHERE,
    SOLAR_OPEN,
    INTERNLM2,
    NEMOTRON_NANO,
    GIGACHAT35,
    GIGACHAT31,
    GIGACHAT3,
    FIREFUNCTION,
    HUNYUAN_V3_SUFFIXED,
    HUNYUAN_V3,
    HUNYUAN_V4,
    GEMMA4,
    FUNCTION_GEMMA,
    GLM,
    KIMI_K2,
    DEEPSEEK_V41,
    DEEPSEEK_V4,
    DEEPSEEK_V32,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    HARMONY,
    LFM2,
    MISTRAL_NAMED,
    MISTRAL,
    PHI4_MINI,
    GRANITE,
    FUNCTIONARY,
    FUNCTIONARY32,
    MIMO_V2,
    QWEN3_CODER,
    MINICPM5,
    APRIEL,
    HUNYUAN_A13B,
    MINIMAX_M1,
    JAMBA,
    GRANITE_20B,
    XLAM,
    OLMO3,
    UI_TARS,
    PYTHONIC,
    LLAMA,
    ERNIE,
    QWEN,
    HERMES,
    PLAIN_FORMAT,
)
_FORMATS_BY_NAME = {known.name: known for known in FORMATS}
_THINKING_BY_NAME: dict[str, ThinkingFormat | None] = {known.name: known for known in THINKING_FORMATS} | {"none": None}

FORMAT_NAMES = tuple(sorted(_FORMATS_BY_NAME))
THINKING_NAMES = tuple(sorted(_THINKING_BY_NAME))


@dataclass(frozen=True, slots=True)
class FoundFormat:
    """A format, and what told that a model speaks it. A `guess` was told by nothing. `unused`: why the checkpoint's own
    response template was not asked, where it has one that no table can be made of."""

    format: Format
    source: FormatSource
    unused: str = ""

    @property
    def guessed(self) -> bool:
        """Whether nobody told: a model's type does not say what its makers taught it."""
        return self.source in ("model_type", "guess")


def find_format(chat_template: str | None, model_type: str, response_template: Any = None) -> FoundFormat:
    """The format that a model's chat template shows it to speak; without a sign there, its `model_type`'s.

    The checkpoint's own response template comes between the two, and before a table that cannot read what it says.
    A model of which neither is known gets Hermes's, the one that we can teach in a prompt. The tags of thinking are
    looked for apart from the calls, as fine-tunes add them to templates of any family.
    """
    template = chat_template or ""
    source: FormatSource = "template"
    found, typed = _format_by_signs(template), _format_by_model_type(model_type)
    own, unused = _own_format(response_template)
    if own is not None and own.can_call and not (found is not None and _can_read(found, own)):
        return FoundFormat(own, "response_template")
    if found is None:
        source, found = "model_type", typed
    elif typed is not None and typed.refines == found.name:
        found = typed
    if found is None:
        source, found = "guess", HERMES
    if found.fitted is not None:
        found = found.fitted(found, template)
    thinking = _choose_thinking(template, found)
    if own is not None and own.thinking is not None and not _thinking_shown(template):
        thinking = own.thinking
    return FoundFormat(replace(found, thinking=thinking), source, unused)


def detect_format(chat_template: str | None, model_type: str) -> Format:
    return find_format(chat_template, model_type).format


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


def tool_format_problem(name: str) -> str | None:
    """What is wrong with a format's name, for settings to check; None if nothing is."""
    return None if name in _FORMATS_BY_NAME else _unknown_name("tool format", name, FORMAT_NAMES)


def thinking_format_problem(name: str) -> str | None:
    return None if name in _THINKING_BY_NAME else _unknown_name("thinking format", name, THINKING_NAMES)


def _unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    near = nearest_name(name, known)
    hint = f" Did you mean {near}?" if near else ""
    return f"There is no {what} {name!r}.{hint} Known: {', '.join(known)}."


def _format_by_signs(template: str) -> Format | None:
    for known in FORMATS:
        if any(all(sign in template for sign in group) for group in known.signs):
            return known
    return None


def _format_by_model_type(model_type: str) -> Format | None:
    return next((known for known in FORMATS if model_type in known.model_types), None)


def _own_format(response_template: Any) -> tuple[Format | None, str]:
    """The table that a checkpoint's response template makes, or why it makes none."""
    if response_template is None:
        return None, ""
    try:
        return compile_response_template(response_template), ""
    except UnsupportedResponseTemplate as reason:
        return None, str(reason)


def _can_read(table: Format, own: Format) -> bool:
    """Whether a table reads what another one writes: then it knows the family, and more of it."""
    call = PastCall("f", {"a": "b", "n": 1})
    tool = ToolSchema(call.name, {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}})
    parser = Parser(table, tools=[tool], thinking=ThinkingStart.UNOPENED, ids=call_id_maker(table.ids))
    events = merge_events([*parser.push(render_calls(own, [call])), *parser.flush()])
    written = [event.fragment for event in events if isinstance(event, ToolCallArguments)]
    return len(written) == 1 and json.loads(written[0]) == call.arguments


def _thinking_shown(template: str) -> list[ThinkingFormat]:
    """The tags of thinking that a template writes or looks for."""
    return [known for known in THINKING_FORMATS if known.open in template or known.close in template]


def _choose_thinking(template: str, found: Format) -> ThinkingFormat | None:
    if found.channels is not None:
        return None
    shown = _thinking_shown(template)
    if found.thinking is not None and (not shown or found.thinking in shown):
        return found.thinking
    return shown[0] if shown else found.thinking
