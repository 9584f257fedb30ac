"""The `pattern` of a JSON schema as an expression for a whole text, in the syntax that the library reads."""

from __future__ import annotations

import re
from collections.abc import Iterator

_ANYTHING = "(?s:.*)"
_TOKEN = re.compile(
    r"""
    \\[dDsSwWnrtfv] | \\x[0-9a-fA-F]{2} | \\u[0-9a-fA-F]{4} | \\p\{\w+\} | \\P\{\w+\} | \\[^\w\s]  # escapes
    | \[\^?(?:\\[^\n]|[^\]\[\\&~])(?:\\[^\n]|[^\]\[\\&~])*\]                                         # a class
    | \{[0-9]{1,4}(?:,[0-9]{0,4})?\}(?!\?) | [*+?](?!\?)                                            # repetitions
    | \(\?: | [()|^$] | [^\\\[\](){}*+?|^$]
    """,
    re.VERBOSE | re.DOTALL,
)


def whole(pattern: str) -> str | None:
    """What matches a text exactly where `pattern` is found in it; None where that cannot be said.

    Look-around, references, boundaries of words, lazy repetition and anchors amid a pattern are what cannot.
    """
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return None
    tokens = list(_tokens(pattern))
    if "" in tokens:
        return None
    branches = [_anchored(branch) for branch in _branches(tokens)]
    return None if None in branches else "|".join(f"({branch})" for branch in branches)


def matches_nothing(pattern: str) -> bool:
    """Whether the pattern, one that `whole` reads, is found in an empty text."""
    return re.search(pattern, "") is not None


def _tokens(pattern: str) -> Iterator[str]:
    """The parts of the pattern; an empty one where it goes on as nothing that is known here."""
    at = 0
    while at < len(pattern):
        match = _TOKEN.match(pattern, at)
        if match is None or (pattern.startswith("(?", at) and match.group() != "(?:"):
            yield ""
            return
        yield match.group()
        at = match.end()


def _branches(tokens: list[str]) -> list[list[str]]:
    found: list[list[str]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token in ("(", "(?:")) - (token == ")")
        if token == "|" and depth == 0:
            found.append([])
        else:
            found[-1].append(token)
    return found


def _anchored(branch: list[str]) -> str | None:
    begins, ends = branch[:1] == ["^"], branch[-1:] == ["$"]
    inner = branch[begins : len(branch) - ends]
    if "^" in inner or "$" in inner:
        return None
    return ("" if begins else _ANYTHING) + "".join(inner) + ("" if ends else _ANYTHING)
