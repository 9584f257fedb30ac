"""What is wrong with a grammar: the library says it for its authors, and this for whoever sent it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

MOST_CHARS: Final = 400
_SOURCE: Final = re.compile(r"\s*\d+ \| ")
_PLACE: Final = re.compile(r"(?:at )?(\d+)\((\d+)\): (.*)", re.DOTALL)
_FOUND: Final = re.compile(r" \(at .*\)$")
_REGEX: Final = re.compile(r"(?:invalid regex \".*\" \(in regex\): )?regex parse error: (.*) error: (.*)", re.DOTALL)
_LOOKAROUND: Final = re.compile(r"(?:invalid regex .*)?lookarounds not supported yet; .* in regex /(.*)/", re.DOTALL)


def _keys(found: re.Match[str]) -> str:
    keys = found[1].replace('"', "")
    return f"it uses {keys}, which cannot be enforced here; leave that out"


Words = str | Callable[[re.Match[str]], str]
TABLE: Final[tuple[tuple[str, Words], ...]] = (
    (r"Unimplemented keys: \[(.*)\]", _keys),
    (r"Unknown format: (.*)", r"the format '\1' is not known here; leave it out or write it as a pattern"),
    (r"Invalid type: (.*)", r"'\1' is no type of JSON"),
    (r"Resource '(.*)' is not present .*", r"$ref names '\1', which is not in the schema; nothing is fetched"),
    (r"Pointer '(.*)' does not exist", r"$ref names '#\1', which is not in the schema"),
    (r"Unsatisfiable schema: schema is false", r"no value can satisfy it: a schema that is false allows none"),
    (r"Unsatisfiable schema: (.*)", r"no value can satisfy it: \1"),
    (r"invalid multiple of", r"multipleOf is a number above 0"),
    (r"Expected f64 for '(.*)', got (.*)", r"\1 has to be a number, not \2"),
    (r"Expected array for '(.*)', got (.*)", r"\1 has to be a list, not \2"),
    (r".*coerce_one_of.*", r"oneOf is supported only where no value can match two of its branches"),
    (r"no start rule found", r"there is no rule 'start', with which an answer begins"),
    (r"unknown name: \"(.*)\"", r"there is no rule or terminal '\1'"),
    (r"unknown special token: \"(.*)\"", r"the model has no special token '\1'"),
    (r"duplicate rule: \"(.*)\"", r"there are two rules '\1'"),
    (r"circular reference in token \"(.*)\" definition", r"the terminal '\1' is defined by itself"),
    (r"Unknown common regex: ([^;]*);.*", r"there is no '\1' to import"),
    (r"lexer error", r"a text or a regular expression is not closed, or a character has no place here"),
    (r"expecting rule, token or statement", r"a rule, a terminal or a directive has to stand here"),
    (r"Expected token '_', found '(.*)'", r"'\1' has no place here; a rule is written `name: what it stands for`"),
    (r"Expected token '(.*)', found '(.*)'", r"'\1' has to stand here, not '\2'"),
)


def in_our_words(problem: str) -> str:
    """Without the grammar's source, which may be ours, and what only the library's authors can use."""
    for sign in ("<state>", "<backtrace>", "<non-verbose/>", "; following special tokens"):
        problem = problem.partition(sign)[0]
    lines = (line.strip() for line in problem.splitlines() if not _SOURCE.match(line))
    problem = " ".join(line for line in lines if line.strip("^ "))
    told = _of_regex(problem) or _placed(problem)
    return told if len(told) <= MOST_CHARS else told[:MOST_CHARS] + "…"


def _of_regex(problem: str) -> str | None:
    """Where it is an expression that is to blame, it tells more than a place in a grammar that may be ours."""
    placed = _PLACE.fullmatch(problem)
    problem = placed[3] if placed else problem
    if found := _REGEX.fullmatch(problem):
        return f"the regular expression {found[1][:100]} cannot be read: {found[2]}"
    if found := _LOOKAROUND.fullmatch(problem):
        return f"the regular expression {found[1][:100]} looks around (at the edge of a word, say): unsupported"
    return None


def _placed(problem: str) -> str:
    placed = _PLACE.fullmatch(problem)
    if placed is None:
        return _translated(problem)
    return f"line {placed[1]}, column {placed[2]}: {_translated(_FOUND.sub('', placed[3]))}"


def _translated(problem: str) -> str:
    for pattern, words in TABLE:
        if found := re.fullmatch(pattern, problem, re.DOTALL):
            return found.expand(words) if isinstance(words, str) else words(found)
    return problem
