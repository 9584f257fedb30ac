"""From a conversation to its prompt: messages made canonical and put in order, rendered, and assembled into tokens.

In the stable history, the same conversation and one more turn give the same tokens and a tail: a cached answer stands
there as it was generated, between the opening it had and what the template puts after an answer; every other message is
rendered the same whatever follows it. The official history is the template's own, encoded as one text.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ingot.errors import BadRequest, Unsupported
from ingot.text.chat_template.chat_template import ChatTemplate
from ingot.text.chat_template.messages import TemplateMessage, content_as_text, media_in_messages, order_messages
from ingot.text.chat_template.sandbox import TemplateHistory, TextRun, ThinkingContent
from ingot.text.chat_template.traits import TemplateTraits
from ingot.text.parser.arguments import dump_arguments
from ingot.text.prompt.answer_cache import AnswerCache, CachedAnswer
from ingot.text.prompt.assembly import EncodingCache, MediaPlaceholders, Prompt, PromptAssembler, TokenOwner
from ingot.text.prompt.canonical import canonical_messages, conversation_keys, ordered_tools, reasoning_of, visible_text
from ingot.text.prompt.tool_prompt import split_text_from_calls, teach_tools
from ingot.text.tokenizer.special_tokens import ControlTokenQuoting, ControlTokens
from ingot.text.tool_formats.format import Format, ThinkingFormat

if TYPE_CHECKING:
    from ingot.text.tokenizer.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is to be rendered.

    - `opened`: the prompt ends where an answer begins; else after the last message.
    - `continued`: it ends within the last message, an assistant's, which the answer continues.
    - `appended` returns what is to follow the whole text: the beginning of the answer.
    """

    messages: Messages
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] | None = None
    opened: bool = True
    continued: bool = False
    appended: Callable[[str], str] = field(default=lambda text: "")
    history: TemplateHistory = "stable"
    remembers: bool = True  # past answers are recalled, and this one's may be cached
    salt: str = ""  # conversations with different salts share no answers
    most: int | None = None  # tokens that a prompt may have; one that is longer for certain is not encoded
    trusted: bool = False  # the text of a control token is that token, whoever wrote it


class PromptBuilder:
    """Makes conversations into prompts for one model. Any thread may ask."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, answers: AnswerCache, encodings: EncodingCache | None = None
    ) -> None:
        self._tokenizer, self._template, self._answers = tokenizer, template, answers
        self._encodings = EncodingCache() if encodings is None else encodings
        ends = (tokenizer.decode([token], skip_special=False) for token in sorted(tokenizer.eos_ids))
        self._ends = tuple(end for end in ends if end)

    def compose(self, conversation: Conversation, format: Format, *, add_special: bool = False) -> Prompt:
        """`add_special` adds what the tokenizer puts around a bare text.

        Raises BadRequest or Unsupported where the template refuses the messages or cannot show them, and
        ContextOverflow where it is certain, before anything is encoded, that the prompt is too long.
        """
        traits = self._template.traits_for(bool(conversation.tools))
        messages, removed = canonical_messages(conversation.messages)
        keys = conversation_keys(messages, conversation.salt, ids=traits.call_ids)
        quoting = self._quoting(conversation, format)
        cached = self._cached_answers(conversation, messages, keys)
        self._check_length(conversation, messages, traits, format, cached, quoting)
        lines, pieces, done = self._render_messages(conversation, messages, traits, format, quoting, cached)
        recalled = _recalled_answers(lines, pieces, cached)
        left_out = check_calls_shown(lines, pieces, recalled)
        media = media_in_messages(messages)
        placeholders = MediaPlaceholders(media, self._tokenizer) if media else None
        assembler = PromptAssembler(self._tokenizer, self._encodings, conversation.salt, quoting, placeholders)
        self._assemble(assembler, lines, pieces, recalled)
        if beginning := conversation.appended(assembler.text):
            assembler.add_text(TokenOwner(), beginning)
        if conversation.most is not None:
            assembler.check_length(conversation.most)
        tokens, spans = assembler.assemble(add_special=add_special)
        opening, quoted = quoting.read(pieces[-1].text + beginning)
        # A client's own text in an opening could not be distinguished from a control token later on.
        remembers = conversation.remembers and len(pieces) > 1 and not quoted
        if not tokens:
            raise BadRequest(
                "The chat template makes nothing of these messages: the prompt is empty.", param="messages"
            )
        return Prompt(
            tokens=tokens,
            text=assembler.text,
            spans=spans,
            opening=opening,
            history=conversation.history,
            recalled=len(recalled),
            adapted=removed + done + left_out,
            thread=keys[-2 if conversation.continued else -1] if remembers else b"",
            call_ids=traits.call_ids,
            continued_text=content_as_text(conversation.messages[-1].get("content")) if conversation.continued else "",
            media=() if placeholders is None else placeholders.items(),
            message_texts=tuple(map(_message_texts, messages)),
        )

    def _check_length(
        self,
        conversation: Conversation,
        messages: list[Mapping[str, Any]],
        traits: TemplateTraits,
        format: Format,
        cached: Mapping[int, CachedAnswer],
        quoting: ControlTokenQuoting,
    ) -> None:
        """Raises ContextOverflow where there is too much to be quoted, which takes far longer than rendering.

        The length of the client's input shows whether to check; what the template shows of it, whether it is too long.
        """
        if conversation.most is None or quoting.trusting:
            return
        text = "".join(quoting.strings())
        if 4 * len(text) <= conversation.most or self._tokenizer.least_tokens(text) <= conversation.most:
            return
        unquoted = ControlTokenQuoting()
        lines, pieces, _ = self._render_messages(conversation, messages, traits, format, unquoted, cached)
        assembler = PromptAssembler(self._tokenizer, self._encodings, conversation.salt, unquoted)
        self._assemble(assembler, lines, pieces, _recalled_answers(lines, pieces, cached))
        assembler.check_length(conversation.most)

    def _quoting(self, conversation: Conversation, format: Format) -> ControlTokenQuoting:
        controls = ControlTokens() if conversation.trusted else self._tokenizer.controls
        client_input = (conversation.messages, conversation.tools, conversation.variables)
        thinking = format.thinking
        exempt = () if thinking is None else (thinking.open, thinking.close)
        return ControlTokenQuoting(controls, client_input, exempt)

    def _render_messages(
        self,
        conversation: Conversation,
        messages: list[Mapping[str, Any]],
        traits: TemplateTraits,
        format: Format,
        quoting: ControlTokenQuoting,
        cached: Mapping[int, CachedAnswer],
    ) -> tuple[list[TemplateMessage], list[TextRun], tuple[str, ...]]:
        """The lines that the template got, what it made of them, and what had to be done to them before."""
        tools = (
            ordered_tools(conversation.tools)
            if conversation.history == "stable"
            else [dict(tool) for tool in conversation.tools]
        )
        messages, tools = quoting.messages(messages), quoting.quote(tools)
        mark = secrets.token_hex(16)
        marked = _with_mark(messages, mark) if conversation.continued else messages
        lines, done = _template_messages(marked, tools, traits, format, conversation.history, cached)
        tags = self._tags_to_write(traits, format) if conversation.history == "stable" else None
        if tags is not None:
            lines = [_with_thinking(line, tags) for line in lines]
            if not traits.calls_with_text:
                lines = [
                    part
                    for line in lines
                    for part in (split_text_from_calls(line) if _hides_calls(line, cached) else [line])
                ]
        variables = quoting.quote(conversation.variables)
        pieces = self._render_pieces(lines, tools if traits.tools else None, replace(conversation, variables=variables))
        if conversation.continued:
            pieces = _cut_at_mark(pieces, mark)
        if tags is not None:
            pieces = [_without_empty_thinking(piece, lines, tags) for piece in pieces]
        return lines, pieces, done

    def _tags_to_write(self, traits: TemplateTraits, format: Format) -> ThinkingFormat | None:
        """The tags of thinking, for a model that has them and whose template shows no past thinking by itself."""
        tags = format.thinking
        if tags is None or traits.reasoning is not None or tags.close not in self._template.source:
            return None
        return tags

    def _render_pieces(
        self, lines: list[TemplateMessage], tools: list[Any] | None, conversation: Conversation
    ) -> list[TextRun]:
        """The pieces of the text; the last is the opening."""

        def pieces(opened: bool) -> list[TextRun]:
            rendered = self._template.rendered(
                [line.message for line in lines],
                history=conversation.history,
                tools=tools,
                add_generation_prompt=opened,
                extra=conversation.variables,
            )
            return [*rendered.pieces]

        made = pieces(conversation.opened and not conversation.continued)
        if len(made) > 1:
            return made
        # A template may take all messages of a first turn before its loop begins.
        base, [whole] = "".join(piece.text for piece in pieces(False)), made
        if not whole.text.startswith(base):
            return [whole]
        return [TextRun(None, base), TextRun(None, whole.text[len(base) :])]

    def _cached_answers(
        self, conversation: Conversation, messages: Messages, keys: list[bytes]
    ) -> dict[int, CachedAnswer]:
        """The answers that are remembered, by the number of their message."""
        if not conversation.remembers or conversation.history != "stable":
            return {}
        found: dict[int, CachedAnswer] = {}
        for at, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            answer = self._answers.recall(keys[at + 1], reasoning_of(message))
            if answer is not None:
                found[at] = answer
        return found

    def _assemble(
        self,
        assembler: PromptAssembler,
        lines: list[TemplateMessage],
        pieces: list[TextRun],
        recalled: dict[int, CachedAnswer],
    ) -> None:
        owners = _piece_owners(lines, pieces)
        for piece, owner in zip(pieces[:-1], owners, strict=False):
            answer = recalled.get(piece.message) if piece.message is not None and piece.text else None
            if answer is None:
                assembler.add_text(owner, piece.text)
                continue
            assembler.add_text(owner, answer.opening)
            assembler.add_tokens(owner, answer.tokens)
            assembler.add_text(owner, answer.missing + self._closing(piece.text, lines[piece.message or 0].message))
        assembler.add_text(owners[-1], pieces[-1].text)

    def _closing(self, text: str, message: Mapping[str, Any]) -> str:
        """What the template puts after an answer: from the token on that ends it, or after the content."""
        at = _before_end_tokens(text, self._ends)
        if at < len(text):
            return text[at:]
        content = "" if message.get("tool_calls") else content_as_text(message.get("content"))
        for shown in (content, content.strip()):
            if shown and shown in text:
                return text[text.rindex(shown) + len(shown) :]
        return ""


def _recalled_answers(
    lines: list[TemplateMessage], pieces: list[TextRun], cached: Mapping[int, CachedAnswer]
) -> dict[int, CachedAnswer]:
    """The cached answers by the index of their line, where a message is one line, and that is shown once in the
    text."""
    shown = count_message_pieces(pieces[:-1])
    made = Counter(source for line in lines for source in line.sources)
    return {
        at: cached[line.sources[0]]
        for at, line in enumerate(lines)
        if line.role == "assistant" and len(line.sources) == 1 and shown[at] == 1 == made[line.sources[0]]
        if line.sources[0] in cached
    }


def _template_messages(
    messages: Messages,
    tools: list[dict[str, Any]],
    traits: TemplateTraits,
    format: Format,
    history: TemplateHistory,
    cached: Mapping[int, CachedAnswer],
) -> tuple[list[TemplateMessage], tuple[str, ...]]:
    lines = [TemplateMessage(dict(message), (at,)) for at, message in enumerate(messages)]
    if lines and lines[0].role in ("system", "developer") and not lines[0].message.get("content"):
        del lines[0]  # nothing was in it, or nothing but what is no message to the model
    lines, taught = teach_tools(lines, tools, traits, format, cached)
    lines, placed = order_messages(lines, traits, history)
    return lines, taught + placed


def _with_thinking(line: TemplateMessage, tags: ThinkingFormat) -> TemplateMessage:
    """An assistant's thinking, where the client sent it, in front of its text."""
    if line.role != "assistant" or not (reasoning := reasoning_of(line.message)):
        return line
    text = visible_text(line.message)
    return replace(
        line, message={**line.message, "content": ThinkingContent(f"{tags.open}\n{reasoning}\n{tags.close}\n\n{text}")}
    )


def _hides_calls(line: TemplateMessage, cached: Mapping[int, CachedAnswer]) -> bool:
    """Whether thinking was put into a message whose calls are shown only if it has no text."""
    calls = isinstance(line.message.get("content"), ThinkingContent) and line.message.get("tool_calls")
    return bool(calls) and not any(source in cached for source in line.sources)


def _without_empty_thinking(piece: TextRun, lines: list[TemplateMessage], tags: ThinkingFormat) -> TextRun:
    """A template may have closed the thinking that it expects no more, right before the content that holds it."""
    content = lines[piece.message].message.get("content") if piece.message is not None else None
    if not isinstance(content, ThinkingContent) or content not in piece.text:
        return piece
    at = piece.text.index(content)
    before = piece.text[:at].rstrip()
    if not before.endswith(tags.close):
        return piece
    opening = before.removesuffix(tags.close).rstrip().removesuffix(tags.open)
    return replace(piece, text=opening + piece.text[at:])


def _with_mark(messages: list[Mapping[str, Any]], mark: str) -> list[Mapping[str, Any]]:
    """A mark at the end of the last message shows, in the rendered text, where the template closes it."""
    last = messages[-1]
    content = last.get("content")
    if last.get("role") != "assistant" or content is None or last.get("tool_calls"):
        raise BadRequest(
            "continue_final_message needs the last message to be an assistant's text.", param="continue_final_message"
        )
    if isinstance(content, str):
        return [*messages[:-1], {**last, "content": content + mark}]
    return [*messages[:-1], {**last, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + mark}]}]


def _cut_at_mark(pieces: list[TextRun], mark: str) -> list[TextRun]:
    """The pieces up to the mark; the one with the mark becomes the opening."""
    for at, piece in enumerate(pieces):
        if mark in piece.text:
            return [*pieces[:at], TextRun(piece.message, piece.text[: piece.text.index(mark)])]
    raise Unsupported("The served model's chat template does not show the last message.", param="messages")


def _message_texts(message: Mapping[str, Any]) -> tuple[str, ...]:
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    return tuple(text for part in parts if isinstance(text := part.get("text"), str) and text)


def _piece_owners(lines: list[TemplateMessage], pieces: list[TextRun]) -> list[TokenOwner]:
    """Whose each piece is. A system message that has no piece of its own is in what comes before all messages."""
    owners = [TokenOwner() if piece.message is None else _message_owner(lines[piece.message]) for piece in pieces]
    first = next((at for at, piece in enumerate(pieces) if piece.message is not None and piece.text), 0)
    unplaced = all(piece.message != 0 or not piece.text for piece in pieces)
    if lines and lines[0].role == "system" and unplaced:
        owners[:first] = [_message_owner(lines[0])] * first
    return owners


def _message_owner(line: TemplateMessage) -> TokenOwner:
    return TokenOwner(line.sources[0] if line.sources else None, line.role)


def count_message_pieces(pieces: Sequence[TextRun]) -> Counter[int | None]:
    """In how many pieces of the text each message is shown."""
    return Counter(piece.message for piece in pieces if piece.text)


def check_calls_shown(
    lines: list[TemplateMessage], pieces: list[TextRun], recalled: Mapping[int, CachedAnswer]
) -> tuple[str, ...]:
    """A template may leave calls out without a word; the model would answer to half a history. What it leaves out of
    an assistant's text and thinking is named in what this returns."""
    own: dict[int, str] = {}
    for piece in pieces:
        if piece.message is not None:
            own[piece.message] = own.get(piece.message, "") + piece.text
    whole = "".join(piece.text for piece in pieces)

    def shows(at: int, text: str) -> bool:
        # In its own piece, where it has one: a name may be among the tools.
        place = own.get(at) or whole
        return any(each in place for each in (text, dump_arguments(text)[1:-1]))

    left_out: set[str] = set()
    for at, line in enumerate(lines):
        if line.role != "assistant" or at in recalled:
            continue
        if not all(shows(at, call["function"]["name"]) for call in line.message.get("tool_calls") or ()):
            path = f"messages.{line.sources[0]}.tool_calls"
            raise Unsupported(f"{path}: the served model's chat template does not show tool calls.", param=path)
        if not shows(at, reasoning_of(line.message) or ""):
            left_out.add("thinking-left-out")
        content = line.message.get("content")
        texts = content if isinstance(content, list) else [{"text": content}]
        if not all(shows(at, visible_text({"content": each.get("text")})) for each in texts):
            left_out.add("text-left-out")
    return tuple(sorted(left_out))


def _before_end_tokens(text: str, ends: Sequence[str]) -> int:
    """Where the tokens that end an answer begin, at the end of a text; its length if there are none."""
    found = len(text)
    while (end := next((end for end in ends if text[:found].rstrip().endswith(end)), None)) is not None:
        found = len(text[:found].rstrip()) - len(end)
    return found
