"""What tables are made of: what a model family writes when it thinks and when it calls a tool, as data.

One table drives the parser, the rendering of past calls, and the grammar of forced ones. A form is a sequence of parts;
a plain string stands for itself. A `Notation` defines how values are written: JSON, or something that differs from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ingot.text.parser.arguments import ANY_TYPE, JsonTypes

IdStyle = Literal["openai", "mistral", "kimi"]


@dataclass(frozen=True, slots=True)
class Gap:
    """Any white space, also none; `written` is what we write there."""

    written: str = ""


@dataclass(frozen=True, slots=True)
class Maybe:
    """Text that some models write and some do not; we write it only if `written`."""

    text: str
    written: bool = False


@dataclass(frozen=True, slots=True)
class UpTo:
    """Anything, which means nothing, up to a text."""

    text: str


@dataclass(frozen=True, slots=True)
class Name:
    """The function's name. `numbered`: written as `functions.NAME:3`, which is also the call's id."""

    numbered: bool = False


@dataclass(frozen=True, slots=True)
class TagEnd:
    """Ends the tag that names the function. Some models close it right there, with `alone`: without arguments."""

    text: str
    alone: tuple[str, ...] = ("/>", " />")
    instead: str = ""  # what follows the name where models forget it; not part of it


@dataclass(frozen=True, slots=True)
class Ordinal:
    """The call's number in the answer, from 1, between two literals; it may be missing, and means nothing."""

    before: str
    after: str


@dataclass(frozen=True, slots=True)
class CallId:
    """An id that the model may write, after a marker where there is one; we leave it out."""

    marker: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments as one object."""

    notation: Notation


@dataclass(frozen=True, slots=True)
class JsonCall:
    """A JSON object that holds the name and the arguments, in any order, perhaps among other things."""

    arguments_key: str = "arguments"
    name_key: str = "name"


@dataclass(frozen=True, slots=True)
class KeyClose:
    """What ends a key, and what its value then is: of the schema's type, text as it stands, or JSON of some `kinds`."""

    text: str
    value: Literal["typed", "text", "json"] = "typed"
    kinds: JsonTypes = ANY_TYPE
    written: bool = True  # else only understood


@dataclass(frozen=True, slots=True)
class TextParameters:
    """Parameters as text between tags, up to `end`.

    A `value_close` counts only where the next parameter, the end or the form's closing follows, so a value may
    hold the tag itself. `frame`, a line break, is written around each value and removed again, once at each end; after
    a value that does not begin with it, it belongs to the value. One JSON object instead of them all is understood
    too, and so is a key without a value, which is ignored. A `frame` that closes a key, too, is part of the value.
    """

    key_open: str
    key_closes: tuple[KeyClose, ...]
    value_close: str
    end: str
    value_open: str = ""
    frame: str = ""
    type_tags: tuple[str, str] | None = None  # around a type that may stand before the value; the schema's counts first
    wrappers: tuple[str, ...] = ()  # names under which some models put all arguments as one object
    quote: tuple[str, str] | None = None  # around values that some models write so, as a whole; not part of them
    object_tags: tuple[str, str] | None = None  # around one JSON object instead of all parameters
    # Models forget it so often before the next parameter that the tool has, or the end, that it is assumed forgotten
    # at once. In other families a value may be text that goes on behind them: see `parser/unclosed_tags.py`.
    close_optional: bool = False
    key_escapes: tuple[tuple[str, str], ...] = ()  # characters of a key, and how they are written

    def write_key(self, key: str) -> str:
        for character, text in self.key_escapes:
            key = key.replace(character, text)
        return key

    def read_key(self, written: str) -> str:
        for character, text in reversed(self.key_escapes):
            written = written.replace(text, character)
        return written


@dataclass(frozen=True, slots=True)
class Elements:
    """Arguments as elements in elements, up to `end`, with `mark` before each tag.

    An element has its member's name; an object is its members' elements, an array an element `item` for each of its
    items, and any other value its text. A closing tag counts only where another tag follows, so a text may hold the
    tag itself. An object or array may also be written as JSON, the arguments too: some names make no tag.
    """

    mark: str
    end: str
    item: str = "item"
    open_optional: bool = False  # some models forget an opening tag: its `mark` and its value are there

    def opening(self, name: str) -> str:
        return f"{self.mark}<{name}>"

    def closing(self, name: str) -> str:
        return f"{self.mark}</{name}>"

    def can_name(self, name: str) -> bool:
        """Whether the name makes a tag."""
        return name != "" and not name.startswith("/") and ">" not in name


Part = str | Gap | Maybe | UpTo | Name | TagEnd | Ordinal | CallId | Arguments | JsonCall | TextParameters | Elements


@dataclass(frozen=True, slots=True)
class CallForm:
    """One form of calls: an opening, calls with `joint` between them, a closing.

    - `joint` None: one call to an opening. Else its text, white space aside, must stand between two calls.
    - A closing that is missing costs nothing: by then the call is complete.
    - A call without its opening (`unopened`, or an opening that is no marker: `bare`) must name one of the tools;
      `bare` ones must also begin a line outside of fenced code, others one where only that separates them from prose.
    - `repeats`: some models write several calls under an opening that we write for each. Where a name comes first, one
      of the `name_markers` shows that there is another.
    - `opening_in_prompt`: the answer may begin right after the opening.
    - `whole`: a call only once all of it is read, and text if it turns out otherwise, as examples have the same form.
      A call that a limit cuts off, or that grows too long to be held back, is one all the same.
    """

    call: tuple[Part, ...]
    opening: tuple[Part, ...] = ()
    closing: tuple[Part, ...] = ()
    joint: str | None = None
    unopened: Literal["never", "line", "anywhere"] = "never"
    repeats: bool = False
    opening_in_prompt: bool = False
    bare: bool = False
    whole: bool = False

    def leading(self, *, opened: bool) -> str | None:
        """The first literal, after the opening's marker where that was `opened`; None where a name comes first."""
        return next((text for text, *others in self.leads(opened=opened) if not others), None)

    def leads(self, *, opened: bool) -> tuple[tuple[str, ...], ...]:
        """The literals before a name or anything else that differs from call to call: the alternatives of each part,
        which include the empty text where it is optional."""
        found: list[tuple[str, ...]] = []
        for part in (self.opening[1:] if opened else ()) + self.call:
            match part:
                case str():
                    found.append((part,))
                case Maybe():
                    found.append((part.text, ""))
                case JsonCall():
                    return (*found, ("{",))
                case Gap():
                    continue
                case _:
                    return tuple(found)
        return tuple(found)

    @property
    def name_markers(self) -> tuple[str, ...]:
        """What a name that comes first may be followed by, and no word of a text."""
        behind = self.call[1:] if isinstance(self.call[0], Name) else ()
        return tuple(
            part.text if isinstance(part, Maybe) else part.marker for part in behind if isinstance(part, Maybe | CallId)
        )

    def literals(self) -> Iterator[str]:
        for part in (*self.opening, *self.call, *self.closing):
            yield from _part_literals(part)


def part_text(part: Part) -> str | None:
    """A part as we write it; None where that depends on the call."""
    match part:
        case str():
            return part
        case Gap():
            return part.written
        case Maybe():
            return part.text if part.written else ""
        case TagEnd() | UpTo():
            return part.text
        case CallId():
            return ""
    return None


def parts_text(*parts: Part) -> str:
    """Parts that do not depend on the call, as we write them."""
    texts = [part_text(part) for part in parts]
    assert None not in texts, f"{parts} depend on the call"
    return "".join(text for text in texts if text is not None)


def _part_literals(part: Part) -> Iterator[str]:
    match part:
        case str():
            yield part
        case Maybe():
            yield part.text
        case TagEnd() | UpTo():
            yield part.text
        case Ordinal():
            yield part.before
        case CallId():
            yield part.marker
        case Arguments():
            yield from part.notation.quotes
        case TextParameters():
            yield from (part.key_open, part.value_open, part.value_close, part.end)
            yield from (*(part.object_tags or ()), *(part.type_tags or ()))
            yield from (close.text for close in part.key_closes)
        case Elements():
            yield from (part.mark, part.opening(part.item), part.closing(part.item), part.end)


@dataclass(frozen=True, slots=True)
class ThinkingFormat:
    """The tags around a thinking part, which begins an answer or follows a call or another thinking part.

    `interleaved`: it may also begin any line of the answer. `variants`: other tags of the family, which a prompt may
    end with instead.
    """

    name: str
    open: str
    close: str
    interleaved: bool = False
    variants: tuple[ThinkingFormat, ...] = ()
    implied: bool = False  # answers begin within it, unless the prompt has closed it

    def ending(self, prompt: str) -> ThinkingFormat:
        """The tags that a rendered prompt ends with, open or closed, where there are several."""
        end = prompt.rstrip()
        return next((each for each in self.variants if end.endswith((each.open, each.close))), self)


MessageKind = Literal["thinking", "text", "call", "calls"]


@dataclass(frozen=True, slots=True)
class Channels:
    """Messages with headers: `start` and role, a header up to one of `bodies`, a body, an end.

    - `kinds`: the kind of the body after a header, by the first pattern that is found in the header and the marker
      after it; else text. Of a `call` the pattern has the function's name as its group, and the body is its arguments
      in JSON; `calls` are written in the format's forms, which are read nowhere else.
    - `begins`: what else begins a header within a message. The prompt ends with the role, so an answer begins with the
      remaining header: `recipient` and a name, or the name alone.
    - `unended`: some models forget to end a message, and write the next one's recipient and marker right after it.
    """

    start: str
    role: str
    bodies: tuple[str, ...]
    kinds: tuple[tuple[str, MessageKind], ...]
    ends: tuple[str, ...]  # the first stands between two messages
    call: tuple[Part, ...]  # a call and its header, as we write them
    call_end: str
    asides: tuple[str, ...]  # headers, as we write them: of thinking, and of others before the answer
    answer: str  # the answer's header
    begins: tuple[str, ...] = ()
    recipient: str = ""
    unended: bool = False

    @property
    def names_calls(self) -> bool:
        """Whether a header alone shows that its message is a call."""
        return any(kind == "call" for _, kind in self.kinds)


@dataclass(frozen=True)  # without slots: what follows from the table is found once
class Format:
    """A family. The first form is the one we write and the one that forced calls take; all are understood."""

    name: str
    forms: tuple[CallForm, ...] = ()
    thinking: ThinkingFormat | None = None
    channels: Channels | None = None
    strips: tuple[str, ...] = ()  # markers in the answer that mean nothing to a reader
    heads: tuple[str, ...] = ()  # the same, of text that means nothing only where the answer or a message begins
    ids: IdStyle = "openai"
    signs: tuple[tuple[str, ...], ...] = ()  # a chat template is this family's if it holds all of one group
    refines: str = ""  # a family with the same signs, distinguished by this one's model types
    model_types: tuple[str, ...] = ()  # of config.json, used only where the template shows nothing
    fitted: Callable[[Format, str], Format] | None = None  # makes the table for a chat template that shows more

    @property
    def can_call(self) -> bool:
        return bool(self.forms) or self.channels is not None

    @cached_property
    def markers(self) -> frozenset[str]:
        """Every literal that means something to the parser. A special token that stands in one must reach it: the
        detokenizer drops the others."""
        found = {literal for form in self.forms for literal in form.literals()} | set(self.strips)
        if self.thinking is not None:
            found |= {tag for each in (self.thinking, *self.thinking.variants) for tag in (each.open, each.close)}
        if (channels := self.channels) is not None:
            found |= {channels.start, *channels.begins, *channels.bodies, *channels.ends, *channels.asides}
            found |= {literal for part in channels.call for literal in _part_literals(part)}
        return frozenset(found - {""})


Escapes = Literal["json", "python", "none"]
BareKeys = Literal["never", "outermost", "always"]

_JSON_WORDS = (("true", "true"), ("false", "false"), ("null", "null"))
_PYTHON_WORDS = (("True", "true"), ("False", "false"), ("None", "null"))


@dataclass(frozen=True, slots=True)
class Notation:
    """Arrays, numbers and nested objects are JSON's everywhere; the differences are defined here."""

    opens: str = "{"  # the outermost object, the arguments
    assigns: str = ":"
    closes: str = "}"
    quotes: tuple[str, ...] = ('"',)
    escapes: Escapes = "json"
    bare_keys: BareKeys = "never"
    words: tuple[tuple[str, str], ...] = _JSON_WORDS  # as written, and as JSON has it
    # What models drift into, which is understood and never written:
    also_quotes: tuple[tuple[str, Escapes], ...] = ()
    also_brackets: tuple[tuple[str, str], ...] = ()  # around the outermost object
    also_assigns: str = ""
    bare_strings: bool = False  # a string without quotes, up to a comma or bracket
    commas_optional: bool = False  # behind what a quote or bracket has closed

    @property
    def brackets(self) -> tuple[tuple[str, str], ...]:
        """What may open the outermost object, each with what closes it then."""
        return ((self.opens, self.closes), *self.also_brackets)


JSON = Notation()

# Templates write nested values as JSON, so its words are as common as Python's.
PYTHON = Notation(
    opens="(",
    assigns="=",
    closes=")",
    quotes=('"""', "'''", '"', "'"),
    escapes="python",
    bare_keys="outermost",
    words=_JSON_WORDS + _PYTHON_WORDS,
)


def unescaped_notation(quote: str) -> Notation:
    """Bare keys, and strings between two `quote`s with nothing escaped inside."""
    return Notation(
        quotes=(quote,),
        escapes="none",
        bare_keys="always",
        words=_JSON_WORDS + _PYTHON_WORDS,
        also_quotes=(('"', "json"), ("'", "python")),
        also_brackets=(("(", ")"),),
        also_assigns="=",
        bare_strings=True,
        commas_optional=True,
    )
