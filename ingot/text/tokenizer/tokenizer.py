"""A model's tokenizer: text to ids and back, its special tokens, and its chat template.

A `Tokenizer` never changes once it is loaded. Any thread may use it; each sequence takes its own detokenizer.
`PromptTranslation` is a prompt in another tokenizer's tokens, for draft models with a vocabulary of their own: which of
them stand for which of the prompt's.
"""

from __future__ import annotations

from bisect import bisect_right
from codecs import getincrementaldecoder
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ingot.errors import ModelError
from ingot.text.chat_template.chat_template import ChatTemplate, template_of_family
from ingot.text.input_files import read_json_object
from ingot.text.tokenizer import vocabulary
from ingot.text.tokenizer.detokenizer import ByteDetokenizer, Detokenizer, PieceDetokenizer, spell_token_bytes
from ingot.text.tokenizer.length_bounds import LazyTokenFloor
from ingot.text.tokenizer.special_tokens import ControlTokens, Infill, token_finder
from ingot.text.tokenizer.vocabulary import Vocabulary

_LEADING_TEXT = "\u263a"  # a character that no vocabulary joins with what follows it
_NAMED_TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Unchanging once loaded; any thread may use it, and each sequence takes its own `detokenizer()`.

    `eos_ids` are all ids that end an answer by any of the model's files. `template` is None for a model that has no
    chat template. `vocab_size` is one more than the largest id; a model may have more rows than that. `infill` is None
    where no tokens stand for filling in the middle.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        named: Mapping[str, str],
        eos_ids: Iterable[int] = (),
        template: ChatTemplate | None = None,
        response_template: Any = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._bytes: dict[int, bytes] = {}
        self._special_within: dict[
            frozenset[str], frozenset[int]
        ] = {}  # special tokens; as many entries as formats are named
        self.template = template
        self.response_template = response_template  # as in the checkpoint
        self.bos_id = vocabulary.id_of(named["bos_token"]) if "bos_token" in named else None
        eos = vocabulary.id_of(named["eos_token"]) if "eos_token" in named else None
        self.eos_ids = frozenset(eos_ids) | (frozenset() if eos is None else {eos})
        self.special_ids = vocabulary.special_ids
        self.vocab_size = vocabulary.size
        self.controls = ControlTokens.of(vocabulary.added, template.source if template is not None else "")
        self.infill = Infill.of(vocabulary.id_of)
        self._framed = vocabulary.framed(self.controls.all)
        self._floor = LazyTokenFloor(lambda: vocabulary.floor(self.token_bytes))
        self._anchor = None if vocabulary.spelling == "bytes" else _find_anchor_token(vocabulary)

    @classmethod
    def load(cls, folder: Path, template: str | None = None) -> Tokenizer:
        """The tokenizer of the model in `folder`. `template`, a Jinja source, replaces the model's own.

        Raises ModelError where a file is missing, broken or asks for what cannot be honoured.
        """
        config = read_json_object(folder / "tokenizer_config.json")
        named = _named_tokens(config, read_json_object(folder / "special_tokens_map.json"))
        sources = {"default": template} if template is not None else _template_sources(folder, config)
        return cls(
            vocabulary.load_vocabulary(folder, config, named),
            named=named,
            eos_ids=_eos_ids(folder),
            template=_chat_template(sources, named),
            response_template=config.get("response_template"),
        )

    def encode(self, text: str, *, add_special: bool, quoted: Collection[int] | None = None) -> list[int]:
        """The ids of `text`, in which the text of a special token becomes that token.

        - `add_special` adds what the model wants around a bare prompt, such as its first token; a rendered chat
          already has it.
        - `quoted`: a control token that begins at one of these offsets is text. None: every one is a token.
        """
        if self._controls_are_meant(quoted):
            return self._vocabulary.encode(text, add_special=add_special)
        return self.encode_with_offsets(text, (), add_special=add_special, quoted=quoted)[0]

    def encode_with_offsets(
        self, text: str, offsets: Sequence[int], *, add_special: bool, quoted: Collection[int] | None = None
    ) -> tuple[list[int], list[int]]:
        """The ids of `text`, and how many of them end before or at each of the `offsets`."""
        if self._controls_are_meant(quoted):
            ids, ends = self._vocabulary.encode_with_ends(text, add_special=add_special)
            return ids, [bisect_right(ends, offset) for offset in offsets]
        ids, counts = self._framed.encode(text, offsets, quoted or ())
        if not add_special:
            return ids, counts
        begin, end = self._around(text)
        return [*begin, *ids, *end], [len(begin) + count for count in counts]

    def encode_plain(self, text: str, *, leads: bool = True) -> list[int]:
        """The ids of `text`, in which nothing is a control token. One that does not lead gets no space put before it,
        as sentencepiece models do to the first word of a text."""
        if leads or self._vocabulary.spelling != "sentencepiece":
            return self.encode(text, add_special=False, quoted=token_finder(self.controls.all).offsets(text))
        first = self.encode_plain(_LEADING_TEXT)
        whole = self.encode_plain(_LEADING_TEXT + text)
        return whole[len(first) :] if whole[: len(first)] == first else self.encode_plain(text)

    @cached_property
    def first_ids(self) -> tuple[int, ...]:
        """What the model wants before a bare prompt."""
        return tuple(self._around("a")[0])

    def _controls_are_meant(self, quoted: Collection[int] | None) -> bool:
        return quoted is None or not (quoted or self._framed.always)

    def _around(self, text: str) -> tuple[list[int], list[int]]:
        """What the tokenizer puts around a bare text."""
        inner, whole = (self._vocabulary.encode(text, add_special=each) for each in (False, True))
        at = next((at for at in range(len(whole) - len(inner) + 1) if whole[at : at + len(inner)] == inner), 0)
        return whole[:at], whole[at + len(inner) :]

    def least_tokens(self, text: str) -> int:
        """No encoding of `text` has fewer tokens than this. Fast, also for a text of any length."""
        return self._floor.least(text)

    def sets_apart(self, text: str) -> bool:
        """Whether `text` begins with a token that is encoded as such whatever stands before it."""
        return text.startswith(self._vocabulary.set_apart)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; an id that has no token has no text."""
        return self._vocabulary.decode(ids, skip_special=skip_special)

    def token_bytes(self, token: int) -> bytes:
        """The token's own bytes, which may be part of a character. A special token's are its name's."""
        spelled = self._bytes.get(token)
        if spelled is None:
            spelled = self._bytes[token] = spell_token_bytes(self._vocabulary, token)
        return spelled

    def token_text(self, token: int) -> str:
        """The token alone, with U+FFFD where its bytes are not whole characters."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def detokenizer(self, shown_ids: frozenset[int] = frozenset()) -> Detokenizer:
        """One sequence's. Special tokens have no text, except those to be shown."""
        if self._anchor is None:
            return ByteDetokenizer(self.token_bytes, self.special_ids - shown_ids)
        return PieceDetokenizer(self._vocabulary, self._anchor, shown_ids)

    def special_within(self, markers: frozenset[str]) -> frozenset[int]:
        """The special tokens whose text stands in one of the markers. Cached, as each sequence needs them."""
        found = self._special_within.get(markers)
        if found is None:
            texts = {token: self.token_text(token) for token in self.special_ids}
            found = frozenset(id for id, text in texts.items() if any(text in marker for marker in markers))
            self._special_within[markers] = found
        return found


def _find_anchor_token(vocabulary: Vocabulary) -> int:
    """A token that decodes to the same plain text whatever follows it."""
    letters = (vocabulary.id_of(chr(code)) for code in range(ord("a"), ord("z") + 1))
    for id in (*letters, *range(vocabulary.size)):
        if id is None or id in vocabulary.special_ids:
            continue
        text = vocabulary.decode([id], skip_special=True)
        if text.isascii() and text.isalnum() and vocabulary.piece(id) == text:
            return id
    raise ModelError("The tokenizer has no token of plain ASCII text, which streaming its text relies on.")


def _named_tokens(*configs: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by role; the first file that has one wins. A token is a string, or an object with its text."""
    found: dict[str, str] = {}
    for config in configs:
        for name in _NAMED_TOKEN_ROLES:
            token = config.get(name)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str) and text and name not in found:
                found[name] = text
    return found


def _eos_ids(folder: Path) -> set[int]:
    config = read_json_object(folder / "config.json")
    inner = config.get("text_config")
    sources = [read_json_object(folder / "generation_config.json"), config, inner if isinstance(inner, dict) else {}]
    ids: set[int] = set()
    for source in sources:
        stated = source.get("eos_token_id")
        ids.update(id for id in (stated if isinstance(stated, list) else [stated]) if isinstance(id, int))
    return ids


def _template_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The model's chat templates by name. A file of its own wins over the configuration's copy."""
    stated = config.get("chat_template") or read_json_object(folder / "chat_template.json").get("chat_template") or {}
    if isinstance(stated, str):
        stated = {"default": stated}
    elif isinstance(stated, list):
        stated = {entry["name"]: entry["template"] for entry in stated}
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    sources = dict(stated) | {name: _read_text(path) for name, path in files.items()}
    model_type = str(read_json_object(folder / "config.json").get("model_type"))
    own = template_of_family(model_type, sources.get("default"))
    return sources if own is None else {"default": own}


def chat_template_source(folder: Path) -> str | None:
    """The model's main chat template, without its tokenizer. Raises ModelError."""
    sources = _template_sources(folder, read_json_object(folder / "tokenizer_config.json"))
    return sources.get("default") or next(iter(sources.values()), None)


def _chat_template(sources: Mapping[str, str], named: Mapping[str, str]) -> ChatTemplate | None:
    if not sources:
        return None
    main = sources.get("default") if len(sources) > 1 else next(iter(sources.values()))
    if main is None:
        raise ModelError(
            f"The model has several chat templates ({', '.join(sources)}) and none is called 'default'; "
            "choose one with --chat-template FILE."
        )
    return ChatTemplate(main, tool_source=sources.get("tool_use"), tokens=named)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path.name} is not UTF-8 text: {error}") from error


TokenNumbers = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class PromptTranslation:
    """`tokens` are another tokenizer's; `ends` is, for each own token, how many of them end where it does or before."""

    tokens: tuple[int, ...]
    ends: tuple[int, ...]

    @classmethod
    def of(cls, prompt: Sequence[int], ours: Tokenizer, theirs: Tokenizer) -> PromptTranslation:
        """Special tokens are translated by their names."""
        text, ends = _prompt_text(prompt, ours)
        tokens, counts = theirs.encode_with_offsets(text, ends, add_special=True)
        return cls(tuple(tokens), tuple(counts))

    def back(self, numbers: TokenNumbers) -> TokenNumbers:
        """For each own token the mean of the numbers of those that end in it, or that of the one that it is part of."""
        begins = np.minimum([0, *self.ends[:-1]], len(numbers) - 1)
        ends = np.maximum(self.ends, begins + 1)
        sums = np.concatenate([[0.0], np.cumsum(numbers, dtype=np.float64)])
        return ((sums[ends] - sums[begins]) / (ends - begins)).astype(np.float32)

    def places(self, lengths: Iterable[int]) -> frozenset[int]:
        """How many of their tokens are there when so many of ours are."""
        return frozenset(self.ends[length - 1] for length in lengths if 0 < length <= len(self.ends))


TranslatePrompt = Callable[[tuple[int, ...]], PromptTranslation]


def _prompt_text(prompt: Sequence[int], tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """The text of a prompt, and how many characters of it are complete after each token: one may take several."""
    decoder, pieces, ends, length = getincrementaldecoder("utf-8")("replace"), [], [], 0
    for token in prompt:
        piece = decoder.decode(tokenizer.token_bytes(token))
        pieces.append(piece)
        length += len(piece)
        ends.append(length)
    return "".join(pieces) + decoder.decode(b"", final=True), ends
