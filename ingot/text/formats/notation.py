"""How values are written: JSON, and the ways of writing that differ from it in what a `Notation` says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Escapes = Literal["json", "python", "none"]
BareKeys = Literal["never", "outermost", "always"]

_JSON_WORDS = (("true", "true"), ("false", "false"), ("null", "null"))
_PYTHON_WORDS = (("True", "true"), ("False", "false"), ("None", "null"))


@dataclass(frozen=True, slots=True)
class Notation:
    """Arrays, numbers and nested objects are JSON's everywhere; the rest is said here."""

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


def unescaped(quote: str) -> Notation:
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
