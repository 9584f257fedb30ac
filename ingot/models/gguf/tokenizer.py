"""Builds a Hugging Face tokenizer from the vocabulary in a GGUF file's metadata."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from ingot.errors import ModelError
from ingot.models.gguf.pretokenizers import cut

# Texts of tokens that end an answer, whichever of them the file names as its end token.
ENDINGS = frozenset(
    {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>"}
)
SPACE_MARK = "\u2581"


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What goes into the model's folder: tokenizer.json, tokenizer_config.json, and the ids for the other configs."""

    tokenizer: Tokenizer
    config: dict[str, Any]
    named_templates: dict[str, str]  # chat templates besides the default one
    bos_id: int | None
    eos_ids: tuple[int, ...]  # the first is the file's own end token
    pad_id: int | None


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    metadata: Mapping[str, Any]
    tokens: list[str]
    types: list[int]
    ids: dict[str, int]

    def option(self, name: str) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{name}")

    def flag(self, name: str, default: bool) -> bool:
        value = self.option(name)
        return default if value is None else bool(value)

    def id(self, name: str) -> int | None:
        """A special token's id, by its key in the metadata."""
        value = self.option(f"{name}_token_id")
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise ModelError(f"tokenizer.ggml.{name}_token_id is {value!r}, which is no token")
        return value

    def token(self, name: str) -> str | None:
        number = self.id(name)
        return None if number is None else self.tokens[number]

    def of_type(self, *types: TokenType) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in types]


def build_tokenizer(metadata: Mapping[str, Any], embedding_rows: int) -> TokenizerFiles:
    """The tokenizer that the metadata describes. Raises ModelError for one that would tokenize differently."""
    vocabulary = _read_vocabulary(metadata, embedding_rows)
    kind = vocabulary.option("model")
    if kind == "gpt2":
        tokenizer, begins = _byte_level(vocabulary)
    elif kind == "llama":
        tokenizer, begins = _sentencepiece(vocabulary), True
    else:
        raise ModelError(f"tokenizer.ggml.model is {kind!r}; gpt2 and llama are supported")
    _add_tokens(tokenizer, vocabulary)
    _add_ends(tokenizer, vocabulary, begins)
    default, named = _templates(metadata)
    return TokenizerFiles(
        tokenizer=tokenizer,
        config=_config(vocabulary, default),
        named_templates=named,
        bos_id=vocabulary.id("bos"),
        eos_ids=_eos_ids(vocabulary),
        pad_id=vocabulary.id("padding"),
    )


def _read_vocabulary(metadata: Mapping[str, Any], embedding_rows: int) -> _Vocabulary:
    tokens = _listed(metadata.get("tokenizer.ggml.tokens"), str)
    types = _listed(metadata.get("tokenizer.ggml.token_type"), int)
    if tokens is None or types is None:
        raise ModelError("the file lacks its vocabulary (tokenizer.ggml.tokens and tokenizer.ggml.token_type)")
    if len(tokens) != len(types):
        raise ModelError(f"the file has {len(tokens)} tokens but {len(types)} token types")
    if len(tokens) > embedding_rows:
        raise ModelError(f"the file has {len(tokens)} tokens but 'token_embd.weight' has {embedding_rows} rows")
    ids = {token: number for number, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(token for number, token in enumerate(tokens) if ids[token] != number)
        raise ModelError(f"the file has the token {twice!r} twice")
    return _Vocabulary(metadata, tokens, types, ids)


def _listed(value: Any, kind: type) -> list[Any] | None:
    """`value`, if it is a list of such things."""
    return value if isinstance(value, list) and all(isinstance(item, kind) for item in value) else None


def _byte_level(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    if vocabulary.flag("add_space_prefix", False):
        raise ModelError("tokenizer.ggml.add_space_prefix is set, which is not supported for gpt2 vocabularies")
    merges = _listed(vocabulary.option("merges"), str)
    if merges is None:
        raise ModelError("the file lacks tokenizer.ggml.merges")
    cutting = cut(vocabulary.option("pre"))
    tokenizer = Tokenizer(_bpe(vocabulary, [_pair(merge) for merge in merges], ignore_merges=cutting.whole_words))
    if cutting.nfc:
        tokenizer.normalizer = cutting.normalizer()
    tokenizer.pre_tokenizer = cutting.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, cutting.begins


def _bpe(vocabulary: _Vocabulary, merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    for left, right in merges:
        for token in (left, right, left + right):
            if token not in vocabulary.ids:
                raise ModelError(f"the vocabulary merges {left!r} and {right!r}, but {token!r} is no token")
    return models.BPE(vocab=vocabulary.ids, merges=merges, **options)


def _pair(merge: str) -> tuple[str, str]:
    gap = merge.find(" ", 1)
    if gap < 0 or gap + 1 == len(merge):
        raise ModelError(f"tokenizer.ggml.merges holds {merge!r}, which is no pair of tokens")
    return merge[:gap], merge[gap + 1 :]


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    if vocabulary.flag("remove_extra_whitespaces", False) or vocabulary.option("precompiled_charsmap"):
        raise ModelError("the vocabulary normalises its text (tokenizer.ggml), which is not supported")
    prefixed = vocabulary.flag("add_space_prefix", True)
    bytes_known = bool(vocabulary.of_type(TokenType.BYTE))
    model = _bpe(
        vocabulary,
        _merges_by_score(vocabulary),
        unk_token=vocabulary.token("unknown"),
        fuse_unk=True,
        byte_fallback=bytes_known,
    )
    tokenizer = Tokenizer(model)
    mark = normalizers.Replace(" ", SPACE_MARK)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), mark]) if prefixed else mark
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return tokenizer


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """SentencePiece joins any two neighbours that make a token, the best score first: merges, best first."""
    scores = _listed(vocabulary.option("scores"), float)
    if scores is None or len(scores) != len(vocabulary.tokens):
        raise ModelError("the file lacks tokenizer.ggml.scores, or has another number of them than tokens")
    # A user-defined token with a space in it is met only after spaces were marked, so by merging.
    spaced = [token for token in vocabulary.of_type(TokenType.USER_DEFINED) if SPACE_MARK in token]
    joined = vocabulary.of_type(TokenType.NORMAL) + spaced
    known = frozenset(joined)
    ranked = sorted(joined, key=lambda token: -scores[vocabulary.ids[token]])
    return [
        (token[:middle], token[middle:])
        for token in ranked
        for middle in range(1, len(token))
        if token[:middle] in known and token[middle:] in known
    ]


def _add_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Makes the tokens that are never the result of merging known by their text."""
    special = {TokenType.CONTROL}
    if vocabulary.option("model") == "llama":
        special.add(TokenType.UNKNOWN)
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind in special, normalized=False)
            for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
            if token and (kind in special or kind == TokenType.USER_DEFINED)
        ]
    )


def _add_ends(tokenizer: Tokenizer, vocabulary: _Vocabulary, begins: bool) -> None:
    """Texts begin with BOS and end with EOS where the file says so."""
    bos, eos = vocabulary.token("bos"), vocabulary.token("eos")
    add_bos = vocabulary.flag("add_bos_token", begins and bos is not None)
    add_eos = vocabulary.flag("add_eos_token", False)
    if add_bos and bos is None:
        raise ModelError("tokenizer.ggml.add_bos_token is set, but there is no tokenizer.ggml.bos_token_id")
    if add_eos and eos is None:
        raise ModelError("tokenizer.ggml.add_eos_token is set, but there is no tokenizer.ggml.eos_token_id")
    before, after = [bos] if add_bos and bos else [], [eos] if add_eos and eos else []
    if not before and not after:
        return
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{token}:1" for token in before), "$B:1", *(f"{token}:1" for token in after)],
        special_tokens=[(token, vocabulary.ids[token]) for token in {*before, *after}],
    )


def _eos_ids(vocabulary: _Vocabulary) -> tuple[int, ...]:
    eos = vocabulary.id("eos")
    if eos is None:
        raise ModelError("the file lacks tokenizer.ggml.eos_token_id")
    named = [number for number in (vocabulary.id("eot"), vocabulary.id("eom")) if number is not None]
    by_text = [vocabulary.ids[token] for token in vocabulary.of_type(TokenType.CONTROL) if token in ENDINGS]
    return tuple(dict.fromkeys([eos, *named, *sorted(by_text)]))


def _config(vocabulary: _Vocabulary, template: str | None) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": vocabulary.token("bos"),
        "eos_token": vocabulary.token("eos"),
        "unk_token": vocabulary.token("unknown"),
        "pad_token": vocabulary.token("padding"),
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    return {key: value for key, value in config.items() if value is not None}


def _templates(metadata: Mapping[str, Any]) -> tuple[str | None, dict[str, str]]:
    prefix = "tokenizer.chat_template."
    named = {key.removeprefix(prefix): text for key, text in metadata.items() if key.startswith(prefix)}
    for name in named:
        if not re.fullmatch(r"[\w-]+", name):  # it becomes a file's name
            raise ModelError(f"the file has a chat template of the odd name {name!r}")
    default = metadata.get("tokenizer.chat_template")
    for text in (default, *named.values()):
        if not isinstance(text, str | None):
            raise ModelError("tokenizer.chat_template is no text")
    return default, named
