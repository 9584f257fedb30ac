"""Thinking: what a request, the settings and the model's template come to.

Decided here alone, so that what is rendered, decoded and parsed cannot disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from ingot.protocol.chat.ask import Ask, FieldNames, ThinkingOptions
from ingot.protocol.schema.template_variables import SWITCHES
from ingot.protocol.served import Served
from ingot.text.parser.parser import ThinkingStart
from ingot.text.tool_formats.format import Format

EFFORT_BUDGETS: Final[Mapping[str, int]] = {"minimal": 256, "low": 1024, "medium": 4096}
"""Tokens of thinking that an effort allows where the model's template does not read one; more effort has no limit."""
EFFORT_VARIABLE: Final = "reasoning_effort"


def thinks(served: Served, format: Format) -> bool:
    """Whether the model is known to think: its template writes the tags, or its answers have channels."""
    if format.channels is not None:
        return True
    template = served.tokenizer.template
    tags = format.thinking
    return template is not None and tags is not None and (tags.open in template.source or tags.close in template.source)


def switched(served: Served, ask: Ask) -> Ask:
    """A variable that switches thinking, where the template reads none of that name, says what the field would."""
    given = ask.variables or {}
    unread = {name: given[name] for name in SWITCHES if name in given and name not in served.terms.template_variables}
    if not unread:
        return ask
    rest, thinking = {name: value for name, value in given.items() if name not in unread}, ask.thinking
    if thinking.enabled is None and thinking.effort is None:
        [(name, enabled), *_] = unread.items()
        fields = {**thinking.fields, "enabled": f"chat_template_kwargs.{name}"}
        thinking = replace(thinking, enabled=enabled, fields=fields)
    return replace(ask, variables=rest or None, thinking=thinking)


def settled(served: Served, thinking: ThinkingOptions) -> ThinkingOptions:
    """What the request says, filled in with what the server's settings say."""
    if thinking.effort == "none":
        thinking = replace(thinking, enabled=False)
    elif thinking.enabled is None and (thinking.effort is not None or thinking.budget):
        thinking = replace(thinking, enabled=True)
    if thinking.budget == 0:
        thinking = replace(thinking, enabled=False)
    if thinking.enabled is None:
        thinking = replace(thinking, enabled=served.thinking)
    if thinking.budget is None and thinking.effort is None:
        thinking = replace(thinking, budget=served.thinking_budget)
    return thinking


def template_variables(served: Served, ask: Ask, thinking: ThinkingOptions) -> dict[str, Any]:
    """For the template: what the request sets by name, then what it says of thinking, then what the settings say."""
    switched = _thinking_variables(served, thinking)
    asked_for = switched if ask.thinking.given else {}
    return switched | dict(served.variables) | asked_for | dict(ask.variables or {})


def _thinking_variables(served: Served, thinking: ThinkingOptions) -> dict[str, Any]:
    """Variables of the template that switch thinking."""
    read = served.terms.template_variables
    found: dict[str, Any] = {}
    if thinking.enabled is not None:
        found |= {name: thinking.enabled for name in SWITCHES if name in read}
    if thinking.effort not in (None, "none") and EFFORT_VARIABLE in read:
        # Templates know the three levels that models were trained with.
        found[EFFORT_VARIABLE] = {"minimal": "low", "xhigh": "high", "max": "high"}.get(
            str(thinking.effort), thinking.effort
        )
    return found


def closed_thinking(served: Served, format: Format, thinking: ThinkingOptions, ask: Ask, text: str) -> str:
    """What a prompt needs at its end so that a model whose template has no switch answers without thinking."""
    tags = format.thinking
    if thinking.enabled is not False or tags is None or ask.ending != "opened":
        return ""
    tags = tags.ending(text)
    if ThinkingStart.after(text, tags) is ThinkingStart.OPENED:
        return f"\n{tags.close}\n\n" if not text.endswith("\n") else f"{tags.close}\n\n"
    switched = any(name in served.terms.template_variables for name in SWITCHES)
    closed = text.rstrip().endswith(tags.close)
    return "" if switched or closed or not thinks(served, format) else f"{tags.open}\n\n{tags.close}\n\n"


def may_think(served: Served, format: Format, thinking: ThinkingOptions, start: ThinkingStart, prompt: str) -> bool:
    if start is ThinkingStart.OPENED:
        return True
    closed = format.thinking is not None and prompt.rstrip().endswith(format.thinking.close)
    return thinking.enabled is not False and not closed and thinks(served, format)


def thinking_budget(served: Served, thinking: ThinkingOptions) -> int | None:
    if thinking.budget is not None or EFFORT_VARIABLE in served.terms.template_variables:
        return thinking.budget
    return EFFORT_BUDGETS.get(thinking.effort or "")


def unheeded(asked: ThinkingOptions, names: FieldNames, *, can_think: bool) -> tuple[str, ...]:
    """The fields that could have no effect: on a model that does not think, or against `none`, which settles it."""
    if asked.given and not can_think:
        return tuple(dict.fromkeys(asked.fields.values())) or (names.thinking,)
    if asked.effort == "none" and asked.enabled and "enabled" in asked.fields:
        return (asked.fields["enabled"],)
    return ()
