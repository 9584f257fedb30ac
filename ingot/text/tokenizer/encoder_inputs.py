"""Inputs of embedding models and rerankers: texts, and pairs of a query and a document, as tokens within their length.

Like a tokenizer, these classes never change once they are made, and any thread may use them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ingot.errors import BadRequest, InputTooLong, ModelError
from ingot.text.cancellation import checkpoint
from ingot.text.input_files import read_json_object
from ingot.text.tokenizer import vocabulary
from ingot.text.tokenizer.detokenizer import spell_token_bytes
from ingot.text.tokenizer.length_bounds import LazyTokenFloor
from ingot.text.tokenizer.special_tokens import ControlTokens, token_finder
from ingot.text.tokenizer.vocabulary import Vocabulary

TOO_LONG_REMEDY = 'Shorten it, or send "truncate": true to have its end cut off.'
JUDGE_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
JUDGE_OPENING = f"<|im_start|>system\n{JUDGE_SYSTEM}<|im_end|>\n<|im_start|>user\n"
JUDGE_CLOSING = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
JUDGE_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """One input of an encoder. `types` is the text of a pair that each token belongs to; empty: there is one text."""

    tokens: tuple[int, ...]
    types: tuple[int, ...] = ()
    cut: bool = False  # its end was left out


def load_encoder_vocabulary(folder: Path) -> Vocabulary:
    """The vocabulary of an encoder, whose inputs end as in its tokenizer.json.

    Decoders that make embeddings rely on the end token that their tokenizer.json adds, while their
    tokenizer_config.json still has the setting of their base model, which adds none.
    """
    config = read_json_object(folder / "tokenizer_config.json")
    if not (config.get("add_bos_token") or config.get("add_eos_token")):
        config = {key: value for key, value in config.items() if key not in ("add_bos_token", "add_eos_token")}
    return vocabulary.load_vocabulary(folder, config, _text_end_tokens(config))


class TextInputs:
    """Single texts, for vectors. `prompts` are what may stand before a text, by name."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        length: int,
        lower_case: bool = False,
        prompts: Mapping[str, str] | None = None,
        default_prompt: str | None = None,
    ) -> None:
        self._vocabulary, self.length, self._lower_case = vocabulary, length, lower_case
        self.prompts, self._default_prompt = prompts or {}, default_prompt
        self._begin, self._end = _around_one(vocabulary)
        self._floor = _token_floor(vocabulary)
        if length <= len(self._begin) + len(self._end):
            raise ModelError(f"The model reads {length} tokens, which the tokens that it adds around a text fill")

    def read(self, text: str, *, prompt: str | None = None, truncate: bool = False) -> EncoderInput:
        """The input for `text` behind the prompt of that name (None: the model's default one).

        Raises InputTooLong unless it may be cut, and BadRequest where nothing is left of it.
        """
        name = self._default_prompt if prompt is None else prompt
        whole = (self.prompts[name] if name is not None else "") + text
        if not truncate:
            _check_length(self._floor, whole, self.length)
        tokens = _encode_text(self._vocabulary, whole.lower() if self._lower_case else whole)
        room = self.length - len(self._begin) - len(self._end)
        if len(tokens) > room and not truncate:
            raise InputTooLong(needed=self.length - room + len(tokens), limit=self.length, remedy=TOO_LONG_REMEDY)
        piece = (*self._begin, *tokens[:room], *self._end)
        if not piece:
            raise BadRequest("The input is empty: it has no tokens.")
        return EncoderInput(piece, cut=len(tokens) > room)

    def take(self, tokens: Sequence[int], *, truncate: bool = False) -> EncoderInput:
        """The input for tokens as they stand."""
        if len(tokens) > self.length and not truncate:
            raise InputTooLong(needed=len(tokens), limit=self.length, remedy=TOO_LONG_REMEDY)
        return EncoderInput(tuple(tokens[: self.length]), cut=len(tokens) > self.length)


EncodeDocument = Callable[[str, int | None], tuple[EncoderInput, int]]
"""Makes a document, of which so many tokens are read, into an input, cut to fit; and what it would take uncut."""


class RerankInputs(ABC):
    """A query and its documents."""

    takes_instruction: ClassVar[bool]

    def __init__(self, vocabulary: Vocabulary, *, length: int) -> None:
        self._vocabulary, self.length = vocabulary, length
        self._encode, self._floor = _plain_text_encoder(vocabulary), _token_floor(vocabulary)

    def read(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        most: int | None = None,
        truncate: bool = False,
    ) -> list[EncoderInput]:
        """One input a document, whose end is cut to `most` tokens, or where it must be and `truncate` allows it.

        `instruction` describes what makes a document a good one, where `takes_instruction`. Raises InputTooLong where
        nothing may be cut, and always where the query alone leaves no room.
        """
        encode_document = self._prepare(query, instruction)
        pieces = []
        for number, document in enumerate(documents):
            param = f"documents.{number}"
            if most is None and not truncate:
                _check_length(self._floor, document, self.length, param=param)
            piece, needed = encode_document(document, most)
            if needed > self.length and not truncate:
                raise InputTooLong(needed=needed, limit=self.length, remedy=TOO_LONG_REMEDY, param=param)
            pieces.append(piece)
        return pieces

    @abstractmethod
    def _prepare(self, query: str, instruction: str | None) -> EncodeDocument: ...


class PairInputs(RerankInputs):
    """For a cross-encoder: both texts in one input, with what its tokenizer puts around and between them."""

    takes_instruction = False

    def __init__(self, vocabulary: Vocabulary, *, length: int) -> None:
        super().__init__(vocabulary, length=length)
        self._frame = _around_two(vocabulary)

    def _prepare(self, query: str, instruction: str | None) -> EncodeDocument:
        assert instruction is None, "a cross-encoder takes no instruction"
        frame = self._frame
        _check_length(self._floor, query, self.length, param="query")
        before = (*frame.begin, *self._encode(query))
        room = _room_for_document(self.length, len(before) + len(frame.middle) + len(frame.end))

        def encode_document(document: str, most: int | None) -> tuple[EncoderInput, int]:
            tokens = self._encode(document)
            allowed = len(tokens) if most is None else min(most, len(tokens))
            behind = (*tokens[: min(allowed, room)], *frame.end)
            parts = (before, frame.middle, behind)
            types = tuple(kind for kind, part in zip(frame.types, parts, strict=True) for _ in part)
            piece = EncoderInput((*before, *frame.middle, *behind), types, min(allowed, room) < len(tokens))
            return piece, self.length - room + allowed

        return encode_document


class JudgeInputs(RerankInputs):
    """For a decoder that answers yes or no, in the words of Qwen3-Reranker."""

    takes_instruction = True

    def __init__(self, vocabulary: Vocabulary, *, length: int) -> None:
        super().__init__(vocabulary, length=length)
        self._opening = tuple(_encode_text(vocabulary, JUDGE_OPENING))
        self._closing = tuple(_encode_text(vocabulary, JUDGE_CLOSING))

    def _prepare(self, query: str, instruction: str | None) -> EncodeDocument:
        prefix = f"<Instruct>: {instruction or JUDGE_INSTRUCTION}\n<Query>: {query}\n<Document>: "
        room = self.length - len(self._opening) - len(self._closing)
        _check_length(self._floor, prefix, self.length, param="query")
        _room_for_document(room, len(self._encode(prefix)))

        def encode_document(document: str, most: int | None) -> tuple[EncoderInput, int]:
            shortened = document if most is None else self._shortened(document, most)
            # As one text: how a document's first word is written depends on what stands before it.
            tokens = self._encode(prefix + shortened)
            cut = len(tokens) > room or shortened != document
            piece = EncoderInput((*self._opening, *tokens[:room], *self._closing), cut=cut)
            return piece, self.length - room + len(tokens)

        return encode_document

    def _shortened(self, document: str, most: int) -> str:
        tokens = self._encode(document)
        return document if len(tokens) <= most else self._vocabulary.decode(tokens[:most], skip_special=False)


def _token_floor(vocabulary: Vocabulary) -> LazyTokenFloor:
    return LazyTokenFloor(lambda: vocabulary.floor(lambda token: spell_token_bytes(vocabulary, token)))


def _check_length(floor: LazyTokenFloor, text: str, most: int, *, param: str | None = None) -> None:
    """Raises InputTooLong for a text that is too long for certain, before any of it is encoded."""
    if len(text) > most // 4 and (least := floor.least(text)) > most:
        raise InputTooLong(needed=least, limit=most, remedy=TOO_LONG_REMEDY, param=param, exactly=False)


def _plain_text_encoder(vocabulary: Vocabulary) -> Callable[[str], list[int]]:
    """Encodes without control tokens: a document may hold the text of one that would end it."""
    controls = ControlTokens.of(vocabulary.added, source="").all
    finder = token_finder(controls)
    framed = vocabulary.framed(controls) if controls else None

    def encode(text: str) -> list[int]:
        quoted = finder.offsets(text)
        if framed is None or not (quoted or framed.always):
            return _encode_text(vocabulary, text)
        return framed.encode(text, (), quoted)[0]

    return encode


def answer_tokens(vocabulary: Vocabulary) -> tuple[int, int]:
    """The tokens for yes and no. Raises ModelError where the vocabulary lacks a token of a judge's prompt."""
    found = [(piece, vocabulary.id_of(piece)) for piece in ("yes", "no", "<|im_start|>", "<|im_end|>")]
    for piece, token in found:
        if token is None:
            raise ModelError(f"The model cannot judge by yes and no: its vocabulary has no token {piece!r}")
    yes, no = (token for _, token in found[:2])
    assert yes is not None and no is not None
    return yes, no


@dataclass(frozen=True, slots=True)
class PairFrame:
    """What the model wants before, between and behind two texts, and the types of the three parts they make."""

    begin: tuple[int, ...]
    middle: tuple[int, ...]
    end: tuple[int, ...]
    types: tuple[int, int, int]  # of the first text and what is before it, of the middle, of the second text


def _room_for_document(length: int, used: int) -> int:
    """Tokens that are left for a document. Raises InputTooLong where there are none."""
    if used >= length:
        remedy = "Shorten the query: it leaves no room for a document."
        raise InputTooLong(needed=used + 1, limit=length, remedy=remedy, param="query")
    return length - used


def _encode_text(vocabulary: Vocabulary, text: str) -> list[int]:
    checkpoint()
    return vocabulary.encode(text, add_special=False)


def _around_one(vocabulary: Vocabulary) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the tokenizer puts before and behind a single text."""
    inner, whole = vocabulary.encode("a", add_special=False), vocabulary.encode("a", add_special=True)
    at = _index_within(inner, whole, 0)
    return tuple(whole[:at]), tuple(whole[at + len(inner) :])


def _around_two(vocabulary: Vocabulary) -> PairFrame:
    first, second = (vocabulary.encode(text, add_special=False) for text in ("a", "b"))
    whole, types = vocabulary.encode_pair("a", "b")
    one = _index_within(first, whole, 0)
    two = _index_within(second, whole, one + len(first))
    behind = one + len(first)
    kinds = (types[one], types[behind], types[two])
    return PairFrame(tuple(whole[:one]), tuple(whole[behind:two]), tuple(whole[two + len(second) :]), kinds)


def _index_within(inner: list[int], whole: list[int], since: int) -> int:
    for at in range(since, len(whole) - len(inner) + 1):
        if inner and whole[at : at + len(inner)] == inner:
            return at
    raise ModelError(
        "The tokenizer writes a text differently when it adds its special tokens, which encoders cannot use"
    )


def _text_end_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The tokens that begin and end a text, by role. A token is a string, or an object with its text."""
    stated = {name: config.get(name) for name in ("bos_token", "eos_token")}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in stated.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str) and text}
