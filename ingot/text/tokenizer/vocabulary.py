"""The library behind a tokenizer: `tokenizers` for nearly every model, transformers for the few that have no such form.

Both kinds have the same interface, and any thread may use them once they are built. transformers is imported only for a
model that needs it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Library

from ingot.errors import BadRequest, ModelError
from ingot.text.tokenizer.length_bounds import TokenFloor, check_growth, component_steps
from ingot.text.tokenizer.special_tokens import (
    ControlTokenEncoder,
    FastControlTokenEncoder,
    SlowControlTokenEncoder,
    whole_characters,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizer

# How token pieces spell bytes: GPT-2's byte alphabet, sentencepiece's marks, or plain text.
PieceSpelling = Literal["bytes", "sentencepiece", "plain"]

_LOCAL_DECODERS = {"Replace", "ByteFallback", "Metaspace", "WordPiece", "Strip"}


class FastVocabulary:
    """A `tokenizers.Tokenizer`, never changed after construction."""

    def __init__(self, library: Library) -> None:
        self._library = library
        _disable_word_cache(library)
        self.spelling = _spelling(component_steps(library.decoder, "decoders"))
        added = library.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self.added: Mapping[str, bool] = {token.content: token.special for token in added.values() if token.content}
        """Tokens that are found in a text whole, and whether each is special."""
        self.size = max(library.get_vocab_size(), *(id + 1 for id in added), 0)
        # Not those that consume white space before them, depend on what stands there, or are found only after the
        # text was normalized.
        self.set_apart = tuple(
            token.content
            for token in added.values()
            if token.content and not (token.lstrip or token.single_word or token.normalized)
        )
        """Tokens that are found in a text before anything else is, wherever they stand."""

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        # The batch calls let other threads run meanwhile; the fast one skips the offsets that nobody reads here.
        with whole_characters():
            [encoding] = self._library.encode_batch_fast([text], add_special_tokens=add_special)
        return encoding.ids

    def encode_with_ends(self, text: str, *, add_special: bool) -> tuple[list[int], list[int]]:
        """The ids, and for each the number of characters up to its end, in order."""
        with whole_characters():
            [encoding] = self._library.encode_batch([text], add_special_tokens=add_special)
        return encoding.ids, [end for _, end in encoding.offsets]

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """The ids of two texts as one input, with what the model wants around them, and which text each belongs to."""
        encoding = self._library.encode(first, second)
        return encoding.ids, encoding.type_ids

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        try:
            return self._library.decode(ids, skip_special_tokens=skip_special)
        except OverflowError:
            raise BadRequest("A token id must be between 0 and the size of the vocabulary.") from None

    def piece(self, token: int) -> str | None:
        """The token as the vocabulary spells it; None for an id that has no token."""
        return self._library.id_to_token(token)

    def id_of(self, piece: str) -> int | None:
        return self._library.token_to_id(piece)

    def framed(self, controls: Collection[str]) -> ControlTokenEncoder:
        """An encoder for which these added tokens are text where they are quoted."""
        return FastControlTokenEncoder(self._library, controls)

    def floor(self, spell: Callable[[int], bytes]) -> TokenFloor | None:
        """How few tokens a text can have, if there is a bound; `spell` gives the bytes of a token."""
        pieces = [spell(token) for token in range(self.size)] + [token.encode() for token in self.added]
        if self.spelling != "bytes":  # a mark for white space may also stand for itself
            pieces += [(self.piece(token) or "").encode() for token in range(self.size)]
        return TokenFloor.of(self._library, pieces)


class SlowVocabulary:
    """A transformers tokenizer that runs in Python: sentencepiece models that have no `tokenizers` form."""

    spelling: PieceSpelling = "sentencepiece"
    set_apart: tuple[str, ...] = ()

    def __init__(self, slow: PreTrainedTokenizer) -> None:
        self._slow = slow
        self.special_ids = frozenset(slow.all_special_ids)
        self.added: Mapping[str, bool] = {
            token.content: id in self.special_ids for id, token in slow.added_tokens_decoder.items()
        }
        self.size = len(slow)

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        return self._slow.encode(text, add_special_tokens=add_special)

    def encode_with_ends(self, text: str, *, add_special: bool) -> tuple[list[int], list[int]]:
        # This kind has no offsets. Its pieces show how long they are, except for what is normalized away before.
        ids = self.encode(text, add_special=add_special)
        return ids, list(accumulate(_piece_characters(self.piece(id) or "") for id in ids))

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        encoding = self._slow(first, second, return_token_type_ids=True)
        return encoding["input_ids"], encoding["token_type_ids"]

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        valid = [id for id in ids if 0 <= id < self.size]
        text = self._slow.decode(valid, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
        return cast(str, text)

    def piece(self, token: int) -> str | None:
        return self._slow.convert_ids_to_tokens(token) if 0 <= token < self.size else None

    def id_of(self, piece: str) -> int | None:
        id = cast(int | None, self._slow.convert_tokens_to_ids(piece))
        return id if id is not None and self.piece(id) == piece else None

    def framed(self, controls: Collection[str]) -> ControlTokenEncoder:
        return SlowControlTokenEncoder(self._slow, controls)

    def floor(self, spell: Callable[[int], bytes]) -> TokenFloor | None:
        return None


Vocabulary = FastVocabulary | SlowVocabulary


def _piece_characters(piece: str) -> int:
    """How many characters a sentencepiece piece stands for; one that is a byte, whether a character begins with it."""
    byte = re.fullmatch("<0x([0-9A-F]{2})>", piece)
    return len(piece) if byte is None else int(int(byte[1], 16) & 0xC0 != 0x80)


def load_vocabulary(folder: Path, config: Mapping[str, Any], named: Mapping[str, str]) -> Vocabulary:
    """The vocabulary in `folder`; `named` are the special tokens by their role, such as bos_token."""
    if not (folder / "tokenizer.json").is_file():
        return _load_through_transformers(folder)
    check_growth(folder / "tokenizer.json")
    try:
        library = Library.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises no narrower class
        raise ModelError(f"tokenizer.json cannot be read: {error}") from error
    # Left in the file by its author's training run; a server must neither cut nor fill a prompt.
    library.no_truncation()
    library.no_padding()
    _declare_added_tokens(library, config, named)
    _set_prompt_ends(library, config, named)
    return FastVocabulary(library)


def _disable_word_cache(library: Library) -> None:
    """Each thread that encodes remembers a model's words and how they are cut, megabytes of them, for as long as the
    thread lives: also when the model is gone. That saves a tenth to a quarter of the time where a text comes again."""
    resize = getattr(library.model, "_resize_cache", None)  # models of whole words cache none
    if resize is not None:
        resize(0)


def _declare_added_tokens(library: Library, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Added tokens of tokenizer_config.json override or complete those of tokenizer.json."""
    valid = library.get_added_tokens_decoder()
    declared = {int(id): dict(token) for id, token in (config.get("added_tokens_decoder") or {}).items()}
    for id, fields in sorted(declared.items()):
        token = AddedToken(**{k: v for k, v in fields.items() if k != "__type"})
        if id in valid and valid[id].content == token.content and valid[id].special == token.special:
            continue
        library.add_tokens([token])
        if library.token_to_id(token.content) != id:
            raise ModelError(
                f"tokenizer_config.json gives the token {token.content!r} the id {id}, "
                f"but by tokenizer.json it would be {library.token_to_id(token.content)}."
            )
    present = [text for text in named.values() if library.token_to_id(text) is not None]
    library.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in present])


def _set_prompt_ends(library: Library, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """`add_bos_token` and `add_eos_token`, where the model has them, replace the file's own post-processor."""
    if config.get("add_bos_token") is None and config.get("add_eos_token") is None:
        return
    bos = named.get("bos_token") if config.get("add_bos_token") else None
    eos = named.get("eos_token") if config.get("add_eos_token") else None
    ends = {text: library.token_to_id(text) for text in (bos, eos) if text is not None}
    if None in ends.values():
        missing = next(text for text, id in ends.items() if id is None)
        raise ModelError(f"tokenizer_config.json adds {missing!r} to prompts, but the vocabulary has no such token.")
    library.post_processor = processors.TemplateProcessing(
        single=[text for text in (bos, "$A", eos) if text is not None], special_tokens=list(ends.items())
    )


def _load_through_transformers(folder: Path) -> Vocabulary:
    # Imported here because it takes seconds, which models with a tokenizer.json need not spend.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # each kind of tokenizer fails differently; all mean the same to the user
        reason = str(error).replace(str(folder), folder.name).partition("\n")[0]
        raise ModelError(f"There is no tokenizer in {folder.name} that can be loaded: {reason}") from error
    if isinstance(loaded, PreTrainedTokenizerFast):
        return FastVocabulary(loaded.backend_tokenizer)
    return SlowVocabulary(loaded)


def _spelling(chain: list[dict[str, Any]]) -> PieceSpelling:
    """How pieces are spelled; raises ModelError for a decoder whose text cannot be streamed token by token."""
    kinds = [step["type"] for step in chain]
    if kinds == ["ByteLevel"]:
        return "bytes"
    before, after = chain, []
    if "Fuse" in kinds:
        before, after = chain[: kinds.index("Fuse")], chain[kinds.index("Fuse") + 1 :]
    for step in before:
        if step["type"] not in _LOCAL_DECODERS:
            raise ModelError(f"The tokenizer's decoder {step['type']!r} is not supported.")
    for step in after:
        if not _keeps_tokens_apart(step):
            raise ModelError(f"The tokenizer's decoder {step['type']!r} is not supported after 'Fuse'.")
    marked = any(step["type"] == "Metaspace" or "▁" in json.dumps(step, ensure_ascii=False) for step in chain)
    return "sentencepiece" if marked or "ByteFallback" in kinds else "plain"


def _keeps_tokens_apart(step: Mapping[str, Any]) -> bool:
    """Whether a decoder that sees the joined text still treats every token by itself, but for the text's start."""
    if step["type"] == "Replace":
        return len(step["pattern"].get("String", "")) == 1
    return step["type"] == "Strip" and step["stop"] == 0
