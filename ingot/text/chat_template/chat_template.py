"""A model's chat template: messages in, the prompt's text out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError

from ingot.errors import BadRequest, Cancelled, IngotError, ModelError
from ingot.text.chat_template.messages import Message, prepare_messages
from ingot.text.chat_template.render_limits import (
    RenderBudget,
    RenderLimitExceeded,
    RenderLimits,
    TemplateRefusal,
    current_budget,
)
from ingot.text.chat_template.sandbox import (
    RenderedPrompt,
    RenderTrace,
    Sandbox,
    TemplateHistory,
    TraceRewriter,
    current_trace,
)
from ingot.text.chat_template.traits import TemplateTraits, probe_traits

_RENDER_VARIABLES = ("messages", "tools", "add_generation_prompt")
_LONGEST_REASON = 1000
_PLAIN_QUESTION = "Hi?"
_BEGINNING = "{{- bos_token or eos_token or '' -}}"
_MOLMO = (
    _BEGINNING
    + """
{%- for message in messages -%}
    {%- if message['role'] != ('assistant' if loop.index0 % 2 else 'user') -%}
        {{- raise_exception('Roles must be user and assistant in turns.') -}}
    {%- endif -%}
    {%- if message['content'] is string -%}
        {%- set text = message['content'] -%}
    {%- else -%}
        {%- for part in message['content'] if part['type'] == 'image' -%}{{- '<|image|>' -}}{%- endfor -%}
        {%- set text = message['content'] | selectattr('text', 'defined') | map(attribute='text') | join('\n') -%}
    {%- endif -%}
    {{- ' ' + message['role'].capitalize() + ': ' + (text.lstrip() if message['role'] == 'assistant' else text) -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- ' Assistant:' -}}{%- endif -%}"""
)


def template_of_family(model_type: str, stated: str | None) -> str | None:
    """The template of a family whose makers' processor writes prompts otherwise than the template that a checkpoint
    states: Molmo's puts images before their message, and a token that begins the text before all; so does Molmo 2's.
    None for other families."""
    if model_type == "molmo" and "image" not in (stated or ""):
        return _MOLMO
    return _BEGINNING + stated if model_type == "molmo2" and stated and "bos_token" not in stated else None


class ChatTemplate:
    """Compiled once; any number of threads may render.

    A template sees `messages`, `tools` (None when there are none), `add_generation_prompt`, the model's named special
    tokens (`bos_token`, `eos_token`, ...), and the caller's `extra`: nothing else. `tool_source`, where a model has
    one, replaces `source` when there are tools. Raises ModelError for a source that cannot be compiled or uses what a
    chat template may not.
    """

    def __init__(
        self,
        source: str,
        *,
        tool_source: str | None = None,
        tokens: Mapping[str, str] | None = None,
        limits: RenderLimits | None = None,
    ) -> None:
        self.source = source if tool_source is None else f"{source}{tool_source}"
        self._limits = limits or RenderLimits()
        self._tokens = dict(tokens or {})
        sandbox = Sandbox()
        self._plain = _CompiledTemplate(sandbox, source, self._tokens, self._limits)
        self._with_tools = self._plain
        if tool_source is not None:
            self._with_tools = _CompiledTemplate(sandbox, tool_source, self._tokens, self._limits)

    def check(self) -> None:
        """Raises ModelError, in words, where the template cannot render one plain question."""
        problem = "does not show a plain question"
        try:
            if _PLAIN_QUESTION in self.render([{"role": "user", "content": _PLAIN_QUESTION}]):
                return
        except IngotError as error:
            problem = f"cannot render a plain question: {error.message.rstrip('.')}"
        raise ModelError(f"The model's chat template {problem}. Choose another one with --chat-template FILE.")

    @property
    def variables(self) -> frozenset[str]:
        """The names that the template reads: an `extra` that is not among them has no effect."""
        return self._plain.variables | self._with_tools.variables

    @property
    def traits(self) -> TemplateTraits:
        return self._plain.traits

    def traits_for(self, tools: bool) -> TemplateTraits:
        """The traits that hold for a conversation with tools, or without."""
        return self._with_tools.traits if tools and self._with_tools.traits.tools else self._plain.traits

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text, as the template's authors meant it. Messages need no preparing. Raises as `rendered`."""
        options: dict[str, Any] = {"tools": tools, "add_generation_prompt": add_generation_prompt, "extra": extra}
        return self.rendered(messages, history="official", **options).text

    def rendered(
        self,
        messages: Sequence[Message],
        *,
        history: TemplateHistory,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """The prompt's text, and which message each part of it belongs to.

        Raises BadRequest where the template refuses the messages (in its own words), cannot read them, or would take
        more than its limits allow; ModelError where it tries to leave its sandbox.
        """
        program = self._with_tools if tools else self._plain
        for name in extra or ():
            if name in _RENDER_VARIABLES or name in self._tokens:
                raise BadRequest(
                    f"The chat template's variable {name!r} cannot be set by a request.", param="chat_template_kwargs"
                )
        variables = {
            **(extra or {}),
            "messages": prepare_messages(messages, program.traits),
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt,
        }
        return program.run(variables, history)


class _RenderTooLarge(BadRequest):
    """Beyond the limits, which no short conversation is in a template that can be served."""


class _CompiledTemplate:
    """One compiled template, with what was found out about it."""

    def __init__(self, sandbox: Sandbox, source: str, tokens: Mapping[str, str], limits: RenderLimits) -> None:
        self._tokens = tokens
        self._limits = limits
        if len(source) > limits.source:
            raise ModelError(f"The chat template is longer than {limits.source} characters.")
        with _during(current_budget, RenderBudget(limits)), _compile_errors():
            tree = sandbox.parse(source)
            self.variables = frozenset(meta.find_undeclared_variables(tree))
            literals = {const.value for const in tree.find_all(nodes.Const) if isinstance(const.value, str)}
            literals |= {each.attr for each in tree.find_all(nodes.Getattr)}
            self._generate = sandbox.compiled(TraceRewriter(tree).visit(tree))
        # All trials together may take what one rendering may.
        with _during(current_budget, RenderBudget(limits)):
            self.traits = probe_traits(self._probe, literals)

    def run(self, variables: Mapping[str, Any], history: TemplateHistory) -> RenderedPrompt:
        with _during(current_budget, RenderBudget(self._limits)):
            return self._rendered(variables, history)

    def _rendered(self, variables: Mapping[str, Any], history: TemplateHistory) -> RenderedPrompt:
        trace = RenderTrace(variables["messages"], history)
        with _render_errors(), _during(current_trace, trace):
            return trace.read(_collect_output(self._generate({**self._tokens, **variables}), self._limits.output))

    def _probe(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str:
        """The stable text of a short conversation, empty where the template cannot render it."""
        try:
            variables = {"messages": messages, "tools": tools, "add_generation_prompt": False}
            return self._rendered(variables, "stable").text
        except _RenderTooLarge as error:
            raise ModelError(error.message) from error
        except IngotError:
            return ""


@contextmanager
def _during(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def _compile_errors() -> Iterator[None]:
    try:
        yield
    except TemplateSyntaxError as error:
        reason = (error.message or "").rstrip(".")
        raise ModelError(f"The chat template does not compile: {reason} (line {error.lineno}).") from error
    except RenderLimitExceeded as error:
        raise ModelError(f"The chat template is refused: {error}.") from error
    # Python's compiler has its own limits on nesting and numbers, and constants are computed while compiling.
    except Exception as error:
        raise ModelError(f"The chat template does not compile: {_error_reason(error)}.") from error


@contextmanager
def _render_errors() -> Iterator[None]:
    try:
        yield
    except Cancelled:
        raise
    except TemplateRefusal as error:
        text = str(error) or "The chat template refuses these messages."
        raise BadRequest(text[:_LONGEST_REASON], param="messages") from error
    except RenderLimitExceeded as error:
        raise _RenderTooLarge(f"The chat template asks for too much: {error}.", param="messages") from error
    except SecurityError as error:
        raise ModelError(f"The model's chat template is not allowed what it tries: {_error_reason(error)}.") from error
    # A template can raise whatever Python raises for the operations it writes down.
    except Exception as error:
        text = f"The chat template cannot render these messages: {_error_reason(error)}."
        raise BadRequest(text, param="messages") from error


def _error_reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it nests too deeply"
    return (str(error) or type(error).__name__)[:_LONGEST_REASON].rstrip(".")


def _collect_output(pieces: Iterator[str], limit: int) -> str:
    pieces_read, size = [], 0
    for piece in pieces:
        pieces_read.append(piece)
        size += len(piece)
        if size > limit:
            raise RenderLimitExceeded(f"its text is longer than {limit} characters")
    return "".join(pieces_read)
