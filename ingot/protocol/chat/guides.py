"""What an answer is held to: the form that was asked for, the calls that it may or must make, a budget for thinking."""

from __future__ import annotations

from ingot.protocol.chat.ask import (
    Ask,
    Choice,
    FieldNames,
    ForcedTool,
    JsonObject,
    JsonSchema,
    Lark,
    OutputFormat,
    Regex,
    StructuralTags,
    ThinkingOptions,
    Tool,
)
from ingot.protocol.chat.thinking import thinking_budget, thinks
from ingot.protocol.served import Served
from ingot.text.grammar.calls import ForcedCall, GuidedTool
from ingot.text.grammar.matcher import GuidePlan
from ingot.text.parser.parser import ThinkingStart
from ingot.text.tool_formats.format import Format


def answer_guide(
    served: Served,
    format: Format,
    tools: tuple[Tool, ...],
    ask: Ask,
    thinking: ThinkingOptions,
    start: ThinkingStart,
    may_think: bool,
    names: FieldNames,
) -> tuple[GuidePlan | None, tuple[str, ...]]:
    """The plan, and the tools whose schemas calls are not held to though they would be."""
    output = _output_guide(served, ask.output, names)
    calls = _calls_guide(served, format, tools, ask, names)
    budget = thinking_budget(served, thinking) if thinks(served, format) else None
    begun: GuidePlan | None = None
    unheld: tuple[str, ...] = ()
    if (
        tools
        and calls is None
        and output is None
        and (served.holds_calls if ask.hold_calls is None else ask.hold_calls)
    ):
        begun, unheld = served.grammars.begun_calls(format, _guided(tools), start, parallel=ask.parallel)
    if calls is None and output is None and budget is None:
        return begun, unheld
    if output is None or ask.choice != "auto":  # a forced call leaves no room for anything else
        output, calls = calls or output, None
    plan = served.grammars.answer(output, format, start, calls=calls, begun=begun, budget=budget, may_think=may_think)
    return plan, unheld


def _output_guide(served: Served, output: OutputFormat | None, names: FieldNames) -> GuidePlan | None:
    grammars, param = served.grammars, names.output
    match output:
        case None:
            return None
        case JsonObject():
            return grammars.json_object()
        case JsonSchema():
            return grammars.json_schema(output.schema, param=param)
        case Regex():
            return grammars.regex(output.pattern, param=param)
        case Choice():
            return grammars.choice(output.options, param=param)
        case Lark():
            return grammars.lark(output.grammar, param=param)
        case StructuralTags():
            return grammars.structural_tags(output.tags, output.triggers, param=param)


def _calls_guide(
    served: Served, format: Format, tools: tuple[Tool, ...], ask: Ask, names: FieldNames
) -> GuidePlan | None:
    if not tools:
        return None
    choice = ForcedCall(ask.choice.name) if isinstance(ask.choice, ForcedTool) else ask.choice
    assert choice != "none"
    if ask.output is not None and choice == "auto":
        choice = "required"  # where the answer is held to something, so is the call that may come instead
    return served.grammars.tools(format, _guided(tools), choice, parallel=ask.parallel, param=names.tools)


def _guided(tools: tuple[Tool, ...]) -> list[GuidedTool]:
    return [GuidedTool(tool.name, tool.parameters, tool.strict) for tool in tools]
