"""What a grammar may cost, what is checked of a schema before it is compiled, and what is wrong with either, in words.

Light: the compiling process and a server without a model import it. The library words its problems for its authors;
`describe_problem` words them for whoever sent the grammar, without its source, which may be ours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from ingot.errors import BadRequest, Unsupported

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MOST_GRAMMAR_CHARS = 256 * 1024  # of a schema, an expression, a list of choices or a grammar that a client sends
MOST_COMPILED_CHARS = 1024 * 1024  # of what is made of it: the calls of many tools put together
MOST_CHOICES = 4096
COMPILE_S = 2.0  # processor time that compiling may take,
COMPILE_WALL_S = 8.0  # and the longest that it is waited for, on a machine that is busy with other things
COMPILER_PROCESSES = 4  # grammars that are compiled at the same time, each of another tenant
MOST_WAITING_REQUESTS = 8  # requests of one tenant that wait for its grammars
WAIT_S = 8.0  # longest to wait for others' grammars to be compiled first
MOST_CACHED_GRAMMARS = 32  # compiled grammars that are cached
SLOW_MASK_S = 0.005
"""Processor time of a token's mask that is slow. How slow it can be, the library's own limits say."""
SLOW_MASKS, SLOW_SHARE = 16, 4
"""Slow masks that following a grammar may take: so many at first, and one in so many. They are counted, not summed up:
a machine that stalls makes one mask slow, and no grammar too complex."""

_LEXER_STATES = 50_000  # about 1 kB each; a text of limited length takes one for each of its characters
_LEXER_STEP = 200_000  # about 14 ms
_ITEMS_STEP = 50_000  # about 3 ms


def parser_limits() -> LLParserLimits:
    """What the library itself keeps to, so that no single token costs more than some milliseconds."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        step_lexer_fuel=_LEXER_STEP, step_max_items=_ITEMS_STEP, max_lexer_states=_LEXER_STATES, verbose_errors=False
    )


ANNOTATING_FORMATS = frozenset(
    {
        *("binary", "byte", "password", "uri-reference", "iri-reference"),
        *("path", "file-path", "directory-path", "textarea", "markdown", "html"),
    }
)
"""Formats that describe what a text is for, and not which texts are valid."""
_COUNT_KEYWORDS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
_VALUE_KEYWORDS = frozenset({"const", "enum", "default", "examples", "example"})
_KEYWORDS_WITH_NAMES = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def plain_schema(schema: Any) -> Any:
    """The same without keywords that do not affect which values are valid, and with whole numbers as integers."""
    if isinstance(schema, list):
        return [plain_schema(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {key: _plain_keyword(key, value) for key, value in schema.items() if not _is_irrelevant(schema, key, value)}


def _plain_keyword(key: str, value: Any) -> Any:
    if key in _VALUE_KEYWORDS:
        return value
    if key in _KEYWORDS_WITH_NAMES and isinstance(value, Mapping):
        return {name: plain_schema(each) for name, each in value.items()}
    if key in _COUNT_KEYWORDS and isinstance(value, float) and value.is_integer():
        return int(value)
    return plain_schema(value)


def _is_irrelevant(schema: Mapping[str, Any], key: str, value: Any) -> bool:
    if key == "format":
        return isinstance(value, str) and value in ANNOTATING_FORMATS
    most = schema.get("maxItems")
    single = isinstance(most, int | float) and most <= 1
    return key == "uniqueItems" and (value is False or single)


def problem_path(schema: Any, problem: str) -> str | None:
    """Where in a schema that stands which a problem names: a value between quotes, else a keyword."""
    words = set(re.findall(r"[$A-Za-z]+", problem))
    found = list(_stated_keywords(schema, ""))
    quoted = (path for path, _, value in found if isinstance(value, str) and f"'{value}'" in problem)
    return next(quoted, None) or next((path for path, key, _ in found if key in words), None)


def _stated_keywords(schema: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    """Each keyword with its value and where it stands."""
    if isinstance(schema, list):
        for at, each in enumerate(schema):
            yield from _stated_keywords(each, f"{path}.{at}")
    if not isinstance(schema, Mapping):
        return
    for key, value in schema.items():
        where = f"{path}.{key}".removeprefix(".")
        yield where, key, value
        if key in _KEYWORDS_WITH_NAMES and isinstance(value, Mapping):
            for name, each in value.items():
                yield from _stated_keywords(each, f"{where}.{name}")
        elif key not in _VALUE_KEYWORDS:
            yield from _stated_keywords(value, where)


def check_schema(schema: Any, param: str | None) -> None:
    """Raises BadRequest for a schema that is too large or no schema, Unsupported for what cannot be enforced."""
    if not isinstance(schema, Mapping | bool):
        raise BadRequest("A JSON schema is an object, or true or false.", param=param)
    try:
        size = len(json.dumps(schema))
    except (RecursionError, ValueError, TypeError) as error:
        raise BadRequest(f"The schema cannot be written as JSON: {error}", param=param) from None
    if size > MOST_GRAMMAR_CHARS:
        raise BadRequest(
            f"The schema is too large: {size} characters, where at most {MOST_GRAMMAR_CHARS} are allowed.", param=param
        )
    for part in _schema_parts(schema):
        if _counts_keys(part):
            raise Unsupported(
                "minProperties is supported only up to 1, up to the number of required properties, or where all "
                "properties are listed: a key may be written twice.",
                param=param,
            )


def _counts_keys(schema: Mapping[str, Any]) -> bool:
    """Whether the schema asks for a number of keys that the grammar cannot count, as it may repeat unlisted ones."""
    least = schema.get("minProperties")
    if not isinstance(least, int) or least <= 1:
        return False
    required = schema.get("required")
    listed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    return not listed and least > (len(set(required)) if isinstance(required, list) else 0)


def _schema_parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Everything in a schema that may be one. Values in the form of schemas are checked too, which is safe."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            yield part
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part


LONGEST_PROBLEM: Final = 400
_GRAMMAR_SOURCE: Final = re.compile(r"\s*\d+ \| ")
_GRAMMAR_POSITION: Final = re.compile(r"(?:at )?(\d+)\((\d+)\): (.*)", re.DOTALL)
_FOUND_AT: Final = re.compile(r" \(at .*\)$")
_REGEX_PROBLEM: Final = re.compile(
    r"(?:invalid regex \".*\" \(in regex\): )?regex parse error: (.*) error: (.*)", re.DOTALL
)
_LOOKAROUND_PROBLEM: Final = re.compile(
    r"(?:invalid regex .*)?lookarounds not supported yet; .* in regex /(.*)/", re.DOTALL
)


def _unsupported_keys(found: re.Match[str]) -> str:
    keys = found[1].replace('"', "")
    return f"it uses {keys}, which cannot be enforced here; leave that out"


ProblemWords = str | Callable[[re.Match[str]], str]
PROBLEM_WORDS: Final[tuple[tuple[str, ProblemWords], ...]] = (
    (r"Unimplemented keys: \[(.*)\]", _unsupported_keys),
    (r"Unknown format: (.*)", r"the format '\1' is not supported; leave it out or write it as a pattern"),
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
    (r"lexer error", r"a text or a regular expression is not closed, or a character is not allowed here"),
    (r"expecting rule, token or statement", r"a rule, a terminal or a directive has to stand here"),
    (r"Expected token '_', found '(.*)'", r"'\1' is not allowed here; a rule is written `name: what it stands for`"),
    (r"Expected token '(.*)', found '(.*)'", r"'\1' has to stand here, not '\2'"),
)


def describe_problem(problem: str) -> str:
    """Without the grammar's source, which may be ours, and what only the library's authors can use."""
    for sign in ("<state>", "<backtrace>", "<non-verbose/>", "; following special tokens"):
        problem = problem.partition(sign)[0]
    lines = (line.strip() for line in problem.splitlines() if not _GRAMMAR_SOURCE.match(line))
    problem = " ".join(line for line in lines if line.strip("^ "))
    text = _describe_regex_problem(problem) or _describe_position(problem)
    return text if len(text) <= LONGEST_PROBLEM else text[:LONGEST_PROBLEM] + "…"


def _describe_regex_problem(problem: str) -> str | None:
    """The regular expression to blame, which is more useful than a position in a grammar that may be ours."""
    located = _GRAMMAR_POSITION.fullmatch(problem)
    problem = located[3] if located else problem
    if found := _REGEX_PROBLEM.fullmatch(problem):
        return f"the regular expression {found[1][:100]} cannot be read: {found[2]}"
    if found := _LOOKAROUND_PROBLEM.fullmatch(problem):
        return f"the regular expression {found[1][:100]} uses a lookaround or a word boundary, which is not supported"
    return None


def _describe_position(problem: str) -> str:
    located = _GRAMMAR_POSITION.fullmatch(problem)
    if located is None:
        return _translate_problem(problem)
    return f"line {located[1]}, column {located[2]}: {_translate_problem(_FOUND_AT.sub('', located[3]))}"


def _translate_problem(problem: str) -> str:
    for pattern, words in PROBLEM_WORDS:
        if found := re.fullmatch(pattern, problem, re.DOTALL):
            return found.expand(words) if isinstance(words, str) else words(found)
    return problem
