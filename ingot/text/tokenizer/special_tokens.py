"""Special tokens: the control tokens that frame a prompt, and those for filling in the middle (FIM).

A web page or a tool's output may hold the text of a token that ends a turn and opens another. Only the template may
write such tokens. So client input is quoted before it is rendered (`ControlTokenQuoting`): the first character of each
control token in it is replaced by a private character that occurs nowhere else. In the rendered text these stand-ins
mark text that only looks like a token; they are then replaced by the original characters.

The libraries find tokens by their text alone. So such text is encoded by a copy of the encoder that shares everything
but has a secret spelling for each control token (`ControlTokenEncoder`); where a token is meant, that spelling is what
is encoded.

Families that fill in the middle are recognised by their tokens (`Infill`). Most want the prefix first (PSM), some the
suffix (SPM). Client input is encoded as plain text there.
"""

from __future__ import annotations

import json
import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, cast

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as Library

from ingot.errors import BadRequest
from ingot.text.tokenizer.length_bounds import component_steps

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizer


_STAND_IN_CHARACTERS: Final = range(0xE100, 0xF8FF)  # code points that no standard gives a meaning
_FRAMED_TOKEN: Final = re.compile(r"<[|｜].*>|<.*[|｜]>", re.DOTALL)
_PRIVATE_USE: Final = re.compile(r"[\ue000-\uf8ff]|\\u[ef][0-9a-f]{3}")
_BRACKET: Final = re.compile(r"[<>\[\]{}|｜]")
_SWITCH_TOKEN: Final = re.compile(r"/\w+")  # such as /nothink, which users may write


@dataclass(frozen=True, slots=True)
class ControlTokens:
    """A vocabulary's control tokens.

    - `framing`: those that begin and end turns and texts. Only the template may write them.
    - `tags`: those that a template sets around thoughts, calls and results, where the vocabulary does not call them
      special. Users and models may mention them; tools may not, or a result could end too early.
    """

    framing: frozenset[str] = frozenset()
    tags: frozenset[str] = frozenset()

    @classmethod
    def of(cls, added: Mapping[str, bool], source: str) -> ControlTokens:
        """Those among a vocabulary's `added` tokens (whether each is special) with a template of this `source`."""
        named = {
            token: special for token, special in added.items() if token.strip() and not _SWITCH_TOKEN.fullmatch(token)
        }
        framing = {
            token
            for token, special in named.items()
            if special or _FRAMED_TOKEN.fullmatch(token) or token in INFILL_TOKENS
        }
        tags = {token for token in named if token not in framing and _BRACKET.search(token) and token in source}
        return cls(frozenset(framing), frozenset(tags))

    @property
    def all(self) -> frozenset[str]:
        return self.framing | self.tags


class TokenFinder:
    """Finds where any of some tokens begin in a text, also within one another."""

    def __init__(self, tokens: Collection[str]) -> None:
        self.firsts = frozenset(token[0] for token in tokens)
        self._prefixes = frozenset(token[:size] for token in tokens for size in range(1, len(token)))
        self._longest = max(map(len, tokens), default=0)
        self.pattern = re.compile(any_word_pattern(tokens)) if tokens else None
        firsts = "".join(map(re.escape, sorted(self.firsts)))
        self._beginning = re.compile(f"(?={any_word_pattern(tokens)})[{firsts}]") if tokens else None

    def offsets(self, text: str) -> list[int]:
        if self._beginning is None or not any(first in text for first in self.firsts):
            return []
        return [found.start() for found in self._beginning.finditer(text)]

    def within(self, text: str) -> bool:
        """Whether the text has any of them."""
        return self.pattern is not None and self.pattern.search(text) is not None

    def replace_firsts(self, text: str, stand_in: Callable[[str], str]) -> str:
        """The text with the first character of each of them replaced."""
        if self._beginning is None or not any(first in text for first in self.firsts):
            return text
        return self._beginning.sub(lambda found: stand_in(found[0]), text)

    def partial_at_end(self, text: str) -> list[int]:
        """Where a token may begin that continues in another text, which a template appends."""
        end = len(text.rstrip())
        since = max(0, end - self._longest)
        return [at for at in range(since, end) if text[at] in self.firsts and text[at:end] in self._prefixes]


@lru_cache(maxsize=64)
def token_finder(tokens: frozenset[str]) -> TokenFinder:
    return TokenFinder(tokens)


def any_word_pattern(words: Collection[str]) -> str:
    """A pattern for the longest of some words, which takes no longer for many words than for few."""
    branches: dict[str, list[str]] = {}
    for word in words:
        if word:
            branches.setdefault(word[0], []).append(word[1:])
    written = [re.escape(first) + any_word_pattern(rests) for first, rests in sorted(branches.items())]
    if not written:
        return ""
    return f"(?:{'|'.join(written)})" + ("?" if "" in words else "")


class ControlTokenQuoting:
    """Of one conversation, of which `client_input` is everything that the client sent, in any structure.

    `exempt` are the thinking tags, which an assistant's message may hold: templates expect them there.
    """

    def __init__(
        self, controls: ControlTokens = ControlTokens(), client_input: Any = (), exempt: Collection[str] = ()
    ) -> None:
        self.trusting = not controls.all  # nothing is quoted: every control token is one, whoever wrote it
        self._user_tokens = token_finder(controls.framing)
        self._assistant_tokens = token_finder(controls.framing - frozenset(exempt))
        self._all_tokens = token_finder(controls.all)
        self._client_input = client_input
        self._stand_ins: dict[str, str] = {}

    def strings(self) -> Iterator[str]:
        """Every string of the client's input."""
        return _every_string(self._client_input)

    def messages(self, messages: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        return [self._message(message) for message in messages]

    def quote(self, value: Any) -> Any:
        """A description of tools or documents, quoted throughout."""
        return self._value(value, self._all_tokens)

    def read(self, text: str) -> tuple[str, tuple[int, ...]]:
        """The text without stand-ins, and the offsets in it at which control tokens are only text."""
        if not self._stand_ins:
            return text, ()
        meant = {stand_in: char for char, stand_in in self._stand_ins.items()}
        # JSON without other than ASCII characters has them escaped.
        written = meant | {_json_escape(stand_in): char for stand_in, char in meant.items()}
        offsets: list[int] = []
        longer = 0  # by how much the text before was longer with stand-ins

        def char(found: re.Match[str]) -> str:
            nonlocal longer
            offsets.append(found.start() - longer)
            longer += len(found[0]) - 1
            return written[found[0]]

        return re.sub(any_word_pattern(written), char, text), tuple(offsets)

    def _message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        role = str(message.get("role"))
        words = self._user_tokens if role in ("system", "developer", "user") else self._all_tokens
        words = self._assistant_tokens if role == "assistant" else words

        def quoted(key: str, value: Any) -> Any:
            if key == "tool_calls" and isinstance(value, list):
                return [self._call(call) for call in value]
            return value if key == "role" else self._value(value, words)

        return {key: quoted(key, value) for key, value in message.items()}

    def _call(self, call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            return self.quote(call)
        arguments = self._arguments(function.get("arguments")) if "arguments" in function else None
        quoted = {key: arguments if key == "arguments" else self.quote(value) for key, value in function.items()}
        return {key: quoted if key == "function" else self.quote(value) for key, value in call.items()}

    def _arguments(self, arguments: Any) -> Any:
        """JSON text may hide a token in escapes, which shows once it is parsed."""
        if not isinstance(arguments, str):
            return self.quote(arguments)
        try:
            read = json.loads(arguments)
        except (ValueError, RecursionError):
            return self.quote(arguments)
        if any(self._all_tokens.within(text) for text in _every_string(read)):
            return json.dumps(self.quote(read), ensure_ascii=False)
        return arguments

    def _value(self, value: Any, words: TokenFinder) -> Any:
        if isinstance(value, str):
            return self._text(value, words)
        if isinstance(value, Mapping):
            return {self._value(key, words): self._value(each, words) for key, each in value.items()}
        return [self._value(each, words) for each in value] if isinstance(value, (list, tuple)) else value

    def _text(self, text: str, words: TokenFinder) -> str:
        quoted = words.replace_firsts(text, self._stand_in)
        for offset in words.partial_at_end(text):
            quoted = quoted[:offset] + self._stand_in(text[offset]) + quoted[offset + 1 :]
        return quoted

    def _stand_in(self, char: str) -> str:
        if not self._stand_ins:
            used = {each for text in _every_string(self._client_input) for each in _PRIVATE_USE.findall(text)}
            free = (chr(code) for code in _STAND_IN_CHARACTERS if not used & {chr(code), _json_escape(chr(code))})
            self._stand_ins = dict(zip(sorted(self._all_tokens.firsts), free, strict=False))
            if len(self._stand_ins) < len(self._all_tokens.firsts):
                raise BadRequest("The messages use every private character of Unicode; some must be left unused.")
        return self._stand_ins[char]


def _json_escape(char: str) -> str:
    return f"\\u{ord(char):04x}"


def _every_string(value: Any) -> Iterator[str]:
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, Mapping):
            pending += [*each.keys(), *each.values()]
        elif isinstance(each, (list, tuple)):
            pending += each


class FastControlTokenEncoder:
    def __init__(self, library: Library, controls: Collection[str]) -> None:
        added = {id: token for id, token in library.get_added_tokens_decoder().items() if token.content}
        secret = secrets.token_hex(8)
        self._controls = frozenset(controls)
        self._spelled = {
            token: f"\ue000{secret}:{at}{'.' * len(token)}\ue001" for at, token in enumerate(sorted(controls))
        }
        self._cut = f"\ue000{secret}:cut\ue001"
        self._library = _copy_without_added_tokens(library)
        self._library.add_tokens([self._respelled(token) for _, token in sorted(added.items())])
        self._library.add_tokens([AddedToken(self._cut, normalized=False)])
        self._ids = {self._id(self._spelled.get(token.content, token.content)): id for id, token in added.items()}
        self._dropped = self._id(self._cut)
        self.always = bool(component_steps(library.normalizer, "normalizers")) and any(
            t.normalized for t in added.values() if t.content in self._spelled
        )
        """The plain encoder may find control tokens where their text does not stand."""
        # A model may have the text of a control token as a piece of its own, and find it in a text.
        control_ids = {library.token_to_id(token) for token in controls}
        found = {id for token in controls for id in self._encoded(token).ids}
        self._cuts = bool(control_ids & {self._ids.get(id, id) for id in found})

    def encode(self, text: str, offsets: Sequence[int], quoted: Collection[int]) -> tuple[list[int], list[int]]:
        """The ids, and how many of them end before or at each of the offsets. A control token whose text begins at an
        offset that is `quoted` is encoded as text."""
        spelled, moved = self._spell(text, quoted)
        encoding = self._encoded(spelled)
        ends = [end for _, end in encoding.offsets]
        counts = [bisect_right(ends, moved(offset)) for offset in offsets]
        ids = [self._ids.get(id, id) for id in encoding.ids]
        if not self._cuts:
            return ids, counts
        remaining = [at for at, id in enumerate(encoding.ids) if id != self._dropped]
        return [ids[at] for at in remaining], [bisect_left(remaining, count) for count in counts]

    def _encoded(self, text: str) -> Encoding:
        with whole_characters():
            [encoding] = self._library.encode_batch([text], add_special_tokens=False)
        return encoding

    def _spell(self, text: str, quoted: Collection[int]) -> tuple[str, Callable[[int], int]]:
        """The text with its control tokens in their secret spelling, and what maps offsets to those in it."""
        pieces: list[str] = []
        begins, shifts, since, shift = [0], [0], 0, 0
        for begin, end in self._changes(text, quoted):
            written = self._spelled[text[begin:end]] if end > begin else self._cut
            pieces += [text[since:begin], written]
            since, shift = end, shift + len(written) - (end - begin)
            begins.append(end)
            shifts.append(shift)
        moved = "".join((*pieces, text[since:]))
        return moved, lambda offset: offset + shifts[bisect_right(begins, offset) - 1]

    def _changes(self, text: str, quoted: Collection[int]) -> Iterator[tuple[int, int]]:
        """The spans of control tokens that are meant, and where those that are not must be cut, if need be."""
        for begin, end, meant in control_token_spans(text, self._controls, quoted):
            if meant:
                yield begin, end
            elif self._cuts:
                yield begin + 1, begin + 1

    def _respelled(self, token: AddedToken) -> AddedToken:
        spelled = self._spelled.get(token.content)
        if spelled is None:
            return token
        return AddedToken(spelled, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False, special=token.special)

    def _id(self, content: str) -> int:
        id = self._library.token_to_id(content)
        assert id is not None, "it was just added"
        return id


class SlowControlTokenEncoder:
    """For tokenizers that run in Python: what lies between control tokens is encoded by itself."""

    always = False

    def __init__(self, slow: PreTrainedTokenizer, controls: Collection[str]) -> None:
        self._slow, self._controls = slow, frozenset(controls)

    def encode(self, text: str, offsets: Sequence[int], quoted: Collection[int]) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        ends: list[int] = []
        since = 0
        for begin, end, meant in (*control_token_spans(text, self._controls, quoted), (len(text), len(text), True)):
            if not meant:
                continue
            between = self._plain(text[since:begin])
            ids += between
            ends += [begin] * len(between)
            if end > begin:
                ids.append(cast(int, self._slow.convert_tokens_to_ids(text[begin:end])))
                ends.append(end)
            since = end
        return ids, [bisect_right(ends, offset) for offset in offsets]

    def _plain(self, text: str) -> list[int]:
        options: Any = {"add_special_tokens": False, "split_special_tokens": True}
        return self._slow.encode(text, **options) if text else []


ControlTokenEncoder = FastControlTokenEncoder | SlowControlTokenEncoder


def control_token_spans(
    text: str, controls: frozenset[str], quoted: Collection[int]
) -> Iterator[tuple[int, int, bool]]:
    """Begin and end of each control token in a text, and whether it is meant as one."""
    pattern, at, unmeant = token_finder(controls).pattern, 0, frozenset(quoted)
    while pattern is not None and (found := pattern.search(text, at)) is not None:
        meant = found.start() not in unmeant
        yield *found.span(), meant
        at = found.end() if meant else found.start() + 1


def _copy_without_added_tokens(library: Library) -> Library:
    """A library with the same model and the same steps, and no added tokens yet."""
    made = Library(library.model)
    if library.normalizer is not None:
        made.normalizer = library.normalizer
    if library.pre_tokenizer is not None:
        made.pre_tokenizer = library.pre_tokenizer
    return made


@contextmanager
def whole_characters() -> Iterator[None]:
    """Turns a tokenizer's error about half a character into one for clients."""
    try:
        yield
    except (UnicodeEncodeError, TypeError):
        raise BadRequest("The text contains half of a surrogate pair, which no tokenizer can encode.") from None


@dataclass(frozen=True, slots=True)
class InfillFamily:
    """The tokens by name. Those of the last three may be missing from a vocabulary."""

    prefix: str
    suffix: str
    middle: str | None  # None: the answer follows the prefix
    suffix_first: bool = False
    repo: str = ""  # begins a repository's files, with its name
    file: str = ""  # begins each of them, with its path
    separator: str = ""  # stands between files instead, in families that have no token for a repository

    @property
    def tokens(self) -> tuple[str, ...]:
        names = (self.prefix, self.suffix, self.middle, self.repo, self.file, self.separator)
        return tuple(name for name in names if name)


BAR_TOKENS: Final = InfillFamily(
    *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    repo="<|repo_name|>",
    file="<|file_sep|>",
    separator="<|file_separator|>",
)
INFILL_FAMILIES: Final = (
    BAR_TOKENS,  # Qwen2.5-Coder, Qwen3-Coder; CodeGemma; Granite 3; Phi-4
    InfillFamily("<fim_prefix>", "<fim_suffix>", "<fim_middle>", repo="<repo_name>", file="<file_sep>"),  # StarCoder
    InfillFamily("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    InfillFamily("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    InfillFamily("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),  # Seed-Coder
    InfillFamily("[PREFIX]", "[SUFFIX]", None, suffix_first=True),  # Codestral
    InfillFamily("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    InfillFamily("<PRE>", "<SUF>", "<MID>"),
    InfillFamily("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    InfillFamily("<|prefix|>", "<|suffix|>", "<|middle|>"),  # Falcon-H1-Coder
)
# Tokens that end such an answer, besides those above and the model's end tokens, which may be those of chats.
INFILL_ENDS: Final = (
    *("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "▁<EOT>", "<EOT>", "<|EOT|>", "<|endoftext|>", "<｜end▁of▁sentence｜>"),
    *("<reponame>", "<filename>", "<|reponame|>", "<|filename|>"),
)
INFILL_TOKENS: Final = frozenset(name for family in INFILL_FAMILIES for name in family.tokens)
# Names for what a client leaves out, as llama.cpp's server has them.
DEFAULT_REPOSITORY, DEFAULT_FILE = "myproject", "filename"

EncodeText = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Infill:
    """A vocabulary's tokens for filling in the middle. `ends` are those that end what is filled in."""

    prefix: int
    suffix: int
    middle: int | None
    suffix_first: bool
    repo: int | None
    file: int | None
    separator: int | None
    ends: frozenset[int]

    @classmethod
    def of(cls, id_of: Callable[[str], int | None]) -> Infill | None:
        """None for a vocabulary that has no such tokens."""
        for family in INFILL_FAMILIES:
            ids = {name: id for name in family.tokens if (id := id_of(name)) is not None}
            if not ids.keys() >= {name for name in (family.prefix, family.suffix, family.middle) if name is not None}:
                continue
            middle, repo, file, separator = map(
                ids.get, (family.middle or "", family.repo, family.file, family.separator)
            )
            ends = frozenset(id for id in (*map(id_of, INFILL_ENDS), *ids.values()) if id is not None)
            first = ids[family.prefix], ids[family.suffix], middle, family.suffix_first
            return cls(*first, repo, file, separator, ends)
        return None

    def prompt(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """The prompt for what is to be filled in between the two."""
        front, back = [self.prefix, *before], [self.suffix, *after]
        parts = back + front if self.suffix_first else front + back
        return parts if self.middle is None else [*parts, self.middle]

    def context(self, files: Iterable[tuple[str, str]], encode: EncodeText) -> list[int]:
        """Other files, by name and text, to stand before the prompt."""
        files = list(files)
        if not files:
            return []
        tokens: list[int] = []
        if self.repo is not None and self.file is not None:
            tokens += [self.repo, *encode(f"{DEFAULT_REPOSITORY}\n")]
            for name, text in files:
                tokens += [self.file, *encode(f"{name}\n{text}\n")]
            return [*tokens, self.file, *encode(f"{DEFAULT_FILE}\n")]
        if self.separator is not None:
            for name, text in files:
                tokens += [*encode(f"{name}\n{text}"), self.separator]
            return tokens
        return list(encode("".join(f"#{name}\n{text}\n" if name else f"{text}\n" for name, text in files)))
